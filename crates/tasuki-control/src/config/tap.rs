//! The interface of a network namespace.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use tasuki_tap::Address;
use tasuki_tap::device::Queues;
use utoipa::ToSchema;

/// The interface that a network namespace has instead of the node's NIC. Nodes that name the same one share it: then
/// the NIC can go from one to the other, and the namespace's programs notice nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Tap {
    /// Name of the interface.
    #[schema(min_length = 1, max_length = 15)]
    pub name: String,
    /// The namespace: as `ip netns` calls it, or a path from /; by default the daemon's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub netns: Option<String>,
    /// The address that the interface gets when it is made, or a list of them; by default the daemon sets none.
    #[serde(
        default,
        rename = "address",
        deserialize_with = "addresses",
        serialize_with = "texts_of_addresses",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[schema(value_type = Option<OneOrMore>)]
    pub addresses: Vec<Address>,
    /// The routes by the interface that it gets when it is made.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(max_items = 64)]
    pub routes: Vec<Route>,
    /// MTU of the interface in bytes; by default 1500.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 68, maximum = 65521)]
    pub mtu: Option<u16>,
    /// Whether the kernel may pass frames between this namespace and others of its VNI, past their workers.
    #[serde(default = "super::node::yes", skip_serializing_if = "is_yes")]
    pub shortcut: bool,
    /// Queues of the interface; by default one. The node drives the first of them, and nodes that name it (`queue = { of = … }`)
    /// one each of the others: with a CPU each, they carry its flows side by side.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 8)]
    pub queues: Option<u8>,
}

impl Tap {
    /// Returns the name by which users know it: NAMESPACE:NAME, or NAME in the daemon's own namespace.
    pub fn label(&self) -> String {
        self.netns.iter().map(|netns| format!("{netns}:")).chain([self.name.clone()]).collect()
    }

    /// Returns the settings that the interface gets when it is made, with this station address if it is known by then.
    pub fn settings(&self, mac: Option<[u8; 6]>) -> tasuki_tap::Settings {
        tasuki_tap::Settings {
            mac,
            addresses: self.addresses.clone(),
            routes: self.routes.iter().map(|route| tasuki_tap::Route { to: route.to, via: route.via }).collect(),
            mtu: self.mtu.map(u32::from),
            queues: if self.queues() > 1 { Queues::Several } else { Queues::One },
        }
    }

    /// Returns the number of queues of its interface.
    pub fn queues(&self) -> usize {
        self.queues.unwrap_or(1).into()
    }
}

/// A route by a node's interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Route {
    /// The network that it leads to, as 0.0.0.0/0.
    #[serde(deserialize_with = "address", serialize_with = "text_of_address")]
    #[schema(value_type = String)]
    pub to: Address,
    /// The station that passes packets on; by default the network is on the VNI itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub via: Option<IpAddr>,
}

fn address<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Address, D::Error> {
    String::deserialize(from)?.parse().map_err(serde::de::Error::custom)
}

fn text_of_address<S: serde::Serializer>(address: &Address, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(address)
}

/// A text, or a list of texts.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
enum OneOrMore {
    One(String),
    More(Vec<String>),
}

fn addresses<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Vec<Address>, D::Error> {
    let texts = match OneOrMore::deserialize(from) {
        Ok(OneOrMore::One(text)) => vec![text],
        Ok(OneOrMore::More(texts)) => texts,
        Err(_) => {
            let sentence =
                "address is no text and no list of texts; write it as \"192.0.2.2/24\", or several in brackets";
            return Err(serde::de::Error::custom(sentence));
        }
    };
    texts.iter().map(|text| text.parse()).collect::<Result<_, _>>().map_err(serde::de::Error::custom)
}

fn texts_of_addresses<S: serde::Serializer>(addresses: &[Address], to: S) -> Result<S::Ok, S::Error> {
    match addresses {
        [one] => to.collect_str(one),
        more => to.collect_seq(more.iter().map(ToString::to_string)),
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks with a reference")]
fn is_yes(it: &bool) -> bool {
    *it
}
