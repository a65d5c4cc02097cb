//! Rows of the relays, beside floors, papers and bars.

use anyhow::{Context, Result};
use comfy_table::Table;

use super::system::LOST_AFTER;
use crate::nic::driver::line_rate;
use crate::papers::{MINT, Paper, REPLACEMENT};
use crate::report::{Kind, Row};
use crate::rounds::Samples;
use crate::sample::{Sample, median};
use crate::table::{self, number};

/// Compares a row in µs with the figure of a paper.
fn against_paper(row: Row, name: &str, paper: &Paper, what: &str) -> Result<Row> {
    let ns = paper.best(what).with_context(|| format!("{} has no {what}", paper.seed))?;
    Ok(row.against(name, Kind::Paper, ns / 1e3))
}

/// Compares a row in µs with MINIX 3 and AnT (S1). AnT's figure is that of an idle system: the other one is mostly a disk's.
fn against_replacements(row: Row) -> Result<Row> {
    let row = against_paper(row, "minix3", &REPLACEMENT, "minix3-replace-sending-mean")?;
    against_paper(row, "ant", &REPLACEMENT, "ant-replace-idle-mean")
}

/// Bar of a staged upgrade, from asking to the answer, as a multiple of a wake-up across CPUs.
const STAGED_BAR: f64 = 6.0;

/// Bar of a fail-over, from when its rule is met to the first frame there (issue 21), in µs.
const FAIL_OVER_BAR: f64 = 10_000.0;

/// Returns the bars of a pause, in µs: of its median and of its 99th percentile.
fn bars(case: &str) -> (Option<f64>, Option<f64>) {
    match case {
        _ if case.starts_with("turns-repoint") => (None, Some(160.0)),
        _ if ["turns", "upgrade-inplace", "upgrade-staged"].iter().any(|one| case.starts_with(one)) => {
            (Some(20.0), Some(150.0))
        }
        _ if case.starts_with("takeover") => (Some(500.0), Some(2500.0)),
        _ if case.starts_with("handover-keep") => (None, Some(150.0)),
        _ if case.starts_with("handover-repoint") => (None, Some(160.0)),
        _ if case.starts_with("handover-mbb") => (None, Some(50.0)),
        _ => (None, None),
    }
}

/// Returns the bar of a gap on the wire where no processes share a CPU, in µs: three frames' time.
fn three_frames(case: &str) -> Option<f64> {
    match case.strip_prefix("handover-mbb-apart-")? {
        "line64" => Some(3e6 / line_rate(64) as f64),
        "line1518" => Some(3e6 / line_rate(1518) as f64),
        _ => Some(3000.0),
    }
}

pub fn rows(samples: &Samples) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for case in super::CASES.iter().chain(super::APART) {
        // Otherwise the case was not asked for, or the machine has no CPU for it.
        if let Some(sample) = samples.find(case.name) {
            rows.extend(match case.name.starts_with("failover") {
                true => fail_over(sample, case.name)?,
                false => relay(samples, case.name)?,
            });
        }
    }
    Ok(rows)
}

fn noted<'s>(sample: &'s Sample, case: &str, name: &str) -> Result<&'s [f64]> {
    let numbers = sample.numbers(name);
    (!numbers.is_empty()).then_some(numbers).with_context(|| format!("{case} notes {name}"))
}

/// Returns the quantile of `numbers` at `thousandths`; 0 where there are none.
fn quantile(numbers: &[f64], thousandths: usize) -> f64 {
    if thousandths == 500 {
        return median(numbers).unwrap_or(0.0);
    }
    let mut sorted = numbers.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let last = sorted.len().saturating_sub(1);
    sorted.get((last * thousandths).div_ceil(1000)).copied().unwrap_or(0.0)
}

