//! Figures of the papers, as data. The reports quote them beside our figures; they come from other machines and are
//! never scaled.
//!
//! Every figure that a paper prints is here. Differences and sums that a paper works out from figures of its own tables
//! are left out, unless a table of its own has them. What a paper claims without a number is a claim.

use comfy_table::Table;

use crate::table::{self, number};

/// A paper's figures.
#[derive(Debug)]
pub struct Paper {
    /// Short, stable name.
    pub name: &'static str,
    /// Number among the seeds.
    pub seed: &'static str,
    /// Subject of the paper.
    pub title: &'static str,
    pub authors: &'static str,
    /// Machine that the paper measured on.
    pub machine: &'static str,
    /// How the paper measured.
    pub method: &'static str,
    pub figures: &'static [Figure],
    /// What the paper says of its curves and of itself without a number that could be put beside ours.
    pub claims: &'static [&'static str],
}

/// One figure of a paper.
#[derive(Debug, Clone, Copy)]
pub struct Figure {
    /// Short, stable name.
    pub what: &'static str,
    /// Where the paper has it.
    pub at: &'static str,
    /// Definition as the paper gives it.
    pub meaning: &'static str,
    /// Unit of the values. Durations are in ns; the paper may print another unit.
    pub unit: &'static str,
    pub sense: Sense,
    /// Best value, where the paper reports a range.
    pub low: Option<f64>,
    /// Worst value that the paper reports, or its single value.
    pub high: f64,
}

/// How a paper's number is meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sense {
    Exact,
    About,
    /// The value is less than the number.
    Below,
    AtMost,
    AtLeast,
}

const fn of(unit: &'static str, what: &'static str, at: &'static str, meaning: &'static str, high: f64) -> Figure {
    Figure { what, at, meaning, unit, sense: Sense::Exact, low: None, high }
}

const fn ns(what: &'static str, at: &'static str, meaning: &'static str, high: f64) -> Figure {
    of("ns", what, at, meaning, high)
}

const fn ms(what: &'static str, at: &'static str, meaning: &'static str, high: f64) -> Figure {
    ns(what, at, meaning, high * 1e6)
}

impl Figure {
    const fn from(self, low: f64) -> Figure {
        Figure { low: Some(low), ..self }
    }

    const fn meant(self, sense: Sense) -> Figure {
        Figure { sense, ..self }
    }

    /// Returns the value that is hardest to beat: the lower one, of a range.
    pub fn best(&self) -> f64 {
        self.low.unwrap_or(self.high)
    }
}

/// Mint: the Linux of another core takes over a NIC, by a kernel module, as it was done before, and by the
/// interrupt's routing.
pub const MINT: Paper = Paper {
    name: "mint",
    seed: "S0",
    title: "A NIC handed from one core's system to another's in the Mint operating system",
    authors: "Masuda, Nomura, Taniguchi",
    machine: "Core i7-870, 2.93 GHz; RTL8111/8168B, r8169, one core; the sender: Intel 82541PI, e1000, four cores; Linux 3.0.8",
    method: "10,000 UDP packets of 1 KB, one a millisecond; the NIC changes hands after the 5,000th. The outage is the number of packets that are missing, times a millisecond. Both owners are the same system, so that no time to agree is in it.",
    figures: &[
        ms("unload", "Table 3", "the old system's driver is unloaded", 2.27),
        ms("load", "Table 3", "the new system's driver is loaded", 1.27),
        ms("up", "Table 3", "its interface is brought up", 54.15),
        ms("calls", "Table 3", "the three together (Table 4 has 57)", 57.69),
        of("%", "unload-share", "Table 3", "share of the unloading in these calls", 4.0),
        of("%", "load-share", "Table 3", "share of the loading", 2.2),
        of("%", "up-share", "Table 3", "share of the interface", 93.8),
        ms("outage", "Table 4", "nothing is received, by kernel module", 2_259.0),
        ms("link", "Table 4", "of which after the calls, until the link is up inside the NIC", 2_202.0),
        ns("detect", "Figure 3", "the kernel notices the link and begins its service", 20e3).meant(Sense::About),
        of("frames", "repoint-lost", "5.4", "packets lost, by routing: eight values", 0.0),
        ms("repoint", "5.4", "nothing is received, by routing", 1.0).meant(Sense::Below),
    ],
    claims: &[
        "Figure 2 names what controls a NIC, and 5.2 the eight values of it that have to change.",
        "Left open: what keeps the old owner from the NIC.",
    ],
};

