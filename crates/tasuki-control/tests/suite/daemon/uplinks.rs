//! An uplink: a node whose worker joins a NIC and a VNI. A namespace on the VNI talks to the other end of the card's
//! cable, while the uplink's workers are replaced and killed. The card is the model, its cable a TAP in another
//! namespace. Needs root.

use std::net::UdpSocket;
use std::sync::RwLockWriteGuard;

use rustix::process::Signal;
use tasuki_tap::interface::Interface;
use tasuki_testing::process;

use super::rig::{Rig, pid, signal, until};
use super::rooms::{BURST, Exchange, Room, deaths, is_impossible};
use super::storm::{self, need_storm, state};

/// Addresses for documentation (RFC 5737): at the card's cable, and on the VNI.
const FAR: &str = "192.0.2.1";
const SHOP: &str = "192.0.2.2";

/// A daemon with an uplink that has the NIC, and a namespace on its VNI; the card's cable is in `far`. Fields end in
/// the order in which they are dropped.
struct World {
    rig: Rig,
    far: Room,
    shop: Room,
    _model: storm::Model,
    _one: RwLockWriteGuard<'static, ()>,
}

impl World {
    /// Makes a world. Where that is impossible, prints the reason and returns `None`.
    fn new() -> Option<Self> {
        Self::with_link_after(10)
    }

    /// Like [`new`](Self::new), with `ms` milliseconds from a reset to the link.
    fn with_link_after(ms: u32) -> Option<Self> {
        let mut world = Self::without_daemon("", ms)?;
        world.rig.start();
        world.settles();
        world.add_shop();
        world.rig.await_pair("shop");
        Some(world)
    }

    /// Makes a world with `more` in the uplink's configuration, without starting the daemon.
    fn without_daemon(more: &str, ms: u32) -> Option<Self> {
        if let Some(why) = is_impossible() {
            println!("skipped: {why}");
            return None;
        }
        let one = storm::alone();
        let (far, shop) = (Room::new(), Room::new());
        let nodes = format!(
            "[[node]]\nname = \"up\"\nvni = \"lan\"\nwork = \"uplink\"\n{more}\n\
            [[nic]]\nname = \"eth0\"\ndevice = \"vfio-user:CARD\"\nnode = \"up\"\n"
        );
        let rig = Rig::without_daemon(&nodes, "");
        let socket = rig.path("card.sock");
        let model = far.within(|| storm::Model::start(&socket, &["--tap", "wire0", "--link-up", &ms.to_string()]));
        far.within(|| {
            let wire = Interface::find("wire0").expect("the model's wire");
            wire.add_address(format!("{FAR}/24").parse().expect("an address")).expect("an address");
            wire.up().expect("a link");
        });
        storm::as_planned(&rig, "worker", "tasuki-worker");
        rig.configure(|text| {
            // Tests kill workers on purpose.
            let text = text.replace("[daemon]\n", "[daemon]\nrestart = \"always\"\n");
            text.replace("vfio-user:CARD", &format!("vfio-user:{}", socket.display()))
        });
        Some(World { rig, far, shop, _model: model, _one: one })
    }

    fn add_shop(&self) {
        self.rig.ask(&["node", "add", "shop", "--netns", &self.shop.path(), "--address", &format!("{SHOP}/24")]);
        self.rig.await_worker("shop", "drives");
    }

    /// Returns the driver of the NIC, and that of the end.
    fn drivers(&self) -> Option<[u64; 2]> {
        let nics = self.rig.json(&["nic", "list"]);
        let its = nics.as_array().expect("a list").iter().filter(|nic| nic["node"] == "up");
        let its: Vec<u64> = its.filter(|nic| nic["is"] == "driven").filter_map(|nic| nic["worker"].as_u64()).collect();
        its.try_into().ok()
    }

    /// Returns whether one worker drives both the NIC and the end.
    fn is_whole(&self) -> bool {
        self.drivers().is_some_and(|[nic, end]| nic == end)
    }

    /// Waits until one worker drives both, and another stands by.
    fn settles(&self) {
        until(&self.rig, "one worker drives both, and another stands by", || {
            self.is_whole() && self.rig.worker("up", "drives").is_some() && self.rig.worker("up", "stands by").is_some()
        });
    }

    /// Waits for the event that the uplink passes nothing on.
    fn is_told_of(&self) {
        self.rig.await_event("uplink up passes nothing on, for worker ");
    }

    fn kill_driver(&self) {
        self.rig.kill_driver("up");
        self.settles();
    }

    /// Returns a stopped worker.
    fn stopped(&self) -> Option<u32> {
        self.rig.workers().iter().map(pid).find(|pid| state(*pid) == Some('T'))
    }

