//! Frames at even distances from one machine to another, each with a worker of its own: what the workers' CPUs cost at
//! each rate, and how long a frame takes. The machines are front ends of our own, which never sleep.
//!
//! Each rate is measured with nodes that let frames wait for each other, and with nodes that do not (`latency_us = 0`).

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tasuki_net::endpoint::guest::device::{FROM_GUEST, TO_GUEST};

use super::cpu::{Party, Reading, Threads};
use super::front::{Front, PAYLOAD, frame, turn};
use super::machine::node;
use crate::cpus::{self, Cpus};
use crate::interrupt::Interrupt;
use crate::program::PATIENCE;
use crate::relay::system::System;
use crate::report::{Kind, Row};
use crate::sample::{Sample, Summary};
use crate::workplace::Workplace;

/// Thousands of frames a second.
pub const RATES: [u32; 6] = [4, 20, 50, 100, 200, 400];

/// Name of the nodes whose frames do not wait.
pub const AT_ONCE: &str = "at-once";

/// Number of descriptors of a ring, and bytes of a buffer.
const SIZE: u16 = 256;
const BUFFER: usize = 256;

/// Names of the nodes: the one that sends, and the one that receives.
const NODES: [&str; 2] = ["from", "to"];

/// Length of one measurement.
const QUICK: Duration = Duration::from_millis(500);
const FULL: Duration = Duration::from_secs(4);

pub fn names() -> impl Iterator<Item = String> {
    RATES.into_iter().map(name)
}

fn name(rate: u32) -> String {
    format!("load-{rate}k")
}

/// Two machines on a VNI. The first one sends.
pub struct Pair {
    pub fronts: [Front; 2],
    pub system: System,
    /// The worker of each that drives.
    pub workers: Vec<Party>,
    _place: Workplace,
}

/// What one measurement found.
struct Found {
    /// CPU time of each worker, as a share of a core.
    shares: Vec<f64>,
    took: Summary,
    frames: u64,
    /// Frames that did not come, or found no room in the ring of the machine that sends.
    lost: u64,
    kicks: u64,
    interrupts: u64,
}

impl Pair {
    /// Starts nodes with this line in their configuration, whose workers have these CPUs, and machines with rings of `size`
    /// descriptors with a buffer of `buffer` bytes each.
    pub fn start(key: &str, cpus: [usize; 2], size: u16, buffer: usize) -> Result<Self> {
        let place = Workplace::new()?;
        let sockets = NODES.map(|name| place.directory().join(format!("{name}.sock")));
        let nodes = [0, 1].map(|which| {
            let node = node(NODES[which], &sockets[which]);
            node.replacen("vni", &format!("cpu = {}\n{key}vni", cpus[which]), 1)
        });
        let system = System::configured(place.directory(), &nodes.concat())?;
        NODES.into_iter().try_for_each(|name| system.await_pair(name))?;
        let [from, to] = sockets.map(|socket| Front::connect(&socket, 1, size, buffer));
        let mut fronts = [from?, to?];
        for front in &mut fronts {
            front.post_all()?;
            front.describe_rings()?;
            front.enable(front.rings() - 1)?;
        }
        let workers = system.workers()?.into_iter().filter(|worker| worker.is == "drives");
        let party = |name: String, pid| Party { name, pid, threads: Threads::All };
        let workers = workers.map(|worker| party(worker.node, worker.pid)).collect();
        let mut pair = Pair { fronts, system, workers, _place: place };
        pair.await_first()?;
        Ok(pair)
    }

    /// Waits until a frame has crossed.
    fn await_first(&mut self) -> Result<()> {
        let began = Instant::now();
        // Both ways: where a machine's address has not been heard from, frames for it go to all, and wait for nobody.
        let mut back = frame(0);
        turn(&mut back);
        for (from, frame) in [(0, frame(0)), (1, back)] {
            loop {
                self.fronts[from].send(0, &frame)?;
                thread::sleep(Duration::from_millis(50));
                while self.fronts[from].is_used(FROM_GUEST) {}
                let mut came = 0;
                while self.fronts[1 - from].receive(0)?.is_some() {
                    came += 1;
                }
                if came > 0 {
                    break;
                }
                ensure!(began.elapsed() < PATIENCE, "no frame crosses: {}", self.system.log("vm"));
            }
        }
        Ok(())
    }

