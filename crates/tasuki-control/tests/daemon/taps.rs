//! Programs of a network namespace whose interface is a node's NIC: what they send and get while the NIC changes hands. The card is the model,
//! its cable a TAP in another namespace. Needs root.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::MutexGuard;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tasuki_tap::interface::Interface;
use tasuki_tap::namespace::Namespace;

use super::rig::{Rig, pid, signal, until};
use super::storm::{self, beside};

/// Addresses for documentation (RFC 5737): at the card's cable, and of the programs behind the card.
const NEAR: &str = "192.0.2.1";
const FAR: &str = "192.0.2.2";

/// A card's burst: what a worker that is killed has done and not said, at most.
const BURST: u64 = 32;

/// A program that was started, ended with this.
struct Program(Child);

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A network namespace that is there as long as a process is.
struct Room(Program);

impl Room {
    fn new() -> Self {
        let mut command = Command::new("unshare");
        // If nobody ends it, it ends all the same.
        command.args(["--net", "--", "sleep", "900"]).stdin(Stdio::null());
        let room = Room(Program(command.spawn().expect("unshare")));
        let ours = std::fs::read_link("/proc/self/ns/net").expect("a namespace");
        let limit = Instant::now() + Duration::from_secs(20);
        while std::fs::read_link(room.path()).is_ok_and(|its| its == ours) {
            assert!(Instant::now() < limit, "unshare has made no namespace");
            std::thread::sleep(Duration::from_millis(2));
        }
        room
    }

    fn path(&self) -> String {
        format!("/proc/{}/ns/net", self.0.0.id())
    }

    fn within<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        Namespace::named(&self.path()).within(|| Ok(work())).expect("a namespace")
    }
}

/// A daemon with two nodes that share the TAP in `far`; the card's cable is in `near`. What is dropped first is ended first.
struct World {
    rig: Rig,
    near: Room,
    far: Room,
    _model: Program,
    _one: MutexGuard<'static, ()>,
}

/// Why it cannot be tried here.
fn is_impossible() -> Option<&'static str> {
    let has_unshare = Command::new("unshare").arg("--version").stdout(Stdio::null()).status().is_ok();
    match () {
        () if !rustix::process::geteuid().is_root() => Some("making a TAP needs root"),
        () if !std::path::Path::new("/dev/net/tun").exists() => Some("there is no /dev/net/tun: modprobe tun"),
        () if !has_unshare => Some("needs unshare: apt-get install util-linux"),
        () if beside("tasuki-worker").is_none() || beside("tasuki-sim").is_none() => {
            Some("needs tasuki-worker and tasuki-sim beside tasukid: cargo build --workspace")
        }
        () => None,
    }
}

fn nodes(tap: &str) -> String {
    let node = |name: &str, other: &str| {
        format!("[[node]]\nname = \"{name}\"\nwork = {{ tap = {{ {tap} }} }}\ntrusts = [\"{other}\"]\n\n")
    };
    [node("red", "blue"), node("blue", "red")].concat()
}

impl World {
    /// Nothing, with the reason said, where it cannot be.
    fn new(plan: Option<&str>) -> Option<Self> {
        Self::with(plan, [&format!("{NEAR}/24"), &format!("{FAR}/24")])
    }