/// Returns the rows of a fail-over. All times count from when it was due. The first frame of the other node ends the longest
/// gap on the wire; the time of that end comes from the card, some 50 µs late.
fn fail_over(sample: &Sample, case: &'static str) -> Result<Vec<Row>> {
    let sum = |name: &str| Ok::<f64, anyhow::Error>(noted(sample, case, name)?.iter().sum());
    let due: Vec<f64> = noted(sample, case, "due")?.to_vec();
    let first = noted(sample, case, "first")?;
    let lost = Row::lower(case, "lost", "frames", sum("lost")?);
    // What a stranger's ring held is nobody else's.
    let mut lost = if case.starts_with("failover-keep") { lost.bar_at(0.0) } else { lost };
    lost.note = Some(format!("{} fail-overs, {} ms each without a driver", due.len(), LOST_AFTER.as_millis()));
    let micros = |metric, of: &[f64], thousandths| {
        Row::lower(case, metric, "µs", quantile(of, thousandths) / 1e3).bar_at(FAIL_OVER_BAR)
    };
    Ok(vec![
        lost,
        Row::lower(case, "duplicated_or_reordered", "frames", sum("wrong")?).bar_at(0.0),
        micros("until_driven_p50", &due, 500),
        micros("until_driven_p99", &due, 990),
        micros("until_driven_max", &due, 1000),
        micros("until_first_frame_p50", first, 500),
        micros("until_first_frame_p99", first, 990),
        micros("until_first_frame_max", first, 1000),
    ])
}

/// Returns the number of relays in which card and wire stood still for most of the pause: their process had no CPU. Then
/// few frames arrive that could be lost.
fn stood_still(sample: &Sample) -> usize {
    let [pauses, stalls] = ["due", "stalled"].map(|name| sample.numbers(name));
    pauses.iter().zip(stalls).filter(|(pause, stalled)| **stalled > *pause / 2.0).count()
}

fn relay(samples: &Samples, case: &'static str) -> Result<Vec<Row>> {
    let sample = samples.of(case)?;
    let sum = |name: &str| Ok::<f64, anyhow::Error>(noted(sample, case, name)?.iter().sum());
    let summary = sample.summary();
    let wake = samples.p50("eventfd-same-core")? / 2e3;
    let (median_bar, tail_bar) = match case {
        // The giver, the daemon and the taker are woken one after the other; a fourth trip covers the rest.
        _ if case.starts_with("handover-fenced") => {
            let trips = 4.0 * samples.p50("eventfd-other-core")? / 1e3;
            (Some(trips), Some(trips))
        }
        _ => bars(case),
    };
    let row = |metric, micros: f64, bar: Option<f64>| {
        let row = Row::lower(case, metric, "µs", micros);
        bar.map_or(Row::lower(case, metric, "µs", micros), |bar| row.bar_at(bar))
    };
    let mut median = row("pause_p50", summary.p50 as f64 / 1e3, median_bar).against("wake-up", Kind::Floor, wake);
    median = match case {
        _ if case.starts_with("handover") => against_paper(median, MINT.name, &MINT, "repoint")?,
        // The papers' replacement lasts from the request to its result: that is `asked_p50`.
        _ => median,
    };
    let no_loss = (!case.starts_with("handover-cold")).then_some(0.0);
    let frames = |metric, count| {
        let row = Row::lower(case, metric, "frames", count);
        no_loss.map_or(Row::lower(case, metric, "frames", count), |bar| row.bar_at(bar))
    };
    let mut lost = frames("lost", sum("lost")?);
    let mut note = format!("{} relays; the wire was asked to pause {} times", sum("relays")?, sum("pauses")?);
    let still = stood_still(sample);
    if still > 0 {
        note +=
            &format!("; in {still} it stood still for most of the time without a driver, so few frames could be lost");
    }
    if 2.0 * still as f64 > sum("relays")? && lost.value == 0.0 {
        lost.bars.clear();
    }
    lost.note = Some(note);
    let gaps = noted(sample, case, "gap")?;
    let other_cpu = samples.p50("eventfd-other-core")? / 2e3;
    let mut rows = vec![
        lost,
        frames("duplicated_or_reordered", sum("wrong")?),
        median,
        row("pause_p99", summary.p99 as f64 / 1e3, tail_bar),
        row("pause_max", summary.max as f64 / 1e3, None),
    ];
    // A turn of the bare workers has no request, so it has no such time.
    let asked = sample.numbers("replaced");
    if !asked.is_empty() && !case.starts_with("takeover") {
        // The papers' time of a replacement: from the request to the answer, including every process start.
        let is_staged = case.starts_with("upgrade-staged");
        let p50 = row("asked_p50", quantile(asked, 500) / 1e3, is_staged.then_some(STAGED_BAR * other_cpu));
        let p50 = p50.against("wake-up across CPUs", Kind::Floor, other_cpu);
        rows.push(match case {
            _ if case.starts_with("upgrade") => against_replacements(p50)?,
            _ => p50,
        });
        rows.push(row("asked_p99", quantile(asked, 990) / 1e3, None));
    }
    // The bare workers note no gap at rest: they relay every few milliseconds.
    let at_rest = sample.numbers("gap_quiet");
    let beside = |row: Row, thousandths| match at_rest {
        [] => row,
        at_rest => row.against("at rest", Kind::Floor, quantile(at_rest, thousandths) / 1e3),
    };
    if gaps.len() > 20 {
        rows.push(beside(row("gap_p50", quantile(gaps, 500) / 1e3, None), 500));
        rows.push(beside(row("gap_p99", quantile(gaps, 990) / 1e3, None), 990));
    }
    rows.push(row("gap_max", quantile(gaps, 1000) / 1e3, three_frames(case)));
    let stalled = sample.numbers("stalled");
    if !stalled.is_empty() {
        let mut stalled = row("stalled_p50", quantile(stalled, 500) / 1e3, None);
        stalled.note = Some("part of the pause in which the machine did not run card and wire".to_owned());
        rows.push(stalled);
    }
    if case.starts_with("takeover") {
        rows.push(row("until_known_p50", quantile(noted(sample, case, "until_known")?, 500) / 1e3, None));
    }
    Ok(rows)
}

