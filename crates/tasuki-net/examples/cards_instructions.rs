//! Counts the instructions per packet of the drivers for virtio network devices and the RTL8139C+, under callgrind.
//!
//! ```text
//! cargo build --release -p tasuki-net --example cards_instructions
//! valgrind --tool=callgrind --callgrind-out-file=/dev/null --toggle-collect='cards_instructions::receive_and_release*' \
//!     target/release/examples/cards_instructions virtio
//! ```
//!
//! The figure is `Collected` divided by the number of packets that this program prints. The same goes for
//! `transmit_and_reclaim`, and for the other card with `rtl8139`. The card is memory that this program writes, whose
//! work is not counted; its registers keep the written values.

#[path = "../tests/suite/stub/bus.rs"]
mod bus;

use std::cell::RefCell;
use std::collections::HashMap;
use std::hint::black_box;
use std::rc::Rc;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::atomic::{AtomicU32, AtomicU64};

use bus::{Answers, Stub};
use tasuki_net::nic::bus::Iova;
use tasuki_net::nic::rtl8139::Rtl8139;
use tasuki_net::nic::virtio_net::VirtioNet;
use tasuki_net::nic::{Nic, NicMemory, NicOptions};
use tasuki_net::port::{BURST_MAX, Burst, Frame};
use tasuki_shm::arena::{Arena, Geometry};
use tasuki_shm::region::Span;

const BURSTS: usize = 1000;
const RING: u16 = 64;
/// Two descriptors per frame: as many frames as the other card's ring has.
const SPLIT: u16 = 2 * RING;

/// The counted part: receives a burst, and frees its slots.
#[inline(never)]
fn receive_and_release<N: Nic>(nic: &mut N, burst: &mut Burst) -> usize {
    let count = nic.receive(burst).expect("the stub behaves");
    burst.clear();
    count
}

/// The counted part: reclaims sent slots, and sends a burst.
#[inline(never)]
fn transmit_and_reclaim<N: Nic>(nic: &mut N, burst: &mut Burst) -> usize {
    nic.transmit(burst).expect("the stub behaves")
}

/// Configuration space, and registers by BAR offset. The bits of `zero` always read as zero: they stand for
/// operations that take no time.
struct Config {
    config: HashMap<u16, u32>,
    registers: RefCell<HashMap<u32, u32>>,
    zero: fn(u32) -> u32,
}

fn stub(config: &[(u16, u32)], registers: &[(u32, u32)], zero: fn(u32) -> u32) -> Stub<Config> {
    let registers = RefCell::new(registers.iter().copied().collect());
    Stub(Rc::new(Config { config: config.iter().copied().collect(), registers, zero }))
}

impl Answers for Config {
    fn config(&self, offset: u16) -> u32 {
        self.config.get(&offset).copied().unwrap_or(0)
    }

    fn read(&self, offset: u32) -> u32 {
        self.registers.borrow().get(&offset).copied().unwrap_or(0) & !(self.zero)(offset)
    }

    #[inline(never)]
    fn write(&self, offset: u32, value: u32) {
        // On a real bus a notification is one store, not a table access.
        if offset < 0x2000 && offset != 0xd9 {
            self.registers.borrow_mut().insert(offset, value);
        }
    }
}

/// The card's end of the rings.
trait Card {
    /// Fills a burst of receive descriptors.
    fn fill(&mut self);
    /// Marks all transmit descriptors as sent.
    fn send(&mut self);
}

fn measure<N: Nic>(mut nic: N, mut card: impl Card, arena: &Arena) -> [usize; 2] {
    let mut packets = [0; 2];
    let mut burst = Burst::new();
    for _ in 0..BURSTS {
        card.fill();
        packets[0] += receive_and_release(&mut nic, black_box(&mut burst));
        burst.extend((0..BURST_MAX).map(|_| Frame { slot: arena.take().expect("a free slot"), len: 60 }));
        packets[1] += transmit_and_reclaim(&mut nic, black_box(&mut burst));
        card.send();
    }
    packets
}

