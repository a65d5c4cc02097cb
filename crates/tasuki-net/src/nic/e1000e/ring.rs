//! The descriptor rings: they move slots between us and the card.
//!
//! # Rules
//!
//! - **D1** The card owns the descriptors from its head up to, not including, its tail. We write only the others.
//! - **D2** A slot in a descriptor is lent; it comes back only when the card has set DD there, in order.
//! - **D3** We load a value that the card writes only once. The cursors are ours and never read from the card.
//! - **D4** We write a descriptor whole when we post it. That overwrites anything that a card wrote while it did not
//!   own the descriptor, and we never read that.
//!
//! # Orderings
//!
//! - **DONE** the card writes a frame, then DD; we load DD with Acquire, then read the frame.
//! - **POST** we write a frame and its descriptor, then the tail; `Registers::write32` promises that order.
//!
//! Formats: the data sheet's 7.1.5 (extended receive descriptors) and 7.2.10 (legacy transmit descriptors).

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use arrayvec::ArrayVec;
use tasuki_shm::arena::{Arena, Slot};
use tasuki_shm::region::Span;
use tasuki_shm::slots::SlotId;

use super::counters::Counters;
use super::driver_state::{DriverState, NO_SLOT, QUEUES_MAX, ReceiveDriverState};
use super::setup::Shape;
use crate::nic::driver::{Receive, Transmit, short};
use crate::nic::loan::{lend, lend_all, take_back};
use crate::nic::{NicError, NicMemory};
use crate::port::{Burst, Frame};

/// Maximum number of descriptors in a ring.
pub const RING_MAX: usize = 1024;
/// Minimum number of descriptors in a ring: the card requires a ring length that is a multiple of 128 bytes.
pub const RING_MIN: usize = 8;
/// Size of a descriptor in bytes.
pub const DESCRIPTOR_LEN: usize = 16;
/// Size of a descriptor in 64-bit words.
const WORDS: usize = 2;

/// Length of the Ethernet header in bytes.
const HEADER_LEN: u16 = 14;
/// Length in bytes of the shortest frame on the wire, without its check sequence.
const SHORTEST: u16 = 60;

/// Fills a short frame up with zeros. The card pads frames, too, but the maker's drivers give it none of less than 17
/// bytes.
#[cold]
fn padded(mut slot: Slot, len: u16) -> Slot {
    slot.bytes_mut().get_mut(len.into()..SHORTEST.into()).iter_mut().for_each(|rest| rest.fill(0));
    slot
}

/// Second word of a receive descriptor that the card has written back.
mod done {
    /// Descriptor Done.
    pub const DD: u64 = 1 << 0;
    /// End Of Packet.
    pub const EOP: u64 = 1 << 1;
    /// CRC, symbol, sequence, carrier extension or data error. The driver ignores checksum errors.
    pub const ERRORS: u64 = 1 << 24 | 1 << 25 | 1 << 26 | 1 << 28 | 1 << 31;

    /// Returns the number of bytes of the frame in this descriptor's buffer.
    #[expect(clippy::cast_possible_truncation, reason = "these are the 16 bits")]
    pub fn len(word: u64) -> u16 {
        (word >> 32) as u16
    }
}

/// Second word of a transmit descriptor.
mod send {
    /// End Of Packet, insert the frame check sequence, Report Status.
    pub const COMMAND: u64 = (1 << 0 | 1 << 1 | 1 << 3) << 24;
    /// Descriptor Done.
    pub const DD: u64 = 1 << 32;
}

/// A ring of descriptors, and the slots in them.
#[derive(Debug)]
struct Descriptors {
    words: Span<AtomicU64>,
    /// Slot of each descriptor that the card owns, in the ledger (N2). Entries of the other descriptors are stale.
    slots: Span<AtomicU64>,
    mask: u32,
}

impl Descriptors {
    /// Returns ring number `index` of rings of `count` descriptors (a power of two) each. The memory must be large
    /// enough for it.
    fn new(memory: &NicMemory, index: usize, count: u16) -> Self {
        let words = memory.rings().span(index * usize::from(count) * DESCRIPTOR_LEN, usize::from(count) * WORDS);
        let words = words.expect("a Shape saw that the rings fit");
        let slots = memory.slot_list(index, count.into());
        Descriptors { words, slots, mask: u32::from(count) - 1 }
    }

    /// Clears all descriptors.
    fn clear(&self) {
        self.words.iter().for_each(|word| word.store(0, Relaxed));
    }

