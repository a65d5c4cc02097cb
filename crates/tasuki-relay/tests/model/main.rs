//! Giver, taker, stand-by, arbiter and lease word together, with everything that can go wrong, explored to the end.

mod world;

use stateright::{Checker, Model};
use tasuki_relay::wire::Use;
use world::Relay;

fn holds(relay: Relay) {
    let checker = relay.checker().spawn_dfs().join();
    println!("{} states, {} unique", checker.state_count(), checker.unique_state_count());
    for (name, path) in checker.discoveries() {
        let last = path.last_state().clone();
        panic!("{name}: {:?}\n{last:#?}", path.into_actions());
    }
}

#[test]
fn upgrade() {
    holds(Relay::new(Some((Use::Upgrade, false)), 2));
}
