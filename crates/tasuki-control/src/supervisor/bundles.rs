//! Handles the descriptors that workers send, mainly memory of NICs, and the statements of adopted workers.

use std::os::fd::OwnedFd;

use rustix::event::Timespec;
use rustix::fs::{SealFlags, Stat};
use tasuki_relay::message::{DeviceBundle, FDS_MAX, LAYOUT_MAX, MESSAGE_MAX, ToDaemon, ToWorker};

use super::card::{Memory, Opened};
use super::deposits::Key;
use super::hear::{LACKS_SHARED_LIMITS, LENDS_NOTHING};
use super::worker::{Readiness, Stage};
use super::{About, Supervisor};
use crate::foreign::{Foreign, seals};

/// Bytes of memory that a worker makes for a card, at most: half of the addresses that there are for it.
const MEMORY_MAX: u64 = 128 << 20;

/// Returns how many descriptors belong to a message, unless that depends on more than the message.
pub(super) fn belong(message: &ToDaemon) -> Option<usize> {
    match message {
        ToDaemon::Begun { .. }
        | ToDaemon::Mine { .. }
        | ToDaemon::Counts { .. }
        | ToDaemon::NoClient { .. }
        | ToDaemon::Told { .. } => Some(0),
        ToDaemon::DriverState { .. } => Some(1),
        ToDaemon::Client { .. } | ToDaemon::DeviceBundle { .. } | ToDaemon::Memory { .. } => None,
    }
}

/// Returns why a NIC cannot be made of this bundle: a message to a worker would not hold it, now or once it lies in
/// memory of a worker's.
pub(super) fn too_much(nic: u32, name: &str, bundle: &DeviceBundle) -> Option<String> {
    // Give every field that takes room its largest value.
    let bundle = DeviceBundle {
        layout: Some("\"".repeat(LAYOUT_MAX)),
        partial: true,
        made_by: Some(u32::MAX),
        ..bundle.clone()
    };
    let fds = bundle.fds + 1;
    let odd = bundle.partial && bundle.memory > bundle.fds;
    let message = ToWorker::Nic { nic, name: name.to_owned(), iova: u64::MAX, fenced: false, bundle };
    let len = serde_json::to_vec(&message).expect("a message is plain data").len();
    (fds > FDS_MAX || len > MESSAGE_MAX || odd).then(|| {
        format!(
            "{name} cannot be opened: its device bundle has {fds} descriptors and {len} bytes, and a message has room for {FDS_MAX} and {MESSAGE_MAX}"
        )
    })
}

/// Returns the kernel's identity of a file: device and inode number.
fn file_of(stat: &Stat) -> (u64, u64) {
    (stat.st_dev, stat.st_ino)
}

impl Supervisor {
    /// Handles the memory that a NIC will lie in once this worker drives it. A worker may change nothing else of a
    /// NIC: the opener alone provides the connection to the card. If the daemon may not open the descriptors, the NIC
    /// stays where it is: a driver whose memory no other process has would take the NIC along when it dies.
    pub(super) fn on_memory(&mut self, number: u32, nic: u32, layout: String, fds: Option<Foreign>) {
        let Some(worker) = self.workers.get(&number) else { return };
        let end = self.cards.get(&nic).is_some_and(|card| card.vni().is_some());
        if end || !worker.given.contains(&nic) {
            return self.kill_worker(number, format!("sent memory for NIC {nic}, which it was not given to move"));
        }
        let is_target = self.jobs.iter().any(|job| job.target == number && job.is_about(nic));
        let Some(card) = self.cards.get(&nic).filter(|card| is_target && card.holder() != Some(number)) else {
            // The relay that it prepared for is over.
            return;
        };
        let Some(opened) = &card.opened else { return };
        if worker.process.ends_within(&Timespec::default()) {
            // Its end fails the job.
            return;
        }
        // Without descriptors the kernel cannot be asked for its user either.
        let Some((fds, uid)) = fds.zip(worker.process.fs_uid()) else {
            let why = format!(
                "tasukid may open no more descriptors, and lacks those of the memory that worker {number} made for {}; raise LimitNOFILE= of tasukid (ulimit -Hn)",
                card.name()
            );
            let job = self.jobs.iter_mut().find(|job| job.target == number && job.is_about(nic));
            return job.into_iter().for_each(|job| job.fail_before_relay(why.clone()));
        };
        if let Some(odd) = self.odd_memory(opened, uid, &layout, &fds) {
            let name = card.name().to_owned();
            return self.kill_worker(number, format!("sent unusable memory for {name} ({odd})"));
        }
        // Closing memory takes no time.
        let memory = Memory { layout, fds: fds.trust() };
        if let Some(card) = self.cards.get_mut(&nic) {
            card.coming = Some((number, memory));
            self.mark_deposit(Key::NextMemory(nic));
        }
    }

