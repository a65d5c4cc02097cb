//! The state that one daemon passes to the next, in a file of its runtime directory.
//!
//! The content must outlive the daemon, and not the machine: with the machine all workers are gone, and there is
//! nothing to remember. So writes go to the kernel, and the daemon does not wait for them to reach a disk.
//!
//! If the disk is full, this daemon goes on with the content in memory, and writes the file anew when there is room.

mod mirror;

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use redb::backends::FileBackend;
use redb::{Database, ReadableDatabase, ReadableTable, StorageBackend, TableDefinition, WriteTransaction};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tasuki_relay::message::PROTOCOL_VERSION;

use crate::api::types::Standby;
use crate::endpoint::socket::mark_behind;
use crate::supervisor::failover::FailOver;
use crate::supervisor::staging::FileName;
use crate::{config, place, process};
use mirror::Mirror;

/// Version of the registry's format: a daemon of another format does not take over.
pub const FORMAT: u64 = 1;
/// The file's name in the daemon's directory.
pub const FILE: &str = "registry.redb";
/// Number of events kept.
const EVENTS_MAX: u64 = 1000;
/// Pause before the next attempt to write a registry that could not be written.
const RETRY_EVERY: Duration = Duration::from_secs(1);

const FACTS: TableDefinition<'_, &str, u64> = TableDefinition::new("facts");
const WORKERS: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("workers");
const NICS: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("nics");
const NODES: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("nodes");
const FENCES: TableDefinition<'_, u64, u64> = TableDefinition::new("fences");
const ADDED: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("added");
const TEXTS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("texts");
/// The row of `TEXTS` that has the configuration.
const APPLIED: &str = "applied";
const EVENTS: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("events");

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerRecord {
    /// Its number in lease words.
    pub party: u32,
    /// Pid and start time of its process.
    pub process: process::Name,
    /// User ID of the process, once it has given up its excess privileges.
    pub uid: Option<u32>,
    pub node: String,
    /// The socket at which a daemon finds it.
    pub socket: PathBuf,
    /// The program that was started.
    pub binary: PathBuf,
    /// Number of the node's upgrade that it came with; 0 before the first.
    pub generation: u32,
    /// Confinement that it lacks.
    #[serde(default)]
    pub unconfined: Vec<String>,
    /// It is started ahead of an upgrade that wants this very file.
    pub staged: Option<FileName>,
    /// The [settings](config::Node::settings) that it began with, if that is known.
    pub settings: Option<u32>,
    /// Mark of its node's endpoint, as it began with it, if that has one and it is known.
    pub endpoint: Option<String>,
    /// Driver states that it reads and writes: kind, first version and last version.
    #[serde(default)]
    pub reads: Vec<(u32, u32, u32)>,
    /// [Version of the messages](PROTOCOL_VERSION) that it speaks.
    #[serde(default = "messages_before")]
    pub messages: u32,
}

/// The version of the messages when records began to have it.
fn messages_before() -> u32 {
    6
}

/// The configuration that the daemon goes by.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AppliedRecord {
    /// Counts up with each other configuration.
    pub generation: u64,
    /// The file that it was in.
    pub path: String,
    pub text: String,
    /// Checksum of the file that the daemon began with, as that was then.
    pub base: u32,
    /// Whether all was as it describes.
    pub is_done: bool,
    /// Nodes of it that were removed by hand since.
    #[serde(default)]
    pub removed: BTreeSet<String>,
    /// Nodes and NICs as an application left them that failed before its last step, as a configuration. It is over, and the
    /// next daemon takes none of its steps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NicRecord {
    /// Its number in messages.
    pub number: u32,
    pub name: String,
    /// The device, as the configuration names it.
    pub device: String,
    /// Name of the node to which it belongs.
    pub node: String,
    /// The node's number on its VNI, if this is an end of one.
    pub number_on_vni: Option<u16>,
    /// The model that the daemon started.
    pub model: Option<process::Name>,
    /// User ID of its model and its openers.
    pub uid: Option<u32>,
    /// The party that made the memory of its device bundle: its number says which addresses are taken.
    pub made_by: u32,
    /// The nodes whose workers can write its lease page.
    #[serde(default)]
    pub page_of: Vec<String>,
    /// Epoch of its lease when that was last settled.
    pub epoch: u32,
    /// The worker that held the lease then.
    pub holder: Option<u32>,
    /// How it came to its stand-by node by itself, or is about to.
    pub fail_over: Option<FailOver>,
    /// Its stand-by node, if that was named by hand.
    pub by_hand: Option<Standby>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeRecord {
    /// The program of its workers, if not the default one.
    pub binary: Option<PathBuf>,
    /// How often it was upgraded.
    pub generation: u32,
    /// User ID of its processes.
    pub uid: Option<u32>,
    /// The [node](config::Node) as it was made, if that is known: the next daemon's configuration can have settings that
    /// count once it is made anew.
    pub made: Option<serde_json::Value>,
    /// It is being removed, and its neighbours may have heard of that.
    #[serde(default)]
    pub leaves: bool,
}

