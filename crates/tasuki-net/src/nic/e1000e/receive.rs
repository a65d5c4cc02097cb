//! The receive rings of all queues.

use arrayvec::ArrayVec;
use tasuki_shm::arena::Arena;
use tasuki_shm::slots::SlotId;

use super::counters::Counters;
use super::driver_state::{DriverState, QUEUES_MAX, ReceiveDriverState};
use super::ring::{Lengths, ReceiveRing};
use super::setup::Shape;
use crate::nic::driver::Receive;
use crate::nic::{NicError, NicMemory};
use crate::port::{BURST_MAX, Burst};

/// The receive rings of all queues.
#[derive(Debug)]
pub struct ReceiveRings {
    pub rings: ArrayVec<ReceiveRing, QUEUES_MAX>,
    /// Queue that is received from first; the queues take turns.
    first: usize,
    lengths: Lengths,
}

impl ReceiveRings {
    /// Returns the rings at these cursors. Changes nothing in them.
    pub fn at(memory: &NicMemory, shape: Shape, cursors: &[ReceiveDriverState; QUEUES_MAX]) -> Self {
        let ring = |queue: usize| ReceiveRing::at(memory, queue, shape.ring, cursors[queue]);
        let rings = (0..usize::from(shape.queues)).map(ring).collect();
        ReceiveRings { rings, first: 0, lengths: Lengths { buffer: shape.buffer, frame: shape.frame() } }
    }

    /// Returns empty rings.
    pub fn empty(memory: &NicMemory, shape: Shape) -> Self {
        let empty = Self::at(memory, shape, &[ReceiveDriverState::default(); QUEUES_MAX]);
        empty.rings.iter().for_each(ReceiveRing::clear);
        empty
    }

    #[inline]
    fn each(&self, position: impl Fn(&ReceiveRing) -> u32) -> [u32; QUEUES_MAX] {
        let mut positions = [0; QUEUES_MAX];
        positions.iter_mut().zip(&self.rings).for_each(|(of, ring)| *of = position(ring));
        positions
    }

    /// Returns whether a frame, or the remainder of one, has come.
    pub fn is_ready(&self) -> bool {
        self.rings.iter().any(ReceiveRing::is_ready)
    }

    /// Takes over the slots of a driver state that was checked.
    pub fn take_over(&self, driver_state: &DriverState) {
        self.rings.iter().zip(&driver_state.posted).for_each(|(ring, posted)| ring.take_over(posted));
    }

    /// Writes cursors and posted slots for a successor.
    pub fn to_driver_state(&self, driver_state: &mut DriverState) {
        driver_state.receive.fill(ReceiveDriverState::default());
        let places = driver_state.receive.iter_mut().zip(&mut driver_state.posted);
        for (ring, (cursors, posted)) in self.rings.iter().zip(places) {
            *cursors = ring.to_driver_state(posted);
        }
    }
}

impl Receive for ReceiveRings {
    type Counts = Counters;
    type Positions = [u32; QUEUES_MAX];

    /// Receives frames from each queue in turn.
    #[inline]
    fn receive(
        &mut self,
        arena: &Arena,
        burst: &mut Burst,
        most: usize,
        counts: &mut Counters,
    ) -> Result<usize, NicError> {
        let queues = self.rings.len();
        let full = burst.len().saturating_add(most).min(BURST_MAX);
        let mut frames = 0;
        for turn in 0..queues {
            let ring = &mut self.rings[(self.first + turn) % queues];
            match ring.receive(arena, self.lengths, &mut counts.dropped, burst, full) {
                Ok(count) => frames += count,
                // Deliver the frames from before the fault. The next call finds the fault again.
                Err(_) if frames > 0 => return Ok(frames),
                Err(error) => return Err(error),
            }
        }
        self.first ^= 1;
        Ok(frames)
    }

    #[inline]
    fn post(&mut self, memory: &NicMemory, most: usize) -> usize {
        let mut left = most;
        for ring in &mut self.rings {
            let before = ring.room();
            ring.refill(memory, left);
            left -= before - ring.room();
        }
        self.room()
    }

    #[inline]
    fn room(&self) -> usize {
        self.rings.iter().map(ReceiveRing::room).sum()
    }

    fn is_starved(&self) -> bool {
        !self.rings.iter().all(ReceiveRing::has_slots)
    }

    #[inline]
    fn has_unhandled(&self) -> bool {
        self.rings.iter().any(ReceiveRing::has_unhandled)
    }

    #[inline]
    fn handled(&self) -> [u32; QUEUES_MAX] {
        self.each(ReceiveRing::handled)
    }

    #[inline]
    fn handled_but(&self, burst: &Burst) -> [u32; QUEUES_MAX] {
        self.each(|ring| ring.handled_but(burst))
    }

    #[inline]
    fn position_of(&mut self, id: SlotId) -> Option<(usize, u32)> {
        self.rings.iter_mut().enumerate().find_map(|(queue, ring)| Some((queue, ring.position_of(id)?)))
    }

    fn lend(&self, memory: &NicMemory) -> Result<(), NicError> {
        self.rings.iter().try_for_each(|ring| ring.lend(memory))
    }

    fn undo(&self, memory: &NicMemory) -> Result<(), NicError> {
        self.rings.iter().enumerate().try_for_each(|(queue, ring)| ring.undo(memory, queue))
    }
}
