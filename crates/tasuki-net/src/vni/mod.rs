//! The virtual network interface: Ethernet between nodes through memory, with nobody in between.
//!
//! Each node has an [estate](tasuki_shm::vni::estate) that its worker alone writes and the others read. Whoever sends looks up whose the
//! destination address is, writes the frame into its own pool, and a message of 16 bytes into its ring to that node; whoever receives copies the
//! frame out and says how far it is. So n nodes have n pools; a ring is one page, and costs memory once two nodes have talked.
//!
//! # Rules
//!
//! - **V1** Only a node's worker writes the node's estate: nobody locks anything, and a node can spoil nothing but its own frames.
//! - **V2** A node that talks to another has said so in its estate, and has then rung the other's bell with its number, before it counts on being
//!   heard. Rings of nodes that have not said so are not looked at.
//! - **V3** A frame's pages are its reader's until it has said that it has read it, or until they are taken back, and then the reader finds a
//!   generation that is another (P3, P4).
//! - **V4** What a reader may hold of a pool is bounded, and what it does not read in time is taken back: a slow one holds up itself alone.
//!
//! docs/design/vni.md says what is promised to whom, and how much memory it takes.

pub mod finish;
mod inbox;
pub mod offload;
mod outbox;

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
use tasuki_shm::bell::{Bell, Ringer};
use tasuki_shm::line::{Claims, Line};
use tasuki_shm::pool::{LINE, PAGE, Piece, Pool, Run};
use tasuki_shm::region::{PAGE_LEN, RegionError, Span};
use tasuki_shm::ring::{Consumer, Producer};
use tasuki_shm::sync::Relaxed;
use tasuki_shm::vni::NODES_MAX;
use tasuki_shm::vni::estate::{Estate, EstateFds, PeerEstate};
use tasuki_shm::wake::{Clapper, this_cpu};

use inbox::Inbox;
pub use inbox::{Breach, Incoming, TakenBack};
use offload::HEADER_LEN;
pub use outbox::NoRoom;
use outbox::{LeftBehind, Outbox, SharedRun, SharedRuns, Stock, WITH_HEADER, piece_of, run_pages};

use crate::port::Armed;

/// Bytes of the longest frame with its offload header: 64 KiB of IP behind Ethernet's header and two tags.
pub const PIECE_MAX: usize = HEADER_LEN + 14 + 8 + 65_536;

/// Pages that are taken at a time for frames of which nobody knows yet for whom they are.
const STAGED_PAGES: u32 = 64;

/// Frames that are taken from one ring before the next has its turn.
const BURST: usize = 32;

/// Rings that are looked at each time, for they were busy last.
const ACTIVE: usize = 4;

/// Looks in vain after which a ring is looked at only in turn with all others.
const IN_VAIN: u32 = 64;

/// Looks from one time to the next at which whoever has newly begun to talk is heard.
const HEAR_EVERY: u32 = 256;

/// How long a reader may read nothing of what it has before it is taken back.
pub const PATIENCE: Duration = Duration::from_secs(1);

/// How long nothing is sent before it is said that a ring need not be looked at; at the next tick its memory is given back.
pub const IDLE: Duration = Duration::from_secs(10);

/// What another node is reached by.
#[derive(Debug)]
pub struct Introduction {
    /// Its number.
    pub number: u16,
    /// Its estate, to be read.
    pub estate: EstateFds,
    /// The end of its bell's pipe that is written.
    pub bell: OwnedFd,
}

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
}

#[derive(Debug)]
struct Neighbour {
    /// To whom it says that it talks.
    talks: Claims<Span<Line>>,
    clapper: Clapper,
    outbox: Outbox,
    inbox: Inbox,
    /// Our line of it: what is counted stands there for strangers to read.
    line: Span<Line>,
    counts: Counts,
    /// Whether its ring is among those that we look at.
    is_heard: bool,
    /// Whether we have said that we talk to it.
    talk: Talk,
    /// Something was sent since it was last rung for.
    touched: bool,
    /// Why it is not listened to any more.
    breach: Option<Breach>,
    /// How far it was, if it had not read everything, and since when.
    progress: Option<(u32, Instant)>,
    /// How many frames it had been sent, and since when they are not more.
    quiet: (u64, Instant),
}

