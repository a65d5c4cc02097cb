//! The guest of `bench relay`: the kernel and machine of the tests, and a program in which the guest's card changes
//! hands.
//!
//! This module makes everything that can be made ahead. The bench adds the card, its wire and a console, and sets the
//! number of relays.

use std::fs;
use std::path::PathBuf;

use anyhow::Context;
use serde_json::json;

use super::system::{self, KERNEL_LINE};
use crate::checkout::Checkout;
use crate::needs::QEMU;

/// Commands that the guest runs. The bench passes the numbers on the kernel's command line, and the shell finds them in
/// its environment.
const RELAYS: &str = "/program lkm $LKM && /program handover $HANDOVERS && /program repoint $REPOINTS";

/// Makes the guest. Returns the file that describes it to the bench.
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
