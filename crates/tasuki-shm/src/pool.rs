//! A pool: memory in which one process allocates runs of pages, writes them, and lets any number of other processes
//! read them.
//!
//! An [arena](crate::arena) has slots of one size that move to one peer and back. A pool has frames of any length
//! that several readers may hold at once. Only the owner knows the readers, and it keeps that list in its own
//! memory, so no two processes share a counter. A reader only reads. So the owner can take pages back from a reader
//! that never finishes, and the reader finds out.
//!
//! # Rules
//!
//! - **P1** Only the owner writes the pool and the generations; every other process maps them read-only.
//! - **P2** A page is free or part of one run. Only the holder of the run has its bytes.
//! - **P3** A reader trusts bytes of a piece only after it has read them and then found the generation of the
//!   piece's first page unchanged.
//! - **P4** If the owner takes pages back from a reader that may still read them, it gives them a new generation
//!   before it writes them again.
//!
//! # Orderings
//!
//! - **RETAKE** a generation: [`Generations::renew`] stores it before the owner writes the bytes anew;
//!   [`PeerGenerations::are`] loads it after the reader read them. (The ring that brings the piece makes sure that
//!   the bytes are written before they are read at all.)
#![cfg_attr(not(loom), allow(unsafe_code, reason = "lends the bytes of a run to its holder"))]

use std::ops::Deref;
#[cfg(not(loom))]
use std::{io, os::fd::BorrowedFd};

use crate::line::{Claims, LINE_WORDS, Line};
#[cfg(not(loom))]
use crate::region::{CommonRegion, PAGE_LEN, PeerRegion, Region, RegionError, Span};
use crate::sync::{Acquire, Relaxed, Release, fence};

/// Bytes in a page.
pub const PAGE: u32 = 4096;

/// Bytes in a line. A piece that begins on a line shares no line with another piece.
pub const LINE: u32 = 64;

#[cfg(not(loom))]
const _: () = assert!(PAGE as usize == PAGE_LEN && LINE as usize == crate::line::LINE_LEN);

/// The place of a frame in a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// First byte of the piece, counted from the pool's first byte.
    pub offset: u32,
    /// Length in bytes.
    pub len: u32,
    /// Generation, at the time of writing, of the page that holds the piece's first byte.
    pub generation: u32,
}

/// Returns the number of lines that the generations of `pages` pages need.
pub fn generation_lines(pages: u32) -> usize {
    (pages as usize).div_ceil(2 * LINE_WORDS)
}

/// Returns the place of a page's 32-bit generation: the line, the word in the line, and the shift in the word.
fn place_of(page: u32) -> (usize, usize, u32) {
    let word = page as usize / 2;
    (word / LINE_WORDS, word % LINE_WORDS, page % 2 * 32)
}

/// The owner's side of the generations. `M` is the owner's own memory.
#[derive(Debug)]
pub struct Generations<M>(M);

impl<M: Deref<Target = [Line]>> Generations<M> {
    /// Uses the generations in `lines` as they are.
    pub fn new(lines: M) -> Self {
        Generations(lines)
    }

    /// Returns the generation of a page.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "a half is meant")]
    pub fn of(&self, page: u32) -> u32 {
        let (line, word, shift) = place_of(page);
        (self.0[line].word(word).load(Relaxed) >> shift) as u32
    }

    /// Gives `count` pages from `first` on a new generation, before they are written again (P4).
    pub fn renew(&mut self, first: u32, count: u32) {
        for page in first..first + count {
            let (line, word, shift) = place_of(page);
            let word = self.0[line].word(word);
            let next = u64::from(self.of(page).wrapping_add(1)) << shift;
            word.store(word.load(Relaxed) & !(u64::from(u32::MAX) << shift) | next, Relaxed);
        }
        // RETAKE: store the new generation before any byte there is written.
        fence(Release);
    }
}

/// A reader's side of the generations.
#[derive(Debug, Clone)]
pub struct PeerGenerations<M>(Claims<M>);

impl<M: Deref<Target = [Line]>> PeerGenerations<M> {
    /// Reads the generations that the owner of a pool publishes.
    pub fn new(claims: Claims<M>) -> Self {
        PeerGenerations(claims)
    }

    /// Whether `page` still has this generation. If so, the bytes read before this call are the bytes that the owner
    /// wrote (P3).
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "a half is meant")]
    pub fn are(&self, page: u32, generation: u32) -> bool {
        // RETAKE: load the generation after the bytes.
        fence(Acquire);
        let (line, word, shift) = place_of(page);
        (self.0.load(line, word) >> shift) as u32 == generation
    }
}

