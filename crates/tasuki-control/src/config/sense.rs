//! Finds contradictions in a configuration: each becomes a sentence with the fault and its repair.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr};

use tasuki_relay::message;
use tasuki_shm::vni::directory::OWNERS_MAX;
use tasuki_shm::vni::node_memory::{POOL_PAGES_MAX, POOL_PAGES_MIN};

use super::node::{NICE_MIN, PAGE_KIB};
use super::work::SIZES;
use super::{Bounds, Config, Daemon, Device, Nic, Node, Program, Route, Source, StationAddress, Tap, Work};

/// Longest name of a node, a NIC or a VNI.
const NAME_MAX: usize = 24;
/// IP addresses of a node, at most: a message about it stays short, as there may be a thousand of them unread.
const ADDRESSES_MAX: usize = 8;

/// Bytes of a packet on a TAP's interface: from the least that IP knows to the most that a TAP takes.
const MTUS: std::ops::RangeInclusive<u16> = 68..=65_521;
/// What IPv6 asks of an interface (RFC 8200, section 5). The kernel gives none with less an address of it.
const MTU_IPV6_MIN: u16 = 1280;
/// Bytes of payload that a NIC's longest frame can have, and has by default.
const NIC_MTUS: std::ops::RangeInclusive<u16> = 68..=9000;
const MTU: u16 = 1500;
/// Descriptors in a ring: of an 82574L, of a virtio device, and of any card that there is a driver for (each driver's
/// options, in `crates/tasuki-net/src/nic`). They are powers of two.
const RINGS_82574L: std::ops::RangeInclusive<u16> = 8..=1024;
const RINGS_VIRTIO: std::ops::RangeInclusive<u16> = 2..=512;
const RINGS: std::ops::RangeInclusive<u16> = 2..=1024;
/// Queues of a TAP's interface.
const QUEUES: std::ops::RangeInclusive<usize> = 1..=OWNERS_MAX;
/// Addresses of a TAP's interface, at most, and routes: setting them holds up the daemon's loop.
const SETTINGS_MAX: usize = 64;
/// What a node's driver and its stand-by need at the least: MiB of memory; processes and threads.
const MEMORY_MIB_MIN: u32 = 16;
const PIDS_MIN: u32 = 4;
/// `PID_MAX_LIMIT` of `include/linux/threads.h`, on 64 bits.
const PIDS_MAX: u32 = 4 << 20;
/// Longer than that, programs would notice.
const LATENCY_US_MAX: u32 = 10_000;
/// Bytes of the name of a node's container, at most.
pub const CONTAINER_MAX: usize = 256;

/// Begins the fault of a name that no node has. A list of the names that there are follows.
const NO_NODE: &str = "there is no node ";

/// Returns what stays of a fault while other nodes come and go.
fn without_list(fault: &str) -> &str {
    let list = fault.find(NO_NODE).and_then(|at| Some(at + fault[at..].find("\", ")?));
    list.map_or(fault, |list| &fault[..list])
}

/// The nodes by what each has for itself: its label, and its station address on its VNI. To compare every node with every
/// other one takes too long where there are hundreds.
struct Ends<'a> {
    nodes: &'a [Node],
    /// Numbers of nodes, in their order.
    labels: HashMap<String, Vec<usize>>,
    macs: HashMap<(&'a str, [u8; 6]), usize>,
}

impl<'a> Ends<'a> {
    fn of(nodes: &'a [Node]) -> Self {
        let (mut labels, mut macs) = (HashMap::<_, Vec<usize>>::new(), HashMap::new());
        for (at, node) in nodes.iter().enumerate() {
            if let Some(label) = node.label() {
                labels.entry(spelled_by_name(&label).to_owned()).or_default().push(at);
            }
            if let Some(vni) = &node.vni {
                macs.entry((&vni[..], node.mac())).or_insert(at);
            }
        }
        Ends { nodes, labels, macs }
    }

