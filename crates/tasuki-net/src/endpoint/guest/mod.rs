//! A node that is a virtual machine: the back end of its virtio-net device, by vhost-user. The guest needs nothing but
//! its stock driver, and the machine a front end: QEMU, Cloud Hypervisor, or DPDK's virtio-user.
//!
//! The memory between us is the machine's: it hands it over, and the guest and the front end can write all of it at any
//! time. One copy takes a frame from the guest's memory into the node's pool; one copy takes a frame from its sender's
//! pool into the guest's buffers. Offload headers cross as they are; a frame that the guest's driver would not take
//! unfinished is [finished](crate::vni::finish) in a private copy.
//!
//! | module        | contents                                          |
//! |---------------|---------------------------------------------------|
//! | [`wire`]      | messages                                          |
//! | [`device`]    | features, memory and rings, as messages set them  |
//! | [`channel`]   | the socket: a message at a time, without waiting  |
//!
//! # Exactly once
//!
//! Each turn of the [bridge](super::bridge) is one commit in the node memory: the frames that were handled, the frames
//! to send, and how far both rings are ([`Device::mark`]). The used indices are stored after it. A successor stores them
//! again; what it stores, the guest sees once.

pub mod channel;
pub mod device;
pub mod wire;

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{Shutdown, SocketType};
use tasuki_shm::region::{CommonRegion, RegionError};
use zerocopy::{FromBytes, IntoBytes};

use super::egress::ROOM_AGAIN;
use super::listener::Listener;
use super::{Connection, Dismissal, Dropped, Egress, Endpoint, Given, Parts, Recovery};
use crate::port::Armed;
use crate::switch::{Addresses, Front};
use crate::virtq::{Broken, Chain, DriverMemory, PIECES_MAX, Piece, Queue, len_of};
use crate::vni::finish::{GSO_NONE, finish};
use crate::vni::ledger::point;
use crate::vni::offload::{HEADER_LEN, NEEDS_CSUM, Offload};
use crate::vni::{Incoming, PIECE_MAX};
use channel::Channel;
use device::{Device, FROM_GUEST, Refusal, TO_GUEST};
use wire::feature;

/// Number of frames taken from the guest before the node turns to frames for it.
const TAKES: usize = 32;

/// Number of frames whose bytes are on their way from the guest's cache while one is copied.
const AHEAD: u16 = 8;

/// Number of bytes of each that are fetched: the header and a short frame. The processor fetches more by itself.
const FETCHED: usize = 128;

/// Number of turns between two looks at the control channel, while frames flow.
const ATTEND_EVERY: u32 = 64;

/// Maximum number of connections that are accepted in one turn.
const ACCEPTS: usize = 4;

/// Length in bytes of the header before a frame in the guest's memory, with the number of its buffers and without
/// (VIRTIO 1.2, 5.1.6).
const LONG_HEADER: usize = 12;

/// Bit of `gso_type`: the segment has an ECN mark.
const ECN: u8 = 0x80;

/// Maximum number of buffers that one frame is merged from.
const MERGED_MAX: usize = 64;

/// How long frames wait for a guest that is on its way from one machine to another. QEMU's own limit is 300 ms.
const MOVE: Duration = Duration::from_secs(1);

/// How long a front end may say nothing after it has connected.
const SILENCE: Duration = Duration::from_secs(5);

/// How long a description may be on its way that is newer than the one that a successor has.
const LATE_NEWS: Duration = Duration::from_millis(100);

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

/// Opens the socket at which a machine's front end connects.
pub(super) fn open(listener: OwnedFd, _: &str, _: &str) -> Result<Box<dyn Endpoint>, String> {
    if rustix::net::sockopt::socket_type(&listener) != Ok(SocketType::STREAM) {
        return Err(
            "what the daemon sent as the socket of the node's machine is none; rebuild the older of the two".to_owned()
        );
    }
    let guest = Guest::new(listener).map_err(|error| format!("a machine cannot be served: {error}"))?;
    Ok(Box::new(guest))
}

/// A front end, from its connection on.
#[derive(Debug)]
struct Machine {
    channel: Channel,
    device: Device,
    /// When it connected, until it has said something.
    silent: Option<Instant>,
}

