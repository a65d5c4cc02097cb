//! Where a node stands in its client's rings while it changes them, for its successor: a page of the node's node memory, that its worker alone writes.
//!
//! A ring's own tail says how far its server is. But before it moves, descriptors are written over: in a frame's last buffer stands how much of it
//! was filled, where the client said how much it holds; and frames that were read take back that they go on (see [`Ring`](super::ring::Ring)). A
//! worker that is killed in between leaves a ring in which that is gone, and here is what it takes to put it right.
//!
//! # Layout, in words of 8 bytes
//!
//! | words | what                                                                                                                      |
//! |-------|---------------------------------------------------------------------------------------------------------------------------|
//! | 0     | of the ring to us: a mark that it stands, and the index up to which frames had been read and are sent on, and that before |
//! | 1     | how many of the following stand                                                                                           |
//! | 2..   | of the ring to the client: index of a descriptor that is written over, and the bytes that its buffer holds                |
//!
//! What stands in words 2 and on is of no use once the tail has passed it.

use tasuki_shm::line::{LINE_WORDS, Line};
use tasuki_shm::region::Span;
use tasuki_shm::sync::{Acquire, AtomicU64, Relaxed, Release, fence};
use tasuki_shm::vni::node_memory::LEDGER_LINES;

const READ: usize = 0;
const COUNT: usize = 1;
const HELD_AT: usize = 2;

/// Descriptors that are written over between one tail and the next.
pub const HELD_MAX: usize = LEDGER_LINES * LINE_WORDS - HELD_AT;

/// In word 0: there is something.
const STANDS: u64 = 1 << 32;

/// It.
#[derive(Debug)]
pub struct Ledger {
    lines: Span<Line>,
    /// As it stands there.
    held: usize,
}

/// Stores a word behind all that was stored before, and before all that is stored from here on (E3 of nic/ledger.rs).
#[inline(always)]
fn settle(word: &AtomicU64, value: u64) {
    word.store(value, Release);
    fence(Release);
}

impl Ledger {
    /// That of a node memory, with what a predecessor has left there.
    pub fn over(lines: Span<Line>) -> Self {
        let mut ledger = Ledger { lines, held: 0 };
        ledger.held = usize::try_from(ledger.word(COUNT).load(Acquire)).map_or(HELD_MAX, |held| held.min(HELD_MAX));
        ledger
    }

    #[inline]
    fn word(&self, at: usize) -> &AtomicU64 {
        self.lines[at / LINE_WORDS].word(at % LINE_WORDS)
    }

    /// Nothing of it is about the client that comes now.
    pub fn begin(&mut self) {
        settle(self.word(READ), 0);
        self.shown();
    }

    /// Frames from index `from` up to `to` were read, and are sent on.
    #[inline]
    pub fn read(&self, from: u16, to: u16) {
        settle(self.word(READ), STANDS | u64::from(to) << 16 | u64::from(from));
    }

    /// The last indices that were [read](Self::read).
    #[expect(clippy::cast_possible_truncation, reason = "parts of a word")]
    pub fn was_read(&self) -> Option<(u16, u16)> {
        let word = self.word(READ).load(Acquire);
        (word & STANDS != 0).then_some((word as u16, (word >> 16) as u16))
    }

    /// The descriptor at this index is about to be written over; its buffer holds so many bytes. Says no, and it must not be, if there is no room for
    /// that before the tail has moved.
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

    /// The client sees all of them.
    #[inline]
    pub fn shown(&mut self) {
        self.held = 0;
        settle(self.word(COUNT), 0);
    }

    /// What a predecessor was about to write over, or had.
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
