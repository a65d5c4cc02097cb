//! The daemon's behaviour when all goes well, and when a process dies.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use rustix::process::Signal;

use super::rig::{NODES, Rig, lives, pid, runs, signal, until};

#[test]
fn it_starts_a_worker_for_each_node_and_one_that_stands_by_for_a_node_with_a_nic() {
    let mut rig = Rig::new();
    let (driver, standby) = rig.await_pair("red");
    rig.await_worker("blue", "idle");
    rig.await_worker("green", "idle");
    assert_eq!(rig.workers().len(), 4, "{}", rig.log());
    assert_eq!(driver["drives"][0], "eth0");
    assert_ne!(driver["worker"], standby["worker"]);
    let status = rig.ask(&["status"]);
    assert!(status.contains("eth0") && status.contains("driven") && status.contains("green"), "{status}");
    let counts = rig.ask(&["nic", "counts", "eth0"]);
    assert!(counts.contains("rx_packets"), "{counts}");
    let events = rig.ask(&["events"]);
    assert!(events.contains("eth0 is driven by worker"), "{events}");
    let said = rig.ask(&["stop"]);
    assert!(said.contains("4 workers have ended"), "{said}");
    rig.daemon_ends();
    assert!(!lives(pid(&driver)) && !lives(pid(&standby)));
    let said = rig.refused(&["status"]);
    assert!(said.contains("no tasukid is at work in") && said.contains("start one"), "{said}");
}

#[test]
fn an_upgrade_has_a_fresh_worker_drive_and_says_how_long_nobody_did() {
    let rig = Rig::new();
    let (old, old_standby) = rig.await_pair("red");
    let said = rig.json(&["worker", "upgrade", "red"]);
    let relay = &said["relays"][0];
    assert!(relay["done"] == true && relay["node"] == "red" && relay["method"] == "keep", "{said}");
    assert!(relay["pause_ns"].as_u64().is_some(), "{said}");
    assert_ne!(relay["pid"], old["pid"]);
    // The stand-by was of the old program: another stands by from now on.
    until(&rig, "the old ones end", || !lives(pid(&old)) && !lives(pid(&old_standby)));
    let (driver, _) = rig.await_pair("red");
    assert_eq!(driver["pid"], relay["pid"]);
    let other = rig.program("another", "");
    let said = rig.ask(&["worker", "upgrade", "red", "--with", other.to_str().unwrap(), "--state", "store"]);
    assert!(said.contains("node red is now worker") && said.contains("by keep"), "{said}");
    rig.await_event("a driver state came");
    until(&rig, "all of the other program", || {
        let (_, standby) = rig.await_pair("red");
        standby["binary"].as_str().is_some_and(|binary| binary.ends_with("another"))
    });
    assert_eq!(rig.json(&["status"])["nodes"][2]["generation"], 2);
}

#[test]
fn a_nic_goes_to_a_node_that_is_trusted_and_nobody_is_ended() {
    let rig = Rig::new();
    let (old, _) = rig.await_pair("red");
    let said = rig.json(&["nic", "give", "eth0", "--to", "blue"]);
    assert!(said["relays"][0]["done"] == true && said["relays"][0]["node"] == "blue", "{said}");
    rig.await_pair("blue");
    until(&rig, "red has one worker that has nothing", || {
        let red: Vec<_> = rig.workers().into_iter().filter(|worker| worker["node"] == "red").collect();
        red.len() == 1 && red[0]["is"] == "idle"
    });
    assert!(rig.ask(&["status"]).contains("blue"));
    let events = rig.ask(&["events"]);
    assert!(!events.contains("it is ended"), "{events}");
    // And back: a former owner can be asked again.
    let said = rig.ask(&["nic", "give", "eth0", "--to", "red", "--method", "repoint", "--inflight", "drop"]);
    assert!(said.contains("by repoint"), "{said}");
    rig.await_pair("red");
    drop(old);
}

#[test]
fn a_giver_that_is_not_trusted_is_ended_after_it_has_let_go() {
    let rig = Rig::new();
    let (old, _) = rig.await_pair("red");
    let said = rig.json(&["nic", "give", "eth0", "--to", "green"]);
    assert!(said["relays"][0]["done"] == true && said["relays"][0]["node"] == "green", "{said}");
    assert!(!runs(pid(&old)), "it is kept from the device before anybody else has it");
    until(&rig, "it is ended", || !lives(pid(&old)));
    rig.await_pair("green");
    rig.await_worker("red", "idle");
    let status = rig.json(&["status"]);
    assert!(status["nodes"].as_array().unwrap().iter().all(|node| node["trouble"].is_null()), "{status}");
}

