//! The number of frames that may be sent by now.

use std::time::{Duration, Instant};

/// A steady frame rate, or no limit.
#[derive(Debug)]
pub struct Pace {
    start: Instant,
    /// Frames per second; 0 stands for no limit.
    rate: u64,
    sent: u64,
}

impl Pace {
    /// Sets a rate of `rate` frames per second from `start` on, or no limit.
    pub fn new(rate: Option<u64>, start: Instant) -> Self {
        Pace { start, rate: rate.unwrap_or(0), sent: 0 }
    }

    /// Returns how many more frames may be sent at `now`, at most `most`. A sender that was held up may catch up.
    pub fn due(&self, now: Instant, most: u64) -> u64 {
        if self.rate == 0 {
            return most;
        }
        let due = now.duration_since(self.start).as_nanos() * u128::from(self.rate) / 1_000_000_000;
        // The first frame goes out at once.
        u64::try_from(due).unwrap_or(u64::MAX).saturating_add(1).saturating_sub(self.sent).min(most)
    }

    /// Counts `count` frames as sent.
    pub fn sent(&mut self, count: u64) {
        self.sent += count;
    }

    /// Returns the time until the next frame is due.
    pub fn rest(&self, now: Instant) -> Duration {
        if self.rate == 0 {
            return Duration::ZERO;
        }
        let due = Duration::from_nanos(
            u64::try_from(u128::from(self.sent) * 1_000_000_000 / u128::from(self.rate)).unwrap_or(u64::MAX),
        );
        due.saturating_sub(now.duration_since(self.start))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_kept_and_caught_up_with() {
        let start = Instant::now();
        let mut pace = Pace::new(Some(1000), start);
        assert_eq!(pace.due(start, 32), 1);
        pace.sent(1);
        assert_eq!(pace.due(start, 32), 0);
        assert_eq!(pace.rest(start), Duration::from_millis(1));
        assert_eq!(pace.due(start + Duration::from_millis(10), 32), 10);
        assert_eq!(pace.due(start + Duration::from_secs(1), 32), 32, "no more than fit into a burst");
    }

    #[test]
    fn without_a_rate_as_many_as_fit() {
        let start = Instant::now();
        assert_eq!(Pace::new(None, start).due(start, 32), 32);
        assert_eq!(Pace::new(None, start).rest(start), Duration::ZERO);
    }
}
