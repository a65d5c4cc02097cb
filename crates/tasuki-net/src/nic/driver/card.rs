//! What is a card's own, and what [`Driver`] needs of it.

use std::os::fd::BorrowedFd;

use tasuki_shm::arena::Arena;
use tasuki_shm::slots::SlotId;

use super::Driver;
use crate::nic::bus::Bus;
use crate::nic::driver_state::InLedger;
use crate::nic::ledger::{CURSORS, QUEUES};
use crate::nic::{Filter, Link, Mac, NicError, NicMemory, NicOptions};
use crate::port::Burst;

/// For each receive ring, the position of its first frame that is not handled.
pub type Handled = [u64; QUEUES];

/// A receive ring of a card, and the slots in it. Frames have positions, which count without end.
pub trait Receive {
    /// Counts that the driver keeps.
    type Counts;

    /// Appends frames that have come to `burst` until it holds `full` frames. Returns the number of frames appended.
    ///
    /// # Errors
    /// The card wrote what it must not. Earlier frames are delivered first.
    fn receive(
        &mut self,
        arena: &Arena,
        burst: &mut Burst,
        full: usize,
        counts: &mut Self::Counts,
    ) -> Result<usize, NicError>;

    /// Gives the card free slots: at most `most`, and as many as there are and fit. Returns how many more would fit.
    fn post(&mut self, memory: &NicMemory, most: usize) -> usize;

    /// Returns how many slots fit.
    fn room(&self) -> usize;

    /// Returns whether the card has no slots here: then it does not wake a driver that sleeps.
    fn is_empty(&self) -> bool;

    /// Returns the number of frames that were received and not committed as handled.
    fn pending(&self) -> u64;

    /// Returns the position of the first of them.
    fn handled(&self) -> u64;

    /// Returns the position of the next frame to come.
    fn next(&self) -> u64;

    /// Returns whether the frame received at this position is in this slot.
    fn is_at(&self, position: u64, id: SlotId) -> bool;

    /// Marks the slots that the card has, by the ledger, as lent. Changes only our table of slots.
    fn lend(&self, memory: &NicMemory) -> Result<(), NicError>;

    /// Restores the saved heads of frames that a predecessor had not handled. This is ring number `queue`.
    fn undo(&self, memory: &NicMemory, queue: usize) -> Result<(), NicError>;
}

/// The transmit ring of a card, and the slots in it.
pub trait Transmit {
    /// Counts that the driver keeps.
    type Counts;

    /// Takes back the slots of frames that the card has sent.
    fn reap(&mut self, arena: &Arena) -> Result<(), NicError>;

    /// Returns how many frames fit.
    fn room(&self) -> usize;

    /// Returns whether fewer than `frames` fit, and more once a commit says that others were sent.
    fn can_make_room(&self, frames: usize) -> bool;

    /// Takes frames from the front of `burst`, as many as fit. Returns their number, and adds to `given` those that
    /// were given to the card: frames that cannot be sent are taken, counted and dropped.
    fn transmit(&mut self, memory: &NicMemory, burst: &mut Burst, counts: &mut Self::Counts, given: &mut u64) -> usize;

    /// Returns whether the card has sent everything.
    fn is_empty(&self) -> bool;

    /// Like [`Receive::lend`].
    fn lend(&self, memory: &NicMemory) -> Result<(), NicError>;
}

/// A kind of card: its registers, how it starts, goes on and stops, and how it learns of what was committed.
pub trait Card: Sized {
    /// Bus by which the driver reaches the card.
    type Bus: Bus;
    /// State that a successor needs.
    type DriverState: InLedger;
    /// Counts of driver and card.
    type Counts;
    /// A receive ring.
    type Ring: Receive<Counts = Self::Counts>;
    /// The receive rings, one a queue.
    type Rx: AsRef<[Self::Ring]> + AsMut<[Self::Ring]>;
    /// Transmit ring.
    type Tx: Transmit<Counts = Self::Counts>;
    /// Registers and interrupt of a card that another process drives.
    type Reached;

    // How a card starts, and how it is parked.

    /// Checks that this is such a card, and that it can have these options in this memory. Does not touch the card.
    fn check(bus: &mut Self::Bus, memory: &NicMemory, options: &NicOptions) -> Result<(), NicError>;

    /// Resets a card and sets it up, as far as it does not receive or send. The rings are empty.
    fn reset(bus: &mut Self::Bus, memory: &NicMemory, options: &NicOptions) -> Result<Assembly<Self>, NicError>;