    /// Checks that frames still pass both ways, then ends everything. Nothing was lost, and at most `most_twice`
    /// frames came twice, both ways together.
    fn end_after(self, exchange: Exchange, most_twice: u64) {
        exchange.goes_on(&self.rig, 200);
        let tally = exchange.end();
        println!("{tally:?}");
        assert_eq!(tally.back, tally.sent, "{tally:?}\n{}", self.rig.log());
        assert!(tally.twice + tally.twice_there <= most_twice, "{tally:?}\n{}", self.rig.log());
        self.end();
    }

    fn end(mut self) {
        self.rig.stop();
    }
}

#[test]
fn a_node_of_a_vni_talks_to_the_other_end_of_a_cable_and_loses_nothing_while_the_uplink_is_replaced() {
    let Some(mut world) = World::new() else { return };
    let exchange = Exchange::begin([(&world.shop, SHOP), (&world.far, FAR)]);
    exchange.goes_on(&world.rig, 500);
    for _ in 0..3 {
        world.rig.ask(&["worker", "upgrade", "up"]);
        world.settles();
        exchange.goes_on(&world.rig, 200);
    }
    world.rig.ask(&["worker", "upgrade", "shop"]);
    exchange.goes_on(&world.rig, 200);
    world.rig.kill_daemon();
    exchange.goes_on(&world.rig, 200);
    world.rig.start();
    world.settles();
    world.rig.ask(&["worker", "upgrade", "up"]);
    world.settles();
    world.end_after(exchange, 0);
}

#[test]
fn an_uplink_that_is_killed_loses_nothing_and_has_no_more_than_a_burst_twice_each_way() {
    let Some(world) = World::new() else { return };
    let exchange = Exchange::begin([(&world.far, FAR), (&world.shop, SHOP)]);
    const KILLS: u64 = 4;
    for _ in 0..KILLS {
        exchange.goes_on(&world.rig, 300);
        world.kill_driver();
    }
    exchange.goes_on(&world.rig, 300);
    let (tally, deaths) = (exchange.end(), deaths(&world.rig));
    println!("{tally:?} with {deaths} deaths");
    assert_eq!((deaths, tally.back), (KILLS, tally.sent), "{}", world.rig.log());
    assert!(tally.twice + tally.twice_there <= 2 * BURST * KILLS, "{tally:?}");
    world.end();
}

#[test]
fn several_behind_the_cable_are_learnt_and_what_is_for_nobody_goes_out() {
    let Some(world) = World::new() else { return };
    let guest = Room::new();
    world.rig.ask(&["node", "add", "guest", "--netns", &guest.path(), "--address", "192.0.2.3/24"]);
    world.rig.await_pair("guest");
    // Traffic between two nodes of the VNI does not need the uplink, and both also reach the far end.
    let near = Exchange::begin([(&world.shop, SHOP), (&guest, "192.0.2.3")]);
    let out = Exchange::begin([(&guest, "192.0.2.3"), (&world.far, FAR)]);
    near.goes_on(&world.rig, 200);
    out.goes_on(&world.rig, 200);
    let (near, out) = (near.end(), out.end());
    assert_eq!((near.back, out.back), (near.sent, out.sent), "{near:?}, {out:?}");
    // Frames from the cable that no node accepts show up in the worker's counter.
    let refused = || world.rig.worker("up", "drives").and_then(|driver| driver["refused"].as_u64());
    let before = refused().expect("it drives");
    world.far.ip("neigh add 192.0.2.77 lladdr 02:00:00:00:00:77 dev wire0");
    world.far.within(|| {
        let socket = UdpSocket::bind((FAR, 0)).expect("an address of the interface");
        (0..10).for_each(|_| _ = socket.send_to(b"anybody?", "192.0.2.77:9").expect("it can be sent"));
    });
    until(&world.rig, "they are counted", || refused().is_some_and(|now| now >= before + 10));
    world.end();
}

/// Returns how often a process has slept.
fn slept(pid: u32) -> u64 {
    process::status(pid, "voluntary_ctxt_switches").and_then(|slept| slept.parse().ok()).expect("a count")
}

#[test]
fn an_uplink_whose_cable_is_out_sleeps_with_frames_in_hand() {
    // The link of this card comes up in an hour.
    let Some(world) = World::with_link_after(3_600_000) else { return };
    let socket = world.shop.within(|| UdpSocket::bind((SHOP, 0)).expect("an address of the interface"));
    socket.set_broadcast(true).expect("a flag");
    // Send more than the card's ring takes, and then more than the uplink's ring on the VNI does.
    until(&world.rig, "the uplink reads no more", || {
        (0..64).for_each(|_| _ = socket.send_to(&[0; 64], "192.0.2.255:9"));
        let talks = world.rig.json(&["vni", "stats", "lan"]);
        talks
            .as_array()
            .expect("a list")
            .iter()
            .any(|talk| talk["node"] == "shop" && talk["ring_full"].as_u64() > Some(0))
    });
    let driver = pid(&world.rig.await_worker("up", "drives"));
    let before = slept(driver);
    until(&world.rig, "it sleeps, again and again", || slept(driver) >= before + 300);
    world.end();
}