    /// Returns the node beside which that with the number `at`, which is on a VNI, cannot have this label.
    fn with_label(&self, label: &str, at: usize) -> Option<&'a Node> {
        let is_before = |other: &&usize| **other < at || **other > at && self.nodes[**other].vni.is_none();
        self.labels.get(spelled_by_name(label))?.iter().find(is_before).map(|other| &self.nodes[*other])
    }

    /// Returns the nodes with this label, however it is spelled.
    fn with_label_like(&self, label: &str) -> impl Iterator<Item = &'a Node> {
        self.labels.get(spelled_by_name(label)).into_iter().flatten().map(|at| &self.nodes[*at])
    }

    /// Returns the node before that with the number `at` that has this address on the same VNI.
    fn with_mac(&self, vni: &str, mac: [u8; 6], at: usize) -> Option<&'a Node> {
        self.macs.get(&(vni, mac)).filter(|other| **other < at).map(|other| &self.nodes[*other])
    }
}

impl Config {
    /// Returns the first contradiction.
    pub fn senseless(&self) -> Option<String> {
        self.faults().into_iter().next()
    }

    /// Returns the first contradiction that `before` does not have: a fault that a later version finds in an applied configuration
    /// keeps no other node away.
    pub fn senseless_beside(&self, before: &Config) -> Option<String> {
        // Most often there is none, and nothing to compare.
        self.senseless().and_then(|_| self.senseless_but(&before.faults()))
    }

    /// Returns the first contradiction that is none of these.
    pub fn senseless_but(&self, known: &[String]) -> Option<String> {
        let known: HashSet<&str> = known.iter().map(|fault| without_list(fault)).collect();
        self.faults().into_iter().find(|fault| !known.contains(without_list(fault)))
    }

    /// Returns all contradictions.
    pub fn faults(&self) -> Vec<String> {
        let standbys = self.odd_standbys().map(|(_, what)| what);
        self.faults_but_of_standbys().into_iter().chain(standbys).collect()
    }

