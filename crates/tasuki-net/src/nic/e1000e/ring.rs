//! The descriptor rings: what moves slots between us and the card.
//!
//! # Rules
//!
//! - **D1** The card owns the descriptors from its head up to, not including, its tail. We write the others only.
//! - **D2** A slot that stands in a descriptor is lent; it comes back only when the card has said DD there, in order.
//! - **D3** What the card writes is loaded once. The cursors are ours and never read from the card.
//! - **D4** A descriptor that is not the card's reads as we left it: a receive descriptor's second word is 0.
//!
//! # Orderings
//!
//! - **DONE** the card writes a frame, then DD; we load DD with Acquire, then read the frame.
//! - **POST** we write a frame and its descriptor, then the tail; `Registers::write32` promises that order.
//!
//! Formats: the data sheet's 7.1.5 (extended receive descriptors) and 7.2.10 (legacy transmit descriptors).

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use tasuki_shm::arena::{Arena, Slot};
use tasuki_shm::region::Span;
use tasuki_shm::slots::{SlotId, WrongSlot};

use super::sash::{NO_SLOT, ReceiveSash, Sash};
use crate::nic::bus::Iova;
use crate::nic::{NicError, NicMemory};
use crate::port::{Burst, Frame};

/// Most descriptors in a ring.
pub const RING_MAX: usize = 1024;
/// Fewest: the card takes rings of whole 128 bytes.
pub const RING_MIN: usize = 8;
/// Bytes in a descriptor.
pub const DESCRIPTOR_LEN: usize = 16;
/// 64-bit words in a descriptor.
const WORDS: usize = 2;

/// Ethernet header.
const HEADER_LEN: u16 = 14;

/// The second word of a receive descriptor that the card has written back.
mod done {
    /// Descriptor Done.
    pub const DD: u64 = 1 << 0;
    /// End Of Packet.
    pub const EOP: u64 = 1 << 1;
    /// CRC, symbol, sequence, carrier extension or data error. Checksums are not our business.
    pub const ERRORS: u64 = 1 << 24 | 1 << 25 | 1 << 26 | 1 << 28 | 1 << 31;

    /// Bytes of the frame in this descriptor's buffer.
    #[expect(clippy::cast_possible_truncation, reason = "these are the 16 bits")]
    pub fn len(word: u64) -> u16 {
        (word >> 32) as u16
    }
}

/// The second word of a transmit descriptor.
mod send {
    /// End Of Packet, insert the check sequence, Report Status.
    pub const COMMAND: u64 = (1 << 0 | 1 << 1 | 1 << 3) << 24;
    /// Descriptor Done.
    pub const DD: u64 = 1 << 32;
}

/// A ring of descriptors and the slots that stand in them.
#[derive(Debug)]
struct Descriptors {
    words: Span<AtomicU64>,
    /// The slot in each descriptor that the card owns. What stands in the others is stale.
    slots: Box<[SlotId]>,
    mask: u32,
}

impl Descriptors {
    /// The ring with number `index` of rings of `count` descriptors (a power of two) each, for which the memory suffices.
    fn new(memory: &NicMemory, index: usize, count: u16) -> Self {
        let words = memory.rings().span(index * usize::from(count) * DESCRIPTOR_LEN, usize::from(count) * WORDS);
        let words = words.expect("a Shape saw that the rings fit");
        let slots = vec![SlotId::from_word(NO_SLOT); count.into()].into();
        Descriptors { words, slots, mask: u32::from(count) - 1 }
    }

    /// The ring as the card sees it.
    fn clear(&self) {
        self.words.iter().for_each(|word| word.store(0, Relaxed));
    }

    /// The two words of the descriptor at `place`.
    #[inline]
    fn descriptor(&self, place: usize) -> [&AtomicU64; 2] {
        let words = &self.words[place * WORDS..];
        [&words[0], &words[1]]
    }

    #[inline]
    fn place(&self, cursor: u32) -> usize {
        (cursor & self.mask) as usize
    }

    /// What the tail register is to be when `cursor` is the first descriptor that is not the card's.
    fn register(&self, cursor: u32) -> u32 {
        cursor & self.mask
    }

    /// Descriptors in the ring, less one: a full ring would look empty to the card.
    fn most(&self) -> u32 {
        self.mask
    }

