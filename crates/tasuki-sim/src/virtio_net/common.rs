//! Registers: the common configuration (§4.1.4.3), notifications (§4.1.4.4), ISR (§4.1.4.5), and the network device's own (§5.1.4).

use super::queue::{Queue, SIZE_MAX};
use super::{Device, VECTORS, feature, pci, steer};
use crate::journal::Class;

/// Value of a vector register for no interrupt.
pub const NO_VECTOR: u16 = 0xffff;

/// Device status bits, §2.1.
pub mod status {
    pub const ACKNOWLEDGE: u8 = 1;
    pub const DRIVER: u8 = 2;
    pub const DRIVER_OK: u8 = 4;
    pub const FEATURES_OK: u8 = 8;
    pub const NEEDS_RESET: u8 = 64;
    pub const FAILED: u8 = 128;
}

/// Offsets of the common configuration.
const DEVICE_FEATURE_SELECT: u32 = 0x00;
const DEVICE_FEATURE: u32 = 0x04;
const DRIVER_FEATURE_SELECT: u32 = 0x08;
const DRIVER_FEATURE: u32 = 0x0c;
const CONFIG_VECTOR: u32 = 0x10;
const NUM_QUEUES: u32 = 0x12;
const STATUS: u32 = 0x14;
const GENERATION: u32 = 0x15;
const QUEUE_SELECT: u32 = 0x16;
const QUEUE_SIZE: u32 = 0x18;
const QUEUE_VECTOR: u32 = 0x1a;
const QUEUE_ENABLE: u32 = 0x1c;
const QUEUE_NOTIFY_OFF: u32 = 0x1e;
const QUEUE_DESC: u32 = 0x20;
const QUEUE_DRIVER: u32 = 0x28;
const QUEUE_DEVICE: u32 = 0x30;
const QUEUE_RESET: u32 = 0x3a;

/// Offset and width in bytes of each field; a field of eight bytes counts as two of four.
const FIELDS: [(u32, u8); 20] = [
    (DEVICE_FEATURE_SELECT, 4),
    (DEVICE_FEATURE, 4),
    (DRIVER_FEATURE_SELECT, 4),
    (DRIVER_FEATURE, 4),
    (CONFIG_VECTOR, 2),
    (NUM_QUEUES, 2),
    (STATUS, 1),
    (GENERATION, 1),
    (QUEUE_SELECT, 2),
    (QUEUE_SIZE, 2),
    (QUEUE_VECTOR, 2),
    (QUEUE_ENABLE, 2),
    (QUEUE_NOTIFY_OFF, 2),
    (QUEUE_DESC, 4),
    (QUEUE_DESC + 4, 4),
    (QUEUE_DRIVER, 4),
    (QUEUE_DRIVER + 4, 4),
    (QUEUE_DEVICE, 4),
    (QUEUE_DEVICE + 4, 4),
    (QUEUE_RESET, 2),
];

/// The same for the network device's own configuration, with features: the field exists if one of them is offered.
const OWN_FIELDS: [(u32, u8, u64); 14] = [
    (0, 1, feature::MAC),
    (1, 1, feature::MAC),
    (2, 1, feature::MAC),
    (3, 1, feature::MAC),
    (4, 1, feature::MAC),
    (5, 1, feature::MAC),
    (6, 2, feature::STATUS),
    (8, 2, feature::MQ | feature::RSS),
    (10, 2, feature::MTU),
    (12, 4, feature::SPEED_DUPLEX),
    (16, 1, feature::SPEED_DUPLEX),
    (17, 1, feature::RSS),
    (18, 2, feature::RSS),
    (20, 4, feature::RSS),
];

/// Bit of the network device's status: the link is up.
const LINK_UP: u16 = 1;
const FULL_DUPLEX: u8 = 1;

#[derive(Debug)]
pub struct Common {
    pub status: u8,
    device_select: u32,
    driver_select: u32,
    pub driver_features: u64,
    pub config_vector: u16,
    pub generation: u8,
    /// The device's own configuration changed since it was read.
    pub stale: bool,
    queue_select: u16,
}

impl Default for Common {
    fn default() -> Self {
        Common {
            status: 0,
            device_select: 0,
            driver_select: 0,
            driver_features: 0,
            config_vector: NO_VECTOR,
            generation: 0,
            stale: false,
            queue_select: 0,
        }
    }
}

/// Returns 32-bit half `select` of the features; 0 beyond the second.
fn half(features: u64, select: u32) -> u32 {
    if select < 2 { (features >> (32 * select)) as u32 } else { 0 }
}

