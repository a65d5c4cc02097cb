//! The daemon's loop: one thread, one epoll, and every decision the daemon makes. It keeps every descriptor that
//! must outlive a worker.
//!
//! - [`policy`]: when a dead worker is replaced (a pure function)
//! - [`deeds`]: carries out an arbiter's decisions: orders, swaps, fences
//! - [`hear`]: messages from workers
//! - [`card`], [`worker`]: a NIC and a worker, as the daemon knows them; [`by_node`]: all of them, by number and by node
//! - `exit_watch`: learns early that a worker has ended
//! - `interrupts`: where the interrupts of cards behind VFIO go
//! - [`deposits`]: descriptors that outlive the daemon, held by the keeper
//! - [`bundles`]: descriptors that workers send
//! - [`workers`]: gives nodes the workers they should have
//! - [`cells`]: makes processes for workers, in a thread of its own
//! - [`jails`]: the confinement a worker's process starts under
//! - [`lines`]: workers' output on standard error
//! - [`link_news`]: what users hear of the link of a card or an interface (pure)
//! - [`jobs`]: upgrades and handovers on request
//! - [`staging`]: programs started ahead of an upgrade
//! - [`failover`]: NICs that go to their stand-by nodes by themselves
//! - [`split`]: uplinks whose two sides have come to two workers
//! - [`open`]: opens cards, and runs models of cards
//! - [`vnis`]: Ethernet between nodes: the members, and the memory that outlives their workers
//! - [`endpoints`]: other endpoints of nodes on a VNI, and their clients
//! - [`apply`]: applies a configuration while the daemon runs
//! - [`closing`]: closes NICs while their nodes go on
//! - [`trust`]: takes lease pages from nodes that are not trusted any more
//! - [`nodes`]: adds and removes nodes while the daemon runs
//! - [`taps`]: the interfaces that network namespaces have instead of NICs
//! - [`sockets`]: looks after the sockets at which programs connect to nodes
//! - [`shortcuts`]: how namespaces reach each other past their workers
//! - [`captures`]: packet captures
//! - `queues`: interfaces with several queues (a pure part); `drains`: queues that are to go
//! - `requests`: answers the requests that [`door`] brings; `ending`: how the loop ends
//! - [`adopt`]: adopts workers of an earlier daemon
//! - [`view`]: the views of all that for users
//!
//! Between a death and the order to take, the daemon touches no file and starts no process. Registry writes and new
//! workers come afterwards.

pub mod adopt;
pub mod apply;
pub mod bundles;
pub mod by_node;
pub mod captures;
pub mod card;
pub mod cells;
pub mod closing;
pub mod deeds;
pub mod deposits;
pub mod door;
mod drains;
mod ending;
pub mod endpoints;
mod exit_watch;
pub mod failover;
pub mod hear;
mod interrupts;
pub mod jails;
pub mod jobs;
pub mod lines;
pub mod link_news;
pub mod nodes;
pub mod open;
pub mod policy;
mod queues;
mod requests;
pub mod shortcuts;
pub mod sockets;
pub mod split;
pub mod staging;
pub mod taps;
pub mod trust;
pub mod view;
pub mod vnis;
pub mod worker;
pub mod workers;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use rustix::event::{Timespec, epoll};
use tasuki_relay::arbiter;
use tasuki_relay::message::program_state;
use tasuki_shm::clock::now_ns;
use tasuki_shm::crash;
use tasuki_shm::line::halves;

use crate::cgroup::{Group, Groups};
use crate::config::Config;
use crate::place::Place;
use crate::registry::{self, Change, Event, News, NodeRecord, Registry};
use crate::watchdog::Watchdog;
use crate::{housekeeping_cpus, log};
pub use apply::applied_last;
use by_node::ByNode;
use card::Card;
use door::{Answer, Door, Queued};
use exit_watch::ExitWatch;
use jobs::Job;
use policy::Death;
use worker::{Words, Worker};

