//! The other end of a card's cable, where it is an interface of this machine's kernel.

use anyhow::Result;

use crate::program::ip;

/// Name of the interface at the other end of the card's cable.
pub const INTERFACE: &str = "tasuki-wire";

/// Addresses for documentation (RFC 5737): the kernel's, and the nodes'.
pub const OURS: &str = "192.0.2.1/24";
pub const THEIRS: &str = "192.0.2.2";

/// Gives the interface at the other end of the cable an address, and sets its link up.
pub fn set_up(interface: &str, address: &str) -> Result<()> {
    ip(&format!("address add {address} dev {interface}"))?;
    ip(&format!("link set {interface} up"))
}
