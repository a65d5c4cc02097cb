//! Text, figures and tables as HTML.

use std::fmt::Write as _;

use crate::papers::{Figure, Paper, Sense};
use crate::report::Better;
use crate::table::number;

/// Returns `text` with the characters that mean something in HTML, also in attributes, replaced.
pub fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            other => safe.push(other),
        }
    }
    safe
}

/// A value and its unit; durations are in ns.
#[derive(Debug, Clone, PartialEq)]
pub struct Quantity {
    pub value: f64,
    pub unit: String,
}

impl Quantity {
    /// Makes a quantity. Durations in other units become ns.
    pub fn new(value: f64, unit: &str) -> Self {
        match unit {
            "µs" => Quantity { value: value * 1e3, unit: "ns".to_owned() },
            "ms" => Quantity { value: value * 1e6, unit: "ns".to_owned() },
            unit => Quantity { value, unit: unit.to_owned() },
        }
    }

    /// Returns the value in a unit that a person reads easily, and that unit.
    fn scaled(&self) -> (f64, &str) {
        let size = self.value.abs();
        match self.unit.as_str() {
            "ns" if size >= 1e10 => (self.value / 1e9, "s"),
            "ns" if size >= 1e6 => (self.value / 1e6, "ms"),
            "ns" if size >= 1e3 => (self.value / 1e3, "µs"),
            "frames/s" if size >= 1e6 => (self.value / 1e6, "Mpps"),
            "frames/s" => (self.value / 1e3, "kpps"),
            "calls/s" if size >= 1e6 => (self.value / 1e6, "million calls/s"),
            "Gb/s" if size < 1.0 => (self.value * 1e3, "Mb/s"),
            unit => (self.value, unit),
        }
    }

    /// Returns the quantity times `factor`, in another unit.
    fn times(&self, factor: f64, unit: &str) -> Self {
        Quantity::new(self.value * factor, unit)
    }

    /// Formats a measured value: as precise as it is worth.
    pub fn rounded(&self) -> String {
        let (value, unit) = self.scaled();
        let small = value != 0.0 && value.abs() < 0.1;
        join(if small { significant(value) } else { number(value) }, unit)
    }

    /// Formats a quoted value with all its digits.
    pub fn exact(&self) -> String {
        let (value, unit) = self.scaled();
        let rest = (value - value.trunc()).abs();
        if rest < 1e-9 || (value != 0.0 && value.abs() < 0.1) {
            return join(if rest < 1e-9 { number(value.trunc()) } else { significant(value) }, unit);
        }
        let decimals = format!("{rest:.4}");
        join(number(value.trunc()) + decimals.trim_start_matches('0').trim_end_matches('0'), unit)
    }
}

/// Formats a value far below one by two digits.
fn significant(value: f64) -> String {
    let digits = (1..16).find(|digits| value.abs() * 10_f64.powi(*digits) >= 10.0).unwrap_or(16);
    format!("{value:.*}", usize::try_from(digits).unwrap_or(16))
}

fn join(number: String, unit: &str) -> String {
    format!("{number} {unit}").trim_end().to_owned()
}

/// Formats a paper's figure as the paper means it: `< 1 ms`, `1.5 µs – 4 µs`.
pub fn quoted(figure: &Figure) -> String {
    let high = Quantity::new(figure.high, figure.unit).exact();
    let sign = match figure.sense {
        Sense::Exact => "",
        Sense::About => "about ",
        Sense::Below => "< ",
        Sense::AtMost => "≤ ",
        Sense::AtLeast => "≥ ",
    };
    match figure.low {
        Some(low) => format!("{sign}{} – {high}", Quantity::new(low, figure.unit).exact()),
        None => format!("{sign}{high}"),
    }
}

/// Whether a comparison speaks for us.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tone {
    Better,
    Worse,
    Even,
}

/// Ratios this near to one say nothing.
const EVEN: f64 = 1.05;

/// Returns a comparison in words: how many times better or worse `ours` is than `theirs`.
pub fn compared(ours: f64, theirs: f64, better: Better) -> (String, Tone) {
    let gain = match better {
        Better::Lower => theirs / ours,
        Better::Higher => ours / theirs,
    };
    match gain {
        _ if ours == theirs => ("as good".to_owned(), Tone::Even),
        gain if gain.is_nan() || gain < 0.0 => ("not comparable".to_owned(), Tone::Even),
        gain if gain.is_infinite() => ("better".to_owned(), Tone::Better),
        0.0 => ("worse".to_owned(), Tone::Worse),
        gain if gain > EVEN => (format!("{} × better", times(gain)), Tone::Better),
        gain if gain < 1.0 / EVEN => (format!("{} × worse", times(1.0 / gain)), Tone::Worse),
        _ => ("as good".to_owned(), Tone::Even),
    }
}

fn times(factor: f64) -> String {
    if factor < 10.0 { format!("{factor:.1}") } else { number(factor.round()) }
}

