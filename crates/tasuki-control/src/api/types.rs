//! What is said over HTTP, as JSON.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

pub use crate::registry::Event;

/// The daemon and what it has.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Status {
    /// Of the daemon.
    pub version: String,
    /// Its process.
    pub pid: u32,
    /// Since when it runs, in ms.
    pub up_ms: u64,
    /// Workers that it took over from the daemon before it.
    pub adopted: u32,
    /// What is wrong with the daemon itself.
    #[serde(default)]
    pub trouble: Option<String>,
    /// Nodes.
    pub nodes: Vec<NodeView>,
    /// NICs.
    pub nics: Vec<NicView>,
}

/// A node.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct NodeView {
    /// Its name.
    pub name: String,
    /// What it does with frames.
    pub work: String,
    /// Its workers, by number.
    pub workers: Vec<u32>,
    /// NICs that are its.
    pub nics: Vec<String>,
    /// How often it was upgraded.
    pub generation: u32,
    /// Why it has not the workers that it should have.
    pub trouble: Option<String>,
    /// Whether somebody captures its frames.
    #[serde(default)]
    pub captured: bool,
    /// What its workers are not confined with.
    #[serde(default)]
    pub unconfined: std::collections::BTreeSet<String>,
}

/// A VNI.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct VniView {
    /// Its name.
    pub name: String,
    /// Nodes that are on it.
    pub nodes: u32,
    /// Bytes of memory that their node memories have taken.
    pub memory: u64,
}

/// A node on a VNI.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct VniNodeView {
    /// Its name.
    pub node: String,
    /// Its number on the VNI.
    pub number: u16,
    /// Its station address.
    pub mac: String,
    /// The interface that its programs have, as NAMESPACE:NAME, or the socket at which they connect by memif.
    pub interface: Option<String>,
    /// The worker that drives it.
    pub worker: Option<u32>,
    /// Bytes of memory that its node memory has taken.
    pub memory: u64,
    /// Bytes of the others' memory that its workers may be charged for, at most: pages that are read before they were written. A bound on the memory of
    /// the node's workers has to leave room for them.
    #[serde(default)]
    pub chargeable: u64,
    /// What it and other namespaces sent each other past their workers, if it may.
    pub shortcut: Option<CrossedView>,
}

/// Frames that took the shortcut through the kernel, from one namespace of a VNI to another. Segments of up to 64 KiB count as one.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct CrossedView {
    /// Those that the node sent,
    pub sent: u64,
    /// and those that it got.
    pub received: u64,
}

/// What a node of a VNI has counted of another.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct TalkView {
    /// The node that has counted.
    pub node: String,
    /// The other.
    pub other: String,
    /// Frames sent to the other.
    pub sent: u64,
    /// Frames received from it.
    pub received: u64,
    /// Frames that were not sent since the other had not read a whole ring of them,
    pub ring_full: u64,
    /// since it had not read all that one may have of the node's pool,
    pub over_quota: u64,
    /// or since the pool was full.
    pub pool_full: u64,
    /// How often all was taken back from the other, since it read nothing for a second.
    pub taken_back: u64,
    /// Frames received from the other that were in an address that is not its own, and were dropped.
    #[serde(default)]
    pub forged: u64,
}

/// What the end of a node has to say.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Removed {
    /// All that in a sentence.
    pub sentence: String,
}

/// A worker.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct WorkerView {
    /// Its number. It is never given again.
    pub worker: u32,
    /// Its process.
    pub pid: u32,
    /// Its node.
    pub node: String,
    /// `starting`, `prepares`, `drives`, `stands by`, `staged`, `idle` or `leaves`.
    pub is: String,
    /// The NICs that it drives.
    pub drives: Vec<String>,
    /// What was started.
    pub binary: String,
    /// The node's upgrade that it came with.
    pub generation: u32,
    /// Frames that it has received.
    pub received: u64,
    /// Frames that it has sent.
    pub sent: u64,
    /// Of numbered frames, those that are missing.
    pub missing: u64,
    /// Of numbered frames, those that came twice or late.
    pub late: u64,
    /// Frames that the node's TAP did not take, or that came from it and no card could send.
    pub refused: u64,
    /// What it could not confine itself with.
    pub unconfined: Vec<String>,
}

