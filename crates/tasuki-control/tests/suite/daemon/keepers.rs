//! The keeper: its contents outlive daemon and workers, even if all of them die together, and no process can deceive
//! a later daemon about them.

use rustix::process::Signal;
use serde_json::Value;

use super::real::{ENDLESS, stop_whole, with_model};
use super::rig::{NODES, Rig, lives, pid, signal, until};

/// A daemon that did not see a driver die counts from when it found it dead, not from the last relay before.
#[test]
fn the_pause_of_a_nic_whose_driver_died_without_a_daemon_begins_after_that() {
    let mut rig = Rig::new();
    rig.await_pair("red");
    rig.ask(&["worker", "upgrade", "red"]);
    let of_red = |rig: &Rig| rig.workers().iter().filter(|worker| worker["node"] == "red").count();
    until(&rig, "the workers of before are gone", || of_red(&rig) == 2);
    let (driver, standby) = rig.await_pair("red");
    rig.kill_daemon();
    let before = tasuki_shm::clock::now_ns();
    for worker in [&driver, &standby] {
        signal(pid(worker), Signal::KILL);
    }
    rig.start();
    rig.await_pair("red");
    let nic = &rig.json(&["nic", "list"])[0];
    let [driving, pause] = ["driving_at_ns", "pause_ns"].map(|name| nic[name].as_u64().expect("it is driven"));
    assert!(driving - pause > before, "the pause begins {} ns before the death", before - (driving - pause));
}

/// Returns how often eth0 was opened.
fn opened(rig: &Rig) -> usize {
    rig.ask(&["events"]).matches("is open").count()
}

#[test]
fn a_keeper_that_dies_costs_nothing_and_its_successor_has_everything() {
    let mut rig = Rig::new();
    let (driver, _) = rig.await_pair("red");
    let keeper = rig.keeper().expect("a keeper");
    let name = || std::fs::read_to_string(format!("/proc/{keeper}/comm")).expect("a name");
    until(&rig, "it has a name of its own, which no signal for tasukid goes by", || name() == "tasuki-keeper\n");
    signal(keeper, Signal::KILL);
    until(&rig, "there is another", || rig.keeper().is_some_and(|another| another != keeper));
    rig.await_event("another is told everything anew");
    rig.kill_daemon();
    rig.start();
    let (same, standby) = rig.await_pair("red");
    assert_eq!(pid(&same), pid(&driver), "{}", rig.log());
    rig.kill_daemon();
    for worker in [&same, &standby] {
        signal(pid(worker), Signal::KILL);
    }
    rig.start();
    rig.await_pair("red");
    assert_eq!(opened(&rig), 1, "{}", rig.log());
}

/// The keeper has ends that are made anew before the registry has them.
#[test]
fn ends_have_the_numbers_that_they_were_made_with_though_their_daemon_dies_then() {
    let mut rig = Rig::without_daemon("", "");
    rig.with_stock_workers();
    let [first, red, blue] =
        ["first", "red", "blue"].map(|name| format!("[[node]]\nname = {name:?}\nvni = \"lan\"\nwork = \"echo\"\n"));
    rig.configure(|text| format!("{text}{first}{red}{blue}"));
    let numbers = |rig: &Rig| {
        until(rig, "both are on the VNI", || {
            let table = rig.tasuki(&["vni", "table", "lan", "--json"]);
            serde_json::from_slice::<Value>(&table.stdout).is_ok_and(|table| table.as_array().unwrap().len() == 2)
        });
        let Value::Array(table) = rig.json(&["vni", "table", "lan"]) else { panic!("a list") };
        table.iter().map(|node| node["number"].clone()).collect::<Vec<_>>()
    };
    rig.start();
    for node in ["first", "red", "blue"] {
        rig.await_pair(node);
    }
    rig.configure(|text| text.replace(&first, ""));
    rig.ask(&["apply"]);
    assert_eq!(numbers(&rig), [1, 2]);
    let all: Vec<u32> = rig.workers().iter().map(pid).chain(rig.keeper()).collect();
    rig.kill_daemon();
    all.iter().for_each(|process| signal(*process, Signal::KILL));
    until(&rig, "all are dead", || !all.iter().any(|process| lives(*process)));
    rig.start_to_die(Some("daemon.writing:1".to_owned()));
    rig.daemon_ends();
    rig.start();
    assert_eq!(numbers(&rig), [0, 1], "those of the ends that the daemon made before it died");
    for node in ["red", "blue"] {
        rig.await_pair(node);
    }
    rig.stop();
}

