//! What a last owner can leave in a virtio network device: it configures the device by the specification's registers
//! and commands (virtio 1.2, 4.1.4.3 and 5.1.6.5), and leaves it so.

use std::sync::atomic::{AtomicU16, AtomicU32, Ordering::Relaxed};

use tasuki_net::nic::bus::pci::{Capability, Header};
use tasuki_net::nic::bus::{Bus, Registers};

use super::tricks::{Hostile, Trick};

// Offsets in the common configuration.
const FEATURE_SELECT: u32 = 0x00;
const FEATURE: u32 = 0x04;
const OUR_SELECT: u32 = 0x08;
const OURS: u32 = 0x0c;
const CONFIG_VECTOR: u32 = 0x10;
const STATUS: u32 = 0x14;
const SELECT: u32 = 0x16;
const SIZE: u32 = 0x18;
const VECTOR: u32 = 0x1a;
const ENABLE: u32 = 0x1c;
const NOTIFY_OFF: u32 = 0x1e;
const ADDRESSES: [u32; 3] = [0x20, 0x28, 0x30];
const RESET: u32 = 0x3a;

// QEMU's doorbells behind the common configuration: 4 bytes for each queue.
const BELLS: u32 = 0x3000;

/// VIRTIO_F_VERSION_1, ACCESS_PLATFORM and RING_RESET, of the upper word.
const MODERN: u32 = 1 << 0 | 1 << 1 | 1 << 8;
/// VIRTIO_NET_F_MQ: without it the queue for commands is the third.
const MQ: u32 = 1 << 22;
const COMMANDS: u16 = 2;

/// Returns the BAR of the common configuration, and its offset there.
pub fn way(bus: &mut impl Bus) -> (u8, u32) {
    let header = Header::read(bus).expect("a device");
    let mut capabilities = header.capabilities.iter().filter(|capability| capability.id == Capability::VENDOR);
    let common = capabilities.find(|capability| bus.read_config(capability.offset).expect("a device") >> 24 == 1);
    let at = common.expect("a modern device").offset;
    let [bar, ..] = bus.read_config(at + 4).expect("a device").to_le_bytes();
    (bar, bus.read_config(at + 8).expect("a device"))
}

impl<R: Registers> Hostile<R> {
    fn set8(&self, at: u32, value: u8) {
        self.registers.write8(self.common + at, value);
    }

    fn set16(&self, at: u32, value: u16) {
        self.registers.write16(self.common + at, value);
    }

    fn set32(&self, at: u32, value: u32) {
        self.registers.write32(self.common + at, value);
    }

    /// Resets the device and agrees on all features that it offers, except a second pair of queues.
    fn agree(&self) {
        self.set8(STATUS, 0);
        self.until("it is reset", || self.registers.read8(self.common + STATUS) == 0);
        self.set8(STATUS, 1);
        self.set8(STATUS, 3);
        for (word, mask) in [(0, !MQ), (1, MODERN)] {
            self.set32(FEATURE_SELECT, word);
            let offered = self.registers.read32(self.common + FEATURE);
            self.set32(OUR_SELECT, word);
            self.set32(OURS, offered & mask);
        }
        self.set8(STATUS, 11);
        assert_eq!(self.registers.read8(self.common + STATUS) & 8, 8, "they agree");
    }

    fn queue(&self, queue: u16, at: u64) {
        self.set16(SELECT, queue);
        self.set16(SIZE, 16);
        self.set16(VECTOR, 1);
        for (register, part) in ADDRESSES.into_iter().zip(0_u64..) {
            let address = at + 1024 * part;
            self.set32(register, (address & 0xffff_ffff) as u32);
            self.set32(register + 4, (address >> 32) as u32);
        }
        self.set16(ENABLE, 1);
    }

    fn ring_bell(&self, queue: u16) {
        self.set16(SELECT, queue);
        let off = self.registers.read16(self.common + NOTIFY_OFF);
        self.registers.write16(self.common + BELLS + 4 * u32::from(off), queue);
    }

