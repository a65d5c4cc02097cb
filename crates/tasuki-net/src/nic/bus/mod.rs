//! Access of a driver to its card: configuration space, registers, DMA, interrupts.

mod bar;
mod mmio;
pub mod pci;
pub mod vfio;
pub mod vfio_user;

use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, OwnedFd};

pub use bar::{Bar, Far};
pub use pci::{BarKind, Capability, Header, PciError};
use rustix::event::EventfdFlags;
use rustix::io::{Errno, ReadWriteFlags};
use tasuki_shm::line::halves;
use tasuki_shm::region::Region;
pub use vfio::Vfio;
pub use vfio_user::VfioUser;

/// An address as the device sees it, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Iova(pub u64);

impl Iova {
    /// Returns the low and the high half, for a pair of registers.
    pub(super) fn halves(self) -> (u32, u32) {
        halves(self.0)
    }
}

impl std::ops::Add<u64> for Iova {
    type Output = Iova;

    fn add(self, bytes: u64) -> Iova {
        Iova(self.0 + bytes)
    }
}

impl std::fmt::Display for Iova {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// Reason why a device cannot be reached.
#[derive(Debug, thiserror::Error)]
pub enum BusError {
    /// The device is gone.
    #[error("the device is gone (while {doing}): it was removed, or its server has ended; connect again")]
    Gone {
        /// Step at which this was noticed.
        doing: &'static str,
    },
    /// The device's server is there but does not answer.
    #[error(
        "what serves the device does not answer (while {doing}): another driver may have it, or it is stuck; end the one or the other"
    )]
    Silent {
        /// Step at which this was noticed.
        doing: &'static str,
    },
    /// The device has no such BAR, or the BAR is of another kind.
    #[error("the device has no memory at BAR {index}; it is not the card that it says it is")]
    NoBar {
        /// Number of the BAR.
        index: u8,
    },
    /// The device has fewer interrupts than the driver needs.
    #[error("the device has {have} MSI-X interrupts and the driver needs {need}")]
    FewInterrupts {
        /// Number of vectors that the device has.
        have: u16,
        /// Number of vectors that the driver needs.
        need: u16,
    },
    /// The device's INTx interrupt does not reach this process.
    #[error("the device cannot interrupt by INTx: {why}; a driver that can poll does so")]
    NoIntX {
        /// The obstacle.
        why: String,
    },
    /// The device cannot be given access to memory at this address.
    #[error("the device cannot be given memory at {at} ({len} bytes): {why}")]
    Dma {
        /// Address of the memory, as the device would see it.
        at: Iova,
        /// Length of the memory in bytes.
        len: usize,
        /// The obstacle, and the remedy.
        why: String,
    },
    /// The kernel cannot lock the memory that the device is to reach.
    #[error(
        "the device is to reach {need} bytes of memory, which must be locked, and this process may lock {limit}; raise the limit \
         to {} KiB (`ulimit -l`, or LimitMEMLOCK= of its service), or give it CAP_IPC_LOCK", need.div_ceil(1024)
    )]
    Memlock {
        /// Number of bytes to be locked, including those that are locked already.
        need: u64,
        /// Number of bytes that this process may lock.
        limit: u64,
    },
    /// The kernel, or the device's server, refused.
    #[error("{doing} was refused: {source}")]
    Refused {
        /// Step that was refused.
        doing: &'static str,
        /// Reason for the refusal.
        source: io::Error,
    },
    /// The peer, which is the kernel or the device's server, broke the bus's protocol.
    #[error("what serves the device broke its protocol: {what}")]
    Protocol {
        /// The broken rule.
        what: String,
    },
    /// The configuration space is invalid.
    #[error("{0}")]
    Pci(#[from] PciError),
}

/// Interrupt pin of a device (INTA# to INTD#), for devices without MSI-X. Both eventfds are non-blocking.
///
/// The pin has a level: the device asserts it for as long as it has a cause that it may interrupt for. Some buses
/// therefore mask the pin when it rings (the kernel does); others ring each time it is asserted anew. A driver that
/// does the following steps is right for both. It takes all causes from the device, empties `rings`, unmasks the pin
/// if it had rung, and then checks for work: later work asserts the pin again.
#[derive(Debug)]
pub struct IntX {
    /// Becomes readable when the device asserts the pin. The bus may have masked the pin then.
    pub rings: OwnedFd,
    /// Unmasks the pin: the driver writes to it once it has silenced the device. If the device still asserts the
    /// pin, it rings again.
    pub unmasks: OwnedFd,
}

