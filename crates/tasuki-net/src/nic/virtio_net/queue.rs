//! The two queues of frames: receive and transmit. See `chains.rs` for their structure.

use arrayvec::ArrayVec;
use tasuki_shm::arena::{Arena, Slot};
use tasuki_shm::slots::SlotId;

use super::chains::{Chains, Done, lend, position, take_back};
use super::driver_state::{CHAINS_MAX, Counts, Loan};
use super::regs::HEADER_LEN;
use crate::nic::scrub::Dirt;
use crate::nic::{NicError, NicMemory};
use crate::port::{Burst, Frame};

#[cfg(test)]
mod tests;

/// Length in bytes of the shortest meaningful frame: two addresses and a type.
pub const FRAME_MIN: u32 = 14;
/// Number of slots wiped and posted at once.
const CHUNK: usize = 64;

/// The receive queue.
#[derive(Debug)]
pub struct Receiver {
    pub chains: Chains,
    /// Number of bytes of a slot that the device may fill.
    room: u32,
    /// Index where the search for the next saved frame starts.
    hint: u64,
}

impl Receiver {
    /// Makes a queue for frames of up to `room` bytes.
    pub fn new(chains: Chains, room: u32) -> Self {
        Receiver { chains, room, hint: 0 }
    }

    /// Appends frames that have come to `burst`. Returns their number. [`refill`](Self::refill) posts their chains
    /// again.
    ///
    /// # Errors
    /// The device wrote what it must not. Earlier frames are delivered first.
    #[inline]
    pub fn receive(
        &mut self,
        arena: &Arena,
        burst: &mut Burst,
        most: usize,
        counts: &mut Counts,
    ) -> Result<usize, NicError> {
        let before = burst.len();
        self.chains.ring.disarm();
        // Bounded: a device that produces rubbish as fast as we drop it must not keep us here.
        for _ in 0..most.min(burst.remaining_capacity()) {
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
    fn receive_one(&mut self, arena: &Arena) -> Result<Option<Frame>, NicError> {
        let Some(Done { chain, slot, room, written }) = self.chains.peek()? else { return Ok(None) };
        let len = frame_len(written, room)?;
        let slot = take_back(arena, slot)?;
        self.chains.take(chain);
        // The device has just written it; prefetch it for the code that handles the burst.
        slot.fetch();
        Ok(Some(Frame { slot, len }))
    }

    /// Gives the device free slots until every chain has one or none are left. Returns whether every chain has one.
    #[inline]
    pub fn refill(&mut self, memory: &NicMemory) -> bool {
        let room = self.chains.room();
        room == 0 || self.refill_some(memory, room) == room
    }

    /// Gives the device up to `most` slots, for which there must be room. Returns their number.
    #[inline]
    fn refill_some(&mut self, memory: &NicMemory, most: usize) -> usize {
        let (arena_at, slot_len) = (memory.arena_at(), u64::from(memory.arena().geometry().slot_len));
        let (chains, len) = (&mut self.chains, self.room);
        memory.arena().supply(most, |id| chains.post(arena_at, slot_len, id, len))
    }

    /// Like [`refill`](Self::refill), but first wipes older frames from the slots.
    pub fn refill_clean(&mut self, memory: &NicMemory, dirt: &mut Dirt) -> bool {
        while self.chains.room() > 0 {
            let most = self.chains.room().min(CHUNK);
            let mut clean = ArrayVec::<Slot, CHUNK>::new();
            while clean.len() < most {
                let Some(mut slot) = memory.arena().take() else { break };
                dirt.wipe(&mut slot);
                clean.push(slot);
            }
            let count = clean.len();
            // The arena supplies free slots in the order in which it gives them out.
            drop(clean);
            if self.refill_some(memory, count) < most {
                return false;
            }
        }
        true
    }

    /// Asks for an interrupt when the next frame comes, and looks once more. Returns whether there is one already.
    pub fn arm(&mut self) -> Result<bool, NicError> {
        self.chains.ring.arm()
    }

    /// Returns whether a frame has come that was not received.
    pub fn is_ready(&mut self) -> Result<bool, NicError> {
        Ok(self.chains.peek()?.is_some())
    }

    /// Returns the first index whose frame is not handled yet, if only the frames in `burst` are in hand.
    #[inline]
    pub fn handled_but(&self, burst: &Burst) -> u64 {
        match burst.is_empty() {
            true => self.chains.cursor().used,
            false => self.first_of(burst),
        }
    }

    #[cold]
    fn first_of(&self, burst: &Burst) -> u64 {
        let used = self.chains.cursor().used;
        let in_hand = |&index: &u64| burst.iter().any(|frame| self.chains.is_at(index, frame.slot.id()));
        (self.chains.handled()..used).find(in_hand).unwrap_or(used)
    }

    /// Returns the place of a frame in hand, as the ledger names it.
    #[inline]
    pub fn position_of(&mut self, id: SlotId) -> Option<u32> {
        let mut received = self.chains.handled()..self.chains.cursor().used;
        let index = match received.contains(&self.hint) && self.chains.is_at(self.hint, id) {
            true => self.hint,
            false => received.find(|&index| self.chains.is_at(index, id))?,
        };
        self.hint = index + 1;
        Some(position(index))
    }

    /// Returns the frames that have come and were not received, the oldest first, and the empty slots. The queue was
    /// reset.
    pub fn harvest(&mut self) -> Result<(Vec<Loan>, Vec<Loan>), NicError> {
        let mut come = Vec::new();
        while let Some(Done { chain, slot, room, written }) = self.chains.peek()? {
            come.push(Loan::new(SlotId::from_word(slot), frame_len(written, room)?.into(), 0));
            self.chains.take(chain);
        }
        Ok((come, self.chains.loans()))
    }
}

/// Returns the length of a frame in a slot with `room` bytes. The device claims to have written `written` bytes, with
/// the header.
#[inline]
fn frame_len(written: u32, room: u32) -> Result<u16, NicError> {
    let len = written.wrapping_sub(HEADER_LEN);
    match u16::try_from(len) {
        Ok(short) if (FRAME_MIN..=room).contains(&len) => Ok(short),
        _ => Err(NicError::Absurd { what: "the length of a used buffer", value: written.into() }),
    }
}

/// The transmit queue.
#[derive(Debug)]
pub struct Transmitter {
    pub chains: Chains,
    /// Length of the longest frame in bytes.
    len_max: u32,
    /// Number of frames ever given to the device.
    given: u64,
}

impl Transmitter {
    /// Makes a queue for frames of up to `len_max` bytes.
    pub fn new(chains: Chains, len_max: u32) -> Self {
        Transmitter { chains, len_max, given: 0 }
    }

    /// Returns the number of frames ever given to the device.
    #[inline]
    pub fn given(&self) -> u64 {
        self.given
    }

    /// Sets the number that predecessors have counted.
    pub fn set_given(&mut self, given: u64) {
        self.given = given;
    }

    /// Takes back the frames that the device has sent.
    #[inline]
    pub fn reap(&mut self, arena: &Arena) -> Result<(), NicError> {
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

    /// Returns whether more frames fit once sent ones are committed as such.
    #[inline]
    pub fn can_make_room(&self, frames: usize) -> bool {
        self.chains.room() < frames && self.chains.has_unhandled()
    }

    /// Takes frames from the front of `burst`, as many as there is room for. Returns their number. Takes and drops
    /// frames that cannot be sent.
    #[inline]
    pub fn transmit(&mut self, memory: &NicMemory, burst: &mut Burst, counts: &mut Counts) -> usize {
        let room = self.chains.room().min(burst.len());
        let (arena_at, slot_len) = (memory.arena_at(), u64::from(memory.arena().geometry().slot_len));
        for Frame { slot, len } in burst.drain(..room) {
            let len = u32::from(len);
            if !(FRAME_MIN..=self.len_max).contains(&len) || !memory.arena().owns(&slot) {
                counts.tx_dropped += 1;
                continue;
            }
            counts.tx_packets += 1;
            counts.tx_bytes += u64::from(len);
            self.given = self.given.wrapping_add(1);
            self.chains.post(arena_at, slot_len, lend(memory.arena(), slot), len);
        }
        room
    }

    /// Returns the unsent frames. The queue was reset.
    pub fn harvest(&mut self, arena: &Arena) -> Result<Vec<Loan>, NicError> {
        self.reap(arena)?;
        Ok(self.chains.loans())
    }
}