/// The set of free pages, private to the owner.
#[derive(Debug)]
pub struct Pages {
    /// One bit per page, set while it is free.
    free: Box<[u64]>,
    left: u32,
    count: u32,
    /// First page after the run taken last.
    next: u32,
}

impl Pages {
    /// Creates a set of `count` pages, all free.
    pub fn new(count: u32) -> Self {
        let mut pages = Pages { free: vec![0; (count as usize).div_ceil(64)].into(), left: 0, count, next: 0 };
        pages.give(0, count);
        pages
    }

    /// Returns the number of free pages.
    pub fn left(&self) -> u32 {
        self.left
    }

    /// Takes the next `count` free pages in a row, behind those taken last. Returns the first.
    ///
    /// It does not take the same pages again, because of their cost: bytes that were just written into another CPU's
    /// cache, or out of it, cost several times as much as bytes that have reached the cache that both CPUs share
    /// (docs/decisions/0015-a-pool-goes-round.md).
    pub fn take(&mut self, count: u32) -> Option<u32> {
        if count == 0 || count > self.left {
            return None;
        }
        let first = self.find(self.next, self.count, count).or_else(|| self.find(0, self.count, count))?;
        self.mark(first, count);
        self.next = first + count;
        Some(first)
    }

    /// Returns the first page of the first `count` free pages in a row in `from..to`.
    fn find(&self, from: u32, to: u32, count: u32) -> Option<u32> {
        let (mut first, mut at) = (from, from);
        while at < to {
            let rest = self.free[at as usize / 64] >> (at % 64);
            let ones = rest.trailing_ones();
            at += match ones {
                0 => rest.trailing_zeros().min(64 - at % 64),
                ones => ones,
            };
            match ones {
                0 => first = at,
                _ if at - first >= count => return Some(first),
                _ => {}
            }
        }
        None
    }

    /// Takes exactly these pages if all of them are free.
    pub fn take_at(&mut self, first: u32, count: u32) -> bool {
        let pages = first..first.saturating_add(count);
        let all_free = pages.clone().all(|page| {
            let word = self.free.get(page as usize / 64);
            word.is_some_and(|word| word >> (page % 64) & 1 == 1)
        });
        if all_free {
            self.mark(first, count);
        }
        all_free
    }

    fn mark(&mut self, first: u32, count: u32) {
        for page in first..first + count {
            self.free[page as usize / 64] &= !(1 << (page % 64));
        }
        self.left -= count;
    }

    /// Frees these pages.
    pub fn give(&mut self, first: u32, count: u32) {
        for page in first..first + count {
            self.free[page as usize / 64] |= 1 << (page % 64);
        }
        self.left += count;
    }
}

/// Consecutive pages that are taken. The holder of this value may write them (P2). Pass it to [`Pool::give`] when no
/// reader reads them any more.
#[derive(Debug)]
#[must_use = "pages that nobody gives back are lost"]
pub struct Run {
    first: u32,
    count: u32,
}

impl Run {
    /// Returns the first page.
    pub fn first(&self) -> u32 {
        self.first
    }

    /// Returns the number of pages.
    pub fn pages(&self) -> u32 {
        self.count
    }
}

/// The owner's end of a pool.
#[cfg(not(loom))]
#[derive(Debug)]
pub struct Pool {
    region: Region,
    generations: Generations<Span<Line>>,
    pages: Pages,
}

#[cfg(not(loom))]
impl Pool {
    /// Creates a pool of all pages of `region`, all free. The generations lie in `generations`, in other memory of
    /// ours.
    ///
    /// # Safety
    /// No other code, in this process or another, writes `region` while the pool lives (P1).
    pub unsafe fn new(region: Region, generations: Span<Line>) -> Result<Self, RegionError> {
        let len = region.len();
        let pages = u32::try_from(len / PAGE_LEN).unwrap_or(u32::MAX);
        // A piece names a byte with 32 bits.
        if generation_lines(pages) > generations.len() || u32::try_from(len).is_err() {
            return Err(RegionError::OutOfBounds {
                offset: 0,
                end: len,
                len: generations.len() * PAGE_LEN * 2 * LINE_WORDS,
            });
        }
        region.is_unlent()?;
        Ok(Pool { region, generations: Generations::new(generations), pages: Pages::new(pages) })
    }

