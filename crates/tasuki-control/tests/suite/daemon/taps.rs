//! Programs of a network namespace whose interface is a node's NIC, and their traffic while the NIC changes hands.
//! The card is the model, its cable a TAP in another namespace. Needs root.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::RwLockWriteGuard;
use std::time::Duration;

use rustix::process::Signal;
use tasuki_tap::interface::Interface;

use super::queues::Flood;
use super::rig::{Rig, pid, signal, until};
use super::rooms::{BURST, Exchange, Room, Stream, deaths, is_impossible};
use super::storm;

/// Addresses for documentation (RFC 5737): at the card's cable, and of the programs behind the card.
const NEAR: &str = "192.0.2.1";
const FAR: &str = "192.0.2.2";

/// A daemon with two nodes that share the TAP in `far`; the card's cable is in `near`. Fields end in the order in
/// which they are dropped.
struct World {
    rig: Rig,
    near: Room,
    far: Room,
    _model: storm::Model,
    _one: RwLockWriteGuard<'static, ()>,
}

fn nodes(tap: &str) -> String {
    let node = |name: &str, other: &str| {
        format!("[[node]]\nname = \"{name}\"\nwork = {{ tap = {{ {tap} }} }}\ntrusts = [\"{other}\"]\n\n")
    };
    [node("red", "blue"), node("blue", "red")].concat()
}

impl World {
    /// Makes a world. Where that is impossible, prints the reason and returns `None`.
    fn new(plan: Option<&str>) -> Option<Self> {
        Self::with(plan, [&format!("{NEAR}/24"), &format!("{FAR}/24")], None)
    }

    /// Like [`new`](Self::new), with these addresses at the cable and of the TAP, and this MTU of all on the way.
    fn with(plan: Option<&str>, addresses: [&str; 2], mtu: Option<u32>) -> Option<Self> {
        Self::with_link(plan, addresses, mtu, 10)
    }

    /// Like [`with`](Self::with), with a card whose link is up so many milliseconds after a reset.
    fn with_link(plan: Option<&str>, addresses: [&str; 2], mtu: Option<u32>, link_up_ms: u32) -> Option<Self> {
        if let Some(why) = is_impossible() {
            println!("skipped: {why}");
            return None;
        }
        let one = storm::alone();
        let (near, far) = (Room::new(), Room::new());
        let of = |before: &str| mtu.map(|mtu| format!("{before}mtu = {mtu}")).unwrap_or_default();
        let tap = format!("netns = \"{}\", name = \"nic0\", address = \"{}\"{}", far.path(), addresses[1], of(", "));
        let nic = "[[nic]]\nname = \"eth0\"\ndevice = \"vfio-user:/nowhere/card.sock\"\nnode = \"red\"\n";
        let rig = Rig::without_daemon(&[&nodes(&tap), nic, &of("")].concat(), "");
        let socket = rig.path("card.sock");
        let model =
            near.within(|| storm::Model::start(&socket, &["--tap", "wire0", "--link-up", &link_up_ms.to_string()]));
        near.within(|| {
            let wire = Interface::find("wire0").expect("the model's wire");
            wire.add_address(addresses[0].parse().expect("an address")).expect("an address");
            mtu.iter().for_each(|mtu| wire.set_mtu(*mtu).expect("an MTU"));
            wire.up().expect("a link");
        });
        rig.with_stock_workers();
        rig.configure(|text| {
            // Tests kill workers on purpose.
            let text = text.replace("[daemon]\n", "[daemon]\nrestart = \"always\"\n");
            text.replace("/nowhere/card.sock", &socket.display().to_string())
        });
        let mut world = World { rig, near, far, _model: model, _one: one };
        world.rig.start_to_die(plan.map(str::to_owned));
        until(&world.rig, "tasukid serves", || world.rig.tasuki(&["status"]).status.success());
        if plan.is_none() {
            world.rig.await_pair("red");
        }
        Some(world)
    }

    fn kill_driver(&self) {
        let driver = |rig: &Rig| rig.worker("red", "drives").or_else(|| rig.worker("blue", "drives"));
        until(&self.rig, "somebody drives", || driver(&self.rig).is_some());
        let Some(dead) = driver(&self.rig) else { return };
        signal(pid(&dead), Signal::KILL);
        until(&self.rig, "another drives", || driver(&self.rig).is_some_and(|now| now["pid"] != dead["pid"]));
    }

    fn give(&self, to: &str, method: &str) {
        let said = self.rig.json(&["nic", "give", "eth0", "--to", to, "--method", method]);
        assert_eq!(said["relays"][0]["done"], true, "{said}");
        self.rig.await_pair(to);
    }

