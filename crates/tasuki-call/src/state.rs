//! The state that a server keeps for its successor: shared memory with a lease on it.

use std::num::NonZeroU32;
use std::os::fd::{BorrowedFd, OwnedFd};

use tasuki_shm::lease::{Lease, Lost, Tenure};
use tasuki_shm::line::{LINE_LEN, Line};
use tasuki_shm::region::{PAGE_LEN, Pages, Region, RegionError, Span};
use tasuki_shm::sync::{AtomicU64, Relaxed};

use super::wire::Service;

/// First word of the memory: "state of a Tasuki server, layout 1".
const MAGIC: u64 = u64::from_be_bytes(*b"TASUKIS\x01");

/// The state of a service: memory that its servers, one after the other, map and write.
///
/// It holds atomics only, because a server may die between any two stores. Keep data in it that is right after every
/// store. The library uses its first page for the identity of the service and for the lease, which names the present
/// server and its generation.
#[derive(Debug)]
pub struct State {
    region: Region,
}

/// Reasons why memory is not the state of a service.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// The memory cannot be mapped.
    #[error("{0}")]
    Memory(#[from] RegionError),
    /// The memory holds something else.
    #[error(
        "the memory is not the state of a Tasuki server (it begins with {found:#018x}); pass the descriptor that State::create made"
    )]
    Foreign {
        /// First word of the memory.
        found: u64,
    },
}

impl State {
    /// Creates state with room for `len` bytes, all zero.
    pub fn create(len: usize) -> Result<Self, RegionError> {
        let region = Region::create("tasuki-state", PAGE_LEN + len.max(1), Pages::Small)?;
        let state = State { region };
        let id = std::array::from_fn::<u64, 2, _>(|_| random_word());
        state.header(0)[0].word(1).store(id[0], Relaxed);
        state.header(0)[0].word(2).store(id[1], Relaxed);
        state.header(0)[0].word(0).store(MAGIC, Relaxed);
        Ok(state)
    }

    /// Opens state that an earlier server kept.
    pub fn adopt(memory: OwnedFd) -> Result<Self, StateError> {
        let region = Region::adopt(memory)?;
        if region.len() < 2 * PAGE_LEN {
            return Err(RegionError::Truncated { have: region.len(), need: 2 * PAGE_LEN }.into());
        }
        let state = State { region };
        match state.header(0)[0].word(0).load(Relaxed) {
            MAGIC => Ok(state),
            found => Err(StateError::Foreign { found }),
        }
    }

    fn header(&self, line: usize) -> Span<Line> {
        self.region.span(line * LINE_LEN, 1).expect("the first page was checked or made")
    }

    /// Returns the descriptor to hand to a successor, or to a supervisor that keeps it for one.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.region.fd()
    }

    /// Returns the server's own part of the memory, behind the first page.
    pub fn words(&self) -> Span<AtomicU64> {
        let count = (self.region.len() - PAGE_LEN) / 8;
        self.region.span(PAGE_LEN, count).expect("it lies behind the first page")
    }

    /// Returns the identity of the service that this state belongs to.
    pub fn service(&self) -> Service {
        let line = self.header(0);
        let half = |word: usize| u128::from(line[0].word(word).load(Relaxed));
        Service(half(1) << 64 | half(2))
    }

    fn lease(&self) -> Lease<Span<Line>> {
        Lease::new(self.header(2))
    }

    /// Returns the process id of the present server, and its generation.
    pub fn tenure(&self) -> Tenure {
        self.lease().tenure()
    }

    /// Takes the lease from `from`, a holder that has passed it or is dead.
    pub(crate) fn take(&self, from: Tenure) -> Result<Tenure, Lost> {
        self.lease().take(from, me())
    }

    pub(crate) fn pass(&self, ours: Tenure) -> Result<Tenure, Lost> {
        self.lease().pass(ours)
    }
}

fn me() -> NonZeroU32 {
    NonZeroU32::new(std::process::id()).expect("no process has id 0")
}

/// Returns random bits for ids that must not match by accident.
pub(crate) fn random_word() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    // Each thread seeds it with the kernel's random numbers and then counts up: an id must be unique.
    let mut hasher = RandomState::new().build_hasher();
    hasher.write_u32(std::process::id());
    hasher.finish()
}
