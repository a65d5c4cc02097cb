//! Nodes that drive one more queue of another node's interface. The daemon opens the queue, as it makes the interface,
//! and the descriptor outlives workers; the queue's node has workers, a CPU and an end of the VNI of its own. Its station
//! address is that of the interface: in the VNI's directory both nodes share it, and each gets other flows.
//!
//! A queue that nobody drives would swallow its flows. If no worker comes, they go by the other queues until one does.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tasuki_relay::message;
use tasuki_tap::device::{another_queue, give_flows, is_gone};

use super::card::Card;
use super::keeping::{Found, Key};
use super::{About, PATIENCE, Supervisor, now};
use crate::config::{Config, Node};

/// How long a node in trouble drives its queue, or does not, before that counts: its workers may die one after the other.
const STAYS: Duration = Duration::from_secs(2);

/// One more queue of an interface.
#[derive(Debug)]
pub struct Queue {
    pub device: OwnedFd,
    /// Whether its flows go by it.
    has_flows: bool,
    /// Whether a worker drives it, and since when that is so.
    is_driven: bool,
    since: Duration,
}

impl Queue {
    /// The kernel gives it flows at once: frames wait in it for its first worker.
    fn of(device: OwnedFd) -> Self {
        Queue { device, has_flows: true, is_driven: false, since: now() }
    }
}

impl Config {
    /// Returns the node whose interface and station address this one has: itself, unless it drives a queue of another's.
    pub fn lead_of<'a>(&'a self, node: &'a Node) -> &'a Node {
        node.queue_of().and_then(|of| self.node(of)).unwrap_or(node)
    }
}

impl Supervisor {
    /// Adopts the queues of an earlier daemon: of interfaces that are gone, only those that nodes in `living` have.
    pub(super) fn begin_queues(&mut self, living: &[String], found: &mut Found) {
        for node in self.config.node.iter().filter(|node| node.queue_of().is_some()) {
            let queue = found.remove(&Key::Queue(node.name.clone())).and_then(|(_, fds)| fds.into_iter().next());
            let queue = queue.filter(|queue| living.contains(&node.name) || !is_gone(queue.as_fd()));
            // It has none if nobody drove it. Otherwise that is refused.
            let _ = queue.as_ref().map(|queue| give_flows(queue.as_fd(), true));
            self.queues.extend(queue.map(|queue| (node.name.clone(), Queue::of(queue))));
        }
    }

    /// Opens the queue that a node drives, unless it is open.
    pub(super) fn make_queue(&mut self, node: &Node) -> Result<()> {
        let Some(of) = node.queue_of().filter(|_| !self.queues.contains_key(&node.name)) else { return Ok(()) };
        ensure!(
            !self.leaves(of),
            "node {of} is being removed, and its interface with it; add both again when it is gone"
        );
        // Once it is open, the kernel gives it flows.
        node.vni.as_ref().map_or(Ok(()), |vni| self.all_know_sharing(vni))?;
        let (_, first) = self.tap_for(of)?.with_context(|| format!("node {of} has no interface"))?;
        let queue = another_queue(first.as_fd())
            .with_context(|| format!("the interface of node {of} has no queue for node {}", node.name))?;
        self.queues.insert(node.name.clone(), Queue::of(queue));
        Ok(())
    }

    /// Returns the description and the descriptor for a worker of this node, if it drives a queue of another's interface.
    pub(super) fn queue_for(&mut self, name: &str) -> Result<Option<(message::Endpoint, OwnedFd)>> {
        let node = self.config.node(name).context("there is no such node")?.clone();
        let Some(of) = node.queue_of() else { return Ok(None) };
        self.make_queue(&node)?;
        let (description, _) = self.tap_for(of)?.with_context(|| format!("node {of} has no interface"))?;
        let description = message::Endpoint { latency_us: node.latency_us, ..description };
        let queue = self.queues.get(name).context("it was just opened")?.device.try_clone()?;
        self.keep(Key::Queue(name.to_owned()));
        Ok(Some((description, queue)))
    }

    /// Closes a node's queue, if it drives one: its flows go by the others.
    pub(super) fn forget_queue(&mut self, node: &Node) {
        if self.queues.remove(&node.name).is_some() {
            self.keep(Key::Queue(node.name.clone()));
        }
    }

    /// Has the flows of a queue that goes away go by the others.
    pub(super) fn divert(&mut self, node: &str) {
        let _ = self.queues.get(node).map(|queue| give_flows(queue.device.as_fd(), false));
    }

    /// Has the flows of each queue go by it while a worker drives it, or is about to.
    pub(super) fn fit_queues(&mut self) {
        if self.adopting {
            // The workers have yet to say what they drive.
            return self.queues.values_mut().for_each(|queue| queue.since = now());
        }
        // Each queue's node has one end.
        let is_its =
            |card: &&Card| card.vni().is_some() && self.queues.contains_key(&card.node) && !self.leaves(&card.node);
        let look = |card: &Card| {
            let is_driven = self.is_member(card) && self.is_held(card.number);
            let is_troubled = card.kept.is_none() || self.trouble_of(&card.node).is_some();
            (card.node.clone(), card.number, is_driven, is_troubled)
        };
        let looks: Vec<_> = self.cards.values().filter(is_its).map(look).collect();
        for (name, end, is_driven, is_troubled) in looks {
            let Some(queue) = self.queues.get_mut(&name) else { continue };
            if queue.is_driven != is_driven {
                (queue.is_driven, queue.since) = (is_driven, now());
            }
            let stays = now().saturating_sub(queue.since);
            let gets_some = if is_driven {
                queue.has_flows || !is_troubled || stays >= STAYS
            } else {
                queue.has_flows && stays < if is_troubled { STAYS } else { PATIENCE }
            };
            if queue.has_flows != gets_some {
                queue.has_flows = gets_some;
                // It fails if the interface is gone, and no flow with it is left.
                let _ = give_flows(queue.device.as_fd(), gets_some);
                self.show_address(end, gets_some);
                let what = if gets_some {
                    "its flows go by it again"
                } else {
                    "no worker drives its queue, and the flows of that go by the other queues until one does"
                };
                self.note(About::node(&name), format!("node {name}: {what}"));
            }
        }
    }
}
