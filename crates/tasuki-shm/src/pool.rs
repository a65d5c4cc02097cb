//! A pool: memory of which one process makes runs of pages, writes them, and lets any number of others read them.
//!
//! An [arena](crate::arena) has slots of one size that move to one peer and back. A pool has frames of any length that several readers may hold
//! at once: its owner alone knows who they are, in memory of its own, so that nobody shares a counter with anybody. Since a reader only reads,
//! its owner can take pages back from one that never finishes, and the reader finds out.
//!
//! # Rules
//!
//! - **P1** Only the owner writes the pool and the generations; everybody else has them mapped read-only.
//! - **P2** A page is free or part of one run. Only who holds the run has its bytes.
//! - **P3** A reader believes bytes of a piece only after it has read them and then found the generation of the piece's first page unchanged.
//! - **P4** Pages that were taken back from a reader which may still read them get a new generation before they are written again.
//!
//! # Orderings
//!
//! - **RETAKE** a generation: stored by [`Generations::renew`] before the bytes are written anew, loaded by [`PeerGenerations::are`] after they
//!   were read. (That they were written before they are read at all, the ring sees to that brings the piece.)
#![cfg_attr(not(loom), allow(unsafe_code, reason = "lends the bytes of a run to the one who holds it"))]

use std::ops::Deref;
#[cfg(not(loom))]
use std::{io, os::fd::BorrowedFd};

use crate::line::{Claims, LINE_WORDS, Line};
#[cfg(not(loom))]
use crate::region::{CommonRegion, PAGE_LEN, PeerRegion, Region, RegionError, Span};
use crate::sync::{Acquire, Relaxed, Release, fence};

/// Bytes in a page.
pub const PAGE: u32 = 4096;

/// Bytes in a line: where a piece begins that shares none with another.
pub const LINE: u32 = 64;

#[cfg(not(loom))]
const _: () = assert!(PAGE as usize == PAGE_LEN && LINE as usize == crate::line::LINE_LEN);

/// Where a frame lies in a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Its first byte, counted from the pool's first.
    pub offset: u32,
    /// Bytes of it.
    pub len: u32,
    /// The generation of the page that holds its first byte, when it was written.
    pub generation: u32,
}

/// Lines that the generations of so many pages need.
pub fn generation_lines(pages: u32) -> usize {
    (pages as usize).div_ceil(2 * LINE_WORDS)
}

/// The line, the word in it and the shift in that where the generation of a page stands: 32 bits each.
fn place_of(page: u32) -> (usize, usize, u32) {
    let word = page as usize / 2;
    (word / LINE_WORDS, word % LINE_WORDS, page % 2 * 32)
}

/// The owner's side of the generations. `M` is memory of its own.
#[derive(Debug)]
pub struct Generations<M>(M);

impl<M: Deref<Target = [Line]>> Generations<M> {
    /// The generations in `lines`, as they stand there.
    pub fn new(lines: M) -> Self {
        Generations(lines)
    }

    /// The generation of a page.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "a half is what is meant")]
    pub fn of(&self, page: u32) -> u32 {
        let (line, word, shift) = place_of(page);
        (self.0[line].word(word).load(Relaxed) >> shift) as u32
    }

    /// Gives these pages a new generation, before they are written again (P4).
    pub fn renew(&mut self, first: u32, count: u32) {
        for page in first..first + count {
            let (line, word, shift) = place_of(page);
            let word = self.0[line].word(word);
            let next = u64::from(self.of(page).wrapping_add(1)) << shift;
            word.store(word.load(Relaxed) & !(u64::from(u32::MAX) << shift) | next, Relaxed);
        }
        // RETAKE: the new generation stands before anything is written there.
        fence(Release);
    }
}

/// A reader's side.
#[derive(Debug)]
pub struct PeerGenerations<M>(Claims<M>);

impl<M: Deref<Target = [Line]>> PeerGenerations<M> {
    /// Looks at the generations that the owner of a pool says.
    pub fn new(claims: Claims<M>) -> Self {
        PeerGenerations(claims)
    }

    /// Whether `page` still has this generation: what was read before is what was written (P3).
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "a half is what is meant")]
    pub fn are(&self, page: u32, generation: u32) -> bool {
        // RETAKE: the bytes were read before the generation is.
        fence(Acquire);
        let (line, word, shift) = place_of(page);
        (self.0.load(line, word) >> shift) as u32 == generation
    }
}

/// Which pages are free: the owner's private knowledge.
#[derive(Debug)]
pub struct Pages {
    /// One bit a page, set when it is free.
    free: Box<[u64]>,
    left: u32,
    count: u32,
    /// Behind what was taken last.
    next: u32,
}

