//! TAPs: the interfaces that network namespaces have instead of nodes' NICs. The daemon makes them and gives every
//! worker of their nodes the descriptor. It also gives each the station address of the NIC that it stands for, as
//! the card lets in frames for that address. A TAP that stands for the end of a VNI has a [veth
//! end](super::shortcuts) besides, if it can have one.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use tasuki_relay::message;
use tasuki_tap::device::{self, Before, is_gone, namespace_of};
use tasuki_tap::interface::Interface;
use tasuki_tap::namespace::{Identity, Namespace, Unnamed};
use tasuki_tap::shortcut::remove_beside;
use tasuki_tap::{Settings, Tap, TapError, Waiting, packet, set_mac};

use super::card::Card;
use super::deposits::{Found, Key};
use super::door::Refusal;
use super::shortcuts::{Crossed, Lost, OnVni, Shortcuts, VethEnd};
use super::{About, Supervisor, now};
use crate::bucket::Bucket;
use crate::config::{self, StationAddress};

/// Interval at which the daemon asks whether interfaces are there.
const INTERFACES_EVERY: Duration = Duration::from_secs(1);

/// How often an interface is tried again, and after which pause, while that of workers that were ended is still going away.
const NAME_RETRIES: u32 = 100;
pub(super) const NAME_RETRY_PAUSE: Duration = Duration::from_millis(100);

/// How often users hear of other station addresses of an interface at once, and after that.
const CHANGES_AT_ONCE_MAX: u32 = 5;
const CHANGE_EVERY: Duration = Duration::from_secs(10);

/// A TAP, as far as it exists.
#[derive(Debug)]
pub struct TapEnd {
    config: config::Tap,
    /// The node whose end of a VNI it is, if it is one.
    pub(super) node: Option<String>,
    /// The header before each frame.
    before: Before,
    /// Where it may have a veth end, or has one from before.
    on: Option<OnVni>,
    veth_end: Option<VethEnd>,
    device: Option<OwnedFd>,
    /// What waits in its queues, if its node has or had a limit on what it sends.
    waiting: Option<Waiting>,
    /// The station address of the NIC for which it stands, if it was given that, or could not be.
    mac: Option<[u8; 6]>,
    /// The namespace that had the name when the interface was made there.
    made_in: Option<Identity>,
    /// The station address that it had when the daemon looked last, if it has to keep another, and how often users hear of it.
    other_mac: Option<[u8; 6]>,
    changes: Bucket,
    /// Nodes whose workers have the interface in whose place this one came.
    stale: BTreeSet<String>,
    /// Its interface was gone when the daemon looked last.
    pub is_gone: bool,
    /// How often its name may still be found taken without users hearing of it.
    name_retries: u32,
}

impl TapEnd {
    /// Returns the TAP of a node, not made yet, under its label.
    pub fn of(node: &config::Node) -> Option<(String, Self)> {
        let config = node.tap()?.clone();
        // A card takes finished frames only; a VNI also frames that the next kernel may finish.
        let before = if node.vni.is_some() { Before::Offload } else { Before::Nothing };
        let (on, name) = (OnVni::of(node), node.vni.as_ref().map(|_| node.name.clone()));
        let label = config.label();
        let (veth_end, device, waiting) = (None, None, None);
        let (mac, other_mac, made_in, is_gone) = (None, None, None, false);
        let (changes, stale) = (Bucket::new(CHANGES_AT_ONCE_MAX, CHANGE_EVERY, now()), BTreeSet::new());
        let tap = TapEnd {
            config,
            node: name,
            before,
            on,
            veth_end,
            device,
            waiting,
            mac,
            other_mac,
            changes,
            stale,
            made_in,
            is_gone,
            name_retries: 0,
        };
        Some((label, tap))
    }

    fn place(&self) -> Namespace {
        self.config.netns.as_deref().map_or(Namespace::Own, Namespace::named)
    }

    fn settings(&self) -> Settings {
        self.config.settings(self.on.as_ref().map(|on| on.mac))
    }

