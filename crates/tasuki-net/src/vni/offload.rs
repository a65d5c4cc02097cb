//! What travels before a frame that is not finished: the header of virtio-net, as a TAP with `IFF_VNET_HDR` and a guest's card have it.
//!
//! Source: Virtual I/O Device (VIRTIO) 1.2, 5.1.6 (`struct virtio_net_hdr`, without `num_buffers`), little-endian.

use zerocopy::little_endian::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of the header.
pub const HEADER_LEN: usize = 10;

/// `flags`: the check sum at `csum_start + csum_offset` is to be computed from `csum_start` on.
pub const NEEDS_CSUM: u8 = 1;
/// `flags`: the check sums were found right.
pub const DATA_VALID: u8 = 2;

/// `gso_type`: one frame.
pub const GSO_NONE: u8 = 0;
/// `gso_type`: segments of TCP over IPv4.
pub const GSO_TCPV4: u8 = 1;
/// `gso_type`: segments of TCP over IPv6.
pub const GSO_TCPV6: u8 = 4;
/// `gso_type`: datagrams of UDP.
pub const GSO_UDP_L4: u8 = 5;
/// `gso_type`, added to another: the first segment alone carries CWR.
pub const GSO_ECN: u8 = 0x80;

/// What is left to be done to a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Offload {
    /// [`NEEDS_CSUM`], [`DATA_VALID`].
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

impl Offload {
    /// Whether nothing is left to be done: the frame can go to whoever knows nothing of such headers.
    pub fn is_done(&self) -> bool {
        self.flags & NEEDS_CSUM == 0 && self.gso_type & !GSO_ECN == GSO_NONE
    }
}
