//! Our relay: two processes take turns at a running card behind VFIO.
//!
//! Each has its own access to the card (a twin), made from the descriptors that the first passes to the other. A
//! lease in shared memory decides which one drives. With `keep`, both have the card's memory, and the taker reads
//! the giver's position from the ledger there. With `repoint`, each has memory of its own, and points the card there
//! once the other has stopped it.

use std::fs;
use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::num::NonZeroU32;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};
use tasuki_net::nic::bus::vfio::{Address, Descriptors, Twin};
use tasuki_net::nic::bus::{Iova, Vfio};
use tasuki_net::nic::e1000e::{E1000e, Ready};
use tasuki_net::nic::{How, InPlace, Left, Link, MemoryLayout, Nic, NicMemory, NicOptions, Parts, Repoint};
use tasuki_net::port::{Armed, Burst, Port};
use tasuki_shm::arena::Geometry;
use tasuki_shm::clock::now_ns;
use tasuki_shm::lease::{Lease, Tenure};
use tasuki_shm::line::Line;
use tasuki_shm::region::{PAGE_LEN, Pages, Region, Span};

use crate::{AT_REST, Fallible, PATIENCE, SAYS, SILENCE, of_the_card, turn_round, wait};

type Card = E1000e<Vfio>;

const RING: u16 = 256;

/// Frame slots: each ring and burst takes some.
const SLOTS: Geometry = Geometry { slot_len: 4096, count: 2 * RING as u32 + 128 };

/// Above 4 GiB, where the guest has no memory.
const MEMORY: MemoryLayout = MemoryLayout { rings_at: Iova(0x2_0000_0000), rings_len: 1 << 20, slots: SLOTS };

/// Time from one relay to the next.
const BETWEEN: Duration = Duration::from_millis(25);

/// A sleeping driver checks the time this often.
const NAP: Duration = Duration::from_millis(5);

/// Way of handing the card over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    Keep,
    Repoint,
}

/// Numbers of descriptors before the card's vectors: those of VFIO and, with `keep`, those of the NIC's memory.
const OF_VFIO: usize = 3;
const OF_MEMORY: usize = 3;

/// Most descriptors passed to the other process: those of VFIO and of the NIC's memory, the lease page, two
/// eventfds, and the card's vectors.
const PASSED: usize = 9;
const VECTORS_MAX: usize = 8;

/// Memory that both processes share: the lease, and a few words.
struct LeasePage {
    lease: Lease<Span<Line>>,
    words: Span<AtomicU64>,
    region: Region,
}

/// Words of the lease page, on cache lines of their own: when the giver stopped, how it left the card, whether the
/// turns are over, number of frames sent back, number of relays, and the duration of each relay in ns.
const STOPPED_AT: usize = 8;
const LEFT: usize = 9;
const OVER: usize = 16;
const BACK: usize = 24;
const RELAYS: usize = 32;
const PAUSES: usize = 40;
const PAUSES_MAX: usize = 1 << 16;
const LEASE_PAGE_LEN: usize = (8 * (PAUSES + PAUSES_MAX)).next_multiple_of(PAGE_LEN);

impl LeasePage {
    fn over(region: Region) -> Fallible<Self> {
        let words = region.span(0, PAUSES + PAUSES_MAX)?;
        Ok(LeasePage { lease: Lease::new(region.span(0, 1)?), words, region })
    }

    fn word(&self, word: usize) -> u64 {
        self.words[word].load(Relaxed)
    }
}

