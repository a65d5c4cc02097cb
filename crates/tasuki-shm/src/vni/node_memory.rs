//! A node's memory on a VNI: the pool with its frames, a ring to each node that it sends to, and its read positions
//! in the rings of the nodes that send to it.
//!
//! Only the node's worker writes it; the workers of the other nodes read it. It belongs to the node and outlives its
//! workers: the daemon creates it and keeps its descriptors, and a successor resumes where its predecessor stopped.
//! The kernel allocates each page on its first write, so an unused ring costs nothing.
//!
//! # Invariants
//!
//! - **K1** The daemon gives writable descriptors of a node memory to workers of its node alone. Of these, only the
//!   worker that holds the lease of the node's end reads and writes the memory. The next worker may map it earlier, and
//!   touches nothing before it has taken the lease: by then the one before has passed the lease on and touches nothing
//!   from then on, or it is dead.
//!   All other processes get read-only descriptors ([`NodeMemoryFds::to_read`]). This is a promise, like a giver's promise about a NIC's memory (N2 of
//!   `tasuki-net`'s `nic/memory.rs`): no type sees which other process has a descriptor. A node whose workers break
//!   it changes only its own frames.
//!
//! # Layout of the control memory
//!
//! | bytes                    | contents                                                                               |
//! |--------------------------|----------------------------------------------------------------------------------------|
//! | 0                        | the bell                                                                               |
//! | 128 to 255               | the set of nodes that it talks to: only these nodes look at its rings to them          |
//! | 2048 on                  | the generations of the pool's pages, 4 bytes each                                      |
//! | next page, 64 for a node | the line of each node: how far its ring to us was read, and the counters between us    |
//! | next page, a page a node | the ring to each node: 256 messages of 16 bytes                                        |
//! | next page                | the ledger, for a successor: the progress of a native node's program, of a memif node in its client's rings, or of a namespace in reading its TAP |
//! | next [`JOURNAL_PAGES`]   | the journal, for a successor: completions in the packed rings of a node that is a virtual machine, a page a ring; and the counts of each queue |
//! | last page                | more of the ledger: how far the further rings of such a node are |
//!
//! Memory that an earlier daemon made ends with the first [`JOURNAL_PAGES_BEFORE`] of the journal, and earlier workers read
//! no more of it.

#![allow(unsafe_code, reason = "answers for the keeper of a node's memory towards the pool (K1)")]

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::NODES_MAX;
use super::directory::SET_WORDS;
use crate::line::{Claims, LINE_LEN, LINE_WORDS, Line};
use crate::pool::{PeerPool, Pool, generation_lines};
use crate::region::{PAGE_LEN, Pages, PeerRegion, Region, RegionError, Span};

/// Lines of the ring from one node to another: one page.
const RING_LINES: usize = PAGE_LEN / LINE_LEN;

/// Number of lines in the ledger: one page.
pub const LEDGER_LINES: usize = PAGE_LEN / LINE_LEN;

/// Number of pages in the journal.
pub const JOURNAL_PAGES: usize = 64;

/// The same in memory that an earlier daemon made.
pub const JOURNAL_PAGES_BEFORE: usize = 16;

/// Line of a journal's page that has the counts of the queue.
pub const QUEUE_COUNTS_LINE: usize = LEDGER_LINES - 2;

/// Line of the journal's first page whose word 0 is the number of pairs of queues that have had frames to count: pages
/// behind those of them need not be read. Word 0 of the same line of the second page is the number of pairs that run now,
/// plus 1; 0 if it is not known.
pub const QUEUE_PAIRS_LINE: usize = LEDGER_LINES - 1;

/// Name of each of these counts, in the order of its words.
pub const QUEUE_COUNTS: [&str; LINE_WORDS] =
    ["packets", "bytes", "kicks", "interrupts", "suppressed", "drops_no_room", "drops_length", "drops_other"];

const BELL_AT: usize = 0;
const TALKS_AT: usize = 128;
const GENERATIONS_AT: usize = 2048;
const _: () = assert!(TALKS_AT + SET_WORDS * 8 <= GENERATIONS_AT);

/// Default number of pages of a pool: 2 MiB.
pub const POOL_PAGES: u32 = 512;

/// Minimum number of pages of a pool. One reader may hold half of them, which has room for the longest frame; the
/// other half has room for the next.
pub const POOL_PAGES_MIN: u32 = 64;

