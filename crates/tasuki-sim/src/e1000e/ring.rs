//! Receive and transmit rings: their place in memory, the positions of driver and card, and the rules for a driver's
//! writes.

use super::Device;
use super::regs::Reg;
use crate::journal::Class;

/// A ring as the driver configured it, and the card's position in it.
#[derive(Debug, Default)]
pub(super) struct Cursors {
    pub base: u64,
    /// Length in descriptors.
    pub len: u32,
    pub head: u32,
    pub tail: u32,
    /// Index of the first fetched descriptor that is not used yet, and one past the last.
    pub next: usize,
    pub end: usize,
    /// The card fetches no more: it could not read a descriptor.
    pub hung: bool,
}

impl Cursors {
    /// Returns the number of descriptors from `head` to the tail, or to the end of the ring if they wrap round.
    pub fn run(&self, head: u32) -> u32 {
        if head <= self.tail { self.tail - head } else { self.len - head }
    }

    /// Returns the number of descriptors that the card owns, from head to tail.
    pub fn available(&self) -> u32 {
        if self.head <= self.tail { self.tail - self.head } else { self.len - self.head + self.tail }
    }

    /// Drops the fetched descriptors: the head moved, or the card has to fetch anew.
    pub fn forget(&mut self) {
        (self.next, self.end, self.hung) = (0, 0, false);
    }
}

/// Largest RDLEN and TDLEN: bits 19 to 7.
const RING_LEN_MAX: u32 = 0x000f_ff80;

/// Bytes of a descriptor, receive or transmit.
const DESCRIPTOR_LEN: u32 = 16;

impl Device {
    /// Writes a ring's register for the driver. `regs` are the registers of queue 0: base, upper base, length, head
    /// and tail.
    pub(super) fn write_ring(
        &mut self,
        reg: Reg,
        regs: [Reg; 5],
        enabled: bool,
        value: u32,
        cursors: fn(&mut Device, usize) -> &mut Cursors,
    ) {
        let [low, high, length, head, tail] = regs;
        let queue = (reg.0 >> 8 & 1) as usize;
        let stored = self.ring_rule(reg, [low, high, length, head], enabled, value);
        self.set(reg, stored);
        let base = u64::from(self.get(high.of(queue))) << 32 | u64::from(self.get(low.of(queue)));
        let len = self.get(length.of(queue)) / DESCRIPTOR_LEN;
        let ring = cursors(self, queue);
        (ring.base, ring.len) = (base, len);
        match Reg(reg.0 & !0x100) {
            written if written == head => {
                ring.head = stored;
                ring.forget();
                self.inside(reg, stored, len);
            }
            written if written == tail => {
                let (before, head) = (ring.tail, ring.head);
                ring.tail = stored;
                self.tail_rule(reg, [head, before, stored, len], enabled);
            }
            // The chip still holds the descriptors fetched before; the unit fetches anew only while it is off.
            _ if !enabled => ring.forget(),
            _ => {}
        }
        let ring = cursors(self, queue);
        // Head and tail stay inside the ring after any writes of the driver; otherwise the ring counts as empty.
        if ring.head >= ring.len || ring.tail >= ring.len {
            ring.head = ring.head.min(ring.len.saturating_sub(1));
            ring.tail = ring.head;
            ring.forget();
        }
    }

    /// Checks the rules for both kinds of rings. `regs` are base, upper base, length and head of queue 0. Returns
    /// the value to store.
    pub(super) fn ring_rule(&mut self, reg: Reg, regs: [Reg; 4], enabled: bool, value: u32) -> u32 {
        let [base, base_high, len, head] = regs;
        let (at, value64) = (u64::from(reg.0), u64::from(value));
        match Reg(reg.0 & !0x100) {
            reg if reg == base || reg == base_high || reg == len => {
                if enabled {
                    self.journal.note(Class::RingWhileEnabled, self.now, at, value64);
                }
                if reg == base && value & 0xf != 0 {
                    self.journal.note(Class::RingAlignment, self.now, at, value64);
                }
                if reg == len && value & !RING_LEN_MAX != 0 {
                    self.journal.note(Class::RingLength, self.now, at, value64);
                }
                match reg {
                    reg if reg == base => value & !0xf,
                    reg if reg == len => value & RING_LEN_MAX,
                    _ => value,
                }
            }
            reg if reg == head && enabled => {
                self.journal.note(Class::HeadWhileEnabled, self.now, at, value64);
                value & 0xffff
            }
            _ => value & 0xffff,
        }
    }

    /// Returns whether a head or tail lies inside its ring, and notes it if not. A ring of length 0 may have it at
    /// 0.
    pub(super) fn inside(&mut self, reg: Reg, place: u32, len: u32) -> bool {
        let inside = place < len.max(1);
        if !inside {
            self.journal.note(Class::TailOutside, self.now, reg.0.into(), place.into());
        }
        inside
    }

    /// Checks the rules for a tail written while the unit is on or off (`enabled`).
    pub(super) fn tail_rule(&mut self, reg: Reg, [head, before, tail, len]: [u32; 4], enabled: bool) {
        let ahead = |tail: u32| if tail >= head { tail - head } else { tail + len - head };
        if self.inside(reg, tail, len) && enabled && before < len && ahead(tail) < ahead(before) {
            self.journal.note(Class::TailBackwards, self.now, reg.0.into(), tail.into());
        }
        if enabled && !self.pci.master() {
            self.journal.note(Class::NoBusMaster, self.now, reg.0.into(), tail.into());
        }
    }
}
