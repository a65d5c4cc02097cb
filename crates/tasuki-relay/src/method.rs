//! The way in which a NIC goes to another node: a pure function of the card's abilities, the trust between the
//! nodes, and the request.
//!
//! | method  | changes                                              | needs                                                                  |
//! |---------|------------------------------------------------------|------------------------------------------------------------------------|
//! | keep    | the right to drive                                   | rings in the NIC's own memory, and trust: both nodes have that memory  |
//! | mbb     | steering, to a queue that runs already               | a queue to spare, and trust: all queues of a card reach the same memory |
//! | repoint | the eight values of S0                               | a card whose ring bases can be written without a reset of its link     |
//! | cold    | everything: reset, initialise, wait for the link     | nothing                                                                |

use std::ops::RangeInclusive;

use crate::table::{All, listed};

listed! {
    /// A way for a NIC to change hands.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub enum Method {
        /// Only the right to drive moves.
        Keep,
        /// Make before break: the new owner's queue is up before traffic is steered to it.
        Mbb,
        /// The ring bases, the cursors and the interrupt are written anew, and nothing else.
        Repoint,
        /// Reset and start.
        Cold,
    }
}

impl std::fmt::Display for Method {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Method::Keep => "keep",
            Method::Mbb => "mbb",
            Method::Repoint => "repoint",
            Method::Cold => "cold",
        })
    }
}

impl Method {
    /// Returns whether the new owner has memory of its own for the card. If the nodes do not trust each other, this
    /// is so with `cold`, too.
    pub fn is_apart(self, trust: Trust) -> bool {
        match self {
            Method::Keep => false,
            Method::Mbb | Method::Repoint => true,
            Method::Cold => trust == Trust::None,
        }
    }
}

/// How a card takes other ring bases while its link stays up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Repointing {
    /// Base and cursor registers are written while its units are off, and the partner is asked to pause (82574).
    Paused,
    /// As `Paused`, but the card cannot ask for a pause: frames that arrive meanwhile are lost (RTL8139).
    Unpaused,
    /// The card cannot take other ring bases.
    Never,
}

/// Abilities of a card and its bus.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Card {
    /// Whether its rings and frames are in memory of its own, which another process can map as it is.
    pub own_memory: bool,
    /// Whether it has a queue to spare to which traffic can be steered.
    pub spare_queue: bool,
    /// Whether and how its rings can move to other memory.
    pub repointing: Repointing,
    /// Whether the next owner can undo, or see, all that an owner can leave in the card, while the card runs.
    pub fenced: bool,
}

/// Trust between two nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Trust {
    /// Each may break the other.
    Full,
    /// Neither may read the other's data, nor harm it.
    None,
}

/// A method, and the reason for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// Method by which the NIC changes nodes.
    pub method: Method,
    /// The reason, as the end of the sentence "the NIC goes by METHOD: ".
    pub because: &'static str,
}

/// Reason why a requested method is not possible.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NotPossible {
    /// The rings are in the old node's memory.
    #[error("keep needs a NIC whose rings are in memory of its own")]
    ForeignMemory,
    /// The old node's memory would become the new node's.
    #[error(
        "keep needs nodes that trust each other (trusts in the configuration): the new node gets the old one's memory, and the old one's settings stay"
    )]
    SharedMemory,
    /// The card has one queue.
    #[error("mbb needs a card with a receive queue to spare to which traffic can be steered, and this one has none")]
    NoSpareQueue,
    /// All queues reach the same memory.
    #[error(
        "mbb needs nodes that trust each other (trusts in the configuration): while both queues run, each node's queue reaches the other's memory"
    )]
    SharedReach,
    /// The new node cannot see all that the last owner has left in the card.
    #[error(
        "repoint between nodes that do not trust each other needs a card whose settings the new node can all undo or read, and this one has others"
    )]
    Illegible,
    /// The ring bases are fixed once the card runs.
    #[error("repoint needs a card whose ring bases can be written while its link stays up, and this one's cannot")]
    FixedBases,
    /// No worker drives the card.
    #[error(
        "mbb, and repoint between nodes that trust each other, need a worker that lets the card go, and none drives it"
    )]
    NoGiver,
}

/// A requested method that is not possible.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{why}; if you name no method, it goes by {best}")]
pub struct Refused {
    /// The reason.
    pub why: NotPossible,
    /// The best that is possible.
    pub best: Method,
}

