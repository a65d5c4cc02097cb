//! A virtio network device that writes anything into its registers, its rings and its frames, at any time.
//!
//! What must hold: no panic, no endless call, no slot with two holders, no frame beyond its slot, and no driver
//! state that names anything but the device's.
#![no_main]

#[path = "../common/mod.rs"]
mod common;
#[path = "../liar/mod.rs"]
mod liar;

use common::Choices;
use liar::bus::Stub;
use liar::{Liar, MEMORY_AT, Memory, Part};
use libfuzzer_sys::fuzz_target;
use tasuki_net::nic::virtio_net::VirtioNet;

/// Offsets in the common configuration, which begins at 0.
const FEATURE_SELECT: u32 = 0x0;
const FEATURE: u32 = 0x4;
const SELECT: u32 = 0x16;
const ENABLE: u32 = 0x1c;
const NOTIFY_OFF: u32 = 0x1e;
const ADDRESSES: u32 = 0x20;
const RESET: u32 = 0x3a;
/// Offsets of the network device's configuration, and of the notifications.
const NET: u32 = 0x1000;
const NOTIFY: u32 = 0x2000;

const MAC: u64 = 1 << 5;
const STATUS: u64 = 1 << 16;
const COMMANDS: u64 = 3 << 17;
const VERSION_1: u64 = 1 << 32;
/// Features that a device may offer besides: an MTU, commands, indices, queue reset, a speed.
const OPTIONAL: [u64; 5] = [1 << 3, COMMANDS, 1 << 29, 1 << 40, 1 << 63];

/// A queue that the driver has enabled.
#[derive(Default)]
struct Queue {
    size: u64,
    descriptors: u64,
    available: u64,
    used_ring: u64,
    /// Number of chains used so far.
    used: u16,
}

impl Queue {
    /// Uses up to `most` chains, and reports `len` written bytes for each.
    fn go(&mut self, card: &Memory, most: u16, len: u32) {
        if self.size == 0 {
            return;
        }
        #[expect(clippy::cast_possible_truncation, reason = "16 bits were asked for")]
        let shown = card.load_part(self.available + 2, 2) as u16;
        for _ in 0..most {
            if self.used == shown {
                break;
            }
            let entry = u64::from(self.used) % self.size;
            let head = card.load_part(self.available + 4 + 2 * entry, 2);
            card.store_part(self.used_ring + 4 + 8 * entry, 4, head);
            card.store_part(self.used_ring + 8 + 8 * entry, 4, len.into());
            self.used = self.used.wrapping_add(1);
        }
        card.store_part(self.used_ring + 2, 2, self.used.into());
    }
}

struct Card {
    features: u64,
    queues: [Queue; 3],
    selected: usize,
    /// Answer to commands: the answer, the chain reported as used, and the number of excess ones.
    answer: (u8, u8, u8),
}

impl Card {
    fn enable(&mut self, card: &mut Memory) {
        let at = |i: u32| {
            let [low, high] = [0, 4].map(|half| u64::from(card.register(ADDRESSES + 8 * i + half)));
            high << 32 | low
        };
        let (size, [descriptors, available, used_ring]) = (card.register(0x18).into(), [at(0), at(1), at(2)]);
        if self.selected == 2 {
            // The indices of both sides: a change under way would make the driver wait five seconds.
            let places = [available, used_ring].map(|at| usize::try_from((at - MEMORY_AT) / 8).expect("64 bits"));
            card.left_alone = places.into();
        }
        let Some(queue) = self.queues.get_mut(self.selected) else { return };
        *queue = Queue { size, descriptors, available, used_ring, used: 0 };
    }

    /// Answers a command, rightly or wrongly.
    fn obey(&mut self, card: &Memory) {
        let (answer, head, more) = self.answer;
        let queue = &mut self.queues[2];
        let shown = card.load_part(queue.available + 2, 2);
        let entry = shown.wrapping_sub(1) % 2;
        card.store_part(queue.used_ring + 4 + 8 * entry, 4, head.into());
        card.store_part(card.load(queue.descriptors + 16), 1, answer.into());
        card.store_part(queue.used_ring + 2, 2, shown.wrapping_add(more.into()));
    }
}

