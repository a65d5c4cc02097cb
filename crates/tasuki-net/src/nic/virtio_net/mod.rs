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
//! what the rings do not say. [`Driver`] has what is alike in all drivers, `chains.rs` the rules of the queues,
//! `repoint.rs` their move to other memory, and `setup.rs` the start of a device.

mod chains;
mod control;
pub mod driver_state;
mod queue;
mod regs;
mod repoint;
mod ring;
mod setup;
mod transport;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use tasuki_shm::crash;

use self::control::Control;
use self::driver_state::{Counts, Cursor, DriverState, Loan, RX_AVAILABLE, RX_HANDLED, TX_AVAILABLE, TX_HANDLED};
use self::queue::{Receiver, Transmitter};
use self::regs::{common, queue as queues};
use self::repoint::Quiesce;
pub use self::repoint::Ready;
use self::setup::{Layout, Terms};
use self::transport::{Doorbell, Transport};
use super::bus::{self, Bus, Header};
use super::driver::{Assembly, Card, Driver, Handled, Transmit as _};
use super::driver_state::{Head, InLedger as _};
use super::ledger::CURSORS;
use super::register::Waiting;
use super::{Filter, Link, Mac, NicError, NicMemory, NicOptions};
use crate::port::Burst;

/// Vector of the receive queue's interrupt, the only one.
const RECEIVE_VECTOR: u16 = 0;
/// How long parking waits for the device to send its frames. When a queue is reset, QEMU drops a frame that its wire
/// has not taken yet, and reports it as sent.
const DRAIN: Duration = Duration::from_millis(10);

/// A running virtio network device.
pub type VirtioNet<B> = Driver<Device<B>>;

/// A virtio network device, and what its driver knows of it.
#[derive(Debug)]
pub struct Device<B: Bus> {
    transport: Transport<B::Registers>,
    control: Option<Control>,
    rx_bell: Doorbell,
    tx_bell: Doorbell,
    /// Doorbell of the other pair's receive queue.
    other_bell: Option<Doorbell>,
    interrupt: OwnedFd,
    layout: Layout,
    terms: Terms,
    mac: Mac,
    /// Progress towards another owner's rings, if the driver is leaving.
    quiesce: Option<Quiesce>,
}

/// Registers, once a ledger or a driver state has given their places; and the interrupt.
#[derive(Debug)]
pub struct Reached<B: Bus> {
    transport: Option<Transport<B::Registers>>,
    interrupt: OwnedFd,
}

impl<B: Bus> Device<B> {
    /// Tells the device that there are receive buffers. A device that steers in software looks for our frames only when
    /// the queue rings to which they would have come without steering. QEMU's device does so without eBPF: there, each
    /// pair has a TAP queue of its own.
    fn ring_receive(&self) {
        self.transport.ring(self.rx_bell);
        if let Some(bell) = self.other_bell {
            self.transport.ring(bell);
        }
    }
}

impl<B: Bus> VirtioNet<B> {
    /// Fills queues that were reset from a checked driver state.
    fn begin_again(&mut self, driver_state: &DriverState) -> Result<(), NicError> {
        // If we die before this is complete, the device must be started anew.
        self.memory.ledger().belongs(None);
        self.memory.ledger().forget();
        let [come, empty, unsent] = driver_state.in_order();
        self.rx[0].chains.fill(&self.memory, come, empty);
        self.tx.chains.fill(&self.memory, &[], unsent);
        self.card.control.iter_mut().for_each(Control::begin);
        self.enable_queues()?;
        self.enable_control()?;
        self.lend_spare(|_| ())
    }

    /// Tells the device the places of the queues for frames.
    fn enable_queues(&self) -> Result<(), NicError> {
        self.enable_queue(queues::RECEIVE)?;
        self.enable_queue(queues::TRANSMIT)
    }

    fn enable_control(&self) -> Result<(), NicError> {
        match self.card.control {
            Some(_) => self.enable_queue(queues::CONTROL),
            None => Ok(()),
        }
    }

    fn enable_queue(&self, queue: u16) -> Result<(), NicError> {
        let Layout { rx, tx, control, .. } = &self.card.layout;
        let (place, size, vector) = match queue {
            queues::RECEIVE => (rx, self.card.terms.ring, RECEIVE_VECTOR),
            queues::TRANSMIT => (tx, self.card.terms.ring, common::NO_VECTOR),
            _ => (control, control::SIZE, common::NO_VECTOR),
        };
        self.card.transport.enable_queue(queue, size, place.addresses(&self.memory), vector)
    }