    /// Returns the contradictions in the rest of it.
    pub(super) fn faults_but_of_standbys(&self) -> Vec<String> {
        let names = |kind: &'static str, all: Vec<&String>| {
            let mut seen = BTreeSet::new();
            let fault = |name: &String, is_new: bool| match () {
                () if !is_name(name) => Some(format!(
                    "{kind} {name:?}: a name is 1 to {NAME_MAX} of the characters a-z, 0-9, - and _, and begins with a letter"
                )),
                () if !is_new => {
                    let of = self.node.iter().filter(|node| node.name == *name).find_map(Node::queue_of);
                    let why = of.filter(|_| kind == "node");
                    let why =
                        why.map(|of| format!(" (with cpus, further queues of node {of} are called {of}-1 and so on)"));
                    Some(format!("two {kind}s are called {name:?}; give one another name{}", why.unwrap_or_default()))
                }
                () => None,
            };
            all.into_iter().filter_map(|name| fault(name, seen.insert(name))).collect::<Vec<_>>()
        };
        let nodes: Vec<_> = self.node.iter().map(|node| &node.name).collect();
        let known = nodes.iter().map(|name| name.as_str()).collect::<Vec<_>>().join(", ");
        let known = if known.is_empty() { "and no other".to_owned() } else { format!("but {known}") };
        let stranger = |name: &String| (!nodes.contains(&name)).then(|| format!("{NO_NODE}{name:?}, {known}"));
        let ends = Ends::of(&self.node);
        let of_nodes = || {
            self.node.iter().enumerate().flat_map(|(at, node)| {
                let trusted = node.trusts.iter().filter_map(stranger);
                let trusted = trusted.map(|what| format!("node {:?}, trusts: {what}", node.name));
                trusted.chain(self.faults_of(node, at, &ends)).collect::<Vec<_>>()
            })
        };
        let of_nics = || {
            self.nic.iter().flat_map(|nic| {
                let named = |what| format!("nic {:?}: {what}", nic.name);
                let wire = (!nic.wire.is_empty() && nic.device != Device::Sim)
                    .then(|| named("only the model (device = \"sim\") has a wire to configure".to_owned()));
                let mtu = nic.mtu.filter(|mtu| !NIC_MTUS.contains(mtu)).map(|mtu| {
                    let (least, most) = (NIC_MTUS.start(), NIC_MTUS.end());
                    named(format!("mtu = {mtu} is not in the range {least} to {most}"))
                });
                let mut nodes = std::iter::once(&nic.node).chain(&nic.standby);
                let longer = nodes.find_map(|node| self.too_long_for(nic, node)).map(named);
                [stranger(&nic.node).map(named), wire, odd_ring(nic).map(named), mtu, longer].into_iter().flatten()
            })
        };
        let Daemon { hang_after_ms, deadline_ms, prepare_ms, failover_after_ms, .. } = self.daemon;
        let limits = [hang_after_ms, deadline_ms, prepare_ms, failover_after_ms];
        let limit = limits.contains(&0).then(|| "[daemon]: a limit of 0 ms cannot be kept; name more".to_owned());
        let worker = self.daemon.worker.as_ref().filter(|worker| !worker.is_absolute());
        let worker =
            worker.map(|worker| format!("[daemon], worker: {} must be named by its path from /", worker.display()));
        let nics = self.nic.iter().map(|nic| &nic.name).collect();
        let mut all = [names("node", nodes.clone()), names("nic", nics)].concat();
        all.extend(of_nodes().chain(of_nics()).chain(limit).chain(worker));
        all
    }

    /// Returns the faults of a node. They are all of them: a node can be at work with one that an earlier version did not know,
    /// and behind that no other one is to hide.
    fn faults_of(&self, node: &Node, at: usize, ends: &Ends<'_>) -> impl Iterator<Item = String> {
        let is_its = node.trusts.contains(&node.name);
        let itself = || format!("node {:?}, trusts: a node need not name itself; leave that out", node.name);
        let all = [
            is_its.then(itself),
            stray_cpus(node),
            odd_nice(node),
            odd_container(node),
            odd_bounds(node),
            size_of_frames(node),
            program_of(node),
            odd_tap(node),
            self.odd_sharing(node, ends),
            self.odd_queue(node),
            odd_endpoint(node),
            odd_end(node),
            odd_latency(node),
            odd_limits(node),
            self.odd_nics(node),
            odd_label(node, at, ends),
            odd_mac(node, at, ends),
        ];
        all.into_iter().flatten()
    }

    /// Returns the first NIC whose stand-by node cannot have it, and why.
    pub(super) fn odd_standby(&self) -> Option<(&str, String)> {
        self.odd_standbys().next()
    }

    fn odd_standbys(&self) -> impl Iterator<Item = (&str, String)> {
        self.nic.iter().filter_map(|nic| {
            let standby = nic.standby.as_ref()?;
            let what = match self.node(&nic.node) {
                _ if nic.node == *standby => {
                    Some(format!("node {standby:?} has it already; name another node, or leave it out"))
                }
                Some(node) if node.work == Work::Uplink => Some(format!(
                    "node {:?} is an uplink, whose NIC goes to no other node while it is open; leave it out",
                    nic.node
                )),
                _ => self.no_standby(standby),
            };
            what.map(|what| (&nic.name[..], format!("nic {:?}, standby: {what}", nic.name)))
        })
    }

    /// Returns why no NIC can go to this node, if that is so.
    pub fn no_standby(&self, name: &str) -> Option<String> {
        let Some(node) = self.node(name) else {
            let known: Vec<_> = self.node.iter().map(|node| &node.name[..]).collect();
            return Some(format!("{NO_NODE}{name:?}, but {}; name another, or leave it out", known.join(", ")));
        };
        let vni = node.vni.as_ref()?;
        Some(format!("node {name:?} is on VNI {vni}, and has no NIC beside that; name another, or leave it out"))
    }

    /// Returns that programs of this node would send longer frames than the NIC does, if that is so.
    pub fn too_long_for(&self, nic: &Nic, node: &str) -> Option<String> {
        let tap = self.node(node).filter(|node| node.vni.is_none())?.tap()?;
        let (its, of_tap) = (nic.mtu.unwrap_or(MTU), tap.mtu.unwrap_or(MTU));
        (of_tap > its).then(|| {
            format!("the interface of node {node:?} has mtu = {of_tap}, and this NIC {its}: it drops what is longer; give both the same")
        })
    }

    /// Returns the fault of the NICs that are meant for a node on a VNI, if there is one.
    fn odd_nics(&self, node: &Node) -> Option<String> {
        let named = |what: String| Some(format!("node {:?}: {what}", node.name));
        let vni = node.vni.as_ref()?;
        let mut nics = self.nic.iter().filter(|nic| nic.node == node.name);
        match (nics.next(), nics.next()) {
            (Some(nic), _) if node.work != Work::Uplink => named(format!(
                "it is on VNI {vni}, and NIC {:?} is meant for it; a node has one of the two, but for an uplink (work = \"uplink\")",
                nic.name
            )),
            (None, _) if node.work == Work::Uplink => {
                named(format!("an uplink joins a NIC and a VNI; name the NIC ([[nic]] with node = {:?})", node.name))
            }
            (Some(one), Some(other)) => named(format!(
                "an uplink joins one NIC and a VNI, and {:?} and {:?} are both meant for it; make another node for one of them",
                one.name, other.name
            )),
            _ => None,
        }
    }

    /// Returns the fault of a node that drives a queue of another's interface, or whose interface has several, if there is
    /// one.
    pub fn odd_queue(&self, node: &Node) -> Option<String> {
        let named = |what: String| Some(format!("node {:?}: {what}", node.name));
        if let Some(tap) = node.tap().filter(|tap| tap.queues.is_some()) {
            let (queues, least, most) = (tap.queues(), QUEUES.start(), QUEUES.end());
            if !QUEUES.contains(&queues) {
                return named(format!("queues = {queues} is not in the range {least} to {most}"));
            }
            if queues > 1 && node.has_others() {
                return named(
                    "of stations behind it, whose addresses are learnt, all frames go by one queue; leave spoof out, or give it one queue"
                        .to_owned(),
                );
            }
        }
        let of = node.queue_of()?;
        let Some(interface_node) = self.node(of).filter(|other| other.name != node.name) else {
            return named(format!(
                "it is to serve a queue of node {of:?}, and there is no such node; name another, or leave it out"
            ));
        };
        if let Some(first) = interface_node.queue_of() {
            return named(format!("node {of:?} itself serves a queue of node {first:?}; name that one"));
        }
        let is_vm = matches!(interface_node.work, Work::Vm(_));
        if interface_node.vni.is_none() || !is_vm && interface_node.tap().is_none() {
            return named(format!(
                "only a network namespace on a VNI and a virtual machine have several queues so far, and node {of:?} is neither; name another"
            ));
        }
        if node.vni != interface_node.vni {
            let vni = interface_node.vni.as_deref().unwrap_or_default();
            return named(format!(
                "it drives a queue of node {of:?}, which is on VNI {vni}; name that VNI (vni = {vni:?})"
            ));
        }
        let set = [
            ("mac", node.mac.is_some()),
            ("spoof", node.spoof.is_some()),
            ("addresses", !node.addresses.is_empty()),
            ("limits", node.limits.is_some()),
            ("container", node.container.is_some()),
        ];
        if let Some((key, _)) = set.iter().find(|(_, is_set)| *is_set) {
            return named(format!(
                "{key} is a setting of the whole interface; set it for node {of:?}, or leave it out"
            ));
        }
        let queues = self.node.iter().filter(|other| other.queue_of() == Some(of));
        let at = queues.map(|other| &other.name).position(|name| *name == node.name)? + 2;
        if is_vm && interface_node.has_others() {
            return named(format!(
                "of stations behind a virtual machine, whose addresses are learnt, all frames go by one node; give node {of:?} the address of the machine's card (mac = …) and spoof = \"check\", or leave this node out"
            ));
        }
        let most = interface_node.tap().map_or(*QUEUES.end(), super::Tap::queues);
        (at > most).then(|| match is_vm {
            true => format!(
                "node {:?}: a virtual machine is served by {most} nodes at most, and this would be number {at} for that of node {of:?}; leave this node out",
                node.name
            ),
            false => format!(
                "node {:?}: the interface of node {of:?} has {most} of the {at} queues that are driven with this one; raise its queues, or leave this node out",
                node.name
            ),
        })
    }

    /// Returns the contradiction of a node's TAP to another node's entry for the same one.
    fn odd_sharing(&self, node: &Node, ends: &Ends<'_>) -> Option<String> {
        let tap = node.tap()?;
        let named = |what: String| Some(format!("node {:?}, tap: {what}", node.name));
        // On a VNI no two nodes share one.
        if node.vni.is_some() {
            return None;
        }
        let same = |other: &&Node| other.vni.is_none() && other.tap().is_some_and(|it| it.label() == tap.label());
        let sharing: Vec<_> = ends.with_label_like(&tap.label()).filter(same).collect();
        if let Some(other) = sharing.iter().find(|other| other.tap() != Some(tap)) {
            return named(format!("node {:?} gives {} another address; name one", other.name, tap.label()));
        }
        let nics: Vec<_> = self.nic.iter().filter(|nic| sharing.iter().any(|other| other.name == nic.node)).collect();
        match &nics[..] {
            [one, other, ..] => named(format!(
                "{} stands for one NIC, and {:?} and {:?} are both meant for it; give one of them to another node",
                tap.label(),
                one.name,
                other.name
            )),
            _ => None,
        }
    }
}

