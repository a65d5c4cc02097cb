//! What a daemon must know of the one before it, in a file of its runtime directory.
//!
//! What is kept here must outlive the daemon, and not the machine: with the machine all workers are gone, and there is nothing to remember. So
//! what is written goes to the kernel and is not waited for on its way to a disk.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use redb::backends::FileBackend;
use redb::{Database, ReadableDatabase, ReadableTable, StorageBackend, TableDefinition, WriteTransaction};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::{config, process};

/// Of what stands in the file.
const FORMAT: u64 = 1;
/// Events that are kept.
const EVENTS_MAX: u64 = 1000;

const FACTS: TableDefinition<'_, &str, u64> = TableDefinition::new("facts");
const WORKERS: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("workers");
const NICS: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("nics");
const NODES: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("nodes");
const FENCES: TableDefinition<'_, u64, u64> = TableDefinition::new("fences");
const ADDED: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("added");
const EVENTS: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("events");

/// A worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerRecord {
    /// Its number in lease words.
    pub party: u32,
    /// Which process it is.
    pub process: process::Name,
    /// Whose that process is, once it has given up what it does not need.
    pub uid: Option<u32>,
    /// Its node.
    pub node: String,
    /// Where a daemon finds it.
    pub socket: PathBuf,
    /// What was started.
    pub binary: PathBuf,
    /// How often the node had been upgraded.
    pub generation: u32,
}

/// A NIC.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NicRecord {
    /// Its number in messages.
    pub number: u32,
    /// Its name.
    pub name: String,
    /// Where it is.
    pub device: String,
    /// Whose it is.
    pub node: String,
    /// The node's number on its VNI, if it is an end of one.
    #[serde(default)]
    pub number_on_vni: Option<u16>,
    /// Of such an end, by what number the kernel knows the memory and the pipe that belong to it.
    #[serde(default)]
    pub inodes: Vec<u64>,
    /// The model that the daemon started.
    pub model: Option<process::Name>,
    /// Who made the memory of its kit: says which addresses are taken.
    pub made_by: u32,
    /// The epoch of its lease when that was last settled,
    pub epoch: u32,
    /// and who held it.
    pub holder: Option<u32>,
}

/// A node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeRecord {
    /// What its workers are started from, if not from the usual program.
    pub binary: Option<PathBuf>,
    /// How often it was upgraded.
    pub generation: u32,
}

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Event {
    /// Counts up from 1.
    pub number: u64,
    /// When, in ms since 1970.
    pub at_ms: u64,
    /// The node that it is about.
    pub node: Option<String>,
    /// The NIC.
    pub nic: Option<String>,
    /// The worker.
    pub worker: Option<u32>,
    /// What.
    pub sentence: String,
}

