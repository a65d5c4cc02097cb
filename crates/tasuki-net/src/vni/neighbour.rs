//! Another node of the VNI, as one node knows it.

use std::time::{Duration, Instant};

use tasuki_shm::line::{Claims, Line, halves};
use tasuki_shm::region::Span;
use tasuki_shm::sync::Relaxed;
use tasuki_shm::vni::node_memory::NodeMemory;
use tasuki_shm::wake::BellSender;

use super::inbox::{Breach, Inbox};
use super::outbox::{NoRoom, Outbox, Stock};

/// How long a ring stays idle before its sender withdraws the announcement. The next tick gives the ring's memory back.
pub const IDLE: Duration = Duration::from_secs(10);

/// Counts of a neighbour.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Number of frames received from it.
    pub received: u64,
    /// Number of frames sent to it.
    pub sent: u64,
    /// Number of frames not sent because the ring to it was full.
    pub ring_full: u64,
    /// Number of frames not sent because it held as much of our pool as one reader may.
    pub over_quota: u64,
    /// Number of frames not sent because our pool had no room.
    pub pool_full: u64,
    /// Number of times that we took everything back because it read nothing.
    pub taken_back: u64,
    /// Number of frames that it sent with an address that is not its own.
    pub forged: u64,
}

#[derive(Debug)]
pub(super) struct Neighbour {
    /// The nodes to which it announces that it talks.
    pub(super) talks: Claims<Span<Line>>,
    pub(super) bell_sender: BellSender,
    pub(super) outbox: Outbox,
    pub(super) inbox: Inbox,
    /// Our line for it; other processes read the counts there.
    pub(super) line: Span<Line>,
    pub(super) counts: Counts,
    /// Whether its ring is among those that we look at.
    pub(super) is_heard: bool,
    /// How far our announcement to it has come.
    pub(super) announcement: Announcement,
    /// Whether we sent it frames since we last rang its bell.
    pub(super) touched: bool,
    /// The rule that it broke; we no longer listen to it.
    pub(super) breach: Option<Breach>,
    /// How far it had read, if not everything, and since when.
    pub(super) progress: Option<(u32, Instant)>,
    /// Number of frames sent to it, and since when that number stands.
    pub(super) quiet: (u64, Instant),
}

/// Whether a node knows that we talk to it (V2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Announcement {
    /// It does not look at our ring, which costs nothing.
    Silent,
    /// We have announced the ring, and not rung its bell yet.
    Begun,
    /// It looks at our ring.
    Known,
    /// We have withdrawn the announcement; the ring's memory goes next.
    Ending,
}

impl Counts {
    /// Returns the counts in the order of a node's line, from word 1 on. Word 0 holds how far its ring was read.
    fn words(&self) -> [u64; 7] {
        let Counts { received, sent, ring_full, over_quota, pool_full, taken_back, forged } = *self;
        [received, sent, ring_full, over_quota, pool_full, taken_back, forged]
    }

    /// Reads the counts of a predecessor from the node's line.
    pub(super) fn of(line: &Line) -> Self {
        let [received, sent, ring_full, over_quota, pool_full, taken_back, forged] =
            std::array::from_fn(|word| line.word(word + 1).load(Relaxed));
        Counts { received, sent, ring_full, over_quota, pool_full, taken_back, forged }
    }
}

impl Neighbour {
    /// Announces that we talk to it, before it can see any frame (V2).
    #[inline]
    pub(super) fn announce(&mut self, node_memory: &NodeMemory, number: u16) {
        if matches!(self.announcement, Announcement::Silent | Announcement::Ending) {
            set_announced(&node_memory.talks(), number, true);
            self.announcement = Announcement::Begun;
        }
    }

    #[inline]
    pub(super) fn count_sent(&mut self, touched: &mut Vec<u16>, number: u16) {
        self.counts.sent += 1;
        if !std::mem::replace(&mut self.touched, true) {
            touched.push(number);
        }
    }

