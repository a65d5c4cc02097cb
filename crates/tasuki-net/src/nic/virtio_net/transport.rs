//! Virtio's way over PCI (virtio 1.2, §4.1): where the structures are, the handshake, and the setting up of queues.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::control::PAIRS;
use super::regs::{capability, common, feature, net, queue as queues, status};
use crate::nic::bus::{Bus, BusError, Capability, Header, Iova, Registers};
use crate::nic::driver_state::broken;
use crate::nic::register::{Readable, Register, Width, Wo, Writable, wait};
use crate::nic::{Link, Mac, NicError};

/// How long the device may take for one step of the handshake.
const STEP_MS: u32 = 1000;
/// How often the configuration may change while it is read.
const CHANGES_MAX: usize = 100;

/// Pairs of queues of a device, at most (§5.1.4).
const PAIRS_MAX: u16 = 0x8000 / 2;

/// BARs of a device.
const BARS: u32 = 6;

/// What a queue's reset is called where it is not finished in time.
const RESET: &str = "the reset of a queue";

/// Where a structure of registers is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Place {
    /// In which BAR.
    pub bar: u32,
    /// Its first byte there.
    pub base: u32,
    /// Bytes of it.
    pub len: u32,
}

impl Place {
    /// §4.1.4.1 asks for more of some; registers of 32 bits need this.
    fn is_sound(&self) -> bool {
        self.bar < BARS && self.base.is_multiple_of(4) && self.base.checked_add(self.len).is_some()
    }

    /// The first capability of `kind`, with the word that follows it.
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

    /// The registers behind its BAR.
    fn open<B: Bus>(&self, bus: &mut B) -> Result<Window<B::Registers>, BusError> {
        let bar = u8::try_from(self.bar).map_err(|_| BusError::NoBar { index: u8::MAX })?;
        Ok(Window { registers: bus.registers(bar)?, base: self.base })
    }

    /// Whether a notification can be written there.
    fn has_bell(&self, offset: u32) -> bool {
        offset.is_multiple_of(2) && offset < self.len
    }
}

/// The way to the registers of a device that was found once: a successor has no time to look for them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Way {
    /// The common configuration.
    pub common: Place,
    /// Where notifications go.
    pub notify: Place,
    /// The network device's own configuration.
    pub net: Place,
    /// Where those of each queue go, in bytes from there.
    pub bells: [u32; 4],
    /// Pairs of queues that the device has, and which of them is ours.
    pub pairs: u16,
    /// From 0 on.
    pub pair: u16,
}

impl Way {
    /// The device's number of one of our queues (§5.1.2): the pairs one after the other, and the queue for commands behind them.
    pub fn number(&self, queue: u16) -> u16 {
        match queue {
            queues::RECEIVE => 2 * self.pair,
            queues::TRANSMIT => 2 * self.pair + 1,
            queues::OTHER => 2 * other(self.pair),
            _ => 2 * self.pairs,
        }
    }

    /// Whether it can be that of a device with these features.
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

/// The other pair of queues than this.
pub fn other(pair: u16) -> u16 {
    (pair + 1) % PAIRS
}

/// A structure of registers in some BAR.
struct Window<R> {
    registers: R,
    base: u32,
}

impl<R: Registers> Window<R> {
    /// Register `register` of this structure.
    fn at<W, A>(&self, register: Register<W, A>) -> Register<W, A> {
        register.after(self.base)
    }
}

/// Where a queue's notifications go.
#[derive(Debug, Clone, Copy)]
pub struct Doorbell {
    register: Register<u16, Wo>,
    queue: u16,
}

/// The way to a virtio network device.
pub struct Transport<R> {
    common: Window<R>,
    notify: Window<R>,
    net: Window<R>,
    way: Way,
    notify_multiplier: u32,
}

impl<R: Registers> Transport<R> {
    /// Finds the structures of the device. Where notifications go is [looked for](Self::find_bells) later.
    pub fn find<B: Bus<Registers = R>>(bus: &mut B, header: &Header) -> Result<Self, NicError> {
        let (common, _) = Place::find(bus, header, capability::COMMON)?;
        let (notify, multiplier) = Place::find(bus, header, capability::NOTIFY)?;
        let (net, _) = Place::find(bus, header, capability::DEVICE)?;
        common.at_least(common::LEN)?;
        net.at_least(net::LEN)?;
        let way = Way { common, notify, net, bells: [0; 4], pairs: 1, pair: 0 };
        Ok(Transport { notify_multiplier: multiplier, ..Self::open(bus, way)? })
    }

