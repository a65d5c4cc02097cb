//! A virtio network device on a [`Bench`]; the test does each access of a driver.

use std::cell::Cell;
use std::ops::Deref;

use tasuki_sim::model::Model;
use tasuki_sim::virtio_net::{Bar, Device, Options, feature};

pub use crate::bench::*;

// Offsets of the structures that our model's capabilities name.
pub const COMMON: u32 = 0x0000;
pub const ISR: u32 = 0x1000;
pub const OWN: u32 = 0x2000;
pub const NOTIFY: u32 = 0x3000;

// Offsets in the common configuration (4.1.4.3).
pub const DEVICE_FEATURE_SELECT: u32 = 0x00;
pub const DEVICE_FEATURE: u32 = 0x04;
pub const DRIVER_FEATURE_SELECT: u32 = 0x08;
pub const DRIVER_FEATURE: u32 = 0x0c;
pub const CONFIG_VECTOR: u32 = 0x10;
pub const NUM_QUEUES: u32 = 0x12;
pub const STATUS: u32 = 0x14;
pub const GENERATION: u32 = 0x15;
pub const QUEUE_SELECT: u32 = 0x16;
pub const QUEUE_SIZE: u32 = 0x18;
pub const QUEUE_VECTOR: u32 = 0x1a;
pub const QUEUE_ENABLE: u32 = 0x1c;
pub const QUEUE_DESC: u32 = 0x20;
pub const QUEUE_DRIVER: u32 = 0x28;
pub const QUEUE_DEVICE: u32 = 0x30;
pub const QUEUE_RESET: u32 = 0x3a;

pub const NEEDS_RESET: u32 = 64;

pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;
pub const INDIRECT: u16 = 4;

pub const HEADER_LEN: usize = 12;

/// Offsets of the parts of queue `index`, for up to 64 descriptors.
pub fn descriptors(index: u16) -> usize {
    usize::from(index) * 0x8000
}
pub fn available(index: u16) -> usize {
    descriptors(index) + 0x4000
}
pub fn used(index: u16) -> usize {
    descriptors(index) + 0x6000
}
/// Offset of buffer `i`, one of 32, of queue `index`.
pub fn buffer(index: u16, i: usize) -> usize {
    0x40000 + usize::from(index) * 0x10000 + i * BUFFER_LEN
}

pub struct Rig {
    bench: Bench<Device>,
    available: [Cell<u16>; 5],
    pub size: u16,
}

impl Deref for Rig {
    type Target = Bench<Device>;

    fn deref(&self) -> &Bench<Device> {
        &self.bench
    }
}

impl Rig {
    /// Makes a card on its bus: memory decoding and bus mastering on, MSI-X enabled as by a system.
    pub fn new(options: Options) -> Self {
        let bench = Bench::new(Device::new(Options { mac: MAC, ..options }));
        bench.card.with(|parts| parts.device.enable_msix(true));
        Rig { bench, available: Default::default(), size: 16 }
    }

    /// Makes a card that runs with these features: all queues set up, and `buffers` posted in the first receive
    /// queue.
    pub fn running(options: Options, features: u64, buffers: usize) -> Self {
        let rig = Rig::new(options);
        rig.agree(features);
        rig.queues();
        rig.common(STATUS, 15);
        (0..buffers).for_each(|i| rig.post(0, i));
        rig
    }

    /// Does the first steps, up to FEATURES_OK; returns whether the device accepts the features.
    pub fn agree(&self, features: u64) -> bool {
        self.common(STATUS, 0);
        self.pass(20_000);
        self.common(STATUS, 1);
        self.common(STATUS, 3);
        self.accept(features);
        self.common(STATUS, 11);
        self.read_common(STATUS) & 8 != 0
    }

    pub fn accept(&self, features: u64) {
        for (select, half) in [(0, features as u32), (1, (features >> 32) as u32)] {
            self.common(DRIVER_FEATURE_SELECT, select);
            self.common(DRIVER_FEATURE, half);
        }
    }

    /// Sets up all existing queues.
    pub fn queues(&self) {
        (0..5).for_each(|index| self.queue(index));
    }

    /// Sets up a queue, if it exists, with vector `index + 1`.
    pub fn queue(&self, index: u16) {
        self.common(QUEUE_SELECT, index.into());
        if self.read_common(QUEUE_SIZE) == 0 {
            return;
        }
        self.available[usize::from(index)].set(0);
        self.store_bytes(available(index), &[0; 0x1000]);
        self.store_bytes(used(index), &[0; 0x1000]);
        self.common(QUEUE_SIZE, self.size.into());
        self.common(QUEUE_VECTOR, u32::from(index) + 1);
        self.place(AT + descriptors(index) as u64, AT + available(index) as u64, AT + used(index) as u64);
        self.common(QUEUE_ENABLE, 1);
    }

    /// Sets the addresses of the selected queue.
    pub fn place(&self, descriptors: u64, available: u64, used: u64) {
        for (offset, at) in [(QUEUE_DESC, descriptors), (QUEUE_DRIVER, available), (QUEUE_DEVICE, used)] {
            self.common(offset, at as u32);
            self.common(offset + 4, (at >> 32) as u32);
        }
    }

