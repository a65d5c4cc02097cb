//! `report`: the papers' tables and figures beside what was measured here, as one HTML file that needs nothing else.
//!
//! No figure is written here. The papers' are data ([`crate::papers`]); ours come from files of `--json` ([`runs`]).

mod desk;
mod html;
mod runs;
mod sections;
mod svg;

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use desk::Desk;
use html::{Cell, Grid, Quantity, Tone, escape, list};
use runs::{Run, Runs};
use sections::Section;

use crate::host::Host;

/// Name of the file.
const FILE: &str = "report.html";

const STYLE: &str = include_str!("style.css");

/// Folder of the records in the checkout that this program was built from.
const RECORDS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/records");

/// What all sections lack, and why.
const NO_SILICON: &str =
    "Silicon: no machine with a card that Tasuki may take was at hand. All cards are our models, or QEMU's.";

/// Where the figures come from.
#[derive(Debug)]
pub enum From {
    /// Those that a user names.
    Files(Vec<PathBuf>),
    /// The records in this folder, or those of the checkout.
    Records(Option<PathBuf>),
}

/// Writes the report into `folder`, which is made if need be. Returns the file's path.
pub fn write(folder: &Path, from: &From) -> Result<PathBuf> {
    let runs = match from {
        From::Files(files) => Runs::of_files(files)?,
        From::Records(records) => Runs::of_records(records.as_deref().unwrap_or(Path::new(RECORDS)))?,
    };
    let path = folder.join(FILE);
    let said = || format!("{} cannot be written; choose another folder", path.display());
    fs::create_dir_all(folder).with_context(said)?;
    fs::write(&path, page(&runs)).with_context(said)?;
    Ok(path)
}

/// Makes the page.
fn page(runs: &Runs) -> String {
    let desk = Desk::new(runs);
    let sections = sections::all(&desk);
    let (first, papers) = (reached(&sections), sections.iter().map(section).collect::<String>());
    let (peers, misses) = (peers(runs, &desk), misses(runs, &desk));
    let missing = missing(&sections, &desk);
    // The runs come last: all that is above gives them their numbers.
    let used: Vec<_> = desk.used().iter().map(|run| runs.of(*run)).collect();
    let links: String =
        sections.iter().map(|it| format!("<a href=\"#{0}\">{0}</a>", it.paper.seed)).collect::<Vec<_>>().join("");
    let newest = used.iter().map(|run| run.host.date.get(..10).unwrap_or_default()).max().unwrap_or_default();
    let oldest = used.iter().map(|run| run.host.date.get(..10).unwrap_or_default()).min().unwrap_or_default();
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <title>Tasuki beside five papers</title><style>{STYLE}</style></head><body>\n\
         <h1>Tasuki beside the five papers it comes from</h1>\n\
         <p>Each figure of the papers stands beside what was measured here, in {} runs between {} and {}. The papers measured on \
         other machines: their figures are quoted, never scaled. A small number leads to the run.</p>\n\
         <p class=\"key dim\"><span style=\"--mark: var(--paper)\">a paper</span><span style=\"--mark: var(--ours)\">Tasuki</span>\
         <span style=\"--mark: var(--peer)\">another program or a floor, in the same run as Tasuki</span></p>\n\
         {first}<nav>{links}<a href=\"#peers\">peers</a><a href=\"#misses\">misses</a><a href=\"#missing\">not measured</a>\
         <a href=\"#runs\">runs and machines</a></nav>\n{papers}{peers}{misses}{missing}{}</body></html>\n",
        used.len(),
        escape(oldest),
        escape(newest),
        runs_and_machines(&used)
    )
}