/// Why there is no registry.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// Written by another version.
    #[error(
        "{} was written by another version of tasukid (format {found}, this one has {FORMAT}); let that version stop its workers (tasuki stop), then remove the file", path.display()
    )]
    Format {
        /// Which file.
        path: PathBuf,
        /// What it has.
        found: u64,
    },
    /// It cannot be used.
    #[error(
        "the registry {} cannot be used ({what}); if it is damaged, end the workers that it knows of and remove it", path.display()
    )]
    Unusable {
        /// Which file.
        path: PathBuf,
        /// Why.
        what: String,
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

/// All that a daemon before this one has written.
#[derive(Debug, Default)]
pub struct Known {
    /// Workers.
    pub workers: Vec<WorkerRecord>,
    /// NICs.
    pub nics: Vec<NicRecord>,
    /// Nodes.
    pub nodes: Vec<(String, NodeRecord)>,
    /// Nodes that were added by hand.
    pub added: Vec<config::Node>,
    /// Parties that were fenced.
    pub fenced: Vec<u32>,
    /// The last events, oldest first.
    pub events: Vec<Event>,
    /// The last party that was given a number.
    pub last_party: u32,
}

/// One change.
#[derive(Debug)]
pub enum Change {
    /// A worker is, or is now, this.
    Worker(WorkerRecord),
    /// It is no more, and need not be fenced any more.
    NoWorker(u32),
    /// A NIC is now this.
    Nic(NicRecord),
    /// A node's end of a VNI is no more.
    NoNic(u32),
    /// A node is now this.
    Node(String, NodeRecord),
    /// A node was added by hand,
    Added(config::Node),
    /// or removed.
    Removed(String),
    /// A party is fenced.
    Fence(u32),
    /// This happened.
    Event(Event),
    /// Numbers up to this one are given.
    Party(u32),
}

/// The file, for as long as this daemon lives.
#[derive(Debug)]
pub struct Registry {
    database: Database,
}

type Failed = redb::Error;

impl Registry {
    /// Opens it, makes it if there is none; what it knows.
    pub fn open(folder: &Path) -> Result<(Self, Known), RegistryError> {
        let path = folder.join("registry.redb");
        let unusable = |what: String| RegistryError::Unusable { path: path.clone(), what };
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(&path);
        let opened = file.map_err(|error| unusable(error.to_string())).and_then(|file: File| {
            let backend = FileBackend::new(file).map_err(|error| unusable(error.to_string()))?;
            let database = Database::builder().set_cache_size(4 << 20).create_with_backend(Memory(backend));
            database.map_err(|error| unusable(error.to_string()))
        })?;
        let registry = Registry { database: opened };
        registry.make_tables().map_err(|error| unusable(error.to_string()))?;
        let (found, known) = registry.all().map_err(|error| unusable(error.to_string()))?;
        match found {
            FORMAT => Ok((registry, known)),
            found => Err(RegistryError::Format { path, found }),
        }
    }

    fn make_tables(&self) -> Result<(), Failed> {
        let write = self.database.begin_write()?;
        {
            let mut facts = write.open_table(FACTS)?;
            if facts.get("format")?.is_none() {
                facts.insert("format", FORMAT)?;
            }
            write.open_table(WORKERS)?;
            write.open_table(NICS)?;
            write.open_table(NODES)?;
            write.open_table(ADDED)?;
            write.open_table(FENCES)?;
            write.open_table(EVENTS)?;
        }
        Ok(write.commit()?)
    }

    fn all(&self) -> Result<(u64, Known), Failed> {
        let read = self.database.begin_read()?;
        let facts = read.open_table(FACTS)?;
        let fact = |name| Ok::<_, Failed>(facts.get(name)?.map_or(0, |value| value.value()));
        let mut known = Known { last_party: u32::try_from(fact("party")?).unwrap_or(u32::MAX), ..Known::default() };
        known.workers = numbered(&read.open_table(WORKERS)?)?;
        known.nics = numbered(&read.open_table(NICS)?)?;
        known.events = numbered(&read.open_table(EVENTS)?)?;
        for row in read.open_table(NODES)?.iter()? {
            let (name, bytes) = row?;
            known.nodes.extend(parse(bytes.value()).map(|node| (name.value().to_owned(), node)));
        }
        for row in read.open_table(ADDED)?.iter()? {
            known.added.extend(parse(row?.1.value()));
        }
        for row in read.open_table(FENCES)?.iter()? {
            known.fenced.extend(u32::try_from(row?.0.value()));
        }
        Ok((fact("format")?, known))
    }

    /// Writes all of `changes`, or none of them.
    pub fn write(&self, changes: &[Change]) -> Result<(), String> {
        if changes.is_empty() {
            return Ok(());
        }
        let written = self.database.begin_write().map_err(Failed::from).and_then(|write| {
            for change in changes {
                apply(&write, change)?;
            }
            Ok(write.commit()?)
        });
        written.map_err(|error| error.to_string())
    }
}

fn numbered<T: DeserializeOwned>(table: &impl ReadableTable<u64, &'static [u8]>) -> Result<Vec<T>, Failed> {
    let mut all = Vec::new();
    for row in table.iter()? {
        all.extend(parse(row?.1.value()));
    }
    Ok(all)
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Option<T> {
    serde_json::from_slice(bytes).ok()
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
        };
        let event = |number| Event { number, at_ms: 0, node: None, nic: None, worker: None, sentence: "so".to_owned() };
        {
            let (registry, known) = Registry::open(folder.path()).unwrap();
            assert_eq!((known.workers.len(), known.last_party), (0, 0));
            let gone = WorkerRecord { party: 8, ..worker.clone() };
            let changes = [Change::Party(8), Change::Worker(worker.clone()), Change::Worker(gone), Change::Fence(8)];
            registry.write(&changes).unwrap();
            registry.write(&[Change::NoWorker(8), Change::Fence(7)]).unwrap();
            let events: Vec<_> = (1..=EVENTS_MAX + 5).map(|number| Change::Event(event(number))).collect();
            registry.write(&events).unwrap();
            // It is not closed: the daemon was killed.
            std::mem::forget(registry.database.begin_read());
        }
        let (_registry, known) = Registry::open(folder.path()).unwrap();
        assert_eq!((known.workers, known.last_party, known.fenced), (vec![worker], 8, vec![7]));
        assert_eq!(known.events.first().map(|event| event.number), Some(6), "old events are forgotten");
    }

    #[test]
    fn a_file_that_is_no_registry_is_named() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("registry.redb"), "no such thing").unwrap();
        let said = Registry::open(folder.path()).unwrap_err().to_string();
        assert!(said.contains("registry.redb cannot be used") && said.contains("remove it"), "{said}");
    }
}
