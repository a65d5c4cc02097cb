//! Steering: selects the queue pair for a frame (§5.1.6.5.6, §5.1.6.5.7).

use crate::toeplitz;

pub const KEY_LEN: usize = 40;
pub const TABLE_LEN: usize = 128;

const ETHERNET_LEN: usize = 14;
const TCP: u8 = 6;
const UDP: u8 = 17;

/// Hash types, §5.1.6.4.3.1.
const IPV4: u32 = 1 << 0;
const TCPV4: u32 = 1 << 1;
const UDPV4: u32 = 1 << 2;
const IPV6: u32 = 1 << 3;
const TCPV6: u32 = 1 << 4;
const UDPV6: u32 = 1 << 5;
/// All types that the model supports: it does not follow IPv6 extension headers.
pub const TYPES: u32 = IPV4 | TCPV4 | UDPV4 | IPV6 | TCPV6 | UDPV6;

/// Key for automatic steering: the one of Microsoft's examples.
const OWN_KEY: [u8; KEY_LEN] = [
    0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f, 0xb0, 0xd0, 0xca, 0x2b,
    0xcb, 0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30, 0xf2, 0x0c, 0x6a, 0x42, 0xb7, 0x3b, 0xbe, 0xac,
    0x01, 0xfa,
];

/// A driver's settings for hash and table.
#[derive(Debug)]
pub struct Rss {
    types: u32,
    unclassified: u16,
    /// Indirection table of pairs; its length is a power of two.
    table: Vec<u16>,
    max_tx: u16,
    key: [u8; KEY_LEN],
}

impl Rss {
    /// Parses a command's data; returns `None` if it is malformed, or asks for something that the device lacks. The
    /// table must not name pairs for which `is_on` says that their receive queue is off.
    pub fn parse(bytes: &[u8], pairs: u16, is_on: impl Fn(u16) -> bool) -> Option<Self> {
        let (types, rest) = bytes.split_first_chunk()?;
        let ([mask, unclassified], rest) = half_words::<2>(rest)?;
        let len = usize::from(mask) + 1;
        let (table, rest) = rest.split_at_checked(2 * len)?;
        let ([max_tx], rest) = half_words::<1>(rest)?;
        let (&key_len, rest) = rest.split_first()?;
        let types = u32::from_le_bytes(*types);
        let table: Vec<u16> = table.as_chunks().0.iter().map(|half| u16::from_le_bytes(*half)).collect();
        let good = types & !TYPES == 0
            && len.is_power_of_two()
            && len <= TABLE_LEN
            && table.iter().chain([&unclassified]).all(|&pair| pair < pairs && is_on(pair))
            && (1..=pairs).contains(&max_tx)
            && rest.len() == usize::from(key_len)
            && rest.len() <= KEY_LEN;
        let mut key = [0; KEY_LEN];
        key.get_mut(..rest.len())?.copy_from_slice(rest);
        good.then_some(Rss { types, unclassified, table, max_tx, key })
    }
}

fn half_words<const N: usize>(bytes: &[u8]) -> Option<([u16; N], &[u8])> {
    let (halves, rest) = bytes.split_at_checked(2 * N)?;
    let mut words = [0; N];
    words.iter_mut().zip(halves.as_chunks().0).for_each(|(word, half)| *word = u16::from_le_bytes(*half));
    Some((words, rest))
}

#[derive(Debug)]
pub enum Steering {
    /// The device's choice among this many pairs.
    Automatic(u16),
    ByTable(Rss),
}

impl Default for Steering {
    fn default() -> Self {
        Steering::Automatic(1)
    }
}

impl Steering {
    /// Returns the number of pairs through which the driver may send.
    pub fn transmit_pairs(&self) -> u16 {
        match self {
            Steering::Automatic(pairs) => *pairs,
            Steering::ByTable(rss) => rss.max_tx,
        }
    }