    /// Takes note of nodes whose workers have the interface in whose place this one came.
    pub fn makes_stale(&mut self, nodes: impl Iterator<Item = String>) {
        self.stale.extend(nodes);
    }

    /// Takes note that this node is made anew, and its workers get this one.
    pub fn is_fresh_for(&mut self, node: &str) {
        self.stale.remove(node);
    }

    /// Goes by other settings of its node.
    pub fn set(&mut self, node: &config::Node) {
        self.on = OnVni::of(node);
    }

    /// Returns its descriptor, if it exists.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.device.as_ref().map(AsFd::as_fd)
    }

    /// Makes it, unless it exists. Also returns why it has no veth end, if it was to have one.
    pub fn make(&mut self, shortcuts: &mut Shortcuts) -> Result<(&OwnedFd, Option<String>), TapError> {
        let mut why = None;
        let device = match self.device.take() {
            Some(device) => device,
            None => {
                (self.mac, self.other_mac, self.veth_end, self.is_gone) = (None, None, None, false);
                self.waiting = None;
                self.made_in = self.place().identity();
                match self.connect(shortcuts) {
                    Some(Ok(device)) => device,
                    Some(Err(error @ (TapError::NoNamespace(_) | TapError::Namespace { .. }))) => return Err(error),
                    // The name was that of an interface that went just then: it is free for one with a veth end. A TAP that
                    // somebody made stays, and is used.
                    Some(Err(error @ TapError::Taken(_))) if !self.is_named() => return Err(error),
                    tried => {
                        let made = Tap::create(&self.place(), &self.config.name, &self.settings(), self.before)?;
                        why = tried.and_then(Result::err).map(|error| self.long_way(&error));
                        made.device
                    }
                }
            }
        };
        self.name_retries = 0;
        Ok((self.device.insert(device), why))
    }

    /// Bounds what waits in its queues by a limit on what its node sends. Returns why that could not be. An interface that
    /// never had a limit stays as it is: others may have given it another queue.
    fn bound(&mut self, limit: message::Limit) -> Option<String> {
        let longest = u64::from(self.config.mtu.unwrap_or(1500)) + 14;
        let wanted = config::in_queue(limit, longest, self.config.queues());
        let device = self.device.as_ref().filter(|_| wanted != self.waiting)?;
        let waiting = wanted.unwrap_or_default();
        // Long segments of an interface beside a veth end would all be cut to frames at the TAP.
        let beside = self.veth_end.as_ref().map(|_| self.place());
        let its = || Interface::if_there(&self.config.name)?.map_or(Ok(()), |its| its.bound(waiting));
        let label = self.config.label();
        if let Err(error) = tasuki_tap::bound(device, waiting) {
            return Some(match wanted {
                Some(_) => format!(
                    "what {label} sends too fast may wait for seconds, and its neighbours lose it meanwhile: {error}"
                ),
                None => format!(
                    "{label} keeps the short queue of the limit that it had, and drops what finds that full: {error}"
                ),
            });
        }
        // The TAP has to be given back, also if the interface beside it could not be bounded.
        self.waiting = wanted;
        let error = beside.and_then(|place| place.within(its).err())?;
        Some(format!(
            "{label} sends segments of a length that does not fit its limit, which costs its worker time: {error}"
        ))
    }

    /// Returns whether its interface is not in the namespace any more that has the name: the name is another's, or the
    /// interface was moved. Not if that is not known.
    fn is_elsewhere(&self) -> bool {
        if self.veth_end.as_ref().is_some_and(|veth_end| veth_end.is_in(&self.place()) == Some(false)) {
            return self.device.is_some();
        }
        self.is_in().zip(self.place().identity()).is_some_and(|(is_in, named)| is_in != named)
    }

    /// Returns the namespace of its interface, if it exists; of one with a veth end, that in which it was made.
    fn is_in(&self) -> Option<Identity> {
        let device = self.device.as_ref()?;
        match &self.veth_end {
            Some(_) => self.made_in,
            None => Unnamed::of(namespace_of(device.as_fd()).ok()?).identity(),
        }
    }

    /// Returns whether its interface is the one with this number in this namespace.
    pub fn is_at(&self, (namespace, index): (Identity, u32)) -> bool {
        self.is_in() == Some(namespace) && packet::index_of(&self.place(), &self.config.name) == Some(index)
    }

    /// Returns what the keeper gets: the descriptor, if it exists, and where and for which node it was made.
    pub fn deposit(&self) -> Option<(String, Vec<BorrowedFd<'_>>)> {
        let waiting = self.waiting.map(|waiting| (waiting.frames, waiting.segment));
        let text = TapText { made_in: self.made_in, node: self.node.clone(), waiting };
        Some((serde_json::to_string(&text).expect("plain data"), vec![self.fd()?]))
    }

    /// Returns whether its namespace has an interface of its name.
    fn is_named(&self) -> bool {
        let there = self.place().within(|| Interface::if_there(&self.config.name));
        !matches!(there, Ok(None))
    }

    /// Makes it with a veth end, if it is to have one.
    fn connect(&mut self, shortcuts: &mut Shortcuts) -> Option<Result<OwnedFd, TapError>> {
        let on = self.on.as_ref().filter(|on| on.may_shortcut)?;
        let place = self.place();
        let made = shortcuts.connect(on, &place, &self.config.name, &self.settings());
        Some(made.map(|(veth_end, device)| {
            self.veth_end = Some(veth_end);
            device
        }))
    }

    fn long_way(&self, error: &TapError) -> String {
        format!(
            "frames between {} and other namespaces go by their workers, more slowly than through the kernel: {error}",
            self.config.label()
        )
    }

    /// Adopts an earlier daemon's TAP; if its interface is gone, only where a worker that lives has it, too. Returns why it
    /// has no veth end, if it was to have one.
    fn adopt(&mut self, device: OwnedFd, text: TapText, lives: bool, shortcuts: &mut Shortcuts) -> Option<String> {
        if self.device.is_some() {
            return None;
        }
        let adopted = self.on.as_ref().map(|on| (on.may_shortcut, shortcuts.adopt(on, &device)));
        // That daemon died while it removed it, before the keeper knew.
        if !lives && is_gone(device.as_fd()) {
            return None;
        }
        self.device = Some(device);
        self.waiting = text.waiting.map(|(frames, segment)| Waiting { frames, segment });
        // An earlier daemon does not say it.
        self.made_in = text.made_in.or_else(|| self.place().identity());
        match adopted? {
            (_, Ok(veth_end)) => {
                self.veth_end = Some(veth_end);
                None
            }
            // It never had one.
            (false, Err(TapError::NoVethEnd(_))) => None,
            (true, Err(error @ TapError::NoVethEnd(_))) => Some(self.long_way(&error)),
            (_, Err(error)) => Some(format!(
                "frames between {} and other namespaces go on as the tasukid before this one had it, and no capture sees them: {error}",
                self.config.label()
            )),
        }
    }

    /// Returns the station address that it has to keep, if there is one.
    fn its_mac(&self) -> Option<[u8; 6]> {
        self.mac.or_else(|| self.on.as_ref().filter(|on| !on.may_have_others).map(|on| on.mac))
    }

    /// Looks whether somebody gave it another station address than the one it has to keep. Returns whether that is news. To
    /// ask an interface beside a veth end means to enter its namespace, which `may_enter` allows.
    fn has_other_mac(&mut self, may_enter: bool) -> bool {
        let (Some(its), Some(device)) = (self.its_mac(), &self.device) else { return false };
        let has = match &self.veth_end {
            None => device::mac(device.as_fd()).ok(),
            Some(_) if may_enter => self.place().within(|| Ok(device::mac_of(&self.config.name).ok())).ok().flatten(),
            Some(_) => return false,
        };
        let other = has.filter(|has| *has != its);
        let is_news = other.is_some() & (std::mem::replace(&mut self.other_mac, other) != other);
        is_news && self.changes.take(now())
    }

    /// Removes the parts that do not go with its descriptors.
    pub fn close(self) {
        match (self.veth_end, self.device) {
            (Some(veth_end), _) => veth_end.remove(),
            (None, Some(device)) => {
                // The keeper has it for a moment more, and a node that is added again wants the name.
                remove(&device);
            }
            (None, None) => {}
        }
    }
}

