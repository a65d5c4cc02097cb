//! Faults, and the error messages for them.

use std::collections::BTreeSet;
use std::fs;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::process::Stdio;

use hyper::Method;
use rustix::process::Signal;
use serde_json::json;
use tasuki_control::api::client;
use tasuki_relay::message::PROTOCOL_VERSION;

use super::rig::{NODES, Rig, lives, pid, signal, until};

/// Asserts that an upgrade to a program with this fault fails with this sentence, and the old worker drives on.
fn upgrade_fails(fault: &str, parts: &[&str]) {
    let rig = Rig::new();
    let (driver, _) = rig.await_pair("red");
    let bad = rig.program("bad", fault);
    let said = rig.refused(&["worker", "upgrade", "red", "--with", bad.to_str().unwrap()]);
    assert!(said.starts_with("tasuki: node red was not upgraded: "), "{said}");
    assert!(parts.iter().all(|part| said.contains(part)), "{fault}: {said}\n{}", rig.log());
    let drives = rig.await_worker("red", "drives");
    assert_eq!(drives["pid"], driver["pid"], "{fault}: it drives on\n{}", rig.log());
    until(&rig, "nobody is left of the bad program", || {
        rig.workers().iter().all(|worker| !worker["binary"].as_str().unwrap().ends_with("bad"))
    });
    // And it does not block the next upgrade.
    let said = rig.json(&["worker", "upgrade", "red"]);
    assert_eq!(said["relays"][0]["done"], true, "{fault}: {said}");
}

#[test]
fn a_worker_that_dies_at_its_start() {
    upgrade_fails("dies-at-start", &["ended with code 3", "eth0 is driven by worker"]);
}

#[test]
fn a_worker_that_speaks_another_version() {
    let said = format!("speaks version {} of the messages, and this tasukid {PROTOCOL_VERSION}", PROTOCOL_VERSION + 1);
    upgrade_fails("speech", &[&said, "rebuild the older"]);
}

/// row: T24
#[test]
fn a_worker_that_writes_nonsense() {
    upgrade_fails("nonsense", &["sent something that is not a message", "ransom"]);
}

/// row: T101
#[test]
fn a_worker_that_stores_a_driver_state_for_which_nobody_asked() {
    upgrade_fails("driver_state-uninvited", &["sent the driver state of NIC 0 unasked"]);
}

/// row: T101
#[test]
fn a_worker_that_says_what_it_counted_and_was_not_asked() {
    upgrade_fails("counts-uninvited", &["sent counts unasked"]);
}

/// A giver answers a question once: a second driver state would fill the taker's socket.
///
/// row: T101
#[test]
fn a_giver_that_stores_a_driver_state_twice_is_ended_and_the_taker_is_not() {
    let rig = Rig::with(NODES, "driver_state-twice");
    rig.await_pair("red");
    let good = rig.program("good", "");
    let said = rig.ask(&["worker", "upgrade", "red", "--with", good.to_str().unwrap(), "--state", "store"]);
    assert!(said.contains("node red is now worker"), "{said}");
    rig.await_event("sent the driver state of NIC 0 unasked");
    let driver = rig.await_worker("red", "drives");
    assert!(driver["binary"].as_str().unwrap().ends_with("good"), "{driver}");
}

#[test]
fn a_worker_that_cannot_take_the_nic() {
    upgrade_fails("unfit", &["may lock 1 bytes and needs 2; raise RLIMIT_MEMLOCK"]);
}

#[test]
fn a_worker_that_dies_while_it_prepares() {
    upgrade_fails("dies-at-prepare", &["ended with code 7"]);
}

/// row: T42
#[test]
fn a_worker_that_says_that_it_drives_and_does_not() {
    upgrade_fails("lies", &["made a report about eth0 that it had no right to make (it was not told to take)"]);
}