    /// Returns the two words of the descriptor at `place`.
    #[inline]
    fn descriptor(&self, place: usize) -> [&AtomicU64; 2] {
        let words = &self.words[place * WORDS..];
        [&words[0], &words[1]]
    }

    #[inline]
    fn place(&self, cursor: u32) -> usize {
        (cursor & self.mask) as usize
    }

    /// Returns the value of the tail register if `cursor` is the first descriptor that is not the card's.
    fn register(&self, cursor: u32) -> u32 {
        cursor & self.mask
    }

    /// Returns the number of descriptors in the ring, less one: a full ring would look empty to the card.
    fn most(&self) -> u32 {
        self.mask
    }

    /// Writes the slots of the descriptors `from..to` to `words`. All other entries, up to the ring's length, become
    /// [`NO_SLOT`]; entries beyond the ring stay as in a blank driver state.
    fn to_driver_state(&self, words: &mut [u64; RING_MAX], from: u32, to: u32) {
        words[..self.slots.len()].fill(NO_SLOT);
        for place in (0..to.wrapping_sub(from)).map(|i| self.place(from.wrapping_add(i))) {
            words[place] = self.slots[place].load(Relaxed);
        }
    }

    /// Returns the slots of the descriptors `from..to`, as the ledger lists them. There must be fewer of them than
    /// descriptors in the ring.
    fn held(&self, from: u32, to: u32) -> impl Iterator<Item = SlotId> {
        // To the end of the ring, then from its beginning.
        let (first, len) = (self.place(from), to.wrapping_sub(from) as usize);
        let (before, after) = self.slots.split_at(first);
        let words = after.iter().chain(before).take(len);
        words.map(|word| SlotId::from_word(word.load(Relaxed)))
    }

    /// Returns the slot in the descriptor at `place`.
    #[inline]
    fn slot(&self, place: usize) -> SlotId {
        SlotId::from_word(self.slots[place].load(Relaxed))
    }

    /// Takes over the slots of a driver state that was checked.
    fn take_over(&self, words: &[u64; RING_MAX]) {
        self.slots.iter().zip(words).for_each(|(slot, word)| slot.store(*word, Relaxed));
    }
}

/// Number of dropped frames by reason. The driver counts these because the card does not.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Dropped {
    /// Number of frames in which the card found errors.
    pub errors: u64,
    /// Number of frames longer than the MTU allows.
    pub too_long: u64,
}

/// Assessment of a receive descriptor.
enum Verdict {
    NotDone,
    Good,
    /// The frame is to be dropped and counted.
    Bad,
    Absurd,
}

/// Length limits for received frames, the same for all receive rings.
#[derive(Debug, Clone, Copy)]
struct Lengths {
    /// Maximum number of bytes of a slot that the card writes.
    buffer: u16,
    /// Maximum length in bytes of a frame that the ring delivers.
    frame: u16,
}

#[derive(Debug)]
pub struct ReceiveRing {
    ring: Descriptors,
    next: u32,
    tail: u32,
    /// First descriptor whose frame was not handled by the last commit.
    handled: u32,
    /// Tail that the card was last told.
    rung: u32,
    skipping: bool,
    lengths: Lengths,
}

impl ReceiveRing {
    /// Returns the rings of all queues, at these cursors. Changes nothing in them.
    pub fn all(memory: &NicMemory, shape: Shape, cursors: &[ReceiveDriverState; QUEUES_MAX]) -> ReceiveRings {
        let lengths = Lengths { buffer: shape.buffer, frame: shape.frame() };
        let ring = |queue: usize| {
            let ring = Descriptors::new(memory, queue, shape.ring);
            let ReceiveDriverState { next, tail, skipping, .. } = cursors[queue];
            ReceiveRing { ring, next, tail, handled: next, rung: tail, skipping: skipping == 1, lengths }
        };
        (0..usize::from(shape.queues)).map(ring).collect()
    }

    /// Returns the rings of all queues, empty.
    pub fn all_empty(memory: &NicMemory, shape: Shape) -> ReceiveRings {
        let rings = Self::all(memory, shape, &[ReceiveDriverState::default(); QUEUES_MAX]);
        rings.iter().for_each(|ring| ring.ring.clear());
        rings
    }

    /// Takes over the slots of a driver state that was checked.
    pub fn take_over(&self, posted: &[u64; RING_MAX]) {
        self.ring.take_over(posted);
    }

