//! The two rings of descriptors, and the slots in them.
//!
//! # Rules
//!
//! - **D1** A descriptor with OWN set is the card's; the card clears OWN last. The driver loads its contents once, then
//!   checks them, then uses them.
//! - **D2** The slot of each descriptor is remembered in private memory and never read from the ring.
//! - **D3** A receive descriptor always has a slot: a frame leaves it only in exchange for another slot.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use tasuki_shm::region::Span;
use tasuki_shm::slots::SlotId;

use super::driver_state::{Counts, Loan};
use super::regs::{DESCRIPTORS_MAX, descriptor, received, sent};
use crate::nic::bus::Iova;
use crate::nic::loan::{back, lend};
use crate::nic::{NicError, NicMemory};
use crate::port::{BURST_MAX, Burst, Frame};

/// Bytes of a slot that the card may fill: the longest frame with a VLAN tag and its check sequence, rounded up to
/// whole cache lines.
pub const BUFFER_LEN: u32 = 1536;
/// Length in bytes of the check sequence, which the card leaves at the end of a frame.
const CHECK_LEN: u32 = 4;
/// Length in bytes of the shortest meaningful frame: two addresses and a type.
const HEADER_LEN: u32 = 14;

/// The descriptors of either ring. Each is two words: control with status and VLAN tag, and the address of a buffer.
#[derive(Debug)]
struct Descriptors {
    words: Span<AtomicU64>,
    count: usize,
}

impl Descriptors {
    fn after(&self, i: usize) -> usize {
        (i + 1) % self.count
    }

    /// Gives descriptor `i` to the card.
    fn give(&self, i: usize, at: Iova, control: u32) {
        let end = if i + 1 == self.count { descriptor::EOR } else { 0 };
        self.words[2 * i + 1].store(at.0, Relaxed);
        // Release: a card that sees OWN also sees the address (and for the wire, the frame).
        self.words[2 * i].store(u64::from(control | end | descriptor::OWN), Release);
    }

    /// Makes descriptor `i` ours and empty.
    fn clear(&self, i: usize) {
        let end = if i + 1 == self.count { descriptor::EOR } else { 0 };
        self.words[2 * i].store(end.into(), Relaxed);
    }

    /// Returns the status that the card left in descriptor `i`, if the card is done with it (D1).
    #[expect(clippy::cast_possible_truncation, reason = "the low half: the high one has the VLAN tag")]
    fn done(&self, i: usize) -> Option<u32> {
        // Acquire: with OWN clear, the card's earlier writes to the slot are visible.
        let status = self.words[2 * i].load(Acquire) as u32;
        (status & descriptor::OWN == 0).then_some(status)
    }
}

/// Contents of a receive descriptor that the card gave back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Received {
    /// A frame of this length in bytes, without check sequence.
    Frame(u16),
    /// A frame with an error.
    Broken,
    /// A piece of a frame that is longer than a buffer.
    Piece,
}

impl Received {
    fn of(status: u32) -> Result<Self, NicError> {
        let whole = descriptor::FS | descriptor::LS;
        if status & whole != whole {
            return Ok(Received::Piece);
        }
        if status & (received::RES | received::FOVF) != 0 {
            return Ok(Received::Broken);
        }
        let len = status & received::LENGTH;
        match u16::try_from(len.wrapping_sub(CHECK_LEN)) {
            Ok(payload) if len <= BUFFER_LEN && u32::from(payload) >= HEADER_LEN => Ok(Received::Frame(payload)),
            _ => Err(NicError::Absurd { what: "the length in a receive descriptor", value: len.into() }),
        }
    }
}

/// The receive ring.
#[derive(Debug)]
pub struct RxRing {
    descriptors: Descriptors,
    /// Next descriptor to look at.
    next: usize,
    /// Slot of each descriptor (D2).
    slots: [SlotId; DESCRIPTORS_MAX],
}

impl RxRing {
    /// Makes a ring that gives the card all of `slots`.
    pub fn new(memory: &NicMemory, words: Span<AtomicU64>, slots: &[SlotId]) -> Self {
        let mut ring = RxRing {
            descriptors: Descriptors { words, count: slots.len() },
            next: 0,
            slots: [SlotId::from_word(0); DESCRIPTORS_MAX],
        };
        for (i, &id) in slots.iter().enumerate() {
            ring.post(memory, i, id);
        }
        ring
    }

    /// Makes a ring from a parked card's slots. Its last descriptors hold the frames that had come, so that they are
    /// taken first. Its first ones are the card's, because enabling the receiver takes it to descriptor 0.
    pub fn resume(memory: &NicMemory, words: Span<AtomicU64>, loans: &[Loan]) -> Self {
        let come = loans.iter().filter(|loan| loan.status != 0).count();
        let slots: Vec<_> = loans[come..].iter().chain(&loans[..come]).map(Loan::slot).collect();
        let mut ring = Self::new(memory, words, &slots);
        ring.next = (slots.len() - come) % slots.len();
        for (i, loan) in (slots.len() - come..).zip(&loans[..come]) {
            ring.descriptors.words[2 * i].store(u64::from(loan.status & !descriptor::OWN), Relaxed);
        }
        ring
    }

