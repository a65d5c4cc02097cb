//! Driver state of a virtio network device, for a successor.
//!
//! A NIC parked by a reset of its queues (VIRTIO_F_RING_RESET) has a driver state that lists frames and slots, in
//! order: the queues begin anew. Where queues cannot be reset, and where the device runs on while its driver is
//! replaced, the driver state is *kept*: it describes the queues as they stand in memory, the driver's indices, and
//! each chain's contents.

use std::mem::offset_of;

use tasuki_shm::slots::SlotId;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use super::queue::FRAME_MIN;
use super::regs::feature;
use super::setup::Layout;
use super::transport::Way;
use crate::nic::driver_state::{self, Head, InLedger, broken, check_counts};
use crate::nic::ledger::{CURSORS, GIVEN, SELDOM};
use crate::nic::{MemoryLayout, NicError};

/// Maximum number of descriptors in a queue.
pub const DESCRIPTORS_MAX: usize = 512;
/// Maximum number of chains in a queue, of two descriptors each.
pub const CHAINS_MAX: usize = DESCRIPTORS_MAX / 2;
/// Words of the ledger's cursors: for each queue, our index, and the first index of the used ring that is not handled.
pub(super) const RX_AVAILABLE: usize = 0;
pub(super) const RX_HANDLED: usize = 1;
pub(super) const TX_AVAILABLE: usize = 2;
pub(super) const TX_HANDLED: usize = 3;
const _: () = assert!(TX_HANDLED < GIVEN);

/// No driver counts this far: a larger index is false.
const INDEX_MAX: u64 = u64::MAX / 2;

/// A slot that the device has, or had.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Loan {
    pub(super) slot: u64,
    /// Length in bytes of the frame in the slot, or of the longest that it is for.
    pub len: u32,
    /// In kept queues: the low half of the index at which it was posted.
    pub turn: u32,
}

impl Loan {
    /// No slot.
    pub const NONE: Loan = Loan { slot: u64::MAX, len: 0, turn: 0 };

    /// Makes the loan of a slot.
    pub fn new(slot: SlotId, len: u32, turn: u32) -> Self {
        Loan { slot: slot.to_word(), len, turn }
    }

    /// Returns the slot.
    pub fn slot(&self) -> SlotId {
        SlotId::from_word(self.slot)
    }

    /// Returns how many chains ago it was posted, in a queue whose index is `available`.
    #[expect(clippy::cast_possible_truncation, reason = "the low half")]
    pub fn age(&self, available: u64) -> u64 {
        (available as u32).wrapping_sub(self.turn).into()
    }
}

/// Indices of the driver in a queue.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Cursor {
    /// Number of chains made available so far.
    pub available: u64,
    /// Number of chains taken back so far.
    pub used: u64,
}

impl Cursor {
    /// Checks that the indices are possible in a queue of `chains` chains.
    pub fn check(&self, chains: u64) -> Result<(), NicError> {
        match self.available.checked_sub(self.used) {
            Some(out) if out <= chains && self.available <= INDEX_MAX => Ok(()),
            _ => Err(broken("the indices of a queue", self.available)),
        }
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
    /// Number of times that a frame had to wait in the ring because the arena had no slot to replace it.
    pub rx_no_slot: u64,
    /// Number of notifications that the receive queue has new buffers.
    pub rx_kicks: u64,
    /// Number of frames given to the device.
    pub tx_packets: u64,
    /// Number of bytes in those frames.
    pub tx_bytes: u64,
    /// Number of frames dropped because the device takes none of their length.
    pub tx_dropped: u64,
    /// Number of notifications that the transmit queue has new frames.
    pub tx_kicks: u64,
}

/// The driver state of a virtio network device.
#[derive(Debug, Clone, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DriverState {
    /// Header of every driver state.
    pub head: Head,
    /// Features that driver and device negotiated.
    pub features: u64,
    /// Places of the device's registers.
    pub way: Way,
    /// 1 if the queues are described as they stand in memory.
    pub kept: u16,
    /// Length of the longest frame in bytes.
    pub frame_max: u16,
    /// After a reset: number of frames that have come and were not received; they are the first entries of `rx`.
    pub come: u16,
    /// After a reset: number of empty slots; they are the entries of `rx` that follow.
    pub empty: u16,
    /// After a reset: number of unsent frames; they are the first entries of `tx`.
    pub unsent: u16,
    pub(super) reserved: [u16; 3],
    /// Number of commands given to the device so far.
    pub commands: u64,
    /// In kept queues: the driver's indices in the receive queue.
    pub rx_at: Cursor,
    /// In kept queues: the driver's indices in the transmit queue.
    pub tx_at: Cursor,
    /// Counts so far.
    pub counts: Counts,
    /// Receive queue, in the order of frames; by chain if it is kept.
    pub rx: [Loan; CHAINS_MAX],
    /// Transmit queue, in the order of frames; by chain if it is kept.
    pub tx: [Loan; CHAINS_MAX],
}

