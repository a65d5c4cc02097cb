//! The holder of each slot: the bookkeeping of an arena. Only the arena's owner keeps it.
//!
//! The table lies in shared memory that only the owner writes, so that a successor of the owner can read it. The set
//! of free slots is private. Only the owner's process allocates.
//!
//! # Rules
//!
//! - **S1** A slot has one holder at any instant: the owner ([`Holder::Owner`]) or a peer, or it is free
//!   ([`Holder::Free`]).
//! - **S2** A slot's generation grows by one each time it becomes free, so the owner recognises a descriptor from an
//!   earlier use.
//! - **S3** Only a slot that the owner holds can be lent, and only a lent slot can come back, with the generation it
//!   left with. (If the owner knows by itself which slots come back, the index alone names one.)
//!
//! # States
//!
//! | holder | event   | next   | because                                                     |
//! |--------|---------|--------|-------------------------------------------------------------|
//! | Free   | take    | Owner  | allocation                                                  |
//! | Free   | supply  | Peer   | taking and lending in one: the peer is to fill it           |
//! | Free   | adopt   | Peer   | a predecessor in another process lent it                    |
//! | Owner  | lend    | Peer   | the slot moves with its descriptor                          |
//! | Peer   | attach  | Owner  | it came back, and names its generation                      |
//! | Owner  | release | Free   | the owner no longer needs it                                |
//! | Peer   | reclaim | Free   | the peer is dead, and the dead hold nothing                 |
//!
//! Every other step is refused.

use std::sync::Arc;

use crate::line::{LINE_WORDS, Line, halves};
use crate::sync::{AcqRel, AtomicU64, Relaxed};

/// A slot in use: its index and its generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SlotId {
    /// Index of the slot in its arena, from 0.
    pub index: u32,
    /// How often the slot had been freed when it was taken.
    pub generation: u32,
}

impl SlotId {
    /// Packs index and generation into one word, as descriptors carry them.
    pub fn to_word(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.index)
    }

    /// Reverses [`to_word`](Self::to_word).
    pub fn from_word(word: u64) -> Self {
        let (index, generation) = halves(word);
        SlotId { index, generation }
    }
}

/// The holder of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holder {
    /// No holder: the slot can be taken.
    Free,
    /// The owner of the arena.
    Owner,
    /// The peer at the other end.
    Peer,
}

impl Holder {
    #[inline(always)]
    fn code(self) -> u64 {
        match self {
            Holder::Free => 0,
            Holder::Owner => 1,
            Holder::Peer => 2,
        }
    }

    fn from_code(code: u64) -> Option<Self> {
        match code {
            0 => Some(Holder::Free),
            1 => Some(Holder::Owner),
            2 => Some(Holder::Peer),
            _ => None,
        }
    }
}

/// A slot was not in the state that the step needs. Either the peer's claim about it is false, or our own code has a
/// bug.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WrongSlot {
    /// The index is out of range.
    #[error("slot rule S1 broken: slot {index} was named in an arena of {count}")]
    S1 {
        /// Index named.
        index: u32,
        /// Number of slots in the arena.
        count: u32,
    },
    /// The slot has another generation.
    #[error("slot rule S2 broken: slot {} was named with generation {}, but it is in generation {now}", id.index, id.generation)]
    S2 {
        /// Slot named.
        id: SlotId,
        /// The slot's present generation.
        now: u32,
    },
    /// The slot's holder does not permit this step.
    #[error("slot rule S3 broken: slot {} is held by {held:?} where {needed:?} was needed", id.index)]
    S3 {
        /// Slot named.
        id: SlotId,
        /// Holder of the slot, or `None` if the table's word is invalid.
        held: Option<Holder>,
        /// Holder that the step needs.
        needed: Holder,
    },
}

/// Memory for a table: one word per slot.
pub trait Table {
    /// Returns the number of words.
    fn len(&self) -> usize;

    /// Whether the table has no words.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the word at `index`, or `None` beyond the end.
    fn word(&self, index: u32) -> Option<&AtomicU64>;
}

macro_rules! table_of_lines {
    ($($lines:ty)*) => {
        $(impl Table for $lines {
            fn len(&self) -> usize {
                (**self).len() * LINE_WORDS
            }

            fn word(&self, index: u32) -> Option<&AtomicU64> {
                self.get(index as usize / LINE_WORDS).map(|line| line.word(index as usize % LINE_WORDS))
            }
        })*
    };
}
table_of_lines!(Box<[Line]> Arc<[Line]>);

