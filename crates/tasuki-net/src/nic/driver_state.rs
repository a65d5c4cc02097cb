//! What a successor must know of a parked NIC: plain data, which any process can store, carry and hand on as bytes.
//!
//! Every driver's driver state begins with a [`Head`], so whoever stores one need not know whose it is. It has no padding, and its numbers are
//! in the byte order of the machine, which it never leaves.
//!
//! A driver state is a claim. [`DriverState::check`] holds it against itself and against where the memory lies, and touches nothing; whether the
//! slots that it names are the card's, and whether the card is where it says, is looked at after that and still before anything is
//! changed.

use tasuki_shm::slots::SlotId;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::{Mac, MemoryLayout, NicError};

/// What every driver state begins with: whose it is, and of which memory.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Head {
    /// Whose driver state it is: vendor and device of the card that the driver is named for.
    pub kind: u32,
    /// Of the layout of what follows.
    pub version: u32,
    /// Where the card sees the rings.
    pub rings_at: u64,
    /// Where the card sees the frames.
    pub arena_at: u64,
    /// Bytes in a slot.
    pub slot_len: u32,
    /// Slots.
    pub slots: u32,
    /// The card's own address.
    pub mac: [u8; 6],
    /// Descriptors in a ring.
    pub ring: u16,
}

const _: () = assert!(size_of::<Head>() == 40);

impl Head {
    /// The head of a driver state of `S`.
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

    /// The card must be the one that was parked.
    pub(super) fn check_mac(&self, found: Mac) -> Result<(), NicError> {
        match found == Mac(self.mac) {
            true => Ok(()),
            false => Err(broken("it is of a card with another address", self.mac[5].into())),
        }
    }
}

/// Kind and version must be those that `S` has.
fn is_of<S: DriverState>(kind: u32, version: u32) -> Result<(), NicError> {
    match (kind, version) == (S::KIND, S::VERSION) {
        true => Ok(()),
        false => Err(NicError::OtherDriverState { kind, version, ours: S::VERSION }),
    }
}

/// A driver state that cannot be true.
pub(super) fn broken(what: &'static str, value: u64) -> NicError {
    NicError::BrokenDriverState { what, value }
}

/// More than any driver counts: bytes at a gigabit come to it in two thousand years. A driver state that says more is not true.
const COUNT_MAX: u64 = u64::MAX / 2;

/// What a predecessor counted must be what a driver can have counted: more could overflow.
pub(super) fn check_counts(counts: &(impl IntoBytes + Immutable)) -> Result<(), NicError> {
    let (counts, _) = counts.as_bytes().as_chunks::<8>();
    match counts.iter().map(|count| u64::from_ne_bytes(*count)).find(|&count| count > COUNT_MAX) {
        Some(count) => Err(broken("what was counted", count)),
        None => Ok(()),
    }
}

/// Each of these is a slot of the arena, and none stands there twice.
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

/// What a driver leaves to its successor.
pub trait DriverState: FromBytes + IntoBytes + Immutable + KnownLayout + Clone + Send + 'static {
    /// What the first word of its driver states says: vendor and device of the card that the driver is named for.
    const KIND: u32;
    /// What the second word says. Changes with every change of the layout, or of what is meant by it.
    const VERSION: u32;
    /// Bytes of it.
    const LEN: usize = size_of::<Self>();

    /// Its beginning.
    fn head(&self) -> &Head;

    /// Whether what follows the head makes sense in this memory. Touches nothing.
    fn check_body(&self, memory: &MemoryLayout) -> Result<(), NicError>;

    /// The slots that the card has. Of a driver state that was checked.
    fn slots(&self) -> impl Iterator<Item = SlotId>;

    /// Whether the driver understands it, and whether it can be true of a NIC whose memory lies so. Touches nothing.
    fn check(&self, memory: &MemoryLayout) -> Result<(), NicError> {
        self.head().check::<Self>(memory)?;
        self.check_body(memory)?;
        each_once(self.slots(), memory.slots.count)
    }

    /// The same, but for slots that are named twice, which whoever adopts them finds out.
    fn check_alone(&self, memory: &MemoryLayout) -> Result<(), NicError> {
        self.head().check::<Self>(memory)?;
        self.check_body(memory)
    }

    /// One in which nothing stands.
    fn blank() -> Box<Self>;

    /// The driver state as bytes, to be stored or sent.
    fn bytes(&self) -> &[u8] {
        self.as_bytes()
    }

    /// The driver state that stands in `bytes`, all of them. Of another driver's, or another version's, it says which it is.
    fn read(bytes: &[u8]) -> Result<Self, NicError> {
        if let Ok(([kind, version], _)) = <[u32; 2]>::read_from_prefix(bytes) {
            is_of::<Self>(kind, version)?;
        }
        Self::read_from_bytes(bytes).map_err(|_| broken("the number of its bytes", bytes.len() as u64))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;
    use proptest::test_runner::TestRunner;

    use super::*;

    /// Whatever becomes of a driver state's bytes on the way, reading and checking them is an error or leaves a driver state that is safe to use:
    /// each slot is the arena's and stands there once.
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
        // Places where something stands come up as often as the others.
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
