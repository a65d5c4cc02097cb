//! Finishes frames for receivers that take only finished ones: computes the checksum, and segments a GSO packet of up to
//! 64 KiB into frames of the length that its sender stated.
//!
//! These are pure functions on a private copy. The header is its sender's claim: a frame that contradicts it is
//! [`Malformed`], and no part of it goes anywhere.
//!
//! Sources: Virtual I/O Device (VIRTIO) 1.2, 5.1.6.2 and 5.1.6.4; RFC 791, 768, 9293, 8200, 1071. For flags and
//! identifications in the second and later frames: Linux, `net/ipv4/tcp_offload.c` (`tcp_gso_segment`) and `af_inet.c`
//! (`inet_gso_segment`).

use super::offload::{NEEDS_CSUM, Offload};

/// `gso_type`: the frame is no GSO packet.
pub const GSO_NONE: u8 = 0;
/// `gso_type`: TCP over IPv4.
pub const GSO_TCPV4: u8 = 1;
/// `gso_type`: TCP over IPv6.
pub const GSO_TCPV6: u8 = 4;
/// `gso_type`: UDP datagrams, each with a header of its own.
pub const GSO_UDP_L4: u8 = 5;
/// Bit of `gso_type`: the packet has an ECN mark. The TCP header holds the bits that matter.
pub const GSO_ECN: u8 = 0x80;

/// Maximum number of segments of a GSO packet: 64 KiB in pieces of 256 bytes. No real path needs smaller pieces, and they
/// cost us more than their sender.
pub const GSO_SEGMENTS_MAX: usize = 256;

/// Maximum number of header bytes before the payload.
const HEADERS_MAX: usize = 256;

const ETHERNET_LEN: usize = 14;
const TCP: u8 = 6;
const UDP: u8 = 17;
/// Offset in bytes of the checksum in a UDP header.
const UDP_CHECK_AT: u16 = 6;

/// The frame contradicts its offload header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the frame is not what its offload header says")]
pub struct Malformed;

/// Returns whether the frame needs no more work.
#[inline]
pub fn is_finished(offload: &Offload) -> bool {
    offload.flags & NEEDS_CSUM == 0 && offload.gso_type == GSO_NONE
}

/// Finishes a frame. Passes every resulting frame to `each`, in two parts that follow each other on the wire. Returns
/// the number of frames.
///
/// # Errors
/// The frame contradicts its offload header.
pub fn finish(offload: &Offload, frame: &mut [u8], mut each: impl FnMut(&[u8], &[u8])) -> Result<usize, Malformed> {
    if offload.gso_type != GSO_NONE {
        let cut = Cut::of(offload, frame)?;
        return Ok(cut.each(frame, each));
    }
    if offload.flags & NEEDS_CSUM != 0 {
        compute(offload, frame)?;
    }
    each(frame, &[]);
    Ok(1)
}

/// Computes the checksum from `csum_start` on. The checksum field already holds the sum of the bytes that are not in
/// the frame.
fn compute(offload: &Offload, frame: &mut [u8]) -> Result<(), Malformed> {
    let start = usize::from(offload.csum_start.get());
    let at = offload.sum_at();
    if start < ETHERNET_LEN || at + 2 > frame.len() {
        return Err(Malformed);
    }
    let check = !fold(sum(&frame[start..]));
    // RFC 768: this arithmetic has two equal zeroes, and in UDP one of them means that there is no checksum. For other
    // protocols it is the right one (RFC 1624), though Linux (`skb_checksum_help`) writes the other for them too.
    let is_udp = offload.csum_offset.get() == UDP_CHECK_AT;
    put(frame, at, if check == 0 && is_udp { u16::MAX } else { check });
    Ok(())
}

/// How to cut a GSO packet.
#[derive(Debug, Clone, Copy)]
struct Cut {
    /// Offset of the IP header.
    network: usize,
    /// Whether the IP header is version 4.
    is_v4: bool,
    /// Offset of the TCP or UDP header.
    transport: usize,
    is_tcp: bool,
    /// Offset of the payload.
    payload: usize,
    /// Payload bytes in each frame except the last.
    size: usize,
}

impl Cut {
    fn of(offload: &Offload, frame: &[u8]) -> Result<Self, Malformed> {
        let (network, is_v4) = network_of(frame).ok_or(Malformed)?;
        let is_tcp = match offload.gso_type & !GSO_ECN {
            GSO_TCPV4 if is_v4 => true,
            GSO_TCPV6 if !is_v4 => true,
            GSO_UDP_L4 => false,
            _ => return Err(Malformed),
        };
        let transport = usize::from(offload.csum_start.get());
        let check_at = usize::from(offload.csum_offset.get());
        let size = usize::from(offload.gso_size.get());
        let protocol = if is_tcp { TCP } else { UDP };
        if offload.flags & NEEDS_CSUM == 0 || size == 0 || check_at != if is_tcp { 16 } else { 6 } {
            return Err(Malformed);
        }
        let fits = match is_v4 {
            true => is_v4_before(frame, network, transport, protocol),
            false => is_v6_before(frame, network, transport, protocol),
        };
        let least = if is_tcp { 20 } else { 8 };
        if !fits || transport + least > frame.len() {
            return Err(Malformed);
        }
        let len = if is_tcp { usize::from(frame[transport + 12] >> 4) * 4 } else { 8 };
        let payload = transport + len;
        if len < least
            || payload > frame.len().min(HEADERS_MAX)
            || (frame.len() - payload).div_ceil(size) > GSO_SEGMENTS_MAX
        {
            return Err(Malformed);
        }
        Ok(Cut { network, is_v4, transport, is_tcp, payload, size })
    }

