//! A NIC whose node is lost, or removed, goes to its stand-by node by itself, and comes back on command alone.

use std::fs;

use rustix::process::Signal;
use serde_json::{Value, json};

use super::real::{self, ENDLESS, Model, moves, with_card};
use super::rig::{NODES, Rig, lives, pid, signal, until};
use super::storm::beside;

/// A NIC of red's with this stand-by node: blue and red trust each other, green is a stranger.
fn nodes(standby: &str) -> String {
    format!("{NODES}standby = \"{standby}\"\n")
}

/// Makes a rig whose node red has a program of its own, and does not start the daemon.
fn rig(standby: &str) -> Rig {
    let rig = Rig::without_daemon(&nodes(standby), "");
    let program = rig.program("red-worker", "");
    rig.configure(|text| {
        let work = format!("name = \"red\"\nwork = {{ program = {{ path = {program:?} }} }}");
        let text = text.replace("name = \"red\"\nwork = \"echo\"", &work);
        text.replace("[daemon]\n", "[daemon]\nfailover_after_ms = 200\n")
    });
    rig
}

fn begun(standby: &str) -> Rig {
    let mut rig = rig(standby);
    rig.start();
    rig.await_pair("red");
    rig.await_worker(standby, "idle");
    rig
}

/// Takes a program away, and kills the workers of a node; its stand-by first, so that no takeover comes between.
fn lose(rig: &Rig, node: &str, program: &str) {
    take_away(rig, program);
    kill_all(rig, node);
}

fn take_away(rig: &Rig, program: &str) {
    fs::rename(rig.path(program), rig.path(&format!("{program}.away"))).expect("a name");
}

fn bring_back(rig: &Rig, program: &str) {
    fs::rename(rig.path(&format!("{program}.away")), rig.path(program)).expect("a name");
}

fn kill_all(rig: &Rig, node: &str) {
    let mut its: Vec<Value> = rig.workers().into_iter().filter(|worker| worker["node"] == node).collect();
    its.sort_by_key(|worker| worker["is"] == "drives");
    its.iter().map(pid).filter(|pid| lives(*pid)).for_each(|pid| signal(pid, Signal::KILL));
}

/// Waits until a node drives the NIC, to which it failed over from red.
fn await_at(rig: &Rig, node: &str) {
    until(rig, &format!("{node} drives"), || {
        let nic = rig.nic();
        nic["node"] == node && nic["is"] == "driven" && nic["failed_over"]["from"] == "red"
    });
}

fn configuration(rig: &Rig) -> Value {
    rig.json(&["status"])["configuration"].clone()
}

#[test]
fn a_node_that_is_lost_gives_its_nic_to_its_standby_and_gets_it_back_on_command_alone() {
    for standby in ["blue", "green"] {
        let rig = begun(standby);
        for _ in 0..2 {
            lose(&rig, "red", "red-worker");
            await_at(&rig, standby);
            let events = rig.ask(&["events"]);
            assert!(events.contains("node red is lost: none of its workers has driven eth0 for 200 ms"), "{events}");
            assert!(events.contains(&format!("eth0 failed over from node red to node {standby}, and")), "{events}");
            bring_back(&rig, "red-worker");
            rig.await_worker("red", "idle");
            // What is configured is applied, and does not bring it back.
            let said = rig.ask(&["apply"]);
            assert!(said.ends_with("is applied already: nothing changes\n"), "{said}");
            for words in ["plan", "status"] {
                let said = rig.ask(&[words]);
                let why = format!("NIC eth0 failed over from node red to node {standby} at ");
                assert!(said.contains(&why) && said.contains("tasuki nic give eth0 --to red"), "{said}");
            }
            assert_eq!((rig.nic()["node"].as_str(), &configuration(&rig)["drift"]), (Some(standby), &json!([])));
            rig.await_pair(standby);
            rig.ask(&["nic", "give", "eth0", "--to", "red"]);
            assert_eq!((&rig.nic()["node"], &rig.nic()["failed_over"]), (&json!("red"), &Value::Null));
            rig.await_pair("red");
            rig.await_worker(standby, "idle");
        }
    }
}

