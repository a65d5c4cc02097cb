//! An RTL8139C+ that writes anything into its registers, its descriptors and its frames, at any time.
//!
//! What must hold: no panic, no endless call, no slot with two holders, no frame beyond its slot, and no driver
//! state that names anything but the card's.
#![no_main]

#[path = "../common/mod.rs"]
mod common;
#[path = "../liar/mod.rs"]
mod liar;

use common::Choices;
use liar::bus::Stub;
use liar::{Liar, MEMORY_AT, Memory, Part};
use libfuzzer_sys::fuzz_target;
use tasuki_net::nic::rtl8139::Rtl8139;

const OWN: u64 = 1 << 31;
const END_OF_RING: u64 = 1 << 30;
/// First and last segment of a frame.
const WHOLE: u64 = 3 << 28;
/// Most descriptors in a ring.
const MOST: u64 = 64;

/// Position of the card in its rings.
struct Card {
    receive: u64,
    transmit: u64,
}

impl Card {
    /// Returns the address of descriptor `place` of the ring whose base is in these registers.
    fn at(card: &Memory, base: u32, place: u64) -> u64 {
        (u64::from(card.register(base + 4)) << 32 | u64::from(card.register(base))).wrapping_add(16 * place)
    }

    /// Returns the place after a descriptor.
    fn after(place: u64, descriptor: u64) -> u64 {
        if descriptor & END_OF_RING != 0 || place + 1 >= MOST { 0 } else { place + 1 }
    }
}

impl Part for Card {
    const CONFIG: &'static [(u16, u32)] =
        &[(0x00, 0x8139_10ec), (0x04, 1 << 20), (0x08, 0x20), (0x0c, 0), (0x10, 1), (0x14, 0xf000_0000), (0x34, 0)];
    const READ: &'static [u32] = &[0x00, 0x04, 0x10, 0x37, 0x58, 0x62, 0x66, 0x68];

    fn new(_: &mut Choices<'_>) -> (Self, Vec<(u32, u32)>) {
        let registers = vec![(0x00, 0x1200_5452), (0x04, 0x5734), (0x62, 1 << 12), (0x66, 0x1e1), (0x68, 0x1e1)];
        (Card { receive: 0, transmit: 0 }, registers)
    }

    fn wrote(&mut self, card: &mut Memory, offset: u32, value: u32) {
        match offset {
            // Command: a reset completes at once; a unit that is switched on begins with its first descriptor.
            0x37 => {
                card.registers.insert(0x37, value & 0xc);
                self.receive = if value & 8 == 0 { self.receive } else { 0 };
                self.transmit = if value & 4 == 0 { self.transmit } else { 0 };
            }
            // Dump of the counters: done.
            0x10 => _ = card.registers.insert(0x10, value & !8),
            0xd9 if card.sends => self.send(card),
            _ => {}
        }
    }

    fn receive(&mut self, card: &mut Memory, count: u8, len: u16) {
        for _ in 0..count {
            let at = Self::at(card, 0xe4, self.receive);
            let descriptor = card.load(at);
            if descriptor & OWN == 0 {
                break;
            }
            // The length includes the check sequence.
            card.store(at, descriptor & END_OF_RING | WHOLE | (u64::from(len) + 4) & 0xf_ffff);
            self.receive = Self::after(self.receive, descriptor);
        }
    }

    fn send(&mut self, card: &mut Memory) {
        for _ in 0..MOST {
            let at = Self::at(card, 0x20, self.transmit);
            let descriptor = card.load(at);
            if descriptor & OWN == 0 {
                break;
            }
            card.store(at, descriptor & !OWN);
            self.transmit = Self::after(self.transmit, descriptor);
        }
    }
}

const _: () = assert!(MEMORY_AT.is_multiple_of(256));

fuzz_target!(|data: &[u8]| {
    liar::play::<Rtl8139<Stub<Liar<Card>>>, Card>(data, &[1]);
});
