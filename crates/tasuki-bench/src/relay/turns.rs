//! Two workers that take turns at driving a NIC: the memory that they share, the second one's start, and the turns.
//!
//! Both workers run on one CPU, the card and its wire on the other. The waiting worker sleeps; the giver wakes it.

use std::num::NonZeroU32;
use std::os::fd::{AsFd, OwnedFd};
use std::process::Stdio;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::event::EventfdFlags;
use tasuki_net::nic::bundle::{self, Fds};
use tasuki_net::nic::bus::VfioUser;
use tasuki_net::nic::e1000e::E1000e;
use tasuki_net::nic::{InPlace, MemoryLayout, Nic, NicMemory, Parts};
use tasuki_net::port::{Burst, Port};
use tasuki_shm::clock::now_ns;
use tasuki_shm::lease::{Lease, Tenure};
use tasuki_shm::line::Line;
use tasuki_shm::region::{PAGE_LEN, Pages, Region, Span};

use super::{repoint, worker};
use crate::cpus;
use crate::nic::driver::{self, turn_round};
use crate::nic::trial::{Ask, Control, Say, Trial};
use crate::orders::Orders;
use crate::program::Program;
use crate::sample::Sample;

pub(super) type Card = E1000e<VfioUser>;

/// Descriptors in a ring: the driver's default. A taker looks at each posted one.
pub(super) const RING: u16 = 256;

/// Interval between two relays.
const BETWEEN: Duration = Duration::from_millis(5);

/// Frames that have not come so long after the last one are lost.
pub(super) const PATIENCE: Duration = Duration::from_millis(200);

/// Traffic on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Traffic {
    /// As many frames as a gigabit carries.
    Line,
    /// One frame a millisecond, as in the paper of S1.
    Paper,
}

impl Traffic {
    /// Returns the number of frames of this size in a second.
    pub(super) fn rate(self, size: u32) -> u64 {
        match self {
            Traffic::Line => driver::line_rate(size),
            Traffic::Paper => 1000,
        }
    }
}

/// Memory that the workers share: the lease and a few words.
pub(super) struct LeasePage {
    pub(super) lease: Lease<Span<Line>>,
    pub(super) words: Span<AtomicU64>,
    region: Region,
}

/// Indices of words in the lease page.
const RECEIVED: usize = 8;
pub(super) const RELEASED_AT: usize = 16;
const STOP: usize = 24;
/// Number of relays, and the pause of each relay in ns, in order.
pub(super) const RELAYS: usize = 32;
const PAUSES: usize = 40;
const PAUSES_MAX: usize = 4096;
const WORDS: usize = PAUSES + PAUSES_MAX;

impl LeasePage {
    fn over(region: Region) -> Result<Self> {
        Ok(LeasePage { lease: Lease::new(region.span(0, 1)?), words: region.span(0, WORDS)?, region })
    }

    fn new() -> Result<Self> {
        Self::over(Region::create("tasuki-bench lease page", (8 * WORDS).next_multiple_of(PAGE_LEN), Pages::Small)?)
    }
}

/// One worker's part of the turns.
pub(super) struct Turns {
    pub(super) us: NonZeroU32,
    /// The lease, while we hold it.
    tenure: Option<Tenure>,
    pub(super) lease_page: LeasePage,
    ours: OwnedFd,
    theirs: OwnedFd,
}

impl Turns {
    /// Waits for our turn and takes the lease. Returns false if there is no further turn.
    pub(super) fn wait(&mut self) -> Result<bool> {
        wait(&self.ours)?;
        if self.lease_page.words[STOP].load(Relaxed) == 1 {
            return Ok(false);
        }
        let tenure = self.lease_page.lease.tenure();
        ensure!(tenure.holder.is_none(), "a worker was woken, and no worker has passed the lease");
        self.tenure = Some(self.lease_page.lease.take(tenure, self.us)?);
        Ok(true)
    }

    /// Has a first look at the card, which takes all frames that have come meanwhile, and notes the end of the pause.
    pub(super) fn has_taken(&self, nic: &mut Card) -> Result<()> {
        let words = &self.lease_page.words;
        let mut burst = Burst::new();
        nic.receive(&mut burst)?;
        let took = now_ns().saturating_sub(words[RELEASED_AT].load(Relaxed));
        let relay = words[RELAYS].load(Relaxed);
        words[PAUSES + usize::try_from(relay)? % PAUSES_MAX].store(took, Relaxed);
        words[RELAYS].store(relay + 1, Relaxed);
        self.send_back(nic, &mut burst)?;
        Ok(())
    }