const _: () = assert!(size_of::<DriverState>() == 8416);

const _: () = assert!(DriverState::SELDOM_LEN <= SELDOM * 8 && DriverState::SELDOM_LEN.is_multiple_of(8));

/// Returns the number of bytes of a slot that the device may fill, for frames of up to `frame_max` bytes: at least the
/// number that a device may count on (§5.1.6.3.1).
pub fn room(frame_max: u16) -> u32 {
    frame_max.max(1514).into()
}

impl DriverState {
    /// Returns whether the queues are described as they stand in memory, not reset.
    pub fn is_kept(&self) -> bool {
        self.kept == 1
    }

    /// Returns the number of chains in each queue.
    fn chains(&self) -> usize {
        usize::from(self.head.ring / 2)
    }

    /// Returns the contents of kept queues by chain: receive, transmit.
    pub fn by_chain(&self) -> [&[Loan]; 2] {
        [&self.rx[..self.chains()], &self.tx[..self.chains()]]
    }

    /// Returns the frames that have come, the empty slots, and the unsent frames.
    pub fn in_order(&self) -> [&[Loan]; 3] {
        let (come, rest) = self.rx.split_at(self.come.into());
        [come, &rest[..self.empty.into()], &self.tx[..self.unsent.into()]]
    }

    /// Checks all but the queues against this memory.
    fn check_seldom(&self, memory: &MemoryLayout) -> Result<(), NicError> {
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
        if self.commands > INDEX_MAX {
            return Err(broken("the number of commands", self.commands));
        }
        if self.kept > 1 || self.reserved != [0; 3] {
            return Err(broken("whether queues are kept", self.kept.into()));
        }
        self.way.check(self.features)
    }

    fn check_kept(&self) -> Result<(), NicError> {
        for (loans, at) in self.by_chain().into_iter().zip([self.rx_at, self.tx_at]) {
            at.check(loans.len() as u64)?;
            let held = || loans.iter().filter(|loan| **loan != Loan::NONE);
            if at.available - at.used != held().count() as u64 {
                return Err(broken("the number of slots in a queue", held().count() as u64));
            }
            if let Some(odd) = held().find(|loan| !(1..=at.available).contains(&loan.age(at.available))) {
                return Err(broken("when a slot was posted", odd.turn.into()));
            }
        }
        if [self.come, self.empty, self.unsent] != [0; 3] {
            return Err(broken("it is of queues that were reset, and of others", self.come.into()));
        }
        self.check_loans(self.by_chain().into_iter().flatten(), [self.chains(); 2])
    }

    fn check_reset(&self) -> Result<(), NicError> {
        let slots = usize::from(self.come) + usize::from(self.empty);
        if slots > self.chains() {
            return Err(broken("the number of slots in the receive queue", slots as u64));
        }
        if usize::from(self.unsent) > self.chains() {
            return Err(broken("the number of unsent frames", self.unsent.into()));
        }
        if [self.rx_at, self.tx_at] != [Cursor::default(); 2] {
            return Err(broken("queues that were reset begin at index", self.rx_at.available));
        }
        let [come, empty, unsent] = self.in_order();
        let all = || come.iter().chain(empty).chain(unsent);
        if let Some(none) = all().position(|loan| *loan == Loan::NONE) {
            return Err(broken("a slot is missing, at", none as u64));
        }
        if let Some(short) = come.iter().find(|loan| loan.len < FRAME_MIN.into()) {
            return Err(broken("the length of a frame", short.len.into()));
        }
        if let Some(odd) = all().find(|loan| loan.turn != 0) {
            return Err(broken("when a slot was posted", odd.turn.into()));
        }
        self.check_loans(all(), [slots, self.unsent.into()])
    }

    /// Checks the lengths of `loans`, and that the entries past `count` in each queue are empty.
    fn check_loans<'a>(&self, mut loans: impl Iterator<Item = &'a Loan>, count: [usize; 2]) -> Result<(), NicError> {
        let is_long = |loan: &&Loan| **loan != Loan::NONE && loan.len > room(self.frame_max);
        if let Some(long) = loans.find(is_long) {
            return Err(broken("the length of a frame", long.len.into()));
        }
        let [rx, tx] = count;
        let mut rest = self.rx[rx..].iter().chain(&self.tx[tx..]);
        match rest.any(|loan| *loan != Loan::NONE) {
            true => Err(broken("slots beyond the end of a queue of", self.head.ring.into())),
            false => Ok(()),
        }
    }
}

