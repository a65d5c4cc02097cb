//! What nodes say of themselves, and of whom they sent to and heard: memory that they and the test share, of which each word has one writer at a
//! time. It outlives a node that is killed, so that its successor goes on counting, and the accounts can be compared at the end.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::SeqCst;

use tasuki_shm::region::{Pages, Region, Span};
use tasuki_shm::sync::AtomicU64;

/// Numbers that nodes have. More than there are nodes, and few enough that each is given many times.
pub const NUMBERS: u16 = 72;

/// What a node says of itself.
#[derive(Debug, Clone, Copy)]
pub enum Of {
    /// The last order that it has carried out.
    Done,
    /// Frames that came.
    Came,
    /// Frames for all that it has sent.
    ToAll,
    /// Frames that it did not send, for want of room,
    NoRoom,
    /// and since nobody has the address, or nobody had told it of the node.
    Nobody,
    /// When it has nothing left to do: pages of its pool that nobody holds, and 1.
    Rested,
}

/// What the two ends of a pair say of frames from the first to the second.
#[derive(Debug, Clone, Copy)]
pub enum Between {
    /// The sender: frames for the second alone that were posted, and the number of the last,
    One,
    /// frames for all that it was to get,
    All,
    /// how many of either it could see for certain,
    SeenOne,
    SeenAll,
    /// those of a killed sender of which nobody knows,
    Doubtful,
    /// how often everything was taken back from the reader.
    TakenBack,
    /// The reader: of frames for it alone, how many came, and the number of the last (see [`Tally`]),
    CameOne,
    /// the same of frames for all,
    CameAll,
    /// frames that were taken back before it read them,
    Late,
    /// those that it got again after a reader before it was killed.
    Again,
}

const OF_NODE: usize = 8;
const OF_PAIR: usize = 16;

/// How many have come, and the number of the last: one word, so that no death falls between the two.
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

    /// A node that nobody knows yet has this number: nothing is said of it, nor by it.
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
