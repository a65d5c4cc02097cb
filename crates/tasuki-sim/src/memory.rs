//! The memory that a model reaches, and the eventfds that it rings.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Release};

use tasuki_shm::region::{Region, RegionError, Span};

use crate::model::{Host, Interrupt, Unmapped};

const WORD: usize = size_of::<u64>();

/// A region, and the bus address where the card sees it.
#[derive(Debug)]
struct Mapped {
    at: u64,
    len: u64,
    /// Where the mapping begins in `words`, in bytes.
    offset: u64,
    words: Span<AtomicU64>,
}

/// Memory could not be given to the card.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// The range overlaps an earlier mapping.
    #[error("{len} bytes at {at:#x} overlap memory that the card has already; unmap that first")]
    Overlap {
        /// First bus address of the range.
        at: u64,
        /// Length of the range in bytes.
        len: u64,
    },
    /// The range reaches beyond the region.
    #[error("bytes {offset} and {len} more were asked of a region of {have}")]
    Beyond {
        /// First byte asked for, as an offset in the region.
        offset: u64,
        /// Number of bytes asked for.
        len: u64,
        /// Length of the region in bytes.
        have: u64,
    },
    /// The region does not give access to its words.
    #[error("the region cannot be lent to the card: {0}")]
    Region(#[from] RegionError),
}

/// An access by the card to memory that is not mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// First address that is not mapped.
    pub at: u64,
    /// Bytes left of the access at `at`.
    pub len: usize,
    /// Whether the access was a write.
    pub write: bool,
}

/// Number of faults kept; later ones are only counted.
const FAULTS_KEPT: usize = 256;

/// Number of MSI-X vectors that can have an eventfd.
const VECTORS: usize = 8;

/// A [`Host`] of shared memory: it translates addresses for the card as an IOMMU does.
#[derive(Debug)]
pub struct Memory {
    mapped: Vec<Mapped>,
    /// Index of the mapping that was hit last.
    last: usize,
    faults: Vec<Fault>,
    fault_count: u64,
    bells: [Option<OwnedFd>; VECTORS],
    raised: [u64; VECTORS],
    intx: bool,
}

impl Default for Memory {
    fn default() -> Self {
        Memory {
            mapped: Vec::new(),
            last: 0,
            faults: Vec::with_capacity(FAULTS_KEPT),
            fault_count: 0,
            bells: [const { None }; VECTORS],
            raised: [0; VECTORS],
            intx: false,
        }
    }
}

impl Memory {
    /// Maps all of `region` at bus address `at`.
    pub fn map(&mut self, at: u64, region: &Region) -> Result<(), MapError> {
        self.map_part(at, region, 0, region.len() as u64)
    }

    /// Maps `len` bytes of `region`, from `offset` on, at bus address `at`.
    pub fn map_part(&mut self, at: u64, region: &Region, offset: u64, len: u64) -> Result<(), MapError> {
        if offset.checked_add(len).is_none_or(|end| end > region.len() as u64) {
            return Err(MapError::Beyond { offset, len, have: region.len() as u64 });
        }
        let end = at.checked_add(len).ok_or(MapError::Overlap { at, len })?;
        if self.mapped.iter().any(|other| at < other.at + other.len && other.at < end) {
            return Err(MapError::Overlap { at, len });
        }
        let words = region.span(0, region.len() / WORD)?;
        self.mapped.push(Mapped { at, len, offset, words });
        Ok(())
    }

    /// Removes every mapping that begins within these bytes.
    pub fn unmap(&mut self, at: u64, len: u64) {
        self.mapped.retain(|mapped| mapped.at < at || mapped.at - at >= len);
        self.last = 0;
    }

    /// Rings `bell` (an eventfd) when the card raises MSI-X interrupt `vector`, or MSI and INTx as vector 0.
    pub fn set_bell(&mut self, vector: u16, bell: Option<OwnedFd>) {
        if let Some(place) = self.bells.get_mut(usize::from(vector)) {
            *place = bell;
        }
    }

    /// Returns how often the card raised this interrupt vector.
    pub fn raised(&self, vector: u16) -> u64 {
        self.raised.get(usize::from(vector)).copied().unwrap_or(0)
    }

    /// Returns whether the card asserts its interrupt line.
    pub fn intx(&self) -> bool {
        self.intx
    }

    /// Returns the accesses to unmapped memory, oldest first: the first 256.
    pub fn faults(&self) -> &[Fault] {
        &self.faults
    }

    /// Returns the number of all accesses to unmapped memory.
    pub fn fault_count(&self) -> u64 {
        self.fault_count
    }

