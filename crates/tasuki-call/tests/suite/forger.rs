//! Peers made by hand: they speak the call protocol byte by byte, and break it where a test wants them to.
//!
//! Nothing here comes from `tasuki_call`. This file writes down every number of docs/design/call.md a second
//! time, so that a mistake in the first cannot hide. `hostile` and the fuzz targets use it.
#![allow(dead_code, unused_imports, reason = "each user needs another part of it")]

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::SocketFlags;
use rustix::pipe::PipeFlags;
use tasuki_shm::region::{Pages, PeerRegion, Region, Span};
use tasuki_shm::sync::{AtomicU64, Relaxed};
use tasuki_testing::descriptors;
pub use tasuki_testing::descriptors::{listen, send};

pub const REQUEST_BYTES: u8 = 1;
pub const REQUEST_SLOT: u8 = 2;
pub const RETURN: u8 = 3;
pub const REPLY_BYTES: u8 = 4;
pub const REPLY_SLOT: u8 = 5;

/// Bytes in a slot of every arena made here.
pub const SLOT_LEN: u32 = 4096;

/// Offsets in a segment, in words.
pub const IDENTITY: usize = 0;
pub const VERDICT: usize = 1;
pub const BELL: usize = 2 * 8;
pub const HEAD: usize = 4 * 8;

/// `TASUKI`, zero, layout 1.
pub const SEGMENT_MAGIC: u64 = 0x5441_5355_4b49_0001;

/// The sizes of a connection: entries of both rings, slots of the client's arena and of the server's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    pub ring: u32,
    pub arena: u32,
    pub replies: u32,
}

/// Returns the number of words before the ring of a segment with `slots` slots: head lines and slot table, rounded
/// up to a whole page.
pub fn ring_at(slots: u32) -> usize {
    ((192 + slots.div_ceil(8) as usize) * 64).next_multiple_of(4096) / 8
}

fn segment_len(ring: u32, slots: u32) -> usize {
    ring_at(slots) * 8 + ring as usize * 64
}

/// Memory of ours, sealed as the protocol requires, in which we write what we like.
pub struct Memory {
    pub region: Region,
    pub words: Span<AtomicU64>,
}

impl Memory {
    pub fn new(len: usize) -> Self {
        let region = Region::create("forged", len, Pages::Small).unwrap();
        region.seal_writers().unwrap();
        let words = region.span(0, region.len() / 8).unwrap();
        Memory { region, words }
    }

    pub fn segment(ring: u32, slots: u32) -> Self {
        let memory = Memory::new(segment_len(ring, slots));
        memory.words[IDENTITY].store(SEGMENT_MAGIC, Relaxed);
        memory
    }
}

/// Returns a word of the peer's memory.
fn peek(region: &PeerRegion, word: usize) -> u64 {
    region.claims(word / 8 * 64, 1).unwrap().load(0, word % 8)
}

/// Writes a byte for `present`, then the value or zeroes.
fn option(out: &mut Vec<u8>, value: Option<&[u8]>, len: usize) {
    out.push(u8::from(value.is_some()));
    out.extend(value.map_or_else(|| vec![0; len], <[u8]>::to_vec));
}

pub fn hello(shape: Shape, first: u32, resumes: Option<u128>, enforced_base: Option<u64>) -> Vec<u8> {
    let mut out = packet(1);
    for number in [shape.ring, SLOT_LEN, shape.arena, SLOT_LEN, shape.replies, first] {
        out.extend(number.to_le_bytes());
    }
    option(&mut out, resumes.map(u128::to_le_bytes).as_ref().map(|bytes| &bytes[..]), 16);
    option(&mut out, enforced_base.map(u64::to_le_bytes).as_ref().map(|bytes| &bytes[..]), 8);
    out
}

pub fn welcome(shape: Shape, service: u128, generation: u32) -> Vec<u8> {
    let mut out = packet(3);
    out.extend(service.to_le_bytes());
    for number in [generation, shape.ring, SLOT_LEN, shape.replies] {
        out.extend(number.to_le_bytes());
    }
    out
}

/// Returns the first eight bytes of a packet.
pub fn packet(kind: u16) -> Vec<u8> {
    let mut out = b"TSK\0\x01\0".to_vec();
    out.extend(kind.to_le_bytes());
    out
}

/// Receives a packet and its descriptors. Returns no bytes if the peer has closed the socket.
pub fn receive(socket: BorrowedFd<'_>) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut bytes = [0; 512];
    let (len, fds) = descriptors::receive(socket, &mut bytes)?;
    Ok((bytes[..len].to_vec(), fds))
}

