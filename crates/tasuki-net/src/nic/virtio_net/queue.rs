//! The two queues of frames: receive and transmit. See `chains.rs` for their structure.

use tasuki_shm::arena::{Arena, Slot};
use tasuki_shm::slots::SlotId;

use super::chains::{Chains, Done};
use super::driver_state::{CHAINS_MAX, Counts, Loan};
use super::regs::HEADER_LEN;
use crate::nic::driver::{Receive, Transmit};
use crate::nic::loan::{lend, take_back};
use crate::nic::{NicError, NicMemory};
use crate::port::{Burst, Frame};

#[cfg(test)]
mod tests;

/// Length in bytes of the shortest meaningful frame: two addresses and a type.
pub const FRAME_MIN: u16 = 14;

/// The receive queue.
#[derive(Debug)]
pub struct Receiver {
    pub chains: Chains,
    /// Number of bytes of a slot that the device may fill.
    room: u32,
}

impl Receiver {
    /// Makes a queue for frames of up to `room` bytes.
    pub fn new(chains: Chains, room: u32) -> Self {
        Receiver { chains, room }
    }

    #[inline]
    fn receive_one(&mut self, arena: &Arena) -> Result<Option<Frame>, NicError> {
        let Some(Done { chain, slot, room, written }) = self.chains.peek()? else { return Ok(None) };
        let whole = frame_len(written, room)?;
        let slot = take_back(arena, slot)?;
        self.chains.take(chain);
        let Some(len) = whole else { return Ok(Some(fill_up(slot, written))) };
        // The device has just written it; prefetch it for the code that handles the burst.
        slot.fetch();
        Ok(Some(Frame { slot, len }))
    }

    /// Asks for an interrupt when the next frame comes, and looks once more. Returns whether there is one already.
    pub fn arm(&mut self) -> Result<bool, NicError> {
        self.chains.ring.arm()
    }

    /// Returns whether a frame has come that was not received.
    pub fn is_ready(&mut self) -> Result<bool, NicError> {
        Ok(self.chains.peek()?.is_some())
    }

    /// Returns the frames that have come and were not received, the oldest first, and the empty slots. The queue was
    /// reset.
    pub fn harvest(&mut self) -> Result<(Vec<Loan>, Vec<Loan>), NicError> {
        let (mut come, mut empty) = (Vec::new(), Vec::new());
        while let Some(Done { chain, slot, room, written }) = self.chains.peek()? {
            let slot = SlotId::from_word(slot);
            // One that would have to be filled up is dropped: nobody writes to these slots any more.
            match frame_len(written, room)? {
                Some(len) => come.push(Loan::new(slot, len.into(), 0)),
                None => empty.push(Loan::new(slot, room, 0)),
            }
            self.chains.take(chain);
        }
        empty.extend(self.chains.loans());
        Ok((come, empty))
    }
}

impl Receive for Receiver {
    type Counts = Counts;

    #[inline]
    fn receive(
        &mut self,
        arena: &Arena,
        burst: &mut Burst,
        full: usize,
        counts: &mut Counts,
    ) -> Result<usize, NicError> {
        let before = burst.len();
        self.chains.ring.disarm();
        // Bounded: a device that produces rubbish as fast as we drop it must not keep us here.
        for _ in before..full {
            match self.receive_one(arena) {
                Ok(Some(frame)) => {
                    counts.rx_packets += 1;
                    counts.rx_bytes += u64::from(frame.len);
                    burst.push(frame);
                }
                Ok(None) => break,
                // The next call finds the error again, first thing.
                Err(_) if burst.len() > before => break,
                Err(error) => return Err(error),
            }
        }
        Ok(burst.len() - before)
    }

    #[inline]
    fn post(&mut self, memory: &NicMemory, most: usize) -> usize {
        let room = self.chains.room();
        if room == 0 {
            return 0;
        }
        let (arena_at, slot_len) = (memory.arena_at(), u64::from(memory.arena().geometry().slot_len));
        let (chains, len) = (&mut self.chains, self.room);
        room - memory.arena().supply(most.min(room), |id| chains.post(arena_at, slot_len, id, len))
    }

    #[inline]
    fn room(&self) -> usize {
        self.chains.room()
    }

