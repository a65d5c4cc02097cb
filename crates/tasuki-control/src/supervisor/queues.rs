//! Nodes that drive one more queue of another node's interface. The daemon opens the queue, as it makes the interface,
//! and the descriptor outlives workers; the queue's node has workers, a CPU and an end of the VNI of its own. Its station
//! address is that of the interface: in the VNI's directory both nodes share it, and each gets other flows.
//!
//! A queue that nobody drives would swallow its flows. If no worker comes, they go by the other queues until one does. So
//! do those of the interface's own node, and what is for all.
//!
//! No frame is lost as a queue comes or goes. The kernel gives all flows of the interface to the first queue until a new
//! one has a worker whose address the directory has. Before one goes away, the kernel does the same, and then the other
//! nodes give theirs to the rest; each time its worker passes on what is in it.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::event::{PollFd, PollFlags, Timespec};
use tasuki_relay::message;
use tasuki_relay::wire::Order;
use tasuki_shm::crash;
use tasuki_tap::device::{another_queue, give_flows, give_one_queue_all, is_detached, is_gone};

use super::card::Card;
use super::deposits::{Found, Key};
use super::{About, Supervisor, WORKER_TIMEOUT, now};
use crate::config::{Config, Node};

/// How long a node in trouble drives its queue, or does not, before that counts: its workers may die one after the other.
const STAYS: Duration = Duration::from_secs(2);

/// How long nothing moves in a queue that is empty, and in one that is not by its counters, which a worker's death can
/// leave different for good.
const QUIET: Duration = Duration::from_millis(20);
const STUCK: Duration = Duration::from_millis(200);

/// How long a worker drives a queue until flows go by it: it may have yet to hear of a new directory.
const SETTLES: Duration = Duration::from_millis(100);

/// How long a queue is given to drain, each time.
const DRAINS: Duration = Duration::from_secs(1);

/// What the keeper has beside a queue while the first one of its interface has no flows.
const FIRST_HAS_NONE: &str = "the first queue has no flows";

/// One more queue of an interface.
#[derive(Debug)]
pub struct Queue {
    pub device: OwnedFd,
    flows: Flows,
    /// Whether the kernel gives all flows of the interface to one other queue meanwhile: it is new, or about to go.
    is_spared: bool,
}

/// The flows of a queue, also of an interface's first one.
#[derive(Debug)]
pub struct Flows {
    /// Whether they go by it.
    are_its: bool,
    /// Whether a worker drives it, and since when that is so.
    is_driven: bool,
    since: Duration,
}

impl Flows {
    fn of(are_its: bool) -> Self {
        Flows { are_its, is_driven: false, since: now() }
    }

    /// Looks whether a worker drives it. Returns whether its flows are to go by it.
    fn look(&mut self, is_driven: bool, is_troubled: bool) -> bool {
        if self.is_driven != is_driven {
            (self.is_driven, self.since) = (is_driven, now());
        }
        let stays = now().saturating_sub(self.since);
        match is_driven {
            true => self.are_its || !is_troubled || stays >= STAYS,
            false => self.are_its && stays < if is_troubled { STAYS } else { WORKER_TIMEOUT },
        }
    }
}

/// A queue that is to go away, once its worker has passed on what is in it.
#[derive(Debug)]
pub struct Draining {
    begun: Duration,
    /// Whether the other nodes give it nothing more. Before that the kernel does not.
    is_hidden: bool,
    /// The worker that drives it, and since when it drains it that way.
    driver: (Option<u32>, Duration),
    /// Number of frames that it has passed on the way that is being drained, and since when it is that.
    moved: (u64, Duration),
    /// Whether the worker was asked for an answer since nothing moves.
    was_asked: bool,
}

impl Draining {
    /// Begins to drain it the other way, or by another worker.
    fn begin(&mut self, driver: Option<u32>, moved: u64) {
        (self.driver, self.moved, self.was_asked) = ((driver, now()), (moved, now()), false);
    }
}

impl Config {
    /// Returns the node whose interface and station address this one has: itself, unless it drives a queue of another's.
    pub fn lead_of<'a>(&'a self, node: &'a Node) -> &'a Node {
        node.queue_of().and_then(|of| self.node(of)).unwrap_or(node)
    }

    /// Returns whether the workers of several nodes keep this one's limits together.
    pub fn shares_limits(&self, node: &Node) -> bool {
        let lead = self.lead_of(node);
        lead.limits.is_some() && lead.tap().is_some_and(|tap| tap.queues() > 1)
    }
}

