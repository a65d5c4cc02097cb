//! Distance between the two CPUs, and its effect on figures that are compared.
//!
//! The host of a virtual machine moves its CPUs every few seconds between cores that share a cache and cores that do
//! not. The bench therefore measures a cache line's round trip (the ping-pong floor) before and after each run, and
//! compares figures only between rounds with alike times.

use anyhow::Result;

use crate::cpus::Cpus;
use crate::floors;
use crate::interrupt::Interrupt;
use crate::pair;
use crate::rounds::Samples;
use crate::sample::{Sample, median};

/// Round trips of one distance measurement.
const LOOK: u64 = 20_000;

/// Times that differ by at most this factor are alike.
const ALIKE: f64 = 1.5;

/// Names of the distances noted before and after each run.
const BEFORE: &str = "distance-before";
const AFTER: &str = "distance-after";

/// Measures the round trip of a cache line, in ns: the faster of spinning with the hint and without.
pub fn look(cpus: Cpus, interrupt: &Interrupt) -> Result<f64> {
    let of = |case| Ok::<_, anyhow::Error>(pair::run(case, LOOK, cpus, interrupt)?.summary().p50 as f64);
    floors::ping_pongs().try_fold(f64::INFINITY, |least, case| Ok(least.min(of(case)?)))
}

/// Notes the distances measured before and after a run.
pub fn note(sample: &mut Sample, before: f64, after: f64) {
    sample.note(BEFORE, before);
    sample.note(AFTER, after);
}

/// Result of a case in one round.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Round {
    pub value: f64,
    /// Distance of the CPUs in ns; `None` if it changed during the run.
    pub distance: Option<f64>,
}

/// Returns the rounds of a case, by the number that it kept under `name`.
pub fn rounds(sample: &Sample, name: &str) -> Vec<Round> {
    let distances = sample.numbers(BEFORE).iter().zip(sample.numbers(AFTER));
    let both = sample.numbers(name).iter().zip(distances);
    both.map(|(&value, (&before, &after))| Round { value, distance: steady(before, after) }).collect()
}

/// Returns the distance of the CPUs in each round of a case, as a floor to compare its figures with.
pub fn as_floor(sample: &Sample) -> Vec<Round> {
    let both = sample.numbers(BEFORE).iter().zip(sample.numbers(AFTER));
    both.map(|(&before, &after)| Round { value: before.midpoint(after), distance: steady(before, after) }).collect()
}

fn steady(before: f64, after: f64) -> Option<f64> {
    are_alike(before, after).then(|| before.midpoint(after))
}

fn are_alike(one: f64, other: f64) -> bool {
    one.max(other) <= ALIKE * one.min(other)
}

/// Ratios of our value to theirs, over pairs of rounds with alike CPU distances. Each of our rounds is paired with
/// the nearest such round of theirs.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Pairs(Vec<(f64, f64)>);

impl Pairs {
    /// Pairs the rounds.
    pub fn of(ours: &[Round], theirs: &[Round]) -> Self {
        let pair = |(number, our): (usize, &Round)| {
            let distance = our.distance?;
            let alike = |their: &Round| their.distance.is_some_and(|its| are_alike(distance, its));
            let near = theirs.iter().enumerate().filter(|(_, their)| alike(their));
            let (_, their) = near.min_by_key(|(other, _)| other.abs_diff(number))?;
            Some((distance, our.value / their.value))
        };
        Pairs(ours.iter().enumerate().filter_map(pair).collect())
    }

    /// Returns the median of the ratios.
    pub fn ratio(&self) -> Option<f64> {
        median(&self.0.iter().map(|(_, ratio)| *ratio).collect::<Vec<_>>())
    }

    /// Counts the pairs by CPU distance: `3 at 110 ns, 2 at 320 ns`.
    pub fn told(&self) -> String {
        let states = states(self.0.iter().map(|(distance, _)| *distance).collect());
        let one = |(first, last, count): &(f64, f64, usize)| format!("{count} at {:.0} ns", first.midpoint(*last));
        match states.is_empty() {
            true => "no rounds alike".to_owned(),
            false => states.iter().map(one).collect::<Vec<_>>().join(", "),
        }
    }
}

/// Groups alike times: (least, greatest, count) of each group.
fn states(mut distances: Vec<f64>) -> Vec<(f64, f64, usize)> {
    distances.sort_unstable_by(f64::total_cmp);
    let mut states: Vec<(f64, f64, usize)> = Vec::new();
    for distance in distances {
        match states.last_mut() {
            Some((first, last, count)) if are_alike(*first, distance) => (*last, *count) = (distance, *count + 1),
            _ => states.push((distance, distance, 1)),
        }
    }
    states
}

/// Counts the runs by CPU distance, as a sentence.
pub fn told(samples: &Samples) -> String {
    let runs = samples.all().flat_map(|sample| sample.numbers(BEFORE).iter().zip(sample.numbers(AFTER)));
    let all: Vec<_> = runs.map(|(&before, &after)| steady(before, after)).collect();
    let steady: Vec<_> = all.iter().copied().flatten().collect();
    let changed = all.len() - steady.len();
    let one = |(first, last, count): (f64, f64, usize)| format!("{first:.0} to {last:.0} ns in {count} runs");
    let states: Vec<_> = states(steady).into_iter().map(one).collect();
    format!(
        "A cache line took there and back between the two CPUs: {}; it changed during {changed} runs.\n\
         Where a ratio names times, it is of pairs of rounds in which they were alike (by a factor of {ALIKE}).",
        states.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(value: f64, distance: f64) -> Round {
        Round { value, distance: Some(distance) }
    }

    #[test]
    fn only_rounds_in_a_like_state_are_compared() {
        let ours = [round(10.0, 100.0), round(5.0, 300.0), Round { value: 1.0, distance: None }];
        let theirs = [round(2.0, 310.0), round(5.0, 120.0), round(1.0, 290.0)];
        let pairs = Pairs::of(&ours, &theirs);
        assert_eq!(pairs.0, [(100.0, 2.0), (300.0, 2.5)]);
        assert_eq!(pairs.told(), "1 at 100 ns, 1 at 300 ns");
        assert_eq!(Pairs::of(&ours, &[round(1.0, 1000.0)]).ratio(), None);
    }

    #[test]
    fn a_run_during_which_it_changed_is_in_no_state() {
        let mut sample = Sample::new();
        for (rate, before, after) in [(1.0, 100.0, 140.0), (2.0, 100.0, 300.0)] {
            sample.note("rate", rate);
            note(&mut sample, before, after);
        }
        let expected = [round(1.0, 120.0), Round { value: 2.0, distance: None }];
        assert_eq!(rounds(&sample, "rate"), expected);
    }

    #[test]
    fn states_are_told_apart_by_their_least() {
        assert_eq!(states(vec![320.0, 100.0, 149.0, 151.0]), [(100.0, 149.0, 2), (151.0, 151.0, 1), (320.0, 320.0, 1)]);
    }
}
