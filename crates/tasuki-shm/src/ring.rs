//! A ring: one producer hands messages of one cache line to one consumer, across processes.
//!
//! A message is published by its own line: the line's first word carries the message's index, so the consumer
//! finds out that it is there by the same cache-line transfer that brings it. There is no shared tail. The consumer's
//! `head` stands in the consumer's own memory, and the producer looks at it only when it believes the ring full.
//!
//! The two ends do not trust each other. Each keeps its own index in private memory and treats what the peer wrote as a
//! claim to be checked.
//!
//! # Rules
//!
//! - **R1** An index only grows, wrapping at 2³²; index `i` lives in line `i mod capacity`; capacity is a power of two.
//! - **R2** `tail - head <= capacity`, in wrapping arithmetic.
//! - **R3** Only the producer stores lines; only the consumer stores `head`.
//! - **R4** A line's stamp is 0 (never written), or `tag << 32 | i` with a tag that is not 0, for the index `i` that was last
//!   written there: the one the consumer waits for, or the one `capacity` before it.
//!
//! # Orderings
//!
//! They come in pairs, and are named where the two halves stand:
//!
//! - **PUBLISH** the stamp: stored by [`Producer::push`], loaded by [`Consumer::pop`].
//! - **RETIRE** `head`: stored by [`Consumer::retire`], loaded by [`Producer::room`].

use std::num::NonZeroU32;
use std::ops::Deref;

use crate::line::{Claims, LINE_WORDS, Line};
use crate::sync::{Acquire, Relaxed, Release, fence};

/// Payload words of a message: a line less its stamp.
pub const MESSAGE_WORDS: usize = LINE_WORDS - 1;

/// What one line carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message {
    /// What the message is; its meaning is the user's of the ring. Travels in the stamp, so it is read exactly once.
    pub tag: NonZeroU32,
    /// The payload.
    pub words: [u64; MESSAGE_WORDS],
}

/// A rule of this module that the peer broke. The connection is over: nothing it says can be believed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// The consumer claims to have retired what was not yet pushed, or took back what it had retired.
    #[error("the peer broke ring rule R2: it says that its head is {head} where ours goes from {oldest} to {tail}")]
    R2 {
        /// What the peer claims.
        head: u32,
        /// The last head that was believed.
        oldest: u32,
        /// Our tail.
        tail: u32,
    },
    /// The producer stamped a line with an index that cannot stand there.
    #[error("the peer broke ring rule R4: line {line} is stamped {stamp:#x} where index {expected} is due")]
    R4 {
        /// Which line.
        line: usize,
        /// The stamp found.
        stamp: u64,
        /// The index that is due.
        expected: u32,
    },
}

/// Why a message was not pushed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PushError {
    /// Every line holds a message that the consumer has not retired.
    #[error("the ring is full: all {capacity} messages wait for the peer")]
    Full {
        /// Lines in the ring.
        capacity: u32,
    },
    /// The consumer lies.
    #[error(transparent)]
    Broken(#[from] Broken),
}

/// Low half of a stamp: the index.
#[expect(clippy::cast_possible_truncation, reason = "the low half is what is meant")]
#[inline]
fn index_of(stamp: u64) -> u32 {
    stamp as u32
}

/// High half of a stamp: the tag, unless the line was never written.
#[inline]
fn tag_of(stamp: u64) -> Option<NonZeroU32> {
    NonZeroU32::new(index_of(stamp >> 32))
}

fn capacity_of(lines: usize) -> u32 {
    assert!(lines.is_power_of_two(), "R1: a ring has a power of two of lines, not {lines}");
    u32::try_from(lines).expect("R1: a ring has fewer than 2^32 lines")
}

/// The end that writes. `M` is our lines; `P` is the memory that holds the consumer's `head`.
#[derive(Debug)]
pub struct Producer<M, P> {
    lines: M,
    peer_head: Claims<P>,
    capacity: u32,
    /// Next index to write. Nothing shared is a source for it.
    tail: u32,
    /// `head` as last claimed by the consumer. It can be stale, which costs a look, not safety.
    head: u32,
}

