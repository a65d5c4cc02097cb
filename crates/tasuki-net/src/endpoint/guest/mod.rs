//! A node that is a virtual machine: the back end of its virtio-net device, by vhost-user. The guest needs nothing but
//! its stock driver. A front end connects to the node's socket: QEMU, Cloud Hypervisor, or DPDK's virtio-user.
//!
//! The memory between us is the front end's: it sends the descriptors, and the guest and the front end can write all of it
//! at any time. One copy takes a frame from the guest's memory into the node's pool; one copy takes a frame from its sender's
//! pool into the guest's buffers. Offload headers cross as they are; a frame that the guest's driver would not take
//! unfinished is [finished](crate::vni::finish) in a private copy.
//!
//! | module        | contents                                          |
//! |---------------|---------------------------------------------------|
//! | [`wire`]      | messages                                          |
//! | [`device`]    | features, memory and rings, as messages set them  |
//! | `counts`      | what each queue has carried                       |
//! | [`channel`]   | the socket: a message at a time, without waiting  |
//! | `from_guest`  | the way of a frame out of the guest's memory      |
//! | `interrupt`   | when an interrupt goes, and when it waits         |
//! | `lending`     | pairs that the workers of other nodes serve       |
//! | [`journal`]   | completions in packed rings, for a successor      |
//! | `front_ends`  | connections, and a guest that migrates            |
//! | `peek`        | a look at what waits in the socket                |
//! | `to_guest`    | the way of a frame into the guest's buffers       |
//!
//! # Exactly once
//!
//! Each turn of the [bridge](super::bridge) is one commit in the node memory: the frames that were handled, the frames
//! to send, and how far all rings are ([`Device::marks`]). The used indices are stored after it, and the used descriptors of
//! packed rings. A successor stores them again; what it stores, the guest sees once.

pub mod channel;
pub mod counts;
pub mod device;
mod from_guest;
mod front_ends;
mod interrupt;
pub mod journal;
mod lending;
mod peek;
mod to_guest;
pub mod wire;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
use rustix::net::{RecvFlags, Shutdown, SocketType};
use tasuki_shm::line::Line;
use tasuki_shm::region::{CommonRegion, RegionError, Span};
use tasuki_shm::vni::loans::{self, Loans};
use tasuki_shm::wake::ring_eventfd;
use zerocopy::{FromBytes, IntoBytes};

use super::egress::{ROOM_AGAIN, WAIT};
use super::listener::{Listener, Ready};
use super::{Connection, Dismissal, Dropped, Egress, Endpoint, Given, Marks, Parts, Recovery};
use crate::flow::{self, flow_of};
use crate::port::Armed;
use crate::switch::{Addresses, CheckedPrefix};
use crate::virtq::{Broken, COMPLETIONS_MAX, Chain, DriverMemory, Head, PIECES_MAX, Piece, Queue, Ring, len_of};
use crate::vni::finish::{GSO_ECN, GSO_NONE, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, finish};
use crate::vni::offload::{HEADER_LEN, NEEDS_CSUM, Offload};
use crate::vni::{Incoming, PIECE_MAX};
use channel::Channel;
use counts::{Count, Counts};
use device::{Device, FROM_GUEST, PAIRS_MAX, Pairs, Refusal, TO_GUEST, numbers, version_of};
use from_guest::Polling;
use front_ends::{FrontEnd, NO_MEMORY};
use journal::Journal;
use lending::{Borrower, Lender};
use to_guest::{Room, Shortage, away, header_len};
use wire::feature;

/// Number of frames whose bytes are on their way from the guest's cache while one is copied.
const AHEAD: u16 = 8;

/// Number of bytes of each that are fetched: the header and a short frame. The processor fetches more by itself.
const FETCHED: usize = 128;

/// Number of turns between two looks at the control channel, while frames flow.
const ATTEND_EVERY: u32 = 64;

/// Length in bytes of the header before a frame in the guest's memory, with the number of its buffers and without
/// (VIRTIO 1.2, 5.1.6).
const LONG_HEADER: usize = 12;

/// How long frames wait for a guest that migrates from one front end to the other. QEMU's own limit is 300 ms.
const MOVE: Duration = Duration::from_secs(1);

/// How long a turn before a handover waits for the rest of a message.
const LAST_WORD: Duration = Duration::from_millis(5);

