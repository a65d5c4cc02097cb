//! Registers in mapped memory: each access is one load or store of the CPU.
//!
//! # Invariants
//!
//! - **I1** A mapping's `base` is page-aligned and stays mapped for `len` bytes until the value is dropped.
//! - **I2** No load or store inside `len` ends the process. The memory behind a mapping is a memfd of small pages that is sealed
//!   against shrinking; or a device's own memory under a guard (G1), for the kernel raises SIGBUS while the device is out of its
//!   bus, or is told not to answer there.
//! - **I3** No reference points to these bytes: they are only loaded and stored, at multiples of the access's size
//!   below `len`. The accesses are volatile, since each has a meaning for the device.
#![allow(unsafe_code, reason = "maps registers, loads and stores them")]

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{Ordering, fence};

use rustix::mm::{MapFlags, ProtFlags};
use tasuki_shm::region::guard::Guard;
use tasuki_shm::region::is_kept;

/// A mapped piece of a BAR.
#[derive(Debug)]
pub(super) struct Mmio {
    base: NonNull<u8>,
    len: u32,
    guard: Option<Guard>,
}

// SAFETY: a mapping belongs to the process, not to a thread (I1); accesses are volatile and of one machine word
// (I3).
unsafe impl Send for Mmio {}
// SAFETY: as above (I1, I3).
unsafe impl Sync for Mmio {}

impl Mmio {
    /// Maps `len` bytes of a device's own memory, from `offset` of its descriptor on. While the device does not answer, they
    /// read as ones, and from then on.
    pub fn of_device(device: BorrowedFd<'_>, offset: u64, len: u32) -> io::Result<Self> {
        let mut mmio = Self::map(device, offset, len, MapFlags::SHARED)?;
        // SAFETY: a mapping of our own, just made; the guard is dropped first (I1).
        let guard = unsafe { Guard::on_registers(mmio.base, mmio.len as usize) };
        mmio.guard = Some(guard.map_err(io::Error::other)?);
        Ok(mmio)
    }

    fn map(device: BorrowedFd<'_>, offset: u64, len: u32, flags: MapFlags) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing (I1).
        let base = unsafe {
            let protection = ProtFlags::READ | ProtFlags::WRITE;
            rustix::mm::mmap(std::ptr::null_mut(), len as usize, protection, flags, device, offset)
        }?;
        let base = NonNull::new(base.cast::<u8>()).expect("the kernel maps nothing at address 0");
        Ok(Mmio { base, len, guard: None })
    }

    /// Maps `len` bytes of memory that another process handed over, if they exist and cannot go away (I2). Returns
    /// `None` otherwise.
    pub fn of_process(memory: BorrowedFd<'_>, offset: u64, len: u32) -> io::Result<Option<Self>> {
        if !offset.checked_add(len.into()).is_some_and(|end| is_kept(memory, end)) {
            return Ok(None);
        }
        // Map all pages now: a page fault would cost time when the card is taken over.
        Self::map(memory, offset, len, MapFlags::SHARED | MapFlags::POPULATE).map(Some)
    }

    /// Length of the mapping in bytes.
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Returns the address of the register at `offset`, or `None` if it is out of bounds or not aligned.
    #[inline]
    fn at<T: Register>(&self, offset: u32) -> Option<NonNull<T>> {
        if !offset.is_multiple_of(T::SIZE) || self.len < T::SIZE || offset > self.len - T::SIZE {
            return None;
        }
        // SAFETY: below `len`, as checked above (I1).
        Some(unsafe { self.base.add(offset as usize) }.cast())
    }

    /// Loads a register. Returns `None` if it is out of bounds or not aligned.
    #[inline]
    pub fn load<T: Register>(&self, offset: u32) -> Option<T> {
        let at = self.at::<T>(offset)?;
        // SAFETY: mapped (I1, I2), in bounds and aligned (`at`), and any bits are an integer (I3).
        let value = unsafe { at.read_volatile() };
        // Later loads see the data that the device wrote to memory before it changed the register.
        fence(Ordering::Acquire);
        // In place of registers that are gone there are zeroes, or what was written since.
        let is_gone = self.guard.as_ref().is_some_and(Guard::is_gone);
        Some(if is_gone { T::ONES } else { value })
    }

    /// Stores a register. Does nothing if it is out of bounds or not aligned.
    #[inline]
    pub fn store<T: Register>(&self, offset: u32, value: T) {
        let Some(at) = self.at::<T>(offset) else { return };
        publish();
        // SAFETY: mapped (I1, I2), in bounds and aligned (`at`) (I3).
        unsafe { at.write_volatile(value) };
    }
}