/// The eight values that Mint changes (5.2.2), and what repoint does with each of them on an 82574L.
pub const EIGHT: [(&str, &str, &str); 8] = [
    ("Message Address", "which core is interrupted", "stays: the message becomes an eventfd, which both owners have"),
    ("Message Data", "which vector", "stays, for the same reason"),
    ("tx_buf_reg", "where the ring to send is", "written: base of the transmit ring, two halves"),
    ("current_tx_reg", "the card's place in it", "written: head and tail; no reset is needed"),
    ("rx_buf_reg", "where the ring to receive is", "written: base of the receive ring, two halves"),
    ("current_rx_reg", "the card's place in it", "written: head and tail; no reset is needed"),
    ("current_tx", "the driver's place", "the taker's own: its ring is ready before the giver stops"),
    ("current_rx", "the driver's place", "the taker's own; frames that lie in the giver's ring go over first"),
];

/// MINIX 3 and AnT: the process of a NIC's driver is replaced.
pub const REPLACEMENT: Paper = Paper {
    name: "replacement",
    seed: "S1",
    title: "Replacing the process of a NIC's driver: MINIX 3 against AnT",
    authors: "Sawada, Yamauchi, Taniguchi",
    machine: "Core i7, 3.2 GHz, one core; Realtek 8139, 100 Mb/s; a second machine receives",
    method: "A program sends 1,024 bytes by TCP and works for a millisecond, a thousand times. Meanwhile the driver is replaced once, at a random time. Five trials: 5 replacements, 5,000 sends. A replacement lasts from the request to its result, a send from the call to its return.",
    figures: &[
        ms("minix3-replace-idle-max", "Table 1", "MINIX 3, a replacement while nothing is sent: longest", 0.316),
        ms("minix3-replace-idle-mean", "Table 1", "the same: mean", 0.313),
        ms("minix3-replace-idle-min", "Table 1", "the same: shortest", 0.311),
        ms("minix3-replace-sending-max", "Table 1", "MINIX 3, a replacement while a program sends: longest", 0.336),
        ms("minix3-replace-sending-mean", "Table 1", "the same: mean", 0.316),
        ms("minix3-replace-sending-min", "Table 1", "the same: shortest", 0.311),
        ms("minix3-send-alone-max", "Table 1", "MINIX 3, a send, no replacement: longest", 0.024),
        ms("minix3-send-alone-mean", "Table 1", "the same: mean", 0.012),
        ms("minix3-send-alone-min", "Table 1", "the same: shortest", 0.009),
        ms("minix3-send-replaced-max", "Table 1", "MINIX 3, a send in trials with a replacement: longest", 0.025),
        ms("minix3-send-replaced-mean", "Table 1", "the same: mean", 0.012),
        ms("minix3-send-replaced-min", "Table 1", "the same: shortest", 0.009),
        ms("ant-replace-idle-max", "Table 1", "AnT, a replacement while nothing is sent: longest", 0.579),
        ms("ant-replace-idle-mean", "Table 1", "the same: mean", 0.568),
        ms("ant-replace-idle-min", "Table 1", "the same: shortest", 0.562),
        ms("ant-replace-sending-max", "Table 1", "AnT, a replacement while a program sends: longest", 10.331),
        ms("ant-replace-sending-mean", "Table 1", "the same: mean", 10.140),
        ms("ant-replace-sending-min", "Table 1", "the same: shortest", 9.993),
        ms("ant-send-alone-max", "Table 1", "AnT, a send, no replacement: longest", 0.018),
        ms("ant-send-alone-mean", "Table 1", "the same: mean", 0.011),
        ms("ant-send-alone-min", "Table 1", "the same: shortest", 0.009),
        ms("ant-send-replaced-max", "Table 1", "AnT, a send in trials with a replacement: longest", 0.114),
        ms("ant-send-replaced-mean", "Table 1", "the same: mean", 0.011),
        ms("ant-send-replaced-min", "Table 1", "the same: shortest", 0.009),
        ms("minix3-interval", "Figure 2", "MINIX 3, longest time between the begins of two sends", 1.350),
        ms("minix3-later", "3.3", "MINIX 3, by how much one send begins later", 0.336),
        ms("ant-later", "3.3", "AnT, by how much each of some sends begins later: mean", 0.0794),
        of("sends", "ant-later-sends", "3.3", "AnT, sends that begin later", 10.0),
    ],
    claims: &[
        "AnT's ten milliseconds are ten reads of a disk: at each the sending program ran out its time slice.",
        "MINIX 3 keeps the old driver's state in a server; AnT in memory that both drivers have.",
    ],
};

