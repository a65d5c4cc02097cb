//! A virtio network device, as *Virtual I/O Device (VIRTIO) Version 1.2* describes it (the § after each is its section): a state machine
//! without threads, clocks or memory of its own. Modern, over PCI, with split virtqueues and without offloads.
//!
//! Whoever has a [`Device`] gives it register accesses, frames and the time, and lets it step. Only in a step does it reach the host's
//! memory, raise interrupts and put frames on the wire; a register access changes its state at once.
//!
//! It polls: each step looks at the available indices, and notifications are asked for only before a nap. docs/design/sim.md says what
//! the specification leaves open and what we took.
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
use crate::wire::Wire;
use chain::Chain;
use common::{Common, status};
use filter::Filter;
use pci::Pci;
use queue::{Queue, Trouble};
use steer::Steering;

pub use pci::VECTORS;

/// Pairs of queues that a card has at most.
pub const PAIRS_MAX: u16 = 2;

/// Most queues: those of all pairs, and the one for commands.
const QUEUES: usize = 2 * PAIRS_MAX as usize + 1;

/// Feature bits, §5.1.3 and §6.
pub mod feature {
    /// The device says what MTU it wants.
    pub const MTU: u64 = 1 << 3;
    /// The device has an address.
    pub const MAC: u64 = 1 << 5;
    /// The state of the link is in the configuration.
    pub const STATUS: u64 = 1 << 16;
    /// There is a queue for commands.
    pub const CTRL_VQ: u64 = 1 << 17;
    /// Commands for the receive filter.
    pub const CTRL_RX: u64 = 1 << 18;
    /// More of them.
    pub const CTRL_RX_EXTRA: u64 = 1 << 20;
    /// Several pairs of queues, by automatic steering.
    pub const MQ: u64 = 1 << 22;
    /// Each side says at which index it wants to hear of the other.
    pub const EVENT_IDX: u64 = 1 << 29;
    /// The interface of virtio 1.
    pub const VERSION_1: u64 = 1 << 32;
    /// The device reaches memory by what the platform maps for it.
    pub const ACCESS_PLATFORM: u64 = 1 << 33;
    /// Queues can be reset one by one.
    pub const RING_RESET: u64 = 1 << 40;
    /// Several pairs of queues, by a hash and a table.
    pub const RSS: u64 = 1 << 60;
    /// Speed and duplex are in the configuration.
    pub const SPEED_DUPLEX: u64 = 1 << 63;

    /// All that the model can do.
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

    /// What rests on another (§5.1.3.1).
    pub const RESTS_ON: [(u64, u64); 4] = [(CTRL_RX, CTRL_VQ), (CTRL_RX_EXTRA, CTRL_VQ), (MQ, CTRL_VQ), (RSS, CTRL_VQ)];
}

/// What a BAR of the card is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bar {
    /// BAR 0: the structures of virtio.
    Structures,
    /// BAR 1: MSI-X table and pending bits.
    MsiX,
}

impl Bar {
    /// What is behind BAR `index`, and how many bytes.
    pub fn at(index: u8) -> Option<(Bar, u32)> {
        match index {
            0 => Some((Bar::Structures, pci::STRUCTURES_LEN)),
            1 => Some((Bar::MsiX, pci::MSIX_LEN)),
            _ => None,
        }
    }
}

/// How a card is made.
#[derive(Debug, Clone)]
pub struct Options {
    /// Its address.
    pub mac: [u8; 6],
    /// Features that it offers, as far as the model can do them; without the ones that one rests on it is not offered either.
    pub features: u64,
    /// Pairs of queues: 1 or 2.
    pub pairs: u16,
    /// Most descriptors of a queue for frames: a power of two, up to 1024.
    pub queue_size: u16,
    /// The MTU that it says.
    pub mtu: u16,
    /// What it says of its speed, in Mb/s.
    pub speed: u32,
    /// Frames for which there is no buffer are lost, and counted. Else they wait, in the card and at the other end of its wire.
    pub lossy: bool,
    /// From a reset of the device, or of a queue, until that is done, in nanoseconds. Until then a queue goes on with what it has.
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

/// What a test makes the card do wrong.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    /// It is out of its socket: every register reads as ones, nothing is written, nothing moves.
    pub removed: bool,
    /// It fills no buffer of these receive queues any more.
    pub stuck_receive: [bool; PAIRS_MAX as usize],
    /// It takes no frame of these transmit queues any more.
    pub stuck_transmit: [bool; PAIRS_MAX as usize],
    /// So many interrupts get lost.
    pub lost_interrupts: u32,
}

