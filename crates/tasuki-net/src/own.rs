//! Checks that the IP addresses in a frame belong to the node that sent it, if the node's addresses are known.
//!
//! | frame | passes if |
//! |---|---|
//! | ARP | sender's hardware address is the frame's source; sender's protocol address is the node's, or 0.0.0.0 (a probe: RFC 5227) |
//! | IPv4 | source is the node's; or 0.0.0.0, in a request to a DHCP server |
//! | IPv6 | source is the node's, or the link-local address that follows from its station address (RFC 4291, appendix A); or ::, in an ICMPv6 query |
//! | neighbour discovery | also: a link-layer address in an option is the frame's source; an advertisement's target is the node's. No node is a router: router advertisements and redirects never pass |
//! | reverse ARP | it asks for the protocol address of its own source, and states none (RFC 903): so a machine is announced that came from another host |
//! | a frame that is cut off or malformed | never |
//! | a frame whose checksum is left to its receivers, in a place that decides here | never: they would write what was checked |
//! | any other | always: it says nothing about IP |
//!
//! The same holds behind VLAN tags, and in SNAP (RFC 1042). A frame whose chain of headers exceeds [`CHECKED_MAX`] bytes counts as cut off: the
//! chain would hide what follows it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use tasuki_shm::vni::directory::Mac;

use crate::switch::ADDRESSES_LEN;

/// Maximum number of first bytes that the check reads of a frame.
pub const CHECKED_MAX: usize = 256;

/// EtherTypes.
const IPV4: u16 = 0x0800;
const ARP: u16 = 0x0806;
const RARP: u16 = 0x8035;
const IPV6: u16 = 0x86dd;
const TAGS: [u16; 3] = [0x8100, 0x88a8, 0x9100];

/// A larger number is an EtherType, and no length (IEEE 802.3).
const LENGTH_MAX: u16 = 1500;

/// What stands between a length in place of an EtherType and the EtherType (RFC 1042).
const SNAP: [u8; 6] = [0xaa, 0xaa, 3, 0, 0, 0];

/// IP protocol numbers.
const UDP: u8 = 17;
const ICMPV6: u8 = 58;
const FRAGMENT: u8 = 44;
const AUTHENTICATION: u8 = 51;
/// Headers before ICMPv6 that state their length in units of eight bytes: hop-by-hop, routing, destination, mobility,
/// HIP, Shim6.
const EXTENSIONS: [u8; 6] = [0, 43, 60, 135, 139, 140];

/// ICMPv6 types of neighbour discovery (RFC 4861).
const ROUTER_SOLICITATION: u8 = 133;
const ROUTER_ADVERTISEMENT: u8 = 134;
const NEIGHBOUR_SOLICITATION: u8 = 135;
const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
const REDIRECT: u8 = 137;

/// IP addresses of a node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Own {
    /// IPv4 addresses.
    pub v4: Vec<Ipv4Addr>,
    /// IPv6 addresses, without the link-local one that follows from the station address.
    pub v6: Vec<Ipv6Addr>,
}

impl FromIterator<IpAddr> for Own {
    fn from_iter<I: IntoIterator<Item = IpAddr>>(addresses: I) -> Self {
        let mut own = Own::default();
        for address in addresses {
            match address {
                IpAddr::V4(address) => own.v4.push(address),
                IpAddr::V6(address) => own.v6.push(address),
            }
        }
        own
    }
}

/// Takes the first `N` bytes off the slice.
fn take<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
    let (first, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(*first)
}

fn skip(bytes: &mut &[u8], count: usize) -> Option<()> {
    *bytes = bytes.get(count..)?;
    Some(())
}

impl Own {
    /// Returns whether no address is known, so that every frame passes.
    pub fn is_empty(&self) -> bool {
        self.v4.is_empty() && self.v6.is_empty()
    }

    /// Returns whether the node may have sent the frame that begins with `front`, of at most [`CHECKED_MAX`] bytes.
    pub fn may_send(&self, front: &[u8]) -> bool {
        self.decided_by(front).is_some()
    }

    /// Returns how many of a frame's first bytes decide that the node may have sent it; `None` if it may not.
    pub fn decided_by(&self, front: &[u8]) -> Option<usize> {
        if self.is_empty() {
            return Some(ADDRESSES_LEN);
        }
        let mut rest = front;
        self.is_true(&mut rest)?.then(|| front.len() - rest.len())
    }