impl NodeRecord {
    /// Returns the record of a node that is made now.
    pub fn of(node: &config::Node) -> Self {
        NodeRecord { made: serde_json::to_value(node).ok(), ..NodeRecord::default() }
    }

    /// Returns the node as it was made, if that is known.
    pub fn as_made(&self) -> Option<config::Node> {
        // A later version may know keys that this one does not, and an earlier one may have taken what this one does not.
        let (node, left_out) = config::Config::node_as_written(self.made.as_ref()?).ok()?;
        let stays = |place: &String| place.starts_with("work.");
        (!left_out.iter().any(stays)).then_some(node)
    }
}

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Event {
    /// Counts up from 1.
    pub number: u64,
    /// Time of the event, in ms since 1970.
    pub at_ms: u64,
    /// The node that it concerns.
    pub node: Option<String>,
    /// The NIC that it concerns.
    pub nic: Option<String>,
    /// The worker that it concerns.
    pub worker: Option<u32>,
    /// The event in words.
    pub sentence: String,
}

/// Why there is no registry.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// Another version wrote it.
    #[error(
        "{} was written by another version of tasukid (format {found}, this one has {FORMAT}); let that version keep what is configured (tasuki config show --to FILE) and stop its workers (tasuki stop), then remove the file if it is still there", path.display()
    )]
    Format {
        path: PathBuf,
        /// Its format.
        found: u64,
    },
    /// A worker goes on that speaks other messages than this daemon.
    #[error(
        "{} has worker {party}, which goes on and speaks version {found} of the messages, and this tasukid {PROTOCOL_VERSION}; start the version that started it, let that keep what is configured (tasuki config show --to FILE) and stop its workers (tasuki stop)", path.display()
    )]
    Messages {
        path: PathBuf,
        /// Its number.
        party: u32,
        /// Its version.
        found: u32,
    },
    /// It cannot be used.
    #[error(
        "the registry {} cannot be used ({what}); if it is damaged, remove it: tasukid then ends the workers that go on, and starts others", path.display()
    )]
    Unusable { path: PathBuf, what: String },
    /// Another version wrote records in it that this one does not understand.
    #[error(
        "{} has {what}, which this version of tasukid cannot read; start the version that wrote it, or let that keep what is configured (tasuki config show --to FILE) and stop its workers (tasuki stop)", path.display()
    )]
    Unread {
        path: PathBuf,
        /// The record.
        what: String,
    },
    /// There is no descriptor for it.
    #[error("the registry {} cannot be opened, since this tasukid may open no more descriptors; raise LimitNOFILE= (ulimit -Hn)", path.display())]
    Lack { path: PathBuf },
    /// Its disk is full, or takes no writes.
    #[error("the registry {} cannot be written ({what}); {}", path.display(), place::remedy(*kind))]
    Unwritable {
        path: PathBuf,
        /// The reason in words.
        what: String,
        /// The same reason, for programs.
        kind: io::ErrorKind,
    },
}

/// A file that is written to the kernel, and not further.
#[derive(Debug)]
struct Memory(FileBackend);

