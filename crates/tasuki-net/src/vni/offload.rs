//! What travels before a frame that is not finished: the header of virtio-net, as a TAP with `IFF_VNET_HDR` and a guest's card have it.
//!
//! Source: Virtual I/O Device (VIRTIO) 1.2, 5.1.6 (`struct virtio_net_hdr`, without `num_buffers`), little-endian.

use zerocopy::little_endian::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of the header.
pub const HEADER_LEN: usize = 10;

/// `flags`: the check sum at `csum_start + csum_offset` is to be computed from `csum_start` on.
pub const NEEDS_CSUM: u8 = 1;

/// What is left to be done to a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Offload {
    /// [`NEEDS_CSUM`], and what else virtio has.
    pub flags: u8,
    /// What it is to be cut into.
    pub gso_type: u8,
    /// Bytes of all headers, which each segment begins with.
    pub hdr_len: U16,
    /// Bytes of payload in each segment.
    pub gso_size: U16,
    /// Where the check sum begins, in bytes from the frame's first.
    pub csum_start: U16,
    /// Where it goes, in bytes from `csum_start`.
    pub csum_offset: U16,
}

const _: () = assert!(size_of::<Offload>() == HEADER_LEN);
