//! What handles the frames of a node's end of a VNI: what passes them on to the node's programs, or the node's program itself.

use std::cell::{RefCell, RefMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tasuki_net::capture::Captures;
use tasuki_net::memif::MemifNode;
use tasuki_net::own::Own;
use tasuki_net::port::{Armed, Burst, Frame, Port, Transactional};
use tasuki_net::switch::Switch;
use tasuki_net::tap::TapNode;
use tasuki_net::vni::PeerDescriptor;
use tasuki_net::vni::port::VniPort;
use tasuki_relay::message::heartbeat;
use tasuki_shm::arena::Arena;
use tasuki_shm::line::Line;
use tasuki_shm::region::{RegionError, Span};

use super::PROGRAM_STATE;
use crate::attachment::Common;
use crate::handler::{FrameHandler, HandlerContext};
use crate::tap::{LONGEST, SHORTEST};

/// How long a giver waits for room for what it has in hand; a successor gets it otherwise.
const LAST_BURST: Duration = Duration::from_millis(1);

/// A card that sends at all sends a frame of 1,514 bytes within this time (10 Mb/s: 1.2 ms).
const STUCK_AFTER: Duration = Duration::from_millis(2);

/// How long a frame from an uplink's NIC waits for a node without room, and all behind it.
const WAIT: Duration = Duration::from_millis(2);

/// By where the node's programs are.
pub enum End {
    Tap(Box<TapNode<Span<Line>>>),
    Memif(Box<MemifNode<Span<Line>>>),
    Native(Box<Native>),
    Uplink(Uplink),
}

/// The end of a node whose program is the worker.
pub struct Native {
    port: VniPort<Span<Line>>,
    arena: Arena,
    /// What is in hand.
    burst: Burst,
}

impl Native {
    pub fn new(port: VniPort<Span<Line>>) -> Self {
        Native { arena: port.arena().clone(), port, burst: Burst::new() }
    }

    /// One turn; says how many frames moved.
    #[inline]
    pub fn turn(&mut self, handler: &mut impl FrameHandler, common: &Common) -> usize {
        let Ok(moved) = handler.turn(&mut self.port, &common.context(&self.arena, PROGRAM_STATE), &mut self.burst);
        moved
    }

    /// The first look at the rings: nothing is sent yet.
    pub fn look(&mut self, handler: &mut impl FrameHandler, common: &Common) {
        let Ok(()) = handler.look(&mut self.port, &common.context(&self.arena, PROGRAM_STATE), &mut self.burst);
    }

    /// Ends the burst. What finds no room stays in hand, and comes to the successor as it came to us.
    pub fn stop(&mut self, handler: &mut impl FrameHandler, common: &Common) {
        let end = Instant::now() + LAST_BURST;
        while !self.burst.is_empty() {
            let Ok(went) = handler.send(&mut self.port, &common.context(&self.arena, PROGRAM_STATE), &mut self.burst);
            if went == 0 && Instant::now() > end {
                return;
            }
        }
    }

    /// Writes what a successor reads.
    pub fn conclude(&mut self, handler: &mut impl FrameHandler, common: &Common) {
        handler.remember(&common.program_state, PROGRAM_STATE, self.port.turns().wrapping_add(1));
        handler.conclude(&mut self.port, &self.burst);
    }

    fn arm(&mut self) -> Armed {
        if !self.burst.is_empty() {
            // It looks again soon, rung for or not.
            return if self.port.waits().is_some() { Armed::Idle } else { Armed::Busy };
        }
        let Ok(armed) = self.port.arm();
        armed
    }
}

/// An uplink's end of a VNI, as the attachment of its NIC has it too: that one moves the frames.
#[derive(Debug)]
pub struct Joint {
    port: VniPort<Span<Line>>,
    /// What came from the VNI and has not gone out,
    burst: Burst,
    /// and since when nothing of it has, as far as that was looked at.
    stuck: Option<Instant>,
    /// Somebody has moved frames since the last rest.
    pub is_joined: bool,
}

impl Joint {
    /// Gives the VNI what came from the NIC, from the front of `burst`; says how much.
    #[inline]
    pub fn give(&mut self, burst: &mut Burst) -> usize {
        self.port.forward(burst, &self.burst)
    }

    /// Takes in what came from the VNI, if what came before has gone; says how much that is.
    #[inline]
    pub fn take(&mut self) -> usize {
        if !self.burst.is_empty() {
            return 0;
        }
        let Ok(came) = self.port.receive(&mut self.burst);
        self.stuck = None;
        came
    }

    /// Whether the card takes nothing: its link is down, or its partner pauses. One that is only busy sends a frame in less than that.
    fn is_stuck(&self) -> bool {
        self.stuck.is_some_and(|since| since.elapsed() >= STUCK_AFTER)
    }

    /// Copies what came into slots of the NIC's, oldest first; says how much that is. What no card sends is dropped.
    #[inline]
    pub fn fill(&mut self, context: &HandlerContext<'_>, into: &mut Burst) -> usize {
        let before = self.burst.len();
        self.burst.retain(|frame| usize::from(frame.len) <= LONGEST);
        context.heartbeat.add(heartbeat::REFUSED, (before - self.burst.len()) as u64);
        for frame in &self.burst {
            let Some(mut slot) = context.arena.take() else { break };
            let bytes = frame.bytes();
            let len = bytes.len().max(SHORTEST);
            let room = &mut slot.bytes_mut()[..len];
            room[..bytes.len()].copy_from_slice(bytes);
            room[bytes.len()..].fill(0);
            into.push(Frame { slot, len: u16::try_from(len).expect("no longer than the longest") });
        }
        into.len()
    }

    /// So much of it has gone out.
    #[inline]
    pub fn went(&mut self, count: usize) {
        if count > 0 {
            self.stuck = None;
        }
        self.burst.drain(..count);
    }
}

/// The end of an uplink.
pub struct Uplink {
    joint: Rc<RefCell<Joint>>,
    /// Its port's descriptor, once more.
    bell_receiver: OwnedFd,
}

impl Uplink {
    /// An end, and what the NIC's attachment has of it.
    pub fn new(mut port: VniPort<Span<Line>>) -> Result<(Self, Rc<RefCell<Joint>>)> {
        // A switch drops for those who do not read.
        port.set_patience(WAIT);
        let bell_receiver =
            port.fd().try_clone_to_owned().context("a descriptor cannot be copied; raise RLIMIT_NOFILE")?;
        let joint = Rc::new(RefCell::new(Joint { port, burst: Burst::new(), stuck: None, is_joined: false }));
        Ok((Uplink { joint: Rc::clone(&joint), bell_receiver }, joint))
    }

    /// Writes what a successor reads: what has not gone out comes to it again.
    pub fn conclude(&self) {
        let Joint { port, burst, .. } = &mut *self.joint.borrow_mut();
        port.conclude(burst);
    }

    fn port(&self) -> RefMut<'_, VniPort<Span<Line>>> {
        RefMut::map(self.joint.borrow_mut(), |joint| &mut joint.port)
    }

    fn arm(&self) -> Armed {
        let joint = &mut *self.joint.borrow_mut();
        // Without its NIC it takes nothing: who rings is not heard.
        if !joint.is_joined {
            return Armed::Idle;
        }
        if !joint.burst.is_empty() {
            // Nobody rings when the card takes something again.
            joint.stuck.get_or_insert_with(Instant::now);
            return if joint.is_stuck() { Armed::Idle } else { Armed::Busy };
        }
        let Ok(armed) = joint.port.arm();
        armed
    }

    /// How soon what is stuck is tried again.
    fn waits(&self) -> Option<Duration> {
        let joint = self.joint.borrow();
        (joint.is_joined && joint.is_stuck()).then_some(LAST_BURST)
    }

    fn wake(&self) {
        let joint = &mut *self.joint.borrow_mut();
        joint.is_joined = false;
        joint.port.wake();
    }
}

