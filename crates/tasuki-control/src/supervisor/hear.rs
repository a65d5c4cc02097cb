//! Handles messages from workers, and their ends.
//!
//! The daemon does not trust workers: it checks each message against its own knowledge, and ends a worker that
//! breaks the protocol.

use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::time::Duration;

use tasuki_relay::arbiter::{Input, Verdict};
use tasuki_relay::heartbeat::Heartbeat;
use tasuki_relay::message::{self, PROTOCOL_VERSION, ToDaemon, ToWorker, heartbeat, lease_page};
use tasuki_relay::method::Method;
use tasuki_relay::wire::{Order, Report, Standing, Use};
use tasuki_shm::crash;

use super::card::Card;
use super::deeds::party;
use super::deposits::Key;
use super::worker::{Readiness, Stage};
use super::{About, PROBE_EVERY, Supervisor, WORKER_TIMEOUT, bundles, nanoseconds, now};
use crate::api::types::Counts;
use crate::channel::{self, Message, Nothing};
use crate::foreign::Foreign;
use crate::log::plain;
use crate::registry::Change;

/// Messages of one worker that the daemon reads before it turns to another.
const MESSAGES_AT_ONCE_MAX: usize = 64;
/// Characters of a worker's sentence that users see.
const SENTENCE_MAX: usize = 1000;
/// Sentences about confinement that a worker lacks.
const UNCONFINED_MAX: usize = 16;
/// Kinds of driver states that a worker reads.
const READS_MAX: usize = 16;
/// Characters of the name of a worker's counter.
const COUNT_NAME_MAX: usize = 64;

/// How a worker has ended that a process of this machine, or the kernel, has killed.
const KILLED: &str = "was killed by signal 9";

/// Why a worker is ended that would keep limits of its own.
pub(super) const LACKS_SHARED_LIMITS: &str = "is from before an interface with several queues could have limits, and its node has both; leave limits out, or name a later program (tasuki worker upgrade --with)";

/// Why a worker is ended that would serve queues which other nodes serve.
pub(super) const LENDS_NOTHING: &str = "is from before several nodes could serve one virtual machine, and its node's is served by several; name a later program (tasuki worker upgrade --with)";

impl Supervisor {
    pub(super) fn on_worker_readable(&mut self, number: u32) {
        for _ in 0..MESSAGES_AT_ONCE_MAX {
            let Some(worker) = self.workers.get(&number) else { return };
            match channel::receive(worker.socket.as_fd(), &mut self.room) {
                Ok(message) => self.on_message(number, message),
                Err(Nothing::Yet) => return,
                Err(Nothing::Closed) => return self.on_hang_up(number),
                Err(Nothing::Lack(bytes)) if let Ok(said) = serde_json::from_slice(&bytes) => {
                    self.on_lost_descriptors(number, said)
                }
                Err(broken) => return self.kill_worker(number, format!("cannot be heard ({broken})")),
            }
        }
    }

    /// Handles a message whose descriptors this daemon may not open, which is not the worker's fault.
    fn on_lost_descriptors(&mut self, number: u32, said: ToDaemon) {
        match said {
            ToDaemon::Client { nic, .. } => self.on_client_without_descriptors(number, nic),
            ToDaemon::Memory { nic, layout } => self.on_memory(number, nic, layout, None),
            ToDaemon::DriverState { nic } => self.forward_driver_state(number, nic, None),
            _ => self.kill_worker(number, "sent descriptors beside a message to which none belong".to_owned()),
        }
    }

    /// Handles a worker that has closed its end: it is ending, or ignores the daemon.
    fn on_hang_up(&mut self, number: u32) {
        let Some(worker) = self.workers.get_mut(&number) else { return };
        let _ = rustix::event::epoll::delete(&self.epoll, &worker.socket);
        worker.hung_up_since = Some(now());
    }