impl Machine {
    /// Reads the front end's messages.
    fn hear(&mut self) -> Result<(), Refusal> {
        let mut count = 0;
        let heard = self.channel.hear(&mut self.device, &mut count);
        if count > 0 {
            self.silent = None;
        }
        heard
    }
}

/// The back end of a machine's network card.
#[derive(Debug)]
pub struct Guest {
    listener: Listener,
    machine: Option<Box<Machine>>,
    /// A second machine: the one to which the guest migrates, and afterwards the one from which it came. Of the two, the
    /// machine whose device runs is served.
    other: Option<Box<Machine>>,
    /// Since when the guest is on its way from one machine to the other.
    moves: Option<Instant>,
    /// The machine of a predecessor, until the endpoint begins to serve.
    inherited: Option<Box<Machine>>,
    serves: bool,
    /// A machine whose description is older than the mark: a newer one may be on its way.
    stale: Option<(Box<Machine>, Instant)>,
    /// How far the rings were when a predecessor committed last.
    mark: Option<u64>,
    /// The last state of a device of this node.
    session: u32,
    has_news: bool,
    /// What the daemon's user must know.
    trouble: Option<String>,
    /// Counts of the front ends so far.
    pub clients: Clients,
    copy: Box<[u8]>,
    chain: Box<Chain>,
    room: Box<Room>,
    turns: u32,
    must_hear: bool,
    /// Whether the guest was told that it need not kick.
    is_quiesced: bool,
    broken: Option<Refusal>,
}

/// Buffers of the guest for one frame.
#[derive(Debug, Default)]
struct Room {
    /// Chains: the head of each, and its number of bytes.
    heads: ArrayVec<(u16, usize), MERGED_MAX>,
    pieces: ArrayVec<Piece, PIECES_MAX>,
}

