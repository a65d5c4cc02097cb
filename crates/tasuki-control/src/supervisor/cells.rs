//! Makes processes for workers, in a thread of its own. Control groups, a network and a clone take the kernel
//! milliseconds, and seconds where others hold its locks (`cgroup_mutex`). The loop takes NICs over meanwhile.
//!
//! A process waits as a *cell* until a worker is wanted. With `confine = "off"` there is no jail in which it could wait,
//! and it is the worker's program from its beginning.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::event::EventfdFlags;
use tasuki_shm::crash;
use tasuki_tap::namespace::Unnamed;

use super::jails::{Jailing, nowhere, path_of};
use super::lines::Lines;
use super::{About, Supervisor, Token, WORKER_TIMEOUT, epoll_add, is_news, nanoseconds, now};
use crate::cgroup::{Bounds, Group, Groups};
use crate::config::{Config, Confine};
use crate::jail::{self, Terms};
use crate::process::{LAST_END_TIMEOUT, Name, Process};
use crate::spawn::Program;
use crate::{channel, housekeeping_cpus};

/// Pause before a node gets another waiting process, after one has ended by itself or could not be made.
const CELL_PAUSE: Duration = Duration::from_secs(1);

/// A process for a worker with this number, and its resources from the beginning.
#[derive(Debug)]
pub struct Cell {
    /// Number of the worker.
    pub number: u32,
    pub process: Process,
    /// Its program, if it is that already.
    pub program: Option<PathBuf>,
    /// The daemon's end of its standard input.
    pub socket: OwnedFd,
    /// Path at which a later daemon finds it.
    pub path: PathBuf,
    /// The socket that listens at that path.
    pub listener: OwnedFd,
    /// See [`Worker`](super::worker::Worker).
    pub lines: Option<Lines>,
    /// See [`Worker`](super::worker::Worker).
    pub jailing: Option<Jailing>,
    /// See [`Worker`](super::worker::Worker).
    pub group: Option<Group>,
    /// Bytes it may lock.
    pub memlock: u64,
}

impl Cell {
    /// Ends a process that was told no program.
    fn end(self) {
        let Cell { process, path, group, .. } = self;
        process.kill();
        // Without a jail it is its program already, and may have started others.
        let _ = group.as_ref().map(Group::kill);
        process.end(&LAST_END_TIMEOUT);
        group.iter().for_each(Group::remove);
        forget_files(&path);
    }
}

/// Removes the files of a worker that has not begun.
fn forget_files(socket: &Path) {
    let _ = std::fs::remove_file(socket);
    super::lines::forget(socket);
}

/// The description of a process to make.
#[derive(Debug)]
struct Wanted {
    number: u32,
    node: String,
    /// The path at which it is to listen.
    path: PathBuf,
    /// The program that it is to be at once; otherwise it begins in a jail.
    program: Option<PathBuf>,
    /// The terms of its jail, but for network and control groups.
    terms: Terms,
    /// Bounds on the node's processes together.
    bounds: Bounds,
    /// Whether it is to have a network of its node's own.
    is_apart: bool,
}

/// An order to the thread.
#[derive(Debug)]
enum Order {
    Make(Box<Wanted>),
    /// Puts a worker's process into its group.
    Move {
        number: u32,
        node: String,
        bounds: Bounds,
        process: Name,
    },
    End(Box<Cell>),
    /// Puts the keeper into its group.
    Hold(Name),
    /// Removes the group of a dead worker.
    Remove(Group),
    /// A node is gone: its group and its network go.
    Forget(String),
    /// The control groups of this machine are these.
    Groups(Arc<Groups>),
    /// Stays on these CPUs from now on.
    Pin(Vec<u32>),
    Stop,
}

/// A carried out order.
#[derive(Debug)]
enum Done {
    Made { node: String, number: u32, made: Result<Box<Cell>> },
    Moved { number: u32, group: Group },
}

/// Resources that the processes of a node share.
#[derive(Debug, Default)]
struct Shared {
    /// The group that bounds them, and its bounds.
    group: Option<(Bounds, Group)>,
    /// An empty network.
    network: Option<Unnamed>,
}