/// Whether a node knows that we talk to it (V2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Talk {
    /// Our ring to it is not looked at, and costs nothing.
    Silent,
    /// That it is to be looked at was said, and it was not rung for yet.
    Begun,
    /// It is looked at.
    Known,
    /// That it need not be looked at was said; its memory goes next.
    Ending,
}

/// A node's end of a VNI.
#[derive(Debug)]
pub struct Vni {
    number: u16,
    estate: Estate,
    pool: Pool,
    shared: SharedRuns,
    quota: u32,
    bell: Bell<Span<Line>>,
    ear: OwnedFd,
    neighbours: Vec<Option<Box<Neighbour>>>,
    /// Whose rings we look at.
    heard: Vec<u16>,
    /// Those of them that were busy last, and how often they were not since.
    active: ArrayVec<(u16, u32), ACTIVE>,
    next: usize,
    looks: u32,
    touched: Vec<u16>,
    /// What goes to several nodes lies here: the run that is being filled, and how many bytes of it are in use.
    common: Option<(SharedRun, u32)>,
    /// Where a frame is put before anybody knows for whom it is.
    staging: Option<Run>,
    /// What a predecessor sent to nodes that were not added yet.
    left: HashMap<u16, LeftBehind>,
}

/// Why a frame was not sent to a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// Nobody here knows such a node.
    #[error("there is no node {0} on this VNI")]
    NoSuchNode(u16),
    /// It is not a frame that could be sent.
    #[error("a frame of {len} bytes was to be sent, and a frame has 14 to {} bytes", PIECE_MAX - HEADER_LEN)]
    Length {
        /// Its length.
        len: usize,
    },
    /// There is no room for it.
    #[error(transparent)]
    NoRoom(#[from] NoRoom),
    /// The node broke a rule; it is not sent to any more.
    #[error("the node broke a rule and is not sent to any more: {0}")]
    Broken(Breach),
}

impl Vni {
    /// Node `number`'s end, on memory that belongs to the node; `ear` is the reading end of its bell's pipe. What a predecessor sent and was not
    /// read stays with its readers, which are then [added](Self::add); after the last, [`settle`](Self::settle) frees what is nobody's.
    pub fn new(number: u16, estate: EstateFds, ear: OwnedFd) -> Result<Self, RegionError> {
        assert!(number < NODES_MAX, "a VNI has no node {number}");
        let (estate, mut pool) = Estate::adopt(estate)?;
        let quota = pool.left() / 2;
        let mut shared = SharedRuns::default();
        let left = left_behind(&estate, &mut pool, &mut shared);
        let bell = Bell::go_on(estate.bell(), this_cpu());
        Ok(Vni {
            number,
            estate,
            pool,
            shared,
            quota,
            bell,
            ear,
            neighbours: (0..NODES_MAX).map(|_| None).collect(),
            heard: Vec::with_capacity(16),
            active: ArrayVec::new(),
            next: 0,
            looks: 0,
            touched: Vec::with_capacity(16),
            common: None,
            staging: None,
            left,
        })
    }

    /// This node's number.
    pub fn number(&self) -> u16 {
        self.number
    }