/// Mint's virtual network interface, before and after its buffers were divided.
pub const MINT_VNI: Paper = Paper {
    name: "mint-vni",
    seed: "S2",
    title: "Improving the virtual network interface of the Mint operating system",
    authors: "Yoshida",
    machine: "Core i7-4770, 3.4 GHz, memory 25.6 GB/s; two nodes of one core; shared memory 16 MB, buffers 392,200 bytes; Linux 3.15",
    method: "send and recv of 15,000 bytes, ten times: bytes over the time spent in recv.",
    figures: &[
        of("Gb/s", "tcp-old", "the table", "TCP, buffers that all nodes write", 0.128),
        of("Gb/s", "udp-old", "the table", "UDP, buffers that all nodes write", 65.0),
        of("Gb/s", "tcp-new", "the table", "TCP, buffers with one writer each", 10.0),
        of("Gb/s", "udp-new", "the table", "UDP, buffers with one writer each", 75.0),
        of("buffers", "buffers-100", "open questions", "buffers for 100 nodes, each to each", 4_950.0),
        of("MiB", "memory-100", "open questions", "their memory: 1.8 GB", 1.8 * 1024.0).meant(Sense::About),
        of("× smaller", "buffer-share", "open questions", "each buffer, if the memory does not grow", 2_475.0),
    ],
    claims: &[
        "The old buffers need mutual exclusion between the nodes, and had none.",
        "The new ones use their memory less well.",
    ],
};

/// Lengths of the frames that the paper on drivers for virtual machines measured with.
pub const VM_SIZES: [u32; 7] = [64, 128, 256, 512, 1024, 1280, 1518];

/// A driver for virtual machines, over InfiniBand.
pub const VM: Paper = Paper {
    name: "vm",
    seed: "S3",
    title: "A para-virtual driver for fast communication between virtual machines in a data centre",
    authors: "Ueno, Uehara",
    machine: "Xeon E5607 and Core i7-920, a pinned core for each machine's one virtual CPU; ConnectX-2, 40 Gb/s InfiniBand; QEMU 1.6 with KVM, Linux 2.6.32",
    method: "Round trips: mean of 20 pings, one a second. Frames: made in the guest's kernel for 60 s and counted by the other guest. CPU of the host: the middle 20 s of 60, all cores together are 100 %. Each at seven sizes of frames, 64 to 1,518 bytes.",
    figures: &[
        ms("rtt", "Figure 9", "round trip, at each of the seven sizes", 1.0).meant(Sense::Below),
        of("frames/s", "pps", "Figure 10", "frames a second of a machine, at each of the seven sizes", 820e3)
            .meant(Sense::About),
        of("frames/s", "pps-gain", "Figure 10", "by how much vhost-net + eIPoIB is slower", 600e3)
            .meant(Sense::AtLeast),
    ],
    claims: &[
        "Figure 9: the round trip hardly changes with the size of the frame; that of vhost-net + eIPoIB mostly grows with it, with dips at 1,024 and 1,280 bytes.",
        "Figure 10: the rate hardly changes with the size; that of vhost-net + eIPoIB is a little lower from 256 bytes on. Figure 11 is the same in bits.",
        "Figures 12 and 13: the host's CPU load at one rate is below that of vhost-net + eIPoIB at every size, for the sender and the receiver.",
        "The curves are drawings without numbers: what the text says of them is all that can be quoted.",
    ],
};