impl Part for Card {
    const CONFIG: &'static [(u16, u32)] = &[
        (0x00, 0x1041_1af4),
        (0x04, 1 << 20),
        (0x0c, 0),
        (0x10, 0xf000_0000),
        (0x34, 0x40),
        (0x40, 0x0110_5009),
        (0x44, 0),
        (0x48, 0),
        (0x4c, 0x800),
        (0x50, 0x0214_6409),
        (0x54, 0),
        (0x58, NOTIFY),
        (0x5c, 0x1000),
        (0x60, 4),
        (0x64, 0x0410_0009),
        (0x68, 0),
        (0x6c, NET),
        (0x70, 0x1000),
        (0x74, 0),
    ];
    const READ: &'static [u32] = &[
        FEATURE, 0x12, 0x14, 0x15, 0x18, 0x1a, ENABLE, NOTIFY_OFF, RESET, NET, 0x1002, 0x1004, 0x1006, 0x100a, 0x100c,
        0x1010,
    ];

    fn new(choices: &mut Choices<'_>) -> (Self, Vec<(u32, u32)>) {
        let which = choices.byte();
        let optional = (0..).zip(OPTIONAL).filter(|(bit, _)| which >> bit & 1 == 1);
        let features = optional.fold(VERSION_1 | MAC | STATUS, |features, (_, feature)| features | feature);
        let honest = choices.below(4) > 0;
        let answer = if honest { (0, 0, 0) } else { (choices.below(3), choices.below(3), choices.below(3)) };
        let registers = vec![
            (0x12, 3),
            (0x18, 256),
            (NET, 0x5452),
            (0x1002, 0x1200),
            (0x1004, 0x5734),
            (0x1006, 1),
            (0x100a, 1500),
            (0x100c, 1000),
            (0x1010, 1),
        ];
        (Card { features, queues: Default::default(), selected: 0, answer }, registers)
    }

    fn wrote(&mut self, card: &mut Memory, offset: u32, value: u32) {
        #[expect(clippy::cast_possible_truncation, reason = "halves")]
        match (offset, value) {
            (FEATURE_SELECT, half) => {
                _ = card.registers.insert(FEATURE, if half == 0 { self.features } else { self.features >> 32 } as u32);
            }
            (SELECT, queue) => {
                self.selected = queue as usize;
                card.registers.insert(NOTIFY_OFF, queue);
                card.registers.insert(0x18, 256);
                card.registers.insert(ENABLE, 0);
            }
            (ENABLE, 1) => self.enable(card),
            (RESET, 1) => {
                card.registers.insert(RESET, 0);
                card.registers.insert(ENABLE, 0);
                if let Some(queue) = self.queues.get_mut(self.selected) {
                    *queue = Queue::default();
                }
            }
            (NOTIFY.., 2) => self.obey(card),
            (NOTIFY.., 1) if card.sends => self.send(card),
            _ => {}
        }
    }

    fn receive(&mut self, card: &mut Memory, count: u8, len: u16) {
        // The length includes the header before the frame.
        self.queues[0].go(card, count.into(), u32::from(len) + 12);
    }

    fn send(&mut self, card: &mut Memory) {
        self.queues[1].go(card, u16::MAX, 0);
    }

    /// A lie about the place of notifications would leave the driver's commands unanswered, which costs five seconds
    /// each.
    fn may_lie(&self, offset: u16) -> bool {
        self.features & COMMANDS == 0 || !matches!(offset, 0x48 | 0x58)
    }
}

fuzz_target!(|data: &[u8]| {
    liar::play::<VirtioNet<Stub<Liar<Card>>>, Card>(data, &[1]);
});