impl StorageBackend for Memory {
    fn len(&self) -> io::Result<u64> {
        self.0.len()
    }
    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.0.read(offset, out)
    }
    fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.set_len(len)
    }
    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }
    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.write(offset, data)
    }
    fn close(&self) -> io::Result<()> {
        self.0.close()
    }
}

/// All that an earlier daemon has written.
#[derive(Debug, Default)]
pub struct Known {
    pub workers: Vec<WorkerRecord>,
    pub nics: Vec<NicRecord>,
    pub nodes: Vec<(String, NodeRecord)>,
    /// Nodes that were added by hand.
    pub added: Vec<config::Node>,
    /// The same by their names, as they were written: another version's have keys that this one does not know.
    pub added_as_written: Vec<(String, Vec<u8>)>,
    /// What another version wrote of these, and this one does not take: a node's name, and places in it.
    pub left_out: Vec<(String, Vec<String>)>,
    /// The first record that could not be read, if there is one. Its worker, node or NIC would be ended as if nothing knew of it.
    pub unread: Option<String>,
    /// The configuration that was applied last.
    pub applied: Option<AppliedRecord>,
    /// Numbers of fenced workers.
    pub fenced: Vec<u32>,
    /// The last events, oldest first.
    pub events: Vec<Event>,
    /// The last number given to a party.
    pub last_party: u32,
}

impl Known {
    /// Returns whether no daemon has begun with it.
    pub fn is_nothing(&self) -> bool {
        let Known { workers, nics, nodes, added, applied, unread, .. } = self;
        applied.is_none()
            && unread.is_none()
            && workers.is_empty()
            && nics.is_empty()
            && nodes.is_empty()
            && added.is_empty()
    }
}

/// One change.
#[derive(Debug)]
pub enum Change {
    /// A worker is new, or has changed.
    Worker(WorkerRecord),
    /// A worker is gone, and need not be fenced any more.
    NoWorker(u32),
    /// A NIC is new, or has changed.
    Nic(NicRecord),
    /// A node's end of a VNI is gone.
    NoNic(u32),
    /// A node is new, or has changed.
    Node(String, NodeRecord),
    /// A node was added by hand.
    Added(config::Node),
    /// A node was added by hand under an earlier daemon, which wrote this of it.
    AddedBefore(String, Vec<u8>),
    /// A node that was added by hand is the configuration's.
    NotAdded(String),
    /// A node was removed.
    Removed(String),
    /// A configuration is applied, or has been.
    Applied(AppliedRecord),
    /// A worker is fenced.
    Fence(u32),
    /// An event happened.
    Event(Event),
    /// Numbers up to this one are given.
    Party(u32),
}

/// The file, for as long as this daemon lives.
#[derive(Debug)]
pub struct Registry {
    path: PathBuf,
    /// `None` while it cannot be written.
    database: Option<Database>,
    /// Tells its file from another one that has taken the place.
    file: Option<String>,
    mirror: Mirror,
    trouble: Option<Trouble>,
}

/// Why a registry is not written.
#[derive(Debug)]
struct Trouble {
    sentence: String,
    not_before: Duration,
}

/// News about a registry, for users.
#[derive(Debug, PartialEq, Eq)]
pub enum News {
    /// From now on it cannot be written, for this reason.
    Broken(String),
    /// It can be written again, and is complete.
    Whole,
}

type Failed = redb::Error;

