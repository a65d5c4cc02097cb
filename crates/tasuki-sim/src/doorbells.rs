//! Doorbells: registers that a driver in another process writes by storing to shared memory, which the card's model
//! polls.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU32, Ordering};

use tasuki_shm::region::{PAGE_LEN, Pages, Region, RegionError, Span};

/// Bytes from one doorbell to the next: none shares a cache line with another, or with the adjacent line that the
/// CPU prefetches.
const STRIDE: usize = 128;

/// A register, and the word that stands for it.
#[derive(Debug)]
struct Bell {
    offset: u32,
    word: Span<AtomicU32>,
    /// Value found in, or put into, the word last.
    seen: u32,
}

/// The registers of a card that change with every burst.
#[derive(Debug)]
pub struct Doorbells {
    memory: Region,
    bells: Vec<Bell>,
    places: Vec<(u64, u64)>,
}

impl Doorbells {
    /// Creates doorbells for the registers at these offsets, as many as fit into a page. None is rung.
    pub fn new(offsets: impl Iterator<Item = u32>) -> Result<Self, RegionError> {
        let memory = Region::create("doorbells", PAGE_LEN, Pages::Small)?;
        let bell = |(place, offset)| Ok(Bell { offset, word: memory.span(place, 1)?, seen: 0 });
        let bells: Vec<Bell> =
            (0..PAGE_LEN).step_by(STRIDE).zip(offsets).map(bell).collect::<Result<_, RegionError>>()?;
        let places =
            (0_u64..).step_by(STRIDE).zip(&bells).map(|(place, bell)| (u64::from(bell.offset), place)).collect();
        Ok(Doorbells { memory, bells, places })
    }

    /// Returns the memory that holds the doorbells.
    pub fn memory(&self) -> BorrowedFd<'_> {
        self.memory.fd()
    }

    /// Returns offset of the register and offset in the memory, for each doorbell.
    pub fn places(&self) -> &[(u64, u64)] {
        &self.places
    }

    /// Returns offset and new value of each register stored since the last call. All that the driver stored to
    /// memory before is visible then.
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

    /// Sets the doorbells to the registers' present values, in the same order: from now on only another value counts
    /// as rung.
    pub fn settle(&mut self, values: impl Iterator<Item = u32>) {
        for (bell, value) in self.bells.iter_mut().zip(values) {
            if bell.seen != value.to_le() {
                bell.seen = value.to_le();
                bell.word[0].store(bell.seen, Ordering::Relaxed);
            }
        }
    }
}
