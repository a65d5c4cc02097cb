//! Virtio network devices (virtio 1.2, §5.1) over PCI, with split virtqueues, and without offloads: a slot holds a frame as the wire
//! has it. One pair of queues, and the one for commands if there is one.
//!
//! # Parking
//!
//! Virtio has no pause. A device that offers VIRTIO_F_RING_RESET has its queues reset, after which it touches neither rings nor
//! slots; what had come is listed in the driver state, and the successor sets the queues up anew. On a device that does not, only a reset of
//! the whole would stop it, and lose link, filters and frames: there the rings are **kept**. The driver stops touching them and asks
//! for no interrupts, but **the device may go on to fill the slots that it has and to send the frames that it has**. The successor finds
//! what was done in the used rings. So whoever takes a kept NIC's memory away must reset the device first; that the device is
//! not the memory's only user while nobody drives it is the price (docs/decisions/0009-parking-virtio-and-rtl8139.md).
//!
//! # Replaced while it runs
//!
//! The device goes on with its rings, as they stand in memory, whoever drives it: what they do not say is in the [ledger](super::ledger). See `chains.rs` for the
//! rules, `in_place.rs` for who goes on, `repoint.rs` for queues that are made to lie elsewhere, `scrub.rs` for memory that is kept clean, and `setup.rs` for
//! a device that is started.

mod chains;
mod control;
pub mod driver_state;
mod in_place;
mod queue;
mod regs;
mod repoint;
mod ring;
mod scrub;
mod setup;
mod transport;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use tasuki_shm::crash;

use self::control::Control;
use self::driver_state::{Counts, Cursor, DriverState, Loan};
use self::queue::{Receiver, Transmitter};
use self::regs::{common, queue as queues};
use self::repoint::Quiesce;
pub use self::repoint::Ready;
use self::setup::{Assembly, Layout, Terms};
use self::transport::{Doorbell, Transport};
use super::bus::{self, Bus};
use super::driver_state::{DriverState as _, Head};
use super::ledger::{CURSORS, TURNS};
use super::register::Waiting;
use super::scrub::Dirt;
use super::{Failed, Filter, Link, Mac, Nic, NicError, NicMemory, NicOptions, Scrub};
use crate::capture::{Captures, Direction};
use crate::port::{Armed, Burst, Port};

/// Vector of the receive queue's interrupt, the only one.
const RECEIVE_VECTOR: u16 = 0;
/// How long we wait, when the NIC is parked, for the device to send what it has. QEMU throws away, when a queue is reset, the frame
/// that its wire has not taken yet, and says that it was sent.
const DRAIN: Duration = Duration::from_millis(10);

/// Words of the ledger's cursors: of each queue our index, and the first index of the used ring that is not handled.
const RX_AVAILABLE: usize = 0;
const RX_HANDLED: usize = 1;
const TX_AVAILABLE: usize = 2;
const TX_HANDLED: usize = 3;
const GIVEN: usize = 4;
const _: () = assert!(GIVEN < TURNS);

/// A running virtio network device.
pub struct VirtioNet<B: Bus> {
    bus: B,
    memory: NicMemory,
    transport: Transport<B::Registers>,
    rx: Receiver,
    tx: Transmitter,
    control: Option<Control>,
    rx_bell: Doorbell,
    tx_bell: Doorbell,
    other_bell: Option<Doorbell>,
    interrupt: OwnedFd,
    layout: Layout,
    terms: Terms,
    mac: Mac,
    counts: Counts,
    /// On the way to another owner's rings.
    quiesce: Option<Quiesce>,
    /// How often was committed, and what.
    commits: u64,
    committed: [u64; CURSORS],
    /// If the memory is kept clean: what is not.
    dirt: Option<Dirt>,
    /// Whoever looks on.
    captures: Option<Box<Captures>>,
}

impl<B: Bus> std::fmt::Debug for VirtioNet<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut nic = f.debug_struct("VirtioNet");
        nic.field("mac", &self.mac).field("rx", &self.rx).field("tx", &self.tx).finish_non_exhaustive()
    }
}

