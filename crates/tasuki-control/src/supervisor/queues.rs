//! Nodes that drive one more queue of another node's interface. The daemon opens the queue, as it makes the interface,
//! and the descriptor outlives workers. The queue's node has workers, a CPU and an end of the VNI of its own. Its station
//! address is that of the interface: in the VNI's directory the nodes share it, and each gets other flows.
//!
//! Frames in an undriven queue would be lost. So the daemon steers its flows to the other queues until a worker drives it.
//! It does the same for the first queue, which the interface's node drives, and for broadcasts.
//!
//! No frame is lost as a queue comes or goes. A new queue: the kernel steers all flows to the first queue until the new
//! queue has a worker and a directory entry. A queue that goes: (1) the kernel steers all flows to the first queue; (2) its
//! worker drains the queue; (3) the directory drops it; (4) its worker drains its VNI rings ([`super::drains`]).
//!
//! Pairs of a virtual machine go another way (docs/design/guests.md). Here are the checks of the workers that may serve them,
//! and the addresses that are shown.
//!
//! How the steering changes is a pure function of what the daemon sees of the nodes ([`Interface::decide`]).

use std::collections::BTreeMap;
use std::iter::once;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::io::Errno;
use tasuki_relay::message::{self, program_state};
use tasuki_shm::vni::loans::{self, Loans};
use tasuki_tap::device::{another_queue, give_flows, give_one_queue_all, is_detached, is_gone};

use super::card::Card;
use super::deposits::{Found, Key};
use super::worker::Worker;
use super::{About, Supervisor, WORKER_TIMEOUT, now};
use crate::config::{Config, Node, Work};

/// A troubled node's queue must stay driven, or undriven, this long before the daemon changes the steering.
pub(super) const TROUBLED_TIMEOUT: Duration = Duration::from_secs(2);

/// A new queue gets flows after its worker has driven it for this long: the worker may have yet to hear of a new directory.
const DIRECTORY_TIMEOUT: Duration = Duration::from_millis(100);

/// The kind of endpoint by which a worker serves queues of another node's virtual machine.
const BORROWER: &str = "vm-queue";

/// The keeper's text beside a queue while the first queue of its interface is detached.
const FIRST_IS_DETACHED: &str = "the first queue has no flows";

/// An interface with several queues.
#[derive(Debug)]
pub struct Interface {
    /// The flows of the first queue, which the interface's node drives.
    first: Flows,
    /// The other queues, by the nodes that drive them.
    others: BTreeMap<String, Queue>,
}

/// A queue beside the first one.
#[derive(Debug)]
pub struct Queue {
    pub device: OwnedFd,
    flows: Flows,
    /// Whether the queue is new or about to go: the kernel steers all flows of the interface to one other queue meanwhile.
    is_bypassed: bool,
}

/// The flows of a queue.
#[derive(Debug)]
struct Flows {
    /// Whether the daemon steers them to it.
    is_attached: bool,
    /// Whether a worker drives the queue, and since when that is so.
    is_driven: bool,
    since: Duration,
}

/// What the daemon sees of a node that drives a queue.
#[derive(Debug, Clone, Copy)]
struct Observation {
    is_driven: bool,
    is_troubled: bool,
    /// It is being removed.
    is_leaving: bool,
}

/// A step that changes the steering.
#[derive(Debug, PartialEq, Eq)]
enum Change {
    /// The directory shows the node's address, or hides it.
    Address { node: String, is_shown: bool },
    /// The kernel attaches the node's queue, which is not the first one, or detaches it.
    Queue { node: String, is_attached: bool },
    /// The kernel steers all flows to this queue, or spreads them over all that are attached.
    Steering(Option<u8>),
    /// The next daemon has to know whether the first queue is attached.
    Deposit,
    /// Users read what becomes of the node's flows.
    Event { node: String, what: &'static str },
}

impl Flows {
    fn new(is_attached: bool, now: Duration) -> Self {
        Flows { is_attached, is_driven: false, since: now }
    }