    /// Lets a card that was reset receive and send. It has no slots yet.
    fn begin(nic: &mut Driver<Self>, options: &NicOptions) -> Result<(), NicError>;

    /// Finds a parked card, and checks that it is as the checked driver state says. Changes nothing of it but its
    /// interrupts.
    fn find(
        bus: &mut Self::Bus,
        memory: &NicMemory,
        driver_state: &Self::DriverState,
    ) -> Result<Assembly<Self>, NicError>;

    /// Lets the card finish what it has begun, commits, and keeps the card from touching memory.
    fn stop(nic: &mut Driver<Self>) -> Result<Box<Self::DriverState>, NicError>;

    // How another driver goes on with it.

    /// Reaches a card by a bus that asks it nothing.
    fn reach(bus: &mut Self::Bus) -> Result<Self::Reached, NicError>;

    /// Reaches the registers that the driver state says, if they are not the same on each card.
    fn locate(_: &mut Self::Reached, _: &mut Self::Bus, _: &Self::DriverState) -> Result<(), NicError> {
        Ok(())
    }

    /// Waits until every write of any driver has arrived at the card.
    fn settle(reached: &Self::Reached) -> Result<(), NicError>;

    /// Makes our ends of the rings, at the cursors of the driver state. Changes nothing.
    fn rings(memory: &NicMemory, driver_state: &Self::DriverState) -> Result<(Self::Rx, Self::Tx), NicError>;

    /// Makes the rest of a driver that goes on from a checked driver state. Changes nothing.
    fn attach(
        reached: Self::Reached,
        memory: &NicMemory,
        driver_state: &Self::DriverState,
    ) -> Result<(Self, Self::Counts), NicError>;

    /// Makes the rings as they were when the predecessor stopped, by its driver state or, if it wrote none, by the
    /// ledger. Lets the card use them again if the predecessor had it [halted](crate::nic::ledger::Ledger::is_halted).
    fn go_on(nic: &mut Driver<Self>, driver_state: Option<&Self::DriverState>) -> Result<(), NicError>;

    /// Writes the state for a successor that goes on with the rings as they stand. `driver_state` is blank, or was
    /// written by this driver before.
    fn write(nic: &Driver<Self>, driver_state: &mut Self::DriverState);

    // What is committed, and what the card is told.

    /// Writes the cursors of the rings, as the ledger has them: those before [`GIVEN`](crate::nic::ledger::GIVEN).
    fn cursors(rx: &Self::Rx, tx: &Self::Tx, handled: Handled, into: &mut [u64; CURSORS]);

    /// Notes that everything before `handled` is committed, and rings the doorbells of the rings that have changed.
    fn committed(nic: &mut Driver<Self>, handled: Handled);

    /// Rings every doorbell, whether something has changed or not.
    fn ring_all(nic: &mut Driver<Self>);

    /// Returns whether the card takes slots: not while its receive side is off.
    fn takes_slots(&self) -> bool;

    /// Called when there were fewer free slots than the card takes.
    #[inline]
    fn starved(_: &mut Driver<Self>) -> Result<(), NicError> {
        Ok(())
    }

    /// Called when no frame has come.
    #[inline]
    fn idle(_: &mut Driver<Self>) {}

    // How a driver sleeps, and what callers ask.

    /// Asks for an interrupt when the next frame comes, and looks once more. Returns whether one is there.
    fn arm(nic: &mut Driver<Self>) -> Result<bool, NicError>;

    /// Returns the eventfd of the interrupt.
    fn fd(&self) -> BorrowedFd<'_>;

    /// Returns once all writes have arrived at the card.
    fn flush(&self);

    /// Returns the card's Ethernet address.
    fn mac(&self) -> Mac;

    /// See [`Nic::link`](crate::nic::Nic::link).
    fn link(&mut self) -> Result<Link, NicError>;

    /// See [`Nic::now_and_then`](crate::nic::Nic::now_and_then).
    fn now_and_then(_: &mut Driver<Self>) {}

    /// See [`Nic::set_filter`](crate::nic::Nic::set_filter).
    fn set_filter(nic: &mut Driver<Self>, filter: &Filter) -> Result<(), NicError>;

    /// See [`Nic::statistics`](crate::nic::Nic::statistics).
    fn statistics(nic: &mut Driver<Self>) -> Vec<(&'static str, u64)>;
}

/// All of a driver but its bus and its memory.
#[derive(Debug)]
pub struct Assembly<C: Card> {
    pub(in crate::nic) card: C,
    pub(in crate::nic) rx: C::Rx,
    pub(in crate::nic) tx: C::Tx,
    pub(in crate::nic) counts: C::Counts,
}
