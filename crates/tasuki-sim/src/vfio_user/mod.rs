//! Serves a device to a driver in another process, by the vfio-user protocol.
//!
//! [`Server`] never blocks: its owner polls the server's descriptor, or calls [`turn`](Server::turn) in a loop
//! beside the device's own work. Each turn does the work that is there. The server has one client at a time; others
//! wait until that client is gone. The device then keeps its state, but loses the client's memory and interrupts.
//!
//! The client is not trusted: the server refuses a command that makes no sense, and closes the connection if the
//! rest of the stream can no longer be parsed.
//!
//! A driver on `tasuki_net`'s vfio-user client does two jobs of a kernel: it sets the MSI-X enable bit in the
//! configuration space, and writes 0 to the vector control of each vector it uses, in the BAR that the capability
//! names.

mod memory;
mod wire;

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use tasuki_shm::wake::is_eventfd;

pub use memory::{Dma, DmaFault, DmaMemory, Rights};
pub use wire::Breach;
use wire::{Ask, FDS_MAX, HEADER, Header, MESSAGE_MAX, TRANSFER_MAX};

/// Regions of a PCI device, as `<linux/vfio.h>` numbers them: BARs 0 to 5, the expansion ROM, the configuration space, VGA.
pub const REGIONS: u32 = 9;
/// Index of the configuration space.
pub const CONFIG: u32 = 7;
/// Number of interrupt kinds: INTx, MSI, MSI-X, errors, requests to release the device.
pub const IRQS: u32 = 5;
/// Index of INTx.
pub const INTX: u32 = 0;
/// Index of MSI-X.
pub const MSIX: u32 = 2;

/// Most memory windows that a client may map for a device.
const WINDOWS_MAX: usize = 64;
/// Most commands per turn, so that the device gets its turn as well.
const TURN_MAX: u32 = 256;

/// A region of a device.
#[derive(Debug, Clone, Copy, Default)]
pub struct Region<'a> {
    /// Length in bytes; 0 if the region does not exist.
    pub len: u64,
    /// Memory behind the region, if a client may map it.
    pub memory: Option<BorrowedFd<'a>>,
    /// Parts that a client may map, as offset and length in whole pages. Empty: all of the region.
    pub areas: &'a [(u64, u64)],
}

/// Registers of four bytes that a client may write by storing to shared memory, which the device polls.
#[derive(Debug, Clone, Copy)]
pub struct Doorbells<'a> {
    /// The shared memory: a sealed memfd of small pages.
    pub memory: BorrowedFd<'a>,
    /// For each register, its offset in the region and the offset of its word in the memory.
    pub places: &'a [(u64, u64)],
}

/// A device to serve. Accesses lie inside their region; a device cannot refuse one, as on a real bus.
pub trait Device {
    /// Returns the properties of region `index`.
    fn region(&self, index: u32) -> Region<'_>;

    /// Returns the registers of region `index` that a client can write without a message.
    ///
    /// Before each message the device reads the doorbells, so that earlier stores take effect first. After the
    /// message it stores the registers' new values there. A client stores to a doorbell only once all its messages
    /// are answered.
    ///
    /// Each call returns new memory: stores to older memory have no effect.
    fn doorbells(&mut self, _index: u32) -> Option<Doorbells<'_>> {
        None
    }

    /// Drops the doorbells: the client is gone, and stores to its memory no longer count.
    fn forget_doorbells(&mut self) {}

    /// Returns the number of vectors of interrupt kind `index`.
    fn vectors(&self, index: u32) -> u32;

    /// Reads for the driver.
    fn read(&mut self, region: u32, offset: u64, into: &mut [u8]);

    /// Writes for the driver.
    fn write(&mut self, region: u32, offset: u64, bytes: &[u8]);

    /// Maps `memory` at bus address `at`. It overlaps no earlier mapping.
    fn dma_map(&mut self, at: u64, memory: DmaMemory);

    /// Unmaps the memory at `at`. On return the device has finished all accesses to it.
    fn dma_unmap(&mut self, at: u64);

    /// Makes vector `vector` of kind `index` ring `eventfd` from now on, or nothing.
    fn set_irq(&mut self, index: u32, vector: u32, eventfd: Option<OwnedFd>);

    /// Returns the device to its power-on state.
    fn reset(&mut self);
}

