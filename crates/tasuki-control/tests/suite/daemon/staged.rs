//! Programs that start ahead of the upgrade that uses them.

use rustix::process::Signal;
use serde_json::Value;

use super::real::{self, ENDLESS, with_card};
use super::rig::{NODES, Rig, confined, lives, pid, signal, until};
use super::storm::beside;

fn number(worker: &Value) -> u64 {
    worker["worker"].as_u64().expect("a number")
}

/// Returns the driver and the stand-by.
fn pair_of(rig: &Rig, node: &str) -> (u32, u32) {
    let (driver, standby) = rig.await_pair(node);
    (pid(&driver), pid(&standby))
}

/// Stages this program for a node; returns the worker.
fn stage(rig: &Rig, node: &str, program: &std::path::Path) -> Value {
    let said = rig.ask(&["worker", "stage", node, "--with", program.to_str().unwrap()]);
    assert!(said.contains(&format!("is staged for node {node}")), "{said}");
    rig.worker(node, "staged").expect("the answer came when it was")
}

fn upgrade(rig: &Rig, node: &str, program: &std::path::Path) -> u64 {
    let said = rig.json(&["worker", "upgrade", node, "--with", program.to_str().unwrap()]);
    assert!(said["relays"].as_array().unwrap().iter().all(|relay| relay["done"] == true), "{said}");
    number(&rig.await_worker(node, if said["relays"][0].is_object() { "drives" } else { "idle" }))
}

#[test]
fn an_upgrade_takes_what_is_staged_if_it_is_that_very_program() {
    let rig = Rig::new();
    let (old, old_standby) = pair_of(&rig, "red");
    let next = rig.program("next", "");
    let staged = stage(&rig, "red", &next);
    assert_eq!(pair_of(&rig, "red"), (old, old_standby), "nobody drives but who did");
    assert_eq!(number(&stage(&rig, "red", &next)), number(&staged), "it is there already");
    assert_eq!(upgrade(&rig, "red", &next), number(&staged));
    until(&rig, "the old ones end", || !lives(old) && !lives(old_standby));
    let (driver, standby) = rig.await_pair("red");
    assert_eq!((pid(&driver), &driver["generation"], &standby["generation"]), (pid(&staged), &1.into(), &1.into()));
    assert!(standby["binary"].as_str().unwrap().ends_with("next") && rig.worker("red", "staged").is_none());
    // A replaced file is another program, even at the same path.
    let staged = stage(&rig, "red", &next);
    rig.program("next", "");
    let fresh = upgrade(&rig, "red", &next);
    assert_ne!(fresh, number(&staged));
    assert_eq!(rig.worker("red", "staged").map(|it| number(&it)), Some(number(&staged)), "it is as it was");
    let again = stage(&rig, "red", &next);
    assert_ne!(number(&again), number(&staged));
    until(&rig, "what was staged before ends", || !lives(pid(&staged)));
    assert_eq!(upgrade(&rig, "red", &next), number(&again));
    // Without a given program, the node's own is staged.
    let said = rig.ask(&["worker", "stage", "red"]);
    let staged = rig.worker("red", "staged").expect(&said);
    let said = rig.json(&["worker", "upgrade", "red", "--state", "store"]);
    assert_eq!((&said["relays"][0]["worker"], &said["relays"][0]["done"]), (&staged["worker"], &true.into()), "{said}");
}

