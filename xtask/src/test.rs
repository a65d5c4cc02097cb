//! `test`: runs the whole suite, and prints the result in one line at the end.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::mpsc::{self, Sender};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};

use crate::checkout::{Checkout, metadata};
use crate::fuzz::{self, Plan};
use crate::tally::{Reader, Tally};
use crate::{guest, loom, needs, stream};

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Stage {
    /// Unit tests, tests with real processes, and the code examples in the documentation
    Unit,
    /// Loom models of the shared-memory protocols, with every interleaving
    Loom,
    /// Tests of the drivers through VFIO and an IOMMU, in a QEMU guest
    Guest,
    /// Each fuzz target for a short time, after the inputs that once broke it
    Fuzz,
}

/// The tallies of the stages, and how long each took.
#[must_use = "a report that is not closed has no closing line"]
pub struct Report(Vec<(Stage, Tally, Duration)>);

/// Runs the stage `only`, or all stages, whether or not an earlier one failed. `beside` runs while the tests of the
/// first stage wait.
pub fn run(
    checkout: &Checkout,
    only: Option<Stage>,
    fuzz_seconds: u32,
    beside: impl FnOnce() + Send,
) -> anyhow::Result<Report> {
    let programs = [
        needs::STRACE,
        needs::CXX,
        needs::QEMU,
        needs::DPDK,
        needs::TSHARK,
        needs::PING,
        needs::ETHTOOL,
        needs::CURL,
        needs::JSONSCHEMA,
    ];
    needs::provide(&programs);
    let run_each = |stages: &[Stage], mut building: Option<Sender<()>>| -> Vec<_> {
        let asked = stages.iter().filter(|stage| only.is_none_or(|only| only == **stage));
        asked.map(|stage| run_one(checkout, *stage, fuzz_seconds, building.take())).collect()
    };
    // Nothing is sent: the sender lives as long as the first stage builds.
    let (building, built) = mpsc::channel();
    // The tests of the first stage wait most of the time, and so does the guest. Their own processes come first.
    let results = std::thread::scope(|scope| {
        let run_each = &run_each;
        let others = scope.spawn(move || {
            // cargo builds one thing at a time in a folder.
            let _ = built.recv();
            stream::only_in_idle_time();
            stream::prefix_lines("beside │ ");
            beside();
            run_each(&[Stage::Loom, Stage::Fuzz], None)
        });
        let mut results = run_each(&[Stage::Unit, Stage::Guest], Some(building));
        results.extend(others.join().expect("a stage's error is one of its tally"));
        results
    });
    Ok(Report(results))
}

/// Runs a stage, which drops `building` when it builds no more.
fn run_one(
    checkout: &Checkout,
    stage: Stage,
    fuzz_seconds: u32,
    building: Option<Sender<()>>,
) -> (Stage, Tally, Duration) {
    let begun = Instant::now();
    let tally = match stage {
        Stage::Unit => unit(checkout, building),
        Stage::Loom => loom::explore(checkout, &[]),
        Stage::Guest => guest::drivers(checkout),
        Stage::Fuzz => fuzz::fuzz_all(checkout, &Plan::short(fuzz_seconds)),
    };
    let tally = tally.unwrap_or_else(|error| {
        println!("xtask: the {} stage could not run: {error:#}", name(stage));
        Tally::one(false, &format!("{error:#}"))
    });
    (stage, tally, begun.elapsed())
}

impl Report {
    /// Prints the output of failing tests and the sums: one per stage, then the reasons of skipped tests, then one line
    /// for the whole suite. Returns whether no test failed.
    pub fn close(self) -> bool {
        let mut sum = Tally::default();
        for (stage, tally, _) in self.0.iter().filter(|(_, tally, _)| !tally.failures.is_empty()) {
            println!("\nfailed ({})", name(*stage));
            tally.failures.iter().for_each(|line| println!("  {line}"));
        }
        println!("\nsummary");
        for (stage, tally, took) in &self.0 {
            println!("  {:<5} {tally}, in {} s", name(*stage), took.as_secs());
            sum += tally;
        }
        for line in told(&sum.reasons) {
            println!("  skipped: {line}");
        }
        println!("{sum}");
        sum.failed == 0
    }
}

/// Returns each reason once, with the number of tests that gave it.
pub fn told(reasons: &[String]) -> Vec<String> {
    let mut reasons = reasons.to_vec();
    reasons.sort_unstable();
    let alike = reasons.chunk_by(|one, next| one == next);
    alike
        .map(|alike| if alike.len() == 1 { alike[0].clone() } else { format!("{} ({} tests)", alike[0], alike.len()) })
        .collect()
}

/// The commit of the last release. Tests upgrade from its programs to ours, and go back.
const RELEASED: &str = "68a81e73bada";

