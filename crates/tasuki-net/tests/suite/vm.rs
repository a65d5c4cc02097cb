//! A virtual machine: the front end and its guest's driver, written from the specifications of vhost-user and VIRTIO and
//! sharing nothing with the back end. It reads and writes its memory as a file, so it needs no mapping.

#[path = "vm/packed.rs"]
pub mod packed;

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::EventfdFlags;
use rustix::fs::MemfdFlags;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags,
    SocketType,
};

pub const CSUM: u64 = 1;
pub const GUEST_CSUM: u64 = 2;
pub const GUEST_TSO4: u64 = 1 << 7;
pub const MRG_RXBUF: u64 = 1 << 15;
/// A feature of vhost: the back end notes the pages that it writes.
pub const LOG_ALL: u64 = 1 << 26;
pub const INDIRECT: u64 = 1 << 28;
pub const EVENT_IDX: u64 = 1 << 29;
pub const PROTOCOL: u64 = 1 << 30;
pub const VERSION_1: u64 = 1 << 32;
pub const PACKED: u64 = 1 << 34;
pub const IN_ORDER: u64 = 1 << 35;

/// Addresses of the machine's memory: of the guest, and of the front end.
pub const GUEST: u64 = 0x4000_0000;
pub const USER: u64 = 0x7f00_0000_0000;
pub const LEN: u64 = 16 << 20;

/// Bytes of a buffer for received frames, and of one for frames to send.
const RECEIVE_LEN: u64 = 2048;
const SEND_LEN: u64 = 16 << 10;

/// Places in the memory: descriptors, available ring, used ring of the first two queues; their buffers.
const RINGS: [[u64; 3]; 2] = [[0, 0x2000, 0x4000], [0x8000, 0xa000, 0xc000]];
const BUFFERS: [u64; 2] = [0x10_0000, 0x40_0000];

/// Places of a further pair: from where they are, and where the buffers are from there. Memory of [`LEN`] bytes has room for
/// one.
const PAIR_AT: u64 = 0xa0_0000;
const PAIR_LEN: u64 = 0x60_0000;
const PAIR_BUFFERS: [u64; 2] = [0x2_0000, 0x10_0000];

fn ring(queue: usize) -> [u64; 3] {
    RINGS[queue % 2].map(|at| at + pair_at(queue))
}

fn buffers(queue: usize) -> u64 {
    if queue < 2 { BUFFERS[queue] } else { pair_at(queue) + PAIR_BUFFERS[queue % 2] }
}

fn pair_at(queue: usize) -> u64 {
    (queue as u64 / 2).checked_sub(1).map_or(0, |pair| PAIR_AT + PAIR_LEN * pair)
}

/// Returns the bytes of memory of a machine with so many queues.
fn len_for(queues: usize) -> u64 {
    LEN.max(pair_at(queues))
}

/// Returns where the indirect table of a buffer of the sending queue is.
fn table_of(buffer: u16) -> u64 {
    TABLES + 1024 * u64::from(buffer)
}

/// Returns an entry of a packed ring's indirect table: the id in it counts for nothing (2.8.7).
fn packed_entry((address, len, flags): &packed::Descriptor) -> Vec<u8> {
    [&address.to_le_bytes()[..], &len.to_le_bytes(), &0xbad_u16.to_le_bytes(), &flags.to_le_bytes()].concat()
}

impl packed::Memory for Machine {
    fn put(&self, at: u64, bytes: &[u8]) {
        self.write(at, bytes);
    }

    fn get(&self, at: u64) -> u16 {
        self.half(at)
    }
}

/// Longer than any answer takes, even on a busy machine.
const PATIENCE: Duration = Duration::from_secs(10);

/// Indirect tables of the sending queue, one for each buffer.
const TABLES: u64 = 0x8_0000;

pub const RECEIVE: usize = 0;
pub const SEND: usize = 1;

