//! The device that a front end sees: its features, its memory and its rings, two for each pair of queues. The front end's
//! messages change it.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use tasuki_shm::region::CommonRegion;
use tasuki_shm::wake::{is_eventfd, ring_eventfd};
use zerocopy::{FromBytes, IntoBytes};

use super::counts::{Count, Counts};
use super::interrupt::Interrupt;
use super::journal::{Identity, Journal, Left, Ran};
use super::wire::{FDS_MAX, LOG_USED, LogBase, NO_FD, Region, RingAddress, RingState, feature, protocol, request};
use crate::endpoint::{MARKS_MAX, Marks};
use crate::virtq::{Broken, DriverMemory, Layout, Log, MemoryRegion, Packed, Place, Queue, REGIONS_MAX, Split};
use crate::vni::ledger::point;

/// Index, in a pair, of the ring by which the guest receives.
pub const TO_GUEST: usize = 0;
/// Index, in a pair, of the ring by which the guest sends.
pub const FROM_GUEST: usize = 1;

/// Maximum number of pairs of queues: of each, one mark says how far it is.
pub const PAIRS_MAX: usize = MARKS_MAX;
/// Maximum number of rings.
pub const RINGS_MAX: usize = 2 * PAIRS_MAX;

/// A bit for each pair.
pub type Pairs = u32;
/// A bit for each ring.
pub type Rings = u64;
const _: () = assert!(PAIRS_MAX == Pairs::BITS as usize && RINGS_MAX == Rings::BITS as usize);

/// Returns the numbers of the bits that are set.
#[inline]
pub fn numbers(mut bits: Rings) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let number = (bits != 0).then(|| bits.trailing_zeros() as usize)?;
        bits &= bits - 1;
        Some(number)
    })
}

/// Features that we offer.
const FEATURES: u64 = feature::CSUM
    | feature::GUEST_CSUM
    | feature::MTU
    | feature::GUEST_TSO4
    | feature::GUEST_TSO6
    | feature::GUEST_ECN
    | feature::HOST_TSO4
    | feature::HOST_TSO6
    | feature::HOST_ECN
    | feature::MRG_RXBUF
    | feature::CTRL_VQ
    | feature::GUEST_ANNOUNCE
    | feature::MQ
    | feature::LOG_ALL
    | feature::INDIRECT_DESC
    | feature::EVENT_IDX
    | feature::PROTOCOL_FEATURES
    | feature::VERSION_1
    | feature::RING_PACKED
    | feature::IN_ORDER
    | feature::GUEST_USO4
    | feature::GUEST_USO6
    | feature::HOST_USO;

/// The least MTU that a card may have (5.1.4.1).
const MTU_MIN: u16 = 68;

/// Length in bytes of an Ethernet header, with a tag.
const ETHERNET_LEN: u16 = 18;

const PROTOCOL_FEATURES: u64 = protocol::MQ
    | protocol::LOG_SHMFD
    | protocol::RARP
    | protocol::REPLY_ACK
    | protocol::NET_MTU
    | protocol::CONFIGURE_MEM_SLOTS
    | protocol::STATUS;

/// Why a front end is sent away. vhost-user has no message for it: the reason goes to the daemon's user.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Bytes that are no request of version 1 of vhost-user.
    #[error("what it sends is not vhost-user; at this socket only a machine's front end connects")]
    Foreign,
    /// A message that we did not offer, or that is out of its turn.
    #[error("it sent request {0}, which it was not offered")]
    Request(u32),
    /// The body has another length than the request.
    #[error("it sent request {0} with a body of {1} bytes, which is not its length")]
    Length(u32, usize),
    /// The descriptors that belong to the request did not come.
    #[error("{1} descriptors came with its request {0}, and others belong to it")]
    Descriptors(u32, usize),
    /// No descriptor is left for those that it sends.
    #[error("this worker may open no more descriptors, and it sends some: raise LimitNOFILE= of tasukid (ulimit -Hn)")]
    Lack,
    /// A feature that was not offered.
    #[error("it takes features that it was not offered ({0:#x})")]
    Features(u64),
    /// A ring that does not exist.
    #[error("it speaks of ring {ring}, and there are {rings}: start it with {} pairs of queues at most", .rings / 2)]
    Ring {
        /// The ring's number.
        ring: u64,
        /// Number of rings that there may be.
        rings: usize,
    },
    /// A descriptor that is no eventfd.
    #[error("what it sent as the eventfd of ring {0} is none")]
    Eventfd(u64),
    /// Memory that cannot be mapped.
    #[error(
        "its memory cannot be shared: {0}; give the machine a memory backend that is a file in memory, and share=on"
    )]
    Memory(String),
    /// A log that cannot be written.
    #[error("the log that it gives for written pages cannot be used: {0}")]
    Log(String),
    /// More regions of memory than we have room for.
    #[error("its memory comes in more than {REGIONS_MAX} regions")]
    Regions,
    /// A rule of a virtqueue.
    #[error(transparent)]
    Queue(#[from] Broken),
    /// A predecessor had heard more than it could tell.
    #[error("its worker ended while the device changed: it has to connect again")]
    Stale,
    /// An MTU that no network has.
    #[error("it says that its card has an MTU of {0} bytes, and that is from {MTU_MIN} to 65535: change its host_mtu=")]
    Mtu(u64),
    /// It connected and says nothing.
    #[error("it connected and said nothing for 5 seconds")]
    Silent,
    /// It began a message and does not go on.
    #[error("it began a message, and the rest did not come for 5 seconds")]
    Unfinished,
    /// It does not read our answers.
    #[error("it does not read the answers that it asked for")]
    Deaf,
    /// A worker that served some of its pairs is gone for good.
    #[error("the node that served some of its queues is gone, with where they stand: it has to connect again")]
    Lost,
    /// It left, or the node ends.
    #[error("it has left")]
    Left,
}

/// A ring, as the front end describes it. A description has many: so it has no names.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(from = "RingLine", into = "RingLine")]
pub struct RingText {
    place: Place,
    /// Position of the first chain to take, from the front end.
    base: u16,
    /// Position of the first completion when the ring started.
    done: u16,
    /// Position that the front end knows: the one that it gave, or was told, last.
    stated: u16,
    /// Whether it has run since the front end connected, which then knows its position.
    has_run: bool,
    /// The guest's address of the used ring, if writes to it are noted.
    log: Option<u64>,
    is_enabled: bool,
    /// Whether the front end has started it: it gave an eventfd for kicks, or said that it gives none.
    is_started: bool,
    has_kick: bool,
    has_call: bool,
}