/// Maximum number of pages of a pool: 2 GiB. A piece names its place in 32 bits.
pub const POOL_PAGES_MAX: u32 = 1 << 19;

/// Returns how many bytes of a node memory with a pool of `pool_pages` pages one other node reads at most. When another
/// process reads a page that is not written, or was punched out, the kernel allocates it and charges the reader's
/// control group. So the memory limit of a node must leave room for this much of each of its neighbours. Otherwise they
/// could get its worker killed.
pub fn readable_len(pool_pages: u32) -> u64 {
    // Bell, set and generations; one line; one ring.
    let control = Layout::of(pool_pages).lines_at + 2 * PAGE_LEN;
    control as u64 + u64::from(pool_pages) * PAGE_LEN as u64
}

/// Reasons why a node memory cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum NodeMemoryError {
    /// The number of pages is out of range.
    #[error(
        "a pool of {pages} pages (4 KiB each) was asked for; it has {POOL_PAGES_MIN} to {POOL_PAGES_MAX}, by default {POOL_PAGES}"
    )]
    PoolPages {
        /// Number of pages requested.
        pages: u32,
    },
    /// The kernel refused the memory.
    #[error(transparent)]
    Region(#[from] RegionError),
}

/// Offsets in the control memory of a node, in bytes. They depend on the number of pages of its pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Layout {
    lines_at: usize,
    rings_at: usize,
    ledger_at: usize,
    journal_at: usize,
    more_at: usize,
    len_before: usize,
    len: usize,
}

impl Layout {
    fn of(pool_pages: u32) -> Self {
        let generations = generation_lines(pool_pages) * LINE_LEN;
        let lines_at = (GENERATIONS_AT + generations).next_multiple_of(PAGE_LEN);
        let rings_at = (lines_at + usize::from(NODES_MAX) * LINE_LEN).next_multiple_of(PAGE_LEN);
        let ledger_at = rings_at + usize::from(NODES_MAX) * PAGE_LEN;
        let journal_at = ledger_at + PAGE_LEN;
        let more_at = journal_at + JOURNAL_PAGES * PAGE_LEN;
        let len_before = journal_at + JOURNAL_PAGES_BEFORE * PAGE_LEN;
        Layout { lines_at, rings_at, ledger_at, journal_at, more_at, len_before, len: more_at + PAGE_LEN }
    }

    fn line_of(self, node: u16) -> usize {
        assert!(node < NODES_MAX, "a VNI has no node {node}");
        self.lines_at + usize::from(node) * LINE_LEN
    }

    fn ring_to(self, node: u16) -> usize {
        assert!(node < NODES_MAX, "a VNI has no node {node}");
        self.rings_at + usize::from(node) * PAGE_LEN
    }
}

/// The descriptors of a node memory that is not mapped, for its maker and keeper.
#[derive(Debug)]
pub struct NodeMemoryFds {
    /// Descriptor of the control memory.
    pub control: OwnedFd,
    /// Descriptor of the pool.
    pub pool: OwnedFd,
}

impl NodeMemoryFds {
    /// Creates the memory of a node, with a pool of `pool_pages` pages.
    pub fn create(name: &str, pool_pages: u32) -> Result<Self, NodeMemoryError> {
        if !(POOL_PAGES_MIN..=POOL_PAGES_MAX).contains(&pool_pages) {
            return Err(NodeMemoryError::PoolPages { pages: pool_pages });
        }
        let make = |what: &str, len| {
            let memory = Region::create(&format!("{name}-{what}"), len, Pages::Small)?;
            // A worker that may write it could keep all later ones from that.
            memory.seal_seals()?;
            memory.close_to_others()?;
            Ok::<_, RegionError>(memory.into_fd())
        };
        let control = make("control", Layout::of(pool_pages).len)?;
        let pool = make("pool", pool_pages as usize * PAGE_LEN)?;
        Ok(NodeMemoryFds { control, pool })
    }

    /// Returns read-only descriptors of the same memory, for its readers.
    ///
    /// A process of the same user can open them anew for writing unless it has no access to `/proc`; a process of
    /// another user cannot.
    pub fn to_read(&self) -> Result<NodeMemoryFds, RegionError> {
        let read_only = crate::region::read_only;
        Ok(NodeMemoryFds { control: read_only(self.control.as_fd())?, pool: read_only(self.pool.as_fd())? })
    }

