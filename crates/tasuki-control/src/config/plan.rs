//! The steps from the nodes and NICs that there are to those of a configuration: a pure function.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::{Config, Nic, Node, Tap, Work};

/// The nodes and NICs that there are.
#[derive(Debug, Clone, Copy)]
pub struct Present<'a> {
    /// The nodes, also those added by hand, and the NICs.
    pub config: &'a Config,
    /// Nodes that were added by hand. They stay unless the configuration names them.
    pub by_hand: &'a BTreeSet<String>,
    /// The node that has each NIC.
    pub owners: &'a BTreeMap<String, String>,
    /// NICs that went to their stand-by node by themselves and are there, each with the node that lost it.
    pub failed_over: &'a BTreeMap<String, String>,
    /// Nodes with workers that began with other settings than the node has now.
    pub stale: &'a BTreeSet<String>,
    /// Nodes whose interface is gone.
    pub lost: &'a BTreeSet<String>,
}

/// Names of keys in a configuration.
pub type Keys = Vec<&'static str>;

/// One step. A step begins when the one before it is done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// The settings under `[daemon]` change.
    Settings,
    /// These keys of a node change, and its workers go on.
    Adjust(String, Keys),
    /// A NIC is closed.
    Close(String),
    /// A node is removed. If there are keys, it is added again with other values of these.
    Remove(String, Keys),
    /// A node is added.
    Add(String),
    /// A NIC is opened, for the node.
    Open(String, String),
    /// A NIC goes from a node to another.
    Give(String, String, String),
    /// The stand-by node of a NIC changes.
    AdjustNic(String),
    /// These keys of a node change: fresh workers take over.
    Renew(String, Keys),
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Step::Settings => f.write_str("[daemon] changes"),
            Step::Adjust(node, keys) => write!(f, "node {node}: {}, and its workers go on", change(keys)),
            Step::Close(nic) => write!(f, "NIC {nic} is closed: its link goes down"),
            Step::Remove(node, keys) if keys.is_empty() => write!(f, "node {node} is removed"),
            Step::Remove(node, keys) => {
                let change = change(keys);
                write!(
                    f,
                    "node {node}: {change}, so it is removed and added again: frames from and to it are lost meanwhile"
                )
            }
            Step::Add(node) => write!(f, "node {node} is added"),
            Step::Open(nic, node) => write!(f, "NIC {nic} is opened, for node {node}"),
            Step::Give(nic, from, to) => write!(f, "NIC {nic} goes from node {from} to node {to} while packets flow"),
            Step::AdjustNic(nic) => write!(f, "NIC {nic}: standby changes, and its driver goes on"),
            Step::Renew(node, keys) if keys.is_empty() => {
                write!(
                    f,
                    "node {node}: its workers began with other settings; a fresh one takes over while packets flow"
                )
            }
            Step::Renew(node, keys) => {
                write!(f, "node {node}: {}; a fresh worker takes over while packets flow", change(keys))
            }
        }
    }
}

/// Returns that these keys change, in words.
fn change(keys: &[&str]) -> String {
    let verb = if keys.len() == 1 { "changes" } else { "change" };
    format!("{} {verb}", keys.join(", "))
}

/// How the settings of a node differ from those of another of its name.
#[derive(Debug, Default)]
struct Difference {
    /// Keys that change while its workers go on.
    adjusted: Keys,
    /// Keys that a worker hears of when it begins.
    renewed: Keys,
    /// Keys that other nodes know of, or that its memory depends on.
    remade: Keys,
}

impl Difference {
    fn between(old: &Node, new: &Node) -> Self {
        // A new key has to be put into one of the three.
        let Node {
            name: _,
            work,
            vni,
            mac,
            spoof,
            addresses,
            pool_kib,
            limits,
            latency_us,
            cpu,
            // A file's: it stands for other nodes by now.
            cpus: _,
            poll,
            nice,
            standby,
            bounds,
            container,
            trusts,
        } = old;
        let mut it = Difference::default();
        let named = |keys: &mut Keys, key, differs: bool| keys.extend(differs.then_some(key));
        named(&mut it.adjusted, "trusts", *trusts != new.trusts);
        named(&mut it.adjusted, "standby", *standby != new.standby);
        named(&mut it.adjusted, "bounds", *bounds != new.bounds);
        named(&mut it.renewed, "limits", *limits != new.limits);
        named(&mut it.renewed, "latency_us", *latency_us != new.latency_us);
        named(&mut it.renewed, "cpu", *cpu != new.cpu);
        named(&mut it.renewed, "poll", *poll != new.poll);
        named(&mut it.renewed, "nice", *nice != new.nice);
        named(&mut it.remade, "vni", *vni != new.vni);
        named(&mut it.remade, "mac", *mac != new.mac);
        named(&mut it.remade, "spoof", *spoof != new.spoof);
        named(&mut it.remade, "addresses", *addresses != new.addresses);
        named(&mut it.remade, "container", *container != new.container);
        named(&mut it.remade, "pool_kib", *pool_kib != new.pool_kib);
        let keys = if work.is_like(&new.work) { &mut it.renewed } else { &mut it.remade };
        named(keys, "work", *work != new.work);
        it
    }
}

