//! Places where a test can have the process killed: between any two steps of a send, a call, a return, a replacement.
//!
//! `TASUKI_CRASH=name:n` in the environment kills the process (SIGKILL, by its own hand) when it passes the place `name` for
//! the n-th time. Without the feature `crash-points`, which no shipped build has, a place is nothing.

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
    let plan = PLAN.get_or_init(|| {
        let plan = std::env::var("TASUKI_CRASH").ok()?;
        let (name, nth) = plan.rsplit_once(':')?;
        Some((name.to_owned(), nth.parse().ok()?))
    });
    if let Some((_, nth)) = plan.as_ref().filter(|(place, _)| place == name)
        && PASSES.fetch_add(1, Relaxed) + 1 == *nth
    {
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        // The signal is on its way; nothing more may happen here.
        loop {
            std::hint::spin_loop();
        }
    }
}

/// Every place, in the order in which a call passes them.
pub const POINTS: &[&str] = &[
    "client.connected",
    "client.send.taken",
    "client.send.detached",
    "client.send.pushed",
    "client.send.rung",
    "client.wait.parked",
    "client.return.attached",
    "server.accept.hello",
    "server.accept.welcomed",
    "server.serve.popped",
    "server.serve.begun",
    "server.serve.protected",
    "server.return.lent",
    "server.return.pushed",
    "server.return.rung",
    "server.park.parked",
    "giver.passed",
    "giver.released",
    "taker.taken",
    "taker.told",
];

/// The same of a NIC's driver, in the order in which a burst passes them.
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