/// Removes a TAP, and the veth end beside it, which may be one that could not be adopted. Best effort: it may be gone with
/// its namespace.
fn remove(device: &OwnedFd) {
    remove_beside(device);
    let _ = device::remove(device.as_fd());
}

/// Text of a TAP's entry in the keeper.
#[derive(Debug, Serialize, Deserialize)]
struct TapText {
    made_in: Option<Identity>,
    node: Option<String>,
    /// An earlier daemon does not say it.
    waiting: Option<(u32, u32)>,
}

impl TapText {
    /// Reads the text of this daemon, or of one from before there was a node in it.
    fn read(text: &str) -> Self {
        let of_before = || TapText { made_in: serde_json::from_str(text).ok(), node: None, waiting: None };
        serde_json::from_str(text).unwrap_or_else(|_| of_before())
    }
}

impl Supervisor {
    /// Removes the interfaces of nodes that are in the configuration no more where another node is to have one of the same
    /// name: it would have the station address and the IP addresses of the former.
    pub(super) fn remove_taps_of_others(&self, living: &[String], found: &mut Found) {
        for (label, tap) in self.config.node.iter().filter_map(TapEnd::of) {
            let key = Key::Tap(label);
            let is_anothers = |(text, _): &(String, Vec<OwnedFd>)| {
                let was = TapText::read(text).node;
                was.is_some() && tap.node.is_some() && was != tap.node
            };
            let lives = tap.node.as_ref().is_some_and(|node| living.contains(node));
            if lives || !found.get(&key).is_some_and(is_anothers) {
                continue;
            }
            if let Some(device) = found.remove(&key).and_then(|(_, fds)| fds.into_iter().next()) {
                remove(&device);
            }
        }
    }

