//! Lets frames gather where many come one by one.
//!
//! A worker that has nothing to do sleeps until a frame wakes it. Where frames come one upon the other, each then costs a
//! wake-up, and its sender a notification; if all share a CPU, hardly anything else is done. So while hardly any frames go
//! the other way, the worker naps: unheard by the side from which they come, until some have gathered, and for as long as a
//! frame may wait at most. It goes on with that while naps bring several. Where frames go back, somebody may be waiting for
//! an answer: then each is taken at once.
//!
//! That is interrupt coalescing of a network card, by count and time, as Linux adapts it (`include/linux/dim.h`: up to
//! 256 µs).

use std::time::{Duration, Instant};

/// How long a frame may wait, if its node's user does not say that.
pub const LATENCY: Duration = Duration::from_micros(250);

/// The shortest nap: less saves nothing. Where enough frames come in half of it, the worker hardly sleeps anyway.
const SHORTEST: Duration = Duration::from_micros(60);

/// Number of waits after which a worker that does not nap tries it.
const WINDOW: u32 = 16;

/// A nap that brings fewer frames is the last one.
const LEAST: u64 = 4;

/// So many frames are to gather.
const ENOUGH: u32 = 16;

/// So many frames must come for each that goes the other way.
const ONE_WAY: u64 = 8;

/// Number of naps after which it is judged anew whether frames still come one by one.
const NAPS: u32 = 256;

/// The side whose frames gather.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    /// The node's programs.
    Programs,
    /// The other nodes.
    Vni,
}

/// Judges how frames come.
#[derive(Debug)]
pub(super) struct Gather {
    /// How long a frame may wait.
    latency: Duration,
    /// Naps left.
    naps: u32,
    /// Waits without a nap since the last judgement, and the frames taken and given up to the last of them.
    waits: u32,
    moved: u64,
    /// Number of naps so far.
    pub(super) count: u64,
    /// Frames taken and given up to the last judgement, and its time.
    last: ([u64; 2], Instant),
}

impl Gather {
    /// Has a frame wait for up to `latency`; not at all if that is zero.
    pub(super) fn new(latency: Duration, now: Instant) -> Self {
        Gather { latency, naps: 0, waits: 0, moved: 0, count: 0, last: ([0; 2], now) }
    }

    /// Returns for how long to nap, and whose frames gather meanwhile, in a wait for frames. So far `taken` frames came from the
    /// programs, and `given` went to them. May be asked again in a wait without a nap.
    pub(super) fn nap(&mut self, taken: u64, given: u64, now: impl FnOnce() -> Instant) -> Option<(Side, Duration)> {
        if self.naps == 0 {
            let moved = taken + given;
            self.waits += u32::from(moved != self.moved);
            self.moved = moved;
            if self.latency.is_zero() || self.waits < WINDOW {
                return None;
            }
        }
        let now = now();
        let time = now.saturating_duration_since(self.last.1);
        let sum = [taken, given];
        let [taken, given] = [0, 1].map(|way| sum[way] - self.last.0[way]);
        let (side, came, back) = if taken > given { (Side::Programs, taken, given) } else { (Side::Vni, given, taken) };
        let enough = time.as_secs_f64() * f64::from(ENOUGH) / came as f64;
        let enough = Duration::try_from_secs_f64(enough).unwrap_or(Duration::MAX);
        let brings_several = if self.naps > 0 {
            came >= LEAST
        } else {
            // Waits with a frame each, and at least two of them in the time of a nap.
            came >= WINDOW.into() && time * 2 < self.latency * WINDOW
        };
        self.naps = match self.naps.checked_sub(1) {
            _ if !brings_several || back * ONE_WAY > came || enough < SHORTEST / 2 => 0,
            None => NAPS,
            Some(left) => left,
        };
        (self.waits, self.last) = (0, (sum, now));
        self.count += u64::from(self.naps > 0);
        (self.naps > 0).then(|| (side, enough.clamp(SHORTEST.min(self.latency), self.latency)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MICRO: Duration = Duration::from_micros(1);

    /// A sleep: the frames that were taken and given before it, and the time since the last one.
    type Sleep = (u64, u64, Duration);

    /// Returns whose frames gather in each of these sleeps, and for how many µs.
    fn play(latency: Duration, sleeps: &[Sleep]) -> Vec<Option<(Side, u128)>> {
        let start = Instant::now();
        let mut gather = Gather::new(latency, start);
        let (mut taken, mut given, mut now) = (0, 0, start);
        let nap = |(took, gave, time): &Sleep| {
            (taken, given, now) = (taken + took, given + gave, now + *time);
            gather.nap(taken, given, || now).map(|(side, long)| (side, long.as_micros()))
        };
        sleeps.iter().map(nap).collect()
    }

    /// Returns the number of naps among so many sleeps that are alike.
    fn naps(count: usize, sleep: Sleep) -> usize {
        play(LATENCY, &vec![sleep; count]).iter().flatten().count()
    }

    #[test]
    fn frames_that_come_one_by_one_gather_until_a_nap_brings_few() {
        let flood = [(1, 0, 10 * MICRO); 16];
        let long = 200 * MICRO;
        let then = [(16, 0, long), (4, 0, long), (80, 10, long), (3, 0, long)];
        let all = play(LATENCY, &[&flood[..], &then, &flood].concat());
        let its = |us: u128| Some((Side::Programs, us));
        let expected = [vec![None; 15], vec![its(160), its(200), its(250), its(60)], vec![None; 16], vec![its(160)]];
        assert_eq!(all, expected.concat());
        assert_eq!(play(LATENCY, &[(0, 1, 10 * MICRO); 16])[15], Some((Side::Vni, 160)));
    }

    #[test]
    fn frames_that_come_slowly_or_together_or_are_answered_do_not_gather() {
        assert_eq!(naps(200, (1, 0, 130 * MICRO)), 0, "a nap would bring one");
        assert_eq!(naps(200, (0, 0, MICRO)), 0, "something else wakes the worker");
        assert_eq!(naps(200, (1, 0, MICRO)), 0, "it hardly sleeps");
        assert_eq!(naps(200, (8, 2, 10 * MICRO)), 0, "one of four is an answer");
        assert_eq!(naps(200, (1, 1, 5 * MICRO)), 0);
    }

    #[test]
    fn the_latency_decides_which_are_slow() {
        let slow = [(1, 0, 250 * MICRO); 16];
        assert_eq!(play(1500 * MICRO, &slow)[15], Some((Side::Programs, 1500)));
        assert_eq!(play(20 * MICRO, &[(1, 0, 5 * MICRO); 16])[15], Some((Side::Programs, 20)));
        assert_eq!(play(Duration::ZERO, &[(1, 0, 5 * MICRO); 64]), [None; 64]);
    }

    #[test]
    fn whether_naps_save_anything_is_judged_anew_after_a_while() {
        let sleeps = [vec![(1, 0, 10 * MICRO); 16], vec![(30, 0, 260 * MICRO); 400]].concat();
        // The frames come together by now: each sleep would bring as many.
        assert_eq!(play(LATENCY, &sleeps).iter().flatten().count(), NAPS as usize);
    }
}
