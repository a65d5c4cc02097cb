//! Measures Tasuki beside its peers, its physical floors and the papers it comes from.
//!
//! Every case runs in two processes, each on one CPU, while the bench process sleeps.

mod call;
mod case;
mod cpus;
mod daemon;
mod demo;
mod distance;
mod floors;
mod guest;
mod host;
mod interrupt;
mod iperf;
mod nic;
mod orders;
mod page;
mod pair;
mod papers;
mod peers;
mod program;
mod queues;
mod relay;
mod report;
mod rounds;
mod sample;
mod table;
mod tasukid;
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
    /// Measures calls between two processes.
    Call(How),
    /// Measures a NIC and its driver: our model of a card in one process, the driver in another.
    Nic(How),
    /// Measures Ethernet between nodes through shared memory.
    Vni(How),
    /// Measures the network card of a virtual machine.
    Guest {
        #[command(flatten)]
        how: How,
        /// Guest for the cases that need one. `cargo xtask bench guest` makes it.
        #[arg(long, value_name = "FILE", hide = true)]
        guest: Option<PathBuf>,
    },
    /// Measures tasukid: many nodes started, ended and taken over, its memory, and its API beside workers.
    Daemon(How),
    /// Measures a NIC that changes hands while packets flow.
    Relay {
        #[command(flatten)]
        how: How,
        /// Guest for the cases that need one. `cargo xtask bench relay` makes it.
        #[arg(long, value_name = "FILE", hide = true)]
        guest: Option<PathBuf>,
    },
    /// Plays the node of a namespace in the bench `vni`. The bench starts itself with this subcommand.
    #[command(hide = true)]
    TapNode {
        /// Number of the node on the VNI.
        number: u16,
        /// CPU to stay on.
        cpu: usize,
    },
    /// Plays such a node with as little as it takes. The bench starts itself with this subcommand.
    #[command(hide = true)]
    FloorNode {
        /// Number of the node, 0 or 1.
        number: u16,
        /// CPU to stay on.
        cpu: usize,
    },
    /// Plays a node of the bench `vni` that does nothing. The bench starts itself with this subcommand.
    #[command(hide = true)]
    IdleNode {
        /// Number of the node on the VNI.
        number: u16,
    },
    /// Plays the second worker of a relay. The bench starts itself with this subcommand.
    #[command(hide = true)]
    TakeTurns,
    /// Plays the part of the bench `relay` that runs in its own network namespace. The bench starts itself with this
    /// subcommand.
    #[command(hide = true)]
    Sends {
        /// Folder for files of this run.
        folder: PathBuf,
        /// Number of trials of each kind.
        trials: u32,
    },
    /// Plays the sending program of that part. The bench starts itself with this subcommand.
    #[command(hide = true)]
    Sender {
        /// CPU to stay on.
        cpu: usize,
    },
    /// Writes FOLDER/report.html: the papers' tables and figures beside what was measured here. Measures nothing.
    Report {
        /// Folder for the page; it is made if need be.
        folder: PathBuf,
        /// Files that a bench wrote with --json. Without them, the newest full run of each figure in the records counts.
        #[arg(long, value_name = "FILE", num_args = 1.., conflicts_with = "records")]
        from: Vec<PathBuf>,
        /// Folder of records, if not that of the checkout that built this program.
        #[arg(long, value_name = "FOLDER")]
        records: Option<PathBuf>,
    },
    /// Shows Tasuki at work, with figures, in less than a minute.
    Demo {
        /// Also connects this machine's own kernel to the cable of a network card that changes hands. Needs root.
        #[arg(long, value_enum)]
        wire: Option<demo::Cable>,
        /// At the end, write the report of all records into this folder.
        #[arg(long, value_name = "FOLDER", hide = true)]
        report: Option<PathBuf>,
    },
    /// Plays the part of the demo that runs in its own network namespace. The demo starts itself with this
    /// subcommand.
    #[command(hide = true)]
    DemoPing {
        /// Folder for files of this run.
        folder: PathBuf,
    },
    /// Plays a server of the demo. The demo starts itself with this subcommand.
    #[command(hide = true)]
    DemoServer {
        /// The server's way into service.
        office: demo::Office,
        /// CPU to stay on.
        cpu: usize,
        /// Path at which the server serves.
        path: PathBuf,
    },
    /// Plays one side of a case. The bench starts itself with this subcommand.
    #[command(hide = true)]
    Role {
        /// Side to play.
        side: Side,
        /// Name of the case.
        case: String,
    },
}

/// How much to measure, and where to write the figures.
#[derive(Debug, Clone, Args)]
struct How {
    /// Measure for seconds instead of minutes: enough to see whether something broke.
    #[arg(long)]
    quick: bool,
    /// Write the figures to FILE as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Print the tables as Markdown.
    #[arg(long)]
    markdown: bool,
    /// Run only the cases whose names begin with PREFIX, to see the effect of a change. Only `relay` reports on a
    /// subset of its cases.
    #[arg(long, value_name = "PREFIX")]
    only: Vec<String>,
}

