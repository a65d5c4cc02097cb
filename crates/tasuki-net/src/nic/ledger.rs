//! The ledger of a NIC's memory: the driver's progress, true after every store, for a successor whose predecessor
//! died.
//!
//! A driver writes a driver state when it is told to let go; a driver that is killed gets no notice. So a running
//! driver keeps the values that a successor cannot read from the rings (its cursors) in shared memory, and changes
//! them by *commits*. It writes the copy that is not valid, then adds one to the count of commits. The parity of the
//! count says which copy is valid. The driver commits before it tells the card (by the doorbell), so a successor
//! rings both doorbells again: at worst the card hears the same twice.
//!
//! The successor receives again the frames that were received and not handled by the last commit. A driver that
//! changes such a frame in place first saves its bytes ([`Ledger::save`]), so that the successor receives the frame
//! as it came.
//!
//! # Layout, in words of 8 bytes
//!
//! | words     | what                                                                                              |
//! |-----------|---------------------------------------------------------------------------------------------------|
//! | 0         | kind and version of the running driver's driver state, 0 while no driver runs                     |
//! | 1         | commits                                                                                           |
//! | 2         | which copy of the seldom-changed data is valid                                                    |
//! | 3         | 1 while the driver may have its card halted: a successor lets the card go on                      |
//! | 4         | 1 while the card reaches only the first slots: a successor lets it reach all                      |
//! | 8..24     | two copies of the cursors, a cache line each                                                      |
//! | 32..288   | two copies of the seldom-changed data                                                             |
//! | 288..416  | undo keys: for each of two queues 64 places, by the low bits of a position in the ring: position + 1 |
//! | 416..1440 | undo data: the first 64 bytes of the frame at that position                                       |
//! | 1536..    | for each of three rings the slots in its descriptors                                              |
//!
//! # Rules
//!
//! - **E1** One process writes the ledger: the holder of the NIC's lease. A successor reads it once it has the
//!   lease.
//! - **E2** The ledger is a claim: a successor makes a driver state of it, which is checked like any other.
//! - **E3** Stores become visible in the order of the program, for a process that dies as for one that lives. A
//!   driver stores the data first and then the word that refers to it (Release). The next stores, whether into the
//!   copy that was valid until then, into a saved frame, or to the card, must stay behind that word. A Release store
//!   alone lets later stores go before it, so a release fence follows. On x86-64 that constrains the compiler's
//!   order and costs no instruction. The kernel ends a process between two instructions.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU64, fence};

use tasuki_shm::arena::Slot;
use tasuki_shm::crash;
use tasuki_shm::line::halves;
use tasuki_shm::region::{Region, RegionError, Span};
use zerocopy::{FromBytes, IntoBytes};

/// Size of a ledger in bytes.
pub const LEDGER_LEN: usize = 40 * 1024;

/// Number of cursors, in words. Each copy of the cursors has a cache line of 8 words to itself.
pub const CURSORS: usize = 6;
/// Index of the last cursor, the same for every driver: the number of commits of handled or given frames.
pub const TURNS: usize = CURSORS - 1;
/// Index of the cursor before it, the same for every driver: the number of frames given to the card. The cursors before
/// that are of the driver's rings.
pub const GIVEN: usize = TURNS - 1;
const LINE: usize = 8;
/// Size of the seldom-changed data in words.
pub const SELDOM: usize = 128;
/// Number of queues whose frames can be saved.
pub(super) const QUEUES: usize = 2;
/// Number of frames of a queue that can be pending, twice the longest burst: a driver does not use a place again
/// before the frame there was handled.
const UNDO: usize = 64;
/// Number of words saved of a frame.
const SAVED: usize = 8;
/// Number of bytes saved of a frame.
pub const SAVED_LEN: usize = SAVED * 8;

const WHOSE: usize = 0;
const COMMITS: usize = 1;
const VALID: usize = 2;
const HALTED: usize = 3;
const PARTIAL: usize = 4;
const CURSORS_AT: usize = 8;
const SELDOM_AT: usize = 32;
const KEYS_AT: usize = SELDOM_AT + 2 * SELDOM;
const UNDO_AT: usize = KEYS_AT + QUEUES * UNDO;
const WORDS: usize = UNDO_AT + QUEUES * UNDO * SAVED;
const TABLES_AT: usize = 1536;
/// Number of rings whose slots the ledger lists.
const RINGS: usize = 3;
/// Maximum number of descriptors in one of these rings.
const TABLE: usize = 1024;
const _: () = assert!(KEYS_AT == 288 && UNDO_AT == 416 && WORDS == 1440 && WORDS <= TABLES_AT);
const _: () = assert!((TABLES_AT + RINGS * TABLE) * 8 <= LEDGER_LEN);

