//! A memif client, written from the protocol's text and sharing nothing with the server: it has its own copy of
//! every number. It reads and writes its memory as a file, so it needs no mapping.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags,
    SocketType,
};

pub const ACK: u16 = 1;
pub const HELLO: u16 = 2;
pub const INIT: u16 = 3;
pub const ADD_REGION: u16 = 4;
pub const ADD_RING: u16 = 5;
pub const CONNECT: u16 = 6;
pub const CONNECTED: u16 = 7;
pub const DISCONNECT: u16 = 8;

/// Builds a message of 128 bytes: its type, and what follows.
pub fn message(kind: u16, parts: &[&[u8]]) -> Vec<u8> {
    let mut bytes = kind.to_le_bytes().to_vec();
    parts.iter().for_each(|part| bytes.extend_from_slice(part));
    bytes.resize(128, 0);
    bytes
}

pub fn init(version: u16, id: u32, mode: u8, secret: &str) -> Vec<u8> {
    let mut padded = [0; 24];
    padded[..secret.len()].copy_from_slice(secret.as_bytes());
    message(INIT, &[&version.to_le_bytes(), &id.to_le_bytes(), &[mode], &padded, b"a test's client"])
}

pub fn add_region(index: u16, size: u64) -> Vec<u8> {
    message(ADD_REGION, &[&index.to_le_bytes(), &size.to_le_bytes()])
}

/// Builds an ADD_RING message; `to_server`: the client sends in this ring.
pub fn add_ring(to_server: bool, index: u16, region: u16, offset: u32, log2: u8, private: u16) -> Vec<u8> {
    message(
        ADD_RING,
        &[
            &u16::from(to_server).to_le_bytes(),
            &index.to_le_bytes(),
            &region.to_le_bytes(),
            &offset.to_le_bytes(),
            &[log2],
            &private.to_le_bytes(),
        ],
    )
}

/// Makes memory for a client to hand over.
pub fn memory(len: u64, seals: SealFlags) -> OwnedFd {
    let memory = rustix::fs::memfd_create("client", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&memory, len).unwrap();
    rustix::fs::fcntl_add_seals(&memory, seals).unwrap();
    memory
}

pub fn eventfd() -> OwnedFd {
    rustix::event::eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap()
}

/// The control channel.
pub struct Channel(pub OwnedFd);

impl Drop for Channel {
    /// A process that another test starts just now has the socket open, too, until it runs its program.
    fn drop(&mut self) {
        let _ = rustix::net::shutdown(&self.0, rustix::net::Shutdown::Both);
    }
}

impl Channel {
    pub fn connect(path: &Path) -> Self {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        rustix::net::connect(&socket, &rustix::net::SocketAddrUnix::new(path).unwrap()).unwrap();
        Channel(socket)
    }

    pub fn send(&self, bytes: &[u8], with: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut beside = SendAncillaryBuffer::new(&mut space);
        assert!(with.is_empty() || beside.push(SendAncillaryMessage::ScmRights(with)));
        // If the server has sent the client away already, the client learns that from the next message it reads.
        let _ = rustix::net::sendmsg(&self.0, &[IoSlice::new(bytes)], &mut beside, SendFlags::NOSIGNAL);
    }

    /// Returns the next message, if there is one.
    pub fn hear(&self) -> Option<(u16, Vec<u8>)> {
        let mut bytes = [0; 256];
        let parts = &mut [IoSliceMut::new(&mut bytes)];
        let got = rustix::net::recvmsg(&self.0, parts, &mut RecvAncillaryBuffer::default(), RecvFlags::DONTWAIT);
        let len = got.ok()?.bytes;
        if len == 0 {
            return None;
        }
        assert_eq!(len, 128, "a message has 128 bytes");
        Some((u16::from_le_bytes([bytes[0], bytes[1]]), bytes[2..len].to_vec()))
    }

    /// Waits until the server has sent something, or has closed the channel.
    #[allow(dead_code, reason = "for servers that are other processes")]
    pub fn wait(&self, most: Duration) {
        let most = Timespec::try_from(most).expect("not for long");
        let mut poll = [PollFd::new(&self.0, PollFlags::IN)];
        let _ = rustix::event::poll(&mut poll, Some(&most));
    }

    /// Waits for the next message: gives the server some turns, or, if it is another process, time.
    fn answer(&self, turn: &mut impl FnMut()) -> Option<(u16, Vec<u8>)> {
        (0..1000).find_map(|_| {
            turn();
            let soon = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
            let _ = rustix::event::poll(&mut [PollFd::new(&self.0, PollFlags::IN)], Some(&soon));
            self.hear()
        })
    }

