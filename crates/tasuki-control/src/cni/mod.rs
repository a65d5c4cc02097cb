//! A plugin of the Container Network Interface: a runtime starts it, and a container's interface becomes a node.
//! Comments with a § cite the specification, version 1.1.0.
//!
//! The plugin keeps no state. A node has the container, by its runtime's name for it (`container` in
//! [`config::Node`](crate::config::Node)), and the daemon keeps that.
//!
//! | module       | contents                                                 |
//! |--------------|----------------------------------------------------------|
//! | `call`       | what a runtime asks: its environment, its input          |
//! | `network`    | the network configuration, and the node that it asks for |
//! | `attachment` | a container's interface, and its namespace               |
//! | `ipam`       | the plugin that assigns addresses                        |
//! | `daemon`     | the daemon, asked with patience                          |
//! | `check`      | what a container's interface should have, and has        |
//!
//! netavark's plugin ([`netavark`](crate::netavark)) is another front of the same.

pub mod attachment;
pub mod call;
mod check;
pub mod daemon;
pub mod ipam;
pub mod network;

use std::io::Write;
use std::process::ExitCode;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::api::types::{NicView, NodeView};
use crate::config::StationAddress;
use attachment::{is_gone, prepare};
use call::{Call, Command, VERSIONS};
use daemon::{Daemon, NotAdded};
use ipam::{Assigned, Ipam};
use network::Network;

/// Codes of failures (§5, Error; §2, STATUS).
pub mod code {
    pub const VERSION: u32 = 1;
    pub const UNSUPPORTED: u32 = 2;
    pub const UNKNOWN_CONTAINER: u32 = 3;
    pub const ENVIRONMENT: u32 = 4;
    pub const INPUT: u32 = 5;
    pub const NO_JSON: u32 = 6;
    pub const CONFIGURATION: u32 = 7;
    pub const AGAIN: u32 = 11;
    pub const NOT_AVAILABLE: u32 = 50;
    pub const LIMITED: u32 = 51;
    /// All else; ours to choose.
    pub const OTHER: u32 = 100;
}

/// Why a call failed, as its runtime is told.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    code: u32,
    /// What was found, in a sentence.
    msg: String,
    /// What to do about it.
    #[serde(default)]
    details: String,
}

impl Failure {
    /// Makes a failure of a sentence that says what was found, and behind a semicolon what to do. Runtimes put the two
    /// together again.
    pub fn new(code: u32, sentence: impl Into<String>) -> Self {
        let sentence = sentence.into();
        let (msg, details) = sentence.split_once("; ").unwrap_or((&sentence, ""));
        Failure { code, msg: msg.to_owned(), details: details.to_owned() }
    }

    /// Puts the sentence together again, for those who know no codes.
    pub fn sentence(&self) -> String {
        let parts = [&self.msg[..], &self.details].into_iter().filter(|part| !part.is_empty());
        parts.collect::<Vec<_>>().join("; ")
    }
}

/// The plugin's program: does what the environment and the standard input ask, and prints the answer.
pub fn main() -> ExitCode {
    let call = Call::read(|name| std::env::var_os(name), std::io::stdin());
    let version = call.as_ref().map_or(VERSIONS[VERSIONS.len() - 1], |call| call.version);
    let (answer, ended) = match call.and_then(|call| answer(&call)) {
        Ok(answer) => (answer, ExitCode::SUCCESS),
        Err(failure) => {
            let mut answer = serde_json::to_value(failure).expect("plain data");
            answer["cniVersion"] = json!(version);
            (Some(answer), ExitCode::FAILURE)
        }
    };
    // A runtime that does not listen has its answer by the status.
    let _ = answer.map_or(Ok(()), |answer| writeln!(std::io::stdout(), "{answer:#}"));
    ended
}

fn answer(call: &Call) -> Result<Option<Value>, Failure> {
    match call.command {
        Command::Version => Ok(Some(json!({ "cniVersion": call.version, "supportedVersions": VERSIONS }))),
        Command::Add => add(call).map(Some),
        Command::Delete => delete(call).map(|()| None),
        Command::Check => check::check(call).map(|()| None),
        Command::Collect => collect(call).map(|()| None),
        Command::Status => status(call).map(|()| None),
    }
}

