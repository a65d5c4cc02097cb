//! Finishes frames for receivers that take only finished ones: computes the checksum, and segments a GSO packet of up to
//! 64 KiB into frames of the length that its sender stated.
//!
//! These are pure functions on a private copy. The header is its sender's claim: a frame that contradicts it is
//! [`Malformed`], and no part of it goes anywhere.
//!
//! A GSO packet can be inside a tunnel: in UDP (VXLAN, Geneve), GRE or IP. Its header says nothing of that. Each segment
//! gets the headers of the tunnel, too, with its own lengths.
//!
//! Sources: Virtual I/O Device (VIRTIO) 1.2, 5.1.6.2 and 5.1.6.4; RFC 791, 768, 9293, 8200, 1071, 2784. For flags and
//! identifications in the second and later frames: Linux, `net/ipv4/tcp_offload.c` (`tcp_gso_segment`) and `af_inet.c`
//! (`inet_gso_segment`); for tunnels, `udp_offload.c` (`__skb_udp_tunnel_segment`).

use zerocopy::{FromBytes, IntoBytes};

use super::offload::{HEADER_LEN, NEEDS_CSUM, Offload};

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
/// IP protocol numbers.
const IPV4_INSIDE: u8 = 4;
const TCP: u8 = 6;
const UDP: u8 = 17;
const IPV6_INSIDE: u8 = 41;
const GRE: u8 = 47;
const SCTP: u8 = 132;
/// Bit of the first byte of a GRE header: a checksum stands behind its first four bytes (RFC 2784).
const GRE_HAS_CHECKSUM: u8 = 0x80;
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

/// Completes the header of a packet that a card has joined of segments whose checksums it has checked. Such a header asks for no
/// checksum, and the frames that are cut from the packet need theirs. `packet` has its header before it.
pub fn ask_for_checksums(packet: &mut [u8]) {
    let Some((header, frame)) = packet.split_at_mut_checked(HEADER_LEN) else { return };
    let Ok(mut offload) = Offload::read_from_bytes(header) else { return };
    let Some(kind) = Kind::of(&offload).filter(|_| offload.flags & NEEDS_CSUM == 0) else { return };
    let fits = |ip: &Ip| kind.is_v4.is_none_or(|is_v4| is_v4 == ip.is_v4) && ip.holds(frame) == Some(kind.protocol());
    let Some(ip) = Ip::first_in(frame).filter(fits) else { return };
    let offset = if kind.is_tcp { 16 } else { 6 };
    if ip.end + offset + 2 > frame.len() {
        return;
    }
    let pseudo = fold(ip.pseudo(frame, frame.len() - ip.end, kind.protocol()));
    put(frame, ip.end + offset, pseudo);
    offload.flags |= NEEDS_CSUM;
    (offload.csum_start, offload.csum_offset) = (short(ip.end).into(), short(offset).into());
    let (flags, places) = header.split_at_mut(1);
    places.copy_from_slice(&offload.as_bytes()[1..]);
    flags[0] = offload.flags;
}

/// Computes the CRC32c of an SCTP packet (RFC 9260, 6.8) if its sender's kernel has left it: its header cannot name that
/// kind of checksum, and asks for the one of TCP. `packet` has its header before it.
pub fn finish_sctp(packet: &mut [u8]) {
    let Some((header, frame)) = packet.split_at_mut_checked(HEADER_LEN) else { return };
    let Ok(offload) = Offload::read_from_bytes(header) else { return };
    let start = usize::from(offload.csum_start.get());
    let is_asked = offload.flags & NEEDS_CSUM != 0 && offload.csum_offset.get() == 8 && start + 12 <= frame.len();
    if !is_asked || !Ip::first_in(frame).is_some_and(|ip| ip.is_before(frame, start, SCTP)) {
        return;
    }
    frame[start + 8..start + 12].fill(0);
    let check = crc32c::crc32c(&frame[start..]);
    frame[start + 8..start + 12].copy_from_slice(&check.to_le_bytes());
    let finished = Offload { flags: offload.flags & !NEEDS_CSUM, ..Offload::default() };
    header.copy_from_slice(finished.as_bytes());
}

/// Returns whether a GSO packet is inside a tunnel. A kernel that is given it whole, with this header, drops it.
pub fn is_in_tunnel(offload: &Offload, frame: &[u8]) -> bool {
    if offload.flags & NEEDS_CSUM == 0 {
        // Its header names no place: a card that joins segments may have checked all checksums.
        return false;
    }
    let kind = Kind::of(offload);
    let outer = Ip::first_in(frame);
    kind.zip(outer).is_some_and(|(kind, outer)| !outer.is_before(frame, kind.transport, kind.protocol()))
}

/// What is to be cut, as its header says.
#[derive(Debug, Clone, Copy)]
struct Kind {
    is_tcp: bool,
    /// The version of IP, if the header says it.
    is_v4: Option<bool>,
    /// Offset of the TCP or UDP header.
    transport: usize,
}