/// Number of events kept in memory.
const EVENTS_MAX: usize = 1000;
/// Descriptors of which the loop hears at once: of more than it watches. It judges workers by the clock after that, and
/// must have read what they said in time, if it was itself late.
const READY_MAX: usize = 16 << 10;
/// Interval at which the daemon asks a sleeping worker whether it lives.
const PROBE_EVERY: Duration = Duration::from_secs(1);
/// Time a worker may take to begin, to answer a new daemon, or to end.
const WORKER_TIMEOUT: Duration = Duration::from_secs(10);

/// Returns the time of `CLOCK_MONOTONIC`, the clock of all stamps.
pub fn now() -> Duration {
    Duration::from_nanos(now_ns())
}

/// Returns a time in nanoseconds, as in a lease page.
fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn ms_since_1970() -> u64 {
    let at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(at.as_millis()).unwrap_or(u64::MAX)
}

/// The source of an epoll event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Token {
    /// Sorts first, so that a successor waits for a dead driver's lease no longer than it must.
    ExitMarks,
    WorkerEnd(u32),
    JailReadable(u32),
    WorkerReadable(u32),
    OpenerReadable(u32),
    OpenerEnd(u32),
    ModelEnd(u32),
    KeeperReadable,
    Requests,
    Signal,
    Hangup,
    Cells,
    WorkerStderr(u32),
}

impl Token {
    fn to_data(self) -> epoll::EventData {
        let (kind, id) = match self {
            Token::WorkerEnd(id) => (0_u64, id),
            Token::WorkerReadable(id) => (1, id),
            Token::OpenerReadable(id) => (2, id),
            Token::OpenerEnd(id) => (3, id),
            Token::ModelEnd(id) => (4, id),
            Token::Requests => (5, 0),
            Token::Signal => (6, 0),
            Token::ExitMarks => (7, 0),
            Token::JailReadable(id) => (8, id),
            Token::WorkerStderr(id) => (9, id),
            Token::KeeperReadable => (10, 0),
            Token::Hangup => (11, 0),
            Token::Cells => (12, 0),
        };
        epoll::EventData::new_u64(kind << 32 | u64::from(id))
    }

    fn from_data(data: epoll::EventData) -> Option<Self> {
        let (id, kind) = halves(data.u64());
        Some(match kind {
            0 => Token::WorkerEnd(id),
            1 => Token::WorkerReadable(id),
            2 => Token::OpenerReadable(id),
            3 => Token::OpenerEnd(id),
            4 => Token::ModelEnd(id),
            5 => Token::Requests,
            6 => Token::Signal,
            7 => Token::ExitMarks,
            8 => Token::JailReadable(id),
            9 => Token::WorkerStderr(id),
            10 => Token::KeeperReadable,
            11 => Token::Hangup,
            12 => Token::Cells,
            _ => return None,
        })
    }
}

/// A node, as the daemon sees it.
#[derive(Debug)]
struct Node {
    record: NodeRecord,
    program_state: Words,
    deaths: Vec<Death>,
    /// Earliest time at which a fresh worker may start.
    not_before: Duration,
    trouble: Option<String>,
    /// Attempts to mend a split; uplinks only.
    mending: split::Mending,
    /// The group that bounds its processes, while workers of an earlier daemon are sought.
    group: Option<Group>,
    /// Processes of it that the kernel has killed for want of memory, as far as their deaths are heard of.
    oom_kills: u64,
}

impl Node {
    /// Creates a node without workers.
    fn new(record: NodeRecord) -> Result<Self> {
        let program_state = Words::create("tasuki program state", program_state::LEN)
            .context("no memory for a node's program state")?;
        let (deaths, not_before, trouble) = (Vec::new(), Duration::ZERO, None);
        let mending = split::Mending::default();
        Ok(Node { record, program_state, deaths, not_before, trouble, mending, group: None, oom_kills: 0 })
    }
}

/// Programs that the daemon starts.
#[derive(Debug, Clone)]
pub struct Programs {
    /// The worker, unless the configuration names another.
    pub worker: PathBuf,
    /// The model of a card.
    pub model: PathBuf,
}

