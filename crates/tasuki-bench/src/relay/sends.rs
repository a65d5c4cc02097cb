//! The experiment of S1: how a driver's replacement affects a program that sends through its NIC.
//!
//! This machine's kernel holds one TCP connection from a namespace, whose only interface is the node's NIC, to the
//! other end of the card's cable. The program sends 1,024 bytes, works for a millisecond, and sends again, a
//! thousand times. In most kinds of trial, the driver is replaced at some point among them; in some, the program sends
//! nothing meanwhile.
//!
//! Program and drivers run on one CPU, as in the paper. The other CPU runs the card's model, the receiver at its
//! cable, and tasukid. The model has priority there (SCHED_FIFO), because nothing delays silicon.

use std::collections::BTreeMap;
use std::io::{BufRead, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::ops::Range;
use std::path::Path;
use std::process::Command;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use comfy_table::Table;
use rustix::process::Signal;
use tasuki_control::api::types::Method;
use tasuki_shm::clock::now_ns;

use super::system::{Relay, System, Turn};
use crate::cpus::{self, Cpus};
use crate::demo::wire::{INTERFACE, OURS, THEIRS, set_up};
use crate::interrupt::Interrupt;
use crate::papers::REPLACEMENT;
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

/// A kind of trial.
#[derive(Debug, Clone, Copy)]
struct Trial {
    name: &'static str,
    /// What it is, for the table.
    what: &'static str,
    relay: Option<Relay>,
    /// Whether the program sends meanwhile.
    sends: bool,
}

const UPGRADE: Relay = Relay::Upgrade { store: false };
const STORE: Relay = Relay::Upgrade { store: true };

const fn sending(name: &'static str, what: &'static str, relay: Relay) -> Trial {
    Trial { name, what, relay: Some(relay), sends: true }
}

const fn idle(name: &'static str, what: &'static str, relay: Relay) -> Trial {
    Trial { name, what, relay: Some(relay), sends: false }
}

/// The kinds of trial, in the order in which they take turns.
const KINDS: [Trial; 9] = [
    Trial { name: ALONE, what: "here, without", relay: None, sends: true },
    sending("sends-upgrade", "here, with an upgrade", UPGRADE),
    sending("sends-staged", "here, with an upgrade that was staged", Relay::Staged),
    sending("sends-store", "here, with an upgrade by the store", STORE),
    sending("sends-takeover", "here, killed", Relay::Takeover),
    sending("sends-keep", "here, handed over by keep", Relay::Give(Method::Keep)),
    idle("sends-idle-upgrade", "here, idle, with an upgrade", UPGRADE),
    idle("sends-idle-staged", "here, idle, with an upgrade that was staged", Relay::Staged),
    idle("sends-idle-store", "here, idle, with an upgrade by the store", STORE),
];

/// Name of the trials without a relay.
const ALONE: &str = "sends-alone";

/// Name of the file into which the part in the namespace writes its samples.
const SAMPLES: &str = "sends.json";

/// Number of trials of each kind: for a quick look, as many as in the paper; and for a record.
pub const QUICK: u32 = 5;
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
    keep_on(&system, card_cpu)?;
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
        let Trial { name, relay, sends, .. } = KINDS[trial as usize % KINDS.len()];
        let sample = samples.entry(name.to_owned()).or_insert_with(Sample::new);
        if let Some(relay) = relay {
            system.get_ready(relay)?;
            if !sends {
                note_relay(sample, &system.relay(relay)?);
                continue;
            }
        }
        // The relay comes at a different place in each trial, at the same places in each run.
        let wait = Duration::from_millis(u64::from(200 + trial * 137 % 400));
        sender.tell(&SENDS.to_string())?;
        std::thread::sleep(wait);
        let asked = now_ns();
        match relay {
            Some(relay) => note_relay(sample, &system.relay(relay)?),
            // Wait as long as the last relay took, so that as much of all else happens meanwhile.
            None => std::thread::sleep(like),
        }
        let settled = now_ns();
        like = Duration::from_nanos(settled - asked);
        let mut arrivals = Vec::new();
        while arrivals.len() < SENDS as usize {
            arrivals.push(
                came.recv_timeout(PATIENCE).map_err(|_| anyhow!("a send did not arrive: {}", system.describe()))?,
            );
        }
        note(sample, &arrivals, asked..settled)?;
    }
    drop(sender);
    receiver.join().map_err(|_| anyhow!("the receiver panicked"))??;
    let lines = samples.iter().map(|(kind, sample)| Ok((kind, sample.to_line()?)));
    let lines = lines.collect::<Result<BTreeMap<_, _>>>()?;
    std::fs::write(folder.join(SAMPLES), serde_json::to_string(&lines)?).context("the figures cannot be written")
}

