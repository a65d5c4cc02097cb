//! All that a successor must know of a parked 82574: plain data, with a version.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::ring::RING_MAX;

/// What the sash's first word says: it is one of this driver's.
pub const KIND: u32 = 0x8086_10d3;
/// Changes with every change of [`Sash`].
pub const VERSION: u32 = 1;

/// Receive queues that the card has.
pub const QUEUES_MAX: usize = 2;
/// Registers of the multicast table.
pub const MTA_WORDS: usize = 128;
/// What is counted: see [`super::counters`].
pub const COUNTERS: usize = 32;

/// A descriptor in which no slot stands.
pub const NO_SLOT: u64 = u64::MAX;

/// All that a successor must know. Made only by parking; whatever else it holds is refused by resuming.
#[repr(C)]
#[derive(Debug, Clone, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Sash {
    /// [`KIND`].
    pub kind: u32,
    /// [`VERSION`].
    pub version: u32,
    /// Where the card sees the rings: the receive rings, one after the other, then the transmit ring.
    pub rings_at: u64,
    /// Where the card sees the frames.
    pub arena_at: u64,
    /// Bytes in a slot.
    pub slot_len: u32,
    /// Slots.
    pub slots: u32,
    /// Descriptors in a ring.
    pub ring: u16,
    /// Receive queues.
    pub queues: u16,
    /// Longest payload of a frame.
    pub mtu: u16,
    /// 1 for every frame, 2 for every multicast.
    pub filter: u16,
    /// The card's own address, and two bytes of nothing.
    pub mac: [u8; 8],
    /// The receive rings' cursors.
    pub receive: [ReceiveSash; QUEUES_MAX],
    /// Transmit: the next descriptor that the card will be done with, in the running count.
    pub sent: u32,
    /// Transmit: the next descriptor to be filled.
    pub filled: u32,
    /// The multicast table.
    pub mta: [u32; MTA_WORDS],
    /// Accumulated, in the driver's order.
    pub counters: [u64; COUNTERS],
    /// The slot (`SlotId::to_word`) in each receive descriptor, or all ones where none stands.
    pub posted: [[u64; RING_MAX]; QUEUES_MAX],
    /// The slot in each transmit descriptor, or all ones where none stands.
    pub sending: [u64; RING_MAX],
}

/// The cursors of a receive ring. They count descriptors without end; their low bits are the place in the ring.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct ReceiveSash {
    /// The next descriptor to be received from.
    pub next: u32,
    /// The next descriptor to be given a slot.
    pub tail: u32,
    /// 1 in the middle of a frame that spans several descriptors, and is dropped.
    pub skipping: u32,
    /// Nothing.
    pub reserved: u32,
}
