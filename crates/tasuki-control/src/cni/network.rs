//! The network configuration (§1), and the node that it asks for. Keys that it shares with a node in tasukid's
//! configuration have the same names and values.

use std::net::IpAddr;
use std::path::PathBuf;

use serde_json::{Map, Value, json};

use super::attachment::Attachment;
use super::call::Call;
use super::ipam::Assigned;
use super::{Failure, code};
use crate::config::{Config, Node, Route, StationAddress, Work};
use crate::place;

/// Keys of the specification and of libcni, which mean nothing to the node.
const SPECIFIED: [&str; 14] = [
    "cniVersion",
    "cniVersions",
    "name",
    "type",
    "args",
    "capabilities",
    "runtimeConfig",
    "prevResult",
    "disableCheck",
    "disableGC",
    "loadOnlyInlinedPlugins",
    "ipMasq",
    "ipam",
    "dns",
];
/// Keys of our own.
const OWN: [&str; 3] = ["vni", "dir", "check_addresses"];
/// Keys that a node has, and its TAP.
const OF_NODE: [&str; 8] = ["spoof", "pool_kib", "limits", "latency_us", "bounds", "cpu", "nice", "standby"];
const OF_TAP: [&str; 2] = ["mtu", "shortcut"];

/// Keys whose values are objects, and an example of each.
const OF_OBJECTS: [(&str, &str); 2] =
    [("limits", r#"{ "send": { "mbit": 100 } }"#), ("bounds", r#"{ "memory_mib": 256 }"#)];

/// Returns all keys of a network that mean something to us.
pub fn known_keys() -> impl Iterator<Item = &'static str> {
    OWN.into_iter().chain(OF_NODE).chain(OF_TAP)
}

/// MTU of an interface for which none is named.
const MTU: u64 = 1500;

/// A network configuration.
#[derive(Debug)]
pub struct Network {
    /// The runtime directory of the daemon.
    pub dir: PathBuf,
    vni: String,
    /// Whether frames are checked against the addresses that are assigned.
    checks_addresses: bool,
    mtu: Option<u64>,
    pub mac: Option<StationAddress>,
    /// Addresses that the runtime asks for, and a plugin assigns if there is one.
    pub ips: Vec<String>,
    /// What it says about DNS, unless that is nothing.
    pub dns: Option<Value>,
}

fn refused(sentence: String) -> Failure {
    Failure::new(code::CONFIGURATION, sentence)
}

/// Returns whether a value is an object, and so are the two that `limits` has.
fn is_of_objects(key: &str, value: &Value) -> bool {
    let is_object = |value: &Value| value.is_object() || value.is_null();
    value.as_object().is_some_and(|its| key != "limits" || its.values().all(is_object))
}

/// Returns the value of a key, as something of this type.
pub fn value<T: serde::de::DeserializeOwned>(
    network: &str,
    keys: &Map<String, Value>,
    key: &str,
) -> Result<Option<T>, Failure> {
    let Some(value) = keys.get(key).filter(|value| !value.is_null()) else { return Ok(None) };
    let odd = |error| refused(format!("network {network}: {key} = {value} cannot be used ({error}); correct it"));
    serde_json::from_value(value.clone()).map(Some).map_err(odd)
}

impl Network {
    /// Reads the network configuration for an operation that goes by all of it.
    pub fn read(call: &Call) -> Result<Self, Failure> {
        let is_known = |key: &String| {
            key.starts_with("cni.dev/") || SPECIFIED.into_iter().chain(known_keys()).any(|known| known == key)
        };
        let unknown =
            call.input.iter().find(|(key, value)| !is_known(key) || *key == "ipMasq" && **value != json!(false));
        if let Some((key, value)) = unknown {
            let sentence = format!(
                "network {}: {key} = {value} means nothing to tasuki-cni; leave it out, or write one of {}, ipam and dns",
                call.its.network,
                known_keys().collect::<Vec<_>>().join(", ")
            );
            return Err(Failure::new(code::UNSUPPORTED, sentence));
        }
        let (name, keys) = (&call.its.network, &call.input);
        let runtime: Map<String, Value> = value(name, keys, "runtimeConfig")?.unwrap_or_default();
        let mac = match runtime.get("mac").filter(|mac| !mac.is_null()) {
            Some(mac) => Some(mac.as_str().ok_or_else(|| {
                refused(format!("runtimeConfig: mac = {mac} is no text; the runtime has to write a station address"))
            })?),
            None => call.argument("MAC"),
        };
        let mac = mac.filter(|mac| !mac.is_empty());
        let mac = mac.map(|mac| StationAddress::try_from(mac.to_lowercase())).transpose().map_err(refused)?;
        let ips = runtime.get("ips").cloned().filter(|ips| !ips.is_null());
        let ips = ips.map(serde_json::from_value).transpose().map_err(|error| {
            refused(format!("runtimeConfig: ips cannot be used ({error}); the runtime has to write a list of texts"))
        })?;
        let dns: Option<Map<String, Value>> = value(name, keys, "dns")?;
        Ok(Network {
            mac,
            ips: ips.unwrap_or_default(),
            dns: dns.filter(|dns| !dns.is_empty()).map(Value::Object),
            ..Self::of_keys(name, keys)?
        })
    }

    /// Reads our own keys of the network of this name.
    pub fn of_keys(name: &str, keys: &Map<String, Value>) -> Result<Self, Failure> {
        Ok(Network {
            vni: value(name, keys, "vni")?.unwrap_or_else(|| name.to_owned()),
            checks_addresses: value(name, keys, "check_addresses")?.unwrap_or(false),
            mtu: value(name, keys, "mtu")?,
            ..Self::to_clean_up(name, keys)?
        })
    }

    /// Reads what it takes to remove nodes: those may be from before the rest was written wrongly.
    pub fn to_clean_up(name: &str, keys: &Map<String, Value>) -> Result<Self, Failure> {
        let dir: Option<PathBuf> = value(name, keys, "dir")?;
        if let Some(dir) = dir.as_ref().filter(|dir| !dir.is_absolute()) {
            return Err(refused(format!(
                "network {name}: dir = {} is no path from /; name tasukid's runtime directory so, or leave dir out",
                dir.display()
            )));
        }
        Ok(Network {
            dir: dir.unwrap_or_else(place::usual),
            vni: String::new(),
            checks_addresses: false,
            mtu: None,
            mac: None,
            ips: Vec::new(),
            dns: None,
        })
    }

    /// Returns the MTU of a container's interface, in bytes.
    pub fn mtu(&self) -> u64 {
        self.mtu.unwrap_or(MTU)
    }

    /// Returns the node for a container's interface with these addresses, and with what the network's keys say.
    pub fn node(&self, its: &Attachment, keys: &Map<String, Value>, assigned: &Assigned) -> Result<Node, Failure> {
        if let Some(odd) = its.odd_key() {
            return Err(refused(format!("network {}: {odd}", its.network)));
        }
        let mut text = json!({
            "name": its.node_name(),
            "container": its.key(),
            "vni": self.vni,
            "mac": self.mac,
            "work": { "tap": { "name": its.ifname, "netns": its.netns } },
        });
        for (key, value) in keys.iter().filter(|(_, value)| !value.is_null()) {
            if let Some((_, example)) =
                OF_OBJECTS.iter().find(|(its, _)| its == key).filter(|_| !is_of_objects(key, value))
            {
                let network = &its.network;
                return Err(refused(format!(
                    "network {network}: {key} = {value} cannot be used; write JSON, for example {example}"
                )));
            }
            let place = match () {
                () if OF_NODE.contains(&&key[..]) => &mut text,
                () if OF_TAP.contains(&&key[..]) => &mut text["work"]["tap"],
                () => continue,
            };
            place[key] = value.clone();
        }
        let mut node = Config::node_of(&text).map_err(|why| refused(format!("network {}: {why}", its.network)))?;
        if let Work::Tap(tap) = &mut node.work {
            tap.addresses = assigned.ips.iter().map(|ip| ip.address).collect();
            tap.routes =
                assigned.routes.iter().map(|route| Route { to: route.dst, via: assigned.via(route) }).collect();
        }
        if self.checks_addresses {
            node.addresses = assigned.ips.iter().map(|ip| ip.address.ip).collect::<Vec<IpAddr>>();
        }
        let config = Config { node: vec![node], ..Config::default() };
        match config.senseless() {
            Some(what) => {
                // The node is ours; the network is what somebody has written.
                let what = what.strip_prefix(&format!("node {:?}", its.node_name())).unwrap_or(&what);
                let what = what.trim_start_matches([',', ':', ' ']).trim_start_matches("tap: ");
                let failure = refused(format!("network {}: {what}", its.network));
                let details = match what.starts_with("vni ") {
                    true => "write one (vni); without that key, the network's name is the VNI's",
                    false => "correct the network configuration",
                };
                Err(match failure.details.is_empty() {
                    true => Failure { details: details.to_owned(), ..failure },
                    false => failure,
                })
            }
            None => Ok(config.node.into_iter().next().expect("one node")),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::*;

    fn call(more: &str) -> Call {
        let variables = [
            ("CNI_COMMAND", "ADD"),
            ("CNI_CONTAINERID", "4F3C.ab_0123456789"),
            ("CNI_NETNS", "/run/netns/a"),
            ("CNI_IFNAME", "eth0"),
        ];
        let text =
            format!(r#"{{ "cniVersion": "1.1.0", "name": "lan", "type": "tasuki-cni", "cni.dev/x": 1, {more} }}"#);
        let of = |name: &str| variables.iter().find(|(its, _)| *its == name).map(|(_, value)| OsString::from(value));
        Call::read(of, text.as_bytes()).expect("a call")
    }

    fn node(more: &str) -> Result<Node, Failure> {
        let call = call(more);
        Network::read(&call)?.node(&call.its, &call.input, &Assigned::default())
    }

    #[test]
    fn a_network_becomes_a_node() {
        let more = r#""mtu": 9000, "shortcut": false, "limits": { "send": { "mbit": 10 } }, "ipMasq": false, "bounds": null,
            "runtimeConfig": { "mac": "02:00:00:00:00:0A", "portMappings": [] }"#;
        let node = node(more).expect("a node");
        let tap = node.tap().expect("a TAP");
        assert_eq!((tap.mtu, tap.shortcut, &tap.label()[..]), (Some(9000), false, "/run/netns/a:eth0"));
        assert_eq!((node.vni.as_deref(), node.mac()), (Some("lan"), [2, 0, 0, 0, 0, 10]));
        assert_eq!(node.container.as_deref(), Some("lan/4F3C.ab_0123456789/eth0"));
        assert!(node.name.starts_with("cni-4f3c-ab_0123-") && node.name.len() == 24, "{}", node.name);
        let other = Attachment { ifname: "eth1".to_owned(), ..call(more).its };
        assert_ne!(other.node_name(), node.name);
    }

    #[test]
    fn what_means_nothing_is_named_with_its_value() {
        let cases = [
            (r#""vin": "lan""#, 2, "vin = \"lan\""),
            (r#""ipMasq": true"#, 2, "ipMasq = true"),
            (r#""vni": 5"#, 7, "vni = 5"),
            (r#""vni": "a b""#, 7, "vni \"a b\""),
            (r#""name": "a.b""#, 7, "vni \"a.b\""),
            (r#""mtu": "9000""#, 7, "mtu = \"9000\""),
            (r#""mtu": 9"#, 7, "mtu = 9"),
            (r#""spoof": "no""#, 7, "spoof = \"no\""),
            (r#""limits": { "send": {} }"#, 7, "limits.send names no limit"),
            (r#""limits": {}"#, 7, "limits names no limit"),
            (r#""limits": { "send": { "mbit": 0.5 } }"#, 7, "mbit = 0.5 is not a valid number"),
            (r#""limits": 5"#, 7, "limits = 5 cannot be used"),
            (r#""limits": { "send": 5 }"#, 7, r#"limits = {"send":5} cannot be used"#),
            (r#""bounds": [5]"#, 7, "bounds = [5] cannot be used"),
            (r#""latency_us": -1"#, 7, "latency_us = -1 is not in the range 0 to 10000"),
            (r#""dir": "tasuki""#, 7, "dir = tasuki"),
            (r#""runtimeConfig": { "mac": "01:00:00:00:00:01" }"#, 7, "01:00:00:00:00:01"),
            (r#""runtimeConfig": { "ips": "192.0.2.1" }"#, 7, "ips"),
            (r#""runtimeConfig": { "mac": 5 }"#, 7, "mac = 5"),
            (r#""dns": "192.0.2.53""#, 7, "dns = \"192.0.2.53\""),
        ];
        for (more, code, part) in cases {
            let failure = node(more).expect_err(more);
            assert!(failure.code == code && failure.msg.contains(part), "{more}: {failure:?}");
        }
        let odd = Attachment { ifname: "\u{e9}th0".to_owned(), ..call(r#""mtu": 1500"#).its };
        let said =
            Network::to_clean_up("lan", &Map::new()).expect("a network").node(&odd, &Map::new(), &Assigned::default());
        assert!(said.expect_err("odd").details.contains("write visible characters of ASCII"));
        let keys = call(r#""vin": "lan", "mtu": "x""#).input;
        assert!(Network::to_clean_up("lan", &keys).is_ok(), "a node has to go all the same");
    }
}
