//! The JSON of the HTTP API.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

pub use crate::registry::Event;
pub use crate::supervisor::failover::FailOver;

/// The daemon, with its nodes and NICs.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Status {
    /// Version of the daemon.
    pub version: String,
    /// Process ID.
    pub pid: u32,
    /// Time since its start, in ms.
    pub up_ms: u64,
    /// Number of workers that it took over from an earlier daemon.
    pub adopted: u32,
    /// Troubles of the daemon itself.
    pub trouble: Option<String>,
    /// Why it goes on as it was, if it was to be replaced last and the other program did not begin.
    pub not_replaced: Option<String>,
    /// The configuration that it goes by.
    #[serde(default)]
    pub configuration: ConfigurationView,
    /// Views of all nodes.
    pub nodes: Vec<NodeView>,
    /// Views of all NICs.
    pub nics: Vec<NicView>,
}

/// The configuration that the daemon goes by.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct ConfigurationView {
    /// How many other configurations were applied, and this one.
    pub generation: u64,
    /// The file that it was in.
    pub path: String,
    /// Whether it is being applied. Then drift and stays have nothing of what it has yet to change.
    #[serde(default)]
    pub applying: bool,
    /// The steps to what it describes, of what is otherwise now: a NIC that was given away by hand, for one.
    pub drift: Vec<String>,
    /// What is otherwise, stays so when it is applied, and why: NICs that failed over, nodes that fell back on the program
    /// from before an upgrade, and namespaces that were made without the shortcut. Also interfaces of nodes that are bridges.
    #[serde(default)]
    pub stays: Vec<String>,
    /// Nodes that it does not describe: they were added by hand.
    pub by_hand: Vec<String>,
}

/// The nodes and NICs as they are now, as a configuration. It has the secrets of memif clients in it.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Written {
    /// The generation that they began with.
    pub generation: u64,
    /// The text of a file that a tasukid begins with.
    pub text: String,
}

/// A configuration to look at or to apply.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Apply {
    /// The file that it is in, for the messages about it; by default the one that the daemon began with.
    pub path: Option<String>,
    /// Its text. Without path and text, the daemon reads the file that it began with; it reads no other.
    pub text: Option<String>,
    /// The generation of the configuration that it is to follow; any, by default.
    pub generation: Option<u64>,
}

impl Apply {
    /// Returns why the daemon would have to read a file for the caller, if it would: it may read files that the caller
    /// may not, and says what is wrong with them.
    pub fn check(&self) -> Result<(), String> {
        match (&self.path, &self.text) {
            (Some(path), None) => Err(format!(
                "tasukid reads no file for others, and {path} came without its text; send that along, or leave the path out to name tasukid's own configuration"
            )),
            _ => Ok(()),
        }
    }
}

/// The steps that applying a configuration would take.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Plan {
    /// The file to which the steps lead.
    #[serde(default)]
    pub path: String,
    /// The generation of the present configuration.
    pub generation: u64,
    /// The steps in words, in their order.
    pub steps: Vec<String>,
    /// What stays as it is, and why: NICs that failed over, and namespaces that were made without the shortcut.
    #[serde(default)]
    pub stays: Vec<String>,
}

/// The result of applying a configuration.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Applied {
    /// Number of this configuration; the first one is 1, and each other one that is applied counts up.
    pub generation: u64,
    /// The steps that were taken, in words.
    pub steps: Vec<String>,
    /// The result in a sentence.
    pub sentence: String,
}

/// A node.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct NodeView {
    /// Name in the configuration, or the one it was added with.
    pub name: String,
    /// The work of its workers, in words.
    pub work: String,
    /// Numbers of its workers.
    pub workers: Vec<u32>,
    /// Names of the NICs that it has.
    pub nics: Vec<String>,
    /// How often it was upgraded.
    pub generation: u32,
    /// Why it lacks workers that it should have.
    pub trouble: Option<String>,
    /// Its settings that do not count, though it works: this version of tasukid refuses them, or a CPU is gone.
    pub left_out: Option<String>,
    /// Whether its frames are being captured.
    #[serde(default)]
    pub captured: bool,
    /// The container whose interface it is, if a container's runtime added it.
    pub container: Option<String>,
    /// The namespace of its interface, if that is in one other than the daemon's: as it was named when the node was added.
    pub netns: Option<String>,
    /// Confinement that its workers lack.
    #[serde(default)]
    pub unconfined: std::collections::BTreeSet<String>,
    /// The program at its socket, if it has one at which a program connects.
    pub client: Option<ClientView>,
    /// How its virtual machine connects, if it has one.
    pub vm: Option<VmView>,
}

/// The program that connects at a node's socket: a machine's front end, or a client of memif.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ClientView {
    /// Whether it is connected: away, connected, or runs; of a machine that runs, the guest's driver has started its card.
    pub is: String,
    /// Pid of the process that connected, if it is seen from here.
    pub process: Option<u32>,
}

