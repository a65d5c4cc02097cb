//! Workers that send the daemon descriptors which they may not send. They lose their lives, and no other process
//! loses anything.
//!
//! Attacks of docs/design/threat-model.md.

use std::net::TcpListener;

use tasuki_relay::message::{FDS_MAX, MESSAGE_MAX};

use super::rig::{NODES, Rig, lives, pid, until};

/// Adds a second NIC, of another node.
fn two_nics() -> String {
    format!("{NODES}\n[[nic]]\nname = \"eth1\"\ndevice = \"vfio-user:/nowhere/other.sock\"\nnode = \"green\"\n")
}

/// Returns the drivers of eth0 and eth1.
fn drivers(rig: &Rig) -> Vec<(String, u32)> {
    let drives = rig.workers().into_iter().filter(|worker| worker["is"] == "drives");
    let mut drivers: Vec<_> = drives.map(|worker| (worker["drives"][0].to_string(), pid(&worker))).collect();
    drivers.sort();
    drivers
}

/// rows: in the table
#[test]
fn memory_that_is_none_of_its_own_costs_who_sends_it_its_life_and_nobody_else_anything() {
    let rig = Rig::with(&two_nics(), "");
    until(&rig, "both NICs are driven", || drivers(&rig).len() == 2);
    rig.await_worker("blue", "idle");
    let before = drivers(&rig);
    for (_, fault, says) in [
        ("T21", "memory-of-another-nic", "which it was not given to move"),
        ("T21", "memory-overfull", "the description of its layout is too long"),
        ("T21", "memory-too-many", "not as many descriptors as the NIC's memory"),
        ("T21", "memory-twice", "it is a NIC's already"),
        ("T21", "memory-is-the-way", "it is a NIC's already"),
        ("T21", "memory-is-none", "it could change its size, or is not memory"),
        ("T21", "memory-loose", "it could change its size, or is not memory"),
    ] {
        let bad = rig.program(fault, fault);
        rig.ask(&["worker", "upgrade", "blue", "--with", bad.to_str().unwrap()]);
        let output = rig.tasuki(&["nic", "give", "eth0", "--to", "blue", "--method", "repoint"]);
        assert!(!output.status.success(), "{fault}");
        assert!(rig.ask(&["events"]).contains(says), "{fault}: {}", rig.log());
        assert_eq!(drivers(&rig), before, "{fault}: {}", rig.log());
    }
    let good = rig.program("good", "");
    rig.ask(&["worker", "upgrade", "blue", "--with", good.to_str().unwrap()]);
    rig.ask(&["nic", "give", "eth0", "--to", "blue", "--method", "repoint"]);
    assert_eq!(drivers(&rig)[1], before[1], "the other NIC's driver");
}

/// row: T22
#[test]
fn a_driver_that_says_what_its_nic_is_made_of_is_ended_and_its_successor_gets_what_the_opener_made() {
    let rig = Rig::new();
    rig.await_pair("red");
    let bad = rig.program("bad", "speaks-of-bundle");
    // The worker has the lease when it lies, so the relay may or may not count as done.
    let output = rig.tasuki(&["worker", "upgrade", "red", "--with", bad.to_str().unwrap()]);
    drop(output);
    rig.await_event("sent a device bundle, which only an opener may send");
    rig.program("bad", "");
    rig.await_pair("red");
}

/// row: T24
#[test]
fn descriptors_beside_a_message_to_which_none_belong_cost_the_connection() {
    let rig = Rig::new();
    let (driver, _) = rig.await_pair("red");
    let bad = rig.program("bad", "hides");
    rig.refused(&["worker", "upgrade", "red", "--with", bad.to_str().unwrap()]);
    rig.await_event("sent 2 descriptors beside a message to which 0 belong");
    assert_eq!(pid(&rig.await_worker("red", "drives")), pid(&driver));
}

/// row: T25
#[test]
fn a_descriptor_that_takes_an_hour_to_close_holds_up_nobody() {
    let rig = Rig::new();
    let (driver, _) = rig.await_pair("red");
    // The listener never accepts the connection, and reads nothing.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let bad = rig.program("bad", &format!("lingers-{}", listener.local_addr().unwrap().port()));
    rig.refused(&["worker", "upgrade", "red", "--with", bad.to_str().unwrap()]);
    rig.await_event("sent 1 descriptors beside a message to which 0 belong");
    rig.ask(&["worker", "upgrade", "red", "--with", rig.program("good", "").to_str().unwrap()]);
    until(&rig, "the giver is gone", || !lives(pid(&driver)));
}

/// row: T23
#[test]
fn a_card_of_which_no_worker_could_be_told_is_not_open() {
    let rig = Rig::with(NODES, "opener-overfills");
    rig.await_event(&format!("bytes, and a message has room for {FDS_MAX} and {MESSAGE_MAX}"));
    assert_eq!(rig.nic()["is"], "not open");
    let dead = rig.ask(&["events"]);
    assert!(!dead.contains("does not take its descriptors"), "{dead}");
}
