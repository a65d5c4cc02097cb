//! A socket at which a program on DPDK or VPP connects to a node, as a client of memif. The daemon listens and gives
//! every worker of the node the descriptor. The driver of the node's end of its VNI accepts clients.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use anyhow::Result;
use rustix::net::SocketType;
use serde::{Deserialize, Serialize};
use serde_json::json;
use utoipa::ToSchema;

use super::Kind;
use super::socket::{listen, odd};

/// Bytes of memif's secret.
const SECRET_MAX: usize = 23;

/// The socket at which a client of memif connects, and the client's credentials.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Memif {
    /// Path of the socket, from /.
    #[schema(value_type = String, pattern = "^/")]
    pub socket: PathBuf,
    /// The number by which the client asks for the port.
    #[serde(default)]
    pub id: u32,
    /// The secret that the client must know, 1 to 23 bytes; by default it needs none.
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "not_empty")]
    #[schema(min_length = 1, max_length = 23)]
    pub secret: String,
    /// The user or group that may use the socket beside tasukid's user, as user:NAME or group:NAME.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^(user|group):.+$")]
    pub owner: Option<String>,
}

/// Reads a secret. One that is empty would be none, and let in every client.
fn not_empty<'de, D: serde::Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let secret = String::deserialize(from)?;
    let empty = || serde::de::Error::custom("secret is empty; write one, or leave the key out to let in every client");
    Some(secret).filter(|secret| !secret.is_empty()).ok_or_else(empty)
}

impl Kind for Memif {
    fn kind(&self) -> &'static str {
        "memif"
    }

    /// The path of its socket.
    fn label(&self) -> String {
        self.socket.display().to_string()
    }

    fn socket(&self) -> Option<&Path> {
        Some(&self.socket)
    }

    fn shown(&self) -> String {
        format!("memif at {}", self.label())
    }

    fn text(&self) -> String {
        json!({ "id": self.id, "secret": self.secret }).to_string()
    }

    fn odd(&self) -> Option<String> {
        odd("memif", &self.socket, self.owner.as_deref()).or_else(|| {
            (self.secret.len() > SECRET_MAX).then(|| {
                let len = self.secret.len();
                format!("memif: its secret has {len} bytes, and memif has room for {SECRET_MAX}; shorten it")
            })
        })
    }

    fn make(&self) -> Result<OwnedFd> {
        listen(&self.socket, SocketType::SEQPACKET, self.owner.as_deref())
    }
}
