//! Frames to one node: a ring of messages in our node memory, and the runs of our pool in which the frames lie.

use std::collections::VecDeque;
use std::num::NonZeroU32;

use arrayvec::ArrayVec;

use tasuki_shm::bell::PeerBell;
use tasuki_shm::line::{Line, halves};
use tasuki_shm::pool::{LINE, PAGE, Piece, Pool, Run};
use tasuki_shm::region::Span;
use tasuki_shm::ring::{Broken, Message, Producer};

/// Maximum number of pages in a run for frames that need fewer: one run serves many frames.
const RUN_PAGES: u32 = 16;

/// Returns the number of pages for the next run from a pool with `left` pages: fewer as it empties, so that some remain
/// for every reader.
pub(super) fn run_pages(left: u32) -> u32 {
    (left / 32).clamp(1, RUN_PAGES)
}

/// Maximum number of messages that are published at a time.
const BATCH: usize = 32;

/// Bit of a message's tag: the piece begins with an [offload header](super::offload).
pub(super) const WITH_HEADER: u32 = 1 << 24;

/// Bits of a message's tag that hold the piece's length in bytes.
pub(super) const LEN_MASK: u32 = (1 << 24) - 1;

/// Returns the message that tells a reader where a frame lies.
pub(super) fn message_of(piece: Piece, flags: u32) -> Message<1> {
    let tag = NonZeroU32::new(piece.len | flags).expect("a frame has bytes");
    Message { tag, words: [u64::from(piece.generation) << 32 | u64::from(piece.offset)] }
}

/// Returns the piece that a message names.
#[inline]
pub(super) fn piece_of(message: &Message<1>) -> Piece {
    let [word] = message.words;
    let (offset, generation) = halves(word);
    Piece { offset, len: message.tag.get() & LEN_MASK, generation }
}

/// Runs whose frames went to several nodes.
#[derive(Debug, Default)]
pub(super) struct SharedRuns(Vec<Option<Shared>>);

#[derive(Debug)]
struct Shared {
    run: Run,
    /// Number of nodes that have not read all of it, plus one for us while we fill it.
    holders: u32,
    /// We took it back from a node by force, which may still be reading.
    late: bool,
}

/// Index of a shared run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SharedRun(usize);

impl SharedRuns {
    /// Adds a run that only we hold as yet.
    pub(super) fn add(&mut self, run: Run) -> SharedRun {
        let shared = Some(Shared { run, holders: 1, late: false });
        let place = self.0.iter().position(Option::is_none);
        let place = place.unwrap_or_else(|| {
            self.0.push(None);
            self.0.len() - 1
        });
        self.0[place] = shared;
        SharedRun(place)
    }

    fn get(&mut self, which: SharedRun) -> &mut Shared {
        self.0[which.0].as_mut().expect("who holds a run keeps it")
    }

    pub(super) fn run(&mut self, which: SharedRun) -> &Run {
        &self.get(which).run
    }

    pub(super) fn hold(&mut self, which: SharedRun) {
        self.get(which).holders += 1;
    }

    /// Removes one holder. `late`: we took it back by force, and the node may go on reading.
    pub(super) fn release(&mut self, which: SharedRun, late: bool, pool: &mut Pool) {
        let shared = self.get(which);
        shared.holders -= 1;
        shared.late |= late;
        if shared.holders == 0
            && let Some(Shared { run, late, .. }) = self.0[which.0].take()
        {
            match late {
                true => pool.take_back(run),
                false => pool.give(run),
            }
        }
    }
}

/// A run that a reader still holds.
#[derive(Debug)]
enum Held {
    Own(Run),
    Shared(SharedRun),
}

/// A run that is no longer being filled, and the ring index behind its last frame. The reader is done with the run once
/// it has read up to there.
#[derive(Debug)]
struct Sent {
    upto: u32,
    held: Held,
}

/// Maximum number of bytes behind a frame to prefetch when the frame is posted: those of the next one, if it is as long
/// (docs/decisions/0015-a-pool-goes-round.md). The CPU prefetches the rest of a longer one by itself.
const AHEAD: u32 = 2048;

/// The run that is being filled.
#[derive(Debug)]
struct Stream {
    run: Run,
    /// Bytes of it in use.
    at: u32,
}

