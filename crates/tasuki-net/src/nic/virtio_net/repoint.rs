//! A device whose queues move into another owner's memory (VIRTIO_F_RING_RESET, virtio 1.2, §2.6.1), or which has a
//! second pair of queues there.
//!
//! Virtio has no pause. So a giver goes on until there is nothing left to receive or send, and resets the queues, the
//! receive queue first. Frames that arrive from then on wait where the device lets them wait, or are lost, until a
//! taker starts the queues in its memory. The giver finds frames of the last moment in the used ring, handles them, and
//! answers: it transmits until then. Features, address, filter, link and interrupts stay as they are.
//!
//! A device with two or more pairs of queues whose frames can be steered (VIRTIO_NET_F_RSS, §5.1.6.5.7) runs the
//! taker's pair before any frame goes there, and needs no reset in between. The giver steers frames to that pair,
//! handles those that had arrived at its own, and lets go; then the taker begins with the frames in its queue.
//! Afterwards the taker resets the old pair and the command queue, and restarts the latter in its memory.

use std::time::Instant;

use arrayvec::ArrayVec;

use super::regs::{common, feature, queue as queues, status};
use super::setup::{self, Layout, Terms, wrong};
use super::transport::{Transport, other};
use super::{DRAIN, Device, VirtioNet, control};
use crate::nic::bus::{self, Bus, Header, Iova, Registers};
use crate::nic::driver::{Card as _, Driver, Receive as _, Transmit as _};
use crate::nic::driver_state::{InLedger as _, broken};
use crate::nic::{Can, Failed, How, Left, MemoryLayout, NicError, NicMemory, NicOptions, Repoint};
use crate::port::Burst;

/// Progress of a giver.
#[derive(Debug, Clone, Copy)]
pub struct Quiesce {
    since: Instant,
    /// The receive queue is reset: nothing is posted.
    off: bool,
    /// The pair of queues to which the device was asked to steer frames; and whether it does so.
    asked: Option<u16>,
    steered: bool,
    how: How,
}

impl Quiesce {
    #[inline]
    pub fn is_off(self) -> bool {
        self.off
    }
}

/// A taker with rings of its own: a complete driver, except for the device or for the frames.
#[derive(Debug)]
pub struct Ready<B: Bus> {
    nic: VirtioNet<B>,
    how: How,
    /// Address of the giver's rings, if our present pair of queues was the empty spare pair in them.
    lent: Option<Iova>,
}

/// Sets up an empty spare queue in the device, in rings that begin at `rings_at`.
fn set_up_spare(
    transport: &Transport<impl Registers>,
    layout: &Layout,
    queue: u16,
    rings_at: Iova,
) -> Result<(), NicError> {
    let [rx, tx] = layout.spare;
    let place = if queue == queues::RECEIVE { rx } else { tx };
    transport.enable_queue(queue, setup::SPARE, place.addresses_from(rings_at), common::NO_VECTOR)
}

/// Bit of [`Left`]: the device steers frames to the pair of queues in the low half.
const STEERED: u64 = 1 << 63;

/// Returns the error for a device that cannot change its memory while it runs.
fn cannot_reset() -> NicError {
    wrong("repoint", 1, "the device does not reset single queues (VIRTIO_F_RING_RESET): hand it over by keep or cold")
}

impl<B: Bus> VirtioNet<B> {
    /// Returns all our queues.
    fn queues(&self) -> impl Iterator<Item = u16> + use<B> {
        [Some(queues::TRANSMIT), Some(queues::RECEIVE), self.card.control.as_ref().map(|_| queues::CONTROL)]
            .into_iter()
            .flatten()
    }

