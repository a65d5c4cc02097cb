//! Messages of vhost-user.
//!
//! Names follow the specification, which says what each is.
//!
//! Source: QEMU, `docs/interop/vhost-user.rst` (7.2). All numbers are in the byte order of the machine.

#![allow(missing_docs, reason = "the specification has it")]

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Length of a message's head in bytes.
pub const HEAD_LEN: usize = size_of::<Head>();

/// Length in bytes of the longest body that a front end may send: the memory table is the longest that we know.
pub const BODY_MAX: usize = 512;

/// Maximum number of descriptors beside a message: one for each region of memory.
pub const FDS_MAX: usize = 8;

/// Head of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Head {
    pub request: u32,
    /// Bits of [`flags`].
    pub flags: u32,
    /// Length of the body in bytes.
    pub len: u32,
}

/// Flags of a message.
pub mod flags {
    /// Bits of the version, and the version.
    pub const VERSION_MASK: u32 = 3;
    pub const VERSION: u32 = 1;
    /// The message is an answer.
    pub const REPLY: u32 = 1 << 2;
    /// The front end waits for an answer, also to a request that has none of its own.
    pub const NEED_REPLY: u32 = 1 << 3;
}

/// Numbers of the front end's requests.
pub mod request {
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const RESET_OWNER: u32 = 4;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_LOG_BASE: u32 = 6;
    pub const SET_LOG_FD: u32 = 7;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const SET_VRING_ERR: u32 = 14;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const GET_QUEUE_NUM: u32 = 17;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const SEND_RARP: u32 = 19;
    pub const NET_SET_MTU: u32 = 20;
    pub const GET_MAX_MEM_SLOTS: u32 = 36;
    pub const ADD_MEM_REG: u32 = 37;
    pub const REM_MEM_REG: u32 = 38;
    pub const SET_STATUS: u32 = 39;
    pub const GET_STATUS: u32 = 40;
}

/// Bits of the protocol's features.
pub mod protocol {
    pub const MQ: u64 = 1 << 0;
    pub const LOG_SHMFD: u64 = 1 << 1;
    pub const RARP: u64 = 1 << 2;
    pub const REPLY_ACK: u64 = 1 << 3;
    pub const NET_MTU: u64 = 1 << 4;
    pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
    pub const STATUS: u64 = 1 << 16;
}

/// Bits of the device's features (VIRTIO 1.2, 5.1.3 and 6).
pub mod feature {
    pub const CSUM: u64 = 1 << 0;
    pub const GUEST_CSUM: u64 = 1 << 1;
    pub const MTU: u64 = 1 << 3;
    pub const GUEST_TSO4: u64 = 1 << 7;
    pub const GUEST_TSO6: u64 = 1 << 8;
    pub const GUEST_ECN: u64 = 1 << 9;
    pub const HOST_TSO4: u64 = 1 << 11;
    pub const HOST_TSO6: u64 = 1 << 12;
    pub const HOST_ECN: u64 = 1 << 13;
    pub const MRG_RXBUF: u64 = 1 << 15;
    /// The card has a control queue, which its front end serves. Without it a driver may take neither of the next two.
    pub const CTRL_VQ: u64 = 1 << 17;
    pub const GUEST_ANNOUNCE: u64 = 1 << 21;
    /// Several pairs of queues.
    pub const MQ: u64 = 1 << 22;
    /// All memory that the device writes is noted in a log: a feature of vhost, which no driver sees.
    pub const LOG_ALL: u64 = 1 << 26;
    pub const INDIRECT_DESC: u64 = 1 << 28;
    pub const EVENT_IDX: u64 = 1 << 29;
    /// The front end knows the protocol's features.
    pub const PROTOCOL_FEATURES: u64 = 1 << 30;
    pub const VERSION_1: u64 = 1 << 32;
    pub const RING_PACKED: u64 = 1 << 34;
    pub const IN_ORDER: u64 = 1 << 35;
    pub const GUEST_USO4: u64 = 1 << 54;
    pub const GUEST_USO6: u64 = 1 << 55;
    pub const HOST_USO: u64 = 1 << 56;
}

/// Body of the messages about the state of a ring.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RingState {
    pub index: u32,
    pub number: u32,
}

/// Body of [`request::SET_VRING_ADDR`]. Addresses are the front end's. Of a packed ring, `used` is the device area's and
/// `available` the driver area's.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RingAddress {
    pub index: u32,
    pub flags: u32,
    pub descriptors: u64,
    pub used: u64,
    pub available: u64,
    pub log: u64,
}

/// Flag of [`RingAddress`]: writes to the used ring are noted in the log, at the guest's address `log`. Of a packed ring
/// that is the device area's.
pub const LOG_USED: u32 = 1;

/// Body of [`request::SET_LOG_BASE`]: where the log lies in the file beside it.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct LogBase {
    pub len: u64,
    pub offset: u64,
}

/// A region of memory.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Region {
    pub guest: u64,
    pub len: u64,
    pub user: u64,
    pub offset: u64,
}

/// Bit of a ring's number in the messages that bring an eventfd: none comes.
pub const NO_FD: u64 = 1 << 8;
