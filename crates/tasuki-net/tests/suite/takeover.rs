//! A driver is killed, at every step and at any time, under traffic. Its successor finds its position in ledger and
//! rings: no frame is lost, comes twice or comes as the dead driver had changed it.

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use tasuki_net::nic::bundle::{self, Fds, Text};
use tasuki_net::nic::bus::{Iova, VfioUser};
use tasuki_net::nic::{InPlace, NicMemory};
use tasuki_net::port::{Burst, Transactional};
use tasuki_shm::arena::Geometry;
use tasuki_shm::crash;

use crate::plugged::{self, Card, Wire, with_card};
use crate::process::{self, Other};

const RATE: u64 = 400_000;
const SLOTS: Geometry = Geometry { slot_len: 4096, count: 640 };
const RINGS_LEN: usize = 256 << 10;
const AT: Iova = Iova(1 << 32);

/// All that a process needs to drive the card.
struct DeviceBundle {
    text: Text,
    fds: Vec<OwnedFd>,
}

impl DeviceBundle {
    fn send(&self, socket: &UnixStream) {
        let text = serde_json::to_vec(&self.text).expect("plain data");
        let fds: Vec<_> = self.fds.iter().map(OwnedFd::as_fd).collect();
        process::say(socket, &text, &fds);
    }

    fn receive(socket: &UnixStream) -> (VfioUser, NicMemory) {
        let (bytes, fds) = process::hear(socket).expect("a bundle");
        let text: Text = serde_json::from_slice(&bytes).expect("the text of one");
        bundle::unpack(&text, Fds::new(fds)).expect("the card's connection and memory")
    }
}

/// Runs as the process to kill: sends frames back, turned round. It ends by itself only if something is wrong.
fn drive() -> ! {
    let mut socket = process::socket();
    let (bus, memory) = DeviceBundle::receive(&socket);
    let prepared = Card::prepare(bus, memory).expect("it is ready");
    socket.write_all(&[1]).expect("somebody waits for that");
    socket.read_exact(&mut [0]).expect("the one before is dead");
    turn_frames_round(Card::pick_up(prepared).expect("what the one before left"))
}

/// Sends back all frames that `nic` receives, turned round, until the process is killed.
pub fn turn_frames_round(mut nic: impl Transactional) -> ! {
    let mut burst = Burst::new();
    loop {
        let came = if burst.is_empty() { nic.receive(&mut burst).expect("the card works") } else { 0 };
        for frame in burst.iter_mut().take(came) {
            nic.save(frame);
            crash::point("nic.saved");
            let (to, rest) = frame.slot.bytes_mut().split_at_mut(6);
            assert_eq!(*to, [0xff; 6], "a frame that the one before had changed");
            to.swap_with_slice(&mut rest[..6]);
            crash::point("nic.changed");
        }
        nic.transmit(&mut burst).expect("the card works");
    }
}

/// The end of a driver: the crash point at which it kills itself and the pass, and the time after which it is killed.
pub type End = (Option<String>, Duration);

/// Returns the ends of drivers that are killed at any time.
pub fn at_any_time() -> impl Iterator<Item = End> {
    (0..150_u64).map(|i| (None, Duration::from_micros(i * i * 7919 % 3000)))
}

/// Returns the ends of drivers that are killed at every step, at these crash points besides those of all drivers.
/// Returns nothing, and says why, in a build without crash points.
pub fn at_every_step(more: &[&'static str]) -> Option<impl Iterator<Item = End>> {
    if !cfg!(feature = "crash-points") {
        println!(
            "skipped: the places where a driver is killed need the feature crash-points, as `cargo xtask test` has it"
        );
        return None;
    }
    let points = [crash::NIC_POINTS, more].concat();
    let passes = [1, 2, 3, 5, 8, 33, 34, 100];
    let at =
        passes.into_iter().flat_map(move |pass| points.clone().into_iter().map(move |point| format!("{point}:{pass}")));
    Some(at.map(|at| (Some(at), Duration::from_millis(200))))
}

/// A process that drives the card in its turn.
struct Driver(Other);

impl Driver {
    /// Starts a process that prepares for the takeover, so that it takes no time later. It kills itself at the crash
    /// point `crash`.
    fn ready(test: &str, bundle: &DeviceBundle, crash: Option<&str>) -> Driver {
        let mut other = Other::start(test, "driver", crash);
        bundle.send(&other.socket);
        other.socket.read_exact(&mut [0]).expect("it gets ready");
        Driver(other)
    }

    fn go(&mut self) {
        self.0.socket.write_all(&[1]).expect("it waits for that");
    }

    /// Kills the process if it has not killed itself within `patience`; returns whether it was killed, and did not
    /// fail.
    fn end(self, patience: Duration) -> bool {
        let (mut process, began) = (self.0.process, std::time::Instant::now());
        while began.elapsed() < patience && process.0.try_wait().expect("a child").is_none() {
            std::thread::yield_now();
        }
        process.was_killed()
    }
}

/// Starts the card with a driver that is gone at once; returns the bundle for the others.
fn start(socket: OwnedFd) -> DeviceBundle {
    let memory = NicMemory::create(SLOTS, RINGS_LEN, AT).expect("a little memory");
    let (parts, layout) = (memory.parts().expect("descriptors are free"), memory.layout());
    let nic = plugged::start(socket, memory, true);
    let (text, fds) = bundle::pack(nic.bus(), parts, &layout).expect("descriptors are free");
    DeviceBundle { text, fds }
}

/// Ends drivers one after the other, as `ends` says; the last one stays until all frames are back. Returns how many
/// were killed.
fn one_after_the_other(
    test: &str,
    bundle: &DeviceBundle,
    wire: &Wire,
    frames: u64,
    ends: impl Iterator<Item = End>,
) -> u32 {
    wire.begin();
    let mut ends = ends.peekable();
    let mut killed = 0;
    let next = |end: Option<&End>| Driver::ready(test, bundle, end.and_then(|end| end.0.as_deref()));
    let mut other = next(ends.peek());
    while let Some((_, patience)) = ends.next() {
        let spare = next(ends.peek());
        other.go();
        assert!(std::mem::replace(&mut other, spare).end(patience), "killed, not broken");
        killed += 1;
    }
    other.go();
    wire.await_back(frames);
    assert!(other.end(Duration::ZERO), "killed, not broken");
    killed
}

fn nothing_is_lost(test: &str, frames: u64, ends: impl Iterator<Item = End> + Send) {
    let (killed, counts, _) = with_card(RATE, frames, |socket, wire| {
        let bundle = start(socket);
        one_after_the_other(test, &bundle, wire, frames, ends)
    });
    let got = (counts.received, counts.duplicated, counts.reordered, counts.damaged);
    assert_eq!(got, (frames, 0, 0, 0), "after {killed} kills");
}

#[test]
fn killed_at_any_time() {
    if process::role().is_some() {
        drive();
    }
    nothing_is_lost("takeover::killed_at_any_time", 400_000, at_any_time());
}

#[test]
fn killed_at_every_step() {
    if process::role().is_some() {
        drive();
    }
    let Some(ends) = at_every_step(&[]) else { return };
    nothing_is_lost("takeover::killed_at_every_step", 300_000, ends);
}
