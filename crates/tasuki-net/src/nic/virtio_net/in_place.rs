//! Replaces the driver of a device that goes on running.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::Relaxed;

use super::chains::{Order, not_a_slot};
use super::control::Control;
use super::driver_state::{Cursor, DriverState};
use super::setup::{Assembly, Cursors, Terms, cursors_of, interrupt, orders};
use super::transport::{Transport, Way};
use super::{RX_AVAILABLE, RX_HANDLED, TX_AVAILABLE, TX_HANDLED, VirtioNet};
use crate::capture::Captures;
use crate::nic::bus::Bus;
use crate::nic::driver_state::{DriverState as _, broken};
use crate::nic::ledger::TURNS;
use crate::nic::{Failed, InPlace, Mac, Nic, NicError, NicMemory};
use crate::port::{BURST_MAX, Burst, Frame, Transactional};

/// A successor that has everything but the driver state.
pub struct Prepared<B: Bus> {
    bus: B,
    memory: NicMemory,
    /// The registers, once a ledger or a driver state has given their places.
    transport: Option<Transport<B::Registers>>,
    interrupt: OwnedFd,
    /// Room for the ledger's contents: a taker has no time to allocate memory.
    driver_state: Box<DriverState>,
    orders: [Order; 2],
}

impl<B: Bus> std::fmt::Debug for Prepared<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Prepared").finish_non_exhaustive()
    }
}

impl<B: Bus> Prepared<B> {
    /// Reads the seldom changing part and the cursors into our driver state. Touches nothing else.
    fn read_ledger(&mut self) -> Result<(), NicError> {
        let (ledger, driver_state) = (self.memory.ledger(), &mut *self.driver_state);
        match ledger.whose() {
            None => return Err(broken("nobody drove the card", 0)),
            Some((DriverState::KIND, DriverState::VERSION)) => {}
            Some((kind, version)) => {
                return Err(NicError::OtherDriverState { kind, version, ours: DriverState::VERSION });
            }
        }
        driver_state.set_seldom(&ledger.read_seldom());
        let cursors = ledger.cursors();
        driver_state.rx_at = Cursor { available: cursors[RX_AVAILABLE], used: cursors[RX_HANDLED] };
        driver_state.tx_at = Cursor { available: cursors[TX_AVAILABLE], used: cursors[TX_HANDLED] };
        let layout = self.memory.layout();
        driver_state.head.check::<DriverState>(&layout)?;
        driver_state.check_seldom(&layout)?;
        let chains = driver_state.chains() as u64;
        driver_state.rx_at.check(chains)?;
        driver_state.tx_at.check(chains)
    }

    /// Opens the registers at `way`. Asks the bus for them only once.
    fn reach(&mut self, way: Way) -> Result<(), NicError> {
        if self.transport.as_ref().is_none_or(|transport| transport.way() != way) {
            self.transport = Some(Transport::open(&mut self.bus, way)?);
        }
        Ok(())
    }

    /// Makes the driver's ends of the queues at these cursors. Changes nothing.
    fn assemble(self, cursors: Cursors, terms: Terms, mac: Mac) -> Result<Ends<B>, Failed<B>> {
        let Prepared { bus, memory, transport, interrupt, driver_state, orders } = self;
        let assembled = transport
            .ok_or(NicError::Gone)
            .and_then(|transport| Assembly::new(&memory, (transport, interrupt, mac), terms, cursors, orders));
        match assembled {
            Ok(parts) => Ok(Ends { bus, memory, parts, driver_state }),
            Err(error) => Err(Failed { error, bus, memory }),
        }
    }

    /// Frees the slots lent so far; nothing else was touched.
    fn refused(self, error: NicError) -> Failed<B> {
        self.memory.take_back();
        Failed { error, bus: self.bus, memory: self.memory }
    }
}

/// A driver that is about to continue, and the ledger's contents.
struct Ends<B: Bus> {
    bus: B,
    memory: NicMemory,
    parts: Assembly<B::Registers>,
    driver_state: Box<DriverState>,
}

impl<B: Bus> Ends<B> {
    /// Lends the device what the ledger records at the cursors, and restores the frames that a predecessor has changed.
    fn lend(&self) -> Result<(), NicError> {
        let Assembly { rx, tx, .. } = &self.parts;
        rx.chains.lend(&self.memory)?;
        tx.chains.lend(&self.memory)?;
        rx.chains.undo(&self.memory, 0)
    }
}

impl<B: Bus> VirtioNet<B> {
    /// Continues from the ledger. A predecessor that died may have committed what it did not tell the device, so this
    /// rings the doorbells again. The predecessor may also have been about to reset the queues.
    fn take_over_ledger(&mut self) -> Result<(), NicError> {
        let given = self.given_so_far();
        self.rx.chains.adopt();
        self.tx.chains.adopt();
        self.control.iter_mut().for_each(Control::adopt);
        if self.memory.ledger().is_halted() {
            self.bring_all_back()?;
        }
        self.enter_ledger(given);
        self.memory.ledger().halted(false);
        self.ring_both();
        Ok(())
    }
}

