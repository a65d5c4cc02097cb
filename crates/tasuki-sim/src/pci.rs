//! The parts of the configuration space that all cards have in common, and MSI-X.
//!
//! Offsets: PCI Local Bus Specification 3.0, 6.1 and 6.8.
#![allow(clippy::cast_possible_truncation, reason = "registers are cut into their fields")]

use crate::model::{Host, Interrupt};

const CONFIG_LEN: usize = 4096;

pub const COMMAND: usize = 0x04;
const COMMAND_MEMORY: u16 = 1 << 1;
const COMMAND_MASTER: u16 = 1 << 2;
const COMMAND_NO_INTX: u16 = 1 << 10;
pub const STATUS: usize = 0x06;
const STATUS_INTX: u16 = 1 << 3;
/// The function has a capability list.
pub const STATUS_CAPABILITIES: u16 = 1 << 4;
/// A request by the card was answered with "no such address".
pub const STATUS_RECEIVED_MASTER_ABORT: u16 = 1 << 13;

/// Bits of the control word of the MSI-X capability.
const MSIX_ENABLE: u16 = 1 << 15;
const MSIX_MASK_ALL: u16 = 1 << 14;

/// The bytes of a configuration space.
#[derive(Debug)]
pub struct Space {
    bytes: Box<[u8; CONFIG_LEN]>,
    /// Mask of the bits that can be written.
    writable: Box<[u8; CONFIG_LEN]>,
    /// Mask of the bits that writing a one clears.
    clears: Box<[u8; CONFIG_LEN]>,
}

impl Space {
    pub fn new() -> Self {
        let empty = || Box::new([0; CONFIG_LEN]);
        Space { bytes: empty(), writable: empty(), clears: empty() }
    }

    pub fn put(&mut self, at: usize, bytes: &[u8], writable: &[u8]) {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
        self.writable[at..at + writable.len()].copy_from_slice(writable);
    }

    /// Marks bits that writing a one clears.
    pub fn put_clears(&mut self, at: usize, bits: &[u8]) {
        self.clears[at..at + bits.len()].copy_from_slice(bits);
    }

    /// Clears all bits that can be written.
    pub fn reset(&mut self) {
        for (byte, writable) in self.bytes.iter_mut().zip(self.writable.iter()) {
            *byte &= !writable;
        }
    }

    pub fn get8(&self, at: usize) -> u8 {
        self.bytes[at]
    }

    pub fn get16(&self, at: usize) -> u16 {
        u16::from_le_bytes([self.bytes[at], self.bytes[at + 1]])
    }

    pub fn set16(&mut self, at: usize, value: u16) {
        self.bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
    }

    /// Reads `width` bytes (1, 2 or 4).
    pub fn read(&self, offset: u32, width: u8) -> u32 {
        let byte = |i: u8| self.bytes.get(offset as usize + usize::from(i)).copied().unwrap_or(0xff);
        (0..width.min(4)).rev().fold(0, |value, i| value << 8 | u32::from(byte(i)))
    }