    /// The same with these addresses at the cable, and of the TAP.
    fn with(plan: Option<&str>, addresses: [&str; 2]) -> Option<Self> {
        if let Some(why) = is_impossible() {
            println!("skipped: {why}");
            return None;
        }
        let one = storm::alone();
        let (near, far) = (Room::new(), Room::new());
        let tap = format!("netns = \"{}\", name = \"nic0\", address = \"{}\"", far.path(), addresses[1]);
        let nic = "[[nic]]\nname = \"eth0\"\ndevice = \"vfio-user:/nowhere/card.sock\"\nnode = \"red\"\n";
        let rig = Rig::without_daemon(&[&nodes(&tap), nic].concat(), "");
        let socket = rig.path("card.sock");
        let mut command = Command::new(beside("tasuki-sim").expect("looked for before"));
        command.args(["sim", "nic", "--link-up", "10", "--tap", "wire0", "--socket"]).arg(&socket);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let model = Program(near.within(|| command.spawn().expect("a model")));
        until(&rig, "the model serves", || socket.exists());
        near.within(|| {
            let wire = Interface::find("wire0").expect("the model's wire");
            wire.add_address(addresses[0].parse().expect("an address")).expect("an address");
            wire.up().expect("a link");
        });
        let (stand_in, worker) = (rig.path("worker"), beside("tasuki-worker").expect("looked for before"));
        rig.configure(|text| {
            let text = text.replace(&format!("{stand_in:?}"), &format!("{worker:?}"));
            // Workers are killed on purpose.
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
        self.rig.ask(&["stop"]);
        self.rig.daemon_ends();
    }
}

/// What became of numbered datagrams.
#[derive(Debug, Default)]
struct Tally {
    sent: u64,
    /// Those that came back,
    back: u64,
    /// more than once,
    twice: u64,
    /// and those that came to the programs behind the card more than once.
    twice_there: u64,
}

/// Numbered datagrams to the programs behind the card, which send each back.
struct Exchange {
    over: Arc<AtomicBool>,
    moved: Arc<AtomicU64>,
    near: JoinHandle<Tally>,
    far: JoinHandle<u64>,
}

/// Under way at once: less than anything between the two has room for.
const WINDOW: u64 = 16;

/// A datagram that has not come back for so long counts no more as under way.
const PATIENCE: Duration = Duration::from_secs(2);

/// A socket that looks up now and then.
fn socket(room: &Room, address: &str) -> UdpSocket {
    let socket = room.within(|| UdpSocket::bind((address, 7007)).expect("an address of the interface"));
    socket.set_read_timeout(Some(Duration::from_millis(100))).expect("a limit");
    socket
}

/// The number of the next datagram.
fn next(socket: &UdpSocket) -> Option<u64> {
    let mut bytes = [0; 64];
    let len = socket.recv(&mut bytes).ok()?;
    (len == bytes.len()).then(|| u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")))
}

fn datagram(number: u64) -> [u8; 64] {
    let mut bytes = [0; 64];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    bytes
}

impl Exchange {
    fn begin(world: &World) -> Self {
        let (over, moved) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (near, far) = (socket(&world.near, NEAR), socket(&world.far, FAR));
        near.connect((FAR, 7007)).expect("an address");
        far.connect((NEAR, 7007)).expect("an address");
        let (ends, counts) = (over.clone(), moved.clone());
        let near = std::thread::spawn(move || ask(&near, &ends, &counts));
        let ends = over.clone();
        let far = std::thread::spawn(move || answer(&far, &ends));
        Exchange { over, moved, near, far }
    }

    /// Waits until so many more have come back.
    fn goes_on(&self, world: &World, count: u64) {
        let had = self.moved.load(Relaxed);
        until(&world.rig, "datagrams come back", || self.moved.load(Relaxed) >= had + count);
    }

    fn end(self) -> Tally {
        self.over.store(true, Relaxed);
        let tally = self.near.join().expect("who asks");
        Tally { twice_there: self.far.join().expect("who answers"), ..tally }
    }
}

fn ask(socket: &UdpSocket, over: &AtomicBool, moved: &AtomicU64) -> Tally {
    let (mut tally, mut seen, mut since) = (Tally::default(), BTreeMap::<u64, u32>::new(), Instant::now());
    let mut missing = 0_u64;
    loop {
        let ends = over.load(Relaxed);
        if ends && (missing == 0 || since.elapsed() > PATIENCE * 2) {
            break;
        }
        if since.elapsed() > PATIENCE && !ends {
            (missing, since) = (0, Instant::now());
        }
        if missing == 0 && !ends {
            // As many a second as an ordinary program sends, not as many as go.
            std::thread::sleep(Duration::from_millis(1));
            for _ in 0..WINDOW {
                // Refused while nobody listens there, or the interface is not there.
                let _ = socket.send(&datagram(tally.sent));
                tally.sent += 1;
            }
            missing = WINDOW;
        }
        if let Some(number) = next(socket) {
            let times = seen.entry(number).or_default();
            *times += 1;
            if *times == 1 {
                (missing, since) = (missing.saturating_sub(1), Instant::now());
                moved.fetch_add(1, Relaxed);
            }
        }
    }
    tally.back = seen.len() as u64;
    tally.twice = seen.values().map(|times| u64::from(times - 1)).sum();
    tally
}

/// Sends back what comes; says how much came more than once.
fn answer(socket: &UdpSocket, over: &AtomicBool) -> u64 {
    let (mut seen, mut quiet) = (BTreeMap::<u64, u32>::new(), Instant::now());
    while !over.load(Relaxed) || quiet.elapsed() < PATIENCE * 2 {
        if let Some(number) = next(socket) {
            *seen.entry(number).or_default() += 1;
            quiet = Instant::now();
            // What came twice is answered once, so that each direction is counted by itself.
            if seen[&number] == 1 {
                let _ = socket.send(&datagram(number));
            }
        }
    }
    seen.values().map(|times| u64::from(times - 1)).sum()
}

#[test]
fn programs_behind_a_nic_lose_nothing_and_get_nothing_twice_while_it_changes_hands() {
    let Some(mut world) = World::new(None) else { return };
    let exchange = Exchange::begin(&world);
    exchange.goes_on(&world, 500);
    for state in [&[][..], &["--state", "store"], &[]] {
        world.rig.ask(&[&["worker", "upgrade", "red"], state].concat());
        world.rig.await_pair("red");
        exchange.goes_on(&world, 200);
    }
    for to in ["blue", "red"] {
        world.give(to, "keep");
        exchange.goes_on(&world, 200);
    }
    // The next daemon gets the TAP from the workers, and fresh workers get it from that one.
    world.rig.kill_daemon();
    world.rig.start();
    world.rig.await_pair("red");
    world.rig.ask(&["worker", "upgrade", "red"]);
    world.rig.await_pair("red");
    world.give("blue", "keep");
    exchange.goes_on(&world, 500);
    let tally = exchange.end();
    println!("{tally:?}");
    assert_eq!(tally.back, tally.sent, "{tally:?}\n{}", world.rig.log());
    assert_eq!((tally.twice, tally.twice_there), (0, 0), "{tally:?}\n{}", world.rig.log());
    world.end();
}

/// Deaths that the daemon has told of.
fn deaths(rig: &Rig) -> u64 {
    u64::try_from(rig.log().matches("was killed by signal 9").count()).expect("a count")
}

#[test]
fn what_a_dead_worker_had_under_way_comes_twice_or_not_at_all_and_no_more_than_a_burst() {
    let Some(world) = World::new(None) else { return };
    let exchange = Exchange::begin(&world);
    const KILLS: u64 = 5;
    for _ in 0..KILLS {
        exchange.goes_on(&world, 300);
        world.kill_driver();
    }
    exchange.goes_on(&world, 300);
    let tally = exchange.end();
    println!("{tally:?} with {KILLS} kills");
    assert!(tally.sent - tally.back <= 2 * BURST * KILLS, "{tally:?}");
    assert!(tally.twice + tally.twice_there <= 2 * BURST * KILLS, "{tally:?}");
    world.end();
}

#[test]
fn a_worker_that_dies_between_card_and_tap_stops_nobody() {
    if !cfg!(feature = "crash-points") {
        return println!("skipped: needs --features crash-points");
    }
    for place in ["tap.given:200", "tap.taken:200", "burst.turned:100"] {
        let Some(world) = World::new(Some(place)) else { return };
        let exchange = Exchange::begin(&world);
        until(&world.rig, "workers die", || deaths(&world.rig) >= 3);
        exchange.goes_on(&world, 500);
        let (tally, deaths) = (exchange.end(), deaths(&world.rig));
        println!("{place}: {tally:?}, {deaths} deaths");
        assert!(tally.sent - tally.back <= BURST * deaths, "{tally:?}");
        assert!(tally.twice + tally.twice_there <= BURST * deaths, "{tally:?}");
        world.end();
    }
}

/// A byte of a stream, by its place.
fn byte(at: u64) -> u8 {
    (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

#[test]
fn a_connection_outlives_every_relay() {
    let Some(mut world) = World::new(None) else { return };
    let listener = world.far.within(|| TcpListener::bind((FAR, 7008)).expect("an address"));
    let far = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a connection");
        let (mut at, mut bytes) = (0_u64, vec![0; 1 << 16]);
        loop {
            let len = stream.read(&mut bytes).expect("a connection that stays");
            if len == 0 {
                return at;
            }
            for got in &bytes[..len] {
                assert_eq!(*got, byte(at), "byte {at} is another");
                at += 1;
            }
        }
    });
    let stream = world.near.within(|| TcpStream::connect((FAR, 7008)).expect("a connection"));
    let (over, sent) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let (ends, counts) = (over.clone(), sent.clone());
    let near = std::thread::spawn(move || {
        let mut stream = stream;
        let mut at = 0_u64;
        while !ends.load(Relaxed) {
            let bytes: Vec<u8> = (at..at + 4096).map(byte).collect();
            stream.write_all(&bytes).expect("a connection that stays");
            at += 4096;
            counts.store(at, Relaxed);
            // An ordinary program's pace.
            std::thread::sleep(Duration::from_millis(1));
        }
        at
    });
    let goes_on = |world: &World| {
        let had = sent.load(Relaxed);
        until(&world.rig, "the stream goes on", || sent.load(Relaxed) >= had + (4 << 20 >> 4));
    };
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
    over.store(true, Relaxed);
    let (sent, came) = (near.join().expect("who sends"), far.join().expect("who receives"));
    assert_eq!(sent, came);
    world.end();
}

#[test]
fn neighbours_are_found_by_multicast() {
    let Some(world) = World::with(None, ["2001:db8::1/64", "2001:db8::2/64"]) else { return };
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
    rig.ask(&["stop"]);
    rig.daemon_ends();
    let is_there = room.within(|| Interface::find("nic0").is_ok());
    assert!(!is_there, "it ends with the last who has it");
}

/// Starts a daemon that cannot begin; what it says.
fn refusal(tap: &str, wrap: &[&str]) -> String {
    let rig = Rig::without_daemon(&nodes(tap), "");
    let tasukid = rig.tasukid();
    let words = wrap.iter().map(std::ffi::OsStr::new).chain([tasukid.get_program()]).chain(tasukid.get_args());
    let words: Vec<_> = words.collect();
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).env_remove("NOTIFY_SOCKET").env_remove("RUST_LOG").stdin(Stdio::null());
    let output = command.output().expect("tasukid");
    assert_eq!(output.status.code(), Some(1), "{tap}");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    said.lines().last().unwrap_or_default().to_owned()
}

#[test]
fn a_tap_that_cannot_be_had_is_refused_with_a_sentence() {
    let said = refusal("netns = \"no-such-room\", name = \"nic0\"", &[]);
    assert!(said.contains("no network namespace at /run/netns/no-such-room; make it (ip netns add"), "{said}");
    let said = refusal("netns = \"/etc/hostname\", name = \"nic0\"", &[]);
    assert!(said.contains("/etc/hostname is no network namespace"), "{said}");
    if let Some(why) = is_impossible() {
        return println!("skipped: {why}");
    }
    let said = refusal("name = \"lo\"", &[]);
    assert!(said.contains("red") && said.contains("lo is an interface already"), "{said}");
    let room = Room::new();
    let room = format!("netns = \"{}\", name = \"nic0\"", room.path());
    let said = refusal(&room, &["setpriv", "--bounding-set", "-net_admin", "--"]);
    assert!(said.contains("needs CAP_NET_ADMIN; run as root"), "{said}");
    let said = refusal(&room, &["setpriv", "--bounding-set", "-sys_admin", "--"]);
    assert!(said.contains("is no network namespace that could be used") && said.contains("run as root"), "{said}");
}
