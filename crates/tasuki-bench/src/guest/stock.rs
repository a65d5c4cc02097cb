//! Cases with a stock guest: Debian's kernel in QEMU without KVM, beside a network namespace of this host. The peer is
//! QEMU's own TAP back end, in the namespace itself, with the same guest in the same run. QEMU translates the guest's code
//! (TCG), so the guest is slow, and each interrupt takes the way by QEMU's main loop.

use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::cpu::{Party, Reading, Shares, Threads, watch};
use super::idle;
use super::machine::{GUEST, HOST, Link, Machine};
use super::pktgen::{self, Flood};
use crate::interrupt::Interrupt;
use crate::papers::{VM, VM_SIZES};
use crate::relay::guest::Recipe;
use crate::report::{Kind, Row};
use crate::sample::{Sample, median};

/// Name of the peer.
const PEER: &str = "qemu-tap";

/// Lengths of the frames of a round trip: the paper's seven (S3), and a long one. As there, the checksum that ends a frame
/// on a wire counts.
const SIZES: [usize; 8] = [64, 128, 256, 512, 1024, 1280, 1518, 9000];

/// Bytes of a frame besides its datagram: the headers of Ethernet, IPv4 and UDP, and that checksum.
const AROUND: usize = 14 + 20 + 8 + 4;

/// MTU of the usual frames, and of the long one.
const MTUS: [u32; 2] = [1500, 9000];

/// Frames a second of `host-cpu`, one by one at even distances. The guest carries them without a loss by either way; of
/// 10,000 a second both ways lost some.
const RATE: u32 = 4_000;

/// Length of the frames of `host-cpu` and of the interrupts.
const LEN: usize = 64;

/// Ports of the guest's echo and counter, and of the namespace's counter.
const ECHO: u16 = 9000;
const COUNTS: u16 = 9001;

/// Time without a datagram after which the traffic is over.
const SILENCE: Duration = Duration::from_secs(1);

/// How much longer traffic lasts than it is watched.
const MORE: Duration = Duration::from_secs(2);

/// Direction of the traffic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    ToGuest,
    ToHost,
}

const WAYS: [(Way, &str); 2] = [(Way::ToGuest, "h2g"), (Way::ToHost, "g2h")];

fn flood_name(size: u32) -> String {
    format!("pktgen-{size}")
}

/// How much to measure.
#[derive(Debug, Clone, Copy)]
struct Effort {
    rounds: u32,
    trips: u32,
    /// Length of one measurement of CPU time.
    watched: Duration,
}

const QUICK: Effort = Effort { rounds: 1, trips: 500, watched: Duration::from_secs(2) };
const FULL: Effort = Effort { rounds: 3, trips: 3_334, watched: Duration::from_secs(4) };

/// Names of the cases.
pub fn names() -> impl Iterator<Item = String> {
    let trips = SIZES.into_iter().map(|size| format!("rtt-{size}"));
    let ways =
        WAYS.into_iter().flat_map(|(_, way)| [format!("host-cpu-{way}"), format!("interrupts-per-packet-{way}")]);
    let floods = VM_SIZES.into_iter().map(flood_name);
    trips.chain(ways).chain(floods).chain([idle::ONE, idle::MANY].map(str::to_owned))
}

/// Longest time in µs that a frame waits for others: by default, and where CPU time counts more.
const LATENCIES_US: [u32; 2] = [250, 1000];

/// The systems that are compared, with their guests up.
struct Both {
    ours: Machine,
    theirs: Machine,
    /// A second system of ours, with the longer latency.
    patient: Option<Machine>,
}

/// Measures the cases that `is_wanted` chooses.
pub fn rows(
    is_quick: bool,
    recipe: &Recipe,
    is_wanted: impl Fn(&str) -> bool,
    interrupt: &Interrupt,
) -> Result<Vec<Row>> {
    let effort = if is_quick { QUICK } else { FULL };
    let mut rows = Vec::new();
    if names().any(|name| name != idle::MANY && is_wanted(&name)) {
        rows.extend(rows_of_both(effort, recipe, &is_wanted, interrupt)?);
    }
    if is_wanted(idle::MANY) {
        rows.extend(idle::many(interrupt)?);
    }
    Ok(rows)
}

