//! What a turn completes in packed rings, for a successor: a page of the node memory for each ring.
//!
//! A used descriptor overwrites an available one, so a turn that is not committed may write none. Between the commit and
//! the last used descriptor, the descriptors are here alone. The next turn begins when all are written. So a page counts
//! only if its completions lead to the position that the last committed turn has for the ring ([`Packed::show_again`]).
//!
//! # Layout, in words of 8 bytes
//!
//! | words | contents                                                                                             |
//! |-------|------------------------------------------------------------------------------------------------------|
//! | 0     | version (32 bits), position of the first completion, number of completions (0 while they are written) |
//! | 1..   | completions, as the ring has them                                                                     |
//! | 496.. | [counts](super::counts) of the queue, of either layout                                              |
//! | 504   | on the first page: number of pairs that have run, of which there are counts                          |
//! |       | on the second page: number of pairs that run now, plus 1; 0 if it is not known |
//! | 505   | on the first page: version up to which messages may have left the front end's socket; whether the last of them may be unanswered (2); 1 if both are known |
//! |       | on the second page: the same of the second front end                                                |
//! | 506   | where the ring stood when it was opened last: position of the next completion, and 1 << 16 if it is known |
//! | 507   | on the first page: version in which a ring was opened last; 1 if it is known |
//! |       | on the second page: number of the second front end's connection                                      |
//! | 508   | what last changed of the ring ([`Ran`]): version (32 bits; 0 if nothing is known), position that the front end knew, whether it runs since then; which ring it is stands in the last two words |
//! | 509.. | where the ring stood when its front end's connection ended ([`Left`]): version (32 bits; 0 if none is known), position that the front end knows, position; file of the memory; address |
//!
//! Stores become visible in program order, even those of a worker that dies (V5 of `vni/ledger.rs`).
//!
//! [`Packed::show_again`]: crate::virtq::Packed::show_again

use arrayvec::ArrayVec;
use tasuki_shm::line::{LINE_WORDS, Line};
use tasuki_shm::region::Span;
use tasuki_shm::sync::{Acquire, AtomicU64, Relaxed, Release, fence};
use tasuki_shm::vni::node_memory::{JOURNAL_PAGES, LEDGER_LINES, QUEUE_COUNTS_LINE, QUEUE_PAIRS_LINE};

use super::device::RINGS_MAX;
use crate::virtq::COMPLETIONS_MAX;
use crate::vni::ledger::point;

/// Words of a page.
const WORDS: usize = LEDGER_LINES * LINE_WORDS;
/// The first word of the queue's counts, and the first of its last place.
const COUNTS: usize = QUEUE_COUNTS_LINE * LINE_WORDS;
const PAIRS: usize = QUEUE_PAIRS_LINE * LINE_WORDS;
const LET_GO: usize = PAIRS + 1;
const OPENED: usize = LET_GO + 1;
const OPENED_IN: usize = OPENED + 1;
const LEFT: usize = WORDS - 3;
const RAN: usize = LEFT - 1;
const _: () = assert!(COMPLETIONS_MAX < COUNTS && COUNTS + LINE_WORDS <= PAIRS && OPENED_IN < RAN);
const _: () = assert!(RINGS_MAX <= JOURNAL_PAGES);

/// The completions in a ring.
#[derive(Debug, Default)]
pub struct Noted {
    /// Position of the first.
    pub first: u16,
    /// As the ring has them.
    pub completions: ArrayVec<u64, COMPLETIONS_MAX>,
}

/// Where a ring stood when the connection of its front end ended, for the next connection of the same machine: a packed
/// ring has no index in memory, so its front end knows the position of the last start or stop alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Left {
    /// Session of the ring's last completions.
    pub version: u32,
    /// The position that the front end knows.
    pub stated: u16,
    /// Position of the next chain, and of the next used descriptor.
    pub position: u16,
    /// Which ring it is.
    pub ring: Identity,
}

/// When a ring was opened or closed last, for a successor that has an older description of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ran {
    /// Session in which that was.
    pub version: u32,
    /// The position that the front end knew.
    pub stated: u16,
    /// Whether it was opened.
    pub runs: bool,
}

/// Which ring it is: the number of the file of its memory, and the guest's address of its descriptors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// Number of the file.
    pub file: u64,
    /// Address of the descriptors.
    pub address: u64,
}

