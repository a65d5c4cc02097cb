//! Shared memory: sealed memfds, their mappings, and the only places that turn their bytes into Rust values.
//!
//! We write a [`Region`]. A peer writes a [`PeerRegion`], which we map read-only. A stranger made a
//! [`CommonRegion`], and both sides write it. Each keeps its mapping alive as long as any [`Span`] of it lives.
//!
//! # Invariants
//!
//! - **M1** A mapping's `base` is page-aligned and stays mapped for `len` bytes until `Mapping` is dropped.
//! - **M2** We make no reference to plain data in memory that another process can write. We lend out atomics, or, in
//!   memory that only we can write, bytes whose owner the arena knows.
//! - **M3** A load or store inside a mapping never raises SIGBUS. The memory cannot shrink (`F_SEAL_SHRINK`). Memory
//!   into which others may punch holes has small pages only, because the kernel fills a hole in huge pages only
//!   while the pool of huge pages lasts. We check this before we map foreign memory: a peer's memory carries
//!   `F_SEAL_FUTURE_WRITE`, which forbids every process to punch holes, or has small pages; memory that we adopt has
//!   small pages. Into memory that we make on huge pages, only we can punch holes, and the processes to which we
//!   hand it for writing. Memory of a stranger that keeps neither rule is guarded: the handler of SIGBUS maps zeroes
//!   in its place (`region/guard.rs`). The kernel charges a filled hole to the process that fills it: see
//!   docs/design/threat-model.md.
#![allow(unsafe_code, reason = "mmap, mprotect, and the lending of atomics out of a mapping")]

use std::io;
use std::marker::PhantomData;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};

use crate::line::{Claims, LINE_LEN, Line};
use crate::slots::Table;
use crate::sync::AtomicU64;

mod common;
mod copy;
pub mod guard;

pub use common::CommonRegion;
use copy::{copy_abroad, prefetch_to_read, prefetch_to_write};

/// Bytes in a small page (4 KiB).
pub const PAGE_LEN: usize = 4096;

/// Bytes in a huge page (2 MiB).
pub const HUGE_PAGE_LEN: usize = 2 << 20;

/// The kind of pages that back a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pages {
    /// 4 KiB pages, which the kernel allocates on first touch.
    Small,
    /// 2 MiB pages, reserved at once from the machine's pool (`vm.nr_hugepages`) if that has enough of them, otherwise
    /// small ones.
    HugeIfAny,
}

/// Reasons why shared memory cannot be made or mapped.
#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    /// Memory or address space ran out. Free some, raise the limit, or ask for less.
    #[error("{doing} of {len} bytes was refused for lack of memory; free some, raise the limit, or ask for less")]
    NoMemory {
        /// Step that the kernel refused.
        doing: &'static str,
        /// Number of bytes requested.
        len: usize,
    },
    /// The process or the system has no free file descriptor. Close some, or raise the limit.
    #[error("{doing} was refused for lack of descriptors; close some, or raise RLIMIT_NOFILE")]
    NoDescriptors {
        /// Step that the kernel refused.
        doing: &'static str,
    },
    /// The descriptor is not shared memory that can be sealed.
    #[error("the descriptor is not a sealable memory file; the peer must pass a memfd")]
    NotMemory,
    /// The peer could shrink the memory under our mapping.
    #[error("the memory handed over is not sealed against shrinking; the peer must seal it before it is passed on")]
    Unsealed,
    /// The peer could let other processes write the memory, or punch holes into it.
    #[error(
        "the memory handed over is not sealed against further writers; the peer must seal it before it is passed on"
    )]
    Unguarded,
    /// The memory is shorter than the peer announced.
    #[error("the memory handed over holds {have} bytes where {need} were announced; the peer is broken or lies")]
    Truncated {
        /// Bytes present.
        have: usize,
        /// Bytes announced.
        need: usize,
    },
    /// Atomics of the region are lent out, so it cannot hold plain bytes.
    #[error("the region is lent as atomics already, and cannot hold plain bytes as well")]
    Lent,
    /// The caller asked for a part that the region does not have.
    #[error("bytes {offset} to {end} were asked of a region of {len}, or not on a whole line")]
    OutOfBounds {
        /// First byte requested.
        offset: usize,
        /// One past the last byte requested.
        end: usize,
        /// Length of the region in bytes.
        len: usize,
    },
    /// The kernel refused for another reason.
    #[error("the kernel refused while {doing}")]
    Kernel {
        /// Step that the kernel refused.
        doing: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
}