fn rows_of_both(
    effort: Effort,
    recipe: &Recipe,
    is_wanted: impl Fn(&str) -> bool,
    interrupt: &Interrupt,
) -> Result<Vec<Row>> {
    let [ours, patient] = LATENCIES_US.map(|latency_us| Link::Tasuki { latency_us });
    let sends = VM_SIZES.into_iter().any(|size| is_wanted(&flood_name(size)));
    let mut both = Both {
        ours: Machine::start(recipe, ours)?,
        theirs: Machine::start(recipe, Link::Tap)?,
        patient: sends.then(|| Machine::start(recipe, patient)).transpose()?,
    };
    both.ours.await_boot(interrupt)?;
    both.theirs.await_boot(interrupt)?;
    both.patient.iter_mut().try_for_each(|machine| machine.await_boot(interrupt))?;
    let mut rows = Vec::new();
    for size in SIZES {
        let case = format!("rtt-{size}");
        if is_wanted(&case) {
            rows.extend(trips(&case, size, &both, effort, interrupt)?);
        }
    }
    for (way, name) in WAYS {
        let case = format!("host-cpu-{name}");
        if is_wanted(&case) {
            rows.extend(host_cpu(&case, way, &both, effort, interrupt)?);
        }
    }
    for (way, name) in WAYS {
        let case = format!("interrupts-per-packet-{name}");
        if is_wanted(&case) {
            rows.extend(interrupts(&case, way, &both, effort, interrupt)?);
        }
    }
    for size in VM_SIZES {
        let case = flood_name(size);
        if is_wanted(&case) {
            rows.extend(floods(&case, size as usize, &both, effort, interrupt)?);
        }
    }
    if is_wanted(idle::ONE) {
        rows.push(idle::one(&both.ours)?);
    }
    Ok(rows)
}

/// Runs `measure` for both systems, once a round, in turns.
fn in_turns<T>(
    both: &Both,
    effort: Effort,
    interrupt: &Interrupt,
    measure: impl FnMut(&Machine) -> Result<T>,
) -> Result<[Vec<T>; 2]> {
    rounds([&both.ours, &both.theirs], effort, interrupt, measure)
}

/// Runs `measure` for each machine, once a round, in turns.
fn rounds<T, const N: usize>(
    machines: [&Machine; N],
    effort: Effort,
    interrupt: &Interrupt,
    mut measure: impl FnMut(&Machine) -> Result<T>,
) -> Result<[Vec<T>; N]> {
    let mut all = [const { Vec::new() }; N];
    for _ in 0..effort.rounds {
        for (machine, measured) in machines.into_iter().zip(&mut all) {
            interrupt.check()?;
            measured.push(measure(machine)?);
        }
    }
    Ok(all)
}

/// Measures round trips of datagrams from the namespace to the guest and back, one at a time.
fn trips(case: &str, size: usize, both: &Both, effort: Effort, interrupt: &Interrupt) -> Result<Vec<Row>> {
    let mtu = MTUS[usize::from(size > 1518)];
    let machines = [&both.ours, &both.theirs];
    for machine in machines {
        machine.set_mtu(mtu)?;
    }
    let mut shells = Vec::new();
    for machine in machines {
        let mut shell = machine.shell()?.run(&format!("/program echo {ECHO}"))?;
        shell.line()?;
        shells.push(shell);
    }
    let sampled = in_turns(both, effort, interrupt, |machine| machine.within(|| ping_pong(size, effort.trips))?);
    for machine in machines {
        machine.shell()?.run("killall program && echo done")?.line()?;
        machine.set_mtu(MTUS[0])?;
    }
    let [ours, theirs] = sampled?.map(|rounds| {
        let mut all = Sample::new();
        rounds.iter().for_each(|round| all.merge(round));
        all
    });
    let peers = Row::round_trip(case, &theirs);
    let mut rows = Row::round_trip(case, &ours);
    for (row, peer) in rows.iter_mut().zip(peers) {
        *row = row.clone().against(PEER, Kind::Peer, peer.value);
    }
    if size <= 1518 {
        let paper = VM.best("rtt").context("the paper has round trips")?;
        rows[0] = rows[0].clone().against("paper", Kind::Paper, paper);
    }
    let lost = ours.numbers("lost").iter().chain(theirs.numbers("lost")).sum::<f64>();
    ensure!(lost == 0.0, "{case}: {lost} frames were lost");
    eprintln!(
        "{case} · {:.0} µs, QEMU's TAP {:.0}",
        ours.summary().p50 as f64 / 1e3,
        theirs.summary().p50 as f64 / 1e3
    );
    Ok(rows)
}

