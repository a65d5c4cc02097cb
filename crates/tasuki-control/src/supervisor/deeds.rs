//! Carries out the decisions of arbiters.

use std::collections::VecDeque;
use std::num::NonZeroU32;

use tasuki_relay::arbiter::{Arbiter, Do, Input, Node, RelayOutcome, State};
use tasuki_relay::message::{ToWorker, lease_page};
use tasuki_relay::method::Method;
use tasuki_relay::wire::{Order, Reason};
use tasuki_relay::{ARBITER, Party, Tenure};
use tasuki_shm::crash;

use super::deposits::Key;
use super::worker::{Stage, why_missed};
use super::{About, Supervisor, nanoseconds, now};
use crate::cgroup::Group;
use crate::registry::Change;

/// Longest time to wait for a process to freeze; it takes some 50 µs for each of its CPUs. If it has not stopped by
/// then, the daemon waits for its death.
const FREEZE_TIMEOUT: std::time::Duration = std::time::Duration::from_millis(1);

/// Longest time to spin until a process has stopped: after that it may be waiting for the daemon's CPU.
const SPIN_TIME_MAX: std::time::Duration = std::time::Duration::from_micros(200);

/// Longest time that a worker stays frozen during a relay. The next driver does not wait for a process that died
/// while it talked to a device, but does wait for a frozen one.
pub(super) const FROZEN_TIME_MAX: std::time::Duration = std::time::Duration::from_millis(2);

/// A frozen worker that the daemon has yet to end.
#[derive(Debug)]
pub(super) struct Frozen {
    /// The NIC for whose sake it is frozen.
    nic: u32,
    number: u32,
    because: String,
    pub since: std::time::Duration,
}

/// A stand-by that stays frozen while its node's driver releases the NIC, and is fenced then.
#[derive(Debug)]
pub(super) struct Ahead {
    nic: u32,
    number: u32,
    pub since: std::time::Duration,
}

/// Time beyond the usual for a card that starts anew: it negotiates its link.
const COLD_START_EXTRA_TIME: std::time::Duration = std::time::Duration::from_secs(10);

/// Returns a worker's number as arbiters use it.
pub(super) fn party(number: u32) -> Option<Party> {
    NonZeroU32::new(number).map(Party)
}

impl Supervisor {
    /// Tells the arbiter of a NIC, and does all that follows before anything else (Y5).
    pub(super) fn tell_arbiter(&mut self, nic: u32, input: Input) {
        let mut inputs = VecDeque::from([input]);
        while let Some(input) = inputs.pop_front() {
            let Some(arbiter) = self.cards.get_mut(&nic).and_then(|card| card.arbiter.as_mut()) else { return };
            match arbiter.hear(&self.table, input) {
                Ok(doing) => inputs.extend(self.do_all(nic, doing)),
                Err(refused) => {
                    let name = self.cards[&nic].name().to_owned();
                    self.note(About::nic(&name), format!("{input:?} was refused: {refused}"));
                }
            }
        }
    }

    /// Carries out an arbiter's decisions in order. Returns the inputs that the arbiter gets in return.
    pub(super) fn do_all(&mut self, nic: u32, doing: Vec<Do>) -> Vec<Input> {
        // Freeze them all first: each takes a moment to stop, and they stop at the same time.
        let fences =
            || doing.iter().filter_map(|what| if let Do::Fence(party) = what { Some(party.0.get()) } else { None });
        fences().for_each(|number| self.freeze(number));
        if fences().next().is_some() {
            self.wake_taker(nic);
        }
        doing.into_iter().filter_map(|what| self.do_one(nic, what)).collect()
    }