impl<B: Bus> VirtioNet<B> {
    fn new(bus: B, memory: NicMemory, parts: Assembly<B::Registers>, counts: Counts) -> Self {
        let Assembly { transport, rx, tx, control, rx_bell, tx_bell, other_bell, interrupt, layout, terms, mac } =
            parts;
        VirtioNet {
            bus,
            memory,
            transport,
            rx,
            tx,
            control,
            rx_bell,
            tx_bell,
            other_bell,
            interrupt,
            layout,
            terms,
            mac,
            counts,
            quiesce: None,
            commits: 0,
            committed: [0; CURSORS],
            dirt: None,
            captures: None,
        }
    }

    /// The last steps of a start.
    fn go(&mut self, options: &NicOptions) -> Result<(), NicError> {
        self.transport.silence_configuration();
        self.enable_queues()?;
        self.enable_control()?;
        self.lend_spare(|_| ())?;
        self.transport.run();
        self.filter(&options.filter)?;
        if options.scrub {
            self.keep_clean();
            // There is time now: later only what was used is left to do.
            self.dirt.iter_mut().for_each(|dirt| dirt.wipe_free(self.memory.arena()));
        }
        // Only now, so that nothing has come in before it was filtered.
        self.refill();
        self.write_seldom();
        self.enter_ledger(0);
        self.ring_both();
        Ok(())
    }

    /// Goes on where the driver state says, which was checked.
    fn take_in(&mut self, driver_state: &DriverState) -> Result<(), NicError> {
        let given = self.given_so_far();
        self.control.iter_mut().for_each(Control::adopt);
        let [rx, tx] = driver_state.by_chain();
        if driver_state.is_kept() {
            self.rx.chains.adopt_kept(rx);
            self.tx.chains.adopt_kept(tx);
            if self.memory.ledger().is_halted() {
                self.bring_all_back()?;
            }
        } else {
            // Should we die in the middle of it, the device must be started anew.
            self.memory.ledger().belongs(None);
            self.memory.ledger().forget();
            let [come, empty, unsent] = driver_state.in_order();
            self.rx.chains.fill(&self.memory, come, empty);
            self.tx.chains.fill(&self.memory, &[], unsent);
            self.control.iter_mut().for_each(Control::begin);
            self.enable_queues()?;
            self.enable_control()?;
            self.lend_spare(|_| ())?;
        }
        self.write_seldom();
        self.enter_ledger(given);
        self.memory.ledger().halted(false);
        self.ring_both();
        Ok(())
    }

    /// Resets the queues, or keeps them; what a successor must know.
    fn stop(&mut self) -> Result<Box<DriverState>, NicError> {
        self.drain()?;
        self.commit(&Burst::new());
        let mut driver_state = DriverState::blank();
        self.write_driver_state(&mut driver_state);
        if !self.terms.resets_queues() {
            self.transport.status()?;
            return Ok(driver_state);
        }
        self.memory.ledger().halted(true);
        // Transmission first, so that receiving pauses as briefly as it can.
        self.transport.reset_queue(queues::TRANSMIT)?;
        self.transport.reset_queue(queues::RECEIVE)?;
        // Those in which nothing is are looked at, and written to, as well.
        if self.control.is_some() {
            self.transport.reset_queue(queues::CONTROL)?;
        }
        self.take_spare_back()?;
        driver_state.commands = 0;
        (driver_state.kept, driver_state.rx_at, driver_state.tx_at) = (0, Cursor::default(), Cursor::default());
        driver_state.rx.fill(Loan::NONE);
        driver_state.tx.fill(Loan::NONE);
        let (come, empty) = self.rx.harvest()?;
        driver_state.come = list(&mut driver_state.rx, 0, come);
        driver_state.empty = list(&mut driver_state.rx, driver_state.come, empty);
        driver_state.unsent = list(&mut driver_state.tx, 0, self.tx.harvest(self.memory.arena())?);
        Ok(driver_state)
    }

    fn failed(self, error: NicError) -> Failed<B> {
        Failed { error, bus: self.bus, memory: self.memory }
    }