    /// Sends frames at this rate for some time.
    fn measure(&mut self, rate: u32, time: Duration, interrupt: &Interrupt) -> Result<Found> {
        let every = Duration::from_secs(1) / (1000 * rate);
        let [from, to] = &mut self.fronts;
        let (mut sample, mut sent, mut came, mut lost) = (Sample::new(), 0_u64, 0_u64, 0_u64);
        let kicked = from.kicked;
        to.interrupts(TO_GUEST);
        let before = Reading::take(&self.workers)?;
        let began = Instant::now();
        let mut next = Duration::ZERO;
        let mut packet = frame(0);
        loop {
            let now = began.elapsed();
            if now >= next && next < time {
                next += every;
                while from.is_used(FROM_GUEST) {}
                if from.room(FROM_GUEST) > 0 {
                    let ns = u64::try_from(now.as_nanos())?;
                    packet[PAYLOAD..PAYLOAD + 8].copy_from_slice(&ns.to_le_bytes());
                    from.send(0, &packet)?;
                    sent += 1;
                } else {
                    lost += 1;
                }
            }
            while let Some(packet) = to.receive(0)? {
                let ns = packet[PAYLOAD..PAYLOAD + 8].try_into().context("there are eight bytes")?;
                sample.record(began.elapsed().saturating_sub(Duration::from_nanos(u64::from_le_bytes(ns))));
                came += 1;
            }
            if next >= time && (came == sent || began.elapsed() > time + Duration::from_millis(20)) {
                break;
            }
            if sent.is_multiple_of(4096) {
                interrupt.check()?;
            }
        }
        let shares = before.until(&Reading::take(&self.workers)?).parties;
        Ok(Found {
            shares,
            took: sample.summary(),
            frames: sent,
            lost: lost + sent - came,
            kicks: from.kicked - kicked,
            interrupts: to.interrupts(TO_GUEST),
        })
    }
}

/// Returns the CPU of each worker. Where there is no third one, both share one.
pub fn of_workers(cpus: Cpus) -> Result<[usize; 2]> {
    Ok([cpus.server, cpus.third()?.unwrap_or(cpus.server)])
}

/// Measures, and makes the rows.
pub fn rows(is_quick: bool, is_wanted: impl Fn(&str) -> bool, interrupt: &Interrupt) -> Result<Vec<Row>> {
    let cpus = Cpus::choose()?;
    let others = of_workers(cpus)?;
    let time = if is_quick { QUICK } else { FULL };
    let mut rows = Vec::new();
    // Each pair in its turn: the other one's workers sleep.
    let mut pairs = ["", "latency_us = 0\n"]
        .map(|key| Pair::start(key, others, SIZE, BUFFER))
        .into_iter()
        .collect::<Result<Vec<_>>>()?;
    cpus::pin(cpus.client)?;
    for rate in RATES.into_iter().filter(|rate| is_wanted(&name(*rate))) {
        let mut found = Vec::new();
        for pair in &mut pairs {
            // The workers have gone to sleep by then.
            thread::sleep(Duration::from_millis(200));
            found.push(pair.measure(rate, time, interrupt)?);
        }
        for (which, found) in ["default", "at once"].into_iter().zip(&found) {
            let Found { shares, took, frames, lost, kicks, interrupts } = found;
            let [from, to] = [0, 1].map(|worker| shares.get(worker).copied().unwrap_or_default() * 100.0);
            let each = |count: &u64| *count as f64 / *frames as f64;
            eprintln!(
                "{} {which} · workers {from:.1} and {to:.1} % · p50 {:.1}, p99 {:.1} µs · {lost} of {frames} lost · {:.3} kicks, {:.3} interrupts a frame",
                name(rate),
                took.p50 as f64 / 1e3,
                took.p99 as f64 / 1e3,
                each(kicks),
                each(interrupts),
            );
        }
        let [ours, at_once] = &found[..] else { continue };
        let share = |found: &Found| found.shares.iter().sum::<f64>() * 100.0;
        let case = name(rate);
        rows.push(Row::lower(&case, "cpu", "% of a core", share(ours)).against(AT_ONCE, Kind::Floor, share(at_once)));
        for (metric, ours, at_once) in
            [("p50", ours.took.p50, at_once.took.p50), ("p99", ours.took.p99, at_once.took.p99)]
        {
            rows.push(Row::lower(&case, metric, "ns", ours as f64).against(AT_ONCE, Kind::Floor, at_once as f64));
        }
    }
    cpus::unpin()?;
    Ok(rows)
}
