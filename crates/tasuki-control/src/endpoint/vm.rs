//! A socket at which a virtual machine's front end connects to a node, by vhost-user. The daemon listens and gives every
//! worker of the node the descriptor. The driver of the node's end of its VNI is the back end.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use anyhow::Result;
use rustix::net::SocketType;
use serde::{Deserialize, Serialize};
use serde_json::json;
use utoipa::ToSchema;

use super::Kind;
use super::socket::{listen, odd};

/// The socket at which a machine's front end connects: QEMU's vhost-user, or any other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Vm {
    /// Path of the socket, from /.
    #[schema(value_type = String, pattern = "^/")]
    pub socket: PathBuf,
    /// The longest packet that the machine's card takes, in bytes without the Ethernet header: its guest's driver gets that as
    /// its MTU. 68 to 65,535; without it, the guest takes what it wants, 1,500 by default.
    #[serde(default)]
    #[schema(minimum = 68)]
    pub mtu: Option<u16>,
}

/// The least MTU of a virtio network device (VIRTIO 1.2, 5.1.4.1).
const MTU_MIN: u16 = 68;

impl Kind for Vm {
    fn kind(&self) -> &'static str {
        "vm"
    }

    /// The path of its socket.
    fn label(&self) -> String {
        self.socket.display().to_string()
    }

    fn socket(&self) -> Option<&Path> {
        Some(&self.socket)
    }

    fn shown(&self) -> String {
        format!("virtual machine at {}", self.label())
    }

    /// Workers from before a node had a latency insist on one here.
    fn text(&self) -> String {
        json!({ "latency_us": 0 }).to_string()
    }

    fn odd(&self) -> Option<String> {
        let is_short = || {
            let mtu = self.mtu.filter(|mtu| *mtu < MTU_MIN)?;
            Some(format!("vm: mtu is {mtu}, and a network card has {MTU_MIN} bytes at least; raise it"))
        };
        odd("vm", &self.socket).or_else(is_short)
    }

    fn make(&self) -> Result<OwnedFd> {
        listen(&self.socket, SocketType::STREAM)
    }
}
