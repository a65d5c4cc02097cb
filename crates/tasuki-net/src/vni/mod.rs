//! The virtual network interface: Ethernet between nodes through memory, without a process in between.
//!
//! Each node has a [node memory](tasuki_shm::vni::node_memory) that only its worker writes and the others read. A
//! sender looks up the destination's node, writes the frame into its own pool, and a message of 16 bytes into its ring
//! to that node. The receiver copies the frame out and publishes how far it has read. So n nodes have n pools; a ring
//! is one page, and costs memory once two nodes have talked.
//!
//! # Rules
//!
//! - **V1** Only a node's worker writes the node's node memory: there are no locks, and a node can spoil only its own
//!   frames.
//! - **V2** Before a node relies on being heard by another, it announces in its node memory that it talks to the other,
//!   then rings the other's bell with its own number. A receiver does not look at rings that were not announced to it.
//! - **V3** A reader keeps a frame's pages until it reports the frame as read, or until the sender takes them back. The
//!   reader then finds another generation (P3, P4).
//! - **V4** A reader may hold only a bounded part of a pool, and the sender takes back frames that are not read in
//!   time: a slow reader holds up only itself.
//! - **V5** A native node's worker writes into the node's ledger what its program received and sent in a turn, before a
//!   peer can see any of it. A successor repeats what the ledger holds; the repetition does no harm.
//!
//! docs/design/vni.md states the guarantees, and how much memory a VNI takes.

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
use tasuki_shm::bell::{Bell, PeerBell};
use tasuki_shm::line::{Claims, Line, halves};
use tasuki_shm::pool::{PAGE, PeerPool, Pool, Run};
use tasuki_shm::region::{RegionError, Span};
use tasuki_shm::ring::{Consumer, Producer};
use tasuki_shm::sync::Relaxed;
use tasuki_shm::vni::NODES_MAX;
use tasuki_shm::vni::node_memory::{NodeMemory, PeerNodeMemory};
use tasuki_shm::wake::{BellSender, this_cpu};

use crate::capture::Captures;
use crate::own::Own;
use crate::switch::Owners;
use aside::Aside;
use inbox::Inbox;
pub use inbox::{Breach, Incoming, Reader, TakenBack};
use neighbour::{Announcement, Neighbour, announces, keep_head, name_of, set_announced};
pub use neighbour::{Counts, IDLE};
use offload::HEADER_LEN;
pub use outbox::NoRoom;
use outbox::{LeftBehind, Outbox, SharedRun, SharedRuns, Stock, piece_of};
pub use send::SendError;

/// Length in bytes of the longest frame with its offload header: 64 KiB of IP behind Ethernet's header and two tags.
pub const PIECE_MAX: usize = HEADER_LEN + 14 + 8 + 65_536;

/// Bytes behind the room for a staged frame, for what its endpoint must remember with it.
pub(crate) const BESIDE: usize = 64;

/// Maximum number of rings that every look includes because they were busy last.
const ACTIVE: usize = 4;

/// How long a reader may read nothing before the sender takes its frames back.
pub const PATIENCE: Duration = Duration::from_secs(1);

/// Handles by which a node reaches another node.
#[derive(Debug, Clone)]
pub struct PeerDescriptor {
    /// Number of the other node on the VNI.
    pub number: u16,
    /// Node memory of the other node, for reading, and the pool in it.
    pub node_memory: (PeerNodeMemory, PeerPool),
    /// Rings the other node's bell.
    pub bell: BellSender,
    /// IP addresses of the other node, if they are known: the receiver checks its frames against them.
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
    /// Nodes whose rings this node looks at.
    heard: Vec<u16>,
    /// The nodes of `heard` that were busy last, each with its number of empty looks since.
    active: ArrayVec<(u16, u32), ACTIVE>,
    next: usize,
    looks: u32,
    touched: Vec<u16>,
    /// The run that is being filled with frames for several nodes, and the bytes of it in use.
    common: Option<(SharedRun, u32)>,
    /// The run for a frame whose destination is not known yet.
    staging: Option<Run>,
    /// Holds that frame when the pool has no such run.
    aside: Aside,
    /// Frames that a predecessor sent to nodes that are not added yet.
    left: HashMap<u16, LeftBehind>,
    /// Ledger of an end whose turns are committed as a whole, until its bridge takes it.
    pub(crate) ledger: Option<ledger::Ledger>,
    /// Captures of this end, if there are any.
    captures: Option<Box<Captures>>,
    /// All neighbours are known, and a predecessor may have left rings allocated that go to none.
    has_spare_rings: bool,
}