impl Guest {
    /// Serves a front end that connects to `listener`, a stream socket.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn new(listener: OwnedFd) -> io::Result<Self> {
        Ok(Guest {
            listener: Listener::new(listener)?,
            machine: None,
            other: None,
            moves: None,
            inherited: None,
            serves: false,
            stale: None,
            mark: None,
            session: 0,
            has_news: false,
            trouble: None,
            clients: Clients::default(),
            copy: vec![0; PIECE_MAX - HEADER_LEN].into(),
            chain: Box::default(),
            room: Box::default(),
            turns: 0,
            must_hear: true,
            is_quiesced: false,
            broken: None,
        })
    }

    /// Returns whether a guest runs its device.
    pub fn is_running(&self) -> bool {
        self.machine.as_ref().is_some_and(|machine| machine.device.is_running())
    }

    /// Reads the messages of both front ends, and accepts connections.
    fn hear(&mut self) {
        self.must_hear = false;
        let running =
            |guest: &Self| guest.machine.as_ref().filter(|_| guest.is_running()).map(|it| it.channel.number());
        let was_running = running(self);
        if let Some(machine) = &mut self.machine {
            let before = machine.device.session();
            let heard = machine.hear();
            if machine.device.session() != before {
                (self.has_news, self.is_quiesced) = (true, false);
                self.watch_all();
            }
            if let Err(refusal) = heard {
                self.end(&refusal);
            }
        }
        self.hear_other();
        let runs = running(self);
        self.clients.attached += u64::from(runs.is_some() && runs != was_running);
        match runs {
            Some(_) => self.moves = None,
            None if was_running.is_some() && self.other.is_some() => self.moves = Some(Instant::now()),
            None => {}
        }
        if self.stale.is_some() {
            // The place may be taken or free: it is known soon, and a new front end waits for it.
            return;
        }
        for _ in 0..ACCEPTS {
            let Some(socket) = self.listener.accept() else { return };
            if self.other.is_some() {
                self.refuse(
                    "a third front end connected, and was sent away: the node has a machine, and a second one to which \
                     it migrates"
                        .to_owned(),
                );
                continue;
            }
            if self.listener.watch(socket.as_fd()).is_ok() {
                let (channel, device) = (Channel::new(socket), Device::new(self.session));
                let machine = Some(Box::new(Machine { channel, device, silent: Some(Instant::now()) }));
                *(if self.machine.is_none() { &mut self.machine } else { &mut self.other }) = machine;
            }
        }
    }

    /// Reads the messages of the second front end. Serves it from now on if its device runs, and the first one's does
    /// not.
    fn hear_other(&mut self) {
        let Some(mut other) = self.other.take() else { return };
        let heard = other.hear();
        match (heard, other.device.is_running(), self.is_running()) {
            (Ok(()), true, true) => {
                other.channel.hang_up();
                self.refuse(
                    "a second front end started its device, and was sent away: the node's machine still runs"
                        .to_owned(),
                );
            }
            (Ok(()), true, false) => {
                self.other = self.machine.take();
                self.serve(other);
            }
            (Ok(()), false, _) => self.other = Some(other),
            (Err(refusal), ..) => {
                other.channel.hang_up();
                if refusal != Refusal::Left {
                    self.refuse(format!("the front end of a second machine was sent away: {refusal}"));
                }
            }
        }
    }

    fn refuse(&mut self, sentence: String) {
        self.clients.refused += 1;
        self.trouble = Some(sentence);
    }

    /// Serves another machine from now on.
    fn serve(&mut self, mut machine: Box<Machine>) {
        machine.device.follow(self.session());
        self.machine = Some(machine);
        (self.has_news, self.is_quiesced, self.must_hear) = (true, false, true);
        self.watch_all();
    }

    /// Returns the number of the state of the device that is served, or was last.
    fn session(&self) -> u32 {
        self.machine.as_ref().or(self.other.as_ref()).map_or(self.session, |machine| machine.device.session())
    }

    /// Ends the connection of the machine that is served.
    fn end(&mut self, refusal: &Refusal) {
        let Some(machine) = self.machine.take() else { return };
        self.has_news = true;
        self.session = machine.device.session();
        if *refusal != Refusal::Left {
            self.refuse(format!("the machine's front end was sent away: {refusal}"));
        }
        machine.channel.hang_up();
        match self.other.take() {
            Some(other) => self.serve(other),
            None => self.watch_all(),
        }
    }

    /// Watches the listener, and of the machine the socket and the eventfds that it has now: the front end may have
    /// earlier ones open, too.
    fn watch_all(&mut self) {
        let machines = self.machine.iter().chain(&self.other);
        self.listener.watch_only(
            machines.flat_map(|it| [it.channel.socket()].into_iter().chain(it.device.kicks())).map(AsFd::as_fd),
        );
    }

    /// Goes on with the machine of a predecessor.
    fn go_on_now(&mut self, mut machine: Box<Machine>) {
        if self.machine.is_some() {
            return;
        }
        // The daemon hears from us when this machine leaves only if it has heard of it from us before.
        self.has_news = true;
        let went = machine.device.go_on(self.mark);
        if went == Err(Refusal::Stale) {
            self.stale = Some((machine, Instant::now()));
            return;
        }
        self.stale = None;
        // A predecessor may have ended before it interrupted the guest.
        [TO_GUEST, FROM_GUEST].into_iter().filter_map(|at| machine.device.call(at)).for_each(ring);
        (self.machine, self.is_quiesced, self.must_hear) = (Some(machine), false, true);
        self.watch_all();
        if let Err(refusal) = went {
            self.end(&refusal);
        }
    }

    /// Tells the VNI where a guest is now that came from another place. Returns whether it did.
    fn announce(&mut self, egress: &mut Egress<'_>) -> bool {
        let Some(announced) = self.machine.as_mut().map(|machine| &mut machine.device.announced) else { return false };
        announced.take_if(|address| egress.send_bytes(&announcement(*address))).is_some()
    }

    /// Returns the number of frames taken, also before the guest broke a rule.
    fn take_from_guest(&mut self, egress: &mut Egress<'_>) -> usize {
        let Self { machine, chain, is_quiesced, broken, .. } = self;
        let Some(machine) = machine else { return 0 };
        let header = header_len(&machine.device);
        let Device { memory, queues, .. } = &mut machine.device;
        let Some(queue) = &mut queues[FROM_GUEST] else { return 0 };
        match queue.look() {
            Ok(0) => return 0,
            Ok(_) => {}
            Err(rule) => {
                *broken = Some(rule.into());
                return 0;
            }
        }
        if !std::mem::replace(is_quiesced, true) {
            queue.want_kicks(false);
        }
        let fetch = |queue: &Queue, ahead| {
            queue.address_ahead(ahead).into_iter().for_each(|address| memory.prefetch_to_read(address, FETCHED));
        };
        (0..AHEAD).for_each(|ahead| fetch(queue, ahead));
        for count in 0..TAKES {
            fetch(queue, AHEAD);
            match queue.take(memory, chain) {
                Ok(true) => {}
                Ok(false) => return count,
                Err(rule) => {
                    *broken = Some(rule.into());
                    return count;
                }
            }
            let pieces = &chain.readable;
            let len = len_of(pieces).saturating_sub(header);
            // The header and the addresses, in one read.
            let mut front = [0; LONG_HEADER + 14];
            memory.copy_to(pieces, 0, &mut front[..header + 14]);
            let offload = Offload::read_from_bytes(&front[..HEADER_LEN]).expect("it has this length");
            let addresses = front[header..header + 14].first_chunk().expect("they are 14 bytes");
            let goes_on =
                egress.send_unfinished(len, &offload, addresses, |room| _ = memory.copy_to(pieces, header, room));
            if !goes_on {
                queue.put_back(1);
                return count;
            }
            queue.complete(chain.head, 0);
        }
        TAKES
    }

    fn give_to_guest(
        &mut self,
        incoming: &Incoming<'_>,
        front: &Front,
        dropped: &mut Dropped,
    ) -> Result<Given, Broken> {
        let Self { machine, copy, chain, room, .. } = self;
        let Some(machine) = machine else { return Ok(away(dropped)) };
        let offload = if incoming.is_finished() {
            Offload::default()
        } else {
            let Ok(offload) = incoming.offload() else { return Ok(too_late(dropped)) };
            let Some(offload) = sound(offload, incoming.len()) else {
                dropped.malformed += 1;
                return Ok(Given::Taken(0));
            };
            offload
        };
        let is_fit = takes(&machine.device, &offload);
        let header = header_len(&machine.device);
        let merges = machine.device.has(feature::MRG_RXBUF);
        let Device { memory, queues, .. } = &mut machine.device;
        let Some(queue) = &mut queues[TO_GUEST] else { return Ok(away(dropped)) };
        let mut to = Buffers { memory, queue, chain, room, header, merges };
        if is_fit {
            if let Some(address) = to.queue.address_ahead(AHEAD) {
                to.memory.prefetch_to_write(address, FETCHED);
            }
            if let Some(given) = to.give_plain(incoming, front, &offload)? {
                return Ok(given.unwrap_or_else(|| too_late(dropped)));
            }
            let found = to.find(header + incoming.len())?;
            if found != Found::Room {
                return Ok(found.given(dropped));
            }
            to.write_header(&offload);
            to.write(header, incoming.len(), |at, len, region, offset| {
                incoming.copy_to_common(at, len, region, offset)
            });
            // The bytes that were checked; the sender may have changed its copy since.
            to.write(header, front.len(), |at, len, region, offset| region.copy_from(offset, &front[at..at + len]));
            if !incoming.is_whole() {
                to.forget();
                return Ok(too_late(dropped));
            }
            to.complete(header + incoming.len());
            return Ok(Given::Taken(1));
        }
        let Ok(len) = incoming.copy_to(copy) else { return Ok(too_late(dropped)) };
        copy[..front.len()].copy_from_slice(front);
        let before = to.queue.indices();
        let (mut count, mut failed) = (0, None);
        let made = finish(&offload, &mut copy[..len], |front, back| {
            if failed.is_some() {
                return;
            }
            let all = front.len() + back.len();
            match to.find(header + all) {
                Ok(Found::Room) => {}
                Ok(found) => return failed = Some(Ok(found)),
                Err(broken) => return failed = Some(Err(broken)),
            }
            to.write_header(&Offload::default());
            to.write(header, front.len(), |at, len, region, offset| region.copy_from(offset, &front[at..at + len]));
            to.write(header + front.len(), back.len(), |at, len, region, offset| {
                region.copy_from(offset, &back[at..at + len])
            });
            to.complete(header + all);
            count += 1;
        });
        match (made, failed) {
            (Ok(_), None) => Ok(Given::Taken(count)),
            (_, Some(Err(broken))) => Err(broken),
            (Err(_), _) => {
                dropped.malformed += 1;
                Ok(Given::Taken(0))
            }
            (Ok(_), Some(Ok(found))) => {
                // All parts go, or none: those that went are not shown yet.
                let (next, done) = to.queue.indices();
                to.queue.put_back(next.wrapping_sub(before.0));
                to.queue.undo(done.wrapping_sub(before.1));
                Ok(found.given(dropped))
            }
        }
    }
}

