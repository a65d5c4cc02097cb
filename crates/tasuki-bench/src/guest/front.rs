//! A front end of our own with its guest's driver, by split rings: it says when it sends, and asks for each interrupt.

use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicU16, Ordering, fence};

use anyhow::{Context, Result, ensure};
use rustix::event::EventfdFlags;
use rustix::fs::MemfdFlags;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use tasuki_net::endpoint::guest::device::{FROM_GUEST, TO_GUEST};
use tasuki_net::endpoint::guest::wire::{Head, Region, RingAddress, RingState, feature, flags, protocol, request};
use tasuki_shm::region::{CommonRegion, Span};
use zerocopy::{FromBytes, IntoBytes};

use crate::program::PATIENCE;

/// Addresses at which the front end has the machine's memory, and the guest.
const USER: u64 = 0x7f00_0000_0000;
const GUEST: u64 = 0x4000_0000;

/// Bytes of each of the three parts of a ring: 1,024 descriptors at most.
const PART: usize = 16 << 10;

/// Length of the header before a frame.
const HEADER: usize = 12;
/// Length of the shortest frame; the places of a frame's source port, and of bytes that nobody reads on the way.
pub const FRAME: usize = 60;
pub const PORT: usize = 34;
pub const PAYLOAD: usize = 42;

/// Station addresses of the machines that send and receive.
pub const MACS: [[u8; 6]; 2] = [[2, 0, 0, 0, 0, 0x77], [2, 0, 0, 0, 0, 0x78]];

const FEATURES: u64 = feature::VERSION_1 | feature::MRG_RXBUF | feature::MQ | feature::MTU | feature::PROTOCOL_FEATURES;

/// MTU of the cards: that of jumbo frames.
const MTU: u64 = 9000;

/// A front end with its guest's driver.
pub struct Front {
    pub socket: UnixStream,
    region: CommonRegion,
    /// Number of descriptors of each ring, and bytes of each buffer.
    size: u16,
    buffer: usize,
    kicks: Vec<OwnedFd>,
    calls: Vec<OwnedFd>,
    /// Number of kicks.
    pub kicked: u64,
    /// Flags and index of each ring's available part, and of its used part.
    heads: Vec<[Span<AtomicU16>; 2]>,
    /// Indices of the rings: what is available, and how far the used entries are read.
    available: Vec<u16>,
    used: Vec<u16>,
}