#[test]
fn what_is_staged_may_die_and_be_ended_and_nobody_else_notices() {
    let mut rig = Rig::new();
    let pair = pair_of(&rig, "red");
    let (next, other) = (rig.program("next", ""), rig.program("other", ""));
    let staged = stage(&rig, "red", &next);
    signal(pid(&staged), Signal::KILL);
    rig.await_event("which was staged: stage it again");
    assert_ne!(upgrade(&rig, "blue", &next), number(&staged));
    let staged = stage(&rig, "red", &next);
    let instead = stage(&rig, "red", &other);
    until(&rig, "another is staged instead", || !lives(pid(&staged)));
    assert_eq!(pair_of(&rig, "red"), pair, "whoever dies of those");
    let said = rig.ask(&["worker", "unstage", "red"]);
    assert!(said.contains(&format!("worker {}, which was staged for node red, ends", number(&instead))), "{said}");
    until(&rig, "it ends", || !lives(pid(&instead)));
    let said = rig.refused(&["worker", "unstage", "red"]);
    assert!(said.contains("nothing is staged for node red"), "{said}");
    let said = rig.refused(&["worker", "stage", "nobody"]);
    assert!(said.contains("there is no node \"nobody\""), "{said}");
    for fault in ["dies-at-start", "speech", "unfit"] {
        let bad = rig.program(fault, fault);
        let said = rig.refused(&["worker", "stage", "red", "--with", bad.to_str().unwrap()]);
        assert!(said.contains("nothing is staged for node red: "), "{said}");
        assert!(rig.worker("red", "staged").is_none(), "{said}");
    }
    assert_eq!(pair_of(&rig, "red"), pair);
    let left = stage(&rig, "red", &next);
    assert!(rig.ask(&["stop"]).contains("workers have ended"));
    rig.daemon_ends();
    assert!(!lives(pid(&left)));
}

/// No request has named its program yet, so it takes over after no death.
#[test]
fn what_is_staged_drives_for_nobodys_death() {
    let rig = Rig::new();
    let (driver, standby) = rig.await_pair("red");
    let staged = stage(&rig, "red", &rig.program("next", ""));
    signal(pid(&driver), Signal::KILL);
    until(&rig, "the stand-by drives", || rig.nic()["worker"] == standby["worker"]);
    rig.await_pair("red");
    for _ in 0..3 {
        let (driver, standby) = rig.await_pair("red");
        signal(pid(&standby), Signal::KILL);
        signal(pid(&driver), Signal::KILL);
        until(&rig, "a fresh one drives", || {
            rig.worker("red", "drives").is_some_and(|it| ![pid(&driver), pid(&standby)].contains(&pid(&it)))
        });
        assert_eq!(rig.worker("red", "staged").map(|it| pid(&it)), Some(pid(&staged)));
    }
}

#[test]
fn a_daemon_that_comes_later_goes_on_with_what_is_staged() {
    let mut rig = Rig::new();
    rig.await_pair("red");
    let next = rig.program("next", "");
    let staged = stage(&rig, "red", &next);
    rig.kill_daemon();
    rig.start();
    let pair = rig.await_pair("red");
    assert_eq!(pid(&rig.await_worker("red", "staged")), pid(&staged));
    signal(pid(&pair.0), Signal::KILL);
    until(&rig, "the stand-by drives", || rig.nic()["worker"] == pair.1["worker"]);
    rig.await_pair("red");
    assert_eq!(upgrade(&rig, "red", &next), number(&staged));
    // Kill the daemon in the middle of that, too.
    for place in
        ["daemon.planned", "daemon.asked", "daemon.take", "daemon.release", "daemon.settled", "daemon.upgraded"]
    {
        if !cfg!(feature = "crash-points") {
            return println!("skipped: needs the feature crash-points");
        }
        rig.await_pair("red");
        let staged = stage(&rig, "red", &next);
        rig.kill_daemon();
        rig.start_to_die(Some(format!("{place}:1")));
        until(&rig, "it serves", || rig.tasuki(&["status"]).status.success());
        rig.await_worker("red", "staged");
        let _ = rig.tasuki(&["worker", "upgrade", "red", "--with", next.to_str().unwrap()]);
        until(&rig, place, || rig.tasuki(&["status"]).status.code() == Some(1));
        rig.start();
        rig.await_worker("red", "drives");
        until(&rig, "nothing is left but a pair, and perhaps what is staged", || {
            let red: Vec<_> = rig.workers().into_iter().filter(|worker| worker["node"] == "red").collect();
            let settled = |it: &Value| ["drives", "stands by", "staged"].iter().any(|is| it["is"] == *is);
            (2..=3).contains(&red.len())
                && red.iter().all(settled)
                && red.iter().filter(|it| it["is"] == "staged").all(|it| pid(it) == pid(&staged))
        });
        let _ = rig.tasuki(&["worker", "unstage", "red"]);
    }
}