impl IntX {
    /// Creates a pair of eventfds, which a bus then connects to the device.
    pub fn create() -> io::Result<IntX> {
        let eventfd = || rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        Ok(IntX { rings: eventfd()?, unmasks: eventfd()? })
    }

    /// Duplicates both descriptors. The copy is for the same pin.
    pub fn try_clone(&self) -> io::Result<IntX> {
        Ok(IntX { rings: self.rings.try_clone()?, unmasks: self.unmasks.try_clone()? })
    }
}

/// Empties an eventfd, and returns whether it had rung. Never waits: the device's server has the same eventfd, and
/// may have set it to blocking.
pub(super) fn quiesce(eventfd: impl AsFd) -> Result<bool, BusError> {
    let mut count = [0; 8];
    let into = &mut [IoSliceMut::new(&mut count)];
    // Offset that stands for the current file position.
    const HERE: u64 = u64::MAX;
    match rustix::io::preadv2(&eventfd, into, HERE, ReadWriteFlags::NOWAIT) {
        Ok(_) => Ok(true),
        Err(Errno::AGAIN | Errno::INTR) => Ok(false),
        Err(errno) => Err(BusError::Refused { doing: "reading an eventfd", source: errno.into() }),
    }
}

/// Returns the eventfd of vector 0.
pub(super) fn interrupt(bus: &mut impl Bus) -> Result<OwnedFd, BusError> {
    bus.interrupts(1)?.pop().ok_or(BusError::FewInterrupts { have: 0, need: 1 })
}

/// A part of a memory region that a device may be given access to.
#[derive(Debug, Clone, Copy)]
pub struct Part<'a> {
    /// Region that the part belongs to.
    pub memory: &'a Region,
    /// Offset of the part in the region, in bytes: a multiple of the page size.
    pub from: usize,
    /// Length of the part in bytes: a multiple of the page size.
    pub len: usize,
    /// Address of the part's first byte, as the device sees it: a multiple of the page size.
    pub at: Iova,
}

impl<'a> Part<'a> {
    /// Returns the part that covers all of `memory`.
    pub fn all(memory: &'a Region, at: Iova) -> Self {
        Part { memory, from: 0, len: memory.len(), at }
    }
}

/// Access to one PCI device.
pub trait Bus {
    /// Access to the device's registers.
    type Registers: Registers;

    /// Reads the 32-bit word at `offset` (a multiple of 4) of the configuration space.
    fn read_config(&mut self, offset: u16) -> Result<u32, BusError>;

    /// Writes the 32-bit word at `offset` (a multiple of 4) of the configuration space.
    fn write_config(&mut self, offset: u16, value: u32) -> Result<(), BusError>;

    /// Returns the registers of BAR `index`. Memory decoding is on afterwards.
    fn registers(&mut self, index: u8) -> Result<Self::Registers, BusError>;

