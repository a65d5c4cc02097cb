//! VNIs. Each has a directory that all its nodes read, and the node memories of those nodes, which outlive workers.
//! To the rest of the daemon a node's end of a VNI is a card: it is opened (its node memory is made), has a lease,
//! and changes hands by the same relays.
//!
//! The order in which the daemon publishes nodes loses no frame. The other nodes know a node before its address is
//! in the directory, and forget it only after the address is gone from there.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::event::EventfdFlags;
use tasuki_relay::message::{Can, DeviceBundle, ToWorker, lease_page, program_state, vni};
use tasuki_shm::crash;
use tasuki_shm::line::{LINE_LEN, LINE_WORDS, Line};
use tasuki_shm::region::{Pages, Region, Span};
use tasuki_shm::vni::NODES_MAX;
use tasuki_shm::vni::directory::{Directory, NodeSet, directory_lines};
use tasuki_shm::vni::loans;
use tasuki_shm::vni::node_memory::{
    JOURNAL_PAGES, NodeMemoryFds, PeerNodeMemory, QUEUE_COUNTS, has_noted, readable_len,
};

use super::card::{Card, Opened, Opening};
use super::deposits::Key;
use super::door::Refusal;
use super::requests::there_are;
use super::worker::{Words, Worker, why_missed};
use super::{About, Supervisor, is_news, now};
use crate::api::types::{CrossedView, QueueView, TalkView, VniNodeView, VniView};
use crate::config::{self, Device, Kind, StationAddress, Work};

/// Addresses that a directory has room for.
const ADDRESSES: usize = 2 * NODES_MAX as usize;

/// Free numbers to try. A number that some node's memory still mentions is used only if all of these are.
const TRIED_MAX: usize = 64;

/// Introductions of one node to one worker in a turn of the loop, at about 15 µs each. The last worker is told all of its own.
const INTRODUCED_MAX: usize = 512;

/// Positions of the node memory and the bell among a device bundle's descriptors.
const CONTROL: usize = 1;
const POOL: usize = 2;
const BELL: usize = 4;

#[derive(Debug)]
pub struct Net {
    memory: Region,
    directory: Directory<Span<Line>>,
    members: BTreeMap<u16, Member>,
    /// A number that became free is not given again before all others were.
    next: u16,
}

/// A node on a VNI.
#[derive(Debug)]
struct Member {
    node: String,
    /// The node whose interface and station address it has: itself, unless it drives a queue of that.
    interface_node: String,
    nic: u32,
    mac: [u8; 6],
    /// Whether the directory has it.
    is_shown: bool,
    /// Its IP addresses, if they are known.
    addresses: Vec<IpAddr>,
    /// Stations may lie behind it, whose addresses are learnt.
    is_uplink: bool,
    /// For the other nodes.
    node_memory: NodeMemoryFds,
    /// The same without its pool, for the counts in it: mapping it takes system calls, and each look asks all nodes.
    counts: PeerNodeMemory,
    bell: OwnedFd,
}

/// Returns the descriptors of an end's node memory.
fn memory_of(opened: &Opened) -> Option<[BorrowedFd<'_>; 2]> {
    Some([opened.fds.get(CONTROL)?.as_fd(), opened.fds.get(POOL)?.as_fd()])
}

/// Returns the name of a node's end of a VNI.
pub fn end_name(node: &str, vni: &str) -> String {
    format!("{node}@{vni}")
}

impl Net {
    fn new() -> Result<Self> {
        let lines = directory_lines(ADDRESSES);
        let memory = Region::create("tasuki directory", lines * LINE_LEN, Pages::Small)?;
        memory.close_to_others()?;
        let directory = Directory::new(memory.span::<Line>(0, lines)?);
        Ok(Net { memory, directory, members: BTreeMap::new(), next: 0 })
    }

    fn directory_to_read(&self) -> Result<OwnedFd> {
        Ok(tasuki_shm::region::read_only(self.memory.fd())?)
    }

