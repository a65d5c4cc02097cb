//! The part of a driver that does not depend on the card: in which order it receives, sends and commits, how it keeps
//! its [ledger](super::ledger), and how it is replaced. The drivers that can be replaced while their card runs are a
//! [`Driver`] of their [`Card`]; a card's folder has only what is the card's own.
//!
//! ```text
//!   receive    commit what was handled ─► post its slots again ─► commit that ─► collect
//!   transmit   reap ─► commit, if that makes room ─► fill ─► commit
//!   commit     cursors of the rings ─► ledger ─► doorbells
//!   pick_up    read the ledger ─► lend its slots ─► undo ─► go on ─► make the ledger ours ─► ring every doorbell
//! ```
//!
//! # Rules
//!
//! - **T1** Received frames count as handled, and filled ones as given to the card, only with the commit that says so.
//!   Until then the rings stay as a successor needs them: a received frame's descriptor gets no other slot, and a sent
//!   frame's descriptor is not used again.
//! - **T2** The card is told nothing that is not committed. A driver that dies may have committed without telling the
//!   card, so its successor rings every doorbell once.
//!
//! `card.rs` says what a card's folder has; `in_place.rs` takes over from a driver while its card runs.

mod card;
mod in_place;

use std::fmt;
use std::os::fd::BorrowedFd;

use tasuki_shm::crash;

pub use self::card::{Assembly, Card, Handled, Receive, Transmit};
pub use self::in_place::Prepared;
use super::bus::{self, Bus as _};
use super::driver_state::{DriverState, InLedger as _};
use super::ledger::{CURSORS, GIVEN, QUEUES, TURNS};
use super::scrub::{CHUNK, Dirt};
use super::{Failed, Filter, Link, Mac, MemoryLayout, Nic, NicError, NicMemory, NicOptions, Scrub, loan};
use crate::capture::{Captures, Direction};
use crate::port::{Armed, BURST_MAX, Burst, Frame, Port, Transactional};

/// A running card, and all that drives it.
pub struct Driver<C: Card> {
    pub(super) bus: C::Bus,
    pub(super) memory: NicMemory,
    pub(super) card: C,
    pub(super) rx: C::Rx,
    pub(super) tx: C::Tx,
    pub(super) counts: C::Counts,
    /// Queue that is received from first; the queues take turns.
    first: usize,
    /// Which of a ring's pending frames is probably saved next.
    hint: u64,
    /// Number of frames that this driver and its predecessors gave to the card.
    given: u64,
    /// Number of commits, and the cursors of the last one.
    commits: u64,
    committed: [u64; CURSORS],
    /// Bytes that are not clean, if the memory is kept clean.
    dirt: Option<Dirt>,
    /// Captures of the passing frames, if any.
    captures: Option<Box<Captures>>,
}

impl<C: Card> fmt::Debug for Driver<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver").field("mac", &self.card.mac()).finish_non_exhaustive()
    }
}

/// Returns the number of frames that predecessors gave to the card, by the ledger.
fn given_so_far<S: DriverState>(memory: &NicMemory) -> u64 {
    let ledger = memory.ledger();
    match ledger.whose() == Some((S::KIND, S::VERSION)) {
        true => ledger.cursors()[GIVEN],
        false => 0,
    }
}

/// Returns the position of the first pending frame that is in `burst`, or else of the next frame to come.
#[cold]
fn first_of(ring: &impl Receive, burst: &Burst) -> u64 {
    let mut pending = ring.handled()..ring.handled() + ring.pending();
    let in_hand = |&position: &u64| burst.iter().any(|frame| ring.is_at(position, frame.slot.id()));
    pending.find(in_hand).unwrap_or(ring.next())
}

/// Returns a position as the ledger names the places of saved heads: pending frames are not so far apart.
#[expect(clippy::cast_possible_truncation, reason = "the low half")]
pub(super) fn short(position: u64) -> u32 {
    position as u32
}

impl<C: Card> Driver<C> {
    /// Makes a driver that has not entered its ledger yet.
    pub(super) fn new(bus: C::Bus, memory: NicMemory, parts: Assembly<C>, given: u64) -> Self {
        let Assembly { card, rx, tx, counts } = parts;
        let (first, hint, commits, committed) = (0, 0, 0, [0; CURSORS]);
        Driver { bus, memory, card, rx, tx, counts, first, hint, given, commits, committed, dirt: None, captures: None }
    }

    pub(super) fn failed(self, error: NicError) -> Failed<C::Bus> {
        Failed { error, bus: self.bus, memory: self.memory }
    }

