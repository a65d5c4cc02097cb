//! The field of the death tests: a NIC, native nodes and namespaces under one daemon. Each path carries numbered
//! traffic. [`Who`] lists the processes that can be killed.

use std::collections::BTreeMap;
use std::sync::RwLockWriteGuard;
use std::time::{Duration, Instant};

use hyper::Method;
use rustix::process::Signal;
use serde_json::{Value, json};
use tasuki_control::api::client;
use tasuki_testing::{Dice, process};

use crate::daemon::rig::{Rig, lives, pid, signal, until};
use crate::daemon::rooms::{BURST, Exchange, Room, is_impossible};
use crate::daemon::storm::{self, Model, beside, send};

/// A node whose NIC sends all frames back, and one whose NIC does not open while its model stands still.
const NODES: &str = r#"
[[node]]
name = "red"
work = "echo"

[[node]]
name = "green"
work = "sink"

[[nic]]
name = "eth0"
device = "vfio-user:CARD"
node = "red"
ring = 1024

[[nic]]
name = "eth1"
device = "vfio-user:STILL"
node = "green"
"#;

/// (node, end): each of these nodes has a worker that drives the end, and one that stands by.
pub const ENDS: &[(&str, &str)] = &[
    ("red", "eth0"),
    ("sink", "sink@lan"),
    ("source", "source@lan"),
    ("shop", "shop@lan"),
    ("desk", "desk@lan"),
    ("yard", "yard@lan"),
];

/// Traffic of a field.
#[derive(Debug, Clone, Copy)]
pub struct Traffic {
    /// Model of the NIC's card.
    pub card: &'static str,
    /// Frames a second to the NIC. Its ring is as large as the card allows, up to 1,024.
    pub nic: &'static str,
    /// Frames a second from the native source.
    pub native: &'static str,
    /// Rest after a window of a namespace's datagrams.
    pub rest: Duration,
}

/// Addresses for documentation (RFC 5737).
const ADDRESSES: [&str; 3] = ["192.0.2.1", "192.0.2.2", "192.0.2.3"];

/// Longest time for everything to recover without intervention, whatever was killed.
const MENDED_WITHIN: Duration = Duration::from_secs(30);

/// Returns the current time, by the clock of the lease pages' stamps.
pub fn now() -> Duration {
    Duration::from_nanos(tasuki_shm::clock::now_ns())
}

/// Kinds of processes to kill.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Who {
    Driver,
    Standby,
    Opener,
    Keeper,
    Daemon,
}

/// The daemon's view of workers and NICs.
#[derive(Debug)]
pub struct Sight {
    workers: Vec<Value>,
    nics: Vec<Value>,
}

impl Sight {
    fn nic(&self, end: &str) -> &Value {
        self.nics.iter().find(|nic| nic["name"] == end).unwrap_or(&Value::Null)
    }

    /// Returns the living workers' processes of a node.
    pub fn workers_of(&self, node: &str) -> Vec<u32> {
        let its = self.workers.iter().filter(|worker| worker["node"] == node);
        its.map(pid).filter(|pid| lives(*pid)).collect()
    }

    /// Returns the driver of this end, and since when it drives.
    pub fn driver(&self, end: &str) -> Option<(u32, Duration)> {
        let nic = self.nic(end);
        let its = |worker: &&Value| worker["worker"] == nic["worker"];
        let driver = self.workers.iter().find(its).filter(|_| nic["is"] == "driven")?;
        Some((pid(driver), Duration::from_nanos(nic["driving_at_ns"].as_u64()?)))
    }

    /// Returns the driver and the stand-by, if a node has only these two workers.
    pub fn pair(&self, node: &str, end: &str) -> Option<(u32, u32)> {
        let (driver, _) = self.driver(end)?;
        let its: Vec<&Value> = self.workers.iter().filter(|worker| worker["node"] == node).collect();
        let standby = its.iter().find(|worker| worker["is"] == "stands by").map(|worker| pid(worker))?;
        (its.len() == 2 && lives(driver) && lives(standby)).then_some((driver, standby))
    }
}

