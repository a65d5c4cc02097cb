//! A ring: one producer hands messages of a fixed size to one consumer, across processes.
//!
//! A message fills its place of 2, 4 or 8 words, a line at most. The place itself publishes the message: its first
//! word carries the message's index, so the cache-line transfer that brings the message also tells the consumer that
//! it is there. There is no shared tail. The consumer's `head` lies in the consumer's own memory, and the producer
//! looks at it only when it believes the ring full.
//!
//! The two ends do not trust each other. Each keeps its own index in private memory and checks the peer's words as
//! claims.
//!
//! # Rules
//!
//! - **R1** An index only grows, wrapping at 2³²; index `i` lives in place `i mod capacity`; capacity is a power of
//!   two.
//! - **R2** `tail - head <= capacity`, in wrapping arithmetic.
//! - **R3** Only the producer stores places; only the consumer stores `head`.
//! - **R4** A place's stamp is 0 (never written), or `tag << 32 | i` with a nonzero tag and the index `i` last
//!   written there. That index is the one the consumer waits for, or the one `capacity` before it.
//!
//! # Orderings
//!
//! Orderings come in pairs; a comment at each half names its pair:
//!
//! - **PUBLISH** the stamp: [`Producer::push`] stores it, [`Consumer::pop`] loads it.
//! - **RETIRE** `head`: [`Consumer::retire`] stores it, [`Producer::room`] loads it.

use std::num::NonZeroU32;
use std::ops::Deref;

use crate::line::{Claims, LINE_WORDS, Line};
use crate::sync::{Acquire, Relaxed, Release, fence};

/// Payload words of a message that fills a line: all words but its stamp.
pub const MESSAGE_WORDS: usize = LINE_WORDS - 1;

/// The contents of one place: `N` words beside the stamp, where `N` is 1, 3 or 7.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message<const N: usize = MESSAGE_WORDS> {
    /// Kind of message; the ring's user defines its meaning. It travels in the stamp, so the consumer reads it
    /// exactly once.
    pub tag: NonZeroU32,
    /// The payload. Its meaning depends on `tag`.
    pub words: [u64; N],
}

/// A rule of this module that the peer broke. The connection is over: nothing the peer says can be trusted any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// The consumer claims to have retired messages that were not yet pushed, or took back retired ones.
    #[error("the peer broke ring rule R2: it says that its head is {head} where ours goes from {oldest} to {tail}")]
    R2 {
        /// Head that the peer claims.
        head: u32,
        /// The last head that passed the check.
        oldest: u32,
        /// Index of the next message that we push.
        tail: u32,
    },
    /// The producer stamped a line with an index that cannot occur there.
    #[error("the peer broke ring rule R4: place {place} is stamped {stamp:#x} where index {expected} is due")]
    R4 {
        /// Place of the bad stamp, from 0 to the capacity less one.
        place: u32,
        /// Stamp found.
        stamp: u64,
        /// Index that is due.
        expected: u32,
    },
}

/// Reasons why the producer did not push a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PushError {
    /// Every place holds a message that the consumer has not retired.
    #[error("the ring is full: all {capacity} messages wait for the peer")]
    Full {
        /// Number of places in the ring.
        capacity: u32,
    },
    /// The consumer broke a rule.
    #[error(transparent)]
    Broken(#[from] Broken),
}

/// Returns the index: the low half of a stamp.
#[expect(clippy::cast_possible_truncation, reason = "the low half is meant")]
#[inline]
fn index_of(stamp: u64) -> u32 {
    stamp as u32
}

/// Returns the tag, the high half of a stamp, or `None` if the place was never written.
#[inline]
fn tag_of(stamp: u64) -> Option<NonZeroU32> {
    NonZeroU32::new(index_of(stamp >> 32))
}

/// The layout in lines of messages that have `N` words beside their stamps.
struct Places<const N: usize>;

impl<const N: usize> Places<N> {
    /// Words in a place.
    const WORDS: usize = {
        assert!((N + 1).is_power_of_two() && N < LINE_WORDS && N > 0, "a message has 1, 3 or 7 words beside its stamp");
        N + 1
    };