/// Returns a connected socket on which nothing was sent.
pub fn dial(path: &Path) -> OwnedFd {
    let socket = descriptors::connect(path);
    let limit = Some(Duration::from_secs(10));
    rustix::net::sockopt::set_socket_timeout(&socket, rustix::net::sockopt::Timeout::Recv, limit).unwrap();
    socket
}

pub fn accept(listener: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    Ok(rustix::net::accept_with(listener, SocketFlags::CLOEXEC)?)
}

/// The answer of a fake server to each client that it accepts.
#[derive(Debug, Clone, Copy)]
pub struct Manners {
    pub service: u128,
    pub generation: u32,
}

/// One end of a connection, a client's or a server's.
pub struct End {
    pub ours: Memory,
    pub our_arena: Memory,
    theirs: PeerRegion,
    pub their_arena: PeerRegion,
    our_ring: usize,
    their_ring: usize,
    capacity: u32,
    /// Descriptor to write to, to wake the peer.
    pub ring_end: OwnedFd,
    /// Descriptor on which the peer wakes us.
    pub sleep_end: OwnedFd,
    /// Service that the server claims.
    pub service: u128,
    /// Index of the next message that we push.
    pub tail: u32,
    /// Index of the next message that we pop.
    pub head: u32,
}

/// The first half of a client's handshake.
pub struct Caller {
    pub socket: OwnedFd,
    pub segment: Memory,
    pub arena: Memory,
    shape: Shape,
    first: u32,
}

impl Caller {
    /// Sends the Hello, and does not wait for an answer.
    pub fn hail(path: &Path, shape: Shape, first: u32, resumes: Option<u128>) -> Self {
        let caller = Caller {
            socket: dial(path),
            segment: Memory::segment(shape.ring, shape.arena),
            arena: Memory::new(shape.arena as usize * SLOT_LEN as usize),
            shape,
            first,
        };
        let fds = [caller.segment.region.as_fd(), caller.arena.region.as_fd()];
        send(caller.socket.as_fd(), &hello(shape, first, resumes, None), &fds).unwrap();
        caller
    }

    /// Takes the Welcome. Returns `None` if the server refused.
    pub fn settle(self) -> Option<End> {
        let (bytes, fds) = receive(self.socket.as_fd()).ok()?;
        if !bytes.starts_with(&packet(3)) {
            return None;
        }
        let [segment, replies, ring_end, sleep_end] = <[OwnedFd; 4]>::try_from(fds).ok()?;
        let Shape { ring, arena, replies: slots } = self.shape;
        Some(End {
            ours: self.segment,
            our_arena: self.arena,
            theirs: PeerRegion::map(segment.as_fd(), segment_len(ring, slots)).unwrap(),
            their_arena: PeerRegion::map(replies.as_fd(), slots as usize * SLOT_LEN as usize).unwrap(),
            our_ring: ring_at(arena),
            their_ring: ring_at(slots),
            capacity: ring,
            ring_end,
            sleep_end,
            service: u128::from_le_bytes(bytes.get(8..24)?.try_into().ok()?),
            tail: self.first,
            head: 0,
        })
    }
}

/// Reads the shape and the first index from a Hello. Returns `None` for other packets.
pub fn read_hello(bytes: &[u8]) -> Option<(Shape, u32)> {
    let body = bytes.strip_prefix(&packet(1)[..])?;
    let number = |i: usize| Some(u32::from_le_bytes(body.get(i * 4..i * 4 + 4)?.try_into().ok()?));
    Some((Shape { ring: number(0)?, arena: number(2)?, replies: number(4)? }, number(5)?))
}

/// Accepts and answers the next client at `listener` as a server would.
pub fn welcome_one(listener: BorrowedFd<'_>, manners: Manners) -> Option<End> {
    welcome_caller(&accept(listener).ok()?, manners)
}

/// Answers a client that was already accepted, as a server would.
pub fn welcome_caller(socket: &OwnedFd, manners: Manners) -> Option<End> {
    let (bytes, fds) = receive(socket.as_fd()).ok()?;
    let (shape, first) = read_hello(&bytes)?;
    let mut fds = fds.into_iter();
    let (segment, arena) = (fds.next()?, fds.next()?);
    let (their_sleep, ring_end) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).unwrap();
    let (sleep_end, their_ring_end) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).unwrap();
    let end = End {
        ours: Memory::segment(shape.ring, shape.replies),
        our_arena: Memory::new(shape.replies as usize * SLOT_LEN as usize),
        theirs: PeerRegion::map(segment.as_fd(), segment_len(shape.ring, shape.arena)).unwrap(),
        their_arena: PeerRegion::map(arena.as_fd(), shape.arena as usize * SLOT_LEN as usize).unwrap(),
        our_ring: ring_at(shape.replies),
        their_ring: ring_at(shape.arena),
        capacity: shape.ring,
        ring_end,
        sleep_end,
        service: manners.service,
        tail: 0,
        head: first,
    };
    end.say_head(first.into());
    let fds = [end.ours.region.as_fd(), end.our_arena.region.as_fd(), their_ring_end.as_fd(), their_sleep.as_fd()];
    send(socket.as_fd(), &welcome(shape, manners.service, manners.generation), &fds).ok()?;
    Some(end)
}

