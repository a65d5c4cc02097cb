//! A socket at which a virtual machine's front end connects to a node, by vhost-user. The daemon listens and gives every
//! worker of the node the descriptor. The driver of the node's end of its VNI is the back end.

use std::os::fd::OwnedFd;
use std::path::PathBuf;

use anyhow::Result;
use rustix::net::SocketType;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::Kind;
use super::socket::{listen, mark, odd};

/// The socket at which a machine's front end connects: QEMU's vhost-user, or any other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Vm {
    /// Path of the socket, from /.
    #[schema(value_type = String)]
    pub socket: PathBuf,
}

impl Kind for Vm {
    fn kind(&self) -> &'static str {
        "vm"
    }

    /// The path of its socket.
    fn label(&self) -> String {
        self.socket.display().to_string()
    }

    fn shown(&self) -> String {
        format!("virtual machine at {}", self.label())
    }

    fn text(&self) -> String {
        String::new()
    }

    fn odd(&self) -> Option<String> {
        odd("vm", &self.socket)
    }

    /// A guest chooses its address itself.
    fn has_others(&self) -> bool {
        true
    }

    fn has_clients(&self) -> bool {
        true
    }

    fn make(&self) -> Result<OwnedFd> {
        listen(&self.socket, SocketType::STREAM)
    }

    fn mark(&self) -> Option<String> {
        mark(&self.socket)
    }

    fn remove(&self) {
        let _ = std::fs::remove_file(&self.socket);
    }
}
