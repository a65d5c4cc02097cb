//! A card behind VFIO that goes from process to process by `repoint`. Each process maps memory of its own with the
//! descriptors passed to it, and makes the kernel forget its predecessor's mapping, whether the predecessor lives or
//! not.
//!
//! The test plays the daemon: it opens the card, holds the descriptors, controls whose turn it is, and is at the
//! other end of the wire. The driving process sends all frames back, so the wire shows which were lost, came twice
//! or out of order.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit};
use rustix::thread::CapabilitySet;
use tasuki_net::nic::bundle::{BundleBus, Fds};
use tasuki_net::nic::bus::{Bus, BusError, Vfio};
use tasuki_net::nic::e1000e::{E1000e, Ready};
use tasuki_net::nic::{How, InPlace, Left, Link, Nic, NicMemory, NicOptions, Parts, Repoint};
use tasuki_net::port::{Armed, Burst, Port};
use tasuki_shm::arena::Geometry;
use tasuki_shm::region::Region;

use super::behind_vfio::{BehindVfio, calm};
use super::conformance::World;
use super::conformance::frames::{SHORTEST, assert_same, frame};
use super::process::{self, Other, hear, say};
use super::wait::{any_readable, readable};
use tasuki_testing::{PATIENCE, polled};

type Card = E1000e<Vfio>;
type Behind = BehindVfio<Card>;

/// Number of handovers in the test of many.
const TURNS: u64 = 24;
/// Number of frames between two handovers.
const BETWEEN: u32 = 100;

fn options() -> NicOptions {
    NicOptions { ring: 64, ..NicOptions::default() }
}

/// Makes the memory of an owner; each owner has addresses of its own.
fn memory(owner: u64) -> NicMemory {
    let slots = Geometry { slot_len: 4096, count: 256 };
    NicMemory::create(slots, 256 << 10, Behind::MEMORY_AT + (owner << 30)).expect("a little memory")
}

/// Sends received frames back; returns whether there were any.
fn echo(nic: &mut Card) -> bool {
    let mut burst = Burst::new();
    let came = nic.receive(&mut burst).expect("the card works");
    let began = Instant::now();
    while !burst.is_empty() {
        nic.transmit(&mut burst).expect("the card works");
        assert!(began.elapsed() < PATIENCE, "the card sends nothing");
    }
    came > 0
}

/// Goes on until nothing is left to do, and stops the card.
fn stop(nic: &mut Card) {
    nic.quiesce(How::Point, |_| ());
    polled("the card stops", || (!echo(nic) && nic.is_quiet() && nic.leave().expect("the card works")).then_some(()));
}

/// State of an owner in a process of its own.
enum Owner {
    Idle(Vfio),
    Ready(Ready<Vfio>),
    Driving(Card),
    Stopped(Card),
    Nobody,
}

impl Owner {
    /// Carries out an order; returns its result, and its memory's descriptors where that is new.
    fn obey(&mut self, words: &str) -> Result<Vec<OwnedFd>, String> {
        let (verb, number) = words.split_once(' ').unwrap_or((words, "0"));
        let number = number.parse().expect("the number of an owner");
        *self = match (verb, std::mem::replace(self, Owner::Nobody)) {
            ("prepare", Owner::Idle(bus)) => {
                let memory = memory(number);
                let Parts { rings, frames, ledger } = memory.parts().expect("descriptors are free");
                match Card::prepare_rings(bus, memory, &options(), How::Point, Behind::MEMORY_AT) {
                    Ok(ready) => {
                        *self = Owner::Ready(ready);
                        return Ok(vec![rings, frames, ledger]);
                    }
                    Err(failed) => {
                        *self = Owner::Idle(failed.bus);
                        return Err(failed.error.to_string());
                    }
                }
            }
            ("take", Owner::Ready(ready)) => {
                Owner::Driving(Card::repoint(ready, Left::STOPPED).map_err(|failed| failed.to_string())?)
            }
            ("stop", Owner::Driving(mut nic)) => {
                stop(&mut nic);
                Owner::Stopped(nic)
            }
            ("resume", Owner::Stopped(mut nic)) => {
                nic.go_back().map_err(|error| error.to_string())?;
                Owner::Driving(nic)
            }
            ("forget", Owner::Driving(mut nic)) => {
                let forgotten = nic.forget(&memory(number).layout(), |_| ());
                *self = Owner::Driving(nic);
                return forgotten.map(|()| Vec::new()).map_err(|error| error.to_string());
            }
            ("leave", Owner::Stopped(nic)) => Owner::Idle(nic.stand_down().0),
            ("park", Owner::Driving(nic)) => Owner::Idle(nic.park().map_err(|failed| failed.to_string())?.0),
            ("economise", owner) => {
                become_poor();
                owner
            }
            (verb, _) => return Err(format!("this is not the time to {verb}")),
        };
        Ok(Vec::new())
    }
}

