//! Driver state of an RTL8139C+, for a successor. It is complete, since the card itself tells nothing about its place
//! in its rings.
//!
//! The rings are not part of it. Enabling the receiver takes the card to descriptor 0, so a successor writes them anew
//! from these lists. Until it does, nothing has changed, and the giver can go on instead.

use tasuki_shm::slots::SlotId;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use super::RINGS_LEN;
use super::regs::DESCRIPTORS_MAX;
use super::ring::BUFFER_LEN;
use crate::nic::driver_state::{self, Head, broken, check_counts};
use crate::nic::{MTU_MIN, MemoryLayout, NicError};

/// A slot in a ring.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Loan {
    slot: u64,
    /// In the receive ring, the card's status of the frame, or 0 if none has come; in the transmit ring, the number of
    /// bytes to send.
    pub status: u32,
    reserved: u32,
}

impl Loan {
    /// Makes the loan of a slot.
    pub fn new(slot: SlotId, status: u32) -> Self {
        Loan { slot: slot.to_word(), status, reserved: 0 }
    }

    /// Returns the slot.
    pub fn slot(&self) -> SlotId {
        SlotId::from_word(self.slot)
    }

    /// Returns the number of bytes to send.
    #[expect(clippy::cast_possible_truncation, reason = "DriverState::check saw that it fits")]
    pub fn to_send(&self) -> u16 {
        self.status as u16
    }
}

/// Counts of the driver; `ethtool -S` shows them under these names.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Counts {
    /// Number of frames received.
    pub rx_packets: u64,
    /// Number of bytes received.
    pub rx_bytes: u64,
    /// Number of frames that the card received with an error.
    pub rx_errors: u64,
    /// Of `rx_errors`: number of descriptors with pieces of frames that were longer than a buffer.
    pub rx_frags: u64,
    /// Number of times that a frame had to wait in the ring because the arena had no slot to replace it.
    pub rx_no_slot: u64,
    /// Number of frames given to the card.
    pub tx_packets: u64,
    /// Number of bytes in those frames.
    pub tx_bytes: u64,
    /// Number of frames that the card could not send.
    pub tx_errors: u64,
    /// Number of frames dropped because no Ethernet has frames of their length.
    pub tx_dropped: u64,
}

/// The driver state of an RTL8139C+.
#[derive(Debug, Clone, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DriverState {
    /// Header of every driver state.
    pub head: Head,
    /// Length of the longest frame that is sent, in bytes.
    pub frame_max: u16,
    /// Number of valid entries in `tx`.
    pub unsent: u16,
    pub(super) reserved: u32,
    /// Receive ring, the oldest first: frames that have come and were not received, then empty slots.
    pub rx: [Loan; DESCRIPTORS_MAX],
    /// Unsent frames, the oldest first.
    pub tx: [Loan; DESCRIPTORS_MAX],
    /// Counts so far.
    pub counts: Counts,
}

const _: () = assert!(size_of::<DriverState>() == 2168);

impl DriverState {
    /// Returns the receive ring.
    pub fn received(&self) -> &[Loan] {
        &self.rx[..self.head.ring.into()]
    }

    /// Returns the unsent frames.
    pub fn unsent(&self) -> &[Loan] {
        &self.tx[..self.unsent.into()]
    }
}

impl driver_state::DriverState for DriverState {
    const KIND: u32 = 0x10ec_8139;
    const VERSION: u32 = 2;

    fn head(&self) -> &Head {
        &self.head
    }

    fn blank() -> Box<Self> {
        Box::new(FromZeros::new_zeroed())
    }