    fn filter(&mut self, filter: &Filter) -> Result<(), NicError> {
        let mut driver_state = self.to_driver_state();
        let Device { control, transport, .. } = &mut self.card;
        let Some(control) = control else {
            // Without a command queue, the device decides what it lets in (§5.1.6.5.1), and we cannot change that.
            return transport.status().map(drop);
        };
        // A successor must know of a command before the device does.
        let mut announce = |commands| {
            driver_state.commands = commands;
            self.memory.ledger().write_seldom(driver_state.seldom());
        };
        control.set_filter(transport, filter, &mut announce)
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
}

/// Writes `loans` into the driver state, from entry `from` on. Returns their number.
fn list(to: &mut [Loan], from: u16, loans: impl IntoIterator<Item = Loan>) -> u16 {
    let written = to[from.into()..].iter_mut().zip(loans).map(|(to, loan)| *to = loan).count();
    u16::try_from(written).expect("at most as many as there are chains")
}

impl<B: Bus> Card for Device<B> {
    type Bus = B;
    type DriverState = DriverState;
    type Counts = Counts;
    type Ring = Receiver;
    type Rx = [Receiver; 1];
    type Tx = Transmitter;
    type Reached = Reached<B>;

    fn check(bus: &mut B, memory: &NicMemory, options: &NicOptions) -> Result<(), NicError> {
        setup::check_options(options)?;
        setup::check_memory(memory, options)?;
        Header::of(bus, &setup::CARDS, setup::DRIVER).map(drop)
    }

    fn reset(bus: &mut B, memory: &NicMemory, options: &NicOptions) -> Result<Assembly<Self>, NicError> {
        Device::cold(bus, memory, options)?.empty(memory)
    }

    fn begin(nic: &mut VirtioNet<B>, options: &NicOptions) -> Result<(), NicError> {
        nic.card.transport.silence_configuration();
        nic.enable_queues()?;
        nic.enable_control()?;
        nic.lend_spare(|_| ())?;
        nic.card.transport.run();
        nic.filter(&options.filter)
    }

    fn find(bus: &mut B, memory: &NicMemory, driver_state: &DriverState) -> Result<Assembly<Self>, NicError> {
        let transport = Some(Device::find(bus, driver_state)?);
        let reached = Reached { transport, interrupt: bus::interrupt(bus)? };
        let (rx, tx) = Self::rings(memory, driver_state)?;
        let (card, counts) = Self::attach(reached, memory, driver_state)?;
        Ok(Assembly { card, rx, tx, counts })
    }

    /// Resets the queues, or keeps them: see the head of the module.
    fn stop(nic: &mut VirtioNet<B>) -> Result<Box<DriverState>, NicError> {
        nic.drain()?;
        nic.commit(&Burst::new());
        let mut driver_state = nic.to_driver_state();
        if !nic.card.terms.resets_queues() {
            nic.card.transport.status()?;
            return Ok(driver_state);
        }
        nic.memory.ledger().halted(true);
        // Transmission first, so that receiving pauses as briefly as it can.
        nic.card.transport.reset_queue(queues::TRANSMIT)?;
        nic.card.transport.reset_queue(queues::RECEIVE)?;
        // The device also reads, and writes to, queues that are empty.
        if nic.card.control.is_some() {
            nic.card.transport.reset_queue(queues::CONTROL)?;
        }
        nic.take_spare_back()?;
        driver_state.commands = 0;
        (driver_state.kept, driver_state.rx_at, driver_state.tx_at) = (0, Cursor::default(), Cursor::default());
        driver_state.rx.fill(Loan::NONE);
        driver_state.tx.fill(Loan::NONE);
        let (come, empty) = nic.rx[0].harvest()?;
        driver_state.come = list(&mut driver_state.rx, 0, come);
        driver_state.empty = list(&mut driver_state.rx, driver_state.come, empty);
        driver_state.unsent = list(&mut driver_state.tx, 0, nic.tx.harvest(nic.memory.arena())?);
        Ok(driver_state)
    }

    fn reach(bus: &mut B) -> Result<Reached<B>, NicError> {
        Ok(Reached { transport: None, interrupt: bus::interrupt(bus)? })
    }

    /// Asks the bus for the registers only once.
    fn locate(reached: &mut Reached<B>, bus: &mut B, driver_state: &DriverState) -> Result<(), NicError> {
        if reached.transport.as_ref().is_none_or(|transport| transport.way() != driver_state.way) {
            reached.transport = Some(Transport::open(bus, driver_state.way)?);
        }
        Ok(())
    }

    fn settle(reached: &Reached<B>) -> Result<(), NicError> {
        match &reached.transport {
            Some(transport) if transport.is_behind() => transport.settle(),
            _ => Ok(()),
        }
    }

    fn rings(memory: &NicMemory, driver_state: &DriverState) -> Result<([Receiver; 1], Transmitter), NicError> {
        setup::rings(memory, Terms::of(driver_state), [driver_state.rx_at, driver_state.tx_at])
    }

