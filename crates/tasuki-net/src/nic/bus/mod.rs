//! How a driver reaches its card: configuration space, registers, DMA, interrupts.

mod bar;
mod mmio;
pub mod pci;
pub mod vfio;
pub mod vfio_user;

use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, OwnedFd};

pub use bar::{Bar, Far};
pub use pci::{BarKind, Capability, Header, PciError};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::io::{Errno, ReadWriteFlags};
use tasuki_shm::region::Region;
pub use vfio::Vfio;
pub use vfio_user::VfioUser;

/// An address as the device sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Iova(pub u64);

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

/// Why a device cannot be reached.
#[derive(Debug, thiserror::Error)]
pub enum BusError {
    /// It was there and is not any more.
    #[error("the device is gone (while {doing}): it was removed, or its server has ended; connect again")]
    Gone {
        /// The step.
        doing: &'static str,
    },
    /// Its server is there and does not answer.
    #[error(
        "what serves the device does not answer (while {doing}): another driver may have it, or it is stuck; end the one or the other"
    )]
    Silent {
        /// The step.
        doing: &'static str,
    },
    /// The device has no such BAR, or one of another kind.
    #[error("the device has no memory at BAR {index}; it is not the card that it says it is")]
    NoBar {
        /// Which.
        index: u8,
    },
    /// The device has fewer interrupts than the driver needs.
    #[error("the device has {have} MSI-X interrupts and the driver needs {need}")]
    FewInterrupts {
        /// Vectors there are.
        have: u16,
        /// Vectors needed.
        need: u16,
    },
    /// The device's INTx interrupt does not reach us.
    #[error("the device cannot interrupt by INTx: {why}; a driver that can poll does so")]
    NoIntX {
        /// What stands against it.
        why: String,
    },
    /// The device cannot be made to see memory there.
    #[error("the device cannot be given memory at {at} ({len} bytes): {why}")]
    Dma {
        /// Where.
        at: Iova,
        /// Bytes.
        len: usize,
        /// What stands against it, and what to do.
        why: String,
    },
    /// The memory that the device is to reach cannot be locked.
    #[error(
        "the device is to reach {need} bytes of memory, which must be locked, and this process may lock {limit}; raise the limit \
         to {} KiB (`ulimit -l`, or LimitMEMLOCK= of its service), or give it CAP_IPC_LOCK", need.div_ceil(1024)
    )]
    Memlock {
        /// Bytes to be locked, with those that are.
        need: u64,
        /// Bytes that may be.
        limit: u64,
    },
    /// The kernel, or the device's server, refused.
    #[error("{doing} was refused: {source}")]
    Refused {
        /// The step.
        doing: &'static str,
        /// The reason.
        source: io::Error,
    },
    /// Whoever is at the other end does not keep to the bus's protocol.
    #[error("what serves the device broke its protocol: {what}")]
    Protocol {
        /// The rule.
        what: String,
    },
    /// The configuration space makes no sense.
    #[error("{0}")]
    Pci(#[from] PciError),
}

/// A device's interrupt pin (INTA# to INTD#), for those that have no MSI-X. Neither eventfd blocks.
///
/// The pin has a level: the device asserts it for as long as it has a cause that it may interrupt for. Some buses therefore mask it
/// when it rings (the kernel does), and some ring each time it is asserted anew. A driver does right by both which takes the device
/// all its causes, empties `rings`, unmasks if it had rung, and then looks whether there is something to do: what comes later
/// asserts the pin again.
#[derive(Debug)]
pub struct IntX {
    /// Becomes readable when the device asserts the pin. The bus may have masked it then.
    pub rings: OwnedFd,
    /// Unmasks: whoever has silenced the device writes to it. Where the pin is asserted still, it rings again.
    pub unmasks: OwnedFd,
}

impl IntX {
    /// A pair, which a bus then connects to the device.
    pub fn create() -> io::Result<IntX> {
        let eventfd = || rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        Ok(IntX { rings: eventfd()?, unmasks: eventfd()? })
    }

    /// The same pair, by descriptors of its own.
    pub fn try_clone(&self) -> io::Result<IntX> {
        Ok(IntX { rings: self.rings.try_clone()?, unmasks: self.unmasks.try_clone()? })
    }
}

/// Forgets that an eventfd rang; says whether it had. Never waits: whoever serves the device has the same eventfd, and can have made reading
/// it wait.
pub(super) fn quiesce(eventfd: impl AsFd) -> Result<bool, BusError> {
    let mut count = [0; 8];
    let into = &mut [IoSliceMut::new(&mut count)];
    // From where it is.
    const HERE: u64 = u64::MAX;
    match rustix::io::preadv2(&eventfd, into, HERE, ReadWriteFlags::NOWAIT) {
        Ok(_) => Ok(true),
        Err(Errno::AGAIN | Errno::INTR) => Ok(false),
        Err(errno) => Err(BusError::Refused { doing: "reading an eventfd", source: errno.into() }),
    }
}

/// Rings an eventfd, unless that would wait because it is full.
pub(super) fn ring(eventfd: impl AsFd) {
    let mut room = [PollFd::new(&eventfd, PollFlags::OUT)];
    if rustix::event::poll(&mut room, Some(&Timespec::default())) == Ok(1) && room[0].revents().contains(PollFlags::OUT)
    {
        let _ = rustix::io::write(&eventfd, &1_u64.to_ne_bytes());
    }
}

