//! An arena: shared memory cut into slots of one size. Its owner writes it, one peer reads it.
//!
//! [`Arena`] is the owner's end, [`PeerArena`] the reader's. A held slot is a [`Slot`] or a [`PeerSlot`]: a value
//! that code can move but not copy. So code that touches a slot after sending it does not compile.
//!
//! # Invariants
//!
//! - **A1** No other process can write an arena: the owner seals its memory against further writers before it hands
//!   it over. An arena made [for a device](Arena::for_device) is the exception: its peer can write, and writes only
//!   slots that are lent to it.
//! - **A2** At most one [`Slot`] exists for a slot, and only while the slot's holder is the owner (rule S1 of
//!   [`crate::slots`]).
//! - **A3** A withdrawn slot ([`Detach::Guard`]) has no `Slot`, so no code in this process refers to its bytes.
#![allow(unsafe_code, reason = "lends the bytes of a slot to its holder")]

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

use crate::line::Line;
use crate::region::{HUGE_PAGE_LEN, PAGE_LEN, Pages, PeerRegion, Region, RegionError, Span};
use crate::slots::{Census, SlotId, Slots, WrongSlot};

/// Means of taking a slot away from its sender while the peer has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Detach {
    /// By Rust's ownership: the value is gone. Costs nothing, and stops only code that the compiler checks.
    #[default]
    Move,
    /// By the sender itself: it withdraws the pages from its own address space, and any stray access faults
    /// (SIGSEGV) until they come back. Finds bugs of the sender. The sender could undo it. In a process that has as
    /// many areas of memory as the kernel permits (`vm.max_map_count`), one slot that comes back may make all lent
    /// slots accessible.
    Guard,
    /// By the receiver: it holds the sender's userfaultfd and write-protects the pages. A stray write faults
    /// (SIGBUS), in any thread and through any pointer. Finds bugs, but a sender can undo it on purpose. The
    /// receiver's part is in the crate `tasuki-call` (`enforce.rs`).
    Enforced,
}

/// The size and number of an arena's slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes in a slot: a multiple of 4 KiB.
    pub slot_len: u32,
    /// Number of slots.
    pub count: u32,
}

impl Geometry {
    /// Returns the length of the whole arena in bytes.
    pub fn len(self) -> usize {
        self.slot_len as usize * self.count as usize
    }

    /// Whether the arena has no slots.
    pub fn is_empty(self) -> bool {
        self.count == 0
    }

    /// Whether a slot is a whole number of pages, and at least one.
    pub fn is_sound(self) -> bool {
        self.slot_len > 0 && (self.slot_len as usize).is_multiple_of(PAGE_LEN)
    }

    /// Returns the kind of pages to use: huge pages if slots fill them and the machine has some, otherwise small
    /// ones.
    pub fn pages(self) -> Pages {
        match (self.slot_len as usize).is_multiple_of(HUGE_PAGE_LEN) && !self.is_empty() {
            true => Pages::HugeIfAny,
            false => Pages::Small,
        }
    }
}

/// The owner's end of an arena.
#[derive(Debug, Clone)]
pub struct Arena {
    pool: Arc<Pool>,
}

#[derive(Debug)]
struct Pool {
    region: Region,
    slots: Slots<Span<AtomicU64>>,
    geometry: Geometry,
    detach: Detach,
}

impl Pool {
    fn offset(&self, id: SlotId) -> usize {
        id.index as usize * self.geometry.slot_len as usize
    }

    fn slot_len(&self) -> usize {
        self.geometry.slot_len as usize
    }
}

impl Arena {
    /// Creates an arena whose slot table lies in `table`, in other memory of the same owner.
    pub fn create(name: &str, geometry: Geometry, table: Span<Line>, detach: Detach) -> Result<Self, RegionError> {
        let region = Region::create(name, geometry.len(), geometry.pages())?;
        region.seal_writers()?; // A1
        let slots = Slots::new(table.words(geometry.count as usize)?, geometry.count);
        Ok(Arena { pool: Arc::new(Pool { region, slots, geometry, detach }) })
    }

