//! Stage one of confinement ([`crate::jail`]) of a worker's process. The process gets nothing but its socket until the
//! kernel confirms the confinement.

use std::collections::BTreeSet;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context, Result};
use tasuki_relay::message::{self, Begin};
use tasuki_shm::crash;
use tasuki_tap::namespace::Unnamed;

use super::worker::{Stage, Worker};
use super::{About, Supervisor, is_news};
use crate::cgroup::{Bounds, Group, Groups};
use crate::config::Confine;
use crate::jail::{self, Says, Terms};

/// Bytes of a jail's messages that the daemon reads.
const SAYS_MAX: usize = 16 << 10;

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
    /// Why it could not be put into its control group, if so.
    pub not_in_group: Option<String>,
    /// Set once the kernel has been asked about the terms: a sentence for each that does not hold.
    verified: Option<Vec<String>>,
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
        let groups = self.groups.insert(Arc::new(Groups::find(&id, named.as_deref())));
        if self.config.daemon.confine != Confine::Off && named.is_none() {
            groups.enter_daemon_group();
        }
        self.cells.use_groups(Arc::clone(groups));
    }

    /// Returns the bounds on a node's processes together.
    fn bounds_of(&self, name: &str) -> Option<Bounds> {
        let node = self.config.node(name)?;
        let cpus = crate::housekeeping_cpus::allowed_for(node, &self.config, &self.housekeeping_cpus);
        Some(Bounds { cpus, ..node.bounds() })
    }

    /// Returns the bounds that count: none, if workers are not confined.
    pub(super) fn bounds_in_force(&self, name: &str) -> Option<Bounds> {
        match self.config.daemon.confine {
            Confine::Off => Some(Bounds::default()),
            Confine::Strict | Confine::BestEffort => self.bounds_of(name),
        }
    }

    /// Applies a new division of CPUs among the nodes.
    pub(super) fn apply_cpu_division(&mut self) {
        self.cells.pin(&self.housekeeping_cpus);
        let workers = self.workers.iter().filter(|(_, worker)| worker.group.is_some());
        let workers: Vec<u32> = workers.map(|(number, _)| *number).collect();
        workers.into_iter().for_each(|number| self.order_move(number));
    }

    /// Returns the control group of an earlier daemon's worker, in its node's.
    fn group_of_before(&mut self, name: &str, number: u32) -> std::io::Result<Group> {
        let none = || std::io::Error::other("there is no such node");
        let (bounds, child) = (self.bounds_in_force(name), format!("worker-{number}"));
        let groups = self.groups.as_ref().ok_or_else(none)?;
        match bounds.zip(self.nodes.get_mut(name)) {
            Some((bounds, node)) => groups.child(&mut node.group, name, &bounds, &child),
            // Its node has left the configuration, and the processes that it has started are to end with it.
            None => groups.child_of_before(&child).ok_or_else(none),
        }
    }

    /// Puts an earlier daemon's worker into its group, unless it is there already.
    pub(super) fn regroup(&mut self, number: u32) {
        let Some(worker) = self.workers.get(&number) else { return };
        let (node, pid) = (worker.record.node.clone(), worker.process.name().pid);
        let Ok(group) = self.group_of_before(&node, number) else { return };
        let is_there = group.processes().is_ok_and(|there| there.contains(&pid)) || group.add(pid).is_ok();
        if let (true, Some(worker)) = (is_there, self.workers.get_mut(&number)) {
            worker.group = Some(group);
        }
    }

    /// Returns the terms a fresh worker of this node starts under. The thread that makes its process adds the network
    /// and the control groups.
    pub(super) fn terms_for(&mut self, name: &str) -> Result<Terms> {
        let config = self.config.node(name).context("there is no such node")?;
        let (urgent, reads) = (config.nice() < 0, config.program().map(|program| program.files.clone()));
        let strict = self.config.daemon.confine == Confine::Strict;
        let uid = self.uid_of(name);
        let mut lacks = Vec::new();
        if !rustix::process::geteuid().is_root() {
            lacks.push(
                "it has tasukid's own user and network: it can open files for writing that it was lent to read, and the system-call filter alone bars sockets in the file system (start tasukid as root)".to_owned(),
            );
        } else if uid.is_none() {
            lacks.push(
                "there are fewer users than nodes; name more with uids = \"FIRST-LAST\" under [daemon]".to_owned(),
            );
        }
        Ok(Terms {
            program: None,
            uid,
            network: None,
            doors: Vec::new(),
            urgent,
            reads: reads.unwrap_or_default(),
            devices: Vec::new(),
            strict,
            lacks,
        })
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

    /// Handles a jail that has said something, has become the program, or has ended.
    pub(super) fn on_jail_readable(&mut self, number: u32) {
        let (jailing, pid) = match (self.cells.cell(number), self.workers.get_mut(&number)) {
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
            its.verified = Some(its.not_in_group.take().into_iter().chain(jail::verify(pid, &its.terms)).collect());
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
            let why = format!("{}; mend that, or write confine = \"best-effort\" under [daemon]", found.join("; "));
            return self.on_unconfined(number, &why);
        }
        worker.send_first_message();
    }

    fn on_unconfined(&mut self, number: u32, why: &str) {
        // One that leaves is to end anyhow.
        let Some(worker) = self.workers.get(&number).filter(|worker| !matches!(worker.stage, Stage::Leaving(_))) else {
            return;
        };
        let node = worker.record.node.clone();
        let goes_on = |worker: &Worker| worker.party() != number && matches!(worker.stage, Stage::Begun);
        // It was to follow one that goes on.
        if self.workers.of(&node).any(goes_on) {
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
pub(super) fn path_of(network: &Unnamed) -> PathBuf {
    format!("/proc/{}/fd/{}", std::process::id(), network.as_fd().as_raw_fd()).into()
}

/// Opens `/dev/null`, for output to discard.
pub(super) fn nowhere() -> Result<OwnedFd> {
    let nowhere = std::fs::OpenOptions::new().write(true).open("/dev/null");
    Ok(nowhere.context("/dev/null cannot be opened")?.into())
}

impl Jailing {
    /// Creates that of a process with this standard output, which starts under these terms.
    pub(super) fn new(output: std::io::PipeReader, terms: Terms) -> Self {
        Jailing { output, received: Vec::new(), terms, not_in_group: None, verified: None }
    }

    /// Returns its standard output, until it becomes the program.
    pub(super) fn output(&self) -> BorrowedFd<'_> {
        self.output.as_fd()
    }

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