/// Returns the fault of a node's TAP for itself.
fn odd_tap(node: &Node) -> Option<String> {
    let tap = node.tap()?;
    let named = |what: String| Some(format!("node {:?}, tap: {what}", node.name));
    if !tasuki_tap::is_name(&tap.name) {
        return named(tasuki_tap::TapError::Name(tap.name.clone()).to_string());
    }
    if tap.netns.as_ref().is_some_and(|netns| netns.is_empty() || netns.contains('/') && !netns.starts_with('/')) {
        return named("netns is a name of `ip netns`, or a path from /".to_owned());
    }
    if tap.name == "lo" {
        return named("each network namespace has an interface lo already; choose another name".to_owned());
    }
    odd_settings(tap).and_then(named)
}

fn odd_endpoint(node: &Node) -> Option<String> {
    node.endpoint().and_then(|kind| kind.odd()).map(|what| format!("node {:?}: {what}", node.name))
}

/// Returns the fault of a node's end of a VNI, or of one that it has not, if there is one.
fn odd_end(node: &Node) -> Option<String> {
    let named = |what: String| Some(format!("node {:?}: {what}", node.name));
    let Some(vni) = &node.vni else {
        if let Some(kind) = node.endpoint() {
            return named(format!("{} is a way onto a VNI; name one (vni = …)", kind.key()));
        }
        if node.work == Work::Uplink {
            return named("an uplink joins a NIC and a VNI; name the VNI (vni = …)".to_owned());
        }
        let detour = node.tap().is_some_and(|tap| !tap.shortcut);
        let queues = node.tap().is_some_and(|tap| tap.queues() > 1);
        let set = [
            ("mac", node.mac.is_some()),
            ("spoof", node.spoof.is_some()),
            ("addresses", !node.addresses.is_empty()),
            ("pool_kib", node.pool_kib.is_some()),
            ("limits", node.limits.is_some()),
            ("latency_us", node.latency_us.is_some()),
            ("shortcut", detour),
            ("queues", queues),
        ];
        let odd = set.iter().find(|(_, is_set)| *is_set)?;
        return named(format!(
            "{} is a setting of a node's end of a VNI; name the VNI (vni = …), or leave it out",
            odd.0
        ));
    };
    if !is_name(vni) {
        return named(format!(
            "vni {vni:?}: a name is 1 to {NAME_MAX} of the characters a-z, 0-9, - and _, and begins with a letter"
        ));
    }
    if node.work == Work::Uplink && !node.has_others() {
        return named(
            "stations behind an uplink's NIC have addresses of their own; leave spoof = \"check\" out".to_owned(),
        );
    }
    if !node.addresses.is_empty() && node.has_others() {
        return named("it may send in others' addresses; leave addresses out, or set spoof = \"check\"".to_owned());
    }
    if node.addresses.len() > ADDRESSES_MAX {
        let count = node.addresses.len();
        return named(format!("{count} addresses are more than the {ADDRESSES_MAX} that are checked; leave them out"));
    }
    let pages = node.pool_pages();
    if !(POOL_PAGES_MIN..=POOL_PAGES_MAX).contains(&pages) {
        let kib = node.pool_kib.unwrap_or_default();
        let (least, most) = (POOL_PAGES_MIN * PAGE_KIB, POOL_PAGES_MAX * PAGE_KIB);
        return named(format!("pool_kib = {kib} is not in the range {least} to {most}; the default is 2048"));
    }
    None
}

