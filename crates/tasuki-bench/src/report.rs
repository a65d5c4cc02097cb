//! The report that every bench makes: rows of figures, each beside the figures it is compared with.
//!
//! The JSON form is stable. Fields are only ever added:
//!
//! ```json
//! {"bench": "call", "commit": "2570545", "quick": false, "host": {…},
//!  "rows": [{"case": "call", "metric": "rtt_p50", "unit": "ns", "value": 190.0, "better": "lower",
//!            "against": [{"name": "ping-pong", "kind": "floor", "value": 150.0, "ratio": 1.27}],
//!            "bars": [{"text": "≤ 1.3 × ping-pong", "holds": true}]}]}
//! ```

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::host::Host;
use crate::sample::Sample;

/// Results of one bench.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Subcommand that measured.
    pub bench: &'static str,
    /// Commit that was built, if `cargo xtask bench` built it; it ends with `-dirty` if files had changed since.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    /// Whether the figures are of a run with `--quick`.
    pub quick: bool,
    pub host: Host,
    pub rows: Vec<Row>,
}

#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// Name of the case.
    pub case: String,
    /// Name of this figure among those of the case.
    pub metric: &'static str,
    /// Unit of `value` and of the values in `against`.
    pub unit: &'static str,
    pub value: f64,
    pub better: Better,
    /// Comparisons of the figure.
    pub against: Vec<Against>,
    /// Promises about the figure.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub bars: Vec<Bar>,
    /// Caveat for reading the figure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// Direction in which a figure improves.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Better {
    #[default]
    Lower,
    Higher,
}

/// One comparison of a figure.
#[derive(Debug, Clone, Serialize)]
pub struct Against {
    /// Short, stable name of the thing compared with.
    pub name: String,
    pub kind: Kind,
    /// Figure of the thing compared with, in the row's unit.
    pub value: f64,
    /// The row's value divided by `value`, or the median ratio over comparable rounds. Absent when `value` is zero
    /// or no rounds are comparable.
    pub ratio: Option<f64>,
    /// Which rounds were compared, if not all of them are comparable.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pairs: Option<String>,
}

/// Kinds of things that a figure can be compared with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Physical limit of the machine.
    Floor,
    /// Another program that does the same.
    Peer,
    /// Figure from a paper, measured on the paper's own machine; quoted and never scaled.
    Paper,
}

/// A promise about a figure.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Bar {
    /// Text of the promise, such as `≤ 1.3 × ping-pong`.
    pub text: String,
    /// Whether the figure keeps the promise.
    pub holds: bool,
}

impl Report {
    /// Variable in which `cargo xtask bench` names the commit that it built.
    const COMMIT: &str = "TASUKI_COMMIT";

    /// Makes the report of a bench that has just measured.
    pub fn new(bench: &'static str, quick: bool, host: Host, rows: Vec<Row>) -> Self {
        let commit = std::env::var(Self::COMMIT).ok().filter(|commit| !commit.is_empty());
        Report { bench, commit, quick, host, rows }
    }
}

impl Row {
    /// Makes a row whose figure is better when lower.
    pub fn lower(case: &str, metric: &'static str, unit: &'static str, value: f64) -> Self {
        Row {
            case: case.to_owned(),
            metric,
            unit,
            value,
            better: Better::Lower,
            against: vec![],
            bars: vec![],
            note: None,
        }
    }

    /// Makes a row whose figure is better when higher.
    pub fn higher(case: &str, metric: &'static str, unit: &'static str, value: f64) -> Self {
        Row { better: Better::Higher, ..Row::lower(case, metric, unit, value) }
    }

    /// Makes the rows of a round trip: median, 99th percentile and maximum, in ns.
    pub fn round_trip(case: &str, sample: &Sample) -> Vec<Self> {
        let summary = sample.summary();
        let row = |metric, value: u64| Row::lower(case, metric, "ns", value as f64);
        vec![row("rtt_p50", summary.p50), row("rtt_p99", summary.p99), row("rtt_max", summary.max)]
    }

