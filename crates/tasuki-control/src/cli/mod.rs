//! The subcommands that talk to the daemon.

pub mod capture;
pub mod config;
pub mod doctor;
mod show;
pub mod top;
pub mod up;
pub mod upgrade;
pub mod vm;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{ArgGroup, Args, Subcommand, ValueEnum};
use hyper::Method as Verb;
use serde_json::{Value, json};

use crate::api::client;
use crate::api::types::{Event, Plan};
use crate::config::Spoof;
use crate::log::plain;
use crate::place;

/// How to reach the daemon, and how to show its answers.
#[derive(Debug, Clone, Args)]
pub struct Reach {
    /// The daemon's runtime directory [default: TASUKI_DIR, or /run/tasuki; not as root $XDG_RUNTIME_DIR/tasuki].
    #[arg(long, value_name = "DIR", global = true)]
    pub dir: Option<PathBuf>,
    /// Print JSON, for scripts.
    #[arg(long, global = true)]
    pub json: bool,
}

/// Subcommands about workers.
#[derive(Debug, Subcommand)]
pub enum Workers {
    /// List all workers, with their NICs and counters.
    List,
    /// Replace a node's worker by a fresh one while packets flow.
    Upgrade(Upgrade),
    /// Start ahead of an upgrade the program that it will want: the upgrade then takes a worker that is ready.
    Stage(Stage),
    /// End the worker that is staged for a node.
    Unstage {
        /// Name of the node.
        node: String,
    },
}

/// Subcommands about nodes.
#[derive(Debug, Subcommand)]
pub enum Nodes {
    /// List all nodes, with their work, workers and NICs.
    List,
    /// Add a node while the daemon runs.
    Add(Box<Add>),
    /// End a node's workers, and with them its end of a VNI. The settings that it got by hand are lost.
    Remove {
        /// Name of the node.
        node: String,
    },
}