impl Vni {
    /// Opens the end of node `number`, on memory that belongs to the node. `bell_receiver` is the reading end of its
    /// bell's pipe. Frames that a predecessor sent and that are unread stay with their readers. The caller then
    /// [adds](Self::add) all nodes and calls [`settle`](Self::settle), which frees the rest.
    ///
    /// # Panics
    /// If a VNI has no such node.
    pub fn new(number: u16, memory: (NodeMemory, Pool), bell_receiver: OwnedFd) -> Self {
        let (node_memory, pool) = memory;
        Self::over(number, node_memory, pool, bell_receiver)
    }

    /// Like [`new`](Self::new), for an endpoint whose turns are [committed as a whole](crate::endpoint::Recovery::Exact).
    pub fn exact(number: u16, memory: (NodeMemory, Pool), bell_receiver: OwnedFd) -> Self {
        let (mut vni, ledger) = Self::with_ledger(number, memory, bell_receiver);
        vni.ledger = Some(ledger);
        vni
    }

    /// Like [`new`](Self::new), with a ledger. First does what a predecessor may have left undone there, before any
    /// peer looks.
    fn with_ledger(number: u16, memory: (NodeMemory, Pool), bell_receiver: OwnedFd) -> (Self, ledger::Ledger) {
        let (node_memory, pool) = memory;
        let ledger = ledger::Ledger::over(node_memory.ledger(), node_memory.more_ledger());
        ledger.redo(&node_memory);
        (Self::over(number, node_memory, pool, bell_receiver), ledger)
    }