/// Result of a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// No work is left until the descriptor is readable.
    Idle,
    /// More work is left.
    Busy,
    /// The client is gone: it closed the connection, or broke a rule (the breach) after which its stream cannot be
    /// parsed.
    Gone(Option<Breach>),
    /// The client is gone, and no other can connect.
    Over,
}

/// A vfio-user server for one device.
#[derive(Debug)]
pub struct Server {
    listener: Option<OwnedFd>,
    /// Path of the listening socket, if the server has to remove it.
    path: Option<PathBuf>,
    client: Option<Client>,
    poll: OwnedFd,
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            let _ = std::fs::remove_file(path);
        }
    }
}

impl AsFd for Server {
    /// Returns a descriptor that is readable when a turn has work to do.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.poll.as_fd()
    }
}

impl Server {
    /// Serves the clients that connect to `path`, one after the other. `path` must not exist; dropping the server
    /// removes the socket.
    pub fn bind(path: &Path) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        rustix::net::bind(&listener, &SocketAddrUnix::new(path)?)?;
        rustix::net::listen(&listener, 8)?;
        let mut server = Self::on(listener)?;
        server.path = Some(path.to_owned());
        Ok(server)
    }

    /// Serves the clients that connect to this listening socket, one after the other.
    pub fn on(listener: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&listener, true)?;
        let poll = new_poll()?;
        watch(&poll, listener.as_fd(), epoll::EventFlags::IN)?;
        Ok(Server { listener: Some(listener), path: None, client: None, poll })
    }

    /// Serves the client at the other end of `connection`, and none after it.
    pub fn over(connection: OwnedFd) -> io::Result<Self> {
        let poll = new_poll()?;
        let client = Client::new(connection, &poll)?;
        Ok(Server { listener: None, path: None, client: Some(client), poll })
    }

    /// Returns whether another client can connect when one is gone.
    pub fn listens(&self) -> bool {
        self.listener.is_some()
    }

    /// Returns whether a client is connected.
    pub fn has_client(&self) -> bool {
        self.client.is_some()
    }

    /// Does the work that is there, up to a bound, without blocking.
    pub fn turn(&mut self, device: &mut impl Device) -> io::Result<Turn> {
        let Some(client) = &mut self.client else {
            let Some(listener) = &self.listener else { return Ok(Turn::Over) };
            return match rustix::net::accept_with(listener, SocketFlags::CLOEXEC) {
                Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(Turn::Idle),
                connection => {
                    let client = Client::new(connection?, &self.poll)?;
                    // The next client waits in the listener's queue.
                    epoll::delete(&self.poll, listener)?;
                    self.client = Some(client);
                    Ok(Turn::Busy)
                }
            };
        };
        let end = match client.turn(device, &self.poll) {
            Ok(turn) => return Ok(turn),
            Err(end) => end,
        };
        client.forget(device);
        // Closing alone does not remove it if another process holds the same socket.
        epoll::delete(&self.poll, &client.socket)?;
        self.client = None;
        match &self.listener {
            Some(listener) => watch(&self.poll, listener.as_fd(), epoll::EventFlags::IN)?,
            None if end == End::Closed => return Ok(Turn::Over),
            None => {}
        }
        match end {
            End::Closed => Ok(Turn::Gone(None)),
            End::Breach(breach) => Ok(Turn::Gone(Some(breach))),
        }
    }
}

fn new_poll() -> io::Result<OwnedFd> {
    Ok(epoll::create(epoll::CreateFlags::CLOEXEC)?)
}