/// `ADD` (§2): makes the container's interface, a node.
fn add(call: &Call) -> Result<Value, Failure> {
    let network = Network::read(call)?;
    let (container, daemon) = (call.its.key(), Daemon::of(&network));
    if call.input.contains_key("prevResult") {
        let sentence = "tasuki-cni makes the container's interface, and another plugin came before it (prevResult); list tasuki-cni first";
        return Err(Failure::new(code::CONFIGURATION, sentence));
    }
    network.node(&call.its, &call.input, &Assigned::default())?;
    let namespace = call.its.free_namespace(&daemon)?;
    // Nothing is assigned while no daemon is at work.
    match daemon.node_of(&container)? {
        // The container was stopped while no daemon was at work, and is started anew.
        Some(node) if node.netns.as_deref().is_some_and(is_gone) => {
            daemon.remove(&container)?;
            Ipam::of(call)?.map_or(Ok(()), |ipam| ipam.ask("DEL").map(drop))?;
        }
        Some(node) => return Err(call.its.is_there(&node.name)),
        None => {}
    }
    let ipam = Ipam::of(call)?;
    let assigned = match &ipam {
        Some(ipam) => ipam.assign()?,
        None => Assigned::of_runtime(&network.ips)?,
    };
    prepare(&namespace, &assigned);
    let node = network.node(&call.its, &call.input, &assigned).map_err(|failure| NotAdded { failure, is_gone: true });
    let made = node.and_then(|node| daemon.add(&node).map(|()| node));
    match made {
        Ok(node) => Ok(result(call, &network, &assigned, node.mac())),
        Err(NotAdded { failure, is_gone }) => {
            // While the node may be there, its address is not free. The runtime asks for DEL in any case (§3).
            ipam.iter().filter(|_| is_gone).for_each(|ipam| drop(ipam.ask("DEL")));
            Err(failure)
        }
    }
}

/// Returns the result of `ADD` (§5).
fn result(call: &Call, network: &Network, assigned: &Assigned, mac: [u8; 6]) -> Value {
    let mut interface =
        json!({ "name": call.its.ifname, "mac": StationAddress(mac).to_string(), "sandbox": call.its.netns });
    if call.is_at_least("1.1.0") {
        interface["mtu"] = network.mtu().into();
    }
    let ips = assigned.ips.iter().map(|ip| {
        let mut its = json!({ "address": ip.address.to_string(), "interface": 0 });
        if let Some(gateway) = ip.gateway {
            its["gateway"] = json!(gateway);
        }
        if !call.is_at_least("1.0.0") {
            its["version"] = json!(if ip.address.ip.is_ipv4() { "4" } else { "6" });
        }
        its
    });
    // The network's words count more than those of the plugin that assigns addresses, as with the reference plugins.
    let dns = network.dns.as_ref().or(assigned.dns.as_ref()).cloned().unwrap_or_else(|| json!({}));
    json!({
        "cniVersion": call.version,
        "interfaces": [interface],
        "ips": ips.collect::<Vec<_>>(),
        "routes": assigned.routes,
        "dns": dns,
    })
}

/// `DEL` (§2): removes the node, if it is there, and then frees its addresses.
fn delete(call: &Call) -> Result<(), Failure> {
    Daemon::of(&Network::to_clean_up(&call.its.network, &call.input)?).remove(&call.its.key())?;
    Ipam::of(call)?.map_or(Ok(()), |ipam| ipam.ask("DEL").map(drop))
}

/// `GC` (§2): removes the nodes of this network whose containers are not among the valid ones.
fn collect(call: &Call) -> Result<(), Failure> {
    #[derive(Deserialize)]
    struct Attachment {
        #[serde(rename = "containerID")]
        id: String,
        ifname: String,
    }
    // A runtime without containers writes null, as libcni does for an empty list. A call without any list says nothing
    // about containers (`cnitool gc` calls DEL for those that it knows, and then so).
    // The second key is that of the first text of the specification.
    let keys = ["cni.dev/valid-attachments", "cni.dev/attachments"];
    let named = keys.iter().find_map(|key| call.input.get_key_value(*key)).map(|(key, list)| {
        let list = serde_json::from_value::<Option<Vec<Attachment>>>(list.clone());
        list.map_err(|error| {
            let sentence = format!("{key} cannot be read ({error}); the runtime has to mend that");
            Failure::new(code::CONFIGURATION, sentence)
        })
    });
    let valid: Option<Vec<String>> = named.transpose()?.map(|list| {
        list.into_iter().flatten().map(|it| format!("{}/{}/{}", call.its.network, it.id, it.ifname)).collect()
    });
    let daemon = Daemon::of(&Network::to_clean_up(&call.its.network, &call.input)?);
    let ours = call.its.keys_of_network();
    let is_stale = |container: &String| {
        container.starts_with(&ours) && valid.as_ref().is_some_and(|valid| !valid.contains(container))
    };
    let stale = daemon.containers().map(|containers| containers.into_iter().filter(is_stale));
    // It goes on after an error, and reports the first one.
    let removed = stale.map(|stale| stale.map(|container| daemon.remove(&container)).collect::<Vec<_>>());
    removed.and_then(|removed| removed.into_iter().collect::<Result<(), Failure>>())?;
    // As with DEL: an address is free once no interface has it any more.
    Ipam::of(call)?.map_or(Ok(()), |ipam| ipam.ask("GC").map(drop))
}