    /// The slots that the descriptors `from..to` hold. What lies beyond the ring is as in a blank sash.
    fn to_sash(&self, words: &mut [u64; RING_MAX], from: u32, to: u32) {
        words[..self.slots.len()].fill(NO_SLOT);
        for place in (0..to.wrapping_sub(from)).map(|i| self.place(from.wrapping_add(i))) {
            words[place] = self.slots[place].to_word();
        }
    }

    /// Takes over the slots that stand in a sash that was checked.
    fn take_over(&mut self, words: &[u64; RING_MAX]) {
        self.slots.iter_mut().zip(words).for_each(|(slot, word)| *slot = SlotId::from_word(*word));
    }
}

/// The slot goes to the card.
#[inline]
fn lend(arena: &Arena, slot: Slot) -> SlotId {
    let lent = arena.lend(slot).expect("lending by move asks nothing of the kernel");
    lent.id()
}

/// The slot in a descriptor that the card is done with.
#[inline(always)]
fn take_back(arena: &Arena, id: SlotId) -> Slot {
    match arena.attach_named(id) {
        Ok(slot) => slot,
        Err(wrong) => not_lent(wrong),
    }
}

/// Apart, since it never happens.
#[cold]
fn not_lent(wrong: WrongSlot) -> ! {
    panic!("D2: a slot that is lent stands in each of the card's descriptors, but {wrong}");
}

/// What was wrong with frames, each counted by us because the card does not.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Dropped {
    /// The card found errors in the frame.
    pub errors: u64,
    /// The frame was longer than the MTU allows.
    pub too_long: u64,
}

/// What stands in a receive descriptor.
enum Verdict {
    NotDone,
    Good,
    /// To be dropped and counted.
    Bad,
    Absurd,
}

/// What every receive ring must know about frames.
#[derive(Debug, Clone, Copy)]
pub struct Lengths {
    /// Bytes of a slot that the card writes at most.
    pub buffer: u16,
    /// Longest frame that is let through.
    pub frame: u16,
}

/// A receive ring.
#[derive(Debug)]
pub struct ReceiveRing {
    ring: Descriptors,
    next: u32,
    tail: u32,
    skipping: bool,
    /// What the card wrote where it owned nothing: there is no going on after that.
    astray: u64,
}

impl ReceiveRing {
    /// An empty ring.
    pub fn new(memory: &NicMemory, index: usize, count: u16) -> Self {
        let ring = Descriptors::new(memory, index, count);
        ring.clear();
        ReceiveRing { ring, next: 0, tail: 0, skipping: false, astray: 0 }
    }

    /// The ring that a predecessor left. Changes nothing in it.
    pub fn resume(memory: &NicMemory, index: usize, sash: &Sash) -> Self {
        let mut ring = Descriptors::new(memory, index, sash.head.ring);
        ring.take_over(&sash.posted[index]);
        let cursors = &sash.receive[index];
        ReceiveRing { ring, next: cursors.next, tail: cursors.tail, skipping: cursors.skipping == 1, astray: 0 }
    }

    /// What a successor must know.
    pub fn to_sash(&self, posted: &mut [u64; RING_MAX]) -> ReceiveSash {
        self.ring.to_sash(posted, self.next, self.tail);
        ReceiveSash { next: self.next, tail: self.tail, skipping: self.skipping.into(), reserved: 0 }
    }

    /// What the tail register is to be.
    pub fn tail(&self) -> u32 {
        self.ring.register(self.tail)
    }

    /// What the head register is once all that came was received.
    pub fn head(&self) -> u32 {
        self.ring.register(self.next)
    }

    /// Whether the card has a slot for the next frame, or has filled it.
    pub fn has_slots(&self) -> bool {
        self.next != self.tail
    }

    /// Whether a frame, or what is left of one, has come.
    pub fn is_ready(&self) -> bool {
        self.next != self.tail && self.ring.descriptor(self.ring.place(self.next))[1].load(Acquire) & done::DD != 0
    }