/// A node's journal.
#[derive(Debug, Clone)]
pub struct Journal(Span<Line>);

impl Journal {
    /// Opens the journal of a node memory.
    pub fn over(lines: Span<Line>) -> Self {
        Journal(lines)
    }

    #[inline]
    fn word(&self, ring: usize, at: usize) -> &AtomicU64 {
        let at = WORDS * ring + at;
        self.0[at / LINE_WORDS].word(at % LINE_WORDS)
    }

    /// Notes the completions of a turn in a ring, of which `first` is the position of the first.
    #[inline]
    pub fn note(&self, ring: usize, version: u32, first: u16, completions: &[u64]) {
        self.word(ring, 0).store(0, Relaxed);
        fence(Release);
        for (completion, at) in completions.iter().zip(1..) {
            self.word(ring, at).store(*completion, Relaxed);
        }
        point("guest.noting");
        let count = u64::try_from(completions.len()).expect("a page has few words");
        self.word(ring, 0).store(u64::from(version) << 32 | u64::from(first) << 16 | count, Release);
    }

    /// Returns what a predecessor noted last for a ring, if that was in this version.
    pub fn noted(&self, ring: usize, version: u32) -> Option<Noted> {
        let head = self.word(ring, 0).load(Acquire);
        let [count, first] = [0, 16].map(|shift| u16::try_from(head >> shift & 0xffff).expect("two bytes"));
        let is_known = head >> 32 == u64::from(version) && usize::from(count) <= COMPLETIONS_MAX;
        let words = (1..=usize::from(count)).map(|at| self.word(ring, at).load(Relaxed));
        is_known.then(|| Noted { first, completions: words.collect() })
    }

    /// Returns the version in which a predecessor noted completions of a ring last.
    pub fn noted_in(&self, ring: usize) -> u32 {
        u32::try_from(self.word(ring, 0).load(Acquire) >> 32).expect("four bytes")
    }

    /// Returns how many rings it has room for: less than [`RINGS_MAX`] in memory of an earlier daemon.
    pub fn room(&self) -> usize {
        (self.0.len() * LINE_WORDS / WORDS).min(RINGS_MAX)
    }

    /// Notes that so many pairs run.
    pub fn run(&self, pairs: usize) {
        if pairs > self.pairs() {
            self.word(0, PAIRS).store(pairs as u64, Relaxed);
        }
    }

    /// Notes for the daemon how many pairs of the machine's card run now.
    pub fn running(&self, pairs: usize) {
        self.word(1, PAIRS).store(pairs as u64 + 1, Relaxed);
    }

    /// Returns the word of [`running`](Self::running).
    #[cfg(test)]
    pub fn runs_now(&self) -> u64 {
        self.word(1, PAIRS).load(Relaxed)
    }

    /// Returns how many pairs have run at a time.
    pub fn pairs(&self) -> usize {
        usize::try_from(self.word(0, PAIRS).load(Relaxed)).map_or(0, |pairs| pairs.min(self.room() / 2))
    }

    /// Notes that messages leave the front end's socket that led to this version, and whether it waits for an answer.
    pub fn let_go(&self, version: u32, is_asked: bool) {
        self.word(0, LET_GO).store(u64::from(version) << 32 | u64::from(is_asked) << 1 | 1, Release);
    }

    /// Returns the version up to which messages may have left the front end's socket, and whether it may wait for an answer
    /// to one that has. An earlier worker notes nothing.
    pub fn has_let_go(&self) -> Option<(u32, bool)> {
        let word = self.word(0, LET_GO).load(Acquire);
        (word & 1 == 1).then(|| (u32::try_from(word >> 32).expect("four bytes"), word >> 1 & 1 == 1))
    }

    /// Notes that messages leave the socket of the second front end, whose connection has this number, that led to this
    /// version of its device, and whether it waits for an answer.
    pub fn let_other_go(&self, number: u64, version: u32, is_asked: bool) {
        self.word(1, LET_GO).store(0, Relaxed);
        self.word(1, OPENED_IN).store(number, Release);
        self.word(1, LET_GO).store(u64::from(version) << 32 | u64::from(is_asked) << 1 | 1, Release);
    }

