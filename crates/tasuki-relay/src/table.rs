//! A protocol as a table: the consequence of each event in each state, and the reason.

use std::fmt::{Debug, Write as _};

/// Consequence of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Then<S: 'static, A: 'static> {
    /// Go to this state, and do these actions in this order.
    Go(S, &'static [A]),
    /// Stay in the same state, and do these actions in this order.
    Stay(&'static [A]),
    /// Refuse the event: it cannot or must not happen here.
    Refuse,
}

/// States in which an event has the same consequence.
#[derive(Debug, Clone, Copy)]
pub struct Row<S: 'static, E, A: 'static> {
    /// In any of these states.
    pub from: &'static [S],
    /// On this event.
    pub on: E,
    /// This follows.
    pub then: Then<S, A>,
    /// Reason for it.
    pub because: &'static str,
}

/// List of all values of a state or of an event.
pub trait All: Copy + Eq + Debug + 'static {
    /// Each value, once.
    const ALL: &'static [Self];
}

/// Defines an enum, and the list of all its values.
macro_rules! listed {
    ($(#[$of_type:meta])* pub enum $name:ident { $($(#[$of_value:meta])* $value:ident,)* }) => {
        $(#[$of_type])*
        pub enum $name {
            $($(#[$of_value])* $value,)*
        }

        impl $crate::table::All for $name {
            const ALL: &'static [Self] = &[$($name::$value),*];
        }
    };
}
pub(crate) use listed;

/// An event that was refused in a state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("refused: {because}")]
pub struct Refused {
    /// Reason for the refusal.
    pub because: &'static str,
}

/// Looks up the next state and the actions for a state and an event.
///
/// # Errors
/// The table refuses the event in this state, or has no row for it.
pub fn step<S: All, E: All, A: Copy>(rows: &[Row<S, E, A>], state: S, event: E) -> Result<(S, &'static [A]), Refused> {
    let row = rows.iter().find(|row| row.on == event && row.from.contains(&state));
    match row.map(|row| (row.then, row.because)) {
        Some((Then::Go(next, actions), _)) => Ok((next, actions)),
        Some((Then::Stay(actions), _)) => Ok((state, actions)),
        Some((Then::Refuse, because)) => Err(Refused { because }),
        None => Err(Refused { because: "no row of the table has this state and this event" }),
    }
}

/// Returns the pairs that have no row, or more than one, with their number of rows. A complete table has no such
/// pairs.
pub fn gaps<S: All, E: All, A>(rows: &[Row<S, E, A>]) -> Vec<(S, E, usize)> {
    let pairs = S::ALL.iter().flat_map(|&state| E::ALL.iter().map(move |&event| (state, event)));
    let counted = pairs.map(|(state, event)| {
        let of = |row: &&Row<S, E, A>| row.on == event;
        (state, event, rows.iter().filter(of).flat_map(|row| row.from).filter(|&&from| from == state).count())
    });
    counted.filter(|&(_, _, count)| count != 1).collect()
}

/// Formats the table as a document shows it.
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

    /// Every state and event has exactly one row.
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