    /// Returns the descriptors: control memory, pool.
    pub fn fds(&self) -> [BorrowedFd<'_>; 2] {
        [self.control.as_fd(), self.pool.as_fd()]
    }
}

/// Returns whether the node with this memory has noted anything about the node with this number: what it read and sent.
/// Then another node of that number would be taken for that one. The memory is not mapped, and its owner may write
/// anything there.
pub fn has_noted(control: BorrowedFd<'_>, pool: BorrowedFd<'_>, node: u16) -> bool {
    let pages = rustix::fs::fstat(pool).map_or(0, |stat| stat.st_size.unsigned_abs() / PAGE_LEN as u64);
    let layout = Layout::of(u32::try_from(pages).unwrap_or(POOL_PAGES_MAX).min(POOL_PAGES_MAX));
    let mut line = [0; LINE_LEN];
    // A page that was never written stays a hole.
    let read = rustix::io::pread(control, &mut line, layout.line_of(node) as u64);
    // The index up to which its ring was read stays once it has left: that of the next node begins there.
    line[..4].fill(0);
    read.is_ok_and(|_| line != [0; LINE_LEN])
}

/// A node memory as its own node maps it.
#[derive(Debug)]
pub struct NodeMemory {
    control: Region,
    layout: Layout,
}

impl NodeMemory {
    /// Maps the memory that a keeper made for this node, with the contents that a predecessor left in it. Also
    /// returns the pool, all of whose pages are free. Reads and writes nothing there: a worker may call it before it has
    /// taken the lease (K1).
    pub fn adopt(fds: NodeMemoryFds) -> Result<(Self, Pool), RegionError> {
        let pool = Region::adopt(fds.pool)?;
        let pages = u32::try_from(pool.len() / PAGE_LEN).unwrap_or(u32::MAX);
        let layout = Layout::of(pages);
        let control = Region::adopt(fds.control)?;
        if control.len() < layout.len_before {
            return Err(RegionError::Truncated { have: control.len(), need: layout.len_before });
        }
        // A fault on each page would lie in the pause in which no worker drives.
        control.populate_allocated();
        let node_memory = NodeMemory { control, layout };
        let generations = node_memory.control.span(GENERATIONS_AT, generation_lines(pages))?;
        // SAFETY: the keeper lets one worker at a time write it, and this process touches it only once it is that worker
        // (K1); nothing else maps it here.
        let pool = unsafe { Pool::new(pool, generations) }?;
        Ok((node_memory, pool))
    }

    fn lines(&self, at: usize, count: usize) -> Span<Line> {
        self.control.span(at, count).expect("the layout lies in the memory")
    }

    /// Returns the line of the bell.
    pub fn bell(&self) -> Span<Line> {
        self.lines(BELL_AT, 1)
    }

    /// Returns the set of nodes that we talk to.
    pub fn talks(&self) -> Span<Line> {
        self.lines(TALKS_AT, SET_WORDS / LINE_WORDS)
    }

    /// Returns our line about `node`. Its word 0 says how far we have read the node's ring to us.
    pub fn line_of(&self, node: u16) -> Span<Line> {
        self.lines(self.layout.line_of(node), 1)
    }

    /// Returns our ring to `node`.
    pub fn ring_to(&self, node: u16) -> Span<Line> {
        self.lines(self.layout.ring_to(node), RING_LINES)
    }

    /// Returns the ledger. A read of it makes the kernel allocate it.
    pub fn ledger(&self) -> Span<Line> {
        self.lines(self.layout.ledger_at, LEDGER_LINES)
    }

    /// Returns the page with more of the ledger, if the memory has it.
    pub fn more_ledger(&self) -> Option<Span<Line>> {
        self.is_whole().then(|| self.lines(self.layout.more_at, LEDGER_LINES))
    }

    /// Returns the journal: [`JOURNAL_PAGES`], or [`JOURNAL_PAGES_BEFORE`]. A read of one of its pages makes the kernel
    /// allocate that.
    pub fn journal(&self) -> Span<Line> {
        let pages = if self.is_whole() { JOURNAL_PAGES } else { JOURNAL_PAGES_BEFORE };
        self.lines(self.layout.journal_at, pages * LEDGER_LINES)
    }