/// Number of descriptors; addresses of descriptors, available and used ring; base, done, stated; log; bits of the rest.
type RingLine = (u16, u64, u64, u64, u16, u16, u16, Option<u64>, u8);

impl From<RingText> for RingLine {
    fn from(ring: RingText) -> Self {
        let RingText { place, base, done, stated, has_run, log, is_enabled, is_started, has_kick, has_call } = ring;
        let Place { size, descriptors, available, used } = place;
        let bits = [has_run, is_enabled, is_started, has_kick, has_call];
        let bits = bits.into_iter().rev().fold(0, |bits, bit| bits << 1 | u8::from(bit));
        (size, descriptors, available, used, base, done, stated, log, bits)
    }
}

impl From<RingLine> for RingText {
    fn from((size, descriptors, available, used, base, done, stated, log, bits): RingLine) -> Self {
        let place = Place { size, descriptors, available, used };
        let [has_run, is_enabled, is_started, has_kick, has_call] = std::array::from_fn(|bit| bits >> bit & 1 == 1);
        RingText { place, base, done, stated, has_run, log, is_enabled, is_started, has_kick, has_call }
    }
}

impl RingText {
    /// Returns whether the front end has said where it lies.
    fn is_described(&self) -> bool {
        self.place.size > 0 && self.place.descriptors > 0
    }

    /// Returns whether the ring runs. A front end without the protocol's features enables none.
    fn may_run(&self, has_protocol: bool) -> bool {
        self.is_started && (self.is_enabled || !has_protocol)
    }
}

/// What a successor must know besides descriptors.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Text {
    features: u64,
    protocol_features: u64,
    status: u64,
    /// The longest packet that the guest's driver was told of, in bytes without the Ethernet header (5.1.4): 0 if it was told of
    /// none.
    #[serde(default)]
    mtu: u16,
    /// Version of the device's state, which grows with each change: marks of another version do not count.
    #[serde(rename = "session")]
    version: u32,
    /// As many as the front end has spoken of, in pairs.
    rings: Vec<RingText>,
    /// Regions: guest address, front end's address, length, offset.
    #[serde(rename = "stretches")]
    regions: Vec<(u64, u64, u64, u64)>,
    /// Length and offset of the log of written pages.
    log: Option<(u64, u64)>,
    /// The device of a second front end, to which the guest may migrate. Its descriptors follow, its socket first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    other: Option<Box<Text>>,
}

impl Text {
    /// Returns the number of its descriptors.
    fn count(&self) -> usize {
        let flags = self.rings.iter().map(|ring| usize::from(ring.has_kick) + usize::from(ring.has_call));
        self.regions.len() + flags.sum::<usize>() + usize::from(self.log.is_some())
    }
}

/// The device of a predecessor, and the socket and the device of a second front end that it had.
pub type Both = (Device, Option<(OwnedFd, Device)>);

/// The device.
#[derive(Debug)]
pub struct Device {
    text: Text,
    files: ArrayVec<OwnedFd, REGIONS_MAX>,
    kicks: [Option<OwnedFd>; RINGS_MAX],
    /// Bits of the rings whose eventfd for kicks came where there was none: it is to be watched.
    pub kicks_came: Rings,
    /// An eventfd for kicks went, and may be watched. To watch it no more takes a new set: the front end may have it open.
    pub has_kick_gone: bool,
    interrupts: [Interrupt; RINGS_MAX],
    /// The node's journal, once the device is served.
    pub journal: Option<Journal>,
    /// A ring that ran was closed since this was unset.
    pub has_closed: bool,
    /// The log of written pages. It is written while the front end has [`feature::LOG_ALL`].
    log: Option<OwnedFd>,
    /// Station address of a guest that came from another place and cannot announce itself, until we have.
    pub announced: Option<[u8; 6]>,
    /// All memory of the guest.
    pub memory: DriverMemory,
    /// Rings that are started and enabled.
    pub queues: [Option<Queue>; RINGS_MAX],
    /// The first pair that is served here: 0, but for a worker that has [borrowed](Self::borrow) some.
    pub first: usize,
    /// Number of pairs that run here, from the first on.
    pub pairs: usize,
    /// Their bits.
    pub running: Pairs,
    /// Bits of the pairs that another worker serves.
    pub lent: Pairs,
    /// Bits of the rings that were used since they were [shown](Self::show) last. Nobody looks at the others.
    pub touched: Rings,
    /// Bits of the rings whose interrupt may be held.
    held: Rings,
    /// Whether one of the rings that run has no eventfd for kicks.
    polls: bool,
    /// As they were at the end of the last turn, and the version that they are of.
    marks: Marks,
    marked: u32,
}

impl Default for Device {
    fn default() -> Self {
        Device {
            text: Text::default(),
            files: ArrayVec::new(),
            kicks: [const { None }; RINGS_MAX],
            kicks_came: 0,
            has_kick_gone: false,
            interrupts: std::array::from_fn(|_| Interrupt::default()),
            journal: None,
            has_closed: false,
            log: None,
            announced: None,
            memory: DriverMemory::default(),
            queues: [const { None }; RINGS_MAX],
            first: 0,
            pairs: 0,
            running: 0,
            lent: 0,
            touched: 0,
            held: 0,
            polls: false,
            marks: Marks::new(),
            marked: 0,
        }
    }
}

const OLDER: &str = "rebuild the older of daemon and worker";

/// A body of a fixed length.
fn body<T: FromBytes>(request: u32, bytes: &[u8]) -> Result<T, Refusal> {
    T::read_from_bytes(bytes).map_err(|_| Refusal::Length(request, bytes.len()))
}

impl Device {
    /// Makes the device of a new front end. `version` is the last one of the front end before.
    pub fn new(version: u32, journal: Option<Journal>) -> Self {
        Device { text: Text { version: version.wrapping_add(1), ..Text::default() }, journal, ..Device::default() }
    }

    /// Returns the version of its state.
    pub fn version(&self) -> u32 {
        self.text.version
    }

    /// Returns whether rings are to run, and lie in memory that was not shared.
    pub fn lacks_memory(&self) -> bool {
        let has_protocol = self.has(feature::PROTOCOL_FEATURES);
        let runs = |ring: &RingText| ring.may_run(has_protocol) && ring.is_described();
        self.memory.regions.is_empty() && self.text.rings.iter().any(runs)
    }

    /// Goes on after the device with this version of its state.
    pub fn follow(&mut self, version: u32) {
        self.text.version = version.wrapping_add(1);
    }

    /// Returns whether the rings of the first pair are started and enabled.
    pub fn is_running(&self) -> bool {
        self.pairs > 0
    }

