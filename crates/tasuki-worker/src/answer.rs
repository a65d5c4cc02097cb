//! Answers to ARP requests and to ICMP echo requests (`ping`), made from the frame that asks.
//!
//! All changes are in the first 64 bytes of a frame, which can be undone if the worker dies while the frame is
//! pending.

use std::net::Ipv4Addr;

use tasuki_net::nic::Mac;

/// Positions of the parts of a frame: both protocols directly in Ethernet, IPv4 without options.
const KIND: usize = 12;
const BODY: usize = 14;
const ARP_LEN: usize = 28;
const ICMP: usize = BODY + 20;
const ICMP_LEN: usize = 8;

/// Ethernet, IPv4, addresses of 6 and 4 bytes (RFC 826).
const ARP_HEAD: [u8; 6] = [0, 1, 8, 0, 6, 4];
const ARP_REQUEST: [u8; 2] = [0, 1];
const ARP_REPLY: [u8; 2] = [0, 2];
const PROTOCOL_ICMP: u8 = 1;
const ECHO_REQUEST: u8 = 8;
/// Time to live of an answer. Its sender sets it (RFC 1122, 3.2.1.7): the request's may be spent.
const TTL: u8 = 64;

/// Turns `frame` into its answer if it asks for the owner of these addresses, and returns true. Otherwise leaves it
/// unchanged and returns false.
pub fn answer(frame: &mut [u8], mac: Mac, address: Ipv4Addr) -> bool {
    match frame.get(KIND..BODY) {
        Some([8, 6]) => arp(frame, mac, address.octets()),
        Some([8, 0]) => echo(frame, mac, address.octets()),
        _ => false,
    }
}

fn arp(frame: &mut [u8], mac: Mac, address: [u8; 4]) -> bool {
    let Some(body) = frame.get_mut(BODY..BODY + ARP_LEN) else { return false };
    if body[..6] != ARP_HEAD || body[6..8] != ARP_REQUEST || body[24..28] != address {
        return false;
    }
    // The asker becomes the target, and we become the sender.
    body[6..8].copy_from_slice(&ARP_REPLY);
    body.copy_within(8..18, 18);
    body[8..14].copy_from_slice(&mac.0);
    body[14..18].copy_from_slice(&address);
    turn_round(frame, mac);
    true
}

fn echo(frame: &mut [u8], mac: Mac, address: [u8; 4]) -> bool {
    if frame.len() < ICMP + ICMP_LEN || frame[..6] != mac.0 {
        return false;
    }
    let ip = &mut frame[BODY..];
    // Check for version 4 without options; no fragment, since no kernel has reassembled it; our address; an echo
    // request.
    let whole = ip[6] & 0x3f == 0 && ip[7] == 0;
    if ip[0] != 0x45 || !whole || ip[9] != PROTOCOL_ICMP || ip[16..20] != address || ip[20..22] != [ECHO_REQUEST, 0] {
        return false;
    }
    // The addresses leave the checksum as it is: the header holds the same words in another order.
    let from = [ip[12], ip[13], ip[14], ip[15]];
    ip[12..16].copy_from_slice(&address);
    ip[16..20].copy_from_slice(&from);
    // Each of these bytes is the upper one of its word: time to live and protocol, type and code.
    let was = std::mem::replace(&mut ip[8], TTL);
    adjust(&mut ip[10..12], was, TTL);
    ip[20] = 0;
    adjust(&mut ip[22..24], ECHO_REQUEST, 0);
    turn_round(frame, mac);
    true
}

/// Adjusts a checksum by the amount by which the upper byte of a word changed (RFC 1624), so that a frame damaged on its
/// way here stays damaged.
fn adjust(checksum: &mut [u8], from: u8, to: u8) {
    let word = u16::from_be_bytes([checksum[0], checksum[1]]);
    let sum = u32::from(word) + (u32::from(from) << 8) + u32::from(!(u16::from(to) << 8));
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = u16::try_from((sum & 0xffff) + (sum >> 16)).expect("a sum of three words carries two bits");
    checksum.copy_from_slice(&sum.to_be_bytes());
}

