//! TAPs: the interfaces that network namespaces have instead of nodes' NICs. The daemon makes them, gives every worker of their nodes the
//! descriptor, and sees that each has the station address of the NIC that it stands for, for that is what the card lets in.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

use anyhow::{Context, Result};
use tasuki_tap::device::Before;
use tasuki_tap::interface::Interface;
use tasuki_tap::namespace::Namespace;
use tasuki_tap::{Tap, TapError};

use super::door::No;
use super::{About, Supervisor};
use crate::config;

/// A TAP, as far as there is one.
#[derive(Debug)]
pub struct TapEnd {
    config: config::Tap,
    /// What stands before each frame.
    before: Before,
    device: Option<OwnedFd>,
    /// Its other side.
    interface: Option<Interface>,
    /// The station address that it was given, or was to be given in vain.
    mac: Option<[u8; 6]>,
}

impl TapEnd {
    /// That of a node, by its label, not made yet.
    pub fn of(node: &config::Node) -> Option<(String, Self)> {
        let config = node.tap()?.clone();
        // A card takes finished frames only; a VNI those that the next kernel may finish.
        let before = if node.vni.is_some() { Before::Offload } else { Before::Nothing };
        Some((config.label(), TapEnd { config, before, device: None, interface: None, mac: None }))
    }

    fn place(&self) -> Namespace {
        self.config.netns.as_deref().map_or(Namespace::Own, Namespace::named)
    }

    /// Makes it, if it is not there.
    pub fn make(&mut self) -> Result<&OwnedFd, TapError> {
        let device = match self.device.take() {
            Some(device) => device,
            None => {
                let made = Tap::create(&self.place(), &self.config.name, self.config.address, self.before)?;
                (self.interface, self.mac) = (Some(made.interface), None);
                made.device
            }
        };
        Ok(self.device.insert(device))
    }

    fn set_mac(&mut self, mac: [u8; 6]) -> Result<(), TapError> {
        let interface = match self.interface.take() {
            Some(interface) => interface,
            None => self.place().within(|| Interface::find(&self.config.name))?,
        };
        self.interface.insert(interface).set_mac(mac)
    }
}

impl Supervisor {
    /// Makes all TAPs but those that living workers of these nodes may have kept.
    pub(super) fn begin_taps(&mut self, living: &[String]) -> Result<()> {
        self.taps = self.config.node.iter().filter_map(TapEnd::of).collect::<BTreeMap<_, _>>();
        let kept: Vec<String> = living.iter().filter_map(|node| Some(self.config.tap(node)?.label())).collect();
        let mut troubles = Vec::new();
        for (label, tap) in self.taps.iter_mut().filter(|(label, _)| !kept.contains(label)) {
            let node = self.config.node.iter().find(|node| node.tap().is_some_and(|tap| tap.label() == **label));
            let node = node.map_or("", |node| &node.name);
            let is_on_vni = tap.before == Before::Offload;
            match tap.make() {
                Ok(_) => {}
                // Whoever was added by hand is in no file that could be mended; its worker is started when there is one.
                Err(error) if is_on_vni => troubles.push(format!("node {node:?} has no TAP {label} as yet: {error}")),
                Err(error) => return Err(error).with_context(|| format!("node {node:?} has no TAP {label}")),
            }
        }
        troubles.into_iter().for_each(|trouble| self.note(About::default(), trouble));
        Ok(())
    }

    /// What a worker of the daemon before this one has kept.
    pub(super) fn adopt_tap(&mut self, label: &str, device: OwnedFd) {
        // Of a TAP that is in the configuration no more the worker has the only descriptor.
        if let Some(tap) = self.taps.get_mut(label) {
            tap.device.get_or_insert(device);
        }
    }

    /// What a worker of this node is to be given, if it is to have a TAP.
    pub(super) fn tap_for(&mut self, node: &str) -> Result<Option<(String, OwnedFd)>> {
        let Some(label) = self.config.tap(node).map(config::Tap::label) else { return Ok(None) };
        let tap = self.taps.get_mut(&label).with_context(|| format!("there is no TAP {label}"))?;
        let device = tap.make().with_context(|| format!("it has no TAP {label}"))?.try_clone()?;
        Ok(Some((label, device)))
    }

    /// Every TAP has the station address of the NIC that it stands for, or is about to.
    pub(super) fn fit_taps(&mut self) {
        if self.taps.is_empty() {
            return;
        }
        let mut wanted = Vec::new();
        for card in self.cards.values() {
            let Some(mac) = card.kept.as_ref().and_then(|kept| kept.kit.mac) else { continue };
            let next = self.jobs.iter().filter(|job| job.is_about(card.number)).map(super::jobs::Job::node);
            let nodes = [card.node.as_str()].into_iter().chain(next);
            wanted.extend(nodes.filter_map(|node| Some((self.config.tap(node)?.label(), mac, card.name().to_owned()))));
        }
        for (label, mac, nic) in wanted {
            let Some(tap) = self.taps.get_mut(&label).filter(|tap| tap.device.is_some() && tap.mac != Some(mac)) else {
                continue;
            };
            tap.mac = Some(mac);
            if let Err(error) = tap.set_mac(mac) {
                self.note(About::nic(&nic), format!("{label} gets nothing of what is meant for {nic}: {error}"));
            }
        }
    }

    /// A TAP stands for one NIC.
    pub(super) fn may_have(&self, node: &str, nic: u32) -> Result<(), No> {
        let label = |node: &str| self.config.tap(node).map(config::Tap::label);
        let Some(tap) = label(node) else { return Ok(()) };
        let other = self.cards.values().find(|card| card.number != nic && label(&card.node).as_ref() == Some(&tap));
        other.map_or(Ok(()), |other| {
            let (has, other) = (&other.node, other.name());
            Err(No::now(format!(
                "{tap} of node {node} stands for {other} already; give that to another node than {has} first"
            )))
        })
    }
}
