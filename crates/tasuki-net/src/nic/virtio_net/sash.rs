//! What a successor must know of a virtio network device.
//!
//! Where queues can be reset (VIRTIO_F_RING_RESET) they are, and begin anew at index 0: the sash lists frames and slots, in order.
//! Where they cannot, they are kept as they stand in memory: the sash has the driver's indices, and what is in each chain.

use tasuki_shm::slots::SlotId;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use super::Layout;
use super::queue::FRAME_MIN;
use super::regs::feature;
use crate::nic::sash::{self, Head, broken, check_counts};
use crate::nic::{MemoryLayout, NicError};

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

/// The sash.
#[derive(Debug, Clone, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Sash {
    /// What every sash begins with.
    pub head: Head,
    /// What driver and device agreed on.
    pub features: u64,
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

const _: () = assert!(size_of::<Sash>() == 8328);

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
        usize::from(self.head.ring / 2)
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

    fn check_kept(&self) -> Result<(), NicError> {
        for (loans, at) in self.by_chain().into_iter().zip([self.rx_at, self.tx_at]) {
            let held = loans.iter().filter(|loan| **loan != Loan::NONE).count();
            if usize::from(at.available.wrapping_sub(at.used)) != held {
                return Err(broken("the number of slots in a queue", held as u64));
            }
        }
        if self.rx_at.available.wrapping_sub(self.rx_at.used) != self.head.ring / 2 {
            return Err(broken("chains are missing in the receive queue", self.head.ring.into()));
        }
        if [self.come, self.empty, self.unsent] != [0; 3] {
            return Err(broken("it is of queues that were reset, and of others", self.come.into()));
        }
        self.check_loans(self.by_chain().into_iter().flatten(), [self.chains(); 2])
    }

    fn check_reset(&self) -> Result<(), NicError> {
        let slots = usize::from(self.come) + usize::from(self.empty);
        if slots != self.chains() {
            return Err(broken("the number of slots in the receive queue", slots as u64));
        }
        if usize::from(self.unsent) > self.chains() {
            return Err(broken("the number of unsent frames", self.unsent.into()));
        }
        if [self.rx_at, self.tx_at] != [Cursor::default(); 2] {
            return Err(broken("queues that were reset begin at index", self.rx_at.available.into()));
        }
        let [come, empty, unsent] = self.in_order();
        let all = || come.iter().chain(empty).chain(unsent);
        if let Some(none) = all().position(|loan| *loan == Loan::NONE) {
            return Err(broken("a slot is missing, at", none as u64));
        }
        if let Some(short) = come.iter().find(|loan| loan.len < FRAME_MIN) {
            return Err(broken("the length of a frame", short.len.into()));
        }
        self.check_loans(all(), [slots, self.unsent.into()])
    }

    /// The loans that count, of which there are so many in each queue, and the rest.
    fn check_loans<'a>(&self, mut loans: impl Iterator<Item = &'a Loan>, count: [usize; 2]) -> Result<(), NicError> {
        let is_long = |loan: &&Loan| **loan != Loan::NONE && loan.len > room(self.frame_max);
        if let Some(long) = loans.find(is_long) {
            return Err(broken("the length of a frame", long.len.into()));
        }
        let [rx, tx] = count;
        let rest = self.rx[rx..].iter().chain(&self.tx[tx..]);
        if rest.clone().any(|loan| *loan != Loan::NONE) {
            return Err(broken("slots beyond the end of a queue of", self.head.ring.into()));
        }
        match self.reserved == 0 && self.rx.iter().chain(&self.tx).all(|loan| loan.reserved == 0) {
            true => Ok(()),
            false => Err(broken("what is reserved", self.reserved.into())),
        }
    }
}

impl sash::Sash for Sash {
    const KIND: u32 = 0x1af4_1041;
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
        if self.features & !feature::OURS != 0 || self.features & feature::VERSION_1 == 0 {
            return Err(broken("the features", self.features));
        }
        if !ring.is_power_of_two() || !(2..=DESCRIPTORS_MAX).contains(&ring.into()) {
            return Err(broken("the number of descriptors", ring.into()));
        }
        if Layout::new(memory.rings_len, ring).is_err() {
            return Err(broken("the bytes for rings", memory.rings_len as u64));
        }
        if room(self.frame_max) > memory.slots.slot_len {
            return Err(broken("the longest frame", self.frame_max.into()));
        }
        if self.control_at.available != self.control_at.used {
            return Err(broken("a command is under way", self.control_at.available.into()));
        }
        if self.is_kept() { self.check_kept() } else { self.check_reset() }
    }

    fn slots(&self) -> impl Iterator<Item = SlotId> {
        self.rx.iter().chain(&self.tx).filter(|loan| **loan != Loan::NONE).map(Loan::slot)
    }
}

#[cfg(test)]
mod tests {
    use tasuki_shm::arena::Geometry;
    use zerocopy::FromZeros;

