//! Frames that our code finishes are intact for an independent reader (smoltcp). A bad header of any contents
//! only gets its frame dropped.

use proptest::prelude::*;
use smoltcp::wire::{IpAddress, Ipv4Packet, Ipv6Packet, TcpPacket, UdpPacket};
use tasuki_net::vni::finish::{GSO_SEGMENTS_MAX, ask_for_checksums, finish, finish_sctp, is_in_tunnel};
use tasuki_net::vni::offload::{HEADER_LEN, NEEDS_CSUM, Offload};
use zerocopy::{FromBytes, IntoBytes};

const TCP: u8 = 6;
const UDP: u8 = 17;

/// A segment as a kernel hands it over: its checksum is that of the pseudo header alone.
#[derive(Debug, Clone)]
struct Segment {
    is_v4: bool,
    protocol: u8,
    tags: usize,
    /// Words of options for IPv4; units of eight bytes of an extension header for IPv6.
    ip_options: usize,
    tcp_options: usize,
    flags: u8,
    sequence: u32,
    id: u16,
    payload: Vec<u8>,
    size: u16,
}

impl Segment {
    fn network(&self) -> usize {
        14 + 4 * self.tags
    }

    fn transport(&self) -> usize {
        self.network() + if self.is_v4 { 20 + 4 * self.ip_options } else { 40 + 8 * self.ip_options }
    }

    fn headers(&self) -> usize {
        self.transport() + if self.protocol == TCP { 20 + 4 * self.tcp_options } else { 8 }
    }

    fn frame(&self) -> Vec<u8> {
        let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
        (0..self.tags).for_each(|i| frame.extend([[0x88, 0xa8, 0, 5], [0x81, 0, 0, 7]][(i + 2 - self.tags) % 2]));
        let rest = self.headers() - self.transport() + self.payload.len();
        match self.is_v4 {
            true => self.ipv4(&mut frame, rest),
            false => self.ipv6(&mut frame, rest),
        }
        frame.extend([0x12, 0x34, 0x00, 0x50]);
        if self.protocol == TCP {
            frame.extend(self.sequence.to_be_bytes());
            frame.extend([0, 0, 0, 9, u8::try_from(5 + self.tcp_options).unwrap() << 4, self.flags, 1, 0, 0, 0, 0, 0]);
            frame.extend(vec![1; 4 * self.tcp_options]);
        } else {
            frame.extend(u16::try_from(rest).unwrap().to_be_bytes());
            frame.extend([0, 0]);
        }
        frame.extend(&self.payload);
        let pseudo = self.pseudo(&frame, rest);
        let at = self.transport() + usize::from(self.check_at());
        frame[at..at + 2].copy_from_slice(&pseudo.to_be_bytes());
        frame
    }

    fn ipv4(&self, frame: &mut Vec<u8>, rest: usize) {
        let len = u16::try_from(20 + 4 * self.ip_options + rest).unwrap();
        frame.extend([8, 0, 0x40 | u8::try_from(5 + self.ip_options).unwrap(), 0]);
        frame.extend(len.to_be_bytes());
        frame.extend(self.id.to_be_bytes());
        // A wrong checksum: the code must compute it anew for each frame.
        frame.extend([0x40, 0, 64, self.protocol, 0xab, 0xcd, 192, 0, 2, 1, 192, 0, 2, 2]);
        frame.extend(vec![1; 4 * self.ip_options]);
    }