/// The thread's part.
#[derive(Debug)]
struct Maker {
    groups: Option<Arc<Groups>>,
    nodes: BTreeMap<String, Shared>,
    /// See [`Cells`].
    at_since: Arc<AtomicU64>,
    /// The CPUs on which it stays.
    cpus: Vec<u32>,
}

impl Maker {
    fn run(mut self, orders: &Receiver<Order>, done: &Sender<Done>, bell: &OwnedFd) {
        for order in orders {
            self.at_since.store(nanoseconds(now()), Relaxed);
            let answer = match order {
                Order::Make(wanted) => {
                    let (node, number) = (wanted.node.clone(), wanted.number);
                    Some(Done::Made { node, number, made: self.make(*wanted).map(Box::new) })
                }
                Order::Move { number, node, bounds, process } => {
                    // The number of one that has died may be another's by now.
                    let lives = Process::find(process).is_ok_and(|found| found.is_some());
                    let group = self.group(&node, bounds, number).ok();
                    let group = group.filter(|group| lives && group.add(process.pid).is_ok());
                    group.map(|group| Done::Moved { number, group })
                }
                Order::End(cell) => {
                    cell.end();
                    None
                }
                Order::Hold(keeper) => {
                    let lives = Process::find(keeper).is_ok_and(|found| found.is_some());
                    self.groups.iter().filter(|_| lives).for_each(|groups| groups.hold(keeper.pid));
                    None
                }
                Order::Remove(group) => {
                    group.remove();
                    None
                }
                Order::Forget(node) => {
                    self.nodes.remove(&node);
                    self.groups.iter().for_each(|groups| groups.remove_node(&node));
                    None
                }
                Order::Groups(groups) => {
                    self.groups = Some(groups);
                    None
                }
                Order::Pin(cpus) => {
                    housekeeping_cpus::pin_this_thread(&cpus);
                    self.cpus = cpus;
                    None
                }
                Order::Stop => return,
            };
            if let Some(answer) = answer {
                // A loop that has ended wants no answer.
                let _ = done.send(answer);
                let _ = rustix::io::write(bell, &1_u64.to_ne_bytes());
            }
            self.at_since.store(0, Relaxed);
        }
    }

    /// Returns the control group of a worker, in its node's.
    fn group(&mut self, node: &str, bounds: Bounds, number: u32) -> std::io::Result<Group> {
        let groups =
            self.groups.as_ref().ok_or_else(|| std::io::Error::other("tasukid has not looked for them yet"))?;
        let its = &mut self.nodes.entry(node.to_owned()).or_default().group;
        let mut group = its.take().filter(|(its, _)| *its == bounds).map(|(_, group)| group);
        let child = groups.child(&mut group, node, &bounds, &format!("worker-{number}"));
        *its = group.map(|group| (bounds, group));
        // Before Linux 6.2, the first group with CPUs of its own allows all threads around it all CPUs.
        housekeeping_cpus::pin_this_thread(&self.cpus);
        child
    }

    /// Completes the terms of a jail. Returns them with the worker's group.
    fn terms(&mut self, wanted: Wanted) -> (Terms, Option<Group>) {
        let Wanted { number, node, mut terms, bounds, is_apart, .. } = wanted;
        let group = self.group(&node, bounds, number);
        let group = group.map_err(|error| terms.lacks.push(format!("it has no control group ({error})"))).ok();
        let missing = self.groups.iter().flat_map(|groups| groups.lacks(&bounds));
        terms.lacks.extend(missing.map(|lack| format!("this machine has no {lack} for tasukid")));
        let network = &mut self.nodes.entry(node).or_default().network;
        if is_apart && network.is_none() {
            match Unnamed::new() {
                Ok(made) => *network = Some(made),
                Err(error) => terms.lacks.push(format!("it is in the machine's network ({error})")),
            }
        }
        terms.network = network.as_ref().map(path_of);
        terms.doors = group.as_ref().map(Group::doors).unwrap_or_default();
        (terms, group)
    }

