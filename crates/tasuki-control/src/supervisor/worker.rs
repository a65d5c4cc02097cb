//! A worker, as the daemon sees it.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::Shutdown;
use tasuki_relay::heartbeat::Heartbeat;
use tasuki_relay::message::{self, ToWorker, heartbeat};
use tasuki_relay::wire::{Order, Plan, Reason};
use tasuki_shm::region::{Region, RegionError, Span};
use tasuki_shm::sync::AtomicU64;

use super::by_node::OfNode;
use super::jails::{FirstMessage, Jailing};
use super::lines::Lines;
use crate::bucket::Bucket;
use crate::cgroup::Group;
use crate::channel;
use crate::process::Process;
use crate::registry::WorkerRecord;

/// The words of a memory that the daemon and a worker share.
#[derive(Debug)]
pub struct Words {
    region: Region,
    words: Span<AtomicU64>,
}

impl Words {
    /// Creates a memory of `len` bytes.
    pub fn create(name: &str, len: usize) -> Result<Self, RegionError> {
        let region = Region::create(name, len, tasuki_shm::region::Pages::Small)?;
        // Several workers write it, and later ones have to.
        region.seal_seals()?;
        Self::of(region)
    }

    /// Adopts a memory that another process kept. It is an error if that is shorter than `len` bytes.
    pub fn adopt(memory: OwnedFd, len: usize) -> Result<Self, RegionError> {
        let region = Region::adopt(memory)?;
        if region.len() < len {
            return Err(RegionError::Truncated { have: region.len(), need: len });
        }
        Self::of(region)
    }

    fn of(region: Region) -> Result<Self, RegionError> {
        let words = region.span(0, region.len() / 8)?;
        Ok(Words { region, words })
    }

    /// Returns word `index`.
    pub fn load(&self, index: usize) -> u64 {
        self.words[index].load(Relaxed)
    }

    /// Writes word `index`, with release ordering.
    pub fn store(&self, index: usize, value: u64) {
        self.words[index].store(value, Release);
    }

    /// Adds 1 to word `index`.
    pub fn count(&self, index: usize) {
        self.words[index].fetch_add(1, Release);
    }

    pub fn region(&self) -> &Region {
        &self.region
    }
}

/// How far a worker has come with a NIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Readiness {
    /// It maps and checks, since this time.
    Preparing(Duration),
    /// It could drive at once.
    Ready,
    /// It cannot take this NIC.
    Unfit(Reason),
}

/// A worker's stage of life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// It was started at this time, and has not reported that it accepts orders.
    Starting(Duration),
    /// An earlier daemon started it; this daemon asked it at this time for its state.
    Asked(Duration),
    /// It accepts orders.
    Begun,
    /// It was told to end at this time.
    Leaving(Duration),
    /// It was frozen or killed for good at this time, and is not known to be dead.
    Excluded(Duration),
}

/// Sentences a worker may pass to users at once, and the time until it may pass one more.
const SENTENCES_AT_ONCE_MAX: u32 = 50;
const SENTENCE_EVERY: Duration = Duration::from_millis(500);

/// Reports of its node's client that a worker may make at once: as many as it makes in a row (`AHEAD` in its `client.rs`), and
/// those for which its socket has room. A daemon that has not read for a while finds these at once: by
/// default 277 in the 212,992 bytes of `net.core.wmem_default`, of which the kernel counts 768 or more for each.
const CLIENT_REPORTS_AT_ONCE_MAX: u32 = 64 + 320;
/// Time until it may make one more: each has descriptors, which take time to close.
const CLIENT_REPORT_EVERY: Duration = Duration::from_millis(10);

/// Returns why a living worker missed a message, if it did. A dead or dying worker's pidfd reports its death.
pub fn why_missed(sent: Result<(), Errno>) -> Option<Errno> {
    sent.err().filter(|errno| !matches!(*errno, Errno::PIPE | Errno::CONNRESET))
}