/// A node that is on a VNI: a network namespace, a program with a memif, a virtual machine, the network behind a Linux
/// interface, or a native program.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("endpoint").required(true).args(["netns", "memif", "vm", "link", "native", "queue_of"])))]
#[command(group(ArgGroup::new("handles").requires("native").args(["work", "program"])))]
pub struct Add {
    /// Name of the node.
    pub node: String,
    /// The network namespace whose programs are to be on the VNI: as `ip netns` calls it, or a path from /, such as
    /// a container's /proc/PID/ns/net.
    #[arg(long, value_name = "NETNS")]
    pub netns: Option<String>,
    /// The socket at which a program on DPDK or VPP connects, as a client of memif.
    #[arg(long, value_name = "SOCKET")]
    pub memif: Option<PathBuf>,
    /// The socket at which a virtual machine's front end connects, by vhost-user (docs/users/connect-a-virtual-machine.md).
    #[arg(long, value_name = "SOCKET")]
    pub vm: Option<PathBuf>,
    /// Microseconds that a frame may wait for others, where many come one by one; by default 250, and 0 for none at all.
    #[arg(long, value_name = "US", conflicts_with = "native")]
    pub latency_us: Option<u32>,
    /// MTU of the interface, in bytes, or of the virtual machine's card: `tasuki vm run` has its guest take it.
    #[arg(long, value_name = "BYTES", conflicts_with_all = ["memif", "link", "native", "queue_of"])]
    pub mtu: Option<u16>,
    /// The Linux interface that is to be on the VNI, with the network behind it: NAME, or NETNS:NAME.
    #[arg(long, value_name = "[NETNS:]NAME")]
    pub link: Option<String>,
    /// The node of whose interface this one drives one more queue, with a worker and a CPU of its own (docs/users/several-cpus.md).
    #[arg(long, value_name = "NODE")]
    pub queue_of: Option<String>,
    /// Number of queues of the interface: nodes with --queue-of drive all but the first.
    #[arg(long, conflicts_with_all = ["memif", "vm", "link", "native", "queue_of"], value_parser = clap::value_parser!(u8).range(1..=8))]
    pub queues: Option<u8>,
    /// The node's program is its worker, which gets the frames itself: name it with --work or --program.
    #[arg(long, requires = "handles")]
    pub native: bool,
    /// The work of the worker: it sends frames back, takes them in, answers ping, or sends numbered frames.
    #[arg(long, value_enum, conflicts_with_all = ["netns", "memif", "vm", "link", "queue_of"])]
    pub work: Option<NativeWork>,
    /// A program of your own that handles frames (docs/users/own-programs.md).
    #[arg(long, value_name = "PATH", conflicts_with_all = ["netns", "memif", "vm", "link", "queue_of"])]
    pub program: Option<PathBuf>,
    /// Text that only that program understands.
    #[arg(long, default_value = "", hide_default_value = true, requires = "program")]
    pub options: String,
    /// Frames that a source sends a second; 0 for as many as possible.
    #[arg(long, default_value_t = 0, hide_default_value = true, requires = "work")]
    pub rate: u64,
    /// Bytes of each frame, without check sequence.
    #[arg(long, default_value_t = 60, hide_default_value = true, requires = "work")]
    pub size: u16,
    /// The station address that a source sends to; by default all.
    #[arg(long, value_name = "MAC", requires = "work")]
    pub to: Option<String>,
    /// The number by which the client asks for the memif port.
    #[arg(long, default_value_t = 0, conflicts_with_all = ["netns", "vm", "link", "native", "queue_of"])]
    pub id: u32,
    /// The file with the secret that the memif client must know besides, at most 23 bytes: every user can read a
    /// command line.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["netns", "vm", "link", "native", "queue_of"])]
    pub secret_file: Option<PathBuf>,
    /// The VNI: Ethernet between the nodes that name the same one.
    #[arg(long, default_value = "lan")]
    pub vni: String,
    /// Name of the interface that the programs get; by default the name of the VNI.
    #[arg(long, value_name = "NAME", conflicts_with_all = ["memif", "vm", "link", "native", "queue_of"])]
    pub interface: Option<String>,
    /// The interface's address, such as 192.0.2.1/24, once for each; by default it is yours to set. With --work answer:
    /// the address that it answers for.
    #[arg(long, conflicts_with_all = ["memif", "vm", "link", "queue_of"])]
    pub address: Vec<String>,
    /// Its station address; by default one derived from the node's name.
    #[arg(long)]
    pub mac: Option<String>,
    /// Whether it may send from addresses that are not its own, as a bridge does [default: check; allow with --memif,
    /// --vm and --link].
    #[arg(long, value_enum)]
    pub spoof: Option<Spoof>,
    /// KiB of memory for frames that the node has sent and that are not read yet [default: 2048].
    #[arg(long, value_name = "KIB")]
    pub pool_kib: Option<u32>,
    /// Megabits a second that it may send: more waits.
    #[arg(long, value_name = "MBIT", conflicts_with = "native")]
    pub send_mbit: Option<u32>,
    /// Thousands of frames a second that it may send: more waits.
    #[arg(long, value_name = "KPPS", conflicts_with = "native")]
    pub send_kpps: Option<u32>,
    /// Megabits a second that it may receive: more is dropped and counted.
    #[arg(long, value_name = "MBIT", conflicts_with = "native")]
    pub receive_mbit: Option<u32>,
    /// Thousands of frames a second that it may receive: more is dropped and counted.
    #[arg(long, value_name = "KPPS", conflicts_with = "native")]
    pub receive_kpps: Option<u32>,
    /// The CPU that its workers stay on.
    #[arg(long)]
    pub cpu: Option<u32>,
    /// The nice value of its workers while they may sleep: -20 (before all programs) to 0 (as they) [default: -20; 0
    /// for a program of your own].
    #[arg(long, allow_negative_numbers = true)]
    pub nice: Option<i32>,
    /// Keep no second worker on stand-by, should the first one die.
    #[arg(long)]
    pub no_standby: bool,
    /// Send all its frames by its worker, also those from and to other namespaces, which the kernel would pass on
    /// faster.
    #[arg(long, conflicts_with_all = ["memif", "vm", "link", "native", "queue_of"])]
    pub no_shortcut: bool,
}

/// The work of a native node's worker, unless it is a program of your own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum NativeWork {
    /// Sends each frame back to where it came from.
    Echo,
    /// Takes frames in, and accounts for numbered ones.
    Sink,
    /// Sends numbered frames.
    Source,
    /// Answers ARP and ping for --address.
    Answer,
}

/// Subcommands about VNIs.
#[derive(Debug, Subcommand)]
pub enum Vnis {
    /// List all VNIs: how many nodes each has, and how much memory they take.
    List,
    /// List the nodes on a VNI, with their station addresses.
    Table {
        /// Name of the VNI.
        vni: String,
    },
    /// Show the frames that its nodes sent each other, and those that they could not send.
    Stats {
        /// Name of the VNI.
        vni: String,
    },
}