/// The stand-by node dies, too, and its node is not back: nobody but a person moves the NIC.
#[test]
fn what_failed_over_never_comes_back_by_itself() {
    let rig = begun("blue");
    lose(&rig, "red", "red-worker");
    await_at(&rig, "blue");
    bring_back(&rig, "red-worker");
    rig.await_worker("red", "idle");
    lose(&rig, "blue", "worker");
    until(&rig, "blue cannot be started", || rig.ask(&["status"]).contains("no worker for node blue"));
    until(&rig, "it is parked", || rig.nic()["is"] == "parked");
    assert_eq!(rig.nic()["node"], "blue");
    // Also while nobody drives it.
    let said = rig.json(&["nic", "give", "eth0", "--to", "red"]);
    assert_eq!(said["relays"][0]["done"], true, "{said}");
    assert_eq!((&rig.nic()["node"], &rig.nic()["failed_over"]), (&json!("red"), &Value::Null));
    bring_back(&rig, "worker");
    rig.await_pair("red");
}

#[test]
fn if_both_nodes_are_lost_the_first_that_is_back_has_it() {
    for (back, program) in [("blue", "worker"), ("red", "red-worker")] {
        let rig = begun("blue");
        take_away(&rig, "worker");
        kill_all(&rig, "blue");
        lose(&rig, "red", "red-worker");
        rig.await_event("node red is lost, and its stand-by, node blue, has no worker or no interface either");
        until(&rig, "that is shown", || {
            rig.ask(&["status"]).contains("eth0 goes to the first of the two that is back; tasuki events")
        });
        bring_back(&rig, program);
        until(&rig, "it is driven", || rig.nic()["is"] == "driven");
        assert_eq!(rig.nic()["node"], back, "{}", rig.log());
        assert!(!rig.ask(&["status"]).contains("goes to the first of the two"), "{}", rig.ask(&["status"]));
    }
}

#[test]
fn a_nic_goes_to_its_standby_before_its_node_is_removed() {
    let mut rig = Rig::without_daemon(&nodes("blue").replace("node = \"red\"", "node = \"green\""), "");
    rig.start();
    rig.await_pair("green");
    rig.await_worker("blue", "idle");
    let refused = rig.refused(&["node", "remove", "blue"]);
    assert!(
        refused.contains("trusts node blue by its name") || refused.contains("is the stand-by of eth0"),
        "{refused}"
    );
    assert!(rig.ask(&["node", "remove", "green"]).contains("node green is gone"));
    let nic = rig.nic();
    assert_eq!((&nic["node"], &nic["failed_over"]["from"]), (&json!("blue"), &json!("green")));
    assert!(rig.ask(&["events"]).contains("after that was due: node green was removed"));
    rig.ask(&["node", "add", "mine", "--native", "--work", "sink", "--vni", "lan"]);
    // The file still has the node, and it is the file's NIC.
    let said = rig.ask(&["apply"]);
    assert!(said.contains("node green is added"), "{said}");
    assert_eq!(rig.nic()["node"], "blue");
    // Another entry is a command.
    rig.configure(|text| text.replace("node = \"green\"\nstandby = \"blue\"", "node = \"green\"\nstandby = \"red\""));
    let said = rig.ask(&["apply"]);
    assert!(said.contains("NIC eth0 goes from node blue to node green while packets flow"), "{said}");
    assert!(said.contains("NIC eth0: standby changes, and its driver goes on"), "{said}");
    assert_eq!((&rig.nic()["node"], &rig.nic()["standby"]), (&json!("green"), &json!("red")));
}

