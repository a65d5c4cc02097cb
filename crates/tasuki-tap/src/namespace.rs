//! Work that is done in another network namespace.

use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::TapError;

/// Where `ip netns` keeps the names that it gives.
const NAMED: &str = "/run/netns";

/// A network namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Namespace {
    /// This process's.
    Own,
    /// The one at this path: `/run/netns/NAME`, or a process's `/proc/PID/ns/net`.
    At(PathBuf),
}

impl Namespace {
    /// As people name it: by what `ip netns` calls it, or by a path from /.
    pub fn named(name: &str) -> Self {
        Namespace::At(if name.starts_with('/') { PathBuf::from(name) } else { Path::new(NAMED).join(name) })
    }

    /// Does `work` there. What it opens stays there.
    pub fn within<T: Send>(&self, work: impl FnOnce() -> Result<T, TapError> + Send) -> Result<T, TapError> {
        let Namespace::At(path) = self else { return work() };
        let failed = |why: io::Error| TapError::Namespace { path: path.clone(), why };
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let place = rustix::fs::open(path, flags, Mode::empty()).map_err(|errno| match errno {
            Errno::NOENT => TapError::NoNamespace(path.clone()),
            errno => failed(errno.into()),
        })?;
        // A thread of its own, that ends there: all others stay where they are.
        std::thread::scope(|scope| {
            let there = std::thread::Builder::new().name("netns".to_owned()).spawn_scoped(scope, || {
                move_into_link_name_space(place.as_fd(), Some(LinkNameSpaceType::Network))
                    .map_err(|errno| failed(errno.into()))?;
                work()
            });
            match there.map(|thread| thread.join()) {
                Ok(Ok(done)) => done,
                Ok(Err(panic)) => std::panic::resume_unwind(panic),
                Err(error) => Err(failed(error)),
            }
        })
    }
}
