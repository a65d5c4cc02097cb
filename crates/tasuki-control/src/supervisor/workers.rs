//! Gives nodes the workers they should have: one, and a second that stands by while the node has a NIC. Which of the
//! two drives is the arbiter's decision.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::event::EventfdFlags;
use rustix::process::{Pid, Resource, Rlimit};
use rustix::thread::CapabilitySet;
use tasuki_relay::arbiter::{Arbiter, Input, Node, Page, State};
use tasuki_relay::message::{self, Begin, PROTOCOL_VERSION, ToWorker, heartbeat};
use tasuki_relay::method::{Method, Trust};
use tasuki_relay::wire::Use;
use tasuki_shm::crash;

use super::card::LeasePage;
use super::card::Opening;
use super::cells::Cell;
use super::deeds::{FROZEN_TIME_MAX, party};
use super::deposits::Key;
use super::door::why;
use super::jails::FirstMessage;
use super::policy::{self, Death, Trouble};
use super::taps::NAME_RETRY_PAUSE;
use super::worker::{Readiness, Stage, Words, Worker, why_missed};
use super::{About, Supervisor, Token, WORKER_TIMEOUT, epoll_add, iova_of, is_news, now, split};
use crate::config::{Device, Work};
use crate::jail;
use crate::registry::{Change, WorkerRecord};
use crate::spawn::not_startable;

/// For this long the daemon waits for a worker that starts or prepares, before it starts another: on a machine that is not
/// too busy it is ready by then.
const ALMOST_READY_TIMEOUT: Duration = Duration::from_millis(500);

/// Pause between a takeover and the start of the next stand-by, which takes milliseconds of CPU time from the new driver.
const TAKEOVER_QUIET_TIME: Duration = Duration::from_millis(20);

/// Bytes a worker may lock where devices access its memory by themselves.
const MEMLOCK: u64 = 512 << 20;

/// Sends the first message, and the descriptors that belong to it.
pub(super) fn send_first_message(
    worker: &Worker,
    begin: Begin,
    [program_state, listener]: [&OwnedFd; 2],
    endpoint: Option<(message::Endpoint, OwnedFd)>,
) {
    let heartbeat = worker.heartbeat.as_ref().expect("just made").region().fd();
    let (endpoint, device) = endpoint.unzip();
    let fds = [heartbeat, program_state.as_fd(), listener.as_fd()].into_iter().chain(device.iter().map(OwnedFd::as_fd));
    // If the worker is dead already, its pidfd reports that.
    let _ = worker.write(&ToWorker::Begin(Begin { endpoint, ..begin }), &fds.collect::<Vec<_>>());
}

/// Returns whether workers may have this nice value: by a privilege, or by RLIMIT_NICE.
fn may_be_nice(nice: i32) -> bool {
    let capable = rustix::thread::capabilities(None).is_ok_and(|ours| ours.effective.contains(CapabilitySet::SYS_NICE));
    let limit = rustix::process::getrlimit(Resource::Nice).current;
    capable || limit.is_none_or(|limit| i64::from(20 - nice) <= i64::try_from(limit).unwrap_or(i64::MAX))
}

impl Supervisor {
    /// Starts, attaches and retires workers until each node has those it should have.
    pub(super) fn reconcile_workers(&mut self) {
        if self.adopting || self.stopping.is_some() {
            return;
        }
        let goes_on = |name: &&String| !self.ends(name) && !self.has_unheard(name);
        let names: Vec<String> = self.nodes.keys().filter(goes_on).cloned().collect();
        for name in &names {
            self.attach_to_nics(name);
            self.end_upgrade(name);
            self.retire_surplus(name);
            self.mend(name);
        }
        // A process that starts takes milliseconds of a CPU. So none is started while a NIC waits for a driver, nor when a
        // worker has just closed its end: a dying process does so a moment before its pidfd reports the death. One that
        // lives on keeps no other node waiting.
        let is_calm =
            |card: &super::card::Card| card.arbiter.is_none() || card.is_settled() || card.waits_for_no_driver();
        let is_dying = |worker: &Worker| {
            worker.hung_up_since.is_some_and(|since| now().saturating_sub(since) < ALMOST_READY_TIMEOUT)
        };
        if self.cards.values().all(is_calm) && !self.workers.values().any(is_dying) {
            names.iter().for_each(|name| self.start_missing_workers(name));
            self.mend_sockets();
            self.tell_of_late_cells();
            let is_settled = |worker: &Worker| worker.serves() || worker.hung_up_since.is_some();
            if self.jobs.is_empty() && self.workers.values().all(is_settled) {
                self.prestart(&names);
            }
        }
        self.end_the_slow();
        self.ask_for_clients();
    }

