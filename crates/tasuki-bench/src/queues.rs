//! Two namespaces by their workers, with one queue and with several, each with a CPU of its own: what many flows carry
//! together.

use std::process::Command;

use anyhow::{Context, Result};

use crate::cpus;
use crate::interrupt::Interrupt;
use crate::iperf::{Sending, Server};
use crate::program;
use crate::relay::system::System;
use crate::report::{Kind, Row};
use crate::sample::median;
use crate::vni::{Namespaces, Traffic};
use crate::workplace::Workplace;

/// Number of queues of each namespace.
const QUEUES: [usize; 3] = [1, 2, 4];

/// Programs that send, each with a CPU; as many receive. They are the same for each number of queues.
const PROGRAMS: usize = 4;

/// Flows of each.
const FLOWS: &str = "8";

/// Port of the first program.
const PORT: usize = 7000;

const BOTH: [Traffic; 2] = [Traffic::Tcp, Traffic::Udp];

fn name(traffic: Traffic) -> &'static str {
    match traffic {
        Traffic::Tcp => "tcp",
        Traffic::Udp => "udp",
    }
}

/// Measures, and makes the rows. Where that is impossible, prints the reason and returns none.
pub fn rows(is_quick: bool, interrupt: &Interrupt) -> Result<Vec<Row>> {
    let allowed = rustix::thread::sched_getaffinity(None).context("the allowed CPUs could not be asked for")?;
    let all: Vec<usize> = (0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect();
    let needs = |queues: usize| 2 * PROGRAMS + 2 * queues;
    let left_out = match () {
        () if !rustix::process::geteuid().is_root() => {
            "it makes network namespaces, which only root may (sudo)".to_owned()
        }
        () if !program::is_there("iperf3") => "it needs the program iperf3 (apt-get install iperf3)".to_owned(),
        () if all.len() < needs(2) => {
            format!("it needs {} CPUs, for two queues and programs beside, and there are {}", needs(2), all.len())
        }
        () => String::new(),
    };
    if !left_out.is_empty() {
        eprintln!("queues was left out: {left_out}");
        return Ok(Vec::new());
    }
    let counts: Vec<usize> = QUEUES.into_iter().filter(|queues| needs(*queues) <= all.len()).collect();
    let (rounds, seconds) = if is_quick { (1, 2) } else { (3, 4) };
    let mut found = vec![[Vec::new(), Vec::new()]; counts.len()];
    for round in 1..=rounds {
        for (queues, found) in counts.iter().zip(&mut found) {
            let pair = Pair::start(*queues, &all)?;
            for (traffic, found) in BOTH.into_iter().zip(found) {
                // Of many that begin at once, an `iperf3` gives up now and then (3.12: EAGAIN from its control connection).
                let measure = || pair.measure(traffic, seconds, &all, interrupt);
                let rate = measure().or_else(|_| measure()).or_else(|_| measure())?;
                eprintln!("round {round}/{rounds} · {queues} queues · {} {:.1} Gb/s", name(traffic), rate / 1e9);
                found.push(rate);
            }
        }
    }
    let mut rows = Vec::new();
    for (way, traffic) in BOTH.into_iter().enumerate() {
        let middle = |at: usize| median(&found[at][way]).context("nothing was measured");
        let one = middle(0)?;
        for (at, queues) in counts.iter().enumerate() {
            let row = Row::higher(&format!("queues-{queues}"), name(traffic), "b/s", middle(at)?);
            rows.push(match queues {
                1 => row,
                2 => row.against("queues-1", Kind::Floor, one).bar(1.9, "queues-1")?,
                _ => row.against("queues-1", Kind::Floor, one),
            });
        }
    }
    cpus::unpin()?;
    Ok(rows)
}

/// Two namespaces of a daemon. Fields end in the order in which they are dropped.
struct Pair {
    _system: System,
    rooms: Namespaces,
    _place: Workplace,
}

impl Pair {
    /// Starts them. Workers have the last CPUs, and programs the first.
    fn start(queues: usize, all: &[usize]) -> Result<Self> {
        let (place, rooms) = (Workplace::new()?, Namespaces::new()?);
        let mut free = all.iter().rev();
        let mut nodes = String::new();
        for (room, host) in rooms.names().iter().zip(1..) {
            for queue in 0..queues {
                let cpu = free.next().context("there are enough")?;
                let work = match queue {
                    0 => format!(
                        "{{ tap = {{ netns = {room:?}, name = \"bench0\", address = \"192.0.2.{host}/24\", shortcut = false, queues = {queues} }} }}"
                    ),
                    _ => format!("{{ queue = {{ of = \"n{host}-0\" }} }}"),
                };
                nodes += &format!(
                    "[[node]]\nname = \"n{host}-{queue}\"\nvni = \"lan\"\ncpu = {cpu}\npool_kib = 8192\nwork = {work}\n\n"
                );
            }
        }
        let system = System::configured(place.directory(), &nodes)?;
        for host in 1..=2 {
            (0..queues).try_for_each(|queue| system.await_pair(&format!("n{host}-{queue}")))?;
        }
        Ok(Pair { _system: system, rooms, _place: place })
    }

    /// Returns what all programs have received, in bits a second.
    fn measure(&self, traffic: Traffic, seconds: u32, all: &[usize], interrupt: &Interrupt) -> Result<f64> {
        let at = |end: usize, program: usize| -> Command {
            let mut command = self.rooms.iperf(end, all[PROGRAMS * end + program]);
            command.args(["--port", &(PORT + program).to_string()]);
            command
        };
        let servers = (0..PROGRAMS).map(|program| Server::start(&mut at(1, program), interrupt));
        let _servers = servers.collect::<Result<Vec<_>>>()?;
        let send = |program: usize| {
            let mut command = at(0, program);
            command.args(["--time", &seconds.to_string(), "--parallel", FLOWS]).args(traffic.words());
            Sending::begin(&mut command, "192.0.2.2")
        };
        let sending = (0..PROGRAMS).map(send).collect::<Result<Vec<_>>>()?;
        sending.into_iter().map(|sending| traffic.received(&sending.end(interrupt)?)).sum()
    }
}
