//! Tables with a fault in them. The model must find the harm that each does: if a mutant survives, a property is
//! missing.

use stateright::{Checker, HasDiscoveries, Model};
use tasuki_relay::table::{All, Row, Then};
use tasuki_relay::wire::Use;
use tasuki_relay::{arbiter, giver, taker};

use crate::world::Relay;

/// Changes the consequence of an event in a state.
fn change<S: All, E: All, A: Copy>(rows: &mut Vec<Row<S, E, A>>, from: S, on: E, then: Then<S, A>) {
    let only: &'static [S] = S::ALL.iter().position(|state| *state == from).map(|at| &S::ALL[at..=at]).unwrap();
    assert!(rows.iter().any(|row| row.on == on && row.from.contains(&from)), "there is such a row");
    rows.insert(0, Row { from: only, on, then, because: "a mutant" });
}

/// Checks that the model finds a property that does not hold.
fn caught(name: &str, relay: Relay) {
    let checker = relay.checker().finish_when(HasDiscoveries::Any).spawn_bfs().join();
    let found: Vec<_> = checker.discoveries().into_keys().collect();
    println!("{name}: {found:?} after {} states", checker.unique_state_count());
    assert!(!found.is_empty(), "the mutant survives: {name}");
}

fn upgrade() -> Relay {
    Relay::new(Some((Use::Upgrade, false)), 1)
}

fn behind_a_fence() -> Relay {
    Relay::new(Some((Use::Handover, true)), 1)
}

fn takeover() -> Relay {
    Relay::new(None, 2)
}

#[test]
fn a_giver_that_does_not_keep_to_its_table_is_caught() {
    use giver::{Action, Event, State};
    let mutant = |state, event, then| {
        let mut relay = upgrade();
        change(&mut relay.workers.giver, state, event, then);
        relay
    };
    let pass = Then::Go(State::Passing, &[Action::Pass, Action::WriteDriverState]);
    caught("the driver state after the lease", mutant(State::Stopping, Event::Stopped, pass));
    let mut unchecked = mutant(State::Stopping, Event::Stopped, pass);
    unchecked.epochs_checked = false;
    caught("the driver state after the lease, its epoch unchecked", unchecked);
    caught("no driver state", mutant(State::Stopping, Event::Stopped, Then::Go(State::Passing, &[Action::Pass])));
    let on = Then::Go(State::Driving, &[Action::SayReleased]);
    caught("goes on after it has passed the lease", mutant(State::Passing, Event::Won, on));
    caught("deaf to a release", mutant(State::Driving, Event::Release, Then::Stay(&[])));
    caught(
        "silent about what it keeps",
        mutant(State::Stopping, Event::Stuck, Then::Go(State::Driving, &[Action::Resume])),
    );
}

#[test]
fn a_taker_that_does_not_keep_to_its_table_is_caught() {
    use taker::{Action, Event, State};
    let mutant = |state, event, then| {
        let mut relay = upgrade();
        change(&mut relay.workers.taker, state, event, then);
        relay
    };
    caught("takes without a swap", mutant(State::Ready, Event::Take, Then::Go(State::Reading, &[Action::Read])));
    caught(
        "goes on after it lost the swap",
        mutant(State::Taking, Event::Lost, Then::Go(State::Reading, &[Action::Read])),
    );
    caught(
        "keeps what it cannot use",
        mutant(State::Reading, Event::Broken, Then::Go(State::Failed, &[Action::SayFailed])),
    );
    caught("waits for ever", mutant(State::Waiting, Event::Moved, Then::Stay(&[])));
    caught(
        "drives without saying so",
        mutant(State::Reading, Event::Sound, Then::Go(State::Driving, &[Action::LookOnce])),
    );
    caught("prepares for ever", mutant(State::Preparing, Event::Prepared, Then::Go(State::Ready, &[])));
}

#[test]
fn an_arbiter_that_does_not_keep_to_its_table_is_caught() {
    use arbiter::{Action, Event, State};
    let mutant = |mut relay: Relay, state, event, then| {
        change(&mut relay.arbiter.rows, state, event, then);
        relay
    };
    let seize = Then::Go(State::Seizing, &[Action::Seize]);
    caught("takeover without a fence", mutant(takeover(), State::Steady, Event::GiverSilent, seize));
    let unfenced = Then::Go(State::Seizing, &[Action::Seize]);
    caught("seizes from a silent one", mutant(upgrade(), State::Seizing, Event::HeldBySilent, unfenced));
    let decide = Then::Go(State::Choosing, &[Action::Choose]);
    caught("a deadline that decides", mutant(upgrade(), State::Passing, Event::Deadline, decide));
    caught("deaf to a death", mutant(takeover(), State::Steady, Event::GiverGone, Then::Stay(&[])));
    caught("deaf to a fence", mutant(takeover(), State::Fencing, Event::Fenced, Then::Stay(&[])));
    caught("deaf to a taker's death", mutant(upgrade(), State::Passing, Event::NextGone, Then::Stay(&[])));
    caught("deaf to a failure", mutant(upgrade(), State::Passing, Event::Failed, Then::Stay(&[])));
    caught("nobody told to take", mutant(takeover(), State::Granting, Event::PassedOn, Then::Stay(&[Action::Watch])));
    let settled = Then::Go(State::Steady, &[Action::Say]);
    caught("a taker left waiting", mutant(upgrade(), State::Passing, Event::Kept, settled));
    caught(
        "parked though somebody is left",
        mutant(takeover(), State::Seizing, Event::Seized, Then::Go(State::Parked, &[Action::Say])),
    );
    caught("released, and nothing done", mutant(behind_a_fence(), State::Letting, Event::Released, Then::Stay(&[])));
}