impl Stream {
    fn has_room(&self, len: u32) -> bool {
        self.at + len <= self.run.pages() * PAGE
    }
}

/// Why a frame was not sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NoRoom {
    /// The reader is behind by a whole ring.
    #[error("the ring to the node is full")]
    Ring,
    /// The reader holds as much of the pool as one reader may.
    #[error("the node has not read all that it may have of the pool")]
    Quota,
    /// The pool has no room for a frame this long: other readers hold it.
    #[error("the pool has no room for a frame of this length")]
    Pool,
}

/// Frames to one node.
#[derive(Debug)]
pub(super) struct Outbox {
    ring: Producer<Span<Line>, Span<Line>, 1>,
    pub(super) peer_bell: PeerBell<Span<Line>>,
    stream: Option<Stream>,
    /// Bytes of the stream that are drafted and not posted yet.
    drafted: u32,
    sent: VecDeque<Sent>,
    /// Pages that the reader holds, or that are being filled for it.
    held: u32,
    /// Messages that are posted and not published yet.
    staged: ArrayVec<Message<1>, BATCH>,
}

/// What an outbox uses of its node.
#[derive(Debug)]
pub(super) struct Stock<'a> {
    pub(super) pool: &'a mut Pool,
    pub(super) shared: &'a mut SharedRuns,
    /// Maximum number of pages of the pool that one reader may hold.
    pub(super) quota: u32,
}

/// Runs with frames that a predecessor sent to a node, each with the frame's index in the ring.
pub(super) type LeftBehind = Vec<(u32, SharedRun)>;

impl Outbox {
    /// Continues a ring in which a predecessor may have left frames, in the runs `left`.
    pub(super) fn new(
        ring: Producer<Span<Line>, Span<Line>, 1>,
        peer_bell: PeerBell<Span<Line>>,
        mut left: LeftBehind,
        stock: &mut Stock<'_>,
    ) -> Self {
        let sent = VecDeque::with_capacity(64);
        let mut outbox = Outbox { ring, peer_bell, stream: None, drafted: 0, sent, held: 0, staged: ArrayVec::new() };
        let unread = outbox.ring.capacity() - outbox.ring.known_room();
        let head = outbox.ring.tail().wrapping_sub(unread);
        left.sort_by_key(|(index, _)| index.wrapping_sub(head));
        for (index, which) in left {
            if index.wrapping_sub(head) < unread {
                let upto = index.wrapping_add(1);
                match outbox.sent.back_mut() {
                    // The next frame lies in the same page: hold the page once.
                    Some(Sent { upto: last, held: Held::Shared(same) }) if *same == which => {
                        *last = upto;
                        stock.shared.release(which, false, stock.pool);
                    }
                    _ => {
                        outbox.held += stock.shared.run(which).pages();
                        outbox.sent.push_back(Sent { upto, held: Held::Shared(which) });
                    }
                }
            } else {
                stock.shared.release(which, false, stock.pool);
            }
        }
        outbox
    }

    /// Reads how far the reader is, and frees what it has read. Returns whether it has read everything.
    fn reap(&mut self, stock: &mut Stock<'_>) -> Result<bool, Broken> {
        let head = self.ring.look()?;
        // Indices wrap: an entry is free unless its end lies between the head and the last staged message.
        let open = self.end().wrapping_sub(head);
        while let Some(sent) = self.sent.pop_front_if(|sent| sent.upto.wrapping_sub(head).wrapping_sub(1) >= open) {
            self.free(sent.held, stock, false);
        }
        Ok(open == 0)
    }

    fn free(&mut self, held: Held, stock: &mut Stock<'_>, late: bool) {
        match held {
            Held::Own(run) => {
                self.held -= run.pages();
                match late {
                    true => stock.pool.take_back(run),
                    false => stock.pool.give(run),
                }
            }
            Held::Shared(which) => {
                self.held -= stock.shared.run(which).pages();
                stock.shared.release(which, late, stock.pool);
            }
        }
    }