    fn on_message(&mut self, number: u32, message: Message) {
        let Some(worker) = self.workers.get_mut(&number) else { return };
        worker.heard = now();
        worker.probe = None;
        if let Some((nic, packet)) = message::unframe(&message.bytes) {
            if !message.fds.is_empty() {
                return self.kill_worker(number, "sent descriptors beside a report, to which none belong".to_owned());
            }
            return match Report::parse(packet) {
                Ok(report) => self.on_report(number, nic, report),
                Err(broken) => self.kill_worker(number, format!("breaks the protocol ({broken})")),
            };
        }
        match serde_json::from_slice::<ToDaemon>(&message.bytes) {
            Ok(said) => match bundles::belong(&said) {
                Some(belong) if belong != message.fds.len() => {
                    let came = message.fds.len();
                    self.kill_worker(
                        number,
                        format!("sent {came} descriptors beside a message to which {belong} belong"),
                    )
                }
                _ => self.on_json_message(number, said, message.fds),
            },
            Err(broken) => self.kill_worker(
                number,
                format!("sent something that is not a message ({broken}); rebuild the older of the two"),
            ),
        }
    }

    fn on_report(&mut self, number: u32, nic: u32, report: Report) {
        let Some(worker) = self.workers.get_mut(&number) else { return };
        if !worker.given.contains(&nic) {
            return self.kill_worker(number, format!("speaks of NIC {nic}, which it was not given"));
        }
        // The NIC went with its node: ignore the report.
        let (Some(card), Some(party)) = (self.cards.get(&nic), party(number)) else { return };
        let word = card.lease_page.tenure();
        let weighed = card.arbiter.as_ref().map(|arbiter| arbiter.weigh(&self.table.authority, party, report, word));
        match (report, weighed) {
            (_, Some((Verdict::Stale, _)) | None) => return,
            // The arbiter decides how to treat a breach.
            (_, Some((Verdict::Breach, _))) => {}
            (Report::Ready, _) => _ = worker.nics.insert(nic, Readiness::Ready),
            (Report::Unfit(reason) | Report::Failed { reason, .. }, _) => {
                worker.nics.insert(nic, Readiness::Unfit(reason));
                let (node, name) = (worker.record.node.clone(), card.name().to_owned());
                let about = About::worker(&node, number).of_nic(&name);
                self.note(about, format!("worker {number} cannot take {name}: {reason}"));
            }
            // An earlier daemon gave the worker this NIC. It died before it had the worker prepare, or before it
            // heard that the worker cannot.
            (Report::Hello { standing: Standing::Idle | Standing::Unfit, .. }, _)
                if worker.nics.get(&nic) == Some(&Readiness::Ready) && worker.record.node == card.node() =>
            {
                if let Some(prepare) = card.prepare(Use::Takeover, Method::Keep) {
                    worker.nics.insert(nic, Readiness::Preparing(now()));
                    // If the worker is dead, its pidfd reports that.
                    let _ = worker.order(nic, prepare);
                }
            }
            _ => {}
        }
        self.tell_arbiter(nic, Input::Report(party, report, word));
    }

    fn on_json_message(&mut self, number: u32, message: ToDaemon, fds: Foreign) {
        match message {
            ToDaemon::Begun { protocol_version, reads, unconfined } => {
                self.on_begun(number, protocol_version, reads, unconfined)
            }
            ToDaemon::Mine { party, node, nics } => self.on_identity(number, party, &node, &nics),
            ToDaemon::Memory { nic, layout } => self.on_memory(number, nic, layout, Some(fds)),
            ToDaemon::DeviceBundle { .. } => {
                self.kill_worker(number, "sent a device bundle, which only an opener may send".to_owned());
            }
            ToDaemon::DriverState { nic } => self.forward_driver_state(number, nic, Some(&fds)),
            ToDaemon::Client { nic, client } => self.on_client(number, nic, client, fds),
            ToDaemon::NoClient { nic, socket } => self.on_client_gone(number, nic, socket),
            ToDaemon::Counts { nic, counts } => self.on_counts(number, nic, &counts),
            ToDaemon::Told { nic, sentence } => self.on_sentence(number, nic, &sentence),
        }
    }