    /// Adopts the TAPs of an earlier daemon, and makes the others, except those of which workers of the nodes in
    /// `living` have the only descriptor.
    pub(super) fn begin_taps(&mut self, living: &[String], found: &mut Found) -> Result<()> {
        let goes_on = !living.is_empty() || !found.is_empty();
        self.taps = self.config.node.iter().filter_map(TapEnd::of).collect::<BTreeMap<_, _>>();
        for label in self.taps.keys().cloned().collect::<Vec<_>>() {
            let its = found.remove(&Key::Tap(label.clone()));
            let device = its.and_then(|(text, fds)| Some((TapText::read(&text), fds.into_iter().next()?)));
            let lives = living.iter().any(|node| self.config.tap(node).is_some_and(|tap| tap.label() == label));
            device.into_iter().for_each(|(text, device)| self.adopt_tap(&label, device, text, lives));
        }
        // Of TAPs no longer in the configuration, remove the parts that do not go with the descriptor.
        for (key, (_, fds)) in found.iter() {
            if let (Key::Tap(_), Some(device)) = (key, fds.first()) {
                remove_beside(device);
            }
        }
        let has_it = |node: &String| self.config.tap(node).is_some_and(|tap| self.taps[&tap.label()].device.is_some());
        let living: Vec<String> = living.iter().filter(|node| !has_it(node)).cloned().collect();
        let of_living: Vec<String> = living.iter().filter_map(|node| Some(self.config.tap(node)?.label())).collect();
        // These workers end, as no keeper has their descriptors, and the kernel removes the interfaces some moments after them.
        let going = self.taps.iter_mut().filter(|(label, _)| of_living.contains(label));
        going.for_each(|(_, tap)| tap.name_retries = NAME_RETRIES);
        let mut troubles = Vec::new();
        // Namespaces that are to reach each other must be connected where an earlier daemon connected the others:
        // the new ones wait for those.
        let waits = |tap: &TapEnd| {
            tap.on
                .as_ref()
                .is_some_and(|on| on.may_shortcut && living.iter().any(|node| self.config.is_on(node, &on.vni)))
        };
        for (label, tap) in self.taps.iter_mut().filter(|(label, tap)| !of_living.contains(label) && !waits(tap)) {
            let node = self.config.node.iter().find(|node| node.tap().is_some_and(|tap| tap.label() == **label));
            let node = node.map_or("", |node| &node.name);
            let is_on_vni = tap.before == Before::Offload;
            match tap.make(&mut self.shortcuts) {
                Ok((_, None)) => {}
                Ok((_, Some(why))) => troubles.push(why),
                // A node that was added by hand is in no file that could be mended. Its worker is started once the
                // TAP exists. So it is where other nodes live: they are not left alone for this one.
                Err(error) if is_on_vni || goes_on => {
                    troubles.push(format!("node {node:?} has no TAP {label} as yet: {error}"))
                }
                Err(error) => return Err(error).with_context(|| format!("node {node:?} has no TAP {label}")),
            }
        }
        troubles.into_iter().for_each(|trouble| self.note(About::default(), trouble));
        Ok(())
    }

