//! A plugin of netavark, by which podman connects containers from 4.5 on: another front of what `tasuki-cni` does.
//!
//! netavark starts the plugin for a network whose driver has its file's name, with a verb, and JSON on standard input.
//! Its plugin-API.md describes that, its `network/types.rs` has the types.
//!
//! podman assigns the addresses, so there is no plugin for them here. `dns_enabled` says that netavark's own name server
//! answers on the network, and it does so on bridges alone.

use std::collections::BTreeMap;
use std::io::Write;
use std::net::IpAddr;
use std::process::ExitCode;
use std::time::Duration;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use tasuki_tap::Address;

use crate::api::types::NodeView;
use crate::cni::attachment::{Attachment, Front, is_gone, is_identifier, prepare};
use crate::cni::call::read_input;
use crate::cni::daemon::Daemon;
use crate::cni::ipam::{Assigned, Ip, Way, address};
use crate::cni::network::{Network, known_keys};
use crate::cni::{Failure, code};
use crate::config::{Node, StationAddress};

/// Version of the plugins' interface.
const API_VERSION: &str = "1.0.0";
/// Time for removing what other containers have left.
const OTHERS_TIMEOUT: Duration = Duration::from_secs(2);

/// A network, as far as it means something here.
#[derive(Debug, Deserialize)]
struct Configuration {
    name: String,
    #[serde(default)]
    internal: bool,
    network_interface: Option<String>,
    options: Option<BTreeMap<String, String>>,
    ipam_options: Option<BTreeMap<String, String>>,
    subnets: Option<Vec<Subnet>>,
    routes: Option<Vec<Route>>,
    network_dns_servers: Option<Vec<IpAddr>>,
}

#[derive(Debug, Deserialize)]
struct Subnet {
    subnet: String,
    gateway: Option<IpAddr>,
}

#[derive(Debug, Deserialize)]
struct Route {
    destination: String,
    gateway: Option<IpAddr>,
    metric: Option<u32>,
}

/// A container on a network.
#[derive(Debug, Deserialize)]
struct Connection {
    container_id: String,
    port_mappings: Option<Vec<Port>>,
    network: Configuration,
    network_options: Options,
}

#[derive(Debug, Deserialize)]
struct Options {
    interface_name: String,
    static_ips: Option<Vec<IpAddr>>,
    static_mac: Option<String>,
    options: Option<BTreeMap<String, String>>,
}

/// A port of the host that is to lead to the container.
#[derive(Debug, Deserialize)]
struct Port {
    host_port: u16,
    container_port: u16,
}

/// The plugin's program: does what its arguments and its standard input ask, and prints the answer.
pub fn main() -> ExitCode {
    let mut words = std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned());
    let (verb, netns) = (words.next(), words.next().unwrap_or_default());
    let (answer, ended) = match answer(verb.as_deref().unwrap_or("info"), netns) {
        Ok(answer) => (answer, ExitCode::SUCCESS),
        Err(failure) => (json!({ "error": failure.sentence() }), ExitCode::FAILURE),
    };
    if !answer.is_null() {
        // A caller that does not listen has its answer by the status.
        let _ = writeln!(std::io::stdout(), "{answer}");
    }
    ended
}

fn answer(verb: &str, netns: String) -> Result<Value, Failure> {
    let input = || read_input(std::io::stdin()).map(|(_, input)| input);
    match verb {
        "info" => Ok(json!({ "version": env!("CARGO_PKG_VERSION"), "api_version": API_VERSION })),
        "create" => create(input()?),
        "setup" => setup(netns, &read(input()?)?),
        "teardown" => teardown(netns, read(input()?)?).map(|()| Value::Null),
        verb => {
            let sentence = format!(
                "{verb:?} is not known here; podman starts this program, with create, setup, teardown or info (docs/users/containers.md)"
            );
            Err(Failure::new(code::ENVIRONMENT, sentence))
        }
    }
}

fn refused(sentence: String) -> Failure {
    Failure::new(code::CONFIGURATION, sentence)
}