    /// Takes the bytes that decide. `None` if the frame is cut off.
    fn is_true(&self, front: &mut &[u8]) -> Option<bool> {
        let [_, from] = [take::<6>(front)?, take::<6>(front)?];
        let mut kind = u16::from_be_bytes(take(front)?);
        while TAGS.contains(&kind) {
            skip(front, 2)?;
            kind = u16::from_be_bytes(take(front)?);
        }
        if kind <= LENGTH_MAX && front.starts_with(&SNAP) {
            skip(front, SNAP.len())?;
            kind = u16::from_be_bytes(take(front)?);
        }
        match kind {
            ARP => self.is_arp_true(from, front),
            RARP => Self::is_reverse_arp_true(from, front),
            IPV4 => self.is_ipv4_true(front),
            IPV6 => self.is_ipv6_true(from, front),
            _ => Some(true),
        }
    }

    fn is_arp_true(&self, from: Mac, arp: &mut &[u8]) -> Option<bool> {
        let head: [u8; 6] = take(arp)?;
        skip(arp, 2)?;
        let hardware: Mac = take(arp)?;
        let protocol = Ipv4Addr::from(take::<4>(arp)?);
        // Ethernet and IPv4, with addresses of 6 and 4 bytes.
        let is_known = head == [0, 1, 8, 0, 6, 4];
        Some(is_known && hardware == from && (protocol.is_unspecified() || self.v4.contains(&protocol)))
    }

    fn is_reverse_arp_true(from: Mac, arp: &mut &[u8]) -> Option<bool> {
        // "Request reverse", of Ethernet and IPv4.
        let head: [u8; 8] = take(arp)?;
        let [sender, target] = [(); 2].map(|()| Some((take::<6>(arp)?, take::<4>(arp)?)));
        Some(head == [0, 1, 8, 0, 6, 4, 0, 3] && [sender?, target?] == [(from, [0; 4]); 2])
    }

    fn is_ipv4_true(&self, ip: &mut &[u8]) -> Option<bool> {
        let head: [u8; 12] = take(ip)?;
        let source = Ipv4Addr::from(take::<4>(ip)?);
        if !source.is_unspecified() {
            return Some(head[0] >> 4 == 4 && self.v4.contains(&source));
        }
        // From a DHCP client's port to a server's.
        skip(ip, (usize::from(head[0] & 0xf) * 4).checked_sub(16)?)?;
        let ports: [u8; 4] = take(ip)?;
        Some(head[9] == UDP && ports == [0, 68, 0, 67] && head[6] & 0x3f == 0 && head[7] == 0)
    }

    fn has_v6(&self, from: Mac, address: Ipv6Addr) -> bool {
        let [a, b, c, d, e, f] = from;
        let link_local = Ipv6Addr::from([0xfe, 0x80, 0, 0, 0, 0, 0, 0, a ^ 2, b, c, 0xff, 0xfe, d, e, f]);
        address == link_local || self.v6.contains(&address)
    }

    fn is_ipv6_true(&self, from: Mac, ip: &mut &[u8]) -> Option<bool> {
        let head: [u8; 8] = take(ip)?;
        let source = Ipv6Addr::from(take::<16>(ip)?);
        skip(ip, 16)?;
        let is_nobodys = source.is_unspecified();
        if head[0] >> 4 != 6 || !is_nobodys && !self.has_v6(from, source) {
            return Some(false);
        }
        let mut next = head[6];
        loop {
            next = match next {
                ICMPV6 => return self.is_icmp_true(from, is_nobodys, ip),
                FRAGMENT => {
                    let [next, _, high, low, ..]: [u8; 8] = take(ip)?;
                    if high != 0 || low & 0xf8 != 0 {
                        // Not the first fragment: the check has seen that one.
                        return Some(!is_nobodys);
                    }
                    next
                }
                kind if EXTENSIONS.contains(&kind) => {
                    let [next, len] = take(ip)?;
                    skip(ip, usize::from(len) * 8 + 6)?;
                    next
                }
                AUTHENTICATION => {
                    let [next, len] = take(ip)?;
                    skip(ip, usize::from(len) * 4 + 6)?;
                    next
                }
                _ => return Some(!is_nobodys),
            }
        }
    }