    fn do_one(&mut self, nic: u32, what: Do) -> Option<Input> {
        // The card's method is that of the last request, and a takeover has none.
        let is_asked = self.jobs.iter().any(|job| job.asked() == Some(nic));
        let card = self.cards.get_mut(&nic)?;
        match what {
            Do::Look => return Some(Input::Word(card.lease_page.tenure())),
            Do::Swap { from, to } => {
                let swapped = card.lease_page.swap(from, to);
                crash::point(if to.holder.is_some() { "daemon.seized" } else { "daemon.passed" });
                return Some(Input::Swapped(swapped));
            }
            Do::Tell(party, order) => self.order(nic, party.0.get(), order),
            Do::Watch(number) => {
                let limits = &self.config.daemon;
                let preparing = card.arbiter.as_ref().is_some_and(|arbiter| arbiter.state() == State::Preparing);
                let limit = if preparing { limits.prepare() } else { limits.deadline() };
                let is_cold = is_asked && card.method == Method::Cold;
                let slow = if is_cold { COLD_START_EXTRA_TIME } else { std::time::Duration::ZERO };
                card.deadline = Some((number, now() + limit + slow));
            }
            Do::Fence(party) => return self.fence(nic, party),
            Do::Breach(party, because) => self.breach(nic, party.0.get(), because),
            Do::Renew { node, word } => self.renew(nic, node, word),
            Do::Say(outcome) => self.settled(nic, outcome),
        }
        None
    }

    /// Moves the lease to the page of a node that is not trusted by the nodes that could write the last page.
    fn renew(&mut self, nic: u32, node: Node, word: Tenure) {
        let are_deposited = self.is_deposited(&[Key::Card(nic), Key::NextPage(nic)]);
        let name = self.node_numbers.iter().find(|(_, number)| **number == node.0).map(|(name, _)| name);
        let Some(card) = self.cards.get_mut(&nic) else { return };
        let has_page = name.is_some_and(|name| card.replace_lease_page(name, word));
        debug_assert!(has_page, "a worker that can be chosen was given a page");
        // From here on the taker can take the lease and unmap the old memory: the next daemon must not give that
        // memory to the old node again. If the keeper has both pages, one store tells the next daemon. A message to
        // the keeper would cost the taker time.
        if are_deposited {
            card.lease_page_changes.count(0);
        } else {
            self.deposit_one(&Key::Card(nic));
        }
        self.renewed.push(nic);
        crash::point("daemon.renewed");
    }

    pub(super) fn order(&mut self, nic: u32, party: u32, order: Order) {
        let Some(worker) = self.workers.get_mut(&party) else { return };
        if order == Order::Leave {
            worker.nics.remove(&nic);
            self.cards.get_mut(&nic).into_iter().for_each(|card| card.forget_memory_of(party));
        }
        if order == Order::Leave {
            let is_last = worker.nics.is_empty() && worker.stage == Stage::Begun;
            if is_last {
                // The worker ends with its last NIC: do not count on it from here on.
                worker.stage = Stage::Leaving(now());
            }
            // Its teardown keeps the worker and the CPU busy; the caller of the relay need not wait for that.
            return self.pending_leaves.push((party, nic, is_last));
        }
        let sent = worker.order(nic, order);
        match order {
            Order::Release { .. } => {
                self.freeze_ahead(nic);
                self.wake_taker(nic);
            }
            _ => self.thaw_ahead(|it| it.number == party),
        }
        self.has_sent(party, order, sent);
    }

    /// Sends the pending leave orders.
    pub(super) fn send_leaves(&mut self) {
        for (party, nic, is_last) in std::mem::take(&mut self.pending_leaves) {
            let Some(worker) = self.workers.get_mut(&party) else { continue };
            let sent = worker.order(nic, Order::Leave);
            if is_last {
                let _ = worker.write(&ToWorker::End, &[]);
            }
            self.thaw_ahead(|it| it.number == party);
            self.has_sent(party, Order::Leave, sent);
        }
    }

    fn has_sent(&mut self, party: u32, order: Order, sent: Result<(), rustix::io::Errno>) {
        if sent.is_ok() {
            crash::point(match order {
                Order::Prepare { .. } => "daemon.prepare",
                Order::Take { .. } => "daemon.take",
                Order::Release { .. } => "daemon.release",
                _ => "daemon.order",
            });
        }
        if let Some(errno) = why_missed(sent) {
            self.kill_worker(party, format!("does not take orders ({errno})"));
        }
    }

    /// Ends a worker that reported something it had no right to report; no other worker is harmed.
    fn breach(&mut self, nic: u32, number: u32, because: &str) {
        let Some(card) = self.cards.get_mut(&nic) else { return };
        card.fence_pending.insert(number);
        let name = card.name().to_owned();
        self.kill_worker(number, format!("made a report about {name} that it had no right to make ({because})"));
    }

