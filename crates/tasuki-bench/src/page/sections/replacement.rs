//! S1: the process of a NIC's driver is replaced.

use super::super::desk::{Desk, bar};
use super::super::html::{Cell, Grid};
use super::super::svg::{self, Bar};
use super::{Section, figure, paper_bar, quote, reached, row};
use crate::papers::REPLACEMENT;

/// The paper's two systems: name, its prefix among the figures.
const SYSTEMS: [(&str, &str); 2] = [("MINIX 3", "minix3"), ("AnT", "ant")];

/// Trials here: label, case.
const IDLE: [(&str, &str); 3] = [
    ("a new process", "sends-idle-upgrade"),
    ("a staged process", "sends-idle-staged"),
    ("by the store", "sends-idle-store"),
];
const SENDING: [(&str, &str); 4] = [
    ("a new process", "sends-upgrade"),
    ("a staged process", "sends-staged"),
    ("by the store", "sends-store"),
    ("to another node (keep)", "sends-keep"),
];
const ALONE: [(&str, &str); 1] = [("no replacement", "sends-alone")];
const KILLED: [(&str, &str); 1] = [("killed, its stand-by goes on", "sends-takeover")];

/// Relays under other traffic: label, case.
const LOADS: [(&str, &str); 8] = [
    ("a new process, 1 KB a ms", "upgrade-inplace-paper"),
    ("a new process, gigabit line rate, 64 bytes", "upgrade-inplace-line64"),
    ("a staged process, 1 KB a ms", "upgrade-staged-paper"),
    ("a staged process, line rate", "upgrade-staged-line64"),
    ("by the store, 1 KB a ms", "upgrade-store-paper"),
    ("by the store, line rate", "upgrade-store-line64"),
    ("killed, its stand-by goes on, 1 KB a ms", "takeover-paper"),
    ("killed, line rate", "takeover-line64"),
];

pub fn section(desk: &Desk<'_>) -> Section {
    let mut bars = Vec::new();
    let with_relay = [&SENDING[..], &KILLED].concat();
    let tables = [
        replacements(desk, "Table 1: a replacement while nothing is sent", "idle", &IDLE, &mut bars),
        replacements(desk, "Table 1: a replacement while a program sends", "sending", &SENDING, &mut bars),
        table(desk, "Table 1: a send, no replacement", "send-alone", "call", &ALONE),
        table(desk, "Table 1: a send, in trials with a replacement", "send-replaced", "call", &with_relay),
        later(desk, &[&ALONE[..], &with_relay].concat()),
        loads(desk),
    ];
    let plot = svg::bars("A replacement, from asking to the answer: mean (logarithmic)", "ns", &bars);
    let ours = |case, metric| desk.ours(("relay", case, metric));
    Section {
        paper: &REPLACEMENT,
        reached: vec![
            reached(
                "A driver's process is replaced while a program sends, asked to answered, mean: MINIX 3",
                &REPLACEMENT,
                "minix3-replace-sending-mean",
                ours("sends-upgrade", "asked_mean"),
                "whole system, a new process, Linux's TCP through a model of an 82574L",
            ),
            reached(
                "… MINIX 3; here a process that was started ahead",
                &REPLACEMENT,
                "minix3-replace-sending-mean",
                ours("sends-staged", "asked_mean"),
                "the same, staged",
            ),
            reached(
                "… AnT",
                &REPLACEMENT,
                "ant-replace-sending-mean",
                ours("sends-upgrade", "asked_mean"),
                "the same, a new process",
            ),
            reached(
                "… a send meanwhile, mean: MINIX 3",
                &REPLACEMENT,
                "minix3-send-replaced-mean",
                ours("sends-upgrade", "call_mean"),
                "the same; a send takes as long without a replacement",
            ),
            reached(
                "… MINIX 3; here started ahead, under a stream of frames, median",
                &REPLACEMENT,
                "minix3-replace-sending-mean",
                ours("upgrade-staged-paper", "asked_p50"),
                "another run: 1 KB a ms comes and goes back, without a program and its TCP",
            ),
        ],
        body: plot + &tables.iter().map(Grid::html).collect::<String>(),
        differs: &[
            "The same experiment: 1,024 bytes by TCP, a millisecond of work, a thousand times, a replacement among them, program and drivers on one CPU. But the program's send is a call into Linux's own TCP, and the driver is behind a TAP: a send takes as long as Linux needs for it on this machine.",
            "An answer here means that the new process drives. Its time includes an HTTP request, and the start of a process from its file, its confinement and its connection. \"Staged\" means that these were done ahead. \"By the store\" sends the driver's state through the daemon, as MINIX 3 sends it through a server. The other ways leave it in memory that both processes have, as AnT does.",
            "The card is a model in a process on the other CPU, as silicon would work beside the CPU. At line rate its clock and its wire stand still while that CPU runs something else. On two CPUs it runs tasukid for most of the time after a kill, so the 0 lost of \"killed, line rate\" says little there.",
        ],
        out_of_reach: &[
            "A Realtek 8139 that changes hands under a sending program: the card has no register that tells its place in a ring, so it cannot change hands without a loss.",
            "MINIX 3 and AnT on this machine: they were not tried. MINIX 3 would run translated, in QEMU; no copy of AnT was at hand.",
        ],
    }
}