    /// Returns whether a worker of this node is about to be ready for a NIC that no worker drives: starting another
    /// would delay it.
    fn is_awaited(&self, name: &str) -> bool {
        let is_soon = |since: Duration| now().saturating_sub(since) < ALMOST_READY_TIMEOUT;
        let comes = |number: u32, nic: u32| match (self.workers[&number].stage, self.workers[&number].nics.get(&nic)) {
            (Stage::Starting(since) | Stage::Asked(since), _) => is_soon(since),
            (_, Some(Readiness::Preparing(since))) => is_soon(*since),
            _ => false,
        };
        let present = self.present_workers_of(name);
        let parked = self.cards.of(name).filter(|card| card.is_parked());
        { parked }.any(|card| present.iter().any(|number| comes(*number, card.number)))
    }

    /// Returns how many workers a node should have.
    fn should_have(&self, node: &str) -> usize {
        let has_nic = self.cards.of(node).any(|card| card.closing.is_none());
        let stands_by = self.config.node(node).is_some_and(|node| node.standby);
        1 + usize::from(has_nic && stands_by) + usize::from(self.needs_a_worker_more(node))
    }

    /// Returns the workers of the node's present program that are to stay, by number.
    pub(super) fn present_workers_of(&self, node: &str) -> Vec<u32> {
        let generation = self.nodes.get(node).map_or(0, |node| node.record.generation);
        let is_present = |worker: &&Worker| worker.counts() && !worker.wanted && worker.record.generation == generation;
        self.workers.of(node).filter(is_present).map(Worker::party).collect()
    }

    /// Returns whether the worker holds a lease, or is about to.
    pub(super) fn is_needed(&self, number: u32) -> bool {
        let is_about_to = self.jobs.iter().any(|job| job.target == number);
        is_about_to || self.cards.values().any(|card| card.holder() == Some(number) || card.is_under_way_for(number))
    }

    fn ready_on_all(&self, number: u32) -> bool {
        let Some(worker) = self.workers.get(&number).filter(|worker| worker.serves()) else { return false };
        let of_node = self.cards.of(&worker.record.node).filter(|card| card.closing.is_none() && card.opened.is_some());
        { of_node }
            .all(|card| worker.nics.get(&card.number) == Some(&Readiness::Ready) || card.holder() == Some(number))
    }

    /// Returns the latest generation of a node and of its workers, but for one (0: none). A worker of an upgrade that moved some
    /// NICs and not all is later than its node: if the next upgrade were of its generation, it would count as present.
    pub(super) fn latest_generation(&self, name: &str, but: u32) -> u32 {
        let of_node = self.nodes.get(name).map_or(0, |node| node.record.generation);
        let its = self.workers.of(name).filter(|worker| worker.party() != but);
        its.map(|worker| worker.record.generation).fold(of_node, u32::max)
    }

    /// Records an upgrade whose worker drives all NICs of its node: the tasukid that began it ended before it did, or the
    /// upgrade failed and a worker that died left the NICs to this one. Such a worker would count as surplus, and stay for
    /// what it drives.
    fn end_upgrade(&mut self, name: &str) {
        let generation = self.nodes.get(name).map_or(0, |node| node.record.generation);
        let is_ahead = |worker: &&Worker| worker.serves() && worker.record.generation > generation;
        let drives_all = |worker: &&Worker| {
            let mut nics = self.open_cards_of(name).peekable();
            nics.peek().is_some() && nics.all(|card| card.is_settled() && card.holder() == Some(worker.party()))
        };
        let worker = self.workers.of(name).filter(is_ahead).find(drives_all).map(Worker::party);
        let Some(worker) = worker.filter(|_| !self.jobs.iter().any(|job| job.is_of(name))) else { return };
        self.was_upgraded_to(worker);
        self.note(About::worker(name, worker), format!("node {name} is now worker {worker}, which drives already"));
    }

