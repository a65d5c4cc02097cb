//! The guest of `bench relay`: the kernel and machine of the tests, and a program in which the guest's card changes
//! hands.
//!
//! This module makes everything that can be made ahead. The bench adds the card, its wire and a console, and sets the
//! number of relays.

use std::path::PathBuf;

use super::system::{self, KERNEL_LINE};
use crate::checkout::Checkout;

/// Commands that the guest runs. The bench passes the numbers on the kernel's command line, and the shell finds them in
/// its environment.
const RELAYS: &str = "/program lkm $LKM && /program handover $HANDOVERS && /program repoint $REPOINTS";

/// Makes the guest. Returns the file that describes it to the bench.
pub fn prepare(checkout: &Checkout) -> anyhow::Result<PathBuf> {
    let (place, system) = system::prepare(checkout)?;
    let words = ["--release", "-p", "tasuki-net", "--example", "guest_relay"];
    let program = system::build(checkout, &place, "build", &words)?;
    let archive = system::write(place.join("relay.initrd"), &system::pack(&system, &program, RELAYS)?)?;
    system::describe(place.join("relay.json"), &system::machine(&system.kernel, &archive), KERNEL_LINE)
}