/// A node that is a virtual machine.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct VmView {
    /// The socket at which the machine's front end connects.
    #[schema(value_type = String)]
    pub socket: std::path::PathBuf,
    /// The station address for the machine's card: the node's.
    pub mac: String,
    /// The MTU for the machine's card, in bytes, if the node has one.
    pub mtu: Option<u16>,
    /// Number of pairs of queues that the guest's driver uses now, if it is known.
    pub pairs: Option<usize>,
    /// What each queue of the card has carried since the node began, over all its workers.
    #[serde(default)]
    pub queues: Vec<QueueView>,
}

/// What a queue of a virtual machine's card has carried.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct QueueView {
    /// The queue, as ethtool in the guest calls it: `rx0` is the first that it receives by, `tx0` the first that it sends by.
    pub queue: String,
    /// Frames.
    pub packets: u64,
    /// Bytes of them.
    pub bytes: u64,
    /// How often the guest woke the node's worker.
    pub kicks: u64,
    /// Interrupts of the guest.
    pub interrupts: u64,
    /// How often the guest was shown frames without an interrupt: it wanted none, or one for several.
    pub suppressed: u64,
    /// Frames dropped because the guest had no buffer for them, or their destination no room.
    pub drops_no_room: u64,
    /// Frames dropped because of their length.
    pub drops_length: u64,
    /// Frames dropped for other reasons; `tasuki nic counts` names those of the node.
    pub drops_other: u64,
}

/// A VNI.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct VniView {
    /// Name of the VNI, as its nodes give it.
    pub name: String,
    /// Number of nodes on it.
    pub nodes: u32,
    /// Bytes of memory that their node memories occupy.
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
    /// The interface that its programs have, as NAMESPACE:NAME, or the socket at which they connect.
    pub interface: Option<String>,
    /// The worker that drives its end.
    pub worker: Option<u32>,
    /// Bytes of memory that its node memory occupies.
    pub memory: u64,
    /// Bytes of the other nodes' memory that its workers may be charged for, at most: pages that they read before
    /// they were written. A bound on the memory of the node's workers has to leave room for them.
    #[serde(default)]
    pub chargeable: u64,
    /// Frames that it and other namespaces sent each other past their workers, if it may do so.
    pub shortcut: Option<CrossedView>,
}

/// Frames that took the shortcut through the kernel, from one namespace of a VNI to another. Segments of up to 64
/// KiB count as one.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct CrossedView {
    /// Frames that the node sent.
    pub sent: u64,
    /// Frames that the node received.
    pub received: u64,
}

/// A node's counts of its traffic with another node of its VNI.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct TalkView {
    /// The node that has counted.
    pub node: String,
    /// The other node.
    pub other: String,
    /// Frames sent to the other.
    pub sent: u64,
    /// Frames received from the other.
    pub received: u64,
    /// Frames not sent because the other had not read a whole ring of them.
    pub ring_full: u64,
    /// Frames not sent because the other had not read all that one node may have of this node's pool.
    pub over_quota: u64,
    /// Frames not sent because the pool was full.
    pub pool_full: u64,
    /// How often the node took back everything from the other, which had read nothing for a second.
    pub taken_back: u64,
    /// Frames received from the other and dropped because their source address is not the other's.
    #[serde(default)]
    pub forged: u64,
}

/// The result of removing a node.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Removed {
    /// The result in a sentence.
    pub sentence: String,
}

/// A worker.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct WorkerView {
    /// Its number, which is never given again.
    pub worker: u32,
    /// Process ID.
    pub pid: u32,
    /// Name of the node that it serves.
    pub node: String,
    /// `starting`, `prepares`, `drives`, `stands by`, `staged`, `idle` or `leaves`.
    pub is: String,
    /// The NICs that it drives.
    pub drives: Vec<String>,
    /// The program that was started.
    pub binary: String,
    /// The node's upgrade that it came with.
    pub generation: u32,
    /// Frames that it has received.
    pub received: u64,
    /// Frames that it has sent.
    pub sent: u64,
    /// Numbers of frames that were passed over. Of those that came later, `late` counts the frames.
    pub missing: u64,
    /// Numbered frames that came twice or late.
    pub late: u64,
    /// Frames that the node's TAP did not take, or that came from it and no card could send; of a node on a VNI, all that did
    /// not cross.
    pub refused: u64,
    /// Frames of a node on a VNI that did not cross, by reason; no reason for which there was none.
    #[serde(default)]
    pub dropped: BTreeMap<String, u64>,
    /// Frames that were dropped because a handover was to drop what was in flight.
    #[serde(default)]
    pub dropped_by_order: u64,
    /// Confinement that it lacks.
    pub unconfined: Vec<String>,
}

