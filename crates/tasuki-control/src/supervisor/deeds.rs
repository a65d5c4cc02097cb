//! What an arbiter says, done.

use std::collections::VecDeque;
use std::num::NonZeroU32;

use tasuki_relay::arbiter::{Arbiter, Do, Input, Node, RelayOutcome, State};
use tasuki_relay::message::{ToWorker, lease_page};
use tasuki_relay::method::Method;
use tasuki_relay::wire::{Order, Reason};
use tasuki_relay::{ARBITER, Party, Tenure};
use tasuki_shm::crash;

use super::keeping::Key;
use super::worker::Stage;
use super::{About, Supervisor, now};
use crate::cgroup::Group;
use crate::registry::Change;

/// A process that has not stopped after this long is waited for until it is dead; it takes some 50 µs for each of its CPUs.
const FREEZES: std::time::Duration = std::time::Duration::from_millis(1);

/// One that has not stopped after this long may wait for our CPU.
const YIELDS: std::time::Duration = std::time::Duration::from_micros(200);

/// A process that died in a talk with a device is not waited for by the next one, but a frozen one is.
pub(super) const STANDS: std::time::Duration = std::time::Duration::from_millis(2);

/// A worker that stands frozen, and is still to be ended.
#[derive(Debug)]
pub(super) struct Frozen {
    /// For the sake of this NIC.
    nic: u32,
    number: u32,
    because: String,
    pub since: std::time::Duration,
}

/// A stand-by that stands frozen while its node's driver lets go, and is fenced then.
#[derive(Debug)]
pub(super) struct Ahead {
    nic: u32,
    number: u32,
    pub since: std::time::Duration,
}

/// How much longer than usual a card may take that starts anew: it negotiates its link.
const COLD: std::time::Duration = std::time::Duration::from_secs(10);

