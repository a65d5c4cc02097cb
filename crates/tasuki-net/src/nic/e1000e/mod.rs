//! The Intel 82574L: gigabit, two receive queues, MSI-X.
//!
//! - `regs.rs` holds the registers of the data sheet.
//! - `ring.rs` moves slots.
//! - `setup.rs` prepares a card.
//! - `park.rs` stops the card and lets it go on.
//! - `in_place.rs` replaces the driver while the card runs on.
//! - `repoint.rs` points the card at another owner's rings.
//! - `left.rs` says what a last owner can have left in the card.
//! - `scrub.rs` keeps the memory clean.
//! - `flow.rs` has card and link partner pause for each other.
//! - `driver_state.rs` is the state that a successor needs.
//!
//! One vector signals all received frames. The driver looks for sent frames when it has more to send.

mod counters;
mod driver_state;
mod flow;
mod in_place;
mod left;
mod park;
mod regs;
mod repoint;
mod ring;
mod scrub;
mod setup;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use arrayvec::ArrayVec;

use self::counters::Counters;
pub use self::driver_state::DriverState;
use self::driver_state::{MTA_WORDS, QUEUES_MAX};
use self::regs::{Mmio, cause, rctl};
use self::repoint::Quiesce;
pub use self::repoint::Ready;
use self::ring::{Lengths, ReceiveRing, TransmitRing, ring_at};
use self::setup::Shape;
use super::bus::pci::{self, Header};
use super::bus::{self, Bus, BusError, Registers};
use super::driver_state::{DriverState as _, broken};
use super::ledger::{CURSORS, TURNS};
use super::scrub::Dirt;
use super::{Failed, Filter, Link, Mac, Nic, NicError, NicMemory, NicOptions, PciId, Scrub, loan};
use crate::capture::{Captures, Direction};
use crate::port::{Armed, BURST_MAX, Burst, Port};
use tasuki_shm::arena::Slot;
use tasuki_shm::crash;

/// IDs of the cards that this driver drives: the 82574L, and its variant without management.
pub const IDS: [PciId; 2] = [PciId { vendor: 0x8086, device: 0x10d3 }, PciId { vendor: 0x8086, device: 0x10f6 }];

/// BAR that holds the registers.
const BAR: u8 = 0;

/// A running 82574L.
#[derive(Debug)]
pub struct E1000e<B: Bus> {
    bus: B,
    memory: NicMemory,
    mmio: Mmio<B::Registers>,
    /// Readable when the card has received something.
    bell: OwnedFd,
    receive: ArrayVec<ReceiveRing, QUEUES_MAX>,
    /// Queue that is received from first; the queues take turns.
    first: usize,
    transmit: TransmitRing,
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
    counters: Counters,
    /// Number of commits, and the cursors of the last one.
    commits: u64,
    committed: [u64; CURSORS],
    /// Whether the card was pointed here from an owner that is not trusted, and some of what that owner left is
    /// still to be put right.
    suspect: bool,
    /// Number of frames lost because they came to that owner.
    came_too_late: u64,
    /// Slots that such a card does not reach yet.
    rest: Vec<Slot>,
    /// If the memory is kept clean: the bytes that are not.
    dirt: Option<Dirt>,
    /// Captures of the passing frames, if any.
    captures: Option<Box<Captures>>,
}

/// Indices of the ledger's cursors, after those of the receive queues.
const SKIPPING: usize = QUEUES_MAX;
const SENT: usize = 3;
const GIVEN: usize = 4;
const _: () = assert!(GIVEN < TURNS);

impl<B: Bus> E1000e<B> {
    /// Gives the free slots to the card's receive rings, once all received frames are committed as handled. Until
    /// then, a freed slot may be one that a successor needs (D5).
    #[inline]
    fn refill(&mut self) {
        if self.quiesce.is_off() || self.receive.iter().any(ReceiveRing::has_unhandled) {
            return;
        }
        if self.dirt.is_some() {
            return self.refill_clean();
        }
        self.receive.iter_mut().for_each(|ring| ring.refill(&self.memory));
    }

    /// Commits all frames but those in `burst` as handled, and the frames given to the card since the last commit.
    /// That ends a turn.
    #[inline]
    fn commit(&mut self, burst: &Burst) {
        let mut handled = [0; QUEUES_MAX];
        handled.iter_mut().zip(&self.receive).for_each(|(handled, ring)| *handled = ring.handled_but(burst));
        self.commit_up_to(handled, 1);
    }

