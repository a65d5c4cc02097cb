//! Reading a slot where it lies, as a server does whose clients are trusted.
//!
//! # Invariants
//!
//! - **T1** Both ends of a bench are this program, and its client does not write a slot that it has sent.
#![allow(unsafe_code, reason = "reads in place what another process could write")]

use tasuki_shm::arena::PeerSlot;

/// Sum of the 64-bit words of the slot.
pub fn sum_in_place(slot: &PeerSlot) -> u64 {
    // SAFETY: the client does not write it until it is answered (T1).
    super::sum(unsafe { slot.bytes() })
}