macro_rules! each {
    ($any:expr, $end:ident => $passes:expr, $port:ident => $what:expr) => {
        match $any {
            End::Tap($end) => $passes,
            End::Memif($end) => $passes,
            End::Native(native) => {
                let $port = &mut native.port;
                $what
            }
            End::Uplink(uplink) => {
                let $port = &mut *uplink.port();
                $what
            }
        }
    };
}

impl End {
    /// One turn in each direction, where frames are passed on; says how many moved.
    #[inline]
    pub fn turn(&mut self) -> usize {
        each!(self, end => end.turn(), _port => 0)
    }

    /// The last turn of what passes frames on.
    pub fn finish(&mut self) {
        each!(self, end => end.finish(), _port => ());
    }

    pub fn add(&mut self, bundle: PeerDescriptor) -> Result<(), RegionError> {
        each!(self, end => end.vni().add(bundle), port => port.add(bundle))
    }

    pub fn remove(&mut self, number: u16) {
        each!(self, end => end.vni().remove(number), port => port.remove(number));
    }

    pub fn set_own(&mut self, number: u16, own: Own) {
        each!(self, end => end.vni().set_own(number, own), port => port.set_own(number, own));
    }

    pub fn set_switch(&mut self, switch: Switch<Span<Line>>) {
        each!(self, end => end.set_switch(switch), port => port.set_switch(switch));
    }

