//! Peer: DPDK's memif, between two of its own `dpdk-testpmd`. One only sends, the other only receives, with rings of
//! 2,048.
//!
//! The receiving role has the server, the measuring one the client, each on its role's CPU. The roles command the
//! programs through standard input; end of input ends them. A program's answers arrive in one piece at its end, so
//! the role reads them then.

use std::fs::File;
use std::io::{Read, Write};
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use crate::case::Ends;
use crate::cpus;
use crate::interrupt::Interrupt;
use crate::orders::Orders;
use crate::program::Program;
use crate::sample::{Sample, median};

pub const PROGRAM: &str = "dpdk-testpmd";

/// Prompt of the program.
const PROMPT: &str = "testpmd>";

/// Interval between two looks at the program's counters.
const LOOK: Duration = Duration::from_millis(100);

/// Least number of usable rates.
const LEAST: usize = 3;

/// Makes the sockets on which the roles report their progress to each other.
pub fn sockets() -> Result<Ends> {
    let pair = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
    let (server, client) = pair.context("the kernel gave no sockets")?;
    Ok(Ends { server: vec![server], client: vec![client] })
}

/// Starts one side, which begins to forward at once.
fn start(orders: &Orders, role: &str, words: &[&str]) -> Result<Program> {
    // testpmd chooses the CPUs of its threads itself, and could not leave the CPU of this role.
    cpus::unpin()?;
    let (socket, cpu) = (orders.directory.join("memif.sock"), orders.cpu);
    // All threads run on one CPU. The memory has no names, so nothing remains in the file system.
    let mut command = Command::new(PROGRAM);
    command.args(["--lcores", &format!("0@{cpu},1@{cpu}"), "--no-pci", "--no-telemetry", "--in-memory", "-m", "256"]);
    let mode = if role == "client" {
        command.arg("--single-file-segments");
        "txonly"
    } else {
        "rxonly"
    };
    let common = format!("role={role},socket={},socket-abstract=no,rsize=11", socket.display());
    let device = [&["--vdev=net_memif0", &common], &words[..1]].concat().join(",");
    command.arg(device.trim_end_matches(',')).args(["--", "-i", "--nb-cores=1", "--txd=2048", "--rxd=2048"]);
    command.arg(format!("--forward-mode={mode}")).args(&words[1..]).stderr(std::process::Stdio::null());
    let mut program = Program::start_to_tell(&mut command)?;
    program.await_words(PROMPT, &Interrupt::catch()?)?;
    program.tell("start")?;
    Ok(program)
}

/// Receives, and reports the frames a second of each interval.
pub fn receive(mut orders: Orders) -> Result<()> {
    let mut socket = File::from(orders.next_fd()?);
    let mut program = start(&orders, "server", &[""])?;
    socket.write_all(b"!").context("the sending role is gone")?;
    socket.read_exact(&mut [0]).context("the sending role is gone")?;
    for _ in 0..=orders.calls {
        program.tell("show port stats 0")?;
        sleep(LOOK);
    }
    let rates = rates(&program.rest_of_output()?);
    serde_json::to_writer(&mut socket, &rates).context("the sending role is gone")
}

/// Parses the rate of each interval from the program's output.
fn rates(said: &str) -> Vec<f64> {
    let rate = |line: &str| line.trim().strip_prefix("Rx-pps:")?.split_whitespace().next()?.parse().ok();
    said.lines().filter_map(rate).collect()
}

/// Sends; notes frames a second.
pub fn send<const LEN: usize, const ZERO_COPY: bool>(mut orders: Orders) -> Result<Sample> {
    let mut socket = File::from(orders.next_fd()?);
    socket.read_exact(&mut [0]).context("the receiving role is gone")?;
    let zero_copy = if ZERO_COPY { "zero-copy=yes" } else { "zero-copy=no" };
    let _program = start(&orders, "client", &[zero_copy, &format!("--txpkts={LEN}")])?;
    socket.write_all(b"!").context("the receiving role is gone")?;
    let mut said = String::new();
    socket.read_to_string(&mut said).context("the receiving role is gone")?;
    let rates: Vec<f64> = serde_json::from_str(&said).context("the receiving role gave up")?;
    // Skip the first nonzero rate too: its interval began before the first frame.
    let rates: Vec<_> = rates.into_iter().skip_while(|rate| *rate == 0.0).skip(1).collect();
    ensure!(rates.len() >= LEAST, "{PROGRAM} received nothing, or not for long; run it by hand to see its output");
    let rate = median(&rates).context("just counted")?;
    let mut sample = Sample::new();
    sample.note("rate", rate);
    sample.record(Duration::from_secs_f64(1.0 / rate));
    Ok(sample)
}

#[cfg(test)]
mod tests {
    #[test]
    fn what_testpmd_says_is_read() {
        let said = "testpmd> show port stats 0\n\n  Throughput (since last show)\n  Rx-pps:            0          Rx-bps:            0\n\
                    \n  Tx-pps:            7          Tx-bps:            0\n  Rx-pps:      2795267          Rx-bps:  33946814040\n";
        assert_eq!(super::rates(said), [0.0, 2_795_267.0]);
    }
}