fn watch(poll: &OwnedFd, fd: BorrowedFd<'_>, flags: epoll::EventFlags) -> io::Result<()> {
    Ok(epoll::add(poll, fd, epoll::EventData::new_u64(0), flags)?)
}

/// Reason for the end of a connection.
#[derive(Debug, PartialEq, Eq)]
enum End {
    Closed,
    Breach(Breach),
}

impl From<Breach> for End {
    fn from(breach: Breach) -> Self {
        End::Breach(breach)
    }
}

/// A socket error means that the peer is gone.
impl From<Errno> for End {
    fn from(_: Errno) -> Self {
        End::Closed
    }
}

#[derive(Debug)]
struct Client {
    socket: OwnedFd,
    /// Bytes received and not parsed yet: `inbox[..have]`.
    inbox: Box<[u8]>,
    have: usize,
    /// Descriptors received with them, each with the end of the bytes that it arrived with.
    fds: VecDeque<(usize, OwnedFd)>,
    /// A reply, and how many of its bytes are sent. The server handles no other message until all are.
    reply: Vec<u8>,
    sent: usize,
    met: bool,
    windows: Vec<(u64, u64)>,
}

impl Client {
    fn new(socket: OwnedFd, poll: &OwnedFd) -> io::Result<Self> {
        watch(poll, socket.as_fd(), epoll::EventFlags::IN)?;
        Ok(Client {
            socket,
            inbox: vec![0; 2 * MESSAGE_MAX].into(),
            have: 0,
            fds: VecDeque::new(),
            reply: Vec::with_capacity(MESSAGE_MAX),
            sent: 0,
            met: false,
            windows: Vec::new(),
        })
    }

    fn turn(&mut self, device: &mut impl Device, poll: &OwnedFd) -> Result<Turn, End> {
        let waited = self.sent < self.reply.len();
        if waited && !self.flush(None)? {
            return Ok(Turn::Idle);
        }
        if waited {
            self.await_event(poll, epoll::EventFlags::IN)?;
        }
        let mut left = TURN_MAX;
        loop {
            let mut at = 0;
            let mut blocked = false;
            while left > 0 && !blocked {
                let Some(header) = self.message(at)? else { break };
                let fds = self.fds_until(at + header.size)?;
                blocked = !self.serve(device, header, at, fds)?;
                at += header.size;
                // After a message that has a reply, the device gets its turn, so that it makes progress even if a
                // client keeps asking.
                left = if header.posted { left - 1 } else { 0 };
            }
            self.consume(at);
            if blocked {
                self.await_event(poll, epoll::EventFlags::OUT)?;
                return Ok(Turn::Idle);
            }
            if left == 0 {
                return Ok(Turn::Busy);
            }
            if !self.receive()? {
                return Ok(Turn::Idle);
            }
        }
    }

    fn await_event(&self, poll: &OwnedFd, flags: epoll::EventFlags) -> Result<(), End> {
        Ok(epoll::modify(poll, &self.socket, epoll::EventData::new_u64(0), flags)?)
    }

    /// Returns the header of the message at `at`, if all of the message is there.
    fn message(&self, at: usize) -> Result<Option<Header>, Breach> {
        let there = &self.inbox[at..self.have];
        let Some(header) = there.first_chunk::<HEADER>() else { return Ok(None) };
        let header = Header::parse(header)?;
        if !self.met && header.command != 1 {
            return Err(Breach::NoVersion(header.command));
        }
        Ok((header.size <= there.len()).then_some(header))
    }

    /// Returns the descriptors of the message that ends at `end`. The kernel delivers descriptors with the first
    /// bytes that they were sent with, and stops there, so the bytes that they arrive with end inside their message.
    fn fds_until(&mut self, end: usize) -> Result<Vec<OwnedFd>, Breach> {
        let count = self.fds.iter().take_while(|(came, _)| *came <= end).count();
        if count > FDS_MAX {
            return Err(Breach::Descriptors);
        }
        Ok(self.fds.drain(..count).map(|(_, fd)| fd).collect())
    }

