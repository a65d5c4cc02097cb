//! `demo` and `bench`: build tasuki-bench as it ships, and replace this process with it.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::checkout::{Checkout, cargo};
use crate::{guest, needs, stream};

/// Builds and runs the demo. Returns only if tasuki-bench could not be started.
pub fn demo(checkout: &Checkout, args: &[OsString]) -> anyhow::Error {
    if args.iter().any(|word| word.to_string_lossy().contains("tap")) {
        needs::provide(&[needs::PING, needs::IP, needs::IPERF3]);
    }
    println!(
        "xtask: builds the daemon, the worker, the card's model and the demonstration; from nothing that takes two or three minutes on two cores"
    );
    let report = ["--report".into(), checkout.target.join("report").into_os_string()];
    become_tasuki_bench(checkout, Build::Demo, &[&["demo".into()], args, &report].concat())
}

/// Builds and runs a benchmark. Returns only if tasuki-bench could not be started.
pub fn bench(checkout: &Checkout, args: &[OsString]) -> anyhow::Error {
    if args.first().is_some_and(|bench| bench == "report") {
        return become_tasuki_bench(checkout, Build::Report, args);
    }
    if args.first().is_some_and(|bench| bench == "nic") {
        // The bench counts the instructions of these programs.
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
    if args.first().is_some_and(|bench| bench == "guest") {
        needs::provide(&[needs::TESTPMD, needs::IP, needs::QEMU]);
        return with_guest(checkout, args, guest::prepare_bench);
    }
    if args.first().is_some_and(|bench| bench == "relay") && wants_guest(args) {
        needs::provide(&[needs::QEMU]);
        return with_guest(checkout, args, guest::prepare_relay);
    }
    become_tasuki_bench(checkout, Build::Bench, args)
}

/// Makes the guest and runs the benchmark with it, or without it where it cannot be made.
fn with_guest(
    checkout: &Checkout,
    args: &[OsString],
    prepare: impl FnOnce(&Checkout) -> anyhow::Result<PathBuf>,
) -> anyhow::Error {
    let more = match prepare(checkout) {
        Ok(machine) => vec!["--guest".into(), machine.into_os_string()],
        Err(error) => {
            println!("xtask: the guest's cases are left out: {error:#}");
            Vec::new()
        }
    };
    become_tasuki_bench(checkout, Build::Bench, &[args, &more].concat())
}

/// Returns whether a bench of relays runs the cases that need a guest. They take minutes, so only a full run or a
/// user's request includes them.
fn wants_guest(args: &[OsString]) -> bool {
    let has = |part: &str| args.iter().any(|word| word.to_string_lossy().contains(part));
    has("guest") || !(has("--quick") || has("--only"))
}

/// tasuki-bench and the programs that it starts. One build makes them all: two builds would compile most crates twice,
/// with different features.
const PROGRAMS: [&str; 4] = ["tasuki-control", "tasuki-worker", "tasuki-sim", "tasuki-bench"];

/// How the programs are built.
#[derive(Debug, Clone, Copy)]
enum Build {
    /// In a minute or two: without link-time optimisation and without peers.
    Demo,
    /// As they ship, with the peers for comparison.
    Bench,
    /// tasuki-bench alone, for what starts no other program.
    Report,
}

impl Build {
    fn words(self) -> &'static [&'static str] {
        match self {
            Build::Demo | Build::Report => &["--profile", "demo"],
            Build::Bench => &["--release", "--features", "tasuki-bench/peers"],
        }
    }

    fn programs(self) -> &'static [&'static str] {
        match self {
            Build::Demo | Build::Bench => &PROGRAMS,
            Build::Report => &["tasuki-bench"],
        }
    }

    fn folder(self) -> &'static str {
        match self {
            Build::Demo | Build::Report => "demo",
            Build::Bench => "release",
        }
    }
}

/// Builds the programs and replaces this process with tasuki-bench, so that signals and the exit code are its own.
/// Returns only on failure.
///
/// The working folder does not change: relative paths in `args` are relative to the caller's folder.
fn become_tasuki_bench(checkout: &Checkout, build: Build, args: &[OsString]) -> anyhow::Error {
    let mut command = Command::new(cargo());
    command.arg("build").args(build.words()).args(["--bins", "--manifest-path"]);
    command.arg(checkout.root.join("Cargo.toml"));
    build.programs().iter().for_each(|program| _ = command.args(["--package", program]));
    match stream::succeeds(&mut command) {
        Ok(true) => {}
        Ok(false) => return anyhow::anyhow!("the programs that are measured do not build"),
        Err(error) => return error,
    }
    let program = checkout.target.join(build.folder()).join("tasuki-bench");
    let error = Command::new(&program).args(args).env("TASUKI_COMMIT", commit(checkout)).exec();
    anyhow::Error::new(error).context(format!("cannot start {}", program.display()))
}

/// Returns the commit that is built, for the record; empty where there is none, as in an unpacked archive.
fn commit(checkout: &Checkout) -> String {
    let words = ["describe", "--always", "--dirty", "--exclude=*"];
    let said = Command::new("git").arg("-C").arg(&checkout.root).args(words).stderr(Stdio::null()).output();
    said.map_or_else(|_| String::new(), |said| String::from_utf8_lossy(&said.stdout).trim().to_owned())
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
