//! Figures of earlier runs, read from the files that `--json` wrote.
//!
//! Files of other versions are read as far as they go: a field that is new or gone is no error, and a row without a
//! value is as good as none.

use std::cmp::Reverse;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use serde_json::Value;

use crate::host::Host;
use crate::report::{Bar, Better};

/// A run of a bench.
#[derive(Debug, Deserialize)]
pub struct Run {
    pub bench: String,
    #[serde(default)]
    pub commit: Option<String>,
    /// Whether it was a quick run; `None` if the file is of a version that did not say so.
    #[serde(default)]
    pub quick: Option<bool>,
    #[serde(default)]
    pub host: Host,
    pub rows: Vec<Measured>,
    /// File that it was read from: `record/file.json`, or the path that the user gave.
    #[serde(skip)]
    pub file: String,
    /// What the record says of itself, if there is a README beside the file.
    #[serde(skip)]
    pub readme: String,
}

/// A figure of a run.
#[derive(Debug, Clone, Deserialize)]
pub struct Measured {
    pub case: String,
    pub metric: String,
    pub unit: String,
    /// `None` where the run had no number: JSON has none for it.
    pub value: Option<f64>,
    #[serde(default)]
    pub better: Better,
    #[serde(default)]
    pub against: Vec<Against>,
    #[serde(default)]
    pub bars: Vec<Bar>,
    #[serde(default)]
    pub note: Option<String>,
}

#[derive(Debug, Clone, Deserialize)]
pub struct Against {
    pub name: String,
    pub kind: String,
    pub value: Option<f64>,
    #[serde(default)]
    pub ratio: Option<f64>,
}

/// Records of quick runs from before files said so (27 November 2026). The others of that time are of full runs by their
/// READMEs or by the time that they took; one has no README, and newer ones hide it.
const QUICK_UNSAID: [&str; 1] = ["2026-11-26-xeon-16core/stock.json"];

/// Runs, the one to prefer first: full before quick, then the newest.
#[derive(Debug)]
pub struct Runs(Vec<Run>);

impl Runs {
    /// Reads the files that a user names.
    pub fn of_files(files: &[PathBuf]) -> Result<Self> {
        files.iter().map(|file| read(file, file.display().to_string())).collect::<Result<_>>().map(Self::sorted)
    }

    /// Reads all runs of a folder of records. Results of campaigns are passed over.
    pub fn of_records(folder: &Path) -> Result<Self> {
        let mut runs = Vec::new();
        for record in entries(folder)?.into_iter().filter(|path| path.is_dir()) {
            for file in entries(&record)?.into_iter().filter(|path| path.extension().is_some_and(|it| it == "json")) {
                if is_of_a_bench(&file)? {
                    let name = file.strip_prefix(folder).unwrap_or(&file).display().to_string();
                    let run = read(&file, name)?;
                    let quick = run.quick.or(QUICK_UNSAID.contains(&run.file.as_str()).then_some(true));
                    runs.push(Run { quick, ..run });
                }
            }
        }
        ensure!(!runs.is_empty(), "{} has no records; name files with --from", folder.display());
        Ok(Self::sorted(runs))
    }

    fn sorted(mut runs: Vec<Run>) -> Self {
        runs.sort_by_key(|run| (run.quick == Some(true), Reverse(run.host.date.clone())));
        Runs(runs)
    }

    /// Returns the run of this number.
    pub fn of(&self, run: usize) -> &Run {
        &self.0[run]
    }

    /// Returns the figure of a case in the run to prefer of those that have it, with the run's number.
    pub fn find(&self, bench: &str, case: &str, metric: &str) -> Option<(usize, &Measured)> {
        let wanted = |row: &&Measured| row.case == case && row.metric == metric && row.value.is_some();
        let of = |(number, run): (usize, &'_ Run)| (run.bench == bench).then_some(number);
        self.0.iter().enumerate().filter_map(of).find_map(|run| Some((run, self.0[run].rows.iter().find(wanted)?)))
    }

    /// Returns every figure that any run has, each from the run to prefer, ordered by bench.
    pub fn all(&self) -> Vec<(usize, &Measured)> {
        let mut benches: Vec<_> = self.0.iter().map(|run| run.bench.as_str()).collect();
        benches.sort_unstable();
        benches.dedup();
        let mut all = Vec::new();
        let mut seen = std::collections::BTreeSet::new();
        for bench in benches {
            for (number, run) in self.0.iter().enumerate().filter(|(_, run)| run.bench == bench) {
                let new = |row: &&Measured| {
                    row.value.is_some() && seen.insert((bench.to_owned(), row.case.clone(), row.metric.clone()))
                };
                all.extend(run.rows.iter().filter(new).map(|row| (number, row)));
            }
        }
        all
    }
}

impl Run {
    /// Returns the first heading of the record's README.
    pub fn title(&self) -> &str {
        self.readme.lines().find_map(|line| line.strip_prefix("# ")).unwrap_or_default()
    }