    fn make(&mut self, wanted: Wanted) -> Result<Cell> {
        crash::point("daemon.makes-process");
        let path = wanted.path.clone();
        self.start(wanted).inspect_err(|_| forget_files(&path))
    }

    fn start(&mut self, wanted: Wanted) -> Result<Cell> {
        let (number, path, program) = (wanted.number, wanted.path.clone(), wanted.program.clone());
        let listener = channel::listen(&path).with_context(|| format!("{} cannot be listened at", path.display()))?;
        let (socket, theirs) = channel::pair().context("the kernel has no sockets left")?;
        let (file, args, stdout, mut jailing, group) = match &program {
            Some(program) => {
                // Without a freezer a fence waits for the end of each process.
                let group = self.group(&wanted.node, wanted.bounds, number).ok();
                (program.clone(), vec!["worker".into()], nowhere()?, None, group)
            }
            None => {
                let (terms, group) = self.terms(wanted);
                let (output, stdout) = std::io::pipe().context("the kernel has no pipes left")?;
                rustix::io::ioctl_fionbio(&output, true).context("the kernel has no pipes left")?;
                let args = vec![jail::WORD.into(), serde_json::to_string(&terms)?.into()];
                ("/proc/self/exe".into(), args, stdout.into(), Some(Jailing::new(output, terms)), group)
            }
        };
        // A worker starts even if there is no room for its log.
        let (lines, stderr) = match Lines::create(&path) {
            Ok((lines, its)) => (Some(lines), its.into()),
            Err(_) => (None, nowhere()?),
        };
        let started = Process::start(&Program { path: file, args, stdio: [theirs, stdout, stderr] }, group.as_ref());
        let program_name = program.as_deref().unwrap_or(Path::new("tasukid")).display();
        let (process, is_there) = match started.with_context(|| format!("{program_name} does not start")) {
            Ok(started) => started,
            Err(error) => {
                group.iter().for_each(Group::remove);
                return Err(error);
            }
        };
        // Where the kernel lets it begin in none (filters of containers know no clone3), it is moved there: it has heard nothing
        // yet, and a jail starts no other process.
        let enter = |error| group.as_ref().map_or(Err(error), |group| group.add(process.name().pid)).map(|()| true);
        let is_there = is_there.or_else(enter);
        if let (Err(error), Some(jailing)) = (&is_there, &mut jailing) {
            jailing.not_in_group = Some(format!("it is not in its control group ({error})"));
        }
        // On a machine with version 1 alone, the jail enters the group by its doors.
        let group = group.filter(|_| is_there.is_ok_and(|is_there| is_there || jailing.is_some()));
        Ok(Cell { number, process, program, socket, path, listener, lines, jailing, group, memlock: 0 })
    }
}

/// An order for a process that was not carried out yet.
#[derive(Debug)]
struct Ordered {
    since: Duration,
    /// Whether no worker waits for it.
    is_spare: bool,
}

/// The processes that wait for a node's next workers.
#[derive(Debug, Default)]
struct Waiting {
    cells: VecDeque<Cell>,
    /// By number.
    ordered: BTreeMap<u32, Ordered>,
    /// Why the last one that a worker waited for could not be made.
    failed: Option<anyhow::Error>,
    /// Earliest time for the next spare one.
    not_before: Duration,
}

/// The loop's part: the thread, and the processes that wait.
#[derive(Debug)]
pub struct Cells {
    orders: Sender<Order>,
    done: Receiver<Done>,
    bell: Arc<OwnedFd>,
    nodes: BTreeMap<String, Waiting>,
    /// When the thread began with the order that it is at, in ns of `CLOCK_MONOTONIC`; 0 if it is at none.
    at_since: Arc<AtomicU64>,
}