    /// Gives the card the free slots, once all received frames are committed as handled: until then, a freed slot may
    /// be one that a successor needs (T1). Returns whether the card has as many as it takes.
    #[inline]
    pub(super) fn refill(&mut self) -> bool {
        if !self.card.takes_slots() || self.rx.as_ref().iter().any(|ring| ring.pending() > 0) {
            return true;
        }
        if self.dirt.is_some() {
            return self.refill_clean();
        }
        let mut is_full = true;
        for ring in self.rx.as_mut() {
            is_full &= ring.post(&self.memory, usize::MAX) == 0;
        }
        is_full
    }

    /// Like [`refill`](Self::refill), but wipes older frames from the slots first.
    fn refill_clean(&mut self) -> bool {
        let Some(dirt) = &mut self.dirt else { return true };
        for ring in self.rx.as_mut() {
            let mut room = ring.room();
            while room > 0 {
                let most = room.min(CHUNK);
                let clean = dirt.clean(self.memory.arena(), most);
                room = ring.post(&self.memory, clean);
                if clean < most {
                    return false;
                }
            }
        }
        true
    }

    /// Receives frames from each queue in turn.
    #[inline]
    fn collect(&mut self, burst: &mut Burst, most: usize) -> Result<usize, NicError> {
        let rings = self.rx.as_mut();
        let queues = rings.len();
        let full = burst.len().saturating_add(most).min(BURST_MAX);
        let mut frames = 0;
        for turn in 0..queues {
            let ring = &mut rings[(self.first + turn) % queues];
            match ring.receive(self.memory.arena(), burst, full, &mut self.counts) {
                Ok(count) => frames += count,
                // Deliver the frames from before the fault. The next call finds the fault again.
                Err(_) if frames > 0 => return Ok(frames),
                Err(error) => return Err(error),
            }
        }
        self.first ^= 1;
        Ok(frames)
    }

    /// Returns a position in each receive ring.
    #[inline]
    fn each(&self, position: impl Fn(&C::Ring) -> u64) -> Handled {
        let mut positions = [0; QUEUES];
        positions.iter_mut().zip(self.rx.as_ref()).for_each(|(of, ring)| *of = position(ring));
        positions
    }

    /// Gives the card all slots that were committed as handled. Pending frames stay pending.
    #[inline]
    fn rest(&mut self) -> Result<(), NicError> {
        if !self.refill() {
            C::starved(self)?;
        }
        crash::point("nic.posted");
        self.commit_sent();
        Ok(())
    }

    /// Ends a turn: commits all frames as handled but those in `burst`, and the frames given to the card.
    #[inline]
    pub(super) fn commit(&mut self, burst: &Burst) {
        let handled = match burst.is_empty() {
            true => self.each(C::Ring::next),
            false => self.each(|ring| first_of(ring, burst)),
        };
        self.commit_up_to(handled, 1);
    }

    /// Commits which slots the card has and which frames it has sent. Commits no frame as handled or given, and ends no
    /// turn.
    #[inline]
    pub(super) fn commit_sent(&mut self) {
        self.commit_up_to(self.each(C::Ring::handled), 0);
    }

    /// Commits the frames before `handled` as handled, and `turns` more turns; then tells the card (T2).
    #[inline]
    pub(super) fn commit_up_to(&mut self, handled: Handled, turns: u64) {
        let mut cursors = [0; CURSORS];
        C::cursors(&self.rx, &self.tx, handled, &mut cursors);
        // Nothing else changes without one of these.
        if (0..GIVEN).all(|word| cursors[word] == self.committed[word]) {
            return;
        }
        cursors[GIVEN] = self.given;
        cursors[TURNS] = self.committed[TURNS].wrapping_add(turns);
        self.committed = cursors;
        self.commits = self.commits.wrapping_add(1);
        self.memory.ledger().commit(self.commits, &cursors);
        crash::point("nic.committed");
        C::committed(self, handled);
    }

    /// Makes the ledger ours, when its seldom-changed data is right already.
    pub(super) fn enter_ledger(&mut self) {
        self.commits = self.memory.ledger().commits();
        // Make the next commit differ from any earlier one: it counts one turn more.
        self.committed = [u64::MAX; CURSORS];
        self.committed[TURNS] = self.memory.ledger().turns();
        self.commit(&Burst::new());
        self.sign_ledger();
    }

    /// Says in the ledger that this driver runs.
    pub(super) fn sign_ledger(&self) {
        self.memory.ledger().belongs(Some((C::DriverState::KIND, C::DriverState::VERSION)));
    }

    /// Writes the seldom-changed data to the ledger again, after a change.
    #[cold]
    pub(super) fn write_seldom(&self) {
        self.memory.ledger().write_seldom(self.to_driver_state().seldom());
    }

    /// Returns the state for a successor that goes on with the rings as they stand.
    pub(super) fn to_driver_state(&self) -> Box<C::DriverState> {
        let mut driver_state = C::DriverState::blank();
        C::write(self, &mut driver_state);
        driver_state
    }

