//! The housekeeping CPUs: those on which no node's workers stay. tasukid runs there with all processes that it starts.
//! There they take no time from a driver that is never idle, which would lose it in slices of milliseconds. A worker
//! moves to its node's CPU when it is ready.

use rustix::process::Pid;
use rustix::thread::CpuSet;

use crate::config::{Config, Node};

/// Returns the CPUs on which this thread runs, without those on which a node's workers are told to stay.
pub fn find(config: &Config) -> Vec<u32> {
    let ours = of_this_thread();
    { ours }.into_iter().filter(|&cpu| config.node.iter().all(|node| node.cpu != Some(cpu))).collect()
}

fn of_this_thread() -> Vec<u32> {
    let Ok(ours) = rustix::thread::sched_getaffinity(None) else { return Vec::new() };
    let most = u32::try_from(CpuSet::MAX_CPU).unwrap_or(u32::MAX);
    (0..most).filter(|&cpu| usize::try_from(cpu).is_ok_and(|cpu| ours.is_set(cpu))).collect()
}

/// Returns the CPUs on which a process of ours may be told to stay: all of the cpuset that are on line. The CPUs on which
/// this thread runs are fewer where some are isolated (`isolcpus=`, or systemd's `CPUAffinity=`), and a node's CPU is
/// mostly an isolated one.
pub fn usable() -> Vec<u32> {
    // Another thread asks: this one stays where it is.
    let asked = std::thread::Builder::new().spawn(|| {
        let mut all = CpuSet::new();
        (0..CpuSet::MAX_CPU).for_each(|cpu| all.set(cpu));
        // The kernel leaves out those that are not to be had.
        let _ = rustix::thread::sched_setaffinity(None, &all);
        of_this_thread()
    });
    asked.ok().and_then(|asked| asked.join().ok()).unwrap_or_else(of_this_thread)
}

/// Returns where a node's processes may run: on its CPU, and on the housekeeping CPUs. `None` if no node has a CPU for
/// itself, or none is left for this one.
pub fn allowed_for(node: &Node, config: &Config, housekeeping: &[u32]) -> Option<CpuSet> {
    let is_divided = config.node.iter().any(|node| node.cpu.is_some());
    let its = set(&{ housekeeping.iter().copied() }.chain(node.cpu).collect::<Vec<_>>());
    (is_divided && its.count() > 0).then_some(its)
}

fn set(cpus: &[u32]) -> CpuSet {
    let mut set = CpuSet::new();
    let cpus = cpus.iter().filter_map(|&cpu| usize::try_from(cpu).ok());
    cpus.filter(|&cpu| cpu < CpuSet::MAX_CPU).for_each(|cpu| set.set(cpu));
    set
}

/// Pins this thread, and the threads and processes that it starts from then on, to these CPUs, if there are any.
pub fn pin_this_thread(cpus: &[u32]) {
    set_affinity(None, cpus);
}

/// Pins a process of one thread. The kernel tears down a killed process there, in half a millisecond, and not on its
/// successor's CPU.
pub fn pin(process: Pid, cpus: &[u32]) {
    set_affinity(Some(process), cpus);
}

fn set_affinity(thread: Option<Pid>, cpus: &[u32]) {
    let set = set(cpus);
    if set.count() > 0 {
        // They were to be had when it was asked; if that is no longer so, it runs where it ran.
        let _ = rustix::thread::sched_setaffinity(thread, &set);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(cpu: Option<u32>) -> Config {
        let cpu = cpu.map(|cpu| format!("cpu = {cpu}")).unwrap_or_default();
        toml::from_str(&format!("[[node]]\nname = \"a\"\nwork = \"echo\"\n{cpu}")).expect("a configuration")
    }

    #[test]
    fn a_node_has_its_cpu_for_itself_where_there_are_others() {
        let ours = find(&config(None));
        assert!(!ours.is_empty(), "this test runs somewhere");
        let housekeeping = find(&config(Some(ours[0])));
        assert_eq!(housekeeping, ours[1..]);
        pin_this_thread(&housekeeping);
        let stays = find(&config(None));
        // Other tests may come after this one in the same thread.
        pin_this_thread(&ours);
        assert_eq!(stays, if ours.len() > 1 { &ours[1..] } else { &ours[..] });
    }

    #[test]
    fn a_node_runs_on_its_cpu_and_on_nobodys() {
        let its = |config: &Config, housekeeping: &[u32]| {
            let set = allowed_for(&config.node[0], config, housekeeping);
            set.map(|set| (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect::<Vec<_>>())
        };
        assert_eq!(its(&config(None), &[0, 1]), None, "no node has one");
        assert_eq!(its(&config(Some(3)), &[0, 1]), Some(vec![0, 1, 3]));
        assert_eq!(its(&config(Some(3)), &[]), Some(vec![3]));
        let mut two = config(None);
        two.node.extend(config(Some(1)).node);
        assert_eq!(its(&two, &[0]), Some(vec![0]));
        assert_eq!(its(&two, &[]), None, "it has to run somewhere");
    }
}
