//! Reads a PCI configuration space. Offsets: PCI Local Bus Specification 3.0, sections 6.1 and 6.8; PCI Express Base
//! Specification 5.0, section 7.5.

use super::{Bus, BusError};
use crate::nic::{NicError, PciId};

/// Vendor and device ID.
const ID: u16 = 0x00;
/// Command in the low half, status in the high half.
const COMMAND: u16 = 0x04;
const COMMAND_MEMORY: u32 = 1 << 1;
const COMMAND_MASTER: u32 = 1 << 2;
const COMMAND_INTX_DISABLE: u32 = 1 << 10;
const STATUS_CAPABILITIES: u32 = 1 << 20;
/// Revision in the low byte, class code above.
const CLASS: u16 = 0x08;
/// Header type in the third byte.
const HEADER_TYPE: u16 = 0x0c;
const FIRST_BAR: u16 = 0x10;
const BARS: u8 = 6;
const CAPABILITIES: u16 = 0x34;

/// Maximum number of capabilities that fit in 192 bytes: a longer list is a loop.
const CAPABILITIES_MAX: usize = 48;

/// Reason why a configuration space is unusable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PciError {
    /// No device answers.
    #[error("no device answers: its configuration space reads as ones; check the address, and that it is switched on")]
    NoDevice,
    /// The device is a bridge or the like. The field is its header type.
    #[error("the device has configuration header type {0}, where a card has type 0")]
    NoCard(u8),
    /// The list of capabilities has no end. The field is the offset at which reading stopped.
    #[error("the device's list of capabilities does not end (at {0:#x}); it is broken")]
    EndlessCapabilities(u8),
}

/// Kind of a BAR.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BarKind {
    /// Unused.
    None,
    /// Ports of the x86 I/O space.
    Io,
    /// Memory, addressed with 32 bits.
    Memory32,
    /// Memory, addressed with 64 bits: it takes up the next BAR as well.
    Memory64,
}

/// A capability of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capability {
    /// Capability ID, assigned by the PCI-SIG.
    pub id: u8,
    /// Offset in the configuration space.
    pub offset: u16,
}

impl Capability {
    /// MSI-X; it says where the table of vectors is.
    pub const MSI_X: u8 = 0x11;
    /// Vendor-specific; virtio uses it to describe its structures.
    pub const VENDOR: u8 = 0x09;
}

/// Header of a card's configuration space.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// Vendor and device ID.
    pub id: PciId,
    /// Class code: base class, subclass, interface.
    pub class: u32,
    /// Kind of each BAR.
    pub bars: [BarKind; 6],
    /// Capabilities, in the order of the list.
    pub capabilities: Vec<Capability>,
}

impl Header {
    /// Reads the header from the device.
    pub fn read(bus: &mut impl Bus) -> Result<Self, BusError> {
        let word = bus.read_config(ID)?;
        if word == u32::MAX {
            return Err(PciError::NoDevice.into());
        }
        let [.., kind, _] = bus.read_config(HEADER_TYPE)?.to_le_bytes();
        // The highest bit marks a device with several functions.
        if kind & 0x7f != 0 {
            return Err(PciError::NoCard(kind & 0x7f).into());
        }
        let [v0, v1, d0, d1] = word.to_le_bytes();
        let id = PciId { vendor: u16::from_le_bytes([v0, v1]), device: u16::from_le_bytes([d0, d1]) };
        let class = bus.read_config(CLASS)? >> 8;
        Ok(Header { id, class, bars: bars(bus)?, capabilities: capabilities(bus)? })
    }

    /// Reads the header of a device that must be one of `cards`; `driver` names them for the error.
    pub(in crate::nic) fn of(bus: &mut impl Bus, cards: &[PciId], driver: &'static str) -> Result<Self, NicError> {
        let header = Self::read(bus)?;
        match cards.contains(&header.id) {
            true => Ok(header),
            false => Err(NicError::OtherCard { found: header.id, driver }),
        }
    }

    /// Returns the first capability with this ID.
    pub fn capability(&self, id: u8) -> Option<Capability> {
        self.capabilities.iter().copied().find(|capability| capability.id == id)
    }
}

fn bars(bus: &mut impl Bus) -> Result<[BarKind; 6], BusError> {
    let mut kinds = [BarKind::None; 6];
    let mut index = 0;
    while index < BARS {
        let word = bus.read_config(FIRST_BAR + 4 * u16::from(index))?;
        let kind = match word {
            word if word & 1 == 1 => BarKind::Io,
            word if word >> 1 & 3 == 2 => BarKind::Memory64,
            _ => BarKind::Memory32,
        };
        kinds[usize::from(index)] = kind;
        index += if kind == BarKind::Memory64 { 2 } else { 1 };
    }
    Ok(kinds)
}

fn capabilities(bus: &mut impl Bus) -> Result<Vec<Capability>, BusError> {
    let mut found = Vec::new();
    if bus.read_config(COMMAND)? & STATUS_CAPABILITIES == 0 {
        return Ok(found);
    }
    let [mut offset, ..] = bus.read_config(CAPABILITIES)?.to_le_bytes();
    // The two lowest bits are reserved.
    offset &= !3;
    while offset != 0 {
        if found.len() == CAPABILITIES_MAX {
            return Err(PciError::EndlessCapabilities(offset).into());
        }
        let [id, next, ..] = bus.read_config(offset.into())?.to_le_bytes();
        found.push(Capability { id, offset: offset.into() });
        offset = next & !3;
    }
    Ok(found)
}

/// Lets the device decode its memory, and sets whether it may be bus master.
pub fn enable(bus: &mut impl Bus, master: bool) -> Result<(), BusError> {
    let command = bus.read_config(COMMAND)? & 0xffff;
    let command = if master { command | COMMAND_MASTER } else { command & !COMMAND_MASTER };
    bus.write_config(COMMAND, command | COMMAND_MEMORY)
}

/// Lets the device decode its memory and be bus master, unless it does both already: see [`decode`].
pub fn enable_again(bus: &mut impl Bus) -> Result<(), BusError> {
    const BOTH: u32 = COMMAND_MASTER | COMMAND_MEMORY;
    let command = bus.read_config(COMMAND)? & 0xffff;
    if command & BOTH == BOTH { Ok(()) } else { bus.write_config(COMMAND, command | BOTH) }
}

/// Lets the device decode its memory.
pub fn decode(bus: &mut impl Bus) -> Result<(), BusError> {
    let command = bus.read_config(COMMAND)? & 0xffff;
    // Leave a card that decodes already alone: QEMU's e1000e drops a frame when the register is written.
    if command & COMMAND_MEMORY != 0 { Ok(()) } else { bus.write_config(COMMAND, command | COMMAND_MEMORY) }
}

/// Lets the device assert its interrupt pin.
pub fn allow_intx(bus: &mut impl Bus) -> Result<(), BusError> {
    let command = bus.read_config(COMMAND)? & 0xffff;
    let forbidden = command & COMMAND_INTX_DISABLE != 0;
    if forbidden { bus.write_config(COMMAND, command & !COMMAND_INTX_DISABLE) } else { Ok(()) }
}