    /// Publishes the nodes and uplinks in the directory.
    fn publish(&mut self) {
        let mut nodes = NodeSet::default();
        // What is for all goes once to each interface: by its own node, unless nobody drives that.
        let mut hear = BTreeMap::new();
        for (number, member) in &self.members {
            let how_well = (member.is_shown, member.interface_node == member.node);
            let best = hear.entry(&member.interface_node).or_insert((how_well, *number));
            *best = (how_well, *number).max(*best);
        }
        hear.into_values().for_each(|(_, number)| nodes.insert(number));
        self.directory.set_nodes(&nodes);
        let mut uplinks = NodeSet::default();
        let are = self.members.iter().filter(|(_, member)| member.is_uplink);
        are.for_each(|(number, _)| uplinks.insert(*number));
        self.directory.set_uplinks(&uplinks);
    }
}

/// Pause after a worker could not be told of a node, as tasukid may open no descriptor more.
const LACK_PAUSE: Duration = Duration::from_millis(200);

/// Why a worker does not know of another node.
enum Untold {
    /// It does not read its messages.
    Missed,
    /// This daemon may open no descriptor more.
    Lack,
}

/// Tells a worker about another node: its node memory, bell, and addresses.
fn introduce(worker: &Worker, nic: u32, number: u16, member: &Member) -> Result<(), Untold> {
    let [control, pool] = member.node_memory.fds();
    // A bell of its own: workers that share an open file can make it block for all.
    let bell = tasuki_shm::wake::open_anew(member.bell.as_fd()).map_err(|_| Untold::Lack)?;
    let addresses = member.addresses.clone();
    let told = worker.write(&ToWorker::Neighbour { nic, number, addresses }, &[control, pool, bell.as_fd()]);
    why_missed(told).map_or(Ok(()), |_| Err(Untold::Missed))
}

impl Supervisor {
    /// Returns the card that stands for a node's end of a VNI, or `None` if the node is on none.
    pub(super) fn end_of(&self, node: &config::Node, number: u32) -> Result<Option<Card>> {
        let Some(vni) = &node.vni else { return Ok(None) };
        let device = Device::Vni(vni.clone());
        let nic = config::Nic {
            name: end_name(&node.name, vni),
            device,
            node: node.name.clone(),
            standby: None,
            ring: None,
            mtu: None,
            wire: Vec::new(),
        };
        Ok(Some(Card::new(number, nic).context("no memory for the lease page of a node's end of a VNI")?))
    }

    /// Returns a number on a VNI that no node has or is remembered to have had.
    fn number_on(&self, vni: &str) -> Result<u16> {
        let is_taken =
            |number: u16| self.cards.values().any(|card| card.vni() == Some(vni) && card.number_on_vni == Some(number));
        let next = self.vnis.get(vni).map_or(0, |net| net.next);
        let numbers = || (next..NODES_MAX).chain(0..next).filter(|number| !is_taken(*number));
        // A worker that died may not have heard that the former node of a number left, and its successor neither; and an
        // earlier daemon may have given numbers that it could not record.
        let is_clean = |number: &u16| {
            let ends =
                self.cards.values().filter(|card| card.vni() == Some(vni)).filter_map(|card| card.opened.as_ref());
            !ends.filter_map(memory_of).any(|[control, pool]| has_noted(control, pool, *number))
        };
        numbers().take(TRIED_MAX).find(is_clean).or_else(|| numbers().next()).with_context(|| {
            format!("VNI {vni} has {NODES_MAX} nodes, and no more fit; remove one, or name another VNI")
        })
    }

