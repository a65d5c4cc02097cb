//! A device that another process serves by the vfio-user protocol (QEMU's docs/interop/vfio-user.rst).
//!
//! The server is not trusted. The client checks everything that it says, ends the connection if it breaks a rule,
//! and gives it a bounded time for each answer. After that every register reads as ones, writes are lost, and the
//! next step that can fail returns the reason.
//!
//! The client accesses a BAR, or the parts of it, that the server lets it map by plain loads and stores. That needs
//! memory which the server cannot take away while we use it: a memfd of small pages, sealed against shrinking. All
//! other accesses go by messages. Writes want no answer, so they cost one system call, and arrive in order with
//! later requests.
//!
//! For doorbell registers, a server may offer such memory as well, which it polls: then a burst costs no system call
//! at all. A store must not overtake messages sent before it, so while some may be in transit, doorbells go by
//! messages, too.
//!
//! The client does for the server what a kernel does for a VFIO device. It enables MSI-X in the configuration space
//! and unmasks the vectors in their table. After a reset it restores the command register and the interrupts.
//!
//! docs/decisions/0008-vfio-user.md says why the client is our own.

mod link;
mod turns;
mod twin;
mod wire;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use arrayvec::ArrayVec;
use rustix::event::EventfdFlags;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tasuki_shm::region::PAGE_LEN;

use super::bar::{BLOCK_MAX, Bar, Far};
use super::mmio::Mmio;
use super::pci::{self, Capability, Header};
use super::{Bus, BusError, IntX, Iova, Part};
use link::{Link, Question};
use turns::Behind;
pub use twin::{BarTwin, Twin};
pub(super) use wire::RegionInfo;
use wire::{Command, FDS_MAX, Limits, Reader};

/// Default time limit for an answer of the server.
pub const TIMEOUT: Duration = Duration::from_secs(10);

/// Size in bytes of the messages that can precede a request: three writes.
const AHEAD_LEN: usize = 128;

/// Size in bytes of a PCI Express configuration space.
const CONFIG_MAX: u64 = 4096;
/// Offset and value bits of the command register: PCI Local Bus Specification 3.0, 6.2.2.
const COMMAND: u16 = 0x04;
/// MSI-X capability: PCI Local Bus Specification 3.0, 6.8.2.
const MSIX_CONTROL_ENABLE: u32 = 1 << 31;
const MSIX_CONTROL_MASK_ALL: u32 = 1 << 30;
const MSIX_TABLE: u16 = 4;
const MSIX_ENTRY_LEN: u64 = 16;
const MSIX_ENTRY_CONTROL: u64 = 12;

/// A connection on which client and server have agreed on a version. Another client can go on with it: the server
/// does not notice.
#[derive(Debug)]
pub struct Connection {
    /// Socket to the server.
    pub socket: OwnedFd,
    /// Maximum number of descriptors that the server accepts in a message.
    pub fds_max: u32,
    /// Maximum number of bytes of a region that the server accepts in a message.
    pub transfer_max: u32,
    /// Whether the server can be asked for doorbells.
    pub io_fds: bool,
}

/// A device of a vfio-user server.
#[derive(Debug)]
pub struct VfioUser {
    link: Shared,
    config_len: u64,
    can_reset: bool,
    /// Eventfds of the enabled vectors.
    vectors: Vec<OwnedFd>,
    /// Descriptions of the BARs. Each is asked for only once: the server forgets older doorbells when it is asked
    /// again.
    bars: [Option<Known>; 6],
    /// Interrupt pin, if it is enabled.
    intx: Option<IntX>,
}

impl VfioUser {
    /// Connects to the server at `path`, which has `timeout` for each answer.
    pub fn connect(path: &Path, timeout: Duration) -> Result<Self, BusError> {
        let refused = |source: rustix::io::Errno| BusError::Refused {
            doing: "connecting to the device's server",
            source: source.into(),
        };
        let address = SocketAddrUnix::new(path).map_err(refused)?;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
        let socket = socket.map_err(refused)?;
        rustix::net::connect(&socket, &address).map_err(refused)?;
        Self::meet(socket, timeout)
    }