    /// Does the last steps of a start.
    fn begin(&mut self, options: &NicOptions) -> Result<(), NicError> {
        C::begin(self, options)?;
        if options.scrub {
            self.keep_clean();
            // There is time now: later, only used slots are left to wipe.
            self.dirt.iter_mut().for_each(|dirt| dirt.wipe_free(self.memory.arena()));
        }
        // Only now, so that no frame has come in before the filter was set.
        self.refill();
        self.write_seldom();
        self.enter_ledger();
        C::ring_all(self);
        Ok(())
    }

    /// Goes on where a predecessor stopped, by its driver state or, if it wrote none, by its ledger.
    fn take_over(&mut self, driver_state: Option<&C::DriverState>) -> Result<(), NicError> {
        let was_halted = self.memory.ledger().is_halted();
        C::go_on(self, driver_state)?;
        match driver_state {
            _ if was_halted => self.write_seldom(),
            // Copy the giver's data: nothing of it has changed, and the peer waits.
            Some(driver_state) => self.memory.ledger().write_seldom(driver_state.seldom()),
            None => {}
        }
        self.enter_ledger();
        self.memory.ledger().halted(false);
        C::ring_all(self);
        Ok(())
    }

    /// Makes a driver with rings of its own, which another owner's card does not use yet: nobody drives by its ledger.
    pub(super) fn aside(bus: C::Bus, memory: NicMemory, parts: Assembly<C>) -> Self {
        let mut nic = Driver::new(bus, memory, parts, 0);
        nic.write_seldom();
        nic.enter_ledger();
        nic.memory.ledger().belongs(None);
        nic
    }

    /// Takes the memory away from the card, and returns it with the bus.
    pub(super) fn surrender(mut self) -> (C::Bus, NicMemory) {
        // Best effort: it may not be mapped any more.
        let _ = self.memory.unmap(&mut self.bus);
        self.memory.take_back();
        (self.bus, self.memory)
    }

    /// Takes a former owner's memory away from the card, and calls `between` after each step.
    pub(super) fn unmap_old(&mut self, old: &MemoryLayout, mut between: impl FnMut(&mut Self)) -> Result<(), NicError> {
        self.bus.hurry(true);
        let outcome = old.unmap_by(|at, len| {
            let unmapped = self.bus.unmap_dma(at, len);
            crash::point("nic.unmapped");
            between(self);
            unmapped
        });
        self.bus.hurry(false);
        Ok(outcome?)
    }

    /// Lets the card reach our memory again, before it comes back from the memory of a taker that has ended: the
    /// taker may have had any part of ours [forgotten](Self::unmap_old), and died before anybody heard that it drove.
    /// The card must use none of our memory, since parts that are still mapped are mapped anew.
    pub(super) fn reach_again(&mut self) -> Result<(), NicError> {
        self.bus.hurry(true);
        let mapped = self.memory.map_anew(&mut self.bus);
        self.bus.hurry(false);
        Ok(mapped?)
    }
}

impl<C: Card> Port for Driver<C> {
    type Fault = NicError;

    #[inline]
    fn receive_some(&mut self, burst: &mut Burst, most: usize) -> Result<usize, NicError> {
        self.commit(burst);
        self.rest()?;
        let before = burst.len();
        let frames = self.collect(burst, most)?;
        if let Some(dirt) = &mut self.dirt {
            dirt.mark(&burst[before..]);
        }
        crash::point("nic.collected");
        if let Some(captures) = &mut self.captures {
            captures.frames(Direction::Inbound, &burst[before..]);
        }
        if frames == 0 {
            C::idle(self);
        }
        Ok(frames)
    }

    #[inline]
    fn transmit(&mut self, burst: &mut Burst) -> Result<usize, NicError> {
        self.tx.reap(self.memory.arena())?;
        if self.tx.can_make_room(burst.len()) {
            self.commit_sent();
        }
        if let Some(dirt) = &mut self.dirt {
            dirt.mark(burst);
        }
        if let Some(captures) = &mut self.captures {
            captures.frames(Direction::Outbound, &burst[..self.tx.room().min(burst.len())]);
        }
        let taken = self.tx.transmit(&self.memory, burst, &mut self.counts, &mut self.given);
        crash::point("nic.filled");
        self.commit(burst);
        Ok(taken)
    }