    fn each(self, frame: &[u8], mut each: impl FnMut(&[u8], &[u8])) -> usize {
        let (headers, payload) = frame.split_at(self.payload);
        let count = payload.len().div_ceil(self.size).max(1);
        let mut own = [0; HEADERS_MAX];
        for i in 0..count {
            let own = &mut own[..headers.len()];
            own.copy_from_slice(headers);
            let from = i * self.size;
            let part = &payload[from..payload.len().min(from + self.size)];
            self.address(own, i, part.len());
            match self.is_tcp {
                true => self.finish_tcp(own, from, i == 0, i + 1 == count),
                false => put(own, self.transport + 4, short(8 + part.len())),
            }
            self.check(own, part);
            each(own, part);
        }
        count
    }

    /// Completes the IP header of frame `i`, which has `part` bytes of payload behind all headers.
    fn address(self, headers: &mut [u8], i: usize, part: usize) {
        let at = self.network;
        let len = headers.len() - at + part;
        if !self.is_v4 {
            return put(headers, at + 4, short(len - 40));
        }
        put(headers, at + 2, short(len));
        let id = get(headers, at + 4).wrapping_add(short(i));
        put(headers, at + 4, id);
        put(headers, at + 10, 0);
        let check = !fold(sum(&headers[at..self.transport]));
        put(headers, at + 10, check);
    }

    fn finish_tcp(self, headers: &mut [u8], from: usize, is_first: bool, is_last: bool) {
        const FIN_PSH: u8 = 0x09;
        const CWR: u8 = 0x80;
        let tcp = &mut headers[self.transport..];
        let sequence = u32::from_be_bytes(tcp[4..8].try_into().expect("four bytes"));
        let from = u32::try_from(from).expect("within a frame");
        tcp[4..8].copy_from_slice(&sequence.wrapping_add(from).to_be_bytes());
        if !is_last {
            tcp[13] &= !FIN_PSH;
        }
        if !is_first {
            tcp[13] &= !CWR;
        }
    }

    /// Writes the checksum of TCP or UDP.
    fn check(self, headers: &mut [u8], part: &[u8]) {
        let addresses =
            if self.is_v4 { self.network + 12..self.network + 20 } else { self.network + 8..self.network + 40 };
        let at = self.transport + if self.is_tcp { 16 } else { 6 };
        put(headers, at, 0);
        let len = headers.len() - self.transport + part.len();
        let pseudo = sum(&headers[addresses]) + len as u64 + u64::from(if self.is_tcp { TCP } else { UDP });
        // All bytes before the payload are even in number.
        let check = !fold(pseudo + sum(&headers[self.transport..]) + sum(part));
        put(headers, at, if check == 0 && !self.is_tcp { u16::MAX } else { check });
    }
}

/// Returns the offset of the IP header, behind up to two tags, and whether it is version 4.
fn network_of(frame: &[u8]) -> Option<(usize, bool)> {
    const TAGS: [u16; 2] = [0x8100, 0x88a8];
    let mut at = 12;
    for _ in 0..3 {
        let kind = u16::from_be_bytes(frame.get(at..at + 2)?.try_into().expect("two bytes"));
        match kind {
            0x0800 => return Some((at + 2, true)),
            0x86dd => return Some((at + 2, false)),
            kind if TAGS.contains(&kind) => at += 4,
            _ => return None,
        }
    }
    None
}

/// Returns whether an IPv4 header of an unfragmented packet ends at `transport`.
fn is_v4_before(frame: &[u8], network: usize, transport: usize, protocol: u8) -> bool {
    const FRAGMENT: u16 = 0x3fff;
    let Some(header) = frame.get(network..network + 20) else { return false };
    let len = usize::from(header[0] & 15) * 4;
    header[0] >> 4 == 4
        && len >= 20
        && network + len == transport
        && header[9] == protocol
        && get(header, 6) & FRAGMENT == 0
}

/// Returns whether an IPv6 header, with or without extensions, ends at `transport`.
fn is_v6_before(frame: &[u8], network: usize, transport: usize, protocol: u8) -> bool {
    const FRAGMENT: u8 = 44;
    let Some(header) = frame.get(network..network + 40) else { return false };
    let (mut next, mut at) = (header[6], network + 40);
    while at < transport && matches!(next, 0 | 43 | 60) {
        let Some(extension) = frame.get(at..at + 2) else { return false };
        next = extension[0];
        at += (usize::from(extension[1]) + 1) * 8;
    }
    header[0] >> 4 == 6 && next != FRAGMENT && next == protocol && at == transport
}

/// Returns the unfolded sum of RFC 1071; the first byte is the high half of a word.
fn sum(bytes: &[u8]) -> u64 {
    let mut fours = bytes.chunks_exact(4);
    let all: u64 = fours.by_ref().map(|four| u64::from(u32::from_be_bytes(four.try_into().expect("four bytes")))).sum();
    let mut last = [0; 4];
    last[..fours.remainder().len()].copy_from_slice(fours.remainder());
    all + u64::from(u32::from_be_bytes(last))
}

#[expect(clippy::cast_possible_truncation, reason = "folded to 16 bits")]
fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

fn get(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

fn put(bytes: &mut [u8], at: usize, value: u16) {
    bytes[at..at + 2].copy_from_slice(&value.to_be_bytes());
}

/// Returns `len` for a 16-bit header field. None of our frames exceeds the field.
fn short(len: usize) -> u16 {
    u16::try_from(len).unwrap_or(u16::MAX)
}
