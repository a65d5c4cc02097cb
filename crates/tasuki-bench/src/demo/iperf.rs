//! A connection of this machine's kernel through the card. `iperf3` sends to another network namespace, whose
//! interface is the node's NIC, while the card changes hands.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use tasuki_shm::clock::now_ns;

use super::cards::{ACTS, Act, line};
use super::wire::{INTERFACE, OURS, THEIRS, set_up};
use crate::interrupt::Interrupt;
use crate::iperf::{Said, Sending};
use crate::program::{self, Program};
use crate::relay::system::System;
use crate::table::number;

/// Rate in bits a second. It leaves a busy machine with two CPUs time for everything else, so a retransmission means
/// a loss on the way.
const RATE: &str = "200M";

/// How long `iperf3` sends for each relay.
const SHARE: Duration = Duration::from_secs(1);

/// Additional time for a link that comes up anew.
const LINK_UP: Duration = Duration::from_secs(3);

/// Runs in the demo's namespace: a daemon, two nodes that are the NIC of one more namespace, and the kernel's
/// programs at both ends.
pub fn show(folder: &Path, interrupt: &Interrupt) -> Result<()> {
    std::fs::create_dir(folder).with_context(|| format!("{} cannot be made", folder.display()))?;
    // The namespace exists as long as its server does.
    let server = Program::start(Command::new("unshare").args(["--net", "--", "iperf3", "--server"]))?;
    let netns = format!("/proc/{}/ns/net", server.id());
    let ours = std::fs::read_link("/proc/self/ns/net").context("the kernel does not say in which namespace we are")?;
    await_so("the server's namespace", interrupt, || Ok(std::fs::read_link(&netns).is_ok_and(|its| its != ours)))?;
    let node = |name: &str, other: &str| {
        let tap = format!("netns = \"{netns}\", name = \"nic0\", address = \"{THEIRS}/24\"");
        format!("[[node]]\nname = \"{name}\"\nwork = {{ tap = {{ {tap} }} }}\ntrusts = [\"{other}\"]\n\n")
    };
    let system = System::on_tap(folder, &[node("red", "blue"), node("blue", "red")].concat(), INTERFACE)?;
    set_up(INTERFACE, OURS)?;
    await_so("an answer of iperf3's server", interrupt, || Ok(begin(&["--bytes", "1K"])?.end(interrupt).is_ok()))?;
    println!("and its iperf3, to a namespace whose only interface is the node's NIC: one TCP connection, {RATE}bit/s");
    line("a connection", ["Mb/s", "resent", "sent", "nobody drives", "longest trip"].map(str::to_owned));
    ACTS.iter().try_for_each(|act| row(act, &system, interrupt))
}

/// Repeats an act as often as it says, while one connection sends.
fn row(act: &Act, system: &System, interrupt: &Interrupt) -> Result<()> {
    let time = SHARE * act.times + if act.loses { LINK_UP } else { Duration::ZERO };
    let sending = begin(&["--fq-rate", RATE, "--time", &time.as_secs().to_string()])?;
    let (mut pauses, said): (_, Said) = std::thread::scope(|scope| {
        let sent = scope.spawn(|| sending.end(interrupt).map(|said| (said, now_ns())));
        let mut pauses = Vec::new();
        for _ in 0..act.times {
            std::thread::sleep(SHARE / 4);
            pauses.push(system.relay(act.relay)?.pause);
        }
        let driving_at = system.nic()?.driving_at_ns.context("nobody drives the card")?;
        let (said, ended_at) = sent.join().map_err(|_| anyhow!("the thread that waits for iperf3 panicked"))??;
        ensure!(
            driving_at < ended_at,
            "iperf3 had ended before the card changed hands: this machine is too busy to tell"
        );
        Ok((pauses, said))
    })?;
    pauses.sort_unstable();
    let micros = |micros: f64| number(micros.round()) + " µs";
    let pause = pauses.get(pauses.len() / 2).map_or(f64::NAN, |ns| *ns as f64 / 1e3);
    let sent = number((said.number("/end/sum_sent/bytes")? / 1e6).round()) + " MB";
    let rate = number((said.number("/end/sum_sent/bits_per_second")? / 1e6).round());
    // Segments that TCP retransmitted, and the longest round trip that it measured, in µs.
    let resent = number(said.number("/end/sum_sent/retransmits")?);
    let longest_trip = said.number("/end/streams/0/sender/max_rtt")?;
    line(&act.title(), [rate, resent, sent, micros(pause), micros(longest_trip)]);
    Ok(())
}

fn await_so(what: &str, interrupt: &Interrupt, is_so: impl Fn() -> Result<bool>) -> Result<()> {
    let ask = || {
        interrupt.check()?;
        Ok(is_so()?.then_some(()))
    };
    program::found(ask, || format!("waited in vain for {what}"))
}

/// Starts an `iperf3` that sends to the node.
fn begin(words: &[&str]) -> Result<Sending> {
    Sending::begin(Command::new("iperf3").args(["--connect-timeout", "2000"]).args(words), THEIRS)
}
