//! Nodes: a node's place on its VNI, its workers' rights and bounds, and the nodes that it trusts.

use std::fmt;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use tasuki_relay::message;
use tasuki_shm::vni::node_memory::POOL_PAGES;
use utoipa::ToSchema;

use super::{Kind, Limits, Queue, Tap, Work};

/// KiB of a page of a pool.
pub(super) const PAGE_KIB: u32 = 4;

/// Processes and threads of a node.
const PIDS: u32 = 512;

/// The least nice value: before all other processes.
pub(super) const NICE_MIN: i32 = -20;

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
    /// Several CPUs, for a network namespace on a VNI or a virtual machine: its interface gets a queue for each, and each queue but
    /// the first a node of its own, called NAME-1 and so on, with the settings of this one. A machine's pairs of queues are shared
    /// among them. In a configuration file alone.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "not_empty")]
    #[schema(min_items = 1, max_items = 8)]
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

fn not_empty<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Vec<u32>, D::Error> {
    let empty = || serde::de::Error::custom("cpus names no CPU; name one at least, or leave it out");
    Some(Vec::deserialize(from)?).filter(|cpus| !cpus.is_empty()).ok_or_else(empty)
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
    #[schema(minimum = 4, maximum = 4_194_304)]
    pub pids: Option<u32>,
    /// CPU time, in hundredths of one CPU; by default as much as there is. Its drivers' `nice` then counts within the
    /// node alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<u32>,
}

impl Node {
    /// Returns a number that differs if its workers have to begin anew: of all settings but those that count at once. Its
    /// interface is that of `interface_node`.
    pub fn settings(&self, interface_node: &Node) -> u32 {
        let its =
            Node { trusts: Vec::new(), standby: true, bounds: None, limits: interface_node.limits, ..self.clone() };
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
    pub(super) fn for_each_cpu(mut self) -> Vec<Node> {
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
            None => self.work == Work::Uplink || self.endpoint().is_some(),
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

fn half_of_memory() -> Option<u64> {
    let info = rustix::system::sysinfo();
    Some(info.totalram * u64::from(info.mem_unit) / 2)
}

pub(super) fn yes() -> bool {
    true
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
