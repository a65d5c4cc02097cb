//! How a client connects: its options, the handshake, and the reasons for failure.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt::Timeout;
use tasuki_shm::arena::{Detach, Geometry, PeerArena};
use tasuki_shm::bell::PeerBell;
use tasuki_shm::crash;
use tasuki_shm::region::{PeerRegion, RegionError};
use tasuki_shm::ring::{Consumer, Producer};
use tasuki_shm::wake::{BellSender, Sleeper};

use super::{Client, Link};
use crate::enforce::{self, EnforceError, HandOver};
use crate::segment::{Layout, PeerSegment, SegmentError};
use crate::wire::{self, Hello, Malformed, Packet, Refusal, Service, Welcome};

/// Number of servers in a row that may leave or die during a handshake before we give up.
pub(crate) const DIALS_MAX: u32 = 16;

/// The wishes of a client at connection time.
#[derive(Debug, Clone)]
pub struct ClientOptions {
    /// Number of entries in the request ring and in the result ring, a power of two. As many calls can be in flight.
    pub ring: u32,
    /// The client's arena, for requests. With no slots, all requests must travel inside the ring.
    pub arena: Geometry,
    /// The arena that the server creates for replies to this client.
    pub replies: Geometry,
    /// Means of taking a slot away from this process while the server has it.
    pub detach: Detach,
    /// Spin time for an answer before parking; twice as long after a ring. `None` measures the cost of a nap and spins
    /// as long; after a ring, two to eight times as long, as the server's answers suggest.
    pub spin: Option<Duration>,
    /// Time limit of the handshake.
    pub handshake: Duration,
}

impl Default for ClientOptions {
    /// 256 calls in flight; 256 slots of 4 KiB in each direction. The kernel allocates the memory only on use.
    fn default() -> Self {
        let pool = Geometry { slot_len: 4096, count: 256 };
        ClientOptions {
            ring: 256,
            arena: pool,
            replies: pool,
            detach: Detach::Move,
            spin: None,
            handshake: Duration::from_secs(5),
        }
    }
}