    fn end(mut self) {
        self.rig.stop();
    }
}

#[test]
fn programs_behind_a_nic_lose_nothing_and_get_nothing_twice_while_it_changes_hands() {
    let Some(mut world) = World::new(None) else { return };
    let exchange = Exchange::begin([(&world.near, NEAR), (&world.far, FAR)]);
    exchange.goes_on(&world.rig, 500);
    for state in [&[][..], &["--state", "store"], &[]] {
        world.rig.ask(&[&["worker", "upgrade", "red"], state].concat());
        world.rig.await_pair("red");
        exchange.goes_on(&world.rig, 200);
    }
    for to in ["blue", "red"] {
        world.give(to, "keep");
        exchange.goes_on(&world.rig, 200);
    }
    // The next daemon gets the TAP from the workers, and fresh workers get it from that daemon.
    world.rig.kill_daemon();
    world.rig.start();
    world.rig.await_pair("red");
    world.rig.ask(&["worker", "upgrade", "red"]);
    world.rig.await_pair("red");
    world.give("blue", "keep");
    exchange.goes_on(&world.rig, 500);
    let tally = exchange.end();
    println!("{tally:?}");
    assert_eq!(tally.back, tally.sent, "{tally:?}\n{}", world.rig.log());
    assert_eq!((tally.twice, tally.twice_there), (0, 0), "{tally:?}\n{}", world.rig.log());
    world.end();
}

#[test]
fn a_tap_of_two_nodes_that_somebody_changes_or_deletes_is_told_of_and_made_anew_by_an_apply() {
    let Some(mut world) = World::new(None) else { return };
    let told = || {
        let said = world.rig.ask(&["status"]);
        let (_, after) =
            said.split_once("was given the station address 02:00:00:00:00:55, and its NIC lets in frames for ")?;
        Some(after.split(' ').next()?.to_owned())
    };
    world.far.ip("link set nic0 address 02:00:00:00:00:55");
    until(&world.rig, "it is told", || told().is_some());
    let mac = told().expect("just told");
    world.far.ip(&format!("link set nic0 address {mac}"));
    until(&world.rig, "it is right again", || told().is_none());
    world.far.within(|| Interface::find("nic0").and_then(|nic| nic.delete())).expect("it was there");
    let says = |world: &World, part| world.rig.ask(&["status"]).contains(part);
    let is_missed = |world: &World| {
        until(&world.rig, "it is missed", || {
            says(world, "node red has no interface") && says(world, "node blue has no interface")
        });
    };
    is_missed(&world);
    world.rig.kill_daemon();
    world.rig.start();
    is_missed(&world);
    let said = world.rig.refused(&["nic", "give", "eth0", "--to", "blue"]);
    assert!(said.contains("node blue has no interface any more"), "{said}");
    world.rig.ask(&["apply"]);
    world.rig.await_pair("red");
    let exchange = Exchange::begin([(&world.near, NEAR), (&world.far, FAR)]);
    exchange.goes_on(&world.rig, 100);
    world.give("blue", "keep");
    exchange.goes_on(&world.rig, 100);
    exchange.end();
    assert!(!says(&world, "has no interface"), "{}", world.rig.log());
    world.end();
}

/// The link is down for a second after `cold`, as after a cable was pulled out: no frame that waits can be sent.
#[test]
fn a_nic_without_a_link_is_given_though_frames_wait() {
    let addresses = [&*format!("{NEAR}/24"), &format!("{FAR}/24")];
    let Some(world) = World::with_link(None, addresses, None, 1000) else { return };
    let _flood = Flood::begin([(&world.far, FAR), (&world.near, NEAR)]);
    let sent = |node: &str| world.rig.worker(node, "drives").map(|worker| worker["sent"].clone());
    let goes = |node: &str| until(&world.rig, "frames go", || sent(node) != sent(node));
    goes("red");
    for method in ["keep", "repoint", "cold"] {
        world.give("blue", "cold");
        until(&world.rig, "no frame goes", || sent("blue").is_some() && sent("blue") == sent("blue"));
        world.give("red", method);
        goes("red");
    }
    world.end();
}