/// How the loop ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ended {
    /// The daemon was told to exit; its workers keep running.
    Alone,
    /// The daemon was told to go on as this program; its workers keep running.
    Replaced {
        /// The program.
        with: PathBuf,
        /// It takes the signals that this one holds back ([`hold_signals`](crate::spawn::hold_signals)).
        takes_signals: bool,
        /// It takes what the keeper has from this one ([`Supervisor::hand_on`]), if the keeper dies.
        needs_no_keeper: bool,
    },
    /// Everything was stopped.
    Everything,
}

#[derive(Debug)]
pub struct Supervisor {
    config: Config,
    current: apply::Current,
    applying: Option<apply::Applying>,
    /// A signal asked for the daemon's own file while a node was being removed.
    is_told_to_apply: bool,
    /// Nodes that were added by hand.
    by_hand: BTreeSet<String>,
    /// Nodes' settings that do not count under this version or on this machine, as sentences.
    left_out: BTreeMap<String, String>,
    /// CPUs that a node may have.
    usable_cpus: Vec<u32>,
    /// CPUs on which the daemon was started, which may be fewer.
    own_cpus: Vec<u32>,
    /// CPUs of `own_cpus` that no node has.
    housekeeping_cpus: Vec<u32>,
    programs: Programs,
    place: Place,
    registry: Registry,
    /// Registry changes to write when nothing is more urgent.
    changes: Vec<Change>,
    table: arbiter::Table,
    epoll: rustix::fd::OwnedFd,
    requests: Receiver<Queued>,
    door: Door,
    signals: UnixStream,
    hangups: UnixStream,
    exit_watch: ExitWatch,
    /// An empty network namespace for openers and models.
    empty_netns: Option<tasuki_tap::namespace::Unnamed>,
    /// Control groups; [`Supervisor::begin`] looks for them.
    groups: Option<Arc<Groups>>,
    cells: cells::Cells,
    workers: ByNode<Worker>,
    cards: ByNode<Card>,
    nodes: BTreeMap<String, Node>,
    taps: BTreeMap<String, taps::TapEnd>,
    /// Interfaces with several queues, by their nodes.
    interfaces: BTreeMap<String, queues::Interface>,
    /// Nodes whose workers are ready to serve queues of another node's machine, or do.
    borrowing: BTreeSet<String>,
    shortcuts: shortcuts::Shortcuts,
    interfaces_looked_at: Duration,
    /// Tells which interface is asked in its namespace.
    turn: usize,
    vnis: BTreeMap<String, vnis::Net>,
    endpoints: BTreeMap<String, endpoints::Endpoint>,
    sockets: sockets::Sockets,
    leaving: Vec<nodes::Leaving>,
    emptying: Vec<failover::Emptying>,
    deposits: deposits::Deposits,
    captures: BTreeMap<u32, captures::Capture>,
    last_capture: u32,
    jobs: Vec<Job>,
    /// Requests for counts: the NIC, the worker asked, and when.
    counting: Vec<(u32, u32, Duration, Answer<crate::api::types::Counts>)>,
    stopping: Option<(Duration, u32, Option<Answer<crate::api::types::Stopped>>)>,
    events: Vec<Event>,
    last_event: u64,
    last_party: u32,
    /// The numbers by which arbiters know nodes. None is given twice: an arbiter may remember one of a node that is gone.
    node_numbers: BTreeMap<String, u32>,
    next_node_number: u32,
    since: Duration,
    not_replaced: Option<String>,
    /// Why nothing can be scraped, if metrics are configured.
    not_scraped: Option<String>,
    adopted: u32,
    /// Whether this daemon has yet to begin with any NIC: it has just asked the workers of an earlier one.
    adopting: bool,
    /// Whether some of these workers have yet to answer, then or later.
    awaiting: bool,
    /// NICs without an arbiter, as workers that have yet to answer may have them.
    unheard: BTreeSet<u32>,
    /// How many of its workers had not answered at the last look.
    silent: usize,
    /// Until when the other NICs wait for these workers, too.
    awaits_all_until: Option<Duration>,
    /// Requests that wait for these workers.
    put_off: VecDeque<Queued>,
    /// Workers that had an end of a VNI before that joined, and the ends.
    untold: VecDeque<(u32, u32)>,
    /// When the next of them is told, after a lack of descriptors.
    untold_not_before: Duration,
    room: Vec<u8>,
    ended: Option<Ended>,
    /// Frozen workers that the daemon has yet to end.
    frozen: Vec<deeds::Frozen>,
    /// Stand-bys that stay frozen because their driver is about to be fenced.
    ahead: Vec<deeds::Ahead>,
    /// Events not yet written to the log.
    unlogged: Vec<Event>,
    /// NICs whose lease moved to another page; the registry does not know yet.
    renewed: Vec<u32>,
    /// Leave orders still to send: worker, NIC, and whether it is the worker's last NIC.
    pending_leaves: Vec<(u32, u32, bool)>,
}

