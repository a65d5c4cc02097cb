//! A connection of this machine's kernel through the card: `iperf3` sends to another network namespace, whose interface is the node's NIC,
//! while the card changes hands.

use std::io::Read;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use serde_json::Value;

use super::cards::{ACTS, Act, line};
use super::ping::{INTERFACE, OURS, THEIRS, set_up};
use super::program::{LOOK, PATIENCE, Program};
use crate::interrupt::Interrupt;
use crate::relay::system::{System, now_ns};
use crate::table::number;

/// Bits a second: what leaves a busy machine with two CPUs time for everything else, so that what is sent again was lost on the way.
const RATE: &str = "200M";

/// How long it sends for each thing that happens.
const SHARE: Duration = Duration::from_secs(1);

/// A link that comes up anew takes so long.
const LINK_UP: Duration = Duration::from_secs(3);

/// In the namespace of the demo: a daemon, two nodes that are the NIC of one more namespace, and the kernel's programs at both ends.
pub fn show(folder: &Path, interrupt: &Interrupt) -> Result<()> {
    std::fs::create_dir(folder).with_context(|| format!("{} cannot be made", folder.display()))?;
    // The namespace is there as long as its server is.
    let server = Program::start(Command::new("unshare").args(["--net", "--", "iperf3", "--server"]))?;
    let netns = format!("/proc/{}/ns/net", server.id());
    let ours = std::fs::read_link("/proc/self/ns/net").context("the kernel does not say in which namespace we are")?;
    await_so("the server's namespace", interrupt, || Ok(std::fs::read_link(&netns).is_ok_and(|its| its != ours)))?;
    let node = |name: &str, other: &str| {
        let tap = format!("netns = \"{netns}\", name = \"nic0\", address = \"{THEIRS}/24\"");
        format!("[[node]]\nname = \"{name}\"\nwork = {{ tap = {{ {tap} }} }}\ntrusts = [\"{other}\"]\n\n")
    };
    let nic =
        format!("[[nic]]\nname = \"nic0\"\ndevice = \"sim\"\nnode = \"red\"\nwire = [\"--tap\", \"{INTERFACE}\"]\n");
    let system = System::configured(folder, &[node("red", "blue"), node("blue", "red"), nic].concat())?;
    set_up(INTERFACE, OURS)?;
    await_so("an answer of iperf3's server", interrupt, || {
        Ok(Sending::begin(&["--bytes", "1K"])?.end(interrupt).is_ok())
    })?;
    println!("and its iperf3, to a namespace whose only interface is the node's NIC: one TCP connection, {RATE}bit/s");
    line("a connection", ["Mb/s", "resent", "sent", "nobody drives", "longest trip"].map(str::to_owned));
    ACTS.iter().try_for_each(|act| row(act, &system, interrupt))
}

/// Has something happen as often as it does, while one connection sends.
fn row(act: &Act, system: &System, interrupt: &Interrupt) -> Result<()> {
    let time = SHARE * act.times + if act.loses { LINK_UP } else { Duration::ZERO };
    let sending = Sending::begin(&["--fq-rate", RATE, "--time", &time.as_secs().to_string()])?;
    let (mut pauses, said) = std::thread::scope(|scope| {
        let sent = scope.spawn(|| sending.end(interrupt).map(|said| (said, now_ns())));
        let mut pauses = Vec::new();
        for _ in 0..act.times {
            std::thread::sleep(SHARE / 4);
            pauses.push(system.relay(act.relay)?.0);
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
    let sent = number((said.bytes / 1e6).round()) + " MB";
    let moved = [number((said.bits_per_second / 1e6).round()), number(said.resent), sent];
    let [rate, resent, sent] = moved;
    line(&act.title(), [rate, resent, sent, micros(pause), micros(said.longest_trip)]);
    Ok(())
}

fn await_so(what: &str, interrupt: &Interrupt, is_so: impl Fn() -> Result<bool>) -> Result<()> {
    let began = Instant::now();
    while !is_so()? {
        interrupt.check()?;
        ensure!(began.elapsed() < PATIENCE, "waited in vain for {what}");
        std::thread::sleep(LOOK);
    }
    Ok(())
}

/// An `iperf3` that sends.
struct Sending(Program);

impl Sending {
    fn begin(words: &[&str]) -> Result<Self> {
        let mut command = Command::new("iperf3");
        command.args(["--client", THEIRS, "--json", "--connect-timeout", "2000"]).args(words);
        Ok(Sending(Program::start(&mut command)?))
    }

    fn end(mut self, interrupt: &Interrupt) -> Result<Said> {
        // Read while it runs: what it says in the end need not fit a pipe.
        let mut pipe = self.0.output()?;
        let reader = std::thread::spawn(move || {
            let mut text = String::new();
            pipe.read_to_string(&mut text).map(|_| text)
        });
        self.0.await_end(interrupt)?;
        let text = reader.join().map_err(|_| anyhow!("the thread that reads what iperf3 says panicked"))??;
        Said::read(&text)
    }
}

/// What `iperf3` said in the end.
#[derive(Debug, PartialEq)]
struct Said {
    bytes: f64,
    bits_per_second: f64,
    /// Segments that TCP sent again,
    resent: f64,
    /// and the longest way there and back that it measured, in µs.
    longest_trip: f64,
}

impl Said {
    fn read(text: &str) -> Result<Self> {
        let said: Value = serde_json::from_str(text).context("iperf3 said no JSON")?;
        if let Some(error) = said["error"].as_str() {
            return Err(anyhow!("iperf3: {error}"));
        }
        let sum = &said["end"]["sum_sent"];
        let of = |value: &Value| value.as_f64().context("iperf3 said something else than it used to");
        Ok(Said {
            bytes: of(&sum["bytes"])?,
            bits_per_second: of(&sum["bits_per_second"])?,
            resent: of(&sum["retransmits"])?,
            longest_trip: of(&said["end"]["streams"][0]["sender"]["max_rtt"])?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_iperf3_says_is_read() {
        let text = r#"{"start": {}, "intervals": [], "end": {
            "streams": [{"sender": {"bytes": 25000000, "max_rtt": 2710, "min_rtt": 90}, "receiver": {}}],
            "sum_sent": {"bytes": 25000000, "bits_per_second": 200000000.5, "retransmits": 3, "sender": true}}}"#;
        let said = Said::read(text).expect("what 3.12 says");
        assert_eq!(said, Said { bytes: 25e6, bits_per_second: 200_000_000.5, resent: 3.0, longest_trip: 2710.0 });
        let error = Said::read(r#"{"end": {}, "error": "unable to connect to server: No route to host"}"#);
        assert!(error.expect_err("it failed").to_string().contains("No route to host"));
        assert!(Said::read("iperf3: parameter error").is_err());
    }
}
