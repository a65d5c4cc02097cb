//! A user's own program as the worker: upgraded, killed at each of its steps, and handed from node to node, under
//! traffic. No frame is lost, and its counts are exact.

use hyper::Method;
use serde_json::json;

use super::kills::{DRIVER, GIVER, TAKER};
use super::rig::count_in;
use super::storm::{Storm, beside, need_storm};

/// Frames a second.
const RATE: u32 = 3000;

/// The example that is the nodes' program.
const PROGRAM: &str = "examples/reflector";
const WORK: &str = "{ program = { path = \"RIG/own\", options = \"drop=0x86dd\" } }";

macro_rules! need_program {
    () => {
        need_storm!();
        if beside(PROGRAM).is_none() {
            return println!("skipped: needs the examples of tasuki-worker: cargo build --package tasuki-worker --examples --all-features");
        }
    };
}

fn storm() -> Storm {
    let wire = ["--source", &u64::MAX.to_string(), "--rate", &RATE.to_string()];
    let mut storm = Storm::of(WORK, &[("own", PROGRAM), ("other", PROGRAM)], &wire, &[]);
    storm.settle();
    storm.flows();
    storm
}

/// Returns a count of the program whose node has the NIC.
fn counted(storm: &Storm, name: &str) -> u64 {
    count_in(&storm.ask(Method::GET, "/v1/nics/eth0/counts", None).expect("counts"), name)
}

/// Ends everything, and asserts that no frame is missing; returns the number of frames that the model sent.
fn sent(storm: &mut Storm) -> u64 {
    let log = storm.rig.log();
    let said = storm.end();
    assert!(said.contains("lost 0") && said.contains("twice 0, out of order 0, damaged 0"), "{said}\n{log}");
    let number = said.split_once("sent ").and_then(|(_, rest)| rest.split(',').next()?.parse().ok());
    number.unwrap_or_else(|| panic!("{said}"))
}

#[test]
fn a_program_that_is_killed_at_each_step_counts_each_frame_once() {
    need_program!();
    let mut storm = storm();
    for round in 0..3 {
        // Places where any worker dies, and the place where it writes its program state.
        let driving = DRIVER.iter().chain(&["state.written"]).map(|place| (place, 1 + 7 * round));
        for (place, nth) in TAKER.iter().map(|place| (place, 1)).chain(driving) {
            storm.plan_death(place, nth);
            let with = if round % 2 == 0 { json!({}) } else { json!({ "with": storm.rig.path("other") }) };
            // The worker may or may not answer before it dies.
            let _ = storm.ask(Method::POST, "/v1/nodes/red/upgrade", Some(&with));
            let (driver, _) = storm.settle();
            storm.kill(&driver);
            storm.settle();
        }
    }
    storm.all_come_back();
    let (frames, dropped, kills) = (counted(&storm, "frames"), counted(&storm, "dropped"), storm.kills());
    let sent = sent(&mut storm);
    assert_eq!((frames, dropped), (sent, 0), "after {kills} deaths");
    assert!(kills > 80, "{kills}");
}

#[test]
fn a_nic_goes_from_program_to_program_and_each_counts_what_it_had() {
    need_program!();
    let mut storm = storm();
    for round in 0..12 {
        storm.plan_death(GIVER[round % GIVER.len()], 1);
        let _ = storm.upgrade("red", round % 3 == 2);
        storm.settle();
        for (to, method) in [("blue", "keep"), ("red", "repoint"), ("blue", "repoint"), ("red", "keep")] {
            if storm.node() != to {
                let _ = storm.give(to, Some(method));
                storm.settle();
            }
        }
        storm.forget_plans();
    }
    storm.all_come_back();
    let here = counted(&storm, "frames");
    let other = if storm.node() == "red" { "blue" } else { "red" };
    storm.give(other, Some("keep")).expect("a handover");
    storm.settle();
    let there = counted(&storm, "frames");
    assert!(here > 0 && there > 0, "{here} and {there}");
    let kills = storm.kills();
    assert_eq!(here + there, sent(&mut storm), "{here} and {there}, after {kills} deaths");
    assert!(kills >= 6, "{kills}");
}

