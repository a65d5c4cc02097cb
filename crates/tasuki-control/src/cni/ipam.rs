//! The plugin that assigns addresses (§4): found in the folders of CNI_PATH, and given what this plugin was given.

use std::io::Write;
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tasuki_tap::Address;

use super::call::Call;
use super::network::value;
use super::{Failure, code};

/// The plugin of a network that assigns addresses.
#[derive(Debug)]
pub struct Ipam<'a> {
    call: &'a Call,
    name: String,
    program: PathBuf,
}

/// An address that was assigned.
#[derive(Debug)]
pub struct Ip {
    pub address: Address,
    pub gateway: Option<IpAddr>,
}

/// A route that goes with the addresses, as it is written into a result.
#[derive(Debug, Serialize)]
pub struct Way {
    #[serde(serialize_with = "text_of")]
    pub dst: Address,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gw: Option<IpAddr>,
}

fn text_of<S: serde::Serializer>(address: &Address, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(address)
}

/// All that was assigned to a container.
#[derive(Debug, Default)]
pub struct Assigned {
    pub ips: Vec<Ip>,
    pub routes: Vec<Way>,
    /// What it says about DNS, unless that is nothing.
    pub dns: Option<Value>,
}

impl Assigned {
    /// Returns the addresses that a runtime asks for, where no plugin assigns any.
    pub fn of_runtime(ips: &[String]) -> Result<Self, Failure> {
        let named = |failure: Failure| Failure { msg: format!("runtimeConfig, ips: {}", failure.msg), ..failure };
        let ips = ips.iter().map(|text| Ok(Ip { address: address(text).map_err(named)?, gateway: None }));
        Ok(Assigned { ips: ips.collect::<Result<_, Failure>>()?, ..Assigned::default() })
    }

    /// Returns the station that passes packets on by this route: the one that it names, or the gateway of an address of
    /// its version of IP (§5).
    pub fn via(&self, route: &Way) -> Option<IpAddr> {
        let of_its_version = |gateway: &IpAddr| gateway.is_ipv4() == route.dst.ip.is_ipv4();
        route.gw.or_else(|| self.ips.iter().filter_map(|ip| ip.gateway).find(of_its_version))
    }

    /// Reads a plugin's result.
    fn read(result: &[u8]) -> Result<Self, Failure> {
        #[derive(Deserialize)]
        struct Given {
            ips: Option<Vec<GivenIp>>,
            routes: Option<Vec<serde_json::Map<String, Value>>>,
            dns: Option<Value>,
        }
        #[derive(Deserialize)]
        struct GivenIp {
            address: String,
            gateway: Option<IpAddr>,
        }
        let given: Given = serde_json::from_slice(result).map_err(|error| {
            Failure::new(code::NO_JSON, format!("its result cannot be read ({error}); its version may be too old"))
        })?;
        let ips = given.ips.unwrap_or_default().into_iter();
        let ips = ips.map(|ip| Ok(Ip { address: address(&ip.address)?, gateway: ip.gateway }));
        let is_said = |dns: &Value| dns.as_object().is_some_and(|dns| !dns.is_empty());
        Ok(Assigned {
            ips: ips.collect::<Result<_, Failure>>()?,
            routes: given.routes.unwrap_or_default().into_iter().map(way).collect::<Result<_, _>>()?,
            dns: given.dns.filter(is_said),
        })
    }
}

/// Reads an address with the length of its network.
pub fn address(text: &str) -> Result<Address, Failure> {
    text.parse().map_err(|sentence: String| Failure::new(code::CONFIGURATION, sentence))
}

fn way(mut route: serde_json::Map<String, Value>) -> Result<Way, Failure> {
    let (dst, gw) = (route.remove("dst"), route.remove("gw"));
    if let Some((key, value)) = route.iter().next() {
        let sentence = format!("a route has {key} = {value}, and tasuki-cni sets dst and gw alone; leave {key} out");
        return Err(Failure::new(code::UNSUPPORTED, sentence));
    }
    let gw = gw.map(serde_json::from_value).transpose().map_err(|error| {
        Failure::new(code::CONFIGURATION, format!("a route's gw is no address ({error}); correct it"))
    })?;
    Ok(Way { dst: address(dst.as_ref().and_then(Value::as_str).unwrap_or_default())?, gw: gw.flatten() })
}

