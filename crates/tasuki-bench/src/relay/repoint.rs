//! Two owners of a NIC that take turns, each with memory of its own. While the link partner pauses, the taker points
//! the card at its own rings.
//!
//! Both owners run on one CPU, the card and its wire on the other. A pause lasts from the giver's last burst to the
//! taker's first look at its rings, after which the card has executed all writes of the taker.

use std::num::NonZeroU32;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::event::EventfdFlags;
use tasuki_net::nic::bus::{Iova, VfioUser};
use tasuki_net::nic::e1000e::Ready;
use tasuki_net::nic::{How, Left, Nic, NicMemory, NicOptions, Repoint};
use tasuki_net::port::{Burst, Port};
use tasuki_shm::arena::Geometry;
use tasuki_shm::lease::Tenure;

use super::worker::{
    BETWEEN, Card, LeasePage, PATIENCE, PAUSES, PAUSES_MAX, RECEIVED, RELAYS, RELEASED_AT, RING, STOP, Ways, now_ns,
    start_other, wait,
};
use crate::nic::driver::{self, turn_round};
use crate::nic::trial::{Ask, Control, Say, Trial};
use crate::orders::Orders;
use crate::sample::Sample;

/// Words of the lease page: the number of turns that each of the two owners is ready for, and the total time from
/// quiescing the card to stopping it.
const READY: [usize; 3] = [0, 9, 10];
const QUIESCED: usize = 11;
/// Word of the lease page that says how the giver left the card.
const LEFT: usize = 17;

fn options() -> NicOptions {
    NicOptions { ring: RING, ..NicOptions::default() }
}

/// Makes memory at an address range that only this owner uses.
fn memory(us: NonZeroU32) -> Result<NicMemory> {
    let at = Iova(u64::from(us.get() + 1) << 32);
    Ok(NicMemory::create(Geometry { slot_len: 4096, count: 2 * u32::from(RING) + 128 }, 1 << 20, at)?)
}

/// One of the two owners.
struct Owner {
    us: NonZeroU32,
    /// The lease, while we hold it.
    tenure: Option<Tenure>,
    lease_page: LeasePage,
    ours: OwnedFd,
    theirs: OwnedFd,
    ready: Option<Ready<VfioUser>>,
    /// Number of turns that we have been ready for.
    turns: u64,
    /// Our replaced driver of the last turn.
    replaced: Option<Card>,
}

impl Owner {
    fn new(us: NonZeroU32, lease_page: LeasePage, [ours, theirs]: [OwnedFd; 2]) -> Self {
        Owner { us, tenure: None, lease_page, ours, theirs, ready: None, turns: 0, replaced: None }
    }

    /// Prepares a turn while the other owner drives.
    fn prepare(&mut self, bus: VfioUser, memory: NicMemory) -> Result<()> {
        self.ready = Some(Card::prepare_rings(bus, memory, &options(), How::Point, Iova(1 << 32))?);
        self.turns += 1;
        self.lease_page.words[READY[self.us.get() as usize]].store(self.turns, Relaxed);
        Ok(())
    }

    /// Prepares, waits for our turn and takes the card over. Returns `None` if there is no further turn.
    fn take(&mut self) -> Result<Option<Card>> {
        if let Some(replaced) = self.replaced.take() {
            let (mut bus, memory) = replaced.stand_down();
            memory.unmap(&mut bus)?;
            self.prepare(bus, memory)?;
        }
        wait(&self.ours)?;
        if self.lease_page.words[STOP].load(Relaxed) == 1 {
            return Ok(None);
        }
        let tenure = self.lease_page.lease.tenure();
        ensure!(tenure.holder.is_none(), "an owner was woken, and no owner has passed the lease");
        self.tenure = Some(self.lease_page.lease.take(tenure, self.us)?);
        let mut nic = {
            let ready = self.ready.take().context("an owner takes over only when it is ready")?;
            Card::repoint(ready, Left(self.lease_page.words[LEFT].load(Relaxed)))?
        };
        let mut burst = Burst::new();
        nic.receive(&mut burst)?;
        let took = now_ns().saturating_sub(self.lease_page.words[RELEASED_AT].load(Relaxed));
        let relay = self.lease_page.words[RELAYS].load(Relaxed);
        self.lease_page.words[PAUSES + usize::try_from(relay)? % PAUSES_MAX].store(took, Relaxed);
        self.lease_page.words[RELAYS].store(relay + 1, Relaxed);
        self.send_back(&mut nic, &mut burst)?;
        Ok(Some(nic))
    }

    /// Hands the card over.
    fn give(&mut self, mut nic: Card) -> Result<()> {
        let relays = self.lease_page.words[RELAYS].load(Relaxed);
        let began = Instant::now();
        nic.quiesce(How::Point, |_| ());
        loop {
            while !(self.echo(&mut nic)? == 0 && nic.is_quiet()) {}
            self.lease_page.words[RELEASED_AT].store(now_ns(), Relaxed);
            if nic.leave()? {
                break;
            }
        }
        self.lease_page.words[LEFT].store(nic.left().0, Relaxed);
        let ours = self.tenure.take().context("only the holder of the lease passes it")?;
        self.lease_page.lease.pass(ours)?;
        rustix::io::write(&self.theirs, &1_u64.to_ne_bytes()).context("the other owner cannot be woken")?;
        let quiesced = u64::try_from(began.elapsed().as_nanos())?;
        // Cleaning up for the next turn must not delay this one: wait until the taker has the card.
        while self.lease_page.words[RELAYS].load(Relaxed) == relays && began.elapsed() < PATIENCE {
            std::thread::yield_now();
        }
        self.lease_page.words[QUIESCED].fetch_add(quiesced, Relaxed);
        self.replaced = Some(nic);
        Ok(())
    }

