//! A machine with as many pairs of queues as there can be, whose front end is our own: from its last message of a set-up
//! until each of its rings has moved a frame, and from the kill of its worker until each has again.
//!
//! It sends a frame by each pair to a second machine, which sends all back: the flow of each is chosen so that it comes by
//! that pair, too. So all rings have been looked at when all frames are back, and the way to the second machine and back
//! is in the figures.

use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::event::EventfdFlags;
use rustix::fs::MemfdFlags;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use tasuki_net::endpoint::guest::device::{FROM_GUEST, PAIRS_MAX, TO_GUEST};
use tasuki_net::endpoint::guest::wire::{Head, Region, RingAddress, RingState, feature, flags, protocol, request};
use tasuki_shm::region::CommonRegion;
use zerocopy::{FromBytes, IntoBytes};

use super::machine::node;
use crate::interrupt::Interrupt;
use crate::program::PATIENCE;
use crate::relay::system::{System, now_ns};
use crate::report::Row;
use crate::sample::Sample;
use crate::workplace::Workplace;

/// Names of the cases.
pub const NAMES: [&str; 2] = ["guest-queues-start", "guest-queues-takeover"];

/// Bar of both, in ns.
const BAR: f64 = 5e6;

/// Names of the nodes, and of the first one's end.
const NODE: &str = "vm";
const END: &str = "vm@lan";
const OTHER: &str = "other";

/// Station addresses of both machines.
const MACS: [[u8; 6]; 2] = [[2, 0, 0, 0, 0, 0x77], [2, 0, 0, 0, 0, 0x78]];

/// Addresses at which the front end has the machine's memory, and the guest.
const USER: u64 = 0x7f00_0000_0000;
const GUEST: u64 = 0x4000_0000;

/// Number of descriptors of a ring; bytes of a buffer; bytes of the parts of a ring, and of a ring with its buffers.
const SIZE: u16 = 64;
const BUFFER: usize = 256;
const PART: usize = 4096;
const RING: usize = 3 * PART + SIZE as usize * BUFFER;

/// Length of the header before a frame.
const HEADER: usize = 12;
/// Length of a frame, and the place of its source port.
const FRAME: usize = 60;
const PORT: usize = 34;

const FEATURES: u64 = feature::VERSION_1 | feature::MRG_RXBUF | feature::MQ | feature::PROTOCOL_FEATURES;

/// A front end with its guest's driver.
struct Front {
    socket: UnixStream,
    region: CommonRegion,
    kicks: Vec<OwnedFd>,
    calls: Vec<OwnedFd>,
    /// Indices of the rings: what is available, and how far the used entries are read.
    available: Vec<u16>,
    used: Vec<u16>,
}

