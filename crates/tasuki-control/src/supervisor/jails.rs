//! Stage one of confinement ([`crate::jail`]) of a worker's process. The process gets nothing but its socket until the
//! kernel confirms the confinement.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use tasuki_relay::message::{self, Begin};
use tasuki_shm::crash;
use tasuki_tap::namespace::Unnamed;

use super::lines::Lines;
use super::worker::{Stage, Worker};
use super::{About, Supervisor, Token, epoll_add, is_news, now};
use crate::cgroup::{Bounds, Group, Groups};
use crate::channel;
use crate::config::Confine;
use crate::jail::{self, Says, Terms};
use crate::process::Process;
use crate::spawn::Program;

/// Bytes of a jail's messages that the daemon reads.
const SAYS_MAX: usize = 16 << 10;
/// Pause before a node gets another waiting process, after one has ended by itself.
const CELL_PAUSE: Duration = Duration::from_secs(1);

/// The messages a worker gets once it is confined.
#[derive(Debug)]
pub struct FirstMessage {
    /// The program its process is to become, if it is not that already, and the program's file.
    pub program: Option<(PathBuf, OwnedFd)>,
    /// The first message.
    pub begin: Begin,
    /// The node's program state and the worker's listening socket.
    pub fds: [OwnedFd; 2],
    /// Its endpoint, if it has one.
    pub endpoint: Option<(message::Endpoint, OwnedFd)>,
}

/// A process that is not known to be its program yet.
#[derive(Debug)]
pub struct Jailing {
    /// Its standard output, until it becomes the program.
    output: std::io::PipeReader,
    received: Vec<u8>,
    terms: Terms,
    /// Set once the kernel has been asked about the terms: a sentence for each that does not hold.
    verified: Option<Vec<String>>,
}

/// The means to start a process, except its standard input and error.
#[derive(Debug)]
struct Start {
    /// Path and arguments.
    command: (PathBuf, Vec<OsString>),
    /// Its standard output.
    stdout: OwnedFd,
    /// Its jail, if it begins in one.
    jailing: Option<Jailing>,
    group: Option<Group>,
}

/// A process for a worker with this number, and its resources from the beginning.
#[derive(Debug)]
pub struct Cell {
    /// Number of the worker.
    pub number: u32,
    pub process: Process,
    /// The daemon's end of its standard input.
    pub socket: OwnedFd,
    /// Path at which a later daemon finds it.
    pub path: PathBuf,
    /// The socket that listens at that path.
    pub listener: OwnedFd,
    /// See [`Worker`].
    pub lines: Option<Lines>,
    /// See [`Worker`].
    pub jailing: Option<Jailing>,
    /// See [`Worker`].
    pub group: Option<Group>,
    /// Bytes it may lock.
    pub memlock: u64,
}

impl Cell {
    /// Ends a process that was told no program.
    fn end(self) {
        let Cell { mut process, path, group, .. } = self;
        process.kill();
        process.ended();
        group.iter().for_each(Group::remove);
        let _ = std::fs::remove_file(&path);
        super::lines::forget(&path);
    }
}

/// Resources that the processes of a node share.
#[derive(Debug, Default)]
pub struct NodeJail {
    /// The group that bounds them.
    group: Option<Group>,
    /// An empty network.
    network: Option<Unnamed>,
    /// A process in its jail that waits for a program.
    cell: Option<Cell>,
    /// Earliest time for the next such process.
    not_before: Duration,
}

impl NodeJail {
    /// Ends the process that waits for a program: it was made for other settings.
    pub fn forget_cell(&mut self) {
        self.cell.take().into_iter().for_each(Cell::end);
    }
}

impl Drop for NodeJail {
    fn drop(&mut self) {
        self.forget_cell();
        self.group.iter().for_each(Group::remove);
    }
}