impl RegionError {
    fn from_errno(doing: &'static str, len: usize, errno: rustix::io::Errno) -> Self {
        use rustix::io::Errno;
        match errno {
            Errno::NOMEM | Errno::NOSPC | Errno::FBIG => Self::NoMemory { doing, len },
            Errno::MFILE | Errno::NFILE => Self::NoDescriptors { doing },
            other => Self::Kernel { doing, source: other.into() },
        }
    }
}

/// A mapping of `len` bytes; dropping it unmaps them (M1).
#[derive(Debug)]
struct Mapping {
    base: NonNull<u8>,
    len: usize,
    /// Guards memory that its maker can take away.
    guard: Option<guard::Guard>,
}

// SAFETY: a mapping belongs to the process, not to a thread; through it we reach only atomics, or bytes guarded by
// the arena's ownership (M2).
unsafe impl Send for Mapping {}
// SAFETY: as above (M2); the struct never changes after construction.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(fd: BorrowedFd<'_>, len: usize, protection: ProtFlags) -> Result<Self, RegionError> {
        // SAFETY: a new mapping at an address that the kernel chooses replaces nothing (M1).
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED, fd, 0) }
            .map_err(|errno| RegionError::from_errno("mapping shared memory", len, errno))?;
        let base = NonNull::new(base.cast::<u8>()).expect("the kernel maps nothing at address 0");
        Ok(Mapping { base, len, guard: None })
    }

    fn check(&self, offset: usize, len: usize) -> Result<NonNull<u8>, RegionError> {
        let out = RegionError::OutOfBounds { offset, end: offset.saturating_add(len), len: self.len };
        match offset.checked_add(len) {
            // SAFETY: `offset <= len` of the mapping, just checked, so the sum stays inside it (M1).
            Some(end) if end <= self.len => Ok(unsafe { self.base.add(offset) }),
            _ => Err(out),
        }
    }

    /// Asks the kernel to map these pages now, for writing. Does nothing if there are no such bytes.
    fn populate(&self, offset: usize, len: usize) {
        let Ok(first) = self.check(offset, len) else { return };
        // SAFETY: asks the kernel to map pages of our own mapping, just checked, and changes nothing in them (M1).
        let _ = unsafe { rustix::mm::madvise(first.as_ptr().cast(), len, rustix::mm::Advice::LinuxPopulateWrite) };
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // Before the range can belong to another mapping (G1).
        self.guard = None;
        // SAFETY: mmap returned `base` and `len`, and no borrow is left: every Span holds an Arc (M1).
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "munmap of our own mapping failed: {unmapped:?}");
    }
}

mod sealed {
    /// Types that may be lent out of shared memory: they consist of atomics only, and any bytes are a valid value.
    ///
    /// # Safety
    /// The type consists of atomics alone and has no invalid bit pattern.
    pub unsafe trait Shared: Sync {}
    // SAFETY: an atomic; every bit pattern is valid (M2).
    unsafe impl Shared for crate::sync::AtomicU64 {}
    // SAFETY: an atomic; every bit pattern is valid (M2).
    unsafe impl Shared for std::sync::atomic::AtomicU32 {}
    // SAFETY: an atomic; every bit pattern is valid (M2).
    unsafe impl Shared for std::sync::atomic::AtomicU16 {}
    // SAFETY: eight atomics (M2).
    unsafe impl Shared for crate::line::Line {}
}
use sealed::Shared;