    fn ipv6(&self, frame: &mut Vec<u8>, rest: usize) {
        let len = u16::try_from(8 * self.ip_options + rest).unwrap();
        frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
        frame.extend(len.to_be_bytes());
        frame.extend([if self.ip_options > 0 { 60 } else { self.protocol }, 64]);
        frame.extend([0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
        frame.extend([0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2]);
        if self.ip_options > 0 {
            frame.extend([self.protocol, u8::try_from(self.ip_options - 1).unwrap()]);
            // Padding.
            frame.extend([1, u8::try_from(8 * self.ip_options - 4).unwrap()]);
            frame.extend(vec![0; 8 * self.ip_options - 4]);
        }
    }

    fn check_at(&self) -> u16 {
        if self.protocol == TCP { 16 } else { 6 }
    }

    /// Computes the sum word by word, and slowly.
    fn pseudo(&self, frame: &[u8], len: usize) -> u16 {
        let at = self.network();
        let addresses = if self.is_v4 { &frame[at + 12..at + 20] } else { &frame[at + 8..at + 40] };
        let words = addresses.chunks(2).map(|two| u16::from_be_bytes([two[0], two[1]]));
        let all = words.chain([u16::from(self.protocol), u16::try_from(len).unwrap()]);
        all.fold(0, |sum: u16, word| {
            let (sum, carry) = sum.overflowing_add(word);
            sum + u16::from(carry)
        })
    }

    fn offload(&self, gso_type: u8) -> Offload {
        Offload {
            flags: NEEDS_CSUM,
            gso_type,
            hdr_len: 0.into(),
            gso_size: self.size.into(),
            csum_start: u16::try_from(self.transport()).unwrap().into(),
            csum_offset: self.check_at().into(),
        }
    }

    fn gso_type(&self) -> u8 {
        match (self.protocol, self.is_v4) {
            (UDP, _) => 5,
            (_, true) => 1,
            (_, false) => 4,
        }
    }

    /// Checks a frame as its receiver would; returns the bytes behind its IP headers.
    fn check_ip<'a>(&self, frame: &'a [u8], index: u16) -> (IpAddress, IpAddress, &'a [u8]) {
        let packet = &frame[self.network()..];
        if self.is_v4 {
            let ip = Ipv4Packet::new_checked(packet).expect("a packet");
            assert!(ip.verify_checksum(), "of the IPv4 header");
            assert_eq!(usize::from(ip.total_len()), packet.len());
            assert_eq!(ip.ident(), self.id.wrapping_add(index));
            return (ip.src_addr().into(), ip.dst_addr().into(), &packet[ip.header_len().into()..]);
        }
        let ip = Ipv6Packet::new_checked(packet).expect("a packet");
        assert_eq!(ip.total_len(), packet.len());
        (ip.src_addr().into(), ip.dst_addr().into(), &packet[40 + 8 * self.ip_options..])
    }
}

fn finished(offload: &Offload, frame: &[u8]) -> Option<Vec<Vec<u8>>> {
    let (mut copy, mut frames) = (frame.to_vec(), Vec::new());
    let count = finish(offload, &mut copy, |front, back| frames.push([front, back].concat())).ok()?;
    assert_eq!(count, frames.len());
    Some(frames)
}

fn segments() -> impl Strategy<Value = Segment> {
    let headers = (any::<bool>(), prop::sample::select(vec![TCP, UDP]), 0_usize..3, 0_usize..4, 0_usize..11);
    let contents = (any::<u8>(), any::<u32>(), any::<u16>(), prop::collection::vec(any::<u8>(), 0..9000), 40_u16..2000);
    (headers, contents).prop_map(|((is_v4, protocol, tags, ip_options, tcp_options), contents)| {
        let (flags, sequence, id, payload, size) = contents;
        Segment { is_v4, protocol, tags, ip_options, tcp_options, flags, sequence, id, payload, size }
    })
}

/// A tunnel: the version of IP outside, its protocol, and the bytes between that and the packet inside.
#[derive(Debug, Clone, Copy)]
struct Tunnel {
    is_v4: bool,
    /// Units of eight bytes of an extension header for IPv6, as Linux's own tunnels have one.
    extensions: usize,
    protocol: u8,
    has_checksum: bool,
}

const IPV4_INSIDE: u8 = 4;
const IPV6_INSIDE: u8 = 41;
const GRE: u8 = 47;

impl Tunnel {
    /// Returns a segment inside, with its offload header as a kernel has it.
    fn around(self, segment: &Segment) -> (Offload, Vec<u8>) {
        let inside = segment.frame();
        let mut gre = vec![0, 0, 8, 0];
        if self.has_checksum {
            // A wrong one: each frame needs another.
            gre.extend([0xab, 0xcd, 0, 0]);
            gre[0] = 0x80;
        }
        let (head, inside): (&[u8], &[u8]) = match self.protocol {
            // VXLAN, network 5.
            UDP => (&[0x12, 0xb5, 0x12, 0xb5, 0, 0, 0, u8::from(self.has_checksum), 8, 0, 0, 0, 0, 0, 5, 0], &inside),
            GRE => (&gre, &inside[segment.network()..]),
            _ => (&[], &inside[segment.network()..]),
        };
        let payload = [head, inside].concat();
        let outside = Segment { protocol: self.protocol, ..self.outside(segment) };
        let mut frame = outside.frame()[..outside.transport()].to_vec();
        let len = payload.len() + if self.is_v4 { 20 } else { 8 * self.extensions };
        let at = outside.network() + if self.is_v4 { 2 } else { 4 };
        frame[at..at + 2].copy_from_slice(&u16::try_from(len).unwrap().to_be_bytes());
        frame.extend(&payload);
        let before = frame.len() - segment.frame().len() + segment.transport();
        let csum_start = u16::try_from(before).unwrap().into();
        (Offload { csum_start, ..segment.offload(segment.gso_type()) }, frame)
    }