/// What became of frames, which no register of the card counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Came to a buffer.
    pub received: u64,
    /// Left.
    pub sent: u64,
    /// Came while there was no link, or no driver, and were lost.
    pub not_ready: u64,
    /// Did not pass the address filter.
    pub filtered: u64,
    /// Were longer than the buffer that was next, or than the MTU, or shorter than a frame can be.
    pub unfit: u64,
    /// Found no buffer and were lost, with [`Options::lossy`].
    pub no_buffer: u64,
    /// Times that the driver told the card of work.
    pub rings: u64,
}

/// Bytes of frames that wait in the card for buffers of a queue. As many as an 82574L's packet buffer has with room to spare.
const WAITING_MAX: usize = 64 << 10;

/// A virtio network device.
#[derive(Debug)]
pub struct Device {
    options: Options,
    /// What a driver did that it must not do.
    pub journal: Journal,
    /// What the card shall do wrong.
    pub faults: Faults,
    pci: Pci,
    common: Common,
    /// Receive and transmit queue of each pair, and the one for commands: wherever its index is, it is the last here.
    queues: [Queue; QUEUES],
    filter: Filter,
    steering: Steering,
    /// Whether the other end of its cable is plugged in.
    partner: bool,
    isr: u8,
    /// Whether the host was told that INTA# is asserted.
    intx: bool,
    /// The configuration has changed and the driver is to be told.
    changed: bool,
    /// Frames that wait for buffers of each receive queue.
    waiting: [Waiting; PAIRS_MAX as usize],
    counts: Counts,
    /// The chain that is being looked at, and the frame that is being sent.
    chain: Chain,
    packet: Box<[u8]>,
    now: u64,
    /// Until then a reset goes on.
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
    /// A card as it is when power has just come on.
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
            pci: Pci::new(),
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

    /// As when power comes on, or the bus is reset.
    pub fn reset(&mut self, now: u64) {
        self.now = self.now.max(now);
        self.pci.reset();
        self.reset_device();
    }

    /// §2.4: all is as it was. The host has yet to learn that INTx is asserted no more.
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

    /// Has the other end of the cable plugged in (as it is at first), or taken out.
    pub fn set_partner(&mut self, there: bool) {
        if std::mem::replace(&mut self.partner, there) != there {
            self.common.stale = true;
            self.changed = true;
        }
    }

    /// Whether frames can pass.
    pub fn link(&self) -> bool {
        self.partner
    }

    /// Whether frames can pass and the driver takes them.
    pub fn receives(&self) -> bool {
        self.partner && self.runs() && self.queues[0].is_on()
    }

    /// What became of frames.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Frames, and bytes of them, that wait for buffers.
    pub fn waiting(&self) -> (usize, usize) {
        self.waiting.iter().fold((0, 0), |(frames, bytes), one| (frames + one.frames.len(), bytes + one.bytes))
    }

    /// What driver and device have agreed on.
    pub fn features(&self) -> u64 {
        self.common.driver_features
    }

    /// Whether the device needs a reset, since its driver did what it cannot get over.
    pub fn needs_reset(&self) -> bool {
        self.common.status & status::NEEDS_RESET != 0
    }

    /// MSI-X switched on or off and its vectors unmasked or masked, as a system does for a driver that has interrupts by it.
    pub fn enable_msix(&mut self, on: bool) {
        self.pci.enable_msix(on);
    }

    fn has(&self, feature: u64) -> bool {
        self.common.driver_features & feature != 0
    }

    /// Whether the driver has said DRIVER_OK and the device can go on.
    fn runs(&self) -> bool {
        self.common.status & (status::DRIVER_OK | status::NEEDS_RESET) == status::DRIVER_OK
    }

    /// Pairs of queues that there are after what was agreed on (§5.1.2).
    fn pairs(&self) -> u16 {
        if self.has(feature::MQ | feature::RSS) { self.options.pairs } else { 1 }
    }

    /// Which of our queues has index `index`. Before anything was agreed on, all are there.
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

    /// The index of our queue `place`.
    fn index_of(&self, place: usize) -> u16 {
        if place == QUEUES - 1 { 2 * self.pairs() } else { place as u16 }
    }

