//! The other side of a replacement: a process that will be the server next.
//!
//! # States of the giver (the server that is replaced)
//!
//! | state    | event    | next     | action  | because                                                         |
//! |----------|----------|----------|---------|-----------------------------------------------------------------|
//! | Serving  | Succeed  | Watched  | Inheritance  | a stand-by holds listener and state, and learns of our death    |
//! | Watched  | Release  | Draining | Drain   | what has begun is finished; nothing new is begun                |
//! | Watched  | Gone     | Serving  | Forget  | a stand-by that dies changes nothing                            |
//! | Draining | Drained  | Passed   | Pass    | nobody has begun anything: the successor may                    |
//! | Draining | Gone     | Serving  | Forget  | the successor gave up                                           |
//! | Passed   | Taken    | Over     | Leave   | the successor serves                                            |
//! | Passed   | Gone     | Serving  | TakeBack | the successor died: only the lease says who serves, and we win it |

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::client::{ConnectError, DIALS_MAX, dial};
use super::server::{BindError, Server, ServerOptions};
use super::state::{State, StateError};
use super::wire::{self, Packet, Received, Refusal};
use crate::crash;
use crate::lease::Lost;
use crate::wake::nap_cost;

/// Why a successor did not become the server. The old one serves on, unless it is dead.
#[derive(Debug, thiserror::Error)]
pub enum SucceedError {
    /// The server could not be reached.
    #[error("{0}")]
    Connect(#[from] ConnectError),
    /// Its state cannot be used.
    #[error("{0}")]
    State(#[from] StateError),
    /// It did not let go in time.
    #[error("the server at {} did not let go within {limit:?}; it serves on: answer its deferred requests, or kill it and stand by", path.display())]
    NotReleased {
        /// Where.
        path: PathBuf,
        /// How long we waited.
        limit: Duration,
    },
    /// Somebody else took the lease.
    #[error("{0}; another successor was quicker")]
    Lost(#[from] Lost),
    /// The new server could not be set up.
    #[error("{0}")]
    Bind(#[from] BindError),
    /// The kernel refused for a reason of its own.
    #[error("the kernel refused while {doing}: {source}")]
    Kernel {
        /// The step.
        doing: &'static str,
        /// Its reason.
        source: io::Error,
    },
}

/// A process that has what it needs to be the next server: the listening socket and the state.
#[derive(Debug)]
pub struct Successor {
    path: PathBuf,
    socket: OwnedFd,
    listener: OwnedFd,
    state: State,
    /// The generation of the server that we watch.
    generation: u32,
}

/// Who is asked while it leaves or dies closes the socket; its successor listens at the same path.
fn ask_for_inheritance(path: &Path) -> Result<(OwnedFd, Received), SucceedError> {
    for _ in 1..DIALS_MAX {
        let socket = dial(path, Duration::from_secs(5))?;
        let asked = wire::send(socket.as_fd(), &Packet::Succeed, &[]);
        match asked.and_then(|()| wire::receive(socket.as_fd())) {
            Ok(Some(answer)) => return Ok((socket, answer)),
            Ok(None) => {}
            Err(error) if matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) => {}
            Err(source) => return Err(SucceedError::Kernel { doing: "asking the server for its state", source }),
        }
    }
    Err(ConnectError::NoServer { path: path.to_owned() }.into())
}

impl Successor {
    /// Asks the server at `path` for what its successor needs. It serves on, and learns nothing but that a stand-by exists.
    pub fn approach(path: impl AsRef<Path>) -> Result<Self, SucceedError> {
        let path = path.as_ref().to_owned();
        let (socket, answer) = ask_for_inheritance(&path)?;
        let refused = |refusal| SucceedError::Connect(ConnectError::Refused(refusal));
        let generation = match answer.packet {
            Ok(Packet::Inheritance { generation }) => generation,
            Ok(Packet::Refused(refusal)) => return Err(refused(refusal)),
            Ok(_) => return Err(refused(Refusal::NoInheritance)),
            Err(malformed) => return Err(ConnectError::Malformed(malformed).into()),
        };
        let [listener, state] = <[OwnedFd; 2]>::try_from(answer.fds).map_err(|_| refused(Refusal::NoMemory))?;
        // What takes time is done now, while the other serves.
        nap_cost();
        Ok(Successor { path, socket, listener, state: State::adopt(state)?, generation })
    }

    /// The state, to be looked at before the take-over: is it of a version that this program understands?
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Has the server finish what it has begun and let go, then takes its place.
    ///
    /// # Errors
    /// [`SucceedError::NotReleased`] when it has not let go within `limit`: it serves on.
    pub fn take_over(self, options: ServerOptions, limit: Duration) -> Result<Server, SucceedError> {
        let until = Instant::now() + limit;
        // A server that is dead by now needs no asking.
        let _ = wire::send(self.socket.as_fd(), &Packet::Release, &[]);
        if !self.wait_for_release(Some(until))? {
            return Err(SucceedError::NotReleased { path: self.path, limit });
        }
        self.take(options)
    }

    /// Waits until the server dies or ends, then takes its place. The warm stand-by.
    pub fn stand_by(self, options: ServerOptions) -> Result<Server, SucceedError> {
        self.wait_for_release(None)?;
        self.take(options)
    }

    /// Whether the server has let go (or is dead) by `until`.
    fn wait_for_release(&self, until: Option<Instant>) -> Result<bool, SucceedError> {
        let kernel = |source| SucceedError::Kernel { doing: "waiting for the server to let go", source };
        loop {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return Ok(false);
            }
            rustix::net::sockopt::set_socket_timeout(&self.socket, rustix::net::sockopt::Timeout::Recv, left)
                .map_err(|errno| kernel(errno.into()))?;
            match wire::receive(self.socket.as_fd()) {
                Ok(Some(answer)) if answer.packet == Ok(Packet::Released) => return Ok(true),
                Ok(Some(_)) => {}
                // The end of its socket is the end of the process: no store of its can come after it.
                Ok(None) => return Ok(true),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(true),
                Err(error) => return Err(kernel(error)),
            }
        }
    }

    fn take(self, options: ServerOptions) -> Result<Server, SucceedError> {
        // Only from the server that we watched: whoever else holds the lease by now may be alive.
        let now = self.state.tenure();
        if now.epoch != self.generation {
            return Err(Lost { now }.into());
        }
        let tenure = self.state.take(now)?;
        crash::point("taker.taken");
        let server = Server::assume(&self.path, self.listener, self.state, tenure, options)?;
        let _ = wire::send(self.socket.as_fd(), &Packet::Taken, &[]);
        crash::point("taker.told");
        Ok(server)
    }
}