    /// Creates an arena whose peer is a device that writes the slots lent to it.
    ///
    /// # Safety
    /// The device, and every other process that gets the memory, writes a slot only while it is lent.
    pub unsafe fn for_device(name: &str, geometry: Geometry, table: Span<Line>) -> Result<Self, RegionError> {
        let region = Region::create(name, geometry.len(), geometry.pages())?;
        let slots = Slots::new(table.words(geometry.count as usize)?, geometry.count);
        Ok(Arena { pool: Arc::new(Pool { region, slots, geometry, detach: Detach::Move }) })
    }

    /// Takes over an arena for a device that another process made and no longer uses. `table` is fresh: all slots are
    /// free until the caller [records](Self::adopt_all) those that the device still holds.
    ///
    /// # Errors
    /// If the memory is too small for its geometry.
    ///
    /// # Safety
    /// The device, and every other process that has the memory, including the one that handed it over, writes a slot
    /// only while it is lent.
    pub unsafe fn adopt_for_device(region: Region, geometry: Geometry, table: Span<Line>) -> Result<Self, RegionError> {
        if region.len() < geometry.len() {
            return Err(RegionError::Truncated { have: region.len(), need: geometry.len() });
        }
        let slots = Slots::new(table.words(geometry.count as usize)?, geometry.count);
        Ok(Arena { pool: Arc::new(Pool { region, slots, geometry, detach: Detach::Move }) })
    }

    /// Returns the memory, to hand to the peer.
    pub fn region(&self) -> &Region {
        &self.pool.region
    }

    /// Returns the size and number of the slots.
    pub fn geometry(&self) -> Geometry {
        self.pool.geometry
    }

    /// Takes a free slot. Its bytes are those that its last user left.
    pub fn take(&self) -> Option<Slot> {
        self.pool.slots.take().map(|id| Slot { pool: Arc::clone(&self.pool), id })
    }

    /// Moves up to `most` free slots straight to the peer, which is to fill them, and passes each to `each`. Returns
    /// the number of slots moved.
    ///
    /// Does [`take`](Self::take) and [`lend`](Self::lend) for many slots at a time.
    ///
    /// # Panics
    /// If the arena uses [`Detach::Guard`]: no user needs both.
    #[inline(always)]
    pub fn supply(&self, most: usize, each: impl FnMut(SlotId)) -> usize {
        assert!(self.pool.detach != Detach::Guard, "slots whose pages are withdrawn are lent one by one");
        self.pool.slots.supply(most, each)
    }

    /// Chooses the slot that `take` returns next, and fetches its first lines for writing: up to `len` bytes, at
    /// most a page.
    ///
    /// For a sender that waits anyway: it takes the lines back from the peer, which read them last, before it needs
    /// them.
    pub fn warm_next(&self, len: usize) {
        if let Some(index) = self.pool.slots.choose_next() {
            let offset = index as usize * self.pool.slot_len();
            self.pool.region.prefetch_to_write(offset, len.min(PAGE_LEN).min(self.pool.slot_len()));
        }
    }

    /// Hands the slot to the peer.
    ///
    /// # Errors
    /// If the kernel refuses to withdraw the pages. The error returns the slot.
    ///
    /// # Panics
    /// If the slot is another arena's.
    #[inline]
    pub fn lend(&self, slot: Slot) -> Result<Lent, (Slot, RegionError)> {
        assert!(self.owns(&slot), "a slot is lent by its own arena");
        if self.pool.detach == Detach::Guard {
            // SAFETY: we consume the slot's only handle, so no reference into it lives (A2, A3).
            if let Err(error) = unsafe { self.pool.region.withdraw(self.pool.offset(slot.id), self.pool.slot_len()) } {
                return Err((slot, error));
            }
        }
        self.pool.slots.lend_own(slot.id);
        let slot = ManuallyDrop::new(slot);
        // SAFETY: `slot` is never dropped, so this moves its one reference to the pool, once (A2).
        Ok(Lent { pool: unsafe { std::ptr::read(&slot.pool) }, id: slot.id })
    }

    /// Takes back a lent slot that the peer returned.
    ///
    /// # Panics
    /// If another arena lent it.
    #[inline]
    pub fn attach(&self, lent: Lent) -> Result<Slot, WrongSlot> {
        // The slot that we return is the one that our table has checked (A2).
        assert!(Arc::ptr_eq(&self.pool, &lent.pool), "a slot comes back to its own arena");
        self.pool.slots.attach(lent.id)?;
        self.restore(lent.id);
        Ok(Slot { pool: lent.pool, id: lent.id })
    }