    /// Makes another node known, or the same one with other memory.
    pub fn add(&mut self, kit: Introduction) -> Result<(), RegionError> {
        let Introduction { number, estate, bell } = kit;
        assert!(number < NODES_MAX && number != self.number, "node {number} is no neighbour of node {}", self.number);
        let (estate, pool) = PeerEstate::map(&estate)?;
        if self.neighbours[usize::from(number)].is_some() {
            self.remove(number);
        }
        let line = self.estate.line_of(number);
        // What is ours to know stands in our own memory: a predecessor may have left it.
        let head = low_half(line[0].word(0).load(Relaxed));
        let inbox = Inbox::new(Consumer::new(estate.ring_to(self.number), line.clone(), head), pool);
        let mut left = self.left.remove(&number).unwrap_or_default();
        let mut stock = Stock { pool: &mut self.pool, shared: &mut self.shared, quota: self.quota };
        let talks = says_that_it_talks(&Claims::of(self.estate.talks()), number);
        let ring = || Producer::go_on(self.estate.ring_to(number), estate.line_of(self.number));
        let ring = match talks.then(ring).flatten() {
            Some(ring) => ring,
            None => {
                // Nobody looks at it, or it was for another node of that number.
                left.drain(..).for_each(|(_, which)| stock.shared.release(which, true, stock.pool));
                self.estate.give_back_ring(number)?;
                let head = low_half(estate.line_of(self.number).load(0, 0));
                Producer::new(self.estate.ring_to(number), estate.line_of(self.number), head)
            }
        };
        let outbox = Outbox::new(ring, Ringer::new(estate.bell()), left, &mut stock);
        let talk = if talks { Talk::Known } else { Talk::Silent };
        let neighbour = Neighbour {
            clapper: Clapper::from_peer(bell),
            outbox,
            inbox,
            line,
            counts: Counts::default(),
            is_heard: false,
            talk,
            touched: false,
            breach: None,
            progress: None,
            quiet: (0, Instant::now()),
            talks: estate.talks(),
        };
        if talk == Talk::Known {
            // A predecessor may have ended between saying that it talks and ringing.
            neighbour.clapper.ring_as(&name_of(self.number));
        }
        self.neighbours[usize::from(number)] = Some(Box::new(neighbour));
        self.listen_to(number);
        Ok(())
    }

    /// Forgets a node that is there no more: what it had not read is ours again, and what it sent and we have not read is gone.
    pub fn remove(&mut self, number: u16) {
        self.stop_listening_to(number);
        let Some(mut neighbour) = self.neighbours.get_mut(usize::from(number)).and_then(Option::take) else { return };
        let mut stock = Stock { pool: &mut self.pool, shared: &mut self.shared, quota: self.quota };
        neighbour.outbox.take_back(&mut stock);
        say_that_we_talk(&self.estate.talks(), number, false);
        self.touched.retain(|touched| *touched != number);
        // Fails only where there is nothing to give back, and then nothing is lost.
        let _ = self.estate.give_back_ring(number);
        neighbour.line[0].word(0).store(0, Relaxed);
    }

    /// All nodes that there are have been added: what a predecessor sent to others is free.
    pub fn settle(&mut self) {
        for (number, left) in self.left.drain() {
            say_that_we_talk(&self.estate.talks(), number, false);
            // Fails only where there is nothing to give back.
            let _ = self.estate.give_back_ring(number);
            self.estate.line_of(number)[0].word(0).store(0, Relaxed);
            left.into_iter().for_each(|(_, which)| self.shared.release(which, true, &mut self.pool));
        }
    }

    /// Looks at a node's ring from now on, if it says that it talks to us (V2).
    fn listen_to(&mut self, number: u16) {
        let us = self.number;
        let Some(neighbour) = self.neighbours.get_mut(usize::from(number)).and_then(Option::as_mut) else { return };
        if !neighbour.is_heard && says_that_it_talks(&neighbour.talks, us) && neighbour.breach.is_none() {
            neighbour.is_heard = true;
            self.heard.push(number);
        }
    }

    /// Hears who has rung.
    fn hear(&mut self) {
        let mut bytes = [0; 512];
        // Our end is ours alone, and does not block.
        let Ok(len @ 1..) = rustix::io::read(&self.ear, &mut bytes[..]) else { return };
        if len == bytes.len() {
            // There may be more, or none may have fitted: everybody is looked at.
            return (0..NODES_MAX).for_each(|number| self.listen_to(number));
        }
        let mut heard = &bytes[..len];
        while let [low, high, rest @ ..] = heard {
            match number_of([*low, *high]) {
                Some(number) => {
                    self.listen_to(number);
                    heard = rest;
                }
                // Somebody has written something else.
                None => heard = &heard[1..],
            }
        }
    }

