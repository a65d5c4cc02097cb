//! A virtio network device, as *Virtual I/O Device (VIRTIO) Version 1.2* describes it (§ numbers refer to it): a
//! state machine without threads, clocks or memory of its own. Modern, over PCI, with split virtqueues and without
//! offloads.
//!
//! The owner of a [`Device`] passes it register accesses, frames and the time, and calls `step`. Only a step
//! accesses the host's memory, raises interrupts and puts frames on the wire; a register access changes the device's
//! state at once.
//!
//! The device polls: each step reads the available indices, and the device asks for notifications only before a nap.
//! docs/design/sim.md lists the choices that the specification leaves open, and ours.
#![allow(clippy::cast_possible_truncation, reason = "registers and descriptors are cut into their fields everywhere")]

mod chain;
mod common;
mod control;
mod filter;
mod model;
mod net;
mod pci;
mod queue;
mod steer;

use std::collections::VecDeque;

use crate::journal::{Class, Journal};
use crate::model::Host;
use chain::Chain;
use common::{Common, status};
use filter::Filter;
use pci::Pci;
use queue::{Queue, Trouble};
use steer::Steering;

pub use pci::VECTORS;

/// Most queue pairs of a card.
pub const PAIRS_MAX: u16 = 2;

/// Most queues: those of all pairs, and the control queue.
const QUEUES: usize = 2 * PAIRS_MAX as usize + 1;

/// Feature bits, §5.1.3 and §6.
pub mod feature {
    /// The device proposes an MTU.
    pub const MTU: u64 = 1 << 3;
    /// The device has an Ethernet address.
    pub const MAC: u64 = 1 << 5;
    /// The configuration has the link's state.
    pub const STATUS: u64 = 1 << 16;
    /// The device has a control queue.
    pub const CTRL_VQ: u64 = 1 << 17;
    /// Commands for the receive filter.
    pub const CTRL_RX: u64 = 1 << 18;
    /// More such commands.
    pub const CTRL_RX_EXTRA: u64 = 1 << 20;
    /// Several queue pairs with automatic steering.
    pub const MQ: u64 = 1 << 22;
    /// Each side names the index at which it wants a notification or an interrupt.
    pub const EVENT_IDX: u64 = 1 << 29;
    /// The interface of virtio 1.
    pub const VERSION_1: u64 = 1 << 32;
    /// The device accesses memory through the platform's mappings (IOMMU).
    pub const ACCESS_PLATFORM: u64 = 1 << 33;
    /// The driver can reset single queues.
    pub const RING_RESET: u64 = 1 << 40;
    /// Several queue pairs with a hash and an indirection table.
    pub const RSS: u64 = 1 << 60;
    /// The configuration has speed and duplex mode.
    pub const SPEED_DUPLEX: u64 = 1 << 63;

    /// All features of the model.
    pub const ALL: u64 = MTU
        | MAC
        | STATUS
        | CTRL_VQ
        | CTRL_RX
        | CTRL_RX_EXTRA
        | MQ
        | EVENT_IDX
        | VERSION_1
        | ACCESS_PLATFORM
        | RING_RESET
        | RSS
        | SPEED_DUPLEX;

    /// Pairs of a feature and the feature it requires (§5.1.3.1).
    pub const RESTS_ON: [(u64, u64); 4] = [(CTRL_RX, CTRL_VQ), (CTRL_RX_EXTRA, CTRL_VQ), (MQ, CTRL_VQ), (RSS, CTRL_VQ)];
}

/// A BAR of the card, by its contents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bar {
    /// BAR 0: the structures of virtio.
    Structures,
    /// BAR 1: MSI-X table and pending bits.
    MsiX,
}

impl Bar {
    /// Returns the kind and length in bytes of BAR `index`.
    pub fn at(index: u8) -> Option<(Bar, u32)> {
        match index {
            0 => Some((Bar::Structures, pci::STRUCTURES_LEN)),
            1 => Some((Bar::MsiX, pci::MSIX_LEN)),
            _ => None,
        }
    }
}

/// Properties of a card.
#[derive(Debug, Clone)]
pub struct Options {
    /// Ethernet address.
    pub mac: [u8; 6],
    /// Features that the card offers. It leaves out those that the model lacks, or whose required feature is not
    /// offered.
    pub features: u64,
    /// Queue pairs: 1 or 2.
    pub pairs: u16,
    /// Most descriptors of a receive or transmit queue: a power of two, up to 1024.
    pub queue_size: u16,
    /// Proposed MTU in bytes.
    pub mtu: u16,
    /// Reported speed in Mb/s.
    pub speed: u32,
    /// Drop and count frames for which there is no buffer. Otherwise they wait, in the card and at the other end of
    /// its wire.
    pub lossy: bool,
    /// Nanoseconds that a reset of the device, or of a queue, takes. Until its end a queue continues with the chains
    /// it has.
    pub reset_ns: u64,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            mac: [0x02, 0x00, 0x00, 0x74, 0x00, 0x02],
            features: feature::ALL,
            pairs: PAIRS_MAX,
            queue_size: 512,
            mtu: 1500,
            speed: 10_000,
            lossy: false,
            reset_ns: 10_000,
        }
    }
}

