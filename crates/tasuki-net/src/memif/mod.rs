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
//! | [`client`]  | one client: socket, memory, rings, bells         |

pub mod client;
pub mod control;
pub mod refusal;
pub mod ring;
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
use tasuki_shm::vni::directory::Mac;

use crate::port::Armed;
use crate::slow::{Slow, WAIT};
use crate::switch::{Switch, To};
use crate::vni::finish::{finish, is_finished};
use crate::vni::offload::HEADER_LEN;
use crate::vni::{Incoming, PIECE_MAX, SendError, Vni};
use client::{Attached, Client, End, dismiss};
use control::Terms;
use refusal::{Refusal, Way};
use ring::{Chain, Room};

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
    /// or no frame has this length.
    pub length: u64,
}

impl Dropped {
    /// All of them.
    pub fn sum(&self) -> u64 {
        self.counts().iter().map(|(_, count)| count).sum()
    }

    /// Each, by name.
    pub fn counts(&self) -> [(&'static str, u64); 8] {
        let Dropped { away, no_buffer, too_long, malformed, too_late, no_room, nobody, length } = *self;
        [
            ("dropped_away", away),
            ("dropped_no_buffer", no_buffer),
            ("dropped_too_long", too_long),
            ("dropped_malformed", malformed),
            ("dropped_too_late", too_late),
            ("dropped_no_room", no_room),
            ("dropped_nobody", nobody),
            ("dropped_length", length),
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
    client: Option<Client>,
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
    /// The client was told that it need not ring.
    is_hushed: bool,
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
        Ok(MemifNode {
            listener,
            terms,
            vni,
            switch,
            client: None,
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
            is_hushed: false,
            in_doubt: false,
        })
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

    /// The last turn of whoever hands the node on. The client is told to connect anew: its memory is nobody else's.
    pub fn finish(&mut self) {
        self.end(Refusal::Moved.into());
        self.vni.flush();
    }

    /// What the client calls itself, if one is connected.
    pub fn client(&self) -> Option<String> {
        self.client.as_ref().filter(|client| client.attached.is_some()).map(Client::name)
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
        moved.unwrap_or_else(|refusal| {
            self.end(refusal.into());
            0
        })
    }

    /// Gives the client what came.
    fn give(&mut self) -> Result<usize, Refusal> {
        let Self { vni, switch, client, given, dropped, copy, chain, stalls, .. } = self;
        let Some(attached) = client.as_mut().and_then(|client| client.attached.as_mut()) else {
            return Ok(vni.receive(|incoming| {
                switch.learn_of(&incoming);
                dropped.away += 1;
            }));
        };
        // A segment makes dozens of frames, and there are some at a time: what is short of room is not filled to the brim.
        if usize::from(attached.to.look()?) >= attached.to.size().div_ceil(4) {
            *stalls = None;
        } else if stalls.get_or_insert_with(Instant::now).elapsed() < WAIT {
            return Ok(0);
        }
        let mut giver = Giver { attached, given: 0, dropped, copy, chain, broken: None };
        let came = vni.receive(|incoming| {
            switch.learn_of(&incoming);
            giver.give(&incoming);
        });
        let Giver { given: gave, broken, .. } = giver;
        if let Some(refusal) = broken {
            return Err(refusal);
        }
        if gave > 0 {
            *given += gave;
            attached.to.publish();
            attached.ring();
        }
        Ok(came)
    }

    /// Takes what the client sends.
    fn take(&mut self) -> Result<usize, Refusal> {
        let Self { vni, switch, client, taken, dropped, slow, waits, chain, is_hushed, .. } = self;
        let Some(attached) = client.as_mut().and_then(|client| client.attached.as_mut()) else { return Ok(0) };
        if attached.from.look()? == 0 {
            return Ok(0);
        }
        if !std::mem::replace(is_hushed, true) {
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
        if count > 0 {
            from.publish();
        }
        Ok(count)
    }

    /// Says that whoever drives the node is about to [rest](Self::rest), and looks once more.
    pub fn arm(&mut self) -> Armed {
        if let Some(Client { attached: Some(attached), .. }) = &mut self.client {
            if std::mem::replace(&mut self.is_hushed, false) {
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
        if let Some(Client { attached: Some(attached), .. }) = &self.client {
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
                Ok(()) if !was_attached && client.attached.is_some() => self.begin(),
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
                Ok(client) if watch(&self.epoll, client.socket()).is_ok() => self.client = Some(client),
                _ => self.clients.left += 1,
            }
        }
    }

    /// The client is connected.
    fn begin(&mut self) {
        let Some(Client { attached: Some(attached), .. }) = &self.client else { return };
        if watch(&self.epoll, attached.bell.as_fd()).is_err() {
            return self.end(Refusal::RingSilent(Way::ToServer).into());
        }
        self.clients.attached += 1;
        (self.waits, self.stalls) = (None, None);
        // It may ring from the start: nothing is written into its rings before it has put something there.
        (self.is_hushed, self.in_doubt) = (false, false);
    }

    /// The client is there no more, and nothing of it is kept.
    fn end(&mut self, end: End) {
        let Some(client) = self.client.take() else { return };
        // The client may have these open too, and then closing ours ends no watch.
        let _ = epoll::delete(&self.epoll, client.socket());
        if let Some(attached) = &client.attached {
            let _ = epoll::delete(&self.epoll, &attached.bell);
        }
        (self.waits, self.stalls) = (None, None);
        match end {
            End::Left => self.clients.left += 1,
            End::Refused(refusal) => {
                self.note(refusal);
                client.dismiss(refusal);
            }
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

/// Puts frames into a client's buffers.
struct Giver<'a> {
    attached: &'a mut Attached,
    given: u64,
    dropped: &'a mut Dropped,
    copy: &'a mut [u8],
    chain: &'a mut Chain,
    broken: Option<Refusal>,
}

impl Giver<'_> {
    #[inline]
    fn give(&mut self, incoming: &Incoming<'_>) {
        match incoming.offload() {
            Err(_) => self.dropped.too_late += 1,
            Ok(offload) if is_finished(&offload) => self.give_finished(incoming),
            Ok(_) if incoming.len() > self.copy.len() => self.dropped.malformed += 1,
            Ok(offload) => match incoming.copy_to(self.copy) {
                Err(_) => self.dropped.too_late += 1,
                Ok(len) => {
                    let copy = std::mem::take(&mut self.copy);
                    if finish(&offload, &mut copy[..len], |front, back| self.give_parts(front, back)).is_err() {
                        self.dropped.malformed += 1;
                    }
                    self.copy = copy;
                }
            },
        }
    }

    fn give_finished(&mut self, incoming: &Incoming<'_>) {
        if !self.has_room(incoming.len()) {
            return;
        }
        let Attached { regions, to, .. } = &mut *self.attached;
        regions.fill(&self.chain.places, incoming.len(), |at, len, into, offset| {
            incoming.copy_to_common(at, len, into, offset)
        });
        // The client sees none of it otherwise.
        if incoming.is_whole() {
            to.filled(&self.chain.places, incoming.len());
            self.given += 1;
        } else {
            self.dropped.too_late += 1;
        }
    }

    /// The same with a frame that lies in two parts in memory of ours.
    fn give_parts(&mut self, front: &[u8], back: &[u8]) {
        let all = front.len() + back.len();
        if !self.has_room(all) {
            return;
        }
        let Attached { regions, to, .. } = &mut *self.attached;
        regions.fill(&self.chain.places, all, |at, len, into, offset| {
            let of_front = &front[at.min(front.len())..(at + len).min(front.len())];
            let of_back = &back[at.max(front.len()) - front.len()..(at + len).max(front.len()) - front.len()];
            into.copy_from(offset, of_front)?;
            into.copy_from(offset + of_front.len(), of_back)
        });
        to.filled(&self.chain.places, all);
        self.given += 1;
    }

    /// Looks for buffers for a frame; counts why there are none.
    #[inline]
    fn has_room(&mut self, len: usize) -> bool {
        if self.broken.is_some() {
            self.dropped.away += 1;
            return false;
        }
        let Attached { regions, to, .. } = &mut *self.attached;
        let mut room = to.room(regions, len, self.chain);
        if room == Ok(Room::None) {
            room = to.look().and_then(|_| to.room(regions, len, self.chain));
        }
        match room {
            Ok(Room::Enough) => return true,
            Ok(Room::None) => self.dropped.no_buffer += 1,
            Ok(Room::TooLong) => self.dropped.too_long += 1,
            Err(refusal) => {
                self.dropped.away += 1;
                self.broken = Some(refusal);
            }
        }
        false
    }
}

/// Sends a client's frames to where they go.
struct Taker<'a, M> {
    vni: &'a mut Vni,
    switch: &'a mut Switch<M>,
    taken: &'a mut u64,
    dropped: &'a mut Dropped,
    slow: &'a mut Slow,
    waits: &'a mut Option<Instant>,
}

impl<M: Deref<Target = [Line]>> Taker<'_, M> {
    /// Sends a frame of `len` bytes, of which `copy` copies the front into what it is given; says no if it has to wait.
    ///
    /// Its owner may change it at any time: where it goes is what was read first, and that is what it says when it gets there.
    #[inline]
    fn pass_on(&mut self, len: usize, copy: impl Fn(&mut [u8])) -> bool {
        if !(14..=PIECE_MAX - HEADER_LEN).contains(&len) {
            self.dropped.length += 1;
            return true;
        }
        let mut addresses = [0; 14];
        copy(&mut addresses);
        let fill = |room: &mut [u8]| {
            copy(room);
            room[..14].copy_from_slice(&addresses);
        };
        let mac: Mac = addresses[..6].try_into().expect("six bytes");
        let several = match self.switch.find(mac) {
            To::Node(node) => return self.pass_to(node, len, fill),
            To::Nobody => {
                self.dropped.nobody += 1;
                return true;
            }
            several => self.switch.nodes_of(several),
        };
        match self.vni.send_to_all(several.iter(), len, false, fill) {
            Ok(_) => *self.taken += 1,
            Err(_) => self.dropped.no_room += 1,
        }
        true
    }

    /// The same to one node.
    #[inline]
    fn pass_to(&mut self, node: u16, len: usize, fill: impl FnOnce(&mut [u8])) -> bool {
        let waited = self.waits.take();
        match self.vni.draft(node, len) {
            Ok(room) => {
                fill(room);
                self.vni.post(node, len, false);
                *self.taken += 1;
                self.slow.had_room(node);
            }
            Err(SendError::NoRoom(_)) => {
                let since = waited.unwrap_or_else(Instant::now);
                if self.slow.may_wait(node, since) {
                    // Whoever has no room is to read what there is.
                    self.vni.flush();
                    *self.waits = Some(since);
                    return false;
                }
                self.dropped.no_room += 1;
            }
            Err(_) => self.dropped.nobody += 1,
        }
        true
    }
}