    /// Room for a frame of `len` bytes to node `to`, to be filled and then [posted](Self::post); another draft takes its place. Bytes that are
    /// not written hold what was there before.
    #[inline]
    pub fn draft(&mut self, to: u16, len: usize) -> Result<&mut [u8], SendError> {
        let piece = u32::try_from(len).unwrap_or(u32::MAX);
        if !(14..=PIECE_MAX).contains(&len) {
            return Err(SendError::Length { len });
        }
        if !self.has_room(to, piece)? {
            // Others may have read what they were sent, and nobody has looked.
            self.reap();
            if !self.has_room(to, piece)? {
                return Err(self.no_room(to, NoRoom::Pool));
            }
        }
        let neighbour = self.neighbours[usize::from(to)].as_mut().expect("just seen");
        Ok(neighbour.outbox.drafted(piece, &mut self.pool))
    }

    /// Makes room for a piece to node `to`; says no if the pool has none.
    #[inline]
    fn has_room(&mut self, to: u16, piece: u32) -> Result<bool, SendError> {
        let neighbour = self.neighbours.get_mut(usize::from(to)).and_then(Option::as_mut);
        let Some(neighbour) = neighbour else { return Err(SendError::NoSuchNode(to)) };
        if let Some(breach) = neighbour.breach {
            return Err(SendError::Broken(breach));
        }
        let mut stock = Stock { pool: &mut self.pool, shared: &mut self.shared, quota: self.quota };
        match neighbour.outbox.draft(piece, &mut stock) {
            Ok(Ok(())) => Ok(true),
            Ok(Err(NoRoom::Pool)) => Ok(false),
            Ok(Err(none)) => Err(self.no_room(to, none)),
            Err(broken) => Err(SendError::Broken(neighbour.breaks(broken.into()))),
        }
    }

    #[cold]
    fn no_room(&mut self, to: u16, none: NoRoom) -> SendError {
        if let Some(neighbour) = &mut self.neighbours[usize::from(to)] {
            neighbour.counts.count(none);
        }
        none.into()
    }

    /// Sends the first `len` bytes of the last draft for node `to`. It sees them after the next [`flush`](Self::flush), or sooner.
    ///
    /// # Panics
    /// Without a draft for it, or if the draft was shorter.
    #[inline]
    pub fn post(&mut self, to: u16, len: usize, with_header: bool) {
        let neighbour = self.neighbours[usize::from(to)].as_mut().expect("there was a draft for it");
        let flags = if with_header { WITH_HEADER } else { 0 };
        let len = u32::try_from(len).expect("no longer than the draft");
        neighbour.announce(&self.estate, to);
        neighbour.outbox.post(len, flags, &self.pool);
        neighbour.count_sent(&mut self.touched, to);
    }

    /// Takes back from all nodes what they have read.
    #[cold]
    fn reap(&mut self) {
        let mut stock = Stock { pool: &mut self.pool, shared: &mut self.shared, quota: self.quota };
        for neighbour in self.neighbours.iter_mut().flatten().filter(|neighbour| neighbour.outbox.holds()) {
            if let Err(broken) = neighbour.outbox.behind(&mut stock) {
                neighbour.breaks(broken.into());
            }
        }
    }

    /// Room for the longest frame with its offload header, to be filled before anybody knows for whom, and then [posted](Self::post_staged); `None`
    /// if the pool has none.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "17")]
    pub fn stage(&mut self) -> Option<&mut [u8]> {
        const PAGES: u32 = PIECE_MAX.div_ceil(PAGE_LEN) as u32;
        if self.staging.as_ref().is_none_or(|run| run.pages() < PAGES) {
            if let Some(run) = self.staging.take() {
                self.pool.give(run);
            }
            // No more than leaves some for what was staged before.
            let pages = (self.pool.left() / 4).clamp(PAGES, STAGED_PAGES);
            self.staging = self.pool.take(pages).or_else(|| self.pool.take(PAGES));
            if self.staging.is_none() {
                self.reap();
                self.staging = self.pool.take(PAGES);
            }
        }
        let run = self.staging.as_ref()?;
        Some(self.pool.bytes_mut(run, 0, PIECE_MAX))
    }

