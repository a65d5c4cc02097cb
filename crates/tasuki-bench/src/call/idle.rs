//! Cost of a thousand idle clients to the server, in CPU time and in memory.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::Resource;
use tasuki_call::{Ask, Client, ClientOptions, Deadline};

use super::{DEADLINE, METHOD, await_server, message};
use crate::orders::Orders;
use crate::sample::Sample;

/// Number of connected clients.
pub const CLIENTS: usize = 1_000;

/// Time over which the idle clients are watched.
const WATCHED: Duration = Duration::from_secs(2);

pub fn serve(orders: Orders) -> Result<()> {
    super::echo(orders)
}

/// Notes `cpu` (share of a core), and `resident` and `resident-client` (bytes per client, at the server and at the
/// clients).
pub fn measure(mut orders: Orders) -> Result<Sample> {
    let mut limit = rustix::process::getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    rustix::process::setrlimit(Resource::Nofile, limit).context("the limit of open descriptors could not be raised")?;
    let pid = await_server(orders.next_fd()?)?;
    let path = orders.directory.join("call");
    let me = std::process::id();
    let before = (resident(pid)?, resident(me)?);
    let mut clients =
        (0..CLIENTS).map(|_| Ok(Client::connect(&path, &ClientOptions::default())?)).collect::<Result<Vec<_>>>()?;
    // Each client makes one call first: a typical idle client has worked before.
    for (client, number) in clients.iter_mut().zip(0..) {
        let request = message(number);
        let reply = client.call(Ask::new(METHOD, &request), Deadline::within(DEADLINE))?;
        ensure!(reply.inline() == Some(&request[..]), "client {number} was answered with something else");
    }
    std::thread::sleep(Duration::from_millis(100));
    let (start, busy) = (Instant::now(), on_cpu(pid)?);
    std::thread::sleep(WATCHED);
    let share = (on_cpu(pid)? - busy).as_secs_f64() / start.elapsed().as_secs_f64();
    let after = (resident(pid)?, resident(me)?);
    let each = |before: u64, after: u64| after.saturating_sub(before) as f64 / CLIENTS as f64;
    let mut sample = Sample::new();
    sample.note("cpu", share);
    sample.note("resident", each(before.0, after.0));
    sample.note("resident-client", each(before.1, after.1));
    Ok(sample)
}

/// Returns the CPU time of the process (proc_pid_schedstat: the first number, in ns; all its threads but the main
/// one have ended or sleep).
pub fn on_cpu(pid: u32) -> Result<Duration> {
    let text =
        std::fs::read_to_string(format!("/proc/{pid}/schedstat")).context("a process's CPU time cannot be read")?;
    let ns = text.split_whitespace().next().and_then(|ns| ns.parse().ok()).context("schedstat has no number")?;
    Ok(Duration::from_nanos(ns))
}

/// Returns the resident bytes of the process, page tables included.
fn resident(pid: u32) -> Result<u64> {
    let status =
        std::fs::read_to_string(format!("/proc/{pid}/status")).context("the server's memory cannot be read")?;
    let kib = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|rest| rest.split_whitespace().next()).and_then(|kib| kib.parse::<u64>().ok())
    };
    let both = kib("VmRSS:").zip(kib("VmPTE:")).context("the server's memory cannot be read")?;
    Ok((both.0 + both.1) * 1024)
}
