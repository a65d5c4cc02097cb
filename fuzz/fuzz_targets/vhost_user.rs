//! A machine's front end that sends any messages, in any order, with any descriptors and cut at any byte, and its guest,
//! which writes anything into its rings. Meanwhile frames cross, the memory changes, the worker is replaced and a node hands
//! over frames with any offload header. Two other nodes exchange frames, each of which arrives once, whole and in order.
//!
//! What must hold: no panic; each refusal is a sentence; a successor goes on with a device that runs; the next front end is
//! served; no descriptor and no mapping is left behind.
#![no_main]

#[path = "../common/mod.rs"]
mod common;
#[allow(dead_code, reason = "the tests use the rest of it")]
#[path = "../../crates/tasuki-net/tests/suite/memif"]
mod memif {
    pub mod client;
    pub mod port;
}
#[path = "../common/neighbours.rs"]
mod neighbours;
#[allow(dead_code, reason = "the tests use the rest of it")]
#[path = "../../crates/tasuki-net/tests/suite/net.rs"]
mod net;
#[allow(dead_code, reason = "the tests use the rest of it")]
#[path = "../../crates/tasuki-net/tests/suite/vm.rs"]
mod vm;

#[path = "../vhost_user/guest.rs"]
mod guest;
#[path = "../vhost_user/messages.rs"]
mod messages;

use std::collections::VecDeque;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use common::{Choices, check_sentence};
use libfuzzer_sys::fuzz_target;
use rustix::net::{SendFlags, Shutdown, SocketType};
use tasuki_net::endpoint::guest::Guest;
use tasuki_net::endpoint::{Bridge, Connection, Endpoint};
use tasuki_net::port::Armed;
use tasuki_net::switch::Switch;
use tasuki_shm::line::Claims;
use tasuki_shm::vni::directory::{Directory, Lookup, NodeSet};

use memif::port::{Lines, OTHER, PORT, directory_memory, frame_to, listen, mac};
use messages::{ALL, FEATURES, Props};
use neighbours::WITNESS;
use net::Net;
use vm::{Machine, PACKED, connect, eventfd, message, send};

const NODES: u16 = 3;

/// Most raw connections at a time: one more than are served.
const CONNECTIONS: usize = 3;

fn node(listener: &OwnedFd, net: &mut Net, lines: &Lines) -> Bridge<Guest> {
    let guest = Guest::new(listener.try_clone().expect("a descriptor is left")).expect("likewise");
    Bridge::new(Box::new(guest), net.take_exact(PORT), Switch::new(PORT, Lookup::new(Claims::of(lines.clone()))))
}

struct Attack {
    net: Net,
    node: Bridge<Guest>,
    lines: Lines,
    listener: OwnedFd,
    folder: tempfile::TempDir,
    /// A front end after its handshake, with malicious intent, and where its guest writes next in each ring.
    machine: Option<Machine>,
    next: [u16; 2],
    /// Connections, each with its next step of an almost correct handshake.
    raw: Vec<(OwnedFd, u8)>,
    props: Props,
    /// Memory of a front end was cut.
    is_cut: bool,
    under_way: VecDeque<Vec<u8>>,
    now: Instant,
}

