//! Guards on mappings of memory that its maker can take away, by cutting the file or for want of huge pages. An access
//! to memory that is gone raises SIGBUS. The handler here replaces the whole mapping by zeroes, and the access goes on.
//!
//! # Invariants
//!
//! - **G1** A guard's range is that of a living mapping: it is set after the mapping is made, and cleared before it is
//!   unmapped. The handler replaces exactly this range, which stays mapped for all of its bytes (M1).
//! - **G2** The handler is one of SIGBUS with SA_SIGINFO, so the kernel passes it a structure with an address. It calls
//!   nothing but system calls and atomics, which are safe in a signal handler, and leaves errno alone: rustix makes its
//!   calls without it.
#![allow(unsafe_code, reason = "a signal handler, and the mapping that it makes")]

use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rustix::mm::{MapFlags, ProtFlags};

use super::{Mapping, RegionError};

/// Maximum number of guarded mappings of a process.
pub const GUARDS_MAX: usize = 64;

struct Guarded {
    /// First address; 0 if the guard is free.
    start: AtomicUsize,
    end: AtomicUsize,
    /// The memory went away.
    is_gone: AtomicBool,
}

#[expect(clippy::declare_interior_mutable_const, reason = "the initial value of each element")]
const FREE: Guarded = Guarded { start: AtomicUsize::new(0), end: AtomicUsize::new(0), is_gone: AtomicBool::new(false) };

static GUARDS: [Guarded; GUARDS_MAX] = [FREE; GUARDS_MAX];

/// Range that is taken while a guard is set up.
const TAKEN: usize = usize::MAX;

/// A guard on a mapping. Dropping it ends the guard.
#[derive(Debug)]
pub struct Guard(usize);

impl Guard {
    /// Guards a mapping.
    pub(super) fn on(mapping: &Mapping) -> Result<Self, RegionError> {
        static HANDLER: Once = Once::new();
        HANDLER.call_once(install);
        let take =
            |guard: &&Guarded| guard.start.compare_exchange(0, TAKEN, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        let at = GUARDS.iter().position(|guard| take(&guard));
        let at = at.ok_or(RegionError::NoMemory { doing: "guarding a mapping", len: mapping.len })?;
        let guard = &GUARDS[at];
        guard.is_gone.store(false, Ordering::Relaxed);
        guard.end.store(mapping.base.as_ptr().addr() + mapping.len, Ordering::Relaxed);
        guard.start.store(mapping.base.as_ptr().addr(), Ordering::Release);
        Ok(Guard(at))
    }

    /// Returns whether the memory went away. It holds zeroes then.
    pub(super) fn is_gone(&self) -> bool {
        GUARDS[self.0].is_gone.load(Ordering::Relaxed)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        GUARDS[self.0].start.store(0, Ordering::Release);
    }
}

fn install() {
    // SAFETY: zero is a value of this structure of integers (G2).
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_sigbus as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: the handler has the type that SA_SIGINFO asks for, and keeps to G2.
    unsafe { libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()) };
}

extern "C" fn on_sigbus(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid structure (G2).
    let info = unsafe { &*info };
    // SAFETY: SIGBUS has an address (G2; sigaction(2)).
    let address = unsafe { info.si_addr() }.addr();
    for guard in &GUARDS {
        let start = guard.start.load(Ordering::Acquire);
        let end = guard.end.load(Ordering::Relaxed);
        if start == 0 || start == TAKEN || !(start..end).contains(&address) {
            continue;
        }
        guard.is_gone.store(true, Ordering::Relaxed);
        let at = std::ptr::with_exposed_provenance_mut(start);
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        // SAFETY: replaces the guarded mapping and nothing else (G1).
        if unsafe { rustix::mm::mmap_anonymous(at, end - start, protection, flags) }.is_ok() {
            return;
        }
    }
    // It is no memory of ours: let the access fail again, as it would without a handler.
    // SAFETY: sets the default action (G2).
    unsafe { libc::signal(signal, libc::SIG_DFL) };
}