    /// Retires workers of an older program once enough of the present one are ready, and surplus workers.
    fn retire_surplus(&mut self, node: &str) {
        let (wanted, present) = (self.should_have(node), self.present_workers_of(node));
        let ready = present.iter().filter(|number| self.ready_on_all(**number)).count();
        let generation = self.nodes.get(node).map_or(0, |node| node.record.generation);
        let old = |worker: &&Worker| worker.serves() && !worker.wanted && worker.record.generation != generation;
        let mut leave: Vec<u32> =
            self.workers.of(node).filter(old).filter(|_| ready >= wanted).map(Worker::party).collect();
        let too_many = present.len().saturating_sub(wanted);
        if too_many > 0 {
            // Workers that cannot take a NIC go first, then the youngest.
            let mut surplus: Vec<u32> = present.into_iter().filter(|number| !self.is_needed(*number)).collect();
            surplus.sort_by_key(|number| (self.ready_on_all(*number), std::cmp::Reverse(*number)));
            leave.extend(surplus.into_iter().take(too_many));
        }
        for number in leave {
            if !self.is_needed(number) {
                self.retire(number);
            }
        }
    }

    /// Tells a worker that drives nothing to end.
    pub(super) fn retire(&mut self, number: u32) {
        let Some(worker) = self.workers.get_mut(&number) else { return };
        if !worker.counts() {
            return;
        }
        worker.stage = Stage::Leaving(now());
        let nics: Vec<u32> = worker.nics.keys().copied().collect();
        for nic in nics {
            self.dismiss(nic, number);
        }
        self.send_leaves();
        if let Some(worker) = self.workers.get_mut(&number) {
            worker.tell_to_end();
        }
        crash::point("daemon.retired");
    }

    /// Tells a worker to release its resources of a NIC that it does not drive.
    pub(super) fn dismiss(&mut self, nic: u32, number: u32) {
        let arbiter = self.cards.get_mut(&nic).and_then(|card| card.arbiter.as_mut());
        let Some((arbiter, party)) = arbiter.zip(party(number)) else { return };
        let doing = arbiter.dismiss(party);
        self.do_all(nic, doing);
        if let Some(worker) = self.workers.get_mut(&number) {
            worker.nics.remove(&nic);
        }
    }

    fn start_missing_workers(&mut self, name: &str) {
        let missing = self.should_have(name).saturating_sub(self.present_workers_of(name).len());
        if self.nodes.get(name).is_none_or(|node| node.not_before > now()) || self.gives_way(name) {
            return;
        }
        for _ in 0..missing {
            if self.is_awaited(name) {
                return;
            }
            match self.start_worker(name, None, false) {
                Ok(Some(_)) => {}
                Ok(None) => return,
                Err(error) => return self.did_not_start(name, &error),
            }
        }
    }

    /// Returns whether a NIC of this node has just begun to go to its stand-by node: starting a process would delay it.
    fn gives_way(&self, name: &str) -> bool {
        let goes = |card: &super::card::Card| {
            self.jobs.iter().any(|job| job.has_just_begun(card.number, ALMOST_READY_TIMEOUT))
        };
        self.cards.of(name).any(goes)
    }

    /// Handles the death of a worker that was not meant to die: sets when another may start, and notes trouble with
    /// the node if that is news.
    pub(super) fn has_lost_a_worker(&mut self, name: &str, had_begun: bool) {
        let (restart, now) = (self.config.daemon.restart, now());
        let takes_over = self.present_workers_of(name).iter().any(|number| self.ready_on_all(*number));
        let Some(node) = self.nodes.get_mut(name) else { return };
        let before = policy::trouble(&node.deaths, now);
        policy::remember(&mut node.deaths, Death { at: now, had_begun });
        let moments = if takes_over { TAKEOVER_QUIET_TIME } else { Duration::ZERO };
        node.not_before = policy::due(restart, &node.deaths).max(now + moments);
        let after = policy::trouble(&node.deaths, now);
        if let Some(trouble) = after.filter(|_| after != before) {
            let sentence = in_words(name, trouble);
            self.note(About::node(name), sentence);
        }
    }

