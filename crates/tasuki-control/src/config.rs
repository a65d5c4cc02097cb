//! The configuration: the nodes and NICs there are. It is one TOML file, and a key or value that means nothing is an
//! error.

mod limits;
mod mistake;
pub mod plan;
pub mod schema;
mod sense;
pub mod written;

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tasuki_relay::message;
use tasuki_shm::vni::node_memory::POOL_PAGES;
use tasuki_tap::Address;
use tasuki_tap::device::Queues;
use utoipa::ToSchema;

use crate::api::roles::Roles;
pub use limits::{Limit, Limits};

pub use crate::endpoint::Kind;
pub use crate::endpoint::interface::Interface;
pub use crate::endpoint::memif::Memif;
pub use crate::endpoint::vm::Vm;

/// Bytes of a frame that a source may send, without check sequence.
const SIZES: std::ops::RangeInclusive<u16> = 60..=1514;
/// KiB of a page of a pool.
const PAGE_KIB: u32 = 4;

/// Why a configuration is refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// It cannot be read.
    #[error("the configuration {} cannot be read ({why}); name one with --config", path.display())]
    Unreadable {
        path: PathBuf,
        /// The kernel's reason.
        why: std::io::Error,
    },
    /// It is not valid TOML, or has unknown keys.
    #[error("{}:{line}: {what}", path.display())]
    Wrong {
        path: PathBuf,
        /// Line of the mistake, from 1.
        line: usize,
        /// The mistake, and the allowed values.
        what: String,
    },
    /// It contradicts itself.
    #[error("{}: {what}", path.display())]
    Senseless {
        path: PathBuf,
        /// The contradiction, and its repair.
        what: String,
    },
}

/// The nodes and NICs of one machine, for tasukid.
#[derive(Debug, Clone, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Settings of the daemon, under `[daemon]`.
    #[serde(default)]
    pub daemon: Daemon,
    /// The users and groups that may ask the daemon, under `[api]`.
    #[serde(default)]
    pub api: Roles,
    /// The nodes, each under `[[node]]`.
    #[serde(default, deserialize_with = "each_cpus_node")]
    pub node: Vec<Node>,
    /// The network cards, each under `[[nic]]`.
    #[serde(default)]
    pub nic: Vec<Nic>,
}

/// Reads nodes, of which those with `cpus` stand for several.
fn each_cpus_node<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Vec<Node>, D::Error> {
    Ok(Vec::<Node>::deserialize(from)?.into_iter().flat_map(Node::for_each_cpu).collect())
}

/// Settings of the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Daemon {
    /// Milliseconds after which a driver that has not looked for work counts as hung.
    #[schema(minimum = 1)]
    pub hang_after_ms: u64,
    /// Milliseconds a giver or a taker may take for its part of a relay.
    #[schema(minimum = 1)]
    pub deadline_ms: u64,
    /// Milliseconds a worker may take to map a NIC and to check that it understands it.
    #[schema(minimum = 1)]
    pub prepare_ms: u64,
    /// Milliseconds for which no worker of its node has driven a NIC, its last one being dead, after which the NIC goes to
    /// its stand-by node.
    #[schema(minimum = 1)]
    pub failover_after_ms: u64,
    /// Whether a node whose workers keep dying waits before the next worker starts.
    pub restart: Restart,
    /// The treatment of a worker whose process cannot be confined as intended.
    pub confine: Confine,
    /// Range of users, of which each node gets one: the first and the last, by number, as 65536-99999.
    #[schema(value_type = String, pattern = "^[0-9]+-[0-9]+$")]
    pub uids: Uids,
    /// The address at which anybody may read the counts for Prometheus (`/metrics`); none by default.
    #[serde(deserialize_with = "listened_at")]
    #[schema(value_type = Option<String>)]
    pub metrics: Option<SocketAddr>,
    /// The default worker program, from `/`; by default `tasuki-worker` beside the daemon, or on the PATH.
    #[schema(value_type = Option<String>, pattern = "^/")]
    pub worker: Option<PathBuf>,
}

fn listened_at<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Option<SocketAddr>, D::Error> {
    let text = String::deserialize(from)?;
    text.parse().map(Some).map_err(|_| {
        serde::de::Error::custom(format!(
            "{text:?} is no address to listen at; write it with a port, as 127.0.0.1:9469"
        ))
    })
}

/// When a dead worker is replaced.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Restart {
    /// After pauses that grow to a second.
    #[default]
    Careful,
    /// At once, always, for operators who kill workers on purpose.
    Always,
}

impl Default for Daemon {
    fn default() -> Self {
        Daemon {
            hang_after_ms: 1000,
            deadline_ms: 1000,
            prepare_ms: 10_000,
            // As long as the longest pause before a fresh worker: five have been tried by then.
            failover_after_ms: 1000,
            restart: Restart::Careful,
            confine: Confine::Strict,
            uids: Uids::default(),
            metrics: None,
            worker: None,
        }
    }
}

/// The treatment of a worker that cannot be confined as docs/design/worker.md says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Confine {
    /// It is not started.
    Strict,
    /// It is started, and `tasuki status` lists the missing restrictions.
    BestEffort,
    /// The daemon confines nothing before the worker begins: for tests whose workers are scripts, and a debugger.
    /// The worker's runtime still confines itself.
    Off,
}

/// Users by number, the first and the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Uids(u32, u32);

impl Default for Uids {
    fn default() -> Self {
        // Neither systemd nor adduser assigns these, and no container gets them (systemd's UIDS-GIDS).
        Uids(65536, 99999)
    }
}