/// Communication between servers in multi-core AnT; each figure is a mean of ten.
pub const ANT: Paper = Paper {
    name: "ant",
    seed: "S4",
    title: "Communication between server programs in multi-core AnT",
    authors: "Teramoto, Kamou, Sato, Taniguchi",
    machine: "Xeon E5-2630 v3, 2.4 GHz",
    method: "Means of ten, by RDTSC. No arguments, no data, and a server that does nothing else. The server waits asleep; on another core an interrupt between processors wakes it.",
    figures: &[
        ns("request", "Figure 4", "from asking until served", 4_000.0).from(1_500.0).meant(Sense::About),
        ns("return", "Figure 4", "from served until returned", 3_800.0).from(2_300.0).meant(Sense::About),
        ns("call", "3.2", "the whole call, at most", 7_800.0).meant(Sense::AtMost),
        ns("async", "3.2", "asynchronous, on top of synchronous", 1_000.0).meant(Sense::About),
        ns("other-core", "3.2", "another core, on top of the same", 1_500.0).meant(Sense::About),
        of("%", "share", "3.2", "of the time of a call to a server that works for 1 ms", 1.0).meant(Sense::Below),
    ],
    claims: &[
        "The way back takes as long for asynchronous calls as for synchronous ones.",
        "Figure 4 is a drawing without numbers: what the text says of it is all that can be quoted.",
    ],
};

/// All papers, in their order.
#[cfg(test)]
pub const ALL: [&Paper; 5] = [&MINT, &REPLACEMENT, &MINT_VNI, &VM, &ANT];

impl Paper {
    /// Returns the figure of that name.
    pub fn figure(&self, what: &str) -> Option<&'static Figure> {
        self.figures.iter().find(|figure| figure.what == what)
    }

    /// Returns the value that is hardest to beat of the figure of that name, in the figure's unit.
    pub fn best(&self, what: &str) -> Option<f64> {
        self.figure(what).map(Figure::best)
    }

    /// Makes a table of the paper's durations beside `measured`, our own: (figure's name, ns).
    pub fn beside(&self, measured: &[(&str, f64)]) -> Table {
        let mut table = table::empty();
        let (title, theirs) = (format!("{} ({})", self.title, self.seed), format!("{} (ns)", self.name));
        table.set_header([&title, &theirs, "here (ns)", "here ÷ their best"]);
        for figure in self.figures.iter().filter(|figure| figure.unit == "ns") {
            let ours = measured.iter().find(|(what, _)| *what == figure.what).map(|(_, ns)| *ns);
            table.add_row([
                format!("{}: {}", figure.what, figure.meaning),
                figure.low.map_or_else(String::new, |low| number(low) + " – ") + &number(figure.high),
                ours.map_or_else(|| "not measured".to_owned(), number),
                ours.map_or_else(String::new, |ns| format!("{:.3}", ns / figure.best())),
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
        assert_eq!(ANT.best("request"), Some(1_500.0));
        assert_eq!(ANT.best("call"), Some(7_800.0));
        assert_eq!(ANT.best("send"), None);
    }

    #[test]
    fn what_was_not_measured_says_so() {
        let table = ANT.beside(&[("call", 780.0)]).to_string();
        assert!(table.contains("1,500 – 4,000"), "{table}");
        assert!(table.contains("0.100"), "{table}");
        assert_eq!(table.matches("not measured").count(), 4, "{table}");
    }

    #[test]
    fn a_name_means_one_figure_of_a_paper() {
        for paper in ALL {
            let mut names: Vec<_> = paper.figures.iter().map(|figure| figure.what).collect();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), paper.figures.len(), "{}", paper.seed);
        }
    }
}
