//! A node that is a program with a memif: a DPDK or VPP client connects to it, and is on a VNI.
//!
//! We are memif's server, so the memory between us is the client's: it makes it, hands it over, and can write all of it
//! at any time. docs/design/vni.md says what that may and may not do to us. A node serves one client at a time, and any
//! number in succession. One copy takes a frame from the client's memory into the node's pool; one copy takes a frame
//! from its sender's pool into the client's buffers. Clients know neither missing check sums nor segments to be cut, so
//! the node [finishes](crate::vni::finish) unfinished frames in a private copy.
//!
//! | module      | contents                                         |
//! |-------------|--------------------------------------------------|
//! | [`wire`]    | messages, and the layout of a ring               |
//! | [`control`] | the exchange with a client, as a table           |
//! | [`refusal`] | reasons why a client is sent away                |
//! | [`ring`]    | a ring in a client's memory, and its regions     |
//! | [`ledger`]  | our place in its rings, for a successor          |
//! | [`client`]  | one client: socket, memory, rings, bells         |
//! | `giver`     | frames from the VNI into a client's buffers      |
//! | `taker`     | frames from a client to their destinations       |
//!
//! A client outlives its server. All its parts go to a [successor](MemifNode::go_on), which continues in the middle of
//! its rings, even if the predecessor was killed. A frame's receiver sees it before its sender learns that it is gone,
//! so a death loses none. A frame that the receiver has seen and the sender has not been told of comes twice: up to a
//! burst each way.

pub mod client;
pub mod control;
mod giver;
pub mod ledger;
pub mod refusal;
pub mod ring;
mod taker;
pub mod wire;

use std::io;
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
use rustix::event::{PollFd, PollFlags, Timespec, epoll};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::net::SocketFlags;
use tasuki_shm::line::Line;

use crate::port::Armed;
use crate::slow::{Slow, WAIT};
use crate::switch::Switch;
use crate::vni::ledger::point;
use crate::vni::offload::HEADER_LEN;
use crate::vni::{PIECE_MAX, Vni};
use client::{Attached, Client, End, Inherited, Parts, dismiss};
use control::Terms;
use giver::Giver;
use ledger::Ledger;
use refusal::{Refusal, Way};
use ring::Chain;
use taker::Taker;

/// Number of frames taken from the client before the node turns to frames for it.
const TAKES: usize = 32;

/// Number of turns between two looks at the control channel, while frames flow.
const ATTEND_EVERY: u32 = 64;

/// How soon a waiting node looks for room again.
const ROOM_AGAIN: Duration = Duration::from_micros(50);

/// How soon the node looks again after it asked the client to ring: the client may have put a frame there and looked
/// before it could see the request.
const SECOND_LOOK: Duration = Duration::from_micros(100);

/// Maximum number of connections that are accepted in one turn.
const KNOCKS: usize = 4;

/// Counts of the frames that did not cross, by reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Dropped {
    /// No client was connected.
    pub away: u64,
    /// The client had posted no buffers for the frame.
    pub no_buffer: u64,
    /// All buffers of the client together, or as many as make a chain, are too small for the frame.
    pub too_long: u64,
    /// The frame contradicts its offload header.
    pub malformed: u64,
    /// The sender took the frame back while it was copied.
    pub too_late: u64,
    /// Frame of the client: the destination node had no room.
    pub no_room: u64,
    /// Frame of the client: no node has the destination address.
    pub nobody: u64,
    /// Frame of the client: no frame has this length.
    pub length: u64,
    /// Frame of the client: its source address is not this node's.
    pub not_own: u64,
    /// A node sent the frame from an address that is not its own.
    pub forged: u64,
}

impl Dropped {
    /// Returns the sum of all counts.
    pub fn sum(&self) -> u64 {
        self.counts().iter().map(|(_, count)| count).sum()
    }

    /// Returns each count with its name.
    pub fn counts(&self) -> [(&'static str, u64); 10] {
        let Dropped { away, no_buffer, too_long, malformed, too_late, no_room, nobody, length, not_own, forged } =
            *self;
        [
            ("dropped_away", away),
            ("dropped_no_buffer", no_buffer),
            ("dropped_too_long", too_long),
            ("dropped_malformed", malformed),
            ("dropped_too_late", too_late),
            ("dropped_no_room", no_room),
            ("dropped_nobody", nobody),
            ("dropped_length", length),
            ("dropped_not_own", not_own),
            ("dropped_forged", forged),
        ]
    }
}

/// Counts of clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Clients {
    /// Number of clients that were connected.
    pub attached: u64,
    /// Number of clients that have left.
    pub left: u64,
    /// Number of clients that were sent away, including those that came while another was connected.
    pub refused: u64,
    /// Why the last one was sent away.
    pub why: Option<Refusal>,
}

