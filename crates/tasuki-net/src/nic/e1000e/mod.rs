//! The Intel 82574L: gigabit, two receive queues, MSI-X.
//!
//! [`Driver`] has what is alike in all drivers.
//!
//! - `regs.rs` holds the registers of the data sheet.
//! - `ring.rs` moves slots.
//! - `setup.rs` prepares a card.
//! - `park.rs` stops the card and lets it go on.
//! - `repoint.rs` points the card at another owner's rings.
//! - `left.rs` says what a last owner can have left in the card.
//! - `flow.rs` has card and link partner pause for each other.
//! - `driver_state.rs` is the state that a successor needs.
//!
//! One vector signals all received frames. The driver looks for sent frames when it has more to send.

mod counters;
mod driver_state;
mod flow;
mod left;
mod park;
mod regs;
mod repoint;
mod ring;
mod setup;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use tasuki_shm::arena::Slot;
use tasuki_shm::crash;

use self::counters::Counters;
pub use self::driver_state::DriverState;
use self::driver_state::{MTA_WORDS, ReceiveDriverState, SENT, SKIPPING};
use self::regs::{Mmio, cause, rctl};
use self::repoint::Quiesce;
pub use self::repoint::Ready;
use self::ring::{ReceiveRing, ReceiveRings, TransmitRing};
use self::setup::Shape;
use super::bus::{self, Bus, Header, Registers, pci};
use super::driver::{Assembly, Card, Driver, Handled, Receive as _, Transmit as _, short};
use super::driver_state::{Head, broken};
use super::ledger::CURSORS;
use super::{Filter, Link, Mac, NicError, NicMemory, NicOptions, PciId};
use crate::port::Burst;

/// IDs of the cards that this driver drives: the 82574L, and its variant without management.
pub const IDS: [PciId; 2] = [PciId { vendor: 0x8086, device: 0x10d3 }, PciId { vendor: 0x8086, device: 0x10f6 }];

/// Name of the supported cards, for errors.
const DRIVER: &str = "the Intel 82574L";
/// BAR that holds the registers.
const BAR: u8 = 0;

/// A running 82574L.
pub type E1000e<B> = Driver<I82574<B>>;

/// An 82574L, and what its driver knows of it.
#[derive(Debug)]
pub struct I82574<B: Bus> {
    mmio: Mmio<B::Registers>,
    /// Readable when the card has received something.
    bell: OwnedFd,
    shape: Shape,
    mac: Mac,
    filter: u16,
    /// Whether the card is to use flow control. `agreed` says whether it has the result of the negotiation since the
    /// link came up.
    flow_control: bool,
    agreed: bool,
    /// Whether the partner pauses since the card was parked, until all frames that had come before are received.
    held: bool,
    /// Progress of a handover to another owner's rings.
    quiesce: Quiesce,
    /// Contents of the multicast table.
    mta: Box<[u32; MTA_WORDS]>,
    /// Whether the card was pointed here from an owner that is not trusted, and some of what that owner left is
    /// still to be put right.
    suspect: bool,
    /// Number of frames lost because they came to that owner.
    came_too_late: u64,
    /// How long it took to point the card here, if frames may be lost by that.
    held_up: Option<Duration>,
    /// Slots that such a card does not reach yet.
    rest: Vec<Slot>,
}

/// Registers and interrupt of a card that another process drives.
#[derive(Debug)]
pub struct Reached<B: Bus> {
    mmio: Mmio<B::Registers>,
    bell: OwnedFd,
    /// Room for the multicast table: a taker has no time to allocate it.
    mta: Box<[u32; MTA_WORDS]>,
}

/// Returns a multicast table that lets nothing in.
fn empty_table() -> Box<[u32; MTA_WORDS]> {
    Box::new([0; MTA_WORDS])
}

impl<B: Bus> Reached<B> {
    fn of(bus: &mut B, mmio: Mmio<B::Registers>) -> Result<Self, NicError> {
        Ok(Reached { mmio, bell: bus::interrupt(bus)?, mta: empty_table() })
    }
}

impl<B: Bus> I82574<B> {
    /// Returns a card that lets in frames for its address alone, and uses no flow control.
    fn new(Reached { mmio, bell, mta }: Reached<B>, shape: Shape, mac: Mac) -> Self {
        I82574 {
            mmio,
            bell,
            shape,
            mac,
            filter: 0,
            flow_control: false,
            // A predecessor's link may have gone down and come back meanwhile.
            agreed: false,
            held: false,
            quiesce: Quiesce::default(),
            mta,
            suspect: false,
            came_too_late: 0,
            held_up: None,
            rest: Vec::new(),
        }
    }

