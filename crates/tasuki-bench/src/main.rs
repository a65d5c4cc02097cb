//! Measures Tasuki beside its peers, its physical floors and the papers it comes from.
//!
//! Every case runs in two processes, each on one CPU, while the bench itself sleeps.

mod call;
mod case;
mod cpus;
mod demo;
mod distance;
mod floors;
mod host;
mod interrupt;
mod iperf;
mod nic;
mod orders;
mod pair;
mod papers;
mod peers;
mod program;
mod relay;
mod report;
mod rounds;
mod sample;
mod table;
mod vni;
mod workplace;

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::{Args, Parser, Subcommand};

use crate::case::Case;
use crate::cpus::Cpus;
use crate::host::Host;
use crate::interrupt::Interrupt;
use crate::pair::Side;
use crate::relay::guest::Relays;
use crate::relay::sends;
use crate::report::{Report, Row};
use crate::rounds::{Effort, Manner, Samples};
use crate::vni::Equipment;

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
    Call(How),
    /// A NIC and its driver: our model of a card in one process, the driver in another.
    Nic(How),
    /// Ethernet between nodes through memory.
    Vni(How),
    /// A NIC that changes hands while packets flow.
    Relay {
        #[command(flatten)]
        how: How,
        /// The guest for the cases that need one. `cargo xtask bench relay` makes it.
        #[arg(long, value_name = "FILE", hide = true)]
        guest: Option<PathBuf>,
    },
    /// A namespace's node of the bench `vni`. The bench starts itself with this.
    #[command(hide = true)]
    TapNode {
        /// Its number on the VNI.
        number: u16,
        /// The CPU to stay on.
        cpu: usize,
    },
    /// A node of the bench `vni` that does nothing. The bench starts itself with this.
    #[command(hide = true)]
    IdleNode {
        /// Its number on the VNI.
        number: u16,
    },
    /// The second worker of a relay. The bench starts itself with this.
    #[command(hide = true)]
    TakeTurns,
    /// The part of the bench `relay` that runs in a network of its own. The bench starts itself with this.
    #[command(hide = true)]
    Sends {
        /// Where files may be left.
        folder: PathBuf,
        /// Of each kind.
        trials: u32,
    },
    /// The program of that part that sends. The bench starts itself with this.
    #[command(hide = true)]
    Sender {
        /// The CPU to stay on.
        cpu: usize,
    },
    /// Shows what Tasuki does, with figures, in less than a minute.
    Demo {
        /// Also has this machine's own kernel on the wire of a network card that changes hands. Needs root.
        #[arg(long, value_enum)]
        wire: Option<demo::Cable>,
    },
    /// The part of the demo that runs in a network of its own. The demo starts itself with this.
    #[command(hide = true)]
    DemoPing {
        /// Where files may be left.
        folder: PathBuf,
    },
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

/// How much is measured, and where it goes.
#[derive(Debug, Clone, Args)]
struct How {
    /// Measure for seconds instead of minutes: enough to see whether something broke.
    #[arg(long)]
    quick: bool,
    /// Write the figures to FILE as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Run only the cases whose names begin with PREFIX: to see what a change does. Only `relay` makes a report of some.
    #[arg(long, value_name = "PREFIX")]
    only: Vec<String>,
}

/// What a bench is.
#[derive(Debug, Clone, Copy)]
struct Plan {
    /// Its name in the report.
    name: &'static str,
    effort: Effort,
    manner: Manner,
    /// Whether there are rows for some of its cases by themselves.
    reports_some: bool,
}

