//! Figures of the papers, as data. The reports quote them beside our figures; they come from other machines and are
//! never scaled.

use comfy_table::Table;

use crate::table::{self, number};

/// A paper's figures.
#[derive(Debug)]
pub struct Paper {
    /// Short, stable name.
    pub name: &'static str,
    /// Subject of the paper, and its number among the seeds.
    pub title: &'static str,
    /// Machine that the paper measured on.
    pub machine: &'static str,
    pub figures: &'static [Figure],
}

/// One figure of a paper. Durations in ns.
#[derive(Debug)]
pub struct Figure {
    /// Short, stable name.
    pub what: &'static str,
    /// Definition as the paper gives it.
    pub meaning: &'static str,
    /// Best value, where the paper reports a range.
    pub low_ns: Option<f64>,
    /// Worst value that the paper reports, or its single value.
    pub high_ns: f64,
}

/// Communication between servers in multi-core AnT; each figure is a mean of ten.
pub const ANT: Paper = Paper {
    name: "ant",
    title: "AnT: communication between server programs (S4)",
    machine: "Xeon E5-2630 v3, 2.4 GHz",
    figures: &[
        Figure { what: "request", meaning: "from asking until served", low_ns: Some(1_500.0), high_ns: 4_000.0 },
        Figure { what: "return", meaning: "from served until returned", low_ns: Some(2_300.0), high_ns: 3_800.0 },
        Figure { what: "call", meaning: "the whole call, at most", low_ns: None, high_ns: 7_800.0 },
        Figure { what: "async", meaning: "asynchronous, on top of synchronous", low_ns: None, high_ns: 1_000.0 },
        Figure { what: "other-core", meaning: "another core, on top of the same", low_ns: None, high_ns: 1_500.0 },
    ],
};

/// Mint: the Linux of another core takes over a NIC, by a kernel module, as it was done before, and by the
/// interrupt's routing.
pub const MINT: Paper = Paper {
    name: "mint",
    title: "Mint: a NIC handed from one core's system to another's (S0)",
    machine: "Core i7-870, 2.93 GHz, RTL8111/8168B; 1 KB UDP, one a millisecond",
    figures: &[
        Figure { what: "unload", meaning: "the old system's driver is unloaded", low_ns: None, high_ns: 2.27e6 },
        Figure { what: "load", meaning: "the new system's driver is loaded", low_ns: None, high_ns: 1.27e6 },
        Figure { what: "up", meaning: "its interface is brought up", low_ns: None, high_ns: 54.15e6 },
        Figure { what: "calls", meaning: "the three together", low_ns: None, high_ns: 57.69e6 },
        Figure { what: "link", meaning: "the link comes up, inside the NIC", low_ns: None, high_ns: 2_202e6 },
        Figure { what: "outage", meaning: "nothing is received, by kernel module", low_ns: None, high_ns: 2_259e6 },
        Figure { what: "repoint", meaning: "nothing is received, by routing: less than", low_ns: None, high_ns: 1e6 },
    ],
};

impl Paper {
    /// Returns the figure of that name.
    pub fn figure(&self, what: &str) -> Option<&Figure> {
        self.figures.iter().find(|figure| figure.what == what)
    }

    /// Returns the value that is hardest to beat of the figure of that name, in ns.
    pub fn best_ns(&self, what: &str) -> Option<f64> {
        let figure = self.figure(what)?;
        Some(figure.low_ns.unwrap_or(figure.high_ns))
    }

    /// Makes a table of the paper's figures beside `measured`, our own: (figure's name, ns).
    pub fn beside(&self, measured: &[(&str, f64)]) -> Table {
        let mut table = table::empty();
        let theirs = format!("{} (ns)", self.name);
        table.set_header([self.title, &theirs, "here (ns)", "here ÷ their best"]);
        for figure in self.figures {
            let ours = measured.iter().find(|(what, _)| *what == figure.what).map(|(_, ns)| *ns);
            let best = figure.low_ns.unwrap_or(figure.high_ns);
            table.add_row([
                format!("{}: {}", figure.what, figure.meaning),
                figure.low_ns.map_or_else(String::new, |low| number(low) + " – ") + &number(figure.high_ns),
                ours.map_or_else(|| "not measured".to_owned(), number),
                ours.map_or_else(String::new, |ns| format!("{:.3}", ns / best)),
            ]);
        }
        table.add_row(["machine", self.machine, "see host", ""]);
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn we_are_compared_with_the_best_of_a_range() {
        assert_eq!(ANT.best_ns("request"), Some(1_500.0));
        assert_eq!(ANT.best_ns("call"), Some(7_800.0));
        assert_eq!(ANT.best_ns("send"), None);
    }

    #[test]
    fn what_was_not_measured_says_so() {
        let table = ANT.beside(&[("call", 780.0)]).to_string();
        assert!(table.contains("1,500 – 4,000"), "{table}");
        assert!(table.contains("0.100"), "{table}");
        assert_eq!(table.matches("not measured").count(), 4, "{table}");
    }
}