    /// Passes a worker's sentence on to users. Sentences beyond the worker's limit are only counted.
    fn on_sentence(&mut self, number: u32, nic: Option<u32>, sentence: &str) {
        let Some(worker) = self.workers.get_mut(&number) else { return };
        let node = worker.record.node.clone();
        let left_out = worker.sentence_allowance.left_out(now());
        if !worker.sentence_allowance.take(now()) {
            return;
        }
        let sentence = plain(sentence, SENTENCE_MAX);
        let its = |nic: &u32| worker.given.contains(nic);
        let card = nic.filter(its).and_then(|nic| self.cards.get_mut(&nic));
        let name = card.map(|card| {
            // The driver's sentence stays with the NIC until it changes hands.
            if card.holder() == Some(number) && !card.has_lost_its_model() {
                card.trouble = Some(sentence.clone());
            }
            card.name().to_owned()
        });
        if let Some(count) = left_out {
            let why = format!("worker {number} has said {count} sentences more, which are left out: it says too much");
            self.note(About::worker(&node, number), why);
        }
        let about = About { nic: name.as_deref(), ..About::worker(&node, number) };
        self.note(about, format!("worker {number} says: {sentence}"));
    }

    fn on_begun(&mut self, number: u32, protocol_version: u32, reads: Vec<(u32, u32, u32)>, unconfined: Vec<String>) {
        let Some(worker) = self.workers.get_mut(&number) else { return };
        if protocol_version != PROTOCOL_VERSION {
            let sentence = format!(
                "speaks version {protocol_version} of the messages, and this tasukid {PROTOCOL_VERSION}; rebuild the older of the two"
            );
            return self.kill_worker(number, sentence);
        }
        if !matches!(worker.stage, Stage::Starting(_)) {
            return;
        }
        if worker.first_message.is_some() {
            return self.kill_worker(number, "began before it had its description".to_owned());
        }
        let says = unconfined.iter().take(UNCONFINED_MAX).map(|sentence| plain(sentence, SENTENCE_MAX));
        worker.record.reads = reads.into_iter().take(READS_MAX).collect();
        worker.record.unconfined = worker.lacks.iter().cloned().chain(says).collect();
        let (node, binary) = (worker.record.node.clone(), worker.record.binary.display().to_string());
        if self.keeps_own_limits(number, &self.config) {
            return self.kill_worker(number, LACKS_SHARED_LIMITS.to_owned());
        }
        if self.lends_nothing(number, &self.config) {
            return self.kill_worker(number, LENDS_NOTHING.to_owned());
        }
        self.mark_begun(number);
        self.note(About::worker(&node, number), format!("worker {number} of node {node} has begun ({binary})"));
    }

    /// Returns whether a worker would keep limits of its own, where all queues of its node's interface have them together.
    pub(super) fn keeps_own_limits(&self, number: u32, config: &crate::config::Config) -> bool {
        let worker = self.workers.get(&number).filter(|worker| !worker.shares_limits());
        let node = worker.and_then(|worker| config.node(&worker.record.node));
        node.is_some_and(|node| config.shares_limits(node))
    }

    /// Marks a worker as one that accepts orders.
    pub(super) fn mark_begun(&mut self, number: u32) {
        let Some(worker) = self.workers.get_mut(&number) else { return };
        (worker.stage, worker.has_begun) = (Stage::Begun, true);
        worker.heart = Heartbeat::new(now());
        worker.record.uid = worker.process.uid();
        self.changes.push(Change::Worker(worker.record.clone()));
        if let Some(node) = self.nodes.get_mut(&worker.record.node) {
            // The node's program does begin, even if other workers died.
            node.trouble = None;
            node.deaths.retain(|death| death.had_begun);
        }
        crash::point("daemon.begun");
    }