/// A guest and its front end.
pub struct Machine {
    pub socket: OwnedFd,
    pub memory: OwnedFd,
    pub kicks: Vec<OwnedFd>,
    pub calls: Vec<OwnedFd>,
    pub features: u64,
    pub size: u16,
    /// Indices of the available rings, and how far the used rings are read.
    available: Vec<u16>,
    used: Vec<u16>,
    /// In place of those, if the rings are packed, and the buffers that the sending ones have free.
    packed: Vec<packed::Driver>,
    free: Vec<Vec<u16>>,
    /// Whether the driver sends with indirect tables, in pieces of this many bytes.
    pub pieces: Option<usize>,
    /// Pages that guest and front end have written since the log began, counted from the first.
    written: RefCell<BTreeSet<u64>>,
}

pub fn memory(len: u64) -> OwnedFd {
    let memory = rustix::fs::memfd_create("machine", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&memory, len).unwrap();
    memory
}

pub fn eventfd() -> OwnedFd {
    rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

pub fn connect(path: &Path) -> OwnedFd {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
    rustix::net::connect(&socket, &rustix::net::SocketAddrUnix::new(path).unwrap()).unwrap();
    socket
}

/// Builds a message.
pub fn message(request: u32, flags: u32, body: &[u8]) -> Vec<u8> {
    let len = u32::try_from(body.len()).unwrap();
    [&request.to_ne_bytes()[..], &(flags | 1).to_ne_bytes(), &len.to_ne_bytes(), body].concat()
}

pub fn send(socket: &OwnedFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
    let mut beside = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        beside.push(SendAncillaryMessage::ScmRights(fds));
    }
    rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut beside, SendFlags::NOSIGNAL).is_ok()
}

/// Reads an answer, if there is one: its request and its body.
pub fn answer(socket: &OwnedFd) -> Option<(u32, Vec<u8>)> {
    let mut bytes = [0; 512];
    let mut beside = RecvAncillaryBuffer::default();
    let got =
        rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut beside, RecvFlags::DONTWAIT).ok()?;
    (got.bytes >= 12).then(|| (u32::from_ne_bytes(bytes[..4].try_into().unwrap()), bytes[12..got.bytes].to_vec()))
}

pub fn state(index: u32, number: u32) -> [u8; 8] {
    [index.to_ne_bytes(), number.to_ne_bytes()].concat().try_into().unwrap()
}

/// Builds the body of SET_MEM_TABLE.
pub fn table(regions: &[[u64; 4]]) -> Vec<u8> {
    let count = u64::try_from(regions.len()).unwrap();
    let words = regions.iter().flatten().flat_map(|word| word.to_ne_bytes());
    count.to_ne_bytes().into_iter().chain(words).collect()
}

/// The index that a front end says for a split ring which its back end left.
#[derive(Debug, Clone, Copy)]
pub enum Says {
    /// QEMU.
    Used,
    /// Cloud Hypervisor.
    Available,
    /// DPDK.
    Zero,
}

impl Says {
    /// Returns one of them, each for every third number.
    pub fn nth(number: usize) -> Self {
        [Says::Used, Says::Available, Says::Zero][number % 3]
    }
}

impl Machine {
    /// Connects and starts its device; `turn` gives the back end a turn.
    pub fn start(path: &Path, features: u64, size: u16, turn: impl FnMut()) -> Self {
        Self::start_with(path, features, size, 1, turn)
    }

    /// Like [`start`](Self::start), with so many pairs of queues.
    pub fn start_with(path: &Path, features: u64, size: u16, pairs: usize, mut turn: impl FnMut()) -> Self {
        Self::start_in_order(path, features, size, 0..2 * pairs, &mut turn)
    }