fn odd_latency(node: &Node) -> Option<String> {
    let latency_us = node.latency_us.filter(|_| node.vni.is_some())?;
    let what = match () {
        () if node.label().is_none() && node.queue_of().is_none() => {
            "latency_us is for programs behind an interface or a socket, and it has none of these; leave latency_us out"
                .to_owned()
        }
        () if latency_us > LATENCY_US_MAX => {
            format!("latency_us is {latency_us}, and a frame may wait {LATENCY_US_MAX} µs at most; lower it")
        }
        () => return None,
    };
    Some(format!("node {:?}: {what}", node.name))
}

fn odd_limits(node: &Node) -> Option<String> {
    let limits = node.limits.filter(|_| node.vni.is_some())?;
    let what = match node.label() {
        None => "limits are for programs behind an interface or a socket, and it has none of these; leave limits out"
            .to_owned(),
        Some(_) => limits.odd()?,
    };
    Some(format!("node {:?}: {what}", node.name))
}

/// Returns that an earlier node, or one on no VNI, has the label of this one, which is on a VNI, if that is so.
fn odd_label(node: &Node, at: usize, ends: &Ends<'_>) -> Option<String> {
    let label = node.label().filter(|_| node.vni.is_some())?;
    let (name, other) = (&node.name, &ends.with_label(&label, at)?.name);
    Some(format!("node {name:?}: {label} is node {other:?}'s as well; on a VNI each node has its own"))
}