    /// Agrees on a version with the server at the other end of a new socket.
    pub fn meet(socket: OwnedFd, timeout: Duration) -> Result<Self, BusError> {
        let mut link = open(socket, Limits::default(), timeout)?;
        let mut answer = [0; wire::VERSION_MAX];
        let say = |message: &mut wire::Message| {
            message.u16(wire::MAJOR).u16(wire::MINOR).bytes(wire::OUR_VERSION);
        };
        let (len, _) = link.call("agreeing on a version", Command::Version, say, &[], &mut answer, 0)?;
        match wire::parse_version(&answer[..len]) {
            Ok(limits) => link.limits = limits,
            Err(breach) => return link.breach(breach),
        }
        Self::over(link)
    }

    /// Continues with a connection on which another client has agreed on a version before. That client's mappings
    /// still exist, and its interrupts arrive where they did until [`interrupts`](Bus::interrupts) is called.
    pub fn from_connection(connection: Connection, timeout: Duration) -> Result<Self, BusError> {
        let limits = Limits { fds: connection.fds_max, transfer: connection.transfer_max, io_fds: connection.io_fds };
        Self::over(open(connection.socket, limits, timeout)?)
    }

    fn over(mut link: Link) -> Result<Self, BusError> {
        let mut answer = [0; 16];
        let ask = |message: &mut wire::Message| _ = message.u32(16).u32(0).u32(0).u32(0);
        let (len, _) = link.call("asking for the device", Command::DeviceGetInfo, ask, &[], &mut answer, 0)?;
        let mut from = Reader(&answer[..len]);
        let mut fields = || Some((from.u32()?, from.u32()?, from.u32()?, from.u32()?));
        let Some((_, flags, regions, irqs)) = fields() else {
            return link.breach(format!("it describes the device in {len} bytes"));
        };
        if flags & wire::DEVICE_PCI == 0 || regions <= wire::CONFIG_REGION || irqs <= wire::MSIX {
            return link.breach(format!(
                "its device has flags {flags:#x}, {regions} regions and {irqs} kinds of interrupt, which is no PCI device"
            ));
        }
        let (config, _) = region_info(&mut link, wire::CONFIG_REGION)?;
        if config.len < 64 {
            return link.breach(format!("its configuration space has {} bytes", config.len));
        }
        Ok(VfioUser {
            link: Shared(Arc::new(Mutex::new(link))),
            config_len: config.len.min(CONFIG_MAX),
            can_reset: flags & wire::DEVICE_RESET != 0,
            vectors: Vec::new(),
            bars: Default::default(),
            intx: None,
        })
    }

    /// Returns the connection, for a successor. Registers that still exist read as ones.
    pub fn into_connection(self) -> Result<Connection, BusError> {
        let mut link = self.link.lock();
        let socket = link.take("handing out the connection")?;
        let Limits { fds, transfer, io_fds } = link.limits;
        Ok(Connection { socket, fds_max: fds, transfer_max: transfer, io_fds })
    }

    /// Returns the number of answers that were skipped because the twin that had asked died before it read them.
    pub fn strays(&self) -> u64 {
        self.link.lock().strays()
    }

    fn ask_for_bar(&self, index: u8) -> Result<Known, BusError> {
        let mut link = self.link.lock();
        let (info, memory) = region_info(&mut link, index.into())?;
        let both = wire::REGION_READ | wire::REGION_WRITE;
        if info.len == 0 || info.flags & both != both {
            return Err(BusError::NoBar { index });
        }
        let doorbells = doorbells(&mut link, index.into(), info.len)?.map(Arc::new);
        Ok(Known { info, memory, doorbells })
    }

    fn config_offset(&self, offset: u16) -> Result<u64, BusError> {
        match offset.is_multiple_of(4) && u64::from(offset) + 4 <= self.config_len {
            true => Ok(offset.into()),
            false => Err(BusError::Refused {
                doing: "an access outside of the configuration space",
                source: io::ErrorKind::InvalidInput.into(),
            }),
        }
    }

