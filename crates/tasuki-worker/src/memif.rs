//! The socket to which memif clients of a node connect; the daemon makes and keeps it. And the connected client, as
//! it goes from one worker of the node to the next.

use std::os::fd::{AsFd, OwnedFd};

use anyhow::{Context, Result, ensure};
use rustix::net::SocketType;
use tasuki_net::memif::client::Parts;
use tasuki_net::memif::control::{RingPlace, Terms};
use tasuki_net::memif::refusal::Way;
use tasuki_relay::message::{Begin, Client, ClientRing};

/// A listening socket, and the facts that a client must know.
#[derive(Debug)]
pub struct Memif {
    listener: OwnedFd,
    /// Terms sent to clients.
    pub terms: Terms,
    /// Whether the daemon keeps the parts of a client for the worker that serves it next.
    pub keeps: bool,
}

impl Memif {
    /// Takes over the listening socket that the daemon has made, with the terms that it sends.
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
        Ok(Memif { listener, terms, keeps: memif.keeps })
    }

    /// Returns another descriptor of the socket.
    pub fn fd(&self) -> std::io::Result<OwnedFd> {
        self.listener.as_fd().try_clone_to_owned()
    }
}

/// Packs a client into a message and its descriptors.
pub fn pack(parts: Parts) -> (Client, Vec<OwnedFd>) {
    let Parts { name, socket, regions, to_server: (to_server, bell), to_client: (to_client, clapper) } = parts;
    let ring = |RingPlace { region, offset, log2_size, .. }| ClientRing { region, offset, log2_size };
    let (sizes, memories): (Vec<u64>, Vec<OwnedFd>) = regions.into_iter().unzip();
    let client = Client { name, regions: sizes, to_server: ring(to_server), to_client: ring(to_client) };
    (client, [socket, bell, clapper].into_iter().chain(memories).collect())
}

/// Unpacks a client. Checks only that all descriptors are there.
pub fn unpack(client: Client, fds: Vec<OwnedFd>) -> Result<Parts> {
    let Client { name, regions, to_server, to_client } = client;
    let (count, expected) = (fds.len(), Client::OTHERS + regions.len());
    ensure!(
        count == expected,
        "{count} descriptors came with a client of memif, and {expected} belong to it; rebuild the older of daemon and worker"
    );
    let mut fds = fds.into_iter();
    let mut next = || fds.next().context("they were counted");
    let (socket, bell, clapper) = (next()?, next()?, next()?);
    let ring = |way, ClientRing { region, offset, log2_size }| RingPlace { way, region, offset, log2_size };
    Ok(Parts {
        name,
        socket,
        to_server: (ring(Way::ToServer, to_server), bell),
        to_client: (ring(Way::ToClient, to_client), clapper),
        regions: regions.into_iter().zip(fds).collect(),
    })
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;
    use tasuki_relay::message::{Memif, ToWorker};

    use super::*;

    #[test]
    fn daemons_and_workers_of_before_clients_were_handed_on_are_understood() {
        let again: ToWorker = serde_json::from_str(r#"{"message":"again"}"#).unwrap();
        assert_eq!(again, ToWorker::Again { keeps: false });
        let memif: Memif = serde_json::from_str(r#"{"id":1,"secret":""}"#).unwrap();
        assert!(!memif.keeps);
        #[derive(Debug, PartialEq, Eq, Deserialize)]
        #[serde(tag = "message", rename_all = "kebab-case")]
        enum Before {
            Again,
        }
        let said = serde_json::to_string(&ToWorker::Again { keeps: true }).unwrap();
        assert_eq!(serde_json::from_str::<Before>(&said).unwrap(), Before::Again);
    }

    #[test]
    fn a_client_comes_out_as_it_went_in() {
        let file = || rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        let ring = |way, offset| RingPlace { way, region: 1, offset, log2_size: 10 };
        let parts = Parts {
            name: "a client".to_owned(),
            socket: file(),
            regions: vec![(4096, file()), (8192, file())],
            to_server: (ring(Way::ToServer, 0), file()),
            to_client: (ring(Way::ToClient, 4096), file()),
        };
        let before = format!("{parts:?}");
        let (client, mut fds) = pack(parts);
        assert_eq!(format!("{:?}", unpack(client.clone(), fds).unwrap()), before);
        fds = (0..4).map(|_| file()).collect();
        let why = unpack(client, fds).unwrap_err().to_string();
        assert!(why.starts_with("4 descriptors came with a client of memif, and 5 belong to it"), "{why}");
    }
}