/// Builds daemon and worker of the last release without features, and returns the folder with both. With all features, our
/// own worker behaves as the next version may. Needs the history, which a shallow clone does not have.
fn released(checkout: &Checkout) -> anyhow::Result<PathBuf> {
    let folder = checkout.target.join("released").join(RELEASED);
    if folder.is_dir() {
        return Ok(folder);
    }
    // It gets its name when it is complete.
    let unfinished = checkout.target.join("released/unfinished");
    _ = fs::remove_dir_all(&unfinished);
    let (source, archive) = (unfinished.join("source"), unfinished.join("source.tar"));
    fs::create_dir_all(&source).with_context(|| format!("cannot make {}", source.display()))?;
    let mut git = Command::new("git");
    git.current_dir(&checkout.root).args(["archive", "--output"]).arg(&archive).arg(RELEASED);
    ensure!(stream::succeeds(&mut git)?, "git has no commit {RELEASED} here: git fetch --unshallow");
    let unpacked = stream::succeeds(Command::new("tar").arg("-xf").arg(&archive).arg("-C").arg(&source))?;
    ensure!(unpacked, "tar cannot unpack {}", archive.display());
    let mut build = checkout.cargo("build");
    // In our own target folder and by our own profile, so that no other package is built twice.
    build.current_dir(&source).env("CARGO_TARGET_DIR", &checkout.target).args(["--locked", "--bins"]);
    build.arg("--config").arg(checkout.root.join("Cargo.toml"));
    ensure!(
        stream::succeeds(build.args(["--package", "tasuki-control", "--package", "tasuki-worker"]))?,
        "the last release does not build"
    );
    for program in ["tasukid", "tasuki-worker"] {
        let (from, to) = (checkout.target.join("debug").join(program), unfinished.join(program));
        fs::copy(&from, &to).with_context(|| format!("cannot write {}", to.display()))?;
    }
    fs::remove_dir_all(source)?;
    fs::remove_file(archive)?;
    fs::rename(unfinished, &folder).with_context(|| format!("cannot make {}", folder.display()))?;
    Ok(folder)
}

fn unit(checkout: &Checkout, mut building: Option<Sender<()>>) -> anyhow::Result<Tally> {
    let mut command = checkout.cargo("test");
    match released(checkout) {
        Ok(folder) => _ = command.env("TASUKI_RELEASED", folder),
        Err(error) => println!("xtask: the tests with the last release are skipped: {error:#}"),
    }
    match guest::prepare_vm(checkout) {
        Ok(files) => _ = command.env("TASUKI_VM", std::env::join_paths(files)?),
        Err(error) => println!("xtask: the tests with a virtual machine are skipped: {error:#}"),
    }
    command.args(["--workspace", "--all-features", "--no-fail-fast", "--", "--show-output"]);
    // Tests with real processes mostly wait. On two CPUs, one more at a time takes a third off their time.
    if std::env::var_os("RUST_TEST_THREADS").is_none() {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        command.env("RUST_TEST_THREADS", (cpus + 1).to_string());
    }
    let mut reader = Reader::default();
    let status = stream::run_showing(&mut command, |line| {
        if line.starts_with("running ") {
            building = None;
        }
        reader.line(line)
    })?;
    Ok(reader.finish(status.success()))
}

/// The test binary that every crate may have: its tests in modules.
const SUITE: &str = "suite";

/// Parts of the names of tests that take longest, with the tests among them that the quick tier runs.
const SLOW: [(&str, &[&str]); 6] = [
    ("daemon::", &["attacks::", "callers::", "clients::", "confined::", "forged::", "ruled::"]),
    ("handover::", &[]),
    ("chaos::sixty_four_nodes", &[]),
    ("_after_a_hostile_owner_on_qemu::", &[]),
    ("last_owner::whatever_stands_in_any_register", &[]),
    ("sums::at_every_mtu", &[]),
];

/// Runs the tests that fit into five minutes once all is built, for every commit: all unit tests and all tests with
/// real processes, but those in [`SLOW`], of which it runs a selection. Leaves out the code in the documentation and
/// the other stages.
pub fn quick(checkout: &Checkout) -> anyhow::Result<Report> {
    let of_workspace = || {
        let mut command = checkout.cargo("test");
        // The same packages and features as in the whole suite, so that nothing is built twice.
        command.args(["--workspace", "--all-features", "--no-fail-fast"]);
        command
    };
    let mut units = of_workspace();
    units.args(["--lib", "--bins"]);
    for test in test_binaries(checkout)?.iter().filter(|test| *test != SUITE) {
        units.args(["--test", test]);
    }
    units.args(["--", "--show-output"]);
    let mut most = of_workspace();
    most.args(["--test", SUITE, "--", "--show-output"]);
    let mut some = of_workspace();
    some.args(["--test", SUITE, "--", "--show-output"]);
    for (slow, chosen) in SLOW {
        most.args(["--skip", slow]);
        some.args(chosen.iter().map(|chosen| format!("{slow}{chosen}")));
    }
    let mut report = Report(Vec::new());
    for mut command in [units, most, some] {
        let (mut reader, begun) = (Reader::default(), Instant::now());
        let status = stream::run_showing(&mut command, |line| reader.line(line))?;
        report.0.push((Stage::Unit, reader.finish(status.success()), begun.elapsed()));
    }
    Ok(report)
}

/// Returns the names of the workspace's test binaries that `cargo test` runs by default.
fn test_binaries(checkout: &Checkout) -> anyhow::Result<BTreeSet<String>> {
    let manifest = metadata(&checkout.root.join("Cargo.toml"))?;
    let packages = manifest["packages"].as_array().context("`cargo metadata` lists no packages")?;
    let targets = packages.iter().filter_map(|package| package["targets"].as_array()).flatten();
    let tests = targets.filter(|target| target["kind"][0] == "test" && target["test"] != false);
    Ok(tests.filter_map(|target| target["name"].as_str().map(str::to_owned)).collect())
}

fn name(stage: Stage) -> &'static str {
    match stage {
        Stage::Unit => "unit",
        Stage::Loom => "loom",
        Stage::Guest => "guest",
        Stage::Fuzz => "fuzz",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_is_told_once() {
        let reasons = ["needs strace", "needs two cores", "needs strace"].map(str::to_owned);
        assert_eq!(told(&reasons), ["needs strace (2 tests)", "needs two cores"]);
    }
}
