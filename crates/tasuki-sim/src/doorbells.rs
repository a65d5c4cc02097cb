//! Registers that a driver in another process writes by storing them to memory, where the card's model looks.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU32, Ordering};

use tasuki_shm::region::{PAGE_LEN, Pages, Region, RegionError, Span};

use crate::e1000e::TAILS;

/// Bytes from one to the next: none shares a cache line with another, or with the line that is fetched beside it.
const STRIDE: usize = 128;

/// The tails of the card's rings.
#[derive(Debug)]
pub struct Doorbells {
    memory: Region,
    words: [Span<AtomicU32>; TAILS.len()],
    /// What was found, or put, there last.
    seen: [u32; TAILS.len()],
    places: [(u64, u64); TAILS.len()],
}

impl Doorbells {
    /// Doorbells that nobody has rung.
    pub fn new() -> Result<Self, RegionError> {
        let memory = Region::create("doorbells", PAGE_LEN, Pages::Small)?;
        let [a, b, c, d] = [0, 1, 2, 3].map(|index| memory.span(index * STRIDE, 1));
        let place = |index: usize| (u64::from(TAILS[index]), (index * STRIDE) as u64);
        Ok(Doorbells { words: [a?, b?, c?, d?], memory, seen: [0; TAILS.len()], places: [0, 1, 2, 3].map(place) })
    }

    /// The memory in which they lie.
    pub fn memory(&self) -> BorrowedFd<'_> {
        self.memory.fd()
    }

    /// Offsets of the registers, and of their places in the memory.
    pub fn places(&self) -> &[(u64, u64)] {
        &self.places
    }

    /// What was stored since the last look, by index of [`TAILS`]. What the driver stored to memory before is there.
    #[inline]
    pub fn rung(&mut self) -> impl Iterator<Item = (usize, u32)> {
        self.words.iter().zip(&mut self.seen).enumerate().filter_map(|(index, (word, seen))| {
            let value = word[0].load(Ordering::Acquire);
            (value != *seen).then(|| {
                *seen = value;
                (index, u32::from_le(value))
            })
        })
    }

    /// The registers hold `values`: only what differs from that is a ring.
    pub fn settle(&mut self, values: [u32; TAILS.len()]) {
        for ((word, seen), value) in self.words.iter().zip(&mut self.seen).zip(values) {
            if *seen != value.to_le() {
                *seen = value.to_le();
                word[0].store(*seen, Ordering::Relaxed);
            }
        }
    }
}