fn away(dropped: &mut Dropped) -> Given {
    dropped.away += 1;
    Given::Taken(0)
}

fn too_late(dropped: &mut Dropped) -> Given {
    dropped.too_late += 1;
    Given::Taken(0)
}

/// Returns the header of a frame that one buffer holds, and the frame's addresses behind it, little-endian.
#[inline]
fn words_of(offload: &Offload, addresses: Addresses) -> [u64; 3] {
    let Offload { flags, gso_type, hdr_len, gso_size, csum_start, csum_offset } = *offload;
    let [hdr_len, gso_size, csum_start, csum_offset] =
        [hdr_len, gso_size, csum_start, csum_offset].map(|field| u64::from(field.get()));
    let Addresses { first, rest } = addresses;
    let buffers = 1;
    let words = [
        u64::from(flags) | u64::from(gso_type) << 8 | hdr_len << 16 | gso_size << 32 | csum_start << 48,
        csum_offset | buffers << 16 | first << 32,
        first >> 32 | u64::from(rest) << 32,
    ];
    words.map(u64::to_le)
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

/// Returns the length in bytes of the header before each frame.
fn header_len(device: &Device) -> usize {
    let is_long = device.has(feature::VERSION_1) || device.has(feature::MRG_RXBUF);
    if is_long { LONG_HEADER } else { HEADER_LEN }
}

/// Returns the header of a frame of `len` bytes with nothing in it but what the guest's driver is to go by, or nothing if
/// it contradicts the frame: another node may have written anything.
fn sound(offload: Offload, len: usize) -> Option<Offload> {
    const DATA_VALID: u8 = 2;
    let Offload { flags, gso_type, hdr_len, gso_size, csum_start, csum_offset } = offload;
    let mut sound = Offload { flags: flags & (NEEDS_CSUM | DATA_VALID), gso_type, ..Offload::default() };
    if flags & NEEDS_CSUM != 0 {
        let (start, offset) = (usize::from(csum_start.get()), usize::from(csum_offset.get()));
        (start >= 14 && start + offset + 2 <= len).then_some(())?;
        (sound.csum_start, sound.csum_offset) = (csum_start, csum_offset);
    }
    if gso_type != GSO_NONE {
        let is_known = matches!(gso_type & !ECN, 1 | 4 | 5);
        let fits = gso_size.get() > 0 && usize::from(hdr_len.get()) <= len && flags & NEEDS_CSUM != 0;
        (is_known && fits).then_some(())?;
        (sound.hdr_len, sound.gso_size) = (hdr_len, gso_size);
    }
    Some(sound)
}

/// Returns whether the guest's driver takes a frame with this work left to do.
fn takes(device: &Device, offload: &Offload) -> bool {
    let needs_csum = offload.flags & NEEDS_CSUM != 0;
    let cuts = match offload.gso_type & !ECN {
        GSO_NONE => true,
        1 => device.has(feature::GUEST_TSO4),
        4 => device.has(feature::GUEST_TSO6),
        5 => device.has(feature::GUEST_USO4) && device.has(feature::GUEST_USO6),
        _ => false,
    };
    (!needs_csum || device.has(feature::GUEST_CSUM))
        && cuts
        && (offload.gso_type & ECN == 0 || device.has(feature::GUEST_ECN))
}

/// Whether the guest has buffers for a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    Room,
    /// It has none at present.
    None,
    /// No buffer, or no number of merged ones, holds the frame.
    TooLong,
}

