//! A server that welcomes a client correctly, then writes anything anywhere in its memory at any time, hangs up, and
//! comes back.
//!
//! What must hold: the client does not panic or hang; an error names the rule; in the end, every slot is back.
#![no_main]

#[path = "../common/mod.rs"]
mod common;

use std::cell::RefCell;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use common::forger::{self, End, Manners, REPLY_BYTES, REPLY_SLOT, SLOT_LEN};
use common::{Choices, ignore_broken_pipes, options, scribble};
use libfuzzer_sys::fuzz_target;
use tasuki_call::{Ask, CallError, Client, Deadline, Failure, Reply, Ticket};

/// Welcomes clients, or turns them away.
struct Doorman {
    _folder: tempfile::TempDir,
    path: PathBuf,
    ends: Receiver<End>,
    closed: Arc<AtomicBool>,
}

thread_local! {
    static DOORMAN: RefCell<Option<Doorman>> = const { RefCell::new(None) };
}

impl Doorman {
    fn new() -> Self {
        ignore_broken_pipes();
        let folder = tempfile::tempdir().expect("a folder for the socket");
        let path = folder.path().join("s");
        let listener = forger::listen(&path);
        let closed = Arc::new(AtomicBool::new(false));
        let (told, (give, ends)) = (Arc::clone(&closed), channel());
        std::thread::spawn(move || {
            loop {
                let Ok(socket) = forger::accept(listener.as_fd()) else { continue };
                if !told.load(SeqCst)
                    && let Some(end) = forger::welcome_caller(&socket, Manners { service: 5, generation: 3 })
                    && give.send(end).is_err()
                {
                    return;
                }
            }
        });
        Doorman { _folder: folder, path, ends, closed }
    }

    /// Turns all clients away from now on, and disconnects those it has let in.
    fn close(&self) {
        self.closed.store(true, SeqCst);
        // The doorman handles one client after the other: once it turns this one away, it has let all earlier ones
        // in.
        let _ = forger::receive(forger::dial(&self.path).as_fd());
        while self.ends.try_recv().is_ok() {}
    }
}

const SLOTS: u32 = 3;

struct Scene {
    client: Client,
    end: Option<End>,
    /// Calls that the server has read so far.
    asked: Vec<u64>,
    tickets: Vec<Ticket>,
    replies: Vec<Reply>,
    slots: Vec<tasuki_shm::arena::Slot>,
}

fn judge(failure: &Failure) {
    if let CallError::Broken(_) = failure.why {
        let why = failure.to_string();
        assert!(why.contains("rule") || why.contains("protocol"), "no rule is named: {why}");
    }
}

impl Scene {
    fn ask(&mut self, choices: &mut Choices<'_>) {
        let long = [1; 300];
        let ask = match choices.below(3) {
            0 => Ask::new(1_u16, &long[..usize::from(choices.below(49))]),
            1 => Ask::new(2_u16, &long),
            _ => match self.slots.pop() {
                Some(slot) => Ask::with_slot(3_u16, slot, choices.short().into()),
                None => Ask::new(1_u16, &[]),
            },
        };
        let ask = if choices.below(2) == 0 { ask.idempotent() } else { ask };
        match if choices.below(4) == 0 { self.client.stage(ask) } else { self.client.submit(ask) } {
            Ok(ticket) => self.tickets.push(ticket),
            Err(failure) => self.note(failure),
        }
    }

    fn note(&mut self, failure: Failure) {
        judge(&failure);
        self.slots.extend(failure.slot);
    }

    fn client_acts(&mut self, choices: &mut Choices<'_>) {
        match choices.below(9) {
            0..=2 => self.ask(choices),
            3 => {
                if let Some(ticket) = self.tickets.pop() {
                    let limit = Duration::from_micros(u64::from(choices.below(4)) * 20);
                    match self.client.wait(ticket, Deadline::within(limit)) {
                        Ok(reply) => self.replies.push(reply),
                        Err(failure) => self.note(failure),
                    }
                }
            }
            4 => {
                if let Some(ticket) = self.tickets.pop() {
                    match self.client.poll(&ticket) {
                        Ok(Some(reply)) => self.replies.push(reply),
                        Ok(None) => self.tickets.push(ticket),
                        Err(failure) => self.note(failure),
                    }
                }
            }
            5 => {
                if let Some(ticket) = self.tickets.pop() {
                    self.client.abandon(ticket);
                }
            }
            6 => {
                if let Some(reply) = self.replies.pop() {
                    let _ = reply.to_vec();
                    self.slots.extend(reply.into_returned());
                }
            }
            7 => match choices.below(3) {
                0 => self.slots.extend(self.client.take_slot()),
                1 => drop(self.slots.pop()),
                _ => self.client.flush(),
            },
            _ => match choices.below(3) {
                0 => _ = self.client.arm(),
                1 => self.client.woken(),
                _ => _ = self.client.reconnect(),
            },
        }
    }

