//! What a worker's process is started under: stage one of confinement ([`crate::jail`]). It is given its socket and nothing else until the kernel says that this holds.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use tasuki_relay::letter::Begin;
use tasuki_shm::crash;
use tasuki_tap::namespace::Unnamed;

use super::worker::Worker;
use super::{About, Supervisor, Token, watch};
use crate::cgroup::{Bounds, Group, Groups};
use crate::config::Confine;
use crate::jail::{self, Says, Terms};

/// Of what a jail says, so much is read.
const SAYS_MAX: usize = 16 << 10;

/// What a worker will be told once it is confined.
#[derive(Debug)]
pub struct Unsaid {
    /// The first letter,
    pub begin: Begin,
    /// the node's book and the worker's listening socket,
    pub fds: [OwnedFd; 2],
    /// and its TAP, or where it serves memif.
    pub outlet: Option<(String, OwnedFd)>,
}

/// A worker whose process is not known to be confined yet.
#[derive(Debug)]
pub struct Jailing {
    /// Its standard output, until it becomes the program.
    says: std::io::PipeReader,
    said: Vec<u8>,
    terms: Terms,
}

/// What starts a worker, without its standard input and error.
#[derive(Debug)]
pub struct Start {
    /// Its path and arguments.
    pub command: (PathBuf, Vec<OsString>),
    /// Its standard output.
    pub stdout: OwnedFd,
    /// What is to be heard of its jail, if it begins in one.
    pub jailing: Option<Jailing>,
    /// Its control group.
    pub group: Option<Group>,
}

/// What a node's processes have together.
#[derive(Debug, Default)]
pub struct Ward {
    /// Their bounds,
    group: Option<Group>,
    /// and a network in which there is nothing.
    network: Option<Unnamed>,
}

impl Drop for Ward {
    fn drop(&mut self) {
        self.group.iter().for_each(Group::remove);
    }
}