/// Sends `trips` numbered datagrams, each after the answer to the one before.
fn ping_pong(size: usize, trips: u32) -> Result<Sample> {
    let socket = UdpSocket::bind((std::net::Ipv4Addr::from(HOST), 0))?;
    socket.connect(SocketAddr::from((GUEST, ECHO)))?;
    socket.set_read_timeout(Some(SILENCE))?;
    let (mut datagram, mut back) = (vec![0x5a; size - AROUND], vec![0; size]);
    let (mut sample, mut lost) = (Sample::new(), 0.0);
    let warmup = trips / 10;
    for number in 0..warmup + trips {
        datagram[..4].copy_from_slice(&number.to_be_bytes());
        let start = Instant::now();
        socket.send(&datagram)?;
        loop {
            match socket.recv(&mut back) {
                Ok(len) if back[..len] == datagram[..] => break,
                // The answer to an earlier one.
                Ok(_) => {}
                Err(_) => {
                    lost += 1.0;
                    break;
                }
            }
        }
        if number >= warmup {
            sample.record(start.elapsed());
        }
    }
    sample.note("lost", lost);
    Ok(sample)
}

/// What one measurement under traffic found.
#[derive(Debug)]
struct Traffic {
    sent: u64,
    came: u64,
    /// Frames that crossed the guest's card, and its interrupts.
    frames: u64,
    interrupts: u64,
    /// Shares of a core in the middle of the traffic.
    shares: Shares,
}

/// Sends datagrams one way for as long as `watched` and [`MORE`]; `rate` 0: as fast as it goes. Reads the CPU time of
/// `parties` meanwhile.
fn traffic(machine: &Machine, way: Way, rate: u32, watched: Duration, parties: &[Party]) -> Result<Traffic> {
    let shell = machine.shell()?;
    let seconds = watched + MORE;
    let bytes = LEN - AROUND;
    let count = AtomicU64::new(0);
    let command = match way {
        Way::ToGuest => format!("/program receive {COUNTS}"),
        Way::ToHost => {
            let host = HOST.map(|byte| byte.to_string()).join(".");
            format!("/program send {host}:{COUNTS} {bytes} {rate} {}", seconds.as_secs())
        }
    };
    std::thread::scope(|scope| {
        let (mut shell, far) = match way {
            Way::ToGuest => {
                let mut shell = shell.run(&command)?;
                shell.line()?;
                let socket = machine.within(|| UdpSocket::bind((std::net::Ipv4Addr::from(HOST), 0)))??;
                socket.connect(SocketAddr::from((GUEST, COUNTS)))?;
                (shell, scope.spawn(|| send(socket, bytes, rate, seconds, &count)))
            }
            Way::ToHost => {
                let socket = machine.within(|| UdpSocket::bind((std::net::Ipv4Addr::from(HOST), COUNTS)))??;
                let far = scope.spawn(|| receive(socket, &count));
                (shell.run(&command)?, far)
            }
        };
        let begun = Instant::now();
        while count.load(Relaxed) == 0 {
            ensure!(begun.elapsed() < SILENCE * 10, "no traffic begins");
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(SILENCE);
        let before = Reading::take(parties)?;
        std::thread::sleep(watched);
        let shares = before.until(&Reading::take(parties)?);
        let here = far.join().map_err(|_| anyhow::anyhow!("the thread of the traffic panicked"))??;
        let line = shell.line()?;
        let said = |name: &str| -> Result<u64> {
            let mut words = line.split(' ').skip_while(|word| *word != name).skip(1);
            words.next().and_then(|word| word.parse().ok()).with_context(|| format!("the guest says {line}"))
        };
        let there = said("datagrams")?;
        let (sent, came, frames) = match way {
            // The guest counts from the second one on.
            Way::ToGuest => (here - 1, there, said("received")?),
            Way::ToHost => (there, here, said("sent")?),
        };
        Ok(Traffic { sent, came, frames, interrupts: said("interrupts")?, shares })
    })
}

/// Sends datagrams at even distances.
fn send(socket: UdpSocket, bytes: usize, rate: u32, seconds: Duration, count: &AtomicU64) -> Result<u64> {
    rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1))?;
    let datagram = vec![0x5a; bytes];
    let gap = Duration::from_secs(1).checked_div(rate).unwrap_or_default();
    let (begun, mut sent) = (Instant::now(), 0);
    let mut due = begun;
    while due < begun + seconds && begun.elapsed() < seconds {
        socket.send(&datagram)?;
        sent += 1;
        count.store(sent, Relaxed);
        due += gap;
        if rate > 0 {
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
        }
    }
    Ok(sent)
}

