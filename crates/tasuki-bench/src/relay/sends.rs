//! The experiment of S1: how a driver's replacement affects a program that sends through its NIC.
//!
//! This machine's kernel holds one TCP connection from a namespace, whose only interface is the node's NIC, to the
//! other end of the card's cable. The program sends 1,024 bytes, works for a millisecond, and sends again, a
//! thousand times. In most kinds of trial, the driver is replaced at some point among them.
//!
//! Program and drivers run on one CPU, as in the paper. The other CPU runs the card's model, the receiver at its
//! cable, and tasukid. The model has priority there (SCHED_FIFO), because nothing delays silicon.

use std::collections::BTreeMap;
use std::io::{BufRead, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use comfy_table::Table;
use rustix::process::Signal;
use tasuki_control::api::types::Method;

use super::system::{Relay, System, now_ns};
use crate::cpus::{self, Cpus};
use crate::demo::wire::{INTERFACE, OURS, THEIRS, set_up};
use crate::interrupt::Interrupt;
use crate::program::{self, PATIENCE, Part, Program};
use crate::report::{Kind, Row};
use crate::sample::{Sample, median};
use crate::table::{self, number};
use crate::workplace::Workplace;

/// Bytes of a send, and number of sends of a trial, as in the paper.
const LEN: usize = 1024;
const SENDS: u32 = 1000;

/// Time that the program works between two sends.
const WORK: Duration = Duration::from_millis(1);

/// Address of the receiver.
const RECEIVER: &str = "192.0.2.1:5001";

/// Kinds of trial: name, and relay to make.
const KINDS: [(&str, Option<Relay>); 4] = [
    ("sends-alone", None),
    ("sends-upgrade", Some(Relay::Upgrade { store: false })),
    ("sends-takeover", Some(Relay::Takeover)),
    ("sends-keep", Some(Relay::Give(Method::Keep))),
];

/// Name of the file into which the part in the namespace writes its samples.
const SAMPLES: &str = "sends.json";

/// Number of trials of each kind: for a quick look, and for a record.
pub const QUICK: u32 = 1;
pub const FULL: u32 = 40;

/// Required programs, and their Debian packages.
const PROGRAMS: [(&str, &str); 3] = [("unshare", "util-linux"), ("chrt", "util-linux"), ("ip", "iproute2")];

/// Samples by kind of trial.
pub struct Sends(BTreeMap<String, Sample>);

/// Runs the trials in a network namespace of their own. Where that is impossible, prints the reason and returns
/// `None`.
pub fn run(trials: u32, interrupt: &Interrupt) -> Result<Option<Sends>> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("sends were left out: they need network namespaces, which only root may make (sudo)");
        return Ok(None);
    }
    if let Some((program, package)) = PROGRAMS.iter().find(|(program, _)| !program::is_there(program)) {
        eprintln!("sends were left out: they need the program {program} (apt-get install {package})");
        return Ok(None);
    }
    let place = Workplace::new()?;
    let this = std::env::current_exe().context("the bench could not find its own executable")?;
    let mut command = Command::new("unshare");
    command.args(["--net", "--"]).arg(this).arg("sends").arg(place.directory()).arg(trials.to_string());
    Part::start(&mut command)?.await_end(interrupt)?;
    let text =
        std::fs::read_to_string(place.directory().join(SAMPLES)).context("the part with the sends wrote nothing")?;
    let lines: BTreeMap<String, String> = serde_json::from_str(&text)?;
    let samples = lines.into_iter().map(|(kind, line)| Ok((kind, Sample::from_line(&line)?)));
    Ok(Some(Sends(samples.collect::<Result<_>>()?)))
}