impl Attack {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let lines = directory_memory();
        let (mut directory, mut nodes) = (Directory::new(lines.clone()), NodeSet::default());
        for number in 0..NODES {
            directory.add(mac(number), number).expect("it is free");
            nodes.insert(number);
        }
        directory.set_nodes(&nodes);
        let mut net = Net::with(NODES, 64);
        let path = folder.path().join("vm.sock");
        let listener = listen(&path, SocketType::STREAM);
        let other = folder.path().join("other.sock");
        let _other = listen(&other, SocketType::STREAM);
        let node = node(&listener, &mut net, &lines);
        Attack {
            props: Props::new(&other),
            net,
            node,
            lines,
            listener,
            folder,
            machine: None,
            next: [0; 2],
            raw: Vec::new(),
            is_cut: false,
            under_way: VecDeque::new(),
            now: Instant::now(),
        }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("vm.sock")
    }

    fn turn(&mut self) {
        turn(&mut self.node);
    }

    /// Lets time pass for the node.
    fn tick(&mut self, time: Duration) {
        self.now = self.now.max(Instant::now()) + time;
        self.node.tick(self.now);
    }

    /// Starts a device.
    fn start(&mut self, choices: &mut Choices<'_>) {
        self.leave();
        let features = FEATURES[usize::from(choices.below(8))];
        let size = match choices.below(10) {
            any @ 8.. if features & PACKED != 0 => 1 + u16::from(any) + u16::from(choices.byte()),
            log => 1 << (log % 8),
        };
        let pairs = 1 + usize::from(size <= 64 && choices.below(4) == 0);
        let (path, node) = (self.path(), &mut self.node);
        self.machine = Some(Machine::start_with(&path, features, size, pairs, || turn(node)));
        // The buffers for received frames are a whole lap.
        self.next = [0, 0x8000];
        assert!(self.node.endpoint.is_running(), "a front end that behaves is served");
    }

    /// Ends all connections. The node notices that, and sleeps.
    fn leave(&mut self) {
        self.machine = None;
        self.raw.clear();
        // One whose own socket came with half a message has not left yet: each tick sends one away.
        for _ in 0..=CONNECTIONS {
            (0..70).for_each(|_| self.turn());
            self.tick(Duration::from_secs(6));
        }
        let (mut turns, mut idle) = (0, 0);
        while idle < 3 {
            self.turn();
            turns += 1;
            assert!(turns < 100_000, "a node without a machine sleeps");
            let is_idle = self.node.arm() == Armed::Idle && !self.node.endpoint.is_running();
            idle = if is_idle { idle + 1 } else { 0 };
        }
    }

    /// Sends a message, in its turn or not, with its proper descriptors or others.
    fn speak(&mut self, choices: &mut Choices<'_>) {
        let bits = choices.byte();
        let of_machine = bits & 3 != 0 && self.machine.is_some();
        if !of_machine && (self.raw.is_empty() || bits & 0x1c == 0) && self.raw.len() < CONNECTIONS {
            self.raw.push((connect(&self.path()), 0));
        }
        let number = usize::from(bits >> 5) % self.raw.len().max(1);
        let Self { machine, raw, props, node, .. } = self;
        let machine = machine.as_ref();
        let step = if of_machine { None } else { Some(&mut raw[number].1) };
        let (request, index) = messages::request(choices, machine.filter(|_| of_machine), step);
        let body = messages::body(choices, machine, request, index);
        let flags = if choices.below(4) == 0 { 8 } else { 0 };
        let bytes = message(request, flags, &body);
        let fresh = eventfd();
        let fds = messages::fds(choices, props, machine, (request, &body), &fresh);
        let socket = match machine {
            Some(machine) if of_machine => &machine.socket,
            _ => &raw[number].0,
        };
        say(choices, socket, bytes, fds, || turn(node));
    }

    /// The guest makes a chain available, or writes something else.
    fn scribble(&mut self, choices: &mut Choices<'_>) {
        if let Some(machine) = &mut self.machine {
            guest::scribble(choices, machine, &mut self.next);
        }
    }

    /// Its memory goes: the front end is sent away.
    fn cut(&mut self, choices: &mut Choices<'_>) {
        let Some(machine) = self.machine.take() else { return };
        self.is_cut = true;
        let _ = rustix::fs::ftruncate(&machine.memory, u64::from(choices.short()) << choices.below(8));
        (0..choices.below(70)).for_each(|_| self.turn());
    }

    /// Sends a frame, if there is room for it.
    fn send(&mut self, to: u16, number: u32, len: usize) -> bool {
        neighbours::send(&mut self.net, &mut self.under_way, to, number, len)
    }

    /// Checks the frames between the honest nodes. Returns those of the guest for the witness.
    fn look(&mut self) -> Vec<Vec<u8>> {
        neighbours::look(&mut self.net, &mut self.under_way)
    }

    /// Replaces the worker, which is told to end, or killed between two turns.
    fn succeed(&mut self, told: bool) {
        if told {
            self.node.finish();
        }
        let was_running = self.node.endpoint.is_running();
        let parts = self.node.endpoint.parts().expect("descriptors are left");
        self.node.endpoint.told();
        self.node = node(&self.listener, &mut self.net, &self.lines);
        let Some(parts) = parts else { return };
        let went = self.node.endpoint.go_on(parts);
        let trouble = self.node.endpoint.trouble();
        trouble.iter().chain(went.as_ref().err()).for_each(|why| check_sentence(why));
        assert!(went.is_ok() || self.is_cut, "a successor gets what it needs: {went:?}");
        let goes_on = self.node.endpoint.is_running() || went.is_err() || trouble.is_some();
        assert!(goes_on || !was_running, "a device goes on to run, or its front end is told");
    }

    /// A front end that behaves comes next, and finds nothing of those before.
    fn end(&mut self) {
        self.leave();
        let _ = self.look();
        let (path, node) = (self.path(), &mut self.node);
        let mut honest = Machine::start(&path, ALL, 16, || turn(node));
        assert!(self.node.endpoint.is_running(), "the next front end is served");
        assert!(honest.send(&frame_to(WITNESS, PORT, 7, 3000)));
        let (there, back) = (frame_to(WITNESS, PORT, 7, 3000), frame_to(PORT, OTHER, 8, 3000));
        let (mut came, mut turns) = ([false; 2], 0);
        // Frames for those before may still wait, and leave no room meanwhile; and one that waits for 2 ms is dropped.
        while came != [true; 2] {
            if turns % 1000 == 0 {
                let _ = self.send(PORT, 8, 3000);
            }
            self.turn();
            came[0] |= self.look().contains(&there);
            came[1] |= honest.receive().contains(&back);
            turns += 1;
            assert!(turns < 100_000, "the frames of the next front end come: {came:?}");
        }
        assert!(self.under_way.is_empty(), "a frame between honest nodes was lost");
    }
}