    /// Tells the server which eventfd each vector rings, in as many messages as needed.
    fn send_vectors(&mut self) -> Result<(), BusError> {
        let mut link = self.link.lock();
        let chunk = (link.limits.fds as usize).clamp(1, FDS_MAX);
        let mut start = 0;
        for fds in self.vectors.chunks(chunk) {
            let fds = fds.iter().map(AsFd::as_fd).collect::<Vec<_>>();
            set_interrupts(&mut link, wire::MSIX, wire::IRQ_TRIGGER, start, &fds)?;
            start += u32::try_from(fds.len()).expect("at most 16");
        }
        Ok(())
    }

    /// Tells the server which eventfd the device's pin rings. If the server masks the pin, tells it which eventfd
    /// unmasks it, too.
    fn send_intx(&mut self) -> Result<(), BusError> {
        if self.intx.is_none() {
            return Ok(());
        }
        let (flags, _) = self.count_interrupts(wire::INTX)?;
        let Some(intx) = &self.intx else { return Ok(()) };
        let mut link = self.link.lock();
        set_interrupts(&mut link, wire::INTX, wire::IRQ_TRIGGER, 0, &[intx.rings.as_fd()])?;
        if flags & wire::IRQ_AUTOMASKED != 0 {
            set_interrupts(&mut link, wire::INTX, wire::IRQ_UNMASK, 0, &[intx.unmasks.as_fd()])?;
        }
        Ok(())
    }

    /// Enables MSI-X in the device, with every vector unmasked.
    fn enable_vectors(&mut self) -> Result<(), BusError> {
        let Some(msix) = Header::read(self)?.capability(Capability::MSI_X) else {
            return Err(BusError::FewInterrupts {
                have: 0,
                need: u16::try_from(self.vectors.len()).unwrap_or(u16::MAX),
            });
        };
        let table = self.read_config(msix.offset + MSIX_TABLE)?;
        for vector in 0..self.vectors.len() as u64 {
            let at = u64::from(table & !7) + vector * MSIX_ENTRY_LEN + MSIX_ENTRY_CONTROL;
            match write(&mut self.link.lock(), "unmasking an interrupt", table & 7, at, 0) {
                // A server that keeps the table to itself has no vector masked in it.
                Err(BusError::Refused { .. }) | Ok(()) => {}
                Err(other) => return Err(other),
            }
        }
        let control = self.read_config(msix.offset)?;
        self.write_config(msix.offset, (control | MSIX_CONTROL_ENABLE) & !MSIX_CONTROL_MASK_ALL)
    }

    /// Returns the flags of a kind of interrupt, and the number of interrupts that can ring an eventfd.
    fn count_interrupts(&mut self, index: u32) -> Result<(u32, u32), BusError> {
        let mut link = self.link.lock();
        let mut answer = [0; 16];
        let ask = |message: &mut wire::Message| _ = message.u32(16).u32(0).u32(index).u32(0);
        let (len, _) = link.call("asking for interrupts", Command::DeviceGetIrqInfo, ask, &[], &mut answer, 0)?;
        let mut from = Reader(&answer[..len]);
        let mut fields = || Some((from.u32()?, from.u32()?, from.u32()?, from.u32()?));
        match fields() {
            Some((_, flags, its, count)) if its == index => {
                Ok((flags, if flags & wire::IRQ_EVENTFD == 0 { 0 } else { count }))
            }
            _ => {
                let kind = if index == wire::INTX { "INTx" } else { "MSI-X" };
                link.breach(format!("it describes the {kind} interrupts in {len} bytes, or others"))
            }
        }
    }
}

fn open(socket: OwnedFd, limits: Limits, timeout: Duration) -> Result<Link, BusError> {
    Link::new(socket, limits, timeout)
        .map_err(|source| BusError::Refused { doing: "setting up the connection to the device's server", source })
}

