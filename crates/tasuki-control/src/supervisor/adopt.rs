//! Adopts workers of an earlier daemon: they drive on, and do not notice.
//!
//! The registry lists these workers. Pid and start time show whether they still run, and the kernel names the
//! process that listens at each socket. The keeper has their descriptors and the NICs they were given: they only
//! identify themselves, and report their state. A worker that does not is ended, as it may drive and would hear no
//! order.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd};
use tasuki_relay::Party;
use tasuki_relay::arbiter::{Arbiter, Node as Numbered};
use tasuki_relay::message::{ToWorker, heartbeat, lease_page, program_state};
use tasuki_shm::crash;
use tasuki_shm::peer::Credentials;

use super::card::{Card, LeasePage};
use super::deeds::party;
use super::deposits::{Found, Key, TOO_FEW_DESCRIPTORS, not_found_out};
use super::lines::Lines;
use super::open::ASTRAY;
use super::worker::{Stage, Words, Worker};
use super::{About, Node, Supervisor, Token, WORKER_TIMEOUT, epoll_add, nanoseconds, now};
use crate::cgroup::Group;
use crate::channel;
use crate::config::{self, Device};
use crate::foreign::Foreign;
use crate::process::Process;
use crate::registry::{Change, Known, NodeRecord, WorkerRecord};

/// Time in which a worker ends that is told to. The daemon does nothing else meanwhile.
const END_TIMEOUT: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// Time for which a daemon that begins waits for the end of workers that it has killed. The kernel may not let one end: it
/// waits for a device, or a file system.
const DEATHS_TIMEOUT: Duration = Duration::from_secs(2);

/// Longest time for which a daemon that begins waits for workers of nodes that a NIC has nothing to do with. On a machine that
/// is not too busy all answer within a few ms, and the daemon goes on with all at once.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// Descriptors that a node's end takes when it joins its VNI, and those of the API.
const DESCRIPTORS_OF_END: usize = 3;
const DESCRIPTORS_OF_API: usize = 16;

/// First number of a node's end of a VNI. The numbers below are for NICs: the program state of a node has a place for each of
/// the first ones.
pub(super) const FIRST_END: u32 = 1 << 16;

/// Tells the worker at the other end of this socket to end, and returns whether it has.
fn ends_when_told(socket: &OwnedFd) -> bool {
    let end = serde_json::to_vec(&ToWorker::End).expect("plain data");
    let mut its_end = [PollFd::new(socket, PollFlags::empty())];
    channel::send(socket.as_fd(), &end, &[]).is_ok() && rustix::event::poll(&mut its_end, Some(&END_TIMEOUT)) == Ok(1)
}

/// Kills the worker at the other end of this socket, which listens at `path`. Returns its number once it is dead.
fn is_killed(socket: &OwnedFd, path: &Path) -> Option<u32> {
    // The kernel names the process that listens there; or, if that is gone, another one that has its number by now and
    // not its socket.
    let peer = Credentials::of(socket).ok()?;
    let process = Process::by_pid(peer.pid).ok()??;
    let is_it = process.name().pid != std::process::id() && process.has_socket_at(path);
    is_it.then(|| process.kill());
    (is_it && process.ends_within(&END_TIMEOUT)).then_some(process.name().pid)
}

/// Returns whether an earlier daemon's worker has yet to answer, or was killed a moment ago and is not dead yet. One that does
/// not end is waited for no longer than `DEATHS_TIMEOUT`: then the arbiters of its NICs go on waiting, and nothing else does.
fn is_silent(worker: &Worker) -> bool {
    match worker.stage {
        Stage::Asked(_) => true,
        Stage::Excluded(since) => worker.is_adopted && now().saturating_sub(since) < DEATHS_TIMEOUT,
        _ => false,
    }
}

impl Worker {
    /// Returns whether it may have a NIC, by all that is known without its answer: its node can write the lease page, or the keeper
    /// knows that it was given the NIC.
    fn may_have(&self, card: &Card) -> bool {
        let node = &self.record.node;
        let is_of_node = card.node() == node || card.page_of.contains(node);
        is_of_node || self.given.contains(&card.number) || card.holder() == Some(self.party())
    }
}

