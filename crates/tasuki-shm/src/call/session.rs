//! The server's side of one client.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::message::{Cargo, FromClient, FromServer, Inline};
use super::segment::{Layout, PeerSegment, Segment, SegmentError};
use super::wire::Hello;
use super::{Body, Breach, CallError, STATUS_DROPPED, STATUS_REPLY_TOO_LARGE};
use crate::arena::{Arena, Detach, PeerArena, PeerSlot, Slot};
use crate::bell::{Bell, Ringer, State};
use crate::crash;
use crate::enforce::Enforcer;
use crate::line::Line;
use crate::region::{PeerRegion, RegionError, Span};
use crate::ring::{Broken, Consumer, Message, Producer};
use crate::slots::Census;
use crate::wake::{Clapper, bell_pipe, drain, this_cpu};

/// Requests that are served for one client before the next has its turn.
const BATCH: u32 = 64;

/// Rings after which a client's bell pipe is emptied.
const RINGS_BEFORE_DRAIN: u32 = 4096;

/// Which client, among all that this server has had.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ClientId {
    pub(crate) index: u32,
    pub(crate) life: u32,
}

/// Who a client is, as the kernel says.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Peer {
    pub id: ClientId,
    pub uid: u32,
}

/// Where deferred requests go that were dropped, and what wakes the server then.
#[derive(Debug)]
pub(crate) struct Desk {
    pub dropped: Mutex<Vec<(ClientId, Open)>>,
    pub clapper: Clapper,
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

/// One client.
#[derive(Debug)]
pub(crate) struct Session {
    pub peer: Peer,
    segment: Segment,
    /// Dropped before the pipes: a client that sees their end must be able to register its arena with the next server.
    enforcer: Option<Enforcer>,
    requests: Consumer<Span<Line>, Span<Line>>,
    results: Producer<Span<Line>, Span<Line>>,
    bell: Bell<Span<Line>>,
    ringer: Ringer<Span<Line>>,
    arena: Arc<PeerArena>,
    replies: Arena,
    /// Requests begun and not answered: as many entries of the result ring are kept for them.
    unanswered: u32,
    /// Whether results were pushed and the client's bell not looked at.
    unrung: bool,
    /// Rings heard since its pipe was emptied.
    rings: u32,
    /// Whether its ring is looked at.
    pub hot: bool,
    /// Whether it had a request since the clock was looked at.
    busy: bool,
    /// When it last had a request, as far as the clock was looked at.
    last_active: Instant,
    clapper: Clapper,
    pipe: OwnedFd,
}

/// What a new client gets, in the order of the Welcome packet.
#[derive(Debug)]
pub(crate) struct Handover {
    pub ring_end: OwnedFd,
    pub sleep_end: OwnedFd,
}

/// Why a session could not be made.
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
        let (sleep_end, clapper) = bell_pipe()?;
        let mut bell = Bell::new(segment.bell(), this_cpu());
        // Cold until its first ring: an idle client is nobody's concern.
        bell.park(this_cpu());
        let session = Session {
            peer,
            requests: Consumer::new(client.ring(), segment.head(), hello.first),
            results: Producer::new(segment.ring(), client.head(), 0),
            bell,
            ringer: Ringer::new(client.bell()),
            enforcer,
            arena,
            replies,
            unanswered: 0,
            unrung: false,
            rings: 0,
            hot: false,
            busy: false,
            last_active: Instant::now(),
            clapper: Clapper::own(clapper),
            pipe,
            segment,
        };
        Ok((session, Handover { ring_end, sleep_end }))
    }

    pub fn memory(&self) -> [BorrowedFd<'_>; 2] {
        [self.segment.fd(), self.replies.region().fd()]
    }

    /// Where the client's rings are heard.
    pub fn pipe(&self) -> BorrowedFd<'_> {
        self.pipe.as_fd()
    }

    pub fn unanswered(&self) -> u32 {
        self.unanswered
    }

    pub fn replies(&self) -> Census {
        self.replies.census()
    }

    /// For how long it has had no request, when the clock says `now`.
    pub fn idle_at(&mut self, now: Instant) -> Duration {
        if std::mem::take(&mut self.busy) {
            self.last_active = now;
        }
        now.duration_since(self.last_active)
    }

    /// The client has rung.
    pub fn heard(&mut self, now: Instant) {
        self.last_active = now;
        self.rings += 1;
        if self.rings >= RINGS_BEFORE_DRAIN {
            drain(self.pipe.as_fd());
            self.rings = 0;
        }
        self.bell.spin(this_cpu());
    }

    /// Says that this client must ring from now on; if a request came meanwhile, it is taken back and the result is false.
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

    /// Whether a request is there.
    #[inline]
    pub fn is_ready(&self) -> bool {
        self.requests.is_ready()
    }

    /// Whether the client was last seen on `cpu`.
    pub fn is_on(&self, cpu: u32) -> bool {
        self.ringer.published().cpu == cpu
    }

    /// How many requests can be begun: every one begun has an entry of the result ring kept for its answer.
    ///
    /// A client with no more calls in flight than its ring holds never meets a 0; for one that does not fetch its results,
    /// the server does not wait but looks elsewhere.
    #[inline]
    fn room(&mut self) -> Result<u32, Broken> {
        if self.results.known_room() <= self.unanswered {
            self.results.look()?;
        }
        Ok(self.results.known_room().saturating_sub(self.unanswered))
    }

    /// Serves what is there, up to a batch; says how many.
    pub fn serve<H: FnMut(Request<'_>)>(&mut self, desk: &Arc<Desk>, handler: &mut H) -> Result<u32, Breach> {
        let mut served = 0;
        while served < BATCH && self.room()? > 0 {
            // One by one: a look at the next line before this one is served would wait for the client's cache.
            let Some(message) = self.requests.pop()? else { break };
            crash::point("server.serve.popped");
            // What is retired has begun: a successor will not run it again. So it is retired before it runs.
            self.requests.retire();
            crash::point("server.serve.begun");
            self.begin(&message, desk, handler)?;
            served += 1;
        }
        if served > 0 {
            self.busy = true;
            self.flush();
        }
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
        // A client that sleeps is not to wait for the rest of the batch.
        if self.unrung && self.ringer.published().state == State::Parked {
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

    /// Answers, and gives back the slot that the request came in. The entry for the answer was kept.
    #[inline(always)]
    fn answer(&mut self, call: u64, slot: Option<PeerSlot>, status: u16, cargo: Cargo) {
        if let Some(slot) = slot {
            if let Some(enforcer) = &self.enforcer {
                // It fails when the client is dead or has unmapped its arena; then nobody needs the slot.
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
        if std::mem::take(&mut self.unrung) && self.ringer.must_ring() {
            self.clapper.ring();
            crash::point("server.return.rung");
        }
    }

    /// Tells the client which rule it broke. It sees its connection end next.
    pub fn expel(&self, breach: Breach) {
        self.segment.verdict()[0].word(1).store(breach.code(), crate::sync::Release);
    }
}

/// A request, to be answered. One that is dropped is answered with [`STATUS_DROPPED`](super::STATUS_DROPPED).
#[derive(Debug)]
pub struct Request<'a> {
    open: Open,
    /// Whether it was answered or put off.
    answered: bool,
    session: &'a mut Session,
    desk: &'a Arc<Desk>,
    /// Whether it is answered outside of a batch, at the end of which the client is woken.
    alone: bool,
}

/// The answer did not fit; the client was told so.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the answer has {len} bytes, but a reply slot holds {max} and {free} are free; the client must connect with larger or more reply slots"
)]
pub struct ReplyTooLarge {
    /// Bytes of the answer.
    pub len: usize,
    /// Bytes in a reply slot.
    pub max: usize,
    /// Reply slots that are free.
    pub free: u32,
}

