//! Memory that goes to another owner with its card, and holds nothing of the frames that the old one has handled.
//!
//! Slots are used again and again, and a frame's bytes stay in its slot until another's lie over them. A node that hands its NIC's memory on (`keep`)
//! must not hand on those. Wiping all of it takes longer than a card's buffer lasts. So whoever expects that keeps its memory clean as it goes: of each
//! slot it is known how many bytes of frames lie there, and as many are wiped when the slot is posted to the card again. Then what is posted is
//! clean at any time. What lies in free slots is wiped shortly before the handover, and what was handled since, at its end.
//!
//! Bytes that somebody writes behind the end of a frame, or into a slot that is never sent, are not known here: who does that wipes them.

use tasuki_shm::arena::{Arena, Slot};

use super::{Nic, NicMemory};
use crate::port::Frame;

/// The card may write whole lines where a frame ends.
const LINE: u32 = 64;

/// Of each slot, how many bytes from its beginning on may be of frames.
#[derive(Debug)]
pub struct Dirt(Box<[u32]>);

impl Dirt {
    /// Of memory in which any slot may hold anything.
    pub(super) fn of(memory: &NicMemory) -> Self {
        let slots = memory.arena().geometry();
        Dirt(vec![slots.slot_len; slots.count as usize].into())
    }

    /// Frames lie there.
    #[inline]
    pub(super) fn mark(&mut self, frames: &[Frame]) {
        for frame in frames {
            if let Some(dirty) = self.0.get_mut(frame.slot.id().index as usize) {
                *dirty = (*dirty).max(u32::from(frame.len).next_multiple_of(LINE));
            }
        }
    }

    /// Nothing of frames is in this slot afterwards.
    #[inline]
    pub(super) fn wipe(&mut self, slot: &mut Slot) {
        if let Some(dirty) = self.0.get_mut(slot.id().index as usize) {
            let len = std::mem::take(dirty) as usize;
            let bytes = slot.bytes_mut();
            let len = len.min(bytes.len());
            bytes[..len].fill(0);
        }
    }

    /// Wipes free slots. Not for the data path: it holds them all meanwhile.
    pub(super) fn wipe_free(&mut self, arena: &Arena) {
        let last = self.0.iter().rposition(|&dirty| dirty > 0);
        let mut free = Vec::with_capacity(self.0.len());
        // Free slots come in the order of their places: behind the last that is not clean nothing is to be done.
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

/// A driver whose memory can be handed on without anything of the frames that it has handled.
///
/// ```text
///   start with NicOptions::scrub, or keep_clean ... wipe_free ... last burst, wipe_rest ─► driver state
/// ```
pub trait Scrub: Nic {
    /// From now on, no slot goes to the card with bytes of an older frame. What the card has already is not touched: to be called before the first frame
    /// was received, by a driver whose predecessor kept the memory clean, too.
    fn keep_clean(&mut self);

    /// Wipes what lies in free slots: a megabyte, perhaps, which takes up to a millisecond if nobody did before. To be called shortly before a handover, between two
    /// bursts, and best twice: what is left after the second time is what came during the first.
    fn wipe_free(&mut self);

    /// Wipes what is left once nothing that was received is in hand any more: the slots of frames that were sent or let go since
    /// [`wipe_free`](Self::wipe_free), and what was saved of frames. Nothing that was handled can be read in the memory afterwards.
    ///
    /// Says no, and is to be called again, while frames are not sent yet.
    fn wipe_rest(&mut self) -> bool;
}