    /// Makes a node's memory, as opening does for a card.
    pub(super) fn make_end(&mut self, nic: u32) -> Result<()> {
        let card = self.cards.get(&nic).context("there is no such end")?;
        let vni = card.vni().context("it is a NIC")?.to_owned();
        let node = self.config.node(card.node()).context("there is no such node")?;
        let (pages, mac) = (node.pool_pages(), self.config.interface_node(node).mac());
        let name = card.name().to_owned();
        let number = self.number_on(&vni)?;
        let net = self.net(&vni)?;
        net.next = (number + 1) % NODES_MAX;
        let directory = net.directory_to_read()?;
        let node_memory = NodeMemoryFds::create(&name, pages)?;
        let (bell_receiver, bell) = tasuki_shm::wake::bell_pipe().context("the kernel gave no pipe for a bell")?;
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .context("the kernel gave no eventfd")?;
        let fds = vec![wake, node_memory.control, node_memory.pool, bell_receiver, bell, directory];
        let bundle = DeviceBundle {
            kind: vni::KIND,
            version: vni::VERSION,
            can: Can { in_place: true, spare_queue: false, repoint: false, pauses: false, fenced: false },
            text: text(&vni, number),
            layout: None,
            fds: fds.len(),
            memory: 0,
            partial: false,
            made_by: None,
            mac: Some(mac),
        };
        let card = self.cards.get_mut(&nic).context("there is no such end")?;
        card.number_on_vni = Some(number);
        (card.opened, card.opening, card.trouble) = (Some(Opened { bundle, fds, made_by: 0 }), Opening::Open, None);
        self.record_nic(nic);
        Ok(())
    }

    fn net(&mut self, vni: &str) -> Result<&mut Net> {
        if !self.vnis.contains_key(vni) {
            let net = Net::new().with_context(|| format!("no memory for the directory of VNI {vni}"))?;
            self.vnis.insert(vni.to_owned(), net);
        }
        Ok(self.vnis.get_mut(vni).expect("just made"))
    }

    /// Makes every open end a member of its VNI. Ends that an earlier daemon made join together, so that no node is
    /// missing meanwhile.
    pub(super) fn reconcile_vnis(&mut self) {
        if self.adopting {
            return;
        }
        // A queue that nobody drives yet gets no flows.
        let is_driven = |card: &Card| {
            let is_queue = self.config.node(card.node()).is_some_and(|node| node.queue_of().is_some());
            let had_a_driver = card.lease_page.words.load(lease_page::RELAYS) > 0;
            !is_queue || had_a_driver || self.workers.values().any(|worker| worker.nics.contains_key(&card.number))
        };
        let is_new = |card: &&Card| {
            card.opened.is_some() && !self.is_member(card) && !self.leaves(card.node()) && is_driven(card)
        };
        let new: Vec<u32> =
            self.cards.values().filter(|card| card.vni().is_some()).filter(is_new).map(|card| card.number).collect();
        let joined: BTreeSet<u32> = new.into_iter().filter(|nic| self.joins(*nic)).collect();
        let mut missed = BTreeSet::new();
        for nic in &joined {
            let (unreached, lacked) = self.tell_of(*nic, &joined);
            missed.extend(unreached);
            if !lacked.is_empty() {
                self.untold.extend(lacked);
                self.untold_not_before = now() + LACK_PAUSE;
            }
        }
        // A worker must find all nodes in the directory it is given: frames for several go to the nodes that it
        // names.
        let vnis: BTreeSet<&str> = joined.iter().filter_map(|nic| self.cards.get(nic)?.vni()).collect();
        self.vnis.iter_mut().filter(|(name, _)| vnis.contains(name.as_str())).for_each(|(_, net)| net.publish());
        for nic in joined {
            let have_it = self.workers.values().filter(|worker| worker.nics.contains_key(&nic));
            self.untold.extend(have_it.map(|worker| (worker.party(), nic)));
        }
        self.kill_those_without(missed);
        self.tell_untold();
    }