    /// Places in a line.
    #[expect(clippy::cast_possible_truncation, reason = "8 at most")]
    const A_LINE: u32 = (LINE_WORDS / Self::WORDS) as u32;

    fn capacity(lines: usize) -> u32 {
        assert!(lines.is_power_of_two(), "R1: a ring has a power of two of lines, not {lines}");
        let lines = u32::try_from(lines).expect("R1: a ring has fewer than 2^32 lines");
        lines.checked_mul(Self::A_LINE).expect("R1: a ring has fewer than 2^32 places")
    }

    /// Returns the line of a place, and the place's first word in that line.
    #[inline(always)]
    fn at(place: u32) -> (usize, usize) {
        ((place / Self::A_LINE) as usize, (place % Self::A_LINE) as usize * Self::WORDS)
    }
}

/// The writing end. `M` is our lines; `P` is the memory that holds the consumer's `head`.
#[derive(Debug)]
pub struct Producer<M, P, const N: usize = MESSAGE_WORDS> {
    lines: M,
    peer_head: Claims<P>,
    capacity: u32,
    /// Next index to write. We never take it from shared memory.
    tail: u32,
    /// The consumer's last claim of `head`. It can be stale; that costs an extra look, not safety.
    head: u32,
}

impl<M: Deref<Target = [Line]>, P: Deref<Target = [Line]>, const N: usize> Producer<M, P, N> {
    /// Creates an end on `lines` (a power of two of them) whose next message has index `start`.
    ///
    /// The consumer stores its head in word 0 of line 0 of `peer_head`, from `start` on.
    pub fn new(lines: M, peer_head: Claims<P>, start: u32) -> Self {
        let capacity = Places::<N>::capacity(lines.len());
        Producer { lines, peer_head, capacity, tail: start, head: start }
    }

    /// Resumes where a predecessor stopped, on the lines that it left. Returns `None` if those lines cannot have
    /// been for this consumer; then the caller must clear them.
    ///
    /// Messages that the consumer has not retired are still there. If the predecessor ended before it wrote the
    /// first message of a batch, the batch counts as not pushed, and this function wipes it out.
    pub fn go_on(lines: M, peer_head: Claims<P>) -> Option<Self> {
        let head = index_of(peer_head.load(0, 0));
        let mut producer = Self::new(lines, peer_head, head);
        while producer.used() < producer.capacity && producer.stamp_at(producer.tail) == Some(producer.tail) {
            producer.tail = producer.tail.wrapping_add(1);
        }
        // R4: each place behind the last message holds its stamp of one lap ago, or nothing.
        let next = producer.stamp_at(producer.tail);
        let a_lap_ago = producer.tail.wrapping_sub(producer.capacity);
        if next.is_some() && next != Some(a_lap_ago) && producer.used() < producer.capacity {
            return None;
        }
        for index in (0..producer.capacity - producer.used()).map(|i| producer.tail.wrapping_add(i)) {
            if producer.stamp_at(index) != Some(index.wrapping_sub(producer.capacity)) {
                let (line, first) = Places::<N>::at(index & (producer.capacity - 1));
                producer.lines[line].word(first).store(0, Release);
            }
        }
        Some(producer)
    }

    /// Writes a message that a predecessor was to push at `index` and may have pushed. Call it before
    /// [`go_on`](Self::go_on). Writing the message a second time does no harm as long as nothing was pushed behind
    /// it.
    pub fn push_again(lines: &M, index: u32, message: &Message<N>) {
        let (line, first) = Places::<N>::at(index & (Places::<N>::capacity(lines.len()) - 1));
        put_at(&lines[line], first, index, message);
    }

    /// Returns the index in the stamp of the place of `index`, if that place was ever written.
    fn stamp_at(&self, index: u32) -> Option<u32> {
        let (line, first) = Places::<N>::at(index & (self.capacity - 1));
        let stamp = self.lines[line].word(first).load(Relaxed);
        tag_of(stamp).map(|_| index_of(stamp))
    }