fn eventfd() -> Result<OwnedFd> {
    Ok(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

impl Front {
    /// Connects, with memory for so many pairs of rings of `size` descriptors with a buffer of `buffer` bytes each, and says
    /// all but what is about rings.
    pub fn connect(path: &Path, pairs: usize, size: u16, buffer: usize) -> Result<Self> {
        let ring_len = 3 * PART + usize::from(size) * buffer;
        let len = 2 * pairs * ring_len;
        let memory = rustix::fs::memfd_create("bench-machine", MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&memory, len as u64)?;
        let region = CommonRegion::map_guarded(memory.as_fd(), len)?;
        region.populate(0, len);
        let mut socket = UnixStream::connect(path).context("the node's socket is not there")?;
        socket.set_read_timeout(Some(PATIENCE))?;
        let (kicks, calls) = (0..2 * pairs).map(|_| Ok((eventfd()?, eventfd()?))).collect::<Result<_>>()?;
        let head = |ring: usize, part: usize| region.span(ring * ring_len + part * PART, 2);
        let heads = (0..2 * pairs).map(|ring| Ok([head(ring, 1)?, head(ring, 2)?])).collect::<Result<_>>()?;
        let zeroes = vec![0; 2 * pairs];
        say(&socket, request::SET_OWNER, &[], None)?;
        ensure!(ask(&mut socket, request::GET_FEATURES)? & FEATURES == FEATURES, "a feature is not offered");
        say(&socket, request::SET_FEATURES, FEATURES.as_bytes(), None)?;
        let (offered, taken) = (ask(&mut socket, request::GET_PROTOCOL_FEATURES)?, protocol::MQ | protocol::NET_MTU);
        say(&socket, request::SET_PROTOCOL_FEATURES, (offered & taken).as_bytes(), None)?;
        say(&socket, request::NET_SET_MTU, MTU.as_bytes(), None)?;
        ensure!(ask(&mut socket, request::GET_QUEUE_NUM)? >= pairs as u64, "the back end has fewer queues");
        let table = Region { guest: GUEST, len: len as u64, user: USER, offset: 0 };
        let table = [&1_u64.to_ne_bytes()[..], table.as_bytes()].concat();
        say(&socket, request::SET_MEM_TABLE, &table, Some(memory.as_fd()))?;
        let (available, used) = (zeroes.clone(), zeroes);
        Ok(Front { socket, region, size, buffer, kicks, calls, kicked: 0, heads, available, used })
    }

    /// Returns the place of a ring in the memory.
    fn place(&self, ring: usize) -> usize {
        ring * (3 * PART + usize::from(self.size) * self.buffer)
    }

    /// Returns the place of a buffer in the memory.
    fn buffer(&self, ring: usize, slot: usize) -> usize {
        self.place(ring) + 3 * PART + slot * self.buffer
    }

    /// Returns the slot of the ring's next buffer, and that of the next one to be used.
    fn slots(&self, ring: usize) -> (usize, usize) {
        let slot = |index: u16| usize::from(index % self.size);
        (slot(self.available[ring]), slot(self.used[ring]))
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

    /// Describes a buffer of the ring, with these bytes in it, or to be written.
    fn describe(&self, ring: usize, slot: usize, bytes: Option<&[u8]>) -> Result<()> {
        let (base, buffer) = (self.place(ring), self.buffer(ring, slot));
        bytes.map_or(Ok(()), |bytes| self.put(buffer, bytes))?;
        let (len, flags) = bytes.map_or((self.buffer, 2_u16), |bytes| (bytes.len(), 0));
        let (address, len) = (GUEST + buffer as u64, u32::try_from(len)?);
        let words = [&address.to_le_bytes()[..], &len.to_le_bytes(), &flags.to_le_bytes(), &[0; 2]].concat();
        self.put(base + 16 * slot, &words)?;
        self.put(base + PART + 4 + 2 * slot, &u16::try_from(slot)?.to_le_bytes())
    }

    /// Makes the ring's next `count` buffers available, which have been described. The driver kicks if it is asked to.
    fn publish(&mut self, ring: usize, count: u16) -> Result<()> {
        self.available[ring] = self.available[ring].wrapping_add(count);
        self.heads[ring][0][1].store(self.available[ring].to_le(), Ordering::Release);
        fence(Ordering::SeqCst);
        if u16::from_le(self.heads[ring][1][0].load(Ordering::Relaxed)) & 1 == 0 {
            rustix::io::write(&self.kicks[ring], &1_u64.to_ne_bytes())?;
            self.kicked += u64::from(ring % 2 == FROM_GUEST);
        }
        Ok(())
    }

    /// Returns the number of buffers of the ring that the back end has used and that were not seen.
    pub fn unseen(&self, ring: usize) -> u16 {
        u16::from_le(self.heads[ring][1][1].load(Ordering::Acquire)).wrapping_sub(self.used[ring])
    }

    /// Counts used buffers of the ring as seen.
    pub fn see(&mut self, ring: usize, count: u16) {
        self.used[ring] = self.used[ring].wrapping_add(count);
    }

    /// Returns whether the back end has used a buffer of the ring, and counts it as seen.
    pub fn is_used(&mut self, ring: usize) -> bool {
        let is_used = self.unseen(ring) > 0;
        self.see(ring, u16::from(is_used));
        is_used
    }

    /// Returns the next frame that came by a pair, and gives its buffer back.
    pub fn receive(&mut self, pair: usize) -> Result<Option<[u8; FRAME]>> {
        let ring = 2 * pair + TO_GUEST;
        let at = self.buffer(ring, self.slots(ring).1) + HEADER;
        if !self.is_used(ring) {
            return Ok(None);
        }
        let mut frame = [0; FRAME];
        self.region.copy_to(at, &mut frame)?;
        self.publish(ring, 1)?;
        Ok(Some(frame))
    }

    /// Sends a frame by a pair.
    pub fn send(&mut self, pair: usize, frame: &[u8]) -> Result<()> {
        let ring = 2 * pair + FROM_GUEST;
        self.describe(ring, self.slots(ring).0, Some(&[&[0; HEADER][..], frame].concat()))?;
        self.send_written(pair, 1)
    }

    /// Writes a frame into each buffer by which a pair sends: `frame` makes the n-th to be sent.
    pub fn write(&mut self, pair: usize, frame: impl Fn(u16) -> Vec<u8>) -> Result<()> {
        let ring = 2 * pair + FROM_GUEST;
        ensure!(self.room(ring) == self.size, "frames that were sent are still in the ring");
        let next = self.slots(ring).0;
        (0..self.size).try_for_each(|number| {
            let slot = (next + usize::from(number)) % usize::from(self.size);
            self.describe(ring, slot, Some(&[&[0; HEADER][..], &frame(number)].concat()))
        })
    }

    /// Sends the frames of a pair's next `count` buffers as they are.
    pub fn send_written(&mut self, pair: usize, count: u16) -> Result<()> {
        self.publish(2 * pair + FROM_GUEST, count)
    }

    /// Returns length and source port of each frame that came by a pair and was not seen, and gives the buffers back.
    pub fn receive_all(&mut self, pair: usize, mut see: impl FnMut(usize, u16)) -> Result<u16> {
        let ring = 2 * pair + TO_GUEST;
        let count = self.unseen(ring);
        for _ in 0..count {
            let slot = self.slots(ring).1;
            let mut len = [0; 4];
            self.region.copy_to(self.place(ring) + 2 * PART + 4 + 8 * slot + 4, &mut len)?;
            let port = self.buffer(ring, slot) + HEADER + PORT;
            let mut bytes = [0; 2];
            self.region.copy_to(port, &mut bytes)?;
            see(usize::try_from(u32::from_le_bytes(len))?.saturating_sub(HEADER), u16::from_be_bytes(bytes));
            self.see(ring, 1);
        }
        if count > 0 {
            self.publish(ring, count)?;
        }
        Ok(count)
    }

    /// Returns whether the back end has hung up.
    pub fn is_hung_up(&self) -> Result<bool> {
        let mut bytes = [0; 1];
        let got = rustix::net::recv(&self.socket, &mut bytes, rustix::net::RecvFlags::DONTWAIT);
        Ok(got != Err(rustix::io::Errno::AGAIN))
    }

    pub fn post_all(&mut self) -> Result<()> {
        let rings = (0..self.kicks.len()).filter(|ring| ring % 2 == TO_GUEST);
        rings.into_iter().try_for_each(|ring| {
            (0..self.size).try_for_each(|slot| self.describe(ring, slot.into(), None))?;
            self.publish(ring, self.size)
        })
    }

    /// Returns the number of further buffers for which the ring has room.
    pub fn room(&self, ring: usize) -> u16 {
        self.size - self.available[ring].wrapping_sub(self.used[ring])
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

/// Returns a short frame of UDP over IPv4 from this source port.
pub fn frame(port: u16) -> [u8; FRAME] {
    let mut frame = [0; FRAME];
    frame[..6].copy_from_slice(&MACS[1]);
    frame[6..12].copy_from_slice(&MACS[0]);
    let ip = [8, 0, 0x45, 0, 0, 46, 0, 0, 0, 0, 64, 17, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2];
    frame[12..PORT].copy_from_slice(&ip);
    frame[PORT..PORT + 2].copy_from_slice(&port.to_be_bytes());
    frame
}

/// Returns such a frame of this many bytes.
pub fn frame_of(port: u16, len: usize) -> Vec<u8> {
    let mut frame = frame(port).to_vec();
    frame.resize(len, 0);
    let ip = u16::try_from(len - 14).expect("a frame is shorter");
    frame[16..18].copy_from_slice(&ip.to_be_bytes());
    frame
}

/// Has a frame go back.
pub fn turn(frame: &mut [u8]) {
    let (to, from) = frame[..12].split_at_mut(6);
    to.swap_with_slice(from);
}
