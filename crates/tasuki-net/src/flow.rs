//! The flow that a frame belongs to: all its frames go by one queue, in order.

/// Number of first bytes of a frame that say which flow it belongs to: two VLAN tags, IPv6 and ports, or IPv4 with the
/// most options.
pub const FLOW_PREFIX: usize = 14 + 8 + 60 + 4;

/// Returns a number that all frames of a flow share. `front` begins a frame; it may say anything.
pub fn flow_of(front: &[u8]) -> u32 {
    const VLANS: [[u8; 2]; 2] = [[0x81, 0x00], [0x88, 0xa8]];
    let pair = |at: usize| front.get(at..at + 2).and_then(|bytes| <[u8; 2]>::try_from(bytes).ok()).unwrap_or_default();
    let mut at = 12;
    while at < 20 && VLANS.contains(&pair(at)) {
        at += 4;
    }
    let ip = at + 2;
    let byte = |at: usize| front.get(ip + at).copied().unwrap_or(0);
    // Addresses, and where the ports are if the frame has any.
    let (addresses, ports) = match pair(at) {
        [0x08, 0x00] => {
            let [high, low] = pair(ip + 6);
            // Only the first fragment has ports.
            let is_part = high & 0x3f != 0 || low != 0;
            let ports = usize::from(byte(0) & 15) * 4;
            (ip + 12..ip + 20, (!is_part && has_ports(byte(9))).then_some(ip + ports))
        }
        [0x86, 0xdd] => (ip + 8..ip + 40, has_ports(byte(6)).then_some(ip + 40)),
        _ => (0..12, None),
    };
    let ports = ports.map_or(0..0, |at| at..at + 4);
    let parts = [addresses, ports].map(|part| front.get(part).unwrap_or_default());
    // FNV-1a. Then all its bits count for all: a program that opens connections in a row has ports two apart, and with FNV-1a
    // alone four of these went by one of two rings in seven of eight cases.
    let all = parts.into_iter().flatten();
    let hash = all.fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193));
    mixed(hash)
}

/// The last step of MurmurHash3, for 32 bits.
fn mixed(mut hash: u32) -> u32 {
    for (shift, factor) in [(16, 0x85eb_ca6b), (13, 0xc2b2_ae35)] {
        hash = (hash ^ (hash >> shift)).wrapping_mul(factor);
    }
    hash ^ (hash >> 16)
}

/// Whether a protocol over IP begins with two ports: TCP, UDP, SCTP.
fn has_ports(protocol: u8) -> bool {
    matches!(protocol, 6 | 17 | 132)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn ipv4(ports: [u8; 4], protocol: u8, fragment: [u8; 2]) -> Vec<u8> {
        let ip = [&[0x45, 0, 0, 60, 0, 0], &fragment[..], &[64, protocol, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2]].concat();
        [&[2; 12][..], &[8, 0], &ip, &ports, &[0; 30]].concat()
    }

    #[test]
    fn frames_of_a_flow_share_a_number_and_flows_spread() {
        let of = |port: u8| flow_of(&ipv4([0x13, port, 0, 80], 6, [0, 0]));
        let rings: BTreeSet<u32> = (0..=255).map(|port| of(port) % 4).collect();
        assert_eq!(rings.len(), 4, "256 connections use all of four rings");
        let counts = (0..4).map(|ring| (0..=255).filter(|port| of(*port) % 4 == ring).count());
        assert!(counts.clone().all(|count| (32..=96).contains(&count)), "{:?}", counts.collect::<Vec<_>>());
        // Ports in a row, of which every second is used, by the low bits and by the high ones.
        let in_a_row = |first: u16| {
            (0..4).map(move |at| flow_of(&ipv4((u32::from(first + 2 * at) << 16 | 80).to_be_bytes(), 6, [0, 0])))
        };
        let by_one = |way: fn(u32) -> u32| {
            (0..1000).filter(|row| in_a_row(32_768 + 8 * row).map(way).collect::<BTreeSet<_>>().len() == 1).count()
        };
        assert!(by_one(|flow| flow % 2) < 250 && by_one(|flow| flow >> 31) < 250, "one in eight is usual");
        let mut other = ipv4([0x13, 1, 0, 80], 6, [0, 0]);
        other[60] = 77;
        other[14 + 4] = 9;
        assert_eq!(flow_of(&other), of(1), "what is in the frame does not count, nor its number");
        // Only the first fragment of a packet has ports, so none goes by them.
        let part = |ports, fragment| flow_of(&ipv4(ports, 17, fragment));
        assert_eq!(part([1, 2, 3, 4], [0x20, 0]), part([9, 9, 9, 9], [0, 185]));
        // Behind a VLAN tag as well.
        let tagged = |port: u8| {
            let plain = ipv4([0x13, port, 0, 80], 6, [0, 0]);
            flow_of(&[&plain[..12], &[0x81, 0, 0, 7], &plain[12..]].concat())
        };
        assert_eq!(tagged(5), of(5));
    }

    #[test]
    fn no_frame_is_too_short_or_too_odd() {
        let whole = ipv4([1, 2, 3, 4], 6, [0, 0]);
        for len in 0..whole.len() {
            flow_of(&whole[..len]);
        }
        let ipv6 = [&[2; 12][..], &[0x86, 0xdd], &[0x60, 0, 0, 0, 0, 8, 17, 64], &[1; 32], &[0, 1, 0, 2]].concat();
        assert_ne!(flow_of(&ipv6), flow_of(&ipv6[..50]));
        flow_of(&[0xff; 12]);
    }
}
