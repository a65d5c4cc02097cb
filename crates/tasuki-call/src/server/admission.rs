//! How a server admits a client: accepts it, reads its Hello, checks it, and gives it a session.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::epoll::{self, EventFlags};
use rustix::io::Errno;
use rustix::net::SocketFlags;
use tasuki_shm::crash;
use tasuki_shm::peer::Credentials;
use tasuki_shm::region::RegionError;

use super::{Peers, Server, Source};
use crate::enforce::{self, Enforcer};
use crate::segment::SegmentError;
use crate::session::{ClientId, Handover, Peer, Session, SessionError};
use crate::wire::{self, Hello, Packet, Received, Refusal, Welcome};

/// Maximum number of unfinished handshakes. A further one displaces the oldest.
const HANDSHAKES_MAX: usize = 64;

/// A client that has not sent its Hello yet, or has sent it but not yet its Detached.
#[derive(Debug)]
pub(super) struct Handshake {
    socket: OwnedFd,
    index: u32,
    hello: Option<(Hello, Vec<OwnedFd>)>,
}

impl Server {
    pub(super) fn accept(&mut self) {
        // Accept one at a time: the listener stays readable while more clients wait, and connected clients have
        // their turn in between.
        let Some(listener) = &self.listener else { return };
        match rustix::net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(socket) => self.begin_handshake(socket),
            Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS) if !self.handshakes.is_empty() => {
                // Drop the oldest connection that has not finished its handshake, to free a descriptor.
                self.handshakes.remove(0);
            }
            Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS) => {
                // New clients wait in the backlog for a while.
                self.stop_listening();
                self.listen_later();
            }
            Err(_) => {}
        }
    }

    fn begin_handshake(&mut self, socket: OwnedFd) {
        if self.handshakes.len() == HANDSHAKES_MAX {
            self.handshakes.remove(0);
        }
        let index = self.next_handshake;
        self.next_handshake = self.next_handshake.wrapping_add(1);
        if epoll::add(&self.epoll, &socket, Source::Handshake(index).data(), EventFlags::IN).is_ok() {
            self.handshakes.push(Handshake { socket, index, hello: None });
        }
    }

    pub(super) fn shake_hands(&mut self, index: u32) {
        let Some(position) = self.handshakes.iter().position(|shake| shake.index == index) else { return };
        let mut shake = self.handshakes.remove(position);
        let received = match wire::receive(shake.socket.as_fd()) {
            Ok(Some(received)) => received,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return self.handshakes.insert(position, shake),
            Ok(None) | Err(_) => return,
        };
        let Received { packet, fds, cut } = received;
        let answer = match (packet, shake.hello.take()) {
            (Ok(Packet::Succeed), None) => return self.show_inheritance(shake.socket),
            (Ok(Packet::Hello(_)), None) if cut => Err(Refusal::NoMemory),
            (Ok(Packet::Hello(hello)), None) if hello.enforced_base.is_some() => {
                shake.hello = Some((hello, fds));
                return self.handshakes.push(shake);
            }
            (Ok(Packet::Hello(hello)), None) => self.admit(&shake.socket, &hello, fds),
            (Ok(Packet::Detached), Some((hello, fds))) => self.admit(&shake.socket, &hello, fds),
            (Err(wire::Malformed::Version(client)), _) => {
                Err(Refusal::WrongVersion { server: wire::VERSION.into(), client: client.into() })
            }
            _ => Err(Refusal::BadMemory),
        };
        if let Err(refusal) = answer {
            let _ = wire::send(shake.socket.as_fd(), &Packet::Refused(refusal), &[]);
        }
    }

    /// Creates a session for a Hello and welcomes the client.
    fn admit(&mut self, socket: &OwnedFd, hello: &Hello, fds: Vec<OwnedFd>) -> Result<(), Refusal> {
        crash::point("server.accept.hello");
        let Credentials { pid, uid, .. } = Credentials::of(socket).map_err(|_| Refusal::NoMemory)?;
        self.check(hello, uid)?;
        let mut fds = fds.into_iter();
        let (Some(segment), Some(arena)) = (fds.next(), fds.next()) else { return Err(Refusal::BadMemory) };
        let enforcer = match (hello.enforced_base, fds.next()) {
            (None, _) => None,
            (Some(base), Some(uffd)) => {
                enforce::inspect(pid, base, uffd.as_fd()).map_err(|_| Refusal::NotEnforceable)?;
                Some(Enforcer::new(uffd, base, hello.arena.slot_len))
            }
            (Some(_), None) => return Err(Refusal::BadMemory),
        };
        let index = self
            .vacant
            .last()
            .copied()
            .unwrap_or_else(|| u32::try_from(self.sessions.len()).expect("below clients_max"));
        let peer = Peer { id: ClientId { index, life: self.next_life }, uid };
        let (session, theirs) =
            Session::new(peer, hello, [segment.as_fd(), arena.as_fd()], enforcer).map_err(|error| match error {
                // Mapping the client's memory takes our address space.
                SessionError::Theirs(SegmentError::Memory(RegionError::NoMemory { .. })) => Refusal::NoMemory,
                SessionError::Theirs(_) => Refusal::BadMemory,
                SessionError::Memory(_) | SessionError::Pipes(_) => Refusal::NoMemory,
            })?;
        let data = Source::Session(index).data();
        epoll::add(&self.epoll, session.pipe(), data, EventFlags::IN | EventFlags::ET)
            .map_err(|_| Refusal::NoMemory)?;
        self.welcome(socket, hello, &session, theirs)?;
        self.add_session(index, session);
        crash::point("server.accept.welcomed");
        Ok(())
    }

    fn check(&self, hello: &Hello, uid: u32) -> Result<(), Refusal> {
        let options = &self.options;
        let allowed = match &options.peers {
            Peers::Any => true,
            Peers::SameUser => uid == rustix::process::geteuid().as_raw() || uid == 0,
            Peers::Users(users) => users.contains(&uid) || uid == 0,
        };
        if !allowed {
            return Err(Refusal::NotAllowed { uid: uid.into() });
        }
        if hello.resumes.is_some_and(|service| service != self.service) {
            return Err(Refusal::OtherService);
        }
        if self.clients >= options.clients_max {
            return Err(Refusal::TooManyClients { max: options.clients_max as u64 });
        }
        if !hello.ring.is_power_of_two() || hello.ring < 2 || hello.ring > options.ring_max {
            return Err(Refusal::RingSize { asked: hello.ring.into(), max: options.ring_max.into() });
        }
        let asked = (hello.arena.len() as u64).saturating_add(hello.replies.len() as u64);
        if asked > options.arenas_max || !hello.arena.is_sound() || !hello.replies.is_sound() {
            return Err(Refusal::ArenaSize { asked, max: options.arenas_max });
        }
        Ok(())
    }

    fn welcome(&self, socket: &OwnedFd, hello: &Hello, session: &Session, theirs: Handover) -> Result<(), Refusal> {
        let welcome =
            Welcome { service: self.service, generation: self.tenure.epoch, ring: hello.ring, replies: hello.replies };
        let [segment, replies] = session.memory();
        let fds = [segment, replies, theirs.ring_end.as_fd(), theirs.sleep_end.as_fd()];
        wire::send(socket.as_fd(), &Packet::Welcome(welcome), &fds).map_err(|_| Refusal::NoMemory)
    }

    fn add_session(&mut self, index: u32, session: Session) {
        match self.vacant.pop() {
            Some(_) => self.sessions[index as usize] = Some(Box::new(session)),
            None => self.sessions.push(Some(Box::new(session))),
        }
        self.next_life = self.next_life.wrapping_add(1);
        self.clients += 1;
        self.changed = true;
        self.tally.accepted += 1;
    }
}