    /// Takes back a slot that the peer returned by its id.
    #[inline(always)]
    pub fn attach_named(&self, id: SlotId) -> Result<Slot, WrongSlot> {
        self.pool.slots.attach(id)?;
        self.restore(id);
        Ok(Slot { pool: Arc::clone(&self.pool), id })
    }

    /// Takes back the slot at `index`, as [`attach_named`](Self::attach_named) does. For a caller that lends each
    /// slot once and knows its place but not its generation.
    #[inline(always)]
    pub fn attach_at(&self, index: u32) -> Result<Slot, WrongSlot> {
        let id = self.pool.slots.attach_at(index)?;
        self.restore(id);
        Ok(Slot { pool: Arc::clone(&self.pool), id })
    }

    /// Records that the device holds these slots: a predecessor in another process lent them, and our table still calls
    /// them free.
    ///
    /// # Errors
    /// The first slot that is wrong. The device holds those before it by then.
    pub fn adopt_all(&self, ids: impl IntoIterator<Item = SlotId>) -> Result<(), WrongSlot> {
        self.pool.slots.adopt_all(ids)
    }

    /// Checks that the peer holds this slot. Changes nothing.
    pub fn is_lent(&self, id: SlotId) -> Result<(), WrongSlot> {
        self.pool.slots.is_lent(id)
    }

    #[inline(always)]
    fn restore(&self, id: SlotId) {
        if self.pool.detach == Detach::Guard {
            self.restore_pages(id);
        }
    }

    #[cold]
    fn restore_pages(&self, id: SlotId) {
        // A slot in the middle of a withdrawn area makes three areas of one: the kernel may have none to spare.
        if self.pool.region.restore(self.pool.offset(id), self.pool.slot_len()).is_err() {
            self.restore_all();
        }
    }

    fn restore_all(&self) {
        let restored = self.pool.region.restore(0, self.pool.region.len());
        restored.expect("giving back access to a whole mapping splits no area and cannot run out of them");
    }

    /// Takes back every slot of a dead peer, in time proportional to the number of slots. Returns how many it held.
    pub fn reclaim(&self) -> u32 {
        if self.pool.detach == Detach::Guard {
            self.restore_all();
        }
        self.pool.slots.reclaim()
    }

    /// Counts the slots by holder.
    pub fn census(&self) -> Census {
        self.pool.slots.census()
    }

    /// Whether `slot` belongs to this arena.
    #[inline]
    pub fn owns(&self, slot: &Slot) -> bool {
        Arc::ptr_eq(&self.pool, &slot.pool)
    }
}

/// A slot that we hold, to write and to send. Dropping it frees it.
#[derive(Debug)]
pub struct Slot {
    pool: Arc<Pool>,
    id: SlotId,
}

impl Slot {
    /// Returns the slot's index and generation.
    pub fn id(&self) -> SlotId {
        self.id
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.pool.slot_len()
    }

    /// Whether the slot has no bytes: always false.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Asks the CPU for the line of the first bytes, for reading soon. A hint: it changes nothing.
    #[inline]
    pub fn fetch(&self) {
        self.pool.region.prefetch_to_read(self.pool.offset(self.id), 1);
    }

    /// Returns all bytes of the slot.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: no other process can write them (A1), and ours is the only handle, borrowed shared (A2).
        unsafe { self.pool.region.bytes(self.pool.offset(self.id), self.len()) }.expect("a slot lies in its arena")
    }

    /// Returns all bytes of the slot, for writing.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: no other process can write them (A1), and ours is the only handle, borrowed exclusively (A2).
        unsafe { self.pool.region.bytes_mut(self.pool.offset(self.id), self.len()) }.expect("a slot lies in its arena")
    }
}

impl Drop for Slot {
    #[inline(always)]
    fn drop(&mut self) {
        self.pool.slots.release_own(self.id);
    }
}

/// A slot that the peer holds. Dropping this value changes nothing: the peer keeps the slot until it names it or
/// dies.
#[derive(Debug, Clone)]
pub struct Lent {
    pool: Arc<Pool>,
    id: SlotId,
}

impl Lent {
    /// Returns the slot's index and generation.
    pub fn id(&self) -> SlotId {
        self.id
    }
}