    /// Returns the version of its device to which all messages led that left the socket of the second front end with this
    /// number. Returns none if it may wait for an answer, or nothing is known of it.
    pub fn has_let_other_go(&self, number: u64) -> Option<u32> {
        let word = self.word(1, LET_GO).load(Acquire);
        let is_its = self.word(1, OPENED_IN).load(Acquire) == number && word & 3 == 1;
        is_its.then(|| u32::try_from(word >> 32).expect("four bytes"))
    }

    /// Adds to the counts of a queue.
    #[inline]
    pub fn count(&self, ring: usize, counts: &[u64; LINE_WORDS]) {
        let line = &self.0[WORDS / LINE_WORDS * ring + QUEUE_COUNTS_LINE];
        for (at, count) in counts.iter().enumerate() {
            // Nobody else writes it.
            line.word(at).store(line.word(at).load(Relaxed).wrapping_add(*count), Relaxed);
        }
    }

    /// Returns the counts of a queue.
    pub fn counts(&self, ring: usize) -> [u64; LINE_WORDS] {
        std::array::from_fn(|at| self.word(ring, COUNTS + at).load(Relaxed))
    }

    /// Notes where a ring stands whose front end's connection ends.
    pub fn leave(&self, ring: usize, left: Left) {
        self.forget(ring);
        let Left { version, stated, position, ring: identity } = left;
        self.identify(ring, identity);
        let word = u64::from(version) << 32 | u64::from(stated) << 16 | u64::from(position);
        self.word(ring, LEFT).store(word, Release);
    }

    /// Returns where a ring stood when the last connection that it ran in ended.
    pub fn left(&self, ring: usize) -> Option<Left> {
        let word = self.word(ring, LEFT).load(Acquire);
        let [position, stated] = [0, 16].map(|shift| u16::try_from(word >> shift & 0xffff).expect("two bytes"));
        let version = u32::try_from(word >> 32).expect("four bytes");
        (version != 0).then_some(Left { version, stated, position, ring: self.identity(ring) })
    }

    fn identify(&self, ring: usize, Identity { file, address }: Identity) {
        fence(Release);
        self.word(ring, LEFT + 1).store(file, Relaxed);
        self.word(ring, LEFT + 2).store(address, Relaxed);
    }

    fn identity(&self, ring: usize) -> Identity {
        let [file, address] = [1, 2].map(|at| self.word(ring, LEFT + at).load(Relaxed));
        Identity { file, address }
    }

    /// Notes that this ring is opened at a position, and forgets where it stood when an earlier connection ended.
    pub fn open(&self, ring: usize, ran: Ran, identity: Identity, position: u16) {
        self.word(0, OPENED_IN).store(u64::from(ran.version) << 32 | 1, Relaxed);
        if self.identity(ring) != identity {
            self.forget(ring);
            self.word(ring, RAN).store(0, Relaxed);
            self.identify(ring, identity);
        }
        self.word(ring, OPENED).store(1 << 16 | u64::from(position), Relaxed);
        self.change(ring, ran);
        self.forget(ring);
    }

    /// Returns the version in which a ring was opened last.
    pub fn opened_in(&self) -> Option<u32> {
        let word = self.word(0, OPENED_IN).load(Acquire);
        (word & 1 == 1).then(|| u32::try_from(word >> 32).expect("four bytes"))
    }

    /// Returns where a ring stood when it was opened last. An earlier worker notes nothing.
    pub fn opened_at(&self, ring: usize) -> Option<u16> {
        let word = self.word(ring, OPENED).load(Relaxed);
        (word >> 16 == 1).then(|| u16::try_from(word & 0xffff).expect("two bytes"))
    }

    /// Notes that the ring is opened or closed.
    pub fn change(&self, ring: usize, Ran { version, stated, runs }: Ran) {
        let word = u64::from(version) << 32 | u64::from(stated) << 16 | u64::from(runs);
        self.word(ring, RAN).store(word, Release);
    }

    /// Returns when a ring was opened or closed last, and which it was.
    pub fn ran(&self, ring: usize) -> Option<(Ran, Identity)> {
        let word = self.word(ring, RAN).load(Acquire);
        let version = u32::try_from(word >> 32).expect("four bytes");
        let stated = u16::try_from(word >> 16 & 0xffff).expect("two bytes");
        (version != 0).then(|| (Ran { version, stated, runs: word & 1 == 1 }, self.identity(ring)))
    }

    /// Forgets where a ring stood: it runs, or its front end knows.
    fn forget(&self, ring: usize) {
        self.word(ring, LEFT).store(0, Relaxed);
    }
}
