//! Giver, taker, stand-by, arbiter and lease word together, with all faults, explored to the end.
#![allow(clippy::tests_outside_test_module, reason = "a file in tests/ is a test module")]

mod mutants;
mod world;

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};

use stateright::{Checker, Model};
use tasuki_relay::ARBITER;
use tasuki_relay::wire::Use;
use world::{GIVER, Relay, SPARE, TAKER, party};

/// Explores all runs. Returns the number of states.
fn explored(relay: Relay) -> usize {
    let begun = std::time::Instant::now();
    let checker = relay.checker().spawn_dfs().join();
    if let Some((name, path)) = checker.discoveries().into_iter().next() {
        let last = path.last_state().clone();
        panic!("{name}: {:?}\n{:?} {:?}", path.into_actions(), last.word, last.daemon);
    }
    println!("{} states in {:?}", checker.unique_state_count(), begun.elapsed());
    checker.unique_state_count()
}

#[test]
fn an_upgrade_settles_whatever_two_faults_there_are() {
    explored(Relay::new(Some((Use::Upgrade, false)), 2));
}

/// A giver that also drives another NIC is to stand by for the NIC that it gave. It gets that order while its own
/// report is under way.
#[test]
fn a_giver_that_stands_by_at_once_is_no_liar() {
    explored(Relay::new(Some((Use::Upgrade, false)), 1).giving_again());
}

#[test]
fn a_handover_behind_a_fence_settles_whatever_two_faults_there_are() {
    explored(Relay::new(Some((Use::Handover, true)), 2));
}

/// The taker refuses what the last owner has left in the device. It is given the device anew, and goes on from where
/// no worker drives.
#[test]
fn a_device_that_was_refused_is_asked_for_once_more_whatever_two_faults_there_are() {
    let taken = explored(Relay::new(Some((Use::Handover, true)), 2).asking_anew());
    assert!(taken > explored(Relay::new(Some((Use::Handover, true)), 2)), "it is asked for once more");
}

#[test]
fn a_takeover_settles_whatever_two_faults_there_are() {
    explored(Relay::new(None, 2));
}

/// A worker that reports and stores any values harms no other node, and no honest worker is ended for its reports.
#[test]
fn a_liar_harms_nobody_else() {
    let (upgrade, strangers) = (Some((Use::Upgrade, false)), Some((Use::Handover, true)));
    for liar in [GIVER, TAKER, SPARE] {
        explored(Relay::new(strangers, 0).with_liar(liar, 2));
        explored(Relay::new(strangers, 1).with_liar(liar, 1).asking_anew());
        explored(Relay::new(upgrade, 0).with_liar(liar, 1));
    }
    for liar in [GIVER, SPARE] {
        explored(Relay::new(None, 1).with_liar(liar, 2));
    }
}

/// Every run has an end: no run comes back to a state that it had before.
#[test]
fn nothing_goes_round() {
    for relay in
        [Relay::new(Some((Use::Upgrade, false)), 1), Relay::new(Some((Use::Handover, true)), 1), Relay::new(None, 2)]
    {
        let hasher = BuildHasherDefault::<DefaultHasher>::default();
        // Whether a state is still on the way from the first state to the present one.
        let mut on_the_way = HashMap::new();
        let mut ends = HashSet::new();
        let mut stack: Vec<_> = relay.init_states().into_iter().map(|world| (world, false)).collect();
        while let Some((world, left)) = stack.pop() {
            let mark = hasher.hash_one(&world);
            if left {
                on_the_way.insert(mark, false);
                continue;
            }
            match on_the_way.get(&mark) {
                Some(true) => panic!("it comes back to {world:#?}"),
                Some(false) => continue,
                None => _ = on_the_way.insert(mark, true),
            }
            ends.extend(relay.settled(&world).then_some(world.word.holder));
            let next = relay.next_states(&world);
            stack.push((world, true));
            stack.extend(next.into_iter().map(|world| (world, false)));
        }
        // The runs end in different states: each worker can end up with the lease, and so can none.
        for holder in [party(GIVER), party(SPARE)] {
            assert!(ends.contains(&Some(holder)), "{holder:?}: {:?}", relay.ask);
        }
        assert_eq!(ends.contains(&Some(party(TAKER))), relay.ask.is_some());
        assert!(ends.contains(&Some(ARBITER)) || relay.faults < 2);
    }
}