    /// Writes `width` bytes (1, 2 or 4).
    pub fn write(&mut self, offset: u32, width: u8, value: u32) {
        for (i, byte) in (offset as usize..).zip(value.to_le_bytes()).take(usize::from(width.min(4))) {
            if i < CONFIG_LEN {
                let kept = self.bytes[i] & !self.writable[i] & !(byte & self.clears[i]);
                self.bytes[i] = kept | byte & self.writable[i];
            }
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct Vector {
    address: u64,
    data: u32,
    masked: bool,
}

const UNSET: Vector = Vector { address: 0, data: 0, masked: true };

/// A function's configuration space, and its MSI-X vectors with their pending bits.
#[derive(Debug)]
pub struct Function<const N: usize> {
    pub space: Space,
    /// Offset of the MSI-X capability.
    msix: usize,
    /// Offset of the pending bits, in the BAR that begins with the table.
    pending_at: u32,
    vectors: [Vector; N],
    pending: u32,
}

impl<const N: usize> Function<N> {
    pub fn new(msix: usize, pending_at: u32) -> Self {
        Function { space: Space::new(), msix, pending_at, vectors: [UNSET; N], pending: 0 }
    }

    /// Resets to the power-on state. The BARs are unassigned.
    pub fn reset(&mut self) {
        self.space.reset();
        self.space.set16(STATUS, STATUS_CAPABILITIES);
        (self.vectors, self.pending) = ([UNSET; N], 0);
    }

    /// Returns whether the registers answer.
    pub fn memory_on(&self) -> bool {
        self.space.get16(COMMAND) & COMMAND_MEMORY != 0
    }

    /// Returns whether the card may access memory.
    pub fn master(&self) -> bool {
        self.space.get16(COMMAND) & COMMAND_MASTER != 0
    }

    pub fn set_intx(&mut self, level: bool) {
        let status = self.space.get16(STATUS) & !STATUS_INTX;
        self.space.set16(STATUS, if level { status | STATUS_INTX } else { status });
    }

    pub fn intx_allowed(&self) -> bool {
        self.space.get16(COMMAND) & COMMAND_NO_INTX == 0
    }

    /// Returns the control word of the MSI-X capability.
    fn control(&self) -> u16 {
        self.space.get16(self.msix + 2)
    }

    pub fn msix(&self) -> bool {
        self.control() & MSIX_ENABLE != 0
    }

    /// Switches MSI-X on or off and unmasks or masks every vector, as a system does when a driver asks for
    /// interrupts.
    pub fn enable_msix(&mut self, on: bool) {
        let control = self.control() & !(MSIX_ENABLE | MSIX_MASK_ALL) | if on { MSIX_ENABLE } else { 0 };
        self.space.set16(self.msix + 2, control);
        self.vectors.iter_mut().for_each(|vector| vector.masked = !on);
    }

    pub fn mask_vector(&mut self, vector: usize, masked: bool) {
        if let Some(vector) = self.vectors.get_mut(vector) {
            vector.masked = masked;
        }
    }

    pub fn pending(&self) -> u32 {
        self.pending
    }

    pub fn clear_pending(&mut self, bits: u32) {
        self.pending &= !bits;
    }

    /// Sends the message of `vector` or, if it is masked, sets its pending bit.
    pub fn fire(&mut self, vector: usize, host: &mut impl Host) {
        if self.vectors[vector].masked || self.control() & MSIX_MASK_ALL != 0 {
            self.pending |= 1 << vector;
        } else {
            self.pending &= !(1 << vector);
            host.interrupt(Interrupt::MsiX(vector as u16));
        }
    }

    /// Sends the pending messages whose vectors are no longer masked.
    pub fn fire_pending(&mut self, host: &mut impl Host) {
        if self.pending != 0 && self.msix() {
            for vector in 0..N {
                if self.pending >> vector & 1 != 0 {
                    self.fire(vector, host);
                }
            }
        }
    }

    /// Returns address and data of a vector's message, as the driver set them.
    pub fn message(&self, vector: usize) -> Option<(u64, u32)> {
        self.vectors.get(vector).map(|vector| (vector.address, vector.data))
    }

    pub fn table_read(&self, offset: u32) -> u32 {
        match (self.vectors.get(offset as usize / 16), offset % 16) {
            _ if offset == self.pending_at => self.pending,
            (Some(vector), 0) => vector.address as u32,
            (Some(vector), 4) => (vector.address >> 32) as u32,
            (Some(vector), 8) => vector.data,
            (Some(vector), 12) => vector.masked.into(),
            _ => 0,
        }
    }

    pub fn table_write(&mut self, offset: u32, value: u32) {
        let Some(vector) = self.vectors.get_mut(offset as usize / 16) else { return };
        match offset % 16 {
            0 => vector.address = vector.address & !0xffff_ffff | u64::from(value & !3),
            4 => vector.address = vector.address & 0xffff_ffff | u64::from(value) << 32,
            8 => vector.data = value,
            12 => vector.masked = value & 1 != 0,
            _ => {}
        }
    }
}