impl Found {
    fn given(self, dropped: &mut Dropped) -> Given {
        match self {
            Found::None => Given::NoRoom,
            Found::Room | Found::TooLong => {
                dropped.too_long += 1;
                Given::Taken(0)
            }
        }
    }
}

/// The ring by which the guest receives, and the buffers of it that one frame takes.
struct Buffers<'a> {
    memory: &'a DriverMemory,
    queue: &'a mut Queue,
    chain: &'a mut Chain,
    room: &'a mut Room,
    header: usize,
    merges: bool,
}

impl Buffers<'_> {
    /// Gives a frame that the next buffer holds alone, as nearly all do. Returns nothing if it does not, and within it
    /// nothing if the sender took the frame back.
    #[inline]
    fn give_plain(
        &mut self,
        incoming: &Incoming<'_>,
        front: &Front,
        offload: &Offload,
    ) -> Result<Option<Option<Given>>, Broken> {
        let len = LONG_HEADER + incoming.len();
        let Some(addresses) = Addresses::of(front).filter(|_| self.header == LONG_HEADER) else { return Ok(None) };
        let Some((head, piece)) = self.queue.next_plain(self.memory, len)? else { return Ok(None) };
        let (region, at) = self.memory.place_of(piece);
        let put = incoming.copy_to_common(0, incoming.len(), region, at + LONG_HEADER);
        // The addresses that were checked; the sender may have changed its copy since.
        put.and_then(|()| region.put_words(at, words_of(offload, addresses))).expect("the piece was checked");
        if !incoming.is_whole() {
            return Ok(Some(None));
        }
        self.memory.note(piece, len);
        self.queue.complete_next(head, u32::try_from(len).expect("no longer than a frame"));
        Ok(Some(Some(Given::Taken(1))))
    }

    /// Takes buffers for `len` bytes. Takes none if they are too few.
    #[inline]
    fn find(&mut self, len: usize) -> Result<Found, Broken> {
        self.room.heads.clear();
        self.room.pieces.clear();
        let (mut have, mut taken) = (0, 0);
        let found = loop {
            if have >= len {
                return Ok(Found::Room);
            }
            if !self.queue.take(self.memory, self.chain)? {
                break if taken == self.queue.size() { Found::TooLong } else { Found::None };
            }
            taken += 1;
            let room = len_of(&self.chain.writable);
            have += room;
            let fits = self.room.pieces.try_extend_from_slice(&self.chain.writable).is_ok()
                && self.room.heads.try_push((self.chain.head, room)).is_ok();
            if !fits || (!self.merges && have < len) {
                break Found::TooLong;
            }
        };
        self.queue.put_back(taken);
        self.room.heads.clear();
        Ok(found)
    }

    /// Puts the buffers back.
    fn forget(&mut self) {
        self.queue.put_back(u16::try_from(self.room.heads.len()).expect("a few"));
        self.room.heads.clear();
    }

    #[inline]
    fn write_header(&mut self, offload: &Offload) {
        let mut header = [0; LONG_HEADER];
        header[..HEADER_LEN].copy_from_slice(offload.as_bytes());
        let buffers = u16::try_from(self.room.heads.len()).expect("a few");
        header[HEADER_LEN..].copy_from_slice(&buffers.to_le_bytes());
        self.write(0, self.header, |at, len, region, offset| region.copy_from(offset, &header[at..at + len]));
    }

    #[inline]
    fn write(
        &self,
        from: usize,
        len: usize,
        copy: impl FnMut(usize, usize, &CommonRegion, usize) -> Result<(), RegionError>,
    ) {
        self.memory.fill(&self.room.pieces, from, len, copy);
    }

    /// Completes the buffers, which hold `len` bytes.
    #[inline]
    fn complete(&mut self, len: usize) {
        let mut left = len;
        for (head, room) in self.room.heads.drain(..) {
            let part = room.min(left);
            left -= part;
            self.queue.complete(head, u32::try_from(part).expect("no longer than a frame"));
        }
    }
}

