//! Rows of the VNI cases, beside floors, peers, the paper and bars.

use anyhow::{Context, Result};

use super::netns::{self, Rates, Traffic};
use super::{idle, memory};
use crate::distance::{self, Pairs, Round};
use crate::floors::PING_PONG;
use crate::interrupt::Interrupt;
use crate::papers::MINT_VNI;
use crate::report::{Kind, Row};
use crate::rounds::{Effort, Samples};
use crate::sample::{Sample, median};

/// Floor of sleeping round trips: each of the two processes is woken once.
pub const EVENTFD: &str = "eventfd-other-core";

/// Floor of frames between namespaces by workers.
const NETNS_FLOOR: &str = "read-write";

const MIB: f64 = (1 << 20) as f64;

/// Bars of the frame rates, as multiples of the rate of `memif`.
pub const MEMIF_BARS: [(&str, f64); 3] = [("copy-64", 1.3), ("copy-1518", 1.5), ("inplace-1518", 3.0)];

pub fn rows(samples: &Samples, effort: Effort, interrupt: &Interrupt) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for len in [64, 1518, 15_000] {
        for way in ["copy", "inplace"] {
            rows.extend(frames(samples, way, len)?);
        }
    }
    for len in [64, 1518] {
        rows.extend(trips(samples, len, "")?);
        rows.extend(trips(samples, len, "-interrupt")?);
    }
    rows.extend(memory_rows(samples)?);
    rows.extend(idle_rows(samples)?);
    rows.extend(rows_of_namespaces(effort, interrupt)?);
    Ok(rows)
}

/// Measures `iperf3` between two namespaces, and makes its rows.
pub fn rows_of_namespaces(effort: Effort, interrupt: &Interrupt) -> Result<Vec<Row>> {
    let long = if effort.full { (5, 7) } else { (2, 1) };
    let mut rows = between_namespaces(Traffic::Tcp, mint("tcp-new")?, 0.8, long, interrupt)?;
    rows.extend(between_namespaces(Traffic::Udp, mint("udp-new")?, 1.0, long, interrupt)?);
    for (traffic, paper) in [(Traffic::Tcp, "tcp-new"), (Traffic::Udp, "udp-new")] {
        rows.extend(receives(traffic, mint(paper)?, long.1, interrupt)?);
    }
    Ok(rows)
}

/// Returns a figure of Mint's improved VNI (S2).
fn mint(what: &str) -> Result<f64> {
    MINT_VNI.best(what).with_context(|| format!("the paper has no {what}"))
}

/// Returns whether `prefix` selects a case of namespaces. Prefixes of one or two letters do not: they could mean
/// other cases.
pub fn is_of_namespaces(prefix: &str) -> bool {
    prefix.len() > 2 && [Traffic::Tcp, Traffic::Udp].iter().any(|traffic| traffic.case().starts_with(prefix))
}

/// Compares a row, made of the number `number` of `ours`, with the same number of the case `theirs`, if that was
/// run. `scale` converts the number to the row's unit.
fn beside(
    row: Row,
    (ours, number, scale): (&Sample, &str, f64),
    name: &str,
    kind: Kind,
    theirs: Option<&Sample>,
) -> Row {
    let Some(theirs) = theirs else { return row };
    beside_rounds(row, &distance::rounds(ours, number), (name, kind), &distance::rounds(theirs, number), scale)
}

fn beside_rounds(row: Row, ours: &[Round], (name, kind): (&str, Kind), theirs: &[Round], scale: f64) -> Row {
    let values: Vec<_> = theirs.iter().map(|round| round.value).collect();
    let Some(value) = median(&values) else { return row };
    let pairs = Pairs::of(ours, theirs);
    row.against_in_pairs(name, kind, value * scale, pairs.ratio(), pairs.told())
}