/// Reasons why a peer's statement about one of its own slots is impossible.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WrongLoan {
    /// The index is out of range.
    #[error("the peer broke slot rule S1: it sent slot {index} of an arena of {count}")]
    NoSuchSlot {
        /// Index sent.
        index: u32,
        /// Number of slots in the arena.
        count: u32,
    },
    /// The peer sent a slot that we still hold.
    #[error("the peer broke slot rule S1: it sent slot {index}, which we still hold")]
    Twice {
        /// Index sent.
        index: u32,
    },
    /// The length exceeds a slot.
    #[error("the peer broke slot rule S3: it sent {len} bytes in a slot of {slot_len}")]
    TooLong {
        /// Bytes announced.
        len: u64,
        /// Bytes in a slot.
        slot_len: u32,
    },
}

/// Bytes of a slot that we fetch while we still look at its message: as many lines as a CPU fetches at a time.
const PREFETCHED: usize = 1024;

/// The reader's end of an arena.
#[derive(Debug)]
pub struct PeerArena {
    region: PeerRegion,
    geometry: Geometry,
    /// One bit per slot: set while we hold it. Only the end that accepts slots and reports them to their owner
    /// changes it, one thread at a time.
    held: Box<[AtomicU64]>,
    /// One bit per slot: set when any thread dropped it and we have not yet told its owner.
    done: Box<[AtomicU64]>,
    /// Number of slots dropped so far, so that `next_return` never searches in vain.
    dropped: AtomicU64,
    /// Number of dropped slots reported to their owner so far.
    told: AtomicU64,
    /// The generation in which each slot reached us.
    generations: Box<[AtomicU64]>,
}

impl PeerArena {
    /// Opens a peer's arena for reading.
    pub fn new(region: PeerRegion, geometry: Geometry) -> Result<Arc<Self>, RegionError> {
        if region.len() < geometry.len() {
            return Err(RegionError::Truncated { have: region.len(), need: geometry.len() });
        }
        let words = |count: u32| (0..count).map(|_| AtomicU64::new(0)).collect::<Box<[_]>>();
        let bitmap = geometry.count.div_ceil(64);
        let (held, done) = (words(bitmap), words(bitmap));
        let generations = words(geometry.count);
        let (dropped, told) = (AtomicU64::new(0), AtomicU64::new(0));
        Ok(Arc::new(PeerArena { region, geometry, held, done, dropped, told, generations }))
    }

    /// Returns the size and number of the slots.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Makes the CPU fetch the beginning of the slot that the peer claims to have sent. Trusts nothing: a wrong
    /// claim only wastes the fetch.
    #[inline]
    pub fn prefetch(&self, id: SlotId, len: u64) {
        let len = usize::try_from(len).unwrap_or(usize::MAX).min(PREFETCHED);
        self.region.prefetch_to_read(id.index as usize * self.geometry.slot_len as usize, len);
    }

    /// Accepts a slot from the peer, with `len` bytes in it.
    pub fn accept(self: &Arc<Self>, id: SlotId, len: u64) -> Result<PeerSlot, WrongLoan> {
        let Geometry { slot_len, count } = self.geometry;
        if id.index >= count {
            return Err(WrongLoan::NoSuchSlot { index: id.index, count });
        }
        let len = match usize::try_from(len) {
            Ok(fits) if fits <= slot_len as usize => fits,
            _ => return Err(WrongLoan::TooLong { len, slot_len }),
        };
        let (word, bit) = bit_of(&self.held, id.index);
        let held = word.load(Relaxed);
        if held & bit != 0 {
            return Err(WrongLoan::Twice { index: id.index });
        }
        word.store(held | bit, Relaxed);
        self.generations[id.index as usize].store(id.generation.into(), Relaxed);
        Ok(PeerSlot { arena: Arc::clone(self), id, len })
    }

