//! Decides when a living worker counts as hung. The caller passes the time in.

use std::time::Duration;

/// Heartbeat of a worker, as far as it is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Heartbeat {
    /// Count of bursts, at its last change.
    bursts: u64,
    /// Time of that change, on the caller's clock.
    at: Duration,
}

impl Heartbeat {
    /// Starts with a worker that is alive now.
    pub fn new(now: Duration) -> Self {
        Heartbeat { bursts: 0, at: now }
    }

    /// Notes the worker's report that it has looked `bursts` times for work. A count that does not move is no beat:
    /// another process may be reporting it.
    pub fn beat(&mut self, now: Duration, bursts: u64) {
        if bursts != self.bursts {
            *self = Heartbeat { bursts, at: now };
        }
    }

    /// Returns when the worker was last known to live.
    pub fn at(&self) -> Duration {
        self.at
    }

    /// Returns whether the worker has been silent for `limit`. A clock that goes back proves nothing.
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
