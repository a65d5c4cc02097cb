//! The work of a node's workers.

use std::net::Ipv4Addr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use tasuki_relay::message;
use utoipa::ToSchema;

use super::{Interface, Kind, Memif, Node, StationAddress, Tap, Vm};

/// Bytes of a frame that a source may send, without check sequence.
pub(super) const SIZES: std::ops::RangeInclusive<u16> = 60..=1514;

// As workers know it: `message::Work`.
/// A node's work.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub enum Work {
    /// Sends each frame back.
    Echo,
    /// Takes frames in.
    Sink,
    /// Answers `ping`.
    Answer(Answer),
    /// Is the NIC of the programs of a network namespace.
    Tap(Tap),
    /// Drives one more queue of another node's interface, or some of another node's virtual machine, with a worker and a CPU of
    /// its own.
    Queue(Queue),
    /// Serves memif, to a program on DPDK or VPP, which is thereby on the node's VNI.
    Memif(Memif),
    /// Is the network card of a virtual machine, on the node's VNI.
    Vm(Vm),
    /// Brings a Linux interface, and the network behind it, onto the node's VNI.
    Interface(Interface),
    /// Joins its NIC and its VNI.
    Uplink,
    /// Sends numbered frames.
    #[serde(rename_all = "kebab-case")]
    Source(Source),
    /// Runs a program of the user's own.
    Program(Program),
}

impl Work {
    /// Returns the endpoint that it names, if it names one other than a TAP.
    pub fn endpoint(&self) -> Option<&dyn Kind> {
        match self {
            Work::Memif(memif) => Some(memif),
            Work::Interface(interface) => Some(interface),
            Work::Vm(vm) => Some(vm),
            Work::Echo
            | Work::Sink
            | Work::Answer(_)
            | Work::Tap(_)
            | Work::Queue(_)
            | Work::Uplink
            | Work::Source(_)
            | Work::Program(_) => None,
        }
    }
}

impl Node {
    /// Returns its work, as its workers know it.
    pub fn work_of_worker(&self) -> message::Work {
        match self.work {
            Work::Echo => message::Work::Echo,
            Work::Sink => message::Work::Sink,
            Work::Answer(Answer { address }) => message::Work::Answer { address },
            Work::Tap(_) if self.vni.is_none() => message::Work::Tap,
            Work::Tap(_) | Work::Queue(_) | Work::Memif(_) | Work::Interface(_) | Work::Vm(_) => message::Work::Bridge,
            Work::Uplink => message::Work::Uplink,
            Work::Source(Source { rate, size, to }) => message::Work::Source { rate, size, to: to.map(|to| to.0) },
            Work::Program(_) => message::Work::Program,
        }
    }

    /// Returns its own program, if its workers do not run the default one.
    pub fn program(&self) -> Option<&Program> {
        match &self.work {
            Work::Program(program) => Some(program),
            _ => None,
        }
    }
}

/// A program of the user's own: see docs/users/own-programs.md.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Program {
    /// Its path, from `/`.
    #[schema(value_type = String, pattern = "^/")]
    pub path: PathBuf,
    /// Text that only the program understands.
    #[serde(default)]
    #[schema(max_length = 4096)]
    pub options: String,
    /// Files and folders that it may read, from `/`, as far as its user may.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub files: Vec<PathBuf>,
    /// Whether it may start threads once it has NICs.
    #[serde(default, skip_serializing_if = "is_no")]
    pub threads: bool,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks with a reference")]
fn is_no(it: &bool) -> bool {
    !*it
}

/// Settings of a node that answers `ping`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Answer {
    /// Its address, without a prefix length: it never speaks first.
    #[serde(deserialize_with = "answered_for")]
    #[schema(value_type = String)]
    pub address: Ipv4Addr,
}

fn answered_for<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Ipv4Addr, D::Error> {
    let text = String::deserialize(from)?;
    text.parse().map_err(|_| {
        let sentence =
            format!("{text:?} is not an address to answer for; name one of IPv4, without a length, as 192.0.2.77");
        serde::de::Error::custom(sentence)
    })
}

/// Settings of a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// Frames a second; 0 for as many as possible.
    #[serde(default)]
    pub rate: u64,
    /// Bytes of each frame, without check sequence.
    #[serde(default = "shortest")]
    #[schema(minimum = 60, maximum = 1514)]
    pub size: u16,
    /// Station address to send to; by default all stations.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<StationAddress>,
}

fn shortest() -> u16 {
    *SIZES.start()
}

/// One more queue of a node's interface, or queues of its virtual machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Queue {
    /// The node with the interface or the machine, on the same VNI. Its station address is this node's too.
    #[schema(pattern = "^[a-z][a-z0-9_-]{0,23}$")]
    pub of: String,
}