impl Registry {
    /// Opens the registry, or makes it if there is none. Returns its content, too.
    pub fn open(folder: &Path) -> Result<(Self, Known), RegistryError> {
        let path = folder.join(FILE);
        let failed = |error: Failed| match &error {
            Failed::Io(io) if crate::channel::lacks(io) => RegistryError::Lack { path: path.clone() },
            Failed::Io(io)
                if matches!(
                    io.kind(),
                    io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::ReadOnlyFilesystem
                ) =>
            {
                RegistryError::Unwritable { path: path.clone(), what: io.to_string(), kind: io.kind() }
            }
            _ => RegistryError::Unusable { path: path.clone(), what: in_words(&error) },
        };
        let read = || open(&path, false).and_then(|database| Ok((all(&database)?, database)));
        // redb asserts where a file is shorter than its head says. Nothing of ours is changed by then.
        let read = catch_unwind(AssertUnwindSafe(read))
            .unwrap_or_else(|_| Err(Failed::Corrupted("it contradicts itself; was it cut short?".to_owned())));
        let ((found, known), database) = read.map_err(failed)?;
        if found != FORMAT {
            return Err(RegistryError::Format { path, found });
        }
        if let Some(what) = known.unread {
            return Err(RegistryError::Unread { path, what });
        }
        // One that `/proc` hides may live.
        let lives = |worker: &&WorkerRecord| !matches!(process::Process::find(worker.process), Ok(None));
        let mut others = known.workers.iter().filter(|worker| worker.messages != PROTOCOL_VERSION);
        if let Some(&WorkerRecord { party, messages: found, .. }) = others.find(lives) {
            return Err(RegistryError::Messages { path, party, found });
        }
        let mirror = Mirror::of(&known);
        let file = mark_behind(&path);
        Ok((Registry { path, database: Some(database), file, mirror, trouble: None }, known))
    }

    /// Writes all of `changes`, or keeps them in memory until that succeeds. Returns news for users. The caller
    /// calls it without any when [`Registry::not_before`] has come.
    pub fn write(&mut self, changes: &[Change], now: Duration) -> Option<News> {
        changes.iter().for_each(|change| self.mirror.apply(change));
        let written = match (&self.database, &self.trouble) {
            (Some(_), _) if changes.is_empty() => return None,
            (Some(database), _) => write(database, changes),
            (None, Some(trouble)) if now < trouble.not_before => return None,
            (None, _) => self.begin_anew(),
        };
        let was_broken = self.trouble.is_some();
        let Err(error) = written else {
            self.trouble = None;
            return was_broken.then_some(News::Whole);
        };
        // A database that has failed once fails for ever: redb must open it anew. Leave a file alone whose content
        // is not known.
        self.database = None;
        let sentence = format!(
            "the registry {} cannot be written ({}); make room there. Until then tasukid keeps its records in memory. Do not end it: the next tasukid would not know of workers and fences since then",
            self.path.display(),
            in_words(&error)
        );
        let not_before = now + RETRY_EVERY;
        self.trouble = Some(Trouble { sentence: sentence.clone(), not_before });
        (!was_broken).then_some(News::Broken(sentence))
    }

    /// Looks whether its file is still at its path. If somebody deleted or replaced it, it is written anew, by the next
    /// [`Registry::write`]. Returns news for users.
    pub fn look(&mut self, now: Duration) -> Option<News> {
        if self.database.is_none() || mark_behind(&self.path) == self.file {
            return None;
        }
        self.database = None;
        let sentence = format!("the registry {} was deleted or replaced; tasukid writes it anew", self.path.display());
        self.trouble = Some(Trouble { sentence: sentence.clone(), not_before: now });
        Some(News::Broken(sentence))
    }

    /// Writes a new file with everything, and puts it in the place of the old one.
    fn begin_anew(&mut self) -> Result<(), Failed> {
        let aside = self.path.with_extension("new");
        let written = open(&aside, true).and_then(|database| {
            write(&database, &self.mirror.changes())?;
            std::fs::rename(&aside, &self.path)?;
            Ok(database)
        });
        // A partial file would take up the room that there is.
        self.database = Some(written.inspect_err(|_| drop(std::fs::remove_file(&aside)))?);
        self.file = mark_behind(&self.path);
        Ok(())
    }

    /// Returns why it cannot be written, while that is so.
    pub fn trouble(&self) -> Option<&str> {
        self.trouble.as_ref().map(|trouble| &trouble.sentence[..])
    }

    /// Returns when to try to write again, while it cannot be written.
    pub fn not_before(&self) -> Option<Duration> {
        self.trouble.as_ref().map(|trouble| trouble.not_before)
    }
}

/// Returns the error in words, without redb's own name for it.
fn in_words(error: &Failed) -> String {
    match error {
        Failed::Io(error) => error.to_string(),
        other => other.to_string(),
    }
}

