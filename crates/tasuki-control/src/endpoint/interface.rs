//! A Linux interface as a node's end: the network behind it is on the VNI. The daemon opens a packet socket for it.

use std::os::fd::OwnedFd;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use tasuki_tap::namespace::Namespace;
use tasuki_tap::{is_name, packet};
use utoipa::ToSchema;

use super::Kind;

/// A Linux interface: a card that the kernel drives, one end of a veth pair, or any other with Ethernet frames.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Interface {
    /// Name of the interface.
    #[schema(min_length = 1, max_length = 15)]
    pub name: String,
    /// The namespace: as `ip netns` calls it, or a path from /; by default the daemon's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub netns: Option<String>,
}

impl Interface {
    pub fn place(&self) -> Namespace {
        self.netns.as_deref().map_or(Namespace::Own, Namespace::named)
    }
}

impl Kind for Interface {
    fn kind(&self) -> &'static str {
        "packet"
    }

    fn key(&self) -> &'static str {
        "interface"
    }

    /// NAMESPACE:NAME, or NAME in the daemon's own namespace.
    fn label(&self) -> String {
        self.netns.iter().map(|netns| format!("{netns}:")).chain([self.name.clone()]).collect()
    }

    fn shown(&self) -> String {
        format!("interface {}", self.label())
    }

    fn text(&self) -> String {
        String::new()
    }

    fn odd(&self) -> Option<String> {
        let name = &self.name;
        if self.netns.as_ref().is_some_and(String::is_empty) {
            return Some(
                "interface: the namespace is empty (netns; before the colon of --link); name one, or leave it out for tasukid's own"
                    .to_owned(),
            );
        }
        (!is_name(name)).then(|| {
            format!("interface: {name:?} cannot be the name of one; it has 1 to 15 bytes, without blanks, slashes, colons and %")
        })
    }

    fn make(&self) -> Result<OwnedFd> {
        packet::open(&self.place(), &self.name)
            .with_context(|| format!("the interface {} cannot be used", self.label()))
    }

    /// Its number: another interface of the same name has another.
    fn mark(&self) -> Option<String> {
        packet::index_of(&self.place(), &self.name).map(|index| index.to_string())
    }
}
