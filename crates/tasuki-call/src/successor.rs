//! The successor's side of a replacement: the process that will be the next server.
//!
//! # States of the giver (the server that is replaced)
//!
//! | state    | event    | next     | action  | because                                                         |
//! |----------|----------|----------|---------|-----------------------------------------------------------------|
//! | Serving  | Succeed  | Watched  | Inheritance  | a stand-by holds listener and state, and learns of our death    |
//! | Watched  | Release  | Draining | Drain   | the giver finishes begun requests and begins no new ones        |
//! | Watched  | Gone     | Serving  | Forget  | a stand-by that dies changes nothing                            |
//! | Draining | Drained  | Passed   | Pass    | no request is begun and unanswered: the successor may begin     |
//! | Draining | Gone     | Serving  | Forget  | the successor gave up                                           |
//! | Passed   | Taken    | Over     | Leave   | the successor serves                                            |
//! | Passed   | Gone     | Serving  | TakeBack | the successor died: the lease names the server, and we win it   |

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tasuki_shm::crash;
use tasuki_shm::lease::Lost;
use tasuki_shm::wake::nap_cost;

use super::bounded;
use super::client::{ConnectError, DIALS_MAX, dial, within};
use super::server::{BindError, Server, ServerOptions};
use super::state::{State, StateError};
use super::wire::{self, Packet, Received, Refusal};

/// Reasons why a successor did not become the server. The old server continues to serve, unless it is dead.
#[derive(Debug, thiserror::Error)]
pub enum SucceedError {
    /// The successor could not reach the server.
    #[error("{0}")]
    Connect(#[from] ConnectError),
    /// The server's state is unusable.
    #[error("{0}")]
    State(#[from] StateError),
    /// The server did not let go in time.
    #[error("the server at {} did not let go within {limit:?}; it serves on: answer its deferred requests, or kill it and stand by", path.display())]
    NotReleased {
        /// Path of the socket.
        path: PathBuf,
        /// How long the successor waited.
        limit: Duration,
    },
    /// Another process took the lease.
    #[error("{0}; another successor was quicker")]
    Lost(#[from] Lost),
    /// The successor could not set up the new server.
    #[error("{0}")]
    Bind(#[from] BindError),
    /// The kernel refused for another reason.
    #[error("the kernel refused while {doing}: {source}")]
    Kernel {
        /// Step that the kernel refused.
        doing: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
}

/// A process that has all it needs to be the next server: the listening socket and the state.
#[derive(Debug)]
pub struct Successor {
    path: PathBuf,
    socket: OwnedFd,
    listener: OwnedFd,
    state: State,
    /// Generation of the server that we watch.
    generation: u32,
}

/// Asks the server for its listening socket and state. A server that is leaving or dying closes the socket; its
/// successor listens at the same path, so ask again.
fn ask_for_inheritance(path: &Path) -> Result<(OwnedFd, Received), SucceedError> {
    let patience = Duration::from_secs(5);
    for _ in 1..DIALS_MAX {
        let socket = dial(path, patience)?;
        let asked = within(&socket, patience, || wire::send(socket.as_fd(), &Packet::Succeed, &[]));
        match asked.and_then(|()| within(&socket, patience, || wire::receive(socket.as_fd()))) {
            Ok(Some(answer)) => return Ok((socket, answer)),
            Ok(None) => {}
            Err(error) if matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(ConnectError::Silent { path: path.to_owned(), limit: patience }.into());
            }
            Err(source) => return Err(SucceedError::Kernel { doing: "asking the server for its state", source }),
        }
    }
    Err(ConnectError::NoServer { path: path.to_owned() }.into())
}

impl Successor {
    /// Asks the server at `path` for the things that its successor needs. The server continues to serve, and learns
    /// only that a stand-by exists.
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
        let [listener, state] = <[OwnedFd; 2]>::try_from(answer.fds).map_err(|_| ConnectError::NoDescriptors)?;
        // Do the slow work now, while the other server serves.
        nap_cost();
        Ok(Successor { path, socket, listener, state: State::adopt(state)?, generation })
    }

    /// Returns the state. Look at it before the take-over: does this program understand its version?
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Makes the server finish the requests it has begun and let go, then takes its place.
    ///
    /// # Errors
    /// [`SucceedError::NotReleased`] if the server has not let go within `limit`: it continues to serve.
    pub fn take_over(self, options: ServerOptions, limit: Duration) -> Result<Server, SucceedError> {
        let until = Instant::now() + bounded(limit);
        // A dead server needs no request.
        let _ = wire::send(self.socket.as_fd(), &Packet::Release, &[]);
        if !self.wait_for_release(Some(until))? {
            return Err(SucceedError::NotReleased { path: self.path, limit });
        }
        self.take(options)
    }

    /// Waits until the server dies or ends, then takes its place. This is the warm stand-by.
    pub fn stand_by(self, options: ServerOptions) -> Result<Server, SucceedError> {
        self.wait_for_release(None)?;
        self.take(options)
    }

    /// Waits until `until`. Returns whether the server has let go, or is dead.
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
                // The end of its socket is the end of the process: none of its stores can come after it.
                Ok(None) => return Ok(true),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(true),
                Err(error) => return Err(kernel(error)),
            }
        }
    }

    fn take(self, options: ServerOptions) -> Result<Server, SucceedError> {
        // Take the lease only from the server that we watched: any other holder may be alive.
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