/// Plays the part in the namespace: the daemon, the nodes, the card's cable, and the receiver at its end.
pub fn play(folder: &Path, trials: u32) -> Result<()> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
        .context("this part could not be tied to the bench")?;
    let interrupt = Interrupt::catch()?;
    let Cpus { client: node_cpu, server: card_cpu } = Cpus::choose()?;
    let this = std::env::current_exe().context("the bench could not find its own executable")?;
    // The namespace exists as long as the program does.
    let mut sender = Command::new("unshare");
    sender.args(["--net", "--"]).arg(this).args(["sender", &node_cpu.to_string()]);
    let mut sender = Program::start_to_tell(&mut sender)?;
    sender.await_words("ready", &interrupt)?;
    let netns = format!("/proc/{}/ns/net", sender.id());
    let node = |name: &str, other: &str| {
        let tap = format!("netns = \"{netns}\", name = \"nic0\", address = \"{THEIRS}/24\"");
        format!(
            "[[node]]\nname = \"{name}\"\nwork = {{ tap = {{ {tap} }} }}\ncpu = {node_cpu}\ntrusts = [\"{other}\"]\n\n"
        )
    };
    let system = System::on_tap(folder, &[node("red", "blue"), node("blue", "red")].concat(), INTERFACE)?;
    cpus::pin(card_cpu)?;
    for process in system.family()? {
        program::run_quietly(Command::new("taskset").args([
            "-a",
            "-c",
            "-p",
            &card_cpu.to_string(),
            &process.to_string(),
        ]))?;
    }
    for model in system.models()? {
        cpus::first(1, model)?;
    }
    set_up(INTERFACE, OURS)?;
    let listener = TcpListener::bind(RECEIVER).context("the card's cable cannot be listened at")?;
    sender.tell("connect")?;
    let (connection, _) = listener.accept().context("the program did not connect")?;
    let (tell, came) = mpsc::channel();
    let receiver = std::thread::spawn(move || receive(connection, &tell));
    let mut samples = BTreeMap::new();
    let mut like = Duration::from_millis(30);
    for trial in 0..trials * u32::try_from(KINDS.len())? {
        interrupt.check()?;
        let (name, relay) = KINDS[trial as usize % KINDS.len()];
        // The relay comes at a different place in each trial, at the same places in each run.
        let wait = Duration::from_millis(u64::from(200 + trial * 137 % 400));
        sender.tell(&SENDS.to_string())?;
        std::thread::sleep(wait);
        let asked = now_ns();
        let pause = match relay {
            Some(relay) => Some(system.relay(relay)?.pause),
            // Wait as long as the last relay took, so that as much of all else happens meanwhile.
            None => {
                std::thread::sleep(like);
                None
            }
        };
        let settled = now_ns();
        like = Duration::from_nanos(settled - asked);
        let mut arrivals = Vec::new();
        while arrivals.len() < SENDS as usize {
            arrivals.push(
                came.recv_timeout(PATIENCE).map_err(|_| anyhow!("a send did not arrive: {}", system.describe()))?,
            );
        }
        note(samples.entry(name.to_owned()).or_insert_with(Sample::new), &arrivals, (asked, settled, pause))?;
    }
    drop(sender);
    receiver.join().map_err(|_| anyhow!("the receiver panicked"))??;
    let lines = samples.iter().map(|(kind, sample)| Ok((kind, sample.to_line()?)));
    let lines = lines.collect::<Result<BTreeMap<_, _>>>()?;
    std::fs::write(folder.join(SAMPLES), serde_json::to_string(&lines)?).context("the figures cannot be written")
}

/// Times of one send that has arrived, in ns.
#[derive(Debug, Clone, Copy)]
struct Arrival {
    /// Time at which the program called `send`.
    at: u64,
    /// Time from that call until the bytes arrived here.
    took: u64,
    /// Duration of the call before this one, and time from that call to this one.
    call: u64,
    interval: u64,
}

/// Receives the sends until the sender ends.
fn receive(mut connection: TcpStream, tell: &mpsc::Sender<Arrival>) -> Result<()> {
    // Once woken, the receiver runs before the model, which would delay it.
    cpus::first(2, rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs())?;
    let mut message = [0; LEN];
    while connection.read_exact(&mut message).is_ok() {
        let now = now_ns();
        let word = |at: usize| message[8 * at..].first_chunk().copied().map_or(0, u64::from_le_bytes);
        let arrival = Arrival { at: word(0), took: now.saturating_sub(word(0)), call: word(1), interval: word(2) };
        if tell.send(arrival).is_err() {
            break;
        }
    }
    Ok(())
}

/// Plays the sending program, commanded through standard input.
pub fn send(cpu: usize) -> Result<()> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    cpus::pin(cpu)?;
    let loops = calibrate();
    println!("ready");
    let mut lines = std::io::stdin().lock().lines();
    ensure!(lines.next().transpose()?.is_some(), "it was not told to connect");
    // The kernel retransmits segments that are lost before the link is up.
    let mut connection = TcpStream::connect_timeout(&RECEIVER.parse()?, PATIENCE)
        .context("the other end of the card's cable does not answer")?;
    connection.set_nodelay(true)?;
    let mut message = [0x5a; LEN];
    for line in lines {
        let (mut call, mut last) = (0, None);
        for _ in 0..line?.parse::<u32>()? {
            work(loops);
            let at = now_ns();
            let interval = last.replace(at).map_or(0, |last| at - last);
            let words = [at, call, interval].map(u64::to_le_bytes);
            message[..24].copy_from_slice(words.as_flattened());
            connection.write_all(&message)?;
            call = now_ns() - at;
        }
    }
    Ok(())
}

/// Returns the number of rounds of [`work`] in [`WORK`] on an otherwise idle CPU.
fn calibrate() -> u64 {
    const ROUNDS: u64 = 1_000_000;
    let time = || {
        let began = Instant::now();
        work(ROUNDS);
        began.elapsed()
    };
    let shortest = (0..20).map(|_| time()).min().unwrap_or(WORK).as_nanos().max(1);
    u64::try_from(u128::from(ROUNDS) * WORK.as_nanos() / shortest).unwrap_or(ROUNDS).max(1)
}

