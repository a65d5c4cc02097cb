use std::convert::Infallible;
use std::os::fd::BorrowedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};

use tasuki_net::nic::Mac;
use tasuki_net::port::{Armed, Frame, Port};
use tasuki_relay::message::program_state;
use tasuki_shm::arena::{Arena, Detach, Geometry};
use tasuki_shm::region::{Pages, Region};
use tasuki_testing::{polled, until};

use super::*;
use crate::lease_page::Heartbeat;
use crate::program::Fate;

/// Number of frames that arrive at once.
const CAME: u8 = 4;

/// A port at which these frames arrive, and that takes none.
struct Full(Vec<Frame>);

impl Port for Full {
    type Fault = Infallible;

    fn receive_some(&mut self, burst: &mut Burst, most: usize) -> Result<usize, Infallible> {
        let came = most.min(self.0.len());
        burst.extend(self.0.drain(..came));
        Ok(came)
    }

    fn transmit(&mut self, _: &mut Burst) -> Result<usize, Infallible> {
        Ok(0)
    }

    fn arm(&mut self) -> Result<Armed, Infallible> {
        Ok(Armed::Idle)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        unreachable!("these tests do not sleep")
    }
}

impl Transactional for Full {
    fn station(&self) -> Mac {
        Mac([2, 0, 0, 0, 0, 1])
    }

    fn conclude(&mut self, _: &Burst) {}

    fn withdraw(&mut self) {}

    fn save(&mut self, _: &Frame) {}

    fn takes(&mut self, _: &Burst) -> bool {
        false
    }

    fn turns(&self) -> u64 {
        0
    }

    fn given(&self) -> u64 {
        0
    }
}

/// A program at work on such a port.
struct Stage<P: Program> {
    hosted: Hosted<P>,
    nic: Full,
    arena: Arena,
    heartbeat: Heartbeat,
    program_state: ProgramState,
    burst: Burst,
}

impl<P: Program> Stage<P> {
    fn new() -> Self {
        let memory = |len| Region::create("test", len, Pages::Small).expect("memory");
        let fd = |len| memory(len).fd().try_clone_to_owned().expect("a descriptor");
        let table = memory(4096).span(0, 2).expect("lines");
        let arena = Arena::create("test", Geometry { slot_len: 4096, count: 16 }, table, Detach::Move);
        Stage {
            hosted: Hosted::new(&String::new()),
            nic: Full(Vec::new()),
            arena: arena.expect("an arena"),
            heartbeat: Heartbeat::over(fd(heartbeat::LEN)).expect("a heartbeat"),
            program_state: ProgramState::over(fd(program_state::LEN)).expect("a program state"),
            burst: Burst::new(),
        }
    }

    fn turn(&mut self) {
        let Stage { arena, heartbeat, program_state, .. } = self;
        let mut context = HandlerContext { arena, heartbeat, program_state, nic: 0, uplink: None };
        let Ok(_) = self.hosted.turn(&mut self.nic, &mut context, &mut self.burst);
    }
}

/// Copies each frame, and panics at the second; it catches that, and sends none but those that went before.
struct Clumsy;

impl Program for Clumsy {
    type State = u64;
    const STATE: (u32, u32) = (1, 1);

    fn new(_: &str) -> Result<Self, String> {
        Ok(Clumsy)
    }

    fn turn<N: Transactional>(&mut self, _: &mut u64, turn: &mut Turn<'_, N>) {
        let caught = catch_unwind(AssertUnwindSafe(|| {
            turn.frames(|frame| {
                let bytes = frame.bytes_mut().expect("a slot");
                assert_ne!(bytes[0], 2, "the second frame");
                Fate::Sent
            });
        }));
        assert!(caught.is_err() && turn.came() == 0);
    }
}

#[test]
fn frames_that_a_caught_panic_left_undecided_are_dropped() {
    let mut stage = Stage::<Clumsy>::new();
    for number in 1..=CAME {
        let mut slot = stage.arena.take().expect("a slot");
        slot.bytes_mut()[0] = number;
        stage.nic.0.push(Frame { slot, len: 60 });
    }
    stage.turn();
    let numbers = |burst: &Burst| burst.iter().map(|frame| frame.bytes()[0]).collect::<Vec<_>>();
    assert_eq!(numbers(&stage.burst), [1], "no other frame was answered");
    assert_eq!(stage.hosted.ours, 1, "the bit of its copy");
    assert_eq!(numbers(&stage.hosted.kept), [1, 2, 3, 4], "the frames as they came, for a successor");
    while let Some(slot) = stage.arena.take() {
        assert!(slot.bytes().iter().all(|byte| *byte == 0), "a copy that did not go is wiped");
        std::mem::forget(slot);
    }
}

/// Counts its turns, and always says the same rest.
struct Beacon;

impl Program for Beacon {
    type State = u64;
    const STATE: (u32, u32) = (2, 1);

    fn new(_: &str) -> Result<Self, String> {
        Ok(Beacon)
    }

    fn turn<N: Transactional>(&mut self, turns: &mut u64, _: &mut Turn<'_, N>) {
        *turns += 1;
    }

    fn rest(&self, _: &u64) -> Option<Duration> {
        Some(Duration::from_millis(1))
    }
}

#[test]
fn a_program_whose_rest_is_constant_gets_turns_without_frames() {
    let mut stage = Stage::<Beacon>::new();
    for turns in 1..=2 {
        until("the end of a rest before a sleep", || stage.hosted.rest() == Some(Duration::ZERO));
        stage.turn();
        assert_eq!(stage.hosted.state, turns, "the first look after a sleep");
    }
    // A worker that polls, or has another busy NIC, never sleeps.
    polled("the end of a rest between looks", || {
        stage.turn();
        (stage.hosted.state == 3).then_some(())
    });
}