/// An upgrade.
#[derive(Debug, Args)]
pub struct Upgrade {
    /// Name of the node.
    pub node: String,
    /// Another program than the one that its workers are now.
    #[arg(long, value_name = "BINARY")]
    pub with: Option<PathBuf>,
    /// How the successor gets the driver state: it reads it in place, or from the daemon's store.
    #[arg(long, value_enum)]
    pub state: Option<State>,
}

/// A program to start ahead of an upgrade.
#[derive(Debug, Args)]
pub struct Stage {
    /// Name of the node.
    pub node: String,
    /// The program that the upgrade will want; by default the one that its workers are now, as its file is now.
    #[arg(long, value_name = "BINARY")]
    pub with: Option<PathBuf>,
}

/// See [`crate::api::types::DriverStateBy`].
#[derive(Debug, Clone, Copy, ValueEnum)]
#[expect(missing_docs, reason = "said there")]
pub enum State {
    Place,
    Store,
}

/// See [`crate::api::types::Method`].
#[derive(Debug, Clone, Copy, ValueEnum)]
#[expect(missing_docs, reason = "said there")]
pub enum How {
    Keep,
    Repoint,
    Mbb,
    Cold,
}

/// See [`crate::api::types::Inflight`].
#[derive(Debug, Clone, Copy, ValueEnum)]
#[expect(missing_docs, reason = "said there")]
pub enum Inflight {
    Deliver,
    Drop,
}

/// A handover.
#[derive(Debug, Args)]
pub struct Give {
    /// Name of the NIC.
    pub nic: String,
    /// The node that is to have it.
    #[arg(long, value_name = "NODE")]
    pub to: String,
    /// The method; by default the best that card and trust allow.
    #[arg(long, value_enum)]
    pub method: Option<How>,
    /// The fate of frames that the old owner has not handled.
    #[arg(long, value_enum)]
    pub inflight: Option<Inflight>,
    /// How the new owner gets the driver state: it reads it in place, or from the daemon's store.
    #[arg(long, value_enum)]
    pub state: Option<State>,
}

/// The stand-by node of a NIC.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("standby").required(true).args(["node", "none"])))]
pub struct Standby {
    /// Name of the NIC.
    pub nic: String,
    /// The node that is to get it if the node that has it is lost, or removed.
    #[arg(long)]
    pub node: Option<String>,
    /// Name none: the NIC stays with its node.
    #[arg(long)]
    pub none: bool,
}

/// A configuration.
#[derive(Debug, Args)]
pub struct Configuration {
    /// The file that it is in; by default the one that tasukid began with.
    pub file: Option<PathBuf>,
    /// Refuse, unless this is still the generation of the present configuration (tasuki plan says it).
    #[arg(long, value_name = "NUMBER")]
    pub generation: Option<u64>,
}

impl Configuration {
    fn to_json(&self) -> Result<Value> {
        let text = self.file.as_ref().map(|file| {
            std::fs::read_to_string(file)
                .with_context(|| format!("the configuration {} cannot be read", file.display()))
        });
        Ok(json!({ "path": absolute(self.file.as_ref())?, "text": text.transpose()?, "generation": self.generation }))
    }
}

/// A request to the daemon.
#[derive(Debug)]
pub enum Asked {
    /// The whole status.
    Status,
    Nodes(Nodes),
    Vnis(Vnis),
    Workers(Workers),
    NicList,
    /// A handover.
    Give(Give),
    /// Which node stands by for a NIC.
    Standby(Standby),
    /// The counters of this NIC's driver.
    Counts(String),
    /// The events after event `since`.
    Events {
        /// Number of that event.
        since: u64,
        /// Whether to go on with those that come.
        follow: bool,
    },
    /// The steps to a configuration.
    Plan(Configuration),
    /// Taking them.
    Apply(Configuration),
    /// The end of everything.
    Stop,
}

/// Interval at which a follower asks for events: the API has no answer that waits for the next one.
const FOLLOW_EVERY: Duration = Duration::from_millis(200);

fn word(value: Option<impl ValueEnum>) -> Value {
    value.and_then(|value| value.to_possible_value()).map_or(Value::Null, |value| json!(value.get_name()))
}

