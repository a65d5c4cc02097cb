//! The unit of shared memory that two CPUs exchange: a cache line of eight 64-bit words.
//!
//! Our own lines are [`Line`]s, which we store to. A peer's lines are [`Claims`]: they can be
//! loaded and nothing else, because what stands in them is what the peer says and not what is.

use std::ops::Deref;

use crate::sync::{AtomicU64, Relaxed};

/// 64-bit words in a line.
pub const LINE_WORDS: usize = 8;

/// Bytes in a line: what one transfer between two CPUs moves.
pub const LINE_LEN: usize = 64;

/// One cache line of shared memory. All zeroes is a valid line, and what fresh memory holds.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct Line([AtomicU64; LINE_WORDS]);

impl Line {
    /// The word at `index`, which is below [`LINE_WORDS`].
    #[inline]
    pub fn word(&self, index: usize) -> &AtomicU64 {
        &self.0[index]
    }
}

// loom's atomics have another size; the layout only matters where memory is really shared.
#[cfg(not(loom))]
const _: () = assert!(size_of::<Line>() == LINE_LEN && align_of::<Line>() == LINE_LEN);

/// Lines that a peer writes. Read-only by type, as their mapping is.
#[derive(Debug, Clone)]
pub struct Claims<M>(M);

impl<M: Deref<Target = [Line]>> Claims<M> {
    /// Looks at `lines` as at a peer's.
    pub fn of(lines: M) -> Self {
        Claims(lines)
    }

    /// What the peer says stands in word `word` of line `line`. Unordered: see [`crate::sync`].
    #[inline]
    pub fn load(&self, line: usize, word: usize) -> u64 {
        self.0[line].0[word].load(Relaxed)
    }

    /// How many lines there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