impl Supervisor {
    /// Returns a user ID of its own for `name`: the one that it has, if that is in the range; `None` if the daemon is
    /// not root.
    fn uid_for(&self, name: &str, has: Option<u32>) -> Option<u32> {
        let range = self.config.daemon.uids;
        if !rustix::process::geteuid().is_root() {
            return None;
        }
        let mut taken = { self.nodes.values() }
            .map(|node| node.record.uid)
            .chain(self.cards.values().map(|card| card.uid))
            .flatten()
            .collect::<BTreeSet<u32>>();
        has.filter(|uid| range.has(*uid)).or_else(|| {
            // Another daemon's node of this name has another user.
            let whole = format!("{}/{name}", self.place.folder().display());
            range.from(crc32c::crc32c(whole.as_bytes())).find(|uid| taken.insert(*uid))
        })
    }

    /// Returns a node's user: the same as long as the node is known.
    fn uid_of(&mut self, name: &str) -> Option<u32> {
        let has = self.nodes.get(name)?.record.uid;
        let uid = self.uid_for(name, has)?;
        if has != Some(uid) {
            self.nodes.get_mut(name)?.record.uid = Some(uid);
            let record = self.nodes[name].record.clone();
            self.changes.push(crate::registry::Change::Node(name.to_owned(), record));
        }
        Some(uid)
    }

    /// Finds the control groups. If nodes are to have bounds, the daemon moves out of the group that contains the
    /// nodes' groups, and the processes it starts follow it.
    pub(super) fn find_groups(&mut self, named: Option<PathBuf>) {
        let id = format!("{:08x}", crc32c::crc32c(self.place.folder().as_os_str().as_encoded_bytes()));
        let groups = self.groups.insert(Groups::find(&id, named.as_deref()));
        if self.config.daemon.confine != Confine::Off && named.is_none() {
            groups.enter_daemon_group();
        }
    }

    /// Returns the bounds on a node's processes together.
    fn bounds_of(&self, name: &str) -> Option<Bounds> {
        let node = self.config.node(name)?;
        let cpus = crate::housekeeping_cpus::allowed_for(node, &self.config, &self.housekeeping_cpus);
        Some(Bounds { cpus, ..node.bounds() })
    }

    /// Applies a new division of CPUs among the nodes.
    pub(super) fn apply_cpu_division(&mut self) {
        self.nodes.values_mut().for_each(|node| node.jail.group = None);
        let workers = self.workers.values().filter(|worker| worker.group.is_some());
        let workers: Vec<_> = workers.map(|worker| (worker.record.party, worker.process.name().pid)).collect();
        for (number, pid) in workers {
            let node = self.workers[&number].record.node.clone();
            let group = self.group_for(&node, number).ok().filter(|group| group.add(pid).is_ok());
            if let (Some(worker), Some(group)) = (self.workers.get_mut(&number), group) {
                worker.group = Some(group);
            }
        }
    }

    /// Returns the control group of a worker, in its node's.
    fn group_for(&mut self, name: &str, number: u32) -> std::io::Result<Group> {
        let none = || std::io::Error::other("there is no such node");
        let bounds = match self.config.daemon.confine {
            Confine::Off => Bounds::default(),
            Confine::Strict | Confine::BestEffort => self.bounds_of(name).ok_or_else(none)?,
        };
        let groups = self.groups.as_ref().ok_or_else(none)?;
        let jail = &mut self.nodes.get_mut(name).ok_or_else(none)?.jail;
        groups.child(&mut jail.group, name, &bounds, &format!("worker-{number}"))
    }

    /// Puts an earlier daemon's worker into its group, unless it is there already.
    pub(super) fn regroup(&mut self, number: u32) {
        let Some(worker) = self.workers.get(&number) else { return };
        let (node, pid) = (worker.record.node.clone(), worker.process.name().pid);
        let Ok(group) = self.group_for(&node, number) else { return };
        let is_there = group.processes().is_ok_and(|there| there.contains(&pid)) || group.add(pid).is_ok();
        if let (true, Some(worker)) = (is_there, self.workers.get_mut(&number)) {
            worker.group = Some(group);
        }
    }