    /// Returns the commit that was measured, from the file or, for files of older versions, from the record's README.
    pub fn measured_commit(&self) -> Option<&str> {
        self.commit.as_deref().or_else(|| commit_in(&self.readme))
    }
}

/// Returns the first commit that a README names: a hexadecimal word after "commit" or "at", or after "clone of".
fn commit_in(readme: &str) -> Option<&str> {
    let words: Vec<_> = readme.split_whitespace().collect();
    let is_hex = |word: &str| word.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    words.windows(3).find_map(|words| {
        let word = words[2].trim_end_matches(['.', ',', ';', ':', ')']);
        let named = ["at", "commit", "Commit"].contains(&words[1]) || words[..2] == ["clone", "of"];
        (named && (7..=40).contains(&word.len()) && is_hex(word)).then_some(word)
    })
}

fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let said = || format!("{} cannot be read; name the folder of the records with --records", folder.display());
    let entries = fs::read_dir(folder).with_context(said)?;
    let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>().with_context(said)?;
    paths.sort_unstable();
    Ok(paths)
}

fn text(file: &Path) -> Result<String> {
    fs::read_to_string(file)
        .with_context(|| format!("{} cannot be read; name a file that --json wrote", file.display()))
}

/// Returns whether a file is the output of a bench, and not of a campaign.
fn is_of_a_bench(file: &Path) -> Result<bool> {
    let value: Value =
        serde_json::from_str(&text(file)?).with_context(|| format!("{} is not JSON; remove it", file.display()))?;
    Ok(value.get("bench").is_some())
}

fn read(file: &Path, name: String) -> Result<Run> {
    let read = serde_json::from_str(&text(file)?);
    let run: Run = read.with_context(|| {
        format!("{} has no figures of a bench; name a file that `tasuki-bench BENCH --json FILE` wrote", file.display())
    })?;
    let readme = fs::read_to_string(file.with_file_name("README.md")).unwrap_or_default();
    Ok(Run { file: name, readme: if name_is_of_record(file) { readme } else { String::new() }, ..run })
}