impl<'a> Request<'a> {
    pub(crate) fn resume(open: Open, session: &'a mut Session, desk: &'a Arc<Desk>) -> Self {
        Request { open, answered: false, session, desk, alone: true }
    }

    fn body(&self) -> &Body {
        &self.open.body
    }

    /// What is asked for.
    pub fn method(&self) -> u16 {
        self.open.method
    }

    /// Which client asks.
    pub fn client(&self) -> ClientId {
        self.session.peer.id
    }

    /// The user that the client ran as when it connected.
    pub fn uid(&self) -> u32 {
        self.session.peer.uid
    }

    /// Bytes in it.
    pub fn len(&self) -> usize {
        self.body().len()
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its bytes, if they came inside the ring entry. They are a private copy already.
    pub fn inline(&self) -> Option<&[u8]> {
        self.body().inline()
    }

    /// The client's slot that it came in, if it did.
    pub fn slot(&self) -> Option<&PeerSlot> {
        self.body().slot()
    }

    /// A private copy of its bytes.
    pub fn to_vec(&self) -> Vec<u8> {
        self.body().to_vec()
    }

    /// Copies its first bytes, as many as there are and fit; says how many.
    #[inline]
    pub fn copy_to(&self, into: &mut [u8]) -> usize {
        self.body().copy_to(into)
    }

    /// A slot to write a large answer into, for [`reply_slot`](Self::reply_slot).
    #[inline]
    pub fn take_slot(&self) -> Result<Slot, CallError> {
        let count = self.session.replies.geometry().count;
        self.session.replies.take().ok_or(CallError::NoSlot { count })
    }

    /// Answers with `bytes`: up to [`INLINE_MAX`](super::INLINE_MAX) travel in the ring, more are copied into a slot.
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

    /// Answers with the first `len` bytes of `slot`, which [`take_slot`](Self::take_slot) gave for this client.
    ///
    /// # Panics
    /// If the slot was taken for another client, or holds fewer than `len` bytes.
    pub fn reply_slot(mut self, slot: Slot, len: usize) {
        assert!(self.session.replies.owns(&slot), "a reply slot belongs to the client it was taken for");
        assert!(len <= slot.len(), "a slot of {} bytes cannot hold {len}", slot.len());
        self.send_slot(slot, len);
    }

    fn send_slot(&mut self, slot: Slot, len: usize) {
        // Replies are detached by move only, which cannot fail.
        let lent = self
            .session
            .replies
            .lend(slot)
            .map_err(|(_, error)| error)
            .expect("lending by move asks nothing of the kernel");
        crash::point("server.return.lent");
        self.finish(0, Cargo::Slot { id: lent.id(), len: len as u64 });
    }

    /// Answers with an error of the server's own, other than 0, and up to [`INLINE_MAX`](super::INLINE_MAX) bytes about it
    /// (what is more is cut off).
    ///
    /// # Panics
    /// If `status` is 0, which means success.
    pub fn refuse(mut self, status: impl Into<u16>, note: &str) {
        let status = status.into();
        assert_ne!(status, 0, "status 0 means success");
        let note = &note[..note.floor_char_boundary(super::INLINE_MAX)];
        self.finish(status, Cargo::Bytes(Inline::new(note.as_bytes()).expect("cut to what fits")));
    }

    /// Puts the answer off: [`Server::resume`](super::Server::resume) gives the request back.
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

/// A request whose answer is put off. One that is dropped is answered with [`STATUS_DROPPED`](super::STATUS_DROPPED).
#[derive(Debug)]
#[must_use = "a deferred request that is dropped is answered with STATUS_DROPPED"]
pub struct Deferred {
    pub(crate) client: ClientId,
    pub(crate) open: Option<Open>,
    desk: Arc<Desk>,
}

impl Drop for Deferred {
    fn drop(&mut self) {
        if let Some(open) = self.open.take() {
            self.desk.dropped.lock().unwrap_or_else(PoisonError::into_inner).push((self.client, open));
            self.desk.clapper.ring();
        }
    }
}
