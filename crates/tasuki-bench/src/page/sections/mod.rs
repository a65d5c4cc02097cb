//! One section for each paper: its own tables and curves, with our figures beside them.
//!
//! Each figure of ours comes from a run, each of a paper from [`crate::papers`]. The words are about method.

mod ant;
mod mint;
mod mint_vni;
mod replacement;
mod vm;

use super::desk::Desk;
use super::html::{Cell, quoted};
use super::svg::{Bar, Who};
use crate::papers::{Figure, Paper};

/// A paper's section.
#[derive(Debug)]
pub struct Section {
    pub paper: &'static Paper,
    /// Rows of the page's first table.
    pub reached: Vec<Reached>,
    /// Tables and plots.
    pub body: String,
    /// What differs in method.
    pub differs: &'static [&'static str],
    /// What could not be measured at all, and why.
    pub out_of_reach: &'static [&'static str],
}

/// A figure of a paper, and ours.
#[derive(Debug)]
pub struct Reached {
    pub what: &'static str,
    pub theirs: Cell,
    pub ours: Cell,
    pub compared: Cell,
    pub where_measured: &'static str,
}

/// Makes the sections of all papers.
pub fn all(desk: &Desk<'_>) -> Vec<Section> {
    vec![
        mint::section(desk),
        replacement::section(desk),
        mint_vni::section(desk),
        vm::section(desk),
        ant::section(desk),
    ]
}

/// Returns a figure of a paper. The names are those of the code, and a test makes all sections.
fn figure(paper: &'static Paper, what: &str) -> &'static Figure {
    paper.figure(what).unwrap_or_else(|| panic!("{} has no figure {what}", paper.seed))
}

fn quote(paper: &'static Paper, what: &str) -> Cell {
    Cell::Paper(paper, figure(paper, what))
}

fn text(text: &str) -> Cell {
    Cell::Text(text.to_owned())
}

/// Makes a row of a table: its words, and cells.
fn row(label: &str, cells: impl IntoIterator<Item = Cell>) -> Vec<Cell> {
    [text(label)].into_iter().chain(cells).collect()
}

fn paper_bar(label: &str, paper: &'static Paper, what: &str) -> Bar {
    let figure = figure(paper, what);
    Bar { label: label.to_owned(), who: Who::Paper, value: Some(figure.high), shown: quoted(figure) }
}

fn reached(what: &'static str, paper: &'static Paper, name: &str, ours: Cell, where_measured: &'static str) -> Reached {
    let compared = Cell::beside(&ours, figure(paper, name));
    Reached { what, theirs: quote(paper, name), ours, compared, where_measured }
}