    /// Passes the lease, and wakes the other worker.
    pub(super) fn pass(&mut self) -> Result<()> {
        let ours = self.tenure.take().context("only the holder of the lease passes it")?;
        self.lease_page.lease.pass(ours)?;
        self.wake()
    }

    fn wake(&self) -> Result<()> {
        rustix::io::write(&self.theirs, &1_u64.to_ne_bytes()).context("the other worker cannot be woken")?;
        Ok(())
    }

    /// Sends received frames back and returns their number.
    pub(super) fn echo(&self, nic: &mut Card) -> Result<u64> {
        let mut burst = Burst::new();
        nic.receive(&mut burst)?;
        self.send_back(nic, &mut burst)
    }

    fn send_back(&self, nic: &mut Card, burst: &mut Burst) -> Result<u64> {
        let came = burst.len() as u64;
        burst.iter_mut().for_each(turn_round);
        while !burst.is_empty() {
            nic.transmit(burst)?;
        }
        if came > 0 {
            self.lease_page.words[RECEIVED].fetch_add(came, Relaxed);
        }
        Ok(came)
    }
}

/// A worker that takes turns, and its way of taking the card over.
pub(super) trait TakesTurns {
    fn turns(&self) -> &Turns;

    /// Waits for our turn and takes the card over. Returns `None` if there is no further turn.
    fn take(&mut self) -> Result<Option<Card>>;

    /// Hands the card over.
    fn give(&mut self, nic: Card) -> Result<()>;

    /// Returns whether the other worker is ready for the turn after this one. If not, it has work to do on this CPU.
    fn is_other_ready(&self) -> bool {
        true
    }

    /// Adds notes of its own to a sample of so many relays.
    fn note(&self, _relays: u64, _sample: &mut Sample) {}
}

/// Drives the card until the other worker's turn is due and it is ready, or until `done`. Returns whether `done` ended
/// it.
fn drive(worker: &impl TakesTurns, nic: &mut Card, mut done: impl FnMut(bool) -> Result<bool>) -> Result<bool> {
    let since = Instant::now();
    let mut looks = 0_u32;
    loop {
        let idle = worker.turns().echo(nic)? == 0;
        looks += 1;
        if idle && done(looks.is_multiple_of(64))? {
            return Ok(true);
        }
        let is_other_ready = worker.is_other_ready();
        if idle && !is_other_ready {
            std::thread::yield_now();
        }
        if looks.is_multiple_of(16) && since.elapsed() > BETWEEN && is_other_ready {
            return Ok(false);
        }
    }
}

/// Waits for a wake-up without a limit; the bench ends a worker that waits in vain.
fn wait(eventfd: &OwnedFd) -> Result<()> {
    loop {
        match rustix::io::read(eventfd, &mut [0; 8]) {
            Ok(_) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno).context("an eventfd cannot be read"),
        }
    }
}

/// Access to the card and its memory, for opening more than once: one to drive with, and one to prepare meanwhile.
pub(super) struct Ways {
    text: bundle::Text,
    /// Whether each worker has memory of its own, at which it points the card.
    repoint: bool,
    fds: Vec<OwnedFd>,
}

impl Ways {
    fn of(nic: &Card, (parts, layout): (Parts, MemoryLayout), repoint: bool) -> Result<Self> {
        let (text, fds) = bundle::pack(nic.bus(), parts, &layout)?;
        Ok(Ways { text, repoint, fds })
    }

    pub(super) fn open(&self) -> Result<(VfioUser, NicMemory)> {
        let fds = self.fds.iter().map(OwnedFd::try_clone).collect::<std::io::Result<Vec<_>>>()?;
        Ok(bundle::unpack(&self.text, Fds::new(fds))?)
    }
}

/// Starts the second worker.
fn start_other(ways: &Ways, lease_page: &LeasePage, eventfds: [&OwnedFd; 2], cpu: usize) -> Result<Program> {
    let (other, ours) = Program::in_role(&["take-turns"], Stdio::inherit())?;
    let mut fds = ways.fds.iter().map(OwnedFd::try_clone).collect::<std::io::Result<Vec<_>>>()?;
    fds.push(lease_page.region.fd().try_clone_to_owned()?);
    fds.extend(eventfds.into_iter().map(OwnedFd::try_clone).collect::<std::io::Result<Vec<_>>>()?);
    Orders::new(0, 0, cpu, std::path::PathBuf::new(), String::new()).send(ours.as_fd(), &fds)?;
    let control = Control::new(ours);
    control.say(&(&ways.text, ways.repoint))?;
    // Wait until the worker says that it is ready.
    control.hear::<()>()?;
    Ok(other)
}