fn open(path: &Path, is_fresh: bool) -> Result<Database, Failed> {
    let file: File =
        OpenOptions::new().read(true).write(true).create(true).truncate(is_fresh).mode(0o600).open(path)?;
    let backend = FileBackend::new(file)?;
    let database = Database::builder().set_cache_size(4 << 20).create_with_backend(Memory(backend))?;
    make_tables(&database)?;
    Ok(database)
}

fn make_tables(database: &Database) -> Result<(), Failed> {
    let write = database.begin_write()?;
    {
        let mut facts = write.open_table(FACTS)?;
        if facts.get("format")?.is_none() {
            facts.insert("format", FORMAT)?;
        }
        write.open_table(WORKERS)?;
        write.open_table(NICS)?;
        write.open_table(NODES)?;
        write.open_table(ADDED)?;
        write.open_table(TEXTS)?;
        write.open_table(FENCES)?;
        write.open_table(EVENTS)?;
    }
    Ok(write.commit()?)
}

fn all(database: &Database) -> Result<(u64, Known), Failed> {
    let read = database.begin_read()?;
    let facts = read.open_table(FACTS)?;
    let fact = |name| Ok::<_, Failed>(facts.get(name)?.map_or(0, |value| value.value()));
    let mut known = Known { last_party: u32::try_from(fact("party")?).unwrap_or(u32::MAX), ..Known::default() };
    let unread = &mut known.unread;
    known.workers = numbered(&read.open_table(WORKERS)?, |number| note(unread, format!("worker {number}")))?;
    known.nics = numbered(&read.open_table(NICS)?, |number| note(unread, format!("NIC number {number}")))?;
    // Nothing goes by events.
    known.events = numbered(&read.open_table(EVENTS)?, |_| ())?;
    for row in read.open_table(NODES)?.iter()? {
        let (name, bytes) = row?;
        match parse(bytes.value()) {
            Some(node) => known.nodes.push((name.value().to_owned(), node)),
            None => note(unread, format!("node {}", name.value())),
        }
    }
    for row in read.open_table(ADDED)?.iter()? {
        let (name, bytes) = row?;
        let node = parse(bytes.value()).ok_or_else(|| format!("node {:?}", name.value()));
        match node.and_then(added) {
            Ok((node, left_out)) => {
                known.added_as_written.push((name.value().to_owned(), bytes.value().to_owned()));
                known.left_out.extend((!left_out.is_empty()).then(|| (node.name.clone(), left_out)));
                known.added.push(node);
            }
            Err(place) => note(unread, format!("{place}, which was added by hand")),
        }
    }
    if let Some(row) = read.open_table(TEXTS)?.get(APPLIED)? {
        known.applied = parse(row.value());
        if known.applied.is_none() {
            note(unread, "a configuration".to_owned());
        }
    }
    for row in read.open_table(FENCES)?.iter()? {
        known.fenced.extend(u32::try_from(row?.0.value()));
    }
    Ok((fact("format")?, known))
}

fn write(database: &Database, changes: &[Change]) -> Result<(), Failed> {
    let write = database.begin_write()?;
    for change in changes {
        apply(&write, change)?;
    }
    Ok(write.commit()?)
}

/// Keeps the first record that could not be read.
fn note(unread: &mut Option<String>, what: String) {
    unread.get_or_insert(what);
}