    /// Tells the device where the queues for frames are.
    fn enable_queues(&self) -> Result<(), NicError> {
        self.enable_queue(queues::RECEIVE)?;
        self.enable_queue(queues::TRANSMIT)
    }

    fn enable_control(&self) -> Result<(), NicError> {
        match self.control {
            Some(_) => self.enable_queue(queues::CONTROL),
            None => Ok(()),
        }
    }

    fn enable_queue(&self, queue: u16) -> Result<(), NicError> {
        let Layout { rx, tx, control, .. } = &self.layout;
        let (place, size, vector) = match queue {
            queues::RECEIVE => (rx, self.terms.ring, RECEIVE_VECTOR),
            queues::TRANSMIT => (tx, self.terms.ring, common::NO_VECTOR),
            _ => (control, control::SIZE, common::NO_VECTOR),
        };
        self.transport.enable_queue(queue, size, place.addresses(&self.memory), vector)
    }

    /// Tells the device of what is in the queues, whether it wants to hear of it or not.
    fn ring_both(&mut self) {
        self.rx.chains.publish();
        self.tx.chains.publish();
        self.ring_receive();
        self.transport.ring(self.tx_bell);
    }

    /// Tells the device of buffers to receive into. A device that steers in software looks at what it has for us only when the queue rings that it would have come to
    /// without: so QEMU's without eBPF, where each pair has a queue of the TAP of its own.
    fn ring_receive(&self) {
        self.transport.ring(self.rx_bell);
        if let Some(bell) = self.other_bell {
            self.transport.ring(bell);
        }
    }

    fn filter(&mut self, filter: &Filter) -> Result<(), NicError> {
        let mut driver_state = DriverState::blank();
        self.write_seldom_to(&mut driver_state);
        let Some(control) = &mut self.control else {
            // Without commands the device lets in what it likes (§5.1.6.5.1), and we have nothing to say.
            return self.transport.status().map(drop);
        };
        // A successor has to know of a command before the device does.
        let mut announce = |commands| {
            driver_state.commands = commands;
            self.memory.ledger().write_seldom(driver_state.seldom());
        };
        control.set_filter(&self.transport, filter, &mut announce)
    }

    /// Gives the device time to send what it has.
    fn drain(&mut self) -> Result<(), NicError> {
        let waiting = Waiting::begin();
        loop {
            let late = waiting.since() >= DRAIN;
            self.tx.reap(self.memory.arena())?;
            if self.tx.chains.is_empty() || late {
                return Ok(());
            }
            waiting.rest();
        }
    }

    /// Gives the device what free slots there are, once all that was received is committed as handled: up to then a slot that was let go may be one that a
    /// successor needs. Says whether the device has as many as it can.
    #[inline]
    fn refill(&mut self) -> bool {
        if self.rx.chains.has_unhandled() || self.quiesce.is_some_and(Quiesce::is_off) {
            return true;
        }
        match &mut self.dirt {
            None => self.rx.refill(&self.memory),
            Some(dirt) => self.rx.refill_clean(&self.memory, dirt),
        }
    }

    /// Commits that all frames are handled but those in `burst`, with what has been given to the device since: that ends a turn.
    #[inline]
    fn commit(&mut self, burst: &Burst) {
        self.commit_up_to(self.rx.handled_but(burst), 1);
    }

    /// Commits what the device has been given, or has sent, and nothing as handled or given: that ends no turn.
    #[inline]
    fn commit_sent(&mut self) {
        self.commit_up_to(self.rx.chains.handled(), 0);
    }

    /// Commits that the frames before this index are handled, and so many turns more; then tells the device (C4).
    #[inline]
    fn commit_up_to(&mut self, handled: u64, turns: u64) {
        let (rx, tx) = (self.rx.chains.cursor(), self.tx.chains.cursor());
        let mut cursors = [rx.available, handled, tx.available, tx.used, self.tx.given(), 0];
        // Nothing else changes without one of these.
        if cursors[..GIVEN] == self.committed[..GIVEN] {
            return;
        }
        cursors[TURNS] = self.committed[TURNS].wrapping_add(turns);
        self.committed = cursors;
        self.commits = self.commits.wrapping_add(1);
        self.memory.ledger().commit(self.commits, &cursors);
        crash::point("nic.committed");
        if self.rx.chains.committed(handled) {
            self.counts.rx_kicks += 1;
            self.ring_receive();
        }
        crash::point("nic.rung");
        if self.tx.chains.committed(tx.used) {
            self.counts.tx_kicks += 1;
            self.transport.ring(self.tx_bell);
        }
    }