impl Endpoint for Guest {
    fn recovery(&self) -> Recovery {
        Recovery::Exact
    }

    fn resume(&mut self, mark: Option<u64>) {
        (self.mark, self.serves) = (mark, true);
        self.session = mark.map_or(0, |mark| u32::try_from(mark >> 32).expect("four bytes"));
        self.inherited.take().into_iter().for_each(|machine| self.go_on_now(machine));
    }

    fn mark(&self) -> u64 {
        self.machine.as_ref().map_or(u64::from(self.session) << 32, |machine| machine.device.mark())
    }

    fn attend(&mut self) {
        if let Some((machine, _)) = self.stale.take_if(|(_, since)| since.elapsed() >= LATE_NEWS) {
            self.machine = Some(machine);
            self.end(&Refusal::Stale);
            self.must_hear = true;
        }
        self.turns = self.turns.wrapping_add(1);
        let in_handshake = self.machine.is_some() && !self.is_running();
        if self.must_hear || in_handshake || self.turns.is_multiple_of(ATTEND_EVERY) {
            self.hear();
            if self.machine.as_ref().is_some_and(|machine| machine.device.memory.is_gone()) {
                self.end(&Broken::Gone.into());
            }
        }
    }

    #[inline]
    fn is_ready(&mut self) -> bool {
        self.moves.is_none_or(|since| since.elapsed() >= MOVE)
    }