/// Connects interrupts of a kind, from `start` on, to eventfds, for `action`.
fn set_interrupts(
    link: &mut Link,
    index: u32,
    action: u32,
    start: u32,
    fds: &[BorrowedFd<'_>],
) -> Result<(), BusError> {
    let count = u32::try_from(fds.len()).expect("at most 16");
    let flags = wire::IRQ_DATA_EVENTFD | action;
    let ask = |message: &mut wire::Message| _ = message.u32(20).u32(flags).u32(index).u32(start).u32(count);
    link.call("setting up interrupts", Command::DeviceSetIrqs, ask, fds, &mut [], 0).map(|_| ())
}

/// Asks the server for the description of a region, and the memory that holds it.
fn region_info(link: &mut Link, index: u32) -> Result<(RegionInfo, Option<OwnedFd>), BusError> {
    let mut answer = [0; wire::REGION_INFO_MAX];
    let argsz = u32::try_from(answer.len()).expect("4096");
    let ask = |message: &mut wire::Message| _ = message.u32(argsz).u32(0).u32(index).u32(0).u64(0).u64(0);
    let (len, mut fds) = link.call("asking for a region", Command::DeviceGetRegionInfo, ask, &[], &mut answer, 1)?;
    match RegionInfo::parse(&answer[..len], index) {
        Ok(info) => Ok((info, fds.pop())),
        Err(breach) => link.breach(breach),
    }
}

/// Asks the server for the doorbells of a region of `len` bytes.
fn doorbells(link: &mut Link, index: u32, len: u64) -> Result<Option<Doorbells>, BusError> {
    if !link.limits.io_fds {
        return Ok(None);
    }
    let mut answer = [0; wire::IO_FDS_MAX];
    let argsz = u32::try_from(answer.len()).expect("a few thousand");
    let ask = |message: &mut wire::Message| _ = message.u32(argsz).u32(0).u32(index).u32(0);
    let (answered, mut fds) =
        match link.call("asking for doorbells", Command::DeviceGetRegionIoFds, ask, &[], &mut answer, 1) {
            // The region has no doorbells.
            Err(BusError::Refused { .. }) => return Ok(None),
            other => other?,
        };
    let places = match wire::parse_doorbells(&answer[..answered], index, len) {
        Ok(places) => places,
        Err(breach) => return link.breach(breach),
    };
    let Some(memory) = fds.pop() else { return Ok(None) };
    Ok(Doorbells::map(link.behind(), memory, places))
}

/// Writes a request for `count` bytes of a region.
fn asks(message: &mut wire::Message, region: u32, offset: u64, count: u32) {
    message.u64(offset).u32(region).u32(count);
}

/// Returns the data of `answer`, if it answers the request of `asks`.
fn answers<'a>(link: &mut Link, answer: &'a [u8], region: u32, offset: u64, count: u32) -> Result<&'a [u8], BusError> {
    let mut from = Reader(answer);
    let its = (from.u64(), from.u32(), from.u32());
    if its != (Some(offset), Some(region), Some(count)) || from.0.len() as u64 != u64::from(count) {
        return link
            .breach(format!("it answers another read than that of {count} bytes at {offset:#x} of region {region}"));
    }
    Ok(from.0)
}

/// Reads `into` from a region.
fn read(link: &mut Link, doing: &'static str, region: u32, offset: u64, into: &mut [u8]) -> Result<(), BusError> {
    let mut answer = [0; 16 + BLOCK_MAX];
    let count = u32::try_from(into.len()).expect("a block has a few bytes");
    let answer = &mut answer[..16 + into.len()];
    let ask = |message: &mut wire::Message| asks(message, region, offset, count);
    let (len, _) = link.call(doing, Command::RegionRead, ask, &[], answer, 0)?;
    into.copy_from_slice(answers(link, &answer[..len], region, offset, count)?);
    Ok(())
}