    /// Returns the terms a fresh worker of this node starts under, and its control group.
    fn terms_for(&mut self, name: &str, number: u32) -> Result<(Terms, Option<Group>)> {
        let config = self.config.node(name).context("there is no such node")?;
        let (urgent, reads) = (config.nice() < 0, config.program().map(|program| program.files.clone()));
        let bounds = self.bounds_of(name).context("there is no such node")?;
        let strict = self.config.daemon.confine == Confine::Strict;
        let uid = self.uid_of(name);
        let is_root = rustix::process::geteuid().is_root();
        let mut lacks = Vec::new();
        if !is_root {
            lacks.push(
                "it has tasukid's own user and network: it can open files for writing that it was lent to read, and the system-call filter alone bars sockets in the file system (start tasukid as root)".to_owned(),
            );
        } else if uid.is_none() {
            lacks.push(
                "there are fewer users than nodes; name more with uids = \"FIRST-LAST\" under [daemon]".to_owned(),
            );
        }
        let group = self.group_for(name, number);
        let group = group.map_err(|error| lacks.push(format!("it has no control group ({error})"))).ok();
        let missing = self.groups.iter().flat_map(|groups| groups.lacks(&bounds));
        lacks.extend(missing.map(|lack| format!("this machine has no {lack} for tasukid")));
        let jail = &mut self.nodes.get_mut(name).context("there is no such node")?.jail;
        if is_root && jail.network.is_none() {
            match Unnamed::new() {
                Ok(network) => jail.network = Some(network),
                Err(error) => lacks.push(format!("it is in the machine's network ({error})")),
            }
        }
        let network = jail.network.as_ref().map(path_of);
        let doors = group.as_ref().map(Group::doors).unwrap_or_default();
        let terms = Terms {
            program: None,
            uid,
            network,
            doors,
            urgent,
            reads: reads.unwrap_or_default(),
            devices: Vec::new(),
            strict,
            lacks,
        };
        Ok((terms, group))
    }

    /// Builds the command that starts an opener or a model of a card: as a user of the card's own. An opener of the
    /// machine's `devices` stays the daemon's user, without its capabilities, and is confined as far as that goes.
    pub(super) fn card_command(
        &mut self,
        nic: u32,
        program: &Path,
        args: Vec<String>,
        devices: &[&str],
    ) -> Result<(Command, Option<Terms>)> {
        if self.config.daemon.confine == Confine::Off {
            let mut command = Command::new(program);
            command.args(args);
            return Ok((command, None));
        }
        let card = self.cards.get(&nic).context("there is no such NIC")?;
        let uid = self.uid_for(&format!("nic/{}", card.name()), card.uid).filter(|_| devices.is_empty());
        if let Some(card) = self.cards.get_mut(&nic).filter(|_| uid.is_some()) {
            card.uid = uid;
        }
        let is_root = rustix::process::geteuid().is_root();
        let mut lacks = Vec::new();
        if devices.is_empty() && uid.is_none() {
            lacks.push("it has tasukid's own user".to_owned());
        }
        if is_root && self.empty_netns.is_none() {
            self.empty_netns = Some(Unnamed::new().context("it cannot be kept out of the machine's network")?);
        }
        let terms = Terms {
            program: Some((program.to_owned(), args)),
            uid,
            network: self.empty_netns.as_ref().map(path_of),
            doors: Vec::new(),
            urgent: false,
            reads: if devices.is_empty() { Vec::new() } else { vec!["/sys".into()] },
            devices: devices.iter().map(PathBuf::from).collect(),
            strict: self.config.daemon.confine == Confine::Strict && devices.is_empty(),
            lacks,
        };
        let mut command = Command::new("/proc/self/exe");
        command.args([jail::WORD, &serde_json::to_string(&terms)?]);
        Ok((command, Some(terms)))
    }

    /// Returns the means to start a worker. Without a jail the process is this program at once.
    fn start_for(&mut self, name: &str, number: u32, program: &Path) -> Result<Start> {
        if self.config.daemon.confine == Confine::Off {
            let stdout = nowhere()?;
            // Without a freezer a fence waits for the end of each process.
            let group = self.group_for(name, number).ok();
            return Ok(Start { command: (program.to_owned(), vec!["worker".into()]), stdout, jailing: None, group });
        }
        let (terms, group) = self.terms_for(name, number)?;
        let (output, stdout) = std::io::pipe().context("the kernel has no pipes left")?;
        rustix::io::ioctl_fionbio(&output, true).context("the kernel has no pipes left")?;
        let command = ("/proc/self/exe".into(), vec![jail::WORD.into(), serde_json::to_string(&terms)?.into()]);
        let jailing = Some(Jailing { output, received: Vec::new(), terms, verified: None });
        Ok(Start { command, stdout: stdout.into(), jailing, group })
    }

