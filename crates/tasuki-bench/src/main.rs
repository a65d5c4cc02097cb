//! Measures Tasuki beside its peers, its physical floors and the papers it comes from.
//!
//! Every case runs in two processes, each on one CPU, while the bench itself sleeps.

mod call;
mod case;
mod cpus;
mod demo;
mod floors;
mod host;
mod interrupt;
mod orders;
mod pair;
mod papers;
mod peers;
mod report;
mod rounds;
mod sample;
mod table;
mod workplace;

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::{Parser, Subcommand};

use crate::cpus::Cpus;
use crate::host::Host;
use crate::interrupt::Interrupt;
use crate::pair::Side;
use crate::report::Report;
use crate::rounds::Effort;

/// Measures Tasuki beside its peers, its physical floors and the papers it comes from.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Debug, Subcommand)]
enum Bench {
    /// Calls between two processes.
    Call {
        /// Measure for seconds instead of minutes: enough to see whether something broke.
        #[arg(long)]
        quick: bool,
        /// Write the figures to FILE as JSON.
        #[arg(long, value_name = "FILE")]
        json: Option<PathBuf>,
        /// Run only the cases whose names begin with PREFIX, without a report: to see what a change does.
        #[arg(long, value_name = "PREFIX", conflicts_with = "json")]
        only: Vec<String>,
    },
    /// Shows what Tasuki does, with figures, in a few seconds.
    Demo,
    /// A server of the demo. The demo starts itself with this.
    #[command(hide = true)]
    DemoServer {
        /// How it comes to its office.
        office: demo::Office,
        /// The CPU to stay on.
        cpu: usize,
        /// Where it serves.
        path: PathBuf,
    },
    /// One side of a case. The bench starts itself with this.
    #[command(hide = true)]
    Role {
        /// What to do.
        side: Side,
        /// In which case.
        case: String,
    },
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The whole chain in one line. A backtrace tells a user nothing.
            eprintln!("tasuki-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    match Arguments::parse().bench {
        Bench::Call { quick, json, only } => {
            let effort = if quick { Effort::QUICK } else { Effort::FULL };
            if only.is_empty() { bench_call(effort, json.as_deref()) } else { some(effort, &only) }
        }
        Bench::Demo => demo::run(),
        Bench::DemoServer { office, cpu, path } => demo::serve(office, cpu, &path),
        Bench::Role { side, case } => {
            pair::play(side, &case).with_context(|| format!("case {case}: the {} role gave up", side.name()))
        }
    }
}

/// Runs the cases whose names begin with one of `prefixes`, and prints what each came to.
fn some(effort: Effort, prefixes: &[String]) -> Result<()> {
    workplace::sweep();
    let wanted = |case: &&case::Case| prefixes.iter().any(|prefix| case.name.starts_with(prefix.as_str()));
    let cases: Vec<_> = case::all().into_iter().filter(wanted).collect();
    ensure!(
        !cases.is_empty(),
        "no case begins with {}; the cases are named in the table of a full run",
        prefixes.join(" or ")
    );
    let samples = rounds::run(&cases, effort, Cpus::choose()?, &Interrupt::catch()?)?;
    for case in cases {
        let sample = samples.of(case.name)?;
        println!("{:<22} {:?} {:?}", case.name, sample.summary(), sample.all_numbers());
    }
    Ok(())
}

fn bench_call(effort: Effort, json: Option<&Path>) -> Result<()> {
    // A file that cannot be written is better known before minutes of measuring than after.
    let json = json.map(|file| create(file).map(|open| (file, open))).transpose()?;
    workplace::sweep();
    let cpus = Cpus::choose()?;
    let host = Host::look(cpus);
    let interrupt = Interrupt::catch()?;
    let samples = rounds::run(&case::all(), effort, cpus, &interrupt)?;

    let mut rows = floors::rows(&samples)?;
    rows.extend(call::rows(&samples)?);
    rows.extend(peers::rows(&samples)?);
    let report = Report { bench: "call", host, rows };
    println!("{}", table::of(&report));
    println!("{}", papers::ANT.beside(&call::paper(&samples)?));
    match json {
        Some((path, file)) => write_json(&report, file, path),
        None => Ok(()),
    }
}

fn create(path: &Path) -> Result<File> {
    File::create(path).with_context(|| format!("{} cannot be written; choose another file", path.display()))
}

fn write_json(report: &Report, mut file: File, path: &Path) -> Result<()> {
    let text = serde_json::to_string_pretty(report).context("the report could not be written as JSON")?;
    file.write_all((text + "\n").as_bytes()).with_context(|| format!("{} could not be written", path.display()))
}