/// Returns a program's path, from /.
fn absolute(program: Option<&PathBuf>) -> Result<Option<PathBuf>> {
    program.map(std::path::absolute).transpose().context("that program has no path")
}

/// Encodes a name as a part of an address.
pub(crate) fn part(name: &str) -> String {
    name.bytes()
        .map(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' => char::from(byte).to_string(),
            other => format!("%{other:02X}"),
        })
        .collect()
}

impl Add {
    /// Returns the node's work, as a configuration has it.
    fn work_to_json(&self, secret: &str) -> Value {
        let absolute = |path: &PathBuf| std::path::absolute(path).unwrap_or(path.clone());
        if let Some(socket) = &self.memif {
            return json!({ "memif": { "socket": absolute(socket), "id": self.id, "secret": secret } });
        }
        if let Some(socket) = &self.vm {
            let mut work = json!({ "vm": { "socket": absolute(socket) } });
            if let Some(mtu) = self.mtu {
                work["vm"]["mtu"] = json!(mtu);
            }
            return work;
        }
        if let Some(link) = &self.link {
            let (netns, name) =
                link.rsplit_once(':').map_or((None, link.as_str()), |(netns, name)| (Some(netns), name));
            return json!({ "interface": { "netns": netns, "name": name } });
        }
        if let Some(of) = &self.queue_of {
            return json!({ "queue": { "of": of } });
        }
        if let Some(program) = &self.program {
            return json!({ "program": { "path": absolute(program), "options": self.options } });
        }
        if self.native {
            return match self.work {
                Some(NativeWork::Sink) => json!("sink"),
                Some(NativeWork::Source) => {
                    let Add { rate, size, to, .. } = self;
                    json!({ "source": { "rate": rate, "size": size, "to": to } })
                }
                Some(NativeWork::Answer) => {
                    // One address: it has no programs that would look for other stations.
                    let address = self.address.join(", ");
                    json!({ "answer": { "address": address.split('/').next() } })
                }
                Some(NativeWork::Echo) | None => json!("echo"),
            };
        }
        let name = self.interface.as_ref().unwrap_or(&self.vni);
        let mut work = json!({ "tap": { "netns": self.netns, "name": name, "shortcut": !self.no_shortcut } });
        if !self.address.is_empty() {
            work["tap"]["address"] = json!(self.address);
        }
        if let Some(mtu) = self.mtu {
            work["tap"]["mtu"] = json!(mtu);
        }
        if let Some(queues) = self.queues {
            work["tap"]["queues"] = json!(queues);
        }
        work
    }

    /// Returns the node, as a configuration has it.
    fn to_json(&self) -> Result<Value> {
        let Add { node, vni, mac, spoof, pool_kib, latency_us, cpu, nice, no_standby, .. } = self;
        let secret = self.secret_file.as_ref().map_or(Ok(String::new()), |path| {
            std::fs::read_to_string(path).with_context(|| format!("the secret in {} cannot be read", path.display()))
        })?;
        let limit = |mbit: Option<u32>, kpps: Option<u32>| {
            (mbit.is_some() || kpps.is_some()).then(|| json!({ "mbit": mbit, "kpps": kpps }))
        };
        let limits = [("send", self.send_mbit, self.send_kpps), ("receive", self.receive_mbit, self.receive_kpps)];
        let limits = limits.into_iter().filter_map(|(way, mbit, kpps)| Some((way.to_owned(), limit(mbit, kpps)?)));
        let limits = Some(limits.collect::<serde_json::Map<_, _>>()).filter(|limits| !limits.is_empty());
        let work = self.work_to_json(secret.trim_end_matches(['\n', '\r']));
        let mut node = json!({
            "name": node, "vni": vni, "mac": mac, "spoof": spoof, "pool_kib": pool_kib, "limits": limits, "cpu": cpu, "nice": nice, "standby": !no_standby, "work": work,
        });
        // A daemon from before this setting would refuse its name.
        if let Some(latency_us) = latency_us {
            node["latency_us"] = json!(latency_us);
        }
        Ok(node)
    }
}