impl driver_state::DriverState for DriverState {
    const KIND: u32 = 0x1af4_1041;
    const VERSION: u32 = 3;

    fn head(&self) -> &Head {
        &self.head
    }

    fn blank() -> Box<Self> {
        let mut blank = Box::new(DriverState::new_zeroed());
        blank.rx.fill(Loan::NONE);
        blank.tx.fill(Loan::NONE);
        blank
    }

    fn check_body(&self, memory: &MemoryLayout) -> Result<(), NicError> {
        self.check_seldom(memory)?;
        if self.is_kept() { self.check_kept() } else { self.check_reset() }
    }

    fn slots(&self) -> impl Iterator<Item = SlotId> {
        self.rx.iter().chain(&self.tx).filter(|loan| **loan != Loan::NONE).map(Loan::slot)
    }
}

impl InLedger for DriverState {
    const SELDOM_LEN: usize = offset_of!(DriverState, rx);

    fn set_cursors(&mut self, cursors: &[u64; CURSORS]) {
        self.rx_at = Cursor { available: cursors[RX_AVAILABLE], used: cursors[RX_HANDLED] };
        self.tx_at = Cursor { available: cursors[TX_AVAILABLE], used: cursors[TX_HANDLED] };
    }

    fn check_ledger(&self, memory: &MemoryLayout) -> Result<(), NicError> {
        self.check_seldom(memory)?;
        self.rx_at.check(self.chains() as u64)?;
        self.tx_at.check(self.chains() as u64)
    }
}

#[cfg(test)]
mod tests {
    use tasuki_shm::arena::Geometry;

    use super::*;
    use crate::nic::Mac;
    use crate::nic::bus::Iova;
    use crate::nic::driver_state::{DriverState as _, tests};
    use crate::nic::virtio_net::transport::Place;

    const MEMORY: MemoryLayout =
        MemoryLayout { rings_at: Iova(0x1000), rings_len: 4096, slots: Geometry { slot_len: 4096, count: 64 } };

    fn loan(index: u32, len: u32, turn: u32) -> Loan {
        Loan::new(SlotId { index, generation: 2 }, len, turn)
    }

    /// A driver state of queues of four chains, that were reset.
    fn driver_state() -> DriverState {
        let features = feature::VERSION_1 | feature::RING_RESET;
        let head = Head::of::<DriverState>(&MEMORY, Mac([2, 0, 0, 0, 0, 1]), 8);
        let place = |base, len| Place { bar: 4, base, len };
        let way = Way {
            common: place(0, 0x1000),
            notify: place(0x3000, 0x1000),
            net: place(0x2000, 0x1000),
            bells: [0, 4, 8, 0],
            pairs: 1,
            pair: 0,
        };
        let blank = *DriverState::blank();
        let mut driver_state =
            DriverState { head, features, way, frame_max: 1518, come: 1, empty: 3, unsent: 1, ..blank };
        (0..4).for_each(|i| driver_state.rx[i as usize] = loan(i, 1518, 0));
        driver_state.tx[0] = loan(63, 60, 0);
        driver_state
    }

    /// A driver state of kept queues.
    fn kept() -> DriverState {
        let cursor = |available, used| Cursor { available, used };
        let (rx_at, tx_at) = (cursor((1 << 32) + 2, (1 << 32) - 2), cursor((1 << 32) + 9, (1 << 32) + 8));
        let mut driver_state = DriverState { kept: 1, come: 0, empty: 0, unsent: 0, rx_at, tx_at, ..driver_state() };
        (0..4_u32).for_each(|k| driver_state.rx[k as usize].turn = k.wrapping_sub(2));
        driver_state.tx.swap(0, 2);
        driver_state.tx[2].turn = 8;
        driver_state
    }