    /// Gives workers that had an end before it joined all other members, and the directory: some in each turn, since after a
    /// takeover these are the workers of all nodes, and requests and dead workers wait meanwhile. Until its turn comes, such a
    /// worker goes by the directory of the tasukid that gave it the end: nodes that are added meanwhile it does not know, and
    /// the flows of queues stay as they are.
    fn tell_untold(&mut self) {
        let mut count = 0;
        while count < INTRODUCED_MAX
            && self.untold_not_before <= now()
            && let Some((number, nic)) = self.untold.pop_front()
        {
            if self.workers.get(&number).is_some_and(|worker| worker.nics.contains_key(&nic)) {
                count += self.membership(nic).map_or(0, |(net, ..)| net.members.len());
                if self.tell_neighbours(nic, number) {
                    self.tell_directory(nic, number);
                }
            }
        }
    }

    /// Ends workers that missed a message: they would send into nothing for ever.
    fn kill_those_without(&mut self, missed: impl IntoIterator<Item = u32>) {
        for number in missed {
            self.kill_worker(number, "does not take messages about its VNI".to_owned());
        }
    }

    pub(super) fn is_member(&self, card: &Card) -> bool {
        let members = card.vni().and_then(|vni| self.vnis.get(vni)).map(|net| &net.members);
        members.zip(card.number_on_vni).is_some_and(|(members, number)| members.contains_key(&number))
    }

    fn joins(&mut self, nic: u32) -> bool {
        match self.join(nic) {
            Ok(()) => true,
            Err(error) => {
                let Some(card) = self.cards.get_mut(&nic) else { return false };
                let trouble = format!("{} is not on its VNI: {error:#}", card.name());
                if is_news(&mut card.trouble, &trouble) {
                    let name = card.name().to_owned();
                    self.note(About::nic(&name), trouble);
                }
                false
            }
        }
    }

    fn join(&mut self, nic: u32) -> Result<()> {
        let card = self.cards.get(&nic).context("there is no such end")?;
        let (vni, node) = (card.vni().context("it is a NIC")?.to_owned(), card.node().to_owned());
        let number = card.number_on_vni.context("it has no number")?;
        let interface_node = self.config.interface_node(self.config.node(&node).context("there is no such node")?);
        let (mac, is_uplink, addresses) =
            (interface_node.mac(), interface_node.has_others(), interface_node.addresses.clone());
        let interface_node = interface_node.name.clone();
        let opened = card.opened.as_ref().context("it has no node memory")?;
        let copy = |at: usize| {
            let fd = opened.fds.get(at).context("a descriptor of it is not there")?;
            fd.try_clone().context("a descriptor cannot be copied; raise LimitNOFILE= of tasukid")
        };
        let node_memory = NodeMemoryFds { control: copy(CONTROL)?, pool: copy(POOL)? }.to_read()?;
        // Map it as its neighbours will: memory that cannot be read does not join.
        let (counts, _) = PeerNodeMemory::map(&node_memory).context("its node memory cannot be read")?;
        let bell = copy(BELL)?;
        let is_shown = self.gets_flows(&node);
        let net = self.net(&vni)?;
        let directory = net.directory_to_read()?;
        // One more is open while each of the others is told of it, and those that miss it are ended.
        drop(
            tasuki_shm::wake::open_anew(bell.as_fd())
                .context("a descriptor cannot be copied; raise LimitNOFILE= of tasukid")?,
        );
        // From here on nothing fails but the address.
        let shares = net.members.values().any(|member| member.interface_node == interface_node);
        let added = match shares {
            _ if !is_shown => Ok(()),
            true => net.directory.share(mac, number),
            false => net.directory.add(mac, number),
        };
        added.map_err(|error| anyhow::anyhow!("{}: {error}", StationAddress(mac)))?;
        net.next = net.next.max((number + 1) % NODES_MAX);
        net.members.insert(
            number,
            Member { node, interface_node, nic, mac, is_shown, addresses, is_uplink, node_memory, counts, bell },
        );
        let card = self.cards.get_mut(&nic).context("there is no such end")?;
        // The trouble was the failure to join, which is over.
        card.trouble = None;
        if let Some(opened) = &mut card.opened {
            // The interface gets the address in the directory, in place of any earlier one.
            opened.bundle.mac = Some(mac);
            if let Some(place) = opened.fds.get_mut(vni::DIRECTORY) {
                *place = directory;
            }
        }
        self.mark_deposit(Key::Card(nic));
        Ok(())
    }