impl<B: Bus> InPlace for VirtioNet<B> {
    type Prepared = Prepared<B>;

    fn bus(&self) -> &B {
        &self.bus
    }

    fn driver_state(&mut self, into: &mut DriverState) {
        self.conclude(&Burst::new());
        self.write_driver_state(into);
    }

    fn prepare(mut bus: B, memory: NicMemory) -> Result<Prepared<B>, Failed<B>> {
        memory.take_back();
        let interrupt = match interrupt(&mut bus) {
            Ok(interrupt) => interrupt,
            Err(error) => return Err(Failed { error: error.into(), bus, memory }),
        };
        let mut prepared =
            Prepared { bus, memory, transport: None, interrupt, driver_state: DriverState::blank(), orders: orders() };
        // If no driver runs yet, the ledger does not hold the registers' places; the successor finds them later.
        if prepared.read_ledger().is_ok()
            && let Err(error) = prepared.reach(prepared.driver_state.way)
        {
            return Err(prepared.refused(error));
        }
        Ok(prepared)
    }

    fn go_on(mut prepared: Prepared<B>, driver_state: &DriverState) -> Result<Self, Failed<B>> {
        let layout = prepared.memory.layout();
        let fits = driver_state.check_alone(&layout).and_then(|()| prepared.reach(driver_state.way));
        if let Err(error) = fits.and_then(|()| prepared.memory.lend(driver_state.slots()).map_err(not_a_slot)) {
            return Err(prepared.refused(error));
        }
        let Ends { bus, memory, parts, .. } =
            prepared.assemble(cursors_of(driver_state), Terms::of(driver_state), Mac(driver_state.head.mac))?;
        let mut nic = VirtioNet::new(bus, memory, parts, driver_state.counts);
        match nic.take_in(driver_state) {
            Ok(()) => Ok(nic),
            Err(error) => Err(nic.failed(error)),
        }
    }

    fn rehearse(prepared: &mut Prepared<B>) {
        // Ignore the result: the other driver writes there meanwhile.
        let _ = prepared.read_ledger().and_then(|()| prepared.reach(prepared.driver_state.way));
        for queue in [0, 1] {
            let records = prepared.memory.slot_list(queue, usize::MAX);
            std::hint::black_box(records.iter().fold(0, |all, word| all | word.load(Relaxed)));
        }
    }

    fn pick_up(mut prepared: Prepared<B>) -> Result<Self, Failed<B>> {
        if let Err(error) = prepared.read_ledger().and_then(|()| prepared.reach(prepared.driver_state.way)) {
            return Err(prepared.refused(error));
        }
        let driver_state = &prepared.driver_state;
        let (cursors, terms, mac) = (cursors_of(driver_state), Terms::of(driver_state), Mac(driver_state.head.mac));
        let ends = prepared.assemble(cursors, terms, mac)?;
        if let Err(error) = ends.lend() {
            ends.memory.take_back();
            return Err(Failed { error, bus: ends.bus, memory: ends.memory });
        }
        let Ends { bus, memory, parts, driver_state } = ends;
        let mut nic = VirtioNet::new(bus, memory, parts, driver_state.counts);
        match nic.take_over_ledger() {
            Ok(()) => Ok(nic),
            Err(error) => Err(nic.failed(error)),
        }
    }

    fn settle(prepared: &Prepared<B>) -> Result<(), NicError> {
        match &prepared.transport {
            Some(transport) if transport.is_behind() => transport.settle(),
            _ => Ok(()),
        }
    }

    fn room(&mut self) -> usize {
        // The next transmit reports a device that writes what it must not.
        let _ = self.tx.reap(self.memory.arena());
        if self.tx.can_make_room(BURST_MAX) {
            self.commit_sent();
        }
        self.tx.chains.room()
    }

    fn captures(&mut self) -> &mut Option<Box<Captures>> {
        &mut self.captures
    }
}

impl<B: Bus> Transactional for VirtioNet<B> {
    fn station(&self) -> Mac {
        self.mac()
    }

    fn conclude(&mut self, in_hand: &Burst) {
        let _ = self.tx.reap(self.memory.arena());
        self.commit(in_hand);
        self.withdraw();
    }

    fn withdraw(&mut self) {
        // Once the device answers, everything it was told has arrived.
        if self.transport.is_behind() {
            let _ = self.transport.status();
        }
    }

    #[inline]
    fn save(&mut self, frame: &Frame) {
        if let Some(position) = self.rx.position_of(frame.slot.id()) {
            self.memory.ledger().save(0, position, &frame.slot);
        }
    }

    fn takes(&mut self, burst: &Burst) -> bool {
        self.room() >= burst.len()
    }

    fn turns(&self) -> u64 {
        self.committed[TURNS]
    }

    fn given(&self) -> u64 {
        self.tx.given()
    }
}
