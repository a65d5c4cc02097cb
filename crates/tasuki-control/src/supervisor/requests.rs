//! Requests of other threads, and the part of the daemon that answers each.

use std::time::Duration;

use tasuki_relay::message::ToWorker;

use super::door::{Answer, Refusal, Request};
use super::{About, Supervisor, now};
use crate::api::types::Counts;
use crate::config;

/// Returns the names there are, as the end of a sentence.
pub(super) fn there_are(names: impl Iterator<Item = impl AsRef<str>>) -> String {
    let names: Vec<_> = names.map(|name| name.as_ref().to_owned()).collect();
    if names.is_empty() { "there is none".to_owned() } else { format!("there are: {}", names.join(", ")) }
}

/// Returns that what is changed by hand now could contradict the steps to come.
pub(super) fn applying() -> Refusal {
    Refusal::Busy("a configuration is being applied; ask again when that is done".to_owned())
}

/// Time for which the daemon answers requests before it looks at anything else.
const ANSWERING_TIME_MAX: Duration = Duration::from_millis(1);

impl Supervisor {
    pub(super) fn answer_requests(&mut self) {
        let mut count = [0; 8];
        let _ = rustix::io::read(self.door.bell(), &mut count);
        // Requests wait until the daemon can answer them truthfully.
        if self.adopting {
            return;
        }
        let since = now();
        let mut first = std::mem::take(&mut self.put_off);
        while let Some((request, caller)) = first.pop_front().or_else(|| self.requests.try_recv().ok()) {
            // A caller that has given up may have done otherwise since.
            match caller.as_ref().is_none_or(|caller| caller.strong_count() > 0) {
                true if self.is_too_early(&request) => self.put_off.push_back((request, caller)),
                true => self.answer_request(request),
                false => {}
            }
            if now().saturating_sub(since) >= ANSWERING_TIME_MAX {
                // A worker may have died meanwhile. The rest of the requests comes after that.
                self.put_off.append(&mut first);
                self.door.ring();
                return;
            }
        }
    }

    /// Returns whether a request would change something that a worker of an earlier daemon may have, which has yet to answer.
    fn is_too_early(&self, request: &Request) -> bool {
        if !self.awaiting || self.stopping.is_some() {
            return false;
        }
        let is_unheard =
            |nic: &str| self.cards.values().any(|card| card.name() == nic && self.unheard.contains(&card.number));
        // Its neighbours are to hear of it.
        let has_unheard_beside = |node: &config::Node| node.vni.as_ref().is_some_and(|vni| self.has_unheard_on(vni));
        match request {
            Request::Upgrade { node, .. } | Request::Stage { node, .. } | Request::Unstage { node, .. } => {
                self.has_unheard(node)
            }
            Request::Give { nic, give, .. } => is_unheard(nic) || self.has_unheard(&give.to),
            Request::Standby { nic, .. } => is_unheard(nic),
            Request::AddNode { node, .. } => has_unheard_beside(node),
            Request::RemoveNode { node, .. } => {
                self.has_unheard(node) || self.config.node(node).is_some_and(has_unheard_beside)
            }
            // They concern all nodes.
            Request::Apply { .. } | Request::Replace { .. } => true,
            _ => false,
        }
    }

    fn answer_request(&mut self, request: Request) {
        match request {
            Request::Status(answer) => drop(answer.send(Ok(self.status_view()))),
            Request::Nodes(answer) => drop(answer.send(Ok(self.node_views()))),
            Request::Workers(answer) => drop(answer.send(Ok(self.worker_views()))),
            Request::Nics(answer) => drop(answer.send(Ok(self.nic_views()))),
            Request::Events { since, answer } => {
                // The caller knows the events of a daemon that has stopped everything: the next one counts from 1 again.
                let since = if since > self.last_event { 0 } else { since };
                let events = self.events.iter().filter(|event| event.number > since).cloned().collect();
                drop(answer.send(Ok(events)));
            }
            Request::Counts { nic, answer } => self.ask_for_counts(&nic, answer),
            Request::Upgrade { node, upgrade, answer } => self.upgrade(&node, upgrade, answer),
            Request::Stage { node, staging, answer } => {
                let begun = self.begin_staging(&node, staging);
                self.answer_after(begun, answer);
            }
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
            Request::Replace { with, version, says, answer } => {
                drop(answer.send(self.replace(with, version, &says)));
            }
            Request::Stop(answer) => self.begin_stopping(answer),
            Request::Note(sentence) => self.note(About::default(), sentence),
        }
    }

    pub(super) fn no_node(&self, name: &str) -> Refusal {
        Refusal::NotFound(format!("there is no node {name:?}; {}", there_are(self.nodes.keys())))
    }

    pub(super) fn nic_by_name(&self, name: &str) -> Result<u32, Refusal> {
        let found = self.cards.values().find(|card| card.name() == name).map(|card| card.number);
        found.ok_or_else(|| {
            Refusal::NotFound(format!(
                "there is no NIC {name:?}; {}",
                there_are(self.cards.values().map(|card| card.name()))
            ))
        })
    }

    fn ask_for_counts(&mut self, nic: &str, answer: Answer<Counts>) {
        let asked = self.nic_by_name(nic).and_then(|number| {
            let holder = self.cards[&number].holder().and_then(|holder| self.workers.get_mut(&holder));
            let worker = holder.ok_or_else(|| {
                Refusal::conflict(format!("no worker drives {nic}, so there are no counters; tasuki nic list says why"))
            })?;
            let sent = worker.write(&ToWorker::Counts, &[]);
            sent.map_err(|errno| {
                Refusal::conflict(format!("the worker that drives {nic} is not to be asked ({errno}); ask again"))
            })?;
            worker.asked.counts = true;
            Ok((number, worker.party()))
        });
        match asked {
            Ok((number, worker)) => self.counting.push((number, worker, now(), answer)),
            Err(refusal) => drop(answer.send(Err(refusal))),
        }
    }
}