/// Returns that an earlier node has the station address of this one on its VNI, if that is so.
fn odd_mac(node: &Node, at: usize, ends: &Ends<'_>) -> Option<String> {
    let (name, vni, mac) = (&node.name, node.vni.as_ref()?, node.mac());
    let (other, mac) = (&ends.with_mac(vni, mac, at)?.name, StationAddress(mac));
    Some(format!(
        "node {name:?}: node {other:?} of VNI {vni} has its station address {mac} already; give one of them another (mac = …)"
    ))
}

/// Returns the fault of the length of a NIC's rings, as far as the card is known before it is opened. With a wrong one it
/// would be closed, and not opened again.
fn odd_ring(nic: &Nic) -> Option<String> {
    let rings = match nic.device {
        Device::Sim if nic.wire.iter().any(|word| word.ends_with("virtio-net")) => RINGS_VIRTIO,
        Device::Sim => RINGS_82574L,
        _ => RINGS,
    };
    let ring = nic.ring.filter(|ring| !ring.is_power_of_two() || !rings.contains(ring))?;
    Some(format!("ring = {ring} is not a power of two from {} to {}", rings.start(), rings.end()))
}

/// Returns the fault of the settings that a TAP's interface is to get.
fn odd_settings(tap: &Tap) -> Option<String> {
    if let Some(mtu) = tap.mtu.filter(|mtu| !MTUS.contains(mtu)) {
        return Some(format!("mtu = {mtu} is not in the range {} to {}", MTUS.start(), MTUS.end()));
    }
    let its = tap.addresses.iter().chain(tap.routes.iter().map(|route| &route.to));
    if let Some((mtu, of_ipv6)) =
        tap.mtu.filter(|mtu| *mtu < MTU_IPV6_MIN).zip(its.into_iter().find(|it| it.ip.is_ipv6()))
    {
        return Some(format!(
            "mtu = {mtu} is less than IPv6 needs, {MTU_IPV6_MIN} (RFC 8200, section 5), and {of_ipv6} is IPv6; raise the mtu, or leave that out"
        ));
    }
    if tap.addresses.len().max(tap.routes.len()) > SETTINGS_MAX {
        return Some(format!("more than {SETTINGS_MAX} addresses or routes are too many; leave some out"));
    }
    let strange = tap.addresses.iter().find(|address| !is_of_a_station(address.ip));
    if let Some(address) = strange {
        return Some(format!("address = \"{address}\" is no station's; name one, or leave it out"));
    }
    // The kernel asks for the gateway behind the interface, and refuses one that it would not find there.
    let on_link = |via: &IpAddr| {
        let direct = tap.routes.iter().filter(|route| route.via.is_none()).map(|route| route.to);
        tap.addresses.iter().copied().chain(direct).any(|network| network.is_in_network(*via)) || is_link_local(*via)
    };
    tap.routes.iter().find_map(|Route { to, via }| match via {
        _ if !to.is_network() => {
            Some(format!("the route to {to} has bits beyond its length; write the network's own address"))
        }
        Some(via) if via.is_ipv4() != to.ip.is_ipv4() => {
            Some(format!("the route to {to} leads by {via}, which is of the other version of IP; name one of the same"))
        }
        Some(via) if !on_link(via) => Some(format!(
            "the route to {to} leads by {via}, which is in no network of the interface; name a station of such a network, or give the interface an address there"
        )),
        _ => None,
    })
}