/// Faults that a test injects into the card.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    /// The card is unplugged: every register reads as ones, writes are ignored, and no frame moves.
    pub removed: bool,
    /// Receive queues for which the card stops filling buffers.
    pub stuck_receive: [bool; PAIRS_MAX as usize],
    /// Transmit queues from which the card stops taking frames.
    pub stuck_transmit: [bool; PAIRS_MAX as usize],
    /// Number of interrupts that the card loses, from the next one on.
    pub lost_interrupts: u32,
}

/// Numbers of frames, by their treatment; no register of the card has them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Written to a buffer.
    pub received: u64,
    /// Put on the wire; a frame that the driver sends without a link is not counted.
    pub sent: u64,
    /// Dropped for lack of a link or a driver.
    pub not_ready: u64,
    /// Failed the address filter.
    pub filtered: u64,
    /// Longer than the next buffer or the MTU, or shorter than a frame can be.
    pub unfit: u64,
    /// Dropped for lack of a buffer, with [`Options::lossy`].
    pub no_buffer: u64,
    /// Notifications by the driver.
    pub rings: u64,
}

/// Bytes of frames that wait in the card for buffers of a queue: more than an 82574L's packet buffer holds.
const WAITING_MAX: usize = 64 << 10;

/// A virtio network device.
#[derive(Debug)]
pub struct Device {
    options: Options,
    /// Rules that the driver broke.
    pub journal: Journal,
    /// Faults to inject.
    pub faults: Faults,
    pci: Pci,
    common: Common,
    /// Receive and transmit queue of each pair, and the control queue, which is last here, whichever its index.
    queues: [Queue; QUEUES],
    filter: Filter,
    steering: Steering,
    /// Whether the other end of the cable is plugged in.
    partner: bool,
    isr: u8,
    /// Level of INTA# that the host was told last.
    intx: bool,
    /// The configuration changed, and the driver has to be told.
    changed: bool,
    /// Frames that wait for buffers of each receive queue.
    waiting: [Waiting; PAIRS_MAX as usize],
    counts: Counts,
    /// The chain being handled, and the frame being sent.
    chain: Chain,
    packet: Box<[u8]>,
    now: u64,
    /// End of the present reset.
    reset_until: Option<u64>,
}

/// Frames that wait for buffers.
#[derive(Debug, Default)]
struct Waiting {
    frames: VecDeque<Box<[u8]>>,
    bytes: usize,
}

impl Waiting {
    fn push(&mut self, frame: &[u8]) {
        self.bytes += frame.len();
        self.frames.push_back(frame.into());
    }

    fn pop(&mut self) -> Option<Box<[u8]>> {
        let frame = self.frames.pop_front()?;
        self.bytes -= frame.len();
        Some(frame)
    }
}

impl Device {
    /// Makes a card in its power-on state.
    pub fn new(options: Options) -> Self {
        let features = feature::RESTS_ON.iter().fold(options.features & feature::ALL, |features, (what, on)| {
            if features & on == 0 { features & !what } else { features }
        });
        let pairs = options.pairs.clamp(1, PAIRS_MAX);
        let queue_size = options.queue_size.clamp(2, queue::SIZE_MAX);
        let queue_size = if queue_size.is_power_of_two() { queue_size } else { queue_size.next_power_of_two() / 2 };
        let options = Options { features, pairs, queue_size, ..options };
        let mut device = Device {
            journal: Journal::default(),
            faults: Faults::default(),
            pci: pci::function(),
            common: Common::default(),
            queues: Default::default(),
            filter: Filter::new(options.mac),
            steering: Steering::default(),
            partner: true,
            isr: 0,
            intx: false,
            changed: false,
            waiting: Default::default(),
            counts: Counts::default(),
            chain: Chain::default(),
            packet: vec![0; net::PACKET_MAX].into_boxed_slice(),
            now: 0,
            reset_until: None,
            options,
        };
        device.reset_device();
        device
    }

    /// Resets the device to its initial state (§2.4). INTx stays: the host has yet to hear that it is deasserted.
    fn reset_device(&mut self) {
        let generation = self.common.generation;
        self.common = Common::default();
        self.common.generation = generation;
        let size = self.options.queue_size;
        self.queues.iter_mut().for_each(|queue| queue.reset(size));
        self.queues[QUEUES - 1].reset(queue::CONTROL_SIZE);
        self.filter = Filter::new(self.options.mac);
        self.steering = Steering::default();
        self.waiting = Default::default();
        self.isr = 0;
        self.changed = false;
        self.reset_until = None;
    }

    /// Returns whether the link is up.
    pub fn link(&self) -> bool {
        self.partner
    }

    /// Returns the numbers of frames.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Returns how many frames, and how many bytes of them, wait for buffers.
    pub fn waiting(&self) -> (usize, usize) {
        self.waiting.iter().fold((0, 0), |(frames, bytes), one| (frames + one.frames.len(), bytes + one.bytes))
    }

