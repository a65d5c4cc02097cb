//! The client's end: calls, and what becomes of them when the server dies or is replaced.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
#[cfg(feature = "tokio")]
use std::task::Waker;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt::Timeout;

use super::message::{Cargo, FromClient, FromServer, Inline};
use super::pending::{InFlight, Outcome, Pending};
use super::segment::{Layout, PeerSegment, Segment, SegmentError};
use super::wire::{self, Hello, Malformed, Packet, Refusal, Service, Welcome};
use super::{Ask, Body, Breach, CallError, Deadline, Failure, Payload, Refused, Reply, Verdict};
use crate::arena::{Arena, Detach, Geometry, Lent, PeerArena, Slot};
use crate::bell::{Bell, Ringer};
use crate::crash;
use crate::enforce::{self, EnforceError, HandOver};
use crate::line::{Claims, Line};
use crate::region::{PeerRegion, RegionError, Span};
use crate::ring::{Consumer, Message, Producer, PushError};
use crate::slots::Census;
use crate::stats::{Counters, Histogram};
use crate::wake::{Clapper, Sleeper, Woken, nap_cost, this_cpu};

/// Looks at the ring between two looks at the clock while spinning.
const LOOKS_PER_CLOCK: u32 = 64;

/// Looks at the ring before it is asked whether the server shares our CPU.
const LOOKS_BEFORE_CPU: u32 = 4;

/// How often the server gets the CPU that we share with it before we park.
const YIELDS: u32 = 2;

/// How often a client that only polls finds out whether the server is still there.
const POLL_LIVENESS: Duration = Duration::from_millis(1);

/// Servers in a row that may leave or die during a handshake before it is given up.
pub(super) const DIALS_MAX: u32 = 16;

/// What a client asks of the server when it connects.
#[derive(Debug, Clone)]
pub struct ClientOptions {
    /// Entries of the request ring and of the result ring, a power of two: as many calls can be in flight.
    pub ring: u32,
    /// The client's arena, for requests. No slots: all requests travel inside the ring.
    pub arena: Geometry,
    /// The arena that the server makes for replies to this client.
    pub replies: Geometry,
    /// How a slot is taken away from this process while the server has it.
    pub detach: Detach,
    /// How long to spin for an answer before parking; `None` measures what a nap costs and spins as long.
    pub spin: Option<Duration>,
    /// How long the handshake may take.
    pub handshake: Duration,
}

impl Default for ClientOptions {
    /// 256 calls in flight; 256 slots of 4 KiB in each direction (memory that is touched only when used).
    fn default() -> Self {
        let pool = Geometry { slot_len: 4096, count: 256 };
        ClientOptions {
            ring: 256,
            arena: pool,
            replies: pool,
            detach: Detach::Move,
            spin: None,
            handshake: Duration::from_secs(5),
        }
    }
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// Nothing is there.
    #[error("there is no socket at {}; start the server, or correct the path", path.display())]
    NoSocket {
        /// Where.
        path: PathBuf,
    },
    /// Something else is there.
    #[error("{} is not a socket; correct the path", path.display())]
    NotASocket {
        /// Where.
        path: PathBuf,
    },
    /// A socket of another kind is there.
    #[error("{} is a socket of another program; correct the path", path.display())]
    ForeignSocket {
        /// Where.
        path: PathBuf,
    },
    /// A server was there.
    #[error("no server listens at {}; it has ended: start it again", path.display())]
    NoServer {
        /// Where.
        path: PathBuf,
    },
    /// The file's mode forbids it.
    #[error("{} may not be opened by this user; ask for the server's ServerOptions::mode to be widened, or run as its user", path.display())]
    Forbidden {
        /// Where.
        path: PathBuf,
    },
    /// The path does not fit into a socket address.
    #[error("{} is longer than the 107 bytes that a socket's path may have; use a shorter one", path.display())]
    PathTooLong {
        /// Where.
        path: PathBuf,
    },
    /// The server did not answer the handshake in time.
    #[error("the server at {} did not answer within {limit:.0?}; it hangs or is overloaded", path.display())]
    Silent {
        /// Where.
        path: PathBuf,
        /// How long we waited.
        limit: Duration,
    },
    /// The server refused.
    #[error("{0}")]
    Refused(Refusal),
    /// The server sent something else.
    #[error("{0}")]
    Malformed(Malformed),
    /// What the server handed over is unusable.
    #[error("{0}")]
    Segment(SegmentError),
    /// Our own memory could not be made.
    #[error("{0}")]
    Memory(#[from] RegionError),
    /// This process may have no more descriptors.
    #[error(
        "this process has too few descriptors left for a connection, which takes eight; close some, or raise RLIMIT_NOFILE"
    )]
    NoDescriptors,
    /// The detach level is not to be had.
    #[error("{0}")]
    Enforce(#[from] EnforceError),
    /// A number in the options makes no sense.
    #[error("ClientOptions::{field} is {value}; it must be {must}")]
    Options {
        /// Which.
        field: &'static str,
        /// What it is.
        value: u64,
        /// What it must be.
        must: &'static str,
    },
    /// The kernel refused for a reason of its own.
    #[error("the kernel refused while {doing}: {source}")]
    Kernel {
        /// The step.
        doing: &'static str,
        /// Its reason.
        source: io::Error,
    },
}