    /// Checks a frame as the end of the tunnel would; returns the bytes inside.
    fn check<'a>(self, segment: &Segment, frame: &'a [u8], index: usize) -> &'a [u8] {
        let (from, to, rest) = self.outside(segment).check_ip(frame, u16::try_from(index).unwrap());
        match self.protocol {
            UDP => {
                let udp = UdpPacket::new_checked(rest).expect("a datagram");
                assert_eq!((usize::from(udp.len()), udp.checksum() != 0), (rest.len(), self.has_checksum));
                assert!(!self.has_checksum || udp.verify_checksum(&from, &to));
                &rest[16..]
            }
            GRE if self.has_checksum => {
                let words =
                    rest.chunks(2).map(|two| u32::from(two[0]) << 8 | two.get(1).map_or(0, |it| u32::from(*it)));
                assert_eq!(words.sum::<u32>() % 0xffff, 0, "the checksum of GRE");
                &rest[8..]
            }
            GRE => &rest[4..],
            _ => rest,
        }
    }

    fn outside(self, segment: &Segment) -> Segment {
        let ip_options = if self.is_v4 { 0 } else { self.extensions };
        Segment { is_v4: self.is_v4, tags: 0, ip_options, ..segment.clone() }
    }
}

fn tunnels() -> impl Strategy<Value = Tunnel> {
    let protocols = prop::sample::select(vec![UDP, GRE, IPV4_INSIDE, IPV6_INSIDE]);
    let all = (any::<bool>(), 0_usize..3, protocols, any::<bool>());
    all.prop_map(|(is_v4, extensions, protocol, has_checksum)| Tunnel { is_v4, extensions, protocol, has_checksum })
}

