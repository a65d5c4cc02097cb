//! Closes NICs while their nodes go on.

use std::collections::BTreeSet;

use tasuki_relay::message::program_state;
use tokio::sync::oneshot;

use super::card::{Card, Opening};
use super::deposits::Key;
use super::door::Refusal;
use super::worker::Stage;
use super::{About, Supervisor, WORKER_TIMEOUT, now};
use crate::api::types::Upgrade;
use crate::config::Work;
use crate::registry::Change;

impl Supervisor {
    /// Closes a NIC. First a fresh worker takes over its node's other NICs; then the workers that have it end, and with
    /// its last driver the card rests. So do those of other nodes that once had it: they may hold on to the card, and
    /// another NIC gets its number.
    pub(super) fn begin_closing(&mut self, nic: u32) -> Result<(), Refusal> {
        let card = self.cards.get(&nic).ok_or(Refusal::Ending)?;
        let (node, name) = (card.node().to_owned(), card.name().to_owned());
        self.is_free(&node, &[nic])?;
        if let Some(card) = self.cards.get_mut(&nic) {
            card.closing = Some(now());
            if let Opening::Opener(opener) = &card.opening {
                opener.process.kill();
            }
        }
        self.config.nic.retain(|it| it.name != name);
        self.note(About::node(&node).of_nic(&name), format!("{name} is being closed"));
        let had = self.workers.values().filter(|worker| worker.given.contains(&nic));
        let nodes: BTreeSet<String> = had.map(|worker| worker.record.node.clone()).chain([node]).collect();
        for node in nodes {
            let has_more = self.cards.of(&node).any(|card| card.closing.is_none() && card.opened.is_some());
            let is_uplink = self.config.node(&node).is_some_and(|node| node.work == Work::Uplink);
            if has_more && !is_uplink && self.nodes.contains_key(&node) {
                let (answer, _) = oneshot::channel();
                self.upgrade(&node, Upgrade::default(), answer);
            }
        }
        Ok(())
    }

    /// Forgets a NIC that is gone, also what nodes' programs have kept for it: another NIC gets its number.
    pub(super) fn forget_nic(&mut self, nic: u32) {
        self.changes.push(Change::NoNic(nic));
        for (name, node) in &self.nodes {
            if self.config.node(name).is_some_and(|node| node.vni.is_none()) {
                let words = program_state::of_nic(nic).into_iter().flatten();
                words.for_each(|word| node.program_state.store(word, 0));
            }
        }
    }

    /// Goes on with closing NICs.
    pub(super) fn go_on_closing(&mut self) {
        if self.adopting {
            return;
        }
        let is_closing = |card: &&Card| card.closing.is_some() && !self.unheard.contains(&card.number);
        let closing: Vec<u32> = self.cards.values().filter(is_closing).map(|card| card.number).collect();
        for nic in closing {
            let Some(card) = self.cards.get(&nic) else { continue };
            let had = |node: &str| self.workers.of(node).any(|worker| worker.given.contains(&nic));
            if self.jobs.iter().any(|job| job.node() == card.node() || had(job.node())) {
                continue;
            }
            let (name, node) = (card.name().to_owned(), card.node().to_owned());
            let is_late = card.closing.is_some_and(|since| now().saturating_sub(since) >= WORKER_TIMEOUT / 2);
            let mut has_workers = false;
            for worker in self.workers.values_mut().filter(|worker| worker.given.contains(&nic)) {
                has_workers = true;
                if worker.serves() {
                    worker.stage = Stage::Leaving(now());
                    worker.tell_to_end();
                }
            }
            let Some(card) = self.cards.get_mut(&nic).filter(|_| !has_workers) else { continue };
            card.let_go(is_late);
            if card.model.is_some() || matches!(card.opening, Opening::Opener(_)) {
                continue;
            }
            self.cards.remove(&nic);
            self.forget_nic(nic);
            [Key::Card(nic), Key::NextPage(nic), Key::NextMemory(nic)]
                .into_iter()
                .for_each(|key| self.mark_deposit(key));
            self.note(About::node(&node).of_nic(&name), format!("{name} is closed"));
        }
    }
}
