//! A node that is a program with a memif: DPDK's or VPP's client connects to it, and is on a VNI.
//!
//! We are memif's server, so that the memory between us is the client's: it makes it, hands it over, and can write all of it at any time. What
//! that may do to us, and may not: docs/design/vni.md. One client at a time, and any number after one another; a frame is copied once out of
//! the client's memory into the node's pool, and once out of its sender's pool into the client's buffers. Clients know of no check sums that
//! are to be computed nor of segments that are to be cut, so that frames which are not finished are [finished](crate::vni::finish) here, in a
//! copy of our own.
//!
//! | module      | what it is                                       |
//! |-------------|--------------------------------------------------|
//! | [`wire`]    | messages, and what lies where in a ring          |
//! | [`control`] | what is said with a client, as a table           |
//! | [`refusal`] | why a client is sent away                        |
//! | [`ring`]    | a ring in a client's memory, and its regions     |
//! | [`ledger`]  | where we are with its rings, for a successor     |
//! | [`client`]  | one client: socket, memory, rings, bells         |
//! | `giver`     | frames into a client's buffers                   |
//! | `taker`     | frames from a client to where they go            |
//!
//! A client outlives its server: all that it is made of goes to a [successor](MemifNode::go_on), which goes on in the middle of its rings, also if
//! its predecessor was killed. Frames are seen by those they go to before whoever they come from is told that they are gone, so that a death loses
//! none; what one has seen and the other was not told of comes twice: up to a burst each way.

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

/// Frames that are taken from the client before those that have come for it are looked at.
const TAKES: usize = 32;

/// Turns from one look at the control channel to the next, while frames flow.
const ATTEND_EVERY: u32 = 64;

/// How soon a node that waits looks whether there is room.
const ROOM_AGAIN: Duration = Duration::from_micros(50);

/// How soon it is looked again after the client was asked to ring: it may have put a frame there and looked before it could see that.
const SECOND_LOOK: Duration = Duration::from_micros(100);

/// Who connect in vain, told so in one turn.
const KNOCKS: usize = 4;

/// What became of frames that did not cross.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Dropped {
    /// There was no client.
    pub away: u64,
    /// The client had posted no buffers for them.
    pub no_buffer: u64,
    /// All buffers of the client together, or as many as make a chain, are too small for them.
    pub too_long: u64,
    /// They are not what their sender said of them.
    pub malformed: u64,
    /// Their sender took them back while they were copied.
    pub too_late: u64,
    /// Of the client's: the node that they were for had no room for them,
    pub no_room: u64,
    /// nobody has the address,
    pub nobody: u64,
    /// no frame has this length,
    pub length: u64,
    /// or they were from an address that is not this node's.
    pub not_own: u64,
    /// They came from a node in an address that is not its own.
    pub forged: u64,
}

impl Dropped {
    /// All of them.
    pub fn sum(&self) -> u64 {
        self.counts().iter().map(|(_, count)| count).sum()
    }

    /// Each, by name.
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

/// What became of clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Clients {
    /// Those that were connected,
    pub attached: u64,
    /// that have left,
    pub left: u64,
    /// and that were sent away, those among them that came while there was another.
    pub refused: u64,
    /// Why the last was.
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
    /// Where we are with its rings.
    ledger: Ledger,
    /// Who is connected is another, or nobody any more, and nobody was told.
    has_news: bool,
    epoll: OwnedFd,
    /// Frames that the client got,
    pub given: u64,
    /// and that it sent.
    pub taken: u64,
    /// Those that did not cross.
    pub dropped: Dropped,
    /// Who has been there.
    pub clients: Clients,
    /// A frame that is to be finished.
    copy: Box<[u8]>,
    /// Where the frame lies that is looked at.
    chain: Chain,
    turns: u32,
    /// The control channel may have something to say.
    knocked: bool,
    /// Nobody is woken by who connects: there was no descriptor left.
    is_deaf: bool,
    /// Since when the client's next frame waits for a node that has no room.
    waits: Option<Instant>,
    /// Who was waited for in vain, and has had no room since.
    slow: Slow,
    /// Since when the client has posted few buffers or none. At first, frames wait for it.
    stalls: Option<Instant>,
    /// Something waits for room, of which nobody is told.
    naps: bool,
    /// Whether the client was told that it need not ring, if we know.
    is_quiesced: Option<bool>,
    /// It was told that it has to, and it may not have seen that when it last sent.
    in_doubt: bool,
}

impl<M: Deref<Target = [Line]>> MemifNode<M> {
    /// Clients that connect to `listener`, a socket that keeps the bounds of messages (`SOCK_SEQPACKET`). Who may connect is its maker's matter.
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

    /// Goes on with a client that a predecessor served, if there is none yet.
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

    /// What a successor needs to go on with the client, if one is connected.
    pub fn parts(&mut self) -> io::Result<Option<Parts>> {
        self.has_news = false;
        self.client.as_ref().map_or(Ok(None), |client| client.parts())
    }

    /// Whether another client may be connected than when its [parts](Self::parts) were asked for last, or none any more.
    #[inline]
    pub fn has_news(&self) -> bool {
        self.has_news
    }

    /// The client goes to whoever drives the node next, in this process or another; nothing of it is touched any more.
    pub fn release(&mut self) -> Option<Inherited> {
        let client = self.client.take()?;
        self.unwatch(&client);
        client.attached.is_some().then_some(Inherited(Ok(client)))
    }

    /// The node's end of the VNI.
    pub fn vni(&mut self) -> &mut Vni {
        &mut self.vni
    }

    /// Pages of the node's pool that nobody holds.
    pub fn pages_left(&self) -> u32 {
        self.vni.pages_left()
    }

