//! Messages of the control channel, and the layout of a ring.
//!
//! Source: memif protocol 2.0, from VPP's `src/plugins/memif/memif.h` and DPDK's `drivers/net/memif/memif.h`; numbers
//! are in the byte order of the machine, which here is little-endian.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Length of every message in bytes.
pub const MESSAGE_LEN: usize = 128;

/// Supported version: 2.0.
pub const VERSION: u16 = 0x0200;

/// First word of a ring.
pub const COOKIE: u32 = 0x03E3_1F20;

/// Base-2 logarithm of the largest ring's number of descriptors.
pub const LOG2_RING_MAX: u8 = 14;

/// Length in bytes of a ring's header, before its descriptors: a cache line with cookie, flags and head, and one with
/// tail.
pub const RING_HEADER_LEN: usize = 128;

/// Length of a descriptor in bytes.
pub const DESCRIPTOR_LEN: usize = 16;

/// Offset of the flags in a ring, in units of two bytes.
pub const FLAGS_AT: usize = 2;
/// Offset of the head in a ring, in units of two bytes.
pub const HEAD_AT: usize = 3;
/// Offset of the tail in a ring, in units of two bytes.
pub const TAIL_AT: usize = 32;

/// In a ring's flags: the ring's reader does not want to be rung.
pub const MASK_INT: u16 = 1;

/// In a descriptor's flags: the frame continues in the next descriptor.
pub const NEXT: u16 = 1;

/// In `flags` of [`AddRing`]: the ring goes from client to server.
pub const TO_SERVER: u16 = 1;

/// Kinds of messages.
pub mod kind {
    /// Acknowledges a message.
    pub const ACK: u16 = 1;
    /// The server's greeting.
    pub const HELLO: u16 = 2;
    /// The client's request.
    pub const INIT: u16 = 3;
    /// Adds a region of the client's memory.
    pub const ADD_REGION: u16 = 4;
    /// Adds a ring in such a region.
    pub const ADD_RING: u16 = 5;
    /// The client is ready.
    pub const CONNECT: u16 = 6;
    /// The server is ready too.
    pub const CONNECTED: u16 = 7;
    /// Ends the connection.
    pub const DISCONNECT: u16 = 8;
}

/// `memif_msg_hello_t`.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Hello {
    /// Name of the server.
    pub name: [u8; 32],
    /// Oldest version that the server speaks.
    pub min_version: U16,
    /// Newest version that the server speaks.
    pub max_version: U16,
    /// Highest number of a region.
    pub max_region: U16,
    /// Highest number of a ring to the client.
    pub max_m2s_ring: U16,
    /// Highest number of a ring to the server.
    pub max_s2m_ring: U16,
    /// Base-2 logarithm of the largest ring's number of descriptors.
    pub max_log2_ring_size: u8,
}

/// `memif_msg_init_t`.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Init {
    /// Version that the client speaks.
    pub version: U16,
    /// Interface id that the client asks for.
    pub id: U32,
    /// Kind of traffic: 0 is Ethernet.
    pub mode: u8,
    /// Secret of the port.
    pub secret: [u8; 24],
    /// Name of the client.
    pub name: [u8; 32],
}

/// `memif_msg_add_region_t`; a memory file comes with it.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct AddRegion {
    /// Number of the region.
    pub index: U16,
    /// Size of the region in bytes.
    pub size: U64,
}

/// `memif_msg_add_ring_t`; an eventfd comes with it.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct AddRing {
    /// Flags: [`TO_SERVER`].
    pub flags: U16,
    /// Number of the ring in its direction.
    pub index: U16,
    /// Number of the region in which the ring lies.
    pub region: U16,
    /// Offset of the ring's first byte in the region.
    pub offset: U32,
    /// Base-2 logarithm of its number of descriptors.
    pub log2_size: u8,
    /// Number of bytes before each frame.
    pub private_header_len: U16,
}

/// `memif_msg_connect_t` and `memif_msg_connected_t`.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Connect {
    /// Name of the interface.
    pub name: [u8; 32],
}

/// `memif_msg_disconnect_t`.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Disconnect {
    /// 0 if there is no error.
    pub code: U32,
    /// Reason, with a zero at the end.
    pub why: [u8; WHY_LEN],
}

/// Length in bytes of the reason in a DISCONNECT, with the zero at its end.
pub const WHY_LEN: usize = 96;

/// A message: its kind and its body.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Message {
    /// Kind of the message: see [`kind`].
    pub kind: U16,
    /// Body, as long as the kind requires; the rest is zero.
    pub body: [u8; MESSAGE_LEN - 2],
}

const _: () = assert!(size_of::<Message>() == MESSAGE_LEN);
const _: () = assert!(size_of::<Disconnect>() <= MESSAGE_LEN - 2);

impl Message {
    /// Makes a message without a body.
    pub fn bare(kind: u16) -> Self {
        Message { kind: kind.into(), ..Message::new_zeroed() }
    }

    /// Makes a message with a body.
    pub fn with(kind: u16, body: &(impl IntoBytes + Immutable)) -> Self {
        let mut message = Message::bare(kind);
        let bytes = body.as_bytes();
        message.body[..bytes.len()].copy_from_slice(bytes);
        message
    }

    /// Returns the body as the type that its kind has.
    pub fn body<T: FromBytes>(&self) -> T {
        T::read_from_prefix(&self.body).expect("no body is longer than a message").0
    }
}

/// Returns a name or a sentence as a byte field: as much as fits, and a zero behind it.
pub fn text<const N: usize>(text: &str) -> [u8; N] {
    let mut field = [0; N];
    let mut end = text.len().min(N - 1);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    field[..end].copy_from_slice(&text.as_bytes()[..end]);
    field
}

/// The contents of a descriptor at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Descriptor {
    /// Flags: [`NEXT`].
    pub flags: u16,
    /// Number of the region in which the bytes lie.
    pub region: u16,
    /// Number of bytes.
    pub len: u32,
    /// Offset of the first byte in the region.
    pub offset: u32,
}

impl Descriptor {
    /// Decodes a descriptor's two words.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "parts of a word")]
    pub fn of(first: u64, second: u64) -> Self {
        Descriptor {
            flags: first as u16,
            region: (first >> 16) as u16,
            len: (first >> 32) as u32,
            offset: second as u32,
        }
    }

    /// Returns the first word of the descriptor.
    #[inline]
    pub fn first_word(self) -> u64 {
        u64::from(self.len) << 32 | u64::from(self.region) << 16 | u64::from(self.flags)
    }
}