/// Reasons why a connection failed.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The path does not exist.
    #[error("there is no socket at {}; start the server, or correct the path", path.display())]
    NoSocket {
        /// Path of the socket.
        path: PathBuf,
    },
    /// The path is not a socket.
    #[error("{} is not a socket; correct the path", path.display())]
    NotASocket {
        /// Path that was tried.
        path: PathBuf,
    },
    /// The path is a socket of another type.
    #[error("{} is a socket of another program; correct the path", path.display())]
    ForeignSocket {
        /// Path of the socket.
        path: PathBuf,
    },
    /// The socket exists, but its server has ended.
    #[error("no server listens at {}; it has ended: start it again", path.display())]
    NoServer {
        /// Path of the socket.
        path: PathBuf,
    },
    /// The file's mode forbids the connection.
    #[error("{} may not be opened by this user; ask for the server's ServerOptions::mode to be widened, or run as its user", path.display())]
    Forbidden {
        /// Path of the socket.
        path: PathBuf,
    },
    /// The path does not fit into a socket address.
    #[error("{} is longer than the 107 bytes that a socket's path may have; use a shorter one", path.display())]
    PathTooLong {
        /// Path that was tried.
        path: PathBuf,
    },
    /// The server did not answer the handshake in time.
    #[error("the server at {} did not answer within {limit:.0?}; it hangs or is overloaded", path.display())]
    Silent {
        /// Path of the socket.
        path: PathBuf,
        /// How long the client waited.
        limit: Duration,
    },
    /// The server refused the connection.
    #[error("{0}")]
    Refused(Refusal),
    /// The server sent an unexpected packet.
    #[error("{0}")]
    Malformed(Malformed),
    /// The memory from the server is unusable.
    #[error("{0}")]
    Segment(SegmentError),
    /// The kernel refused our own memory, or its mapping.
    #[error("{0}")]
    Memory(#[from] RegionError),
    /// This process has too few descriptors left.
    #[error(
        "this process has too few descriptors left for a connection, which takes eight; close some, or raise RLIMIT_NOFILE"
    )]
    NoDescriptors,
    /// The detach level is not available.
    #[error("{0}")]
    Enforce(#[from] EnforceError),
    /// An option has an impossible value.
    #[error("ClientOptions::{field} is {value}; it must be {must}")]
    Options {
        /// Name of the option.
        field: &'static str,
        /// Value of the option.
        value: u64,
        /// Permitted values.
        must: &'static str,
    },
    /// The kernel refused for another reason.
    #[error("the kernel refused while {doing}: {source}")]
    Kernel {
        /// Step that the kernel refused.
        doing: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
}

impl ConnectError {
    /// Whether memory, descriptors or room for clients are short, which may pass.
    pub(super) fn may_pass(&self) -> bool {
        matches!(
            self,
            ConnectError::NoDescriptors
                | ConnectError::Refused(Refusal::NoMemory | Refusal::TooManyClients { .. })
                | ConnectError::Memory(RegionError::NoMemory { .. })
                | ConnectError::Segment(SegmentError::Memory(RegionError::NoMemory { .. }))
        )
    }
}

/// A handshake whose first half is done.
#[derive(Debug)]
pub(super) struct Greeting {
    socket: OwnedFd,
    /// Kept until the server has answered, if the server is to enforce the detach.
    _handing_over: Option<HandOver>,
}

impl Client {
    /// Performs the handshake, within `patience`.
    pub(super) fn establish(&mut self, resumes: Option<Service>, patience: Duration) -> Result<(), ConnectError> {
        let until = Instant::now() + patience;
        for _ in 1..DIALS_MAX {
            let patience = until.saturating_duration_since(Instant::now());
            let greeting = match self.greeting.take() {
                Some(greeting) => Ok(greeting),
                None => self.greet(dial(&self.path, patience)?, resumes, patience),
            };
            match greeting.and_then(|greeting| self.be_welcomed(greeting, patience)) {
                // The server was leaving, or died. A successor, if there is one, listens at the same socket.
                Err(ConnectError::NoServer { .. }) => {}
                other => return other,
            }
        }
        Err(ConnectError::NoServer { path: self.path.clone() })
    }

    /// Performs our half of the handshake.
    fn greet(&self, socket: OwnedFd, resumes: Option<Service>, patience: Duration) -> Result<Greeting, ConnectError> {
        let (handing_over, uffd) = match self.options.detach {
            Detach::Enforced => {
                let silent = || ConnectError::Silent { path: self.path.clone(), limit: patience };
                let handing_over = HandOver::begin(patience).ok_or_else(silent)?;
                let uffd = enforce::register(self.arena.region()).map_err(|error| match error {
                    EnforceError::NoUserfaultfd { source } if lacks_descriptors(&source) => ConnectError::NoDescriptors,
                    error => error.into(),
                })?;
                (Some(handing_over), Some(uffd))
            }
            Detach::Move | Detach::Guard => (None, None),
        };
        let hello = Hello {
            ring: self.options.ring,
            arena: self.arena.geometry(),
            replies: self.options.replies,
            first: self.next_request,
            resumes,
            enforced_base: uffd.as_ref().map(|_| self.arena.region().address() as u64),
        };
        let mut fds = vec![self.segment.fd(), self.arena.region().fd()];
        fds.extend(uffd.as_ref().map(AsFd::as_fd));
        let say = |packet: &Packet, fds: &[BorrowedFd<'_>]| {
            within(&socket, patience, || wire::send(socket.as_fd(), packet, fds))
                .map_err(|error| self.silent_or(error, patience, "sending the handshake"))
        };
        say(&Packet::Hello(hello), &fds)?;
        if uffd.is_some() {
            // The server checks that we hold no userfaultfd any more, so close it before saying so.
            drop(uffd);
            say(&Packet::Detached, &[])?;
        }
        Ok(Greeting { socket, _handing_over: handing_over })
    }

    /// Waits for the server's half. If no answer comes in time, keeps the handshake for a later wait.
    fn be_welcomed(&mut self, greeting: Greeting, patience: Duration) -> Result<(), ConnectError> {
        let (welcome, fds) = match self.welcome(&greeting.socket, patience) {
            Err(silent @ ConnectError::Silent { .. }) => {
                self.greeting = Some(greeting);
                return Err(silent);
            }
            answer => answer?,
        };
        let link = self.link_up(&welcome, fds)?;
        (self.link, self.service) = (Ok(link), welcome.service);
        crash::point("client.connected");
        Ok(())
    }

    fn silent_or(&self, source: io::Error, limit: Duration, doing: &'static str) -> ConnectError {
        match source.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                ConnectError::Silent { path: self.path.clone(), limit }
            }
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
                ConnectError::NoServer { path: self.path.clone() }
            }
            _ => ConnectError::Kernel { doing, source },
        }
    }

    fn welcome(&self, socket: &OwnedFd, patience: Duration) -> Result<(Welcome, [OwnedFd; 4]), ConnectError> {
        let answer = within(socket, patience, || wire::receive(socket.as_fd()));
        let answer = answer.map_err(|error| self.silent_or(error, patience, "waiting for the server's welcome"))?;
        let Some(answer) = answer else { return Err(ConnectError::NoServer { path: self.path.clone() }) };
        match answer.packet {
            Ok(Packet::Welcome(welcome)) => match <[OwnedFd; 4]>::try_from(answer.fds) {
                Ok(fds) => Ok((welcome, fds)),
                // The kernel drops descriptors for which we have no room.
                Err(_) => Err(ConnectError::NoDescriptors),
            },
            Ok(Packet::Refused(refusal)) => Err(ConnectError::Refused(refusal)),
            Ok(_) => Err(ConnectError::Malformed(Malformed::Body(0))),
            Err(malformed) => Err(ConnectError::Malformed(malformed)),
        }
    }

    fn link_up(&mut self, welcome: &Welcome, fds: [OwnedFd; 4]) -> Result<Link, ConnectError> {
        let [segment, replies, ring_end, sleep_end] = fds;
        if welcome.ring != self.options.ring || welcome.replies != self.options.replies {
            return Err(ConnectError::Malformed(Malformed::Body(3)));
        }
        let layout = Layout { ring: welcome.ring, slots: welcome.replies.count };
        let server = PeerSegment::map(segment.as_fd(), layout).map_err(ConnectError::Segment)?;
        let replies = PeerRegion::map(replies.as_fd(), welcome.replies.len())?;
        let kernel = |source| kernel("preparing to sleep in the server's bell", source);
        Ok(Link {
            requests: Producer::new(self.segment.ring(), server.head(), self.next_request),
            results: Consumer::new(server.ring(), self.segment.head(), 0),
            peer_bell: PeerBell::new(server.bell()),
            bell_sender: BellSender::from_peer(ring_end),
            sleeper: Sleeper::new(sleep_end).map_err(kernel)?,
            replies: PeerArena::new(replies, welcome.replies)?,
            verdict: server.verdict(),
            generation: welcome.generation,
        })
    }
}

