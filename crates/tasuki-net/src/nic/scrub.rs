//! Keeps memory that goes to another owner with its card free of frames that the old owner has handled.
//!
//! Slots are used again and again, and a frame's bytes stay in its slot until another frame overwrites them. A node
//! that hands its NIC's memory over (`keep`) must not hand those over. Wiping all of the memory takes longer than a
//! card's buffer lasts. So a node that expects a handover keeps its memory clean as it goes. The driver knows how
//! many bytes of frames each slot holds, and wipes them when it posts the slot to the card again. So posted slots
//! are clean at any time. Free slots are wiped shortly before the handover, and the slots of frames handled since,
//! at its end.
//!
//! The driver does not know of bytes that a program writes after the end of a frame, or into a slot that is never
//! sent: that program must wipe them.

use arrayvec::ArrayVec;
use tasuki_shm::arena::{Arena, Slot};

use super::{Nic, NicMemory};
use crate::port::Frame;

/// Number of slots that are wiped and posted at once.
pub(super) const CHUNK: usize = 64;

/// Size in bytes of a cache line: the card may write whole lines at the end of a frame.
const LINE: u32 = 64;

/// For each slot, the number of bytes from its beginning that may hold frame data.
#[derive(Debug)]
pub struct Dirt(Box<[u32]>);

impl Dirt {
    /// Returns the record for memory in which any slot may hold anything.
    pub(super) fn of(memory: &NicMemory) -> Self {
        let slots = memory.arena().geometry();
        Dirt(vec![slots.slot_len; slots.count as usize].into())
    }

    /// Records that these frames are in their slots.
    #[inline]
    pub(super) fn mark(&mut self, frames: &[Frame]) {
        for frame in frames {
            if let Some(dirty) = self.0.get_mut(frame.slot.id().index as usize) {
                *dirty = (*dirty).max(u32::from(frame.len).next_multiple_of(LINE));
            }
        }
    }

    /// Wipes the frame data in this slot.
    #[inline]
    pub(super) fn wipe(&mut self, slot: &mut Slot) {
        if let Some(dirty) = self.0.get_mut(slot.id().index as usize) {
            let len = std::mem::take(dirty) as usize;
            let bytes = slot.bytes_mut();
            let len = len.min(bytes.len());
            bytes[..len].fill(0);
        }
    }

    /// Wipes the slots that the arena gives out next, up to `most` (at most [`CHUNK`]). Returns their number.
    pub(super) fn clean(&mut self, arena: &Arena, most: usize) -> usize {
        let mut clean = ArrayVec::<Slot, CHUNK>::new();
        while clean.len() < most {
            let Some(mut slot) = arena.take() else { break };
            self.wipe(&mut slot);
            clean.push(slot);
        }
        // The arena supplies free slots in the order in which they are taken.
        clean.len()
    }

    /// Wipes free slots. Not for the data path: it holds them all meanwhile.
    pub(super) fn wipe_free(&mut self, arena: &Arena) {
        let last = self.0.iter().rposition(|&dirty| dirty > 0);
        let mut free = Vec::with_capacity(self.0.len());
        // Free slots come in the order of their places, so nothing is left to do after the last one that is not
        // clean.
        while let Some(mut slot) = arena.take() {
            let place = slot.id().index as usize;
            if last.is_none_or(|last| place > last) {
                break;
            }
            self.wipe(&mut slot);
            free.push(slot);
        }
    }
}

/// A driver that can hand its memory over without any data of the frames that it has handled.
///
/// ```text
///   start with NicOptions::scrub, or keep_clean ... wipe_free ... last burst, wipe_rest ─► driver state
/// ```
pub trait Scrub: Nic {
    /// From now on, gives no slot to the card with bytes of an older frame. Leaves the slots that the card has
    /// already: call this before the first frame is received. A driver whose predecessor kept the memory clean must
    /// call it, too.
    fn keep_clean(&mut self);

    /// Wipes the free slots: about a megabyte, which takes up to a millisecond if it was not done before. Call it
    /// shortly before a handover, between two bursts, and best twice: the second call has to wipe only the slots of
    /// frames that came during the first.
    fn wipe_free(&mut self);

    /// Wipes the remainder, once no received frame is pending: the slots of frames that were sent or freed since
    /// [`wipe_free`](Self::wipe_free), and the saved heads of frames. Afterwards no handled frame can be read in the
    /// memory.
    ///
    /// Returns false while frames are still to be sent: call it again.
    fn wipe_rest(&mut self) -> bool;
}