/// The slots of one arena. `M` is the owner's shared memory for the table: one word per slot.
///
/// Several threads of the owner's process may use it at the same time.
#[derive(Debug)]
pub struct Slots<M> {
    table: M,
    count: u32,
    /// One bit per slot, set while it is free. Private to the owner's process.
    free: Box<[AtomicU64]>,
    /// Slot to take next if it is still free, or an index that does not exist.
    next: AtomicU64,
}

/// Returns the number of lines that the table of `count` slots needs.
pub fn table_lines(count: u32) -> usize {
    (count as usize).div_ceil(LINE_WORDS)
}

impl<M: Table> Slots<M> {
    /// Starts the bookkeeping of `count` slots. In a fresh (zeroed) table all of them are free.
    ///
    /// In a table that a dead owner left behind, the owner's slots become free and the peer's slots stay lent.
    pub fn new(table: M, count: u32) -> Self {
        assert!(table.len() >= count as usize, "a table of {} words is too small for {count} slots", table.len());
        let free = (0..count.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        let slots = Slots { table, count, free, next: AtomicU64::new(u64::MAX) };
        for index in 0..count {
            match slots.state(index) {
                (_, Some(Holder::Peer)) => {}
                (_, Some(Holder::Free)) => slots.mark_free(index),
                (generation, _) => slots.free_again(SlotId { index, generation }),
            }
        }
        slots
    }

    /// Returns the number of slots.
    pub fn count(&self) -> u32 {
        self.count
    }

    #[inline]
    fn word(&self, index: u32) -> &AtomicU64 {
        self.table.word(index).expect("every slot has a word")
    }

    #[inline]
    fn state(&self, index: u32) -> (u32, Option<Holder>) {
        let id = SlotId::from_word(self.word(index).load(Relaxed));
        (id.generation, Holder::from_code(id.index.into()))
    }

    #[inline]
    fn set(&self, id: SlotId, holder: Holder) {
        self.word(id.index).store(u64::from(id.generation) << 32 | holder.code(), Relaxed);
    }

    #[inline(always)]
    fn mark_free(&self, index: u32) {
        // Every slot has a bit. Pairs with `take_bit`: the next taker of the slot sees all earlier accesses to it.
        if let Some(bits) = self.free.get(index as usize / 64) {
            bits.fetch_or(1 << (index % 64), AcqRel);
        }
    }

    #[inline(always)]
    fn free_again(&self, id: SlotId) {
        // Every slot has a word.
        if let Some(word) = self.table.word(id.index) {
            word.store(u64::from(id.generation.wrapping_add(1)) << 32 | Holder::Free.code(), Relaxed);
        }
        self.mark_free(id.index);
    }

    /// Takes a free slot: the one that [`choose_next`](Self::choose_next) chose, or else the one with the lowest
    /// index.
    pub fn take(&self) -> Option<SlotId> {
        let next = u32::try_from(self.next.load(Relaxed)).ok().filter(|&next| next < self.count);
        next.and_then(|next| self.take_bit(next)).or_else(|| self.take_lowest())
    }

    /// Chooses the free slot that the next [`take`](Self::take) is to get, so that the caller can prepare it.
    /// Returns its index.
    pub fn choose_next(&self) -> Option<u32> {
        let (i, bits) =
            (0_u32..).zip(&self.free).map(|(i, word)| (i, word.load(Relaxed))).find(|(_, bits)| *bits != 0)?;
        let index = i * 64 + bits.trailing_zeros();
        self.next.store(index.into(), Relaxed);
        Some(index)
    }

    fn take_lowest(&self) -> Option<SlotId> {
        for (i, word) in (0_u32..).zip(&self.free) {
            let mut bits = word.load(Relaxed);
            while bits != 0 {
                let index = i * 64 + bits.trailing_zeros();
                if let Some(id) = self.take_bit(index) {
                    return Some(id);
                }
                bits &= !(1 << (index % 64));
            }
        }
        None
    }

    fn take_bit(&self, index: u32) -> Option<SlotId> {
        let bit = 1 << (index % 64);
        // Only takers clear a bit, so a bit that was still set is ours. Pairs with `mark_free`.
        let before = self.free[index as usize / 64].fetch_and(!bit, AcqRel);
        if before & bit == 0 {
            return None;
        }
        let id = SlotId { index, generation: self.state(index).0 };
        self.set(id, Holder::Owner);
        Some(id)
    }

    /// Moves up to `most` free slots straight to the peer, lowest first, and passes each to `each`. Returns the
    /// number of slots moved.
    #[inline(always)]
    pub fn supply(&self, most: usize, mut each: impl FnMut(SlotId)) -> usize {
        let mut left = most;
        for (i, word) in (0_u32..).zip(&self.free) {
            if left == 0 {
                break;
            }
            let free = word.load(Relaxed);
            if free == 0 {
                continue;
            }
            let chosen = lowest(free, left);
            // Only takers clear bits, so bits that were still set are ours. Pairs with `mark_free`.
            let mut ours = word.fetch_and(!chosen, AcqRel) & chosen;
            while ours != 0 {
                let index = i * 64 + ours.trailing_zeros();
                ours &= ours - 1;
                left -= 1;
                let Some(word) = self.table.word(index) else { continue };
                let SlotId { generation, .. } = SlotId::from_word(word.load(Relaxed));
                word.store(u64::from(generation) << 32 | Holder::Peer.code(), Relaxed);
                each(SlotId { index, generation });
            }
        }
        most - left
    }

    /// Returns the word of a slot, if `needed` holds that slot.
    #[inline(always)]
    fn held(&self, id: SlotId, needed: Holder) -> Result<&AtomicU64, WrongSlot> {
        // If a table has words beyond the last slot, they are 0, which means that they have no holder.
        let right = u64::from(id.generation) << 32 | needed.code();
        match self.table.word(id.index) {
            Some(word) if word.load(Relaxed) == right => Ok(word),
            _ => Err(self.wrong(id, needed)),
        }
    }

    /// Returns the rule that a slot in the wrong state breaks.
    #[cold]
    fn wrong(&self, id: SlotId, needed: Holder) -> WrongSlot {
        if id.index >= self.count {
            return WrongSlot::S1 { index: id.index, count: self.count };
        }
        match self.state(id.index) {
            (now, _) if now != id.generation => WrongSlot::S2 { id, now },
            (_, held) => WrongSlot::S3 { id, held, needed },
        }
    }

    /// Records that a predecessor, whose table we do not have, lent these slots to the peer. Fastest for runs of slots with
    /// numbers near each other.
    ///
    /// # Errors
    /// The first slot that does not exist, or is not free, or is named twice. The slots before it are lent by then.
    pub fn adopt_all(&self, ids: impl IntoIterator<Item = SlotId>) -> Result<(), WrongSlot> {
        let mut run = [SlotId { index: 0, generation: 0 }; 64];
        let (mut len, mut place, mut bits) = (0, 0, 0_u64);
        for id in ids {
            if id.index >= self.count {
                self.adopt_run(&run[..len], place, bits)?;
                return Err(WrongSlot::S1 { index: id.index, count: self.count });
            }
            let bit = 1 << (id.index % 64);
            if place != id.index / 64 || bits & bit != 0 {
                self.adopt_run(&run[..len], place, bits)?;
                (len, place, bits) = (0, id.index / 64, 0);
            }
            // Never beyond the end of `run`: each slot in it has a bit of its own.
            run[len] = id;
            (len, bits) = (len + 1, bits | bit);
        }
        self.adopt_run(&run[..len], place, bits)
    }

    /// Adopts slots of one word of bits, each named once.
    fn adopt_run(&self, ids: &[SlotId], place: u32, bits: u64) -> Result<(), WrongSlot> {
        if ids.is_empty() {
            return Ok(());
        }
        // Only takers clear bits, so bits that were still set are ours. Pairs with `mark_free`.
        let ours = self.free[place as usize].fetch_and(!bits, AcqRel) & bits;
        for &id in ids {
            if ours >> (id.index % 64) & 1 == 1 {
                self.set(id, Holder::Peer);
            }
        }
        match ids.iter().find(|id| ours >> (id.index % 64) & 1 == 0) {
            Some(&id) => Err(WrongSlot::S3 { id, held: self.state(id.index).1, needed: Holder::Free }),
            None => Ok(()),
        }
    }

    /// Checks that the peer holds this slot.
    pub fn is_lent(&self, id: SlotId) -> Result<(), WrongSlot> {
        self.held(id, Holder::Peer).map(drop)
    }

    /// Lends the owner's slot to the peer.
    #[inline(always)]
    pub fn lend(&self, id: SlotId) -> Result<(), WrongSlot> {
        let word = self.held(id, Holder::Owner)?;
        word.store(u64::from(id.generation) << 32 | Holder::Peer.code(), Relaxed);
        Ok(())
    }

    /// Gives a slot that came back from the peer to the owner.
    #[inline(always)]
    pub fn attach(&self, id: SlotId) -> Result<(), WrongSlot> {
        let word = self.held(id, Holder::Peer)?;
        word.store(u64::from(id.generation) << 32 | Holder::Owner.code(), Relaxed);
        Ok(())
    }

    /// Does the same as [`attach`](Self::attach) for the slot at `index`, in any generation. Returns its id.
    #[inline(always)]
    pub fn attach_at(&self, index: u32) -> Result<SlotId, WrongSlot> {
        let lent = self.table.word(index).map(|place| (place, place.load(Relaxed)));
        match lent {
            #[expect(clippy::cast_possible_truncation, reason = "the low half names the holder")]
            Some((place, word)) if u64::from(word as u32) == Holder::Peer.code() => {
                place.store(word ^ Holder::Peer.code() ^ Holder::Owner.code(), Relaxed);
                Ok(SlotId { index, ..SlotId::from_word(word) })
            }
            _ => Err(self.wrong_at(index)),
        }
    }

    #[cold]
    fn wrong_at(&self, index: u32) -> WrongSlot {
        let generation = if index < self.count { self.state(index).0 } else { 0 };
        self.wrong(SlotId { index, generation }, Holder::Peer)
    }

    /// Frees a slot that the owner no longer needs.
    #[inline(always)]
    pub fn release(&self, id: SlotId) -> Result<(), WrongSlot> {
        let word = self.held(id, Holder::Owner)?;
        word.store(u64::from(id.generation.wrapping_add(1)) << 32 | Holder::Free.code(), Relaxed);
        self.mark_free(id.index);
        Ok(())
    }

    /// Does the same as [`release`](Self::release) for a slot that the owner certainly holds: the caller has its
    /// only handle.
    #[inline(always)]
    pub(crate) fn release_own(&self, id: SlotId) {
        debug_assert!(self.held(id, Holder::Owner).is_ok(), "S3: a Slot's holder is the owner");
        self.free_again(id);
    }

    /// Does the same as [`lend`](Self::lend) for a slot that the owner certainly holds.
    #[inline(always)]
    pub(crate) fn lend_own(&self, id: SlotId) {
        debug_assert!(self.held(id, Holder::Owner).is_ok(), "S3: a Slot's holder is the owner");
        self.set(id, Holder::Peer);
    }

    /// Frees all slots of a dead peer. Looks at every slot once. Returns the number freed.
    pub fn reclaim(&self) -> u32 {
        let held = (0..self.count).filter(|&index| self.state(index).1 == Some(Holder::Peer));
        held.map(|index| self.free_again(SlotId { index, generation: self.state(index).0 })).map(|()| 1).sum()
    }

    /// Counts the slots that are free, with the owner, and with the peer. The three numbers add up to
    /// [`count`](Self::count).
    pub fn census(&self) -> Census {
        let mut census = Census::default();
        for index in 0..self.count {
            match self.state(index).1 {
                Some(Holder::Free) => census.free += 1,
                Some(Holder::Peer) => census.peer += 1,
                Some(Holder::Owner) | None => census.owner += 1,
            }
        }
        census
    }
}

/// Returns the `count` lowest set bits, or all set bits if there are fewer.
#[inline]
fn lowest(bits: u64, count: usize) -> u64 {
    let mut rest = bits;
    if bits.count_ones() as usize <= count {
        return bits;
    }
    (0..count).for_each(|_| rest &= rest - 1);
    bits & !rest
}

/// Number of slots in each state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Census {
    /// Number of free slots.
    pub free: u32,
    /// Number of slots that the arena's owner holds.
    pub owner: u32,
    /// Number of slots that the peer holds.
    pub peer: u32,
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn slots(count: u32) -> Slots<Box<[Line]>> {
        Slots::new((0..table_lines(count)).map(|_| Line::default()).collect(), count)
    }

