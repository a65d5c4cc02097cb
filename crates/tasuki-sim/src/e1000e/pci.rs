//! The configuration space, and MSI-X.
//!
//! Offsets: 82574 datasheet §9 (PCIe programming interface); PCI Local Bus Specification 3.0, 6.1 and 6.8.

use crate::pci::{COMMAND, Function, STATUS, STATUS_RECEIVED_MASTER_ABORT};

/// Number of MSI-X vectors.
pub const VECTORS: usize = 5;

const MSIX: usize = 0xa0;
const PM: usize = 0xc8;
const MSI: usize = 0xd0;
const PCIE: usize = 0xe0;
const AER: usize = 0x100;
const SERIAL: usize = 0x140;

/// PCIe Device Status: unsupported request detected, non-fatal error detected.
const DEVICE_STATUS_UR: u16 = 1 << 3 | 1 << 1;

/// Offset of the pending bits in BAR 3.
const PBA_AT: u32 = 0x2000;

/// Side effect of a write to the configuration space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    None,
    /// The power state went from D3 to D0: the card has to be reset.
    PowerUp,
}

#[derive(Debug)]
pub struct Pci {
    pub function: Function<VECTORS>,
}

impl Pci {
    pub fn new(mac: [u8; 6]) -> Self {
        let mut pci = Pci { function: Function::new(MSIX, PBA_AT) };
        pci.header();
        pci.capabilities();
        let [a, b, c, d, e, f] = mac;
        pci.put(AER, &[0x01, 0x00, 0x01, 0x14], &[0; 4]);
        pci.put(SERIAL, &[0x03, 0x00, 0x01, 0x00, f, e, d, 0xff, 0xff, c, b, a], &[0; 12]);
        pci.function.space.put_clears(AER + 4, &[0xff; 4]);
        pci
    }

    fn put(&mut self, at: usize, bytes: &[u8], writable: &[u8]) {
        self.function.space.put(at, bytes, writable);
    }

    fn header(&mut self) {
        self.put(0x00, &[0x86, 0x80, 0xd3, 0x10], &[]);
        // Command; the status says that the function has a capability list.
        self.put(COMMAND, &[0, 0, 0x10, 0], &[0x47, 0x05]);
        self.function.space.put_clears(STATUS + 1, &[0xf9]);
        // Revision 0, an Ethernet controller.
        self.put(0x08, &[0x00, 0x00, 0x00, 0x02], &[]);
        self.put(0x0c, &[0, 0, 0, 0], &[0xff]);
        // BAR 0: 128 KB of registers. BAR 2: 32 ports. BAR 3: 16 KB for MSI-X. No flash behind BAR 1.
        self.put(0x10, &[0, 0, 0, 0], &[0x00, 0x00, 0xfe, 0xff]);
        self.put(0x18, &[1, 0, 0, 0], &[0xe0, 0xff, 0xff, 0xff]);
        self.put(0x1c, &[0, 0, 0, 0], &[0x00, 0xc0, 0xff, 0xff]);
        self.put(0x2c, &[0x86, 0x80, 0x1f, 0xa0], &[]);
        self.put(0x34, &[PM as u8], &[]);
        // Interrupt line and pin A.
        self.put(0x3c, &[0, 1], &[0xff]);
    }

    fn capabilities(&mut self) {
        // Power management: D0 and D3hot; leaving D3hot resets.
        self.put(PM, &[0x01, MSI as u8, 0x22, 0xc8, 0, 0x20], &[0, 0, 0, 0, 0x03, 0x1f]);
        self.function.space.put_clears(PM + 5, &[0x80]);
        // MSI: one message, 64-bit address.
        self.put(
            MSI,
            &[0x05, PCIE as u8, 0x80, 0],
            &[0, 0, 0x01, 0, 0xfc, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff],
        );
        // PCI Express endpoint, version 1. No function-level reset. Payloads up to 256 bytes; one lane at 2.5 GT/s.
        self.put(
            PCIE,
            &[0x10, MSIX as u8, 0x01, 0x00, 0xc1, 0x8c, 0x00, 0x00, 0x10, 0x28],
            &[0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0x7f],
        );
        self.put(PCIE + 12, &[0x11, 0x1c, 0x07, 0x00, 0x00, 0x00, 0x11, 0x10], &[0, 0, 0, 0, 0xdb]);
        self.function.space.put_clears(PCIE + 10, &[0x0f]);
        // MSI-X: five vectors, table at the start of BAR 3, pending bits at 0x2000 of it.
        self.put(MSIX, &[0x11, 0, VECTORS as u8 - 1, 0, 3, 0, 0, 0, 3, 0x20, 0, 0], &[0, 0, 0, 0xc0]);
    }

    /// Resets to the power-on state. The BARs are unassigned.
    pub fn reset(&mut self) {
        self.function.reset();
        self.put(0x18, &[1], &[]);
        self.put(PCIE + 8, &[0x10, 0x28, 0, 0], &[]);
    }

    /// Reads `width` bytes (1, 2 or 4).
    pub fn read(&self, offset: u32, width: u8) -> u32 {
        self.function.space.read(offset, width)
    }

    /// Writes `width` bytes (1, 2 or 4).
    pub fn write(&mut self, offset: u32, width: u8, value: u32) -> Effect {
        let before = self.power_state();
        self.function.space.write(offset, width, value);
        if before == 3 && self.power_state() == 0 { Effect::PowerUp } else { Effect::None }
    }

    fn power_state(&self) -> u8 {
        self.function.space.get8(PM + 4) & 3
    }

    /// Returns whether the registers answer.
    pub fn memory_on(&self) -> bool {
        self.function.memory_on() && self.power_state() == 0
    }

    /// Returns whether the card may access memory.
    pub fn master(&self) -> bool {
        self.function.master() && self.power_state() == 0
    }

    /// Records that a read by the card reached no memory.
    pub fn master_abort(&mut self) {
        self.function.space.set16(STATUS, self.function.space.get16(STATUS) | STATUS_RECEIVED_MASTER_ABORT);
    }

    /// Records an access to a register that does not answer.
    pub fn unsupported_request(&mut self) {
        let at = PCIE + 10;
        self.function.space.set16(at, self.function.space.get16(at) | DEVICE_STATUS_UR);
    }

    pub fn msi(&self) -> bool {
        self.function.space.get8(MSI + 2) & 1 != 0
    }
}