impl TryFrom<String> for Uids {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let ends = text.split_once('-').and_then(|(first, last)| Some((first.parse().ok()?, last.parse().ok()?)));
        match ends {
            Some((first, last)) if 0 < first && first <= last && last < u32::MAX - 1 => Ok(Uids(first, last)),
            _ => Err(format!("{text:?} names no users; write the first and the last, without root, as 65536-99999")),
        }
    }
}

impl From<Uids> for String {
    fn from(Uids(first, last): Uids) -> String {
        format!("{first}-{last}")
    }
}

impl Uids {
    /// Returns whether the range includes a user.
    pub fn has(&self, uid: u32) -> bool {
        (self.0..=self.1).contains(&uid)
    }

    /// Returns all users of the range, from a place that `seed` determines.
    pub fn from(self, seed: u32) -> impl Iterator<Item = u32> {
        let count = self.1 - self.0 + 1;
        (0..count).map(move |step| self.0 + (seed % count + step) % count)
    }
}

impl Daemon {
    pub fn hang_after(&self) -> Duration {
        Duration::from_millis(self.hang_after_ms)
    }

    pub fn deadline(&self) -> Duration {
        Duration::from_millis(self.deadline_ms)
    }

    pub fn prepare(&self) -> Duration {
        Duration::from_millis(self.prepare_ms)
    }

    pub fn failover_after(&self) -> Duration {
        Duration::from_millis(self.failover_after_ms)
    }
}

/// A system that owns NICs, or has an end of a VNI.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Node {
    /// 1 to 24 of the characters a-z, 0-9, - and _, beginning with a letter; unique among the nodes.
    #[schema(pattern = "^[a-z][a-z0-9_-]{0,23}$")]
    pub name: String,
    /// The work of its workers.
    pub work: Work,
    /// The VNI that it has an end of: Ethernet between the nodes of this machine that name the same one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^[a-z][a-z0-9_-]{0,23}$")]
    pub vni: Option<String>,
    /// Its station address there; by default one derived from its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<StationAddress>,
    /// Whether it may send there from addresses that are not its own: `check`, the default, or `allow`. By default
    /// an uplink may, and so may a node with a memif, a virtual machine or an interface. An address that another node of the VNI has is refused in any
    /// case.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spoof: Option<Spoof>,
    /// Its IP addresses there, if its frames are to be checked against them: ARP, neighbour discovery, and the IP
    /// source. List all that it has, except the link-local IPv6 address that follows from its station address. Its
    /// frames then go by its worker, and not by the shortcut.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<String>, max_items = 8)]
    pub addresses: Vec<IpAddr>,
    /// KiB of memory for frames that it has sent there and that are not read yet; by default 2048.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 256, maximum = 2_097_152)]
    pub pool_kib: Option<u32>,
    /// Limits on the frames that its programs send there and receive from there, if it has an endpoint. Its frames then
    /// go by its worker, and not by the shortcut.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<Limits>,
    /// How long a frame of it or for it may wait for others, in µs, where many come one by one and hardly any go the other
    /// way: they share a wake-up then. By default 250; with 0 none waits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(maximum = 10_000)]
    pub latency_us: Option<u32>,
    /// The CPU that its workers run on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<u32>,
    /// Several CPUs, for a network namespace on a VNI: its interface gets a queue for each, and each queue but the first a node
    /// of its own, called NAME-1 and so on, with the settings of this one. In a configuration file alone.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(max_items = 8)]
    pub cpus: Vec<u32>,
    /// Its workers never sleep while they drive a NIC.
    #[serde(default)]
    pub poll: bool,
    /// The nice value of its workers while they drive a NIC, or are ready to, and sleep when there is nothing to do:
    /// -20 to 0. By default -20, as the kernel's own drivers go before programs, but 0 for a program of the user's
    /// own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = -20, maximum = 0)]
    pub nice: Option<i32>,
    /// Whether a second worker stands by while it has a NIC.
    #[serde(default = "yes")]
    pub standby: bool,
    /// Bounds on its processes together; by default half of the machine's memory, and 512 processes and threads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bounds: Option<Bounds>,
    /// The container whose interface it is, as the container's runtime has it: NETWORK/ID/INTERFACE. `tasuki-cni` finds
    /// its nodes by that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^[!-~]{0,256}$")]
    pub container: Option<String>,
    /// The nodes that it trusts: a NIC moves between nodes that trust each other without the end of any worker.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub trusts: Vec<String>,
}

/// The treatment of a frame whose source address is not the sending node's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Spoof {
    /// It is dropped.
    Check,
    /// The address is taken for that of a station behind the node, as behind a bridge.
    Allow,
}

/// Bounds on a node's processes together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Bounds {
    /// MiB of memory; by default half of the machine's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u32>,
    /// Number of processes and threads; by default 512.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pids: Option<u32>,
    /// CPU time, in hundredths of one CPU; by default as much as there is. Its drivers' `nice` then counts within the
    /// node alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<u32>,
}

/// Processes and threads of a node.
const PIDS: u32 = 512;

/// The least nice value: before all other processes.
pub const NICE_MIN: i32 = -20;

impl Node {
    /// Returns a number that differs if its workers have to begin anew: of all settings but those that count at once.
    pub fn settings(&self) -> u32 {
        let its = Node { trusts: Vec::new(), standby: true, bounds: None, ..self.clone() };
        crc32c::crc32c(&serde_json::to_vec(&its).expect("plain data"))
    }

    /// Returns the nice value of its workers while they go before other processes: 0 where they do not.
    pub fn nice(&self) -> i32 {
        let usual = if self.poll || self.program().is_some() { 0 } else { NICE_MIN };
        self.nice.unwrap_or(usual)
    }