    /// Counts the pairs that run, after queues were opened or closed: all are to be looked at.
    fn count_pairs(&mut self) {
        let queues = self.queues.as_chunks().0[self.first..].iter();
        self.pairs = queues.take_while(|[to, from]| to.is_some() && from.is_some()).count();
        let here = self.first..self.first + self.pairs;
        self.running = bits_of(here.clone());
        self.polls = self.kicks[2 * here.start..2 * here.end].iter().any(Option::is_none);
        self.touched = Rings::MAX;
        self.journal.iter().for_each(|journal| journal.run(here.end));
    }

    /// Returns the number of pairs that run, here and where they are lent.
    pub fn all_pairs(&self) -> usize {
        self.pairs + self.lent.count_ones() as usize
    }

    /// Stops serving these pairs, which run and are shown, for another worker that serves them from now on. Returns where they
    /// stand: the position of the ring to the guest, and of the one from it.
    pub fn lend(&mut self, pairs: Range<usize>) -> ArrayVec<[u16; 2], PAIRS_MAX> {
        let stopped = pairs.clone().map(|pair| [TO_GUEST, FROM_GUEST].map(|side| self.stop_ring(2 * pair + side)));
        let positions = stopped.collect();
        self.lent |= bits_of(pairs);
        self.count_pairs();
        positions
    }

    /// Stops a ring that goes on elsewhere, as far as the front end knows. Returns its position.
    fn stop_ring(&mut self, at: usize) -> u16 {
        let Some(mut queue) = self.queues[at].take() else {
            return self.text.rings.get(at).map_or(0, |ring| ring.done);
        };
        queue.note_used(&self.memory);
        self.interrupts[at].flush();
        let (base, done) = queue.positions();
        if let Some(ring) = self.text.rings.get_mut(at) {
            (ring.base, ring.done) = (base, done);
        }
        if let (Queue::Packed(_), Some(journal)) = (&queue, &self.journal) {
            // All of it is shown. The ring may come to the same position again in this version.
            journal.note(at, self.text.version, done, &[]);
        }
        done
    }

    /// Serves pairs again that were lent, from where they stand.
    ///
    /// # Errors
    /// A ring is broken.
    pub fn take_back(&mut self, pairs: impl IntoIterator<Item = (usize, [u16; 2])>) -> Result<(), Refusal> {
        // One that has not gone on here has to connect again: it opens no queue.
        let runs = self.is_running();
        let mut opened = Ok(());
        for (pair, positions) in pairs {
            self.lent &= !(1 << pair);
            for (side, position) in [TO_GUEST, FROM_GUEST].into_iter().zip(positions) {
                let at = 2 * pair + side;
                let Some(ring) = self.text.rings.get_mut(at) else { continue };
                (ring.base, ring.done) = (position, position);
                if runs && self.queues[at].is_none() {
                    opened = opened.and(self.open_at(at, position));
                }
            }
        }
        self.count_pairs();
        opened
    }

    /// Serves these pairs, as loan `number` says, from where they stand: or from where the marks of an earlier worker say, if
    /// they are of this loan. The marks of this one are.
    ///
    /// # Errors
    /// A ring does not run, or is broken.
    pub fn borrow(
        &mut self,
        number: u32,
        pairs: Range<usize>,
        positions: impl Iterator<Item = [u16; 2]>,
        marks: Option<&Marks>,
    ) -> Result<(), Refusal> {
        if pairs.is_empty() {
            return Err(Refusal::Stale);
        }
        self.text.version = number;
        (self.first, self.lent) = (pairs.start, !bits_of(pairs.clone()));
        let marks = marks.filter(|marks| version_of(marks) == number);
        let has_protocol = self.has(feature::PROTOCOL_FEATURES);
        let mut opened = Ok(());
        for (pair, positions) in pairs.zip(positions) {
            for (side, position) in [TO_GUEST, FROM_GUEST].into_iter().zip(positions) {
                let at = 2 * pair + side;
                let room = self.room();
                let Some(ring) = self.text.rings.get_mut(at) else { return Err(Refusal::Stale) };
                let position = marks.and_then(|marks| done_of(marks, at)).unwrap_or(position);
                (ring.base, ring.done) = (position, position);
                opened = match at < room && ring.may_run(has_protocol) && ring.is_described() {
                    true => opened.and(self.open_at(at, position)),
                    false => Err(Refusal::Stale),
                };
            }
        }
        self.count_pairs();
        opened
    }

    /// Forgets all queues: a successor has opened its own.
    pub fn forget_queues(&mut self) {
        (self.queues, self.pairs, self.running) = ([const { None }; RINGS_MAX], 0, 0);
        (self.first, self.lent) = (0, 0);
    }

    /// Returns the queue of a ring that runs, and counts it as used.
    #[inline]
    pub fn queue_of(&mut self, ring: usize) -> Option<&mut Queue> {
        self.touched |= 1 << ring;
        self.queues[ring].as_mut()
    }

