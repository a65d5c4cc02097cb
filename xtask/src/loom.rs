//! `loom`: explores the interleavings of the shared-memory protocols, with the shipping code.

use std::ffi::OsString;

use crate::checkout::Checkout;
use crate::stream;
use crate::tally::{Reader, Tally};

/// Runs the models whose name contains one of `filter`, or all of them.
pub fn run(checkout: &Checkout, filter: &[OsString]) -> anyhow::Result<bool> {
    let tally = explore(checkout, filter)?;
    println!("{tally}");
    Ok(tally.failed == 0)
}

/// Runs the models in a separate target folder. `--cfg loom` applies to every dependency, too; with a shared folder,
/// each switch between the two would rebuild the workspace.
///
/// Without features: tokio does not compile under `--cfg loom`, and no model needs it.
pub fn explore(checkout: &Checkout, filter: &[OsString]) -> anyhow::Result<Tally> {
    let mut command = checkout.cargo("test");
    command
        .args(["--release", "--package", "tasuki-shm", "--test", "loom", "--no-fail-fast", "--", "--show-output"])
        .args(filter)
        .env("RUSTFLAGS", "--cfg loom")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env("CARGO_TARGET_DIR", checkout.target.join("loom"));
    let mut reader = Reader::default();
    let status = stream::run_showing(&mut command, |line| reader.line(line))?;
    Ok(reader.finish(status.success()))
}