    /// Forwards the driver state that a giver stored to the taker, once for each time the daemon asked this worker
    /// for it. The taker checks the memory. If the daemon may not open it, the taker goes on without it.
    fn forward_driver_state(&mut self, number: u32, nic: u32, fds: Option<&Foreign>) {
        let Some(worker) = self.workers.get_mut(&number) else { return };
        let Some(at) = worker.asked.driver_states.iter().position(|asked| *asked == nic) else {
            return self.on_unasked(number, &format!("the driver state of NIC {nic}"));
        };
        worker.asked.driver_states.swap_remove(at);
        if let Some(fds) = fds.filter(|fds| fds.len() != 1) {
            return self.kill_worker(number, format!("sent a driver state of {} descriptors, which is one", fds.len()));
        }
        // The relay may be over meanwhile.
        let Some(target) = self.jobs.iter().find(|job| job.asked() == Some(nic)).map(|job| job.target) else { return };
        let Some(worker) = self.workers.get(&target) else { return };
        let lent = fds.map(|fds| channel::lend(fds)).unwrap_or_default();
        if let Err(errno) = worker.write(&ToWorker::DriverState { nic }, &lent) {
            self.kill_worker(target, format!("does not take messages ({errno})"));
        }
        if let (None, Some(card)) = (fds, self.cards.get(&nic)) {
            let name = card.name().to_owned();
            let sentence = format!(
                "tasukid may open no more descriptors, and the driver state of {name} is lost: worker {target} goes on from the ledger; raise LimitNOFILE= of tasukid (ulimit -Hn)"
            );
            self.note(About::nic(&name).of_worker(target), sentence);
        }
    }

    /// Sends a worker's counts to the callers that asked when it drove the NIC.
    fn on_counts(&mut self, number: u32, nic: u32, counts: &[(String, u64)]) {
        if !self.workers.get(&number).is_some_and(|worker| worker.asked.counts) {
            return self.on_unasked(number, "counts");
        }
        let Some(name) = self.cards.get(&nic).map(|card| card.name().to_owned()) else { return };
        let is_its = |(of, asked, ..): &(u32, u32, _, _)| (*of, *asked) == (nic, number);
        let (asked, rest) = std::mem::take(&mut self.counting).into_iter().partition(is_its);
        self.counting = rest;
        let by_kernel = self.dropped_by_kernel(nic);
        let more = |name: &str| {
            let its = by_kernel.iter().filter(|(reason, _)| name.strip_prefix("dropped_") == Some(*reason));
            its.map(|(_, count)| count).sum::<u64>()
        };
        let sum = |(name, count): &(String, u64)| (plain(name, COUNT_NAME_MAX), count.saturating_add(more(name)));
        let counts: Vec<_> = counts.iter().map(sum).collect();
        for (.., answer) in asked {
            let _ = answer.send(Ok(Counts { nic: name.clone(), worker: number, counts: counts.clone() }));
        }
    }

    /// Handles a message that this daemon did not ask for. An earlier daemon may have asked an adopted worker: its
    /// message is dropped. Any other worker is ended.
    fn on_unasked(&mut self, number: u32, what: &str) {
        let is_adopted = self.workers.get(&number).is_some_and(|worker| worker.is_adopted);
        if !is_adopted {
            self.kill_worker(number, format!("sent {what} unasked"));
        }
    }

    /// Handles the end of a driver's thread. Its process is about to be dead, and a successor need not wait for
    /// that.
    pub(super) fn driver_ended(&mut self, number: u32) {
        // Read its last messages before handling its death.
        self.on_worker_readable(number);
        if let Some(worker) = self.workers.get_mut(&number) {
            // Do not count on the worker while its process ends.
            worker.hung_up_since.get_or_insert(now());
        }
        let held = |card: &super::card::Card| card.holder() == Some(number) && !card.fence_pending.contains(&number);
        let nics: Vec<u32> = self.cards.iter().filter(|(_, card)| held(card)).map(|(nic, _)| *nic).collect();
        if let (None, Some(party)) = (&self.stopping, party(number)) {
            for nic in nics {
                self.stamp_death(nic, number);
                self.tell_arbiter(nic, Input::Ended(party));
            }
        }
    }

