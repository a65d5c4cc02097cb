//! Places where a test may have the worker killed, or stopped: between any two steps of a relay, and of a burst.
//!
//! As in `tasuki_shm::crash`: `TASUKI_CRASH=name:n` in the environment kills the process (SIGKILL, by its own hand) when it passes the place
//! `name` for the n-th time; `TASUKI_STOP=name:n` stops it there (SIGSTOP), as a hung one. Without the feature `crash-points`, which no
//! shipped build has, a place is nothing.

/// A place with a name.
#[cfg(not(feature = "crash-points"))]
#[inline(always)]
pub fn point(_name: &'static str) {}

/// A place with a name.
#[cfg(feature = "crash-points")]
pub fn point(name: &'static str) {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

    use rustix::process::Signal;

    struct Plan(Signal, Option<(String, u64)>, AtomicU64);

    static PLANS: OnceLock<[Plan; 2]> = OnceLock::new();
    let plans = PLANS.get_or_init(|| {
        [("TASUKI_CRASH", Signal::KILL), ("TASUKI_STOP", Signal::STOP)].map(|(variable, signal)| {
            let plan = std::env::var(variable).ok();
            let plan = plan.and_then(|plan| {
                let (name, nth) = plan.rsplit_once(':')?;
                Some((name.to_owned(), nth.parse().ok()?))
            });
            Plan(signal, plan, AtomicU64::new(0))
        })
    });
    for Plan(signal, plan, passes) in plans {
        let Some((_, nth)) = plan.as_ref().filter(|(place, _)| place == name) else { continue };
        if passes.fetch_add(1, Relaxed) + 1 != *nth {
            continue;
        }
        let _ = rustix::process::kill_process(rustix::process::getpid(), *signal);
        if *signal == Signal::KILL {
            // It is on its way; nothing more may happen here.
            loop {
                std::hint::spin_loop();
            }
        }
    }
}

/// Every place, in the order in which a worker's life passes them.
#[cfg(feature = "crash-points")]
#[allow(dead_code, reason = "for those who read what there is; tests name them")]
pub const POINTS: &[&str] = &[
    "map.begun",
    "map.done",
    "take.waiting",
    "take.won",
    "take.salvaged",
    "take.read",
    "take.looked",
    "burst.received",
    "frame.saved",
    "burst.turned",
    "burst.sent",
    "give.stopped",
    "give.written",
    "give.passed",
    "give.said",
];
