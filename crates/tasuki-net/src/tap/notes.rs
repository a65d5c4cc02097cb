//! What a node's worker has read from its TAP and nobody else has seen: on a page of the node's node memory, for the successor of one that is killed.
//!
//! The kernel forgets a frame once it is read, so the worker must know before where it will lie, and says so here. How long it is the worker alone is told, and a
//! kill takes effect when a system call ends: of the frame that was being read a successor learns its length from the frame itself ([`len_of`]), which says it for IP
//! and ARP. That of all others, and of one that found no pages in a row in the pool, is lost with the worker.
//!
//! # Layout, in words of 8 bytes
//!
//! | words | what                                                                                |
//! |-------|-------------------------------------------------------------------------------------|
//! | 0     | how many frames are noted that were read and not published                          |
//! | 1     | the page to which a frame is being read, and 1; 0 if that is none                    |
//! | 2..   | frames: the first page of each, and its bytes with its offload header                |
//!
//! Stores become visible in the order of the program, also of a worker that dies (V5 of `vni/ledger.rs`).

use arrayvec::ArrayVec;
use tasuki_shm::line::{LINE_WORDS, Line};
use tasuki_shm::region::Span;
use tasuki_shm::sync::{Acquire, AtomicU64, Relaxed, Release};

use super::READS;
use crate::vni::halves;
use crate::vni::offload::HEADER_LEN;

const COUNT: usize = 0;
const READING: usize = 1;
const FRAMES_AT: usize = 2;

/// Frames that are noted at most: one that waits for room, and those that are read before they are published.
const FRAMES_MAX: usize = READS + 1;

/// Bytes from which on it is known how long a frame is, with its offload header: addresses, two tags, and the longest head that says it.
pub(super) const FRONT_LEN: usize = HEADER_LEN + 14 + 2 * 4 + 8;

/// The notes of a node.
#[derive(Debug)]
pub(super) struct Notes {
    lines: Span<Line>,
    count: usize,
}

impl Notes {
    /// Those that a predecessor has left on this page of a node memory.
    pub(super) fn over(lines: Span<Line>) -> Self {
        Notes { lines, count: 0 }
    }

    #[inline]
    fn word(&self, at: usize) -> &AtomicU64 {
        self.lines[at / LINE_WORDS].word(at % LINE_WORDS)
    }

    /// A frame will be read to this page, where no addresses stand; or to none of the pool.
    #[inline]
    pub(super) fn reads_to(&self, page: Option<u32>) {
        self.word(READING).store(page.map_or(0, |page| u64::from(page) + 1), Release);
    }

    /// What was read to this page goes, and nobody has seen it.
    #[inline]
    pub(super) fn goes(&mut self, page: Option<u32>, len: usize) {
        let (Some(page), Ok(len)) = (page, u32::try_from(len)) else { return };
        if self.count < FRAMES_MAX {
            self.word(FRAMES_AT + self.count).store(u64::from(page) << 32 | u64::from(len), Relaxed);
            self.count += 1;
            self.word(COUNT).store(self.count as u64, Release);
        }
    }

    /// All that goes is published, but a frame that waits.
    #[inline]
    pub(super) fn published(&mut self, waits: Option<(u32, usize)>) {
        self.reads_to(None);
        if std::mem::take(&mut self.count) > 0 {
            self.word(COUNT).store(0, Release);
        }
        if let Some((page, len)) = waits {
            self.goes(Some(page), len);
        }
    }

    /// What a predecessor has left: the page of each frame, and its length where that is known.
    pub(super) fn left(&mut self) -> ArrayVec<(u32, Option<usize>), { FRAMES_MAX + 1 }> {
        let count = usize::try_from(self.word(COUNT).load(Acquire)).map_or(FRAMES_MAX, |count| count.min(FRAMES_MAX));
        // It stands there until what is left is published.
        self.count = count;
        let noted = (0..count).map(|at| {
            let (len, page) = halves(self.word(FRAMES_AT + at).load(Relaxed));
            (page, Some(len as usize))
        });
        let mut left: ArrayVec<_, { FRAMES_MAX + 1 }> = noted.collect();
        let reading = self.word(READING).load(Relaxed).checked_sub(1).and_then(|page| u32::try_from(page).ok());
        if let Some(page) = reading.filter(|page| left.iter().all(|(other, _)| other != page)) {
            left.push((page, None));
        }
        left
    }
}

/// How long the frame is of which this is the beginning, [`FRONT_LEN`] bytes, as far as it says that; with its offload header. Nothing if none was read there.
pub(super) fn len_of(front: &[u8]) -> Option<usize> {
    let frame = front.get(HEADER_LEN..)?;
    let number = |at: usize| Some(usize::from(u16::from_be_bytes(*frame.get(at..)?.first_chunk()?)));
    let was_read = frame.get(..12)?.iter().any(|byte| *byte != 0);
    let mut behind = 14;
    // Tags of VLANs, one in another.
    while behind < 14 + 2 * 4 && matches!(number(behind - 2)?, 0x8100 | 0x88a8) {
        behind += 4;
    }
    let len = match number(behind - 2)? {
        0x0800 => number(behind + 2)?,
        // Of one of more than 64 KiB no length is said.
        0x86dd => number(behind + 4).filter(|len| *len > 0)? + 40,
        0x0806 => 28,
        // The length itself (IEEE 802.3).
        len if len <= 1500 => len,
        _ => return None,
    };
    was_read.then_some(HEADER_LEN + behind + len)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn front(behind_addresses: &[u8]) -> Vec<u8> {
        let mut front = [&[0; HEADER_LEN][..], &[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2], behind_addresses].concat();
        front.resize(FRONT_LEN, 0);
        front
    }

    #[test]
    fn a_frame_says_how_long_it_is() {
        let ipv4 = [0x08, 0x00, 0x45, 0, 0, 84];
        let ipv6 = [0x86, 0xdd, 0x60, 0, 0, 0, 0, 32];
        let tags = [0x88, 0xa8, 0, 1, 0x81, 0, 0, 2];
        let lens = [
            front(&ipv4),
            front(&ipv6),
            front(&[0x08, 0x06, 0, 1]),
            front(&[0, 38, 0x42, 0x42]),
            front(&[&tags[..], &ipv4].concat()),
            front(&[&tags[..], &ipv6].concat()),
            // LLDP; IPv6 with a length elsewhere; a third tag; nothing.
            front(&[0x88, 0xcc]),
            front(&[0x86, 0xdd, 0x60, 0, 0, 0, 0, 0]),
            front(&[&tags[..], &[0x81, 0], &ipv4].concat()),
            vec![0; FRONT_LEN],
            Vec::new(),
        ];
        let lens = lens.map(|front| len_of(&front).map(|len| len - HEADER_LEN));
        let expected = [Some(98), Some(86), Some(42), Some(52), Some(106), Some(94), None, None, None, None, None];
        assert_eq!(lens, expected);
    }
}
