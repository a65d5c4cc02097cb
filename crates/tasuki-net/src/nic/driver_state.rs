//! State of a parked NIC that a successor needs: plain data, which any process can store, carry and pass on as
//! bytes.
//!
//! The state of every driver begins with a [`Head`], so a process can store one without knowing which driver wrote
//! it. It has no padding. Its numbers are in the byte order of the machine, which it never leaves.
//!
//! A driver state is a claim. [`DriverState::check`] compares it with itself and with the layout of the memory, and
//! touches nothing. After that, and still before anything is changed, the driver checks whether the slots that it
//! names are the card's, and whether the card is where it says.

use tasuki_shm::slots::SlotId;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::ledger::{CURSORS, SELDOM};
use super::{Mac, MemoryLayout, NicError};

/// Beginning of every driver state: it names the driver and the memory.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Head {
    /// Driver that wrote the driver state: vendor and device ID of the card that the driver is named for.
    pub kind: u32,
    /// Version of the layout of what follows the head.
    pub version: u32,
    /// Address of the rings, as the card sees it.
    pub rings_at: u64,
    /// Address of the frames, as the card sees it.
    pub arena_at: u64,
    /// Size of a slot in bytes.
    pub slot_len: u32,
    /// Number of slots.
    pub slots: u32,
    /// Ethernet address of the card.
    pub mac: [u8; 6],
    /// Number of descriptors in a ring.
    pub ring: u16,
}

const _: () = assert!(size_of::<Head>() == 40);

impl Head {
    /// Returns the head of a driver state of type `S`.
    pub(super) fn of<S: DriverState>(memory: &MemoryLayout, mac: Mac, ring: u16) -> Self {
        Head {
            kind: S::KIND,
            version: S::VERSION,
            rings_at: memory.rings_at.0,
            arena_at: memory.arena_at().0,
            slot_len: memory.slots.slot_len,
            slots: memory.slots.count,
            mac: mac.0,
            ring,
        }
    }

    pub(super) fn check<S: DriverState>(&self, memory: &MemoryLayout) -> Result<(), NicError> {
        is_of::<S>(self.kind, self.version)?;
        let ours = Head::of::<S>(memory, Mac(self.mac), self.ring);
        let same = [
            ("its rings are at another address", self.rings_at, ours.rings_at),
            ("its frames are at another address", self.arena_at, ours.arena_at),
            ("the length of its slots", self.slot_len.into(), ours.slot_len.into()),
            ("the number of its slots", self.slots.into(), ours.slots.into()),
        ];
        match same.into_iter().find(|(_, said, is)| said != is) {
            Some((what, said, _)) => Err(broken(what, said)),
            None => Ok(()),
        }
    }

    /// Checks that the card is the one that was parked.
    pub(super) fn check_mac(&self, found: Mac) -> Result<(), NicError> {
        match found == Mac(self.mac) {
            true => Ok(()),
            false => Err(broken("it is of a card with another address", self.mac[5].into())),
        }
    }
}

/// Checks that kind and version are those of `S`.
fn is_of<S: DriverState>(kind: u32, version: u32) -> Result<(), NicError> {
    match (kind, version) == (S::KIND, S::VERSION) {
        true => Ok(()),
        false => Err(NicError::OtherDriverState { kind, version, ours: S::VERSION }),
    }
}

/// Returns the error of a driver state that cannot be true.
pub(super) fn broken(what: &'static str, value: u64) -> NicError {
    NicError::BrokenDriverState { what, value }
}

/// Upper limit of a driver's counts: a byte counter at 1 Gb/s needs two thousand years to reach it. A driver state
/// with a higher count is not true.
const COUNT_MAX: u64 = u64::MAX / 2;

/// Checks that a predecessor can have counted these counts: higher ones could overflow.
pub(super) fn check_counts(counts: &(impl IntoBytes + Immutable)) -> Result<(), NicError> {
    let (counts, _) = counts.as_bytes().as_chunks::<8>();
    match counts.iter().map(|count| u64::from_ne_bytes(*count)).find(|&count| count > COUNT_MAX) {
        Some(count) => Err(broken("what was counted", count)),
        None => Ok(()),
    }
}

/// Checks that each of `slots` is a slot of the arena, and that none is named twice.
fn each_once(slots: impl Iterator<Item = SlotId>, count: u32) -> Result<(), NicError> {
    let mut named: Vec<_> = slots.collect();
    named.sort_unstable_by_key(|id| id.index);
    if let Some(beyond) = named.last().filter(|id| id.index >= count) {
        return Err(broken("it names a slot that the arena does not have", beyond.to_word()));
    }
    match named.array_windows().find(|[a, b]| a.index == b.index) {
        Some([twice, _]) => Err(broken("it names a slot twice", twice.to_word())),
        None => Ok(()),
    }
}

