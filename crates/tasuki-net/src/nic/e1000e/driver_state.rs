//! State of a parked 82574 that a successor needs. The rings stay in the NIC's memory; the driver state says where
//! they are and which slots they hold.

use std::mem::offset_of;

use tasuki_shm::line::halves;
use tasuki_shm::slots::SlotId;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use super::counters::Counters;
use super::ring::{self, RING_MAX};
use super::setup::Shape;
use crate::nic::driver_state::{self, Head, InLedger, broken};
use crate::nic::ledger::{CURSORS, GIVEN, SELDOM};
use crate::nic::{MemoryLayout, NicError};

/// Number of receive queues of the card.
pub const QUEUES_MAX: usize = 2;
/// Number of registers in the multicast table.
pub const MTA_WORDS: usize = 128;
/// Number of counters in the driver state: see [`super::counters`].
pub const COUNTERS: usize = 32;

/// Indices of the ledger's cursors, after those of the receive queues.
pub const SKIPPING: usize = QUEUES_MAX;
pub const SENT: usize = SKIPPING + 1;
const _: () = assert!(SENT < GIVEN);

/// Word for a descriptor without a slot.
pub const NO_SLOT: u64 = u64::MAX;

/// State that a successor needs. Only parking creates a valid one; resuming refuses any other content.
#[repr(C)]
#[derive(Debug, Clone, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct DriverState {
    /// Common head of all driver states.
    pub head: Head,
    /// Number of receive queues.
    pub queues: u16,
    /// Maximum payload of a frame in bytes.
    pub mtu: u16,
    /// Filter bits: 1 accepts every frame, 2 every multicast frame.
    pub filter: u16,
    /// Flow-control bits: 1 if the card uses flow control, 2 if its partner still pauses since a predecessor parked
    /// the card.
    pub flow_control: u16,
    /// Cursors of the receive rings.
    pub receive: [ReceiveDriverState; QUEUES_MAX],
    /// Transmit cursor: the next descriptor that the card will finish, as a running count.
    pub sent: u32,
    /// Transmit cursor: the next descriptor to be filled.
    pub filled: u32,
    /// Contents of the multicast table.
    pub mta: [u32; MTA_WORDS],
    /// Accumulated counters, in the driver's order.
    pub counters: [u64; COUNTERS],
    /// Slot (`SlotId::to_word`) in each receive descriptor, or all ones if it has none.
    pub posted: [[u64; RING_MAX]; QUEUES_MAX],
    /// Slot in each transmit descriptor, or all ones if it has none.
    pub sending: [u64; RING_MAX],
}

const _: () = assert!(size_of::<DriverState>() == 25_432);
const _: () = assert!(offset_of!(DriverState, posted).is_multiple_of(8));
const _: () = assert!(
    offset_of!(DriverState, sending) == offset_of!(DriverState, posted) + QUEUES_MAX * size_of::<[u64; RING_MAX]>()
);

/// Cursors of a receive ring. They count descriptors without end; their low bits are the place in the ring.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct ReceiveDriverState {
    /// Next descriptor to receive from.
    pub next: u32,
    /// Next descriptor to be given a slot.
    pub tail: u32,
    /// 1 in the middle of a frame that spans several descriptors and is dropped.
    pub skipping: u32,
    /// Always 0.
    pub reserved: u32,
}

const _: () = assert!(DriverState::SELDOM_LEN <= SELDOM * 8);

impl DriverState {
    /// Checks whether everything but the tables of slots makes sense for this memory, and returns the shape.
    fn check_seldom(&self, memory: &MemoryLayout) -> Result<Shape, NicError> {
        let shape = self.shape(memory)?;
        if self.filter > 3 {
            return Err(broken("the filter", self.filter.into()));
        }
        if self.flow_control > 3 {
            return Err(broken("flow control", self.flow_control.into()));
        }
        Counters::check(&self.counters)?;
        for (queue, cursors) in self.receive.iter().enumerate() {
            if cursors.skipping > 1 || cursors.reserved != 0 {
                return Err(broken("the state of a receive ring", cursors.skipping.into()));
            }
            if queue >= shape.queues.into() && *cursors != ReceiveDriverState::default() {
                return Err(broken("the cursors of a queue that is not used", cursors.next.into()));
            }
            held(shape.ring, cursors.next, cursors.tail)?;
        }
        held(shape.ring, self.sent, self.filled)?;
        Ok(shape)
    }