/// Makes the tables of S0 and S1, with the papers' figures beside ours.
pub fn tables(samples: &Samples) -> Result<String> {
    Ok(format!("{}\n\n{}", of_mint(samples)?, of_minix(samples)?))
}

/// Makes the table of S0: 1 KB every millisecond.
fn of_mint(samples: &Samples) -> Result<Table> {
    let mut table = table::empty();
    table.set_header([
        "a NIC goes to another owner (S0; 1 KB, one a ms)",
        "asking to settled (ms)",
        "outage (ms)",
        "lost, of relays",
    ]);
    let mint = |what| MINT.best(what).map_or_else(String::new, |ns| number(ns / 1e6));
    table.add_row(["Mint: kernel module unloaded and loaded", &mint("calls"), &mint("outage"), "all of the outage, 1"]);
    table.add_row(["Mint: interrupt routing, eight values", "", &format!("< {}", mint("repoint")), "0, 1"]);
    let ours = [
        ("handover-cold-paper", "here: cold (reset; the model's link needs 1 ms)"),
        ("handover-repoint-paper", "here: repoint"),
        ("handover-fenced-paper", "here: repoint, to a node that is not trusted"),
        ("handover-keep-paper", "here: keep"),
        ("handover-mbb-paper", "here: mbb"),
    ];
    for (case, what) in ours {
        let Ok(sample) = samples.of(case) else { continue };
        let of = |name| noted(sample, case, name);
        let outage = quantile(of("gap")?, 500) / 1e6;
        let lost: f64 = of("lost")?.iter().sum();
        let relays: f64 = of("relays")?.iter().sum();
        let asked = quantile(of("replaced")?, 500) / 1e6;
        table.add_row([
            what.to_owned(),
            format!("{asked:.2}"),
            format!("{outage:.3}"),
            format!("{}, {}", number(lost), number(relays)),
        ]);
    }
    Ok(table)
}