#[test]
fn a_standby_is_named_by_hand_and_counts_until_a_file_is_applied() {
    let mut rig = begun("blue");
    let said = rig.ask(&["nic", "standby", "eth0", "--node", "green"]);
    assert_eq!(said, "eth0 goes to node green if node red is lost\n");
    for (words, part) in [
        (&["--node", "pink"], "there is no node \"pink\"; there are: blue, green, red"),
        (&["--node", "red"], "node red has eth0 already; name another node"),
    ] {
        let said = rig.refused(&[&["nic", "standby", "eth0"][..], words].concat());
        assert!(said.contains(part), "{said}");
    }
    assert_eq!(configuration(&rig)["drift"], json!(["NIC eth0: standby changes, and its driver goes on"]));
    rig.kill_daemon();
    rig.start();
    rig.await_pair("red");
    assert_eq!(rig.nic()["standby"], "green", "the next daemon knows");
    let refused = rig.refused(&["node", "remove", "green"]);
    assert!(refused.contains("node green is the stand-by of eth0; name another first"), "{refused}");
    rig.ask(&["apply"]);
    assert_eq!(rig.nic()["standby"], "blue", "the file counts");
    rig.ask(&["nic", "standby", "eth0", "--none"]);
    lose(&rig, "red", "red-worker");
    until(&rig, "nobody drives it", || rig.nic()["is"] == "parked");
    // A file that is applied names one.
    rig.ask(&["apply"]);
    await_at(&rig, "blue");
}

/// A worker of the lost node has the NIC, and hangs before it drives: it is ended before anybody else has it.
///
/// row: T128
#[test]
fn no_process_of_a_lost_node_that_has_its_nic_is_left_when_a_stranger_drives() {
    let rig = begun("green");
    rig.program("red-worker", "hangs-at-prepare");
    kill_all(&rig, "red");
    await_at(&rig, "green");
    let events = rig.json(&["events"]);
    let events: Vec<&str> = { events.as_array().unwrap().iter() }.map(|it| it["sentence"].as_str().unwrap()).collect();
    let at =
        |part: &str| events.iter().position(|it| it.contains(part)).unwrap_or_else(|| panic!("{part}: {events:#?}"));
    assert!(at("node red is lost") < at("is kept from eth0 for good: it is ended"), "{events:#?}");
    // A worker that was fenced had the NIC; one that came later waits for one.
    rig.program("red-worker", "");
    rig.await_worker("red", "idle");
}

/// The stand-by node's worker takes its time: the lost node is not kept from coming back meanwhile.
///
/// row: T128
#[test]
fn a_standby_that_hangs_keeps_no_node_from_coming_back() {
    for standby in ["blue", "green"] {
        let mut rig = rig(standby);
        rig.program("worker", "hangs-at-prepare");
        rig.start();
        rig.await_pair("red");
        rig.await_worker(standby, "idle");
        lose(&rig, "red", "red-worker");
        rig.await_event("node red is lost");
        until(&rig, "it is about to go", || rig.worker(standby, "prepares").is_some());
        bring_back(&rig, "red-worker");
        let (driver, _) = rig.await_pair("red");
        rig.await_event("eth0 stays with node red: a worker of it drives");
        assert_eq!((&rig.nic()["node"], &rig.nic()["worker"]), (&json!("red"), &driver["worker"]));
        assert_eq!((&rig.nic()["failed_over"], &rig.nic()["trouble"]), (&Value::Null, &Value::Null));
    }
}

/// Places where the daemon dies in the middle of it, if the NIC goes to a node that is trusted or to a stranger.
const DAEMON: &[&str] = &[
    "daemon.seized",
    "daemon.node-lost",
    "daemon.bundle",
    "daemon.attached",
    "daemon.planned",
    "daemon.asked",
    "daemon.renewed",
    "daemon.passed",
    "daemon.take",
    "daemon.settled",
];

#[test]
fn wherever_the_daemon_dies_the_next_one_completes_it() {
    if !cfg!(feature = "crash-points") {
        return println!("skipped: needs the feature crash-points");
    }
    for standby in ["blue", "green"] {
        let mut rig = rig(standby);
        let places = DAEMON.iter().filter(|place| **place != "daemon.renewed" || standby == "green");
        for place in places {
            rig.start();
            rig.await_pair("red");
            rig.await_worker(standby, "idle");
            rig.kill_daemon();
            rig.start_to_die(Some(format!("{place}:1")));
            let mut command = rig.command(&["status"]);
            let mut serves = || command.output().expect("a program").status.success();
            while !serves() {
                assert!(!rig.daemon_is_dead(), "{place}: too early\n{}", rig.log());
            }
            lose(&rig, "red", "red-worker");
            rig.daemon_ends();
            rig.start();
            await_at(&rig, standby);
            bring_back(&rig, "red-worker");
            rig.await_pair(standby);
            rig.await_worker("red", "idle");
            assert_eq!(rig.workers().iter().filter(|worker| worker["is"] == "drives").count(), 1);
            rig.ask(&["nic", "give", "eth0", "--to", "red"]);
            rig.await_pair("red");
            rig.await_worker(standby, "idle");
            rig.kill_daemon();
        }
    }
}

