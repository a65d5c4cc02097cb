//! A device whose queues are made to lie in another owner's memory (VIRTIO_F_RING_RESET, virtio 1.2, §2.6.1), or which has a second pair of them there.
//!
//! Virtio has no pause. So a giver goes on until nothing is left to be received or sent, and resets the queues, that for receiving first: what comes from then
//! on waits where the device has it wait, or is lost, until a taker has the queues begin in its memory. What has come at the last moment is found in the used
//! ring, and handled, and answered: transmission goes on until then. Features, address, filter, link and interrupts stay as they are.
//!
//! A device with two pairs of queues or more, which can be told where frames are to come to (VIRTIO_NET_F_RSS, §5.1.6.5.7), has the taker's pair run before
//! anything goes there, and nothing is ever reset between. The giver has frames come there, handles what had come to its own pair, and lets go; then the taker
//! begins with what is in its queue. Afterwards the taker resets the old pair, and the queue for commands, which it has begin in its memory.

use std::time::Instant;

use super::driver_state::{Counts, DriverState};
use super::regs::{common, feature, queue as queues, status};
use super::setup::{self, Assembly, Cursors, Layout, Terms, wrong};
use super::transport::{Transport, other};
use super::{DRAIN, VirtioNet, control};
use crate::nic::bus::{Bus, Iova, Registers};
use crate::nic::driver_state::{DriverState as _, broken};
use crate::nic::{Can, Failed, How, Left, MemoryLayout, NicError, NicMemory, NicOptions, Repoint};
use crate::port::Burst;

/// How far a giver is.
#[derive(Debug, Clone, Copy)]
pub struct Quiesce {
    since: Instant,
    /// The receive queue is reset: nothing is posted.
    off: bool,
    /// The pair of queues that frames are to come to instead of ours, if the device was asked for that; and whether they do.
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

/// A taker with rings of its own: a driver that has everything but the device, or but what comes.
#[derive(Debug)]
pub struct Ready<B: Bus> {
    nic: VirtioNet<B>,
    how: How,
    /// Where the giver's rings begin, if what is our pair of queues now was the one in them in which nothing is.
    lent: Option<Iova>,
}

/// Has the device know a queue in which nothing is, of rings that begin there.
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

/// In how a device was left: frames come to the pair of queues in the low half.
const STEERED: u64 = 1 << 63;

/// A device that cannot be made to use other memory while it runs.
fn cannot_reset() -> NicError {
    wrong("repoint", 1, "the device does not reset single queues (VIRTIO_F_RING_RESET): hand it over by keep or cold")
}

impl<B: Bus> VirtioNet<B> {
    /// All queues of ours.
    fn queues(&self) -> impl Iterator<Item = u16> + use<B> {
        [Some(queues::TRANSMIT), Some(queues::RECEIVE), self.control.as_ref().map(|_| queues::CONTROL)]
            .into_iter()
            .flatten()
    }

