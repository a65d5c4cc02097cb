//! systemd's watchdog, which ends a daemon whose loop goes round no more (`WatchdogSec=`). Workers go on without it, and the next daemon takes them over.

use std::time::Duration;

use sd_notify::NotifyState;

/// How often it wants to hear of us, if there is one.
#[derive(Debug)]
pub struct Watchdog {
    every: Option<Duration>,
    due: Duration,
}

impl Watchdog {
    /// As systemd says in the environment; `now` is on the caller's clock.
    pub fn begin(now: Duration) -> Self {
        let mut usec = 0;
        let is_there = sd_notify::watchdog_enabled(false, &mut usec);
        // Twice as often as it must be, as sd_watchdog_enabled(3) recommends.
        Watchdog { every: is_there.then(|| Duration::from_micros(usec / 2)), due: now }
    }

    /// Says that all is well, if it is time, and when it is time again.
    pub fn tell(&mut self, now: Duration) -> Option<Duration> {
        let every = self.every?;
        if now >= self.due {
            let _ = sd_notify::notify(false, &[NotifyState::Watchdog]);
            self.due = now + every;
        }
        Some(self.due)
    }
}