/// Reads the 32-bit words at these offsets of a region. Sends the messages in `ahead` before the `nth` request.
fn read_around<const N: usize>(
    link: &mut Link,
    region: u32,
    offsets: [u32; N],
    (nth, ahead): (usize, &[u8]),
) -> Result<[u32; N], BusError> {
    let mut room = [[0; 16 + 4]; N];
    let mut room_of = room.iter_mut().enumerate();
    let questions = offsets.map(|offset| {
        let (index, room) = room_of.next().expect("as many");
        let fill = move |message: &mut wire::Message| asks(message, region, offset.into(), 4);
        Question { ahead: if index == nth { ahead } else { &[] }, fill, fds: &[], answer: &mut room[..] }
    });
    let said = link.call_each("reading registers", Command::RegionRead, questions, 0)?;
    let mut values = [0; N];
    for (((value, offset), answer), (len, _)) in values.iter_mut().zip(offsets).zip(&room).zip(said) {
        let bytes = answers(link, &answer[..len?], region, offset.into(), 4)?;
        *value = u32::from_le_bytes(bytes.try_into().expect("four were checked"));
    }
    Ok(values)
}

/// Writes a 32-bit word to a region and waits until the server has it.
fn write(link: &mut Link, doing: &'static str, region: u32, offset: u64, value: u32) -> Result<(), BusError> {
    let mut answer = [0; 16];
    let ask = |message: &mut wire::Message| _ = message.u64(offset).u32(region).u32(4).u32(value);
    let (len, _) = link.call(doing, Command::RegionWrite, ask, &[], &mut answer, 0)?;
    let mut from = Reader(&answer[..len]);
    match (from.u64(), from.u32(), from.u32()) == (Some(offset), Some(region), Some(4)) {
        true => Ok(()),
        false => {
            link.breach(format!("it answers another write than that of 4 bytes at {offset:#x} of region {region}"))
        }
    }
}

impl Bus for VfioUser {
    type Registers = UserRegisters;