impl Node {
    /// Returns this node with the settings of `made`, the same node as it was made, that stay until it is made anew.
    pub fn with_what_stays(&self, made: Node) -> Self {
        let work = if made.work.is_like(&self.work) { self.work.clone() } else { made.work };
        let Node { vni, mac, spoof, addresses, pool_kib, container, .. } = made;
        Node { work, vni, mac, spoof, addresses, pool_kib, container, ..self.clone() }
    }
}

impl Work {
    /// Returns whether a node's worker with this work can hand over to one with that work.
    fn is_like(&self, other: &Work) -> bool {
        match (self.endpoint(), other.endpoint()) {
            (Some(one), Some(other)) => one.key() == other.key() && one.label() == other.label(),
            (None, None) => match (self, other) {
                // All its frames can go by its worker from now on. A shortcut is made with the interface alone.
                (Work::Tap(tap), Work::Tap(other)) => {
                    tap.shortcut >= other.shortcut && *tap == Tap { shortcut: tap.shortcut, ..other.clone() }
                }
                _ => self == other || self.is_native() && other.is_native(),
            },
            _ => false,
        }
    }

    /// Returns whether the workers handle the frames themselves.
    fn is_native(&self) -> bool {
        matches!(self, Work::Echo | Work::Sink | Work::Answer(_) | Work::Source(_) | Work::Program(_))
    }
}