/// Counts of front ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Clients {
    /// Number of times that a device was started.
    pub attached: u64,
    /// Number of front ends that were sent away.
    pub refused: u64,
    /// Number of interrupts.
    pub interrupts: u64,
}

/// Opens the socket at which front ends connect.
pub(super) fn open(listener: OwnedFd, _: &str, _: &str) -> Result<Box<dyn Endpoint>, String> {
    if rustix::net::sockopt::socket_type(&listener) != Ok(SocketType::STREAM) {
        let sentence = "what the daemon sent as the socket of the node's machine is none; rebuild the older of the two";
        return Err(sentence.to_owned());
    }
    let guest = Guest::new(listener).map_err(|error| format!("a machine cannot be served: {error}"))?;
    Ok(Box::new(guest))
}

/// Opens the endpoint of a node that serves pairs of another node's machine, by the socket of that.
pub(super) fn open_queue(listener: OwnedFd, text: &str, node: &str) -> Result<Box<dyn Endpoint>, String> {
    open(listener.try_clone().map_err(|error| error.to_string())?, text, node)?;
    let guest = Guest::borrowing(listener).map_err(|error| format!("a machine cannot be served: {error}"))?;
    Ok(Box::new(guest))
}

/// The back end of a virtual machine's network card.
#[derive(Debug)]
pub struct Guest {
    listener: Listener,
    /// The least time between two interrupts of each ring.
    interrupt_every: [Duration; 2],
    front_end: Option<Box<FrontEnd>>,
    /// A second front end: of the machine to which the guest migrates, and afterwards of the one from which it came. Of the
    /// two, the one whose device runs is served.
    other: Option<Box<FrontEnd>>,
    /// Since when the guest is on its way from one front end to the other.
    moves: Option<Instant>,
    /// The front end of a predecessor, until the endpoint begins to serve.
    inherited: Option<Box<FrontEnd>>,
    /// The second machine's front end of a predecessor.
    inherited_other: Option<Box<FrontEnd>>,
    serves: bool,
    /// A front end whose device's description is older than the mark: a newer one may be on its way.
    stale: Option<(Box<FrontEnd>, Instant)>,
    /// How far the rings were when a predecessor committed last.
    marks: Option<Marks>,
    /// The node's journal, once the endpoint serves.
    journal: Option<Journal>,
    /// The last version of the state of this node's device.
    version: u32,
    /// The number of the node on its VNI, and the loans of the machine's pairs.
    node: u16,
    loans: Option<Loans>,
    lender: Lender,
    lend_after: Duration,
    /// The pairs that this node borrows, if the machine is another node's.
    borrower: Option<Box<Borrower>>,
    has_news: bool,
    /// What the daemon's user must know.
    trouble: Option<String>,
    /// Counts of the front ends so far.
    pub clients: Clients,
    /// The packets and bytes of each queue in this turn.
    counts: Counts,
    copy: Box<[u8]>,
    chain: Box<Chain>,
    room: Box<Room>,
    turns: u32,
    must_hear: bool,
    /// A connection may wait. accept(2) costs the kernel a socket each time. So it is called when the listener is readable, a
    /// few times a second, and always while there is no front end: a worker that never sleeps does not poll the listener.
    must_accept: bool,
    /// The set of watched descriptors may have some that are closed here and open elsewhere: it is made anew.
    must_watch: bool,
    /// A predecessor may have died before it interrupted the guest. With an event index, no further frame would: the second
    /// turn interrupts for all rings.
    must_ring: bool,
    /// The front end sent a message in this turn, so no frame moves in it. A successor that does not know of the change has
    /// no frame of this turn to repeat.
    heard: bool,
    polling: Polling,
    shortage: Shortage,
    /// The mark while there is no front end.
    mark: u64,
    broken: Option<Refusal>,
}