    /// Sends the first `len` bytes of what was staged, a frame behind an offload header, to node `to`. Without room for it, it stays staged.
    #[inline]
    pub fn post_staged(&mut self, to: u16, len: usize) -> Result<(), SendError> {
        if !(HEADER_LEN + 14..=PIECE_MAX).contains(&len) {
            return Err(SendError::Length { len });
        }
        let neighbour = self.neighbours.get_mut(usize::from(to)).and_then(Option::as_mut);
        let Some(neighbour) = neighbour else { return Err(SendError::NoSuchNode(to)) };
        if let Some(breach) = neighbour.breach {
            return Err(SendError::Broken(breach));
        }
        let bytes = u32::try_from(len).expect("no longer than the longest");
        let pages = bytes.div_ceil(PAGE);
        let mut stock = Stock { pool: &mut self.pool, shared: &mut self.shared, quota: self.quota };
        match neighbour.outbox.takes(pages, &mut stock) {
            Ok(Ok(())) => {
                let Some(mut run) = self.staging.take() else { return Err(NoRoom::Pool.into()) };
                self.staging = (pages < run.pages()).then(|| stock.pool.split(&mut run, pages));
                neighbour.announce(&self.estate, to);
                neighbour.outbox.post_run(run, bytes, WITH_HEADER, &mut stock);
                neighbour.count_sent(&mut self.touched, to);
                Ok(())
            }
            Ok(Err(none)) => {
                neighbour.counts.count(none);
                Err(none.into())
            }
            Err(broken) => Err(SendError::Broken(neighbour.breaks(broken.into()))),
        }
    }

    /// Sends the first `len` bytes of what was staged to all these nodes; says how many got it.
    pub fn post_staged_to_all(&mut self, nodes: impl IntoIterator<Item = u16>, len: usize) -> Result<usize, SendError> {
        if !(HEADER_LEN + 14..=PIECE_MAX).contains(&len) {
            return Err(SendError::Length { len });
        }
        let Some(mut run) = self.staging.take() else { return Err(NoRoom::Pool.into()) };
        let bytes = u32::try_from(len).expect("no longer than the longest");
        let pages = bytes.div_ceil(PAGE);
        self.staging = (pages < run.pages()).then(|| self.pool.split(&mut run, pages));
        let piece = self.pool.piece(&run, 0, bytes);
        let which = self.shared.add(run);
        let count = self.share(nodes, piece, which, WITH_HEADER);
        self.shared.release(which, false, &mut self.pool);
        Ok(count)
    }

    /// Sends a frame of `len` bytes, which `fill` writes, to all these nodes; says how many got it. For the others it is counted why not.
    pub fn send_to_all(
        &mut self,
        nodes: impl IntoIterator<Item = u16>,
        len: usize,
        with_header: bool,
        fill: impl FnOnce(&mut [u8]),
    ) -> Result<usize, SendError> {
        if !(14..=PIECE_MAX).contains(&len) {
            return Err(SendError::Length { len });
        }
        let bytes = u32::try_from(len).expect("no longer than the longest");
        let Some((which, at)) = self.common_room(bytes) else { return Err(NoRoom::Pool.into()) };
        let run = self.shared.run(which);
        fill(self.pool.bytes_mut(run, at as usize, len));
        let piece = self.pool.piece(run, at, bytes);
        let flags = if with_header { WITH_HEADER } else { 0 };
        Ok(self.share(nodes, piece, which, flags))
    }

    /// Sends a piece to all these nodes; says how many got it.
    fn share(&mut self, nodes: impl IntoIterator<Item = u16>, piece: Piece, which: SharedRun, flags: u32) -> usize {
        let mut stock = Stock { pool: &mut self.pool, shared: &mut self.shared, quota: self.quota };
        let mut count = 0;
        for to in nodes {
            let Some(neighbour) = self.neighbours.get_mut(usize::from(to)).and_then(Option::as_mut) else { continue };
            if neighbour.breach.is_some() {
                continue;
            }
            neighbour.announce(&self.estate, to);
            match neighbour.outbox.share(piece, which, flags, &mut stock) {
                Ok(Ok(())) => {
                    count += 1;
                    neighbour.count_sent(&mut self.touched, to);
                }
                Ok(Err(none)) => neighbour.counts.count(none),
                Err(broken) => {
                    neighbour.breaks(broken.into());
                }
            }
        }
        count
    }

