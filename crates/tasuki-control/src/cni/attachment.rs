//! A container's interface on a network, for a runtime that speaks CNI and for netavark.

use tasuki_tap::interface::Interface;
use tasuki_tap::namespace::{Namespace, Unnamed};

use super::daemon::Daemon;
use super::ipam::Assigned;
use super::{Failure, code};
use crate::config::CONTAINER_MAX;

/// What asks for an attachment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Front {
    #[default]
    Cni,
    Netavark,
}

/// A container's interface on a network.
#[derive(Debug, Default)]
pub struct Attachment {
    pub front: Front,
    /// Name of the network.
    pub network: String,
    /// The container's ID, the path of its namespace, and its interface's name.
    pub id: String,
    pub netns: String,
    pub ifname: String,
}

/// Returns whether this may be the name of a network or the ID of a container (§1, §3).
pub fn is_identifier(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte))
}

/// Returns whether the namespace at this path is gone.
pub fn is_gone(netns: &str) -> bool {
    netns.starts_with('/')
        && std::fs::symlink_metadata(netns).is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound)
}

impl Attachment {
    /// Returns the name of the container's interface for the node's key `container`. None of its three parts has a
    /// slash. A network of netavark's is no other's, although both may have one name: GC of the one removes no node of
    /// the other.
    pub fn key(&self) -> String {
        format!("{}{}/{}", self.keys_of_network(), self.id, self.ifname)
    }

    /// Returns the beginning of the keys of all containers on the network.
    pub fn keys_of_network(&self) -> String {
        let before = match self.front {
            Front::Cni => "",
            Front::Netavark => "netavark:",
        };
        format!("{before}{}/", self.network)
    }

    /// Returns the name of the node: with the part of the ID that runtimes show, and different for each interface of the
    /// container.
    pub fn node_name(&self) -> String {
        let before = match self.front {
            Front::Cni => "cni",
            Front::Netavark => "ctr",
        };
        let plain = |c: char| if c.is_ascii_alphanumeric() || c == '_' { c.to_ascii_lowercase() } else { '-' };
        let shown: String = self.id.chars().take(12).map(plain).collect();
        format!("{before}-{shown}-{:07x}", crc32c::crc32c(self.key().as_bytes()) & 0x0fff_ffff)
    }

    /// Returns why no node can have its key, if so.
    pub fn odd_key(&self) -> Option<String> {
        let (key, ifname) = (self.key(), &self.ifname);
        if !ifname.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Some(format!(
                "{ifname:?} cannot be the name of a container's interface; write visible characters of ASCII"
            ));
        }
        (key.len() > CONTAINER_MAX).then(|| {
            format!(
                "the names of network, container and interface have {} characters together, and may have {CONTAINER_MAX}; shorten one",
                key.len()
            )
        })
    }

    /// Opens the container's namespace, which may not be this process's own: that is the machine's.
    pub fn namespace(&self) -> Result<Namespace, Failure> {
        let namespace = Namespace::named(&self.netns);
        let wrong = |error: tasuki_tap::TapError| Failure::new(code::ENVIRONMENT, error.to_string());
        let place = match namespace.open() {
            Ok(place) => Unnamed::of(place),
            Err(error @ tasuki_tap::TapError::NoNamespace(_)) => {
                return Err(Failure::new(code::UNKNOWN_CONTAINER, error.to_string()));
            }
            Err(error) => return Err(wrong(error)),
        };
        place.within(|| Ok(())).map_err(|_| {
            Failure::new(code::ENVIRONMENT, format!("{} is no network namespace; name one", self.netns))
        })?;
        if place.is(&Unnamed::of(Namespace::Own.open().map_err(wrong)?)) {
            let sentence = format!(
                "{} is the network namespace that this plugin runs in itself; name the container's",
                self.netns
            );
            return Err(Failure::new(code::ENVIRONMENT, sentence));
        }
        Ok(namespace)
    }

    /// Opens the container's namespace, in which there may be no interface of this name yet: the daemon would take a TAP
    /// that nobody holds.
    pub fn free_namespace(&self, daemon: &Daemon) -> Result<Namespace, Failure> {
        let namespace = self.namespace()?;
        match namespace.within(|| Interface::if_there(&self.ifname)) {
            Ok(None) => Ok(namespace),
            // It may be of a call before, which was killed.
            Ok(Some(_)) => Err(match daemon.node_of(&self.key()) {
                Ok(Some(node)) => self.is_there(&node.name),
                _ => {
                    let sentence = format!("the container has an interface {} already; name another", self.ifname);
                    Failure::new(code::ENVIRONMENT, sentence)
                }
            }),
            Err(error) => Err(Failure::new(code::OTHER, error.to_string())),
        }
    }

    /// Returns that a node is this interface already.
    pub fn is_there(&self, node: &str) -> Failure {
        let before = match self.front {
            Front::Cni => "DEL, or ",
            Front::Netavark => "",
        };
        let key = self.key();
        let sentence = format!("{key} is on the network already; remove it first ({before}tasuki node remove {node})");
        Failure::new(code::OTHER, sentence)
    }
}

/// Has the kernel announce the addresses when the interface comes up, also where the daemon may not write to /proc/sys:
/// another container may have had them a moment ago, and neighbours remember its station address. Switches IPv6 on, if it
/// is wanted.
pub fn prepare(namespace: &Namespace, assigned: &Assigned) {
    let has_ipv6 = assigned.ips.iter().any(|ip| ip.address.ip.is_ipv6());
    // The settings of interfaces to come, in the calling thread's namespace. Where they cannot be written, neighbours find
    // out by themselves in half a minute, and the daemon says what IPv6 lacks.
    let set = |path: &str, value: &str| drop(std::fs::write(format!("/proc/sys/net/{path}"), value));
    let _ = namespace.within(|| {
        set("ipv4/conf/default/arp_notify", "1");
        set("ipv6/conf/default/ndisc_notify", "1");
        if has_ipv6 {
            set("ipv6/conf/default/disable_ipv6", "0");
        }
        Ok(())
    });
}
