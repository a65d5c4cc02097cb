//! Memory that another party made and that we write as well: memory that the client of a foreign protocol brings
//! along.
//!
//! Its maker can change its bytes at any time. So bytes go in and out only as copies, and we lend out nothing but
//! atomics (M2). It need not be sealed against further writers, because it has some anyway. But none of its pages
//! may be a huge page, since a hole in those cannot always be filled (M3); unless it is mapped under a guard.
#![allow(unsafe_code, reason = "copies bytes that another process reads and writes at will")]

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use rustix::mm::ProtFlags;

use super::copy::store_word;
use super::guard::Guard;
use super::{Mapping, PAGE_LEN, PeerRegion, RegionError, Shared, Span, copy_abroad, kept_len, page_len};

/// Memory that a stranger made, and that both sides write.
#[derive(Debug)]
pub struct CommonRegion {
    mapping: Arc<Mapping>,
}

impl CommonRegion {
    /// Maps `len` bytes of memory from a stranger, after checking that they exist and cannot go away (M3).
    pub fn map(memory: BorrowedFd<'_>, len: usize) -> Result<Self, RegionError> {
        // Ask for the seals first: only a memory file answers, and we must not ask anything else of other files.
        let have = kept_len(memory)?;
        if have < len {
            return Err(RegionError::Truncated { have, need: len });
        }
        let mapping = Mapping::new(memory, len.max(1), ProtFlags::READ | ProtFlags::WRITE)?;
        Ok(CommonRegion { mapping: Arc::new(mapping) })
    }

    /// Maps `len` bytes of memory that its maker can take away: a memory file of any kind (memfd, tmpfs, hugetlbfs),
    /// sealed or not. If the memory goes, this region holds zeroes and [says so](Self::is_gone).
    pub fn map_guarded(memory: BorrowedFd<'_>, len: usize) -> Result<Self, RegionError> {
        // Only memory files have seals: the pages of all others could block.
        rustix::fs::fcntl_get_seals(memory).map_err(|_| RegionError::NotMemory)?;
        let stat =
            rustix::fs::fstat(memory).map_err(|errno| RegionError::from_errno("measuring shared memory", 0, errno))?;
        let have = usize::try_from(stat.st_size).map_err(|_| RegionError::NotMemory)?;
        if have < len {
            return Err(RegionError::Truncated { have, need: len });
        }
        // Whole pages of the file: a part of a huge page can be neither unmapped nor replaced.
        let whole = len.max(1).next_multiple_of(page_len(memory, &stat)?);
        let mut mapping = Mapping::new(memory, whole, ProtFlags::READ | ProtFlags::WRITE)?;
        mapping.guard = Some(Guard::on(mapping.base, mapping.len)?);
        Ok(CommonRegion { mapping: Arc::new(mapping) })
    }

    /// Returns whether the maker of guarded memory has taken it away.
    pub fn is_gone(&self) -> bool {
        self.mapping.guard.as_ref().is_some_and(Guard::is_gone)
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.mapping.len
    }

    /// Whether the region has no bytes: always false.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Lends `count` atomics (`AtomicU16`, `AtomicU32`, `AtomicU64`) from byte `offset` on.
    #[allow(private_bounds, reason = "the sealed list of types that may be lent")]
    pub fn span<T: Shared>(&self, offset: usize, count: usize) -> Result<Span<T>, RegionError> {
        Span::new(&self.mapping, offset, count)
    }

    /// Asks the kernel to map the pages of `len` bytes at `offset` now. Does nothing for bytes outside the region.
    pub fn populate(&self, offset: usize, len: usize) {
        let start = offset / PAGE_LEN * PAGE_LEN;
        self.mapping.populate(start, len.saturating_add(offset - start));
    }

    /// Brings `len` bytes at `offset` nearer, to be read soon. Does nothing for bytes outside the region.
    #[inline]
    pub fn prefetch_to_read(&self, offset: usize, len: usize) {
        if let Ok(first) = self.mapping.check(offset, len) {
            super::prefetch_to_read(first, len);
        }
    }

