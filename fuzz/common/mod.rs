//! Shared parts of the fuzz targets: a source of choices, and a real server with an honest client, the witness,
//! which must not notice anything.
//!
//! # Invariants
//!
//! - **P1** Nothing in these processes handles SIGPIPE.
#![allow(dead_code, reason = "each target needs another part of it")]
#![allow(unsafe_code, reason = "SIGPIPE is ignored by a call into libc")]

#[path = "../../crates/tasuki-call/tests/suite/forger.rs"]
pub mod forger;

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use tasuki_call::{Ask, Client, ClientOptions, Deferred, Request, Server, ServerOptions, State, Turn};
use tasuki_shm::arena::{Detach, Geometry};

/// Ignores SIGPIPE, as the runtime of every Rust program does before `main`; here `main` is libFuzzer's.
pub fn ignore_broken_pipes() {
    unsafe extern "C" {
        fn signal(signal: i32, handler: usize) -> usize;
    }
    const SIGPIPE: i32 = 13;
    const SIG_IGN: usize = 1;
    // SAFETY: libc's own function and constants, and no other code handles the signal (P1).
    unsafe { signal(SIGPIPE, SIG_IGN) };
}

/// The fuzzer's bytes as a sequence of choices. After its end, all choices are 0.
pub struct Choices<'a>(pub &'a [u8]);

impl<'a> Choices<'a> {
    pub fn are_left(&self) -> bool {
        !self.0.is_empty()
    }

    pub fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    pub fn below(&mut self, limit: u8) -> u8 {
        self.byte() % limit
    }

    pub fn short(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    /// Chooses any word; small words and the edges are likely.
    pub fn word(&mut self) -> u64 {
        match self.byte() {
            edge @ 0xf0..=0xff => u64::MAX - u64::from(edge & 7),
            0xe0..=0xef => (0..8).fold(0, |word, _| word << 8 | u64::from(self.byte())),
            0xd0..=0xdf => u64::from(self.short()) << 32 | u64::from(self.byte()),
            small => u64::from(small),
        }
    }

    pub fn bytes(&mut self, len: usize) -> &'a [u8] {
        let (first, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        first
    }
}

/// Sends a packet with descriptors, if the other end has room for it.
pub fn say(socket: &OwnedFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(20))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let _ = rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags);
}

/// Has an end write something anywhere, or ring. `which` is below 5.
pub fn scribble(end: &mut forger::End, which: u8, choices: &mut Choices<'_>) {
    match which {
        0 => end.store(choices.short().into(), choices.word()),
        1 => {
            let ring = end.ring_words();
            end.store(ring.start + usize::from(choices.short()) % ring.len(), choices.word());
        }
        2 => end.say_head(choices.word()),
        3 => end.say_state(choices.byte(), choices.byte().into()),
        _ => end.ring(),
    }
}

/// Checks that a message is one sentence for a person.
pub fn check_sentence(sentence: &str) {
    let is_one = sentence.len() > 10 && !sentence.contains('\n');
    let is_debug =
        ["{", "}", "[", "]", "Some(", "None", "Err(", "Os(", "\\"].iter().any(|mark| sentence.contains(mark));
    assert!(is_one && !is_debug, "this is no sentence for a person: {sentence}");
}

pub const ECHO: u16 = 1;
pub const LARGE: u16 = 2;
pub const DROP: u16 = 3;
pub const DEFER: u16 = 4;
pub const WORDS: u16 = 5;
pub const IN_PLACE: u16 = 6;

fn serve(request: Request<'_>, kept: &mut Vec<Deferred>) {
    match request.method() {
        ECHO => {
            let bytes = request.to_vec();
            let _ = request.reply(&bytes);
        }
        LARGE => _ = request.reply(&[7; 4096]),
        DROP => {}
        DEFER => kept.push(request.defer()),
        WORDS => {
            let sum = request.slot().map_or(0, |slot| slot.words().fold(0, u64::wrapping_add));
            let _ = request.reply(&sum.to_le_bytes());
        }
        IN_PLACE => match request.take_slot() {
            Ok(mut slot) => {
                slot.bytes_mut()[..64].fill(3);
                request.reply_slot(slot, 64);
            }
            Err(_) => request.refuse(9_u16, "no slot is free; a long note that has to be cut off somewhere"),
        },
        other => request.refuse(other.max(1), "no such method"),
    }
}

/// A real server, and an honest client of it that gets right answers despite all other clients.
pub struct World {
    pub server: Server,
    pub path: PathBuf,
    pub kept: Vec<Deferred>,
    pub succeeded: bool,
    witness: Option<Client>,
    count: u64,
    _folder: tempfile::TempDir,
}

pub fn options(ring: u32, slots: u32) -> ClientOptions {
    let pool = Geometry { slot_len: forger::SLOT_LEN, count: slots };
    ClientOptions {
        ring,
        arena: pool,
        replies: pool,
        detach: Detach::Move,
        spin: Some(Duration::ZERO),
        handshake: Duration::from_secs(5),
    }
}

impl World {
    pub fn new(state: bool) -> Self {
        ignore_broken_pipes();
        let folder = tempfile::tempdir().expect("a folder for the socket");
        let path = folder.path().join("s");
        let options = ServerOptions {
            spin: Some(Duration::ZERO),
            state: state.then(|| State::create(64).expect("memory for the state")),
            ..ServerOptions::default()
        };
        let server = Server::bind(&path, options).expect("a server at a fresh path");
        let mut world =
            World { server, path, kept: Vec::new(), succeeded: false, witness: None, count: 0, _folder: folder };
        let path = world.path.clone();
        let connecting = std::thread::spawn(move || Client::connect(path, &self::options(8, 2)).expect("a witness"));
        while !connecting.is_finished() {
            world.turn();
        }
        world.witness = Some(connecting.join().expect("a witness"));
        world
    }

    /// Serves the pending requests without waiting.
    pub fn turn(&mut self) {
        let kept = &mut self.kept;
        let turn = self.server.turn(Some(Duration::ZERO), |request| serve(request, kept)).expect("the server goes on");
        self.succeeded |= turn == Turn::Succeeded;
    }

    /// Answers or drops the deferred requests.
    pub fn settle_kept(&mut self, answer: bool) {
        for deferred in std::mem::take(&mut self.kept) {
            match answer {
                true => {
                    if let Some(request) = self.server.resume(deferred) {
                        let _ = request.reply(&[5; 60]);
                    }
                }
                false => drop(deferred),
            }
        }
    }

    /// Makes calls as the witness, and checks the answers.
    pub fn testify(&mut self) {
        self.count += 1;
        let number = self.count.to_le_bytes();
        let long = [number[0]; 500];
        assert_eq!(self.answer(ECHO, &number), number);
        assert_eq!(self.answer(ECHO, &long), long);
    }

    fn answer(&mut self, method: u16, bytes: &[u8]) -> Vec<u8> {
        let mut witness = self.witness.take().expect("a witness");
        let ticket = witness.submit(Ask::new(method, bytes)).expect("an honest request is taken");
        for _ in 0..10_000 {
            self.turn();
            if let Some(reply) = witness.poll(&ticket).expect("an honest request is answered") {
                let answer = reply.to_vec();
                drop(reply);
                self.witness = Some(witness);
                return answer;
            }
        }
        panic!("an honest request was answered in vain for 10,000 turns");
    }

    /// Turns until only the witness is left.
    pub fn turn_until_alone(&mut self) {
        for _ in 0..1000 {
            if self.server.clients() == 1 {
                return;
            }
            self.turn();
        }
        panic!("{} clients are connected where only the witness is", self.server.clients());
    }
}
