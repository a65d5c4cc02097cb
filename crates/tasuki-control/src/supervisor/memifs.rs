//! Sockets at which programs on DPDK or VPP connect to a node, as clients of memif. The daemon listens and gives
//! every worker of the node the descriptor. The driver of the node's end of its VNI accepts clients.
//!
//! The descriptors of a connected client lie beside the listening socket, and with every other worker of the node,
//! so the next driver goes on with the client. The daemon does not look into them, as a stranger made them; and a
//! worker that lies about them lies to its own node.

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

/// A memif socket, as far as it exists.
#[derive(Debug)]
pub struct MemifEnd {
    config: config::Memif,
    listener: Option<OwnedFd>,
    /// Device and inode number of its file.
    file: Option<(u64, u64)>,
    client: Option<Connected>,
}

/// A connected client.
#[derive(Debug)]
struct Connected {
    message: message::Client,
    /// Its socket first.
    fds: Foreign,
    /// Inode number of that socket.
    socket: u64,
}

impl Connected {
    /// Returns `None` if this cannot be a client.
    fn new(message: message::Client, fds: Foreign) -> Option<Self> {
        let regions = message.regions.len();
        if regions > message::REGIONS_MAX
            || message.name.len() > NAME_MAX
            || fds.len() != message::Client::OTHERS + regions
        {
            return None;
        }
        // A socket, and no file of a file system that would have to be asked.
        rustix::net::sockopt::socket_type(&fds[0]).ok()?;
        let socket = rustix::fs::fstat(&fds[0]).ok()?.st_ino;
        Some(Connected { message, fds, socket })
    }

    fn tell(&self, worker: &Worker, nic: u32) -> Result<(), Errno> {
        worker.write(&ToWorker::Client { nic, client: self.message.clone() }, &channel::lend(&self.fds))
    }
}

impl MemifEnd {
    /// Returns the socket of a node, not made yet, under its label.
    pub fn of(node: &config::Node) -> Option<(String, Self)> {
        let config = node.memif()?.clone();
        Some((config.label(), MemifEnd { config, listener: None, file: None, client: None }))
    }

    /// Returns for the keeper the listening socket, if it exists, and its file's numbers.
    pub fn to_keep(&self) -> Option<(String, Vec<BorrowedFd<'_>>)> {
        let file = serde_json::to_string(&self.file).expect("plain data");
        Some((file, vec![self.listener.as_ref()?.as_fd()]))
    }

    /// Returns for the keeper the client that is connected, as text and descriptors.
    pub fn client_to_keep(&self) -> Option<(String, Vec<BorrowedFd<'_>>)> {
        let Connected { message, fds, .. } = self.client.as_ref()?;
        Some((serde_json::to_string(message).expect("plain data"), channel::lend(fds)))
    }

    /// Makes it, unless it exists.
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

    /// Closes the socket to clients. Not when the daemon exits alone: then the next daemon has it.
    pub fn close(self) {
        if self.listener.is_some() {
            let _ = std::fs::remove_file(&self.config.socket);
        }
    }
}

/// Listens for clients: for the daemon's user alone, until an operator changes the file's owner or mode.
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

/// Returns device and inode number of the file at `path`.
fn file_at(path: &Path) -> Option<(u64, u64)> {
    let there = std::fs::symlink_metadata(path).ok()?;
    Some((there.dev(), there.ino()))
}

/// Returns whether a process serves at `path`.
fn is_served(path: &Path) -> bool {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
    let Ok((socket, address)) = socket.and_then(|socket| Ok((socket, SocketAddrUnix::new(path)?))) else {
        return false;
    };
    match rustix::net::connect(&socket, &address) {
        Ok(()) | Err(Errno::AGAIN) => true,
        // It is another kind of socket, and in use.
        Err(Errno::PROTOTYPE) => true,
        Err(_) => false,
    }
}

