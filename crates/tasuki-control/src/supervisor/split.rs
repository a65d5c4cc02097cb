//! An uplink whose NIC and VNI end are driven by two workers passes nothing on. Deaths of workers, or of the daemon
//! in the middle of an upgrade, lead there, as each lease goes its own way. Which worker gets both is a pure
//! function of the present holders and of the workers that could drive:
//!
//! | NIC and end are driven by              | can drive both                                 | then             | because                                          |
//! |----------------------------------------|------------------------------------------------|------------------|--------------------------------------------------|
//! | one worker                             |                                                | nothing          | frames pass                                      |
//! | one without a driver, or changing hands |                                               | wait             | the arbiter decides that first                   |
//! | two                                    | workers of the node's program                  | both go to one   | first a worker that has one already, then the oldest |
//! | two                                    | such a worker perhaps, which prepares          | wait             | an upgrade that failed is not to come true by this |
//! | two                                    | only one of another program                    | both go there    | rather that than nothing                         |
//! | two                                    | no worker                                      | report it        | only an operator who looks at the reasons can help |
//!
//! The daemon retries as often, and after such pauses, as it replaces a worker ([`policy`]).

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use tasuki_relay::arbiter::{Arbiter, State};

use super::jobs::Job;
use super::policy;
use super::worker::{Readiness, Worker};
use super::{About, Supervisor, now};
use crate::config::Work;

/// A NIC of an uplink, or its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Side {
    /// Number of the NIC.
    pub nic: u32,
    /// The living worker that drives it.
    pub holder: Option<u32>,
    /// Whether no relay of it is under way, and a worker drives it.
    pub is_steady: bool,
}

/// A worker of an uplink.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// Number of the worker.
    pub worker: u32,
    /// Whether it runs the node's present program.
    pub runs_present_program: bool,
    /// How far it has come with the NICs it was given.
    pub readiness: BTreeMap<u32, Readiness>,
}

impl Candidate {
    fn holds(&self, side: &Side) -> bool {
        side.holder == Some(self.worker)
    }

    /// Returns whether it drives all sides, or could at once.
    fn is_ready_for(&self, sides: &[Side]) -> bool {
        sides.iter().all(|side| self.holds(side) || self.readiness.get(&side.nic) == Some(&Readiness::Ready))
    }

    /// Returns whether it has reported no side that it cannot take.
    fn has_refused_none(&self, sides: &[Side]) -> bool {
        !sides.iter().any(|side| matches!(self.readiness.get(&side.nic), Some(Readiness::Unfit(_))))
    }
}

/// The decision on an uplink.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Then {
    /// Nothing to do: one worker has both.
    Whole,
    /// Nothing to do yet.
    Wait,
    /// This worker is to have both.
    To(u32),
    /// No worker can drive both, nor will.
    Nobody,
}

/// Decides how to treat an uplink.
pub fn decide(sides: &[Side], candidates: &[Candidate]) -> Then {
    if sides.iter().any(|side| !side.is_steady) {
        return Then::Wait;
    }
    let holders: BTreeSet<u32> = sides.iter().filter_map(|side| side.holder).collect();
    if holders.len() < 2 {
        return Then::Whole;
    }
    let held = |candidate: &Candidate| sides.iter().filter(|side| candidate.holds(side)).count();
    let of_program =
        |is_present| candidates.iter().filter(move |candidate| candidate.runs_present_program == is_present);
    let best = |is_present| {
        let able = of_program(is_present).filter(|candidate| candidate.is_ready_for(sides));
        able.max_by_key(|candidate| (held(candidate), Reverse(candidate.worker)))
    };
    let comes = || of_program(true).any(|candidate| candidate.has_refused_none(sides));
    let to = match best(true) {
        None if comes() => return Then::Wait,
        present => present.or_else(|| best(false)),
    };
    to.map_or(Then::Nobody, |candidate| Then::To(candidate.worker))
}

/// Returns the worker that is to get the sides without a driver, as the first worker that is ready drives. It is a
/// worker that drives a side already, unless it cannot drive the rest.
pub fn joiner(sides: &[Side], candidates: &[Candidate]) -> Option<u32> {
    let mut able = candidates.iter().filter(|candidate| candidate.has_refused_none(sides));
    let holder = able.clone().find(|candidate| sides.iter().any(|side| candidate.holds(side)));
    holder.or_else(|| able.next()).map(|candidate| candidate.worker)
}

/// The attempts to mend a split uplink.
#[derive(Debug, Default)]
pub struct Mending {
    /// Attempts to bring the two sides together since it was last whole.
    tries: usize,
    /// Earliest time for the next attempt.
    not_before: Duration,
    /// Whether users were told that no worker can drive both.
    is_told: bool,
}

impl Supervisor {
    pub(super) fn sides_of(&self, name: &str) -> Vec<Side> {
        let lives = |holder: &u32| self.workers.contains_key(holder);
        let side = |card: &super::card::Card| {
            let holder = card.holder().filter(lives);
            let state = card.arbiter.as_ref().map(Arbiter::state);
            Side { nic: card.number, holder, is_steady: state == Some(State::Steady) && holder.is_some() }
        };
        self.cards.of(name).map(side).collect()
    }

