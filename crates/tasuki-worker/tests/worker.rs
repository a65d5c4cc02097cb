//! A worker as a daemon has it: real processes, real letters and packets, and our model of a card with a source on its wire.
#![allow(clippy::tests_outside_test_module, reason = "the whole file is tests")]

mod daemon;

use daemon::{Model, Nic, Node, model_program, nothing_is_lost, taken, until};
use tasuki_relay::letter::{Work, pulse};
use tasuki_relay::wire::Report;
use tempfile::TempDir;

fn folder() -> TempDir {
    tempfile::tempdir().expect("a place for sockets")
}

macro_rules! need_model {
    () => {
        let Some(_) = model_program() else {
            println!("skipped: needs tasuki-sim beside the worker: cargo build --package tasuki-sim");
            return;
        };
    };
}

#[test]
fn a_worker_takes_a_card_from_a_kit_and_echoes() {
    need_model!();
    let folder = folder();
    let model = Model::start(folder.path(), &["--source", "2000", "--rate", "20000"]);
    let nic = Nic::open(&model.socket, &["--promiscuous"]);
    let mut node = Node::new(folder.path(), Work::Echo);
    let mut worker = node.ready(&nic, &[]);
    println!("unconfined: {:?}", worker.unconfined);
    assert_eq!(taken(worker.grant(&nic)), nic.tenure().epoch);
    assert_eq!((nic.tenure().holder, nic.relays()), (Some(worker.party), 1));
    worker.until_sent(2000);
    drop((worker, nic));
    nothing_is_lost(&model.report(), 2000);
}

#[test]
fn a_card_changes_hands_under_traffic() {
    need_model!();
    let folder = folder();
    let model = Model::start(folder.path(), &["--source", "20000", "--rate", "20000"]);
    let nic = Nic::open(&model.socket, &["--promiscuous"]);
    let mut node = Node::new(folder.path(), Work::Echo);
    let (mut red, mut blue) = (node.ready(&nic, &[]), node.ready(&nic, &[]));
    let granted = red.grant(&nic);
    assert!(matches!(granted, Report::Taken { .. }), "{granted:?}: {:?}", red.told);
    let mut pauses = Vec::new();
    for _ in 0..50 {
        let epoch = nic.tenure().epoch;
        let (released, took) = red.pass_to(&mut blue, &nic);
        assert_eq!(
            (released, took),
            (Report::Released { epoch }, Report::Taken { epoch: epoch + 1 }),
            "{:?}",
            blue.told
        );
        pauses.push(nic.pause());
        std::mem::swap(&mut red, &mut blue);
    }
    pauses.sort_unstable();
    println!("pauses: {:?} in the middle, {:?} at most", pauses[25], pauses[49]);
    red.until_sent(20000);
    drop((red, blue, nic));
    nothing_is_lost(&model.report(), 20000);
}

#[test]
fn a_worker_that_is_killed_is_taken_over_from_and_no_frame_is_lost() {
    need_model!();
    let folder = folder();
    let model = Model::start(folder.path(), &["--source", "20000", "--rate", "8000"]);
    let nic = Nic::open(&model.socket, &["--promiscuous"]);
    let mut node = Node::new(folder.path(), Work::Echo);
    let mut driver = node.ready(&nic, &[]);
    taken(driver.grant(&nic));
    for round in 0..20 {
        let mut next = node.ready(&nic, &[]);
        let before = driver.pulse(pulse::SENT);
        until("some frames", || driver.pulse(pulse::SENT) > before || driver.hears_trouble());
        assert_eq!(driver.told, [""; 0], "in round {round}");
        driver.process.kill();
        taken(next.grant(&nic));
        driver = next;
    }
    driver.until_sent(20000);
    drop((driver, nic));
    nothing_is_lost(&model.report(), 20000);
}