    /// Handles a request. Returns the body of the answer, if the request has one of its own.
    pub fn hear(
        &mut self,
        request: u32,
        bytes: &[u8],
        mut fds: ArrayVec<OwnedFd, FDS_MAX>,
    ) -> Result<Option<Vec<u8>>, Refusal> {
        let asks = matches!(
            request,
            request::GET_FEATURES
                | request::GET_PROTOCOL_FEATURES
                | request::GET_STATUS
                | request::GET_MAX_MEM_SLOTS
                | request::GET_QUEUE_NUM
                | request::SET_OWNER
        );
        if !asks {
            self.text.version = self.text.version.wrapping_add(1);
        }
        let number = |number: u64| Ok(Some(number.as_bytes().to_vec()));
        let has_protocol = |bit| self.text.protocol_features & bit != 0;
        match request {
            request::GET_FEATURES => return number(FEATURES),
            request::SET_FEATURES => {
                let features: u64 = body(request, bytes)?;
                if features & !FEATURES != 0 {
                    return Err(Refusal::Features(features & !FEATURES));
                }
                let layout = self.layout();
                self.text.features = features;
                if self.layout() != layout {
                    self.keep_places();
                }
                if !self.has(feature::LOG_ALL) {
                    (self.text.log, self.log, self.memory.log) = (None, None, None);
                }
                self.open_queues()?;
            }
            request::SET_OWNER | request::SET_VRING_ERR | request::SET_LOG_FD => {}
            request::SET_LOG_BASE if has_protocol(protocol::LOG_SHMFD) => {
                let count = fds.len();
                let file = fds.pop().filter(|_| count == 1).ok_or(Refusal::Descriptors(request, count))?;
                let LogBase { len, offset } = body(request, bytes)?;
                self.set_log(len, offset, file)?;
                self.open_queues()?;
                return number(0);
            }
            request::SEND_RARP if has_protocol(protocol::RARP) => {
                let address: u64 = body(request, bytes)?;
                self.announced = address.to_ne_bytes().first_chunk().copied();
            }
            request::NET_SET_MTU if has_protocol(protocol::NET_MTU) => {
                let mtu: u64 = body(request, bytes)?;
                self.text.mtu = u16::try_from(mtu).ok().filter(|mtu| *mtu >= MTU_MIN).ok_or(Refusal::Mtu(mtu))?;
            }
            request::RESET_OWNER => self.stop(),
            request::GET_PROTOCOL_FEATURES => return number(PROTOCOL_FEATURES),
            request::SET_PROTOCOL_FEATURES => {
                let features: u64 = body(request, bytes)?;
                if features & !PROTOCOL_FEATURES != 0 {
                    return Err(Refusal::Features(features & !PROTOCOL_FEATURES));
                }
                self.text.protocol_features = features;
            }
            request::SET_MEM_TABLE => self.set_memory(bytes, fds)?,
            request::GET_QUEUE_NUM if has_protocol(protocol::MQ) => return number(self.room() as u64 / 2),
            request::GET_MAX_MEM_SLOTS if has_protocol(protocol::CONFIGURE_MEM_SLOTS) => {
                return number(REGIONS_MAX as u64);
            }
            request::ADD_MEM_REG if has_protocol(protocol::CONFIGURE_MEM_SLOTS) => {
                let region = bytes.get(8..).unwrap_or_default();
                let region: Region = body(request, region)?;
                let count = fds.len();
                let file = fds.pop().filter(|_| count == 1).ok_or(Refusal::Descriptors(request, count))?;
                // QEMU 7.2 tells of each region once for each pair.
                if !self.knows(region, &file) {
                    self.add(region, file)?;
                    self.open_queues()?;
                }
            }
            request::REM_MEM_REG if has_protocol(protocol::CONFIGURE_MEM_SLOTS) => {
                let region = bytes.get(8..).unwrap_or_default();
                let region: Region = body(request, region)?;
                self.remove(region);
                self.open_queues()?;
            }
            request::SET_STATUS if has_protocol(protocol::STATUS) => {
                self.text.status = body(request, bytes)?;
                if self.text.status == 0 {
                    self.stop();
                }
            }
            request::GET_STATUS if has_protocol(protocol::STATUS) => return number(self.text.status),
            request::SET_VRING_NUM => {
                let RingState { index, number } = body(request, bytes)?;
                let size = u16::try_from(number).map_err(|_| Broken::Size(number))?;
                self.set_place(index, |place| place.size = size)?;
                self.open_queues()?;
            }
            request::SET_VRING_ADDR => {
                let RingAddress { index, flags, descriptors, used, available, log } = body(request, bytes)?;
                self.set_place(index, |place| *place = Place { descriptors, used, available, ..*place })?;
                let ring = self.ring(index.into())?;
                ring.log = (flags & LOG_USED != 0).then_some(log);
                let log = ring.log;
                self.queues[index as usize].iter_mut().for_each(|queue| queue.set_log(log));
                self.open_queues()?;
            }
            request::SET_VRING_BASE => {
                let RingState { index, number } = body(request, bytes)?;
                // The upper half is of packed rings: where the next used descriptor goes. That is the same place, since a
                // ring that stops has completed what was taken; DPDK's front end says 0.
                let is_open = self.queues.get(index as usize).is_some_and(Option::is_some);
                let ring = self.ring(index.into())?;
                ring.stated = u16::try_from(number & 0xffff).expect("two bytes");
                if !is_open {
                    ring.base = ring.stated;
                }
            }
            request::GET_VRING_BASE => {
                let RingState { index, .. } = body(request, bytes)?;
                let at = index as usize;
                self.ring(index.into())?.is_started = false;
                self.close(at);
                let base = self.text.rings[at].base;
                (self.text.rings[at].stated, self.text.rings[at].has_kick) = (base, false);
                self.set_kick(at, None);
                let number = match self.layout() {
                    Layout::Split => base.into(),
                    Layout::Packed => u32::from(base) << 16 | u32::from(base),
                };
                let answer = RingState { index, number };
                return Ok(Some(answer.as_bytes().to_vec()));
            }
            request::SET_VRING_KICK | request::SET_VRING_CALL => self.set_eventfd(request, bytes, fds)?,
            request::SET_VRING_ENABLE => {
                let RingState { index, number } = body(request, bytes)?;
                self.ring(index.into())?.is_enabled = number != 0;
                self.open_queues()?;
            }
            other => return Err(Refusal::Request(other)),
        }
        Ok(None)
    }

    /// Returns how many rings there may be.
    fn room(&self) -> usize {
        self.journal.as_ref().map_or(RINGS_MAX, Journal::room)
    }

    fn ring(&mut self, index: u64) -> Result<&mut RingText, Refusal> {
        let room = self.room();
        let at =
            usize::try_from(index).ok().filter(|at| *at < room).ok_or(Refusal::Ring { ring: index, rings: room })?;
        let rings = &mut self.text.rings;
        rings.resize_with(rings.len().max((at | 1) + 1), RingText::default);
        Ok(&mut rings[at])
    }

    /// Changes where a ring lies. One that runs is opened anew: a successor would open it there.
    fn set_place(&mut self, index: u32, change: impl FnOnce(&mut Place)) -> Result<(), Refusal> {
        let ring = self.ring(index.into())?;
        let before = ring.place;
        change(&mut ring.place);
        if ring.place != before {
            self.close(index as usize);
        }
        Ok(())
    }

    /// Stops all rings. Keeps their places: QEMU 7.2 resets the status of a machine that migrates, and then asks where
    /// its rings are.
    fn stop(&mut self) {
        for at in 0..self.text.rings.len() {
            self.close(at);
            let RingText { base, done, stated, has_run, .. } = self.text.rings[at];
            self.text.rings[at] = RingText { base, done, stated, has_run, ..RingText::default() };
            self.set_kick(at, None);
            self.interrupts[at] = Interrupt::default();
        }
    }

    fn set_kick(&mut self, at: usize, kick: Option<OwnedFd>) {
        match std::mem::replace(&mut self.kicks[at], kick) {
            Some(_) => self.has_kick_gone = true,
            None => self.kicks_came |= Rings::from(self.kicks[at].is_some()) << at,
        }
    }

