//! S4: calls between processes.

use super::super::desk::{Desk, Place, bar};
use super::super::html::{Cell, Grid};
use super::super::svg::{self, Bar};
use super::{Section, figure, paper_bar, quote, reached, row};
use crate::papers::ANT;

/// How client and server run.
const MANNERS: [&str; 3] = ["both awake, two CPUs", "one CPU", "the server sleeps on another CPU"];

/// Case of a whole call, and of one whose halves are told apart, for each of them.
const CALLS: [&str; 3] = ["spin-inline", "same-core", "parked"];
const STAMPED: [&str; 3] = ["stamped", "stamped-same-core", "stamped-parked"];

pub fn section(desk: &Desk<'_>) -> Section {
    let call = |case: &str| desk.ours(trip(case));
    let (parts, bars) = parts(desk);
    Section {
        paper: &ANT,
        reached: vec![
            reached(
                "A call between two processes",
                &ANT,
                "call",
                call("spin-inline"),
                "48 bytes each way; both processes awake, on two CPUs; median",
            ),
            reached("… on one CPU", &ANT, "call", call("same-core"), "each gives way to the other; median"),
            reached(
                "… to a server that sleeps on another CPU",
                &ANT,
                "call",
                call("parked"),
                "the server has slept for a millisecond, and the kernel wakes it; median",
            ),
        ],
        body: svg::bars("A call and its halves (logarithmic)", "ns", &bars) + &parts.html() + &floors(desk).html(),
        differs: &[
            "AnT is a kernel, and wakes a server on another core by an interrupt between processors. Here the processes are Linux's: the kernel of a virtual machine wakes a sleeping server, and the host an idle virtual CPU, which takes tens of microseconds whatever is sent. Nearly all of it is in the request: the client still looks when the answer comes. A server, too, looks for some time before it sleeps, so that calls that follow each other do not pay for that.",
            "AnT passes the address of a block and changes page tables, without data. Here each call carries 48 bytes there and back, and the client checks them.",
            "The halves are told apart by a stamp that the server puts into its answer, by a clock that both processes share. Its reading is in the figures.",
        ],
        out_of_reach: &["AnT itself on this machine: no copy of it was at hand."],
    }
}

fn trip(case: &str) -> Place<'_> {
    ("call", case, "rtt_p50")
}

/// Figure 4 and the text of 3.2.
fn parts(desk: &Desk<'_>) -> (Grid, Vec<Bar>) {
    let half = |metric| STAMPED.map(|case| desk.ours(("call", case, metric)));
    let share = |case| {
        let of_work = |call: &[f64]| 100.0 * call[0] / (call[0] + 1e6);
        desk.made(&[trip(case)], "%", "the call's median over itself and 1 ms of work", of_work)
    };
    let less = |a, b, made: &str| desk.made(&[trip(a), trip(b)], "ns", made, |it| it[0] - it[1]);
    let on_top = less("async", "spin-inline", "an asynchronous call's median less a synchronous one's");
    let other = less("parked", "same-core", "a call's median to a sleeping server on another CPU less that on one");
    let rows = [
        ("request", half("request_p50")),
        ("return", half("return_p50")),
        ("call", CALLS.map(|case| desk.ours(trip(case)))),
        ("async", [on_top, Cell::None, Cell::None]),
        ("other-core", [Cell::None, Cell::None, other]),
        ("share", CALLS.map(share)),
    ];
    let mut head = vec!["", "the paper"];
    MANNERS.iter().for_each(|manner| head.extend([*manner, "compared"]));
    let mut grid = Grid::new("Figure 4 and 3.2: a call and its parts", &head);
    let mut bars = Vec::new();
    for (what, cells) in rows {
        let theirs = figure(&ANT, what);
        if ["request", "return", "call"].contains(&what) {
            bars.push(paper_bar(&format!("AnT: {what}"), &ANT, what));
            bars.extend(MANNERS.iter().zip(&cells).map(|(manner, cell)| bar(&format!("{what}: {manner}"), cell)));
        }
        let compared = cells.into_iter().flat_map(|cell| [cell.clone(), Cell::beside(&cell, theirs)]);
        grid.rows.push(row(theirs.meaning, [quote(&ANT, what)].into_iter().chain(compared)));
    }
    (grid, bars)
}

fn floors(desk: &Desk<'_>) -> Grid {
    let head = ["", "here", "beside it", "compared"];
    let mut grid = Grid::new("What the machine itself takes, and other programs, in the same run", &head);
    for (label, case, name) in [
        ("both awake; two cache lines there and back", "spin-inline", "ping-pong"),
        ("both awake; iceoryx2", "spin-inline", "iceoryx2"),
        ("one CPU; two wake-ups by futex", "same-core", "futex"),
        ("one CPU; a UNIX socket", "same-core", "seqpacket"),
        ("asleep; one wake-up by eventfd, after as long a rest", "parked", "eventfd-one-wake"),
        ("asleep; a UNIX socket, in the same way", "parked", "seqpacket-one-wake"),
    ] {
        let (ours, theirs) = (desk.ours(trip(case)), desk.beside(trip(case), name));
        let compared = Cell::beside_peer(&ours, &theirs);
        grid.rows.push(row(label, [ours, theirs, compared]));
    }
    grid
}