    /// The structures of a device that was found before.
    pub fn open<B: Bus<Registers = R>>(bus: &mut B, way: Way) -> Result<Self, BusError> {
        let (common, notify, net) = (way.common.open(bus)?, way.notify.open(bus)?, way.net.open(bus)?);
        Ok(Transport { common, notify, net, way, notify_multiplier: 0 })
    }

    /// Where everything is.
    pub fn way(&self) -> Way {
        self.way
    }

    /// Asks how many pairs of queues there are: one, for who cannot steer.
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

    /// This pair of queues is ours.
    pub fn choose(&mut self, pair: u16) {
        self.way.pair = pair;
    }

    /// Asks where the notifications of each of our queues go (§4.1.4.4), and of the other pair's. A device that takes no commands has none for those.
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

    /// What is read and written next of a queue is this one's.
    fn select(&self, queue: u16) {
        self.write(common::QUEUE_SELECT, self.way.number(queue));
    }

    fn read<W: Width, A: Readable>(&self, register: Register<W, A>) -> W {
        self.common.at(register).read(&self.common.registers)
    }

    fn write<W: Width, A: Writable>(&self, register: Register<W, A>, value: W) {
        self.common.at(register).write(&self.common.registers, value);
    }

    /// Whether something was written that may not have reached the device yet.
    pub fn is_behind(&self) -> bool {
        self.common.registers.is_behind() || self.notify.registers.is_behind()
    }

    /// Waits until what was written, by whomever, has reached the device.
    pub fn settle(&self) -> Result<(), NicError> {
        self.status()?;
        self.common.registers.settled();
        self.notify.registers.settled();
        Ok(())
    }

    /// What the device says of itself; an error if it is gone or asks for a reset.
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

    /// Agrees on features (§3.1.1), with buffers for payloads of so many bytes.
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
        // A feature without the one that it rests on must not be accepted (§5.1.3.1).
        if features & feature::CTRL_VQ == 0 {
            features &= !feature::CTRL_RX;
        }
        if self.way.common.len < common::LEN_WITH_RESET {
            features &= !feature::RING_RESET;
        }
        // Who accepts it has buffers for all that the device says (§5.1.4.2).
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

    /// The device may begin.
    pub fn run(&self) {
        self.write(common::DEVICE_STATUS, status::RUNNING);
    }

    /// Most descriptors that queue `queue` can have; 0 if there is no such queue.
    pub fn queue_size_max(&self, queue: u16) -> u16 {
        if self.way.number(queue) >= self.read(common::NUM_QUEUES) {
            return 0;
        }
        self.select(queue);
        self.read(common::QUEUE_SIZE)
    }

    /// No interrupt when the configuration changes: whoever wants to know asks.
    pub fn silence_configuration(&self) {
        self.write(common::CONFIG_MSIX_VECTOR, common::NO_VECTOR);
    }

    /// Tells the device where queue `queue` is (§4.1.5.1.3), and that it may use it.
    pub fn enable_queue(&self, queue: u16, size: u16, at: [Iova; 3], vector: u16) -> Result<(), NicError> {
        self.common.registers.together(|| {
            self.select(queue);
            self.write(common::QUEUE_SIZE, size);
            let parts = [common::QUEUE_DESC, common::QUEUE_DRIVER, common::QUEUE_DEVICE];
            for ([low, high], at) in parts.into_iter().zip(at) {
                self.write(low, u32::try_from(at.0 & 0xffff_ffff).expect("32 bits"));
                self.write(high, u32::try_from(at.0 >> 32).expect("32 bits"));
            }
            self.write(common::QUEUE_MSIX_VECTOR, vector);
            // A device that has no room for it says so here.
            let have = self.read(common::QUEUE_MSIX_VECTOR);
            if have != vector {
                let what = "it does not take an interrupt vector, but has";
                return Err(NicError::Absurd { what, value: have.into() });
            }
            self.write(common::QUEUE_ENABLE, 1);
            Ok(())
        })
    }

    /// What a predecessor has agreed on with the device.
    pub fn agreed(&self) -> u64 {
        let half = |select| {
            self.write(common::DRIVER_FEATURE_SELECT, select);
            u64::from(self.read(common::DRIVER_FEATURE))
        };
        half(0) | half(1) << 32
    }