#[derive(Debug)]
pub struct Worker {
    /// Its record in the registry.
    pub record: WorkerRecord,
    pub process: Process,
    /// The daemon's end of the channel to it.
    pub socket: OwnedFd,
    /// Its heartbeat; `None` while the daemon asks for it.
    pub heartbeat: Option<Words>,
    /// The daemon's record of that heartbeat.
    pub heart: Heartbeat,
    /// When the daemon asked it for the answer that shows it lives, if that is still due.
    pub probe: Option<Duration>,
    /// When the daemon last heard from it, or last asked it.
    pub heard: Duration,
    pub stage: Stage,
    /// The NICs that it has, by number.
    pub nics: BTreeMap<u32, Readiness>,
    /// Whether it has ever reported that it accepts orders.
    pub has_begun: bool,
    /// The NICs that it was ever given.
    pub given: BTreeSet<u32>,
    /// Confinement it lacks from before it began: stage one.
    pub lacks: Vec<String>,
    /// Set while its process is being confined.
    pub jailing: Option<Jailing>,
    /// Its first message, until the process is confined.
    pub first_message: Option<FirstMessage>,
    /// Why the next daemon will not find it, as a sentence for users, if it will not.
    pub unfound: Option<String>,
    /// The socket in place of its own, and when it was told of that, until it listens there.
    pub next_listener: Option<(OwnedFd, Duration)>,
    /// Its output on standard error.
    pub lines: Option<Lines>,
    /// Its allowance of sentences for users.
    pub sentence_allowance: Bucket,
    /// How often it may still report its node's client.
    pub client_reports: Bucket,
    /// Its control group, in its node's: see [`crate::cgroup`]. `None` if the machine has none for the daemon.
    pub group: Option<Group>,
    /// Since when its thread has ended, or it has closed its end: it is ending, or ignores the daemon.
    pub hung_up_since: Option<Duration>,
    /// An earlier daemon started it.
    pub is_adopted: bool,
    /// An upgrade or a handover asked for it by name.
    pub wanted: bool,
    /// Messages that it may write because this daemon asked for them.
    pub asked: Asked,
}

/// Messages that a worker may write only when asked.
#[derive(Debug, Default)]
pub struct Asked {
    /// NICs whose driver state it is to store, once for each time that it was asked.
    pub driver_states: Vec<u32>,
    /// Whether it was ever asked for counts. One answer for each NIC that it drives is due then.
    pub counts: bool,
    /// When to ask it for its node's client again, for whose descriptors the daemon had no room.
    pub client_at: Option<Duration>,
    /// Whether it was asked to say again who it is.
    pub again: bool,
}

impl OfNode for Worker {
    fn node(&self) -> &str {
        &self.record.node
    }
}

impl Worker {
    /// Creates a worker that has no NIC and has said nothing yet.
    pub fn new(record: WorkerRecord, process: Process, socket: OwnedFd, stage: Stage, now: Duration) -> Self {
        Worker {
            record,
            process,
            socket,
            heartbeat: None,
            heart: Heartbeat::new(now),
            probe: None,
            heard: now,
            stage,
            nics: BTreeMap::new(),
            has_begun: false,
            given: BTreeSet::new(),
            lacks: Vec::new(),
            jailing: None,
            first_message: None,
            unfound: None,
            next_listener: None,
            lines: None,
            sentence_allowance: Bucket::new(SENTENCES_AT_ONCE_MAX, SENTENCE_EVERY, now),
            client_reports: Bucket::new(CLIENT_REPORTS_AT_ONCE_MAX, CLIENT_REPORT_EVERY, now),
            group: None,
            hung_up_since: None,
            is_adopted: false,
            wanted: false,
            asked: Asked::default(),
        }
    }

    /// Returns its number.
    pub fn party(&self) -> u32 {
        self.record.party
    }

    /// Records how far it has come with a NIC.
    pub fn has(&mut self, nic: u32, readiness: Readiness) {
        self.given.insert(nic);
        self.nics.insert(nic, readiness);
    }