    #[test]
    fn a_slot_goes_round_and_changes_its_generation() {
        let slots = slots(1);
        let id = slots.take().unwrap();
        assert_eq!(slots.take(), None);
        slots.lend(id).unwrap();
        slots.attach(id).unwrap();
        slots.release(id).unwrap();
        assert_eq!(slots.take(), Some(SlotId { index: 0, generation: 1 }));
    }

    #[test]
    fn a_peer_is_supplied_with_the_lowest_free_slots() {
        let slots = slots(150);
        let kept = slots.take().unwrap();
        let mut given = Vec::new();
        assert_eq!(slots.supply(0, |_| unreachable!()), 0);
        assert_eq!(slots.supply(100, |id| given.push(id)), 100);
        assert!(given.iter().map(|id| id.index).eq(1..101));
        assert_eq!(slots.supply(100, |id| given.push(id)), 49, "all there were");
        assert_eq!(slots.census(), Census { free: 0, owner: 1, peer: 149 });
        assert!(slots.attach(kept).is_err());
        given.iter().for_each(|&id| slots.attach(id).unwrap());
        given.iter().for_each(|&id| slots.release(id).unwrap());
        slots.supply(1, |id| assert_eq!(id, SlotId { index: 1, generation: 1 }));
    }

    #[test]
    fn the_dead_hold_nothing() {
        let slots = slots(100);
        let held: Vec<_> = (0..70).map(|_| slots.take().unwrap()).collect();
        held[..50].iter().for_each(|&id| slots.lend(id).unwrap());
        assert_eq!(slots.census(), Census { free: 30, owner: 20, peer: 50 });
        assert_eq!(slots.reclaim(), 50);
        assert_eq!(slots.census(), Census { free: 80, owner: 20, peer: 0 });
        assert!(matches!(slots.attach(held[0]), Err(WrongSlot::S2 { .. })), "a dead peer's answer comes too late");
    }