impl Kind {
    fn of(offload: &Offload) -> Option<Self> {
        let (is_tcp, is_v4) = match offload.gso_type & !GSO_ECN {
            GSO_TCPV4 => (true, Some(true)),
            GSO_TCPV6 => (true, Some(false)),
            GSO_UDP_L4 => (false, None),
            _ => return None,
        };
        Some(Kind { is_tcp, is_v4, transport: offload.csum_start.get().into() })
    }

    fn protocol(self) -> u8 {
        if self.is_tcp { TCP } else { UDP }
    }
}

/// An IP header.
#[derive(Debug, Clone, Copy)]
struct Ip {
    at: usize,
    is_v4: bool,
    /// Offset of the header behind it.
    end: usize,
}

impl Ip {
    /// Returns the first one of a frame; where it has extensions, without these.
    fn first_in(frame: &[u8]) -> Option<Self> {
        let (at, is_v4) = network_of(frame)?;
        let len = if is_v4 { usize::from(frame.get(at)? & 15) * 4 } else { 40 };
        Some(Ip { at, is_v4, end: at + len })
    }

    /// Returns whether it, with its extensions, ends at `transport`.
    fn is_before(self, frame: &[u8], transport: usize, protocol: u8) -> bool {
        match self.is_v4 {
            true => is_v4_before(frame, self.at, transport, protocol),
            false => is_v6_before(frame, self.at, transport, protocol),
        }
    }

    /// Returns it with its extensions, and the protocol of what is behind them.
    fn with_extensions(self, frame: &[u8]) -> Option<(Self, u8)> {
        let (protocol, end) = match self.is_v4 {
            true => (*frame.get(self.at + 9)?, self.end),
            false => extensions(frame, self.at, frame.len())?,
        };
        self.is_before(frame, end, protocol).then_some((Ip { end, ..self }, protocol))
    }

    /// Returns the protocol of what is in it, if that is all of the frame behind it.
    fn holds(self, frame: &[u8]) -> Option<u8> {
        let protocol = *frame.get(self.at + if self.is_v4 { 9 } else { 6 })?;
        self.is_before(frame, self.end, protocol).then_some(protocol)
    }

    /// Returns the one that ends at the TCP or UDP header of a packet inside a tunnel, not before `from`.
    fn inside(frame: &[u8], kind: Kind, from: usize) -> Option<Self> {
        let Kind { transport, is_v4, .. } = kind;
        let at = |len: usize| transport.checked_sub(len).filter(|at| *at >= from);
        let v4 = (5..=15).filter_map(|words| Some(Ip { at: at(words * 4)?, is_v4: true, end: transport }));
        let v6 = at(40).map(|at| Ip { at, is_v4: false, end: transport });
        let is_it = |ip: &Ip| {
            let len = if ip.is_v4 { frame.len() - ip.at } else { frame.len() - ip.end };
            let stated = frame.get(ip.at + if ip.is_v4 { 2 } else { 4 }..).and_then(|bytes| bytes.first_chunk());
            is_v4.is_none_or(|is_v4| is_v4 == ip.is_v4)
                && ip.is_before(frame, transport, kind.protocol())
                && stated.is_some_and(|stated| usize::from(u16::from_be_bytes(*stated)) == len)
        };
        v4.chain(v6).find(is_it)
    }

    /// Completes it for frame `i`, which has `part` bytes of payload behind all headers.
    fn complete(self, headers: &mut [u8], i: usize, part: usize) {
        let at = self.at;
        let len = headers.len() - at + part;
        if !self.is_v4 {
            return put(headers, at + 4, short(len - 40));
        }
        put(headers, at + 2, short(len));
        let id = get(headers, at + 4).wrapping_add(short(i));
        put(headers, at + 4, id);
        put(headers, at + 10, 0);
        let check = !fold(sum(&headers[at..self.end]));
        put(headers, at + 10, check);
    }

    /// Returns the sum of the pseudo-header of `len` bytes behind it.
    fn pseudo(self, headers: &[u8], len: usize, protocol: u8) -> u64 {
        let addresses = if self.is_v4 { self.at + 12..self.at + 20 } else { self.at + 8..self.at + 40 };
        sum(&headers[addresses]) + len as u64 + u64::from(protocol)
    }

    /// Writes the checksum of TCP or UDP, whose header is behind it, at `at`.
    fn check(self, headers: &mut [u8], part: &[u8], at: usize, protocol: u8) {
        put(headers, at, 0);
        let pseudo = self.pseudo(headers, headers.len() - self.end + part.len(), protocol);
        // All bytes before the payload are even in number.
        let check = !fold(pseudo + sum(&headers[self.end..]) + sum(part));
        put(headers, at, if check == 0 && protocol == UDP { u16::MAX } else { check });
    }
}

/// How to cut a GSO packet.
#[derive(Debug, Clone, Copy)]
struct Cut {
    /// The IP header of the tunnel that it is in, and the protocol there.
    tunnel: Option<(Ip, u8)>,
    /// The last IP header, which ends at the TCP or UDP header.
    ip: Ip,
    is_tcp: bool,
    /// Offset of the payload.
    payload: usize,
    /// Payload bytes in each frame except the last.
    size: usize,
}