/// Makes one of the four parts of Table 1: both systems, then `ours`, whose figures begin with `metric`.
fn table(desk: &Desk<'_>, caption: &str, what: &str, metric: &str, ours: &[(&str, &str)]) -> Grid {
    let head = ["", "longest", "mean", "shortest", "mean against MINIX 3", "mean against AnT"];
    let mut grid = Grid::new(caption, &head);
    for (name, system) in SYSTEMS {
        let cells = ["max", "mean", "min"].map(|stat| quote(&REPLACEMENT, &format!("{system}-{what}-{stat}")));
        grid.rows.push(row(name, cells));
    }
    for (label, case) in ours {
        let [max, mean, min] =
            ["max", "mean", "min"].map(|stat| desk.ours(("relay", case, &format!("{metric}_{stat}"))));
        let [minix, ant] =
            SYSTEMS.map(|(_, system)| Cell::beside(&mean, figure(&REPLACEMENT, &format!("{system}-{what}-mean"))));
        grid.rows.push(row(&format!("here: {label}"), [max, mean, min, minix, ant]));
    }
    grid
}

/// Makes a part of Table 1 about replacements, and its bars.
fn replacements(desk: &Desk<'_>, caption: &str, how: &str, ours: &[(&str, &str)], bars: &mut Vec<Bar>) -> Grid {
    let what = format!("replace-{how}");
    for (name, system) in SYSTEMS {
        bars.push(paper_bar(&format!("{name}, {how}"), &REPLACEMENT, &format!("{system}-{what}-mean")));
    }
    for (label, case) in ours {
        bars.push(bar(&format!("{label}, {how}"), &desk.ours(("relay", case, "asked_mean"))));
    }
    table(desk, caption, &what, "asked", ours)
}

/// Figure 2.
fn later(desk: &Desk<'_>, ours: &[(&str, &str)]) -> Grid {
    let head = ["", "most", "mean of each of some", "so many", "median of the trials' most"];
    let mut grid = Grid::new("Figure 2: by how much a send begins later", &head);
    let of = |what| quote(&REPLACEMENT, what);
    grid.rows.push(row("MINIX 3", [of("minix3-later")]));
    grid.rows.push(row("MINIX 3: the whole interval, with 1 ms of work", [of("minix3-interval")]));
    grid.rows.push(row("AnT", [Cell::None, of("ant-later"), of("ant-later-sends")]));
    for (label, case) in ours {
        let here = |metric| desk.ours(("relay", case, metric));
        grid.rows.push(row(&format!("here: {label}"), [here("later_max"), Cell::None, Cell::None, here("later_p50")]));
    }
    grid
}

/// What the paper does not have: the same replacements by the thousand, and their parts.
fn loads(desk: &Desk<'_>) -> Grid {
    let head = [
        "",
        "asked to answered, median",
        "99th percentile",
        "nobody drives, median",
        "99th percentile",
        "lost",
        "in relays",
    ];
    let mut grid = Grid::new("Not in the paper: many replacements under a stream of frames", &head);
    for (label, case) in LOADS {
        let here = |metric| desk.ours(("relay", case, metric));
        // Nobody asks for a death.
        let asked =
            if case.starts_with("takeover") { [Cell::None, Cell::None] } else { ["asked_p50", "asked_p99"].map(here) };
        let rest = [here("pause_p50"), here("pause_p99"), here("lost"), desk.count(("relay", case, "lost"))];
        grid.rows.push(row(&format!("here: {label}"), asked.into_iter().chain(rest)));
    }
    grid
}