    /// Removes the first `len` bytes of the inbox.
    fn consume(&mut self, len: usize) {
        self.inbox.copy_within(len..self.have, 0);
        self.have -= len;
        self.fds.iter_mut().for_each(|(came, _)| *came -= len);
    }

    /// Receives the bytes that are there; returns whether there were any.
    fn receive(&mut self) -> Result<bool, End> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let room = &mut [IoSliceMut::new(&mut self.inbox[self.have..])];
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let got = match rustix::net::recvmsg(&self.socket, room, &mut control, flags) {
            Err(Errno::AGAIN | Errno::INTR) => return Ok(false),
            other => other?,
        };
        self.have += got.bytes;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                self.fds.extend(rights.map(|fd| (self.have, fd)));
            }
        }
        match got {
            got if got.bytes == 0 => Err(End::Closed),
            got if got.flags.contains(ReturnFlags::CTRUNC) || self.fds.len() > FDS_MAX => {
                Err(Breach::Descriptors.into())
            }
            _ => Ok(true),
        }
    }

    /// Sends the rest of the reply; returns whether all of it is sent.
    fn flush(&mut self, fd: Option<BorrowedFd<'_>>) -> Result<bool, End> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let fds = fd.as_slice();
        while self.sent < self.reply.len() {
            let mut control = SendAncillaryBuffer::new(&mut space);
            if self.sent == 0 && !fds.is_empty() {
                let fits = control.push(SendAncillaryMessage::ScmRights(fds));
                assert!(fits, "there is room for one descriptor");
            }
            let rest = &[IoSlice::new(&self.reply[self.sent..])];
            match rustix::net::sendmsg(&self.socket, rest, &mut control, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(false),
                other => self.sent += other?,
            }
        }
        self.reply.clear();
        self.sent = 0;
        Ok(true)
    }

    /// Handles one message and replies; returns whether all of the reply is sent.
    fn serve(&mut self, device: &mut impl Device, header: Header, at: usize, fds: Vec<OwnedFd>) -> Result<bool, End> {
        let body = at + HEADER..at + header.size;
        header.answer(&mut self.reply, None);
        let memory = if header.command == 1 && !self.met {
            let minor = wire::parse_version(&self.inbox[body])?;
            self.reply.extend(0_u16.to_ne_bytes());
            self.reply.extend(minor.to_ne_bytes());
            self.reply.extend(wire::CAPABILITIES);
            self.met = true;
            None
        } else {
            let Client { inbox, reply, windows, .. } = self;
            let ask = Ask::parse(header.command, &inbox[body]);
            match ask.and_then(|ask| perform(device, ask, windows, fds, reply)) {
                Ok(memory) => memory,
                Err(errno) => {
                    header.answer(&mut self.reply, Some(errno));
                    None
                }
            }
        };
        if header.posted {
            self.reply.clear();
            return Ok(true);
        }
        wire::finish(&mut self.reply);
        // A descriptor goes with the first byte. A reply with a descriptor is short; only a client that does not
        // read its replies has no room for it.
        self.flush(memory).and_then(|sent| if !sent && memory.is_some() { Err(End::Closed) } else { Ok(sent) })
    }

    /// Takes the client's memory and interrupts away from the device.
    fn forget(&mut self, device: &mut impl Device) {
        device.forget_doorbells();
        self.windows.drain(..).for_each(|(at, _)| device.dma_unmap(at));
        for index in 0..IRQS {
            (0..device.vectors(index)).for_each(|vector| device.set_irq(index, vector, None));
        }
    }
}

