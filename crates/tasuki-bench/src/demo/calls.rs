//! Calls between processes, whose servers are replaced or die meanwhile.

use std::io::Read;
use std::path::Path;
use std::process::{ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use rustix::process::Signal;
use tasuki_call::{Ask, CallError, Client, ClientOptions, Deadline, Request, Server, ServerOptions, State, Successor};
use tasuki_shm::sync::Relaxed;

use crate::case;
use crate::cpus::{self, Cpus};
use crate::interrupt::Interrupt;
use crate::papers::ANT;
use crate::program::Program;
use crate::rounds;
use crate::table::number;
use crate::workplace::Workplace;

/// Cases whose figures the demo shows.
const SHOWN: &[&str] =
    &["ping-pong-tight", "spin-inline", "spin-slot", "same-core", "pipelined", "seqpacket-same-core"];

/// Number of replacements of each kind.
const REPLACEMENTS: u32 = 5;

/// Number of calls between two replacements.
const CALLS_BETWEEN: u64 = 10_000;

/// Size of the ledger: one word a call, in the state that each server hands to the next.
const LEDGER: u64 = 1 << 20;

/// Method that counts in the ledger that the call of this number ran.
const COUNT: u16 = 1;

/// Method that returns how often the call of this number ran.
const RAN: u16 = 2;

/// Method that returns how many of the calls below this number did not run exactly once.
const AUDIT: u16 = 3;

/// Word that a server prints once it serves or stands by.
const READY: &str = "ready";

const DEADLINE: Duration = Duration::from_secs(10);

/// A demo server's way into service.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
pub enum Office {
    /// Is the first server.
    First,
    /// Makes its predecessor finish and let go.
    Upgrade,
    /// Waits for its predecessor to die.
    StandBy,
}

/// Plays one server of the demo, in a process of its own, until a successor takes over or the demo kills it.
pub fn serve(office: Office, cpu: usize, path: &Path) -> Result<()> {
    cpus::pin(cpu)?;
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
        .context("the server could not be tied to the demo")?;
    let options = ServerOptions::default();
    let mut server = match office {
        Office::First => {
            let state = State::create(usize::try_from(LEDGER * 8)?)?;
            Server::bind(path, ServerOptions { state: Some(state), ..options })?
        }
        Office::Upgrade => {
            let successor = Successor::approach(path)?;
            println!("{READY}");
            std::io::stdin().read_line(&mut String::new()).context("the demo did not say when")?;
            successor.take_over(options, DEADLINE)?
        }
        Office::StandBy => {
            let successor = Successor::approach(path)?;
            // Print this before the wait: the server has all that it needs.
            println!("{READY}");
            successor.stand_by(options)?
        }
    };
    println!("{READY}");
    let ledger = server.state().context("every server of the demo has a state")?.words();
    server.serve(move |request: Request<'_>| {
        let number = request.inline().and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_ne_bytes);
        let times = |number: u64| &ledger[usize::try_from(number % LEDGER).expect("fits memory")];
        let answer = match request.method() {
            // The lease ensures that there is one writer at a time.
            COUNT => {
                times(number).store(times(number).load(Relaxed) + 1, Relaxed);
                number
            }
            RAN => times(number).load(Relaxed),
            AUDIT => (0..number).filter(|number| times(*number).load(Relaxed) != 1).count() as u64,
            _ => return request.refuse(1_u16, "the demo knows no such method"),
        };
        request.reply(&answer.to_ne_bytes()).expect("so few bytes need no slot");
    })?;
    Ok(())
}

/// A running demo server.
struct Running {
    program: Program,
    says: ChildStdout,
}

impl Running {
    fn start(office: &str, path: &Path, cpu: usize) -> Result<Self> {
        let this = std::env::current_exe().context("the demo could not find its own executable")?;
        let mut command = Command::new(this);
        command.args(["demo-server", office, &cpu.to_string()]).arg(path);
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut program = Program::spawn("a server of the demo", command)?;
        Ok(Running { says: program.output()?, program })
    }

    /// Waits until the server serves, or stands by.
    fn await_ready(&mut self) -> Result<()> {
        let mut word = [0; READY.len() + 1];
        self.says.read_exact(&mut word).context("a server of the demo ended before it was ready")
    }

    /// Makes a server that was started as an upgrade begin.
    fn take_over(&mut self) -> Result<()> {
        self.program.tell("now").context("a server of the demo ended before it took over")
    }
}

/// Record of the calls while servers came and went.
#[derive(Debug, Default)]
struct Story {
    calls: u64,
    retries: u64,
    /// Longest wait of a call since the last replacement.
    longest: Duration,
    /// Longest wait of a call in each replacement.
    gaps: Vec<Duration>,
}

impl Story {
    fn end_of_replacement(&mut self) {
        self.gaps.push(std::mem::take(&mut self.longest));
    }
}