/// State that a driver leaves to its successor.
pub trait DriverState: FromBytes + IntoBytes + Immutable + KnownLayout + Clone + Send + 'static {
    /// First word of the driver states: vendor and device ID of the card that the driver is named for.
    const KIND: u32;
    /// Second word of the driver states. It changes whenever the layout or the meaning of a field changes.
    const VERSION: u32;
    /// Size of the driver state in bytes.
    const LEN: usize = size_of::<Self>();

    /// Returns the head.
    fn head(&self) -> &Head;

    /// Checks whether the data after the head makes sense for this memory. Touches nothing.
    fn check_body(&self, memory: &MemoryLayout) -> Result<(), NicError>;

    /// Returns the slots that the card has. The driver state must have been checked.
    fn slots(&self) -> impl Iterator<Item = SlotId>;

    /// Checks whether the driver understands the driver state, and whether it can be true of a NIC with this memory
    /// layout. Touches nothing.
    fn check(&self, memory: &MemoryLayout) -> Result<(), NicError> {
        self.head().check::<Self>(memory)?;
        self.check_body(memory)?;
        each_once(self.slots(), memory.slots.count)
    }

    /// Like [`check`](Self::check), but does not find slots that are named twice: adopting the slots finds those.
    fn check_alone(&self, memory: &MemoryLayout) -> Result<(), NicError> {
        self.head().check::<Self>(memory)?;
        self.check_body(memory)
    }

    /// Returns an empty driver state.
    fn blank() -> Box<Self>;

    /// Returns the driver state as bytes, to be stored or sent.
    fn bytes(&self) -> &[u8] {
        self.as_bytes()
    }

    /// Reads a driver state from `bytes`, which must be exactly one. For another driver's, or another version's, the
    /// error says which it is.
    fn read(bytes: &[u8]) -> Result<Self, NicError> {
        if let Ok(([kind, version], _)) = <[u32; 2]>::read_from_prefix(bytes) {
            is_of::<Self>(kind, version)?;
        }
        Self::read_from_bytes(bytes).map_err(|_| broken("the number of its bytes", bytes.len() as u64))
    }
}

/// A driver state that a successor can make from a [ledger](super::ledger). It begins with what changes seldom, and
/// ends with tables of slots, which the successor finds in the rings.
pub trait InLedger: DriverState {
    /// Size in bytes of what changes seldom. The cursors in it have no meaning in the ledger.
    const SELDOM_LEN: usize;

    /// Returns what changes seldom.
    fn seldom(&self) -> &[u8] {
        &self.as_bytes()[..Self::SELDOM_LEN]
    }

    /// Sets what [`seldom`](Self::seldom) returns. `self` must be blank.
    fn set_seldom(&mut self, words: &[u64; SELDOM]) {
        self.as_mut_bytes()[..Self::SELDOM_LEN].copy_from_slice(&words.as_bytes()[..Self::SELDOM_LEN]);
    }

    /// Sets the cursors, as the ledger has them.
    fn set_cursors(&mut self, cursors: &[u64; CURSORS]);

    /// Checks all that comes from a ledger.
    fn check_ledger(&self, memory: &MemoryLayout) -> Result<(), NicError>;
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;
    use proptest::test_runner::TestRunner;

    use super::*;

    /// Changes bytes of a driver state, then reads and checks it. The outcome must be an error, or a driver state
    /// that is safe to use: each slot is one of the arena's and is named once.
    pub fn bytes_of_all_kinds<S: DriverState + PartialEq + std::fmt::Debug>(honest: &S, memory: &MemoryLayout) {
        honest.check(memory).unwrap();
        let bytes = honest.bytes();
        assert_eq!((bytes.len(), &bytes[..4]), (S::LEN, &S::KIND.to_ne_bytes()[..]), "whose it is comes first");
        assert_eq!(&bytes[4..8], S::VERSION.to_ne_bytes());
        assert_eq!(&S::read(bytes).unwrap(), honest);
        for len in [0, 1, 4, 7, 8, size_of::<Head>(), S::LEN - 1] {
            let error = S::read(&bytes[..len]).unwrap_err();
            assert!(matches!(error, NicError::BrokenDriverState { value, .. } if value == len as u64), "{error}");
        }
        assert!(S::read(&[bytes, &[0]].concat()).is_err(), "a byte too many");
        let next = [&bytes[..4], &(S::VERSION + 1).to_ne_bytes(), &bytes[8..100]].concat();
        let error = S::read(&next).unwrap_err();
        let NicError::OtherDriverState { version, .. } = error else { panic!("{error}") };
        assert_eq!(version, S::VERSION + 1, "a later version is named, however long it is");
        // Change bytes that hold a value as often as the others.
        let full: Vec<usize> = (0..bytes.len()).filter(|&at| bytes[at] != 0 && bytes[at] != 0xff).collect();
        let place = prop_oneof![0..bytes.len(), proptest::sample::select(full), 0..100_usize];
        let changes = proptest::collection::vec((place, any::<u8>()), 1..4);
        let outcome = TestRunner::new(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() }).run(
            &changes,
            |changes| {
                let mut bytes = honest.bytes().to_vec();
                changes.iter().for_each(|&(at, value)| bytes[at] = value);
                let Ok(driver_state) = S::read(&bytes) else { return Ok(()) };
                if driver_state.check(memory).is_ok() {
                    let mut slots: Vec<_> = driver_state.slots().map(|id| id.index).collect();
                    let all = slots.len();
                    slots.sort_unstable();
                    slots.dedup();
                    prop_assert!(slots.len() == all && slots.iter().all(|&index| index < memory.slots.count));
                }
                Ok(())
            },
        );
        outcome.unwrap_or_else(|failure| panic!("{failure}"));
    }
}