    fn apply_filter(&mut self, filter: &Filter) {
        let table;
        (self.filter, table) = filter_of(filter);
        for (index, (new, old)) in (0..).zip(table.iter().zip(self.mta.iter_mut())) {
            if new != old {
                self.mmio.write(regs::MTA.of(index), *new);
                *old = *new;
            }
        }
    }

    /// Returns the filter's part of the receive control register.
    fn filter_bits(&self) -> u32 {
        let everything = if self.filter & 1 == 1 { rctl::UPE | rctl::MPE } else { 0 };
        let multicast = if self.filter & 2 == 2 { rctl::MPE } else { 0 };
        everything | multicast
    }

    /// Returns once the card has answered: earlier writes have arrived there.
    fn answers(&self) -> Result<(), NicError> {
        match self.mmio.read(regs::STATUS) {
            u32::MAX => Err(NicError::Gone),
            _ => Ok(()),
        }
    }
}

impl<B: Bus> E1000e<B> {
    /// Lets the partner go on once all frames from before the parking have been received. Frames that wait in the
    /// card's buffer while a ring has no slots are not received yet.
    #[cold]
    fn let_go_if_empty(&mut self) {
        if !self.rx.iter().any(|ring| ring.is_empty() || ring.is_ready()) {
            self.let_go();
        }
    }

    fn let_go(&mut self) {
        if let Some(since) = self.card.quiesce.let_go_at() {
            return self.finish_letting_go(since);
        }
        self.card.held = false;
        self.write_seldom();
        park::let_go(&self.card.mmio, self.card.shape.frame(), &mut self.counts);
    }
}

/// Returns the filter in the driver state's format, and the multicast table.
fn filter_of(filter: &Filter) -> (u16, [u32; MTA_WORDS]) {
    let mut table = [0_u32; MTA_WORDS];
    for Mac([.., e, f]) in &filter.multicast {
        // The hash is the 12 highest bits of the address, in the order of the wire: section 10.2.5, Multicast Table
        // Array, and RCTL.MO = 0.
        let hash = (u16::from(*f) << 8 | u16::from(*e)) >> 4;
        table[usize::from(hash >> 5)] |= 1 << (hash & 0x1f);
    }
    (u16::from(filter.promiscuous) | u16::from(filter.all_multicast) << 1, table)
}

/// Checks that the card is where the driver state says.
fn check_parked(
    mmio: &Mmio<impl Registers>,
    memory: &NicMemory,
    driver_state: &DriverState,
    (rx, tx): (&ReceiveRings, &TransmitRing),
) -> Result<(), NicError> {
    let is = |what, found: u32, said: u32| if found == said { Ok(()) } else { Err(broken(what, found.into())) };
    if mmio.read(regs::STATUS) == u32::MAX {
        return Err(NicError::Gone);
    }
    driver_state.head.check_mac(setup::mac(mmio)?)?;
    is("the card receives, though parked", mmio.read(regs::RCTL) & rctl::EN, 0)?;
    is("the card sends, though parked", mmio.read(regs::TCTL) & regs::tctl::EN, 0)?;
    let shape = driver_state.shape(&memory.layout())?;
    let at = |index| shape.ring_at(memory.rings_at(), index).halves();
    for (index, ring) in (0_u8..).zip(rx) {
        let ((low, high), index) = (at(index.into()), index.into());
        is("the card has a receive ring elsewhere, at", mmio.read(regs::RDBAL.of(index)), low)?;
        is("the card has a receive ring elsewhere, at", mmio.read(regs::RDBAH.of(index)), high)?;
        is("the card has another tail of a receive ring", mmio.read(regs::RDT.of(index)), ring.tail())?;
    }
    let (low, high) = at(rx.len());
    is("the card has its transmit ring elsewhere, at", mmio.read(regs::TDBAL), low)?;
    is("the card has its transmit ring elsewhere, at", mmio.read(regs::TDBAH), high)?;
    is("the card has another tail of its transmit ring", mmio.read(regs::TDT), tx.tail())
}

impl<B: Bus> Card for I82574<B> {
    type Bus = B;
    type DriverState = DriverState;
    type Counts = Counters;
    type Ring = ReceiveRing;
    type Rx = ReceiveRings;
    type Tx = TransmitRing;
    type Reached = Reached<B>;

    fn check(bus: &mut B, memory: &NicMemory, options: &NicOptions) -> Result<(), NicError> {
        Shape::of(options, &memory.layout())?;
        Header::of(bus, &IDS, DRIVER).map(drop)
    }