/// Lowers this process's limit of locked memory to next to nothing, as for a worker confined with too low a limit.
fn become_poor() {
    let small = Rlimit { current: Some(64 << 10), maximum: Some(64 << 10) };
    rustix::process::setrlimit(Resource::Memlock, small).expect("less may always be had");
    let mut sets = rustix::thread::capabilities(None).expect("this thread");
    sets.effective.remove(CapabilitySet::IPC_LOCK);
    rustix::thread::set_capabilities(None, sets).expect("less may always be had");
}

/// Receives this process's bus to the card; returns it with the socket to the process that started this one.
pub fn unpack() -> (UnixStream, Vfio) {
    let socket = process::socket();
    let (text, fds) = hear(&socket).expect("a way to the card");
    let text = serde_json::from_slice(&text).expect("the text of a bus");
    let bus = Vfio::unpack(&text, &mut Fds::new(fds)).expect("the descriptors of a card");
    (socket, bus)
}

/// Starts a process with the same access to the card as `bus`.
pub fn start(test: &str, bus: &Vfio) -> Other {
    let other = Other::start(test, "owner", None);
    let (text, fds) = bus.pack().expect("descriptors are free");
    let text = serde_json::to_vec(&text).expect("text");
    say(&other.socket, &text, &fds.iter().map(AsFd::as_fd).collect::<Vec<_>>());
    other
}

/// Plays another process: receives its bus to the card, and then carries out orders.
fn other_process() {
    let (socket, bus) = unpack();
    let mut owner = Owner::Idle(bus);
    loop {
        match &mut owner {
            Owner::Driving(nic) => {
                if !echo(nic) && nic.arm().expect("the card works") == Armed::Idle {
                    any_readable(&[nic.fd(), socket.as_fd()], PATIENCE);
                }
            }
            _ => _ = readable(&socket, PATIENCE),
        }
        if !readable(&socket, Duration::ZERO) {
            continue;
        }
        let Some((words, _)) = hear(&socket) else { return };
        match owner.obey(str::from_utf8(&words).expect("an order")) {
            Ok(fds) => say(&socket, b"done", &fds.iter().map(AsFd::as_fd).collect::<Vec<_>>()),
            Err(sentence) => say(&socket, sentence.as_bytes(), &[]),
        }
    }
}

fn numbered(number: u32) -> Vec<u8> {
    frame(Behind::MAC, number, SHORTEST + number as usize % 1000)
}

/// Numbered frames that are sent as long as it lives, and the ones that came back.
struct Stream<'a> {
    world: &'a Behind,
    stop: Arc<AtomicBool>,
    sender: Option<JoinHandle<()>>,
    sent: Arc<AtomicU32>,
    back: u32,
}

impl<'a> Stream<'a> {
    fn over(world: &'a Behind) -> Self {
        let mut stream = Stream { world, stop: Arc::default(), sender: None, sent: Arc::default(), back: 0 };
        stream.begin();
        stream
    }

    fn begin(&mut self) {
        let (send, sent) = (self.world.sender(), Arc::clone(&self.sent));
        self.stop = Arc::default();
        let stop = Arc::clone(&self.stop);
        self.sender = Some(std::thread::spawn(move || {
            while !stop.load(Relaxed) {
                send(&numbered(sent.load(Relaxed)));
                sent.fetch_add(1, Relaxed);
            }
        }));
    }

    fn take(&mut self, limit: Duration) {
        if let Some(came) = self.world.take(limit) {
            assert_same(&[came], &[numbered(self.back)]);
            self.back += 1;
        }
    }

    /// Waits until some frames have come back that are not sent yet.
    fn flow(&mut self) {
        let wanted = self.sent.load(Relaxed) + BETWEEN;
        polled("frames come back", || {
            self.take(Duration::from_millis(1));
            (self.back >= wanted).then_some(())
        });
    }

