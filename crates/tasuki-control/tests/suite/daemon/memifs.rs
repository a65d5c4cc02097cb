//! A program with a memif on a VNI: its workers and the daemon are replaced and killed, and it notices nothing.
//! Needs root.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use client::{Client, Shape};
use rustix::event::{PollFd, PollFlags, Timespec};
use tasuki_testing::process::descriptors;

use super::natives::dying_at;
use super::rig::{pid, until};
use super::rooms::{BURST, deaths};
use super::storm::beside;
use super::vnis::World;

/// A client written from the text of the protocol.
#[path = "../../../../tasuki-net/tests/suite/memif/client.rs"]
#[allow(dead_code, reason = "another suite uses the rest of it")]
pub mod client;

pub const SECRET: &str = "quiesce";

/// The program, and the node that sends all its frames back.
const US: [u8; 6] = [2, 0, 0, 0, 0, 0x77];
pub const ECHO: [u8; 6] = [2, 0, 0, 0, 0, 0x99];

/// A long frame takes seven buffers.
const SHAPE: Shape = Shape { log2: 10, buffer: 600 };

/// Number of frames under way: less than everything between the two has room for, even if a burst comes twice.
pub const WINDOW: u64 = 16;

/// Longest time for all frames under way to come back.
const LIMIT: Duration = Duration::from_secs(20);

/// Makes a frame that carries its number; its length follows from the number.
pub fn frame(to: [u8; 6], from: [u8; 6], number: u64) -> Vec<u8> {
    let len = [60, 100, 700, 1514, 4000][usize::try_from(number % 5).expect("small")];
    let mut frame = [&to[..], &from, &[0x88, 0xb5], &number.to_le_bytes()].concat();
    frame.extend((22..len).map(|i: u64| i.wrapping_mul(37).wrapping_add(number).to_le_bytes()[0]));
    frame
}

/// Counts of the frames that a program sent.
#[derive(Debug, Default)]
pub struct Tally {
    pub sent: u64,
    /// All frames before this number came back.
    pub back: u64,
    pub twice: u64,
}

/// A program that sends numbered frames, and reads returning ones only when its bell rings.
pub struct Program {
    over: Arc<AtomicBool>,
    back: Arc<AtomicU64>,
    thread: JoinHandle<Tally>,
}

impl Program {
    fn begin(socket: &Path) -> Self {
        Self::resting(socket, Duration::ZERO)
    }

    /// Like [`begin`](Self::begin), with a rest after each window.
    pub fn resting(socket: &Path, rest: Duration) -> Self {
        let client = Client::connect(socket, SHAPE, SECRET, || {});
        Self::of(move |over, back| exchange(client, rest, over, back))
    }

    /// Begins another exchange, which ends once it is over and all its frames are back, and counts these meanwhile.
    pub fn of(exchange: impl FnOnce(&AtomicBool, &AtomicU64) -> Tally + Send + 'static) -> Self {
        let (over, back) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (ends, counts) = (Arc::clone(&over), Arc::clone(&back));
        let thread = std::thread::spawn(move || exchange(&ends, &counts));
        Program { over, back, thread }
    }

    /// Returns the number of frames that have come back.
    pub fn back(&self) -> u64 {
        self.back.load(Relaxed)
    }

    /// Waits until `more` frames have come back.
    fn goes_on(&self, world: &World, more: u64) {
        let before = self.back.load(Relaxed);
        until(&world.rig, "frames come back", || {
            assert!(!self.thread.is_finished(), "the program has failed\n{}", world.rig.log());
            self.back.load(Relaxed) >= before + more
        });
    }

    fn end(self) -> Tally {
        self.over.store(true, Relaxed);
        self.thread.join().expect("what it saw is right")
    }

    /// Returns whether something that it saw was not right.
    pub fn has_failed(&self) -> bool {
        self.thread.is_finished()
    }