    /// Returns the bounds on its processes together.
    pub fn bounds(&self) -> crate::cgroup::Bounds {
        let bounds = self.bounds.unwrap_or_default();
        let memory = bounds.memory_mib.map_or_else(half_of_memory, |mib| Some(u64::from(mib) << 20));
        crate::cgroup::Bounds { memory, pids: Some(bounds.pids.unwrap_or(PIDS)), cpu: bounds.cpu, cpus: None }
    }

    /// Returns the limits on what it sends and receives, as its workers know them.
    pub fn limits(&self) -> [message::Limit; 2] {
        self.limits.unwrap_or_default().message()
    }

    /// Returns its TAP, if it has one.
    pub fn tap(&self) -> Option<&Tap> {
        if let Work::Tap(tap) = &self.work { Some(tap) } else { None }
    }

    /// Returns the nodes that it stands for, one for each of its CPUs. One whose CPUs make no sense stays as it is.
    fn for_each_cpu(mut self) -> Vec<Node> {
        if self.cpus.is_empty() || self.odd_cpus().is_some() {
            return vec![self];
        }
        let cpus = std::mem::take(&mut self.cpus);
        let queue = |(at, cpu): (usize, &u32)| Node {
            name: format!("{}-{at}", self.name),
            work: Work::Queue(Queue { of: self.name.clone() }),
            cpu: Some(*cpu),
            // Those of the interface.
            mac: None,
            spoof: None,
            addresses: Vec::new(),
            limits: None,
            container: None,
            ..self.clone()
        };
        let queues: Vec<Node> = cpus.iter().enumerate().skip(1).map(queue).collect();
        self.cpu = cpus.first().copied();
        if let Work::Tap(tap) = &mut self.work {
            tap.queues = u8::try_from(cpus.len()).ok().filter(|count| *count > 1);
        }
        [vec![self], queues].concat()
    }

    /// Returns the node of whose interface it drives a queue, if it does.
    pub fn queue_of(&self) -> Option<&str> {
        if let Work::Queue(queue) = &self.work { Some(&queue.of) } else { None }
    }

    /// Returns its endpoint, if it has one other than a TAP.
    pub fn endpoint(&self) -> Option<&dyn Kind> {
        self.work.endpoint()
    }

    /// Returns whether there may be stations behind it, with addresses of their own: behind a NIC, a bridge, or a
    /// program that chooses its own.
    pub fn has_others(&self) -> bool {
        match self.spoof {
            Some(Spoof::Allow) => true,
            Some(Spoof::Check) => false,
            None => self.work == Work::Uplink || self.endpoint().is_some_and(Kind::has_others),
        }
    }

    /// Returns the name of its endpoint: the interface or the socket by which its programs reach it.
    pub fn label(&self) -> Option<String> {
        self.tap().map(Tap::label).or_else(|| self.endpoint().map(Kind::label))
    }

    /// Returns the number of 4 KiB pages of its pool.
    pub fn pool_pages(&self) -> u32 {
        self.pool_kib.map_or(POOL_PAGES, |kib| kib / PAGE_KIB)
    }

    /// Returns its station address on its VNI.
    pub fn mac(&self) -> [u8; 6] {
        self.mac.map_or_else(
            || {
                let whole = format!("{}/{}", self.vni.as_deref().unwrap_or_default(), self.name);
                let [a, b, c, d] = crc32c::crc32c(whole.as_bytes()).to_be_bytes();
                // Locally administered (IEEE 802-2014, 8.4), and T.
                [0x02, 0x54, a, b, c, d]
            },
            |mac| mac.0,
        )
    }
}

/// A station address, as 02:00:00:00:00:01.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(try_from = "String", into = "String")]
#[schema(value_type = String, pattern = "^[0-9A-Fa-f][02468ACEace](:[0-9A-Fa-f]{2}){5}$")]
pub struct StationAddress(pub [u8; 6]);

impl TryFrom<String> for StationAddress {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let byte = |digits: &str| (digits.len() == 2).then(|| u8::from_str_radix(digits, 16).ok()).flatten();
        let bytes: Option<Vec<u8>> = text.split(':').map(byte).collect();
        let mac =
            bytes.and_then(|bytes| <[u8; 6]>::try_from(bytes).ok()).filter(|mac| mac[0] & 1 == 0 && *mac != [0; 6]);
        mac.map(StationAddress).ok_or_else(|| {
            format!(
                "{text:?} cannot be a station's address; write six bytes, the first of them even, as 02:00:00:00:00:01"
            )
        })
    }
}