/// Returns the node for a container's interface. The user wrote no quotes around an option's text, so none are to be left
/// out; there may be some within its JSON.
fn node(network: &Network, its: &Attachment, keys: &Map<String, Value>, assigned: &Assigned) -> Result<Node, Failure> {
    network.node(its, keys, assigned).map_err(|failure| {
        let sentence = failure.sentence();
        match keys.keys().any(|key| sentence.contains(&format!(": {key} = "))) {
            true => refused(sentence.replace(", without quotes", "")),
            false => failure,
        }
    })
}

fn read<T: DeserializeOwned>(input: Map<String, Value>) -> Result<T, Failure> {
    serde_json::from_value(Value::Object(input)).map_err(|error| {
        refused(format!(
            "netavark's input cannot be read ({error}); version {API_VERSION} of its plugins' API is spoken"
        ))
    })
}

impl Configuration {
    /// Returns its options, as keys of a network in the form that CNI has. All are texts; numbers and the like are
    /// written in them as in JSON.
    fn keys(&self) -> Map<String, Value> {
        let value = |key: &str, text: &String| match key {
            "vni" | "dir" => json!(text),
            _ => serde_json::from_str(text).unwrap_or_else(|_| json!(text)),
        };
        self.options.iter().flatten().map(|(key, text)| (key.clone(), value(key, text))).collect()
    }

    /// Returns the network, all of whose options have to mean something, and its options as keys.
    fn network(&self) -> Result<(Network, Map<String, Value>), Failure> {
        let name = &self.name;
        if let Some((key, text)) = self.options.iter().flatten().find(|(key, _)| !known_keys().any(|it| it == *key)) {
            let known = known_keys().collect::<Vec<_>>().join(", ");
            let sentence = format!(
                "network {name}: option {key}={text} means nothing to tasuki; leave it out, or write one of {known}"
            );
            return Err(Failure::new(code::UNSUPPORTED, sentence));
        }
        let keys = self.keys();
        Ok((Network::of_keys(name, &keys)?, keys))
    }

    /// Returns what podman has assigned to a container: each address with the length of its subnet.
    fn assigned(&self, ips: &[IpAddr]) -> Result<Assigned, Failure> {
        let name = &self.name;
        let subnets = self.subnets.iter().flatten();
        let subnets: Vec<(Address, Option<IpAddr>)> =
            subnets.map(|it| Ok((address(&it.subnet)?, it.gateway))).collect::<Result<_, Failure>>()?;
        let ips = ips.iter().map(|ip| {
            let its = subnets.iter().find(|(subnet, _)| subnet.is_in_network(*ip));
            let (subnet, gateway) = its.ok_or_else(|| {
                refused(format!("network {name}: no subnet of it has the address {ip}; name one of a subnet, or none"))
            })?;
            // Nobody passes packets on from an internal network.
            let gateway = gateway.filter(|_| !self.internal);
            Ok(Ip { address: Address { ip: *ip, prefix: subnet.prefix }, gateway })
        });
        let ips = ips.collect::<Result<Vec<Ip>, Failure>>()?;
        let mut routes = self.routes.iter().flatten().map(|route| route.way(name)).collect::<Result<Vec<Way>, _>>()?;
        for all in ["0.0.0.0/0", "::/0"] {
            let dst = address(all)?;
            let has_gateway =
                ips.iter().filter_map(|ip| ip.gateway).any(|gateway| gateway.is_ipv4() == dst.ip.is_ipv4());
            if has_gateway && routes.iter().all(|route| route.dst != dst) {
                routes.push(Way { dst, gw: None });
            }
        }
        Ok(Assigned { ips, routes, dns: None })
    }

    /// Returns what is wrong with what podman itself has to do for it.
    fn odd(&self) -> Option<String> {
        let driver = self.ipam_options.as_ref().and_then(|its| its.get("driver")).map(String::as_str);
        let has_subnets = self.subnets.iter().flatten().next().is_some();
        let interface = self.network_interface.as_deref().unwrap_or_default();
        match driver {
            Some("dhcp") => Some(
                "nothing asks for addresses by DHCP; name a subnet (--subnet), or write --ipam-driver none".to_owned(),
            ),
            _ if !interface.is_empty() => Some(format!(
                "a VNI has no interface on the host, and {interface} is named for one; leave --interface-name out"
            )),
            Some("none") => None,
            _ => (!has_subnets).then(|| {
                "its containers have no address without a subnet; name one (--subnet 10.89.7.0/24), or write --ipam-driver none"
                    .to_owned()
            }),
        }
    }
}