    /// Lets the device read and write a part of a memory region.
    fn map_part(&mut self, part: Part<'_>) -> Result<(), BusError>;

    /// Like [`map_part`](Self::map_part), for several parts. On a bus where each takes long, it takes the time of
    /// one. Returns for each part whether it was mapped.
    fn map_each<const N: usize>(&mut self, parts: [Part<'_>; N]) -> Result<[Result<(), BusError>; N], BusError> {
        Ok(parts.map(|part| self.map_part(part)))
    }

    /// Lets the device read and write all of `memory` at `at` and after. Both are multiples of the page size.
    fn map_dma(&mut self, memory: &Region, at: Iova) -> Result<(), BusError> {
        self.map_part(Part::all(memory, at))
    }

    /// Takes back the mapping at `at`. `len` must be as when it was mapped.
    fn unmap_dma(&mut self, at: Iova, len: usize) -> Result<(), BusError>;

    /// Returns an eventfd for each of the first `count` MSI-X vectors, and enables these. They stay the same for the
    /// life of the bus.
    ///
    /// The eventfds are non-blocking: reading one that has not rung fails with `EAGAIN`, so a driver that clears its
    /// bell never waits.
    fn interrupts(&mut self, count: u16) -> Result<Vec<OwnedFd>, BusError>;

    /// Returns the device's interrupt pin, switched on and unmasked. A driver uses either this or
    /// [MSI-X](Self::interrupts), not both. It stays the same for the life of the bus.
    fn intx(&mut self) -> Result<IntX, BusError>;

    /// Resets the whole device, if the bus supports it.
    fn reset(&mut self) -> Result<(), BusError>;

    /// Connects the interrupts in use anew, and lets the device decode memory and be bus master, whatever another
    /// process with access to the device changed. Interrupts may be lost meanwhile: the caller must look at its
    /// rings afterwards.
    fn renew(&mut self) -> Result<(), BusError>
    where
        Self: Sized,
    {
        pci::enable_again(self)
    }

    /// Returns whether an IOMMU translates the addresses that the device uses.
    fn translates(&self) -> bool {
        false
    }

    /// Sets whether frames wait while the bus waits for answers. If so, the bus polls for longer before it sleeps.
    fn hurry(&mut self, _hurries: bool) {}
}

/// Does the accesses of [`Registers::read_around`] one by one.
fn one_by_one<R: Registers + ?Sized, const N: usize>(
    registers: &R,
    offsets: [u32; N],
    nth: usize,
    writes: &[(u32, u32)],
) -> [u32; N] {
    std::array::from_fn(|index| {
        let writes = if index == nth { writes } else { &[] };
        writes.iter().for_each(|&(offset, value)| registers.write32(offset, value));
        registers.read32(offsets[index])
    })
}

/// Registers of a BAR. Accesses do not fail: as on a real bus, reads from an absent device return all ones, and
/// writes are lost.
///
/// Offsets are in bytes and below the BAR's length. Reads beyond it return ones as well.
pub trait Registers {
    /// Reads 8 bits.
    fn read8(&self, offset: u32) -> u8;
    /// Reads 16 bits at an even offset.
    fn read16(&self, offset: u32) -> u16;
    /// Reads 32 bits at a multiple of 4.
    fn read32(&self, offset: u32) -> u32;
    /// Writes 8 bits.
    fn write8(&self, offset: u32, value: u8);
    /// Writes 16 bits at an even offset.
    fn write16(&self, offset: u32, value: u16);
    /// Writes 32 bits at a multiple of 4. Earlier stores to memory are visible to the device when it sees this
    /// write.
    fn write32(&self, offset: u32, value: u32);

    /// Reads consecutive 32-bit registers: in one go where each read takes long.
    fn read_block(&self, offset: u32, into: &mut [u32]) {
        (0..).zip(into).for_each(|(index, value)| *value = self.read32(offset + 4 * index));
    }

    /// Reads 32-bit registers at these offsets, in order, and does the `writes` (offset and value) before the `nth`
    /// read: in one go where each access takes long.
    fn read_around<const N: usize>(&self, offsets: [u32; N], nth: usize, writes: &[(u32, u32)]) -> [u32; N] {
        one_by_one(self, offsets, nth, writes)
    }

    /// Calls `access`. Its writes may reach the device all at once: at the latest with the next register read, or at
    /// the end of `access`.
    fn together<T>(&self, access: impl FnOnce() -> T) -> T {
        access()
    }

    /// Returns whether a write may not have reached the device yet. Reading any register waits for it.
    fn is_behind(&self) -> bool {
        true
    }

    /// Notes that a register was read since this driver took over: the predecessor's writes have reached the device.
    fn settled(&self) {}
}

#[cfg(test)]
mod tests {
    use tasuki_shm::wake::ring_eventfd;

    use super::*;

    #[test]
    fn an_eventfd_that_somebody_else_has_made_wait_is_not_waited_for() {
        // Blocking, since the other holder may set it to that at any time.
        let eventfd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        assert!(!quiesce(&eventfd).unwrap());
        ring_eventfd(&eventfd);
        ring_eventfd(&eventfd);
        assert!(quiesce(&eventfd).unwrap());
        assert!(!quiesce(&eventfd).unwrap());
        rustix::io::write(&eventfd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        ring_eventfd(&eventfd);
        assert!(quiesce(&eventfd).unwrap());
    }
}
