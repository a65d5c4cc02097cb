//! Programs of the user's own, killed at the steps of a turn: one that fills the card's ring as fast as it goes, one
//! that changes frames in copies, and one that sends nothing. Each number is on the wire once, in order, and the
//! programs' counts are exact.

use std::path::{Path, PathBuf};

use rustix::process::Signal;
use tasuki_relay::message::{ToWorker, Work, heartbeat};
use tasuki_relay::wire::Report;
use tasuki_testing::until;

use crate::daemon::{Nic, Node, Worker, nothing_is_lost, scene};
use crate::programs::{Model, model_program, numbered_in};

/// Crash points at which a driver dies, and the number of the pass at which it does.
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
    ("take.booked", 1),
    ("take.looked", 1),
];
/// More frames than all workers that are to die can send before they do.
const COUNT: u64 = 100_000;

/// Returns the path of an example of this crate, if such a test can run here.
fn program(name: &str) -> Option<PathBuf> {
    if cfg!(not(feature = "crash-points")) {
        println!("skipped: needs the feature crash-points");
        return None;
    }
    if model_program().is_none() {
        println!("skipped: needs tasuki-sim beside the worker: cargo build --package tasuki-sim");
        return None;
    }
    let path = Path::new(env!("CARGO_BIN_EXE_tasuki-worker")).with_file_name("examples").join(name);
    if !path.exists() {
        println!("skipped: needs the examples: cargo build --package tasuki-worker --examples --all-features");
        return None;
    }
    Some(path)
}

/// The same for a driver that gets a few thousand frames a second.
const SELDOM: &[(&str, u32)] = &[
    ("burst.received", 6),
    ("burst.turned", 7),
    ("state.written", 8),
    ("state.written", 9),
    ("nic.written", 3),
    ("nic.written", 4),
    ("nic.committed", 5),
    ("nic.committed", 6),
    ("nic.rung", 7),
    ("nic.posted", 8),
    ("nic.collected", 9),
    ("take.booked", 1),
    ("take.looked", 1),
];
/// More frames than all workers that are to die can have pending.
const FRAMES: u64 = 12_000;

/// Sends [`FRAMES`] frames to a node with the example `reflector`, while its workers die one after the other.
/// Returns the model's report.
fn reflected(options: &str) -> Option<String> {
    let program = program("reflector")?;
    let (_folder, model, nic, mut node) = scene(Work::Program, FRAMES, 8000);
    (node.program, node.options) = (program, options.to_owned());
    let mut driver = one_after_the_other(&mut node, &nic, SELDOM);
    until("all frames", || node.remembered(0) >= FRAMES);
    // All frames are counted, but the last of them may be on their way out.
    if !options.contains("drop") {
        let driver = &driver;
        until("the last of them", || {
            driver.heartbeat(heartbeat::SENT) > 0
                && driver.heartbeat(heartbeat::SENT) == driver.heartbeat(heartbeat::RECEIVED)
        });
    }
    assert_eq!(node.remembered(0), FRAMES, "{options}");
    // Frames given to the card are sent before it is parked. The memory of a dead worker may be gone before the card has read them.
    driver.message(&ToWorker::End, &[]);
    assert_eq!(driver.process.end(), Some(0), "{:?}", driver.told);
    drop((driver, nic));
    Some(model.report())
}

#[test]
fn frames_that_are_dropped_are_counted_once_whoever_dies() {
    let Some(report) = reflected("drop=0x88b5") else { return };
    assert!(report.contains(&format!("sent {FRAMES}, and none came back")), "{report}");
}

#[test]
fn frames_that_are_changed_in_copies_go_once_whoever_dies() {
    let Some(report) = reflected("copy") else { return };
    nothing_is_lost(&report, FRAMES);
}

/// Has each worker die at its crash point; the last one drives.
fn one_after_the_other(node: &mut Node, nic: &Nic, places: &[(&str, u32)]) -> Worker {
    let mut driver: Option<Worker> = None;
    for plan in places.iter().chain(places).map(Some).chain([None]) {
        let plan = plan.map(|(place, nth)| ("TASUKI_CRASH", format!("{place}:{nth}")));
        let mut next = node.ready(nic, plan.as_slice());
        if let Some(mut dead) = driver.take() {
            assert_eq!(dead.process.end(), None, "{:?}", dead.told);
        }
        let report = next.grant_or_end(nic);
        assert!(matches!(report, None | Some(Report::Taken { .. })), "{report:?} {:?}", next.told);
        driver = Some(next);
    }
    driver.expect("the last one")
}

#[test]
fn what_finds_no_room_is_sent_once_whoever_dies() {
    let Some(program) = program("generator") else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let capture = folder.path().join("wire.pcap");
    let mut model = Model::start(folder.path(), &["--pcap", capture.to_str().expect("a path")]);
    let nic = Nic::open(&model.socket, &["--ring", "64"]);
    let mut node = Node::new(folder.path(), Work::Program);
    (node.program, node.options) = (program, format!("count={COUNT} size=200"));
    let mut driver = one_after_the_other(&mut node, &nic, PLACES);
    until("all that is to be sent", || node.remembered(0) >= COUNT);
    // Frames given to the card are sent before it is parked.
    driver.message(&ToWorker::End, &[]);
    assert_eq!(driver.process.end(), Some(0), "{:?}", driver.told);
    drop((driver, nic));
    model.program.signal(Signal::TERM);
    model.report();
    assert_eq!(numbered_in(&capture), COUNT);
}