    pub(super) fn candidates_of(&self, name: &str) -> Vec<Candidate> {
        let present = self.present_workers_of(name);
        let its = self.workers.of(name).filter(|worker| worker.counts());
        let candidate = |worker: &Worker| Candidate {
            worker: worker.party(),
            runs_present_program: present.contains(&worker.party()),
            readiness: worker.nics.clone(),
        };
        its.map(candidate).collect()
    }

    /// Brings the NIC and the end of an uplink to one worker again.
    pub(super) fn mend(&mut self, name: &str) {
        if self.config.node(name).is_none_or(|node| node.work != Work::Uplink) {
            return;
        }
        let (sides, candidates) = (self.sides_of(name), self.candidates_of(name));
        let nics: Vec<u32> = sides.iter().map(|side| side.nic).collect();
        // An upgrade relays one after the other.
        if self.is_free(name, &nics).is_err() {
            return;
        }
        let then = decide(&sides, &candidates);
        let Some(node) = self.nodes.get_mut(name) else { return };
        match then {
            Then::Wait => {}
            Then::Whole => node.mending = Mending::default(),
            Then::Nobody if node.mending.is_told => {}
            Then::Nobody => {
                node.mending.is_told = true;
                let sentence = format!(
                    "{}, and stays so: none of its workers can drive both; tasuki events says why. When that is mended: tasuki worker upgrade {name}",
                    self.how_split(name, &sides)
                );
                self.note(About::node(name), sentence);
            }
            Then::To(_) if node.mending.not_before > now() => {}
            Then::To(worker) => self.bring_together(name, worker, &sides),
        }
    }

    fn bring_together(&mut self, name: &str, worker: u32, sides: &[Side]) {
        let Some(node) = self.nodes.get_mut(name) else { return };
        node.mending.tries += 1;
        node.mending.not_before = now() + policy::retry(node.mending.tries);
        let others: VecDeque<u32> =
            sides.iter().filter(|side| side.holder != Some(worker)).map(|side| side.nic).collect();
        let what: Vec<&str> = others.iter().map(|nic| self.cards[nic].name()).collect();
        let sentence = format!("{}: {} goes to worker {worker}", self.how_split(name, sides), what.join(" and "));
        self.note(About::worker(name, worker), sentence);
        self.jobs.push(Job::mending(name, others, worker));
    }

    /// Says which worker drives which side.
    fn how_split(&self, name: &str, sides: &[Side]) -> String {
        let drives = |side: &Side| Some(format!("worker {} drives {}", side.holder?, self.cards[&side.nic].name()));
        let who: Vec<String> = sides.iter().filter_map(drives).collect();
        format!("uplink {name} passes nothing on, for {}", who.join(" and "))
    }
}

#[cfg(test)]
mod tests {
    use tasuki_relay::wire::Reason;

    use super::*;

    /// The NIC and the end.
    const NIC: u32 = 0;
    const END: u32 = 1;

    const READY: Readiness = Readiness::Ready;
    const PREPARING: Readiness = Readiness::Preparing(Duration::ZERO);
    const UNFIT: Readiness = Readiness::Unfit(Reason::CardGone);

    /// Returns two sides held by these workers.
    fn sides(nic: u32, end: u32) -> [Side; 2] {
        [(NIC, nic), (END, end)].map(|(nic, holder)| Side { nic, holder: Some(holder), is_steady: true })
    }

    /// Returns a worker of the present program, and how far it is with NIC and end.
    fn present(worker: u32, readiness: [Readiness; 2]) -> Candidate {
        Candidate { worker, runs_present_program: true, readiness: [NIC, END].into_iter().zip(readiness).collect() }
    }

    /// Returns a worker of another program.
    fn old(worker: u32, readiness: [Readiness; 2]) -> Candidate {
        Candidate { runs_present_program: false, ..present(worker, readiness) }
    }

