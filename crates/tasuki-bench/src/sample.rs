//! The result of a measuring role: a histogram of durations, and its form for the way between processes.
//!
//! Rounds of one case are merged bucket by bucket. A percentile over all rounds is therefore the percentile of all
//! their values, not a mean of percentiles.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use crate::orders::Orders;

/// Decimal digits of precision that the histogram keeps of a duration.
const DIGITS: u8 = 3;

/// Longest duration that the histogram resolves, in ns. The percentiles count longer ones as this long; `max` does
/// not.
const LONGEST_NS: u64 = 60_000_000_000;

/// Durations of one case, in ns, and further numbers that the case reports.
#[derive(Debug, Clone)]
pub struct Sample {
    histogram: Histogram<u64>,
    /// Shortest and longest duration as measured, in ns; the histogram rounds them to its buckets.
    min_ns: u64,
    max_ns: u64,
    sum_ns: u64,
    /// Numbers by name, one value per round.
    numbers: BTreeMap<String, Vec<f64>>,
}

/// Statistics of a [`Sample`]. Durations in ns.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Summary {
    /// Number of durations.
    pub count: u64,
    pub min: u64,
    pub p50: u64,
    pub p90: u64,
    pub p99: u64,
    pub p999: u64,
    pub max: u64,
    pub mean: f64,
}

/// A sample as one line of JSON. `summary` is for human readers; `buckets` is the part that gets merged.
#[derive(Serialize, Deserialize)]
struct Line {
    #[serde(skip_deserializing)]
    summary: Option<Summary>,
    /// (duration in ns, count) of each filled bucket.
    buckets: Vec<(u64, u64)>,
    min_ns: u64,
    max_ns: u64,
    sum_ns: u64,
    numbers: BTreeMap<String, Vec<f64>>,
}

/// Returns the value at the middle of the sorted values, or the mean of the two there; `None` if there are none.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let high = *sorted.get(sorted.len() / 2)?;
    // One of two values is the best or the worst of them.
    Some(if sorted.len().is_multiple_of(2) { sorted[sorted.len() / 2 - 1].midpoint(high) } else { high })
}

impl Sample {
    /// Makes an empty sample.
    pub fn new() -> Self {
        let histogram = Histogram::new_with_bounds(1, LONGEST_NS, DIGITS).expect("the bounds are constants that fit");
        Sample { histogram, min_ns: u64::MAX, max_ns: 0, sum_ns: 0, numbers: BTreeMap::new() }
    }

    /// Times every call of `call` by itself, after the warm-up that `orders` ask for.
    ///
    /// `call` receives the number of the call, counted from 1 through warm-up and measurement alike.
    pub fn of_calls(orders: &Orders, mut call: impl FnMut(u64) -> Result<()>) -> Result<Self> {
        let mut sample = Sample::new();
        for number in 1..=orders.warmup {
            call(number)?;
        }
        for number in orders.warmup + 1..=orders.total() {
            let start = Instant::now();
            call(number)?;
            sample.record(start.elapsed());
        }
        Ok(sample)
    }

    /// Like [`of_calls`](Self::of_calls), each call after a rest, which is not timed.
    pub fn of_rested_calls(orders: &Orders, rest: Duration, mut call: impl FnMut(u64) -> Result<()>) -> Result<Self> {
        let mut sample = Sample::new();
        for number in 1..=orders.total() {
            std::thread::sleep(rest);
            let start = Instant::now();
            call(number)?;
            let took = start.elapsed();
            if number > orders.warmup {
                sample.record(took);
            }
        }
        Ok(sample)
    }

    pub fn record(&mut self, duration: Duration) {
        let ns = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        self.histogram.saturating_record(ns);
        self.min_ns = self.min_ns.min(ns);
        self.max_ns = self.max_ns.max(ns);
        self.sum_ns = self.sum_ns.saturating_add(ns);
    }

    /// Keeps a number of this round under `name`, for the rows that use it.
    pub fn note(&mut self, name: &str, value: f64) {
        self.numbers.entry(name.to_owned()).or_default().push(value);
    }

    /// Records the rate and duration of `count` things that together took `took`.
    ///
    /// Notes the number per second as `rate`, and records the mean duration of one.
    pub fn rate(&mut self, count: u64, took: Duration) -> Result<()> {
        self.record(took / u32::try_from(count).context("so many calls take too long")?);
        self.note("rate", count as f64 / took.as_secs_f64());
        Ok(())
    }

    /// Returns the numbers kept under `name`, one per round that kept one.
    pub fn numbers(&self, name: &str) -> &[f64] {
        self.numbers.get(name).map_or(&[], Vec::as_slice)
    }

