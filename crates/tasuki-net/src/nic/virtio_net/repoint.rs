//! A device whose queues are made to lie in another owner's memory (VIRTIO_F_RING_RESET, virtio 1.2, §2.6.1).
//!
//! Virtio has no pause. So a giver goes on until nothing is left to be received or sent, and resets the queues, that for receiving first: what comes from then
//! on waits where the device has it wait, or is lost, until a taker has the queues begin in its memory. What has come at the last moment is found in the used
//! ring, and handled, and answered: transmission goes on until then. Features, address, filter, link and interrupts stay as they are.

use std::time::Instant;

use super::regs::{feature, queue as queues, status};
use super::sash::{Counts, Sash};
use super::setup::{self, Assembly, Cursors, Terms, wrong};
use super::transport::Transport;
use super::{DRAIN, VirtioNet, control};
use crate::nic::bus::Bus;
use crate::nic::sash::{Sash as _, broken};
use crate::nic::{Failed, Left, MemoryLayout, NicError, NicMemory, NicOptions, Repoint};
use crate::port::Burst;

/// How far a giver is.
#[derive(Debug, Clone, Copy)]
pub struct Hush {
    since: Instant,
    /// The receive queue is reset: nothing is posted.
    off: bool,
}

impl Hush {
    #[inline]
    pub fn is_off(self) -> bool {
        self.off
    }
}

/// A taker with rings of its own: a driver that has everything but the device.
#[derive(Debug)]
pub struct Ready<B: Bus>(VirtioNet<B>);

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

/// What the device runs with: asked for, and nothing of it changed.
fn ask<B: Bus>(
    bus: &mut B,
    memory: &NicMemory,
    options: &NicOptions,
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
    transport.find_bells(features)?;
    transport.way().check(features)?;
    for queue in [queues::RECEIVE, queues::TRANSMIT] {
        if transport.queue(queue)?.0 != options.ring {
            return Err(wrong("ring", options.ring.into(), "it must be what the card runs with"));
        }
    }
    let terms = Terms::new(&transport, features, options)?;
    Ok((transport, terms))
}

impl<B: Bus> Repoint for VirtioNet<B> {
    type Ready = Ready<B>;

    fn prepare_rings(mut bus: B, memory: NicMemory, options: &NicOptions) -> Result<Ready<B>, Failed<B>> {
        memory.take_back();
        let asked = ask(&mut bus, &memory, options).and_then(|(transport, terms)| {
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
        Ok(Ready(nic))
    }

    fn give_up(Ready(nic): Ready<B>) -> (B, NicMemory) {
        let VirtioNet { mut bus, memory, .. } = nic;
        // Nobody has to be told that it was gone already.
        let _ = memory.unmap(&mut bus);
        memory.take_back();
        (bus, memory)
    }

    fn hush(&mut self) {
        self.memory.ledger().halted(true);
        self.hush = Some(Hush { since: Instant::now(), off: false });
    }

    fn is_quiet(&mut self) -> bool {
        let Some(hush) = self.hush else { return false };
        // What the device writes that it must not is found out by who receives or sends next.
        let sent = self.tx.reap(self.memory.arena()).is_ok() && self.tx.chains.is_empty();
        let silent = self.rx.is_ready().is_ok_and(|ready| !ready);
        silent && sent || hush.since.elapsed() > DRAIN
    }

    fn leave(&mut self) -> Result<bool, NicError> {
        let Some(hush) = self.hush else {
            return Err(broken("it was not hushed before it was to be left", 0));
        };
        if !self.terms.resets_queues() {
            return Err(cannot_reset());
        }
        self.commit(&Burst::new());
        if !hush.off {
            self.transport.reset_queue(queues::RECEIVE)?;
            self.hush = Some(Hush { off: true, ..hush });
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
        Left::STOPPED
    }

    fn go_back(&mut self) -> Result<(), NicError> {
        if self.hush.is_none() {
            return Ok(());
        }
        self.bring_back()?;
        self.hush = None;
        self.refill();
        self.write_seldom();
        self.commit_sent();
        self.memory.ledger().belongs(Some((Sash::KIND, Sash::VERSION)));
        self.memory.ledger().halted(false);
        self.ring_both();
        self.transport.status().map(drop)
    }

    fn repoint(Ready(mut nic): Ready<B>, _: Left) -> Result<Self, Failed<B>> {
        let uses = nic.queues().try_for_each(|queue| match nic.transport.queue(queue)? {
            (_, None) => Ok(()),
            (_, Some(at)) => Err(broken("the device uses a queue, though it was left, at", at.0)),
        });
        if let Err(error) = uses.and_then(|()| nic.transport.status()) {
            return Err(nic.failed(error));
        }
        // Should we die in the middle of it, who comes next has the device go on, or points it elsewhere.
        nic.memory.ledger().halted(true);
        nic.memory.ledger().belongs(Some((Sash::KIND, Sash::VERSION)));
        if let Err(error) = nic.enable_queues().and_then(|()| nic.enable_control()) {
            return Err(nic.failed(error));
        }
        nic.memory.ledger().halted(false);
        nic.ring_both();
        Ok(nic)
    }

    fn forget(&mut self, old: &MemoryLayout) -> Result<(), NicError> {
        self.bus.unmap_dma(old.arena_at(), old.slots.len())?;
        Ok(self.bus.unmap_dma(old.rings_at, old.rings_len)?)
    }
}
