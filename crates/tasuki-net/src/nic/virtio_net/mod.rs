//! Virtio network devices (virtio 1.2, §5.1) over PCI, with split virtqueues, and without offloads: a slot holds a
//! frame as on the wire. The driver uses one pair of queues, and the command queue if there is one.
//!
//! # Parking
//!
//! Virtio has no pause. If the device offers VIRTIO_F_RING_RESET, the driver resets its queues; afterwards the device
//! touches neither rings nor slots. The driver state lists the frames that had come, and the successor sets the queues
//! up anew. On any other device only a reset of the whole would stop it, and lose link, filters and frames: there the
//! rings are **kept**. The driver stops touching them and asks for no interrupts, but **the device may go on filling
//! the slots and sending the frames that it has**. The successor finds the results in the used rings. So a process that
//! takes a kept NIC's memory away must reset the device first. The price is that the device still uses the memory while
//! no driver runs (docs/decisions/0009-parking-virtio-and-rtl8139.md).
//!
//! # Replaced while it runs
//!
//! The device goes on with its rings as they stand in memory, whichever driver runs; the [ledger](super::ledger) holds
//! what the rings do not say. `chains.rs` has the rules, `in_place.rs` the successor, `repoint.rs` the move of queues
//! to other memory, `scrub.rs` the wiping of memory, and `setup.rs` the start of a device.

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
/// How long parking waits for the device to send its frames. When a queue is reset, QEMU drops a frame that its wire
/// has not taken yet, and reports it as sent.
const DRAIN: Duration = Duration::from_millis(10);