    /// Returns whether the server has closed its end.
    pub fn is_closed(&self) -> bool {
        let mut bytes = [0; 1];
        let peeked = rustix::net::recv(&self.0, &mut bytes[..], RecvFlags::DONTWAIT | RecvFlags::PEEK);
        peeked.is_ok_and(|(_, len)| len == 0)
    }

    /// Returns the server's reason for ending the connection, if it has ended it.
    pub fn reason(&self) -> Option<String> {
        while let Some((kind, body)) = self.hear() {
            if kind == DISCONNECT {
                let why = &body[4..100];
                let end = why.iter().position(|byte| *byte == 0).expect("a zero is at its end");
                return Some(String::from_utf8(why[..end].to_vec()).unwrap());
            }
        }
        None
    }
}

/// Sizes of a client's rings and buffers.
#[derive(Clone, Copy)]
pub struct Shape {
    pub log2: u8,
    /// Bytes per buffer.
    pub buffer: u32,
}

impl Shape {
    pub fn slots(self) -> u32 {
        1 << self.log2
    }

    fn ring_len(self) -> u32 {
        128 + 16 * self.slots()
    }

    /// Returns the offset of the ring to the server, or of the ring from it.
    pub fn ring_at(self, to_server: bool) -> u32 {
        if to_server { 0 } else { self.ring_len() }
    }

    pub fn buffer_at(self, to_server: bool, slot: u32) -> u32 {
        let first = if to_server { 0 } else { self.slots() };
        2 * self.ring_len() + (first + slot) * self.buffer
    }

    pub fn len(self) -> u64 {
        u64::from(self.buffer_at(false, self.slots()))
    }
}

/// A connected client.
pub struct Client {
    pub channel: Channel,
    pub shape: Shape,
    pub memory: OwnedFd,
    /// The bell that the client rings, and the one that rings for it.
    pub bells: [OwnedFd; 2],
    /// Positions in the ring to the server, and in the ring from it.
    sent: u16,
    came: u16,
}

impl Client {
    /// Does the handshake up to CONNECT, which it does not send; `turn` gives the server a turn.
    pub fn begin(path: &Path, shape: Shape, secret: &str, mut turn: impl FnMut()) -> Self {
        let channel = Channel::connect(path);
        let (kind, _) = channel.answer(&mut turn).expect("a greeting");
        assert_eq!(kind, HELLO);
        let client = Client {
            channel,
            shape,
            memory: memory(shape.len(), SealFlags::SHRINK),
            bells: [eventfd(), eventfd()],
            sent: 0,
            came: 0,
        };
        client.lay_out();
        client.ask(&init(0x0200, 0, 0, secret), &[], &mut turn);
        client.ask(&add_region(0, shape.len()), &[client.memory.as_fd()], &mut turn);
        for (to_server, bell) in [(true, &client.bells[0]), (false, &client.bells[1])] {
            client.ask(&add_ring(to_server, 0, 0, shape.ring_at(to_server), shape.log2, 0), &[bell.as_fd()], &mut turn);
        }
        client
    }

    /// Connects a client and posts its buffers.
    pub fn connect(path: &Path, shape: Shape, secret: &str, mut turn: impl FnMut()) -> Self {
        let client = Self::begin(path, shape, secret, &mut turn);
        client.channel.send(&message(CONNECT, &[b"test0"]), &[]);
        let (kind, _) = client.channel.answer(&mut turn).expect("an answer");
        assert_eq!(kind, CONNECTED);
        client.post(u16::try_from(shape.slots()).unwrap());
        client
    }

