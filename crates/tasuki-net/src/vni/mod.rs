//! The virtual network interface: Ethernet between nodes through memory, with nobody in between.
//!
//! Each node has an [node memory](tasuki_shm::vni::node_memory) that its worker alone writes and the others read. Whoever sends looks up whose the
//! destination address is, writes the frame into its own pool, and a message of 16 bytes into its ring to that node; whoever receives copies the
//! frame out and says how far it is. So n nodes have n pools; a ring is one page, and costs memory once two nodes have talked.
//!
//! # Rules
//!
//! - **V1** Only a node's worker writes the node's node memory: nobody locks anything, and a node can spoil nothing but its own frames.
//! - **V2** A node that talks to another has said so in its node memory, and has then rung the other's bell with its number, before it counts on being
//!   heard. Rings of nodes that have not said so are not looked at.
//! - **V3** A frame's pages are its reader's until it has said that it has read it, or until they are taken back, and then the reader finds a
//!   generation that is another (P3, P4).
//! - **V4** What a reader may hold of a pool is bounded, and what it does not read in time is taken back: a slow one holds up itself alone.
//! - **V5** What a native node's program did in a turn (what it received, what it sent) is in the node's ledger before anybody sees any of it; a successor
//!   does again what stands there, which does no harm if it was done.
//!
//! docs/design/vni.md says what is promised to whom, and how much memory it takes.

mod aside;
pub mod finish;
#[cfg(test)]
pub(crate) mod fixture;
mod inbox;
pub(crate) mod ledger;
#[cfg(test)]
pub(crate) mod mortal;
mod neighbour;
pub mod offload;
mod outbox;
pub mod port;
mod receive;
mod send;

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
use tasuki_shm::bell::{Bell, Ringer};
use tasuki_shm::line::{Claims, Line};
use tasuki_shm::pool::{PAGE, Pool, Run};
use tasuki_shm::region::{RegionError, Span};
use tasuki_shm::ring::{Consumer, Producer};
use tasuki_shm::sync::Relaxed;
use tasuki_shm::vni::NODES_MAX;
use tasuki_shm::vni::node_memory::{NodeMemory, NodeMemoryFds, PeerNodeMemory};
use tasuki_shm::wake::{Clapper, this_cpu};

use crate::capture::Captures;
use crate::own::Own;
use aside::Aside;
use inbox::Inbox;
pub use inbox::{Breach, Incoming, Reader, TakenBack};
pub use neighbour::{Counts, IDLE};
use neighbour::{Neighbour, Talk, name_of, say_that_we_talk, says_that_it_talks};
use offload::HEADER_LEN;
pub use outbox::NoRoom;
use outbox::{LeftBehind, Outbox, SharedRun, SharedRuns, Stock, piece_of};
pub use send::SendError;

/// Bytes of the longest frame with its offload header: 64 KiB of IP behind Ethernet's header and two tags.
pub const PIECE_MAX: usize = HEADER_LEN + 14 + 8 + 65_536;

/// Rings that are looked at each time, for they were busy last.
const ACTIVE: usize = 4;

/// How long a reader may read nothing of what it has before it is taken back.
pub const PATIENCE: Duration = Duration::from_secs(1);

/// What another node is reached by.
#[derive(Debug)]
pub struct PeerDescriptor {
    /// Its number.
    pub number: u16,
    /// Its node memory, to be read.
    pub node_memory: NodeMemoryFds,
    /// What rings its bell.
    pub bell: Clapper,
    /// Its addresses of IP, if they are known: what it sends is held against them.
    pub own: Own,
}

/// A node's end of a VNI.
#[derive(Debug)]
pub struct Vni {
    number: u16,
    node_memory: NodeMemory,
    pool: Pool,
    shared: SharedRuns,
    quota: u32,
    bell: Bell<Span<Line>>,
    bell_receiver: OwnedFd,
    neighbours: Vec<Option<Box<Neighbour>>>,
    /// Whose rings we look at.
    heard: Vec<u16>,
    /// Those of them that were busy last, and how often they were not since.
    active: ArrayVec<(u16, u32), ACTIVE>,
    next: usize,
    looks: u32,
    touched: Vec<u16>,
    /// What goes to several nodes lies here: the run that is being filled, and how many bytes of it are in use.
    common: Option<(SharedRun, u32)>,
    /// Where a frame is put before anybody knows for whom it is.
    staging: Option<Run>,
    /// The same where the pool has no such run.
    aside: Aside,
    /// What a predecessor sent to nodes that were not added yet.
    left: HashMap<u16, LeftBehind>,
    /// Whoever looks on.
    captures: Option<Box<Captures>>,
}

impl Vni {
    /// Node `number`'s end, on memory that belongs to the node; `bell_receiver` is the reading end of its bell's pipe. What a predecessor sent and was not
    /// read stays with its readers, which are then [added](Self::add); after the last, [`settle`](Self::settle) frees what is nobody's.
    pub fn new(number: u16, node_memory: NodeMemoryFds, bell_receiver: OwnedFd) -> Result<Self, RegionError> {
        assert!(number < NODES_MAX, "a VNI has no node {number}");
        let (node_memory, pool) = NodeMemory::adopt(node_memory)?;
        Ok(Self::over(number, node_memory, pool, bell_receiver))
    }