/// Makes earlier stores to memory visible to a device that sees a later store to a register.
#[inline]
fn publish() {
    // A PC's CPU keeps stores in order, and uncached ones after cached ones; from here on, so does the compiler.
    #[cfg(not(target_arch = "aarch64"))]
    fence(Ordering::Release);
    // A device is in the outer shareable domain, which no fence of Rust's reaches.
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a barrier affects nothing but order (I3).
    unsafe {
        std::arch::asm!("dmb oshst", options(nostack, preserves_flags))
    }
}

impl Drop for Mmio {
    fn drop(&mut self) {
        // Before the range can belong to another mapping (G1).
        self.guard = None;
        // SAFETY: `base` and `len` come from mmap, and no reference points to them (I1, I3).
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len as usize) };
        debug_assert!(unmapped.is_ok(), "munmap of our own mapping failed: {unmapped:?}");
    }
}

/// Integer types with the size of a register.
pub(super) trait Register: Copy {
    /// Size in bytes.
    const SIZE: u32;
    /// Value read from an absent device.
    const ONES: Self;

    /// Converts from the device's byte order.
    fn from_le(bytes: &[u8]) -> Self;

    /// Converts to the device's byte order, padded with zeros.
    fn to_le(self) -> [u8; 4];
}

macro_rules! register {
    ($($int:ty),*) => {$(
        impl Register for $int {
            const SIZE: u32 = <$int>::BITS / 8;
            const ONES: $int = <$int>::MAX;

            fn from_le(bytes: &[u8]) -> Self {
                bytes.try_into().map_or(Self::ONES, <$int>::from_le_bytes)
            }

            fn to_le(self) -> [u8; 4] {
                u32::from(self).to_le_bytes()
            }
        }
    )*};
}
register!(u8, u16, u32);

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use tasuki_shm::region::{PAGE_LEN, Pages, Region};

    use super::*;

    #[test]
    fn every_size_is_loaded_and_stored_where_it_lies() {
        let memory = Region::create("registers", PAGE_LEN, Pages::Small).unwrap();
        let mmio = Mmio::of_process(memory.fd(), 0, 4096).unwrap().unwrap();
        mmio.store(8, 0x1122_3344_u32);
        mmio.store(12, 0x5566_u16);
        mmio.store(14, 0x77_u8);
        assert_eq!(mmio.load::<u32>(8), Some(0x1122_3344));
        assert_eq!(mmio.load::<u32>(12), Some(0x0077_5566));
        assert_eq!(mmio.load::<u16>(14), Some(0x77));
        assert_eq!(mmio.load::<u8>(11), Some(0x11));
    }

    #[test]
    fn beyond_the_end_and_between_registers_is_nothing() {
        let memory = Region::create("registers", PAGE_LEN, Pages::Small).unwrap();
        let mmio = Mmio::of_process(memory.fd(), 0, 4096).unwrap().unwrap();
        for offset in [2, 4093, 4096, u32::MAX, u32::MAX - 3] {
            assert_eq!(mmio.load::<u32>(offset), None, "{offset:#x}");
            mmio.store(offset, 7_u32);
        }
        assert_eq!(mmio.load::<u32>(4092), Some(0));
    }

    #[test]
    fn registers_that_do_not_answer_any_more_read_as_ones() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(3 * 4096).unwrap();
        let (device, other) =
            (Mmio::of_device(file.as_fd(), 0, 4096).unwrap(), Mmio::of_device(file.as_fd(), 4096, 8192).unwrap());
        other.store(4, 7_u32);
        device.store(8, 7_u32);
        file.set_len(4096).unwrap();
        assert_eq!((other.load(4), other.load(8188)), (Some(u32::MAX), Some(u32::MAX)));
        other.store(4, 7_u32);
        assert_eq!((other.load(4), device.load(8)), (Some(u32::MAX), Some(7_u32)));
    }

    #[test]
    fn memory_that_could_go_away_is_not_mapped() {
        let sealed = Region::create("registers", 2 * PAGE_LEN, Pages::Small).unwrap();
        assert!(Mmio::of_process(sealed.fd(), 4096, 4096).unwrap().is_some());
        assert!(Mmio::of_process(sealed.fd(), 4096, 8192).unwrap().is_none(), "beyond its end");
        assert!(Mmio::of_process(sealed.fd(), u64::MAX - 4095, 4096).unwrap().is_none());
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        assert!(Mmio::of_process(file.as_fd(), 0, 4096).unwrap().is_none(), "a file can be cut");
    }
}