/// A call that was submitted. Give it to [`Client::poll`], [`Client::wait`] or [`Client::abandon`]: its place in the ring is
/// taken until then.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a ticket that is dropped keeps its place in the ring; abandon it instead"]
pub struct Ticket(pub(crate) u64);

/// Which counter of the segment counts what.
#[derive(Debug, Clone, Copy)]
enum Count {
    Calls,
    Rings,
    Naps,
    Reconnects,
}

/// The connection to one server.
#[derive(Debug)]
struct Link {
    requests: Producer<Span<Line>, Span<Line>>,
    results: Consumer<Span<Line>, Span<Line>>,
    ringer: Ringer<Span<Line>>,
    clapper: Clapper,
    sleeper: Sleeper,
    replies: Arc<PeerArena>,
    verdict: Claims<Span<Line>>,
    generation: u32,
}

/// A handshake whose first half is done.
#[derive(Debug)]
struct Greeting {
    socket: OwnedFd,
    /// Kept until the server has answered, if it is to enforce the detach.
    _handing_over: Option<HandOver>,
}

/// What a server left behind, while its successor has not answered.
#[derive(Debug)]
struct Orphaned {
    generation: u32,
    /// What the dead server had begun ends here in the request ring.
    begun: u32,
    unbegun: Vec<Message>,
    /// When it is given up.
    until: Instant,
}

/// A client. It can be moved to another thread, and is used by one at a time.
#[derive(Debug)]
pub struct Client {
    path: PathBuf,
    options: ClientOptions,
    segment: Segment,
    arena: Arena,
    bell: Bell<Span<Line>>,
    counters: Counters<Span<Line>>,
    slept: Histogram<Span<Line>>,
    pending: Pending,
    spin: Duration,
    link: Result<Link, CallError>,
    /// While there is no link: what the next one takes over.
    orphaned: Option<Orphaned>,
    /// A handshake that we have begun and that was not answered in time.
    greeting: Option<Greeting>,
    service: Service,
    /// Where the next request goes, whichever server takes it.
    next_request: u32,
    /// Whether requests were staged whose bell was not looked at.
    unrung: bool,
    /// Whether the server was asleep when the last request was sent.
    rung: bool,
    last_liveness: Instant,
    /// Bytes of the last request if it went in a slot, and nobody has waited since.
    warm: usize,
}

impl Client {
    /// Connects to the server at `path`.
    pub fn connect(path: impl AsRef<Path>, options: &ClientOptions) -> Result<Self, ConnectError> {
        check(options)?;
        let layout = Layout { ring: options.ring, slots: options.arena.count };
        let segment = Segment::create("tasuki-client", layout)?;
        let arena = Arena::create("tasuki-requests", options.arena, segment.table(), options.detach)?;
        let bell = Bell::new(segment.bell(), this_cpu());
        let mut client = Client {
            path: path.as_ref().to_owned(),
            options: options.clone(),
            counters: segment.counters(),
            slept: segment.slept(),
            pending: Pending::new(options.ring),
            spin: options.spin.unwrap_or_else(nap_cost),
            link: Err(CallError::ServerGone { generation: 0 }),
            orphaned: None,
            greeting: None,
            service: Service(0),
            next_request: 0,
            unrung: false,
            rung: false,
            last_liveness: Instant::now(),
            warm: 0,
            segment,
            arena,
            bell,
        };
        client.establish(None, client.options.handshake)?;
        Ok(client)
    }

    /// Connects again after [`CallError::ServerGone`], to whatever server is at the path now.
    pub fn reconnect(&mut self) -> Result<(), ConnectError> {
        self.find_successor(self.options.handshake);
        if self.link.is_err() {
            self.establish(None, self.options.handshake)?;
        }
        Ok(())
    }

    /// Which server is connected: it grows by one with each that follows on the same state. `None` when it is gone.
    pub fn generation(&self) -> Option<u32> {
        self.link.as_ref().ok().map(|link| link.generation)
    }

    /// Which service the server is.
    pub fn service(&self) -> Service {
        self.service
    }

    /// Calls in flight, and results that were not fetched.
    pub fn in_flight(&self) -> usize {
        self.pending.in_use()
    }