impl Supervisor {
    /// Adopts the sockets of an earlier daemon, and makes the others, except those of which workers of the nodes in
    /// `living` have the only descriptor.
    pub(super) fn begin_memifs(&mut self, living: &[String], found: &mut Found) {
        self.memifs = self.config.node.iter().filter_map(MemifEnd::of).collect();
        for (label, end) in &mut self.memifs {
            if let Some((file, fds)) = found.remove(&Key::Memif(label.clone())) {
                end.file = serde_json::from_str(&file).unwrap_or_default();
                // If another file has taken its place, clients do not find the listener.
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
            // A node that was added by hand is in no file that could be mended. Its worker is started once the
            // socket exists.
            if let Err(error) = end.make() {
                troubles.push(format!("memif is not served at {label} as yet: {error:#}"));
            }
        }
        troubles.into_iter().for_each(|trouble| self.note(About::default(), trouble));
    }

    /// Returns label and descriptor for a worker of this node, if it is to serve memif.
    pub(super) fn memif_for(&mut self, node: &str) -> Result<Option<(String, OwnedFd)>> {
        let Some(label) = self.config.node(node).and_then(config::Node::memif).map(config::Memif::label) else {
            return Ok(None);
        };
        let end = self.memifs.get_mut(&label).with_context(|| format!("there is no socket {label}"))?;
        let listener = end.make()?.as_fd().try_clone_to_owned()?;
        self.keep(Key::Memif(label.clone()));
        Ok(Some((label, listener)))
    }

    /// Returns the memif at which a worker serves clients by way of an end: its own node's, or none.
    fn memif_of(&mut self, number: u32, nic: u32) -> Option<&mut MemifEnd> {
        let node = &self.workers.get(&number)?.record.node;
        let is_its = |card: &Card| card.vni().is_some() && card.config.node == *node;
        self.cards.get(&nic).filter(|card| is_its(card))?;
        let label = self.config.node(node)?.memif()?.label();
        self.memifs.get_mut(&label)
    }

    /// Handles a worker's report of a client that it serves, or has heard of: the node's other workers are to know
    /// the client, too. The driver's report counts more; a report from a worker that has just passed the lease goes
    /// to the worker that has it.
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
            // If the driver does not hear of it, the client finds its socket closed.
            let _ = connected.tell(worker, nic);
        }
    }

    /// Handles a worker's report that a client is gone.
    pub(super) fn has_client_no_more(&mut self, number: u32, nic: u32, socket: u64) {
        let Some(end) = self.memif_of(number, nic) else { return };
        if end.client.take_if(|client| client.socket == socket).is_none() {
            return;
        }
        self.keep_client(number);
        for worker in self.workers.values().filter(|worker| worker.party() != number && worker.nics.contains_key(&nic))
        {
            // A worker that does not hear of it finds out when it goes on.
            let _ = worker.write(&ToWorker::NoClient { nic, socket }, &[]);
        }
    }

    fn keep_client(&mut self, number: u32) {
        let node = self.workers.get(&number).and_then(|worker| self.config.node(&worker.record.node));
        let label = node.and_then(config::Node::memif).map(config::Memif::label);
        label.into_iter().for_each(|label| self.keep(Key::Client(label)));
    }

    /// Tells all workers of an end except `but` about the client that is connected there.
    fn tell_others_of_client(&mut self, nic: u32, but: u32) {
        let has_it = |worker: &&Worker| worker.nics.contains_key(&nic) && worker.party() != but;
        let others: Vec<u32> = self.workers.values().filter(has_it).map(Worker::party).collect();
        others.into_iter().for_each(|number| self.tell_client(nic, number));
    }

    /// Tells all workers of an end that do not drive it about the client.
    pub(super) fn tell_all_of_client(&mut self, nic: u32) {
        let holder = self.cards.get(&nic).and_then(|card| card.holder());
        self.tell_others_of_client(nic, holder.unwrap_or(0));
    }

    /// Tells a worker that was given an end about the client that is connected there, if any.
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

    /// Closes all sockets to clients.
    pub(super) fn close_memifs(&mut self) {
        std::mem::take(&mut self.memifs).into_values().for_each(MemifEnd::close);
    }
}