impl Supervisor {
    /// A user of nobody else's, for `whom`: the one that it has, if that may be.
    fn uid_for(&self, whom: &str, has: Option<u32>) -> Option<u32> {
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
            // Another daemon's node of this name has another.
            let whole = format!("{}/{whom}", self.place.folder().display());
            range.from(crc32c::crc32c(whole.as_bytes())).find(|uid| taken.insert(*uid))
        })
    }

    /// A node's user: the same as long as the node is known.
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

    /// Where nodes are to have bounds, the daemon leaves the group that those come from, and whom it starts is where it is.
    pub(super) fn find_groups(&mut self, named: Option<PathBuf>) {
        let id = format!("{:08x}", crc32c::crc32c(self.place.folder().as_os_str().as_encoded_bytes()));
        let groups = self.groups.insert(Groups::find(&id, named.as_deref()));
        groups.sweep();
        if self.config.daemon.confine != Confine::Off && named.is_none() {
            groups.go_aside();
        }
    }

    /// What a node's processes may have together.
    fn bounds_of(&self, name: &str) -> Option<Bounds> {
        let node = self.config.node(name)?;
        let cpus = crate::aside::of(node, &self.config, &self.aside);
        Some(Bounds { cpus, ..node.bounds() })
    }

    /// The nodes' CPUs are divided otherwise from now on.
    pub(super) fn divide_anew(&mut self) {
        self.nodes.values_mut().for_each(|node| node.ward.group = None);
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

    /// The control group of a worker, in its node's.
    fn group_for(&mut self, name: &str, number: u32) -> std::io::Result<Group> {
        let none = || std::io::Error::other("there is no such node");
        let bounds = match self.config.daemon.confine {
            Confine::Off => Bounds::default(),
            Confine::Strict | Confine::BestEffort => self.bounds_of(name).ok_or_else(none)?,
        };
        let groups = self.groups.as_ref().ok_or_else(none)?;
        let ward = &mut self.nodes.get_mut(name).ok_or_else(none)?.ward;
        if ward.group.is_none() {
            ward.group = Some(groups.node(name, &bounds)?);
        }
        ward.group.as_ref().ok_or_else(none)?.child(&format!("worker-{number}"))
    }

    /// A worker of the daemon before this one is in its group, or is now.
    pub(super) fn regroup(&mut self, number: u32) {
        let Some(worker) = self.workers.get(&number) else { return };
        let (node, pid) = (worker.record.node.clone(), worker.process.name().pid);
        let Ok(group) = self.group_for(&node, number) else { return };
        let is_there = group.processes().is_ok_and(|there| there.contains(&pid)) || group.add(pid).is_ok();
        if let (true, Some(worker)) = (is_there, self.workers.get_mut(&number)) {
            worker.group = Some(group);
        }
    }

    /// What a fresh worker of this node is started under, and its control group.
    fn terms_for(&mut self, name: &str, number: u32, program: &Path) -> Result<(Terms, Option<Group>)> {
        let config = self.config.node(name).context("there is no such node")?;
        let (urgent, reads) = (config.nice() < 0, config.program().map(|program| program.files.clone()));
        let bounds = self.bounds_of(name).context("there is no such node")?;
        let strict = self.config.daemon.confine == Confine::Strict;
        let uid = self.uid_of(name);
        let is_root = rustix::process::geteuid().is_root();
        let mut lacks = Vec::new();
        if !is_root {
            lacks.push(
                "it has tasukid's own user and network: what is lent to it to be read it can open for writing, and sockets in the file system are barred by the filter of system calls alone (start tasukid as root)".to_owned(),
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
        let ward = &mut self.nodes.get_mut(name).context("there is no such node")?.ward;
        if is_root && ward.network.is_none() {
            match Unnamed::new() {
                Ok(network) => ward.network = Some(network),
                Err(error) => lacks.push(format!("it is in the machine's network ({error})")),
            }
        }
        let network = ward.network.as_ref().map(path_of);
        let doors = group.as_ref().map(Group::doors).unwrap_or_default();
        let terms = Terms {
            program: program.to_owned(),
            args: vec!["worker".to_owned()],
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

    /// What opens a card, or is a model of one, begins like this: as a user of the card's own. Who opens `devices` of the machine stays the daemon's user,
    /// without its capabilities, and is confined as far as that goes.
    pub(super) fn start_apart(
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
        if is_root && self.apart.is_none() {
            self.apart = Some(Unnamed::new().context("it cannot be kept out of the machine's network")?);
        }
        let terms = Terms {
            program: program.to_owned(),
            args,
            uid,
            network: self.apart.as_ref().map(path_of),
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

    /// What starts a worker of this program, and what is to be heard of its jail; nothing of that where there is none.
    pub(super) fn start_for(&mut self, name: &str, number: u32, program: &Path) -> Result<Start> {
        if self.config.daemon.confine == Confine::Off {
            let stdout = nowhere()?;
            // Without a freezer a fence waits for the end of each process.
            let group = self.group_for(name, number).ok();
            return Ok(Start { command: (program.to_owned(), vec!["worker".into()]), stdout, jailing: None, group });
        }
        let (terms, group) = self.terms_for(name, number, program)?;
        let (says, stdout) = std::io::pipe().context("the kernel has no pipes left")?;
        rustix::io::ioctl_fionbio(&says, true).context("the kernel has no pipes left")?;
        let command = ("/proc/self/exe".into(), vec![jail::WORD.into(), serde_json::to_string(&terms)?.into()]);
        let jailing = Some(Jailing { says, said: Vec::new(), terms });
        Ok(Start { command, stdout: stdout.into(), jailing, group })
    }

    /// Has what a jail says heard.
    pub(super) fn watch_jail(&self, number: u32, jailing: &Jailing) -> Result<()> {
        watch(&self.epoll, jailing.says.as_fd(), Token::JailSays(number))
    }

    /// A jail has said something, or has become the program, or has ended.
    pub(super) fn jail_says(&mut self, number: u32) {
        let Some(worker) = self.workers.get_mut(&number) else { return };
        let Some(jailing) = &mut worker.jailing else { return };
        let mut text = [0; 1024];
        loop {
            match jailing.says.read(&mut text) {
                Ok(0) => break,
                Ok(len) if jailing.said.len() + len <= SAYS_MAX => jailing.said.extend_from_slice(&text[..len]),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return,
                _ => break,
            }
        }
        let Some(jailing) = worker.jailing.take() else { return };
        let _ = rustix::event::epoll::delete(&self.epoll, &jailing.says);
        crash::point("daemon.jailed");
        let node = worker.record.node.clone();
        match jail::said(&jailing.said) {
            Some(Says::Confined(lacks)) => {
                let found = jail::verify(worker.process.name().pid, &jailing.terms);
                if jailing.terms.strict && !found.is_empty() {
                    return self.is_not_confined(number, &found.join("; "));
                }
                worker.lacks = lacks.into_iter().chain(found).collect();
                worker.tell_what_it_is();
            }
            Some(Says::Failed(sentence)) => self.is_not_confined(number, &sentence),
            // It is dead: its pidfd says so.
            None => tracing::debug!("the jail of a worker of node {node} says nothing"),
        }
    }

    fn is_not_confined(&mut self, number: u32, why: &str) {
        let Some(node) = self.workers.get(&number).map(|worker| worker.record.node.clone()) else { return };
        let sentence = format!("no worker for node {node}: {why}");
        if let Some(known) = self.nodes.get_mut(&node) {
            let is_news = known.trouble.as_ref() != Some(&sentence);
            known.trouble = Some(sentence.clone());
            if is_news {
                self.note(About::node(&node), sentence);
            }
        }
        self.condemn(number, "was not confined".to_owned());
    }
}

/// Where a process that the daemon starts finds it.
fn path_of(network: &Unnamed) -> PathBuf {
    format!("/proc/{}/fd/{}", std::process::id(), network.as_fd().as_raw_fd()).into()
}

/// Where what a worker writes is lost.
pub(super) fn nowhere() -> Result<OwnedFd> {
    let nowhere = std::fs::OpenOptions::new().write(true).open("/dev/null");
    Ok(nowhere.context("/dev/null cannot be opened")?.into())
}

impl Worker {
    /// Sends the first letter, and what belongs to it, once.
    pub(super) fn tell_what_it_is(&mut self) {
        if let Some(Unsaid { begin, fds: [book, listener], outlet }) = self.unsaid.take() {
            super::tend::tell_what_it_is(self, begin, [&book, &listener], outlet);
        }
    }
}
