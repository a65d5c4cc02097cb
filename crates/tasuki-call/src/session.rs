//! The server's side of one client.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tasuki_shm::arena::{Arena, Detach, PeerArena, PeerSlot, Slot};
use tasuki_shm::bell::{Bell, PeerBell, State};
use tasuki_shm::crash;
use tasuki_shm::line::Line;
use tasuki_shm::region::{PeerRegion, RegionError, Span};
use tasuki_shm::ring::{Broken, Consumer, Message, Producer};
use tasuki_shm::slots::Census;
use tasuki_shm::wake::{BellSender, bell_pipe, drain, this_cpu};

use super::message::{Cargo, FromClient, FromServer, Inline};
use super::segment::{Layout, PeerSegment, Segment, SegmentError};
use super::wire::Hello;
use super::{Body, Breach, CallError, STATUS_DROPPED, STATUS_REPLY_TOO_LARGE};
use crate::enforce::Enforcer;

/// Number of requests served for one client before the next client has its turn.
const BATCH: u32 = 64;

/// Number of rings after which the server empties a client's bell pipe.
const RINGS_BEFORE_DRAIN: u32 = 4096;

/// Identifies a client among all that this server has had.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ClientId {
    pub(crate) index: u32,
    pub(crate) life: u32,
}

/// Identity of a client, as the kernel reports it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Peer {
    pub id: ClientId,
    pub uid: u32,
}

/// Collects dropped deferred requests, and wakes the server for them.
#[derive(Debug)]
pub(crate) struct Desk {
    pub dropped: Mutex<Vec<(ClientId, Open)>>,
    pub bell_sender: BellSender,
}