impl Guest {
    /// Serves a front end that connects to `listener`, a stream socket.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn new(listener: OwnedFd) -> io::Result<Self> {
        Ok(Guest {
            interrupt_every: interrupt::EVERY,
            listener: Listener::new(listener)?,
            front_end: None,
            other: None,
            moves: None,
            inherited: None,
            inherited_other: None,
            serves: false,
            stale: None,
            marks: None,
            journal: None,
            version: 0,
            node: 0,
            loans: None,
            lender: Lender::default(),
            lend_after: lending::LEND_AFTER,
            borrower: None,
            has_news: false,
            trouble: None,
            clients: Clients::default(),
            counts: Counts::default(),
            copy: vec![0; PIECE_MAX - HEADER_LEN].into(),
            chain: Box::default(),
            room: Box::default(),
            turns: 0,
            must_hear: true,
            must_accept: true,
            must_watch: false,
            must_ring: false,
            heard: false,
            polling: Polling::default(),
            shortage: Shortage::default(),
            mark: 0,
            broken: None,
        })
    }

    /// Serves pairs of a machine whose front end connects to another node, at `listener`.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn borrowing(listener: OwnedFd) -> io::Result<Self> {
        let mut guest = Self::new(listener)?;
        guest.listener.leave_socket();
        guest.borrower = Some(Box::new(Borrower::new()));
        Ok(guest)
    }

    /// Returns whether a guest runs its device.
    pub fn is_running(&self) -> bool {
        self.front_end.as_ref().is_some_and(|front_end| front_end.device.is_running())
    }

    /// Tells the VNI where a guest is now that came from another place. Returns whether it did.
    fn announce(&mut self, egress: &mut Egress<'_>) -> bool {
        let Some(announced) = self.front_end.as_mut().map(|front_end| &mut front_end.device.announced) else {
            return false;
        };
        announced.take_if(|address| egress.send_bytes(&announcement(*address))).is_some()
    }
}

/// Returns a request of RARP for one's own address (RFC 903), as back ends send it for their guest.
fn announcement(address: [u8; 6]) -> [u8; 60] {
    let mut frame = [0; 60];
    frame[..6].fill(0xff);
    // EtherType; Ethernet and IPv4, the lengths of their addresses; "request reverse".
    frame[12..22].copy_from_slice(&[0x80, 0x35, 0, 1, 8, 0, 6, 4, 0, 3]);
    [6, 22, 32].into_iter().for_each(|at| frame[at..at + 6].copy_from_slice(&address));
    frame
}

impl Endpoint for Guest {
    fn recovery(&self) -> Recovery {
        Recovery::Exact
    }

    fn share(&mut self, memory: Span<Line>, node: u16) {
        (self.loans, self.node) = (Some(Loans::over(memory)), node);
    }

    fn resume(&mut self, marks: Option<Marks>, journal: Span<Line>) {
        self.version = marks.as_ref().map_or(0, version_of);
        (self.marks, self.journal, self.serves) = (marks, Some(Journal::over(journal)), true);
        if let Some(borrower) = &mut self.borrower {
            // It may have stood by for long, and frames wait for its pairs from now on.
            borrower.begin();
            return;
        }
        self.begin_lending();
        let other = self.inherited_other.take();
        if let Some(front_end) = self.inherited.take() {
            self.go_on_now(front_end, other);
        }
    }

    fn marks(&mut self) -> &[u64] {
        // Where a predecessor stood counts until this worker goes on from there.
        if self.borrower.as_ref().is_some_and(|borrower| !borrower.serves_pairs()) {
            return self.marks.as_deref().unwrap_or_default();
        }
        let is_stale = self.borrower.is_none() && self.broken == Some(Refusal::Stale);
        match (&mut self.front_end, &self.marks) {
            (Some(front_end), _) if !is_stale => front_end.device.marks(),
            (_, Some(marks)) if version_of(marks) == self.version => marks,
            _ => {
                self.mark = u64::from(self.version) << 32;
                std::slice::from_ref(&self.mark)
            }
        }
    }

    fn note(&mut self) {
        if let Some(front_end) = &self.front_end {
            front_end.device.note();
        }
    }