    /// Commits the frames before these positions of each receive queue as handled, and adds `turns` turns; then
    /// tells the card (D5).
    #[inline]
    pub(super) fn commit_up_to(&mut self, handled: [u32; QUEUES_MAX], turns: u64) {
        let mut cursors = [0; CURSORS];
        for (queue, ring) in self.receive.iter().enumerate() {
            let (word, skipping) = ring.cursors(handled[queue]);
            cursors[queue] = word;
            cursors[SKIPPING] |= u64::from(skipping) << queue;
        }
        (cursors[SENT], cursors[GIVEN]) = (self.transmit.cursors(), self.transmit.given());
        // No other cursor changes without one of these.
        let is_same = |word: usize| cursors[word] == self.committed[word];
        if (0..QUEUES_MAX).all(is_same) && is_same(SENT) {
            return;
        }
        cursors[TURNS] = self.committed[TURNS].wrapping_add(turns);
        self.committed = cursors;
        self.commits = self.commits.wrapping_add(1);
        self.memory.ledger().commit(self.commits, &cursors);
        crash::point("nic.committed");
        for (queue, ring) in (0_u8..).zip(&mut self.receive) {
            if let Some(tail) = ring.committed(handled[usize::from(queue)]) {
                // POST
                self.mmio.write(regs::RDT.of(queue.into()), tail);
            }
        }
        crash::point("nic.rung");
        if let Some(tail) = self.transmit.committed() {
            // POST
            self.mmio.write(regs::TDT, tail);
        }
    }

    /// Gives the card all slots that were committed as handled. Pending frames stay pending.
    #[inline]
    fn rest(&mut self) {
        self.refill();
        crash::point("nic.posted");
        self.commit_sent();
    }

    /// Commits which slots the card has taken and which frames it has sent, but no frame as handled or given. That
    /// ends no turn.
    #[inline]
    fn commit_sent(&mut self) {
        let mut handled = [0; QUEUES_MAX];
        handled.iter_mut().zip(&self.receive).for_each(|(handled, ring)| *handled = ring.handled());
        self.commit_up_to(handled, 0);
    }

    /// Writes all state to the ledger, and marks the ledger as ours.
    fn open_ledger(&mut self) {
        self.write_seldom();
        self.enter_ledger();
    }

    /// Marks the ledger as ours, when its seldom-changed data is right already.
    fn enter_ledger(&mut self) {
        let ledger = self.memory.ledger();
        if ledger.whose() == Some((DriverState::KIND, DriverState::VERSION)) {
            self.transmit.set_given(ledger.cursors()[GIVEN]);
        }
        self.commits = self.memory.ledger().commits();
        // Make the next commit differ from any earlier one: it counts one turn more.
        self.committed = [u64::MAX; CURSORS];
        self.committed[TURNS] = self.memory.ledger().turns();
        self.commit(&Burst::new());
        self.memory.ledger().belongs(Some((DriverState::KIND, DriverState::VERSION)));
    }

    /// Writes the seldom-changed data to the ledger again, after a change.
    #[cold]
    fn write_seldom(&self) {
        let mut driver_state = DriverState::blank();
        self.write_driver_state(&mut driver_state);
        self.memory.ledger().write_seldom(driver_state.seldom());
    }

    /// Receives frames from each queue in turn.
    #[inline]
    fn collect(&mut self, burst: &mut Burst, most: usize) -> Result<usize, NicError> {
        let lengths = Lengths { buffer: self.shape.buffer, frame: self.shape.frame() };
        let queues = self.receive.len();
        let full = burst.len().saturating_add(most).min(BURST_MAX);
        let mut frames = 0;
        for turn in 0..queues {
            let ring = &mut self.receive[(self.first + turn) % queues];
            match ring.receive(self.memory.arena(), lengths, &mut self.counters.dropped, burst, full) {
                Ok(count) => frames += count,
                // Deliver the frames from before the fault. The next call finds the fault again.
                Err(_) if frames > 0 => return Ok(frames),
                Err(error) => return Err(error),
            }
        }
        self.first ^= 1;
        Ok(frames)
    }

    /// Lets the partner go on once all frames from before the parking have been received. Frames that wait in the
    /// card's buffer while a ring has no slots are not received yet.
    #[cold]
    fn let_go_if_empty(&mut self) {
        if self.receive.iter().all(|ring| ring.has_slots() && !ring.is_ready()) {
            self.let_go();
        }
    }

