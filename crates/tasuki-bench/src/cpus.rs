//! CPUs of the two measured processes.

use std::process::Command;

use anyhow::{Context, Result, bail};
use rustix::thread::CpuSet;

use crate::program;

/// Placement of the two roles of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cores {
    /// Both on one CPU: every hand-over is a context switch.
    Same,
    /// On two CPUs that share no execution units: every hand-over crosses cores.
    Other,
}

/// The two CPUs of a bench.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cpus {
    /// CPU of measuring roles, and of serving roles of [`Cores::Same`].
    pub client: usize,
    /// CPU of serving roles of [`Cores::Other`].
    pub server: usize,
}

impl Cpus {
    /// Chooses among the CPUs that this process may use.
    ///
    /// The highest numbers come first, because CPU 0 does most of a machine's housekeeping.
    pub fn choose() -> Result<Self> {
        let allowed = rustix::thread::sched_getaffinity(None).context("the allowed CPUs could not be asked for")?;
        let mut cpus = (0..CpuSet::MAX_CPU).rev().filter(|&cpu| allowed.is_set(cpu));
        let client = cpus.next().context("this process may use no CPU")?;
        let siblings = siblings(client);
        match cpus.find(|cpu| !siblings.contains(cpu)) {
            Some(server) => Ok(Cpus { client, server }),
            None => bail!("a bench needs two cores, but this process may use only CPU {client} and its siblings"),
        }
    }

    /// Returns a third CPU that shares a core with neither of the two, if there is one.
    pub fn third(self) -> Result<Option<usize>> {
        let allowed = rustix::thread::sched_getaffinity(None).context("the allowed CPUs could not be asked for")?;
        let taken = [siblings(self.client), siblings(self.server), vec![self.client, self.server]].concat();
        Ok((0..CpuSet::MAX_CPU).rev().find(|&cpu| allowed.is_set(cpu) && !taken.contains(&cpu)))
    }

    /// Returns (CPU of the server, CPU of the client).
    pub fn of(self, cores: Cores) -> (usize, usize) {
        match cores {
            Cores::Same => (self.client, self.client),
            Cores::Other => (self.server, self.client),
        }
    }
}

/// Pins this process to `cpu`.
pub fn pin(cpu: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set).with_context(|| format!("CPU {cpu} cannot be used"))
}

/// Lets this process, and the processes it starts, run on every CPU of the machine.
pub fn unpin() -> Result<()> {
    keep_off(&[])
}

/// Lets this process, and the processes it starts, run on every CPU but `cpus`.
pub fn keep_off(cpus: &[usize]) -> Result<()> {
    let mut set = CpuSet::new();
    (0..CpuSet::MAX_CPU).filter(|other| !cpus.contains(other)).for_each(|other| set.set(other));
    rustix::thread::sched_setaffinity(None, &set).context("this process may not use other CPUs")
}

/// Gives a process or thread the real-time priority `rank` (SCHED_FIFO). Needs root.
pub fn first(rank: u32, thread: u32) -> Result<()> {
    program::run_quietly(Command::new("chrt").args(["-f", "-p", &rank.to_string(), &thread.to_string()]))
}

/// Returns the hyperthreads of `cpu`'s core, `cpu` included. Empty when the kernel does not say.
fn siblings(cpu: usize) -> Vec<usize> {
    let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
    std::fs::read_to_string(path).map(|list| cpu_list(&list)).unwrap_or_default()
}

/// Parses the kernel's notation for CPUs: `0,4-6`.
fn cpu_list(list: &str) -> Vec<usize> {
    let range = |part: &str| -> Option<std::ops::RangeInclusive<usize>> {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse().ok()?..=last.parse().ok()?)
    };
    list.trim().split(',').filter_map(range).flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_lists_are_read() {
        assert_eq!(cpu_list("3\n"), [3]);
        assert_eq!(cpu_list("0,4-6\n"), [0, 4, 5, 6]);
        assert!(cpu_list("\n").is_empty());
    }

    #[test]
    fn one_core_serves_and_measures_when_they_share_it() {
        let cpus = Cpus { client: 7, server: 2 };
        assert_eq!(cpus.of(Cores::Same), (7, 7));
        assert_eq!(cpus.of(Cores::Other), (2, 7));
    }
}