impl Supervisor {
    /// Makes nodes and cards as the configuration has them, and asks the workers that still run.
    pub(super) fn adopt(&mut self, known: Known, mut found: Found) -> Result<()> {
        let Known { workers, nics, nodes, added, left_out, fenced, events, .. } = known;
        // Behind them are those of this daemon, of its keeper.
        self.events.splice(0..0, events);
        let mut alive: Vec<(WorkerRecord, Process)> = Vec::new();
        for record in &workers {
            let process = Process::find(record.process).map_err(not_found_out)?;
            alive.extend(process.map(|process| (record.clone(), process)));
        }
        if !alive.is_empty() || !found.is_empty() {
            self.go_by_what_was_made(&nodes);
        }
        self.add_nodes_of_before(added);
        for (name, places) in left_out {
            if self.by_hand.contains(&name) {
                let places = places.join(", ");
                self.leave_out(&name, &format!("it goes on without {places}, which this version of tasukid refuses"));
            }
        }
        // Workers go on where they are, and one node's CPU is no reason to leave the others alone.
        for (name, cpu) in self.config.leave_stray_cpus(|cpu| self.usable_cpus.contains(&cpu)) {
            let what = "and tasukid may not run anything there: its workers run where there is room";
            self.leave_out(&name, &format!("cpu = {cpu}, {what}"));
        }
        let living: Vec<String> = alive.iter().map(|(record, _)| record.node.clone()).collect();
        self.remove_taps_of_others(&living, &mut found);
        self.begin_queues(&living, &mut found);
        self.begin_taps(&living, &mut found)?;
        self.begin_endpoints(&living, &mut found);
        let (is_used, goes_on) = (!alive.is_empty(), !alive.is_empty() || !found.is_empty());
        for node in self.config.node.clone() {
            let record = nodes.iter().find(|(name, _)| *name == node.name).map(|(_, record)| record.clone());
            let leaves = record.as_ref().is_some_and(|record| record.leaves);
            let record = NodeRecord { leaves, ..record.filter(|_| goes_on).unwrap_or_default() };
            let record =
                if record.made.is_some() { record } else { NodeRecord { made: NodeRecord::of(&node).made, ..record } };
            self.changes.push(Change::Node(node.name.clone(), record.clone()));
            let mut made = Node::new(record)?;
            let program_state =
                found.remove(&Key::ProgramState(node.name.clone())).and_then(|(_, fds)| fds.into_iter().next());
            made.program_state = program_state
                .and_then(|program_state| Words::adopt(program_state, program_state::LEN).ok())
                .unwrap_or(made.program_state);
            self.nodes.insert(node.name, made);
        }
        // A node of one of these names that comes later is another.
        let gone = nodes.into_iter().filter(|(name, _)| !self.nodes.contains_key(name));
        self.changes.extend(gone.map(|(name, _)| Change::Removed(name)));
        let mut numbers: BTreeSet<u32> = nics.iter().map(|record| record.number).collect();
        for config in self.config.nic.clone() {
            let record = nics.iter().find(|record| record.name == config.name);
            let number = record
                .map(|record| record.number)
                .or_else(|| self.next_number(0, &numbers))
                .context("too many NICs")?;
            numbers.insert(number);
            let mut card = Card::new(number, config).context("no memory for a NIC's lease page")?;
            card.restore(&mut found, is_used);
            // The configuration may have other settings by now. The NIC is as it was opened.
            self.config
                .nic
                .iter_mut()
                .filter(|nic| nic.name == card.name())
                .for_each(|nic| nic.clone_from(&card.config));
            if let Some(record) = record {
                let is_driven = is_used || card.opened.is_some();
                self.remember(&mut card, record, is_driven)?;
            }
            self.cards.insert(number, card);
            if let Some(record) = record.filter(|_| goes_on) {
                self.restore_standby(number, record.by_hand.clone(), record.fail_over.clone());
            }
        }
        let wanted: BTreeSet<String> = self.config.nic.iter().map(|nic| nic.name.clone()).collect();
        for record in nics.iter().filter(|record| !wanted.contains(&record.name)) {
            self.adopt_to_close(record, &mut found, is_used)?;
        }
        for node in self.config.node.clone().iter().filter(|node| node.vni.is_some()) {
            let name = node.vni.as_deref().map(|vni| super::vnis::end_name(&node.name, vni));
            let record = nics.iter().find(|record| Some(&record.name) == name.as_ref());
            let unused = self.next_number(FIRST_END, &numbers);
            let number = record.map(|record| record.number).or(unused).context("too many NICs")?;
            numbers.insert(number);
            let Some(mut card) = self.end_of(node, number)? else { continue };
            if let Some(record) = record.filter(|record| record.number_on_vni.is_some()) {
                card.restore(&mut found, is_used);
                let is_there = card.opened.is_some();
                self.remember(&mut card, record, is_there)?;
                // That of the record may be of an end before: the keeper gets a new one before the registry does.
                card.number_on_vni = card.opened.as_ref().and_then(super::vnis::number_of);
            }
            self.cards.insert(number, card);
        }
        let living: Vec<u32> = alive.iter().map(|(record, _)| record.party).collect();
        for record in workers.iter().filter(|record| !living.contains(&record.party)) {
            self.changes.push(Change::NoWorker(record.party));
        }
        let mut dead = self.place.workers_but(&living);
        dead.iter().for_each(|number| self.end_unknown(*number));
        dead.extend(workers.iter().map(|record| record.party).filter(|party| !living.contains(party)));
        self.end_what_they_started(&dead, &workers);
        self.place.forget_workers_but(&living);
        for (record, process) in alive {
            let is_fenced = fenced.contains(&record.party);
            let its = found.remove(&Key::Worker(record.party));
            self.adopt_worker(record, process, is_fenced, its)?;
        }
        self.begin_removals_of_before();
        // A stranger's: to close one may take long.
        let clients = found.into_iter().filter(|(key, _)| matches!(key, Key::Client(_)));
        clients.for_each(|(_, (_, fds))| drop(Foreign::new(fds)));
        (self.adopting, self.awaiting) = (true, true);
        self.unheard = self.cards.keys().copied().collect();
        // Later it would be too late to leave all to another daemon: a worker that is not told of a node cuts it off.
        let count = self.cards.values().filter(|card| card.vni().is_some() && card.opened.is_some()).count();
        let spare = (0..DESCRIPTORS_OF_END * count + DESCRIPTORS_OF_API).map(|_| eventfd(0, EventfdFlags::CLOEXEC));
        spare.collect::<Result<Vec<_>, _>>().map(drop).context(TOO_FEW_DESCRIPTORS)
    }

