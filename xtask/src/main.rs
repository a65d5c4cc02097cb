//! `cargo xtask`: one verb for everything that a developer or CI runs.

mod asan;
mod bench;
mod campaign;
mod checkout;
mod ci;
mod fuzz;
mod guest;
mod loom;
mod needs;
mod package;
mod stream;
mod tally;
mod test;
mod tidy;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::checkout::Checkout;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Everything a developer or CI runs", version)]
struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Build in release and run the demo; further arguments go to `tasuki-bench demo`
    #[command(disable_help_flag = true)]
    Demo {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    /// Run the whole suite: unit and process tests, loom models, drivers in a guest, short fuzz runs
    Test {
        /// Run the tests that fit into five minutes once everything is built: most unit and process tests
        #[arg(long, conflicts_with_all = ["only", "fuzz_seconds"])]
        quick: bool,
        /// Run one stage only
        #[arg(long, value_enum)]
        only: Option<test::Stage>,
        /// Run time of each fuzz target, in seconds
        #[arg(long, default_value_t = fuzz::SHORT_RUN_SECONDS)]
        fuzz_seconds: u32,
    },
    /// Build in release and run a benchmark; the arguments go to `tasuki-bench`, e.g. `call --quick`, `nic --quick`
    #[command(disable_help_flag = true)]
    Bench {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    /// Repeat the suite's random trials thousands of times, and record the observations
    #[command(subcommand)]
    Campaign(campaign::Campaign),
    /// Run all checks that a change must pass: fmt, clippy, tidy, doc, test
    Ci,
    /// Make the Debian package, in target/package
    Package {
        /// Make an archive of static programs instead, which need no library and no Debian
        #[arg(long = "static", conflicts_with = "version")]
        is_static: bool,
        /// Its version; by default the workspace's
        #[arg(long = "deb-version", value_name = "VERSION")]
        version: Option<String>,
    },
    /// Check the project's rules that the compiler does not know
    Tidy,
    /// Explore the loom models; a name selects the tests that contain it
    Loom { filter: Vec<OsString> },
    /// Run the tests of five libraries under AddressSanitizer; a name selects the tests that contain it
    Asan { filter: Vec<OsString> },
    /// Run the tests that need VFIO and an IOMMU in a guest that has both: those of the drivers, and those of the
    /// daemon under its systemd unit
    Guest {
        /// Run the tests of one guest only
        #[arg(long, value_enum)]
        only: Option<guest::Part>,
    },
    /// Fuzz one target, or each in turn
    Fuzz {
        target: Option<String>,
        /// Run time of each target, in seconds
        #[arg(long, default_value_t = fuzz::LONG_RUN_SECONDS)]
        seconds: u32,
        /// Run the target once on this file and stop
        #[arg(long, requires = "target")]
        input: Option<PathBuf>,
        /// Add AddressSanitizer
        #[arg(long)]
        asan: bool,
        /// Further arguments for libFuzzer, after `--`, e.g. `-- -seed=7`
        #[arg(last = true)]
        libfuzzer: Vec<OsString>,
    },
}

fn main() -> ExitCode {
    match run(Args::parse().verb) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs a verb. Returns whether it passed.
///
/// # Errors
///
/// The verb could not run at all.
fn run(verb: Verb) -> anyhow::Result<bool> {
    let checkout = Checkout::find()?;
    match verb {
        Verb::Demo { args } => Err(bench::demo(&checkout, &args)),
        Verb::Bench { args } => Err(bench::bench(&checkout, &args)),
        Verb::Campaign(campaign) => campaign::run(&checkout, &campaign),
        Verb::Test { quick: true, .. } => test::quick(&checkout).map(|report| report.close()),
        Verb::Test { only, fuzz_seconds, .. } => {
            test::run(&checkout, only, fuzz_seconds, || ()).map(|report| report.close())
        }
        Verb::Ci => ci::run(&checkout),
        Verb::Package { version, is_static } => {
            let made =
                if is_static { package::make_static(&checkout) } else { package::make(&checkout, version.as_deref()) };
            println!("{}", made?.display());
            Ok(true)
        }
        Verb::Tidy => tidy::run(&checkout),
        Verb::Loom { filter } => loom::run(&checkout, &filter),
        Verb::Asan { filter } => asan::run(&checkout, &filter),
        Verb::Guest { only } => {
            needs::provide(&[needs::QEMU]);
            let tally = guest::run(&checkout, only)?;
            test::told(&tally.reasons).iter().for_each(|line| println!("skipped: {line}"));
            println!("{tally}");
            Ok(tally.failed == 0)
        }
        Verb::Fuzz { target, seconds, input, asan, libfuzzer } => {
            let sanitizer = if asan { fuzz::Sanitizer::Address } else { fuzz::Sanitizer::None };
            let plan = fuzz::Plan { seconds, input, libfuzzer, sanitizer, chatty: true };
            fuzz::run(&checkout, target.as_deref(), &plan)
        }
    }
}
