//! S3: the network card of a virtual machine.

use super::super::desk::{Desk, value};
use super::super::html::{Cell, Grid};
use super::super::svg::{self, Curve, Who};
use super::{Section, figure, quote, reached, row, text};
use crate::guest::{flat, load};
use crate::papers::{VM, VM_SIZES};

const TAP: &str = "qemu-tap";

pub fn section(desk: &Desk<'_>) -> Section {
    let of = |case: &str, metric| desk.ours(("guest", case, metric));
    Section {
        paper: &VM,
        reached: vec![
            reached(
                "The card of a virtual machine: round trip, 64 bytes",
                &VM,
                "rtt",
                of("rtt-64", "rtt_p50"),
                "stock guest, translated; beside a namespace of its host; median",
            ),
            reached("… 1,518 bytes", &VM, "rtt", of("rtt-1518", "rtt_p50"), "the same"),
            reached(
                "… frames a second, 64 bytes",
                &VM,
                "pps",
                of("g2h-64", "pps"),
                "DPDK's driver in the guest's place: no virtual CPU in the way",
            ),
            reached(
                "… frames a second, 1,518 bytes, from machine to machine",
                &VM,
                "pps",
                of("flat-1518", "carried"),
                "drivers of our own, a worker each; offered the paper's rate, and no frame lost",
            ),
            reached(
                "… round trip between them, 1,518 bytes",
                &VM,
                "rtt",
                of("trip-1518", "rtt_p50"),
                "the same; median",
            ),
            reached(
                "… frames a second of a whole guest",
                &VM,
                "pps",
                of("interrupts-per-packet-g2h", "pps"),
                "stock guest, translated: the translation is the limit",
            ),
        ],
        body: trips(desk)
            + &rates(desk)
            + &at_the_rate(desk)
            + &load(desk).html()
            + &near_the_limit(desk)
            + &gathered(desk),
        differs: &[
            "These machines have no KVM, so a stock guest's instructions are translated. A guest that the hardware runs would be several times faster by any way. Its figures say something only beside QEMU's TAP with the same guest in the same run. DPDK's virtio-user, a driver in a process of its own, stands for a guest that is as fast as can be.",
            "The paper's guests are on two hosts with InfiniBand between. Ours is on one, beside a network namespace.",
            "The paper's CPU load is of all cores together, at rates near the limit of the slower system. Here it is in per cent of one core, without the virtual CPUs: at 4,000 frames a second of 64 bytes, which the translated guest carries without loss, and, where its kernel sends, at 0.8 of the slower system's highest rate.",
        ],
        out_of_reach: &[
            "InfiniBand, two hosts, KVM and vhost-net: none of them is on these machines. QEMU's own TAP back end and DPDK's vhost take vhost-net's place.",
            "Figure 13 at the other six sizes with a whole guest: here it was measured with 64 bytes alone, and the paper's curves have no numbers. Between drivers of our own, the CPU of all sizes is above.",
        ],
    }
}

/// Makes a cell for each size.
fn sized(of: impl Fn(u32) -> Cell) -> Vec<Cell> {
    VM_SIZES.into_iter().map(of).collect()
}

fn grid(caption: &str, sizes: &[u32]) -> Grid {
    let sizes: Vec<_> = sizes.iter().map(|size| format!("{size} B")).collect();
    Grid::new(caption, &[""].into_iter().chain(sizes.iter().map(String::as_str)).collect::<Vec<_>>())
}

fn curve(label: &str, who: Who, is_broken: bool, cells: &[Cell]) -> Curve {
    Curve { label: label.to_owned(), who, is_broken, values: cells.iter().map(value).collect() }
}

/// Makes the curve of a paper's figure that is the same at all sizes.
fn level(label: &str, what: &str) -> Curve {
    let values = vec![Some(figure(&VM, what).high); VM_SIZES.len()];
    Curve { label: label.to_owned(), who: Who::Paper, is_broken: true, values }
}