    fn attend(&mut self) {
        if self.borrower.is_some() {
            return self.attend_as_borrower();
        }
        self.end_stale();
        (self.heard, self.shortage.rings) = (false, 0);
        self.turns = self.turns.wrapping_add(1);
        if self.turns > 1 && std::mem::take(&mut self.must_ring) {
            self.must_hear = true;
            self.front_end.iter().flat_map(|front_end| front_end.device.calls()).for_each(ring_eventfd);
        }
        let in_set_up = self.front_end.as_ref().is_some_and(|it| !it.device.is_running() || it.is_amid_set_up());
        let hears = self.must_hear || in_set_up || self.turns.is_multiple_of(ATTEND_EVERY);
        if hears || self.lender.looks() {
            self.mind_loans();
        }
        if hears {
            self.hear();
            let pairs = self.front_end.as_ref().map_or(0, |front_end| front_end.device.all_pairs());
            self.journal.iter().for_each(|journal| journal.running(pairs));
            self.heard |= self.front_end.as_mut().is_some_and(|front_end| front_end.look_at_set_up());
            if self.front_end.as_ref().is_some_and(|front_end| front_end.device.memory.is_gone()) {
                self.end(&Broken::Gone.into());
            }
        }
    }

    #[inline]
    fn is_ready(&mut self) -> bool {
        if let Some(borrower) = &self.borrower {
            return !self.heard && borrower.takes_frames();
        }
        !self.heard && self.moves.is_none_or(|since| since.elapsed() >= MOVE)
    }

    #[inline]
    fn give(&mut self, incoming: &Incoming<'_>, front: &CheckedPrefix, dropped: &mut Dropped) -> Given {
        if self.broken.is_some() {
            return away(dropped);
        }
        self.give_to_guest(incoming, front, dropped).unwrap_or_else(|broken| {
            self.broken = Some(broken.into());
            away(dropped)
        })
    }

    fn gave_up(&mut self) {
        self.counts.add(2 * self.shortage.last + TO_GUEST, Count::NoRoom, 1);
    }

    fn take(&mut self, egress: &mut Egress<'_>) -> usize {
        self.look_for_loan(egress);
        let leaves = self.borrower.as_ref().is_some_and(|borrower| borrower.leaves());
        if self.broken.is_some() || self.heard || leaves {
            return 0;
        }
        // The announcement goes to each node: with a full burst behind it, one node would get more messages than the turn
        // may show before it is committed.
        if self.announce(egress) { 1 } else { self.take_from_guest(egress) }
    }

    /// Shows the guest what is completed, and interrupts it if it wants that.
    #[inline]
    fn commit(&mut self) {
        if self.other.is_some() {
            self.answer_other();
        }
        if let Some(front_end) = &mut self.front_end {
            if let Err(refusal) = front_end.commit() {
                self.broken.get_or_insert(refusal);
            }
            self.clients.interrupts += front_end.device.show(self.interrupt_every, &mut self.counts);
        }
        self.journal.iter().for_each(|journal| self.counts.flush(journal));
        if let Some(refusal) = self.broken.take() {
            self.end(&refusal);
        }
        self.settle_loans();
    }

    fn arm(&mut self, waits: bool) -> Armed {
        if self.must_hear || self.front_end.as_ref().is_some_and(|front_end| front_end.is_amid_set_up()) {
            // More of the same may be there, and each message brings other descriptors to watch.
            return Armed::Busy;
        }
        self.watch_news();
        if self.must_ring {
            return Armed::Busy;
        }
        let Some(front_end) = self.front_end.as_ref().filter(|_| !waits) else { return Armed::Idle };
        // Only rings from which a turn takes.
        let bits = front_end.device.running & !self.polling.idle;
        if self.go_idle(bits) { Armed::Idle } else { Armed::Busy }
    }

    fn await_room(&mut self) -> bool {
        let Some(front_end) = self.front_end.as_mut().filter(|front_end| !front_end.device.must_poll()) else {
            return false;
        };
        let short = std::mem::take(&mut self.shortage.rings);
        self.shortage.kicks_on |= short;
        // A driver kicks for the next buffer only. If there are some, and too few for a frame, it kicks no more.
        numbers(short.into()).fold(short != 0, |will, pair| {
            let Some(queue) = front_end.device.queue_of(2 * pair + TO_GUEST) else { return will };
            queue.want_kicks(true);
            will & (queue.look() == Ok(false))
        })
    }