    /// Frames given to the node's programs, taken from them, and dropped. A program of the node's own counts the first two itself.
    pub fn moved(&mut self) -> (u64, u64, u64) {
        each!(self, end => (end.given, end.taken, end.dropped.sum()), port => (0, 0, port.dropped.sum()))
    }

    /// What is counted, by name.
    pub fn counts(&mut self) -> Vec<(&'static str, u64)> {
        let mut counts = each!(self, end => vec![("given", end.given), ("taken", end.taken)],
            port => vec![("sent", port.given()), ("turns", port.turns())]);
        each!(self, end => counts.extend(end.dropped.counts()), port => counts.extend(port.dropped.counts()));
        if let End::Memif(end) = self {
            counts.extend([("clients_attached", end.clients.attached), ("clients_refused", end.clients.refused)]);
        }
        let pages_left = each!(self, end => end.pages_left(), port => port.pages_left());
        counts.push(("pages_left", pages_left.into()));
        counts
    }

    /// Whoever looks on, if anybody does.
    pub fn with_captures<R>(&mut self, what: impl FnOnce(&mut Option<Box<Captures>>) -> R) -> R {
        each!(self, end => what(end.vni().captures()), port => what(port.captures()))
    }

    pub fn tick(&mut self, now: Instant) -> bool {
        each!(self, end => end.tick(now), port => port.tick(now))
    }

    pub fn arm(&mut self) -> Armed {
        match self {
            End::Tap(end) => end.arm(),
            End::Memif(end) => end.arm(),
            End::Native(native) => native.arm(),
            End::Uplink(uplink) => uplink.arm(),
        }
    }

    pub fn waits(&self) -> Option<Duration> {
        match self {
            End::Tap(end) => end.waits(),
            End::Memif(end) => end.waits(),
            End::Native(native) => native.port.waits().filter(|_| !native.burst.is_empty()),
            End::Uplink(uplink) => uplink.waits(),
        }
    }

    pub fn bell(&self) -> Option<BorrowedFd<'_>> {
        match self {
            End::Tap(end) => Some(end.bell()),
            End::Memif(end) => end.bell(),
            End::Native(native) => Some(native.port.fd()),
            End::Uplink(uplink) => Some(uplink.bell_receiver.as_fd()),
        }
    }

    pub fn wake(&mut self) {
        match self {
            End::Tap(end) => end.wake(),
            End::Memif(end) => end.wake(true),
            End::Native(native) => native.port.wake(),
            End::Uplink(uplink) => uplink.wake(),
        }
    }

    /// What becomes readable when the namespace sends.
    pub fn tap(&self) -> Option<BorrowedFd<'_>> {
        if let End::Tap(end) = self { end.tap() } else { None }
    }

    /// Whether the namespace's interface is gone.
    pub fn is_gone(&self) -> bool {
        matches!(self, End::Tap(end) if end.tap().is_none())
    }
}