    fn is_whole(&self) -> bool {
        self.control.len() >= self.layout.len
    }

    /// Gives the memory of our ring to `node` back to the kernel. It then reads as zeroes.
    pub fn give_back_ring(&self, node: u16) -> Result<(), RegionError> {
        self.give_back_rings(node..node + 1)
    }

    /// Gives the memory of our rings to several nodes back to the kernel.
    pub fn give_back_rings(&self, nodes: Range<u16>) -> Result<(), RegionError> {
        let len = nodes.len() * PAGE_LEN;
        if len == 0 { Ok(()) } else { self.control.give_back(self.layout.ring_to(nodes.start), len) }
    }
}

/// The node memory of another node, mapped read-only.
#[derive(Debug, Clone)]
pub struct PeerNodeMemory {
    control: PeerRegion,
    layout: Layout,
}

impl PeerNodeMemory {
    /// Maps the memory that its keeper lets us read. Also returns the pool.
    pub fn map(fds: &NodeMemoryFds) -> Result<(Self, PeerPool), RegionError> {
        let pool = PeerRegion::map_kept_whole(fds.pool.as_fd())?;
        let pages = u32::try_from(pool.len() / PAGE_LEN).unwrap_or(u32::MAX);
        let layout = Layout::of(pages);
        let map = |len| PeerRegion::map_kept(fds.control.as_fd(), len);
        let control = map(layout.len).or_else(|_| map(layout.len_before))?;
        let node_memory = PeerNodeMemory { control, layout };
        let generations = node_memory.lines(GENERATIONS_AT, generation_lines(pages));
        Ok((node_memory, PeerPool::new(pool, generations)?))
    }

    fn lines(&self, at: usize, count: usize) -> Claims<Span<Line>> {
        self.control.claims(at, count).expect("the layout lies in the memory")
    }

    /// Returns the line of the node's bell.
    pub fn bell(&self) -> Claims<Span<Line>> {
        self.lines(BELL_AT, 1)
    }

    /// Returns the set of nodes that the node talks to.
    pub fn talks(&self) -> Claims<Span<Line>> {
        self.lines(TALKS_AT, SET_WORDS / LINE_WORDS)
    }

    /// Returns the node's line about `node`.
    pub fn line_of(&self, node: u16) -> Claims<Span<Line>> {
        self.lines(self.layout.line_of(node), 1)
    }

    /// Returns the node's ring to `node`.
    pub fn ring_to(&self, node: u16) -> Claims<Span<Line>> {
        self.lines(self.layout.ring_to(node), RING_LINES)
    }

    /// Returns the number of queues of the node's virtual machine that have counts.
    pub fn queues(&self) -> usize {
        let most = (self.control.len() - self.layout.journal_at) / PAGE_LEN;
        self.pairs_on(0).saturating_mul(2).min(most).min(JOURNAL_PAGES)
    }

    /// Returns the number of pairs of queues that the node's virtual machine runs now, if its worker says it. A read of it
    /// makes the kernel allocate a page.
    pub fn running_pairs(&self) -> Option<usize> {
        Some(self.pairs_on(1).checked_sub(1)?.min(JOURNAL_PAGES / 2))
    }

    fn pairs_on(&self, page: usize) -> usize {
        let line = self.lines(self.layout.journal_at + page * PAGE_LEN + QUEUE_PAIRS_LINE * LINE_LEN, 1);
        usize::try_from(line.load(0, 0)).unwrap_or(usize::MAX)
    }