/// A NIC.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct NicView {
    /// Its name.
    pub name: String,
    /// Where it is.
    pub device: String,
    /// Whose it is.
    pub node: String,
    /// The worker that drives it.
    pub worker: Option<u32>,
    /// `driven`, `changes hands`, `parked`, `waits for a worker` or `not open`.
    pub is: String,
    /// How often its lease was taken.
    pub epoch: u32,
    /// How often it was taken and driven.
    pub relays: u64,
    /// How long nobody drove it when it last changed hands.
    pub pause_ns: Option<u64>,
    /// When whoever drives it had begun to, in ns of `CLOCK_MONOTONIC`.
    pub driving_at_ns: Option<u64>,
    /// Why nobody drives it, or why the last relay did not end as it was to.
    pub trouble: Option<String>,
}

/// What a NIC's driver has counted.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Counts {
    /// The NIC.
    pub nic: String,
    /// The worker that counted.
    pub worker: u32,
    /// Name and number, in the driver's order.
    pub counts: Vec<(String, u64)>,
}

/// How a node's driver state travels to its successor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DriverStateBy {
    /// It is read where it lies.
    Place,
    /// The giver writes it to the daemon's store.
    Store,
}

/// An upgrade.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Upgrade {
    /// Another program than the one that the node's workers are now.
    #[schema(value_type = Option<String>)]
    pub with: Option<std::path::PathBuf>,
    /// How the driver state travels; without, in place.
    pub state: Option<DriverStateBy>,
}

/// What is started ahead of an upgrade.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Staging {
    /// The program that the upgrade will want; without, the one that the node's workers are now, as its file is now.
    #[schema(value_type = Option<String>)]
    pub with: Option<std::path::PathBuf>,
}

/// A way for a NIC to change hands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    /// Only the right to drive moves.
    Keep,
    /// The new owner's queue is up before traffic is steered to it.
    Mbb,
    /// Ring bases, cursors and interrupt are written anew, and nothing else.
    Repoint,
    /// Reset and start.
    Cold,
}

/// What becomes of frames that the old owner has not handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Inflight {
    /// The old owner handles them before it lets go.
    Deliver,
    /// They are counted, wiped out, and never seen again.
    Drop,
}

/// A handover.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Give {
    /// The node that is to have it.
    pub to: String,
    /// How; without, the best that card and trust allow.
    pub method: Option<Method>,
    /// Of frames in flight; without, `deliver`.
    pub inflight: Option<Inflight>,
    /// How the driver state travels; without, in place.
    pub state: Option<DriverStateBy>,
}

/// How one relay has settled.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Settled {
    /// The NIC.
    pub nic: String,
    /// Whether it went where it was to go.
    pub done: bool,
    /// The worker that drives now.
    pub worker: Option<u32>,
    /// Its process.
    pub pid: Option<u32>,
    /// Its node.
    pub node: Option<String>,
    /// How it went.
    pub method: Method,
    /// Why this way.
    pub because: String,
    /// How long nobody drove, by the stamps of giver and taker.
    pub pause_ns: Option<u64>,
    /// All that in a sentence.
    pub sentence: String,
}

/// How an upgrade or a handover has settled.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Relayed {
    /// NIC by NIC.
    pub relays: Vec<Settled>,
    /// All that in a sentence.
    pub sentence: String,
}

/// What the end of a capture has to say.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Ended {
    /// All that in a sentence.
    pub sentence: String,
}

/// What the end of everything has to say.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Stopped {
    /// Workers that were ended.
    pub workers: u32,
    /// All that in a sentence.
    pub sentence: String,
}

/// Why something was not done, in a sentence.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Refused {
    /// The sentence.
    pub error: String,
    /// How far it came, NIC by NIC.
    #[serde(default)]
    pub relays: Vec<Settled>,
}

impl From<Method> for tasuki_relay::method::Method {
    fn from(method: Method) -> Self {
        use tasuki_relay::method::Method as M;
        match method {
            Method::Keep => M::Keep,
            Method::Mbb => M::Mbb,
            Method::Repoint => M::Repoint,
            Method::Cold => M::Cold,
        }
    }
}

impl From<tasuki_relay::method::Method> for Method {
    fn from(method: tasuki_relay::method::Method) -> Self {
        use tasuki_relay::method::Method as M;
        match method {
            M::Keep => Method::Keep,
            M::Mbb => Method::Mbb,
            M::Repoint => Method::Repoint,
            M::Cold => Method::Cold,
        }
    }
}