    /// Returns every message in the ring with its index, read or not, in no particular order.
    pub fn left_behind(lines: &M) -> Vec<(u32, Message<N>)> {
        let capacity = Places::<N>::capacity(lines.len());
        let message = |place| {
            let (line, first) = Places::<N>::at(place);
            let stamp = lines[line].word(first).load(Relaxed);
            let words = std::array::from_fn(|i| lines[line].word(first + i + 1).load(Relaxed));
            tag_of(stamp).map(|tag| (index_of(stamp), Message { tag, words }))
        };
        (0..capacity).filter_map(message).collect()
    }

    /// Returns the index of the next message.
    pub fn tail(&self) -> u32 {
        self.tail
    }

    /// Returns the messages that the consumer had not retired at the last [`look`](Self::look), oldest first.
    pub fn unretired(&self) -> Vec<Message<N>> {
        let indices = (0..self.used()).map(|i| self.head.wrapping_add(i));
        indices.filter_map(|index| self.message_at(index)).collect()
    }

    fn message_at(&self, index: u32) -> Option<Message<N>> {
        let (line, first) = Places::<N>::at(index & (self.capacity - 1));
        let line = &self.lines[line];
        let tag = tag_of(line.word(first).load(Relaxed))?;
        Some(Message { tag, words: std::array::from_fn(|i| line.word(first + i + 1).load(Relaxed)) })
    }

    /// Returns the number of places in the ring.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Returns how many messages fit without another look at the consumer.
    #[inline]
    pub fn known_room(&self) -> u32 {
        self.capacity - self.used()
    }

    #[inline]
    fn used(&self) -> u32 {
        self.tail.wrapping_sub(self.head)
    }

    /// Returns how many messages fit now: a lower bound. Looks at the peer only if the bound would otherwise be 0.
    #[inline]
    pub fn room(&mut self) -> Result<u32, Broken> {
        if self.used() == self.capacity {
            self.look()?;
        }
        Ok(self.capacity - self.used())
    }

    /// Loads the consumer's head, checks it and returns it. The consumer has retired every message before it.
    pub fn look(&mut self) -> Result<u32, Broken> {
        let head = index_of(self.peer_head.load(0, 0));
        // RETIRE: the consumer has finished reading the lines before `head`.
        fence(Acquire);
        // R1, R2: the head moved forward from the last claim, and not past our tail.
        if head.wrapping_sub(self.head) > self.used() {
            return Err(Broken::R2 { head, oldest: self.head, tail: self.tail });
        }
        self.head = head;
        Ok(head)
    }

    /// Writes `message` into the next place. The consumer can see it at once; the bell decides whether to wake it.
    #[inline(always)]
    pub fn push(&mut self, message: &Message<N>) -> Result<(), PushError> {
        if self.room()? == 0 {
            return Err(PushError::Full { capacity: self.capacity });
        }
        self.put(self.tail, message);
        self.tail = self.tail.wrapping_add(1);
        Ok(())
    }

    /// Pushes messages from the front of `batch` until the ring is full. Returns the number pushed.
    ///
    /// Writes the first message last: a consumer that waits for it fetches its line again and again, and leaves the
    /// other lines alone until then.
    pub fn push_batch(&mut self, batch: &[Message<N>]) -> Result<usize, Broken> {
        if ((self.capacity - self.used()) as usize) < batch.len() {
            self.look()?;
        }
        let room = (self.capacity - self.used()) as usize;
        let fitting = &batch[..batch.len().min(room)];
        self.tail = self.tail.wrapping_add(u32::try_from(fitting.len()).expect("no more than the capacity"));
        let mut index = self.tail;
        for message in fitting.iter().rev() {
            index = index.wrapping_sub(1);
            self.put(index, message);
        }
        Ok(fitting.len())
    }

    /// Writes `message` into the place of `index`.
    #[inline(always)]
    fn put(&self, index: u32, message: &Message<N>) {
        let (line, first) = Places::<N>::at(index & (self.capacity - 1));
        put_at(&self.lines[line], first, index, message);
    }
}