/// A run of consecutive atomics in a region. Keeps the mapping alive.
#[derive(Debug)]
pub struct Span<T> {
    mapping: Arc<Mapping>,
    first: NonNull<T>,
    count: usize,
    _lends: PhantomData<T>,
}

// SAFETY: lends `&[T]` of atomics (M2) in memory that belongs to the whole process.
unsafe impl<T: Shared> Send for Span<T> {}
// SAFETY: as above (M2).
unsafe impl<T: Shared> Sync for Span<T> {}

impl<T> Clone for Span<T> {
    fn clone(&self) -> Self {
        Span { mapping: Arc::clone(&self.mapping), first: self.first, count: self.count, _lends: PhantomData }
    }
}

impl<T: Shared> Span<T> {
    fn new(mapping: &Arc<Mapping>, offset: usize, count: usize) -> Result<Self, RegionError> {
        let len = count.saturating_mul(size_of::<T>());
        let first = mapping.check(offset, len)?.cast::<T>();
        if !first.is_aligned() {
            return Err(RegionError::OutOfBounds { offset, end: offset + len, len: mapping.len });
        }
        Ok(Span { mapping: Arc::clone(mapping), first, count, _lends: PhantomData })
    }
}

impl Span<Line> {
    /// Returns the first `count` words of these lines.
    pub fn words(&self, count: usize) -> Result<Span<AtomicU64>, RegionError> {
        let offset = self.first.addr().get() - self.mapping.base.addr().get();
        Span::new(&self.mapping, offset, count.min(self.count * LINE_LEN / 8))
    }
}

impl Table for Span<AtomicU64> {
    #[inline(always)]
    fn len(&self) -> usize {
        (**self).len()
    }

    #[inline(always)]
    fn word(&self, index: u32) -> Option<&AtomicU64> {
        self.get(index as usize)
    }
}

impl<T: Shared> Deref for Span<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY:
        // - in bounds and aligned: `new` checked both, on top of a page-aligned base (M1);
        // - initialised: the kernel zeroes fresh pages, and every bit pattern is a `T` (M2);
        // - alive: we hold `self.mapping` (M1), and it cannot shrink (M3);
        // - not aliased by plain data: M2.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.count) }
    }
}

/// Shared memory that we write.
#[derive(Debug)]
pub struct Region {
    mapping: Arc<Mapping>,
    memory: OwnedFd,
}

impl Region {
    /// Creates `len` bytes of zeroed shared memory, rounded up to whole pages and sealed against resizing.
    ///
    /// `/proc/PID/maps` shows `name`. Until [`seal_writers`](Self::seal_writers), peers that get the descriptor may
    /// map it writable.
    pub fn create(name: &str, len: usize, pages: Pages) -> Result<Self, RegionError> {
        match pages {
            Pages::Small => Self::create_of(name, len, false),
            Pages::HugeIfAny => Self::create_of(name, len, true).or_else(|_| Self::create_of(name, len, false)),
        }
    }

