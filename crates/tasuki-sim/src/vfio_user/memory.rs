//! The client's memory, as the device reaches it.
//!
//! # Invariants
//!
//! - **D1** A mapping's `base` is page-aligned and stays mapped for `len` bytes until the value is dropped.
//! - **D2** The memory cannot shrink under the mapping: the memfd carries `F_SEAL_SHRINK`, checked before it is
//!   mapped.
//! - **D3** No reference points into it, since the client writes it at any time: bytes are copied by assembly, or
//!   loaded and stored as one atomic word.
#![allow(unsafe_code, reason = "maps the client's memory, and copies out of it and into it")]

use std::ops::RangeInclusive;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};

use rustix::fs::SealFlags;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

/// Lengths in bytes of the windows whose pages are all mapped at once. A smaller window holds rings: it has few
/// pages in use, and is mapped while frames wait. A larger one, maybe a whole guest's memory, is never used as a
/// whole.
const POPULATED: RangeInclusive<usize> = (64 << 10) + 1..=64 << 20;

/// The device accessed memory that the client did not map, or not for this kind of access.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the device has no memory of {len} bytes at {at:#x} that it may {verb}")]
pub struct DmaFault {
    /// First address of the access.
    pub at: u64,
    /// Length of the access in bytes.
    pub len: usize,
    /// "read" or "write".
    pub verb: &'static str,
}

/// The accesses to its memory that a client grants the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rights {
    /// The device may read the memory.
    pub read: bool,
    /// The device may write the memory.
    pub write: bool,
}

/// A mapped window of the client's memory.
#[derive(Debug)]
pub struct DmaMemory {
    base: NonNull<u8>,
    len: usize,
    rights: Rights,
}

// SAFETY: a mapping belongs to the process, not to a thread (D1), and nothing refers into it (D3).
unsafe impl Send for DmaMemory {}

impl DmaMemory {
    /// Maps `len` bytes of `memory`, from `offset` on.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the range is empty or exceeds the file, if the file lacks `F_SEAL_SHRINK`, or if `offset` is not
    /// page-aligned; else the kernel's error.
    pub fn map(memory: BorrowedFd<'_>, offset: u64, len: u64, rights: Rights) -> Result<Self, Errno> {
        let seals = rustix::fs::fcntl_get_seals(memory)?;
        let have = u64::try_from(rustix::fs::fstat(memory)?.st_size).map_err(|_| Errno::INVAL)?;
        let inside = offset.checked_add(len).is_some_and(|end| end <= have);
        if len == 0 || !inside || !seals.contains(SealFlags::SHRINK) {
            return Err(Errno::INVAL);
        }
        let len = usize::try_from(len).map_err(|_| Errno::INVAL)?;
        let mut protection = ProtFlags::READ;
        protection.set(ProtFlags::WRITE, rights.write);
        // Without this, each first access to a page would stop the process; a card is not stopped so.
        let mut flags = MapFlags::SHARED;
        flags.set(MapFlags::POPULATE, POPULATED.contains(&len));
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing (D1).
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, protection, flags, memory, offset) }?;
        let base = NonNull::new(base.cast::<u8>()).expect("the kernel maps nothing at address 0");
        Ok(DmaMemory { base, len, rights })
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Always false: [`map`](Self::map) refuses an empty range.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn at(&self, offset: usize, len: usize, verb: &'static str, allowed: bool) -> Result<NonNull<u8>, DmaFault> {
        match offset.checked_add(len) {
            // SAFETY: inside the mapping, just checked (D1).
            Some(end) if end <= self.len && allowed => Ok(unsafe { self.base.add(offset) }),
            _ => Err(DmaFault { at: offset as u64, len, verb }),
        }
    }

    /// Copies the bytes from `offset` on to `into`.
    pub fn load(&self, offset: usize, into: &mut [u8]) -> Result<(), DmaFault> {
        let from = self.at(offset, into.len(), "read", self.rights.read)?;
        // SAFETY: mapped for so many bytes (D1, D2, `at`); `into` is ours alone.
        unsafe { copy(from.as_ptr(), into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    /// Copies `bytes` to `offset` and on. The order in which they become visible is undefined.
    pub fn store(&self, offset: usize, bytes: &[u8]) -> Result<(), DmaFault> {
        let to = self.at(offset, bytes.len(), "write", self.rights.write)?;
        // SAFETY: mapped for so many bytes (D1, D2, `at`), writable by its rights, and without references to it
        // (D3).
        unsafe { copy(bytes.as_ptr(), to.as_ptr(), bytes.len()) };
        Ok(())
    }

    fn aligned<T>(&self, offset: usize, verb: &'static str, allowed: bool) -> Result<NonNull<T>, DmaFault> {
        let at = self.at(offset, size_of::<T>(), verb, allowed)?.cast::<T>();
        if at.is_aligned() { Ok(at) } else { Err(DmaFault { at: offset as u64, len: size_of::<T>(), verb }) }
    }

    /// Loads 16 bits at a multiple of two. Later loads return data at least as new.
    pub fn load_half(&self, offset: usize) -> Result<u16, DmaFault> {
        let at = self.aligned::<u16>(offset, "read", self.rights.read)?;
        // SAFETY: mapped, aligned (`aligned`), and only ever used as an atomic here (D1, D3).
        let half = unsafe { AtomicU16::from_ptr(at.as_ptr()) };
        Ok(u16::from_le(half.load(Ordering::Acquire)))
    }

    /// Stores 16 bits at a multiple of two, after all earlier stores.
    pub fn store_half(&self, offset: usize, value: u16) -> Result<(), DmaFault> {
        let at = self.aligned::<u16>(offset, "write", self.rights.write)?;
        // SAFETY: mapped writable, aligned (`aligned`), and only ever used as an atomic here (D1, D3).
        let half = unsafe { AtomicU16::from_ptr(at.as_ptr()) };
        half.store(value.to_le(), Ordering::Release);
        Ok(())
    }

    /// Loads an aligned 64-bit word. Later loads return data at least as new.
    pub fn load_word(&self, offset: usize) -> Result<u64, DmaFault> {
        let at = self.aligned::<u64>(offset, "read", self.rights.read)?;
        // SAFETY: mapped, aligned (`aligned`), and only ever used as an atomic here (D1, D3).
        let word = unsafe { AtomicU64::from_ptr(at.as_ptr()) };
        Ok(u64::from_le(word.load(Ordering::Acquire)))
    }

    /// Stores an aligned 64-bit word, after all earlier stores.
    pub fn store_word(&self, offset: usize, value: u64) -> Result<(), DmaFault> {
        let at = self.aligned::<u64>(offset, "write", self.rights.write)?;
        // SAFETY: mapped writable, aligned (`aligned`), and only ever used as an atomic here (D1, D3).
        let word = unsafe { AtomicU64::from_ptr(at.as_ptr()) };
        word.store(value.to_le(), Ordering::Release);
        Ok(())
    }
}

impl Drop for DmaMemory {
    fn drop(&mut self) {
        // SAFETY: `base` and `len` are from mmap, and nothing refers into the mapping (D1, D3).
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "munmap of our own mapping failed: {unmapped:?}");
    }
}

/// Copies bytes that another process may read and write meanwhile: a data race in Rust, but not in assembly, where
/// the CPU defines the result.
///
/// # Safety
/// Both sides are mapped for `len` bytes, `to` writable and not otherwise referred to.
#[cfg(target_arch = "x86_64")]
unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller guarantees both sides (D1); the direction flag is clear by the ABI.
    unsafe {
        std::arch::asm!(
            "rep movsb",
            inout("rcx") len => _,
            inout("rdi") to => _,
            inout("rsi") from => _,
            options(nostack, preserves_flags)
        );
    }
}