/// Makes the first table: a paper in a row, in words and numbers.
fn reached(sections: &[Section]) -> String {
    let mut html = String::from(
        "<div class=\"wide\"><table id=\"reached\"><thead><tr><th scope=\"col\">what</th><th scope=\"col\">the paper</th>\
         <th scope=\"col\">Tasuki</th><th scope=\"col\">compared</th><th scope=\"col\">where ours was measured</th></tr></thead><tbody>\n",
    );
    for Section { paper, reached, .. } in sections {
        let _ = writeln!(
            html,
            "<tr class=\"title\"><th colspan=\"5\" scope=\"rowgroup\"><a href=\"#{0}\">{0}</a> {1}</th></tr>",
            paper.seed,
            escape(paper.title)
        );
        for it in reached {
            let grid = Grid {
                rows: vec![vec![
                    Cell::Text(it.what.to_owned()),
                    it.theirs.clone(),
                    it.ours.clone(),
                    it.compared.clone(),
                ]],
                ..Grid::default()
            };
            let row = grid.rows_html().trim_end().trim_end_matches("</tr>").to_owned();
            let _ = writeln!(html, "{row}<td class=\"where\">{}</td></tr>", escape(it.where_measured));
        }
    }
    html + "</tbody></table></div>\n"
}

fn section(section: &Section) -> String {
    let Section { paper, body, differs, .. } = section;
    format!(
        "<h2 id=\"{seed}\">{seed} · {}</h2>\n<p class=\"dim\">{}. {}</p>\n<p>{}</p>\n{body}<h3>What differs</h3>\n{}<h3>What else the paper says</h3>\n{}",
        escape(paper.title),
        escape(paper.authors),
        escape(paper.machine),
        escape(paper.method),
        list(differs),
        list(paper.claims),
        seed = paper.seed,
    )
}

/// Makes the table of all peers.
fn peers(runs: &Runs, desk: &Desk<'_>) -> String {
    let mut grid = Grid::new("", &["bench", "case", "figure", "here", "peer", "its figure", "compared"]);
    for (run, row) in runs.all() {
        for peer in row.against.iter().filter(|against| against.kind == "peer") {
            let Some(theirs) = peer.value else { continue };
            // The ratio of a run is the median over comparable rounds, where there were some: ours over the peer's.
            let (text, tone) = match peer.ratio {
                Some(ratio) => html::compared(ratio, 1.0, row.better),
                None => ("not comparable".to_owned(), Tone::Even),
            };
            grid.rows.push(vec![
                Cell::Text(runs.of(run).bench.clone()),
                Cell::Text(row.case.clone()),
                Cell::Text(row.metric.clone()),
                desk.ours((&runs.of(run).bench, &row.case, &row.metric)),
                Cell::Text(peer.name.clone()),
                Cell::Peer(Quantity::new(theirs, &row.unit), desk.number(run)),
                Cell::Compared(text, tone),
            ]);
        }
    }
    format!(
        "<h2 id=\"peers\">Peers</h2>\n<p>What users would take instead, measured in the same run. Each figure is from the newest \
         full run that has it, or else from the newest quick one.</p>\n{}",
        grid.html()
    )
}

/// Makes the table of bars that do not hold.
fn misses(runs: &Runs, desk: &Desk<'_>) -> String {
    let all = runs.all();
    let held = all.iter().flat_map(|(_, row)| &row.bars).filter(|bar| bar.holds).count();
    let mut grid = Grid::new("", &["bench", "case", "figure", "here", "promised", "what was said"]);
    for (run, row) in &all {
        for bar in row.bars.iter().filter(|bar| !bar.holds) {
            grid.rows.push(vec![
                Cell::Text(runs.of(*run).bench.clone()),
                Cell::Text(row.case.clone()),
                Cell::Text(row.metric.clone()),
                desk.ours((&runs.of(*run).bench, &row.case, &row.metric)),
                Cell::Text(bar.text.clone()),
                Cell::Text(row.note.clone().unwrap_or_default()),
            ]);
        }
    }
    format!(
        "<h2 id=\"misses\">Misses</h2>\n<p>Bars are promises about figures, set before the measurement. In the newest full run of each \
         figure, or else the newest quick one, {held} hold and {} do not. What is known of the reasons stands in the records below.</p>\n{}",
        grid.rows.len(),
        grid.html()
    )
}

