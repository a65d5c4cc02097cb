//! Ethernet between nodes through shared memory.

mod floor;
mod huge;
mod idle;
mod memcpy;
mod memif;
mod memory;
mod mint;
mod netns;
mod nodes;
mod pair;
mod receives;
mod rows;
pub mod shared;
mod sockets;
mod trips;

use anyhow::Result;

use crate::case::{Case, Ends, Measure, Serve};
use crate::cpus::Cores;
use crate::floors;
use crate::program;
use crate::rounds::Manner;

pub use floor::node as floor_node;
pub use huge::HugePages;
pub use idle::node as idle_node;
pub use netns::{Namespaces, Traffic, tap_node};
pub use rows::{is_of_namespaces, rows, rows_of_namespaces};

/// The cases, in the order in which a round runs them: compared cases are neighbours.
///
/// `calls` counts frames or round trips. There are so few that a run ends before the host is likely to move the
/// CPUs, even where they are far apart.
pub const CASES: &[Case] = &[
    frames::<64, COPY>("copy-64", 4_000_000),
    floor::<64>("memcpy-64", 4_000_000),
    memif::<64, COPY>("memif-64"),
    frames::<1518, COPY>("copy-1518", 500_000),
    floor::<1518>("memcpy-1518", 500_000),
    memif::<1518, COPY>("memif-1518"),
    mint::<COPIES_LOCKED>("mint-locked"),
    mint::<COPIES_FREE>("mint-free"),
    frames::<15_000, COPY>("copy-15000", 75_000),
    floor::<15_000>("memcpy-15000", 75_000),
    frames::<15_000, IN_PLACE>("inplace-15000", 75_000),
    frames::<64, IN_PLACE>("inplace-64", 4_000_000),
    memif::<64, IN_PLACE>("memif-inplace-64"),
    frames::<1518, IN_PLACE>("inplace-1518", 500_000),
    memif::<1518, IN_PLACE>("memif-inplace-1518"),
    trips::<64, SPINS>("rtt-64"),
    trips::<1518, SPINS>("rtt-1518"),
    unix::<64, SPINS>("unix-64"),
    unix::<1518, SPINS>("unix-1518"),
    veth::<{ 64 - sockets::UDP_HEADERS }, SPINS>("veth-64"),
    veth::<{ 1518 - sockets::UDP_HEADERS }, SPINS>("veth-1518"),
    trips::<64, SLEEPS>("rtt-64-interrupt"),
    trips::<1518, SLEEPS>("rtt-1518-interrupt"),
    unix::<64, SLEEPS>("unix-64-interrupt"),
    unix::<1518, SLEEPS>("unix-1518-interrupt"),
    veth::<{ 64 - sockets::UDP_HEADERS }, SLEEPS>("veth-64-interrupt"),
    veth::<{ 1518 - sockets::UDP_HEADERS }, SLEEPS>("veth-1518-interrupt"),
    alone("memory-100", 1, memory::measure),
    alone("idle-32", 2, idle::measure),
];

/// How a frame crosses: copied from a private buffer to a private buffer; or written and read in shared memory,
/// every byte.
const COPY: bool = false;
const IN_PLACE: bool = true;

/// Whether a node holds the one lock of Mint's buffers while it copies a frame.
const COPIES_LOCKED: bool = true;
const COPIES_FREE: bool = false;

/// How a node waits for a frame.
const SPINS: bool = false;
const SLEEPS: bool = true;

const fn case(name: &'static str, calls: u64, prepare: fn() -> Result<Ends>, serve: Serve, measure: Measure) -> Case {
    Case { name, cores: Cores::Other, calls, full: 2, prepare, serve, measure }
}

/// Frames of `LEN` bytes, at full speed.
const fn frames<const LEN: usize, const IN_PLACE: bool>(name: &'static str, frames: u64) -> Case {
    case(name, frames, pair::node_memories, pair::receive::<LEN, IN_PLACE>, pair::send::<LEN, IN_PLACE>)
}

/// The same by `memcpy` alone.
const fn floor<const LEN: usize>(name: &'static str, frames: u64) -> Case {
    case(name, frames, memcpy::memory::<LEN>, memcpy::receive::<LEN>, memcpy::send::<LEN>)
}

/// The same by DPDK. `calls` counts looks at its counters.
const fn memif<const LEN: usize, const ZERO_COPY: bool>(name: &'static str) -> Case {
    case(name, 8, memif::sockets, memif::receive, memif::send::<LEN, ZERO_COPY>)
}

/// The same through Mint's old buffers.
const fn mint<const COPIES_LOCKED: bool>(name: &'static str) -> Case {
    case(name, 200_000, mint::memory, mint::receive::<COPIES_LOCKED>, mint::send::<COPIES_LOCKED>)
}

const fn calls(sleeps: bool) -> u64 {
    if sleeps { 2_000 } else { 100_000 }
}

/// Round trips of a frame.
const fn trips<const LEN: usize, const SLEEPS: bool>(name: &'static str) -> Case {
    case(name, calls(SLEEPS), pair::node_memories, trips::answer::<LEN, SLEEPS>, trips::trips::<LEN, SLEEPS>)
}

/// The same by UNIX datagrams.
const fn unix<const LEN: usize, const SLEEPS: bool>(name: &'static str) -> Case {
    let calls = if SLEEPS { 2_000 } else { 20_000 };
    case(name, calls, sockets::unix, sockets::answer::<LEN, SLEEPS>, sockets::trips::<LEN, SLEEPS>)
}