    #[test]
    fn a_driver_state_that_cannot_be_true_is_refused() {
        type Change = (&'static str, fn(&mut DriverState));
        let changes: [Change; 31] = [
            ("version 4", |driver_state| driver_state.head.version += 1),
            ("the driver state is of", |driver_state| driver_state.head.kind = 0x8086_10d3),
            ("rings are at another address", |driver_state| driver_state.head.rings_at = 0),
            ("frames are at another address", |driver_state| driver_state.head.arena_at = 0),
            ("the features", |driver_state| driver_state.features = 0),
            ("the features", |driver_state| driver_state.features = u64::MAX),
            ("the number of descriptors", |driver_state| driver_state.head.ring = 1024),
            ("the number of descriptors", |driver_state| driver_state.head.ring = 12),
            ("the number of descriptors", |driver_state| driver_state.head.ring = 0),
            ("the bytes for rings", |driver_state| driver_state.head.ring = 128),
            ("the longest frame", |driver_state| driver_state.frame_max = 4097),
            ("the number of commands", |driver_state| driver_state.commands = u64::MAX),
            ("are kept", |driver_state| driver_state.kept = 2),
            ("are kept", |driver_state| driver_state.reserved[2] = 1),
            ("it has no registers at", |driver_state| driver_state.way.common.bar = 6),
            ("it has no registers at", |driver_state| driver_state.way.net.base = 2),
            ("it has no registers at", |driver_state| driver_state.way.notify.len = u32::MAX),
            ("it has no registers at", |driver_state| driver_state.way.common.len = 0x37),
            ("it has no registers at", |driver_state| driver_state.way.bells[1] = 0xfff),
            ("it has no registers at", |driver_state| driver_state.way.bells[0] = 3),
            ("no pair of queues", |driver_state| driver_state.way.pair = 1),
            ("no pair of queues", |driver_state| driver_state.way.pairs = 2),
            ("no pair of queues", |driver_state| driver_state.way.pairs = 0),
            ("queue", |driver_state| driver_state.head.ring = 4),
            ("queue", |driver_state| (driver_state.head.ring, driver_state.rx[8]) = (16, driver_state.rx[3])),
            ("the length of a frame", |driver_state| driver_state.rx[3].len = 1519),
            ("the length of a frame", |driver_state| driver_state.rx[3].len = u32::MAX),
            ("slots beyond the end", |driver_state| driver_state.rx[4] = loan(9, 60, 0)),
            ("slots beyond the end", |driver_state| driver_state.tx[4] = loan(9, 60, 0)),
            ("a slot twice", |driver_state| driver_state.rx[1] = driver_state.rx[0]),
            ("does not have", |driver_state| driver_state.rx[1] = loan(64, 64, 0)),
        ];
        for honest in [driver_state(), kept()] {
            honest.check(&MEMORY).unwrap();
            for (why, change) in changes {
                refused(&honest, why, change);
            }
        }
    }

    #[track_caller]
    fn refused(honest: &DriverState, why: &str, change: fn(&mut DriverState)) {
        let mut wrong = honest.clone();
        change(&mut wrong);
        let error = wrong.check(&MEMORY).unwrap_err().to_string();
        assert!(error.contains(why), "{why}: {error}");
    }

    #[test]
    fn what_only_one_way_of_parking_leaves_is_refused_of_the_other() {
        refused(&driver_state(), "slots in the receive queue", |driver_state| driver_state.empty = 4);
        refused(&driver_state(), "when a slot was posted", |driver_state| driver_state.rx[2].turn = 1);
        refused(&driver_state(), "slots in the receive queue", |driver_state| {
            (driver_state.come, driver_state.empty) = (0xffff, 0xffff)
        });
        refused(&driver_state(), "unsent", |driver_state| driver_state.unsent = 5);
        refused(&driver_state(), "the length of a frame", |driver_state| driver_state.rx[0].len = 13);
        refused(&driver_state(), "begin at index", |driver_state| {
            driver_state.rx_at = Cursor { available: 1, used: 1 }
        });
        refused(&driver_state(), "missing", |driver_state| driver_state.rx[3] = Loan::NONE);
        refused(&kept(), "slots in a queue", |driver_state| driver_state.rx[3] = Loan::NONE);
        refused(&kept(), "slots in a queue", |driver_state| driver_state.tx_at.available += 1);
        refused(&kept(), "the indices of a queue", |driver_state| driver_state.tx_at.available -= 2);
        refused(&kept(), "the indices of a queue", |driver_state| driver_state.rx_at.used -= 1);
        refused(&kept(), "the indices of a queue", |driver_state| {
            (driver_state.rx_at.available, driver_state.rx_at.used) = (u64::MAX, u64::MAX - 4);
        });
        refused(&kept(), "when a slot was posted", |driver_state| driver_state.tx[2].turn = 9);
        refused(&kept(), "when a slot was posted", |driver_state| {
            (driver_state.tx_at.available, driver_state.tx_at.used, driver_state.tx[2].turn) = (2, 1, 3);
        });
        // A queue that could not be filled.
        let mut short = kept();
        (short.rx[3], short.rx_at.used) = (Loan::NONE, short.rx_at.used + 1);
        short.check(&MEMORY).unwrap();
        refused(&kept(), "and of others", |driver_state| driver_state.unsent = 1);
    }

    #[test]
    fn bytes_of_all_kinds_are_refused_or_harmless() {
        tests::bytes_of_all_kinds(&driver_state(), &MEMORY);
        tests::bytes_of_all_kinds(&kept(), &MEMORY);
    }
}
