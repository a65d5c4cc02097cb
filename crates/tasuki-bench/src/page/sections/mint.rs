//! S0: a NIC goes to another system.

use super::super::desk::{Desk, bar};
use super::super::html::{Cell, Grid};
use super::super::svg::{self, Bar};
use super::{Section, figure, paper_bar, quote, reached, row, text};
use crate::papers::{EIGHT, MINT};

/// The kernel's way here.
const KERNELS: &str = "guest-lkm";

/// Our ways: label, case.
const WAYS: [(&str, &str); 7] = [
    ("a reset (cold)", "handover-cold-paper"),
    ("repoint, nodes that trust each other", "handover-repoint-paper"),
    ("repoint, nodes that do not", "handover-fenced-paper"),
    ("repoint, QEMU's card in a guest", "guest-repoint"),
    ("same memory (keep)", "handover-keep-paper"),
    ("keep, QEMU's card in a guest", "guest-handover"),
    ("a second queue first (mbb)", "handover-mbb-paper"),
];

pub fn section(desk: &Desk<'_>) -> Section {
    let (ways, bars) = ways(desk);
    let plot = svg::bars("Time without a driver, or outage (logarithmic)", "ns", &bars);
    let model = |case, metric| desk.ours(("relay", case, metric));
    Section {
        paper: &MINT,
        reached: vec![
            reached(
                "A NIC goes to another owner, and all is made anew: nothing is received",
                &MINT,
                "outage",
                desk.peer(("relay", KERNELS, "gap_p50")),
                "the paper's way, repeated: the kernel's own driver in a guest, QEMU's 82574L",
            ),
            reached(
                "… only what must change is changed",
                &MINT,
                "repoint",
                model("handover-repoint-paper", "pause_p50"),
                "whole system, model of an 82574L, 1 KB a ms: time without a driver, median",
            ),
            reached(
                "… packets lost",
                &MINT,
                "repoint-lost",
                model("handover-repoint-paper", "lost"),
                "the same, in all relays of the run",
            ),
            reached(
                "… and the old owner is kept out (the paper leaves that open)",
                &MINT,
                "repoint",
                model("handover-fenced-paper", "pause_p50"),
                "the same; all processes of the old node that had the card are stopped first",
            ),
        ],
        body: plot + &ways.html() + &steps(desk).html() + &outage(desk).html() + &eight().html(),
        differs: &[
            "The paper counts missing packets of one a millisecond, so it cannot tell an outage below a millisecond from none. Here \"nobody drives\" is the time between the giver's last burst and the taker's first look at the rings, by one clock. The longest gap between two frames on the wire stands beside that of as long a time without a relay: one frame a millisecond makes gaps of a millisecond by itself.",
            "The kernel's way was repeated with Debian's kernel and its driver e1000e in a QEMU guest without KVM, at 5,000 frames a second. The guest's instructions are translated, which makes unloading and loading slow, and QEMU's card brings its link up by a timer. So these steps say how the time is divided, and not how fast silicon is.",
            "The paper's owners are two kernels. Here they are processes under one kernel, and the card is the model of an 82574L in another process, or QEMU's behind VFIO and an IOMMU.",
            "From asking to the answer includes work that the paper does not count: the request, the other node's process, and its confinement.",
        ],
        out_of_reach: &[
            "An RTL8168, and a second machine that sends: Tasuki has no driver for that card. The 82574L takes its place, in QEMU also with the kernel's own driver.",
            "The kernel's 20 µs from the link's interrupt to its service: no program sees them.",
        ],
    }
}