    fn create_of(name: &str, len: usize, huge: bool) -> Result<Self, RegionError> {
        let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let mut page = PAGE_LEN;
        if huge {
            flags |= MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
            page = HUGE_PAGE_LEN;
        }
        let len = len.max(1).next_multiple_of(page);
        let refused = |doing, errno| RegionError::from_errno(doing, len, errno);
        let memory = rustix::fs::memfd_create(name, flags).map_err(|e| refused("making shared memory", e))?;
        rustix::fs::ftruncate(&memory, len as u64).map_err(|e| refused("sizing shared memory", e))?;
        rustix::fs::fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW)
            .map_err(|e| refused("sealing shared memory", e))?;
        let mapping = Mapping::new(memory.as_fd(), len, ProtFlags::READ | ProtFlags::WRITE)?;
        Ok(Region { mapping: Arc::new(mapping), memory })
    }

    /// Maps, for writing, a region that another process made and lets us write. Every other holder of its descriptor
    /// may write it too, and punch holes into it. So none of its pages may be a huge page (M3), and apart from
    /// atomics only `unsafe` functions lend it for writing (M2).
    pub fn adopt(memory: OwnedFd) -> Result<Self, RegionError> {
        let len = kept_len(memory.as_fd())?;
        let mapping = Mapping::new(memory.as_fd(), len, ProtFlags::READ | ProtFlags::WRITE)?;
        Ok(Region { mapping: Arc::new(mapping), memory })
    }

    /// Makes our mapping the last one that can write: from now on no process, ours included, can map this memory
    /// writable.
    pub fn seal_writers(&self) -> Result<(), RegionError> {
        rustix::fs::fcntl_add_seals(&self.memory, SealFlags::FUTURE_WRITE | SealFlags::SEAL)
            .map_err(|e| RegionError::from_errno("sealing shared memory against writers", self.len(), e))
    }

    /// Lets nobody seal the memory any more. Otherwise a process that may write it can keep all later ones from that.
    pub fn seal_seals(&self) -> Result<(), RegionError> {
        rustix::fs::fcntl_add_seals(&self.memory, SealFlags::SEAL)
            .map_err(|e| RegionError::from_errno("sealing shared memory against further seals", self.len(), e))
    }

    /// Lets only the owner and root reopen the memory through a descriptor. So a read-only descriptor stays
    /// read-only in another user's hands. By default the kernel makes such memory open to all.
    pub fn close_to_others(&self) -> Result<(), RegionError> {
        rustix::fs::fchmod(&self.memory, Mode::RUSR | Mode::WUSR)
            .map_err(|errno| RegionError::from_errno("closing shared memory to other users", self.len(), errno))
    }

    /// Returns the descriptor to hand to a peer (SCM_RIGHTS).
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }

    /// Returns the descriptor and drops the rest.
    pub fn into_fd(self) -> OwnedFd {
        self.memory
    }

    /// Gives whole pages back to the kernel. They then read as zeroes, and cost memory again once they are written
    /// or read.
    pub fn give_back(&self, offset: usize, len: usize) -> Result<(), RegionError> {
        use rustix::fs::{FallocateFlags, SeekFrom};
        self.mapping.check(offset, len)?;
        // The kernel looks at the page tables of every process that maps the memory, also for pages that no process has written.
        let data = rustix::fs::seek(&self.memory, SeekFrom::Data(offset as u64));
        let is_empty = data.map_or_else(|errno| errno == rustix::io::Errno::NXIO, |at| at >= (offset + len) as u64);
        if is_empty {
            return Ok(());
        }
        let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&self.memory, how, offset as u64, len as u64)
            .map_err(|errno| RegionError::from_errno("giving back shared memory", len, errno))
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.mapping.len
    }

    /// Whether the region has no bytes: always false.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the address of the first byte, for kernel interfaces that need one. It stays the same while the
    /// region lives.
    pub fn address(&self) -> usize {
        self.mapping.base.as_ptr().addr()
    }

    /// Lends `count` atomics (`AtomicU64` or [`Line`]) from byte `offset` on.
    #[allow(private_bounds, reason = "the sealed list of types that may be lent")]
    pub fn span<T: Shared>(&self, offset: usize, count: usize) -> Result<Span<T>, RegionError> {
        Span::new(&self.mapping, offset, count)
    }

    /// Returns the bytes from `offset` on, for their one owner.
    ///
    /// # Safety
    /// No other process can write these bytes, and no code of this process writes them while the result lives.
    pub(crate) unsafe fn bytes(&self, offset: usize, len: usize) -> Result<&[u8], RegionError> {
        let first = self.mapping.check(offset, len)?;
        // SAFETY: in bounds (checked), alive (M1, M3); the caller promises that no code writes (M2).
        Ok(unsafe { std::slice::from_raw_parts(first.as_ptr(), len) })
    }

    /// Returns the bytes from `offset` on, for their one owner to write.
    ///
    /// # Safety
    /// No other process can write these bytes (peers map them read-only), and no other code of this process has a
    /// reference to them while the result lives.
    #[allow(clippy::mut_from_ref, reason = "the arena knows the writer of each byte, and the borrow checker does not")]
    pub(crate) unsafe fn bytes_mut(&self, offset: usize, len: usize) -> Result<&mut [u8], RegionError> {
        let first = self.mapping.check(offset, len)?;
        // SAFETY: in bounds (checked), alive (M1, M3), and exclusive: the caller promises that, and the arena keeps
        // the promise (M2).
        Ok(unsafe { std::slice::from_raw_parts_mut(first.as_ptr(), len) })
    }

    /// Checks that no atomics of the region are lent out.
    pub(crate) fn is_unlent(&self) -> Result<(), RegionError> {
        match Arc::strong_count(&self.mapping) {
            1 => Ok(()),
            _ => Err(RegionError::Lent),
        }
    }

    /// Returns the bytes from `offset` on. [No atomics of the region are lent](Self::is_unlent), now or later.
    ///
    /// # Safety
    /// No other process writes these bytes: peers map them read-only.
    #[inline]
    pub(crate) unsafe fn bytes_of_owner(&mut self, offset: usize, len: usize) -> Result<&mut [u8], RegionError> {
        // SAFETY: the caller promises that no other process writes, and no other code of this process has a
        // reference: ours is exclusive (M2).
        unsafe { self.bytes_mut(offset, len) }
    }

    /// Makes the CPU fetch the lines of these bytes for writing, while it has nothing better to do.
    pub(crate) fn prefetch_to_write(&self, offset: usize, len: usize) {
        if let Ok(first) = self.mapping.check(offset, len) {
            prefetch_to_write(first, len);
        }
    }

    /// Makes the CPU fetch the lines of these bytes for reading.
    #[inline]
    pub(crate) fn prefetch_to_read(&self, offset: usize, len: usize) {
        if let Ok(first) = self.mapping.check(offset, len) {
            prefetch_to_read(first, len);
        }
    }

    /// Asks the kernel to map every page of the region now, so that no first access faults. If the kernel cannot
    /// (before Linux 5.14), nothing changes.
    pub fn populate(&self) {
        self.mapping.populate(0, self.mapping.len);
    }

    /// Asks the kernel to map the pages that are allocated now, as [`populate`](Self::populate) does for all pages. A page
    /// that another process gives back meanwhile is allocated anew, with zeroes.
    pub fn populate_allocated(&self) {
        use rustix::fs::{SeekFrom, seek};
        let mut end = 0;
        while let Ok(start) = seek(&self.memory, SeekFrom::Data(end))
            && let Ok(hole) = seek(&self.memory, SeekFrom::Hole(start))
        {
            end = hole;
            let (Ok(offset), Ok(len)) = (usize::try_from(start), usize::try_from(hole.saturating_sub(start))) else {
                return;
            };
            self.mapping.populate(offset, len);
        }
    }

    /// Withdraws these pages from this process: any access faults until [`restore`](Self::restore).
    ///
    /// # Safety
    /// No reference into these bytes is alive.
    pub(crate) unsafe fn withdraw(&self, offset: usize, len: usize) -> Result<(), RegionError> {
        // SAFETY: the caller promises that no reference lives here (M2).
        unsafe { self.protect(offset, len, MprotectFlags::empty()) }
    }

    /// Makes pages accessible again that [`withdraw`](Self::withdraw) withdrew.
    pub(crate) fn restore(&self, offset: usize, len: usize) -> Result<(), RegionError> {
        // SAFETY: only widens access, so it cannot invalidate a reference (M1).
        unsafe { self.protect(offset, len, MprotectFlags::READ | MprotectFlags::WRITE) }
    }

    unsafe fn protect(&self, offset: usize, len: usize, flags: MprotectFlags) -> Result<(), RegionError> {
        let first = self.mapping.check(offset, len)?;
        // SAFETY: the pages lie inside our own mapping, just checked (M1); the caller answers for references (M2).
        unsafe { rustix::mm::mprotect(first.as_ptr().cast(), len, flags) }
            .map_err(|errno| RegionError::from_errno("changing the protection of slots", len, errno))
    }
}

