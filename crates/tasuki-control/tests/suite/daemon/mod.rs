//! The daemon with real processes, real sockets and real lease pages. The workers have no card, and tests order
//! their faults.
//!
//! A *rig* is a daemon in a directory of its own, with the command line that talks to it. A *storm* is a rig under traffic,
//! with the real worker and a model of a card. A *room* is a network namespace, and a *world* two of them on a VNI. A
//! *stand-in* is this program in the place of a worker.

mod applied;
mod attacks;
mod callers;
mod captures;
mod clients;
mod confined;
mod containers;
mod deaths;
mod endures;
mod examples;
mod failover;
mod faults;
mod forged;
mod freezes;
mod fuzz;
mod hangs;
mod keepers;
mod kills;
mod leaks;
mod links;
mod looks;
mod memifs;
mod natives;
mod netavark;
mod operations;
mod own;
mod queues;
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
mod upgraded;
mod uplinks;
mod veth_ends;
mod vms;
mod vnis;

/// Entry point of the `standin` processes; without orders it does nothing.
#[test]
fn this_program_is_also_a_worker() {
    if let Some(orders) = standin::orders() {
        standin::run(&orders);
    }
}
