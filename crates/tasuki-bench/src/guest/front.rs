//! A front end of our own with its guest's driver, by split rings: it says when it sends, and asks for each interrupt.

use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{Ordering, fence};

use anyhow::{Context, Result, ensure};
use rustix::event::EventfdFlags;
use rustix::fs::MemfdFlags;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use tasuki_net::endpoint::guest::device::{FROM_GUEST, TO_GUEST};
use tasuki_net::endpoint::guest::wire::{Head, Region, RingAddress, RingState, feature, flags, protocol, request};
use tasuki_shm::region::CommonRegion;
use zerocopy::{FromBytes, IntoBytes};

use crate::program::PATIENCE;

/// Addresses at which the front end has the machine's memory, and the guest.
const USER: u64 = 0x7f00_0000_0000;
const GUEST: u64 = 0x4000_0000;

/// Bytes of a buffer, and of each of the three parts of a ring: 256 descriptors at most.
const BUFFER: usize = 256;
const PART: usize = 4096;

/// Length of the header before a frame.
const HEADER: usize = 12;
/// Length of a frame; the places of its source port, and of bytes that nobody reads on the way.
pub const FRAME: usize = 60;
pub const PORT: usize = 34;
pub const PAYLOAD: usize = 42;

/// Station addresses of the machines that send and receive.
pub const MACS: [[u8; 6]; 2] = [[2, 0, 0, 0, 0, 0x77], [2, 0, 0, 0, 0, 0x78]];

const FEATURES: u64 = feature::VERSION_1 | feature::MRG_RXBUF | feature::MQ | feature::PROTOCOL_FEATURES;

/// A front end with its guest's driver.
pub struct Front {
    pub socket: UnixStream,
    region: CommonRegion,
    /// Number of descriptors of each ring.
    size: u16,
    kicks: Vec<OwnedFd>,
    calls: Vec<OwnedFd>,
    /// Number of kicks.
    pub kicked: u64,
    /// Indices of the rings: what is available, and how far the used entries are read.
    available: Vec<u16>,
    used: Vec<u16>,
}