    /// Takes note of whether a worker drives the queue. Returns whether the flows are to be steered to it.
    fn observe(&mut self, Observation { is_driven, is_troubled, .. }: Observation, now: Duration) -> bool {
        if self.is_driven != is_driven {
            (self.is_driven, self.since) = (is_driven, now);
        }
        let lasts = now.saturating_sub(self.since);
        match is_driven {
            true => self.is_attached || !is_troubled || lasts >= TROUBLED_TIMEOUT,
            false => self.is_attached && lasts < if is_troubled { TROUBLED_TIMEOUT } else { WORKER_TIMEOUT },
        }
    }
}

impl Interface {
    fn new(is_first_attached: bool, now: Duration) -> Self {
        Interface { first: Flows::new(is_first_attached, now), others: BTreeMap::new() }
    }

    /// Returns the queue that gets all flows while another one is bypassed: the first one, if that is attached.
    fn fallback_queue(&self) -> u8 {
        u8::from(!self.first.is_attached)
    }

    /// Returns the queue to which the kernel steers all flows; `None` if it spreads them over all that are attached.
    fn steering(&self) -> Option<u8> {
        let bypasses = self.others.values().any(|queue| queue.is_bypassed);
        Some(self.fallback_queue()).filter(|_| bypasses || !self.first.is_attached)
    }

    /// Returns whether a queue is attached; `None` if the interface has none that this node drives.
    fn is_attached(&self, of: &str, node: &str) -> Option<bool> {
        let other = self.others.get(node).map(|queue| &queue.flows);
        other.or(Some(&self.first).filter(|_| of == node)).map(|flows| flows.is_attached)
    }

    /// Returns whether the flows of the first queue may go to another one, or stay there.
    fn may_detach_first(&self, seen: &BTreeMap<String, Observation>) -> bool {
        let mut attached =
            self.others.iter().filter(|(_, queue)| queue.flows.is_attached).map(|(node, _)| seen.get(node));
        if !self.first.is_attached {
            return attached.flatten().any(|it| !it.is_leaving);
        }
        // Any of those that are attached may be the one that would get them (the kernel's queue 1): it moves the last one into
        // the place of one that is detached, and no later tasukid knows in which order they came. So a worker has to drive
        // each, and none may be about to go.
        let leaves = self.others.keys().any(|node| seen.get(node).is_some_and(|it| it.is_leaving));
        let is_any = attached.clone().next().is_some();
        is_any && !leaves && attached.all(|it| it.is_some_and(|it| it.is_driven))
    }

    /// Decides how the steering of the interface of node `of` changes. Nothing is decided about nodes that are not seen.
    fn decide(&mut self, of: &str, seen: &BTreeMap<String, Observation>, now: Duration) -> Vec<Change> {
        let mut changes = Vec::new();
        // The first queue comes last: what becomes of its flows depends on the others.
        for node in self.others.keys().cloned().chain(once(of.to_owned())).collect::<Vec<_>>() {
            let Some(observed) = seen.get(&node).filter(|it| !it.is_leaving) else { continue };
            let is_first = node == of;
            let stays_attached = is_first && !self.may_detach_first(seen);
            let other = self.others.get_mut(&node).map(|queue| &mut queue.flows);
            let flows = other.unwrap_or(&mut self.first);
            let is_attached = flows.observe(*observed, now) || stays_attached;
            let is_settled = flows.is_driven && now.saturating_sub(flows.since) >= DIRECTORY_TIMEOUT;
            if std::mem::replace(&mut flows.is_attached, is_attached) != is_attached {
                let steering = match is_first {
                    true => Change::Steering(self.steering()),
                    false => Change::Queue { node: node.clone(), is_attached },
                };
                // A worker takes frames for an address that is not shown for forged.
                let address = Change::Address { node: node.clone(), is_shown: is_attached };
                changes.extend(if is_attached { [address, steering] } else { [steering, address] });
                changes.extend(is_first.then_some(Change::Deposit));
                let what = what_changes(is_attached, observed.is_driven, is_first);
                changes.push(Change::Event { node: node.clone(), what });
            }
            let bypassed = self.others.get_mut(&node).filter(|queue| queue.is_bypassed);
            if let Some(queue) = bypassed.filter(|_| is_settled || !is_attached) {
                queue.is_bypassed = false;
                changes.push(Change::Steering(self.steering()));
            }
        }
        changes
    }
}

/// Returns what becomes of the flows of a queue, for users.
fn what_changes(is_attached: bool, is_driven: bool, is_first: bool) -> &'static str {
    match (is_attached, is_driven, is_first) {
        (true, true, _) => "its flows go by it again",
        (true, false, _) => "no worker drives any queue of its interface, and its flows wait in its own",
        (false, _, false) => "no worker drives its queue, and the flows of that go by the other queues until one does",
        (false, _, true) => {
            "no worker drives its queue, and all flows of its interface go by another one until one does"
        }
    }
}

