//! Virtio network devices (virtio 1.2, §5.1) over PCI, with split virtqueues, and without offloads: a slot holds a frame as the wire
//! has it. One pair of queues, and the one for commands if there is one.
//!
//! # Parking
//!
//! Virtio has no pause. A device that offers VIRTIO_F_RING_RESET has its queues reset, after which it touches neither rings nor
//! slots; what had come is listed in the sash, and the successor sets the queues up anew. On a device that does not, only a reset of
//! the whole would stop it, and lose link, filters and frames: there the rings are **kept**. The driver stops touching them and asks
//! for no interrupts, but **the device may go on to fill the slots that it has and to send the frames that it has**. The successor finds
//! what was done in the used rings. So whoever takes a kept NIC's memory away must reset the device first; that the device is
//! not the memory's only user while nobody drives it is the price (docs/decisions/0009-parking-virtio-and-rtl8139.md).

mod control;
mod queue;
mod regs;
mod ring;
pub mod sash;
mod transport;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use tasuki_shm::slots::SlotId;

use self::control::Control;
use self::queue::{Chains, Held, Receiver, Transmitter};
use self::regs::{HEADER_LEN, common, feature, queue as queues, status};
use self::ring::{Place, SplitRing};
use self::sash::{CHAINS_MAX, Counts, Cursor, DESCRIPTORS_MAX, Loan, Sash};
use self::transport::{Doorbell, Transport};
use super::bus::{self, Bus, BusError, Header, Iova, pci};
use super::sash::{Head, Sash as _, broken};
use super::{Failed, Filter, Link, Mac, Nic, NicError, NicMemory, NicOptions, PciId, loan};
use crate::port::{Armed, Burst, Port};

/// What this driver drives: the modern device, and the transitional one by its modern interface.
const CARDS: [PciId; 2] = [PciId { vendor: 0x1af4, device: 0x1041 }, PciId { vendor: 0x1af4, device: 0x1000 }];
/// What it is called.
const DRIVER: &str = "virtio network devices (1af4:1041, and 1af4:1000)";

/// Addresses and type before the payload, and room for a VLAN tag.
const AROUND_PAYLOAD: u16 = 18;
/// Shortest payload: what IPv4 asks of a link (RFC 791, section 3.2).
const MTU_MIN: u16 = 68;

/// Vector of the receive queue's interrupt, the only one.
const RECEIVE_VECTOR: u16 = 0;
/// How long we wait, when the NIC is parked, for the device to send what it has. QEMU throws away, when a queue is reset, the frame
/// that its wire has not taken yet, and says that it was sent.
const DRAIN: Duration = Duration::from_millis(10);

/// Where in the rings' region what lies.
#[derive(Debug, Clone, Copy)]
struct Layout {
    rx: Place,
    tx: Place,
    control: Place,
    /// The header that the device writes, and the one that it reads.
    rx_header: usize,
    tx_header: usize,
    command: usize,
}

impl Layout {
    /// For queues of `size` descriptors, in so many bytes.
    fn new(have: usize, size: u16) -> Result<Self, NicError> {
        let rx = Place::new(0, size);
        let tx = Place::new(rx.end, size);
        let control = Place::new(tx.end, control::SIZE);
        let rx_header = control.end;
        let tx_header = rx_header + 64;
        let command = tx_header + 64;
        let need = command + control::MEMORY_LEN;
        match need <= have {
            true => Ok(Layout { rx, tx, control, rx_header, tx_header, command }),
            false => Err(NicError::Memory { what: "rings", need, have }),
        }
    }
}

/// Where the driver begins, or goes on, in each queue.
#[derive(Default)]
struct Cursors {
    rx: Cursor,
    tx: Cursor,
    control: Cursor,
}

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
    interrupt: OwnedFd,
    layout: Layout,
    features: u64,
    ring: u16,
    frame_max: u16,
    mac: Mac,
    counts: Counts,
}

impl<B: Bus> std::fmt::Debug for VirtioNet<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut nic = f.debug_struct("VirtioNet");
        nic.field("mac", &self.mac).field("rx", &self.rx).field("tx", &self.tx).finish_non_exhaustive()
    }
}

