//! The unit of shared memory that two CPUs exchange: a cache line of eight 64-bit words.
//!
//! Our own lines are [`Line`]s, to which we store. A peer's lines are [`Claims`], which we can only load: they hold the
//! peer's statements, which need not be true.

use std::ops::Deref;

use crate::sync::{AtomicU64, Relaxed};

/// 64-bit words in a line.
pub const LINE_WORDS: usize = 8;

/// Bytes in a line, the unit of a transfer between two CPUs.
pub const LINE_LEN: usize = 64;

/// One cache line of shared memory. All zeroes is a valid line, and fresh memory holds zeroes.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct Line([AtomicU64; LINE_WORDS]);

impl Line {
    /// Returns the word at `index`, which is below [`LINE_WORDS`].
    #[inline]
    pub fn word(&self, index: usize) -> &AtomicU64 {
        &self.0[index]
    }
}

// loom's atomics have another size. The layout matters only where memory is really shared.
#[cfg(not(loom))]
const _: () = assert!(size_of::<Line>() == LINE_LEN && align_of::<Line>() == LINE_LEN);

/// Returns the low half of a word, then the high half.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "the halves are what is meant")]
pub fn halves(word: u64) -> (u32, u32) {
    (word as u32, (word >> 32) as u32)
}

/// Lines that a peer writes. The type is read-only, as the mapping is.
#[derive(Debug, Clone)]
pub struct Claims<M>(M);

impl<M: Deref<Target = [Line]>> Claims<M> {
    /// Treats `lines` as a peer's.
    pub fn of(lines: M) -> Self {
        Claims(lines)
    }

    /// Returns the peer's claim in word `word` of line `line`. Unordered: see [`crate::sync`].
    #[inline]
    pub fn load(&self, line: usize, word: usize) -> u64 {
        self.0[line].0[word].load(Relaxed)
    }

    /// Returns the number of lines.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are no lines.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