    /// Ends it. If not all frames come back, or something that it saw was not right, the error says so.
    pub fn ends(self) -> Result<Tally, String> {
        self.over.store(true, Relaxed);
        let limit = Instant::now() + LIMIT;
        while !self.thread.is_finished() {
            if Instant::now() > limit {
                return Err(format!("not all came back in {LIMIT:?}; {} did", self.back.load(Relaxed)));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        self.thread.join().map_err(|_| "it saw something that is not right; its message is above".to_owned())
    }
}

fn exchange(mut client: Client, rest: Duration, over: &AtomicBool, back: &AtomicU64) -> Tally {
    let mut tally = Tally::default();
    loop {
        let ends = over.load(Relaxed);
        if tally.back == tally.sent && !rest.is_zero() {
            std::thread::sleep(rest);
        }
        if ends && tally.back == tally.sent {
            return tally;
        }
        while !ends && tally.sent < tally.back + WINDOW && client.send(&frame(ECHO, US, tally.sent)) {
            tally.sent += 1;
        }
        let mut polled = [PollFd::new(&client.bells[1], PollFlags::IN)];
        let soon = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
        let _ = rustix::event::poll(&mut polled, Some(&soon));
        assert!(!client.channel.is_closed(), "the socket was closed");
        assert!(client.channel.hear().is_none(), "it was told something");
        if !client.was_rung() {
            continue;
        }
        // Others on the VNI may send to all, or to a station that the VNI does not know.
        for came in client.receive().into_iter().filter(|came| came.starts_with(&US)) {
            let number = u64::from_le_bytes(came[14..22].try_into().expect("8 bytes"));
            assert!(came == frame(US, ECHO, number), "frame {number} is not what it was");
            assert!(number <= tally.back, "frame {number} came where {} is due", tally.back);
            tally.twice += u64::from(number < tally.back);
            tally.back = tally.back.max(number + 1);
        }
        back.store(tally.back, Relaxed);
    }
}

/// Adds a program's node, and a node that sends all its frames back.
pub fn with_echo(world: Option<World>) -> Option<(World, PathBuf)> {
    let world = world?;
    let socket = world.rig.path("client.sock");
    world.rig.ask(&["node", "add", "echo", "--native", "--work", "echo", "--mac", "02:00:00:00:00:99"]);
    let shown = socket.to_str().expect("text");
    let secret = world.secret(SECRET);
    world.rig.ask(&["node", "add", "web", "--memif", shown, "--secret-file", &secret, "--mac", "02:00:00:00:00:77"]);
    world.rig.await_pair("echo");
    world.rig.await_pair("web");
    Some((world, socket))
}

#[test]
fn a_client_of_memif_loses_nothing_and_gets_nothing_twice_while_workers_and_daemon_are_replaced() {
    let Some((mut world, socket)) = with_echo(World::new()) else { return };
    // One is sent away, and its user may not be told.
    let stranger = client::Channel::connect(&socket);
    stranger.send(&client::init(0x200, 0, 0, "guessed"), &[]);
    let why = "a client of memif was sent away: the secret is wrong";
    world.rig.await_event(why);
    assert!(world.rig.ask(&["status"]).contains(why));
    let program = Program::begin(&socket);
    program.goes_on(&world, 500);
    until(&world.rig, "the daemon hears of it", || {
        let said = world.rig.ask(&["status"]);
        !said.contains(why) && said.contains("client.sock on VNI lan, connected")
    });
    let had = |world: &World| {
        let (driver, standby) = world.rig.await_pair_of_one_program("web");
        [pid(&driver), pid(&standby), world.rig.daemon_pid()].map(descriptors)
    };
    // A stand-by of before the client may not have heard of it yet; a fresh one has, or it does not stand by.
    world.rig.ask(&["worker", "upgrade", "web"]);
    program.goes_on(&world, 200);
    let before = had(&world);
    for node in ["echo", "web", "web"] {
        world.rig.ask(&["worker", "upgrade", node]);
        program.goes_on(&world, 200);
        world.rig.await_pair(node);
    }
    until(&world.rig, "nobody has more than before", || {
        had(&world).iter().zip(before).all(|(now, before)| *now <= before)
    });
    // The driver goes on, and reports the client to the next daemon.
    world.rig.kill_daemon();
    program.goes_on(&world, 200);
    world.rig.start();
    world.rig.await_pair("web");
    program.goes_on(&world, 200);
    for _ in 0..2 {
        world.rig.ask(&["worker", "upgrade", "web"]);
        program.goes_on(&world, 200);
        world.rig.await_pair("web");
    }
    let tally = program.end();
    println!("{tally:?}");
    assert_eq!((tally.back, tally.twice), (tally.sent, 0), "{tally:?}\n{}", world.rig.log());
    // The program has left, and the next one is served.
    let program = Program::begin(&socket);
    program.goes_on(&world, 200);
    world.rig.ask(&["worker", "upgrade", "web"]);
    program.goes_on(&world, 200);
    program.end();
    world.end();
}

#[test]
fn a_socket_that_is_deleted_is_there_again_for_the_next_client_whoever_dies_or_waits_meanwhile() {
    let Some((mut world, socket)) = with_echo(World::new()) else { return };
    let folder = world.rig.path("room");
    let aside = world.rig.path("aside");
    std::fs::create_dir(&folder).expect("a folder");
    world.rig.ask(&["node", "add", "yard", "--memif", folder.join("yard.sock").to_str().expect("text")]);
    world.rig.await_pair("yard");
    // Its folder goes, and comes back as it was.
    let is_lost = |world: &World| world.rig.ask(&["status"]).contains("and it cannot be made again");
    std::fs::rename(&folder, &aside).expect("a folder");
    until(&world.rig, "it is said", || is_lost(&world));
    world.rig.kill_daemon();
    world.rig.start();
    until(&world.rig, "it is said", || is_lost(&world));
    std::fs::rename(&aside, &folder).expect("a folder");
    until(&world.rig, "it is well", || !is_lost(&world));
    world.rig.ask(&["worker", "upgrade", "yard"]);
    let anew = |world: &World| world.rig.ask(&["events"]).matches("was deleted, and is there anew").count();
    assert_eq!(anew(&world), 0, "it is the same");
    let serves = |world: &World| {
        let program = Program::begin(&socket);
        program.goes_on(world, 100);
        program.end();
    };
    // A worker that was staged has the one that is deleted.
    world.rig.ask(&["worker", "stage", "web"]);
    for round in 1..4 {
        std::fs::remove_file(&socket).expect("it is there");
        if round > 1 {
            world.rig.kill_daemon();
            world.rig.start();
        }
        until(&world.rig, "it is there", || anew(&world) == round);
        if round == 3 {
            // The fresh worker of the one that is killed now may have the new one already.
            world.rig.kill_daemon();
            world.rig.start();
        }
        serves(&world);
        world.rig.await_pair("web");
    }
    serves(&world);
    let said = world.rig.ask(&["status"]);
    assert!(!said.contains("was deleted"), "{said}");
    world.end();
}

#[test]
fn a_client_of_memif_outlives_workers_that_are_killed() {
    let Some((mut world, socket)) = with_echo(World::new()) else { return };
    let program = Program::begin(&socket);
    for _ in 0..6 {
        program.goes_on(&world, 300);
        world.rig.kill_driver("web");
    }
    program.goes_on(&world, 300);
    // The next daemon and the stand-by both learn of a client that connects while there is no daemon.
    world.rig.kill_daemon();
    let tally = program.end();
    println!("{tally:?} with {} deaths", deaths(&world.rig));
    assert_eq!(tally.back, tally.sent, "{tally:?}");
    assert!(tally.twice <= 2 * BURST * 6, "{tally:?}");
    let program = Program::begin(&socket);
    program.goes_on(&world, 100);
    world.rig.start();
    world.rig.await_pair("web");
    world.rig.kill_driver("web");
    program.goes_on(&world, 300);
    // Kill both at once: a fresh worker gets the descriptors that the daemon kept.
    let (driver, standby) = world.rig.await_pair("web");
    [&standby, &driver].into_iter().for_each(|worker| world.rig.kill(worker));
    program.goes_on(&world, 300);
    let tally = program.end();
    assert_eq!(tally.back, tally.sent, "{tally:?}");
    world.end();
}

/// Places where a worker that serves a client is killed, and at which pass.
const PLACES: &[(&str, u32)] = &[
    ("memif.held", 3),
    ("memif.held", 40),
    ("memif.filled", 7),
    ("memif.shown", 11),
    ("memif.ringing", 5),
    ("memif.sent", 6),
    ("memif.noted", 9),
    ("memif.read", 12),
    ("memif.read", 15),
    ("vni.retiring", 8),
    ("vni.publishing", 4),
];

#[test]
fn wherever_a_worker_is_killed_its_client_of_memif_loses_nothing() {
    if !cfg!(feature = "crash-points") {
        return println!("skipped: needs the feature crash-points");
    }
    let Some((world, socket)) = with_echo(World::of_scripts()) else { return };
    let worker = beside("tasuki-worker").expect("looked for before").display().to_string();
    let program = Program::begin(&socket);
    program.goes_on(&world, 100);
    let mut killed = 0;
    for (place, nth) in PLACES {
        let with = dying_at(&world.rig, place, *nth, &worker);
        // The worker may die before it reports that it drives.
        let _ = world.rig.tasuki(&["worker", "upgrade", "web", "--with", &with]);
        killed += 1;
        until(&world.rig, "it dies", || deaths(&world.rig) >= killed);
        until(&world.rig, "a worker that lives drives", || {
            world.rig.tasuki(&["worker", "upgrade", "web", "--with", &worker]).status.success()
        });
        killed = deaths(&world.rig);
        world.rig.await_pair("web");
        program.goes_on(&world, 100);
    }
    let tally = program.end();
    println!("{tally:?} with {killed} deaths");
    assert_eq!(tally.back, tally.sent, "{tally:?}\n{}", world.rig.log());
    assert!(tally.twice <= 2 * BURST * killed, "{tally:?}");
    world.end();
}
