//! Sockets at which programs on DPDK or VPP connect to a node, as clients of memif. The daemon listens and gives every worker of the node the
//! descriptor; whoever drives the node's end of its VNI lets clients in.
//!
//! What a client that is connected is made of lies beside the listening socket, and with every other worker of the node: whoever drives next goes on
//! with it. Nothing of it is looked at here, for it was made by a stranger; and a worker that lies about it lies to its own node.

use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use anyhow::{Context, Result, bail};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tasuki_relay::message::{self, ToWorker};

use super::card::Card;
use super::keeping::{Found, Key};
use super::vnis::is_lost;
use super::worker::Worker;
use super::{About, Supervisor};
use crate::foreign::Foreign;
use crate::{channel, config};

/// Bytes of a client's name, at most: memif has 32 for it, of which each may have become three.
const NAME_MAX: usize = 96;

/// A socket, as far as it is there.
#[derive(Debug)]
pub struct MemifEnd {
    config: config::Memif,
    listener: Option<OwnedFd>,
    /// Its file, by what the kernel knows it.
    file: Option<(u64, u64)>,
    client: Option<Connected>,
}

/// A client that is connected.
#[derive(Debug)]
struct Connected {
    message: message::Client,
    /// Its socket first.
    fds: Foreign,
    /// By what that is known.
    socket: u64,
}

impl Connected {
    /// Says no to what cannot be one.
    fn new(message: message::Client, fds: Foreign) -> Option<Self> {
        let regions = message.regions.len();
        if regions > message::REGIONS_MAX
            || message.name.len() > NAME_MAX
            || fds.len() != message::Client::OTHERS + regions
        {
            return None;
        }
        // No file of anybody's file system, which would have to be asked.
        rustix::net::sockopt::socket_type(&fds[0]).ok()?;
        let socket = rustix::fs::fstat(&fds[0]).ok()?.st_ino;
        Some(Connected { message, fds, socket })
    }

    fn tell(&self, worker: &Worker, nic: u32) -> Result<(), Errno> {
        worker.write(&ToWorker::Client { nic, client: self.message.clone() }, &channel::lend(&self.fds))
    }
}

impl MemifEnd {
    /// That of a node, by its name, not made yet.
    pub fn of(node: &config::Node) -> Option<(String, Self)> {
        let config = node.memif()?.clone();
        Some((config.label(), MemifEnd { config, listener: None, file: None, client: None }))
    }

    /// Where clients connect, if it is there, and by which file.
    pub fn to_keep(&self) -> Option<(String, Vec<BorrowedFd<'_>>)> {
        let file = serde_json::to_string(&self.file).expect("plain data");
        Some((file, vec![self.listener.as_ref()?.as_fd()]))
    }

    /// The client that is connected, as text and descriptors.
    pub fn client_to_keep(&self) -> Option<(String, Vec<BorrowedFd<'_>>)> {
        let Connected { message, fds, .. } = self.client.as_ref()?;
        Some((serde_json::to_string(message).expect("plain data"), channel::lend(fds)))
    }

    /// Makes it, if it is not there.
    pub fn make(&mut self) -> Result<&OwnedFd> {
        let listener = match self.listener.take() {
            Some(listener) => listener,
            None => {
                let listener = listen(&self.config.socket)?;
                self.file = file_at(&self.config.socket);
                listener
            }
        };
        Ok(self.listener.insert(listener))
    }

    /// Nobody is to connect any more. Not when the daemon goes alone: then it is the next one's.
    pub fn close(self) {
        if self.listener.is_some() {
            let _ = std::fs::remove_file(&self.config.socket);
        }
    }
}

/// A place where clients connect: for the daemon's user alone, until somebody changes the file's owner or mode.
fn listen(path: &Path) -> Result<OwnedFd> {
    let shown = path.display();
    match std::fs::symlink_metadata(path) {
        Ok(there) if !there.file_type().is_socket() => {
            bail!("{shown} is there already, and no socket; name another path")
        }
        Ok(_) if is_served(path) => bail!("somebody else serves at {shown}; name another path, or end them"),
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("{shown} cannot be looked at"));
        }
        _ => {}
    }
    let listener =
        channel::listen(path).with_context(|| format!("{shown} cannot be listened at; is its folder there?"))?;
    Ok(listener)
}

/// By what the kernel knows what is there.
fn file_at(path: &Path) -> Option<(u64, u64)> {
    let there = std::fs::symlink_metadata(path).ok()?;
    Some((there.dev(), there.ino()))
}

/// Whether anybody answers there.
fn is_served(path: &Path) -> bool {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
    let Ok((socket, address)) = socket.and_then(|socket| Ok((socket, SocketAddrUnix::new(path)?))) else {
        return false;
    };
    match rustix::net::connect(&socket, &address) {
        Ok(()) | Err(Errno::AGAIN) => true,
        // It is another kind of socket, and somebody's.
        Err(Errno::PROTOTYPE) => true,
        Err(_) => false,
    }
}

