//! Slots that a card has: lends them, takes them back, and checks a driver state that lists them.

use tasuki_shm::arena::{Arena, Slot};
use tasuki_shm::slots::{SlotId, WrongSlot};

use super::driver_state::broken;
use super::{NicError, NicMemory};

/// Lends a slot to the card.
#[inline]
pub fn lend(arena: &Arena, slot: Slot) -> SlotId {
    let lent = arena.lend(slot).expect("an arena for a device withdraws no pages, so the kernel is not asked");
    lent.id()
}

/// Takes back the slot of a descriptor that the card is done with, given the slot's word.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the low half of a word is the slot's index")]
pub fn take_back(arena: &Arena, word: u64) -> Result<Slot, NicError> {
    arena.attach_at(word as u32).map_err(|_| not_lent(word))
}

/// A function apart, since it never runs while every process with the NIC's memory keeps to N2.
#[cold]
fn not_lent(word: u64) -> NicError {
    broken("a slot that is not the card's stands in one of its descriptors", word)
}

/// Marks these slots, which are free in our slot table, as lent to the card.
pub fn lend_all(memory: &NicMemory, slots: impl Iterator<Item = SlotId>) -> Result<(), NicError> {
    memory.lend(slots).map_err(not_a_slot)
}

/// Returns the error for a slot that does not exist, or that is named twice.
#[cold]
fn not_a_slot(wrong: WrongSlot) -> NicError {
    let (WrongSlot::S1 { index, .. }
    | WrongSlot::S2 { id: SlotId { index, .. }, .. }
    | WrongSlot::S3 { id: SlotId { index, .. }, .. }) = wrong;
    broken("it names a slot twice, or one that is not there", index.into())
}

/// Takes back a slot that the card has had. Fails only if our own slot table is wrong.
pub fn back(memory: &NicMemory, id: SlotId) -> Result<Slot, NicError> {
    memory.arena().attach_named(id).map_err(|_| broken("a slot of it is not the card's", id.to_word()))
}

/// Lends the card `count` slots.
pub fn stock(memory: &NicMemory, count: usize) -> Result<Vec<SlotId>, NicError> {
    let ids: Vec<_> = (0..count).map_while(|_| memory.arena().take()).map(|slot| lend(memory.arena(), slot)).collect();
    if ids.len() == count {
        return Ok(ids);
    }
    let slot_len = memory.arena().geometry().slot_len as usize;
    Err(NicError::Memory { what: "receive ring", need: count * slot_len, have: ids.len() * slot_len })
}

/// Checks whether there will be `count` slots for the card once its present ones are taken back. Changes nothing.
pub fn check_stock(memory: &NicMemory, count: usize) -> Result<(), NicError> {
    let census = memory.arena().census();
    let have = (census.free + census.peer) as usize;
    let slot_len = memory.arena().geometry().slot_len as usize;
    match have >= count {
        true => Ok(()),
        false => Err(NicError::Memory { what: "receive ring", need: count * slot_len, have: have * slot_len }),
    }
}

/// Checks that the card has each of these slots, and no others. The slots must all differ. Changes nothing.
pub fn check(memory: &NicMemory, ids: impl Iterator<Item = SlotId>) -> Result<(), NicError> {
    let mut named = 0;
    for id in ids {
        let wrong = |_| broken("it names a slot that the card does not have", id.to_word());
        memory.arena().is_lent(id).map_err(wrong)?;
        named += 1;
    }
    match memory.arena().census().peer {
        has if has == named => Ok(()),
        has => Err(broken("the card has slots that it does not name, all in all", has.into())),
    }
}