    /// Makes the device use our queues again, where they were reset, or moved elsewhere by a taker that is gone.
    pub(super) fn bring_back(&mut self) -> Result<(), NicError> {
        let mut is_used = false;
        let mut away = ArrayVec::<(u16, Option<Iova>), 3>::new();
        for queue in self.queues() {
            let ours = match queue {
                queues::RECEIVE => self.card.layout.rx,
                queues::TRANSMIT => self.card.layout.tx,
                _ => self.card.layout.control,
            };
            let [descriptors, ..] = ours.addresses(&self.memory);
            match self.card.transport.queue(queue)? {
                (_, Some(at)) if at == descriptors => is_used = true,
                (_, at) => away.push((queue, at)),
            }
        }
        // A taker has a queue. It may have unmapped our memory, unless the device uses that: it is steered to our pair, or has
        // begun to come back.
        if !is_used && away.iter().any(|(_, at)| at.is_some()) {
            self.reach_again()?;
        }
        for (queue, at) in away {
            if at.is_some() {
                self.card.transport.reset_queue(queue)?;
            }
            // If we die before this is complete, the device must be started anew.
            self.memory.ledger().belongs(None);
            match queue {
                queues::RECEIVE => {
                    self.memory.ledger().forget();
                    self.rx[0].chains.begin_anew(&self.memory)?;
                }
                queues::TRANSMIT => self.tx.chains.begin_anew(&self.memory)?,
                _ => self.card.control.iter_mut().for_each(control::Control::begin),
            }
            self.enable_queue(queue)?;
        }
        Ok(())
    }
}

/// Reads what the device runs with, and changes nothing. The transport ends up on the driving owner's pair of queues,
/// whose rings begin at `from`.
fn ask<B: Bus>(
    bus: &mut B,
    memory: &NicMemory,
    options: &NicOptions,
    from: Iova,
) -> Result<(Transport<B::Registers>, Terms), NicError> {
    setup::check_options(options)?;
    setup::check_memory(memory, options)?;
    let header = Header::of(bus, &setup::CARDS, setup::DRIVER)?;
    let mut transport = Transport::find(bus, &header)?;
    let found = transport.status()?;
    if found != status::RUNNING {
        return Err(broken("the device does not run: its status is", found.into()));
    }
    let features = transport.agreed();
    if features & feature::RING_RESET == 0 {
        return Err(cannot_reset());
    }
    if features & !feature::OURS != 0 || features & feature::VERSION_1 == 0 {
        return Err(broken("the features", features));
    }
    transport.find_pairs(features)?;
    // The receive queue is the first thing in a NIC's rings.
    if transport.queue(queues::RECEIVE)?.1 != Some(from) && features & feature::STEER != 0 {
        transport.choose(1);
    }
    if transport.queue(queues::RECEIVE)?.1 != Some(from) {
        return Err(broken("the device has no queue at", from.0));
    }
    for queue in [queues::RECEIVE, queues::TRANSMIT] {
        if transport.queue(queue)?.0 != options.ring {
            return Err(wrong("ring", options.ring.into(), "it must be what the card runs with"));
        }
    }
    transport.find_bells(features)?;
    transport.way().check(features)?;
    let terms = Terms::new(&transport, features, options)?;
    Ok((transport, terms))
}

/// Resets those of these queues that the device uses.
fn reset_queues(transport: &Transport<impl Registers>, queues: &[u16]) -> Result<(), NicError> {
    queues.iter().try_for_each(|&queue| match transport.queue(queue)? {
        (_, None) => Ok(()),
        (_, Some(_)) => transport.reset_queue(queue),
    })
}

impl<B: Bus> VirtioNet<B> {
    fn can_do(&self) -> Can {
        Can { point: self.card.terms.resets_queues(), pauses: false, fenced: false, steer: self.card.terms.steers() }
    }

    /// Makes the device use our queues again and steer frames to them, whatever a taker that is gone has done.
    pub(super) fn bring_all_back(&mut self) -> Result<(), NicError> {
        self.bring_back()?;
        if self.card.terms.steers() {
            self.steer(self.card.transport.way().pair)?;
            self.renew_spare(|_| ())?;
        }
        Ok(())
    }

    /// Returns the giver's progress. If the device was asked to steer, returns `None` until it has answered.
    fn is_steered(&mut self) -> Option<Quiesce> {
        let quiesce = self.card.quiesce.as_mut()?;
        if quiesce.asked.is_some() && !quiesce.steered {
            match self.card.control.as_mut()?.is_obeyed() {
                Ok(false) => return None,
                Ok(true) => (quiesce.steered, quiesce.since) = (true, Instant::now()),
                Err(_) => quiesce.asked = None,
            }
        }
        Some(*quiesce)
    }

