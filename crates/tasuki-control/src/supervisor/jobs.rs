//! Upgrades and handovers on request: from the request to the answer.
//!
//! An upgrade starts a fresh worker, has it prepare every NIC of the node, and then relays one NIC after the other.
//! A handover has a worker of the other node prepare one NIC. The daemon tells the giver nothing until the taker has
//! said that it is ready, so a failure before that costs nothing.

mod steps;

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tasuki_relay::message;
use tasuki_relay::method::{self, Method, Trust};
use tasuki_relay::wire::{Reason, Use};
use tasuki_shm::crash;

use super::card::Card;
use super::deeds::time;
use super::door::{Answer, Refusal};
use super::staging::FileName;
use super::worker::Worker;
use super::{About, Supervisor, now};
use crate::api::types::{DriverStateBy, Give, Inflight, Relayed, Settled, Upgrade};
use crate::registry::Change;
use crate::spawn::not_startable;

/// No worker has this number: the job still waits for a worker to give the NIC to.
const NO_WORKER: u32 = 0;

/// What a job is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Purpose {
    /// A fresh worker gets all NICs of its node.
    Upgrade,
    /// The two sides of an uplink come together, at a worker that already runs.
    Mend,
    /// A worker only gets ready.
    Stage,
    /// Another node gets a NIC.
    Give,
    /// A NIC goes to its stand-by node by itself.
    FailOver,
}

impl Purpose {
    /// Returns the kind of its relays.
    fn relays(self) -> Use {
        match self {
            Purpose::Upgrade | Purpose::Mend | Purpose::Stage => Use::Upgrade,
            Purpose::Give | Purpose::FailOver => Use::Handover,
        }
    }
}

/// A request under way.
#[derive(Debug)]
pub struct Job {
    purpose: Purpose,
    /// The node that is to have the NICs.
    node: String,
    /// The node that loses its NIC's driver to a fence.
    fenced_node: Option<String>,
    /// The worker that is to have the NICs.
    pub target: u32,
    /// For an upgrade: another program. For a staging: the program.
    with: Option<PathBuf>,
    /// Whether the process of its worker is being made.
    is_awaited: bool,
    /// NICs still to be relayed.
    todo: VecDeque<u32>,
    /// `Some` once the arbiter of the first NIC was asked; inside, the worker that drove then.
    asked: Option<Option<u32>>,
    asked_for: Option<Method>,
    fence_first: bool,
    inflight: message::Inflight,
    store: bool,
    done: Vec<Settled>,
    /// Whether no worker drove the NIC when the job began: nobody lets go.
    parked: bool,
    /// Whether the taker only gets ready: the NIC's node is not lost yet.
    waits: bool,
    /// How often the taker came too late, so that frames had reached the old owner meanwhile.
    late: u32,
    /// The method by which the taker refused the card, and why.
    refused: Option<(Method, Reason)>,
    /// The driver of the card that was refused.
    gave: Option<u32>,
    /// Why it is to fail, unless its relay is under way.
    failure: Option<String>,
    since: Duration,
    /// Since when the job has looked for a worker to give the NIC to.
    looks_since: Duration,
    pub(super) answer: Option<Answer<Relayed>>,
}

impl Job {
    fn new(purpose: Purpose, node: &str, target: u32, todo: VecDeque<u32>) -> Self {
        Job {
            purpose,
            node: node.to_owned(),
            fenced_node: None,
            target,
            with: None,
            is_awaited: false,
            todo,
            asked: None,
            asked_for: None,
            fence_first: false,
            inflight: message::Inflight::Deliver,
            store: false,
            done: Vec::new(),
            parked: false,
            waits: false,
            late: 0,
            refused: None,
            gave: None,
            failure: None,
            since: now(),
            looks_since: now(),
            answer: None,
        }
    }

    /// Returns whether this node is to have the NICs.
    pub(super) fn is_of(&self, node: &str) -> bool {
        self.node == node
    }

