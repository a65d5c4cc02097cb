//! Where clients of memif connect to a node: a listening socket that the daemon has made and keeps.

use std::os::fd::{AsFd, OwnedFd};

use anyhow::{Context, Result, ensure};
use rustix::net::SocketType;
use tasuki_net::memif::control::Terms;
use tasuki_relay::letter::Begin;

/// A listening socket, and what a client must know.
#[derive(Debug)]
pub struct Memif {
    listener: OwnedFd,
    /// What the daemon calls it.
    pub name: String,
    /// For clients.
    pub terms: Terms,
}

impl Memif {
    /// What the daemon has made, and says of it.
    pub fn over(listener: OwnedFd, begin: &Begin) -> Result<Self> {
        let kind = rustix::net::sockopt::socket_type(&listener);
        ensure!(
            kind == Ok(SocketType::SEQPACKET),
            "what the daemon sent as the node's socket of memif is none; rebuild the older of the two"
        );
        let memif = begin
            .memif
            .as_ref()
            .context("the daemon does not say what a client of memif must know; rebuild the older of the two")?;
        let terms = Terms::new(memif.id, &memif.secret, &begin.node)?;
        Ok(Memif { listener, name: begin.tap.clone().unwrap_or_default(), terms })
    }

    /// Another descriptor of it.
    pub fn fd(&self) -> std::io::Result<OwnedFd> {
        self.listener.as_fd().try_clone_to_owned()
    }
}
