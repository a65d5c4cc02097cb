//! A virtio network device in memory that does nothing by itself: the test plays the device, well or badly. It uses
//! its chains in any order, and checks the driver's descriptors strictly.
//!
//! Offsets are written here as numbers from virtio 1.2, not taken from the driver.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use tasuki_net::nic::NicMemory;
use tasuki_net::nic::bus::Iova;
use tasuki_shm::arena::Geometry;
use tasuki_shm::region::{Region, Span};

use super::bus::{Answers, Stub};

/// Bus address of the device's memory.
pub const MEMORY_AT: Iova = Iova(1 << 32);
pub const RINGS_LEN: usize = 16 << 10;
pub const SLOTS: Geometry = Geometry { slot_len: 4096, count: 128 };

const FEATURE_SELECT: u32 = 0x0;
const FEATURE: u32 = 0x4;
const DRIVER_FEATURE_SELECT: u32 = 0x8;
const DRIVER_FEATURE: u32 = 0xc;
const SELECT: u32 = 0x16;
const SIZE: u32 = 0x18;
const ENABLE: u32 = 0x1c;
const NOTIFY_OFF: u32 = 0x1e;
const ADDRESSES: u32 = 0x20;
const RESET: u32 = 0x3a;
const NET: u32 = 0x1000;
const NOTIFY: u32 = 0x2000;

/// VERSION_1, MAC and EVENT_IDX.
pub const PLAIN: u64 = 1 << 32 | 1 << 5 | 1 << 29;
pub const RING_RESET: u64 = 1 << 40;

/// Bytes of the header before a frame.
pub const HEADER_LEN: u32 = 12;
/// Numbers of the queues.
pub const RX: usize = 0;
pub const TX: usize = 1;

/// A device whose registers keep the written values.
#[derive(Debug)]
pub struct Device {
    features: u64,
    registers: RefCell<HashMap<u32, u32>>,
    /// Registers of each queue.
    queues: RefCell<[HashMap<u32, u32>; 3]>,
    /// Number of resets of each queue.
    resets: Cell<[u64; 3]>,
    pub is_behind_an_iommu: Cell<bool>,
}

/// The bus to a [`Device`].
pub type StubBus = Stub<Device>;

impl Device {
    pub fn get(&self, offset: u32) -> u32 {
        self.registers.borrow().get(&offset).copied().unwrap_or(0)
    }

    fn selected(&self) -> usize {
        self.get(SELECT) as usize % 3
    }

    /// Returns the queue's size, and the addresses of its three parts, if it is enabled.
    pub fn queue(&self, queue: usize) -> Option<(u64, [u64; 3])> {
        let registers = &self.queues.borrow()[queue];
        let get = |offset| u64::from(registers.get(&offset).copied().unwrap_or(0));
        let at = |i: u32| get(ADDRESSES + 8 * i) | get(ADDRESSES + 8 * i + 4) << 32;
        (get(ENABLE) == 1).then(|| (get(SIZE), [at(0), at(1), at(2)]))
    }
}

impl Answers for Device {
    fn is_behind_an_iommu(&self) -> bool {
        self.is_behind_an_iommu.get()
    }

    fn config(&self, offset: u16) -> u32 {
        let words = [
            (0x00, 0x1041_1af4),
            (0x04, 1 << 20),
            (0x34, 0x40),
            (0x40, 0x0110_5009),
            (0x4c, 0x800),
            (0x50, 0x0214_6409),
            (0x58, NOTIFY),
            (0x5c, 0x1000),
            (0x60, 4),
            (0x64, 0x0410_0009),
            (0x6c, NET),
            (0x70, 0x1000),
        ];
        words.iter().find(|(at, _)| *at == offset).map_or(0, |(_, word)| *word)
    }

