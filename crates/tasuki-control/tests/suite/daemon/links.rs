//! Linux interfaces as ends of nodes: a program behind a veth pair talks to a namespace of the VNI, while workers and
//! daemon are replaced and killed. Needs root.

use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use super::rig::until;
use super::rooms::{BURST, Exchange, Room, Stream, deaths};
use super::vnis::{DESK, SHOP, World};

/// Makes a veth pair in a namespace: one end is a program's, and the other the node's.
fn makes_wire(room: &Room) {
    room.ip("link add eth0 type veth peer name wire0");
    room.ip(&format!("address add {DESK}/24 dev eth0"));
    room.ip("link set eth0 up");
    room.ip("link set wire0 up");
}

/// Makes a world with the namespace `shop` on the VNI, and the namespace `desk` behind the interface `wire0`.
fn with_wire() -> Option<World> {
    let world = World::new()?;
    world.add("shop", &world.shop, SHOP, &[]);
    makes_wire(&world.desk);
    world.rig.ask(&["node", "add", "desk", "--link", &format!("{}:wire0", world.desk.path())]);
    world.await_pairs();
    Some(world)
}

#[test]
fn what_is_behind_an_interface_loses_nothing_while_workers_and_daemon_are_replaced() {
    let Some(mut world) = with_wire() else { return };
    let exchange = world.exchange();
    exchange.goes_on(&world.rig, 300);
    world.rig.ask(&["worker", "upgrade", "desk"]);
    world.await_pairs();
    exchange.goes_on(&world.rig, 200);
    world.rig.kill_daemon();
    exchange.goes_on(&world.rig, 200);
    world.rig.start();
    world.await_pairs();
    world.rig.ask(&["worker", "upgrade", "desk"]);
    world.await_pairs();
    exchange.goes_on(&world.rig, 200);
    let tally = exchange.end();
    assert_eq!((tally.back, tally.twice, tally.twice_there), (tally.sent, 0, 0), "{tally:?}\n{}", world.rig.log());
    let status = world.rig.ask(&["status"]);
    assert!(status.contains(":wire0 on VNI lan"), "{status}");
    let counts = world.rig.ask(&["vni", "stats", "lan"]);
    assert!(counts.contains("desk"), "{counts}");
    // The interface is its owner's: it stays.
    world.rig.ask(&["node", "remove", "desk"]);
    world.desk.ip("link show wire0");
    world.end();
}

#[test]
fn what_is_behind_an_interface_loses_nothing_when_its_worker_is_killed() {
    const KILLS: u64 = 6;
    let Some(world) = with_wire() else { return };
    let exchange = world.exchange();
    for _ in 0..KILLS {
        exchange.goes_on(&world.rig, 300);
        world.rig.kill_driver("desk");
    }
    exchange.goes_on(&world.rig, 300);
    let (tally, deaths) = (exchange.end(), deaths(&world.rig));
    assert_eq!(deaths, KILLS);
    assert_eq!(tally.back, tally.sent, "{tally:?}\n{}", world.rig.log());
    assert!(tally.twice + tally.twice_there <= 2 * BURST * KILLS, "{tally:?}");
    world.end();
}

/// The worker's socket keeps the namespace, and frames flow on: users have to hear that it has no name any more.
#[test]
fn an_interface_whose_namespace_has_lost_its_name_is_told_of() {
    let Some(world) = World::new() else { return };
    world.desk.ip("link add eth0 type veth peer name wire0");
    let name = world.rig.path("namespace");
    std::os::unix::fs::symlink(world.desk.path(), &name).expect("a link");
    world.rig.ask(&["node", "add", "desk", "--link", &format!("{}:wire0", name.display())]);
    world.rig.await_pair("desk");
    let is_missed = || world.rig.ask(&["status"]).contains("has lost its name: its workers go on");
    assert!(!is_missed());
    std::fs::remove_file(&name).expect("it is there");
    until(&world.rig, "it is told of", is_missed);
    std::os::unix::fs::symlink(world.desk.path(), &name).expect("a link");
    until(&world.rig, "it is there again", || !is_missed());
    world.end();
}