/// Figure 9.
fn trips(desk: &Desk<'_>) -> String {
    let place = |size| format!("rtt-{size}");
    let ours = |metric| sized(|size| desk.ours(("guest", &place(size), metric)));
    let (p50, p99) = (ours("rtt_p50"), ours("rtt_p99"));
    let tap = sized(|size| desk.beside(("guest", &place(size), "rtt_p50"), TAP));
    let between = |metric| sized(|size| desk.ours(("guest", &format!("trip-{size}"), metric)));
    let (between_p50, between_p99) = (between("rtt_p50"), between("rtt_p99"));
    let curves = [
        level("the paper: below this", "rtt"),
        curve("here, 99th percentile", Who::Ours, true, &p99),
        curve("here, median", Who::Ours, false, &p50),
        curve("QEMU's TAP, median", Who::Peer, false, &tap),
        curve("between drivers of our own, p99", Who::Ours, true, &between_p99),
        curve("between drivers of our own, median", Who::Ours, false, &between_p50),
    ];
    let mut grid = grid("Figure 9: round trip by the length of the frame", &VM_SIZES);
    grid.rows = vec![
        row("the paper", sized(|_| quote(&VM, "rtt"))),
        row("here, median", p50),
        row("here, 99th percentile", p99),
        row("QEMU's TAP, same guest, median", tap),
        row("here, between drivers of our own: median", between_p50),
        row("here, between drivers of our own: 99th percentile", between_p99),
    ];
    svg::curves("Figure 9: round trip (logarithmic)", &VM_SIZES, "bytes of a frame", "ns", &curves) + &grid.html()
}

/// Figure 10, and 11, which is the same in bits.
fn rates(desk: &Desk<'_>) -> String {
    let ours = |way: &str| sized(|size| desk.ours(("guest", &format!("{way}-{size}"), "pps")));
    let dpdk = |way: &str| sized(|size| desk.beside(("guest", &format!("{way}-{size}"), "pps"), "dpdk-vhost"));
    let stock = |way: &str| desk.ours(("guest", &format!("interrupts-per-packet-{way}"), "pps"));
    let tap = |way: &str| desk.beside(("guest", &format!("interrupts-per-packet-{way}"), "pps"), TAP);
    let (sends, receives) = (ours("g2h"), ours("h2g"));
    let carried = sized(|size| desk.ours(("guest", &format!("flat-{size}"), "carried")));
    let pktgen = |size: u32| format!("pktgen-{size}");
    let of_kernel = sized(|size| desk.ours(("guest", &pktgen(size), "pps")));
    let of_kernel_by_tap = sized(|size| desk.beside(("guest", &pktgen(size), "pps"), TAP));
    let curves = [
        curve("here, DPDK's driver sends", Who::Ours, false, &sends),
        curve("here, DPDK's driver receives", Who::Ours, true, &receives),
        curve("DPDK's vhost, it sends", Who::Peer, false, &dpdk("g2h")),
        curve("DPDK's vhost, it receives", Who::Peer, true, &dpdk("h2g")),
        level("the paper: about this", "pps"),
        curve("here, from machine to machine", Who::Ours, true, &carried),
        curve("here, a translated guest sends (pktgen)", Who::Ours, false, &of_kernel),
        curve("QEMU's TAP, it sends (pktgen)", Who::Peer, true, &of_kernel_by_tap),
    ];
    let mut grid = grid("Figures 10 and 11: frames a second by the length of the frame", &VM_SIZES);
    grid.rows = vec![
        row("the paper", sized(|_| quote(&VM, "pps"))),
        row("the paper: vhost-net + eIPoIB is slower by", sized(|_| quote(&VM, "pps-gain"))),
        row("here: DPDK's driver sends", sends),
        row("DPDK's vhost: it sends", dpdk("g2h")),
        row("here: DPDK's driver receives", receives),
        row("DPDK's vhost: it receives", dpdk("h2g")),
        row("here, from machine to machine: none of these is lost", carried),
        row("here: a translated guest's kernel sends (pktgen)", of_kernel),
        row("QEMU's TAP: it sends (pktgen)", of_kernel_by_tap),
        row("here: a program in a translated guest sends", [stock("g2h")]),
        row("QEMU's TAP: it sends", [tap("g2h")]),
        row("here: a translated guest receives", [stock("h2g")]),
        row("QEMU's TAP: it receives", [tap("h2g")]),
    ];
    svg::curves("Figure 10: frames a second (logarithmic)", &VM_SIZES, "bytes of a frame", "frames/s", &curves)
        + &grid.html()
}