    /// Moves the other pair of queues into our memory, out of memory whose owner is gone or will be.
    fn renew_spare(&mut self, mut between: impl FnMut(&mut Self)) -> Result<(), NicError> {
        self.reset_others(&[queues::TRANSMIT, queues::RECEIVE], &mut between)?;
        self.lend_spare(between)?;
        self.card.ring_receive();
        self.card.transport.status().map(drop)
    }

    /// Steers all frames to this pair of queues.
    pub(super) fn steer(&mut self, pair: u16) -> Result<(), NicError> {
        self.ask_to_steer(pair)?;
        let Device { control, transport, .. } = &mut self.card;
        control.as_mut().map_or(Ok(()), |control| control.obeyed(transport))
    }

    /// Asks the device to steer all frames to this pair of queues.
    fn ask_to_steer(&mut self, pair: u16) -> Result<(), NicError> {
        let mut driver_state = self.to_driver_state();
        let Device { control, transport, .. } = &mut self.card;
        let Some(control) = control else { return Err(broken("it has no queue for commands", 0)) };
        let mut announce = |commands| {
            driver_state.commands = commands;
            self.memory.ledger().write_seldom(driver_state.seldom());
        };
        control.steer(transport, pair, &mut announce)
    }

    /// Sets up the other pair of queues as well; it stays empty. A queue can be reset and moved only if the device knew
    /// it before it ran (§3.1.1, §2.6.1), and all pairs that it is told to use must be set up (§5.1.6.5.5.1). QEMU's
    /// device leaves lying all frames that arrive by way of a pair that is not set up, wherever they are steered.
    pub(super) fn lend_spare(&mut self, mut between: impl FnMut(&mut Self)) -> Result<(), NicError> {
        if !self.card.terms.steers() {
            return Ok(());
        }
        let layout = self.card.layout;
        for queue in [queues::RECEIVE, queues::TRANSMIT] {
            self.with_other_pair(|transport, memory| set_up_spare(transport, &layout, queue, memory.rings_at()))?;
            between(self);
        }
        Ok(())
    }

    /// Resets the other pair of queues; it belongs to no owner afterwards.
    pub(super) fn take_spare_back(&mut self) -> Result<(), NicError> {
        if !self.card.terms.steers() {
            return Ok(());
        }
        self.reset_others(&[queues::TRANSMIT, queues::RECEIVE], |_| ())
    }

    /// Resets these queues of the other pair, or the command queue.
    fn reset_others(&mut self, queues: &[u16], mut between: impl FnMut(&mut Self)) -> Result<(), NicError> {
        for &queue in queues {
            if self.with_other_pair(|transport, _| transport.is_enabled(queue))? {
                between(self);
                self.with_other_pair(|transport, _| transport.begin_reset(queue))?;
                between(self);
                self.with_other_pair(|transport, _| transport.end_reset(queue))?;
            }
            between(self);
        }
        Ok(())
    }

    /// Calls `then` while the transport stands on the other pair of queues.
    fn with_other_pair<T>(&mut self, then: impl FnOnce(&Transport<B::Registers>, &NicMemory) -> T) -> T {
        let ours = self.card.transport.way().pair;
        self.card.transport.choose(other(ours));
        let done = then(&self.card.transport, &self.memory);
        self.card.transport.choose(ours);
        done
    }

    /// Sets up our pair of queues in the device, in place of any queues that were left there. No frames arrive at it
    /// yet.
    fn open_pair(&mut self) -> Result<(), NicError> {
        reset_queues(&self.card.transport, &[queues::TRANSMIT, queues::RECEIVE])?;
        self.enable_queues()?;
        Device::ring_all(self);
        self.card.transport.status().map(drop)
    }

