//! `fuzz`: libFuzzer over the targets in `fuzz/`, on the stable toolchain.
//!
//! What cargo-fuzz does needs a nightly toolchain only for AddressSanitizer. Coverage feedback is
//! LLVM's own pass, and stable rustc runs it if told to by flags. So the usual run has libFuzzer's
//! feedback, debug assertions and overflow checks, and no AddressSanitizer: a wild access that
//! faults is seen, one that lands in mapped memory is not. `--asan` adds it where a nightly
//! toolchain is present.
//!
//! - `fuzz/regressions/TARGET/` holds inputs that once broke a target, and a few that get far at once. In git; run first.
//! - `fuzz/corpus/TARGET/` holds what libFuzzer found worth keeping. Not in git.
//! - `fuzz/artifacts/TARGET/` holds inputs that broke a target just now. Not in git.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail, ensure};
use serde_json::Value;

use crate::checkout::{Checkout, cargo as our_cargo, host, metadata, output};
use crate::tally::Tally;
use crate::{needs, stream};

/// Within `cargo xtask test`: enough to see that a target works and the shallow mistakes.
pub const SHORT_RUN_SECONDS: u32 = 10;

/// Of `cargo xtask fuzz`: a coffee.
pub const LONG_RUN_SECONDS: u32 = 300;

/// An input that a target chews on for longer has made it hang.
const HANG_SECONDS: u32 = 60;

/// What LLVM must add for libFuzzer to see coverage and comparisons. `-Ccodegen-units=1` because
/// the pass loses functions that are split among units. Source: cargo-fuzz 0.13, `src/project.rs`.
const COVERAGE: &str = "--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1 -Cdebug-assertions -Coverflow-checks";

/// How to fuzz.
pub struct Plan {
    /// Per target.
    pub seconds: u32,
    /// Run this file once instead.
    pub input: Option<PathBuf>,
    /// Further arguments for libFuzzer.
    pub libfuzzer: Vec<OsString>,
    pub sanitizer: Sanitizer,
    /// Show each input that taught libFuzzer something: hundreds of lines in the first seconds.
    pub chatty: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sanitizer {
    None,
    Address,
}

impl Plan {
    /// As a stage of the suite: see that each target stands.
    pub fn short(seconds: u32) -> Plan {
        Plan { seconds, input: None, libfuzzer: Vec::new(), sanitizer: Sanitizer::None, chatty: false }
    }

