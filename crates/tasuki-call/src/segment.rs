//! The control memory of one end of a connection: one segment per writer, mapped read-only by the other end.
//!
//! | line   | holds                                                                   |
//! |--------|-------------------------------------------------------------------------|
//! | 0      | word 0: mark of this memory, word 1: the verdict (server only)          |
//! | 2      | the writer's bell                                                       |
//! | 4      | the writer's head in the ring that it reads                             |
//! | 192    | the slot table of the writer's arena                                    |
//! | then   | the ring that the writer writes, on a page of its own                   |
//!
//! Lines 6 to 191 are free. Words with different readers or different rates of change lie two lines apart, because CPUs
//! fetch lines in pairs.

use std::os::fd::BorrowedFd;

use tasuki_shm::line::{Claims, LINE_LEN, Line};
use tasuki_shm::region::{PAGE_LEN, Pages, PeerRegion, Region, RegionError, Span};
use tasuki_shm::slots::table_lines;
use tasuki_shm::sync::Relaxed;

/// Mark of "control memory of a Tasuki call, layout 1". Changes with the layout.
pub(crate) const MAGIC: u64 = u64::from_be_bytes(*b"TASUKI\0\x01");

const IDENTITY: usize = 0;
const BELL: usize = 2;
const HEAD: usize = 4;
const TABLE: usize = 192;

/// Sizes of the variable parts. Both ends learn them from the handshake and never from the memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    /// Number of lines of the writer's ring: a power of two.
    pub ring: u32,
    /// Number of slots of the writer's arena.
    pub slots: u32,
}

impl Layout {
    fn ring_offset(self) -> usize {
        ((TABLE + table_lines(self.slots)) * LINE_LEN).next_multiple_of(PAGE_LEN)
    }

    pub fn len(self) -> usize {
        self.ring_offset() + self.ring as usize * LINE_LEN
    }
}

/// The segment that we write.
#[derive(Debug)]
pub(crate) struct Segment {
    region: Region,
    layout: Layout,
}

impl Segment {
    pub fn create(name: &str, layout: Layout) -> Result<Self, RegionError> {
        let region = Region::create(name, layout.len(), Pages::Small)?;
        region.seal_writers()?;
        let segment = Segment { region, layout };
        segment.lines(IDENTITY, 1)[0].word(0).store(MAGIC, Relaxed);
        Ok(segment)
    }

    fn lines(&self, first: usize, count: usize) -> Span<Line> {
        self.region.span(first * LINE_LEN, count).expect("the layout lies inside the segment made for it")
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.region.fd()
    }

    pub fn verdict(&self) -> Span<Line> {
        self.lines(IDENTITY, 1)
    }

    pub fn bell(&self) -> Span<Line> {
        self.lines(BELL, 1)
    }

    pub fn head(&self) -> Span<Line> {
        self.lines(HEAD, 1)
    }

    pub fn table(&self) -> Span<Line> {
        self.lines(TABLE, table_lines(self.layout.slots))
    }

    pub fn ring(&self) -> Span<Line> {
        self.lines(self.layout.ring_offset() / LINE_LEN, self.layout.ring as usize)
    }
}

/// The segment that the other end writes.
#[derive(Debug, Clone)]
pub(crate) struct PeerSegment {
    region: PeerRegion,
    layout: Layout,
}

/// Reasons why we cannot use a peer's segment.
#[derive(Debug, thiserror::Error)]
pub enum SegmentError {
    /// The memory cannot be mapped.
    #[error(transparent)]
    Memory(#[from] RegionError),
    /// The memory holds something else.
    #[error(
        "the memory handed over is not the control memory of a Tasuki call (it begins with {found:#018x}); the peer is of another version or broken"
    )]
    Foreign {
        /// First word of the memory.
        found: u64,
    },
}

impl PeerSegment {
    pub fn map(memory: BorrowedFd<'_>, layout: Layout) -> Result<Self, SegmentError> {
        let region = PeerRegion::map(memory, layout.len())?;
        let segment = PeerSegment { region, layout };
        match segment.claims(IDENTITY, 1).load(0, 0) {
            MAGIC => Ok(segment),
            found => Err(SegmentError::Foreign { found }),
        }
    }

    fn claims(&self, first: usize, count: usize) -> Claims<Span<Line>> {
        self.region
            .claims(first * LINE_LEN, count)
            .expect("the layout lies inside the segment, whose length was checked")
    }

    pub fn verdict(&self) -> Claims<Span<Line>> {
        self.claims(IDENTITY, 1)
    }

    pub fn bell(&self) -> Claims<Span<Line>> {
        self.claims(BELL, 1)
    }

    pub fn head(&self) -> Claims<Span<Line>> {
        self.claims(HEAD, 1)
    }

    pub fn ring(&self) -> Claims<Span<Line>> {
        self.claims(self.layout.ring_offset() / LINE_LEN, self.layout.ring as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: Layout = Layout { ring: 8, slots: 3 };

    #[test]
    fn a_peer_finds_what_the_writer_wrote() {
        let ours = Segment::create("test", SMALL).unwrap();
        let theirs = PeerSegment::map(ours.fd(), SMALL).unwrap();
        ours.ring()[7].word(7).store(1, Relaxed);
        ours.head()[0].word(0).store(2, Relaxed);
        ours.bell()[0].word(0).store(3, Relaxed);
        assert_eq!((theirs.ring().load(7, 7), theirs.head().load(0, 0), theirs.bell().load(0, 0)), (1, 2, 3));
    }

    #[test]
    fn foreign_or_short_memory_is_refused() {
        let foreign = Region::create("test", SMALL.len(), Pages::Small).unwrap();
        foreign.seal_writers().unwrap();
        assert!(matches!(PeerSegment::map(foreign.fd(), SMALL), Err(SegmentError::Foreign { found: 0 })));
        let ours = Segment::create("test", SMALL).unwrap();
        let more = Layout { ring: 1024, ..SMALL };
        assert!(matches!(PeerSegment::map(ours.fd(), more), Err(SegmentError::Memory(RegionError::Truncated { .. }))));
    }
}
