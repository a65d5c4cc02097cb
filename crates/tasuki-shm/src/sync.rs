//! The atomics in use: the machine's, or loom's while loom explores a model.
//!
//! Loads from memory that is mapped read-only are always `Relaxed`, followed by a fence where an ordering is meant.
//! The language promises no more for read-only memory (`std::sync::atomic`, "Atomic accesses to read-only memory"),
//! and loom models fences exactly.

#[cfg(loom)]
pub use loom::sync::atomic::{AtomicU64, fence};
#[cfg(not(loom))]
pub use std::sync::atomic::{AtomicU64, fence};

pub use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