impl Supervisor {
    /// Adopts the queues of an earlier daemon: of interfaces that are gone, only those that nodes in `living` have.
    pub(super) fn begin_queues(&mut self, living: &[String], found: &mut Found) {
        for node in self.config.node.iter().filter(|node| node.queue_of().is_some()) {
            let kept = found.remove(&Key::Queue(node.name.clone()));
            let kept = kept.and_then(|(text, fds)| Some((text, fds.into_iter().next()?)));
            let (text, queue) = kept
                .filter(|(_, queue)| living.contains(&node.name) || !is_gone(queue.as_fd()))
                .map_or((String::new(), None), |(text, queue)| (text, Some(queue)));
            // It has none if nobody drove it, and gets some when a worker does. The last daemon may have died as it spared
            // it: that ends as for a new one.
            let adopted = |queue: OwnedFd| Queue {
                flows: Flows::of(!is_detached(queue.as_fd())),
                device: queue,
                is_spared: true,
            };
            let of = node.queue_of().filter(|_| queue.is_some()).map(str::to_owned);
            // Of the first queue the kernel does not say whether it has some.
            let has_first = living.iter().any(|name| Some(name) == of.as_ref()) || text != FIRST_HAS_NONE;
            self.leads.extend(of.map(|of| (of, Flows::of(has_first))));
            self.queues.extend(queue.map(|queue| (node.name.clone(), adopted(queue))));
        }
    }

    /// Opens the queue that a node drives, unless it is open.
    pub(super) fn make_queue(&mut self, node: &Node) -> Result<()> {
        let Some(of) = node.queue_of().filter(|_| !self.queues.contains_key(&node.name)) else { return Ok(()) };
        ensure!(
            !self.leaves(of),
            "node {of} is being removed, and its interface with it; add both again when it is gone"
        );
        // Once it is open, the kernel may give it flows.
        node.vni.as_ref().map_or(Ok(()), |vni| self.all_know_sharing(vni))?;
        let (_, first) = self.tap_for(of)?.with_context(|| format!("node {of} has no interface"))?;
        // If the kernel refuses, frames wait in the new queue for its first worker.
        let is_spared = give_one_queue_all(first.as_fd(), Some(self.other_than(of))).is_ok();
        let queue = another_queue(first.as_fd())
            .with_context(|| format!("the interface of node {of} has no queue for node {}", node.name));
        match queue {
            Ok(device) => {
                self.queues.insert(node.name.clone(), Queue { device, flows: Flows::of(true), is_spared });
                self.leads.entry(of.to_owned()).or_insert_with(|| Flows::of(true));
            }
            Err(error) => {
                self.steer(of, first.as_fd());
                return Err(error);
            }
        }
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
        self.mark_deposit(Key::Queue(name.to_owned()));
        Ok(Some((description, queue)))
    }

    /// Closes a node's queue, if it drives one: its flows go by the others.
    pub(super) fn forget_queue(&mut self, node: &Node) {
        self.leads.remove(&node.name);
        let Some(queue) = self.queues.remove(&node.name) else { return };
        // Its node could not be made.
        if let Some(of) = node.queue_of().filter(|_| queue.is_spared) {
            let _ = give_flows(queue.device.as_fd(), false);
            self.steer(of, queue.device.as_fd());
        }
        self.mark_deposit(Key::Queue(node.name.clone()));
    }

    /// Begins to drain the queue that a node drives. Returns `None` if there is nothing to drain, or no way to: it has no
    /// queue, or the queue has no flows, or those of the first queue go by one of the others, which may be this one, or the
    /// kernel refuses. The frames that are in it are lost then.
    pub(super) fn begin_draining(&mut self, node: &str) -> Option<Draining> {
        let of = self.config.node(node).and_then(Node::queue_of)?;
        let has_first = self.other_than(of) == 0;
        let queue = self.queues.get_mut(node).filter(|queue| queue.flows.are_its && has_first)?;
        give_one_queue_all(queue.device.as_fd(), Some(0)).ok()?;
        queue.is_spared = true;
        let (begun, driver, moved) = (now(), (None, now()), (0, now()));
        Some(Draining { begun, is_hidden: false, driver, moved, was_asked: false })
    }