/// What driver and device have agreed on, and how long their frames and queues are.
#[derive(Clone, Copy)]
struct Terms {
    features: u64,
    ring: u16,
    frame_max: u16,
}

/// What is in the queues when they are set up.
struct Contents<'a> {
    cursors: Cursors,
    /// In queues that are kept, by chain.
    rx_held: Box<[Option<Held>]>,
    tx_held: Box<[Option<Held>]>,
    /// In queues that begin anew.
    empty: &'a [SlotId],
    come: &'a [Loan],
    unsent: &'a [Loan],
}

/// Whether the device behind `bus` is ours.
fn check_card(bus: &mut impl Bus) -> Result<Header, NicError> {
    let header = Header::read(bus)?;
    match CARDS.contains(&header.id) {
        true => Ok(header),
        false => Err(NicError::OtherCard { found: header.id, driver: DRIVER }),
    }
}

fn check_options(options: &NicOptions) -> Result<(), NicError> {
    let wrong = |field, value, must| Err(NicError::Options { field, value, must });
    if !options.ring.is_power_of_two() || !(2..=DESCRIPTORS_MAX).contains(&options.ring.into()) {
        return wrong("ring", options.ring.into(), "it must be a power of two from 2 to 512 (two descriptors a frame)");
    }
    if options.scrub {
        return wrong("scrub", 1, "its driver does not keep its memory clean; hand it over by repoint or cold");
    }
    if options.queues != 1 {
        return wrong("queues", options.queues.into(), "this driver uses one receive queue");
    }
    if options.mtu < MTU_MIN {
        return wrong("mtu", options.mtu.into(), "payloads have at least 68 bytes");
    }
    Ok(())
}

/// Whether the memory suffices.
fn check_memory(memory: &NicMemory, options: &NicOptions) -> Result<(), NicError> {
    let room = u16::try_from(memory.arena().geometry().slot_len).unwrap_or(u16::MAX);
    if options.mtu.checked_add(AROUND_PAYLOAD).is_none_or(|frame| frame > room) {
        let must = "a frame of it must fit into a slot";
        return Err(NicError::Options { field: "mtu", value: options.mtu.into(), must });
    }
    Layout::new(memory.rings().len(), options.ring)?;
    loan::check_stock(memory, usize::from(options.ring / 2))
}

/// The eventfd of the receive queue's vector.
fn interrupt(bus: &mut impl Bus) -> Result<OwnedFd, BusError> {
    bus.interrupts(1)?.pop().ok_or(BusError::FewInterrupts { have: 0, need: 1 })
}

/// All of a driver but the way to its card and its memory.
struct Assembly<R> {
    transport: Transport<R>,
    rx: Receiver,
    tx: Transmitter,
    control: Option<Control>,
    rx_bell: Doorbell,
    tx_bell: Doorbell,
    interrupt: OwnedFd,
    layout: Layout,
    terms: Terms,
    mac: Mac,
}

impl<B: Bus> VirtioNet<B> {
    /// What the device allows of what is asked for.
    fn agree(transport: &Transport<B::Registers>, options: &NicOptions) -> Result<Terms, NicError> {
        let features = transport.negotiate()?;
        let wrong = |field, value, must| Err(NicError::Options { field, value, must });
        let (rx, tx) = (transport.queue_size_max(queues::RECEIVE), transport.queue_size_max(queues::TRANSMIT));
        if options.ring > rx.min(tx) {
            return wrong("ring", options.ring.into(), "the device's queues are shorter");
        }
        if transport.mtu(features)?.is_some_and(|mtu| options.mtu > mtu) {
            return wrong("mtu", options.mtu.into(), "the device's network takes no more than it says");
        }
        Ok(Terms { features, ring: options.ring, frame_max: options.mtu + AROUND_PAYLOAD })
    }