    /// Restores our pair of queues to its former state.
    fn close_pair(&self, lent: Option<Iova>) -> Result<(), NicError> {
        reset_queues(&self.card.transport, &[queues::TRANSMIT, queues::RECEIVE])?;
        if let Some(rings_at) = lent {
            set_up_spare(&self.card.transport, &self.card.layout, queues::RECEIVE, rings_at)?;
            set_up_spare(&self.card.transport, &self.card.layout, queues::TRANSMIT, rings_at)?;
            self.card.ring_receive();
        }
        self.card.transport.status().map(drop)
    }

    /// Takes from the device what it still has of a former owner: the other pair of queues, and the command queue,
    /// which is ours from now on.
    fn close_other_pair(&mut self, mut between: impl FnMut(&mut Self)) -> Result<(), NicError> {
        self.reset_others(&[queues::TRANSMIT, queues::RECEIVE, queues::CONTROL], &mut between)?;
        // We have given no command yet, so a successor finds the same count of them.
        self.card.control.iter_mut().for_each(control::Control::begin);
        self.enable_control()?;
        between(self);
        self.lend_spare(between)?;
        self.card.ring_receive();
        self.card.transport.status().map(drop)
    }
}

impl<B: Bus> Repoint for VirtioNet<B> {
    type Ready = Ready<B>;

    fn prepare_rings(
        mut bus: B,
        memory: NicMemory,
        options: &NicOptions,
        how: How,
        from: Iova,
    ) -> Result<Ready<B>, Failed<B>> {
        memory.take_back();
        let asked = ask(&mut bus, &memory, options, from).and_then(|(mut transport, terms)| {
            Can { point: true, pauses: false, fenced: false, steer: terms.steers() }.go(how)?;
            if how == How::Steer {
                transport.choose(other(transport.way().pair));
                transport.find_bells(terms.features)?;
            }
            let mac = transport.mac()?;
            let interrupt = bus::interrupt(&mut bus)?;
            memory.map_anew(&mut bus)?;
            memory.ledger().clear();
            Device::new(&memory, (transport, interrupt), (terms, mac), 0)?.empty(&memory)
        });
        let mut parts = match asked {
            Ok(parts) => parts,
            Err(error) => return Err(Failed { error, bus, memory }),
        };
        parts.rx[0].post(&memory, usize::MAX);
        // The device is told together with everything else.
        parts.rx[0].chains.committed(0);
        let mut nic = Driver::aside(bus, memory, parts);
        let [lent, ..] = nic.card.layout.spare[0].addresses_from(from);
        let lent = nic.card.transport.queue(queues::RECEIVE).is_ok_and(|(_, at)| at == Some(lent)).then_some(from);
        match if how == How::Steer { nic.open_pair() } else { Ok(()) } {
            Ok(()) => Ok(Ready { nic, how, lent }),
            Err(error) => {
                let (bus, memory) = Self::give_up(Ready { nic, how, lent });
                Err(Failed { error, bus, memory })
            }
        }
    }

    fn can(&self) -> Can {
        self.can_do()
    }

    fn give_up(Ready { nic, how, lent }: Ready<B>) -> (B, NicMemory) {
        if how == How::Steer {
            // If the device is gone, it can no longer reach the memory.
            let _ = nic.close_pair(lent);
        }
        nic.surrender()
    }

    fn quiesce(&mut self, how: How, _: impl FnMut(&mut Self)) {
        self.memory.ledger().halted(true);
        let other = other(self.card.transport.way().pair);
        // If the device refuses, it is not left: no frames go elsewhere.
        let asked = (how == How::Steer && self.ask_to_steer(other).is_ok()).then_some(other);
        self.card.quiesce = Some(Quiesce { since: Instant::now(), off: false, asked, steered: false, how });
    }

    fn is_quiet(&mut self) -> bool {
        let Some(quiesce) = self.is_steered() else { return false };
        if quiesce.how == How::Steer && !quiesce.steered {
            // The device refuses; `leave` reports it.
            return true;
        }
        // The next receive or transmit reports a device that writes what it must not.
        let sent = self.tx.reap(self.memory.arena()).is_ok() && self.tx.is_empty();
        let silent = self.rx[0].is_ready().is_ok_and(|ready| !ready);
        silent && sent || quiesce.since.elapsed() > DRAIN
    }

