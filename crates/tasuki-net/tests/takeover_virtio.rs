//! A driver of a virtio network device is killed, at every step and at any time, while the device goes on in any
//! order. Its successor finds its position in ledger and rings: no frame is lost, comes twice or comes as the dead
//! driver had changed it, and no slot leaks.
#![allow(clippy::tests_outside_test_module, reason = "an integration test")]

#[path = "stub/bus.rs"]
mod bus;
#[path = "stub/virtio.rs"]
mod virtio;

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::rc::Rc;
use std::time::{Duration, Instant};

use bus::{Answers, Stub};
use tasuki_net::nic::virtio_net::VirtioNet;
use tasuki_net::nic::{InPlace, MemoryLayout, Nic, NicMemory, NicOptions, Parts};
use tasuki_net::port::{Burst, Port, Transactional};
use tasuki_shm::crash;
use virtio::{MEMORY_AT, PLAIN, Play, RINGS_LEN, RX, SLOTS, turned_round};

/// Set in the process to kill: paths of the memory.
const MEMORY: &str = "TASUKI_TAKEOVER_VIRTIO";
const RING: u16 = 64;
const SIGKILL: i32 = 9;
/// Crash points of this driver, besides those of all drivers.
const POINTS: [&str; 4] = ["virtio.adopting", "virtio.taken", "virtio.posting", "virtio.posted"];
/// Longest wait for anything.
const PATIENCE: Duration = Duration::from_secs(60);

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

/// Runs as the process to kill: sends frames back, turned round. It ends by itself only if something is wrong.
fn drive(memory: &str) -> ! {
    let mut socket = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned().expect("a descriptor is free"));
    let open = |path| OwnedFd::from(File::options().read(true).write(true).open(path).expect("the test has it"));
    let fds: Vec<_> = memory.split(' ').map(open).collect();
    let memory = prepare(fds.try_into().expect("three"));
    let mut prepared = VirtioNet::prepare(Stub(Rc::new(Mute)), memory).expect("it is ready");
    VirtioNet::rehearse(&mut prepared);
    socket.write_all(&[1]).expect("somebody waits for that");
    socket.read_exact(&mut [0]).expect("the one before is dead");
    VirtioNet::settle(&prepared).expect("the device works");
    let mut nic = VirtioNet::pick_up(prepared).expect("what the one before left");
    let mut burst = Burst::new();
    loop {
        let came = if burst.is_empty() { nic.receive(&mut burst).expect("the device works") } else { 0 };
        for frame in burst.iter_mut().take(came) {
            nic.save(frame);
            crash::point("nic.saved");
            let (to, rest) = frame.slot.bytes_mut().split_at_mut(6);
            assert_eq!(*to, [0xff; 6], "a frame that the one before had changed");
            to.swap_with_slice(&mut rest[..6]);
            crash::point("nic.changed");
        }
        nic.transmit(&mut burst).expect("the device works");
    }
}

/// Another process; it ends with the test.
struct Other(Child, UnixStream);

impl Other {
    /// Starts a process, ready to take over. It kills itself at the crash point `crash`.
    fn ready(test: &str, memory: &str, crash: Option<&str>) -> Other {
        let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
        ours.set_read_timeout(Some(PATIENCE)).expect("a timeout above zero");
        let mut command = Command::new(std::env::current_exe().expect("this test"));
        command.args(["--exact", test, "--nocapture"]).env(MEMORY, memory);
        command.envs(crash.map(|crash| ("TASUKI_CRASH", crash)));
        command.stdin(Stdio::from(OwnedFd::from(theirs))).stdout(Stdio::null());
        Other(command.spawn().expect("this test can be started again"), ours)
    }

    fn is_ready(&mut self) {
        self.1.read_exact(&mut [0]).expect("it gets ready");
    }

    fn go(&mut self) {
        self.1.write_all(&[1]).expect("it waits for that");
    }

    /// Kills the process; returns whether it was killed, by us or by itself, and did not fail.
    fn end(mut self) -> bool {
        let _ = self.0.kill();
        self.0.wait().expect("a child").signal() == Some(SIGKILL)
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
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

fn nothing_is_lost(test: &str, ends: impl Iterator<Item = (Option<String>, Duration)>) {
    let (play, memory) = Play::new(PLAIN);
    let parts = memory.parts().expect("descriptors are free");
    let fds = [&parts.rings, &parts.frames, &parts.ledger];
    let paths = fds.map(|fd| format!("/proc/{}/fd/{}", std::process::id(), fd.as_raw_fd())).join(" ");
    let options = NicOptions { ring: RING, ..NicOptions::default() };
    // The first driver is gone at once.
    drop(VirtioNet::start(play.bus(), memory, &options).expect("the device starts"));
    let mut traffic = Traffic { play, delivered: 0, back: 0 };
    let mut ends = ends.peekable();
    let next =
        |end: Option<&(Option<String>, Duration)>| Other::ready(test, &paths, end.and_then(|end| end.0.as_deref()));
    let mut other = next(ends.peek());
    let mut killed = 0;
    while let Some((_, patience)) = ends.next() {
        let spare = next(ends.peek());
        other.is_ready();
        other.go();
        let began = Instant::now();
        while began.elapsed() < patience && other.0.try_wait().expect("a child").is_none() {
            traffic.go_on(true);
        }
        assert!(std::mem::replace(&mut other, spare).end(), "killed, not broken");
        // Between two drivers the device goes on.
        traffic.go_on(true);
        killed += 1;
    }
    other.is_ready();
    other.go();
    let began = Instant::now();
    while traffic.back < traffic.delivered || traffic.delivered < 1000 {
        traffic.go_on(traffic.delivered < 1000);
        assert!(began.elapsed() < PATIENCE, "{} of {} frames came back", traffic.back, traffic.delivered);
    }
    assert!(other.end(), "killed, not broken");
    println!("{killed} killed, {} frames", traffic.back);
    // Check the state that the last driver left: no slot has leaked.
    let memory = prepare(fds.map(|fd| fd.try_clone().expect("a descriptor is free")));
    let arena = memory.arena().clone();
    let prepared = VirtioNet::prepare(traffic.play.bus(), memory).expect("it is ready");
    let mut nic = VirtioNet::pick_up(prepared).expect("what the last one left");
    while !traffic.play.chains(virtio::TX).is_empty() {
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
    if let Ok(memory) = std::env::var(MEMORY) {
        drive(&memory);
    }
    let ends = (0..150_u64).map(|i| (None, Duration::from_micros(i * i * 7919 % 3000)));
    nothing_is_lost("killed_at_any_time", ends);
}

#[test]
fn killed_at_every_step() {
    if let Ok(memory) = std::env::var(MEMORY) {
        drive(&memory);
    }
    if !cfg!(feature = "crash-points") {
        println!(
            "skipped: the places where a driver is killed need the feature crash-points, as `cargo xtask test` has it"
        );
        return;
    }
    let passes = [1, 2, 3, 5, 8, 33, 34, 100];
    let points = || crash::NIC_POINTS.iter().chain(&POINTS);
    let ends = passes.into_iter().flat_map(|pass| points().map(move |point| format!("{point}:{pass}")));
    nothing_is_lost("killed_at_every_step", ends.map(|end| (Some(end), Duration::from_millis(200))));
}