    /// Returns the fault of memory that a worker of this user has made, if there is one.
    fn odd_memory(&self, opened: &Opened, uid: u32, layout: &str, fds: &[OwnedFd]) -> Option<&'static str> {
        if fds.len() != opened.bundle.memory {
            return Some("it has not as many descriptors as the NIC's memory");
        }
        if layout.len() > LAYOUT_MAX {
            return Some("the description of its layout is too long");
        }
        // First: only memory has seals, and no file system is asked for them.
        let sealed = |fd| seals(fd).is_some_and(|seals| seals.contains(SealFlags::SHRINK | SealFlags::GROW));
        if !fds.iter().all(sealed) {
            return Some("it could change its size, or is not memory");
        }
        let stats: Vec<Stat> = fds.iter().filter_map(|fd| rustix::fs::fstat(fd).ok()).collect();
        let bytes: u64 = stats.iter().map(|stat| stat.st_size.unsigned_abs()).fold(0, u64::saturating_add);
        if bytes > MEMORY_MAX || stats.iter().any(|stat| stat.st_size <= 0) {
            return Some("it is too large, or empty");
        }
        if stats.len() != fds.len() || stats.iter().any(|stat| stat.st_uid != uid) {
            return Some("another process made it");
        }
        let mut files: Vec<_> = stats.iter().map(file_of).collect();
        files.sort_unstable();
        let is_twice = files.windows(2).any(|two| two[0] == two[1]);
        let cards = self.cards.values().filter(|card| card.vni().is_none());
        let known = cards.flat_map(|card| card.lend(FDS_MAX, "")).filter_map(|fd| rustix::fs::fstat(fd).ok());
        let is_known = known.into_iter().any(|stat| files.binary_search(&file_of(&stat)).is_ok());
        (is_twice || is_known).then_some("it is a NIC's already")
    }

    /// Handles an adopted worker's statement of its number, its node, and the NICs that it has. The keeper has their
    /// device bundles.
    pub(super) fn on_identity(&mut self, number: u32, party: u32, node: &str, nics: &[u32]) {
        let Some(worker) = self.workers.get_mut(&number) else { return };
        if std::mem::take(&mut worker.asked.again) {
            // It was asked for its client alone.
            return;
        }
        if matches!(worker.stage, Stage::Leaving(_)) {
            // It was told to end before it answered.
            return;
        }
        if !matches!(worker.stage, Stage::Asked(_)) || party != number || node != worker.record.node {
            return self.kill_worker(number, format!("says that it is worker {party} of node {node}"));
        }
        if let Some(nic) = nics.iter().find(|nic| !worker.given.contains(nic)) {
            return self.kill_worker(number, format!("says that it has NIC {nic}, which it was never given"));
        }
        for nic in nics {
            let Some(card) = self.cards.get(nic) else {
                // Its namespace's interface may be on another VNI by now.
                return self.kill_worker(number, format!("has end {nic}, which is not in the configuration any more"));
            };
            if card.opened.is_none() {
                let name = card.name().to_owned();
                return self.kill_worker(number, format!("alone has the device bundle of {name}"));
            }
            if let Some(worker) = self.workers.get_mut(&number) {
                // For now: it reports its state when the arbiter asks.
                worker.nics.insert(*nic, Readiness::Ready);
            }
        }
        // It began while no tasukid heard with which versions.
        if self.keeps_own_limits(number, &self.config) {
            return self.kill_worker(number, LACKS_SHARED_LIMITS.to_owned());
        }
        if self.lends_nothing(number, &self.config) {
            return self.kill_worker(number, LENDS_NOTHING.to_owned());
        }
        self.adopted += 1;
        self.mark_begun(number);
        // If it answers late, its ends have joined their VNIs: it hears of its neighbours now.
        let ends = nics.iter().filter(|nic| self.cards.get(nic).is_some_and(|card| self.is_member(card)));
        let ends: Vec<(u32, u32)> = ends.map(|nic| (number, *nic)).collect();
        self.untold.extend(ends);
        if !self.adopting {
            // The others have heard of its lender's client already.
            let borrowed: Vec<u32> = nics.iter().copied().filter(|nic| self.is_borrower(number, *nic)).collect();
            borrowed.into_iter().for_each(|nic| self.tell_client(nic, number));
        }
        let sentence = format!("worker {number} of node {node} ran on while no tasukid did, and is adopted");
        self.note(About::worker(node, number), sentence);
    }
}