    /// Brings `len` bytes at `offset` nearer, to be written soon. Does nothing for bytes outside the region.
    #[inline]
    pub fn prefetch_to_write(&self, offset: usize, len: usize) {
        if let Ok(first) = self.mapping.check(offset, len) {
            super::prefetch_to_write(first, len);
        }
    }

    /// Copies bytes from `offset` on into `into`, even if other processes write them meanwhile.
    #[inline]
    pub fn copy_to(&self, offset: usize, into: &mut [u8]) -> Result<(), RegionError> {
        let first = self.mapping.check(offset, into.len())?;
        // SAFETY: the source lies in the mapping (checked; M1, M3), the destination is ours alone.
        unsafe { copy_abroad(first.as_ptr(), into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    /// Copies `from` into the region at `offset`, even if other processes write there meanwhile.
    #[inline]
    pub fn copy_from(&self, offset: usize, from: &[u8]) -> Result<(), RegionError> {
        let first = self.mapping.check(offset, from.len())?;
        // SAFETY: the source is a slice, the destination lies in the mapping (checked; M1, M3), and we make no
        // reference to its bytes (M2).
        unsafe { copy_abroad(from.as_ptr(), first.as_ptr(), from.len()) };
        Ok(())
    }

    /// Stores words, in native order, from byte `offset` on, which need not be aligned. They never pass through memory
    /// of ours.
    #[inline]
    pub fn put_words<const N: usize>(&self, offset: usize, words: [u64; N]) -> Result<(), RegionError> {
        let first = self.mapping.check(offset, 8 * N)?;
        for (at, word) in words.into_iter().enumerate() {
            // SAFETY: within what was checked (M1, M3), and we make no reference to it (M2).
            unsafe { store_word(first.as_ptr().wrapping_add(8 * at), word) };
        }
        Ok(())
    }

    /// Copies `len` bytes at `at` of a peer's memory into this region at `offset`, in one copy.
    #[inline]
    pub fn copy_from_peer(&self, offset: usize, peer: &PeerRegion, at: usize, len: usize) -> Result<(), RegionError> {
        let to = self.mapping.check(offset, len)?;
        let from = peer.mapping.check(at, len)?;
        // SAFETY: each lies in its mapping (checked; M1, M3), and we make no reference to bytes in either (M2).
        unsafe { copy_abroad(from.as_ptr(), to.as_ptr(), len) };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::{Pages, Region};
    use rustix::fs::MemfdFlags;
    use std::os::fd::AsFd;
    use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};

    #[test]
    fn what_one_writes_the_other_reads() {
        let theirs = Region::create("test", 8192, Pages::Small).unwrap();
        let ours = CommonRegion::map(theirs.fd(), 8192).unwrap();
        let again = CommonRegion::map(theirs.fd(), 5000).unwrap();
        assert_eq!(again.len(), 5000);
        for len in [0, 1, 63, 64, 65, 200, 4900] {
            let bytes: Vec<u8> = (0..len).map(|i: usize| (i * 7 + len).to_le_bytes()[0]).collect();
            ours.copy_from(33, &bytes).unwrap();
            let mut copy = vec![0; len];
            again.copy_to(33, &mut copy).unwrap();
            assert_eq!(copy, bytes, "{len} bytes");
        }
        ours.put_words(4091, [0x0706_0504_0302_0100_u64, 0x0f0e_0d0c_0b0a_0908].map(u64::from_le)).unwrap();
        let mut copy = [0; 18];
        again.copy_to(4090, &mut copy).unwrap();
        assert_eq!(copy[1..17], std::array::from_fn::<u8, 16, _>(|i| i.to_le_bytes()[0]));
        assert!(ours.put_words(8192 - 15, [0; 2]).is_err() && ours.put_words(usize::MAX, [0; 1]).is_err());
        ours.span::<AtomicU16>(6, 1).unwrap()[0].store(0x1234, Ordering::Relaxed);
        assert_eq!(theirs.span::<AtomicU64>(0, 1).unwrap()[0].load(Ordering::Relaxed) >> 48, 0x1234);
    }

    #[test]
    fn a_copy_from_a_peer_lands_where_it_should_and_nowhere_else() {
        let theirs = Region::create("test", 4096, Pages::Small).unwrap();
        let ours = CommonRegion::map(theirs.fd(), 4096).unwrap();
        let source = Region::create("peer", 4096, Pages::Small).unwrap();
        CommonRegion::map(source.fd(), 4096).unwrap().copy_from(0, &[7; 4096]).unwrap();
        source.seal_writers().unwrap();
        let peer = PeerRegion::map(source.fd(), 4096).unwrap();
        for len in [1, 64, 100] {
            ours.copy_from(0, &[1; 4096]).unwrap();
            ours.copy_from_peer(200, &peer, 5, len).unwrap();
            let mut all = vec![0; 4096];
            ours.copy_to(0, &mut all).unwrap();
            let expected = |i| if (200..200 + len).contains(&i) { 7 } else { 1 };
            assert!(all.iter().enumerate().all(|(i, byte)| *byte == expected(i)), "{len} bytes");
        }
        assert!(ours.copy_from_peer(4000, &peer, 0, 97).is_err());
        assert!(ours.copy_from_peer(0, &peer, 4000, 97).is_err());
        assert!(ours.copy_from_peer(usize::MAX, &peer, 0, 2).is_err());
    }

    #[test]
    fn memory_that_may_shrink_or_is_not_there_is_refused() {
        let memory = rustix::fs::memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&memory, 4096).unwrap();
        assert!(matches!(CommonRegion::map(memory.as_fd(), 4096), Err(RegionError::Unsealed)));
        rustix::fs::fcntl_add_seals(&memory, rustix::fs::SealFlags::SHRINK).unwrap();
        assert!(matches!(CommonRegion::map(memory.as_fd(), 4097), Err(RegionError::Truncated { .. })));
        assert!(CommonRegion::map(memory.as_fd(), 4096).is_ok());
    }

    #[test]
    fn guarded_memory_that_is_cut_holds_zeroes_and_says_so() {
        let memory = rustix::fs::memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&memory, 16 << 12).unwrap();
        let cut = CommonRegion::map_guarded(memory.as_fd(), 16 << 12).unwrap();
        let kept = CommonRegion::map_guarded(memory.as_fd(), 4096).unwrap();
        cut.copy_from(0, &[7; 5000]).unwrap();
        rustix::fs::ftruncate(&memory, 4096).unwrap();
        let mut bytes = [1; 8];
        kept.copy_to(0, &mut bytes).unwrap();
        assert_eq!((bytes, kept.is_gone()), ([7; 8], false));
        cut.copy_to(4096, &mut bytes).unwrap();
        assert_eq!((bytes, cut.is_gone()), ([0; 8], true));
        cut.span::<AtomicU64>(8192, 1).unwrap()[0].store(1, Ordering::Relaxed);
        assert!(!kept.is_gone());
        drop(cut);
        assert!(CommonRegion::map_guarded(memory.as_fd(), 4097).is_err());
        assert!(CommonRegion::map_guarded(tempfile::tempfile().unwrap().as_fd(), 0).is_err());
    }

    #[test]
    fn huge_pages_are_refused_even_if_sealed() {
        let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        let Ok(memory) = rustix::fs::memfd_create("test", flags) else {
            println!("skipped: this kernel has no huge pages");
            return;
        };
        rustix::fs::ftruncate(&memory, 2 << 20).unwrap();
        rustix::fs::fcntl_add_seals(&memory, rustix::fs::SealFlags::SHRINK).unwrap();
        assert!(matches!(CommonRegion::map(memory.as_fd(), 4096), Err(RegionError::Unguarded)));
    }
}