    /// Leaves the filter out, and both units off.
    fn reset(bus: &mut B, memory: &NicMemory, options: &NicOptions) -> Result<Assembly<Self>, NicError> {
        let shape = Shape::of(options, &memory.layout())?;
        let mmio = Mmio(bus.registers(BAR)?);
        setup::reset(&mmio)?;
        // QEMU's card, up to version 7.2 at least, keeps its last owner's setup over this reset: a second transmit
        // queue, for one.
        left::begin_anew(&mmio);
        memory.take_back();
        // Map the memory only after the reset: otherwise the card would go on in it with what a predecessor told it
        // to do.
        memory.map_anew(bus)?;
        pci::enable(bus, true)?;
        let bell = bus::interrupt(bus)?;
        let (rx, tx) = (ReceiveRing::all_empty(memory, shape), TransmitRing::empty(memory, shape));
        setup::general(&mmio);
        // The reset does not cover the PHY, so it may be as a last owner has set it.
        if !left::PHY.into_iter().all(|register| left::is_sound(&mmio, register)) {
            left::reset_phy(&mmio);
        }
        let mac = setup::mac(&mmio)?;
        setup::receive(&mmio, shape, memory.rings_at());
        setup::transmit(&mmio, shape, memory.rings_at());
        (0..128).for_each(|index| mmio.write(regs::MTA.of(index), 0));
        let counts = Counters::start(&mmio);
        Ok(Assembly { card: I82574::new(Reached { mmio, bell, mta: empty_table() }, shape, mac), rx, tx, counts })
    }

    fn begin(nic: &mut E1000e<B>, options: &NicOptions) -> Result<(), NicError> {
        let card = &mut nic.card;
        if options.flow_control {
            flow::prepare(&card.mmio, card.shape.frame(), true);
        }
        card.flow_control = options.flow_control;
        card.apply_filter(&options.filter);
        setup::enable(&card.mmio, card.shape, card.filter_bits());
        Ok(())
    }

    fn find(bus: &mut B, memory: &NicMemory, driver_state: &DriverState) -> Result<Assembly<Self>, NicError> {
        Header::of(bus, &IDS, DRIVER)?;
        let (rx, tx) = Self::rings(memory, driver_state)?;
        let mmio = Mmio(bus.registers(BAR)?);
        check_parked(&mmio, memory, driver_state, (&rx, &tx))?;
        let (card, counts) = Self::attach(Reached::of(bus, mmio)?, memory, driver_state)?;
        memory.ledger().halted(true);
        Ok(Assembly { card, rx, tx, counts })
    }

    fn stop(nic: &mut E1000e<B>) -> Result<Box<DriverState>, NicError> {
        nic.memory.ledger().halted(true);
        park::stop(&nic.card.mmio, nic.card.shape.frame(), &mut nic.counts)?;
        nic.tx.reap(nic.memory.arena())?;
        nic.commit(&Burst::new());
        nic.counts.collect(&nic.card.mmio);
        Ok(nic.to_driver_state())
    }

    fn reach(bus: &mut B) -> Result<Self::Reached, NicError> {
        let mmio = Mmio(bus.registers(BAR)?);
        Reached::of(bus, mmio)
    }

    fn settle(Reached { mmio, .. }: &Reached<B>) -> Result<(), NicError> {
        if mmio.0.is_behind() {
            // Reading any register waits for all earlier writes, of any process.
            if mmio.read(regs::STATUS) == u32::MAX {
                return Err(NicError::Gone);
            }
            mmio.0.settled();
        }
        Ok(())
    }

    fn rings(memory: &NicMemory, driver_state: &DriverState) -> Result<(ReceiveRings, TransmitRing), NicError> {
        let shape = driver_state.shape(&memory.layout())?;
        let rx = ReceiveRing::all(memory, shape, &driver_state.receive);
        Ok((rx, TransmitRing::at(memory, shape, [driver_state.sent, driver_state.filled])))
    }

    fn attach(
        reached: Self::Reached,
        memory: &NicMemory,
        driver_state: &DriverState,
    ) -> Result<(Self, Counters), NicError> {
        let shape = driver_state.shape(&memory.layout())?;
        let mut card = I82574::new(reached, shape, Mac(driver_state.head.mac));
        (card.filter, *card.mta) = (driver_state.filter, driver_state.mta);
        (card.flow_control, card.held) = (driver_state.flow_control & 1 == 1, driver_state.flow_control & 2 == 2);
        Ok((card, Counters::resume(&driver_state.counters)))
    }

    fn go_on(nic: &mut E1000e<B>, driver_state: Option<&DriverState>) -> Result<(), NicError> {
        if let Some(driver_state) = driver_state {
            nic.rx.iter().zip(&driver_state.posted).for_each(|(ring, posted)| ring.take_over(posted));
            nic.tx.take_over(driver_state);
        }
        if nic.memory.ledger().is_halted() {
            nic.go_on_halted()?;
            nic.card.held = true;
        }
        Ok(())
    }