    /// Creates a job without a caller: it moves these NICs of an uplink to a worker that has the rest, or could have
    /// all.
    pub fn mending(node: &str, nics: VecDeque<u32>, to: u32) -> Self {
        Job::new(Purpose::Mend, node, to, nics)
    }

    /// Creates a job that gets a worker of this program ready for these NICs. If there is no `worker` yet,
    /// `Supervisor::start_target` starts one.
    pub fn staging(node: &str, worker: Option<u32>, program: PathBuf, nics: VecDeque<u32>) -> Self {
        Job { with: Some(program), ..Job::new(Purpose::Stage, node, worker.unwrap_or(NO_WORKER), nics) }
    }

    /// Returns the node that is to have the NICs.
    pub fn node(&self) -> &str {
        &self.node
    }

    /// Returns whether the job has yet to relay this NIC.
    pub fn is_about(&self, nic: u32) -> bool {
        self.todo.contains(&nic)
    }

    /// Returns whether workers of `node` must get nothing of a NIC, because the job fences those of its workers that
    /// have it. A node that is lost may come back until then: the other one may take its time.
    pub fn keeps_away(&self, nic: u32, node: &str) -> bool {
        self.is_about(nic) && self.fences(node) && !(self.parked && self.asked.is_none())
    }

    /// Returns whether the job is to bring this NIC to another node.
    pub fn gives(&self, nic: u32) -> bool {
        self.is_about(nic) && self.purpose.relays() == Use::Handover
    }

    /// Returns whether the NIC goes to its stand-by node by itself.
    pub fn fails_over(&self) -> bool {
        self.purpose == Purpose::FailOver
    }

    /// Has the job fail with this sentence, unless its relay is under way.
    pub fn fail_before_relay(&mut self, why: String) {
        self.failure = Some(why).filter(|_| self.asked.is_none());
    }

    /// Lets the taker have the NIC.
    pub fn may_go(&mut self) {
        self.waits = false;
    }

    /// Returns whether the NIC goes to its stand-by node by itself, and the job began less than `lately` ago.
    pub fn has_just_begun(&self, nic: u32, lately: Duration) -> bool {
        self.fails_over() && !self.waits && self.is_about(nic) && now().saturating_sub(self.since) < lately
    }

    /// Returns the NIC whose relay is under way.
    pub fn asked(&self) -> Option<u32> {
        self.asked.and(self.todo.front().copied())
    }

    /// Returns whether the job's plan includes a fence of a worker of this node.
    pub fn fences(&self, node: &str) -> bool {
        self.fenced_node.as_deref() == Some(node)
    }
}

/// Returns the part of a reason before its first semicolon: the finding, without the advice.
fn finding(why: Reason) -> String {
    let sentence = why.to_string();
    sentence.split(';').next().unwrap_or_default().to_owned()
}

impl Supervisor {
    /// Checks that no other job relays this node or one of these NICs, that the node stays, and that the daemon is
    /// not stopping.
    pub(super) fn is_free(&self, node: &str, nics: &[u32]) -> Result<(), Refusal> {
        if self.stopping.is_some() {
            return Err(Refusal::Ending);
        }
        if self.leaves(node) {
            // For a caller that goes through all nodes it is gone.
            return Err(Refusal::NotFound(format!("node {node} is being removed")));
        }
        let busy = self.jobs.iter().find(|job| job.node == node || job.todo.iter().any(|nic| nics.contains(nic)));
        match busy {
            Some(job) => Err(Refusal::conflict(format!(
                "an upgrade or a handover of node {} is under way; ask again when that has settled",
                job.node
            ))),
            None => Ok(()),
        }
    }

    /// Returns the NICs and the end of a node that are open, and stay so.
    pub(super) fn open_cards_of<'a>(&'a self, node: &'a str) -> impl Iterator<Item = &'a Card> {
        self.cards.of(node).filter(|card| card.closing.is_none() && card.opened.is_some())
    }