impl Cut {
    fn of(offload: &Offload, frame: &[u8]) -> Result<Self, Malformed> {
        let kind = Kind::of(offload).ok_or(Malformed)?;
        let outer = Ip::first_in(frame).ok_or(Malformed)?;
        let Kind { is_tcp, is_v4, transport } = kind;
        let check_at = usize::from(offload.csum_offset.get());
        let size = usize::from(offload.gso_size.get());
        if offload.flags & NEEDS_CSUM == 0 || size == 0 || check_at != if is_tcp { 16 } else { 6 } {
            return Err(Malformed);
        }
        let least = if is_tcp { 20 } else { 8 };
        if transport + least > frame.len() {
            return Err(Malformed);
        }
        let is_plain = outer.is_before(frame, transport, kind.protocol());
        let (tunnel, ip) = match is_plain {
            true if is_v4.is_none_or(|is_v4| is_v4 == outer.is_v4) => (None, Ip { end: transport, ..outer }),
            true => return Err(Malformed),
            false => {
                let (tunnel, from) = tunnel_of(outer, frame).ok_or(Malformed)?;
                (Some(tunnel), Ip::inside(frame, kind, from).ok_or(Malformed)?)
            }
        };
        let len = if is_tcp { usize::from(frame[transport + 12] >> 4) * 4 } else { 8 };
        let payload = transport + len;
        if len < least
            || payload > frame.len().min(HEADERS_MAX)
            || (frame.len() - payload).div_ceil(size) > GSO_SEGMENTS_MAX
        {
            return Err(Malformed);
        }
        Ok(Cut { tunnel, ip, is_tcp, payload, size })
    }

    fn each(self, frame: &[u8], mut each: impl FnMut(&[u8], &[u8])) -> usize {
        let (headers, payload) = frame.split_at(self.payload);
        let count = payload.len().div_ceil(self.size).max(1);
        let mut own = [0; HEADERS_MAX];
        let transport = self.ip.end;
        for i in 0..count {
            let own = &mut own[..headers.len()];
            own.copy_from_slice(headers);
            let from = i * self.size;
            let part = &payload[from..payload.len().min(from + self.size)];
            self.ip.complete(own, i, part.len());
            if self.is_tcp {
                self.finish_tcp(own, from, i == 0, i + 1 == count);
                self.ip.check(own, part, transport + 16, TCP);
            } else {
                put(own, transport + 4, short(8 + part.len()));
                self.ip.check(own, part, transport + 6, UDP);
            }
            if let Some((tunnel, protocol)) = self.tunnel {
                tunnel.complete(own, i, part.len());
                if protocol == GRE && own[tunnel.end] & GRE_HAS_CHECKSUM != 0 {
                    put(own, tunnel.end + 4, 0);
                    let check = !fold(sum(&own[tunnel.end..]) + sum(part));
                    put(own, tunnel.end + 4, check);
                }
                if protocol == UDP {
                    put(own, tunnel.end + 4, short(own.len() - tunnel.end + part.len()));
                    // A tunnel may do without.
                    if get(own, tunnel.end + 6) != 0 {
                        tunnel.check(own, part, tunnel.end + 6, UDP);
                    }
                }
            }
            each(own, part);
        }
        count
    }

    fn finish_tcp(self, headers: &mut [u8], from: usize, is_first: bool, is_last: bool) {
        const FIN_PSH: u8 = 0x09;
        const CWR: u8 = 0x80;
        let tcp = &mut headers[self.ip.end..];
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
}

/// Returns the tunnel that begins with this IP header: its protocol, and where the packet inside can begin.
fn tunnel_of(ip: Ip, frame: &[u8]) -> Option<((Ip, u8), usize)> {
    let (ip, protocol) = ip.with_extensions(frame)?;
    let len = match protocol {
        UDP => 8,
        GRE if frame.get(ip.end)? & GRE_HAS_CHECKSUM != 0 => 8,
        GRE => 4,
        IPV4_INSIDE | IPV6_INSIDE => 0,
        _ => return None,
    };
    Some(((ip, protocol), ip.end + len))
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
    frame.get(network).is_some_and(|first| first >> 4 == 6)
        && protocol != FRAGMENT
        && extensions(frame, network, transport) == Some((protocol, transport))
}

/// Returns the protocol behind the extensions of an IPv6 header that begin before `end`, and its offset.
fn extensions(frame: &[u8], network: usize, end: usize) -> Option<(u8, usize)> {
    let header = frame.get(network..network + 40)?;
    let (mut next, mut at) = (header[6], network + 40);
    while at < end && matches!(next, 0 | 43 | 60) {
        let extension = frame.get(at..at + 2)?;
        next = extension[0];
        at += (usize::from(extension[1]) + 1) * 8;
    }
    Some((next, at))
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
