//! Frames that are not finished are finished here, for whoever takes none but finished ones: the check sum is computed, and a segment of up to
//! 64 KiB is cut into frames as long as its sender said.
//!
//! Pure functions on a copy that is ours alone. What the header says is its sender's claim: a frame that does not bear it out is [`Malformed`],
//! and nothing of it goes anywhere.
//!
//! Sources: Virtual I/O Device (VIRTIO) 1.2, 5.1.6.2 and 5.1.6.4; RFC 791, 768, 9293, 8200, 1071; what becomes of flags and identifications in
//! the second frame and those after it: Linux, `net/ipv4/tcp_offload.c` (`tcp_gso_segment`) and `af_inet.c` (`inet_gso_segment`).

use super::offload::{NEEDS_CSUM, Offload};

/// `gso_type`: nothing is to be cut.
pub const GSO_NONE: u8 = 0;
/// `gso_type`: TCP over IPv4.
pub const GSO_TCPV4: u8 = 1;
/// `gso_type`: TCP over IPv6.
pub const GSO_TCPV6: u8 = 4;
/// `gso_type`: datagrams of UDP, each with a header of its own.
pub const GSO_UDP_L4: u8 = 5;
/// Bit of `gso_type`: the segment has an ECN mark. The bits that matter stand in the TCP header.
const GSO_ECN: u8 = 0x80;

/// Most frames that a segment is cut into: 64 KiB in pieces of 256 bytes. What is smaller is nobody's path, and costs us more than its sender.
pub const CUTS_MAX: usize = 256;

/// Most bytes of headers before the payload.
const HEADERS_MAX: usize = 256;

const ETHERNET_LEN: usize = 14;
const TCP: u8 = 6;
const UDP: u8 = 17;
/// Where a datagram's check sum stands in its header.
const UDP_CHECK_AT: u16 = 6;

/// A frame's offload header says of it what is not so.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the frame is not what its offload header says")]
pub struct Malformed;

/// Whether there is nothing left to be done.
#[inline]
pub fn is_finished(offload: &Offload) -> bool {
    offload.flags & NEEDS_CSUM == 0 && offload.gso_type == GSO_NONE
}

/// Finishes a frame. `each` gets every frame that it makes, in two parts that lie one behind the other on the wire; says how many they are.
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

/// Computes the check sum from `csum_start` on: what stands in its place already is the sum of what is not in the frame.
fn compute(offload: &Offload, frame: &mut [u8]) -> Result<(), Malformed> {
    let start = usize::from(offload.csum_start.get());
    let at = start + usize::from(offload.csum_offset.get());
    if start < ETHERNET_LEN || at + 2 > frame.len() {
        return Err(Malformed);
    }
    let check = !fold(sum(&frame[start..]));
    // RFC 768: the two zeroes of this arithmetic are alike, and to UDP one of them means that there is no check sum. To others it is the right one
    // (RFC 1624), though Linux (`skb_checksum_help`) writes the other for them too.
    let is_udp = offload.csum_offset.get() == UDP_CHECK_AT;
    put(frame, at, if check == 0 && is_udp { u16::MAX } else { check });
    Ok(())
}

/// How a segment is cut.
#[derive(Debug, Clone, Copy)]
struct Cut {
    /// Where the IP header begins,
    network: usize,
    /// whether it is version 4,
    is_v4: bool,
    /// where TCP's or UDP's,
    transport: usize,
    is_tcp: bool,
    /// and where the payload.
    payload: usize,
    /// Bytes of it in each frame but the last.
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
        if len < least || payload > frame.len().min(HEADERS_MAX) || (frame.len() - payload).div_ceil(size) > CUTS_MAX {
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

    /// The IP header of frame `i`, with so many bytes of payload behind all headers.
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

    /// The check sum of TCP or UDP.
    fn check(self, headers: &mut [u8], part: &[u8]) {
        let addresses =
            if self.is_v4 { self.network + 12..self.network + 20 } else { self.network + 8..self.network + 40 };
        let at = self.transport + if self.is_tcp { 16 } else { 6 };
        put(headers, at, 0);
        let len = headers.len() - self.transport + part.len();
        let pseudo = sum(&headers[addresses]) + len as u64 + u64::from(if self.is_tcp { TCP } else { UDP });
        // All before the payload has an even number of bytes.
        let check = !fold(pseudo + sum(&headers[self.transport..]) + sum(part));
        put(headers, at, if check == 0 && !self.is_tcp { u16::MAX } else { check });
    }
}

/// Where the IP header begins, behind up to two tags, and whether it is version 4.
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

/// Whether there is an IPv4 header, of a packet that is whole, just before `transport`.
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

/// Whether there is an IPv6 header before `transport`, and nothing or extensions in between.
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

/// The sum of RFC 1071, not yet folded, of bytes of which the first is the higher half of a word.
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

/// A length in a header. No frame of ours is longer than it can say.
fn short(len: usize) -> u16 {
    u16::try_from(len).unwrap_or(u16::MAX)
}