    /// Returns the NICs a worker of another program would have, if that program can be started now.
    pub(super) fn nics_to_upgrade(&self, node: &str, with: Option<&Path>) -> Result<VecDeque<u32>, Refusal> {
        if !self.nodes.contains_key(node) {
            return Err(self.no_node(node));
        }
        let nics: VecDeque<u32> = self.open_cards_of(node).map(|card| card.number).collect();
        self.is_free(node, nics.as_slices().0)?;
        match with.and_then(|path| Some((path, not_startable(path)?))) {
            Some((path, why)) => Err(Refusal::Malformed(format!("{} {why}", path.display()))),
            None => Ok(nics),
        }
    }

    /// Answers the caller once the job is over, or at once if it could not begin.
    pub(super) fn answer_after(&mut self, begun: Result<Job, Refusal>, answer: Answer<Relayed>) {
        match begun {
            Ok(job) => self.jobs.push(Job { answer: Some(answer), ..job }),
            Err(refusal) => drop(answer.send(Err(refusal))),
        }
    }

    pub(super) fn upgrade(&mut self, node: &str, upgrade: Upgrade, answer: Answer<Relayed>) {
        let begun = self.begin_upgrade(node, upgrade);
        self.answer_after(begun, answer);
    }

    pub(super) fn give(&mut self, nic: &str, give: &Give, answer: Answer<Relayed>) {
        let card = self.cards.values().find(|card| card.name() == nic);
        let longer = card.and_then(|card| self.config.too_long_for(&card.config, &give.to));
        let longer = longer.map_or(Ok(()), |why| Err(Refusal::conflict(format!("nic {nic:?}: {why}"))));
        let begun = longer.and_then(|()| self.begin_give(nic, give));
        self.answer_after(begun, answer);
    }

    pub(super) fn begin_upgrade(&mut self, node: &str, upgrade: Upgrade) -> Result<Job, Refusal> {
        let Upgrade { with, state } = upgrade;
        let nics = self.nics_to_upgrade(node, with.as_deref())?;
        let end = nics.iter().find_map(|nic| self.cards[nic].vni().map(|_| self.cards[nic].name()));
        if let Some(end) = end.filter(|_| state == Some(DriverStateBy::Store)) {
            return Err(Refusal::conflict(format!(
                "{end} has no driver state to store: a successor reads everything from the node's memory; leave --state out"
            )));
        }
        if let Some(node) = self.nodes.get_mut(node) {
            // The caller has looked at the causes of these deaths.
            (node.deaths, node.not_before, node.trouble) = (Vec::new(), Duration::ZERO, None);
            node.mending = Default::default();
        }
        let staged = self.staged_as(node, &self.program_of(node, with.clone()));
        let job = Job::new(Purpose::Upgrade, node, staged.unwrap_or(NO_WORKER), nics);
        let job = Job { with, store: state == Some(DriverStateBy::Store), ..job };
        if staged.is_some() {
            return Ok(job);
        }
        self.start_target(job).map_err(|error| Refusal::conflict(format!("no fresh worker for node {node}: {error:#}")))
    }

    /// Gives a job its fresh worker, or has it wait for the worker's process.
    ///
    /// # Errors
    /// No worker can start.
    pub(super) fn start_target(&mut self, job: Job) -> anyhow::Result<Job> {
        let target = self.start_fresh(job.purpose, &job.node, job.with.clone())?;
        Ok(Job { target: target.unwrap_or(NO_WORKER), is_awaited: target.is_none(), ..job })
    }

    fn start_fresh(&mut self, purpose: Purpose, node: &str, with: Option<PathBuf>) -> anyhow::Result<Option<u32>> {
        // Of the file before it is started: one that takes its place meanwhile is another.
        let stages = || FileName::of(&self.program_of(node, with.clone()));
        let staged = (purpose == Purpose::Stage).then(stages).transpose()?;
        let target = self.start_worker(node, with, true)?;
        if let (Some(target), Some(_)) = (target, staged) {
            self.is_staged(target, staged);
        }
        Ok(target)
    }