proptest! {
    #[test]
    fn a_segment_in_a_tunnel_is_cut_to_what_it_would_be_outside(segment in segments(), tunnel in tunnels()) {
        let ip_options = if segment.is_v4 { segment.ip_options } else { 0 };
        let segment = Segment { ip_options, ..segment };
        let (offload, frame) = tunnel.around(&segment);
        prop_assert!(is_in_tunnel(&offload, &frame));
        let direct = segment.offload(segment.gso_type());
        prop_assert!(!is_in_tunnel(&direct, &segment.frame()));
        let checked = Offload { flags: 0, csum_start: 0.into(), csum_offset: 0.into(), ..direct };
        prop_assert!(!is_in_tunnel(&checked, &segment.frame()));
        let expected = finished(&direct, &segment.frame()).expect("it is cut");
        let frames = finished(&offload, &frame).expect("it is cut");
        prop_assert_eq!(frames.len(), expected.len());
        for (index, (one, expected)) in frames.iter().zip(&expected).enumerate() {
            let inside = tunnel.check(&segment, one, index);
            prop_assert!(expected.ends_with(inside), "frame {}", index);
        }
    }

    #[test]
    fn a_segment_that_was_cut_is_whole_frames_with_the_same_bytes(segment in segments()) {
        let frame = segment.frame();
        let frames = finished(&segment.offload(segment.gso_type()), &frame).expect("it is cut");
        prop_assert_eq!(frames.len(), segment.payload.len().div_ceil(segment.size.into()).max(1));
        let (mut payload, last) = (Vec::new(), frames.len() - 1);
        for (index, one) in frames.iter().enumerate() {
            prop_assert_eq!(&one[..segment.network()], &frame[..segment.network()], "Ethernet's header");
            let (from, to, rest) = segment.check_ip(one, u16::try_from(index).unwrap());
            let bytes = if segment.protocol == TCP {
                let tcp = TcpPacket::new_checked(rest).expect("a segment");
                prop_assert!(tcp.verify_checksum(&from, &to), "frame {}", index);
                let expected = segment.sequence.wrapping_add(u32::try_from(payload.len()).unwrap());
                prop_assert_eq!(u32::from_ne_bytes(tcp.seq_number().0.to_ne_bytes()), expected);
                let kept = |flag, kept| if kept { segment.flags & flag } else { 0 };
                let flags = segment.flags & 0x76 | kept(0x09, index == last) | kept(0x80, index == 0);
                prop_assert_eq!(rest[13], flags, "frame {} of {}", index, frames.len());
                &rest[usize::from(tcp.header_len())..]
            } else {
                let udp = UdpPacket::new_checked(rest).expect("a datagram");
                prop_assert!(udp.verify_checksum(&from, &to) && udp.checksum() != 0);
                prop_assert_eq!(usize::from(udp.len()), rest.len());
                &rest[8..]
            };
            prop_assert!(bytes.len() == usize::from(segment.size) || index == last);
            payload.extend_from_slice(bytes);
        }
        prop_assert!(payload == segment.payload);
    }

    #[test]
    fn a_packet_that_a_card_has_joined_asks_for_the_check_sums_of_its_segments(segment in segments(), found: u16) {
        let ip_options = if segment.is_v4 { segment.ip_options } else { 0 };
        let segment = Segment { ip_options, ..segment };
        let (offload, mut frame) = (segment.offload(segment.gso_type()), segment.frame());
        let whole = [offload.as_bytes(), &frame].concat();
        let at = segment.transport() + usize::from(segment.check_at());
        frame[at..at + 2].copy_from_slice(&found.to_be_bytes());
        // DATA_VALID: the card has checked them.
        let checked = Offload { flags: 2, csum_start: 0.into(), csum_offset: 0.into(), ..offload };
        let mut joined = [checked.as_bytes(), &frame].concat();
        for _ in 0..2 {
            ask_for_checksums(&mut joined);
            prop_assert_eq!(joined[0], 2 | NEEDS_CSUM);
            prop_assert_eq!(&joined[1..], &whole[1..]);
        }
    }

    #[test]
    fn the_sum_of_an_sctp_packet_is_computed_as_its_protocol_has_it(segment in segments()) {
        // Its header is as long as one of TCP without options is at least, and its sum is where that is not.
        let segment = Segment { protocol: 132, ..segment };
        let mut frame = segment.frame();
        let start = segment.transport();
        frame.resize(frame.len().max(start + 12), 0);
        let offload = Offload { csum_offset: 8.into(), ..segment.offload(0) };
        let mut packet = [offload.as_bytes(), &frame].concat();
        finish_sctp(&mut packet);
        prop_assert_eq!(&packet[..HEADER_LEN], [0; HEADER_LEN]);
        let at = start + 8;
        frame[at..at + 4].fill(0);
        // Bit by bit (RFC 9260, appendix A).
        let crc = frame[start..].iter().fold(u32::MAX, |crc, byte| {
            (0..8).fold(crc ^ u32::from(*byte), |crc, _| if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 })
        });
        frame[at..at + 4].copy_from_slice(&(!crc).to_le_bytes());
        prop_assert!(packet[HEADER_LEN..] == frame);
        // One that is no SCTP is left alone.
        let other = [Offload { csum_offset: 8.into(), ..offload }.as_bytes(), &Segment { protocol: UDP, ..segment }.frame()].concat();
        let mut packet = other.clone();
        finish_sctp(&mut packet);
        prop_assert!(packet == other);
    }

    #[test]
    fn a_check_sum_that_was_left_is_computed(segment in segments()) {
        let frame = segment.frame();
        let frames = finished(&segment.offload(0), &frame).expect("it is finished");
        prop_assert_eq!(frames.len(), 1);
        let at = segment.transport();
        let (from, to) = match segment.is_v4 {
            true => {
                let ip = Ipv4Packet::new_unchecked(&frames[0][segment.network()..]);
                (IpAddress::from(ip.src_addr()), IpAddress::from(ip.dst_addr()))
            }
            false => {
                let ip = Ipv6Packet::new_unchecked(&frames[0][segment.network()..]);
                (IpAddress::from(ip.src_addr()), IpAddress::from(ip.dst_addr()))
            }
        };
        let right = match segment.protocol {
            TCP => TcpPacket::new_unchecked(&frames[0][at..]).verify_checksum(&from, &to),
            _ => UdpPacket::new_unchecked(&frames[0][at..]).verify_checksum(&from, &to),
        };
        prop_assert!(right);
        let check = at + usize::from(segment.check_at());
        prop_assert!(frames[0][..check] == frame[..check] && frames[0][check + 2..] == frame[check + 2..]);
    }

    /// Random header bytes, and random frame bytes.
    #[test]
    fn whatever_it_says_nothing_panics_and_little_comes_of_it(
        header in prop::array::uniform10(any::<u8>()),
        bytes in prop::collection::vec(any::<u8>(), 14..400),
    ) {
        let offload = Offload::read_from_bytes(&header).unwrap();
        let _ = is_in_tunnel(&offload, &bytes);
        if let Some(frames) = finished(&offload, &bytes) {
            prop_assert!(frames.len() <= GSO_SEGMENTS_MAX);
        }
    }

    /// A header and bytes that are nearly right.
    #[test]
    fn nor_if_it_is_nearly_right(
        segment in segments(),
        tunnel in prop::option::of(tunnels()),
        gso_type in prop::sample::select(vec![1_u8, 3, 4, 5, 0x81, 0x84]),
        spoilt in prop::collection::vec((0_usize..160, any::<u8>()), 0..4),
        spoilt_header in prop::collection::vec((0_usize..HEADER_LEN, any::<u8>()), 0..2),
        len in 14_usize..9000,
    ) {
        let plain = (segment.offload(gso_type), segment.frame());
        let (whole, mut frame) = tunnel.map_or(plain, |tunnel| tunnel.around(&segment));
        frame.truncate(len.max(14));
        for (at, value) in spoilt {
            if let Some(byte) = frame.get_mut(at) { *byte = value; }
        }
        let mut header: [u8; HEADER_LEN] = zerocopy::transmute!(Offload { gso_type, ..whole });
        for (at, value) in spoilt_header { header[at] = value; }
        let offload = Offload::read_from_bytes(&header).unwrap();
        if let Some(frames) = finished(&offload, &frame) {
            prop_assert!(frames.len() <= GSO_SEGMENTS_MAX);
            let (longest, whole) = (frames.iter().map(Vec::len).max(), frame.len());
            prop_assert!(longest.is_none_or(|longest| longest <= whole));
        }
    }
}