impl Desk {
    pub fn take_dropped(&self) -> Vec<(ClientId, Open)> {
        std::mem::take(&mut *self.dropped.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A request that has no answer yet.
#[derive(Debug)]
pub(crate) struct Open {
    call: u64,
    method: u16,
    body: Body,
}

impl Open {
    const NONE: Open = Open { call: 0, method: 0, body: Body::Inline(Inline::EMPTY) };

    #[inline]
    fn take_slot(&mut self) -> Option<PeerSlot> {
        match &self.body {
            Body::Inline(_) => None,
            Body::Slot(_) => match std::mem::replace(&mut self.body, Body::Inline(Inline::EMPTY)) {
                Body::Inline(_) => None,
                Body::Slot(slot) => Some(slot),
            },
        }
    }
}

/// The server's state for one client.
#[derive(Debug)]
pub(crate) struct Session {
    pub peer: Peer,
    segment: Segment,
    /// Dropped before the pipes. When the client sees the pipes end, it must be able to register its arena with the
    /// next server.
    enforcer: Option<Enforcer>,
    requests: Consumer<Span<Line>, Span<Line>>,
    results: Producer<Span<Line>, Span<Line>>,
    bell: Bell<Span<Line>>,
    peer_bell: PeerBell<Span<Line>>,
    arena: Arc<PeerArena>,
    replies: Arena,
    /// Requests begun and not answered. The server reserves as many entries of the result ring for their answers.
    unanswered: u32,
    /// Whether results were pushed since the last look at the client's bell.
    unrung: bool,
    /// Rings counted since the bell pipe was last emptied.
    rings: u32,
    /// Whether the server polls this client's request ring.
    pub hot: bool,
    /// Whether the client made a request since the last look at the clock.
    busy: bool,
    /// Time of the last request, as precise as the looks at the clock.
    last_active: Instant,
    bell_sender: BellSender,
    pipe: OwnedFd,
}

/// Descriptors for a new client, in the order of the Welcome packet.
#[derive(Debug)]
pub(crate) struct Handover {
    pub ring_end: OwnedFd,
    pub sleep_end: OwnedFd,
}

/// Reasons why a session cannot be made.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SessionError {
    #[error(transparent)]
    Theirs(#[from] SegmentError),
    #[error(transparent)]
    Memory(#[from] RegionError),
    #[error("no descriptors are left for one more client")]
    Pipes(#[from] io::Error),
}

impl Session {
    pub fn new(
        peer: Peer,
        hello: &Hello,
        theirs: [BorrowedFd<'_>; 2],
        enforcer: Option<Enforcer>,
    ) -> Result<(Self, Handover), SessionError> {
        let [segment, arena] = theirs;
        let client = PeerSegment::map(segment, Layout { ring: hello.ring, slots: hello.arena.count })?;
        let arena = PeerRegion::map(arena, hello.arena.len()).map_err(SegmentError::Memory)?;
        let arena = PeerArena::new(arena, hello.arena).map_err(SegmentError::Memory)?;
        let segment = Segment::create("tasuki-server", Layout { ring: hello.ring, slots: hello.replies.count })?;
        let replies = Arena::create("tasuki-replies", hello.replies, segment.table(), Detach::Move)?;
        let (pipe, ring_end) = bell_pipe()?;
        let (sleep_end, bell_sender) = bell_pipe()?;
        let mut bell = Bell::new(segment.bell(), this_cpu());
        // Cold until the client's first ring: an idle client costs nothing.
        bell.park(this_cpu());
        let session = Session {
            peer,
            requests: Consumer::new(client.ring(), segment.head(), hello.first),
            results: Producer::new(segment.ring(), client.head(), 0),
            bell,
            peer_bell: PeerBell::new(client.bell()),
            enforcer,
            arena,
            replies,
            unanswered: 0,
            unrung: false,
            rings: 0,
            hot: false,
            busy: false,
            last_active: Instant::now(),
            bell_sender: BellSender::own(bell_sender),
            pipe,
            segment,
        };
        Ok((session, Handover { ring_end, sleep_end }))
    }

    pub fn memory(&self) -> [BorrowedFd<'_>; 2] {
        [self.segment.fd(), self.replies.region().fd()]
    }

    /// Returns the pipe on which the client's rings arrive.
    pub fn pipe(&self) -> BorrowedFd<'_> {
        self.pipe.as_fd()
    }

    pub fn unanswered(&self) -> u32 {
        self.unanswered
    }

    pub fn replies(&self) -> Census {
        self.replies.census()
    }

    /// Returns for how long the client has made no request, at time `now`.
    pub fn idle_at(&mut self, now: Instant) -> Duration {
        if std::mem::take(&mut self.busy) {
            self.last_active = now;
        }
        now.duration_since(self.last_active)
    }

    /// Notes that the client has rung.
    pub fn heard(&mut self, now: Instant) {
        self.last_active = now;
        self.rings += 1;
        if self.rings >= RINGS_BEFORE_DRAIN {
            drain(self.pipe.as_fd());
            self.rings = 0;
        }
        self.bell.spin(this_cpu());
    }

    /// Publishes that this client must ring from now on. If a request came meanwhile, takes that back and returns
    /// false.
    pub fn park(&mut self) -> Result<bool, Breach> {
        self.bell.park(this_cpu());
        crash::point("server.park.parked");
        // B1: the second look.
        if self.requests.is_ready() && self.room()? > 0 {
            self.bell.spin(this_cpu());
            return Ok(false);
        }
        Ok(true)
    }

    /// Whether a request is waiting.
    #[inline]
    pub fn is_ready(&self) -> bool {
        self.requests.is_ready()
    }

    /// Whether the client last ran on `cpu`, according to its bell.
    pub fn is_on(&self, cpu: u32) -> bool {
        self.peer_bell.published().cpu == cpu
    }

    /// Returns how many requests the server can begin: each begun request reserves an entry of the result ring for
    /// its answer.
    ///
    /// A client whose calls in flight fit its ring never causes a 0. If a client does not fetch its results, the
    /// server does not wait: it turns to other clients.
    #[inline]
    fn room(&mut self) -> Result<u32, Broken> {
        if self.results.known_room() <= self.unanswered {
            self.results.look()?;
        }
        Ok(self.results.known_room().saturating_sub(self.unanswered))
    }

    /// Serves the waiting requests, up to a batch. Returns the number served.
    pub fn serve<H: FnMut(Request<'_>)>(&mut self, desk: &Arc<Desk>, handler: &mut H) -> Result<u32, Breach> {
        let batch = Batch(self);
        let session = &mut *batch.0;
        let mut served = 0;
        while served < BATCH && session.room()? > 0 {
            // One by one: a look at the next line before serving this request would wait for the client's cache.
            let Some(message) = session.requests.pop()? else { break };
            crash::point("server.serve.popped");
            // Retire the request before it runs. A retired request has begun, so no successor will run it again.
            session.requests.retire();
            crash::point("server.serve.begun");
            session.begin(&message, desk, handler)?;
            served += 1;
        }
        session.busy |= served > 0;
        Ok(served)
    }

    #[inline(always)]
    fn begin<H: FnMut(Request<'_>)>(
        &mut self,
        message: &Message,
        desk: &Arc<Desk>,
        handler: &mut H,
    ) -> Result<(), Breach> {
        let (call, method, cargo) = match FromClient::decode(message)? {
            FromClient::Request { call, method, cargo } => (call, method, cargo),
            FromClient::Return { id } => {
                drop(self.replies.attach_named(id)?);
                return Ok(());
            }
        };
        let body = self.unpack(cargo)?;
        self.unanswered += 1;
        handler(Request { open: Open { call, method, body }, answered: false, session: self, desk, alone: false });
        // A sleeping client must not wait for the rest of the batch.
        if self.unrung && self.peer_bell.published().state == State::Parked {
            self.flush();
        }
        Ok(())
    }

    #[inline(always)]
    fn unpack(&mut self, cargo: Cargo) -> Result<Body, Breach> {
        Ok(match cargo {
            Cargo::Bytes(inline) => Body::Inline(inline),
            Cargo::Slot { id, len } => {
                self.arena.prefetch(id, len);
                let slot = self.arena.accept(id, len)?;
                if let Some(enforcer) = &self.enforcer {
                    enforcer.protect(slot.offset()).map_err(|_| Breach::Detach)?;
                    crash::point("server.serve.protected");
                }
                Body::Slot(slot)
            }
        })
    }

    /// Answers, and gives back the slot that the request came in. The result ring has an entry reserved for the
    /// answer.
    #[inline(always)]
    fn answer(&mut self, call: u64, slot: Option<PeerSlot>, status: u16, cargo: Cargo) {
        if let Some(slot) = slot {
            if let Some(enforcer) = &self.enforcer {
                // Fails if the client is dead or has unmapped its arena. Then the slot is no longer needed.
                let _ = enforcer.release(slot.offset());
            }
            slot.surrender();
        }
        let pushed = self.results.push(&FromServer { call, status, cargo }.encode());
        debug_assert!(pushed.is_ok(), "an entry was kept for the answer");
        crash::point("server.return.pushed");
        self.unanswered -= 1;
        self.unrung = true;
    }

    pub fn answer_dropped(&mut self, mut open: Open) {
        self.answer(open.call, open.take_slot(), STATUS_DROPPED, Cargo::Bytes(Inline::EMPTY));
        self.flush();
    }

    /// Wakes the client if it sleeps and has results.
    #[inline]
    pub fn flush(&mut self) {
        if std::mem::take(&mut self.unrung) && self.peer_bell.must_ring() {
            self.bell_sender.ring();
            crash::point("server.return.rung");
        }
    }

    /// Publishes the rule that the client broke. The client sees its connection end next.
    pub fn expel(&self, breach: Breach) {
        self.segment.verdict()[0].word(1).store(breach.code(), tasuki_shm::sync::Release);
    }
}

/// Wakes the client at the end of a batch, even if that is a panic of the handler which the program catches.
struct Batch<'a>(&'a mut Session);

impl Drop for Batch<'_> {
    fn drop(&mut self) {
        self.0.flush();
    }
}

/// A request to answer. Dropping it answers with [`STATUS_DROPPED`](super::STATUS_DROPPED).
#[derive(Debug)]
pub struct Request<'a> {
    open: Open,
    /// Whether the request was answered or deferred.
    answered: bool,
    session: &'a mut Session,
    desk: &'a Arc<Desk>,
    /// Whether the answer is sent outside a batch. At the end of a batch the server wakes the client; outside one,
    /// `finish` must.
    alone: bool,
}

/// The answer did not fit into a reply slot, or no slot was free. The client got
/// [`STATUS_REPLY_TOO_LARGE`](super::STATUS_REPLY_TOO_LARGE) instead.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the answer has {len} bytes, but a reply slot holds {max} and {free} are free; the client must connect with larger or more reply slots"
)]
pub struct ReplyTooLarge {
    /// Length of the answer in bytes.
    pub len: usize,
    /// Bytes in a reply slot.
    pub max: usize,
    /// Number of free reply slots.
    pub free: u32,
}