    /// Appends frames to `burst` until it is full or no more are there; says how many.
    ///
    /// # Errors
    /// When the card wrote what it must not. Frames from before that are delivered first.
    pub fn receive(
        &mut self,
        arena: &Arena,
        lengths: Lengths,
        dropped: &mut Dropped,
        burst: &mut Burst,
    ) -> Result<usize, NicError> {
        let before = burst.len();
        loop {
            self.receive_good(arena, lengths, burst);
            if burst.is_full() || self.next == self.tail {
                break;
            }
            // What stands here is no good frame, or begins anew at the ring's first descriptor.
            let word = self.ring.descriptor(self.ring.place(self.next))[1].load(Acquire);
            match self.judge(word, lengths) {
                Verdict::NotDone => break,
                Verdict::Good => {}
                Verdict::Bad => self.refuse(arena, word, dropped),
                // Frames from before it come first; then the same is found again, first thing next time.
                Verdict::Absurd if burst.len() > before => break,
                Verdict::Absurd => {
                    return Err(NicError::Absurd { what: "the length of a received frame", value: word });
                }
            }
        }
        Ok(burst.len() - before)
    }

    /// Appends good frames until there is none, or the ring's last descriptor was looked at.
    #[inline]
    fn receive_good(&mut self, arena: &Arena, lengths: Lengths, burst: &mut Burst) {
        if self.skipping {
            return;
        }
        let first = self.ring.place(self.next);
        let ready = self.tail.wrapping_sub(self.next) as usize;
        let most = ready.min(burst.remaining_capacity()).min(self.ring.slots.len() - first);
        let (words, _) = self.ring.words.as_chunks::<WORDS>();
        let descriptors = words[first..first + most].iter().zip(&self.ring.slots[first..first + most]);
        let mut next = self.next;
        for ([_, status], slot) in descriptors {
            // DONE
            let word = status.load(Acquire);
            let len = done::len(word);
            let is_good = word & (done::DD | done::EOP | done::ERRORS) == done::DD | done::EOP;
            if !is_good || len.wrapping_sub(HEADER_LEN) > lengths.frame - HEADER_LEN {
                break;
            }
            burst.push(Frame { slot: take_back(arena, *slot), len });
            // D4
            status.store(0, Relaxed);
            next = next.wrapping_add(1);
        }
        self.next = next;
    }

    /// What stands in the next descriptor.
    #[cold]
    fn judge(&self, word: u64, lengths: Lengths) -> Verdict {
        let len = done::len(word);
        let whole = word & (done::EOP | done::ERRORS) == done::EOP && !self.skipping;
        let shortest = if whole { HEADER_LEN } else { 1 };
        match (shortest..=lengths.buffer).contains(&len) {
            // Said by `refill`.
            _ if self.astray != 0 => Verdict::NotDone,
            _ if word & done::DD == 0 => Verdict::NotDone,
            false => Verdict::Absurd,
            true if whole && len <= lengths.frame => Verdict::Good,
            true => Verdict::Bad,
        }
    }

    /// Counts a frame that is not delivered, once. Its slot is free again.
    #[cold]
    fn refuse(&mut self, arena: &Arena, word: u64, dropped: &mut Dropped) {
        let place = self.ring.place(self.next);
        drop(take_back(arena, self.ring.slots[place]));
        // D4
        self.ring.descriptor(place)[1].store(0, Relaxed);
        if !self.skipping {
            match word & done::ERRORS {
                0 => dropped.too_long += 1,
                _ => dropped.errors += 1,
            }
        }
        self.skipping = word & done::EOP == 0;
        self.next = self.next.wrapping_add(1);
    }

    /// From here on nothing is received, and refilling fails.
    #[cold]
    fn go_astray(&mut self, value: u64) -> NicError {
        self.astray = value;
        // Whoever skips looks at what comes one by one, off the fast path, where there is time to ask for the reason.
        self.skipping = true;
        NicError::Absurd { what: "a receive descriptor that it did not own", value }
    }

    /// Gives the card free slots until its ring is full or none are left; says whether the tail has changed.
    pub fn refill(&mut self, memory: &NicMemory) -> Result<bool, NicError> {
        let before = self.tail;
        // To the end of the ring, and from its beginning.
        let mut written = self.astray;
        for _ in 0..2 {
            let room = (self.ring.most() - self.tail.wrapping_sub(self.next)) as usize;
            let first = self.ring.place(self.tail);
            let room = room.min(self.ring.slots.len() - first);
            if room == 0 {
                break;
            }
            written |= self.refill_run(memory, first, room);
        }
        // D4
        match written {
            0 => Ok(self.tail != before),
            value => Err(self.go_astray(value)),
        }
    }

