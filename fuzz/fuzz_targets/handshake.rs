//! Any packets with any descriptors, sent by clients to a real server, and by a server to a real client.
//!
//! What must hold: no panic, no hang; the server answers the next client as well as ever, and keeps nothing of a
//! client that has left.
#![no_main]

#[path = "../common/mod.rs"]
mod common;

use std::cell::RefCell;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use common::forger::{self, Memory, Shape};
use common::{Choices, World, ignore_broken_pipes, options};
use libfuzzer_sys::fuzz_target;
use rustix::fs::{MemfdFlags, OFlags, SealFlags};
use tasuki_call::{Ask, Client, Deadline};

/// Contents of one packet.
struct Saying {
    bytes: Vec<u8>,
    fds: Vec<OwnedFd>,
}

fn descriptor(choices: &mut Choices<'_>) -> OwnedFd {
    let memfd = |len: u64, seals: SealFlags| {
        let memory = rustix::fs::memfd_create("fuzz", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&memory, len).unwrap();
        let _ = rustix::io::pwrite(&memory, &forger::SEGMENT_MAGIC.to_ne_bytes(), 0);
        rustix::fs::fcntl_add_seals(&memory, seals).unwrap();
        memory
    };
    let sound = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE;
    let own = |memory: Memory| memory.region.as_fd().try_clone_to_owned().unwrap();
    match choices.below(12) {
        0..=2 => own(Memory::segment(8, 4)),
        3 => own(Memory::new(4 * 4096)),
        4 => memfd(u64::from(choices.short()) * 64, sound),
        5 => memfd(1 << (choices.byte() & 62), sound),
        6 => memfd(1 << 20, SealFlags::SHRINK),
        7 => memfd(1 << 20, SealFlags::empty()),
        8 => rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, rustix::fs::Mode::empty()).unwrap(),
        9 => rustix::pipe::pipe().unwrap().0,
        10 => rustix::pipe::pipe().unwrap().1,
        _ => rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC).unwrap(),
    }
}

fn number(choices: &mut Choices<'_>) -> u32 {
    match choices.below(6) {
        0 => 8,
        1 => 4,
        2 => 4096,
        3 => choices.byte().into(),
        4 => 1 << (choices.byte() & 31),
        _ => u32::from(choices.short()) << 16 | u32::from(choices.short()),
    }
}

/// Makes a packet of ours, a packet that could be ours, or anything.
fn saying(choices: &mut Choices<'_>) -> Saying {
    let shape = Shape { ring: 8, arena: 4, replies: 4 };
    let bytes = match choices.below(8) {
        0 => forger::hello(shape, number(choices), None, None),
        1 => {
            let base = (choices.below(2) == 0).then(|| choices.word());
            let resumes = (choices.below(2) == 0).then(|| u128::from(choices.word()));
            let mut hello = forger::hello(shape, 0, resumes, base);
            for at in (8..32).step_by(4) {
                if choices.below(4) == 0 {
                    hello[at..at + 4].copy_from_slice(&number(choices).to_le_bytes());
                }
            }
            hello
        }
        2 => forger::welcome(shape, 5, 3),
        3 => {
            let mut welcome = forger::welcome(shape, choices.word().into(), number(choices));
            let at = 8 + usize::from(choices.below(32));
            welcome[at] = choices.byte();
            welcome
        }
        4 => forger::packet(2 + u16::from(choices.below(8))),
        5 => {
            let mut packet = forger::packet(choices.below(12).into());
            let len = choices.byte().into();
            packet.extend(choices.bytes(len));
            packet
        }
        6 => {
            let mut packet = forger::packet(choices.short());
            packet[4] = choices.byte();
            packet
        }
        _ => {
            let len = choices.short() % 400;
            choices.bytes(len.into()).to_vec()
        }
    };
    let count = match choices.below(4) {
        0 => 2,
        1 => 4,
        _ => choices.below(7),
    };
    Saying { bytes, fds: (0..count).map(|_| descriptor(choices)).collect() }
}

fn say(socket: BorrowedFd<'_>, Saying { bytes, fds }: &Saying) -> bool {
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    forger::send(socket, bytes, &fds).is_ok()
}

thread_local! {
    static WORLD: RefCell<Option<World>> = const { RefCell::new(None) };
    static MOUTHPIECE: RefCell<Option<Mouthpiece>> = const { RefCell::new(None) };
}

fn to_a_server(choices: &mut Choices<'_>) {
    WORLD.with_borrow_mut(|place| {
        let world = place.get_or_insert_with(|| World::new(true));
        let mut sockets = vec![forger::dial(&world.path)];
        for _ in 0..8 {
            match choices.below(4) {
                0 => world.turn(),
                1 if sockets.len() < 3 => sockets.push(forger::dial(&world.path)),
                _ => {
                    let which = usize::from(choices.byte()) % sockets.len();
                    say(sockets[which].as_fd(), &saying(choices));
                    world.turn();
                }
            }
            if !choices.are_left() {
                break;
            }
        }
        drop(sockets);
        for _ in 0..4 {
            world.turn();
        }
        if world.succeeded {
            *place = None;
            return;
        }
        world.turn_until_alone();
        world.testify();
    });
}

/// A server that sends the next client a given packet.
struct Mouthpiece {
    _folder: tempfile::TempDir,
    path: PathBuf,
    tell: Sender<Saying>,
}

impl Mouthpiece {
    fn new() -> Self {
        ignore_broken_pipes();
        let folder = tempfile::tempdir().expect("a folder for the socket");
        let path = folder.path().join("s");
        let listener = forger::listen(&path);
        let (tell, told) = channel::<Saying>();
        std::thread::spawn(move || {
            loop {
                let socket = forger::accept(listener.as_fd()).unwrap();
                let _hello = forger::receive(socket.as_fd());
                // A disconnected client dials again; there is one packet for each.
                if let Ok(saying) = told.try_recv() {
                    say(socket.as_fd(), &saying);
                }
            }
        });
        Mouthpiece { _folder: folder, path, tell }
    }
}

fn to_a_client(choices: &mut Choices<'_>) {
    MOUTHPIECE.with_borrow_mut(|mouthpiece| {
        let Mouthpiece { path, tell, .. } = mouthpiece.get_or_insert_with(Mouthpiece::new);
        tell.send(saying(choices)).unwrap();
        match Client::connect(&*path, &options(8, 4)) {
            Ok(mut client) => {
                // The path where it would find a successor has no server.
                let gone = path.with_extension("gone");
                std::fs::rename(&*path, &gone).unwrap();
                let outcome = client.call(Ask::new(1_u16, &[1; 100]), Deadline::within(Duration::from_micros(200)));
                assert!(outcome.is_err(), "nobody is there who could answer");
                drop(outcome);
                client.woken();
                std::fs::rename(&gone, &*path).unwrap();
            }
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    });
}

fuzz_target!(|data: &[u8]| {
    let mut choices = Choices(data);
    match choices.below(2) {
        0 => to_a_server(&mut choices),
        _ => to_a_client(&mut choices),
    }
});