    /// Returns the versions of driver states of this kind that it reads and writes, if it has said so.
    pub fn versions(&self, kind: u32) -> Option<RangeInclusive<u32>> {
        let its = self.record.reads.iter().find(|(its, ..)| *its == kind);
        its.map(|&(_, from, to)| from..=to)
    }

    /// Returns whether it can hear of clients with many descriptors. One that began while no daemon was there to hear of
    /// its versions is asked, and refuses by itself.
    pub fn takes_many_fds(&self) -> bool {
        self.record.reads.is_empty() || self.reads_ends(message::vni::WIDE_VERSION)
    }

    /// Returns whether its switch knows nodes that share an address, as far as it has said.
    pub fn knows_sharing(&self) -> bool {
        self.record.reads.is_empty() || self.reads_ends(message::vni::SHARING_VERSION)
    }

    /// Returns whether it has said that it keeps limits together with the node's other workers.
    pub fn shares_limits(&self) -> bool {
        self.reads_ends(message::vni::LIMITS_VERSION)
    }

    /// Returns whether it has said that it listens at another socket when told.
    pub fn listens_anew(&self) -> bool {
        self.reads_ends(message::vni::LISTEN_VERSION)
    }

    /// Returns whether it has said that it lends and borrows queues of a machine.
    pub fn knows_loans(&self) -> bool {
        self.reads_ends(message::vni::LOANS_VERSION)
    }

    fn reads_ends(&self, version: u32) -> bool {
        self.versions(message::vni::KIND).is_some_and(|versions| versions.contains(&version))
    }

    /// Returns whether it accepts orders and is not ending.
    pub fn serves(&self) -> bool {
        self.stage == Stage::Begun && self.hung_up_since.is_none()
    }

    /// Returns whether it was frozen or killed for good.
    pub fn is_excluded(&self) -> bool {
        matches!(self.stage, Stage::Excluded(_))
    }

    /// Returns whether it is meant to serve, now or soon.
    pub fn counts(&self) -> bool {
        self.hung_up_since.is_none() && matches!(self.stage, Stage::Begun | Stage::Starting(_) | Stage::Asked(_))
    }

    /// Sends a message.
    pub fn write(&self, message: &ToWorker, fds: &[std::os::fd::BorrowedFd<'_>]) -> Result<(), Errno> {
        let bytes = serde_json::to_vec(message).expect("a message is plain data");
        self.post(&bytes, fds)
    }

    /// Tells it to end. A process that waits for its program knows no messages, and ends when none can come any more.
    pub fn tell_to_end(&mut self) {
        let waits = self.first_message.take().is_some() && self.jailing.is_some();
        let _ = match waits {
            true => rustix::net::shutdown(&self.socket, Shutdown::Write),
            false => self.write(&ToWorker::End, &[]),
        };
    }

    /// Sends an order.
    pub fn order(&self, nic: u32, order: Order) -> Result<(), Errno> {
        self.post(&message::frame(nic, order.to_bytes()), &[])
    }

    /// Sends the plan for the next order about a NIC.
    pub fn plan(&self, nic: u32, plan: Plan) -> Result<(), Errno> {
        self.post(&message::frame(nic, plan.to_bytes()), &[])
    }

    fn post(&self, bytes: &[u8], fds: &[std::os::fd::BorrowedFd<'_>]) -> Result<(), Errno> {
        channel::send(self.socket.as_fd(), bytes, fds)?;
        if let Some(heartbeat) = &self.heartbeat {
            heartbeat.count(heartbeat::POSTS);
        }
        Ok(())
    }

    pub fn binary(&self) -> &PathBuf {
        &self.record.binary
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::SealFlags;

    use super::*;

    /// row: T138
    #[test]
    fn nobody_seals_the_words_that_workers_share() {
        let words = Words::create("tasuki test", 8).expect("memory");
        let lent = words.region().fd().try_clone_to_owned().expect("a descriptor");
        let sealed = rustix::fs::fcntl_add_seals(&lent, SealFlags::FUTURE_WRITE);
        assert_eq!(sealed, Err(Errno::PERM), "a later worker could not map it");
        Region::adopt(lent).expect("one maps it");
    }
}
