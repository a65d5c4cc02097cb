//! What handles the frames of a node's end of a VNI: what passes them on to the node's programs, or the node's program itself.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use tasuki_net::memif::MemifNode;
use tasuki_net::port::{Armed, Burst, Port, Transactional};
use tasuki_net::switch::Switch;
use tasuki_net::tap::TapNode;
use tasuki_net::vni::Introduction;
use tasuki_net::vni::port::VniPort;
use tasuki_shm::arena::Arena;
use tasuki_shm::line::Line;
use tasuki_shm::region::{RegionError, Span};

use super::BOOK;
use crate::duty::Duty;
use crate::seat::Common;

/// How long a giver waits for room for what it has in hand; a successor gets it otherwise.
const LAST_BURST: Duration = Duration::from_millis(1);

/// By where the node's programs are.
pub enum End {
    Tap(Box<TapNode<Span<Line>>>),
    Memif(Box<MemifNode<Span<Line>>>),
    Native(Box<Native>),
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
    pub fn turn(&mut self, duty: &mut impl Duty, common: &Common) -> usize {
        let Ok(moved) = duty.turn(&mut self.port, &common.desk(&self.arena, BOOK), &mut self.burst);
        moved
    }

    /// The first look at the rings: nothing is sent yet.
    pub fn look(&mut self, duty: &mut impl Duty, common: &Common) {
        let Ok(()) = duty.look(&mut self.port, &common.desk(&self.arena, BOOK), &mut self.burst);
    }

    /// Ends the burst. What finds no room stays in hand, and comes to the successor as it came to us.
    pub fn stop(&mut self, duty: &mut impl Duty, common: &Common) {
        let end = Instant::now() + LAST_BURST;
        while !self.burst.is_empty() {
            let Ok(went) = duty.send(&mut self.port, &common.desk(&self.arena, BOOK), &mut self.burst);
            if went == 0 && Instant::now() > end {
                return;
            }
        }
    }

    /// Writes what a successor reads.
    pub fn conclude(&mut self, duty: &mut impl Duty, common: &Common) {
        duty.remember(&common.book, BOOK, self.port.turns().wrapping_add(1));
        duty.conclude(&mut self.port, &self.burst);
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

macro_rules! each {
    ($any:expr, $end:ident => $passes:expr, $native:ident => $what:expr) => {
        match $any {
            End::Tap($end) => $passes,
            End::Memif($end) => $passes,
            End::Native($native) => $what,
        }
    };
}

impl End {
    /// One turn in each direction, where frames are passed on; says how many moved.
    #[inline]
    pub fn turn(&mut self) -> usize {
        each!(self, end => end.turn(), _native => 0)
    }

    /// The last turn of what passes frames on.
    pub fn finish(&mut self) {
        each!(self, end => end.finish(), _native => ());
    }

    pub fn add(&mut self, kit: Introduction) -> Result<(), RegionError> {
        each!(self, end => end.vni().add(kit), native => native.port.add(kit))
    }

    pub fn remove(&mut self, number: u16) {
        each!(self, end => end.vni().remove(number), native => native.port.remove(number));
    }

    pub fn set_switch(&mut self, switch: Switch<Span<Line>>) {
        each!(self, end => end.set_switch(switch), native => native.port.set_switch(switch));
    }

    /// Frames given to the node's programs, taken from them, and dropped. A program of the node's own counts the first two itself.
    pub fn moved(&self) -> (u64, u64, u64) {
        each!(self, end => (end.given, end.taken, end.dropped.sum()), native => (0, 0, native.port.dropped.sum()))
    }

    /// What is counted, by name.
    pub fn counts(&self) -> Vec<(&'static str, u64)> {
        let mut counts = each!(self, end => vec![("given", end.given), ("taken", end.taken)],
            native => vec![("sent", native.port.given()), ("turns", native.port.turns())]);
        each!(self, end => counts.extend(end.dropped.counts()), native => counts.extend(native.port.dropped.counts()));
        if let End::Memif(end) = self {
            counts.extend([("clients_attached", end.clients.attached), ("clients_refused", end.clients.refused)]);
        }
        let pages_left = each!(self, end => end.pages_left(), native => native.port.pages_left());
        counts.push(("pages_left", pages_left.into()));
        counts
    }

    pub fn tick(&mut self, now: Instant) -> bool {
        each!(self, end => end.tick(now), native => native.port.tick(now))
    }

    pub fn arm(&mut self) -> Armed {
        each!(self, end => end.arm(), native => native.arm())
    }

    pub fn waits(&self) -> Option<Duration> {
        each!(self, end => end.waits(), native => native.port.waits().filter(|_| !native.burst.is_empty()))
    }

    pub fn bell(&self) -> Option<BorrowedFd<'_>> {
        match self {
            End::Tap(end) => Some(end.bell()),
            End::Memif(end) => end.bell(),
            End::Native(native) => Some(native.port.fd()),
        }
    }

    pub fn wake(&mut self) {
        match self {
            End::Tap(end) => end.wake(),
            End::Memif(end) => end.wake(true),
            End::Native(native) => native.port.wake(),
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