    /// Returns the pair for a frame. `is_on` says which pairs have their receive queue on: with automatic steering
    /// the device avoids the others.
    #[inline]
    pub fn pair_of(&self, frame: &[u8], is_on: impl Fn(u16) -> bool) -> u16 {
        match self {
            Steering::Automatic(1) => 0,
            Steering::Automatic(pairs) => {
                let pair = hash(TYPES, &OWN_KEY, frame).map_or(0, |hash| (hash % u32::from(*pairs)) as u16);
                if is_on(pair) { pair } else { (0..*pairs).find(|&other| is_on(other)).unwrap_or(pair) }
            }
            Steering::ByTable(rss) => match hash(rss.types, &rss.key, frame) {
                Some(hash) => rss.table[hash as usize & (rss.table.len() - 1)],
                None => rss.unclassified,
            },
        }
    }
}

/// Returns the hash of a frame, if one of `types` applies to it.
fn hash(types: u32, key: &[u8; KEY_LEN], frame: &[u8]) -> Option<u32> {
    let mut input = [0; 36];
    let len = hashed(types, frame, &mut input)?;
    let word = |i: usize| key.as_chunks::<4>().0.get(i).map_or(0, |word| u32::from_be_bytes(*word));
    Some(toeplitz::hash(word, &input[..len]))
}

/// Copies the fields to hash from a frame to `input`; returns their length in bytes.
fn hashed(types: u32, frame: &[u8], input: &mut [u8; 36]) -> Option<usize> {
    let (ethernet, packet) = frame.split_at_checked(ETHERNET_LEN)?;
    let (addresses, protocol, ports, [tcp, udp, plain]) = match (ethernet[12], ethernet[13], packet) {
        (0x08, 0x00, [version, ..]) if version >> 4 == 4 && packet.len() >= 20 => {
            let header = usize::from(version & 0xf) * 4;
            // A fragment has no ports, or not all of them.
            let whole = u16::from_be_bytes([packet[6], packet[7]]) & 0x3fff == 0;
            let ports = packet.get(header..header + 4).filter(|_| header >= 20 && whole);
            (&packet[12..20], packet[9], ports, [TCPV4, UDPV4, IPV4])
        }
        (0x86, 0xdd, [version, ..]) if version >> 4 == 6 && packet.len() >= 40 => {
            (&packet[8..40], packet[6], packet.get(40..44), [TCPV6, UDPV6, IPV6])
        }
        _ => return None,
    };
    input[..addresses.len()].copy_from_slice(addresses);
    let with_ports = protocol == TCP && types & tcp != 0 || protocol == UDP && types & udp != 0;
    match ports {
        Some(ports) if with_ports => {
            input[addresses.len()..addresses.len() + 4].copy_from_slice(ports);
            Some(addresses.len() + 4)
        }
        _ => (types & plain != 0).then_some(addresses.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Microsoft's verification suite: 66.9.149.187:2794 to 161.142.100.80:1766.
    #[test]
    fn a_hash_is_what_others_say() {
        let mut frame = [0; 54];
        frame[12..15].copy_from_slice(&[0x08, 0x00, 0x45]);
        frame[14 + 9] = TCP;
        frame[26..34].copy_from_slice(&[66, 9, 149, 187, 161, 142, 100, 80]);
        frame[34..38].copy_from_slice(&[0x0a, 0xea, 0x06, 0xe6]);
        assert_eq!(hash(TYPES, &OWN_KEY, &frame), Some(0x51cc_c178));
        assert_eq!(hash(IPV4, &OWN_KEY, &frame), Some(0x323e_8fc2));
        assert_eq!(hash(UDPV4, &OWN_KEY, &frame), None);
        frame[14 + 9] = UDP;
        assert_eq!(hash(UDPV4, &OWN_KEY, &frame), Some(0x51cc_c178));
        frame[14 + 6] = 0x20;
        assert_eq!(hash(UDPV4 | IPV4, &OWN_KEY, &frame), Some(0x323e_8fc2), "a fragment");
    }
}