/// Two rings of 64 descriptors of two words, 1,024 bytes apart.
struct Rtl(Span<AtomicU64>, usize);

impl Card for Rtl {
    fn fill(&mut self) {
        for i in (0..BURST_MAX).map(|i| (self.1 + i) % usize::from(RING)) {
            // First and last segment, 64 bytes; the end-of-ring bit stays.
            let end = self.0[2 * i].load(Acquire) & 1 << 30;
            self.0[2 * i].store(end | 0x3000_0040, Release);
        }
        self.1 += BURST_MAX;
    }
    fn send(&mut self) {
        for word in self.0[128..256].iter().step_by(2) {
            word.store(word.load(Acquire) & !(1 << 31), Release);
        }
    }
}

/// The available and used rings of two queues of `SPLIT` descriptors.
struct Virtio([(Span<AtomicU32>, Span<AtomicU32>, u32); 2]);

impl Virtio {
    fn use_chains(&mut self, queue: usize, len: u32) {
        let (available, used, index) = &mut self.0[queue];
        let shown = available[0].load(Acquire) >> 16;
        for _ in 0..BURST_MAX {
            if *index & 0xffff == shown {
                break;
            }
            let entry = *index as usize % usize::from(SPLIT);
            let head = available[1 + entry / 2].load(Acquire) >> (16 * (entry % 2)) & 0xffff;
            used[1 + 2 * entry].store(head, Release);
            used[2 + 2 * entry].store(len, Release);
            *index += 1;
        }
        used[0].store(*index << 16, Release);
    }
}

impl Card for Virtio {
    fn fill(&mut self) {
        self.use_chains(0, 72);
    }
    fn send(&mut self) {
        self.use_chains(1, 0);
    }
}

fn main() {
    let memory = NicMemory::create(Geometry { slot_len: 4096, count: 512 }, 16384, Iova(1 << 32)).expect("memory");
    let arena = memory.arena().clone();
    let options = NicOptions { ring: RING, ..NicOptions::default() };
    let [received, sent] = if std::env::args().nth(1).is_some_and(|card| card == "rtl8139") {
        let words = memory.rings().span(0, 256).expect("both rings");
        let bus = stub(&[(0, 0x8139_10ec), (8, 0x20)], &[(0, 2)], |offset| if offset == 0x37 { 0x10 } else { 0 });
        measure(Rtl8139::start(bus, memory, &options).expect("the stub behaves"), Rtl(words, 0), &arena)
    } else {
        // One queue: 2,048 bytes of descriptors, an available ring, and a used ring from the next cache line on.
        let queue = |at: usize| {
            let span = |at, words| memory.rings().span::<AtomicU32>(at, words).expect("both rings");
            (span(at + 2048, 66), span(at + 2048 + 320, 258), 0)
        };
        let queues = [queue(0), queue(2048 + 320 + 1088)];
        let config = [
            (0x00, 0x1041_1af4),
            (0x04, 1 << 20),
            (0x34, 0x40),
            (0x40, 0x0110_5009),
            (0x4c, 0x800),
            (0x50, 0x0214_6409),
            (0x58, 0x2000),
            (0x5c, 0x1000),
            (0x64, 0x0410_0009),
            (0x6c, 0x1000),
            (0x70, 0x1000),
        ];
        // Both feature halves read VERSION_1 and MAC; three queues of 256; an address.
        let registers = [(0x04, 0x21), (0x12, 3), (0x18, 256), (0x1000, 2)];
        let bus = stub(&config, &registers, |_| 0);
        let options = NicOptions { ring: SPLIT, ..options };
        measure(VirtioNet::start(bus, memory, &options).expect("the stub behaves"), Virtio(queues), &arena)
    };
    println!("{received} packets received, {sent} sent");
}