    fn read_config(&mut self, offset: u16) -> Result<u32, BusError> {
        let offset = self.config_offset(offset)?;
        let mut bytes = [0; 4];
        read(&mut self.link.lock(), "reading the configuration space", wire::CONFIG_REGION, offset, &mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }

    fn write_config(&mut self, offset: u16, value: u32) -> Result<(), BusError> {
        let offset = self.config_offset(offset)?;
        let value = u32::from_ne_bytes(value.to_le_bytes());
        write(&mut self.link.lock(), "writing the configuration space", wire::CONFIG_REGION, offset, value)
    }

    fn registers(&mut self, index: u8) -> Result<UserRegisters, BusError> {
        if index > 5 {
            return Err(BusError::NoBar { index });
        }
        if self.bars[usize::from(index)].is_none() {
            let known = self.ask_for_bar(index)?;
            pci::decode(self)?;
            self.bars[usize::from(index)] = Some(known);
        }
        let Some(Known { info, memory, doorbells }) = &self.bars[usize::from(index)] else {
            return Err(BusError::NoBar { index });
        };
        let behind = self.link.lock().behind();
        let far = Messages { link: self.link.clone(), behind, region: index.into(), doorbells: doorbells.clone() };
        // Parts that cannot be mapped, or whose memory could be taken away, are accessed by messages.
        Ok(Bar::new(far, info.len, &info.areas, |start, len| {
            Mmio::of_process(memory.as_ref()?.as_fd(), info.offset.checked_add(start)?, len).ok()?
        }))
    }

    fn map_part(&mut self, part: Part<'_>) -> Result<(), BusError> {
        let [mapped] = self.map_each([part])?;
        mapped
    }

    fn map_each<const N: usize>(&mut self, parts: [Part<'_>; N]) -> Result<[Result<(), BusError>; N], BusError> {
        let dma = |Part { at, len, .. }: Part<'_>, why| BusError::Dma { at, len, why };
        let is_odd = |&&Part { at, len, .. }: &&Part<'_>| {
            !at.0.is_multiple_of(PAGE_LEN as u64) || at.0.checked_add(len as u64).is_none()
        };
        if let Some(&odd) = parts.iter().find(is_odd) {
            let why = "the address is not on a whole page, or the end is beyond the last; choose another";
            return Err(dma(odd, why.to_owned()));
        }
        let flags = wire::DMA_READ | wire::DMA_WRITE;
        let fds = parts.map(|part| [part.memory.fd()]);
        let mut fds_of = fds.iter();
        let questions = parts.map(|Part { from, len, at, .. }| Question {
            ahead: &[],
            fill: move |message: &mut wire::Message| {
                message.u32(32).u32(flags).u64(from as u64).u64(at.0).u64(len as u64);
            },
            fds: &fds_of.next().expect("as many")[..],
            answer: &mut [],
        });
        let said = self.link.lock().call_each("mapping memory", Command::DmaMap, questions, 0)?;
        let mut parts = parts.into_iter();
        Ok(said.map(|(answer, _)| match (answer, parts.next().expect("as many")) {
            (Ok(_), _) => Ok(()),
            (Err(BusError::Refused { source, .. }), part) if source.kind() == io::ErrorKind::AlreadyExists => {
                Err(dma(part, "the device has memory there already; unmap it, or choose another address".to_owned()))
            }
            (Err(BusError::Refused { source, .. }), part) => Err(dma(part, format!("its server refused: {source}"))),
            (Err(other), _) => Err(other),
        }))
    }

    fn hurry(&mut self, hurries: bool) {
        self.link.lock().hurry(hurries);
    }

    fn unmap_dma(&mut self, at: Iova, len: usize) -> Result<(), BusError> {
        let mut answer = [0; 24];
        let ask = |message: &mut wire::Message| _ = message.u32(24).u32(0).u64(at.0).u64(len as u64);
        let mut link = self.link.lock();
        match link.call("unmapping memory", Command::DmaUnmap, ask, &[], &mut answer, 0) {
            Ok(_) => Ok(()),
            Err(BusError::Refused { source, .. }) => {
                Err(BusError::Dma { at, len, why: format!("its server refused to let go of it: {source}") })
            }
            Err(other) => Err(other),
        }
    }

    fn interrupts(&mut self, count: u16) -> Result<Vec<OwnedFd>, BusError> {
        let refused = |source: io::Error| BusError::Refused { doing: "making an eventfd", source };
        let before = self.vectors.len();
        if before < count.into() {
            let (_, have) = self.count_interrupts(wire::MSIX)?;
            if have < count.into() {
                return Err(BusError::FewInterrupts { have: u16::try_from(have).unwrap_or(u16::MAX), need: count });
            }
            for _ in self.vectors.len()..count.into() {
                let vector = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
                self.vectors.push(vector.map_err(|errno| refused(errno.into()))?);
            }
            if let Err(error) = self.send_vectors().and_then(|()| self.enable_vectors()) {
                self.vectors.truncate(before);
                return Err(error);
            }
        }
        self.vectors.iter().take(count.into()).map(|vector| vector.try_clone().map_err(refused)).collect()
    }

    /// The server must ring an eventfd for its interrupt of kind 0. If it says that it masks the pin when the pin
    /// rings, it must also accept an eventfd that unmasks the pin (`VFIO_IRQ_SET_ACTION_UNMASK` with
    /// `VFIO_IRQ_SET_DATA_EVENTFD`).
    fn intx(&mut self) -> Result<IntX, BusError> {
        let refused = |source: io::Error| BusError::Refused { doing: "making an eventfd", source };
        if let Some(intx) = &self.intx {
            return intx.try_clone().map_err(refused);
        }
        if let (_, 0) = self.count_interrupts(wire::INTX)? {
            return Err(BusError::NoIntX { why: "its server offers none".to_owned() });
        }
        pci::allow_intx(self)?;
        let intx = IntX::create().map_err(refused)?;
        let copy = intx.try_clone().map_err(refused)?;
        self.intx = Some(intx);
        match self.send_intx() {
            Ok(()) => Ok(copy),
            Err(error) => {
                self.intx = None;
                Err(match error {
                    BusError::Refused { source, .. } => {
                        BusError::NoIntX { why: format!("its server refuses it ({source})") }
                    }
                    other => other,
                })
            }
        }
    }

    fn renew(&mut self) -> Result<(), BusError> {
        pci::enable_again(self)?;
        self.send_intx()?;
        if !self.vectors.is_empty() {
            self.send_vectors()?;
            self.enable_vectors()?;
        }
        Ok(())
    }

    fn reset(&mut self) -> Result<(), BusError> {
        if !self.can_reset {
            return Err(BusError::Refused { doing: "a reset", source: io::ErrorKind::Unsupported.into() });
        }
        let command = self.read_config(COMMAND)? & 0xffff;
        self.link.lock().call("a reset", Command::DeviceReset, |_| {}, &[], &mut [], 0)?;
        self.write_config(COMMAND, command)?;
        self.send_intx()?;
        if !self.vectors.is_empty() {
            self.send_vectors()?;
            self.enable_vectors()?;
        }
        Ok(())
    }
}

/// Link that the bus and all registers share. A driver is one thread, so it never waits for the mutex.
#[derive(Debug, Clone)]
struct Shared(Arc<Mutex<Link>>);

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Link> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Registers of a device that a vfio-user server serves.
pub type UserRegisters = Bar<Messages>;

/// Description of a BAR, from the server.
#[derive(Debug)]
struct Known {
    info: RegionInfo,
    memory: Option<OwnedFd>,
    doorbells: Option<Arc<Doorbells>>,
}

/// Registers that are written by a store to memory that the server polls.
#[derive(Debug)]
struct Doorbells {
    behind: Arc<Behind>,
    memory: OwnedFd,
    mmio: Mmio,
    places: Box<[wire::Doorbell]>,
}

impl Doorbells {
    /// Maps the doorbells. Returns `None` if there are none, or if their memory could be taken away while we use it.
    fn map(behind: Arc<Behind>, memory: OwnedFd, places: Vec<wire::Doorbell>) -> Option<Self> {
        let last = places.iter().map(|doorbell| doorbell.place).max()?;
        let mmio = Mmio::of_process(memory.as_fd(), 0, last.checked_add(4)?).ok()??;
        Some(Doorbells { behind, memory, mmio, places: places.into() })
    }

