//! Registers of virtio over PCI and of its network device: *Virtual I/O Device (VIRTIO) Version 1.2*; § marks the
//! section that defines each.

use crate::nic::register::{Register, Ro, Rw, Wo};

/// The common configuration, §4.1.4.3.
pub mod common {
    use super::{Register, Ro, Rw, Wo};

    pub const DEVICE_FEATURE_SELECT: Register<u32, Wo> = Register::at(0x00);
    pub const DEVICE_FEATURE: Register<u32, Ro> = Register::at(0x04);
    pub const DRIVER_FEATURE_SELECT: Register<u32, Wo> = Register::at(0x08);
    pub const DRIVER_FEATURE: Register<u32, Rw> = Register::at(0x0c);
    pub const CONFIG_MSIX_VECTOR: Register<u16, Rw> = Register::at(0x10);
    pub const NUM_QUEUES: Register<u16, Ro> = Register::at(0x12);
    pub const DEVICE_STATUS: Register<u8, Rw> = Register::at(0x14);
    pub const CONFIG_GENERATION: Register<u8, Ro> = Register::at(0x15);
    pub const QUEUE_SELECT: Register<u16, Wo> = Register::at(0x16);
    pub const QUEUE_SIZE: Register<u16, Rw> = Register::at(0x18);
    pub const QUEUE_MSIX_VECTOR: Register<u16, Rw> = Register::at(0x1a);
    pub const QUEUE_ENABLE: Register<u16, Rw> = Register::at(0x1c);
    pub const QUEUE_NOTIFY_OFF: Register<u16, Ro> = Register::at(0x1e);
    pub const QUEUE_DESC: [Register<u32, Rw>; 2] = [Register::at(0x20), Register::at(0x24)];
    pub const QUEUE_DRIVER: [Register<u32, Rw>; 2] = [Register::at(0x28), Register::at(0x2c)];
    pub const QUEUE_DEVICE: [Register<u32, Rw>; 2] = [Register::at(0x30), Register::at(0x34)];
    pub const QUEUE_RESET: Register<u16, Rw> = Register::at(0x3a);

    /// Length in bytes without the registers that features add.
    pub const LEN: u32 = 0x38;
    /// Length in bytes with QUEUE_RESET.
    pub const LEN_WITH_RESET: u32 = 0x3c;
    /// No interrupt, in either of the vector registers (§4.1.5.1.2).
    pub const NO_VECTOR: u16 = 0xffff;
}

/// The network device's own configuration, §5.1.4.
pub mod net {
    use super::{Register, Ro};

    pub const MAC: [Register<u8, Ro>; 6] =
        [Register::at(0), Register::at(1), Register::at(2), Register::at(3), Register::at(4), Register::at(5)];
    pub const STATUS: Register<u16, Ro> = Register::at(6);
    /// On a device with MQ or RSS: number of pairs of queues.
    pub const PAIRS_MAX: Register<u16, Ro> = Register::at(8);
    pub const MTU: Register<u16, Ro> = Register::at(10);
    pub const SPEED: Register<u32, Ro> = Register::at(12);
    pub const DUPLEX: Register<u8, Ro> = Register::at(16);

    /// Length in bytes up to and including STATUS.
    pub const LEN: u32 = 8;
    /// Length in bytes up to and including PAIRS_MAX.
    pub const LEN_WITH_PAIRS: u32 = 10;
    /// In STATUS: the link is up.
    pub const LINK_UP: u16 = 1;
    /// Value of SPEED: the device does not know its speed.
    pub const SPEED_UNKNOWN: u32 = 0xffff_ffff;
    /// Value of DUPLEX: the link is full duplex.
    pub const DUPLEX_FULL: u8 = 1;
}

/// Vendor capabilities that give the places of the device's structures, §4.1.4.
pub mod capability {
    /// `cfg_type`, in the highest byte of the first word.
    pub const COMMON: u8 = 1;
    pub const NOTIFY: u8 = 2;
    pub const DEVICE: u8 = 4;
}

/// Device status bits, §2.1.
pub mod status {
    pub const ACKNOWLEDGE: u8 = 1;
    pub const DRIVER: u8 = 2;
    pub const DRIVER_OK: u8 = 4;
    pub const FEATURES_OK: u8 = 8;
    pub const NEEDS_RESET: u8 = 64;
    /// Status of a running device.
    pub const RUNNING: u8 = ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK;
}

/// Feature bits, §5.1.3 and §6.
pub mod feature {
    /// The device states the MTU that it wants.
    pub const MTU: u64 = 1 << 3;
    /// The device has an address.
    pub const MAC: u64 = 1 << 5;
    /// The configuration holds the state of the link.
    pub const STATUS: u64 = 1 << 16;
    /// There is a command queue.
    pub const CTRL_VQ: u64 = 1 << 17;
    /// Commands for the receive filter.
    pub const CTRL_RX: u64 = 1 << 18;
    /// There are several pairs of queues.
    pub const MQ: u64 = 1 << 22;
    /// Each side states the index at which it wants to be notified.
    pub const EVENT_IDX: u64 = 1 << 29;
    /// The interface of virtio 1.
    pub const VERSION_1: u64 = 1 << 32;
    /// The device's accesses go through an IOMMU.
    pub const ACCESS_PLATFORM: u64 = 1 << 33;
    /// Memory must be ordered as for real hardware, which we always do.
    pub const ORDER_PLATFORM: u64 = 1 << 36;
    /// Queues can be reset one by one.
    pub const RING_RESET: u64 = 1 << 40;
    /// The driver decides which queue a frame comes to.
    pub const RSS: u64 = 1 << 60;
    /// The configuration holds speed and duplex.
    pub const SPEED_DUPLEX: u64 = 1 << 63;

    /// Both features that steering to another pair of queues takes.
    pub const STEER: u64 = MQ | RSS;
    /// Steering, and the features without which it is of no use.
    pub const STEER_NEEDS: u64 = STEER | CTRL_VQ | CTRL_RX | RING_RESET;

    /// All features that this driver understands.
    pub const OURS: u64 = MTU
        | MAC
        | STATUS
        | CTRL_VQ
        | CTRL_RX
        | EVENT_IDX
        | VERSION_1
        | ACCESS_PLATFORM
        | ORDER_PLATFORM
        | RING_RESET
        | STEER
        | SPEED_DUPLEX;
}

/// Queues of a driver, which has one pair of them: see [`Way::number`](super::transport::Way::number) for §5.1.2's
/// numbers.
pub mod queue {
    pub const RECEIVE: u16 = 0;
    pub const TRANSMIT: u16 = 1;
    pub const CONTROL: u16 = 2;
    /// The receive queue of the other pair, to which no frames come.
    pub const OTHER: u16 = 3;
}

/// Commands of the control queue, §5.1.6.5.
pub mod control {
    pub const RX: u8 = 0;
    pub const RX_PROMISC: u8 = 0;
    pub const RX_ALLMULTI: u8 = 1;
    pub const MAC: u8 = 1;
    pub const MAC_TABLE_SET: u8 = 0;
    pub const MQ: u8 = 4;
    pub const MQ_RSS_CONFIG: u8 = 1;
    pub const OK: u8 = 0;
}

/// Length in bytes of the header before each frame, §5.1.6.
pub const HEADER_LEN: u32 = 12;