#[test]
fn an_upgrade_whose_worker_drives_is_done_for_a_daemon_that_comes_later() {
    if !cfg!(feature = "crash-points") {
        return println!("skipped: needs the feature crash-points");
    }
    let mut rig = Rig::new();
    for (generation, place) in (1..).zip(["daemon.upgraded", "daemon.settled"]) {
        rig.await_pair("red");
        let next = rig.program(place, "");
        rig.kill_daemon();
        rig.start_to_die(Some(format!("{place}:1")));
        until(&rig, "it serves", || rig.tasuki(&["status"]).status.success());
        let _ = rig.tasuki(&["worker", "upgrade", "red", "--with", next.to_str().unwrap()]);
        until(&rig, place, || rig.tasuki(&["status"]).status.code() == Some(1));
        rig.start();
        until(&rig, "nothing is left but a pair of that program", || {
            let red: Vec<_> = rig.workers().into_iter().filter(|worker| worker["node"] == "red").collect();
            let is_next = |it: &Value| it["generation"] == generation && it["binary"] == next.to_str().unwrap();
            red.len() == 2 && red.iter().all(is_next)
        });
    }
}

#[test]
fn an_upgrade_of_which_a_nic_is_left_when_the_daemon_dies_is_to_be_done_again_and_the_status_says_so() {
    if !cfg!(feature = "crash-points") {
        return println!("skipped: needs the feature crash-points");
    }
    let second = "\n[[nic]]\nname = \"eth1\"\ndevice = \"vfio-user:/nowhere/other.sock\"\nnode = \"red\"\n";
    let mut rig = Rig::with(&(NODES.to_owned() + second), "");
    rig.await_pair("red");
    rig.kill_daemon();
    rig.start_to_die(Some("daemon.planned:2".to_owned()));
    until(&rig, "it serves", || rig.tasuki(&["status"]).status.success());
    let [next, last] = ["next", "last"].map(|name| rig.program(name, "").display().to_string());
    let _ = rig.tasuki(&["worker", "upgrade", "red", "--with", &next]);
    until(&rig, "it dies", || rig.tasuki(&["status"]).status.code() == Some(1));
    rig.start();
    let says = || rig.ask(&["status"]).contains("of an upgrade that moved some of its NICs and not all");
    until(&rig, "it is said", says);
    rig.ask(&["worker", "upgrade", "red", "--with", &last]);
    until(&rig, "all is well", || {
        let red: Vec<_> = rig.workers().into_iter().filter(|worker| worker["node"] == "red").collect();
        !says() && red.len() == 2 && red.iter().all(|worker| worker["binary"] == *last)
    });
}

#[test]
fn what_is_staged_is_ready_for_a_nic_that_comes_later() {
    let rig = Rig::new();
    rig.await_pair("red");
    let next = rig.program("next", "");
    let staged = stage(&rig, "blue", &next);
    rig.ask(&["nic", "give", "eth0", "--to", "blue"]);
    rig.await_pair("blue");
    until(&rig, "it has prepared", || rig.worker("blue", "staged").is_some());
    assert_eq!(upgrade(&rig, "blue", &next), number(&staged));
    assert_eq!(rig.nic()["worker"], staged["worker"]);
    rig.await_pair("blue");
    // When the last NIC leaves, all workers that had it end.
    let staged = stage(&rig, "blue", &next);
    rig.ask(&["nic", "give", "eth0", "--to", "red"]);
    rig.await_pair("red");
    until(&rig, "it ends", || !lives(pid(&staged)));
    rig.await_event("which was staged: stage it again");
}

/// The real worker, confined, under traffic.
#[test]
fn no_frame_is_lost_to_what_was_staged() {
    let Some((mut rig, model)) = with_card("82574l", NODES, ENDLESS, "4000") else { return };
    rig.configure(|text| confined(&text));
    rig.start();
    rig.await_pair("red");
    let program = beside("tasuki-worker").expect("looked for before");
    for _ in 0..8 {
        let staged = stage(&rig, "red", &program);
        assert_eq!(upgrade(&rig, "red", &program), number(&staged), "{}", rig.log());
        rig.await_pair("red");
    }
    real::stop_whole(&mut rig, model);
}
