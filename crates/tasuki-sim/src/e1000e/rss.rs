//! Receive-side scaling: a hash over addresses and ports selects the queue (§7.1.8.1).

use super::Device;
use super::regs::{self, mrqc};
use crate::toeplitz;

const ETHERNET_LEN: usize = 14;
const TCP: u8 = 6;

/// RSS types, as a descriptor gives them.
const TYPE_TCP_IPV4: u8 = 1;
const TYPE_IPV4: u8 = 2;
const TYPE_TCP_IPV6: u8 = 3;
const TYPE_IPV6: u8 = 5;

impl Device {
    /// Returns the queue of a frame, then its RSS type and hash.
    #[inline]
    pub(super) fn scale(&self, frame: &[u8]) -> (u8, (u8, u32)) {
        let on = self.get(regs::MRQC);
        if on & 3 != mrqc::RSS {
            return (0, (0, 0));
        }
        let mut input = [0; 36];
        let (kind, len) = rss_input(on, frame, &mut input);
        if kind == 0 {
            // Frames that are not hashed go to queue 0.
            return (0, (0, 0));
        }
        let hash = self.toeplitz(&input[..len]);
        let entry = hash as usize & 0x7f;
        let queue = self.get(regs::RETA.nth(entry / 4)) >> (8 * (entry % 4)) >> 7 & 1;
        (queue as u8, (kind, hash))
    }

    fn toeplitz(&self, input: &[u8]) -> u32 {
        let key = |index: usize| {
            let word = if index < regs::RSSRK_LEN { self.get(regs::RSSRK.nth(index)) } else { 0 };
            word.swap_bytes()
        };
        toeplitz::hash(key, input)
    }
}

/// Copies the fields to hash from a frame to `input`; returns RSS type and length in bytes.
fn rss_input(on: u32, frame: &[u8], input: &mut [u8; 36]) -> (u8, usize) {
    let Some((ethernet, packet)) = frame.split_at_checked(ETHERNET_LEN) else { return (0, 0) };
    match (ethernet[12], ethernet[13], packet) {
        (0x08, 0x00, [version, ..]) if version >> 4 == 4 && packet.len() >= 20 => {
            input[..8].copy_from_slice(&packet[12..20]);
            let header = usize::from(version & 0xf) * 4;
            // A fragment has no ports, or not all of them.
            let whole = u16::from_be_bytes([packet[6], packet[7]]) & 0x3fff == 0;
            let ports = packet.get(header..header + 4).filter(|_| header >= 20 && whole && packet[9] == TCP);
            match ports {
                Some(ports) if on & mrqc::TCP_IPV4 != 0 => {
                    input[8..12].copy_from_slice(ports);
                    (TYPE_TCP_IPV4, 12)
                }
                _ if on & mrqc::IPV4 != 0 => (TYPE_IPV4, 8),
                _ => (0, 0),
            }
        }
        (0x86, 0xdd, [version, ..]) if version >> 4 == 6 && packet.len() >= 40 => {
            input[..32].copy_from_slice(&packet[8..40]);
            // The card does not follow extension headers: it hashes such a packet by its addresses.
            match packet.get(40..44).filter(|_| packet[6] == TCP) {
                Some(ports) if on & mrqc::TCP_IPV6 != 0 => {
                    input[32..].copy_from_slice(ports);
                    (TYPE_TCP_IPV6, 36)
                }
                _ if on & (mrqc::IPV6 | mrqc::IPV6_EX) != 0 => (TYPE_IPV6, 32),
                _ => (0, 0),
            }
        }
        _ => (0, 0),
    }
}
