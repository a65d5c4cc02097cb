//! A node's place in its client's rings while it changes them, for its successor: a page of the node memory that only
//! the node's worker writes.
//!
//! A ring's own tail says how far its server is. But the server overwrites descriptors before it moves the tail. In a
//! frame's last buffer it replaces the buffer's size with the number of bytes filled. In frames that it has read it
//! clears the flag that the chain goes on (see [`Ring`](super::ring::Ring)). A worker that is killed in between leaves
//! a ring without that information; the ledger holds what it takes to restore it.
//!
//! # Layout, in words of 8 bytes
//!
//! | words | contents                                                                                                                  |
//! |-------|---------------------------------------------------------------------------------------------------------------------------|
//! | 0     | ring to us: a mark that the word is valid, the index up to which frames were read and sent on, and the index before that  |
//! | 1     | number of valid words that follow                                                                                         |
//! | 2..   | ring to the client: index of an overwritten descriptor, and the bytes that its buffer holds                               |
//!
//! Words 2 and on are of no use once the tail has passed their descriptors.

use tasuki_shm::line::{LINE_WORDS, Line};
use tasuki_shm::region::Span;
use tasuki_shm::sync::{Acquire, AtomicU64, Relaxed, Release, fence};
use tasuki_shm::vni::node_memory::LEDGER_LINES;

const READ: usize = 0;
const COUNT: usize = 1;
const HELD_AT: usize = 2;

/// Maximum number of descriptors that are overwritten between one tail and the next.
pub const HELD_MAX: usize = LEDGER_LINES * LINE_WORDS - HELD_AT;

/// In word 0: the word is valid.
const STANDS: u64 = 1 << 32;

/// The ledger of a node memory.
#[derive(Debug)]
pub struct Ledger {
    lines: Span<Line>,
    /// Number of valid words from [`HELD_AT`] on.
    held: usize,
}

/// Stores a word behind all earlier stores and before all later ones (E3 of nic/ledger.rs).
#[inline(always)]
fn settle(word: &AtomicU64, value: u64) {
    word.store(value, Release);
    fence(Release);
}

impl Ledger {
    /// Opens the ledger of a node memory, with what a predecessor left there.
    pub fn over(lines: Span<Line>) -> Self {
        let mut ledger = Ledger { lines, held: 0 };
        ledger.held = usize::try_from(ledger.word(COUNT).load(Acquire)).map_or(HELD_MAX, |held| held.min(HELD_MAX));
        ledger
    }

    #[inline]
    fn word(&self, at: usize) -> &AtomicU64 {
        self.lines[at / LINE_WORDS].word(at % LINE_WORDS)
    }

    /// Clears the ledger for a new client.
    pub fn begin(&mut self) {
        settle(self.word(READ), 0);
        self.shown();
    }

    /// Notes that the frames from index `from` up to `to` were read and are sent on.
    #[inline]
    pub fn read(&self, from: u16, to: u16) {
        settle(self.word(READ), STANDS | u64::from(to) << 16 | u64::from(from));
    }

    /// Returns the last indices that were [noted as read](Self::read).
    #[expect(clippy::cast_possible_truncation, reason = "parts of a word")]
    pub fn was_read(&self) -> Option<(u16, u16)> {
        let word = self.word(READ).load(Acquire);
        (word & STANDS != 0).then_some((word as u16, (word >> 16) as u16))
    }

    /// Notes that the descriptor at `index` is about to be overwritten; its buffer holds `len` bytes. Returns false if
    /// there is no room until the tail has moved: then the descriptor must not be overwritten.
    #[inline]
    #[must_use]
    pub fn hold(&mut self, index: u16, len: u32) -> bool {
        if self.held == HELD_MAX {
            return false;
        }
        self.word(HELD_AT + self.held).store(u64::from(len) << 32 | u64::from(index), Relaxed);
        self.held += 1;
        settle(self.word(COUNT), self.held as u64);
        true
    }

    /// Drops all noted descriptors: the client sees the frames.
    #[inline]
    pub fn shown(&mut self) {
        self.held = 0;
        settle(self.word(COUNT), 0);
    }

    /// Returns the descriptors that a predecessor had overwritten or was about to.
    #[expect(clippy::cast_possible_truncation, reason = "parts of a word")]
    pub fn held(&self) -> impl Iterator<Item = (u16, u32)> + '_ {
        let words = (0..self.held).map(|i| self.word(HELD_AT + i).load(Relaxed));
        words.map(|word| (word as u16, (word >> 32) as u32))
    }
}

#[cfg(test)]
mod tests {
    use tasuki_shm::region::{PAGE_LEN, Pages, Region};

    use super::*;

    #[test]
    fn what_the_client_has_seen_makes_room_and_is_nobodys_any_more() {
        let page = Region::create("ledger", PAGE_LEN, Pages::Small).expect("a page");
        let lines = || page.span(0, LEDGER_LINES).expect("a page of lines");
        let mut ledger = Ledger::over(lines());
        for index in 0..HELD_MAX {
            assert!(ledger.hold(u16::try_from(index).expect("few"), 2048), "{index}");
        }
        assert!(!ledger.hold(0, 2048), "there is no more room");
        ledger.shown();
        assert_eq!(Ledger::over(lines()).held().count(), 0);
        assert!(ledger.hold(7, 1024), "there is room again");
        assert_eq!(Ledger::over(lines()).held().collect::<Vec<_>>(), [(7, 1024)]);
    }
}