/// Returns the vector as the device accepts it: NO_VECTOR for one that does not exist.
fn vector(value: u32) -> u16 {
    if value < VECTORS as u32 { value as u16 } else { NO_VECTOR }
}

impl Device {
    pub(super) fn read_structure(&mut self, offset: u32, width: u8) -> u32 {
        self.pass_time();
        if self.reset_until.is_some() {
            if offset == pci::COMMON + STATUS && width == 1 {
                return self.common.status.into();
            }
            self.journal.note(Class::DuringReset, self.now, offset.into(), 0);
            return 0;
        }
        match offset {
            offset if offset - pci::COMMON < pci::COMMON_LEN => self.read_common(offset - pci::COMMON, width),
            // A read clears the causes, and the interrupt with them.
            pci::ISR => std::mem::take(&mut self.isr).into(),
            pci::DEVICE.. if offset - pci::DEVICE < pci::DEVICE_LEN => self.read_own(offset - pci::DEVICE, width),
            _ => {
                self.journal.note(Class::UnknownRegister, self.now, offset.into(), 0);
                0
            }
        }
    }

    pub(super) fn write_structure(&mut self, offset: u32, width: u8, value: u32) {
        self.pass_time();
        if self.reset_until.is_some() {
            self.journal.note(Class::DuringReset, self.now, offset.into(), value.into());
            return;
        }
        match offset {
            offset if offset - pci::COMMON < pci::COMMON_LEN => self.write_common(offset - pci::COMMON, width, value),
            pci::NOTIFY.. if offset - pci::NOTIFY < pci::NOTIFY_LEN => self.rung(offset - pci::NOTIFY, width, value),
            pci::ISR => self.journal.note(Class::ReadOnly, self.now, offset.into(), value.into()),
            pci::DEVICE.. if offset - pci::DEVICE < pci::DEVICE_LEN => {
                self.journal.note(Class::ReadOnly, self.now, offset.into(), value.into());
            }
            _ => self.journal.note(Class::UnknownRegister, self.now, offset.into(), value.into()),
        }
    }

    fn read_common(&mut self, offset: u32, width: u8) -> u32 {
        let inside = |&&(at, len): &&(u32, u8)| at <= offset && offset - at < len.into();
        let Some(&(at, len)) = FIELDS.iter().find(inside) else {
            self.journal.note(Class::UnknownRegister, self.now, offset.into(), 0);
            return 0;
        };
        if (at, len) != (offset, width) {
            self.journal.note(Class::OddAccess, self.now, offset.into(), width.into());
        }
        self.field(at) >> (8 * (offset - at))
    }

    fn field(&mut self, at: u32) -> u32 {
        let common = &self.common;
        match at {
            DEVICE_FEATURE_SELECT => common.device_select,
            DEVICE_FEATURE => half(self.options.features, common.device_select),
            DRIVER_FEATURE_SELECT => common.driver_select,
            DRIVER_FEATURE => half(common.driver_features, common.driver_select),
            CONFIG_VECTOR => common.config_vector.into(),
            NUM_QUEUES => u32::from(2 * self.options.pairs) + u32::from(self.options.features & feature::CTRL_VQ != 0),
            STATUS => common.status.into(),
            GENERATION => common.generation.into(),
            QUEUE_SELECT => common.queue_select.into(),
            _ => self.queue_field(at),
        }
    }

    fn queue_field(&mut self, at: u32) -> u32 {
        let select = self.common.queue_select;
        // A queue that does not exist has size 0 (§4.1.4.3.1), and all other fields read 0, too.
        let Some(place) = self.queue_of(select) else { return 0 };
        let queue = &self.queues[place];
        match at {
            QUEUE_SIZE => queue.size.into(),
            QUEUE_VECTOR => queue.vector.into(),
            QUEUE_ENABLE => queue.is_on().into(),
            QUEUE_NOTIFY_OFF => select.into(),
            QUEUE_RESET => queue.reset_until.is_some().into(),
            QUEUE_DESC => queue.descriptors as u32,
            QUEUE_DRIVER => queue.available as u32,
            QUEUE_DEVICE => queue.used as u32,
            _ => {
                let address = [queue.descriptors, queue.available, queue.used][(at - QUEUE_DESC) as usize / 8];
                (address >> 32) as u32
            }
        }
    }