    /// The same with a ledger, in which a predecessor may have left what it was about to do: that is done, before anybody looks.
    fn with_ledger(
        number: u16,
        node_memory: NodeMemoryFds,
        bell_receiver: OwnedFd,
    ) -> Result<(Self, ledger::Ledger), RegionError> {
        assert!(number < NODES_MAX, "a VNI has no node {number}");
        let (node_memory, pool) = NodeMemory::adopt(node_memory)?;
        let ledger = ledger::Ledger::over(node_memory.ledger());
        ledger.redo(&node_memory);
        Ok((Self::over(number, node_memory, pool, bell_receiver), ledger))
    }

    fn over(number: u16, node_memory: NodeMemory, mut pool: Pool, bell_receiver: OwnedFd) -> Self {
        let quota = pool.left() / 2;
        let mut shared = SharedRuns::default();
        let left = left_behind(&node_memory, &mut pool, &mut shared);
        let bell = Bell::go_on(node_memory.bell(), this_cpu());
        Vni {
            number,
            node_memory,
            pool,
            shared,
            quota,
            bell,
            bell_receiver,
            neighbours: (0..NODES_MAX).map(|_| None).collect(),
            heard: Vec::with_capacity(16),
            active: ArrayVec::new(),
            next: 0,
            looks: 0,
            touched: Vec::with_capacity(16),
            common: None,
            staging: None,
            aside: Aside::new(),
            left,
            captures: None,
        }
    }

    /// This node's number.
    pub fn number(&self) -> u16 {
        self.number
    }

    /// A page of the node memory for whoever passes frames on: written by the node's worker alone, and there for its successor.
    pub(crate) fn notes(&self) -> Span<Line> {
        self.node_memory.ledger()
    }

    /// Whoever looks on, if anybody does: at each frame that comes, and that is sent.
    pub fn captures(&mut self) -> &mut Option<Box<Captures>> {
        &mut self.captures
    }

    /// Makes another node known, or the same one with other memory.
    pub fn add(&mut self, bundle: PeerDescriptor) -> Result<(), RegionError> {
        let PeerDescriptor { number, node_memory, bell, own } = bundle;
        assert!(number < NODES_MAX && number != self.number, "node {number} is no neighbour of node {}", self.number);
        let (node_memory, pool) = PeerNodeMemory::map(&node_memory)?;
        if self.neighbours[usize::from(number)].is_some() {
            self.remove(number);
        }
        let line = self.node_memory.line_of(number);
        // What is ours to know stands in our own memory: a predecessor may have left it.
        let (head, parts) = halves(line[0].word(0).load(Relaxed));
        let inbox = Inbox::new(Consumer::go_on(node_memory.ring_to(self.number), line.clone(), head), pool, parts, own);
        let mut left = self.left.remove(&number).unwrap_or_default();
        let mut stock = Stock { pool: &mut self.pool, shared: &mut self.shared, quota: self.quota };
        let talks = says_that_it_talks(&Claims::of(self.node_memory.talks()), number);
        let ring = || Producer::go_on(self.node_memory.ring_to(number), node_memory.line_of(self.number));
        let ring = match talks.then(ring).flatten() {
            Some(ring) => ring,
            None => {
                // Nobody looks at it, or it was for another node of that number.
                left.drain(..).for_each(|(_, which)| stock.shared.release(which, true, stock.pool));
                self.node_memory.give_back_ring(number)?;
                let (head, _) = halves(node_memory.line_of(self.number).load(0, 0));
                Producer::new(self.node_memory.ring_to(number), node_memory.line_of(self.number), head)
            }
        };
        let outbox = Outbox::new(ring, Ringer::new(node_memory.bell()), left, &mut stock);
        let talk = if talks { Talk::Known } else { Talk::Silent };
        let neighbour = Neighbour {
            clapper: bell,
            outbox,
            inbox,
            counts: Counts::of(&line[0]),
            line,
            is_heard: false,
            talk,
            touched: false,
            breach: None,
            progress: None,
            quiet: (0, Instant::now()),
            talks: node_memory.talks(),
        };
        if talk == Talk::Known {
            // A predecessor may have ended between saying that it talks and ringing.
            neighbour.clapper.ring_as(&name_of(self.number));
        }
        self.neighbours[usize::from(number)] = Some(Box::new(neighbour));
        self.listen_to(number);
        Ok(())
    }

    /// Forgets a node that is there no more: what it had not read is ours again, and what it sent and we have not read is gone.
    pub fn remove(&mut self, number: u16) {
        self.stop_listening_to(number);
        let Some(mut neighbour) = self.neighbours.get_mut(usize::from(number)).and_then(Option::take) else { return };
        let mut stock = Stock { pool: &mut self.pool, shared: &mut self.shared, quota: self.quota };
        neighbour.outbox.take_back(&mut stock);
        say_that_we_talk(&self.node_memory.talks(), number, false);
        self.touched.retain(|touched| *touched != number);
        // Fails only where there is nothing to give back, and then nothing is lost.
        let _ = self.node_memory.give_back_ring(number);
        neighbour.clear_line();
    }