    /// Gives the device all that was committed as handled; what is in hand stays that.
    #[inline]
    fn rest(&mut self) -> Result<(), NicError> {
        if !self.refill() {
            self.starved()?;
        }
        crash::point("nic.posted");
        self.commit_sent();
        Ok(())
    }

    /// There are fewer free slots than the device could have: those that frames left in may be what others can come in by.
    #[cold]
    fn starved(&mut self) -> Result<(), NicError> {
        self.counts.rx_no_slot += 1;
        self.tx.reap(self.memory.arena())?;
        self.refill();
        Ok(())
    }

    /// Frames that this driver's predecessors gave to the device, by the ledger.
    fn given_so_far(&self) -> u64 {
        let ledger = self.memory.ledger();
        match ledger.whose() == Some((DriverState::KIND, DriverState::VERSION)) {
            true => ledger.cursors()[GIVEN],
            false => 0,
        }
    }

    /// The ledger is ours.
    fn enter_ledger(&mut self, given: u64) {
        self.tx.set_given(given);
        self.commits = self.memory.ledger().commits();
        // Whatever was committed before: this is another, one turn later.
        self.committed = [u64::MAX; CURSORS];
        self.committed[TURNS] = self.memory.ledger().turns();
        self.commit(&Burst::new());
        self.memory.ledger().belongs(Some((DriverState::KIND, DriverState::VERSION)));
    }

    /// What seldom changes has changed.
    #[cold]
    fn write_seldom(&self) {
        let mut driver_state = DriverState::blank();
        self.write_seldom_to(&mut driver_state);
        self.memory.ledger().write_seldom(driver_state.seldom());
    }

    /// All of a driver state but the queues.
    fn write_seldom_to(&self, driver_state: &mut DriverState) {
        driver_state.head = Head::of::<DriverState>(&self.memory.layout(), self.mac, self.terms.ring);
        (driver_state.features, driver_state.frame_max, driver_state.way) =
            (self.terms.features, self.terms.frame_max, self.transport.way());
        (driver_state.kept, driver_state.come, driver_state.empty, driver_state.unsent) = (1, 0, 0, 0);
        driver_state.commands = self.control.as_ref().map_or(0, Control::commands);
        driver_state.counts = self.counts;
    }

    /// What a successor must know that goes on with the queues as they stand, all that was received being handled. The driver state was blank, or was written by this
    /// driver before.
    fn write_driver_state(&self, driver_state: &mut DriverState) {
        self.write_seldom_to(driver_state);
        (driver_state.rx_at, driver_state.tx_at) = (self.rx.chains.cursor(), self.tx.chains.cursor());
        list(&mut driver_state.rx, 0, self.rx.chains.by_chain());
        list(&mut driver_state.tx, 0, self.tx.chains.by_chain());
    }
}

/// Writes `loans` into the driver state, from entry `from` on; says how many.
fn list(to: &mut [Loan], from: u16, loans: impl IntoIterator<Item = Loan>) -> u16 {
    let written = to[from.into()..].iter_mut().zip(loans).map(|(to, loan)| *to = loan).count();
    u16::try_from(written).expect("at most as many as there are chains")
}

impl<B: Bus> Port for VirtioNet<B> {
    type Fault = NicError;

