//! Virtio's transport over PCI (virtio 1.2, §4.1): finding the structures, the handshake, and setting up queues.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::control::PAIRS;
use super::regs::{capability, common, feature, net, queue as queues, status};
use crate::nic::bus::{Bus, BusError, Capability, Header, Iova, Registers};
use crate::nic::driver_state::broken;
use crate::nic::register::{Readable, Register, Width, Wo, Writable, wait};
use crate::nic::{Link, Mac, NicError};

/// Time limit for one step of the handshake, in ms.
const STEP_MS: u32 = 1000;
/// Maximum number of configuration changes during one read.
const CHANGES_MAX: usize = 100;

/// Maximum number of pairs of queues of a device (§5.1.4).
const PAIRS_MAX: u16 = 0x8000 / 2;

/// Number of BARs of a device.
const BARS: u32 = 6;

/// Name of the step, for the error of a queue reset that is not finished in time.
const RESET: &str = "the reset of a queue";

/// Place of a structure of registers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Place {
    /// Number of its BAR.
    pub bar: u32,
    /// Offset of its first byte in the BAR.
    pub base: u32,
    /// Length in bytes.
    pub len: u32,
}

impl Place {
    /// Returns whether 32-bit registers fit there. §4.1.4.1 demands more of some structures.
    fn is_sound(&self) -> bool {
        self.bar < BARS && self.base.is_multiple_of(4) && self.base.checked_add(self.len).is_some()
    }

    /// Finds the first capability of `kind`. Returns its place and the word that follows it.
    fn find<B: Bus>(bus: &mut B, header: &Header, kind: u8) -> Result<(Self, u32), NicError> {
        for &Capability { id, offset } in &header.capabilities {
            let word = |bus: &mut B, i: u16| bus.read_config(offset.saturating_add(4 * i));
            let [_, _, _, found] = word(bus, 0)?.to_le_bytes();
            if id != Capability::VENDOR || found != kind {
                continue;
            }
            let [bar, ..] = word(bus, 1)?.to_le_bytes();
            let (base, len, more) = (word(bus, 2)?, word(bus, 3)?, word(bus, 4)?);
            let place = Place { bar: bar.into(), base, len };
            return match place.is_sound() {
                true => Ok((place, more)),
                false => Err(NicError::Absurd { what: "a structure of virtio at", value: base.into() }),
            };
        }
        Err(NicError::Absurd { what: "it lacks a structure that virtio 1 has, of type", value: kind.into() })
    }

    fn at_least(&self, len: u32) -> Result<(), NicError> {
        match self.len >= len {
            true => Ok(()),
            false => Err(NicError::Absurd { what: "a structure of virtio is too short", value: self.len.into() }),
        }
    }

    /// Opens the registers behind the BAR.
    fn open<B: Bus>(&self, bus: &mut B) -> Result<Window<B::Registers>, BusError> {
        let bar = u8::try_from(self.bar).map_err(|_| BusError::NoBar { index: u8::MAX })?;
        Ok(Window { registers: bus.registers(bar)?, base: self.base })
    }

    /// Returns whether a notification can be written at this offset.
    fn has_bell(&self, offset: u32) -> bool {
        offset.is_multiple_of(2) && offset < self.len
    }
}

/// Places of the registers of a device, once found: a successor has no time to look for them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Way {
    /// Common configuration.
    pub common: Place,
    /// Notifications.
    pub notify: Place,
    /// Configuration of the network device.
    pub net: Place,
    /// Notification address of each queue, in bytes from the start of `notify`.
    pub bells: [u32; 4],
    /// Number of pairs of queues that the device has.
    pub pairs: u16,
    /// Number of our pair, from 0 on.
    pub pair: u16,
}

impl Way {
    /// Returns the device's number of one of our queues (§5.1.2): the pairs one after the other, then the command
    /// queue.
    pub fn number(&self, queue: u16) -> u16 {
        match queue {
            queues::RECEIVE => 2 * self.pair,
            queues::TRANSMIT => 2 * self.pair + 1,
            queues::OTHER => 2 * other(self.pair),
            _ => 2 * self.pairs,
        }
    }