    /// Room for a frame that several nodes get, behind those before it.
    fn common_room(&mut self, len: u32) -> Option<(SharedRun, u32)> {
        if let Some((which, at)) = &mut self.common {
            let place = *at;
            if place + len <= self.shared.run(*which).pages() * PAGE {
                *at += len.next_multiple_of(LINE);
                return Some((*which, place));
            }
            self.shared.release(*which, false, &mut self.pool);
            self.common = None;
        }
        let least = len.div_ceil(PAGE);
        let mut run = self.pool.take(run_pages(self.pool.left()).max(least)).or_else(|| self.pool.take(least));
        if run.is_none() {
            self.reap();
            run = self.pool.take(least);
        }
        let run = run?;
        let which = self.shared.add(run);
        self.common = Some((which, len.next_multiple_of(LINE)));
        Some((which, 0))
    }

    /// Does what is due now and then, a few times a second: takes back everything from a reader that has read nothing for [`PATIENCE`] (V4), and
    /// gives back the memory of rings on which nothing went for [`IDLE`]. Says whether there is anything left that has to be looked at again.
    pub fn tick(&mut self, now: Instant) -> bool {
        let mut again = false;
        for (number, slot) in (0_u16..).zip(&mut self.neighbours) {
            let Some(neighbour) = slot else { continue };
            if neighbour.talk == Talk::Silent && !neighbour.outbox.holds() {
                continue;
            }
            let mut stock = Stock { pool: &mut self.pool, shared: &mut self.shared, quota: self.quota };
            match neighbour.outbox.behind(&mut stock) {
                Err(broken) => {
                    neighbour.breaks(broken.into());
                    neighbour.outbox.take_back(&mut stock);
                }
                Ok(Some(head)) => {
                    again = true;
                    match neighbour.progress {
                        Some((last, since)) if last == head => {
                            if now.saturating_duration_since(since) >= PATIENCE && neighbour.outbox.holds() {
                                neighbour.outbox.take_back(&mut stock);
                                neighbour.counts.taken_back += 1;
                                neighbour.publish();
                            }
                        }
                        _ => neighbour.progress = Some((head, now)),
                    }
                }
                Ok(None) => {
                    neighbour.progress = None;
                    again |= neighbour.rest(&self.estate, number, &mut stock, now);
                }
            }
        }
        again
    }

    /// Copies a frame, of 14 bytes at least, to node `to`.
    #[inline]
    pub fn send(&mut self, to: u16, frame: &[u8]) -> Result<(), SendError> {
        self.draft(to, frame.len())?.copy_from_slice(frame);
        self.post(to, frame.len(), false);
        Ok(())
    }

    /// Wakes whoever sleeps and was sent something since the last time.
    #[inline]
    pub fn flush(&mut self) {
        for to in self.touched.drain(..) {
            let Some(neighbour) = self.neighbours[usize::from(to)].as_mut() else { continue };
            neighbour.touched = false;
            neighbour.outbox.publish();
            // V2: whoever hears of us for the first time is told who we are.
            let is_new = std::mem::replace(&mut neighbour.talk, Talk::Known) != Talk::Known;
            if neighbour.outbox.ringer.must_ring() || is_new {
                neighbour.clapper.ring_as(&name_of(self.number));
            }
            neighbour.publish();
        }
    }

