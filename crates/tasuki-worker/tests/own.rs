//! A program of the user's own that fills the card's ring as fast as it goes, and is killed while its frames find no room: each number is on the wire
//! once, in order.
#![allow(clippy::tests_outside_test_module, reason = "the whole file is tests")]

#[macro_use]
mod daemon;

use std::path::{Path, PathBuf};

use daemon::{Model, Nic, Node, Worker, until};
use rustix::process::Signal;
use tasuki_relay::letter::{ToWorker, Work};
use tasuki_relay::wire::Report;

/// Where a driver dies, and how often it passes there before.
const PLACES: &[(&str, u32)] = &[
    ("burst.turned", 40),
    ("state.written", 41),
    ("nic.filled", 42),
    ("nic.written", 80),
    ("nic.written", 81),
    ("nic.committed", 80),
    ("nic.committed", 81),
    ("nic.committed", 82),
    ("nic.rung", 83),
    ("nic.posted", 44),
    ("burst.sent", 45),
    ("take.salvaged", 1),
    ("take.looked", 1),
];
const COUNT: u64 = 60_000;

/// An example of this crate, if it was built.
fn example(name: &str) -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_BIN_EXE_tasuki-worker")).with_file_name("examples").join(name);
    path.exists().then_some(path)
}

#[test]
fn what_finds_no_room_is_sent_once_whoever_dies() {
    if cfg!(not(feature = "crash-points")) {
        return println!("skipped: needs the feature crash-points");
    }
    need_model!();
    let Some(program) = example("generator") else {
        return println!("skipped: needs the examples: cargo build --package tasuki-worker --examples --all-features");
    };
    let folder = tempfile::tempdir().expect("a folder");
    let capture = folder.path().join("wire.pcap");
    let model = Model::start(folder.path(), &["--pcap", capture.to_str().expect("a path")]);
    let nic = Nic::open(&model.socket, &["--ring", "64"]);
    let mut node = Node::new(folder.path(), Work::Program);
    (node.program, node.options) = (program, format!("count={COUNT} size=200"));
    let mut driver: Option<Worker> = None;
    let rounds = PLACES.iter().chain(PLACES).map(Some).chain([None]);
    for plan in rounds {
        let plan = plan.map(|(place, nth)| ("TASUKI_CRASH", format!("{place}:{nth}")));
        let mut next = node.ready(&nic, plan.as_slice());
        if let Some(mut dead) = driver.take() {
            assert_eq!(dead.process.end(), None, "{:?}", dead.told);
        }
        let report = next.grant_or_end(&nic);
        assert!(matches!(report, None | Some(Report::Taken { .. })), "{report:?} {:?}", next.told);
        driver = Some(next);
    }
    let mut driver = driver.expect("the last one");
    until("all that is to be sent", || node.remembered(0) >= COUNT);
    // What is given to the card is sent before it is parked.
    driver.letter(&ToWorker::End, &[]);
    assert_eq!(driver.process.end(), Some(0), "{:?}", driver.told);
    drop((driver, nic));
    model.process.signal(Signal::TERM);
    model.report();
    let file = std::fs::File::open(&capture).expect("the capture");
    let mut reader = pcap_file::pcap::PcapReader::new(file).expect("a capture");
    let mut due = 0_u64;
    while let Some(packet) = reader.next_packet() {
        let packet = packet.expect("a whole packet");
        if packet.data[12..18] == *b"\x88\xb5tsk\x01" {
            assert_eq!(u64::from_le_bytes(packet.data[18..26].try_into().expect("eight bytes")), due);
            due += 1;
        }
    }
    assert_eq!(due, COUNT);
}