    /// Ends a worker that the registry does not know: it began when that could not be written. It may drive, and so may
    /// one that is started for its node.
    fn end_unknown(&mut self, number: u32) {
        let path = self.place.worker_socket(number);
        let found = "is not in the registry, which could not be written when it began";
        let sentence = match channel::connect(&path) {
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => return,
            Ok(socket) if ends_when_told(&socket) => format!("worker {number} {found}: it was ended"),
            Ok(socket) if let Some(pid) = is_killed(&socket, &path) => {
                format!("worker {number} {found}, and hung: process {pid} was killed")
            }
            _ => format!(
                "worker {number} {found}, and is not to be ended: end the process that has {} (ss -xlp) by hand",
                path.display()
            ),
        };
        self.note(About::default(), sentence);
    }

    /// Ends the processes of workers that died while no daemon was there: one may still reach a card, and no arbiter knows of
    /// it. A process that waited to become a worker, of which there is no record, just ends.
    fn end_what_they_started(&mut self, dead: &BTreeSet<u32>, known: &[WorkerRecord]) {
        let groups = self.groups.iter().flat_map(|groups| {
            dead.iter().filter_map(|number| Some((*number, groups.child_of_before(&format!("worker-{number}"))?)))
        });
        let has_some = |group: &Group| group.processes().is_ok_and(|left| !left.is_empty());
        let left: Vec<(u32, Group)> = groups.filter(|(_, group)| has_some(group)).collect();
        let killed = left.iter().map(|(_, group)| group.kill().is_ok()).collect::<Vec<_>>();
        let until = now() + DEATHS_TIMEOUT;
        for ((number, group), is_killed) in left.into_iter().zip(killed) {
            while has_some(&group) && now() < until {
                std::thread::sleep(Duration::from_millis(1));
            }
            group.remove();
            let found = format!("worker {number} died while no tasukid ran, and had started other processes");
            let sentence = match has_some(&group) {
                false if !known.iter().any(|record| record.party == number) => continue,
                false => format!("{found}: they were ended"),
                true if is_killed => format!("{found}: they were killed, and end once the kernel lets them"),
                true => format!("{found}, which are not to be ended: end those of its control group by hand"),
            };
            self.note(About::default(), sentence);
        }
    }