    /// Sets up the queue for commands in its own memory, and gives these commands: class, command and data each.
    fn command(&self, commands: &[(u8, u8, &[u8])]) {
        // The queue's parts, then the text of a command and its result.
        const AT: usize = 128 << 10;
        const SAYS: usize = AT + 4096;
        let at = self.put(AT, &[0; 512]);
        self.queue(COMMANDS, at);
        self.set8(STATUS, 15);
        for (count, (class, command, data)) in (1_u16..).zip(commands) {
            let mut said = [0; 64];
            said[..2].copy_from_slice(&[*class, *command]);
            said[2..2 + data.len()].copy_from_slice(data);
            let words: Vec<u64> = said.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
            self.put(SAYS, &words);
            let says = self.old.0 + SAYS as u64;
            let len = 2 + data.len() as u64;
            // Two descriptors: 1 is NEXT, 2 is WRITE.
            self.put(AT, &[says, len | 1 << 32 | 1 << 48, says + 63, 1 | 2 << 32]);
            let available = self.rings.span::<AtomicU16>(AT + 1024, 20).unwrap();
            available[2 + usize::from((count - 1) % 16)].store(0, Relaxed);
            available[1].store(count, Relaxed);
            self.ring_bell(COMMANDS);
            let used = self.rings.span::<AtomicU32>(AT + 2048, 1).unwrap();
            self.until("the command is handled", || (used[0].load(Relaxed) >> 16) as u16 == count);
            let answer = self.rings.span::<AtomicU32>(SAYS + 60, 1).unwrap();
            println!("  class {class}, command {command}: the device says {}", answer[0].load(Relaxed) >> 24);
        }
    }
}

/// Lets in no address but a stranger's, which becomes the device's own; filters VLANs; has the device announced.
fn filters<R: Registers>(hostile: &Hostile<R>) {
    hostile.agree();
    let table = [&2_u32.to_le_bytes()[..], &[2, 0, 0, 0, 0, 7, 2, 0, 0, 0, 0, 8], &0_u32.to_le_bytes()].concat();
    hostile.command(&[
        // Not promiscuous, no multicast, no unicast at all, no broadcast.
        (0, 0, &[0]),
        (0, 1, &[0]),
        (0, 3, &[1]),
        (0, 4, &[1]),
        (0, 5, &[1]),
        (1, 0, &table),
        (1, 1, &[2, 0, 0, 0, 0, 9]),
        (2, 0, &7_u16.to_le_bytes()),
        (3, 0, &[]),
        // All offloads off.
        (5, 0, &[0; 8]),
    ]);
}

/// Places its queues in the next owner's memory, and tells the device to look there.
fn queues<R: Registers>(hostile: &Hostile<R>) {
    hostile.agree();
    for queue in 0..2 {
        hostile.queue(queue, hostile.next.0 + 4096 * u64::from(queue));
    }
    hostile.set8(STATUS, 15);
    (0..2).for_each(|queue| hostile.ring_bell(queue));
}

/// Resets a queue and never enables it again.
fn half_reset<R: Registers>(hostile: &Hostile<R>) {
    hostile.agree();
    (0..2).for_each(|queue| hostile.queue(queue, hostile.put(128 << 10, &[0; 512])));
    hostile.set8(STATUS, 15);
    hostile.set16(SELECT, 0);
    hostile.set16(RESET, 1);
}

/// Sends interrupts nowhere, or to another's vector.
fn vectors<R: Registers>(hostile: &Hostile<R>) {
    hostile.set16(CONFIG_VECTOR, 0);
    for queue in 0..3 {
        hostile.set16(SELECT, queue);
        hostile.set16(VECTOR, u16::MAX);
    }
}

/// Returns the tricks of a virtio device's last owner. None is inspected: the device goes `cold`.
pub fn of_virtio_net<R: Registers>() -> Vec<Trick<R>> {
    let trick = |name, does| Trick { name, does, refused: None };
    vec![
        trick("nothing", |_| ()),
        trick("receive filters, a VLAN table, offloads, another address", filters),
        trick("queues in the next owner's memory", queues),
        trick("a queue reset half-way", half_reset),
        trick("vectors that ring nobody", vectors),
        trick("a status half-way: features agreed on", |hostile| hostile.agree()),
        trick("a status half-way: seen by a driver", |hostile| {
            hostile.set8(STATUS, 0);
            hostile.set8(STATUS, 1);
        }),
        trick("a status that has failed", |hostile| hostile.set8(STATUS, 0x8f)),
        trick("other features than it offers", |hostile| {
            hostile.set8(STATUS, 0);
            hostile.set8(STATUS, 3);
            hostile.set32(OUR_SELECT, 0);
            hostile.set32(OURS, u32::MAX);
            hostile.set8(STATUS, 11);
        }),
    ]
}
