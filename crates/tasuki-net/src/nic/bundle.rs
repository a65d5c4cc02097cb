//! A card that runs, as another process can go on with it: text, and the descriptors that stand beside it in a fixed order.
//!
//! The text says what is the same in every process; it is made of a bus's twin and of memory. Whoever reads it believes nothing: each
//! descriptor must be there and of its kind, and nothing may be left over, before any of them is used.

use std::os::fd::OwnedFd;

use rustix::fs::FileType;
use serde::{Deserialize, Serialize};
use tasuki_shm::arena::Geometry;

use super::bus::vfio::{self, Descriptors};
use super::bus::vfio_user::{BarTwin, Connection, TIMEOUT, Twin};
use super::bus::{Bus, BusError, IntX, Iova, Vfio, VfioUser};
use super::{MemoryLayout, NicMemory, Parts, PartsError};

/// Vectors of a device that a device bundle carries, at most.
const VECTORS_MAX: usize = 16;

/// What a descriptor is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// The connection to whoever serves the device; of VFIO, the device.
    Device,
    /// Memory by which those that share a connection take turns at asking.
    Turns,
    /// Where a BAR's doorbells are stored.
    Doorbells,
    /// What the device may reach: VFIO's container, or its group.
    Iommu,
    /// An eventfd that a vector rings.
    Vector,
    /// The memory of the rings.
    Rings,
    /// The memory of the frames.
    Frames,
    /// The memory of the ledger.
    Ledger,
}

/// Why a device bundle is of no use. Nothing was touched.
#[derive(Debug, thiserror::Error)]
pub enum BundleError {
    /// A descriptor did not come.
    #[error("the device bundle lacks a descriptor ({0:?}); daemon and worker do not fit together: rebuild the older")]
    Missing(What),
    /// It is something else.
    #[error(
        "a descriptor of the device bundle ({0:?}) is of another kind; daemon and worker do not fit together: rebuild the older"
    )]
    Odd(What),
    /// More came than the text speaks of.
    #[error(
        "the device bundle has {0} descriptors that its text does not name; daemon and worker do not fit together: rebuild the older"
    )]
    Extra(usize),
    /// The text cannot be true.
    #[error("the device bundle's text cannot be true: {what} ({value:#x}); open the NIC anew")]
    Text {
        /// What is wrong with it.
        what: &'static str,
        /// What stands there.
        value: u64,
    },
    /// The device is not reached.
    #[error("{0}")]
    Bus(#[from] BusError),
    /// The memory is not the NIC's.
    #[error("{0}")]
    Memory(#[from] PartsError),
}

/// Descriptors that are taken one by one, in the order in which they came.
#[derive(Debug)]
pub struct Fds(std::vec::IntoIter<OwnedFd>);

impl Fds {
    /// All of them.
    pub fn new(fds: Vec<OwnedFd>) -> Self {
        Fds(fds.into_iter())
    }

    /// The next one, which must be of a kind that `what` can be.
    pub fn take(&mut self, what: What) -> Result<OwnedFd, BundleError> {
        let fd = self.0.next().ok_or(BundleError::Missing(what))?;
        let is_right = rustix::fs::fstat(&fd).is_ok_and(|stat| match (what, FileType::from_raw_mode(stat.st_mode)) {
            (What::Device, kind) => matches!(kind, FileType::Socket | FileType::Unknown | FileType::CharacterDevice),
            (What::Iommu, kind) => kind == FileType::CharacterDevice,
            // An eventfd is a file of no kind.
            (What::Vector, kind) => kind == FileType::Unknown,
            (What::Turns | What::Doorbells | What::Rings | What::Frames | What::Ledger, kind) => {
                kind == FileType::RegularFile
            }
        });
        if is_right { Ok(fd) } else { Err(BundleError::Odd(what)) }
    }

    /// Nothing may be left over.
    pub fn end(self) -> Result<(), BundleError> {
        match self.0.len() {
            0 => Ok(()),
            extra => Err(BundleError::Extra(extra)),
        }
    }
}

/// What is said of a BAR.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BarText {
    index: u8,
    len: u64,
    /// Of each doorbell, the register's offset and its place; without any, there is no descriptor.
    places: Vec<(u32, u32)>,
}

/// What is said of the way to a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "way", rename_all = "kebab-case")]
pub enum BusText {
    /// Somebody serves it. Descriptors: the connection, the memory for taking turns at it, doorbells of the BARs that have some, vectors.
    VfioUser {
        /// Descriptors that the server takes in a message.
        fds_max: u32,
        /// Bytes of a region that it takes in a message.
        transfer_max: u32,
        /// Whether it can be asked for doorbells.
        io_fds: bool,
        /// Bytes of the configuration space.
        config_len: u64,
        /// Whether the device can be reset.
        can_reset: bool,
        /// Those that are used.
        bars: Vec<BarText>,
        /// Those that are enabled.
        vectors: usize,
    },
    /// The kernel hands it out. Descriptors: container, group, device, vectors, and for the pin what it rings and what unmasks it.
    Vfio {
        /// Those that are enabled.
        vectors: usize,
        /// Whether the pin is.
        #[serde(default)]
        intx: bool,
    },
}

/// What is said of a NIC's memory. Descriptors: rings, frames, ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryText {
    rings_at: u64,
    rings_len: usize,
    slot_len: u32,
    slots: u32,
}

impl MemoryText {
    /// What is said of memory that lies and is cut like this.
    pub fn of(layout: &MemoryLayout) -> Self {
        let MemoryLayout { rings_at, rings_len, slots } = *layout;
        MemoryText { rings_at: rings_at.0, rings_len, slot_len: slots.slot_len, slots: slots.count }
    }