/// The same by UDP over veth.
const fn veth<const LEN: usize, const SLEEPS: bool>(name: &'static str) -> Case {
    Case { prepare: sockets::veth, ..unix::<LEN, SLEEPS>(name) }
}

/// A case that needs no other side.
const fn alone(name: &'static str, calls: u64, measure: Measure) -> Case {
    case(name, calls, Ends::none, |_| Ok(()), measure)
}

/// Floors measured in the same rounds: two wake-ups of another CPU.
fn floors() -> impl Iterator<Item = &'static Case> {
    floors::CASES.iter().filter(|case| case.name == rows::EVENTFD)
}

pub fn cases() -> impl Iterator<Item = &'static Case> {
    CASES.iter().chain(floors())
}

/// How to run the cases. Each run notes how far apart the CPUs were. Cases that take seconds to start, or always
/// give the same figure, do not run in every round.
pub const MANNER: Manner = Manner {
    distances: true,
    is_seldom: |case| ["memif", "memory", "idle", "veth"].iter().any(|prefix| case.name.starts_with(prefix)),
};

/// Cases that this machine can run, and the resources for them.
#[derive(Debug)]
pub struct Equipment {
    pub cases: Vec<&'static Case>,
    _huge_pages: Option<HugePages>,
}

impl Equipment {
    /// Checks the resources that these cases need, and reserves some. Prints a sentence for each group of cases left
    /// out.
    pub fn get(mut cases: Vec<&'static Case>) -> Self {
        let mut huge_pages = None;
        let mut leave_out = |prefix: &str, is_possible: &mut dyn FnMut() -> Result<(), String>| {
            let is_meant = |case: &&Case| case.name.starts_with(prefix);
            if cases.iter().any(is_meant)
                && let Err(why) = is_possible()
            {
                eprintln!("{prefix} is left out: {why}");
                cases.retain(|case| !is_meant(case));
            }
        };
        leave_out("memif", &mut || {
            if !program::is_there(memif::PROGRAM) {
                return Err(format!("it needs the program {} (apt-get install dpdk)", memif::PROGRAM));
            }
            huge_pages = Some(HugePages::reserve().map_err(|error| format!("{error:#}"))?);
            Ok(())
        });
        leave_out("veth", &mut || match rustix::process::geteuid().is_root() {
            true if program::is_there("ip") => Ok(()),
            true => Err("it needs the program ip (apt-get install iproute2)".to_owned()),
            false => Err("it is between two network namespaces, which only root may make (sudo)".to_owned()),
        });
        leave_out("memory", &mut || memory::is_possible().then_some(()).ok_or_else(memory::advice));
        Equipment { cases, _huge_pages: huge_pages }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::orders::Orders;
    use crate::sample::Sample;

    /// Plays both roles, in this process.
    fn play(case: &Case, calls: u64) -> Sample {
        let ends = (case.prepare)().unwrap();
        let orders = |fds| Orders::new(40, calls, 0, std::path::PathBuf::new(), String::new()).with(fds);
        let (server, client) = (orders(ends.server), orders(ends.client));
        let (serve, measure) = (case.serve, case.measure);
        let (said, heard) = std::sync::mpsc::channel();
        let said_too = said.clone();
        std::thread::spawn(move || said.send(serve(server).map(|()| None)).is_ok());
        std::thread::spawn(move || said_too.send(measure(client).map(Some)).is_ok());
        // If one role gives up, the other waits forever.
        let next = || heard.recv_timeout(Duration::from_secs(60)).expect(case.name).expect(case.name);
        [next(), next()].into_iter().flatten().next().expect("one of them measures")
    }

    /// The roles check that every frame arrives unchanged.
    #[test]
    fn every_frame_of_every_case_arrives() {
        for case in CASES.iter().filter(|case| !(MANNER.is_seldom)(case)) {
            let sample = play(case, 400);
            let is_trip = case.name.starts_with("rtt") || case.name.starts_with("unix");
            assert_eq!(sample.summary().count, if is_trip { 400 } else { 1 }, "{}", case.name);
            assert_eq!(sample.numbers("rate").len(), usize::from(!is_trip), "{}", case.name);
        }
    }

    #[test]
    fn datagrams_cross_veth() {
        if Equipment::get(CASES.iter().filter(|case| case.name == "veth-1518").collect()).cases.is_empty() {
            println!("skipped: needs root and iproute2, to make network namespaces");
            return;
        }
        for case in CASES.iter().filter(|case| case.name.starts_with("veth")) {
            assert_eq!(play(case, 200).summary().count, 200, "{}", case.name);
        }
    }

    /// The formula of docs/design/vni.md.
    #[test]
    fn the_memory_of_a_hundred_nodes_is_what_the_page_says() {
        if !memory::is_possible() {
            println!("skipped: {}", memory::advice());
            return;
        }
        let case = CASES.iter().find(|case| case.name == "memory-100").unwrap();
        let sample = play(case, 1);
        let (page, nodes) = (4096, u64::from(memory::NODES));
        let of = |pairs: u64| (nodes * (memory::POOL + 3 * page) + pairs * page) as f64;
        let said = memory::WHO.map(|who| sample.median(who).unwrap());
        assert_eq!(said, [of(0), of(nodes), of(nodes * (nodes - 1))]);
    }

    #[test]
    fn every_case_that_is_compared_is_run() {
        let names: Vec<_> = cases().map(|case| case.name).collect();
        for (name, _) in rows::MEMIF_BARS {
            let memif = format!("memif-{}", name.trim_start_matches("copy-"));
            assert!(names.contains(&name) && names.contains(&memif.as_str()), "{name} beside {memif}");
        }
        assert!(names.contains(&rows::EVENTFD));
    }
}
