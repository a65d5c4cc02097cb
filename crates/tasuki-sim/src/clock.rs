//! The time that a model and its wire live by.

use std::time::{Duration, Instant};

/// What a model takes at most from one look at the clock to the next while it works: 2 to 5 µs, of a thousand looks at line rate one takes longer than 5 and
/// one of ten thousand longer than 10 (Xeon, 2026-11-23). What is longer, the machine took.
const STEP_MAX: Duration = Duration::from_micros(10);

/// Time that stands still while the machine runs something else.
///
/// Silicon is never held up. A model is: its CPU goes to another process, or the host of a virtual machine takes it for milliseconds. Were
/// time to go on, the wire would bring all at once what was due meanwhile, and timers would have run out unseen: faults that no driver can
/// be blamed for. So both stand still. What the *driver* is held up for, they do see. While there is nothing to do time goes on, however late
/// the model is woken: a link comes up in the time that it takes, on a machine with much to do, too.
#[derive(Debug)]
pub struct Clock {
    last: Instant,
    now: u64,
    /// What it may advance by at the next look.
    step_max: Duration,
    stalls: Stalls,
}

/// How often and how long time stood still.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stalls {
    /// Times.
    pub count: u64,
    /// In all, in nanoseconds.
    pub sum: u64,
    /// At most, in nanoseconds.
    pub longest: u64,
}

impl Default for Clock {
    /// Time, from 0 on.
    fn default() -> Self {
        Clock { last: Instant::now(), now: 0, step_max: STEP_MAX, stalls: Stalls::default() }
    }
}

impl Clock {
    /// Nanoseconds since the beginning.
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

    /// The model is about to sleep, since there is nothing to do. Time goes on meanwhile, also if it is woken late.
    pub fn sleeps(&mut self) {
        self.now();
        self.step_max = Duration::MAX;
    }

    /// What was taken from the model until now.
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
