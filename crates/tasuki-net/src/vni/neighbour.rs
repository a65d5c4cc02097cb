//! Another node of the VNI, as one node knows it.

use std::time::{Duration, Instant};

use tasuki_shm::line::{Claims, Line};
use tasuki_shm::region::Span;
use tasuki_shm::sync::Relaxed;
use tasuki_shm::vni::node_memory::NodeMemory;
use tasuki_shm::wake::Clapper;

use super::inbox::{Breach, Inbox};
use super::outbox::{NoRoom, Outbox, Stock};

/// How long nothing is sent before it is said that a ring need not be looked at; at the next tick its memory is given back.
pub const IDLE: Duration = Duration::from_secs(10);

/// What is counted of a neighbour.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Frames received.
    pub received: u64,
    /// Frames sent.
    pub sent: u64,
    /// Frames not sent since its ring was full,
    pub ring_full: u64,
    /// since it held as much of our pool as one may,
    pub over_quota: u64,
    /// or since our pool had no room.
    pub pool_full: u64,
    /// How often everything was taken back from it, since it read nothing.
    pub taken_back: u64,
    /// Frames that came from it and were not from it.
    pub forged: u64,
}

#[derive(Debug)]
pub(super) struct Neighbour {
    /// To whom it says that it talks.
    pub(super) talks: Claims<Span<Line>>,
    pub(super) clapper: Clapper,
    pub(super) outbox: Outbox,
    pub(super) inbox: Inbox,
    /// Our line of it: what is counted stands there for strangers to read.
    pub(super) line: Span<Line>,
    pub(super) counts: Counts,
    /// Whether its ring is among those that we look at.
    pub(super) is_heard: bool,
    /// Whether we have said that we talk to it.
    pub(super) talk: Talk,
    /// Something was sent since it was last rung for.
    pub(super) touched: bool,
    /// Why it is not listened to any more.
    pub(super) breach: Option<Breach>,
    /// How far it was, if it had not read everything, and since when.
    pub(super) progress: Option<(u32, Instant)>,
    /// How many frames it had been sent, and since when they are not more.
    pub(super) quiet: (u64, Instant),
}

/// Whether a node knows that we talk to it (V2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Talk {
    /// Our ring to it is not looked at, and costs nothing.
    Silent,
    /// That it is to be looked at was said, and it was not rung for yet.
    Begun,
    /// It is looked at.
    Known,
    /// That it need not be looked at was said; its memory goes next.
    Ending,
}

impl Counts {
    /// As they stand in a node's line, from word 1 on: word 0 says how far its ring was read.
    fn words(&self) -> [u64; 7] {
        let Counts { received, sent, ring_full, over_quota, pool_full, taken_back, forged } = *self;
        [received, sent, ring_full, over_quota, pool_full, taken_back, forged]
    }

    /// What a predecessor had counted, as it stands in the node's line.
    pub(super) fn of(line: &Line) -> Self {
        let [received, sent, ring_full, over_quota, pool_full, taken_back, forged] =
            std::array::from_fn(|word| line.word(word + 1).load(Relaxed));
        Counts { received, sent, ring_full, over_quota, pool_full, taken_back, forged }
    }

    pub(super) fn count(&mut self, none: NoRoom) {
        match none {
            NoRoom::Ring => self.ring_full += 1,
            NoRoom::Quota => self.over_quota += 1,
            NoRoom::Pool => self.pool_full += 1,
        }
    }
}

impl Neighbour {
    /// Says that we talk to it, before there is anything to be seen of that (V2).
    #[inline]
    pub(super) fn announce(&mut self, node_memory: &NodeMemory, number: u16) {
        if matches!(self.talk, Talk::Silent | Talk::Ending) {
            say_that_we_talk(&node_memory.talks(), number, true);
            self.talk = Talk::Begun;
        }
    }

    #[inline]
    pub(super) fn count_sent(&mut self, touched: &mut Vec<u16>, number: u16) {
        self.counts.sent += 1;
        if !std::mem::replace(&mut self.touched, true) {
            touched.push(number);
        }
    }

    /// Everything was read. Says whether its ring's memory is still to be given back.
    pub(super) fn rest(&mut self, node_memory: &NodeMemory, number: u16, stock: &mut Stock<'_>, now: Instant) -> bool {
        if self.touched || self.quiet.0 != self.counts.sent {
            self.quiet = (self.counts.sent, now);
            return true;
        }
        // Whoever is sent something next may have the run.
        let _ = self.outbox.rest(stock);
        match self.talk {
            Talk::Silent => false,
            Talk::Begun => {
                // It had no room for the one frame that it was to get.
                say_that_we_talk(&node_memory.talks(), number, false);
                self.talk = Talk::Silent;
                false
            }
            Talk::Known if now.saturating_duration_since(self.quiet.1) < IDLE => true,
            Talk::Known => {
                say_that_we_talk(&node_memory.talks(), number, false);
                self.talk = Talk::Ending;
                true
            }
            Talk::Ending => {
                // Fails only where there is nothing to give back, and then nothing is lost.
                let _ = node_memory.give_back_ring(number);
                self.talk = Talk::Silent;
                false
            }
        }
    }

    /// Nothing was read from a node that comes with this number next, and nothing counted of it.
    pub(super) fn clear_line(&self) {
        (0..=Counts::default().words().len()).for_each(|word| self.line[0].word(word).store(0, Relaxed));
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

/// A node's number as it stands in the pipe of a bell: two bytes that are told from one another, so that whoever writes something else there
/// spoils nobody's.
pub(super) fn name_of(number: u16) -> [u8; 2] {
    let [low, high] = [number & 0x7f, number >> 7].map(|half| half.to_le_bytes()[0]);
    [low, high | 0x80]
}

/// The reverse.
pub(super) fn number_of(name: [u8; 2]) -> Option<u16> {
    let [low, high] = name;
    (low < 0x80 && high >= 0x80).then(|| u16::from(high & 0x7f) << 7 | u16::from(low))
}

/// The line and the word of a node's bit in a set, and the bit.
fn bit_of(node: u16) -> (usize, usize, u64) {
    let word = usize::from(node / 64);
    (word / 8, word % 8, 1 << (node % 64))
}

pub(super) fn says_that_it_talks(talks: &Claims<Span<Line>>, to: u16) -> bool {
    let (line, word, bit) = bit_of(to);
    talks.load(line, word) & bit != 0
}

pub(super) fn say_that_we_talk(talks: &Span<Line>, to: u16, yes: bool) {
    let (line, word, bit) = bit_of(to);
    let word = talks[line].word(word);
    let others = word.load(Relaxed) & !bit;
    word.store(if yes { others | bit } else { others }, Relaxed);
}
