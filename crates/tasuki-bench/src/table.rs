//! The report as a table for human readers.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};

use crate::report::{Kind, Report, Row};

/// Columns of a terminal that a table fits into.
const WIDTH: u16 = 120;

/// Whether tables are Markdown.
static MARKDOWN: AtomicBool = AtomicBool::new(false);

/// Has all tables of this process be Markdown from now on.
pub fn write_markdown() {
    MARKDOWN.store(true, Relaxed);
}

/// Makes a table with one line per case and metric, each with its comparisons, bars and note.
pub fn of(report: &Report) -> Table {
    let mut table = empty();
    table.set_header(["case", "metric", "", "× against", "bar", "note"]);
    let mut before = None;
    for row in &report.rows {
        let case = if before.replace(row.case.as_str()) == Some(&row.case) { "" } else { &row.case };
        table.add_row([
            case.to_owned(),
            format!("{} ({})", row.metric, row.unit),
            number(row.value),
            lines(against(row)),
            lines(bar(row)),
            row.note.clone().unwrap_or_default(),
        ]);
    }
    if let Some(figures) = table.column_mut(2) {
        figures.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// Makes an empty table in the house style: it wraps cells rather than lines, unless it is Markdown.
pub fn empty() -> Table {
    let mut table = Table::new();
    match MARKDOWN.load(Relaxed) {
        true => table.load_preset(presets::ASCII_MARKDOWN).set_content_arrangement(ContentArrangement::Disabled),
        false => table
            .load_preset(presets::UTF8_BORDERS_ONLY)
            .set_content_arrangement(ContentArrangement::Dynamic)
            .set_width(WIDTH),
    };
    table
}

/// Joins the lines of one cell.
fn lines(all: Vec<String>) -> String {
    all.join(if MARKDOWN.load(Relaxed) { "; " } else { "\n" })
}

/// Formats a figure with its thousands grouped, and with two decimals only if it is below 100 and not whole.
pub fn number(value: f64) -> String {
    let decimals = if value.abs() < 100.0 && value.fract() != 0.0 { 2 } else { 0 };
    let plain = format!("{value:.decimals$}");
    let (whole, fraction) = plain.split_at(plain.find('.').unwrap_or(plain.len()));
    let mut grouped = String::new();
    for (index, digit) in whole.chars().enumerate() {
        let left = whole.len() - index;
        if index > 0 && left.is_multiple_of(3) && !grouped.ends_with('-') {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped + fraction
}

fn against(row: &Row) -> Vec<String> {
    let one = |against: &crate::report::Against| {
        let kind = match against.kind {
            Kind::Floor => "floor",
            Kind::Peer => "peer",
            Kind::Paper => "paper",
        };
        let ratio = against.ratio.map_or_else(|| "?".to_owned(), |ratio| format!("{ratio:.2}"));
        let pairs = against.pairs.as_ref().map_or_else(String::new, |pairs| format!("; {pairs}"));
        format!("{ratio} × {} ({kind}{pairs})", against.name)
    };
    row.against.iter().map(one).collect()
}

fn bar(row: &Row) -> Vec<String> {
    row.bars.iter().map(|bar| format!("{} {}", bar.text, if bar.holds { "holds" } else { "MISSED" })).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::Host;

    #[test]
    fn numbers_are_easy_to_read() {
        let read = [0.0, 1.5, 99.126, 157.2, 1000.0, 1_234_567.0, -123.0, -1234.0].map(number);
        assert_eq!(read, ["0", "1.50", "99.13", "157", "1,000", "1,234,567", "-123", "-1,234"]);
    }

    #[test]
    fn a_missed_bar_is_shouted() {
        let row = Row::lower("call", "rtt_p50", "ns", 300.0).against("ping-pong", Kind::Floor, 150.0);
        let rows = vec![row.bar(1.3, "ping-pong").unwrap(), Row::lower("call", "rtt_p99", "ns", 1300.0).bar_at(2000.0)];
        let table = of(&Report::new("call", false, Host::default(), rows)).to_string();
        assert!(table.contains("2.00 × ping-pong (floor)"), "{table}");
        assert!(table.contains("≤ 1.3 × ping-pong MISSED"), "{table}");
        assert!(table.contains("≤ 2000 ns holds"), "{table}");
    }

    #[test]
    fn a_table_fits_into_a_terminal() {
        let long = "a note that goes on and on ".repeat(20);
        let mut row = Row::lower("a-case-with-a-long-name-line1518", "rtt_p50", "ns", 1_234_567.0);
        row.note = Some(long);
        let rows = vec![row.against("ping-pong-read-only", Kind::Floor, 150.0)];
        let table = of(&Report::new("call", false, Host::default(), rows)).to_string();
        let widest = table.lines().map(|line| line.chars().count()).max();
        assert!(widest <= Some(WIDTH.into()), "{widest:?}\n{table}");
    }
}
