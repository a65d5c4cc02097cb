//! Handing a NIC over: one protocol with three uses. The crate holds pure state machines; their callers hold the
//! memory, the sockets and the clock.
//!
//! | use      | purpose                                   | initiator                                      |
//! |----------|-------------------------------------------|------------------------------------------------|
//! | upgrade  | the same node, a new worker               | a person or a policy asks                      |
//! | handover | another node                              | a person or a policy asks                      |
//! | takeover | the same node, whose holder died or hangs | the arbiter, by exit mark, pidfd or heartbeat  |
//!
//! | module           | contents                                                                        |
//! |------------------|---------------------------------------------------------------------------------|
//! | [`arbiter`]      | the daemon's part: orders relays, fences workers, seizes leases                 |
//! | [`giver`]        | the side that holds the lease                                                   |
//! | [`taker`]        | the side that is to hold it                                                     |
//! | [`worker`]       | both joined, as one worker has them for a NIC                                   |
//! | [`table`]        | a protocol as a table, which all of these are                                   |
//! | [`method`]       | the way in which a NIC goes to another node                                     |
//! | [`heartbeat`]    | when a living worker counts as hung                                             |
//! | [`driver_state`] | the envelope of a driver state                                                  |
//! | [`message`]      | messages between daemon and workers, and the layout of the pages that they share |
//! | [`wire`]         | packets of the relay: orders and reports                                        |
//!
//! # Rules
//!
//! - **Y1** The lease word decides, never a timeout: a deadline makes the arbiter try a compare-and-swap, and
//!   nothing else.
//! - **Y2** A worker takes the lease only from the very word that an order named, so a late order is void.
//! - **Y3** Only workers that have stopped, died or been fenced lose the lease: workers that have stopped pass it;
//!   from the others the arbiter seizes it.
//! - **Y4** The giver writes the driver state before it passes the lease; the taker reads it after it has won the
//!   lease.
//! - **Y5** A machine carries out all actions of a row before it hears the next input.
//! - **Y6** A fenced worker never drives again. The daemon records the fence before it kills the worker; until then
//!   the worker stands frozen, and the kernel is the record.

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

/// Holder of a lease, by its number in the lease word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Party(pub NonZeroU32);

/// The daemon. It holds the lease of a device that no worker drives.
pub const ARBITER: Party = Party(NonZeroU32::MAX);

/// Value of the lease word: the holder, and the number of times the lease was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tenure {
    /// Holder of the lease; nothing while it is passed on.
    pub holder: Option<Party>,
    /// Number of times the lease was taken.
    pub epoch: u32,
}

impl Tenure {
    /// Returns the tenure of a lease without a holder, in this epoch.
    pub fn free(epoch: u32) -> Self {
        Tenure { holder: None, epoch }
    }

    /// Returns the tenure after its holder has passed the lease.
    #[must_use]
    pub fn passed(self) -> Self {
        Tenure::free(self.epoch)
    }

    /// Returns the tenure after `party` has taken the lease.
    #[must_use]
    pub fn taken_by(self, party: Party) -> Self {
        Tenure { holder: Some(party), epoch: self.epoch.wrapping_add(1) }
    }

    /// Returns the word as `tasuki_shm::lease` stores it.
    pub fn to_word(self) -> u64 {
        u64::from(self.epoch) << 32 | u64::from(self.holder.map_or(0, |party| party.0.get()))
    }

    /// Reverses [`to_word`](Self::to_word).
    #[expect(clippy::cast_possible_truncation, reason = "the two halves of a word")]
    pub fn from_word(word: u64) -> Self {
        Tenure { holder: NonZeroU32::new(word as u32).map(Party), epoch: (word >> 32) as u32 }
    }
}

/// How the last driver ended, and with it the state of its device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum After {
    /// The driver stopped and wrote its driver state.
    Passed,
    /// The driver died or was fenced in the middle of its work, or its end is unknown. The rings hold the truth, as
    /// its last store left them.
    Lost,
}
