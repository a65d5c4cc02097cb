//! How a server hands over to its successor: the giver's table in [`crate::successor`].

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::epoll::{self, EventFlags};
use tasuki_shm::crash;
use tasuki_shm::peer::Credentials;

use super::{Server, Source};
use crate::wire::{self, Packet, Refusal};

/// State of a replacement, as in the giver's table in [`super::successor`].
#[derive(Debug)]
pub(super) enum Giving {
    Serving,
    Watched(OwnedFd),
    Draining(OwnedFd),
    Passed(OwnedFd),
    Over,
}

impl Server {
    /// Serving → Watched: gives a stand-by the listening socket and the state.
    pub(super) fn show_inheritance(&mut self, socket: OwnedFd) {
        let refuse = |refusal| drop(wire::send(socket.as_fd(), &Packet::Refused(refusal), &[]));
        let (Some(state), Some(listener)) = (&self.options.state, &self.listener) else {
            return refuse(Refusal::NoInheritance);
        };
        let peer = Credentials::of(&socket);
        if !peer.is_ok_and(|peer| peer.uid == rustix::process::geteuid().as_raw() || peer.uid == 0) {
            return refuse(Refusal::NoInheritance);
        }
        if !matches!(self.giving, Giving::Serving) {
            return refuse(Refusal::Watched);
        }
        let inheritance = Packet::Inheritance { generation: self.tenure.epoch };
        let sent = wire::send(socket.as_fd(), &inheritance, &[listener.as_fd(), state.fd()]);
        // epoll watched the socket as a handshake so far.
        let watched = epoll::modify(&self.epoll, &socket, Source::Successor.data(), EventFlags::IN);
        if sent.is_ok() && watched.is_ok() {
            self.giving = Giving::Watched(socket);
        }
    }

    /// Handles a packet from the successor, by the giver's table.
    pub(super) fn hear_successor(&mut self) {
        let (Giving::Watched(socket) | Giving::Draining(socket) | Giving::Passed(socket)) = &self.giving else {
            return;
        };
        let heard = match wire::receive(socket.as_fd()) {
            Ok(Some(received)) => received.packet.ok(),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Ok(None) | Err(_) => None,
        };
        self.giving = match (std::mem::replace(&mut self.giving, Giving::Serving), heard) {
            (Giving::Watched(socket), Some(Packet::Release)) => Giving::Draining(socket),
            (Giving::Passed(_), Some(Packet::Taken)) => Giving::Over,
            (Giving::Passed(_), None) => self.take_back(),
            (Giving::Watched(_) | Giving::Draining(_), None) => Giving::Serving,
            // Any other packet is out of turn: ignore it.
            (giving, _) => giving,
        };
        match self.giving {
            Giving::Over => self.leave(),
            _ => self.listen_again(),
        }
    }

    /// Draining → Passed, once every begun request is answered.
    pub(super) fn go_on_giving(&mut self) {
        if !matches!(self.giving, Giving::Draining(_)) {
            return;
        }
        if self.sessions.iter().flatten().any(|session| session.unanswered() > 0) {
            return;
        }
        let Giving::Draining(socket) = std::mem::replace(&mut self.giving, Giving::Over) else {
            unreachable!("just looked")
        };
        let state = self.options.state.as_ref().expect("only a server with state is watched");
        if state.pass(self.tenure).is_err() {
            // Another process took the lease by force: we are no longer the server.
            return self.leave();
        }
        crash::point("giver.passed");
        // A client in mid-handshake starts again with the successor.
        self.stop_listening();
        self.handshakes.clear();
        let _ = wire::send(socket.as_fd(), &Packet::Released, &[]);
        crash::point("giver.released");
        self.giving = Giving::Passed(socket);
    }

    /// Takes the lease back, because the successor died before it reported its take-over. Any lease word will do: no
    /// other process serves.
    fn take_back(&mut self) -> Giving {
        let state = self.options.state.as_ref().expect("only a server with state is watched");
        match state.take(state.tenure()) {
            Ok(tenure) => {
                self.tenure = tenure;
                Giving::Serving
            }
            Err(_) => Giving::Over,
        }
    }

    /// Ends this server, since the successor serves. The end of their pipes tells our clients.
    fn leave(&mut self) {
        self.hot.clear();
        self.sessions.clear();
        self.vacant.clear();
        self.clients = 0;
        self.handshakes.clear();
        self.inode = None;
        self.stop_listening();
        self.listener = None;
    }
}