/// What the paper's rate costs at each length, from machine to machine, through a worker of each.
fn at_the_rate(desk: &Desk<'_>) -> String {
    let case = |size: u32| format!("flat-{size}");
    let ours = |metric| flat::SIZES.map(|size| desk.ours(("guest", &case(size), metric)));
    let copies = flat::SIZES.map(|size| desk.beside(("guest", &case(size), "cpu"), flat::MEMCPY));
    let title = "CPU of both workers by the length of the frame, at the paper's rate";
    let mut grid = grid(title, &flat::SIZES);
    grid.rows = [("offered", "offered"), ("lost", "lost"), ("CPU of both workers", "cpu")]
        .map(|(label, metric)| row(label, ours(metric)))
        .into();
    let curves =
        [curve("both workers", Who::Ours, false, &ours("cpu")), curve("the copies alone", Who::Peer, true, &copies)];
    grid.rows.push(row("the two copies of each frame alone, by memcpy", copies));
    let slope = ("guest", "flat-slope", "cpu");
    grid.rows.push(row("each byte more costs, from 64 to 1,518 bytes", [desk.ours(slope)]));
    grid.rows.push(row("… by memcpy", [desk.beside(slope, flat::MEMCPY)]));
    svg::curves(&format!("{title} (logarithmic)"), &flat::SIZES, "bytes of a frame", "% of a core", &curves)
        + &grid.html()
}

/// Figures 12 and 13.
fn load(desk: &Desk<'_>) -> Grid {
    let head = ["64 bytes", "here", "QEMU's TAP, same guest", "compared", "the paper, beside vhost-net + eIPoIB"];
    let mut grid = Grid::new("Figures 12 and 13: the host's CPU at one rate (here 4,000 frames a second)", &head);
    for (label, case, metric, paper) in [
        ("CPU, the guest sends", "host-cpu-g2h", "host_cpu", "lower at every size"),
        ("CPU, the guest receives", "host-cpu-h2g", "host_cpu", "lower at every size"),
        ("interrupts at full rate, the guest sends", "interrupts-per-packet-g2h", "interrupts", ""),
        ("interrupts at full rate, the guest receives", "interrupts-per-packet-h2g", "interrupts", ""),
    ] {
        let place = ("guest", case, metric);
        let (ours, tap) = (desk.ours(place), desk.beside(place, TAP));
        let compared = Cell::beside_peer(&ours, &tap);
        grid.rows.push(row(label, [ours, tap, compared, text(paper)]));
    }
    grid
}

/// Figure 12 as the paper measured it, but for the guest.
fn near_the_limit(desk: &Desk<'_>) -> String {
    let case = |size: u32| format!("pktgen-{size}");
    let [ours, patient] =
        ["host_cpu", "host_cpu_patient"].map(|it| sized(|size| desk.ours(("guest", &case(size), it))));
    let tap = sized(|size| desk.beside(("guest", &case(size), "host_cpu"), TAP));
    let mut grid = grid(
        "Figure 12: the host's CPU near the limit of the slower system, a translated guest's kernel sends",
        &VM_SIZES,
    );
    let compared =
        |ours: &[Cell]| -> Vec<_> { ours.iter().zip(&tap).map(|(ours, tap)| Cell::beside_peer(ours, tap)).collect() };
    let [of_ours, of_patient] = [compared(&ours), compared(&patient)];
    grid.rows = vec![
        row("here", ours),
        row("here, latency_us = 1000", patient),
        row("QEMU's TAP, same guest", tap),
        row("compared", of_ours),
        row("compared, latency_us = 1000", of_patient),
        row("the paper, beside vhost-net + eIPoIB", sized(|_| text("lower"))),
    ];
    grid.html()
}

/// Frames that wait for each other: what that costs in latency, and saves in CPU time.
fn gathered(desk: &Desk<'_>) -> String {
    let case = |rate: u32| format!("load-{rate}k");
    let ours = |metric| load::RATES.map(|rate| desk.ours(("guest", &case(rate), metric)));
    let at_once = |metric| load::RATES.map(|rate| desk.beside(("guest", &case(rate), metric), load::AT_ONCE));
    let rates = load::RATES.map(|rate| format!("{rate},000/s"));
    let head: Vec<_> = [""].into_iter().chain(rates.iter().map(String::as_str)).collect();
    let mut grid = Grid::new("Frames that come one by one, from machine to machine", &head);
    let mut plots = String::new();
    for (title, unit, metric) in [
        ("CPU of both workers (logarithmic)", "% of a core", "cpu"),
        ("Time of a frame, median (logarithmic)", "ns", "p50"),
    ] {
        let (ours, at_once) = (ours(metric), at_once(metric));
        let curves = [curve("they gather", Who::Ours, false, &ours), curve("each at once", Who::Ours, true, &at_once)];
        plots += &svg::curves(title, &load::RATES, "thousands of frames a second", unit, &curves);
        grid.rows.push(row(&format!("{metric}, they gather"), ours));
        grid.rows.push(row(&format!("{metric}, each at once (latency_us = 0)"), at_once));
    }
    plots + &grid.html()
}