/// Keeps the daemon and the models of cards on a CPU. The models go before everybody else there.
fn keep_on(system: &System, cpu: usize) -> Result<()> {
    for process in system.family()? {
        program::run_quietly(Command::new("taskset").args(["-a", "-c", "-p", &cpu.to_string(), &process.to_string()]))?;
    }
    for model in system.models()? {
        cpus::first(1, model)?;
    }
    Ok(())
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

/// Notes the times of a relay. One that nobody asked for has no time until an answer.
fn note_relay(sample: &mut Sample, turn: &Turn) {
    sample.note("pause", turn.pause as f64);
    if let Some(asked) = turn.asked {
        sample.note("asked", asked.as_nanos() as f64);
    }
}

/// Notes the figures of the sends of a trial, whose relay took place in the time `during`.
fn note(sample: &mut Sample, arrivals: &[Arrival], during: Range<u64>) -> Result<()> {
    let during: Vec<_> = arrivals.iter().filter(|arrival| during.contains(&arrival.at)).collect();
    ensure!(!during.is_empty(), "nothing was sent while the driver was replaced: this machine is too busy to tell");
    let longest = |of: fn(&Arrival) -> u64| during.iter().map(|arrival| of(arrival)).max().unwrap_or(0) as f64;
    let took: Vec<_> = arrivals.iter().map(|arrival| arrival.took as f64).collect();
    let intervals: Vec<_> = arrivals.iter().skip(1).map(|arrival| arrival.interval as f64).collect();
    let usual = |values: &[f64]| median(values).context("a trial has sends");
    sample.note("took", usual(&took)?);
    sample.note("took_longest", longest(|arrival| arrival.took));
    sample.note("later", (longest(|arrival| arrival.interval) - usual(&intervals)?).max(0.0));
    for arrival in arrivals.iter().skip(1) {
        sample.record(Duration::from_nanos(arrival.call));
    }
    Ok(())
}

/// Returns the shortest, the mean and the longest of some times in ns, in µs; `None` if there are none.
fn spread(times: &[f64]) -> Option<[f64; 3]> {
    let mean = times.iter().sum::<f64>() / times.len() as f64;
    let ends = times.iter().fold((f64::MAX, f64::MIN), |(low, high), time| (low.min(*time), high.max(*time)));
    (!times.is_empty()).then(|| [ends.0, mean, ends.1].map(|ns| ns / 1e3))
}

/// Compares a row in µs with both systems of the paper. `what` is its name for the figure.
fn against_both(row: Row, what: &str) -> Result<Row> {
    ["minix3", "ant"].into_iter().try_fold(row, |row, system| {
        let ns = REPLACEMENT.best(&format!("{system}-{what}")).with_context(|| format!("the paper has no {what}"))?;
        Ok(row.against(system, Kind::Paper, ns / 1e3))
    })
}

impl Sends {
    fn of(&self, kind: &str) -> Result<&Sample> {
        self.0.get(kind).with_context(|| format!("no trial was {kind}"))
    }

    /// Makes the rows of the bench: the time from asking until the answer; the times of the call; and, while the driver
    /// is replaced, the longest lateness of the next call and the longest transit of a send.
    pub fn rows(&self) -> Result<Vec<Row>> {
        let mut rows = Vec::new();
        for kind in &KINDS {
            rows.extend(self.rows_of_relay(kind)?);
            if kind.sends {
                rows.extend(self.rows_of_sends(kind)?);
            }
        }
        Ok(rows)
    }

    fn rows_of_relay(&self, kind: &Trial) -> Result<Vec<Row>> {
        let sample = self.of(kind.name)?;
        let row = |metric, value| Row::lower(kind.name, metric, "µs", value);
        let what = if kind.sends { "replace-sending-mean" } else { "replace-idle-mean" };
        let mut rows = Vec::new();
        if let Some([min, mean, max]) = spread(sample.numbers("asked")) {
            let mut mean = against_both(row("asked_mean", mean), what)?;
            mean.note = Some(format!("{} trials", sample.numbers("asked").len()));
            rows.extend([row("asked_min", min), mean, row("asked_max", max)]);
        }
        if let Some([min, mean, max]) = spread(sample.numbers("pause")) {
            rows.extend([row("pause_min", min), row("pause_mean", mean), row("pause_max", max)]);
        }
        Ok(rows)
    }

    fn rows_of_sends(&self, kind: &Trial) -> Result<Vec<Row>> {
        let (sample, alone) = (self.of(kind.name)?, self.of(ALONE)?);
        let micros = |name| sample.median(name).map(|ns| ns / 1e3);
        let row = |metric, value| Row::lower(kind.name, metric, "µs", value);
        let summary = sample.summary();
        let quiet = alone.median("took_longest")? / 1e3;
        let mut longest = row("arrives_longest_p50", micros("took_longest")?);
        if kind.relay.is_some() {
            let pause = micros("pause")?;
            longest = longest.against("alone", Kind::Floor, quiet).bar_at((quiet + pause).round());
            longest.note = Some(format!("the bar is its time alone, and the pause: {}", number(pause)));
        }
        let what = if kind.relay.is_some() { "send-replaced" } else { "send-alone" };
        let later = spread(sample.numbers("later")).map_or(0.0, |[_, _, most]| most);
        Ok(vec![
            row("call_min", summary.min as f64 / 1e3),
            against_both(row("call_p50", summary.p50 as f64 / 1e3), &format!("{what}-mean"))?,
            against_both(row("call_mean", summary.mean / 1e3), &format!("{what}-mean"))?,
            row("call_p99", summary.p99 as f64 / 1e3),
            row("call_max", summary.max as f64 / 1e3),
            row("arrives_p50", micros("took")?),
            longest,
            row("later_p50", micros("later")?),
            row("later_max", later),
        ])
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
        for (name, system, what) in [
            ("MINIX 3, without a replacement", "minix3", "send-alone"),
            ("MINIX 3, with one", "minix3", "send-replaced"),
            ("AnT, without", "ant", "send-alone"),
            ("AnT, with one", "ant", "send-replaced"),
        ] {
            let of = |name: String| REPLACEMENT.best(&name).map_or_else(String::new, millis);
            let [max, mean, min] = ["max", "mean", "min"].map(|stat| of(format!("{system}-{what}-{stat}")));
            let later = if what == "send-replaced" { of(format!("{system}-later")) } else { String::new() };
            table.add_row([name.to_owned(), max, mean, min, String::new(), later, String::new()]);
        }
        for kind in KINDS.iter().filter(|kind| kind.sends) {
            let sample = self.of(kind.name)?;
            let summary = sample.summary();
            let noted = |name| sample.median(name).map(millis);
            table.add_row([
                kind.what.to_owned(),
                millis(summary.max as f64),
                millis(summary.mean),
                millis(summary.min as f64),
                noted("took_longest")?,
                noted("later")?,
                if kind.relay.is_some() { noted("pause")? } else { String::new() },
            ]);
        }
        Ok(table)
    }
}

/// Formats a time in ns as milliseconds.
fn millis(ns: f64) -> String {
    format!("{:.3}", ns / 1e6)
}