fn turn_round(frame: &mut [u8], mac: Mac) {
    frame.copy_within(6..12, 0);
    frame[6..12].copy_from_slice(&mac.0);
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: Mac = Mac([2, 0, 0, 0, 0, 9]);
    const ASKER: [u8; 6] = [2, 0, 0, 0, 0, 7];
    const US: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);
    const THEM: [u8; 4] = [192, 0, 2, 1];

    /// Returns the checksum of RFC 1071: 0 if the sum in `bytes` is right.
    fn sum(bytes: &[u8]) -> u16 {
        let words = bytes.chunks(2).map(|word| u32::from(word[0]) << 8 | u32::from(*word.get(1).unwrap_or(&0)));
        let sum: u32 = words.sum();
        let folded = (sum & 0xffff) + (sum >> 16);
        !u16::try_from((folded & 0xffff) + (folded >> 16)).unwrap()
    }

    fn echo_request(data: &[u8]) -> Vec<u8> {
        let mut icmp = [&[8, 0, 0, 0, 0x12, 0x34, 0, 1], data].concat();
        let of_icmp = sum(&icmp).to_be_bytes();
        icmp[2..4].copy_from_slice(&of_icmp);
        let len = u16::try_from(20 + icmp.len()).unwrap().to_be_bytes();
        let mut ip = [&[0x45, 0, len[0], len[1], 0, 7, 0x40, 0, 64, 1, 0, 0][..], &THEM, &US.octets()].concat();
        let of_ip = sum(&ip).to_be_bytes();
        ip[10..12].copy_from_slice(&of_ip);
        [&MAC.0[..], &ASKER, &[8, 0], &ip, &icmp].concat()
    }

    fn arp_request(of: Ipv4Addr) -> Vec<u8> {
        [&[0xff; 6][..], &ASKER, &[8, 6], &ARP_HEAD, &[0, 1], &ASKER, &THEM, &[0; 6], &of.octets(), &[0; 18]].concat()
    }

    #[test]
    fn an_echo_request_is_answered_with_right_sums() {
        // The checksum of the second one carries when the type is taken out of it.
        for data in [&b"one, two, three"[..], &[0xf7, 0xff, 0xed, 0xca], &[0; 1400]] {
            let mut frame = echo_request(data);
            assert!(answer(&mut frame, MAC, US));
            assert_eq!((&frame[..6], &frame[6..12]), (&ASKER[..], &MAC.0[..]));
            assert_eq!((&frame[26..30], &frame[30..34]), (&US.octets()[..], &THEM[..]));
            assert_eq!((sum(&frame[14..34]), sum(&frame[34..])), (0, 0), "{data:?}");
            assert_eq!((frame[34], &frame[42..]), (0, data));
        }
        // The last router on the way here left it a time to live of one.
        for ttl in [0, 1, 63, 64, 65, 255] {
            let mut frame = echo_request(b"data");
            frame[22] = ttl;
            frame[24..26].fill(0);
            let of_ip = sum(&frame[14..34]).to_be_bytes();
            frame[24..26].copy_from_slice(&of_ip);
            assert!(answer(&mut frame, MAC, US));
            assert_eq!((frame[22], sum(&frame[14..34]), sum(&frame[34..])), (64, 0, 0), "{ttl}");
        }
    }

    #[test]
    fn an_arp_request_is_answered_by_who_has_the_address() {
        let mut frame = arp_request(US);
        assert!(answer(&mut frame, MAC, US));
        let reply =
            [&ASKER[..], &MAC.0, &[8, 6], &ARP_HEAD, &[0, 2], &MAC.0, &US.octets(), &ASKER, &THEM, &[0; 18]].concat();
        assert_eq!(frame, reply);
    }

    /// All of these frames must stay unchanged, to the last byte.
    #[test]
    fn what_is_not_for_us_is_not_answered() {
        let spoilt = |at: usize, value: u8| {
            let mut frame = echo_request(b"data");
            frame[at] = value;
            frame
        };
        let mut frames = vec![
            arp_request(Ipv4Addr::new(192, 0, 2, 3)),
            spoilt(0, 0xff),
            spoilt(14, 0x46),
            spoilt(20, 0x20),
            spoilt(21, 1),
            spoilt(23, 17),
            spoilt(33, 9),
            spoilt(34, 0),
            spoilt(35, 1),
        ];
        // A reply, and truncated requests.
        frames.push({
            let mut reply = arp_request(US);
            reply[21] = 2;
            reply
        });
        frames.extend((0..42).map(|len| echo_request(b"data")[..len].to_vec()));
        frames.extend((0..42).map(|len| arp_request(US)[..len].to_vec()));
        for frame in frames {
            let mut same = frame.clone();
            assert!(!answer(&mut same, MAC, US), "{frame:?}");
            assert_eq!(same, frame);
        }
    }
}
