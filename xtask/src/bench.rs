//! `demo` and `bench`: build tasuki-bench as it ships, and become it.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use crate::checkout::{Checkout, cargo};
use crate::{needs, stream};

/// Returns only if tasuki-bench could not be started.
pub fn demo(checkout: &Checkout, args: &[OsString]) -> anyhow::Error {
    become_tasuki_bench(checkout, &[&["demo".into()], args].concat())
}

/// Returns only if tasuki-bench could not be started.
pub fn bench(checkout: &Checkout, args: &[OsString]) -> anyhow::Error {
    if args.first().is_some_and(|bench| bench == "nic") {
        // It counts the instructions of these programs.
        needs::provide(&[needs::VALGRIND]);
        let mut command = Command::new(cargo());
        command.args(["build", "--release", "--package", "tasuki-net", "--examples", "--manifest-path"]);
        match stream::succeeds(command.arg(checkout.root.join("Cargo.toml"))) {
            Ok(true) => {}
            Ok(false) => return anyhow::anyhow!("the programs whose instructions are counted do not build"),
            Err(error) => return error,
        }
    }
    become_tasuki_bench(checkout, args)
}

/// Replaces this process, so that signals and the exit code are tasuki-bench's own.
///
/// The working folder stays the caller's: relative files in `args` are relative to it.
fn become_tasuki_bench(checkout: &Checkout, args: &[OsString]) -> anyhow::Error {
    let mut command = Command::new(cargo());
    command.args(["run", "--release", "--package", "tasuki-bench", "--manifest-path"]);
    command.arg(checkout.root.join("Cargo.toml")).arg("--").args(args);
    anyhow::Error::new(command.exec()).context("cannot start cargo")
}
