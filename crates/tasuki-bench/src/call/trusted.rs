//! Reading a slot in place, as a server of trusted clients does.
//!
//! # Invariants
//!
//! - **T1** Both ends of a bench are this program, and its client does not write a slot that it has sent.
#![allow(unsafe_code, reason = "reads in place bytes that another process could write")]

use tasuki_shm::arena::PeerSlot;

/// Returns the sum of the 64-bit words of the slot.
pub fn sum_in_place(slot: &PeerSlot) -> u64 {
    // SAFETY: the client does not write the slot until it has the answer (T1).
    super::sum(unsafe { slot.bytes() })
}