    /// Adopts a NIC that the configuration does not have any more, to close it.
    fn adopt_to_close(&mut self, record: &crate::registry::NicRecord, found: &mut Found, is_used: bool) -> Result<()> {
        let Ok(device) = Device::try_from(record.device.clone()) else {
            // A node's end of a VNI: nothing of one that is gone is left but its record.
            let is_there = |node: &config::Node| {
                node.vni.as_ref().is_some_and(|vni| super::vnis::end_name(&node.name, vni) == record.name)
            };
            let is_gone = !self.config.node.iter().any(is_there);
            self.changes.extend(is_gone.then_some(Change::NoNic(record.number)));
            return Ok(());
        };
        let (name, node) = (record.name.clone(), record.node.clone());
        let config = config::Nic { name, device, node, standby: None, ring: None, mtu: None, wire: Vec::new() };
        let mut card = Card::new(record.number, config).context("no memory for a NIC's lease page")?;
        card.restore(found, is_used);
        let is_there = is_used || card.opened.is_some();
        self.remember(&mut card, record, is_there)?;
        if card.opened.is_none() && card.model.is_none() {
            self.forget_nic(record.number);
            return Ok(());
        }
        let sentence = format!("{} is closed: the configuration does not have it any more", card.name());
        self.note(About::nic(&record.name), sentence);
        card.closing = Some(now());
        self.cards.insert(record.number, card);
        Ok(())
    }

    /// Returns a number for messages that no NIC has, from `first` on, and that never makes a packet look like a message.
    pub(super) fn next_number(&self, first: u32, taken: &BTreeSet<u32>) -> Option<u32> {
        let is_free = |number: &u32| !taken.contains(number) && !self.cards.contains_key(number);
        (first..).find(|number| is_free(number) && number & 0xFF != u32::from(b'{'))
    }

    /// Restores the registry's record of a NIC, as far as it is still true.
    fn remember(&self, card: &mut Card, record: &crate::registry::NicRecord, is_driven: bool) -> Result<()> {
        card.model = record.model.map_or(Ok(None), Process::find).map_err(not_found_out)?;
        card.uid = record.uid;
        if let Some(model) = &card.model {
            epoll_add(&self.epoll, model.pidfd(), Token::ModelEnd(card.number))?;
        }
        if is_driven {
            if card.opened.is_none() && !record.page_of.is_empty() {
                card.page_of = record.page_of.iter().cloned().collect();
            }
            // The node it was given to counts more than the one where it began, as long as that node is still there.
            if self.config.node(&record.node).is_some() {
                card.set_node(&record.node);
            }
        }
        Ok(())
    }