#[test]
fn the_next_daemon_finds_keeper_and_workers_after_their_files_were_deleted() {
    let Some((mut rig, model)) = with_model(NODES, ENDLESS, "1000") else { return };
    rig.start();
    let (driver, standby) = rig.await_pair("red");
    let delete = |rig: &Rig| {
        rig.delete_dir();
        until(rig, "its socket is there again", || rig.tasuki(&["status"]).status.success());
    };
    delete(&rig);
    rig.await_event("keeper.sock was deleted; another keeper is told everything anew");
    rig.await_event("were deleted, and are there anew");
    rig.kill_daemon();
    rig.start();
    let (same, also) = rig.await_pair("red");
    assert_eq!([pid(&same), pid(&also)], [pid(&driver), pid(&standby)], "{}", rig.log());

    // Before it goes on as another program, too.
    delete(&rig);
    rig.ask(&["upgrade"]);
    rig.await_pair("red");
    let events = rig.ask(&["events"]);
    for killed in ["is unknown to the keeper", "is not to be reached", "is not the process that answers for it"] {
        assert!(!events.contains(killed), "{events}");
    }
    stop_whole(&mut rig, model);
}

/// row: T102
/// Stand-ins are as workers from before this version: they hear of no other socket.
#[test]
fn a_worker_that_the_next_daemon_would_not_find_keeps_this_one_until_it_is_upgraded() {
    let rig = Rig::new();
    rig.await_pair("red");
    let standby = rig.worker("red", "stands by").expect("a stand-by")["worker"].to_string();
    std::fs::remove_file(rig.dir().join(format!("worker-{standby}.sock"))).expect("it is there");
    let why = format!(
        "the socket of worker {standby} was deleted, so the next tasukid ends that worker and starts another: it cannot listen at another; upgrade it now (tasuki worker upgrade red)"
    );
    rig.await_event(&why);
    assert!(rig.ask(&["status"]).contains(&why));
    let refused = rig.refused(&["upgrade"]);
    assert!(refused.contains("tasukid stays what it is: ") && refused.contains(&why), "{refused}");
    rig.ask(&["worker", "upgrade", "red"]);
    until(&rig, "the next one finds all", || !rig.ask(&["status"]).contains("was deleted"));
}

#[test]
fn a_keeper_that_no_daemon_finds_ends_where_another_listens_in_its_place() {
    let mut rig = Rig::new();
    rig.await_pair("red");
    let keeper = rig.keeper().expect("a keeper");
    std::fs::remove_file(rig.dir().join("keeper.sock")).expect("it is there");
    rig.kill_daemon();
    rig.start();
    until(&rig, "it has ended", || !lives(keeper));
    rig.await_pair("red");
}

#[test]
fn a_keeper_that_may_open_no_more_descriptors_lets_the_next_daemon_in() {
    let mut rig = Rig::new();
    let (driver, _) = rig.await_pair("red");
    let few = rig.leave_descriptors_to(rig.keeper().expect("a keeper"), 0);
    rig.kill_daemon();
    rig.start();
    let (same, _) = rig.await_pair("red");
    assert_eq!(pid(&same), pid(&driver), "{}", rig.log());
    assert_eq!(opened(&rig), 1, "{}", rig.log());
    drop(few);
}

#[test]
fn where_daemon_and_keeper_die_together_all_begins_anew() {
    let mut rig = Rig::new();
    let (driver, _) = rig.await_pair("red");
    let keeper = rig.keeper().expect("a keeper");
    rig.kill_daemon();
    signal(keeper, Signal::KILL);
    until(&rig, "it is dead", || !lives(keeper));
    rig.start();
    rig.await_event("is unknown to the keeper");
    until(&rig, "a fresh worker drives", || rig.worker("red", "drives").is_some_and(|now| now["pid"] != driver["pid"]));
    assert_eq!(opened(&rig), 2, "{}", rig.log());
}

/// row: T102
#[test]
fn a_worker_that_says_that_it_is_another_is_ended_and_the_other_is_not() {
    let mut rig = Rig::with(NODES, "");
    rig.await_pair("red");
    let bad = rig.program("bad", "is-another");
    rig.await_worker("green", "idle");
    rig.ask(&["worker", "upgrade", "green", "--with", bad.to_str().unwrap()]);
    let (driver, standby) = rig.await_pair("red");
    rig.kill_daemon();
    rig.start();
    rig.await_event("says that it is worker");
    let (same, also) = rig.await_pair("red");
    assert_eq!((pid(&same), pid(&also)), (pid(&driver), pid(&standby)), "{}", rig.log());
}

#[test]
fn when_everything_stops_so_does_the_keeper() {
    let rig = Rig::new();
    rig.await_pair("red");
    let keeper = rig.keeper().expect("a keeper");
    rig.ask(&["stop"]);
    until(&rig, "it has ended", || !lives(keeper));
}
