//! The content of the registry, in memory. The registry is written anew from this after its file could not be
//! written for a while.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::{AppliedRecord, Change, EVENTS_MAX, Event, Known, NicRecord, NodeRecord, WorkerRecord, text};

/// The content. It grows with the present nodes, NICs and workers, and not with former ones.
#[derive(Debug, Default)]
pub struct Mirror {
    workers: BTreeMap<u32, WorkerRecord>,
    nics: BTreeMap<u32, NicRecord>,
    nodes: BTreeMap<String, NodeRecord>,
    /// As they are written.
    added: BTreeMap<String, Vec<u8>>,
    applied: Option<AppliedRecord>,
    fenced: BTreeSet<u32>,
    events: VecDeque<Event>,
    last_party: u32,
}

impl Mirror {
    /// Starts from an earlier daemon's content.
    pub fn of(known: &Known) -> Self {
        Mirror {
            workers: known.workers.iter().map(|worker| (worker.party, worker.clone())).collect(),
            nics: known.nics.iter().map(|nic| (nic.number, nic.clone())).collect(),
            nodes: known.nodes.iter().cloned().collect(),
            added: known.added_as_written.iter().cloned().collect(),
            applied: known.applied.clone(),
            fenced: known.fenced.iter().copied().collect(),
            events: known.events.iter().cloned().collect(),
            last_party: known.last_party,
        }
    }

    /// Applies a change.
    pub fn apply(&mut self, change: &Change) {
        match change {
            Change::Worker(worker) => drop(self.workers.insert(worker.party, worker.clone())),
            Change::NoWorker(party) => {
                self.workers.remove(party);
                self.fenced.remove(party);
            }
            Change::Nic(nic) => drop(self.nics.insert(nic.number, nic.clone())),
            Change::NoNic(number) => drop(self.nics.remove(number)),
            Change::Node(name, node) => drop(self.nodes.insert(name.clone(), node.clone())),
            Change::Added(node) => drop(self.added.insert(node.name.clone(), text(node))),
            Change::AddedBefore(name, written) => drop(self.added.insert(name.clone(), written.clone())),
            Change::NotAdded(name) => drop(self.added.remove(name)),
            Change::Applied(record) => self.applied = Some(record.clone()),
            Change::Removed(name) => {
                self.added.remove(name);
                self.nodes.remove(name);
            }
            Change::Fence(party) => drop(self.fenced.insert(*party)),
            Change::Event(event) => {
                self.events.push_back(event.clone());
                if self.events.len() as u64 > EVENTS_MAX {
                    self.events.pop_front();
                }
            }
            Change::Party(last) => self.last_party = *last,
        }
    }

    /// Returns the changes that make an empty registry this one.
    pub fn changes(&self) -> Vec<Change> {
        let mut all: Vec<Change> = self.fenced.iter().copied().map(Change::Fence).collect();
        all.push(Change::Party(self.last_party));
        all.extend(self.workers.values().cloned().map(Change::Worker));
        all.extend(self.nics.values().cloned().map(Change::Nic));
        all.extend(self.nodes.iter().map(|(name, node)| Change::Node(name.clone(), node.clone())));
        all.extend(self.added.iter().map(|(name, written)| Change::AddedBefore(name.clone(), written.clone())));
        all.extend(self.applied.clone().map(Change::Applied));
        all.extend(self.events.iter().cloned().map(Change::Event));
        all
    }
}
