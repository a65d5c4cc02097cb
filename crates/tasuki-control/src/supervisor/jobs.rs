//! Upgrades and handovers on request: from the request to the answer.
//!
//! An upgrade starts a fresh worker, has it prepare every NIC of the node, and then relays one NIC after the other.
//! A handover has a worker of the other node prepare one NIC. The daemon tells the giver nothing until the taker has
//! said that it is ready, so a failure before that costs nothing.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tasuki_relay::arbiter::{Ask, Input, State};
use tasuki_relay::message::{self, ToWorker};
use tasuki_relay::method::{self, Apart, Method, Trust};
use tasuki_relay::wire::{Plan, Reason, Use};
use tasuki_shm::crash;

use super::deeds::{party, time};
use super::door::{Answer, No, Request};
use super::worker::Fit;
use super::{About, Supervisor, now};
use crate::api::types::{DriverStateBy, Give, Inflight, Relayed, Replaced, Settled, Stopped, Upgrade};
use crate::registry::Change;
use crate::spawn::not_startable;

/// Time a job may take beyond the sum of its limits.
const GRACE: Duration = Duration::from_secs(30);

/// How often the daemon retries a handover whose taker came too late. Retries help a machine that was busy once, and
/// not one that is always busy.
const LATE_MOST: u32 = 4;

/// No worker has this number: the job still waits for a worker to give the NIC to.
const NOBODY: u32 = 0;

/// A request under way.
#[derive(Debug)]
pub struct Job {
    purpose: Use,
    /// Whether the job only brings the two sides of an uplink together, at a worker that already runs.
    mends: bool,
    /// Whether the job only gets a worker ready.
    stages: bool,
    /// The node that is to have the NICs.
    node: String,
    /// The node that loses its NIC's driver to a fence.
    fenced_node: Option<String>,
    /// The worker that is to have the NICs.
    pub target: u32,
    /// For an upgrade: another program.
    with: Option<PathBuf>,
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
    /// Whether the NIC goes to its stand-by node by itself.
    fails_over: bool,
    /// Whether the taker only gets ready: the NIC's node is not lost yet.
    waits: bool,
    /// How often the taker came too late, so that frames had reached the old owner meanwhile.
    late: u32,
    /// The method by which the taker refused the card, and why.
    refused: Option<(Method, Reason)>,
    /// The driver of the card that was refused.
    gave: Option<u32>,
    since: Duration,
    /// Since when the job has looked for a worker to give the NIC to.
    looks_since: Duration,
    answer: Option<Answer<Relayed>>,
}

impl Job {
    fn new(purpose: Use, node: &str, target: u32, todo: VecDeque<u32>) -> Self {
        Job {
            purpose,
            mends: false,
            stages: false,
            node: node.to_owned(),
            fenced_node: None,
            target,
            with: None,
            todo,
            asked: None,
            asked_for: None,
            fence_first: false,
            inflight: message::Inflight::Deliver,
            store: false,
            done: Vec::new(),
            parked: false,
            fails_over: false,
            waits: false,
            late: 0,
            refused: None,
            gave: None,
            since: now(),
            looks_since: now(),
            answer: None,
        }
    }

    /// Creates a job without a caller: it moves these NICs of an uplink to a worker that has the rest, or could have
    /// all.
    pub fn mending(node: &str, nics: VecDeque<u32>, to: u32) -> Self {
        Job { mends: true, ..Job::new(Use::Upgrade, node, to, nics) }
    }