fn plain(protocol: u8) -> Segment {
    Segment {
        is_v4: true,
        protocol,
        tags: 0,
        ip_options: 0,
        tcp_options: 0,
        flags: 0x10,
        sequence: 1,
        id: 1,
        payload: vec![7; 3000],
        size: 1000,
    }
}

/// Wireshark calls TCP's other zero wrong (RFC 1624), and UDP's first zero no checksum (RFC 768).
#[test]
fn a_check_sum_of_zero_is_the_zero_that_its_protocol_has() {
    for (protocol, zero) in [(TCP, 0), (UDP, 0xffff)] {
        let mut segment = Segment { payload: vec![0; 1000], ..plain(protocol) };
        let check_at = segment.transport() + usize::from(segment.check_at());
        let check = |segment: &Segment, gso_type| {
            let frames = finished(&segment.offload(gso_type), &segment.frame()).expect("it is finished");
            u16::from_be_bytes([frames[0][check_at], frames[0][check_at + 1]])
        };
        // Choose bytes that make the whole sum zero.
        let rest = check(&segment, 0);
        segment.payload[..2].copy_from_slice(&rest.to_be_bytes());
        for gso_type in [0, segment.gso_type()] {
            assert_eq!(check(&segment, gso_type), zero, "protocol {protocol}, cut as {gso_type}");
        }
    }
}

#[test]
fn what_is_not_cut_here_is_refused() {
    let whole = plain(TCP);
    let frame = whole.frame();
    let offload = whole.offload(1);
    assert_eq!(finished(&offload, &frame).expect("it is whole").len(), 3);
    let refused = |offload: Offload, frame: &[u8], why: &str| assert!(finished(&offload, frame).is_none(), "{why}");
    refused(Offload { gso_type: 3, ..offload }, &frame, "fragments of UDP");
    refused(Offload { gso_type: 4, ..offload }, &frame, "it is not IPv6");
    refused(Offload { gso_type: 5, ..offload }, &frame, "it is not UDP");
    refused(Offload { flags: 0, ..offload }, &frame, "its checksum is not left");
    refused(Offload { gso_size: 0.into(), ..offload }, &frame, "pieces of nothing");
    refused(Offload { gso_size: 11.into(), ..offload }, &frame, "more pieces than are made");
    refused(Offload { csum_start: 35.into(), ..offload }, &frame, "TCP begins elsewhere");
    refused(Offload { csum_offset: 6.into(), ..offload }, &frame, "that is not where TCP has it");
    refused(offload, &frame[..53], "not even its headers are there");
    let mut fragment = frame.clone();
    fragment[20] = 0x20;
    refused(offload, &fragment, "a fragment");
    let mut short = frame.clone();
    short[46] = 0x40;
    refused(offload, &short, "a header of 16 bytes");
}
