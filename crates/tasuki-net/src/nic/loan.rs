//! Slots that a card has: lending them, taking them back, and believing a sash that lists them.

use tasuki_shm::arena::Slot;
use tasuki_shm::slots::SlotId;

use super::{NicError, NicMemory};

/// Lends a slot to the card.
pub fn lend(memory: &NicMemory, slot: Slot) -> SlotId {
    let lent = memory.arena().lend(slot);
    lent.expect("an arena for a device withdraws no pages, so the kernel is not asked").id()
}

/// Takes back a slot that the card has had. Fails only where our own book is wrong.
pub fn back(memory: &NicMemory, id: SlotId) -> Result<Slot, NicError> {
    let wrong = |_| NicError::BrokenSash { what: "a slot of it is not the card's", value: id.to_word() };
    memory.arena().attach_named(id).map_err(wrong)
}

/// Lends the card `count` slots.
pub fn stock(memory: &NicMemory, count: usize) -> Result<Vec<SlotId>, NicError> {
    let ids: Vec<_> = (0..count).map_while(|_| memory.arena().take()).map(|slot| lend(memory, slot)).collect();
    if ids.len() == count {
        return Ok(ids);
    }
    let slot_len = memory.arena().geometry().slot_len as usize;
    Err(NicError::Memory { what: "receive ring", need: count * slot_len, have: ids.len() * slot_len })
}

/// Whether the card has each of these slots, and each of them once. Changes nothing.
pub fn check(memory: &NicMemory, ids: impl Iterator<Item = SlotId>) -> Result<(), NicError> {
    // Held all at once, so that a slot that stands there twice is missing the second time.
    let (mut held, mut wrong) = (Vec::new(), None);
    for id in ids {
        match back(memory, id) {
            Ok(slot) => held.push(slot),
            Err(error) => wrong = Some(error),
        }
    }
    for slot in held {
        lend(memory, slot);
    }
    wrong.map_or(Ok(()), Err)
}