/// Shows the cost of calls, and that none is lost when servers come and go.
pub fn show(cpus: Cpus, interrupt: &Interrupt) -> Result<()> {
    figures(cpus, interrupt)?;
    let place = Workplace::new()?;
    let path = place.directory().join("call");
    let (server_cpu, client_cpu) = cpus.of(cpus::Cores::Other);
    cpus::pin(client_cpu)?;
    let start = |office| Running::start(office, &path, server_cpu);
    let mut server = start("first")?;
    server.await_ready()?;
    let options = ClientOptions::default();
    let mut client = Client::connect(&path, &options)?;

    let mut story = Story::default();
    for _ in 0..REPLACEMENTS {
        interrupt.check()?;
        // A child dies with the thread that started it, so this thread starts it; the other thread only waits.
        let mut next = start("upgrade")?;
        next.await_ready()?;
        calls(&mut client, &mut story, CALLS_BETWEEN / 2, |_| Ok(()))?;
        next.take_over()?;
        std::thread::scope(|scope| -> Result<()> {
            let ready = scope.spawn(|| next.await_ready());
            while !ready.is_finished() {
                calls(&mut client, &mut story, CALLS_BETWEEN / 20, |_| Ok(()))?;
            }
            ready.join().map_err(|_| anyhow!("the thread that waits for a server panicked"))?
        })?;
        server = next;
        story.end_of_replacement();
    }
    tell("replaced under load (upgrade)", &mut client, &story)?;

    story.gaps.clear();
    story.retries = 0;
    for _ in 0..REPLACEMENTS {
        interrupt.check()?;
        let mut next = start("stand-by")?;
        next.await_ready()?;
        calls(&mut client, &mut story, CALLS_BETWEEN, |done| {
            if done == CALLS_BETWEEN / 2 { server.program.kill() } else { Ok(()) }
        })?;
        server = next;
        story.end_of_replacement();
    }
    tell("killed under load (SIGKILL), a stand-by takes over", &mut client, &story)?;
    end(server, client)
}

/// Measures and prints the cost of a call on this machine.
fn figures(cpus: Cpus, interrupt: &Interrupt) -> Result<()> {
    let cases: Vec<_> = SHOWN.iter().map(|name| case::find(name)).collect::<Result<_>>()?;
    let samples = rounds::once(&cases, cpus, interrupt)?;
    let ant = ANT.best("call").context("the paper has a whole call")?;
    let line = |what: &str, ns: f64, beside: &str| println!("  {what:<58} {:>7} ns   {beside}", number(ns));
    println!("round trips between two processes (median; AnT's paper: at most {} ns)", number(ant));
    let inline = samples.p50("spin-inline")?;
    line("48 bytes and back, both processes awake", inline, &format!("{:.0} × faster than AnT", ant / inline));
    line("  … the exchange of two cache lines alone", samples.p50("ping-pong-tight")?, "the floor");
    line("4 KiB written by the client, all read by the server", samples.p50("spin-slot")?, "no copy");
    line("48 bytes and back on one CPU, each giving way to the other", samples.p50("same-core")?, "");
    line("  … the same through a unix socket", samples.p50("seqpacket-same-core")?, "");
    let rate = samples.of("pipelined")?.numbers("rate").first().copied().context("the case notes its rate")?;
    println!("  {:<58} {:>7.1} million a second", "calls with 64 in flight", rate / 1e6);
    Ok(())
}

/// Makes `count` calls one after the other. `meanwhile` receives the number of finished calls.
///
/// A call whose server was replaced while it ran comes back as `Retry`. The successor has the ledger, which says
/// whether the call took effect.
fn calls(
    client: &mut Client,
    story: &mut Story,
    count: u64,
    mut meanwhile: impl FnMut(u64) -> Result<()>,
) -> Result<()> {
    let mut longest = Duration::ZERO;
    for done in 0..count {
        meanwhile(done)?;
        let start = Instant::now();
        loop {
            match ask(client, COUNT, story.calls) {
                Ok(_) => break,
                Err(CallError::Retry { .. }) => {
                    story.retries += 1;
                    if ask(client, RAN, story.calls)? > 0 {
                        break;
                    }
                }
                Err(why) => bail!("call {} failed: {why}", story.calls),
            }
        }
        longest = longest.max(start.elapsed());
        story.calls += 1;
    }
    story.longest = story.longest.max(longest);
    Ok(())
}

/// Makes one call that takes and returns a number.
fn ask(client: &mut Client, method: u16, number: u64) -> std::result::Result<u64, CallError> {
    let reply = client
        .call(Ask::new(method, &number.to_ne_bytes()), Deadline::within(DEADLINE))
        .map_err(|failure| failure.why)?;
    Ok(reply.inline().and_then(|bytes| bytes.try_into().ok()).map_or(u64::MAX, u64::from_ne_bytes))
}

fn tell(what: &str, client: &mut Client, story: &Story) -> Result<()> {
    let wrong = ask(client, AUDIT, story.calls)?;
    let mut gaps = story.gaps.clone();
    gaps.sort_unstable();
    let micros = |gap: Option<&Duration>| number(gap.map_or(0.0, |gap| gap.as_secs_f64() * 1e6).round());
    println!("a server {what}, {REPLACEMENTS} times; the client keeps its connection");
    println!(
        "  {} calls, {} of them lost or run twice, {} caught in the middle; longest wait: median {} µs, worst {} µs",
        number(story.calls as f64),
        wrong,
        story.retries,
        micros(gaps.get(gaps.len() / 2)),
        micros(gaps.last())
    );
    ensure!(wrong == 0, "{wrong} calls were lost or ran twice: that is a bug");
    Ok(())
}

/// Kills the last server, which has no successor.
fn end(mut server: Running, mut client: Client) -> Result<()> {
    let pid = server.program.id();
    let killer = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(20));
        let killed = Instant::now();
        server.program.kill().map(|()| (killed, server))
    });
    let outcome = loop {
        match client.call(Ask::new(COUNT, &0_u64.to_ne_bytes()), Deadline::within(DEADLINE)) {
            Ok(_) => {}
            Err(failure) => break failure,
        }
    };
    let learnt = Instant::now();
    let (killed, _server) = killer.join().map_err(|_| anyhow!("the killer of server {pid} panicked"))??;
    println!("the last server is killed and nobody follows");
    println!(
        "  the client learnt it after {} µs: \"{outcome}\"",
        number(((learnt - killed).as_secs_f64() * 1e6).round())
    );
    Ok(())
}