/// Sends the request, and prints the answer.
pub fn run(reach: &Reach, asked: &Asked) -> Result<()> {
    let folder = reach.dir.clone().unwrap_or_else(place::usual);
    let get = |address: &str| client::ask(&folder, Verb::GET, address, None);
    let post = |address: &str, body: Value| client::ask(&folder, Verb::POST, address, Some(&body));
    let value = match asked {
        Asked::Nodes(Nodes::List) => get("/v1/nodes")?,
        Asked::Nodes(Nodes::Add(add)) => post("/v1/nodes", add.to_json()?)?,
        Asked::Nodes(Nodes::Remove { node }) => {
            client::ask(&folder, Verb::DELETE, &format!("/v1/nodes/{}", part(node)), None)?
        }
        Asked::Vnis(Vnis::List) => get("/v1/vnis")?,
        Asked::Vnis(Vnis::Table { vni }) => get(&format!("/v1/vnis/{}/table", part(vni)))?,
        Asked::Vnis(Vnis::Stats { vni }) => get(&format!("/v1/vnis/{}/stats", part(vni)))?,
        Asked::Status => get("/v1/status")?,
        Asked::Workers(Workers::List) => get("/v1/workers")?,
        Asked::Workers(Workers::Upgrade(Upgrade { node, with, state })) => {
            let body = json!({ "with": absolute(with.as_ref())?, "state": word(*state) });
            post(&format!("/v1/nodes/{}/upgrade", part(node)), body)?
        }
        Asked::Workers(Workers::Stage(Stage { node, with })) => {
            post(&format!("/v1/nodes/{}/stage", part(node)), json!({ "with": absolute(with.as_ref())? }))?
        }
        Asked::Workers(Workers::Unstage { node }) => {
            client::ask(&folder, Verb::DELETE, &format!("/v1/nodes/{}/stage", part(node)), None)?
        }
        Asked::NicList => get("/v1/nics")?,
        Asked::Give(Give { nic, to, method, inflight, state }) => {
            let body = json!({ "to": to, "method": word(*method), "inflight": word(*inflight), "state": word(*state) });
            post(&format!("/v1/nics/{}/give", part(nic)), body)?
        }
        Asked::Standby(Standby { nic, node, .. }) => {
            post(&format!("/v1/nics/{}/standby", part(nic)), json!({ "node": node }))?
        }
        Asked::Counts(nic) => get(&format!("/v1/nics/{}/counts", part(nic)))?,
        Asked::Events { since, follow: true } => return follow(&folder, *since, reach.json),
        Asked::Events { since, .. } => get(&format!("/v1/events?since={since}"))?,
        Asked::Plan(configuration) => post("/v1/plan", configuration.to_json()?)?,
        Asked::Apply(configuration) => apply(&folder, configuration)?,
        Asked::Stop => up::stop(&folder)?,
    };
    let text = match reach.json {
        true => serde_json::to_string_pretty(&value)? + "\n",
        false => show::show(asked, value)?.lines().map(|line| plain(line, usize::MAX) + "\n").collect(),
    };
    write(&text).map(|_| ())
}

/// Applies a configuration. Returns the answer.
fn apply(folder: &Path, configuration: &Configuration) -> Result<Value> {
    let mut body = configuration.to_json()?;
    if configuration.generation.is_none() {
        // Of two that are applied at once, the second is refused.
        let plan: Plan = show::read(client::ask(folder, Verb::POST, "/v1/plan", Some(&body))?)?;
        body["generation"] = json!(plan.generation);
    }
    client::ask(folder, Verb::POST, "/v1/apply", Some(&body))
}

/// Writes to standard output. Returns whether it has a reader.
fn write(text: &str) -> Result<bool> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Ok(()) => Ok(true),
        // A reader that has closed the pipe knows enough.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(error).context("tasukid's answer cannot be written"),
    }
}

/// Prints events as they come, one a line, also those of the daemons that follow. Ends when it has no reader.
fn follow(folder: &Path, mut since: u64, as_json: bool) -> Result<()> {
    let mut goes_on = false;
    loop {
        match client::ask(folder, Verb::GET, &format!("/v1/events?since={since}"), None) {
            Ok(value) => {
                goes_on = true;
                for event in show::read::<Vec<Event>>(value)? {
                    since = event.number;
                    let text = || plain(show::event(&event).trim_end(), usize::MAX);
                    let line = if as_json { serde_json::to_string(&event)? } else { text() } + "\n";
                    if !write(&line)? {
                        return Ok(());
                    }
                }
            }
            // Its daemon may come back: workers go on without one.
            Err(error) if !goes_on => return Err(error),
            Err(_) => {}
        }
        std::thread::sleep(FOLLOW_EVERY);
    }
}