    /// Lets an empty ring begin at this descriptor, with up to `most` slots. The caller tells the card, together
    /// with everything else.
    pub fn begin_at(&mut self, place: u32, memory: &NicMemory, most: usize) {
        (self.next, self.tail, self.handled) = (place, place, place);
        self.refill(memory, most);
        self.committed(place);
    }

    /// Returns the cursors for a successor, and writes the posted slots to `posted`.
    pub fn to_driver_state(&self, posted: &mut [u64; RING_MAX]) -> ReceiveDriverState {
        self.ring.to_driver_state(posted, self.next, self.tail);
        ReceiveDriverState { next: self.next, tail: self.tail, skipping: self.skipping.into(), reserved: 0 }
    }

    /// Returns the value for the tail register.
    pub fn tail(&self) -> u32 {
        self.ring.register(self.tail)
    }

    /// Returns the value of the head register once all frames that came were received.
    pub fn head(&self) -> u32 {
        self.ring.register(self.next)
    }

    /// Returns whether the card has a slot in each descriptor but the one that must stay free.
    pub fn is_full(&self) -> bool {
        self.tail.wrapping_sub(self.next) == self.ring.most()
    }

    /// Returns whether a frame, or the remainder of one, has come.
    pub fn is_ready(&self) -> bool {
        self.next != self.tail && self.ring.descriptor(self.ring.place(self.next))[1].load(Acquire) & done::DD != 0
    }

    /// Appends good frames until it meets another descriptor, or has looked at the ring's last one.
    #[inline]
    fn receive_good(&mut self, arena: &Arena, burst: &mut Burst, full: usize) -> Result<(), NicError> {
        if self.skipping {
            return Ok(());
        }
        let first = self.ring.place(self.next);
        let ready = self.tail.wrapping_sub(self.next) as usize;
        let most = ready.min(full.saturating_sub(burst.len())).min(self.ring.slots.len() - first);
        let (words, _) = self.ring.words.as_chunks::<WORDS>();
        let descriptors = words[first..first + most].iter().zip(&self.ring.slots[first..first + most]);
        let (mut next, longest) = (self.next, self.lengths.frame - HEADER_LEN);
        for ([_, status], slot) in descriptors {
            // DONE
            let word = status.load(Acquire);
            let len = done::len(word);
            let is_good = word & (done::DD | done::EOP | done::ERRORS) == done::DD | done::EOP;
            if !is_good || len.wrapping_sub(HEADER_LEN) > longest {
                break;
            }
            match take_back(arena, slot.load(Relaxed)) {
                Ok(slot) => burst.push(Frame { slot, len }),
                Err(error) => {
                    self.next = next;
                    return Err(error);
                }
            }
            next = next.wrapping_add(1);
        }
        self.next = next;
        Ok(())
    }

    /// Assesses the next descriptor.
    #[cold]
    fn judge(&self, word: u64) -> Verdict {
        let len = done::len(word);
        let whole = word & (done::EOP | done::ERRORS) == done::EOP && !self.skipping;
        let shortest = if whole { HEADER_LEN } else { 1 };
        match (shortest..=self.lengths.buffer).contains(&len) {
            _ if word & done::DD == 0 => Verdict::NotDone,
            false => Verdict::Absurd,
            true if whole && len <= self.lengths.frame => Verdict::Good,
            true => Verdict::Bad,
        }
    }

    /// Counts a frame that is not delivered, once, and frees its slot.
    #[cold]
    fn refuse(&mut self, arena: &Arena, word: u64, dropped: &mut Dropped) {
        let place = self.ring.place(self.next);
        // Wipe all of the slot, since its fill level is not recorded. A slot that is not the card's is not freed.
        if let Ok(mut slot) = take_back(arena, self.ring.slots[place].load(Relaxed)) {
            slot.bytes_mut().fill(0);
        }
        if !self.skipping {
            match word & done::ERRORS {
                0 => dropped.too_long += 1,
                _ => dropped.errors += 1,
            }
        }
        self.skipping = word & done::EOP == 0;
        self.next = self.next.wrapping_add(1);
    }

    /// Returns the cursors in the ledger's format, with everything before `handled` handled, and whether a frame is
    /// skipped there.
    #[inline]
    pub fn cursors(&self, handled: u32) -> (u64, bool) {
        (u64::from(handled) | u64::from(self.tail) << 32, self.skipping && handled == self.next)
    }

    /// Notes that the commit of everything before `handled` is done. Returns the value for the tail register if it
    /// has changed.
    #[inline]
    pub fn committed(&mut self, handled: u32) -> Option<u32> {
        let changed = self.rung != self.tail;
        (self.handled, self.rung) = (handled, self.tail);
        changed.then(|| self.tail())
    }