    fn set_eventfd(&mut self, request: u32, bytes: &[u8], mut fds: ArrayVec<OwnedFd, FDS_MAX>) -> Result<(), Refusal> {
        let number: u64 = body(request, bytes)?;
        let index = number & 0xff;
        let fd = if number & NO_FD == 0 { Some(fds.pop().ok_or(Refusal::Descriptors(request, 0))?) } else { None };
        if let Some(fd) = &fd {
            if !is_eventfd(fd.as_fd()) {
                return Err(Refusal::Eventfd(index));
            }
            // The front end may undo this at any time: see `ring_eventfd`.
            let _ = rustix::fs::fcntl_setfl(fd, OFlags::NONBLOCK);
        }
        let ring = self.ring(index)?;
        let at = usize::try_from(index).expect("there is such a ring");
        if request == request::SET_VRING_CALL {
            ring.has_call = fd.is_some();
            // An interrupt may have been due while there was no eventfd, or before this connection.
            fd.iter().for_each(ring_eventfd);
            self.interrupts[at].eventfd = fd;
            return Ok(());
        }
        ring.has_kick = fd.is_some();
        ring.is_started = true;
        self.set_kick(at, fd);
        self.close(at);
        self.open_queues()
    }

    fn set_memory(&mut self, bytes: &[u8], fds: ArrayVec<OwnedFd, FDS_MAX>) -> Result<(), Refusal> {
        let count = bytes.first_chunk().map_or(0, |count| u32::from_ne_bytes(*count)) as usize;
        let regions = bytes.get(8..).unwrap_or_default();
        if count > REGIONS_MAX {
            return Err(Refusal::Regions);
        }
        if regions.len() < count * size_of::<Region>() {
            return Err(Refusal::Length(request::SET_MEM_TABLE, bytes.len()));
        }
        if fds.len() != count {
            return Err(Refusal::Descriptors(request::SET_MEM_TABLE, fds.len()));
        }
        self.keep_places();
        (self.text.regions, self.files) = (Vec::new(), ArrayVec::new());
        self.memory.regions.clear();
        for (bytes, file) in regions.chunks_exact(size_of::<Region>()).zip(fds) {
            self.add(body(request::SET_MEM_TABLE, bytes)?, file)?;
        }
        self.open_queues()
    }

    /// Returns whether a region, of this file, was announced already.
    fn knows(&self, region: Region, file: &OwnedFd) -> bool {
        let Region { guest, len, user, offset } = region;
        let known = self.text.regions.iter().position(|known| *known == (guest, user, len, offset));
        let number = |file: &OwnedFd| rustix::fs::fstat(file).ok().map(|stat| (stat.st_dev, stat.st_ino));
        known.is_some_and(|at| number(&self.files[at]) == number(file))
    }

    fn add(&mut self, region: Region, file: OwnedFd) -> Result<(), Refusal> {
        let Region { guest, len, user, offset } = region;
        let odd = |why: String| Refusal::Memory(why);
        let whole = offset.checked_add(len).filter(|_| guest.checked_add(len).is_some() && len > 0);
        let whole = whole.and_then(|whole| usize::try_from(whole).ok());
        let whole = whole.ok_or_else(|| odd("a region of it has no end".to_owned()))?;
        if self.files.is_full() {
            return Err(Refusal::Regions);
        }
        let mapped = CommonRegion::map_guarded(file.as_fd(), whole).map_err(|error| odd(error.to_string()))?;
        self.memory.regions.push(MemoryRegion { guest, user, len, mapped, offset });
        self.files.push(file);
        self.text.regions.push((guest, user, len, offset));
        Ok(())
    }

    fn set_log(&mut self, len: u64, offset: u64, file: OwnedFd) -> Result<(), Refusal> {
        let whole = offset.checked_add(len).and_then(|whole| usize::try_from(whole).ok());
        let whole = whole.ok_or_else(|| Refusal::Log("it has no end".to_owned()))?;
        let mapped = CommonRegion::map_guarded(file.as_fd(), whole).map_err(|error| Refusal::Log(error.to_string()))?;
        let log = Log::new(mapped, offset, len).ok_or_else(|| Refusal::Log("it is not aligned".to_owned()))?;
        (self.text.log, self.log, self.memory.log) = (Some((len, offset)), Some(file), Some(log));
        Ok(())
    }

    /// Returns whether all that we may write can be noted, if it must be. A front end may start a ring a few messages
    /// before it gives the log: the ring waits for that.
    fn can_note(&self) -> bool {
        let layout = self.layout();
        let end_of = |ring: &RingText| ring.log?.checked_add(ring.place.logged_len(layout) as u64);
        let ends = self.text.regions.iter().map(|(guest, _, len, _)| guest + len);
        let mut ends = ends.chain(self.text.rings.iter().filter_map(end_of));
        let Some(log) = &self.memory.log else { return !self.has(feature::LOG_ALL) };
        ends.all(|end| log.covers(end))
    }

    fn remove(&mut self, region: Region) {
        let is_it = |it: &(u64, u64, u64, u64)| (it.0, it.1, it.2) == (region.guest, region.user, region.len);
        if let Some(at) = self.text.regions.iter().position(is_it) {
            self.keep_places();
            self.text.regions.remove(at);
            self.memory.regions.remove(at);
            self.files.remove(at);
        }
    }

    /// Closes the queues, whose memory changes, and notes where they were.
    fn keep_places(&mut self) {
        (0..self.text.rings.len()).for_each(|at| self.close(at));
    }

    /// Closes a queue, and notes where it was.
    fn close(&mut self, at: usize) {
        if let Some(mut queue) = self.queues[at].take() {
            queue.note_used(&self.memory);
            // Another back end goes on, which does not know of it.
            self.interrupts[at].flush();
            (self.text.rings[at].base, self.text.rings[at].done) = queue.positions();
            let ran = Ran { version: self.text.version, stated: self.text.rings[at].stated, runs: false };
            self.journal.iter().for_each(|journal| journal.change(at, ran));
            self.has_closed = true;
            self.count_pairs();
        }
    }

