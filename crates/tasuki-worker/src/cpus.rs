//! The CPUs on which a worker runs, and its priority there.
//!
//! A worker runs on its node's CPU while it drives a NIC or is ready to. It runs on other CPUs while it prepares,
//! and once it has nothing to do. Otherwise the successor of a driver that is never idle would take the CPU from
//! that driver, in slices of milliseconds.
//!
//! A driver that sleeps is *urgent* on its CPU: its nice value is below that of the programs beside it. With an
//! equal nice value it would be in debt for as long as it has just run. A frame that wakes it meanwhile would wait
//! for the next tick, since EEVDF runs no task at once that is in debt. A kernel's own driver runs before every
//! program as long as it has not been at work for 2 ms without a rest (softirqs); so does ours.

use std::cell::Cell;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::thread::CpuSet;

/// Time for which a worker may work without a rest and stay urgent: the kernel's softirqs have as long
/// (`MAX_SOFTIRQ_TIME`).
const TOIL: Duration = Duration::from_millis(2);

/// CPUs of a worker.
#[derive(Debug)]
pub struct Cpus {
    home: Option<(u32, CpuSet)>,
    aside: Option<CpuSet>,
    is_home: Cell<bool>,
    /// Nice value of an urgent worker; 0 if the worker is never urgent.
    nice: Cell<i32>,
    /// Start of the present stretch of urgent work without a rest; nothing if the worker is not urgent.
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
    /// Takes the node's CPU `cpu`, the CPUs `aside` on which there is room, and the nice value of an urgent worker.
    /// Moves the worker aside, or to `cpu` if there is no CPU aside. The worker is not urgent yet.
    ///
    /// # Errors
    /// There is no such CPU, or the worker may not use it.
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
        // The CPU on which the worker runs now is not known.
        let (nice, urgent_since) = (Cell::new(nice.min(0)), Cell::new(None));
        let cpus = Cpus { home, aside, is_home: Cell::new(aside.is_some()), nice, urgent_since };
        match cpus.aside {
            Some(_) => cpus.step_aside(),
            None => cpus.stay_home()?,
        }
        Ok(cpus)
    }

    /// Returns the node's CPU, if it has one.
    pub fn cpu(&self) -> Option<u32> {
        self.home.map(|(cpu, _)| cpu)
    }

    /// Moves a worker that drives a NIC, or is about to, to the node's CPU. The worker is urgent from now on.
    ///
    /// # Errors
    /// The CPU is gone, or the worker may no longer use it.
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

    /// Moves a worker away from the node's CPU when it would only take time from the driver there. If that fails,
    /// the worker stays; it is not urgent in either case.
    pub fn step_aside(&self) {
        self.give_way();
        if let (Some(aside), true) = (&self.aside, self.is_home.get())
            && rustix::thread::sched_setaffinity(None, aside).is_ok()
        {
            self.is_home.set(false);
        }
    }

    /// Makes a worker urgent that drives a NIC, or is ready to, and is about to rest. It does so as far as the
    /// kernel permits, by `CAP_SYS_NICE` or by `RLIMIT_NICE`.
    pub fn hurry(&self) {
        if self.nice.get() < 0 && self.urgent_since.get().is_none() {
            match rustix::process::setpriority_process(None, self.nice.get()) {
                Ok(()) => self.urgent_since.set(Some(Instant::now())),
                // The kernel will not permit it later either.
                Err(_) => self.nice.set(0),
            }
        }
    }

    /// Ends the urgency: the worker runs as any other program.
    fn give_way(&self) {
        // The kernel never refuses this.
        if self.urgent_since.take().is_some() {
            let _ = rustix::process::setpriority_process(None, 0);
        }
    }

    /// Moves the worker back to where it stays, if it runs elsewhere. Before Linux 6.2, each change of the CPUs of its
    /// control group, as for another node's CPU, allows it all that the group has.
    fn stay(&self) {
        let Some((cpu, home)) = &self.home else { return };
        let (is_home, here) = (self.is_home.get(), tasuki_shm::wake::this_cpu());
        let place = if is_home { Some(home) } else { self.aside.as_ref() };
        if let (true, Some(place)) = (is_home != (here == *cpu), place) {
            // The kernel refuses a CPU that is gone: the worker then runs where there is room.
            let _ = rustix::thread::sched_setaffinity(None, place);
        }
    }

    /// Ends the urgency after too long a stretch of work, and keeps the worker where it stays. A working worker calls this
    /// at intervals.
    pub fn toil(&self) {
        self.stay();
        if self.urgent_since.get().is_some_and(|since| since.elapsed() > TOIL) {
            self.give_way();
        }
    }

    /// Starts a new stretch of work after a rest, where the worker stays.
    pub fn woken(&self) {
        self.stay();
        if self.urgent_since.get().is_some() {
            self.urgent_since.set(Some(Instant::now()));
        }
    }
}
