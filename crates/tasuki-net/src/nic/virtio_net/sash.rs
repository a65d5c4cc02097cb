//! What a successor must know of a virtio network device.
//!
//! Where queues can be reset (VIRTIO_F_RING_RESET) they are, and begin anew at index 0: the sash lists frames and slots, in order.
//! Where they cannot, they are kept as they stand in memory: the sash has the driver's indices, and what is in each chain.

use tasuki_shm::slots::SlotId;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::regs::feature;
use crate::nic::{COUNT_MAX, NicError};

/// Whose sash it is: the device's vendor and identity.
pub const KIND: u32 = 0x1af4_1041;
/// Of the layout below.
pub const VERSION: u32 = 1;

/// Most descriptors in a queue.
pub const DESCRIPTORS_MAX: usize = 512;
/// Most chains in a queue: two descriptors each.
pub const CHAINS_MAX: usize = DESCRIPTORS_MAX / 2;

/// A slot that the device has, or had.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Loan {
    slot: u64,
    /// Bytes of the frame in it, or for one.
    pub len: u32,
    /// The queue's index when it was posted.
    pub turn: u16,
    reserved: u16,
}

impl Loan {
    /// No slot.
    pub const NONE: Loan = Loan { slot: u64::MAX, len: 0, turn: 0, reserved: 0 };

    /// A slot, and what there is to say of it.
    pub fn new(slot: SlotId, len: u32, turn: u16) -> Self {
        Loan { slot: slot.to_word(), len, turn, reserved: 0 }
    }

    /// Which slot.
    pub fn slot(&self) -> SlotId {
        SlotId::from_word(self.slot)
    }
}

/// Where the driver stands in a queue.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Cursor {
    /// Chains made available so far, modulo 2¹⁶.
    pub available: u16,
    /// Chains taken back so far.
    pub used: u16,
}

/// What the driver has counted, by the names that `ethtool -S` has for them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Counts {
    /// Frames received.
    pub rx_packets: u64,
    /// Bytes of them.
    pub rx_bytes: u64,
    /// Times that a frame had to wait in the ring because the arena had no slot to replace it by.
    pub rx_no_slot: u64,
    /// Notifications that the receive queue has new buffers.
    pub rx_kicks: u64,
    /// Frames given to the device.
    pub tx_packets: u64,
    /// Bytes of them.
    pub tx_bytes: u64,
    /// Frames that were thrown away because the device takes none of their length.
    pub tx_dropped: u64,
    /// Notifications that the transmit queue has new frames.
    pub tx_kicks: u64,
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
    /// Where the device sees the rings.
    pub rings_at: u64,
    /// What driver and device agreed on.
    pub features: u64,
    /// The device's address.
    pub mac: [u8; 6],
    /// Descriptors in each queue.
    pub ring: u16,
    /// Longest frame, in bytes.
    pub frame_max: u16,
    /// After a reset: frames that have come and were not received; the first entries of `rx`.
    pub come: u16,
    /// After a reset: empty slots; the entries of `rx` that follow.
    pub empty: u16,
    /// After a reset: frames that were not sent; the first entries of `tx`.
    pub unsent: u16,
    /// Where the driver stands in the queue for commands.
    pub control_at: Cursor,
    /// In kept queues: where it stands in the receive queue.
    pub rx_at: Cursor,
    /// And in the transmit queue.
    pub tx_at: Cursor,
    pub(super) reserved: u32,
    /// The receive queue, in the order of frames; by chain if it is kept.
    pub rx: [Loan; CHAINS_MAX],
    /// The transmit queue, likewise.
    pub tx: [Loan; CHAINS_MAX],
    /// Counted so far.
    pub counts: Counts,
}

/// Bytes of a slot that the device may fill where frames have up to `frame_max` bytes: at least what a device may count on
/// (§5.1.6.3.1).
pub fn room(frame_max: u16) -> u32 {
    frame_max.max(1514).into()
}

impl Sash {
    /// Whether the queues are kept as they stand in memory, because they cannot be reset.
    pub fn is_kept(&self) -> bool {
        self.features & feature::RING_RESET == 0
    }

    /// Chains in each queue.
    fn chains(&self) -> usize {
        usize::from(self.ring / 2)
    }

    /// By chain, in kept queues: receive, transmit.
    pub fn by_chain(&self) -> [&[Loan]; 2] {
        [&self.rx[..self.chains()], &self.tx[..self.chains()]]
    }

    /// Frames that have come, empty slots, frames that were not sent.
    pub fn in_order(&self) -> [&[Loan]; 3] {
        let (come, rest) = self.rx.split_at(self.come.into());
        [come, &rest[..self.empty.into()], &self.tx[..self.unsent.into()]]
    }

    /// Every slot that the device has.
    pub fn slots(&self) -> impl Iterator<Item = SlotId> {
        let (kept, reset) = match self.is_kept() {
            true => (self.by_chain(), [&[][..]; 3]),
            false => ([&[][..]; 2], self.in_order()),
        };
        let all = kept.into_iter().chain(reset).flatten();
        all.filter(|loan| **loan != Loan::NONE).map(Loan::slot)
    }