    /// Checks that no worker on a VNI is from before nodes could share an address.
    pub(super) fn all_know_sharing(&self, vni: &str) -> Result<()> {
        let is_on = |worker: &&Worker| {
            worker.nics.keys().any(|nic| self.cards.get(nic).is_some_and(|card| card.vni() == Some(vni)))
        };
        match self.workers.values().filter(is_on).find(|worker| !worker.knows_sharing()) {
            Some(worker) => anyhow::bail!(
                "worker {} of node {} is from before an interface could have several queues, and would drop the frames of another one; replace it (tasuki worker upgrade {})",
                worker.party(),
                worker.record.node,
                worker.record.node
            ),
            None => Ok(()),
        }
    }

    /// Returns whether a node's VNI has an interface with several queues that are driven.
    pub(super) fn has_shared(&self, node: &str) -> bool {
        let net = self.config.node(node).and_then(|node| self.vnis.get(node.vni.as_ref()?));
        net.is_some_and(|net| net.members.values().any(|member| member.interface_node != member.node))
    }

    /// Tells the workers of all other members about a new one, but for those that joined at the same time (`joined`).
    /// Returns the workers that missed a message, and those that are told later, with their ends.
    fn tell_of(&self, nic: u32, joined: &BTreeSet<u32>) -> (Vec<u32>, Vec<(u32, u32)>) {
        let (mut missed, mut lacked) = (Vec::new(), Vec::new());
        let Some((net, number, us)) = self.membership(nic) else { return (missed, lacked) };
        let others: Vec<u32> = net.members.values().map(|it| it.nic).filter(|other| !joined.contains(other)).collect();
        for worker in self.workers.values() {
            for other in others.iter().filter(|other| worker.nics.contains_key(other)) {
                match introduce(worker, *other, number, us) {
                    Ok(()) => {}
                    Err(Untold::Missed) => missed.push(worker.party()),
                    Err(Untold::Lack) => lacked.push((worker.party(), *other)),
                }
            }
        }
        (missed, lacked)
    }

    /// Gives a worker of a member the directory and the list of its nodes. A node whose end could not join yet is in the list:
    /// the worker may know it from an earlier tasukid, and go on talking to it. So is one that drains.
    fn tell_directory(&mut self, nic: u32, number: u32) {
        let Some(vni) = self.membership(nic).and_then(|_| self.cards.get(&nic)?.vni()) else { return };
        let opened = self.cards.get(&nic).and_then(|card| card.opened.as_ref());
        let directory = opened.and_then(|opened| opened.fds.get(vni::DIRECTORY));
        let Some((directory, worker)) = directory.zip(self.workers.get(&number)) else { return };
        let stays = |card: &&Card| card.vni() == Some(vni) && card.opened.is_some() && !self.ends(card.node());
        let nodes = self.cards.values().filter(stays).filter_map(|card| card.number_on_vni).collect();
        let told = worker.write(&ToWorker::Directory { nic, nodes }, &[directory.as_fd()]);
        crash::point("daemon.directory");
        if why_missed(told).is_some() {
            self.kill_those_without([number]);
        }
    }

    /// Returns an end's VNI, its number there, and its entry as a member.
    fn membership(&self, nic: u32) -> Option<(&Net, u16, &Member)> {
        let card = self.cards.get(&nic)?;
        let (net, number) = (self.vnis.get(card.vni()?)?, card.number_on_vni?);
        Some((net, number, net.members.get(&number)?))
    }

