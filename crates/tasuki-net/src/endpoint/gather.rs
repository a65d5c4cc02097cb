//! Lets frames gather at an endpoint whose programs send many.
//!
//! The kernel wakes a worker at the first frame. Where the sender runs on the same CPU, each frame then costs a sleep and a
//! change of process, and the sender's queue overflows all the same. So while frames come one upon the other, and hardly
//! any go back, the worker naps for a fixed time without waiting for them, and takes all that came meanwhile. Where
//! frames go back, somebody may be waiting for an answer: then each is taken at once.

use std::time::{Duration, Instant};

/// Length of a nap: by so much a frame can be late.
pub(super) const NAP: Duration = Duration::from_micros(60);

/// Number of frames that must come in the time of a nap.
const LEAST: u64 = 4;

/// Number of frames over which this is judged where the last sleep was no such nap.
const WINDOW: u64 = 32;

/// So many frames must come for each that goes back.
const ONE_WAY: u64 = 8;

/// Judges how frames come.
#[derive(Debug)]
pub(super) struct Gather {
    /// The last sleep was a nap.
    is_on: bool,
    /// Frames taken and given up to the last judgement, and its time.
    last: (u64, u64, Instant),
}

impl Gather {
    pub(super) fn new(now: Instant) -> Self {
        Gather { is_on: false, last: (0, 0, now) }
    }

    /// Returns for how long to let frames gather, before a sleep. So far `taken` frames came from the programs, and
    /// `given` went to them.
    pub(super) fn nap(&mut self, taken: u64, given: u64, now: impl FnOnce() -> Instant) -> Option<Duration> {
        let (came, back) = (taken - self.last.0, given - self.last.1);
        if !self.is_on && came < WINDOW {
            return None;
        }
        let now = now();
        let time = now.saturating_duration_since(self.last.2);
        let is_dense = if self.is_on {
            came >= LEAST
        } else {
            time.as_nanos() * u128::from(LEAST) < NAP.as_nanos() * u128::from(came)
        };
        self.is_on = is_dense && back * ONE_WAY <= came;
        self.last = (taken, given, now);
        self.is_on.then_some(NAP)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MICRO: Duration = Duration::from_micros(1);

    /// Plays sleeps, each with the frames that came and went back before it, and the time since the last one. Returns
    /// which of them are naps.
    fn naps(sleeps: &[(u64, u64, Duration)]) -> Vec<bool> {
        let start = Instant::now();
        let mut gather = Gather::new(start);
        let (mut taken, mut given, mut now) = (0, 0, start);
        let nap = |(came, back, time): &(u64, u64, Duration)| {
            (taken, given, now) = (taken + came, given + back, now + *time);
            gather.nap(taken, given, || now).is_some()
        };
        sleeps.iter().map(nap).collect()
    }

    #[test]
    fn a_flood_gathers_until_a_nap_brings_few() {
        let flood = vec![(1, 0, 5 * MICRO); 32];
        assert_eq!(naps(&flood).iter().position(|naps| *naps), Some(31));
        let then = [(12, 0, 65 * MICRO), (4, 0, 65 * MICRO), (3, 0, 65 * MICRO), (31, 0, MICRO)];
        assert_eq!(naps(&[&flood[..], &then].concat())[32..], [true, true, false, false]);
    }

    #[test]
    fn frames_that_come_one_by_one_or_all_at_once_do_not_gather() {
        assert_eq!(naps(&vec![(1, 0, 20 * MICRO); 200]), vec![false; 200]);
        // As many as fit a queue, after a pause.
        assert_eq!(naps(&[(500, 0, 10_000 * MICRO)]), [false]);
    }

    #[test]
    fn frames_that_are_answered_do_not_gather() {
        assert_eq!(naps(&vec![(8, 2, 10 * MICRO); 200]), vec![false; 200]);
        let flood = [(8, 1, 10 * MICRO); 4];
        let then = [(12, 2, 65 * MICRO)];
        assert_eq!(naps(&[&flood[..], &then].concat()), [false, false, false, true, false]);
    }
}