/// Returns the reason why `card` can go by `method` from one node to another.
///
/// # Errors
/// The reason why it cannot.
pub fn possible(card: &Card, trust: Trust, method: Method) -> Result<&'static str, NotPossible> {
    match (method, trust) {
        (Method::Keep, _) if !card.own_memory => Err(NotPossible::ForeignMemory),
        (Method::Keep, Trust::None) => Err(NotPossible::SharedMemory),
        (Method::Keep, Trust::Full) => Ok("its rings stay where they are, and nothing that the card knows changes"),
        (Method::Mbb, _) if !card.spare_queue => Err(NotPossible::NoSpareQueue),
        (Method::Mbb, Trust::None) => Err(NotPossible::SharedReach),
        (Method::Mbb, Trust::Full) => Ok("its new queue runs before traffic is steered to it"),
        (Method::Repoint, Trust::None) if card.repointing != Repointing::Never && !card.fenced => {
            Err(NotPossible::Illegible)
        }
        (Method::Repoint, _) => match card.repointing {
            Repointing::Paused => Ok("its partner pauses while the ring bases are written, and the link stays up"),
            Repointing::Unpaused => Ok(
                "the link stays up; frames that come while the ring bases are written are lost, for the card cannot ask for a pause",
            ),
            Repointing::Never => Err(NotPossible::FixedBases),
        },
        (Method::Cold, _) => {
            Ok("it is reset and waits for its link: frames are lost until then, and any card can do it")
        }
    }
}

/// Returns the requested method, or the best that card and trust allow: first the methods that lose no frames, and
/// among these the one that changes least.
///
/// # Errors
/// The requested method is not possible.
pub fn choose(card: &Card, trust: Trust, asked: Option<Method>) -> Result<Choice, Refused> {
    choose_by(asked, |method| possible(card, trust, method).map(|because| Choice { method, because }))
}

/// Returns the same for a card that no worker drives, since its last driver died: nobody has steered its traffic, or left
/// it as an owner expects that has memory of its own and trusts the last one. An owner that does not stops it itself.
///
/// # Errors
/// The requested method is not possible.
pub fn choose_without_giver(card: &Card, trust: Trust, asked: Option<Method>) -> Result<Choice, Refused> {
    choose_by(asked, |method| match (method, trust) {
        (Method::Mbb, _) | (Method::Repoint, Trust::Full) => Err(NotPossible::NoGiver),
        _ => possible(card, trust, method).map(|because| Choice { method, because }),
    })
}

fn choose_by(asked: Option<Method>, can: impl Fn(Method) -> Result<Choice, NotPossible>) -> Result<Choice, Refused> {
    let best = first_of(Method::ALL, &can);
    asked.map_or(Ok(best), |method| can(method).map_err(|why| Refused { why, best: best.method }))
}

/// Returns the next best method, after a taker has looked at the card and refused to go on with it by `refused`. Any
/// card goes `cold`; after that no method is left.
pub fn after(card: &Card, trust: Trust, refused: Method) -> Option<Choice> {
    let at = Method::ALL.iter().position(|&method| method == refused)?;
    let rest = Method::ALL.get(at + 1..).filter(|rest| !rest.is_empty())?;
    Some(first_of(rest, |method| possible(card, trust, method).map(|because| Choice { method, because })))
}

fn first_of(methods: &[Method], can: impl Fn(Method) -> Result<Choice, NotPossible>) -> Choice {
    let best = methods.iter().find_map(|&method| can(method).ok());
    best.unwrap_or(Choice { method: Method::Cold, because: "nothing else is possible" })
}

/// How a successor gets its predecessor's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum State {
    /// It reads the driver state in place.
    InPlace,
    /// The giver writes it to the daemon's store, in the layout of this version.
    Store {
        /// Version of the layout, which the successor reads as well.
        version: u32,
    },
}

/// No version of the driver state's layout is known to both sides.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "its driver knows driver states of version {} to {}, and the successor {} to {}; go by a version between them, or hand the NIC over cold",
    .giver.start(), .giver.end(), .taker.start(), .taker.end()
)]
pub struct Apart {
    /// Versions that the giver reads and writes.
    pub giver: RangeInclusive<u32>,
    /// Versions that the successor reads and writes.
    pub taker: RangeInclusive<u32>,
}