    /// Resets a queue and waits for the end of the reset.
    pub fn reset_queue(&self, index: u16) {
        self.common(QUEUE_SELECT, index.into());
        self.common(QUEUE_RESET, 1);
        while self.read_common(QUEUE_RESET) != 0 {}
        assert_eq!(self.read_common(QUEUE_ENABLE), 0);
    }

    /// Returns the width in bytes of a field of the common configuration.
    fn width(offset: u32) -> u8 {
        match offset {
            STATUS | GENERATION => 1,
            0x10..0x20 | QUEUE_RESET => 2,
            _ => 4,
        }
    }

    pub fn common(&self, offset: u32, value: u32) {
        self.card.write(Bar::Structures, COMMON + offset, Self::width(offset), value);
    }

    pub fn read_common(&self, offset: u32) -> u32 {
        self.card.read(Bar::Structures, COMMON + offset, Self::width(offset))
    }

    pub fn own(&self, offset: u32, width: u8) -> u32 {
        self.card.read(Bar::Structures, OWN + offset, width)
    }

    pub fn ring(&self, index: u16) {
        self.card.write(Bar::Structures, NOTIFY + 4 * u32::from(index), 2, index.into());
    }

    pub fn descriptor(&self, index: u16, i: u16, at: u64, len: u32, flags: u16, next: u16) {
        let to = descriptors(index) + 16 * usize::from(i);
        self.store(to, at);
        self.store(to + 8, u64::from(len) | u64::from(flags) << 32 | u64::from(next) << 48);
    }

    /// Makes the chain from descriptor `head` on available.
    pub fn give(&self, index: u16, head: u16) {
        let next = self.available[usize::from(index)].get();
        self.store16(available(index) + 4 + 2 * usize::from(next % self.size), head);
        self.available[usize::from(index)].set(next.wrapping_add(1));
        self.store16(available(index) + 2, next.wrapping_add(1));
    }

    /// Posts a receive buffer of one descriptor.
    pub fn post(&self, index: u16, i: usize) {
        self.descriptor(index, i as u16, AT + buffer(index, i) as u64, BUFFER_LEN as u32, WRITE, 0);
        self.give(index, i as u16);
    }

    /// Sends a frame, with header and frame in a descriptor each.
    pub fn send(&self, index: u16, i: u16, frame: &[u8]) {
        self.send_with(index, i, &[0; HEADER_LEN], frame);
    }

    pub fn send_with(&self, index: u16, i: u16, header: &[u8], frame: &[u8]) {
        let at = buffer(index, i.into());
        self.store_bytes(at, header);
        self.store_bytes(at + 64, frame);
        self.descriptor(index, i, AT + at as u64, header.len() as u32, NEXT, i + 1);
        self.descriptor(index, i + 1, AT + at as u64 + 64, frame.len() as u32, 0, 0);
        self.give(index, i);
    }

    /// Gives a command; returns the device's reply.
    pub fn command(&self, class: u8, command: u8, data: &[u8]) -> u8 {
        let index = self.read_common(NUM_QUEUES) as u16 - 1;
        let at = buffer(index, 0);
        self.store_bytes(at, &[0xee]);
        self.store_bytes(at + 64, &[&[class, command], data].concat());
        self.descriptor(index, 0, AT + at as u64 + 64, data.len() as u32 + 2, NEXT, 1);
        self.descriptor(index, 1, AT + at as u64, 1, WRITE, 0);
        self.give(index, 0);
        self.pass(1);
        self.load_bytes(at, 1)[0]
    }

    /// Returns the used ring's elements, in order: head and length of each chain.
    pub fn used(&self, index: u16) -> Vec<(u32, u32)> {
        (0..self.load16(used(index) + 2))
            .map(|i| used(index) + 4 + 8 * usize::from(i % self.size))
            .map(|at| self.load_bytes(at, 8))
            .map(|bytes| bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect::<Vec<_>>())
            .map(|words| (words[0], words[1]))
            .collect()
    }

    /// Returns the frames in the used buffers of a receive queue, and checks their headers.
    pub fn came(&self, index: u16) -> Vec<Vec<u8>> {
        let frame = |(head, len): (u32, u32)| {
            let bytes = self.load_bytes(buffer(index, head as usize), len as usize);
            assert_eq!(bytes[..HEADER_LEN], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]);
            bytes[HEADER_LEN..].to_vec()
        };
        self.used(index).into_iter().map(frame).collect()
    }

    /// Prepares the model for a pause; returns whether it has work.
    pub fn doze(&self) -> bool {
        self.card.with(|parts| parts.device.doze(&mut parts.memory))
    }

    pub fn load16(&self, offset: usize) -> u16 {
        let bytes = self.load_bytes(offset, 2);
        u16::from_le_bytes([bytes[0], bytes[1]])
    }

    pub fn store16(&self, offset: usize, value: u16) {
        self.store_bytes(offset, &value.to_le_bytes());
    }
}

/// The features that most tests accept: all but those for several queue pairs.
pub const PLAIN: u64 = feature::ALL & !(feature::MQ | feature::RSS);

/// Returns a frame to the card's own address, of `len` bytes, with its number at the end.
pub fn frame(len: usize, number: u8) -> Vec<u8> {
    let mut frame = crate::rig::frame_to(&MAC, len.max(15), number);
    frame.truncate(len);
    frame
}