    /// Makes room for a piece of `len` bytes, to be [written](Self::drafted) and then [posted](Self::post).
    #[inline]
    pub(super) fn draft(&mut self, len: u32, stock: &mut Stock<'_>) -> Result<Result<(), NoRoom>, Broken> {
        let fits = self.stream.as_ref().is_some_and(|stream| stream.has_room(len));
        match fits && self.ring.known_room() as usize > self.staged.len() {
            true => Ok(Ok(())),
            false => self.make_room(len, stock),
        }
    }

    /// Returns the room that [`draft`](Self::draft) made.
    #[inline]
    pub(super) fn drafted<'p>(&mut self, len: u32, pool: &'p mut Pool) -> &'p mut [u8] {
        let stream = self.stream.as_ref().expect("room was made");
        self.drafted = len;
        pool.bytes_mut(&stream.run, stream.at as usize, len as usize)
    }

    #[cold]
    #[inline(never)]
    fn make_room(&mut self, len: u32, stock: &mut Stock<'_>) -> Result<Result<(), NoRoom>, Broken> {
        if !self.has_place(stock)? {
            return Ok(Err(NoRoom::Ring));
        }
        if self.stream.as_ref().is_some_and(|stream| stream.has_room(len)) {
            return Ok(Ok(()));
        }
        self.close_stream(stock);
        let least = len.div_ceil(PAGE);
        let mut run = self.take(least, stock);
        if run.is_none() {
            self.reap(stock)?;
            run = self.take(least, stock);
        }
        match run {
            Some(run) => self.stream = Some(Stream { run, at: 0 }),
            None if least > stock.quota.saturating_sub(self.held) => return Ok(Err(NoRoom::Quota)),
            None => return Ok(Err(NoRoom::Pool)),
        }
        Ok(Ok(()))
    }

    /// Returns whether the ring has a place beyond the staged messages.
    fn has_place(&mut self, stock: &mut Stock<'_>) -> Result<bool, Broken> {
        if self.ring.known_room() as usize <= self.staged.len() {
            self.reap(stock)?;
        }
        Ok(self.ring.known_room() as usize > self.staged.len())
    }

    /// Takes a run of at least `least` pages, within the quota.
    fn take(&mut self, least: u32, stock: &mut Stock<'_>) -> Option<Run> {
        let most = stock.quota.saturating_sub(self.held);
        if least > most {
            return None;
        }
        let wanted = run_pages(stock.pool.left()).clamp(least, most);
        let run = stock.pool.take(wanted).or_else(|| stock.pool.take(least))?;
        self.held += run.pages();
        Some(run)
    }

    /// Stops filling the current run.
    fn close_stream(&mut self, stock: &mut Stock<'_>) {
        let Some(Stream { run, at }) = self.stream.take() else { return };
        self.drafted = 0;
        match at {
            0 => self.free(Held::Own(run), stock, false),
            _ => {
                let upto = self.end();
                self.sent.push_back(Sent { upto, held: Held::Own(run) });
            }
        }
    }

    /// Returns the ring index behind the last message, counting the staged ones.
    #[inline]
    fn end(&self) -> u32 {
        self.ring.tail().wrapping_add(u32::try_from(self.staged.len()).expect("a batch"))
    }

    /// Adds a message to the next batch.
    #[inline]
    fn stage(&mut self, message: Message<1>) {
        // Publish only when another message follows: a caller that stages no more than a batch decides itself when to
        // publish.
        if self.staged.is_full() {
            self.publish();
        }
        self.staged.push(message);
    }

    /// Returns the staged messages, each with its future index.
    pub(super) fn staged(&self) -> impl Iterator<Item = (u32, &Message<1>)> {
        let first = self.ring.tail();
        (0..).map(move |i| first.wrapping_add(i)).zip(&self.staged)
    }

    /// Drops the staged messages. Returns their number.
    pub(super) fn withdraw(&mut self) -> usize {
        let count = self.staged.len();
        self.staged.clear();
        let tail = self.ring.tail();
        for sent in self.sent.iter_mut().rev().take(count) {
            // An entry that ended behind the tail now ends at the tail.
            if sent.upto.wrapping_sub(tail) <= u32::try_from(BATCH).expect("a batch") {
                sent.upto = tail;
            }
        }
        count
    }

    /// Sends the first `len` bytes of the last [draft](Self::draft).
    #[inline]
    pub(super) fn post(&mut self, len: u32, flags: u32, pool: &Pool) {
        let stream = self.stream.as_mut().expect("there was a draft");
        assert!(len <= std::mem::take(&mut self.drafted), "{len} bytes were posted of a shorter draft");
        let piece = pool.piece(&stream.run, stream.at, len);
        stream.at += len.next_multiple_of(LINE);
        pool.fetch(&stream.run, stream.at as usize, len.min(AHEAD) as usize);
        self.stage(message_of(piece, flags));
    }

    /// Lets the reader see the posted messages.
    ///
    /// Publishes many at a time: a reader that waits for the next message holds its cache line, and each store must
    /// fetch the line back.
    #[inline]
    pub(super) fn publish(&mut self) {
        // `draft` makes room only where the ring is known to have some, without a look at the reader.
        let pushed = self.ring.push_batch(&self.staged);
        debug_assert_eq!(pushed, Ok(self.staged.len()), "there is room for what was staged");
        self.staged.clear();
    }

    /// Returns whether a run of `pages` pages can be [posted](Self::post_run).
    pub(super) fn takes(&mut self, pages: u32, stock: &mut Stock<'_>) -> Result<Result<(), NoRoom>, Broken> {
        if !self.has_place(stock)? {
            return Ok(Err(NoRoom::Ring));
        }
        if self.held + pages > stock.quota {
            self.reap(stock)?;
        }
        Ok(if self.held + pages > stock.quota { Err(NoRoom::Quota) } else { Ok(()) })
    }

    /// Sends the first `len` bytes of a run that was filled before its destination was known. The caller has asked
    /// whether the node [takes](Self::takes) it.
    pub(super) fn post_run(&mut self, run: Run, len: u32, flags: u32, stock: &mut Stock<'_>) {
        // Earlier frames end before this message.
        self.close_stream(stock);
        self.stage(message_of(stock.pool.piece(&run, 0, len), flags));
        self.held += run.pages();
        let upto = self.end();
        self.sent.push_back(Sent { upto, held: Held::Own(run) });
    }

    /// Sends a piece of a run that other nodes get as well.
    pub(super) fn share(
        &mut self,
        piece: Piece,
        which: SharedRun,
        flags: u32,
        stock: &mut Stock<'_>,
    ) -> Result<Result<(), NoRoom>, Broken> {
        let pages = stock.shared.run(which).pages();
        if let Err(none) = self.takes(pages, stock)? {
            return Ok(Err(none));
        }
        let is_last = |sent: &Sent| matches!(sent.held, Held::Shared(same) if same == which);
        if !self.sent.back().is_some_and(is_last) {
            // Earlier frames end before this message.
            self.close_stream(stock);
            stock.shared.hold(which);
            self.held += pages;
            self.sent.push_back(Sent { upto: 0, held: Held::Shared(which) });
        }
        self.stage(message_of(piece, flags));
        let upto = self.end();
        self.sent.back_mut().expect("just seen or made").upto = upto;
        Ok(Ok(()))
    }

    /// Returns how far the reader is, or `None` if it has read all that it can see.
    pub(super) fn behind(&mut self, stock: &mut Stock<'_>) -> Result<Option<u32>, Broken> {
        self.reap(stock)?;
        let unread = self.ring.capacity() - self.ring.known_room();
        Ok((unread > 0).then(|| self.ring.tail().wrapping_sub(unread)))
    }

    /// Returns whether messages wait to be published.
    pub(super) fn is_staging(&self) -> bool {
        !self.staged.is_empty()
    }

    /// Returns whether the reader holds any page.
    pub(super) fn holds(&self) -> bool {
        self.held > 0
    }

    /// Takes back all pages from the reader, even if it still reads them.
    pub(super) fn take_back(&mut self, stock: &mut Stock<'_>) {
        self.publish();
        self.close_stream(stock);
        while let Some(sent) = self.sent.pop_front() {
            self.free(sent.held, stock, true);
        }
    }

    /// Gives back the run that is being filled, if the reader has read all of it.
    pub(super) fn rest(&mut self, stock: &mut Stock<'_>) -> Result<bool, Broken> {
        let all_read = self.reap(stock)?;
        if all_read && let Some(Stream { run, .. }) = self.stream.take() {
            self.free(Held::Own(run), stock, false);
        }
        Ok(all_read)
    }
}
