//! The clock of a model and its wire.

use std::time::{Duration, Instant};

/// Longest time between two looks at the clock that counts as the model's own work; the machine took any excess. The
/// model takes 2 to 5 µs; at line rate one look in a thousand takes longer than 5 µs, and one in ten thousand longer
/// than 10 µs (Xeon, 2026-11-23).
const STEP_MAX: Duration = Duration::from_micros(10);

/// A clock that stops while the machine runs something else.
///
/// Hardware is never held up. A model is: its CPU goes to another process, or the host of a virtual machine takes it
/// for milliseconds. If time went on meanwhile, the wire would deliver all frames that fell due at once, and timers
/// would run out unseen: faults that are not the driver's. So card and wire stop with the clock. They do see the
/// time for which the *driver* is held up. While the model has nothing to do, time goes on, however late the model
/// wakes: a link comes up in its due time on a busy machine, too.
#[derive(Debug)]
pub struct Clock {
    last: Instant,
    now: u64,
    /// Most that the clock may advance at the next look.
    step_max: Duration,
    stalls: Stalls,
}

/// Number and length of the times that the clock stood still.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stalls {
    /// Number of stalls.
    pub count: u64,
    /// Sum of all stalls, in nanoseconds.
    pub sum: u64,
    /// Longest stall, in nanoseconds.
    pub longest: u64,
}

impl Default for Clock {
    /// Starts a clock at 0.
    fn default() -> Self {
        Clock { last: Instant::now(), now: 0, step_max: STEP_MAX, stalls: Stalls::default() }
    }
}

impl Clock {
    /// Returns nanoseconds since the clock started, stalls left out.
    #[inline]
    pub fn now(&mut self) -> u64 {
        self.at(Instant::now())
    }

    #[inline]
    fn at(&mut self, instant: Instant) -> u64 {
        let passed = instant.saturating_duration_since(self.last);
        self.last = instant;
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.now += nanos(passed.min(self.step_max));
        if passed > self.step_max {
            let stall = nanos(passed - self.step_max);
            self.stalls.count += 1;
            self.stalls.sum += stall;
            self.stalls.longest = self.stalls.longest.max(stall);
        }
        self.step_max = STEP_MAX;
        self.now
    }

    /// Tells the clock that the model is about to sleep for lack of work. Time goes on meanwhile, even if the model
    /// wakes late.
    pub fn sleeps(&mut self) {
        self.now();
        self.step_max = Duration::MAX;
    }

    /// Returns the stalls until now.
    pub fn stalls(&self) -> Stalls {
        self.stalls
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_stands_still_while_the_model_does_not_run() {
        let mut clock = Clock::default();
        let start = clock.last;
        let after = |micros| start + Duration::from_micros(micros);
        assert_eq!(clock.at(after(10)), 10_000);
        assert_eq!(clock.stalls(), Stalls::default());
        assert_eq!(clock.at(after(10_000)), 20_000);
        assert_eq!(clock.at(after(10_005)), 25_000);
        assert_eq!(clock.at(after(10_000)), 25_000, "and never goes back");
        assert_eq!(clock.at(after(10_160)), 35_000);
        assert_eq!(clock.stalls(), Stalls { count: 2, sum: 9_980_000 + 150_000, longest: 9_980_000 });
    }

    #[test]
    fn time_goes_on_while_the_model_sleeps() {
        let mut clock = Clock::default();
        clock.sleeps();
        let asleep = clock.last;
        let before = clock.now;
        assert_eq!(clock.at(asleep + Duration::from_millis(900)) - before, 900_000_000);
        assert_eq!(clock.at(asleep + Duration::from_millis(901)) - before, 900_010_000, "once");
    }
}