impl Config {
    /// Returns the node whose interface and station address this one has: itself, unless it drives a queue of another's.
    pub fn interface_node<'a>(&'a self, node: &'a Node) -> &'a Node {
        node.queue_of().and_then(|of| self.node(of)).unwrap_or(node)
    }

    /// Returns whether the workers of several nodes keep this one's limits together.
    pub fn shares_limits(&self, node: &Node) -> bool {
        let node = self.interface_node(node);
        node.limits.is_some() && (node.tap().is_some_and(|tap| tap.queues() > 1) || self.shares_machine(node))
    }

    /// Returns whether several nodes serve the virtual machine of this one, or of the one that it drives queues of.
    pub fn shares_machine(&self, node: &Node) -> bool {
        let interface_node = self.interface_node(node);
        let is_its = |other: &Node| other.queue_of() == Some(&interface_node.name);
        matches!(interface_node.work, Work::Vm(_)) && self.node.iter().any(is_its)
    }

    /// Returns the nodes that serve a node's virtual machine beside it.
    pub fn borrowers_of<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Node> {
        let is_vm = self.node(name).is_some_and(|node| matches!(node.work, Work::Vm(_)));
        self.node.iter().filter(move |node| is_vm && node.queue_of() == Some(name))
    }
}

impl Supervisor {
    /// Adopts the queues of an earlier daemon: of interfaces that are gone, only those that nodes in `living` have.
    pub(super) fn begin_queues(&mut self, living: &[String], found: &mut Found) {
        for node in &self.config.node {
            let Some(of) = node.queue_of() else { continue };
            let Some((text, fds)) = found.remove(&Key::Queue(node.name.clone())) else { continue };
            let device = fds.into_iter().next();
            let is_there = |device: &OwnedFd| living.contains(&node.name) || !is_gone(device.as_fd());
            let Some(device) = device.filter(is_there) else { continue };
            // Of the first queue the kernel does not say whether it is attached.
            let is_first_attached = living.iter().any(|name| name == of) || text != FIRST_IS_DETACHED;
            // The last daemon may have died as it bypassed the queue: that ends as for a new one.
            let flows = Flows::new(!is_detached(device.as_fd()), now());
            let queue = Queue { device, flows, is_bypassed: true };
            let interface =
                self.interfaces.entry(of.to_owned()).or_insert_with(|| Interface::new(is_first_attached, now()));
            interface.first.is_attached = is_first_attached;
            interface.others.insert(node.name.clone(), queue);
        }
    }

