//! Replaces the driver of a card that goes on running.

use arrayvec::ArrayVec;

use super::driver_state::{DriverState, MTA_WORDS, ReceiveDriverState};
use super::regs::{self, Mmio};
use super::ring::{ReceiveRing, TransmitRing, not_a_slot};
use super::setup::Shape;
use super::{Assembly, BAR, Counters, E1000e, QUEUES_MAX, SENT, SKIPPING, bell};
use crate::capture::Captures;
use crate::nic::bus::{Bus, Registers};
use crate::nic::driver_state::{DriverState as _, Head, broken};
use crate::nic::ledger::TURNS;
use crate::nic::{Failed, InPlace, Mac, Nic, NicError, NicMemory};
use crate::port::{BURST_MAX, Burst, Frame, Transactional};

/// A successor that has everything but the driver state.
#[derive(Debug)]
pub struct Prepared<B: Bus> {
    bus: B,
    memory: NicMemory,
    mmio: Mmio<B::Registers>,
    bell: std::os::fd::OwnedFd,
    /// Buffer for the ledger's data; `mta` is one for the multicast table. They are allocated in advance, since a
    /// taker has no time to allocate memory.
    driver_state: Box<DriverState>,
    mta: Box<[u32; MTA_WORDS]>,
}

/// Receive and transmit rings.
struct Rings {
    receive: ArrayVec<ReceiveRing, QUEUES_MAX>,
    transmit: TransmitRing,
}

impl<B: Bus> Prepared<B> {
    /// Reads the seldom-changed data and the cursors. Touches nothing.
    fn read_ledger(&mut self) -> Result<Shape, NicError> {
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
        for (queue, (receive, word)) in driver_state.receive.iter_mut().zip(cursors).enumerate() {
            let (next, tail) = halves(word);
            let skipping = u32::from(cursors[SKIPPING] >> queue & 1 == 1);
            *receive = ReceiveDriverState { next, tail, skipping, reserved: 0 };
        }
        (driver_state.sent, driver_state.filled) = halves(cursors[SENT]);
        let layout = self.memory.layout();
        driver_state.head.check::<DriverState>(&layout)?;
        driver_state.check_seldom(&layout)
    }

    /// Maps the rest of the memory if a predecessor died before the card reached all of it.
    fn reach_all(&mut self) -> Result<(), NicError> {
        if self.memory.ledger().is_partial() {
            self.memory.map_rest(&mut self.bus)?;
            self.memory.ledger().partial(false);
        }
        Ok(())
    }

    /// Takes over the rings at these cursors: the slots in them are the card's.
    fn pick_up_rings(&self, shape: Shape) -> Result<Rings, NicError> {
        let (memory, driver_state) = (&self.memory, &*self.driver_state);
        let mut receive: ArrayVec<_, QUEUES_MAX> = ArrayVec::new();
        for queue in 0..usize::from(shape.queues) {
            receive.push(ReceiveRing::pick_up(memory, queue, shape.ring, &driver_state.receive[queue])?);
        }
        let transmit =
            TransmitRing::pick_up(memory, shape.queues.into(), shape.ring, [driver_state.sent, driver_state.filled])?;
        Ok(Rings { receive, transmit })
    }

    /// Frees the slots lent so far, and returns the error: nothing else was touched.
    fn refused(self, error: NicError) -> Failed<B> {
        self.memory.take_back();
        Failed { error, bus: self.bus, memory: self.memory }
    }

    /// Returns the driver that goes on with these rings, from `driver_state` or, without one, from the ledger's
    /// data.
    fn drive(self, driver_state: Option<&DriverState>, shape: Shape, Rings { receive, transmit }: Rings) -> E1000e<B> {
        let Prepared { bus, memory, mmio, bell, driver_state: said, mut mta } = self;
        let driver_state = driver_state.unwrap_or(&said);
        *mta = driver_state.mta;
        let parts = Assembly {
            mmio,
            bell,
            receive,
            transmit,
            shape,
            mac: Mac(driver_state.head.mac),
            filter: driver_state.filter,
            flow_control: driver_state.flow_control & 1 == 1,
            mta,
            counters: Counters::resume(&driver_state.counters),
        };
        E1000e { held: driver_state.flow_control & 2 == 2, ..E1000e::assemble(bus, memory, parts) }
    }
}

impl<B: Bus> E1000e<B> {
    /// Writes the state for a successor: the driver's progress, whether the card runs or not. `driver_state` must be
    /// blank, or written by this driver before.
    pub(super) fn write_driver_state(&self, driver_state: &mut DriverState) {
        driver_state.head = Head::of::<DriverState>(&self.memory.layout(), self.mac, self.shape.ring);
        (driver_state.queues, driver_state.mtu, driver_state.filter) =
            (self.shape.queues.into(), self.shape.mtu, self.filter);
        driver_state.flow_control = u16::from(self.flow_control) | u16::from(self.held) << 1;
        driver_state.receive.fill(ReceiveDriverState::default());
        for (ring, (cursors, posted)) in
            self.receive.iter().zip(driver_state.receive.iter_mut().zip(&mut driver_state.posted))
        {
            *cursors = ring.to_driver_state(posted);
        }
        (driver_state.sent, driver_state.filled) = self.transmit.to_driver_state(&mut driver_state.sending);
        driver_state.mta = *self.mta;
        driver_state.counters = self.counters.to_driver_state();
    }

