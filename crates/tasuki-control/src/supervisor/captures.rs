//! Captures of a node's ports, or of a NIC. Workers copy frames into a socket of the capture, and the HTTP thread
//! (`api/capture.rs`) has its other end. This module decides which workers copy.
//!
//! Every worker that has such a port is told, not only its driver, so a worker that takes a port over goes on with
//! the same capture.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use tasuki_relay::message::ToWorker;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

use super::card::Card;
use super::door::Refusal;
use super::worker::{Stage, Words, why_missed};
use super::{About, Supervisor};
use crate::api::capture::{Begun, Gone, Port};
use crate::api::types::Ended;
use crate::channel;

/// Captures at a time; a worker keeps no more of one port.
const CAPTURES_MAX: usize = 16;

/// Bytes of the memory in which missed frames are counted, one word per port; so this many ports fit into a capture.
const MISSED_LEN: usize = 4096;
const PORTS_MAX: usize = MISSED_LEN / 8;

/// Bytes of batches that may be under way, where the kernel allows that: a tenth of a second of a link of 1 Gb/s,
/// with the kernel's own overhead.
const SOCKET_BUFFER_LEN: usize = 16 << 20;

/// The subject of a capture.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Of {
    /// All ports of a node.
    Node(String),
    /// One NIC, whichever node has it.
    Nic(String),
}

impl Of {
    fn name(&self) -> &str {
        match self {
            Of::Node(name) | Of::Nic(name) => name,
        }
    }

    fn about(&self) -> About<'_> {
        match self {
            Of::Node(name) => About::node(name),
            Of::Nic(name) => About::nic(name),
        }
    }

    fn covers(&self, card: &Card) -> bool {
        match self {
            Of::Node(name) => card.node() == *name,
            Of::Nic(name) => card.name() == name,
        }
    }
}

/// A capture that has begun and whose reader is still there.
#[derive(Debug)]
pub struct Capture {
    of: Of,
    snap: u32,
    /// The socket workers write to, and the channel to the reader; `None` once the capture is to end.
    open: Option<(OwnedFd, UnboundedSender<Port>)>,
    missed: Arc<Words>,
    /// NICs by their interface number in the capture.
    ports: Vec<u32>,
    /// The workers told, as NIC and worker.
    told: BTreeSet<(u32, u32)>,
}

impl Supervisor {
    /// Returns whether frames of this node are being captured. That begins in
    /// [`begin_capture`](Self::begin_capture), and ends in [`end_capture`](Self::end_capture) or
    /// [`capture_over`](Self::capture_over); `run_housekeeping` runs after each.
    pub(super) fn is_captured(&self, node: &str) -> bool {
        let is_its = |capture: &Capture| {
            let mut cards = self.cards.of(node);
            capture.open.is_some() && cards.any(|card| capture.of.covers(card))
        };
        self.captures.values().any(is_its)
    }

    /// Begins a capture of up to `snap` bytes of each frame.
    pub(super) fn begin_capture(&mut self, of: Of, snap: u32) -> Result<Begun, Refusal> {
        if self.stopping.is_some() {
            return Err(Refusal::Ending);
        }
        match &of {
            Of::Node(name) if !self.nodes.contains_key(name) => return Err(self.no_node(name)),
            Of::Node(name) if !self.cards.values().any(|card| of.covers(card)) => {
                return Err(Refusal::conflict(format!(
                    "node {name} has no NIC and is on no VNI, so no frame passes there; tasuki status lists the nodes that have one"
                )));
            }
            Of::Nic(name) => _ = self.nic_by_name(name)?,
            Of::Node(_) => {}
        }
        if self.captures.len() >= CAPTURES_MAX {
            return Err(Refusal::conflict(format!("there are {CAPTURES_MAX} captures already; end one of them first")));
        }
        let no_room =
            |what: &dyn std::fmt::Display| Refusal::conflict(format!("there is no room for a capture: {what}"));
        let (batches, socket) = channel::pair().map_err(|error| no_room(&error))?;
        // As much as the kernel permits: with less, a slow reader misses more.
        if rustix::net::sockopt::set_socket_send_buffer_size_force(&socket, SOCKET_BUFFER_LEN).is_err() {
            let _ = rustix::net::sockopt::set_socket_send_buffer_size(&socket, SOCKET_BUFFER_LEN);
        }
        let missed = Words::create("tasuki capture", MISSED_LEN).map_err(|error| no_room(&error))?;
        let missed = Arc::new(missed);
        let (said, ports) = unbounded_channel();
        self.last_capture += 1;
        let number = self.last_capture;
        let open = Some((socket, said));
        let capture =
            Capture { of: of.clone(), snap, open, missed: missed.clone(), ports: Vec::new(), told: BTreeSet::new() };
        self.captures.insert(number, capture);
        self.note(of.about(), format!("{} is being captured (capture {number})", of.name()));
        // A caller that hears it has begun counts on every frame from then on.
        self.reconcile_shortcuts();
        self.reconcile_captures();
        let told = self.captures.get(&number).map_or(0, |capture| capture.told.len());
        Ok(Begun { number, batches, missed, ports, told, snap, gone: Gone::new(self.door.clone(), number) })
    }

