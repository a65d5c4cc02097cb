//! The configuration: the nodes and NICs there are. It is one TOML file, and a key or value that means nothing is an
//! error.

mod before;
mod daemon;
mod limits;
mod mistake;
mod nic;
mod node;
pub mod plan;
pub mod schema;
mod sense;
mod tap;
mod work;
pub mod written;

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use utoipa::ToSchema;

use crate::api::roles::Roles;
pub use daemon::{Confine, Daemon, Restart, Uids};
pub use limits::{Limit, Limits};
pub(crate) use limits::{in_queue, in_socket};
pub use nic::{Device, Nic};
pub use node::{Bounds, Node, Spoof, StationAddress};
pub use sense::CONTAINER_MAX;
pub use tap::{Route, Tap};
pub use work::{Answer, Program, Queue, Source, Work};

pub use crate::endpoint::Kind;
pub use crate::endpoint::interface::Interface;
pub use crate::endpoint::memif::Memif;
pub use crate::endpoint::vm::Vm;

/// Longest file, in bytes.
pub const FILE_MAX: u64 = 4 << 20;

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
    /// An earlier tasukid has applied it.
    #[error(
        "{why}; without {place}, a node or NIC would be gone, or be another one than it was: start the version before, and apply what this one takes"
    )]
    Needed {
        why: String,
        /// What is refused, and must not be left out.
        place: String,
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

impl Config {
    /// Reads and checks a file.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        Self::parse(path, &Self::text(path)?)
    }

    /// Returns the text of a file.
    pub fn text(path: &Path) -> Result<String, ConfigError> {
        let mut text = String::new();
        // Of a device file there may be no end.
        let read = File::open(path).and_then(|file| file.take(FILE_MAX + 1).read_to_string(&mut text));
        let long = || std::io::Error::new(std::io::ErrorKind::FileTooLarge, "it is longer than 4 MiB");
        let read = read.and_then(|len| if len as u64 > FILE_MAX { Err(long()) } else { Ok(text) });
        read.map_err(|why| ConfigError::Unreadable { path: path.to_owned(), why })
    }

    /// Checks the text of the file at `path`.
    pub fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        let text = written::without_mark(text);
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
        if let (None, Some((nic, what))) = (config.faults_but_of_standbys().first(), config.odd_standby()) {
            return Err(ConfigError::Wrong { path: path.to_owned(), line: mistake::line_of_standby(text, nic), what });
        }
        match config.senseless() {
            Some(what) => Err(ConfigError::Senseless { path: path.to_owned(), what }),
            None => Ok(config),
        }
    }

    /// Reads a text that an earlier tasukid has applied: nodes live by it, also if this one refuses it. Returns why it does, too.
    ///
    /// # Errors
    /// A whole node or NIC of it cannot be read, or a key that must not be left out.
    pub fn as_applied(path: &Path, text: &str) -> Result<(Self, Option<String>), ConfigError> {
        let why = match Self::parse(path, text) {
            Ok(config) => return Ok((config, None)),
            Err(why) => why,
        };
        let table = written::without_mark(text).parse().map_err(|_| "all of it".to_owned());
        match table.and_then(|mut table| before::read(&mut table)) {
            Ok((config, left_out)) if left_out.is_empty() => Ok((config, Some(why.to_string()))),
            Ok((config, left_out)) => {
                Ok((config, Some(format!("{why}; tasukid goes on without {}", left_out.join(", ")))))
            }
            Err(place) => Err(ConfigError::Needed { why: why.to_string(), place }),
        }
    }

    /// Reads a node that another version has written as JSON. Returns the places in it that this one leaves out, too.
    ///
    /// # Errors
    /// The place that is refused, and must not be left out.
    pub fn node_as_written(value: &serde_json::Value) -> Result<(Node, Vec<String>), String> {
        if let Ok(node) = Node::deserialize(value) {
            return Ok((node, Vec::new()));
        }
        let mut value = value.clone();
        without_null(&mut value);
        before::whole_one("node", toml::Value::try_from(value).map_err(|_| "a node".to_owned())?)
    }

    /// Takes the CPUs on which nothing may run here from nodes that have such. Returns these nodes, with the CPU.
    pub fn leave_stray_cpus(&mut self, may_use: impl Fn(u32) -> bool) -> Vec<(String, u32)> {
        let stray = |node: &mut Node| Some((node.name.clone(), node.cpu.take_if(|cpu| !may_use(*cpu))?));
        self.node.iter_mut().filter_map(stray).collect()
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
        format!("node {:?}: cpu = {cpu}, and tasukid may not run anything there; name one that is on line (lscpu --extended) and in its cpuset, or none", node.name)
    })
}

#[cfg(test)]
mod tests;