    /// Tells a worker that was given an end about all other members; later, if this daemon may open too few descriptors now.
    /// Returns whether it was told of all.
    pub(super) fn tell_neighbours(&mut self, nic: u32, number: u32) -> bool {
        let Some(card) = self.cards.get(&nic) else { return false };
        let Some(net) = card.vni().and_then(|vni| self.vnis.get(vni)) else { return false };
        let Some(worker) = self.workers.get(&number) else { return false };
        let mut others = net.members.iter().filter(|(_, member)| member.nic != nic);
        match others.try_for_each(|(other, member)| introduce(worker, nic, *other, member)) {
            Ok(()) => return true,
            Err(Untold::Missed) => self.kill_those_without([number]),
            Err(Untold::Lack) => {
                self.untold.push_back((number, nic));
                self.untold_not_before = now() + LACK_PAUSE;
            }
        }
        false
    }

    /// Removes a node's end: first no node sends there, then no node knows it.
    pub(super) fn leave(&mut self, nic: u32) {
        let Some(card) = self.cards.get(&nic) else { return };
        let Some((vni, number)) = card.vni().map(str::to_owned).zip(card.number_on_vni) else { return };
        let Some(net) = self.vnis.get_mut(&vni) else { return };
        // Workers may know one that could not join, from an earlier tasukid.
        let gone = net.members.remove(&number);
        if let Some(gone) = &gone {
            net.directory.remove(gone.mac, number);
            net.publish();
        }
        let mut missed = Vec::new();
        for worker in self.workers.values() {
            for member in net.members.values().filter(|member| worker.nics.contains_key(&member.nic)) {
                let told = worker.write(&ToWorker::NoNeighbour { nic: member.nic, number }, &[]);
                missed.extend(why_missed(told).map(|_| worker.party()));
            }
        }
        if net.members.is_empty() {
            self.vnis.remove(&vni);
        }
        gone.into_iter().for_each(|gone| self.keep_counts(&gone));
        self.kill_those_without(missed);
    }

    /// Keeps what the queues of another node's machine have carried by this node, which is gone: their counts never fall.
    fn keep_counts(&self, gone: &Member) {
        let words = self.nodes.get(&gone.interface_node).filter(|_| gone.interface_node != gone.node);
        let Some(words) = words.map(|node| &node.program_state) else { return };
        for (queue, counts) in (0..gone.counts.queues()).map(|queue| (queue, gone.counts.queue_counts(queue))) {
            let before = kept_counts(words, queue);
            for (at, count) in counts.into_iter().enumerate() {
                words.store(kept_at(queue) + at, before[at].wrapping_add(count));
            }
        }
    }

    /// Has the frames for an address that a node shares go to it, too, or to the others alone.
    pub(super) fn show_address(&mut self, nic: u32, is_shown: bool) {
        let at = self.membership(nic).map(|(_, number, member)| (number, member.mac));
        let net = self.cards.get(&nic).and_then(|card| self.vnis.get_mut(card.vni()?));
        let Some((net, (number, mac))) = net.zip(at) else { return };
        if is_shown {
            // As many can have a place there as an interface has queues.
            let _ = net.directory.share(mac, number);
        } else {
            net.directory.remove(mac, number);
        }
        net.members.entry(number).and_modify(|member| member.is_shown = is_shown);
        net.publish();
    }

    /// Returns the traffic from a node's end to all others, and from them to it. It comes from their node memories, which
    /// workers write, so it may be wrong.
    pub(super) fn traffic_of(&self, nic: u32) -> Option<[Traffic; 2]> {
        let (net, number, member) = self.membership(nic)?;
        let mut traffic = [Traffic::default(); 2];
        for (other, its) in net.members.iter().filter(|(other, _)| **other != number) {
            // The others' frames count, too.
            let [received, sent] = [1, 2].map(|word| member.counts.line_of(*other).load(0, word));
            let [received_there, sent_there] = [1, 2].map(|word| its.counts.line_of(number).load(0, word));
            for (way, sent, received) in [(0, sent, received_there), (1, sent_there, received)] {
                traffic[way].received = traffic[way].received.wrapping_add(received);
                traffic[way].waits |= sent != received;
            }
        }
        Some(traffic)
    }