/// A node that nobody drives for about as long loses what waits for it.
const OVERDUE: Duration = Duration::from_millis(900);
/// Number of frames that wait for a node at most.
const RING: u64 = 256;

/// All parts of a field, in the order in which they are dropped and ended.
pub struct Field {
    pub rig: Rig,
    card: Model,
    still: Model,
    rooms: [Room; 3],
    pub dice: Dice,
    /// Number of kills so far, by kind.
    kills: BTreeMap<Who, u64>,
    /// Deaths of workers that drove a namespace's end which only workers reach.
    by_workers: u64,
    /// Exchanges between namespaces that may take the shortcut, and between namespaces that go by workers.
    talks: Vec<Exchange>,
    has_shortcut: bool,
    /// Frames a second from the native source.
    rate: u64,
    /// How many frames a node may have lost that was driven again too late for those that waited for it.
    may_miss: u64,
    _one: RwLockWriteGuard<'static, ()>,
}

/// Outcome of each path.
#[derive(Debug)]
pub struct Outcome {
    /// Number of kills, by kind.
    pub kills: BTreeMap<Who, u64>,
    /// Report of the card's model.
    pub nic: String,
    /// Counts of the native source's frames: seen, missing, late, the next number.
    pub native: [u64; 4],
    /// Counts of the namespaces' datagrams, by the shortcut and by workers: sent, back, twice, twice there.
    pub talks: Vec<[u64; 4]>,
    /// How many datagrams of the path by workers dead workers may have had in hand.
    pub pardoned: u64,
    /// How many frames the native node, and a namespace that only workers reach, may have lost.
    pub may_miss: u64,
}

impl Field {
    /// Makes a field. Where that is impossible, prints the reason and returns `None`.
    pub fn new(dice: Dice, traffic: Traffic) -> Option<Self> {
        if let Some(why) = is_impossible() {
            println!("skipped: {why}");
            return None;
        }
        let one = storm::alone();
        let rig = Rig::without_daemon(NODES, "");
        let (card, still) = (rig.path("card.sock"), rig.path("still.sock"));
        let (stand_in, worker) = (rig.path("worker"), beside("tasuki-worker").expect("looked for before"));
        rig.configure(|text| {
            let text = text.replace(&format!("{stand_in:?}"), &format!("{worker:?}"));
            // The largest ring of the virtio driver.
            let text = if traffic.card == "virtio-net" { text.replace("ring = 1024", "ring = 512") } else { text };
            text.replace("CARD", &card.display().to_string()).replace("STILL", &still.display().to_string())
        });
        let source = ["--card", traffic.card, "--source", &u64::MAX.to_string(), "--rate", traffic.nic];
        // While it stands still, more frames come due than it can send before its first opener is killed: a model
        // ends once it has sent all.
        let (card, still) =
            (Model::start(&card, &source), Model::start(&still, &["--source", "1000000", "--rate", "100"]));
        signal(still.pid(), Signal::STOP);
        let rooms = [Room::new(), Room::new(), Room::new()];
        let mut field = Field {
            rig,
            card,
            still,
            rooms,
            dice,
            kills: BTreeMap::new(),
            by_workers: 0,
            talks: Vec::new(),
            has_shortcut: false,
            rate: traffic.native.parse().expect("a number"),
            may_miss: 0,
            _one: one,
        };
        field.rig.start();
        field.add_nodes(traffic);
        Some(field)
    }