    /// Returns the number of free pages.
    pub fn left(&self) -> u32 {
        self.pages.left()
    }

    /// Takes `count` free pages in a row, if there are any.
    pub fn take(&mut self, count: u32) -> Option<Run> {
        self.pages.take(count).map(|first| Run { first, count })
    }

    /// Takes exactly these pages, which a predecessor had, if they are free.
    pub fn take_at(&mut self, first: u32, count: u32) -> Option<Run> {
        self.pages.take_at(first, count).then_some(Run { first, count })
    }

    /// Frees the pages of a run that no reader reads any more.
    #[expect(clippy::needless_pass_by_value, reason = "the caller gives the run away")]
    pub fn give(&mut self, run: Run) {
        self.pages.give(run.first, run.count);
    }

    /// Frees a run that a reader may still be reading. The reader will find it changed (P4).
    pub fn take_back(&mut self, run: Run) {
        self.generations.renew(run.first, run.count);
        self.give(run);
    }

    /// Cuts a run behind its first `count` pages. Returns the rest.
    pub fn split(&mut self, run: &mut Run, count: u32) -> Run {
        assert!((1..run.count).contains(&count), "a run of {} pages was to be cut behind {count}", run.count);
        let rest = Run { first: run.first + count, count: run.count - count };
        run.count = count;
        rest
    }

    /// Joins two runs again that were one before [`split`](Self::split) cut them.
    pub fn join(&mut self, mut run: Run, rest: Option<Run>) -> Run {
        if let Some(rest) = rest {
            assert_eq!(run.first + run.count, rest.first, "runs that are joined lie side by side");
            run.count += rest.count;
        }
        run
    }

    /// Returns `len` bytes of a run from byte `at` on.
    #[inline]
    pub fn bytes_mut(&mut self, run: &Run, at: usize, len: usize) -> &mut [u8] {
        assert!(
            at.saturating_add(len) <= run.count as usize * PAGE_LEN,
            "{len} bytes from {at} on in {} pages",
            run.count
        );
        // SAFETY: the maker of the pool promised that only we write it (P1), and `&mut self` lends its bytes one
        // borrow at a time.
        let bytes = unsafe { self.region.bytes_of_owner(run.first as usize * PAGE_LEN + at, len) };
        bytes.expect("a run lies in its pool")
    }

    /// Returns a copy of the `len` bytes from this page on, which a predecessor wrote, whether the page is free or
    /// not. Returns `None` if they are not all in the pool.
    pub fn copy_of(&mut self, page: u32, len: usize) -> Option<Vec<u8>> {
        // SAFETY: as in `bytes_mut`: only we write a pool (P1), and we borrow these bytes only while we copy them.
        let bytes = unsafe { self.region.bytes_of_owner(page as usize * PAGE_LEN, len) };
        bytes.ok().map(|bytes| bytes.to_vec())
    }

    /// Asks the CPU for the lines of `len` bytes of a run from `at` on, up to the end of the run, for writing soon.
    /// A hint: it changes nothing.
    #[inline]
    pub fn fetch(&self, run: &Run, at: usize, len: usize) {
        let len = len.min((run.count as usize * PAGE_LEN).saturating_sub(at));
        self.region.prefetch_to_write(run.first as usize * PAGE_LEN + at, len);
    }

    /// Returns the place of `len` bytes of a run from `at` on, for a reader.
    #[inline]
    pub fn piece(&self, run: &Run, at: u32, len: u32) -> Piece {
        let offset = run.first * PAGE + at;
        Piece { offset, len, generation: self.generations.of(offset / PAGE) }
    }
}

/// The owner of a pool named a piece that cannot exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the peer broke pool rule P2: it named {len} bytes from {offset} on in a pool of {pages} pages")]
pub struct NoSuchPiece {
    /// First byte named.
    pub offset: u32,
    /// Length named, in bytes.
    pub len: u32,
    /// Number of pages in the pool.
    pub pages: u32,
}

/// A reader's end of a pool.
#[cfg(not(loom))]
#[derive(Debug, Clone)]
pub struct PeerPool {
    region: PeerRegion,
    pages: u32,
    generations: PeerGenerations<Span<Line>>,
}

#[cfg(not(loom))]
impl PeerPool {
    /// Opens a peer's pool, whose generations lie in `generations`.
    pub fn new(region: PeerRegion, generations: Claims<Span<Line>>) -> Result<Self, RegionError> {
        let len = region.len();
        let pages = u32::try_from(len / PAGE_LEN).unwrap_or(u32::MAX);
        if generation_lines(pages) > generations.len() {
            return Err(RegionError::OutOfBounds {
                offset: 0,
                end: len,
                len: generations.len() * PAGE_LEN * 2 * LINE_WORDS,
            });
        }
        Ok(PeerPool { region, pages, generations: PeerGenerations::new(generations) })
    }