    /// Takes a free slot of the arena, to write a request into.
    pub fn take_slot(&self) -> Result<Slot, CallError> {
        self.arena.take().ok_or(CallError::NoSlot { count: self.arena.geometry().count })
    }

    /// Where the slots of the arena are.
    pub fn census(&self) -> Census {
        self.arena.census()
    }

    /// Makes a call and waits for its result.
    pub fn call(&mut self, ask: Ask<'_>, deadline: Deadline) -> Result<Reply, Failure> {
        if self.orphaned.is_some() {
            let until = deadline.fixed();
            while self.orphaned.is_some() {
                self.find_successor(self.patience(until));
                if self.orphaned.is_some() && until.is_some_and(|until| Instant::now() >= until) {
                    return Err(ask.refused(CallError::DeadlinePassed));
                }
            }
        }
        let ticket = self.submit(ask)?;
        self.wait(ticket, deadline)
    }

    /// Sends a request. Its result is fetched by [`poll`](Self::poll) or [`wait`](Self::wait).
    ///
    /// Does not wait, unless the server is gone and its successor has not answered yet: then as long as a handshake may take.
    pub fn submit(&mut self, ask: Ask<'_>) -> Result<Ticket, Failure> {
        let ticket = self.stage(ask)?;
        self.flush();
        Ok(ticket)
    }

    /// Sends a request without looking whether the server sleeps: [`flush`](Self::flush) does, once for many.
    #[inline]
    pub fn stage(&mut self, ask: Ask<'_>) -> Result<Ticket, Failure> {
        if let Err(why) = self.make_room() {
            return Err(ask.refused(why));
        }
        let Ask { method, payload, idempotent } = ask;
        let (cargo, slot) = match payload {
            Payload::Bytes(bytes) => match Inline::new(bytes) {
                Some(inline) => (Cargo::Bytes(inline), None),
                None => self.load_copy(bytes)?,
            },
            Payload::Slot { slot, len } => self.load(slot, len)?,
        };
        let call = self.pending.next_id();
        let message = FromClient::Request { call, method, cargo }.encode();
        crash::point("client.send.detached");
        let index = self.put(&message);
        crash::point("client.send.pushed");
        self.pending.begin(slot, index, idempotent.then_some(message));
        self.counters.add(Count::Calls as usize, 1);
        Ok(Ticket(call))
    }

    /// There is a link, a place for one more call, and an entry for it in the ring; and slots to be returned are.
    #[inline(always)]
    fn make_room(&mut self) -> Result<(), CallError> {
        if self.link.is_err() {
            self.find_successor(self.options.handshake);
        }
        if self.pending.is_full() {
            self.gather()?;
        }
        let capacity = self.options.ring;
        let link = self.link.as_mut().map_err(|why| why.clone())?;
        let room = link.requests.room().map_err(Breach::from).and_then(|room| return_slots(link, room));
        match room {
            Ok(room) if room == 0 || self.pending.is_full() => {
                // Whoever only tries again must not wait for a server that was never woken for what was staged.
                self.flush();
                // Nor for one that died: if all calls were given up, nobody else finds out.
                self.check_liveness();
                match &self.link {
                    Err(why) if self.orphaned.is_none() => Err(why.clone()),
                    _ => Err(CallError::Full { capacity }),
                }
            }
            Ok(_) => Ok(()),
            Err(breach) => Err(self.broken(breach)),
        }
    }

    /// Copies a request that is too large for the ring into a slot.
    #[inline]
    fn load_copy(&mut self, bytes: &[u8]) -> Result<(Cargo, Option<Lent>), Failure> {
        let max = self.slot_max();
        if bytes.len() > max {
            return Err(CallError::TooLarge { len: bytes.len(), max }.into());
        }
        let mut slot = self.take_slot()?;
        crash::point("client.send.taken");
        slot.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
        self.load(slot, bytes.len())
    }

    fn slot_max(&self) -> usize {
        match self.arena.geometry() {
            geometry if geometry.is_empty() => super::INLINE_MAX,
            geometry => geometry.slot_len as usize,
        }
    }

    /// Lends a slot to the server.
    fn load(&mut self, slot: Slot, len: usize) -> Result<(Cargo, Option<Lent>), Failure> {
        if !self.arena.owns(&slot) {
            return Err(Failure { why: CallError::ForeignSlot, slot: Some(slot) });
        }
        if len > slot.len() {
            return Err(Failure { why: CallError::TooLarge { len, max: slot.len() }, slot: Some(slot) });
        }
        let lent = self
            .arena
            .lend(slot)
            .map_err(|(slot, error)| Failure { why: CallError::Detach(Arc::new(error)), slot: Some(slot) })?;
        self.warm = len;
        Ok((Cargo::Slot { id: lent.id(), len: len as u64 }, Some(lent)))
    }