    /// Stops sending, and waits until all sent frames have come back.
    fn end(&mut self) {
        self.stop.store(true, Relaxed);
        if let Some(sender) = self.sender.take() {
            polled("the sender ends", || {
                self.take(Duration::from_millis(1));
                sender.is_finished().then_some(())
            });
            sender.join().expect("the sender sends");
        }
        polled("the last frame comes back", || {
            self.take(Duration::from_millis(1));
            (self.back == self.sent.load(Relaxed)).then_some(())
        });
        assert_eq!(self.world.take(Duration::ZERO), None, "and none twice");
    }

    /// Gives a process an order, while frames flow; returns its answer.
    fn ask(&mut self, process: &Other, words: &str) -> Result<Vec<OwnedFd>, String> {
        say(&process.socket, words.as_bytes(), &[]);
        polled(words, || {
            self.take(Duration::from_millis(1));
            readable(&process.socket, Duration::ZERO).then_some(())
        });
        let (answer, fds) = hear(&process.socket).expect("the process lives");
        if answer == b"done" { Ok(fds) } else { Err(String::from_utf8(answer).expect("a sentence")) }
    }

    fn tell(&mut self, process: &Other, words: &str) -> Vec<OwnedFd> {
        self.ask(process, words).unwrap_or_else(|sentence| panic!("{words}: {sentence}"))
    }
}

impl Drop for Stream<'_> {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
    }
}

/// The daemon's part: a bus to the card.
struct Daemon {
    test: &'static str,
    bus: Vfio,
}

impl Daemon {
    fn start(&self) -> Other {
        start(self.test, &self.bus)
    }

