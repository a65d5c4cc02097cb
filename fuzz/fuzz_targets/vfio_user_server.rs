//! A vfio-user client that sends anything, with and without descriptors, cut anywhere, and stores anything at the
//! doorbells it gets.
//!
//! What must hold: the server does not panic or hang. The device sees only accesses inside of its regions, and
//! memory that does not overlap. When the liar is gone, the device keeps nothing of it. A third of the inputs meet a
//! device that checks this. The others meet the model of a card: an 82574L, which polls its doorbells between
//! messages, or a virtio network device.
#![no_main]

#[path = "../common/mod.rs"]
mod common;

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use common::{Choices, say};
use libfuzzer_sys::fuzz_target;
use rustix::net::{AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType};
use tasuki_shm::region::{Pages, Region as Memory};
use tasuki_sim::model::Model;
use tasuki_sim::served::Served;
use tasuki_sim::vfio_user::{Device, DmaMemory, Doorbells, IRQS, MSIX, REGIONS, Region, Server, Turn};
use tasuki_sim::wire::Nowhere;
use tasuki_sim::{e1000e, virtio_net};

const VECTORS: u32 = 3;

/// Bytes of the memory that holds doorbells, and the strict device's doorbells in it.
const BELLS_LEN: usize = 4096;
const BELLS: [(u64, u64); 2] = [(0x100, 0), (0x5000, 128)];

/// A device, and its work between messages.
trait Fuzzed: Device {
    fn between(&mut self);

    /// Returns whether nothing of its client is left.
    fn is_bare(&self) -> bool;
}

impl<M: Model> Fuzzed for Served<Nowhere, M> {
    fn between(&mut self) {
        self.step();
    }

    fn is_bare(&self) -> bool {
        self.reaches_nothing()
    }
}

impl Fuzzed for Strict {
    fn between(&mut self) {}

    fn is_bare(&self) -> bool {
        self.windows.is_empty() && self.eventfds.iter().all(Option::is_none) && self.bells.is_none()
    }
}

#[derive(Default)]
struct Strict {
    bells: Option<Memory>,
    windows: Vec<(u64, DmaMemory)>,
    eventfds: [Option<OwnedFd>; VECTORS as usize],
}

fn len(region: u32) -> u64 {
    [4096, 100, 0, 1 << 20].get(region as usize).copied().unwrap_or(0)
}

impl Device for Strict {
    fn region(&self, index: u32) -> Region<'_> {
        assert!(index < REGIONS);
        Region { len: len(index), ..Region::default() }
    }

    fn vectors(&self, index: u32) -> u32 {
        assert!(index < IRQS);
        if index == MSIX { VECTORS } else { 0 }
    }

    fn read(&mut self, region: u32, offset: u64, into: &mut [u8]) {
        assert!(offset + into.len() as u64 <= len(region));
        into.fill(0x5a);
    }

    fn write(&mut self, region: u32, offset: u64, bytes: &[u8]) {
        assert!(offset + bytes.len() as u64 <= len(region));
    }

    fn dma_map(&mut self, at: u64, memory: DmaMemory) {
        let end = at + memory.len() as u64;
        assert!(self.windows.iter().all(|(other, its)| end <= *other || other + its.len() as u64 <= at));
        let _ = memory.store(memory.len() - 1, &[1]);
        self.windows.push((at, memory));
    }

    fn dma_unmap(&mut self, at: u64) {
        let index = self.windows.iter().position(|(window, _)| *window == at).expect("it was mapped");
        self.windows.remove(index);
    }

    fn set_irq(&mut self, index: u32, vector: u32, eventfd: Option<OwnedFd>) {
        assert_eq!(index, MSIX);
        self.eventfds[vector as usize] = eventfd;
    }

    fn doorbells(&mut self, index: u32) -> Option<Doorbells<'_>> {
        assert!(index < REGIONS);
        if index != 3 {
            return None;
        }
        self.bells = Some(Memory::create("bells", BELLS_LEN, Pages::Small).expect("memory"));
        let memory = self.bells.as_ref()?.fd();
        Some(Doorbells { memory, places: &BELLS })
    }

    fn forget_doorbells(&mut self) {
        self.bells = None;
    }

    fn reset(&mut self) {}
}

fn message(command: u16, posted: bool, words: &[u32], rest: &[u8]) -> Vec<u8> {
    let size = (16 + 4 * words.len() + rest.len()) as u32;
    let mut bytes = [1_u16.to_ne_bytes(), command.to_ne_bytes()].concat();
    [size, if posted { 0x10 } else { 0 }, 0].iter().chain(words).for_each(|word| bytes.extend(word.to_ne_bytes()));
    bytes.extend(rest);
    bytes
}