    /// Pushes into a ring that has room; says at which index.
    #[inline(always)]
    fn put(&mut self, message: &Message) -> u32 {
        let link = self.link.as_mut().expect("make_room found a link");
        let index = link.requests.tail();
        match link.requests.push(message) {
            Ok(()) => {}
            Err(PushError::Full { .. } | PushError::Broken(_)) => {
                unreachable!("make_room found room, which only we use up")
            }
        }
        self.next_request = link.requests.tail();
        self.unrung = true;
        index
    }

    /// Wakes the server if it sleeps. Needed after [`stage`](Self::stage) only.
    #[inline]
    pub fn flush(&mut self) {
        if !std::mem::take(&mut self.unrung) {
            return;
        }
        let Ok(link) = &mut self.link else { return };
        self.rung = link.ringer.must_ring();
        if self.rung {
            // The server that we are about to wake may run on this CPU: it must know not to spin then.
            self.bell.wake(this_cpu());
            link.clapper.ring();
            self.counters.add(Count::Rings as usize, 1);
            crash::point("client.send.rung");
        }
    }

    /// Fetches the result of a call if it is there.
    pub fn poll(&mut self, ticket: &Ticket) -> Result<Option<Reply>, Failure> {
        self.flush();
        if self.link.is_err() {
            self.find_successor(POLL_LIVENESS);
        }
        if let Err(why) = self.gather() {
            return match self.pending.take(ticket.0) {
                None if self.orphaned.is_some() => Ok(None),
                outcome => outcome.unwrap_or(Err(why.into())).map(Some),
            };
        }
        match self.pending.take(ticket.0) {
            Some(outcome) => outcome.map(Some),
            None => {
                self.check_liveness();
                self.pending.take(ticket.0).transpose()
            }
        }
    }

    /// Finds out about the server's death even if nobody ever sleeps; says whether it is dead.
    fn check_liveness(&mut self) -> bool {
        let now = Instant::now();
        if now.duration_since(self.last_liveness) < POLL_LIVENESS {
            return false;
        }
        self.last_liveness = now;
        let Ok(link) = &mut self.link else { return false };
        let gone = link.sleeper.peer_is_gone().unwrap_or(false);
        if gone {
            self.lost(POLL_LIVENESS);
        }
        gone
    }

    /// Waits for the result of a call.
    ///
    /// # Errors
    /// After [`CallError::DeadlinePassed`] the ticket is gone: the result will be thrown away.
    pub fn wait(&mut self, ticket: Ticket, deadline: Deadline) -> Result<Reply, Failure> {
        let Ticket(call) = ticket;
        self.flush();
        let mut until = None;
        let mut answer = None;
        loop {
            if let Some(outcome) = self.pending.take(call) {
                return outcome;
            }
            if let Err(why) = &self.link {
                let why = why.clone();
                if self.orphaned.is_none() {
                    self.pending.abandon(call);
                    return Err(why.into());
                }
                until = until.or_else(|| deadline.fixed());
                self.find_successor(self.patience(until));
                if self.orphaned.is_some() && until.is_some_and(|until| Instant::now() >= until) {
                    self.pending.abandon(call);
                    return Err(CallError::DeadlinePassed.into());
                }
                continue;
            }
            if self.spin(call, deadline, &mut until, &mut answer) {
                match answer.take() {
                    Some(outcome) => return outcome,
                    None => continue,
                }
            }
            if let Err(why) = self.nap(until) {
                // What ended the link has settled the call as well, and its slot is back.
                return self.pending.take(call).unwrap_or_else(|| {
                    self.pending.abandon(call);
                    Err(why.into())
                });
            }
        }
    }

    /// Gives up a call: its result is thrown away when it comes.
    pub fn abandon(&mut self, ticket: Ticket) {
        self.pending.abandon(ticket.0);
    }

    /// Looks for the result of `call` as long as a nap would cost; says whether it, another, or the end of the connection
    /// came. Fixes the deadline.
    fn spin(
        &mut self,
        call: u64,
        deadline: Deadline,
        until: &mut Option<Instant>,
        answer: &mut Option<Outcome>,
    ) -> bool {
        if self.look_often(LOOKS_BEFORE_CPU, call, answer) {
            return true;
        }
        for _ in 0..YIELDS {
            // It cannot answer while we spin on its CPU: let it run, then sleep.
            if !self.server_is_on(this_cpu()) {
                return self.spin_apart(call, deadline, until, answer);
            }
            rustix::thread::sched_yield();
            if self.look(call, answer) {
                return true;
            }
        }
        *until = until.or_else(|| deadline.fixed());
        false
    }