fn numbered<T: DeserializeOwned>(
    table: &impl ReadableTable<u64, &'static [u8]>,
    mut unread: impl FnMut(u64),
) -> Result<Vec<T>, Failed> {
    let mut all = Vec::new();
    for row in table.iter()? {
        let (number, bytes) = row?;
        match parse(bytes.value()) {
            Some(record) => all.push(record),
            None => unread(number.value()),
        }
    }
    Ok(all)
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Option<T> {
    serde_json::from_slice(bytes).ok()
}

/// Reads a node, and what of it this version does not take. Earlier daemons had the latency of a machine's node beside its
/// socket, 0 by default.
fn added(mut node: serde_json::Value) -> Result<(config::Node, Vec<String>), String> {
    let machine = node.get_mut("work").and_then(|work| work.get_mut("vm")?.as_object_mut());
    if let Some(latency) = machine.and_then(|machine| machine.remove("latency_us")).filter(|latency| *latency != 0) {
        node["latency_us"] = latency;
    }
    config::Config::node_as_written(&node)
}

fn text<T: Serialize>(value: &T) -> Vec<u8> {
    serde_json::to_vec(value).expect("a record is plain data")
}

fn apply(write: &WriteTransaction, change: &Change) -> Result<(), Failed> {
    match change {
        Change::Worker(worker) => {
            write.open_table(WORKERS)?.insert(u64::from(worker.party), &text(worker)[..])?;
        }
        Change::NoWorker(party) => {
            write.open_table(WORKERS)?.remove(u64::from(*party))?;
            write.open_table(FENCES)?.remove(u64::from(*party))?;
        }
        Change::Nic(nic) => {
            write.open_table(NICS)?.insert(u64::from(nic.number), &text(nic)[..])?;
        }
        Change::NoNic(number) => {
            write.open_table(NICS)?.remove(u64::from(*number))?;
        }
        Change::Node(name, node) => {
            write.open_table(NODES)?.insert(&name[..], &text(node)[..])?;
        }
        Change::Added(node) => {
            write.open_table(ADDED)?.insert(&node.name[..], &text(node)[..])?;
        }
        Change::AddedBefore(name, written) => {
            write.open_table(ADDED)?.insert(&name[..], &written[..])?;
        }
        Change::NotAdded(name) => {
            write.open_table(ADDED)?.remove(&name[..])?;
        }
        Change::Applied(record) => {
            write.open_table(TEXTS)?.insert(APPLIED, &text(record)[..])?;
        }
        Change::Removed(name) => {
            write.open_table(ADDED)?.remove(&name[..])?;
            write.open_table(NODES)?.remove(&name[..])?;
        }
        Change::Fence(party) => {
            write.open_table(FENCES)?.insert(u64::from(*party), 0)?;
        }
        Change::Event(event) => {
            let mut events = write.open_table(EVENTS)?;
            events.insert(event.number, &text(event)[..])?;
            events.remove(event.number.saturating_sub(EVENTS_MAX))?;
        }
        Change::Party(last) => {
            write.open_table(FACTS)?.insert("party", u64::from(*last))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_daemon_wrote_the_next_one_reads() {
        let folder = tempfile::tempdir().unwrap();
        let worker = WorkerRecord {
            party: 7,
            process: process::Name { pid: 1, start: 2 },
            uid: None,
            node: "red".to_owned(),
            socket: "/x".into(),
            binary: "/y".into(),
            generation: 3,
            unconfined: Vec::new(),
            staged: None,
            endpoint: None,
            settings: None,
            reads: vec![(1, 2, 3)],
            messages: PROTOCOL_VERSION,
        };
        let event = |number| Event { number, at_ms: 0, node: None, nic: None, worker: None, sentence: "so".to_owned() };
        {
            let (mut registry, known) = Registry::open(folder.path()).unwrap();
            assert_eq!((known.workers.len(), known.last_party), (0, 0));
            let gone = WorkerRecord { party: 8, ..worker.clone() };
            let changes = [Change::Party(8), Change::Worker(worker.clone()), Change::Worker(gone), Change::Fence(8)];
            let now = Duration::ZERO;
            assert_eq!(registry.write(&changes, now), None);
            assert_eq!(registry.write(&[Change::NoWorker(8), Change::Fence(7)], now), None);
            let events: Vec<_> = (1..=EVENTS_MAX + 5).map(|number| Change::Event(event(number))).collect();
            assert_eq!(registry.write(&events, now), None);
            // It is not closed: the daemon was killed.
            std::mem::forget(registry.database.as_ref().unwrap().begin_read());
        }
        let (_registry, known) = Registry::open(folder.path()).unwrap();
        assert_eq!((known.workers, known.last_party, known.fenced), (vec![worker], 8, vec![7]));
        assert_eq!(known.events.first().map(|event| event.number), Some(6), "old events are forgotten");
    }

    #[test]
    fn a_living_worker_that_speaks_other_messages_is_not_taken_over() {
        let folder = tempfile::tempdir().unwrap();
        let put = |messages: Option<u32>, process: process::Name| {
            let mut worker = serde_json::json!({
                "party": 7, "process": process, "uid": null, "node": "red", "socket": "/x", "binary": "/y", "generation": 3
            });
            messages.into_iter().for_each(|version| worker["messages"] = version.into());
            let database = open(&folder.path().join("registry.redb"), false).unwrap();
            let write = database.begin_write().unwrap();
            write.open_table(WORKERS).unwrap().insert(7, &text(&worker)[..]).unwrap();
            write.commit().unwrap();
        };
        let opened = || Registry::open(folder.path()).map(|(_, known)| known.workers[0].messages);
        let us = process::Process::by_pid(std::process::id()).unwrap().expect("it lives").name();
        let gone = process::Name { start: us.start + 1, ..us };
        put(Some(PROTOCOL_VERSION), us);
        assert_eq!(opened().unwrap(), PROTOCOL_VERSION);
        for other in [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1] {
            put(Some(other), gone);
            assert_eq!(opened().unwrap(), other, "nobody would be told anything");
            put(Some(other), us);
            let said = opened().unwrap_err().to_string();
            let both =
                format!("speaks version {other} of the messages, and this tasukid {PROTOCOL_VERSION}; start the ");
            assert!(said.contains("has worker 7, which goes on") && said.contains(&both), "{said}");
        }
        put(None, gone);
        assert_eq!(opened().unwrap(), 6, "daemons of before write none");
    }

    #[test]
    fn the_latency_of_an_earlier_daemons_machine_is_its_nodes() {
        let latency = |us: u32| {
            let node = serde_json::json!({ "name": "vm", "vni": "lan", "work": { "vm": { "socket": "/s", "latency_us": us } } });
            added(node).expect("it is a node").0.latency_us
        };
        assert_eq!((latency(0), latency(20)), (None, Some(20)));
    }

    #[test]
    fn a_node_with_a_key_of_another_version_is_read_without_it_and_kept_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let put = |name: &str, text: &str| {
            let database = open(&folder.path().join("registry.redb"), false).unwrap();
            let write = database.begin_write().unwrap();
            write.open_table(ADDED).unwrap().insert(name, text.as_bytes()).unwrap();
            write.commit().unwrap();
        };
        let later = r#"{"name":"web","work":"sink","vni":"lan","later":1,"nice":-5}"#;
        put("web", later);
        let (mut registry, known) = Registry::open(folder.path()).unwrap();
        assert_eq!((known.added[0].name.as_str(), known.added[0].nice), ("web", Some(-5)));
        assert_eq!(known.left_out, [("web".to_owned(), vec!["later".to_owned()])]);
        let text_of = |name| {
            let database = open(&folder.path().join("registry.redb"), false).unwrap();
            let read = database.begin_read().unwrap();
            let row = read.open_table(ADDED).unwrap().get(name).unwrap().expect("a row");
            String::from_utf8(row.value().to_vec()).unwrap()
        };
        for is_written_anew in [false, true] {
            if is_written_anew {
                std::fs::remove_file(folder.path().join("registry.redb")).unwrap();
                assert!(matches!(registry.look(Duration::ZERO), Some(News::Broken(_))));
            }
            registry.write(&[Change::Fence(3)], Duration::ZERO);
            drop(registry.database.take());
            assert_eq!(text_of("web"), later, "the other version finds it as it wrote it");
            registry = Registry::open(folder.path()).unwrap().0;
        }
        drop(registry);
        for (text, place) in [
            (r#"{"name":"other","work":"of another version"}"#, "node \"other\""),
            (r#"{"name":"other","work":"sink","limits":{"send":{"later":1}}}"#, "limits.send.later of node \"other\""),
        ] {
            put("other", text);
            for _ in 0..2 {
                let said = Registry::open(folder.path()).unwrap_err().to_string();
                assert!(said.contains(&format!("registry.redb has {place}, which was added by hand,")), "{said}");
            }
        }
    }

    #[test]
    fn a_node_is_not_known_as_it_was_made_without_a_setting_that_stays() {
        let as_made = |more: &str| {
            let text = format!(r#"{{"name":"a","work":{{"memif":{{"socket":"/s"}}}},"vni":"lan"{more}}}"#);
            let made = Some(serde_json::from_str(&text).expect("JSON"));
            NodeRecord { made, ..NodeRecord::default() }.as_made()
        };
        let whole = as_made("").expect("it is a node");
        assert_eq!(as_made(r#","later":1,"nice":"no""#), Some(whole));
        for more in [r#","mac":"no""#, r#","pool_kib":"no""#, r#","spoof":"later""#] {
            assert_eq!(as_made(more), None, "{more}");
        }
    }

    /// As when its disk is full: there is something where the next file is to be.
    #[test]
    fn what_could_not_be_written_is_written_when_that_can_be_done() {
        let folder = tempfile::tempdir().unwrap();
        let (mut registry, _) = Registry::open(folder.path()).unwrap();
        let (aside, now) = (folder.path().join("registry.new"), Duration::ZERO);
        std::fs::create_dir(&aside).unwrap();
        assert_eq!(registry.write(&[Change::Fence(3), Change::Fence(4), Change::Party(9)], now), None);
        registry.database = None;
        let Some(News::Broken(sentence)) = registry.write(&[Change::NoWorker(3)], now) else { panic!("it is broken") };
        assert!(sentence.contains("registry.redb cannot be written (Is a directory"), "{sentence}");
        assert_eq!((registry.trouble(), registry.not_before()), (Some(&sentence[..]), Some(RETRY_EVERY)));
        assert_eq!(registry.write(&[Change::Fence(5)], RETRY_EVERY / 2), None, "it is not tried all the time");
        std::fs::remove_dir(&aside).unwrap();
        assert_eq!(registry.write(&[], RETRY_EVERY), Some(News::Whole));
        assert_eq!((registry.trouble(), registry.not_before()), (None, None));
        drop(registry);
        let (_registry, known) = Registry::open(folder.path()).unwrap();
        assert_eq!((known.fenced, known.last_party), (vec![4, 5], 9));
    }

    #[test]
    fn one_that_somebody_deletes_or_replaces_is_written_anew() {
        let folder = tempfile::tempdir().unwrap();
        let (path, now) = (folder.path().join("registry.redb"), Duration::from_secs(1));
        let (mut registry, _) = Registry::open(folder.path()).unwrap();
        assert_eq!(registry.write(&[Change::Fence(4)], now), None);
        for is_replaced in [false, true] {
            assert_eq!(registry.look(now), None);
            match is_replaced {
                false => std::fs::remove_file(&path).unwrap(),
                true => {
                    let old = folder.path().join("old");
                    std::fs::write(&old, "an old one").unwrap();
                    std::fs::rename(old, &path).unwrap();
                }
            }
            assert!(matches!(registry.look(now), Some(News::Broken(_))) && registry.trouble().is_some());
            assert_eq!(registry.write(&[], now), Some(News::Whole));
        }
        drop(registry);
        assert_eq!(Registry::open(folder.path()).unwrap().1.fenced, [4]);
    }

    #[test]
    fn a_file_that_is_no_registry_is_named() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("registry.redb"), "no such thing").unwrap();
        let is_named = || {
            let said = Registry::open(folder.path()).unwrap_err().to_string();
            assert!(said.contains("registry.redb cannot be used") && said.contains("remove it"), "{said}");
        };
        is_named();
        let path = folder.path().join("registry.redb");
        std::fs::remove_file(&path).unwrap();
        drop(Registry::open(folder.path()).unwrap());
        let len = std::fs::metadata(&path).unwrap().len();
        for shorter in [4096, 20_000, len / 2] {
            OpenOptions::new().write(true).open(&path).unwrap().set_len(shorter).unwrap();
            is_named();
        }
    }
}
