//! Device bundle: a running card in a form with which another process can go on, as text and as descriptors beside
//! it in a fixed order.
//!
//! The text holds the values that are the same in every process; it describes a bus's twin and the memory. The
//! reader trusts none of it: before it uses any descriptor, each must be there and of its kind, and none may be left
//! over.

use std::os::fd::OwnedFd;

use rustix::fs::FileType;
use serde::{Deserialize, Serialize};
use tasuki_shm::arena::Geometry;

use super::bus::vfio::{self, Descriptors};
use super::bus::vfio_user::{BarTwin, Connection, TIMEOUT, Twin};
use super::bus::{Bus, BusError, IntX, Iova, Vfio, VfioUser};
use super::{MemoryLayout, NicMemory, Parts, PartsError};

/// Maximum number of a device's vectors in a device bundle.
const VECTORS_MAX: usize = 16;

/// Kind of a descriptor in a device bundle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// Connection to the server of the device; for VFIO, the device.
    Device,
    /// Memory by which the processes that share a connection take turns at asking.
    Turns,
    /// Memory in which a BAR's doorbell values are stored.
    Doorbells,
    /// Limits of what the device may reach: VFIO's container, or its group.
    Iommu,
    /// Eventfd that a vector rings.
    Vector,
    /// Memory of the rings.
    Rings,
    /// Memory of the frames.
    Frames,
    /// Memory of the ledger.
    Ledger,
}

/// Reason why a device bundle is unusable. Nothing was touched.
#[derive(Debug, thiserror::Error)]
pub enum BundleError {
    /// A descriptor is missing.
    #[error("the device bundle lacks a descriptor ({0:?}); daemon and worker do not fit together: rebuild the older")]
    Missing(What),
    /// A descriptor is of another kind.
    #[error(
        "a descriptor of the device bundle ({0:?}) is of another kind; daemon and worker do not fit together: rebuild the older"
    )]
    Odd(What),
    /// There are more descriptors than the text names.
    #[error(
        "the device bundle has {0} descriptors that its text does not name; daemon and worker do not fit together: rebuild the older"
    )]
    Extra(usize),
    /// The text cannot be true.
    #[error("the device bundle's text cannot be true: {what} ({value:#x}); open the NIC anew")]
    Text {
        /// What is wrong with the text.
        what: &'static str,
        /// The value found.
        value: u64,
    },
    /// The bus does not reach the device.
    #[error("{0}")]
    Bus(#[from] BusError),
    /// The memory is not the NIC's.
    #[error("{0}")]
    Memory(#[from] PartsError),
}

/// Descriptors of a device bundle, taken one by one in the order in which they came.
#[derive(Debug)]
pub struct Fds(std::vec::IntoIter<OwnedFd>);

impl Fds {
    /// Wraps all descriptors of a device bundle.
    pub fn new(fds: Vec<OwnedFd>) -> Self {
        Fds(fds.into_iter())
    }

    /// Returns the next descriptor, which must be of a kind that `what` allows.
    pub fn take(&mut self, what: What) -> Result<OwnedFd, BundleError> {
        let fd = self.0.next().ok_or(BundleError::Missing(what))?;
        let is_right = rustix::fs::fstat(&fd).is_ok_and(|stat| match (what, FileType::from_raw_mode(stat.st_mode)) {
            (What::Device, kind) => matches!(kind, FileType::Socket | FileType::Unknown | FileType::CharacterDevice),
            (What::Iommu, kind) => kind == FileType::CharacterDevice,
            // An eventfd is a file without a type.
            (What::Vector, kind) => kind == FileType::Unknown,
            (What::Turns | What::Doorbells | What::Rings | What::Frames | What::Ledger, kind) => {
                kind == FileType::RegularFile
            }
        });
        if is_right { Ok(fd) } else { Err(BundleError::Odd(what)) }
    }

    /// Checks that no descriptor is left over.
    pub fn end(self) -> Result<(), BundleError> {
        match self.0.len() {
            0 => Ok(()),
            extra => Err(BundleError::Extra(extra)),
        }
    }
}

/// Description of a BAR.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BarText {
    index: u8,
    len: u64,
    /// Offset of the register and place of each doorbell. If there are none, the BAR has no descriptor.
    places: Vec<(u32, u32)>,
}

/// Description of the bus to a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "way", rename_all = "kebab-case")]
pub enum BusText {
    /// A vfio-user server provides the device. Descriptors: the connection, the memory for taking turns at it, the
    /// doorbells of BARs that have some, vectors.
    VfioUser {
        /// Maximum number of descriptors that the server accepts in a message.
        fds_max: u32,
        /// Maximum number of bytes of a region that the server accepts in a message.
        transfer_max: u32,
        /// Whether the server can be asked for doorbells.
        io_fds: bool,
        /// Size of the configuration space in bytes.
        config_len: u64,
        /// Whether the device can be reset.
        can_reset: bool,
        /// BARs that are in use.
        bars: Vec<BarText>,
        /// Number of enabled vectors.
        vectors: usize,
    },
    /// The kernel provides the device by VFIO. Descriptors: container, group, device, vectors, and for the interrupt
    /// pin the eventfd that it rings and the one that unmasks it.
    Vfio {
        /// Number of enabled vectors.
        vectors: usize,
        /// Whether the interrupt pin is enabled.
        #[serde(default)]
        intx: bool,
    },
}

/// Description of a NIC's memory. Descriptors: rings, frames, ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryText {
    rings_at: u64,
    rings_len: usize,
    slot_len: u32,
    slots: u32,
}

impl MemoryText {
    /// Describes memory with this layout.
    pub fn of(layout: &MemoryLayout) -> Self {
        let MemoryLayout { rings_at, rings_len, slots } = *layout;
        MemoryText { rings_at: rings_at.0, rings_len, slot_len: slots.slot_len, slots: slots.count }
    }

    /// Returns the layout of the memory.
    pub fn layout(&self) -> MemoryLayout {
        let slots = Geometry { slot_len: self.slot_len, count: self.slots };
        MemoryLayout { rings_at: Iova(self.rings_at), rings_len: self.rings_len, slots }
    }
}

/// Description of a running card: first its bus, then its memory. The descriptors come in the same order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Text {
    /// Bus to the card.
    pub bus: BusText,
    /// Memory of the card.
    pub memory: MemoryText,
}

/// A bus of which another process can make a second one.
pub trait BundleBus: Bus + Sized {
    /// Returns the description of the bus, and its descriptors.
    fn pack(&self) -> Result<(BusText, Vec<OwnedFd>), BusError>;

    /// Makes a bus from its description and descriptors, without asking the device. It must not be used while the
    /// original bus is in use.
    fn unpack(text: &BusText, fds: &mut Fds) -> Result<Self, BundleError>;
}

/// Packs a card for another process. `bus` is the bus to it; `parts` are of the memory with this `layout`.
pub fn pack(bus: &impl BundleBus, parts: Parts, layout: &MemoryLayout) -> Result<(Text, Vec<OwnedFd>), BusError> {
    let (bus, mut fds) = bus.pack()?;
    let Parts { rings, frames, ledger } = parts;
    fds.extend([rings, frames, ledger]);
    Ok((Text { bus, memory: MemoryText::of(layout) }, fds))
}

/// Unpacks a card: returns a bus to it that must not be used yet, and its memory, [prepared](NicMemory::prepare).
/// Takes all of `fds`.
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
