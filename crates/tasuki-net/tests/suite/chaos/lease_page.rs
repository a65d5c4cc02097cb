//! Reports of nodes about themselves and their peers, in memory that they share with the test. Each word has one
//! writer at a time. The memory outlives a killed node, so that its successor continues the counts, and the test can
//! compare the accounts at the end.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::SeqCst;

use tasuki_shm::region::{Pages, Region, Span};
use tasuki_shm::sync::AtomicU64;

/// Numbers for nodes: more than there are nodes, and few enough that each is reused many times.
pub const NUMBERS: u16 = 72;

/// A node's report about itself.
#[derive(Debug, Clone, Copy)]
pub enum Of {
    /// Serial of the last order that it has carried out.
    Done,
    /// Frames received.
    Came,
    /// Frames for all that it has sent.
    ToAll,
    /// Frames not sent for want of room.
    NoRoom,
    /// Frames not sent because no node has the address, or the node was not introduced yet.
    Nobody,
    /// Once it has nothing left to do: number of free pages of its pool, plus 1.
    Rested,
}

/// Reports of both ends of a pair about frames from the first to the second.
#[derive(Debug, Clone, Copy)]
pub enum Between {
    /// Sender: number of the last frame posted for the second node alone; it equals their count.
    One,
    /// Sender: number of posted frames for all that the second node was to get.
    All,
    /// Sender: how many of either kind the reader could see for certain.
    SeenOne,
    SeenAll,
    /// Sender: frames of a killed predecessor whose visibility is unknown.
    Doubtful,
    /// Sender: how often everything was taken back from the reader.
    TakenBack,
    /// Reader: frames received for it alone, and the number of the last (see [`Tally`]).
    CameOne,
    /// Reader: the same for frames for all.
    CameAll,
    /// Reader: frames that were taken back before it read them.
    Late,
    /// Reader: frames that it got again after its predecessor was killed.
    Again,
}

const OF_NODE: usize = 8;
const OF_PAIR: usize = 16;

/// Number of received frames, and the number of the last: in one word, so that no death falls between the two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tally {
    pub count: u32,
    pub last: u32,
}

impl Tally {
    pub fn of(word: u64) -> Self {
        let [a, b, c, d, e, f, g, h] = word.to_le_bytes();
        Tally { count: u32::from_le_bytes([a, b, c, d]), last: u32::from_le_bytes([e, f, g, h]) }
    }

    pub fn word(self) -> u64 {
        u64::from(self.last) << 32 | u64::from(self.count)
    }
}

pub struct LeasePage {
    region: Region,
    words: Span<AtomicU64>,
}

impl LeasePage {
    pub fn create() -> Self {
        let words = usize::from(NUMBERS) * (OF_NODE + usize::from(NUMBERS) * OF_PAIR);
        Self::of(Region::create("lease_page", words * 8, Pages::Small).expect("there is memory"))
    }

    pub fn adopt(memory: OwnedFd) -> Self {
        Self::of(Region::adopt(memory).expect("memory of the test's"))
    }

    fn of(region: Region) -> Self {
        let words = region.span(0, region.len() / 8).expect("all of it");
        LeasePage { region, words }
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.region.fd()
    }

    pub fn of_node(&self, node: u16, what: Of) -> &AtomicU64 {
        &self.words[usize::from(node) * OF_NODE + what as usize]
    }

    pub fn between(&self, from: u16, to: u16, what: Between) -> &AtomicU64 {
        let pair = usize::from(from) * usize::from(NUMBERS) + usize::from(to);
        &self.words[usize::from(NUMBERS) * OF_NODE + pair * OF_PAIR + what as usize]
    }

    pub fn get(&self, from: u16, to: u16, what: Between) -> u64 {
        self.between(from, to, what).load(SeqCst)
    }

    pub fn add(&self, from: u16, to: u16, what: Between, count: u64) {
        self.between(from, to, what).fetch_add(count, SeqCst);
    }

    pub fn set(&self, from: u16, to: u16, what: Between, value: u64) {
        self.between(from, to, what).store(value, SeqCst);
    }

    /// Clears the reports of and about this number, for a new node.
    pub fn clear(&self, node: u16) {
        let words = |first: usize, count| self.words[first..first + count].iter();
        let own = words(usize::from(node) * OF_NODE, OF_NODE);
        let pairs = (0..NUMBERS).flat_map(|other| [(node, other), (other, node)]).flat_map(|(from, to)| {
            let pair = usize::from(from) * usize::from(NUMBERS) + usize::from(to);
            words(usize::from(NUMBERS) * OF_NODE + pair * OF_PAIR, OF_PAIR)
        });
        own.chain(pairs).for_each(|word| word.store(0, SeqCst));
    }
}
