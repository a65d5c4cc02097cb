//! The Intel 82574L: gigabit, two receive queues, MSI-X.
//!
//! `regs.rs` is the data sheet, `ring.rs` moves slots, `setup.rs` gets a card ready, `park.rs` stops it and has it go on, and
//! `sash.rs` is what a successor needs. One vector signals all that is received; what was sent is looked at when there is
//! more to send.

mod counters;
mod park;
mod regs;
mod ring;
mod sash;
mod setup;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use arrayvec::ArrayVec;
use rustix::io::Errno;

use self::counters::Counters;
use self::regs::{Mmio, cause, rctl};
use self::ring::{Lengths, Named, RING_MAX, ReceiveRing, TransmitRing, ring_at};
pub use self::sash::{KIND, Sash, VERSION};
use self::sash::{MTA_WORDS, NO_SLOT, QUEUES_MAX, ReceiveSash};
use self::setup::Shape;
use super::bus::pci::{self, Header};
use super::bus::{Bus, BusError};
use super::{Filter, Link, Mac, Nic, NicError, NicMemory, NicOptions, PciId};
use crate::port::{Armed, Burst, Port};

/// The cards that this driver drives: the 82574L, and its variant without management.
pub const IDS: [PciId; 2] = [PciId { vendor: 0x8086, device: 0x10d3 }, PciId { vendor: 0x8086, device: 0x10f6 }];

/// Where the registers are.
const BAR: u8 = 0;

/// A running 82574L.
#[derive(Debug)]
pub struct E1000e<B: Bus> {
    bus: B,
    memory: NicMemory,
    mmio: Mmio<B::Registers>,
    /// Readable when something was received.
    bell: OwnedFd,
    receive: ArrayVec<ReceiveRing, QUEUES_MAX>,
    /// The queue that is received from first, in turn.
    first: usize,
    transmit: TransmitRing,
    shape: Shape,
    mac: Mac,
    filter: u16,
    /// What stands in the multicast table.
    mta: Box<[u32; MTA_WORDS]>,
    counters: Counters,
}

impl<B: Bus> E1000e<B> {
    /// Gives the card's receive rings what free slots there are.
    #[inline]
    fn refill(&mut self) -> Result<(), NicError> {
        for (queue, ring) in (0..).zip(&mut self.receive) {
            if ring.refill(&self.memory)? {
                // POST
                self.mmio.write(regs::RDT.of(queue), ring.tail());
            }
        }
        Ok(())
    }

    /// The frames of each queue, in turn.
    #[inline]
    fn collect(&mut self, burst: &mut Burst) -> Result<usize, NicError> {
        let lengths = Lengths { buffer: self.shape.buffer, frame: self.shape.frame() };
        let queues = self.receive.len();
        let mut frames = 0;
        for turn in 0..queues {
            let ring = &mut self.receive[(self.first + turn) % queues];
            match ring.receive(self.memory.arena(), lengths, &mut self.counters.dropped, burst) {
                Ok(count) => frames += count,
                // What was received before is delivered before. The fault is found again.
                Err(_) if frames > 0 => return Ok(frames),
                Err(error) => return Err(error),
            }
        }
        self.first ^= 1;
        Ok(frames)
    }

    fn apply_filter(&mut self, filter: &Filter) {
        let mut table = [0_u32; MTA_WORDS];
        for Mac([.., e, f]) in &filter.multicast {
            // The 12 highest bits of the address, in the order of the wire: section 10.2.5, Multicast Table Array, and RCTL.MO = 0.
            let hash = (u16::from(*f) << 8 | u16::from(*e)) >> 4;
            table[usize::from(hash >> 5)] |= 1 << (hash & 0x1f);
        }
        for (index, (new, old)) in (0..).zip(table.iter().zip(self.mta.iter_mut())) {
            if new != old {
                self.mmio.write(regs::MTA.of(index), *new);
                *old = *new;
            }
        }
        self.filter = u16::from(filter.promiscuous) | u16::from(filter.all_multicast) << 1;
    }

    /// The filter's part of the receive control register.
    fn filter_bits(&self) -> u32 {
        let everything = if self.filter & 1 == 1 { rctl::UPE | rctl::MPE } else { 0 };
        let multicast = if self.filter & 2 == 2 { rctl::MPE } else { 0 };
        everything | multicast
    }

