//! Guards on mappings of memory that can be taken away: its maker cuts the file, or there are no huge pages; or a device's
//! registers do not answer any more. An access to memory that is gone raises SIGBUS. The handler here replaces the whole
//! mapping, or a piece of it where the kernel gives less memory, and the access goes on.
//!
//! # Invariants
//!
//! - **G1** A guard's range is that of a living mapping: it is set after the mapping is made, and cleared before it is
//!   unmapped. The handler replaces nothing but this range, which stays mapped for all of its bytes (M1).
//! - **G2** The handler is one of SIGBUS with SA_SIGINFO, so the kernel passes it a structure with an address. It calls
//!   nothing but system calls and atomics, which are safe in a signal handler, and leaves errno alone: rustix makes its
//!   calls without it.
#![allow(unsafe_code, reason = "a signal handler, and the mapping that it makes")]

use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rustix::mm::{MapFlags, MremapFlags, ProtFlags};

use super::{HUGE_PAGE_LEN, PAGE_LEN, RegionError};

/// Maximum number of guarded mappings of a process.
pub const GUARDS_MAX: usize = 256;

struct Guarded {
    /// The range ([`word`]); 0 if the guard is free. One word, so that the handler never mixes two ranges while another
    /// thread changes the guard.
    range: AtomicUsize,
    /// The memory went away.
    is_gone: AtomicBool,
}

#[expect(clippy::declare_interior_mutable_const, reason = "the initial value of each element")]
const FREE: Guarded = Guarded { range: AtomicUsize::new(0), is_gone: AtomicBool::new(false) };

/// Bits of a range's word that count its pages: up to 1 TiB. The others number its first page, of 2^36: no mapping has a
/// higher address unless it asks for one.
const LEN_BITS: u32 = 28;
const _: () = assert!(usize::BITS == 64);

impl Guarded {
    /// Returns first address and length; a free guard has a length of 0.
    fn range(&self) -> (usize, usize) {
        let word = self.range.load(Ordering::Acquire);
        ((word >> LEN_BITS) * PAGE_LEN, (word & ((1 << LEN_BITS) - 1)) * PAGE_LEN)
    }
}

/// Returns a mapping's range as one word; `None` if it is too long.
fn word(start: usize, len: usize) -> Option<usize> {
    let (first, pages) = (start / PAGE_LEN, len.div_ceil(PAGE_LEN));
    (pages >> LEN_BITS == 0).then_some(first << LEN_BITS | pages)
}

static GUARDS: [Guarded; GUARDS_MAX] = [FREE; GUARDS_MAX];

/// The process's action on SIGBUS before ours: it may report the fault (a sanitizer, a fuzzer) or cope with it.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// A guard on a mapping. Dropping it ends the guard.
#[derive(Debug)]
pub struct Guard(usize);

impl Guard {
    /// Guards the mapping of `len` bytes at `base`, which no other thread knows yet.
    pub(super) fn on(base: NonNull<u8>, len: usize) -> Result<Self, RegionError> {
        BEFORE.get_or_init(install);
        let refused = RegionError::NoMemory { doing: "guarding a mapping", len };
        let Some(range) = word(base.as_ptr().addr(), len) else { return Err(refused) };
        let take =
            |guard: &Guarded| guard.range.compare_exchange(0, range, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        GUARDS.iter().position(take).map(Guard).ok_or(refused)
    }

    /// Guards a mapping of a device's registers. If they do not answer any more, they are [gone](Self::is_gone), and the caller
    /// answers for them.
    ///
    /// # Errors
    /// The process has as many guards as it can have.
    ///
    /// # Safety
    /// `base` and `len` are a mapping of its own, which nobody knows yet, and which stays until the guard is dropped (G1).
    pub unsafe fn on_registers(base: NonNull<u8>, len: usize) -> Result<Self, RegionError> {
        Self::on(base, len)
    }

    /// Returns whether the memory went away, and was replaced.
    #[inline]
    pub fn is_gone(&self) -> bool {
        GUARDS[self.0].is_gone.load(Ordering::Relaxed)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        GUARDS[self.0].is_gone.store(false, Ordering::Relaxed);
        GUARDS[self.0].range.store(0, Ordering::Release);
    }
}

/// Installs the handler. Returns the action that was there.
fn install() -> libc::sigaction {
    // SAFETY: zero is a value of this structure of integers (G2).
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_sigbus as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    let mut before = action;
    // SAFETY: the handler has the type that SA_SIGINFO asks for, and keeps to G2.
    unsafe { libc::sigaction(libc::SIGBUS, &raw const action, &raw mut before) };
    before
}

/// Lengths of the pieces that the handler replaces, in the order of its tries. The first is longer than any range. The second
/// is short: the user may touch many places before it looks, and each costs a piece. A part of a huge page cannot be replaced:
/// the others are the lengths of huge pages.
const PIECES: [usize; 4] = [1 << 63, 1 << 16, HUGE_PAGE_LEN, 1 << 30];

/// Returns the bounds of the aligned piece of this length at an address, as far as it is in the range.
fn piece_at(address: usize, start: usize, len: usize, piece: usize) -> (usize, usize) {
    let from = address - address % piece;
    (from.max(start), (from + piece).min(start + len))
}

/// Replaces this part of a guarded mapping, and returns whether that succeeded. Otherwise it stays as it is.
fn is_replaced((from, to): (usize, usize)) -> bool {
    let (at, len) = (std::ptr::with_exposed_provenance_mut(from), to - from);
    let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
    // Made elsewhere: before Linux 6.12, a mapping in this place that the kernel refuses has unmapped the place.
    // SAFETY: a new mapping, which no code knows (G2).
    let Ok(fresh) = (unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, protection, flags) }) else {
        return false;
    };
    // SAFETY: moves it over a part of the guarded mapping and over nothing else (G1).
    let moved = unsafe { rustix::mm::mremap_fixed(fresh, len, len, MremapFlags::MAYMOVE, at) };
    if moved.is_err() {
        // SAFETY: the mapping of above, which no code knows (G2).
        let _ = unsafe { rustix::mm::munmap(fresh, len) };
    }
    moved.is_ok()
}