    /// The length of queue `queue`, and where its descriptors are, if the device uses it.
    pub fn queue(&self, queue: u16) -> Result<(u16, Option<Iova>), NicError> {
        self.select(queue);
        let size = self.read(common::QUEUE_SIZE);
        let [low, high] = common::QUEUE_DESC;
        let at = Iova(u64::from(self.read(low)) | u64::from(self.read(high)) << 32);
        Ok((size, self.enabled()?.then_some(at)))
    }

    /// Whether the device uses queue `queue`.
    pub fn is_enabled(&self, queue: u16) -> Result<bool, NicError> {
        self.common.registers.together(|| {
            self.select(queue);
            self.enabled()
        })
    }

    /// The same, of the queue that was selected.
    fn enabled(&self) -> Result<bool, NicError> {
        match self.read(common::QUEUE_ENABLE) {
            0 => Ok(false),
            1 => Ok(true),
            u16::MAX => Err(NicError::Gone),
            odd => Err(NicError::Absurd { what: "whether a queue is enabled", value: odd.into() }),
        }
    }

    /// Resets queue `queue` (§2.6.1): afterwards the device touches neither its ring nor its buffers.
    pub fn reset_queue(&self, queue: u16) -> Result<(), NicError> {
        self.begin_reset(queue)?;
        self.end_reset(queue)?;
        self.status().map(drop)
    }

    /// The first half of it: the device lets go of the queue.
    pub fn begin_reset(&self, queue: u16) -> Result<(), NicError> {
        self.common.registers.together(|| {
            self.select(queue);
            self.write(common::QUEUE_RESET, 1);
            wait(RESET, STEP_MS, || matches!(self.read(common::QUEUE_RESET), 0 | u16::MAX))
        })
    }

    /// The second half: it has.
    pub fn end_reset(&self, queue: u16) -> Result<(), NicError> {
        self.common.registers.together(|| {
            self.select(queue);
            wait(RESET, STEP_MS, || matches!(self.read(common::QUEUE_ENABLE), 0 | u16::MAX))
        })
    }

    /// Where one says that queue `queue` has something new.
    pub fn doorbell(&self, queue: u16) -> Doorbell {
        let offset = self.way.bells[usize::from(queue) % self.way.bells.len()];
        Doorbell { register: self.notify.at(Register::at(offset)), queue: self.way.number(queue) }
    }

    /// Says so.
    #[inline]
    pub fn ring(&self, bell: Doorbell) {
        bell.register.write(&self.notify.registers, bell.queue);
    }

    /// Reads from the network device's configuration what did not change meanwhile (§2.5.1).
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

    /// The device's address.
    pub fn mac(&self) -> Result<Mac, NicError> {
        let mac = self.steady(|net| net::MAC.map(|byte| net.at(byte).read(&net.registers)))?;
        if mac == [0xff; 6] { Err(NicError::Gone) } else { Ok(Mac(mac)) }
    }

    /// The MTU that the device wants, if it says.
    pub fn mtu(&self, features: u64) -> Result<Option<u16>, NicError> {
        if features & feature::MTU == 0 {
            return Ok(None);
        }
        self.steady(|net| net.at(net::MTU).read(&net.registers)).map(Some)
    }

    /// The state of the link.
    pub fn link(&self, features: u64) -> Link {
        let down = match features & feature::STATUS {
            // It is always up, as long as it is there.
            0 => self.status().is_err(),
            _ => match self.steady(|net| net.at(net::STATUS).read(&net.registers)) {
                Ok(u16::MAX) | Err(_) => true,
                Ok(status) => status & net::LINK_UP == 0,
            },
        };
        if down {
            return Link::Down;
        }
        let unknown = Link::Up { speed: 0, full_duplex: true };
        if features & feature::SPEED_DUPLEX == 0 {
            return unknown;
        }
        let read =
            |net: &Window<R>| (net.at(net::SPEED).read(&net.registers), net.at(net::DUPLEX).read(&net.registers));
        match self.steady(read) {
            Err(_) | Ok((net::SPEED_UNKNOWN, _)) => unknown,
            Ok((speed, duplex)) => Link::Up { speed, full_duplex: duplex == net::DUPLEX_FULL },
        }
    }
}