    /// Gives the card free slots until its ring is full, none are left, or it got `most`.
    #[inline(never)]
    fn refill(&mut self, memory: &NicMemory, most: usize) {
        let end = self.tail.wrapping_add(u32::try_from(self.room().min(most)).expect("a ring is short"));
        // To the end of the ring, then from its beginning.
        for _ in 0..2 {
            let first = self.ring.place(self.tail);
            let room = (end.wrapping_sub(self.tail) as usize).min(self.ring.slots.len() - first);
            if room == 0 {
                break;
            }
            self.refill_run(memory, first, room);
        }
    }

    /// Gives the card up to `room` slots in the descriptors from `first` on.
    #[inline]
    fn refill_run(&mut self, memory: &NicMemory, first: usize, room: usize) {
        let (words, _) = self.ring.words.as_chunks::<WORDS>();
        let mut places = words[first..first + room].iter().zip(&self.ring.slots[first..first + room]);
        let (arena_at, slot_len) = (memory.arena_at().0, u64::from(memory.arena().geometry().slot_len));
        let count = memory.arena().supply(room, |id| {
            if let Some(([address, status], slot)) = places.next() {
                address.store(arena_at + u64::from(id.index) * slot_len, Relaxed);
                // D4
                status.store(0, Relaxed);
                slot.store(id.to_word(), Relaxed);
            }
        });
        self.tail = self.tail.wrapping_add(u32::try_from(count).expect("at most as many as there is room for"));
    }
}

impl Receive for ReceiveRing {
    type Counts = Counters;

    fn receive(
        &mut self,
        arena: &Arena,
        burst: &mut Burst,
        full: usize,
        counts: &mut Counters,
    ) -> Result<usize, NicError> {
        let before = burst.len();
        loop {
            match self.receive_good(arena, burst, full) {
                Err(error) if burst.len() == before => return Err(error),
                Err(_) => break,
                Ok(()) => {}
            }
            if burst.len() >= full || self.next == self.tail {
                break;
            }
            // This descriptor holds no good frame, or is the ring's first after a wrap.
            let word = self.ring.descriptor(self.ring.place(self.next))[1].load(Acquire);
            match self.judge(word) {
                Verdict::NotDone => break,
                Verdict::Good => {}
                Verdict::Bad => self.refuse(arena, word, &mut counts.dropped),
                // Deliver the frames before it first; the next call finds the fault again at once.
                Verdict::Absurd if burst.len() > before => break,
                Verdict::Absurd => {
                    return Err(NicError::Absurd { what: "the length of a received frame", value: word });
                }
            }
        }
        Ok(burst.len() - before)
    }

    #[inline]
    fn post(&mut self, memory: &NicMemory, most: usize) -> usize {
        self.refill(memory, most);
        self.room()
    }

    #[inline]
    fn room(&self) -> usize {
        (self.ring.most() - self.tail.wrapping_sub(self.handled)) as usize
    }

    fn is_empty(&self) -> bool {
        self.next == self.tail
    }

    #[inline]
    fn pending(&self) -> u64 {
        self.next.wrapping_sub(self.handled).into()
    }

    #[inline]
    fn handled(&self) -> u64 {
        self.handled.into()
    }

    #[inline]
    fn next(&self) -> u64 {
        self.next.into()
    }

    #[inline]
    fn is_at(&self, position: u64, id: SlotId) -> bool {
        self.ring.slot(self.ring.place(short(position))) == id
    }

    fn lend(&self, memory: &NicMemory) -> Result<(), NicError> {
        lend_all(memory, self.ring.held(self.next, self.tail))
    }

    fn undo(&self, memory: &NicMemory, queue: usize) -> Result<(), NicError> {
        let held = self.tail.wrapping_sub(self.next);
        for position in memory.ledger().saved(queue).filter(|at| at.wrapping_sub(self.next) < held) {
            let place = self.ring.place(position);
            if self.ring.descriptor(place)[1].load(Acquire) & done::DD == 0 {
                continue;
            }
            // Borrow the slot from the card for the restoration.
            let mut slot = take_back(memory.arena(), self.ring.slot(place).to_word())?;
            memory.ledger().undo(queue, position, &mut slot);
            lend(memory.arena(), slot);
        }
        Ok(())
    }
}

/// The receive rings of all queues.
pub type ReceiveRings = ArrayVec<ReceiveRing, QUEUES_MAX>;