    /// Checks that this can belong to a device with these features.
    pub fn check(&self, features: u64) -> Result<(), NicError> {
        let common_len = if features & feature::RING_RESET == 0 { common::LEN } else { common::LEN_WITH_RESET };
        for (place, len) in [(&self.common, common_len), (&self.notify, 0), (&self.net, net::LEN)] {
            if !place.is_sound() || place.len < len {
                return Err(broken("it has no registers at", place.base.into()));
            }
        }
        let pairs = if features & feature::STEER == 0 { 1..=1 } else { 2..=PAIRS_MAX };
        if !pairs.contains(&self.pairs) || self.pair >= self.pairs {
            return Err(broken("it has no pair of queues", self.pair.into()));
        }
        match self.bells.iter().find(|&&bell| !self.notify.has_bell(bell)) {
            Some(&bell) => Err(broken("it has no registers at", bell.into())),
            None => Ok(()),
        }
    }
}

/// Returns the pair of queues that is not this one.
pub fn other(pair: u16) -> u16 {
    (pair + 1) % PAIRS
}

/// A structure of registers in a BAR.
#[derive(Debug)]
struct Window<R> {
    registers: R,
    base: u32,
}

impl<R: Registers> Window<R> {
    /// Returns register `register` of this structure.
    fn at<W, A>(&self, register: Register<W, A>) -> Register<W, A> {
        register.after(self.base)
    }
}

/// Notification register of a queue.
#[derive(Debug, Clone, Copy)]
pub struct Doorbell {
    register: Register<u16, Wo>,
    queue: u16,
}

/// Access to a virtio network device.
#[derive(Debug)]
pub struct Transport<R> {
    common: Window<R>,
    notify: Window<R>,
    net: Window<R>,
    way: Way,
    notify_multiplier: u32,
}

impl<R: Registers> Transport<R> {
    /// Finds the structures of the device. [`find_bells`](Self::find_bells) finds the notification addresses later.
    pub fn find<B: Bus<Registers = R>>(bus: &mut B, header: &Header) -> Result<Self, NicError> {
        let (common, _) = Place::find(bus, header, capability::COMMON)?;
        let (notify, multiplier) = Place::find(bus, header, capability::NOTIFY)?;
        let (net, _) = Place::find(bus, header, capability::DEVICE)?;
        common.at_least(common::LEN)?;
        net.at_least(net::LEN)?;
        let way = Way { common, notify, net, bells: [0; 4], pairs: 1, pair: 0 };
        Ok(Transport { notify_multiplier: multiplier, ..Self::open(bus, way)? })
    }

    /// Opens the structures of a device that was found before.
    pub fn open<B: Bus<Registers = R>>(bus: &mut B, way: Way) -> Result<Self, BusError> {
        let (common, notify, net) = (way.common.open(bus)?, way.notify.open(bus)?, way.net.open(bus)?);
        Ok(Transport { common, notify, net, way, notify_multiplier: 0 })
    }

    /// Returns the places of all structures.
    pub fn way(&self) -> Way {
        self.way
    }

    /// Reads the number of pairs of queues; without steering, it stays one.
    pub fn find_pairs(&mut self, features: u64) -> Result<(), NicError> {
        if features & feature::STEER != 0 {
            let pairs = self.pairs_max()?;
            if !(2..=PAIRS_MAX).contains(&pairs) {
                return Err(NicError::Absurd { what: "the number of its pairs of queues", value: pairs.into() });
            }
            self.way.pairs = pairs;
        }
        Ok(())
    }

    fn pairs_max(&self) -> Result<u16, NicError> {
        self.steady(|net| net.at(net::PAIRS_MAX).read(&net.registers))
    }

    /// Selects the pair of queues that is ours.
    pub fn choose(&mut self, pair: u16) {
        self.way.pair = pair;
    }

