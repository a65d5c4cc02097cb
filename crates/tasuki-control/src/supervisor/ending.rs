//! How the daemon's loop ends: everything stops, or another program goes on as tasukid.

use std::path::PathBuf;

use super::door::{Answer, Refusal};
use super::worker::{Stage, Worker};
use super::{About, Ended, Supervisor, WORKER_TIMEOUT, now};
use crate::api::types::{Replaced, Stopped};
use crate::cgroup::Group;
use crate::config;
use crate::process::Process;
use crate::registry::Change;
use crate::successor;

impl Supervisor {
    /// Ends the loop, for another program to go on.
    pub(super) fn replace(&mut self, with: PathBuf, version: String, says: &str) -> Result<Replaced, Refusal> {
        if self.stopping.is_some() || self.ended.is_some() {
            return Err(Refusal::Ending);
        }
        if self.is_applying() || !self.jobs.is_empty() || !self.leaving.is_empty() || !self.emptying.is_empty() {
            let sentence = "an upgrade, a handover, a node's removal or a configuration is under way; ask again when that has settled";
            return Err(Refusal::Busy(sentence.to_owned()));
        }
        if let Some(why) = self.current.has_changed() {
            return Err(Refusal::conflict(why));
        }
        let older = |lacks: String| Err(Refusal::conflict(format!("{} is from before {lacks}", with.display())));
        if let Some(label) = self.client_with_many_fds().filter(|_| !says.contains(successor::MANY_FDS)) {
            return older(format!(
                "machines of more than 8 pairs of queues, and the one at {label} has more; end it, or start it with less"
            ));
        }
        // It would take a node that was added by hand away, with its interface.
        let is_new = |node: &&config::Node| node.tap().is_some() && self.config.shares_limits(node);
        if let Some(node) = self.config.node.iter().find(is_new).filter(|_| !says.contains(successor::LIMITS)) {
            return older(format!(
                "an interface with several queues could have limits, and that of node {} has some; remove it, or add it without limits",
                node.name
            ));
        }
        let is_shared = |node: &&config::Node| node.queue_of().is_some() && self.config.shares_machine(node);
        if let Some(node) = self.config.node.iter().find(is_shared).filter(|_| !says.contains(successor::LOANS)) {
            return older(format!(
                "several nodes could serve one virtual machine, as node {} does; remove that",
                node.name
            ));
        }
        // It would begin in vain.
        if let Some(why) = self.workers.values().find_map(|worker| Process::find(worker.process.name()).err()) {
            return Err(Refusal::conflict(format!("tasukid stays what it is: {why}")));
        }
        // Or end a worker that it does not find.
        self.look_for_keeper();
        self.mend_keeper();
        if !self.mend_worker_sockets() {
            if let Some(why) = self.workers.values().find_map(|worker| worker.unfound.as_ref()) {
                return Err(Refusal::conflict(format!("tasukid stays what it is: {why}")));
            }
            let sentence =
                "files in tasukid's directory were deleted, and its workers hear of others just now; ask again";
            return Err(Refusal::Busy(sentence.to_owned()));
        }
        // The next one knows what is written and kept, and no more. A disk that is full shows when it is written to.
        self.changes.push(Change::Party(self.last_party));
        self.flush();
        self.deposit();
        if let Some(trouble) = self.registry.trouble() {
            return Err(Refusal::conflict(format!("tasukid stays what it is: {trouble}")));
        }
        if self.has_deposits_due() {
            return Err(Refusal::conflict(
                "tasukid stays what it is, for its keeper does not have all yet that the next one needs; ask again (tasuki status says if it stays so)",
            ));
        }
        let sentence = format!("tasukid goes on as {}, version {version}", with.display());
        self.note(About::default(), sentence.clone());
        let [takes_signals, needs_no_keeper] = [successor::SIGNALS, successor::KEPT].map(|word| says.contains(word));
        self.ended = Some(Ended::Replaced { with, takes_signals, needs_no_keeper });
        Ok(Replaced { version, sentence })
    }

    pub(super) fn begin_stopping(&mut self, answer: Answer<Stopped>) {
        if self.stopping.is_some() {
            drop(answer.send(Err(Refusal::Ending)));
            return;
        }
        self.note(About::default(), "everything is to stop");
        for job in std::mem::take(&mut self.jobs) {
            job.answer.into_iter().for_each(|answer| drop(answer.send(Err(Refusal::Ending))));
        }
        self.end_applying();
        let workers: Vec<u32> = self.workers.keys().copied().collect();
        let count = u32::try_from(workers.len()).unwrap_or(u32::MAX);
        self.stopping = Some((now(), count, Some(answer)));
        // Those that wait for silent workers are refused.
        self.door.ring();
        for number in workers {
            if let Some(worker) = self.workers.get_mut(&number) {
                worker.stage = Stage::Leaving(now());
                worker.tell_to_end();
            }
        }
    }

    pub(super) fn go_on_stopping(&mut self) {
        let Some((since, count, _)) = self.stopping else { return };
        let elapsed = now().saturating_sub(since);
        let is_late = elapsed >= WORKER_TIMEOUT / 2;
        if is_late {
            for worker in self.workers.values() {
                worker.process.kill();
                // Nothing that it has started goes on beside what is started next.
                let _ = worker.group.as_ref().map(Group::kill);
            }
        }
        if !self.workers.is_empty() && elapsed < WORKER_TIMEOUT {
            return;
        }
        // The next tasukid must not take those that stay for its own.
        self.workers.values().for_each(|worker| _ = std::fs::remove_file(&worker.record.socket));
        // Switch cards off once no worker drives them any more.
        self.end_cards(is_late);
        if self.cards.values().any(|card| card.model.is_some()) {
            return;
        }
        let stays = |worker: &Worker| {
            let (number, pid, node) = (worker.party(), worker.process.name().pid, &worker.record.node);
            format!(
                "; worker {number} of node {node} (process {pid}) was killed, and ends once the kernel lets it: see /proc/{pid}/stack"
            )
        };
        let stay: String = self.workers.values().map(stays).collect();
        let count = count.saturating_sub(u32::try_from(self.workers.len()).unwrap_or(u32::MAX));
        let workers = if count == 1 { "1 worker has".to_owned() } else { format!("{count} workers have") };
        let sentence = format!("{workers} ended, and so does tasukid{stay}");
        self.note(About::default(), sentence.clone());
        if let Some((.., Some(answer))) = self.stopping.take() {
            let _ = answer.send(Ok(Stopped { workers: count, sentence }));
        }
        self.ended = Some(Ended::Everything);
    }
}