    fn add_nodes(&mut self, traffic: Traffic) {
        let rig = &self.rig;
        let mac = "02:00:00:00:00:99";
        rig.ask(&["node", "add", "sink", "--native", "--work", "sink", "--mac", mac]);
        rig.ask(&["node", "add", "source", "--native", "--work", "source", "--to", mac, "--rate", traffic.native]);
        let ways: [&[&str]; 3] = [&[], &[], &["--no-shortcut"]];
        for (((node, _), way), (room, address)) in ENDS[3..].iter().zip(ways).zip(self.rooms.iter().zip(ADDRESSES)) {
            let (path, address) = (room.path(), format!("{address}/24"));
            rig.ask(&[&["node", "add", node, "--netns", &path, "--address", &address], way].concat());
        }
        self.settle();
        let table = self.get("/v1/vnis/lan/table").expect("a table");
        let shop = table.as_array().and_then(|nodes| nodes.iter().find(|its| its["node"] == "shop"));
        self.has_shortcut = shop.is_some_and(|shop| !shop["shortcut"].is_null());
        let [shop, desk, yard] = &self.rooms;
        for other in [(desk, ADDRESSES[1]), (yard, ADDRESSES[2])] {
            let talk = Exchange::resting([(shop, ADDRESSES[0]), other], traffic.rest);
            talk.goes_on(rig, 100);
            self.talks.push(talk);
        }
        let flows = || self.native().is_some_and(|[seen, ..]| seen > 100);
        until(rig, "native nodes talk", flows);
    }

    fn get(&self, address: &str) -> Option<Value> {
        client::ask(&self.rig.dir(), Method::GET, address, None).ok()
    }

    /// Returns the daemon's view, if a daemon answers.
    pub fn look(&self) -> Option<Sight> {
        let list = |address| self.get(address).and_then(|it| it.as_array().cloned());
        Some(Sight { workers: list("/v1/workers")?, nics: list("/v1/nics")? })
    }

    /// Returns counts of the native source's frames: seen, missing, late, the next number.
    fn native(&self) -> Option<[u64; 4]> {
        let said = self.get("/v1/nics/sink@lan/counts")?;
        let counts = said["counts"].as_array()?;
        let count = |name| counts.iter().find(|count| count[0] == name).and_then(|count| count[1].as_u64());
        Some([count("numbered")?, count("missing")?, count("late")?, count("next")?])
    }

