//! Giver, taker, stand-by, arbiter and lease word together, with everything that can go wrong, explored to the end.

mod mutants;
mod world;

use stateright::{Checker, Model};
use tasuki_relay::wire::Use;
use world::Relay;

/// Explores all that can happen; how many states there are.
fn explored(relay: Relay) -> usize {
    let checker = relay.checker().spawn_dfs().join();
    if let Some((name, path)) = checker.discoveries().into_iter().next() {
        let last = path.last_state().clone();
        panic!("{name}: {:?}\n{:?} {:?}", path.into_actions(), last.word, last.daemon);
    }
    println!("{} states", checker.unique_state_count());
    checker.unique_state_count()
}

#[test]
fn an_upgrade_settles_whatever_two_faults_there_are() {
    explored(Relay::new(Some((Use::Upgrade, false)), 2));
}

#[test]
fn a_handover_behind_a_fence_settles_whatever_two_faults_there_are() {
    explored(Relay::new(Some((Use::Handover, true)), 2));
}

#[test]
fn a_takeover_settles_whatever_two_faults_there_are() {
    explored(Relay::new(None, 2));
}
