//! Places where a test may have the worker killed, or stopped: between any two steps of a relay, and of a burst.
//!
//! `TASUKI_CRASH=name:n` in the environment kills the process when it passes the place `name` for the n-th time, as
//! [`tasuki_shm::crash`] has it, whose places in a driver a worker passes as well. `TASUKI_STOP=name:n` stops it there (SIGSTOP), as a hung
//! one. Without the feature `crash-points`, which no shipped build has, a place is nothing.

/// Whether this worker is to go on driving after it has passed the lease and said so, as one that lies: `TASUKI_GOES_ON` is set.
#[cfg(feature = "crash-points")]
pub fn goes_on() -> bool {
    std::env::var_os("TASUKI_GOES_ON").is_some()
}

/// A place with a name.
#[cfg(not(feature = "crash-points"))]
#[inline(always)]
pub fn point(_name: &'static str) {}

/// A place with a name.
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
