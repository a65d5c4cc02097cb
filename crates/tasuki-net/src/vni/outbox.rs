//! What we send to one node: a ring of messages in our node memory, and the runs of our pool in which their frames lie.

use std::collections::VecDeque;
use std::num::NonZeroU32;

use arrayvec::ArrayVec;

use tasuki_shm::bell::Ringer;
use tasuki_shm::line::Line;
use tasuki_shm::pool::{LINE, PAGE, Piece, Pool, Run};
use tasuki_shm::region::Span;
use tasuki_shm::ring::{Broken, Message, Producer};

/// Most pages of a run for frames that need fewer: it is taken once for many frames.
const RUN_PAGES: u32 = 16;

/// Pages of the next run from a pool with so many left: fewer as it empties, so that there is some for everybody who is talked to.
pub(super) fn run_pages(left: u32) -> u32 {
    (left / 32).clamp(1, RUN_PAGES)
}

/// Most messages that become visible at a time.
const BATCH: usize = 32;

/// Bit of a message's tag: the piece begins with an [offload header](super::offload).
pub(super) const WITH_HEADER: u32 = 1 << 24;

/// Bits of a message's tag that say how many bytes the piece has.
pub(super) const LEN_MASK: u32 = (1 << 24) - 1;

/// A message on a ring: where a frame lies.
pub(super) fn message_of(piece: Piece, flags: u32) -> Message<1> {
    let tag = NonZeroU32::new(piece.len | flags).expect("a frame has bytes");
    Message { tag, words: [u64::from(piece.generation) << 32 | u64::from(piece.offset)] }
}

/// The reverse.
#[expect(clippy::cast_possible_truncation, reason = "the halves of a word")]
#[inline]
pub(super) fn piece_of(message: &Message<1>) -> Piece {
    let [word] = message.words;
    Piece { offset: word as u32, len: message.tag.get() & LEN_MASK, generation: (word >> 32) as u32 }
}

/// Runs whose frames went to several nodes.
#[derive(Debug, Default)]
pub(super) struct SharedRuns(Vec<Option<Shared>>);

#[derive(Debug)]
struct Shared {
    run: Run,
    /// Nodes that have not read all of it, and we while we fill it.
    holders: u32,
    /// One of them was taken it by force, and may still be reading.
    late: bool,
}

/// Which of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SharedRun(usize);

impl SharedRuns {
    /// A run that nobody but us holds, as yet.
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

    /// One less holds it. `late`: by force, and it may go on reading.
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

/// A run that a reader has not done with.
#[derive(Debug)]
enum Held {
    Own(Run),
    Shared(SharedRun),
}

/// What there is to a node's rest when it reads no more: the index behind the last frame in a run, and the run.
#[derive(Debug)]
struct Sent {
    upto: u32,
    held: Held,
}

/// Bytes behind a frame that are asked for when it is posted, at most: the next one's, if it is as long (docs/decisions/0015-a-pool-goes-round.md). The
/// CPU finds the rest of a longer one by itself.
const AHEAD: u32 = 2048;

/// The run that is being filled.
#[derive(Debug)]
struct Stream {
    run: Run,
    /// Bytes of it that are in use.
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
    /// The reader holds as much of the pool as one may.
    #[error("the node has not read all that it may have of the pool")]
    Quota,
    /// The pool has no room for so long a frame: others hold it.
    #[error("the pool has no room for a frame of this length")]
    Pool,
}

/// What we send to one node.
#[derive(Debug)]
pub(super) struct Outbox {
    ring: Producer<Span<Line>, Span<Line>, 1>,
    pub(super) ringer: Ringer<Span<Line>>,
    stream: Option<Stream>,
    /// Bytes of the stream that were asked for and are not posted yet.
    drafted: u32,
    sent: VecDeque<Sent>,
    /// Pages that the reader holds, or that are being filled for it.
    held: u32,
    /// What was posted and is not to be seen yet.
    staged: ArrayVec<Message<1>, BATCH>,
}

/// What an outbox needs of the node it belongs to.
#[derive(Debug)]
pub(super) struct Stock<'a> {
    pub(super) pool: &'a mut Pool,
    pub(super) shared: &'a mut SharedRuns,
    /// Pages of the pool that one reader may hold.
    pub(super) quota: u32,
}

/// Runs with frames that a predecessor sent to a node, each with the frame's index in the ring.
pub(super) type LeftBehind = Vec<(u32, SharedRun)>;