#[derive(Debug)]
pub struct TransmitRing {
    ring: Descriptors,
    sent: u32,
    filled: u32,
    /// First descriptor that was not known to be sent by the last commit. `rung` is the tail that the card was last
    /// told.
    reusable: u32,
    rung: u32,
    /// Maximum length of a frame in bytes.
    longest: u16,
}

impl TransmitRing {
    /// Returns the ring at these cursors; it follows the rings of the receive queues. Changes nothing in it.
    pub fn at(memory: &NicMemory, shape: Shape, [sent, filled]: [u32; 2]) -> Self {
        let ring = Descriptors::new(memory, shape.queues.into(), shape.ring);
        TransmitRing { ring, sent, filled, reusable: sent, rung: filled, longest: shape.frame() }
    }

    /// Returns an empty ring.
    pub fn empty(memory: &NicMemory, shape: Shape) -> Self {
        let empty = Self::at(memory, shape, [0; 2]);
        empty.ring.clear();
        empty
    }

    /// Takes over the slots of a driver state that was checked.
    pub fn take_over(&self, driver_state: &DriverState) {
        self.ring.take_over(&driver_state.sending);
    }

    /// Writes cursors and slots for a successor.
    pub fn to_driver_state(&self, driver_state: &mut DriverState) {
        self.ring.to_driver_state(&mut driver_state.sending, self.sent, self.filled);
        (driver_state.sent, driver_state.filled) = (self.sent, self.filled);
    }

    fn reclaim(&mut self, arena: &Arena) {
        while self.sent != self.filled {
            let place = self.ring.place(self.sent);
            // DONE
            if self.ring.descriptor(place)[1].load(Acquire) & send::DD == 0 {
                break;
            }
            // A slot that is not the card's is not freed.
            drop(take_back(arena, self.ring.slots[place].load(Relaxed)));
            self.sent = self.sent.wrapping_add(1);
        }
    }

    /// Returns the cursors in the ledger's format.
    #[inline]
    pub fn cursors(&self) -> u64 {
        u64::from(self.sent) | u64::from(self.filled) << 32
    }

    /// Notes that the cursors are committed. Returns the value for the tail register if it has changed.
    #[inline]
    pub fn committed(&mut self) -> Option<u32> {
        let changed = self.rung != self.filled;
        (self.reusable, self.rung) = (self.sent, self.filled);
        changed.then(|| self.tail())
    }

    /// Returns the value for the tail register.
    pub fn tail(&self) -> u32 {
        self.ring.register(self.filled)
    }

    /// Returns the value for the head register of a card that goes on with the unsent frames.
    pub fn head(&self) -> u32 {
        self.ring.register(self.sent)
    }
}

impl Transmit for TransmitRing {
    type Counts = Counters;

    #[inline]
    fn reap(&mut self, arena: &Arena) -> Result<(), NicError> {
        self.reclaim(arena);
        Ok(())
    }

    #[inline]
    fn room(&self) -> usize {
        (self.ring.most() - self.filled.wrapping_sub(self.reusable)) as usize
    }

    #[inline]
    fn can_make_room(&self, frames: usize) -> bool {
        self.room() < frames && self.reusable != self.sent
    }

    fn transmit(&mut self, memory: &NicMemory, burst: &mut Burst, counts: &mut Counters, given: &mut u64) -> usize {
        let (taken, before) = (self.room().min(burst.len()), self.filled);
        for Frame { mut slot, mut len } in burst.drain(..taken) {
            if len < SHORTEST {
                slot = padded(slot, len);
                // One that is no frame is too long then.
                len = if len < HEADER_LEN { u16::MAX } else { SHORTEST };
            }
            if len > self.longest || !memory.arena().owns(&slot) {
                counts.refused += 1;
                continue;
            }
            let place = self.ring.place(self.filled);
            let [address, command] = self.ring.descriptor(place);
            address.store(memory.slot_at(&slot).0, Relaxed);
            command.store(send::COMMAND | u64::from(len), Relaxed);
            self.ring.slots[place].store(lend(memory.arena(), slot).to_word(), Relaxed);
            self.filled = self.filled.wrapping_add(1);
        }
        *given = given.wrapping_add(self.filled.wrapping_sub(before).into());
        taken
    }

    fn is_empty(&self) -> bool {
        self.sent == self.filled
    }

    fn lend(&self, memory: &NicMemory) -> Result<(), NicError> {
        lend_all(memory, self.ring.held(self.sent, self.filled))
    }
}