    /// Returns the negotiated features.
    pub fn features(&self) -> u64 {
        self.common.driver_features
    }

    /// Returns whether the device needs a reset, since its driver made an error from which it cannot recover.
    pub fn needs_reset(&self) -> bool {
        self.common.status & status::NEEDS_RESET != 0
    }

    /// Switches MSI-X on and unmasks its vectors, or off and masks them, as a system does for a driver that uses
    /// MSI-X.
    pub fn enable_msix(&mut self, on: bool) {
        self.pci.enable_msix(on);
    }

    fn has(&self, feature: u64) -> bool {
        self.common.driver_features & feature != 0
    }

    /// Returns whether the driver has set DRIVER_OK and the device needs no reset.
    fn runs(&self) -> bool {
        self.common.status & (status::DRIVER_OK | status::NEEDS_RESET) == status::DRIVER_OK
    }

    /// Returns the number of queue pairs under the negotiated features (§5.1.2).
    fn pairs(&self) -> u16 {
        if self.has(feature::MQ | feature::RSS) { self.options.pairs } else { 1 }
    }

    /// Returns the place of queue `index` in `queues`. Before negotiation, all queues exist.
    fn queue_of(&self, index: u16) -> Option<usize> {
        let agreed = self.common.status & status::FEATURES_OK != 0;
        let pairs = if agreed { self.pairs() } else { self.options.pairs };
        let commands = if agreed { self.has(feature::CTRL_VQ) } else { self.options.features & feature::CTRL_VQ != 0 };
        match index {
            index if index < 2 * pairs => Some(index.into()),
            index if index == 2 * pairs && commands => Some(QUEUES - 1),
            _ => None,
        }
    }

    /// Returns the index of the queue at `place`.
    fn index_of(&self, place: usize) -> u16 {
        if place == QUEUES - 1 { 2 * self.pairs() } else { place as u16 }
    }

    /// Returns BAR, offset and width in bytes to which the configuration space's window points. A driver must not
    /// use the window while it points nowhere.
    fn window(&mut self) -> Option<(Bar, u32, u8)> {
        let (bar, at, len) = pci::window(&self.pci);
        let inside = matches!(len, 1 | 2 | 4) && at % len == 0 && at < pci::STRUCTURES_LEN;
        if bar != 0 || !inside {
            self.journal.note(Class::OddAccess, self.now, at.into(), len.into());
            return None;
        }
        Some((Bar::Structures, at, len as u8))
    }

    /// Ends the resets whose time is over.
    fn pass_time(&mut self) {
        let now = self.now;
        if self.reset_until.is_some_and(|until| now >= until) {
            self.reset_device();
        }
        let size = self.options.queue_size;
        for (place, queue) in self.queues.iter_mut().enumerate() {
            if queue.reset_until.is_some_and(|until| now >= until) {
                queue.reset(if place == QUEUES - 1 { queue::CONTROL_SIZE } else { size });
                queue.was_reset = true;
            }
        }
    }

    /// Stops the device after an error by the driver from which it cannot recover, and sets DEVICE_NEEDS_RESET
    /// (§2.1.2).
    #[cold]
    fn fail(&mut self, trouble: Trouble) {
        if self.needs_reset() {
            return;
        }
        let Trouble { class, place, value } = trouble;
        self.journal.note(class, self.now, place, value);
        self.common.status |= status::NEEDS_RESET;
        self.changed = true;
    }

    /// Notes an access to unmapped memory. The card gets no answer to its writes.
    #[cold]
    fn unreachable(&mut self, at: u64) {
        self.journal.note(Class::UnmappedDma, self.now, at, 0);
    }

    /// Raises the interrupt of a queue or of the configuration; `cause` is bit 0 or 1 of ISR.
    fn interrupt(&mut self, vector: u16, cause: u8, host: &mut impl Host) {
        if self.faults.lost_interrupts > 0 {
            self.faults.lost_interrupts -= 1;
        } else if !self.pci.msix() {
            self.isr |= cause;
        } else if usize::from(vector) < VECTORS {
            self.pci.fire(vector.into(), host);
        }
    }

    /// Raises the interrupts that are due.
    fn signal(&mut self, host: &mut impl Host) {
        // §2.1.2: a device that has stopped does so too, once there is a driver.
        if self.changed && self.common.status & status::DRIVER_OK != 0 {
            self.changed = false;
            self.interrupt(self.common.config_vector, 2, host);
        }
        self.pci.fire_pending(host);
        let level = self.isr != 0 && self.pci.intx_allowed();
        if std::mem::replace(&mut self.intx, level) != level {
            self.pci.set_intx(self.isr != 0);
            host.interrupt(crate::model::Interrupt::IntX(level));
        }
    }
}

fn ones(width: u8) -> u32 {
    u32::MAX >> (32 - 8 * u32::from(width.clamp(1, 4)))
}