    use super::*;
    use crate::nic::Mac;
    use crate::nic::bus::Iova;
    use crate::nic::sash::{Sash as _, tests};

    const MEMORY: MemoryLayout =
        MemoryLayout { rings_at: Iova(0x1000), rings_len: 4096, slots: Geometry { slot_len: 4096, count: 64 } };

    fn loan(index: u32, len: u32, turn: u16) -> Loan {
        Loan::new(SlotId { index, generation: 2 }, len, turn)
    }

    /// Of queues of four chains, that were reset.
    fn sash() -> Sash {
        let features = feature::VERSION_1 | feature::RING_RESET;
        let head = Head::of::<Sash>(&MEMORY, Mac([2, 0, 0, 0, 0, 1]), 8);
        let mut sash = Sash { head, features, frame_max: 1518, come: 1, empty: 3, unsent: 1, ..Sash::new_zeroed() };
        sash.rx.fill(Loan::NONE);
        sash.tx.fill(Loan::NONE);
        (0..4).for_each(|i| sash.rx[i as usize] = loan(i, 1518, 0));
        sash.tx[0] = loan(63, 60, 0);
        sash
    }

    /// Of queues that are kept.
    fn kept() -> Sash {
        let [rx_at, tx_at] = [(2, 0xfffe), (9, 8)].map(|(available, used)| Cursor { available, used });
        let mut sash = Sash { features: feature::VERSION_1, come: 0, empty: 0, unsent: 0, rx_at, tx_at, ..sash() };
        sash.tx.swap(0, 2);
        sash
    }

    #[test]
    fn a_sash_that_cannot_be_true_is_refused() {
        type Change = (&'static str, fn(&mut Sash));
        let changes: [Change; 21] = [
            ("version 3", |sash| sash.head.version += 1),
            ("the sash is of", |sash| sash.head.kind = 0x8086_10d3),
            ("rings are at another address", |sash| sash.head.rings_at = 0),
            ("frames are at another address", |sash| sash.head.arena_at = 0),
            ("the features", |sash| sash.features = 0),
            ("the features", |sash| sash.features = u64::MAX),
            ("the number of descriptors", |sash| sash.head.ring = 1024),
            ("the number of descriptors", |sash| sash.head.ring = 12),
            ("the number of descriptors", |sash| sash.head.ring = 0),
            ("the bytes for rings", |sash| sash.head.ring = 128),
            ("the longest frame", |sash| sash.frame_max = 4097),
            ("a command", |sash| sash.control_at.available = 1),
            ("queue", |sash| sash.head.ring = 4),
            ("queue", |sash| sash.head.ring = 16),
            ("the length of a frame", |sash| sash.rx[3].len = 1519),
            ("the length of a frame", |sash| sash.rx[3].len = u32::MAX),
            ("slots beyond the end", |sash| sash.rx[4] = loan(9, 60, 0)),
            ("slots beyond the end", |sash| sash.tx[4] = loan(9, 60, 0)),
            ("a slot twice", |sash| sash.rx[1] = sash.rx[0]),
            ("does not have", |sash| sash.rx[1] = loan(64, 64, 0)),
            ("what is reserved", |sash| sash.rx[1].reserved = 1),
        ];
        for honest in [sash(), kept()] {
            honest.check(&MEMORY).unwrap();
            for (why, change) in changes {
                refused(&honest, why, change);
            }
        }
    }

    #[track_caller]
    fn refused(honest: &Sash, why: &str, change: fn(&mut Sash)) {
        let mut wrong = honest.clone();
        change(&mut wrong);
        let error = wrong.check(&MEMORY).unwrap_err().to_string();
        assert!(error.contains(why), "{why}: {error}");
    }

    #[test]
    fn what_only_one_way_of_parking_leaves_is_refused_of_the_other() {
        refused(&sash(), "slots in the receive queue", |sash| sash.empty = 4);
        refused(&sash(), "slots in the receive queue", |sash| (sash.come, sash.empty) = (0xffff, 0xffff));
        refused(&sash(), "unsent", |sash| sash.unsent = 5);
        refused(&sash(), "the length of a frame", |sash| sash.rx[0].len = 13);
        refused(&sash(), "begin at index", |sash| sash.rx_at = Cursor { available: 1, used: 1 });
        refused(&sash(), "missing", |sash| sash.rx[3] = Loan::NONE);
        refused(&kept(), "slots in a queue", |sash| sash.rx[3] = Loan::NONE);
        refused(&kept(), "slots in a queue", |sash| sash.tx_at.available += 1);
        refused(&kept(), "chains are missing", |sash| {
            sash.rx[3] = Loan::NONE;
            sash.rx_at.used += 1;
        });
        refused(&kept(), "and of others", |sash| sash.unsent = 1);
    }

    #[test]
    fn bytes_of_all_kinds_are_refused_or_harmless() {
        tests::bytes_of_all_kinds(&sash(), &MEMORY);
        tests::bytes_of_all_kinds(&kept(), &MEMORY);
    }
}