    /// Adopts the TAP that an earlier daemon had.
    fn adopt_tap(&mut self, label: &str, device: OwnedFd, text: TapText, lives: bool) {
        let why = self.taps.get_mut(label).and_then(|tap| tap.adopt(device, text, lives, &mut self.shortcuts));
        why.into_iter().for_each(|why| self.note(About::default(), why));
    }

    /// Returns the description and the descriptor for a worker of this node, if it is to have a TAP.
    pub(super) fn tap_for(&mut self, node: &str) -> Result<Option<(message::Endpoint, OwnedFd)>> {
        let Some(label) = self.config.tap(node).map(config::Tap::label) else { return Ok(None) };
        let tap = self.taps.get_mut(&label).with_context(|| format!("there is no TAP {label}"))?;
        let (device, why) = tap.make(&mut self.shortcuts).with_context(|| format!("it has no TAP {label}"))?;
        let device = device.try_clone()?;
        let config = self.config.node(node);
        let limits = config.map(config::Node::limits).unwrap_or_default();
        let unbounded = tap.bound(limits[0]);
        self.mark_deposit(Key::Tap(label.clone()));
        why.into_iter().chain(unbounded).for_each(|why| self.note(About::node(node), why));
        let config = self.config.node(node);
        let latency_us = config.and_then(|node| node.latency_us);
        let description = message::Endpoint { kind: "tap".to_owned(), label, text: String::new(), limits, latency_us };
        Ok(Some((description, device)))
    }

    /// Returns whether a node has no TAP only because the interface of workers that were ended is still going away. If that
    /// lasts, it is another's.
    pub(super) fn waits_for_name(&mut self, node: &str, error: &anyhow::Error) -> bool {
        let is_taken = matches!(error.downcast_ref(), Some(TapError::Taken(_)));
        let label = self.config.tap(node).filter(|_| is_taken).map(config::Tap::label);
        let Some(tap) = label.and_then(|label| self.taps.get_mut(&label)) else { return false };
        let left = tap.name_retries.checked_sub(1);
        tap.name_retries = left.unwrap_or(0);
        left.is_some()
    }

    /// Sends all frames of a namespace that is captured, or may not take the shortcut, by way of its worker.
    pub(super) fn reconcile_shortcuts(&mut self) {
        let nodes = self.config.node.iter().filter(|node| node.vni.is_some());
        let labels: Vec<(String, bool)> =
            nodes.filter_map(|node| Some((node.tap()?.label(), self.is_captured(&node.name)))).collect();
        for (label, is_captured) in labels {
            let Some(tap) = self.taps.get_mut(&label) else { continue };
            let may = tap.on.as_ref().is_some_and(|on| on.may_shortcut);
            let Some(veth_end) = tap.veth_end.as_mut() else { continue };
            if let Err(error) = veth_end.set_detour(is_captured || !may) {
                let what = if may { "are captured" } else { "go by its worker, which keeps its limits" };
                self.note(About::default(), format!("of {label} not all frames {what}: {error}"));
            }
        }
    }