    #[test]
    fn a_successor_of_the_owner_finds_what_is_lent() {
        let first = slots(10);
        let lent = first.take().unwrap();
        first.lend(lent).unwrap();
        first.take().unwrap();
        let successor = Slots::new(first.table, 10);
        assert_eq!(successor.census(), Census { free: 9, owner: 0, peer: 1 });
        successor.attach(lent).unwrap();
    }

    #[test]
    fn many_slots_are_adopted_as_each_of_them_is() {
        let id = |index| SlotId { index, generation: index };
        let orders: [Vec<u32>; 4] = [
            (0..150).collect(),
            (0..150).rev().collect(),
            (0..150).map(|i| i * 7 % 150).collect(),
            vec![64, 0, 149, 1],
        ];
        for order in orders {
            let (one, many) = (slots(150), slots(150));
            order.iter().for_each(|&index| one.adopt_all([id(index)]).unwrap());
            many.adopt_all(order.iter().map(|&index| id(index))).unwrap();
            assert_eq!(one.census(), many.census());
            order.iter().for_each(|&index| many.is_lent(id(index)).unwrap());
            // All other slots can be taken, and none of these.
            assert_eq!(std::iter::from_fn(|| many.take()).count(), 150 - order.len());
        }
    }

    #[test]
    fn of_many_slots_the_first_that_is_wrong_is_told() {
        let id = |index| SlotId { index, generation: 0 };
        let taken = slots(100);
        let ours = taken.take().unwrap();
        let error = taken.adopt_all([5, 0, 7].map(id)).unwrap_err();
        assert_eq!(error, WrongSlot::S3 { id: ours, held: Some(Holder::Owner), needed: Holder::Free });
        taken.release(ours).expect("a held slot stays held");
        for twice in [[5, 6, 5], [5, 70, 5]] {
            let error = slots(100).adopt_all(twice.map(id)).unwrap_err();
            assert_eq!(error, WrongSlot::S3 { id: id(5), held: Some(Holder::Peer), needed: Holder::Free });
        }
        let beyond = slots(100);
        assert_eq!(beyond.adopt_all([3, 100].map(id)), Err(WrongSlot::S1 { index: 100, count: 100 }));
        assert_eq!(beyond.reclaim(), 1, "those before it are lent");
    }

