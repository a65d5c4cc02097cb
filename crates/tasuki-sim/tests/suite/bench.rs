//! A card of any kind with a megabyte of memory, and a tape of frames as its wire.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use tasuki_shm::region::{Pages, Region, Span};
use tasuki_sim::card::{Card, Clock};
use tasuki_sim::journal::Class;
use tasuki_sim::model::Model;
use tasuki_sim::wire::Wire;

/// Bus address and length of the card's memory.
pub const AT: u64 = 0x1_0000_0000;
pub const LEN: usize = 1 << 20;
pub const BUFFER_LEN: usize = 2048;

pub const MAC: [u8; 6] = [0x02, 0x13, 0x57, 0x9b, 0xdf, 0x24];

/// Frames to receive, and sent frames with the time of sending.
#[derive(Debug, Default)]
pub struct Tape {
    pub coming: VecDeque<Vec<u8>>,
    current: Vec<u8>,
    pub sent: Vec<(u64, Vec<u8>)>,
}

impl Wire for Tape {
    fn receive(&mut self, _: u64) -> Option<&[u8]> {
        self.current = self.coming.pop_front()?;
        Some(&self.current)
    }

    fn send(&mut self, frame: &[u8], now: u64) {
        self.sent.push((now, frame.to_vec()));
    }
}

pub struct Bench<D: Model> {
    pub card: Card<Tape, D>,
    pub region: Region,
    words: Span<AtomicU64>,
}

impl<D: Model> Bench<D> {
    /// Puts a card on its bus: memory decoding and bus mastering on.
    pub fn new(device: D) -> Self {
        let region = Region::create("bench", LEN, Pages::Small).unwrap();
        let words = region.span(0, LEN / 8).unwrap();
        let card = Card::new(device, Tape::default(), Clock::manual());
        card.map(AT, &region).unwrap();
        card.write_config(4, 2, 6);
        Bench { card, region, words }
    }

    /// Advances the clock and lets the card do its work.
    pub fn pass(&self, ns: u64) {
        self.card.advance(ns);
        self.card.settle(1000);
    }

    pub fn come(&self, frame: &[u8]) {
        self.card.with(|parts| parts.wire.coming.push_back(frame.to_vec()));
    }

    pub fn sent(&self) -> Vec<Vec<u8>> {
        self.card.with(|parts| parts.wire.sent.drain(..).map(|(_, frame)| frame).collect())
    }

    pub fn load(&self, offset: usize) -> u64 {
        self.words[offset / 8].load(Relaxed)
    }

    pub fn store(&self, offset: usize, value: u64) {
        self.words[offset / 8].store(value, Relaxed);
    }

    pub fn load_bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        (offset..offset + len).map(|i| self.load(i / 8 * 8).to_le_bytes()[i % 8]).collect()
    }

    pub fn store_bytes(&self, offset: usize, bytes: &[u8]) {
        for (i, byte) in (offset..).zip(bytes) {
            let mut word = self.load(i / 8 * 8).to_le_bytes();
            word[i % 8] = *byte;
            self.store(i / 8 * 8, u64::from_le_bytes(word));
        }
    }

    pub fn all_memory(&self) -> Vec<u64> {
        self.words.iter().map(|word| word.load(Relaxed)).collect()
    }

    pub fn raised(&self, vector: u16) -> u64 {
        self.card.with(|parts| parts.memory.raised(vector))
    }

    pub fn broke(&self, class: Class) -> u64 {
        self.card.with(|parts| parts.device.journal().count(class))
    }

    pub fn broke_nothing(&self) {
        self.card.with(|parts| parts.device.journal().demand_none(&Class::ALWAYS)).unwrap();
    }
}