/// Asserts that a relay that fails after the giver let go ends with a driving worker of the node.
fn relay_goes_wrong(fault: &str, part: &str) {
    let rig = Rig::new();
    rig.await_pair("red");
    let bad = rig.program("bad", fault);
    let said = rig.refused(&["worker", "upgrade", "red", "--with", bad.to_str().unwrap()]);
    assert!(said.contains(part), "{fault}: {said}\n{}", rig.log());
    let driver = rig.await_worker("red", "drives");
    assert!(!driver["binary"].as_str().unwrap().ends_with("bad"), "{driver}");
    assert_eq!(rig.nic()["is"], "driven");
}

#[test]
fn a_worker_that_dies_when_it_is_to_take() {
    relay_goes_wrong("dies-at-take", "eth0 is driven by worker");
}

#[test]
fn a_worker_that_dies_when_it_has_taken() {
    relay_goes_wrong("dies-at-read", "eth0 is driven by worker");
}

#[test]
fn a_worker_that_cannot_go_on_from_what_it_reads() {
    relay_goes_wrong("broken", "the driver state is not true of the device");
}

#[test]
fn a_worker_that_does_not_take_by_the_deadline() {
    let mut rig = Rig::without_daemon(NODES, "");
    // Long enough for honest workers that run beside other tests, whose drivers have priority.
    rig.configure(|text| text.replace("deadline_ms = 20000", "deadline_ms = 4000"));
    rig.start();
    rig.await_pair("red");
    let bad = rig.program("bad", "late");
    let said = rig.refused(&["worker", "upgrade", "red", "--with", bad.to_str().unwrap()]);
    assert!(said.contains("did not answer by the deadline"), "{said}");
    rig.await_worker("red", "drives");
}

#[test]
fn a_worker_that_never_begins_is_ended() {
    let rig = Rig::new();
    rig.await_pair("red");
    let bad = rig.program("bad", "never-begins");
    let said = rig.refused(&["worker", "upgrade", "red", "--with", bad.to_str().unwrap()]);
    assert!(said.contains("has not begun in time"), "{said}");
    rig.await_worker("red", "drives");
}

#[test]
fn a_giver_that_hangs_when_it_is_to_let_go_is_fenced() {
    let mut rig = Rig::without_daemon(NODES, "hangs-at-release");
    rig.configure(|text| text.replace("deadline_ms = 20000", "deadline_ms = 1000"));
    rig.start();
    let (driver, _) = rig.await_pair("red");
    let good = rig.program("good", "");
    let output = rig.tasuki(&["worker", "upgrade", "red", "--with", good.to_str().unwrap()]);
    // Either the relay or the subsequent takeover gives the NIC to the fresh worker: another worker drives.
    drop(output);
    until(&rig, "somebody else drives", || rig.worker("red", "drives").is_some_and(|now| now["pid"] != driver["pid"]));
    until(&rig, "it is fenced", || !lives(pid(&driver)));
}

#[test]
fn a_giver_that_dies_after_it_has_let_go_is_not_missed() {
    let rig = Rig::with(NODES, "dies-after-pass");
    rig.await_pair("red");
    let good = rig.program("good", "");
    let said = rig.json(&["worker", "upgrade", "red", "--with", good.to_str().unwrap()]);
    assert_eq!(said["relays"][0]["done"], true, "{said}\n{}", rig.log());
}

/// The daemon dies after it has given a worker the NIC and before it lets the worker prepare: once for the first
/// worker, once for the stand-by.
#[test]
fn a_worker_that_was_given_a_nic_by_a_daemon_that_died_of_it_is_ready_for_it_under_the_next() {
    if !cfg!(feature = "crash-points") {
        return println!("skipped: needs the feature crash-points");
    }
    for nth in 1..=2 {
        let mut rig = Rig::without_daemon(NODES, "");
        rig.start_to_die(Some(format!("daemon.bundle:{nth}")));
        rig.daemon_ends();
        rig.start();
        let (driver, standby) = rig.await_pair("red");
        assert!(rig.log().contains("is adopted"), "{}", rig.log());
        signal(pid(&driver), Signal::KILL);
        until(&rig, "who stood by drives", || {
            rig.worker("red", "drives").is_some_and(|drives| drives["pid"] == standby["pid"])
        });
    }
}

