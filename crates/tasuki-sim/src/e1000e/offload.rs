//! Checksums, as the card inserts and checks them (§7.1.10, §7.2.5), and Ethernet's frame check sequence.

use super::regs::rxd;

const ETHERNET_LEN: usize = 14;
const TCP: u8 = 6;
const UDP: u8 = 17;

/// Tables for the IEEE 802.3 CRC, reflected polynomial, eight bytes at a time.
const CRC_TABLES: [[u32; 256]; 8] = crc_tables();

const fn crc_tables() -> [[u32; 256]; 8] {
    let mut tables = [[0; 256]; 8];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 };
            bit += 1;
        }
        tables[0][byte] = crc;
        byte += 1;
    }
    let mut byte = 0;
    while byte < 256 {
        let mut table = 1;
        while table < 8 {
            let before: u32 = tables[table - 1][byte];
            tables[table][byte] = before >> 8 ^ tables[0][(before & 0xff) as usize];
            table += 1;
        }
        byte += 1;
    }
    tables
}

/// Returns the check sequence of the frame made of `parts`, one after the other.
pub fn crc32(parts: [&[u8]; 2]) -> u32 {
    let mut crc = u32::MAX;
    for part in parts {
        let (eights, rest) = part.as_chunks::<8>();
        for eight in eights {
            let [a, b, c, d, e, f, g, h] = (u64::from_le_bytes(*eight) ^ u64::from(crc)).to_le_bytes();
            crc = [h, g, f, e, d, c, b, a]
                .iter()
                .zip(&CRC_TABLES)
                .fold(0, |crc, (byte, table)| crc ^ table[*byte as usize]);
        }
        for byte in rest {
            crc = crc >> 8 ^ CRC_TABLES[0][usize::from(crc as u8 ^ byte)];
        }
    }
    !crc
}

/// Adds the 16-bit words of `bytes` to the unfolded `sum`.
pub fn add(sum: u64, bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<2>();
    let sum = words.iter().fold(sum, |sum, word| sum + u64::from(u16::from_be_bytes(*word)));
    sum + rest.first().map_or(0, |byte| u64::from(*byte) << 8)
}

/// Folds a sum to the 16-bit ones' complement sum.
pub fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum >> 16) + (sum & 0xffff);
    }
    sum as u16
}

/// Checks a received frame's checksums; returns the status and error bits of its descriptor.
pub fn check(frame: &[u8], ip: bool, transport: bool) -> u32 {
    let Some((ethernet, packet)) = frame.split_at_checked(ETHERNET_LEN) else { return 0 };
    match (ethernet[12], ethernet[13]) {
        (0x08, 0x00) => check_ipv4(packet, ip, transport),
        (0x86, 0xdd) if transport => check_ipv6(packet),
        _ => 0,
    }
}

fn check_ipv4(packet: &[u8], ip: bool, transport: bool) -> u32 {
    let Some(&version) = packet.first().filter(|first| **first >> 4 == 4) else { return 0 };
    let header = usize::from(version & 0xf) * 4;
    let total = packet.get(2..4).map_or(0, |len| usize::from(u16::from_be_bytes([len[0], len[1]])));
    if header < 20 || total < header || packet.len() < total {
        return 0;
    }
    let mut found = 0;
    if ip {
        found |= rxd::IPCS;
        if fold(add(0, &packet[..header])) != 0xffff {
            found |= rxd::IPE;
        }
    }
    let fragment = u16::from_be_bytes([packet[6], packet[7]]) & 0x3fff != 0;
    if transport && !fragment {
        found |= check_transport(packet[9], &packet[12..20], &packet[header..total]);
    }
    found
}

fn check_ipv6(packet: &[u8]) -> u32 {
    if packet.len() < 40 || packet[0] >> 4 != 6 {
        return 0;
    }
    let len = usize::from(u16::from_be_bytes([packet[4], packet[5]]));
    packet.get(40..40 + len).map_or(0, |payload| check_transport(packet[6], &packet[8..40], payload))
}

fn check_transport(protocol: u8, addresses: &[u8], segment: &[u8]) -> u32 {
    let (bit, least) = match protocol {
        TCP => (rxd::TCPCS, 20),
        // A datagram without a checksum is not checked.
        UDP if segment.len() >= 8 && segment[6..8] != [0, 0] => (rxd::TCPCS | rxd::UDPCS, 8),
        _ => return 0,
    };
    if segment.len() < least {
        return 0;
    }
    let pseudo = add(u64::from(protocol) + segment.len() as u64, addresses);
    if fold(add(pseudo, segment)) == 0xffff { bit } else { bit | rxd::TCPE }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_check_sequence_is_ethernets() {
        assert_eq!(crc32([b"123456789", &[]]), 0xcbf4_3926);
        assert_eq!(crc32([b"1234", b"56789"]), 0xcbf4_3926);
        assert_eq!(crc32([b"The quick brown fox jumps over the lazy dog", &[]]), 0x414f_a339);
    }
}
