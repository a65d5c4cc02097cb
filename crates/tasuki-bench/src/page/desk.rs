//! Looks figures up for the page, and remembers which runs they are of and which there are none of.

use std::cell::RefCell;

use super::html::{Cell, Ours, Quantity};
use super::runs::{Measured, Runs};
use super::svg::{Bar, Who};
use crate::table::number;

/// Where a figure is: bench, case, metric.
pub type Place<'p> = (&'p str, &'p str, &'p str);

#[derive(Debug)]
pub struct Desk<'r> {
    runs: &'r Runs,
    /// Runs with a figure on the page, in the order of their numbers there.
    used: RefCell<Vec<usize>>,
    /// Commands that measure what is missing, with the cases that they measure.
    missing: RefCell<Vec<(String, String)>>,
}

impl<'r> Desk<'r> {
    pub fn new(runs: &'r Runs) -> Self {
        Desk { runs, used: RefCell::default(), missing: RefCell::default() }
    }

    /// Returns the number that a run has on the page, from one.
    pub fn number(&self, run: usize) -> usize {
        let mut used = self.used.borrow_mut();
        if let Some(at) = used.iter().position(|it| *it == run) {
            return at + 1;
        }
        used.push(run);
        used.len()
    }

    /// Returns the runs that have a number, in its order.
    pub fn used(&self) -> Vec<usize> {
        self.used.borrow().clone()
    }

    /// Returns each command that measures what is missing, and the cases that it measures.
    pub fn missing(&self) -> Vec<(String, Vec<String>)> {
        let mut commands: Vec<(String, Vec<String>)> = Vec::new();
        for (command, case) in self.missing.borrow().iter() {
            match commands.iter_mut().find(|(known, _)| known == command) {
                Some((_, cases)) if cases.contains(case) => {}
                Some((_, cases)) => cases.push(case.clone()),
                None => commands.push((command.clone(), vec![case.clone()])),
            }
        }
        commands
    }

    fn find(&self, (bench, case, metric): Place<'_>) -> Option<(usize, &'r Measured, f64)> {
        let (run, row) = self.runs.find(bench, case, metric)?;
        Some((run, row, row.value?))
    }

    fn miss(&self, (bench, case, _): Place<'_>) -> Cell {
        self.missing.borrow_mut().push((command(bench, case), case.to_owned()));
        Cell::Missing
    }

    fn cell(&self, run: usize, row: &Measured, quantity: Quantity, made: Option<String>) -> Cell {
        let is_quick = self.runs.of(run).quick == Some(true);
        Cell::Ours(Ours { quantity, better: row.better, run: self.number(run), is_quick, made })
    }

    /// Returns a figure of ours.
    pub fn ours(&self, place: Place<'_>) -> Cell {
        match self.find(place) {
            Some((run, row, value)) => self.cell(run, row, Quantity::new(value, &row.unit), None),
            None => self.miss(place),
        }
    }

    /// Returns a figure of a case that is another program's.
    pub fn peer(&self, place: Place<'_>) -> Cell {
        self.ours(place).into_peer()
    }