    fn ask(&self, message: &[u8], with: &[BorrowedFd<'_>], turn: &mut impl FnMut()) {
        self.channel.send(message, with);
        let answer = self.channel.answer(turn);
        assert!(matches!(answer, Some((ACK, _))), "not acknowledged: {answer:?}");
    }

    /// Writes the rings and their descriptors, as stock clients do before they connect.
    fn lay_out(&self) {
        for to_server in [true, false] {
            self.write(self.shape.ring_at(to_server), &0x03e3_1f20_u32.to_le_bytes());
            for slot in 0..self.shape.slots() {
                let (len, offset) = (self.shape.buffer, self.shape.buffer_at(to_server, slot));
                self.describe(to_server, slot, 0, 0, len, offset);
            }
        }
    }

    pub fn write(&self, at: u32, bytes: &[u8]) {
        assert_eq!(rustix::io::pwrite(&self.memory, bytes, at.into()), Ok(bytes.len()));
    }

    pub fn read(&self, at: u32, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        assert_eq!(rustix::io::pread(&self.memory, &mut bytes, at.into()), Ok(len));
        bytes
    }

    fn short(&self, at: u32) -> u16 {
        u16::from_le_bytes(self.read(at, 2).try_into().unwrap())
    }

    pub fn head(&self, to_server: bool) -> u16 {
        self.short(self.shape.ring_at(to_server) + 6)
    }

    pub fn set_head(&self, to_server: bool, head: u16) {
        self.write(self.shape.ring_at(to_server) + 6, &head.to_le_bytes());
    }

    pub fn tail(&self, to_server: bool) -> u16 {
        self.short(self.shape.ring_at(to_server) + 64)
    }

    pub fn flags(&self, to_server: bool) -> u16 {
        self.short(self.shape.ring_at(to_server) + 4)
    }

    pub fn set_flags(&self, to_server: bool, flags: u16) {
        self.write(self.shape.ring_at(to_server) + 4, &flags.to_le_bytes());
    }

    fn descriptor_at(&self, to_server: bool, slot: u32) -> u32 {
        self.shape.ring_at(to_server) + 128 + 16 * (slot % self.shape.slots())
    }

    /// Writes a descriptor.
    pub fn describe(&self, to_server: bool, slot: u32, flags: u16, region: u16, len: u32, offset: u32) {
        let at = self.descriptor_at(to_server, slot);
        let bytes = [&flags.to_le_bytes()[..], &region.to_le_bytes(), &len.to_le_bytes(), &offset.to_le_bytes()];
        self.write(at, &bytes.concat());
    }

    /// Posts `count` more buffers for received frames.
    pub fn post(&self, count: u16) {
        for i in 0..count {
            let slot = u32::from(self.head(false).wrapping_add(i)) % self.shape.slots();
            self.describe(false, slot, 0, 0, self.shape.buffer, self.shape.buffer_at(false, slot));
        }
        self.set_head(false, self.head(false).wrapping_add(count));
    }

    /// Sends a frame in as many buffers as it takes; returns false if the ring has no room.
    pub fn send(&mut self, frame: &[u8]) -> bool {
        let parts: Vec<_> = frame.chunks(self.shape.buffer as usize).collect();
        let used = u32::from(self.sent.wrapping_sub(self.tail(true)));
        if used + u32::try_from(parts.len()).unwrap() > self.shape.slots() {
            return false;
        }
        for (i, part) in (0_u32..).zip(&parts) {
            let slot = (u32::from(self.sent) + i) % self.shape.slots();
            let at = self.shape.buffer_at(true, slot);
            self.write(at, part);
            let goes_on = u16::from(i + 1 < u32::try_from(parts.len()).unwrap());
            self.describe(true, slot, goes_on, 0, u32::try_from(part.len()).unwrap(), at);
        }
        self.sent = self.sent.wrapping_add(u16::try_from(parts.len()).unwrap());
        self.set_head(true, self.sent);
        if self.flags(true) & 1 == 0 {
            let _ = rustix::io::write(&self.bells[0], &1_u64.to_ne_bytes());
        }
        true
    }

    /// Returns the received frames, and posts their buffers again.
    pub fn receive(&mut self) -> Vec<Vec<u8>> {
        let (mut frames, mut frame) = (Vec::new(), Vec::new());
        let tail = self.tail(false);
        let mut count = 0;
        while self.came != tail {
            let at = self.descriptor_at(false, self.came.into());
            let words = self.read(at, 16);
            let long = |at: usize| u32::from_le_bytes(words[at..at + 4].try_into().unwrap());
            assert_eq!(words[2..4], [0, 0], "the region is the one that was posted");
            assert_eq!(long(8), self.shape.buffer_at(false, u32::from(self.came) % self.shape.slots()));
            assert!(long(4) <= self.shape.buffer, "more than a buffer was filled");
            frame.extend(self.read(long(8), long(4) as usize));
            if words[0] & 1 == 0 {
                frames.push(std::mem::take(&mut frame));
            }
            self.came = self.came.wrapping_add(1);
            count += 1;
        }
        assert!(frame.is_empty(), "a chain is seen as a whole");
        self.post(count);
        frames
    }

    /// Returns whether the client's bell rang.
    pub fn was_rung(&self) -> bool {
        rustix::io::read(&self.bells[1], &mut [0; 8][..]).is_ok()
    }
}