    fn begin_give(&mut self, nic: &str, give: &Give) -> Result<Job, Refusal> {
        let number = self.nic_by_name(nic)?;
        if !self.nodes.contains_key(&give.to) {
            return Err(self.no_node(&give.to));
        }
        self.is_free(&give.to, &[number])?;
        let card = &self.cards[&number];
        let from = card.node().to_owned();
        if card.closing.is_some() {
            return Err(Refusal::conflict(format!("{nic} is being closed")));
        }
        if self.has_strangers(card) {
            return Err(Refusal::conflict(format!(
                "workers that had {nic} are being ended, since their node is not trusted any more; ask again"
            )));
        }
        if let Some(vni) = card.vni() {
            return Err(Refusal::conflict(format!("{nic} is node {from}'s end of VNI {vni}, and no other node's")));
        }
        if let Some(vni) = self.config.node(&give.to).and_then(|node| node.vni.as_ref()) {
            return Err(Refusal::conflict(format!(
                "node {} is on VNI {vni}, and has no NIC beside that; name another node",
                give.to
            )));
        }
        if from == give.to {
            return Err(Refusal::conflict(format!(
                "{nic} is node {from}'s already; a fresh worker for it: tasuki worker upgrade {from}"
            )));
        }
        self.may_have(&give.to, number)?;
        let Some(can) = card.can() else {
            let why = card.trouble.clone().unwrap_or_else(|| "it is being opened".to_owned());
            return Err(Refusal::conflict(format!("{nic} is not open, so it cannot be given: {why}")));
        };
        let is_trusted = self.config.trust(&from, &give.to);
        let trust = if is_trusted { Trust::Full } else { Trust::None };
        let asked_for = give.method.map(Method::from);
        // A driver that is about to be replaced is none that lets go.
        let parked = !self.is_held(number) && (card.arbiter.is_none() || card.is_parked());
        let choose = if parked { method::choose_without_giver } else { method::choose };
        let choice = choose(&can, trust, asked_for)
            .map_err(|not| Refusal::conflict(format!("{nic} cannot go that way: {not}")))?;
        if choice.method.is_apart(trust) && give.state == Some(DriverStateBy::Store) {
            return Err(Refusal::conflict(format!(
                "{nic} goes by {}, which has no driver state to store; leave --state out, or ask for --method keep",
                choice.method
            )));
        }
        // If there is no such worker yet, the job waits for one.
        let target = self.taker_of(&give.to).map_err(Refusal::conflict)?.unwrap_or(NO_WORKER);
        Ok(Job {
            fenced_node: (!is_trusted).then_some(from),
            asked_for,
            fence_first: !is_trusted,
            parked,
            inflight: match give.inflight {
                Some(Inflight::Drop) => message::Inflight::Drop,
                _ => message::Inflight::Deliver,
            },
            store: give.state == Some(DriverStateBy::Store),
            ..Job::new(Purpose::Give, &give.to, target, VecDeque::from([number]))
        })
    }

    /// Begins the handover of a NIC that goes by itself.
    pub(super) fn begin_giving(&mut self, nic: &str, to: &str, may_go: bool) -> Result<(), Refusal> {
        let give = Give { to: to.to_owned(), method: None, inflight: None, state: None };
        let job = self.begin_give(nic, &give)?;
        self.jobs.push(Job { purpose: Purpose::FailOver, waits: !may_go, ..job });
        Ok(())
    }

    /// Returns the worker of a node that can be given a NIC now, if there is one.
    pub(super) fn taker_of(&self, node: &str) -> Result<Option<u32>, String> {
        if let Some(why) = self.why_without_interface(node) {
            return Err(why);
        }
        let serves = |number: &&u32| self.workers[number].serves();
        let present = self.present_workers_of(node);
        let target = present.iter().filter(serves).max_by_key(|number| self.is_needed(**number)).copied();
        match self.nodes.get(node).and_then(|node| node.trouble.as_ref()) {
            Some(why) if target.is_none() => Err(format!("node {node} has no worker now: {why}")),
            _ => Ok(target),
        }
    }

