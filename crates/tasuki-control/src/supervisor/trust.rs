//! Trust between nodes that is withdrawn: a NIC's lease page, which nodes that trust each other share, goes back to one.

use super::Supervisor;
use super::card::Card;
use super::worker::Worker;

impl Supervisor {
    /// Returns the first two nodes that have the NIC's lease page and do not trust each other; the second one is to lose it.
    fn strangers_of(&self, card: &Card) -> Option<(String, String)> {
        let others = |one: &String| {
            let is_stranger = |other: &&String| **other != card.node() && !self.config.trust(one, other);
            card.page_of.iter().find(is_stranger).cloned()
        };
        card.page_of.iter().find_map(|one| Some((one.clone(), others(one)?)))
    }

    /// Returns whether the lease page is shared by nodes that do not trust each other any more.
    pub(super) fn has_strangers(&self, card: &Card) -> bool {
        card.page_of.len() > 1 && card.page_of.contains(card.node()) && self.strangers_of(card).is_some()
    }

    /// Takes NICs' lease pages from nodes that are not trusted any more: their workers that had the NIC end first.
    pub(super) fn reconcile_trust(&mut self) {
        let is_still = |card: &Card| card.is_settled() || card.arbiter.is_none();
        let is_free = |card: &&Card| is_still(card) && !self.jobs.iter().any(|job| job.is_about(card.number));
        let shared = self.cards.values().filter(|card| self.has_strangers(card)).filter(is_free);
        let strangers: Vec<(u32, String, (String, String))> =
            shared.filter_map(|card| Some((card.number, card.name().to_owned(), self.strangers_of(card)?))).collect();
        for (nic, name, (one, other)) in strangers {
            let had = self.workers.of(&other).filter(|worker| worker.given.contains(&nic));
            let had: Vec<u32> = had.map(Worker::party).collect();
            for number in &had {
                self.kill_worker(*number, format!("has had {name}, and node {one} does not trust it any more"));
            }
            let (ours, theirs) = (self.node_number(&one), self.node_number(&other));
            if let Some(card) = self.cards.get_mut(&nic).filter(|_| had.is_empty()) {
                card.page_of.remove(&other);
                card.arbiter.iter_mut().for_each(|arbiter| arbiter.estrange(ours, theirs));
                self.record_nic(nic);
            }
        }
    }

    /// Tells the arbiters which nodes do not trust each other any more, but where both have the page: see `reconcile_trust`.
    pub(super) fn estrange_those_without_shared_page(&mut self) {
        let names: Vec<String> = self.nodes.keys().cloned().collect();
        let pairs =
            names.iter().flat_map(|one| names.iter().filter(move |other| one < *other).map(move |other| (one, other)));
        let strangers: Vec<_> = pairs.filter(|(one, other)| !self.config.trust(one, other)).collect();
        for (one, other) in strangers {
            let (one, other) = (self.node_number(one), self.node_number(other));
            let arbiters = self.cards.values_mut().filter_map(|card| card.arbiter.as_mut());
            arbiters.filter(|arbiter| !arbiter.share_page(one, other)).for_each(|arbiter| arbiter.estrange(one, other));
        }
    }
}