    /// Adopts a worker. `its` is the keeper's entry for it.
    fn adopt_worker(
        &mut self,
        record: WorkerRecord,
        process: Process,
        is_fenced: bool,
        its: Option<(String, Vec<OwnedFd>)>,
    ) -> Result<()> {
        let number = record.party;
        let socket = channel::connect(&record.socket);
        let is_ours = record.uid.is_none_or(|uid| process.uid() == Some(uid));
        let is_known = self.config.node(&record.node).is_some();
        epoll_add(&self.epoll, process.pidfd(), Token::WorkerEnd(number))?;
        let (ours, theirs) = channel::pair().context(TOO_FEW_DESCRIPTORS)?;
        let reached = socket.is_ok();
        // The kernel names the process that listens there.
        let peer = socket.as_ref().ok().and_then(|socket| Credentials::of(socket).ok());
        let is_itself = !reached || peer.is_some_and(|peer| peer.pid == process.name().pid);
        let its = its.and_then(|(given, fds)| {
            let mut fds = fds.into_iter();
            let heartbeat = Words::adopt(fds.next()?, heartbeat::LEN).ok()?;
            // A keeper of a tasukid before this version has no pipe of it.
            Some((heartbeat, (serde_json::from_str(&given).ok()?, fds.next().map(|pipe| Lines::over(pipe.into())))))
        });
        let (heartbeat, rest) = its.unzip();
        let (given, lines) = rest.unzip();
        let (is_kept, given) = (heartbeat.is_some(), given.unwrap_or_default());
        // A worker that the keeper does not know is not heard: a successor that took over its client without its program state
        // would go on in the client's rings where that client once began.
        let socket = socket.ok().filter(|_| is_kept).unwrap_or(ours);
        epoll_add(&self.epoll, socket.as_fd(), Token::WorkerReadable(number))?;
        let asked = now();
        heartbeat.iter().for_each(|heartbeat| self.exit_watch.watch(number, heartbeat));
        let lines = lines.flatten().or_else(|| Lines::find(&record.socket).ok());
        if let Some(lines) = &lines {
            self.epoll_add_lines(number, lines)?;
        }
        let wanted = record.staged.is_some();
        let worker = Worker::new(record, process, socket, Stage::Asked(asked), asked);
        let worker = Worker { heartbeat, given, has_begun: true, lines, is_adopted: true, wanted, ..worker };
        let sent = worker.write(&ToWorker::Again, &[]);
        crash::point("daemon.again");
        drop(theirs);
        let node = worker.record.node.clone();
        self.workers.insert(number, worker);
        self.regroup(number);
        let group = self.workers.get(&number).and_then(|worker| worker.group.as_ref());
        let is_frozen = group.is_some_and(|group| group.is_frozen().is_ok_and(|is_frozen| is_frozen));
        match () {
            () if is_fenced || is_frozen => {
                self.kill_worker(number, "was fenced by the tasukid before this one".to_owned());
            }
            () if !is_ours => self.kill_worker(number, "runs as another user than it did".to_owned()),
            () if !reached || is_kept && sent.is_err() => {
                self.kill_worker(number, "is not to be reached by this tasukid".to_owned())
            }
            () if !is_itself => self.kill_worker(number, "is not the process that answers for it".to_owned()),
            () if !is_kept => self.kill_worker(number, "is unknown to the keeper".to_owned()),
            () if !is_known => {
                self.kill_worker(number, format!("is of node {node}, which is not in the configuration any more"))
            }
            () => {}
        }
        Ok(())
    }

    /// Ends workers that have a NIC, still without an arbiter, whose lease page is not theirs: they were getting ready for a
    /// handover that is over. A worker that the NIC's node does not trust may deny that it has the NIC, or say nothing: what
    /// it was given counts. Returns whether there were any.
    fn end_those_off_the_page(&mut self) -> bool {
        let mut over = Vec::new();
        for worker in self.workers.values().filter(|worker| !worker.is_excluded()) {
            let node = &worker.record.node;
            let was_given = |card: &Card| card.vni().is_none() && worker.given.contains(&card.number);
            let is_stranger = |card: &Card| !self.config.trust(node, card.node());
            let off = |card: &&Card| {
                let has = worker.nics.contains_key(&card.number) || was_given(card) && is_stranger(card);
                has && !card.page_of.contains(node)
            };
            let cards = self.unheard.iter().filter_map(|nic| self.cards.get(nic));
            over.extend({ cards }.find(off).map(|card| (worker.party(), card.name().to_owned())));
        }
        for (number, name) in &over {
            self.kill_worker(*number, format!("was to have {name} when the tasukid before this one ended"));
        }
        !over.is_empty()
    }

    /// Returns the workers that have a NIC, and their nodes.
    fn members_of(&mut self, nic: u32) -> Vec<(Party, Numbered)> {
        // One that was killed before it answered has those that it was ever given.
        let has =
            |worker: &&Worker| worker.nics.contains_key(&nic) || worker.is_excluded() && worker.given.contains(&nic);
        let have = self.workers.values().filter(has);
        let have: Vec<(u32, String)> = have.map(|worker| (worker.party(), worker.record.node.clone())).collect();
        have.into_iter().filter_map(|(number, node)| Some((party(number)?, self.node_number(&node)))).collect()
    }

    /// Tells the arbiter of a NIC, which has just begun, of the living workers that had the NIC and left it, and which nodes
    /// trust theirs: it fences none of them for such a node.
    pub(super) fn remember_those_that_left(&mut self, nic: u32) {
        if self.cards.get(&nic).is_none_or(|card| card.vni().is_some()) {
            return;
        }
        let had = |worker: &&Worker| worker.given.contains(&nic) && !worker.nics.contains_key(&nic);
        let had = self.workers.values().filter(had);
        let had: Vec<(u32, String)> = had.map(|worker| (worker.party(), worker.record.node.clone())).collect();
        for (number, node) in had {
            let names = self.config.node.iter().map(|other| &other.name);
            let trusted: Vec<String> = names.filter(|other| self.config.trust(&node, other)).cloned().collect();
            let friends: Vec<Numbered> = trusted.iter().map(|other| self.node_number(other)).collect();
            let left = self.node_number(&node);
            let arbiter = self.cards.get_mut(&nic).and_then(|card| card.arbiter.as_mut());
            if let Some((arbiter, party)) = arbiter.zip(party(number)) {
                arbiter.befriend(left, &friends);
                arbiter.remember([(party, left)]);
            }
        }
    }