    /// Like [`start`](Self::start), with all these queues, which it starts in this order.
    pub fn start_in_order(
        path: &Path,
        features: u64,
        size: u16,
        order: impl ExactSizeIterator<Item = usize>,
        turn: &mut impl FnMut(),
    ) -> Self {
        let mut machine = Self::connect(path, features, size, turn);
        let queues = order.len();
        machine.memory = memory(len_for(queues));
        (machine.kicks, machine.calls) =
            ((0..queues).map(|_| eventfd()).collect(), (0..queues).map(|_| eventfd()).collect());
        (machine.available, machine.used) = (vec![0; queues], vec![0; queues]);
        machine.start_packed(queues);
        machine.share();
        let begin = machine.start_of_ring();
        for queue in order {
            machine.start_queue(queue, begin);
            // A turn for each message: a socket has no room for those of all queues.
            (0..30).for_each(|_| turn());
        }
        for queue in (0..queues).step_by(2) {
            (0..size).for_each(|at| machine.post(queue, at));
        }
        for _ in 0..4 {
            turn();
        }
        machine
    }

    /// Starts its driver anew, with new rings in the same places, of which no back end is told.
    pub fn start_anew(&mut self) {
        let queues = self.kicks.len();
        (self.available, self.used) = (vec![0; queues], vec![0; queues]);
        (self.packed, self.free) = (Vec::new(), Vec::new());
        for queue in 0..queues {
            let [descriptors, _, used] = ring(queue);
            let end = used + 8 * u64::from(self.size) + 6;
            self.write(descriptors, &vec![0; usize::try_from(end - descriptors).unwrap()]);
        }
        self.start_packed(queues);
        for queue in (0..queues).step_by(2) {
            (0..self.size).for_each(|at| self.post(queue, at));
        }
    }

    /// Asks, and returns the number that is the answer.
    pub fn ask(&self, request: u32, body: &[u8], turn: &mut impl FnMut()) -> u64 {
        assert!(send(&self.socket, &message(request, 0, body), &[]));
        let until = Instant::now() + PATIENCE;
        while Instant::now() < until {
            turn();
            if let Some((answered, body)) = answer(&self.socket) {
                assert_eq!(answered, request);
                return u64::from_ne_bytes(body.try_into().unwrap());
            }
        }
        panic!("no answer to request {request}");
    }

