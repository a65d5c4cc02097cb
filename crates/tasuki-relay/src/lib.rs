//! Handing a NIC over: one protocol with three uses. Pure state machines; whoever drives them has the memory, the sockets and the clock.
//!
//! | use      | what it is                          | who begins                                              |
//! |----------|-------------------------------------|---------------------------------------------------------|
//! | upgrade  | the same node, a new worker         | somebody asks                                           |
//! | handover | another node                        | somebody asks                                           |
//! | takeover | the same node, the holder is no more | the arbiter, from a pidfd or a heartbeat that stays out |
//!
//! # Rules
//!
//! - **Y1** The lease word decides, never a timeout: a deadline makes the arbiter try a compare-and-swap, and nothing else.
//! - **Y2** A worker takes the lease only from the very word that an order named, so an order that comes late is void.
//! - **Y3** Only workers that have stopped, died or been fenced lose the lease: the first pass it, from the others the arbiter seizes it.
//! - **Y4** The driver state is written before the lease is passed, and read after it was won.
//! - **Y5** A machine does all that a row says before it hears of anything else.
//! - **Y6** Whoever was fenced never drives again, and a fence is recorded before it is put up.

#![forbid(unsafe_code)]

use std::num::NonZeroU32;

pub mod arbiter;
pub mod driver_state;
pub mod giver;
pub mod heartbeat;
pub mod message;
pub mod method;
pub mod table;
pub mod taker;
pub mod wire;
pub mod worker;

/// A holder of the lease, by the number that stands in its word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Party(pub NonZeroU32);

/// The daemon. It holds the lease of a device that nobody drives.
pub const ARBITER: Party = Party(NonZeroU32::MAX);

/// What the lease word says: who holds it, and how often it was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tenure {
    /// Nobody while it is passed on.
    pub holder: Option<Party>,
    /// How often it was taken.
    pub epoch: u32,
}

impl Tenure {
    /// Of nobody, in this epoch.
    pub fn free(epoch: u32) -> Self {
        Tenure { holder: None, epoch }
    }

    /// What the word becomes when its holder passes it.
    #[must_use]
    pub fn passed(self) -> Self {
        Tenure::free(self.epoch)
    }

    /// What it becomes when `party` takes it.
    #[must_use]
    pub fn taken_by(self, party: Party) -> Self {
        Tenure { holder: Some(party), epoch: self.epoch.wrapping_add(1) }
    }

    /// The word of `tasuki_shm::lease`.
    pub fn to_word(self) -> u64 {
        u64::from(self.epoch) << 32 | u64::from(self.holder.map_or(0, |party| party.0.get()))
    }

    /// The reverse of [`to_word`](Self::to_word).
    #[expect(clippy::cast_possible_truncation, reason = "the two halves of a word")]
    pub fn from_word(word: u64) -> Self {
        Tenure { holder: NonZeroU32::new(word as u32).map(Party), epoch: (word >> 32) as u32 }
    }
}

/// How the last driver ended, and so what is true of its device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum After {
    /// It stopped and wrote its driver state.
    Passed,
    /// It died or was fenced in the middle of something, or nobody knows: the rings have the truth, as its last store left them.
    Lost,
}