    /// Goes on to drain a node's queue. Returns whether nothing is left to do. A worker that is dead or hangs is waited
    /// for until another drives, and not for ever.
    pub(super) fn is_drained(&mut self, node: &str, it: &mut Draining) -> bool {
        let end = self.cards.values().find(|card| card.node == node && card.vni().is_some());
        let Some((end, queue)) = end.zip(self.queues.get(node)) else { return true };
        let (driver, end) = (end.holder().filter(|_| end.is_settled() && self.is_held(end.number)), end.number);
        let Some([out, into]) = self.traffic_of(end) else { return true };
        // As long as the other nodes give it frames, it does not stand still that way.
        let traffic = if it.is_hidden { into } else { out };
        if it.driver.0 != driver {
            it.begin(driver, traffic.received);
        } else if it.moved.0 != traffic.received {
            it.moved = (traffic.received, now());
        }
        let mut poll = [PollFd::new(&queue.device, PollFlags::IN)];
        let waits =
            traffic.waits || rustix::event::poll(&mut poll, Some(&Timespec::default())).is_ok_and(|some| some > 0);
        let [stays, drains, lasts] = [it.moved.1, it.driver.1, it.begun].map(|since| now().saturating_sub(since));
        let is_over = match driver {
            Some(driver) => {
                let is_quiet = stays >= if waits { STUCK } else { QUIET } || drains >= DRAINS;
                let was_asked = std::mem::replace(&mut it.was_asked, is_quiet);
                is_quiet && self.has_answered(driver, end, !was_asked)
            }
            None => drains >= if self.trouble_of(node).is_some() { STAYS } else { WORKER_TIMEOUT },
        };
        if !is_over && lasts < WORKER_TIMEOUT + self.config.daemon.hang_after() {
            return false;
        }
        if !it.is_hidden {
            // Frames from a node whose address the directory does not have are taken for forged: it had to send all first.
            self.show_address(end, false);
            crash::point("daemon.hidden");
            it.is_hidden = true;
            it.begin(driver, into.received);
            return false;
        }
        true
    }

    /// Returns whether a worker has answered since it was asked, which it is now if it is to be: one that hangs has not.
    fn has_answered(&mut self, number: u32, nic: u32, asks: bool) -> bool {
        let Some(worker) = self.workers.get_mut(&number) else { return false };
        if asks && worker.probe.is_none() {
            worker.probe = Some(now());
            let _ = worker.order(nic, Order::Who);
        }
        worker.probe.is_none()
    }

    /// Has the kernel give the flows of a queue that goes away to the others.
    pub(super) fn divert(&mut self, node: &str) {
        let _ = self.queues.get(node).map(|queue| give_flows(queue.device.as_fd(), false));
        self.spare_no_more(node);
    }

    fn spare_no_more(&mut self, node: &str) {
        let of = self.config.node(node).and_then(Node::queue_of).map(str::to_owned);
        let Some((of, queue)) = of.zip(self.queues.get_mut(node).filter(|queue| queue.is_spared)) else { return };
        queue.is_spared = false;
        if let Some(queue) = self.queues.get(node) {
            self.steer(&of, queue.device.as_fd());
        }
    }

    /// Returns what the keeper gets of a node's queue: a text and the descriptor.
    pub(super) fn queue_deposit(&self, node: &str) -> Option<(String, BorrowedFd<'_>)> {
        let of = self.config.node(node).and_then(Node::queue_of);
        let has_none = of.is_some_and(|of| !self.gets_flows(of));
        let text = if has_none { FIRST_HAS_NONE } else { "" };
        Some((text.to_owned(), self.queues.get(node)?.device.as_fd()))
    }

    /// Returns the queue that gets all flows of a node's interface while another is spared: the first one, if that has some.
    fn other_than(&self, of: &str) -> u8 {
        u8::from(!self.gets_flows(of))
    }

    /// Has the kernel spread the flows of a node's interface over all its queues, if none of them is spared, and the first
    /// one has some. `queue` is any of them. If the interface is gone, it has no flows.
    fn steer(&self, of: &str, queue: BorrowedFd<'_>) {
        let spares = self.queues_of_interface(of).any(|queue| queue.is_spared);
        let other = Some(self.other_than(of)).filter(|other| spares || *other > 0);
        let _ = give_one_queue_all(queue, other);
    }

    /// Returns the queues of a node's interface but the first one.
    fn queues_of_interface<'a>(&'a self, of: &'a str) -> impl Iterator<Item = &'a Queue> {
        let is_its = move |name: &str| self.config.node(name).and_then(Node::queue_of) == Some(of);
        self.queues.iter().filter(move |(name, _)| is_its(name)).map(|(_, queue)| queue)
    }

    /// Returns whether the other nodes give a node flows: all do, but one whose queue has none.
    pub(super) fn gets_flows(&self, node: &str) -> bool {
        let flows = self.queues.get(node).map(|queue| &queue.flows).or_else(|| self.leads.get(node));
        flows.is_none_or(|flows| flows.are_its)
    }