    /// Where the memory lies and how it is cut.
    pub fn layout(&self) -> MemoryLayout {
        let slots = Geometry { slot_len: self.slot_len, count: self.slots };
        MemoryLayout { rings_at: Iova(self.rings_at), rings_len: self.rings_len, slots }
    }
}

/// What is said of a card that runs: first of the way to it, then of its memory, and so come the descriptors.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Text {
    /// The way to it.
    pub bus: BusText,
    /// Its memory.
    pub memory: MemoryText,
}

/// A bus of which a second one can be made in another process.
pub trait BundleBus: Bus + Sized {
    /// What is to be said of it, and its descriptors.
    fn pack(&self) -> Result<(BusText, Vec<OwnedFd>), BusError>;

    /// The reverse, without a word to the device. It must not be used while the bus that it is of is.
    fn unpack(text: &BusText, fds: &mut Fds) -> Result<Self, BundleError>;
}

/// What another process needs to go on with a card: `bus` is the way to it, `parts` are of the memory that lies so.
pub fn pack(bus: &impl BundleBus, parts: Parts, layout: &MemoryLayout) -> Result<(Text, Vec<OwnedFd>), BusError> {
    let (bus, mut fds) = bus.pack()?;
    let Parts { rings, frames, ledger } = parts;
    fds.extend([rings, frames, ledger]);
    Ok((Text { bus, memory: MemoryText::of(layout) }, fds))
}

/// The reverse: a way to the card that must not be used yet, and its memory, [prepared](NicMemory::prepare). All of `fds` are used up.
pub fn unpack<B: BundleBus>(text: &Text, mut fds: Fds) -> Result<(B, NicMemory), BundleError> {
    let bus = B::unpack(&text.bus, &mut fds)?;
    let (rings, frames) = (fds.take(What::Rings)?, fds.take(What::Frames)?);
    let parts = Parts { rings, frames, ledger: fds.take(What::Ledger)? };
    fds.end()?;
    Ok((bus, NicMemory::prepare(parts, &text.memory.layout())?))
}

fn count(vectors: usize) -> Result<usize, BundleError> {
    match vectors <= VECTORS_MAX {
        true => Ok(vectors),
        false => Err(BundleError::Text { what: "the number of its vectors", value: vectors as u64 }),
    }
}

impl BundleBus for VfioUser {
    fn pack(&self) -> Result<(BusText, Vec<OwnedFd>), BusError> {
        let Twin { connection, lock, config_len, can_reset, bars, vectors } = self.twin()?;
        let Connection { socket, fds_max, transfer_max, io_fds } = connection;
        let says = |bar: &BarTwin| BarText { index: bar.index, len: bar.len, places: bar.places.clone() };
        let (bar_texts, count) = (bars.iter().map(says).collect(), vectors.len());
        let doorbells = bars.into_iter().filter_map(|bar| bar.doorbells);
        let fds = [socket, lock].into_iter().chain(doorbells).chain(vectors).collect();
        let text =
            BusText::VfioUser { fds_max, transfer_max, io_fds, config_len, can_reset, bars: bar_texts, vectors: count };
        Ok((text, fds))
    }

    fn unpack(text: &BusText, fds: &mut Fds) -> Result<Self, BundleError> {
        let &BusText::VfioUser { fds_max, transfer_max, io_fds, config_len, can_reset, ref bars, vectors } = text
        else {
            return Err(BundleError::Text { what: "the way is not vfio-user", value: 0 });
        };
        let vectors = count(vectors)?;
        let connection = Connection { socket: fds.take(What::Device)?, fds_max, transfer_max, io_fds };
        let lock = fds.take(What::Turns)?;
        let bars = bars.iter().map(|BarText { index, len, places }| {
            let doorbells = if places.is_empty() { None } else { Some(fds.take(What::Doorbells)?) };
            Ok(BarTwin { index: *index, len: *len, doorbells, places: places.clone() })
        });
        let bars = bars.collect::<Result<Vec<_>, BundleError>>()?;
        let vectors = (0..vectors).map(|_| fds.take(What::Vector)).collect::<Result<Vec<_>, _>>()?;
        Ok(VfioUser::from_twin(Twin { connection, lock, config_len, can_reset, bars, vectors }, TIMEOUT)?)
    }
}

impl BundleBus for Vfio {
    fn pack(&self) -> Result<(BusText, Vec<OwnedFd>), BusError> {
        let vfio::Twin { descriptors: Descriptors { container, group, device }, vectors, intx } = self.twin()?;
        let text = BusText::Vfio { vectors: vectors.len(), intx: intx.is_some() };
        let pin = intx.into_iter().flat_map(|IntX { rings, unmasks }| [rings, unmasks]);
        Ok((text, [container, group, device].into_iter().chain(vectors).chain(pin).collect()))
    }

    fn unpack(text: &BusText, fds: &mut Fds) -> Result<Self, BundleError> {
        let &BusText::Vfio { vectors, intx } = text else {
            return Err(BundleError::Text { what: "the way is not VFIO", value: 0 });
        };
        let vectors = count(vectors)?;
        let (container, group) = (fds.take(What::Iommu)?, fds.take(What::Iommu)?);
        let descriptors = Descriptors { container, group, device: fds.take(What::Device)? };
        let vectors = (0..vectors).map(|_| fds.take(What::Vector)).collect::<Result<Vec<_>, _>>()?;
        let intx = match intx {
            true => Some(IntX { rings: fds.take(What::Vector)?, unmasks: fds.take(What::Vector)? }),
            false => None,
        };
        Ok(Vfio::from_twin(vfio::Twin { descriptors, vectors, intx })?)
    }
}