/// Copies on other architectures: byte by byte, volatile.
///
/// # Safety
/// As above.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    for at in 0..len {
        // SAFETY: below `len`, as the caller guarantees (D1).
        let byte = unsafe { from.add(at).read_volatile() };
        // SAFETY: as above (D1, D3).
        unsafe { to.add(at).write_volatile(byte) };
    }
}

/// All memory that a device may reach: the client's windows at the device's addresses.
#[derive(Debug, Default)]
pub struct Dma {
    windows: Vec<(u64, DmaMemory)>,
}

impl Dma {
    /// Maps `memory` at address `at`.
    pub fn map(&mut self, at: u64, memory: DmaMemory) {
        self.windows.push((at, memory));
    }

    /// Unmaps the window that begins at `at`.
    pub fn unmap(&mut self, at: u64) {
        self.windows.retain(|&(start, _)| start != at);
    }

    /// Returns whether no window is mapped.
    pub fn is_empty(&self) -> bool {
        self.windows.is_empty()
    }

    fn find(&self, at: u64, len: usize, verb: &'static str) -> Result<(&DmaMemory, usize), DmaFault> {
        let inside = |(start, memory): &'_ (u64, DmaMemory)| {
            let offset = usize::try_from(at.checked_sub(*start)?).ok()?;
            (offset.checked_add(len)? <= memory.len()).then_some(offset)
        };
        let found = self.windows.iter().find_map(|window| Some((&window.1, inside(window)?)));
        found.ok_or(DmaFault { at, len, verb })
    }

    /// Copies the bytes from address `at` on to `into`.
    pub fn load(&self, at: u64, into: &mut [u8]) -> Result<(), DmaFault> {
        let (memory, offset) = self.find(at, into.len(), "read")?;
        memory.load(offset, into).map_err(|fault| DmaFault { at, ..fault })
    }

    /// Copies `bytes` to address `at` and on. The order in which they become visible is undefined.
    pub fn store(&self, at: u64, bytes: &[u8]) -> Result<(), DmaFault> {
        let (memory, offset) = self.find(at, bytes.len(), "write")?;
        memory.store(offset, bytes).map_err(|fault| DmaFault { at, ..fault })
    }

    /// Loads 16 bits at a multiple of two. Later loads return data at least as new.
    pub fn load_half(&self, at: u64) -> Result<u16, DmaFault> {
        let (memory, offset) = self.find(at, 2, "read")?;
        memory.load_half(offset).map_err(|fault| DmaFault { at, ..fault })
    }

    /// Stores 16 bits at a multiple of two, after all earlier stores.
    pub fn store_half(&self, at: u64, value: u16) -> Result<(), DmaFault> {
        let (memory, offset) = self.find(at, 2, "write")?;
        memory.store_half(offset, value).map_err(|fault| DmaFault { at, ..fault })
    }

    /// Loads an aligned 64-bit word. Later loads return data at least as new.
    pub fn load_word(&self, at: u64) -> Result<u64, DmaFault> {
        let (memory, offset) = self.find(at, 8, "read")?;
        memory.load_word(offset).map_err(|fault| DmaFault { at, ..fault })
    }

    /// Stores an aligned 64-bit word, after all earlier stores.
    pub fn store_word(&self, at: u64, value: u64) -> Result<(), DmaFault> {
        let (memory, offset) = self.find(at, 8, "write")?;
        memory.store_word(offset, value).map_err(|fault| DmaFault { at, ..fault })
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use tasuki_shm::region::{Pages, Region};

    use super::*;

    const BOTH: Rights = Rights { read: true, write: true };

    fn dma(rights: Rights) -> (Region, Dma) {
        let region = Region::create("test", 3 * 4096, Pages::Small).unwrap();
        let mut dma = Dma::default();
        dma.map(0x10_0000, DmaMemory::map(region.fd(), 4096, 8192, rights).unwrap());
        (region, dma)
    }

    #[test]
    fn what_the_device_stores_the_client_loads() {
        let (region, dma) = dma(BOTH);
        dma.store(0x10_0001, &[1, 2, 3]).unwrap();
        dma.store_word(0x10_1ff8, 7).unwrap();
        let words = region.span::<AtomicU64>(0, 3 * 512).unwrap();
        assert_eq!(words[512].load(Ordering::Relaxed), 0x0302_0100);
        assert_eq!(words[3 * 512 - 1].load(Ordering::Relaxed), 7);
        dma.store_half(0x10_0012, 0x1234).unwrap();
        assert_eq!((words[514].load(Ordering::Relaxed), dma.load_half(0x10_0012).unwrap()), (0x1234_0000, 0x1234));
        let mut bytes = [0; 5];
        dma.load(0x10_0000, &mut bytes).unwrap();
        assert_eq!(bytes, [0, 1, 2, 3, 0]);
    }

    #[test]
    fn there_is_nothing_beside_a_window() {
        let (_region, dma) = dma(BOTH);
        for (at, len) in [(0xf_ffff, 1), (0x10_2000, 1), (0x10_1fff, 2), (u64::MAX, 2), (0, 1)] {
            assert_eq!(dma.load(at, &mut vec![0; len]), Err(DmaFault { at, len, verb: "read" }));
            assert_eq!(dma.store(at, &vec![0; len]), Err(DmaFault { at, len, verb: "write" }));
        }
        assert!(dma.load_word(0x10_0004).is_err(), "not aligned");
        assert!(dma.load_word(0x10_1ffc).is_err());
        assert!(dma.load_half(0x10_0001).is_err() && dma.store_half(0x10_1fff, 0).is_err());
    }

    #[test]
    fn rights_are_kept() {
        let (_region, reads) = dma(Rights { read: true, write: false });
        assert!(reads.load(0x10_0000, &mut [0]).is_ok());
        assert!(reads.store(0x10_0000, &[0]).is_err());
        assert!(reads.store_word(0x10_0000, 0).is_err());
        assert!(reads.store_half(0x10_0000, 0).is_err());
        let (_region, writes) = dma(Rights { read: false, write: true });
        assert!(writes.load_word(0x10_0000).is_err());
        assert!(writes.store(0x10_0000, &[0]).is_ok());
    }

    #[test]
    fn memory_that_could_go_away_is_refused() {
        let region = Region::create("test", 8192, Pages::Small).unwrap();
        let refused = |offset, len| DmaMemory::map(region.fd(), offset, len, BOTH).map(|_| ()).unwrap_err();
        assert_eq!(refused(0, 0), Errno::INVAL);
        assert_eq!(refused(4096, 8192), Errno::INVAL);
        assert_eq!(refused(u64::MAX - 4095, 4096), Errno::INVAL);
        assert_eq!(refused(1, 4096), Errno::INVAL, "not on a whole page");
        let file = tempfile::tempfile().unwrap();
        file.set_len(8192).unwrap();
        assert_eq!(DmaMemory::map(file.as_fd(), 0, 4096, BOTH).map(|_| ()).unwrap_err(), Errno::INVAL);
    }
}
