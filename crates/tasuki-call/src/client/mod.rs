//! The client's end: calls, and their fate when the server dies or is replaced.

mod connect;
mod gone;
mod spin;

use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
#[cfg(feature = "tokio")]
use std::task::Waker;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, Timespec};
use tasuki_shm::arena::{Arena, Lent, PeerArena, Slot};
use tasuki_shm::bell::{Bell, PeerBell};
use tasuki_shm::crash;
use tasuki_shm::line::{Claims, Line};
use tasuki_shm::region::Span;
use tasuki_shm::ring::{Consumer, Message, Producer, PushError};
use tasuki_shm::slots::Census;
use tasuki_shm::wake::{BellSender, Sleeper, Woken, nap_cost, this_cpu};

use super::message::{Cargo, FromClient, FromServer, Inline};
use super::pending::{Outcome, Pending};
use super::segment::{Layout, Segment};
use super::wire::Service;
use super::{Ask, Body, Breach, CallError, Deadline, Failure, Payload, Refused, Reply, bounded};
use connect::Greeting;
#[cfg(feature = "tokio")]
pub(super) use connect::kernel;
pub use connect::{ClientOptions, ConnectError};
pub(super) use connect::{DIALS_MAX, dial, within};
use gone::Orphaned;
use spin::Spin;

/// Number of looks at the ring between two looks at the clock while spinning.
const LOOKS_PER_CLOCK: u32 = 64;

/// Number of looks at the ring before we check whether the server shares our CPU.
const LOOKS_BEFORE_CPU: u32 = 4;

/// How often we yield a shared CPU to the server before we park.
const YIELDS: u32 = 2;

/// Spin time after which a client checks whether the server is still there. Also how long a client that only polls
/// waits for the successor of a dead server.
pub(super) const POLL_LIVENESS: Duration = Duration::from_millis(1);

/// A submitted call. Pass it to [`Client::poll`], [`Client::wait`] or [`Client::abandon`] of the same client: until
/// then it occupies its place in the ring.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a ticket that is dropped keeps its place in the ring; abandon it instead"]
pub struct Ticket {
    /// Number of the client, since all clients number their calls alike.
    client: u64,
    call: u64,
}

/// The connection to one server.
#[derive(Debug)]
struct Link {
    requests: Producer<Span<Line>, Span<Line>>,
    results: Consumer<Span<Line>, Span<Line>>,
    peer_bell: PeerBell<Span<Line>>,
    bell_sender: BellSender,
    sleeper: Sleeper,
    replies: Arc<PeerArena>,
    verdict: Claims<Span<Line>>,
    generation: u32,
}

/// A client. You may move it to another thread; one thread uses it at a time.
#[derive(Debug)]
pub struct Client {
    /// Differs from the numbers of all other clients of this process.
    number: u64,
    path: PathBuf,
    options: ClientOptions,
    segment: Segment,
    arena: Arena,
    bell: Bell<Span<Line>>,
    pending: Pending,
    spin: Spin,
    link: Result<Link, CallError>,
    /// While there is no link: the calls that the next link takes over.
    orphaned: Option<Orphaned>,
    /// A handshake that we have begun and that no server has answered in time.
    greeting: Option<Greeting>,
    service: Service,
    /// Ring index of the next request, whichever server takes it.
    next_request: u32,
    /// Whether requests were staged since the last look at the server's bell.
    unrung: bool,
    /// Whether the last flush had to ring a sleeping server.
    rung: bool,
    /// Start of a wait for a server that we rang, if its spin time is over.
    overslept: Option<Instant>,
    /// Tick of the coarse clock at the last check that the server is there.
    last_liveness: Timespec,
    /// Length in bytes of the last request that went in a slot, or 0 after a wait.
    warm: usize,
}

