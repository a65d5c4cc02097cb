//! Memory that several processes write at the same time: arenas, rings, bells and leases.
//!
//! | module      | contents                                                                |
//! |-------------|-------------------------------------------------------------------------|
//! | [`region`]  | shared memory: sealed, mapped, lent out as atomics                      |
//! | [`mod@line`] | one cache line of it; we store to our own lines and only load a peer's  |
//! | [`arena`]   | memory cut into slots that move between owner and peer                  |
//! | [`slots`]   | the holder of each slot                                                 |
//! | [`pool`]    | memory for frames of any length, with one writer and many readers       |
//! | [`ring`]    | a queue from one producer to one consumer                               |
//! | [`bell`]    | wakes a parked process; costs no system call while it is awake          |
//! | [`wake`]    | the kernel's part of a bell                                             |
//! | [`lease`]   | the present owner of a thing                                            |
//! | [`peer`]    | the process at the other end of a socket                                |
//! | [`mod@slice`] | how long a process runs at a time                                       |
//! | [`clock`]   | the clock of all stamps                                                 |
//! | [`vni`]     | the layout of a VNI's memory                                            |
//!
//! Each module states and numbers its rules; other places cite them by number. docs/design/shm.md has the promises to
//! each party.

pub mod bell;
pub mod lease;
pub mod line;
pub mod pool;
pub mod ring;
pub mod slots;
pub mod sync;
pub mod vni;

#[cfg(not(loom))]
pub mod arena;
#[cfg(not(loom))]
pub mod clock;
#[cfg(not(loom))]
pub mod crash;
#[cfg(not(loom))]
pub mod peer;
#[cfg(not(loom))]
pub mod region;
#[cfg(not(loom))]
pub mod slice;
#[cfg(not(loom))]
pub mod wake;

/// Returns true in a process that runs this test alone. Otherwise runs that process, which ends with this code.
#[cfg(all(test, not(loom)))]
fn alone(test: &str, code: i32) -> bool {
    const ALONE: &str = "TASUKI_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let mut alone = std::process::Command::new(std::env::current_exe().unwrap());
    let status = alone.args(["--exact", test]).env(ALONE, test).status().unwrap();
    assert_eq!(status.code(), Some(code), "{status}");
    false
}