fn work(rounds: u64) {
    for round in 0..rounds {
        std::hint::black_box(round);
    }
}

/// Notes the figures of a trial.
fn note(sample: &mut Sample, arrivals: &[Arrival], (asked, settled, pause): (u64, u64, Option<u64>)) -> Result<()> {
    let during: Vec<_> = arrivals.iter().filter(|arrival| (asked..settled).contains(&arrival.at)).collect();
    ensure!(!during.is_empty(), "nothing was sent while the driver was replaced: this machine is too busy to tell");
    let longest = |of: fn(&Arrival) -> u64| during.iter().map(|arrival| of(arrival)).max().unwrap_or(0) as f64;
    let took: Vec<_> = arrivals.iter().map(|arrival| arrival.took as f64).collect();
    let intervals: Vec<_> = arrivals.iter().skip(1).map(|arrival| arrival.interval as f64).collect();
    let usual = |values: &[f64]| median(values).context("a trial has sends");
    sample.note("took", usual(&took)?);
    sample.note("took_longest", longest(|arrival| arrival.took));
    sample.note("later", (longest(|arrival| arrival.interval) - usual(&intervals)?).max(0.0));
    sample.note("pause", pause.unwrap_or(0) as f64);
    sample.note("replaced", (settled - asked) as f64);
    for arrival in arrivals.iter().skip(1) {
        sample.record(Duration::from_nanos(arrival.call));
    }
    Ok(())
}

impl Sends {
    fn of(&self, kind: &str) -> Result<&Sample> {
        self.0.get(kind).with_context(|| format!("no trial was {kind}"))
    }

    /// Makes the rows of the bench: the longest times while the driver is replaced of the call, of the next call's
    /// lateness, and of a send's transit.
    pub fn rows(&self) -> Result<Vec<Row>> {
        let alone = self.of(KINDS[0].0)?;
        let mut rows = Vec::new();
        for (kind, relay) in KINDS {
            let sample = self.of(kind)?;
            let micros = |name| sample.median(name).map(|ns| ns / 1e3);
            let row = |metric, value| Row::lower(kind, metric, "µs", value);
            let summary = sample.summary();
            let (took, pause) = (micros("took_longest")?, micros("pause")?);
            let quiet = alone.median("took_longest")? / 1e3;
            let mut longest = row("arrives_longest_p50", took);
            if relay.is_some() {
                longest = longest.against("alone", Kind::Floor, quiet).bar_at((quiet + pause).round());
                longest.note = Some(format!("the bar is its time alone, and the pause: {}", number(pause)));
            }
            rows.extend([
                row("call_p50", summary.p50 as f64 / 1e3).against("minix3", Kind::Paper, 12.0).against(
                    "ant",
                    Kind::Paper,
                    11.0,
                ),
                row("call_p99", summary.p99 as f64 / 1e3),
                row("call_max", summary.max as f64 / 1e3),
                row("arrives_p50", micros("took")?),
                longest,
                row("later_p50", micros("later")?),
            ]);
        }
        Ok(rows)
    }

    /// Makes the table of S1 for the sender.
    pub fn table(&self) -> Result<Table> {
        let mut table = table::empty();
        table.set_header([
            "a program sends while its driver is replaced (S1), ms",
            "the call: max",
            "mean",
            "min",
            "under way, longest: median",
            "next call later by: median",
            "pause: median",
        ]);
        let paper = |name: &str, call: [&str; 3], later: &str| {
            [name, call[0], call[1], call[2], "", later, ""].map(str::to_owned)
        };
        table.add_row(paper("MINIX 3, without a replacement", ["0.024", "0.012", "0.009"], ""));
        table.add_row(paper("MINIX 3, with one", ["0.025", "0.012", "0.009"], "0.336, once"));
        table.add_row(paper("AnT, without", ["0.018", "0.011", "0.009"], ""));
        table.add_row(paper("AnT, with one", ["0.114", "0.011", "0.009"], "0.079, ten times"));
        for (kind, what) in KINDS.iter().map(|(kind, _)| *kind).zip([
            "here, without",
            "here, with an upgrade",
            "here, killed",
            "here, handed over by keep",
        ]) {
            let sample = self.of(kind)?;
            let summary = sample.summary();
            let millis = |ns: f64| format!("{:.3}", ns / 1e6);
            let noted = |name| sample.median(name).map(millis);
            table.add_row([
                what.to_owned(),
                millis(summary.max as f64),
                millis(summary.mean),
                millis(summary.min as f64),
                noted("took_longest")?,
                noted("later")?,
                noted("pause")?,
            ]);
        }
        Ok(table)
    }
}