    /// All nodes that there are have been added: what a predecessor sent to others is free.
    pub fn settle(&mut self) {
        for (number, left) in self.left.drain() {
            say_that_we_talk(&self.node_memory.talks(), number, false);
            // Fails only where there is nothing to give back.
            let _ = self.node_memory.give_back_ring(number);
            self.node_memory.line_of(number)[0].word(0).store(0, Relaxed);
            left.into_iter().for_each(|(_, which)| self.shared.release(which, true, &mut self.pool));
        }
        // A predecessor that was killed between taking back that it talks and giving back the ring has left that allocated.
        let mut first = 0;
        for number in 0..=NODES_MAX {
            if self.neighbours.get(usize::from(number)).is_none_or(Option::is_some) {
                // As above.
                let _ = self.node_memory.give_back_rings(first..number);
                first = number + 1;
            }
        }
    }

    /// Does what is due now and then, a few times a second: takes back everything from a reader that has read nothing for [`PATIENCE`] (V4), and
    /// gives back the memory of rings on which nothing went for [`IDLE`]. Says whether there is anything left that has to be looked at again.
    pub fn tick(&mut self, now: Instant) -> bool {
        let mut again = false;
        for (number, slot) in (0_u16..).zip(&mut self.neighbours) {
            let Some(neighbour) = slot else { continue };
            if neighbour.talk == Talk::Silent && !neighbour.outbox.holds() {
                continue;
            }
            let mut stock = Stock { pool: &mut self.pool, shared: &mut self.shared, quota: self.quota };
            match neighbour.outbox.behind(&mut stock) {
                Err(broken) => {
                    neighbour.breaks(broken.into());
                    neighbour.outbox.take_back(&mut stock);
                }
                Ok(Some(head)) => {
                    again = true;
                    match neighbour.progress {
                        Some((last, since)) if last == head => {
                            if now.saturating_duration_since(since) >= PATIENCE && neighbour.outbox.holds() {
                                neighbour.outbox.take_back(&mut stock);
                                neighbour.counts.taken_back += 1;
                                neighbour.publish();
                            }
                        }
                        _ => neighbour.progress = Some((head, now)),
                    }
                }
                Ok(None) => {
                    neighbour.progress = None;
                    again |= neighbour.rest(&self.node_memory, number, &mut stock, now);
                }
            }
        }
        again
    }

    /// A neighbour has other addresses of IP from now on.
    pub fn set_own(&mut self, number: u16, own: Own) {
        if let Some(neighbour) = self.neighbours.get_mut(usize::from(number)).and_then(Option::as_mut) {
            neighbour.inbox.own = own;
        }
    }

    /// What is counted of a neighbour.
    pub fn counts(&self, of: u16) -> Option<Counts> {
        self.neighbours.get(usize::from(of))?.as_ref().map(|neighbour| neighbour.counts)
    }

    /// Why a neighbour is not heard any more.
    pub fn breach(&self, of: u16) -> Option<Breach> {
        self.neighbours.get(usize::from(of))?.as_ref().and_then(|neighbour| neighbour.breach)
    }

    /// Pages of our pool that nobody holds.
    pub fn pages_left(&self) -> u32 {
        self.pool.left()
    }
}

/// Takes the pages in which frames lie that a predecessor has sent, whoever has read them.
fn left_behind(node_memory: &NodeMemory, pool: &mut Pool, shared: &mut SharedRuns) -> HashMap<u16, LeftBehind> {
    let mut pages = HashMap::new();
    let mut left = HashMap::new();
    let talks = Claims::of(node_memory.talks());
    for to in (0..NODES_MAX).filter(|&to| says_that_it_talks(&talks, to)) {
        let messages = Producer::<_, Span<Line>, 1>::left_behind(&node_memory.ring_to(to));
        let of_node: &mut LeftBehind = left.entry(to).or_default();
        for (index, message) in messages {
            let piece = piece_of(&message);
            let last = piece.offset.saturating_add(piece.len.saturating_sub(1)) / PAGE;
            for page in piece.offset / PAGE..=last {
                match pages.get(&page) {
                    Some(&which) => {
                        shared.hold(which);
                        of_node.push((index, which));
                    }
                    None => {
                        if let Some(run) = pool.take_at(page, 1) {
                            let which = shared.add(run);
                            pages.insert(page, which);
                            of_node.push((index, which));
                        }
                    }
                }
            }
        }
    }
    left
}

/// The low half of a word, and the high one.
#[expect(clippy::cast_possible_truncation, reason = "the halves are what is meant")]
pub(crate) fn halves(word: u64) -> (u32, u32) {
    (word as u32, (word >> 32) as u32)
}