/// `STATUS` (§2): whether `ADD` would find all that it needs.
fn status(call: &Call) -> Result<(), Failure> {
    let network = Network::read(call)?;
    let unavailable = |failure| Failure { code: code::NOT_AVAILABLE, ..failure };
    let daemon = Daemon::of(&network);
    let (nodes, nics) = daemon.nodes_now().and_then(|nodes| Ok((nodes, daemon.nics_now()?))).map_err(unavailable)?;
    if let Some(trouble) = why_none_works(&nodes, &nics, &call.its.keys_of_network()) {
        let sentence = format!("no container of network {} has a worker at work: {trouble}", call.its.network);
        return Err(Failure::new(code::LIMITED, sentence));
    }
    Ipam::of(call)?.map_or(Ok(()), |ipam| ipam.ask("STATUS").map(drop))
}

/// Returns the trouble of a container of this network, if its containers have no worker at work. That of a node alone does not
/// count: a container can remove its own interface, and one that does says nothing about the next one. Nor does a node whose
/// namespace is gone: it can have no worker.
fn why_none_works(nodes: &[NodeView], nics: &[NicView], of: &str) -> Option<String> {
    let is_its = |node: &&NodeView| node.container.as_ref().is_some_and(|its| its.starts_with(of));
    let there: Vec<_> = nodes.iter().filter(is_its).filter(|it| !it.netns.as_deref().is_some_and(is_gone)).collect();
    let works = |node: &&NodeView| nics.iter().any(|nic| nic.node == node.name && nic.worker.is_some());
    if there.iter().any(|node| works(node) || node.trouble.is_none()) {
        return None;
    }
    there.first()?.trouble.clone()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_container_without_its_interface_does_not_make_its_network_unready() {
        let node = |name: &str, trouble: Option<&str>| NodeView {
            name: name.to_owned(),
            trouble: trouble.map(str::to_owned),
            container: Some(format!("lan/{name}/eth0")),
            netns: Some("/proc/self/ns/net".to_owned()),
            ..serde_json::from_value(json!({ "name": "", "work": "", "workers": [], "nics": [], "generation": 0 }))
                .unwrap()
        };
        let end = |name: &str, worker: Option<u32>| {
            let text =
                json!({ "name": "", "device": "", "node": name, "worker": worker, "is": "", "epoch": 1, "relays": 1 });
            serde_json::from_value::<NicView>(text).unwrap()
        };
        let why = |nodes: &[NodeView], nics: &[NicView]| why_none_works(nodes, nics, "lan/");
        let gone = || node("a", Some("its interface is gone"));
        assert_eq!(why(&[gone()], &[end("a", Some(1))]), None, "its worker is at work");
        assert_eq!(why(&[gone()], &[end("a", None)]).as_deref(), Some("its interface is gone"));
        assert_eq!(why(&[gone(), node("b", None)], &[end("a", None), end("b", None)]), None, "it has just been added");
        let ended = NodeView { netns: Some("/nowhere/netns".to_owned()), ..gone() };
        assert_eq!(why(&[ended], &[end("a", None)]), None, "no worker could be there");
        assert_eq!((why(&[], &[]), why_none_works(&[gone()], &[], "other/")), (None, None));
    }

    #[test]
    fn a_sentence_becomes_what_was_found_and_what_to_do() {
        let failure = Failure::new(7, "there is no VNI x; name one; or none");
        assert_eq!((&failure.msg[..], &failure.details[..]), ("there is no VNI x", "name one; or none"));
        assert_eq!(Failure::new(7, "nothing helps").details, "");
    }
}
