//! What a worker sends besides words: what NICs and ends of VNIs are made of, and what else it kept for a daemon that came later.

use std::os::fd::OwnedFd;

use tasuki_relay::letter::{self, Kit, pulse};

use super::card::{Board, Kept};
use super::worker::{Fit, Stage, Words};
use super::{About, BOOK_LEN, Supervisor};

impl Supervisor {
    /// What a worker of another daemon has besides NICs.
    pub(super) fn gave_back(&mut self, number: u32, party: u32, kits: u32, tap: Option<String>, fds: Vec<OwnedFd>) {
        let Some(worker) = self.workers.get_mut(&number) else { return };
        let mut fds = fds.into_iter();
        let pulse = fds.next().and_then(|memory| Words::adopt(memory, pulse::LEN).ok());
        let book = fds.next().and_then(|memory| Words::adopt(memory, BOOK_LEN).ok());
        let (Stage::Asked(_), Some(pulse), Some(book), true) = (worker.stage, pulse, book, party == number) else {
            let sentence = "did not give its pulse and its book back; rebuild the older of the two".to_owned();
            return self.condemn(number, sentence);
        };
        self.tombs.watch(number, &pulse);
        (worker.pulse, worker.kits_due) = (Some(pulse), Some(kits));
        if let Some(node) = self.nodes.get_mut(&worker.record.node) {
            node.book = book;
        }
        let outlet = self.config.node(&worker.record.node).and_then(crate::config::Node::outlet);
        if let Some((label, device)) = tap.zip(fds.next()) {
            if outlet.as_ref() != Some(&label) {
                return self.condemn(number, format!("says that it has {label}, which is not its node's"));
            }
            match self.memifs.contains_key(&label) {
                true => self.adopt_memif(&label, device),
                false => self.adopt_tap(&label, device),
            }
        }
        self.adopt_if_whole(number);
    }

    /// A worker of another daemon that has given everything back is ours.
    fn adopt_if_whole(&mut self, number: u32) {
        let Some(worker) = self.workers.get(&number) else { return };
        if worker.kits_due != Some(0) || !matches!(worker.stage, Stage::Asked(_)) {
            return;
        }
        let node = worker.record.node.clone();
        self.adopted += 1;
        self.hears_orders(number);
        let sentence = format!("worker {number} of node {node} ran on while no tasukid did, and is adopted");
        self.note(About::worker(&node, number), sentence);
    }

    /// What a NIC is made of now, from a worker.
    pub(super) fn has_kit(
        &mut self,
        number: u32,
        nic: u32,
        name: &str,
        has_board: bool,
        kit: Kit,
        mut fds: Vec<OwnedFd>,
    ) {
        let Some(worker) = self.workers.get_mut(&number) else { return };
        let is_asked = matches!(worker.stage, Stage::Asked(_));
        worker.kits_due = worker.kits_due.map(|due| due.saturating_sub(1));
        let Some(card) = self.cards.get_mut(&nic).filter(|card| card.name() == name) else {
            if kit.kind == letter::vni::KIND {
                // Its namespace's interface may be on another VNI by now.
                return self.condemn(number, format!("has {name:?}, which is not in the configuration any more"));
            }
            let node = worker.record.node.clone();
            let sentence = format!(
                "worker {number} has a NIC {name:?} that is not in the configuration any more; it keeps it until it ends"
            );
            self.note(About::worker(&node, number), sentence);
            return self.adopt_if_whole(number);
        };
        let board = (has_board && !fds.is_empty()).then(|| fds.remove(0));
        if fds.len() != kit.fds {
            return self
                .condemn(number, format!("sent {} descriptors of {name} where it announced {}", fds.len(), kit.fds));
        }
        if let Some(sentence) = Self::odd_end(card, worker, &kit, &fds) {
            return self.condemn(number, sentence);
        }
        if is_asked && kit.partial {
            // It has memory of its own to come, or none: who drives the NIC gives all of it back.
            worker.nics.insert(nic, Fit::Ready);
            return self.adopt_if_whole(number);
        }
        // Of a NIC that runs only who drives it may say something new, and who is to have it soon what it will be then.
        let is_driver = card.board.holder() == Some(number);
        let is_target = self.jobs.iter().any(|job| job.target == number && job.is_about(nic));
        if !is_asked && !is_driver && is_target {
            card.coming = Some((number, Kept { kit, fds, made_by: number }));
            return;
        }
        let maker = kit.made_by.or(card.adopted_maker);
        if is_asked && card.kept.is_none() {
            let Some(Ok(board)) = board.map(Board::adopt) else {
                return self
                    .condemn(number, format!("did not give the board of {name} back; rebuild the older of the two"));
            };
            card.board = board;
            let made_by = maker.unwrap_or(number);
            card.kept = Some(Kept { kit, fds, made_by });
            card.opening = super::card::Opening::Open;
        } else if is_driver {
            let made_by = if is_asked { maker.unwrap_or(number) } else { number };
            card.kept = Some(Kept { kit, fds, made_by });
        }
        if is_asked {
            // As far as it goes; who it is it says when the arbiter asks.
            worker.nics.insert(nic, Fit::Ready);
        }
        self.record_nic(nic);
        self.adopt_if_whole(number);
    }
}