/// Compares a quantity with a paper's figure. A bound is only a bound: to be below it is no gain that can be told.
pub fn against(ours: &Quantity, figure: &Figure, better: Better) -> (String, Tone) {
    if ours.unit != figure.unit {
        return ("another unit".to_owned(), Tone::Even);
    }
    match figure.sense {
        Sense::Below | Sense::AtMost if better == Better::Lower && ours.value <= figure.high && ours.value > 0.0 => {
            (format!("1/{} of the bound", times(figure.high / ours.value)), Tone::Better)
        }
        _ => compared(ours.value, figure.best(), better),
    }
}

/// A figure of ours.
#[derive(Debug, Clone)]
pub struct Ours {
    pub quantity: Quantity,
    pub better: Better,
    /// Number of its run on the page, from one.
    pub run: usize,
    pub is_quick: bool,
    /// How it was made of several figures, if it was.
    pub made: Option<String>,
}

/// One cell of a table.
#[derive(Debug, Clone)]
pub enum Cell {
    None,
    Text(String),
    /// A paper's figure.
    Paper(&'static Paper, &'static Figure),
    Ours(Ours),
    /// Another program's figure, from the run of this number.
    Peer(Quantity, usize),
    Compared(String, Tone),
    Missing,
}

impl Cell {
    /// Compares a figure, if there is one, with that of a paper. Another program's is not judged.
    pub fn beside(cell: &Cell, figure: &Figure) -> Cell {
        match cell {
            Cell::Ours(ours) => {
                let (text, tone) = against(&ours.quantity, figure, ours.better);
                Cell::Compared(text, tone)
            }
            Cell::Peer(quantity, _) if quantity.unit == figure.unit && figure.best() > 0.0 => {
                Cell::Compared(format!("{} ×", times(quantity.value / figure.best())), Tone::Even)
            }
            _ => Cell::None,
        }
    }

    /// Compares a figure of ours with another program's.
    pub fn beside_peer(ours: &Cell, theirs: &Cell) -> Cell {
        let (Cell::Ours(ours), Cell::Peer(theirs, _)) = (ours, theirs) else { return Cell::None };
        let (text, tone) = compared(ours.quantity.value, theirs.value, ours.better);
        Cell::Compared(text, tone)
    }

    /// Takes a figure as another program's.
    pub fn into_peer(self) -> Cell {
        match self {
            Cell::Ours(ours) => Cell::Peer(ours.quantity, ours.run),
            other => other,
        }
    }

    /// Takes another program's figure times `factor`, in another unit.
    pub fn scaled(self, factor: f64, unit: &str) -> Cell {
        match self {
            Cell::Peer(quantity, run) => Cell::Peer(quantity.times(factor, unit), run),
            other => other,
        }
    }

    fn html(&self) -> String {
        match self {
            Cell::None => "<td></td>".to_owned(),
            Cell::Text(text) => format!("<td class=\"text\">{}</td>", escape(text)),
            Cell::Paper(paper, figure) => format!(
                "<td class=\"paper\" data-figure=\"{} {}\" title=\"{}, {}: {}\">{}</td>",
                paper.seed,
                figure.what,
                paper.seed,
                escape(figure.at),
                escape(figure.meaning),
                escape(&quoted(figure))
            ),
            Cell::Ours(ours) => {
                let made = ours.made.as_deref().map_or_else(String::new, |made| format!(" title=\"{}\"", escape(made)));
                let quick = if ours.is_quick { " <small>quick</small>" } else { "" };
                let value = escape(&ours.quantity.rounded());
                format!("<td class=\"ours\"{made}>{value}{}{quick}</td>", source(ours.run))
            }
            Cell::Peer(quantity, run) => {
                format!("<td class=\"peer\">{}{}</td>", escape(&quantity.rounded()), source(*run))
            }
            Cell::Compared(text, tone) => {
                let class = match tone {
                    Tone::Better => "better",
                    Tone::Worse => "worse",
                    Tone::Even => "even",
                };
                format!("<td class=\"{class}\">{}</td>", escape(text))
            }
            Cell::Missing => "<td class=\"missing\">not measured</td>".to_owned(),
        }
    }
}

/// Returns a reference to the run of this number.
fn source(run: usize) -> String {
    format!("<sup><a href=\"#run-{run}\">{run}</a></sup>")
}

/// A table. The first cell of each row says what the row is.
#[derive(Debug, Default)]
pub struct Grid {
    pub caption: String,
    pub head: Vec<String>,
    pub rows: Vec<Vec<Cell>>,
}

impl Grid {
    pub fn new(caption: &str, head: &[&str]) -> Self {
        Grid { caption: caption.to_owned(), head: head.iter().map(|it| (*it).to_owned()).collect(), rows: vec![] }
    }

    pub fn html(&self) -> String {
        let mut html = String::from("<div class=\"wide\"><table>");
        if !self.caption.is_empty() {
            let _ = write!(html, "<caption>{}</caption>", escape(&self.caption));
        }
        let head = |(column, text): (usize, &String)| {
            let class = if self.is_of_words(column) { " class=\"text\"" } else { "" };
            format!("<th scope=\"col\"{class}>{}</th>", escape(text))
        };
        let head: String = self.head.iter().enumerate().map(head).collect();
        let _ = write!(html, "<thead><tr>{head}</tr></thead><tbody>");
        html + &self.rows_html() + "</tbody></table></div>\n"
    }

