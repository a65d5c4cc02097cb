//! Registers that a driver in another process writes by storing them to memory, where the card's model looks.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU32, Ordering};

use tasuki_shm::region::{PAGE_LEN, Pages, Region, RegionError, Span};

/// Bytes from one to the next: none shares a cache line with another, or with the line that is fetched beside it.
const STRIDE: usize = 128;

/// A register, and where it is stored.
#[derive(Debug)]
struct Bell {
    offset: u32,
    word: Span<AtomicU32>,
    /// What was found, or put, there last.
    seen: u32,
}

/// Registers of a card's that change with every burst.
#[derive(Debug)]
pub struct Doorbells {
    memory: Region,
    bells: Vec<Bell>,
    places: Vec<(u64, u64)>,
}

impl Doorbells {
    /// Doorbells that nobody has rung, for registers at these offsets: as many as fit into a page, at most.
    pub fn new(offsets: impl Iterator<Item = u32>) -> Result<Self, RegionError> {
        let memory = Region::create("doorbells", PAGE_LEN, Pages::Small)?;
        let bell = |(place, offset)| Ok(Bell { offset, word: memory.span(place, 1)?, seen: 0 });
        let bells: Vec<Bell> =
            (0..PAGE_LEN).step_by(STRIDE).zip(offsets).map(bell).collect::<Result<_, RegionError>>()?;
        let places =
            (0_u64..).step_by(STRIDE).zip(&bells).map(|(place, bell)| (u64::from(bell.offset), place)).collect();
        Ok(Doorbells { memory, bells, places })
    }

    /// The memory in which they lie.
    pub fn memory(&self) -> BorrowedFd<'_> {
        self.memory.fd()
    }

    /// Offsets of the registers, and of their places in the memory.
    pub fn places(&self) -> &[(u64, u64)] {
        &self.places
    }

    /// What was stored since the last look, by offset. What the driver stored to memory before is there.
    #[inline]
    pub fn rung(&mut self) -> impl Iterator<Item = (u32, u32)> {
        self.bells.iter_mut().filter_map(|bell| {
            let value = bell.word[0].load(Ordering::Acquire);
            (value != bell.seen).then(|| {
                bell.seen = value;
                (bell.offset, u32::from_le(value))
            })
        })
    }

    /// The registers hold these values, in the same order: only what differs from that is a ring.
    pub fn settle(&mut self, values: impl Iterator<Item = u32>) {
        for (bell, value) in self.bells.iter_mut().zip(values) {
            if bell.seen != value.to_le() {
                bell.seen = value.to_le();
                bell.word[0].store(bell.seen, Ordering::Relaxed);
            }
        }
    }
}