    /// Creates a job that gets a worker ready for these NICs.
    pub fn staging(node: &str, worker: u32, nics: VecDeque<u32>) -> Self {
        Job { stages: true, ..Job::new(Use::Upgrade, node, worker, nics) }
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

    /// Returns whether the NIC goes to its stand-by node by itself.
    pub fn fails_over(&self) -> bool {
        self.fails_over
    }

    /// Lets the taker have the NIC.
    pub fn may_go(&mut self) {
        self.waits = false;
    }

    /// Returns whether the NIC goes to its stand-by node by itself, and the job began less than `lately` ago.
    pub fn has_just_begun(&self, nic: u32, lately: Duration) -> bool {
        self.fails_over && !self.waits && self.is_about(nic) && now().saturating_sub(self.since) < lately
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

/// Returns the names there are, as the end of a sentence.
pub(super) fn there_are(names: impl Iterator<Item = impl AsRef<str>>) -> String {
    let names: Vec<_> = names.map(|name| name.as_ref().to_owned()).collect();
    if names.is_empty() { "there is none".to_owned() } else { format!("there are: {}", names.join(", ")) }
}

/// Returns the part of a reason before its first semicolon: the finding, without the advice.
fn finding(why: Reason) -> String {
    let sentence = why.to_string();
    sentence.split(';').next().unwrap_or_default().to_owned()
}

/// Returns that what is changed by hand now could contradict the steps to come.
fn applying() -> No {
    No::now("a configuration is being applied; ask again when that is done")
}

/// The result of one step of a job.
enum Step {
    Wait,
    Again,
    Over,
    Fail(String),
}

impl Supervisor {
    pub(super) fn answer_requests(&mut self) {
        let mut count = [0; 8];
        let _ = rustix::io::read(self.door.bell(), &mut count);
        // Requests wait until the daemon can answer them truthfully.
        if self.adopting {
            return;
        }
        while let Ok(request) = self.requests.try_recv() {
            self.answer_request(request);
        }
    }

    fn answer_request(&mut self, request: Request) {
        match request {
            Request::Status(answer) => drop(answer.send(Ok(self.status_view()))),
            Request::Nodes(answer) => drop(answer.send(Ok(self.node_views()))),
            Request::Workers(answer) => drop(answer.send(Ok(self.worker_views()))),
            Request::Nics(answer) => drop(answer.send(Ok(self.nic_views()))),
            Request::Events { since, answer } => {
                let events = self.events.iter().filter(|event| event.number > since).cloned().collect();
                drop(answer.send(Ok(events)));
            }
            Request::Counts { nic, answer } => self.ask_for_counts(&nic, answer),
            Request::Upgrade { node, upgrade, answer } => self.upgrade(&node, upgrade, answer),
            Request::Stage { node, staging, answer } => match self.begin_staging(&node, staging) {
                Ok(job) => self.jobs.push(Job { answer: Some(answer), ..job }),
                Err(no) => drop(answer.send(Err(no))),
            },
            Request::Unstage { node, answer } => drop(answer.send(self.unstage(&node))),
            Request::Give { nic, give, answer } => self.give(&nic, &give, answer),
            Request::Standby { answer, .. } if self.is_applying() => drop(answer.send(Err(applying()))),
            Request::Standby { nic, standby, answer } => drop(answer.send(self.set_standby_by_hand(&nic, standby))),
            Request::Metrics(answer) => drop(answer.send(Ok(self.metrics()))),
            Request::Configuration(answer) => drop(answer.send(self.written())),
            Request::Plan { apply, answer } => drop(answer.send(self.plan(&apply))),
            Request::Apply { apply, answer } => self.begin_applying(&apply, Some(answer)),
            Request::AddNode { answer, .. } if self.is_applying() => drop(answer.send(Err(applying()))),
            Request::AddNode { node, answer } => drop(answer.send(self.add_node(*node))),
            Request::RemoveNode { answer, .. } if self.is_applying() => drop(answer.send(Err(applying()))),
            Request::RemoveNode { node, answer } => self.begin_emptying(&node, answer),
            Request::Vnis(answer) => drop(answer.send(Ok(self.vni_views()))),
            Request::VniTable { vni, answer } => drop(answer.send(self.vni_table(&vni))),
            Request::VniStats { vni, answer } => drop(answer.send(self.vni_stats(&vni))),
            Request::Capture { of, snap, answer } => drop(answer.send(self.begin_capture(of, snap))),
            Request::EndCapture { number, answer } => drop(answer.send(self.end_capture(number))),
            Request::CaptureOver { number, frames, missed } => self.capture_over(number, frames, missed),
            Request::Replace { with, version, is_wide, answer } => {
                drop(answer.send(self.replace(with, version, is_wide)));
            }
            Request::Stop(answer) => self.begin_stopping(answer),
            Request::Note(sentence) => self.note(About::default(), sentence),
        }
    }

    /// Ends the loop, for another program to go on.
    fn replace(&mut self, with: PathBuf, version: String, is_wide: bool) -> Result<Replaced, No> {
        if self.stopping.is_some() || self.ended.is_some() {
            return Err(No::Ending);
        }
        if self.is_applying() || !self.jobs.is_empty() || !self.leaving.is_empty() || !self.emptying.is_empty() {
            return Err(No::now(
                "an upgrade, a handover, a node's removal or a configuration is under way; ask again when that has settled",
            ));
        }
        if let Some(why) = self.current.has_changed() {
            return Err(No::now(why));
        }
        if let Some(label) = self.wide_client().filter(|_| !is_wide) {
            return Err(No::now(format!(
                "{} is from before machines of more than 8 pairs of queues, and the one at {label} has more; end it, or start it with less",
                with.display()
            )));
        }
        // The next one knows what is written and kept, and no more. A disk that is full shows when it is written to.
        self.changes.push(Change::Party(self.last_party));
        self.flush();
        self.deposit();
        if let Some(trouble) = self.registry.trouble() {
            return Err(No::now(format!("tasukid stays what it is: {trouble}")));
        }
        if self.is_depositing() {
            return Err(No::now(
                "tasukid stays what it is, for its keeper does not have all yet that the next one needs; ask again (tasuki status says if it stays so)",
            ));
        }
        let sentence = format!("tasukid goes on as {}, version {version}", with.display());
        self.note(About::default(), sentence.clone());
        self.ended = Some(super::Ended::Replaced(with));
        Ok(Replaced { version, sentence })
    }

    pub(super) fn no_node(&self, name: &str) -> No {
        No::Unknown(format!("there is no node {name:?}; {}", there_are(self.nodes.keys())))
    }

    pub(super) fn nic_by_name(&self, name: &str) -> Result<u32, No> {
        let found = self.cards.values().find(|card| card.name() == name).map(|card| card.number);
        found.ok_or_else(|| {
            No::Unknown(format!("there is no NIC {name:?}; {}", there_are(self.cards.values().map(|card| card.name()))))
        })
    }

    fn ask_for_counts(&mut self, nic: &str, answer: Answer<crate::api::types::Counts>) {
        let asked = self.nic_by_name(nic).and_then(|number| {
            let holder = self.cards[&number].holder().and_then(|holder| self.workers.get_mut(&holder));
            let worker = holder.ok_or_else(|| {
                No::now(format!("no worker drives {nic}, so there are no counters; tasuki nic list says why"))
            })?;
            let sent = worker.write(&ToWorker::Counts, &[]);
            sent.map_err(|errno| {
                No::now(format!("the worker that drives {nic} is not to be asked ({errno}); ask again"))
            })?;
            worker.asked.counts = true;
            Ok((number, worker.party()))
        });
        match asked {
            Ok((number, worker)) => self.counting.push((number, worker, now(), answer)),
            Err(no) => drop(answer.send(Err(no))),
        }
    }

    /// Checks that no other job relays this node or one of these NICs, that the node stays, and that the daemon is
    /// not stopping.
    pub(super) fn is_free(&self, node: &str, nics: &[u32]) -> Result<(), No> {
        if self.stopping.is_some() {
            return Err(No::Ending);
        }
        if self.leaves(node) {
            return Err(No::now(format!("node {node} is being removed")));
        }
        let busy = self.jobs.iter().find(|job| job.node == node || job.todo.iter().any(|nic| nics.contains(nic)));
        match busy {
            Some(job) => Err(No::now(format!(
                "an upgrade or a handover of node {} is under way; ask again when that has settled",
                job.node
            ))),
            None => Ok(()),
        }
    }

    /// Returns the NICs a worker of another program would have, if that program can be started now.
    pub(super) fn nics_to_upgrade(&self, node: &str, with: Option<&Path>) -> Result<VecDeque<u32>, No> {
        if !self.nodes.contains_key(node) {
            return Err(self.no_node(node));
        }
        let is_its = |card: &&super::card::Card| card.node == node && card.closing.is_none();
        let its = self.cards.values().filter(is_its).filter(|card| card.kept.is_some());
        let nics: VecDeque<u32> = its.map(|card| card.number).collect();
        self.is_free(node, nics.as_slices().0)?;
        match with.and_then(|path| Some((path, not_startable(path)?))) {
            Some((path, why)) => Err(No::Wrong(format!("{} {why}", path.display()))),
            None => Ok(nics),
        }
    }

    pub(super) fn upgrade(&mut self, node: &str, upgrade: Upgrade, answer: Answer<Relayed>) {
        match self.begin_upgrade(node, upgrade) {
            Ok(job) => self.jobs.push(Job { answer: Some(answer), ..job }),
            Err(no) => drop(answer.send(Err(no))),
        }
    }

    pub(super) fn give(&mut self, nic: &str, give: &Give, answer: Answer<Relayed>) {
        let card = self.cards.values().find(|card| card.name() == nic);
        let longer = card.and_then(|card| self.config.too_long_for(&card.config, &give.to));
        let longer = longer.map_or(Ok(()), |why| Err(No::now(format!("nic {nic:?}: {why}"))));
        match longer.and_then(|()| self.begin_give(nic, give)) {
            Ok(job) => self.jobs.push(Job { answer: Some(answer), ..job }),
            Err(no) => drop(answer.send(Err(no))),
        }
    }

    fn begin_upgrade(&mut self, node: &str, upgrade: Upgrade) -> Result<Job, No> {
        let Upgrade { with, state } = upgrade;
        let nics = self.nics_to_upgrade(node, with.as_deref())?;
        let end = nics.iter().find_map(|nic| self.cards[nic].vni().map(|_| self.cards[nic].name()));
        if let Some(end) = end.filter(|_| state == Some(DriverStateBy::Store)) {
            return Err(No::now(format!(
                "{end} has no driver state to store: a successor reads everything from the node's memory; leave --state out"
            )));
        }
        if let Some(node) = self.nodes.get_mut(node) {
            // The caller has looked at the causes of these deaths.
            (node.deaths, node.not_before, node.trouble) = (Vec::new(), Duration::ZERO, None);
            node.mending = Default::default();
        }
        let staged = self.staged_as(node, &self.program_of(node, with.clone()));
        let started = staged.map_or_else(|| self.start_worker(node, with.clone(), true), Ok);
        let target = started.map_err(|error| No::now(format!("no fresh worker for node {node}: {error:#}")))?;
        Ok(Job { with, store: state == Some(DriverStateBy::Store), ..Job::new(Use::Upgrade, node, target, nics) })
    }

    fn begin_give(&mut self, nic: &str, give: &Give) -> Result<Job, No> {
        let number = self.nic_by_name(nic)?;
        if !self.nodes.contains_key(&give.to) {
            return Err(self.no_node(&give.to));
        }
        self.is_free(&give.to, &[number])?;
        let card = &self.cards[&number];
        let from = card.node.clone();
        if card.closing.is_some() {
            return Err(No::now(format!("{nic} is being closed")));
        }
        if self.has_strangers(card) {
            return Err(No::now(format!(
                "workers that had {nic} are being ended, since their node is not trusted any more; ask again"
            )));
        }
        if let Some(vni) = card.vni() {
            return Err(No::now(format!("{nic} is node {from}'s end of VNI {vni}, and no other node's")));
        }
        if let Some(vni) = self.config.node(&give.to).and_then(|node| node.vni.as_ref()) {
            return Err(No::now(format!(
                "node {} is on VNI {vni}, and has no NIC beside that; name another node",
                give.to
            )));
        }
        if from == give.to {
            return Err(No::now(format!(
                "{nic} is node {from}'s already; a fresh worker for it: tasuki worker upgrade {from}"
            )));
        }
        self.may_have(&give.to, number)?;
        let Some(can) = card.can() else {
            let why = card.trouble.clone().unwrap_or_else(|| "it is being opened".to_owned());
            return Err(No::now(format!("{nic} is not open, so it cannot be given: {why}")));
        };
        let is_trusted = self.config.trust(&from, &give.to);
        let trust = if is_trusted { Trust::Full } else { Trust::None };
        let asked_for = give.method.map(Method::from);
        // A driver that is about to be replaced is none that lets go.
        let parked = !self.is_held(number) && (card.arbiter.is_none() || card.is_parked());
        let choose = if parked { method::choose_without_giver } else { method::choose };
        let choice =
            choose(&can, trust, asked_for).map_err(|not| No::now(format!("{nic} cannot go that way: {not}")))?;
        if choice.method.is_apart(trust) && give.state == Some(DriverStateBy::Store) {
            return Err(No::now(format!(
                "{nic} goes by {}, which has no driver state to store; leave --state out, or ask for --method keep",
                choice.method
            )));
        }
        // If there is no such worker yet, the job waits for one.
        let target = self.taker_of(&give.to).map_err(No::now)?.unwrap_or(NOBODY);
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
            ..Job::new(Use::Handover, &give.to, target, VecDeque::from([number]))
        })
    }

    /// Begins the handover of a NIC that goes by itself.
    pub(super) fn begin_giving(&mut self, nic: &str, to: &str, may_go: bool) -> Result<(), No> {
        let give = Give { to: to.to_owned(), method: None, inflight: None, state: None };
        let job = self.begin_give(nic, &give)?;
        self.jobs.push(Job { fails_over: true, waits: !may_go, ..job });
        Ok(())
    }

    /// Returns the worker of a node that can be given a NIC now, if there is one.
    pub(super) fn taker_of(&self, node: &str) -> Result<Option<u32>, String> {
        let serves = |number: &&u32| self.workers[number].serves();
        let staff = self.staff_of(node);
        let target = staff.iter().filter(serves).max_by_key(|number| self.is_needed(**number)).copied();
        match self.nodes.get(node).and_then(|node| node.trouble.as_ref()) {
            Some(why) if target.is_none() => Err(format!("node {node} has no worker now: {why}")),
            _ => Ok(target),
        }
    }

    /// Looks for a worker to give the NIC to.
    fn look_for_taker(&mut self, at: usize) -> Step {
        let job = &self.jobs[at];
        let limits = &self.config.daemon;
        match self.taker_of(&job.node) {
            Err(why) => Step::Fail(why),
            Ok(Some(target)) => {
                self.jobs[at].target = target;
                Step::Again
            }
            Ok(None) if now().saturating_sub(job.looks_since) > limits.prepare() => Step::Fail(format!(
                "node {} has had no worker within {} ms; tasuki events says why",
                job.node, limits.prepare_ms
            )),
            Ok(None) => Step::Wait,
        }
    }

    pub(super) fn go_on_with_jobs(&mut self) {
        let count = self.jobs.len();
        let mut at = 0;
        while at < self.jobs.len() {
            match self.step(at) {
                Step::Again => {}
                Step::Wait => at += 1,
                Step::Over => {
                    let job = self.jobs.remove(at);
                    self.finish(job);
                }
                Step::Fail(why) => {
                    let job = self.jobs.remove(at);
                    self.fail(job, &why);
                }
            }
        }
        if self.jobs.len() < count {
            // The thread that answers may want this CPU.
            std::thread::yield_now();
        }
    }

    fn step(&mut self, at: usize) -> Step {
        let job = &self.jobs[at];
        let (target, purpose) = (job.target, job.purpose);
        if target == NOBODY {
            return self.look_for_taker(at);
        }
        if self.was_late(at) {
            self.jobs[at].late += 1;
            self.try_again(at);
            return Step::Again;
        }
        if let Some(refused) = self.was_refused(at) {
            (self.jobs[at].refused, self.jobs[at].gave) = (Some(refused), self.jobs[at].asked.flatten());
            self.try_again(at);
            return Step::Again;
        }
        if let Some(node) = self.is_back(at) {
            return Step::Fail(format!("a worker of node {node} drives it again"));
        }
        let job = &self.jobs[at];
        let limits = &self.config.daemon;
        let worker = self.workers.get(&target);
        // Wait until a dying worker is dead, and then until the NIC has a driver: the answer names that driver.
        let settles = job.asked().and_then(|nic| self.cards.get(&nic)).is_some_and(|card| !card.is_settled());
        if worker.is_some_and(|worker| !worker.counts()) || worker.is_none() && settles {
            return Step::Wait;
        }
        let Some(worker) = worker else { return Step::Fail(self.why_gone(target)) };
        if now().saturating_sub(job.since) > limits.prepare() * 2 + limits.deadline() * 8 + GRACE {
            return Step::Fail("it has not settled in all the time that it may take".to_owned());
        }
        if !worker.serves() {
            return Step::Wait;
        }
        let Some(nic) = job.todo.front().copied() else {
            if job.stages && !self.is_the_staged(target) {
                return Step::Fail("the program was changed while it was started; stage it again".to_owned());
            }
            return Step::Over;
        };
        let Some(card) = self.cards.get(&nic).filter(|card| card.kept.is_some()) else {
            self.jobs[at].todo.pop_front();
            return Step::Again;
        };
        if let Some(driver) = job.asked {
            return self.wait_for_outcome(at, nic, driver);
        }
        let choice = match self.choice(at, nic) {
            Ok(choice) => choice,
            Err(not) => return Step::Fail(format!("{} cannot go that way: {not}", card.name())),
        };
        if job.parked && card.arbiter.is_none() {
            self.begin_arbiter(nic);
            return Step::Again;
        }
        match worker.nics.get(&nic) {
            None if card.is_wide() && !worker.takes_wide() => Step::Fail(
                "its program is from before machines of more than 8 pairs of queues, and the node has one; end that, or start it with less"
                    .to_owned(),
            ),
            None if !worker.knows_sharing() && self.has_shared(&worker.record.node) => Step::Fail(
                "its program is from before an interface could have several queues, and one of the VNI has some; remove these, or name a later program"
                    .to_owned(),
            ),
            None => match self.attach(nic, target, purpose, choice.method) {
                true => Step::Again,
                // Other workers must let go of the NIC first.
                false => Step::Wait,
            },
            Some(Fit::Preparing(since)) if now().saturating_sub(*since) > limits.prepare() => {
                Step::Fail(format!("worker {target} has not prepared within {} ms", limits.prepare_ms))
            }
            Some(Fit::Preparing(_)) => Step::Wait,
            Some(Fit::Unfit(reason)) => Step::Fail(reason.to_string()),
            Some(Fit::Ready) if job.stages => {
                self.jobs[at].todo.pop_front();
                Step::Again
            }
            Some(Fit::Ready) if card.holder() == Some(target) => {
                // The driver died meanwhile, and the target took over as a stand-by.
                self.note_outcome(at, nic, None);
                Step::Again
            }
            Some(Fit::Ready) => match card.arbiter.as_ref().map(|arbiter| arbiter.state()) {
                Some(State::Steady) if self.others_are_cared_for(at, nic) => self.ask_arbiter(at, nic, choice.method),
                // All workers of the old node that had the NIC are fenced, and its other workers do not get it
                // meanwhile. Or it had no worker left before.
                Some(State::Parked) if !job.waits && (job.refused.is_some() || job.parked) => {
                    self.ask_arbiter(at, nic, choice.method)
                }
                // Something else is under way. If no worker drives the NIC, the target gets the lease without a
                // request.
                _ => Step::Wait,
            },
        }
    }

    fn choice(&self, at: usize, nic: u32) -> Result<method::Choice, method::NotPossible> {
        let job = &self.jobs[at];
        let trust = if job.fence_first { Trust::None } else { Trust::Full };
        let next = |can: &method::Card| job.refused.and_then(|(refused, _)| method::after(can, trust, refused));
        match self.cards.get(&nic).and_then(|card| card.can()) {
            Some(can) => {
                let choose = if job.parked { method::choose_without_giver } else { method::choose };
                next(&can).map_or_else(|| choose(&can, trust, job.asked_for), Ok)
            }
            None => Ok(method::Choice { method: Method::Cold, because: "nothing is known of the card" }),
        }
    }

    /// Returns whether a job goes on with a NIC that no worker drives: it tries the next method after its taker has
    /// refused, or no worker drove it before.
    pub(super) fn goes_on(&self, nic: u32) -> bool {
        self.jobs.iter().any(|job| job.is_about(nic) && (job.refused.is_some() || job.parked))
    }

    /// Returns the node that a NIC was about to leave because it was lost, if a worker of it drives again.
    fn is_back(&self, at: usize) -> Option<&str> {
        let job = self.jobs.get(at).filter(|job| job.fails_over && job.parked && job.asked.is_none())?;
        let card = job.todo.front().and_then(|nic| self.cards.get(nic))?;
        let holder = self.workers.get(&card.holder().filter(|_| card.is_settled())?)?;
        Some(&holder.record.node[..]).filter(|node| *node != job.node)
    }

    /// Returns the version of the driver state that goes through the store, if it goes that way.
    fn stored_version(
        &self,
        at: usize,
        driver: Option<u32>,
        (kind, version): (u32, u32),
    ) -> Result<Option<u32>, Apart> {
        let (job, target) = (&self.jobs[at], self.jobs[at].target);
        let Some(driver) = driver else { return Ok(None) };
        let its = |number| self.workers.get(&number).and_then(|worker| worker.versions(kind));
        let Some((giver, taker)) = its(driver).zip(its(target)) else { return Ok(job.store.then_some(version)) };
        Ok(match method::state(giver, taker, job.store)? {
            method::State::InPlace => None,
            method::State::Store { version } => Some(version),
        })
    }

    fn ask_arbiter(&mut self, at: usize, nic: u32, method: Method) -> Step {
        let Some(card) = self.cards.get(&nic) else { return Step::Again };
        let driver = card.holder().or(self.jobs[at].gave);
        let bundle = card.kept.as_ref().map(|kept| (kept.bundle.kind, kept.bundle.version));
        let (kind, version) = bundle.unwrap_or_default();
        let store = match method {
            Method::Keep if card.vni().is_none() => match self.stored_version(at, driver, (kind, version)) {
                Ok(store) => store,
                Err(apart) => return Step::Fail(apart.to_string()),
            },
            _ => self.jobs[at].store.then_some(version),
        };
        let (Some(card), job) = (self.cards.get_mut(&nic), &mut self.jobs[at]) else { return Step::Again };
        let Some(to) = party(job.target) else { return Step::Again };
        let (handover, fenced) = (job.purpose == Use::Handover, job.fence_first);
        let plan = Plan { method, handover, inflight: job.inflight, store, fenced };
        let ask = Ask { purpose: job.purpose, to, method, kind, version };
        job.asked = Some(driver);
        (card.said, card.method, card.plan) = (None, method, plan.fenced.then_some(plan));
        // Both sides must know the plan before either gets its order.
        for side in [driver, Some(job.target)].into_iter().flatten() {
            if let Some(worker) = self.workers.get_mut(&side) {
                let _ = worker.plan(nic, plan);
                if plan.store.is_some() && driver == Some(side) {
                    worker.asked.driver_states.push(nic);
                }
            }
        }
        crash::point("daemon.planned");
        self.tell_arbiter(nic, Input::Asked(ask));
        crash::point("daemon.asked");
        Step::Again
    }

    fn wait_for_outcome(&mut self, at: usize, nic: u32, driver: Option<u32>) -> Step {
        let Some(card) = self.cards.get_mut(&nic) else { return Step::Wait };
        if !card.is_settled() {
            return Step::Wait;
        }
        let why = card.said.take().and_then(|told| told.why);
        let stores =
            |driver: &u32| self.workers.get(driver).is_some_and(|worker| worker.asked.driver_states.contains(&nic));
        if let Some(driver) = driver.filter(stores) {
            // The giver sent the stored driver state before it let go, but the daemon may have heard the taker
            // first.
            self.worker_says(driver);
        }
        let Some(card) = self.cards.get(&nic) else { return Step::Wait };
        if card.holder() == Some(self.jobs[at].target) {
            self.note_outcome(at, nic, driver);
            return Step::Again;
        }
        Step::Fail(why.map_or_else(
            || "it was refused; tasuki events names the worker that refused".to_owned(),
            |why| why.to_string(),
        ))
    }

    /// Returns whether the NIC is driven as before because its taker came too late, and has not come too late too
    /// often.
    fn was_late(&self, at: usize) -> bool {
        let job = &self.jobs[at];
        let Some(card) = job.asked().and_then(|nic| self.cards.get(&nic)) else { return false };
        let why = card.said.as_ref().and_then(|told| told.why);
        let is_back = card.is_settled() && card.holder().is_some_and(|holder| holder != job.target);
        why == Some(Reason::FramesCame) && is_back && job.late < LATE_MOST
    }

    /// Returns the method and the reason if no worker drives the NIC because its taker does not trust the card. The
    /// last owner, which is untrusted and fenced, left something that cannot be undone, or left it so that the taker
    /// finds it late. If the caller asked for this very method, returns `None`, and the caller gets the reason.
    fn was_refused(&self, at: usize) -> Option<(Method, Reason)> {
        let job = &self.jobs[at];
        let card = job.asked().and_then(|nic| self.cards.get(&nic))?;
        let why = card.said.as_ref().and_then(|told| told.why)?;
        let is_odd = matches!(why, Reason::LeftBehind { .. } | Reason::FramesCame);
        let may = job.fence_first && job.asked_for.is_none() && job.refused.is_none();
        (is_odd && may && card.is_settled() && card.holder().is_none()).then_some((card.method, why))
    }

    /// Tries the relay again: by the same method, as the taker may be quicker the next time, or by the next method.
    fn try_again(&mut self, at: usize) {
        let job = &mut self.jobs[at];
        let (Some(nic), target, node) = (job.asked(), job.target, job.node.clone()) else { return };
        (job.asked, job.looks_since) = (None, now());
        // The target was told to leave the NIC, or is told now. If that was its last NIC it ends, and another worker
        // comes.
        self.dismiss(nic, target);
        let job = &mut self.jobs[at];
        if !self.workers.get(&target).is_some_and(super::worker::Worker::serves) {
            job.target = NOBODY;
        }
        let Some(card) = self.cards.get_mut(&nic) else { return };
        card.said = None;
        let name = card.name().to_owned();
        let sentence = match self.jobs[at].refused {
            None => format!(
                "frames came before worker {target} could take {name}, which stays where it is; it is given once more"
            ),
            Some((method, why)) => format!(
                "worker {target} refuses {name} by {method} ({}); nobody of its old node can run, and it is given the next way",
                finding(why)
            ),
        };
        self.note(About::worker(&node, target), sentence);
    }

    /// Returns whether, for each other NIC of the node, a worker stands by that never had this one. The workers of
    /// the node that had it are all to be fenced.
    fn others_are_cared_for(&self, at: usize, nic: u32) -> bool {
        let Some(node) = self.jobs[at].fenced_node.as_deref() else { return true };
        let is_ready = |other: u32| {
            self.workers.values().any(|worker| {
                worker.record.node == node
                    && worker.serves()
                    && !worker.given.contains(&nic)
                    && worker.nics.get(&other) == Some(&Fit::Ready)
            })
        };
        self.others_of(node, nic).all(is_ready)
    }

    /// Returns the other NICs of a node that a worker drives.
    fn others_of<'a>(&'a self, node: &'a str, nic: u32) -> impl Iterator<Item = u32> + 'a {
        let driven = self.cards.values().filter(|card| card.kept.is_some() && card.holder().is_some());
        driven.filter(move |card| card.node == node && card.number != nic).map(|card| card.number)
    }

    /// Returns whether a NIC of this node is about to go to a node that does not trust it while other NICs stay. The
    /// other NICs need a worker that never had the NIC that goes.
    pub(super) fn needs_a_worker_more(&self, node: &str) -> bool {
        let goes = |job: &&Job| job.fences(node);
        let nics = self.jobs.iter().filter(goes).filter_map(|job| job.todo.front().copied());
        { nics }.any(|nic| self.others_of(node, nic).next().is_some())
    }

    /// Records that a NIC has reached its target.
    fn note_outcome(&mut self, at: usize, nic: u32, from: Option<u32>) {
        let settled = self.outcome(at, nic, from, None);
        let job = &mut self.jobs[at];
        job.done.push(settled);
        job.todo.pop_front();
        job.asked = None;
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
            worker: holder.map(super::worker::Worker::party),
            pid: holder.map(|holder| holder.process.name().pid),
            node: holder.map(|holder| holder.record.node.clone()),
            method: method.into(),
            because,
            pause_ns,
            sentence,
        }
    }