/// A worker as the arbiter names it.
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

    /// Does what an arbiter says, in its order; what the arbiter is to hear of it.
    pub(super) fn do_all(&mut self, nic: u32, doing: Vec<Do>) -> Vec<Input> {
        // Each takes a moment to stop; all of them do at once.
        let fences =
            || doing.iter().filter_map(|what| if let Do::Fence(party) = what { Some(party.0.get()) } else { None });
        fences().for_each(|number| self.freeze(number));
        if fences().next().is_some() {
            self.call_taker(nic);
        }
        doing.into_iter().filter_map(|what| self.do_one(nic, what)).collect()
    }

    fn do_one(&mut self, nic: u32, what: Do) -> Option<Input> {
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
                let slow = if matches!(card.method, Method::Cold) { COLD } else { std::time::Duration::ZERO };
                card.watch = Some((number, now() + limit + slow));
            }
            Do::Fence(party) => return self.fence(nic, party),
            Do::Breach(party, because) => self.breach(nic, party.0.get(), because),
            Do::Renew { node, word } => self.renew(nic, node, word),
            Do::Say(told) => self.settled(nic, told),
        }
        None
    }

    /// The lease goes to the page of a node that those who could write the last one do not trust.
    fn renew(&mut self, nic: u32, node: Node, word: Tenure) {
        let knows_both = self.knows(&[Key::Card(nic), Key::Page(nic)]);
        let name = self.node_numbers.iter().find(|(_, number)| **number == node.0).map(|(name, _)| name);
        let Some(card) = self.cards.get_mut(&nic) else { return };
        let turned = name.is_some_and(|name| card.turn_page(name, word));
        debug_assert!(turned, "a worker that can be chosen was given a page");
        // From here on the taker can take, and unmap the old memory: the next daemon must not give that to the old node again. Where the keeper has both pages, a
        // store tells the next daemon; a message takes the taker's time.
        if knows_both {
            card.turns.count(0);
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
                // It ends with its last NIC: nobody may count on it from here on.
                worker.stage = Stage::Leaving(now());
            }
            // To take itself apart keeps it, and the CPU, busy: whoever has asked for the relay does not wait for that.
            return self.goodbyes.push((party, nic, is_last));
        }
        let sent = worker.order(nic, order);
        match order {
            Order::Release { .. } => {
                self.freeze_ahead(nic);
                self.call_taker(nic);
            }
            _ => self.thaw_ahead(|it| it.number == party),
        }
        self.has_sent(party, order, sent);
    }

    /// Has those leave who were told to.
    pub(super) fn say_goodbye(&mut self) {
        for (party, nic, is_last) in std::mem::take(&mut self.goodbyes) {
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
        match sent {
            Ok(()) => crash::point(match order {
                Order::Prepare { .. } => "daemon.prepare",
                Order::Take { .. } => "daemon.take",
                Order::Release { .. } => "daemon.release",
                _ => "daemon.order",
            }),
            // It is dead or dying, and its pidfd will say so.
            Err(rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET) => {}
            Err(errno) => self.condemn(party, format!("does not take orders ({errno})")),
        }
    }

    /// A worker has said what it had no right to say: it is ended, and nobody else is harmed.
    fn breach(&mut self, nic: u32, number: u32, because: &str) {
        let Some(card) = self.cards.get_mut(&nic) else { return };
        card.condemned.insert(number);
        let name = card.name().to_owned();
        self.condemn(number, format!("said of {name} what it had no right to say ({because})"));
    }

    /// The control group of a worker that is not dying already.
    fn group(&self, number: u32) -> Option<&Group> {
        self.workers.get(&number).filter(|worker| worker.stage != Stage::Condemned)?.group.as_ref()
    }

    /// Stops a worker and all that it has started, if the machine lets us: it goes on only to die.
    fn freeze(&self, number: u32) {
        // Where that fails, its death is waited for.
        let _ = self.group(number).map(Group::freeze);
    }

    /// Wakes the worker that is to take from those that are being fenced, or will be: it is awake when they are.
    fn call_taker(&mut self, nic: u32) {
        let Some(card) = self.cards.get(&nic) else { return };
        let next = card.arbiter.as_ref().and_then(Arbiter::next);
        if let Some((next, plan)) = next.zip(card.plan.filter(|plan| plan.fenced))
            && let Some(worker) = self.workers.get_mut(&next.0.get())
        {
            // It comes all the same without, a little later.
            let _ = worker.plan(nic, plan);
        }
    }

    /// Has the stand-bys of a driver stop that is about to let go for a stranger: they are fenced then, and only the driver is to be waited for.
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

    /// Has them go on, if they were not fenced meanwhile.
    fn thaw_ahead(&mut self, which: impl Fn(&Ahead) -> bool) {
        for it in self.ahead.extract_if(.., |it| which(it)).collect::<Vec<_>>() {
            let _ = self.group(it.number).map(Group::thaw);
        }
    }

    /// Whether it runs no instruction any more, though it may not be dead yet.
    fn is_frozen(&self, number: u32) -> bool {
        let Some(group) = self.group(number) else { return false };
        let since = std::time::Instant::now();
        while since.elapsed() < FREEZES {
            match group.is_frozen() {
                Ok(true) => return true,
                Ok(false) if since.elapsed() < YIELDS => std::hint::spin_loop(),
                Ok(false) => std::thread::yield_now(),
                Err(_) => return false,
            }
        }
        false
    }

    /// Keeps it from the NIC. One that stands frozen is recorded and killed once nothing is urgent: a daemon that comes before that finds it frozen. Of any other the end
    /// is waited for. The dead need no fence.
    fn fence(&mut self, nic: u32, party: Party) -> Option<Input> {
        let number = party.0.get();
        if party == ARBITER || !self.workers.contains_key(&number) {
            return Some(Input::Fenced(party));
        }
        let because = format!("is kept from {} for good", self.cards[&nic].name());
        if self.is_frozen(number) {
            crash::point("daemon.fence-frozen");
            self.rule_out(number);
            self.frozen.push(Frozen { nic, number, because, since: now() });
            return Some(Input::Fenced(party));
        }
        if let Some(card) = self.cards.get_mut(&nic) {
            card.condemned.insert(number);
        }
        self.condemn(number, because);
        None
    }

    /// Whether somebody is about to take from those that stand frozen: whatever else the daemon does takes a CPU from the taker, or from its card.
    pub(super) fn is_pressing(&self) -> bool {
        self.frozen.iter().any(|it| !self.is_over(it))
    }

    /// Whether somebody drives, or it may hold what the taker waits for.
    fn is_over(&self, it: &Frozen) -> bool {
        let is_settled = self.cards.get(&it.nic).is_none_or(|card| card.watch.is_none());
        is_settled || it.since + STANDS <= now()
    }

    /// Ends those that were frozen once that is over; apart from the CPUs of the nodes, for to die takes them longer than a pause may.
    pub(super) fn end_frozen(&mut self) {
        // One may hold what a driver waits for that lets go.
        self.thaw_ahead(|it| it.since + STANDS <= now());
        let (over, rest) = std::mem::take(&mut self.frozen).into_iter().partition(|it| self.is_over(it));
        self.frozen = rest;
        for Frozen { number, because, .. } in over {
            if let Some(worker) = self.workers.get(&number) {
                worker.process.send_to(&self.aside);
            }
            self.execute(number, &because);
        }
    }

    /// Kills a worker that must not go on, after that is recorded (Y6).
    pub(super) fn condemn(&mut self, number: u32, because: String) {
        if self.rule_out(number) {
            self.execute(number, &because);
        }
    }

    /// Nobody is to count on it from here on. Whether anybody did.
    fn rule_out(&mut self, number: u32) -> bool {
        let Some(worker) = self.workers.get_mut(&number).filter(|worker| worker.stage != Stage::Condemned) else {
            return false;
        };
        worker.stage = Stage::Condemned;
        let arbiters = self.cards.values_mut().filter_map(|card| card.arbiter.as_mut());
        arbiters.for_each(|arbiter| party(number).into_iter().for_each(|party| arbiter.rule_out(party)));
        true
    }

    /// Records that it is fenced, then kills it.
    fn execute(&mut self, number: u32, because: &str) {
        let Some(worker) = self.workers.get(&number) else { return };
        crash::point("daemon.fencing");
        // Whoever is killed is fenced, recorded or not; only a daemon that dies before the worker does would not know.
        let news = self.registry.write(&[Change::Fence(number)], now());
        crash::point("daemon.fence-recorded");
        worker.process.kill();
        // So that nothing of what it has started goes on where it stopped.
        let _ = worker.group.as_ref().map(Group::kill);
        crash::point("daemon.fence-killed");
        let node = worker.record.node.clone();
        self.note(About::worker(&node, number), format!("worker {number} {because}: it is ended"));
        self.tell_of_registry(news);
    }

    /// A relay has settled.
    fn settled(&mut self, nic: u32, told: RelayOutcome) {
        let leaves = self.cards.get(&nic).is_some_and(|card| self.leaves(&card.node));
        let Some(card) = self.cards.get_mut(&nic) else { return };
        (card.said, card.plan) = (Some(told), None);
        card.watch = None;
        card.settle_memory();
        card.past = None;
        self.thaw_ahead(|it| it.nic == nic);
        let Some(card) = self.cards.get_mut(&nic) else { return };
        let holder = card.holder();
        // That nobody was left is over once somebody drives.
        let why = told.why.filter(|why| holder.is_none() || *why != Reason::NobodyLeft);
        card.trouble = why.map(|why| why.to_string());
        if let Some(node) = holder.and_then(|holder| self.workers.get(&holder)).map(|worker| worker.record.node.clone())
        {
            card.node = node;
            card.renewals = 0;
        }
        let (name, node) = (card.name().to_owned(), card.node.clone());
        let tenure = card.lease_page.tenure();
        let pause = card.lease_page.pause_ns().filter(|_| card.lease_page.words.load(lease_page::RELAYS) > 1);
        // At the very beginning nobody is ready yet, and at the end nobody is to be, which is no news.
        let is_going_on = why == Some(Reason::NobodyLeft) && self.goes_on(nic);
        let is_news = (tenure.epoch > 1 && !leaves && !is_going_on) || holder.is_some();
        let sentence = match (holder, why) {
            (Some(holder), None) => match pause {
                Some(pause) => format!("{name} is driven by worker {holder} of node {node}, after {}", time(pause)),
                None => format!("{name} is driven by worker {holder} of node {node}"),
            },
            (Some(holder), Some(why)) => format!("{name} stays with worker {holder} of node {node}: {why}"),
            (None, Some(why)) => format!("nobody drives {name}: {why}"),
            (None, None) => format!("nobody drives {name}"),
        };
        if is_news {
            self.note(About { node: Some(&node), nic: Some(&name), worker: holder }, sentence);
        }
        self.record_nic(nic);
        crash::point("daemon.settled");
    }

    /// Has the registry know a NIC as it is.
    pub(super) fn record_nic(&mut self, nic: u32) {
        let Some(card) = self.cards.get(&nic) else { return };
        let tenure = card.lease_page.tenure();
        let record = Change::Nic(crate::registry::NicRecord {
            number: nic,
            name: card.name().to_owned(),
            device: card.config.device.to_string(),
            node: card.node.clone(),
            number_on_vni: card.number_on_vni,
            model: card.model.as_ref().map(|model| model.name()),
            uid: card.uid,
            made_by: card.kept.as_ref().map_or(0, |kept| kept.made_by),
            page_of: card.page_of.iter().cloned().collect(),
            epoch: tenure.epoch,
            holder: tenure.holder.map(|party| party.0.get()),
        });
        self.changes.push(record);
        self.keep(Key::Card(nic));
        self.keep(Key::Page(nic));
        self.keep(Key::Coming(nic));
    }

    /// The stamp of when a driver that died let go: now that it is known.
    pub(super) fn stamp_death(&self, nic: u32, number: u32) {
        let Some(card) = self.cards.get(&nic) else { return };
        if card.holder() == Some(number) {
            card.lease_page.words.store(lease_page::STOPPED_AT, u64::try_from(now().as_nanos()).unwrap_or(u64::MAX));
        }
    }
}

/// Nanoseconds, as people read them.
pub fn time(ns: u64) -> String {
    let (whole, unit) = match ns {
        0..10_000 => return format!("{ns} ns"),
        10_000..10_000_000 => (ns / 100, "µs"),
        10_000_000.. => (ns / 100_000, "ms"),
    };
    format!("{}.{} {unit}", whole / 10, whole % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_by_people() {
        assert_eq!([time(12), time(12_345), time(12_345_678)], ["12 ns", "12.3 µs", "12.3 ms"]);
    }
}