/// Two nodes of a VNI.
const ON_A_VNI: &str = r#"
[[node]]
name = "red"
vni = "lan"
work = "echo"

[[node]]
name = "blue"
vni = "lan"
work = "sink"
"#;

/// row: T42
#[test]
fn a_worker_that_gives_its_node_another_station_address_is_ended() {
    let rig = Rig::with(ON_A_VNI, "");
    rig.await_pair("red");
    let bad = rig.program("bad", "other-mac");
    // The worker has the lease when it lies, so the relay may or may not count as done.
    let output = rig.tasuki(&["worker", "upgrade", "red", "--with", bad.to_str().unwrap()]);
    drop(output);
    rig.await_event("sent a device bundle, which only an opener may send");
}

/// row: T102
#[test]
fn a_worker_that_claims_the_end_of_another_node_is_ended() {
    let mut rig = Rig::with(ON_A_VNI, "");
    rig.await_pair("red");
    rig.await_pair("blue");
    let bad = rig.program("bad", "claims");
    rig.ask(&["worker", "upgrade", "blue", "--with", bad.to_str().unwrap()]);
    rig.kill_daemon();
    rig.start();
    rig.await_event("which it was never given");
    let (red, _) = rig.await_pair("red");
    let ends = rig.json(&["nic", "list"]);
    let its = ends.as_array().unwrap().iter().find(|nic| nic["name"] == "red@lan").unwrap();
    assert_eq!((&its["node"], &its["worker"]), (&"red".into(), &red["worker"]), "{ends}");
}

#[test]
fn a_program_that_dies_before_it_begins_is_said_to_do_so_and_tried_again_until_it_is_mended() {
    let rig = Rig::with(NODES, "dies-at-start");
    rig.await_event(
        "node red has a program that ends, or hangs, before it hears an order, three times in a row by now",
    );
    let status = rig.ask(&["status"]);
    assert!(status.contains("tasuki worker upgrade red"), "{status}");
    // The program is repaired. One node gets a request for it, and the others find out by themselves.
    rig.program("worker", "");
    let said = rig.ask(&["worker", "upgrade", "red"]);
    assert!(said.contains("node red is now worker"), "{said}");
    rig.await_pair("red");
    until(&rig, "it is tried again", || rig.worker("blue", "idle").is_some() && rig.worker("green", "idle").is_some());
    until(&rig, "nothing is wrong any more", || {
        !rig.ask(&["status"]).contains("has a program that ends, or hangs, before")
    });
}