    /// Opens the queues that are ready and not open.
    fn open_queues(&mut self) -> Result<(), Refusal> {
        let has_protocol = self.text.features & feature::PROTOCOL_FEATURES != 0;
        let can_note = self.can_note();
        for at in 0..self.text.rings.len() {
            let ring = &self.text.rings[at];
            let is_described = ring.is_described() && !self.memory.regions.is_empty();
            if !ring.may_run(has_protocol) || !can_note {
                self.close(at);
                continue;
            }
            if self.queues[at].is_some() || !is_described {
                continue;
            }
            let mut queue = match (self.layout(), ring.has_run) {
                (Layout::Packed, true) => Queue::Packed(self.packed(at, ring.base)?),
                (Layout::Packed, false) => Queue::Packed(self.packed_again(at)?),
                (Layout::Split, true) => Queue::Split(self.split(at, None)?),
                (Layout::Split, false) => Queue::Split(self.split_again(at)?),
            };
            queue.set_log(ring.log);
            if at % 2 == TO_GUEST {
                // Until a frame waits for a buffer.
                queue.want_kicks(false);
            }
            let ring = &mut self.text.rings[at];
            ((ring.base, ring.done), ring.has_run) = (queue.positions(), true);
            let ran = Ran { version: self.text.version, stated: ring.stated, runs: true };
            let position = ring.done;
            self.queues[at] = Some(queue);
            if let Some((journal, identity)) = self.journal.as_ref().zip(self.identity(at)) {
                // Where an earlier connection ended does not count any more.
                journal.open(at, ran, identity, position);
            }
        }
        self.count_pairs();
        Ok(())
    }

    /// Opens a packed ring that has not run since its front end connected. An earlier connection may have been cut: then
    /// the front end knows where the ring stood when that began, and no more. So the journal says where the ring stands. If
    /// it does not know this ring, the descriptors do, but only a front end that names the ring's beginning is doubted: after
    /// a migration it knows better. A ring that no device has served begins where the front end says.
    fn packed_again(&self, at: usize) -> Result<Packed, Broken> {
        let RingText { stated, base, .. } = self.text.rings[at];
        let ring = self.packed(at, base)?;
        if !ring.was_served() {
            return Ok(ring);
        }
        let Some((journal, left)) = self.left(at, stated) else {
            let is_doubted = stated == Packed::BEGINNING && !self.has(feature::IN_ORDER);
            let standing = ring.standing().filter(|_| is_doubted);
            return standing.map_or(Ok(ring), |position| self.packed(at, position));
        };
        let mut ring = self.packed(at, left.position)?;
        // The last turn was shown if the connection was ended by a worker that lived.
        let noted = journal.noted(at, left.version).unwrap_or_default();
        ring.show_again(noted.first, &noted.completions);
        Ok(ring)
    }

    /// Opens a split ring that has not run since its front end connected. It goes on at its used index. If a worker was
    /// killed before it had stored that of a committed turn, it is stored now.
    fn split_again(&self, at: usize) -> Result<Split, Broken> {
        let ring = self.split(at, None)?;
        let (used, size) = (ring.positions().1, self.text.rings[at].place.size);
        let left = self.left(at, used).map(|(_, left)| left.position);
        let Some(position) = left.filter(|position| (1..=size).contains(&position.wrapping_sub(used))) else {
            return Ok(ring);
        };
        let mut ring = self.split(at, Some(position))?;
        ring.show_again();
        Ok(ring)
    }

    /// Returns where the journal has this ring, if its front end knows this place of it.
    fn left(&self, at: usize, stated: u16) -> Option<(&Journal, Left)> {
        let journal = self.journal.as_ref()?;
        let is_it = |left: &Left| left.stated == stated && Some(left.ring) == self.identity(at);
        Some((journal, journal.left(at).filter(is_it)?))
    }

    /// Returns which ring it is, for the next connection.
    fn identity(&self, at: usize) -> Option<Identity> {
        let (region, address) = self.memory.lies(self.text.rings[at].place.descriptors)?;
        let file = rustix::fs::fstat(self.files.get(region)?).ok()?.st_ino;
        Some(Identity { file, address })
    }

    /// Notes where the rings stand that run, for the next connection of the same machine. `marks` are those of the last
    /// turn, if this device has not gone on after it.
    pub fn leave(&self, marks: Option<&Marks>) {
        for at in 0..self.text.rings.len() {
            if let Some((journal, left)) = self.journal.as_ref().zip(self.leaving(at, marks)) {
                journal.leave(at, left);
            }
        }
    }

    /// Returns what to note of a ring.
    fn leaving(&self, at: usize, marks: Option<&Marks>) -> Option<Left> {
        let ring = &self.text.rings[at];
        let may_run = ring.may_run(self.has(feature::PROTOCOL_FEATURES));
        let ran = marks.and_then(|marks| self.ran(at, version_of(marks)));
        let (stated, ran) = ran.unwrap_or((ring.stated, may_run));
        let of_marks = || marks.filter(|_| ran).and_then(|marks| done_of(marks, at));
        let position = self.queues[at].as_ref().map(|queue| queue.positions().1).or_else(of_marks)?;
        let stated = match self.layout() {
            Layout::Packed => stated,
            // The used index, which the driver's memory has.
            Layout::Split => self.split(at, None).ok()?.positions().1,
        };
        let version = marks.map_or(self.text.version, version_of);
        Some(Left { version, stated, position, ring: self.identity(at)? })
    }

    /// Returns the position that the front end knew of a ring, and whether the ring ran in this version of the state, which
    /// may be later than the description. Nothing is known of a ring that an earlier worker opened.
    fn ran(&self, at: usize, version: u32) -> Option<(u16, bool)> {
        let (Ran { version: since, stated, runs }, ring) = self.journal.as_ref()?.ran(at)?;
        let is_committed = version.wrapping_sub(since) < 1 << 31;
        Some((stated, runs == is_committed && Some(ring) == self.identity(at)))
    }

    /// Opens a split ring at a position, or at its used index: as many chains were taken as were completed (Q5). A front
    /// end's number does not count. QEMU says the used index; Cloud Hypervisor says the available one, DPDK 0.
    fn split(&self, at: usize, position: Option<u16>) -> Result<Split, Broken> {
        let place = self.text.rings[at].place;
        let open = |next, done| Split::new(&self.memory, place, next, done, self.has(feature::EVENT_IDX));
        let position = position.map_or_else(|| Ok(open(0, None)?.positions().1), Ok)?;
        open(position, Some(position))
    }

    fn packed(&self, at: usize, position: u16) -> Result<Packed, Broken> {
        let place = self.text.rings[at].place;
        let [has_event_index, is_in_order] = [feature::EVENT_IDX, feature::IN_ORDER].map(|feature| self.has(feature));
        Packed::new(&self.memory, place, position, has_event_index, is_in_order)
    }

    fn layout(&self) -> Layout {
        if self.has(feature::RING_PACKED) { Layout::Packed } else { Layout::Split }
    }

    /// Returns whether the front end negotiated this feature.
    #[inline]
    pub fn has(&self, feature: u64) -> bool {
        self.text.features & feature != 0
    }

    /// Returns whether the front end has said nothing of its device.
    pub fn has_heard_nothing(&self) -> bool {
        let Text { features, protocol_features, rings, .. } = &self.text;
        (*features, *protocol_features, rings.len()) == (0, 0, 0)
    }

