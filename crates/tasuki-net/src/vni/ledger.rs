//! What a native node's program has done and was about to do: a page of the node memory that only the node's worker
//! writes, for its successor (V5).
//!
//! One store ends a turn: that of the turn count. Before it, the worker writes down which received frames are handled,
//! and every message to be sent. After it, the worker carries this out, then notes the turn as done. A successor that
//! finds a turn not noted as done repeats it: it writes the same messages to the same places, and the same heads.
//!
//! # Layout, in words of 8 bytes
//!
//! | words    | contents                                                                                      |
//! |----------|-----------------------------------------------------------------------------------------------|
//! | 0        | number of turns that are over                                                                 |
//! | 1        | number of turns noted as done                                                                 |
//! | 2, 3     | number of frames given, in two copies: the one of the turn count's parity is valid            |
//! | 4        | numbers of heads and messages below                                                           |
//! | 8..24    | how far the node's endpoint is, eight words, in two copies like words 2 and 3                 |
//! | 24..152  | heads, two words each: the node; how far its ring was read, and parts of the message there    |
//! | 152..    | messages, three words each: its place in a ring and the node; its tag; where the frame lies   |

use std::num::NonZeroU32;

use arrayvec::ArrayVec;
use tasuki_shm::crash;
use tasuki_shm::line::{LINE_WORDS, Line, halves};
use tasuki_shm::region::Span;
use tasuki_shm::ring::{Message, Producer};
use tasuki_shm::sync::{Acquire, AtomicU64, Relaxed, Release, fence};
use tasuki_shm::vni::NODES_MAX;
use tasuki_shm::vni::node_memory::{LEDGER_LINES, NodeMemory};

use super::neighbour::set_announced;

/// Maximum number of nodes whose frames one turn can handle.
pub(crate) const HEADS_MAX: usize = 64;

/// Maximum number of messages of a turn that a successor repeats. Only frames to many nodes make more.
pub(crate) const MESSAGES_MAX: usize = (LEDGER_LINES * LINE_WORDS - MESSAGES_AT) / 3;

const TURNS: usize = 0;
const DONE: usize = 1;
const GIVEN: usize = 2;
const LENGTHS: usize = 4;
const MARKS: usize = 8;
const HEADS_AT: usize = MARKS + 2 * MARKS_HERE;
const MESSAGES_AT: usize = HEADS_AT + 2 * HEADS_MAX;
const _: () = assert!(MESSAGES_AT == 152 && MESSAGES_MAX >= 100);

/// Maximum number of words that say how far an endpoint is.
pub const MARKS_MAX: usize = 32;

/// Number of them in the ledger's page. The others are on a page of their own, in two copies, too: earlier workers know of
/// these alone.
const MARKS_HERE: usize = 8;

/// How far an endpoint is, in its own terms.
pub type Marks = ArrayVec<u64, MARKS_MAX>;

/// How far the frames of a node are handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Handled {
    pub(crate) from: u16,
    /// Index of the first message that is not wholly handled.
    pub(crate) head: u32,
    /// Number of handled parts of that message.
    pub(crate) parts: u32,
    /// Number of frames handled since the last turn.
    pub(crate) count: u64,
}

/// A node's ledger.
#[derive(Debug)]
pub(crate) struct Ledger {
    lines: Span<Line>,
    /// The page with further marks, if the node memory has it.
    more: Option<Span<Line>>,
    /// As they stand in the ledger.
    pub(crate) turns: u64,
    pub(crate) given: u64,
}

/// A place at which a test may kill the node's worker.
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
    /// Opens the ledger of a node memory.
    pub(super) fn over(lines: Span<Line>, more: Option<Span<Line>>) -> Self {
        let mut ledger = Ledger { lines, more, turns: 0, given: 0 };
        ledger.turns = ledger.word(TURNS).load(Acquire);
        ledger.given = ledger.word(GIVEN + usize::from(ledger.turns & 1 == 1)).load(Acquire);
        ledger
    }

    /// Returns how far the node's endpoint was at the end of the last turn, or nothing before the first. Words that it
    /// did not commit then are of an earlier turn.
    pub(crate) fn marks(&self) -> Option<Marks> {
        (self.turns > 0).then(|| (0..MARKS_MAX).map_while(|at| Some(self.mark(at)?.load(Acquire))).collect())
    }

    /// Returns a word of the valid copy, if there is room for so many.
    #[inline]
    fn mark(&self, at: usize) -> Option<&AtomicU64> {
        let copy = usize::from(self.turns & 1 == 1);
        if at < MARKS_HERE {
            return Some(self.word(MARKS + copy * MARKS_HERE + at));
        }
        let at = copy * (MARKS_MAX - MARKS_HERE) + at - MARKS_HERE;
        Some(self.more.as_ref()?[at / LINE_WORDS].word(at % LINE_WORDS))
    }

    #[inline]
    fn word(&self, at: usize) -> &AtomicU64 {
        self.lines[at / LINE_WORDS].word(at % LINE_WORDS)
    }

    #[inline]
    fn put(&self, at: usize, word: u64) {
        self.word(at).store(word, Relaxed);
    }

    /// Ends a turn that handled these frames, sends these messages and gave `given` frames; `marks` say how far the node's
    /// endpoint is then. The caller then carries it out and calls [`done`](Self::done).
    #[inline]
    pub(crate) fn commit<'m>(
        &mut self,
        handled: &[Handled],
        messages: impl Iterator<Item = (u16, u32, &'m Message<1>)>,
        given: u64,
        marks: &[u64],
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
        for (at, mark) in marks.iter().enumerate() {
            self.mark(at).expect("an endpoint has as many as there is room for").store(*mark, Relaxed);
        }
        point("vni.written");
        // V5: stores become visible in program order, even those of a worker that dies. All later stores stay behind
        // this one (E3 of nic/ledger.rs).
        self.word(TURNS).store(self.turns, Release);
        fence(Release);
        point("vni.committed");
    }

    /// Notes that the last turn is carried out.
    #[inline]
    pub(crate) fn done(&self) {
        point("vni.done");
        self.word(DONE).store(self.turns, Release);
        // No store of the next turn precedes this one.
        fence(Release);
    }

    /// Repeats a turn that a predecessor may not have carried out. A worker of this node wrote the ledger, so this
    /// checks each entry against what exists and trusts it no further.
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
            set_announced(&node_memory.talks(), to, true);
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
