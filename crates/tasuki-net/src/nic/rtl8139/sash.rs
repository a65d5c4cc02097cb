//! What a successor must know of an RTL8139C+: all of it, since the card itself tells nothing of where it stands in its rings.
//!
//! The rings themselves are not part of it. Enabling the receiver takes the card to descriptor 0, so a successor writes them anew
//! from the lists that stand here; until it does, nothing has changed, and the giver can go on instead.

use tasuki_shm::slots::SlotId;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::regs::DESCRIPTORS_MAX;
use super::ring::BUFFER_LEN;
use crate::nic::{COUNT_MAX, NicError};

/// Whose sash it is: the card's vendor and device.
pub const KIND: u32 = 0x10ec_8139;
/// Of the layout below.
pub const VERSION: u32 = 1;

/// A slot that is in a ring.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Loan {
    slot: u64,
    /// In the receive ring what the card wrote of the frame in it, and 0 if none has come; in the transmit ring bytes to be sent.
    pub status: u32,
    reserved: u32,
}

impl Loan {
    /// A slot, and what there is to say of it.
    pub fn new(slot: SlotId, status: u32) -> Self {
        Loan { slot: slot.to_word(), status, reserved: 0 }
    }

    /// Which slot.
    pub fn slot(&self) -> SlotId {
        SlotId::from_word(self.slot)
    }

    /// Bytes to be sent.
    #[expect(clippy::cast_possible_truncation, reason = "Sash::check saw that it fits")]
    pub fn to_send(&self) -> u16 {
        self.status as u16
    }
}

/// What the driver has counted, by the names that `ethtool -S` has for them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Counts {
    /// Frames received.
    pub rx_packets: u64,
    /// Bytes of them.
    pub rx_bytes: u64,
    /// Frames that the card received with an error.
    pub rx_errors: u64,
    /// Of these: descriptors with pieces of frames that were longer than a buffer.
    pub rx_frags: u64,
    /// Times that a frame had to wait in the ring because the arena had no slot to replace it by.
    pub rx_no_slot: u64,
    /// Frames given to the card.
    pub tx_packets: u64,
    /// Bytes of them.
    pub tx_bytes: u64,
    /// Frames that the card could not send.
    pub tx_errors: u64,
    /// Frames that were thrown away because no Ethernet has frames of their length.
    pub tx_dropped: u64,
}

impl Counts {
    /// The first count that is more than `most`.
    fn beyond(&self, most: u64) -> Option<u64> {
        let counts: [u64; size_of::<Counts>() / 8] = zerocopy::transmute!(*self);
        counts.into_iter().find(|&count| count > most)
    }
}

/// The sash.
#[derive(Debug, Clone, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Sash {
    /// [`KIND`].
    pub kind: u32,
    /// [`VERSION`].
    pub version: u32,
    /// Where the card sees the rings.
    pub rings_at: u64,
    /// The card's address.
    pub mac: [u8; 6],
    /// Descriptors in each ring.
    pub ring: u16,
    /// Longest frame that is sent, in bytes.
    pub frame_max: u16,
    /// Entries of `tx` that count.
    pub unsent: u16,
    pub(super) reserved: u32,
    /// The receive ring, the oldest first: frames that have come and were not received, then empty slots.
    pub rx: [Loan; DESCRIPTORS_MAX],
    /// Frames that were not sent, the oldest first.
    pub tx: [Loan; DESCRIPTORS_MAX],
    /// Counted so far.
    pub counts: Counts,
}

impl Sash {
    /// Whether we understand it, and it makes sense for rings at `rings_at`.
    pub fn check(&self, rings_at: u64) -> Result<(), NicError> {
        let Sash { kind, version, .. } = *self;
        if (kind, version) != (KIND, VERSION) {
            return Err(NicError::OtherSash { kind, version, ours: VERSION });
        }
        let wrong = |what, value| Err(NicError::BrokenSash { what, value });
        if let Some(count) = self.counts.beyond(COUNT_MAX) {
            return wrong("what was counted", count);
        }
        if self.rings_at != rings_at {
            return wrong("its rings are at another address", self.rings_at);
        }
        let ring = usize::from(self.ring);
        if !ring.is_power_of_two() || ring > DESCRIPTORS_MAX {
            return wrong("the number of descriptors", self.ring.into());
        }
        if self.unsent > self.ring {
            return wrong("the number of unsent frames", self.unsent.into());
        }
        if u32::from(self.frame_max) > BUFFER_LEN {
            return wrong("the longest frame", self.frame_max.into());
        }
        if let Some(long) = self.unsent().iter().find(|loan| loan.status > self.frame_max.into()) {
            return wrong("the length of an unsent frame", long.status.into());
        }
        Ok(())
    }

    /// Every slot that is in a ring.
    pub fn slots(&self) -> impl Iterator<Item = SlotId> {
        self.received().iter().chain(self.unsent()).map(Loan::slot)
    }

    /// The receive ring.
    pub fn received(&self) -> &[Loan] {
        &self.rx[..self.ring.into()]
    }

    /// The frames that were not sent.
    pub fn unsent(&self) -> &[Loan] {
        &self.tx[..self.unsent.into()]
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::FromZeros;

    use super::*;

    fn sash() -> Sash {
        Sash { kind: KIND, version: VERSION, rings_at: 0x1000, ring: 8, frame_max: 1518, ..Sash::new_zeroed() }
    }

    #[test]
    fn a_sash_that_cannot_be_true_is_refused() {
        sash().check(0x1000).unwrap();
        let unsent = |status| {
            let mut sash = Sash { unsent: 1, ..sash() };
            sash.tx[0].status = status;
            sash
        };
        unsent(1518).check(0x1000).unwrap();
        for (wrong, why) in [
            (Sash { version: 2, ..sash() }, "version 2"),
            (Sash { kind: 0x8086_10d3, ..sash() }, "the sash is of"),
            (Sash { ring: 128, ..sash() }, "the number of descriptors (0x80)"),
            (Sash { ring: 0, ..sash() }, "the number of descriptors (0x0)"),
            (Sash { unsent: 9, ..sash() }, "unsent frames (0x9)"),
            (Sash { frame_max: 9000, ..sash() }, "the longest frame"),
            (Sash { rings_at: 0, ..sash() }, "at another address"),
            (unsent(1519), "length of an unsent frame"),
            (Sash { counts: Counts { tx_dropped: u64::MAX, ..sash().counts }, ..sash() }, "what was counted"),
        ] {
            let error = wrong.check(0x1000).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