    /// Returns the mapping that contains `at`, the offset in its words, and how many of `len` bytes lie in it.
    #[inline]
    fn find(&mut self, at: u64, len: usize, write: bool) -> Result<(&Span<AtomicU64>, usize, usize), Unmapped> {
        let inside = |mapped: &Mapped| at >= mapped.at && at - mapped.at < mapped.len;
        if !self.mapped.get(self.last).is_some_and(inside) {
            match self.mapped.iter().position(inside) {
                Some(index) => self.last = index,
                None => {
                    self.fault_count += 1;
                    if self.faults.len() < FAULTS_KEPT {
                        self.faults.push(Fault { at, len, write });
                    }
                    return Err(Unmapped { at });
                }
            }
        }
        let Mapped { at: first, len: whole, offset, words } = &self.mapped[self.last];
        let within = at - first;
        let fits = usize::try_from(whole - within).map_or(len, |left| left.min(len));
        Ok((words, usize::try_from(offset + within).map_err(|_| Unmapped { at })?, fits))
    }

    /// Finds 16 bits as [`find`](Self::find) does; `at` must be a multiple of two, and both bytes must lie in one
    /// mapping.
    fn find_half(&mut self, at: u64, write: bool) -> Result<(&Span<AtomicU64>, usize, usize), Unmapped> {
        let found = self.find(at, 2, write)?;
        if found.1 % 2 == 0 && found.2 == 2 { Ok(found) } else { Err(Unmapped { at }) }
    }

    fn ring(&mut self, vector: u16) {
        let index = usize::from(vector);
        if let Some(count) = self.raised.get_mut(index) {
            *count += 1;
        }
        if let Some(Some(bell)) = self.bells.get(index) {
            // A full counter wakes a reader as well as one more would; if the reader is gone, that is not the card's
            // concern.
            let _ = rustix::io::write(bell, &1_u64.to_ne_bytes());
        }
    }
}

/// Every load and store of the card is ordered as on a PCIe bus: later writes become visible later. On x86-64 this
/// costs nothing.
impl Host for Memory {
    #[inline]
    fn read(&mut self, mut at: u64, mut into: &mut [u8]) -> Result<(), Unmapped> {
        while !into.is_empty() {
            let (words, offset, fits) = self.find(at, into.len(), false)?;
            let (part, rest) = into.split_at_mut(fits);
            load(words, offset, part);
            (at, into) = (at.saturating_add(fits as u64), rest);
        }
        Ok(())
    }

    #[inline]
    fn write(&mut self, mut at: u64, mut bytes: &[u8]) -> Result<(), Unmapped> {
        while !bytes.is_empty() {
            let (words, offset, fits) = self.find(at, bytes.len(), true)?;
            let (part, rest) = bytes.split_at(fits);
            store(words, offset, part);
            (at, bytes) = (at.saturating_add(fits as u64), rest);
        }
        Ok(())
    }

    fn read16(&mut self, at: u64) -> Result<u16, Unmapped> {
        let (words, offset, _) = self.find_half(at, false)?;
        let word = words[offset / WORD].load(Acquire).to_le_bytes();
        Ok(u16::from_le_bytes([word[offset % WORD], word[offset % WORD + 1]]))
    }

    fn write16(&mut self, at: u64, value: u16) -> Result<(), Unmapped> {
        let (words, offset, _) = self.find_half(at, true)?;
        let change = |word: u64| {
            let mut bytes = word.to_le_bytes();
            bytes[offset % WORD..][..2].copy_from_slice(&value.to_le_bytes());
            Some(u64::from_le_bytes(bytes))
        };
        // The other bytes of the word may belong to the driver, which may write them at the same time.
        let _ = words[offset / WORD].fetch_update(Release, Acquire, change);
        Ok(())
    }

    fn interrupt(&mut self, interrupt: Interrupt) {
        match interrupt {
            Interrupt::MsiX(vector) => self.ring(vector),
            Interrupt::Msi => self.ring(0),
            Interrupt::IntX(level) => {
                if level && !self.intx {
                    self.ring(0);
                }
                self.intx = level;
            }
        }
    }
}

#[inline]
fn load(words: &[AtomicU64], offset: usize, into: &mut [u8]) {
    let skip = offset % WORD;
    let (head, rest) = into.split_at_mut(if skip == 0 { 0 } else { (WORD - skip).min(into.len()) });
    if let (Some(word), false) = (words.get(offset / WORD), head.is_empty()) {
        head.copy_from_slice(&word.load(Acquire).to_le_bytes()[skip..skip + head.len()]);
    }
    let mut words = words[(offset + head.len()) / WORD..].iter();
    let (whole, rest) = rest.as_chunks_mut::<WORD>();
    for (to, word) in whole.iter_mut().zip(&mut words) {
        *to = word.load(Acquire).to_le_bytes();
    }
    if let (Some(word), false) = (words.next(), rest.is_empty()) {
        rest.copy_from_slice(&word.load(Acquire).to_le_bytes()[..rest.len()]);
    }
}

