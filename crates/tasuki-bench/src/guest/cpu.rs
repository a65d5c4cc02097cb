//! CPU time of a machine and of parts of it.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};

/// Threads whose CPU time is noted together.
#[derive(Debug, Clone)]
pub struct Party {
    pub name: String,
    pub pid: u32,
    /// Which threads of the process: QEMU's virtual CPUs have names of their own.
    pub threads: Threads,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Threads {
    All,
    Vcpus,
    NoVcpus,
}

/// Prefix of the names of a virtual CPU's threads.
const VCPU: &str = "CPU ";

/// Duration of one tick of `/proc/stat`.
const TICK: Duration = Duration::from_millis(10);

/// CPU time up to now.
pub struct Reading {
    at: Instant,
    /// Time in which the machine's CPUs had nothing to do, or did not run.
    idle: Duration,
    cpus: usize,
    parties: Vec<Duration>,
}

/// Shares of a core between two readings.
#[derive(Debug, Clone)]
pub struct Shares {
    /// All that the machine did.
    pub machine: f64,
    /// Each party, in the order of the readings.
    pub parties: Vec<f64>,
}

impl Reading {
    pub fn take(parties: &[Party]) -> Result<Self> {
        let stat = std::fs::read_to_string("/proc/stat").context("/proc/stat cannot be read")?;
        let (idle, cpus) = idle(&stat).context("/proc/stat has no idle time")?;
        let at = Instant::now();
        Ok(Reading { at, idle, cpus, parties: parties.iter().map(on_cpu).collect::<Result<_>>()? })
    }

    pub fn until(&self, later: &Reading) -> Shares {
        let time = (later.at - self.at).as_secs_f64();
        let idle = later.idle.saturating_sub(self.idle).as_secs_f64();
        let pairs = self.parties.iter().zip(&later.parties);
        Shares {
            machine: self.cpus as f64 - idle / time,
            parties: pairs.map(|(before, after)| after.saturating_sub(*before).as_secs_f64() / time).collect(),
        }
    }
}

/// Watches the machine and the parties for some time.
pub fn watch(parties: &[Party], time: Duration) -> Result<Shares> {
    let before = Reading::take(parties)?;
    std::thread::sleep(time);
    Ok(before.until(&Reading::take(parties)?))
}

/// Reads the idle time of all CPUs together, and their number. Time that the host of a virtual machine took from it
/// counts as idle.
fn idle(stat: &str) -> Option<(Duration, usize)> {
    let line = stat.lines().next()?.strip_prefix("cpu ")?;
    let ticks: Vec<u32> = line.split_whitespace().map(str::parse).collect::<Result<_, _>>().ok()?;
    let idle = ticks.get(3)? + ticks.get(4)? + ticks.get(7)?;
    let cpus = stat.lines().skip(1).take_while(|line| line.starts_with("cpu")).count();
    Some((TICK * idle, cpus))
}

/// Returns the CPU time of a party's threads (the first number of schedstat, in ns).
fn on_cpu(party: &Party) -> Result<Duration> {
    let folder = std::fs::read_dir(format!("/proc/{}/task", party.pid));
    let mut sum = 0;
    for thread in folder.with_context(|| format!("{} is gone", party.name))?.flatten() {
        let read = |file: &str| std::fs::read_to_string(thread.path().join(file));
        // A thread may end meanwhile.
        let (Ok(name), Ok(schedstat)) = (read("comm"), read("schedstat")) else { continue };
        let is_counted = match party.threads {
            Threads::All => true,
            Threads::Vcpus => name.starts_with(VCPU),
            Threads::NoVcpus => !name.starts_with(VCPU),
        };
        let ns: u64 = schedstat.split_whitespace().next().and_then(|ns| ns.parse().ok()).unwrap_or_default();
        sum += if is_counted { ns } else { 0 };
    }
    Ok(Duration::from_nanos(sum))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_is_idle_when_it_waits_or_does_not_run() {
        let stat = "cpu  10 0 20 300 5 0 1 7 0 0\ncpu0 5 0 10 150 2 0 1 3 0 0\ncpu1 5 0 10 150 3 0 0 4 0 0\nintr 1\n";
        assert_eq!(idle(stat), Some((TICK * 312, 2)));
        assert_eq!(idle("intr 1\n"), None);
    }

    #[test]
    fn work_shows_in_the_thread_and_in_the_machine() {
        let us = Party { name: "us".to_owned(), pid: std::process::id(), threads: Threads::All };
        let vcpus = Party { threads: Threads::Vcpus, ..us.clone() };
        let before = Reading::take(&[us.clone(), vcpus.clone()]).unwrap();
        let worked = || rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        let (begun, enough) = (worked(), rustix::fs::Timespec { tv_sec: 0, tv_nsec: 50_000_000 });
        while worked() - begun < enough {}
        let shares = before.until(&Reading::take(&[us, vcpus]).unwrap());
        assert!(shares.parties[0] > 0.0 && shares.parties[1] == 0.0, "{shares:?}");
    }
}
