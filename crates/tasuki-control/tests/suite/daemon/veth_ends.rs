//! Veth ends when one daemon follows another: the new daemon keeps some, removes the unwanted ones, and mistakes no
//! other interface for one. Needs root.

use std::os::fd::OwnedFd;

use rustix::process::Signal;
use tasuki_control::config;
use tasuki_control::supervisor::shortcuts::{OnVni, Shortcuts};
use tasuki_tap::device::Before;
use tasuki_tap::interface::Interface;
use tasuki_tap::namespace::Namespace;
use tasuki_tap::{Settings, Tap, TapError};
use tasuki_testing::process::descriptors;

use super::rig::{signal, until};
use super::rooms::{Exchange, Room, is_impossible};
use super::vnis::{DESK, SHOP, World};

/// Starts a daemon whose configuration contains both namespaces.
fn configured() -> Option<World> {
    let mut world = World::new()?;
    world.rig.kill_daemon();
    world.describe("");
    world.rig.start();
    world.await_pairs();
    if world.crossed("shop").is_none() {
        println!("skipped: this kernel passes on no frames by a program of ours");
        world.end();
        return None;
    }
    Some(world)
}

fn has_lan(room: &Room) -> bool {
    room.within(|| Interface::find("lan").is_ok())
}

/// Returns the number of frames from one node to another that went by workers.
fn by_workers(world: &World, from: &str, to: &str) -> u64 {
    let talks = world.rig.json(&["vni", "stats", "lan"]);
    let mut talks = talks.as_array().expect("a list").iter();
    let talk = talks.find(|talk| talk["node"] == from && talk["other"] == to);
    talk.and_then(|talk| talk["sent"].as_u64()).unwrap_or(0)
}

/// Nobody has the descriptors of the interfaces but the workers, which end: their interfaces take a moment to go.
#[test]
fn an_interface_of_dead_workers_that_is_going_away_is_no_trouble() {
    let Some(mut world) = configured() else { return };
    for _ in 0..3 {
        let keeper = world.rig.keeper().expect("a keeper");
        // It would start another keeper.
        signal(world.rig.daemon_pid(), Signal::STOP);
        signal(keeper, Signal::KILL);
        world.rig.kill_daemon();
        world.rig.start();
        world.await_pairs();
        until(&world.rig, "it answers", || world.is_answered(DESK));
        let said = world.rig.ask(&["events"]);
        assert!(!said.contains("is not a free TAP"), "{said}");
    }
    world.end();
}

#[test]
fn a_node_that_may_take_the_shortcut_no_more_goes_by_its_worker_under_the_next_daemon() {
    let Some(mut world) = configured() else { return };
    let exchange = world.exchange();
    exchange.goes_on(&world.rig, 300);
    world.rig.kill_daemon();
    let its = format!("address = \"{SHOP}/24\"");
    world.rig.configure(|text| text.replace(&its, &format!("{its}, shortcut = false")));
    world.rig.start();
    until(&world.rig, "all is as described", || world.rig.is_as_configured());
    world.await_pairs();
    exchange.goes_on(&world.rig, 100);
    let before = by_workers(&world, "shop", "desk");
    exchange.goes_on(&world.rig, 300);
    let by_workers = by_workers(&world, "shop", "desk") - before;
    assert!(by_workers >= 200, "{by_workers} of 300 went by workers\n{}", world.rig.log());
    assert_eq!(world.crossed("shop"), None);
    let tally = exchange.end();
    assert_eq!((tally.back, tally.twice + tally.twice_there), (tally.sent, 0), "{tally:?}\n{}", world.rig.log());
    world.rig.ask(&["node", "remove", "shop"]);
    assert!(!has_lan(&world.shop), "its interface is gone with it");
    world.add("shop", &world.shop, SHOP, &[]);
    world.await_pairs();
    let exchange = Exchange::begin([(&world.shop, SHOP), (&world.desk, DESK)]);
    exchange.goes_on(&world.rig, 100);
    exchange.end();
    world.end();
}

#[test]
fn of_a_node_that_the_next_daemon_does_not_know_no_interface_is_left() {
    let Some(mut world) = configured() else { return };
    world.rig.kill_daemon();
    assert!(has_lan(&world.shop), "it is its worker's meanwhile");
    world.rig.configure(|text| {
        let (before, nodes) = text.split_once("\n[[node]]\nname = \"shop\"").expect("it is there");
        let (_, desk) = nodes.split_once("\n[[node]]\n").expect("desk comes after it");
        format!("{before}\n[[node]]\n{desk}")
    });
    world.rig.start();
    world.rig.await_pair("desk");
    until(&world.rig, "its interface is gone", || !has_lan(&world.shop));
    assert!(has_lan(&world.desk));
    world.end();
}

#[test]
fn a_namespace_that_cannot_be_had_costs_nothing() {
    let Some(world) = World::new() else { return };
    // Do not count descriptors that the daemon opens once and keeps.
    world.rig.refused(&["node", "add", "new", "--netns", "no-such-room"]);
    let before = descriptors(world.rig.daemon_pid());
    for number in 0..5 {
        let vni = format!("vni{number}");
        world.rig.refused(&["node", "add", "new", "--netns", "no-such-room", "--vni", &vni]);
    }
    until(&world.rig, "nothing is left of them", || descriptors(world.rig.daemon_pid()) <= before);
    world.end();
}

/// Returns the place of a namespace on a VNI, with this station address.
fn place(mac: u8) -> OnVni {
    let text = format!(
        "[[node]]\nname = \"n{mac}\"\nvni = \"lan\"\nmac = \"02:00:00:00:5c:{mac:02x}\"\nwork = {{ tap = {{ name = \"lan\" }} }}\n"
    );
    let config = config::Config::parse("test.toml".as_ref(), &text).expect("a configuration");
    OnVni::of(&config.node[0]).expect("a namespace on a VNI")
}

#[test]
fn no_namespace_of_a_plain_tap_becomes_the_hub() {
    if let Some(why) = is_impossible() {
        return println!("skipped: {why}");
    }
    let rooms = [Room::new(), Room::new(), Room::new()];
    let [a, b, c] = rooms.each_ref().map(|room| Namespace::named(&room.path()));
    let plain: OwnedFd = Tap::create(&a, "lan", &Settings::default(), Before::Offload).expect("a TAP").device;
    let mut before = Shortcuts::default();
    let device = match before.connect(&place(2), &b, "lan", &Settings::default()) {
        Ok((_, device)) => device,
        Err(error @ (TapError::NoPair(_) | TapError::NoProgram(_) | TapError::NotAllowed)) => {
            return println!("skipped: {error}");
        }
        Err(error) => panic!("{error}"),
    };
    drop(before);
    // The new daemon hears the worker of the plain node first.
    let mut next = Shortcuts::default();
    let said = next.adopt(&place(1), &plain).map(drop).expect_err("it has no veth end");
    assert!(matches!(&said, TapError::NoVethEnd(name) if name == "lan"), "{said}");
    let veth_end = next.adopt(&place(2), &device).expect("a veth end of the shortcut's");
    let (other, _device) = next.connect(&place(3), &c, "lan", &Settings::default()).expect("there is room");
    assert!(veth_end.is_there() && other.is_there());
    for name in ["veth_end0", "veth_end1", "tap0", "tap1"] {
        let found = a.within(|| Interface::find(name)).map(drop);
        assert!(found.is_err(), "{name} is in a namespace of somebody's");
    }
}