#[test]
fn when_a_worker_is_killed_its_standby_drives() {
    let rig = Rig::new();
    let (driver, standby) = rig.await_pair("red");
    signal(pid(&driver), Signal::KILL);
    until(&rig, "the stand-by drives", || rig.worker("red", "drives").is_some_and(|now| now["pid"] == standby["pid"]));
    rig.await_worker("red", "stands by");
    rig.await_event("was killed by signal 9");
    let nic = rig.nic();
    assert!(nic["is"] == "driven" && nic["pause_ns"].as_u64().is_some(), "{nic}");
}

#[test]
fn when_a_standby_is_killed_there_is_another() {
    let rig = Rig::new();
    let (driver, standby) = rig.await_pair("red");
    signal(pid(&standby), Signal::KILL);
    until(&rig, "another stands by", || rig.worker("red", "stands by").is_some_and(|now| now["pid"] != standby["pid"]));
    assert_eq!(rig.await_worker("red", "drives")["pid"], driver["pid"], "nobody else noticed");
}

#[test]
fn when_both_are_killed_a_fresh_one_drives() {
    let rig = Rig::new();
    let (driver, standby) = rig.await_pair("red");
    signal(pid(&standby), Signal::KILL);
    signal(pid(&driver), Signal::KILL);
    let known = [pid(&driver), pid(&standby)];
    until(&rig, "a fresh one drives", || rig.worker("red", "drives").is_some_and(|now| !known.contains(&pid(&now))));
    assert_eq!(rig.nic()["is"], "driven");
}

#[test]
fn a_worker_that_hangs_is_fenced_and_its_standby_drives() {
    let rig = Rig::without_daemon(NODES, "");
    rig.configure(|text| text.replace("hang_after_ms = 5000", "hang_after_ms = 1000"));
    let mut rig = rig;
    rig.start();
    let (driver, standby) = rig.await_pair("red");
    signal(pid(&driver), Signal::STOP);
    until(&rig, "the stand-by drives", || rig.worker("red", "drives").is_some_and(|now| now["pid"] != driver["pid"]));
    until(&rig, "it is no more", || !lives(pid(&driver)));
    rig.await_event("it hangs");
    rig.await_event("is kept from eth0 for good");
    drop(standby);
}

#[test]
fn workers_drive_on_while_no_daemon_lives_and_the_next_one_takes_them_over() {
    let mut rig = Rig::new();
    let (driver, standby) = rig.await_pair("red");
    rig.await_worker("blue", "idle");
    rig.await_worker("green", "idle");
    rig.kill_daemon();
    rig.start();
    until(&rig, "all are adopted", || rig.json(&["status"])["adopted"] == 4);
    let (now, now_standby) = rig.await_pair("red");
    assert_eq!((&now["pid"], &now_standby["pid"]), (&driver["pid"], &standby["pid"]));
    assert!(now["received"].as_u64() > driver["received"].as_u64(), "it went on");
    assert_eq!(rig.nic()["relays"], 1, "nobody else has driven");
    // The worker obeys the new daemon.
    let said = rig.json(&["nic", "give", "eth0", "--to", "blue"]);
    assert_eq!(said["relays"][0]["node"], "blue", "{said}");
    // The new daemon remembers the NIC's node, and assigns no number twice.
    let most = rig.workers().iter().map(|worker| worker["worker"].as_u64()).max();
    rig.kill_daemon();
    rig.start();
    rig.await_pair("blue");
    assert_eq!(rig.nic()["node"], "blue");
    let said = rig.json(&["worker", "upgrade", "blue"]);
    assert!(said["relays"][0]["worker"].as_u64() > most.flatten(), "{said}");
}

#[test]
fn who_died_while_no_daemon_lived_is_replaced_by_the_next_one() {
    let mut rig = Rig::new();
    let (driver, standby) = rig.await_pair("red");
    rig.kill_daemon();
    rig.kill(&driver);
    rig.start();
    until(&rig, "the stand-by drives", || rig.worker("red", "drives").is_some_and(|now| now["pid"] == standby["pid"]));
    rig.await_worker("red", "stands by");
}