impl<'a> Request<'a> {
    pub(crate) fn resume(open: Open, session: &'a mut Session, desk: &'a Arc<Desk>) -> Self {
        Request { open, answered: false, session, desk, alone: true }
    }

    fn body(&self) -> &Body {
        &self.open.body
    }

    /// Returns the method that the client calls.
    pub fn method(&self) -> u16 {
        self.open.method
    }

    /// Returns the client that made the request.
    pub fn client(&self) -> ClientId {
        self.session.peer.id
    }

    /// Returns the user id that the client had when it connected.
    pub fn uid(&self) -> u32 {
        self.session.peer.uid
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.body().len()
    }

    /// Whether the request has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the bytes, if they came inside the ring entry. They are already a private copy.
    pub fn inline(&self) -> Option<&[u8]> {
        self.body().inline()
    }

    /// Returns the client's slot that the request came in, if it came in one.
    pub fn slot(&self) -> Option<&PeerSlot> {
        self.body().slot()
    }

    /// Returns a private copy of the bytes.
    pub fn to_vec(&self) -> Vec<u8> {
        self.body().to_vec()
    }

    /// Copies the first bytes into `into`, as many as exist and fit. Returns the number copied.
    #[inline]
    pub fn copy_to(&self, into: &mut [u8]) -> usize {
        self.body().copy_to(into)
    }

