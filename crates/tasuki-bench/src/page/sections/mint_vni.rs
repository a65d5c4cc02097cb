//! S2: Ethernet between nodes through memory.

use super::super::desk::{Desk, bar};
use super::super::html::{Cell, Grid};
use super::super::svg;
use super::{Section, figure, paper_bar, quote, reached, row, text};
use crate::papers::MINT_VNI;

/// Frames without sockets: label, case, bytes of a frame.
const RAW: [(&str, &str, f64); 4] = [
    ("15,000 bytes, copied in and out", "copy-15000", 15_000.0),
    ("15,000 bytes, written and read in place", "inplace-15000", 15_000.0),
    ("1,518 bytes, copied in and out", "copy-1518", 1_518.0),
    ("1,518 bytes, written and read in place", "inplace-1518", 1_518.0),
];

pub fn section(desk: &Desk<'_>) -> Section {
    let vni = |case: &str, metric: &str| desk.ours(("vni", case, metric));
    Section {
        paper: &MINT_VNI,
        reached: vec![
            reached(
                "Between two nodes: TCP",
                &MINT_VNI,
                "tcp-new",
                vni("tcp-netns", "gbps"),
                "two namespaces, iperf3, one connection",
            ),
            reached(
                "… UDP, memory to memory",
                &MINT_VNI,
                "udp-new",
                vni("copy-15000", "gbps"),
                "frames of 15,000 bytes, copied in and out, without sockets",
            ),
            reached(
                "… UDP, by the paper's own measurement",
                &MINT_VNI,
                "udp-new",
                vni("udp-recv", "gbps_arrived"),
                "two namespaces, ten receives of 15,000 bytes that have arrived",
            ),
            reached(
                "… UDP through sockets, over the whole time",
                &MINT_VNI,
                "udp-new",
                vni("udp-netns", "gbps"),
                "two namespaces, iperf3, datagrams of 1,400 bytes; veth is about as slow",
            ),
            reached(
                "… memory for 100 nodes that all talk to all",
                &MINT_VNI,
                "memory-100",
                vni("memory-100-all", "memory"),
                "100 nodes, whole pools",
            ),
        ],
        body: plot(desk) + &rates(desk).html() + &raw(desk).html() + &memory(desk).html(),
        differs: &[
            "The paper divides the bytes of ten receives of 15,000 bytes by the time spent in recv. It does not say whether its receiver waits in recv for what is still to come. Here both are measured: one that waits, and one that begins when all has arrived, which times little but a copy out of the kernel. iperf3 divides by the whole time, seconds long, and so do the rows without sockets, in which the sender writes every byte and the receiver reads it.",
            "Here the nodes are network namespaces or processes under one kernel. UDP through sockets is bound by the kernel's work for each datagram: veth, with no Tasuki in it, is about as slow.",
            "The old buffers were rebuilt from the paper's description, with the exclusion that it says they need: one spin lock, and the faster of two ways to hold it.",
        ],
        out_of_reach: &["Mint itself on this machine: no copy of it was at hand."],
    }
}

/// The paper's table.
fn rates(desk: &Desk<'_>) -> Grid {
    let mut grid = Grid::new(
        "The table: throughput between two nodes",
        &["", "TCP", "against the new buffers", "UDP", "against the new buffers"],
    );
    for (label, state) in
        [("the paper: buffers that all nodes write", "old"), ("the paper: buffers with one writer each", "new")]
    {
        let [tcp, udp] = ["tcp", "udp"].map(|what| quote(&MINT_VNI, &format!("{what}-{state}")));
        grid.rows.push(row(label, [tcp, Cell::None, udp, Cell::None]));
    }
    for (label, suffix, metric) in [
        ("here: ten receives, all has arrived", "recv", "gbps_arrived"),
        ("here: ten receives that wait", "recv", "gbps"),
        ("here: iperf3, whole time", "netns", "gbps"),
        ("here: iperf3, by the nodes' workers", "netns-by-workers", "gbps"),
    ] {
        let pair = ["tcp", "udp"].map(|what| {
            let ours = desk.ours(("vni", &format!("{what}-{suffix}"), metric));
            let compared = Cell::beside(&ours, figure(&MINT_VNI, &format!("{what}-new")));
            [ours, compared]
        });
        grid.rows.push(row(label, pair.into_iter().flatten()));
    }
    for (label, suffix, metric) in [
        ("veth: ten receives, all has arrived", "recv", "gbps_arrived"),
        ("veth: ten receives that wait", "recv", "gbps"),
        ("veth: iperf3, whole time", "netns", "gbps"),
    ] {
        let [tcp, udp] = ["tcp", "udp"].map(|what| desk.beside(("vni", &format!("{what}-{suffix}"), metric), "veth"));
        grid.rows.push(row(label, [tcp, Cell::None, udp, Cell::None]));
    }
    grid
}