    #[inline]
    fn receive_some(&mut self, burst: &mut Burst, most: usize) -> Result<usize, NicError> {
        // What was handled is committed, and posted anew, and that is committed.
        self.commit(burst);
        self.rest()?;
        let before = burst.len();
        let frames = self.rx.receive(self.memory.arena(), burst, most, &mut self.counts)?;
        if let Some(dirt) = &mut self.dirt {
            dirt.mark(&burst[before..]);
        }
        crash::point("nic.collected");
        if let Some(captures) = &mut self.captures {
            captures.frames(Direction::Inbound, &burst[before..]);
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
            captures.frames(Direction::Outbound, &burst[..self.tx.chains.room().min(burst.len())]);
        }
        let taken = self.tx.transmit(&self.memory, burst, &mut self.counts);
        crash::point("nic.filled");
        self.commit(burst);
        Ok(taken)
    }

    fn arm(&mut self) -> Result<Armed, NicError> {
        // What was sent is of use to receive into.
        self.tx.reap(self.memory.arena())?;
        if self.rx.chains.is_empty() {
            // A device without buffers wakes nobody: what was received counts as handled, also what is in hand.
            self.commit(&Burst::new());
        }
        self.rest()?;
        // Emptied first: what rings from here on stays in it.
        bus::quiesce(&self.interrupt)?;
        if self.rx.arm()? {
            return Ok(Armed::Busy);
        }
        // Whoever sleeps on a device that is gone sleeps for ever.
        self.transport.status()?;
        Ok(Armed::Idle)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.interrupt.as_fd()
    }
}

impl<B: Bus> Nic for VirtioNet<B> {
    type Bus = B;
    type DriverState = DriverState;

    fn start(mut bus: B, memory: NicMemory, options: &NicOptions) -> Result<Self, Failed<B>> {
        let checked = setup::check_options(options).and_then(|()| setup::check_memory(&memory, options));
        let header = match checked.and_then(|()| setup::check_card(&mut bus)) {
            Ok(header) => header,
            Err(error) => return Err(Failed { error, bus, memory }),
        };
        let mut nic = match Assembly::cold(&mut bus, &memory, &header, options) {
            Ok(parts) => Self::new(bus, memory, parts, Counts::default()),
            Err(error) => {
                memory.withdraw(&mut bus);
                return Err(Failed { error, bus, memory });
            }
        };
        match nic.go(options) {
            Ok(()) => Ok(nic),
            Err(error) => {
                nic.memory.withdraw(&mut nic.bus);
                Err(nic.failed(error))
            }
        }
    }

    fn resume(mut bus: B, memory: NicMemory, driver_state: &DriverState) -> Result<Self, Failed<B>> {
        let mut nic = match Assembly::warm(&mut bus, &memory, driver_state) {
            Ok(parts) => Self::new(bus, memory, parts, driver_state.counts),
            Err(error) => return Err(Failed { error, bus, memory }),
        };
        match nic.take_in(driver_state).and_then(|()| nic.rest()) {
            Ok(()) => Ok(nic),
            Err(error) => Err(nic.failed(error)),
        }
    }

    /// Resets the queues, or keeps them: see the head of the module.
    fn park(mut self) -> Result<(B, NicMemory, DriverState), Failed<B>> {
        match self.stop() {
            Ok(driver_state) => Ok((self.bus, self.memory, *driver_state)),
            Err(error) => Err(self.failed(error)),
        }
    }

    fn stand_down(self) -> (B, NicMemory) {
        (self.bus, self.memory)
    }

    fn mac(&self) -> Mac {
        self.mac
    }

    fn link(&mut self) -> Link {
        self.transport.link(self.terms.features)
    }

    fn set_filter(&mut self, filter: &Filter) -> Result<(), NicError> {
        self.filter(filter)
    }

    /// The driver's own counts: the device has none.
    fn statistics(&mut self) -> Vec<(&'static str, u64)> {
        self.write_seldom();
        let counts = &self.counts;
        vec![
            ("rx_packets", counts.rx_packets),
            ("tx_packets", counts.tx_packets),
            ("rx_bytes", counts.rx_bytes),
            ("tx_bytes", counts.tx_bytes),
            ("rx_no_slot", counts.rx_no_slot),
            ("tx_dropped", counts.tx_dropped),
            ("rx_queue_0_kicks", counts.rx_kicks),
            ("tx_queue_0_kicks", counts.tx_kicks),
        ]
    }
}
