//! Two owners of a NIC that take turns, each with memory of its own. While the link partner pauses, the taker points
//! the card at its own rings.
//!
//! A pause lasts from the giver's last burst to the taker's first look at its rings, after which the card has executed
//! all writes of the taker.

use std::num::NonZeroU32;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use anyhow::{Context, Result};
use tasuki_net::nic::bus::{Iova, VfioUser};
use tasuki_net::nic::e1000e::Ready;
use tasuki_net::nic::{How, Left, Nic, NicMemory, NicOptions, Repoint};
use tasuki_shm::arena::Geometry;
use tasuki_shm::clock::now_ns;

use super::turns::{self, Card, PATIENCE, RELAYS, RELEASED_AT, RING, TakesTurns, Traffic, Turns, Ways};
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
pub(super) struct Owner {
    turns: Turns,
    ready: Option<Ready<VfioUser>>,
    /// Number of turns that we have been ready for.
    prepared: u64,
    /// Our replaced driver of the last turn.
    replaced: Option<Card>,
}

impl Owner {
    fn first(turns: Turns, _: &Ways) -> Result<Self> {
        Ok(Owner { turns, ready: None, prepared: 0, replaced: None })
    }

    pub(super) fn second(turns: Turns, ways: &Ways) -> Result<Self> {
        let mut owner = Self::first(turns, ways)?;
        let (bus, _) = ways.open()?;
        owner.prepare(bus, memory(owner.turns.us)?)?;
        Ok(owner)
    }

    /// Prepares a turn while the other owner drives.
    fn prepare(&mut self, bus: VfioUser, memory: NicMemory) -> Result<()> {
        self.ready = Some(Card::prepare_rings(bus, memory, &options(), How::Point, Iova(1 << 32))?);
        self.prepared += 1;
        self.turns.lease_page.words[READY[self.turns.us.get() as usize]].store(self.prepared, Relaxed);
        Ok(())
    }
}

impl TakesTurns for Owner {
    fn turns(&self) -> &Turns {
        &self.turns
    }

    fn take(&mut self) -> Result<Option<Card>> {
        if let Some(replaced) = self.replaced.take() {
            let (mut bus, memory) = replaced.stand_down();
            memory.unmap(&mut bus)?;
            self.prepare(bus, memory)?;
        }
        if !self.turns.wait()? {
            return Ok(None);
        }
        let ready = self.ready.take().context("an owner takes over only when it is ready")?;
        let mut nic = Card::repoint(ready, Left(self.turns.lease_page.words[LEFT].load(Relaxed)))?;
        self.turns.has_taken(&mut nic)?;
        Ok(Some(nic))
    }

    fn give(&mut self, mut nic: Card) -> Result<()> {
        let relays = self.turns.lease_page.words[RELAYS].load(Relaxed);
        let began = Instant::now();
        nic.quiesce(How::Point, |_| ());
        loop {
            while !(self.turns.echo(&mut nic)? == 0 && nic.is_quiet()) {}
            self.turns.lease_page.words[RELEASED_AT].store(now_ns(), Relaxed);
            if nic.leave()? {
                break;
            }
        }
        self.turns.lease_page.words[LEFT].store(nic.left().0, Relaxed);
        self.turns.pass()?;
        let quiesced = u64::try_from(began.elapsed().as_nanos())?;
        let words = &self.turns.lease_page.words;
        // Cleaning up for the next turn must not delay this one: wait until the taker has the card.
        while words[RELAYS].load(Relaxed) == relays && began.elapsed() < PATIENCE {
            std::thread::yield_now();
        }
        words[QUIESCED].fetch_add(quiesced, Relaxed);
        self.replaced = Some(nic);
        Ok(())
    }

    fn is_other_ready(&self) -> bool {
        let words = &self.turns.lease_page.words;
        let other = 3 - self.turns.us.get() as usize;
        // The second owner has the first turn.
        words[READY[other]].load(Relaxed) > words[RELAYS].load(Relaxed) / 2
    }

    fn note(&self, relays: u64, sample: &mut Sample) {
        sample.note("quiesced", self.turns.lease_page.words[QUIESCED].load(Relaxed) as f64 / relays as f64);
    }
}

/// Makes the card change hands some `orders.calls` times at line rate; times each relay.
pub fn handovers(orders: Orders) -> Result<Sample> {
    turns::lead(orders, Traffic::Line, (true, 200), Owner::first)
}
