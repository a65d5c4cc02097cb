//! A socket at which a program on DPDK or VPP connects to a node, as a client of memif. The daemon listens and gives
//! every worker of the node the descriptor. The driver of the node's end of its VNI accepts clients.

use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde::{Deserialize, Serialize};
use serde_json::json;
use utoipa::ToSchema;

use super::Kind;
use crate::channel;

/// Bytes of a socket's path (`sun_path` of unix(7), with a zero behind it).
const SOCKET_MAX: usize = 107;
/// Bytes of memif's secret.
const SECRET_MAX: usize = 23;

/// The socket at which a client of memif connects, and what the client must know.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Memif {
    /// Path of the socket, from /.
    #[schema(value_type = String)]
    pub socket: PathBuf,
    /// The number by which the client asks for the port.
    #[serde(default)]
    pub id: u32,
    /// The secret that the client must know, at most 23 bytes; without, it needs none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub secret: String,
}

impl Kind for Memif {
    fn kind(&self) -> &'static str {
        "memif"
    }

    /// The path of its socket.
    fn label(&self) -> String {
        self.socket.display().to_string()
    }

    fn shown(&self) -> String {
        format!("memif at {}", self.label())
    }

    fn text(&self) -> String {
        json!({ "id": self.id, "secret": self.secret }).to_string()
    }

    fn odd(&self) -> Option<String> {
        let shown = self.socket.display();
        match () {
            () if !self.socket.is_absolute() => {
                Some(format!("memif: its socket is named by a path from /, not {shown}"))
            }
            () if self.socket.as_os_str().len() > SOCKET_MAX => Some(format!(
                "memif: {shown} has more bytes than the path of a socket can ({SOCKET_MAX}); name a shorter one"
            )),
            () if self.secret.len() > SECRET_MAX => Some(format!(
                "memif: its secret has {} bytes, and memif has room for {SECRET_MAX}; shorten it",
                self.secret.len()
            )),
            () => None,
        }
    }

    /// A client chooses its addresses itself.
    fn has_others(&self) -> bool {
        true
    }

    fn has_clients(&self) -> bool {
        true
    }

    fn make(&self) -> Result<OwnedFd> {
        listen(&self.socket)
    }

    /// Device and inode number of its file: if another file has taken its place, clients do not find the listener.
    fn mark(&self) -> Option<String> {
        let there = std::fs::symlink_metadata(&self.socket).ok()?;
        Some(format!("{}:{}", there.dev(), there.ino()))
    }

    fn remove(&self) {
        let _ = std::fs::remove_file(&self.socket);
    }
}

/// Listens for clients: for the daemon's user alone, until an operator changes the file's owner or mode.
fn listen(path: &Path) -> Result<OwnedFd> {
    let shown = path.display();
    match std::fs::symlink_metadata(path) {
        Ok(there) if !there.file_type().is_socket() => {
            bail!("{shown} is there already, and no socket; name another path")
        }
        Ok(_) if is_served(path) => bail!("somebody else serves at {shown}; name another path, or end them"),
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("{shown} cannot be looked at"));
        }
        _ => {}
    }
    let listener =
        channel::listen(path).with_context(|| format!("{shown} cannot be listened at; is its folder there?"))?;
    Ok(listener)
}

/// Returns whether a process serves at `path`.
fn is_served(path: &Path) -> bool {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
    let Ok((socket, address)) = socket.and_then(|socket| Ok((socket, SocketAddrUnix::new(path)?))) else {
        return false;
    };
    match rustix::net::connect(&socket, &address) {
        Ok(()) | Err(Errno::AGAIN) => true,
        // It is another kind of socket, and in use.
        Err(Errno::PROTOTYPE) => true,
        Err(_) => false,
    }
}
