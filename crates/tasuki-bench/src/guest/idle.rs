//! CPU time of our processes while their guests do nothing: one stock guest, and many front ends of DPDK, which wait for a
//! command and look at no ring.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use super::cpu::{Party, Threads, watch};
use super::machine::{DESK, Machine, node};
use crate::interrupt::Interrupt;
use crate::program::{Program, is_there};
use crate::relay::system::System;
use crate::report::Row;
use crate::workplace::Workplace;

/// Names of the cases.
pub const ONE: &str = "idle-cpu";
pub const MANY: &str = "idle-cpu-32";

/// Number of front ends of [`MANY`].
const FRONT_ENDS: usize = 32;

/// Time over which the processes are watched, and until they are at rest.
const WATCHED: Duration = Duration::from_secs(10);
const REST: Duration = Duration::from_secs(2);

/// Returns the daemon's processes: itself, its helpers and its workers.
pub fn daemon(system: &System) -> Result<Vec<Party>> {
    let party = |name: String, pid| Party { name, pid, threads: Threads::All };
    let mut all = vec![party("tasukid".to_owned(), system.daemon())];
    all.extend(system.helpers()?.into_iter().map(|pid| party("tasukid's helper".to_owned(), pid)));
    let worker = |is: &str, node: &str, pid| party(format!("worker of {node} that {is}"), pid);
    all.extend(system.workers()?.iter().map(|it| worker(&it.is, &it.node, it.pid)));
    Ok(all)
}

/// Measures with the stock guest.
pub fn one(machine: &Machine) -> Result<Row> {
    let mut ours = daemon(machine.system.as_ref().context("a daemon runs")?)?;
    ours.retain(|party| !party.name.contains(DESK));
    let row = Row::lower(ONE, "cpu", "% of a core", watched(ONE, &ours)?).bar_at(0.3);
    Ok(Row { note: Some("the daemon, the guest's worker and its stand-by".to_owned()), ..row })
}

/// Measures with many front ends at one daemon.
pub fn many(interrupt: &Interrupt) -> Result<Option<Row>> {
    if !is_there("dpdk-testpmd") {
        eprintln!("{MANY} was left out: it needs dpdk-testpmd (apt-get install dpdk-dev)");
        return Ok(None);
    }
    let place = Workplace::new()?;
    let name = |number| format!("vm{number}");
    let socket = |number| place.directory().join(format!("{}.sock", name(number)));
    let nodes: String = (0..FRONT_ENDS).map(|number| node(&name(number), &socket(number))).collect();
    let system = System::configured(place.directory(), &nodes)?;
    let mut front_ends = Vec::new();
    for number in 0..FRONT_ENDS {
        system.await_pair(&name(number))?;
        front_ends.push(front_end(&socket(number), 64, "--total-num-mbufs=2048", interrupt)?);
    }
    let row = Row::lower(MANY, "cpu", "% of a core", watched(MANY, &daemon(&system)?)?).bar_at(3.0);
    Ok(Some(Row { note: Some("the daemon and all workers; the front ends are DPDK's".to_owned()), ..row }))
}

/// Starts a front end of DPDK with some MiB of memory, that waits for a command and looks at no ring. It is connected
/// then. `buffers` are testpmd's options for its packet buffers: it writes into each.
pub fn front_end(socket: &Path, mib: u32, buffers: &str, interrupt: &Interrupt) -> Result<Program> {
    let mut command = Command::new("dpdk-testpmd");
    command.args(["--lcores", "0@0,1@0", "--no-huge", "-m", &mib.to_string(), "--no-pci", "--no-shconf"]);
    command.args(["--no-telemetry", "--vdev"]);
    command.arg(format!("net_virtio_user0,path={},queues=1,queue_size=256", socket.display()));
    command.args(["--", "--interactive"]).args(buffers.split_whitespace());
    let mut front_end = Program::start_to_tell(command.stderr(std::process::Stdio::null()))?;
    front_end.await_words("testpmd>", interrupt)?;
    Ok(front_end)
}

/// Returns the share of a core that the parties use together, in percent.
fn watched(case: &str, parties: &[Party]) -> Result<f64> {
    std::thread::sleep(REST);
    let shares = watch(parties, WATCHED)?;
    let mut all: Vec<_> = shares.parties.iter().zip(parties).map(|(share, party)| (share * 100.0, party)).collect();
    all.sort_by(|one, other| other.0.total_cmp(&one.0));
    for (share, party) in all.iter().take(4) {
        eprintln!("{case} · {share:.3} % {}", party.name);
    }
    Ok(all.iter().map(|(share, _)| share).sum())
}
