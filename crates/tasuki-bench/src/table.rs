//! The report as a table for human readers.

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};

use crate::report::{Kind, Report, Row};

/// Makes a table with one line per case and one column per metric, followed by comparisons, bars and notes.
pub fn of(report: &Report) -> Table {
    let metrics = distinct(report.rows.iter().map(|row| (row.metric, row.unit)));
    let mut header = vec!["case".to_owned()];
    header.extend(metrics.iter().map(|(metric, unit)| format!("{metric} ({unit})")));
    header.extend(["× against", "bar", "note"].map(str::to_owned));

    let mut table = empty();
    table.set_header(header);
    for case in distinct(report.rows.iter().map(|row| row.case.as_str())) {
        let rows: Vec<&Row> = report.rows.iter().filter(|row| row.case == case).collect();
        let mut cells = vec![case.to_owned()];
        cells.extend(metrics.iter().map(|&metric| {
            let row = rows.iter().find(|row| (row.metric, row.unit) == metric);
            row.map_or_else(String::new, |row| number(row.value))
        }));
        cells.push(lines(&rows, against));
        cells.push(lines(&rows, bar));
        cells.push(lines(&rows, |row| row.note.iter().cloned().collect()));
        table.add_row(cells);
    }
    align(&mut table, metrics.len());
    table
}

/// Makes an empty table in the house style.
pub fn empty() -> Table {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_BORDERS_ONLY).set_content_arrangement(ContentArrangement::Disabled);
    table
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

/// Joins the lines that `what` returns for all rows, each with the name of its metric, except those of the first
/// row.
fn lines(rows: &[&Row], what: impl Fn(&Row) -> Vec<String>) -> String {
    let mut lines = Vec::new();
    for (index, row) in rows.iter().enumerate() {
        let metric = if index == 0 { String::new() } else { format!("{}: ", row.metric) };
        lines.extend(what(row).into_iter().map(|line| format!("{metric}{line}")));
    }
    lines.join("\n")
}

/// Right-aligns the `metrics` columns after the first, which hold numbers.
fn align(table: &mut Table, metrics: usize) {
    for column in table.column_iter_mut().skip(1).take(metrics) {
        column.set_cell_alignment(CellAlignment::Right);
    }
}

fn distinct<T: PartialEq>(all: impl Iterator<Item = T>) -> Vec<T> {
    let mut seen = Vec::new();
    for one in all {
        if !seen.contains(&one) {
            seen.push(one);
        }
    }
    seen
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
        let table = of(&Report { bench: "call", host: Host::default(), rows }).to_string();
        assert!(table.contains("2.00 × ping-pong (floor)"), "{table}");
        assert!(table.contains("≤ 1.3 × ping-pong MISSED"), "{table}");
        assert!(table.contains("rtt_p99: ≤ 2000 ns holds"), "{table}");
    }
}