    /// Returns the contents of the ring, the oldest first, with the card's status for frames that have come. The card
    /// is parked.
    pub fn loans(&self) -> impl Iterator<Item = Loan> {
        let mut i = self.next;
        let mut come = true;
        (0..self.descriptors.count).map(move |_| {
            // The card fills descriptors in order, so none behind one that it still has can be done.
            let status = self.descriptors.done(i).filter(|_| come);
            come = status.is_some();
            // A status of zero would mean "none has come". With a 1 in it, it is still a piece and is dropped.
            let loan = Loan::new(self.slots[i], status.map_or(0, |status| status | u32::from(status == 0)));
            i = self.descriptors.after(i);
            loan
        })
    }

    /// Returns whether the card is done with the next descriptor.
    pub fn is_ready(&self) -> bool {
        self.descriptors.done(self.next).is_some()
    }

    fn post(&mut self, memory: &NicMemory, i: usize, id: SlotId) {
        self.slots[i] = id;
        self.descriptors.give(i, memory.at_of(id), BUFFER_LEN);
    }

    /// Appends frames that have come to `burst`, at most `most`. Returns their number.
    pub fn receive(
        &mut self,
        memory: &NicMemory,
        burst: &mut Burst,
        most: usize,
        counts: &mut Counts,
    ) -> Result<usize, NicError> {
        let before = burst.len();
        // Bounded: a card that produces rubbish as fast as we drop it must not keep us here.
        for _ in 0..most.min(burst.remaining_capacity()) {
            let Some(status) = self.descriptors.done(self.next) else { break };
            let received = Received::of(status)?;
            let id = self.slots[self.next];
            match received {
                Received::Frame(len) => {
                    let Some(fresh) = memory.arena().take() else {
                        counts.rx_no_slot += 1;
                        break;
                    };
                    self.post(memory, self.next, lend(memory.arena(), fresh)); // D3
                    burst.push(Frame { slot: back(memory, id)?, len });
                    counts.rx_packets += 1;
                    counts.rx_bytes += u64::from(len);
                }
                Received::Broken | Received::Piece => {
                    self.post(memory, self.next, id);
                    counts.rx_frags += u64::from(received == Received::Piece);
                    counts.rx_errors += 1;
                }
            }
            self.next = self.descriptors.after(self.next);
        }
        Ok(burst.len() - before)
    }
}

/// The transmit ring.
#[derive(Debug)]
pub struct TxRing {
    descriptors: Descriptors,
    /// Oldest descriptor that the card has.
    oldest: usize,
    /// Number of descriptors that the card has, from `oldest` on.
    held: usize,
    /// Slot of each descriptor (D2).
    slots: [SlotId; DESCRIPTORS_MAX],
    /// Length of each frame in bytes.
    lens: [u16; DESCRIPTORS_MAX],
}

impl TxRing {
    /// Makes a ring of `count` descriptors that gives the card the frames of `loans`.
    pub fn new(memory: &NicMemory, words: Span<AtomicU64>, count: usize, loans: &[Loan]) -> Self {
        let mut ring = TxRing {
            descriptors: Descriptors { words, count },
            oldest: 0,
            held: 0,
            slots: [SlotId::from_word(0); DESCRIPTORS_MAX],
            lens: [0; DESCRIPTORS_MAX],
        };
        (0..count).for_each(|i| ring.descriptors.clear(i));
        for loan in loans {
            ring.post(memory, loan.slot(), loan.to_send());
        }
        ring
    }

    /// Returns the frames that the card has, the oldest first. The card is parked.
    pub fn loans(&self) -> impl Iterator<Item = Loan> {
        (0..self.held).map(|i| (self.oldest + i) % self.descriptors.count).map(|i| {
            let id = self.slots[i];
            Loan::new(id, self.lens[i].into())
        })
    }

    /// Returns whether the card has sent everything.
    pub fn is_empty(&self) -> bool {
        self.held == 0
    }

    fn post(&mut self, memory: &NicMemory, id: SlotId, len: u16) {
        let i = (self.oldest + self.held) % self.descriptors.count;
        self.slots[i] = id;
        self.lens[i] = len;
        self.held += 1;
        self.descriptors.give(i, memory.at_of(id), descriptor::FS | descriptor::LS | u32::from(len));
    }

    /// Takes back the frames that the card has sent.
    pub fn reap(&mut self, memory: &NicMemory, counts: &mut Counts) -> Result<(), NicError> {
        while self.held > 0 {
            let Some(status) = self.descriptors.done(self.oldest) else { break };
            counts.tx_errors += u64::from(status & sent::TES != 0);
            drop(back(memory, self.slots[self.oldest])?);
            self.oldest = self.descriptors.after(self.oldest);
            self.held -= 1;
        }
        Ok(())
    }