    /// Returns a process for the node's next worker: the waiting one, or a fresh one. Without a jail it is this
    /// program at once.
    pub(super) fn process_for(&mut self, name: &str, program: &Path) -> Result<Cell> {
        let waiting = self.nodes.get_mut(name).and_then(|node| node.jail.cell.take());
        waiting.map_or_else(|| self.begin_process(name, program), Ok)
    }

    fn begin_process(&mut self, name: &str, program: &Path) -> Result<Cell> {
        let number = self.next_party();
        let path = self.place.worker_socket(number);
        let listener = channel::listen(&path).with_context(|| format!("{} cannot be listened at", path.display()))?;
        let (socket, theirs) = channel::pair().context("the kernel has no sockets left")?;
        let Start { command: (file, args), stdout, jailing, group } = self.start_for(name, number, program)?;
        // A worker starts even if there is no room for its log.
        let (lines, stderr) = match Lines::create(&path) {
            Ok((lines, its)) => (Some(lines), its.into()),
            Err(_) => (None, nowhere()?),
        };
        let started = Process::start(&Program { path: file, args, stdio: [theirs, stdout, stderr] }, group.as_ref());
        let (process, is_there) = match started.with_context(|| format!("{} does not start", program.display())) {
            Ok(started) => started,
            Err(error) => {
                group.iter().for_each(Group::remove);
                let _ = std::fs::remove_file(&path);
                super::lines::forget(&path);
                return Err(error);
            }
        };
        // On a machine with version 1 alone, the jail enters the group by its doors.
        let enters = |group: &Group| group.birthplace().is_none() || group.add(process.name().pid).is_ok();
        let group = group.filter(|group| is_there || jailing.is_some() && enters(group));
        let memlock = self.memlock(process.name().pid);
        epoll_add(&self.epoll, process.pidfd(), Token::WorkerEnd(number))?;
        if let Some(jailing) = &jailing {
            epoll_add(&self.epoll, jailing.output.as_fd(), Token::JailReadable(number))?;
        }
        Ok(Cell { number, process, socket, path, listener, lines, jailing, group, memlock })
    }

    /// Has a process wait in its node's jail, so that the next worker need not wait for that.
    pub(super) fn prestart(&mut self, name: &str) {
        let Some(node) = self.nodes.get(name) else { return };
        if self.config.daemon.confine == Confine::Off || node.jail.cell.is_some() || node.jail.not_before > now() {
            return;
        }
        let begun = self.begin_process(name, Path::new(""));
        let Some(node) = self.nodes.get_mut(name) else { return };
        match begun {
            Ok(cell) => node.jail.cell = Some(cell),
            // A worker that starts without it reports why.
            Err(error) => tracing::debug!("no cell for node {name}: {error:#}"),
        }
    }