/// Makes the rows of frames a second, and of the bits in them.
fn frames(samples: &Samples, way: &str, len: u32) -> Result<Vec<Row>> {
    let case = format!("{way}-{len}");
    let sample = samples.of(&case)?;
    let rate = sample.median("rate")?;
    let bits = f64::from(len) * 8.0 / 1e9;
    let floor = samples.find(&format!("memcpy-{len}"));
    let memif = samples.find(&if way == "copy" { format!("memif-{len}") } else { format!("memif-{case}") });
    let ours = (sample, "rate", 1.0);
    let mut pps = Row::higher(&case, "pps", "frames/s", rate);
    pps = beside(pps, ours, "memcpy", Kind::Floor, floor);
    pps = beside(pps, ours, "memif", Kind::Peer, memif);
    if let Some((_, factor)) = MEMIF_BARS.iter().find(|(name, _)| *name == case).filter(|_| memif.is_some()) {
        pps = pps.bar(*factor, "memif")?;
    }
    if case == "copy-1518" {
        pps = beside(pps, ours, "mint-buffers", Kind::Peer, Some(mint_buffers(samples)?)).bar(5.0, "mint-buffers")?;
    }
    let mut gbps = Row::higher(&case, "gbps", "Gb/s", rate * bits);
    if len == 15_000 {
        // That measurement sent as many bytes at a time.
        gbps = gbps.against("mint", Kind::Paper, mint("udp-new")?);
    }
    if case == "inplace-15000" {
        gbps = beside(gbps, (sample, "rate", bits), "memcpy", Kind::Floor, floor);
        gbps = gbps.bar_at_or(mint("udp-new")?, 0.8, "memcpy")?;
    }
    Ok(vec![pps, gbps])
}

/// Returns the faster of the two ways to lock Mint's buffers.
fn mint_buffers(samples: &Samples) -> Result<&Sample> {
    let (locked, free) = (samples.of("mint-locked")?, samples.of("mint-free")?);
    Ok(if locked.median("rate")? >= free.median("rate")? { locked } else { free })
}

/// Makes the rows of a frame's round trips.
fn trips(samples: &Samples, len: u32, how: &str) -> Result<Vec<Row>> {
    let case = format!("rtt-{len}{how}");
    let sample = samples.of(&case)?;
    let mut rows = Row::round_trip(&case, sample);
    let mut row = rows.remove(0);
    row = if how.is_empty() {
        // The round trip of a line was measured before and after each run.
        let (ours, floor) = (distance::rounds(sample, "p50"), distance::as_floor(sample));
        let row = beside_rounds(row, &ours, (PING_PONG, Kind::Floor), &floor, 1.0);
        // Only a frame of 64 bytes has a bar: larger ones move more than one line.
        if len == 64 { row.bar(3.0, PING_PONG)? } else { row }
    } else {
        beside(row, (sample, "p50", 1.0), "eventfd", Kind::Floor, Some(samples.of(EVENTFD)?)).bar(1.2, "eventfd")?
    };
    for peer in ["veth", "unix"] {
        row = beside(row, (sample, "p50", 1.0), peer, Kind::Peer, samples.find(&format!("{peer}-{len}{how}")));
    }
    rows.insert(0, row);
    Ok(rows)
}

fn memory_rows(samples: &Samples) -> Result<Vec<Row>> {
    let case = format!("memory-{}", memory::NODES);
    let Some(sample) = samples.find(&case) else { return Ok(Vec::new()) };
    let mut rows = Vec::new();
    let nodes = f64::from(memory::NODES);
    let pool = memory::POOL as f64;
    for who in memory::WHO {
        let (whole, allocated) = (sample.median(who)?, sample.median(&format!("{who}-allocated"))?);
        let case = format!("{case}-{who}");
        let mut row = Row::lower(&case, "memory", "MiB", whole / MIB).against("mint", Kind::Paper, mint("memory-100")?);
        row = row.bar_at(nodes * pool / MIB + 40.0);
        row.note = Some("with whole pools, since they go round".to_owned());
        rows.extend([row, Row::lower(&case, "allocated", "MiB", allocated / MIB)]);
    }
    let each = sample.median(memory::WHO[0])? / nodes;
    let most = (pool + f64::from(32 << 10)) / MIB;
    rows.push(Row::lower(&format!("{case}-silent-each"), "memory", "MiB", each / MIB).bar_at(most));
    Ok(rows)
}