impl How {
    /// The cases that were asked for.
    fn choose(&self, all: &[&'static Case]) -> Result<Vec<&'static Case>> {
        let is_wanted = |case: &&&Case| {
            self.only.is_empty() || self.only.iter().any(|prefix| case.name.starts_with(prefix.as_str()))
        };
        let chosen: Vec<_> = all.iter().filter(is_wanted).copied().collect();
        let names: Vec<_> = all.iter().map(|case| case.name).collect();
        let prefixes = self.only.join(" or ");
        ensure!(!chosen.is_empty(), "no case begins with {prefixes}; the cases are {}", names.join(", "));
        Ok(chosen)
    }

    fn plan(&self, name: &'static str) -> Plan {
        Plan { name, effort: self.effort(), manner: Manner::PLAIN, reports_some: false }
    }

    /// Where the figures go. A file that cannot be written is better known before minutes of measuring than after.
    fn json_file(&self) -> Result<Option<(&Path, File)>> {
        let Some(path) = self.json.as_deref() else { return Ok(None) };
        let file =
            File::create(path).with_context(|| format!("{} cannot be written; choose another file", path.display()));
        Ok(Some((path, file?)))
    }

    fn effort(&self) -> Effort {
        if self.quick { Effort::QUICK } else { Effort::FULL }
    }
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
        Bench::Call(how) => bench(how.plan("call"), &how, &Interrupt::catch()?, &case::of_call(), |samples| {
            let mut rows = floors::rows(samples)?;
            rows.extend(call::rows(samples)?);
            rows.extend(peers::rows(samples)?);
            Ok((rows, Some(papers::ANT.beside(&call::paper(samples)?).to_string())))
        }),
        Bench::Nic(how) => bench(how.plan("nic"), &how, &Interrupt::catch()?, &case::of_nic(), |samples| {
            Ok((nic::rows(samples)?, None))
        }),
        Bench::Vni(how) => vni(&how),
        Bench::Relay { how, guest } => relay(&how, guest.as_deref()),
        Bench::TapNode { number, cpu } => vni::tap_node(number, cpu),
        Bench::IdleNode { number } => vni::idle_node(number),
        Bench::TakeTurns => relay::take_turns(),
        Bench::Sends { folder, trials } => relay::sends::play(&folder, trials),
        Bench::Sender { cpu } => relay::sends::send(cpu),
        Bench::Demo { wire } => demo::run(wire),
        Bench::DemoPing { folder } => demo::ping(&folder),
        Bench::DemoServer { office, cpu, path } => demo::serve(office, cpu, &path),
        Bench::Role { side, case } => {
            pair::play(side, &case).with_context(|| format!("case {case}: the {} role gave up", side.name()))
        }
    }
}

/// The bench of Ethernet between nodes: with what this machine has for it.
fn vni(how: &How) -> Result<()> {
    // From here on an interrupt no longer ends the process before it has given back what it takes.
    let interrupt = Interrupt::catch()?;
    let effort = vni::effort(how.quick);
    if !how.only.is_empty() && how.only.iter().all(|prefix| vni::is_of_namespaces(prefix)) {
        let json = how.json_file()?;
        let rows = vni::rows_of_namespaces(effort, &interrupt)?;
        return publish(&Report { bench: "vni", host: Host::look(Cpus::choose()?), rows }, None, json);
    }
    let equipment = Equipment::get(how.choose(&case::of_vni())?);
    ensure!(!equipment.cases.is_empty(), "none of the cases that were asked for can be run here; see above");
    let plan = Plan { name: "vni", effort, manner: vni::MANNER, reports_some: false };
    bench(plan, how, &interrupt, &equipment.cases, |samples| {
        Ok((vni::rows(samples, plan.effort, &interrupt)?, Some(distance::told(samples))))
    })
}

/// The bench of relays: between two processes, and, where there is one, in a guest.
fn relay(how: &How, guest: Option<&Path>) -> Result<()> {
    let relays = if how.quick { Relays::QUICK } else { Relays::FULL };
    let in_guest = |interrupt: &Interrupt| match guest {
        Some(guest) => relay::guest::run(guest, relays, interrupt).map(|(rows, paper)| (rows, Some(paper))),
        None => {
            eprintln!(
                "guest-lkm, guest-handover and guest-repoint were left out: `cargo xtask bench relay` makes their guest, if not --quick"
            );
            Ok((Vec::new(), None))
        }
    };
    let all = |what: &str| !how.only.is_empty() && how.only.iter().all(|prefix| prefix.starts_with(what));
    let any = |what: &str| how.only.iter().any(|prefix| prefix.starts_with(what));
    for alone in ["guest", "sends"] {
        ensure!(
            all(alone) || !any(alone),
            "--only {alone} is a run of its own; leave out the other --only, or this one"
        );
    }
    if guest.is_some() && all("guest") {
        let json = how.json_file()?;
        let (rows, paper) = in_guest(&Interrupt::catch()?)?;
        return publish(&Report { bench: "relay", host: Host::look(Cpus::choose()?), rows }, paper.as_deref(), json);
    }
    let interrupt = Interrupt::catch()?;
    let trials = if how.quick { sends::QUICK } else { sends::FULL };
    if all("sends") {
        let json = how.json_file()?;
        let Some(sends) = sends::run(trials, &interrupt)? else { return Ok(()) };
        let report = Report { bench: "relay", host: Host::look(Cpus::choose()?), rows: sends.rows()? };
        return publish(&report, Some(&sends.table()?.to_string()), json);
    }
    let cases = case::of_relay();
    how.choose(&cases)?;
    let mut how = how.clone();
    if !how.only.is_empty() {
        // What a pause is held against.
        how.only.extend(relay::floors().map(|case| case.name.to_owned()));
    }
    let how = &how;
    let plan = Plan { reports_some: true, ..how.plan("relay") };
    bench(plan, how, &interrupt, &cases, |samples| {
        let (sends, (more, paper)) = match how.only.is_empty() {
            true => (sends::run(trials, &interrupt)?, in_guest(&interrupt)?),
            false => (None, (Vec::new(), None)),
        };
        let mut rows = relay::rows(samples)?;
        let mut tables = relay::tables(samples)?;
        if let Some(sends) = &sends {
            rows.extend(sends.rows()?);
            tables = format!("{tables}\n\n{}", sends.table()?);
        }
        rows.extend(more);
        Ok((rows, Some(paper.map_or(tables.clone(), |paper| format!("{tables}\n\n{paper}")))))
    })
}

/// Runs `cases`, and prints the rows that `judge` makes of them, with what else it has to say; of some of them only, what each came to.
fn bench(
    plan: Plan,
    how: &How,
    interrupt: &Interrupt,
    cases: &[&'static Case],
    judge: impl FnOnce(&Samples) -> Result<(Vec<Row>, Option<String>)>,
) -> Result<()> {
    let is_whole = how.only.is_empty() || plan.reports_some;
    ensure!(is_whole || how.json.is_none(), "there is no report of some of the cases; leave out --only or --json");
    let cases = how.choose(cases)?;
    let json = how.json_file()?;
    workplace::sweep();
    let cpus = Cpus::choose()?;
    let host = Host::look(cpus);
    let samples = rounds::run(&cases, (plan.effort, plan.manner), cpus, interrupt)?;
    if !is_whole {
        for case in cases {
            let sample = samples.of(case.name)?;
            println!("{:<22} {:?} {:?}", case.name, sample.summary(), sample.all_numbers());
        }
        return Ok(());
    }
    let (rows, more) = judge(&samples)?;
    publish(&Report { bench: plan.name, host, rows }, more.as_deref(), json)
}

/// Prints a report, with what else there is to say, and writes it where it was asked for.
fn publish(report: &Report, more: Option<&str>, json: Option<(&Path, File)>) -> Result<()> {
    println!("{}", table::of(report));
    if let Some(more) = more {
        println!("{more}");
    }
    json.map_or(Ok(()), |(path, file)| write_json(report, file, path))
}

fn write_json(report: &Report, mut file: File, path: &Path) -> Result<()> {
    let text = serde_json::to_string_pretty(report).context("the report could not be written as JSON")?;
    file.write_all((text + "\n").as_bytes()).with_context(|| format!("{} could not be written", path.display()))
}