    /// Handles a NIC that no living worker has: its node must have its lease page, too. The earlier daemon may have
    /// died between the two steps of giving the NIC to an untrusted node. That node keeps the NIC if it drove it, in
    /// memory of its own; otherwise the NIC stays where it was. A worker of that node that won the lease may have left
    /// the card in any state before it ended: then the NIC is opened anew.
    fn own_page(&mut self, nic: u32, has_driven: bool) {
        let Some(card) = self.cards.get_mut(&nic).filter(|card| card.is_astray()) else { return };
        let next = card.page_of.first().filter(|_| has_driven).filter(|node| self.config.node(node).is_some());
        if let Some(next) = next {
            let next = next.clone();
            self.cards.move_by(nic, |card| card.set_node(&next));
        } else if let Ok(lease_page) = LeasePage::create() {
            // If the page's nodes are gone, the NIC was theirs, and its node is another since tasukid began.
            let is_theirs = card.page_of.iter().all(|node| self.config.node(node).is_none());
            let is_usable = card.opened.is_some() && !card.has_lost_its_model();
            if is_usable && !is_theirs && card.lease_page.holder().is_some() {
                return self.open_anew(nic, lease_page, ASTRAY);
            }
            card.coming_lease_page = Some((card.node().to_owned(), lease_page));
            let node = card.node().to_owned();
            card.replace_lease_page(&node, card.lease_page.tenure());
        }
        self.record_nic(nic);
    }

    /// Returns whether a worker of this node, or one that may have a NIC of this node, has yet to answer.
    pub(super) fn has_unheard(&self, node: &str) -> bool {
        let is_unheard = |card: &Card| self.unheard.contains(&card.number);
        self.awaiting && (self.workers.of(node).any(is_silent) || self.cards.of(node).any(is_unheard))
    }

    /// Returns whether a worker of a node on this VNI has yet to answer.
    pub(super) fn has_unheard_on(&self, vni: &str) -> bool {
        let mut silent = self.workers.values().filter(|worker| is_silent(worker));
        self.awaiting && silent.any(|worker| self.config.is_on(&worker.record.node, vni))
    }

    /// Returns why a NIC has no arbiter yet, as a sentence for users, if it waits for a worker's answer.
    pub(super) fn waits_for(&self, card: &Card) -> Option<String> {
        self.unheard.get(&card.number)?;
        let worker = self.workers.values().find(|worker| is_silent(worker) && worker.may_have(card))?;
        let (number, node) = (worker.party(), &worker.record.node);
        let (name, seconds) = (card.name(), WORKER_TIMEOUT.as_secs());
        Some(format!(
            "worker {number} of node {node} may have {name}, and has yet to answer this tasukid, which ends it if it does not within {seconds} s"
        ))
    }