    /// Checks that a piece lies in this pool.
    #[inline]
    pub fn check(&self, piece: Piece) -> Result<(), NoSuchPiece> {
        let end = u64::from(piece.offset) + u64::from(piece.len);
        match end <= u64::from(self.pages) * PAGE_LEN as u64 && piece.len > 0 {
            true => Ok(()),
            false => Err(NoSuchPiece { offset: piece.offset, len: piece.len, pages: self.pages }),
        }
    }

    /// Copies the first bytes of a piece into `into`. Trust them only if the piece [is whole](Self::is_whole)
    /// afterwards.
    ///
    /// # Panics
    /// If the piece is not in the pool, or has fewer bytes.
    #[inline]
    pub fn copy_to(&self, piece: Piece, into: &mut [u8]) {
        assert!(into.len() <= piece.len as usize, "{} bytes of a piece of {}", into.len(), piece.len);
        self.region.copy_to(piece.offset as usize, into).expect("the piece was checked");
    }

    /// Returns the 8 bytes of a piece from its byte `at` on as a word in native order. Trust them only if the piece
    /// [is whole](Self::is_whole) afterwards.
    ///
    /// # Panics
    /// If the piece is not in the pool, or has fewer bytes.
    #[inline]
    pub fn word(&self, piece: Piece, at: usize) -> u64 {
        assert!(at + 8 <= piece.len as usize, "8 bytes from {at} on of a piece of {}", piece.len);
        self.region.word(piece.offset as usize + at).expect("the piece was checked")
    }

    /// Copies `len` bytes of a piece, from its byte `at` on, into a stranger's memory at `offset`. Trust them only
    /// if the piece [is whole](Self::is_whole) afterwards.
    ///
    /// # Panics
    /// If the piece is not in the pool, or has fewer bytes.
    #[inline]
    pub fn copy_to_common(
        &self,
        piece: Piece,
        at: usize,
        len: usize,
        into: &CommonRegion,
        offset: usize,
    ) -> Result<(), RegionError> {
        assert!(at + len <= piece.len as usize, "{len} bytes from {at} on of a piece of {}", piece.len);
        into.copy_from_peer(offset, &self.region, piece.offset as usize + at, len)
    }

    /// Writes `before`, and then a piece, to a descriptor in one system call. Returns how many bytes the kernel
    /// took. Trust them only if the piece [is whole](Self::is_whole) afterwards.
    #[inline]
    pub fn write_to(&self, fd: BorrowedFd<'_>, before: &[u8], piece: Piece) -> io::Result<usize> {
        self.region.write_to(fd, before, piece.offset as usize, piece.len as usize)
    }

    /// Returns the bytes of a piece as 64-bit words in native order, each loaded once. The bytes that follow the
    /// piece fill up the last word. Returns `None` for a piece that does not begin on a whole word. Trust the words
    /// only if the piece [is whole](Self::is_whole) afterwards, and the peer is trusted not to write there.
    #[inline]
    pub fn words(&self, piece: Piece) -> Option<impl ExactSizeIterator<Item = u64>> {
        let words = self.region.words(piece.offset as usize, (piece.len as usize).div_ceil(8)).ok()?;
        Some(words.iter().map(|word| word.load(Relaxed)))
    }