/// Makes the list of what was not measured.
fn missing(sections: &[Section], desk: &Desk<'_>) -> String {
    let of_paper = |it: &Section| it.out_of_reach.iter().map(|reason| format!("{}: {reason}", it.paper.seed)).collect();
    let reasons: Vec<Vec<String>> = sections.iter().map(of_paper).collect();
    let reasons = [vec![NO_SILICON.to_owned()], reasons.concat()].concat();
    let told = |(command, cases): &(String, Vec<String>)| {
        format!("<li><code>{}</code> measures {}.</li>", escape(command), escape(&cases.join(", ")))
    };
    let commands: String = desk.missing().iter().map(told).collect();
    let lacking = if commands.is_empty() {
        "<p>The files that this page was made from have all else.</p>\n".to_owned()
    } else {
        format!("<p>The files that this page was made from lack:</p>\n<ul>{commands}</ul>\n")
    };
    format!("<h2 id=\"missing\">Not measured, and why</h2>\n{}{lacking}", list(&reasons))
}

/// Makes the list of the runs, and of their machines.
fn runs_and_machines(used: &[&Run]) -> String {
    let mut machines: Vec<&Host> = Vec::new();
    let mut table = String::from(
        "<div class=\"wide\"><table><thead><tr><th scope=\"col\">run</th><th scope=\"col\" class=\"text\">bench</th><th scope=\"col\" class=\"text\">file</th>\
         <th scope=\"col\" class=\"text\">date (UTC)</th><th scope=\"col\" class=\"text\">commit</th><th scope=\"col\" class=\"text\">length</th><th scope=\"col\">machine</th></tr></thead><tbody>\n",
    );
    for (number, run) in (1..).zip(used) {
        let machine = machines.iter().position(|known| is_same(known, &run.host)).unwrap_or_else(|| {
            machines.push(&run.host);
            machines.len() - 1
        });
        let length = match run.quick {
            Some(true) => "quick",
            Some(false) => "full",
            None => "see its record",
        };
        let cells = [
            run.bench.as_str(),
            &run.file,
            &run.host.date,
            run.measured_commit().unwrap_or("not written down"),
            length,
        ];
        let cells: String = cells.iter().map(|it| format!("<td class=\"text\">{}</td>", escape(it))).collect();
        let label = label(machine);
        let _ = writeln!(
            table,
            "<tr id=\"run-{number}\"><td>{number}</td>{cells}<td><a href=\"#machine-{label}\">{label}</a></td></tr>"
        );
    }
    let mut html = format!("<h2 id=\"runs\">Runs and machines</h2>\n{table}</tbody></table></div>\n");
    for (number, host) in machines.iter().enumerate() {
        html += &machine(&label(number), host);
    }
    let mut told: Vec<&str> = Vec::new();
    for run in used.iter().filter(|run| !run.readme.is_empty()) {
        if !told.contains(&run.readme.as_str()) {
            told.push(&run.readme);
            let folder = run.file.split('/').next().unwrap_or_default();
            let _ = writeln!(
                html,
                "<details><summary>What the record {} says: {}</summary><pre>{}</pre></details>",
                escape(folder),
                escape(run.title()),
                escape(&run.readme)
            );
        }
    }
    html
}

/// Returns whether two runs had the same machine, as far as it was noted.
fn is_same(one: &Host, other: &Host) -> bool {
    let of = |host: &Host| Host {
        date: String::new(),
        name: String::new(),
        cpus_used: Vec::new(),
        guest_halt_poll_ns: String::new(),
        rustc: String::new(),
        ..host.clone()
    };
    of(one) == of(other)
}

fn label(number: usize) -> String {
    ('A'..='Z').nth(number).map_or_else(|| number.to_string(), String::from)
}