    /// Whether we understand it, and it makes sense for rings at `rings_at` and slots of `slot_len` bytes.
    pub fn check(&self, rings_at: u64, slot_len: u32) -> Result<(), NicError> {
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
        if self.features & !feature::OURS != 0 || self.features & feature::VERSION_1 == 0 {
            return wrong("the features", self.features);
        }
        if !self.ring.is_power_of_two() || !(2..=DESCRIPTORS_MAX).contains(&self.ring.into()) {
            return wrong("the number of descriptors", self.ring.into());
        }
        if room(self.frame_max) > slot_len {
            return wrong("the longest frame", self.frame_max.into());
        }
        if self.control_at.available != self.control_at.used {
            return wrong("a command is under way", self.control_at.available.into());
        }
        if self.is_kept() { self.check_kept() } else { self.check_reset() }
    }

    fn check_kept(&self) -> Result<(), NicError> {
        for (loans, at) in self.by_chain().into_iter().zip([self.rx_at, self.tx_at]) {
            let held = loans.iter().filter(|loan| **loan != Loan::NONE).count();
            if usize::from(at.available.wrapping_sub(at.used)) != held {
                return Err(NicError::BrokenSash { what: "the number of slots in a queue", value: held as u64 });
            }
        }
        if self.rx_at.available.wrapping_sub(self.rx_at.used) != self.ring / 2 {
            return Err(NicError::BrokenSash {
                what: "chains are missing in the receive queue",
                value: self.ring.into(),
            });
        }
        self.check_lens(self.by_chain().into_iter().flatten())
    }

    fn check_reset(&self) -> Result<(), NicError> {
        let slots = usize::from(self.come) + usize::from(self.empty);
        if slots != self.chains() {
            return Err(NicError::BrokenSash { what: "the number of slots in the receive queue", value: slots as u64 });
        }
        if usize::from(self.unsent) > self.chains() {
            return Err(NicError::BrokenSash { what: "the number of unsent frames", value: self.unsent.into() });
        }
        self.check_lens(self.in_order().into_iter().flatten())
    }

    fn check_lens<'a>(&self, mut loans: impl Iterator<Item = &'a Loan>) -> Result<(), NicError> {
        match loans.find(|loan| loan.len > room(self.frame_max)) {
            Some(long) => Err(NicError::BrokenSash { what: "the length of a frame", value: long.len.into() }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::FromZeros;

    use super::*;

    /// Of queues of four chains, that were reset.
    fn sash() -> Sash {
        let features = feature::VERSION_1 | feature::RING_RESET;
        let sash = Sash { kind: KIND, version: VERSION, rings_at: 0x1000, features, ring: 8, ..Sash::new_zeroed() };
        Sash { frame_max: 1518, come: 1, empty: 3, ..sash }
    }

    /// Of queues that are kept.
    fn kept() -> Sash {
        let features = feature::VERSION_1;
        let mut sash = Sash { features, rx_at: Cursor { available: 2, used: 0xfffe }, ..sash() };
        sash.tx[..4].fill(Loan::NONE);
        sash
    }

    #[test]
    fn a_sash_that_cannot_be_true_is_refused() {
        sash().check(0x1000, 4096).unwrap();
        kept().check(0x1000, 4096).unwrap();
        let long = |mut sash: Sash| {
            sash.rx[3].len = 1519;
            sash
        };
        let fewer = |mut sash: Sash| {
            sash.rx[3] = Loan::NONE;
            sash
        };
        for (wrong, why) in [
            (Sash { version: 2, ..sash() }, "version 2"),
            (Sash { kind: 0x8086_10d3, ..sash() }, "the sash is of"),
            (Sash { rings_at: 0, ..sash() }, "at another address"),
            (Sash { features: 0, ..sash() }, "the features"),
            (Sash { features: u64::MAX, ..sash() }, "the features"),
            (Sash { ring: 1024, ..sash() }, "the number of descriptors"),
            (Sash { ring: 12, ..sash() }, "the number of descriptors"),
            (Sash { ring: 0, ..sash() }, "the number of descriptors"),
            (Sash { frame_max: 4097, ..sash() }, "the longest frame"),
            (Sash { control_at: Cursor { available: 1, used: 0 }, ..sash() }, "a command"),
            (Sash { empty: 4, ..sash() }, "slots in the receive queue"),
            (Sash { come: 0xffff, empty: 0xffff, ..sash() }, "slots in the receive queue"),
            (Sash { unsent: 5, ..sash() }, "unsent"),
            (long(sash()), "the length of a frame"),
            (Sash { counts: Counts { tx_kicks: u64::MAX, ..sash().counts }, ..sash() }, "what was counted"),
            (long(kept()), "the length of a frame"),
            (fewer(kept()), "the number of slots in a queue"),
            (Sash { tx_at: Cursor { available: 1, used: 0 }, ..kept() }, "the number of slots in a queue"),
        ] {
            let error = wrong.check(0x1000, 4096).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