    /// Returns whether the kernel gives all flows of an interface to one queue for now.
    pub(super) fn is_sparing(&self) -> bool {
        self.queues.values().any(|queue| queue.is_spared)
    }

    /// Has the flows of each queue go by it while a worker drives it, or is about to.
    pub(super) fn reconcile_queues(&mut self) {
        if self.adopting {
            // The workers have yet to say what they drive.
            let all = self.queues.values_mut().map(|queue| &mut queue.flows).chain(self.leads.values_mut());
            return all.for_each(|flows| flows.since = now());
        }
        // Each queue's node has one end.
        let has_flows = |name: &String| self.queues.contains_key(name) || self.leads.contains_key(name);
        let is_its = |card: &&Card| card.vni().is_some() && has_flows(&card.node) && !self.leaves(&card.node);
        let look = |card: &Card| {
            let is_driven = self.is_member(card) && self.is_held(card.number);
            let is_troubled = card.opened.is_none() || self.trouble_of(&card.node).is_some();
            (card.node.clone(), card.number, is_driven, is_troubled)
        };
        let looks: Vec<_> = self.cards.values().filter(is_its).map(look).collect();
        // The flows of a first queue go by another once that is driven, and stay there while one has flows.
        let interfaces_of = |is_of: &dyn Fn(&String, bool) -> bool| -> BTreeSet<String> {
            let are = looks.iter().filter(|(name, _, is_driven, _)| is_of(name, *is_driven));
            are.filter_map(|(name, ..)| self.config.node(name)?.queue_of().map(str::to_owned)).collect()
        };
        let driven = interfaces_of(&|name, is_driven| is_driven && self.gets_flows(name));
        let with_flows = interfaces_of(&|name, _| self.gets_flows(name));
        // One that is about to go may be the one that would get them.
        let leaving = self.queues.keys().filter(|name| self.leaves(name));
        let drained: BTreeSet<String> =
            leaving.filter_map(|name| self.config.node(name)?.queue_of().map(str::to_owned)).collect();
        for (name, end, is_driven, is_troubled) in looks {
            let is_first = !self.queues.contains_key(&name);
            let flows = self.queues.get_mut(&name).map(|queue| &mut queue.flows).or_else(|| self.leads.get_mut(&name));
            let Some(flows) = flows else { continue };
            let may_lose = match (is_first, flows.are_its) {
                (false, _) => true,
                (true, true) => driven.contains(&name) && !drained.contains(&name),
                (true, false) => with_flows.contains(&name),
            };
            let gets_some = flows.look(is_driven, is_troubled) || !may_lose;
            let stays = now().saturating_sub(flows.since);
            if flows.are_its != gets_some {
                flows.are_its = gets_some;
                // The kernel gives it flows only while its address is shown: its worker takes others for forged.
                if gets_some {
                    self.show_address(end, true);
                }
                // It fails if the interface is gone, and no flow with it is left.
                match self.queues.get(&name) {
                    Some(queue) => _ = give_flows(queue.device.as_fd(), gets_some),
                    None => {
                        let any = self.queues_of_interface(&name).take(1);
                        any.for_each(|queue| self.steer(&name, queue.device.as_fd()));
                        // The next daemon has to know.
                        let is_its = |node: &&Node| node.queue_of() == Some(&name);
                        let its = self.config.node.iter().filter(is_its).map(|node| node.name.clone());
                        its.collect::<Vec<_>>().into_iter().for_each(|queue| self.mark_deposit(Key::Queue(queue)));
                    }
                }
                if !gets_some {
                    self.show_address(end, false);
                }
                let what = match (gets_some, is_driven, is_first) {
                    (true, true, _) => "its flows go by it again",
                    (true, false, _) => "no worker drives any queue of its interface, and its flows wait in its own",
                    (false, _, false) => {
                        "no worker drives its queue, and the flows of that go by the other queues until one does"
                    }
                    (false, _, true) => {
                        "no worker drives its queue, and all flows of its interface go by another one until one does"
                    }
                };
                self.note(About::node(&name), format!("node {name}: {what}"));
            }
            if is_driven && stays >= SETTLES || !gets_some {
                self.spare_no_more(&name);
            }
        }
        // One whose last queue has gone has all flows again by now.
        let leads: BTreeSet<&str> = self.queues.keys().filter_map(|it| self.config.node(it)?.queue_of()).collect();
        self.leads.retain(|name, flows| leads.contains(&name[..]) || !flows.are_its);
    }
}
