//! Rows of our own calls: each figure beside its fair comparisons, and the bars.

use anyhow::{Context, Result};

use super::idle;
use crate::floors::{PING_PONG, PING_PONG_ONE_LINE, PING_PONG_READ_ONLY, spinning_p50};
use crate::papers::ANT;
use crate::report::{Kind, Row};
use crate::rounds::Samples;
use crate::sample::median;

pub fn rows(samples: &Samples) -> Result<Vec<Row>> {
    let mut rows = spinning(samples)?;
    rows.extend(sleeping(samples)?);
    rows.extend(halves(samples)?);
    rows.push(pipelined(samples)?);
    rows.extend(detached(samples)?);
    rows.extend(idle_rows(samples)?);
    Ok(rows)
}

/// Makes the rows of case `name`; `compare` adds the comparisons to the row of the median.
fn round_trip(samples: &Samples, name: &str, compare: impl FnOnce(Row) -> Result<Row>) -> Result<Vec<Row>> {
    let mut rows = Row::round_trip(name, samples.of(name)?);
    let median = compare(rows.remove(0))?;
    rows.insert(0, median);
    Ok(rows)
}

fn spinning(samples: &Samples) -> Result<Vec<Row>> {
    let (floor, read_only) = (spinning_p50(samples, PING_PONG)?, spinning_p50(samples, PING_PONG_READ_ONLY)?);
    let ant = ANT.best("call").context("the paper has a whole call")?;
    let mut rows = round_trip(samples, "spin-inline", |row| {
        let row = row
            .against(PING_PONG, Kind::Floor, floor)
            .against(PING_PONG_READ_ONLY, Kind::Floor, read_only)
            .against(PING_PONG_ONE_LINE, Kind::Floor, spinning_p50(samples, PING_PONG_ONE_LINE)?)
            .against("ant", Kind::Paper, ant)
            .bar(1.3, PING_PONG)?;
        match cfg!(feature = "peers") {
            true => row
                .against("iceoryx2", Kind::Peer, samples.p50("iceoryx2")?)
                .against("iceoryx2-topics", Kind::Peer, samples.p50("iceoryx2-topics")?)
                .bar(1.0 / 3.0, "iceoryx2"),
            false => Ok(row),
        }
    })?;
    rows.extend(round_trip(samples, "spin-slot", |row| {
        let row = row
            .against(PING_PONG, Kind::Floor, floor)
            .against(PING_PONG_READ_ONLY, Kind::Floor, read_only)
            .against("ant", Kind::Paper, ant);
        let row = match cfg!(feature = "peers") {
            true => row.against("iceoryx2", Kind::Peer, samples.p50("iceoryx2-4k")?),
            false => row,
        };
        row.bar(3.0, PING_PONG)
    })?);
    rows.extend(round_trip(samples, "async", |row| {
        row.against("spin-inline", Kind::Floor, samples.p50("spin-inline")?).bar(1.2, "spin-inline")
    })?);
    Ok(rows)
}

fn sleeping(samples: &Samples) -> Result<Vec<Row>> {
    let ant = ANT.best("call").context("the paper has a whole call")?;
    let mut rows = round_trip(samples, "same-core", |row| {
        row.against("futex", Kind::Floor, samples.p50("futex-same-core")?)
            .against("eventfd", Kind::Floor, samples.p50("eventfd-same-core")?)
            .against("seqpacket", Kind::Peer, samples.p50("seqpacket-same-core")?)
            .against("pipe", Kind::Peer, samples.p50("pipe-same-core")?)
            .against("ant", Kind::Paper, ant)
            .bar(1.2, "futex")
    })?;
    rows.extend(round_trip(samples, "parked", |row| {
        // Our client spins for the answer, after a rest: so do these.
        row.against("eventfd-one-wake", Kind::Floor, samples.p50("eventfd-one-wake")?)
            .against("seqpacket-one-wake", Kind::Peer, samples.p50("seqpacket-one-wake")?)
            .against("pipe-one-wake", Kind::Peer, samples.p50("pipe-one-wake")?)
            .against("ant", Kind::Paper, ant)
            .bar(1.15, "eventfd-one-wake")
    })?);
    Ok(rows)
}