impl fmt::Display for StationAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl From<StationAddress> for String {
    fn from(mac: StationAddress) -> String {
        mac.to_string()
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks with a reference")]
fn is_yes(it: &bool) -> bool {
    *it
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks with a reference")]
fn is_no(it: &bool) -> bool {
    !*it
}

fn half_of_memory() -> Option<u64> {
    let info = rustix::system::sysinfo();
    Some(info.totalram * u64::from(info.mem_unit) / 2)
}

fn yes() -> bool {
    true
}

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
    /// Drives one more queue of another node's interface, with a worker and a CPU of its own.
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

/// The interface that a network namespace has instead of the node's NIC. Nodes that name the same one share it: then
/// the NIC can go from one to the other, and the namespace's programs notice nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Tap {
    /// Name of the interface.
    #[schema(min_length = 1, max_length = 15)]
    pub name: String,
    /// The namespace: as `ip netns` calls it, or a path from /; by default the daemon's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub netns: Option<String>,
    /// The address that the interface gets when it is made, or a list of them; by default the daemon sets none.
    #[serde(
        default,
        rename = "address",
        deserialize_with = "addresses",
        serialize_with = "texts_of_addresses",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[schema(value_type = Option<OneOrMore>)]
    pub addresses: Vec<Address>,
    /// The routes by the interface that it gets when it is made.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(max_items = 64)]
    pub routes: Vec<Route>,
    /// MTU of the interface in bytes; by default 1500.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 68, maximum = 65521)]
    pub mtu: Option<u16>,
    /// Whether the kernel may pass frames between this namespace and others of its VNI, past their workers.
    #[serde(default = "yes", skip_serializing_if = "is_yes")]
    pub shortcut: bool,
    /// Queues of the interface; by default one. The node drives the first of them, and nodes that name it (`queue = { of = … }`)
    /// one each of the others: with a CPU each, they carry its flows side by side.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 8)]
    pub queues: Option<u8>,
}

impl Tap {
    /// Returns the name by which users know it: NAMESPACE:NAME, or NAME in the daemon's own namespace.
    pub fn label(&self) -> String {
        self.netns.iter().map(|netns| format!("{netns}:")).chain([self.name.clone()]).collect()
    }

    /// Returns the settings that the interface gets when it is made, with this station address if it is known by then.
    pub fn settings(&self, mac: Option<[u8; 6]>) -> tasuki_tap::Settings {
        tasuki_tap::Settings {
            mac,
            addresses: self.addresses.clone(),
            routes: self.routes.iter().map(|route| tasuki_tap::Route { to: route.to, via: route.via }).collect(),
            mtu: self.mtu.map(u32::from),
            queues: if self.queues() > 1 { Queues::Several } else { Queues::One },
        }
    }

    /// Returns the number of queues of its interface.
    pub fn queues(&self) -> usize {
        self.queues.unwrap_or(1).into()
    }
}

/// One more queue of a node's interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Queue {
    /// The node with the interface, on the same VNI. Its station address is this node's too.
    #[schema(pattern = "^[a-z][a-z0-9_-]{0,23}$")]
    pub of: String,
}

/// A route by a node's interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Route {
    /// The network that it leads to, as 0.0.0.0/0.
    #[serde(deserialize_with = "address", serialize_with = "text_of_address")]
    #[schema(value_type = String)]
    pub to: Address,
    /// The station that passes packets on; by default the network is on the VNI itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub via: Option<IpAddr>,
}

fn address<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Address, D::Error> {
    String::deserialize(from)?.parse().map_err(serde::de::Error::custom)
}

fn text_of_address<S: serde::Serializer>(address: &Address, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(address)
}

/// A text, or a list of texts.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
enum OneOrMore {
    One(String),
    More(Vec<String>),
}

fn addresses<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Vec<Address>, D::Error> {
    let texts = match OneOrMore::deserialize(from) {
        Ok(OneOrMore::One(text)) => vec![text],
        Ok(OneOrMore::More(texts)) => texts,
        Err(_) => {
            let sentence =
                "address is no text and no list of texts; write it as \"192.0.2.2/24\", or several in brackets";
            return Err(serde::de::Error::custom(sentence));
        }
    };
    texts.iter().map(|text| text.parse()).collect::<Result<_, _>>().map_err(serde::de::Error::custom)
}

fn texts_of_addresses<S: serde::Serializer>(addresses: &[Address], to: S) -> Result<S::Ok, S::Error> {
    match addresses {
        [one] => to.collect_str(one),
        more => to.collect_seq(more.iter().map(ToString::to_string)),
    }
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
    /// Descriptors in each of its rings; by default 256, or as many as the card can have.
    #[serde(skip_serializing_if = "Option::is_none")]
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

impl Config {
    /// Reads and checks a file.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text =
            std::fs::read_to_string(path).map_err(|why| ConfigError::Unreadable { path: path.to_owned(), why })?;
        Self::parse(path, &text)
    }

    /// Checks the text of the file at `path`.
    pub fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        if written::is_cut_off(text) {
            let what = "this file is cut off: the last line of what tasuki config show wrote is missing; copy it anew";
            return Err(ConfigError::Wrong {
                path: path.to_owned(),
                line: text.lines().count(),
                what: what.to_owned(),
            });
        }
        let config: Config = toml::from_str(text).map_err(|error| {
            let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
            let line = before.matches('\n').count() + 1;
            ConfigError::Wrong {
                path: path.to_owned(),
                line,
                what: mistake::sentence(text, error.span(), error.message()),
            }
        })?;
        if let (None, Some((nic, what))) = (config.senseless_but_standbys(), config.odd_standby()) {
            return Err(ConfigError::Wrong { path: path.to_owned(), line: mistake::line_of_standby(text, nic), what });
        }
        match config.senseless() {
            Some(what) => Err(ConfigError::Senseless { path: path.to_owned(), what }),
            None => Ok(config),
        }
    }

    /// Reads a node that is written as JSON. An error is a sentence, as for a file.
    pub fn node_of(value: &serde_json::Value) -> Result<Node, String> {
        Node::deserialize(value).map_err(|error| {
            // The reader of TOML says where a mistake is.
            let (mut all, mut value) = (toml::Table::new(), value.clone());
            without_null(&mut value);
            all.extend(toml::Value::try_from([value]).map(|nodes| ("node".to_owned(), nodes)));
            let text = all.to_string();
            match toml::from_str::<Config>(&text) {
                Err(error) => mistake::sentence(&text, error.span(), error.message()),
                Ok(_) => error.to_string(),
            }
        })
    }

    /// Returns the node of this name.
    pub fn node(&self, name: &str) -> Option<&Node> {
        self.node.iter().find(|node| node.name == name)
    }

    /// Returns whether the node of this name is on this VNI.
    pub fn is_on(&self, node: &str, vni: &str) -> bool {
        self.node(node).is_some_and(|node| node.vni.as_deref() == Some(vni))
    }

    /// Returns the TAP of the node of this name, if it has one.
    pub fn tap(&self, node: &str) -> Option<&Tap> {
        self.node(node).and_then(Node::tap)
    }

    /// Returns whether there are two nodes that do not trust each other.
    pub fn has_strangers(&self) -> bool {
        let names = || self.node.iter().map(|node| node.name.as_str());
        names().any(|one| names().any(|other| !self.trust(one, other)))
    }

    /// Returns whether both nodes trust each other. A node trusts itself.
    pub fn trust(&self, one: &str, other: &str) -> bool {
        let trusts = |a, b: &str| self.node(a).is_some_and(|node| node.trusts.iter().any(|name| name == b));
        one == other || (trusts(one, other) && trusts(other, one))
    }
}