    /// Returns the control group of a worker that is not dying already.
    fn group(&self, number: u32) -> Option<&Group> {
        self.workers.get(&number).filter(|worker| !worker.is_excluded())?.group.as_ref()
    }

    /// Freezes a worker and all processes that it has started, if the machine permits. It resumes only to die.
    fn freeze(&self, number: u32) {
        // If that fails, the daemon waits for its death.
        let _ = self.group(number).map(Group::freeze);
    }

    /// Wakes the worker that is to take over from workers that are, or will be, fenced: it is awake when they are.
    fn wake_taker(&mut self, nic: u32) {
        let Some(card) = self.cards.get(&nic) else { return };
        let next = card.arbiter.as_ref().and_then(Arbiter::next);
        if let Some((next, plan)) = next.zip(card.plan.filter(|plan| plan.fenced))
            && let Some(worker) = self.workers.get_mut(&next.0.get())
        {
            // Without the message it comes all the same, a little later.
            let _ = worker.plan(nic, plan);
        }
    }

    /// Freezes the stand-bys of a driver that is about to release the NIC to an untrusted node. They are fenced
    /// after that, and only the driver's release has to be waited for.
    fn freeze_ahead(&mut self, nic: u32) {
        let arbiter = self.cards.get(&nic).and_then(|card| card.arbiter.as_ref());
        let others = arbiter.map(Arbiter::fenced_next).unwrap_or_default();
        let mut others: Vec<u32> = others.into_iter().map(|party| party.0.get()).collect();
        others.retain(|number| !self.is_needed(*number));
        for number in others {
            self.freeze(number);
            self.ahead.push(Ahead { nic, number, since: now() });
        }
    }

    /// Resumes stand-bys that were not fenced meanwhile.
    fn thaw_ahead(&mut self, which: impl Fn(&Ahead) -> bool) {
        for it in self.ahead.extract_if(.., |it| which(it)).collect::<Vec<_>>() {
            let _ = self.group(it.number).map(Group::thaw);
        }
    }

    /// Returns whether the worker runs no instruction any more, though it may not be dead yet.
    fn is_frozen(&self, number: u32) -> bool {
        let Some(group) = self.group(number) else { return false };
        let since = std::time::Instant::now();
        while since.elapsed() < FREEZE_TIMEOUT {
            match group.is_frozen() {
                Ok(true) => return true,
                Ok(false) if since.elapsed() < SPIN_TIME_MAX => std::hint::spin_loop(),
                Ok(false) => std::thread::yield_now(),
                Err(_) => return false,
            }
        }
        false
    }

    /// Ends the processes that an ending worker has started. If it `waits`, they run no instruction any more
    /// when this returns, if the machine permits: one that has its signal may run until its CPU looks.
    pub(super) fn end_what_it_started(&self, number: u32, waits: bool) {
        let Some((worker, group)) = self.workers.get(&number).zip(self.group(number)) else { return };
        let itself = worker.process.name().pid;
        if group.processes().is_ok_and(|there| there.iter().all(|pid| *pid == itself)) {
            return;
        }
        if waits {
            self.freeze(number);
            let _ = self.is_frozen(number);
        }
        let _ = group.kill();
    }

    /// Keeps a worker from the NIC. The daemon records and kills a frozen worker once nothing is urgent; a daemon
    /// that comes before that finds it frozen. For any other worker it waits for the end. The dead need no fence.
    fn fence(&mut self, nic: u32, party: Party) -> Option<Input> {
        let number = party.0.get();
        if party == ARBITER || !self.workers.contains_key(&number) {
            return Some(Input::Fenced(party));
        }
        let because = format!("is kept from {} for good", self.cards[&nic].name());
        if self.is_frozen(number) {
            crash::point("daemon.fence-frozen");
            self.exclude(number);
            self.frozen.push(Frozen { nic, number, because, since: now() });
            return Some(Input::Fenced(party));
        }
        if let Some(card) = self.cards.get_mut(&nic) {
            card.fence_pending.insert(number);
        }
        self.kill_worker(number, because);
        None
    }