/// Begins another daemon while a worker of this node, which is stopped, says nothing to it. Returns that worker.
fn begin_beside_silent(rig: &mut Rig, node: &str, is: &str) -> u32 {
    let silent = pid(&rig.await_worker(node, is));
    rig.kill_daemon();
    signal(silent, Signal::STOP);
    rig.start();
    silent
}

/// row: T150
#[test]
fn a_worker_that_says_nothing_to_the_next_daemon_keeps_no_other_node_waiting() {
    let mut rig = Rig::new();
    let (driver, standby) = rig.await_pair("red");
    rig.await_worker("blue", "idle");
    let green = begin_beside_silent(&mut rig, "green", "idle");
    signal(pid(&driver), Signal::KILL);
    until(&rig, "the stand-by drives", || rig.worker("red", "drives").is_some_and(|now| now["pid"] == standby["pid"]));
    // That comes before its end, or its answer.
    assert_eq!(pid(&rig.await_worker("green", "starting")), green, "{}", rig.log());
    assert!(runs(green) && !rig.ask(&["events"]).contains("does not answer this tasukid"), "{}", rig.log());
    signal(green, Signal::CONT);
    assert_eq!(pid(&rig.await_worker("green", "idle")), green, "{}", rig.log());
}

#[test]
fn a_nic_waits_for_its_own_worker_that_says_nothing_to_the_next_daemon() {
    let mut rig = Rig::new();
    let (driver, _) = rig.await_pair("red");
    rig.await_worker("blue", "idle");
    let standby = begin_beside_silent(&mut rig, "red", "stands by");
    let trouble = rig.nic()["trouble"].to_string();
    assert!(trouble.contains("may have eth0, and has yet to answer this tasukid"), "{trouble}\n{}", rig.log());
    signal(pid(&driver), Signal::KILL);
    // The request waits, too: the silent worker may be the next driver.
    let gives = rig.command(&["nic", "give", "eth0", "--to", "blue"]).stdout(std::process::Stdio::null()).spawn();
    until(&rig, "nobody drives", || rig.nic()["worker"].is_null());
    let nic = rig.nic();
    assert_eq!((&nic["is"], &nic["node"]), (&"waits for a worker".into(), &"red".into()), "{nic}\n{}", rig.log());
    signal(standby, Signal::CONT);
    assert!(gives.expect("a program").wait().expect("an end").success(), "{}", rig.log());
    rig.await_pair("blue");
    assert!(rig.ask(&["events"]).contains("eth0 is driven by worker"), "{}", rig.log());
}

#[test]
fn a_daemon_that_is_told_to_go_leaves_its_workers_running() {
    let mut rig = Rig::new();
    let (driver, _) = rig.await_pair("red");
    signal(rig.daemon_pid(), Signal::TERM);
    rig.daemon_ends();
    assert!(lives(pid(&driver)) && rig.log().contains("its workers go on"), "{}", rig.log());
    rig.start();
    assert_eq!(rig.await_worker("red", "drives")["pid"], driver["pid"]);
    rig.stop();
    assert!(!lives(pid(&driver)));
}

#[test]
fn it_goes_into_the_background_once_it_serves_or_says_why_it_does_not() {
    let rig = Rig::without_daemon(NODES, "");
    let tasukid = |dir: &std::path::Path| {
        let mut command = rig.tasukid_in(dir);
        command.stderr(std::process::Stdio::piped()).output().expect("a program")
    };
    let output = tasukid(&rig.dir());
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && said.contains("tasukid is at work in"), "{output:?}");
    rig.await_pair("red");
    let again = tasukid(&rig.dir());
    let said = String::from_utf8_lossy(&again.stderr).into_owned();
    assert!(!again.status.success() && said.contains("is at work in") && said.lines().count() == 1, "{again:?}");
    // A name of any bytes.
    let name = rig.path("").join(OsStr::from_bytes(b"\xff.toml"));
    let output = rig.tasukid_with(&name, &rig.dir()).arg("--check").output().expect("a program");
    assert_eq!(output.status.code(), Some(78), "{output:?}");
    rig.ask(&["stop"]);
    until(&rig, "it ends", || !rig.tasuki(&["status"]).status.success());
}