    /// Reads `width` (1, 2 or 4) bytes of the configuration space.
    pub fn read_config(&mut self, offset: u32, width: u8, now: u64) -> u32 {
        self.now = self.now.max(now);
        if self.faults.removed {
            return ones(width);
        }
        // The window in the configuration space to the structures (§4.1.4.9).
        if offset == pci::WINDOW_DATA
            && let Some((bar, at, width)) = self.window()
        {
            return self.read(bar, at, width, now);
        }
        self.pci.read(offset, width)
    }

    /// Writes `width` (1, 2 or 4) bytes of the configuration space.
    pub fn write_config(&mut self, offset: u32, width: u8, value: u32, now: u64) {
        self.now = self.now.max(now);
        if self.faults.removed {
            return;
        }
        if offset == pci::WINDOW_DATA
            && let Some((bar, at, width)) = self.window()
        {
            return self.write(bar, at, width, value & ones(width), now);
        }
        self.pci.write(offset, width, value);
    }

    /// Where the window of the configuration space points to. A driver must not use it while it points nowhere.
    fn window(&mut self) -> Option<(Bar, u32, u8)> {
        let (bar, at, len) = self.pci.window();
        let inside = matches!(len, 1 | 2 | 4) && at % len == 0 && at < pci::STRUCTURES_LEN;
        if bar != 0 || !inside {
            self.journal.note(Class::OddAccess, self.now, at.into(), len.into());
            return None;
        }
        Some((Bar::Structures, at, len as u8))
    }

    /// Reads `width` (1, 2 or 4) bytes behind a BAR.
    pub fn read(&mut self, bar: Bar, offset: u32, width: u8, now: u64) -> u32 {
        self.now = self.now.max(now);
        if self.faults.removed || !self.pci.memory_on() {
            return ones(width);
        }
        match bar {
            Bar::Structures => self.read_structure(offset, width) & ones(width),
            Bar::MsiX => self.pci.table_read(offset & !3) >> (8 * (offset & 3)) & ones(width),
        }
    }

    /// Writes `width` (1, 2 or 4) bytes behind a BAR.
    pub fn write(&mut self, bar: Bar, offset: u32, width: u8, value: u32, now: u64) {
        self.now = self.now.max(now);
        if self.faults.removed || !self.pci.memory_on() {
            return;
        }
        match bar {
            Bar::Structures => self.write_structure(offset, width, value),
            Bar::MsiX if width == 4 && offset.is_multiple_of(4) => self.pci.table_write(offset, value),
            Bar::MsiX => self.journal.note(Class::OddAccess, self.now, offset.into(), value.into()),
        }
    }

    /// Does what is to be done now: takes commands and frames from the driver, and frames from the wire; raises interrupts. A bounded
    /// amount of it; says whether there was anything.
    pub fn step(&mut self, host: &mut impl Host, wire: &mut impl Wire, now: u64) -> bool {
        self.now = self.now.max(now);
        if self.faults.removed {
            return false;
        }
        self.pass_time();
        let mut busy = false;
        if self.runs() && self.pci.master() {
            self.quiesce(host);
            busy |= self.serve_commands(host);
            for pair in 0..usize::from(self.pairs()) {
                busy |= self.transmit(pair, host, wire);
            }
            busy |= self.receive(host, wire);
        } else if self.options.lossy {
            busy |= self.lose(wire);
        }
        self.signal(host);
        busy
    }

    /// Ends what has run out.
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

    /// The driver did what a device does not get over: it stops, and says so (§2.1.2).
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

    /// The card was sent to memory that is not there. Of a write it learns nothing.
    #[cold]
    fn unreachable(&mut self, at: u64) {
        self.journal.note(Class::UnmappedDma, self.now, at, 0);
    }

    /// The interrupt of a queue, or of the configuration (bit 0 or 1 of ISR).
    fn interrupt(&mut self, vector: u16, cause: u8, host: &mut impl Host) {
        if self.faults.lost_interrupts > 0 {
            self.faults.lost_interrupts -= 1;
        } else if !self.pci.msix() {
            self.isr |= cause;
        } else if usize::from(vector) < VECTORS {
            self.pci.fire(vector.into(), host);
        }
    }

    /// Tells the driver what it wants to be told.
    fn signal(&mut self, host: &mut impl Host) {
        // §2.1.2: also of a device that has stopped, once there is a driver.
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
