//! The handler of frames at a node's end of a VNI: it passes them on to the node's programs, or it is the node's
//! program itself.

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

/// Time for which a giver waits for room for its pending frames; after that a successor gets them.
const LAST_BURST: Duration = Duration::from_millis(1);

/// Time within which a working card sends a frame of 1,514 bytes (10 Mb/s: 1.2 ms).
const STUCK_AFTER: Duration = Duration::from_millis(2);

/// Time for which a frame from an uplink's NIC, and all frames behind it, wait for a node without room.
const WAIT: Duration = Duration::from_millis(2);

/// An end, by the place of the node's programs.
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
    /// Pending frames.
    burst: Burst,
}

impl Native {
    pub fn new(port: VniPort<Span<Line>>) -> Self {
        Native { arena: port.arena().clone(), port, burst: Burst::new() }
    }

    /// Runs one turn. Returns the number of frames moved.
    #[inline]
    pub fn turn(&mut self, handler: &mut impl FrameHandler, common: &Common) -> usize {
        let Ok(moved) = handler.turn(&mut self.port, &common.context(&self.arena, PROGRAM_STATE), &mut self.burst);
        moved
    }

    /// Looks at the rings for the first time; sends nothing yet.
    pub fn look(&mut self, handler: &mut impl FrameHandler, common: &Common) {
        let Ok(()) = handler.look(&mut self.port, &common.context(&self.arena, PROGRAM_STATE), &mut self.burst);
    }

    /// Ends the burst. Frames that find no room stay pending, and the successor receives them as we received them.
    pub fn stop(&mut self, handler: &mut impl FrameHandler, common: &Common) {
        let end = Instant::now() + LAST_BURST;
        while !self.burst.is_empty() {
            let Ok(went) = handler.send(&mut self.port, &common.context(&self.arena, PROGRAM_STATE), &mut self.burst);
            if went == 0 && Instant::now() > end {
                return;
            }
        }
    }

    /// Writes the state that a successor reads.
    pub fn conclude(&mut self, handler: &mut impl FrameHandler, common: &Common) {
        handler.remember(&common.program_state, PROGRAM_STATE, self.port.turns().wrapping_add(1));
        handler.conclude(&mut self.port, &self.burst);
    }

    fn arm(&mut self) -> Armed {
        if !self.burst.is_empty() {
            // The worker looks again soon, with or without a bell.
            return if self.port.waits().is_some() { Armed::Idle } else { Armed::Busy };
        }
        let Ok(armed) = self.port.arm();
        armed
    }
}

/// An uplink's end of a VNI, shared with the attachment of its NIC, which moves the frames.
#[derive(Debug)]
pub struct Joint {
    port: VniPort<Span<Line>>,
    /// Frames from the VNI that have not gone out.
    burst: Burst,
    /// Time since which none of them has gone out, if that was checked.
    stuck: Option<Instant>,
    /// Whether the NIC's attachment has moved frames since the last rest.
    pub is_joined: bool,
}

impl Joint {
    /// Gives the VNI frames from the NIC, from the front of `burst`. Returns the number of frames given.
    #[inline]
    pub fn give(&mut self, burst: &mut Burst) -> usize {
        self.port.forward(burst, &self.burst)
    }

    /// Receives frames from the VNI if all earlier frames have gone. Returns the number received.
    #[inline]
    pub fn take(&mut self) -> usize {
        if !self.burst.is_empty() {
            return 0;
        }
        let Ok(came) = self.port.receive(&mut self.burst);
        self.stuck = None;
        came
    }

    /// Returns whether the card takes no frames: its link is down, or its partner pauses. A card that is only busy
    /// sends a frame in less than that.
    fn is_stuck(&self) -> bool {
        self.stuck.is_some_and(|since| since.elapsed() >= STUCK_AFTER)
    }

    /// Copies the received frames into slots of the NIC's, oldest first. Returns the number copied. Drops frames
    /// longer than any card sends.
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

    /// Removes the first `count` frames, which have gone out.
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
    /// Another descriptor of the port's bell.
    bell_receiver: OwnedFd,
}

impl Uplink {
    /// Creates the end, and the part of it that the NIC's attachment shares.
    pub fn new(mut port: VniPort<Span<Line>>) -> Result<(Self, Rc<RefCell<Joint>>)> {
        // A switch drops frames for nodes that do not read, after a wait.
        port.set_patience(WAIT);
        let bell_receiver =
            port.fd().try_clone_to_owned().context("a descriptor cannot be copied; raise RLIMIT_NOFILE")?;
        let joint = Rc::new(RefCell::new(Joint { port, burst: Burst::new(), stuck: None, is_joined: false }));
        Ok((Uplink { joint: Rc::clone(&joint), bell_receiver }, joint))
    }

    /// Writes the state that a successor reads. Frames that have not gone out arrive at the successor again.
    pub fn conclude(&self) {
        let Joint { port, burst, .. } = &mut *self.joint.borrow_mut();
        port.conclude(burst);
    }

    fn port(&self) -> RefMut<'_, VniPort<Span<Line>>> {
        RefMut::map(self.joint.borrow_mut(), |joint| &mut joint.port)
    }

    fn arm(&self) -> Armed {
        let joint = &mut *self.joint.borrow_mut();
        // Without its NIC the end receives nothing, so it does not listen for bells.
        if !joint.is_joined {
            return Armed::Idle;
        }
        if !joint.burst.is_empty() {
            // No bell rings when the card takes frames again.
            joint.stuck.get_or_insert_with(Instant::now);
            return if joint.is_stuck() { Armed::Idle } else { Armed::Busy };
        }
        let Ok(armed) = joint.port.arm();
        armed
    }

    /// Returns the time until stuck frames are tried again.
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
    /// Runs one turn in each direction at an end that passes frames on. Returns the number of frames moved.
    #[inline]
    pub fn turn(&mut self) -> usize {
        each!(self, end => end.turn(), _port => 0)
    }

    /// Runs the last turn of an end that passes frames on.
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

    /// Returns the numbers of frames given to the node's programs, taken from them, and dropped. A program of the
    /// node's own counts the first two itself.
    pub fn moved(&mut self) -> (u64, u64, u64) {
        each!(self, end => (end.given, end.taken, end.dropped.sum()), port => (0, 0, port.dropped.sum()))
    }

    /// Returns the counts, by name.
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

    /// Calls `what` with the end's captures, if it has any.
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

    /// Returns the descriptor that becomes readable when the namespace sends.
    pub fn tap(&self) -> Option<BorrowedFd<'_>> {
        if let End::Tap(end) = self { end.tap() } else { None }
    }

    /// Returns whether the namespace's interface is gone.
    pub fn is_gone(&self) -> bool {
        matches!(self, End::Tap(end) if end.tap().is_none())
    }
}