impl Outbox {
    /// Goes on with a ring in which a predecessor may have left frames, in the runs `left`.
    pub(super) fn new(
        ring: Producer<Span<Line>, Span<Line>, 1>,
        ringer: Ringer<Span<Line>>,
        mut left: LeftBehind,
        stock: &mut Stock<'_>,
    ) -> Self {
        let sent = VecDeque::with_capacity(64);
        let mut outbox = Outbox { ring, ringer, stream: None, drafted: 0, sent, held: 0, staged: ArrayVec::new() };
        let unread = outbox.ring.capacity() - outbox.ring.known_room();
        let head = outbox.ring.tail().wrapping_sub(unread);
        left.sort_by_key(|(index, _)| index.wrapping_sub(head));
        for (index, which) in left {
            if index.wrapping_sub(head) < unread {
                let upto = index.wrapping_add(1);
                match outbox.sent.back_mut() {
                    // The next frame in the same page: it is held once.
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

    /// Looks how far the reader is, and takes back what it has done with. Says whether it has read everything.
    fn reap(&mut self, stock: &mut Stock<'_>) -> Result<bool, Broken> {
        let head = self.ring.look()?;
        // Indices wrap: an entry is done with unless its end lies between head and what is staged last.
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

    /// The room that was [made](Self::draft).
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

    /// Whether there is a place in the ring beside what is staged.
    fn has_place(&mut self, stock: &mut Stock<'_>) -> Result<bool, Broken> {
        if self.ring.known_room() as usize <= self.staged.len() {
            self.reap(stock)?;
        }
        Ok(self.ring.known_room() as usize > self.staged.len())
    }

    /// A run of at least so many pages, within the quota.
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

    /// What is in the run that is being filled is all that will be.
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

    /// The index behind the last message, if what is staged is published.
    #[inline]
    fn end(&self) -> u32 {
        self.ring.tail().wrapping_add(u32::try_from(self.staged.len()).expect("a batch"))
    }

    /// Has a message published with the next batch.
    #[inline]
    fn stage(&mut self, message: Message<1>) {
        // Not before there is another: whoever stages no more than a batch says himself when it is published.
        if self.staged.is_full() {
            self.publish();
        }
        self.staged.push(message);
    }

    /// What is staged, with the index that it will have.
    pub(super) fn staged(&self) -> impl Iterator<Item = (u32, &Message<1>)> {
        let first = self.ring.tail();
        (0..).map(move |i| first.wrapping_add(i)).zip(&self.staged)
    }

    /// What is staged is not published after all. Says how much that was.
    pub(super) fn withdraw(&mut self) -> usize {
        let count = self.staged.len();
        self.staged.clear();
        let tail = self.ring.tail();
        for sent in self.sent.iter_mut().rev().take(count) {
            // What ends behind the tail ends there.
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

    /// Lets the reader see what was posted.
    ///
    /// Many at a time, for a reader that waits for the next message has its line, and each store to it has to fetch it back.
    #[inline]
    pub(super) fn publish(&mut self) {
        // A draft is given only where there is room, known without a look at the reader.
        let pushed = self.ring.push_batch(&self.staged);
        debug_assert_eq!(pushed, Ok(self.staged.len()), "there is room for what was staged");
        self.staged.clear();
    }

    /// Whether a run of so many pages can be [posted](Self::post_run).
    pub(super) fn takes(&mut self, pages: u32, stock: &mut Stock<'_>) -> Result<Result<(), NoRoom>, Broken> {
        if !self.has_place(stock)? {
            return Ok(Err(NoRoom::Ring));
        }
        if self.held + pages > stock.quota {
            self.reap(stock)?;
        }
        Ok(if self.held + pages > stock.quota { Err(NoRoom::Quota) } else { Ok(()) })
    }

    /// Sends the first `len` bytes of a run that was filled before anybody knew for whom, after it was asked whether the node
    /// [takes](Self::takes) it.
    pub(super) fn post_run(&mut self, run: Run, len: u32, flags: u32, stock: &mut Stock<'_>) {
        // What was posted before ends before.
        self.close_stream(stock);
        self.stage(message_of(stock.pool.piece(&run, 0, len), flags));
        self.held += run.pages();
        let upto = self.end();
        self.sent.push_back(Sent { upto, held: Held::Own(run) });
    }

    /// Sends a piece of a run that others get as well.
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
            // What was posted before ends before.
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

    /// How far the reader is, if it has not read everything.
    pub(super) fn behind(&mut self, stock: &mut Stock<'_>) -> Result<Option<u32>, Broken> {
        let all_read = self.reap(stock)?;
        let unread = self.ring.capacity() - self.ring.known_room();
        Ok((!all_read).then(|| self.ring.tail().wrapping_sub(unread)))
    }

    /// Whether the reader holds any page.
    pub(super) fn holds(&self) -> bool {
        self.held > 0
    }

    /// Takes back all pages that the reader has, whatever it is doing with them.
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