    /// Returns a node's trouble, as a sentence for users.
    pub(super) fn trouble_of(&self, name: &str) -> Option<String> {
        let node = self.nodes.get(name)?;
        let dies = || policy::trouble(&node.deaths, now()).map(|trouble| in_words(name, trouble));
        self.why_without_interface(name)
            .or_else(|| self.trouble_at_socket(name))
            .or_else(|| self.why_filtered_at(name))
            .or_else(|| self.why_renamed(name))
            .or_else(|| self.workers.of(name).find_map(|worker| worker.unfound.clone()))
            .or_else(|| node.trouble.clone())
            .or_else(dies)
    }

    /// Returns a sentence for each worker that drives and is of another program than its node, if no upgrade is about to change
    /// that.
    pub(super) fn other_programs(&self) -> impl Iterator<Item = String> {
        let node_of = |worker: &Worker| self.nodes.get(&worker.record.node).map_or(0, |node| node.record.generation);
        let is_other =
            move |(_, worker): &(&u32, &Worker)| worker.serves() && worker.record.generation != node_of(worker);
        let drives = |number: u32| self.cards.values().any(|card| card.holder() == Some(number));
        self.workers.iter().filter(is_other).filter_map(move |(number, worker)| {
            let name = &worker.record.node;
            let is_changing = self.jobs.iter().any(|job| job.is_of(name));
            let of = if worker.record.generation < node_of(worker) {
                "of the program from before its last upgrade"
            } else {
                "of an upgrade that moved some of its NICs and not all"
            };
            (drives(*number) && !is_changing).then(|| format!(
                "node {name} is driven by worker {number} {of} ({}); upgrade it again (tasuki worker upgrade {name})",
                worker.binary().display()
            ))
        })
    }

    fn did_not_start(&mut self, name: &str, error: &anyhow::Error) {
        let sentence = format!("no worker for node {name}: {}", why(error));
        let waits = self.waits_for_name(name, error);
        let Some(node) = self.nodes.get_mut(name) else { return };
        if waits {
            node.not_before = now() + NAME_RETRY_PAUSE;
            return;
        }
        // A missing program may soon be there: it is being built, or installed.
        node.not_before = now() + Duration::from_secs(1);
        if is_news(&mut node.trouble, &sentence) {
            self.note(About::node(name), sentence);
        }
    }

    /// Returns the program for a worker of a node: the one the caller names, else the one the node was upgraded to,
    /// else the configured one, else the default worker.
    pub(super) fn program_of(&self, name: &str, named: Option<PathBuf>) -> PathBuf {
        let upgraded = || self.nodes.get(name)?.record.binary.clone();
        let own = || Some(self.config.node(name)?.program()?.path.clone());
        named.or_else(upgraded).or_else(own).unwrap_or_else(|| self.worker_program())
    }

    /// Returns the default worker, which also opens devices.
    pub(super) fn worker_program(&self) -> PathBuf {
        self.config.daemon.worker.clone().unwrap_or_else(|| self.programs.worker.clone())
    }