extern "C" fn on_sigbus(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid structure (G2).
    let info = unsafe { &*info };
    // SAFETY: SIGBUS has an address (G2; sigaction(2)).
    let address = unsafe { info.si_addr() }.addr();
    for guard in &GUARDS {
        let (start, len) = guard.range();
        if !(start..start + len).contains(&address) {
            continue;
        }
        guard.is_gone.store(true, Ordering::Relaxed);
        // With `vm.overcommit_memory=2` the kernel counts each byte. The user of the memory looks often whether it is gone, so
        // few pieces are touched.
        if PIECES.into_iter().any(|piece| is_replaced(piece_at(address, start, len, piece))) {
            return;
        }
    }
    // It is no memory of ours: let the access fail again, as it would without this handler. No guard works from here on: a
    // process whose own handler goes on after that must do so without them.
    if let Some(before) = BEFORE.get() {
        // SAFETY: sets the action that the kernel said was set before (G2).
        unsafe { libc::sigaction(signal, before, std::ptr::null_mut()) };
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::alone;
    use crate::region::{CommonRegion, Mapping};

    extern "C" fn end(_: libc::c_int) {
        // SAFETY: ends the process; a signal handler may (G2).
        unsafe { libc::_exit(42) }
    }

    /// A limit on locked memory stands for `vm.overcommit_memory=2`, which holds for the whole machine.
    #[test]
    fn memory_that_the_kernel_gives_no_substitute_for_is_replaced_in_pieces() {
        use rustix::mm::{MlockAllFlags, mlockall};
        use rustix::process::{Resource, Rlimit, setrlimit};
        use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};
        const MIB: usize = 1 << 20;
        if !alone("region::guard::tests::memory_that_the_kernel_gives_no_substitute_for_is_replaced_in_pieces", 0) {
            return;
        }
        let memory = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&memory, 64 * MIB as u64).unwrap();
        let guarded = CommonRegion::map_guarded(memory.as_fd(), 64 * MIB).unwrap();
        let limit = Some(8 * MIB as u64);
        if setrlimit(Resource::Memlock, Rlimit { current: limit, maximum: limit }).is_err() {
            return println!("skipped: needs 8 MiB of locked memory (ulimit -l)");
        }
        let none = CapabilitySet::empty();
        set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none }).unwrap();
        mlockall(MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT).unwrap();
        rustix::fs::ftruncate(&memory, 0).unwrap();
        for at in [5 * MIB, 63 * MIB] {
            let mut bytes = [0; 8];
            guarded.copy_from(at, &[7; 8]).unwrap();
            guarded.copy_to(at, &mut bytes).unwrap();
            assert_eq!((bytes, guarded.is_gone()), ([7; 8], true));
        }
    }

    #[test]
    fn a_piece_is_aligned_and_within_its_range() {
        let (start, len) = (0x7f00_0000_1000, 3 * HUGE_PAGE_LEN);
        let piece = |address| piece_at(address, start, len, HUGE_PAGE_LEN);
        assert_eq!(piece(start), (start, 0x7f00_0020_0000));
        assert_eq!(piece(0x7f00_0020_0000), (0x7f00_0020_0000, 0x7f00_0040_0000));
        assert_eq!(piece(start + len - 1), (0x7f00_0060_0000, start + len));
        assert_eq!(piece_at(start + 1, start, len, PIECES[0]), (start, start + len));
    }

    #[test]
    fn a_fault_outside_all_guards_goes_to_the_handler_that_was_there() {
        if !alone("region::guard::tests::a_fault_outside_all_guards_goes_to_the_handler_that_was_there", 42) {
            return;
        }
        // SAFETY: the handler has the type that signal(2) asks for (G2).
        unsafe { libc::signal(libc::SIGBUS, end as *const () as usize) };
        let memory = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&memory, 4096).unwrap();
        let guarded = CommonRegion::map_guarded(memory.as_fd(), 4096).unwrap();
        let unguarded = Mapping::new(memory.as_fd(), 4096, ProtFlags::READ).unwrap();
        rustix::fs::ftruncate(&memory, 0).unwrap();
        guarded.copy_to(0, &mut [0]).unwrap();
        assert!(guarded.is_gone());
        // SAFETY: a byte of a mapping (M1); it is gone, and the handler ends the process.
        unsafe { unguarded.base.read_volatile() };
    }

    /// A mixture of two ranges has the handler replace memory that nobody guards.
    #[test]
    fn ranges_that_change_in_one_thread_are_never_mixed_up_in_another() {
        let (one, other) = ((0x7fff_f000_0000, 0x2000), (0x1000, 0x7000_0000));
        let (guard, changes) = (FREE, AtomicBool::new(true));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for at in 0..2_000_000 {
                    let (start, len) = if at % 2 == 0 { one } else { other };
                    guard.range.store(word(start, len).unwrap(), Ordering::Release);
                    guard.range.store(0, Ordering::Release);
                }
                changes.store(false, Ordering::Release);
            });
            while changes.load(Ordering::Acquire) {
                assert!([one, other, (0, 0)].contains(&guard.range()), "{:x?}", guard.range());
            }
        });
        assert_eq!(word(0x1000, 1 << 40), None);
    }
}
