//! An 82574L that writes anything into its registers, its descriptors and its frames, at any time.
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
use liar::{Liar, Memory, Part};
use libfuzzer_sys::fuzz_target;
use tasuki_net::nic::e1000e::E1000e;

const CTRL: u32 = 0x0;
const STATUS: u32 = 0x8;
const RCTL: u32 = 0x100;
const TCTL: u32 = 0x400;
/// Base register of the first receive queue; that of the second is 0x100 further on.
const RDBAL: u32 = 0x2800;
const TDBAL: u32 = 0x3800;
/// Offsets of a ring's other registers from its base register.
const LEN: u32 = 0x8;
const HEAD: u32 = 0x10;
const TAIL: u32 = 0x18;
const MASTER_ENABLED: u32 = 1 << 19;
/// Descriptor Done, in either kind of descriptor.
const RECEIVED: u64 = 0b11;
const SENT: u64 = 1 << 32;

/// A card that keeps its whole state in its registers.
struct Card;

impl Card {
    /// Writes the second words of the descriptors from a ring's head on, up to the tail or `most`; then advances the
    /// head.
    fn go(card: &mut Memory, ring: u32, most: u32, word: impl Fn(u64) -> u64) {
        let base = u64::from(card.register(ring + 4)) << 32 | u64::from(card.register(ring));
        let (count, tail) = (card.register(ring + LEN) / 16, card.register(ring + TAIL));
        let mut head = card.register(ring + HEAD);
        for _ in 0..most.min(count) {
            if head == tail {
                break;
            }
            let at = base.wrapping_add(16 * u64::from(head) + 8);
            card.store(at, word(card.load(at)));
            head = if head + 1 >= count { 0 } else { head + 1 };
        }
        card.registers.insert(ring + HEAD, head);
    }
}

impl Part for Card {
    const CONFIG: &'static [(u16, u32)] =
        &[(0x00, 0x10d3_8086), (0x04, 1 << 20), (0x0c, 0), (0x10, 0xf000_0000), (0x34, 0xc8), (0xc8, 0x11)];
    const READ: &'static [u32] = &[
        0x0, 0x8, 0x10, 0x18, 0xc0, 0x100, 0x400, 0x5b00, 0x5b64, 0x5400, 0x5404, 0x2800, 0x2804, 0x2810, 0x2818,
        0x2900, 0x2910, 0x2918, 0x3800, 0x3804, 0x3810, 0x3818, 0x3840, 0x4000, 0x4010, 0x4054, 0x4088, 0x408c, 0x4090,
        0x4094, 0x40a8, 0x40f4,
    ];

    fn new(choices: &mut Choices<'_>) -> (Self, Vec<(u32, u32)>) {
        // Link up at a gigabit in full duplex, or anything; bus master requests enabled; the EEPROM was read; an
        // address; a PAUSE sent.
        let status = if choices.below(4) == 0 { u32::from(choices.byte()) } else { 0x83 };
        let registers =
            vec![(STATUS, status), (0x10, 1 << 9), (0x5400, 0x1200_5452), (0x5404, 0x8000_5734), (0x4054, 1)];
        (Card, registers)
    }

    fn wrote(&mut self, card: &mut Memory, offset: u32, value: u32) {
        match offset {
            // A reset completes at once, and so does the end of bus mastering.
            CTRL => {
                card.registers.insert(CTRL, value & !(1 << 26));
                let status = card.register(STATUS) & !MASTER_ENABLED;
                card.registers.insert(STATUS, status);
            }
            0x3818 => {
                if card.sends {
                    self.send(card);
                }
                // Or the card only says that it has sent.
                card.registers.insert(TDBAL + HEAD, value);
            }
            _ => {}
        }
    }

    fn receive(&mut self, card: &mut Memory, count: u8, len: u16) {
        if card.register(RCTL) & 2 == 0 {
            return;
        }
        for (ring, count) in [(RDBAL, count), (RDBAL + 0x100, count / 2)] {
            Self::go(card, ring, count.into(), |_| u64::from(len) << 32 | RECEIVED);
        }
    }

    fn send(&mut self, card: &mut Memory) {
        if card.register(TCTL) & 2 == 0 {
            return;
        }
        // All of the ring, wherever the head register says it is.
        let count = card.register(TDBAL + LEN) / 16;
        let tail = card.register(TDBAL + TAIL);
        let head = if count == 0 { 0 } else { tail.wrapping_add(1) % count };
        card.registers.insert(TDBAL + HEAD, head);
        Self::go(card, TDBAL, count, |word| word | SENT);
    }
}

fuzz_target!(|data: &[u8]| liar::play::<E1000e<Stub<Liar<Card>>>, Card>(data, &[1, 2]));