    /// Returns whether the card reaches nothing at the first address of this owner's memory.
    fn is_free(&mut self, owner: u64) -> bool {
        let (page, at) = (super::region(1), memory(owner).layout().rings_at);
        match self.bus.map_dma(&page, at) {
            Ok(()) => {
                self.bus.unmap_dma(at, page.len()).expect("it was mapped");
                true
            }
            Err(BusError::Dma { why, .. }) => {
                assert_eq!(why, "the device has memory there already; unmap it, or choose another address");
                false
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// Starts a card and makes a process take it as owner number 1. Then calls `act` while frames flow; `act` returns
/// the final driver. In the other process, plays that process's part instead.
fn play(test: &'static str, act: impl FnOnce(&mut Daemon, &mut Stream<'_>, Other) -> Other) {
    if process::role().is_some() {
        return other_process();
    }
    let first = memory(0);
    let Some(world) = Behind::new(&first) else { return };
    let mut nic = Card::start(world.bus(), first, &options()).expect("the card starts");
    polled("the link", || (nic.link().expect("it is there") != Link::Down).then_some(()));
    let bus = Vfio::from_twin(nic.bus().twin().expect("descriptors are free")).expect("the same card");
    let mut daemon = Daemon { test, bus };
    let mut stream = Stream::over(&world);
    let process = daemon.start();
    say(&process.socket, b"prepare 1", &[]);
    while !readable(&process.socket, Duration::ZERO) {
        echo(&mut nic);
    }
    assert_eq!(hear(&process.socket).expect("it lives").0, b"done");
    stop(&mut nic);
    stream.tell(&process, "take");
    drop(nic.stand_down());
    stream.tell(&process, "forget 0");
    assert!(daemon.is_free(0), "the first memory was forgotten by who did not map it");
    stream.flow();
    let last = act(&mut daemon, &mut stream, process);
    stream.end();
    calm();
    drop(last);
}

#[test]
fn two_processes_take_turns_with_memory_of_their_own_and_lose_nothing() {
    play("repoint::two_processes_take_turns_with_memory_of_their_own_and_lose_nothing", |daemon, stream, process| {
        let mut giver = process;
        let mut taker = daemon.start();
        for turn in 0..TURNS {
            // Each owner has its own addresses, and new memory there each time.
            let (old, new) = (1 + turn % 2, 1 + (turn + 1) % 2);
            stream.tell(&taker, &format!("prepare {new}"));
            stream.flow();
            stream.tell(&giver, "stop");
            stream.tell(&taker, "take");
            assert!(!daemon.is_free(old), "as long as nobody has it forgotten");
            // Another process forgets the mapping of the giver, which lives.
            stream.tell(&taker, &format!("forget {old}"));
            assert!(daemon.is_free(old));
            let refused = stream.ask(&taker, &format!("forget {old}")).expect_err("it is forgotten");
            assert!(refused.contains("nothing is mapped there"), "{refused}");
            stream.tell(&giver, "leave");
            stream.flow();
            std::mem::swap(&mut giver, &mut taker);
        }
        stream.tell(&giver, "stop");
        stream.tell(&giver, "resume");
        stream.flow();
        giver
    });
}

#[test]
fn a_taker_that_is_killed_when_it_is_ready_is_in_nobodys_way() {
    play("repoint::a_taker_that_is_killed_when_it_is_ready_is_in_nobodys_way", |daemon, stream, giver| {
        for _ in 0..3 {
            let taker = daemon.start();
            stream.tell(&taker, "prepare 2");
            drop(taker);
            assert!(
                !daemon.is_free(2),
                "what a dead process has mapped stays mapped, as long as the container is open"
            );
            stream.flow();
        }
        // The next taker at these addresses makes the kernel forget that mapping, too.
        let taker = daemon.start();
        stream.tell(&taker, "prepare 2");
        stream.tell(&giver, "stop");
        stream.tell(&taker, "take");
        stream.tell(&taker, "forget 1");
        stream.flow();
        taker
    });
}

#[test]
fn a_giver_that_is_killed_when_it_has_stopped_leaves_its_memory_to_be_forgotten() {
    play(
        "repoint::a_giver_that_is_killed_when_it_has_stopped_leaves_its_memory_to_be_forgotten",
        |daemon, stream, giver| {
            let taker = daemon.start();
            // The daemon has these descriptors, whatever becomes of the worker.
            let old = stream.tell(&taker, "prepare 2");
            stream.tell(&giver, "stop");
            stream.tell(&taker, "take");
            stream.tell(&giver, "leave");
            stream.flow();
            let next = daemon.start();
            stream.tell(&next, "prepare 3");
            stream.tell(&taker, "stop");
            drop(taker);
            stream.tell(&next, "take");
            assert!(!daemon.is_free(2), "its memory is there still, and the card could reach it");
            stream.flow();
            stream.end();
            stream.tell(&next, "park");
            // The card itself shows whether it reaches that memory.
            let registers = daemon.bus.registers(0).expect("BAR 0");
            let rings = Region::adopt(old.into_iter().next().expect("rings")).expect("the memory of rings");
            let at = memory(2).layout().rings_at;
            assert!(super::transmits(&registers, &rings, at), "the dead one's memory");
            memory(2).unmap(&mut daemon.bus).expect("another process mapped it, which is dead");
            assert!(!super::transmits(&registers, &rings, at), "it is out of the card's reach");
            let anew = memory(2);
            anew.map(&mut daemon.bus).expect("nothing is there");
            assert!(super::transmits(&registers, anew.rings(), at), "other memory, by the same addresses");
            anew.unmap(&mut daemon.bus).expect("it was mapped");
            next
        },
    );
}

#[test]
fn a_giver_takes_its_card_back_from_a_taker_that_was_killed() {
    play("repoint::a_giver_takes_its_card_back_from_a_taker_that_was_killed", |daemon, stream, giver| {
        for _ in 0..3 {
            let taker = daemon.start();
            stream.tell(&taker, "prepare 2");
            // A taker's death would lose the frames it has received.
            stream.end();
            stream.tell(&giver, "stop");
            stream.tell(&taker, "take");
            drop(taker);
            stream.tell(&giver, "resume");
            stream.begin();
            stream.flow();
        }
        giver
    });
}

#[test]
fn a_taker_that_may_not_lock_its_memory_says_so_and_the_giver_drives_on() {
    play("repoint::a_taker_that_may_not_lock_its_memory_says_so_and_the_giver_drives_on", |daemon, stream, giver| {
        let taker = daemon.start();
        stream.tell(&taker, "economise");
        let refused = stream.ask(&taker, "prepare 2").expect_err("it may lock 64 KiB");
        let layout = memory(2).layout();
        let sentence = BusError::Memlock { need: layout.rings_len as u64, limit: 64 << 10 }.to_string();
        assert_eq!(refused, sentence);
        assert!(daemon.is_free(2), "nothing is left of it");
        stream.flow();
        stream.tell(&giver, "stop");
        stream.tell(&giver, "resume");
        stream.flow();
        giver
    });
}