    #[inline]
    fn give(&mut self, incoming: &Incoming<'_>, front: &Front, dropped: &mut Dropped) -> Given {
        if self.broken.is_some() {
            return away(dropped);
        }
        self.give_to_guest(incoming, front, dropped).unwrap_or_else(|broken| {
            self.broken = Some(broken.into());
            away(dropped)
        })
    }

    fn take(&mut self, egress: &mut Egress<'_>) -> usize {
        if self.broken.is_some() {
            return 0;
        }
        usize::from(self.announce(egress)) + self.take_from_guest(egress)
    }

    /// Shows the guest what is completed, and interrupts it if it wants that.
    #[inline]
    fn commit(&mut self) {
        // One that does not read its answers is sent away when it is heard.
        self.other.iter_mut().for_each(|other| _ = other.channel.answer());
        if let Some(machine) = &mut self.machine {
            if let Err(refusal) = machine.channel.answer() {
                self.broken.get_or_insert(refusal);
            }
            for at in [TO_GUEST, FROM_GUEST] {
                let Device { memory, queues, .. } = &mut machine.device;
                let wants = queues[at].as_mut().is_some_and(Queue::show);
                point("guest.shown");
                queues[at].iter_mut().for_each(|queue| queue.note_used(memory));
                if let Some(call) = machine.device.call(at).filter(|_| wants) {
                    ring(call);
                    self.clients.interrupts += 1;
                }
            }
        }
        if let Some(refusal) = self.broken.take() {
            self.end(&refusal);
        }
    }

    fn arm(&mut self, waits: bool) -> Armed {
        let Some(machine) = &mut self.machine else { return Armed::Idle };
        let Some(queue) = &mut machine.device.queues[FROM_GUEST] else { return Armed::Idle };
        if std::mem::take(&mut self.is_quiesced) {
            queue.want_kicks(true);
        }
        if !waits && queue.look() != Ok(0) { Armed::Busy } else { Armed::Idle }
    }