impl<M: Deref<Target = [Line]>, P: Deref<Target = [Line]>> Producer<M, P> {
    /// An end whose next message has index `start`, on `lines` (a power of two of them).
    ///
    /// The consumer stores its head in word 0 of line 0 of `peer_head`, from `start` on.
    pub fn new(lines: M, peer_head: Claims<P>, start: u32) -> Self {
        let capacity = capacity_of(lines.len());
        Producer { lines, peer_head, capacity, tail: start, head: start }
    }

    /// The index of the next message.
    pub fn tail(&self) -> u32 {
        self.tail
    }

    /// The messages that the consumer had not retired when it was last [looked](Self::look) at, oldest first.
    pub fn unretired(&self) -> Vec<Message> {
        let indices = (0..self.used()).map(|i| self.head.wrapping_add(i));
        indices.filter_map(|index| self.message_at(index)).collect()
    }

    fn message_at(&self, index: u32) -> Option<Message> {
        let line = &self.lines[(index & (self.capacity - 1)) as usize];
        let tag = tag_of(line.word(0).load(Relaxed))?;
        Some(Message { tag, words: std::array::from_fn(|i| line.word(i + 1).load(Relaxed)) })
    }

    /// How many messages can be pushed without a look at the consumer.
    #[inline]
    pub fn known_room(&self) -> u32 {
        self.capacity - self.used()
    }

    #[inline]
    fn used(&self) -> u32 {
        self.tail.wrapping_sub(self.head)
    }

    /// How many messages can be pushed now: a lower bound that needs no look at the peer unless it would be 0.
    #[inline]
    pub fn room(&mut self) -> Result<u32, Broken> {
        if self.used() == self.capacity {
            self.look()?;
        }
        Ok(self.capacity - self.used())
    }

    /// Looks at the consumer's head and returns it: what it has retired.
    pub fn look(&mut self) -> Result<u32, Broken> {
        let head = index_of(self.peer_head.load(0, 0));
        // RETIRE: whatever the consumer read from the lines before `head`, it has finished reading.
        fence(Acquire);
        // R1, R2: it moved forward from the last claim, and not past our tail.
        if head.wrapping_sub(self.head) > self.used() {
            return Err(Broken::R2 { head, oldest: self.head, tail: self.tail });
        }
        self.head = head;
        Ok(head)
    }

    /// Writes `message` into the next line. The consumer sees it at once; whether it must be woken is the bell's question.
    #[inline(always)]
    pub fn push(&mut self, message: &Message) -> Result<(), PushError> {
        if self.room()? == 0 {
            return Err(PushError::Full { capacity: self.capacity });
        }
        self.put(message);
        Ok(())
    }

    /// Pushes messages from the front of `batch` until the ring is full; says how many it took.
    pub fn push_batch(&mut self, batch: &[Message]) -> Result<usize, Broken> {
        if (self.capacity - self.used()) as usize >= batch.len() {
            batch.iter().for_each(|message| self.put(message));
            return Ok(batch.len());
        }
        self.look()?;
        let fitting = batch.len().min((self.capacity - self.used()) as usize);
        batch[..fitting].iter().for_each(|message| self.put(message));
        Ok(fitting)
    }

    #[inline(always)]
    fn put(&mut self, message: &Message) {
        let line = &self.lines[(self.tail & (self.capacity - 1)) as usize];
        for (i, word) in message.words.iter().enumerate() {
            line.word(i + 1).store(*word, Relaxed);
        }
        // PUBLISH: the payload stands before its stamp does.
        line.word(0).store(u64::from(message.tag.get()) << 32 | u64::from(self.tail), Release);
        self.tail = self.tail.wrapping_add(1);
    }
}

/// The end that reads. `M` is the producer's lines; `H` is our memory that holds our `head`.
#[derive(Debug)]
pub struct Consumer<M, H> {
    lines: Claims<M>,
    shared_head: H,
    capacity: u32,
    /// Next index to read. The shared `head` is a copy of this, never a source.
    head: u32,
}

