//! Counters and histograms that another process can read while they are written.
//!
//! They have one writer, so counting takes a load and a store and no locked instruction. A reader sees each number
//! as it was at some moment, and each counter grows. Two counters may be from different moments.

use std::ops::Deref;

use crate::line::{Claims, LINE_WORDS, Line};
use crate::sync::Relaxed;

/// Counters of one writer, by index. `M` is our own memory, eight counters per line.
#[derive(Debug)]
pub struct Counters<M>(M);

impl<M: Deref<Target = [Line]>> Counters<M> {
    /// Uses the counters in `lines`, with their present values.
    pub fn new(lines: M) -> Self {
        Counters(lines)
    }

    /// Adds `n` to counter `which`, wrapping.
    #[inline]
    pub fn add(&self, which: usize, n: u64) {
        let word = self.0[which / LINE_WORDS].word(which % LINE_WORDS);
        word.store(word.load(Relaxed).wrapping_add(n), Relaxed);
    }

    /// Returns the value of counter `which`.
    pub fn get(&self, which: usize) -> u64 {
        self.0[which / LINE_WORDS].word(which % LINE_WORDS).load(Relaxed)
    }
}

/// Steps per doubling: a bucket gives a value to one part in sixteen.
const STEPS: usize = 16;

/// Values from 2^40 on (18 minutes, in ns) fall into the last bucket.
const LARGEST_LOG2: usize = 40;

/// Number of buckets in a histogram.
pub const BUCKETS: usize = STEPS * (LARGEST_LOG2 - 3);

/// Number of lines that a histogram needs.
pub const HISTOGRAM_LINES: usize = BUCKETS.div_ceil(LINE_WORDS);

/// Returns the bucket of `value`. Values below 16 have one bucket each; above, each doubling has 16.
fn bucket(value: u64) -> usize {
    let log2 = 63 - (value | 1).leading_zeros() as usize;
    if log2 < 4 {
        return usize::try_from(value).expect("below 16");
    }
    let step = usize::try_from(value >> (log2 - 4)).expect("below 32") - STEPS;
    ((log2 - 3) * STEPS + step).min(BUCKETS - 1)
}

/// Returns the smallest value of a bucket.
fn floor_of(bucket: usize) -> u64 {
    match bucket / STEPS {
        0 => bucket as u64,
        doubling => ((STEPS + bucket % STEPS) as u64) << (doubling - 1),
    }
}

/// A histogram of one writer.
#[derive(Debug)]
pub struct Histogram<M>(Counters<M>);

impl<M: Deref<Target = [Line]>> Histogram<M> {
    /// Uses the histogram in `lines`, at least [`HISTOGRAM_LINES`] of them.
    pub fn new(lines: M) -> Self {
        assert!(lines.len() >= HISTOGRAM_LINES, "a histogram needs {HISTOGRAM_LINES} lines, not {}", lines.len());
        Histogram(Counters::new(lines))
    }

    /// Counts one `value`, in a unit that the caller chooses (ns, bytes).
    pub fn record(&self, value: u64) {
        self.0.add(bucket(value), 1);
    }
}

/// A reader's copy of a histogram.
#[derive(Debug, Clone)]
pub struct Snapshot {
    counts: Vec<u64>,
}

impl Snapshot {
    /// Reads a histogram that a peer writes.
    pub fn of<M: Deref<Target = [Line]>>(claims: &Claims<M>) -> Self {
        let counts = (0..BUCKETS.min(claims.len() * LINE_WORDS)).map(|i| claims.load(i / LINE_WORDS, i % LINE_WORDS));
        Snapshot { counts: counts.collect() }
    }

    /// Returns how many values were counted.
    pub fn count(&self) -> u64 {
        self.counts.iter().fold(0, |sum, n| sum.wrapping_add(*n))
    }

    /// Returns the value below which `share` (0 to 1) of all values lie, to one part in sixteen, or `None` if there
    /// are no values.
    #[expect(clippy::cast_precision_loss, reason = "a share of a count")]
    pub fn quantile(&self, share: f64) -> Option<u64> {
        let wanted = self.count() as f64 * share;
        let mut seen = 0_u64;
        let position = self.counts.iter().position(|n| {
            seen = seen.wrapping_add(*n);
            *n > 0 && seen as f64 >= wanted
        });
        position.map(floor_of)
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use std::sync::Arc;

    fn lines(count: usize) -> Arc<[Line]> {
        (0..count).map(|_| Line::default()).collect()
    }

    #[test]
    fn every_value_lies_in_its_bucket() {
        for value in
            (0..4096).chain((12..40).flat_map(|log2| [(1 << log2) - 1, 1 << log2, (1 << log2) + (1 << (log2 - 1))]))
        {
            let lower = floor_of(bucket(value));
            assert!(lower <= value && value - lower <= value / STEPS as u64, "{value} is in the bucket of {lower}");
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn a_reader_sees_what_was_written() {
        let lines = lines(HISTOGRAM_LINES);
        let histogram = Histogram::new(Arc::clone(&lines));
        (1..=1000).for_each(|value| histogram.record(value));
        let seen = Snapshot::of(&Claims::of(lines));
        assert_eq!(seen.count(), 1000);
        let median = seen.quantile(0.5).unwrap();
        assert!((468..=500).contains(&median), "{median}");
        assert_eq!(Snapshot::of(&Claims::of(self::lines(HISTOGRAM_LINES))).quantile(0.5), None);
    }

    #[test]
    fn a_counter_never_goes_back_under_a_readers_eyes() {
        let lines = lines(1);
        let claims = Claims::of(Arc::clone(&lines));
        let writer = std::thread::spawn(move || (0..100_000).for_each(|_| Counters::new(&*lines).add(2, 1)));
        let mut last = 0;
        while !writer.is_finished() {
            let now = claims.load(0, 2);
            assert!(now >= last);
            last = now;
        }
        writer.join().unwrap();
        assert_eq!(claims.load(0, 2), 100_000);
    }
}