    fn net_by_name(&self, name: &str) -> Result<&Net, Refusal> {
        self.vnis.get(name).ok_or_else(|| {
            let there = there_are(self.vnis.keys());
            Refusal::NotFound(format!(
                "there is no VNI {name:?}; {there}; a node that names one makes it: tasuki node add --vni {name}"
            ))
        })
    }

    /// Returns all VNIs.
    pub(super) fn vni_views(&self) -> Vec<VniView> {
        let view = |(name, net): (&String, &Net)| VniView {
            name: name.clone(),
            nodes: u32::try_from(net.members.len()).unwrap_or(u32::MAX),
            memory: net.members.values().map(|member| bytes_of(&member.node_memory)).sum(),
        };
        self.vnis.iter().map(view).collect()
    }

    /// Returns the nodes on a VNI, with their addresses.
    pub(super) fn vni_table(&self, name: &str) -> Result<Vec<VniNodeView>, Refusal> {
        let net = self.net_by_name(name)?;
        let view = |(number, member): (&u16, &Member)| VniNodeView {
            node: member.node.clone(),
            number: *number,
            mac: StationAddress(member.mac).to_string(),
            interface: self.config.node(&member.node).and_then(config::Node::label),
            worker: self.cards.get(&member.nic).and_then(|card| card.holder()),
            memory: bytes_of(&member.node_memory),
            chargeable: self.chargeable(&member.node),
            shortcut: self
                .crossed(&member.node)
                .map(|crossed| CrossedView { sent: crossed.sent, received: crossed.received }),
        };
        Ok(net.members.iter().map(view).collect())
    }

    /// Returns for how many bytes of its neighbours' memory a node's workers may be charged, at most: pages they
    /// read before they were written, or after they were punched out. The bound on a node's memory is set higher by
    /// this much, before a neighbour is introduced.
    pub(super) fn chargeable(&self, node: &str) -> u64 {
        let Some(vni) = self.config.node(node).and_then(|node| node.vni.as_ref()) else { return 0 };
        let others = self.config.node.iter().filter(|other| other.name != node && other.vni.as_ref() == Some(vni));
        others.map(|other| readable_len(other.pool_pages())).sum()
    }

    /// Returns the counts that each node of a VNI keeps of each other node, from their node memories.
    pub(super) fn vni_stats(&self, name: &str) -> Result<Vec<TalkView>, Refusal> {
        let net = self.net_by_name(name)?;
        let mut talks = Vec::new();
        for (number, member) in &net.members {
            for (other, its) in net.members.iter().filter(|(other, _)| *other != number) {
                let line = member.counts.line_of(*other);
                // Word 0 is the read position of its ring.
                let [received, sent, ring_full, over_quota, pool_full, taken_back, forged] =
                    [1, 2, 3, 4, 5, 6, 7].map(|word| line.load(0, word));
                let talk = TalkView {
                    node: member.node.clone(),
                    other: its.node.clone(),
                    sent,
                    received,
                    ring_full,
                    over_quota,
                    pool_full,
                    taken_back,
                    forged,
                };
                if [received, sent, ring_full, over_quota, pool_full, taken_back, forged] != [0; 7] {
                    talks.push(talk);
                }
            }
        }
        Ok(talks)
    }

    /// Returns the memory of a node that is on a VNI.
    fn node_memory_of(&self, node: &str) -> Option<&PeerNodeMemory> {
        let member = self.vnis.values().flat_map(|net| net.members.values()).find(|member| member.node == node)?;
        Some(&member.counts)
    }

