//! Sockets at which programs on DPDK or VPP connect to a node, as clients of memif. The daemon listens and gives every worker of the node the
//! descriptor; whoever drives the node's end of its VNI lets clients in.

use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::Path;

use anyhow::{Context, Result, bail};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::{About, Supervisor};
use crate::{channel, config};

/// A socket, as far as it is there.
#[derive(Debug)]
pub struct MemifEnd {
    config: config::Memif,
    listener: Option<OwnedFd>,
}

impl MemifEnd {
    /// That of a node, by its name, not made yet.
    pub fn of(node: &config::Node) -> Option<(String, Self)> {
        let config = node.memif()?.clone();
        Some((config.label(), MemifEnd { config, listener: None }))
    }

    /// Makes it, if it is not there.
    pub fn make(&mut self) -> Result<&OwnedFd> {
        let listener = match self.listener.take() {
            Some(listener) => listener,
            None => listen(&self.config.socket)?,
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
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Whether anybody answers there.
fn is_served(path: &Path) -> bool {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
    let Ok((socket, address)) = socket.and_then(|socket| Ok((socket, SocketAddrUnix::new(path)?))) else {
        return false;
    };
    match rustix::net::connect(&socket, &address) {
        Ok(()) | Err(rustix::io::Errno::AGAIN) => true,
        // It is another kind of socket, and somebody's.
        Err(rustix::io::Errno::PROTOTYPE) => true,
        Err(_) => false,
    }
}

impl Supervisor {
    /// Makes all but those that living workers of these nodes may have kept.
    pub(super) fn begin_memifs(&mut self, living: &[String]) {
        self.memifs = self.config.node.iter().filter_map(MemifEnd::of).collect();
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

    /// What a worker of the daemon before this one has kept.
    pub(super) fn adopt_memif(&mut self, label: &str, listener: OwnedFd) {
        if let Some(end) = self.memifs.get_mut(label) {
            end.listener.get_or_insert(listener);
        }
    }

    /// What a worker of this node is to be given, if it is to serve memif.
    pub(super) fn memif_for(&mut self, node: &str) -> Result<Option<(String, OwnedFd)>> {
        let Some(label) = self.config.node(node).and_then(config::Node::memif).map(config::Memif::label) else {
            return Ok(None);
        };
        let end = self.memifs.get_mut(&label).with_context(|| format!("there is no socket {label}"))?;
        let listener = end.make()?.as_fd().try_clone_to_owned()?;
        Ok(Some((label, listener)))
    }

    /// Nobody is to connect any more.
    pub(super) fn close_memifs(&mut self) {
        std::mem::take(&mut self.memifs).into_values().for_each(MemifEnd::close);
    }
}