    /// Has the device use our queues again, where they were reset, or lie elsewhere since: of a taker that is no more.
    pub(super) fn bring_back(&mut self) -> Result<(), NicError> {
        for queue in self.queues() {
            let ours = match queue {
                queues::RECEIVE => self.layout.rx,
                queues::TRANSMIT => self.layout.tx,
                _ => self.layout.control,
            };
            let [descriptors, ..] = ours.addresses(&self.memory);
            match self.transport.queue(queue)? {
                (_, Some(at)) if at == descriptors => continue,
                (_, Some(_)) => self.transport.reset_queue(queue)?,
                (_, None) => {}
            }
            // Should we die in the middle of it, the device must be started anew.
            self.memory.ledger().belongs(None);
            match queue {
                queues::RECEIVE => {
                    self.memory.ledger().forget();
                    self.rx.chains.begin_anew(&self.memory)?;
                }
                queues::TRANSMIT => self.tx.chains.begin_anew(&self.memory)?,
                _ => self.control.iter_mut().for_each(control::Control::begin),
            }
            self.enable_queue(queue)?;
        }
        Ok(())
    }
}

/// What the device runs with: asked for, and nothing of it changed. The pair of queues is that of whoever drives, whose rings begin at `from`.
fn ask<B: Bus>(
    bus: &mut B,
    memory: &NicMemory,
    options: &NicOptions,
    from: Iova,
) -> Result<(Transport<B::Registers>, Terms), NicError> {
    setup::check_options(options)?;
    setup::check_memory(memory, options)?;
    let header = setup::check_card(bus)?;
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

/// Has the device use none of these queues.
fn reset_queues(transport: &Transport<impl Registers>, queues: &[u16]) -> Result<(), NicError> {
    queues.iter().try_for_each(|&queue| match transport.queue(queue)? {
        (_, None) => Ok(()),
        (_, Some(_)) => transport.reset_queue(queue),
    })
}

impl<B: Bus> VirtioNet<B> {
    fn can_do(&self) -> Can {
        Can { point: self.terms.resets_queues(), pauses: false, fenced: false, steer: self.terms.steers() }
    }

    /// Has the device use our queues again, and has what comes come there, whatever a taker has done that is no more.
    pub(super) fn bring_all_back(&mut self) -> Result<(), NicError> {
        self.bring_back()?;
        if self.terms.steers() {
            self.steer(self.transport.way().pair)?;
            self.renew_spare(|_| ())?;
        }
        Ok(())
    }

    /// How far a giver is, once the device has answered whether frames come elsewhere, if it was asked.
    fn is_steered(&mut self) -> Option<Quiesce> {
        let quiesce = self.quiesce.as_mut()?;
        if quiesce.asked.is_some() && !quiesce.steered {
            match self.control.as_mut()?.is_obeyed() {
                Ok(false) => return None,
                Ok(true) => (quiesce.steered, quiesce.since) = (true, Instant::now()),
                Err(_) => quiesce.asked = None,
            }
        }
        Some(*quiesce)
    }

    /// The other pair of queues lies in our memory, and not in somebody's that is gone, or will be.
    fn renew_spare(&mut self, mut between: impl FnMut(&mut Self)) -> Result<(), NicError> {
        self.reset_others(&[queues::TRANSMIT, queues::RECEIVE], &mut between)?;
        self.lend_spare(between)?;
        self.ring_receive();
        self.transport.status().map(drop)
    }

    /// Has all frames come to this pair of queues.
    pub(super) fn steer(&mut self, pair: u16) -> Result<(), NicError> {
        self.ask_to_steer(pair)?;
        let Self { control, transport, .. } = self;
        control.as_mut().map_or(Ok(()), |control| control.obeyed(transport))
    }

    /// Asks the device to.
    fn ask_to_steer(&mut self, pair: u16) -> Result<(), NicError> {
        let mut driver_state = DriverState::blank();
        self.write_seldom_to(&mut driver_state);
        let Some(control) = &mut self.control else { return Err(broken("it has no queue for commands", 0)) };
        let mut announce = |commands| {
            driver_state.commands = commands;
            self.memory.ledger().write_seldom(driver_state.seldom());
        };
        control.steer(&self.transport, pair, &mut announce)
    }

    /// The device knows the other pair of queues, too, in which nothing is. A queue can be reset, and be used from elsewhere, only if the device knew it before it ran
    /// (§3.1.1, §2.6.1); and all pairs are to be set up that it is told to use (§5.1.6.5.5.1). QEMU's leaves lying what comes by way of a pair that is not, wherever
    /// that is steered.
    pub(super) fn lend_spare(&mut self, mut between: impl FnMut(&mut Self)) -> Result<(), NicError> {
        if !self.terms.steers() {
            return Ok(());
        }
        let layout = self.layout;
        for queue in [queues::RECEIVE, queues::TRANSMIT] {
            self.with_other_pair(|transport, memory| set_up_spare(transport, &layout, queue, memory.rings_at()))?;
            between(self);
        }
        Ok(())
    }

    /// It is nobody's from here on.
    pub(super) fn take_spare_back(&mut self) -> Result<(), NicError> {
        if !self.terms.steers() {
            return Ok(());
        }
        self.reset_others(&[queues::TRANSMIT, queues::RECEIVE], |_| ())
    }

    /// The device has none of these queues of the other pair's any more, or the one for commands.
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

    /// Has the transport speak of the other pair of queues.
    fn with_other_pair<T>(&mut self, then: impl FnOnce(&Transport<B::Registers>, &NicMemory) -> T) -> T {
        let ours = self.transport.way().pair;
        self.transport.choose(other(ours));
        let done = then(&self.transport, &self.memory);
        self.transport.choose(ours);
        done
    }

    /// The device comes to know our pair of queues, to which nothing comes yet, in the place of whatever was left there.
    fn open_pair(&mut self) -> Result<(), NicError> {
        reset_queues(&self.transport, &[queues::TRANSMIT, queues::RECEIVE])?;
        self.enable_queues()?;
        self.ring_both();
        self.transport.status().map(drop)
    }

    /// Our pair of queues is what it was before.
    fn close_pair(&self, lent: Option<Iova>) -> Result<(), NicError> {
        reset_queues(&self.transport, &[queues::TRANSMIT, queues::RECEIVE])?;
        if let Some(rings_at) = lent {
            set_up_spare(&self.transport, &self.layout, queues::RECEIVE, rings_at)?;
            set_up_spare(&self.transport, &self.layout, queues::TRANSMIT, rings_at)?;
            self.ring_receive();
        }
        self.transport.status().map(drop)
    }

    /// What the device has of a former owner's it has no longer: the other pair of queues, and that for commands, which is ours from now on.
    fn close_other_pair(&mut self, mut between: impl FnMut(&mut Self)) -> Result<(), NicError> {
        self.reset_others(&[queues::TRANSMIT, queues::RECEIVE, queues::CONTROL], &mut between)?;
        // We have given no command yet, so a successor finds no other count of them.
        self.control.iter_mut().for_each(control::Control::begin);
        self.enable_control()?;
        between(self);
        self.lend_spare(between)?;
        self.ring_receive();
        self.transport.status().map(drop)
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
            let interrupt = setup::interrupt(&mut bus)?;
            memory.map_anew(&mut bus)?;
            Assembly::new(&memory, (transport, interrupt, mac), terms, Cursors::default(), setup::orders())
        });
        let mut parts = match asked {
            Ok(parts) => parts,
            Err(error) => return Err(Failed { error, bus, memory }),
        };
        let ledger = memory.ledger();
        ledger.belongs(None);
        ledger.forget();
        ledger.halted(false);
        parts.empty(&memory);
        parts.rx.refill(&memory);
        // The device is told together with all the rest.
        parts.rx.chains.committed(0);
        let mut nic = VirtioNet::new(bus, memory, parts, Counts::default());
        nic.write_seldom();
        nic.enter_ledger(0);
        nic.memory.ledger().belongs(None);
        let [lent, ..] = nic.layout.spare[0].addresses_from(from);
        let lent = nic.transport.queue(queues::RECEIVE).is_ok_and(|(_, at)| at == Some(lent)).then_some(from);
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
            // Of a device that is gone nothing reaches the memory any more.
            let _ = nic.close_pair(lent);
        }
        let VirtioNet { mut bus, memory, .. } = nic;
        // Nobody has to be told that it was gone already.
        let _ = memory.unmap(&mut bus);
        memory.take_back();
        (bus, memory)
    }

    fn quiesce(&mut self, how: How, _: impl FnMut(&mut Self)) {
        self.memory.ledger().halted(true);
        let other = other(self.transport.way().pair);
        // A device that refuses is not left: nothing goes elsewhere.
        let asked = (how == How::Steer && self.ask_to_steer(other).is_ok()).then_some(other);
        self.quiesce = Some(Quiesce { since: Instant::now(), off: false, asked, steered: false, how });
    }

    fn is_quiet(&mut self) -> bool {
        let Some(quiesce) = self.is_steered() else { return false };
        if quiesce.how == How::Steer && !quiesce.steered {
            // It refuses, which whoever leaves it is told.
            return true;
        }
        // What the device writes that it must not is found out by who receives or sends next.
        let sent = self.tx.reap(self.memory.arena()).is_ok() && self.tx.chains.is_empty();
        let silent = self.rx.is_ready().is_ok_and(|ready| !ready);
        silent && sent || quiesce.since.elapsed() > DRAIN
    }

    fn leave(&mut self) -> Result<bool, NicError> {
        let Some(quiesce) = self.quiesce else {
            return Err(broken("it was not quiesced before it was to be left", 0));
        };
        self.can_do().go(quiesce.how)?;
        self.commit(&Burst::new());
        if quiesce.how == How::Steer {
            // What is on its way to our pair yet comes at once, or was given up with what waits there.
            return match quiesce.steered {
                true => Ok(!self.rx.is_ready()? && self.tx.chains.is_empty()),
                false => Err(broken("the device does not have frames come to its other queues", 0)),
            };
        }
        if !quiesce.off {
            self.transport.reset_queue(queues::RECEIVE)?;
            self.quiesce = Some(Quiesce { off: true, ..quiesce });
        }
        if self.rx.is_ready()? {
            // It came at the last moment.
            return Ok(false);
        }
        self.drain()?;
        self.commit(&Burst::new());
        self.transport.reset_queue(queues::TRANSMIT)?;
        if self.control.is_some() {
            self.transport.reset_queue(queues::CONTROL)?;
        }
        Ok(true)
    }

    fn left(&self) -> Left {
        match self.quiesce.filter(|quiesce| quiesce.steered).and_then(|quiesce| quiesce.asked) {
            Some(pair) => Left(STEERED | u64::from(pair)),
            None => Left::STOPPED,
        }
    }

    fn go_back(&mut self) -> Result<(), NicError> {
        let Some(quiesce) = self.quiesce else { return Ok(()) };
        match quiesce.how {
            How::Steer => self.steer(self.transport.way().pair)?,
            How::Point | How::Fenced(_) => self.bring_back()?,
        }
        self.quiesce = None;
        self.refill();
        self.write_seldom();
        self.commit_sent();
        self.memory.ledger().belongs(Some((DriverState::KIND, DriverState::VERSION)));
        self.memory.ledger().halted(false);
        self.ring_both();
        self.transport.status().map(drop)
    }

    fn repoint(Ready { mut nic, how, lent }: Ready<B>, left: Left) -> Result<Self, Failed<B>> {
        if how == How::Steer {
            if left != Left(STEERED | u64::from(nic.transport.way().pair)) {
                // It may have, and died: the memory of ours goes, and so the queues must.
                let _ = nic.close_pair(lent);
                let error = broken("the giver has not had frames come to our queues, but left the device at", left.0);
                return Err(nic.failed(error));
            }
            // Until the rest of the device is ours, too, who comes next has to see to that: `forget`.
            nic.memory.ledger().halted(true);
            nic.memory.ledger().belongs(Some((DriverState::KIND, DriverState::VERSION)));
            return Ok(nic);
        }
        let uses = nic.queues().try_for_each(|queue| match nic.transport.queue(queue)? {
            (_, None) => Ok(()),
            (_, Some(at)) => Err(broken("the device uses a queue, though it was left, at", at.0)),
        });
        if let Err(error) = uses.and_then(|()| nic.transport.status()) {
            return Err(nic.failed(error));
        }
        // Should we die in the middle of it, who comes next has the device go on, or points it elsewhere.
        nic.memory.ledger().halted(true);
        nic.memory.ledger().belongs(Some((DriverState::KIND, DriverState::VERSION)));
        if let Err(error) = nic.enable_queues().and_then(|()| nic.enable_control()) {
            return Err(nic.failed(error));
        }
        nic.memory.ledger().halted(false);
        nic.ring_both();
        Ok(nic)
    }

    fn forget(&mut self, old: &MemoryLayout, mut between: impl FnMut(&mut Self)) -> Result<(), NicError> {
        if self.memory.ledger().is_halted() {
            // It was steered to, and has a part of its former owner's yet.
            self.close_other_pair(&mut between)?;
            self.memory.ledger().halted(false);
        } else if self.terms.steers() {
            self.renew_spare(&mut between)?;
        }
        between(self);
        self.bus.hurry(true);
        let outcome = old.unmap_by(|at, len| {
            let unmapped = self.bus.unmap_dma(at, len);
            between(self);
            unmapped
        });
        self.bus.hurry(false);
        Ok(outcome?)
    }
}
