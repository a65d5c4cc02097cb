//! The Toeplitz hash, which chooses receive queues (Microsoft, "RSS Hashing Functions").
#![allow(clippy::cast_possible_truncation, reason = "halves of a window")]

/// Returns the hash of `input`. `key(i)` returns word `i` of the key: 32 bits, the first byte highest.
#[inline]
pub fn hash(key: impl Fn(usize) -> u32, input: &[u8]) -> u32 {
    let mut hash = 0;
    for (i, word) in input.chunks(4).enumerate() {
        // 64 bits of the key; the upper half belongs to the first bit of this word of the input.
        let window = u64::from(key(i)) << 32 | u64::from(key(i + 1));
        let mut bits = word.iter().fold(0_u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (4 - word.len()));
        while bits != 0 {
            let first = bits.leading_zeros();
            hash ^= (window << first >> 32) as u32;
            bits &= !(1 << 31 >> first);
        }
    }
    hash
}