/// Returns the rate of a peer or floor of a case, in Gb/s.
fn beside(desk: &Desk<'_>, case: &str, name: &str, len: f64) -> Cell {
    desk.beside(("vni", case, "pps"), name).scaled(len * 8.0 / 1e9, "Gb/s")
}

fn raw(desk: &Desk<'_>) -> Grid {
    let caption = "The same without sockets: frames from one process's memory to another's";
    let mut grid = Grid::new(caption, &["", "here", "against the paper's UDP, new buffers", "memcpy alone, the floor"]);
    for (label, case, len) in RAW {
        let ours = desk.ours(("vni", case, "gbps"));
        let compared = Cell::beside(&ours, figure(&MINT_VNI, "udp-new"));
        grid.rows.push(row(label, [ours, compared, beside(desk, case, "memcpy", len)]));
    }
    let old = beside(desk, "copy-1518", "mint-buffers", 1_518.0);
    grid.rows.push(row("1,518 bytes through the old buffers, rebuilt", [old]));
    grid
}

fn memory(desk: &Desk<'_>) -> Grid {
    let mut grid = Grid::new("Open question: memory for 100 nodes", &["", "memory", "against the paper", "buffers"]);
    let of = |what| quote(&MINT_VNI, what);
    grid.rows
        .push(row("the paper: a buffer for each pair of nodes", [of("memory-100"), Cell::None, of("buffers-100")]));
    grid.rows.push(row("the paper: or as much memory as for two nodes", [Cell::None, Cell::None, of("buffer-share")]));
    for (label, case) in [
        ("here: nobody has sent yet", "memory-100-silent"),
        ("here: each has sent to its neighbours", "memory-100-neighbours"),
        ("here: each has sent to each", "memory-100-all"),
    ] {
        let ours = desk.ours(("vni", case, "memory"));
        let compared = Cell::beside(&ours, figure(&MINT_VNI, "memory-100"));
        grid.rows.push(row(label, [ours, compared, text("one pool a node")]));
    }
    grid
}

fn plot(desk: &Desk<'_>) -> String {
    let vni = |case: &str, metric: &str| desk.ours(("vni", case, metric));
    let veth = |case: &str| desk.beside(("vni", case, "gbps"), "veth");
    let bars = [
        paper_bar("Mint, old buffers: TCP", &MINT_VNI, "tcp-old"),
        paper_bar("Mint, new buffers: TCP", &MINT_VNI, "tcp-new"),
        bar("namespaces, iperf3: TCP", &vni("tcp-netns", "gbps")),
        bar("veth, iperf3: TCP", &veth("tcp-netns")),
        paper_bar("Mint, old buffers: UDP", &MINT_VNI, "udp-old"),
        paper_bar("Mint, new buffers: UDP", &MINT_VNI, "udp-new"),
        bar("namespaces, recv of what has arrived: UDP", &vni("udp-recv", "gbps_arrived")),
        bar("namespaces, iperf3: UDP", &vni("udp-netns", "gbps")),
        bar("veth, iperf3: UDP", &veth("udp-netns")),
        bar("frames of 15,000 bytes, copied", &vni("copy-15000", "gbps")),
        bar("frames of 15,000 bytes, in place", &vni("inplace-15000", "gbps")),
        bar("memcpy of 15,000 bytes, the floor", &beside(desk, "copy-15000", "memcpy", 15_000.0)),
        bar("Mint's old buffers, rebuilt: 1,518 bytes", &beside(desk, "copy-1518", "mint-buffers", 1_518.0)),
    ];
    svg::bars("Throughput (logarithmic)", "Gb/s", &bars)
}
