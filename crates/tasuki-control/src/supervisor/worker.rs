//! A worker, as the daemon sees it.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::time::Duration;

use rustix::io::Errno;
use tasuki_relay::heartbeat::Heartbeat;
use tasuki_relay::message::{self, ToWorker, heartbeat};
use tasuki_relay::wire::{Order, Plan, Reason};
use tasuki_shm::region::{Region, RegionError, Span};
use tasuki_shm::sync::AtomicU64;

use super::jails::{Jailing, Unsaid};
use super::lines::Lines;
use crate::bucket::Bucket;
use crate::cgroup::Group;
use crate::channel;
use crate::process::Process;
use crate::registry::WorkerRecord;

/// A memory that daemon and worker share: its words.
#[derive(Debug)]
pub struct Words {
    region: Region,
    words: Span<AtomicU64>,
}

impl Words {
    /// New ones.
    pub fn create(name: &str, len: usize) -> Result<Self, RegionError> {
        let region = Region::create(name, len, tasuki_shm::region::Pages::Small)?;
        Self::of(region)
    }

    /// Those that another process kept.
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

    /// What stands in word `index`.
    pub fn load(&self, index: usize) -> u64 {
        self.words[index].load(Relaxed)
    }

    /// Writes it.
    pub fn store(&self, index: usize, value: u64) {
        self.words[index].store(value, Release);
    }

    /// Adds 1 to it.
    pub fn count(&self, index: usize) {
        self.words[index].fetch_add(1, Release);
    }

    /// The memory.
    pub fn region(&self) -> &Region {
        &self.region
    }
}

/// How far it has come with a NIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fit {
    /// It maps and checks, since then.
    Preparing(Duration),
    /// It could go on at once.
    Ready,
    /// It cannot take this NIC.
    Unfit(Reason),
}

/// How it stands with the daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// It was started, then, and has not said that it hears orders.
    Starting(Duration),
    /// A daemon before us started it, and it was asked, then, what it has.
    Asked(Duration),
    /// It hears orders.
    Begun,
    /// It was told to end, then.
    Leaving(Duration),
    /// It was killed, and is not known to be dead.
    Condemned,
}

/// Sentences that a worker may tell people at once, and how long one more takes.
const TELLS: u32 = 50;
const TELLS_EVERY: Duration = Duration::from_millis(500);

/// How much one may tell that has told nothing yet.
pub fn tells(now: Duration) -> Bucket {
    Bucket::new(TELLS, TELLS_EVERY, now)
}

/// A worker.
#[derive(Debug)]
pub struct Worker {
    /// What the registry has of it.
    pub record: WorkerRecord,
    /// Its process.
    pub process: Process,
    /// The way to it.
    pub socket: OwnedFd,
    /// Nothing while it is asked for it.
    pub heartbeat: Option<Words>,
    /// Of it.
    pub heart: Heartbeat,
    /// Since when an answer is waited for that shows that it lives, and when it was last asked.
    pub probe: Option<Duration>,
    /// When it was last heard.
    pub heard: Duration,
    /// How it stands.
    pub stage: Stage,
    /// The NICs that it was given, by number.
    pub nics: BTreeMap<u32, Fit>,
    /// Whether it has ever said that it hears orders.
    pub has_begun: bool,
    /// Those that it was ever given.
    pub given: BTreeSet<u32>,
    /// What it was not confined with before it began: stage one.
    pub lacks: Vec<String>,
    /// Its process is being confined.
    pub jailing: Option<Jailing>,
    /// What it is told once that is so.
    pub unsaid: Option<Unsaid>,
    /// What it writes on its standard error.
    pub lines: Option<Lines>,
    /// How much it may tell people.
    pub tells: Bucket,
    /// Its control group, in its node's: see [`crate::cgroup`]. Nothing where the machine has none for us.
    pub group: Option<Group>,
    /// Since when it runs no more, or has closed its end: it is ending, or does not want to hear us.
    pub deaf: Option<Duration>,
    /// A daemon before us started it.
    pub is_adopted: bool,
    /// Somebody asked for it, by name of an upgrade or a handover.
    pub wanted: bool,
    /// Messages that it may write because this daemon asked for them.
    pub asked: Asked,
}

/// Messages that a worker may write only if it was asked for them.
#[derive(Debug, Default)]
pub struct Asked {
    /// NICs whose driver state it is to store, once for each time that it was asked.
    pub driver_states: Vec<u32>,
    /// Whether it was ever asked what it has counted. One answer for each NIC that it drives is due then.
    pub counts: bool,
}

impl Worker {
    /// Its number.
    pub fn party(&self) -> u32 {
        self.record.party
    }

    /// It has a NIC, as far as this.
    pub fn has(&mut self, nic: u32, fit: Fit) {
        self.given.insert(nic);
        self.nics.insert(nic, fit);
    }

    /// Whether it hears orders and is to stay.
    pub fn serves(&self) -> bool {
        self.stage == Stage::Begun && self.deaf.is_none()
    }

    /// Whether it is meant to serve, now or soon.
    pub fn counts(&self) -> bool {
        self.deaf.is_none() && matches!(self.stage, Stage::Begun | Stage::Starting(_) | Stage::Asked(_))
    }

    /// Sends a message.
    pub fn write(&self, message: &ToWorker, fds: &[std::os::fd::BorrowedFd<'_>]) -> Result<(), Errno> {
        let bytes = serde_json::to_vec(message).expect("a message is plain data");
        self.post(&bytes, fds)
    }

    /// Sends an order.
    pub fn order(&self, nic: u32, order: Order) -> Result<(), Errno> {
        self.post(&message::frame(nic, order.to_bytes()), &[])
    }

    /// Says how the next order about a NIC is meant.
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

    /// Its program.
    pub fn binary(&self) -> &PathBuf {
        &self.record.binary
    }
}