/// Writes the message with index `index` into a line, from word `first` on.
#[inline(always)]
fn put_at<const N: usize>(line: &Line, first: usize, index: u32, message: &Message<N>) {
    for (i, word) in message.words.iter().enumerate() {
        line.word(first + i + 1).store(*word, Relaxed);
    }
    // PUBLISH: store the payload before its stamp.
    line.word(first).store(u64::from(message.tag.get()) << 32 | u64::from(index), Release);
}

/// The reading end. `M` is the producer's lines; `H` is our memory that holds our `head`.
#[derive(Debug)]
pub struct Consumer<M, H, const N: usize = MESSAGE_WORDS> {
    lines: Claims<M>,
    shared_head: H,
    capacity: u32,
    /// Next index to read. The shared `head` is only a copy of it; we never load it back.
    head: u32,
}

impl<M: Deref<Target = [Line]>, H: Deref<Target = [Line]>, const N: usize> Consumer<M, H, N> {
    /// Creates an end whose next message has index `start`. It stores its head in word 0 of line 0 of `shared_head`.
    pub fn new(lines: Claims<M>, shared_head: H, start: u32) -> Self {
        let capacity = Places::<N>::capacity(lines.len());
        let consumer = Consumer { lines, shared_head, capacity, head: start };
        consumer.retire();
        consumer
    }

    /// Resumes at `head`, which `shared_head` already holds. Stores nothing.
    pub fn go_on(lines: Claims<M>, shared_head: H, head: u32) -> Self {
        let capacity = Places::<N>::capacity(lines.len());
        Consumer { lines, shared_head, capacity, head }
    }

    /// Returns the index of the next message to pop.
    pub fn head(&self) -> u32 {
        self.head
    }

    /// Takes the next message, if there is one, as a private copy. Its place belongs to the producer again after
    /// [`retire`](Self::retire).
    #[inline(always)]
    pub fn pop(&mut self) -> Result<Option<Message<N>>, Broken> {
        let place = self.head & (self.capacity - 1);
        let (line, first) = Places::<N>::at(place);
        let stamp = self.lines.load(line, first);
        let tag = match tag_of(stamp) {
            Some(tag) if index_of(stamp) == self.head => tag,
            _ => return self.not_yet(place, stamp),
        };
        // PUBLISH: load the payload that was stored before this stamp.
        fence(Acquire);
        let words = std::array::from_fn(|i| self.lines.load(line, first + i + 1));
        self.head = self.head.wrapping_add(1);
        Ok(Some(Message { tag, words }))
    }

    /// Whether a message is there, or a breach, which [`pop`](Self::pop) will report.
    #[inline]
    pub fn is_ready(&self) -> bool {
        let place = self.head & (self.capacity - 1);
        let (line, first) = Places::<N>::at(place);
        !matches!(self.not_yet(place, self.lines.load(line, first)), Ok(None))
    }

    /// R4: a place without a new message holds its stamp of one lap ago, or nothing at all.
    #[inline(always)]
    fn not_yet(&self, place: u32, stamp: u64) -> Result<Option<Message<N>>, Broken> {
        let a_lap_ago = index_of(stamp) == self.head.wrapping_sub(self.capacity) && tag_of(stamp).is_some();
        if stamp == 0 || a_lap_ago {
            return Ok(None);
        }
        Err(Broken::R4 { place, stamp, expected: self.head })
    }

    /// Tells the producer that we have copied every message popped so far, so it may write their places again.
    #[inline]
    pub fn retire(&self) {
        // RETIRE: our loads from those lines come before this store.
        self.retire_to(self.head, 0);
    }

    /// Retires the messages before `head`, out of those popped so far. `note` is for our successor: the producer
    /// does not read it.
    #[inline]
    pub fn retire_to(&self, head: u32, note: u32) {
        // RETIRE: our loads from those lines come before this store.
        self.shared_head[0].word(0).store(u64::from(note) << 32 | u64::from(head), Release);
    }