/// Waits up to `limit` until `fd` is readable; returns whether it is.
fn readable(fd: BorrowedFd<'_>, limit: Duration) -> Fallible<bool> {
    let limit = Timespec::try_from(limit)?;
    match rustix::event::poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&limit)) {
        Ok(ready) => Ok(ready > 0),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

/// A driver prepared for its process's next turn.
enum Next {
    InPlace(Box<<Card as InPlace>::Prepared>),
    Apart(Box<Ready<Vfio>>),
}

impl Next {
    /// Prepares with memory of its own.
    fn apart(bus: Vfio, memory: NicMemory) -> Fallible<Self> {
        let ready =
            Card::prepare_rings(bus, memory, &options(), How::Point, MEMORY.rings_at).map_err(|failed| failed.error)?;
        Ok(Next::Apart(Box::new(ready)))
    }

    fn go_on(self, left: Left) -> Fallible<Card> {
        match self {
            Next::InPlace(prepared) => Ok(Card::pick_up(*prepared)?),
            Next::Apart(ready) => Ok(Card::repoint(*ready, left).map_err(|failed| failed.error)?),
        }
    }
}

fn options() -> NicOptions {
    NicOptions { ring: RING, ..NicOptions::default() }
}

/// One of the two processes.
struct Worker {
    method: Method,
    us: NonZeroU32,
    /// Our tenure, while we hold the lease.
    tenure: Option<Tenure>,
    lease_page: LeasePage,
    ours: OwnedFd,
    theirs: OwnedFd,
    /// The driver for the next turn, complete but for the giver's position.
    next: Option<Next>,
    /// With `keep`, the material for the turn after that: a replaced driver, or an access never used.
    replaced: Option<Card>,
    unused: Option<(Vfio, NicMemory)>,
}

impl Worker {
    /// Waits for our turn and takes the card over; returns `None` if the turns are over.
    fn take(&mut self) -> Fallible<Option<Card>> {
        if !readable(self.ours.as_fd(), PATIENCE)? {
            return Err("the other process does not hand the card over".into());
        }
        rustix::io::read(&self.ours, &mut [0; 8])?;
        if self.lease_page.word(OVER) == 1 {
            return Ok(None);
        }
        self.tenure = Some(self.lease_page.lease.take(self.lease_page.lease.tenure(), self.us)?);
        let next = self.next.take().ok_or("a process takes over only when it is ready")?;
        let mut nic = next.go_on(Left(self.lease_page.word(LEFT)))?;
        let mut burst = Burst::new();
        nic.receive(&mut burst)?;
        let pause = now_ns().saturating_sub(self.lease_page.word(STOPPED_AT));
        let relay = self.lease_page.word(RELAYS);
        self.lease_page.words[RELAYS].store(relay + 1, Relaxed);
        self.send_back(&mut nic, &mut burst)?;
        self.lease_page.words[PAUSES + usize::try_from(relay)? % PAUSES_MAX].store(pause, Relaxed);
        let replaced = self.replaced.take().map(Card::stand_down);
        if let Some((bus, memory)) = replaced.or_else(|| self.unused.take()) {
            self.next = Some(Next::InPlace(Box::new(Card::prepare(bus, memory)?)));
        }
        Ok(Some(nic))
    }

    /// Hands the card over. No frame may be pending.
    fn give(&mut self, mut nic: Card) -> Fallible<()> {
        match self.method {
            Method::Keep => self.lease_page.words[STOPPED_AT].store(now_ns(), Relaxed),
            Method::Repoint => self.leave(&mut nic)?,
        }
        let ours = self.tenure.take().ok_or("only who holds the lease passes it")?;
        self.lease_page.lease.pass(ours)?;
        rustix::io::write(&self.theirs, &1_u64.to_ne_bytes())?;
        match self.method {
            Method::Keep => self.replaced = Some(nic),
            Method::Repoint => {
                let (mut bus, memory) = nic.stand_down();
                memory.unmap(&mut bus)?;
                self.next = Some(Next::apart(bus, memory)?);
            }
        }
        Ok(())
    }

    /// Quiesces the card, sends back the rest of the frames, and releases the card.
    fn leave(&self, nic: &mut Card) -> Fallible<()> {
        nic.quiesce(How::Point, |_| ());
        let (began, mut burst) = (Instant::now(), Burst::new());
        while began.elapsed() < PATIENCE {
            if nic.receive(&mut burst)? > 0 {
                self.send_back(nic, &mut burst)?;
            } else if nic.is_quiet() {
                self.lease_page.words[STOPPED_AT].store(now_ns(), Relaxed);
                if nic.leave()? {
                    self.lease_page.words[LEFT].store(nic.left().0, Relaxed);
                    return Ok(());
                }
            }
        }
        Err("the card does not stop".into())
    }

    fn send_back(&self, nic: &mut Card, burst: &mut Burst) -> Fallible<()> {
        let relays = u32::try_from(self.lease_page.word(RELAYS))?;
        let came = burst.len() as u64;
        for frame in burst.iter_mut() {
            turn_round(frame.slot.bytes_mut(), relays);
        }
        while !burst.is_empty() {
            nic.transmit(burst)?;
        }
        self.lease_page.words[BACK].store(self.lease_page.word(BACK) + came, Relaxed);
        Ok(())
    }

    /// Drives the card for `time`; sleeps while no frame comes.
    fn drive(&self, nic: &mut Card, time: Duration) -> Fallible<()> {
        let began = Instant::now();
        let mut burst = Burst::new();
        while began.elapsed() < time {
            if nic.receive(&mut burst)? > 0 {
                self.send_back(nic, &mut burst)?;
            } else if nic.arm()? == Armed::Idle {
                readable(nic.fd(), NAP)?;
            }
        }
        Ok(())
    }
}

/// Takes the card from the kernel's driver.
fn open() -> Fallible<Vfio> {
    let device = of_the_card("/sys/bus/pci/devices", "device")?.ok_or("the guest has no 82574L")?;
    let address = device.file_name().and_then(|name| name.to_str()).ok_or("the card has no address")?.to_owned();
    fs::write(device.join("driver_override"), "vfio-pci")?;
    if device.join("driver").exists() {
        fs::write(device.join("driver/unbind"), &address)?;
    }
    fs::write("/sys/bus/pci/drivers_probe", &address)?;
    Ok(Vfio::open(address.parse::<Address>()?)?)
}

/// Access to the card, as descriptors; with `keep`, also to its memory.
struct Way(Vec<OwnedFd>);

impl Way {
    fn of(nic: &Card, memory: Option<Parts>) -> Fallible<Self> {
        let Twin { descriptors: Descriptors { container, group, device }, vectors, .. } = nic.bus().twin()?;
        let memory = memory.into_iter().flat_map(|Parts { rings, frames, ledger }| [rings, frames, ledger]);
        Ok(Way([container, group, device].into_iter().chain(memory).chain(vectors).collect()))
    }

    /// Opens the bus alone; `memory` is the number of memory descriptors to skip.
    fn bus(&self, memory: usize) -> Fallible<Vfio> {
        let mut fds = self.0.iter().map(OwnedFd::try_clone);
        let mut next =
            || fds.next().ok_or("a descriptor is missing")?.map_err(Box::<dyn std::error::Error + Send + Sync>::from);
        let descriptors = Descriptors { container: next()?, group: next()?, device: next()? };
        let vectors = fds.skip(memory).collect::<Result<_, _>>()?;
        Ok(Vfio::from_twin(Twin { descriptors, vectors, intx: None })?)
    }

    fn open(&self) -> Fallible<(Vfio, NicMemory)> {
        let mut fds = self.0.iter().skip(OF_VFIO).map(OwnedFd::try_clone);
        let mut next =
            || fds.next().ok_or("a descriptor is missing")?.map_err(Box::<dyn std::error::Error + Send + Sync>::from);
        let parts = Parts { rings: next()?, frames: next()?, ledger: next()? };
        Ok((self.bus(OF_MEMORY)?, NicMemory::prepare(parts, &MEMORY)?))
    }
}

/// Makes one of the two processes. With `repoint` a process has one memory, so the process that drives first cannot
/// prepare its next turn until this one is over.
fn worker(
    (us, method, drives): (NonZeroU32, Method, bool),
    way: &Way,
    lease_page: LeasePage,
    [ours, theirs]: [OwnedFd; 2],
) -> Fallible<Worker> {
    let (next, unused) = match method {
        Method::Keep => {
            let (bus, memory) = way.open()?;
            (Some(Next::InPlace(Box::new(Card::prepare(bus, memory)?))), Some(way.open()?))
        }
        Method::Repoint if drives => (None, None),
        Method::Repoint => {
            let at = MEMORY.arena_at() + SLOTS.len() as u64;
            let memory = NicMemory::create(SLOTS, MEMORY.rings_len, at)?;
            (Some(Next::apart(way.bus(0)?, memory)?), None)
        }
    };
    Ok(Worker { method, us, tenure: None, lease_page, ours, theirs, next, replaced: None, unused })
}

/// The other process; dropping this kills it.
struct Other(Child);

impl Drop for Other {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts the other process and waits until it is ready.
fn start_other(method: Method, way: &Way, lease_page: &LeasePage, eventfds: [&OwnedFd; 2]) -> Fallible<Other> {
    let (mut ours, theirs) = UnixStream::pair()?;
    let program = std::env::current_exe()?;
    let mut command = Command::new(program);
    command.args(["other", if method == Method::Keep { "handover" } else { "repoint" }]);
    let other = Other(command.stdin(Stdio::from(OwnedFd::from(theirs))).spawn()?);
    let fds = [lease_page.region.fd(), eventfds[0].as_fd(), eventfds[1].as_fd()];
    let fds: Vec<_> = fds.into_iter().chain(way.0.iter().map(AsFd::as_fd)).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(PASSED + VECTORS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err("the card has more vectors than were thought of".into());
    }
    rustix::net::sendmsg(&ours, &[IoSlice::new(b"!")], &mut control, SendFlags::empty())?;
    ours.set_read_timeout(Some(PATIENCE))?;
    ours.read_exact(&mut [0]).map_err(|error| format!("the other process does not get ready: {error}"))?;
    Ok(other)
}

/// Runs as the other process: takes its turns until they are over.
pub fn other(method: Method) -> Fallible<()> {
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    let mut stdin = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(PASSED + VECTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    rustix::net::recvmsg(&stdin, &mut [IoSliceMut::new(&mut [0])], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let messages = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    let mut fds = messages.flatten();
    let mut next = || fds.next().ok_or("a descriptor is missing");
    let (lease_page, ours, theirs) = (LeasePage::over(Region::adopt(next()?)?)?, next()?, next()?);
    let who = (NonZeroU32::MIN.saturating_add(1), method, false);
    let mut worker = worker(who, &Way(fds.collect()), lease_page, [ours, theirs])?;
    stdin.write_all(b"!")?;
    while let Some(mut nic) = worker.take()? {
        worker.drive(&mut nic, BETWEEN)?;
        worker.give(nic)?;
    }
    Ok(())
}

/// Relays the card `count` times under the bench's stream.
pub fn relays(method: Method, count: u32) -> Fallible<()> {
    let memory = NicMemory::create(SLOTS, MEMORY.rings_len, MEMORY.rings_at)?;
    let parts = if method == Method::Keep { Some(memory.parts()?) } else { None };
    let mut nic = Card::start(open()?, memory, &options())?;
    wait("the link", || Ok(nic.link()? != Link::Down))?;
    let way = Way::of(&nic, parts)?;
    let eventfd = || rustix::event::eventfd(0, EventfdFlags::CLOEXEC);
    let (ours, theirs) = (eventfd()?, eventfd()?);
    let lease_page = LeasePage::over(Region::create("guest-relay-lease_page", LEASE_PAGE_LEN, Pages::Small)?)?;
    let other = start_other(method, &way, &lease_page, [&theirs, &ours])?;
    let us = NonZeroU32::MIN;
    let mut worker = worker((us, method, true), &way, lease_page, [ours, theirs])?;
    worker.tenure = Some(worker.lease_page.lease.take(worker.lease_page.lease.tenure(), us)?);
    println!("{SAYS}ready");
    let began = Instant::now();
    while worker.lease_page.word(BACK) == 0 {
        if began.elapsed() > PATIENCE {
            return Err("no stream came".into());
        }
        worker.drive(&mut nic, NAP)?;
    }
    worker.drive(&mut nic, AT_REST)?;
    while worker.lease_page.word(RELAYS) < u64::from(count) {
        worker.give(nic)?;
        nic = worker.take()?.ok_or("the other process does not end the turns")?;
        worker.drive(&mut nic, BETWEEN)?;
    }
    worker.lease_page.words[OVER].store(1, Relaxed);
    rustix::io::write(&worker.theirs, &1_u64.to_ne_bytes())?;
    println!("{SAYS}done");
    // Wait for the end of the stream.
    let mut before = 0;
    while std::mem::replace(&mut before, worker.lease_page.word(BACK)) != worker.lease_page.word(BACK) {
        worker.drive(&mut nic, SILENCE)?;
    }
    let relays = usize::try_from(worker.lease_page.word(RELAYS))?;
    for pauses in worker.lease_page.words[PAUSES..PAUSES + relays.min(PAUSES_MAX)].chunks(16) {
        let pauses: Vec<_> = pauses.iter().map(|pause| pause.load(Relaxed).to_string()).collect();
        println!("{SAYS}pauses {}", pauses.join(" "));
    }
    nic.park()?;
    drop(other);
    // QEMU 7.2 exits if vectors are switched off within 128 µs of an interrupt.
    std::thread::sleep(Duration::from_millis(5));
    Ok(())
}