    /// Returns whether a worker is about to take over from frozen ones. Any other work of the daemon takes a CPU
    /// from the taker, or from its card.
    pub(super) fn is_pressing(&self) -> bool {
        self.frozen.iter().any(|it| !self.is_over(it))
    }

    /// Returns whether the frozen worker may be ended: a worker drives the NIC again, or the frozen one may hold
    /// something that the taker waits for.
    fn is_over(&self, it: &Frozen) -> bool {
        let is_settled = self.cards.get(&it.nic).is_none_or(|card| card.deadline.is_none());
        is_settled || it.since + FROZEN_TIME_MAX <= now()
    }

    /// Ends frozen workers once `is_over` says so. They die on CPUs that belong to no node, as dying takes
    /// longer than a pause may.
    pub(super) fn end_frozen(&mut self) {
        // A frozen stand-by may hold something that the releasing driver waits for.
        self.thaw_ahead(|it| it.since + FROZEN_TIME_MAX <= now());
        let (over, rest) = std::mem::take(&mut self.frozen).into_iter().partition(|it| self.is_over(it));
        self.frozen = rest;
        for Frozen { number, because, .. } in over {
            if let Some(worker) = self.workers.get(&number) {
                worker.process.send_to(&self.housekeeping_cpus);
            }
            self.record_and_kill(number, &because);
        }
    }

    /// Kills a worker that must not go on, after recording that (Y6).
    pub(super) fn kill_worker(&mut self, number: u32, because: String) {
        if self.exclude(number) {
            self.record_and_kill(number, &because);
        }
    }

    /// Has no arbiter choose a worker any more. Returns whether that was not so before.
    fn exclude(&mut self, number: u32) -> bool {
        let Some(worker) = self.workers.get_mut(&number).filter(|worker| !worker.is_excluded()) else {
            return false;
        };
        worker.stage = Stage::Excluded(now());
        let arbiters = self.cards.values_mut().filter_map(|card| card.arbiter.as_mut());
        arbiters.for_each(|arbiter| party(number).into_iter().for_each(|party| arbiter.rule_out(party)));
        true
    }

    /// Records that a worker is fenced, then kills it.
    fn record_and_kill(&mut self, number: u32, because: &str) {
        let Some(worker) = self.workers.get(&number) else { return };
        crash::point("daemon.fencing");
        // A killed worker is fenced, recorded or not. The record matters only if the daemon dies before the worker
        // does.
        let news = self.registry.write(&[Change::Fence(number)], now());
        crash::point("daemon.fence-recorded");
        worker.process.kill();
        // Nothing the worker has started may go on where it stopped.
        let _ = worker.group.as_ref().map(Group::kill);
        crash::point("daemon.fence-killed");
        let node = worker.record.node.clone();
        self.note(About::worker(&node, number), format!("worker {number} {because}: it is ended"));
        self.tell_of_registry(news);
    }