    /// Ends a capture on request: workers stop copying, and the reader gets the batches under way.
    pub(super) fn end_capture(&mut self, number: u32) -> Result<Ended, Refusal> {
        let Some(capture) = self.captures.get_mut(&number).filter(|capture| capture.open.is_some()) else {
            return Err(Refusal::NotFound(format!("there is no capture {number}")));
        };
        capture.open = None;
        let sentence = format!("the capture of {} ends", capture.of.name());
        self.reconcile_captures();
        Ok(Ended { sentence })
    }

    /// Handles a reader that is gone.
    pub(super) fn capture_over(&mut self, number: u32, frames: u64, missed: u64) {
        if self.captures.get(&number).is_some_and(|capture| capture.open.is_some()) {
            // This cannot fail: the capture exists.
            let _ = self.end_capture(number);
        }
        let Some(capture) = self.captures.remove(&number) else { return };
        let sentence =
            format!("{} is captured no more (capture {number}: {frames} frames, {missed} missed)", capture.of.name());
        self.note(capture.of.about(), sentence);
    }

    /// Has the workers copy that have a captured port, and no others.
    pub(super) fn reconcile_captures(&mut self) {
        let Supervisor { captures, cards, workers, nodes, .. } = self;
        for (number, capture) in captures {
            let is_there = match &capture.of {
                Of::Node(name) => nodes.contains_key(name),
                Of::Nic(name) => cards.values().any(|card| card.name() == name),
            };
            if !is_there {
                capture.open = None;
            }
            let mut wanted = BTreeSet::new();
            for card in cards.values().filter(|card| capture.open.is_some() && capture.of.covers(card)) {
                let may_see = |node: &str| matches!(capture.of, Of::Nic(_)) || node == card.node();
                let have = workers.values().filter(|worker| worker.nics.contains_key(&card.number));
                let have = have.filter(|worker| worker.stage == Stage::Begun && may_see(&worker.record.node));
                wanted.extend(have.map(|worker| (card.number, worker.party())));
            }
            for (nic, party) in capture.told.difference(&wanted) {
                if let Some(worker) = workers.get(party).filter(|worker| worker.nics.contains_key(nic)) {
                    let _ = worker.write(&ToWorker::NoCapture { nic: *nic, capture: *number }, &[]);
                }
            }
            capture.told.retain(|told| wanted.contains(told));
            let Some((socket, said)) = &capture.open else { continue };
            let new: Vec<(u32, u32)> = wanted.difference(&capture.told).copied().collect();
            for (nic, party) in new {
                let (Some(worker), Some(card)) = (workers.get(&party), cards.get(&nic)) else { continue };
                let known = capture.ports.iter().position(|port| *port == nic);
                let at = known.unwrap_or(capture.ports.len());
                let Ok(interface @ 0..) = u32::try_from(at) else { continue };
                if at >= PORTS_MAX {
                    continue;
                }
                if known.is_none() {
                    let mac = card.opened.as_ref().and_then(|opened| opened.bundle.mac);
                    // If the reader is gone, the loop is about to hear of that.
                    let _ = said.send(Port { name: card.name().to_owned(), mac });
                    capture.ports.push(nic);
                }
                let message = ToWorker::Capture { nic, capture: *number, interface, snap: capture.snap };
                let sent = worker.write(&message, &[socket.as_fd(), capture.missed.region().fd()]);
                // A worker without room now is told when `run_housekeeping` runs next; a dead or dying worker need not be.
                if why_missed(sent).is_none() {
                    capture.told.insert((nic, party));
                }
            }
        }
    }
}