    /// Returns whether a job goes on with a NIC that no worker drives: it tries the next method after its taker has
    /// refused, or no worker drove it before.
    pub(super) fn goes_on(&self, nic: u32) -> bool {
        self.jobs.iter().any(|job| job.is_about(nic) && (job.refused.is_some() || job.parked))
    }

    /// Returns the other NICs of a node that a worker drives.
    fn others_of<'a>(&'a self, node: &'a str, nic: u32) -> impl Iterator<Item = u32> + 'a {
        let driven = self.cards.of(node).filter(|card| card.opened.is_some() && card.holder().is_some());
        driven.filter(move |card| card.number != nic).map(|card| card.number)
    }

    /// Returns whether a NIC of this node is about to go to a node that does not trust it while other NICs stay. The
    /// other NICs need a worker that never had the NIC that goes.
    pub(super) fn needs_a_worker_more(&self, node: &str) -> bool {
        let goes = |job: &&Job| job.fences(node);
        let nics = self.jobs.iter().filter(goes).filter_map(|job| job.todo.front().copied());
        { nics }.any(|nic| self.others_of(node, nic).next().is_some())
    }

    fn outcome(&self, at: usize, nic: u32, from: Option<u32>, failed: Option<&str>) -> Settled {
        let (job, card) = (&self.jobs[at], &self.cards[&nic]);
        let choice = self.choice(at, nic);
        let (method, because) =
            choice.map_or((card.method, String::new()), |choice| (choice.method, choice.because.to_owned()));
        let because = match job.refused {
            Some((refused, why)) => format!("{refused} was refused ({}); {because}", finding(why)),
            None => because,
        };
        let holder = card.holder().and_then(|holder| self.workers.get(&holder));
        let pause_ns = card.lease_page.pause_ns().filter(|_| failed.is_none());
        let name = card.name();
        let drives = holder.map_or_else(
            || format!("nobody drives {name}"),
            |holder| format!("{name} is driven by worker {} of node {}", holder.party(), holder.record.node),
        );
        let sentence = match (failed, from, pause_ns) {
            (Some(why), ..) => format!("{why}; {drives}"),
            (None, Some(from), Some(pause)) => {
                format!(
                    "{name} went from worker {from} to worker {} of node {} in {}, by {method}: {because}",
                    job.target,
                    job.node,
                    time(pause)
                )
            }
            (None, ..) => drives,
        };
        Settled {
            nic: name.to_owned(),
            done: failed.is_none(),
            worker: holder.map(Worker::party),
            pid: holder.map(|holder| holder.process.name().pid),
            node: holder.map(|holder| holder.record.node.clone()),
            method: method.into(),
            because,
            pause_ns,
            sentence,
        }
    }