#[test]
fn frames_of_9000_bytes_cross_whoever_drives() {
    if Command::new("ping").arg("-V").output().is_err() {
        return println!("skipped: needs ping: apt-get install iputils-ping");
    }
    let Some(world) = World::with(None, [&format!("{NEAR}/24"), &format!("{FAR}/24")], Some(9000)) else { return };
    let ping = |count| {
        // 28 bytes more are headers of IP and ICMP; none may be cut in parts.
        let odd = world.near.ping(count, &["-i", "0.01", "-s", "8972", "-M", "do", FAR]);
        assert!(odd.is_none(), "{}\n{}", odd.unwrap_or_default(), world.rig.log());
    };
    std::thread::scope(|scope| {
        let pinging = scope.spawn(|| ping(300));
        for state in [&[][..], &["--state", "store"]] {
            world.rig.ask(&[&["worker", "upgrade", "red"], state].concat());
            world.rig.await_pair("red");
        }
        world.give("blue", "keep");
        pinging.join().expect("all are answered");
    });
    world.kill_driver();
    ping(20);
    world.rig.await_pair("blue");
    world.give("red", "repoint");
    ping(20);
    // A card that starts anew takes them as well.
    world.give("blue", "cold");
    ping(20);
    // Interface and NIC are made anew, also while the keeper has the former ones.
    let keeper = world.rig.keeper().expect("a keeper");
    signal(keeper, Signal::STOP);
    world.rig.configure(|text| text.replace("mtu = 9000", "mtu = 8000"));
    let applied = world.rig.tasuki(&["apply"]);
    signal(keeper, Signal::CONT);
    assert!(applied.status.success(), "{applied:?}");
    world.rig.await_pair("red");
    until(&world.rig, "the link is up", || {
        let words = ["-c", "1", "-s", "7972", "-M", "do", "-W", "1", FAR];
        world.near.within(|| Command::new("ping").args(words).output().expect("ping").status.success())
    });
    world.end();
}

#[test]
fn a_worker_that_dies_between_card_and_tap_stops_nobody() {
    if !cfg!(feature = "crash-points") {
        return println!("skipped: needs --features crash-points");
    }
    for place in ["tap.given:200", "tap.taken:200", "burst.turned:100"] {
        let Some(world) = World::new(Some(place)) else { return };
        let exchange = Exchange::begin([(&world.near, NEAR), (&world.far, FAR)]);
        until(&world.rig, "workers die", || deaths(&world.rig) >= 3);
        exchange.goes_on(&world.rig, 500);
        let (tally, deaths) = (exchange.end(), deaths(&world.rig));
        println!("{place}: {tally:?}, {deaths} deaths");
        assert!(tally.sent - tally.back <= BURST * deaths, "{tally:?}");
        assert!(tally.twice + tally.twice_there <= BURST * deaths, "{tally:?}");
        world.end();
    }
}

#[test]
fn a_connection_outlives_every_relay() {
    let Some(mut world) = World::new(None) else { return };
    let stream = Stream::begin(&world.near, &world.far, FAR, Duration::from_millis(1));
    let goes_on = |world: &World| stream.goes_on(&world.rig, 256 << 10);
    goes_on(&world);
    world.rig.ask(&["worker", "upgrade", "red"]);
    goes_on(&world);
    world.rig.await_pair("red");
    world.kill_driver();
    goes_on(&world);
    world.rig.await_pair("red");
    for (to, method) in [("blue", "repoint"), ("red", "keep"), ("blue", "cold")] {
        world.give(to, method);
        goes_on(&world);
    }
    world.rig.kill_daemon();
    goes_on(&world);
    world.rig.start();
    world.rig.await_pair("blue");
    world.kill_driver();
    goes_on(&world);
    stream.end();
    world.end();
}

#[test]
fn neighbours_are_found_by_multicast() {
    let Some(world) = World::with(None, ["2001:db8::1/64", "2001:db8::2/64"], None) else { return };
    let listener = world.far.within(|| TcpListener::bind(("2001:db8::2", 7008)).expect("an address"));
    let far = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a connection");
        std::io::copy(&mut stream.try_clone().expect("another"), &mut stream).expect("an end")
    });
    let mut stream = world.near.within(|| TcpStream::connect(("2001:db8::2", 7008)).expect("a connection"));
    for round in 0..3_u8 {
        stream.write_all(&[round; 100]).expect("a connection that stays");
        let mut bytes = [0xff; 100];
        stream.read_exact(&mut bytes).expect("what was sent");
        assert_eq!(bytes, [round; 100]);
        world.rig.ask(&["worker", "upgrade", "red"]);
        world.rig.await_pair("red");
    }
    stream.shutdown(std::net::Shutdown::Write).expect("a connection that stays");
    assert_eq!(far.join().expect("who answers"), 300);
    world.end();
}

