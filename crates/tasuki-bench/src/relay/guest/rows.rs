//! Rows of the guest's relays, beside each other and the paper.

use comfy_table::Table;

use super::stream::Seen;
use super::{HANDOVER, LKM, Outcome, RATE, REPOINT};
use crate::papers::MINT;
use crate::report::{Kind, Row};

/// Caveat for the figures of the kernel's way.
const FORGIVING: &str =
    "QEMU's card, unlike silicon, keeps the frames that come while it takes none, and the wire has room for 1 MB";

/// Steps of the kernel's way, by the paper's names, in the order in which the guest reports them.
const STEPS: [(&str, &str); 4] =
    [("unload", "unload_p50"), ("load", "load_p50"), ("up", "up_p50"), ("link", "link_p50")];

/// Returns the percentile `part` of `values`, in µs; 0 where there are none.
fn micros(values: &[u64], part: usize) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    let at = (sorted.len() * part).div_ceil(100).saturating_sub(1);
    sorted.get(at).map_or(0.0, |&value| value as f64 / 1e3)
}

/// Returns the median of a step of the kernel's way, in µs.
fn step(lkm: &Outcome, step: usize) -> f64 {
    micros(&lkm.said.iter().filter_map(|line| line.get(step).copied()).collect::<Vec<_>>(), 50)
}

/// Returns a figure of the paper in µs.
fn mint(what: &str) -> f64 {
    MINT.best(what).map_or(0.0, |ns| ns / 1e3)
}

/// Makes the rows of loss, order and outage of one case; `what` is the paper's name for its outage.
fn common(case: &'static str, what: &str, outcome: &Outcome) -> Vec<Row> {
    let Outcome { relays, seen, .. } = outcome;
    let Seen { counts, gaps, rests, lost, .. } = seen;
    let frames = |metric, count: u64| Row::lower(case, metric, "frames", count as f64);
    let gap = |metric, part| {
        let rest = micros(rests, part);
        Row::lower(case, metric, "µs", micros(gaps, part)).against("at rest", Kind::Floor, rest)
    };
    vec![
        frames("lost", counts.lost()),
        Row::lower(case, "lost_per_relay", "frames", counts.lost() as f64 / f64::from(*relays)),
        frames("lost_at_rest", lost.first().copied().unwrap_or(0)).bar_at(0.0),
        frames("duplicated", counts.duplicated + counts.damaged).bar_at(0.0),
        frames("reordered", counts.reordered).bar_at(0.0),
        gap("gap_p50", 50).against(MINT.name, Kind::Paper, mint(what)),
        gap("gap_p99", 99),
        gap("gap_max", 100),
    ]
}

/// Makes the rows of one of our ways.
fn ours(case: &'static str, outcome: &Outcome) -> Vec<Row> {
    let mut rows = common(case, "repoint", outcome);
    rows[0] = rows[0].clone().bar_at(0.0);
    let held = outcome.seen.held;
    rows[0].note = Some(format!("{} relays, same stream; {held} frames under way at most", outcome.relays));
    let pauses = outcome.said.concat();
    let pause = |metric, part| Row::lower(case, metric, "µs", micros(&pauses, part));
    rows.extend([pause("pause_p50", 50), pause("pause_p99", 99), pause("pause_max", 100)]);
    rows
}

pub fn rows(lkm: &Outcome, handover: &Outcome, repoint: &Outcome) -> Vec<Row> {
    let mut rows = common(LKM, "outage", lkm);
    rows[0].note = Some(format!("{} relays at {RATE} frames a second; {FORGIVING}", lkm.relays));
    for (number, (what, metric)) in STEPS.into_iter().enumerate() {
        rows.push(Row::lower(LKM, metric, "µs", step(lkm, number)).against(MINT.name, Kind::Paper, mint(what)));
    }
    rows.extend(ours(HANDOVER, handover));
    rows.extend(ours(REPOINT, repoint));
    rows
}

/// Makes the paper's table of the kernel's way, with our figures beside it.
pub fn paper(lkm: &Outcome) -> Table {
    let mut measured: Vec<_> =
        STEPS.iter().enumerate().map(|(number, (what, _))| (*what, step(lkm, number) * 1e3)).collect();
    measured.push(("calls", measured[..3].iter().map(|(_, ns)| ns).sum()));
    measured.push(("outage", micros(&lkm.seen.gaps, 50) * 1e3));
    MINT.beside(&measured)
}

#[cfg(test)]
mod tests {
    use tasuki_sim::wire::Counts;

    use super::*;

    fn outcome(said: Vec<Vec<u64>>, received: u64) -> Outcome {
        let counts = Counts { sent: 1000, received, ..Counts::default() };
        let mut seen = Seen::default();
        (seen.counts, seen.gaps) = (counts, vec![5_000, 9_000]);
        (seen.rests, seen.lost) = (vec![1_000; 3], vec![0, 1, 2]);
        Outcome { relays: 2, seen, said }
    }

    #[test]
    fn what_we_lose_is_a_missed_bar_and_what_the_kernel_loses_is_not() {
        let lkm = outcome(vec![vec![1_000, 2_000, 3_000, 4_000]; 2], 400);
        let kept = outcome(vec![vec![7_000], vec![8_000]], 999);
        let rows = rows(&lkm, &kept, &outcome(vec![vec![9_000]], 1000));
        let of = |case: &str, metric: &str| rows.iter().find(|row| row.case == case && row.metric == metric).unwrap();
        assert_eq!((of(LKM, "lost").value, of(LKM, "lost").bars.len()), (600.0, 0));
        assert_eq!((of(HANDOVER, "lost").value, of(HANDOVER, "lost").bars[0].holds), (1.0, false));
        assert_eq!((of(REPOINT, "lost").value, of(REPOINT, "lost").bars[0].holds), (0.0, true));
        assert_eq!((of(REPOINT, "pause_p50").value, of(HANDOVER, "pause_p50").value), (9.0, 7.0));
        assert_eq!(of(LKM, "lost_per_relay").value, 300.0);
        assert_eq!(of(LKM, "link_p50").value, 4.0);
        assert_eq!((of(HANDOVER, "gap_max").value, of(HANDOVER, "pause_max").value), (9.0, 8.0));
        assert_eq!(of(HANDOVER, "gap_p50").against[0].ratio, Some(5.0));
    }

    #[test]
    fn every_figure_of_the_paper_but_its_own_way_has_one_of_ours_beside_it() {
        let table = paper(&outcome(vec![vec![1, 2, 3, 4]], 0)).to_string();
        // Nor has the kernel's look at the link, which no program sees.
        assert_eq!(table.matches("not measured").count(), 2, "{table}");
    }

    #[test]
    fn percentiles_are_values_that_there_were() {
        assert_eq!([0, 50, 99, 100].map(|part| micros(&[4_000, 1_000, 3_000, 2_000], part)), [1.0, 2.0, 4.0, 4.0]);
        assert_eq!(micros(&[], 50), 0.0);
    }
}