    /// The driver's ends of the queues. Tells the device nothing, and writes no memory before all that can fail is done.
    fn assemble(
        bus: &mut B,
        memory: &NicMemory,
        transport: Transport<B::Registers>,
        terms: Terms,
        contents: Contents<'_>,
    ) -> Result<Assembly<B::Registers>, NicError> {
        let Terms { features, ring, frame_max } = terms;
        let layout = Layout::new(memory.rings().len(), ring)?;
        let mac = transport.mac()?;
        let (rx_bell, tx_bell) = (transport.doorbell(queues::RECEIVE)?, transport.doorbell(queues::TRANSMIT)?);
        let control_bell = match features & feature::CTRL_RX {
            0 => None,
            _ => Some(transport.doorbell(queues::CONTROL)?),
        };
        let interrupt = interrupt(bus)?;
        let event_index = features & feature::EVENT_IDX != 0;
        let Contents { cursors, rx_held, tx_held, empty, come, unsent } = contents;
        let split = |place, cursor| SplitRing::new(memory, place, ring, event_index, cursor);
        let header = |at: usize| -> Iova { memory.rings_at() + at as u64 };
        let rx = Chains::new(split(layout.rx, cursors.rx), ring, header(layout.rx_header), true, rx_held);
        let tx = Chains::new(split(layout.tx, cursors.tx), ring, header(layout.tx_header), false, tx_held);
        let rx = Receiver::new(memory, rx, sash::room(frame_max), empty, come);
        let tx = Transmitter::new(memory, tx, frame_max.into(), unsent);
        let control = control_bell
            .map(|bell| Control::new(memory, layout.control, layout.command, event_index, cursors.control, bell));
        Ok(Assembly { transport, rx, tx, control, rx_bell, tx_bell, interrupt, layout, terms, mac })
    }

    fn new(bus: B, memory: NicMemory, parts: Assembly<B::Registers>, counts: Counts) -> Self {
        let Assembly { transport, rx, tx, control, rx_bell, tx_bell, interrupt, layout, terms, mac } = parts;
        let Terms { features, ring, frame_max } = terms;
        VirtioNet {
            bus,
            memory,
            transport,
            rx,
            tx,
            control,
            rx_bell,
            tx_bell,
            interrupt,
            layout,
            features,
            ring,
            frame_max,
            mac,
            counts,
        }
    }

    /// Resets a device and agrees with it on what it does; its queues are empty and it does not know of them.
    fn cold(
        bus: &mut B,
        memory: &NicMemory,
        header: &Header,
        options: &NicOptions,
    ) -> Result<Assembly<B::Registers>, NicError> {
        let transport = Transport::find(bus, header)?;
        // Reset before it may be master: a device that somebody left running would write to addresses that are ours now.
        transport.reset()?;
        memory.take_back();
        let terms = Self::agree(&transport, options)?;
        let chains = usize::from(terms.ring / 2);
        let empty = loan::stock(memory, chains)?;
        memory.map_anew(bus)?;
        pci::enable(bus, true)?;
        let none = || (0..chains).map(|_| None).collect();
        let contents = Contents {
            cursors: Cursors::default(),
            rx_held: none(),
            tx_held: none(),
            empty: &empty,
            come: &[],
            unsent: &[],
        };
        Self::assemble(bus, memory, transport, terms, contents)
    }

    /// The last steps of a start.
    fn go(&mut self, options: &NicOptions) -> Result<(), NicError> {
        self.transport.silence_configuration();
        self.enable_queues()?;
        if self.control.is_some() {
            let at = self.layout.control.addresses(&self.memory);
            self.transport.enable_queue(queues::CONTROL, control::SIZE, at, common::NO_VECTOR)?;
        }
        self.transport.run();
        self.filter(&options.filter)?;
        // Only now, so that nothing has come in before it was filtered.
        self.ring_both();
        Ok(())
    }