    fn wake(&mut self) {
        self.must_hear = true;
        if let Some(machine) = &self.machine {
            machine.device.kicks().for_each(|kick| tasuki_shm::wake::drain(kick.as_fd()));
        }
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.listener.fd())
    }

    fn again_in(&self) -> Option<Duration> {
        self.machine.as_ref().filter(|machine| machine.device.must_poll()).map(|_| ROOM_AGAIN)
    }

    fn tick(&mut self, now: Instant) -> bool {
        self.must_hear = true;
        self.listener.tick();
        let is_silent = |machine: &Machine| {
            machine.silent.is_some_and(|since| now.saturating_duration_since(since) >= SILENCE)
        };
        if self.machine.as_deref().is_some_and(is_silent) {
            self.end(&Refusal::Silent);
        }
        if let Some(other) = self.other.take_if(|other| is_silent(other)) {
            other.channel.hang_up();
            self.refuse(format!("the front end of a second machine was sent away: {}", Refusal::Silent));
        }
        self.machine.is_some() && !self.is_running()
    }

    /// Reads the rest of a message that has begun, and sends away a front end whose device does not run yet.
    fn finish(&mut self) {
        let until = Instant::now() + LAST_WORD;
        while self.machine.as_ref().is_some_and(|machine| machine.channel.is_within()) && Instant::now() < until {
            self.hear();
        }
        let is_within = self.machine.as_ref().is_some_and(|machine| machine.channel.is_within());
        if !self.is_running() || is_within {
            self.end(&Refusal::Left);
        }
    }

    fn release(&mut self) {
        self.serves = false;
        // It connects again, to the successor.
        self.other.take().into_iter().for_each(|other| other.channel.hang_up());
        // Another worker may serve it meanwhile: it is not ours to send away.
        self.inherited = self.stale.take().map(|(machine, _)| machine);
        if let Some(mut machine) = self.machine.take() {
            self.session = machine.device.session();
            let is_running = machine.device.is_running();
            machine.device.queues = [None, None];
            // It is ours again if the successor gives the lease back.
            self.inherited = is_running.then_some(machine);
        }
        self.watch_all();
    }

    fn counts(&self) -> Vec<(&'static str, u64)> {
        let Clients { attached, refused, interrupts } = self.clients;
        vec![("clients_attached", attached), ("clients_refused", refused), ("interrupts", interrupts)]
    }

    fn trouble(&mut self) -> Option<String> {
        self.trouble.take()
    }

    fn connection(&mut self) -> Option<&mut dyn Connection> {
        Some(self)
    }
}

impl Connection for Guest {
    fn has_news(&self) -> bool {
        self.has_news
    }

    /// A front end whose device does not run yet has no parts: it connects again when its worker is replaced.
    fn parts(&mut self) -> io::Result<Option<Parts>> {
        self.has_news = false;
        let machine = match (&self.machine, &self.inherited) {
            (Some(machine), _) if self.is_running() => machine,
            (None, Some(machine)) => machine,
            _ => return Ok(None),
        };
        let fds = [machine.channel.socket()].into_iter().chain(machine.device.fds());
        Ok(Some(Parts {
            name: "a virtual machine".to_owned(),
            number: machine.channel.number(),
            version: machine.device.session().into(),
            text: machine.device.text(),
            fds: fds.map(OwnedFd::try_clone).collect::<io::Result<_>>()?,
        }))
    }

    fn go_on(&mut self, parts: Parts) -> Result<(), String> {
        let Parts { text, mut fds, .. } = parts;
        if fds.is_empty() {
            return Err("no socket came with a virtual machine; rebuild the older of daemon and worker".to_owned());
        }
        let socket = fds.remove(0);
        let channel = Channel::new(socket);
        // A front end that no successor can serve has to connect again.
        let device = Device::again(&text, fds).inspect_err(|_| channel.hang_up())?;
        let machine = Box::new(Machine { channel, device, silent: None });
        if self.serves {
            self.go_on_now(machine);
        } else {
            self.inherited = Some(machine);
        }
        Ok(())
    }

    fn forget(&mut self, number: u64) {
        self.inherited.take_if(|machine| machine.channel.number() == number);
    }

    fn dismiss(&mut self, _: Dismissal) {
        self.other.take().into_iter().for_each(|other| other.channel.hang_up());
        self.end(&Refusal::Left);
    }
}

/// Writes to an eventfd. Never waits, even if the front end made it block: a full eventfd is readable anyway.
fn ring(eventfd: &OwnedFd) {
    let mut polled = [PollFd::new(eventfd, PollFlags::OUT)];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    if rustix::event::poll(&mut polled, Some(&at_once)) == Ok(1) && polled[0].revents().contains(PollFlags::OUT) {
        let _ = rustix::io::write(eventfd, &1_u64.to_ne_bytes());
    }
}

/// Returns whether this is an eventfd: writing to other files may do more.
fn is_eventfd(descriptor: BorrowedFd<'_>) -> bool {
    let path = format!("/proc/self/fd/{}", descriptor.as_raw_fd());
    rustix::fs::readlink(path, Vec::new()).is_ok_and(|name| name.as_bytes() == b"anon_inode:[eventfd]")
}

/// Shuts a connection down, for all processes that hold the socket.
fn hang_up(socket: &OwnedFd) {
    // Fails if it is shut down already.
    let _ = rustix::net::shutdown(socket, Shutdown::Both);
}

#[cfg(test)]
mod tests;