    /// Looks addresses up elsewhere from now on.
    pub fn set_switch(&mut self, switch: Switch<M>) {
        self.switch = switch;
    }

    /// The last turn of whoever hands the node on. A client in its handshake is told to connect anew.
    pub fn finish(&mut self) {
        if self.client.as_ref().is_some_and(|client| client.attached.is_none()) {
            self.end(Refusal::Moved.into());
        }
        self.vni.flush();
    }

    /// The client is sent away.
    pub fn dismiss(&mut self, refusal: Refusal) {
        self.end(refusal.into());
    }

    /// What the client calls itself, if one is connected.
    pub fn client(&self) -> Option<String> {
        self.client.as_ref().filter(|client| client.attached.is_some()).map(|client| client.name())
    }

    /// One turn in each direction; says how many frames moved.
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

    /// Gives the client what came.
    fn give(&mut self) -> Result<usize, Refusal> {
        let Self { vni, switch, client, ledger, given, dropped, copy, chain, stalls, .. } = self;
        let Some(attached) = client.as_mut().and_then(|client| client.attached.as_mut()) else {
            return Ok(vni.receive(|incoming| {
                switch.admits(&incoming);
                dropped.away += 1;
            }));
        };
        // A segment makes dozens of frames, and there are some at a time: what is short of room is not filled to the brim.
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

    /// Takes what the client sends. It has it back when that is [flushed](Vni::flush).
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

    /// Says that whoever drives the node is about to [rest](Self::rest), and looks once more.
    pub fn arm(&mut self) -> Armed {
        if let Some(Client { attached: Some(attached), .. }) = self.client.as_deref_mut() {
            if self.is_quiesced.replace(false) != Some(false) {
                attached.from.want_rings(true);
                self.in_doubt = true;
            }
            // A frame that waits is not looked at before its time.
            if self.waits.is_none() && attached.from.look() != Ok(0) {
                return Armed::Busy;
            }
        }
        // Nor are those that wait for the client, which may need this very CPU to read what it has.
        let is_stalled = self.stalls.is_some_and(|since| since.elapsed() < WAIT);
        self.naps = is_stalled || self.waits.is_some();
        if is_stalled { Armed::Idle } else { self.vni.arm() }
    }

    /// The descriptor that becomes readable when there is something to do for an [armed](Self::arm) node.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// The same, of a node that does not look again by itself soon.
    pub fn bell(&self) -> Option<BorrowedFd<'_>> {
        (!self.naps).then(|| self.fd())
    }

    /// How soon an [armed](Self::arm) node must look again though nobody rings.
    pub fn waits(&self) -> Option<Duration> {
        match () {
            // Nobody rings when there is room again.
            () if self.naps => Some(ROOM_AGAIN),
            () if self.in_doubt => Some(SECOND_LOOK),
            () => None,
        }
    }

    /// Sleeps until there is something to do, or for `most`, after [`arm`](Self::arm) has found nothing.
    pub fn rest(&mut self, most: Duration) {
        let most = self.waits().map_or(most, |again| most.min(again));
        let most = Timespec::try_from(most).expect("seconds at most");
        let mut polled: ArrayVec<_, 1> =
            self.bell().into_iter().map(|bell| PollFd::from_borrowed_fd(bell, PollFlags::IN)).collect();
        // Whatever ended it: the next turn sees.
        let woken = rustix::event::poll(&mut polled, Some(&most)).is_ok_and(|woken| woken > 0);
        drop(polled);
        self.wake(woken);
    }

    /// Says that an armed node is awake again, and whether its [bell](Self::bell) may have woken it.
    pub fn wake(&mut self, by_bell: bool) {
        self.knocked |= by_bell | std::mem::take(&mut self.naps);
        self.in_doubt = false;
        if let Some(Client { attached: Some(attached), .. }) = self.client.as_deref() {
            tasuki_shm::wake::drain(attached.bell.as_fd());
        }
        self.vni.wake();
    }

    /// Does what is due now and then, a few times a second; says whether there is more to come.
    pub fn tick(&mut self, now: Instant) -> bool {
        self.knocked = true;
        self.is_deaf = self.is_deaf && watch(&self.epoll, self.listener.as_fd()).is_err();
        if self.client.as_ref().is_some_and(|client| client.is_late(now)) {
            self.end(Refusal::TooSlow.into());
        }
        self.switch.age(now);
        self.vni.tick(now) | self.client.as_ref().is_some_and(|client| client.attached.is_none())
    }

    /// Hears the client, and who else has connected.
    fn attend(&mut self) {
        self.knocked = false;
        if let Some(client) = &mut self.client {
            let was_attached = client.attached.is_some();
            match client.hear(&self.terms) {
                Ok(()) if !was_attached && client.attached.is_some() => {
                    self.ledger.begin();
                    // It may ring from the start: nothing is written into its rings before it has put something there.
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
                    // Who knocks is heard at the next tick: to be woken for it until there is a descriptor would be to spin.
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

    /// The client is connected, and was told that it need not ring, or not, if we know.
    fn begin(&mut self, is_quiesced: Option<bool>) {
        self.has_news = true;
        let Some(Client { attached: Some(attached), .. }) = self.client.as_deref() else { return };
        if watch(&self.epoll, attached.bell.as_fd()).is_err() {
            return self.end(Refusal::RingSilent(Way::ToServer).into());
        }
        (self.waits, self.stalls) = (None, None);
        (self.is_quiesced, self.in_doubt) = (is_quiesced, false);
    }

    /// The client is there no more, and nothing of it is kept.
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

    /// The client may have these open too, and then closing ours ends no watch.
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