/// A memif client on a VNI.
#[derive(Debug)]
pub struct MemifNode<M> {
    listener: OwnedFd,
    terms: Terms,
    vni: Vni,
    switch: Switch<M>,
    client: Option<Box<Client>>,
    /// Our place in the client's rings.
    ledger: Ledger,
    /// The client has changed or gone, and the caller has not asked for its parts since.
    has_news: bool,
    epoll: OwnedFd,
    /// Number of frames that the client received.
    pub given: u64,
    /// Number of frames that the client sent.
    pub taken: u64,
    /// Frames that did not cross, by reason.
    pub dropped: Dropped,
    /// Counts of the clients so far.
    pub clients: Clients,
    /// Copy of a frame that is being finished.
    copy: Box<[u8]>,
    /// Pieces of the frame in hand.
    chain: Chain,
    turns: u32,
    /// The control channel may have a message.
    knocked: bool,
    /// A new connection does not wake the node, because no descriptor was left.
    is_deaf: bool,
    /// When the client's next frame began to wait for a node that has no room.
    waits: Option<Instant>,
    /// Nodes that a frame waited for in vain and that have had no room since.
    slow: Slow,
    /// When the client began to have few or no buffers posted. Frames wait for it briefly.
    stalls: Option<Instant>,
    /// A frame waits for room, which no bell announces.
    naps: bool,
    /// Whether the client was told that it need not ring; `None` if unknown.
    is_quiesced: Option<bool>,
    /// The client was told to ring, and may not have seen that when it last sent.
    in_doubt: bool,
}

impl<M: Deref<Target = [Line]>> MemifNode<M> {
    /// Serves clients that connect to `listener`, a socket that keeps message boundaries (`SOCK_SEQPACKET`). Its
    /// creator decides which programs may connect.
    pub fn new(listener: OwnedFd, terms: Terms, vni: Vni, switch: Switch<M>) -> io::Result<Self> {
        rustix::fs::fcntl_setfl(&listener, OFlags::NONBLOCK)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        watch(&epoll, vni.fd())?;
        watch(&epoll, listener.as_fd())?;
        let ledger = Ledger::over(vni.notes());
        Ok(MemifNode {
            listener,
            terms,
            vni,
            switch,
            client: None,
            ledger,
            has_news: false,
            epoll,
            given: 0,
            taken: 0,
            dropped: Dropped::default(),
            clients: Clients::default(),
            copy: vec![0; PIECE_MAX - HEADER_LEN].into(),
            chain: Chain::default(),
            turns: 0,
            knocked: true,
            is_deaf: false,
            waits: None,
            slow: Slow::default(),
            stalls: None,
            naps: false,
            is_quiesced: Some(false),
            in_doubt: false,
        })
    }

    /// Continues with a client that a predecessor served, if there is none yet.
    pub fn go_on(&mut self, inherited: Inherited) {
        if self.client.as_ref().is_some_and(|client| inherited.is(client)) {
            return;
        }
        let client = match inherited.0 {
            Err((socket, refusal)) => Err((socket, refusal)),
            Ok(client) if self.client.is_some() => Err((client.into_socket(), Refusal::Busy(self.terms.id))),
            Ok(client) => Ok(client),
        };
        match client {
            Ok(client) => {
                let client = self.client.insert(client);
                let watched = watch(&self.epoll, client.socket()).map_err(|_| End::Refused(Refusal::Moved));
                match watched.and_then(|()| client.go_on(&self.terms, &mut self.ledger)) {
                    Ok(()) => self.begin(None),
                    Err(end) => self.end(end),
                }
            }
            Err((socket, refusal)) => {
                self.note(refusal);
                self.has_news = true;
                dismiss(&socket, refusal);
            }
        }
    }

    /// Returns what a successor needs to continue with the client, if one is connected.
    pub fn parts(&mut self) -> io::Result<Option<Parts>> {
        self.has_news = false;
        self.client.as_ref().map_or(Ok(None), |client| client.parts())
    }

    /// Returns whether the client may have changed or gone since the last call of [`parts`](Self::parts).
    #[inline]
    pub fn has_news(&self) -> bool {
        self.has_news
    }

    /// Releases the client to the node's next driver, in this process or another. The node no longer touches it.
    pub fn release(&mut self) -> Option<Inherited> {
        let client = self.client.take()?;
        self.unwatch(&client);
        client.attached.is_some().then_some(Inherited(Ok(client)))
    }

    /// Returns the node's end of the VNI.
    pub fn vni(&mut self) -> &mut Vni {
        &mut self.vni
    }

    /// Returns the number of free pages in the node's pool.
    pub fn pages_left(&self) -> u32 {
        self.vni.pages_left()
    }

    /// Replaces the switch that looks addresses up.
    pub fn set_switch(&mut self, switch: Switch<M>) {
        self.switch = switch;
    }