    fn say(&self, request: u32, body: &[u8], fds: &[BorrowedFd<'_>]) {
        // One that was sent away may find out later.
        let _ = send(&self.socket, &message(request, 0, body), fds);
    }

    /// Connects, and says nothing.
    pub fn silent(path: &Path, features: u64, size: u16) -> Self {
        Machine {
            socket: connect(path),
            memory: memory(LEN),
            kicks: vec![eventfd(), eventfd()],
            calls: vec![eventfd(), eventfd()],
            features,
            size,
            available: vec![0; 2],
            used: vec![0; 2],
            packed: Vec::new(),
            free: Vec::new(),
            pieces: None,
            written: RefCell::default(),
        }
    }

    /// Returns whether its rings are packed.
    pub fn is_packed(&self) -> bool {
        self.features & PACKED != 0
    }

    /// Returns the position at which a ring begins.
    pub fn start_of_ring(&self) -> u16 {
        if self.is_packed() { 0x8000 } else { 0 }
    }

    fn start_packed(&mut self, queues: usize) {
        if !self.is_packed() {
            return;
        }
        for queue in 0..queues {
            let mut driver = packed::Driver::new(ring(queue), self.size, self.start_of_ring());
            driver.has_event_index = self.features & EVENT_IDX != 0;
            driver.is_in_order = self.features & IN_ORDER != 0;
            self.packed.push(driver);
            self.free.push((0..self.size).collect());
        }
    }

    /// Connects and asks for features, as a machine does to which another is to migrate.
    pub fn connect(path: &Path, features: u64, size: u16, turn: &mut impl FnMut()) -> Self {
        let machine = Self::silent(path, features, size);
        machine.say(3, &[], &[]);
        let offered = machine.ask(1, &[], turn);
        assert_eq!(offered & features, features, "{offered:#x}");
        if features & PROTOCOL != 0 {
            let offered = machine.ask(15, &[], turn);
            machine.say(16, &offered.to_ne_bytes(), &[]);
        }
        machine
    }

    /// Connects anew, as a front end does whose back end has left. For a split ring it says this index; of a packed one QEMU
    /// knows where it stood when the last connection began, or when the ring was stopped.
    pub fn connect_again(&mut self, path: &Path, says: Says, turn: &mut impl FnMut()) {
        let bases = [RECEIVE, SEND].map(|queue| match says {
            _ if self.is_packed() => self.start_of_ring(),
            Says::Used => self.completed(queue),
            Says::Available => self.available[queue],
            Says::Zero => 0,
        });
        self.connect_again_at(path, bases, turn);
    }

    /// Connects anew, and starts its device with these indices.
    pub fn connect_again_at(&mut self, path: &Path, bases: [u16; 2], turn: &mut impl FnMut()) {
        self.socket = connect(path);
        self.say(3, &[], &[]);
        self.ask(1, &[], turn);
        if self.features & PROTOCOL != 0 {
            let offered = self.ask(15, &[], turn);
            self.say(16, &offered.to_ne_bytes(), &[]);
        }
        self.begin(bases, turn);
    }

    /// Starts its device, whose rings begin with these indices.
    pub fn begin(&self, bases: impl AsRef<[u16]>, turn: &mut impl FnMut()) {
        self.share();
        bases.as_ref().iter().enumerate().for_each(|(queue, base)| self.start_queue(queue, *base));
        // A turn for each message.
        (0..30 * bases.as_ref().len()).for_each(|_| turn());
    }

    /// Says which features it takes, and shares its memory.
    fn share(&self) {
        self.say(2, &self.features.to_ne_bytes(), &[]);
        self.say(5, &table(&[[GUEST, len_for(self.kicks.len()), USER, 0]]), &[self.memory.as_fd()]);
    }

    /// Starts a queue, which begins with this index.
    pub fn start_queue(&self, queue: usize, base: u16) {
        let index = u32::try_from(queue).unwrap();
        self.say(8, &state(index, self.size.into()), &[]);
        let used = if self.is_packed() { u32::from(base) << 16 } else { 0 };
        self.say(10, &state(index, used | u32::from(base)), &[]);
        self.place(index, false);
        self.say(13, &u64::from(index).to_ne_bytes(), &[self.calls[queue].as_fd()]);
        self.say(12, &u64::from(index).to_ne_bytes(), &[self.kicks[queue].as_fd()]);
        if self.features & PROTOCOL != 0 {
            self.say(18, &state(index, 1), &[]);
        }
    }

    /// Says where a ring lies, and whether writes to its used ring are noted.
    fn place(&self, index: u32, is_noted: bool) {
        let [descriptors, available, used] = ring(index as usize);
        let words = [USER + descriptors, USER + used, USER + available, GUEST + used];
        let address: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        self.say(9, &[&state(index, is_noted.into())[..], &address].concat(), &[]);
    }

    /// Has the back end note the pages that it writes, in a log of `len` bytes, as QEMU does when a migration begins.
    pub fn log(&self, len: u64, turn: &mut impl FnMut()) -> OwnedFd {
        let log = memory(len);
        self.say(6, &[len.to_ne_bytes(), 0_u64.to_ne_bytes()].concat(), &[log.as_fd()]);
        let until = Instant::now() + PATIENCE;
        while answer(&self.socket).is_none() {
            assert!(Instant::now() < until, "no answer to a log");
            turn();
        }
        self.say(2, &(self.features | LOG_ALL).to_ne_bytes(), &[]);
        (0..).zip(&self.kicks).for_each(|(index, _)| self.place(index, true));
        (0..5).for_each(|_| turn());
        // All is copied once from here on.
        self.written.borrow_mut().clear();
        log
    }

    /// Returns the pages that guest and front end have written since the log began, and those in the log of the back end.
    pub fn pages(&self, log: &OwnedFd) -> BTreeSet<u64> {
        let bytes = rustix::fs::fstat(log).unwrap().st_size.unsigned_abs();
        let mut bits = vec![0; usize::try_from(bytes).unwrap()];
        assert_eq!(rustix::io::pread(log, &mut bits, 0), Ok(bits.len()));
        let noted = (0..8 * bytes).filter(|page| bits[usize::try_from(page / 8).unwrap()] & 1 << (page % 8) != 0);
        noted.map(|page| page - GUEST / 4096).chain(self.written.borrow().iter().copied()).collect()
    }

    /// Stops the rings of the first pair. Returns the position of the next chain of each.
    pub fn stop(&self, turn: &mut impl FnMut()) -> [u16; 2] {
        self.stop_pairs(1, turn).try_into().expect("two rings")
    }

    /// Like [`stop`](Self::stop), for so many pairs.
    pub fn stop_pairs(&self, pairs: u32, turn: &mut impl FnMut()) -> Vec<u16> {
        if self.features & PROTOCOL != 0 {
            // As QEMU 7.2 does, and later ones do not.
            self.say(39, &0_u64.to_ne_bytes(), &[]);
        }
        let stop = |index| {
            let answer = self.ask(11, &state(index, 0), turn) >> 32;
            let base = u16::try_from(answer & 0xffff).unwrap();
            assert_eq!(answer >> 16, if self.is_packed() { base.into() } else { 0 }, "all that was taken is completed");
            base
        };
        (0..2 * pairs).map(stop).collect()
    }

    /// Copies these pages of another machine's memory, and what its driver knows.
    pub fn copy(&mut self, from: &Machine, pages: impl IntoIterator<Item = u64>) {
        pages.into_iter().for_each(|page| self.write(4096 * page, &from.read(4096 * page, 4096)));
        (self.available, self.used, self.pieces) = (from.available.clone(), from.used.clone(), from.pieces);
        (self.packed, self.free) = (from.packed.clone(), from.free.clone());
    }

    pub fn write(&self, at: u64, bytes: &[u8]) {
        assert_eq!(rustix::io::pwrite(&self.memory, bytes, at), Ok(bytes.len()));
        self.written.borrow_mut().extend(at / 4096..(at + bytes.len() as u64).div_ceil(4096));
    }

    pub fn read(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        assert_eq!(rustix::io::pread(&self.memory, &mut bytes, at), Ok(len));
        bytes
    }

    pub fn half(&self, at: u64) -> u16 {
        u16::from_le_bytes(self.read(at, 2).try_into().unwrap())
    }

    fn word(&self, at: u64) -> u32 {
        u32::from_le_bytes(self.read(at, 4).try_into().unwrap())
    }

    /// Writes a descriptor into a table.
    pub fn describe(&self, table: u64, at: u16, address: u64, len: usize, flags: u16, next: u16) {
        let len = u32::try_from(len).unwrap();
        let bytes =
            [&address.to_le_bytes()[..], &len.to_le_bytes(), &flags.to_le_bytes(), &next.to_le_bytes()].concat();
        self.write(table + 16 * u64::from(at), &bytes);
    }

    /// Makes a chain available.
    pub fn offer(&mut self, queue: usize, head: u16) {
        let [_, ring, used] = ring(queue);
        let at = self.available[queue];
        self.write(ring + 4 + 2 * u64::from(at % self.size), &head.to_le_bytes());
        self.available[queue] = at.wrapping_add(1);
        self.write(ring + 2, &self.available[queue].to_le_bytes());
        let wants = if self.features & EVENT_IDX != 0 {
            self.half(used + 4 + 8 * u64::from(self.size)) == at
        } else {
            self.half(used) & 1 == 0
        };
        self.kick(queue, wants);
    }

    fn kick(&self, queue: usize, wants: bool) {
        if wants {
            rustix::io::write(&self.kicks[queue], &1_u64.to_ne_bytes()).unwrap();
        }
    }

    /// Makes a chain available in a packed ring.
    pub fn offer_packed(&mut self, queue: usize, id: u16, chain: &[packed::Descriptor]) {
        let mut driver = self.packed[queue].clone();
        let wants = driver.offer(self, id, chain);
        self.packed[queue] = driver;
        self.kick(queue, wants);
    }

    /// Returns the next used descriptor of a packed ring.
    fn reclaim(&mut self, queue: usize) -> Option<(Vec<u16>, u32)> {
        let mut driver = self.packed[queue].clone();
        let came = driver.reclaim(self);
        self.packed[queue] = driver;
        came
    }

    /// Asks for interrupts, or for none.
    pub fn want_interrupts(&self, queue: usize, yes: bool) {
        if self.is_packed() {
            self.packed[queue].want_interrupt(self, None, yes);
        } else {
            self.write(ring(queue)[1], &u16::from(!yes).to_le_bytes());
        }
    }

    /// Posts a buffer for a received frame.
    fn post(&mut self, queue: usize, buffer: u16) {
        let address = GUEST + buffers(queue) + RECEIVE_LEN * u64::from(buffer);
        if self.is_packed() {
            return self.offer_packed(queue, buffer, &[(address, RECEIVE_LEN.try_into().unwrap(), 2)]);
        }
        self.describe(ring(queue)[0], buffer, address, RECEIVE_LEN.try_into().unwrap(), 2, 0);
        self.offer(queue, buffer);
    }

    fn header_len(&self) -> usize {
        if self.features & (VERSION_1 | MRG_RXBUF) != 0 { 12 } else { 10 }
    }

    /// Sends a frame. Returns false if the queue is full.
    pub fn send(&mut self, frame: &[u8]) -> bool {
        self.send_with(&vec![0; self.header_len()], frame)
    }

    /// Sends a frame with this header.
    pub fn send_with(&mut self, header: &[u8], frame: &[u8]) -> bool {
        self.send_by(SEND, header, frame)
    }

    /// Sends a frame by a pair of queues.
    pub fn send_by_pair(&mut self, pair: usize, frame: &[u8]) -> bool {
        self.send_by(2 * pair + SEND, &vec![0; self.header_len()], frame)
    }

    fn send_by(&mut self, queue: usize, header: &[u8], frame: &[u8]) -> bool {
        if self.is_packed() {
            return self.send_packed(queue, &[header, frame].concat());
        }
        let used = self.half(ring(queue)[2] + 2);
        if self.available[queue].wrapping_sub(used) >= self.size {
            return false;
        }
        let at = self.available[queue] % self.size;
        let bytes = [header, frame].concat();
        let place = buffers(queue) + SEND_LEN * u64::from(at);
        self.write(place, &bytes);
        match self.pieces {
            None => self.describe(ring(queue)[0], at, GUEST + place, bytes.len(), 0, 0),
            Some(len) => {
                let table = table_of(at);
                let count = bytes.len().div_ceil(len);
                for (i, piece) in (0_u16..).zip(bytes.chunks(len)) {
                    let next = usize::from(i) + 1 < count;
                    let address = GUEST + place + (usize::from(i) * len) as u64;
                    self.describe(table, i, address, piece.len(), u16::from(next), if next { i + 1 } else { 0 });
                }
                self.describe(ring(queue)[0], at, GUEST + table, 16 * count, 4, 0);
            }
        }
        self.offer(queue, at);
        true
    }

    /// Sends by a packed ring: in one descriptor or in pieces, with a table for them or each in the ring.
    fn send_packed(&mut self, queue: usize, bytes: &[u8]) -> bool {
        while let Some((ids, _)) = self.reclaim(queue) {
            self.free[queue].extend(ids);
        }
        let pieces = self.pieces.unwrap_or(bytes.len());
        let is_table = self.pieces.is_some() && self.features & INDIRECT != 0;
        let need = if is_table { 1 } else { bytes.len().div_ceil(pieces) };
        let Some(&id) = self.free[queue].first().filter(|_| usize::from(self.packed[queue].free) >= need) else {
            return false;
        };
        // Those that have lain longest come first, so that ids and places in the ring drift apart.
        self.free[queue].remove(0);
        let place = buffers(queue) + SEND_LEN * u64::from(id);
        self.write(place, bytes);
        let mut chain = Vec::new();
        let mut address = GUEST + place;
        for piece in bytes.chunks(pieces) {
            chain.push((address, u32::try_from(piece.len()).unwrap(), 0));
            address += piece.len() as u64;
        }
        if is_table {
            let entries: Vec<u8> = chain.iter().flat_map(packed_entry).collect();
            self.write(table_of(id), &entries);
            chain = vec![(GUEST + table_of(id), u32::try_from(entries.len()).unwrap(), 4)];
        }
        self.offer_packed(queue, id, &chain);
        true
    }

    /// Returns the number of chains that the back end has completed, of a packed ring those that the driver has not seen.
    pub fn completed(&self, queue: usize) -> u16 {
        if self.is_packed() {
            let mut driver = self.packed[queue].clone();
            let seen = std::iter::from_fn(|| driver.reclaim(self));
            return seen.map(|(ids, _)| u16::try_from(ids.len()).unwrap()).sum();
        }
        self.half(ring(queue)[2] + 2)
    }

    /// Returns the position of the next completion.
    pub fn position(&self, queue: usize) -> u16 {
        if self.is_packed() {
            let mut driver = self.packed[queue].clone();
            while driver.reclaim(self).is_some() {}
            return driver.used.word();
        }
        self.completed(queue)
    }

    /// Returns the next buffer that holds a received frame or a part of it, and the number of its bytes.
    fn next_received(&mut self, queue: usize) -> Option<(u16, usize)> {
        if self.is_packed() {
            let (ids, len) = self.reclaim(queue)?;
            assert_eq!(ids.len(), 1, "each buffer has its length");
            return Some((ids[0], len as usize));
        }
        if self.used[queue] == self.completed(queue) {
            return None;
        }
        let at = ring(queue)[2] + 4 + 8 * u64::from(self.used[queue] % self.size);
        self.used[queue] = self.used[queue].wrapping_add(1);
        Some((u16::try_from(self.word(at)).unwrap(), self.word(at + 4) as usize))
    }

    /// Reads all received frames, each with its header.
    pub fn receive_with_headers(&mut self) -> Vec<(Vec<u8>, Vec<u8>)> {
        self.receive_by(RECEIVE)
    }

    /// Reads all frames received by a pair of queues.
    pub fn receive_by_pair(&mut self, pair: usize) -> Vec<Vec<u8>> {
        self.receive_by(2 * pair + RECEIVE).into_iter().map(|(_, frame)| frame).collect()
    }

    fn receive_by(&mut self, queue: usize) -> Vec<(Vec<u8>, Vec<u8>)> {
        let header = self.header_len();
        let mut frames = Vec::new();
        while let Some(mut part) = self.next_received(queue) {
            let (mut bytes, mut left) = (Vec::new(), None);
            loop {
                let (buffer, len) = part;
                bytes.extend(self.read(buffers(queue) + RECEIVE_LEN * u64::from(buffer), len));
                let more =
                    left.unwrap_or(if header == 12 { u16::from_le_bytes([bytes[10], bytes[11]]) } else { 1 }) - 1;
                self.post(queue, buffer);
                if more == 0 {
                    break;
                }
                left = Some(more);
                part = self.next_received(queue).expect("all buffers of a frame come at once");
            }
            let frame = bytes.split_off(header);
            frames.push((bytes, frame));
        }
        frames
    }

    /// Reads all received frames.
    pub fn receive(&mut self) -> Vec<Vec<u8>> {
        self.receive_with_headers().into_iter().map(|(_, frame)| frame).collect()
    }

    /// Returns whether the back end has interrupted the guest for this queue since the last call.
    pub fn was_rung(&self, queue: usize) -> bool {
        rustix::io::read(&self.calls[queue], &mut [0; 8]).is_ok()
    }

    /// Returns whether the back end has hung up.
    pub fn is_hung_up(&self) -> bool {
        rustix::io::read(&self.socket, &mut [0; 1]) == Ok(0)
    }
}
