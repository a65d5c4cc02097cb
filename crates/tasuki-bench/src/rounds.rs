//! Interleaved rounds: floor, ours and peer take turns, so a ratio compares figures of the same minutes on one
//! machine.

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::{Context, Result};

use crate::case::Case;
use crate::cpus::Cpus;
use crate::distance;
use crate::interrupt::Interrupt;
use crate::pair;
use crate::sample::Sample;

/// Amount of measuring.
#[derive(Debug, Clone, Copy)]
pub struct Effort {
    /// Number of times that every case runs.
    pub rounds: u32,
    /// Whether to multiply [`Case::calls`] by [`Case::full`].
    pub full: bool,
}

impl Effort {
    /// Enough to see whether something broke.
    pub const QUICK: Effort = Effort { rounds: 3, full: false };
    /// Enough for a record.
    pub const FULL: Effort = Effort { rounds: 10, full: true };
}

/// Manner of running rounds.
#[derive(Debug, Clone, Copy)]
pub struct Manner {
    /// Whether to note, for each run, how far apart the CPUs were, and the run's median as `p50`.
    pub distances: bool,
    /// Selects cases that take long to start. A run that is not full runs them in the first round only.
    pub is_seldom: fn(&Case) -> bool,
}

impl Manner {
    /// Runs every case in every round and notes nothing besides.
    pub const PLAIN: Manner = Manner { distances: false, is_seldom: |_| false };
}

/// Samples of all cases, each merged over all rounds.
#[derive(Debug, Default)]
pub struct Samples(BTreeMap<&'static str, Sample>);

impl Samples {
    /// Returns the sample of the case named `case`.
    pub fn of(&self, case: &str) -> Result<&Sample> {
        self.0.get(case).with_context(|| format!("case {case} was not run"))
    }

    /// Returns the median of the case named `case`, in ns.
    pub fn p50(&self, case: &str) -> Result<f64> {
        Ok(self.of(case)?.summary().p50 as f64)
    }

    /// Returns the sample of the case named `case`, if it was run.
    pub fn find(&self, case: &str) -> Option<&Sample> {
        self.0.get(case)
    }

    /// Returns the sample of each case.
    pub fn all(&self) -> impl Iterator<Item = &Sample> {
        self.0.values()
    }

    /// Adds another round of a case.
    pub fn add(&mut self, case: &'static str, round: Sample) {
        self.0.entry(case).or_insert_with(Sample::new).merge(&round);
    }
}

/// Runs all `cases` once, without printing.
pub fn once(cases: &[&'static Case], cpus: Cpus, interrupt: &Interrupt) -> Result<Samples> {
    let mut samples = Samples::default();
    for case in cases {
        samples.add(case.name, pair::run(case, case.calls, cpus, interrupt)?);
    }
    Ok(samples)
}

/// Runs all `cases` in turn, as often as `effort` says, and prints one line of progress per run.
pub fn run(
    cases: &[&'static Case],
    (effort, manner): (Effort, Manner),
    cpus: Cpus,
    interrupt: &Interrupt,
) -> Result<Samples> {
    let mut samples = Samples::default();
    let look = || manner.distances.then(|| distance::look(cpus, interrupt)).transpose();
    let mut before = look()?;
    for round in 1..=effort.rounds {
        for case in cases.iter().filter(|case| round == 1 || effort.full || !(manner.is_seldom)(case)) {
            let start = Instant::now();
            let mut sample = pair::run(case, case.calls * if effort.full { case.full } else { 1 }, cpus, interrupt)?;
            let (took, p50) = (start.elapsed().as_secs_f64(), sample.summary().p50);
            let mut apart = String::new();
            let after = look()?;
            if let Some((before, after)) = before.zip(after) {
                distance::note(&mut sample, before, after);
                sample.note("p50", p50 as f64);
                apart = format!(" · {before:.0} to {after:.0} ns apart");
            }
            before = after;
            eprintln!("round {round}/{} · {:<22} p50 {p50:>7} ns · {took:.1} s{apart}", effort.rounds, case.name);
            samples.add(case.name, sample);
        }
    }
    Ok(samples)
}