    /// Starts a worker for a node, and sends its first message once the process is confined. Returns its number; `None` if
    /// its process is still being made.
    ///
    /// # Errors
    /// It cannot start as things are.
    pub(super) fn start_worker(&mut self, name: &str, binary: Option<PathBuf>, wanted: bool) -> Result<Option<u32>> {
        if self.waits_for_process(name) {
            return Ok(None);
        }
        let node = self.nodes.get(name).context("there is no such node")?;
        let config = self.config.node(name).context("there is no such node")?.clone();
        let generation = if wanted { self.latest_generation(name, 0) + 1 } else { node.record.generation };
        let endpoint = match self.tap_for(name)? {
            Some(tap) => Some(tap),
            None => match self.queue_for(name)? {
                Some(queue) => Some(queue),
                None => self.endpoint_for(name)?,
            },
        };
        let binary = self.program_of(name, binary);
        // A name without a path is looked up in `PATH`.
        if let Some(why) = not_startable(&binary).filter(|_| binary.is_absolute()) {
            anyhow::bail!("{} {why}", binary.display());
        }
        // The limits of an interface are those of all its queues.
        let interface_node =
            self.nodes.get(&self.config.interface_node(&config).name).context("there is no such node")?;
        let program_state = interface_node.program_state.region().fd().try_clone_to_owned()?;
        let heartbeat = Words::create("tasuki heartbeat", heartbeat::LEN)?;
        let file = jail::open_program(&binary).with_context(|| format!("{} does not start", binary.display()))?;
        let Some(cell) = self.process_for(name, &binary)? else { return Ok(None) };
        let Cell { number, process, socket: ours, path: socket, listener, lines, jailing, group, memlock, .. } = cell;
        let program = jailing.as_ref().map(|_| (binary.clone(), file));
        crash::point("daemon.worker-started");
        let mark = endpoint.as_ref().and_then(|(it, _)| self.endpoints.get(&it.label)?.mark());
        let record = WorkerRecord {
            party: number,
            process: process.name(),
            uid: None,
            node: name.to_owned(),
            socket,
            binary,
            generation,
            unconfined: Vec::new(),
            staged: None,
            endpoint: mark,
            settings: Some(config.settings(self.config.interface_node(&config))),
            reads: Vec::new(),
            messages: PROTOCOL_VERSION,
        };
        // Record the worker before telling it anything: a later daemon must find every worker that can drive.
        self.changes.push(Change::Worker(record.clone()));
        self.flush();
        crash::point("daemon.worker-recorded");
        epoll_add(&self.epoll, ours.as_fd(), Token::WorkerReadable(number))?;
        if let Some(lines) = &lines {
            self.epoll_add_lines(number, lines)?;
        }
        let worker = Worker::new(record, process, ours, Stage::Starting(now()), now());
        let mut worker = Worker { heartbeat: Some(heartbeat), jailing, group, lines, wanted, ..worker };
        let begin = Begin {
            protocol_version: PROTOCOL_VERSION,
            party: number,
            node: name.to_owned(),
            work: config.work_of_worker(),
            options: config.program().map(|program| program.options.clone()).unwrap_or_default(),
            cpu: config.cpu,
            aside: self.housekeeping_cpus.clone(),
            poll: config.poll,
            nice: config.nice(),
            memlock,
            files: config.program().is_some_and(|program| !program.files.is_empty()),
            threads: config.program().is_some_and(|program| program.threads),
            endpoint: None,
        };
        worker.first_message = Some(FirstMessage { program, begin, fds: [program_state, listener], endpoint });
        self.workers.insert(number, worker);
        self.mark_deposit(Key::Worker(number));
        self.deposit();
        self.let_begin(number);
        let Some(worker) = self.workers.get_mut(&number) else { return Ok(Some(number)) };
        worker.heartbeat.iter().for_each(|heartbeat| self.exit_watch.watch(number, heartbeat));
        crash::point("daemon.worker-told");
        if let Some(nice) = config.nice.filter(|&nice| !may_be_nice(nice)) {
            self.note(About::node(name), format!("its workers may not have nice = {nice}, and have 0; start tasukid as root, or with CAP_SYS_NICE, or leave it out"));
        }
        Ok(Some(number))
    }