    /// Where a predecessor stopped. Up to the interrupts, nothing is changed, neither in the device nor in memory.
    fn warm(bus: &mut B, memory: &NicMemory, sash: &Sash) -> Result<Assembly<B::Registers>, NicError> {
        sash.check(&memory.layout())?;
        loan::check(memory, sash.slots())?;
        let header = check_card(bus)?;
        let transport = Transport::find(bus, &header)?;
        let found = transport.status()?;
        if found != status::RUNNING {
            return Err(broken("the device was reset after it was parked", found.into()));
        }
        sash.head.check_mac(transport.mac()?)?;
        let terms = Terms { features: sash.features, ring: sash.head.ring, frame_max: sash.frame_max };
        let [come, empty, unsent] = if sash.is_kept() { [&[][..]; 3] } else { sash.in_order() };
        let empty: Vec<_> = empty.iter().map(Loan::slot).collect();
        let [rx_held, tx_held] = sash.by_chain().map(|loans| {
            let kept = |loan| if sash.is_kept() { Held::of(loan) } else { None };
            loans.iter().map(kept).collect()
        });
        let cursors = match sash.is_kept() {
            true => Cursors { rx: sash.rx_at, tx: sash.tx_at, control: sash.control_at },
            false => Cursors { control: sash.control_at, ..Cursors::default() },
        };
        let contents = Contents { cursors, rx_held, tx_held, empty: &empty, come, unsent };
        Self::assemble(bus, memory, transport, terms, contents)
    }

    /// Has a parked device go on.
    fn go_on(&mut self, sash: &Sash) -> Result<(), NicError> {
        if !sash.is_kept() {
            self.rx.chains.publish();
            self.tx.chains.publish();
            self.enable_queues()?;
        }
        self.ring_both();
        Ok(())
    }

    /// Resets the queues, or keeps them; what a successor must know.
    fn stop(&mut self) -> Result<Sash, NicError> {
        self.drain()?;
        let mut sash = self.bare_sash();
        if sash.is_kept() {
            self.transport.status()?;
            list(&mut sash.rx, 0, self.rx.chains.by_chain());
            list(&mut sash.tx, 0, self.tx.chains.by_chain());
            return Ok(sash);
        }
        // Transmission first, so that receiving pauses as briefly as it can.
        self.transport.reset_queue(queues::TRANSMIT)?;
        self.transport.reset_queue(queues::RECEIVE)?;
        (sash.rx_at, sash.tx_at) = (Cursor::default(), Cursor::default());
        let (come, empty) = self.rx.harvest()?;
        sash.come = list(&mut sash.rx, 0, come);
        sash.empty = list(&mut sash.rx, sash.come, empty);
        sash.unsent = list(&mut sash.tx, 0, self.tx.harvest(&self.memory)?);
        Ok(sash)
    }

    fn failed(self, error: NicError) -> Failed<B> {
        Failed { error, bus: self.bus, memory: self.memory }
    }

    /// Tells the device where the queues for frames are.
    fn enable_queues(&self) -> Result<(), NicError> {
        let (rx, tx) = (self.layout.rx.addresses(&self.memory), self.layout.tx.addresses(&self.memory));
        self.transport.enable_queue(queues::RECEIVE, self.ring, rx, RECEIVE_VECTOR)?;
        self.transport.enable_queue(queues::TRANSMIT, self.ring, tx, common::NO_VECTOR)
    }

    /// Tells the device of what is in the queues, whether it wants to hear of it or not.
    fn ring_both(&mut self) {
        self.rx.chains.publish();
        self.tx.chains.publish();
        self.transport.ring(self.rx_bell);
        self.transport.ring(self.tx_bell);
    }

    fn filter(&mut self, filter: &Filter) -> Result<(), NicError> {
        let Some(control) = &mut self.control else {
            // Without commands the device lets in what it likes (§5.1.6.5.1), and we have nothing to say.
            return self.transport.status().map(drop);
        };
        control.set_filter(&self.transport, &self.memory, self.layout.command, filter)
    }

    /// Gives the device time to send what it has.
    fn drain(&mut self) -> Result<(), NicError> {
        let end = Instant::now() + DRAIN;
        loop {
            let late = Instant::now() >= end;
            self.tx.reap(&self.memory)?;
            if self.tx.chains.is_empty() || late {
                return Ok(());
            }
            std::thread::yield_now();
        }
    }