/// Returns whether one station can have this address.
fn is_of_a_station(ip: IpAddr) -> bool {
    !ip.is_unspecified() && !ip.is_multicast() && ip != IpAddr::V4(Ipv4Addr::BROADCAST)
}

fn is_link_local(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local())
}

fn is_name(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '_';
    (1..=NAME_MAX).contains(&name.len())
        && name.starts_with(|c: char| c.is_ascii_lowercase())
        && name.chars().all(plain)
}

impl Node {
    /// Returns why it cannot have a queue of its interface on each of its CPUs, if it cannot.
    pub(super) fn odd_cpus(&self) -> Option<String> {
        let (count, most) = (self.cpus.len(), QUEUES.end());
        let is_vm = matches!(self.work, Work::Vm(_));
        if self.vni.is_none() || !is_vm && self.tap().is_none() {
            return Some(
                "only a network namespace on a VNI and a virtual machine have workers on several CPUs so far; name one (cpu = …)"
                    .to_owned(),
            );
        }
        match self.tap().and_then(|tap| tap.queues) {
            _ if self.name.len() + 2 > NAME_MAX && count > 1 => Some(format!(
                "its queues are nodes that are called {}-1 and so on, and a name has {NAME_MAX} characters at most; give it a shorter one",
                self.name
            )),
            _ if self.cpu.is_some() => Some("cpus names its CPUs, and cpu one; leave one of the two out".to_owned()),
            _ if self.cpus.iter().collect::<BTreeSet<_>>().len() < count => {
                Some("cpus names a CPU twice, and each has a queue; name each once".to_owned())
            }
            Some(queues) if usize::from(queues) != count => {
                Some(format!("queues = {queues}, and cpus names {count}: each gets a queue; leave queues out"))
            }
            _ if !QUEUES.contains(&count) => Some(match is_vm {
                true => {
                    format!("cpus names {count} CPUs, and a virtual machine has {most} workers at most; name fewer")
                }
                false => format!("cpus names {count} CPUs, and an interface has {most} queues at most; name fewer"),
            }),
            _ => None,
        }
    }
}

