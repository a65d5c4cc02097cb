//! The guest of `bench relay`: the same kernel and machine as the tests have, and a program that has the guest's card change hands.
//!
//! What is here is all that can be made ahead. The bench adds the card, its wire and a console, and says how often the card changes hands.

use std::fs;
use std::path::PathBuf;

use anyhow::Context;
use serde_json::json;

use super::system::{self, KERNEL_LINE};
use crate::checkout::Checkout;
use crate::needs::QEMU;

/// The numbers are the bench's, by way of the kernel's command line, which the shell finds in its environment.
const RELAYS: &str = "/program lkm $LKM && /program handover $HANDOVERS && /program repoint $REPOINTS";

/// Makes the guest; returns the file that tells the bench of it.
pub fn prepare(checkout: &Checkout) -> anyhow::Result<PathBuf> {
    anyhow::ensure!(QEMU.is_met(), "needs QEMU: sudo apt-get install -y {}", QEMU.package);
    let place = system::place(checkout)?;
    let system = system::fetch(&place).context("needs a kernel from Debian's archive, by apt-get download")?;
    let words = ["--release", "-p", "tasuki-net", "--example", "guest_relay"];
    let program = system::build(checkout, &place, "build", &words)?;
    let archive = place.join("relay.initrd");
    fs::write(&archive, system::pack(&system, &program, RELAYS)?)
        .with_context(|| format!("cannot write {}", archive.display()))?;
    let machine = json!({
        "program": QEMU.program,
        "words": system::machine(&system.kernel, &archive),
        "kernel_line": KERNEL_LINE,
    });
    let file = place.join("relay.json");
    fs::write(&file, machine.to_string()).with_context(|| format!("cannot write {}", file.display()))?;
    Ok(file)
}