    /// A sash without the queues.
    fn bare_sash(&self) -> Sash {
        Sash {
            head: Head::of::<Sash>(&self.memory.layout(), self.mac, self.ring),
            features: self.features,
            frame_max: self.frame_max,
            come: 0,
            empty: 0,
            unsent: 0,
            control_at: self.control.as_ref().map(Control::cursor).unwrap_or_default(),
            rx_at: self.rx.chains.cursor(),
            tx_at: self.tx.chains.cursor(),
            reserved: 0,
            rx: [Loan::NONE; CHAINS_MAX],
            tx: [Loan::NONE; CHAINS_MAX],
            counts: self.counts,
        }
    }
}

/// Writes `loans` into the sash, from entry `from` on; says how many.
fn list(to: &mut [Loan], from: u16, loans: impl IntoIterator<Item = Loan>) -> u16 {
    let written = to[from.into()..].iter_mut().zip(loans).map(|(to, loan)| *to = loan).count();
    u16::try_from(written).expect("at most as many as there are chains")
}

impl<B: Bus> Port for VirtioNet<B> {
    type Fault = NicError;

    fn receive(&mut self, burst: &mut Burst) -> Result<usize, NicError> {
        let starved = self.counts.rx_no_slot;
        let mut received = self.rx.receive(&self.memory, burst, &mut self.counts)?;
        if self.counts.rx_no_slot != starved {
            // The slots that frames left in may be what they can come in by.
            self.tx.reap(&self.memory)?;
            received += self.rx.receive(&self.memory, burst, &mut self.counts)?;
        }
        if received > 0 && self.rx.chains.publish() {
            self.counts.rx_kicks += 1;
            self.transport.ring(self.rx_bell);
        }
        Ok(received)
    }

    fn transmit(&mut self, burst: &mut Burst) -> Result<usize, NicError> {
        self.tx.reap(&self.memory)?;
        let taken = self.tx.transmit(&self.memory, burst, &mut self.counts);
        if taken > 0 && self.tx.chains.publish() {
            self.counts.tx_kicks += 1;
            self.transport.ring(self.tx_bell);
        }
        Ok(taken)
    }

    fn arm(&mut self) -> Result<Armed, NicError> {
        // Emptied first: what rings from here on stays in it.
        bus::hush(&self.interrupt)?;
        if self.rx.arm()? {
            return Ok(Armed::Busy);
        }
        // Whoever sleeps on a device that is gone sleeps for ever.
        self.transport.status()?;
        Ok(Armed::Idle)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.interrupt.as_fd()
    }
}

impl<B: Bus> Nic for VirtioNet<B> {
    type Bus = B;
    type Sash = Sash;

    fn start(mut bus: B, memory: NicMemory, options: &NicOptions) -> Result<Self, Failed<B>> {
        let checked = check_options(options).and_then(|()| check_memory(&memory, options));
        let header = match checked.and_then(|()| check_card(&mut bus)) {
            Ok(header) => header,
            Err(error) => return Err(Failed { error, bus, memory }),
        };
        let mut nic = match Self::cold(&mut bus, &memory, &header, options) {
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

    fn resume(mut bus: B, memory: NicMemory, sash: &Sash) -> Result<Self, Failed<B>> {
        let mut nic = match Self::warm(&mut bus, &memory, sash) {
            Ok(parts) => Self::new(bus, memory, parts, sash.counts),
            Err(error) => return Err(Failed { error, bus, memory }),
        };
        match nic.go_on(sash) {
            Ok(()) => Ok(nic),
            Err(error) => Err(nic.failed(error)),
        }
    }

    /// Resets the queues, or keeps them: see the head of the module.
    fn park(mut self) -> Result<(B, NicMemory, Sash), Failed<B>> {
        match self.stop() {
            Ok(sash) => Ok((self.bus, self.memory, sash)),
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
        self.transport.link(self.features)
    }

    fn set_filter(&mut self, filter: &Filter) -> Result<(), NicError> {
        self.filter(filter)
    }

    /// The driver's own counts: the device has none.
    fn statistics(&mut self) -> Vec<(&'static str, u64)> {
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

const _: () = assert!(HEADER_LEN <= 64);