    /// Takes the last turn before a handover. Tells a client in its handshake to connect anew.
    pub fn finish(&mut self) {
        if self.client.as_ref().is_some_and(|client| client.attached.is_none()) {
            self.end(Refusal::Moved.into());
        }
        self.vni.flush();
    }

    /// Sends the client away.
    pub fn dismiss(&mut self, refusal: Refusal) {
        self.end(refusal.into());
    }

    /// Returns the client's own name, if one is connected.
    pub fn client(&self) -> Option<String> {
        self.client.as_ref().filter(|client| client.attached.is_some()).map(|client| client.name())
    }

    /// Takes one turn in each direction. Returns the number of frames that moved.
    pub fn turn(&mut self) -> usize {
        self.turns = self.turns.wrapping_add(1);
        let in_handshake = self.client.as_ref().is_some_and(|client| client.attached.is_none());
        if self.knocked || in_handshake || self.turns.is_multiple_of(ATTEND_EVERY) {
            self.attend();
        }
        let moved = self.give().and_then(|came| self.take().map(|went| came + went));
        self.vni.flush();
        if let Some(Client { attached: Some(attached), .. }) = self.client.as_deref_mut() {
            attached.from.let_go(&self.ledger);
        }
        moved.unwrap_or_else(|refusal| {
            self.end(refusal.into());
            0
        })
    }

    /// Gives received frames to the client.
    fn give(&mut self) -> Result<usize, Refusal> {
        let Self { vni, switch, client, ledger, given, dropped, copy, chain, stalls, .. } = self;
        let Some(attached) = client.as_mut().and_then(|client| client.attached.as_mut()) else {
            return Ok(vni.receive(|incoming| {
                switch.admits(&incoming);
                dropped.away += 1;
            }));
        };
        // A segment makes dozens of frames, and several arrive at once: do not fill a ring that is short of buffers to
        // the brim.
        if usize::from(attached.to.look()?) >= attached.to.size().div_ceil(4) {
            *stalls = None;
        } else if stalls.get_or_insert_with(Instant::now).elapsed() < WAIT {
            return Ok(0);
        }
        let mut giver = Giver { attached, ledger, switch, given: 0, dropped, copy, chain, broken: None };
        let came = vni.receive_by(&mut giver);
        let Giver { given: gave, broken, .. } = giver;
        if let Some(refusal) = broken {
            return Err(refusal);
        }
        if gave > 0 {
            *given += gave;
            point("memif.ringing");
            attached.ring();
        }
        Ok(came)
    }

    /// Takes frames that the client sends. The client gets its descriptors back once the frames are
    /// [flushed](Vni::flush).
    fn take(&mut self) -> Result<usize, Refusal> {
        let Self { vni, switch, client, taken, dropped, slow, waits, chain, is_quiesced, .. } = self;
        let Some(attached) = client.as_mut().and_then(|client| client.attached.as_mut()) else { return Ok(0) };
        if attached.from.look()? == 0 {
            return Ok(0);
        }
        if is_quiesced.replace(true) != Some(true) {
            attached.from.want_rings(false);
        }
        let mut taker = Taker { vni, switch, taken, dropped, slow, waits };
        let mut count = 0;
        let Attached { regions, from, .. } = attached;
        while count < TAKES && from.next(regions, chain)? {
            if !taker.pass_on(chain.len, |bytes| regions.copy_to(chain, bytes)) {
                break;
            }
            from.read(&chain.places);
            count += 1;
        }
        Ok(count)
    }

    /// Prepares the node for [rest](Self::rest), and looks for frames once more.
    pub fn arm(&mut self) -> Armed {
        if let Some(Client { attached: Some(attached), .. }) = self.client.as_deref_mut() {
            if self.is_quiesced.replace(false) != Some(false) {
                attached.from.want_rings(true);
                self.in_doubt = true;
            }
            // Do not look at a waiting frame before its time.
            if self.waits.is_none() && attached.from.look() != Ok(0) {
                return Armed::Busy;
            }
        }
        // Nor at frames that wait for the client: it may need this very CPU to read what it has.
        let is_stalled = self.stalls.is_some_and(|since| since.elapsed() < WAIT);
        self.naps = is_stalled || self.waits.is_some();
        if is_stalled { Armed::Idle } else { self.vni.arm() }
    }