    /// Counts a frame that found no room, and publishes that count alone, at once: from a neighbour that reads nothing no
    /// frame moves any more, and the other counts may include frames that are not published yet.
    #[cold]
    pub(super) fn count_dropped(&mut self, none: NoRoom) {
        let counts = &mut self.counts;
        let (word, count) = match none {
            NoRoom::Ring => (3, &mut counts.ring_full),
            NoRoom::Quota => (4, &mut counts.over_quota),
            NoRoom::Pool => (5, &mut counts.pool_full),
        };
        *count += 1;
        self.line[0].word(word).store(*count, Relaxed);
    }

    /// Handles a neighbour that has read everything. Returns whether its ring's memory is still to be given back.
    pub(super) fn rest(&mut self, node_memory: &NodeMemory, number: u16, stock: &mut Stock<'_>, now: Instant) -> bool {
        if self.touched || self.quiet.0 != self.counts.sent {
            self.quiet = (self.counts.sent, now);
            return true;
        }
        // Another node may need the run for its next frames.
        let _ = self.outbox.rest(stock);
        match self.announcement {
            Announcement::Silent => false,
            Announcement::Begun => {
                // There was no room for the one frame that it was to get.
                set_announced(&node_memory.talks(), number, false);
                self.announcement = Announcement::Silent;
                false
            }
            Announcement::Known if now.saturating_duration_since(self.quiet.1) < IDLE => true,
            Announcement::Known => {
                set_announced(&node_memory.talks(), number, false);
                self.announcement = Announcement::Ending;
                true
            }
            Announcement::Ending => {
                // Fails only if there is nothing to give back; then nothing is lost.
                let _ = node_memory.give_back_ring(number);
                self.announcement = Announcement::Silent;
                false
            }
        }
    }

    /// Clears the counts, so that the next node of this number starts with nothing counted.
    pub(super) fn clear_counts(&self) {
        (1..=Counts::default().words().len()).for_each(|word| self.line[0].word(word).store(0, Relaxed));
    }

    pub(super) fn publish(&self) {
        for (i, count) in self.counts.words().into_iter().enumerate() {
            self.line[0].word(i + 1).store(count, Relaxed);
        }
    }

    #[cold]
    pub(super) fn breaks(&mut self, breach: Breach) -> Breach {
        *self.breach.get_or_insert(breach)
    }
}

/// Returns a node's number as two bytes for a bell's pipe. The top bit tells the two bytes apart, so that a peer that
/// writes other bytes there spoils no other node's number.
pub(super) fn name_of(number: u16) -> [u8; 2] {
    let [low, high] = [number & 0x7f, number >> 7].map(|half| half.to_le_bytes()[0]);
    [low, high | 0x80]
}

/// Returns the number that two bytes name, if they do.
pub(super) fn number_of(name: [u8; 2]) -> Option<u16> {
    let [low, high] = name;
    (low < 0x80 && high >= 0x80).then(|| u16::from(high & 0x7f) << 7 | u16::from(low))
}

/// Returns the line, the word and the mask of a node's bit in a set.
fn bit_of(node: u16) -> (usize, usize, u64) {
    let word = usize::from(node / 64);
    (word / 8, word % 8, 1 << (node % 64))
}

pub(super) fn announces(talks: &Claims<Span<Line>>, to: u16) -> bool {
    let (line, word, bit) = bit_of(to);
    talks.load(line, word) & bit != 0
}

/// Forgets the handled parts of a message that is not read any more. The index up to which messages were read stays: a node
/// that still lives goes on from there, and a new one of this number begins there.
pub(super) fn keep_head(line: &Line) {
    let (head, _) = halves(line.word(0).load(Relaxed));
    line.word(0).store(head.into(), Relaxed);
}

pub(super) fn set_announced(talks: &Span<Line>, to: u16, yes: bool) {
    let (line, word, bit) = bit_of(to);
    let word = talks[line].word(word);
    let others = word.load(Relaxed) & !bit;
    word.store(if yes { others | bit } else { others }, Relaxed);
}
