//! A card that goes on running while its driver is replaced.

use tasuki_shm::slots::{SlotId, WrongSlot};

use super::regs::{self, Mmio};
use super::ring::{ReceiveRing, TransmitRing};
use super::sash::{ReceiveSash, Sash};
use super::{Assembly, BAR, Counters, E1000e, SENT, SKIPPING, bell};
use crate::nic::bus::{Bus, Registers};
use crate::nic::ledger::TURNS;
use crate::nic::sash::{Head, Sash as _, broken};
use crate::nic::{Failed, InPlace, Mac, NicError, NicMemory};
use crate::port::{Burst, Frame};

/// Everything but the sash.
#[derive(Debug)]
pub struct Prepared<B: Bus> {
    bus: B,
    memory: NicMemory,
    mmio: Mmio<B::Registers>,
    bell: std::os::fd::OwnedFd,
}

impl<B: Bus> E1000e<B> {
    /// What a successor must know: where the driver stands, whether the card runs or not. The sash was blank, or was written by this driver before.
    pub(super) fn write_sash(&self, sash: &mut Sash) {
        sash.head = Head::of::<Sash>(&self.memory.layout(), self.mac, self.shape.ring);
        (sash.queues, sash.mtu, sash.filter) = (self.shape.queues.into(), self.shape.mtu, self.filter);
        sash.flow_control = u16::from(self.flow_control) | u16::from(self.held) << 1;
        sash.receive.fill(ReceiveSash::default());
        for (ring, (cursors, posted)) in self.receive.iter().zip(sash.receive.iter_mut().zip(&mut sash.posted)) {
            *cursors = ring.to_sash(posted);
        }
        (sash.sent, sash.filled) = self.transmit.to_sash(&mut sash.sending);
        sash.mta = *self.mta;
        sash.counters = self.counters.to_sash();
    }

    /// The ledger is ours. A predecessor that died may have committed what it did not tell the card, so the doorbells are rung again; and it
    /// may have been about to halt the card.
    fn take_over_ledger(&mut self, sash: &Sash) {
        // Nothing of that is the driver's alone, and somebody waits.
        self.memory.ledger().write_seldom(sash.seldom());
        self.enter_ledger();
        if self.memory.ledger().is_halted() {
            self.go_on_halted();
            self.held = true;
            self.memory.ledger().halted(false);
        }
        for (queue, ring) in (0..).zip(&self.receive) {
            // POST
            self.mmio.write(regs::RDT.of(queue), ring.tail());
        }
        // POST
        self.mmio.write(regs::TDT, self.transmit.tail());
    }
}

/// The two cursors of a word.
#[expect(clippy::cast_possible_truncation, reason = "the two halves of a word")]
fn halves(word: u64) -> (u32, u32) {
    (word as u32, (word >> 32) as u32)
}

/// The sash names a slot that there is not, or one twice.
fn refused(wrong: WrongSlot) -> NicError {
    let (WrongSlot::S1 { index, .. }
    | WrongSlot::S2 { id: SlotId { index, .. }, .. }
    | WrongSlot::S3 { id: SlotId { index, .. }, .. }) = wrong;
    broken("it names a slot twice, or one that is not there", index.into())
}

impl<B: Bus> InPlace for E1000e<B> {
    type Prepared = Prepared<B>;

    fn bus(&self) -> &B {
        &self.bus
    }

    fn sash(&mut self, into: &mut Sash) {
        self.transmit.reclaim(self.memory.arena());
        self.commit(&Burst::new());
        if self.mmio.0.is_behind() {
            self.mmio.read(regs::STATUS);
        }
        self.write_sash(into);
    }

    fn prepare(mut bus: B, memory: NicMemory) -> Result<Prepared<B>, Failed<B>> {
        memory.take_back();
        let ready = bus.registers(BAR).map(Mmio).and_then(|mmio| Ok((mmio, bell(&mut bus)?)));
        match ready {
            Ok((mmio, bell)) => Ok(Prepared { bus, memory, mmio, bell }),
            Err(error) => Err(Failed { error: error.into(), bus, memory }),
        }
    }

    fn go_on(prepared: Prepared<B>, sash: &Sash) -> Result<Self, Failed<B>> {
        let Prepared { bus, memory, mmio, bell } = prepared;
        let layout = memory.layout();
        let shape = match sash.check_alone(&layout).and_then(|()| sash.shape(&layout)) {
            Ok(shape) => shape,
            Err(error) => return Err(Failed { error, bus, memory }),
        };
        if let Err(wrong) = memory.lend(sash.slots()) {
            // What was lent so far is free again: nothing was touched.
            memory.take_back();
            return Err(Failed { error: refused(wrong), bus, memory });
        }
        let receive = (0..usize::from(shape.queues)).map(|queue| ReceiveRing::resume(&memory, queue, sash)).collect();
        let parts = Assembly {
            mmio,
            bell,
            receive,
            transmit: TransmitRing::resume(&memory, sash),
            shape,
            mac: Mac(sash.head.mac),
            filter: sash.filter,
            flow_control: sash.flow_control & 1 == 1,
            mta: Box::new(sash.mta),
            counters: Counters::resume(&sash.counters),
        };
        let held = sash.flow_control & 2 == 2;
        let mut nic = E1000e { held, ..Self::assemble(bus, memory, parts) };
        nic.take_over_ledger(sash);
        Ok(nic)
    }

    fn settle(prepared: &Prepared<B>) -> Result<(), NicError> {
        if !prepared.mmio.0.is_behind() {
            return Ok(());
        }
        // Reading any register waits for what was written before, by whomever.
        match prepared.mmio.read(regs::STATUS) {
            u32::MAX => Err(NicError::Gone),
            _ => {
                prepared.mmio.0.settled();
                Ok(())
            }
        }
    }

    fn salvage(prepared: &Prepared<B>, sash: &mut Sash) -> Result<(), NicError> {
        let (memory, ledger) = (&prepared.memory, prepared.memory.ledger());
        match ledger.whose() {
            None => return Err(broken("nobody drove the card", 0)),
            Some((Sash::KIND, Sash::VERSION)) => {}
            Some((kind, version)) => return Err(NicError::OtherSash { kind, version, ours: Sash::VERSION }),
        }
        let before = (sash.head.ring, sash.queues);
        sash.set_seldom(&ledger.read_seldom());
        if before != (0, 0) && before != (sash.head.ring, sash.queues) {
            // Rings of another shape: what lies beyond these is blank.
            sash.clear_tables();
        }
        let cursors = ledger.cursors();
        // The rings are found by what the sash says of them.
        sash.head_of(&memory.layout())?;
        for (queue, (receive, word)) in sash.receive.iter_mut().zip(cursors).enumerate() {
            let (next, tail) = halves(word);
            let skipping = u32::from(cursors[SKIPPING] >> queue & 1 == 1);
            *receive = ReceiveSash { next, tail, skipping, reserved: 0 };
        }
        (sash.sent, sash.filled) = halves(cursors[SENT]);
        sash.check_cursors()?;
        (0..usize::from(sash.queues)).try_for_each(|queue| ReceiveRing::salvage(memory, queue, sash))?;
        TransmitRing::salvage(memory, sash);
        Ok(())
    }

    #[inline]
    fn save(&mut self, frame: &Frame) {
        for (queue, ring) in self.receive.iter_mut().enumerate() {
            if let Some(position) = ring.position_of(frame.slot.id()) {
                self.memory.ledger().save(queue, position, &frame.slot);
            }
        }
    }

    fn turns(&self) -> u64 {
        self.committed[TURNS]
    }

    fn given(&self) -> u64 {
        self.transmit.given()
    }
}