impl Cells {
    /// Starts the thread, on this thread's CPUs.
    pub fn begin() -> Result<Self> {
        let bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let bell = Arc::new(bell.context("the kernel has no eventfd left")?);
        let ((orders, theirs), (tell, done), rings) = (mpsc::channel(), mpsc::channel(), Arc::clone(&bell));
        let at_since = Arc::new(AtomicU64::new(0));
        let cpus = housekeeping_cpus::find(&Config::default());
        let maker = Maker { groups: None, nodes: BTreeMap::new(), at_since: Arc::clone(&at_since), cpus };
        std::thread::Builder::new()
            .name("starts".to_owned())
            .spawn(move || {
                crate::spawn::hold_signals();
                maker.run(&theirs, &tell, &rings);
            })
            .context("the kernel has no threads left")?;
        Ok(Cells { orders, done, bell, nodes: BTreeMap::new(), at_since })
    }

    pub fn bell(&self) -> &OwnedFd {
        &self.bell
    }

    fn order(&self, order: Order) {
        // The thread ends after the loop.
        let _ = self.orders.send(order);
    }

    /// Has the keeper put into its group.
    pub fn hold(&self, keeper: Name) {
        self.order(Order::Hold(keeper));
    }

    /// Has the group of a dead worker removed.
    pub fn remove(&self, group: Group) {
        self.order(Order::Remove(group));
    }

    /// Has the thread put processes into these control groups.
    pub fn use_groups(&self, groups: Arc<Groups>) {
        self.order(Order::Groups(groups));
    }

    /// Has the thread, and what it starts, run on these CPUs from now on.
    pub fn pin(&self, cpus: &[u32]) {
        self.order(Order::Pin(cpus.to_owned()));
    }

    /// Ends the processes that wait for a node's workers: they were made for other settings, or the node is gone.
    pub fn forget_cells(&mut self, node: &str) {
        let waiting = self.nodes.remove(node).unwrap_or_default();
        waiting.cells.into_iter().for_each(|cell| self.order(Order::End(Box::new(cell))));
    }

    /// Has the group and the network of a node go, which has no workers any more.
    pub fn forget_node(&mut self, node: &str) {
        self.forget_cells(node);
        self.order(Order::Forget(node.to_owned()));
    }