    /// The same, where the server runs on another CPU.
    fn spin_apart(
        &mut self,
        call: u64,
        deadline: Deadline,
        until: &mut Option<Instant>,
        answer: &mut Option<Outcome>,
    ) -> bool {
        if self.look_often(LOOKS_PER_CLOCK, call, answer) {
            return true;
        }
        if let len @ 1.. = std::mem::take(&mut self.warm) {
            // Whoever sends one slot sends another: its lines can come while we wait.
            self.arena.warm_next(len);
        }
        let start = Instant::now();
        *until = until.or_else(|| deadline.fixed());
        // A server that was asleep is waited for as long as it takes to wake, and then as long as any other.
        let budget = if std::mem::take(&mut self.rung) { self.spin * 2 } else { self.spin };
        let limit = until.map_or(start + budget, |until| until.min(start + budget));
        loop {
            if self.look_often(LOOKS_PER_CLOCK, call, answer) {
                return true;
            }
            let now = Instant::now();
            if now >= limit {
                return false;
            }
            // Only who spins for longer than any nap takes pays for a system call now and then.
            if now.duration_since(start) >= POLL_LIVENESS && self.check_liveness() {
                return true;
            }
        }
    }

    #[inline]
    fn look_often(&mut self, times: u32, call: u64, answer: &mut Option<Outcome>) -> bool {
        (0..times).any(|_| self.look(call, answer))
    }

    fn server_is_on(&self, cpu: u32) -> bool {
        self.link.as_ref().is_ok_and(|link| link.ringer.published().cpu == cpu)
    }

    /// Sleeps until the server rings, is gone, or the time is up.
    fn nap(&mut self, until: Option<Instant>) -> Result<(), CallError> {
        self.bell.park(this_cpu());
        crash::point("client.wait.parked");
        // B1: the second look.
        let came = self.gather()?;
        let Ok(link) = &mut self.link else { return Ok(()) };
        if came > 0 {
            self.bell.wake(this_cpu());
            return Ok(());
        }
        let asleep = Instant::now();
        let woken = link.sleeper.sleep(until).map_err(|error| CallError::Kernel(Arc::new(error)))?;
        let mut now = Instant::now();
        self.slept.record(u64::try_from(now.duration_since(asleep).as_nanos()).unwrap_or(u64::MAX));
        self.bell.wake(this_cpu());
        self.counters.add(Count::Naps as usize, 1);
        if woken == Woken::PeerGone {
            self.lost(self.patience(until));
            if self.orphaned.is_some() {
                // Whoever waits goes on waiting for the successor, as long as its deadline allows.
                return Ok(());
            }
            now = Instant::now();
        }
        // A server that rings without end, or dies and comes back without end, does not prolong the wait.
        let late = woken == Woken::TimedOut || until.is_some_and(|until| now >= until);
        if late && self.gather()? == 0 {
            return Err(CallError::DeadlinePassed);
        }
        Ok(())
    }

    /// Takes one result from the ring; says whether there was one (or the link broke). The one of `call` goes to `answer`.
    #[inline(always)]
    fn look(&mut self, call: u64, answer: &mut Option<Outcome>) -> bool {
        let Ok(link) = &mut self.link else { return true };
        let settled = match link.results.pop() {
            Ok(None) => return false,
            Ok(Some(message)) => {
                link.results.retire();
                self.settle(&message, Some((call, answer)))
            }
            Err(broken) => Err(broken.into()),
        };
        if let Err(breach) = settled {
            self.broken(breach);
        }
        true
    }

    /// Takes all results from the ring, at most a ring full; says how many.
    pub(crate) fn gather(&mut self) -> Result<u32, CallError> {
        let mut count = 0;
        while count < self.options.ring {
            let link = self.link.as_mut().map_err(|why| why.clone())?;
            let settled = match link.results.pop() {
                Ok(None) => break,
                Ok(Some(message)) => {
                    link.results.retire();
                    self.settle(&message, None)
                }
                Err(broken) => Err(broken.into()),
            };
            if let Err(breach) = settled {
                return Err(self.broken(breach));
            }
            count += 1;
        }
        Ok(count)
    }

    /// Books a result, or puts it where the call that is `wanted` wants it.
    #[inline(always)]
    fn settle(&mut self, message: &Message, wanted: Option<(u64, &mut Option<Outcome>)>) -> Result<(), Breach> {
        let FromServer { call, status, cargo } = FromServer::decode(message)?;
        let link = self.link.as_ref().expect("the message came over it");
        let returned = match self.pending.take_slot(call)? {
            Some(lent) => Some(self.arena.attach(lent)?),
            None => None,
        };
        crash::point("client.return.attached");
        let body = match cargo {
            Cargo::Bytes(inline) => Body::Inline(inline),
            Cargo::Slot { id, len } => Body::Slot(link.replies.accept(id, len)?),
        };
        let outcome = match status {
            0 => Ok(Reply { body, returned }),
            status => Err(refused(status, &body, returned)),
        };
        match wanted {
            Some((wanted, answer)) if wanted == call => {
                self.pending.complete(call)?;
                *answer = Some(outcome);
            }
            _ => self.pending.finish(call, outcome)?,
        }
        Ok(())
    }

