//! Nodes that drive one more queue of another node's interface. The daemon opens the queue, as it makes the interface,
//! and the descriptor outlives workers; the queue's node has workers, a CPU and an end of the VNI of its own. Its station
//! address is that of the interface: in the VNI's directory both nodes share it, and each gets other flows.

use std::os::fd::{AsFd, OwnedFd};

use anyhow::{Context, Result};
use tasuki_relay::message;

use super::Supervisor;
use super::keeping::{Found, Key};
use crate::config::{Config, Node};

impl Config {
    /// Returns the node whose interface and station address this one has: itself, unless it drives a queue of another's.
    pub fn lead_of<'a>(&'a self, node: &'a Node) -> &'a Node {
        node.queue_of().and_then(|of| self.node(of)).unwrap_or(node)
    }
}

impl Supervisor {
    /// Adopts the queues of an earlier daemon.
    pub(super) fn begin_queues(&mut self, found: &mut Found) {
        for node in self.config.node.iter().filter(|node| node.queue_of().is_some()) {
            let queue = found.remove(&Key::Queue(node.name.clone())).and_then(|(_, fds)| fds.into_iter().next());
            self.queues.extend(queue.map(|queue| (node.name.clone(), queue)));
        }
    }

    /// Opens the queue that a node drives, unless it is open.
    pub(super) fn make_queue(&mut self, node: &Node) -> Result<()> {
        let Some(of) = node.queue_of().filter(|_| !self.queues.contains_key(&node.name)) else { return Ok(()) };
        // Once it is open, the kernel gives it flows.
        node.vni.as_ref().map_or(Ok(()), |vni| self.all_know_sharing(vni))?;
        let (_, first) = self.tap_for(of)?.with_context(|| format!("node {of} has no interface"))?;
        let queue = tasuki_tap::device::another_queue(first.as_fd())
            .with_context(|| format!("the interface of node {of} has no queue for node {}", node.name))?;
        self.queues.insert(node.name.clone(), queue);
        Ok(())
    }

    /// Returns the description and the descriptor for a worker of this node, if it drives a queue of another's interface.
    pub(super) fn queue_for(&mut self, name: &str) -> Result<Option<(message::Endpoint, OwnedFd)>> {
        let node = self.config.node(name).context("there is no such node")?.clone();
        let Some(of) = node.queue_of() else { return Ok(None) };
        self.make_queue(&node)?;
        let (description, _) = self.tap_for(of)?.with_context(|| format!("node {of} has no interface"))?;
        let description = message::Endpoint { latency_us: node.latency_us, ..description };
        let queue = self.queues.get(name).context("it was just opened")?.try_clone()?;
        self.keep(Key::Queue(name.to_owned()));
        Ok(Some((description, queue)))
    }

    /// Closes a node's queue, if it drives one: its flows go by the others.
    pub(super) fn forget_queue(&mut self, node: &Node) {
        if self.queues.remove(&node.name).is_some() {
            self.keep(Key::Queue(node.name.clone()));
        }
    }
}