    /// Returns the descriptor that becomes readable when an [armed](Self::arm) node has work.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Like [`fd`](Self::fd), but `None` if the node soon looks again by itself.
    pub fn bell(&self) -> Option<BorrowedFd<'_>> {
        (!self.naps).then(|| self.fd())
    }

    /// Returns how soon an [armed](Self::arm) node must look again without a bell, or `None`.
    pub fn waits(&self) -> Option<Duration> {
        match () {
            // No peer rings when there is room again.
            () if self.naps => Some(ROOM_AGAIN),
            () if self.in_doubt => Some(SECOND_LOOK),
            () => None,
        }
    }

    /// Sleeps until there is work, or for `most`. Call it after [`arm`](Self::arm) found no frame.
    pub fn rest(&mut self, most: Duration) {
        let most = self.waits().map_or(most, |again| most.min(again));
        let most = Timespec::try_from(most).expect("seconds at most");
        let mut polled: ArrayVec<_, 1> =
            self.bell().into_iter().map(|bell| PollFd::from_borrowed_fd(bell, PollFlags::IN)).collect();
        // Ignore why the poll ended: the next turn looks.
        let woken = rustix::event::poll(&mut polled, Some(&most)).is_ok_and(|woken| woken > 0);
        drop(polled);
        self.wake(woken);
    }

    /// Marks an armed node as awake again. `by_bell` says whether its [bell](Self::bell) may have woken it.
    pub fn wake(&mut self, by_bell: bool) {
        self.knocked |= by_bell | std::mem::take(&mut self.naps);
        self.in_doubt = false;
        if let Some(Client { attached: Some(attached), .. }) = self.client.as_deref() {
            tasuki_shm::wake::drain(attached.bell.as_fd());
        }
        self.vni.wake();
    }

    /// Does periodic work; call it a few times a second. Returns whether the next tick has work.
    pub fn tick(&mut self, now: Instant) -> bool {
        self.knocked = true;
        self.is_deaf = self.is_deaf && watch(&self.epoll, self.listener.as_fd()).is_err();
        if self.client.as_ref().is_some_and(|client| client.is_late(now)) {
            self.end(Refusal::TooSlow.into());
        }
        self.switch.age(now);
        self.vni.tick(now) | self.client.as_ref().is_some_and(|client| client.attached.is_none())
    }

    /// Reads the client's messages, and accepts new connections.
    fn attend(&mut self) {
        self.knocked = false;
        if let Some(client) = &mut self.client {
            let was_attached = client.attached.is_some();
            match client.hear(&self.terms) {
                Ok(()) if !was_attached && client.attached.is_some() => {
                    self.ledger.begin();
                    // The client may ring from the start: do not write into its rings before it has put something
                    // there.
                    self.begin(Some(false));
                    self.clients.attached += 1;
                }
                Ok(()) => {}
                Err(end) => self.end(end),
            }
        }
        for _ in 0..KNOCKS {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let socket = match rustix::net::accept_with(&self.listener, flags) {
                Ok(socket) => socket,
                Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                    // Accept connections at the next tick instead: waking for them until there is a descriptor would
                    // spin.
                    self.is_deaf |= epoll::delete(&self.epoll, &self.listener).is_ok();
                    return;
                }
                Err(_) => return,
            };
            if self.client.is_some() {
                self.note(Refusal::Busy(self.terms.id));
                dismiss(&socket, Refusal::Busy(self.terms.id));
                continue;
            }
            match Client::greet(socket, &self.terms, Instant::now()) {
                Ok(client) if watch(&self.epoll, client.socket()).is_ok() => self.client = Some(Box::new(client)),
                _ => self.clients.left += 1,
            }
        }
    }

    /// Begins to serve a connected client. `is_quiesced` says whether it was told that it need not ring; `None` if
    /// unknown.
    fn begin(&mut self, is_quiesced: Option<bool>) {
        self.has_news = true;
        let Some(Client { attached: Some(attached), .. }) = self.client.as_deref() else { return };
        if watch(&self.epoll, attached.bell.as_fd()).is_err() {
            return self.end(Refusal::RingSilent(Way::ToServer).into());
        }
        (self.waits, self.stalls) = (None, None);
        (self.is_quiesced, self.in_doubt) = (is_quiesced, false);
    }

    /// Drops the client and everything kept of it.
    fn end(&mut self, end: End) {
        let Some(client) = self.client.take() else { return };
        self.has_news = true;
        self.unwatch(&client);
        (self.waits, self.stalls) = (None, None);
        match end {
            End::Left => {
                self.clients.left += 1;
                client.hang_up();
            }
            End::Refused(refusal) => {
                self.note(refusal);
                client.dismiss(refusal);
            }
        }
    }

    /// Ends the watches: the client may have the descriptors open too, so closing ours would not.
    fn unwatch(&self, client: &Client) {
        let _ = epoll::delete(&self.epoll, client.socket());
        if let Some(attached) = &client.attached {
            let _ = epoll::delete(&self.epoll, &attached.bell);
        }
    }

    fn note(&mut self, refusal: Refusal) {
        self.clients.refused += 1;
        self.clients.why = Some(refusal);
    }
}

fn watch(epoll: &OwnedFd, descriptor: BorrowedFd<'_>) -> io::Result<()> {
    Ok(epoll::add(epoll, descriptor, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?)
}

#[cfg(test)]
mod tests;