    /// Notes that the messages that led to this state leave the front end's socket, and whether it waits for an answer.
    pub fn let_go(&self, is_asked: bool) {
        self.journal.iter().for_each(|journal| journal.let_go(self.text.version, is_asked));
    }

    /// Returns whether the guest's driver takes no feature, by what the front end says.
    pub fn takes_nothing(&self) -> bool {
        self.text.features & !feature::PROTOCOL_FEATURES == 0
    }

    /// Returns the length in bytes of the longest frame that the guest's driver takes: one that is no GSO packet (5.1.4.1).
    #[inline]
    pub fn longest(&self) -> usize {
        match self.text.mtu {
            mtu if mtu > 0 && self.has(feature::MTU) => usize::from(mtu) + usize::from(ETHERNET_LEN),
            _ => usize::MAX,
        }
    }

    /// Returns whether the front end negotiated this feature of the protocol.
    pub fn has_protocol(&self, feature: u64) -> bool {
        self.text.protocol_features & feature != 0
    }

    /// Returns the eventfds by which the front end kicks, each with the number of its ring, but for rings that another worker
    /// serves.
    pub fn numbered_kicks(&self) -> impl Iterator<Item = (u32, BorrowedFd<'_>)> {
        let kicks = (0..).zip(&self.kicks).filter_map(|(ring, kick)| Some((ring, kick.as_ref()?.as_fd())));
        kicks.filter(|(ring, _)| self.lent >> (ring / 2) & 1 == 0)
    }

    /// Wakes the worker that serves this pair.
    pub fn wake(&self, pair: usize) {
        self.kicks.get(2 * pair + FROM_GUEST).into_iter().flatten().for_each(ring_eventfd);
    }

    /// Returns the eventfds by which the front end kicks.
    pub fn kicks(&self) -> impl Iterator<Item = &OwnedFd> {
        self.kicks.iter().flatten()
    }

    /// Returns the eventfds that interrupt the guest.
    pub fn calls(&self) -> impl Iterator<Item = &OwnedFd> {
        self.interrupts.iter().filter_map(|interrupt| interrupt.eventfd.as_ref())
    }

    /// Shows the guest what is completed, and interrupts it if it wants that and it is due: `every` is the least time
    /// between two interrupts of each ring. Returns the number of interrupts.
    #[inline]
    pub fn show(&mut self, every: [Duration; 2], counts: &mut Counts) -> u64 {
        let mut all = 0;
        for at in numbers(std::mem::take(&mut self.touched) | std::mem::take(&mut self.held)) {
            let (Some(queue), interrupt) = (&mut self.queues[at], &mut self.interrupts[at]) else { continue };
            let before = queue.progress();
            let wants = queue.show();
            point("guest.shown");
            queue.note_used(&self.memory);
            let done = queue.progress();
            let rang = interrupt.offer(wants, (done, queue.size()), every[at % 2], Instant::now);
            if rang || done != before {
                counts.add(at, if rang { Count::Interrupts } else { Count::Suppressed }, 1);
                all += u64::from(rang);
            }
            self.held |= Rings::from(interrupt.is_held()) << at;
        }
        all
    }

    /// Gives the interrupts that are held.
    pub fn flush(&mut self) {
        self.interrupts.iter_mut().for_each(|interrupt| _ = interrupt.flush());
    }

    /// Returns how soon a held interrupt is due.
    pub fn interrupts_in(&self, every: [Duration; 2]) -> Option<Duration> {
        let open = numbers(self.held).filter(|at| self.queues[*at].is_some());
        open.filter_map(|at| self.interrupts[at].due_in(every[at % 2], Instant::now())).min()
    }

    /// Returns whether a ring that runs has no eventfd for kicks: its driver expects us to look.
    pub fn must_poll(&self) -> bool {
        self.polls
    }

    /// Returns whether the driver kicks for the queue by which the guest sends, of this pair.
    pub fn kicks_for(&self, pair: usize) -> bool {
        self.kicks[2 * pair + FROM_GUEST].is_some()
    }

    /// Notes what is completed in packed rings and not shown yet.
    #[inline]
    pub fn note(&self) {
        let Some(journal) = &self.journal else { return };
        for at in numbers(self.touched) {
            let Some(Queue::Packed(ring)) = &self.queues[at] else { continue };
            let (first, completions) = ring.completions();
            if !completions.is_empty() {
                journal.note(at, self.text.version, first, completions);
            }
        }
    }

    /// Returns how far the rings of each pair are, with the version to which that belongs.
    #[inline]
    pub fn marks(&mut self) -> &[u64] {
        let version = u64::from(self.text.version) << 32;
        if self.marked != self.text.version || self.marks.is_empty() {
            self.marked = self.text.version;
            self.marks.clear();
            // A front end that has said nothing of rings has a version all the same.
            self.marks.extend(std::iter::repeat_n(version, (self.text.rings.len() / 2).max(1)));
            self.touched = Rings::MAX;
        }
        let done = |at: usize| match (&self.queues[at], self.text.rings.get(at)) {
            (Some(queue), _) => queue.positions().1,
            (None, ring) => ring.map_or(0, |ring| ring.done),
        };
        let mut touched = self.touched;
        for (pair, mark) in self.marks.iter_mut().enumerate() {
            if touched & 3 != 0 {
                let [to, from] = [TO_GUEST, FROM_GUEST].map(|side| u64::from(done(2 * pair + side)));
                *mark = version | to << 16 | from;
            }
            touched >>= 2;
        }
        &self.marks
    }

    /// Returns the description for a successor, with that of a second front end's device.
    pub fn text(&self, other: Option<&Self>) -> String {
        let other = other.map(|other| Box::new(other.text.clone()));
        serde_json::to_string(&Text { other, ..self.text.clone() }).expect("plain data")
    }

    /// Returns the descriptors for a successor, in the order in which [`again`](Self::again) takes them.
    pub fn fds(&self) -> impl Iterator<Item = &OwnedFd> {
        self.files.iter().chain(self.kicks()).chain(self.calls()).chain(&self.log)
    }

    /// Makes the device of a predecessor anew, and that of a second front end. Opens no queue before
    /// [`go_on`](Self::go_on), but has their pages mapped.
    pub fn again(text: &str, mut fds: Vec<OwnedFd>) -> Result<Both, String> {
        let mut text: Text = serde_json::from_str(text)
            .map_err(|error| format!("the description of a virtual machine is not understood ({error}); {OLDER}"))?;
        // An earlier worker's description still has the kick of a ring that was stopped.
        text.rings.iter_mut().for_each(|ring| ring.has_kick &= ring.is_started);
        let other = text.other.take().filter(|_| fds.len() > text.count()).map(|other| {
            let mut its = fds.split_off(text.count());
            (its.remove(0), *other, its)
        });
        let device = Self::of(text, fds)?;
        // A fault of the second machine is none of the first: the second has to connect again.
        let other = other.and_then(|(socket, text, fds)| match Self::of(text, fds) {
            Ok(device) => Some((socket, device)),
            Err(_) => {
                super::hang_up(&socket);
                None
            }
        });
        Ok((device, other))
    }