    /// Gives the card up to `room` slots in the descriptors from `first` on; says what bits were set in their second words.
    #[inline]
    fn refill_run(&mut self, memory: &NicMemory, first: usize, room: usize) -> u64 {
        let (words, _) = self.ring.words.as_chunks::<WORDS>();
        let mut places = words[first..first + room].iter().zip(&mut self.ring.slots[first..first + room]);
        let (arena_at, slot_len) = (memory.arena_at().0, u64::from(memory.arena().geometry().slot_len));
        let mut written = 0;
        let count = memory.arena().supply(room, |id| {
            if let Some(([address, status], slot)) = places.next() {
                written |= status.load(Relaxed);
                address.store(arena_at + u64::from(id.index) * slot_len, Relaxed);
                *slot = id;
            }
        });
        self.tail = self.tail.wrapping_add(u32::try_from(count).expect("at most as many as there is room for"));
        written
    }
}

/// The transmit ring.
#[derive(Debug)]
pub struct TransmitRing {
    ring: Descriptors,
    sent: u32,
    filled: u32,
}

impl TransmitRing {
    /// An empty ring.
    pub fn new(memory: &NicMemory, index: usize, count: u16) -> Self {
        let ring = Descriptors::new(memory, index, count);
        ring.clear();
        TransmitRing { ring, sent: 0, filled: 0 }
    }

    /// The ring that a predecessor left, behind those of its receive queues. Changes nothing in it.
    pub fn resume(memory: &NicMemory, sash: &Sash) -> Self {
        let mut ring = Descriptors::new(memory, sash.queues.into(), sash.head.ring);
        ring.take_over(&sash.sending);
        TransmitRing { ring, sent: sash.sent, filled: sash.filled }
    }

    /// What a successor must know: the cursors, and the slots.
    pub fn to_sash(&self, sending: &mut [u64; RING_MAX]) -> (u32, u32) {
        self.ring.to_sash(sending, self.sent, self.filled);
        (self.sent, self.filled)
    }

    /// What the tail register is to be.
    pub fn tail(&self) -> u32 {
        self.ring.register(self.filled)
    }

    /// What the head register is to be of a card that goes on with what is not sent yet.
    pub fn head(&self) -> u32 {
        self.ring.register(self.sent)
    }

    /// Frames that the card has not said it has sent.
    pub fn unsent(&self) -> u32 {
        self.filled.wrapping_sub(self.sent)
    }

    /// Takes back the slots of frames that the card has sent.
    pub fn reclaim(&mut self, arena: &Arena) {
        while self.sent != self.filled {
            let place = self.ring.place(self.sent);
            // DONE
            if self.ring.descriptor(place)[1].load(Acquire) & send::DD == 0 {
                break;
            }
            drop(take_back(arena, self.ring.slots[place]));
            self.sent = self.sent.wrapping_add(1);
        }
    }

    /// Frames that the ring has room for.
    fn room(&self) -> usize {
        (self.ring.most() - self.filled.wrapping_sub(self.sent)) as usize
    }

    /// Takes frames from the front of `burst`, as many as there is room for; says how many. Such as cannot be sent are
    /// `refused`, and counted among them.
    pub fn transmit(&mut self, memory: &NicMemory, longest: u16, refused: &mut u64, burst: &mut Burst) -> usize {
        let taken = self.room().min(burst.len());
        for Frame { slot, len } in burst.drain(..taken) {
            if len < HEADER_LEN || len > longest || !memory.arena().owns(&slot) {
                *refused += 1;
                continue;
            }
            let place = self.ring.place(self.filled);
            let [address, command] = self.ring.descriptor(place);
            address.store(memory.slot_at(&slot).0, Relaxed);
            command.store(send::COMMAND | u64::from(len), Relaxed);
            self.ring.slots[place] = lend(memory.arena(), slot);
            self.filled = self.filled.wrapping_add(1);
        }
        taken
    }
}

/// Where the card sees the ring with number `index` of rings of `count` descriptors.
pub fn ring_at(rings_at: Iova, index: usize, count: u16) -> Iova {
    rings_at + (index * usize::from(count) * DESCRIPTOR_LEN) as u64
}