/// Takes what TOML does not have out of JSON.
fn without_null(value: &mut serde_json::Value) {
    match value {
        serde_json::Value::Array(all) => all.iter_mut().for_each(without_null),
        serde_json::Value::Object(all) => {
            all.retain(|_, value| !value.is_null());
            all.values_mut().for_each(without_null);
        }
        _ => {}
    }
}

/// Returns a sentence about the first node whose workers are to stay on a CPU that `may_use` denies.
pub fn stray_cpu(config: &Config, may_use: impl Fn(u32) -> bool) -> Option<String> {
    let stray = config.node.iter().find_map(|node| Some((node, node.cpu.filter(|cpu| !may_use(*cpu))?)));
    stray.map(|(node, cpu)| {
        format!("node {:?}: cpu = {cpu}, and tasukid may not run anything there; name one of those that `taskset -p $$` shows, or none", node.name)
    })
}

/// Returns why the file at `path` cannot be started, as the end of a sentence that begins with the path.
pub fn not_startable(path: &Path) -> Option<&'static str> {
    let found = std::fs::metadata(path);
    match found.map(|found| (found.is_file(), found.permissions().mode() & 0o111 != 0)) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            Some("is not there; build it, or name another program by its path from /")
        }
        Err(_) => Some("cannot be looked at; let tasukid's user read the folders above it"),
        Ok((false, _)) => Some("is not a file; name a program by its path from /"),
        Ok((true, false)) => Some("may not be executed; chmod +x it"),
        Ok((true, true)) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, String> {
        Config::parse(Path::new("t.toml"), text).map_err(|error| error.to_string())
    }

    const WHOLE: &str = r#"
[daemon]
hang_after_ms = 100

[[node]]
name = "red"
work = "echo"
trusts = ["blue"]

[[node]]
name = "blue"
work = { source = { rate = 1000, size = 64 } }
cpu = 1
poll = true
standby = false
trusts = ["red"]

[[node]]
name = "green"
work = "sink"
trusts = ["red"]

[[node]]
name = "grey"
work = { answer = { address = "192.0.2.2" } }

[[node]]
name = "pink"
work = { program = { path = "/opt/mine", options = "fast", files = ["/opt/list"], threads = true } }

[[node]]
name = "shop"
work = { tap = { netns = "shop", name = "nic0", address = "192.0.2.3/24" } }

