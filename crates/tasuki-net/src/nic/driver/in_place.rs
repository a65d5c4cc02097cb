//! Takes over from a driver while its card runs.

use std::fmt;

use super::{Assembly, Card, Driver, Receive as _, Transmit as _, given_so_far};
use crate::capture::Captures;
use crate::nic::driver_state::{DriverState, InLedger as _, broken};
use crate::nic::{Failed, InPlace, NicError, NicMemory, loan};
use crate::port::{BURST_MAX, Burst, Transactional as _};

/// A successor that has everything but the driver state.
pub struct Prepared<C: Card> {
    bus: C::Bus,
    memory: NicMemory,
    reached: C::Reached,
    /// Room for the ledger's contents: a taker has no time to allocate it.
    driver_state: Box<C::DriverState>,
}

impl<C: Card> fmt::Debug for Prepared<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prepared").finish_non_exhaustive()
    }
}

impl<C: Card> Prepared<C> {
    /// Reads the ledger into our driver state, which it makes complete but for the tables of slots. Touches nothing
    /// else.
    fn read_ledger(&mut self) -> Result<(), NicError> {
        let (ledger, driver_state) = (self.memory.ledger(), &mut *self.driver_state);
        let (kind, version) = ledger.whose().ok_or(broken("nobody drove the card", 0))?;
        let (of_us, ours) = (C::DriverState::KIND, C::DriverState::VERSION);
        if (kind, version) != (of_us, ours) {
            return Err(NicError::OtherDriverState { kind, version, ours });
        }
        driver_state.set_seldom(&ledger.read_seldom());
        driver_state.set_cursors(&ledger.cursors());
        let layout = self.memory.layout();
        driver_state.head().check::<C::DriverState>(&layout)?;
        driver_state.check_ledger(&layout)
    }

    /// Reaches the registers that the ledger says.
    fn locate(&mut self) -> Result<(), NicError> {
        C::locate(&mut self.reached, &mut self.bus, &self.driver_state)
    }

    /// Maps the rest of the memory if a predecessor died before the card reached all of it.
    fn reach_all(&mut self) -> Result<(), NicError> {
        if self.memory.ledger().is_partial() {
            self.memory.map_rest(&mut self.bus)?;
            self.memory.ledger().partial(false);
        }
        Ok(())
    }

    /// Frees the slots lent so far: nothing else was touched.
    fn refused(self, error: NicError) -> Failed<C::Bus> {
        self.memory.take_back();
        Failed { error, bus: self.bus, memory: self.memory }
    }

    /// Goes on from `driver_state`, whose slots are lent already; or, without one, from the ledger that was read.
    fn drive(self, driver_state: Option<&C::DriverState>) -> Result<Driver<C>, Failed<C::Bus>> {
        let Prepared { bus, memory, reached, driver_state: read } = self;
        let given = given_so_far::<C::DriverState>(&memory);
        let assembled = C::rings(&memory, driver_state.unwrap_or(&read)).and_then(|(rx, tx)| {
            if driver_state.is_none() {
                lend::<C>(&memory, &rx, &tx)?;
                rx.as_ref().iter().enumerate().try_for_each(|(queue, ring)| ring.undo(&memory, queue))?;
            }
            let (card, counts) = C::attach(reached, &memory, driver_state.unwrap_or(&read))?;
            Ok(Assembly { card, rx, tx, counts })
        });
        let mut nic = match assembled {
            Ok(parts) => Driver::new(bus, memory, parts, given),
            Err(error) => {
                memory.take_back();
                return Err(Failed { error, bus, memory });
            }
        };
        match nic.take_over(driver_state) {
            Ok(()) => Ok(nic),
            Err(error) => Err(nic.failed(error)),
        }
    }
}

/// Marks the slots that the card has, by the ledger, as lent.
fn lend<C: Card>(memory: &NicMemory, rx: &C::Rx, tx: &C::Tx) -> Result<(), NicError> {
    rx.as_ref().iter().try_for_each(|ring| ring.lend(memory))?;
    tx.lend(memory)
}

impl<C: Card> InPlace for Driver<C> {
    type Prepared = Prepared<C>;

    fn bus(&self) -> &C::Bus {
        &self.bus
    }

    fn driver_state(&mut self, into: &mut C::DriverState) {
        self.conclude(&Burst::new());
        C::write(self, into);
    }

    fn prepare(mut bus: C::Bus, memory: NicMemory) -> Result<Prepared<C>, Failed<C::Bus>> {
        memory.take_back();
        let reached = match C::reach(&mut bus) {
            Ok(reached) => reached,
            Err(error) => return Err(Failed { error, bus, memory }),
        };
        let mut prepared = Prepared { bus, memory, reached, driver_state: C::DriverState::blank() };
        // If no driver runs yet, the ledger does not say; the successor is told later.
        if prepared.read_ledger().is_ok()
            && let Err(error) = prepared.locate()
        {
            return Err(prepared.refused(error));
        }
        Ok(prepared)
    }

    fn settle(prepared: &Prepared<C>) -> Result<(), NicError> {
        C::settle(&prepared.reached)
    }

    fn rehearse(prepared: &mut Prepared<C>) {
        // Ignore errors: another driver writes there meanwhile.
        let _ = prepared
            .read_ledger()
            .and_then(|()| prepared.locate())
            .and_then(|()| C::rings(&prepared.memory, &prepared.driver_state))
            .and_then(|(rx, tx)| lend::<C>(&prepared.memory, &rx, &tx));
        prepared.memory.take_back();
    }

    fn pick_up(mut prepared: Prepared<C>) -> Result<Self, Failed<C::Bus>> {
        let read = prepared.reach_all().and_then(|()| prepared.read_ledger()).and_then(|()| prepared.locate());
        match read {
            Ok(()) => prepared.drive(None),
            Err(error) => Err(prepared.refused(error)),
        }
    }

    fn go_on(mut prepared: Prepared<C>, driver_state: &C::DriverState) -> Result<Self, Failed<C::Bus>> {
        let fits = prepared
            .reach_all()
            .and_then(|()| driver_state.check_alone(&prepared.memory.layout()))
            .and_then(|()| C::locate(&mut prepared.reached, &mut prepared.bus, driver_state))
            .and_then(|()| loan::lend_all(&prepared.memory, driver_state.slots()));
        match fits {
            Ok(()) => prepared.drive(Some(driver_state)),
            Err(error) => Err(prepared.refused(error)),
        }
    }

    fn room(&mut self) -> usize {
        // The next transmit reports a card that writes what it must not.
        let _ = self.tx.reap(self.memory.arena());
        if self.tx.can_make_room(BURST_MAX) {
            self.commit_sent();
        }
        self.tx.room()
    }

    fn captures(&mut self) -> &mut Option<Box<Captures>> {
        &mut self.captures
    }
}
