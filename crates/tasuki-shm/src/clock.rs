//! The clock of all stamps in shared memory: `CLOCK_MONOTONIC`, which all processes of a machine share.

/// Returns the time in ns.
#[inline]
pub fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}