    fn server_acts(&mut self, choices: &mut Choices<'_>, doorman: &Doorman) {
        while let Ok(fresh) = doorman.ends.try_recv() {
            self.end = Some(fresh);
            self.asked.clear();
        }
        let Some(end) = &mut self.end else { return };
        let call = self.asked.get(usize::from(choices.byte()) % self.asked.len().max(1)).copied().unwrap_or(0);
        match choices.below(14) {
            which @ 0..=4 => scribble(end, which, choices),
            5 | 6 => self.asked.extend(end.pop().map(|entry| entry[1])),
            7 => {
                let (len, status) = (choices.below(52), choices.below(2).into());
                end.push(REPLY_BYTES, len, status, &[call, choices.word()]);
                end.ring();
            }
            8 => {
                let id = u64::from(choices.byte()) << 32 | u64::from(choices.below(5));
                let len = u64::from(choices.below(4)) * u64::from(SLOT_LEN) / 2 + u64::from(choices.below(3));
                end.push(REPLY_SLOT, 0, choices.below(2).into(), &[call, id, len]);
            }
            9 => {
                let (kind, len) = (choices.byte(), choices.byte());
                end.push(kind, len, choices.short(), &[choices.word(), choices.word(), choices.word()]);
            }
            10 => end.push_stamped(choices.word(), &[choices.word()]),
            11 => end.store(forger::VERDICT, choices.word()),
            12 => {
                doorman.closed.store(choices.below(3) == 0, SeqCst);
                self.end = None;
            }
            _ => while rustix::io::write(&end.ring_end, &[0; 4096]).is_ok() {},
        }
    }
}

fn play(doorman: &Doorman, choices: &mut Choices<'_>) {
    doorman.closed.store(false, SeqCst);
    while doorman.ends.try_recv().is_ok() {}
    let client = Client::connect(&doorman.path, &options(2 << choices.below(3), SLOTS));
    let client = client.expect("it is welcomed as it should be");
    let end = doorman.ends.recv_timeout(Duration::from_secs(5)).ok();
    let mut scene =
        Scene { client, end, asked: Vec::new(), tickets: Vec::new(), replies: Vec::new(), slots: Vec::new() };
    let mut steps = 0;
    while choices.are_left() && steps < 300 {
        steps += 1;
        match choices.below(2) {
            0 => scene.client_acts(choices),
            _ => scene.server_acts(choices, doorman),
        }
    }
    // The server is gone for good. Every call ends, and every slot comes back.
    doorman.close();
    let Scene { mut client, end, tickets, replies, slots, .. } = scene;
    drop(end);
    for ticket in tickets {
        match client.wait(ticket, Deadline::within(Duration::from_secs(20))) {
            Err(failure) => {
                judge(&failure);
                assert!(!matches!(failure.why, CallError::DeadlinePassed), "nobody told it that the server is gone");
            }
            Ok(reply) => drop(reply),
        }
    }
    drop((replies, slots));
    // Abandoned calls have no ticket: they end when the client next notices the loss of the server.
    let start = Instant::now();
    loop {
        assert!(start.elapsed() < Duration::from_secs(30), "it never learns that the server is gone");
        let outcome = client.call(Ask::new(1_u16, b"last"), Deadline::within(Duration::from_millis(100)));
        // The server may have answered in advance, with a guessed call id.
        if let Err(failure) = outcome
            && let CallError::ServerGone { .. } | CallError::Expelled(_) | CallError::Broken(_) = failure.why
        {
            break;
        }
    }
    assert_eq!(client.in_flight(), 0);
    assert_eq!(client.census().free, SLOTS, "{:?}", client.census());
}

fuzz_target!(|data: &[u8]| {
    DOORMAN.with_borrow_mut(|doorman| play(doorman.get_or_insert_with(Doorman::new), &mut Choices(data)));
});