    /// Sends received frames back and returns their number.
    fn echo(&self, nic: &mut Card) -> Result<u64> {
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

    /// Returns whether the other owner is ready for the turn after this one.
    fn is_other_ready(&self) -> bool {
        let other = 3 - self.us.get() as usize;
        let relays = self.lease_page.words[RELAYS].load(Relaxed);
        // The second owner has the first turn.
        self.lease_page.words[READY[other]].load(Relaxed) > relays / 2
    }

    /// Drives the card until the other owner's turn is due and it is ready, or until `done`. Returns whether `done`
    /// ended it.
    fn drive(&self, nic: &mut Card, mut done: impl FnMut(bool) -> Result<bool>) -> Result<bool> {
        let since = Instant::now();
        let mut looks = 0_u32;
        loop {
            let idle = self.echo(nic)? == 0;
            looks += 1;
            if idle && done(looks.is_multiple_of(64))? {
                return Ok(true);
            }
            if idle {
                // The other owner has work to do on this CPU.
                std::thread::yield_now();
            }
            if looks.is_multiple_of(16) && since.elapsed() > BETWEEN && self.is_other_ready() {
                return Ok(false);
            }
        }
    }
}

/// Plays the second owner, which takes its turns until the first one ends them.
pub fn take_turns(ways: &Ways, lease_page: LeasePage, eventfds: [OwnedFd; 2], control: &Control) -> Result<()> {
    let us = NonZeroU32::MIN.saturating_add(1);
    let mut owner = Owner::new(us, lease_page, eventfds);
    let (bus, _) = ways.open()?;
    owner.prepare(bus, memory(us)?)?;
    control.say(&())?;
    while let Some(mut nic) = owner.take()? {
        owner.drive(&mut nic, |_| Ok(false))?;
        owner.give(nic)?;
    }
    Ok(())
}

/// Makes the card change hands `orders.calls` times at line rate; times each relay.
pub fn handovers(mut orders: Orders) -> Result<Sample> {
    let (mut nic, parts, layout) = driver::start_shared(orders.next_fd()?, RING)?;
    let control = Control::new(orders.next_fd()?);
    let Say::Size(size) = control.hear()? else { anyhow::bail!("the card did not begin with the size of its frames") };
    let ways = Ways::of(&nic, (parts, layout), true)?;
    let eventfd = || rustix::event::eventfd(0, EventfdFlags::CLOEXEC);
    let (ours, theirs) = (eventfd()?, eventfd()?);
    let lease_page = LeasePage::new()?;
    let _other = start_other(&ways, &lease_page, [&theirs, &ours], orders.cpu)?;
    let us = NonZeroU32::MIN;
    let mut owner = Owner::new(us, lease_page, [ours, theirs]);
    owner.tenure = Some(owner.lease_page.lease.take(owner.lease_page.lease.tenure(), us)?);

    let rate = driver::line_rate(size);
    let millis = orders.calls * u64::try_from(BETWEEN.as_millis())? * 2 + 50;
    let count = rate * millis / 1000;
    control.say(&Ask::Begin(Trial { count, size, rate: Some(rate), pauses: true }))?;
    let (mut sent, mut last, mut before) = (false, Instant::now(), 0);
    loop {
        let over = owner.drive(&mut nic, |look| {
            if look {
                sent = sent || matches!(control.heard()?, Some(Say::Sent));
            }
            Ok(sent)
        })?;
        if over {
            // Frames still under way come to us.
            let received = owner.lease_page.words[RECEIVED].load(Relaxed);
            if received > before {
                (before, last) = (received, Instant::now());
            }
            if before >= count || last.elapsed() > PATIENCE {
                break;
            }
            continue;
        }
        owner.give(nic)?;
        nic = owner.take()?.context("the second owner does not end the turns")?;
    }
    owner.lease_page.words[STOP].store(1, Relaxed);
    rustix::io::write(&owner.theirs, &1_u64.to_ne_bytes())?;
    control.say(&Ask::End)?;
    let outcome = loop {
        if let Say::Outcome(outcome) = control.hear()? {
            break outcome;
        }
    };
    let mut sample = Sample::new();
    let relays = owner.lease_page.words[RELAYS].load(Relaxed);
    ensure!(relays > 0, "the card never changed hands");
    for pause in &owner.lease_page.words[PAUSES..PAUSES + usize::try_from(relays)?.min(PAUSES_MAX)] {
        sample.record(Duration::from_nanos(pause.load(Relaxed)));
    }
    sample.note("relays", relays as f64);
    sample.note("lost", (count - outcome.back) as f64);
    sample.note("wrong", outcome.wrong as f64);
    sample.note("gap", outcome.longest_gap as f64);
    sample.note("pauses", outcome.pauses as f64);
    sample.note("quiesced", owner.lease_page.words[QUIESCED].load(Relaxed) as f64 / relays as f64);
    nic.park()?;
    Ok(sample)
}