    fn write_common(&mut self, offset: u32, width: u8, value: u32) {
        let note = |device: &mut Device, class| device.journal.note(class, device.now, offset.into(), value.into());
        match FIELDS.iter().find(|&&(at, len)| at <= offset && offset - at < len.into()) {
            None => return note(self, Class::UnknownRegister),
            Some(&field) if field != (offset, width) => return note(self, Class::OddAccess),
            Some(_) => {}
        }
        match offset {
            DEVICE_FEATURE_SELECT => self.common.device_select = value,
            DRIVER_FEATURE_SELECT => self.common.driver_select = value,
            DRIVER_FEATURE => self.write_features(value),
            CONFIG_VECTOR => self.common.config_vector = vector(value),
            STATUS => self.write_status(value as u8),
            QUEUE_SELECT => self.common.queue_select = value as u16,
            DEVICE_FEATURE | NUM_QUEUES | GENERATION | QUEUE_NOTIFY_OFF => note(self, Class::ReadOnly),
            _ => self.write_queue(offset, value),
        }
    }

    fn write_features(&mut self, value: u32) {
        let select = self.common.driver_select;
        let on = self.common.status;
        if on & status::FEATURES_OK != 0 || on & status::DRIVER == 0 {
            return self.out_of_order(DRIVER_FEATURE, value);
        }
        if select >= 2 {
            if value != 0 {
                self.journal.note(Class::Feature, self.now, select.into(), value.into());
            }
            return;
        }
        let shift = 32 * select;
        let kept = self.common.driver_features & !(0xffff_ffff << shift);
        self.common.driver_features = kept | u64::from(value) << shift;
    }

    fn out_of_order(&mut self, offset: u32, value: u32) {
        self.journal.note(Class::StatusOrder, self.now, offset.into(), value.into());
    }

    fn write_status(&mut self, value: u8) {
        let before = self.common.status;
        if value == 0 {
            // Until the reset ends, the status keeps its value. If it is 0 already, the end could not be seen, so
            // the reset takes no time.
            let lasts = if before == 0 { 0 } else { self.options.reset_ns };
            if before != 0 {
                self.journal.note(Class::Reset, self.now, STATUS.into(), before.into());
            }
            self.reset_until = Some(self.now + lasts);
            return self.pass_time();
        }
        // The bits that a driver sets one after the other (§3.1.1), each with the bits required before it. The
        // driver must see whether the device accepts the features before it sets up anything.
        let steps = [
            (status::ACKNOWLEDGE, 0),
            (status::DRIVER, status::ACKNOWLEDGE),
            (status::FEATURES_OK, status::ACKNOWLEDGE | status::DRIVER),
            (status::DRIVER_OK, status::FEATURES_OK),
            (status::FAILED, 0),
        ];
        let known = steps.iter().fold(0, |known, (bit, _)| known | bit);
        let mut refused = before & !value & known != 0 || value & !(known | before) != 0;
        for (bit, needs) in steps {
            let news = value & !before & bit;
            let ready = if bit == status::DRIVER_OK { before } else { self.common.status };
            if news != 0 && ready & needs != needs {
                refused = true;
            } else if news != status::FEATURES_OK || self.agrees() {
                self.common.status |= news;
            }
        }
        if refused {
            self.out_of_order(STATUS, value.into());
        }
        if self.common.status & !before & status::DRIVER_OK != 0 && !self.pci.master() {
            self.journal.note(Class::NoBusMaster, self.now, STATUS.into(), value.into());
        }
    }

    /// Returns whether the device accepts the driver's features (§2.2).
    fn agrees(&mut self) -> bool {
        let features = self.common.driver_features;
        let rests = feature::RESTS_ON.iter().any(|(what, on)| features & what != 0 && features & on == 0);
        let foreign = features & !self.options.features;
        if foreign != 0 || rests || features & feature::VERSION_1 == 0 {
            self.journal.note(Class::Feature, self.now, DRIVER_FEATURE.into(), features);
            return false;
        }
        true
    }

    fn write_queue(&mut self, offset: u32, value: u32) {
        let Some(place) = self.queue_of(self.common.queue_select) else {
            return self.journal.note(Class::NoQueue, self.now, offset.into(), self.common.queue_select.into());
        };
        match offset {
            QUEUE_ENABLE => return self.enable_queue(place, value),
            QUEUE_RESET => return self.reset_queue(place, value),
            QUEUE_VECTOR => return self.queues[place].vector = vector(value),
            _ => {}
        }
        let queue = &mut self.queues[place];
        let class = if queue.is_on() || queue.reset_until.is_some() {
            Class::SetupWhileEnabled
        } else if offset != QUEUE_SIZE {
            let address = match offset {
                QUEUE_DESC.. if offset < QUEUE_DRIVER => &mut queue.descriptors,
                QUEUE_DRIVER.. if offset < QUEUE_DEVICE => &mut queue.available,
                _ => &mut queue.used,
            };
            let shift = 8 * (offset & 4);
            return *address = *address & !(0xffff_ffff << shift) | u64::from(value) << shift;
        } else if value > queue.size_max.into() || !value.is_power_of_two() {
            Class::RingLength
        } else {
            return queue.size = value as u16;
        };
        self.journal.note(class, self.now, offset.into(), value.into());
    }