    /// The server broke a rule: the connection is over, and every call with it.
    fn broken(&mut self, breach: Breach) -> CallError {
        let why = CallError::Broken(breach);
        self.end(&why);
        why
    }

    /// There is no server any more: every call fails with `why`, and every slot is back.
    fn end(&mut self, why: &CallError) {
        self.link = Err(why.clone());
        self.greeting = None;
        for (call, in_flight) in self.pending.in_flight() {
            let slot = in_flight.slot.and_then(|lent| self.arena.attach(lent).ok());
            self.finish(call, Err(Failure { why: why.clone(), slot }));
        }
        self.arena.reclaim();
    }

    fn finish(&mut self, call: u64, outcome: Outcome) {
        self.pending.finish(call, outcome).expect("a call that Pending listed is in flight");
    }

    /// The server is gone. What it has answered counts; then its successor, if there is one, gets the rest.
    fn lost(&mut self, patience: Duration) {
        if self.gather().is_err() {
            return;
        }
        let Ok(link) = &mut self.link else { return };
        let generation = link.generation;
        if let verdict @ 1.. = link.verdict.load(0, 1) {
            return self.end(&CallError::Expelled(Verdict(verdict)));
        }
        // What the server has retired it has begun; the rest it has never looked at.
        let (begun, unbegun) = match link.requests.look() {
            Ok(begun) => (begun, link.requests.unretired()),
            Err(broken) => return self.end(&CallError::Broken(broken.into())),
        };
        self.link = Err(CallError::ServerGone { generation });
        let until = Instant::now() + self.options.handshake;
        self.orphaned = Some(Orphaned { generation, begun, unbegun, until });
        self.find_successor(patience);
    }

    /// How long a handshake may take in a wait that ends at `until`.
    fn patience(&self, until: Option<Instant>) -> Duration {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        left.map_or(self.options.handshake, |left| left.min(self.options.handshake))
    }

    /// Has the calls of a server that is gone go on with the one that follows it. If that one does not answer while the
    /// caller's patience lasts, the next caller goes on asking.
    pub(super) fn find_successor(&mut self, patience: Duration) {
        let Some(orphaned) = self.orphaned.take() else { return };
        let left = orphaned.until.saturating_duration_since(Instant::now());
        match self.establish(Some(self.service), patience.min(left)) {
            Ok(()) => {
                self.counters.add(Count::Reconnects as usize, 1);
                self.carry_over(orphaned.generation, orphaned.begun, &orphaned.unbegun);
            }
            Err(ConnectError::Silent { .. }) if Instant::now() < orphaned.until => self.orphaned = Some(orphaned),
            Err(_) => self.end(&CallError::ServerGone { generation: orphaned.generation }),
        }
    }

    /// Sends the successor what the server `generation` has not begun (all before `begun` it has), and what may run twice.
    fn carry_over(&mut self, generation: u32, begun: u32, unbegun: &[Message]) {
        let mut calls = self.pending.in_flight();
        calls.sort_by_key(|(_, call)| call.index.wrapping_sub(begun).cast_signed());
        for (call, InFlight { slot, index, again }) in calls {
            let age = index.wrapping_sub(begun).cast_signed();
            let message = match usize::try_from(age) {
                Ok(position) => unbegun.get(position).copied(),
                Err(_) => again,
            };
            match message {
                Some(message) => {
                    let index = self.put(&message);
                    self.pending.moved(call, index);
                }
                None => {
                    let slot = slot.and_then(|lent| self.arena.attach(lent).ok());
                    self.finish(call, Err(Failure { why: CallError::Retry { generation }, slot }));
                }
            }
        }
        self.flush();
    }

    /// The handshake.
    fn establish(&mut self, resumes: Option<Service>, patience: Duration) -> Result<(), ConnectError> {
        let until = Instant::now() + patience;
        for _ in 1..DIALS_MAX {
            let patience = until.saturating_duration_since(Instant::now());
            let greeting = match self.greeting.take() {
                Some(greeting) => Ok(greeting),
                None => self.greet(dial(&self.path, patience)?, resumes, patience),
            };
            match greeting.and_then(|greeting| self.be_welcomed(greeting, patience)) {
                // It was leaving, or died: if there is a successor, it listens at the same socket.
                Err(ConnectError::NoServer { .. }) => {}
                other => return other,
            }
        }
        Err(ConnectError::NoServer { path: self.path.clone() })
    }

