//! Messages of the control channel, and what lies where in a ring.
//!
//! Source: memif protocol 2.0, as VPP's `src/plugins/memif/memif.h` and DPDK's `drivers/net/memif/memif.h` state it; numbers are in the order
//! of the machine, which here is little-endian.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of every message.
pub const MESSAGE_LEN: usize = 128;

/// The version that is spoken: 2.0.
pub const VERSION: u16 = 0x0200;

/// What a ring begins with.
pub const COOKIE: u32 = 0x03E3_1F20;

/// The largest ring: 2 to the power of this.
pub const LOG2_RING_MAX: u8 = 14;

/// Bytes of a ring before its descriptors: a line with cookie, flags and head, and one with tail.
pub const RING_HEADER_LEN: usize = 128;

/// Bytes of a descriptor.
pub const DESCRIPTOR_LEN: usize = 16;

/// Where flags, head and tail stand in a ring, in units of two bytes.
pub const FLAGS_AT: usize = 2;
/// See [`FLAGS_AT`].
pub const HEAD_AT: usize = 3;
/// See [`FLAGS_AT`].
pub const TAIL_AT: usize = 32;

/// In a ring's flags: whoever reads the ring does not want to be rung for.
pub const MASK_INT: u16 = 1;

/// In a descriptor's flags: the frame goes on in the next one.
pub const NEXT: u16 = 1;

/// In `flags` of [`AddRing`]: the ring goes from client to server.
pub const TO_SERVER: u16 = 1;

/// Kinds of messages.
pub mod kind {
    /// Understood.
    pub const ACK: u16 = 1;
    /// The server's greeting.
    pub const HELLO: u16 = 2;
    /// What the client wants.
    pub const INIT: u16 = 3;
    /// The client's memory.
    pub const ADD_REGION: u16 = 4;
    /// A ring in it.
    pub const ADD_RING: u16 = 5;
    /// The client is ready.
    pub const CONNECT: u16 = 6;
    /// So is the server.
    pub const CONNECTED: u16 = 7;
    /// It is over.
    pub const DISCONNECT: u16 = 8;
}

/// `memif_msg_hello_t`.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Hello {
    /// The server's name.
    pub name: [u8; 32],
    /// The oldest version that it speaks.
    pub min_version: U16,
    /// The newest.
    pub max_version: U16,
    /// The highest number of a region.
    pub max_region: U16,
    /// The highest number of a ring to the client.
    pub max_m2s_ring: U16,
    /// The highest number of a ring to the server.
    pub max_s2m_ring: U16,
    /// Of the largest ring.
    pub max_log2_ring_size: u8,
}

/// `memif_msg_init_t`.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Init {
    /// The version that the client speaks.
    pub version: U16,
    /// Whom it wants.
    pub id: U32,
    /// What is carried: 0 is Ethernet.
    pub mode: u8,
    /// What only those know who may.
    pub secret: [u8; 24],
    /// The client's name.
    pub name: [u8; 32],
}

/// `memif_msg_add_region_t`; a memory file comes with it.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct AddRegion {
    /// Its number.
    pub index: U16,
    /// Its bytes.
    pub size: U64,
}

/// `memif_msg_add_ring_t`; an eventfd comes with it.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct AddRing {
    /// [`TO_SERVER`].
    pub flags: U16,
    /// Its number in this direction.
    pub index: U16,
    /// The region in which it lies,
    pub region: U16,
    /// and from which byte on.
    pub offset: U32,
    /// How many descriptors it has.
    pub log2_size: u8,
    /// Bytes that stand before each frame.
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
    /// 0 where nothing is wrong.
    pub code: U32,
    /// Why, with a zero at the end.
    pub why: [u8; WHY_LEN],
}

/// Bytes of the sentence in a DISCONNECT, with the zero at its end.
pub const WHY_LEN: usize = 96;

/// A message: its kind, and what goes with it.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Message {
    /// See [`kind`].
    pub kind: U16,
    /// As much of it as the kind has; the rest is zero.
    pub body: [u8; MESSAGE_LEN - 2],
}

const _: () = assert!(size_of::<Message>() == MESSAGE_LEN);
const _: () = assert!(size_of::<Disconnect>() <= MESSAGE_LEN - 2);

impl Message {
    /// One without more than its kind.
    pub fn bare(kind: u16) -> Self {
        Message { kind: kind.into(), ..Message::new_zeroed() }
    }

    /// One with a body.
    pub fn with(kind: u16, body: &(impl IntoBytes + Immutable)) -> Self {
        let mut message = Message::bare(kind);
        let bytes = body.as_bytes();
        message.body[..bytes.len()].copy_from_slice(bytes);
        message
    }

    /// The body as what its kind has.
    pub fn body<T: FromBytes>(&self) -> T {
        T::read_from_prefix(&self.body).expect("no body is longer than a message").0
    }
}

/// A name or a sentence as a field of bytes: what fits, and a zero behind it.
pub fn text<const N: usize>(text: &str) -> [u8; N] {
    let mut field = [0; N];
    let mut end = text.len().min(N - 1);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    field[..end].copy_from_slice(&text.as_bytes()[..end]);
    field
}

/// What one descriptor says, at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Descriptor {
    /// [`NEXT`].
    pub flags: u16,
    /// In which region the bytes lie,
    pub region: u16,
    /// how many they are,
    pub len: u32,
    /// and from which on.
    pub offset: u32,
}

impl Descriptor {
    /// Of its two words.
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

    /// The first of them.
    #[inline]
    pub fn first_word(self) -> u64 {
        u64::from(self.len) << 32 | u64::from(self.region) << 16 | u64::from(self.flags)
    }
}