    fn finish(&mut self, job: Job) {
        let Job { purpose, node: name, target, with, done, answer, .. } = job;
        if purpose == Purpose::Stage {
            return self.has_staged(&name, target, answer);
        }
        let is_upgrade = purpose == Purpose::Upgrade;
        if let Some(worker) = self.workers.get_mut(&target) {
            worker.wanted = false;
        }
        // A worker that was staged before another upgrade is of a generation that others are of.
        let its = self.workers.get(&target).map(|worker| worker.record.generation);
        let is_later = |its: &u32| *its > self.latest_generation(&name, target);
        let generation = its.filter(is_later).unwrap_or(self.latest_generation(&name, 0) + 1);
        if let (true, Some(node)) = (is_upgrade, self.nodes.get_mut(&name)) {
            node.record.generation = generation;
            if let Some(worker) = self.workers.get_mut(&target).filter(|worker| worker.record.staged.is_some()) {
                (worker.record.staged, worker.record.generation) = (None, node.record.generation);
                self.changes.push(Change::Worker(worker.record.clone()));
            }
            node.record.binary = with.or(node.record.binary.take());
            let record = node.record.clone();
            self.changes.push(Change::Node(name.clone(), record));
            crash::point("daemon.upgraded");
            // Givers are done. A stand-by stays one until a worker of the new program can stand by.
            let over = self
                .workers
                .of(&name)
                .filter(|worker| worker.record.generation != generation && worker.serves() && worker.nics.is_empty());
            for number in over.map(Worker::party).collect::<Vec<_>>() {
                self.retire(number);
            }
        }
        let said: Vec<_> = done.iter().map(|settled| settled.sentence.clone()).collect();
        let its = |card: &&Card| card.node() == name && card.vni().is_none() && card.closing.is_none();
        let its: Vec<&str> = self.cards.values().filter(its).map(Card::name).collect();
        let sentence = match (is_upgrade, said.is_empty()) {
            // It was not open when the upgrade began.
            (true, true) if !its.is_empty() => {
                format!("node {name} is now worker {target}, which drives {} once open", its.join(" and "))
            }
            (true, true) => format!("node {name} is now worker {target}; it has no NIC"),
            (true, false) => format!("node {name} is now worker {target}; {}", said.join("; ")),
            _ => said.join("; "),
        };
        if purpose == Purpose::Give {
            let went = |card: &&mut Card| done.iter().any(|settled| settled.nic == card.config.name);
            let gone =
                self.cards.values_mut().filter(went).filter_map(|card| card.fail_over.take().map(|_| card.number));
            gone.collect::<Vec<_>>().into_iter().for_each(|nic| self.record_nic(nic));
        }
        if let Some(answer) = answer {
            let _ = answer.send(Ok(Relayed { relays: done, sentence: sentence.clone() }));
        }
        self.note(About::node(&name), sentence);
    }

    fn fail(&mut self, mut job: Job, why: &str) {
        let (nic, answer, name, target) = (job.todo.front().copied(), job.answer.take(), job.node.clone(), job.target);
        let (purpose, from) = (job.purpose, job.asked.flatten());
        // `outcome` reads the job from the list: put it back for a moment.
        self.jobs.push(job);
        let at = self.jobs.len() - 1;
        let failed = nic.filter(|nic| purpose != Purpose::Stage && self.cards.contains_key(nic));
        let failed = failed.map(|nic| self.outcome(at, nic, from, Some(why)));
        let mut relays = self.jobs.pop().map(|job| job.done).unwrap_or_default();
        let said = failed.as_ref().map(|settled| settled.sentence.clone());
        let what = match purpose {
            Purpose::Stage => format!("nothing is staged for node {name}"),
            Purpose::Mend => format!("uplink {name} stays with two workers"),
            Purpose::Upgrade => format!("node {name} was not upgraded"),
            Purpose::Give | Purpose::FailOver => "the NIC was not given".to_owned(),
        };
        relays.extend(failed);
        let sentence = format!("{what}: {}", said.unwrap_or_else(|| why.to_owned()));
        match nic.filter(|_| purpose == Purpose::FailOver) {
            Some(nic) => self.did_not_fail_over(nic, why),
            None => self.note(About::node(&name), sentence.clone()),
        }
        self.is_staged(target, None);
        self.end_strangers(nic);
        if matches!(purpose, Purpose::Upgrade | Purpose::Stage) && !self.is_needed(target) {
            self.retire(target);
        }
        if let Some(answer) = answer {
            let _ = answer.send(Err(Refusal::Conflict { sentence, relays }));
        }
    }

    /// Ends workers that have the NIC's device bundle but are not trusted by its node: the NIC did not go to them.
    pub(super) fn end_strangers(&mut self, nic: Option<u32>) {
        let Some(card) = nic.and_then(|nic| self.cards.get(&nic)) else { return };
        let (name, node) = (card.name().to_owned(), card.node().to_owned());
        let is_stranger =
            |worker: &&Worker| !self.config.trust(&worker.record.node, &node) && worker.given.contains(&card.number);
        let strangers: Vec<u32> = self.workers.values().filter(is_stranger).map(Worker::party).collect();
        for number in strangers {
            self.kill_worker(number, format!("has the device bundle of {name}, which stays with node {node}"));
        }
    }
}