    /// Stores `bytes` for the register at `offset`. Returns whether it did.
    #[inline]
    fn store(&self, offset: u32, bytes: &[u8]) -> bool {
        let Some(doorbell) = self.places.iter().find(|doorbell| doorbell.offset == offset) else { return false };
        let &[a, b, c, d] = bytes else { return false };
        if self.behind.is() {
            return false;
        }
        self.mmio.store(doorbell.place, u32::from_ne_bytes([a, b, c, d]));
        true
    }
}

/// Registers that are accessed by messages, and some by doorbells.
#[derive(Debug)]
pub struct Messages {
    link: Shared,
    behind: Arc<Behind>,
    region: u32,
    doorbells: Option<Arc<Doorbells>>,
}

impl Far for Messages {
    /// Returns false if the server refuses or is gone; the link keeps the reason.
    fn read(&self, offset: u32, into: &mut [u8]) -> bool {
        read(&mut self.link.lock(), "reading a register", self.region, offset.into(), into).is_ok()
    }

    fn read_around<const N: usize>(&self, offsets: [u32; N], nth: usize, writes: &[(u32, u32)]) -> Option<[u32; N]> {
        let mut link = self.link.lock();
        let mut ahead = ArrayVec::<u8, AHEAD_LEN>::new();
        for (offset, value) in writes {
            let mut message = link.unanswered(Command::RegionWrite, |message| {
                message.u64((*offset).into()).u32(self.region).u32(4).u32(*value);
            });
            ahead.try_extend_from_slice(message.finish()).ok()?;
        }
        read_around(&mut link, self.region, offsets, (nth, &ahead)).ok()
    }

    fn cork(&self) {
        self.link.lock().cork();
    }

    fn uncork(&self) {
        self.link.lock().uncork();
    }

    fn is_behind(&self) -> bool {
        self.behind.is()
    }

    fn settled(&self) {
        self.behind.settled();
    }

    fn write(&self, offset: u32, bytes: &[u8]) {
        if self.doorbells.as_ref().is_some_and(|doorbells| doorbells.store(offset, bytes)) {
            return;
        }
        let count = u32::try_from(bytes.len()).expect("a register has a few bytes");
        self.link.lock().post(Command::RegionWrite, |message| {
            message.u64(offset.into()).u32(self.region).u32(count).bytes(bytes);
        });
    }
}