    /// Returns a figure made of several of one run. `made` says how.
    pub fn made(&self, places: &[Place<'_>], unit: &str, made: &str, of: impl Fn(&[f64]) -> f64) -> Cell {
        let mut found = Vec::new();
        for place in places {
            match self.find(*place) {
                Some((run, row, value)) => found.push((run, row, Quantity::new(value, &row.unit).value)),
                None => return self.miss(*place),
            }
        }
        let values: Vec<_> = found.iter().map(|(_, _, value)| *value).collect();
        match found.first() {
            Some((run, row, _)) if found.iter().all(|(of, _, _)| of == run) => {
                self.cell(*run, row, Quantity::new(of(&values), unit), Some(made.to_owned()))
            }
            // A difference between two machines says nothing.
            _ => places.first().map_or(Cell::Missing, |place| self.miss(*place)),
        }
    }

    /// Returns the figure that one of ours was compared with in the same run.
    pub fn beside(&self, place: Place<'_>, name: &str) -> Cell {
        let Some((run, row, _)) = self.find(place) else { return Cell::Missing };
        let value = row.against.iter().find(|against| against.name == name).and_then(|against| against.value);
        value.map_or(Cell::Missing, |value| Cell::Peer(Quantity::new(value, &row.unit), self.number(run)))
    }

    /// Returns the number with which a figure's note begins: of relays, for frames that were lost.
    pub fn count(&self, place: Place<'_>) -> Cell {
        let note = self.find(place).and_then(|(_, row, _)| row.note.as_deref());
        let count = note.and_then(|note| note.split_whitespace().next()?.parse::<f64>().ok());
        count.map_or(Cell::None, |count| Cell::Text(number(count)))
    }
}

/// Returns the command that measures a case.
fn command(bench: &str, case: &str) -> String {
    let part = match (bench, case) {
        ("relay", case) if case.starts_with("guest") => " --only guest",
        ("relay", case) if case.starts_with("sends") => " --only sends",
        _ => "",
    };
    format!("cargo xtask bench {bench}{part} --json FILE")
}

/// Makes a bar of a figure of ours, or of a peer's.
pub fn bar(label: &str, cell: &Cell) -> Bar {
    let (who, value, shown) = match cell {
        Cell::Ours(ours) => (Who::Ours, Some(ours.quantity.value), ours.quantity.rounded()),
        Cell::Peer(quantity, _) => (Who::Peer, Some(quantity.value), quantity.rounded()),
        _ => (Who::Ours, None, "not measured".to_owned()),
    };
    Bar { label: label.to_owned(), who, value, shown }
}

/// Returns the value of a figure, if there is one.
pub fn value(cell: &Cell) -> Option<f64> {
    match cell {
        Cell::Ours(ours) => Some(ours.quantity.value),
        Cell::Peer(quantity, _) => Some(quantity.value),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn runs(files: &[&str]) -> Runs {
        let folder = tempfile::tempdir().unwrap();
        let paths: Vec<_> = (0..files.len()).map(|number| folder.path().join(format!("{number}.json"))).collect();
        paths.iter().zip(files).for_each(|(path, file): (&std::path::PathBuf, _)| std::fs::write(path, file).unwrap());
        assert!(paths.iter().all(|path| Path::exists(path)));
        Runs::of_files(&paths).unwrap()
    }

    fn call(date: &str, rows: &[(&str, &str)]) -> String {
        let row = |(case, value): &(&str, &str)| {
            format!(r#"{{"case": "{case}", "metric": "rtt_p50", "unit": "µs", "value": {value}}}"#)
        };
        let rows: Vec<_> = rows.iter().map(row).collect();
        format!(r#"{{"bench": "call", "host": {{"date": "{date}"}}, "rows": [{}]}}"#, rows.join(","))
    }

    #[test]
    fn a_missing_case_is_said_with_the_command_that_measures_it() {
        let runs = runs(&[&call("2026", &[("async", "1.0")])]);
        let desk = Desk::new(&runs);
        assert!(matches!(desk.ours(("relay", "sends-keep", "asked_mean")), Cell::Missing));
        assert!(matches!(desk.ours(("relay", "sends-keep", "asked_max")), Cell::Missing));
        assert_eq!(
            desk.missing(),
            [("cargo xtask bench relay --only sends --json FILE".to_owned(), vec!["sends-keep".to_owned()])]
        );
        assert_eq!(desk.used(), [] as [usize; 0]);
        assert!(matches!(desk.ours(("call", "async", "rtt_p50")), Cell::Ours(ours) if ours.quantity.value == 1_000.0));
        assert_eq!(desk.used(), [0]);
    }

    #[test]
    fn a_difference_is_one_within_a_run() {
        let (old, new) = (call("2025", &[("async", "3.0"), ("parked", "9.0")]), call("2026", &[("async", "1.0")]));
        let runs = runs(&[&old, &new]);
        let desk = Desk::new(&runs);
        let less =
            |a, b| desk.made(&[("call", a, "rtt_p50"), ("call", b, "rtt_p50")], "ns", "a - b", |it| it[0] - it[1]);
        assert!(matches!(less("parked", "async"), Cell::Missing), "one is of 2025, the other of 2026");
        assert!(matches!(less("parked", "parked"), Cell::Ours(ours) if ours.quantity.value == 0.0));
    }
}