impl Supervisor {
    /// Takes over those that a daemon before us had, and makes the others, but those of which workers of these nodes have the only descriptor.
    pub(super) fn begin_memifs(&mut self, living: &[String], found: &mut Found) {
        self.memifs = self.config.node.iter().filter_map(MemifEnd::of).collect();
        for (label, end) in &mut self.memifs {
            if let Some((file, fds)) = found.remove(&Key::Memif(label.clone())) {
                end.file = serde_json::from_str(&file).unwrap_or_default();
                // What somebody has put there in its place, no client finds it by.
                let is_found = end.file.is_some() && end.file == file_at(&end.config.socket);
                end.listener = fds.into_iter().next().filter(|_| is_found);
            }
            let client = found.remove(&Key::Client(label.clone()));
            end.client =
                client.and_then(|(what, fds)| Connected::new(serde_json::from_str(&what).ok()?, Foreign::new(fds)));
        }
        let kept: Vec<String> =
            living.iter().filter_map(|node| Some(self.config.node(node)?.memif()?.label())).collect();
        let mut troubles = Vec::new();
        for (label, end) in self.memifs.iter_mut().filter(|(label, _)| !kept.contains(label)) {
            // Whoever was added by hand is in no file that could be mended; its worker is started when there is one.
            if let Err(error) = end.make() {
                troubles.push(format!("memif is not served at {label} as yet: {error:#}"));
            }
        }
        troubles.into_iter().for_each(|trouble| self.note(About::default(), trouble));
    }

    /// What a worker of this node is to be given, if it is to serve memif.
    pub(super) fn memif_for(&mut self, node: &str) -> Result<Option<(String, OwnedFd)>> {
        let Some(label) = self.config.node(node).and_then(config::Node::memif).map(config::Memif::label) else {
            return Ok(None);
        };
        let end = self.memifs.get_mut(&label).with_context(|| format!("there is no socket {label}"))?;
        let listener = end.make()?.as_fd().try_clone_to_owned()?;
        self.keep(Key::Memif(label.clone()));
        Ok(Some((label, listener)))
    }

    /// The memif at which a worker serves clients by way of an end: its own node's, or none.
    fn memif_of(&mut self, number: u32, nic: u32) -> Option<&mut MemifEnd> {
        let node = &self.workers.get(&number)?.record.node;
        let is_its = |card: &Card| card.vni().is_some() && card.config.node == *node;
        self.cards.get(&nic).filter(|card| is_its(card))?;
        let label = self.config.node(node)?.memif()?.label();
        self.memifs.get_mut(&label)
    }

    /// A worker serves a client, or has heard of one that another serves: the node's other workers are to know it, too. What whoever drives says
    /// counts more; one who has just passed the lease is heard by whoever has it.
    pub(super) fn has_client(&mut self, number: u32, nic: u32, client: message::Client, fds: Foreign) {
        let holder = self.cards.get(&nic).and_then(|card| card.holder());
        let Some(end) = self.memif_of(number, nic) else {
            return self.condemn(number, format!("speaks of a client of memif at NIC {nic}, where its node has none"));
        };
        let Some(connected) = Connected::new(client, fds) else {
            return self.condemn(number, "sent something else than a client of memif is made of".to_owned());
        };
        if end.client.as_ref().is_some_and(|known| known.socket == connected.socket) {
            return;
        }
        if end.client.is_none() || holder.is_none_or(|holder| holder == number) {
            end.client = Some(connected);
            self.keep_client(number);
            return self.tell_others_of_client(nic, number);
        }
        if let Some(worker) = holder.and_then(|holder| self.workers.get(&holder)) {
            // If it does not hear it, the client finds its socket closed.
            let _ = connected.tell(worker, nic);
        }
    }

    /// A client is there no more.
    pub(super) fn has_client_no_more(&mut self, number: u32, nic: u32, socket: u64) {
        let Some(end) = self.memif_of(number, nic) else { return };
        if end.client.take_if(|client| client.socket == socket).is_none() {
            return;
        }
        self.keep_client(number);
        for worker in self.workers.values().filter(|worker| worker.party() != number && worker.nics.contains_key(&nic))
        {
            // Who does not hear it finds out when it goes on.
            let _ = worker.write(&ToWorker::NoClient { nic, socket }, &[]);
        }
    }

    fn keep_client(&mut self, number: u32) {
        let node = self.workers.get(&number).and_then(|worker| self.config.node(&worker.record.node));
        let label = node.and_then(config::Node::memif).map(config::Memif::label);
        label.into_iter().for_each(|label| self.keep(Key::Client(label)));
    }

    /// Tells all workers of an end but one of the client that is connected there.
    fn tell_others_of_client(&mut self, nic: u32, but: u32) {
        let has_it = |worker: &&Worker| worker.nics.contains_key(&nic) && worker.party() != but;
        let others: Vec<u32> = self.workers.values().filter(has_it).map(Worker::party).collect();
        others.into_iter().for_each(|number| self.tell_client(nic, number));
    }

    /// The same to those who do not drive.
    pub(super) fn tell_all_of_client(&mut self, nic: u32) {
        let holder = self.cards.get(&nic).and_then(|card| card.holder());
        self.tell_others_of_client(nic, holder.unwrap_or(0));
    }

    /// Tells a worker that has been given an end of the client that is connected there, if there is one.
    pub(super) fn tell_client(&mut self, nic: u32, number: u32) {
        let Some(client) = self.memif_of(number, nic).and_then(|end| end.client.take()) else { return };
        let told = self.workers.get(&number).map_or(Ok(()), |worker| client.tell(worker, nic));
        if let Some(end) = self.memif_of(number, nic) {
            end.client = Some(client);
        }
        if is_lost(told) {
            self.condemn(number, "does not take what it must know of its node's client of memif".to_owned());
        }
    }

    /// Nobody is to connect any more.
    pub(super) fn close_memifs(&mut self) {
        std::mem::take(&mut self.memifs).into_values().for_each(MemifEnd::close);
    }
}