    #[test]
    fn the_table() {
        let both = [READY, READY];
        let one_is_on_its_way = Candidate { readiness: BTreeMap::new(), ..present(5, both) };
        let cases: [(&str, [Side; 2], Vec<Candidate>, Then); 12] = [
            ("one has both", sides(3, 3), vec![present(3, both), present(4, both)], Then::Whole),
            ("it came first", sides(3, 4), vec![present(3, both), present(4, both)], Then::To(3)),
            ("only the other can", sides(3, 4), vec![present(3, [READY, UNFIT]), present(4, both)], Then::To(4)),
            (
                "only a third can",
                sides(3, 4),
                vec![present(3, [READY, UNFIT]), present(4, [UNFIT, READY]), present(5, both)],
                Then::To(5),
            ),
            (
                "an upgrade failed half-way",
                sides(5, 3),
                vec![present(3, both), present(4, both), old(5, both)],
                Then::To(3),
            ),
            (
                "the one that can now",
                sides(5, 3),
                vec![present(3, [PREPARING, READY]), present(4, both), old(5, both)],
                Then::To(4),
            ),
            (
                "an upgrade failed, and nobody stands by",
                sides(5, 3),
                vec![present(3, [PREPARING, READY]), old(5, both)],
                Then::Wait,
            ),
            ("only another program can", sides(5, 3), vec![present(3, [UNFIT, READY]), old(5, both)], Then::To(5)),
            (
                "its holder was told to take it",
                sides(3, 4),
                vec![present(3, [PREPARING, READY]), present(4, [PREPARING, READY])],
                Then::To(3),
            ),
            (
                "somebody prepares",
                sides(3, 4),
                vec![present(3, [READY, UNFIT]), present(4, [PREPARING, READY])],
                Then::Wait,
            ),
            (
                "somebody was just started",
                sides(3, 4),
                vec![present(3, [READY, UNFIT]), present(4, [UNFIT, READY]), one_is_on_its_way],
                Then::Wait,
            ),
            (
                "nobody ever will",
                sides(3, 4),
                vec![present(3, [READY, UNFIT]), present(4, [UNFIT, READY]), old(5, [UNFIT, READY])],
                Then::Nobody,
            ),
        ];
        for (what, sides, candidates, then) in cases {
            assert_eq!(decide(&sides, &candidates), then, "{what}");
        }
    }

    #[test]
    fn nothing_is_decided_before_the_arbiters_have() {
        let candidates = [present(3, [READY, READY]), present(4, [READY, READY])];
        for at in 0..2 {
            let mut passing = sides(3, 4);
            passing[at].is_steady = false;
            assert_eq!(decide(&passing, &candidates), Then::Wait);
            passing[at].holder = None;
            assert_eq!(decide(&passing, &candidates), Then::Wait);
        }
    }

    /// However far each worker is: the chosen worker can drive both, and no worker of another program is chosen
    /// while one of the node's program can. If no worker can, none is chosen.
    #[test]
    fn who_is_to_have_both_can_drive_both() {
        let all = [READY, PREPARING, UNFIT];
        let pairs: Vec<[Readiness; 2]> = all.iter().flat_map(|nic| all.map(|end| [*nic, end])).collect();
        let of_three =
            pairs.iter().flat_map(|one| pairs.iter().flat_map(|two| pairs.iter().map(|three| (*one, *two, *three))));
        let mut seen = BTreeMap::new();
        for ((one, two, three), runs_present_program) in of_three.flat_map(|three| [(three, true), (three, false)]) {
            let sides = sides(5, 3);
            let mut candidates =
                [present(3, one), present(4, two), Candidate { runs_present_program, ..present(5, three) }];
            // A holder of a side was ready for it.
            candidates[2].readiness.insert(NIC, READY);
            candidates[0].readiness.insert(END, READY);
            let both = |candidate: &Candidate| candidate.readiness.values().all(|it| *it == READY);
            let able = |is_present| candidates.iter().any(|it| it.runs_present_program == is_present && both(it));
            let what = match decide(&sides, &candidates) {
                Then::To(worker) => {
                    let to = candidates.iter().find(|candidate| candidate.worker == worker).expect("one of them");
                    assert!(both(to) && (to.runs_present_program || !able(true)), "{candidates:?}");
                    // Then the uplink is whole, and nothing more is done.
                    assert_eq!(decide(&self::sides(worker, worker), &candidates), Then::Whole);
                    "to one"
                }
                Then::Wait => {
                    assert!(
                        !able(true)
                            && candidates.iter().any(|it| it.runs_present_program && it.has_refused_none(&sides)),
                        "{candidates:?}"
                    );
                    "wait"
                }
                Then::Nobody => {
                    assert!(!able(true) && !able(false), "{candidates:?}");
                    "nobody"
                }
                Then::Whole => panic!("it is split: {candidates:?}"),
            };
            *seen.entry(what).or_insert(0) += 1;
        }
        assert_eq!(seen.len(), 3, "{seen:?}");
    }

    #[test]
    fn what_nobody_drives_is_for_who_drives_the_rest_unless_it_cannot() {
        let side = |nic, holder| Side { nic, holder, is_steady: holder.is_some() };
        let parked = [side(NIC, Some(4)), side(END, None)];
        let none = [side(NIC, None), side(END, None)];
        let fresh = |worker| Candidate { readiness: BTreeMap::new(), ..present(worker, [READY, READY]) };
        assert_eq!(joiner(&parked, &[fresh(3), present(4, [READY, PREPARING])]), Some(4));
        assert_eq!(
            joiner(&parked, &[present(4, [READY, UNFIT]), fresh(5)]),
            Some(5),
            "a side that it cannot drive is another's"
        );
        assert_eq!(joiner(&none, &[fresh(3), fresh(4)]), Some(3));
        assert_eq!(joiner(&none, &[present(3, [READY, UNFIT])]), None, "then anybody may have anything");
    }
}
