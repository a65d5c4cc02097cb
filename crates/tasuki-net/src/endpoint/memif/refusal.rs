//! Reasons why a client is sent away, as sentences for its user, short enough for a DISCONNECT.

use super::control::{MEMORY_MAX, REGIONS_MAX};
use super::wire::{LOG2_RING_MAX, MESSAGE_LEN};

/// Direction of a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// From client to server ("slave to master").
    ToServer,
    /// From server to client ("master to slave").
    ToClient,
}

impl std::fmt::Display for Way {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Way::ToServer => "transmit",
            Way::ToClient => "receive",
        })
    }
}

/// Why a client is sent away. The sentences name the rings as the client does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Another client is connected.
    #[error("id {0} has a client already, and takes one at a time; end that one first")]
    Busy(u32),
    /// Another process serves from now on, and does not know the client, which was in its handshake.
    #[error("another worker serves this port from now on; connect again")]
    Moved,
    /// The port is no longer served.
    #[error("this port is served no more")]
    Over,
    /// The client did not finish its handshake in time.
    #[error("the handshake took too long; connect again")]
    TooSlow,
    /// The client does not read its answers.
    #[error("the client does not read its answers")]
    Deaf,
    /// The message has a wrong length.
    #[error("a control message has {MESSAGE_LEN} bytes, and this one {0}")]
    Length(usize),
    /// A message came with more than one descriptor, or with one that it must not have.
    #[error("more descriptors came with a message than belong to it")]
    Descriptors,
    /// The message is out of turn, or of an unknown kind.
    #[error("message {0} is not in its turn")]
    OutOfTurn(u16),
    /// The client speaks another version.
    #[error("memif {}.{} is not spoken here, but 2.0", .0 >> 8, .0 & 0xff)]
    Version(u16),
    /// The client asks for another id.
    #[error("id {asked} is not here, but id {here}: connect with id={here}")]
    Id {
        /// Id that the client asks for.
        asked: u32,
        /// Id of this port.
        here: u32,
    },
    /// The client does not carry Ethernet.
    #[error("mode {0} is not served, but Ethernet (VPP: mode ethernet)")]
    Mode(u8),
    /// The secret is wrong.
    #[error("the secret is wrong; connect with this port's (DPDK: secret=..., VPP: secret ...)")]
    Secret,
    /// There are too many regions, or they do not come in turn.
    #[error("region {0} is not the next, or one more than {REGIONS_MAX}")]
    RegionIndex(u16),
    /// The regions are too large in all.
    #[error("regions of more than {} MiB in all; make rsize or bsize smaller", MEMORY_MAX >> 20)]
    RegionSize,
    /// The region came without a descriptor.
    #[error("region {0} came without a memory file")]
    RegionMissing(u16),
    /// The region's descriptor is no memory file that can be sealed.
    #[error("region {0} is no memory file that can be sealed (memfd)")]
    RegionKind(u16),
    /// The region could shrink.
    #[error("region {0} is not sealed against shrinking; seal it (DPDK: zero-copy=no, VPP: no-zero-copy)")]
    RegionUnsealed(u16),
    /// The region lies on huge pages.
    #[error("region {0} lies on huge pages; have small ones (DPDK: zero-copy=no, VPP: no-zero-copy)")]
    RegionHuge(u16),
    /// The region has fewer bytes than announced.
    #[error("region {0} has fewer bytes than were announced")]
    RegionShort(u16),
    /// The kernel does not map the region.
    #[error("region {0} could not be mapped to be written: it is sealed against that, or memory is short")]
    RegionUnmapped(u16),
    /// The client adds more than one ring in a direction.
    #[error("{0} ring {1}: one ring each way is served (DPDK: --rxq=1 --txq=1)")]
    RingIndex(Way, u16),
    /// A ring came twice.
    #[error("the {0} ring came twice")]
    RingTwice(Way),
    /// The ring is too large.
    #[error("the {0} ring is larger than 2^{LOG2_RING_MAX}; make rsize smaller")]
    RingSize(Way),
    /// The ring's region was not added.
    #[error("the {0} ring lies in region {1}, which was not added")]
    RingRegion(Way, u16),
    /// The ring does not lie within its region.
    #[error("the {0} ring ends outside of its region")]
    RingOutside(Way),
    /// The ring is not aligned to 16 bytes.
    #[error("the {0} ring does not begin at a multiple of 16 bytes")]
    RingCrooked(Way),
    /// The ring has private headers before its frames.
    #[error("the {0} ring has private headers, which are not served")]
    RingHeaders(Way),
    /// The ring came without an eventfd.
    #[error("the {0} ring came without an eventfd")]
    RingSilent(Way),
    /// The ring does not begin with memif's cookie.
    #[error("the {0} ring does not begin with memif's cookie")]
    RingCookie(Way),
    /// The client connects without a ring in this direction.
    #[error("there is no {0} ring; add one each way before connecting")]
    RingMissing(Way),
    /// The head is more than a ring ahead.
    #[error("the {0} ring's head is more than a whole ring ahead of its tail")]
    Overrun(Way),
    /// A descriptor names a region that was not added.
    #[error("a descriptor in the {0} ring names region {1}, which was not added")]
    DescriptorRegion(Way, u16),
    /// A descriptor's bytes do not lie within their region.
    #[error("a descriptor in the {0} ring ends outside of its region")]
    DescriptorOutside(Way),
    /// A chain of descriptors does not end.
    #[error("a chain in the {0} ring does not end where its head is, or is longer than is served")]
    Chain(Way),
}

#[cfg(test)]
mod tests {
    use super::super::wire::WHY_LEN;
    use super::*;

    #[test]
    fn every_sentence_fits_into_a_disconnect() {
        const MOST: u16 = u16::MAX;
        let mut all = vec![
            Refusal::Busy(u32::MAX),
            Refusal::Moved,
            Refusal::Over,
            Refusal::TooSlow,
            Refusal::Deaf,
            Refusal::Length(usize::from(MOST)),
            Refusal::Descriptors,
            Refusal::OutOfTurn(MOST),
            Refusal::Version(MOST),
            Refusal::Id { asked: u32::MAX, here: u32::MAX },
            Refusal::Mode(u8::MAX),
            Refusal::Secret,
            Refusal::RegionIndex(MOST),
            Refusal::RegionSize,
            // An added region has at most two digits.
            Refusal::RegionMissing(15),
            Refusal::RegionKind(15),
            Refusal::RegionUnsealed(15),
            Refusal::RegionHuge(15),
            Refusal::RegionShort(15),
            Refusal::RegionUnmapped(15),
        ];
        for way in [Way::ToServer, Way::ToClient] {
            all.extend([
                Refusal::RingIndex(way, MOST),
                Refusal::RingTwice(way),
                Refusal::RingSize(way),
                Refusal::RingRegion(way, MOST),
                Refusal::RingOutside(way),
                Refusal::RingCrooked(way),
                Refusal::RingHeaders(way),
                Refusal::RingSilent(way),
                Refusal::RingCookie(way),
                Refusal::RingMissing(way),
                Refusal::Overrun(way),
                Refusal::DescriptorRegion(way, MOST),
                Refusal::DescriptorOutside(way),
                Refusal::Chain(way),
            ]);
        }
        for refusal in all {
            assert!(refusal.to_string().len() < WHY_LEN, "{} bytes: {refusal}", refusal.to_string().len());
        }
    }
}