    fn wake(&mut self) {
        if self.borrower.is_none() {
            self.wake_lender();
        }
        let Self { listener, counts, polling, .. } = self;
        let heard = listener.hear(|ring| {
            counts.add(ring, Count::Kicks, 1);
            if ring % 2 == FROM_GUEST {
                polling.idle &= !(1 << (ring / 2));
            }
        });
        match heard {
            Some(Ready { socket, others }) => {
                self.must_accept |= socket;
                self.must_hear |= socket || others;
            }
            None => (self.must_hear, self.must_accept, self.polling.idle) = (true, true, 0),
        }
        let kicks_on = std::mem::take(&mut self.shortage.kicks_on);
        if let Some(front_end) = self.front_end.as_mut().filter(|_| kicks_on != 0) {
            for pair in numbers(kicks_on.into()) {
                front_end.device.queue_of(2 * pair + TO_GUEST).into_iter().for_each(|queue| queue.want_kicks(false));
            }
        }
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.listener.fd())
    }

    fn is_heard_while_limited(&self) -> bool {
        true
    }

    fn again_in(&self) -> Option<Duration> {
        let loans = self.borrower.as_ref().map_or_else(|| self.lender.again_in(), |borrower| borrower.again_in());
        let Some(front_end) = &self.front_end else { return loans };
        let device = &front_end.device;
        let polls = device.must_poll().then_some(ROOM_AGAIN);
        polls.into_iter().chain(device.interrupts_in(self.interrupt_every)).chain(loans).min()
    }

    fn tick(&mut self, now: Instant, _: &mut Dropped) -> bool {
        if self.borrower.is_some() {
            return self.tick_as_borrower();
        }
        (self.must_hear, self.must_accept) = (true, true);
        self.listener.tick();
        self.end_silent(now);
        if self.front_end.as_mut().is_some_and(|front_end| front_end.is_found_without_memory()) {
            self.trouble = Some(NO_MEMORY.to_owned());
        }
        let is_silent = self.front_end.iter().chain(&self.other).any(|front_end| front_end.is_silent());
        is_silent || self.front_end.is_some() && (self.must_watch || !self.is_running())
    }

    /// Reads the rest of a message that has begun, and sends a front end away if it does not come.
    fn finish(&mut self) {
        let until = Instant::now() + LAST_WORD;
        while self.front_end.as_ref().is_some_and(|front_end| front_end.channel.is_within()) && Instant::now() < until {
            self.hear();
        }
        if self.front_end.as_ref().is_some_and(|front_end| front_end.channel.is_within()) {
            self.dismiss(Dismissal::Moved);
        }
    }

    fn release(&mut self) {
        if self.borrower.is_some() {
            return self.release_loan();
        }
        (self.serves, self.lender) = (false, Lender::default());
        self.inherited_other = self.other.take();
        if let Some(other) = self.inherited_other.take_if(|it| it.channel.is_within() || it.channel.held() > 0) {
            // It connects again, to the successor.
            other.channel.hang_up();
        }
        // Another worker may serve it meanwhile: it is not ours to send away.
        self.inherited = self.stale.take().map(|(front_end, _)| front_end);
        if let Some(mut front_end) = self.front_end.take() {
            self.version = front_end.device.version();
            front_end.device.forget_queues();
            // It is ours again if the successor gives the lease back.
            self.inherited = Some(front_end);
        }
        self.must_watch = true;
    }

    fn counts(&self) -> Vec<(&'static str, u64)> {
        let Clients { attached, refused, interrupts } = self.clients;
        let of = |device: &Device| if self.borrower.is_some() { device.pairs } else { device.all_pairs() };
        let pairs = self.front_end.as_ref().map_or(0, |front_end| of(&front_end.device));
        let mut counts = vec![
            ("clients_attached", attached),
            ("clients_refused", refused),
            ("interrupts", interrupts),
            ("queue_pairs", pairs as u64),
        ];
        counts.extend(self.journal.iter().flat_map(counts::named));
        counts
    }

    fn trouble(&mut self) -> Option<String> {
        self.trouble.take()
    }

    fn connection(&mut self) -> Option<&mut dyn Connection> {
        Some(self)
    }
}

/// Shuts a connection down, for all processes that hold the socket.
fn hang_up(socket: &OwnedFd) {
    // Fails if it is shut down already.
    let _ = rustix::net::shutdown(socket, Shutdown::Both);
    // Nothing more can come. A socket that closes with bytes unread is an error for its peer, and not an end.
    let mut bytes = [0; wire::BODY_MAX];
    while rustix::net::recv(socket, &mut bytes, RecvFlags::DONTWAIT).is_ok_and(|(_, got)| got > 0) {}
}

#[cfg(test)]
mod tests;