    /// Returns the bytes a worker may lock, and raises its limit to that if permitted.
    pub(super) fn memlock(&self, pid: u32) -> u64 {
        let is_needed = self.config.nic.iter().any(|nic| matches!(nic.device, Device::Vfio(_)));
        if !is_needed {
            return 0;
        }
        if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
            let limit = Rlimit { current: Some(MEMLOCK), maximum: Some(MEMLOCK) };
            let _ = rustix::process::prlimit(Some(pid), Resource::Memlock, limit);
        }
        MEMLOCK
    }

    /// Gives every worker of a node every NIC of the node. Has it release any other NIC that it does not drive.
    fn attach_to_nics(&mut self, name: &str) {
        let present = self.present_workers_of(name).into_iter();
        let serving: Vec<u32> = present.filter(|number| self.workers[number].serves()).collect();
        let is_open = |card: &super::card::Card| card.opened.is_some() && card.closing.is_none();
        let its: Vec<u32> = self.cards.of(name).filter(|card| is_open(card)).map(|card| card.number).collect();
        let joiner = self.joiner_of(name, &serving);
        let staged = self.staged_of(name).filter(|staged| staged.serves()).map(Worker::party);
        for number in serving.into_iter().chain(staged) {
            let Some(worker) = self.workers.get(&number) else { continue };
            let may_join = |nic: &u32| joiner.is_none_or(|joiner| joiner == number || self.is_held(*nic));
            let lacks = its.iter().filter(|nic| !worker.nics.contains_key(nic) && may_join(nic));
            let is_others = |nic: &&u32| self.cards.get(nic).is_some_and(|card| is_open(card) && card.node() != name);
            let others = worker.nics.keys().filter(is_others).copied().collect::<Vec<_>>();
            for nic in lacks.copied().collect::<Vec<_>>() {
                _ = self.attach(nic, number, Use::Takeover, Method::Keep);
            }
            for nic in others {
                if !self.is_needed(number) {
                    self.dismiss(nic, number);
                }
            }
        }
    }

    /// Returns the worker of an uplink that is to drive both its NIC and its end. No other worker gets a side that
    /// is not driven yet.
    fn joiner_of(&self, name: &str, serving: &[u32]) -> Option<u32> {
        self.config.node(name).filter(|node| node.work == Work::Uplink)?;
        let mut candidates = self.candidates_of(name);
        candidates.retain(|candidate| serving.contains(&candidate.worker));
        split::joiner(&self.sides_of(name), &candidates)
    }

    /// Returns whether a living worker drives the NIC.
    pub(super) fn is_held(&self, nic: u32) -> bool {
        let holder = self.cards.get(&nic).and_then(|card| card.holder());
        holder.is_some_and(|holder| self.workers.contains_key(&holder))
    }

    /// Gives a worker the descriptors to drive a NIC, and has it prepare. Gives it nothing while it could harm the
    /// workers that have the NIC.
    pub(super) fn attach(&mut self, nic: u32, number: u32, purpose: Use, method: Method) -> bool {
        // Send pending leave orders first: a worker that has left the NIC may get it again.
        self.send_leaves();
        if self.unheard.contains(&nic) || !self.has_page(nic, number) {
            return false;
        }
        // A taker frees the frames for nodes that it was not told of, and to tell it takes a descriptor.
        let is_on_vni = self.cards.get(&nic).is_some_and(|card| card.vni().is_some());
        if is_on_vni && rustix::event::eventfd(0, EventfdFlags::CLOEXEC).is_err() {
            return false;
        }
        let (Some(card), Some(worker)) = (self.cards.get_mut(&nic), self.workers.get_mut(&number)) else {
            return false;
        };
        let (Some(opened), Some(party), Some(prepare)) = (&card.opened, party(number), card.prepare(purpose, method))
        else {
            return false;
        };
        // A worker with memory of its own sees nothing of the old owner's.
        let is_trusted = self.config.trust(card.node(), &worker.record.node);
        let trust = if is_trusted { Trust::Full } else { Trust::None };
        let partial = opened.without_memory().filter(|_| method.is_apart(trust));
        let (bundle, count) = partial.unwrap_or_else(|| (opened.bundle.clone(), opened.fds.len()));
        let fenced = method != Method::Keep && !is_trusted;
        let message = ToWorker::Nic { nic, name: card.config.name.clone(), iova: iova_of(number), fenced, bundle };
        worker.has(nic, Readiness::Preparing(now()));
        self.mark_deposit(Key::Worker(number));
        self.deposit();
        let (Some(card), Some(worker)) = (self.cards.get_mut(&nic), self.workers.get_mut(&number)) else {
            return false;
        };
        let sent = worker.write(&message, &card.lend(count, &worker.record.node));
        crash::point("daemon.bundle");
        self.tell_neighbours(nic, number);
        self.tell_client(nic, number);
        let home = self.cards[&nic].node().to_owned();
        let home = self.node_number(&home);
        let (Some(card), Some(worker)) = (self.cards.get_mut(&nic), self.workers.get_mut(&number)) else {
            return false;
        };
        let sent = sent.and_then(|()| worker.order(nic, prepare));
        crash::point("daemon.attached");
        let first = card.arbiter.is_none();
        if let Some(errno) = why_missed(sent) {
            self.kill_worker(number, format!("does not take its descriptors ({errno})"));
            return true;
        }
        if first {
            let (mut arbiter, doing) = Arbiter::begin(home, &[home], &[(party, home)], &[]);
            if worker.record.staged.is_some() {
                arbiter.stage(party);
            }
            card.arbiter = Some(arbiter);
            self.remember_those_that_left(nic);
            self.do_all(nic, doing);
        }
        true
    }

    /// Returns whether there is a lease page that this worker can have: that of the workers that have the NIC, or
    /// one of its own node.
    fn has_page(&mut self, nic: u32, number: u32) -> bool {
        let its = self.workers.get(&number).map(|worker| (worker.record.node.clone(), worker.record.staged.is_some()));
        let Some((node, is_staged)) = its else { return false };
        let is_target = self.jobs.iter().any(|job| job.target == number && job.is_about(nic));
        let is_going = self.jobs.iter().any(|job| job.keeps_away(nic, &node));
        let may_trust = self.config.node(&node).map_or(&[][..], |config| &config.trusts);
        let trusted = |other: &&String| self.nodes.contains_key(*other) && self.config.trust(&node, other);
        let trusts: Vec<String> = may_trust.iter().chain([&node]).filter(trusted).cloned().collect();
        let ours = self.node_number(&node);
        let trusts: Vec<Node> = trusts.iter().map(|other| self.node_number(other)).collect();
        let (Some(card), Some(party)) = (self.cards.get_mut(&nic), party(number)) else { return false };
        let is_elsewhere = card.node() != node;
        let Some(arbiter) = &mut card.arbiter else { return card.page_of.contains(&node) };
        arbiter.befriend(ours, &trusts);
        let is_stranger = arbiter.page_for(ours) == Page::Fresh;
        // A worker of the node that the NIC leaves would have to be fenced, too.
        if is_going || is_stranger && !is_target && is_elsewhere {
            return false;
        }
        let is_new = is_stranger && card.coming_lease_page.as_ref().is_none_or(|(of, _)| *of != node);
        if is_new {
            let Ok(lease_page) = LeasePage::create() else { return false };
            card.coming_lease_page = Some((node.clone(), lease_page));
        }
        if arbiter.give(party, ours).is_none() {
            return false;
        }
        if is_staged {
            arbiter.stage(party);
        }
        if is_new || !is_stranger && card.page_of.insert(node) {
            self.record_nic(nic);
        }
        true
    }

    /// Returns the number by which arbiters know the node.
    pub(super) fn node_number(&mut self, name: &str) -> Node {
        let next = &mut self.next_node_number;
        Node(*self.node_numbers.entry(name.to_owned()).or_insert_with(|| std::mem::replace(next, *next + 1)))
    }

    /// Ends workers that do not begin, prepare or end in time.
    pub(super) fn end_the_slow(&mut self) {
        let (now, prepare) = (now(), self.config.daemon.prepare());
        let late = |since: Duration, limit: Duration| now.saturating_sub(since) >= limit;
        let mut slow = Vec::new();
        let prepares_late = |worker: &Worker| {
            let is_late = |it: &Readiness| matches!(it, Readiness::Preparing(since) if late(*since, prepare));
            worker.nics.values().any(is_late)
        };
        for (number, worker) in self.workers.iter() {
            let what = match worker.stage {
                _ if worker.hung_up_since.is_some_and(|since| late(since, WORKER_TIMEOUT)) => {
                    "has stopped, or closed its end, and does not end"
                }
                Stage::Starting(since) if late(since, WORKER_TIMEOUT) => "has not begun in time",
                Stage::Asked(since) if late(since, WORKER_TIMEOUT) => "does not answer this tasukid",
                Stage::Leaving(since) if late(since, WORKER_TIMEOUT) => "was told to end and does not",
                Stage::Begun if prepares_late(worker) && !self.is_needed(*number) => "has not prepared in time",
                _ => continue,
            };
            slow.push((*number, what));
        }
        for (number, what) in slow {
            self.kill_worker(number, what.to_owned());
        }
    }

    /// Returns when the loop must look again even if no event comes.
    pub(super) fn next_due(&self) -> Duration {
        let hearts = self.workers.values().any(Worker::serves).then(|| now() + self.config.daemon.hang_after() / 4);
        let watches = self.cards.values().filter_map(|card| card.deadline.map(|(_, at)| at));
        let waits = self.nodes.values().map(|node| node.not_before).filter(|at| *at > now());
        let openings = self.cards.values().filter_map(|card| match card.opening {
            Opening::NotBefore(at) if at > now() => Some(at),
            _ => None,
        });
        let lost = self.cards.values().filter_map(|card| card.lost.due(self.config.daemon.failover_after(), now()));
        let changes = self.applying.is_some() || self.cards.values().any(|card| card.closing.is_some());
        let busy = changes
            || self.workers.values().any(|worker| !worker.serves())
            || !self.jobs.is_empty()
            || !self.leaving.is_empty()
            || self.is_bypassing()
            || self.stopping.is_some();
        let soon = (busy || self.is_opening() || self.has_deposits_due()).then(|| now() + Duration::from_millis(20));
        let ahead = self.ahead.iter().map(|it| it.since);
        let frozen = self.frozen.iter().map(|it| it.since).chain(ahead).map(|since| since + FROZEN_TIME_MAX);
        let is_due = !self.untold.is_empty() && !self.is_pressing() && self.stopping.is_none();
        let at_once = is_due.then(|| now().max(self.untold_not_before));
        let all = watches
            .chain(frozen)
            .chain(waits)
            .chain(lost)
            .chain(openings)
            .chain(self.registry.not_before())
            .chain(self.cells.due())
            .chain(hearts)
            .chain(soon)
            .chain(at_once);
        all.min().unwrap_or_else(|| now() + Duration::from_secs(3600))
    }

    /// Handles expired deadlines, checks heartbeats and veth ends, and answers late requests for counts.
    pub(super) fn due(&mut self) {
        let now = now();
        let over: Vec<(u32, u32)> = self
            .cards
            .values_mut()
            .filter_map(|card| card.deadline.take_if(|(_, at)| *at <= now).map(|(number, _)| (card.number, number)))
            .collect();
        for (nic, number) in over {
            self.tell_arbiter(nic, Input::Deadline(number));
        }
        self.check_heartbeats();
        self.look_at_interfaces();
        let late = |since: Duration| now.saturating_sub(since) >= WORKER_TIMEOUT;
        let (over, rest) = std::mem::take(&mut self.counting).into_iter().partition(|(_, _, since, _)| late(*since));
        self.counting = rest;
        for (.., answer) in over {
            let _ = answer.send(Err(super::door::Refusal::conflict(
                "the worker that drives the NIC did not send its counters; ask again",
            )));
        }
    }
}