    /// Returns the median over all rounds of the numbers kept under `name`.
    pub fn median(&self, name: &str) -> Result<f64> {
        median(self.numbers(name)).with_context(|| format!("the case notes no {name}"))
    }

    /// Returns all kept numbers, by name.
    pub fn all_numbers(&self) -> &BTreeMap<String, Vec<f64>> {
        &self.numbers
    }

    /// Adds another round of the same case.
    pub fn merge(&mut self, other: &Sample) {
        self.histogram.add(&other.histogram).expect("all samples have the same bounds");
        self.min_ns = self.min_ns.min(other.min_ns);
        self.max_ns = self.max_ns.max(other.max_ns);
        self.sum_ns = self.sum_ns.saturating_add(other.sum_ns);
        for (name, values) in &other.numbers {
            self.numbers.entry(name.clone()).or_default().extend(values);
        }
    }

    /// Returns statistics over everything recorded and merged so far; all zero if nothing was.
    pub fn summary(&self) -> Summary {
        let count = self.histogram.len();
        let at = |quantile| self.histogram.value_at_quantile(quantile).min(self.max_ns);
        Summary {
            count,
            min: if count == 0 { 0 } else { self.min_ns },
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p999: at(0.999),
            max: self.max_ns,
            mean: if count == 0 { 0.0 } else { self.sum_ns as f64 / count as f64 },
        }
    }

    /// Returns the sample as one line of JSON, for the process that asked for it.
    pub fn to_line(&self) -> Result<String> {
        let line = Line {
            summary: Some(self.summary()),
            buckets: self.histogram.iter_recorded().map(|it| (it.value_iterated_to(), it.count_at_value())).collect(),
            min_ns: self.min_ns,
            max_ns: self.max_ns,
            sum_ns: self.sum_ns,
            numbers: self.numbers.clone(),
        };
        serde_json::to_string(&line).context("a measurement could not be written as JSON")
    }

    /// Parses the line that [`to_line`](Self::to_line) wrote.
    pub fn from_line(line: &str) -> Result<Self> {
        let line: Line = serde_json::from_str(line).context("the measuring role did not answer with a measurement")?;
        let mut sample = Sample::new();
        for (ns, times) in line.buckets {
            sample.histogram.saturating_record_n(ns, times);
        }
        Ok(Sample { min_ns: line.min_ns, max_ns: line.max_ns, sum_ns: line.sum_ns, numbers: line.numbers, ..sample })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample_of(values_ns: impl IntoIterator<Item = u64>) -> Sample {
        let mut sample = Sample::new();
        values_ns.into_iter().for_each(|ns| sample.record(Duration::from_nanos(ns)));
        sample
    }

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[1.0, 3.0]), Some(2.0), "and not the greater one");
        assert_eq!(median(&[9.0, 1.0, 2.0, 5.0]), Some(3.5));
        assert_eq!(median(&[]), None);
    }

    #[test]
    fn merged_rounds_are_one_long_round() {
        let mut merged = sample_of((1..=1000).map(|i| i * 7));
        merged.merge(&sample_of((1..=9000).map(|i| i * 131)));
        let at_once = sample_of((1..=1000).map(|i| i * 7).chain((1..=9000).map(|i| i * 131)));
        assert_eq!(merged.summary(), at_once.summary());
    }

    #[test]
    fn a_line_carries_every_percentile() {
        let mut before = sample_of((1..=5000).map(|i| i * i));
        before.note("wakes", 3.0);
        let mut after = Sample::from_line(&before.to_line().unwrap()).unwrap();
        assert_eq!(after.summary(), before.summary());

        after.merge(&Sample::from_line(&before.to_line().unwrap()).unwrap());
        assert_eq!(after.summary().p50, before.summary().p50, "the same values twice have the same median");
        assert_eq!(after.numbers("wakes"), [3.0, 3.0]);
        assert!(after.numbers("sleeps").is_empty());
    }

    #[test]
    fn extremes_are_exact_and_not_rounded_to_buckets() {
        let summary = sample_of([100_001, 100_003, 99_999_999]).summary();
        assert_eq!((summary.min, summary.max), (100_001, 99_999_999));
        assert_eq!(summary.p999, 99_999_999, "no percentile lies above the maximum");
    }

    #[test]
    fn nothing_measured_is_all_zero() {
        let summary = Sample::new().summary();
        assert_eq!((summary.count, summary.min, summary.p50, summary.max), (0, 0, 0, 0));
        assert_eq!(summary.mean, 0.0);
    }

    #[test]
    fn chatter_instead_of_a_measurement_is_refused() {
        let refusal = Sample::from_line("hello").unwrap_err();
        assert!(refusal.to_string().contains("did not answer"), "{refusal}");
    }
}