/// Makes the table of S1: a driver's process is replaced, with giver, taker and requester on one core.
fn of_minix(samples: &Samples) -> Result<Table> {
    let mut table = table::empty();
    let header = [
        "a driver's process is replaced (S1), ms: from asking to the answer",
        "replaced: max",
        "mean",
        "min",
        "there and back: max",
        "the same, while replaced: max",
    ];
    table.set_header(header);
    for (system, what) in [
        (
            "minix3",
            "MINIX 3, idle; sending: a request to a server until its result; it makes a new driver's process, has the old one's state stored, and starts the new one, which reads it",
        ),
        (
            "ant",
            "AnT, idle; sending: a system call until its result; the kernel makes a new driver's process (sending: ten reads of a disk) and passes it the old one's state",
        ),
    ] {
        let of = |figure: String| REPLACEMENT.best(&figure).map_or_else(String::new, |ns| format!("{:.3}", ns / 1e6));
        let replaced = |stat| {
            let [idle, sending] = ["idle", "sending"].map(|how| of(format!("{system}-replace-{how}-{stat}")));
            format!("{idle}; {sending}")
        };
        let [max, mean, min] = ["max", "mean", "min"].map(replaced);
        let [alone, meanwhile] = ["alone", "replaced"].map(|how| of(format!("{system}-send-{how}-max")) + " (send)");
        table.add_row([what.to_owned(), max, mean, min, alone, meanwhile]);
    }
    let ours = [
        ("upgrade-inplace-paper", "here: an HTTP request until its answer; a new process, confined, in place"),
        ("upgrade-staged-paper", "here: the same, of a program that was staged for it"),
        ("upgrade-store-paper", "here: the same, by the store"),
        ("takeover-paper", "here: killed, until a stand-by drives and another stands by"),
        ("upgrade-inplace-line64", "here: in place, 1.5 million frames a second"),
        ("upgrade-staged-line64", "here: staged, 1.5 million frames a second"),
    ];
    for (case, what) in ours {
        let Ok(sample) = samples.of(case) else { continue };
        let millis = |name, thousandths| {
            Ok::<String, anyhow::Error>(format!("{:.3}", quantile(noted(sample, case, name)?, thousandths) / 1e6))
        };
        let all = noted(sample, case, "replaced")?;
        let mean = all.iter().sum::<f64>() / all.len().max(1) as f64 / 1e6;
        table.add_row([
            what.to_owned(),
            millis("replaced", 1000)?,
            format!("{mean:.3}"),
            millis("replaced", 0)?,
            millis("trip_quiet", 1000)?,
            millis("trip", 1000)?,
        ]);
        let pause = sample.summary();
        table.add_row([
            "  … of which nobody drives".to_owned(),
            format!("{:.3}", pause.max as f64 / 1e6),
            format!("{:.3}", pause.mean / 1e6),
            format!("{:.3}", pause.min as f64 / 1e6),
            String::new(),
            String::new(),
        ]);
    }
    Ok(table)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Makes the rows of three relays of a case with the same times, in µs.
    fn rows_of(case: &'static str, pause: u64, stalled: u64, lost: u64) -> Vec<Row> {
        let mut samples = Samples::default();
        for floor in ["eventfd-same-core", "eventfd-other-core"] {
            samples.add(floor, Sample::new());
        }
        let mut sample = Sample::new();
        for _ in 0..3 {
            sample.record(Duration::from_micros(pause));
            for (name, micros) in
                [("due", pause), ("gap", 15), ("stalled", stalled), ("until_known", 1), ("replaced", 2)]
            {
                sample.note(name, micros as f64 * 1e3);
            }
        }
        for (name, number) in [("relays", 3), ("lost", lost), ("wrong", 0), ("pauses", 0)] {
            sample.note(name, number as f64);
        }
        samples.add(case, sample);
        relay(&samples, case).unwrap()
    }

    #[test]
    fn a_wire_that_stood_still_lost_nothing_and_shows_nothing() {
        let lost = |stalled, lost| {
            let rows = rows_of("takeover-line64", 157, stalled, lost);
            let row = rows.into_iter().find(|row| row.metric == "lost").unwrap();
            (row.bars.first().map(|bar| bar.holds), row.note.unwrap().contains("in 3 it stood still"))
        };
        assert_eq!(lost(142, 0), (None, true), "of 157 µs");
        assert_eq!(lost(142, 1), (Some(false), true), "a lost frame is a lost frame");
        assert_eq!(lost(15, 0), (Some(true), false));
    }

    #[test]
    fn papers_that_time_a_request_are_beside_no_pause() {
        for case in ["takeover-line64", "upgrade-inplace-line64", "turns-line64"] {
            let rows = rows_of(case, 10, 0, 0);
            let beside = |metric: &str| {
                let of_metric = rows.iter().filter(|row| row.metric.starts_with(metric));
                of_metric.flat_map(|row| row.against.clone()).collect::<Vec<_>>()
            };
            assert!(beside("pause").iter().all(|it| it.kind != Kind::Paper), "{case}: {rows:?}");
            assert_eq!(beside("asked").iter().any(|it| it.name == "minix3"), case.starts_with("upgrade"), "{case}");
        }
    }
}
