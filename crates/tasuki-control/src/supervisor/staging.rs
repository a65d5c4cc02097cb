//! Programs started ahead of the upgrade that wants them: `tasuki worker stage`.
//!
//! A staged worker is ready for every NIC of its node, but takes over from no dead worker: no upgrade has asked for its
//! program yet. An upgrade takes it if it runs the very program that the upgrade wants ([`FileName`]). That saves the
//! other parts of a start: process, confinement, mapping. The registry records that it is staged, so a later daemon
//! goes on with it.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::door::{Answer, Refusal};
use super::jobs::Job;
use super::worker::Worker;
use super::{About, Supervisor};
use crate::api::types::{Relayed, Staging};
use crate::registry::{Change, WorkerRecord};
use crate::spawn;

/// The identity of a program file when it was started. A file that was replaced, or written to, has another, though
/// it has the same path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileName {
    device: u64,
    inode: u64,
    size: u64,
    /// When its contents last changed, and when anything of it last changed: seconds and nanoseconds.
    changed: [(i64, i64); 2],
}

impl FileName {
    /// Returns the identity of the file that is at this path now, looked up as a program is.
    ///
    /// # Errors
    /// The file's metadata cannot be read.
    pub fn of(path: &Path) -> std::io::Result<Self> {
        let meta = std::fs::metadata(spawn::find(path))?;
        let changed = [(meta.mtime(), meta.mtime_nsec()), (meta.ctime(), meta.ctime_nsec())];
        Ok(FileName { device: meta.dev(), inode: meta.ino(), size: meta.size(), changed })
    }
}

impl Supervisor {
    /// Returns the living worker that is staged for a node, if there is one.
    pub(super) fn staged_of(&self, node: &str) -> Option<&Worker> {
        let is_it = |worker: &&Worker| worker.record.staged.is_some() && worker.counts();
        self.workers.of(node).find(is_it)
    }

    /// Returns the staged worker, if it runs the program that is at this path now.
    pub(super) fn staged_as(&self, node: &str, binary: &Path) -> Option<u32> {
        let staged = self.staged_of(node).filter(|staged| staged.record.staged == FileName::of(binary).ok());
        staged.map(Worker::party)
    }

    /// Starts the program that an upgrade will want. A staged worker of that program stays; one of another program
    /// is ended.
    pub(super) fn begin_staging(&mut self, node: &str, Staging { with }: Staging) -> Result<Job, Refusal> {
        let nics = self.nics_to_upgrade(node, with.as_deref())?;
        let binary = self.program_of(node, with.clone());
        let there = self.staged_as(node, &binary);
        if there.is_none() {
            self.end_staged(node);
        }
        let job = Job::staging(node, there, binary, nics);
        if there.is_some() {
            return Ok(job);
        }
        let failed = |error: anyhow::Error| Refusal::conflict(format!("nothing is staged for node {node}: {error:#}"));
        self.start_target(job).map_err(failed)
    }

    /// Returns whether a worker is staged, and no upgrade has taken it.
    pub(super) fn is_staged_now(&self, number: u32) -> bool {
        self.workers.get(&number).is_some_and(|worker| worker.record.staged.is_some())
    }

    /// Records in the registry whether a worker is staged.
    pub(super) fn is_staged(&mut self, number: u32, staged: Option<FileName>) {
        let Some(worker) = self.workers.get_mut(&number) else { return };
        worker.record.staged = staged;
        worker.wanted = staged.is_some();
        self.changes.push(Change::Worker(worker.record.clone()));
    }

    /// Handles a worker that drives and whose upgrade was not finished.
    pub(super) fn was_upgraded_to(&mut self, number: u32) {
        self.is_staged(number, None);
        let Some(worker) = self.workers.get(&number) else { return };
        let WorkerRecord { node: name, generation, binary, .. } = worker.record.clone();
        let is_other = self.program_of(&name, None) != binary;
        let Some(node) = self.nodes.get_mut(&name) else { return };
        node.record.generation = generation;
        node.record.binary = if is_other { Some(binary) } else { node.record.binary.take() };
        let record = node.record.clone();
        self.changes.push(Change::Node(name, record));
    }

    /// Returns whether a worker runs the program that was to be staged, and not a file put at that path while it
    /// started.
    pub(super) fn is_the_staged(&self, number: u32) -> bool {
        self.workers.get(&number).is_some_and(|worker| worker.record.staged == FileName::of(worker.binary()).ok())
    }

    /// Handles a staged worker that is ready for all NICs of its node.
    pub(super) fn has_staged(&mut self, node: &str, target: u32, answer: Option<Answer<Relayed>>) {
        let Some(worker) = self.workers.get(&target) else { return };
        let binary = worker.binary().display();
        let sentence = format!(
            "worker {target} of {binary} is staged for node {node}, and drives when an upgrade wants that program"
        );
        self.note(About::worker(node, target), sentence.clone());
        if let Some(answer) = answer {
            let _ = answer.send(Ok(Relayed { relays: Vec::new(), sentence }));
        }
    }

    /// Ends the worker staged for a node, if there is one, and returns its number.
    pub(super) fn end_staged(&mut self, node: &str) -> Option<u32> {
        let number = self.staged_of(node)?.party();
        self.is_staged(number, None);
        self.retire(number);
        Some(number)
    }

    pub(super) fn unstage(&mut self, node: &str) -> Result<Relayed, Refusal> {
        if !self.nodes.contains_key(node) {
            return Err(self.no_node(node));
        }
        self.is_free(node, &[])?;
        let Some(number) = self.end_staged(node) else {
            return Err(Refusal::conflict(format!("nothing is staged for node {node}")));
        };
        let sentence = format!("worker {number}, which was staged for node {node}, ends");
        self.note(About::worker(node, number), sentence.clone());
        Ok(Relayed { relays: Vec::new(), sentence })
    }
}