    fn read(&self, offset: u32) -> u32 {
        let half =
            |select: u32, word: u64| u32::try_from(word >> (32 * self.get(select)) & 0xffff_ffff).expect("32 bits");
        match offset {
            FEATURE => half(FEATURE_SELECT, self.features),
            DRIVER_FEATURE => self.get(0x1_0000 + self.get(DRIVER_FEATURE_SELECT)),
            0x12 => 2,
            NOTIFY_OFF => self.get(SELECT),
            SIZE..NOTIFY_OFF | ADDRESSES..=RESET => {
                let default = if offset == SIZE { 256 } else { 0 };
                self.queues.borrow()[self.selected()].get(&offset).copied().unwrap_or(default)
            }
            NET => 0x5452,
            0x1002 => 0x1200,
            0x1004 => 0x5734,
            _ => self.get(offset),
        }
    }

    fn write(&self, offset: u32, value: u32) {
        match offset {
            // A reset is done at once.
            RESET => {
                self.queues.borrow_mut()[self.selected()].clear();
                let mut resets = self.resets.get();
                resets[self.selected()] += 1;
                self.resets.set(resets);
            }
            SIZE..NOTIFY_OFF | ADDRESSES..RESET => {
                self.queues.borrow_mut()[self.selected()].insert(offset, value);
            }
            DRIVER_FEATURE => {
                let half = self.get(DRIVER_FEATURE_SELECT);
                self.registers.borrow_mut().insert(0x1_0000 + half, value);
            }
            _ => {
                self.registers.borrow_mut().insert(offset, value);
            }
        }
    }
}

/// The device's state of a queue.
#[derive(Default)]
struct Had {
    /// The queue's addresses and number of resets at the last look: with others, everything begins anew.
    at: Option<([u64; 3], u64)>,
    seen: u16,
    used: u16,
    /// First descriptors of the chains that the device holds.
    chains: Vec<u64>,
}

/// The device's work, as the test plays it.
pub struct Play {
    pub device: Rc<Device>,
    rings: Span<AtomicU64>,
    frames: Span<AtomicU64>,
    had: [Had; 2],
    random: u64,
}

impl Play {
    /// Makes memory, and the device that is to use it.
    pub fn new(features: u64) -> (Play, NicMemory) {
        let memory = NicMemory::create(SLOTS, RINGS_LEN, MEMORY_AT).expect("a little memory");
        let all = |region: &Region| {
            let copy = region.fd().try_clone_to_owned().expect("a descriptor is free");
            Region::adopt(copy).expect("memory of ours").span(0, region.len() / 8).expect("all of it")
        };
        let (registers, queues, resets, is_behind_an_iommu) = Default::default();
        let device = Rc::new(Device { features, registers, queues, resets, is_behind_an_iommu });
        let (rings, frames, had) = (all(memory.rings()), all(memory.arena().region()), Default::default());
        (Play { device, rings, frames, had, random: 0x9e37_79b9_7f4a_7c15 }, memory)
    }

    pub fn bus(&self) -> StubBus {
        Stub(Rc::clone(&self.device))
    }

    /// Returns a pseudo-random number below `below`.
    pub fn random(&mut self, below: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        usize::try_from(self.random >> 8).expect("64 bits") % below.max(1)
    }

    /// Returns the word at an address in the rings.
    fn word(&self, at: u64) -> &AtomicU64 {
        &self.rings[usize::try_from((at - MEMORY_AT.0) / 8).expect("64 bits")]
    }

    fn load(&self, at: u64, len: u64) -> u64 {
        self.word(at).load(Acquire) >> (8 * (at % 8)) & (u64::MAX >> (64 - 8 * len))
    }

    fn store(&self, at: u64, len: u64, value: u64) {
        let (shift, mask) = (8 * (at % 8), u64::MAX >> (64 - 8 * len));
        let word = self.word(at);
        word.store(word.load(Acquire) & !(mask << shift) | value << shift, Release);
    }

    /// Takes the chains that the driver made available.
    fn look(&mut self, queue: usize) -> Option<(u64, [u64; 3])> {
        let (size, at) = self.device.queue(queue)?;
        let here = Some((at, self.device.resets.get()[queue]));
        if self.had[queue].at != here {
            self.had[queue] = Had { at: here, ..Had::default() };
        }
        let shown = self.load(at[1] + 2, 2);
        while u64::from(self.had[queue].seen) != shown {
            let entry = u64::from(self.had[queue].seen) % size;
            let head = self.load(at[1] + 4 + 2 * entry, 2);
            let had = &mut self.had[queue];
            assert!(!had.chains.contains(&head), "queue {queue}: chain {head} was given twice");
            had.chains.push(head);
            had.seen = had.seen.wrapping_add(1);
            assert!(had.chains.len() as u64 <= size / 2, "queue {queue}: more chains than there are");
        }
        Some((size, at))
    }

