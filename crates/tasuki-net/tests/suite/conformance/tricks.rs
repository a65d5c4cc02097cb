//! What a last owner can leave in an 82574L that it drove: tricks with registers, over any bus. They share no table
//! with the driver.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use tasuki_net::nic::bus::{Iova, Registers};
use tasuki_shm::region::Region;
use tasuki_sim::e1000e::{Bar, Device, Options};
use tasuki_sim::journal::Class;
use tasuki_sim::model::Model as _;

use tasuki_testing::polled;

// Registers, by the data sheet's chapter 10.
const MDIC: u32 = 0x0020;
const TCTL: u32 = 0x0400;
const PBA: u32 = 0x1000;
const RDBAL1: u32 = 0x2900;
const TDBAL: u32 = 0x3800;
const TDBAL1: u32 = 0x3900;
const TARC1: u32 = 0x3940;
const RXCSUM: u32 = 0x5000;
const MRQC: u32 = 0x5818;
const RETA: u32 = 0x5c00;

/// A last owner that has let go of its card, and can still reach it.
pub struct Hostile<R> {
    /// Registers of the card.
    pub registers: R,
    /// Offset of the common registers, for a card that reports it.
    pub common: u32,
    /// Its memory for rings, and the address at which the card sees it.
    pub rings: Region,
    pub old: Iova,
    /// Address of the next owner's rings.
    pub next: Iova,
}

impl<R: Registers> Hostile<R> {
    pub fn write(&self, offset: u32, value: u32) {
        self.registers.write32(offset, value);
    }

    /// Writes words into its memory for rings, beyond its own rings; returns their address.
    pub fn put(&self, at: usize, words: &[u64]) -> u64 {
        let span = self.rings.span::<AtomicU64>(at, words.len()).unwrap();
        span.iter().zip(words).for_each(|(to, word)| to.store(*word, Relaxed));
        self.old.0 + at as u64
    }

    /// Sets up a ring of eight descriptors, of which `count` are the card's.
    pub fn ring(&self, base: u32, at: u64, count: u32) {
        self.write(base + 8, 128);
        self.write(base, (at & 0xffff_ffff) as u32);
        self.write(base + 4, (at >> 32) as u32);
        self.write(base + 0x10, 0);
        self.write(base + 0x18, count);
    }

    pub fn write_phy(&self, register: u32, value: u32) {
        self.write(MDIC, 1 << 26 | 1 << 21 | register << 16 | value);
        self.until("the PHY answers", || self.registers.read32(MDIC) >> 28 & 1 != 0);
    }

    pub fn until(&self, what: &str, is_so: impl Fn() -> bool) {
        polled(what, || is_so().then_some(()));
    }
}

/// Sends 64 bytes of the next owner's memory through an unknown queue, as soon as there is memory.
pub fn second_transmit_queue<R: Registers>(hostile: &Hostile<R>) {
    const SEND: u64 = 0x0b << 24 | 64;
    hostile.write(TCTL, 0);
    let next = hostile.next.0;
    let at = hostile.put(128 << 10, &[next, SEND, next + 4096, SEND, next + 8192, SEND]);
    hostile.ring(TDBAL1, at, 3);
    hostile.write(TARC1, 0x0400_0403);
}

/// Makes frames come into the next owner's memory through an unknown queue.
pub fn second_receive_queue<R: Registers>(hostile: &Hostile<R>) {
    let next = hostile.next.0;
    let at = hostile.put(128 << 10, &[next, 0, next + 4096, 0, next + 8192, 0, next + 12288, 0]);
    hostile.ring(RDBAL1, at, 4);
    (0..32).for_each(|index| hostile.write(RETA + 4 * index, u32::MAX));
    hostile.write(RXCSUM, 1 << 13);
    hostile.write(MRQC, 0x0037_0001);
}

/// Leaves a last descriptor that does not end its packet, so that the next one becomes part of it.
pub fn packet_without_an_end<R: Registers>(hostile: &Hostile<R>, is_second: bool) {
    let base = if is_second { TDBAL1 } else { TDBAL };
    hostile.write(TCTL, 0);
    let at = hostile.put(128 << 10, &[hostile.old.0, 0x0a << 24 | 64]);
    hostile.ring(base, at, 1);
    hostile.write(TARC1, 0x0400_0403);
    hostile.write(TCTL, 0x0003_f0fa);
    hostile.until("it is fetched", || hostile.registers.read32(base + 0x10) != 0);
}

pub fn other_packet_buffer<R: Registers>(hostile: &Hostile<R>) {
    hostile.write(PBA, 2);
}

/// Power down, loopback, isolation, 10 Mb/s without negotiation, another page, nothing offered.
pub const PHY: [(u32, u32); 6] = [(0, 0x1940), (0, 0x5140), (0, 0x1540), (0, 0x0100), (22, 3), (4, 1)];

/// A trick, and the reason for which the card is then refused, if it is.
pub struct Trick<R> {
    pub name: &'static str,
    pub does: fn(&Hostile<R>),
    pub refused: Option<&'static str>,
}

/// Returns the tricks of an 82574L's last owner.
pub fn of_an_82574l<R: Registers>() -> Vec<Trick<R>> {
    let undone = |name, does| Trick { name, does, refused: None };
    let refused = |name, does, why| Trick { name, does, refused: Some(why) };
    vec![
        undone("nothing", |_| ()),
        undone("a second transmit queue", second_transmit_queue),
        undone("a second receive queue", second_receive_queue),
        refused("a packet without an end", |hostile| packet_without_an_end(hostile, false), "a packet without an end"),
        refused("the same in queue 1", |hostile| packet_without_an_end(hostile, true), "a packet without an end"),
        refused("another packet buffer", other_packet_buffer, "packet buffer"),
        undone("a PHY without power", |hostile| hostile.write_phy(PHY[0].0, PHY[0].1)),
        undone("a PHY in loopback", |hostile| hostile.write_phy(PHY[1].0, PHY[1].1)),
        undone("a PHY that is isolated", |hostile| hostile.write_phy(PHY[2].0, PHY[2].1)),
        undone("a PHY that does not negotiate", |hostile| hostile.write_phy(PHY[3].0, PHY[3].1)),
        undone("another page of the PHY", |hostile| hostile.write_phy(PHY[4].0, PHY[4].1)),
        undone("a PHY that offers nothing", |hostile| hostile.write_phy(PHY[5].0, PHY[5].1)),
    ]
}

/// Returns the registers that the model has, as found through its journal.
pub fn registers() -> Vec<u32> {
    use std::collections::BTreeSet;
    let mut model = Device::new(Options::default());
    model.write_config(4, 2, 6, 0);
    let has = |offset: &u32| {
        let before = model.journal.count(Class::UnknownRegister);
        model.read(Bar::Registers, *offset, 4, 1 << 30);
        model.journal.count(Class::UnknownRegister) == before
    };
    // Of a long row: the first, one in the middle and the last.
    let all: Vec<u32> = (0..128 << 10).step_by(4).filter(has).collect();
    let set: BTreeSet<u32> = all.iter().copied().collect();
    let is_inside =
        |offset: &u32| (1..=8).all(|by| set.contains(&(offset - 4 * by)) && set.contains(&(offset + 4 * by)));
    let is_counter = |offset: u32| (0x4004..0x4124).contains(&offset);
    all.iter().copied().filter(|&offset| !is_counter(offset) && (offset < 0x30 || !is_inside(&offset))).collect()
}