/// Ledger of a driver, in shared memory.
#[derive(Debug)]
pub struct Ledger(Span<AtomicU64>);

/// Stores a word after all earlier stores and before all later ones (E3).
#[inline(always)]
fn settle(word: &AtomicU64, value: u64) {
    word.store(value, Release);
    fence(Release);
}

impl Ledger {
    /// Returns the ledger at the start of `region`, which is part of a NIC's memory.
    pub fn over(region: &Region) -> Result<Self, RegionError> {
        region.span(0, WORDS).map(Ledger)
    }

    /// Returns the list of the slots in the descriptors of ring number `ring`, of which there are three.
    pub(super) fn table(region: &Region, ring: usize, count: usize) -> Span<AtomicU64> {
        let table = region.span(8 * (TABLES_AT + ring % RINGS * TABLE), count.min(TABLE));
        table.expect("a ledger's region is as long as a ledger")
    }

    /// Returns kind and version of the running driver's driver states, or `None` if no driver runs.
    pub fn whose(&self) -> Option<(u32, u32)> {
        let word = self.0[WHOSE].load(Acquire);
        let (version, kind) = halves(word);
        (word != 0).then_some((kind, version))
    }

    /// Records that a driver runs from here on, or that none does (`None`).
    pub fn belongs(&self, to: Option<(u32, u32)>) {
        let word = to.map_or(0, |(kind, version)| u64::from(kind) << 32 | u64::from(version));
        settle(&self.0[WHOSE], word);
    }

    /// Records that the driver has halted the card, or may have, or that it lets the card run again.
    pub fn halted(&self, is: bool) {
        settle(&self.0[HALTED], is.into());
    }

    /// Returns whether the card may be halted.
    pub fn is_halted(&self) -> bool {
        self.0[HALTED].load(Acquire) != 0
    }

    /// Records that the card reaches only the first slots of its memory, or may do so, or that it reaches all.
    pub fn partial(&self, is: bool) {
        settle(&self.0[PARTIAL], is.into());
    }

    /// Returns whether the card may reach only the first slots.
    pub fn is_partial(&self) -> bool {
        self.0[PARTIAL].load(Acquire) != 0
    }

    /// Begins anew, with no driver, for a card that is to have empty rings.
    pub(super) fn clear(&self) {
        self.belongs(None);
        self.forget();
        self.halted(false);
        self.partial(false);
    }

    /// Returns the number of commits.
    pub fn commits(&self) -> u64 {
        self.0[COMMITS].load(Acquire)
    }

    /// Commits these cursors; `commits` is the count of commits including this one.
    #[inline]
    pub fn commit(&self, commits: u64, cursors: &[u64; CURSORS]) {
        // Check the length only once: there is a commit for every burst.
        let Some(head) = self.0.first_chunk::<SELDOM_AT>() else { return };
        let at = if commits & 1 == 0 { CURSORS_AT } else { CURSORS_AT + LINE };
        (0..CURSORS).for_each(|i| head[at + i].store(cursors[i], Relaxed));
        crash::point("nic.written");
        settle(&head[COMMITS], commits);
    }

    /// Returns the cursors of the last commit.
    pub fn cursors(&self) -> [u64; CURSORS] {
        let at = CURSORS_AT + if self.commits() & 1 == 0 { 0 } else { LINE };
        std::array::from_fn(|i| self.0[at + i].load(Relaxed))
    }

    /// Replaces the seldom-changed data. Bytes beyond its size are cut off.
    pub fn write_seldom(&self, bytes: &[u8]) {
        let next = (self.0[VALID].load(Relaxed) & 1) ^ 1;
        let at = SELDOM_AT + if next == 0 { 0 } else { SELDOM };
        let (words, _) = bytes.as_chunks::<8>();
        let copy = self.0[at..at + SELDOM].iter().zip(words);
        copy.for_each(|(place, word)| place.store(u64::from_ne_bytes(*word), Relaxed));
        settle(&self.0[VALID], next);
    }

    /// Returns the number of commits of handled or given frames: see
    /// [`Transactional::turns`](crate::port::Transactional::turns).
    pub fn turns(&self) -> u64 {
        self.cursors()[TURNS]
    }