/// Makes the rows of the two halves of a call: both processes awake, both on one CPU, and a server that sleeps.
fn halves(samples: &Samples) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for case in ["stamped", "stamped-same-core", "stamped-parked"] {
        for (metric, half) in [("request_p50", "request"), ("return_p50", "return")] {
            let paper = ANT.best(half).with_context(|| format!("the paper has no {half}"))?;
            let ns = samples.of(case)?.median(half)?;
            rows.push(Row::lower(case, metric, "ns", ns).against("ant", Kind::Paper, paper));
        }
    }
    Ok(rows)
}

fn pipelined(samples: &Samples) -> Result<Row> {
    let rate = median(samples.of("pipelined")?.numbers("rate")).context("the case notes its rate")?;
    Ok(Row::higher("pipelined", "rate", "calls/s", rate).bar_at(8_000_000.0))
}

/// Makes the rows of each level of detach, compared with moving and with copying as many bytes.
fn detached(samples: &Samples) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for size in ["4k", "64k", "2m"] {
        for level in ["detach-move", "detach-guard", "detach-enforced", "copy"] {
            let others = ["detach-move", "copy"].into_iter().filter(|other| *other != level);
            rows.extend(round_trip(samples, &format!("{level}-{size}"), |row| {
                others
                    .map(|other| Ok((other, samples.p50(&format!("{other}-{size}"))?)))
                    .try_fold(row, |row, other: Result<_>| {
                        other.map(|(other, value)| row.against(other, Kind::Floor, value))
                    })
            })?);
        }
    }
    Ok(rows)
}

fn idle_rows(samples: &Samples) -> Result<Vec<Row>> {
    let of = |what| median(samples.of("idle-1000")?.numbers(what)).with_context(|| format!("the case notes {what}"));
    let mut resident = Row::lower("idle-1000", "resident_per_client", "B", of("resident")?).bar_at(65_536.0);
    resident.note = Some(format!("server process, {} clients, page tables included", idle::CLIENTS));
    Ok(vec![
        Row::lower("idle-1000", "cpu", "cores", of("cpu")?).bar_at(0.005),
        resident,
        Row::lower("idle-1000", "resident_per_client_client", "B", of("resident-client")?),
    ])
}

/// Returns our figures under the names of the paper's, in ns.
pub fn paper(samples: &Samples) -> Result<Vec<(&'static str, f64)>> {
    let half = |which| median(samples.of("stamped")?.numbers(which)).with_context(|| format!("the case notes {which}"));
    let (spin, same, parked) = (samples.p50("spin-inline")?, samples.p50("same-core")?, samples.p50("parked")?);
    Ok(vec![
        ("request", half("request")?),
        ("return", half("return")?),
        ("call", spin),
        ("async", samples.p50("async")? - spin),
        ("other-core", parked - same),
    ])
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::case;
    use crate::sample::Sample;

    #[test]
    fn a_parked_server_is_beside_others_that_are_woken_once_after_the_same_rest() {
        let mut samples = Samples::default();
        for case in case::of_call() {
            let mut sample = Sample::new();
            sample.record(Duration::from_micros(1));
            samples.add(case.name, sample);
        }
        let rows = sleeping(&samples).unwrap();
        let parked = rows.iter().find(|row| row.case == "parked" && row.metric == "rtt_p50").unwrap();
        let beside = parked.against.iter().filter(|it| it.kind != Kind::Paper);
        let beside: Vec<_> = beside.map(|it| case::find(&it.name).unwrap()).collect();
        assert!(beside.len() == 3 && beside.iter().all(|case| case.name.ends_with("-one-wake")), "{parked:?}");
        assert_eq!(parked.bars[0].text, "≤ 1.15 × eventfd-one-wake");
    }
}