    /// Returns how many pairs of queues a node's virtual machine runs now, from its node memory, if it is connected.
    pub(super) fn running_pairs(&self, node: &str) -> Option<usize> {
        let Work::Vm(vm) = &self.config.node(node)?.work else { return None };
        self.endpoints.get(&vm.label()).filter(|end| end.has_client())?;
        self.node_memory_of(node)?.running_pairs()
    }

    /// Returns what each queue of a node's virtual machine has carried, from its node memory.
    pub(super) fn queues_of(&self, node: &str) -> Vec<QueueView> {
        let borrowers = self.config.borrowers_of(node).map(|node| &node.name[..]);
        let memories: Vec<_> =
            std::iter::once(node).chain(borrowers).filter_map(|it| self.node_memory_of(it)).collect();
        let queues = memories.iter().map(|memory| memory.queues()).max().unwrap_or_default();
        let words = self.nodes.get(node).map(|node| &node.program_state);
        // Several nodes may have served a queue, each for a while.
        let counts = |queue| {
            let its = memories.iter().filter(|memory| queue < memory.queues()).map(|memory| memory.queue_counts(queue));
            let kept = words.map(|words| kept_counts(words, queue));
            its.chain(kept).fold([0; QUEUE_COUNTS.len()], |sum: [u64; _], its| {
                std::array::from_fn(|at| sum[at].wrapping_add(its[at]))
            })
        };
        (0..queues).map(|queue| queue_view(queue, counts(queue))).collect()
    }
}

/// Returns the place in the program state of a machine's node where the counts of a queue by nodes that are gone begin.
fn kept_at(queue: usize) -> usize {
    program_state::QUEUE_COUNTS_AT + LINE_WORDS * queue
}

const _: () = assert!(
    program_state::LOANS_AT + LINE_WORDS * loans::LINES <= program_state::QUEUE_COUNTS_AT
        && 8 * (program_state::QUEUE_COUNTS_AT + LINE_WORDS * JOURNAL_PAGES) <= program_state::LEN
);

/// Returns what a queue of a machine has carried by nodes that are gone.
fn kept_counts(words: &Words, queue: usize) -> [u64; QUEUE_COUNTS.len()] {
    std::array::from_fn(|at| words.load(kept_at(queue) + at))
}

/// Returns the counts of a queue by their names.
fn queue_view(queue: usize, counts: [u64; QUEUE_COUNTS.len()]) -> QueueView {
    let [packets, bytes, kicks, interrupts, suppressed, drops_no_room, drops_length, drops_other] = counts;
    QueueView {
        queue: format!("{}{}", if queue.is_multiple_of(2) { "rx" } else { "tx" }, queue / 2),
        packets,
        bytes,
        kicks,
        interrupts,
        suppressed,
        drops_no_room,
        drops_length,
        drops_other,
    }
}

/// Traffic between a node's end and others, one way.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Traffic {
    /// Number of frames.
    pub received: u64,
    /// Whether more were sent than were received.
    pub waits: bool,
}

impl Card {
    /// Returns the VNI, if this is a node's end of one.
    pub fn vni(&self) -> Option<&str> {
        match &self.config.device {
            Device::Vni(name) => Some(name),
            _ => None,
        }
    }
}

fn text(vni: &str, number: u16) -> String {
    serde_json::to_string(&vni::Text { vni: vni.to_owned(), number }).expect("plain data")
}

/// Returns the number on its VNI that an end was made with, by which its workers go.
pub(super) fn number_of(end: &Opened) -> Option<u16> {
    serde_json::from_str(&end.bundle.text).ok().map(|vni::Text { number, .. }| number)
}

/// Returns the bytes of memory that a node memory occupies.
fn bytes_of(node_memory: &NodeMemoryFds) -> u64 {
    let blocks = |fd| rustix::fs::fstat(fd).map_or(0, |stat| stat.st_blocks.unsigned_abs());
    node_memory.fds().into_iter().map(blocks).sum::<u64>() * 512
}