impl<'a> Ipam<'a> {
    /// Finds the plugin, if the network names one.
    pub fn of(call: &'a Call) -> Result<Option<Self>, Failure> {
        #[derive(Deserialize)]
        struct Named {
            #[serde(rename = "type")]
            name: Option<String>,
        }
        let Some(Named { name: Some(name) }) = value(&call.its.network, &call.input, "ipam")? else { return Ok(None) };
        let wrong = |sentence| Err(Failure::new(code::CONFIGURATION, sentence));
        if name.is_empty() || name.contains(['/', '\\', '\0']) || name == "." || name == ".." {
            return wrong(format!("ipam: type = {name:?} is no name of a plugin; write one, as host-local"));
        }
        let Some(path) = &call.path else {
            return Err(Failure::new(code::ENVIRONMENT, "CNI_PATH is not set; the runtime has to set it"));
        };
        let found = std::env::split_paths(path).map(|folder| folder.join(&name)).find(|program| program.is_file());
        match found {
            Some(program) => Ok(Some(Ipam { call, name, program })),
            None => wrong(format!(
                "ipam: there is no plugin {name} in {} (CNI_PATH); install it (on Debian: apt install containernetworking-plugins), or correct type",
                path.display()
            )),
        }
    }

    /// Has it assign addresses. If it fails, it is asked to free what it had assigned (§4).
    pub fn assign(&self) -> Result<Assigned, Failure> {
        let assigned =
            self.ask("ADD").and_then(|result| Assigned::read(&result).map_err(|failure| self.named(failure)));
        assigned.inspect_err(|_| drop(self.ask("DEL")))
    }

    /// Starts it for an operation; returns what it prints. Its environment is this process's.
    pub fn ask(&self, command: &str) -> Result<Vec<u8>, Failure> {
        let broken = |why: String| Failure::new(code::OTHER, format!("ipam: plugin {} {why}", self.name));
        let mut its = Command::new(&self.program);
        its.env("CNI_COMMAND", command).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut its = its.spawn().map_err(|error| broken(format!("does not start ({error}); install it again")))?;
        let mut input = its.stdin.take().expect("piped");
        let ended = std::thread::scope(|scope| {
            // It may answer before it has read all.
            scope.spawn(move || input.write_all(&self.call.text));
            its.wait_with_output()
        });
        let output = ended.map_err(|error| broken(format!("cannot be waited for ({error})")))?;
        if output.status.success() {
            return Ok(output.stdout);
        }
        let said = serde_json::from_slice::<Failure>(&output.stdout);
        Err(said.map_or_else(
            |_| {
                broken(format!(
                    "ended with {}, and its answer cannot be read; its version may be too old",
                    output.status
                ))
            },
            |failure| self.named(failure),
        ))
    }

    /// Returns its failure with its name.
    fn named(&self, failure: Failure) -> Failure {
        Failure { msg: format!("ipam: {}: {}", self.name, failure.msg), ..failure }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_is_read_or_refused() {
        let text = br#"{ "cniVersion": "1.0.0", "ips": [
            { "address": "10.1.0.5/16", "gateway": "10.1.0.1", "version": "4" }, { "address": "fd00::5/64" } ],
            "routes": [ { "dst": "0.0.0.0/0" }, { "dst": "::/0", "gw": "fd00::1" }, { "dst": "fd01::/64" } ], "dns": {} }"#;
        let assigned = Assigned::read(text).expect("a result");
        let ways: Vec<_> = assigned.routes.iter().map(|route| assigned.via(route).map(|via| via.to_string())).collect();
        assert_eq!(ways, [Some("10.1.0.1".to_owned()), Some("fd00::1".to_owned()), None]);
        assert_eq!((assigned.ips.len(), assigned.dns), (2, None));
        assert_eq!(serde_json::to_string(&assigned.routes[0]).expect("plain"), r#"{"dst":"0.0.0.0/0"}"#);
        let cases = [
            ("nonsense", 6),
            (r#"{ "ips": [ { "address": "10.1.0.5" } ] }"#, 7),
            (r#"{ "routes": [ { "gw": "10.1.0.5" } ] }"#, 7),
            (r#"{ "routes": [ { "dst": "10.0.0.0/8", "gw": "x" } ] }"#, 7),
            (r#"{ "routes": [ { "dst": "10.0.0.0/8", "mtu": 1400 } ] }"#, 2),
        ];
        for (text, code) in cases {
            assert_eq!(Assigned::read(text.as_bytes()).expect_err(text).code, code, "{text}");
        }
    }
}