impl<M: Deref<Target = [Line]>, H: Deref<Target = [Line]>> Consumer<M, H> {
    /// An end whose next message has index `start`. Its head goes to word 0 of line 0 of `shared_head`.
    pub fn new(lines: Claims<M>, shared_head: H, start: u32) -> Self {
        let capacity = capacity_of(lines.len());
        let consumer = Consumer { lines, shared_head, capacity, head: start };
        consumer.retire();
        consumer
    }

    /// The index of the next message to pop.
    pub fn head(&self) -> u32 {
        self.head
    }

    /// Takes the next message, if it is there, as a private copy. Its line is the producer's again after
    /// [`retire`](Self::retire).
    #[inline(always)]
    pub fn pop(&mut self) -> Result<Option<Message>, Broken> {
        let line = (self.head & (self.capacity - 1)) as usize;
        let stamp = self.lines.load(line, 0);
        let tag = match tag_of(stamp) {
            Some(tag) if index_of(stamp) == self.head => tag,
            _ => return self.not_yet(line, stamp),
        };
        // PUBLISH: the payload that was stored before this stamp is the one we load.
        fence(Acquire);
        let words = std::array::from_fn(|i| self.lines.load(line, i + 1));
        self.head = self.head.wrapping_add(1);
        Ok(Some(Message { tag, words }))
    }

    /// Whether a message is there (or a breach, which [`pop`](Self::pop) will report).
    #[inline]
    pub fn is_ready(&self) -> bool {
        let line = (self.head & (self.capacity - 1)) as usize;
        !matches!(self.not_yet(line, self.lines.load(line, 0)), Ok(None))
    }

    /// R4: the line still holds what it held one lap ago, or nothing at all.
    #[inline(always)]
    fn not_yet(&self, line: usize, stamp: u64) -> Result<Option<Message>, Broken> {
        let a_lap_ago = index_of(stamp) == self.head.wrapping_sub(self.capacity) && tag_of(stamp).is_some();
        if stamp == 0 || a_lap_ago {
            return Ok(None);
        }
        Err(Broken::R4 { line, stamp, expected: self.head })
    }

    /// Takes up to `into.len()` messages, not yet retired; says how many.
    pub fn pop_batch(&mut self, into: &mut [Message]) -> Result<usize, Broken> {
        for (taken, place) in into.iter_mut().enumerate() {
            match self.pop()? {
                Some(message) => *place = message,
                None => return Ok(taken),
            }
        }
        Ok(into.len())
    }