    /// Handles the death of a worker's process.
    pub(super) fn worker_ended(&mut self, number: u32) {
        if self.cell_ended(number) {
            return;
        }
        crash::point("daemon.death");
        // Read its last messages before handling its death.
        self.on_jail_readable(number);
        self.read_last_lines(number);
        self.on_worker_readable(number);
        let is_stranger = |card: &Card| {
            card.arbiter.as_ref().zip(party(number)).is_some_and(|(arbiter, party)| arbiter.is_stranger_to_next(party))
        };
        if self.cards.values().any(is_stranger) {
            // The arbiter takes the worker for harmless from here on, and processes that it has started may still reach the card.
            self.end_what_it_started(number, true);
        }
        let Some(mut worker) = self.workers.remove(&number) else { return };
        worker.heartbeat.iter().for_each(|heartbeat| self.exit_watch.close(number, heartbeat));
        let nics: Vec<u32> = self.cards.keys().copied().collect();
        if let (None, Some(party)) = (&self.stopping, party(number)) {
            nics.iter().for_each(|nic| self.stamp_death(*nic, number));
            for nic in nics {
                let was_pending = self.cards.get_mut(&nic).is_some_and(|card| card.fence_pending.remove(&number));
                if was_pending {
                    self.tell_arbiter(nic, Input::Fenced(party));
                }
                self.tell_arbiter(nic, Input::Gone(party));
            }
        }
        crash::point("daemon.death-heard");
        // From here on nothing is urgent.
        let (asked, rest) = std::mem::take(&mut self.counting).into_iter().partition(|(_, asked, ..)| *asked == number);
        self.counting = rest;
        for (.., answer) in asked {
            let _ = answer
                .send(Err(super::door::Refusal::conflict("the worker died before it sent its counters; ask again")));
        }
        self.cards.values_mut().for_each(|card| card.forget_memory_of(number));
        let how = worker.process.ended();
        let node_name = worker.record.node.clone();
        let mut lacked = String::new();
        if let Some(group) = worker.group.take() {
            let was_killed = how == KILLED && !worker.is_excluded();
            if let Some(node) = self.nodes.get_mut(&node_name).filter(|_| was_killed)
                && group.has_new_oom_kill(&mut node.oom_kills)
            {
                lacked = self.lack_of_memory(&node_name);
            }
            // The next owner of a NIC may run by now: no process that the worker has started goes on beside it.
            if !group.processes().is_ok_and(|left| left.is_empty()) {
                let _ = group.kill();
            }
            self.cells.remove(group);
        }
        if !self.nodes.contains_key(&node_name) && self.workers.of(&node_name).next().is_none() {
            // The node has left the configuration while no tasukid ran: nothing else removes its group.
            self.cells.forget_node(&node_name);
        }
        // The keeper has the open file, too, so its end here alone does not take it out of the epoll.
        worker.lines.iter().for_each(|lines| _ = rustix::event::epoll::delete(&self.epoll, lines.fd()));
        let _ = std::fs::remove_file(&worker.record.socket);
        super::lines::forget(&worker.record.socket);
        self.changes.push(Change::NoWorker(number));
        self.mark_deposit(Key::Worker(number));
        let had_no_part =
            matches!(worker.stage, Stage::Leaving(_)) || worker.stage == Stage::Begun && worker.nics.is_empty();
        let was_meant = had_no_part && how == "ended" || self.stopping.is_some();
        // A worker fenced for a relay has done nothing wrong.
        let for_relay = worker.is_excluded() && self.jobs.iter().any(|job| job.fences(&node_name));
        let is_candidate = worker.record.staged.is_some() || self.jobs.iter().any(|job| job.target == number);
        if !was_meant && !for_relay && !is_candidate {
            // A SIGKILL from elsewhere says nothing about the node's program.
            let was_killed = how == KILLED && !worker.is_excluded() && lacked.is_empty();
            self.has_lost_a_worker(&node_name, worker.has_begun || was_killed);
        }
        let why = match worker.stage {
            _ if !lacked.is_empty() => lacked,
            Stage::Starting(_) => format!(
                " before it had begun; is {} a worker of Tasuki's? tasukid's log has its output",
                worker.record.binary.display()
            ),
            _ if worker.record.staged.is_some() => ", which was staged: stage it again".to_owned(),
            _ => String::new(),
        };
        self.note(About::worker(&node_name, number), format!("worker {number} of node {node_name} {how}{why}"));
    }