/// Table 3.
fn steps(desk: &Desk<'_>) -> Grid {
    let places = ["unload_p50", "load_p50", "up_p50"].map(|metric| ("relay", KERNELS, metric));
    let head = ["by kernel module", "the paper", "here", "compared", "share: the paper", "share: here"];
    let mut grid = Grid::new("Table 3: the system calls of a transfer by kernel module", &head);
    for (step, what) in ["unload", "load", "up"].into_iter().enumerate() {
        let (theirs, ours) = (figure(&MINT, what), desk.peer(places[step]));
        let share = quote(&MINT, &format!("{what}-share"));
        let of_sum = |steps: &[f64]| 100.0 * steps[step] / steps.iter().sum::<f64>();
        let our_share = desk.made(&places, "%", "this call's median over the three", of_sum).into_peer();
        let compared = Cell::beside(&ours, theirs);
        grid.rows.push(row(theirs.meaning, [quote(&MINT, what), ours, compared, share, our_share]));
    }
    let sum = desk.made(&places, "ns", "sum of the three medians", |steps| steps.iter().sum()).into_peer();
    let theirs = figure(&MINT, "calls");
    let compared = Cell::beside(&sum, theirs);
    grid.rows.push(row(theirs.meaning, [quote(&MINT, "calls"), sum, compared, Cell::None, Cell::None]));
    grid
}

/// Table 4 and Figure 3.
fn outage(desk: &Desk<'_>) -> Grid {
    let head = ["by kernel module", "the paper", "here", "compared"];
    let mut grid = Grid::new("Table 4 and Figure 3: the outage, and what follows the calls", &head);
    let here = |metric| desk.peer(("relay", KERNELS, metric));
    for (what, ours) in [("outage", here("gap_p50")), ("link", here("link_p50")), ("detect", Cell::Missing)] {
        let theirs = figure(&MINT, what);
        let compared = Cell::beside(&ours, theirs);
        grid.rows.push(row(theirs.meaning, [quote(&MINT, what), ours, compared]));
    }
    grid
}

/// The proposed way, and ours.
fn ways(desk: &Desk<'_>) -> (Grid, Vec<Bar>) {
    let head = [
        "way",
        "nobody drives, median",
        "99th percentile",
        "against the routing",
        "lost",
        "in relays",
        "longest gap between frames, median",
        "the same without a relay",
        "asked to answered, median",
    ];
    let mut grid = Grid::new("5.4: by routing of interrupts, and our ways", &head);
    grid.rows.push(row("the paper: kernel module (outage)", [quote(&MINT, "outage")]));
    let lost = quote(&MINT, "repoint-lost");
    let routing = [quote(&MINT, "repoint"), Cell::None, Cell::None, lost, text("1")];
    grid.rows.push(row("the paper: routing (outage)", routing));
    let kernels = |metric| desk.peer(("relay", KERNELS, metric));
    let outage = kernels("gap_p50");
    let mut bars = vec![
        paper_bar("Mint: kernel module", &MINT, "outage"),
        paper_bar("Mint: routing of interrupts", &MINT, "repoint"),
        bar("the kernel's driver here, by module", &outage),
    ];
    let lost = ("relay", KERNELS, "lost");
    let at_rest = desk.beside(("relay", KERNELS, "gap_p50"), "at rest");
    let cells = [outage.clone(), kernels("gap_p99"), Cell::None, kernels("lost"), desk.count(lost), outage, at_rest];
    grid.rows.push(row("here: the kernel's driver, by module (outage)", cells));
    for (label, case) in WAYS {
        let of = |metric| desk.ours(("relay", case, metric));
        let pause = of("pause_p50");
        bars.push(bar(label, &pause));
        let compared = Cell::beside(&pause, figure(&MINT, "repoint"));
        let at_rest = desk.beside(("relay", case, "gap_p50"), "at rest");
        let asked = if case.starts_with("guest") { Cell::None } else { of("asked_p50") };
        let lost = desk.count(("relay", case, "lost"));
        let cells = [pause, of("pause_p99"), compared, of("lost"), lost, of("gap_p50"), at_rest, asked];
        grid.rows.push(row(&format!("here: {label}"), cells));
    }
    (grid, bars)
}

fn eight() -> Grid {
    let caption = "5.2.2: the eight values that Mint changes, and what repoint does with them on an 82574L";
    let mut grid = Grid::new(caption, &["value", "what it is", "here"]);
    grid.rows.extend(EIGHT.iter().map(|(value, what, here)| [value, what, here].map(|it| text(it)).to_vec()));
    grid
}