    fn attach(reached: Reached<B>, memory: &NicMemory, driver_state: &DriverState) -> Result<(Self, Counts), NicError> {
        let reached = (reached.transport.ok_or(NicError::Gone)?, reached.interrupt);
        let agreed = (Terms::of(driver_state), Mac(driver_state.head.mac));
        Ok((Device::new(memory, reached, agreed, driver_state.commands)?, driver_state.counts))
    }

    fn go_on(nic: &mut VirtioNet<B>, driver_state: Option<&DriverState>) -> Result<(), NicError> {
        nic.card.control.iter_mut().for_each(Control::adopt);
        match driver_state {
            None => {
                nic.rx[0].chains.adopt();
                nic.tx.chains.adopt();
            }
            Some(driver_state) if driver_state.is_kept() => {
                let [rx, tx] = driver_state.by_chain();
                nic.rx[0].chains.adopt_kept(rx);
                nic.tx.chains.adopt_kept(tx);
            }
            Some(driver_state) => return nic.begin_again(driver_state),
        }
        match nic.memory.ledger().is_halted() {
            true => nic.bring_all_back(),
            false => Ok(()),
        }
    }

    fn write(nic: &VirtioNet<B>, driver_state: &mut DriverState) {
        let Device { transport, control, terms, mac, .. } = &nic.card;
        driver_state.head = Head::of::<DriverState>(&nic.memory.layout(), *mac, terms.ring);
        (driver_state.features, driver_state.frame_max, driver_state.way) =
            (terms.features, terms.frame_max, transport.way());
        (driver_state.kept, driver_state.come, driver_state.empty, driver_state.unsent) = (1, 0, 0, 0);
        driver_state.commands = control.as_ref().map_or(0, Control::commands);
        driver_state.counts = nic.counts;
        (driver_state.rx_at, driver_state.tx_at) = (nic.rx[0].chains.cursor(), nic.tx.chains.cursor());
        list(&mut driver_state.rx, 0, nic.rx[0].chains.by_chain());
        list(&mut driver_state.tx, 0, nic.tx.chains.by_chain());
    }

    #[inline]
    fn cursors([rx]: &[Receiver; 1], tx: &Transmitter, [handled, _]: Handled, into: &mut [u64; CURSORS]) {
        let (rx, tx) = (rx.chains.cursor(), tx.chains.cursor());
        (into[RX_AVAILABLE], into[RX_HANDLED]) = (rx.available, handled);
        (into[TX_AVAILABLE], into[TX_HANDLED]) = (tx.available, tx.used);
    }

    #[inline]
    fn committed(nic: &mut VirtioNet<B>, [handled, _]: Handled) {
        if nic.rx[0].chains.committed(handled) {
            nic.counts.rx_kicks += 1;
            nic.card.ring_receive();
        }
        crash::point("nic.rung");
        let used = nic.tx.chains.cursor().used;
        if nic.tx.chains.committed(used) {
            nic.counts.tx_kicks += 1;
            nic.card.transport.ring(nic.card.tx_bell);
        }
    }

    /// Tells the device that the queues have contents, even if it asked for no notification.
    fn ring_all(nic: &mut VirtioNet<B>) {
        nic.rx[0].chains.publish();
        nic.tx.chains.publish();
        nic.card.ring_receive();
        nic.card.transport.ring(nic.card.tx_bell);
    }

    #[inline]
    fn takes_slots(&self) -> bool {
        !self.quiesce.is_some_and(Quiesce::is_off)
    }

    /// Takes back the slots of sent frames for receiving.
    #[cold]
    fn starved(nic: &mut VirtioNet<B>) -> Result<(), NicError> {
        nic.counts.rx_no_slot += 1;
        nic.tx.reap(nic.memory.arena())?;
        nic.refill();
        Ok(())
    }

    fn arm(nic: &mut VirtioNet<B>) -> Result<bool, NicError> {
        if nic.rx[0].arm()? {
            return Ok(true);
        }
        // A caller that sleeps on a device that is gone would sleep for ever.
        nic.card.transport.status().map(|_| false)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.interrupt.as_fd()
    }

    fn flush(&self) {
        if self.transport.is_behind() {
            let _ = self.transport.status();
        }
    }

    fn mac(&self) -> Mac {
        self.mac
    }

    fn link(&mut self) -> Result<Link, NicError> {
        self.transport.link(self.terms.features)
    }

    fn set_filter(nic: &mut VirtioNet<B>, filter: &Filter) -> Result<(), NicError> {
        nic.filter(filter)
    }

    /// Returns the driver's own counts: the device has none.
    fn statistics(nic: &mut VirtioNet<B>) -> Vec<(&'static str, u64)> {
        nic.write_seldom();
        let counts = &nic.counts;
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