    /// Returns the shape of rings and frames.
    pub(super) fn shape(&self, memory: &MemoryLayout) -> Result<Shape, NicError> {
        let queues = u8::try_from(self.queues).unwrap_or(u8::MAX);
        Shape::new(self.head.ring, queues, self.mtu, memory).map_err(|error| match error {
            NicError::Options { field, value, .. } => broken(field, value),
            NicError::Memory { what, need, .. } => broken(what, need as u64),
            other => other,
        })
    }
}

impl driver_state::DriverState for DriverState {
    const KIND: u32 = 0x8086_10d3;
    const VERSION: u32 = 3;

    fn head(&self) -> &Head {
        &self.head
    }

    fn check_body(&self, memory: &MemoryLayout) -> Result<(), NicError> {
        let shape = self.check_seldom(memory)?;
        for (cursors, posted) in self.receive.iter().zip(&self.posted) {
            check_ring(posted, shape.ring, cursors.next, cursors.tail)?;
        }
        check_ring(&self.sending, shape.ring, self.sent, self.filled)
    }

    fn blank() -> Box<Self> {
        let mut blank = Box::new(DriverState::new_zeroed());
        blank.posted.as_flattened_mut().fill(NO_SLOT);
        blank.sending.fill(NO_SLOT);
        blank
    }

    fn slots(&self) -> impl Iterator<Item = SlotId> {
        let ring = usize::from(self.head.ring).min(RING_MAX);
        let words = self.posted.iter().chain([&self.sending]).flat_map(move |words| &words[..ring]);
        words.filter(|&&word| word != NO_SLOT).map(|&word| SlotId::from_word(word))
    }
}

impl InLedger for DriverState {
    const SELDOM_LEN: usize = offset_of!(DriverState, posted);

    fn set_cursors(&mut self, cursors: &[u64; CURSORS]) {
        for (queue, (receive, word)) in self.receive.iter_mut().zip(cursors).enumerate() {
            let (next, tail) = halves(*word);
            let skipping = u32::from(cursors[SKIPPING] >> queue & 1 == 1);
            *receive = ReceiveDriverState { next, tail, skipping, reserved: 0 };
        }
        (self.sent, self.filled) = halves(cursors[SENT]);
    }

    fn check_ledger(&self, memory: &MemoryLayout) -> Result<(), NicError> {
        self.check_seldom(memory).map(drop)
    }
}

/// Returns the number of slots that a ring holds, which must be less than the number of its descriptors.
fn held(ring: u16, from: u32, to: u32) -> Result<u32, NicError> {
    match to.wrapping_sub(from) {
        held if held < u32::from(ring) => Ok(held),
        held => Err(broken("cursors are further apart than their ring is long", held.into())),
    }
}

/// Checks that a ring holds slots in the descriptors `from..to`, and nowhere else. There must be fewer of them than
/// descriptors in the ring.
fn check_ring(words: &[u64; RING_MAX], ring: u16, from: u32, to: u32) -> Result<(), NicError> {
    let (held, mask) = (held(ring, from, to)?, u32::from(ring) - 1);
    let wrong = |place: u64| Err(broken("a slot where none is, or none where one is, in descriptor", place));
    let (inside, beyond) = words.split_at(usize::from(ring));
    for (place, &word) in (0_u32..).zip(inside) {
        let is_held = place.wrapping_sub(from) & mask < held;
        if is_held != (word != NO_SLOT) {
            return wrong(place.into());
        }
    }
    // Check all words at once, since a driver that takes over a running card has no time. All ones is no slot.
    match beyond.iter().fold(NO_SLOT, |all, word| all & word) {
        NO_SLOT => Ok(()),
        _ => wrong(ring.into()),
    }
}