impl Pages {
    /// So many pages, all free.
    pub fn new(count: u32) -> Self {
        let mut pages = Pages { free: vec![0; (count as usize).div_ceil(64)].into(), left: 0, count, next: 0 };
        pages.give(0, count);
        pages
    }

    /// How many are free.
    pub fn left(&self) -> u32 {
        self.left
    }

    /// Takes the next `count` pages in a row that are free, behind those that were taken last; says the first.
    ///
    /// Not the same again: bytes that were written into another CPU's cache, or out of it, a moment ago cost several times what those cost that have
    /// found their way to the cache that both share (docs/decisions/0015-a-pool-goes-round.md).
    pub fn take(&mut self, count: u32) -> Option<u32> {
        if count == 0 || count > self.left {
            return None;
        }
        let first = self.find(self.next, self.count, count).or_else(|| self.find(0, self.count, count))?;
        self.mark(first, count);
        self.next = first + count;
        Some(first)
    }

    /// The first `count` free pages in a row in `from..to`.
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

    /// Takes exactly these pages, if all of them are free.
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

    /// These pages are free again.
    pub fn give(&mut self, first: u32, count: u32) {
        for page in first..first + count {
            self.free[page as usize / 64] |= 1 << (page % 64);
        }
        self.left += count;
    }
}

/// Pages in a row that are taken. Whoever holds it may write them (P2); give it to [`Pool::give`] when nobody reads them any more.
#[derive(Debug)]
#[must_use = "pages that nobody gives back are lost"]
pub struct Run {
    first: u32,
    count: u32,
}

impl Run {
    /// Its first page.
    pub fn first(&self) -> u32 {
        self.first
    }

    /// Pages.
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
    /// A pool of all pages of `region`; all of them are free. The generations stand in `generations`, in other memory of ours.
    ///
    /// # Safety
    /// Nobody else writes `region`, in this process or another, while the pool lives (P1).
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

    /// How many pages are free.
    pub fn left(&self) -> u32 {
        self.pages.left()
    }

    /// Takes `count` free pages in a row, if there are any.
    pub fn take(&mut self, count: u32) -> Option<Run> {
        self.pages.take(count).map(|first| Run { first, count })
    }

    /// Takes exactly these pages, if they are free: what a predecessor had.
    pub fn take_at(&mut self, first: u32, count: u32) -> Option<Run> {
        self.pages.take_at(first, count).then_some(Run { first, count })
    }

    /// Nobody reads this run any more: its pages are free.
    #[expect(clippy::needless_pass_by_value, reason = "whoever gives a run away has it no longer")]
    pub fn give(&mut self, run: Run) {
        self.pages.give(run.first, run.count);
    }

    /// Frees a run that somebody may still be reading, and will find changed (P4).
    pub fn take_back(&mut self, run: Run) {
        self.generations.renew(run.first, run.count);
        self.give(run);
    }

    /// Cuts a run behind its first `count` pages; gives the rest.
    pub fn split(&mut self, run: &mut Run, count: u32) -> Run {
        assert!((1..run.count).contains(&count), "a run of {} pages was to be cut behind {count}", run.count);
        let rest = Run { first: run.first + count, count: run.count - count };
        run.count = count;
        rest
    }

    /// Two runs that were one before they were [cut](Self::split), as one again.
    pub fn join(&mut self, mut run: Run, rest: Option<Run>) -> Run {
        if let Some(rest) = rest {
            assert_eq!(run.first + run.count, rest.first, "runs that are joined lie side by side");
            run.count += rest.count;
        }
        run
    }

    /// The bytes of a run from `at` on.
    #[inline]
    pub fn bytes_mut(&mut self, run: &Run, at: usize, len: usize) -> &mut [u8] {
        assert!(
            at.saturating_add(len) <= run.count as usize * PAGE_LEN,
            "{len} bytes from {at} on in {} pages",
            run.count
        );
        // SAFETY: nobody but us writes a pool, by the word of its maker (P1), and what is lent of it is lent one at a time, by `&mut self`.
        let bytes = unsafe { self.region.bytes_of_owner(run.first as usize * PAGE_LEN + at, len) };
        bytes.expect("a run lies in its pool")
    }

