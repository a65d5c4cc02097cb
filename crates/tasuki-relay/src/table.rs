//! A protocol as a table: what follows when something happens, and why.

use std::fmt::{Debug, Write as _};

/// What follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Then<S: 'static, A: 'static> {
    /// This state, and these actions, in this order.
    Go(S, &'static [A]),
    /// The state stays as it is.
    Stay(&'static [A]),
    /// It cannot be, or must not.
    Refuse,
}

/// One or several states in which the same follows from an event.
#[derive(Debug, Clone, Copy)]
pub struct Row<S: 'static, E, A: 'static> {
    /// In any of these.
    pub from: &'static [S],
    /// When this happens.
    pub on: E,
    /// This follows.
    pub then: Then<S, A>,
    /// And why.
    pub because: &'static str,
}

/// All values of a state or of an event.
pub trait All: Copy + Eq + Debug + 'static {
    /// Every one, once.
    const ALL: &'static [Self];
}

/// An event that does not belong into a state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("refused: {because}")]
pub struct Refused {
    /// Why.
    pub because: &'static str,
}

/// What the table says of a state and an event.
pub fn step<S: All, E: All, A: Copy>(rows: &[Row<S, E, A>], state: S, event: E) -> Result<(S, &'static [A]), Refused> {
    let row = rows.iter().find(|row| row.on == event && row.from.contains(&state));
    match row.map(|row| (row.then, row.because)) {
        Some((Then::Go(next, actions), _)) => Ok((next, actions)),
        Some((Then::Stay(actions), _)) => Ok((state, actions)),
        Some((Then::Refuse, because)) => Err(Refused { because }),
        None => Err(Refused { because: "no row of the table has this state and this event" }),
    }
}

/// Pairs that no row has, or more than one: a table must have none.
pub fn gaps<S: All, E: All, A>(rows: &[Row<S, E, A>]) -> Vec<(S, E, usize)> {
    let pairs = S::ALL.iter().flat_map(|&state| E::ALL.iter().map(move |&event| (state, event)));
    let counted = pairs.map(|(state, event)| {
        let of = |row: &&Row<S, E, A>| row.on == event;
        (state, event, rows.iter().filter(of).flat_map(|row| row.from).filter(|&&from| from == state).count())
    });
    counted.filter(|&(_, _, count)| count != 1).collect()
}

/// The table as a document shows it.
pub fn to_markdown<S: All, E: All, A: Debug>(rows: &[Row<S, E, A>]) -> String {
    let mut text = "| state | event | next | actions | because |\n|---|---|---|---|---|\n".to_owned();
    for row in rows {
        let from = match row.from {
            all if all.len() == S::ALL.len() => "any".to_owned(),
            some => some.iter().map(|state| format!("{state:?}")).collect::<Vec<_>>().join(", "),
        };
        let (next, actions) = match row.then {
            Then::Go(next, actions) => (format!("{next:?}"), actions),
            Then::Stay(actions) => ("the same".to_owned(), actions),
            Then::Refuse => ("refused".to_owned(), &[][..]),
        };
        let actions = actions.iter().map(|action| format!("{action:?}")).collect::<Vec<_>>().join(", ");
        let _ = writeln!(text, "| {from} | {:?} | {next} | {actions} | {} |", row.on, row.because);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{arbiter, giver, taker};

    /// Every state and event has a row, and one only.
    #[test]
    fn the_tables_are_total() {
        assert_eq!(gaps(giver::TABLE), []);
        assert_eq!(gaps(taker::TABLE), []);
        assert_eq!(gaps(arbiter::TABLE), []);
    }

    #[test]
    fn a_hole_and_a_contradiction_are_found() {
        let mut rows = giver::TABLE.to_vec();
        let first = rows.remove(0);
        assert_eq!(gaps(&rows), [(giver::State::Driving, giver::Event::Release, 0)]);
        rows.extend([first, first]);
        assert_eq!(gaps(&rows), [(giver::State::Driving, giver::Event::Release, 2)]);
    }

    /// The tables in docs/design/relay.md are those of the code.
    #[test]
    fn the_document_shows_the_tables() {
        let document = include_str!("../../../docs/design/relay.md");
        let tables = [
            ("giver", to_markdown(giver::TABLE)),
            ("taker", to_markdown(taker::TABLE)),
            ("arbiter", to_markdown(arbiter::TABLE)),
            ("authority", arbiter::authority_to_markdown(arbiter::AUTHORITY)),
        ];
        for (name, table) in tables {
            let shown = document.split(&format!("<!-- {name} -->\n")).nth(1).and_then(|rest| rest.split("\n\n").next());
            let shown = shown.unwrap_or_default().trim_end();
            assert!(shown == table.trim_end(), "docs/design/relay.md should have, after <!-- {name} -->:\n{table}");
        }
    }
}
