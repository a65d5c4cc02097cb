//! Where a worker runs, and before whom.
//!
//! On its node's CPU while it drives a NIC or is ready to, and beside it while it gets ready, and once it has nothing to do. The successor of a driver that is never idle
//! would take its CPU from it otherwise, in slices of milliseconds.
//!
//! A driver that sleeps is *urgent* there: it has a nice value below that of the programs beside it. With theirs it is in debt for as long as it has just run, and a frame
//! that wakes it meanwhile waits for the next tick (EEVDF runs nobody at once who is in debt). A kernel's own driver goes before every program, and so long as it has not
//! been at work for 2 ms without a rest (softirqs); so does ours.

use std::cell::Cell;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::thread::CpuSet;

/// How long a worker may be at work without a rest and be urgent still: the kernel's softirqs have as long (MAX_SOFTIRQ_TIME).
const TOIL: Duration = Duration::from_millis(2);

/// Its CPUs.
#[derive(Debug)]
pub struct Cpus {
    home: Option<(u32, CpuSet)>,
    aside: Option<CpuSet>,
    is_home: Cell<bool>,
    /// The nice value of who is urgent; 0 where nobody is.
    nice: Cell<i32>,
    /// Since when it is, without a rest.
    urgent_since: Cell<Option<Instant>>,
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
    /// For a worker of whose node is said that it stays on `cpu`, that there is room on the CPUs `aside`, and which nice value it has when it is urgent. It is
    /// there from now on, and is not urgent yet.
    ///
    /// # Errors
    /// There is no such CPU, or it may not be used.
    pub fn new(cpu: Option<u32>, aside: &[u32], nice: i32) -> Result<Self> {
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
        let (nice, urgent_since) = (Cell::new(nice.min(0)), Cell::new(None));
        let cpus = Cpus { home, aside, is_home: Cell::new(aside.is_some()), nice, urgent_since };
        match cpus.aside {
            Some(_) => cpus.step_aside(),
            None => cpus.stay_home()?,
        }
        Ok(cpus)
    }

    /// The node's CPU, if it has one.
    pub fn cpu(&self) -> Option<u32> {
        self.home.map(|(cpu, _)| cpu)
    }

    /// To the node's CPU, for whoever drives a NIC or is about to; urgent from now on.
    ///
    /// # Errors
    /// The CPU is no longer there, or may not be used any more.
    pub fn go_home(&self) -> Result<()> {
        self.hurry();
        self.stay_home()
    }

    fn stay_home(&self) -> Result<()> {
        if let (Some((cpu, home)), false) = (&self.home, self.is_home.get()) {
            rustix::thread::sched_setaffinity(None, home).with_context(|| {
                format!("the worker cannot be kept on CPU {cpu}; name one of this machine in the node's configuration")
            })?;
            self.is_home.set(true);
        }
        Ok(())
    }

    /// Away from it, for whoever only takes time from its driver there. Where that cannot be, it stays, and is not urgent.
    pub fn step_aside(&self) {
        self.give_way();
        if let (Some(aside), true) = (&self.aside, self.is_home.get())
            && rustix::thread::sched_setaffinity(None, aside).is_ok()
        {
            self.is_home.set(false);
        }
    }

    /// Urgent from now on, for whoever drives a NIC or is ready to, and is about to rest. As far as the kernel permits: by CAP_SYS_NICE, or by RLIMIT_NICE.
    pub fn hurry(&self) {
        if self.nice.get() < 0 && self.urgent_since.get().is_none() {
            match rustix::process::setpriority_process(None, self.nice.get()) {
                Ok(()) => self.urgent_since.set(Some(Instant::now())),
                // Nor will it be permitted later.
                Err(_) => self.nice.set(0),
            }
        }
    }

    /// As any program.
    fn give_way(&self) {
        // Nobody is ever refused this.
        if self.urgent_since.take().is_some() {
            let _ = rustix::process::setpriority_process(None, 0);
        }
    }

    /// To be asked now and then by who is at work: gives way if that has been for long.
    pub fn toil(&self) {
        if self.urgent_since.get().is_some_and(|since| since.elapsed() > TOIL) {
            self.give_way();
        }
    }

    /// After a rest.
    pub fn woken(&self) {
        if self.urgent_since.get().is_some() {
            self.urgent_since.set(Some(Instant::now()));
        }
    }
}