/// The kernel refuses frames to it meanwhile, and nobody else says why. It may be meant, so the node is in no trouble.
#[test]
fn an_interface_whose_link_is_down_is_told_of_and_no_trouble() {
    let Some(world) = with_wire() else { return };
    let is = |what: &str| {
        let nics = world.rig.json(&["nic", "list"]);
        nics.as_array().expect("a list").iter().any(|nic| nic["node"] == "desk" && nic["link"] == what)
    };
    until(&world.rig, "its link is up", || is("up"));
    world.desk.ip("link set wire0 down");
    world.rig.await_event(":wire0 is down; bring the interface up (ip link set wire0 up)");
    let status = world.rig.ask(&["status"]);
    assert!(is("down") && status.contains("driven, link down"), "{status}");
    let nodes = world.rig.json(&["node", "list"]);
    assert!(nodes.as_array().expect("a list").iter().all(|node| node["trouble"].is_null()), "{nodes}");
    world.desk.ip("link set wire0 up");
    world.rig.await_event(":wire0 is up again");
    // The other end of its cable.
    world.desk.ip("link set eth0 down");
    world.rig.await_event(":wire0 is down; look at its cable, and at the other end");
    world.rig.ask(&["node", "remove", "desk"]);
    world.end();
}

#[test]
fn an_interface_that_is_renamed_is_told_of_and_goes_on() {
    let Some(world) = with_wire() else { return };
    let rename = |from: &str, to: &str| {
        world.desk.ip(&format!("link set {from} down"));
        world.desk.ip(&format!("link set {from} name {to}"));
        world.desk.ip(&format!("link set {to} up"));
    };
    let is_told = || world.rig.ask(&["status"]).contains(":wire0 of node desk is called wire9 by now");
    assert!(!is_told());
    rename("wire0", "wire9");
    until(&world.rig, "it is told of", is_told);
    let exchange = world.exchange();
    exchange.goes_on(&world.rig, 200);
    exchange.end();
    rename("wire9", "wire0");
    until(&world.rig, "it has its name again", || !is_told());
    // The kernel finds it by a second name, too.
    world.desk.ip("link property add dev wire0 altname cable0");
    world.rig.ask(&["node", "remove", "desk"]);
    world.rig.ask(&["node", "add", "desk", "--link", &format!("{}:cable0", world.desk.path())]);
    let is_up = |nic: &Value| nic["node"] == "desk" && nic["link"] == "up";
    let nics = || world.rig.json(&["nic", "list"]);
    until(&world.rig, "it was looked at", || nics().as_array().expect("a list").iter().any(is_up));
    let status = world.rig.ask(&["status"]);
    assert!(!status.contains("by now"), "{status}");
    world.end();
}

#[test]
fn long_segments_cross_an_interface() {
    let Some(world) = with_wire() else { return };
    for (near, far, at_far) in [(&world.shop, &world.desk, DESK), (&world.desk, &world.shop, SHOP)] {
        let stream = Stream::begin(near, far, at_far, Duration::ZERO);
        stream.goes_on(&world.rig, 16 << 20);
        stream.end();
    }
    world.end();
}

#[test]
fn a_frame_that_is_longer_than_the_interface_takes_is_counted_as_that() {
    let Some(world) = with_wire() else { return };
    world.desk.ip("link set wire0 mtu 1000");
    assert!(world.pinged(&["-c", "1", "-W", "5", "-s", "900", DESK]).contains(" 1 received"));
    world.pinged(&["-c", "2", "-i", "0.01", "-W", "0.01", "-s", "1200", DESK]);
    let long = || world.rig.count("desk@lan", "dropped_too_long");
    until(&world.rig, "both are counted", || long() == 2);
    assert_eq!(world.rig.count("desk@lan", "dropped_refused"), 0);
    world.end();
}

/// A kernel hands over segments inside a tunnel as if they were in none.
#[test]
fn long_segments_in_a_tunnel_cross_an_interface() {
    let Some(world) = with_wire() else { return };
    const VXLAN: &str = "type vxlan id 5 dstport 4789";
    let probe = format!("link add probe {VXLAN}");
    let probed = world.shop.within(|| Command::new("ip").args(probe.split(' ')).status());
    let has_vxlan = probed.is_ok_and(|it| it.success());
    if !has_vxlan {
        println!("skipped: the kernel has no VXLAN: modprobe vxlan");
        return world.end();
    }
    world.shop.ip("link del probe");
    for (room, link, us, far, inside) in
        [(&world.shop, "lan", SHOP, DESK, "198.51.100.1"), (&world.desk, "eth0", DESK, SHOP, "198.51.100.2")]
    {
        room.ip(&format!("link add tunnel {VXLAN} local {us} remote {far} dev {link}"));
        room.ip(&format!("address add {inside}/24 dev tunnel"));
        room.ip("link set tunnel up");
    }
    for (near, far, at_far) in [(&world.desk, &world.shop, "198.51.100.1"), (&world.shop, &world.desk, "198.51.100.2")]
    {
        let stream = Stream::begin(near, far, at_far, Duration::ZERO);
        stream.goes_on(&world.rig, 16 << 20);
        world.rig.ask(&["worker", "upgrade", "desk"]);
        stream.goes_on(&world.rig, 1 << 20);
        world.rig.kill_driver("desk");
        stream.goes_on(&world.rig, 1 << 20);
        stream.end();
    }
    world.end();
}