    /// Takes frames from the front of `burst`, as many as there is room for. Returns their number. Takes and drops
    /// frames of a length that the wire does not carry (more than `len_max` bytes, or too short).
    pub fn transmit(&mut self, memory: &NicMemory, burst: &mut Burst, len_max: u16, counts: &mut Counts) -> usize {
        let room = (self.descriptors.count - self.held).min(burst.len());
        for frame in burst.drain(..room) {
            if u32::from(frame.len) < HEADER_LEN || frame.len > len_max {
                counts.tx_dropped += 1;
                continue;
            }
            counts.tx_packets += 1;
            counts.tx_bytes += u64::from(frame.len);
            self.post(memory, lend(memory.arena(), frame.slot), frame.len);
        }
        room
    }
}

const _: () = assert!(BURST_MAX <= DESCRIPTORS_MAX);

#[cfg(test)]
mod tests {
    use tasuki_shm::arena::Geometry;

    use super::*;
    use crate::nic::loan;

    const COUNT: usize = 4;

    /// A receive ring, and the words that the card writes.
    fn ring() -> (NicMemory, RxRing, Span<AtomicU64>) {
        let memory = NicMemory::create(Geometry { slot_len: 4096, count: 16 }, 4096, Iova(1 << 32)).unwrap();
        let words = || memory.rings().span(0, 2 * COUNT).unwrap();
        let slots = loan::stock(&memory, COUNT).unwrap();
        let ring = RxRing::new(&memory, words(), &slots);
        let card = words();
        (memory, ring, card)
    }

    fn receive(memory: &NicMemory, ring: &mut RxRing) -> Result<(Vec<u16>, Counts), NicError> {
        let (mut burst, mut counts) = (Burst::new(), Counts::default());
        ring.receive(memory, &mut burst, BURST_MAX, &mut counts)?;
        Ok((burst.iter().map(|frame| frame.len).collect(), counts))
    }

    const WHOLE: u32 = descriptor::FS | descriptor::LS;

    #[test]
    fn lengths_that_no_frame_has_are_errors() {
        for len in [0, 3, 4, 17, BUFFER_LEN + 1, received::LENGTH] {
            let (memory, mut ring, card) = ring();
            card[0].store((WHOLE | len).into(), Relaxed);
            let error = receive(&memory, &mut ring).unwrap_err();
            assert!(matches!(error, NicError::Absurd { value, .. } if value == u64::from(len)), "{error}");
        }
        for len in [18, BUFFER_LEN] {
            let (memory, mut ring, card) = ring();
            card[0].store((WHOLE | len).into(), Relaxed);
            let (lens, _) = receive(&memory, &mut ring).unwrap();
            assert_eq!(lens, [u16::try_from(len - 4).unwrap()]);
        }
    }

    #[test]
    fn ones_everywhere_are_no_frame() {
        let (memory, mut ring, card) = ring();
        card.iter().for_each(|word| word.store(u64::MAX, Relaxed));
        assert!(receive(&memory, &mut ring).unwrap().0.is_empty());
    }

    #[test]
    fn pieces_and_broken_frames_are_counted_and_their_slots_used_again() {
        for error in [received::RES, received::FOVF] {
            let (memory, mut ring, card) = ring();
            card[0].store(descriptor::FS.into(), Relaxed);
            card[2].store(0, Relaxed);
            card[4].store((WHOLE | error | 64).into(), Relaxed);
            card[6].store((WHOLE | 64).into(), Relaxed);
            let (lens, counts) = receive(&memory, &mut ring).unwrap();
            assert_eq!(lens, [60]);
            assert_eq!((counts.rx_frags, counts.rx_errors, counts.rx_packets), (2, 3, 1));
            assert_eq!(memory.arena().census().peer, 4);
            assert_eq!(card[6].load(Relaxed), u64::from(descriptor::OWN | descriptor::EOR | BUFFER_LEN));
        }
    }

    /// A second write-back of a descriptor that was posted again counts as its next frame, or as none.
    #[test]
    fn a_descriptor_written_back_twice_brings_no_frame_twice() {
        let (memory, mut ring, card) = ring();
        card[0].store((WHOLE | 64).into(), Relaxed);
        assert_eq!(receive(&memory, &mut ring).unwrap().0, [60]);
        card[0].store((WHOLE | 64).into(), Relaxed);
        assert!(receive(&memory, &mut ring).unwrap().0.is_empty());
    }

    #[test]
    fn without_a_slot_to_replace_it_a_frame_waits() {
        let (memory, mut ring, card) = ring();
        let slots: Vec<_> = std::iter::from_fn(|| memory.arena().take()).collect();
        card[0].store((WHOLE | 64).into(), Relaxed);
        let (lens, counts) = receive(&memory, &mut ring).unwrap();
        assert_eq!((lens, counts.rx_no_slot), (vec![], 1));
        drop(slots);
        assert_eq!(receive(&memory, &mut ring).unwrap().0, [60]);
    }
}
