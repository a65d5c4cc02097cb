//! Network cards.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A network card.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Nic {
    /// 1 to 24 of the characters a-z, 0-9, - and _, beginning with a letter; unique among the NICs.
    #[schema(pattern = "^[a-z][a-z0-9_-]{0,23}$")]
    pub name: String,
    /// Where the card is: `sim` for Tasuki's own model, `vfio-user:PATH` for the socket of a process that serves one, or
    /// `vfio:0000:03:00.0` for a real one, by its PCI address.
    #[schema(value_type = String, pattern = "^(sim|vfio-user:/.*|vfio:.+)$")]
    pub device: Device,
    /// The node that has it at first.
    pub node: String,
    /// The node that gets it if the node that has it is lost.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub standby: Option<String>,
    /// Descriptors in each of its rings, a power of two from 2 to 1024, as far as the card goes; by default 256, or as many as
    /// the card can have.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 2, maximum = 1024)]
    pub ring: Option<u16>,
    /// Bytes of payload in the longest frame, from 68 to 9000, as far as the card goes; 1500 by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 68, maximum = 9000)]
    pub mtu: Option<u16>,
    /// For the model: its wire, as `tasuki sim nic` takes it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub wire: Vec<String>,
}

/// Where a card is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Device {
    /// Tasuki's own model, which the daemon starts.
    Sim,
    /// The process that serves a card at this socket.
    VfioUser(PathBuf),
    /// A real card, by its PCI address.
    Vfio(String),
    /// No card, but a node's end of the VNI of this name. No configuration can name it.
    Vni(String),
}

impl TryFrom<String> for Device {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "sim" => Ok(Device::Sim),
            Some(("vfio-user", path)) if path.starts_with('/') => Ok(Device::VfioUser(path.into())),
            Some(("vfio-user", _)) => {
                Err(format!("{text:?}: the socket of a vfio-user server is named by a path from /"))
            }
            Some(("vfio", address)) if !address.is_empty() => Ok(Device::Vfio(address.to_owned())),
            _ => Err(format!("{text:?} names no card; write sim, vfio-user:PATH or vfio:0000:03:00.0 (a PCI address)")),
        }
    }
}

impl From<Device> for String {
    fn from(device: Device) -> String {
        device.to_string()
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Sim => f.write_str("sim"),
            Device::VfioUser(path) => write!(f, "vfio-user:{}", path.display()),
            Device::Vfio(address) => write!(f, "vfio:{address}"),
            Device::Vni(name) => write!(f, "vni:{name}"),
        }
    }
}