    /// Reads the notification address of each of our queues (§4.1.4.4), and of the other pair's receive queue. A device
    /// that takes no commands has none for the command queue.
    pub fn find_bells(&mut self, features: u64) -> Result<(), NicError> {
        let has = |queue| match queue {
            queues::CONTROL => features & feature::CTRL_RX != 0,
            queues::OTHER => features & feature::STEER != 0,
            _ => true,
        };
        let all = [queues::RECEIVE, queues::TRANSMIT, queues::CONTROL, queues::OTHER];
        for queue in all.into_iter().filter(|&queue| has(queue)) {
            self.select(queue);
            let offset = u64::from(self.read(common::QUEUE_NOTIFY_OFF)) * u64::from(self.notify_multiplier);
            match u32::try_from(offset) {
                Ok(offset) if self.way.notify.has_bell(offset) => self.way.bells[usize::from(queue)] = offset,
                _ => {
                    let what = "notifications of a queue go beyond their place, to";
                    return Err(NicError::Absurd { what, value: offset });
                }
            }
        }
        Ok(())
    }

    /// Selects the queue that the next register accesses refer to.
    fn select(&self, queue: u16) {
        self.write(common::QUEUE_SELECT, self.way.number(queue));
    }

    fn read<W: Width, A: Readable>(&self, register: Register<W, A>) -> W {
        self.common.at(register).read(&self.common.registers)
    }

    fn write<W: Width, A: Writable>(&self, register: Register<W, A>, value: W) {
        self.common.at(register).write(&self.common.registers, value);
    }

    /// Returns whether a write may not have reached the device yet.
    pub fn is_behind(&self) -> bool {
        self.common.registers.is_behind() || self.notify.registers.is_behind()
    }

    /// Waits until all writes, even those of other drivers, have reached the device.
    pub fn settle(&self) -> Result<(), NicError> {
        self.status()?;
        self.common.registers.settled();
        self.notify.registers.settled();
        Ok(())
    }

    /// Returns the device status.
    ///
    /// # Errors
    /// The device is gone or asks for a reset.
    pub fn status(&self) -> Result<u8, NicError> {
        match self.read(common::DEVICE_STATUS) {
            u8::MAX => Err(NicError::Gone),
            status if status & status::NEEDS_RESET != 0 => {
                Err(NicError::Absurd { what: "it needs a reset, says its status", value: status.into() })
            }
            status => Ok(status),
        }
    }

    /// Resets the device (§2.4) and tells it that there is a driver.
    pub fn reset(&self) -> Result<(), NicError> {
        self.write(common::DEVICE_STATUS, 0);
        wait("a reset", STEP_MS, || matches!(self.read(common::DEVICE_STATUS), 0 | u8::MAX))?;
        self.status()?;
        self.write(common::DEVICE_STATUS, status::ACKNOWLEDGE | status::DRIVER);
        Ok(())
    }

    /// Negotiates features (§3.1.1), for payloads of up to `mtu` bytes.
    pub fn negotiate(&self, mtu: u16) -> Result<u64, NicError> {
        let half = |select| {
            self.write(common::DEVICE_FEATURE_SELECT, select);
            u64::from(self.read(common::DEVICE_FEATURE))
        };
        let offered = half(0) | half(1) << 32;
        let mut features = offered & feature::OURS;
        if features & feature::VERSION_1 == 0 || features & feature::MAC == 0 {
            return Err(NicError::Absurd { what: "it lacks VERSION_1 or MAC among its features", value: offered });
        }
        // The driver must not accept a feature without the one that it depends on (§5.1.3.1).
        if features & feature::CTRL_VQ == 0 {
            features &= !feature::CTRL_RX;
        }
        if self.way.common.len < common::LEN_WITH_RESET {
            features &= !feature::RING_RESET;
        }
        // A driver that accepts MTU must have buffers for what the device states (§5.1.4.2).
        if self.mtu(features)?.is_some_and(|most| most > mtu) {
            features &= !feature::MTU;
        }
        let steers = features & feature::STEER_NEEDS == feature::STEER_NEEDS
            && self.way.net.len >= net::LEN_WITH_PAIRS
            && self.pairs_max()? > 1;
        if !steers {
            features &= !feature::STEER;
        }
        for (select, shift) in [(0, 0), (1, 32)] {
            self.write(common::DRIVER_FEATURE_SELECT, select);
            self.write(common::DRIVER_FEATURE, u32::try_from(features >> shift & 0xffff_ffff).expect("32 bits"));
        }
        self.write(common::DEVICE_STATUS, status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK);
        match self.status()? & status::FEATURES_OK {
            0 => Err(NicError::Absurd { what: "it refuses a subset of the features it offers", value: features }),
            _ => Ok(features),
        }
    }

