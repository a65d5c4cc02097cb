//! Work in another network namespace.
//!
//! # Invariants
//!
//! - **N1** Only the calling thread leaves its network namespace. Threads share no memory by way of it, so nothing
//!   that other threads hold depends on it.
#![allow(unsafe_code, reason = "unshare(2), which can also take a thread's descriptors from others")]

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

use crate::TapError;

/// Where `ip netns` keeps its named namespaces.
const NAMED: &str = "/run/netns";

/// Network namespace of the calling thread.
const OURS: &str = "/proc/thread-self/ns/net";

/// Device and inode number of a namespace, which tell it from others.
pub type Identity = (u64, u64);

/// A network namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Namespace {
    /// The network namespace of this process.
    Own,
    /// The one at this path: `/run/netns/NAME`, or a process's `/proc/PID/ns/net`.
    At(PathBuf),
}

impl Namespace {
    /// Returns the namespace of a name given to `ip netns`, or of a path that begins with /.
    pub fn named(name: &str) -> Self {
        Namespace::At(if name.starts_with('/') { PathBuf::from(name) } else { Path::new(NAMED).join(name) })
    }

    /// Runs `work` in the namespace. Descriptors that it opens stay in that namespace.
    pub fn within<T: Send>(&self, work: impl FnOnce() -> Result<T, TapError> + Send) -> Result<T, TapError> {
        match self {
            Namespace::Own => work(),
            Namespace::At(path) => within(self.open()?.as_fd(), path, work),
        }
    }

    /// Returns device and inode number of the namespace that has this name now. A name of the caller's own one has none.
    pub fn identity(&self) -> Option<Identity> {
        let Namespace::At(path) = self else { return None };
        let namespaces = rustix::fs::stat(OURS).ok()?.st_dev;
        rustix::fs::stat(path).ok().filter(|stat| stat.st_dev == namespaces).map(|stat| (stat.st_dev, stat.st_ino))
    }

    /// Opens a descriptor of the namespace.
    pub fn open(&self) -> Result<OwnedFd, TapError> {
        let path = match self {
            Namespace::Own => Path::new(OURS),
            Namespace::At(path) => path,
        };
        // The path may be a FIFO, for example: do not wait for a writer.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        rustix::fs::open(path, flags, Mode::empty()).map_err(|errno| match errno {
            Errno::NOENT => TapError::NoNamespace(path.to_owned()),
            errno => TapError::Namespace { path: path.to_owned(), why: errno.into() },
        })
    }
}

/// A network namespace without a name. It exists as long as a process holds something in it, or a descriptor of it.
#[derive(Debug)]
pub struct Unnamed(OwnedFd);

impl AsFd for Unnamed {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Unnamed {
    /// Creates a new namespace.
    pub fn new() -> Result<Self, TapError> {
        in_a_thread(Path::new(OURS), || {
            // SAFETY: the thread is new, and of all it shares with others, it leaves the network namespace only
            // (N1).
            unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.map_err(TapError::of)?;
            Namespace::Own.open().map(Unnamed)
        })
    }

    /// Wraps a descriptor of a network namespace.
    pub fn of(namespace: OwnedFd) -> Self {
        Unnamed(namespace)
    }

    /// Runs `work` in the namespace. Descriptors that it opens stay in that namespace.
    pub fn within<T: Send>(&self, work: impl FnOnce() -> Result<T, TapError> + Send) -> Result<T, TapError> {
        within(self.0.as_fd(), Path::new(OURS), work)
    }

    /// Returns its device and inode number.
    pub fn identity(&self) -> Option<Identity> {
        rustix::fs::fstat(&self.0).map(|stat| (stat.st_dev, stat.st_ino)).ok()
    }

    /// Returns whether both are the same namespace.
    pub fn is(&self, other: &Unnamed) -> bool {
        self.identity().is_some() && self.identity() == other.identity()
    }
}

fn within<T: Send>(
    place: BorrowedFd<'_>,
    path: &Path,
    work: impl FnOnce() -> Result<T, TapError> + Send,
) -> Result<T, TapError> {
    in_a_thread(path, || {
        move_into_link_name_space(place, Some(LinkNameSpaceType::Network))
            .map_err(|errno| TapError::Namespace { path: path.to_owned(), why: errno.into() })?;
        work()
    })
}

/// Runs `work` in a new thread, which ends with it: all other threads stay in their namespace.
fn in_a_thread<T: Send>(path: &Path, work: impl FnOnce() -> Result<T, TapError> + Send) -> Result<T, TapError> {
    std::thread::scope(|scope| {
        match std::thread::Builder::new().name("netns".to_owned()).spawn_scoped(scope, work).map(|thread| thread.join())
        {
            Ok(Ok(done)) => done,
            Ok(Err(panic)) => std::panic::resume_unwind(panic),
            Err(why) => Err(TapError::Namespace { path: path.to_owned(), why }),
        }
    })
}
