//! The other end of a card's cable, where it is an interface of this machine's kernel.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

/// Name of the interface at the other end of the card's cable.
pub const INTERFACE: &str = "tasuki-wire";

/// Addresses for documentation (RFC 5737): the kernel's, and the nodes'.
pub const OURS: &str = "192.0.2.1/24";
pub const THEIRS: &str = "192.0.2.2";

/// Gives the interface at the other end of the cable an address, and sets its link up.
pub fn set_up(interface: &str, address: &str) -> Result<()> {
    ip(&["address", "add", address, "dev", interface])?;
    ip(&["link", "set", interface, "up"])
}

fn ip(words: &[&str]) -> Result<()> {
    let done = Command::new("ip").args(words).stdin(Stdio::null()).output().context("ip could not be started")?;
    ensure!(done.status.success(), "ip {}: {}", words.join(" "), String::from_utf8_lossy(&done.stderr).trim());
    Ok(())
}