    fn over(number: u16, node_memory: NodeMemory, mut pool: Pool, bell_receiver: OwnedFd) -> Self {
        assert!(number < NODES_MAX, "a VNI has no node {number}");
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
            ledger: None,
            captures: None,
            has_spare_rings: false,
        }
    }

    /// Returns this node's number.
    pub fn number(&self) -> u16 {
        self.number
    }

    /// Returns a page of the node memory for an endpoint. Only the node's worker writes it; its successor reads it.
    pub(crate) fn notes(&self) -> Span<Line> {
        self.node_memory.ledger()
    }

    /// Returns the pages of the node memory for an endpoint's completions. Only the node's worker writes them; its successor
    /// reads them.
    pub(crate) fn journal(&self) -> Span<Line> {
        self.node_memory.journal()
    }

    /// The captures, if any, that see each frame that this end receives or sends.
    pub fn captures(&mut self) -> &mut Option<Box<Captures>> {
        &mut self.captures
    }

    /// Adds another node, or replaces the memory of a node that was added before.
    pub fn add(&mut self, bundle: PeerDescriptor) -> Result<(), RegionError> {
        let PeerDescriptor { number, node_memory: (node_memory, pool), bell, own } = bundle;
        assert!(number < NODES_MAX && number != self.number, "node {number} is no neighbour of node {}", self.number);
        if self.neighbours[usize::from(number)].is_some() {
            self.remove(number);
        }
        let line = self.node_memory.line_of(number);
        // Resume the read position from our own memory; a predecessor may have left it there.
        let (head, parts) = halves(line[0].word(0).load(Relaxed));
        let inbox = Inbox::new(Consumer::go_on(node_memory.ring_to(self.number), line.clone(), head), pool, parts, own);
        let mut left = self.left.remove(&number).unwrap_or_default();
        let mut stock = Stock { pool: &mut self.pool, shared: &mut self.shared, quota: self.quota };
        let talks = announces(&Claims::of(self.node_memory.talks()), number);
        let ring = || Producer::go_on(self.node_memory.ring_to(number), node_memory.line_of(self.number));
        let ring = match talks.then(ring).flatten() {
            Some(ring) => ring,
            None => {
                // The peer does not look at this ring, or the ring belonged to another node of that number.
                left.drain(..).for_each(|(_, which)| stock.shared.release(which, true, stock.pool));
                self.node_memory.give_back_ring(number)?;
                let (head, _) = halves(node_memory.line_of(self.number).load(0, 0));
                Producer::new(self.node_memory.ring_to(number), node_memory.line_of(self.number), head)
            }
        };
        let outbox = Outbox::new(ring, PeerBell::new(node_memory.bell()), left, &mut stock);
        let announcement = if talks { Announcement::Known } else { Announcement::Silent };
        let neighbour = Neighbour {
            bell_sender: bell,
            outbox,
            inbox,
            counts: Counts::of(&line[0]),
            line,
            is_heard: false,
            announcement,
            touched: false,
            breach: None,
            progress: None,
            quiet: (0, Instant::now()),
            talks: node_memory.talks(),
        };
        if announcement == Announcement::Known {
            // A predecessor may have ended between the announcement and the bell.
            neighbour.bell_sender.ring_as(&name_of(self.number));
        }
        self.neighbours[usize::from(number)] = Some(Box::new(neighbour));
        self.listen_to(number);
        Ok(())
    }

    /// Forgets a node that is gone. Takes back what it had not read; drops what it sent and this node has not read.
    pub fn remove(&mut self, number: u16) {
        self.stop_listening_to(number);
        let Some(mut neighbour) = self.neighbours.get_mut(usize::from(number)).and_then(Option::take) else { return };
        let mut stock = Stock { pool: &mut self.pool, shared: &mut self.shared, quota: self.quota };
        neighbour.outbox.take_back(&mut stock);
        set_announced(&self.node_memory.talks(), number, false);
        self.touched.retain(|touched| *touched != number);
        // Fails only if there is nothing to give back; then nothing is lost.
        let _ = self.node_memory.give_back_ring(number);
        neighbour.clear_counts();
        keep_head(&neighbour.line[0]);
    }

    /// Frees what a predecessor sent to nodes that no longer exist. Call it once all existing nodes are added.
    pub fn settle(&mut self) {
        for (number, left) in self.left.drain() {
            set_announced(&self.node_memory.talks(), number, false);
            // Fails only if there is nothing to give back.
            let _ = self.node_memory.give_back_ring(number);
            keep_head(&self.node_memory.line_of(number)[0]);
            left.into_iter().for_each(|(_, which)| self.shared.release(which, true, &mut self.pool));
        }
        // A system call for each gap between two neighbours: the next tick has time for that.
        self.has_spare_rings = true;
    }

    /// Gives the rings back to nodes that do not exist: a predecessor that was killed between withdrawing its announcement
    /// and giving the ring back left the ring allocated.
    fn give_back_spare_rings(&mut self) {
        let mut first = 0;
        for number in 0..=NODES_MAX {
            if self.neighbours.get(usize::from(number)).is_none_or(Option::is_some) {
                // As above.
                let _ = self.node_memory.give_back_rings(first..number);
                first = number + 1;
            }
        }
    }

    /// Does periodic work; call it a few times a second. Takes back everything from a reader that has read nothing for
    /// [`PATIENCE`] (V4), and gives back the memory of rings that were idle for [`IDLE`]. Returns whether the next tick
    /// has work.
    pub fn tick(&mut self, now: Instant) -> bool {
        if std::mem::take(&mut self.has_spare_rings) {
            self.give_back_spare_rings();
        }
        let mut again = false;
        for (number, slot) in (0_u16..).zip(&mut self.neighbours) {
            let Some(neighbour) = slot else { continue };
            if neighbour.announcement == Announcement::Silent && !neighbour.outbox.holds() {
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
                            // What is staged for it waits for its turn to end, and comes back with the rest after that.
                            let is_over = now.saturating_duration_since(since) >= PATIENCE;
                            if is_over && neighbour.outbox.holds() && !neighbour.outbox.is_staging() {
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

    /// Returns whether a node has yet to read frames that were published.
    pub(crate) fn has_unread(&mut self) -> bool {
        let Self { neighbours, pool, shared, quota, .. } = self;
        neighbours.iter_mut().flatten().any(|neighbour| {
            let mut stock = Stock { pool: &mut *pool, shared: &mut *shared, quota: *quota };
            neighbour.outbox.holds() && matches!(neighbour.outbox.behind(&mut stock), Ok(Some(_)))
        })
    }

    /// Replaces the IP addresses of a neighbour.
    pub fn set_own(&mut self, number: u16, own: Own) {
        if let Some(neighbour) = self.neighbours.get_mut(usize::from(number)).and_then(Option::as_mut) {
            neighbour.inbox.own = own;
        }
    }

    /// Returns which of the nodes that share an address gets the frames of a flow: of those that this end knows.
    pub(crate) fn choose(&self, owners: &Owners, flow: u32) -> u16 {
        let knows = |node: &u16| self.neighbours.get(usize::from(*node)).is_some_and(Option::is_some);
        let its = owners.of_flow(flow);
        if knows(&its) { its } else { owners.all().iter().copied().find(knows).unwrap_or(its) }
    }

    /// Returns the counts of node `of`, or `None` if it was not added.
    pub fn counts(&self, of: u16) -> Option<Counts> {
        self.neighbours.get(usize::from(of))?.as_ref().map(|neighbour| neighbour.counts)
    }

    /// Returns the rule that node `of` broke, for which it is no longer heard.
    pub fn breach(&self, of: u16) -> Option<Breach> {
        self.neighbours.get(usize::from(of))?.as_ref().and_then(|neighbour| neighbour.breach)
    }

    /// Returns the number of free pages in this node's pool.
    pub fn pages_left(&self) -> u32 {
        self.pool.left()
    }
}

/// Takes from the pool the pages of all frames that a predecessor sent, whether or not they have been read.
fn left_behind(node_memory: &NodeMemory, pool: &mut Pool, shared: &mut SharedRuns) -> HashMap<u16, LeftBehind> {
    let mut pages = HashMap::new();
    let mut left = HashMap::new();
    let talks = Claims::of(node_memory.talks());
    for to in (0..NODES_MAX).filter(|&to| announces(&talks, to)) {
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