/// The parts of a supervisor.
#[derive(Debug)]
pub struct Parts {
    /// Nodes and NICs.
    pub config: Config,
    /// The file of that, and its text. If it cannot be used, and `config` is what was [applied last](applied_last), why not.
    pub file: (PathBuf, Result<String, String>),
    /// Programs to start.
    pub programs: Programs,
    /// The runtime directory.
    pub place: Place,
    /// The control group that holds the nodes' groups; if `None`, the daemon's own.
    pub groups: Option<PathBuf>,
    /// The entrance for requests from other threads.
    pub door: Door,
    /// The receiving end of the door's requests.
    pub requests: Receiver<Queued>,
    /// Receives a byte when the daemon is told to exit.
    pub signals: UnixStream,
    /// Receives a byte when the daemon is told to apply its file anew.
    pub hangups: UnixStream,
    /// Why this daemon goes on, if it was to be replaced and the other did not begin.
    pub not_replaced: Option<String>,
    /// A socket in which all waits that the keeper has, if the program before this one in this process has handed it on.
    pub handed_on: Option<rustix::fd::OwnedFd>,
}

impl Supervisor {
    /// Starts the daemon: it takes over all that an earlier daemon left running.
    pub fn begin(parts: Parts) -> Result<Self> {
        let (folder, keeper) = (parts.place.folder().to_owned(), parts.place.keeper_socket());
        let path = folder.join(registry::FILE);
        let was_there = path.exists();
        Self::take_over(parts).inspect_err(|_| {
            // A registry says that workers may drive. Where it has nothing, and there is no keeper, none does.
            let is_nothing = || Registry::open(&folder).map_or(!was_there, |(_, known)| known.is_nothing());
            if !keeper.exists() && is_nothing() {
                let _ = std::fs::remove_file(&path);
            }
        })
    }