impl Route {
    fn way(&self, network: &str) -> Result<Way, Failure> {
        let dst = address(&self.destination)?;
        match (self.gateway, self.metric) {
            (_, Some(metric)) => Err(refused(format!(
                "network {network}: the route to {dst} has the metric {metric}, and tasuki sets none; leave it out"
            ))),
            (None, _) => Err(refused(format!(
                "network {network}: the route to {dst} has no gateway; name one, or leave the route out"
            ))),
            (gw, None) => Ok(Way { dst, gw }),
        }
    }
}

/// `create`: checks what `podman network create` was told, and returns it as podman keeps it.
fn create(mut input: Map<String, Value>) -> Result<Value, Failure> {
    let configuration: Configuration = read(input.clone())?;
    let (network, keys) = configuration.network()?;
    let name = &configuration.name;
    if let Some(what) = configuration.odd() {
        return Err(refused(format!("network {name}: {what}")));
    }
    let assigned = configuration.assigned(&[])?;
    // The node of a container that could be.
    let [id, netns, ifname] = ["container", "/proc/self/ns/net", "eth0"].map(str::to_owned);
    let its = Attachment { front: Front::Netavark, network: name.clone(), id, netns, ifname };
    node(&network, &its, &keys, &assigned)?;
    Daemon::of(&network).nodes_now()?;
    // podman takes servers only for a network with names.
    input.insert("dns_enabled".to_owned(), json!(configuration.network_dns_servers.is_some_and(|it| !it.is_empty())));
    Ok(Value::Object(input))
}

impl Connection {
    fn attachment(&self, netns: String) -> Result<Attachment, Failure> {
        let (network, id, ifname) = (&self.network.name, &self.container_id, &self.network_options.interface_name);
        if let Some(odd) = [network, id].into_iter().find(|word| !is_identifier(word)) {
            return Err(refused(format!(
                "{odd:?} is no name of a network, and no ID of a container; both begin with a letter or digit, and go on with these, dots, - and _"
            )));
        }
        if !tasuki_tap::is_name(ifname) {
            return Err(refused(tasuki_tap::TapError::Name(ifname.clone()).to_string()));
        }
        let [network, id, ifname] = [network, id, ifname].map(String::clone);
        Ok(Attachment { front: Front::Netavark, network, id, netns, ifname })
    }
}

/// `setup`: makes the container's interface, a node.
fn setup(netns: String, connection: &Connection) -> Result<Value, Failure> {
    let (configuration, options) = (&connection.network, &connection.network_options);
    let its = connection.attachment(netns)?;
    if let Some((key, text)) = options.options.iter().flatten().next() {
        return Err(refused(format!(
            "network {}: option {key}={text} of a container means nothing to tasuki; leave it out, or give it to the network",
            its.network
        )));
    }
    let (mut network, keys) = configuration.network()?;
    let mac = options.static_mac.as_ref().filter(|mac| !mac.is_empty());
    network.mac = mac.map(|mac| StationAddress::try_from(mac.to_lowercase())).transpose().map_err(refused)?;
    let assigned = configuration.assigned(options.static_ips.as_deref().unwrap_or_default())?;
    let node = node(&network, &its, &keys, &assigned)?;
    let daemon = Daemon::of(&network);
    let namespace = its.free_namespace(&daemon)?;
    remove_left(&daemon, &its)?;
    prepare(&namespace, &assigned);
    daemon.add(&node).map_err(|not| not.failure)?;
    if let Some(port) = connection.port_mappings.iter().flatten().next() {
        // podman shows it, if it listens. Its own drivers but the bridge say nothing.
        let _ = writeln!(
            std::io::stderr(),
            "network {}: no port of the host leads to it (-p {}:{}); make the host a node, and have it forward (docs/users/containers.md)",
            its.network,
            port.host_port,
            port.container_port
        );
    }
    let subnets = assigned.ips.iter().map(|ip| json!({ "ipnet": ip.address.to_string(), "gateway": ip.gateway }));
    let interface = json!({
        "mac_address": StationAddress(node.mac()).to_string(), "subnets": subnets.collect::<Vec<_>>(),
    });
    Ok(json!({
        "dns_search_domains": [],
        "dns_server_ips": configuration.network_dns_servers.as_deref().unwrap_or_default(),
        "interfaces": { its.ifname: interface },
    }))
}

