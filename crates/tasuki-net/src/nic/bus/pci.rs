//! What a PCI configuration space says. Offsets: PCI Local Bus Specification 3.0, section 6.1 and 6.8; PCI Express
//! Base Specification 5.0, section 7.5.

use super::{Bus, BusError};
use crate::nic::PciId;

/// Vendor and device.
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

/// More capabilities than this cannot stand in 192 bytes: the list is a loop.
const CAPABILITIES_MAX: usize = 48;

/// Why a configuration space is no use to us.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PciError {
    /// Nobody answers.
    #[error("no device answers: its configuration space reads as ones; check the address, and that it is switched on")]
    NoDevice,
    /// It is a bridge or the like.
    #[error("the device has configuration header type {0}, where a card has type 0")]
    NoCard(u8),
    /// The list of capabilities has no end.
    #[error("the device's list of capabilities does not end (at {0:#x}); it is broken")]
    EndlessCapabilities(u8),
}

/// What is behind a BAR.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BarKind {
    /// Nothing.
    None,
    /// Ports of the x86 I/O space.
    Io,
    /// Memory, addressed with 32 bits.
    Memory32,
    /// Memory, addressed with 64 bits: takes the next BAR's place as well.
    Memory64,
}

/// A capability of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capability {
    /// Which: the list is kept by the PCI-SIG.
    pub id: u8,
    /// Where it stands in the configuration space.
    pub offset: u16,
}

impl Capability {
    /// MSI-X.
    pub const MSI_X: u8 = 0x11;
    /// Vendor-specific; virtio describes its structures by these.
    pub const VENDOR: u8 = 0x09;
}

/// What the header of a card says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// Who it is.
    pub id: PciId,
    /// Class code: base class, subclass, interface.
    pub class: u32,
    /// What is behind each BAR.
    pub bars: [BarKind; 6],
    /// In the order of the list.
    pub capabilities: Vec<Capability>,
}

impl Header {
    /// Reads the header.
    pub fn read(bus: &mut impl Bus) -> Result<Self, BusError> {
        let word = bus.read_config(ID)?;
        if word == u32::MAX {
            return Err(PciError::NoDevice.into());
        }
        let [.., kind, _] = bus.read_config(HEADER_TYPE)?.to_le_bytes();
        // The highest bit says that the device has several functions.
        if kind & 0x7f != 0 {
            return Err(PciError::NoCard(kind & 0x7f).into());
        }
        let [v0, v1, d0, d1] = word.to_le_bytes();
        let id = PciId { vendor: u16::from_le_bytes([v0, v1]), device: u16::from_le_bytes([d0, d1]) };
        let class = bus.read_config(CLASS)? >> 8;
        Ok(Header { id, class, bars: bars(bus)?, capabilities: capabilities(bus)? })
    }

    /// The first capability of kind `id`.
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

/// Lets the device decode its memory and be master of the bus, or only the former.
pub fn enable(bus: &mut impl Bus, master: bool) -> Result<(), BusError> {
    let command = bus.read_config(COMMAND)? & 0xffff;
    let command = if master { command | COMMAND_MASTER } else { command & !COMMAND_MASTER };
    bus.write_config(COMMAND, command | COMMAND_MEMORY)
}

/// Lets the device decode its memory and be master of the bus, if it does not: one that does is left alone, as in [`decode`].
pub fn enable_again(bus: &mut impl Bus) -> Result<(), BusError> {
    const BOTH: u32 = COMMAND_MASTER | COMMAND_MEMORY;
    let command = bus.read_config(COMMAND)? & 0xffff;
    if command & BOTH == BOTH { Ok(()) } else { bus.write_config(COMMAND, command | BOTH) }
}

/// Lets the device decode its memory.
pub fn decode(bus: &mut impl Bus) -> Result<(), BusError> {
    let command = bus.read_config(COMMAND)? & 0xffff;
    // A card that decodes already is left alone: QEMU's e1000e drops a frame when the register is written.
    if command & COMMAND_MEMORY != 0 { Ok(()) } else { bus.write_config(COMMAND, command | COMMAND_MEMORY) }
}

/// Lets the device assert its interrupt pin.
pub fn allow_intx(bus: &mut impl Bus) -> Result<(), BusError> {
    let command = bus.read_config(COMMAND)? & 0xffff;
    let forbidden = command & COMMAND_INTX_DISABLE != 0;
    if forbidden { bus.write_config(COMMAND, command & !COMMAND_INTX_DISABLE) } else { Ok(()) }
}
