//! `demo` and `bench`: build tasuki-bench as it ships, and become it.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use crate::checkout::{Checkout, cargo};
use crate::{guest, needs, stream};

/// Returns only if tasuki-bench could not be started.
pub fn demo(checkout: &Checkout, args: &[OsString]) -> anyhow::Error {
    if args.iter().any(|word| word.to_string_lossy().contains("tap")) {
        needs::provide(&[needs::PING, needs::IP, needs::IPERF3]);
    }
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
    if args.first().is_some_and(|bench| bench == "vni") {
        needs::provide(&[needs::IP, needs::IPERF3, needs::TESTPMD]);
    }
    if args.first().is_some_and(|bench| bench == "relay") && wants_guest(args) {
        needs::provide(&[needs::QEMU]);
        match guest::prepare_relay(checkout) {
            Ok(machine) => {
                let more = ["--guest".into(), machine.into_os_string()];
                return become_tasuki_bench(checkout, &[args, &more].concat());
            }
            Err(error) => println!("xtask: the guest's cases are left out: {error:#}"),
        }
    }
    become_tasuki_bench(checkout, args)
}

/// Whether a bench of relays runs the cases that need a guest: minutes of a full run, or somebody's wish.
fn wants_guest(args: &[OsString]) -> bool {
    let has = |part: &str| args.iter().any(|word| word.to_string_lossy().contains(part));
    has("guest") || !(has("--quick") || has("--only"))
}

/// The programs that the bench starts beside itself.
const PROGRAMS: [&str; 3] = ["tasuki-control", "tasuki-worker", "tasuki-sim"];

/// Replaces this process, so that signals and the exit code are tasuki-bench's own.
///
/// The working folder stays the caller's: relative files in `args` are relative to it.
fn become_tasuki_bench(checkout: &Checkout, args: &[OsString]) -> anyhow::Error {
    let mut build = Command::new(cargo());
    build.args(["build", "--release", "--bins", "--manifest-path"]).arg(checkout.root.join("Cargo.toml"));
    PROGRAMS.iter().for_each(|program| _ = build.args(["--package", program]));
    match stream::succeeds(&mut build) {
        Ok(true) => {}
        Ok(false) => return anyhow::anyhow!("the programs that are measured do not build"),
        Err(error) => return error,
    }
    let mut command = Command::new(cargo());
    command.args(["run", "--release", "--package", "tasuki-bench", "--manifest-path"]);
    command.arg(checkout.root.join("Cargo.toml")).arg("--").args(args);
    anyhow::Error::new(command.exec()).context("cannot start cargo")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_is_for_full_runs_and_for_who_asks() {
        let wants = |words: &str| wants_guest(&words.split(' ').map(OsString::from).collect::<Vec<_>>());
        assert!(wants("relay") && wants("relay --json x") && wants("relay --quick --only guest-lkm"));
        assert!(!wants("relay --quick") && !wants("relay --only upgrade"));
    }
}