    fn write(nic: &E1000e<B>, driver_state: &mut DriverState) {
        let card = &nic.card;
        driver_state.head = Head::of::<DriverState>(&nic.memory.layout(), card.mac, card.shape.ring);
        (driver_state.queues, driver_state.mtu, driver_state.filter) =
            (card.shape.queues.into(), card.shape.mtu, card.filter);
        driver_state.flow_control = u16::from(card.flow_control) | u16::from(card.held) << 1;
        driver_state.receive.fill(ReceiveDriverState::default());
        let places = driver_state.receive.iter_mut().zip(&mut driver_state.posted);
        for (ring, (cursors, posted)) in nic.rx.iter().zip(places) {
            *cursors = ring.to_driver_state(posted);
        }
        nic.tx.to_driver_state(driver_state);
        driver_state.mta = *card.mta;
        driver_state.counters = nic.counts.to_driver_state();
    }

    #[inline]
    fn cursors(rx: &ReceiveRings, tx: &TransmitRing, handled: Handled, into: &mut [u64; CURSORS]) {
        for (queue, ring) in rx.iter().enumerate() {
            let (word, skipping) = ring.cursors(short(handled[queue]));
            into[queue] = word;
            into[SKIPPING] |= u64::from(skipping) << queue;
        }
        into[SENT] = tx.cursors();
    }

    #[inline]
    fn committed(nic: &mut E1000e<B>, handled: Handled) {
        for (queue, ring) in (0_u8..).zip(&mut nic.rx) {
            if let Some(tail) = ring.committed(short(handled[usize::from(queue)])) {
                // POST
                nic.card.mmio.write(regs::RDT.of(queue.into()), tail);
            }
        }
        crash::point("nic.rung");
        if let Some(tail) = nic.tx.committed() {
            // POST
            nic.card.mmio.write(regs::TDT, tail);
        }
    }

    fn ring_all(nic: &mut E1000e<B>) {
        for (queue, ring) in (0..).zip(&nic.rx) {
            // POST
            nic.card.mmio.write(regs::RDT.of(queue), ring.tail());
        }
        // POST
        nic.card.mmio.write(regs::TDT, nic.tx.tail());
    }

    #[inline]
    fn takes_slots(&self) -> bool {
        !self.quiesce.is_off()
    }

    #[inline]
    fn idle(nic: &mut E1000e<B>) {
        if nic.card.held {
            nic.let_go_if_empty();
        }
    }

    fn arm(nic: &mut E1000e<B>) -> Result<bool, NicError> {
        // The order matters. The rings are looked at only after the card has answered a read, so that look sees
        // every frame that came before the causes were cleared. A later frame sets its cause again, and that cause
        // is not masked.
        nic.card.mmio.clear(regs::ICR, cause::RXQ);
        nic.card.mmio.write(regs::IMS, cause::RXQ);
        nic.card.answers()?;
        Ok(nic.rx.iter().any(ReceiveRing::is_ready))
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    fn flush(&self) {
        if self.mmio.0.is_behind() {
            self.mmio.read(regs::STATUS);
        }
    }

    fn mac(&self) -> Mac {
        self.mac
    }

    fn link(&mut self) -> Result<Link, NicError> {
        let link = match self.mmio.read(regs::STATUS) {
            u32::MAX => return Err(NicError::Gone),
            status => park::link(status),
        };
        match (link, self.agreed, self.flow_control) {
            (Link::Up { full_duplex: true, .. }, false, true) => flow::agree(&self.mmio),
            // Undo the agreement with an earlier partner.
            (Link::Up { full_duplex: false, .. }, false, true) => flow::disagree(&self.mmio),
            _ => {}
        }
        self.agreed = link != Link::Down;
        Ok(link)
    }

    fn now_and_then(nic: &mut E1000e<B>) {
        if nic.counts.now_and_then(&nic.card.mmio, Instant::now()) {
            nic.write_seldom();
        }
    }

    fn set_filter(nic: &mut E1000e<B>, filter: &Filter) -> Result<(), NicError> {
        nic.card.apply_filter(filter);
        nic.write_seldom();
        nic.card.mmio.change(regs::RCTL, rctl::UPE | rctl::MPE, nic.card.filter_bits());
        // Frames that come after the answer meet the new filter.
        nic.card.answers()
    }

    fn statistics(nic: &mut E1000e<B>) -> Vec<(&'static str, u64)> {
        nic.counts.collect(&nic.card.mmio);
        nic.write_seldom();
        nic.counts.list()
    }
}
