//! This machine's kernel on the wire: its `ping` sends a node one request a millisecond while the card changes
//! hands.
//!
//! All of it runs in a network namespace of its own, so it does not touch this machine's network.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use rustix::process::Signal;
use tasuki_shm::clock::now_ns;

use super::cards::{ACTS, Act, line};
use super::iperf;
use super::wire::{INTERFACE, OURS, THEIRS, set_up};
use crate::interrupt::Interrupt;
use crate::program::{Part, Program, is_there};
use crate::relay::system::System;
use crate::table::number;
use crate::workplace::Workplace;

/// Number of requests while one act happens, one a millisecond.
const QUESTIONS: u32 = 1000;

/// Time that `ping` runs before the act.
const QUIET: Duration = Duration::from_millis(100);

/// Required programs, and their Debian packages.
const PROGRAMS: [(&str, &str); 4] =
    [("unshare", "util-linux"), ("ip", "iproute2"), ("ping", "iputils-ping"), ("iperf3", "iperf3")];

/// Checks that the demo can run here; the error names the missing part.
pub fn is_possible() -> Result<()> {
    ensure!(
        rustix::process::geteuid().is_root(),
        "--wire tap makes a network interface, which only root may: sudo cargo xtask demo --wire tap"
    );
    match PROGRAMS.iter().find(|(program, _)| !is_there(program)) {
        Some((program, package)) => {
            bail!("--wire tap needs the program {program}: sudo apt-get install -y {package}")
        }
        None => Ok(()),
    }
}

/// Runs the part in a network namespace of its own.
pub fn show(interrupt: &Interrupt) -> Result<()> {
    let place = Workplace::new()?;
    let this = std::env::current_exe().context("the demo could not find its own executable")?;
    let mut command = Command::new("unshare");
    command.args(["--net", "--"]).arg(this).arg("demo-ping").arg(place.directory());
    Part::start(&mut command)?.await_end(interrupt)
}

/// Runs in that namespace: a daemon, two nodes with one address, a card whose cable is a TAP, and the kernel's
/// `ping`.
pub fn ping(folder: &Path) -> Result<()> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
        .context("this part could not be tied to the demo")?;
    let interrupt = Interrupt::catch()?;
    let node = |name: &str, other: &str| {
        format!(
            "[[node]]\nname = \"{name}\"\nwork = {{ answer = {{ address = \"{THEIRS}\" }} }}\ntrusts = [\"{other}\"]\n\n"
        )
    };
    let system = System::on_tap(folder, &[node("red", "blue"), node("blue", "red")].concat(), INTERFACE)?;
    set_up(INTERFACE, OURS)?;
    // This first request resolves the address (ARP), and waits for the link of a fresh card.
    let first = Asking::begin(&["-c", "1", "-w", "30"])?.end(&interrupt)?;
    ensure!(first.came > 0, "no node answers ping at {THEIRS}; tasukid's log says more: {}", log(folder));
    println!("the same with this machine's own kernel on the wire: its ping asks the node once a millisecond");
    line("answers", ["lost", "twice", "asked", "nobody drives", "longest trip"].map(str::to_owned));
    for act in &ACTS {
        let (mut pauses, mut all) = (Vec::new(), Said::default());
        for _ in 0..act.times {
            let (pause, said) = once(act, &system, &interrupt)?;
            pauses.push(pause);
            all.add(&said);
        }
        pauses.sort_unstable();
        row(act, &pauses, &all)?;
    }
    // The model takes the interface along.
    drop(system);
    iperf::show(&folder.join("iperf3"), &interrupt)
}

/// Plays an act once while `ping` runs.
fn once(act: &Act, system: &System, interrupt: &Interrupt) -> Result<(u64, Said)> {
    // A link that comes up anew takes as long as all requests of an act whose link stays up.
    let questions = if act.loses { QUESTIONS * 3 } else { QUESTIONS };
    let asking = Asking::begin(&["-i", "0.001", "-c", &questions.to_string()])?;
    std::thread::scope(|scope| {
        let asked = scope.spawn(|| asking.end(interrupt).map(|said| (said, now_ns())));
        std::thread::sleep(QUIET);
        let pause = system.relay(act.relay)?.pause;
        let driving_at = system.nic()?.driving_at_ns.context("nobody drives the card")?;
        let (said, ended_at) = asked.join().map_err(|_| anyhow!("the thread that waits for ping panicked"))??;
        ensure!(
            driving_at < ended_at,
            "ping had ended before the card changed hands: this machine is too busy to tell"
        );
        Ok((pause, said))
    })
}