    /// Handles the end of a relay.
    fn settled(&mut self, nic: u32, outcome: RelayOutcome) {
        let leaves = self.cards.get(&nic).is_some_and(|card| self.leaves(card.node()));
        let Some(card) = self.cards.get_mut(&nic) else { return };
        (card.last_outcome, card.plan) = (Some(outcome), None);
        card.deadline = None;
        card.settle_memory();
        card.past = None;
        self.thaw_ahead(|it| it.nic == nic);
        let Some(card) = self.cards.get_mut(&nic) else { return };
        let holder = card.holder();
        let of_holder = holder.and_then(|holder| self.workers.get(&holder)).map(|worker| worker.record.node.clone());
        // `NobodyLeft` is over once a worker drives.
        let why = outcome.why.filter(|why| holder.is_none() || *why != Reason::NobodyLeft);
        card.trouble = why.map(|why| why.to_string());
        if let Some(node) = of_holder {
            card.renewals = 0;
            self.cards.move_by(nic, |card| card.set_node(&node));
        }
        let Some(card) = self.cards.get_mut(&nic) else { return };
        if let Some(found) = card.found_dead.take_if(|_| holder.is_some()) {
            let stopped = card.lease_page.words.load(lease_page::STOPPED_AT).max(found);
            card.lease_page.words.store(lease_page::STOPPED_AT, stopped);
        }
        let link = if card.link() == Some("down") { "; its link is not up yet" } else { "" };
        let (name, node) = (card.name().to_owned(), card.node().to_owned());
        let tenure = card.lease_page.tenure();
        let driving_at = card.lease_page.words.load(lease_page::DRIVING_AT);
        let is_told = std::mem::replace(&mut card.pause_told, driving_at) == driving_at;
        let is_relay = card.lease_page.words.load(lease_page::RELAYS) > 1 && !is_told;
        let pause = card.lease_page.pause_ns().filter(|_| is_relay);
        // At the very beginning no worker is ready yet, and at the end none is meant to be: neither is news.
        let is_going_on = why == Some(Reason::NobodyLeft) && self.goes_on(nic);
        let is_news = (tenure.epoch > 1 && !leaves && !is_going_on) || holder.is_some();
        let sentence = match (holder, why) {
            (Some(holder), None) => match pause {
                Some(pause) => {
                    format!("{name} is driven by worker {holder} of node {node}, after {}{link}", time(pause))
                }
                None => format!("{name} is driven by worker {holder} of node {node}{link}"),
            },
            (Some(holder), Some(why)) => format!("{name} stays with worker {holder} of node {node}: {why}"),
            (None, Some(why)) => format!("nobody drives {name}: {why}"),
            (None, None) => format!("nobody drives {name}"),
        };
        if is_news {
            self.note(About::node(&node).of_nic(&name).of_worker(holder), sentence);
        }
        self.record_nic(nic);
        crash::point("daemon.settled");
    }

    /// Records a NIC in the registry as it is.
    pub(super) fn record_nic(&mut self, nic: u32) {
        let Some(card) = self.cards.get(&nic) else { return };
        let tenure = card.lease_page.tenure();
        let record = Change::Nic(crate::registry::NicRecord {
            number: nic,
            name: card.name().to_owned(),
            device: card.config.device.to_string(),
            node: card.node().to_owned(),
            number_on_vni: card.number_on_vni,
            model: card.model.as_ref().map(|model| model.name()),
            uid: card.uid,
            made_by: card.opened.as_ref().map_or(0, |opened| opened.made_by),
            page_of: card.page_of.iter().cloned().collect(),
            epoch: tenure.epoch,
            holder: tenure.holder.map(|party| party.0.get()),
            fail_over: card.fail_over.clone(),
            by_hand: card.by_hand.clone(),
        });
        self.changes.push(record);
        self.mark_deposit(Key::Card(nic));
        self.mark_deposit(Key::NextPage(nic));
        self.mark_deposit(Key::NextMemory(nic));
    }

    /// Stamps the time at which a dead driver stopped driving: now, as its death is known, if it had not stopped before.
    pub(super) fn stamp_death(&self, nic: u32, number: u32) {
        let Some(card) = self.cards.get(&nic) else { return };
        let [stopped, driving] =
            [lease_page::STOPPED_AT, lease_page::DRIVING_AT].map(|at| card.lease_page.words.load(at));
        if card.holder() == Some(number) && stopped <= driving {
            card.lease_page.words.store(lease_page::STOPPED_AT, nanoseconds(now()));
        }
    }
}

/// Formats nanoseconds for people.
pub fn time(ns: u64) -> String {
    let (whole, unit) = match ns {
        0..10_000 => return format!("{ns} ns"),
        10_000..10_000_000 => (ns / 100, "µs"),
        10_000_000.. => (ns / 100_000, "ms"),
    };
    format!("{}.{} {unit}", whole / 10, whole % 10)
}

/// Formats a time, in ms since 1970, for people.
pub fn clock(ms: u64) -> String {
    let seconds = ms / 1000;
    format!("{:02}:{:02}:{:02}.{:03}Z", seconds / 3600 % 24, seconds / 60 % 60, seconds % 60, ms % 1000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_by_people() {
        assert_eq!([time(12), time(12_345), time(12_345_678)], ["12 ns", "12.3 µs", "12.3 ms"]);
        assert_eq!(clock(86_400_000 + 3_723_004), "01:02:03.004Z");
    }
}