/// Starts a daemon with the stock worker, as a file that can be taken away, and a card under traffic.
fn under_traffic(card: &str, standby: &str, frames: &str, rate: &str) -> Option<(Rig, Model)> {
    let (mut rig, model) = with_card(card, &nodes(standby), frames, rate)?;
    let stock = beside("tasuki-worker").expect("it was looked for");
    tasuki_testing::copy(&stock, rig.path("stock"));
    let ours = rig.path("stock");
    rig.configure(|text| {
        let text = text.replace(&format!("{stock:?}"), &format!("{ours:?}"));
        text.replace("[daemon]\n", "[daemon]\nfailover_after_ms = 100\n")
    });
    rig.start();
    rig.await_pair("red");
    rig.await_worker(standby, "idle");
    until(&rig, "frames flow", || moves(&rig) > 0);
    Some((rig, model))
}

/// Frames that the source sends a second: a ring of 256 lasts for half a second.
const SLOWLY: &str = "500";

/// Loses red under traffic, and gives the NIC back.
fn fails_over_and_back(card: &str, standby: &str) -> Option<(Rig, Model)> {
    let (rig, model) = under_traffic(card, standby, ENDLESS, SLOWLY)?;
    lose(&rig, "red", "stock");
    await_at(&rig, standby);
    let before = moves(&rig);
    bring_back(&rig, "stock");
    until(&rig, "frames flow", || moves(&rig) > before);
    rig.await_pair(standby);
    rig.await_worker("red", "idle");
    rig.ask(&["nic", "give", "eth0", "--to", "red"]);
    rig.await_pair("red");
    let log = rig.log();
    assert!(log.contains("eth0 failed over from node red"), "{log}");
    Some((rig, model))
}

/// The ring is the trusted node's as well: it holds what came meanwhile.
#[test]
fn no_frame_is_lost_or_comes_twice_at_a_fail_over_between_nodes_that_trust_each_other() {
    for card in ["82574l", "virtio-net"] {
        let Some((mut rig, model)) = fails_over_and_back(card, "blue") else { return };
        real::stop_whole(&mut rig, model);
    }
}

/// What the lost node's ring held is that node's, and nobody else may read it: such frames are lost, and nothing else is.
#[test]
fn a_stranger_gets_a_lost_nodes_nic_and_no_frame_of_it() {
    let Some((mut rig, model)) = fails_over_and_back("82574l", "green") else { return };
    until(&rig, "most frames come where somebody drives", || moves(&rig) > 1500);
    model.finish();
    real::until_quiet(&rig);
    let said = real::stop(&mut rig, model);
    let count = |after: &str| said.split(after).nth(1).and_then(|rest| rest.split(',').next()?.parse::<u32>().ok());
    let [sent, back] = ["sent ", "came back "].map(|after| count(after).expect("a count"));
    assert!((sent / 2..sent).contains(&back), "only those that came while nobody drove are lost: {said}");
}

/// The card's server dies, and not the node: there is nothing to move.
#[test]
fn a_nic_whose_server_dies_stays_where_it_is() {
    let Some((mut rig, model)) = with_card("82574l", &nodes("blue"), ENDLESS, SLOWLY) else { return };
    rig.start();
    rig.await_pair("red");
    until(&rig, "frames flow", || moves(&rig) > 0);
    model.kill();
    rig.await_event("the card is gone from its bus");
    kill_all(&rig, "red");
    rig.await_event("eth0 cannot be opened: no server of a device accepts connections");
    rig.await_worker("red", "idle");
    assert_eq!((&rig.nic()["node"], &rig.nic()["is"]), (&json!("red"), &json!("not open")));
    assert!(!rig.ask(&["events"]).contains("is lost"), "{}", rig.log());
    rig.stop();
}