/// Removes the nodes that podman has forgotten: it asks for teardown once, also while no tasukid is at work, and may give
/// their addresses to others. One is of this container, which was started anew: the new namespace has no such
/// interface. Others of its network have lost their namespaces.
fn remove_left(daemon: &Daemon, its: &Attachment) -> Result<(), Failure> {
    daemon.remove(&its.key())?;
    // Whether this succeeds is of no interest to the container that starts, and it does not wait for it.
    let daemon = daemon.within(OTHERS_TIMEOUT);
    let is_left = |node: &NodeView| node.netns.as_deref().is_some_and(is_gone);
    let left = daemon.nodes().into_iter().flatten().filter(is_left).filter_map(|node| node.container);
    for container in left.filter(|container| container.starts_with(&its.keys_of_network())) {
        let _ = daemon.remove(&container);
    }
    Ok(())
}

/// `teardown`: removes the node, if it is there. Of the network, only what that takes has to make sense.
fn teardown(netns: String, connection: Connection) -> Result<(), Failure> {
    let its = connection.attachment(netns)?;
    Daemon::of(&Network::to_clean_up(&its.network, &connection.network.keys())?).remove(&its.key())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::daemon::tests::{answers, daemon};

    #[test]
    fn a_container_that_starts_has_its_own_left_node_removed_first_and_others_then() {
        let node = |name: &str, id: &str, netns: &str| {
            json!({
                "name": name, "work": "", "workers": [], "nics": [], "generation": 0, "netns": netns,
                "container": format!("netavark:lan/{id}/eth0"),
            })
        };
        let others = || vec![node("one", "1", "/nowhere/1"), node("lives", "2", "/proc/self/ns/net")];
        let with_own = || [others(), vec![node("own", "3", "/nowhere/3")]].concat();
        let held = (404, json!({ "error": "it is gone by now", "relays": [] }));
        let folder = tempfile::tempdir().expect("a folder");
        let answers = answers(
            folder.path(),
            vec![(200, json!(with_own())), (200, json!({})), (200, json!(others())), (200, json!(others())), held],
        );
        let [network, id, ifname] = ["lan", "3", "eth0"].map(str::to_owned);
        let its = Attachment { front: Front::Netavark, network, id, ifname, ..Attachment::default() };
        remove_left(&daemon(folder.path()), &its).expect("its own is gone");
        let asked = answers.join().expect("all is asked");
        let expected =
            ["GET /v1/nodes", "DELETE /v1/nodes/own", "GET /v1/nodes", "GET /v1/nodes", "DELETE /v1/nodes/one"];
        assert_eq!(asked, expected);
    }

    /// Returns what is said of a network for which podman was told this.
    fn said(more: Value) -> String {
        let mut input = json!({
            "name": "lan", "driver": "tasuki", "dns_enabled": true, "internal": false, "ipv6_enabled": false,
            "subnets": [{ "subnet": "10.89.7.0/24" }],
        });
        let (Some(all), Value::Object(more)) = (input.as_object_mut(), more) else { panic!("keys") };
        all.extend(more);
        let Value::Object(input) = input else { panic!("keys") };
        create(input).expect_err("refused").sentence()
    }

    #[test]
    fn a_network_that_makes_no_sense_is_refused_with_what_is_wrong() {
        let options = |key: &str, text: &str| json!({ "options": { key: text } });
        let route = |more: Value| json!({ "routes": [more] });
        let cases = [
            (json!({ "subnets": null }), "network lan: its containers have no address without a subnet; name one"),
            (json!({ "ipam_options": { "driver": "dhcp" }, "subnets": null }), "DHCP; name a subnet"),
            (json!({ "network_interface": "foo0" }), "foo0 is named for one; leave --interface-name out"),
            (json!({ "name": "Lan" }), "network Lan: vni \"Lan\": a name is 1 to 24"),
            (options("vni", "5"), "network lan: vni \"5\": a name is 1 to 24"),
            (
                options("vin", "lan"),
                "network lan: option vin=lan means nothing to tasuki; leave it out, or write one of vni",
            ),
            (options("mtu", "9"), "network lan: mtu = 9 is not in the range 68 to 65521; correct"),
            (options("mtu", "many"), "network lan: mtu = \"many\""),
            (options("mtu", "70000"), "network lan: mtu = 70000 is not in the range 68 to 65521; "),
            (options("cpu", "many"), "cpu = \"many\" is not a valid number; write a whole one from 0 to 4294967295"),
            (
                options("limits", "abc"),
                r#"network lan: limits = "abc" cannot be used; write JSON, for example { "send": { "mbit": 100 } }"#,
            ),
            (options("limits", r#"{ "send": { "mbit": "5" } }"#), r#"mbit = "5" is not a valid number; write a whole"#),
            (options("check_addresses", "1"), "network lan: check_addresses = 1 cannot be used"),
            (options("limits", r#"{ "send": {} }"#), "limits.send names no limit"),
            (options("dir", "tasuki"), "network lan: dir = tasuki is no path from /; "),
            (route(json!({ "destination": "10.0.0.0/8", "gateway": "10.89.7.9", "metric": 5 })), "has the metric 5"),
            (route(json!({ "destination": "10.0.0.0/8", "route_type": "blackhole" })), "has no gateway; name one"),
            (options("dir", "/nowhere"), "no tasukid is at work in /nowhere; start it"),
        ];
        for (more, part) in cases {
            let said = said(more);
            let speaks_of_quotes = said.contains("without quotes");
            assert!(said.contains(part) && speaks_of_quotes == said.contains("mbit = \"5\""), "{said}");
        }
    }

    #[test]
    fn each_address_has_the_length_and_the_gateway_of_its_subnet_and_an_internal_network_has_none() {
        let assigned = |more: Value| {
            let subnets = json!([
                { "subnet": "10.89.7.0/24", "gateway": "10.89.7.1" },
                { "subnet": "fd00:7::/64", "gateway": "fd00:7::1" },
                { "subnet": "10.90.0.0/16" },
            ]);
            let mut input = json!({ "name": "lan", "subnets": subnets });
            let (Some(all), Value::Object(more)) = (input.as_object_mut(), more) else { panic!("keys") };
            all.extend(more);
            let configuration: Configuration = serde_json::from_value(input).expect("a network");
            let ips = ["10.90.0.5", "fd00:7::5", "10.89.7.5"].map(|ip| ip.parse().expect("an address"));
            let assigned = configuration.assigned(&ips).expect("addresses");
            let ips = assigned.ips.iter().map(|ip| (ip.address.to_string(), ip.gateway.is_some())).collect::<Vec<_>>();
            let via = |route| assigned.via(route).map(|via| via.to_string()).unwrap_or_default();
            let routes = assigned.routes.iter().map(|route| format!("{} {}", route.dst, via(route)));
            (ips, routes.collect::<Vec<_>>())
        };
        let (ips, routes) = assigned(json!({}));
        let whole = [("10.90.0.5/16", false), ("fd00:7::5/64", true), ("10.89.7.5/24", true)];
        assert_eq!(ips, whole.map(|(ip, has_gateway)| (ip.to_owned(), has_gateway)));
        assert_eq!(routes, ["0.0.0.0/0 10.89.7.1", "::/0 fd00:7::1"]);
        let (ips, routes) = assigned(json!({ "internal": true }));
        assert!(ips.iter().all(|(_, has_gateway)| !has_gateway) && routes.is_empty(), "{ips:?} {routes:?}");
        let other = json!([{ "destination": "0.0.0.0/0", "gateway": "10.89.7.9" }]);
        assert_eq!(assigned(json!({ "routes": other })).1, ["0.0.0.0/0 10.89.7.9", "::/0 fd00:7::1"]);
    }
}