    /// Opens the queue that a node drives, unless it is open.
    pub(super) fn make_queue(&mut self, node: &Node) -> Result<()> {
        let Some(of) = node.queue_of().filter(|_| self.queue(&node.name).is_none()) else { return Ok(()) };
        ensure!(!self.leaves(of), "node {of} is being removed; add both again when it is gone");
        // Once it is open, the kernel may give it flows.
        node.vni.as_ref().map_or(Ok(()), |vni| self.all_know_sharing(vni))?;
        if self.config.node(of).is_some_and(|of| matches!(of.work, Work::Vm(_))) {
            return self.all_lend(of);
        }
        let (_, first) = self.tap_for(of)?.with_context(|| format!("node {of} has no interface"))?;
        let fallback = self.interfaces.get(of).map_or(0, Interface::fallback_queue);
        let no_queue = || format!("the interface of node {of} has no queue for node {}", node.name);
        let is_bypassed = match give_one_queue_all(first.as_fd(), Some(fallback)) {
            Ok(()) => true,
            // The next step may fail for that, too, and frames that the kernel gave the queue by then would be lost.
            Err(errno @ (Errno::MFILE | Errno::NFILE)) => {
                return Err(std::io::Error::from(errno)).with_context(no_queue);
            }
            // Frames wait in the new queue for its first worker.
            Err(_) => false,
        };
        let queue = another_queue(first.as_fd()).with_context(no_queue);
        match queue {
            Ok(device) => {
                let queue = Queue { device, flows: Flows::new(true, now()), is_bypassed };
                let interface = self.interfaces.entry(of.to_owned()).or_insert_with(|| Interface::new(true, now()));
                interface.others.insert(node.name.clone(), queue);
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
        if let Some((description, socket)) = self.endpoint_for(of)? {
            let (kind, latency_us) = (BORROWER.to_owned(), node.latency_us);
            return Ok(Some((message::Endpoint { kind, latency_us, ..description }, socket)));
        }
        let (description, _) = self.tap_for(of)?.with_context(|| format!("node {of} has no interface"))?;
        let description = message::Endpoint { latency_us: node.latency_us, ..description };
        let (_, queue) = self.queue(name).context("it was just opened")?;
        let device = queue.device.try_clone()?;
        self.mark_deposit(Key::Queue(name.to_owned()));
        Ok(Some((description, device)))
    }

    /// Closes a node's queue, if it drives one: its flows go by the others.
    pub(super) fn forget_queue(&mut self, node: &Node) {
        let Some(of) = node.queue_of() else { return drop(self.interfaces.remove(&node.name)) };
        let interface = self.interfaces.get_mut(of);
        let Some(queue) = interface.and_then(|interface| interface.others.remove(&node.name)) else { return };
        // Its node could not be made.
        if queue.is_bypassed {
            let _ = give_flows(queue.device.as_fd(), false);
            self.steer(of, queue.device.as_fd());
        }
        self.mark_deposit(Key::Queue(node.name.clone()));
    }

    /// Has the kernel steer all flows to the first queue, as another node's one is to go. Returns `None` if that cannot be:
    /// that node has no queue, or its queue or the first one is detached, or the kernel refuses.
    pub(super) fn bypass_queue(&mut self, node: &str) -> Option<()> {
        let interface = self.interfaces.values_mut().find(|interface| interface.others.contains_key(node))?;
        let is_first_attached = interface.first.is_attached;
        let queue = interface.others.get_mut(node).filter(|queue| queue.flows.is_attached && is_first_attached)?;
        give_one_queue_all(queue.device.as_fd(), Some(0)).ok()?;
        queue.is_bypassed = true;
        Some(())
    }

    /// Has the kernel give the flows of a queue that goes away to the others.
    pub(super) fn detach_queue(&mut self, node: &str) {
        let queue = self.interfaces.values_mut().find_map(|interface| interface.others.get_mut(node));
        let Some(queue) = queue else { return };
        let _ = give_flows(queue.device.as_fd(), false);
        let was_bypassed = std::mem::take(&mut queue.is_bypassed);
        if let Some((of, queue)) = self.queue(node).filter(|_| was_bypassed) {
            self.steer(of, queue.device.as_fd());
        }
    }

    /// Returns what the keeper gets of a node's queue: a text and the descriptor.
    pub(super) fn queue_deposit(&self, node: &str) -> Option<(String, BorrowedFd<'_>)> {
        let (of, queue) = self.queue(node)?;
        let text = if self.gets_flows(of) { "" } else { FIRST_IS_DETACHED };
        Some((text.to_owned(), queue.device.as_fd()))
    }

    /// Returns all nodes that drive an open queue beside a first one.
    pub(super) fn queue_nodes(&self) -> impl Iterator<Item = &String> {
        self.interfaces.values().flat_map(|interface| interface.others.keys())
    }

    /// Returns the queue that a node drives beside a first one, and the interface's node.
    pub(super) fn queue(&self, node: &str) -> Option<(&str, &Queue)> {
        self.interfaces.iter().find_map(|(of, interface)| Some((&of[..], interface.others.get(node)?)))
    }

    /// Returns a node's end of its VNI.
    pub(super) fn end_on_vni(&self, node: &str) -> Option<&Card> {
        self.cards.of(node).find(|card| card.vni().is_some())
    }

    /// Has the kernel steer the flows of a node's interface as the daemon has decided. `queue` is any of its queues. It fails
    /// if the interface is gone, and no flow is left.
    fn steer(&self, of: &str, queue: BorrowedFd<'_>) {
        let _ = give_one_queue_all(queue, self.interfaces.get(of).and_then(Interface::steering));
    }

    /// Checks that no worker of a machine's node is from before it could share its queues.
    fn all_lend(&self, of: &str) -> Result<()> {
        let is_too_old = |worker: &&Worker| worker.record.node == of && worker.has_begun && !worker.knows_loans();
        match self.workers.values().find(is_too_old) {
            Some(worker) => anyhow::bail!(
                "worker {} of node {of} is from before several nodes could serve one virtual machine; replace it (tasuki worker upgrade {of})",
                worker.party()
            ),
            None => Ok(()),
        }
    }

    /// Returns whether a worker would serve queues that another one has, as it is from before several could.
    pub(super) fn lends_nothing(&self, number: u32, config: &Config) -> bool {
        let worker = self.workers.get(&number).filter(|worker| !worker.knows_loans());
        let node = worker.and_then(|worker| config.node(&worker.record.node));
        node.is_some_and(|node| config.shares_machine(node))
    }

    /// Ends the loan of a node that serves another node's machine: its workers have ended, and none comes any more.
    pub(super) fn lose_loans(&mut self, name: &str) {
        self.borrowing.remove(name);
        self.loans_of(name).into_iter().for_each(|(loans, number)| loans.lose(number));
    }

    /// Ends the loans of nodes that are not there any more: the file lost them while no tasukid ran. Their workers have
    /// ended, and no other has begun.
    pub(super) fn lose_loans_of_none(&self) {
        for machine in self.config.node.iter().filter(|node| matches!(node.work, Work::Vm(_))) {
            let borrowers: Vec<_> = self.config.borrowers_of(&machine.name).map(|node| &node.name).collect();
            // One whose end is yet to be made has no loan.
            let numbers = borrowers.iter().filter_map(|name| self.end_on_vni(name)?.number_on_vni);
            let numbers: Vec<u16> = numbers.collect();
            let Some(loans) = self.loans_at(&machine.name) else { continue };
            let gone = (0..loans::SLOTS).filter_map(|slot| loans.node(slot)).filter(|node| !numbers.contains(node));
            gone.collect::<Vec<_>>().into_iter().for_each(|node| loans.lose(node));
        }
    }

    /// Returns the loans of a machine.
    fn loans_at(&self, machine: &str) -> Option<Loans> {
        let words = &self.nodes.get(machine)?.program_state;
        words.region().span(8 * program_state::LOANS_AT, loans::LINES).ok().map(Loans::over)
    }

    /// Returns the loans among which a node has some of another node's machine, and its number there.
    fn loans_of(&self, name: &str) -> Option<(Loans, u16)> {
        let node = self.config.node(name).filter(|node| self.config.shares_machine(node))?;
        Some((self.loans_at(node.queue_of()?)?, self.end_on_vni(name)?.number_on_vni?))
    }

    /// Has a node that serves queues of another node's machine take no more frames from the guest, as it is to go. Returns
    /// `None` if it serves none.
    pub(super) fn hold_borrower(&mut self, name: &str) -> Option<()> {
        let (loans, number) = self.loans_of(name).filter(|_| self.borrowing.contains(name))?;
        loans.set_leaving(number, true);
        Some(())
    }

    /// Handles a worker's report that it is ready to serve queues of another node's machine, or is not any more: other nodes
    /// give it flows while it is.
    pub(super) fn on_borrower(&mut self, number: u32, nic: u32, is_ready: bool) {
        let Some(card) = self.cards.get(&nic).filter(|card| card.holder().is_none_or(|holder| holder == number)) else {
            return;
        };
        let node = card.node().to_owned();
        if !self.leaves(&node) {
            // An earlier tasukid may have died as it removed the node.
            self.loans_of(&node).into_iter().for_each(|(loans, number)| loans.set_leaving(number, false));
        }
        let is_news = if is_ready { self.borrowing.insert(node) } else { self.borrowing.remove(&node) };
        if is_news {
            self.show_address(nic, is_ready);
        }
    }

    /// Returns whether the other nodes give a node flows: all do, but one whose queue is detached, or that has none of its
    /// machine.
    pub(super) fn gets_flows(&self, node: &str) -> bool {
        if let Some(config) = self.config.node(node).filter(|node| self.config.shares_machine(node)) {
            return config.queue_of().is_none() || self.borrowing.contains(node);
        }
        self.interfaces.iter().find_map(|(of, interface)| interface.is_attached(of, node)).unwrap_or(true)
    }

    /// Returns whether a queue is bypassed: the daemon is to look soon whether that is over.
    pub(super) fn is_bypassing(&self) -> bool {
        self.interfaces.values().flat_map(|interface| interface.others.values()).any(|queue| queue.is_bypassed)
    }

    /// Has the flows of each queue go by it while a worker drives it, or is about to.
    pub(super) fn reconcile_queues(&mut self) {
        if self.adopting || !self.untold.is_empty() {
            // The workers have yet to say what they drive, or go by the directory of another tasukid.
            for interface in self.interfaces.values_mut() {
                let others = interface.others.values_mut().map(|queue| &mut queue.flows);
                others.chain([&mut interface.first]).for_each(|flows| flows.since = now());
            }
            return;
        }
        let names: Vec<String> = self.interfaces.keys().cloned().collect();
        for of in names {
            let nodes = |interface: &Interface| once(&of).chain(interface.others.keys()).cloned().collect::<Vec<_>>();
            let nodes = self.interfaces.get(&of).map(nodes).unwrap_or_default();
            let seen = nodes.into_iter().filter_map(|node| Some((self.observe_queue(&node)?, node)));
            let seen = seen.map(|(it, node)| (node, it)).collect();
            let changes = self.interfaces.get_mut(&of).map(|interface| interface.decide(&of, &seen, now()));
            changes.into_iter().flatten().for_each(|change| self.change_steering(&of, change));
        }
        // One whose last other queue has gone has all flows again by now.
        self.interfaces.retain(|_, interface| !interface.others.is_empty() || !interface.first.is_attached);
    }

    fn observe_queue(&self, node: &str) -> Option<Observation> {
        let end = self.end_on_vni(node)?;
        Some(Observation {
            is_driven: self.is_member(end) && self.is_held(end.number),
            is_troubled: end.opened.is_none() || self.trouble_of(node).is_some(),
            is_leaving: self.leaves(node),
        })
    }

    fn change_steering(&mut self, of: &str, change: Change) {
        let Some(interface) = self.interfaces.get(of) else { return };
        match change {
            Change::Address { node, is_shown } => {
                let end = self.end_on_vni(&node).map(|end| end.number);
                end.into_iter().for_each(|end| self.show_address(end, is_shown));
            }
            // Both fail if the interface is gone, and no flow with it is left.
            Change::Queue { node, is_attached } => {
                let queue = interface.others.get(&node);
                _ = queue.map(|queue| give_flows(queue.device.as_fd(), is_attached));
            }
            Change::Steering(to) => {
                let queue = interface.others.values().next();
                _ = queue.map(|queue| give_one_queue_all(queue.device.as_fd(), to));
            }
            Change::Deposit => {
                let nodes: Vec<String> = interface.others.keys().cloned().collect();
                nodes.into_iter().for_each(|node| self.mark_deposit(Key::Queue(node)));
            }
            Change::Event { node, what } => self.note(About::node(&node), format!("node {node}: {what}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns an interface of node `of` whose other queues nodes a and b drive, all three as they are since time 0. Of a
    /// queue, `a` says attached, `d` driven and `b` bypassed; a number says since which second it is as it is.
    fn interface(queues: &str) -> Interface {
        let since = |is: &str| is.trim_start_matches(char::is_alphabetic).parse().unwrap_or(0);
        let flows = |is: &str| Flows {
            is_driven: is.contains('d'),
            ..Flows::new(is.contains('a'), Duration::from_secs(since(is)))
        };
        let device = || std::fs::File::open("/dev/null").expect("it is there").into();
        let queue = |is| Queue { device: device(), flows: flows(is), is_bypassed: is.contains('b') };
        let mut queues = queues.split(' ');
        let first = flows(queues.next().expect("the first queue"));
        Interface { first, others: ["a", "b"].map(str::to_owned).into_iter().zip(queues.map(queue)).collect() }
    }

    /// Returns the nodes of, a and b as they are seen: driven, undriven, troubled as well, leaving.
    fn seen(words: &str) -> BTreeMap<String, Observation> {
        let observe = |word| Observation {
            is_driven: matches!(word, "driven" | "leaving"),
            is_troubled: word == "troubled",
            is_leaving: word == "leaving",
        };
        ["of", "a", "b"].map(str::to_owned).into_iter().zip(words.split(' ').map(observe)).collect()
    }

    /// Formats the changes for a comparison: `+` and `-` are attached and detached, or shown and hidden.
    fn text(changes: &[Change]) -> String {
        let sign = |is: bool| if is { '+' } else { '-' };
        let word = |change: &Change| match change {
            Change::Address { node, is_shown } => format!("address {node}{}", sign(*is_shown)),
            Change::Queue { node, is_attached } => format!("queue {node}{}", sign(*is_attached)),
            Change::Steering(to) => to.map_or("spread".to_owned(), |to| format!("all to {to}")),
            Change::Deposit => "deposit".to_owned(),
            Change::Event { node, .. } => format!("event {node}"),
        };
        changes.iter().map(word).collect::<Vec<_>>().join(", ")
    }

    /// Returns the changes as the first queue is attached or detached.
    fn first(sign: char, steering: &str) -> String {
        match sign {
            '+' => format!("address of+, {steering}, deposit, event of"),
            _ => format!("{steering}, address of-, deposit, event of"),
        }
    }

    #[test]
    fn flows_go_by_the_queues_that_workers_drive() {
        let all = "driven driven driven";
        let all_but_first = "undriven driven driven";
        let gone = "address a-, event a";
        let cases = [
            ("all are driven", "ad ad ad", 99_000, all, "".to_owned()),
            ("a new one was just driven", "ad adb ad", 99, all, "".to_owned()),
            ("its worker has the directory", "ad adb ad", 100, all, "spread".to_owned()),
            ("another one is new, too", "ad adb ab", 100, "driven driven undriven", "all to 0".to_owned()),
            ("one is not driven for a moment", "ad a ad", 9_999, "driven undriven driven", "".to_owned()),
            ("one is not driven", "ad a ad", 10_000, "driven undriven driven", format!("queue a-, {gone}")),
            ("its node is in trouble", "ad a ad", 2_000, "driven troubled driven", format!("queue a-, {gone}")),
            ("it was new", "ad ab ad", 10_000, "driven undriven driven", format!("queue a-, {gone}, spread")),
            ("it is driven again", "ad - ad", 20_000, all, "address a+, queue a+, event a".to_owned()),
            ("the first one is not driven", "a ad ad", 10_000, all_but_first, first('-', "all to 1")),
            ("nor is another one for so long", "a a5 ad", 14_999, "undriven undriven driven", "".to_owned()),
            ("that one is not driven, either", "a a5 ad", 15_000, "undriven undriven driven", {
                format!("queue a-, {gone}, {}", first('-', "all to 1"))
            }),
            ("another one is driven again", "a a5 ad", 11_000, all_but_first, first('-', "all to 1")),
            ("nobody sees another one", "a ad ad", 10_000, "undriven driven", "".to_owned()),
            ("nor are the others", "a a a", 9_999, "troubled undriven undriven", "".to_owned()),
            ("another one is about to go", "a ad ad", 10_000, "undriven driven leaving", "".to_owned()),
            ("the first one is driven again", "- ad ad", 20_000, all, first('+', "spread")),
            ("and another one is new", "- ad ab", 5_000, "driven driven undriven", first('+', "all to 0")),
            ("no queue is driven any more", "- - -", 20_000, "undriven undriven undriven", first('+', "spread")),
        ];
        for (what, queues, ms, words, expected) in cases {
            let (mut interface, seen, now) = (interface(queues), seen(words), Duration::from_millis(ms));
            assert_eq!(text(&interface.decide("of", &seen, now)), expected, "{what}");
            assert_eq!(text(&interface.decide("of", &seen, now)), "", "{what}: once is enough");
        }
    }

    #[test]
    fn a_troubled_node_gets_flows_once_it_has_driven_for_a_while() {
        let mut interface = interface("ad - ad");
        let mut seen = seen("driven driven driven");
        seen.entry("a".to_owned()).and_modify(|it| it.is_troubled = true);
        let mut at = |ms| text(&interface.decide("of", &seen, Duration::from_millis(ms)));
        assert_eq!([at(50), at(2_049), at(2_050)], ["", "", "address a+, queue a+, event a"]);
    }
}