    /// Returns the next dropped slot that must go back to its owner, if any.
    #[inline]
    pub fn next_return(&self) -> Option<SlotId> {
        let told = self.told.load(Relaxed);
        // Acquire: makes the bit of every counted drop visible.
        if self.dropped.load(Acquire) == told {
            return None;
        }
        for (i, word) in (0_u32..).zip(&self.done) {
            let bits = word.load(Relaxed);
            if bits != 0 {
                let index = i * 64 + bits.trailing_zeros();
                word.fetch_and(!(bits & bits.wrapping_neg()), Relaxed);
                let generation =
                    u32::try_from(self.generations[index as usize].load(Relaxed)).expect("stored from u32");
                self.no_longer_held(index);
                self.told.store(told.wrapping_add(1), Relaxed);
                return Some(SlotId { index, generation });
            }
        }
        None
    }

    fn no_longer_held(&self, index: u32) {
        let (word, bit) = bit_of(&self.held, index);
        word.store(word.load(Relaxed) & !bit, Relaxed);
    }

    /// Returns how many of the peer's slots we hold.
    pub fn held(&self) -> u32 {
        self.held.iter().map(|word| word.load(Relaxed).count_ones()).sum()
    }
}

/// Returns the word and the bit of a slot in a bitmap.
fn bit_of(bits: &[AtomicU64], index: u32) -> (&AtomicU64, u64) {
    (&bits[index as usize / 64], 1 << (index % 64))
}

/// A peer's slot that we hold, to read. It goes back to the peer some time after it is dropped.
///
/// A hostile peer can write it at any time, so we copy it or load it word by word. [`bytes`](Self::bytes) is for
/// trusted peers.
#[derive(Debug)]
pub struct PeerSlot {
    arena: Arc<PeerArena>,
    id: SlotId,
    len: usize,
}

impl PeerSlot {
    /// Returns the index and generation of the peer's slot.
    pub fn id(&self) -> SlotId {
        self.id
    }

    /// Returns the number of bytes that the peer sent in it.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the peer sent no bytes in it.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns where the slot begins in the peer's arena, in bytes.
    #[inline]
    pub fn offset(&self) -> usize {
        self.id.index as usize * self.arena.geometry.slot_len as usize
    }

    /// Copies the first bytes into `into`, as many as exist and fit. Returns the number copied.
    pub fn copy_to(&self, into: &mut [u8]) -> usize {
        let len = self.len.min(into.len());
        self.arena.region.copy_to(self.offset(), &mut into[..len]).expect("a slot lies in its arena");
        len
    }

    /// Returns a private copy of the bytes.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut copy = vec![0; self.len];
        self.copy_to(&mut copy);
        copy
    }

    /// Returns the bytes as 64-bit words in native order. Loads each word once, in place, even if the peer writes it
    /// meanwhile.
    ///
    /// If the length is not a multiple of 8, the last word also holds bytes of the slot that the peer did not send.
    pub fn words(&self) -> impl ExactSizeIterator<Item = u64> {
        let words = self.arena.region.words(self.offset(), self.len.div_ceil(8));
        words.expect("a slot lies in its arena").iter().map(|word| word.load(Relaxed))
    }

    /// Returns the bytes in place.
    ///
    /// # Safety
    /// The peer does not write the slot while the result lives. This holds if we trust the peer to keep to the
    /// protocol (it does not touch a slot that it sent). Nothing on stock Linux enforces it against a hostile peer.
    pub unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: the caller answers for the peer (A1: only the peer could write).
        unsafe { self.arena.region.bytes(self.offset(), self.len) }.expect("a slot lies in its arena")
    }

    /// Ends our hold without a message: the answer to the request that brought the slot tells the owner. Only the
    /// thread that accepts the peer's slots may do this.
    #[inline]
    pub fn surrender(self) -> SlotId {
        self.arena.no_longer_held(self.id.index);
        let slot = ManuallyDrop::new(self);
        // SAFETY: `slot` is never dropped, so this takes its one reference to the arena, once (A2).
        drop(unsafe { std::ptr::read(&slot.arena) });
        slot.id
    }
}