    /// Takes a slot for a large answer, to be sent with [`reply_slot`](Self::reply_slot).
    #[inline]
    pub fn take_slot(&self) -> Result<Slot, CallError> {
        let count = self.session.replies.geometry().count;
        self.session.replies.take().ok_or(CallError::NoSlot { count })
    }

    /// Answers with `bytes`. Up to [`INLINE_MAX`](super::INLINE_MAX) bytes travel in the ring; longer answers are
    /// copied into a slot.
    #[inline]
    pub fn reply(mut self, bytes: &[u8]) -> Result<(), ReplyTooLarge> {
        if let Some(inline) = Inline::new(bytes) {
            self.finish(0, Cargo::Bytes(inline));
            return Ok(());
        }
        let geometry = self.session.replies.geometry();
        match self.session.replies.take() {
            Some(mut slot) if bytes.len() <= slot.len() => {
                slot.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
                self.send_slot(slot, bytes.len());
                Ok(())
            }
            _ => {
                self.finish(STATUS_REPLY_TOO_LARGE, Cargo::Bytes(Inline::EMPTY));
                let free = self.session.replies.census().free;
                Err(ReplyTooLarge { len: bytes.len(), max: geometry.slot_len as usize, free })
            }
        }
    }

    /// Answers with the first `len` bytes of `slot`, which [`take_slot`](Self::take_slot) returned for this client.
    ///
    /// # Panics
    /// If the slot was taken for another client, or holds fewer than `len` bytes.
    pub fn reply_slot(mut self, slot: Slot, len: usize) {
        assert!(self.session.replies.owns(&slot), "a reply slot belongs to the client it was taken for");
        assert!(len <= slot.len(), "a slot of {} bytes cannot hold {len}", slot.len());
        self.send_slot(slot, len);
    }

    fn send_slot(&mut self, slot: Slot, len: usize) {
        // Replies use `Detach::Move`, whose lend cannot fail.
        let lent = self
            .session
            .replies
            .lend(slot)
            .map_err(|(_, error)| error)
            .expect("lending by move asks nothing of the kernel");
        crash::point("server.return.lent");
        self.finish(0, Cargo::Slot { id: lent.id(), len: len as u64 });
    }

    /// Answers with an error status of the server's own, other than 0, and a note of up to
    /// [`INLINE_MAX`](super::INLINE_MAX) bytes. Cuts off the rest of the note.
    ///
    /// # Panics
    /// If `status` is 0, which means success.
    pub fn refuse(mut self, status: impl Into<u16>, note: &str) {
        let status = status.into();
        assert_ne!(status, 0, "status 0 means success");
        let note = &note[..note.floor_char_boundary(super::INLINE_MAX)];
        self.finish(status, Cargo::Bytes(Inline::new(note.as_bytes()).expect("cut to fit")));
    }

    /// Defers the answer: [`Server::resume`](super::Server::resume) returns the request later.
    pub fn defer(mut self) -> Deferred {
        self.answered = true;
        let open = std::mem::replace(&mut self.open, Open::NONE);
        Deferred { client: self.session.peer.id, open: Some(open), desk: Arc::clone(self.desk) }
    }

    #[inline(always)]
    fn finish(&mut self, status: u16, cargo: Cargo) {
        self.answered = true;
        let slot = self.open.take_slot();
        self.session.answer(self.open.call, slot, status, cargo);
        if self.alone {
            self.session.flush();
        }
    }
}

impl Drop for Request<'_> {
    fn drop(&mut self) {
        if !self.answered {
            self.finish(STATUS_DROPPED, Cargo::Bytes(Inline::EMPTY));
        }
    }
}

/// A request whose answer is deferred. Dropping it answers with [`STATUS_DROPPED`](super::STATUS_DROPPED).
#[derive(Debug)]
#[must_use = "a deferred request that is dropped is answered with STATUS_DROPPED"]
pub struct Deferred {
    pub(crate) client: ClientId,
    pub(crate) open: Option<Open>,
    pub(crate) desk: Arc<Desk>,
}

impl Drop for Deferred {
    fn drop(&mut self) {
        if let Some(open) = self.open.take() {
            self.desk.dropped.lock().unwrap_or_else(PoisonError::into_inner).push((self.client, open));
            self.desk.bell_sender.ring();
        }
    }
}