    /// Returns the seldom-changed data that was written last.
    pub fn read_seldom(&self) -> [u64; SELDOM] {
        let at = SELDOM_AT + if self.0[VALID].load(Acquire) & 1 == 0 { 0 } else { SELDOM };
        std::array::from_fn(|i| self.0[at + i].load(Relaxed))
    }

    /// Saves the present head of the frame in `slot`, which is at `position` of queue number `queue`.
    #[inline]
    pub fn save(&self, queue: usize, position: u32, slot: &Slot) {
        let place = queue % QUEUES * UNDO + position as usize % UNDO;
        let Ok((head, _)) = <[u64; SAVED]>::read_from_prefix(slot.bytes()) else { return };
        let saved = &self.0[UNDO_AT + place * SAVED..][..SAVED];
        saved.iter().zip(head).for_each(|(place, word)| place.store(word, Relaxed));
        crash::point("nic.saving");
        // The entry in this place belonged to a frame that has been handled.
        settle(&self.0[KEYS_AT + place], u64::from(position) + 1);
    }

    /// Returns the positions of `queue` whose frames' heads are saved, including frames handled long ago.
    pub fn saved(&self, queue: usize) -> impl Iterator<Item = u32> {
        let keys = &self.0[KEYS_AT + queue % QUEUES * UNDO..][..UNDO];
        keys.iter().filter_map(|key| u32::try_from(key.load(Acquire).checked_sub(1)?).ok())
    }

    /// Puts the head of a frame that was pending at `position`, and is [saved](Self::saved), back into its slot.
    pub fn undo(&self, queue: usize, position: u32, slot: &mut Slot) {
        let place = queue % QUEUES * UNDO + position as usize % UNDO;
        let saved = &self.0[UNDO_AT + place * SAVED..][..SAVED];
        let head: [u64; SAVED] = std::array::from_fn(|i| saved[i].load(Relaxed));
        let bytes = slot.bytes_mut();
        let len = bytes.len().min(SAVED_LEN);
        bytes[..len].copy_from_slice(&head.as_bytes()[..len]);
    }

    /// Wipes all saved data. All frames that it belongs to must have been handled.
    pub fn wipe_saved(&self) {
        self.forget();
        self.0[UNDO_AT..].iter().for_each(|word| word.store(0, Relaxed));
    }

    /// Forgets all saved frames: positions begin anew with a card that starts.
    pub fn forget(&self) {
        self.0[KEYS_AT..KEYS_AT + QUEUES * UNDO].iter().for_each(|key| key.store(0, Relaxed));
    }
}

#[cfg(test)]
mod tests {
    use tasuki_shm::region::Pages;

    use super::*;

    fn ledger() -> Ledger {
        Ledger::over(&Region::create("ledger", LEDGER_LEN, Pages::Small).unwrap()).unwrap()
    }

    #[test]
    fn a_commit_is_one_store() {
        let ledger = ledger();
        ledger.commit(1, &[1; CURSORS]);
        ledger.commit(2, &[2; CURSORS]);
        // State after a kill: the other copy is written, the count is not.
        ledger.0[CURSORS_AT + LINE..CURSORS_AT + 2 * LINE].iter().for_each(|word| word.store(3, Relaxed));
        assert_eq!((ledger.commits(), ledger.cursors()), (2, [2; CURSORS]));
        ledger.commit(3, &[4; CURSORS]);
        assert_eq!(ledger.cursors(), [4; CURSORS]);
    }

    #[test]
    fn what_seldom_changes_is_whole() {
        let ledger = ledger();
        ledger.write_seldom(&[1; 16]);
        ledger.write_seldom(&[2; 16]);
        let there = ledger.read_seldom();
        assert_eq!((there[1], there[2]), (u64::from_ne_bytes([2; 8]), 0));
        // State after a kill within the next write.
        ledger.0[SELDOM_AT..SELDOM_AT + 2 * SELDOM][..2 * SELDOM].iter().enumerate().for_each(|(i, word)| {
            let valid = usize::try_from(ledger.0[VALID].load(Relaxed)).unwrap();
            if i / SELDOM != valid {
                word.store(9, Relaxed);
            }
        });
        assert_eq!(ledger.read_seldom(), there);
    }

    #[test]
    fn nobody_is_said_to_run_who_does_not() {
        let ledger = ledger();
        assert_eq!(ledger.whose(), None);
        ledger.belongs(Some((0x8086_10d3, 3)));
        assert_eq!(ledger.whose(), Some((0x8086_10d3, 3)));
        ledger.belongs(None);
        assert_eq!(ledger.whose(), None);
    }
}