/// Returns the number of bytes that rings of this shape need in the rings' region.
pub fn rings_len(queues: u8, ring: u16) -> usize {
    (usize::from(queues) + 1) * usize::from(ring) * ring::DESCRIPTOR_LEN
}

#[cfg(test)]
mod tests {
    use tasuki_shm::arena::Geometry;
    use zerocopy::FromZeros;

    use super::*;
    use crate::nic::Mac;
    use crate::nic::bus::Iova;
    use crate::nic::driver_state::{DriverState as _, tests};

    const MEMORY: MemoryLayout =
        MemoryLayout { rings_at: Iova(0x1000), rings_len: 4096, slots: Geometry { slot_len: 4096, count: 64 } };

    fn word(index: u32) -> u64 {
        SlotId { index, generation: 3 }.to_word()
    }

    /// A ring of 8 whose cursors have wrapped around, with one frame to be sent.
    fn driver_state() -> DriverState {
        let head = Head::of::<DriverState>(&MEMORY, Mac([2, 0, 0, 0, 0, 1]), 8);
        let mut driver_state =
            DriverState { head, queues: 1, mtu: 1500, sent: 9, filled: 10, ..DriverState::new_zeroed() };
        driver_state.receive[0] = ReceiveDriverState { next: u32::MAX - 1, tail: 5, ..ReceiveDriverState::default() };
        driver_state.posted = [[NO_SLOT; RING_MAX]; QUEUES_MAX];
        driver_state.sending = [NO_SLOT; RING_MAX];
        (0..7).zip([6, 7, 0, 1, 2, 3, 4]).for_each(|(slot, place)| driver_state.posted[0][place] = word(slot));
        driver_state.sending[1] = word(63);
        driver_state
    }

    #[test]
    fn a_driver_state_that_cannot_be_true_is_refused() {
        driver_state().check(&MEMORY).unwrap();
        type Change = (&'static str, fn(&mut DriverState));
        let changes: [Change; 21] = [
            ("version 4", |driver_state| driver_state.head.version += 1),
            ("the driver state is of", |driver_state| driver_state.head.kind ^= 1),
            ("rings are at another address", |driver_state| driver_state.head.rings_at += 4096),
            ("frames are at another address", |driver_state| driver_state.head.arena_at += 4096),
            ("the length of its slots", |driver_state| driver_state.head.slot_len *= 2),
            ("the number of its slots", |driver_state| driver_state.head.slots += 1),
            ("ring (0x0)", |driver_state| driver_state.head.ring = 0),
            ("ring (0x800)", |driver_state| driver_state.head.ring = 2048),
            ("frames (0x80000)", |driver_state| driver_state.head.ring = 128),
            ("queues (0x3)", |driver_state| driver_state.queues = 3),
            ("mtu (0x2329)", |driver_state| driver_state.mtu = 9001),
            ("slots (0x4000)", |driver_state| driver_state.mtu = 9000),
            ("further apart", |driver_state| driver_state.receive[0].next = 0x1000),
            ("in descriptor (0x4)", |driver_state| driver_state.receive[0].tail -= 1),
            ("in descriptor (0x6)", |driver_state| driver_state.receive[0].next += 1),
            ("in descriptor (0x2)", |driver_state| driver_state.filled += 1),
            ("not used", |driver_state| driver_state.receive[1].next = 1),
            ("a slot twice", |driver_state| driver_state.sending[1] = driver_state.posted[0][0]),
            ("does not have", |driver_state| driver_state.sending[1] = word(64)),
            ("the filter", |driver_state| driver_state.filter = 4),
            ("what was counted", |driver_state| driver_state.counters[27] = u64::MAX),
        ];
        for (why, change) in changes {
            let mut wrong = driver_state();
            change(&mut wrong);
            let error = wrong.check(&MEMORY).unwrap_err().to_string();
            assert!(error.contains(why), "{why}: {error}");
        }
    }

    #[test]
    fn bytes_of_all_kinds_are_refused_or_harmless() {
        tests::bytes_of_all_kinds(&driver_state(), &MEMORY);
    }
}