/// A message as it lies in a line: stamp, call id, and the rest.
pub type Entry = [u64; 8];

impl End {
    /// Returns the index, in our segment, of word `word` of the line of message `index`.
    pub fn place(&self, index: u32, word: usize) -> usize {
        self.our_ring + (index & (self.capacity - 1)) as usize * 8 + word
    }

    /// Returns the range of our ring's words.
    pub fn ring_words(&self) -> std::ops::Range<usize> {
        self.our_ring..self.our_ring + self.capacity as usize * 8
    }

    pub fn store(&self, word: usize, value: u64) {
        self.ours.words[word % self.ours.words.len()].store(value, Relaxed);
    }

    /// Pushes a message, whether there is room or not.
    pub fn push(&mut self, kind: u8, len: u8, code: u16, words: &[u64]) {
        let tag = u64::from(kind) | u64::from(len) << 8 | u64::from(code) << 16;
        self.push_stamped(tag << 32 | u64::from(self.tail), words);
    }

    pub fn push_stamped(&mut self, stamp: u64, words: &[u64]) {
        for (i, word) in words.iter().enumerate().take(7) {
            self.store(self.place(self.tail, i + 1), *word);
        }
        // A store in a Span is atomic, and x86 and Arm both keep stores behind a fence in order.
        tasuki_shm::sync::fence(tasuki_shm::sync::SeqCst);
        self.store(self.place(self.tail, 0), stamp);
        self.tail = self.tail.wrapping_add(1);
    }

    /// Returns the peer's next message, if there is one.
    pub fn pop(&mut self) -> Option<Entry> {
        let line = self.their_ring + (self.head & (self.capacity - 1)) as usize * 8;
        let stamp = peek(&self.theirs, line);
        if stamp >> 32 == 0 || stamp & 0xffff_ffff != u64::from(self.head) {
            return None;
        }
        tasuki_shm::sync::fence(tasuki_shm::sync::SeqCst);
        let entry = std::array::from_fn(|i| peek(&self.theirs, line + i));
        self.head = self.head.wrapping_add(1);
        self.say_head(self.head.into());
        Some(entry)
    }

    /// Claims that we have retired the messages before `head`.
    pub fn say_head(&self, head: u64) {
        self.store(HEAD, head);
    }

    /// Claims a bell state, 0 running, 1 spinning, 2 parked, with `naps` naps.
    pub fn say_state(&self, state: u8, naps: u32) {
        self.store(BELL, u64::from(naps) << 32 | 0xff_ffff << 8 | u64::from(state));
    }

    pub fn ring(&self) {
        let _ = rustix::io::write(&self.ring_end, &[1]);
    }

    /// Returns the server's verdict on us.
    pub fn verdict(&self) -> u64 {
        peek(&self.theirs, VERDICT)
    }

    /// Returns the head that the peer claims: the messages of ours that it has retired.
    pub fn their_head(&self) -> u64 {
        peek(&self.theirs, HEAD)
    }

    /// Waits up to `limit`. Returns whether the peer hangs up.
    pub fn hangs_up(&self, limit: Duration) -> bool {
        let until = Instant::now() + limit;
        loop {
            let mut fds = [PollFd::new(&self.sleep_end, PollFlags::empty())];
            let left = until.saturating_duration_since(Instant::now());
            let _ = poll(&mut fds, Some(&left.min(Duration::from_millis(50)).try_into().unwrap()));
            if fds[0].revents().contains(PollFlags::HUP) {
                return true;
            }
            if left.is_zero() {
                return false;
            }
        }
    }

    /// Waits up to `limit` for the peer's next message.
    pub fn wait_for_message(&mut self, limit: Duration) -> Option<Entry> {
        let until = Instant::now() + limit;
        loop {
            if let Some(entry) = self.pop() {
                return Some(entry);
            }
            if Instant::now() >= until {
                return None;
            }
            std::thread::yield_now();
        }
    }
}