[[nic]]
name = "eth0"
device = "vfio:0000:03:00.0"
node = "red"
ring = 512
"#;

    #[test]
    fn a_whole_configuration_is_read() {
        let config = parse(WHOLE).unwrap();
        assert_eq!(config.daemon.hang_after(), Duration::from_millis(100));
        assert_eq!(config.daemon.deadline(), Duration::from_secs(1), "a key that is left out has its default");
        assert_eq!(config.node[1].work, Work::Source(Source { rate: 1000, size: 64, to: None }));
        assert_eq!(config.node[3].work, Work::Answer(Answer { address: Ipv4Addr::new(192, 0, 2, 2) }));
        assert!(config.node[0].standby && !config.node[1].standby);
        let program = config.node[4].program().expect("it has one");
        assert_eq!((program.path.as_path(), program.options.as_str()), (Path::new("/opt/mine"), "fast"));
        assert_eq!((&program.files[..], program.threads), (&[PathBuf::from("/opt/list")][..], true));
        assert_eq!(config.node[0].program(), None);
        let nice: Vec<_> =
            ["red", "blue", "pink", "shop"].iter().filter_map(|name| config.node(name)).map(Node::nice).collect();
        assert_eq!(nice, [-20, 0, 0, -20], "pollers and users' programs have no priority");
        let tap = config.tap("shop").expect("it has one");
        assert_eq!((tap.label(), &tap.addresses[..]), ("shop:nic0".to_owned(), &["192.0.2.3/24".parse().unwrap()][..]));
        assert_eq!(config.tap("red"), None);
        assert_eq!(config.nic[0].device, Device::Vfio("0000:03:00.0".to_owned()));
        assert!(config.trust("red", "blue") && config.trust("green", "green"));
        assert!(config.has_strangers(), "green is one to red");
        assert!(!config.trust("green", "red"), "trust is mutual or none");
    }

    /// Each of these is refused with a sentence that names the place and the allowed values.
    #[test]
    fn what_means_nothing_is_refused_by_line() {
        let node = "[[node]]\nname = \"red\"\nwork = \"sink\"\n";
        let tap = |node: &str, tap: &str| format!("[[node]]\nname = \"{node}\"\nwork = {{ tap = {{ {tap} }} }}\n");
        let nic = |name: &str, node: &str| format!("[[nic]]\nname = \"{name}\"\ndevice = \"sim\"\nnode = \"{node}\"\n");
        let queue = |node: &str, of: &str, more: &str| {
            format!("[[node]]\nname = \"{node}\"\nvni = \"lan\"\nwork = {{ queue = {{ of = \"{of}\" }} }}\n{more}")
        };
        let cases: &[(String, &[&str])] = &[
            (format!("{node}colour = 3\n"), &["t.toml:4: the key `colour` means nothing here", "`trusts`"]),
            (format!("{node}nice = -21\n"), &["node \"red\": nice = -21 is not in the range -20 (before all others) to 0"]),
            (format!("{node}nice = 1\n"), &["node \"red\": nice = 1 is not in the range -20 (before all others) to 0"]),
            (format!("{node}nice = -5\npoll = true\n"), &["with poll = true these never do", "leave one of the two out"]),
            ("[deamon]\n".to_owned(), &["t.toml:1: the key `deamon` means nothing here", "`daemon`"]),
            (
                "[[node]]\nname = \"red\"\nwork = \"dig\"\n".to_owned(),
                &["t.toml:3:", "work = \"dig\" is not known", "`echo`"],
            ),
            ("[[node]]\nname = \"red\"\n".to_owned(), &["t.toml:1: the key `work` is missing"]),
            (
                "[[node]]\nname = \"red\"\nwork = { source = { speed = 1 } }\n".to_owned(),
                &["t.toml:3: the key `speed` means nothing here", "`rate`"],
            ),
            (
                "[[node]]\nname = \"red\"\nwork = { answer = { address = \"192.0.2\" } }\n".to_owned(),
                &["t.toml:3: ", "is not an address to answer for; name one of IPv4"],
            ),
            ("[[node]]\nname = 5\n".to_owned(), &["t.toml:2: name = 5 is not text"]),
            ("[[node\n".to_owned(), &["t.toml:1:"]),
            (format!("{node}{node}"), &["two nodes are called \"red\""]),
            (format!("{node}trusts = [\"pink\"]\n"), &["node \"red\", trusts: there is no node \"pink\", but red"]),
            (
                format!("{node}[[nic]]\nname = \"e\"\ndevice = \"eth0\"\nnode = \"red\"\n"),
                &["t.toml:6: \"eth0\" names no card"],
            ),
            (
                format!("{node}[[nic]]\nname = \"e\"\ndevice = \"sim\"\nnode = \"pink\"\n"),
                &["nic \"e\": there is no node \"pink\""],
            ),
            (
                node.to_owned() + &nic("e", "red") + "standby = \"pink\"\n",
                &["t.toml:8: nic \"e\", standby: there is no node \"pink\", but red; name another, or leave it out"],
            ),
            (
                node.to_owned() + &nic("d", "red") + &nic("e", "red") + "standby = \"red\"\n",
                &["t.toml:12: nic \"e\", standby: node \"red\" has it already; name another node, or leave it out"],
            ),
            (
                format!("{node}[[node]]\nname = \"blue\"\nvni = \"lan\"\nwork = \"sink\"\n")
                    + &nic("e", "red")
                    + "standby = \"blue\"\n",
                &["t.toml:12: nic \"e\", standby: node \"blue\" is on VNI lan, and has no NIC beside that"],
            ),
            (
                format!("{node}[[node]]\nname = \"up\"\nvni = \"lan\"\nwork = \"uplink\"\n")
                    + &nic("e", "up")
                    + "standby = \"red\"\n",
                &["t.toml:12: nic \"e\", standby: node \"up\" is an uplink, whose NIC goes to no other node"],
            ),
            ("[daemon]\nfailover_after_ms = 0\n".to_owned(), &["a limit of 0 ms"]),
            (format!("{node}[[nic]]\nname = \"a/b\"\ndevice = \"sim\"\nnode = \"red\"\n"), &["nic \"a/b\": a name is"]),
            (
                "[[node]]\nname = \"red\"\nwork = { source = { size = 9000 } }\n".to_owned(),
                &["a frame has 60 to 1514 bytes"],
            ),
            (node.to_owned() + &nic("e", "red") + "mtu = 9001\n", &["nic \"e\": mtu = 9001 is not in the range 68 to 9000"]),
            (
                tap("red", "name = \"nic0\", mtu = 9000") + &nic("e", "red") + "mtu = 4000\n",
                &["nic \"e\": the interface of node \"red\" has mtu = 9000, and this NIC 4000: it drops what is longer"],
            ),
            (
                tap("red", "name = \"nic0\"") + &nic("e", "red") + "mtu = 1000\n",
                &["nic \"e\": the interface of node \"red\" has mtu = 1500, and this NIC 1000: it drops what is longer"],
            ),
            (
                node.to_owned() + &tap("blue", "name = \"nic0\", mtu = 9000") + &nic("e", "red") + "standby = \"blue\"\n",
                &["nic \"e\": the interface of node \"blue\" has mtu = 9000, and this NIC 1500: it drops what is longer"],
            ),
            ("[daemon]\ndeadline_ms = 0\n".to_owned(), &["a limit of 0 ms"]),
            ("[daemon]\nmetrics = \"9469\"\n".to_owned(), &["\"9469\" is no address to listen at", "127.0.0.1:9469"]),
            (
                "[[node]]\nname = \"red\"\nwork = { program = { path = \"mine\" } }\n".to_owned(),
                &["node \"red\": its program is named by a path from /, not mine"],
            ),
            (
                "[[node]]\nname = \"red\"\nwork = { program = { options = \"a\" } }\n".to_owned(),
                &["t.toml:3: the key `path`"],
            ),
            (
                "[[node]]\nname = \"red\"\nwork = { program = { path = \"/a\", files = [\"b\"] } }\n".to_owned(),
                &["node \"red\": a file that its program may read is named by a path from /, not b"],
            ),
            (
                format!(
                    "[[node]]\nname = \"red\"\nwork = {{ program = {{ path = \"/a\", options = \"{}\" }} }}\n",
                    "x".repeat(4097)
                ),
                &["node \"red\": its program's options have 4097 bytes, and may have 4096"],
            ),
            (tap("red", "name = \"a-name-that-is-too-long\""), &["node \"red\", tap", "1 to 15 bytes"]),
            (tap("red", "name = \"t\", address = \"192.0.2.2\""), &["t.toml:3: ", "192.0.2.2/24"]),
            (tap("red", "name = \"t\", address = \"192.0.2.2/40\""), &["t.toml:3: ", "192.0.2.2/24"]),
            (tap("red", "name = \"t\", netns = \"a/b\""), &["node \"red\", tap: netns is a name of `ip netns`"]),
            (tap("red", "netns = \"a\""), &["t.toml:3: the key `name`"]),
            (
                tap("red", "name = \"t\"") + &tap("blue", "name = \"t\", address = \"192.0.2.2/24\""),
                &["node \"red\", tap: node \"blue\" gives t another address"],
            ),
            (
                tap("red", "name = \"t\"") + &tap("blue", "name = \"t\"") + &nic("e", "red") + &nic("f", "blue"),
                &["t stands for one NIC, and \"e\" and \"f\" are both meant for it"],
            ),
            (
                "[[node]]\nname = \"red\"\nvni = \"lan\"\nwork = { source = { to = \"01:00:00:00:00:01\" } }\n".to_owned(),
                &["t.toml:4: ", "first of them even"],
            ),
            (tap("red", "name = \"t\"") + "pool_kib = 4096\n", &["pool_kib is a setting of a node's end of a VNI"]),
            (tap("red", "name = \"t\"") + "spoof = \"allow\"\n", &["spoof is a setting of a node's end of a VNI"]),
            (
                tap("red", "name = \"t\"") + "vni = \"lan\"\nspoof = \"allow\"\naddresses = [\"192.0.2.1\"]\n",
                &["it may send in others' addresses; leave addresses out"],
            ),
            (tap("red", "name = \"t\"") + "vni = \"lan\"\naddresses = [\"192.0.2.1/24\"]\n", &["t.toml:5: "]),
            (tap("red", "name = \"t\"") + "vni = \"lan\"\nspoof = \"no\"\n", &["t.toml:5: ", "`check` or `allow`"]),
            (
                "[[node]]\nname = \"red\"\nvni = \"lan\"\nwork = \"uplink\"\nspoof = \"check\"\n".to_owned() + &nic("e", "red"),
                &["have addresses of their own; leave spoof = \"check\" out"],
            ),
            (tap("red", "name = \"t\"") + "vni = \"lan\"\nlimits = {}\n", &["node \"red\": limits names no limit; name send, receive"]),
            (
                tap("red", "name = \"t\"") + "vni = \"lan\"\nlimits = { send = {} }\n",
                &["node \"red\": limits.send names no limit; name mbit, kpps"],
            ),
            (tap("red", "name = \"t\"") + "vni = \"a b\"\n", &["vni \"a b\": a name is"]),
            (tap("red", "name = \"t\"") + "vni = \"lan\"\nmac = \"1:2\"\n", &["t.toml:5: ", "first of them even"]),
            (tap("red", "name = \"t\"") + "vni = \"lan\"\n" + &nic("e", "red"), &["it is on VNI lan, and NIC \"e\" is meant for it"]),
            (
                "[[node]]\nname = \"red\"\nwork = \"uplink\"\n".to_owned(),
                &["an uplink joins a NIC and a VNI; name the VNI"],
            ),
            (
                "[[node]]\nname = \"red\"\nvni = \"lan\"\nwork = \"uplink\"\n".to_owned() + &nic("e", "red") + &nic("f", "red"),
                &["an uplink joins one NIC and a VNI, and \"e\" and \"f\" are both meant for it"],
            ),
            (
                "[[node]]\nname = \"red\"\nvni = \"lan\"\nwork = \"uplink\"\n".to_owned(),
                &["an uplink joins a NIC and a VNI; name the NIC ([[nic]] with node = \"red\")"],
            ),
            (
                "[[node]]\nname = \"red\"\nwork = { memif = { socket = \"/a\" } }\n".to_owned(),
                &["memif is a way onto a VNI; name one"],
            ),
            (
                "[[node]]\nname = \"red\"\nvni = \"lan\"\nwork = { memif = { socket = \"a\" } }\n".to_owned(),
                &["memif: its socket is named by a path from /, not a"],
            ),
            (
                "[[node]]\nname = \"red\"\nvni = \"lan\"\nwork = { memif = { socket = \"/a\", secret = \"123456789012345678901234\" } }\n"
                    .to_owned(),
                &["its secret has 24 bytes, and memif has room for 23"],
            ),
            (queue("red", "blue", ""), &["node \"red\": it is to drive a queue of the interface of node \"blue\", and there is no such node"]),
            (queue("red", "red", ""), &["there is no such node"]),
            (
                "[[node]]\nname = \"blue\"\nvni = \"lan\"\nwork = \"echo\"\n".to_owned() + &queue("red", "blue", ""),
                &["only a network namespace on a VNI has several queues so far, and node \"blue\" is none"],
            ),
            (
                tap("blue", "name = \"t\", queues = 2") + "vni = \"lan\"\n" + &queue("red", "blue", "").replace("lan", "wan"),
                &["it drives a queue of node \"blue\", which is on VNI lan; name that VNI"],
            ),
            (
                tap("blue", "name = \"t\", queues = 2") + "vni = \"lan\"\n" + &queue("red", "blue", "mac = \"02:00:00:00:00:01\"\n"),
                &["mac is a setting of the whole interface; set it for node \"blue\""],
            ),
            (
                tap("blue", "name = \"t\"") + "vni = \"lan\"\n" + &queue("red", "blue", ""),
                &["the interface of node \"blue\" has 1 of the 2 queues that are driven with this one; raise its queues"],
            ),
            (
                tap("blue", "name = \"t\", queues = 2") + "vni = \"lan\"\n" + &queue("red", "blue", "") + &queue("grey", "blue", ""),
                &["node \"grey\": the interface of node \"blue\" has 2 of the 3 queues"],
            ),
            (tap("red", "name = \"t\", queues = 9") + "vni = \"lan\"\n", &["queues = 9 is not in the range 1 to 8"]),
            (tap("red", "name = \"t\", queues = 2"), &["queues is a setting of a node's end of a VNI"]),
            (tap("red", "name = \"t\"") + "cpus = [0, 1]\n", &["node \"red\": only a network namespace on a VNI has workers on several CPUs so far"]),
            (
                tap("red", "name = \"t\"") + "vni = \"lan\"\ncpu = 0\ncpus = [0, 1]\n",
                &["cpus names its CPUs, and cpu one; leave one of the two out"],
            ),
            (
                tap("red", "name = \"t\", queues = 3") + "vni = \"lan\"\ncpus = [0, 1]\n",
                &["queues = 3, and cpus names 2: each gets a queue; leave queues out"],
            ),
            (
                tap("red", "name = \"t\"") + "vni = \"lan\"\ncpus = [0, 1, 2, 3, 4, 5, 6, 7, 8]\n",
                &["cpus names 9 CPUs, and an interface has 8 queues at most; name fewer"],
            ),
            (
                tap("abcdefghijklmnopqrstuvw", "name = \"t\"") + "vni = \"lan\"\ncpus = [0, 1]\n",
                &["called abcdefghijklmnopqrstuvw-1 and so on, and a name has 24 characters at most; give it a shorter one"],
            ),
            (
                tap("red", "name = \"t\"") + "vni = \"lan\"\ncpus = [0, 1]\nlimits = { send = { mbit = 1 } }\n",
                &["leave limits out, or give it one queue"],
            ),
            (
                tap("red", "name = \"t\", queues = 2") + "vni = \"lan\"\nlimits = { send = { mbit = 1 } }\n",
                &["leave limits out, or give it one queue"],
            ),
            (tap("red", "name = \"t\", queues = 2") + "vni = \"lan\"\nspoof = \"allow\"\n", &["leave spoof out, or give it one queue"]),
        ];
        for (text, parts) in cases {
            let said = parse(text).expect_err(text);
            assert!(parts.iter().all(|part| said.contains(part)), "{text}\n{said}");
            assert_eq!(said.lines().count(), 1, "one sentence: {said}");
        }
    }

    #[test]
    fn the_example_is_read() {
        let config = parse(include_str!("../../../docs/users/example.toml")).unwrap();
        assert_eq!((config.node.len(), config.nic[0].device.clone()), (2, Device::Sim));
    }

    #[test]
    fn a_node_with_several_cpus_stands_for_one_with_each() {
        let node =
            |more: &str, work: &str| format!("[[node]]\nvni = \"lan\"\npool_kib = 512\n{more}\nwork = {{ {work} }}\n");
        let short = node("name = \"red\"\nmac = \"02:00:00:00:00:01\"\ncpus = [2, 5, 3]", "tap = { name = \"t\" }");
        let long = [
            node("name = \"red\"\nmac = \"02:00:00:00:00:01\"\ncpu = 2", "tap = { name = \"t\", queues = 3 }"),
            node("name = \"red-1\"\ncpu = 5", "queue = { of = \"red\" }"),
            node("name = \"red-2\"\ncpu = 3", "queue = { of = \"red\" }"),
        ];
        let parsed = |text: &str| parse(text).expect("it makes sense").node;
        assert_eq!(parsed(&short), parsed(&long.concat()));
        let one = node("name = \"red\"\ncpus = [4]", "tap = { name = \"t\" }");
        assert_eq!(parsed(&one), parsed(&node("name = \"red\"\ncpu = 4", "tap = { name = \"t\" }")));
        // What is added by hand is one node.
        let by_hand =
            serde_json::json!({ "name": "red", "vni": "lan", "cpus": [0, 1], "work": { "tap": { "name": "t" } } });
        let by_hand = Config::node_of(&by_hand).expect("it can be read");
        let said = Config { node: vec![by_hand], ..Config::default() }.senseless().expect("it stands for two");
        assert!(said.contains("add a node for each further queue of its interface"), "{said}");
    }

    #[test]
    fn a_cpu_that_is_not_there_is_told_of() {
        let node = |cpu: u32| format!("[[node]]\nname = \"red\"\nwork = \"echo\"\ncpu = {cpu}\n");
        let config = |cpu| toml::from_str::<Config>(&node(cpu)).expect("a configuration");
        assert_eq!(stray_cpu(&config(1), |cpu| cpu < 2), None);
        let said = stray_cpu(&config(99), |cpu| cpu < 2).expect("there are two");
        assert!(said.contains("\"red\"") && said.contains("cpu = 99"), "{said}");
    }

    #[test]
    fn a_file_that_is_not_there_is_named() {
        let said = Config::read(Path::new("/nowhere/tasuki.toml")).unwrap_err().to_string();
        assert!(said.contains("/nowhere/tasuki.toml cannot be read"), "{said}");
    }
}