fn machine(label: &str, host: &Host) -> String {
    let or_none = |text: &str| if text.is_empty() { "not known".to_owned() } else { text.to_owned() };
    let mitigations: Vec<_> = host.mitigations.iter().map(|(of, what)| format!("{of}: {what}")).collect();
    let facts = [
        ("CPU", format!("{}, {} CPUs", or_none(&host.cpu_model), host.cores)),
        (
            "memory",
            format!(
                "{} MiB, huge pages {}, transparent {}",
                host.memory_mib,
                host.huge_pages,
                or_none(&host.transparent_huge_pages)
            ),
        ),
        ("virtual machine", if host.hypervisor { "yes" } else { "no" }.to_owned()),
        ("kernel", or_none(&host.kernel)),
        ("clock", or_none(&host.clocksource)),
        ("governor, idle driver", format!("{}, {}", or_none(&host.governor), or_none(&host.idle_driver))),
        ("mitigations", or_none(&mitigations.join("; "))),
        ("built", format!("{}, {}", or_none(&host.rustc), or_none(&host.profile))),
    ];
    let rows: String = facts
        .iter()
        .map(|(name, value)| format!("<tr><th scope=\"row\">{name}</th><td class=\"text\">{}</td></tr>", escape(value)))
        .collect();
    format!(
        "<h3 id=\"machine-{label}\">Machine {label}</h3>\n<div class=\"wide\"><table><tbody>{rows}</tbody></table></div>\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::papers;

    /// Returns the page of the repository's own records.
    fn of_our_records() -> String {
        page(&Runs::of_records(Path::new(RECORDS)).unwrap())
    }

    #[test]
    fn every_figure_of_the_papers_is_on_the_page() {
        let page = of_our_records();
        for paper in papers::ALL {
            for figure in paper.figures {
                let mark = format!("data-figure=\"{} {}\"", paper.seed, figure.what);
                let cell = page.split_once(&mark).and_then(|(_, rest)| rest.split_once("</td>")).map(|(cell, _)| cell);
                let shown = cell.and_then(|cell| cell.rsplit('>').next());
                assert_eq!(shown, Some(escape(&html::quoted(figure)).as_str()), "{} {}", paper.seed, figure.what);
            }
            assert!(paper.claims.iter().all(|claim| page.contains(&escape(claim))), "{}", paper.seed);
        }
    }

    #[test]
    fn the_page_needs_nothing_but_itself() {
        let page = of_our_records();
        for outside in ["src=", "url(", "@import", "<script", "<link", "<iframe", "href=\"http", "href=\"/"] {
            assert!(!page.contains(outside), "{outside}");
        }
        let references: Vec<_> = page.split("href=\"").skip(1).filter_map(|rest| rest.split('"').next()).collect();
        assert!(references.len() > 50);
        for reference in references {
            let id = reference.strip_prefix('#').unwrap_or_else(|| panic!("{reference} leads out of the page"));
            assert!(page.contains(&format!("id=\"{id}\"")), "{reference} leads nowhere");
        }
    }

    #[test]
    fn a_page_of_one_bench_says_what_measures_the_rest() {
        let folder = tempfile::tempdir().unwrap();
        let (file, evil) = (folder.path().join("mine.json"), "<script>");
        let rows = r#"[{"case": "spin-inline", "metric": "rtt_p50", "unit": "ns", "value": 221.0,
                        "bars": [{"text": "<script>", "holds": false}], "note": "<script>"}]"#;
        let host = format!(r#"{{"date": "{evil}", "cpu_model": "{evil}", "kernel": "{evil}"}}"#);
        fs::write(
            &file,
            format!(r#"{{"bench": "call", "commit": "{evil}", "quick": true, "host": {host}, "rows": {rows}}}"#),
        )
        .unwrap();
        let path = write(&folder.path().join("new/folder"), &From::Files(vec![file])).unwrap();
        let page = fs::read_to_string(path).unwrap();
        assert!(page.contains("221 ns<sup>") && page.contains("<small>quick</small>"));
        assert!(page.contains("<code>cargo xtask bench relay --only guest --json FILE</code> measures guest-lkm"));
        assert!(page.contains("0 hold and 1 do not"));
        assert!(!page.contains("<script>") && !page.contains("NaN"));
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        let refusal = write(&file.join("in"), &From::Records(None)).unwrap_err().to_string();
        assert!(refusal.ends_with("file/in/report.html cannot be written; choose another folder"), "{refusal}");
    }
}