    fn take_over(parts: Parts) -> Result<Self> {
        let Parts {
            config,
            file: (file, text),
            programs,
            place,
            groups,
            door,
            requests,
            signals,
            hangups,
            not_replaced,
            handed_on,
        } = parts;
        let (registry, mut known) = Registry::open(place.folder())?;
        let (current, config) = apply::Current::begin(file, config, text, known.applied.take())?;
        let own_cpus = housekeeping_cpus::find(&Config::default());
        let housekeeping = housekeeping_cpus::find(&config);
        housekeeping_cpus::pin_this_thread(&housekeeping);
        log::pin(&housekeeping);
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).context("the kernel has no epoll for us")?;
        let mut supervisor = Supervisor {
            usable_cpus: housekeeping_cpus::usable(),
            own_cpus,
            housekeeping_cpus: housekeeping,
            config,
            changes: vec![Change::Applied(current.record.clone())],
            current,
            applying: None,
            is_told_to_apply: false,
            by_hand: BTreeSet::new(),
            left_out: BTreeMap::new(),
            programs,
            place,
            registry,
            table: arbiter::Table::default(),
            epoll,
            requests,
            door,
            signals,
            hangups,
            exit_watch: ExitWatch::new()?,
            empty_netns: None,
            groups: None,
            cells: cells::Cells::begin()?,
            workers: ByNode::default(),
            cards: ByNode::default(),
            nodes: BTreeMap::new(),
            taps: BTreeMap::new(),
            interfaces: BTreeMap::new(),
            borrowing: BTreeSet::new(),
            shortcuts: shortcuts::Shortcuts::default(),
            interfaces_looked_at: Duration::ZERO,
            turn: 0,
            vnis: BTreeMap::new(),
            endpoints: BTreeMap::new(),
            sockets: sockets::Sockets::default(),
            leaving: Vec::new(),
            emptying: Vec::new(),
            deposits: deposits::Deposits::default(),
            captures: BTreeMap::new(),
            last_capture: 0,
            jobs: Vec::new(),
            counting: Vec::new(),
            stopping: None,
            last_event: known.events.last().map_or(0, |event| event.number),
            events: Vec::new(),
            last_party: known.last_party,
            node_numbers: BTreeMap::new(),
            next_node_number: 0,
            since: now(),
            not_replaced,
            not_scraped: None,
            adopted: 0,
            adopting: false,
            awaiting: false,
            unheard: BTreeSet::new(),
            silent: 0,
            awaits_all_until: None,
            put_off: VecDeque::new(),
            untold: VecDeque::new(),
            untold_not_before: Duration::ZERO,
            room: Vec::new(),
            ended: None,
            frozen: Vec::new(),
            ahead: Vec::new(),
            unlogged: Vec::new(),
            renewed: Vec::new(),
            pending_leaves: Vec::new(),
        };
        let bell = supervisor.door.clone();
        epoll_add(&supervisor.epoll, bell.bell().as_fd(), Token::Requests)?;
        epoll_add(&supervisor.epoll, supervisor.signals.as_fd(), Token::Signal)?;
        epoll_add(&supervisor.epoll, supervisor.hangups.as_fd(), Token::Hangup)?;
        epoll_add(&supervisor.epoll, supervisor.exit_watch.fd(), Token::ExitMarks)?;
        epoll_add(&supervisor.epoll, supervisor.cells.bell().as_fd(), Token::Cells)?;
        supervisor.find_groups(groups);
        let found = supervisor.find_or_start_keeper(handed_on)?;
        let is_empty = found.is_empty();
        if let Err(error) = supervisor.adopt(known, found) {
            if is_empty && supervisor.workers.is_empty() {
                // It keeps nothing.
                supervisor.end_keeper();
            }
            return Err(error);
        }
        if let Some(why) = &supervisor.not_replaced {
            let sentence = format!("tasukid goes on as it was: {why}");
            supervisor.note(About::default(), sentence);
        }
        if let Some(trouble) = supervisor.current.trouble() {
            supervisor.note(About::default(), trouble);
        }
        let (version, process) = (env!("CARGO_PKG_VERSION"), std::process::id());
        let (generation, workers) = (supervisor.current.record.generation, supervisor.workers.len());
        let has = format!("generation {generation} of the configuration; workers of an earlier tasukid: {workers}");
        supervisor.note(About::default(), format!("tasukid {version} begins (process {process}), with {has}"));
        Ok(supervisor)
    }

    /// Returns the configuration in force: the file's, or what was applied last.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Notes why nothing can be scraped, although metrics are configured.
    pub fn is_not_scraped(&mut self, why: String) {
        self.note(About::default(), why.clone());
        self.not_scraped = Some(why);
    }

    /// Runs until the daemon is told to exit.
    pub fn run(&mut self) -> Result<Ended> {
        // While a NIC changes hands, the daemon must read workers' messages at once, even beside a busy program.
        tasuki_shm::slice::brief();
        let mut events = Vec::with_capacity(READY_MAX);
        let mut watchdog = Watchdog::begin(now());
        loop {
            self.run_housekeeping();
            if let Some(ended) = self.ended.clone() {
                if ended == Ended::Everything {
                    self.close_endpoints();
                    self.close_taps();
                    self.end_keeper();
                    self.cells.end(self.nodes.keys());
                    self.groups.iter().for_each(|groups| groups.sweep());
                }
                self.flush();
                if let Ended::Replaced { .. } = ended {
                    // It learns from this where it is to run.
                    housekeeping_cpus::pin_this_thread(&self.own_cpus);
                }
                return Ok(ended);
            }
            let told = watchdog.tell(now()).unwrap_or(Duration::MAX);
            let wait = self.next_due().min(told).saturating_sub(now());
            let limit =
                Timespec { tv_sec: i64::try_from(wait.as_secs()).unwrap_or(3600), tv_nsec: wait.subsec_nanos().into() };
            events.clear();
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&limit)) {
                Err(rustix::io::Errno::INTR) | Ok(_) => {}
                Err(errno) => return Err(errno).context("the kernel reports no more events"),
            }
            let mut tokens: Vec<_> =
                events.iter().filter_map(|event: &epoll::Event| Token::from_data(event.data)).collect();
            tokens.sort_unstable();
            for token in tokens {
                self.handle(token);
            }
            self.due();
        }
    }

    fn handle(&mut self, token: Token) {
        match token {
            Token::ExitMarks => self.on_exit_marks(),
            Token::WorkerEnd(party) => self.worker_ended(party),
            Token::JailReadable(party) => self.on_jail_readable(party),
            Token::WorkerReadable(party) => self.on_worker_readable(party),
            Token::OpenerReadable(nic) => self.on_opener_readable(nic),
            Token::OpenerEnd(nic) => self.opener_ended(nic),
            Token::ModelEnd(nic) => self.model_ended(nic),
            Token::KeeperReadable => self.on_keeper_hang_up(),
            Token::WorkerStderr(party) => self.on_stderr(party),
            Token::Requests => self.answer_requests(),
            Token::Signal => {
                self.ended = Some(Ended::Alone);
                let process = std::process::id();
                let sentence = format!(
                    "tasukid ends (process {process}), as a signal asked; its workers go on, and the next tasukid takes them over"
                );
                self.note(About::default(), sentence);
            }
            Token::Cells => self.on_cells(),
            Token::Hangup => {
                // Several are one.
                let _ = (&self.hangups).read(&mut [0; 64]);
                self.apply_own_file();
            }
        }
    }

    /// Does the work that can wait until all urgent work is done.
    fn run_housekeeping(&mut self) {
        debug_assert!(self.workers.is_whole() && self.cards.is_whole());
        if self.is_pressing() {
            return;
        }
        std::mem::take(&mut self.renewed).into_iter().for_each(|nic| self.record_nic(nic));
        if self.stopping.is_some() {
            self.go_on_stopping();
        } else {
            self.go_on_adopting();
            // Answer waiting callers before any work that can wait.
            self.go_on_with_jobs();
            self.send_leaves();
            self.go_on_opening();
            self.reconcile_vnis();
            // The keeper must have the new ends before any worker does.
            self.deposit();
            self.fail_over();
            self.go_on_with_jobs();
            self.send_leaves();
            self.reconcile_workers();
            self.go_on_removing();
            self.go_on_closing();
            self.apply_the_rest();
            self.go_on_applying();
            self.apply_own_file_if_told();
            self.reconcile_trust();
            self.go_on_with_jobs();
            self.send_leaves();
            self.mend_keeper();
            self.deposit();
            self.reconcile_taps();
            self.reconcile_queues();
            self.reconcile_shortcuts();
            self.reconcile_captures();
            self.reconcile_interrupts();
        }
        self.flush();
        // Last: if the daemon dies while it ends them, registry and keeper already know which node has the NIC.
        self.end_frozen();
        self.flush();
    }

    /// Writes pending log lines and registry changes.
    fn flush(&mut self) {
        // A log line takes 7 µs, and the caller of an upgrade would wait for it.
        for Event { node, nic, worker, sentence, .. } in std::mem::take(&mut self.unlogged) {
            tracing::info!(node, nic, worker, "{sentence}");
        }
        let changes = std::mem::take(&mut self.changes);
        if !changes.is_empty() {
            crash::point("daemon.writing");
        }
        let news = self.registry.write(&changes, now());
        self.tell_of_registry(news);
    }

    /// Notes when the registry cannot be written, and when it can be again.
    fn tell_of_registry(&mut self, news: Option<News>) {
        match news {
            None => {}
            Some(News::Broken(sentence)) => self.note(About::default(), sentence),
            Some(News::Whole) => {
                self.note(About::default(), "the registry is written again, with all that was kept in memory")
            }
        }
    }

    /// Records an event.
    fn note(&mut self, about: About<'_>, sentence: impl Into<String>) {
        let sentence = sentence.into();
        self.last_event += 1;
        let event = Event {
            number: self.last_event,
            at_ms: ms_since_1970(),
            node: about.node.map(str::to_owned),
            nic: about.nic.map(str::to_owned),
            worker: about.worker,
            sentence,
        };
        self.changes.push(Change::Event(event.clone()));
        self.unlogged.push(event.clone());
        if self.events.len() >= EVENTS_MAX {
            self.events.remove(0);
        }
        self.events.push(event);
    }

    /// Returns a number that no worker ever had and whose addresses no present NIC memory uses.
    fn next_party(&mut self) -> u32 {
        let taken: Vec<u32> = self
            .workers
            .keys()
            .copied()
            .chain(self.cells.numbers())
            .chain(self.cards.values().filter_map(|card| Some(card.opened.as_ref()?.made_by)))
            .collect();
        let free = |party: u32| taken.iter().all(|other| iova_of(*other) != iova_of(party));
        let next = (1..=SLOTS).map(|ahead| self.last_party + ahead).find(|party| free(*party));
        self.last_party = next.unwrap_or(self.last_party + 1);
        self.changes.push(Change::Party(self.last_party));
        self.last_party
    }
}