/// Returns the fault of a node with several CPUs that stands for one.
fn stray_cpus(node: &Node) -> Option<String> {
    let what = (!node.cpus.is_empty()).then(|| node.odd_cpus())?;
    let what = what.unwrap_or_else(|| {
        "cpus stands for several nodes, in a configuration file; name one CPU (cpu = …), and add a node for each further queue of its interface"
            .to_owned()
    });
    Some(format!("node {:?}: {what}", node.name))
}

/// Returns the fault of a node's nice value, if there is one.
fn odd_nice(node: &Node) -> Option<String> {
    let nice = node.nice?;
    let what = match () {
        () if !(NICE_MIN..=0).contains(&nice) => {
            format!("nice = {nice} is not in the range {NICE_MIN} (before all others) to 0")
        }
        () if node.poll && nice != 0 => format!(
            "nice = {nice} is for workers that sleep, and with poll = true these never do; give them a CPU of their own (cpu = …), and leave one of the two out"
        ),
        () => return None,
    };
    Some(format!("node {:?}: {what}", node.name))
}

fn odd_bounds(node: &Node) -> Option<String> {
    let Bounds { memory_mib, pids, cpu } = node.bounds?;
    let ranges = [
        ("memory_mib", memory_mib, MEMORY_MIB_MIN..=u32::MAX),
        ("pids", pids, PIDS_MIN..=PIDS_MAX),
        ("cpu", cpu, 1..=u32::MAX),
    ];
    ranges.into_iter().find_map(|(key, its, range)| {
        let its = its.filter(|its| !range.contains(its))?;
        let why = match its < *range.start() {
            true => format!("less than its workers need to begin, {}", range.start()),
            false => format!("more than the kernel takes, {}", range.end()),
        };
        Some(format!("node {:?}, bounds: {key} = {its} is {why}", node.name))
    })
}

fn odd_container(node: &Node) -> Option<String> {
    let container = node.container.as_ref()?;
    let is_odd = container.len() > CONTAINER_MAX || !container.bytes().all(|byte| byte.is_ascii_graphic());
    is_odd.then(|| {
        format!(
            "node {:?}: container has at most {CONTAINER_MAX} characters, without blanks, as NETWORK/ID/INTERFACE; leave it out, or shorten it",
            node.name
        )
    })
}

/// Returns the label of an interface with its namespace as `ip netns` calls it, if it has the path that `ip netns` gives it.
fn spelled_by_name(label: &str) -> &str {
    let folders = ["/run/netns/", "/var/run/netns/"];
    folders.iter().find_map(|folder| label.strip_prefix(folder)).unwrap_or(label)
}

fn size_of_frames(node: &Node) -> Option<String> {
    let Work::Source(Source { size, .. }) = node.work else { return None };
    let (least, most) = (SIZES.start(), SIZES.end());
    (!SIZES.contains(&size)).then(|| {
        format!("node {:?}: a frame has {least} to {most} bytes without its check sequence, not {size}", node.name)
    })
}

fn program_of(node: &Node) -> Option<String> {
    let Program { path, options, files, threads: _ } = node.program()?;
    if let Some(file) = files.iter().find(|file| !file.is_absolute()) {
        let (node, file) = (&node.name, file.display());
        return Some(format!("node {node:?}: a file that its program may read is named by a path from /, not {file}"));
    }
    let most = message::OPTIONS_MAX;
    match () {
        () if !path.is_absolute() => {
            Some(format!("node {:?}: its program is named by a path from /, not {}", node.name, path.display()))
        }
        () if options.len() > most => Some(format!(
            "node {:?}: its program's options have {} bytes, and may have {most}; shorten them",
            node.name,
            options.len()
        )),
        () => None,
    }
}
