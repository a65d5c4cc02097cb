//! Calls between real processes: what arrives, what a death leaves, what hostile peers cannot do.
//!
//! A child process is this program, started again with one test, [`child_role`]. A *stage* is a server in such a
//! process, with the memory that it shares with the test.
#![cfg(all(test, not(loom)))]
#![allow(clippy::tests_outside_test_module, reason = "the whole program is tests")]

mod bad_input;
mod calls;
mod common;
mod death;
mod detach;
mod forger;
mod hostile;
mod kill_matrix;
mod no_syscalls;
mod replacement;
#[cfg(feature = "tokio")]
mod tasks;

/// Entry point of the children. It does nothing unless the environment names a role.
#[test]
fn child_role() {
    bad_input::stranger();
    detach::play_role();
    no_syscalls::play_role();
    let Some(told) = common::Told::hear() else { return };
    bad_input::take_resources(&told);
    match told.role.as_str() {
        "caller" => death::caller(&told),
        "interrupted" => replacement::interrupted(&told),
        "victim" => kill_matrix::victim(&told),
        _ => told.act(),
    }
}