    /// Starts the arbiters. For a moment all of them wait for all workers. After that only those NICs wait that a silent worker
    /// may have: one that hangs, or says nothing on purpose, keeps no other node waiting.
    pub(super) fn go_on_adopting(&mut self) {
        if !self.awaiting {
            return;
        }
        self.end_the_slow();
        let timeout = self.config.daemon.hang_after().min(ANSWER_TIMEOUT);
        // From here on: the daemon reads what they have said by now before it looks again.
        let until = *self.awaits_all_until.get_or_insert(now() + timeout);
        let waits_for_all = self.adopting && now() < until;
        if waits_for_all && self.workers.values().any(is_silent) {
            return;
        }
        if self.end_those_off_the_page() && waits_for_all {
            return;
        }
        let is_first = std::mem::take(&mut self.adopting);
        self.awaiting = self.workers.values().any(is_silent);
        if !self.awaiting {
            self.lose_loans_of_none();
        }
        if is_first {
            self.nodes.values_mut().for_each(|node| node.group = None);
        }
        if is_first || !self.awaiting {
            // Once all have answered, the keeper's entries that no worker has claimed go, too.
            self.mark_all_deposits();
        }
        if is_first {
            crash::point("daemon.adopting");
        }
        let silent: Vec<&Worker> = self.workers.values().filter(|worker| is_silent(worker)).collect();
        let is_theirs = |card: &Card| silent.iter().any(|worker| worker.may_have(card));
        let (unheard, heard): (BTreeSet<u32>, BTreeSet<u32>) =
            self.unheard.iter().partition(|nic| self.cards.get(nic).is_some_and(is_theirs));
        self.unheard = unheard;
        let count = silent.len();
        let has_changed = std::mem::replace(&mut self.silent, count) != count;
        heard.into_iter().for_each(|nic| self.begin_arbiter_of_before(nic));
        if !self.awaiting
            && let Err(error) = self.shortcuts.sweep()
        {
            self.note(About::default(), format!("interfaces of former nodes may remain in their namespaces: {error}"));
        }
        self.end_removals_of_before();
        if !self.awaiting {
            crash::point("daemon.adopted");
        }
        if is_first || has_changed {
            // Requests that waited are answered once the nodes are on their VNIs, too.
            self.door.ring();
        }
    }

    /// Starts the arbiter of a NIC once all workers that may have it have answered, or are dead or killed.
    fn begin_arbiter_of_before(&mut self, nic: u32) {
        if !self.cards.contains_key(&nic) {
            return;
        }
        let members = self.members_of(nic);
        let page: Vec<String> = self.cards[&nic].page_of.iter().cloned().collect();
        let page: Vec<Numbered> = page.iter().map(|node| self.node_number(node)).collect();
        let home = self.cards[&nic].node().to_owned();
        let home = self.node_number(&home);
        // If the lease page belongs to the node that the NIC was going to, that node is its home.
        let home = if page.contains(&home) { home } else { page.first().copied().unwrap_or(home) };
        let is_dead = |card: &Card| card.holder().is_some_and(|holder| !self.workers.contains_key(&holder));
        // One that died later has its own stamp.
        let found_dead = Some(nanoseconds(self.since)).filter(|_| is_dead(&self.cards[&nic]));
        // A worker that only won the lease has not pointed the card at its memory.
        let settle = |card: &mut Card| card.lease_page.pause_ns().is_some() && card.settle_memory();
        let has_driven = self.cards.get_mut(&nic).is_some_and(settle);
        // The stamps on the page say whether the dead driver drove, until another one does.
        self.cards.get_mut(&nic).into_iter().for_each(|card| {
            card.found_dead = found_dead;
            card.pause_told = card.lease_page.words.load(lease_page::DRIVING_AT);
        });
        if members.is_empty() {
            return self.own_page(nic, has_driven);
        }
        let Some(card) = self.cards.get_mut(&nic) else { return };
        let is_excluded = |number: u32| self.workers.get(&number).is_some_and(Worker::is_excluded);
        let killed = members.iter().map(|(party, _)| *party).filter(|party| is_excluded(party.0.get()));
        let (mut arbiter, doing) = Arbiter::begin(home, &page, &members, &killed.collect::<Vec<_>>());
        let staged = self.workers.values().filter(|worker| worker.record.staged.is_some());
        staged.filter_map(|worker| party(worker.party())).for_each(|staged| arbiter.stage(staged));
        card.arbiter = Some(arbiter);
        let name = card.name().to_owned();
        self.remember_those_that_left(nic);
        let inputs = self.do_all(nic, doing);
        inputs.into_iter().for_each(|input| self.tell_arbiter(nic, input));
        // The stand-bys have not heard of a client that came while no daemon was there.
        self.tell_all_of_client(nic);
        let holder = self.cards[&nic].holder();
        if let Some(drives) = holder.filter(|holder| self.is_staged_now(*holder)) {
            self.was_upgraded_to(drives);
        }
        let drives = |worker: &&Worker| !worker.is_excluded();
        if let Some(holder) = holder.and_then(|holder| self.workers.get(&holder)).filter(drives) {
            let (holder, node) = (holder.party(), holder.record.node.clone());
            self.cards.move_by(nic, |card| card.set_node(&node));
            let about = About::worker(&node, holder).of_nic(&name);
            self.note(about, format!("{name} was driven by worker {holder} all the time"));
        }
        self.record_nic(nic);
    }
}
