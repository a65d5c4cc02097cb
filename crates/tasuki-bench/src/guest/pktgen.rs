//! Frames that the guest's kernel makes by itself (pktgen), at the paper's sizes (S3, Figures 10 and 12). The frames that
//! arrive in the namespace count: they are UDP, for a port where nobody listens.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::cpu::{Party, Reading, Shares};
use super::machine::{HOST, Machine};
use crate::program::LOOK;

/// Figures of one measurement.
#[derive(Debug)]
pub struct Flood {
    /// Frames a second that arrived.
    pub rate: f64,
    /// Frames that the guest sent and that did not arrive.
    pub lost: u64,
    /// Shares of a core meanwhile.
    pub shares: Shares,
}

/// Longest time until the first frames arrive, and longest time without one at the end.
const BEGIN: Duration = Duration::from_secs(20);
const SILENCE: Duration = Duration::from_secs(1);

/// Returns the commands of the guest's shell, whose last line is pktgen's result. `size` has the checksum that ends a
/// frame on a wire, which pktgen does not count. Without a rate, it sends as fast as it can.
fn commands(size: usize, rate: Option<f64>, seconds: u64) -> String {
    let host = HOST.map(|byte| byte.to_string()).join(".");
    let pace = rate.map_or("delay 0".to_owned(), |rate| format!("ratep {rate:.0}"));
    let (size, to) = (format!("pkt_size {}", size - 4), format!("dst {host}"));
    let words = ["count 0", "clone_skb 0", &pace, &size, &to];
    let words = words.map(|words| format!("echo '{words}' > $p/eth0; ")).concat();
    format!(
        "p=/proc/net/pktgen; [ -d $p ] || insmod /pktgen.ko; \
        echo rem_device_all > $p/kpktgend_0; echo 'add_device eth0' > $p/kpktgend_0; {words}\
        echo \"dst_mac $(awk '$1 == \"{host}\" {{ print $4 }}' /proc/net/arp)\" > $p/eth0; \
        echo start > $p/pgctrl & sleep {seconds}; echo stop > $p/pgctrl; wait; grep Result: $p/eth0"
    )
}

/// Has the guest send for somewhat longer than `watched`, and counts for that long: at `rate` frames a second, or as fast
/// as it can. Reads the CPU time of `parties` meanwhile.
pub fn flood(machine: &Machine, size: usize, rate: Option<f64>, watched: Duration, parties: &[Party]) -> Result<Flood> {
    let before = received(machine)?;
    let seconds = watched + 3 * SILENCE;
    let mut shell = machine.shell()?.run(&commands(size, rate, seconds.as_secs()))?;
    let begun = Instant::now();
    while received(machine)? == before {
        ensure!(begun.elapsed() < BEGIN, "no frame of pktgen arrives");
        std::thread::sleep(LOOK);
    }
    std::thread::sleep(SILENCE);
    let (since, first, before_it) = (Instant::now(), received(machine)?, Reading::take(parties)?);
    std::thread::sleep(watched);
    let shares = before_it.until(&Reading::take(parties)?);
    let rate = (received(machine)? - first) as f64 / since.elapsed().as_secs_f64();
    // Result: OK: 5000123(c4900000+d100123) usec, 123456 (60byte,0frags)
    let said = shell.line()?;
    let sent: Option<u64> = said.split_once("usec, ").and_then(|(_, rest)| rest.split(' ').next()?.parse().ok());
    let sent = sent.with_context(|| format!("the guest's pktgen says {said}"))?;
    let (mut arrived, mut last) = (received(machine)? - before, Instant::now());
    while last.elapsed() < SILENCE {
        std::thread::sleep(LOOK);
        let now = received(machine)? - before;
        if now > arrived {
            (arrived, last) = (now, Instant::now());
        }
    }
    Ok(Flood { rate, lost: sent.saturating_sub(arrived), shares })
}

/// Returns the number of UDP packets for a port where nobody listens, as all of pktgen are. The interface's own counter
/// has other frames, too, such as those of the guest's shell: each of them would hide a lost one.
fn received(machine: &Machine) -> Result<u64> {
    let text = machine.within(|| std::fs::read_to_string("/proc/thread-self/net/snmp"))??;
    no_ports(&text).with_context(|| format!("the namespace has no counters of UDP: {text}"))
}

/// Reads `NoPorts` of UDP: a line of names, and one of numbers (proc_pid_net(5), snmp).
fn no_ports(snmp: &str) -> Option<u64> {
    let mut lines = snmp.lines().filter_map(|line| line.strip_prefix("Udp: "));
    let (names, numbers) = (lines.next()?, lines.next()?);
    let mut both = names.split_whitespace().zip(numbers.split_whitespace());
    both.find(|(name, _)| *name == "NoPorts")?.1.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_datagrams_that_nobody_takes_count() {
        let snmp = "Tcp: InSegs NoPorts\nTcp: 7 8\nUdp: InDatagrams NoPorts InErrors\nUdp: 41 42 43\nUdpLite: NoPorts\nUdpLite: 1\n";
        assert_eq!(no_ports(snmp), Some(42));
        assert_eq!(no_ports("Udp: InDatagrams\nUdp: 41\n"), None);
        let this = std::fs::read_to_string("/proc/thread-self/net/snmp").unwrap();
        assert!(no_ports(&this).is_some(), "{this}");
    }
}