impl Client {
    /// Connects to the server at `path`.
    pub fn connect(path: impl AsRef<Path>, options: &ClientOptions) -> Result<Self, ConnectError> {
        connect::check(options)?;
        let layout = Layout { ring: options.ring, slots: options.arena.count };
        let segment = Segment::create("tasuki-client", layout)?;
        let arena = Arena::create("tasuki-requests", options.arena, segment.table(), options.detach)?;
        let bell = Bell::new(segment.bell(), this_cpu());
        static CLIENTS: AtomicU64 = AtomicU64::new(0);
        let mut client = Client {
            number: CLIENTS.fetch_add(1, Ordering::Relaxed),
            path: path.as_ref().to_owned(),
            options: ClientOptions { handshake: bounded(options.handshake), ..options.clone() },
            pending: Pending::new(options.ring),
            spin: options.spin.map_or_else(|| Spin::adaptive(nap_cost()), |time| Spin::fixed(bounded(time))),
            link: Err(CallError::ServerGone { generation: 0, why: None }),
            orphaned: None,
            greeting: None,
            service: Service(0),
            next_request: 0,
            unrung: false,
            rung: false,
            overslept: None,
            last_liveness: coarse_clock(),
            warm: 0,
            segment,
            arena,
            bell,
        };
        client.establish(None, client.options.handshake)?;
        Ok(client)
    }

    /// Connects again after [`CallError::ServerGone`], to whichever server is at the path now.
    pub fn reconnect(&mut self) -> Result<(), ConnectError> {
        self.find_successor(self.options.handshake);
        if self.link.is_err() {
            self.establish(None, self.options.handshake)?;
        }
        Ok(())
    }

    /// Returns the generation of the connected server, or `None` if it is gone. Each successor on the same state has
    /// a number one higher.
    pub fn generation(&self) -> Option<u32> {
        self.link.as_ref().ok().map(|link| link.generation)
    }

    /// Returns the service of the connected server.
    pub fn service(&self) -> Service {
        self.service
    }

    /// Returns the number of calls that are in flight or whose results were not fetched.
    pub fn in_flight(&self) -> usize {
        self.pending.in_use()
    }

    /// Takes a free slot of the arena, for writing a request.
    pub fn take_slot(&self) -> Result<Slot, CallError> {
        self.arena.take().ok_or(CallError::NoSlot { count: self.arena.geometry().count })
    }

    /// Counts the slots of the arena by holder.
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

    /// Sends a request. [`poll`](Self::poll) or [`wait`](Self::wait) fetches its result.
    ///
    /// Does not wait, with one exception: if the server is gone and its successor has not answered yet, it waits as
    /// long as a handshake may take.
    pub fn submit(&mut self, ask: Ask<'_>) -> Result<Ticket, Failure> {
        let ticket = self.stage(ask)?;
        self.flush();
        Ok(ticket)
    }

