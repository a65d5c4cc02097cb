//! What the relays come to, beside floors, papers and bars.

use anyhow::{Context, Result};

use crate::report::{Kind, Row};
use crate::rounds::Samples;

/// What MINIX 3 and AnT need to replace a driver, the latter idle (S1), in µs.
const MINIX: f64 = 316.0;
const ANT: f64 = 568.0;

/// The rows of the bench.
pub fn rows(samples: &Samples) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for case in super::CASES {
        rows.extend(relay(samples, case.name)?);
    }
    Ok(rows)
}

fn relay(samples: &Samples, case: &'static str) -> Result<Vec<Row>> {
    // What the packet buffer of the card holds at line rate is what a pause must not exceed, were the partner not to pause; in place less is done.
    let (p50, p99) = if case == super::REPOINT { (80.0, 160.0) } else { (20.0, 150.0) };
    let sample = samples.of(case)?;
    let noted = |name: &str| {
        let numbers = sample.numbers(name);
        (!numbers.is_empty()).then_some(numbers).with_context(|| format!("{case} notes {name}"))
    };
    let sum = |name: &str| Ok::<f64, anyhow::Error>(noted(name)?.iter().sum());
    let most = |name: &str| Ok::<f64, anyhow::Error>(noted(name)?.iter().copied().fold(0.0, f64::max));
    let summary = sample.summary();
    let wake = samples.p50("eventfd-same-core")? / 2e3;
    let row = |metric, nanos: u64| Row::lower(case, metric, "µs", nanos as f64 / 1e3);
    let median = row("pause_p50", summary.p50)
        .against("wake-up", Kind::Floor, wake)
        .against("minix3", Kind::Paper, MINIX)
        .against("ant", Kind::Paper, ANT)
        .bar_at(p50);
    let mut lost = Row::lower(case, "lost", "frames", sum("lost")?).bar_at(0.0);
    lost.note = Some(format!("{} relays; the wire was asked to pause {} times", sum("relays")?, sum("pauses")?));
    Ok(vec![
        lost,
        Row::lower(case, "duplicated_or_reordered", "frames", sum("wrong")?).bar_at(0.0),
        median,
        row("pause_p99", summary.p99).bar_at(p99),
        row("pause_max", summary.max),
        Row::lower(case, "gap_max", "µs", most("gap")? / 1e3),
    ])
}
