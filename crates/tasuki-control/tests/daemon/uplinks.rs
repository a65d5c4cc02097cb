//! An uplink: a node whose worker joins a NIC and a VNI. A namespace on the VNI talks to what is at the other end of the card's cable, while the uplink's
//! workers are replaced and killed. The card is the model, its cable a TAP in another namespace. Needs root.

use std::net::UdpSocket;
use std::process::{Command, Stdio};
use std::sync::MutexGuard;
use std::time::Instant;

use rustix::process::Signal;
use tasuki_tap::interface::Interface;

use super::rig::{Rig, pid, signal, until};
use super::rooms::{BURST, Exchange, Program, Room, deaths, is_impossible};
use super::storm::{self, beside};

/// Addresses for documentation (RFC 5737): at the card's cable, and on the VNI.
const FAR: &str = "192.0.2.1";
const SHOP: &str = "192.0.2.2";

/// A daemon with an uplink that has the NIC, and a namespace on its VNI; the card's cable is in `far`. What is dropped first is ended first.
struct World {
    rig: Rig,
    far: Room,
    shop: Room,
    _model: Program,
    _one: MutexGuard<'static, ()>,
}

impl World {
    /// Nothing, with the reason said, where it cannot be.
    fn new() -> Option<Self> {
        Self::with_link_after(10)
    }

    /// The same; milliseconds from a reset to the link.
    fn with_link_after(ms: u32) -> Option<Self> {
        if let Some(why) = is_impossible() {
            println!("skipped: {why}");
            return None;
        }
        let one = storm::alone();
        let (far, shop) = (Room::new(), Room::new());
        let nodes = "[[node]]\nname = \"up\"\nvni = \"lan\"\nwork = \"uplink\"\n\n\
            [[nic]]\nname = \"eth0\"\ndevice = \"vfio-user:CARD\"\nnode = \"up\"\n";
        let rig = Rig::without_daemon(nodes, "");
        let socket = rig.path("card.sock");
        let mut command = Command::new(beside("tasuki-sim").expect("looked for before"));
        command.args(["sim", "nic", "--link-up", &ms.to_string(), "--tap", "wire0", "--socket"]).arg(&socket);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let model = Program(far.within(|| command.spawn().expect("a model")));
        until(&rig, "the model serves", || socket.exists());
        far.within(|| {
            let wire = Interface::find("wire0").expect("the model's wire");
            wire.add_address(format!("{FAR}/24").parse().expect("an address")).expect("an address");
            wire.up().expect("a link");
        });
        let (stand_in, worker) = (rig.path("worker"), beside("tasuki-worker").expect("looked for before"));
        rig.configure(|text| {
            let text = text.replace(&format!("{stand_in:?}"), &format!("{worker:?}"));
            // Workers are killed on purpose.
            let text = text.replace("[daemon]\n", "[daemon]\nrestart = \"always\"\n");
            text.replace("vfio-user:CARD", &format!("vfio-user:{}", socket.display()))
        });
        let mut world = World { rig, far, shop, _model: model, _one: one };
        world.rig.start();
        world.settles();
        let path = world.shop.path();
        world.rig.ask(&["node", "add", "shop", "--netns", &path, "--address", &format!("{SHOP}/24")]);
        world.rig.await_pair("shop");
        Some(world)
    }

    /// Somebody drives both the NIC and the end, and another stands by.
    fn settles(&self) {
        self.rig.await_pair("up");
        let is_driven = || {
            let driver = self.rig.worker("up", "drives");
            let nics = self.rig.json(&["nic", "list"]);
            let its = nics.as_array().expect("a list").iter().filter(|nic| nic["node"] == "up");
            let its: Vec<_> = its.map(|nic| (nic["is"] == "driven").then(|| nic["worker"].clone())).collect();
            driver.is_some() && its.len() == 2 && its[0].is_some() && its[0] == its[1]
        };
        until(&self.rig, "one worker drives both", is_driven);
    }

    fn kill_driver(&self) {
        let (dead, _) = self.rig.await_pair("up");
        signal(pid(&dead), Signal::KILL);
        until(&self.rig, "another drives", || {
            self.rig.worker("up", "drives").is_some_and(|now| now["pid"] != dead["pid"])
        });
        self.settles();
    }

    fn end(mut self) {
        self.rig.ask(&["stop"]);
        self.rig.daemon_ends();
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
    exchange.goes_on(&world.rig, 200);
    let tally = exchange.end();
    println!("{tally:?}");
    assert_eq!((tally.back, tally.twice, tally.twice_there), (tally.sent, 0, 0), "{tally:?}\n{}", world.rig.log());
    world.end();
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
    // Between two of the VNI nothing needs the uplink, and both reach the far end beside that.
    let near = Exchange::begin([(&world.shop, SHOP), (&guest, "192.0.2.3")]);
    let out = Exchange::begin([(&guest, "192.0.2.3"), (&world.far, FAR)]);
    near.goes_on(&world.rig, 200);
    out.goes_on(&world.rig, 200);
    let (near, out) = (near.end(), out.end());
    assert_eq!((near.back, out.back), (near.sent, out.sent), "{near:?}, {out:?}");
    // What comes by the cable for nobody is counted where people look.
    let refused = || world.rig.worker("up", "drives").and_then(|driver| driver["refused"].as_u64());
    let before = refused().expect("it drives");
    world.far.within(|| {
        let words = ["neigh", "add", "192.0.2.77", "lladdr", "02:00:00:00:00:77", "dev", "wire0"];
        assert!(Command::new("ip").args(words).status().is_ok_and(|status| status.success()), "needs ip (iproute2)");
        let socket = UdpSocket::bind((FAR, 0)).expect("an address of the interface");
        (0..10).for_each(|_| _ = socket.send_to(b"anybody?", "192.0.2.77:9").expect("it can be sent"));
    });
    until(&world.rig, "they are counted", || refused().is_some_and(|now| now >= before + 10));
    world.end();
}

/// Ticks of CPU time (1/100 s), and how often it has slept.
fn spent(pid: u32) -> (u64, u64) {
    let of = |what: &str| std::fs::read_to_string(format!("/proc/{pid}/{what}")).expect("a process of ours");
    let (stat, status) = (of("stat"), of("status"));
    let ticks = stat.rsplit(')').next().expect("fields").split_whitespace().skip(11).take(2);
    let slept = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:")).expect("a count");
    (ticks.map(|count| count.parse::<u64>().expect("a count")).sum(), slept.trim().parse().expect("a count"))
}

#[test]
fn an_uplink_whose_cable_is_out_sleeps_with_frames_in_hand() {
    // The link of this card comes up in an hour.
    let Some(world) = World::with_link_after(3_600_000) else { return };
    let socket = world.shop.within(|| UdpSocket::bind((SHOP, 0)).expect("an address of the interface"));
    socket.set_broadcast(true).expect("a flag");
    // More than the card's ring takes, and then more than the uplink's ring on the VNI does.
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
    let (before, began) = (spent(driver), Instant::now());
    until(&world.rig, "it sleeps, again and again", || spent(driver).1 >= before.1 + 300);
    let (ticks, took) = (spent(driver).0 - before.0, began.elapsed());
    println!("{ticks} ticks of CPU time in {took:?}");
    assert!(u128::from(ticks) * 10 < took.as_millis() / 2, "{ticks} ticks of CPU time in {took:?}");
    world.end();
}