#[derive(Debug, Clone, Copy)]
struct Plan {
    /// Name of the bench in the report.
    name: &'static str,
    effort: Effort,
    manner: Manner,
    /// Whether the bench can make rows from a subset of its cases.
    reports_some: bool,
}

impl How {
    /// Returns the cases that `--only` names, or all of them.
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

    /// Creates the file for the figures. A file that cannot be written fails here, before minutes of measuring.
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
            // Print the whole error chain on one line. A backtrace would not help a user.
            eprintln!("tasuki-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let asked = Arguments::parse().bench;
    if let Bench::Call(how)
    | Bench::Nic(how)
    | Bench::Vni(how)
    | Bench::Daemon(how)
    | Bench::Guest { how, .. }
    | Bench::Relay { how, .. } = &asked
        && how.markdown
    {
        table::write_markdown();
    }
    match asked {
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
        Bench::Guest { how, guest } => {
            let interrupt = Interrupt::catch()?;
            let json = how.json_file()?;
            workplace::sweep();
            let rows = guest::rows(how.quick, &how.only, guest.as_deref(), &interrupt)?;
            publish(&Report::new("guest", how.quick, Host::look(Cpus::choose()?), rows), None, json)
        }
        Bench::Daemon(how) => {
            let interrupt = Interrupt::catch()?;
            let json = how.json_file()?;
            workplace::sweep();
            // A case keeps this process off a CPU.
            let host = Host::look(Cpus::choose()?);
            let rows = daemon::rows(how.quick, &how.only, &interrupt)?;
            publish(&Report::new("daemon", how.quick, host, rows), None, json)
        }
        Bench::Relay { how, guest } => relay(&how, guest.as_deref()),
        Bench::TapNode { number, cpu } => vni::tap_node(number, cpu),
        Bench::FloorNode { number, cpu } => vni::floor_node(number, cpu),
        Bench::IdleNode { number } => vni::idle_node(number),
        Bench::TakeTurns => relay::take_turns(),
        Bench::Sends { folder, trials } => relay::sends::play(&folder, trials),
        Bench::Sender { cpu } => relay::sends::send(cpu),
        Bench::Report { folder, from, records } => {
            let from = if from.is_empty() { page::From::Records(records) } else { page::From::Files(from) };
            println!("{}", page::write(&folder, &from)?.display());
            Ok(())
        }
        Bench::Demo { wire, report } => {
            demo::run(wire)?;
            if let Some(folder) = report {
                let path = page::write(&folder, &page::From::Records(None))?;
                println!("All that was measured so far, beside the papers: {}", path.display());
            }
            Ok(())
        }
        Bench::DemoPing { folder } => demo::ping(&folder),
        Bench::DemoServer { office, cpu, path } => demo::serve(office, cpu, &path),
        Bench::Role { side, case } => {
            pair::play(side, &case).with_context(|| format!("case {case}: the {} role gave up", side.name()))
        }
    }
}

/// Runs the bench of Ethernet between nodes, with the equipment that this machine has.
fn vni(how: &How) -> Result<()> {
    // From here on an interrupt no longer ends the process before it has released its resources.
    let interrupt = Interrupt::catch()?;
    let effort = how.effort();
    if !how.only.is_empty() && how.only.iter().all(|prefix| vni::is_of_namespaces(prefix)) {
        let json = how.json_file()?;
        let rows = vni::rows_of_namespaces(effort, &interrupt)?;
        return publish(&Report::new("vni", how.quick, Host::look(Cpus::choose()?), rows), None, json);
    }
    let equipment = Equipment::get(how.choose(&case::of_vni())?);
    ensure!(!equipment.cases.is_empty(), "none of the cases that were asked for can be run here; see above");
    let plan = Plan { name: "vni", effort, manner: vni::MANNER, reports_some: false };
    bench(plan, how, &interrupt, &equipment.cases, |samples| {
        Ok((vni::rows(samples, plan.effort, &interrupt)?, Some(distance::told(samples))))
    })
}

/// Runs the bench of relays: between two processes and, where a guest is given, in a guest.
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
        return publish(&Report::new("relay", how.quick, Host::look(Cpus::choose()?), rows), paper.as_deref(), json);
    }
    let interrupt = Interrupt::catch()?;
    let trials = if how.quick { sends::QUICK } else { sends::FULL };
    if all("sends") {
        let json = how.json_file()?;
        let Some(sends) = sends::run(trials, &interrupt)? else { return Ok(()) };
        let report = Report::new("relay", how.quick, Host::look(Cpus::choose()?), sends.rows()?);
        return publish(&report, Some(&sends.table()?.to_string()), json);
    }
    let cases = case::of_relay();
    how.choose(&cases)?;
    let mut how = how.clone();
    if !how.only.is_empty() {
        // Pauses are compared with these floors.
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

/// Runs `cases`, then prints the rows and the further text that `judge` makes of them.
///
/// If the bench cannot report on the chosen subset, it prints the plain sample of each case instead.
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
    publish(&Report::new(plan.name, how.quick, host, rows), more.as_deref(), json)
}

/// Prints a report and the further text `more`, and writes the report to the JSON file, if given.
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