fn eventfd() -> Result<OwnedFd> {
    Ok(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

impl Front {
    /// Connects, with memory for so many pairs of rings of `size` descriptors, and says all but what is about rings.
    pub fn connect(path: &Path, pairs: usize, size: u16) -> Result<Self> {
        let len = 2 * pairs * (3 * PART + usize::from(size) * BUFFER);
        let memory = rustix::fs::memfd_create("bench-machine", MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&memory, len as u64)?;
        let region = CommonRegion::map_guarded(memory.as_fd(), len)?;
        region.populate(0, len);
        let mut socket = UnixStream::connect(path).context("the node's socket is not there")?;
        socket.set_read_timeout(Some(PATIENCE))?;
        let (kicks, calls) = (0..2 * pairs).map(|_| Ok((eventfd()?, eventfd()?))).collect::<Result<_>>()?;
        let zeroes = vec![0; 2 * pairs];
        say(&socket, request::SET_OWNER, &[], None)?;
        ensure!(ask(&mut socket, request::GET_FEATURES)? & FEATURES == FEATURES, "a feature is not offered");
        say(&socket, request::SET_FEATURES, FEATURES.as_bytes(), None)?;
        let offered = ask(&mut socket, request::GET_PROTOCOL_FEATURES)?;
        say(&socket, request::SET_PROTOCOL_FEATURES, (offered & protocol::MQ).as_bytes(), None)?;
        ensure!(ask(&mut socket, request::GET_QUEUE_NUM)? >= pairs as u64, "the back end has fewer queues");
        let stretch = Region { guest: GUEST, len: len as u64, user: USER, offset: 0 };
        let table = [&1_u64.to_ne_bytes()[..], stretch.as_bytes()].concat();
        say(&socket, request::SET_MEM_TABLE, &table, Some(memory.as_fd()))?;
        Ok(Front { socket, region, size, kicks, calls, kicked: 0, available: zeroes.clone(), used: zeroes })
    }

    /// Returns the place of a ring in the memory.
    fn place(&self, ring: usize) -> usize {
        ring * (3 * PART + usize::from(self.size) * BUFFER)
    }

    /// Returns the number of rings.
    pub fn rings(&self) -> usize {
        self.kicks.len()
    }

    /// Starts all rings as QEMU does, but for the last message. The driver has its buffers there already.
    pub fn describe_rings(&mut self) -> Result<()> {
        for ring in 0..self.kicks.len() {
            let index = u32::try_from(ring)?;
            let at = USER + self.place(ring) as u64;
            let [available, used] = [1, 2].map(|part| at + part * PART as u64);
            say(&self.socket, request::SET_VRING_NUM, RingState { index, number: self.size.into() }.as_bytes(), None)?;
            say(&self.socket, request::SET_VRING_BASE, RingState { index, number: 0 }.as_bytes(), None)?;
            let address = RingAddress { index, flags: 0, descriptors: at, used, available, log: 0 };
            say(&self.socket, request::SET_VRING_ADDR, address.as_bytes(), None)?;
            let number = u64::from(index);
            say(&self.socket, request::SET_VRING_KICK, number.as_bytes(), Some(self.kicks[ring].as_fd()))?;
            say(&self.socket, request::SET_VRING_CALL, number.as_bytes(), Some(self.calls[ring].as_fd()))?;
        }
        (0..self.kicks.len() - 1).try_for_each(|ring| self.enable(ring))
    }

    pub fn enable(&self, ring: usize) -> Result<()> {
        let state = RingState { index: u32::try_from(ring)?, number: 1 };
        say(&self.socket, request::SET_VRING_ENABLE, state.as_bytes(), None)
    }

    fn put(&self, at: usize, bytes: &[u8]) -> Result<()> {
        Ok(self.region.copy_from(at, bytes)?)
    }

    fn half(&self, at: usize) -> Result<u16> {
        let mut bytes = [0; 2];
        self.region.copy_to(at, &mut bytes)?;
        Ok(u16::from_le_bytes(bytes))
    }

    /// Makes the ring's next buffer available, with these bytes in it, or to be written.
    fn offer(&mut self, ring: usize, bytes: Option<&[u8]>) -> Result<()> {
        let (base, index) = (self.place(ring), self.available[ring]);
        let slot = usize::from(index % self.size);
        let buffer = base + 3 * PART + slot * BUFFER;
        bytes.map_or(Ok(()), |bytes| self.put(buffer, bytes))?;
        let (len, flags) = bytes.map_or((BUFFER, 2_u16), |bytes| (bytes.len(), 0));
        let (address, len) = (GUEST + buffer as u64, u32::try_from(len)?);
        let words = [&address.to_le_bytes()[..], &len.to_le_bytes(), &flags.to_le_bytes(), &[0; 2]].concat();
        self.put(base + 16 * slot, &words)?;
        self.put(base + PART + 4 + 2 * slot, &u16::try_from(slot)?.to_le_bytes())?;
        fence(Ordering::Release);
        self.available[ring] = index.wrapping_add(1);
        self.put(base + PART + 2, &self.available[ring].to_le_bytes())
    }

    /// Returns whether the back end has used a buffer of the ring, and counts it as seen.
    pub fn is_used(&mut self, ring: usize) -> Result<bool> {
        let now = self.half(self.place(ring) + 2 * PART + 2)?;
        fence(Ordering::Acquire);
        let is_used = now != self.used[ring];
        self.used[ring] = self.used[ring].wrapping_add(u16::from(is_used));
        Ok(is_used)
    }

    /// Returns the next frame that came by a pair, and gives its buffer back.
    pub fn receive(&mut self, pair: usize) -> Result<Option<[u8; FRAME]>> {
        let ring = 2 * pair + TO_GUEST;
        let at = self.place(ring) + 3 * PART + usize::from(self.used[ring] % self.size) * BUFFER + HEADER;
        if !self.is_used(ring)? {
            return Ok(None);
        }
        let mut frame = [0; FRAME];
        self.region.copy_to(at, &mut frame)?;
        self.offer(ring, None)?;
        Ok(Some(frame))
    }

    /// Sends a frame by a pair. The driver kicks if it is asked to.
    pub fn send(&mut self, pair: usize, frame: &[u8; FRAME]) -> Result<()> {
        let ring = 2 * pair + FROM_GUEST;
        self.offer(ring, Some(&[&[0; HEADER][..], frame].concat()))?;
        fence(Ordering::SeqCst);
        if self.half(self.place(ring) + 2 * PART)? & 1 == 0 {
            rustix::io::write(&self.kicks[ring], &1_u64.to_ne_bytes())?;
            self.kicked += 1;
        }
        Ok(())
    }

    /// Returns whether the back end has hung up.
    pub fn is_hung_up(&self) -> Result<bool> {
        let mut bytes = [0; 1];
        let got = rustix::net::recv(&self.socket, &mut bytes, rustix::net::RecvFlags::DONTWAIT);
        Ok(got != Err(rustix::io::Errno::AGAIN))
    }

    pub fn post_all(&mut self) -> Result<()> {
        let size = self.size;
        let rings = (0..self.kicks.len()).filter(|ring| ring % 2 == TO_GUEST);
        rings.flat_map(|ring| (0..size).map(move |_| ring)).try_for_each(|ring| self.offer(ring, None))
    }

    /// Returns whether the ring has room for a further buffer.
    pub fn has_room(&self, ring: usize) -> bool {
        self.available[ring].wrapping_sub(self.used[ring]) < self.size
    }

    /// Returns how often the driver was interrupted for a ring since the last call.
    pub fn interrupts(&self, ring: usize) -> u64 {
        let mut count = [0; 8];
        rustix::io::read(&self.calls[ring], &mut count).map_or(0, |_| u64::from_ne_bytes(count))
    }
}

fn say(socket: &UnixStream, request: u32, body: &[u8], fd: Option<BorrowedFd<'_>>) -> Result<()> {
    let head = Head { request, flags: flags::VERSION, len: u32::try_from(body.len())? };
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut beside = SendAncillaryBuffer::new(&mut space);
    let fds = fd.as_slice();
    if !fds.is_empty() {
        beside.push(SendAncillaryMessage::ScmRights(fds));
    }
    let bytes = [head.as_bytes(), body].concat();
    let sent = rustix::net::sendmsg(socket, &[IoSlice::new(&bytes)], &mut beside, SendFlags::NOSIGNAL)?;
    ensure!(sent == bytes.len(), "a message went in part");
    Ok(())
}

/// Asks for a number.
fn ask(socket: &mut UnixStream, request: u32) -> Result<u64> {
    say(socket, request, &[], None)?;
    let mut bytes = [0; size_of::<Head>() + 8];
    socket.read_exact(&mut bytes).context("the back end does not answer")?;
    let (_, number) = Head::read_from_prefix(&bytes).ok().context("an answer has a head")?;
    u64::read_from_bytes(number).ok().context("and a number")
}

/// Returns a frame of UDP over IPv4 from this source port.
pub fn frame(port: u16) -> [u8; FRAME] {
    let mut frame = [0; FRAME];
    frame[..6].copy_from_slice(&MACS[1]);
    frame[6..12].copy_from_slice(&MACS[0]);
    let ip = [8, 0, 0x45, 0, 0, 46, 0, 0, 0, 0, 64, 17, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2];
    frame[12..PORT].copy_from_slice(&ip);
    frame[PORT..PORT + 2].copy_from_slice(&port.to_be_bytes());
    frame
}