fn row(act: &Act, pauses: &[u64], said: &Said) -> Result<()> {
    let lost = said.asked.saturating_sub(said.came);
    let pause = pauses.get(pauses.len() / 2).map_or(f64::NAN, |ns| *ns as f64 / 1e3);
    let counts = [lost, said.twice, said.asked].map(|count| number(f64::from(count)));
    let times = [pause, said.longest_ms * 1e3].map(|micros| number(micros.round()) + " µs");
    let ([lost_text, twice, asked], [pause, longest]) = (counts, times);
    line(&act.title(), [lost_text, twice, asked, pause, longest]);
    ensure!(
        said.twice == 0 && (act.loses || lost == 0),
        "{}: {lost} answers were lost and {} came twice, and none may: that is a bug",
        act.what,
        said.twice
    );
    Ok(())
}

fn log(folder: &Path) -> String {
    std::fs::read_to_string(folder.join("tasukid.log")).unwrap_or_default()
}

/// A running `ping`.
struct Asking(Program);

impl Asking {
    fn begin(words: &[&str]) -> Result<Self> {
        let mut command = Command::new("ping");
        command.args(["-n", "-q"]).args(words).arg(THEIRS).env("LC_ALL", "C");
        Ok(Asking(Program::start(&mut command)?))
    }

    fn end(mut self, interrupt: &Interrupt) -> Result<Said> {
        self.0.await_end(interrupt)?;
        // The few lines fit the pipe, so they can wait there until now.
        let text = self.0.rest_of_output()?;
        Said::read(&text).with_context(|| format!("ping's output has another form than it had:\n{text}"))
    }
}

/// Final report of `ping`.
#[derive(Debug, Default, PartialEq)]
struct Said {
    asked: u32,
    came: u32,
    twice: u32,
    longest_ms: f64,
}

impl Said {
    fn add(&mut self, other: &Said) {
        self.asked += other.asked;
        self.came += other.came;
        self.twice += other.twice;
        self.longest_ms = self.longest_ms.max(other.longest_ms);
    }

    fn read(text: &str) -> Option<Self> {
        let counts = text.lines().find(|line| line.contains("packets transmitted"))?;
        let of = |what: &str| {
            counts.split(", ").find(|part| part.ends_with(what))?.trim_start_matches('+').split(' ').next()
        };
        let longest_ms = text
            .lines()
            .find_map(|line| line.strip_prefix("rtt min/avg/max/mdev = "))
            .and_then(|times| times.split('/').nth(2)?.parse().ok());
        Some(Said {
            asked: of("packets transmitted")?.parse().ok()?,
            came: of(" received")?.parse().ok()?,
            twice: of(" duplicates").map_or(Some(0), |count| count.parse().ok())?,
            // Without replies there is no round-trip time.
            longest_ms: longest_ms.unwrap_or(f64::NAN),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ping_says_is_read() {
        let text = "PING 192.0.2.2 (192.0.2.2) 56(84) bytes of data.\n\n--- 192.0.2.2 ping statistics ---\n\
            3000 packets transmitted, 2998 received, +3 duplicates, 0.0666667% packet loss, time 3456ms\n\
            rtt min/avg/max/mdev = 0.021/0.055/1.250/0.030 ms, pipe 2\n";
        assert_eq!(Said::read(text), Some(Said { asked: 3000, came: 2998, twice: 3, longest_ms: 1.25 }));
        let none = Said::read("1 packets transmitted, 0 received, 100% packet loss, time 0ms\n").unwrap();
        assert!(none.came == 0 && none.longest_ms.is_nan());
        assert_eq!(Said::read("ping: usage error"), None);
    }
}