#[test]
fn a_bridge_as_an_interface_is_told_of_and_no_trouble() {
    let Some(mut world) = World::new() else { return };
    let made = world.desk.within(|| Command::new("ip").args(["link", "add", "br0", "type", "bridge"]).status());
    if !made.is_ok_and(|it| it.success()) {
        println!("skipped: the kernel has no bridges: modprobe bridge");
        return world.end();
    }
    world.desk.ip("link set br0 up");
    let add = |world: &World, name| {
        world.rig.ask(&["node", "add", "desk", "--link", &format!("{}:{name}", world.desk.path())]);
        world.rig.await_pair("desk");
    };
    let is_told = |world: &World| world.rig.ask(&["status"]).contains(":br0 of node desk is a bridge, which");
    add(&world, "br0");
    world.rig.await_event("(ip link set tasuki1 master br0)");
    assert!(is_told(&world));
    assert!(world.rig.json(&["node", "list"])[0]["trouble"].is_null());
    world.rig.kill_daemon();
    world.rig.start();
    assert!(is_told(&world));
    // As it says.
    world.rig.ask(&["node", "remove", "desk"]);
    world.desk.ip("link add tasuki0 type veth peer name tasuki1");
    world.desk.ip("link set tasuki1 master br0");
    add(&world, "tasuki0");
    assert!(!is_told(&world));
    world.end();
}

#[test]
fn an_interface_that_is_not_there_or_goes_is_told_of_and_stops_nobody_else() {
    let Some(world) = with_wire() else { return };
    let path = world.desk.path();
    let no_interface = format!("{path}:wire9");
    for (link, says) in [
        (no_interface.as_str(), "there is no interface wire9; make it, or correct the name"),
        // What is sent there comes back.
        ("lo", "the interface lo has no Ethernet frames"),
        ("/proc/1/ns/none:wire0", "there is no network namespace at /proc/1/ns/none"),
        ("sixteen-letters-", "cannot be the name of one"),
    ] {
        let said = world.rig.tasuki(&["node", "add", "yard", "--link", link]);
        let said = String::from_utf8_lossy(&said.stderr).into_owned();
        assert!(said.contains(says), "{link}: {said}");
    }
    let said = world.rig.tasuki(&["node", "add", "yard", "--link", &format!("{path}:wire0")]);
    assert!(String::from_utf8_lossy(&said.stderr).contains("is node \"desk\"'s as well"), "{said:?}");
    // Nor by another name; it may also be the one that tasukid made for a namespace of the VNI.
    for (room, name, node) in [(&world.desk, "wire0", "desk"), (&world.shop, "lan", "shop")] {
        let link = format!("{}:{name}", room.path().replace("/ns/", "/./ns/"));
        let said = world.rig.refused(&["node", "add", "yard", "--link", &link]);
        assert!(said.contains(&format!("the interface is node {node:?}'s as well, by another name")), "{said}");
    }
    let guest = Room::new();
    world.add("guest", &guest, "192.0.2.3", &[]);
    world.rig.await_pair("guest");
    world.desk.ip("link del wire0");
    let exchange = Exchange::begin([(&world.shop, SHOP), (&guest, "192.0.2.3")]);
    exchange.goes_on(&world.rig, 300);
    // A frame for all reaches the end, where it finds no interface.
    world.rig.await_event(
        "is gone, with its network namespace or removed by hand: frames for it are dropped; tasuki status says",
    );
    world.rig.await_event("or has lost its name; remove the node (tasuki node remove desk) and add it again");
    let tally = exchange.end();
    assert_eq!(tally.back, tally.sent, "{tally:?}");
    // Another of the same name, and the node anew.
    makes_wire(&world.desk);
    world.rig.ask(&["node", "remove", "desk"]);
    world.rig.ask(&["node", "add", "desk", "--link", &format!("{path}:wire0")]);
    world.await_pairs();
    let exchange = world.exchange();
    exchange.goes_on(&world.rig, 200);
    exchange.end();
    world.end();
}
