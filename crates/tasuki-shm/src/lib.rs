//! Memory that two processes write at once: arenas, rings, bells, leases, and calls between processes on top of them.
//!
//! | module      | what it is                                                              |
//! |-------------|-------------------------------------------------------------------------|
//! | [`region`]  | shared memory: sealed, mapped, lent out as atomics                      |
//! | [`mod@line`] | a cache line of it; ours to store, a peer's only to load                |
//! | [`arena`]   | memory cut into slots that move between owner and peer                  |
//! | [`slots`]   | who holds which slot                                                    |
//! | [`pool`]    | memory for frames of any length, which one writes and many read         |
//! | [`enforce`] | a peer's mapping, write-protected from outside                          |
//! | [`ring`]    | a queue from one producer to one consumer                               |
//! | [`bell`]    | how a parked process is woken, for nothing when it is awake             |
//! | [`wake`]    | the kernel's part of a bell                                             |
//! | [`lease`]   | who owns something now                                                  |
//! | [`mod@slice`] | how long a process runs at a time                                       |
//! | [`stats`]   | counters and histograms for strangers to read                           |
//! | [`vni`]     | what lies in memory of a VNI                                            |
//! | [`call`]    | request and response between processes                                  |
//!
//! The rules that these modules keep are numbered where they are stated, and cited where they are used.
//! docs/design/shm.md and docs/design/call.md say what is promised to whom, and what is not.

pub mod bell;
pub mod lease;
pub mod line;
pub mod pool;
pub mod ring;
pub mod slots;
pub mod stats;
pub mod sync;
pub mod vni;

#[cfg(not(loom))]
pub mod arena;
#[cfg(not(loom))]
pub mod call;
#[cfg(not(loom))]
pub mod crash;
#[cfg(not(loom))]
pub mod enforce;
#[cfg(not(loom))]
pub mod region;
#[cfg(not(loom))]
pub mod slice;
#[cfg(not(loom))]
pub mod wake;