    fn check_body(&self, memory: &MemoryLayout) -> Result<(), NicError> {
        check_counts(&self.counts)?;
        let ring = self.head.ring;
        if !ring.is_power_of_two() || !(2..=DESCRIPTORS_MAX).contains(&ring.into()) {
            return Err(broken("the number of descriptors", ring.into()));
        }
        if memory.rings_len < RINGS_LEN {
            return Err(broken("the bytes for rings", memory.rings_len as u64));
        }
        if self.unsent > ring {
            return Err(broken("the number of unsent frames", self.unsent.into()));
        }
        if !(u32::from(MTU_MIN)..=BUFFER_LEN).contains(&self.frame_max.into()) {
            return Err(broken("the longest frame", self.frame_max.into()));
        }
        if let Some(long) = self.unsent().iter().find(|loan| loan.status > self.frame_max.into()) {
            return Err(broken("the length of an unsent frame", long.status.into()));
        }
        // Frames that have come are the first.
        if !self.received().is_sorted_by_key(|loan| loan.status == 0) {
            return Err(broken("frames that have come behind slots that are empty, in a ring of", ring.into()));
        }
        let rest = self.rx[ring.into()..].iter().chain(&self.tx[self.unsent.into()..]);
        if rest.clone().any(|loan| *loan != Loan::default()) {
            return Err(broken("slots beyond the end of a ring of", ring.into()));
        }
        match self.reserved == 0 && self.rx.iter().chain(&self.tx).all(|loan| loan.reserved == 0) {
            true => Ok(()),
            false => Err(broken("what is reserved", self.reserved.into())),
        }
    }

    fn slots(&self) -> impl Iterator<Item = SlotId> {
        self.received().iter().chain(self.unsent()).map(Loan::slot)
    }
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

    fn loan(index: u32, status: u32) -> Loan {
        Loan::new(SlotId { index, generation: 2 }, status)
    }

    /// A driver state of a ring of eight, with two frames that have come and one unsent frame.
    fn driver_state() -> DriverState {
        let head = Head::of::<DriverState>(&MEMORY, Mac([2, 0, 0, 0, 0, 1]), 8);
        let mut driver_state = DriverState { head, frame_max: 1518, unsent: 1, ..DriverState::new_zeroed() };
        (0..8).for_each(|i| driver_state.rx[i as usize] = loan(i, if i < 2 { 0x3000_0040 } else { 0 }));
        driver_state.tx[0] = loan(63, 1518);
        driver_state
    }

    #[test]
    fn a_driver_state_that_cannot_be_true_is_refused() {
        driver_state().check(&MEMORY).unwrap();
        type Change = (&'static str, fn(&mut DriverState));
        let changes: [Change; 17] = [
            ("version 3", |driver_state| driver_state.head.version += 1),
            ("the driver state is of", |driver_state| driver_state.head.kind = 0x8086_10d3),
            ("rings are at another address", |driver_state| driver_state.head.rings_at = 0),
            ("frames are at another address", |driver_state| driver_state.head.arena_at = 0),
            ("the number of its slots", |driver_state| driver_state.head.slots = 32),
            ("the number of descriptors (0x80)", |driver_state| driver_state.head.ring = 128),
            ("the number of descriptors (0x0)", |driver_state| driver_state.head.ring = 0),
            ("the number of descriptors (0x9)", |driver_state| driver_state.head.ring = 9),
            ("beyond the end", |driver_state| driver_state.head.ring = 4),
            ("unsent frames (0x9)", |driver_state| driver_state.unsent = 9),
            ("beyond the end", |driver_state| driver_state.unsent = 0),
            ("the longest frame", |driver_state| driver_state.frame_max = 9000),
            ("length of an unsent frame", |driver_state| driver_state.tx[0].status += 1),
            ("behind slots that are empty", |driver_state| driver_state.rx[0].status = 0),
            ("a slot twice", |driver_state| driver_state.rx[1] = driver_state.rx[0]),
            ("does not have", |driver_state| driver_state.rx[1] = loan(64, 64)),
            ("what is reserved", |driver_state| driver_state.rx[7].reserved = 1),
        ];
        for (why, change) in changes {
            let mut wrong = driver_state();
            change(&mut wrong);
            let error = wrong.check(&MEMORY).unwrap_err().to_string();
            assert!(error.contains(why), "{why}: {error}");
        }
        let error = driver_state().check(&MemoryLayout { rings_len: 2048, ..MEMORY }).unwrap_err();
        assert!(error.to_string().contains("at another address"), "{error}");
    }

    #[test]
    fn bytes_of_all_kinds_are_refused_or_harmless() {
        tests::bytes_of_all_kinds(&driver_state(), &MEMORY);
    }
}