impl AsFd for Region {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd()
    }
}

/// Shared memory that a peer writes, mapped read-only.
#[derive(Debug, Clone)]
pub struct PeerRegion {
    mapping: Arc<Mapping>,
}

impl PeerRegion {
    /// Maps `len` bytes of memory from a peer, after checking that they exist and cannot go away (M3).
    pub fn map(memory: BorrowedFd<'_>, len: usize) -> Result<Self, RegionError> {
        let (have, page) = sealed_len(memory, SealFlags::FUTURE_WRITE)?;
        if have < len {
            return Err(RegionError::Truncated { have, need: len });
        }
        // Map only `len` bytes, or a peer's empty terabytes would use up our address space. But map whole pages:
        // munmap takes no less.
        let len = len.max(1).next_multiple_of(page).min(have);
        Ok(PeerRegion { mapping: Arc::new(Mapping::new(memory, len, ProtFlags::READ)?) })
    }

    /// Maps `len` bytes of memory that a third party made and keeps for another process, and that process's
    /// successors, to write. It need not be sealed against writers, because then no successor could write it. But
    /// none of its pages may be a huge page, since a hole in those cannot always be filled (M3).
    pub fn map_kept(memory: BorrowedFd<'_>, len: usize) -> Result<Self, RegionError> {
        let have = kept_len(memory)?;
        if have < len {
            return Err(RegionError::Truncated { have, need: len });
        }
        Ok(PeerRegion { mapping: Arc::new(Mapping::new(memory, len, ProtFlags::READ)?) })
    }