    /// Compares the figure with `value`, which has the same unit.
    pub fn against(mut self, name: &str, kind: Kind, value: f64) -> Self {
        let ratio = (value != 0.0).then(|| self.value / value);
        self.against.push(Against { name: name.to_owned(), kind, value, ratio, pairs: None });
        self
    }

    /// Compares the figure with `value` over comparable rounds only.
    ///
    /// `pairs` says which rounds were compared, and `ratio` is the result. If `ratio` is `None`, the row shows no
    /// ratio and no bar is judged.
    pub fn against_in_pairs(mut self, name: &str, kind: Kind, value: f64, ratio: Option<f64>, pairs: String) -> Self {
        self = self.against(name, kind, value);
        if let Some(against) = self.against.last_mut() {
            against.ratio = ratio;
            against.pairs = Some(pairs);
        }
        self
    }

    /// Promises at most (or, when more is better, at least) `factor` times the figure of `name`.
    ///
    /// The row must have been compared with `name` before.
    pub fn bar(mut self, factor: f64, name: &str) -> Result<Self> {
        let bar = self.compared_promise(factor, name)?;
        self.bars.extend(bar);
        Ok(self)
    }

    /// Promises at most (or, when more is better, at least) `limit`, in the row's unit.
    pub fn bar_at(mut self, limit: f64) -> Self {
        self.bars.push(self.promise(limit, format!("{limit} {}", self.unit)));
        self
    }

    /// Promises the easier of two limits: `limit`, in the row's unit, or `factor` times the figure of `name`.
    pub fn bar_at_or(mut self, limit: f64, factor: f64, name: &str) -> Result<Self> {
        let (fixed, compared) =
            (self.promise(limit, format!("{limit} {}", self.unit)), self.compared_promise(factor, name)?);
        let text = format!("{} or {} × {name}", fixed.text, factor_text(factor));
        // If the figure misses the one limit and the other cannot be judged, drop the bar.
        let holds = if fixed.holds { Some(true) } else { compared.map(|bar| bar.holds) };
        self.bars.extend(holds.map(|holds| Bar { text, holds }));
        Ok(self)
    }

    fn compared_promise(&self, factor: f64, name: &str) -> Result<Option<Bar>> {
        let peer = self.against.iter().find(|against| against.name == name);
        let peer = peer.with_context(|| format!("{} is not compared with {name}, so no bar can be set", self.case))?;
        let bar = self.promise(factor * peer.value, format!("{} × {name}", factor_text(factor)));
        Ok(match (peer.ratio, self.better) {
            (Some(ratio), Better::Lower) => Some(Bar { holds: ratio <= factor, ..bar }),
            (Some(ratio), Better::Higher) => Some(Bar { holds: ratio >= factor, ..bar }),
            (None, _) => peer.pairs.is_none().then_some(bar),
        })
    }

    fn promise(&self, limit: f64, limit_text: String) -> Bar {
        match self.better {
            Better::Lower => Bar { text: format!("≤ {limit_text}"), holds: self.value <= limit },
            Better::Higher => Bar { text: format!("≥ {limit_text}"), holds: self.value >= limit },
        }
    }
}

