//! A driver of a virtio network device is killed, at every step and at any time, while the device goes on in any
//! order. Its successor finds its position in ledger and rings: no frame is lost, comes twice or comes as the dead
//! driver had changed it, and no slot leaks.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::rc::Rc;
use std::time::Instant;

use tasuki_net::nic::virtio_net::VirtioNet;
use tasuki_net::nic::{InPlace, MemoryLayout, Nic, NicMemory, NicOptions, Parts};
use tasuki_net::port::{Burst, Port, Transactional};

use crate::process::{self, Other};
use crate::stub::bus::{Answers, Stub};
use crate::stub::virtio::{MEMORY_AT, PLAIN, Play, RINGS_LEN, RX, SLOTS, TX, turned_round};
use crate::takeover::{End, at_any_time, at_every_step, turn_frames_round};
use tasuki_testing::PATIENCE;

const RING: u16 = 64;
/// Crash points of this driver, besides those of all drivers.
const POINTS: [&str; 4] = ["virtio.adopting", "virtio.taken", "virtio.posting", "virtio.posted"];

/// A device that answers nothing: a successor must not ask it.
struct Mute;

impl Answers for Mute {
    fn config(&self, _: u16) -> u32 {
        0
    }
    fn read(&self, _: u32) -> u32 {
        0
    }
    fn write(&self, _: u32, _: u32) {}
}

fn prepare([rings, frames, ledger]: [OwnedFd; 3]) -> NicMemory {
    let layout = MemoryLayout { rings_at: MEMORY_AT, rings_len: RINGS_LEN, slots: SLOTS };
    NicMemory::prepare(Parts { rings, frames, ledger }, &layout).expect("the device's memory")
}

/// Runs as the process to kill, whose role is the paths of the memory: sends frames back, turned round. It ends by
/// itself only if something is wrong.
fn drive(memory: &str) -> ! {
    let mut socket = process::socket();
    let open = |path| OwnedFd::from(File::options().read(true).write(true).open(path).expect("the test has it"));
    let fds: Vec<_> = memory.split(' ').map(open).collect();
    let memory = prepare(fds.try_into().expect("three"));
    let mut prepared = VirtioNet::prepare(Stub(Rc::new(Mute)), memory).expect("it is ready");
    VirtioNet::rehearse(&mut prepared);
    socket.write_all(&[1]).expect("somebody waits for that");
    socket.read_exact(&mut [0]).expect("the one before is dead");
    VirtioNet::settle(&prepared).expect("the device works");
    turn_frames_round(VirtioNet::pick_up(prepared).expect("what the one before left"))
}

/// The device under traffic, with the numbers of frames delivered and of frames returned.
struct Traffic {
    play: Play,
    delivered: u64,
    back: u64,
}

impl Traffic {
    /// Does some of the device's work.
    fn go_on(&mut self, deliver: bool) {
        for _ in 0..if deliver { self.play.random(20) } else { 0 } {
            if !self.play.deliver(self.delivered) {
                break;
            }
            self.delivered += 1;
        }
        for frame in self.play.send() {
            assert_eq!(turned_round(frame), Some(self.back), "each frame comes back, once and in order");
            self.back += 1;
        }
    }
}

fn nothing_is_lost(test: &str, ends: impl Iterator<Item = End>) {
    let (play, memory) = Play::new(PLAIN);
    let parts = memory.parts().expect("descriptors are free");
    let fds = [&parts.rings, &parts.frames, &parts.ledger];
    let paths = fds.map(|fd| format!("/proc/{}/fd/{}", std::process::id(), fd.as_raw_fd())).join(" ");
    let options = NicOptions { ring: RING, ..NicOptions::default() };
    // The first driver is gone at once.
    drop(VirtioNet::start(play.bus(), memory, &options).expect("the device starts"));
    let mut traffic = Traffic { play, delivered: 0, back: 0 };
    let mut ends = ends.peekable();
    let next = |end: Option<&End>| Other::start(test, &paths, end.and_then(|end| end.0.as_deref()));
    let go = |other: &mut Other| {
        other.socket.read_exact(&mut [0]).expect("it gets ready");
        other.socket.write_all(&[1]).expect("it waits for that");
    };
    let mut other = next(ends.peek());
    let mut killed = 0;
    while let Some((_, patience)) = ends.next() {
        let spare = next(ends.peek());
        go(&mut other);
        let began = Instant::now();
        while began.elapsed() < patience && other.process.0.try_wait().expect("a child").is_none() {
            traffic.go_on(true);
        }
        assert!(std::mem::replace(&mut other, spare).process.was_killed(), "killed, not broken");
        // Between two drivers the device goes on.
        traffic.go_on(true);
        killed += 1;
    }
    go(&mut other);
    let began = Instant::now();
    while traffic.back < traffic.delivered || traffic.delivered < 1000 {
        traffic.go_on(traffic.delivered < 1000);
        assert!(began.elapsed() < PATIENCE, "{} of {} frames came back", traffic.back, traffic.delivered);
    }
    assert!(other.process.was_killed(), "killed, not broken");
    println!("{killed} killed, {} frames", traffic.back);
    // Check the state that the last driver left: no slot has leaked.
    let memory = prepare(fds.map(|fd| fd.try_clone().expect("a descriptor is free")));
    let arena = memory.arena().clone();
    let prepared = VirtioNet::prepare(traffic.play.bus(), memory).expect("it is ready");
    let mut nic = VirtioNet::pick_up(prepared).expect("what the last one left");
    while !traffic.play.chains(TX).is_empty() {
        traffic.go_on(false);
    }
    // The driver reaps the sent frames, and fills the receive ring.
    for _ in 0..2 {
        nic.transmit(&mut Burst::new()).expect("the device works");
        assert_eq!(nic.receive(&mut Burst::new()).expect("the device works"), 0);
    }
    assert_eq!(traffic.play.chains(RX).len(), usize::from(RING / 2));
    let census = arena.census();
    assert_eq!((census.owner, census.peer, census.free), (0, 32, SLOTS.count - 32));
    assert_eq!(nic.given(), traffic.back);
}

#[test]
fn killed_at_any_time() {
    if let Some(memory) = process::role() {
        drive(&memory);
    }
    nothing_is_lost("takeover_virtio::killed_at_any_time", at_any_time());
}

#[test]
fn killed_at_every_step() {
    if let Some(memory) = process::role() {
        drive(&memory);
    }
    let Some(ends) = at_every_step(&POINTS) else { return };
    nothing_is_lost("takeover_virtio::killed_at_every_step", ends);
}
