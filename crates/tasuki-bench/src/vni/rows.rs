//! What the cases come to, beside veth, the paper and bars.

use anyhow::{Context, Result};

use super::netns::{self, Traffic};
use crate::interrupt::Interrupt;
use crate::report::{Kind, Row};
use crate::rounds::{Effort, Samples};

/// What Mint's improved VNI came to (S2, its table): TCP and UDP, in bits a second.
const MINT_TCP: f64 = 10e9;
const MINT_UDP: f64 = 75e9;

/// Bytes that were sent at a time in that measurement.
const MINT_LEN: f64 = 15_000.0;

/// The rows of the bench.
pub fn rows(samples: &Samples, effort: Effort, interrupt: &Interrupt) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for case in super::CASES {
        let (_, len) = case.name.rsplit_once('-').context("a case is named by its frames' length")?;
        let len: f64 = len.parse().context("a case is named by its frames' length")?;
        let mut rates = samples.of(case.name)?.numbers("rate").to_vec();
        let rate = median(&mut rates).context("a case notes its rate")?;
        rows.push(Row::higher(case.name, "pps", "frames/s", rate));
        let bits = Row::higher(case.name, "gbps", "Gb/s", rate * len * 8.0 / 1e9);
        rows.push(if len == MINT_LEN { bits.against("mint", Kind::Paper, MINT_UDP / 1e9) } else { bits });
    }
    let (seconds, rounds) = if effort.full { (10, 5) } else { (3, 2) };
    rows.extend(between_namespaces(Traffic::Tcp, MINT_TCP, 0.8, (seconds, rounds), interrupt)?);
    rows.extend(between_namespaces(Traffic::Udp, MINT_UDP, 1.0, (seconds, rounds), interrupt)?);
    Ok(rows)
}

fn between_namespaces(
    traffic: Traffic,
    paper: f64,
    bar: f64,
    (seconds, rounds): (u32, u32),
    interrupt: &Interrupt,
) -> Result<Option<Row>> {
    let Some(mut rates) = netns::compare(traffic, seconds, rounds, interrupt)? else { return Ok(None) };
    let (ours, veth) = (median(&mut rates.vni), median(&mut rates.veth));
    let (ours, veth) = ours.zip(veth).context("there was no round")?;
    let row = Row::higher(traffic.case(), "gbps", "Gb/s", ours / 1e9);
    let row = row.against("veth", Kind::Peer, veth / 1e9).against("mint", Kind::Paper, paper / 1e9);
    let row = row.bar(bar, "veth")?;
    Ok(Some(if traffic == Traffic::Tcp { row.bar_at(paper / 1e9) } else { row }))
}

fn median(values: &mut [f64]) -> Option<f64> {
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}