    fn is_empty(&self) -> bool {
        self.chains.is_empty()
    }

    #[inline]
    fn pending(&self) -> u64 {
        self.chains.cursor().used - self.chains.handled()
    }

    #[inline]
    fn handled(&self) -> u64 {
        self.chains.handled()
    }

    #[inline]
    fn next(&self) -> u64 {
        self.chains.cursor().used
    }

    #[inline]
    fn is_at(&self, position: u64, id: SlotId) -> bool {
        self.chains.is_at(position, id)
    }

    fn lend(&self, memory: &NicMemory) -> Result<(), NicError> {
        self.chains.lend(memory)
    }

    fn undo(&self, memory: &NicMemory, queue: usize) -> Result<(), NicError> {
        self.chains.undo(memory, queue)
    }
}

/// Fills a frame up with zeroes to the shortest length, and returns it, as QEMU does for other cards. Its network may bring any
/// number of bytes.
#[cold]
fn fill_up(mut slot: Slot, written: u32) -> Frame {
    slot.bytes_mut()[(written - HEADER_LEN) as usize..FRAME_MIN.into()].fill(0);
    Frame { slot, len: FRAME_MIN }
}

/// Returns the length of a frame in a slot with `room` bytes, or `None` if it has to be filled up. The device claims to have
/// written `written` bytes, with the header.
#[inline]
fn frame_len(written: u32, room: u32) -> Result<Option<u16>, NicError> {
    let len = written.wrapping_sub(HEADER_LEN);
    match u16::try_from(len) {
        Ok(short) if short < FRAME_MIN => Ok(None),
        Ok(whole) if len <= room => Ok(Some(whole)),
        _ => Err(NicError::Absurd { what: "the length of a used buffer", value: written.into() }),
    }
}

/// The transmit queue.
#[derive(Debug)]
pub struct Transmitter {
    pub chains: Chains,
    /// Length of the longest frame in bytes.
    len_max: u32,
}

impl Transmitter {
    /// Makes a queue for frames of up to `len_max` bytes.
    pub fn new(chains: Chains, len_max: u32) -> Self {
        Transmitter { chains, len_max }
    }

    /// Returns the unsent frames. The queue was reset.
    pub fn harvest(&mut self, arena: &Arena) -> Result<Vec<Loan>, NicError> {
        self.reap(arena)?;
        Ok(self.chains.loans())
    }
}

impl Transmit for Transmitter {
    type Counts = Counts;

    #[inline]
    fn reap(&mut self, arena: &Arena) -> Result<(), NicError> {
        // Bounded for the same reason as receiving.
        for _ in 0..CHAINS_MAX {
            // Ignore the length: it counts bytes that the device wrote, which is none here, but some devices say
            // otherwise.
            let Some(Done { chain, slot, .. }) = self.chains.peek()? else { break };
            drop(take_back(arena, slot)?);
            self.chains.take(chain);
        }
        Ok(())
    }

    #[inline]
    fn room(&self) -> usize {
        self.chains.room()
    }

    #[inline]
    fn can_make_room(&self, frames: usize) -> bool {
        self.chains.room() < frames && self.chains.has_unhandled()
    }

    #[inline]
    fn transmit(&mut self, memory: &NicMemory, burst: &mut Burst, counts: &mut Counts, given: &mut u64) -> usize {
        let (room, before) = (self.chains.room().min(burst.len()), self.chains.cursor().available);
        let (arena_at, slot_len) = (memory.arena_at(), u64::from(memory.arena().geometry().slot_len));
        for Frame { slot, len } in burst.drain(..room) {
            let len = u32::from(len);
            if !(FRAME_MIN.into()..=self.len_max).contains(&len) || !memory.arena().owns(&slot) {
                counts.tx_dropped += 1;
                continue;
            }
            counts.tx_packets += 1;
            counts.tx_bytes += u64::from(len);
            self.chains.post(arena_at, slot_len, lend(memory.arena(), slot), len);
        }
        *given = given.wrapping_add(self.chains.cursor().available - before);
        room
    }

    fn is_empty(&self) -> bool {
        self.chains.is_empty()
    }

    fn lend(&self, memory: &NicMemory) -> Result<(), NicError> {
        self.chains.lend(memory)
    }
}
