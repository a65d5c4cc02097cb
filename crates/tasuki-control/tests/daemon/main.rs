//! The daemon with real processes: real sockets, real lease pages, and workers without a card whose faults are ordered.
#![allow(clippy::tests_outside_test_module, reason = "the whole file is tests")]

mod attacks;
mod callers;
mod captures;
mod clients;
mod confined;
mod deaths;
mod endures;
mod faults;
mod forged;
mod freezes;
mod fuzz;
mod hangs;
mod keepers;
mod kills;
mod leaks;
mod memifs;
mod natives;
mod own;
mod real;
mod rig;
mod rooms;
mod ruled;
mod servers;
mod spoofs;
mod staged;
mod standin;
mod storm;
mod taps;
mod times;
mod unplugged;
mod uplinks;
mod veth_ends;
mod vnis;

/// What `standin` is started as; without its orders it is nothing.
#[test]
fn this_program_is_also_a_worker() {
    if let Some(orders) = standin::orders() {
        standin::run(&orders);
    }
}
