//! The measured machine, as far as it can be read.
//!
//! A figure is worth little without its machine. A property that cannot be read stays empty; it is never guessed.

use std::collections::BTreeMap;
use std::fs;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use crate::cpus::Cpus;

/// Properties of a machine that help to read its figures later. Files of earlier runs have some of them.
#[derive(Debug, Default, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Host {
    /// Start of the bench, UTC.
    pub date: String,
    /// Host name.
    pub name: String,
    /// CPU model as `/proc/cpuinfo` reports it.
    pub cpu_model: String,
    /// Number of online CPUs.
    pub cores: usize,
    /// CPUs that the measured processes stayed on.
    pub cpus_used: Vec<usize>,
    /// Whether the CPU flags report a hypervisor.
    pub hypervisor: bool,
    /// Kernel release and build.
    pub kernel: String,
    /// Vulnerability → the kernel's mitigation.
    pub mitigations: BTreeMap<String, String>,
    /// Clock source that `clock_gettime` reads.
    pub clocksource: String,
    /// Frequency governor of CPU 0.
    pub governor: String,
    pub idle_driver: String,
    /// How long an idle CPU of a guest spins before it returns to the host, in ns. Zero makes waking it expensive.
    pub guest_halt_poll_ns: String,
    pub memory_mib: u64,
    /// Number of 2 MiB pages in the pool.
    pub huge_pages: u64,
    /// Transparent huge page policy; the chosen one is in brackets.
    pub transparent_huge_pages: String,
    /// Compiler that built the bench.
    pub rustc: String,
    /// Build profile. Only figures of `release` count.
    pub profile: String,
}

impl Host {
    /// Reads the properties of this machine.
    pub fn look(cpus: Cpus) -> Self {
        let cpuinfo = read("/proc/cpuinfo");
        let meminfo = read("/proc/meminfo");
        let flags = field(&cpuinfo, "flags");
        Host {
            date: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
            name: read("/proc/sys/kernel/hostname"),
            cpu_model: field(&cpuinfo, "model name").to_owned(),
            cores: cpuinfo.lines().filter(|line| line.starts_with("processor")).count(),
            cpus_used: vec![cpus.server, cpus.client],
            hypervisor: flags.split_whitespace().any(|flag| flag == "hypervisor"),
            kernel: format!("{} {}", read("/proc/sys/kernel/osrelease"), read("/proc/sys/kernel/version")),
            mitigations: mitigations(),
            clocksource: read("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
            governor: read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
            idle_driver: read("/sys/devices/system/cpu/cpuidle/current_driver"),
            guest_halt_poll_ns: read("/sys/module/haltpoll/parameters/guest_halt_poll_ns"),
            memory_mib: leading_number(field(&meminfo, "MemTotal")) / 1024,
            huge_pages: leading_number(field(&meminfo, "HugePages_Total")),
            transparent_huge_pages: read("/sys/kernel/mm/transparent_hugepage/enabled"),
            rustc: env!("TASUKI_BENCH_RUSTC").to_owned(),
            profile: env!("TASUKI_BENCH_PROFILE").to_owned(),
        }
    }
}

fn mitigations() -> BTreeMap<String, String> {
    let Ok(entries) = fs::read_dir("/sys/devices/system/cpu/vulnerabilities") else { return BTreeMap::new() };
    let one = |entry: fs::DirEntry| {
        let text = fs::read_to_string(entry.path()).ok()?;
        Some((entry.file_name().into_string().ok()?, text.trim().to_owned()))
    };
    entries.flatten().filter_map(one).collect()
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

/// Returns the first value of `name` in the `name : value` lines of `text`.
fn field<'t>(text: &'t str, name: &str) -> &'t str {
    let value =
        |line: &'t str| line.split_once(':').filter(|(key, _)| key.trim() == name).map(|(_, value)| value.trim());
    text.lines().find_map(value).unwrap_or_default()
}

fn leading_number(text: &str) -> u64 {
    text.split_whitespace().next().and_then(|word| word.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_by_their_whole_name() {
        let cpuinfo = "processor\t: 0\nmodel\t\t: 167\nmodel name\t: Some CPU\n";
        assert_eq!(field(cpuinfo, "model name"), "Some CPU");
        assert_eq!(field(cpuinfo, "model"), "167");
        assert_eq!(field(cpuinfo, "flags"), "");
    }

    #[test]
    fn numbers_stand_before_their_unit() {
        assert_eq!(leading_number("24567 kB"), 24567);
        assert_eq!(leading_number(""), 0);
    }
}
