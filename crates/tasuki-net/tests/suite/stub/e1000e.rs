//! An 82574L in memory that does nothing by itself: the test plays the card, well or badly.
//!
//! Register offsets are written here as numbers from the data sheet, not taken from the driver.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::{Duration, Instant};

use tasuki_net::nic::bus::Iova;
use tasuki_net::nic::{NicMemory, PciId};
use tasuki_shm::arena::Geometry;
use tasuki_shm::region::Span;

use super::bus::{Answers, Stub};

/// Bus address of the card's memory.
pub const MEMORY_AT: Iova = Iova(0x4000_0000);

const CTRL: u32 = 0x0;
const STATUS: u32 = 0x8;
const EECD: u32 = 0x10;
const RCTL: u32 = 0x100;
const PBA: u32 = 0x1000;
const RAL: u32 = 0x5400;
const RAH: u32 = 0x5404;
/// Head and tail of receive queue 0.
pub const RDH: u32 = 0x2810;
pub const RDT: u32 = 0x2818;
/// Counter of sent PAUSE frames.
pub const XOFFTXC: u32 = 0x4054;
pub const TDT: u32 = 0x3818;

/// The card, shared between the driver's bus and the test.
#[derive(Debug)]
pub struct Card {
    id: PciId,
    registers: Vec<Cell<u32>>,
    gone: Cell<bool>,
    /// Offset and bits of a register that never change to what the driver waits for.
    stuck: Cell<Option<(u32, u32)>>,
    /// Offset of a register, and how long a read of it takes.
    slow: Cell<Option<(u32, Duration)>>,
    /// Number of reads of the slow register.
    slow_reads: Cell<u32>,
    /// Number of writes after which its driver is killed.
    writes: Cell<u32>,
    /// Time of the last reset, until the first access after it.
    reset_at: Cell<Option<Instant>>,
    /// Whether a driver accessed a register sooner after a reset than the data sheet allows.
    hurried: Cell<bool>,
}

/// The bus to a [`Card`].
pub type StubBus = Stub<Card>;

impl Card {
    pub fn new(id: PciId) -> Rc<Card> {
        let registers = (0..0x2_0000 / 4).map(|_| Cell::new(0)).collect();
        let (gone, stuck) = (Cell::new(false), Cell::new(None));
        let card = Card {
            id,
            registers,
            gone,
            stuck,
            slow: Cell::new(None),
            slow_reads: Cell::new(0),
            writes: Cell::new(u32::MAX),
            reset_at: Cell::new(None),
            hurried: Cell::new(false),
        };
        // Link up at 1 Gb/s in full duplex; bus master requests enabled; EEPROM read; 20 KiB of receive buffer; an
        // address.
        card.set(STATUS, 0x0000_0083);
        card.set(EECD, 1 << 9);
        card.set(PBA, 20 << 16 | 20);
        card.set(RAL, 0x1200_5452);
        card.set(RAH, 0x8000_5734);
        Rc::new(card)
    }

    /// Makes an 82574L.
    pub fn e1000e() -> Rc<Card> {
        Card::new(PciId { vendor: 0x8086, device: 0x10d3 })
    }

    pub fn set(&self, offset: u32, value: u32) {
        self.registers[offset as usize / 4].set(value);
    }

    pub fn get(&self, offset: u32) -> u32 {
        self.registers[offset as usize / 4].get()
    }

    /// Pulls the card: from now on it does not answer.
    pub fn pull(&self) {
        self.gone.set(true);
    }

    /// Has a driver die at the write after this many.
    pub fn takes_writes(&self, count: u32) {
        self.writes.set(count);
    }

    /// Makes these bits of a register read as ones for ever.
    pub fn stick(&self, offset: u32, bits: u32) {
        self.stuck.set(Some((offset, bits)));
    }

    /// Makes reads of this register take `time` from now on.
    pub fn slow_down(&self, offset: u32, time: Duration) {
        self.slow.set(Some((offset, time)));
        self.slow_reads.set(0);
    }