/// Upgrades red's worker to this program; returns the daemon's sentence.
fn upgrade(storm: &Storm, with: &str) -> Result<String, String> {
    let said = storm.ask(Method::POST, "/v1/nodes/red/upgrade", Some(&json!({ "with": storm.rig.path(with) })));
    said.map(|said| said["sentence"].as_str().unwrap_or_default().to_owned())
}

#[test]
fn a_program_goes_on_from_the_state_that_it_converts_and_is_refused_where_it_cannot() {
    need_program!();
    let wire = ["--source", &u64::MAX.to_string(), "--rate", &RATE.to_string()];
    let programs = [("own", PROGRAM), ("next", "examples/reflector_next")];
    let mut storm = Storm::of(WORK, &programs, &wire, &[]);
    storm.settle();
    storm.flows();
    upgrade(&storm, "next").expect("it converts");
    storm.settle();
    for place in ["take.booked", "take.looked"] {
        // One taker of the next version dies with the converted state written, and one with it committed.
        storm.plan_death(place, 1);
        let _ = upgrade(&storm, "next");
        storm.settle();
        storm.forget_plans();
    }
    let (driver, _) = storm.settle();
    let said = upgrade(&storm, "own").expect_err("there is no way back");
    assert!(said.contains("does not read the state of kind 0x5ef1ec70 version 2"), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    let (now, _) = storm.settle();
    assert_eq!(driver["pid"], now["pid"], "who drove drives on");
    storm.kill(&driver);
    storm.settle();
    storm.all_come_back();
    let (frames, short) = (counted(&storm, "frames"), counted(&storm, "up to 128"));
    assert_eq!(frames, sent(&mut storm));
    assert!(short > 0 && short < frames, "{short} of {frames}");
}

/// The refusal gives the reason in a sentence, and the driver drives on.
#[test]
fn a_program_that_cannot_is_refused_with_its_reason() {
    need_program!();
    let mut storm = storm();
    let (driver, _) = storm.settle();
    let plain = storm.rig.path("plain");
    std::fs::write(&plain, "text").expect("a file");
    std::os::unix::fs::symlink(beside("tasuki-worker").expect("looked for before"), storm.rig.path("stock"))
        .expect("a link");
    std::os::unix::fs::symlink("/bin/true", storm.rig.path("nothing")).expect("a link");
    let cases = [
        ("nowhere", "nowhere is not there; build it"),
        ("plain", "plain may not be executed; chmod +x it"),
        ("run", "run is not a file; name a program"),
        ("stock", "the work of node red is a program of its own, and this is the stock worker"),
        ("nothing", "ended"),
    ];
    for (with, part) in cases {
        let said = upgrade(&storm, with).expect_err(with);
        assert!(said.contains(part), "{with}: {said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
    let (now, _) = storm.settle();
    assert_eq!(driver["pid"], now["pid"], "who drove drives on");
    storm.nothing_is_lost();
}

#[test]
fn options_that_mean_nothing_and_rings_that_are_too_short_are_told_of() {
    need_program!();
    let (wire, programs) = (["--source", "1", "--rate", "1"], [("own", PROGRAM)]);
    let storm = Storm::of(&WORK.replace("drop=0x86dd", "colour=red"), &programs, &wire, &[]);
    storm.rig.await_event("says: the options of node red: \"colour=red\" means nothing; write drop=0x86dd");
    end(storm);
    let storm = Storm::of(WORK, &programs, &wire, &[("ring", 32)]);
    storm.rig.await_event("the NIC's rings have 32 descriptors, and the program needs 64; raise the NIC's `ring`");
    end(storm);
}

fn end(mut storm: Storm) {
    storm.ask(Method::POST, "/v1/stop", None).expect("an end");
    storm.rig.daemon_ends();
}