    /// Our half of the handshake.
    fn greet(&self, socket: OwnedFd, resumes: Option<Service>, patience: Duration) -> Result<Greeting, ConnectError> {
        let (handing_over, uffd) = match self.options.detach {
            Detach::Enforced => {
                let silent = || ConnectError::Silent { path: self.path.clone(), limit: patience };
                let handing_over = HandOver::begin(patience).ok_or_else(silent)?;
                (Some(handing_over), Some(enforce::register(self.arena.region())?))
            }
            Detach::Move | Detach::Guard => (None, None),
        };
        let hello = Hello {
            ring: self.options.ring,
            arena: self.arena.geometry(),
            replies: self.options.replies,
            first: self.next_request,
            resumes,
            enforced_base: uffd.as_ref().map(|_| self.arena.region().address() as u64),
        };
        let mut fds = vec![self.segment.fd(), self.arena.region().fd()];
        fds.extend(uffd.as_ref().map(AsFd::as_fd));
        let say = |packet: &Packet, fds: &[BorrowedFd<'_>]| {
            wire::send(socket.as_fd(), packet, fds)
                .map_err(|error| self.silent_or(error, patience, "sending the handshake"))
        };
        say(&Packet::Hello(hello), &fds)?;
        if uffd.is_some() {
            // The server checks that we hold no userfaultfd any more, so it is closed before we say that it is.
            drop(uffd);
            say(&Packet::Detached, &[])?;
        }
        Ok(Greeting { socket, _handing_over: handing_over })
    }

    /// The server's half. If there is no answer in time, it can still be waited for.
    fn be_welcomed(&mut self, greeting: Greeting, patience: Duration) -> Result<(), ConnectError> {
        limit(&greeting.socket, patience)?;
        let (welcome, fds) = match self.welcome(&greeting.socket, patience) {
            Err(silent @ ConnectError::Silent { .. }) => {
                self.greeting = Some(greeting);
                return Err(silent);
            }
            answer => answer?,
        };
        let link = self.link_up(&welcome, fds)?;
        (self.link, self.service) = (Ok(link), welcome.service);
        crash::point("client.connected");
        Ok(())
    }

    fn silent_or(&self, source: io::Error, limit: Duration, doing: &'static str) -> ConnectError {
        match source.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                ConnectError::Silent { path: self.path.clone(), limit }
            }
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
                ConnectError::NoServer { path: self.path.clone() }
            }
            _ => ConnectError::Kernel { doing, source },
        }
    }

    fn welcome(&self, socket: &OwnedFd, patience: Duration) -> Result<(Welcome, [OwnedFd; 4]), ConnectError> {
        let answer = wire::receive(socket.as_fd());
        let answer = answer.map_err(|error| self.silent_or(error, patience, "waiting for the server's welcome"))?;
        let Some(answer) = answer else { return Err(ConnectError::NoServer { path: self.path.clone() }) };
        match answer.packet {
            Ok(Packet::Welcome(welcome)) => match <[OwnedFd; 4]>::try_from(answer.fds) {
                Ok(fds) => Ok((welcome, fds)),
                // The kernel leaves out descriptors for which we have no room.
                Err(_) => Err(ConnectError::NoDescriptors),
            },
            Ok(Packet::Refused(refusal)) => Err(ConnectError::Refused(refusal)),
            Ok(_) => Err(ConnectError::Malformed(Malformed::Body(0))),
            Err(malformed) => Err(ConnectError::Malformed(malformed)),
        }
    }

    fn link_up(&mut self, welcome: &Welcome, fds: [OwnedFd; 4]) -> Result<Link, ConnectError> {
        let [segment, replies, ring_end, sleep_end] = fds;
        if welcome.ring != self.options.ring || welcome.replies != self.options.replies {
            return Err(ConnectError::Malformed(Malformed::Body(3)));
        }
        let layout = Layout { ring: welcome.ring, slots: welcome.replies.count };
        let server = PeerSegment::map(segment.as_fd(), layout).map_err(ConnectError::Segment)?;
        let replies = PeerRegion::map(replies.as_fd(), welcome.replies.len())?;
        let kernel = |source: io::Error| match Errno::from_io_error(&source) {
            Some(Errno::MFILE | Errno::NFILE) => ConnectError::NoDescriptors,
            _ => ConnectError::Kernel { doing: "preparing to sleep in the server's bell", source },
        };
        Ok(Link {
            requests: Producer::new(self.segment.ring(), server.head(), self.next_request),
            results: Consumer::new(server.ring(), self.segment.head(), 0),
            ringer: Ringer::new(server.bell()),
            clapper: Clapper::from_peer(ring_end),
            sleeper: Sleeper::new(sleep_end).map_err(kernel)?,
            replies: PeerArena::new(replies, welcome.replies)?,
            verdict: server.verdict(),
            generation: welcome.generation,
        })
    }

    /// Says that this client is about to sleep elsewhere, and looks once more. See [`Armed`].
    pub fn arm(&mut self) -> Result<Armed, CallError> {
        if self.link.is_err() {
            self.find_successor(self.options.handshake);
        }
        self.flush();
        self.bell.park(this_cpu());
        match self.gather()? {
            0 => Ok(Armed::Idle),
            _ => {
                self.bell.wake(this_cpu());
                Ok(Armed::Busy)
            }
        }
    }

    /// Says that it is awake again, and finds out about the server's death.
    pub fn woken(&mut self) {
        self.bell.wake(this_cpu());
        let Ok(link) = &mut self.link else { return };
        crate::wake::drain(link.sleeper.fd());
        if link.sleeper.peer_is_gone().unwrap_or(false) {
            self.lost(self.options.handshake);
        }
    }

    /// The descriptor that becomes readable when an [armed](Self::arm) client has a result or has lost its server. It
    /// changes when the client connects to another server.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.link.as_ref().ok().map(|link| link.sleeper.fd())
    }

    #[cfg(feature = "tokio")]
    pub(crate) fn wake_when_done(&mut self, ticket: &Ticket, waker: &Waker) {
        self.pending.wake_when_done(ticket.0, waker);
    }
}