    fn is_of_words(&self, column: usize) -> bool {
        self.rows.iter().any(|row| matches!(row.get(column), Some(Cell::Text(_))))
    }

    /// Returns the rows alone. Short ones are filled up.
    pub fn rows_html(&self) -> String {
        let mut html = String::new();
        for row in &self.rows {
            let (first, rest) = row.split_first().map_or((None, &[][..]), |(first, rest)| (Some(first), rest));
            let head = match first {
                Some(Cell::Text(text)) => format!("<th scope=\"row\">{}</th>", escape(text)),
                Some(other) => other.html(),
                None => String::new(),
            };
            let rest = rest.iter().map(Cell::html).collect::<String>()
                + &"<td></td>".repeat(self.head.len().saturating_sub(row.len()));
            let _ = writeln!(html, "<tr>{head}{rest}</tr>");
        }
        html
    }
}

/// Formats sentences as a list.
pub fn list<T: AsRef<str>>(items: &[T]) -> String {
    let items: String = items.iter().map(|item| format!("<li>{}</li>", escape(item.as_ref()))).collect();
    if items.is_empty() { String::new() } else { format!("<ul>{items}</ul>\n") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::papers::{ANT, MINT};

    #[test]
    fn nothing_from_a_file_becomes_markup() {
        let evil = "<script>alert('a' & \"b\")</script>";
        assert_eq!(escape(evil), "&lt;script&gt;alert(&#39;a&#39; &amp; &quot;b&quot;)&lt;/script&gt;");
        let ours = Ours {
            quantity: Quantity::new(1.0, evil),
            better: Better::Lower,
            run: 1,
            is_quick: false,
            made: Some(evil.to_owned()),
        };
        let cells = vec![Cell::Text(evil.to_owned()), Cell::Ours(ours), Cell::Compared(evil.to_owned(), Tone::Even)];
        let grid = Grid { caption: evil.to_owned(), head: vec![evil.to_owned()], rows: vec![cells] };
        assert!(!(grid.html() + &list(&[evil])).contains("<script"), "{}", grid.html());
    }

    #[test]
    fn quantities_are_easy_to_read() {
        let read = |value, unit| Quantity::new(value, unit).rounded();
        assert_eq!(read(9.063, "µs"), "9.06 µs");
        assert_eq!(read(2_495_948.476, "µs"), "2,496 ms");
        assert_eq!((read(16_652_282.9, "frames/s"), read(820e3, "frames/s")), ("16.65 Mpps".into(), "820 kpps".into()));
        assert_eq!(read(0.002_2, "%"), "0.0022 %");
        assert_eq!((read(0.0, "frames"), read(6_000.0, "frames")), ("0 frames".into(), "6,000 frames".into()));
    }

    #[test]
    fn a_quotation_keeps_every_digit() {
        let exact = |value, unit| Quantity::new(value, unit).exact();
        assert_eq!((exact(10.331, "ms"), exact(0.0794, "ms")), ("10.331 ms".into(), "79.4 µs".into()));
        assert_eq!((exact(2_259.0, "ms"), exact(57.69, "ms")), ("2,259 ms".into(), "57.69 ms".into()));
        assert_eq!(exact(0.128, "Gb/s"), "128 Mb/s");
        assert_eq!(quoted(MINT.figure("repoint").unwrap()), "< 1 ms");
        assert_eq!(quoted(ANT.figure("request").unwrap()), "about 1.5 µs – 4 µs");
    }

    #[test]
    fn a_comparison_says_which_way_is_good() {
        assert_eq!(compared(1.0, 10.0, Better::Lower), ("10 × better".into(), Tone::Better));
        assert_eq!(compared(1.0, 10.0, Better::Higher), ("10 × worse".into(), Tone::Worse));
        assert_eq!(compared(1.02, 1.0, Better::Lower), ("as good".into(), Tone::Even));
        assert_eq!(compared(0.0, 0.0, Better::Lower), ("as good".into(), Tone::Even));
        assert_eq!(compared(3.0, 0.0, Better::Lower), ("worse".into(), Tone::Worse));
        assert_eq!(compared(f64::NAN, 1.0, Better::Lower).1, Tone::Even);
    }

    #[test]
    fn below_a_bound_is_not_better_than_what_it_bounds() {
        let bound = MINT.figure("repoint").unwrap();
        let told = |micros| against(&Quantity::new(micros, "µs"), bound, Better::Lower);
        assert_eq!(told(10.0).0, "1/100 of the bound");
        assert_eq!(told(2_000.0), ("2.0 × worse".into(), Tone::Worse));
        assert_eq!(against(&Quantity::new(1.0, "frames"), bound, Better::Lower).0, "another unit");
    }
}
