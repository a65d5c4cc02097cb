//! Interleaved rounds: floor, ours and peer take turns, so a ratio compares the same minutes of one machine.

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::{Context, Result};

use crate::case::Case;
use crate::cpus::Cpus;
use crate::interrupt::Interrupt;
use crate::pair;
use crate::sample::Sample;

/// How much is measured.
#[derive(Debug, Clone, Copy)]
pub struct Effort {
    /// How often every case runs.
    pub rounds: u32,
    /// Whether [`Case::calls`] are multiplied by [`Case::full`].
    pub full: bool,
}

impl Effort {
    /// Enough to see whether something broke.
    pub const QUICK: Effort = Effort { rounds: 3, full: false };
    /// Enough for a record.
    pub const FULL: Effort = Effort { rounds: 10, full: true };
}

/// What was measured, by case, over all rounds.
#[derive(Debug, Default)]
pub struct Samples(BTreeMap<&'static str, Sample>);

impl Samples {
    /// What was measured of the case named `case`.
    pub fn of(&self, case: &str) -> Result<&Sample> {
        self.0.get(case).with_context(|| format!("case {case} was not run"))
    }

    /// The median of the case named `case`, in ns.
    pub fn p50(&self, case: &str) -> Result<f64> {
        Ok(self.of(case)?.summary().p50 as f64)
    }

    fn add(&mut self, case: &'static str, round: Sample) {
        self.0.entry(case).or_insert_with(Sample::new).merge(&round);
    }
}

/// Runs all `cases` once, without a word.
pub fn once(cases: &[&'static Case], cpus: Cpus, interrupt: &Interrupt) -> Result<Samples> {
    let mut samples = Samples::default();
    for case in cases {
        samples.add(case.name, pair::run(case, case.calls, cpus, interrupt)?);
    }
    Ok(samples)
}

/// Runs all `cases` in turn, as often as `effort` says, with one line of progress per run.
pub fn run(cases: &[&'static Case], effort: Effort, cpus: Cpus, interrupt: &Interrupt) -> Result<Samples> {
    let mut samples = Samples::default();
    for round in 1..=effort.rounds {
        for case in cases {
            let start = Instant::now();
            let sample = pair::run(case, case.calls * if effort.full { case.full } else { 1 }, cpus, interrupt)?;
            let (took, p50) = (start.elapsed().as_secs_f64(), sample.summary().p50);
            eprintln!("round {round}/{} · {:<22} p50 {p50:>7} ns · {took:.1} s", effort.rounds, case.name);
            samples.add(case.name, sample);
        }
    }
    Ok(samples)
}
