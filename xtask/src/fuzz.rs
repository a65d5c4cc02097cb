//! `fuzz`: libFuzzer over the targets in `fuzz/`, on the stable toolchain.
//!
//! Coverage feedback is a pass of LLVM's own, which stable rustc runs if flags tell it to. The usual run has libFuzzer's
//! feedback, debug assertions and overflow checks. It finds a wild access that faults, and misses one that hits mapped
//! memory. `--asan` adds AddressSanitizer ([`asan`]), which finds that one in the heap and on the
//! stack, and finds leaks.
//!
//! - `fuzz/regressions/TARGET/` holds inputs that once broke a target, and a few inputs that reach far at once. It
//!   is in
//!   git. Its inputs run first.
//! - `fuzz/corpus/TARGET/` holds the inputs that libFuzzer kept. It is not in git.
//! - `fuzz/artifacts/TARGET/` holds inputs that broke a target in the latest runs. It is not in git.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, bail, ensure};
use serde_json::Value;

use crate::checkout::{Checkout, host, metadata};
use crate::tally::Tally;
use crate::{asan, needs, stream};

/// Run time per target in `cargo xtask test`: long enough to see that a target works, and to find shallow mistakes.
pub const SHORT_RUN_SECONDS: u32 = 9;

/// Default run time per target in `cargo xtask fuzz`: a coffee break.
pub const LONG_RUN_SECONDS: u32 = 300;

/// Time limit for one input. A target that takes longer hangs.
const HANG_SECONDS: u32 = 60;

/// Flags by which LLVM lets libFuzzer see coverage and comparisons. `-Ccodegen-units=1` because the pass loses
/// functions that are split among units. Source: cargo-fuzz 0.13, `src/project.rs`.
const COVERAGE: &str = "--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1 -Cdebug-assertions -Coverflow-checks";

/// Options of a fuzz run.
pub struct Plan {
    /// Run time per target.
    pub seconds: u32,
    /// File to run the target on once, instead of fuzzing.
    pub input: Option<PathBuf>,
    /// Further arguments for libFuzzer.
    pub libfuzzer: Vec<OsString>,
    pub sanitizer: Sanitizer,
    /// Whether to show libFuzzer's line for each input that it keeps: hundreds in the first seconds.
    pub chatty: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sanitizer {
    None,
    Address,
}

impl Plan {
    /// Returns the plan for a stage of the suite, which checks that each target works.
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

/// Targets that run at once: each has one thread.
const LANES: usize = 2;

/// Fuzzes each target. Each counts as one test.
pub fn fuzz_all(checkout: &Checkout, plan: &Plan) -> anyhow::Result<Tally> {
    let targets = targets(checkout)?;
    if !needs::CXX.is_met() {
        return Ok(Tally::skip(u32::try_from(targets.len())?, "needs a C++ compiler: sudo apt-get install -y g++"));
    }
    let programs = build(checkout, plan.sanitizer)?;
    let left = Mutex::new(targets.iter());
    let lane = || {
        let mut tally = Tally::default();
        loop {
            let next = left.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(target) = next else { return anyhow::Ok(tally) };
            stream::prefix_lines(format!("{target} │ "));
            tally += &Tally::one(fuzz(checkout, &programs, target, plan)?, &format!("fuzz target {target}"));
        }
    };
    std::thread::scope(|scope| {
        let lanes: Vec<_> = (0..LANES).map(|_| scope.spawn(lane)).collect();
        lanes.into_iter().try_fold(Tally::default(), |mut sum, lane| {
            sum += &lane.join().expect("a lane's error is its result")?;
            Ok(sum)
        })
    })
}

/// Returns the names of the `[[bin]]`s in `fuzz/Cargo.toml`. A file in `fuzz_targets/` without a `[[bin]]` would never
/// run and go unnoticed, so it is an error.
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

/// Returns `cargo VERB` for the fuzz workspace, with the flags that each of its builds needs.
pub fn cargo(checkout: &Checkout, verb: &str, sanitizer: Sanitizer) -> anyhow::Result<Command> {
    let mut command = checkout.cargo(verb);
    match sanitizer {
        Sanitizer::None => _ = command.env("RUSTFLAGS", COVERAGE).env_remove("CARGO_ENCODED_RUSTFLAGS"),
        Sanitizer::Address => asan::instrument(&mut command, COVERAGE),
    }
    // With an explicit platform, the flags do not apply to build scripts and procedural macros, which do not link
    // libFuzzer.
    command.args(["--release", "--manifest-path", "fuzz/Cargo.toml", "--target", &host()?]);
    command.env("CARGO_TARGET_DIR", target_dir(checkout, sanitizer));
    Ok(command)
}

fn target_dir(checkout: &Checkout, sanitizer: Sanitizer) -> PathBuf {
    checkout.target.join(match sanitizer {
        Sanitizer::None => "fuzz",
        Sanitizer::Address => "fuzz-asan",
    })
}

/// Builds all targets. Returns the folder of their programs.
fn build(checkout: &Checkout, sanitizer: Sanitizer) -> anyhow::Result<PathBuf> {
    let mut command = cargo(checkout, "build", sanitizer)?;
    ensure!(stream::succeeds(command.arg("--bins"))?, "the fuzz targets do not build");
    Ok(target_dir(checkout, sanitizer).join(host()?).join("release"))
}

/// Replays the inputs that once broke `target`, then fuzzes it.
fn fuzz(checkout: &Checkout, programs: &Path, target: &str, plan: &Plan) -> anyhow::Result<bool> {
    let folder = |of: &str| checkout.root.join("fuzz").join(of).join(target);
    let (regressions, corpus, artifacts) = (folder("regressions"), folder("corpus"), folder("artifacts"));
    fs::create_dir_all(&corpus).with_context(|| format!("cannot make {}", corpus.display()))?;
    fs::create_dir_all(&artifacts).with_context(|| format!("cannot make {}", artifacts.display()))?;
    // libFuzzer ends a process without its destructors: what it leaves goes with this folder.
    let left = tempfile::tempdir().context("cannot make a folder for temporary files")?;
    let libfuzzer = || {
        let mut command = Command::new(programs.join(target));
        command.env("TMPDIR", left.path());
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
    // From comparisons the fuzzer learns magic numbers. Without this option it learns from branches only.
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

/// Returns the files of a folder, in the order of their names; none if the folder does not exist.
fn files_in(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    if !folder.exists() {
        return Ok(Vec::new());
    }
    let unreadable = || format!("cannot read {}", folder.display());
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).with_context(unreadable)? {
        let path = entry.with_context(unreadable)?.path();
        // The folder may contain a README beside the inputs.
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
