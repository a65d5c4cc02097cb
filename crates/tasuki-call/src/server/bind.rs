//! How a server starts to listen: its options, the place of its socket, and the reasons for failure.

use std::fs::Permissions;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::Resource;
use tasuki_shm::lease::Lost;

use crate::state::State;
use crate::wire;

/// How long another server may keep us from its folder, which it needs for less than a millisecond; and the pause
/// between our attempts.
const CLAIM_FOR: Duration = Duration::from_secs(1);
const CLAIM_PAUSE: Duration = Duration::from_micros(200);

/// Users that may connect.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Peers {
    /// The server's own user, and root.
    #[default]
    SameUser,
    /// The users with these ids, and root.
    Users(Vec<u32>),
    /// Every user that the socket's mode admits.
    Any,
}

/// Options of a server.
#[derive(Debug)]
pub struct ServerOptions {
    /// Mode of the socket file.
    pub mode: u32,
    /// Users that may connect.
    pub peers: Peers,
    /// Maximum number of clients at a time.
    pub clients_max: usize,
    /// Maximum number of entries in each of a client's rings.
    pub ring_max: u32,
    /// Maximum number of bytes in a client's two arenas together.
    pub arenas_max: u64,
    /// Spin time for requests before parking. `None` measures the cost of a nap and spins as long.
    pub spin: Option<Duration>,
    /// State that a successor takes over. Without it, another server can follow, but it cannot take over calls.
    pub state: Option<State>,
}

impl Default for ServerOptions {
    /// Mode 0600, the same user, 4,096 clients with rings of up to 4,096 entries and 256 MiB of arenas each. The
    /// kernel allocates the memory only on use.
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

/// Reasons why a server cannot start.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Another server already listens at the path.
    #[error("a server already listens at {}; stop it, succeed it, or choose another path", path.display())]
    InUse {
        /// Path of the socket.
        path: PathBuf,
    },
    /// The path exists and is not a socket. The server does not remove it.
    #[error("{} exists and is not a socket; remove it or choose another path", path.display())]
    Foreign {
        /// Path that was tried.
        path: PathBuf,
    },
    /// The folder does not exist.
    #[error("the folder of {} does not exist; create it or choose another path", path.display())]
    NoFolder {
        /// Path that was tried.
        path: PathBuf,
    },
    /// This user may not create the socket.
    #[error("this user may not create {}; choose a folder that it may write", path.display())]
    Forbidden {
        /// Path that was tried.
        path: PathBuf,
    },
    /// The path does not fit into a socket address.
    #[error("{} is too long: the path of a socket, with its folder, may have 90 bytes; use a shorter one", path.display())]
    PathTooLong {
        /// Path that was tried.
        path: PathBuf,
    },
    /// Another server of the same state is alive.
    #[error("another server holds the lease on this state: {0}")]
    Leased(#[from] Lost),
    /// The kernel refused for another reason.
    #[error("the kernel refused while {doing}: {source}")]
    Kernel {
        /// Step that the kernel refused.
        doing: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
}

/// Keeps other servers from binding or removing a socket in the same folder while the result lives. Without it,
/// another server could put a living socket at the path between our finding a dead server's socket and removing it.
///
/// A server that cannot get the lock, or not soon, continues without it: any process that may read the folder could
/// hold the lock for ever.
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

/// Removes a socket file that a dead server left behind. Leaves everything else alone.
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
    // A hanging server with a full backlog counts as present too.
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

/// Creates a listening socket at `path` and returns it with its inode. When the file appears there, its mode is set
/// and it listens already.
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

/// Starts listening on the draft socket and links it to its real name, unless another server was quicker.
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

/// Raises the descriptor limit to the hard limit. If that fails, fewer clients fit, and the server refuses the
/// others.
pub(super) fn raise_descriptor_limit() {
    let mut limit = rustix::process::getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        limit.current = limit.maximum;
        let _ = rustix::process::setrlimit(Resource::Nofile, limit);
    }
}