    /// A copy of the `len` bytes from this page on, whether it is free or not: what a predecessor put there. `None` if they are not all in the pool.
    pub fn copy_of(&mut self, page: u32, len: usize) -> Option<Vec<u8>> {
        // SAFETY: as in `bytes_mut`: nobody but us writes a pool (P1), and these are lent for as long as they are copied.
        let bytes = unsafe { self.region.bytes_of_owner(page as usize * PAGE_LEN, len) };
        bytes.ok().map(|bytes| bytes.to_vec())
    }

    /// Asks the CPU for the lines of `len` bytes from `at` on of a run, as far as it goes, for they are to be written soon. A hint: it changes
    /// nothing.
    #[inline]
    pub fn fetch(&self, run: &Run, at: usize, len: usize) {
        let len = len.min((run.count as usize * PAGE_LEN).saturating_sub(at));
        self.region.prefetch_to_write(run.first as usize * PAGE_LEN + at, len);
    }

    /// Where the `len` bytes from `at` on of a run are, for whoever is to read them.
    #[inline]
    pub fn piece(&self, run: &Run, at: u32, len: u32) -> Piece {
        let offset = run.first * PAGE + at;
        Piece { offset, len, generation: self.generations.of(offset / PAGE) }
    }
}

/// What the owner of a pool said of a piece is not possible.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the peer broke pool rule P2: it named {len} bytes from {offset} on in a pool of {pages} pages")]
pub struct NoSuchPiece {
    /// The first byte named.
    pub offset: u32,
    /// How many.
    pub len: u32,
    /// Pages there are.
    pub pages: u32,
}

/// A reader's end of a pool.
#[cfg(not(loom))]
#[derive(Debug)]
pub struct PeerPool {
    region: PeerRegion,
    pages: u32,
    generations: PeerGenerations<Span<Line>>,
}

#[cfg(not(loom))]
impl PeerPool {
    /// Looks at a peer's pool, whose generations stand in `generations`.
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

    /// Whether a piece lies in this pool.
    #[inline]
    pub fn check(&self, piece: Piece) -> Result<(), NoSuchPiece> {
        let end = u64::from(piece.offset) + u64::from(piece.len);
        match end <= u64::from(self.pages) * PAGE_LEN as u64 && piece.len > 0 {
            true => Ok(()),
            false => Err(NoSuchPiece { offset: piece.offset, len: piece.len, pages: self.pages }),
        }
    }

    /// Copies the first bytes of a piece into `into`. They are to be believed only if the piece [is whole](Self::is_whole) afterwards.
    ///
    /// # Panics
    /// If the piece is not in the pool, or has fewer bytes.
    #[inline]
    pub fn copy_to(&self, piece: Piece, into: &mut [u8]) {
        assert!(into.len() <= piece.len as usize, "{} bytes of a piece of {}", into.len(), piece.len);
        self.region.copy_to(piece.offset as usize, into).expect("the piece was checked");
    }

    /// Copies `len` bytes from byte `at` of a piece on to where a stranger has its memory. To be believed only if the piece
    /// [is whole](Self::is_whole) afterwards.
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

    /// Writes `before`, and then a piece, to a descriptor in one go; says how many bytes it took. What it took is to be believed only if the
    /// piece [is whole](Self::is_whole) afterwards.
    #[inline]
    pub fn write_to(&self, fd: BorrowedFd<'_>, before: &[u8], piece: Piece) -> io::Result<usize> {
        self.region.write_to(fd, before, piece.offset as usize, piece.len as usize)
    }

    /// The bytes of a piece as 64-bit words in native order, each loaded once; the last is filled up with what lies behind. `None` for a piece
    /// that does not begin on a whole word. To be believed only if the piece [is whole](Self::is_whole) afterwards, and from a peer that is
    /// trusted not to write there.
    #[inline]
    pub fn words(&self, piece: Piece) -> Option<impl ExactSizeIterator<Item = u64>> {
        let words = self.region.words(piece.offset as usize, (piece.len as usize).div_ceil(8)).ok()?;
        Some(words.iter().map(|word| word.load(Relaxed)))
    }

    /// Whether nothing was written over a piece by the time it had been read (P3).
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

    /// A pool of so many pages, as its owner and as a peer sees it.
    fn pair(pages: u32) -> (Pool, PeerPool) {
        let (control, region) = (memory(1), memory(pages));
        let lines = generation_lines(pages);
        let claims = PeerRegion::map_kept(control.fd(), control.len()).unwrap().claims(0, lines).unwrap();
        let peer = PeerPool::new(PeerRegion::map_kept(region.fd(), region.len()).unwrap(), claims).unwrap();
        // SAFETY: made here, and nobody else has it to be written (P1).
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
        // SAFETY: made here, and nobody else has it (P1).
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