    fn of(mut text: Text, fds: Vec<OwnedFd>) -> Result<Self, String> {
        let expected = text.count();
        let regions = std::mem::take(&mut text.regions);
        if text.rings.len() > RINGS_MAX || !text.rings.len().is_multiple_of(2) {
            return Err(format!(
                "a virtual machine came with {} rings, and has {RINGS_MAX} at most; {OLDER}",
                text.rings.len()
            ));
        }
        let count = fds.len();
        if count != expected {
            return Err(format!(
                "{count} descriptors came with a virtual machine, and {expected} belong to it; {OLDER}"
            ));
        }
        let mut device = Device { text, ..Device::default() };
        let mut fds = fds.into_iter();
        for (guest, user, len, offset) in regions {
            let file = fds.next().expect("they were counted");
            device.add(Region { guest, len, user, offset }, file).map_err(|refusal| refusal.to_string())?;
        }
        if let Some((len, offset)) = device.text.log {
            let file = fds.next_back().expect("they were counted");
            device.set_log(len, offset, file).map_err(|refusal| refusal.to_string())?;
        }
        if !fds.as_slice().iter().all(|fd| is_eventfd(fd.as_fd())) {
            return Err(format!("what came as the eventfds of a virtual machine are none; {OLDER}"));
        }
        for (kick, ring) in device.kicks.iter_mut().zip(&device.text.rings) {
            *kick = ring.has_kick.then(|| fds.next().expect("they were counted"));
        }
        for (interrupt, ring) in device.interrupts.iter_mut().zip(&device.text.rings) {
            interrupt.eventfd = ring.has_call.then(|| fds.next().expect("they were counted"));
        }
        device.text.rings.iter().for_each(|ring| device.memory.populate(ring.place, device.layout()));
        Ok(device)
    }

    /// Goes on where a predecessor stopped, whose last mark this is, and whose journal it has. Returns whether the
    /// predecessor had heard more than the description says, which the front end's socket still has, as `has_more` says: no
    /// frame moved since the description.
    ///
    /// # Errors
    /// The mark is of a later state than the description, or an answer may be missing, or a ring is broken.
    pub fn go_on(&mut self, marks: Option<&Marks>, has_more: impl FnOnce() -> bool) -> Result<bool, Refusal> {
        let version = marks.map(version_of);
        let heard_more = version.is_some_and(|version| is_later(version, self.text.version));
        let let_go = self.journal.as_ref().and_then(Journal::has_let_go);
        let has_all = let_go.is_some_and(|(version, _)| !is_later(version, self.text.version));
        // A front end that waits for an answer says nothing more.
        let is_asked = let_go.is_some_and(|(_, is_asked)| is_asked);
        if heard_more && !has_all || (heard_more || is_asked) && !has_more() {
            return Err(Refusal::Stale);
        }
        if self.text.rings.len() > self.room() {
            return Err(Refusal::Ring { ring: self.text.rings.len() as u64 - 1, rings: self.room() });
        }
        let marks = marks.filter(|_| heard_more || version == Some(self.text.version));
        self.leave_opened();
        if let Some(marks) = marks.filter(|_| heard_more) {
            // No number comes twice.
            self.follow(version_of(marks));
        }
        let has_protocol = self.has(feature::PROTOCOL_FEATURES);
        let can_note = self.can_note();
        for at in 0..self.text.rings.len() {
            let ring = &self.text.rings[at];
            let is_lent = self.lent >> (at / 2) & 1 == 1;
            if !ring.may_run(has_protocol) || !ring.is_described() || !can_note || is_lent {
                continue;
            }
            let done = marks.and_then(|marks| done_of(marks, at)).unwrap_or(ring.done);
            self.open_at(at, done)?;
        }
        self.count_pairs();
        Ok(heard_more)
    }

    /// Opens a ring where a predecessor was, or another worker. Shows again what it had completed.
    fn open_at(&mut self, at: usize, done: u16) -> Result<(), Refusal> {
        let mut queue = match self.layout() {
            Layout::Split => {
                let mut ring = self.split(at, Some(done))?;
                ring.show_again();
                Queue::Split(ring)
            }
            Layout::Packed => {
                let mut ring = self.packed(at, done)?;
                let noted = self.journal.as_ref().and_then(|journal| journal.noted(at, self.text.version));
                let noted = noted.unwrap_or_default();
                ring.show_again(noted.first, &noted.completions);
                Queue::Packed(ring)
            }
        };
        queue.set_log(self.text.rings[at].log);
        queue.note_used(&self.memory);
        self.queues[at] = Some(queue);
        Ok(())
    }

    /// Notes where the rings stand that a predecessor opened after this description: their front end's messages, which are in
    /// the socket, open them again.
    fn leave_opened(&self) {
        let Some(journal) = &self.journal else { return };
        // A page for each ring is much to look at while frames wait.
        if journal.opened_in().is_none_or(|version| !is_later(version, self.text.version)) {
            return;
        }
        for at in 0..self.room() {
            if let Some((Ran { version, stated, runs: true }, ring)) = journal.ran(at)
                && is_later(version, self.text.version)
                && let Some(position) = journal.opened_at(at)
            {
                journal.leave(at, Left { version: journal.noted_in(at).max(1), stated, position, ring });
            }
        }
    }
}

/// Returns the bits of pairs.
fn bits_of(pairs: Range<usize>) -> Pairs {
    pairs.fold(0, |bits, pair| bits | 1 << pair)
}

/// Returns whether a version is later than another.
fn is_later(version: u32, than: u32) -> bool {
    (1..1 << 31).contains(&version.wrapping_sub(than))
}

/// Returns the position of a ring's next completion, by the mark of its pair.
fn done_of(marks: &Marks, at: usize) -> Option<u16> {
    let shift = if at % 2 == TO_GUEST { 16 } else { 0 };
    Some(u16::try_from(marks.get(at / 2)? >> shift & 0xffff).expect("two bytes"))
}

/// Returns the version to which marks belong.
pub fn version_of(marks: &Marks) -> u32 {
    marks.first().map_or(0, |mark| u32::try_from(mark >> 32).expect("four bytes"))
}
