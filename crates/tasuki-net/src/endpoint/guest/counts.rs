//! What each queue of a guest's card has carried. The counts lie in the node memory, beside the [journal](super::journal), so
//! they outlive workers, and the daemon reads them without asking. A turn counts in private memory, and adds that when it is
//! committed: a worker that is killed may leave out its last turn.

use std::sync::LazyLock;

use tasuki_shm::line::LINE_WORDS;
use tasuki_shm::vni::node_memory::QUEUE_COUNTS;

use super::device::{FROM_GUEST, RINGS_MAX, TO_GUEST};
use super::journal::Journal;
use crate::endpoint::Dropped;

/// What is counted, in the order of [`QUEUE_COUNTS`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Count {
    /// Frames that the guest got or sent, also those that were then dropped on their way.
    Packets,
    /// The same in bytes, from the Ethernet header on; a GSO packet is counted before it is cut.
    Bytes,
    /// How often a kick woke the worker.
    Kicks,
    /// How often the guest was interrupted for what it was shown.
    Interrupts,
    /// How often the guest was shown something without an interrupt of its own.
    Suppressed,
    /// Frames that were dropped: the guest had no buffer, or the destination no room.
    NoRoom,
    /// Frames that were dropped: they were too long, or too short.
    Length,
    /// Frames that were dropped for other reasons, which the counts of the node name.
    Other,
}

const _: () = assert!(Count::Other as usize + 1 == QUEUE_COUNTS.len() && QUEUE_COUNTS.len() == LINE_WORDS);

/// Names of the counts of each ring, as ethtool has them: `rx0_packets`.
static NAMES: LazyLock<[[String; LINE_WORDS]; RINGS_MAX]> = LazyLock::new(|| {
    std::array::from_fn(|ring| {
        let side = if ring % 2 == TO_GUEST { "rx" } else { "tx" };
        QUEUE_COUNTS.map(|count| format!("{side}{}_{count}", ring / 2))
    })
});

/// The counts of a turn.
#[derive(Debug)]
pub struct Counts {
    rings: Box<[[u64; LINE_WORDS]; RINGS_MAX]>,
    /// Bits of the rings that have some.
    changed: u64,
}

impl Default for Counts {
    fn default() -> Self {
        Counts { rings: Box::new([[0; LINE_WORDS]; RINGS_MAX]), changed: 0 }
    }
}

/// Returns the frames from the guest that were dropped so far: without room, of a wrong length, for other reasons.
pub fn lost(dropped: &Dropped) -> [u64; 3] {
    [dropped.no_room, dropped.length + dropped.too_long, dropped.nobody + dropped.not_own]
}

impl Counts {
    /// Adds to a count of a ring.
    #[inline]
    pub fn add(&mut self, ring: usize, what: Count, count: u64) {
        self.rings[ring][what as usize] += count;
        self.changed |= 1 << ring;
    }

    /// Counts frames that the guest sent by a pair, and those that were dropped since `before`.
    #[inline]
    pub fn sent(&mut self, pair: usize, (frames, bytes): (usize, usize), before: [u64; 3], dropped: &Dropped) {
        let ring = 2 * pair + FROM_GUEST;
        self.add(ring, Count::Packets, frames as u64);
        self.add(ring, Count::Bytes, bytes as u64);
        let reasons = [Count::NoRoom, Count::Length, Count::Other];
        for ((reason, now), before) in reasons.into_iter().zip(lost(dropped)).zip(before) {
            self.add(ring, reason, now - before);
        }
    }

    /// Adds the turn's counts to those so far.
    #[inline]
    pub fn flush(&mut self, journal: &Journal) {
        while self.changed != 0 {
            let ring = self.changed.trailing_zeros() as usize;
            self.changed &= self.changed - 1;
            journal.count(ring, &std::mem::take(&mut self.rings[ring]));
        }
    }
}

/// Returns the counts of the rings of all pairs that have run, with their names.
pub fn named(journal: &Journal) -> Vec<(&'static str, u64)> {
    let counts = (0..2 * journal.pairs()).map(|ring| (ring, journal.counts(ring)));
    counts.flat_map(|(ring, counts)| NAMES[ring].iter().map(String::as_str).zip(counts)).collect()
}