    /// Whether the piece was still unchanged once it had been read (P3).
    #[inline]
    pub fn is_whole(&self, piece: Piece) -> bool {
        self.generations.are(piece.offset / PAGE, piece.generation)
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use crate::region::Pages as PagesOf;
    use proptest::prelude::*;

    /// Returns both ends of a pool of `pages` pages: the owner's and a peer's.
    fn pair(pages: u32) -> (Pool, PeerPool) {
        let (control, region) = (memory(1), memory(pages));
        let lines = generation_lines(pages);
        let claims = PeerRegion::map_kept(control.fd(), control.len()).unwrap().claims(0, lines).unwrap();
        let peer = PeerPool::new(PeerRegion::map_kept(region.fd(), region.len()).unwrap(), claims).unwrap();
        // SAFETY: made here, and no other code has it for writing (P1).
        (unsafe { Pool::new(region, control.span(0, lines).unwrap()) }.unwrap(), peer)
    }

    fn memory(pages: u32) -> Region {
        Region::create("test-pool", PAGE_LEN * pages as usize, PagesOf::Small).unwrap()
    }

    #[test]
    fn a_region_that_is_lent_as_atomics_makes_no_pool() {
        let region = memory(8);
        let lent = region.span::<Line>(0, 1).unwrap();
        let generations = memory(1).span(0, 1).unwrap();
        // SAFETY: made here, and no other code has it (P1).
        assert!(unsafe { Pool::new(region, generations) }.is_err());
        drop(lent);
    }

    fn read(peer: &PeerPool, piece: Piece) -> Option<Vec<u8>> {
        let mut copy = vec![0; piece.len as usize];
        peer.copy_to(piece, &mut copy);
        peer.is_whole(piece).then_some(copy)
    }

    #[test]
    fn a_reader_gets_what_was_written() {
        let (mut pool, peer) = pair(8);
        let run = pool.take(2).unwrap();
        pool.bytes_mut(&run, 4090, 12).copy_from_slice(b"over an edge");
        let piece = pool.piece(&run, 4090, 12);
        peer.check(piece).unwrap();
        assert_eq!(read(&peer, piece).unwrap(), b"over an edge");
        pool.give(run);
        assert_eq!(pool.left(), 8);
    }

    #[test]
    fn p4_who_reads_too_slowly_finds_out() {
        let (mut pool, peer) = pair(8);
        let (kept, run) = (pool.take(1).unwrap(), pool.take(3).unwrap());
        let pieces = [0, 4096, 8192].map(|at| pool.piece(&run, at, 100));
        let other = pool.piece(&kept, 0, 100);
        pool.take_back(run);
        for piece in pieces {
            assert_eq!(read(&peer, piece), None);
        }
        assert!(read(&peer, other).is_some(), "another run is as it was");
        let again = pool.take(3).unwrap();
        let piece = pool.piece(&again, 0, 100);
        assert!(read(&peer, piece).is_some(), "the same pages hold other bytes now");
    }

    #[test]
    fn p2_what_a_liar_names_is_refused() {
        let (_pool, peer) = pair(8);
        let piece = |offset, len| Piece { offset, len, generation: 0 };
        let end = 8 * 4096;
        peer.check(piece(end - 1, 1)).unwrap();
        for wrong in [piece(end - 1, 2), piece(end, 1), piece(u32::MAX, u32::MAX), piece(0, 0), piece(5, end)] {
            assert!(peer.check(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_run_can_be_cut() {
        let (mut pool, _peer) = pair(8);
        let mut run = pool.take(8).unwrap();
        let tail = pool.split(&mut run, 3);
        assert_eq!((run.first(), run.pages(), tail.first(), tail.pages()), (0, 3, 3, 5));
        let mut run = pool.join(run, Some(tail));
        assert_eq!(run.pages(), 8);
        let tail = pool.split(&mut run, 3);
        pool.give(tail);
        assert_eq!(pool.left(), 5);
        pool.give(run);
        assert_eq!(pool.take(8).unwrap().first(), 0);
    }

    proptest! {
        #[test]
        fn p2_a_page_is_in_one_run_at_most(count in 1_u32..200, steps in prop::collection::vec((1_u32..40, any::<prop::sample::Index>(), any::<bool>()), 1..200)) {
            let mut pages = Pages::new(count);
            let mut owner = vec![None; count as usize];
            let mut runs: Vec<(u32, u32)> = Vec::new();
            for (number, (wanted, which, gives)) in steps.into_iter().enumerate() {
                if gives && !runs.is_empty() {
                    let (first, len) = runs.swap_remove(which.index(runs.len()));
                    pages.give(first, len);
                    owner[first as usize..(first + len) as usize].fill(None);
                } else if let Some(first) = pages.take(wanted) {
                    let taken = &mut owner[first as usize..(first + wanted) as usize];
                    prop_assert!(taken.iter().all(Option::is_none));
                    taken.fill(Some(number));
                    runs.push((first, wanted));
                } else {
                    let longest = owner.chunk_by(|a, b| a.is_none() == b.is_none()).filter(|run| run[0].is_none()).map(<[_]>::len).max();
                    prop_assert!(longest.unwrap_or(0) < wanted as usize, "there were {longest:?} in a row");
                }
                prop_assert_eq!(pages.left() as usize, owner.iter().filter(|page| page.is_none()).count());
            }
        }
    }
}
