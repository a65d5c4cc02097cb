//! The steps of a job: each is taken as soon as it can be, and a job waits in none.

use std::collections::VecDeque;
use std::time::Duration;

use tasuki_relay::arbiter::{Ask, Input, State};
use tasuki_relay::method::{self, Apart, Method, Trust};
use tasuki_relay::wire::{Plan, Reason, Use};
use tasuki_shm::crash;

use super::super::card::Card;
use super::super::deeds::party;
use super::super::worker::Readiness;
use super::super::{About, Supervisor, WORKER_TIMEOUT, cells, now};
use super::{Job, NO_WORKER, Purpose, finding};

/// Time a job may take beyond the sum of its limits.
const GRACE_TIME: Duration = Duration::from_secs(30);

/// How often the daemon retries a handover whose taker came too late. Retries help a machine that was busy once, and
/// not one that is always busy.
const LATE_MAX: u32 = 4;

/// The result of one step of a job.
enum Step {
    Wait,
    Again,
    Over,
    Fail(String),
}

impl Supervisor {
    pub(in crate::supervisor) fn go_on_with_jobs(&mut self) {
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
        if let Some(why) = self.jobs[at].failure.take() {
            return Step::Fail(why);
        }
        if self.jobs[at].is_awaited {
            return self.await_process(at);
        }
        let job = &self.jobs[at];
        let (target, purpose) = (job.target, job.purpose);
        if target == NO_WORKER {
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
        if now().saturating_sub(job.since) > limits.prepare() * 2 + limits.deadline() * 8 + GRACE_TIME {
            return Step::Fail("it has not settled in all the time that it may take".to_owned());
        }
        if !worker.serves() {
            return Step::Wait;
        }
        let Some(nic) = job.todo.front().copied() else {
            let late = self.opened_meanwhile(job);
            if !late.is_empty() {
                self.jobs[at].todo = late;
                return Step::Again;
            }
            if job.purpose == Purpose::Stage && !self.is_the_staged(target) {
                return Step::Fail("the program was changed while it was started; stage it again".to_owned());
            }
            return Step::Over;
        };
        let Some(card) = self.cards.get(&nic).filter(|card| card.opened.is_some()) else {
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
            None if card.needs_many_fds() && !worker.takes_many_fds() => Step::Fail(
                "its program is from before machines of more than 8 pairs of queues, and the node has one; end that, or start it with less"
                    .to_owned(),
            ),
            None if !worker.knows_sharing() && self.has_shared(&worker.record.node) => Step::Fail(
                "its program is from before an interface could have several queues, and one of the VNI has some; remove these, or name a later program"
                    .to_owned(),
            ),
            None => match self.attach(nic, target, purpose.relays(), choice.method) {
                true => Step::Again,
                // Other workers must let go of the NIC first.
                false => Step::Wait,
            },
            Some(Readiness::Preparing(since)) if now().saturating_sub(*since) > limits.prepare() => {
                Step::Fail(format!("worker {target} has not prepared within {} ms", limits.prepare_ms))
            }
            Some(Readiness::Preparing(_)) => Step::Wait,
            Some(Readiness::Unfit(reason)) => Step::Fail(reason.to_string()),
            Some(Readiness::Ready) if purpose == Purpose::Stage => {
                self.jobs[at].todo.pop_front();
                Step::Again
            }
            Some(Readiness::Ready) if card.holder() == Some(target) => {
                // The driver died meanwhile, and the target took over as a stand-by.
                self.note_outcome(at, nic, None);
                Step::Again
            }
            Some(Readiness::Ready) => match card.arbiter.as_ref().map(|arbiter| arbiter.state()) {
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

    /// Returns the NICs of a node that another worker than the target of its upgrade has by now: they were not open when it
    /// began, and workers of before got them. A job of its own cares for one that goes to another node.
    fn opened_meanwhile(&self, job: &Job) -> VecDeque<u32> {
        let is_late = |card: &&Card| {
            card.holder() != Some(job.target) && !self.jobs.iter().any(|other| other.is_about(card.number))
        };
        let upgrades = job.purpose == Purpose::Upgrade;
        self.open_cards_of(&job.node).filter(|card| upgrades && is_late(card)).map(|card| card.number).collect()
    }

    pub(super) fn choice(&self, at: usize, nic: u32) -> Result<method::Choice, method::Refused> {
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

    /// Starts the job's worker, once there is a process for it.
    fn await_process(&mut self, at: usize) -> Step {
        if now().saturating_sub(self.jobs[at].since) >= WORKER_TIMEOUT {
            let busy = "tasukid makes many other processes, and has not come to this one; ask again";
            let is_late = self.cells.is_late(&self.jobs[at].node);
            return Step::Fail(if is_late { cells::late() } else { busy.to_owned() });
        }
        let (purpose, node, with) = (self.jobs[at].purpose, self.jobs[at].node.clone(), self.jobs[at].with.clone());
        match self.start_fresh(purpose, &node, with) {
            Ok(None) => Step::Wait,
            Ok(Some(target)) => {
                (self.jobs[at].target, self.jobs[at].is_awaited) = (target, false);
                Step::Again
            }
            Err(error) => Step::Fail(format!("{error:#}")),
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

    /// Returns the node that a NIC was about to leave because it was lost, if a worker of it drives again.
    fn is_back(&self, at: usize) -> Option<&str> {
        let job = self.jobs.get(at).filter(|job| job.fails_over() && job.parked && job.asked.is_none())?;
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
        let bundle = card.opened.as_ref().map(|opened| (opened.bundle.kind, opened.bundle.version));
        let (kind, version) = bundle.unwrap_or_default();
        let store = match method {
            Method::Keep if card.vni().is_none() => match self.stored_version(at, driver, (kind, version)) {
                Ok(store) => store,
                Err(no_common) => return Step::Fail(no_common.to_string()),
            },
            _ => self.jobs[at].store.then_some(version),
        };
        let (Some(card), job) = (self.cards.get_mut(&nic), &mut self.jobs[at]) else { return Step::Again };
        let Some(to) = party(job.target) else { return Step::Again };
        let (purpose, fenced) = (job.purpose.relays(), job.fence_first);
        let handover = purpose == Use::Handover;
        let plan = Plan { method, handover, inflight: job.inflight, store, fenced };
        let ask = Ask { purpose, to, method, kind, version };
        job.asked = Some(driver);
        (card.last_outcome, card.method, card.plan) = (None, method, plan.fenced.then_some(plan));
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
        let why = card.last_outcome.take().and_then(|outcome| outcome.why);
        let stores =
            |driver: &u32| self.workers.get(driver).is_some_and(|worker| worker.asked.driver_states.contains(&nic));
        if let Some(driver) = driver.filter(stores) {
            // The giver sent the stored driver state before it let go, but the daemon may have heard the taker
            // first.
            self.on_worker_readable(driver);
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
        let why = card.last_outcome.as_ref().and_then(|outcome| outcome.why);
        let is_back = card.is_settled() && card.holder().is_some_and(|holder| holder != job.target);
        why == Some(Reason::FramesCame) && is_back && job.late < LATE_MAX
    }

    /// Returns the method and the reason if no worker drives the NIC because its taker does not trust the card. The
    /// last owner, which is untrusted and fenced, left something that cannot be undone, or left it so that the taker
    /// finds it late. If the caller asked for this very method, returns `None`, and the caller gets the reason.
    fn was_refused(&self, at: usize) -> Option<(Method, Reason)> {
        let job = &self.jobs[at];
        let card = job.asked().and_then(|nic| self.cards.get(&nic))?;
        let why = card.last_outcome.as_ref().and_then(|outcome| outcome.why)?;
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
        if !self.workers.get(&target).is_some_and(super::super::worker::Worker::serves) {
            job.target = NO_WORKER;
        }
        let Some(card) = self.cards.get_mut(&nic) else { return };
        card.last_outcome = None;
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
            self.workers.of(node).any(|worker| {
                worker.serves() && !worker.given.contains(&nic) && worker.nics.get(&other) == Some(&Readiness::Ready)
            })
        };
        self.others_of(node, nic).all(is_ready)
    }

    /// Records that a NIC has reached its target.
    fn note_outcome(&mut self, at: usize, nic: u32, from: Option<u32>) {
        let settled = self.outcome(at, nic, from, None);
        let job = &mut self.jobs[at];
        job.done.push(settled);
        job.todo.pop_front();
        job.asked = None;
    }

    /// Returns how a worker ended: the first event noted of it after it began, or was adopted.
    fn why_gone(&self, number: u32) -> String {
        let of_it = self.events.iter().filter(|event| event.worker == Some(number));
        let is_begin = |sentence: &&String| sentence.contains("has begun") || sentence.ends_with(" is adopted");
        let told = of_it.map(|event| &event.sentence).find(|sentence| !is_begin(sentence));
        told.cloned().unwrap_or_else(|| format!("worker {number} is gone"))
    }
}