    /// Marks the ledger as ours. Rings the doorbells again, since a predecessor that died may have committed without
    /// telling the card. Lets the card go on if that predecessor may have been about to halt it.
    fn take_over_ledger(&mut self) {
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

/// Returns the two cursors in a word.
#[expect(clippy::cast_possible_truncation, reason = "the two halves of a word")]
fn halves(word: u64) -> (u32, u32) {
    (word as u32, (word >> 32) as u32)
}

impl<B: Bus> InPlace for E1000e<B> {
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
        let ready = bus.registers(BAR).map(Mmio).and_then(|mmio| Ok((mmio, bell(&mut bus)?)));
        match ready {
            Ok((mmio, bell)) => Ok(Prepared {
                bus,
                memory,
                mmio,
                bell,
                driver_state: DriverState::blank(),
                mta: Box::new([0; MTA_WORDS]),
            }),
            Err(error) => Err(Failed { error: error.into(), bus, memory }),
        }
    }

    fn go_on(mut prepared: Prepared<B>, driver_state: &DriverState) -> Result<Self, Failed<B>> {
        if let Err(error) = prepared.reach_all() {
            return Err(prepared.refused(error));
        }
        let memory = &prepared.memory;
        let layout = memory.layout();
        let fits = driver_state.check_alone(&layout).and_then(|()| driver_state.shape(&layout));
        let lent = fits.and_then(|shape| memory.lend(driver_state.slots()).map_err(not_a_slot).map(|()| shape));
        let shape = match lent {
            Ok(shape) => shape,
            Err(error) => return Err(prepared.refused(error)),
        };
        let receive =
            (0..usize::from(shape.queues)).map(|queue| ReceiveRing::resume(memory, queue, driver_state)).collect();
        let rings = Rings { receive, transmit: TransmitRing::resume(memory, driver_state) };
        // Copy the giver's data unchanged: none of it is specific to this driver, and the peer waits.
        memory.ledger().write_seldom(driver_state.seldom());
        let mut nic = prepared.drive(Some(driver_state), shape, rings);
        nic.take_over_ledger();
        Ok(nic)
    }

    fn rehearse(prepared: &mut Prepared<B>) {
        // Ignore errors: another driver writes there meanwhile.
        let _ = prepared.read_ledger().and_then(|shape| prepared.pick_up_rings(shape));
        prepared.memory.take_back();
    }

    fn pick_up(mut prepared: Prepared<B>) -> Result<Self, Failed<B>> {
        let picked = prepared.reach_all().and_then(|()| prepared.read_ledger()).and_then(|shape| {
            let rings = prepared.pick_up_rings(shape)?;
            let mut receive = (0..).zip(&rings.receive);
            receive.try_for_each(|(queue, ring)| ring.undo(&prepared.memory, queue))?;
            Ok((shape, rings))
        });
        match picked {
            Ok((shape, rings)) => {
                let mut nic = prepared.drive(None, shape, rings);
                nic.take_over_ledger();
                Ok(nic)
            }
            Err(error) => Err(prepared.refused(error)),
        }
    }

    fn settle(prepared: &Prepared<B>) -> Result<(), NicError> {
        if !prepared.mmio.0.is_behind() {
            return Ok(());
        }
        // Reading any register waits for all earlier writes, of any process.
        match prepared.mmio.read(regs::STATUS) {
            u32::MAX => Err(NicError::Gone),
            _ => {
                prepared.mmio.0.settled();
                Ok(())
            }
        }
    }

    fn room(&mut self) -> usize {
        self.transmit.reclaim(self.memory.arena());
        if self.transmit.can_make_room(BURST_MAX) {
            self.commit_sent();
        }
        self.transmit.room()
    }

    fn captures(&mut self) -> &mut Option<Box<Captures>> {
        &mut self.captures
    }
}

impl<B: Bus> Transactional for E1000e<B> {
    fn station(&self) -> Mac {
        self.mac
    }

    fn conclude(&mut self, in_hand: &Burst) {
        self.transmit.reclaim(self.memory.arena());
        self.commit(in_hand);
        if self.mmio.0.is_behind() {
            self.mmio.read(regs::STATUS);
        }
    }

    fn withdraw(&mut self) {
        // Once the card has answered, earlier writes have arrived there.
        self.link();
    }

    #[inline]
    fn save(&mut self, frame: &Frame) {
        for (queue, ring) in self.receive.iter_mut().enumerate() {
            if let Some(position) = ring.position_of(frame.slot.id()) {
                self.memory.ledger().save(queue, position, &frame.slot);
            }
        }
    }

    fn takes(&mut self, burst: &Burst) -> bool {
        self.room() >= burst.len()
    }

    fn turns(&self) -> u64 {
        self.committed[TURNS]
    }

    fn given(&self) -> u64 {
        self.transmit.given()
    }
}