/// Formats a factor with no trailing zeros: `1.3`, `0.33`.
fn factor_text(factor: f64) -> String {
    let text = format!("{factor:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_ratio_is_our_value_over_theirs() {
        let row = Row::lower("call", "rtt_p50", "ns", 195.0).against("ping-pong", Kind::Floor, 150.0).against(
            "iceoryx2",
            Kind::Peer,
            780.0,
        );
        assert_eq!((row.against[0].ratio, row.against[1].ratio), (Some(1.3), Some(0.25)));
    }

    #[test]
    fn nothing_is_a_multiple_of_zero() {
        let row = Row::lower("call", "rtt_p50", "ns", 195.0).against("ping-pong", Kind::Floor, 0.0);
        assert_eq!(serde_json::to_value(&row.against[0]).unwrap()["ratio"], json!(null));
    }

    #[test]
    fn a_bar_looks_the_way_that_is_good() {
        let slow = Row::lower("call", "rtt_p50", "ns", 200.0).against("ping-pong", Kind::Floor, 150.0);
        let bar = |row: Row, factor| row.bar(factor, "ping-pong").unwrap().bars.remove(0);
        assert_eq!(bar(slow.clone(), 1.3), Bar { text: "≤ 1.3 × ping-pong".into(), holds: false });
        assert!(bar(slow, 1.5).holds);

        let fast = Row::higher("burst", "rate", "Mframe/s", 30.0);
        assert_eq!(fast.clone().bar_at(25.0).bars[0], Bar { text: "≥ 25 Mframe/s".into(), holds: true });
        assert!(!fast.bar_at(31.0).bars[0].holds);
    }

    #[test]
    fn a_bar_needs_something_to_be_measured_by() {
        let refusal = Row::lower("call", "rtt_p50", "ns", 200.0).bar(1.3, "ping-pong").unwrap_err();
        assert!(refusal.to_string().contains("ping-pong"), "{refusal}");
    }

    #[test]
    fn a_bar_goes_by_the_rounds_that_can_be_compared() {
        let row = Row::higher("copy-64", "pps", "frames/s", 30.0);
        let row =
            row.against_in_pairs("memif", Kind::Peer, 31.0, Some(1.4), "2 at 110 ns".into()).bar(1.3, "memif").unwrap();
        assert!(row.bars[0].holds, "{row:?}");
        let row = row.against_in_pairs("memcpy", Kind::Floor, 31.0, None, "none".into()).bar(1.0, "memcpy").unwrap();
        assert_eq!((row.against[1].ratio, row.bars.len()), (None, 1), "a figure without a comparison is not judged");
    }

    #[test]
    fn of_two_bars_the_easier_counts() {
        let row = Row::higher("inplace-15000", "gbps", "Gb/s", 80.0).against("memcpy", Kind::Floor, 200.0);
        let bar = |row: &Row, limit| row.clone().bar_at_or(limit, 0.8, "memcpy").unwrap().bars.remove(0);
        assert_eq!(bar(&row, 75.0), Bar { text: "≥ 75 Gb/s or 0.8 × memcpy".into(), holds: true });
        assert!(!bar(&row, 90.0).holds);
        let row = Row::higher("inplace-15000", "gbps", "Gb/s", 80.0);
        let row = row.against_in_pairs("memcpy", Kind::Floor, 70.0, None, "none".into());
        assert!(bar(&row, 75.0).holds && row.bar_at_or(90.0, 0.8, "memcpy").unwrap().bars.is_empty());
    }

    #[test]
    fn the_json_has_the_promised_shape() {
        let row = Row::lower("call", "rtt_p50", "ns", 300.0)
            .against("ping-pong", Kind::Floor, 150.0)
            .against("ant", Kind::Paper, 600.0)
            .bar(2.0, "ping-pong")
            .unwrap();
        let report = Report::new("call", true, Host::default(), vec![row]);
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!((&json["bench"], &json["quick"]), (&json!("call"), &json!(true)));
        assert!(json["host"].is_object());
        assert_eq!(
            json["rows"],
            json!([{
                "case": "call", "metric": "rtt_p50", "unit": "ns", "value": 300.0, "better": "lower",
                "against": [
                    {"name": "ping-pong", "kind": "floor", "value": 150.0, "ratio": 2.0},
                    {"name": "ant", "kind": "paper", "value": 600.0, "ratio": 0.5},
                ],
                "bars": [{"text": "≤ 2 × ping-pong", "holds": true}],
            }])
        );
    }

    #[test]
    fn what_is_not_said_is_not_in_the_json() {
        let json = serde_json::to_value(Row::higher("burst", "rate", "Mframe/s", 1.0)).unwrap();
        assert!(json.get("bars").is_none() && json.get("note").is_none());
        assert_eq!((&json["better"], &json["against"]), (&json!("higher"), &json!([])));
    }
}
