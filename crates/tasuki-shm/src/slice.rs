//! The time for which a process runs without interruption while others want its CPU too.
//!
//! A woken thread with a shorter slice than the running one runs at once (EEVDF, Linux 6.12). So a frame that a busy
//! program sends leaves when the program sends it, and not at the next tick, four milliseconds later. And a worker that
//! takes a NIC over does not wait for the program beside it. The thread gets no larger share of the CPU. No privilege
//! is needed.
//!
//! # Invariants
//!
//! - **L1** The kernel copies the structure, whose length it is told, and keeps no reference to it.
#![allow(unsafe_code, reason = "neither rustix nor libc has a call for it (L1)")]

/// Slice length in ns: the shortest that the kernel grants.
const BRIEF_NS: u64 = 100_000;

/// Threads and processes that this thread starts do not inherit the slice.
const RESET_ON_FORK: u64 = 1;

/// Asks for slices of 0.1 ms for this thread, and not for threads and processes that it starts. All other attributes
/// stay. An older kernel ignores the request.
pub fn brief() {
    let Some(now) = attributes() else { return };
    if now.sched_policy != SCHED_OTHER {
        // Another class was chosen for this thread on purpose.
        return;
    }
    let asked = libc::sched_attr { sched_runtime: BRIEF_NS, sched_flags: now.sched_flags | RESET_ON_FORK, ..now };
    // SAFETY: the structure outlives the call, and the kernel only reads it (L1).
    let _ = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const asked, 0) };
}

/// Returns the scheduling attributes of this thread, or `None` if the kernel refuses.
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
    // SAFETY: L1; the kernel may write exactly as many bytes.
    let got = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut now, size_of::<libc::sched_attr>(), 0) };
    (got == 0).then_some(now)
}

/// The scheduling class of threads that share a CPU fairly.
const SCHED_OTHER: u32 = 0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_grants_it() {
        brief();
        let now = attributes().expect("a kernel since 3.14");
        assert_eq!(now.sched_policy, SCHED_OTHER);
        // Kernels before 6.12 have no slices to request.
        assert!([0, BRIEF_NS].contains(&now.sched_runtime), "{}", now.sched_runtime);
    }
}