    fn enable_queue(&mut self, place: usize, value: u32) {
        let state = self.common.status;
        let queue = &self.queues[place];
        let Queue { descriptors, available, used, .. } = *queue;
        let class = if value != 1 || queue.is_on() || queue.reset_until.is_some() {
            Class::SetupWhileEnabled
        } else if state & status::FEATURES_OK == 0 {
            Class::StatusOrder
        } else if descriptors % 16 != 0 || available % 2 != 0 || used % 4 != 0 || queue.size > SIZE_MAX {
            Class::RingAlignment
        } else {
            // A driver sets up all queues before DRIVER_OK (§3.1.1), except those reset since.
            if state & status::DRIVER_OK != 0 && !queue.was_reset {
                self.out_of_order(QUEUE_ENABLE, value);
            }
            return self.queues[place].enable();
        };
        self.journal.note(class, self.now, QUEUE_ENABLE.into(), value.into());
    }

    fn reset_queue(&mut self, place: usize, value: u32) {
        let class = if !self.has(feature::RING_RESET) || self.common.status & status::FEATURES_OK == 0 {
            Class::Feature
        } else if value != 1 || self.queues[place].reset_until.is_some() {
            Class::SetupWhileEnabled
        } else {
            self.queues[place].reset_until = Some(self.now + self.options.reset_ns);
            return self.pass_time();
        };
        self.journal.note(class, self.now, QUEUE_RESET.into(), value.into());
    }

    /// Counts a notification. The card polls its queues anyway.
    fn rung(&mut self, offset: u32, width: u8, value: u32) {
        let place = u64::from(pci::NOTIFY + offset);
        if width != 2 || !offset.is_multiple_of(pci::NOTIFY_STEP) {
            return self.journal.note(Class::OddAccess, self.now, place, width.into());
        }
        let index = (offset / pci::NOTIFY_STEP) as u16;
        let queue = self.queue_of(index).map(|place| &self.queues[place]);
        let is_ready = queue.is_some_and(|queue| queue.is_on() && queue.reset_until.is_none());
        if value != u32::from(index) || !is_ready || self.common.status & status::DRIVER_OK == 0 {
            return self.journal.note(Class::EarlyRing, self.now, place, value.into());
        }
        self.counts.rings += 1;
    }

    /// Reads the network device's own configuration.
    fn read_own(&mut self, offset: u32, width: u8) -> u32 {
        let inside = |&&(at, len, _): &&(u32, u8, u64)| at <= offset && offset - at < len.into();
        let field = OWN_FIELDS.iter().find(inside).filter(|(.., feature)| self.options.features & feature != 0);
        let Some(&(at, len, _)) = field else {
            self.journal.note(Class::UnknownRegister, self.now, (pci::DEVICE + offset).into(), 0);
            return 0;
        };
        if (at, len) != (offset, width) {
            self.journal.note(Class::OddAccess, self.now, (pci::DEVICE + offset).into(), width.into());
        }
        if std::mem::take(&mut self.common.stale) {
            self.common.generation = self.common.generation.wrapping_add(1);
        }
        let bytes = self.own();
        let rest = &bytes[offset as usize..];
        rest.iter().take(width.into()).rev().fold(0, |value, byte| value << 8 | u32::from(*byte))
    }

    fn own(&self) -> [u8; pci::DEVICE_LEN as usize] {
        let mut bytes = [0; pci::DEVICE_LEN as usize];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, &self.options.mac);
        put(6, &if self.partner { LINK_UP } else { 0 }.to_le_bytes());
        put(8, &self.options.pairs.to_le_bytes());
        put(10, &self.options.mtu.to_le_bytes());
        put(12, &self.options.speed.to_le_bytes());
        put(16, &[FULL_DUPLEX, steer::KEY_LEN as u8]);
        put(18, &(steer::TABLE_LEN as u16).to_le_bytes());
        put(20, &steer::TYPES.to_le_bytes());
        bytes
    }
}