fn lacks_descriptors(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE))
}

/// Returns the error for a step that the kernel refused.
pub(crate) fn kernel(doing: &'static str, source: io::Error) -> ConnectError {
    match lacks_descriptors(&source) {
        true => ConnectError::NoDescriptors,
        false => ConnectError::Kernel { doing, source },
    }
}

pub(super) fn check(options: &ClientOptions) -> Result<(), ConnectError> {
    let ring = options.ring;
    if !ring.is_power_of_two() || ring < 2 {
        return Err(ConnectError::Options { field: "ring", value: ring.into(), must: "a power of two, at least 2" });
    }
    for (field, geometry) in [("arena.slot_len", options.arena), ("replies.slot_len", options.replies)] {
        if !geometry.is_sound() {
            let value = geometry.slot_len.into();
            return Err(ConnectError::Options { field, value, must: "a multiple of 4096 bytes" });
        }
    }
    Ok(())
}

/// Runs an operation on the socket within `patience`, or within 1 ms if that is longer. A signal does not end it: the
/// kernel never restarts an operation that has a time limit, not even after SIGSTOP and SIGCONT (signal(7)).
pub(crate) fn within<T>(
    socket: &OwnedFd,
    patience: Duration,
    mut operation: impl FnMut() -> io::Result<T>,
) -> io::Result<T> {
    let until = Instant::now() + patience;
    let mut left = patience;
    loop {
        for which in [Timeout::Recv, Timeout::Send] {
            rustix::net::sockopt::set_socket_timeout(socket, which, Some(left.max(Duration::from_millis(1))))?;
        }
        match operation() {
            // After a long stop the time is up, but the answer may be there: look once more.
            Err(error) if error.kind() == io::ErrorKind::Interrupted => match left.is_zero() {
                true => return Err(Errno::AGAIN.into()),
                false => left = until.saturating_duration_since(Instant::now()),
            },
            ended => return ended,
        }
    }
}

/// Connects a handshake socket to the server at `path`.
pub(crate) fn dial(path: &Path, patience: Duration) -> Result<OwnedFd, ConnectError> {
    let at = path.to_owned();
    let address = wire::address(path).map_err(|_| ConnectError::PathTooLong { path: at.clone() })?;
    match std::fs::metadata(path) {
        Ok(meta) if !meta.file_type().is_socket() => return Err(ConnectError::NotASocket { path: at }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(ConnectError::NoSocket { path: at }),
        _ => {}
    }
    let socket = wire::socket().map_err(|source| kernel("making a socket", source))?;
    let connected = within(&socket, patience, || Ok(rustix::net::connect(&socket, &address)?));
    let Err(source) = connected else { return Ok(socket) };
    Err(match Errno::from_io_error(&source) {
        Some(Errno::CONNREFUSED) => ConnectError::NoServer { path: at },
        Some(Errno::NOENT) => ConnectError::NoSocket { path: at },
        Some(Errno::ACCESS | Errno::PERM) => ConnectError::Forbidden { path: at },
        Some(Errno::PROTOTYPE) => ConnectError::ForeignSocket { path: at },
        Some(Errno::AGAIN) => ConnectError::Silent { path: at, limit: patience },
        _ => ConnectError::Kernel { doing: "connecting", source },
    })
}