    /// Returns whether a driver accessed a register within 1 µs after a reset (10.2.2.1).
    pub fn was_hurried(&self) -> bool {
        self.hurried.get()
    }

    fn accessed(&self) {
        if let Some(at) = self.reset_at.take() {
            self.hurried.set(self.hurried.get() || at.elapsed() < Duration::from_micros(1));
        }
    }

    /// Returns how often the slow register was read.
    pub fn slow_reads(&self) -> u32 {
        self.slow_reads.get()
    }
}

impl Answers for Card {
    fn config(&self, offset: u16) -> u32 {
        let PciId { vendor, device } = self.id;
        if offset == 0 { u32::from(device) << 16 | u32::from(vendor) } else { 0 }
    }

    fn read(&self, offset: u32) -> u32 {
        self.accessed();
        if self.gone.get() {
            return u32::MAX;
        }
        if let Some((slow, time)) = self.slow.get()
            && slow == offset
        {
            std::thread::sleep(time);
            self.slow_reads.set(self.slow_reads.get() + 1);
        }
        match self.stuck.get() {
            Some((stuck, bits)) if stuck == offset => self.get(offset) | bits,
            _ => self.get(offset),
        }
    }

    fn write(&self, offset: u32, value: u32) {
        match self.writes.get().checked_sub(1) {
            Some(left) => self.writes.set(left),
            None if std::thread::panicking() => return,
            None => std::panic::resume_unwind(Box::new("the driver is dead")),
        }
        self.accessed();
        match offset {
            // A reset is done at once.
            CTRL => {
                self.reset_at.set((value & 1 << 26 != 0).then(Instant::now));
                self.set(CTRL, value & !(1 << 26));
            }
            STATUS => {}
            _ => self.set(offset, value),
        }
    }
}

/// The card's work on its rings, as the test plays it.
pub struct Play {
    pub card: Rc<Card>,
    rings: Span<AtomicU64>,
    ring: usize,
}

impl Play {
    /// Makes memory for rings of `ring` descriptors, and the card that is to use it.
    pub fn new(ring: usize) -> (Play, NicMemory) {
        let slots = Geometry { slot_len: 4096, count: u32::try_from(ring).expect("a ring") * 2 + 64 };
        let memory = NicMemory::create(slots, 64 << 10, MEMORY_AT).expect("a little memory");
        let rings = memory.rings().span(0, memory.rings().len() / 8).expect("all of it");
        (Play { card: Card::e1000e(), rings, ring }, memory)
    }

    pub fn bus(&self) -> StubBus {
        Stub(Rc::clone(&self.card))
    }

    /// Returns the two words of a descriptor of receive queue 0.
    pub fn received(&self, place: usize) -> [&AtomicU64; 2] {
        [&self.rings[place * 2], &self.rings[place * 2 + 1]]
    }

    /// Returns the two words of a transmit descriptor; that ring lies behind one receive ring.
    pub fn sent(&self, place: usize) -> [&AtomicU64; 2] {
        [&self.rings[(self.ring + place) * 2], &self.rings[(self.ring + place) * 2 + 1]]
    }

    /// Writes a receive descriptor back: a frame of `len` bytes, done, at its end.
    pub fn write_back(&self, place: usize, len: u16) {
        self.write_back_word(place, u64::from(len) << 32 | 0b11);
    }

    /// Writes a receive descriptor back, with `word` as its second word.
    pub fn write_back_word(&self, place: usize, word: u64) {
        let [low, high] = self.received(place);
        low.store(0, Release);
        high.store(word, Release);
    }

    /// Returns whether reception is on.
    pub fn receives(&self) -> bool {
        self.card.get(RCTL) & 2 != 0
    }

    /// Marks a transmit descriptor as done.
    pub fn complete(&self, place: usize) {
        let [_, word] = self.sent(place);
        word.store(word.load(Acquire) | 1 << 32, Release);
    }
}
