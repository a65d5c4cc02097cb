//! How long a process runs at a time where others want its CPU too.
//!
//! Whoever asks the scheduler for a shorter slice than others is run at once when it is woken, also while one of them is busy (EEVDF, Linux 6.12): a
//! frame that a busy program sends leaves when it is sent, and not at the next tick, four milliseconds later; and a worker that takes a NIC over is not kept
//! waiting by the program beside it. It gets no more of the CPU by that. No privilege is needed.
//!
//! # Invariants
//!
//! - **L1** The kernel copies the structure, of whose length it is told, and keeps nothing of it.
#![allow(unsafe_code, reason = "neither rustix nor libc has a call for it (L1)")]

/// Nanoseconds: the shortest that the kernel grants.
const BRIEF_NS: u64 = 100_000;

/// What it starts has slices of its own.
const RESET_ON_FORK: u64 = 1;

/// Asks for slices of 0.1 ms for this thread, not for what it starts, and else for what it has. An older kernel takes no notice.
pub fn brief() {
    let Some(now) = attributes() else { return };
    if now.sched_policy != SCHED_OTHER {
        // Somebody has chosen another class for it, and knows why.
        return;
    }
    let asked = libc::sched_attr { sched_runtime: BRIEF_NS, sched_flags: now.sched_flags | RESET_ON_FORK, ..now };
    // SAFETY: the structure outlives the call, and the kernel only reads it (L1).
    let _ = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const asked, 0) };
}

/// What this thread has.
fn attributes() -> Option<libc::sched_attr> {
    let mut now = libc::sched_attr {
        size: 0,
        sched_policy: 0,
        sched_flags: 0,
        sched_nice: 0,
        sched_priority: 0,
        sched_runtime: 0,
        sched_deadline: 0,
        sched_period: 0,
    };
    // SAFETY: L1; as many bytes are the kernel's to write.
    let got = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut now, size_of::<libc::sched_attr>(), 0) };
    (got == 0).then_some(now)
}

/// The class of those that share a CPU fairly.
const SCHED_OTHER: u32 = 0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_grants_it() {
        brief();
        let now = attributes().expect("a kernel since 3.14");
        assert_eq!(now.sched_policy, SCHED_OTHER);
        // Kernels before 6.12 have no slices to ask for.
        assert!([0, BRIEF_NS].contains(&now.sched_runtime), "{}", now.sched_runtime);
    }
}