fn in_words(name: &str, trouble: Trouble) -> String {
    match trouble {
        Trouble::NeverBegins => format!(
            "node {name} has a program that ends, or hangs, before it hears an order, three times in a row by now; tasukid's log has its output. tasukid tries it again every {} s at least; when it is mended, at once: tasuki worker upgrade {name}",
            policy::RETRY_MAX.as_secs()
        ),
        Trouble::Dies => format!(
            "node {name} has lost six workers and more within {} s, and gets a fresh one after pauses of up to {} s; tasuki events says how they died",
            policy::DEATH_WINDOW.as_secs(),
            policy::PAUSE_MAX.as_secs()
        ),
    }
}

impl super::card::Card {
    /// Returns whether no worker drives the NIC, and none could.
    pub(super) fn is_parked(&self) -> bool {
        self.arbiter.as_ref().map(Arbiter::state) == Some(State::Parked)
    }

    /// Returns whether a relay is under way in which no driver is waited for: the last one drives on meanwhile, or a new
    /// daemon has yet to hear which worker drives.
    fn waits_for_no_driver(&self) -> bool {
        let state = self.arbiter.as_ref().map(Arbiter::state);
        matches!(state, Some(State::Finding | State::Preparing | State::Clearing))
    }

    /// Returns whether a relay is under way after which this worker may drive.
    fn is_under_way_for(&self, number: u32) -> bool {
        use tasuki_relay::arbiter::Is;
        let Some(arbiter) = &self.arbiter else { return false };
        let waits =
            |party| arbiter.members().iter().any(|member| member.party == party && matches!(member.is, Is::Waiting));
        !matches!(arbiter.state(), State::Steady | State::Parked) && party(number).is_some_and(waits)
    }
}