    fn leave(&mut self) -> Result<bool, NicError> {
        let Some(quiesce) = self.card.quiesce else {
            return Err(broken("it was not quiesced before it was to be left", 0));
        };
        self.can_do().go(quiesce.how)?;
        self.commit(&Burst::new());
        if quiesce.how == How::Steer {
            // Frames still on their way to our pair arrive at once, or were given up with those that wait there.
            return match quiesce.steered {
                true => Ok(!self.rx[0].is_ready()? && self.tx.chains.is_empty()),
                false => Err(broken("the device does not have frames come to its other queues", 0)),
            };
        }
        if !quiesce.off {
            self.card.transport.reset_queue(queues::RECEIVE)?;
            self.card.quiesce = Some(Quiesce { off: true, ..quiesce });
        }
        if self.rx[0].is_ready()? {
            // A frame arrived at the last moment.
            return Ok(false);
        }
        self.drain()?;
        // The turn has ended above: a second one would need a state of the program's.
        self.commit_sent();
        self.card.transport.reset_queue(queues::TRANSMIT)?;
        if self.card.control.is_some() {
            self.card.transport.reset_queue(queues::CONTROL)?;
        }
        Ok(true)
    }

    fn left(&self) -> Left {
        match self.card.quiesce.filter(|quiesce| quiesce.steered).and_then(|quiesce| quiesce.asked) {
            Some(pair) => Left(STEERED | u64::from(pair)),
            None => Left::STOPPED,
        }
    }

    fn go_back(&mut self) -> Result<(), NicError> {
        let Some(quiesce) = self.card.quiesce else { return Ok(()) };
        match quiesce.how {
            How::Steer => self.steer(self.card.transport.way().pair)?,
            How::Point | How::Fenced(_) => self.bring_back()?,
        }
        self.card.quiesce = None;
        self.refill();
        self.write_seldom();
        self.commit_sent();
        self.sign_ledger();
        self.memory.ledger().halted(false);
        Device::ring_all(self);
        self.card.transport.status().map(drop)
    }

    fn repoint(Ready { mut nic, how, lent }: Ready<B>, left: Left) -> Result<Self, Failed<B>> {
        if how == How::Steer {
            if left != Left(STEERED | u64::from(nic.card.transport.way().pair)) {
                // The giver may have steered and died. Our memory goes away, so the queues in it must, too.
                let _ = nic.close_pair(lent);
                let error = broken("the giver has not had frames come to our queues, but left the device at", left.0);
                return Err(nic.failed(error));
            }
            // Until the rest of the device is ours as well, the next driver must complete that: see `forget`.
            nic.memory.ledger().halted(true);
            nic.sign_ledger();
            return Ok(nic);
        }
        let uses = nic.queues().try_for_each(|queue| match nic.card.transport.queue(queue)? {
            (_, None) => Ok(()),
            (_, Some(at)) => Err(broken("the device uses a queue, though it was left, at", at.0)),
        });
        if let Err(error) = uses.and_then(|()| nic.card.transport.status()) {
            return Err(nic.failed(error));
        }
        // If we die before this is complete, the next driver makes the device go on, or points it elsewhere.
        nic.memory.ledger().halted(true);
        nic.sign_ledger();
        if let Err(error) = nic.enable_queues().and_then(|()| nic.enable_control()) {
            return Err(nic.failed(error));
        }
        nic.memory.ledger().halted(false);
        Device::ring_all(&mut nic);
        Ok(nic)
    }

    fn forget(&mut self, old: &MemoryLayout, mut between: impl FnMut(&mut Self)) -> Result<(), NicError> {
        if self.memory.ledger().is_halted() {
            // The device was steered to us, and still has a part of its former owner's memory.
            self.close_other_pair(&mut between)?;
            self.memory.ledger().halted(false);
        } else if self.card.terms.steers() {
            self.renew_spare(&mut between)?;
        }
        between(self);
        self.unmap_old(old, between)
    }
}