    /// Returns the chains that the device holds.
    pub fn chains(&mut self, queue: usize) -> Vec<u64> {
        self.look(queue);
        self.had[queue].chains.clone()
    }

    /// Checks the two descriptors of a chain; returns the first word of its slot, and the bytes of it.
    fn slot(&self, queue: usize, at: u64, head: u64) -> (usize, u32) {
        let write = if queue == RX { 2 } else { 0 };
        let half = |word: u64| u32::try_from(word & 0xffff_ffff).expect("32 bits");
        let [first, second] = [head, head + 1].map(|i| [self.load(at + 16 * i, 8), self.load(at + 16 * i + 8, 8)]);
        assert_eq!(first[1], u64::from(HEADER_LEN) | (1 | write) << 32 | (head + 1) << 48, "a header that goes on");
        assert_eq!(second[1] >> 32, write, "a slot, and no more");
        let offset = second[0].checked_sub(MEMORY_AT.0 + RINGS_LEN as u64).expect("an address of the frames");
        assert!(offset.is_multiple_of(4096) && offset < SLOTS.len() as u64, "a slot's address");
        (usize::try_from(offset / 8).expect("64 bits"), half(second[1]))
    }

    /// Marks a chain as used with `len` bytes written, whether or not the device holds it.
    pub fn use_chain(&mut self, queue: usize, head: u64, len: u32) {
        let (size, at) = self.device.queue(queue).expect("the queue is enabled");
        let entry = at[2] + 4 + 8 * (u64::from(self.had[queue].used) % size);
        self.store(entry, 4, head);
        self.store(entry + 4, 4, len.into());
        self.had[queue].used = self.had[queue].used.wrapping_add(1);
        self.store(at[2] + 2, 2, self.had[queue].used.into());
    }

    /// Delivers a frame of 60 bytes with this number, from 02:..., to broadcast, if the device has a buffer.
    pub fn deliver(&mut self, number: u64) -> bool {
        let Some((_, at)) = self.look(RX) else { return false };
        if self.had[RX].chains.is_empty() {
            return false;
        }
        let which = self.random(self.had[RX].chains.len());
        let head = self.had[RX].chains.swap_remove(which);
        let (slot, len) = self.slot(RX, at[0], head);
        assert!(len >= 1514, "a buffer that a whole frame fits into");
        let words = [0x0002_ffff_ffff_ffff, 0x0000_b588_0900_0000, number];
        self.frames[slot..].iter().zip(words).for_each(|(word, value)| word.store(value, Relaxed));
        self.use_chain(RX, head, 60 + HEADER_LEN);
        true
    }

    /// Sends all available frames, in order, and marks some of the chains as used, in any order. Returns the first
    /// three words of each frame.
    pub fn send(&mut self) -> Vec<[u64; 3]> {
        let before = self.had[TX].chains.len();
        let Some((_, at)) = self.look(TX) else { return Vec::new() };
        let before = before.min(self.had[TX].chains.len());
        let sent = self.had[TX].chains[before..].iter().map(|&head| {
            let (slot, len) = self.slot(TX, at[0], head);
            assert_eq!(len, 60);
            std::array::from_fn(|i| self.frames[slot + i].load(Relaxed))
        });
        let sent = sent.collect();
        for _ in 0..self.random(self.had[TX].chains.len() + 2) {
            if self.had[TX].chains.is_empty() {
                break;
            }
            let which = self.random(self.had[TX].chains.len());
            let head = self.had[TX].chains.remove(which);
            self.use_chain(TX, head, 0);
        }
        sent
    }
}

/// Returns the number of a frame that was delivered and turned round.
pub fn turned_round([first, second, number]: [u64; 3]) -> Option<u64> {
    ([first, second] == [0xffff_0900_0000_0002, 0x0000_b588_ffff_ffff]).then_some(number)
}
