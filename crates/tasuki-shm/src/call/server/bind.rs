//! How a server comes to listen: what it allows, its socket's place, and why it may not have it.

use std::fs::Permissions;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::Resource;

use crate::call::state::State;
use crate::call::wire;
use crate::lease::Lost;

/// How long another server may keep us from its folder, which it needs for less than a millisecond; and how often we ask.
const CLAIM_FOR: Duration = Duration::from_secs(1);
const CLAIM_PAUSE: Duration = Duration::from_micros(200);

/// Who may connect.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Peers {
    /// The server's own user, and root.
    #[default]
    SameUser,
    /// These users, by id, and root.
    Users(Vec<u32>),
    /// Everybody whom the socket's mode lets in.
    Any,
}

/// How a server serves.
#[derive(Debug)]
pub struct ServerOptions {
    /// The mode of the socket file.
    pub mode: u32,
    /// Who may connect.
    pub peers: Peers,
    /// Most clients at a time.
    pub clients_max: usize,
    /// Most entries in a client's rings.
    pub ring_max: u32,
    /// Most bytes in a client's two arenas together.
    pub arenas_max: u64,
    /// How long to spin for requests before parking; `None` measures what a nap costs and spins as long.
    pub spin: Option<Duration>,
    /// What a successor takes over. Without it the server can be followed, but not succeeded.
    pub state: Option<State>,
}

impl Default for ServerOptions {
    /// Mode 0600, the same user, 4,096 clients with rings of up to 4,096 entries and 256 MiB of arenas each (touched only when used).
    fn default() -> Self {
        ServerOptions {
            mode: 0o600,
            peers: Peers::SameUser,
            clients_max: 4096,
            ring_max: 4096,
            arenas_max: 256 << 20,
            spin: None,
            state: None,
        }
    }
}

/// Why there is no server.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// A server is there already.
    #[error("a server already listens at {}; stop it, succeed it, or choose another path", path.display())]
    InUse {
        /// Where.
        path: PathBuf,
    },
    /// Something else is there, and stays.
    #[error("{} exists and is not a socket; remove it or choose another path", path.display())]
    Foreign {
        /// Where.
        path: PathBuf,
    },
    /// The folder does not exist.
    #[error("the folder of {} does not exist; create it or choose another path", path.display())]
    NoFolder {
        /// Where.
        path: PathBuf,
    },
    /// We may not create it.
    #[error("this user may not create {}; choose a folder that it may write", path.display())]
    Forbidden {
        /// Where.
        path: PathBuf,
    },
    /// The path does not fit into a socket address.
    #[error("{} is too long: the path of a socket, with its folder, may have 90 bytes; use a shorter one", path.display())]
    PathTooLong {
        /// Where.
        path: PathBuf,
    },
    /// Another server of the same state is alive.
    #[error("another server holds the lease on this state: {0}")]
    Leased(#[from] Lost),
    /// The kernel refused for a reason of its own.
    #[error("the kernel refused while {doing}: {source}")]
    Kernel {
        /// The step.
        doing: &'static str,
        /// Its reason.
        source: io::Error,
    },
}

/// Keeps other servers from binding or removing a socket in the same folder while the result lives: between finding a dead
/// server's socket and removing it, somebody else could have put a living one there.
///
/// Who cannot have the lock, or not soon, goes on without: anybody who may read the folder could hold it for ever.
pub(super) fn claim_folder(path: &Path) -> Option<OwnedFd> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
    let folder = rustix::fs::open(folder, flags, Mode::empty()).ok()?;
    let until = Instant::now() + CLAIM_FOR;
    while let Err(Errno::WOULDBLOCK) = rustix::fs::flock(&folder, FlockOperation::NonBlockingLockExclusive) {
        if Instant::now() >= until {
            return None;
        }
        std::thread::sleep(CLAIM_PAUSE);
    }
    Some(folder)
}

/// Removes a socket file that a dead server left behind; leaves everything else alone.
pub(super) fn clear_the_way(path: &Path) -> Result<(), BindError> {
    let at = || path.to_owned();
    match std::fs::symlink_metadata(path) {
        Ok(meta) if !meta.file_type().is_socket() => return Err(BindError::Foreign { path: at() }),
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            return Err(BindError::Forbidden { path: at() });
        }
        Err(_) => return Ok(()),
    }
    let probe = wire::socket().map_err(|source| BindError::Kernel { doing: "making a socket", source })?;
    // A server that hangs, with a full backlog, is there too.
    rustix::io::ioctl_fionbio(&probe, true)
        .map_err(|errno| BindError::Kernel { doing: "making a socket", source: errno.into() })?;
    let address = wire::address(path).map_err(|_| BindError::PathTooLong { path: at() })?;
    match rustix::net::connect(&probe, &address) {
        Err(Errno::CONNREFUSED) => drop(std::fs::remove_file(path)),
        Err(Errno::NOENT) => {}
        _ => return Err(BindError::InUse { path: at() }),
    }
    Ok(())
}

/// A listening socket at `path`, and its inode. It appears there with its mode set and listening already.
pub(super) fn listen(path: &Path, mode: u32) -> Result<(OwnedFd, u64), BindError> {
    clear_the_way(path)?;
    let at = || path.to_owned();
    let kernel = |doing| move |errno: Errno| BindError::Kernel { doing, source: errno.into() };
    let listener = wire::socket().map_err(|source| BindError::Kernel { doing: "making a socket", source })?;
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}", std::process::id()));
    let draft = path.with_file_name(name);
    let _ = std::fs::remove_file(&draft);
    let address = wire::address(&draft).map_err(|_| BindError::PathTooLong { path: at() })?;
    rustix::net::bind(&listener, &address).map_err(|errno| match errno {
        Errno::NOENT | Errno::NOTDIR => BindError::NoFolder { path: at() },
        Errno::ACCESS | Errno::PERM | Errno::ROFS => BindError::Forbidden { path: at() },
        errno => kernel("binding the socket")(errno),
    })?;
    let placed = place(&listener, &draft, path, mode);
    let _ = std::fs::remove_file(&draft);
    placed.map(|inode| (listener, inode))
}

/// Opens the drafted socket for business, under its real name, unless somebody was quicker.
fn place(listener: &OwnedFd, draft: &Path, path: &Path, mode: u32) -> Result<u64, BindError> {
    let kernel = |doing| move |source: io::Error| BindError::Kernel { doing, source };
    std::fs::set_permissions(draft, Permissions::from_mode(mode)).map_err(kernel("setting the socket's mode"))?;
    rustix::net::listen(listener, 1024).map_err(|errno| kernel("listening")(errno.into()))?;
    rustix::io::ioctl_fionbio(listener, true).map_err(|errno| kernel("listening")(errno.into()))?;
    std::fs::hard_link(draft, path).map_err(|source| match source.kind() {
        io::ErrorKind::AlreadyExists => BindError::InUse { path: path.to_owned() },
        _ => kernel("naming the socket")(source),
    })?;
    Ok(std::fs::metadata(path).map_err(kernel("looking at the socket"))?.ino())
}

/// As many descriptors as the hard limit allows. Where that fails, fewer clients fit, and they are told.
pub(super) fn raise_descriptor_limit() {
    let mut limit = rustix::process::getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        limit.current = limit.maximum;
        let _ = rustix::process::setrlimit(Resource::Nofile, limit);
    }
}