/// A NIC.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct NicView {
    /// Name of the NIC, as the configuration has it.
    pub name: String,
    /// The device, as the configuration names it.
    pub device: String,
    /// Name of the node to which it belongs.
    pub node: String,
    /// The worker that drives it.
    pub worker: Option<u32>,
    /// `driven`, `changes hands`, `is being closed`, `parked`, `waits for a worker`, `gone` or `not open`.
    pub is: String,
    /// `up` or `down`, as its driver found its link within the last two seconds; nothing while no worker drives it. A worker
    /// from before 2026-11-29 looks only until the link is up once. The same of the Linux interface for which an end stands, and
    /// of a namespace's that has the shortcut.
    pub link: Option<String>,
    /// How often its lease was taken.
    pub epoch: u32,
    /// How often it was taken and driven.
    pub relays: u64,
    /// For how many ns no worker drove it when it last changed hands; until its link was up, if the card was started anew.
    pub pause_ns: Option<u64>,
    /// When its present driver began to drive, in ns of `CLOCK_MONOTONIC`; when its link was up, if it started the card anew.
    pub driving_at_ns: Option<u64>,
    /// Why no worker drives it, or why the last relay did not end as intended.
    pub trouble: Option<String>,
    /// The node that gets it if the node that has it is lost.
    pub standby: Option<String>,
    /// How it came to the node that has it, if it came there by itself.
    pub failed_over: Option<FailOver>,
    /// Frames that the kernel dropped between the worker and a namespace's interface that has the shortcut, since that was
    /// made, by reason.
    #[serde(default)]
    pub dropped_by_kernel: BTreeMap<String, u64>,
}

impl NicView {
    /// Returns what it is, in words.
    pub fn state(&self) -> String {
        let is_down = self.is == "driven" && self.link.as_deref() == Some("down");
        if is_down { format!("{}, link down", self.is) } else { self.is.clone() }
    }
}

/// The stand-by node of a NIC.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Standby {
    /// Its name; none for no stand-by node.
    pub node: Option<String>,
}

/// The counters of a NIC's driver.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Counts {
    /// Name of the NIC.
    pub nic: String,
    /// The worker that counted.
    pub worker: u32,
    /// Names and values, in the driver's order.
    pub counts: Vec<(String, u64)>,
}

/// How a node's driver state travels to its successor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum DriverStateBy {
    /// The successor reads it where it lies.
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
    /// How the driver state travels; by default in place.
    pub state: Option<DriverStateBy>,
}

/// A program for the daemon to go on as.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Replace {
    /// Its path from /; by default that of the daemon's own program, whose file may be another by now.
    #[schema(value_type = Option<String>)]
    pub with: Option<std::path::PathBuf>,
}

/// The result of replacing the daemon.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Replaced {
    /// Version of the program.
    pub version: String,
    /// The result in a sentence.
    pub sentence: String,
}

/// A program to start ahead of an upgrade.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Staging {
    /// The program that the upgrade will want; by default the one that the node's workers are now, as its file is now.
    #[schema(value_type = Option<String>)]
    pub with: Option<std::path::PathBuf>,
}

/// A way for a NIC to change hands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    /// Only the right to drive moves.
    Keep,
    /// The new owner's queue is up before traffic is steered to it.
    Mbb,
    /// Ring bases, cursors and interrupt are written anew, and nothing else.
    Repoint,
    /// The card is reset and started.
    Cold,
}

/// The fate of frames that the old owner has not handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Inflight {
    /// The old owner handles them before it lets go.
    Deliver,
    /// They are counted (`dropped_by_order` of the old owner's worker), wiped out, and never seen again.
    Drop,
}

/// A handover.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Give {
    /// The node that is to have it.
    pub to: String,
    /// The method; by default the best that card and trust allow.
    pub method: Option<Method>,
    /// The fate of frames in flight; by default `deliver`.
    pub inflight: Option<Inflight>,
    /// How the driver state travels; by default in place.
    pub state: Option<DriverStateBy>,
}

/// How one relay has settled.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Settled {
    /// Name of the NIC.
    pub nic: String,
    /// Whether it went where it was to go.
    pub done: bool,
    /// The worker that drives now.
    pub worker: Option<u32>,
    /// Pid of that worker.
    pub pid: Option<u32>,
    /// Node of that worker.
    pub node: Option<String>,
    /// The method of the relay.
    pub method: Method,
    /// Why this method.
    pub because: String,
    /// For how many ns no worker drove, by the stamps of giver and taker.
    pub pause_ns: Option<u64>,
    /// The result in a sentence.
    pub sentence: String,
}

/// How an upgrade or a handover has settled.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Relayed {
    /// The relays, NIC by NIC.
    pub relays: Vec<Settled>,
    /// The result in a sentence.
    pub sentence: String,
}

/// The result of ending a capture.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Ended {
    /// The result in a sentence.
    pub sentence: String,
}

/// The result of stopping everything.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Stopped {
    /// Number of workers that were ended.
    pub workers: u32,
    /// The result in a sentence.
    pub sentence: String,
}

/// Why a request was not carried out.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Refused {
    /// The reason, in a sentence.
    pub error: String,
    /// The relays that had settled by then, NIC by NIC.
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