fn refused(status: u16, body: &Body, slot: Option<Slot>) -> Failure {
    let note = body.inline().and_then(Inline::new).unwrap_or(Inline::EMPTY);
    Failure { why: CallError::Refused(Refused { status, note }), slot }
}

/// Whether a client that was armed will be woken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a client that is `Busy` will not wake you"]
pub enum Armed {
    /// Nothing has come: its descriptor becomes readable when something does.
    Idle,
    /// Results are here already.
    Busy,
}

/// Sends back the server's slots that were dropped, as far as `room` goes while leaving one entry for a call; says what is left.
#[inline]
fn return_slots(link: &mut Link, mut room: u32) -> Result<u32, Breach> {
    while room > 1 {
        let Some(id) = link.replies.next_return() else { break };
        match link.requests.push(&FromClient::Return { id }.encode()) {
            Ok(()) => room -= 1,
            Err(PushError::Broken(broken)) => return Err(broken.into()),
            Err(PushError::Full { .. }) => unreachable!("there was room, which only we use up"),
        }
    }
    Ok(room)
}

fn check(options: &ClientOptions) -> Result<(), ConnectError> {
    let ring = options.ring;
    if !ring.is_power_of_two() || ring < 2 {
        return Err(ConnectError::Options { field: "ring", value: ring.into(), must: "a power of two, at least 2" });
    }
    for (field, geometry) in [("arena.slot_len", options.arena), ("replies.slot_len", options.replies)] {
        if !geometry.is_sound() {
            let value = geometry.slot_len.into();
            return Err(ConnectError::Options { field, value, must: "a multiple of 4096 bytes" });
        }
    }
    Ok(())
}

/// Whatever is done with the socket takes no longer than `patience` (or 1 ms).
fn limit(socket: &OwnedFd, patience: Duration) -> Result<(), ConnectError> {
    let timeout = Some(patience.max(Duration::from_millis(1)));
    for which in [Timeout::Recv, Timeout::Send] {
        rustix::net::sockopt::set_socket_timeout(socket, which, timeout)
            .map_err(|errno| ConnectError::Kernel { doing: "setting a time limit", source: errno.into() })?;
    }
    Ok(())
}

/// A handshake socket that is connected to the server at `path`.
pub(super) fn dial(path: &Path, patience: Duration) -> Result<OwnedFd, ConnectError> {
    let at = path.to_owned();
    let address = wire::address(path).map_err(|_| ConnectError::PathTooLong { path: at.clone() })?;
    match std::fs::metadata(path) {
        Ok(meta) if !meta.file_type().is_socket() => return Err(ConnectError::NotASocket { path: at }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(ConnectError::NoSocket { path: at }),
        _ => {}
    }
    let kernel = |doing, errno: Errno| ConnectError::Kernel { doing, source: errno.into() };
    let socket = wire::socket().map_err(|source| match Errno::from_io_error(&source) {
        Some(Errno::MFILE | Errno::NFILE) => ConnectError::NoDescriptors,
        _ => ConnectError::Kernel { doing: "making a socket", source },
    })?;
    limit(&socket, patience)?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) => Ok(socket),
        Err(Errno::CONNREFUSED) => Err(ConnectError::NoServer { path: at }),
        Err(Errno::NOENT) => Err(ConnectError::NoSocket { path: at }),
        Err(Errno::ACCESS | Errno::PERM) => Err(ConnectError::Forbidden { path: at }),
        Err(Errno::PROTOTYPE) => Err(ConnectError::ForeignSocket { path: at }),
        Err(Errno::AGAIN) => Err(ConnectError::Silent { path: at, limit: patience }),
        Err(errno) => Err(kernel("connecting", errno)),
    }
}