    /// Starts the device.
    pub fn run(&self) {
        self.write(common::DEVICE_STATUS, status::RUNNING);
    }

    /// Returns the maximum number of descriptors of queue `queue`, or 0 if there is no such queue.
    pub fn queue_size_max(&self, queue: u16) -> u16 {
        if self.way.number(queue) >= self.read(common::NUM_QUEUES) {
            return 0;
        }
        self.select(queue);
        self.read(common::QUEUE_SIZE)
    }

    /// Switches off the interrupt for configuration changes: callers poll.
    pub fn silence_configuration(&self) {
        self.write(common::CONFIG_MSIX_VECTOR, common::NO_VECTOR);
    }

    /// Tells the device the place of queue `queue` (§4.1.5.1.3), and enables it.
    pub fn enable_queue(&self, queue: u16, size: u16, at: [Iova; 3], vector: u16) -> Result<(), NicError> {
        self.common.registers.together(|| {
            self.select(queue);
            self.write(common::QUEUE_SIZE, size);
            let parts = [common::QUEUE_DESC, common::QUEUE_DRIVER, common::QUEUE_DEVICE];
            for ([low, high], at) in parts.into_iter().zip(at) {
                let halves = at.halves();
                self.write(low, halves.0);
                self.write(high, halves.1);
            }
            self.write(common::QUEUE_MSIX_VECTOR, vector);
            // A device without resources for the vector says so here.
            let have = self.read(common::QUEUE_MSIX_VECTOR);
            if have != vector {
                let what = "it does not take an interrupt vector, but has";
                return Err(NicError::Absurd { what, value: have.into() });
            }
            self.write(common::QUEUE_ENABLE, 1);
            Ok(())
        })
    }

    /// Returns the features that a predecessor negotiated with the device.
    pub fn agreed(&self) -> u64 {
        let half = |select| {
            self.write(common::DRIVER_FEATURE_SELECT, select);
            u64::from(self.read(common::DRIVER_FEATURE))
        };
        half(0) | half(1) << 32
    }

    /// Returns the length of queue `queue`, and the address of its descriptors if the device uses it.
    pub fn queue(&self, queue: u16) -> Result<(u16, Option<Iova>), NicError> {
        self.select(queue);
        let size = self.read(common::QUEUE_SIZE);
        let [low, high] = common::QUEUE_DESC;
        let at = Iova(u64::from(self.read(low)) | u64::from(self.read(high)) << 32);
        Ok((size, self.enabled()?.then_some(at)))
    }

    /// Returns whether the device uses queue `queue`.
    pub fn is_enabled(&self, queue: u16) -> Result<bool, NicError> {
        self.common.registers.together(|| {
            self.select(queue);
            self.enabled()
        })
    }

    /// Like [`is_enabled`](Self::is_enabled), for the selected queue.
    fn enabled(&self) -> Result<bool, NicError> {
        match self.read(common::QUEUE_ENABLE) {
            0 => Ok(false),
            1 => Ok(true),
            u16::MAX => Err(NicError::Gone),
            odd => Err(NicError::Absurd { what: "whether a queue is enabled", value: odd.into() }),
        }
    }