    /// Whether the card is where the sash says.
    fn check_parked(&self, sash: &Sash) -> Result<(), NicError> {
        let is = |what, found: u32, said: u32| match found == said {
            true => Ok(()),
            false => Err(NicError::Absurd { what, value: found.into() }),
        };
        if self.mmio.read(regs::STATUS) == u32::MAX {
            return Err(NicError::Gone);
        }
        is("it receives, though parked", self.mmio.read(regs::RCTL) & rctl::EN, 0)?;
        is("it sends, though parked", self.mmio.read(regs::TCTL) & regs::tctl::EN, 0)?;
        for (index, ring) in (0_u8..).zip(&self.receive) {
            let (low, high) = setup::halves(ring_at(self.memory.rings_at(), index.into(), sash.ring));
            let index = index.into();
            is("a receive ring is not where the sash says", self.mmio.read(regs::RDBAL.of(index)), low)?;
            is("a receive ring is not where the sash says", self.mmio.read(regs::RDBAH.of(index)), high)?;
            is("a receive ring's tail is not what the sash says", self.mmio.read(regs::RDT.of(index)), ring.tail())?;
        }
        let (low, high) = setup::halves(ring_at(self.memory.rings_at(), self.receive.len(), sash.ring));
        is("the transmit ring is not where the sash says", self.mmio.read(regs::TDBAL), low)?;
        is("the transmit ring is not where the sash says", self.mmio.read(regs::TDBAH), high)?;
        is("the transmit ring's tail is not what the sash says", self.mmio.read(regs::TDT), self.transmit.tail())
    }
}

/// What was received is delivered before a fault, which is found again.
#[cold]
fn after(frames: usize, error: NicError) -> Result<usize, NicError> {
    if frames > 0 { Ok(frames) } else { Err(error) }
}

/// The eventfd of vector 0, which does not block whoever reads it.
fn bell(bus: &mut impl Bus) -> Result<OwnedFd, BusError> {
    let refused = |errno: Errno| BusError::Refused { doing: "making an eventfd non-blocking", source: errno.into() };
    let bell = bus.interrupts(1)?.pop().ok_or(BusError::FewInterrupts { have: 0, need: 1 })?;
    let flags = rustix::fs::fcntl_getfl(&bell).map_err(refused)?;
    rustix::fs::fcntl_setfl(&bell, flags | rustix::fs::OFlags::NONBLOCK).map_err(refused)?;
    Ok(bell)
}