    #[test]
    fn a_successor_elsewhere_has_it_from_its_predecessor_what_is_lent() {
        let slots = slots(70);
        let lent = [3, 69].map(|index| SlotId { index, generation: 7 + index });
        slots.adopt_all(lent).unwrap();
        assert_eq!(slots.census(), Census { free: 68, owner: 0, peer: 2 });
        assert!(matches!(slots.adopt_all([lent[0]]), Err(WrongSlot::S3 { .. })), "twice");
        assert!(matches!(slots.adopt_all([SlotId { index: 70, generation: 0 }]), Err(WrongSlot::S1 { .. })));
        slots.is_lent(lent[1]).unwrap();
        assert!(slots.is_lent(SlotId { generation: 0, ..lent[1] }).is_err(), "of another generation");
        assert!(slots.is_lent(SlotId { index: 4, generation: 0 }).is_err());
        let taken: Vec<_> = std::iter::from_fn(|| slots.take()).collect();
        assert!(taken.len() == 68 && taken.iter().all(|id| ![3, 69].contains(&id.index)));
        slots.attach(lent[0]).unwrap();
        slots.release(lent[0]).unwrap();
        assert_eq!(slots.take(), Some(SlotId { index: 3, generation: 11 }));
    }

    /// Takes the table at the head of this file as the expected value: every pair of state and step.
    #[test]
    fn the_table_is_the_code() {
        let rows: Vec<[String; 3]> = include_str!("slots.rs")
            .lines()
            .filter_map(|line| line.strip_prefix("//! | "))
            .map(|row| row.split('|').map(|cell| cell.trim().to_owned()).collect::<Vec<_>>())
            .filter(|cells| cells[0] != "holder")
            .map(|cells| [cells[0].clone(), cells[1].clone(), cells[2].clone()])
            .collect();
        assert_eq!(rows.len(), 7, "the table was found");
        for start in ["Free", "Owner", "Peer"] {
            for event in ["take", "supply", "adopt", "lend", "attach", "release", "reclaim"] {
                let row = rows.iter().find(|row| row[0] == start && row[1] == event);
                let expected = row.map_or(start, |row| &row[2]);
                assert_eq!(after(start, event), expected, "{start} {event}");
            }
        }
    }