    pub(super) fn close_taps(&mut self) {
        self.interfaces.clear();
        std::mem::take(&mut self.taps).into_values().for_each(TapEnd::close);
    }

    /// Checks whether interfaces are still there. A worker sees that of a TAP in its namespace once it has a frame for it,
    /// and not of one beside a veth end.
    pub(super) fn look_at_interfaces(&mut self) {
        if now().saturating_sub(self.interfaces_looked_at) < INTERFACES_EVERY {
            return;
        }
        self.interfaces_looked_at = now();
        self.tell_of_memory();
        // Another daemon may have begun in a directory that was deleted: the registry there is its own.
        if self.place.is_ours() {
            let news = self.registry.look(now());
            self.tell_of_registry(news);
        }
        if !self.is_pressing() {
            self.mend_worker_sockets();
        }
        self.tell_of_links();
        self.look_for_lost_interfaces();
        let mut strange = Vec::new();
        self.turn = self.turn.wrapping_add(1);
        let enters = self.turn.checked_rem(self.taps.len()).filter(|_| !self.is_pressing());
        for (at, (label, tap)) in self.taps.iter_mut().enumerate() {
            if tap.has_other_mac(enters == Some(at) && !tap.is_gone) {
                strange.push(label.clone());
            }
        }
        self.tell_of_endpoints_links();
        for why in strange.iter().filter_map(|label| self.why_filtered(label)).collect::<Vec<_>>() {
            self.note(About::default(), why);
        }
    }

    /// Notes which interfaces are gone, and of which nodes that is news.
    pub(super) fn look_for_lost_interfaces(&mut self) {
        let mut lost = Vec::new();
        for (label, tap) in &mut self.taps {
            // If the veth end is gone, so is the TAP.
            tap.veth_end.take_if(|veth_end| !veth_end.is_there()).into_iter().for_each(VethEnd::remove);
            let is_gone = tap.device.as_ref().is_some_and(|device| is_gone(device.as_fd())) || tap.is_elsewhere();
            if !std::mem::replace(&mut tap.is_gone, is_gone) && is_gone {
                lost.push(label.clone());
            }
        }
        for (label, endpoint) in &mut self.endpoints {
            if endpoint.has_lost_its_interface() {
                lost.push(label.clone());
            }
        }
        let is_lost = |node: &&config::Node| node.label().is_some_and(|label| lost.contains(&label));
        let nodes: Vec<String> = self.config.node.iter().filter(is_lost).map(|node| node.name.clone()).collect();
        for node in nodes {
            let why = self.why_without_interface(&node);
            why.into_iter().for_each(|why| self.note(About::node(&node), why));
        }
    }

    fn tell_of_links(&mut self) {
        let its = |card: &mut Card| Some((card.news_of_link(now())?, card.name().to_owned(), card.node().to_owned()));
        let news: Vec<_> = self.cards.values_mut().filter_map(its).collect();
        news.into_iter().for_each(|(sentence, nic, node)| self.note(About::node(&node).of_nic(&nic), sentence));
    }

    /// Returns a sentence if a TAP has another station address than it has to keep.
    fn why_filtered(&self, label: &str) -> Option<String> {
        let tap = self.taps.get(label)?;
        let [other, mac] = [tap.other_mac?, tap.its_mac()?].map(StationAddress);
        let takes = if tap.node.is_some() { "its VNI takes frames from" } else { "its NIC lets in frames for" };
        Some(format!(
            "the interface {label} was given the station address {other}, and {takes} {mac} alone: give it that again (ip link set {} address {mac})",
            tap.config.name
        ))
    }

    /// Returns the same for the TAP of a node.
    pub(super) fn why_filtered_at(&self, node: &str) -> Option<String> {
        self.why_filtered(&self.config.tap(node)?.label())
    }