/// The card must be one of ours.
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
    fn receive(&mut self, burst: &mut Burst) -> Result<usize, NicError> {
        let frames = self.collect(burst)?;
        match self.refill() {
            Ok(()) => Ok(frames),
            Err(error) => after(frames, error),
        }
    }

    #[inline]
    fn transmit(&mut self, burst: &mut Burst) -> Result<usize, NicError> {
        self.transmit.reclaim(self.memory.arena());
        let before = self.transmit.tail();
        let taken = self.transmit.transmit(&self.memory, self.shape.frame(), &mut self.counters.refused, burst);
        if self.transmit.tail() != before {
            // POST
            self.mmio.write(regs::TDT, self.transmit.tail());
        }
        Ok(taken)
    }

    fn arm(&mut self) -> Result<Armed, NicError> {
        // What was sent is of use to receive into.
        self.transmit.reclaim(self.memory.arena());
        self.refill()?;
        let mut count = [0; 8];
        match rustix::io::read(&self.bell, &mut count) {
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => {}
            Err(errno) => {
                let refused = BusError::Refused { doing: "reading an eventfd", source: errno.into() };
                return Err(refused.into());
            }
        }
        // In this order: a frame that came before the causes were cleared is seen by the look at the rings, which is not before the
        // card has answered; one that comes later sets its cause again, and that cause is not masked.
        self.mmio.clear(regs::ICR, cause::RXQ);
        self.mmio.write(regs::IMS, cause::RXQ);
        if self.mmio.read(regs::STATUS) == u32::MAX {
            return Err(NicError::Gone);
        }
        match self.receive.iter().any(ReceiveRing::is_ready) {
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
    type Sash = Sash;

    fn start(mut bus: B, memory: NicMemory, options: &NicOptions) -> Result<Self, NicError> {
        recognise(&mut bus)?;
        let shape = Shape::new(options, &memory)?;
        let rings = |index| ReceiveRing::new(&memory, index, shape.ring).map_err(ring::too_small);
        let receive = (0..usize::from(shape.queues)).map(rings).collect::<Result<ArrayVec<_, QUEUES_MAX>, _>>()?;
        let transmit = TransmitRing::new(&memory, receive.len(), shape.ring).map_err(ring::too_small)?;
        let mmio = Mmio(bus.registers(BAR)?);
        setup::reset(&mmio)?;
        // Not before: what a predecessor had it do would go on in our memory.
        memory.map(&mut bus)?;
        pci::enable(&mut bus, true)?;
        let bell = bell(&mut bus)?;
        setup::general(&mmio);
        let mac = setup::mac(&mmio)?;
        setup::receive(&mmio, shape, memory.rings_at(), &receive);
        setup::transmit(&mmio, shape, ring_at(memory.rings_at(), receive.len(), shape.ring));
        (0..128).for_each(|index| mmio.write(regs::MTA.of(index), 0));
        let counters = Counters::start(&mmio);
        let mta = Box::new([0; MTA_WORDS]);
        let mut nic =
            E1000e { bus, memory, mmio, bell, receive, first: 0, transmit, shape, mac, filter: 0, mta, counters };
        nic.apply_filter(&options.filter);
        setup::enable(&nic.mmio, shape, nic.filter_bits());
        nic.refill()?;
        Ok(nic)
    }

    fn resume(mut bus: B, memory: NicMemory, sash: &Sash) -> Result<Self, NicError> {
        if (sash.kind, sash.version) != (KIND, VERSION) {
            return Err(NicError::OtherSash { kind: sash.kind, version: sash.version, ours: VERSION });
        }
        recognise(&mut bus)?;
        let queues = u8::try_from(sash.queues).unwrap_or(u8::MAX);
        let options = NicOptions { ring: sash.ring, queues, mtu: sash.mtu, filter: Filter::default() };
        let shape = Shape::new(&options, &memory)?;
        let slots = memory.arena().geometry();
        if (sash.rings_at, sash.arena_at) != (memory.rings_at().0, memory.arena_at().0)
            || (sash.slot_len, sash.slots) != (slots.slot_len, slots.count)
        {
            return Err(NicError::Absurd { what: "the sash is of other memory", value: sash.rings_at });
        }
        let mut named = Named::of(memory.arena());
        let mut receive = ArrayVec::new();
        for queue in 0..usize::from(shape.queues) {
            let (cursors, posted) = (&sash.receive[queue], &sash.posted[queue]);
            receive.push(ReceiveRing::resume(&memory, &mut named, (queue, shape.ring), cursors, posted)?);
        }
        let transmit = TransmitRing::resume(
            &memory,
            &mut named,
            (receive.len(), shape.ring),
            (sash.sent, sash.filled),
            &sash.sending,
        )?;
        let mmio = Mmio(bus.registers(BAR)?);
        let bell = bell(&mut bus)?;
        let [a, b, c, d, e, f, ..] = sash.mac;
        let mac = Mac([a, b, c, d, e, f]);
        let (filter, mta, counters) = (sash.filter, Box::new(sash.mta), Counters::resume(&sash.counters)?);
        let mut nic =
            E1000e { bus, memory, mmio, bell, receive, first: 0, transmit, shape, mac, filter, mta, counters };
        nic.check_parked(sash)?;
        park::go_on(&nic.mmio);
        nic.refill()?;
        Ok(nic)
    }

    fn park(mut self) -> Result<(B, NicMemory, Sash), NicError> {
        park::stop(&self.mmio, self.shape.frame(), &mut self.counters)?;
        self.transmit.reclaim(self.memory.arena());
        self.counters.collect(&self.mmio);
        let mut posted = [[NO_SLOT; RING_MAX]; QUEUES_MAX];
        let mut receive = [ReceiveSash { next: 0, tail: 0, skipping: 0, reserved: 0 }; QUEUES_MAX];
        for (ring, (cursors, posted)) in self.receive.iter().zip(receive.iter_mut().zip(&mut posted)) {
            *cursors = ring.to_sash(posted);
        }
        let mut sending = [NO_SLOT; RING_MAX];
        let (sent, filled) = self.transmit.to_sash(&mut sending);
        let [a, b, c, d, e, f] = self.mac.0;
        let slots = self.memory.arena().geometry();
        let sash = Sash {
            kind: KIND,
            version: VERSION,
            rings_at: self.memory.rings_at().0,
            arena_at: self.memory.arena_at().0,
            slot_len: slots.slot_len,
            slots: slots.count,
            ring: self.shape.ring,
            queues: self.shape.queues.into(),
            mtu: self.shape.mtu,
            filter: self.filter,
            mac: [a, b, c, d, e, f, 0, 0],
            receive,
            sent,
            filled,
            mta: *self.mta,
            counters: self.counters.to_sash(),
            posted,
            sending,
        };
        Ok((self.bus, self.memory, sash))
    }

    fn mac(&self) -> Mac {
        self.mac
    }

    fn link(&mut self) -> Link {
        match self.mmio.read(regs::STATUS) {
            // Gone, which the next `arm` says.
            u32::MAX => Link::Down,
            status => park::link(status),
        }
    }

    fn set_filter(&mut self, filter: &Filter) -> Result<(), NicError> {
        self.apply_filter(filter);
        if self.mmio.read(regs::STATUS) == u32::MAX {
            return Err(NicError::Gone);
        }
        self.mmio.change(regs::RCTL, rctl::UPE | rctl::MPE, self.filter_bits());
        Ok(())
    }

    fn statistics(&mut self) -> Vec<(&'static str, u64)> {
        self.counters.collect(&self.mmio);
        self.counters.list()
    }
}
