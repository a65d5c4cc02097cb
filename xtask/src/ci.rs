//! `ci`: all checks that a change must pass. `.ci/run` calls this and nothing else.

use std::process::Command;
use std::time::Instant;

use crate::checkout::Checkout;
use crate::fuzz::{self, Sanitizer};
use crate::{needs, stream, test, tidy};

/// Returns whether the check has passed.
type Check = fn(&Checkout) -> anyhow::Result<bool>;

/// Runs every step, whether or not an earlier one failed: the short ones first, the others beside the suite, whose
/// closing line is the last line of the output.
pub fn run(checkout: &Checkout) -> anyhow::Result<bool> {
    needs::provide(&[needs::STRACE, needs::CXX]);
    let take = |(step, check): (&'static str, Check)| {
        let begun = Instant::now();
        let passed = check(checkout).unwrap_or_else(|error| {
            println!("xtask: {step} could not run: {error:#}");
            false
        });
        (step, passed, begun.elapsed())
    };
    let short: [(_, Check); 3] = [("rustfmt and clippy", |_| components()), ("fmt", fmt), ("tidy", tidy::run)];
    let mut steps: Vec<_> = short.into_iter().map(take).collect();
    let long: [(_, Check); 2] = [("clippy", clippy), ("doc", doc)];
    let report = test::run(checkout, None, fuzz::SHORT_RUN_SECONDS, || steps.extend(long.into_iter().map(take)))?;
    println!("\nsteps");
    for (step, passed, took) in &steps {
        println!("  {step:<20} {}, in {} s", if *passed { "passed" } else { "FAILED" }, took.as_secs());
    }
    let tests_passed = report.close();
    Ok(tests_passed && steps.iter().all(|(_, passed, _)| *passed))
}

/// Checks that rustfmt and clippy are present. A toolchain may come without them; then rustup adds them.
fn components() -> anyhow::Result<bool> {
    let present = |tool: &str| Command::new(tool).arg("--version").output().is_ok_and(|answer| answer.status.success());
    if present("cargo-fmt") && present("cargo-clippy") {
        return Ok(true);
    }
    if !present("rustup") {
        println!("rustfmt or clippy is missing, and so is rustup, which could add them; install both");
        return Ok(false);
    }
    stream::succeeds(Command::new("rustup").args(["component", "add", "rustfmt", "clippy"]))
}

fn fmt(checkout: &Checkout) -> anyhow::Result<bool> {
    let ours = stream::succeeds(checkout.cargo("fmt").args(["--all", "--check"]))?;
    let fuzz = stream::succeeds(checkout.cargo("fmt").args(["--manifest-path", "fuzz/Cargo.toml", "--check"]))?;
    Ok(ours && fuzz)
}

fn clippy(checkout: &Checkout) -> anyhow::Result<bool> {
    let mut ours = checkout.cargo("clippy");
    ours.args(["--workspace", "--all-targets", "--all-features", "--", "-D", "warnings"]);
    // The programs that run in guests are no tests of `cargo test`, so `--all-targets` leaves them out.
    let mut guests = checkout.cargo("clippy");
    guests.args(["--package", "tasuki-net", "--package", "tasuki-control", "--all-features", "--test", "guest"]);
    guests.args(["--", "-D", "warnings"]);
    let ours = stream::succeeds(&mut ours)? & stream::succeeds(&mut guests)?;
    if !needs::CXX.is_met() {
        println!("clippy leaves out the fuzz targets: {}", needs::CXX.serves);
        return Ok(ours);
    }
    let mut fuzz = fuzz::cargo(checkout, "clippy", Sanitizer::None)?;
    Ok(stream::succeeds(fuzz.args(["--bins", "--", "-D", "warnings"]))? && ours)
}

fn doc(checkout: &Checkout) -> anyhow::Result<bool> {
    let mut doc = checkout.cargo("doc");
    doc.args(["--no-deps", "--workspace", "--all-features"]).env("RUSTDOCFLAGS", "-D warnings");
    stream::succeeds(&mut doc)
}