/// Makes a command of the right shape with arbitrary fields.
fn command(choices: &mut Choices<'_>) -> Vec<u8> {
    let posted = choices.below(4) == 0;
    let mut word = || choices.word() as u32;
    match word() % 15 {
        0 => message(2, posted, &[32, 3, 4096 * (word() & 3), 0, word() << 12, 0, 4096 * (word() & 7), 0], &[]),
        1 => message(2, posted, &[32, word(), word(), word(), word(), word(), word(), word()], &[]),
        2 => message(3, posted, &[24, word() & 3, word() << 12, 0, 4096 * (word() & 7), 0], &[]),
        3 => message(4, posted, &[word(), 0, 0, 0], &[]),
        4 => message(5, posted, &[word(), 0, word(), 0, 0, 0, 0, 0], &[]),
        5 => message(7, posted, &[word(), 0, word(), 0], &[]),
        6 => message(8, posted, &[20, if word() & 1 == 0 { 0x24 } else { word() }, 2, word() & 3, word() & 3], &[]),
        7 => message(9, posted, &[word(), word() & 1, word() & 3, word()], &[]),
        8 => {
            let (offset, region) = (word(), word() & 3);
            let bytes = choices.bytes(8);
            message(10, posted, &[offset, 0, region, bytes.len() as u32], bytes)
        }
        9 => message(13, posted, &[], &[]),
        // The doorbells of a region, mostly of one that has some.
        11 => message(6, posted, &[if word() & 7 == 0 { word() } else { 4096 }, 0, word() & 3, 0], &[]),
        // Enable the card's memory space and bus mastering; without them it ignores everything.
        12 => message(10, posted, &[4, 0, 7, 4], &[6, 0, 0, 0]),
        // A register of the card; most are below 0x6000.
        13 => {
            let (offset, value) = (word() & 0x5ffc, word().to_ne_bytes());
            message(10, posted, &[offset, 0, 0, 4], &value)
        }
        10 => {
            let (command, len) = (choices.short(), choices.byte());
            message(command, posted, &[], choices.bytes(len.into()))
        }
        _ => {
            let len = choices.byte();
            choices.bytes(len.into()).to_vec()
        }
    }
}

/// Receives answers. Doorbells that come with one replace older ones.
fn hear(socket: &OwnedFd, bells: &mut Option<Memory>) -> bool {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = [0; 8192];
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let came = rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags);
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = message {
            fds.for_each(|fd| *bells = Some(Memory::adopt(fd).expect("sealed memory")));
        }
    }
    came.is_ok_and(|came| came.bytes > 0)
}

/// Stores something at a doorbell, or beside one.
fn store(bells: &Memory, choices: &mut Choices<'_>) {
    let place = if choices.below(8) == 0 { choices.below(255) } else { 32 * choices.below(4) };
    let words = bells.span::<AtomicU32>(0, BELLS_LEN / 4).expect("a page");
    words[usize::from(place)].store(choices.word() as u32, Ordering::Release);
}

fn turn(server: &mut Server, device: &mut impl Fuzzed) -> bool {
    for _ in 0..1000 {
        device.between();
        match server.turn(device).expect("the server goes on") {
            Turn::Busy => {}
            Turn::Idle => return false,
            Turn::Over | Turn::Gone(_) => return true,
        }
    }
    panic!("it is busy for ever");
}

fn lie(choices: &mut Choices<'_>, device: &mut impl Fuzzed) {
    let (ours, client) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
        .expect("a socket pair");
    let mut server = Server::over(ours).expect("a server");
    let memory = Memory::create("fuzz", 16384, Pages::Small).expect("memory");
    let eventfd = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).expect("an eventfd");
    if choices.below(16) > 0 {
        say(&client, &message(1, false, &[1 << 16], b"{}\0"), &[]);
    }
    let mut bells = None;
    let mut over = false;
    while choices.are_left() && !over {
        let fds = match choices.byte() {
            0..100 => 0,
            100..220 => 1,
            more => more % 20,
        };
        let bytes = command(choices);
        let cut = if choices.below(8) == 0 { choices.below(64).into() } else { bytes.len() };
        let (first, second) = bytes.split_at(cut.min(bytes.len()));
        let fd = if choices.below(2) == 0 { memory.fd() } else { eventfd.as_fd() };
        say(&client, first, &vec![fd; fds.into()]);
        if !second.is_empty() {
            over |= turn(&mut server, device);
            say(&client, second, &[]);
        }
        if let Some(bells) = &bells {
            (0..choices.below(3)).for_each(|_| store(bells, choices));
        }
        if choices.below(3) > 0 {
            over |= turn(&mut server, device);
        }
        if choices.below(4) > 0 {
            hear(&client, &mut bells);
        }
    }
    // The server answers all messages before it sees the end. Read the answers, for unread ones keep it from going
    // on.
    while !over {
        over |= turn(&mut server, device);
        while hear(&client, &mut bells) {}
        let _ = rustix::net::shutdown(&client, rustix::net::Shutdown::Write);
    }
    assert!(device.is_bare(), "nothing is left of it");
    if let Some(bells) = &bells {
        // Doorbells of a client that has left do nothing.
        store(bells, choices);
        device.between();
    }
}

fuzz_target!(|data: &[u8]| {
    common::ignore_broken_pipes();
    let mut choices = Choices(data);
    match choices.below(3) {
        0 => lie(&mut choices, &mut Strict::default()),
        1 => lie(
            &mut choices,
            &mut Served::new(virtio_net::Device::new(virtio_net::Options::default()), Nowhere::default()),
        ),
        _ => lie(&mut choices, &mut Served::new(e1000e::Device::new(e1000e::Options::default()), Nowhere::default())),
    }
});