    fn after(start: &str, event: &str) -> String {
        let slots = slots(1);
        let mut id = SlotId { index: 0, generation: 0 };
        if start != "Free" {
            id = slots.take().unwrap();
        }
        if start == "Peer" {
            slots.lend(id).unwrap();
        }
        match event {
            "take" => _ = slots.take(),
            "supply" => _ = slots.supply(1, |_| {}),
            "adopt" => _ = slots.adopt_all([id]),
            "lend" => _ = slots.lend(id),
            "attach" => _ = slots.attach(id),
            "release" => _ = slots.release(id),
            "reclaim" => _ = slots.reclaim(),
            other => panic!("no such event: {other}"),
        }
        format!("{:?}", slots.state(0).1.unwrap())
    }

    proptest! {
        #[test]
        fn no_slot_is_lost_and_none_has_two_holders(steps in prop::collection::vec((0_u8..5, any::<prop::sample::Index>()), 1..300)) {
            let slots = slots(67);
            let (mut ours, mut lent) = (Vec::new(), Vec::new());
            for (step, which) in steps {
                match step {
                    0 => if let Some(id) = slots.take() {
                        prop_assert!(!ours.contains(&id) && !lent.contains(&id));
                        ours.push(id);
                    },
                    1 if !ours.is_empty() => { let id = ours.swap_remove(which.index(ours.len())); slots.lend(id).unwrap(); lent.push(id); }
                    2 if !lent.is_empty() => { let id = lent.swap_remove(which.index(lent.len())); slots.attach(id).unwrap(); ours.push(id); }
                    3 if !ours.is_empty() => { let id = ours.swap_remove(which.index(ours.len())); slots.release(id).unwrap(); prop_assert!(slots.release(id).is_err()); }
                    4 if which.index(20) == 0 => { prop_assert_eq!(slots.reclaim() as usize, lent.len()); lent.clear(); }
                    _ => {}
                }
                let census = slots.census();
                prop_assert_eq!((census.owner as usize, census.peer as usize), (ours.len(), lent.len()));
                prop_assert_eq!(census.free + census.owner + census.peer, 67);
            }
        }
    }
}
