//! Rows of the NIC cases, beside floors, papers and bars.

use anyhow::{Context, Result};

use super::instructions;
use crate::floors;
use crate::report::{Kind, Row};
use crate::rounds::Samples;

/// Line rate of a gigabit in frames of 64 bytes a second: the rate that echoing must sustain.
const LINE_RATE_64: f64 = 1_488_095.0;

pub fn rows(samples: &Samples) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    rows.extend(throughput(samples, "sim-rx-64", 64, Some(4_000_000.0))?);
    rows.extend(throughput(samples, "sim-echo-64", 64, Some(LINE_RATE_64))?);
    rows.extend(throughput(samples, "sim-rx-1518", 1518, None)?);
    rows.extend(parks(samples)?);
    rows.extend(round_trips(samples)?);
    rows.extend(driver_instructions());
    Ok(rows)
}

struct Numbers<'s> {
    samples: &'s Samples,
    case: &'static str,
}

impl Numbers<'_> {
    fn all(&self, name: &str) -> Result<&[f64]> {
        let numbers = self.samples.of(self.case)?.numbers(name);
        (!numbers.is_empty()).then_some(numbers).with_context(|| format!("{} notes {name}", self.case))
    }

    fn sum(&self, name: &str) -> Result<f64> {
        Ok(self.all(name)?.iter().sum())
    }

    fn most(&self, name: &str) -> Result<f64> {
        Ok(self.all(name)?.iter().copied().fold(0.0, f64::max))
    }

    fn median(&self, name: &str) -> Result<f64> {
        self.samples.of(self.case)?.median(name)
    }
}

fn throughput(samples: &Samples, case: &'static str, size: u32, bar: Option<f64>) -> Result<Vec<Row>> {
    let of = Numbers { samples, case };
    let mut rate = Row::higher(case, "rate", "frames/s", of.median("rate")?);
    rate.note = Some(format!("as fast as both go, the wire pausing when asked to ({} times)", of.sum("pauses")?));
    if let Some(bar) = bar {
        rate = rate.bar_at(bar);
    }
    let mut rows = vec![rate, Row::lower(case, "lost", "frames", of.sum("lost")? + of.sum("wrong")?).bar_at(0.0)];
    if size != 64 {
        let bits = of.median("rate")? * f64::from(size) * 8.0;
        rows.push(Row::higher(case, "bits", "Gb/s", bits / 1e9));
        return Ok(rows);
    }
    let mut at_line_rate = Row::higher(case, "line_rate", "frames/s", of.median("line-rate")?);
    at_line_rate.note = Some(format!(
        "offered: a gigabit's {LINE_RATE_64} while the machine lets card and wire run ({:.2} % of the time it did not), with pauses",
        of.median("line-stalled")? * 100.0
    ));
    rows.push(at_line_rate);
    rows.push(Row::lower(case, "line_lost", "frames", of.sum("line-lost")?).bar_at(0.0));
    let mut deaf = Row::lower(case, "deaf_lost", "frames", of.sum("deaf-lost")?);
    deaf.note = Some(format!(
        "the same with a wire that does not pause; the driver's longest gap: {:.1} ms, and ring and buffer hold 0.9",
        of.most("deaf-gap")? / 1e6
    ));
    rows.push(deaf);
    let mut searched = Row::higher(case, "deaf_rate", "frames/s", of.median("deaf-rate")?);
    searched.note =
        Some("highest rate at which such a wire lost nothing in two of three tenths of a second".to_owned());
    rows.push(searched);
    Ok(rows)
}

/// Makes the rows of parking: how long no driver serves a card that is parked and resumed in the same process, and
/// the frames lost.
fn parks(samples: &Samples) -> Result<Vec<Row>> {
    let case = super::PARK;
    let of = Numbers { samples, case };
    let summary = samples.of(case)?.summary();
    let row = |metric, nanos: u64| Row::lower(case, metric, "µs", nanos as f64 / 1e3);
    let mut rows = vec![row("pause_p50", summary.p50), row("pause_p99", summary.p99), row("pause_max", summary.max)];
    rows[0].note = Some(format!("{} times parked and gone on with, at line rate, in one process", summary.count));
    let mut lost = Row::lower(case, "lost", "frames", of.sum("lost")? + of.sum("wrong")?).bar_at(0.0);
    lost.note = Some(format!("longest gap on the wire: {:.1} ms", of.most("wire-gap")? / 1e6));
    rows.push(lost);
    Ok(rows)
}

fn round_trips(samples: &Samples) -> Result<Vec<Row>> {
    let ping_pong = floors::spinning_p50(samples, floors::PING_PONG)?;
    let eventfd = samples.p50("eventfd-other-core")?;
    let mut rows = Row::round_trip("rtt-polling", samples.of("rtt-polling")?);
    rows[0] = rows[0].clone().against(floors::PING_PONG, Kind::Floor, ping_pong);
    let mut sleeping = Row::round_trip("rtt-interrupt", samples.of("rtt-interrupt")?);
    sleeping[0] = sleeping[0].clone().against("eventfd", Kind::Floor, eventfd);
    sleeping[0].note = Some("the driver sleeps before each frame; arming is a round trip over vfio-user".to_owned());
    rows.extend(sleeping);
    Ok(rows)
}

fn driver_instructions() -> Vec<Row> {
    let row = |(case, count): (&str, Result<f64>)| match count {
        Ok(count) => {
            let row = Row::lower(case, "driver_instructions", "per packet", count);
            Some(if case == "e1000e-receive" { row.bar_at(120.0) } else { row })
        }
        Err(error) => {
            eprintln!("{case}: {error:#}");
            None
        }
    };
    instructions::measure().into_iter().filter_map(row).collect()
}