/// Counts datagrams until none has come for a while.
fn receive(socket: UdpSocket, count: &AtomicU64) -> Result<u64> {
    let mut room = vec![0; 64 << 10];
    socket.set_read_timeout(Some(SILENCE * 10))?;
    let mut came = 0;
    while socket.recv(&mut room).is_ok() {
        if came == 0 {
            socket.set_read_timeout(Some(SILENCE))?;
        }
        came += 1;
        count.store(came, Relaxed);
    }
    Ok(came)
}

/// Returns the parties of all systems, and of the traffic.
fn parties(both: &Both) -> Result<Vec<Party>> {
    let mut all = Vec::new();
    let patient = both.patient.as_ref().map(|machine| ("patient", machine));
    for (name, machine) in [("ours", &both.ours), ("theirs", &both.theirs)].into_iter().chain(patient) {
        let qemu = |what: &str, threads| Party { name: format!("{name}: {what}"), pid: machine.qemu(), threads };
        all.extend([qemu("vcpu", Threads::Vcpus), qemu("QEMU", Threads::NoVcpus)]);
        if let Some(system) = &machine.system {
            let its = |party: Party| Party { name: format!("{name}: {}", party.name), ..party };
            all.extend(idle::daemon(system)?.into_iter().map(its));
        }
    }
    all.push(Party { name: "the traffic's program".to_owned(), pid: std::process::id(), threads: Threads::All });
    Ok(all)
}

/// What a system costs its host beyond its idle state.
struct Cost {
    /// All but the virtual CPUs, and the same without the traffic's program.
    host: f64,
    system: f64,
    parts: Vec<f64>,
}

fn cost(parties: &[Party], idle: &Shares, busy: &Shares) -> Cost {
    let parts: Vec<_> = busy.parties.iter().zip(&idle.parties).map(|(busy, idle)| busy - idle).collect();
    let of = |is: &dyn Fn(&Party) -> bool| -> f64 {
        parties.iter().zip(&parts).filter(|(party, _)| is(party)).map(|(_, part)| part).sum()
    };
    let host = busy.machine - idle.machine - of(&|party| party.threads == Threads::Vcpus);
    Cost { host, system: host - of(&|party| party.pid == std::process::id()), parts }
}

/// Says who used how much of a core.
fn told(parties: &[Party], host: f64, parts: &[f64]) -> String {
    let parts = parties.iter().zip(parts).filter(|(_, part)| **part > 0.002);
    let parts: Vec<_> = parts.map(|(party, part)| format!("{} {:.1} %", party.name, part * 100.0)).collect();
    format!("all but the virtual CPUs {:.1} %: {}", host * 100.0, parts.join(", "))
}