    /// Waits until `is_so` returns a value, and returns it.
    pub fn until<T>(&self, what: &str, is_so: impl Fn(&Sight) -> Option<T>) -> T {
        let begun = Instant::now();
        loop {
            let sight = self.look();
            if let Some(it) = sight.as_ref().and_then(&is_so) {
                return it;
            }
            assert!(begun.elapsed() < MENDED_WITHIN, "not by itself: {what}\n{sight:#?}\n{}", self.rig.log());
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits until each end is driven and has a stand-by, no other worker is starting or leaving, and there is a
    /// keeper.
    pub fn settle(&self) {
        self.until("everybody is there", |sight| {
            let is_calm = |worker: &Value| matches!(worker["is"].as_str(), Some("drives" | "stands by" | "idle"));
            let is_whole = ENDS.iter().all(|(node, end)| sight.pair(node, end).is_some());
            let is_calm = is_whole && sight.workers.iter().all(is_calm) && sight.workers_of("green").len() == 2;
            is_calm.then(|| self.rig.keeper()).flatten()
        });
    }

    /// Waits until a worker drives that was not killed; returns since when.
    pub fn is_driven(&self, end: &str, dead: &[u32]) -> Duration {
        self.until(end, |sight| sight.driver(end).filter(|(driver, _)| !dead.contains(driver))).1
    }

    /// Records for how long nobody drove a node. After a second its neighbours take their memory back, and drop the frames
    /// for it until it is driven.
    pub fn was_without_driver(&mut self, took: Duration) {
        if took >= OVERDUE {
            self.may_miss += RING + self.rate * (took.as_secs() + 1);
        }
    }

    /// Kills a process of a node.
    pub fn kill(&mut self, who: Who, node: &str, victim: u32) {
        if send(victim, Signal::KILL) {
            *self.kills.entry(who).or_default() += 1;
            self.by_workers += u64::from(who == Who::Driver && ["shop", "yard"].contains(&node));
        }
    }

    /// Kills the daemon at once.
    pub fn kill_daemon(&mut self) {
        *self.kills.entry(Who::Daemon).or_default() += 1;
        self.rig.kill_daemon();
    }

    /// Starts another daemon, and waits until it serves.
    pub fn start_daemon(&mut self) {
        self.rig.start_to_die(None);
        let begun = Instant::now();
        while self.get("/v1/status").is_none() {
            assert!(begun.elapsed() < MENDED_WITHIN, "no daemon serves\n{}", self.rig.log());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Returns the process that currently opens eth1.
    pub fn opener(&self) -> Option<u32> {
        let words = format!("open\0vfio-user:{}\0", self.rig.path("still.sock").display());
        process::running().find(|(_, its)| its.contains(&words)).map(|(pid, _)| pid)
    }

    /// Waits for a random time of up to `up_to_ms` milliseconds.
    pub fn wait(&mut self, up_to_ms: usize) {
        std::thread::sleep(Duration::from_micros(self.dice.below(up_to_ms * 1000) as u64));
    }

    /// Asserts that no frame of the native nodes is missing so far or came twice.
    pub fn natives_are_exact(&self, after: &str) {
        let counts = self.native();
        if let Some([_, missing, late, _]) = counts {
            assert_eq!((missing, late), (0, 0), "after {after}: {counts:?}\n{}", self.rig.log());
        }
    }

    /// Lets eth1's model move, and kills its openers at a random step.
    fn kill_openers(&mut self) {
        signal(self.still.pid(), Signal::CONT);
        for _ in 0..2 {
            let is_open = |sight: &Sight| sight.driver("eth1").map(|_| None);
            let found = self.until("somebody opens eth1", |sight| is_open(sight).or_else(|| self.opener().map(Some)));
            let Some(opener) = found else { return };
            self.wait(20);
            self.kill(Who::Opener, "green", opener);
            until(&self.rig, "it is dead", || !lives(opener));
        }
    }

    /// Ends all traffic and all processes. eth1 opens by itself now that its model moves.
    pub fn end(mut self) -> Outcome {
        self.settle();
        self.kill_openers();
        self.until("eth1 is opened", |sight| sight.pair("green", "eth1"));
        until(&self.rig, "no opener is left, nor of a daemon that was killed", || self.opener().is_none());
        self.rig.ask(&["node", "remove", "source"]);
        let native = self.native().expect("who counts is there");
        let tally = |talk: Exchange| talk.end();
        let talks = self.talks.drain(..).map(tally).map(|it| [it.sent, it.back, it.twice, it.twice_there]).collect();
        let back = self.card.all_come_back();
        let log = self.rig.log();
        client::ask(&self.rig.dir(), Method::POST, "/v1/stop", Some(&json!({}))).expect("an end");
        self.rig.daemon_ends();
        let nic = back.map_or_else(|said| said, |()| self.card.ends());
        let pardoned = 2 * BURST * if self.has_shortcut { self.by_workers } else { self.kills.values().sum() };
        let kills = std::mem::take(&mut self.kills);
        let nic = nic.trim().to_owned();
        let outcome = Outcome { kills, nic, native, talks, pardoned, may_miss: self.may_miss };
        println!("{outcome:?}");
        outcome.is_as_promised(self.has_shortcut).unwrap_or_else(|why| panic!("{why}: {outcome:?}\n{log}"));
        outcome
    }
}

impl Outcome {
    /// Checks that nothing is lost, and that nothing comes twice except frames that a dead worker had in hand
    /// between a namespace and a VNI.
    fn is_as_promised(&self, has_shortcut: bool) -> Result<(), &'static str> {
        let nic = ["lost 0", "twice 0, out of order 0, damaged 0"];
        if !nic.iter().all(|part| self.nic.contains(part)) {
            return Err("frames of the NIC are missing, or came twice");
        }
        let [seen, missing, late, next] = self.native;
        if missing > self.may_miss || (late, seen + missing) != (0, next) {
            return Err("frames of the native nodes are missing, or came twice");
        }
        for (number, [sent, back, twice, there]) in self.talks.iter().enumerate() {
            let by_workers = number != 0 || !has_shortcut;
            let [pardoned, may_miss] = if by_workers { [self.pardoned, self.may_miss] } else { [0, 0] };
            if sent.abs_diff(*back) > may_miss || twice + there > pardoned {
                return Err("datagrams of namespaces are missing, or came twice");
            }
        }
        Ok(())
    }
}