    fn arm(&mut self) -> Result<Armed, NicError> {
        // The slots of sent frames are free to receive into.
        self.tx.reap(self.memory.arena())?;
        if self.rx.as_ref().iter().any(C::Ring::is_empty) {
            // A ring without slots wakes no driver, so commit all received frames as handled, even pending ones.
            self.commit(&Burst::new());
        }
        self.rest()?;
        // Empty it first: an interrupt from here on stays in it.
        bus::quiesce(self.card.fd())?;
        match C::arm(self)? {
            true => Ok(Armed::Busy),
            false => {
                C::idle(self);
                Ok(Armed::Idle)
            }
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.card.fd()
    }
}

impl<C: Card> Transactional for Driver<C> {
    fn station(&self) -> Mac {
        self.card.mac()
    }

    fn conclude(&mut self, in_hand: &Burst) {
        // The next receive or transmit reports a card that writes what it must not.
        let _ = self.tx.reap(self.memory.arena());
        self.commit(in_hand);
        self.withdraw();
    }

    fn withdraw(&mut self) {
        self.card.flush();
    }

    #[inline]
    fn save(&mut self, frame: &Frame) {
        for (queue, ring) in self.rx.as_ref().iter().enumerate() {
            let is_there = |i: &u64| ring.is_at(ring.handled() + i, frame.slot.id());
            let probably = Some(self.hint).filter(|i| *i < ring.pending() && is_there(i));
            if let Some(i) = probably.or_else(|| (0..ring.pending()).find(is_there)) {
                self.hint = i + 1;
                self.memory.ledger().save(queue, short(ring.handled() + i), &frame.slot);
                return;
            }
        }
    }

    fn takes(&mut self, burst: &Burst) -> bool {
        super::InPlace::room(self) >= burst.len()
    }

    fn turns(&self) -> u64 {
        self.committed[TURNS]
    }

    fn given(&self) -> u64 {
        self.given
    }
}

impl<C: Card> Nic for Driver<C> {
    type Bus = C::Bus;
    type DriverState = C::DriverState;

    fn start(mut bus: C::Bus, memory: NicMemory, options: &NicOptions) -> Result<Self, Failed<C::Bus>> {
        if let Err(error) = C::check(&mut bus, &memory, options) {
            return Err(Failed { error, bus, memory });
        }
        memory.ledger().clear();
        let mut nic = match C::reset(&mut bus, &memory, options) {
            Ok(parts) => Driver::new(bus, memory, parts, 0),
            Err(error) => {
                memory.withdraw(&mut bus);
                return Err(Failed { error, bus, memory });
            }
        };
        match nic.begin(options) {
            Ok(()) => Ok(nic),
            Err(error) => {
                nic.memory.withdraw(&mut nic.bus);
                Err(nic.failed(error))
            }
        }
    }

    fn resume(mut bus: C::Bus, memory: NicMemory, driver_state: &C::DriverState) -> Result<Self, Failed<C::Bus>> {
        let given = given_so_far::<C::DriverState>(&memory);
        let found = driver_state
            .check(&memory.layout())
            .and_then(|()| loan::check(&memory, driver_state.slots()))
            .and_then(|()| C::find(&mut bus, &memory, driver_state));
        let mut nic = match found {
            Ok(parts) => Driver::new(bus, memory, parts, given),
            Err(error) => return Err(Failed { error, bus, memory }),
        };
        match nic.take_over(Some(driver_state)).and_then(|()| nic.rest()) {
            Ok(()) => Ok(nic),
            Err(error) => Err(nic.failed(error)),
        }
    }

    fn park(mut self) -> Result<(C::Bus, NicMemory, C::DriverState), Failed<C::Bus>> {
        match C::stop(&mut self) {
            Ok(driver_state) => Ok((self.bus, self.memory, *driver_state)),
            Err(error) => Err(self.failed(error)),
        }
    }

    fn stand_down(self) -> (C::Bus, NicMemory) {
        (self.bus, self.memory)
    }

    fn mac(&self) -> Mac {
        self.card.mac()
    }

    fn link(&mut self) -> Result<Link, NicError> {
        self.card.link()
    }

    fn now_and_then(&mut self) {
        C::now_and_then(self);
    }

    fn set_filter(&mut self, filter: &Filter) -> Result<(), NicError> {
        C::set_filter(self, filter)
    }

    fn statistics(&mut self) -> Vec<(&'static str, u64)> {
        C::statistics(self)
    }
}

impl<C: Card> Scrub for Driver<C> {
    fn keep_clean(&mut self) {
        self.dirt = Some(Dirt::of(&self.memory));
    }

    fn wipe_free(&mut self) {
        // The next receive or transmit reports a card that writes what it must not.
        let _ = self.tx.reap(self.memory.arena());
        self.commit(&Burst::new());
        if let Some(dirt) = &mut self.dirt {
            dirt.wipe_free(self.memory.arena());
        }
    }

    fn wipe_rest(&mut self) -> bool {
        self.wipe_free();
        self.memory.ledger().wipe_saved();
        self.tx.is_empty()
    }
}