    /// Tells the producer that every message popped so far has been copied out and its line may be written again.
    #[inline]
    pub fn retire(&self) {
        // RETIRE: our loads from those lines stand before this store.
        self.shared_head[0].word(0).store(u64::from(self.head), Release);
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::sync::Arc;

    type Lines = Arc<[Line]>;

    fn lines(count: usize) -> Lines {
        (0..count).map(|_| Line::default()).collect()
    }

    fn message(n: u64) -> Message {
        Message { tag: NonZeroU32::MIN, words: [n; MESSAGE_WORDS] }
    }

    fn ring(capacity: usize, start: u32) -> (Producer<Lines, Lines>, Consumer<Lines, Lines>) {
        let (ours, head) = (lines(capacity), lines(1));
        let consumer = Consumer::new(Claims::of(Arc::clone(&ours)), Arc::clone(&head), start);
        (Producer::new(ours, Claims::of(head), start), consumer)
    }

    #[test]
    fn full_until_the_consumer_retires() {
        let (mut tx, mut rx) = ring(4, 0);
        for i in 0..4 {
            tx.push(&message(i)).unwrap();
        }
        assert_eq!(tx.push(&message(4)), Err(PushError::Full { capacity: 4 }));
        assert_eq!(rx.pop(), Ok(Some(message(0))));
        assert_eq!(tx.push(&message(4)), Err(PushError::Full { capacity: 4 }), "popped is not yet retired");
        rx.retire();
        assert_eq!(tx.push(&message(4)), Ok(()));
    }

    #[test]
    fn r2_a_head_past_our_tail_is_a_lie() {
        let (ours, head) = (lines(4), lines(1));
        let mut tx = Producer::new(ours, Claims::of(Arc::clone(&head)), 0);
        (0..4).for_each(|i| tx.push(&message(i)).unwrap());
        head[0].word(0).store(5, Relaxed);
        assert_eq!(tx.push(&message(4)), Err(PushError::Broken(Broken::R2 { head: 5, oldest: 0, tail: 4 })));
    }

    #[test]
    fn r2_a_head_that_goes_back_is_a_lie() {
        let (ours, head) = (lines(4), lines(1));
        let mut tx = Producer::new(ours, Claims::of(Arc::clone(&head)), 0);
        (0..4).for_each(|i| tx.push(&message(i)).unwrap());
        head[0].word(0).store(2, Relaxed);
        assert_eq!(tx.look(), Ok(2));
        head[0].word(0).store(1, Relaxed);
        assert_eq!(tx.look(), Err(Broken::R2 { head: 1, oldest: 2, tail: 4 }));
    }

    #[test]
    fn r4_a_stamp_out_of_turn_is_a_lie() {
        let (ours, head) = (lines(4), lines(1));
        let mut rx = Consumer::new(Claims::of(Arc::clone(&ours)), head, 0);
        ours[0].word(0).store(1 << 32 | 1, Relaxed);
        assert_eq!(rx.pop(), Err(Broken::R4 { line: 0, stamp: 1 << 32 | 1, expected: 0 }));
        ours[0].word(0).store(7, Relaxed);
        assert!(rx.pop().is_err(), "an index without a tag");
    }

    #[test]
    fn what_was_not_retired_can_be_sent_to_a_successor() {
        let (mut tx, mut rx) = ring(4, 0);
        (0..3).for_each(|i| tx.push(&message(i)).unwrap());
        rx.pop().unwrap();
        rx.retire();
        tx.look().unwrap();
        assert_eq!(tx.unretired(), [message(1), message(2)]);
        let Producer { lines: ours, tail, .. } = tx;
        let head = lines(1);
        let mut successor = Consumer::new(Claims::of(Arc::clone(&ours)), Arc::clone(&head), tail);
        let mut tx = Producer::new(ours, Claims::of(head), tail);
        assert_eq!(successor.pop(), Ok(None), "what the dead consumer left is not taken for new");
        tx.push(&message(7)).unwrap();
        assert_eq!(successor.pop(), Ok(Some(message(7))));
    }

    proptest! {
        #[test]
        fn whatever_goes_in_comes_out_once_and_in_order(
            start in prop_oneof![Just(0), Just(u32::MAX), Just(u32::MAX - 3), any::<u32>()],
            log_capacity in 0_u32..6,
            steps in prop::collection::vec((0_usize..9, 0_usize..9), 1..200),
        ) {
            let (mut tx, mut rx) = ring(1 << log_capacity, start);
            let (mut sent, mut received) = (0, 0);
            for (pushes, pops) in steps {
                let batch: Vec<_> = (0..pushes as u64).map(|i| message(sent + i)).collect();
                sent += tx.push_batch(&batch).unwrap() as u64;
                prop_assert!(sent - received <= 1 << log_capacity);
                let mut taken = [message(0); 9];
                let count = rx.pop_batch(&mut taken[..pops]).unwrap();
                rx.retire();
                for got in &taken[..count] {
                    prop_assert_eq!(*got, message(received));
                    received += 1;
                }
            }
            while let Some(got) = rx.pop().unwrap() {
                prop_assert_eq!(got, message(received));
                received += 1;
            }
            prop_assert_eq!(sent, received);
        }

        #[test]
        fn no_bytes_of_a_peer_make_an_end_panic(stamps in prop::collection::vec(any::<u64>(), 8), heads in prop::collection::vec(any::<u64>(), 8)) {
            let (ours, theirs, head) = (lines(8), lines(8), lines(1));
            let mut tx = Producer::new(ours, Claims::of(Arc::clone(&head)), 3);
            let mut rx = Consumer::new(Claims::of(Arc::clone(&theirs)), lines(1), 3);
            for (i, (stamp, claim)) in stamps.into_iter().zip(heads).enumerate() {
                theirs[i].word(0).store(stamp, Relaxed);
                head[0].word(0).store(claim, Relaxed);
                let _ = tx.push(&message(0));
                let _ = tx.look();
                let _ = rx.pop();
            }
        }
    }
}