/// A NIC runs before there is any TAP: its filter stays as its opener set it.
#[test]
fn a_node_that_gets_a_tap_later_is_found_by_multicast() {
    let Some(mut world) = World::with(None, ["2001:db8::1/64", "2001:db8::2/64"], None) else { return };
    world.rig.stop();
    let taps = std::fs::read_to_string(world.rig.path("tasuki.toml")).expect("the configuration");
    let (_, work) = taps.split_once("work = ").expect("a node's work");
    let work = work.lines().next().expect("a line").to_owned();
    let its = |node: &str| format!("node = \"{node}\"");
    world.rig.configure(|text| text.replace(&work, "\"echo\"").replace(&its("red"), &its("blue")));
    world.rig.start();
    world.rig.await_pair("blue");
    // The keeper may have it for a moment longer.
    until(&world.rig, "the TAP is gone", || world.far.within(|| Interface::find("nic0").is_err()));
    world.rig.configure(|text| text.replacen("\"echo\"", &work, 1).replace(&its("blue"), &its("red")));
    world.rig.ask(&["apply"]);
    world.rig.await_pair("red");
    let listener = world.far.within(|| TcpListener::bind(("2001:db8::2", 7008)).expect("an address"));
    // No frame has left the TAP's namespace for the other one: it must hear a question there first.
    world.near.within(|| TcpStream::connect(("2001:db8::2", 7008)).expect("a connection"));
    drop(listener);
    world.end();
}

#[test]
fn a_tap_stands_for_one_nic() {
    if let Some(why) = is_impossible() {
        return println!("skipped: {why}");
    }
    let room = Room::new();
    let tap = format!("netns = \"{}\", name = \"nic0\"", room.path());
    let nic = |name: &str, node: &str| {
        format!("[[nic]]\nname = \"{name}\"\ndevice = \"vfio-user:/nowhere/{name}.sock\"\nnode = \"{node}\"\n\n")
    };
    let green = "[[node]]\nname = \"green\"\nwork = \"echo\"\n\n".to_owned();
    let mut rig = Rig::with(&[nodes(&tap), green, nic("eth0", "red"), nic("eth1", "green")].concat(), "");
    rig.await_worker("blue", "idle");
    for node in ["red", "blue"] {
        let said = rig.refused(&["nic", "give", "eth1", "--to", node]);
        assert!(said.contains("stands for eth0 already; give that to another node than red first"), "{said}");
    }
    let status = rig.ask(&["status"]);
    assert!(status.contains("the NIC of /proc/") && status.contains(":nic0"), "{status}");
    rig.stop();
    // The keeper may have it for a moment longer than the daemon lives.
    until(&rig, "it ends with the last who has it", || room.within(|| Interface::find("nic0").is_err()));
}

/// Starts a daemon that cannot begin; returns its error.
fn refusal(tap: &str, wrap: &[&str]) -> String {
    let rig = Rig::without_daemon(&nodes(tap), "");
    let tasukid = rig.tasukid();
    let words = wrap.iter().map(std::ffi::OsStr::new).chain([tasukid.get_program()]).chain(tasukid.get_args());
    let words: Vec<_> = words.collect();
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).env_remove("NOTIFY_SOCKET").env_remove("RUST_LOG").stdin(Stdio::null());
    let output = command.output().expect("tasukid");
    assert_eq!(output.status.code(), Some(1), "{tap}");
    assert_eq!(rig.keeper(), None, "it began nothing that is to be kept");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    said.lines().last().unwrap_or_default().to_owned()
}

#[test]
fn a_tap_that_cannot_be_had_is_refused_with_a_sentence() {
    let said = refusal("netns = \"no-such-room\", name = \"nic0\"", &[]);
    assert!(said.contains("no network namespace at /run/netns/no-such-room; make it (ip netns add"), "{said}");
    let said = refusal("netns = \"/etc/hostname\", name = \"nic0\"", &[]);
    assert!(said.contains("/etc/hostname cannot be used as a network namespace"), "{said}");
    if let Some(why) = is_impossible() {
        return println!("skipped: {why}");
    }
    let room = Room::new();
    let made = room.within(|| Command::new("ip").args(["link", "add", "far", "type", "veth"]).status());
    assert!(made.expect("ip").success());
    let said = refusal(&format!("netns = \"{}\", name = \"far\"", room.path()), &[]);
    assert!(said.contains("red") && said.contains("the interface far exists"), "{said}");
    let room = format!("netns = \"{}\", name = \"nic0\"", room.path());
    let said = refusal(&room, &["setpriv", "--bounding-set", "-net_admin", "--"]);
    assert!(said.contains("needs CAP_NET_ADMIN; run as root"), "{said}");
    let said = refusal(&room, &["setpriv", "--bounding-set", "-sys_admin", "--"]);
    assert!(said.contains("cannot be used as a network namespace") && said.contains("run as root"), "{said}");
}