    /// Resets queue `queue` (§2.6.1). Afterwards the device touches neither its ring nor its buffers.
    pub fn reset_queue(&self, queue: u16) -> Result<(), NicError> {
        self.begin_reset(queue)?;
        self.end_reset(queue)?;
        self.status().map(drop)
    }

    /// First half of a reset: asks the device to let go of the queue.
    pub fn begin_reset(&self, queue: u16) -> Result<(), NicError> {
        self.common.registers.together(|| {
            self.select(queue);
            self.write(common::QUEUE_RESET, 1);
            wait(RESET, STEP_MS, || matches!(self.read(common::QUEUE_RESET), 0 | u16::MAX))
        })
    }

    /// Second half of a reset: waits until the queue is disabled.
    pub fn end_reset(&self, queue: u16) -> Result<(), NicError> {
        self.common.registers.together(|| {
            self.select(queue);
            wait(RESET, STEP_MS, || matches!(self.read(common::QUEUE_ENABLE), 0 | u16::MAX))
        })
    }

    /// Returns the doorbell of queue `queue`.
    pub fn doorbell(&self, queue: u16) -> Doorbell {
        let offset = self.way.bells[usize::from(queue) % self.way.bells.len()];
        Doorbell { register: self.notify.at(Register::at(offset)), queue: self.way.number(queue) }
    }

    /// Tells the device that the doorbell's queue has something new.
    #[inline]
    pub fn ring(&self, bell: Doorbell) {
        bell.register.write(&self.notify.registers, bell.queue);
    }

    /// Reads from the network device's configuration until it did not change meanwhile (§2.5.1).
    fn steady<T>(&self, read: impl Fn(&Window<R>) -> T) -> Result<T, NicError> {
        for _ in 0..CHANGES_MAX {
            let before = self.read(common::CONFIG_GENERATION);
            let value = read(&self.net);
            if self.read(common::CONFIG_GENERATION) == before {
                return Ok(value);
            }
        }
        Err(NicError::Stuck { step: "a change of its configuration", limit_ms: 0 })
    }

    /// Returns the device's address.
    pub fn mac(&self) -> Result<Mac, NicError> {
        let mac = self.steady(|net| net::MAC.map(|byte| net.at(byte).read(&net.registers)))?;
        if mac == [0xff; 6] { Err(NicError::Gone) } else { Ok(Mac(mac)) }
    }

    /// Returns the MTU that the device wants, if it states one.
    pub fn mtu(&self, features: u64) -> Result<Option<u16>, NicError> {
        if features & feature::MTU == 0 {
            return Ok(None);
        }
        self.steady(|net| net.at(net::MTU).read(&net.registers)).map(Some)
    }

    /// Returns the state of the link.
    ///
    /// # Errors
    /// The device is gone or asks for a reset.
    pub fn link(&self, features: u64) -> Result<Link, NicError> {
        // Without STATUS, the link is up as long as the device is there.
        let down = features & feature::STATUS != 0
            && match self.steady(|net| net.at(net::STATUS).read(&net.registers)) {
                Ok(u16::MAX) | Err(_) => true,
                Ok(status) => status & net::LINK_UP == 0,
            };
        // Last: a device that goes meanwhile reads as ones in everything before, too.
        self.status()?;
        if down {
            return Ok(Link::Down);
        }
        let unknown = Link::Up { speed: 0, full_duplex: true };
        if features & feature::SPEED_DUPLEX == 0 {
            return Ok(unknown);
        }
        let read =
            |net: &Window<R>| (net.at(net::SPEED).read(&net.registers), net.at(net::DUPLEX).read(&net.registers));
        Ok(match self.steady(read) {
            Err(_) | Ok((net::SPEED_UNKNOWN, _)) => unknown,
            Ok((speed, duplex)) => Link::Up { speed, full_duplex: duplex == net::DUPLEX_FULL },
        })
    }
}