#[inline]
fn store(words: &[AtomicU64], offset: usize, bytes: &[u8]) {
    let skip = offset % WORD;
    let (head, rest) = bytes.split_at(if skip == 0 { 0 } else { (WORD - skip).min(bytes.len()) });
    if let (Some(word), false) = (words.get(offset / WORD), head.is_empty()) {
        merge(word, skip, head);
    }
    let (whole, rest) = rest.as_chunks::<WORD>();
    let words = &words[(offset + head.len()) / WORD..];
    for (from, word) in whole.iter().zip(words) {
        word.store(u64::from_le_bytes(*from), Release);
    }
    if let (Some(word), false) = (words.get(whole.len()), rest.is_empty()) {
        merge(word, 0, rest);
    }
}

/// Changes some bytes of a word. Not atomic: the other bytes are stored as they were a moment ago. They lie in the
/// same buffer or, if a buffer begins at an odd address, right before it.
fn merge(word: &AtomicU64, skip: usize, bytes: &[u8]) {
    let mut whole = word.load(Acquire).to_le_bytes();
    whole[skip..skip + bytes.len()].copy_from_slice(bytes);
    word.store(u64::from_le_bytes(whole), Release);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tasuki_shm::region::Pages;

    fn memory() -> Memory {
        let region = Region::create("test", 4096, Pages::Small).unwrap();
        let mut memory = Memory::default();
        memory.map(0x10000, &region).unwrap();
        memory
    }

    #[test]
    fn what_does_not_lie_inside_is_a_fault_where_it_begins() {
        let mut memory = memory();
        let cases = [
            (0xffff, 1, 0xffff),
            (0xffff, 2, 0xffff),
            (0x10fff, 2, 0x11000),
            (0x11000, 1, 0x11000),
            (u64::MAX - 3, 8, u64::MAX - 3),
        ];
        for (at, len, fault) in cases {
            assert_eq!(memory.write(at, &vec![1; len]), Err(Unmapped { at: fault }));
            assert_eq!(memory.read(at, &mut vec![0; len]), Err(Unmapped { at: fault }));
        }
        assert_eq!(memory.fault_count(), 10);
        assert_eq!(memory.faults()[0], Fault { at: 0xffff, len: 1, write: true });
        assert_eq!(memory.write(0x10fff, &[1]), Ok(()));
    }

    #[test]
    fn neighbours_are_one_memory() {
        let mut memory = memory();
        let other = Region::create("test", 8192, Pages::Small).unwrap();
        memory.map_part(0x11000, &other, 4096, 4096).unwrap();
        let bytes: Vec<u8> = (0..200).collect();
        memory.write(0x11000 - 101, &bytes).unwrap();
        let mut back = vec![0; 200];
        memory.read(0x11000 - 101, &mut back).unwrap();
        assert_eq!(back, bytes);
        assert_eq!(
            other.span::<AtomicU64>(4096, 1).unwrap()[0].load(Acquire),
            u64::from_le_bytes([101, 102, 103, 104, 105, 106, 107, 108])
        );
        assert!(matches!(memory.map_part(0x20000, &other, 8192, 1), Err(MapError::Beyond { .. })));
    }

    #[test]
    fn memory_is_not_given_twice_and_is_gone_when_taken_back() {
        let mut memory = memory();
        let other = Region::create("test", 8192, Pages::Small).unwrap();
        assert!(matches!(memory.map(0xf000, &other), Err(MapError::Overlap { .. })));
        memory.map(0xe000, &other).unwrap();
        memory.unmap(0xe000, 8192);
        assert!(memory.read(0xe000, &mut [0]).is_err());
        assert!(memory.read(0x10000, &mut [0]).is_ok());
    }

    proptest! {
        #[test]
        fn bytes_land_where_they_belong_and_nowhere_else(at in 0_usize..4096, bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut memory = memory();
            let mut expected = vec![0x5a; 4096];
            memory.write(0x10000, &expected).unwrap();
            let len = bytes.len().min(4096 - at);
            memory.write(0x10000 + at as u64, &bytes[..len]).unwrap();
            expected[at..at + len].copy_from_slice(&bytes[..len]);
            let mut all = vec![0; 4096];
            memory.read(0x10000, &mut all).unwrap();
            prop_assert_eq!(&all, &expected);
            let mut some = vec![0; len];
            memory.read(0x10000 + at as u64, &mut some).unwrap();
            prop_assert_eq!(&some, &bytes[..len]);
        }
    }
}