    /// Returns the numbers of the waiting processes.
    pub(super) fn cells(&self) -> impl Iterator<Item = u32> + '_ {
        self.nodes.values().filter_map(|node| Some(node.jail.cell.as_ref()?.number))
    }

    /// Handles the end of a waiting process. Returns whether there was one of this number.
    pub(super) fn cell_ended(&mut self, number: u32) -> bool {
        let is_it = |cell: &Cell| cell.number == number;
        let jails = self.nodes.values_mut().map(|node| &mut node.jail);
        let Some(jail) = { jails }.find(|jail| jail.cell.as_ref().is_some_and(is_it)) else { return false };
        // A worker that starts without one reports why that cannot be.
        jail.not_before = now() + CELL_PAUSE;
        jail.forget_cell();
        true
    }

    /// Handles a jail that has said something, has become the program, or has ended.
    pub(super) fn on_jail_readable(&mut self, number: u32) {
        let waiting = self.nodes.values_mut().filter_map(|node| node.jail.cell.as_mut());
        let cell = { waiting }.find(|cell| cell.number == number);
        let (jailing, pid) = match (cell, self.workers.get_mut(&number)) {
            (Some(cell), _) => (&mut cell.jailing, cell.process.name().pid),
            (None, Some(worker)) => (&mut worker.jailing, worker.process.name().pid),
            (None, None) => return,
        };
        let Some(its) = jailing else { return };
        let is_over = its.read();
        if is_over {
            let _ = rustix::event::epoll::delete(&self.epoll, &its.output);
        }
        let said = jail::said(&its.received);
        if let (Some(Says::Waits(_)), None) = (&said, &its.verified) {
            crash::point("daemon.jailed");
            its.verified = Some(jail::verify(pid, &its.terms));
        }
        match is_over {
            true => self.on_jail_over(number, said),
            false => self.let_begin(number),
        }
    }

    /// Handles a worker's process that has become its program, or has ended.
    fn on_jail_over(&mut self, number: u32, said: Option<Says>) {
        let Some(worker) = self.workers.get_mut(&number) else { return };
        let verified = worker.jailing.take().and_then(|jailing| jailing.verified);
        match (said, verified) {
            (Some(Says::Confined(lacks)), Some(found)) => worker.lacks = lacks.into_iter().chain(found).collect(),
            (Some(Says::Failed(sentence)), _) => self.on_unconfined(number, &sentence),
            // The process is dead: its pidfd reports that.
            _ => tracing::debug!("the jail of worker {number} says nothing"),
        }
    }

    /// Sends a worker its first message, once its process is known to be confined as it must be.
    pub(super) fn let_begin(&mut self, number: u32) {
        let Some(worker) = self.workers.get_mut(&number) else { return };
        let Some(jailing) = &worker.jailing else { return worker.send_first_message() };
        let Some(found) = &jailing.verified else { return };
        if jailing.terms.strict && !found.is_empty() {
            let why = found.join("; ");
            return self.on_unconfined(number, &why);
        }
        worker.send_first_message();
    }

    fn on_unconfined(&mut self, number: u32, why: &str) {
        let Some(node) = self.workers.get(&number).map(|worker| worker.record.node.clone()) else { return };
        let mut others = self.workers.iter().filter(|(its, worker)| **its != number && worker.record.node == node);
        // It was to follow one that goes on.
        if others.any(|(_, worker)| matches!(worker.stage, Stage::Begun)) {
            return self.kill_worker(number, format!("did not start: {why}"));
        }
        let sentence = format!("no worker for node {node}: {why}");
        if self.nodes.get_mut(&node).is_some_and(|known| is_news(&mut known.trouble, &sentence)) {
            self.note(About::node(&node), sentence);
            return self.kill_worker(number, "did not start".to_owned());
        }
        self.kill_worker(number, format!("did not start: {why}"));
    }
}

/// Returns the path at which a process that the daemon starts finds the network.
fn path_of(network: &Unnamed) -> PathBuf {
    format!("/proc/{}/fd/{}", std::process::id(), network.as_fd().as_raw_fd()).into()
}

/// Opens `/dev/null`, for output to discard.
pub(super) fn nowhere() -> Result<OwnedFd> {
    let nowhere = std::fs::OpenOptions::new().write(true).open("/dev/null");
    Ok(nowhere.context("/dev/null cannot be opened")?.into())
}

impl Jailing {
    /// Reads the jail's new messages. Returns whether none will follow.
    fn read(&mut self) -> bool {
        let mut text = [0; 1024];
        loop {
            match self.output.read(&mut text) {
                Ok(len @ 1..) if self.received.len() + len <= SAYS_MAX => self.received.extend_from_slice(&text[..len]),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return false,
                _ => return true,
            }
        }
    }
}

impl Worker {
    /// Sends the first message, and the descriptors that belong to it, once.
    pub(super) fn send_first_message(&mut self) {
        if let Some(FirstMessage { program, begin, fds: [program_state, listener], endpoint }) =
            self.first_message.take()
        {
            // If the worker is dead already, its pidfd reports that.
            let _ = program.map(|(path, file)| jail::tell(self.socket.as_fd(), &path, file.as_fd()));
            super::workers::send_first_message(self, begin, [&program_state, &listener], endpoint);
        }
    }
}