impl Present<'_> {
    /// Returns the steps to what `desired` describes, with the nodes added by hand beside it.
    pub fn steps_to(&self, desired: &Config) -> Vec<Step> {
        let (mut adjusts, mut renews, mut gone, mut remade) = (Vec::new(), Vec::new(), Vec::new(), BTreeSet::new());
        let old_node = |name: &str| self.config.node(name);
        let new_node =
            |name: &str| desired.node(name).or_else(|| old_node(name).filter(|_| self.by_hand.contains(name)));
        // The limits of an interface are those of all its queues.
        let with_limits = |node: &Node, interface_node: Option<&Node>| Node {
            limits: interface_node.unwrap_or(node).limits,
            ..node.clone()
        };
        for node in &self.config.node {
            let name = node.name.clone();
            let Some(new) = new_node(&name) else {
                gone.push((name, Keys::new()));
                continue;
            };
            let old = with_limits(node, node.queue_of().and_then(old_node));
            let new = with_limits(new, new.queue_of().and_then(new_node));
            let Difference { adjusted, mut renewed, remade: mut whole } = Difference::between(&old, &new);
            if !adjusted.is_empty() {
                adjusts.push(Step::Adjust(name.clone(), adjusted));
            }
            if self.lost.contains(&name) && desired.node(&name).is_some() {
                whole.push("its interface (which is gone)");
            }
            if !whole.is_empty() {
                remade.insert(name.clone());
                whole.append(&mut renewed);
                gone.push((name, whole));
            } else if !renewed.is_empty() || self.stale.contains(&name) {
                renews.push(Step::Renew(name, renewed));
            }
        }
        // A queue is of the interface that there is: it goes before that and comes after it.
        let stays = |node: &&Node| {
            desired.node(&node.name).is_some() && !gone.iter().any(|(name, _): &(String, Keys)| *name == node.name)
        };
        let loses = |node: &&Node| node.queue_of().is_some_and(|of| remade.contains(of));
        let with_them: Vec<String> =
            self.config.node.iter().filter(stays).filter(loses).map(|node| node.name.clone()).collect();
        renews.retain(|step| !matches!(step, Step::Renew(name, _) if with_them.contains(name)));
        // Its workers begin with the limits that the interface has by then.
        renews.sort_by_key(
            |step| matches!(step, Step::Renew(name, _) if old_node(name).is_some_and(|node| node.queue_of().is_some())),
        );
        gone.extend(with_them.iter().map(|name| (name.clone(), vec!["its interface"])));
        remade.extend(with_them);
        gone.sort_by_key(|(name, _)| old_node(name).is_none_or(|node| node.queue_of().is_none()));
        let owner = |nic: &str| self.owner(nic);
        let is_uplink = |node: Option<&Node>| node.is_some_and(|node| node.work == Work::Uplink);
        // Another node gets a TAP of the same name that is not the same: it cannot be made before this one is gone.
        let has_its_tap = |from: &str| {
            let tap = |node: &Node| Some((node.tap()?.clone(), node.vni.is_some()));
            let its = old_node(from).and_then(tap).filter(|_| gone.iter().any(|(name, _)| name == from));
            let others = desired.node.iter().filter(|node| node.name != from).filter_map(tap);
            its.is_some_and(|its| { others }.any(|other| other != its && other.0.label() == its.0.label()))
        };
        // The NIC of an uplink is opened in another way than the others.
        let is_reopened = |old: &Nic, new: &Nic| {
            let (from, to) = (owner(&old.name), self.goal(new));
            let is_same_card =
                (&old.device, old.ring, old.mtu, &old.wire) == (&new.device, new.ring, new.mtu, &new.wire);
            let stays = from == to && !remade.contains(to);
            let leaves = gone.iter().any(|(name, _)| name == from) && remade.contains(to);
            !is_same_card
                || !stays
                    && (from == to
                        || leaves
                        || has_its_tap(from)
                        || is_uplink(old_node(from))
                        || is_uplink(desired.node(to)))
        };
        let (mut closes, mut closed, mut gives) = (Vec::new(), BTreeSet::new(), Vec::new());
        let mut standbys = Vec::new();
        for old in &self.config.nic {
            let (name, from) = (&old.name, owner(&old.name));
            match desired.nic.iter().find(|nic| nic.name == *name) {
                Some(new) if !is_reopened(old, new) => {
                    let to = self.goal(new);
                    if to != from {
                        gives.push((name.clone(), from.to_owned(), to.to_owned()));
                    }
                    standbys.extend((old.standby != new.standby).then(|| Step::AdjustNic(name.clone())));
                }
                _ => {
                    closed.insert(name.clone());
                    closes.push(Step::Close(name.clone()));
                }
            }
        }
        let is_open = |nic: &Nic| self.config.nic.iter().any(|old| old.name == nic.name) && !closed.contains(&nic.name);
        let opens = desired.nic.iter().filter(|nic| !is_open(nic));
        let new_nodes = desired.node.iter().filter(|node| old_node(&node.name).is_none()).map(|node| &node.name);
        // A node that still has to give a NIC away goes last.
        let is_late =
            |node: &str| gone.iter().any(|(name, _)| name == node) && gives.iter().any(|(_, from, _)| from == node);
        // What it has, no other node had. It is made anew before the next one goes: if that fails, the others are there.
        let is_alone = |name: &String| {
            let its = |node: &Node| (node.vni.clone(), node.mac(), node.label(), node.tap().map(Tap::label));
            let is_like = |old: &Node, new: &Node| its(old) == its(new);
            let has_queues = |name: &str| desired.node.iter().any(|node| node.queue_of() == Some(name));
            let of_several = |node: &Node| {
                let several = node.tap().is_some_and(|tap| tap.queues() > 1) || has_queues(&node.name);
                several || node.queue_of().is_some()
            };
            old_node(name)
                .zip(desired.node(name))
                .is_some_and(|(old, new)| is_like(old, new) && ![old, new].into_iter().any(of_several))
        };
        let of_late = |late: bool| {
            let its = gone.iter().filter(move |(name, _)| is_late(name) == late);
            let (alone, removes): (Vec<_>, Vec<_>) = its.partition(|(name, keys)| !keys.is_empty() && is_alone(name));
            let alone = alone.into_iter().cloned();
            let alone = alone.flat_map(|(name, keys)| [Step::Remove(name.clone(), keys), Step::Add(name)]);
            let again = gone.iter().filter(|(_, keys)| !keys.is_empty()).map(|(name, _)| name);
            let again = again.filter(|name| !is_alone(name));
            let adds = again.chain(new_nodes.clone());
            let queue_of = |name: &String| desired.node(name).and_then(Node::queue_of);
            let adds = adds.filter(|name| (is_late(name) || queue_of(name).is_some_and(is_late)) == late);
            let (queues, interfaces): (Vec<_>, Vec<_>) = adds.partition(|name| queue_of(name).is_some());
            let adds = interfaces.into_iter().chain(queues).cloned().map(Step::Add);
            let opens = opens.clone().filter(move |nic| is_late(&nic.node) == late);
            let opens = opens.map(|nic| Step::Open(nic.name.clone(), nic.node.clone()));
            let gives = gives.iter().filter(move |(_, _, to)| is_late(to) == late).cloned();
            let gives = gives.map(|(nic, from, to)| Step::Give(nic, from, to));
            let removes = removes.into_iter().cloned().map(|(name, keys)| Step::Remove(name, keys));
            alone.chain(removes).chain(adds).chain(opens).chain(gives).collect::<Vec<_>>()
        };
        let settings = (self.config.daemon != desired.daemon).then_some(Step::Settings);
        let (early, late) = (of_late(false), of_late(true));
        settings
            .into_iter()
            .chain(adjusts)
            .chain(closes)
            .chain(early)
            .chain(late)
            .chain(standbys)
            .chain(renews)
            .collect()
    }

    fn owner(&self, nic: &str) -> &str {
        self.owners.get(nic).map_or("", String::as_str)
    }

    /// Returns the node that is to have a NIC which stays open. One that failed over stays where it is while the
    /// configuration has it as it was then: only a command, or another entry, brings it to a node that was lost.
    fn goal<'n>(&'n self, new: &'n Nic) -> &'n str {
        let owner = self.owner(&new.name);
        let is_as_then = self.failed_over.get(&new.name) == Some(&new.node) && new.standby.as_deref() == Some(owner);
        if is_as_then { owner } else { &new.node }
    }

    /// Returns whether the NIC, which failed over, stays where it is when `desired` is applied.
    pub fn stays(&self, nic: &str, desired: &Config) -> bool {
        desired.nic.iter().any(|new| new.name == nic && self.goal(new) != new.node)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A machine on paper: steps that contradict it fail.
    #[derive(Debug, Clone, Default)]
    struct Paper {
        config: Config,
        by_hand: BTreeSet<String>,
        owners: BTreeMap<String, String>,
        failed_over: BTreeMap<String, String>,
        stale: BTreeSet<String>,
        lost: BTreeSet<String>,
    }

    impl Paper {
        fn present(&self) -> Present<'_> {
            let Paper { config, by_hand, owners, failed_over, stale, lost } = self;
            Present { config, by_hand, owners, failed_over, stale, lost }
        }

        fn steps_to(&self, desired: &Config) -> Vec<Step> {
            self.present().steps_to(desired)
        }

        /// The node that has a NIC is lost.
        fn fail_over(&mut self, nic: &Nic) {
            let standby = nic.standby.clone().filter(|standby| *standby != self.owners[&nic.name]);
            if let Some(standby) = standby {
                assert!(self.config.node(&standby).is_some_and(|node| node.vni.is_none()), "{standby} can have it");
                let from = self.owners.insert(nic.name.clone(), standby).expect("it is open");
                self.failed_over.insert(nic.name.clone(), from);
            }
        }

        /// All steps are taken.
        fn is_applied(&mut self, desired: &Config) {
            let is_home = |nic: &String| desired.nic.iter().any(|it| it.name == *nic && it.node == self.owners[nic]);
            self.failed_over.retain(|nic, _| !is_home(nic));
            for nic in &mut self.config.nic {
                let wanted = desired.nic.iter().find(|it| it.name == nic.name).expect("it is wanted");
                nic.node.clone_from(&wanted.node);
            }
        }

        fn settled(&self) -> (BTreeMap<String, Node>, BTreeMap<String, (Nic, String)>) {
            let nics =
                self.config.nic.iter().map(|nic| (nic.name.clone(), (nic.clone(), self.owners[&nic.name].clone())));
            (self.config.node.iter().map(|node| (node.name.clone(), node.clone())).collect(), nics.collect())
        }

        fn has_nic(&self, node: &str) -> bool {
            self.owners.values().any(|owner| owner == node)
        }

        fn node(&mut self, name: &str) -> &mut Node {
            self.config.node.iter_mut().find(|node| node.name == name).expect("it is there")
        }

        fn take(&mut self, step: &Step, desired: &Config) {
            let wanted = |name: &str| desired.node(name).expect("it is wanted").clone();
            match step {
                Step::Settings => self.config.daemon = desired.daemon.clone(),
                Step::Adjust(name, _) => {
                    let Node { trusts, standby, bounds, .. } = wanted(name);
                    let node = self.node(name);
                    (node.trusts, node.standby, node.bounds) = (trusts, standby, bounds);
                }
                Step::Close(nic) => {
                    self.config.nic.retain(|it| it.name != *nic);
                    assert!(self.owners.remove(nic).is_some(), "{nic} is open");
                    self.failed_over.remove(nic);
                }
                Step::Remove(name, keys) => {
                    assert!(self.config.node(name).is_some() && !self.has_nic(name), "{name} can go");
                    assert!(
                        self.config.node.iter().all(|node| node.queue_of() != Some(name)),
                        "its queues went before"
                    );
                    let is_standby = |nic: &&mut Nic| keys.is_empty() && nic.standby.as_ref() == Some(name);
                    self.config.nic.iter_mut().filter(is_standby).for_each(|nic| nic.standby = None);
                    self.config.node.retain(|node| node.name != *name);
                    self.by_hand.remove(name);
                    self.stale.remove(name);
                    self.lost.remove(name);
                }
                Step::Add(name) => {
                    assert!(self.config.node(name).is_none(), "there is no {name} yet");
                    self.config.node.push(wanted(name));
                    assert_eq!(self.config.odd_queue(self.config.node.last().expect("just added")), None);
                }
                Step::Open(nic, name) => {
                    assert!(self.config.node(name).is_some(), "{name} is there");
                    let wanted = desired.nic.iter().find(|it| it.name == *nic).expect("it is wanted");
                    self.config.nic.push(wanted.clone());
                    assert!(self.owners.insert(nic.clone(), name.clone()).is_none(), "{nic} was closed");
                }
                Step::Give(nic, from, to) => {
                    let is_uplink = |name: &str| self.config.node(name).expect("it is there").work == Work::Uplink;
                    assert!(!is_uplink(from) && !is_uplink(to), "an uplink's NIC is opened in another way");
                    assert_eq!(self.owners.insert(nic.clone(), to.clone()).as_ref(), Some(from));
                    self.failed_over.remove(nic);
                    let nic = self.config.nic.iter_mut().find(|it| it.name == *nic).expect("it is open");
                    nic.node.clone_from(to);
                }
                Step::AdjustNic(nic) => {
                    let wanted = desired.nic.iter().find(|it| it.name == *nic).expect("it is wanted");
                    let nic = self.config.nic.iter_mut().find(|it| it.name == *nic).expect("it is open");
                    nic.standby.clone_from(&wanted.standby);
                }
                Step::Renew(name, _) => {
                    let new = wanted(name);
                    let node = self.node(name);
                    assert!(node.work.is_like(&new.work), "one hands over to the other");
                    *node = new;
                    self.stale.remove(name);
                }
            }
        }
    }

    fn node(name: &'static str) -> impl Strategy<Value = Option<Node>> {
        let work = prop_oneof![
            3 => Just("work = \"echo\""),
            1 => Just("work = { source = { rate = 5 } }"),
            1 => Just("work = \"uplink\"\nvni = \"lan\""),
            1 => Just("work = { vm = { socket = \"/run/vm.sock\" } }\nvni = \"lan\""),
            1 => Just("work = { vm = { socket = \"/run/vm.sock\" } }\nvni = \"lan\"\nlatency_us = 5"),
            1 => Just("work = \"sink\"\nvni = \"dmz\""),
            2 => Just("work = { tap = { name = \"t\", queues = 2 } }\nvni = \"lan\""),
            1 => Just("work = { tap = { name = \"t\", queues = 2 } }\nvni = \"lan\"\nlimits = { send = { mbit = 1 } }"),
            1 => Just("work = { tap = { name = \"t\", queues = 2, mtu = 1400 } }\nvni = \"lan\""),
            3 => Just("work = { queue = { of = \"blue\" } }\nvni = \"lan\""),
        ];
        let more = prop_oneof![
            6 => Just(""),
            1 => Just("cpu = 1"),
            1 => Just("standby = false"),
            1 => Just("bounds = { pids = 9 }"),
            1 => Just("mac = \"02:00:00:00:00:01\""),
        ];
        let made = (work, more).prop_map(move |(work, more)| {
            toml::from_str(&format!("name = \"{name}\"\n{work}\n{more}")).expect("a node")
        });
        proptest::option::weighted(0.8, made)
    }

    /// A NIC, which of the nodes has it, and which stands by.
    fn nic(name: &'static str) -> impl Strategy<Value = Option<(Nic, [prop::sample::Index; 2])>> {
        let at = || any::<prop::sample::Index>();
        let made = (prop_oneof![4 => Just(None), 1 => Just(Some(64))], at(), at());
        let made = made.prop_map(move |(ring, at, standby)| {
            let nic = Nic {
                name: name.to_owned(),
                device: super::super::Device::Sim,
                node: String::new(),
                standby: None,
                ring,
                mtu: None,
                wire: Vec::new(),
            };
            (nic, [at, standby])
        });
        proptest::option::weighted(0.8, made)
    }

    /// Three nodes and two NICs at most.
    fn config() -> impl Strategy<Value = Config> {
        let nodes = (node("red"), node("blue"), node("green"));
        (nodes, nic("eth0"), nic("eth1"), 1..3_u64).prop_map(|((red, blue, green), one, two, hang)| {
            let mut config = Config { node: [red, blue, green].into_iter().flatten().collect(), ..Config::default() };
            config.daemon.hang_after_ms = hang;
            while let Some(at) = config.node.iter().position(|node| config.odd_queue(node).is_some()) {
                config.node.remove(at);
            }
            // An interface on a VNI and its queues have no NIC.
            let may_have = |node: &&Node| node.queue_of().is_none() && node.tap().is_none();
            let may_have: Vec<_> = config.node.iter().filter(may_have).map(|node| node.name.clone()).collect();
            for (mut nic, [at, standby]) in [one, two].into_iter().flatten() {
                if !may_have.is_empty() {
                    nic.node.clone_from(at.get(&may_have));
                    nic.standby = Some(standby.get(&config.node).name.clone());
                    config.nic.push(nic);
                }
            }
            while let Some(odd) = config.odd_standby().map(|(odd, _)| odd.to_owned()) {
                config.nic.iter_mut().filter(|nic| nic.name == odd).for_each(|nic| nic.standby = None);
            }
            config
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

        /// NICs failed over, workers are old, a daemon dies after any step: in the end all is as described, but for a NIC
        /// that failed over and that the configuration has as it was then; and a node that did not change has no part in
        /// it.
        #[test]
        fn any_edits_deaths_and_plans_end_in_what_is_described(
            first in config(),
            edits in prop::collection::vec((config(), 0..12_usize, any::<[bool; 3]>(), any::<prop::sample::Index>()), 1..4),
        ) {
            let owners = first.nic.iter().map(|nic| (nic.name.clone(), nic.node.clone())).collect();
            let (by_hand, failed_over) = (BTreeSet::new(), BTreeMap::new());
            let (stale, lost) = (BTreeSet::new(), BTreeSet::new());
            let mut paper = Paper { config: first, by_hand, owners, failed_over, stale, lost };
            let by_hand: Node = toml::from_str("name = \"mine\"\nwork = \"sink\"").expect("a node");
            paper.config.node.push(by_hand.clone());
            paper.by_hand.insert("mine".to_owned());
            for (desired, dies_after, [has_old, is_lost, is_same], at) in edits {
                if is_lost && !paper.config.nic.is_empty() {
                    let nic = at.get(&paper.config.nic).clone();
                    paper.fail_over(&nic);
                }
                // As the file was when it failed over: it is applied again.
                let mine = |node: &Node| node.name != "mine";
                let again = Config { node: paper.config.node.iter().filter(|node| mine(node)).cloned().collect(), ..paper.config.clone() };
                let desired = if is_same { again } else { desired };
                let name = at.get(&paper.config.node).name.clone();
                if has_old && name != "mine" {
                    paper.stale.insert(name.clone());
                }
                if is_lost && name != "mine" {
                    paper.lost.insert(name);
                }
                let before = paper.clone();
                let steps = paper.steps_to(&desired);
                let stays: Vec<String> = { paper.config.nic.iter() }
                    .map(|nic| nic.name.clone())
                    .filter(|nic| paper.present().stays(nic, &desired) && !steps.contains(&Step::Close(nic.clone())))
                    .collect();
                prop_assert!(!is_same || !paper.lost.is_empty() || stays.len() == paper.failed_over.len(), "nothing brings it back but a change");
                steps.iter().take(dies_after).for_each(|step| paper.take(step, &desired));
                let rest = paper.steps_to(&desired);
                rest.iter().for_each(|step| paper.take(step, &desired));
                paper.is_applied(&desired);
                let (mut nodes, nics) = paper.settled();
                prop_assert_eq!(nodes.remove("mine"), Some(by_hand.clone()), "it is nobody's but the operator's");
                let wanted: BTreeMap<_, _> = desired.node.iter().map(|node| (node.name.clone(), node.clone())).collect();
                prop_assert_eq!(&nodes, &wanted);
                let owner = |nic: &Nic| if stays.contains(&nic.name) { nic.standby.clone().unwrap() } else { nic.node.clone() };
                let owned: BTreeMap<_, _> =
                    desired.nic.iter().map(|nic| (nic.name.clone(), (nic.clone(), owner(nic)))).collect();
                prop_assert_eq!(&nics, &owned);
                prop_assert_eq!(&paper.config.daemon, &desired.daemon);
                prop_assert!(paper.stale.is_empty() && paper.lost.is_empty());
                prop_assert_eq!(paper.steps_to(&desired), [], "applied twice is applied once");
                for node in &before.config.node {
                    let as_before = |node: &Node| wanted.get(&node.name) == Some(node) && ![&before.stale, &before.lost].iter().any(|odd| odd.contains(&node.name));
                    let interface_node = before.config.interface_node(node);
                    let is_same = as_before(node) && (interface_node.name == node.name || as_before(interface_node));
                    let has_part = |step: &Step| match step {
                        Step::Adjust(it, _) | Step::Remove(it, _) | Step::Add(it) | Step::Renew(it, _) => *it == node.name,
                        Step::Settings | Step::Close(_) | Step::Open(..) | Step::Give(..) | Step::AdjustNic(_) => false,
                    };
                    prop_assert!(!is_same || !steps.iter().any(has_part), "{}: {:?}", node.name, steps);
                }
            }
        }
    }

    #[test]
    fn a_tap_that_changes_with_its_node_is_made_when_the_old_one_is_gone() {
        let parse = |node: &str, address: &str| -> Config {
            let tap = format!("work = {{ tap = {{ name = \"t0\", address = \"{address}\" }} }}");
            let nic = format!("[[nic]]\nname = \"eth0\"\ndevice = \"sim\"\nnode = \"{node}\"\n");
            toml::from_str(&format!("[[node]]\nname = \"{node}\"\n{tap}\n{nic}")).expect("a configuration")
        };
        let one = parse("red", "192.0.2.1/24");
        let owners = BTreeMap::from([("eth0".to_owned(), "red".to_owned())]);
        let present = Paper { config: one.clone(), owners, ..Paper::default() };
        let steps = |other: &Config| present.steps_to(other).iter().map(ToString::to_string).collect::<Vec<_>>();
        let (red, blue) = ("red", "blue");
        let gives = [
            format!("node {blue} is added"),
            format!("NIC eth0 goes from node {red} to node {blue} while packets flow"),
            format!("node {red} is removed"),
        ];
        assert_eq!(steps(&parse(blue, "192.0.2.1/24")), gives, "they share it for a moment");
        let closes = [
            "NIC eth0 is closed: its link goes down".to_owned(),
            format!("node {red} is removed"),
            format!("node {blue} is added"),
            format!("NIC eth0 is opened, for node {blue}"),
        ];
        assert_eq!(steps(&parse(blue, "192.0.2.2/24")), closes);
    }

    #[test]
    fn a_queue_goes_and_comes_with_its_interface_and_the_plan_says_why() {
        let parse = |mtu: u32| -> Config {
            let text = format!(
                "[[node]]\nname = \"blue\"\nvni = \"lan\"\nwork = {{ queue = {{ of = \"red\" }} }}\n\
                 [[node]]\nname = \"red\"\nvni = \"lan\"\nwork = {{ tap = {{ name = \"t0\", queues = 2, mtu = {mtu} }} }}\n"
            );
            toml::from_str(&text).expect("a configuration")
        };
        let one = parse(1500);
        let present = Paper { config: one.clone(), ..Paper::default() };
        let said: Vec<_> = present.steps_to(&parse(1400)).iter().map(ToString::to_string).collect();
        let goes = "changes, so it is removed and added again: frames from and to it are lost meanwhile";
        let [blue, red] = ["node blue is added", "node red is added"].map(str::to_owned);
        assert_eq!(said, [format!("node blue: its interface {goes}"), format!("node red: work {goes}"), red, blue]);
    }

    #[test]
    fn the_limits_of_an_interface_change_for_the_workers_of_its_queues_after_its_own() {
        let parse = |limits: &str| -> Config {
            let queue = |name: &str| {
                format!("[[node]]\nname = {name:?}\nvni = \"lan\"\nwork = {{ queue = {{ of = \"red\" }} }}\n")
            };
            let red = "[[node]]\nname = \"red\"\nvni = \"lan\"\nwork = { tap = { name = \"t0\", queues = 3 } }\n";
            toml::from_str(&[&queue("blue"), red, limits, &queue("mine")].concat()).expect("a configuration")
        };
        let (one, by_hand) = (parse(""), BTreeSet::from(["mine".to_owned()]));
        let present = Paper { config: one.clone(), by_hand, ..Paper::default() };
        let mut desired = parse("limits = { send = { mbit = 5 } }\n");
        desired.node.retain(|node| node.name != "mine");
        let said: Vec<_> = present.steps_to(&desired).iter().map(ToString::to_string).collect();
        let renewed = ["red", "blue", "mine"]
            .map(|name| format!("node {name}: limits changes; a fresh worker takes over while packets flow"));
        assert_eq!(said, renewed);
        // An earlier worker of the queue has other limits.
        let [with, without] = [&desired, &one].map(|config| {
            let blue = config.node("blue").expect("a node");
            blue.settings(config.interface_node(blue))
        });
        assert_ne!(with, without);
    }

    #[test]
    fn a_plan_says_what_changes_and_how() {
        let parse = |text: &str| toml::from_str::<Config>(text).expect("a configuration");
        let one = parse(
            "[[node]]\nname = \"red\"\nwork = \"echo\"\n[[node]]\nname = \"blue\"\nwork = \"sink\"\n[[node]]\nname = \"old\"\nwork = \"sink\"\n\
             [[node]]\nname = \"vm\"\nwork = { vm = { socket = \"/run/vm.sock\" } }\nvni = \"lan\"\n\
             [[nic]]\nname = \"eth0\"\ndevice = \"sim\"\nnode = \"red\"\n[[nic]]\nname = \"eth1\"\ndevice = \"sim\"\nnode = \"old\"\n",
        );
        let other = parse(
            "[daemon]\nhang_after_ms = 7\n[[node]]\nname = \"red\"\nwork = \"echo\"\ntrusts = [\"blue\"]\n[[node]]\nname = \"blue\"\nwork = { source = { rate = 5 } }\ncpu = 1\n\
             [[node]]\nname = \"vm\"\nwork = { vm = { socket = \"/run/other.sock\" } }\nvni = \"lan\"\nlimits = { send = { mbit = 5 } }\n[[node]]\nname = \"new\"\nwork = \"echo\"\n\
             [[nic]]\nname = \"eth0\"\ndevice = \"sim\"\nnode = \"blue\"\n[[nic]]\nname = \"eth2\"\ndevice = \"sim\"\nnode = \"new\"\n",
        );
        let owners = [("eth0", "red"), ("eth1", "old")].map(|(nic, node)| (nic.to_owned(), node.to_owned()));
        let present = Paper { config: one.clone(), owners: BTreeMap::from(owners), ..Paper::default() };
        let said: Vec<_> = present.steps_to(&other).iter().map(ToString::to_string).collect();
        assert_eq!(
            said,
            [
                "[daemon] changes",
                "node red: trusts changes, and its workers go on",
                "NIC eth1 is closed: its link goes down",
                "node old is removed",
                "node vm: work, limits change, so it is removed and added again: frames from and to it are lost meanwhile",
                "node vm is added",
                "node new is added",
                "NIC eth2 is opened, for node new",
                "NIC eth0 goes from node red to node blue while packets flow",
                "node blue: cpu, work change; a fresh worker takes over while packets flow",
            ]
        );
        assert_eq!(present.steps_to(&one), []);
    }
}