    /// Returns the end of a sentence about a worker that the kernel killed for want of memory.
    fn lack_of_memory(&self, node: &str) -> String {
        let most = self.bounds_in_force(node).and_then(|bounds| bounds.memory);
        let most = most.map(|bytes| format!(", of which node {node} may use {} MiB (bounds.memory_mib)", bytes >> 20));
        format!(": the kernel found no memory for it{}", most.unwrap_or_default())
    }

    /// Checks the heartbeats of drivers, and asks sleeping workers for an answer.
    pub(super) fn check_heartbeats(&mut self) {
        let (now, limit) = (now(), self.config.daemon.hang_after());
        let holders: BTreeSet<u32> = self.cards.values().filter_map(Card::holder).collect();
        let mut silent = Vec::new();
        let mut ask = Vec::new();
        for (number, worker) in self.workers.iter_mut() {
            let Some(words) = worker.heartbeat.as_ref().filter(|_| worker.stage == Stage::Begun) else { continue };
            let drives = holders.contains(number);
            let sleeps = words.load(heartbeat::ASLEEP) != 0;
            worker.heart.beat(now, words.load(heartbeat::LOOKS));
            let timeout = if drives { limit } else { WORKER_TIMEOUT.max(limit) };
            match worker.probe {
                Some(asked) if now.saturating_sub(asked) >= timeout => silent.push(*number),
                Some(_) => {}
                None if drives && !sleeps && worker.heart.silent(now, limit) => silent.push(*number),
                None if (sleeps || !drives) && now.saturating_sub(worker.heard) >= PROBE_EVERY => {
                    // Any NIC does: all that counts is that an answer comes.
                    ask.extend(worker.nics.keys().next().map(|nic| (*number, *nic)));
                    worker.heard = now;
                }
                None => {}
            }
            // A worker that sleeps or does not drive rightly shows no progress: start its record anew.
            if sleeps || !drives {
                worker.heart = Heartbeat::new(now);
            }
        }
        let asks = !ask.is_empty();
        for (number, nic) in ask {
            if let Some(worker) = self.workers.get_mut(&number) {
                worker.probe = Some(now);
                let _ = worker.order(nic, Order::Who);
            }
        }
        if asks {
            crash::point("daemon.asked");
        }
        silent.into_iter().for_each(|number| self.on_hang(number, limit));
    }

    fn on_hang(&mut self, number: u32, limit: Duration) {
        let Some(worker) = self.workers.get_mut(&number) else { return };
        let since = worker.probe.take().unwrap_or(worker.heart.at());
        worker.heard = now();
        worker.heart = Heartbeat::new(now());
        let node = worker.record.node.clone();
        let driven: Vec<u32> =
            self.cards.iter().filter(|(_, card)| card.holder() == Some(number)).map(|(nic, _)| *nic).collect();
        self.note(
            About::worker(&node, number),
            format!("worker {number} of node {node} has not looked for work for {} ms: it hangs", limit.as_millis()),
        );
        for card in driven.iter().filter_map(|nic| self.cards.get(nic)) {
            card.lease_page.words.store(lease_page::STOPPED_AT, nanoseconds(since));
        }
        let all: Vec<u32> = self.cards.keys().copied().collect();
        if let Some(party) = party(number) {
            all.into_iter().for_each(|nic| self.tell_arbiter(nic, Input::Silent(party)));
        }
        if driven.is_empty() {
            self.kill_worker(number, "is of no use as it is".to_owned());
        }
    }
}