/// Handles a command and appends the body of the reply to `reply`. Returns the descriptor to send with it.
fn perform<'a>(
    device: &'a mut impl Device,
    ask: Ask<'_>,
    windows: &mut Vec<(u64, u64)>,
    fds: Vec<OwnedFd>,
    reply: &mut Vec<u8>,
) -> Result<Option<BorrowedFd<'a>>, Errno> {
    let allowed = match &ask {
        Ask::DmaMap { .. } => 1,
        Ask::SetIrqs { count, eventfds: true, .. } => *count as usize,
        _ => 0,
    };
    if fds.len() != allowed {
        return Err(Errno::INVAL);
    }
    match ask {
        Ask::DmaMap { rights, offset, at, len } => {
            dma_map(device, windows, &fds[0], (rights, offset, at, len))?;
        }
        Ask::DmaUnmap { all: true, .. } => {
            windows.drain(..).for_each(|(at, _)| device.dma_unmap(at));
            reply_words(reply, &[24, 2, 0, 0, 0, 0]);
        }
        Ask::DmaUnmap { at, len, .. } => {
            let index = windows.iter().position(|&window| window == (at, len)).ok_or(Errno::NOENT)?;
            windows.swap_remove(index);
            device.dma_unmap(at);
            reply_words(reply, &[24, 0]);
            reply.extend(at.to_ne_bytes());
            reply.extend(len.to_ne_bytes());
        }
        // Flags: PCI, can be reset.
        Ask::Info => reply_words(reply, &[16, 3, REGIONS, IRQS]),
        Ask::RegionInfo { index, room } => return region_info(device, index, room, reply),
        Ask::RegionIoFds { index, room } => return region_io_fds(device, index, room, reply),
        Ask::IrqInfo { index } if index < IRQS => {
            // Flags: by eventfd, cannot be resized.
            reply_words(reply, &[16, 1 | 8, index, device.vectors(index)]);
        }
        Ask::IrqInfo { .. } => return Err(Errno::INVAL),
        Ask::SetIrqs { index, start, count, eventfds } => {
            let vectors = if index < IRQS { device.vectors(index) } else { 0 };
            let inside = start.checked_add(count).is_some_and(|end| end <= vectors);
            // On another descriptor, a full pipe for example, the device would block until its client reads.
            if !(inside && fds.iter().all(|fd| is_eventfd(fd.as_fd()))) {
                return Err(Errno::INVAL);
            }
            match eventfds {
                true => (start..).zip(fds).for_each(|(vector, fd)| device.set_irq(index, vector, Some(fd))),
                false => (0..vectors).for_each(|vector| device.set_irq(index, vector, None)),
            }
        }
        Ask::Read { region, offset, count } => {
            inside(device, region, offset, count as usize)?;
            reply_access(reply, region, offset, count);
            let begin = reply.len();
            reply.resize(begin + count as usize, 0);
            device.read(region, offset, &mut reply[begin..]);
        }
        Ask::Write { region, offset, bytes } => {
            inside(device, region, offset, bytes.len())?;
            reply_access(reply, region, offset, u32::try_from(bytes.len()).map_err(|_| Errno::INVAL)?);
            device.write(region, offset, bytes);
        }
        Ask::Reset => device.reset(),
    }
    Ok(None)
}

fn reply_words(reply: &mut Vec<u8>, words: &[u32]) {
    words.iter().for_each(|word| reply.extend(word.to_ne_bytes()));
}

fn reply_access(reply: &mut Vec<u8>, region: u32, offset: u64, count: u32) {
    reply.extend(offset.to_ne_bytes());
    reply_words(reply, &[region, count]);
}

/// Checks that `len` bytes at `offset` lie in a region and do not exceed the announced limit.
fn inside(device: &impl Device, region: u32, offset: u64, len: usize) -> Result<(), Errno> {
    let limit = if region < REGIONS { device.region(region).len } else { 0 };
    let fits = offset.checked_add(len as u64).is_some_and(|end| end <= limit);
    if fits && (1..=TRANSFER_MAX).contains(&len) { Ok(()) } else { Err(Errno::INVAL) }
}