/// Measures the host's CPU time at a fixed rate.
fn host_cpu(case: &str, way: Way, both: &Both, effort: Effort, interrupt: &Interrupt) -> Result<Vec<Row>> {
    let parties = parties(both)?;
    std::thread::sleep(SILENCE);
    let idle = watch(&parties, effort.watched)?;
    let costs = in_turns(both, effort, interrupt, |machine| {
        let traffic = traffic(machine, way, RATE, effort.watched, &parties)?;
        let lost = traffic.sent.saturating_sub(traffic.came);
        let cost = cost(&parties, &idle, &traffic.shares);
        eprintln!("{case} · {} sent, {lost} lost · {}", traffic.sent, told(&parties, cost.host, &cost.parts));
        Ok((cost, lost))
    })?;
    let lost: u64 = costs.iter().flatten().map(|(_, lost)| lost).sum();
    let figure = |of: fn(&Cost) -> f64| -> Result<[f64; 2]> {
        let middle = |costs: &Vec<(Cost, u64)>| {
            let all: Vec<_> = costs.iter().map(|(cost, _)| of(cost) * 100.0).collect();
            median(&all).context("there was no round")
        };
        Ok([middle(&costs[0])?, middle(&costs[1])?])
    };
    let [ours, theirs] = figure(|cost| cost.host)?;
    let mut host =
        Row::lower(case, "host_cpu", "% of a core", ours).against(PEER, Kind::Peer, theirs).bar(0.5, PEER)?;
    host.note = Some(format!("{RATE} frames/s of {LEN} B, {lost} lost; all but the virtual CPUs"));
    let [ours, theirs] = figure(|cost| cost.system)?;
    let mut system = Row::lower(case, "without_traffic", "% of a core", ours).against(PEER, Kind::Peer, theirs);
    system.note = Some("without the program that sends or counts".to_owned());
    Ok(vec![host, system])
}

/// Measures interrupts of the guest while the sender does all it can.
fn interrupts(case: &str, way: Way, both: &Both, effort: Effort, interrupt: &Interrupt) -> Result<Vec<Row>> {
    let parties = parties(both)?;
    let watched = effort.watched / 2;
    let idle = watch(&parties, watched)?;
    let measured = in_turns(both, effort, interrupt, |machine| {
        let traffic = traffic(machine, way, 0, watched, &parties)?;
        ensure!(traffic.frames > 0, "{case}: no frame crossed");
        let rate = traffic.frames as f64 / (watched + MORE).as_secs_f64();
        let share = traffic.interrupts as f64 / traffic.frames as f64;
        let cost = cost(&parties, &idle, &traffic.shares);
        let used = told(&parties, cost.host, &cost.parts);
        eprintln!("{case} · one in {:.0} at {:.1} kpps · {used}", 1.0 / share, rate / 1e3);
        Ok([share, rate, cost.host / rate * 1e9])
    })?;
    let middle = |which: usize, number: usize| {
        let all: Vec<_> = measured[which].iter().map(|numbers| numbers[number]).collect();
        median(&all).context("there was no round")
    };
    let row = Row::lower(case, "interrupts", "per frame", middle(0, 0)?);
    let mut row = row.against(PEER, Kind::Peer, middle(1, 0)?).bar_at(1.0 / 16.0);
    row.note = Some(format!("{LEN} B, as fast as TCG lets the guest go"));
    let rate = Row::higher(case, "pps", "frames/s", middle(0, 1)?).against(PEER, Kind::Peer, middle(1, 1)?);
    let cpu = Row::lower(case, "cpu_per_frame", "ns", middle(0, 2)?).against(PEER, Kind::Peer, middle(1, 2)?);
    Ok(vec![row, rate, cpu])
}

fn lost_of(floods: &[Flood]) -> u64 {
    floods.iter().map(|flood| flood.lost).sum()
}

fn middle_of(floods: &[Flood], of: impl Fn(&Flood) -> f64) -> Result<f64> {
    median(&floods.iter().map(of).collect::<Vec<_>>()).context("there was no round")
}

/// Share of the slower system's highest rate at which the CPU time of both is compared, as the paper did (S3, Figure 12).
const NEAR: f64 = 0.8;

