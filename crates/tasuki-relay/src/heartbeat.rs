//! When a worker that lives counts as hung. The time comes in as a value.

use std::time::Duration;

/// How often a worker says that it lives, at least.
pub const BEAT: Duration = Duration::from_millis(1);

/// What is known of a worker's heart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Heartbeat {
    /// Its count of bursts, as it last changed.
    bursts: u64,
    /// When that was, on the caller's clock.
    at: Duration,
}

impl Heartbeat {
    /// Of a worker that is alive now.
    pub fn new(now: Duration) -> Self {
        Heartbeat { bursts: 0, at: now }
    }

    /// It says that it has looked `bursts` times for work. A count that does not move is no beat: somebody else may be saying it.
    pub fn beat(&mut self, now: Duration, bursts: u64) {
        if bursts != self.bursts {
            *self = Heartbeat { bursts, at: now };
        }
    }

    /// Whether it has been silent for `limit`. A clock that goes back proves nothing.
    pub fn silent(&self, now: Duration, limit: Duration) -> bool {
        now.saturating_sub(self.at) >= limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_count_that_moves_is_a_beat() {
        let ms = Duration::from_millis;
        let mut heartbeat = Heartbeat::new(ms(10));
        assert!(!heartbeat.silent(ms(19), ms(10)));
        heartbeat.beat(ms(15), 1);
        assert!(!heartbeat.silent(ms(24), ms(10)));
        heartbeat.beat(ms(24), 1);
        assert!(heartbeat.silent(ms(25), ms(10)));
        assert!(!heartbeat.silent(ms(3), ms(10)), "a clock that went back");
    }
}