    /// Sets the read position back to `head`, so that `pop` returns the messages from there on again. They must not
    /// be retired yet.
    #[inline]
    pub fn put_back(&mut self, head: u32) {
        self.head = head;
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
        message_of(n)
    }

    fn message_of<const N: usize>(n: u64) -> Message<N> {
        Message { tag: NonZeroU32::MIN, words: [n; N] }
    }

    type Ring<const N: usize> = (Producer<Lines, Lines, N>, Consumer<Lines, Lines, N>);

    fn ring(capacity: usize, start: u32) -> Ring<MESSAGE_WORDS> {
        ring_of(capacity, start)
    }

    /// Returns both ends of a ring of `count` lines.
    fn ring_of<const N: usize>(count: usize, start: u32) -> Ring<N> {
        let (ours, head) = (lines(count), lines(1));
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
        let mut tx: Producer<_, _> = Producer::new(ours, Claims::of(Arc::clone(&head)), 0);
        (0..4).for_each(|i| tx.push(&message(i)).unwrap());
        head[0].word(0).store(5, Relaxed);
        assert_eq!(tx.push(&message(4)), Err(PushError::Broken(Broken::R2 { head: 5, oldest: 0, tail: 4 })));
    }

    #[test]
    fn r2_a_head_that_goes_back_is_a_lie() {
        let (ours, head) = (lines(4), lines(1));
        let mut tx: Producer<_, _> = Producer::new(ours, Claims::of(Arc::clone(&head)), 0);
        (0..4).for_each(|i| tx.push(&message(i)).unwrap());
        head[0].word(0).store(2, Relaxed);
        assert_eq!(tx.look(), Ok(2));
        head[0].word(0).store(1, Relaxed);
        assert_eq!(tx.look(), Err(Broken::R2 { head: 1, oldest: 2, tail: 4 }));
    }

    #[test]
    fn r4_a_stamp_out_of_turn_is_a_lie() {
        let (ours, head) = (lines(4), lines(1));
        let mut rx: Consumer<_, _> = Consumer::new(Claims::of(Arc::clone(&ours)), head, 0);
        ours[0].word(0).store(1 << 32 | 1, Relaxed);
        assert_eq!(rx.pop(), Err(Broken::R4 { place: 0, stamp: 1 << 32 | 1, expected: 0 }));
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
        assert_eq!(successor.pop(), Ok(None), "messages that the dead consumer left are not taken for new");
        tx.push(&message(7)).unwrap();
        assert_eq!(successor.pop(), Ok(Some(message(7))));
    }

    #[test]
    fn a_successor_of_the_producer_goes_on_where_it_stopped() {
        for (start, pushed, retired) in [(0, 0, 0), (0, 3, 1), (0, 4, 0), (u32::MAX - 1, 4, 2), (7, 9, 9), (7, 9, 6)] {
            let (ours, head) = (lines(4), lines(1));
            let mut tx: Producer<_, _> = Producer::new(Arc::clone(&ours), Claims::of(Arc::clone(&head)), start);
            let mut rx: Consumer<_, _> = Consumer::new(Claims::of(Arc::clone(&ours)), Arc::clone(&head), start);
            for i in 0..pushed {
                if i >= 4 {
                    rx.pop().unwrap();
                    rx.retire();
                }
                tx.push(&message(i)).unwrap();
            }
            while rx.head().wrapping_sub(start) < retired {
                rx.pop().unwrap();
            }
            rx.retire();
            let tail = tx.tail();
            drop(tx);
            let mut tx: Producer<_, _> = Producer::go_on(ours, Claims::of(head)).unwrap();
            assert_eq!(tx.tail(), tail);
            while rx.pop().unwrap().is_some() {}
            rx.retire();
            tx.push(&message(77)).unwrap();
            assert_eq!(rx.pop(), Ok(Some(message(77))));
        }
    }

