//! Frames that can be recognised by a number, and by bytes that follow from it.

use tasuki_net::nic::{Mac, NicError};
use tasuki_net::port::{Burst, Port};

use tasuki_testing::polled;

/// Shortest frame on a wire, without its check sequence, in bytes.
pub const SHORTEST: usize = 60;
/// Longest frame with a payload of 1,500 bytes.
pub const LONGEST: usize = 1514;

/// Source address: locally administered.
const FROM: [u8; 6] = [0x02, 0, 0, 0, 0, 0x01];
pub const BROADCAST: Mac = Mac([0xff; 6]);
/// EtherType for experiments (IEEE 802, local).
const ETHERTYPE: [u8; 2] = [0x88, 0xb5];

/// Advances a xorshift generator; never returns 0 for a `state` that is not 0.
fn step(state: u64) -> u64 {
    let state = state ^ state << 13;
    let state = state ^ state >> 7;
    state ^ state << 17
}

/// Makes the frame with this number: `len` bytes, to `to`.
pub fn frame(to: Mac, number: u32, len: usize) -> Vec<u8> {
    assert!(len >= SHORTEST);
    let mut bytes = [&to.0[..], &FROM, &ETHERTYPE, &number.to_le_bytes()].concat();
    fill(&mut bytes, number, len);
    bytes
}

/// Returns the number of such a frame.
pub fn number_of(frame: &[u8]) -> u32 {
    frame.get(14..).and_then(<[u8]>::first_chunk).map_or(u32::MAX, |bytes| u32::from_le_bytes(*bytes))
}

/// Makes a packet over IPv4 of flow `flow`, with this number.
pub fn ipv4(to: Mac, flow: u8, number: u32) -> Vec<u8> {
    // 80 bytes of packet, 64 hops, an experimental protocol; the checksum follows below.
    let mut header = [0x45, 0, 0, 80, 0, 0, 0, 0, 64, 253, 0, 0, 10, 0, 0, flow, 10, 0, 1, 1];
    let sum: u32 = header.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    let folded = u16::try_from((sum & 0xffff) + (sum >> 16)).expect("ten words of small numbers carry once at most");
    header[10..12].copy_from_slice(&(!folded).to_be_bytes());
    let mut bytes = [&to.0[..], &FROM, &[0x08, 0x00], &header[..], &number.to_le_bytes()].concat();
    fill(&mut bytes, number, 94);
    bytes
}

fn fill(bytes: &mut Vec<u8>, number: u32, len: usize) {
    let mut state = u64::from(number) << 1 | 1;
    while bytes.len() < len {
        state = step(state);
        bytes.extend(&state.to_le_bytes()[..8.min(len - bytes.len())]);
    }
}

/// Makes frames numbered from `first`, of lengths from `lens`.
pub fn frames(to: Mac, first: u32, lens: impl IntoIterator<Item = usize>) -> Vec<Vec<u8>> {
    (first..).zip(lens).map(|(number, len)| frame(to, number, len)).collect()
}

/// Returns `count` lengths between the shortest and the longest, each different from the one before.
pub fn mixed(count: usize) -> impl Iterator<Item = usize> {
    // 499 has no factor in common with the number of lengths, so every length comes up.
    (0..count).map(|i| SHORTEST + i * 499 % (LONGEST + 1 - SHORTEST))
}

/// Asserts that two lists of frames are equal. A failure names the first difference instead of printing the lists.
#[track_caller]
pub fn assert_same(came: &[Vec<u8>], sent: &[Vec<u8>]) {
    for (i, (came, sent)) in came.iter().zip(sent).enumerate() {
        if came != sent {
            let at = came.iter().zip(sent).position(|(a, b)| a != b);
            panic!("frame {i}: {} bytes came for {}, differing from byte {at:?} on", came.len(), sent.len());
        }
    }
    assert_eq!(came.len(), sent.len(), "as many frames");
}

/// Receives `count` frames.
pub fn receive(card: &mut impl Port<Fault = NicError>, count: usize) -> Vec<Vec<u8>> {
    let mut frames = Vec::new();
    polled("frames come", || {
        let mut burst = Burst::new();
        card.receive(&mut burst).expect("the card works");
        frames.extend(burst.iter().map(|frame| frame.bytes().to_vec()));
        (frames.len() >= count).then_some(())
    });
    frames
}