    /// Returns a sentence if the node's interface is gone.
    pub(super) fn why_without_interface(&self, name: &str) -> Option<String> {
        let node = self.config.node(name)?;
        let label = node.label()?;
        let is_gone = self.taps.get(&label).is_some_and(|tap| tap.is_gone || tap.stale.contains(name))
            || self.endpoints.get(&label).is_some_and(|endpoint| endpoint.is_gone);
        let remedy = match self.by_hand.contains(name) {
            true if node.container.is_some() => {
                format!("remove the node (tasuki node remove {name}), and start the container anew")
            }
            true => format!("remove the node (tasuki node remove {name}) and add it again"),
            false => format!("apply the configuration, which makes the node anew ({})", self.current.command()),
        };
        is_gone.then(|| format!(
            "node {name} has no interface any more: {label} was deleted or moved, or its namespace ended or has lost its name; {remedy}"
        ))
    }

    /// Returns the frames that a node sent and received past its worker, if it has a veth end.
    pub(super) fn crossed(&self, node: &str) -> Option<Crossed> {
        let tap = self.taps.get(&self.config.tap(node).filter(|tap| tap.shortcut)?.label())?;
        tap.veth_end.as_ref().map(VethEnd::crossed)
    }

    /// Returns the veth end of a node on a VNI, if its interface has one. Nodes that share an interface have the same.
    pub(super) fn veth_end_of(&self, node: &str) -> Option<&VethEnd> {
        self.taps.get(&self.config.tap(node)?.label())?.veth_end.as_ref()
    }

    /// Returns the frames that the kernel dropped between the interface for which an end stands and the worker, by the name
    /// of the reason for which a worker counts such frames. None for a node that has one more queue of an interface.
    pub(super) fn dropped_by_kernel(&self, nic: u32) -> Vec<(&'static str, u64)> {
        let lost = || {
            let node = self.cards.get(&nic).filter(|card| card.vni().is_some())?.node();
            let tap = self.taps.get(&self.config.tap(node)?.label())?;
            tap.veth_end.as_ref().filter(|_| tap.node.as_deref() == Some(node))?.lost()
        };
        lost().map(|Lost { sent, received }| vec![("refused", received), ("by_socket", sent)]).unwrap_or_default()
    }

    /// Gives every TAP the station address of the NIC that it stands for, or is about to. One on a VNI is made with that of
    /// the configuration, and keeps it: while its veth end has it, no other node receives the frames sent there (W1).
    pub(super) fn reconcile_taps(&mut self) {
        if self.taps.is_empty() {
            return;
        }
        let mut wanted = Vec::new();
        for card in self.cards.values() {
            let Some(mac) = card.opened.as_ref().and_then(|opened| opened.bundle.mac) else { continue };
            let next = self.jobs.iter().filter(|job| job.is_about(card.number)).map(super::jobs::Job::node);
            let nodes = [card.node()].into_iter().chain(next);
            let nodes = nodes.filter_map(|node| self.config.node(node)).filter(|node| node.vni.is_none());
            wanted.extend(nodes.filter_map(|node| Some((node.tap()?.label(), mac, card.name().to_owned()))));
        }
        for (label, mac, nic) in wanted {
            let Some(tap) = self.taps.get_mut(&label).filter(|tap| tap.mac != Some(mac)) else { continue };
            let Some(device) = &tap.device else { continue };
            tap.mac = Some(mac);
            if let Err(error) = set_mac(device, mac) {
                self.note(About::nic(&nic), format!("{label} gets no frames for {nic}: {error}"));
            }
        }
    }

    /// Checks that the node's TAP would stand for one NIC only.
    pub(super) fn may_have(&self, node: &str, nic: u32) -> Result<(), Refusal> {
        let label = |node: &str| self.config.tap(node).map(config::Tap::label);
        let Some(tap) = label(node) else { return Ok(()) };
        let other = self.cards.values().find(|card| card.number != nic && label(card.node()).as_ref() == Some(&tap));
        other.map_or(Ok(()), |other| {
            let (has, other) = (other.node(), other.name());
            Err(Refusal::conflict(format!(
                "{tap} of node {node} stands for {other} already; give that to another node than {has} first"
            )))
        })
    }
}