    /// Maps all of such memory, as [`map_kept`](Self::map_kept) does.
    pub fn map_kept_whole(memory: BorrowedFd<'_>) -> Result<Self, RegionError> {
        Self::map_kept(memory, kept_len(memory)?)
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.mapping.len
    }

    /// Whether the region has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns `count` lines from byte `offset` on, as the peer's claims.
    pub fn claims(&self, offset: usize, count: usize) -> Result<Claims<Span<Line>>, RegionError> {
        Ok(Claims::of(Span::new(&self.mapping, offset, count)?))
    }

    /// Copies bytes from `offset` on into `into`, even if the peer writes them meanwhile. The copy is a value of its
    /// own, even if the peer's memory never held exactly these bytes at one moment.
    pub fn copy_to(&self, offset: usize, into: &mut [u8]) -> Result<(), RegionError> {
        let first = self.mapping.check(offset, into.len())?;
        // SAFETY: the source lies in the mapping (checked; M1, M3), the destination is ours alone.
        unsafe { copy_abroad(first.as_ptr(), into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    /// Returns the 8 bytes from `offset` on, which need not be aligned, as a word in native order.
    #[inline]
    pub fn word(&self, offset: usize) -> Result<u64, RegionError> {
        let first = self.mapping.check(offset, 8)?;
        // SAFETY: in the mapping (checked; M1, M3).
        Ok(unsafe { copy::load_word(first.as_ptr()) })
    }

    /// Writes `before`, and then bytes from `offset` on, to a descriptor in one system call. The kernel copies the
    /// bytes, even if the peer writes them meanwhile. Returns how many bytes the kernel took.
    pub fn write_to(&self, fd: BorrowedFd<'_>, before: &[u8], offset: usize, len: usize) -> io::Result<usize> {
        let first = self.mapping.check(offset, len).map_err(io::Error::other)?;
        let part = |base: *const u8, len| libc::iovec { iov_base: base.cast_mut().cast(), iov_len: len };
        let parts = [part(before.as_ptr(), before.len()), part(first.as_ptr(), len)];
        // SAFETY: two parts, one a slice and one in the mapping (checked; M1, M3). The kernel reads them, and we
        // make no reference to them (M2).
        let written = unsafe { libc::writev(fd.as_raw_fd(), parts.as_ptr(), 2) };
        usize::try_from(written).map_err(|_| io::Error::last_os_error())
    }

    /// Makes the CPU fetch the lines of these bytes for reading, while it does something else.
    #[inline]
    pub(crate) fn prefetch_to_read(&self, offset: usize, len: usize) {
        if let Ok(first) = self.mapping.check(offset, len) {
            prefetch_to_read(first, len);
        }
    }

    /// Returns the 64-bit words from `offset` on, for loads only: the mapping is read-only.
    pub(crate) fn words(&self, offset: usize, count: usize) -> Result<&[AtomicU64], RegionError> {
        let len = count.saturating_mul(8);
        let first = self.mapping.check(offset, len)?.cast::<AtomicU64>();
        if !first.is_aligned() {
            return Err(RegionError::OutOfBounds { offset, end: offset + len, len: self.len() });
        }
        // SAFETY: in bounds and aligned (checked), alive while `self` is (M1, M3), atomics only (M2).
        Ok(unsafe { std::slice::from_raw_parts(first.as_ptr(), count) })
    }

    /// Returns the bytes from `offset` on in place.
    ///
    /// # Safety
    /// The peer does not write them while the result lives: we trust it, or its mapping is write-protected.
    pub(crate) unsafe fn bytes(&self, offset: usize, len: usize) -> Result<&[u8], RegionError> {
        let first = self.mapping.check(offset, len)?;
        // SAFETY: in bounds (checked) and alive (M1, M3); the caller promises that no process writes (M2).
        Ok(unsafe { std::slice::from_raw_parts(first.as_ptr(), len) })
    }
}

/// Returns the length in bytes of a memory file, and the length of its pages, after checking that its seals forbid
/// shrinking. `more` names seals that it must carry besides.
fn sealed_len(memory: BorrowedFd<'_>, more: SealFlags) -> Result<(usize, usize), RegionError> {
    let seals = rustix::fs::fcntl_get_seals(memory).map_err(|_| RegionError::NotMemory)?;
    if !seals.contains(SealFlags::SHRINK) {
        return Err(RegionError::Unsealed);
    }
    if !seals.contains(more) {
        return Err(RegionError::Unguarded);
    }
    let stat =
        rustix::fs::fstat(memory).map_err(|errno| RegionError::from_errno("measuring shared memory", 0, errno))?;
    let number = |n: i64| usize::try_from(n).map_err(|_| RegionError::NotMemory);
    Ok((number(stat.st_size)?, page_len(memory, &stat)?))
}

/// File system type that `statfs` reports for a file on huge pages. Source: `include/uapi/linux/magic.h`.
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// Returns the length in bytes of the pages of which a memory file consists: a part of one can be neither unmapped nor
/// replaced. A tmpfs that uses huge pages where it can (`transparent_hugepage/shmem_enabled`) also states their length, but
/// splits them.
fn page_len(memory: BorrowedFd<'_>, stat: &rustix::fs::Stat) -> Result<usize, RegionError> {
    let kind =
        rustix::fs::fstatfs(memory).map_err(|errno| RegionError::from_errno("looking at shared memory", 0, errno))?;
    #[allow(clippy::useless_conversion, reason = "its type is another on other machines")]
    let is_huge = u64::try_from(kind.f_type).is_ok_and(|kind| kind & 0xffff_ffff == HUGETLBFS_MAGIC);
    let stated = usize::try_from(stat.st_blksize).map_or(PAGE_LEN, |page| page.max(PAGE_LEN));
    Ok(if is_huge { stated } else { PAGE_LEN })
}

/// Returns whether a memory file exists up to `end` bytes, cannot be cut, and has small pages only (M3).
pub fn is_kept(memory: BorrowedFd<'_>, end: u64) -> bool {
    kept_len(memory).is_ok_and(|len| usize::try_from(end).is_ok_and(|end| end <= len))
}

/// Returns the length in bytes of memory that a third party keeps, after checking that it has small pages only (M3).
fn kept_len(memory: BorrowedFd<'_>) -> Result<usize, RegionError> {
    let (len, page) = sealed_len(memory, SealFlags::empty())?;
    if page > PAGE_LEN {
        return Err(RegionError::Unguarded);
    }
    Ok(len)
}

/// Opens the same memory anew through a read-only descriptor.
pub fn read_only(memory: BorrowedFd<'_>) -> Result<OwnedFd, RegionError> {
    let same = format!("/proc/self/fd/{}", memory.as_raw_fd());
    rustix::fs::open(same, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .map_err(|errno| RegionError::from_errno("opening shared memory to be read", 0, errno))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::Relaxed;

    #[test]
    fn what_we_store_a_peer_loads() {
        let ours = Region::create("test", 100, Pages::Small).unwrap();
        ours.seal_writers().unwrap();
        assert_eq!(ours.len(), PAGE_LEN, "rounded up to whole pages");
        let theirs = PeerRegion::map(ours.fd(), 100).unwrap();
        ours.span::<Line>(64, 1).unwrap()[0].word(3).store(7, Relaxed);
        assert_eq!(theirs.claims(64, 1).unwrap().load(0, 3), 7);
    }

    #[test]
    fn no_second_writer_after_the_seal() {
        let ours = Region::create("test", 1, Pages::Small).unwrap();
        ours.seal_writers().unwrap();
        let copy = ours.fd().try_clone_to_owned().unwrap();
        assert!(matches!(Region::adopt(copy), Err(RegionError::Kernel { .. })));
        assert!(PeerRegion::map(ours.fd(), 1).is_ok(), "readers are still welcome");
    }

    #[test]
    fn memory_that_may_shrink_is_refused() {
        let memory = rustix::fs::memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&memory, 4096).unwrap();
        assert!(matches!(PeerRegion::map(memory.as_fd(), 4096), Err(RegionError::Unsealed)));
    }

    #[test]
    fn more_memory_than_announced_is_not_mapped() {
        let ours = Region::create("test", 1 << 40, Pages::Small).unwrap();
        ours.seal_writers().unwrap();
        assert_eq!(PeerRegion::map(ours.fd(), 5000).unwrap().len(), 8192, "the whole pages that were announced");
    }

    #[test]
    fn memory_that_others_may_come_to_write_is_refused() {
        let ours = Region::create("test", 4096, Pages::Small).unwrap();
        assert!(matches!(PeerRegion::map(ours.fd(), 4096), Err(RegionError::Unguarded)));
    }

    #[test]
    fn m3_huge_pages_that_others_can_punch_are_not_adopted() {
        // Needs no page in the pool: the kernel reserves none for a file that was never touched.
        let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        let memory = rustix::fs::memfd_create("test", flags).unwrap();
        rustix::fs::ftruncate(&memory, HUGE_PAGE_LEN as u64).unwrap();
        rustix::fs::fcntl_add_seals(&memory, SealFlags::SHRINK).unwrap();
        assert!(matches!(PeerRegion::map_kept_whole(memory.as_fd()), Err(RegionError::Unguarded)));
        assert!(matches!(Region::adopt(memory), Err(RegionError::Unguarded)));
    }

    #[test]
    fn less_memory_than_announced_is_refused() {
        let ours = Region::create("test", 4096, Pages::Small).unwrap();
        ours.seal_writers().unwrap();
        let refusal = PeerRegion::map(ours.fd(), 8192).unwrap_err();
        assert!(matches!(refusal, RegionError::Truncated { have: 4096, need: 8192 }), "{refusal}");
    }

    #[test]
    fn a_plain_file_is_refused() {
        let file = tempfile::tempfile().unwrap();
        assert!(matches!(PeerRegion::map(file.as_fd(), 1), Err(RegionError::NotMemory)));
    }

    #[test]
    fn spans_stay_inside() {
        let ours = Region::create("test", 4096, Pages::Small).unwrap();
        assert!(ours.span::<Line>(4096 - 64, 1).is_ok());
        assert!(ours.span::<Line>(4096 - 64, 2).is_err());
        assert!(ours.span::<Line>(8, 1).is_err(), "not on a whole line");
        assert!(ours.span::<Line>(usize::MAX, 2).is_err());
    }
}
