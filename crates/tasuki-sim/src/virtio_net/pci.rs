//! The configuration space, which locates the structures (§4.1.2, §4.1.4).

use crate::pci::{COMMAND, Function, STATUS, STATUS_CAPABILITIES, Space};

/// Number of MSI-X vectors: one per queue, and one for the configuration.
pub const VECTORS: usize = 6;

/// Offsets and lengths of the structures in BAR 0, each on its own page.
pub const COMMON: u32 = 0x0000;
pub const COMMON_LEN: u32 = 0x3c;
pub const ISR: u32 = 0x1000;
pub const DEVICE: u32 = 0x2000;
pub const DEVICE_LEN: u32 = 24;
pub const NOTIFY: u32 = 0x3000;
/// Bytes between the notification registers of two queues.
pub const NOTIFY_STEP: u32 = 4;
pub const NOTIFY_LEN: u32 = NOTIFY_STEP * super::QUEUES as u32;
pub const STRUCTURES_LEN: u32 = 16 << 10;

pub const MSIX_LEN: u32 = 4 << 10;
/// Offset of the pending bits in BAR 1.
const PBA_AT: u32 = 0x800;

const MSIX: usize = 0x40;
/// `cfg_type` of each structure, and the offset of the capability that locates it.
const CAP_COMMON: (u8, usize) = (1, 0x50);
const CAP_NOTIFY: (u8, usize) = (2, 0x60);
const CAP_ISR: (u8, usize) = (3, 0x74);
const CAP_DEVICE: (u8, usize) = (4, 0x84);
const CAP_WINDOW: (u8, usize) = (5, 0x94);
/// Offset of the window's data, which accesses the place set in the last capability.
pub const WINDOW_DATA: u32 = CAP_WINDOW.1 as u32 + 16;

/// The function as the driver finds it.
pub type Pci = Function<VECTORS>;

/// Creates the function in its power-on state.
pub fn function() -> Pci {
    let mut pci = Pci::new(MSIX, PBA_AT);
    let space = &mut pci.space;
    // A virtio 1 network device (1), class Ethernet controller; a non-transitional one has revision 1 or higher.
    space.put(0x00, &[0xf4, 0x1a, 0x41, 0x10], &[]);
    space.put(COMMAND, &[0, 0, STATUS_CAPABILITIES as u8, 0], &[0x46, 0x05]);
    space.put_clears(STATUS + 1, &[0xf9]);
    space.put(0x08, &[0x01, 0x00, 0x00, 0x02], &[]);
    space.put(0x0c, &[0, 0, 0, 0], &[0xff]);
    // BAR 0: the structures. BAR 1: MSI-X.
    space.put(0x10, &[0; 4], &[0x00, 0xc0, 0xff, 0xff]);
    space.put(0x14, &[0; 4], &[0x00, 0xf0, 0xff, 0xff]);
    space.put(0x2c, &[0xf4, 0x1a, 0x00, 0x11], &[]);
    space.put(0x34, &[MSIX as u8], &[]);
    // Interrupt line and pin A.
    space.put(0x3c, &[0, 1], &[0xff]);
    let table = [0x11, CAP_COMMON.1 as u8, VECTORS as u8 - 1, 0, 1, 0, 0, 0, 1, (PBA_AT >> 8) as u8, 0, 0];
    space.put(MSIX, &table, &[0, 0, 0, 0xc0]);
    structure(space, CAP_COMMON, CAP_NOTIFY.1, COMMON, COMMON_LEN, &[], &[]);
    structure(space, CAP_NOTIFY, CAP_ISR.1, NOTIFY, NOTIFY_LEN, &NOTIFY_STEP.to_le_bytes(), &[]);
    structure(space, CAP_ISR, CAP_DEVICE.1, ISR, 1, &[], &[]);
    structure(space, CAP_DEVICE, CAP_WINDOW.1, DEVICE, DEVICE_LEN, &[], &[]);
    // The driver may write BAR, offset, length and data of this one.
    let mut writable = [0xff; 20];
    writable[..4].fill(0);
    writable[5..8].fill(0);
    structure(space, CAP_WINDOW, 0, 0, 0, &[0; 4], &writable);
    pci
}

/// Puts a `struct virtio_pci_cap` and the bytes `more` after it into the configuration space.
fn structure(
    space: &mut Space,
    (kind, at): (u8, usize),
    next: usize,
    offset: u32,
    len: u32,
    more: &[u8],
    writable: &[u8],
) {
    let head = [0x09, next as u8, 16 + more.len() as u8, kind, 0, 0, 0, 0];
    let bytes = [&head[..], &offset.to_le_bytes(), &len.to_le_bytes(), more].concat();
    space.put(at, &bytes, writable);
}

/// Returns BAR, offset and length in bytes to which the driver set the window.
pub fn window(pci: &Pci) -> (u8, u32, u32) {
    let at = CAP_WINDOW.1 as u32;
    (pci.space.get8(CAP_WINDOW.1 + 4), pci.space.read(at + 8, 4), pci.space.read(at + 12, 4))
}
