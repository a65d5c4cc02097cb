//! The memory that a model reaches, and the eventfds that it rings.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Release};

use tasuki_shm::region::{Region, RegionError, Span};

use crate::e1000e::{Host, Interrupt, Unmapped};

const WORD: usize = size_of::<u64>();

/// A region, and where the card sees it.
#[derive(Debug)]
struct Mapped {
    at: u64,
    len: u64,
    words: Span<AtomicU64>,
}

/// Memory could not be given to the card.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// Something is there already.
    #[error("{len} bytes at {at:#x} overlap memory that the card has already; unmap that first")]
    Overlap {
        /// Where.
        at: u64,
        /// Bytes.
        len: u64,
    },
    /// The region does not lend its words.
    #[error("the region cannot be lent to the card: {0}")]
    Region(#[from] RegionError),
}

/// An access of the card to memory that it does not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// Where.
    pub at: u64,
    /// Bytes.
    pub len: usize,
    /// Whether it would have written.
    pub write: bool,
}

/// Faults that are kept; later ones are counted.
const FAULTS_KEPT: usize = 256;

/// MSI-X interrupts that somebody can wait for.
const VECTORS: usize = 8;

/// A [`Host`] of shared memory: what an IOMMU is to a card.
#[derive(Debug)]
pub struct Memory {
    mapped: Vec<Mapped>,
    /// The mapping that was hit last.
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
    /// The card sees all of `region` at `at` and after.
    pub fn map(&mut self, at: u64, region: &Region) -> Result<(), MapError> {
        let len = region.len() as u64;
        let end = at.checked_add(len).ok_or(MapError::Overlap { at, len })?;
        if self.mapped.iter().any(|other| at < other.at + other.len && other.at < end) {
            return Err(MapError::Overlap { at, len });
        }
        let words = region.span(0, region.len() / WORD)?;
        self.mapped.push(Mapped { at, len, words });
        Ok(())
    }

    /// The card sees nothing any more of what begins within these bytes.
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

    /// How often the card raised an interrupt.
    pub fn raised(&self, vector: u16) -> u64 {
        self.raised.get(usize::from(vector)).copied().unwrap_or(0)
    }

    /// Whether the card holds its interrupt line.
    pub fn intx(&self) -> bool {
        self.intx
    }

    /// Accesses to memory that is not there: the first of them, oldest first.
    pub fn faults(&self) -> &[Fault] {
        &self.faults
    }

    /// How many there were.
    pub fn fault_count(&self) -> u64 {
        self.fault_count
    }

    /// Forgets them.
    pub fn clear_faults(&mut self) {
        self.faults.clear();
        self.fault_count = 0;
    }

    /// The mapping in which all of the bytes lie, and the offset of the first in it.
    #[inline]
    fn find(&mut self, at: u64, len: usize, write: bool) -> Result<(&Span<AtomicU64>, usize), Unmapped> {
        let inside =
            |mapped: &Mapped| at >= mapped.at && len as u64 <= mapped.len && at - mapped.at <= mapped.len - len as u64;
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
        let mapped = &self.mapped[self.last];
        let offset = usize::try_from(at - mapped.at).map_err(|_| Unmapped { at })?;
        Ok((&mapped.words, offset))
    }

    fn ring(&mut self, vector: u16) {
        let index = usize::from(vector);
        if let Some(count) = self.raised.get_mut(index) {
            *count += 1;
        }
        if let Some(Some(bell)) = self.bells.get(index) {
            // A full counter rings as well as one that is one higher; a waiter that is gone is not the card's business.
            let _ = rustix::io::write(bell, &1_u64.to_ne_bytes());
        }
    }
}

/// Every load and store of the card is ordered as on a PCIe bus: what is written later is seen later. On x86-64 that costs nothing.
impl Host for Memory {
    #[inline]
    fn read(&mut self, at: u64, into: &mut [u8]) -> Result<(), Unmapped> {
        let (words, offset) = self.find(at, into.len(), false)?;
        let skip = offset % WORD;
        let mut index = offset / WORD;
        let mut into = into;
        if skip != 0 {
            let (head, rest) = into.split_at_mut((WORD - skip).min(into.len()));
            let bytes = words[index].load(Acquire).to_le_bytes();
            head.copy_from_slice(&bytes[skip..skip + head.len()]);
            into = rest;
            index += 1;
        }
        let (whole, rest) = into.as_chunks_mut::<WORD>();
        for (to, word) in whole.iter_mut().zip(&words[index.min(words.len())..]) {
            *to = word.load(Acquire).to_le_bytes();
        }
        if !rest.is_empty() {
            let bytes = words[index + whole.len()].load(Acquire).to_le_bytes();
            rest.copy_from_slice(&bytes[..rest.len()]);
        }
        Ok(())
    }

    #[inline]
    fn write(&mut self, at: u64, bytes: &[u8]) -> Result<(), Unmapped> {
        let (words, offset) = self.find(at, bytes.len(), true)?;
        let skip = offset % WORD;
        let mut index = offset / WORD;
        let mut bytes = bytes;
        if skip != 0 {
            let (head, rest) = bytes.split_at((WORD - skip).min(bytes.len()));
            merge(&words[index], skip, head);
            bytes = rest;
            index += 1;
        }
        let (whole, rest) = bytes.as_chunks::<WORD>();
        for (from, word) in whole.iter().zip(&words[index.min(words.len())..]) {
            word.store(u64::from_le_bytes(*from), Release);
        }
        if !rest.is_empty() {
            merge(&words[index + whole.len()], 0, rest);
        }
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

/// Changes some bytes of a word. The others are stored as they were a moment ago: they lie in the same buffer as these or, in a
/// buffer that begins at an odd address, right before it.
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
    fn what_does_not_lie_wholly_inside_is_a_fault() {
        let mut memory = memory();
        for (at, len) in [(0xffff, 1), (0xffff, 2), (0x10fff, 2), (0x11000, 1), (u64::MAX, 1), (u64::MAX - 3, 8)] {
            assert_eq!(memory.write(at, &vec![1; len]), Err(Unmapped { at }));
            assert_eq!(memory.read(at, &mut vec![0; len]), Err(Unmapped { at }));
        }
        assert_eq!(memory.fault_count(), 12);
        assert_eq!(memory.faults()[0], Fault { at: 0xffff, len: 1, write: true });
        assert_eq!(memory.write(0x10fff, &[1]), Ok(()));
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