    /// Returns the counts of a queue of the node's virtual machine, one of [`JOURNAL_PAGES`], in the order of
    /// [`QUEUE_COUNTS`]. A read of them makes the kernel allocate a page.
    pub fn queue_counts(&self, queue: usize) -> [u64; LINE_WORDS] {
        assert!(queue < JOURNAL_PAGES, "a virtual machine has no queue {queue}");
        let line = self.lines(self.layout.journal_at + queue * PAGE_LEN + QUEUE_COUNTS_LINE * LINE_LEN, 1);
        std::array::from_fn(|word| line.load(0, word))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::Relaxed;

    /// Returns how many bytes the kernel has allocated for this memory.
    fn allocated(fd: BorrowedFd<'_>) -> u64 {
        u64::try_from(rustix::fs::fstat(fd).unwrap().st_blocks).unwrap() * 512
    }

    #[test]
    fn what_is_lent_to_be_read_is_not_opened_anew_by_another_user() {
        use std::os::unix::process::CommandExt;
        if !rustix::process::geteuid().is_root() {
            return println!("skipped: being another user needs root");
        }
        let fds = NodeMemoryFds::create("test", POOL_PAGES).unwrap();
        let NodeMemoryFds { control, pool } = fds.to_read().unwrap();
        for memory in [control, pool] {
            // Runs as user "nobody", with the memory as its standard input, as the worker of another node has it.
            let nobody = |script: &str| {
                let mut command = std::process::Command::new("sh");
                command.args(["-c", script]).uid(65534).gid(65534);
                command.stdin(memory.try_clone().unwrap()).stderr(std::process::Stdio::null());
                command.output().unwrap()
            };
            assert_eq!(nobody("head -c 1").stdout, [0], "it reads the memory that it was lent");
            assert!(!nobody("exec 3<>/proc/self/fd/0").status.success(), "and does not get a second writer");
            assert!(!nobody("exec 3>/proc/self/fd/0").status.success());
        }
    }

    /// row: T139
    #[test]
    fn no_worker_keeps_its_successors_from_mapping_the_node_memory() {
        let fds = NodeMemoryFds::create("test", POOL_PAGES).unwrap();
        for memory in fds.fds() {
            let lent = memory.try_clone_to_owned().unwrap();
            let sealed = rustix::fs::fcntl_add_seals(&lent, rustix::fs::SealFlags::FUTURE_WRITE);
            assert_eq!(sealed, Err(rustix::io::Errno::PERM));
        }
        NodeMemory::adopt(fds).expect("a successor maps it");
    }

    #[test]
    fn a_node_that_talks_to_nobody_costs_its_pool_and_little_more() {
        let fds = NodeMemoryFds::create("test", POOL_PAGES).unwrap();
        let copies = fds.control.try_clone().unwrap();
        let theirs = fds.to_read().unwrap();
        let (node_memory, _pool) = NodeMemory::adopt(fds).unwrap();
        let (peer, _) = PeerNodeMemory::map(&theirs).unwrap();
        node_memory.bell()[0].word(0).store(7, Relaxed);
        assert_eq!(peer.bell().load(0, 0), 7);
        assert_eq!(allocated(copies.as_fd()), 4096);
        node_memory.ring_to(99)[0].word(0).store(8, Relaxed);
        node_memory.line_of(99)[0].word(0).store(9, Relaxed);
        assert_eq!((peer.ring_to(99).load(0, 0), peer.line_of(99).load(0, 0)), (8, 9));
        assert_eq!(allocated(copies.as_fd()), 3 * 4096);
        let notes_of = |node| has_noted(copies.as_fd(), theirs.pool.as_fd(), node);
        assert_eq!((notes_of(99), notes_of(98)), (false, false), "an index alone is none");
        node_memory.line_of(99)[0].word(1).store(1, Relaxed);
        assert_eq!((notes_of(99), notes_of(98)), (true, false));
        assert_eq!(allocated(copies.as_fd()), 3 * 4096, "looking is no use of memory");
        node_memory.give_back_ring(99).unwrap();
        assert_eq!(allocated(copies.as_fd()), 2 * 4096);
        assert_eq!(peer.ring_to(99).load(0, 0), 0, "and can still be read");
        // The reader's look has allocated it again. What no process has written or read is no reason to fail.
        assert_eq!(allocated(copies.as_fd()), 3 * 4096);
        node_memory.give_back_rings(90..110).unwrap();
        assert_eq!(allocated(copies.as_fd()), 2 * 4096);
        node_memory.give_back_rings(90..110).unwrap();
        node_memory.give_back_rings(1000..NODES_MAX).unwrap();
        assert_eq!((allocated(copies.as_fd()), peer.line_of(99).load(0, 0)), (2 * 4096, 9));
    }

    /// How much a hostile worker can have its neighbour charged: every page that the neighbour may read is a hole.
    #[test]
    fn a_reader_is_charged_for_holes_up_to_what_is_said() {
        for pages in [POOL_PAGES_MIN, POOL_PAGES] {
            let fds = NodeMemoryFds::create("test", pages).unwrap();
            let (node_memory, pool) = PeerNodeMemory::map(&fds.to_read().unwrap()).unwrap();
            let region = PeerRegion::map_kept_whole(fds.pool.as_fd()).unwrap();
            let mut room = vec![0; region.len()];
            region.copy_to(0, &mut room).unwrap();
            let generations = node_memory.lines(GENERATIONS_AT, generation_lines(pages));
            let each = |lines: &Claims<Span<Line>>| (0..lines.len()).for_each(|line| _ = lines.load(line, 0));
            [node_memory.bell(), node_memory.talks(), generations, node_memory.line_of(7), node_memory.ring_to(7)]
                .iter()
                .for_each(each);
            let charged = fds.fds().into_iter().map(allocated).sum::<u64>();
            assert!(charged <= readable_len(pages), "{charged} bytes, where {} were said", readable_len(pages));
            assert!(charged + 2 * PAGE_LEN as u64 >= readable_len(pages), "and no more is said than that");
            drop(pool);
        }
    }

    #[test]
    fn what_is_lent_to_be_read_cannot_be_written() {
        let fds = NodeMemoryFds::create("test", 64).unwrap();
        let theirs = fds.to_read().unwrap();
        assert!(Region::adopt(theirs.pool).is_err());
        assert!(Region::adopt(theirs.control).is_err());
    }

    #[test]
    fn a_pool_that_cannot_be_is_refused_with_what_could() {
        for pages in [0, 63, POOL_PAGES_MAX + 1, u32::MAX] {
            let said = NodeMemoryFds::create("test", pages).unwrap_err().to_string();
            assert!(said.contains(&format!("{pages} pages")) && said.contains("64 to 524288"), "{said}");
        }
    }

    /// Makes what an earlier daemon makes beside a pool of `pages`.
    fn earlier_control(pages: u32) -> OwnedFd {
        let memory = Region::create("test", Layout::of(pages).len_before, Pages::Small).unwrap();
        memory.close_to_others().unwrap();
        memory.into_fd()
    }

    #[test]
    fn memory_of_an_earlier_daemon_ends_with_fewer_pages_of_the_journal() {
        let fds = NodeMemoryFds::create("test", 64).unwrap();
        let (peer, _) = PeerNodeMemory::map(&fds.to_read().unwrap()).unwrap();
        let (node_memory, _pool) = NodeMemory::adopt(fds).unwrap();
        let journal = node_memory.journal();
        assert!((journal.len(), node_memory.more_ledger().is_some()) == (JOURNAL_PAGES * LEDGER_LINES, true));
        assert_eq!((peer.queues(), peer.running_pairs()), (0, None));
        journal[QUEUE_PAIRS_LINE].word(0).store(u64::MAX, Relaxed);
        journal[LEDGER_LINES + QUEUE_PAIRS_LINE].word(0).store(JOURNAL_PAGES as u64 / 2 + 1, Relaxed);
        assert_eq!((peer.queues(), peer.running_pairs()), (JOURNAL_PAGES, Some(JOURNAL_PAGES / 2)));
        journal[LEDGER_LINES + QUEUE_PAIRS_LINE].word(0).store(u64::MAX, Relaxed);
        assert_eq!(peer.running_pairs(), Some(JOURNAL_PAGES / 2));
        let earlier = NodeMemoryFds { control: earlier_control(64), ..NodeMemoryFds::create("test", 64).unwrap() };
        let (peer, _) = PeerNodeMemory::map(&earlier.to_read().unwrap()).unwrap();
        let (node_memory, _pool) = NodeMemory::adopt(earlier).unwrap();
        let journal = node_memory.journal();
        assert!((journal.len(), node_memory.more_ledger().is_some()) == (JOURNAL_PAGES_BEFORE * LEDGER_LINES, false));
        journal[QUEUE_PAIRS_LINE].word(0).store(u64::MAX, Relaxed);
        assert_eq!(peer.queues(), JOURNAL_PAGES_BEFORE);
    }

    #[test]
    fn memory_that_is_too_small_is_refused() {
        // As long as an earlier daemon makes it for fewer pages.
        let control = earlier_control(64);
        let mixed = NodeMemoryFds { control, ..NodeMemoryFds::create("test", 4096).unwrap() };
        assert!(matches!(PeerNodeMemory::map(&mixed).unwrap_err(), RegionError::Truncated { .. }));
        assert!(matches!(NodeMemory::adopt(mixed).unwrap_err(), RegionError::Truncated { .. }));
    }
}
