//! `asan`: tests under AddressSanitizer, of the crates that read memory or messages of strangers.
//!
//! The stable toolchain ships AddressSanitizer's library and refuses only its flag, so no other toolchain is needed.

use std::ffi::OsString;
use std::process::Command;

use crate::checkout::{Checkout, host};
use crate::stream;
use crate::tally::Reader;

/// Crates whose tests run here. Those of worker and daemon were not tried: they confine processes and bound their memory.
const CRATES: [&str; 5] = ["tasuki-shm", "tasuki-call", "tasuki-relay", "tasuki-sim", "tasuki-net"];

/// Runs the unit tests and suites whose name contains one of `filter`, or all of them.
pub fn run(checkout: &Checkout, filter: &[OsString]) -> anyhow::Result<bool> {
    let mut command = checkout.cargo("test");
    command.args(CRATES.iter().flat_map(|name| ["--package", name]));
    command.args(["--all-features", "--no-fail-fast", "--lib", "--bins", "--test", "suite", "--target", &host()?]);
    command.args(["--", "--show-output"]).args(filter);
    command.env("CARGO_TARGET_DIR", checkout.target.join("asan"));
    instrument(&mut command, "");
    // Tests expect that a process that touches memory which was taken away dies by the signal. The sanitizer would turn
    // it into an exit. They forget objects to play a dead process, and run under strace, beside which the search for
    // leaks cannot run; the fuzz targets search for leaks.
    command.env("ASAN_OPTIONS", "handle_segv=0:handle_sigbus=0:detect_leaks=0");
    let mut reader = Reader::default();
    let status = stream::run_showing(&mut command, |line| reader.line(line))?;
    let tally = reader.finish(status.success());
    println!("{tally}");
    let count = tally.passed + tally.failed + tally.skipped;
    anyhow::ensure!(count > 0, "no test of {} has such a name", CRATES.join(", "));
    Ok(tally.failed == 0)
}

/// Has cargo build with AddressSanitizer and `flags`. The command must name its platform: cargo then builds build scripts
/// and procedural macros without them.
pub fn instrument(command: &mut Command, flags: &str) {
    command.env("RUSTC_BOOTSTRAP", "1").env_remove("CARGO_ENCODED_RUSTFLAGS");
    command.env("RUSTFLAGS", format!("{flags} -Zsanitizer=address"));
}
