//! Two workers that take turns at driving a NIC which runs on: each hands it over in place, and takes it over again.

use std::sync::atomic::Ordering::Relaxed;

use anyhow::{Context, Result};
use tasuki_net::nic::bus::VfioUser;
use tasuki_net::nic::{InPlace, Nic, NicMemory};
use tasuki_net::port::{Burst, Transactional};
use tasuki_shm::clock::now_ns;

use super::turns::{self, Card, RELEASED_AT, TakesTurns, Traffic, Turns, Ways};
use crate::orders::Orders;
use crate::sample::Sample;

/// One of the two workers.
pub(super) struct Worker {
    turns: Turns,
    /// Driver prepared for the next turn.
    next: Option<<Card as InPlace>::Prepared>,
    /// Remains of the last turn: the replaced driver, or its bus and memory.
    replaced: Option<Card>,
    retired: Option<(VfioUser, NicMemory)>,
}

impl Worker {
    fn first(turns: Turns, ways: &Ways) -> Result<Self> {
        let (bus, memory) = ways.open()?;
        Ok(Worker { turns, next: Some(Card::prepare(bus, memory)?), replaced: None, retired: None })
    }

    pub(super) fn second(turns: Turns, ways: &Ways) -> Result<Self> {
        // For the turn after the next.
        let retired = Some(ways.open()?);
        Ok(Worker { retired, ..Self::first(turns, ways)? })
    }
}

impl TakesTurns for Worker {
    fn turns(&self) -> &Turns {
        &self.turns
    }

    fn take(&mut self) -> Result<Option<Card>> {
        if !self.turns.wait()? {
            return Ok(None);
        }
        let prepared = self.next.take().context("a worker takes over only when it is ready")?;
        let mut nic = Card::pick_up(prepared)?;
        self.turns.has_taken(&mut nic)?;
        let replaced = self.replaced.take().map(Card::stand_down);
        if let Some((bus, memory)) = replaced.or_else(|| self.retired.take()) {
            self.next = Some(Card::prepare(bus, memory)?);
        }
        Ok(Some(nic))
    }

    fn give(&mut self, mut nic: Card) -> Result<()> {
        self.turns.lease_page.words[RELEASED_AT].store(now_ns(), Relaxed);
        nic.conclude(&Burst::new());
        self.turns.pass()?;
        // `take` stands it down, off the critical path.
        self.replaced = Some(nic);
        Ok(())
    }
}

/// Makes the card change hands `orders.calls` times under traffic; times each relay.
pub fn upgrades(orders: Orders, traffic: Traffic) -> Result<Sample> {
    turns::lead(orders, traffic, (false, 110), Worker::first)
}