/// Returns whether a README beside the file is about it: a file in a folder of records, not in some folder.
fn name_is_of_record(file: &Path) -> bool {
    file.parent().and_then(Path::parent).is_some_and(|records| records.file_name().is_some_and(|it| it == "records"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{Kind, Report, Row};

    fn run(json: &str) -> Run {
        serde_json::from_str(json).unwrap()
    }

    fn with(date: &str, quick: &str, value: &str) -> Run {
        run(&format!(
            r#"{{"bench": "call", {quick} "host": {{"date": "{date}", "future": 1}},
                 "rows": [{{"case": "async", "metric": "rtt_p50", "unit": "ns", "value": {value}, "new": []}}]}}"#
        ))
    }

    fn found(runs: Vec<Run>) -> Option<f64> {
        Runs::sorted(runs).find("call", "async", "rtt_p50").and_then(|(_, row)| row.value)
    }

    #[test]
    fn what_a_bench_writes_is_read() {
        let row = Row::higher("burst", "rate", "Mframe/s", 30.0).against("memif", Kind::Peer, 15.0).bar_at(25.0);
        let report = Report::new("vni", true, crate::host::Host::default(), vec![row]);
        let run = run(&serde_json::to_string(&report).unwrap());
        let row = &run.rows[0];
        assert_eq!((run.bench.as_str(), run.quick, row.value), ("vni", Some(true), Some(30.0)));
        assert_eq!((row.better, row.against[0].ratio, row.bars[0].holds), (Better::Higher, Some(2.0), true));
        assert_eq!(row.against[0].kind, "peer");
    }

    #[test]
    fn a_full_run_counts_before_a_quick_one_and_the_newest_of_them() {
        let (old, new) = (with("2026-11-20", "", "1.0"), with("2026-11-21", "\"quick\": false,", "2.0"));
        assert_eq!(found(vec![old, new, with("2026-11-22", "\"quick\": true,", "3.0")]), Some(2.0));
        assert_eq!(found(vec![with("2026-11-22", "\"quick\": true,", "3.0")]), Some(3.0));
    }

    #[test]
    fn a_quick_run_that_does_not_say_so_hides_no_full_one() {
        let runs = Runs::of_records(Path::new(super::super::RECORDS)).unwrap();
        let of_then = runs.0.into_iter().filter(|run| run.host.date.as_str() <= "2026-11-27T00:10:26Z");
        let runs = Runs(of_then.collect());
        let file = |metric| runs.of(runs.find("guest", "host-cpu-h2g", metric).unwrap().0).file.as_str();
        assert_eq!(file("host_cpu"), "2026-11-26-epyc-2core-guest-stock-2/host-cpu.json");
        for quick in QUICK_UNSAID {
            assert!(runs.0.iter().any(|run| run.file == quick && run.quick == Some(true)), "{quick}");
        }
        // The last one that did not say so is of that second. Its README says that it is full.
        let all = Runs::of_records(Path::new(super::super::RECORDS)).unwrap().0;
        for run in all.iter().filter(|run| run.quick.is_none()) {
            assert!(run.host.date.as_str() <= "2026-11-27T00:10:26Z", "{} does not say whether it is quick", run.file);
        }
    }

    /// Returns a value in the unit of `said`, with as many decimals.
    fn in_words(value: f64, unit: &str, said: &str) -> String {
        let scale = |unit: &str| match unit {
            "ms" => 1e6,
            "µs" => 1e3,
            _ => 1.0,
        };
        let (number, to) = said.split_once(' ').map_or((said, ""), |(number, to)| (number, to));
        let decimals = number.split_once('.').map_or(0, |(_, decimals)| decimals.len());
        format!("{:.decimals$} {to}", value * scale(unit) / scale(to)).trim_end().to_owned()
    }

    /// A row of the README links to its record, and has `<!-- BENCH CASE METRIC = FIGURE; … -->`. Behind `METRIC/` can be
    /// what the figure is compared with.
    #[test]
    fn the_readme_has_the_newest_full_figures_of_two_cpus_and_says_what_is_missed() {
        let runs = Runs::of_records(Path::new(super::super::RECORDS)).unwrap();
        let of_two = runs.0.into_iter().filter(|run| run.host.cores == 2 && run.quick != Some(true));
        let runs = Runs(of_two.collect());
        let readme = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../README.md")).unwrap();
        let rows: Vec<_> = readme.lines().filter_map(|line| line.split_once("<!-- ")).collect();
        assert_eq!(rows.len(), 8);
        // Not the end of a longer number.
        let says = |shown: &str, figure: &str| {
            let mut places = shown.match_indices(figure).map(|(at, _)| &shown[..at]);
            places.any(|before| !before.ends_with(|last: char| last.is_ascii_digit() || ".,".contains(last)))
        };
        for (shown, comment) in rows {
            let mut misses = false;
            for figure in comment.trim_end_matches(" --> |").split("; ") {
                let (place, said) = figure.split_once(" = ").unwrap();
                let [bench, case, metric] = place.split(' ').collect::<Vec<_>>()[..] else { panic!("{place}") };
                let (metric, name) = metric.split_once('/').unwrap_or((metric, ""));
                let (run, row) = runs.find(bench, case, metric).unwrap();
                let beside = row.against.iter().find(|against| against.name == name).and_then(|it| it.value);
                let value = if name.is_empty() { row.value } else { beside }.unwrap();
                assert_eq!(in_words(value, &row.unit, said), said, "{place} in {}", runs.of(run).file);
                let (record, _) = runs.of(run).file.split_once('/').unwrap();
                assert!(says(shown, said) && shown.contains(&format!("/{record}/")), "{place} = {said}: {record}");
                misses |= name.is_empty() && row.bars.iter().any(|bar| !bar.holds);
            }
            assert_eq!(shown.contains("missed"), misses, "a row says that a bar is missed where one is: {shown}");
        }
    }

    #[test]
    fn a_figure_that_is_no_number_is_none() {
        // JSON has no NaN: it is written as null.
        let nan = serde_json::to_string(&Row::lower("async", "rtt_p50", "ns", f64::NAN)).unwrap();
        assert!(nan.contains("\"value\":null"), "{nan}");
        assert_eq!(found(vec![with("2026-11-21", "", "null"), with("2026-11-20", "", "1.0")]), Some(1.0));
        assert_eq!(found(vec![with("2026-11-21", "", "null")]), None);
    }

    #[test]
    fn a_file_that_is_no_record_is_refused_with_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("doubles.json");
        for content in ["{\"doubles\": {}}", "{\"bench\": \"call\", \"rows\": 5}", "a table"] {
            fs::write(&file, content).unwrap();
            let refusal = Runs::of_files(std::slice::from_ref(&file)).unwrap_err().to_string();
            assert!(refusal.contains("doubles.json has no figures of a bench; name a file"), "{refusal}");
        }
        let refusal = Runs::of_records(folder.path()).unwrap_err().to_string();
        assert!(refusal.contains("has no records; name files with --from"), "{refusal}");
    }

    #[test]
    fn a_readme_names_its_commit() {
        assert_eq!(commit_in("A full run at 2570545. No build ran"), Some("2570545"));
        assert_eq!(commit_in("read at all times, commit ef7889b, built"), Some("ef7889b"));
        assert_eq!(commit_in("A clean clone of 15b831e, in a frame of 1000000 bytes"), Some("15b831e"));
        assert_eq!(commit_in("at the commit that adds this folder, at 10000 frames"), None);
    }
}