    /// Hands over frames that have come, up to a burst of each node's that was looked at; says how many. Does not wait.
    ///
    /// A look costs the same however many nodes there are: at the rings that were busy last, and at one more.
    #[inline]
    pub fn receive(&mut self, mut each: impl FnMut(Incoming<'_>)) -> usize {
        self.looks = self.looks.wrapping_add(1);
        if self.looks.is_multiple_of(HEAR_EVERY) {
            self.hear();
        }
        let mut count = 0;
        let mut i = 0;
        while i < self.active.len() {
            let (from, in_vain) = self.active[i];
            let came = self.receive_from(from, &mut each);
            count += came;
            if self.active.get(i).is_none_or(|(active, _)| *active != from) {
                // It broke a rule, and is not among them any more.
                continue;
            }
            let in_vain = if came > 0 { 0 } else { in_vain + 1 };
            if in_vain < IN_VAIN {
                self.active[i].1 = in_vain;
                i += 1;
            } else {
                self.active.swap_remove(i);
            }
        }
        if self.heard.len() > self.active.len() {
            count += self.receive_in_turn(&mut each);
        }
        count
    }

    /// The same from the next of all that talk to us.
    #[inline(never)]
    fn receive_in_turn(&mut self, each: &mut impl FnMut(Incoming<'_>)) -> usize {
        self.next = if self.next + 1 < self.heard.len() { self.next + 1 } else { 0 };
        let from = self.heard[self.next];
        if self.active.iter().any(|(active, _)| *active == from) {
            return 0;
        }
        let came = self.receive_from(from, each);
        if came > 0 {
            if self.active.is_full() {
                self.active.remove(0);
            }
            self.active.push((from, 0));
        } else {
            self.drop_if_silent(from);
        }
        came
    }

    fn receive_from(&mut self, from: u16, each: &mut impl FnMut(Incoming<'_>)) -> usize {
        let Some(neighbour) = self.neighbours[usize::from(from)].as_mut() else { return 0 };
        // V2: a ring of which this is not said is not looked at, for a look would cost memory.
        if !says_that_it_talks(&neighbour.talks, self.number) {
            return 0;
        }
        match neighbour.inbox.receive(from, BURST, each) {
            Ok(0) => 0,
            Ok(came) => {
                neighbour.counts.received += came as u64;
                neighbour.publish();
                came
            }
            Err(breach) => {
                neighbour.breaks(breach);
                self.stop_listening_to(from);
                0
            }
        }
    }

    /// Who has taken back that it talks to us is not looked at any more: its ring's memory goes back to the kernel.
    fn drop_if_silent(&mut self, from: u16) {
        let neighbour = self.neighbours[usize::from(from)].as_ref();
        if neighbour.is_none_or(|it| !says_that_it_talks(&it.talks, self.number)) {
            self.stop_listening_to(from);
        }
    }

    fn stop_listening_to(&mut self, from: u16) {
        self.heard.retain(|heard| *heard != from);
        self.active.retain(|(active, _)| *active != from);
        if let Some(neighbour) = self.neighbours.get_mut(usize::from(from)).and_then(Option::as_mut) {
            neighbour.is_heard = false;
        }
    }

    /// Says that whoever drives this node is about to sleep, and looks once more at everybody who talks to us.
    pub fn arm(&mut self) -> Armed {
        self.bell.park(this_cpu());
        let neighbours = &self.neighbours;
        let us = self.number;
        let talks_and_has = |it: &Neighbour| says_that_it_talks(&it.talks, us) && it.inbox.is_ready();
        let is_ready = |from: &u16| neighbours[usize::from(*from)].as_deref().is_some_and(talks_and_has);
        match self.heard.iter().find(|from| is_ready(from)) {
            Some(from) => {
                let at = self.heard.iter().position(|heard| heard == from).expect("just found");
                // The next look is at this one.
                self.next = at.checked_sub(1).unwrap_or(self.heard.len());
                self.bell.wake(this_cpu());
                Armed::Busy
            }
            None => Armed::Idle,
        }
    }

    /// Says that we are awake again, and hears who has rung.
    pub fn wake(&mut self) {
        self.bell.wake(this_cpu());
        self.hear();
    }

    /// The descriptor that becomes readable when somebody rings for an [armed](Self::arm) end.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.ear.as_fd()
    }

    /// What is counted of a neighbour.
    pub fn counts(&self, of: u16) -> Option<Counts> {
        self.neighbours.get(usize::from(of))?.as_ref().map(|neighbour| neighbour.counts)
    }

    /// Why a neighbour is not heard any more.
    pub fn breach(&self, of: u16) -> Option<Breach> {
        self.neighbours.get(usize::from(of))?.as_ref().and_then(|neighbour| neighbour.breach)
    }

    /// Pages of our pool that nobody holds.
    pub fn pages_left(&self) -> u32 {
        self.pool.left()
    }
}

impl Counts {
    /// As they stand in a node's line, from word 1 on: word 0 says how far its ring was read.
    fn words(&self) -> [u64; 6] {
        let Counts { received, sent, ring_full, over_quota, pool_full, taken_back } = *self;
        [received, sent, ring_full, over_quota, pool_full, taken_back]
    }

    fn count(&mut self, none: NoRoom) {
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
    fn announce(&mut self, estate: &Estate, number: u16) {
        if matches!(self.talk, Talk::Silent | Talk::Ending) {
            say_that_we_talk(&estate.talks(), number, true);
            self.talk = Talk::Begun;
        }
    }

    #[inline]
    fn count_sent(&mut self, touched: &mut Vec<u16>, number: u16) {
        self.counts.sent += 1;
        if !std::mem::replace(&mut self.touched, true) {
            touched.push(number);
        }
    }

    /// Everything was read. Says whether its ring's memory is still to be given back.
    fn rest(&mut self, estate: &Estate, number: u16, stock: &mut Stock<'_>, now: Instant) -> bool {
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
                say_that_we_talk(&estate.talks(), number, false);
                self.talk = Talk::Silent;
                false
            }
            Talk::Known if now.saturating_duration_since(self.quiet.1) < IDLE => true,
            Talk::Known => {
                say_that_we_talk(&estate.talks(), number, false);
                self.talk = Talk::Ending;
                true
            }
            Talk::Ending => {
                // Fails only where there is nothing to give back, and then nothing is lost.
                let _ = estate.give_back_ring(number);
                self.talk = Talk::Silent;
                false
            }
        }
    }

    fn publish(&self) {
        for (i, count) in self.counts.words().into_iter().enumerate() {
            self.line[0].word(i + 1).store(count, Relaxed);
        }
    }

    #[cold]
    fn breaks(&mut self, breach: Breach) -> Breach {
        *self.breach.get_or_insert(breach)
    }
}

/// Takes the pages in which frames lie that a predecessor has sent, whoever has read them.
fn left_behind(estate: &Estate, pool: &mut Pool, shared: &mut SharedRuns) -> HashMap<u16, LeftBehind> {
    let mut pages = HashMap::new();
    let mut left = HashMap::new();
    let talks = Claims::of(estate.talks());
    for to in (0..NODES_MAX).filter(|&to| says_that_it_talks(&talks, to)) {
        let messages = Producer::<_, Span<Line>, 1>::left_behind(&estate.ring_to(to));
        let of_node: &mut LeftBehind = left.entry(to).or_default();
        for (index, message) in messages {
            let piece = piece_of(&message);
            let last = piece.offset.saturating_add(piece.len.saturating_sub(1)) / PAGE;
            for page in piece.offset / PAGE..=last {
                match pages.get(&page) {
                    Some(&which) => {
                        shared.hold(which);
                        of_node.push((index, which));
                    }
                    None => {
                        if let Some(run) = pool.take_at(page, 1) {
                            let which = shared.add(run);
                            pages.insert(page, which);
                            of_node.push((index, which));
                        }
                    }
                }
            }
        }
    }
    left
}

/// A node's number as it stands in the pipe of a bell: two bytes that are told from one another, so that whoever writes something else there
/// spoils nobody's.
fn name_of(number: u16) -> [u8; 2] {
    let [low, high] = [number & 0x7f, number >> 7].map(|half| half.to_le_bytes()[0]);
    [low, high | 0x80]
}

/// The reverse.
fn number_of(name: [u8; 2]) -> Option<u16> {
    let [low, high] = name;
    (low < 0x80 && high >= 0x80).then(|| u16::from(high & 0x7f) << 7 | u16::from(low))
}

/// The low half of a word.
#[expect(clippy::cast_possible_truncation, reason = "the low half is what is meant")]
fn low_half(word: u64) -> u32 {
    word as u32
}

/// The line and the word of a node's bit in a set, and the bit.
fn bit_of(node: u16) -> (usize, usize, u64) {
    let word = usize::from(node / 64);
    (word / 8, word % 8, 1 << (node % 64))
}

fn says_that_it_talks(talks: &Claims<Span<Line>>, to: u16) -> bool {
    let (line, word, bit) = bit_of(to);
    talks.load(line, word) & bit != 0
}

fn say_that_we_talk(talks: &Span<Line>, to: u16, yes: bool) {
    let (line, word, bit) = bit_of(to);
    let word = talks[line].word(word);
    let others = word.load(Relaxed) & !bit;
    word.store(if yes { others | bit } else { others }, Relaxed);
}
