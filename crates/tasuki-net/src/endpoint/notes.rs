//! Notes on frames that a node's worker read from an endpoint, which forgot them, and has not published. They lie on a page of the node memory,
//! for the successor of a killed worker.
//!
//! The kernel forgets a frame once it is read, so the worker notes beforehand where the frame will lie. Only the worker
//! learns the length, from the system call, and a kill takes effect when a system call ends. For the frame that was
//! being read, a successor takes the length from the frame itself ([`len_of`]); IP and ARP frames state it. Any other
//! frame being read is lost with the worker, and so is one for which the pool had no contiguous pages.
//!
//! # Layout, in words of 8 bytes
//!
//! | words | contents                                                                            |
//! |-------|-------------------------------------------------------------------------------------|
//! | 0     | number of noted frames: read and not published                                      |
//! | 1     | page to which a frame is being read, plus 1; 0 if there is none                     |
//! | 2..   | frames: the first page of each, and its length in bytes with its offload header     |
//!
//! Stores become visible in program order, even those of a worker that dies (V5 of `vni/ledger.rs`).

use arrayvec::ArrayVec;
use tasuki_shm::line::{LINE_WORDS, Line, halves};
use tasuki_shm::region::Span;
use tasuki_shm::sync::{Acquire, AtomicU64, Relaxed, Release};

use crate::vni::ledger::point;
use crate::vni::offload::HEADER_LEN;

/// Maximum number of frames that an endpoint reads in a turn.
pub(super) const READS: usize = 64;

const COUNT: usize = 0;
const READING: usize = 1;
const FRAMES_AT: usize = 2;

/// Maximum number of noted frames: one that waits for room, and those read before the next publication.
const FRAMES_MAX: usize = READS + 1;

/// Number of first bytes, with the offload header, from which [`len_of`] can tell a frame's length: addresses, two
/// tags, and the longest header part that states a length.
pub(super) const NOTED_LEN: usize = HEADER_LEN + 14 + 2 * 4 + 8;

/// The notes of a node.
#[derive(Debug)]
pub(crate) struct Notes {
    lines: Span<Line>,
    count: usize,
}

impl Notes {
    /// Opens the notes on this page of a node memory; a predecessor may have left some.
    pub(super) fn over(lines: Span<Line>) -> Self {
        Notes { lines, count: 0 }
    }

    #[inline]
    fn word(&self, at: usize) -> &AtomicU64 {
        self.lines[at / LINE_WORDS].word(at % LINE_WORDS)
    }

    /// Notes that a frame will be read to `page`, which holds no addresses yet; `None` is memory outside the pool.
    #[inline]
    pub(super) fn reads_to(&self, page: Option<u32>) {
        self.word(READING).store(page.map_or(0, |page| u64::from(page) + 1), Release);
    }

    /// Notes that the frame read to `page` is staged and not yet published.
    #[inline]
    pub(super) fn goes(&mut self, page: Option<u32>, len: usize) {
        if let (Some(page), true) = (page, self.count < FRAMES_MAX) {
            self.note(self.count, page, len);
        }
    }

    /// Notes a frame as the last one, in this place.
    #[inline]
    fn note(&mut self, at: usize, page: u32, len: usize) {
        let Ok(len) = u32::try_from(len) else { return };
        self.word(FRAMES_AT + at).store(u64::from(page) << 32 | u64::from(len), Relaxed);
        point("notes.written");
        self.count = at + 1;
        self.word(COUNT).store(self.count as u64, Release);
    }

    /// Notes that all staged frames are published, except one that waits.
    #[inline]
    pub(super) fn published(&mut self, waits: Option<(u32, usize)>) {
        match waits {
            // It is noted at any time: in the old notes or in these, or as the one that was being read.
            Some((page, len)) => self.note(0, page, len),
            None if self.count > 0 => {
                self.count = 0;
                self.word(COUNT).store(0, Release);
            }
            None => {}
        }
        point("notes.noted");
        self.reads_to(None);
    }

    /// Returns the frames that a predecessor left: the page of each, and its length where known.
    pub(super) fn left(&mut self) -> ArrayVec<(u32, Option<usize>), { FRAMES_MAX + 1 }> {
        let count = usize::try_from(self.word(COUNT).load(Acquire)).map_or(FRAMES_MAX, |count| count.min(FRAMES_MAX));
        // The notes stand until these frames are published.
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

/// Returns the length in bytes, with the offload header, of the frame that begins with these [`NOTED_LEN`] bytes.
/// `None` if the frame does not state its length, or if no frame was read there.
pub(super) fn len_of(front: &[u8]) -> Option<usize> {
    let frame = front.get(HEADER_LEN..)?;
    let number = |at: usize| Some(usize::from(u16::from_be_bytes(*frame.get(at..)?.first_chunk()?)));
    let was_read = frame.get(..12)?.iter().any(|byte| *byte != 0);
    let mut behind = 14;
    // VLAN tags, one in another.
    while behind < 14 + 2 * 4 && matches!(number(behind - 2)?, 0x8100 | 0x88a8) {
        behind += 4;
    }
    let len = match number(behind - 2)? {
        0x0800 => number(behind + 2)?,
        // A packet of more than 64 KiB states no length.
        0x86dd => number(behind + 4).filter(|len| *len > 0)? + 40,
        0x0806 => 28,
        // The field is the length itself (IEEE 802.3).
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
        front.resize(NOTED_LEN, 0);
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
            // LLDP; IPv6 with a length elsewhere; a third tag; zeroes; an empty slice.
            front(&[0x88, 0xcc]),
            front(&[0x86, 0xdd, 0x60, 0, 0, 0, 0, 0]),
            front(&[&tags[..], &[0x81, 0], &ipv4].concat()),
            vec![0; NOTED_LEN],
            Vec::new(),
        ];
        let lens = lens.map(|front| len_of(&front).map(|len| len - HEADER_LEN));
        let expected = [Some(98), Some(86), Some(42), Some(52), Some(106), Some(94), None, None, None, None, None];
        assert_eq!(lens, expected);
    }
}