impl Drop for PeerSlot {
    fn drop(&mut self) {
        let (word, bit) = bit_of(&self.arena.done, self.id.index);
        word.fetch_or(bit, Relaxed);
        self.arena.dropped.fetch_add(1, Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: Geometry = Geometry { slot_len: 4096, count: 4 };

    fn arena(geometry: Geometry, detach: Detach) -> Arena {
        let lines = geometry.count.div_ceil(8) as usize;
        let control = Region::create("test-table", lines * 64, Pages::Small).unwrap();
        Arena::create("test-arena", geometry, control.span(0, lines).unwrap(), detach).unwrap()
    }

    fn pair(detach: Detach) -> (Arena, Arc<PeerArena>) {
        let arena = arena(SMALL, detach);
        let theirs = PeerRegion::map(arena.region().fd(), SMALL.len()).unwrap();
        (arena, PeerArena::new(theirs, SMALL).unwrap())
    }

    #[test]
    fn a_slot_moves_to_the_peer_and_back() {
        for detach in [Detach::Move, Detach::Guard] {
            let (ours, theirs) = pair(detach);
            let mut slot = ours.take().unwrap();
            slot.bytes_mut()[..5].copy_from_slice(b"hello");
            let lent = ours.lend(slot).unwrap();
            let seen = theirs.accept(lent.id(), 5).unwrap();
            assert_eq!(seen.to_vec(), b"hello");
            assert_eq!(ours.census(), Census { free: 3, owner: 0, peer: 1 });
            assert_eq!(seen.surrender(), lent.id());
            let slot = ours.attach(lent).unwrap();
            assert_eq!(&slot.bytes()[..5], b"hello", "whole again after the return ({detach:?})");
            drop(slot);
            assert_eq!(ours.census(), Census { free: 4, owner: 0, peer: 0 });
        }
    }

    #[test]
    fn what_a_liar_sends_is_refused() {
        let (ours, theirs) = pair(Detach::Move);
        let id = ours.lend(ours.take().unwrap()).unwrap().id();
        let held = theirs.accept(id, 1).unwrap();
        assert_eq!(theirs.accept(id, 1).unwrap_err(), WrongLoan::Twice { index: 0 });
        assert!(theirs.accept(SlotId { index: 4, generation: 0 }, 1).is_err());
        assert!(theirs.accept(SlotId { index: 1, generation: 0 }, 4097).is_err());
        drop(held);
        assert_eq!(theirs.next_return(), Some(id));
        assert_eq!(theirs.next_return(), None);
        assert_eq!(theirs.held(), 0);
    }

    #[test]
    #[should_panic(expected = "a slot comes back to its own arena")]
    fn no_arena_takes_back_what_another_lent() {
        let [one, other] = [(); 2].map(|()| arena(SMALL, Detach::Move));
        let [lent, _] = [&one, &other].map(|arena| arena.lend(arena.take().unwrap()).unwrap());
        let _slot = one.attach(lent.clone()).unwrap();
        let _alias = other.attach(lent);
    }

    /// The slots of a second arena, every other one of them withdrawn, are all areas that a process may have.
    #[test]
    fn a_slot_comes_back_to_a_process_that_has_no_area_to_spare() {
        const MOST: u32 = 1 << 18;
        let most: u32 = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap().trim().parse().unwrap();
        if most > MOST {
            return println!("skipped: takes long where vm.max_map_count is above {MOST}");
        }
        if !crate::alone("arena::tests::a_slot_comes_back_to_a_process_that_has_no_area_to_spare", 0) {
            return;
        }
        let ours = arena(SMALL, Detach::Guard);
        let slots: Vec<_> = std::iter::from_fn(|| ours.take()).collect();
        let [_, lent, _, _] = <[_; 4]>::try_from(slots).unwrap().map(|slot| ours.lend(slot).unwrap());
        let many = arena(Geometry { slot_len: 4096, count: most + 2 }, Detach::Guard);
        let slots: Vec<_> = std::iter::from_fn(|| many.take()).collect();
        let mut others = slots.into_iter().filter(|slot| slot.id().index % 2 == 1);
        let refused = others.find_map(|slot| many.lend(slot).err());
        assert!(matches!(refused, Some((_, RegionError::NoMemory { .. }))), "{refused:?}");
        let mut slot = ours.attach(lent).unwrap();
        slot.bytes_mut().fill(1);
    }

    #[test]
    fn the_dead_give_back_what_was_withdrawn() {
        let (ours, _theirs) = pair(Detach::Guard);
        let lent: Vec<_> = (0..4).map(|_| ours.take().unwrap()).map(|slot| ours.lend(slot).unwrap()).collect();
        assert_eq!(lent.len(), 4);
        assert_eq!(ours.reclaim(), 4);
        let mut slot = ours.take().unwrap();
        slot.bytes_mut().fill(1);
    }
}