/// Number of address ranges for memory that a process makes for a card.
const SLOTS: u32 = 13;
/// Bytes per range. All ranges lie where a 32-bit card reaches and no machine has its interrupts.
const SLOT_LEN: u64 = 256 << 20;

/// Returns the address (IOVA) at which a card may see memory that this party makes.
fn iova_of(party: u32) -> u64 {
    SLOT_LEN * u64::from(1 + party % SLOTS)
}

/// The subject of an event.
#[derive(Debug, Clone, Copy, Default)]
struct About<'a> {
    node: Option<&'a str>,
    nic: Option<&'a str>,
    worker: Option<u32>,
}

impl<'a> About<'a> {
    fn node(node: &'a str) -> Self {
        About { node: Some(node), ..About::default() }
    }

    fn nic(nic: &'a str) -> Self {
        About { nic: Some(nic), ..About::default() }
    }

    fn worker(node: &'a str, worker: u32) -> Self {
        About { node: Some(node), worker: Some(worker), ..About::default() }
    }

    /// The subject is a NIC of this node, too.
    fn of_nic(self, nic: &'a str) -> Self {
        About { nic: Some(nic), ..self }
    }

    /// The subject is this worker, too, if there is one.
    fn of_worker(self, worker: impl Into<Option<u32>>) -> Self {
        About { worker: worker.into(), ..self }
    }
}

