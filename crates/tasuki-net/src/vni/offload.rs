//! The header before an unfinished frame: that of virtio-net, as a TAP with `IFF_VNET_HDR` and a guest's card use it.
//!
//! Source: Virtual I/O Device (VIRTIO) 1.2, 5.1.6 (`struct virtio_net_hdr`, without `num_buffers`), little-endian.

use zerocopy::little_endian::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Length of the header in bytes.
pub const HEADER_LEN: usize = 10;

/// `flags`: the checksum must be computed from `csum_start` on and stored at `csum_start + csum_offset`.
pub const NEEDS_CSUM: u8 = 1;

/// Work that is left to do on a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Offload {
    /// [`NEEDS_CSUM`], and other flags of virtio.
    pub flags: u8,
    /// Kind of frames that a GSO packet is to be cut into.
    pub gso_type: u8,
    /// Length in bytes of all headers, with which each segment begins.
    pub hdr_len: U16,
    /// Payload bytes in each segment.
    pub gso_size: U16,
    /// First byte that the checksum covers, counted from the start of the frame.
    pub csum_start: U16,
    /// Place of the checksum, in bytes from `csum_start`.
    pub csum_offset: U16,
}

impl Offload {
    /// Returns the place of the checksum, in bytes from the start of the frame.
    #[inline]
    pub(crate) fn sum_at(&self) -> usize {
        usize::from(self.csum_start.get()) + usize::from(self.csum_offset.get())
    }
}

const _: () = assert!(size_of::<Offload>() == HEADER_LEN);