    fn is_icmp_true(&self, from: Mac, is_nobodys: bool, icmp: &mut &[u8]) -> Option<bool> {
        // The checksum is behind these two bytes.
        let [kind, _] = take(icmp)?;
        let discovers = (ROUTER_SOLICITATION..=REDIRECT).contains(&kind);
        if !discovers {
            // From ::, a node may ask whether an address is free, and report the groups it listens to (RFC 2710, RFC
            // 3810).
            return Some(!is_nobodys || matches!(kind, 131 | 132 | 143));
        }
        skip(icmp, 6)?;
        match kind {
            ROUTER_ADVERTISEMENT | REDIRECT => return Some(false),
            NEIGHBOUR_SOLICITATION => skip(icmp, 16)?,
            NEIGHBOUR_ADVERTISEMENT => {
                let target = Ipv6Addr::from(take::<16>(icmp)?);
                if is_nobodys || !self.has_v6(from, target) {
                    return Some(false);
                }
            }
            _ => {}
        }
        while let [option, len, rest @ ..] = *icmp {
            // The link-layer address of the sender, or of the target.
            if (1..=2).contains(option) && rest.first_chunk() != Some(&from) {
                return Some(false);
            }
            if *len == 0 {
                return Some(false);
            }
            skip(icmp, usize::from(*len) * 8)?;
        }
        icmp.is_empty().then_some(true)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MAC: Mac = [2, 0, 0, 0, 0, 1];
    const OTHER: Mac = [2, 0, 0, 0, 0, 2];
    const LOCAL: [u8; 16] = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xfe, 0, 0, 1];
    const OURS: [u8; 16] = [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7];
    const THEIRS: [u8; 16] = [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 8];

    fn own() -> Own {
        Own { v4: vec![Ipv4Addr::new(10, 0, 0, 1)], v6: vec![OURS.into()] }
    }

    fn ethernet(kind: &[u8], rest: &[u8]) -> Vec<u8> {
        [&OTHER[..], &MAC, kind, rest].concat()
    }

    fn arp(hardware: Mac, protocol: [u8; 4]) -> Vec<u8> {
        ethernet(&[8, 6], &[&[0, 1, 8, 0, 6, 4, 0, 2][..], &hardware, &protocol, &OTHER, &[10, 0, 0, 2]].concat())
    }

    fn rarp(operation: u8, [sender, target]: [Mac; 2], protocol: [u8; 4]) -> Vec<u8> {
        let head = [0, 1, 8, 0, 6, 4, 0, operation];
        ethernet(&[0x80, 0x35], &[&head[..], &sender, &[0; 4], &target, &protocol].concat())
    }

    fn ipv4(source: [u8; 4], protocol: u8, rest: &[u8]) -> Vec<u8> {
        let head = [0x45, 0, 0, 28, 0, 0, 0, 0, 64, protocol, 0, 0];
        ethernet(&[8, 0], &[&head[..], &source, &[10, 0, 0, 2], rest].concat())
    }

    fn ipv6(source: [u8; 16], next: u8, rest: &[u8]) -> Vec<u8> {
        ethernet(&[0x86, 0xdd], &[&[0x60, 0, 0, 0, 0, 0, next, 255][..], &source, &THEIRS, rest].concat())
    }

    fn discovery(kind: u8, target: [u8; 16], option: u8, mac: Mac) -> Vec<u8> {
        [&[kind, 0, 0, 0, 0, 0, 0, 0][..], &target, &[option, 1], &mac].concat()
    }

    /// Returns a frame with its EtherType in SNAP.
    fn snap(frame: &[u8]) -> Vec<u8> {
        ethernet(&[0, 64], &[&SNAP, &frame[12..]].concat())
    }

    fn hidden(kind: u8, len: u8, behind: &[u8]) -> Vec<u8> {
        [&[kind, len][..], &vec![0; usize::from(len) * 8 + 6], behind].concat()
    }

