//! What a native node's program has done, and was about to do: a page of the node's node memory that its worker alone writes, for its successor (V5).
//!
//! A turn is over with one store, that of the count of turns. Before it stands here what was received and is handled, and every message that goes;
//! after it that is done, and then noted as done. A successor that finds a turn which is not noted as done does it again: it writes the same
//! messages to the same places, and the same heads.
//!
//! # Layout, in words of 8 bytes
//!
//! | words    | what                                                                                          |
//! |----------|-----------------------------------------------------------------------------------------------|
//! | 0        | turns that are over                                                                           |
//! | 1        | turns of which is noted that all was done                                                     |
//! | 2, 3     | frames that were given, in two copies: that of the turns' parity is valid                      |
//! | 4        | how many heads and messages stand here                                                        |
//! | 8..136   | heads, two words each: the node; how far its ring was read, and parts of what stands there    |
//! | 136..    | messages, three words each: its place in a ring and the node; its tag; where the frame lies   |

use std::num::NonZeroU32;

use tasuki_shm::crash;
use tasuki_shm::line::{LINE_WORDS, Line};
use tasuki_shm::region::Span;
use tasuki_shm::ring::{Message, Producer};
use tasuki_shm::sync::{Acquire, AtomicU64, Relaxed, Release, fence};
use tasuki_shm::vni::NODES_MAX;
use tasuki_shm::vni::node_memory::{LEDGER_LINES, NodeMemory};

use super::halves;
use super::neighbour::say_that_we_talk;

/// Nodes of which frames can be handled in one turn.
pub(super) const HEADS_MAX: usize = 64;

/// Messages of a turn that a successor does again. Only frames to many nodes make more.
pub(super) const MESSAGES_MAX: usize = (LEDGER_LINES * LINE_WORDS - MESSAGES_AT) / 3;

const TURNS: usize = 0;
const DONE: usize = 1;
const GIVEN: usize = 2;
const LENGTHS: usize = 4;
const HEADS_AT: usize = 8;
const MESSAGES_AT: usize = HEADS_AT + 2 * HEADS_MAX;
const _: () = assert!(MESSAGES_AT == 136 && MESSAGES_MAX >= 100);

/// How far the frames of a node are handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Handled {
    pub(super) from: u16,
    /// All before this index,
    pub(super) head: u32,
    /// and so many parts of it.
    pub(super) parts: u32,
    /// Frames since the last turn.
    pub(super) count: u64,
}

/// A node's ledger.
#[derive(Debug)]
pub(super) struct Ledger {
    lines: Span<Line>,
    /// As they stand there.
    pub(super) turns: u64,
    pub(super) given: u64,
}

/// A place at which a test has the node's worker killed.
#[inline(always)]
pub(crate) fn point(name: &'static str) {
    crash::point(name);
    #[cfg(test)]
    super::mortal::may_die(name);
}

fn index(len: usize) -> u32 {
    u32::try_from(len).expect("no more than a page has words")
}

impl Ledger {
    /// That of a node memory.
    pub(super) fn over(lines: Span<Line>) -> Self {
        let mut ledger = Ledger { lines, turns: 0, given: 0 };
        ledger.turns = ledger.word(TURNS).load(Acquire);
        ledger.given = ledger.word(GIVEN + usize::from(ledger.turns & 1 == 1)).load(Acquire);
        ledger
    }

    #[inline]
    fn word(&self, at: usize) -> &AtomicU64 {
        self.lines[at / LINE_WORDS].word(at % LINE_WORDS)
    }

    #[inline]
    fn put(&self, at: usize, word: u64) {
        self.word(at).store(word, Relaxed);
    }

    /// Ends a turn: this was handled, these messages go, with so many frames. What is here next is to do it, and then to note that it is
    /// [done](Self::done).
    #[inline]
    pub(super) fn commit<'m>(
        &mut self,
        handled: &[Handled],
        messages: impl Iterator<Item = (u16, u32, &'m Message<1>)>,
        given: u64,
    ) {
        for (i, it) in handled.iter().enumerate() {
            self.put(HEADS_AT + 2 * i, it.from.into());
            self.put(HEADS_AT + 2 * i + 1, u64::from(it.parts) << 32 | u64::from(it.head));
        }
        let mut count = 0;
        for (to, place, message) in messages.take(MESSAGES_MAX) {
            let at = MESSAGES_AT + 3 * count;
            self.put(at, u64::from(to) << 32 | u64::from(place));
            self.put(at + 1, message.tag.get().into());
            self.put(at + 2, message.words[0]);
            count += 1;
        }
        self.put(LENGTHS, u64::from(index(handled.len())) << 32 | u64::from(index(count)));
        (self.turns, self.given) = (self.turns + 1, self.given + given);
        self.put(GIVEN + usize::from(self.turns & 1 == 1), self.given);
        point("vni.written");
        // V5: stores become visible in the order of the program, also of one that dies: what is done next stays behind this (E3 of nic/ledger.rs).
        self.word(TURNS).store(self.turns, Release);
        fence(Release);
        point("vni.committed");
    }

    /// All of the last turn is done.
    #[inline]
    pub(super) fn done(&self) {
        point("vni.done");
        self.word(DONE).store(self.turns, Release);
        // Nothing of the next turn stands before that.
        fence(Release);
    }

    /// Does what a predecessor may not have come to do. What stands here was written by a worker of this node: it is held against what there is, and no
    /// more believed than that.
    pub(super) fn redo(&self, node_memory: &NodeMemory) {
        if self.word(DONE).load(Acquire) == self.turns {
            return;
        }
        let (messages, heads) = halves(self.word(LENGTHS).load(Relaxed));
        let get = |at: usize| self.word(at).load(Relaxed);
        for i in 0..(messages as usize).min(MESSAGES_MAX) {
            let at = MESSAGES_AT + 3 * i;
            let (place, to) = halves(get(at));
            let Some(to) = node(to) else { continue };
            let Some(tag) = NonZeroU32::new(halves(get(at + 1)).0) else { continue };
            say_that_we_talk(&node_memory.talks(), to, true);
            let message = Message { tag, words: [get(at + 2)] };
            Producer::<_, Span<Line>, 1>::push_again(&node_memory.ring_to(to), place, &message);
        }
        for i in 0..(heads as usize).min(HEADS_MAX) {
            let at = HEADS_AT + 2 * i;
            if let Some(from) = node(halves(get(at)).0) {
                node_memory.line_of(from)[0].word(0).store(get(at + 1), Release);
            }
        }
        self.done();
    }
}

fn node(number: u32) -> Option<u16> {
    u16::try_from(number).ok().filter(|number| *number < NODES_MAX)
}