    fn let_go(&mut self) {
        if let Some(since) = self.quiesce.let_go_at() {
            return self.finish_letting_go(since);
        }
        self.held = false;
        self.write_seldom();
        park::let_go(&self.mmio, self.shape.frame(), &mut self.counters);
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

    /// Assembles the driver from its parts.
    fn assemble(bus: B, memory: NicMemory, parts: Assembly<B::Registers>) -> Self {
        let Assembly { mmio, bell, receive, transmit, shape, mac, filter, flow_control, mta, counters } = parts;
        // A successor's link may have gone down and come back meanwhile.
        let (first, agreed, held, quiesce) = (0, false, false, Quiesce::default());
        E1000e {
            bus,
            memory,
            mmio,
            bell,
            receive,
            first,
            transmit,
            shape,
            mac,
            filter,
            flow_control,
            agreed,
            held,
            quiesce,
            mta,
            counters,
            commits: 0,
            committed: [0; CURSORS],
            suspect: false,
            came_too_late: 0,
            rest: Vec::new(),
            dirt: None,
            captures: None,
        }
    }

    /// Does the last steps of a start.
    fn go(&mut self, options: &NicOptions) {
        if options.flow_control {
            flow::prepare(&self.mmio, self.shape.frame(), true);
        }
        self.flow_control = options.flow_control;
        self.apply_filter(&options.filter);
        setup::enable(&self.mmio, self.shape, self.filter_bits());
        if options.scrub {
            self.keep_clean();
            // There is time now: later, only used slots are left to wipe.
            self.dirt.iter_mut().for_each(|dirt| dirt.wipe_free(self.memory.arena()));
        }
        self.refill();
        self.open_ledger();
    }

    fn failed(self, error: NicError) -> Failed<B> {
        Failed { error, bus: self.bus, memory: self.memory }
    }

    /// Stops the card, and returns the state for a successor.
    fn stop(&mut self) -> Result<DriverState, NicError> {
        self.memory.ledger().halted(true);
        park::stop(&self.mmio, self.shape.frame(), &mut self.counters)?;
        self.transmit.reclaim(self.memory.arena());
        self.commit(&Burst::new());
        self.counters.collect(&self.mmio);
        let mut driver_state = DriverState::blank();
        self.write_driver_state(&mut driver_state);
        Ok(*driver_state)
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

/// Parts of a driver, other than its bus and its memory.
struct Assembly<R> {
    mmio: Mmio<R>,
    bell: OwnedFd,
    receive: ArrayVec<ReceiveRing, QUEUES_MAX>,
    transmit: TransmitRing,
    shape: Shape,
    mac: Mac,
    filter: u16,
    flow_control: bool,
    mta: Box<[u32; MTA_WORDS]>,
    counters: Counters,
}

impl<R: Registers> Assembly<R> {
    /// Resets a card and sets it up, except for the filter, and with both units off.
    fn cold<B: Bus<Registers = R>>(bus: &mut B, memory: &NicMemory, shape: Shape) -> Result<Self, NicError> {
        memory.ledger().belongs(None);
        memory.ledger().forget();
        memory.ledger().halted(false);
        memory.ledger().partial(false);
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
        let bell = bell(bus)?;
        let rings = |index| ReceiveRing::new(memory, index, shape.ring);
        let receive: ArrayVec<_, QUEUES_MAX> = (0..usize::from(shape.queues)).map(rings).collect();
        let transmit = TransmitRing::new(memory, receive.len(), shape.ring);
        setup::general(&mmio);
        // The reset does not cover the PHY, so it may be as a last owner has set it.
        if !left::PHY.into_iter().all(|register| left::is_sound(&mmio, register)) {
            left::reset_phy(&mmio);
        }
        let mac = setup::mac(&mmio)?;
        setup::receive(&mmio, shape, memory.rings_at(), &receive);
        setup::transmit(&mmio, shape, ring_at(memory.rings_at(), receive.len(), shape.ring));
        (0..128).for_each(|index| mmio.write(regs::MTA.of(index), 0));
        let counters = Counters::start(&mmio);
        let mta = Box::new([0; MTA_WORDS]);
        Ok(Assembly { mmio, bell, receive, transmit, shape, mac, filter: 0, flow_control: false, mta, counters })
    }

    /// Continues where a predecessor stopped. Changes nothing, neither in the card nor in memory, before it sets up
    /// the interrupts.
    fn warm<B: Bus<Registers = R>>(
        bus: &mut B,
        memory: &NicMemory,
        driver_state: &DriverState,
    ) -> Result<Self, NicError> {
        let layout = memory.layout();
        driver_state.check(&layout)?;
        loan::check(memory, driver_state.slots())?;
        let shape = driver_state.shape(&layout)?;
        recognise(bus)?;
        let receive =
            (0..usize::from(shape.queues)).map(|queue| ReceiveRing::resume(memory, queue, driver_state)).collect();
        let transmit = TransmitRing::resume(memory, driver_state);
        let mmio = Mmio(bus.registers(BAR)?);
        check_parked(&mmio, memory, driver_state, (&receive, &transmit))?;
        let bell = bell(bus)?;
        let (mac, filter) = (Mac(driver_state.head.mac), driver_state.filter);
        let (mta, counters) = (Box::new(driver_state.mta), Counters::resume(&driver_state.counters));
        let flow_control = driver_state.flow_control & 1 == 1;
        Ok(Assembly { mmio, bell, receive, transmit, shape, mac, filter, flow_control, mta, counters })
    }
}

/// Checks that the card is where the driver state says.
fn check_parked(
    mmio: &Mmio<impl Registers>,
    memory: &NicMemory,
    driver_state: &DriverState,
    (receive, transmit): (&ArrayVec<ReceiveRing, QUEUES_MAX>, &TransmitRing),
) -> Result<(), NicError> {
    let is = |what, found: u32, said: u32| if found == said { Ok(()) } else { Err(broken(what, found.into())) };
    if mmio.read(regs::STATUS) == u32::MAX {
        return Err(NicError::Gone);
    }
    driver_state.head.check_mac(setup::mac(mmio)?)?;
    is("the card receives, though parked", mmio.read(regs::RCTL) & rctl::EN, 0)?;
    is("the card sends, though parked", mmio.read(regs::TCTL) & regs::tctl::EN, 0)?;
    let at = |index| setup::halves(ring_at(memory.rings_at(), index, driver_state.head.ring));
    for (index, ring) in (0_u8..).zip(receive) {
        let ((low, high), index) = (at(index.into()), index.into());
        is("the card has a receive ring elsewhere, at", mmio.read(regs::RDBAL.of(index)), low)?;
        is("the card has a receive ring elsewhere, at", mmio.read(regs::RDBAH.of(index)), high)?;
        is("the card has another tail of a receive ring", mmio.read(regs::RDT.of(index)), ring.tail())?;
    }
    let (low, high) = at(receive.len());
    is("the card has its transmit ring elsewhere, at", mmio.read(regs::TDBAL), low)?;
    is("the card has its transmit ring elsewhere, at", mmio.read(regs::TDBAH), high)?;
    is("the card has another tail of its transmit ring", mmio.read(regs::TDT), transmit.tail())
}

/// Returns the eventfd of vector 0.
fn bell(bus: &mut impl Bus) -> Result<OwnedFd, BusError> {
    bus.interrupts(1)?.pop().ok_or(BusError::FewInterrupts { have: 0, need: 1 })
}

/// Checks that the card is one that this driver drives.
fn recognise(bus: &mut impl Bus) -> Result<(), NicError> {
    let found = Header::read(bus)?.id;
    match IDS.contains(&found) {
        true => Ok(()),
        false => Err(NicError::OtherCard { found, driver: "the Intel 82574L" }),
    }
}

impl<B: Bus> Port for E1000e<B> {
    type Fault = NicError;

    #[inline]
    fn receive_some(&mut self, burst: &mut Burst, most: usize) -> Result<usize, NicError> {
        // Commit the handled frames; then post their slots anew, and commit that.
        self.commit(burst);
        self.rest();
        let before = burst.len();
        let frames = self.collect(burst, most)?;
        if let Some(dirt) = &mut self.dirt {
            dirt.mark(&burst[before..]);
        }
        crash::point("nic.collected");
        if let Some(captures) = &mut self.captures {
            captures.frames(Direction::Inbound, &burst[before..]);
        }
        if frames == 0 && self.held {
            self.let_go_if_empty();
        }
        Ok(frames)
    }

    #[inline]
    fn transmit(&mut self, burst: &mut Burst) -> Result<usize, NicError> {
        self.transmit.reclaim(self.memory.arena());
        if self.transmit.can_make_room(burst.len()) {
            self.commit_sent();
        }
        if let Some(dirt) = &mut self.dirt {
            dirt.mark(burst);
        }
        if let Some(captures) = &mut self.captures {
            captures.frames(Direction::Outbound, &burst[..self.transmit.room().min(burst.len())]);
        }
        let taken = self.transmit.transmit(&self.memory, self.shape.frame(), &mut self.counters.refused, burst);
        crash::point("nic.filled");
        self.commit(burst);
        Ok(taken)
    }

    fn arm(&mut self) -> Result<Armed, NicError> {
        // The slots of sent frames are free to receive into.
        self.transmit.reclaim(self.memory.arena());
        if !self.receive.iter().all(ReceiveRing::has_slots) {
            // A ring without slots wakes no driver, so commit all received frames as handled, even pending ones.
            self.commit(&Burst::new());
        }
        self.rest();
        bus::quiesce(&self.bell)?;
        // The order matters. The rings are looked at only after the card has answered a read, so that look sees
        // every frame that came before the causes were cleared. A later frame sets its cause again, and that cause
        // is not masked.
        self.mmio.clear(regs::ICR, cause::RXQ);
        self.mmio.write(regs::IMS, cause::RXQ);
        if self.mmio.read(regs::STATUS) == u32::MAX {
            return Err(NicError::Gone);
        }
        let ready = self.receive.iter().any(ReceiveRing::is_ready);
        if !ready && self.held {
            self.let_go_if_empty();
        }
        match ready {
            true => Ok(Armed::Busy),
            false => Ok(Armed::Idle),
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

impl<B: Bus> Nic for E1000e<B> {
    type Bus = B;
    type DriverState = DriverState;

    fn start(mut bus: B, memory: NicMemory, options: &NicOptions) -> Result<Self, Failed<B>> {
        let shape = Shape::new(options.ring, options.queues, options.mtu, &memory.layout());
        let shape = match shape.and_then(|shape| recognise(&mut bus).map(|()| shape)) {
            Ok(shape) => shape,
            Err(error) => return Err(Failed { error, bus, memory }),
        };
        let mut nic = match Assembly::cold(&mut bus, &memory, shape) {
            Ok(parts) => Self::assemble(bus, memory, parts),
            Err(error) => {
                memory.withdraw(&mut bus);
                return Err(Failed { error, bus, memory });
            }
        };
        nic.go(options);
        Ok(nic)
    }

    fn resume(mut bus: B, memory: NicMemory, driver_state: &DriverState) -> Result<Self, Failed<B>> {
        let mut nic = match Assembly::warm(&mut bus, &memory, driver_state) {
            Ok(parts) => Self::assemble(bus, memory, parts),
            Err(error) => return Err(Failed { error, bus, memory }),
        };
        nic.memory.ledger().halted(true);
        park::go_on(&nic.mmio);
        nic.held = true;
        nic.open_ledger();
        nic.memory.ledger().halted(false);
        nic.rest();
        Ok(nic)
    }

    fn park(mut self) -> Result<(B, NicMemory, DriverState), Failed<B>> {
        match self.stop() {
            Ok(driver_state) => Ok((self.bus, self.memory, driver_state)),
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
        let link = match self.mmio.read(regs::STATUS) {
            // The card is gone; the next `arm` reports it.
            u32::MAX => Link::Down,
            status => park::link(status),
        };
        match (link, self.agreed, self.flow_control) {
            (Link::Up { full_duplex: true, .. }, false, true) => flow::agree(&self.mmio),
            // Undo the agreement with an earlier partner.
            (Link::Up { full_duplex: false, .. }, false, true) => flow::disagree(&self.mmio),
            _ => {}
        }
        self.agreed = link != Link::Down;
        link
    }

    fn set_filter(&mut self, filter: &Filter) -> Result<(), NicError> {
        self.apply_filter(filter);
        self.write_seldom();
        self.mmio.change(regs::RCTL, rctl::UPE | rctl::MPE, self.filter_bits());
        // Writes are in transit until a read completes. Frames that come after this read meet the new filter.
        match self.mmio.read(regs::STATUS) {
            u32::MAX => Err(NicError::Gone),
            _ => Ok(()),
        }
    }

    fn statistics(&mut self) -> Vec<(&'static str, u64)> {
        self.counters.collect(&self.mmio);
        self.write_seldom();
        self.counters.list()
    }
}