/// Puts a sentence in the place of the last one. Returns whether it is another one, of which users are to hear.
fn is_news(place: &mut Option<String>, sentence: &str) -> bool {
    place.replace(sentence.to_owned()).as_deref() != Some(sentence)
}

fn epoll_add(epoll: &rustix::fd::OwnedFd, fd: BorrowedFd<'_>, token: Token) -> Result<()> {
    epoll::add(epoll, fd, token.to_data(), epoll::EventFlags::IN)
        .context("the kernel will not report events of a descriptor")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_comes_back_as_it_was_and_deaths_come_first() {
        let all = [
            Token::WorkerEnd(7),
            Token::JailReadable(7),
            Token::WorkerReadable(1),
            Token::OpenerReadable(2),
            Token::OpenerEnd(3),
            Token::ModelEnd(u32::MAX),
            Token::KeeperReadable,
            Token::Requests,
            Token::Signal,
            Token::Hangup,
            Token::Cells,
            Token::WorkerStderr(7),
        ];
        assert!(all.iter().all(|token| Token::from_data(token.to_data()) == Some(*token)));
        assert!(all.is_sorted());
    }

    #[test]
    fn addresses_are_where_a_card_of_32_bits_reaches() {
        for party in 0..100 {
            let iova = iova_of(party);
            assert!(iova >= SLOT_LEN && iova + SLOT_LEN <= 0xF000_0000, "{iova:#x}");
        }
    }
}