/// Memory that a device may come to reach, or a part of it.
#[derive(Debug, Clone, Copy)]
pub struct Part<'a> {
    /// The memory,
    pub memory: &'a Region,
    /// from which byte on, a multiple of the page size,
    pub from: usize,
    /// and how many bytes of it, a multiple of the page size.
    pub len: usize,
    /// Where the device sees the first of them: a multiple of the page size.
    pub at: Iova,
}

impl<'a> Part<'a> {
    /// All of it.
    pub fn all(memory: &'a Region, at: Iova) -> Self {
        Part { memory, from: 0, len: memory.len(), at }
    }
}

/// The way to one PCI device.
pub trait Bus {
    /// How its registers are reached.
    type Registers: Registers;

    /// The 32-bit word at `offset` (a multiple of 4) of the configuration space.
    fn read_config(&mut self, offset: u16) -> Result<u32, BusError>;

    /// Writes the 32-bit word at `offset` (a multiple of 4) of the configuration space.
    fn write_config(&mut self, offset: u16, value: u32) -> Result<(), BusError>;

    /// The registers behind BAR `index`. Memory decoding is on afterwards.
    fn registers(&mut self, index: u8) -> Result<Self::Registers, BusError>;

    /// Lets the device read and write a part of some memory.
    fn map_part(&mut self, part: Part<'_>) -> Result<(), BusError>;

    /// The same for several parts, in the time of one where each takes long; says of each whether it was mapped.
    fn map_each<const N: usize>(&mut self, parts: [Part<'_>; N]) -> Result<[Result<(), BusError>; N], BusError> {
        Ok(parts.map(|part| self.map_part(part)))
    }

    /// Lets the device read and write all of `memory` at `at` and after. Both are multiples of the page size.
    fn map_dma(&mut self, memory: &Region, at: Iova) -> Result<(), BusError> {
        self.map_part(Part::all(memory, at))
    }

    /// Takes back what was mapped at `at`, as it was mapped.
    fn unmap_dma(&mut self, at: Iova, len: usize) -> Result<(), BusError>;

    /// An eventfd for each of the first `count` MSI-X vectors, which are enabled. They stay the same for as long as the bus lives.
    ///
    /// They are non-blocking: reading one that has not rung fails with `EAGAIN`, and a driver that clears its bell never waits.
    fn interrupts(&mut self, count: u16) -> Result<Vec<OwnedFd>, BusError>;

    /// The device's interrupt pin, which is switched on and unmasked. A device has either this or [MSI-X](Self::interrupts): nobody
    /// asks for both. It stays the same for as long as the bus lives.
    fn intx(&mut self) -> Result<IntX, BusError>;

    /// Resets the whole device as its bus can, if it can.
    fn reset(&mut self) -> Result<(), BusError>;

    /// Connects the interrupts that are in use anew, and has the device decode memory and be master of the bus, whatever somebody else has made of
    /// that who had the device, too. What rings meanwhile may be lost: whoever asks looks at its rings afterwards.
    fn renew(&mut self) -> Result<(), BusError>
    where
        Self: Sized,
    {
        pci::enable_again(self)
    }

    /// From here on, or no more, frames wait while an answer is waited for: that is done without sleeping for longer.
    fn hurry(&mut self, _hurries: bool) {}
}

/// What [`Registers::read_around`] does, one after the other.
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

/// The registers behind a BAR. Accesses do not fail: as on a real bus, who is gone reads as all ones, and what is written is lost.
///
/// Offsets are in bytes and below the BAR's length; whoever reaches beyond it reads ones as well.
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
    /// Writes 32 bits at a multiple of 4. What was stored to memory before is there when the device sees it.
    fn write32(&self, offset: u32, value: u32);

    /// Reads registers of 32 bits, one behind the other: in one go where each of them takes long.
    fn read_block(&self, offset: u32, into: &mut [u32]) {
        (0..).zip(into).for_each(|(index, value)| *value = self.read32(offset + 4 * index));
    }

    /// Reads registers of 32 bits in this order, wherever they lie, and writes others before the `nth` of them: in one go where each of them takes long.
    fn read_around<const N: usize>(&self, offsets: [u32; N], nth: usize, writes: &[(u32, u32)]) -> [u32; N] {
        one_by_one(self, offsets, nth, writes)
    }

    /// Does what `access` does; what that writes may reach the device all at once, and then no later than the next register that is read, or the end.
    fn together<T>(&self, access: impl FnOnce() -> T) -> T {
        access()
    }

    /// Whether something was written that may not have reached the device yet. Reading any register waits for it.
    fn is_behind(&self) -> bool {
        true
    }

    /// A register was read since we drive the device: what a predecessor wrote has reached it.
    fn settled(&self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_eventfd_that_somebody_else_has_made_wait_is_not_waited_for() {
        // Blocking, as its other holder may make it at any time.
        let eventfd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        assert!(!quiesce(&eventfd).unwrap());
        ring(&eventfd);
        ring(&eventfd);
        assert!(quiesce(&eventfd).unwrap());
        assert!(!quiesce(&eventfd).unwrap());
        rustix::io::write(&eventfd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        ring(&eventfd);
        assert!(quiesce(&eventfd).unwrap());
    }
}