    fn shows(&self, line: &str) -> bool {
        self.chatty || !(line.starts_with('#') && (line.contains("\tNEW ") || line.contains("\tREDUCE ")))
    }
}

/// Fuzzes one target, or each in turn.
pub fn run(checkout: &Checkout, target: Option<&str>, plan: &Plan) -> anyhow::Result<bool> {
    needs::provide(&[needs::CXX]);
    let Some(target) = target else {
        let tally = fuzz_all(checkout, plan)?;
        println!("{tally}");
        return Ok(tally.failed == 0);
    };
    let targets = targets(checkout)?;
    ensure!(targets.iter().any(|known| known == target), "no fuzz target {target}; there are: {}", targets.join(", "));
    let programs = build(checkout, plan.sanitizer)?;
    fuzz(checkout, &programs, target, plan)
}

/// Fuzzes each target in turn; each counts as one test.
pub fn fuzz_all(checkout: &Checkout, plan: &Plan) -> anyhow::Result<Tally> {
    let targets = targets(checkout)?;
    if !needs::CXX.is_met() {
        return Ok(Tally::skip(u32::try_from(targets.len())?, "needs a C++ compiler: sudo apt-get install -y g++"));
    }
    let programs = build(checkout, plan.sanitizer)?;
    let mut tally = Tally::default();
    for target in &targets {
        tally += &Tally::one(fuzz(checkout, &programs, target, plan)?, &format!("fuzz target {target}"));
    }
    Ok(tally)
}

/// The `[[bin]]`s of `fuzz/Cargo.toml`. A file in `fuzz_targets/` that is none of them would never
/// run, and nobody would notice.
fn targets(checkout: &Checkout) -> anyhow::Result<Vec<String>> {
    let metadata = metadata(&checkout.root.join("fuzz/Cargo.toml"))?;
    let targets = binaries(&metadata).context("`cargo metadata` of fuzz/ has another form than we know")?;
    for file in files_in(&checkout.root.join("fuzz/fuzz_targets"))? {
        let stem = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        if file.extension().is_some_and(|extension| extension == "rs") && !targets.contains(&stem) {
            bail!("fuzz/Cargo.toml has no [[bin]] named {stem} for fuzz/fuzz_targets/{stem}.rs; add it");
        }
    }
    Ok(targets)
}

fn binaries(metadata: &Value) -> Option<Vec<String>> {
    let targets = metadata["packages"].get(0)?["targets"].as_array()?;
    let binaries = targets.iter().filter(|target| target["kind"][0] == "bin");
    binaries.map(|target| Some(target["name"].as_str()?.to_owned())).collect()
}

/// `cargo VERB` for the fuzz workspace, with the flags that every build of it needs.
pub fn cargo(checkout: &Checkout, verb: &str, sanitizer: Sanitizer) -> anyhow::Result<Command> {
    let mut flags = COVERAGE.to_owned();
    let mut command = match sanitizer {
        Sanitizer::None => Command::new(our_cargo()),
        Sanitizer::Address => {
            flags.push_str(" -Zsanitizer=address");
            let mut command = Command::new("rustup");
            command.args(["run", "nightly", "cargo"]);
            output(Command::new("rustup").args(["run", "nightly", "rustc", "--version"]))
                .context("AddressSanitizer needs a nightly toolchain: rustup toolchain install nightly")?;
            command
        }
    };
    // Naming the platform keeps the flags away from build scripts and procedural macros, which
    // have no libFuzzer to link to.
    command.arg(verb).args(["--release", "--manifest-path", "fuzz/Cargo.toml", "--target", &host()?]);
    command.current_dir(&checkout.root).env("CARGO_TARGET_DIR", target_dir(checkout, sanitizer));
    command.env("RUSTFLAGS", flags).env_remove("CARGO_ENCODED_RUSTFLAGS");
    Ok(command)
}

fn target_dir(checkout: &Checkout, sanitizer: Sanitizer) -> PathBuf {
    checkout.target.join(match sanitizer {
        Sanitizer::None => "fuzz",
        Sanitizer::Address => "fuzz-asan",
    })
}

/// Builds every target, and says in which folder their programs are.
fn build(checkout: &Checkout, sanitizer: Sanitizer) -> anyhow::Result<PathBuf> {
    let mut command = cargo(checkout, "build", sanitizer)?;
    ensure!(stream::succeeds(command.arg("--bins"))?, "the fuzz targets do not build");
    Ok(target_dir(checkout, sanitizer).join(host()?).join("release"))
}

/// Replays the inputs that once broke `target`, then lets libFuzzer look for more.
fn fuzz(checkout: &Checkout, programs: &Path, target: &str, plan: &Plan) -> anyhow::Result<bool> {
    let folder = |of: &str| checkout.root.join("fuzz").join(of).join(target);
    let (regressions, corpus, artifacts) = (folder("regressions"), folder("corpus"), folder("artifacts"));
    fs::create_dir_all(&corpus).with_context(|| format!("cannot make {}", corpus.display()))?;
    fs::create_dir_all(&artifacts).with_context(|| format!("cannot make {}", artifacts.display()))?;
    let libfuzzer = || {
        let mut command = Command::new(programs.join(target));
        command.arg(format!("-timeout={HANG_SECONDS}")).arg(format!("-artifact_prefix={}/", artifacts.display()));
        command
    };
    if let Some(input) = &plan.input {
        return stream::succeeds(libfuzzer().arg(input).args(&plan.libfuzzer));
    }
    let known = files_in(&regressions)?;
    if !known.is_empty() && !stream::succeeds(libfuzzer().args(&known))? {
        println!("xtask: {target}: an input in fuzz/regressions/{target} breaks it again (named above)");
        return Ok(false);
    }
    let mut search = libfuzzer();
    // Comparisons teach the fuzzer magic numbers; without this it only learns from branches.
    search.arg("-use_value_profile=1").arg(format!("-max_total_time={}", plan.seconds)).args(&plan.libfuzzer);
    search.arg(&corpus);
    if !known.is_empty() {
        search.arg(&regressions);
    }
    if stream::run_showing(&mut search, |line| plan.shows(line))?.success() {
        return Ok(true);
    }
    println!("xtask: {target}: to run the input named above again: cargo xtask fuzz {target} --input FILE");
    println!("xtask: {target}: once repaired, keep the file in fuzz/regressions/{target} and commit it");
    Ok(false)
}

/// The files of a folder in order of their names; none if there is no such folder.
fn files_in(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    if !folder.exists() {
        return Ok(Vec::new());
    }
    let unreadable = || format!("cannot read {}", folder.display());
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).with_context(unreadable)? {
        let path = entry.with_context(unreadable)?.path();
        // A README may stand beside the inputs.
        if path.is_file() && path.extension().is_none_or(|extension| extension != "md") {
            files.push(path);
        }
    }
    files.sort_unstable();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn binaries_are_the_targets() {
        let metadata = serde_json::json!({ "packages": [{ "targets": [
            { "kind": ["lib"], "name": "tasuki_fuzz" },
            { "kind": ["bin"], "name": "ring" },
        ] }] });
        assert_eq!(binaries(&metadata), Some(vec!["ring".to_owned()]));
        assert_eq!(binaries(&Value::Null), None);
    }

    #[test]
    fn the_suite_shows_milestones_and_failures_only() {
        let plan = Plan::short(1);
        assert!(!plan.shows("#41\tNEW    cov: 8 ft: 28 corp: 8/13b lim: 4"));
        assert!(!plan.shows("#58\tREDUCE cov: 8 ft: 28 corp: 8/12b lim: 4"));
        assert!(plan.shows("#2518314\tDONE   cov: 16 ft: 186 corp: 118/24Kb lim: 4096"));
        assert!(plan.shows("SUMMARY: libFuzzer: deadly signal"));
    }
}