/// Chooses the way of the state between programs that read and write these versions of its layout. It stays in place only
/// if the last version of both is the same. Otherwise the giver writes the last one that both know, to the store.
///
/// # Errors
/// No version is known to both.
pub fn state(giver: RangeInclusive<u32>, taker: RangeInclusive<u32>, asked_for_store: bool) -> Result<State, Apart> {
    let version = *giver.end().min(taker.end());
    if !giver.contains(&version) || !taker.contains(&version) {
        return Err(Apart { giver, taker });
    }
    match asked_for_store || giver.end() != taker.end() {
        true => Ok(State::Store { version }),
        false => Ok(State::InPlace),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const E1000E: Card = Card { own_memory: true, spare_queue: true, repointing: Repointing::Paused, fenced: true };

    fn cards() -> impl Iterator<Item = Card> {
        let repointings = [Repointing::Paused, Repointing::Unpaused, Repointing::Never];
        (0..8).flat_map(move |bits: u8| {
            repointings.map(|repointing| Card {
                own_memory: bits & 1 != 0,
                spare_queue: bits & 2 != 0,
                fenced: bits & 4 != 0,
                repointing,
            })
        })
    }

    #[test]
    fn what_changes_least_is_chosen() {
        let method = |card, trust| choose(&card, trust, None).unwrap().method;
        assert_eq!(method(E1000E, Trust::Full), Method::Keep);
        assert_eq!(method(E1000E, Trust::None), Method::Repoint);
        let unpaused = Card { repointing: Repointing::Unpaused, ..E1000E };
        assert_eq!(method(unpaused, Trust::None), Method::Repoint, "the link stays up");
        assert_eq!(method(Card { own_memory: false, ..E1000E }, Trust::Full), Method::Mbb);
        assert_eq!(method(Card { own_memory: false, ..E1000E }, Trust::None), Method::Repoint);
        assert_eq!(method(Card { fenced: false, ..E1000E }, Trust::None), Method::Cold);
        let plain = Card { own_memory: false, spare_queue: false, repointing: Repointing::Never, fenced: true };
        assert_eq!(method(plain, Trust::Full), Method::Cold);
        assert_eq!(method(Card { own_memory: true, ..plain }, Trust::None), Method::Cold);
    }

    #[test]
    fn what_is_asked_for_is_had_or_refused_with_a_way_out() {
        for card in cards() {
            for trust in [Trust::Full, Trust::None] {
                assert!(choose(&card, trust, None).is_ok(), "any card goes somehow");
                for &method in Method::ALL {
                    match choose(&card, trust, Some(method)) {
                        Ok(choice) => assert_eq!(choice.method, method, "nothing but the requested method"),
                        Err(error) => {
                            assert_ne!(error.best, method);
                            assert!(choose(&card, trust, Some(error.best)).is_ok(), "{error}");
                        }
                    }
                }
                assert!(choose(&card, trust, Some(Method::Cold)).is_ok());
            }
        }
    }

    #[test]
    fn without_trust_nothing_that_is_the_old_nodes_stays() {
        for card in cards() {
            for &method in Method::ALL {
                let may = possible(&card, Trust::None, method).is_ok();
                let expected = match method {
                    Method::Keep | Method::Mbb => false,
                    Method::Repoint => card.repointing != Repointing::Never && card.fenced,
                    Method::Cold => true,
                };
                assert_eq!(may, expected, "{method} of {card:?}");
            }
        }
    }

    #[test]
    fn without_a_giver_nothing_is_done_that_a_giver_has_a_part_in() {
        for card in cards() {
            for trust in [Trust::Full, Trust::None] {
                let method = choose_without_giver(&card, trust, None).expect("any card goes somehow").method;
                let expected = match trust {
                    Trust::Full if card.own_memory => Method::Keep,
                    Trust::None if card.fenced && card.repointing != Repointing::Never => Method::Repoint,
                    _ => Method::Cold,
                };
                assert_eq!(method, expected, "{card:?} {trust:?}");
                assert_eq!(
                    choose_without_giver(&card, trust, Some(Method::Mbb)).map_err(|it| it.why),
                    Err(NotPossible::NoGiver)
                );
            }
        }
    }

    #[test]
    fn what_was_refused_is_followed_by_less() {
        for card in cards() {
            for trust in [Trust::Full, Trust::None] {
                let mut choice = choose(&card, trust, None).ok();
                let mut tried = Vec::new();
                while let Some(Choice { method, .. }) = choice {
                    assert!(!tried.contains(&method) && possible(&card, trust, method).is_ok());
                    tried.push(method);
                    choice = after(&card, trust, method);
                }
                assert_eq!(tried.last(), Some(&Method::Cold), "{card:?} {trust:?}");
            }
        }
        assert_eq!(after(&E1000E, Trust::None, Method::Repoint).unwrap().method, Method::Cold);
        assert_eq!(after(&E1000E, Trust::None, Method::Cold), None);
    }

    #[test]
    fn another_layout_goes_by_the_store_and_an_unknown_one_nowhere() {
        assert_eq!(state(2..=3, 3..=3, false), Ok(State::InPlace));
        assert_eq!(state(3..=3, 3..=3, true), Ok(State::Store { version: 3 }));
        assert_eq!(state(2..=2, 2..=3, false), Ok(State::Store { version: 2 }), "an upgrade");
        assert_eq!(state(2..=3, 1..=2, false), Ok(State::Store { version: 2 }), "the way back");
        for (giver, taker) in [(3..=4, 1..=2), (1..=2, 3..=4)] {
            let error = state(giver, taker, false).unwrap_err().to_string();
            assert!(error.contains("3 to 4") && error.contains("1 to 2"), "{error}");
        }
    }
}