#[test]
fn a_node_whose_workers_are_killed_thirty_times_works_again_by_itself() {
    let drawn = || RandomState::new().build_hasher().finish() & u64::from(u32::MAX);
    let seed = std::env::var("TASUKI_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(drawn);
    println!("TASUKI_SEED={seed}");
    let rig = Rig::new();
    rig.await_pair("red");
    let killed = std::cell::RefCell::new(BTreeSet::new());
    until(&rig, "thirty are killed", || {
        let its: Vec<u32> = rig.workers().iter().filter(|worker| worker["node"] == "red").map(pid).collect();
        // One bit of the seed decides each kill.
        let mut killed = killed.borrow_mut();
        if let Some(victim) = its.get(usize::from(seed >> killed.len() & 1 == 1) % its.len().max(1)) {
            // It may have been killed and not be gone yet.
            if killed.insert(*victim) {
                signal(*victim, Signal::KILL);
            }
        }
        killed.len() == 30
    });
    rig.await_event("node red has lost six workers and more");
    rig.await_pair("red");
    assert_eq!(rig.nic()["is"], "driven");
    until(&rig, "nothing is wrong any more", || !rig.ask(&["status"]).contains("has lost six workers"));
}

#[test]
fn a_worker_program_that_is_missing_is_named_and_found_when_it_is_there() {
    let mut rig = Rig::without_daemon(NODES, "");
    fs::remove_file(rig.path("worker")).unwrap();
    rig.start();
    rig.await_event("no worker for node red");
    let status = rig.ask(&["status"]);
    assert!(status.contains(&format!("{} does not start", rig.path("worker").display())), "{status}");
    let said = rig.refused(&["worker", "upgrade", "red", "--with", "/nowhere/worker"]);
    assert!(said.contains("/nowhere/worker is not there"), "{said}");
    rig.program("worker", "");
    rig.await_pair("red");
    let status = rig.ask(&["status"]);
    assert!(!status.contains("does not start"), "{status}");
}

#[test]
fn a_card_that_cannot_be_opened_is_said_to_be_that() {
    let rig = Rig::with(NODES, "opener-fails");
    rig.await_event("eth0 cannot be opened: the card is on fire; put it out");
    let said = rig.refused(&["nic", "give", "eth0", "--to", "blue"]);
    assert!(said.contains("eth0 is not open") && said.contains("on fire"), "{said}");
    assert_eq!(rig.nic()["is"], "not open");
}

#[test]
fn what_there_is_not_is_said_with_what_there_is() {
    let rig = Rig::new();
    rig.await_pair("red");
    for (words, parts) in [
        (&["worker", "upgrade", "pink"][..], &["there is no node \"pink\"; there are: blue, green, red"][..]),
        (&["nic", "give", "eth9", "--to", "blue"], &["there is no NIC \"eth9\"; there are: eth0"]),
        (&["nic", "give", "eth0", "--to", "pink"], &["there is no node \"pink\""]),
        (&["nic", "give", "eth0", "--to", "red"], &["eth0 is node red's already", "tasuki worker upgrade red"]),
        (
            &["nic", "give", "eth0", "--to", "blue", "--method", "repoint", "--state", "store"],
            &["eth0 goes by repoint, which has no driver state to store"],
        ),
        (
            &["nic", "give", "eth0", "--to", "blue", "--method", "mbb"],
            &[
                "eth0 cannot go that way: mbb needs a card with a receive queue to spare",
                "; if you name no method, it goes by keep",
            ],
        ),
        (&["nic", "counts", "a/../b"], &["there is no NIC \"a/../b\""]),
    ] {
        let said = rig.refused(words);
        assert!(parts.iter().all(|part| said.contains(part)), "{words:?}: {said}");
    }
    let output = rig.tasuki(&["nic", "give", "eth0", "--to", "blue", "--method", "magic"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(2) && said.contains("[possible values: keep, mbb, repoint, cold]"), "{said}");
    assert_eq!(rig.await_worker("red", "drives")["drives"][0], "eth0", "nothing has happened");
}

#[test]
fn an_uplink_cannot_be_added_while_all_runs_and_where_it_can_be_is_said() {
    let rig = Rig::new();
    let uplink = json!({ "name": "up", "vni": "lan", "work": "uplink" });
    let said = client::ask(&rig.dir(), Method::POST, "/v1/nodes", Some(&uplink)).expect_err("it has no NIC");
    assert!(said.to_string().contains("node \"up\": a NIC comes by the configuration alone"), "{said:#}");
}

#[test]
fn two_daemons_do_not_share_a_directory() {
    let rig = Rig::new();
    let output = rig.tasukid().stdout(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let expected = format!("a tasukid is at work in {} already (process {})", rig.dir().display(), rig.daemon_pid());
    assert!(output.status.code() == Some(1) && said.contains(&expected), "{said}");
    rig.await_pair("red");
}

#[test]
fn a_configuration_that_cannot_be_read_is_refused_before_anything_is_started() {
    let rig = Rig::without_daemon("[[node]]\nname = \"red\"\nwork = \"echo\"\ncolour = 1\n", "");
    let refused = |part: &str| {
        let output = rig.tasukid().stdout(Stdio::null()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(78) && said.contains(part), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    };
    refused("tasuki.toml:10: the key `colour` means nothing here");
    fs::remove_file(rig.path("tasuki.toml")).unwrap();
    refused("tasuki.toml cannot be read");
    assert!(!rig.dir().exists(), "nothing was made");
}