fn eventfd() -> Result<OwnedFd> {
    Ok(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

impl Front {
    /// Connects, with memory for so many pairs, and says all but what is about rings.
    fn connect(path: &Path, pairs: usize) -> Result<Self> {
        let len = 2 * pairs * RING;
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
        let front = Front { socket, region, kicks, calls, available: zeroes.clone(), used: zeroes };
        Ok(front)
    }

    /// Starts all rings as QEMU does, but for the last message. The driver has its buffers there already.
    fn describe_rings(&mut self) -> Result<()> {
        for ring in 0..self.kicks.len() {
            let index = u32::try_from(ring)?;
            let at = USER + (ring * RING) as u64;
            let [available, used] = [1, 2].map(|part| at + part * PART as u64);
            say(&self.socket, request::SET_VRING_NUM, RingState { index, number: SIZE.into() }.as_bytes(), None)?;
            say(&self.socket, request::SET_VRING_BASE, RingState { index, number: 0 }.as_bytes(), None)?;
            let address = RingAddress { index, flags: 0, descriptors: at, used, available, log: 0 };
            say(&self.socket, request::SET_VRING_ADDR, address.as_bytes(), None)?;
            let number = u64::from(index);
            say(&self.socket, request::SET_VRING_KICK, number.as_bytes(), Some(self.kicks[ring].as_fd()))?;
            say(&self.socket, request::SET_VRING_CALL, number.as_bytes(), Some(self.calls[ring].as_fd()))?;
        }
        (0..self.kicks.len() - 1).try_for_each(|ring| self.enable(ring))
    }

    fn enable(&self, ring: usize) -> Result<()> {
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
        let (base, index) = (ring * RING, self.available[ring]);
        let slot = usize::from(index % SIZE);
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
    fn is_used(&mut self, ring: usize) -> Result<bool> {
        let now = self.half(ring * RING + 2 * PART + 2)?;
        fence(Ordering::Acquire);
        let is_used = now != self.used[ring];
        self.used[ring] = self.used[ring].wrapping_add(u16::from(is_used));
        Ok(is_used)
    }

    /// Returns the next frame that came by a pair, and gives its buffer back.
    fn receive(&mut self, pair: usize) -> Result<Option<[u8; FRAME]>> {
        let ring = 2 * pair + TO_GUEST;
        let at = ring * RING + 3 * PART + usize::from(self.used[ring] % SIZE) * BUFFER + HEADER;
        if !self.is_used(ring)? {
            return Ok(None);
        }
        let mut frame = [0; FRAME];
        self.region.copy_to(at, &mut frame)?;
        self.offer(ring, None)?;
        Ok(Some(frame))
    }

    /// Sends a frame by a pair. The driver kicks if it is asked to.
    fn send(&mut self, pair: usize, frame: &[u8; FRAME]) -> Result<()> {
        let ring = 2 * pair + FROM_GUEST;
        self.offer(ring, Some(&[&[0; HEADER][..], frame].concat()))?;
        fence(Ordering::SeqCst);
        if self.half(ring * RING + 2 * PART)? & 1 == 0 {
            rustix::io::write(&self.kicks[ring], &1_u64.to_ne_bytes())?;
        }
        Ok(())
    }

    /// Returns whether the back end has hung up.
    fn is_hung_up(&self) -> Result<bool> {
        let mut bytes = [0; 1];
        let got = rustix::net::recv(&self.socket, &mut bytes, rustix::net::RecvFlags::DONTWAIT);
        Ok(got != Err(rustix::io::Errno::AGAIN))
    }

    fn post_all(&mut self) -> Result<()> {
        let rings = (0..self.kicks.len()).filter(|ring| ring % 2 == TO_GUEST);
        rings.flat_map(|ring| (0..SIZE).map(move |_| ring)).try_for_each(|ring| self.offer(ring, None))
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
fn frame(port: u16) -> [u8; FRAME] {
    let mut frame = [0; FRAME];
    frame[..6].copy_from_slice(&MACS[1]);
    frame[6..12].copy_from_slice(&MACS[0]);
    let ip = [8, 0, 0x45, 0, 0, 46, 0, 0, 0, 0, 64, 17, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2];
    frame[12..PORT].copy_from_slice(&ip);
    frame[PORT..PORT + 2].copy_from_slice(&port.to_be_bytes());
    frame
}

/// Both machines.
struct Pair {
    front: Front,
    other: Front,
    /// What the second machine got and has not sent back.
    held: Vec<[u8; FRAME]>,
    /// Source port of the frame that goes by each pair.
    ports: Vec<u16>,
}

impl Pair {
    /// Sends back what the second machine got, once that is `count` frames: by then all pairs run, among which a flow chooses.
    fn answer(&mut self, count: usize) -> Result<()> {
        while let Some(mut frame) = self.other.receive(0)? {
            let (to, from) = frame[..12].split_at_mut(6);
            to.swap_with_slice(from);
            self.held.push(frame);
        }
        if self.held.len() >= count {
            std::mem::take(&mut self.held).iter().try_for_each(|frame| self.other.send(0, frame))?;
        }
        Ok(())
    }

    /// Starts the first machine anew. A frame waits in each ring by which it sends. Returns the time of the last message.
    fn start(&mut self, socket: &Path) -> Result<Instant> {
        self.front.socket.shutdown(std::net::Shutdown::Both)?;
        self.front = Front::connect(socket, PAIRS_MAX)?;
        self.front.post_all()?;
        self.send_all()?;
        self.front.describe_rings()?;
        let last = Instant::now();
        self.front.enable(self.front.kicks.len() - 1)?;
        Ok(last)
    }

    fn send_all(&mut self) -> Result<()> {
        (0..PAIRS_MAX).try_for_each(|pair| self.front.send(pair, &frame(self.ports[pair])))
    }

    /// Returns the next frame that came back, and the pair by which it came.
    fn next(&mut self) -> Result<Option<(usize, [u8; FRAME])>> {
        for pair in 0..PAIRS_MAX {
            if let Some(frame) = self.front.receive(pair)? {
                return Ok(Some((pair, frame)));
            }
        }
        Ok(None)
    }

    /// Waits until each ring has moved a frame.
    fn await_all(&mut self, interrupt: &Interrupt) -> Result<()> {
        let mut left: Vec<usize> = (0..self.front.kicks.len()).collect();
        let began = Instant::now();
        while !left.is_empty() {
            self.answer(PAIRS_MAX)?;
            let mut still = Vec::new();
            for ring in left {
                let moved = if ring % 2 == TO_GUEST {
                    self.front.receive(ring / 2)?.is_some()
                } else {
                    self.front.is_used(ring)?
                };
                if !moved {
                    still.push(ring);
                }
            }
            left = still;
            // A front end that only looks would take one of two CPUs from those that serve it.
            std::thread::yield_now();
            interrupt.check()?;
            ensure!(began.elapsed() < PATIENCE, "rings {left:?} are not served");
        }
        Ok(())
    }

    /// Finds for each pair a flow whose frames come back by it. The machine has just started.
    fn find_ports(&mut self, interrupt: &Interrupt) -> Result<()> {
        let began = Instant::now();
        let mut came = 0;
        while came < PAIRS_MAX {
            interrupt.check()?;
            ensure!(began.elapsed() < PATIENCE, "{came} of {PAIRS_MAX} frames come back");
            self.answer(PAIRS_MAX)?;
            came += usize::from(self.next()?.is_some());
        }
        for pair in 0..PAIRS_MAX {
            while !self.front.is_used(2 * pair + FROM_GUEST)? {}
        }
        let mut ports = [None; PAIRS_MAX];
        for port in 1_u16.. {
            self.front.send(0, &frame(port))?;
            let by = loop {
                interrupt.check()?;
                ensure!(
                    began.elapsed() < PATIENCE,
                    "a frame does not come back, or no flow comes by some of the pairs"
                );
                self.answer(1)?;
                if let Some((pair, frame)) = self.next()? {
                    ensure!(frame[PORT..PORT + 2] == port.to_be_bytes(), "another frame came back");
                    break pair;
                }
            };
            while !self.front.is_used(FROM_GUEST)? {}
            ports[by].get_or_insert(port);
            if let Some(all) = ports.iter().copied().collect() {
                self.ports = all;
                break;
            }
        }
        Ok(())
    }
}

/// Waits until the stand-by has heard of the machine, and all are asleep.
fn await_quiet(system: &System) -> Result<()> {
    system.await_pair(NODE)?;
    std::thread::sleep(Duration::from_millis(100));
    Ok(())
}

/// Measures, and makes the rows.
pub fn rows(is_quick: bool, interrupt: &Interrupt) -> Result<Vec<Row>> {
    let place = Workplace::new()?;
    let [socket, others] = [NODE, OTHER].map(|name| place.directory().join(format!("{name}.sock")));
    let system = System::configured(place.directory(), &(node(NODE, &socket) + &node(OTHER, &others)))?;
    system.await_pair(NODE)?;
    system.await_pair(OTHER)?;
    let mut other = Front::connect(&others, 1)?;
    other.post_all()?;
    other.describe_rings()?;
    other.enable(1)?;
    let ports = (0..PAIRS_MAX).map(u16::try_from).collect::<Result<_, _>>()?;
    let mut pair = Pair { front: Front::connect(&socket, PAIRS_MAX)?, other, held: Vec::new(), ports };
    pair.start(&socket)?;
    pair.find_ports(interrupt)?;
    let [mut starts, mut takeovers] = std::array::from_fn(|_| Sample::new());
    for _ in 0..if is_quick { 10 } else { 200 } {
        interrupt.check()?;
        await_quiet(&system)?;
        let last = pair.start(&socket)?;
        pair.await_all(interrupt)?;
        starts.record(last.elapsed());
        await_quiet(&system)?;
        let at = system.kill(END)?;
        pair.send_all()?;
        pair.await_all(interrupt)?;
        takeovers.record(Duration::from_nanos(now_ns().saturating_sub(at)));
        ensure!(!pair.front.is_hung_up()?, "the front end was sent away: {}", system.log("sent away"));
    }
    let mut rows = Vec::new();
    for (name, sample) in NAMES.into_iter().zip([starts, takeovers]) {
        let sample = sample.summary();
        for (metric, value) in [("p50", sample.p50), ("p99", sample.p99), ("worst", sample.max)] {
            rows.push(Row::lower(name, metric, "ns", value as f64).bar_at(BAR));
        }
    }
    let note = "64 rings: from the last message of the set-up, or from the kill, until each has moved a frame";
    rows.first_mut().context("there are cases")?.note = Some(note.to_owned());
    Ok(rows)
}