    /// Sends a request without looking whether the server sleeps. [`flush`](Self::flush) looks, once for many
    /// requests.
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
        Ok(Ticket { client: self.number, call })
    }

    /// Makes sure that there is a link, a place for one more call, and an entry for it in the ring. Also returns
    /// slots that the server is to get back.
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
                // A caller that only tries again must not wait for a server that was never woken for the staged
                // requests.
                self.flush();
                // Nor for a dead server: if all calls were abandoned, no other code notices its death.
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

    /// Pushes into a ring that has room. Returns the index of the message.
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

    /// Wakes the server if it sleeps. Needed only after [`stage`](Self::stage).
    #[inline]
    pub fn flush(&mut self) {
        if !std::mem::take(&mut self.unrung) {
            return;
        }
        let Ok(link) = &mut self.link else { return };
        self.rung = link.peer_bell.must_ring();
        if self.rung {
            // The server that we wake may run on this CPU: publish ours first, so that it knows not to spin.
            self.bell.wake(this_cpu());
            link.bell_sender.ring();
            crash::point("client.send.rung");
        }
    }

    /// Returns the call of a ticket, if this client made it and its result was not fetched.
    #[inline]
    fn call_of(&mut self, ticket: &Ticket) -> Result<u64, CallError> {
        match ticket.client == self.number && self.pending.is_wanted(ticket.call) {
            true => Ok(ticket.call),
            false => Err(CallError::NoSuchTicket),
        }
    }

    /// Returns the result of a call if it has arrived.
    ///
    /// # Errors
    /// [`CallError::NoSuchTicket`] if the result was fetched before, or if another client made the call.
    pub fn poll(&mut self, ticket: &Ticket) -> Result<Option<Reply>, Failure> {
        let call = self.call_of(ticket)?;
        self.flush();
        if self.link.is_err() {
            self.find_successor(POLL_LIVENESS);
        }
        if let Some(outcome) = self.pending.take(call) {
            return outcome.map(Some);
        }
        for _ in 0..self.options.ring {
            match self.next_answer() {
                Ok(Some(answer)) if answer.call == call => return self.conclude(&answer).map(Some),
                Ok(Some(answer)) => self.record_answer(&answer),
                Ok(None) => break,
                Err(breach) => drop(self.broken(breach)),
            }
        }
        self.check_liveness();
        match (self.pending.take(call), &self.link) {
            (Some(outcome), _) => outcome.map(Some),
            (None, Err(why)) if self.orphaned.is_none() => Err(why.clone().into()),
            (None, _) => Ok(None),
        }
    }

    /// Notices the server's death even if the client never sleeps.
    fn check_liveness(&mut self) {
        let now = coarse_clock();
        if now == self.last_liveness {
            return;
        }
        self.last_liveness = now;
        let Ok(link) = &mut self.link else { return };
        if link.sleeper.peer_is_gone().unwrap_or(false) {
            self.lost(POLL_LIVENESS);
        }
    }

    /// Waits for the result of a call.
    ///
    /// # Errors
    /// After [`CallError::DeadlinePassed`] the ticket is gone: the client discards the result when it comes.
    /// [`CallError::NoSuchTicket`] if a poll has fetched the result, or if another client made the call.
    pub fn wait(&mut self, ticket: Ticket, deadline: Deadline) -> Result<Reply, Failure> {
        let call = self.call_of(&ticket)?;
        self.flush();
        if let Some(outcome) = self.pending.take(call) {
            return outcome;
        }
        let mut until = None;
        loop {
            if self.link.is_ok() && self.spin(deadline, &mut until) {
                match self.next_answer() {
                    Ok(Some(answer)) if answer.call == call => return self.conclude(&answer),
                    Ok(Some(answer)) => self.record_answer(&answer),
                    Ok(None) => {}
                    Err(breach) => drop(self.broken(breach)),
                }
            } else if self.link.is_ok() {
                let spun_on = this_cpu();
                let napped = self.nap(until);
                // A server that the kernel woke on the CPU where we spun had to wait for our nap.
                if let Some(start) = self.overslept.take().filter(|_| !self.server_is_on(spun_on)) {
                    self.spin.overslept(start.elapsed());
                }
                if let Err(why) = napped {
                    // The event that ended the link has also settled the call, and its slot is back.
                    return self.pending.take(call).unwrap_or_else(|| {
                        self.pending.abandon(call);
                        Err(why.into())
                    });
                }
            }
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
                // Either the new server has the call now, or the call is over.
                if let Some(outcome) = self.pending.take(call) {
                    return outcome;
                }
            }
        }
    }

    /// Gives up a call. The client discards its result when it comes. A ticket of another client has no effect.
    pub fn abandon(&mut self, ticket: Ticket) {
        if let Ok(call) = self.call_of(&ticket) {
            self.pending.abandon(call);
        }
    }

    /// Polls for results for as long as a nap would cost. Returns whether there is one. Fixes the deadline.
    fn spin(&mut self, deadline: Deadline, until: &mut Option<Instant>) -> bool {
        if self.look_often(LOOKS_BEFORE_CPU) {
            return true;
        }
        for _ in 0..YIELDS {
            // The server cannot answer while we spin on its CPU: let it run, then sleep.
            if !self.server_is_on(this_cpu()) {
                return self.spin_apart(deadline, until);
            }
            rustix::thread::sched_yield();
            if self.look_often(1) {
                return true;
            }
        }
        *until = until.or_else(|| deadline.fixed());
        false
    }

    /// Does the same while the server runs on another CPU.
    fn spin_apart(&mut self, deadline: Deadline, until: &mut Option<Instant>) -> bool {
        if self.look_often(LOOKS_PER_CLOCK) {
            return true;
        }
        if let len @ 1.. = std::mem::take(&mut self.warm) {
            // A caller that sends one slot usually sends another: fetch its lines while we wait.
            self.arena.warm_next(len);
        }
        let start = Instant::now();
        *until = until.or_else(|| deadline.fixed());
        let rung = std::mem::take(&mut self.rung);
        let budget = self.spin.budget(rung);
        let limit = until.map_or(start + budget, |until| until.min(start + budget));
        loop {
            if self.look_often(LOOKS_PER_CLOCK) {
                return true;
            }
            let now = Instant::now();
            if now >= limit {
                self.overslept = rung.then_some(start);
                return false;
            }
            // Only a client that spins for longer than any nap takes pays for this occasional system call.
            if now.duration_since(start) >= POLL_LIVENESS {
                self.check_liveness();
                if self.link.is_err() {
                    return false;
                }
            }
        }
    }

    /// Whether a result is there, or a breach, which [`next_answer`](Self::next_answer) will report.
    #[inline]
    fn look_often(&self, times: u32) -> bool {
        let Ok(link) = &self.link else { return false };
        (0..times).any(|_| link.results.is_ready())
    }

    fn server_is_on(&self, cpu: u32) -> bool {
        self.link.as_ref().is_ok_and(|link| link.peer_bell.published().cpu == cpu)
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
        let woken = link.sleeper.sleep(until).map_err(|error| CallError::Kernel(Arc::new(error)))?;
        self.bell.wake(this_cpu());
        if woken == Woken::PeerGone {
            self.lost(self.patience(until));
            if self.orphaned.is_some() {
                // The caller continues to wait for the successor, as long as its deadline allows.
                return Ok(());
            }
        }
        // A server that rings without end, or dies and comes back without end, does not prolong the wait.
        let late = woken == Woken::TimedOut || until.is_some_and(|until| Instant::now() >= until);
        if late && self.gather()? == 0 {
            return Err(CallError::DeadlinePassed);
        }
        Ok(())
    }

    /// Takes one answer from the ring.
    #[inline(always)]
    fn next_answer(&mut self) -> Result<Option<FromServer>, Breach> {
        let Ok(link) = &mut self.link else { return Ok(None) };
        let Some(message) = link.results.pop()? else { return Ok(None) };
        link.results.retire();
        Ok(Some(FromServer::decode(&message)?))
    }

    /// Takes all results from the ring, at most as many as it has entries. Returns the number taken.
    pub(crate) fn gather(&mut self) -> Result<u32, CallError> {
        let mut count = 0;
        while count < self.options.ring {
            match self.next_answer() {
                Ok(Some(answer)) => self.record_answer(&answer),
                Ok(None) => break,
                Err(breach) => drop(self.broken(breach)),
            }
            count += 1;
        }
        self.link.as_ref().map(|_| count).map_err(|why| why.clone())
    }

    /// Records an answer for a caller that asks for it later.
    fn record_answer(&mut self, answer: &FromServer) {
        let booked = self.pending.take_slot(answer.call).map_err(Breach::from).and_then(|lent| {
            let (body, returned) = self.unpack(answer, lent)?;
            Ok(self.pending.finish(answer.call, outcome(answer.status, body, returned))?)
        });
        if let Err(breach) = booked {
            self.broken(breach);
        }
    }

    /// Ends a call with its answer.
    #[inline(always)]
    fn conclude(&mut self, answer: &FromServer) -> Outcome {
        let lent = self.pending.complete(answer.call).map_err(Breach::from);
        match lent.and_then(|lent| self.unpack(answer, lent)) {
            Ok((body, returned)) => outcome(answer.status, body, returned),
            Err(breach) => Err(self.broken(breach).into()),
        }
    }

    /// Returns the contents of an answer, and the slot that went with the request.
    #[inline(always)]
    fn unpack(&self, answer: &FromServer, lent: Option<Lent>) -> Result<(Body, Option<Slot>), Breach> {
        let returned = match lent {
            Some(lent) => Some(self.arena.attach(lent)?),
            None => None,
        };
        crash::point("client.return.attached");
        let body = match answer.cargo {
            Cargo::Bytes(inline) => Body::Inline(inline),
            Cargo::Slot { id, len } => {
                let link = self.link.as_ref().expect("the message came over it");
                Body::Slot(link.replies.accept(id, len)?)
            }
        };
        Ok((body, returned))
    }

    /// Publishes that this client is about to sleep elsewhere, and looks for results once more. See [`Armed`].
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

    /// Publishes that this client is awake again, and notices the server's death.
    pub fn woken(&mut self) {
        self.woken_within(self.options.handshake);
    }

    /// Does the same, and looks for a successor for as long as `patience`.
    pub(crate) fn woken_within(&mut self, patience: Duration) {
        self.bell.wake(this_cpu());
        let Ok(link) = &mut self.link else { return };
        tasuki_shm::wake::drain(link.sleeper.fd());
        if link.sleeper.peer_is_gone().unwrap_or(false) {
            self.lost(patience);
        }
    }

    /// Looks for the successor of a lost server for as long as `patience`. Returns whether it is still to be found.
    #[cfg(feature = "tokio")]
    pub(crate) fn is_seeking(&mut self, patience: Duration) -> bool {
        self.find_successor(patience);
        self.orphaned.is_some()
    }

    /// Returns the descriptor that becomes readable when an [armed](Self::arm) client has a result or has lost its
    /// server. The descriptor changes when the client connects to another server.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.link.as_ref().ok().map(|link| link.sleeper.fd())
    }

    #[cfg(feature = "tokio")]
    pub(crate) fn wake_all(&mut self) {
        self.pending.wake_all();
    }

    #[cfg(feature = "tokio")]
    pub(crate) fn wake_when_done(&mut self, ticket: &Ticket, waker: &Waker) {
        self.pending.wake_when_done(ticket.call, waker);
    }
}

/// Reads a clock that ticks some hundred times a second and costs almost nothing to read.
fn coarse_clock() -> Timespec {
    rustix::time::clock_gettime(ClockId::MonotonicCoarse)
}

/// Turns an answer into the caller's result.
#[inline(always)]
fn outcome(status: u16, body: Body, returned: Option<Slot>) -> Outcome {
    match status {
        0 => Ok(Reply { body, returned }),
        status => Err(refused(status, &body, returned)),
    }
}

#[cold]
fn refused(status: u16, body: &Body, slot: Option<Slot>) -> Failure {
    let note = body.inline().and_then(Inline::new).unwrap_or(Inline::EMPTY);
    Failure { why: CallError::Refused(Refused { status, note }), slot }
}

/// Whether a client that was armed will be woken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a client that is `Busy` will not wake you"]
pub enum Armed {
    /// No result has come. The client's descriptor becomes readable when one does.
    Idle,
    /// Results are here already.
    Busy,
}

/// Sends dropped slots back to the server, as far as `room` goes, but leaves one entry for a call. Returns the room
/// left.
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