fn idle_rows(samples: &Samples) -> Result<Vec<Row>> {
    let case = format!("idle-{}", idle::NODES);
    let Some(sample) = samples.find(&case) else { return Ok(Vec::new()) };
    let mut row = Row::lower(&case, "cpu", "% of a core", sample.median("cpu")? * 100.0).bar_at(1.0);
    row.note = Some("all nodes together, each a process".to_owned());
    Ok(vec![row])
}

fn between_namespaces(
    traffic: Traffic,
    paper: f64,
    bar: f64,
    (seconds, rounds): (u32, u32),
    interrupt: &Interrupt,
) -> Result<Vec<Row>> {
    let Some(rates) = netns::compare(traffic, seconds, rounds, interrupt)? else { return Ok(Vec::new()) };
    rates_as_rows(traffic, &rates, paper, bar)
}

/// Makes the rows of receives that are timed as the paper did.
fn receives(traffic: Traffic, paper: f64, rounds: u32, interrupt: &Interrupt) -> Result<Vec<Row>> {
    let Some([ours, veth]) = netns::compare_receives(traffic, rounds, interrupt)? else { return Ok(Vec::new()) };
    let (lost, lost_by_veth) = (ours.lost, veth.lost);
    let rows = ["gbps", "gbps_arrived"].into_iter().zip(ours.medians()?).zip(veth.medians()?);
    let rows = rows.map(|((metric, ours), veth)| {
        let mut row = Row::higher(traffic.receives(), metric, "Gb/s", ours / 1e9);
        row.note = Some(format!("trials that lost bytes do not count: {lost} here, {lost_by_veth} over veth"));
        row.against("veth", Kind::Peer, veth / 1e9).against("mint", Kind::Paper, paper)
    });
    Ok(rows.collect())
}

fn rates_as_rows(traffic: Traffic, rates: &Rates, paper: f64, bar: f64) -> Result<Vec<Row>> {
    let of = |rates: &[f64]| median(rates).map(|rate| rate / 1e9).context("there was no round");
    let (ours, by_workers, floor, veth) =
        (of(&rates.vni)?, of(&rates.by_workers)?, of(&rates.floor)?, of(&rates.veth)?);
    let row = |case: &str, rate| {
        let row = Row::higher(case, "gbps", "Gb/s", rate);
        row.against("veth", Kind::Peer, veth).against("mint", Kind::Paper, paper)
    };
    let mut through_pools = row(&format!("{}-by-workers", traffic.case()), by_workers);
    through_pools.note = Some("as when one of the two is not a namespace, or takes no shortcut".to_owned());
    // The two ran one after the other in each round.
    let ratios: Vec<_> = rates.by_workers.iter().zip(&rates.floor).map(|(ours, floor)| ours / floor).collect();
    through_pools =
        through_pools.against_in_pairs(NETNS_FLOOR, Kind::Floor, floor, median(&ratios), "round by round".to_owned());
    through_pools = through_pools.bar(0.9, NETNS_FLOOR)?;
    let row = row(traffic.case(), ours).bar(bar, "veth")?;
    let row = if traffic == Traffic::Tcp { row.bar_at(paper) } else { row };
    Ok(vec![row, through_pools])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_are_held_against_their_floor_round_by_round() {
        // The machine's speed changes between rounds: the median of the ratios is 0.91, and the medians' ratio 0.48.
        let rates = Rates {
            vni: vec![20e9; 3],
            by_workers: vec![9.1e9, 9.5e9, 18.5e9],
            floor: vec![10e9, 20e9, 20e9],
            veth: vec![20e9; 3],
        };
        let judged = |rates: &Rates| {
            let rows = rates_as_rows(Traffic::Udp, rates, 75.0, 1.0).unwrap();
            let row = rows.iter().find(|row| row.case == "udp-netns-by-workers").unwrap();
            let floor = row.against.iter().find(|against| against.kind == Kind::Floor).unwrap();
            (floor.ratio.unwrap(), row.bars[0].holds)
        };
        assert_eq!(judged(&rates), (0.91, true));
        let slower = Rates { by_workers: vec![8.9e9, 9.5e9, 18.5e9], ..rates };
        assert_eq!(judged(&slower), (0.89, false));
    }
}