/// Measures the frames of the guest's pktgen that arrive, and then the host's CPU time at a rate near the limit of the
/// slower system.
fn floods(case: &str, size: usize, both: &Both, effort: Effort, interrupt: &Interrupt) -> Result<Vec<Row>> {
    let parties = parties(both)?;
    let idle = watch(&parties, effort.watched)?;
    let measure =
        |rate| in_turns(both, effort, interrupt, |it| pktgen::flood(it, size, rate, effort.watched, &parties));
    let lost = |floods: &[Vec<Flood>; 2]| {
        let [ours, theirs] = floods.each_ref().map(|floods| lost_of(floods));
        format!("{ours} lost, by QEMU's TAP {theirs}")
    };
    let highest = measure(None)?;
    let [ours, theirs] = [middle_of(&highest[0], |flood| flood.rate)?, middle_of(&highest[1], |flood| flood.rate)?];
    eprintln!("{case} · {:.1} kpps, QEMU's TAP {:.1}; {}", ours / 1e3, theirs / 1e3, lost(&highest));
    let paper = VM.best("pps").context("the paper has a rate")?;
    let row = Row::higher(case, "pps", "frames/s", ours).against(PEER, Kind::Peer, theirs);
    let mut pps = row.against("paper", Kind::Paper, paper);
    pps.note = Some(format!("as fast as TCG lets the guest go; {}", lost(&highest)));

    let rate = NEAR * ours.min(theirs);
    let patient = both.patient.as_ref().context("a system with the longer latency runs")?;
    let machines = [&both.ours, patient, &both.theirs];
    let send = |it: &Machine| pktgen::flood(it, size, Some(rate), effort.watched, &parties);
    let paced = rounds(machines, effort, interrupt, send)?;
    let [usual, longer] = LATENCIES_US;
    let names = [format!("latency_us = {usual}"), format!("latency_us = {longer}"), "QEMU's TAP".to_owned()];
    let mut shares = [0.0; 3];
    for ((name, floods), share) in names.iter().zip(&paced).zip(&mut shares) {
        *share = middle_of(floods, |flood| cost(&parties, &idle, &flood.shares).host * 100.0)?;
        let rate = middle_of(floods, |flood| flood.rate / 1e3)?;
        eprintln!("{case} · {name} · {share:.1} % of a core at {rate:.1} kpps, {} lost", lost_of(floods));
        if let Some(flood) = floods.last() {
            let cost = cost(&parties, &idle, &flood.shares);
            eprintln!("{case} · {name} · {}", told(&parties, cost.host, &cost.parts));
        }
    }
    let [ours, patient, theirs] = shares;
    let cpu = |metric: &'static str, latency: u32, ours: f64, paced: &[Flood]| -> Result<Row> {
        let row = Row::lower(case, metric, "% of a core", ours).against(PEER, Kind::Peer, theirs);
        let lost = lost_of(paced);
        let note = format!("latency_us = {latency}; {rate:.0} frames/s, {lost} lost; all but the virtual CPUs");
        Ok(Row { note: Some(note), ..row.bar(0.5, PEER)? })
    };
    let cpus = [cpu("host_cpu", usual, ours, &paced[0])?, cpu("host_cpu_patient", longer, patient, &paced[1])?];
    Ok([pps].into_iter().chain(cpus).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_means_one_case() {
        let names: std::collections::BTreeSet<_> = names().collect();
        assert_eq!(names.len(), SIZES.len() + 2 * WAYS.len() + VM_SIZES.len() + 2);
    }

    #[test]
    fn the_virtual_cpus_and_what_was_there_before_are_no_cost() {
        let party = |pid, threads| Party { name: String::new(), pid, threads };
        let vm = |pid| [party(pid, Threads::Vcpus), party(pid, Threads::NoVcpus)];
        let traffic = party(std::process::id(), Threads::All);
        let parties = [vm(1), vm(2), [traffic, party(3, Threads::All)]].concat();
        let shares = |machine, parties: [f64; 6]| Shares { machine, parties: parties.to_vec() };
        let idle = shares(0.1, [0.02, 0.01, 0.02, 0.01, 0.0, 0.01]);
        let busy = shares(1.5, [0.92, 0.11, 0.03, 0.01, 0.2, 0.11]);
        let cost = cost(&parties, &idle, &busy);
        assert!((cost.host - 0.49).abs() < 1e-9 && (cost.system - 0.29).abs() < 1e-9, "{} {}", cost.host, cost.system);
    }
}