/// Words of the ledger's cursors: for each queue, our index, and the first index of the used ring that is not handled.
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
    /// Progress towards another owner's rings, if the driver is leaving.
    quiesce: Option<Quiesce>,
    /// Number of commits, and the cursors of the last one.
    commits: u64,
    committed: [u64; CURSORS],
    /// Slots that are not clean, if the memory is kept clean.
    dirt: Option<Dirt>,
    /// Captures of this NIC, if there are any.
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

    /// Takes the last steps of a start.
    fn go(&mut self, options: &NicOptions) -> Result<(), NicError> {
        self.transport.silence_configuration();
        self.enable_queues()?;
        self.enable_control()?;
        self.lend_spare(|_| ())?;
        self.transport.run();
        self.filter(&options.filter)?;
        if options.scrub {
            self.keep_clean();
            // Wipe all free slots now, while there is time: later only used slots are left to wipe.
            self.dirt.iter_mut().for_each(|dirt| dirt.wipe_free(self.memory.arena()));
        }
        // Only now, so that no frame has come in before the filter was set.
        self.refill();
        self.write_seldom();
        self.enter_ledger(0);
        self.ring_both();
        Ok(())
    }

    /// Continues from a checked driver state.
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
            // If we die before this is complete, the device must be started anew.
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

    /// Resets the queues, or keeps them. Returns the driver state for a successor.
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
        // The device also reads, and writes to, queues that are empty.
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

    /// Tells the device the places of the queues for frames.
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

    /// Tells the device that the queues have contents, even if it asked for no notification.
    fn ring_both(&mut self) {
        self.rx.chains.publish();
        self.tx.chains.publish();
        self.ring_receive();
        self.transport.ring(self.tx_bell);
    }

    /// Tells the device that there are receive buffers. A device that steers in software looks for our frames only when
    /// the queue rings to which they would have come without steering. QEMU's device does so without eBPF: there, each
    /// pair has a TAP queue of its own.
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
            // Without a command queue, the device decides what it lets in (§5.1.6.5.1), and we cannot change that.
            return self.transport.status().map(drop);
        };
        // A successor must know of a command before the device does.
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

    /// Gives the device the free slots, once all received frames are committed as handled. Before that, a successor may
    /// need a slot that was let go. Returns whether the device has as many as it can.
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

    /// Ends a turn: commits all frames as handled except those in `burst`, and the frames given to the device since.
    #[inline]
    fn commit(&mut self, burst: &Burst) {
        self.commit_up_to(self.rx.handled_but(burst), 1);
    }

    /// Commits what the device has been given, or has sent. Commits no frame as handled or given, and ends no turn.
    #[inline]
    fn commit_sent(&mut self) {
        self.commit_up_to(self.rx.chains.handled(), 0);
    }

    /// Commits that the frames before `handled` are handled, and `turns` more turns; then tells the device (C4).
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

    /// Gives the device all slots committed as handled. Frames in hand stay in hand.
    #[inline]
    fn rest(&mut self) -> Result<(), NicError> {
        if !self.refill() {
            self.starved()?;
        }
        crash::point("nic.posted");
        self.commit_sent();
        Ok(())
    }

    /// There are fewer free slots than the device could have: take back those of sent frames for receiving.
    #[cold]
    fn starved(&mut self) -> Result<(), NicError> {
        self.counts.rx_no_slot += 1;
        self.tx.reap(self.memory.arena())?;
        self.refill();
        Ok(())
    }

    /// Returns the number of frames that this driver's predecessors gave to the device, from the ledger.
    fn given_so_far(&self) -> u64 {
        let ledger = self.memory.ledger();
        match ledger.whose() == Some((DriverState::KIND, DriverState::VERSION)) {
            true => ledger.cursors()[GIVEN],
            false => 0,
        }
    }

    /// Takes the ledger over.
    fn enter_ledger(&mut self, given: u64) {
        self.tx.set_given(given);
        self.commits = self.memory.ledger().commits();
        // Force a commit, one turn later, whatever was committed before.
        self.committed = [u64::MAX; CURSORS];
        self.committed[TURNS] = self.memory.ledger().turns();
        self.commit(&Burst::new());
        self.memory.ledger().belongs(Some((DriverState::KIND, DriverState::VERSION)));
    }

    /// Writes the seldom changing part of the driver state into the ledger.
    #[cold]
    fn write_seldom(&self) {
        let mut driver_state = DriverState::blank();
        self.write_seldom_to(&mut driver_state);
        self.memory.ledger().write_seldom(driver_state.seldom());
    }

    /// Writes all of a driver state except the queues.
    fn write_seldom_to(&self, driver_state: &mut DriverState) {
        driver_state.head = Head::of::<DriverState>(&self.memory.layout(), self.mac, self.terms.ring);
        (driver_state.features, driver_state.frame_max, driver_state.way) =
            (self.terms.features, self.terms.frame_max, self.transport.way());
        (driver_state.kept, driver_state.come, driver_state.empty, driver_state.unsent) = (1, 0, 0, 0);
        driver_state.commands = self.control.as_ref().map_or(0, Control::commands);
        driver_state.counts = self.counts;
    }

    /// Writes the driver state for a successor that continues the queues as they stand, with all received frames
    /// handled. `driver_state` must be blank, or have been written by this driver before.
    fn write_driver_state(&self, driver_state: &mut DriverState) {
        self.write_seldom_to(driver_state);
        (driver_state.rx_at, driver_state.tx_at) = (self.rx.chains.cursor(), self.tx.chains.cursor());
        list(&mut driver_state.rx, 0, self.rx.chains.by_chain());
        list(&mut driver_state.tx, 0, self.tx.chains.by_chain());
    }
}

/// Writes `loans` into the driver state, from entry `from` on. Returns their number.
fn list(to: &mut [Loan], from: u16, loans: impl IntoIterator<Item = Loan>) -> u16 {
    let written = to[from.into()..].iter_mut().zip(loans).map(|(to, loan)| *to = loan).count();
    u16::try_from(written).expect("at most as many as there are chains")
}

impl<B: Bus> Port for VirtioNet<B> {
    type Fault = NicError;

    #[inline]
    fn receive_some(&mut self, burst: &mut Burst, most: usize) -> Result<usize, NicError> {
        // First commit the handled frames, then post their slots again, then commit that.
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
        // Slots of sent frames can receive others.
        self.tx.reap(self.memory.arena())?;
        if self.rx.chains.is_empty() {
            // A device without buffers never wakes us: count all received frames as handled, even those in hand.
            self.commit(&Burst::new());
        }
        self.rest()?;
        // Empty it first: an interrupt from here on stays in it.
        bus::quiesce(&self.interrupt)?;
        if self.rx.arm()? {
            return Ok(Armed::Busy);
        }
        // A caller that sleeps on a device that is gone would sleep for ever.
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

    /// Returns the driver's own counts: the device has none.
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