/// Plays the second worker, which takes its turns until the first one ends them.
pub fn take_turns() -> Result<()> {
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    let stdin = std::io::stdin().as_fd().try_clone_to_owned()?;
    let mut orders = Orders::receive(stdin.as_fd())?;
    cpus::pin(orders.cpu)?;
    let control = Control::new(stdin);
    let (text, repoint): (bundle::Text, bool) = control.hear()?;
    let fds = std::iter::from_fn(|| orders.next_fd().ok()).collect::<Vec<_>>();
    let [fds @ .., lease_page, ours, theirs] = &fds[..] else { bail!("descriptors are missing") };
    let ways = Ways { text, repoint, fds: fds.iter().map(OwnedFd::try_clone).collect::<std::io::Result<_>>()? };
    let lease_page = LeasePage::over(Region::adopt(lease_page.try_clone()?)?)?;
    let us = NonZeroU32::MIN.saturating_add(1);
    let turns = Turns { us, tenure: None, lease_page, ours: ours.try_clone()?, theirs: theirs.try_clone()? };
    if ways.repoint {
        follow(repoint::Owner::second(turns, &ways)?, &control)
    } else {
        follow(worker::Worker::second(turns, &ways)?, &control)
    }
}

fn follow(mut worker: impl TakesTurns, control: &Control) -> Result<()> {
    control.say(&())?;
    while let Some(mut nic) = worker.take()? {
        drive(&worker, &mut nic, |_| Ok(false))?;
        worker.give(nic)?;
    }
    Ok(())
}

/// Plays the first worker: makes the card change hands some `orders.calls` times under traffic; times each relay. The
/// traffic lasts for `percent` of that many intervals.
pub(super) fn lead<W: TakesTurns>(
    mut orders: Orders,
    traffic: Traffic,
    (repoint, percent): (bool, u64),
    begin: impl FnOnce(Turns, &Ways) -> Result<W>,
) -> Result<Sample> {
    let (mut nic, parts, layout) = driver::start_shared(orders.next_fd()?, RING)?;
    let control = Control::new(orders.next_fd()?);
    let size = control.size()?;
    let ways = Ways::of(&nic, (parts, layout), repoint)?;
    let eventfd = || rustix::event::eventfd(0, EventfdFlags::CLOEXEC);
    let (ours, theirs) = (eventfd()?, eventfd()?);
    let lease_page = LeasePage::new()?;
    let _other = start_other(&ways, &lease_page, [&theirs, &ours], orders.cpu)?;
    let us = NonZeroU32::MIN;
    let tenure = Some(lease_page.lease.take(lease_page.lease.tenure(), us)?);
    let mut worker = begin(Turns { us, tenure, lease_page, ours, theirs }, &ways)?;

    let rate = traffic.rate(size);
    // Long enough for that many relays, and a little more.
    let millis = orders.calls * u64::try_from(BETWEEN.as_millis())? * percent / 100 + 50;
    let count = rate * millis / 1000;
    control.say(&Ask::Begin(Trial { count, size, rate: Some(rate), pauses: true }))?;
    let (mut sent, mut last, mut before) = (false, Instant::now(), 0);
    loop {
        let over = drive(&worker, &mut nic, |look| {
            if look {
                sent = sent || matches!(control.heard()?, Some(Say::Sent));
            }
            Ok(sent)
        })?;
        if over {
            // Frames still under way come to us.
            let received = worker.turns().lease_page.words[RECEIVED].load(Relaxed);
            if received > before {
                (before, last) = (received, Instant::now());
            }
            if before >= count || last.elapsed() > PATIENCE {
                break;
            }
            continue;
        }
        worker.give(nic)?;
        nic = worker.take()?.context("the second worker does not end the turns")?;
    }
    let words = &worker.turns().lease_page.words;
    words[STOP].store(1, Relaxed);
    worker.turns().wake()?;
    let outcome = control.end()?;
    let mut sample = Sample::new();
    let relays = words[RELAYS].load(Relaxed);
    ensure!(relays > 0, "the card never changed hands");
    for pause in &words[PAUSES..PAUSES + usize::try_from(relays)?.min(PAUSES_MAX)] {
        sample.record(Duration::from_nanos(pause.load(Relaxed)));
    }
    sample.note("relays", relays as f64);
    sample.note("lost", (count - outcome.back) as f64);
    sample.note("wrong", outcome.wrong as f64);
    sample.note("gap", outcome.longest_gap as f64);
    sample.note("pauses", outcome.pauses as f64);
    worker.note(relays, &mut sample);
    nic.park()?;
    Ok(sample)
}
