//! Where a worker runs: on its node's CPU while it drives a NIC or is ready to, and beside it while it gets ready, and once it has nothing to do. The successor of a
//! driver that is never idle would take its CPU from it otherwise, in slices of milliseconds.

use std::cell::Cell;

use anyhow::{Context, Result};
use rustix::thread::CpuSet;

/// Its CPUs.
#[derive(Debug)]
pub struct Cpus {
    home: Option<(u32, CpuSet)>,
    aside: Option<CpuSet>,
    is_home: Cell<bool>,
}

fn set(cpus: &[u32]) -> Option<CpuSet> {
    let mut set = CpuSet::new();
    cpus.iter()
        .filter_map(|&cpu| usize::try_from(cpu).ok())
        .filter(|&cpu| cpu < CpuSet::MAX_CPU)
        .for_each(|cpu| set.set(cpu));
    (set.count() > 0).then_some(set)
}

impl Cpus {
    /// For a worker of whose node is said that it stays on `cpu`, and that there is room on the CPUs `aside`. It is there from now on.
    ///
    /// # Errors
    /// There is no such CPU, or it may not be used.
    pub fn new(cpu: Option<u32>, aside: &[u32]) -> Result<Self> {
        let aside = cpu.and(set(aside));
        let home = cpu
            .map(|cpu| {
                let home = set(&[cpu]).with_context(|| {
                    format!("there is no CPU {cpu}; name one of this machine in the node's configuration")
                })?;
                anyhow::Ok((cpu, home))
            })
            .transpose()?;
        // Where it is now is not known.
        let cpus = Cpus { home, aside, is_home: Cell::new(aside.is_some()) };
        match cpus.aside {
            Some(_) => cpus.step_aside(),
            None => cpus.go_home()?,
        }
        Ok(cpus)
    }

    /// The node's CPU, if it has one.
    pub fn cpu(&self) -> Option<u32> {
        self.home.map(|(cpu, _)| cpu)
    }

    /// To the node's CPU, for whoever drives a NIC or is about to.
    pub fn go_home(&self) -> Result<()> {
        if let (Some((cpu, home)), false) = (&self.home, self.is_home.get()) {
            rustix::thread::sched_setaffinity(None, home).with_context(|| {
                format!("the worker cannot be kept on CPU {cpu}; name one of this machine in the node's configuration")
            })?;
            self.is_home.set(true);
        }
        Ok(())
    }

    /// Away from it, for whoever only takes time from its driver there. Where that cannot be, it stays.
    pub fn step_aside(&self) {
        if let (Some(aside), true) = (&self.aside, self.is_home.get())
            && rustix::thread::sched_setaffinity(None, aside).is_ok()
        {
            self.is_home.set(false);
        }
    }
}
