//! Crash points: places where a test may have the worker killed or stopped, between any two steps of a relay and of
//! a burst.
//!
//! `TASUKI_CRASH=name:n` in the environment kills the process when it passes the crash point `name` for the n-th
//! time. [`tasuki_shm::crash`] does this; a worker also passes the crash points of its drivers. `TASUKI_STOP=name:n`
//! stops the process there (SIGSTOP), as if it hung. Without the feature `crash-points`, which no shipped build has,
//! a crash point does nothing.

/// Returns whether this worker is to go on driving after it has passed the lease and reported that, as a lying
/// worker would: `TASUKI_GOES_ON` is set.
#[cfg(feature = "crash-points")]
pub fn goes_on() -> bool {
    std::env::var_os("TASUKI_GOES_ON").is_some()
}

/// Passes the crash point with this name.
#[cfg(not(feature = "crash-points"))]
#[inline(always)]
pub fn point(_name: &'static str) {}

/// Passes the crash point with this name.
#[cfg(feature = "crash-points")]
pub fn point(name: &'static str) {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

    static PLAN: OnceLock<Option<(String, u64)>> = OnceLock::new();
    static PASSES: AtomicU64 = AtomicU64::new(0);
    tasuki_shm::crash::point(name);
    let plan = PLAN.get_or_init(|| {
        let plan = std::env::var("TASUKI_STOP").ok()?;
        let (name, nth) = plan.rsplit_once(':')?;
        Some((name.to_owned(), nth.parse().ok()?))
    });
    if let Some((_, nth)) = plan.as_ref().filter(|(place, _)| place == name)
        && PASSES.fetch_add(1, Relaxed) + 1 == *nth
    {
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::STOP);
    }
}