    #[test]
    fn the_table_holds() {
        let advertises = |target, mac| discovery(136, target, 2, mac);
        let asks = |mac| discovery(135, THEIRS, 1, mac);
        let (mine, dhcp) = ([10, 0, 0, 1], [0, 68, 0, 67, 0, 8, 0, 0]);
        let table = [
            ("ARP", arp(MAC, mine), true),
            ("a probe", arp(MAC, [0; 4]), true),
            ("another's hardware", arp(OTHER, mine), false),
            ("another's address", arp(MAC, [10, 0, 0, 2]), false),
            ("ARP that is cut off", arp(MAC, mine)[..30].to_vec(), false),
            (
                "ARP of another length",
                ethernet(&[8, 6], &[0, 1, 8, 0, 8, 4, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
                false,
            ),
            ("a machine that came", rarp(3, [MAC, MAC], [0; 4]), true),
            ("another's machine", rarp(3, [OTHER, OTHER], [0; 4]), false),
            ("a question for another's machine", rarp(3, [MAC, OTHER], [0; 4]), false),
            ("reverse ARP with an address", rarp(3, [MAC, MAC], mine), false),
            ("an answer in reverse ARP", rarp(4, [MAC, MAC], [0; 4]), false),
            ("reverse ARP that is cut off", rarp(3, [MAC, MAC], [0; 4])[..41].to_vec(), false),
            ("IPv4", ipv4(mine, 17, &[]), true),
            ("IPv4 of another", ipv4([10, 0, 0, 2], 17, &[]), false),
            ("DHCP", ipv4([0; 4], 17, &dhcp), true),
            ("nobody's IPv4", ipv4([0; 4], 17, &[0, 53, 0, 67, 0, 8, 0, 0]), false),
            ("nobody's TCP", ipv4([0; 4], 6, &dhcp), false),
            ("IPv4 that is none", ethernet(&[8, 0], &ipv6(OURS, 17, &[])[14..]), false),
            ("IPv6", ipv6(OURS, 17, &[]), true),
            ("its link-local", ipv6(LOCAL, 17, &[]), true),
            ("IPv6 of another", ipv6(THEIRS, 17, &[]), false),
            ("nobody's IPv6", ipv6([0; 16], 17, &[]), false),
            ("is it free?", ipv6([0; 16], 58, &discovery(135, OURS, 14, OTHER)), true),
            ("groups", ipv6([0; 16], 58, &[143, 0, 0, 0, 0, 0, 0, 1]), true),
            ("a question", ipv6(OURS, 58, &asks(MAC)), true),
            ("a question with another's", ipv6(OURS, 58, &asks(OTHER)), false),
            ("an answer", ipv6(OURS, 58, &advertises(OURS, MAC)), true),
            ("an answer for its link-local", ipv6(LOCAL, 58, &advertises(LOCAL, MAC)), true),
            ("an answer for another", ipv6(OURS, 58, &advertises(THEIRS, MAC)), false),
            ("an answer with another's", ipv6(OURS, 58, &advertises(OURS, OTHER)), false),
            ("an answer from nobody", ipv6([0; 16], 58, &advertises(OURS, MAC)), false),
            ("a router", ipv6(LOCAL, 58, &[134, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]), false),
            ("a redirection", ipv6(LOCAL, 58, &discovery(137, OURS, 2, MAC)), false),
            ("ping", ipv6(OURS, 58, &[128, 0, 0, 0, 0, 0, 0, 0]), true),
            ("options without end", ipv6(OURS, 58, &discovery(136, OURS, 2, MAC)[..25]), false),
            ("an option of length 0", ipv6(OURS, 58, &[&discovery(135, OURS, 14, MAC)[..], &[3, 0]].concat()), false),
            ("hidden", ipv6(OURS, 0, &hidden(58, 0, &advertises(THEIRS, MAC))), false),
            ("hidden twice", ipv6(OURS, 60, &hidden(43, 1, &hidden(58, 2, &advertises(THEIRS, MAC)))), false),
            ("hidden too far away", ipv6(OURS, 60, &hidden(58, 30, &advertises(OURS, MAC))), false),
            ("behind options", ipv6(OURS, 60, &hidden(58, 1, &advertises(OURS, MAC))), true),
            (
                "in a first fragment",
                ipv6(OURS, 44, &[&[58, 0, 0, 1, 0, 0, 0, 0][..], &advertises(THEIRS, MAC)].concat()),
                false,
            ),
            ("a second fragment", ipv6(OURS, 44, &[58, 0, 1, 0, 0, 0, 0, 0]), true),
            ("nothing of IP's", ethernet(&[0x88, 0xb5], &[]), true),
            ("a spanning tree", ethernet(&[0, 38], &[0x42, 0x42, 3, 0, 0, 0, 0, 0]), true),
            ("SNAP", snap(&arp(MAC, mine)), true),
            ("ARP of another in SNAP", snap(&arp(MAC, [10, 0, 0, 2])), false),
            ("an answer for another in SNAP", snap(&ipv6(OURS, 58, &advertises(THEIRS, MAC))), false),
            ("a short one", vec![0; 13], false),
        ];
        for (what, frame, passes) in table {
            let front = |frame: &[u8]| own().may_send(&frame[..frame.len().min(CHECKED_MAX)]);
            assert_eq!(front(&frame), passes, "{what}: {frame:02x?}");
            assert!(Own::default().may_send(&frame), "{what}: nothing is known");
            if frame.len() >= 14 {
                let tagged = [&frame[..12], &[0x88, 0xa8, 0, 5, 0x81, 0, 0, 7], &frame[12..]].concat();
                assert_eq!(front(&tagged), passes, "{what}, behind tags");
            }
        }
    }

    #[test]
    fn a_checksum_of_tcp_or_udp_decides_nothing() {
        let tcp = ipv4([10, 0, 0, 1], 6, &[0; 20]);
        assert_eq!(own().decided_by(&tcp), Some(14 + 16));
        let behind = ipv6(OURS, 60, &hidden(17, 1, &[0; 8]));
        assert_eq!(own().decided_by(&behind), Some(14 + 40 + 16));
        let ping = ipv6(OURS, 58, &[128, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(own().decided_by(&ping), Some(14 + 40 + 2), "its checksum is next");
        assert_eq!(own().decided_by(&arp(MAC, [10, 0, 0, 1])), Some(14 + 18));
    }

    /// A frame that passes the check, with some bytes changed and its end cut off.
    fn nearly() -> impl Strategy<Value = Vec<u8>> {
        let frames = prop_oneof![
            Just(arp(MAC, [10, 0, 0, 1])),
            Just(rarp(3, [MAC, MAC], [0; 4])),
            Just(ipv4([0; 4], 17, &[0, 68, 0, 67, 0, 8, 0, 0])),
            Just(ipv6(OURS, 58, &discovery(136, OURS, 2, MAC))),
            Just(ipv6(OURS, 60, &hidden(58, 1, &discovery(135, OURS, 1, MAC)))),
        ];
        let changes = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4);
        (frames, changes, any::<prop::sample::Index>(), any::<bool>()).prop_map(|(mut frame, changes, end, cuts)| {
            changes.into_iter().for_each(|(at, byte)| *at.get_mut(&mut frame) = byte);
            frame.truncate(if cuts { end.index(frame.len()) } else { frame.len() });
            frame
        })
    }

    proptest! {
        /// Receivers leave a sender's checksum there.
        #[test]
        fn what_does_not_decide_may_become_anything(
            mut frame in nearly(),
            more in prop::collection::vec(any::<u8>(), 0..40),
            at in any::<prop::sample::Index>(),
            sum in any::<[u8; 2]>(),
        ) {
            frame.extend(more);
            frame.truncate(CHECKED_MAX);
            let decided = own().decided_by(&frame).filter(|decided| decided + 2 <= frame.len());
            if let Some(decided) = decided {
                let at = decided + at.index(frame.len() - 1 - decided);
                frame[at..at + 2].copy_from_slice(&sum);
                prop_assert_eq!(own().decided_by(&frame), Some(decided));
            }
        }

        #[test]
        fn whatever_comes_is_answered(frame in prop_oneof![nearly(), prop::collection::vec(any::<u8>(), 0..CHECKED_MAX)]) {
            let may = own().may_send(&frame);
            // A frame that passes as IPv4 or ARP states no address of another node.
            if let Some([8, 0]) = frame.get(12..14).filter(|_| may) {
                prop_assert!(frame[26..30] == [10, 0, 0, 1] || frame[26..30] == [0; 4]);
            }
            if let Some([8, 6]) = frame.get(12..14).filter(|_| may) {
                prop_assert!(frame[6..12] == frame[22..28]);
            }
        }
    }
}