    fn finish(&mut self, job: Job) {
        let Job { purpose, mends, stages, fails_over, node: name, target, with, done, answer, .. } = job;
        if stages {
            return self.has_staged(&name, target, answer);
        }
        let is_upgrade = purpose == Use::Upgrade && !mends;
        if let Some(worker) = self.workers.get_mut(&target) {
            worker.wanted = false;
        }
        if let (true, Some(node)) = (is_upgrade, self.nodes.get_mut(&name)) {
            node.record.generation += 1;
            if let Some(worker) = self.workers.get_mut(&target).filter(|worker| worker.record.staged.is_some()) {
                (worker.record.staged, worker.record.generation) = (None, node.record.generation);
                self.changes.push(Change::Worker(worker.record.clone()));
            }
            node.record.binary = with.or(node.record.binary.take());
            let record = node.record.clone();
            self.changes.push(Change::Node(name.clone(), record));
            crash::point("daemon.upgraded");
            // Givers are done. A stand-by stays one until a worker of the new program can stand by.
            let generation = self.nodes[&name].record.generation;
            let over = self.workers.values().filter(|worker| {
                worker.record.node == name
                    && worker.record.generation != generation
                    && worker.serves()
                    && worker.nics.is_empty()
            });
            for number in over.map(super::worker::Worker::party).collect::<Vec<_>>() {
                self.retire(number);
            }
        }
        let said: Vec<_> = done.iter().map(|settled| settled.sentence.clone()).collect();
        let sentence = match (is_upgrade, said.is_empty()) {
            (true, true) => format!("node {name} is now worker {target}; it has no NIC"),
            (true, false) => format!("node {name} is now worker {target}; {}", said.join("; ")),
            _ => said.join("; "),
        };
        if purpose == Use::Handover && !fails_over {
            let went = |card: &&mut super::card::Card| done.iter().any(|settled| settled.nic == card.config.name);
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
        let (purpose, mends, stages, from) = (job.purpose, job.mends, job.stages, job.asked.flatten());
        let fails_over = job.fails_over;
        // `outcome` reads the job from the list: put it back for a moment.
        self.jobs.push(job);
        let at = self.jobs.len() - 1;
        let failed = nic.filter(|nic| !stages && self.cards.contains_key(nic));
        let failed = failed.map(|nic| self.outcome(at, nic, from, Some(why)));
        let mut relays = self.jobs.pop().map(|job| job.done).unwrap_or_default();
        let said = failed.as_ref().map(|settled| settled.sentence.clone());
        let what = match purpose {
            Use::Upgrade if stages => format!("nothing is staged for node {name}"),
            Use::Upgrade if mends => format!("uplink {name} stays with two workers"),
            Use::Upgrade => format!("node {name} was not upgraded"),
            _ => "the NIC was not given".to_owned(),
        };
        relays.extend(failed);
        let sentence = format!("{what}: {}", said.unwrap_or_else(|| why.to_owned()));
        match nic.filter(|_| fails_over) {
            Some(nic) => self.did_not_fail_over(nic, why),
            None => self.note(About::node(&name), sentence.clone()),
        }
        self.is_staged(target, None);
        self.end_strangers(nic);
        if purpose == Use::Upgrade && !mends && !self.is_needed(target) {
            self.retire(target);
        }
        if let Some(answer) = answer {
            let _ = answer.send(Err(No::Failed { sentence, relays }));
        }
    }

    /// Ends workers that have the NIC's device bundle but are not trusted by its node: the NIC did not go to them.
    fn end_strangers(&mut self, nic: Option<u32>) {
        let Some(card) = nic.and_then(|nic| self.cards.get(&nic)) else { return };
        let (name, node) = (card.name().to_owned(), card.node.clone());
        let is_stranger = |worker: &&super::worker::Worker| {
            !self.config.trust(&worker.record.node, &node) && worker.given.contains(&card.number)
        };
        let strangers: Vec<u32> = self.workers.values().filter(is_stranger).map(super::worker::Worker::party).collect();
        for number in strangers {
            self.condemn(number, format!("has the device bundle of {name}, which stays with node {node}"));
        }
    }

    /// Returns how a worker ended: the first event noted of it after it began, or was adopted.
    fn why_gone(&self, number: u32) -> String {
        let of_it = self.events.iter().filter(|event| event.worker == Some(number));
        let is_begin = |sentence: &&String| sentence.contains("has begun") || sentence.ends_with(" is adopted");
        let told = of_it.map(|event| &event.sentence).find(|sentence| !is_begin(sentence));
        told.cloned().unwrap_or_else(|| format!("worker {number} is gone"))
    }

    fn begin_stopping(&mut self, answer: Answer<Stopped>) {
        if self.stopping.is_some() {
            drop(answer.send(Err(No::Ending)));
            return;
        }
        self.note(About::default(), "everything is to stop");
        for job in std::mem::take(&mut self.jobs) {
            job.answer.into_iter().for_each(|answer| drop(answer.send(Err(No::Ending))));
        }
        self.end_applying();
        let workers: Vec<u32> = self.workers.keys().copied().collect();
        let count = u32::try_from(workers.len()).unwrap_or(u32::MAX);
        self.stopping = Some((now(), count, Some(answer)));
        for number in workers {
            if let Some(worker) = self.workers.get_mut(&number) {
                worker.stage = super::worker::Stage::Leaving(now());
                let _ = worker.write(&ToWorker::End, &[]);
            }
        }
    }

    pub(super) fn go_on_stopping(&mut self) {
        let Some((since, count, _)) = self.stopping else { return };
        let is_late = now().saturating_sub(since) >= super::PATIENCE / 2;
        if !self.workers.is_empty() {
            if is_late {
                self.workers.values().for_each(|worker| worker.process.kill());
            }
            return;
        }
        // Switch cards off once no worker drives them any more.
        self.end_cards(is_late);
        if self.cards.values().any(|card| card.model.is_some()) {
            return;
        }
        let sentence = format!("{count} workers have ended, and so does tasukid");
        if let Some((.., Some(answer))) = self.stopping.take() {
            let _ = answer.send(Ok(Stopped { workers: count, sentence }));
        }
        self.ended = Some(super::Ended::Everything);
    }
}