    /// Ends all that waits for these nodes, then the thread.
    pub fn end<'a>(&mut self, nodes: impl Iterator<Item = &'a String>) {
        nodes.for_each(|node| self.forget_node(node));
        self.order(Order::Stop);
        let until = now() + WORKER_TIMEOUT;
        loop {
            match self.done.recv_timeout(until.saturating_sub(now())) {
                Ok(Done::Made { made: Ok(cell), .. }) => cell.end(),
                Ok(_) => {}
                // Its process ends once it finds that there is no daemon.
                Err(RecvTimeoutError::Timeout) => {
                    return tracing::warn!("the kernel keeps a process of tasukid's waiting that was to start");
                }
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Returns the numbers of the processes that wait, and of those that are being made.
    pub fn numbers(&self) -> impl Iterator<Item = u32> + '_ {
        let its = |waiting: &Waiting| -> Vec<u32> {
            waiting.cells.iter().map(|cell| cell.number).chain(waiting.ordered.keys().copied()).collect()
        };
        self.nodes.values().flat_map(its)
    }

    /// Returns the process that waits under this number.
    pub fn cell(&mut self, number: u32) -> Option<&mut Cell> {
        self.nodes.values_mut().flat_map(|waiting| &mut waiting.cells).find(|cell| cell.number == number)
    }

    /// Returns since when the kernel has kept the thread from making a process for which a worker of this node waits. Many
    /// orders before that one are no fault of the kernel's: the time counts from where the thread began with the one it is at.
    fn waits_since(&self, node: &str) -> Option<Duration> {
        let at_since = Some(self.at_since.load(Relaxed)).filter(|ns| *ns > 0).map(Duration::from_nanos)?;
        self.ordered_since(node).map(|since| since.max(at_since))
    }

    fn ordered_since(&self, node: &str) -> Option<Duration> {
        let ordered = self.nodes.get(node)?.ordered.values();
        ordered.filter(|it| !it.is_spare).map(|it| it.since).min()
    }

    /// Returns whether the kernel has kept the thread from that for `WORKER_TIMEOUT`.
    pub fn is_late(&self, node: &str) -> bool {
        self.waits_since(node).is_some_and(|since| now().saturating_sub(since) >= WORKER_TIMEOUT)
    }

    /// Returns when the loop is to look at late orders.
    pub fn due(&self) -> Option<Duration> {
        // The thread may not have begun with an order of just now.
        let since = |node: &String| self.waits_since(node).or_else(|| self.ordered_since(node));
        let late = self.nodes.keys().filter_map(since).map(|since| since + WORKER_TIMEOUT);
        late.filter(|at| *at > now()).min()
    }
}

/// Returns why a worker does not start whose process has been ordered for `WORKER_TIMEOUT`.
pub fn late() -> String {
    format!(
        "the kernel has kept tasukid waiting for more than {} s for a process (its control group, its network, or the clone); look at the machine's load, and at dmesg",
        WORKER_TIMEOUT.as_secs()
    )
}

impl Supervisor {
    /// Takes a process that waits for the node's next worker, which is to run this program. If none does, one is ordered.
    ///
    /// # Errors
    /// It could not be made.
    pub(super) fn process_for(&mut self, name: &str, program: &Path) -> Result<Option<Cell>> {
        let is_jailed = self.config.daemon.confine != Confine::Off;
        let waiting = self.cells.nodes.entry(name.to_owned()).or_default();
        if let Some(error) = waiting.failed.take() {
            return Err(error);
        }
        let is_of_use = |cell: &Cell| {
            is_jailed == cell.program.is_none() && (is_jailed || cell.program.as_deref() == Some(program))
        };
        let (cells, odd) = std::mem::take(&mut waiting.cells).into_iter().partition(is_of_use);
        waiting.cells = cells;
        let odd: VecDeque<Cell> = odd;
        let first = waiting.cells.pop_front();
        // A worker waits for it now.
        waiting.ordered.values_mut().for_each(|it| it.is_spare &= first.is_some());
        let is_ordered = !waiting.ordered.is_empty();
        odd.into_iter().for_each(|cell| self.cells.order(Order::End(Box::new(cell))));
        if first.is_none() && !is_ordered {
            self.order_process(name, (!is_jailed).then(|| program.to_owned()), false)?;
        }
        Ok(first)
    }

    /// Returns whether the thread has yet to make this node's next process. If so, a worker waits for it from now on.
    pub(super) fn waits_for_process(&mut self, name: &str) -> bool {
        let Some(waiting) = self.cells.nodes.get_mut(name) else { return false };
        let waits = waiting.failed.is_none() && waiting.cells.is_empty() && !waiting.ordered.is_empty();
        if waits {
            waiting.ordered.values_mut().for_each(|it| it.is_spare = false);
        }
        waits
    }

    /// Has the thread make a process for a worker of this node.
    fn order_process(&mut self, name: &str, program: Option<PathBuf>, is_spare: bool) -> Result<()> {
        let terms = self.terms_for(name)?;
        let bounds = self.bounds_in_force(name).context("there is no such node")?;
        let number = self.next_party();
        let path = self.place.worker_socket(number);
        let is_apart = rustix::process::geteuid().is_root();
        let wanted = Wanted { number, node: name.to_owned(), path, program, terms, bounds, is_apart };
        let ordered = Ordered { since: now(), is_spare };
        self.cells.nodes.entry(name.to_owned()).or_default().ordered.insert(number, ordered);
        self.cells.order(Order::Make(Box::new(wanted)));
        Ok(())
    }

    /// Has a process wait in its node's jail, so that the next worker need not wait for that.
    pub(super) fn prestart(&mut self, names: &[String]) {
        // One at a time: a worker that starts meanwhile waits for none of the others.
        let is_making = self.cells.nodes.values().any(|waiting| !waiting.ordered.is_empty());
        if self.config.daemon.confine == Confine::Off || is_making {
            return;
        }
        for name in names {
            let waiting = self.cells.nodes.entry(name.to_owned()).or_default();
            if !waiting.cells.is_empty() || waiting.not_before > now() {
                continue;
            }
            match self.order_process(name, None, true) {
                Ok(()) => return,
                Err(error) => tracing::debug!("no cell for node {name}: {error:#}"),
            }
        }
    }

    /// Moves the process of a worker into its group, which has other bounds by now.
    pub(super) fn order_move(&mut self, number: u32) {
        let Some(worker) = self.workers.get(&number) else { return };
        let (node, process) = (worker.record.node.clone(), worker.process.name());
        let Some(bounds) = self.bounds_in_force(&node) else { return };
        self.cells.order(Order::Move { number, node, bounds, process });
    }

    /// Hears from the thread.
    pub(super) fn on_cells(&mut self) {
        let _ = rustix::io::read(self.cells.bell.as_fd(), &mut [0; 8]);
        // As that thread does after it has made a group.
        housekeeping_cpus::pin_this_thread(&self.housekeeping_cpus);
        while let Ok(done) = self.cells.done.try_recv() {
            match done {
                Done::Made { node, number, made } => self.on_made(&node, number, made.map(|cell| *cell)),
                Done::Moved { number, group } => {
                    // Of a worker that has died by now, the old name of the same group is to be removed.
                    if let Some(worker) = self.workers.get_mut(&number) {
                        worker.group = Some(group);
                    }
                }
            }
        }
    }

    fn on_made(&mut self, node: &str, number: u32, made: Result<Cell>) {
        let waiting = self.cells.nodes.get_mut(node);
        let ordered = waiting.and_then(|waiting| waiting.ordered.remove(&number));
        let Some(Ordered { is_spare, .. }) = ordered else {
            // Its node has other settings by now, or is gone.
            made.into_iter().for_each(|cell| self.cells.order(Order::End(Box::new(cell))));
            if !self.nodes.contains_key(node) {
                self.cells.forget_node(node);
            }
            return;
        };
        let watched = made.and_then(|cell| match self.watch_cell(&cell) {
            Ok(()) => Ok(Cell { memlock: self.memlock(cell.process.name().pid), ..cell }),
            Err(error) => {
                self.cells.order(Order::End(Box::new(cell)));
                Err(error)
            }
        });
        let waiting = self.cells.nodes.entry(node.to_owned()).or_default();
        match watched {
            Ok(cell) => waiting.cells.push_back(cell),
            // A worker that starts without it reports why.
            Err(error) if is_spare => {
                waiting.not_before = now() + CELL_PAUSE;
                tracing::debug!("no cell for node {node}: {error:#}");
            }
            Err(error) => waiting.failed = Some(error),
        }
    }

    fn watch_cell(&self, cell: &Cell) -> Result<()> {
        epoll_add(&self.epoll, cell.process.pidfd(), Token::WorkerEnd(cell.number))?;
        match &cell.jailing {
            Some(jailing) => epoll_add(&self.epoll, jailing.output(), Token::JailReadable(cell.number)),
            None => Ok(()),
        }
    }

    /// Handles the end of a waiting process. Returns whether there was one of this number.
    pub(super) fn cell_ended(&mut self, number: u32) -> bool {
        for waiting in self.cells.nodes.values_mut() {
            if let Some(at) = waiting.cells.iter().position(|cell| cell.number == number) {
                // A worker that starts without one reports why that cannot be.
                waiting.not_before = now() + CELL_PAUSE;
                let cell = waiting.cells.remove(at);
                cell.into_iter().for_each(|cell| self.cells.order(Order::End(Box::new(cell))));
                return true;
            }
        }
        false
    }

    /// Notes of each node for whose worker the kernel has kept the thread waiting.
    pub(super) fn tell_of_late_cells(&mut self) {
        let names = self.nodes.keys().filter(|name| self.cells.is_late(name));
        for name in names.cloned().collect::<Vec<_>>() {
            let sentence = format!("no worker for node {name} yet: {}", late());
            if self.nodes.get_mut(&name).is_some_and(|node| is_news(&mut node.trouble, &sentence)) {
                self.note(About::node(&name), sentence);
            }
        }
    }
}
