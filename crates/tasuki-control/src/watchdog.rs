//! systemd's watchdog, which ends a daemon whose loop stops (`WatchdogSec=`). Workers run on without the daemon, and
//! the next one takes them over.

use std::time::Duration;

use sd_notify::NotifyState;

/// How often the watchdog expects a sign of life, if there is one.
#[derive(Debug)]
pub struct Watchdog {
    every: Option<Duration>,
    due: Duration,
}

impl Watchdog {
    /// Reads systemd's interval from the environment; `now` is on the caller's clock.
    pub fn begin(now: Duration) -> Self {
        let mut usec = 0;
        let is_there = sd_notify::watchdog_enabled(false, &mut usec);
        // Twice as often as required, as sd_watchdog_enabled(3) recommends.
        Watchdog { every: is_there.then(|| Duration::from_micros(usec / 2)), due: now }
    }

    /// Sends a sign of life if one is due. Returns when the next one is.
    pub fn tell(&mut self, now: Duration) -> Option<Duration> {
        let every = self.every?;
        if now >= self.due {
            let _ = sd_notify::notify(false, &[NotifyState::Watchdog]);
            self.due = now + every;
        }
        Some(self.due)
    }
}
