//! The two queues of frames: receiving, and sending. What they are made of: `chains.rs`.

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

/// Bytes of the shortest frame that makes sense: two addresses and a type.
pub const FRAME_MIN: u32 = 14;
/// Slots that are wiped and posted at once.
const CHUNK: usize = 64;

/// The receive queue.
#[derive(Debug)]
pub struct Receiver {
    pub chains: Chains,
    /// Bytes of a slot that the device may fill.
    room: u32,
    /// Where the next frame that is saved is looked for first.
    hint: u64,
}

impl Receiver {
    /// A queue for frames of up to `room` bytes.
    pub fn new(chains: Chains, room: u32) -> Self {
        Receiver { chains, room, hint: 0 }
    }

    /// Appends frames that have come to `burst`; says how many. Their chains are posted again by [`refill`](Self::refill).
    ///
    /// # Errors
    /// When the device wrote what it must not. Frames from before that are delivered first.
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
        // Bounded, so that a device that produces rubbish as fast as we throw it away does not keep us here.
        for _ in 0..most.min(burst.remaining_capacity()) {
            match self.receive_one(arena) {
                Ok(Some(frame)) => {
                    counts.rx_packets += 1;
                    counts.rx_bytes += u64::from(frame.len);
                    burst.push(frame);
                }
                Ok(None) => break,
                // It is found again, first thing next time.
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
        // The device has just written it; whoever handles the burst finds it here then.
        slot.fetch();
        Ok(Some(Frame { slot, len }))
    }

    /// Gives the device free slots until it has one in each chain or none are left; says whether all have one.
    #[inline]
    pub fn refill(&mut self, memory: &NicMemory) -> bool {
        let room = self.chains.room();
        room == 0 || self.refill_some(memory, room) == room
    }

    /// The same, with `most` slots at most, for which there is room; says how many that were.
    #[inline]
    fn refill_some(&mut self, memory: &NicMemory, most: usize) -> usize {
        let (arena_at, slot_len) = (memory.arena_at(), u64::from(memory.arena().geometry().slot_len));
        let (chains, len) = (&mut self.chains, self.room);
        memory.arena().supply(most, |id| chains.post(arena_at, slot_len, id, len))
    }

    /// The same as [`refill`](Self::refill), with nothing of older frames in the slots.
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
            // Free slots are supplied in the order in which they are taken.
            drop(clean);
            if self.refill_some(memory, count) < most {
                return false;
            }
        }
        true
    }

    /// Asks for an interrupt when the next frame comes, and looks once more: whether there is one already.
    pub fn arm(&mut self) -> Result<bool, NicError> {
        self.chains.ring.arm()
    }

    /// Whether a frame has come that was not received.
    pub fn is_ready(&mut self) -> Result<bool, NicError> {
        Ok(self.chains.peek()?.is_some())
    }

    /// The first index whose frame is not handled yet, if those in `burst` are all that are in hand.
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

    /// Where a frame came that is in hand, as the ledger's places are named.
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

    /// Frames that have come and were not received, the oldest first, and the slots that are empty. The queue was reset.
    pub fn harvest(&mut self) -> Result<(Vec<Loan>, Vec<Loan>), NicError> {
        let mut come = Vec::new();
        while let Some(Done { chain, slot, room, written }) = self.chains.peek()? {
            come.push(Loan::new(SlotId::from_word(slot), frame_len(written, room)?.into(), 0));
            self.chains.take(chain);
        }
        Ok((come, self.chains.loans()))
    }
}

/// The length of a frame in a slot with `room` bytes, of which the device says that it wrote `written`, with the header.
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
    /// Longest frame.
    len_max: u32,
    /// Frames that were ever given to the device.
    given: u64,
}

impl Transmitter {
    /// A queue for frames of up to `len_max` bytes.
    pub fn new(chains: Chains, len_max: u32) -> Self {
        Transmitter { chains, len_max, given: 0 }
    }

    /// Frames that were ever given to the device.
    #[inline]
    pub fn given(&self) -> u64 {
        self.given
    }

    /// As predecessors have counted.
    pub fn set_given(&mut self, given: u64) {
        self.given = given;
    }

    /// Takes back what the device has sent.
    #[inline]
    pub fn reap(&mut self, arena: &Arena) -> Result<(), NicError> {
        // Bounded for the same reason as receiving.
        for _ in 0..CHAINS_MAX {
            // The length counts bytes that the device wrote, of which there are none; devices have been seen to say otherwise.
            let Some(Done { chain, slot, .. }) = self.chains.peek()? else { break };
            drop(take_back(arena, slot)?);
            self.chains.take(chain);
        }
        Ok(())
    }

    /// Whether more frames fit once it is committed that others were sent.
    #[inline]
    pub fn can_make_room(&self, frames: usize) -> bool {
        self.chains.room() < frames && self.chains.has_unhandled()
    }

    /// Takes frames from the front of `burst`, as many as there is room for; says how many. Those that cannot be sent are taken and thrown away.
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

    /// The frames that were not sent. The queue was reset.
    pub fn harvest(&mut self, arena: &Arena) -> Result<Vec<Loan>, NicError> {
        self.reap(arena)?;
        Ok(self.chains.loans())
    }
}