    #[test]
    fn a_batch_that_was_cut_short_was_not_pushed() {
        let (ours, head) = (lines(8), lines(1));
        let mut tx: Producer<_, _> = Producer::new(Arc::clone(&ours), Claims::of(Arc::clone(&head)), 0);
        let mut rx: Consumer<_, _> = Consumer::new(Claims::of(Arc::clone(&ours)), Arc::clone(&head), 0);
        tx.push(&message(0)).unwrap();
        // From its end: 4, 3, 2; then the producer is killed.
        (2..5).rev().for_each(|index| tx.put(index, &message(index.into())));
        drop(tx);
        let mut tx: Producer<_, _> = Producer::go_on(ours, Claims::of(head)).unwrap();
        assert_eq!(tx.tail(), 1);
        tx.push(&message(77)).unwrap();
        assert_eq!([rx.pop(), rx.pop(), rx.pop()], [Ok(Some(message(0))), Ok(Some(message(77))), Ok(None)]);
    }

    #[test]
    fn lines_that_were_for_another_consumer_are_recognised() {
        let (ours, head) = (lines(4), lines(1));
        let mut tx: Producer<_, _> = Producer::new(Arc::clone(&ours), Claims::of(Arc::clone(&head)), 500);
        head[0].word(0).store(500, Relaxed);
        (0..3).for_each(|i| tx.push(&message(i)).unwrap());
        assert_eq!(Producer::<_, Lines>::left_behind(&ours).len(), 3);
        assert!(Producer::<_, _>::go_on(ours, Claims::of(lines(1))).is_none());
    }

    /// Pushes and pops as `steps` say, in a ring of `count` lines.
    fn goes_round<const N: usize>(count: usize, start: u32, steps: &[(usize, usize)]) {
        let (mut tx, mut rx) = ring_of::<N>(count, start);
        let capacity = (count * LINE_WORDS / (N + 1)) as u64;
        let (mut sent, mut received) = (0, 0);
        for (pushes, pops) in steps {
            let batch: Vec<_> = (0..*pushes as u64).map(|i| message_of(sent + i)).collect();
            sent += tx.push_batch(&batch).unwrap() as u64;
            assert!(sent - received <= capacity);
            for got in (0..*pops).map_while(|_| rx.pop().unwrap()) {
                assert_eq!(got, message_of::<N>(received));
                received += 1;
            }
            rx.retire();
        }
        while let Some(got) = rx.pop().unwrap() {
            assert_eq!(got, message_of::<N>(received));
            received += 1;
        }
        assert_eq!(sent, received);
    }

    fn hears<const N: usize>(stamps: &[u64], heads: &[u64]) {
        let (ours, theirs, head) = (lines(8), lines(8), lines(1));
        let mut tx = Producer::<_, _, N>::new(ours, Claims::of(Arc::clone(&head)), 3);
        let mut rx = Consumer::<_, _, N>::new(Claims::of(Arc::clone(&theirs)), lines(1), 3);
        for (i, (stamp, claim)) in stamps.iter().zip(heads).enumerate() {
            theirs[i].word(0).store(*stamp, Relaxed);
            head[0].word(0).store(*claim, Relaxed);
            let _ = tx.push(&message_of(0));
            let _ = tx.look();
            let _ = rx.pop();
        }
    }

    proptest! {
        #[test]
        fn whatever_goes_in_comes_out_once_and_in_order(
            start in prop_oneof![Just(0), Just(u32::MAX), Just(u32::MAX - 3), any::<u32>()],
            log_lines in 0_u32..6,
            steps in prop::collection::vec((0_usize..9, 0_usize..9), 1..200),
        ) {
            goes_round::<7>(1 << log_lines, start, &steps);
            goes_round::<3>(1 << log_lines, start, &steps);
            goes_round::<1>(1 << log_lines, start, &steps);
        }

        #[test]
        fn no_bytes_of_a_peer_make_an_end_panic(stamps in prop::collection::vec(any::<u64>(), 8), heads in prop::collection::vec(any::<u64>(), 8)) {
            hears::<7>(&stamps, &heads);
            hears::<1>(&stamps, &heads);
        }
    }
}
