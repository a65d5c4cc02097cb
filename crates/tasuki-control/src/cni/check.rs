//! `CHECK` (§2): whether a container's interface is as `ADD` left it.

use std::net::IpAddr;

use serde::Deserialize;
use tasuki_tap::interface::Interface;
use tasuki_tap::{Address, Settings};

use super::call::Call;
use super::daemon::Daemon;
use super::ipam::Ipam;
use super::network::Network;
use super::{Failure, code};
use crate::config::StationAddress;

/// The result of the calls before (§5), as far as it is compared.
#[derive(Debug, Deserialize)]
struct Before {
    #[serde(default)]
    interfaces: Vec<ItsInterface>,
    #[serde(default)]
    ips: Vec<ItsIp>,
    #[serde(default)]
    routes: Vec<ItsRoute>,
}

#[derive(Debug, Deserialize)]
struct ItsInterface {
    name: String,
    #[serde(default)]
    mac: String,
    mtu: Option<u32>,
    #[serde(default)]
    sandbox: String,
}

#[derive(Debug, Deserialize)]
struct ItsIp {
    address: String,
    interface: Option<usize>,
}

#[derive(Debug, Deserialize)]
struct ItsRoute {
    dst: String,
    gw: Option<IpAddr>,
    table: Option<u32>,
}

pub fn check(call: &Call) -> Result<(), Failure> {
    let network = Network::read(call)?;
    let before = call.input.get("prevResult").cloned().ok_or_else(|| {
        let sentence =
            "CHECK compares with the result of ADD, and there is none (prevResult); the runtime has to give it";
        Failure::new(code::CONFIGURATION, sentence)
    })?;
    let before: Before = serde_json::from_value(before).map_err(|error| {
        let sentence = format!("the result of ADD (prevResult) cannot be read ({error}); the runtime has to mend that");
        Failure::new(code::CONFIGURATION, sentence)
    })?;
    let (daemon, container) = (Daemon::of(&network), call.its.key());
    let Some(node) = daemon.node_of(&container)? else {
        let sentence = format!("there is no node for container {container}; remove the container, and start it anew");
        return Err(Failure::new(code::UNKNOWN_CONTAINER, sentence));
    };
    if let Some(trouble) = node.trouble {
        return Err(Failure::new(code::OTHER, format!("node {} does not work: {trouble}", node.name)));
    }
    daemon.await_worker(&node.name).map_err(|not| not.failure)?;
    let namespace = call.its.namespace()?;
    let read = |its: Interface| Ok((its.read()?, its.is_up()?));
    let found = namespace.within(|| Interface::if_there(&call.its.ifname)?.map(read).transpose());
    let found = found.map_err(|error| Failure::new(code::OTHER, error.to_string()))?;
    let differs = |what: String| {
        let sentence = format!("container {container}: {what}; remove the container, and start it anew");
        Failure::new(code::OTHER, sentence)
    };
    let Some((settings, is_up)) = found else {
        return Err(differs(format!("its interface {} is gone", call.its.ifname)));
    };
    if !is_up {
        return Err(differs(format!("its interface {} is down", call.its.ifname)));
    }
    before.difference(call, &settings).map_or(Ok(()), |what| Err(differs(what)))?;
    Ipam::of(call)?.map_or(Ok(()), |ipam| ipam.ask("CHECK").map(drop))
}

impl Before {
    /// Returns the first thing that the interface had then, and has no more.
    fn difference(&self, call: &Call, settings: &Settings) -> Option<String> {
        let name = &call.its.ifname;
        let is_its = |its: &ItsInterface| its.name == *name && its.sandbox == call.its.netns;
        let Some((number, its)) = self.interfaces.iter().enumerate().find(|(_, its)| is_its(its)) else {
            return Some(format!("the result of ADD (prevResult) has no interface {name} in {}", call.its.netns));
        };
        let mac = settings.mac.map(|mac| StationAddress(mac).to_string()).unwrap_or_default();
        if !its.mac.is_empty() && !its.mac.eq_ignore_ascii_case(&mac) {
            return Some(format!("{name} has the station address {mac}, and not {}", its.mac));
        }
        if let Some(mtu) = its.mtu.filter(|mtu| *mtu > 0 && Some(*mtu) != settings.mtu) {
            return Some(format!("{name} has not the MTU {mtu} any more"));
        }
        let address = |text: &str| text.parse::<Address>().ok();
        let ips = self.ips.iter().filter(|ip| ip.interface.is_none_or(|its| its == number));
        let lost = |ip: &&ItsIp| !address(&ip.address).is_some_and(|its| settings.addresses.contains(&its));
        if let Some(ip) = { ips }.find(lost) {
            return Some(format!("{name} has not the address {} any more", ip.address));
        }
        let has = |route: &ItsRoute, to: Address| {
            settings.routes.iter().any(|its| its.to == to && route.gw.is_none_or(|gw| its.via == Some(gw)))
        };
        // We make routes in the main table alone.
        let is_ours = |route: &&ItsRoute| route.table.is_none_or(|table| table == 254 || table == 0);
        let lost = |route: &&ItsRoute| !address(&route.dst).is_some_and(|to| has(route, to));
        let route = self.routes.iter().filter(is_ours).find(lost)?;
        Some(format!("{name} has not the route to {} any more", route.dst))
    }
}
