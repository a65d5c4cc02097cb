//! A process that talks to its card is frozen at any point (control groups of version 2). The test measures how long
//! that takes, and checks whether the process then holds a lock that the next owner must wait for.
//! `TASUKI_FREEZES=10000 cargo xtask guest --only drivers` makes a long run. The guest is emulated: times are of
//! that.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tasuki_net::nic::bus::{Bus, Iova, Registers, Vfio, pci};

use super::process::{self, Other, hear, say};
use super::repoint::{self, unpack};
use super::{E1000E, STATUS, TDBAL, open, region};
use tasuki_testing::{PATIENCE, polled};

const TEST: &str = "freezes::a_process_frozen_at_any_point_has_nothing_locked_for_the_next_owner";
const FREEZES: usize = 200;
/// One frozen process in this many is killed, as by a fence, and another takes its place.
const KILLED: usize = 20;
const GROUPS: &str = "/tmp/groups";

/// Addresses of the two owners' memory for the card.
const THEIRS: Iova = Iova(0x2_0000_0000);
const OURS: Iova = Iova(0x3_0000_0000);

/// A small random number generator, independent of the scheduler.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}

/// Makes one kind of access to card and kernel: registers, the configuration space, memory, vectors.
fn ask(bus: &mut Vfio, what: u64, at: Iova) {
    let registers = bus.registers(0).expect("BAR 0");
    match what {
        0 => _ = registers.read32(STATUS),
        1 => registers.write32(TDBAL, 0x1234_5670),
        2 => _ = bus.read_config(0).expect("the card is there"),
        3 => pci::enable(bus, true).expect("the card is there"),
        4 => {
            let memory = region(64);
            // A killed process may have left its own memory there.
            let _ = bus.unmap_dma(at, memory.len());
            bus.map_dma(&memory, at).expect("nothing is there");
            bus.unmap_dma(at, memory.len()).expect("it was mapped");
        }
        _ => bus.renew().expect("the card is there"),
    }
}

/// Plays the other process: talks to the card for ever.
fn talk() {
    let (socket, mut bus) = unpack();
    say(&socket, b"talks", &[]);
    let mut dice = Dice(std::process::id().into());
    loop {
        ask(&mut bus, dice.roll(6), THEIRS);
    }
}

/// Starts a talking process in a group of its own.
fn start(bus: &Vfio, group: &Path) -> Other {
    let other = repoint::start(TEST, bus);
    assert_eq!(hear(&other.socket).expect("it lives").0, b"talks");
    fs::write(group.join("cgroup.procs"), other.process.0.id().to_string()).expect("root may");
    other
}

/// Freezes all processes of a group; returns how long that takes.
fn freeze(group: &Path) -> Duration {
    let since = Instant::now();
    fs::write(group.join("cgroup.freeze"), "1").expect("root may");
    while !fs::read_to_string(group.join("cgroup.events")).expect("a group").contains("frozen 1") {
        assert!(since.elapsed() < PATIENCE, "it does not freeze");
    }
    since.elapsed()
}

/// Starts the next owner. On each request it makes every kind of access once, and reports how long that took.
fn next_owner(mut bus: Vfio) -> (Sender<()>, Receiver<Duration>, JoinHandle<()>) {
    let ((told, hears), (says, answers)) = (channel(), channel());
    let thread = std::thread::spawn(move || {
        while hears.recv().is_ok() {
            let since = Instant::now();
            (0..6).for_each(|what| ask(&mut bus, what, OURS));
            let _ = says.send(since.elapsed());
        }
    });
    (told, answers, thread)
}

fn spread(what: &str, mut times: Vec<Duration>) {
    times.sort();
    let of = |share: usize| times[(times.len() - 1) * share / 100];
    println!("{what}: {} times, p50 {:?}, p99 {:?}, at most {:?}", times.len(), of(50), of(99), of(100));
}

#[test]
fn a_process_frozen_at_any_point_has_nothing_locked_for_the_next_owner() {
    if process::role().is_some() {
        return talk();
    }
    let count = std::env::var("TASUKI_FREEZES").ok().and_then(|count| count.parse().ok()).unwrap_or(FREEZES);
    fs::create_dir_all(GROUPS).expect("a folder");
    let mounted = Command::new("/bin/busybox").args(["mount", "-t", "cgroup2", "none", GROUPS]).status();
    assert!(mounted.expect("a shell").success(), "the kernel has control groups of version 2");
    let group = Path::new(GROUPS).join("owner");
    fs::create_dir(&group).expect("root may");

    let mut bus = open(E1000E);
    bus.reset().expect("the card works");
    pci::enable(&mut bus, true).expect("the card works");
    // None of them ever rings: no cause is let through.
    let _vectors = bus.interrupts(2).expect("the card has five");
    let (told, answers, next) =
        next_owner(Vfio::from_twin(bus.twin().expect("descriptors are free")).expect("the same card"));
    let mut owner = start(&bus, &group);
    let (mut frozen, mut asked, mut dice) = (Vec::new(), Vec::new(), Dice(1));
    for round in 1..=count {
        std::thread::sleep(Duration::from_micros(dice.roll(3000)));
        frozen.push(freeze(&group));
        told.send(()).expect("it waits");
        let answer = answers.recv_timeout(PATIENCE);
        asked.push(answer.unwrap_or_else(|_| panic!("freeze {round} has left something locked")));
        if round.is_multiple_of(KILLED) {
            fs::write(group.join("cgroup.kill"), "1").expect("root may");
            drop(owner);
            fs::write(group.join("cgroup.freeze"), "0").expect("root may");
            owner = start(&bus, &group);
        } else {
            fs::write(group.join("cgroup.freeze"), "0").expect("root may");
        }
    }
    drop(owner);
    // The next owner has the card open until it ends; the next test would find the card busy.
    drop(told);
    next.join().expect("it only asks");
    spread("until it is frozen", frozen);
    spread("what the next owner asks then", asked);
    // Only an empty group can be removed, and it is empty once the kernel has reaped the dead.
    polled("an empty group", || fs::remove_dir(&group).ok());
}