/// The daemon dies after the NIC has gone to the fresh worker, and before the end has.
#[test]
fn an_upgrade_that_its_daemon_does_not_live_to_end_leaves_no_uplink_with_two_workers() {
    need_storm!();
    let Some(mut world) = World::new() else { return };
    let exchange = Exchange::begin([(&world.far, FAR), (&world.shop, SHOP)]);
    exchange.goes_on(&world.rig, 200);
    world.rig.kill_daemon();
    world.rig.start_to_die(Some("daemon.settled:1".to_owned()));
    until(&world.rig, "tasukid serves", || world.rig.tasuki(&["status"]).status.success());
    world.settles();
    assert!(!world.rig.log().contains("passes nothing on"), "{}", world.rig.log());
    let said = world.rig.tasuki(&["worker", "upgrade", "up"]);
    assert!(!said.status.success(), "{said:?}");
    world.rig.daemon_ends();
    world.rig.start();
    world.is_told_of();
    world.settles();
    world.end_after(exchange, 0);
}

/// A worker that is ready for the NIC only comes to drive just that: once while the end's driver lives, and once after
/// it was killed, when the stand-by has the end. Each time one worker drives both afterwards.
#[test]
fn an_upgrade_that_fails_half_way_leaves_no_uplink_with_two_workers() {
    need_storm!();
    let Some(mut world) = World::new() else { return };
    world.rig.kill_daemon();
    world.rig.configure(|text| text.replace("prepare_ms = 20000", "prepare_ms = 500"));
    world.rig.start();
    world.settles();
    let exchange = Exchange::begin([(&world.far, FAR), (&world.shop, SHOP)]);
    for (number, is_killed) in [(1, false), (2, true)] {
        exchange.goes_on(&world.rig, 200);
        storm::plan_for(&world.rig, number, "TASUKI_STOP=map.begun:2");
        let (driver, _) = world.rig.await_pair("up");
        let said = world.rig.refused(&["worker", "upgrade", "up"]);
        assert!(said.contains("has not prepared within 500 ms"), "{said}");
        if is_killed {
            world.rig.kill(&driver);
        }
        signal(world.stopped().expect("it is stopped, and not long enough for a hang"), Signal::CONT);
        world.settles();
        assert!(world.rig.ask(&["events"]).matches("passes nothing on").count() >= number as usize);
    }
    world.end_after(exchange, 2 * BURST);
}

/// The stand-by is stopped while it is ready for the NIC only, and the driver is killed: another worker drives both.
#[test]
fn a_standby_that_hangs_when_it_is_ready_for_the_nic_only_keeps_nobody_else_from_both() {
    need_storm!();
    let Some(mut world) = World::new() else { return };
    world.rig.kill_daemon();
    world.rig.configure(|text| {
        text.replace("prepare_ms = 20000", "prepare_ms = 500").replace("deadline_ms = 20000", "deadline_ms = 500")
    });
    world.rig.start();
    world.settles();
    let exchange = Exchange::begin([(&world.far, FAR), (&world.shop, SHOP)]);
    exchange.goes_on(&world.rig, 200);
    let (driver, standby) = world.rig.await_pair("up");
    storm::plan_for(&world.rig, 1, "TASUKI_STOP=map.begun:2");
    signal(pid(&standby), Signal::KILL);
    // On a slow machine it may be ended before it is seen.
    let is_over = || world.rig.log().contains("has not prepared in time");
    until(&world.rig, "it is stopped", || world.stopped().is_some() || is_over());
    world.rig.kill(&driver);
    world.settles();
    world.end_after(exchange, 2 * BURST);
}

/// The daemon dies after it has given an uplink's only worker the NIC or the end, and before it lets the worker
/// prepare.
#[test]
fn what_a_daemon_gave_and_did_not_live_to_speak_of_is_driven_under_the_next() {
    need_storm!();
    for nth in 1..=2 {
        let Some(mut world) = World::without_daemon("standby = false\n", 10) else { return };
        world.rig.start_to_die(Some(format!("daemon.bundle:{nth}")));
        world.rig.daemon_ends();
        world.rig.start();
        until(&world.rig, "one worker drives both", || world.is_whole());
        until(&world.rig, "it is adopted", || world.rig.log().contains("is adopted"));
        world.add_shop();
        let exchange = Exchange::begin([(&world.far, FAR), (&world.shop, SHOP)]);
        world.end_after(exchange, 0);
    }
}