/// Sends a message as a whole, in two parts, or not all of it; or does something else in its place.
fn say(
    choices: &mut Choices<'_>,
    socket: &OwnedFd,
    mut bytes: Vec<u8>,
    fds: Vec<BorrowedFd<'_>>,
    mut turn: impl FnMut(),
) {
    match choices.byte() {
        0 => {
            let at = usize::from(choices.byte()) % bytes.len();
            bytes[at] ^= choices.byte();
            let _ = send(socket, &bytes, &fds);
        }
        // The descriptors come with either part.
        how @ 1..16 => {
            let (first, second) = bytes.split_at(usize::from(choices.byte()) % bytes.len());
            let (with, without) = if how & 1 == 0 { (fds, vec![]) } else { (vec![], fds) };
            for (part, fds) in [(first, with), (second, without)] {
                if !part.is_empty() {
                    let _ = send(socket, part, &fds);
                }
                (0..choices.below(3)).for_each(|_| turn());
            }
        }
        16..20 => _ = send(socket, &bytes[..1 + usize::from(choices.byte()) % bytes.len()], &fds),
        20 => _ = send(socket, choices.bytes(16), &fds),
        21 => _ = rustix::net::shutdown(socket, Shutdown::Write),
        22 => _ = rustix::net::send(socket, &bytes, SendFlags::OOB | SendFlags::DONTWAIT | SendFlags::NOSIGNAL),
        23..28 => while vm::answer(socket).is_some() {},
        _ => _ = send(socket, &bytes, &fds),
    }
}

/// Takes a turn of a worker, which tells the daemon of what it heard.
fn turn(node: &mut Bridge<Guest>) {
    node.rest(Duration::ZERO);
    node.turn();
    if node.endpoint.has_news() || node.endpoint.waits() {
        node.endpoint.parts().expect("descriptors are left");
        node.endpoint.told();
    }
    node.endpoint.trouble().iter().for_each(|why| check_sentence(why));
}

/// Returns the numbers of descriptors and of mappings of this process.
fn held() -> [usize; 2] {
    let descriptors = std::fs::read_dir("/proc/self/fd").expect("the kernel tells").count();
    let mappings = std::fs::read_to_string("/proc/self/maps").expect("the kernel tells");
    [descriptors, mappings.lines().filter(|line| line.contains("memfd:")).count()]
}

fn attack(choices: &mut Choices<'_>) {
    let mut attack = Attack::new();
    let mut number = 0;
    if choices.below(4) > 0 {
        attack.start(choices);
    }
    while choices.are_left() && number < 200 {
        number += 1;
        match choices.below(32) {
            0..4 => attack.speak(choices),
            4..15 => attack.scribble(choices),
            15 => neighbours::unfinished(&mut attack.net, choices),
            16..19 => _ = attack.send(PORT, number, 14 + usize::from(choices.short()) % 5000),
            19 => _ = attack.send(WITNESS, number, 18 + usize::from(choices.short()) % 3000),
            20 => _ = attack.look(),
            21 => attack.tick(Duration::from_millis(200)),
            22 => _ = attack.node.arm(),
            23 => match choices.below(8) {
                0 => attack.start(choices),
                1 => attack.cut(choices),
                2 => attack.machine = None,
                3 => _ = attack.raw.pop(),
                _ => attack.succeed(choices.below(2) == 0),
            },
            _ => attack.turn(),
        }
    }
    attack.end();
}

fuzz_target!(|input: &[u8]| {
    common::ignore_broken_pipes();
    // What a process opens once and keeps.
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| attack(&mut Choices(&[])));
    let before = held();
    attack(&mut Choices(input));
    assert_eq!(held(), before, "descriptors and mappings before and after");
});