fn dma_map(
    device: &mut impl Device,
    windows: &mut Vec<(u64, u64)>,
    memory: &OwnedFd,
    (rights, offset, at, len): (u32, u64, u64, u64),
) -> Result<(), Errno> {
    let end = at.checked_add(len).ok_or(Errno::INVAL)?;
    if windows.iter().any(|&(other, its_len)| at < other + its_len && other < end) {
        return Err(Errno::EXIST);
    }
    if windows.len() == WINDOWS_MAX {
        return Err(Errno::NOSPC);
    }
    let rights = Rights { read: rights & 1 != 0, write: rights & 2 != 0 };
    let memory = DmaMemory::map(memory.as_fd(), offset, len, rights)?;
    windows.push((at, len));
    device.dma_map(at, memory);
    Ok(())
}

fn region_info<'a>(
    device: &'a impl Device,
    index: u32,
    room: usize,
    reply: &mut Vec<u8>,
) -> Result<Option<BorrowedFd<'a>>, Errno> {
    if index >= REGIONS {
        return Err(Errno::INVAL);
    }
    let Region { len, memory, areas } = device.region(index);
    // Flags: readable and writable (3), mappable (4), with a list of areas (8).
    let mut flags = if len > 0 { 3 } else { 0 };
    let mut argsz = 32;
    if memory.is_some() {
        flags |= 4;
        argsz += if areas.is_empty() { 0 } else { 16 + 16 * areas.len() };
    }
    let listed = argsz > 32 && argsz <= room;
    let size = u32::try_from(argsz).map_err(|_| Errno::OVERFLOW)?;
    let first = if listed { 32 } else { 0 };
    reply_words(reply, &[size, flags | if listed { 8 } else { 0 }, index, first]);
    reply.extend(len.to_ne_bytes());
    reply.extend(0_u64.to_ne_bytes());
    if listed {
        // The only capability: 1 (sparse mmap), version 1.
        reply_words(reply, &[1 | 1 << 16, 0, u32::try_from(areas.len()).map_err(|_| Errno::OVERFLOW)?, 0]);
        areas.iter().for_each(|(start, len)| {
            reply.extend(start.to_ne_bytes());
            reply.extend(len.to_ne_bytes());
        });
    }
    Ok(memory.filter(|_| listed || argsz == 32))
}

/// Returns the doorbells of a region, which libvfio-user calls shadow ioeventfds: `vfio_user_sub_region_ioeventfd`
/// in its vfio-user.h. There is no eventfd, since the device polls the memory.
fn region_io_fds<'a>(
    device: &'a mut impl Device,
    index: u32,
    room: usize,
    reply: &mut Vec<u8>,
) -> Result<Option<BorrowedFd<'a>>, Errno> {
    const ENTRY_LEN: usize = 48;
    const SHADOW: u32 = 2;
    const NO_EVENTFD: u32 = u32::MAX;
    if index >= REGIONS {
        return Err(Errno::INVAL);
    }
    let doorbells = device.doorbells(index);
    let places = doorbells.map_or(&[][..], |doorbells| doorbells.places);
    let len = 16 + ENTRY_LEN * places.len();
    let size = u32::try_from(len).map_err(|_| Errno::OVERFLOW)?;
    reply_words(reply, &[size, 0, index, u32::try_from(places.len()).map_err(|_| Errno::OVERFLOW)?]);
    if len > room {
        return Ok(None);
    }
    for (offset, place) in places {
        reply.extend(offset.to_ne_bytes());
        reply.extend(4_u64.to_ne_bytes());
        // The memory is the first descriptor of the reply.
        reply_words(reply, &[NO_EVENTFD, SHADOW, 0, 0]);
        reply.extend(place.to_ne_bytes());
        reply.extend(0_u64.to_ne_bytes());
    }
    Ok(doorbells.filter(|_| !places.is_empty()).map(|doorbells| doorbells.memory))
}
