//! Crash points: places where a test can have the process killed, between any two steps of a send, a call, a return,
//! or a replacement.
//!
//! `TASUKI_CRASH=name:n` in the environment makes the process kill itself (SIGKILL) when it passes the crash point
//! `name` for the n-th time. `TASUKI_STALL=name:path,…` makes a thread wait there as long as there is a file at `path`, as
//! if the kernel kept it waiting. Without the feature `crash-points`, which no shipped build has, a crash point does nothing.

/// Marks a crash point. Does nothing in this build.
#[cfg(not(feature = "crash-points"))]
#[inline(always)]
pub fn point(_name: &'static str) {}

/// Marks a crash point. Kills the process if `TASUKI_CRASH` asks for it, and waits if `TASUKI_STALL` does.
#[cfg(feature = "crash-points")]
pub fn point(name: &'static str) {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

    static PLAN: OnceLock<Option<(String, u64)>> = OnceLock::new();
    static STALLS: OnceLock<Vec<(String, std::path::PathBuf)>> = OnceLock::new();
    static PASSES: AtomicU64 = AtomicU64::new(0);
    let plan = PLAN.get_or_init(|| {
        let plan = std::env::var("TASUKI_CRASH").ok()?;
        let (name, nth) = plan.rsplit_once(':')?;
        Some((name.to_owned(), nth.parse().ok()?))
    });
    if let Some((_, nth)) = plan.as_ref().filter(|(place, _)| place == name)
        && PASSES.fetch_add(1, Relaxed) + 1 == *nth
    {
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        // The signal is on its way; this thread must do nothing more.
        loop {
            std::hint::spin_loop();
        }
    }
    let stalls = STALLS.get_or_init(|| {
        let stalls = std::env::var("TASUKI_STALL").unwrap_or_default();
        let stalls = stalls.split(',').filter_map(|stall| stall.split_once(':'));
        stalls.map(|(name, path)| (name.to_owned(), path.into())).collect()
    });
    if let Some((_, path)) = stalls.iter().find(|(place, _)| place == name) {
        while path.exists() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
}

/// All crash points of a NIC's driver, in the order in which a burst passes them.
pub const NIC_POINTS: &[&str] = &[
    "nic.posted",
    "nic.written",
    "nic.committed",
    "nic.rung",
    "nic.collected",
    "nic.saving",
    "nic.saved",
    "nic.changed",
    "nic.filled",
];
