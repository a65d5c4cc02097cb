//! Kills of giver, taker, stand-by and daemon at every step, under traffic. Nothing is lost, nothing comes twice or
//! out of order, every relay settles, and a worker drives at the end.

use std::collections::BTreeSet;

use super::rig::{lives, pid, until};
use super::storm::{Storm, need_storm};

/// Frames a second.
const RATE: u32 = 4000;
/// Frames a second where the daemon dies: no worker may drive until the next daemon is there, and the ring holds
/// 1,024.
const SLOWLY: u32 = 1000;

/// Places where a taker dies while it prepares or takes.
pub const TAKER: &[&str] =
    &["map.begun", "map.done", "take.waiting", "take.won", "take.booked", "take.read", "take.looked"];
/// Places that every driver passes sooner or later.
pub const DRIVER: &[&str] = &[
    "burst.received",
    "frame.saved",
    "burst.turned",
    "burst.sent",
    "nic.written",
    "nic.committed",
    "nic.rung",
    "nic.posted",
    "nic.collected",
    "nic.saving",
    "nic.filled",
];
/// Places where a giver dies.
pub const GIVER: &[&str] = &["give.stopped", "give.written", "give.passed", "give.said"];

/// Places where the daemon dies.
const DAEMON: &[&str] = &[
    "daemon.writing",
    "daemon.worker-started",
    "daemon.worker-recorded",
    "daemon.worker-told",
    "daemon.begun",
    "daemon.bundle",
    "daemon.attached",
    "daemon.planned",
    "daemon.asked",
    "daemon.prepare",
    "daemon.release",
    "daemon.seized",
    "daemon.renewed",
    "daemon.passed",
    "daemon.take",
    "daemon.order",
    "daemon.settled",
    "daemon.upgraded",
    "daemon.retired",
    "daemon.fencing",
    "daemon.fence-recorded",
    "daemon.fence-frozen",
    "daemon.fence-killed",
    "daemon.death",
    "daemon.death-heard",
    "daemon.again",
    "daemon.adopting",
    "daemon.adopted",
];

/// Places where it dies while a NIC passes to a node that no other node trusts.
const PASSES: &[&str] = &["daemon.renewed", "daemon.passed", "daemon.take", "daemon.writing", "daemon.settled"];

fn takers_and_drivers(card: &str, poll: bool, rounds: u32) -> u32 {
    let mut storm = Storm::with_card(card, RATE, poll, &[]);
    for round in 0..rounds {
        let driving = DRIVER.iter().map(|place| (place, 1 + 5 * round));
        for (place, nth) in TAKER.iter().map(|place| (place, 1)).chain(driving) {
            storm.plan_death(place, nth);
            // The worker may or may not answer before it dies.
            let _ = storm.upgrade("red", round % 2 == 1);
            let (driver, _) = storm.settle();
            storm.kill(&driver);
            storm.settle();
        }
    }
    storm.nothing_is_lost().0
}

#[test]
fn takers_and_drivers_that_sleep_when_idle() {
    need_storm!();
    assert!(takers_and_drivers("82574l", false, 5) > 150);
}

#[test]
fn takers_and_drivers_that_poll() {
    need_storm!();
    assert!(takers_and_drivers("82574l", true, 5) > 150);
}

#[test]
fn takers_and_drivers_of_a_virtio_device_that_sleep_when_idle() {
    need_storm!();
    assert!(takers_and_drivers("virtio-net", false, 3) > 90);
}

#[test]
fn takers_and_drivers_of_a_virtio_device_that_poll() {
    need_storm!();
    assert!(takers_and_drivers("virtio-net", true, 2) > 60);
}

#[test]
fn givers_of_upgrades_and_handovers() {
    need_storm!();
    let mut storm = Storm::new(RATE, false, &[]);
    for round in 0..24 {
        let place = GIVER[round % GIVER.len()];
        storm.plan_death(place, 1);
        let said = storm.upgrade("red", false);
        assert!(said.is_ok() || round > 0, "{said:?}");
        // The worker drives, and dies when it is to give: in the next upgrade, or now.
        if round % 3 == 0 {
            storm.settle();
            let _ = storm.give("blue", Some("keep"));
            let (driver, _) = storm.settle();
            if driver["node"] == "blue" {
                let back = storm.give("red", Some("keep"));
                assert!(back.is_ok(), "{back:?}\n{}", storm.rig.log());
            }
        }
        storm.settle();
        storm.forget_plans();
    }
    let (kills, _) = storm.nothing_is_lost();
    assert!(kills >= 16, "{kills}");
}

#[test]
fn a_standby_that_dies_when_it_takes_over_and_those_who_stand_by() {
    need_storm!();
    let mut storm = Storm::new(SLOWLY, false, &[]);
    for round in 0..28 {
        // One plan for a worker that drives, and one for a stand-by that dies when it takes over.
        storm.plan("TASUKI_CRASH=nowhere:1");
        storm.plan_death(TAKER[round % TAKER.len()], 1);
        // If the daemon was about to start a stand-by anyway, the plans go the other way round, and that one dies.
        let _ = storm.upgrade("red", false);
        let (driver, standby) = storm.settle();
        // The next one stands by at once; then both go, one right after the other.
        if round % 7 == 6 {
            storm.kill(&standby);
        }
        storm.kill(&driver);
        storm.settle();
        storm.forget_plans();
    }
    let (kills, _) = storm.nothing_is_lost();
    assert!(kills >= 40, "{kills}");
}

#[test]
fn givers_and_takers_of_handovers_without_trust() {
    need_storm!();
    let mut storm = Storm::new(RATE, false, &[]);
    let places: Vec<&str> = TAKER.iter().chain(GIVER).copied().collect();
    let mut driven_by = BTreeSet::new();
    for round in 0..44 {
        let from = storm.node();
        let to = if from == "green" { "red" } else { "green" };
        let place = places[round % places.len()];
        // The next worker of the dying node, which must be there before the NIC moves.
        let dies = if GIVER.contains(&place) { &from } else { to };
        storm.plan_death(place, 1);
        let said = storm.upgrade(dies, false);
        storm.settle();
        if said.is_ok() || dies == to {
            let _ = storm.give(to, None);
        }
        let (driver, _) = storm.settle();
        driven_by.insert(driver["node"].to_string());
        storm.forget_plans();
    }
    assert_eq!(driven_by.len(), 2, "both had it\n{}", storm.rig.log());
    let kills = storm.kills();
    assert!(kills >= 30, "{kills}");
    // The possible cost of a death in the middle of a repoint: docs/design/relay.md.
    storm.ends_with_losses();
}

/// Places where a taker with memory of its own dies, and a giver that steers to it.
const STEERING: &[&str] = &[
    "map.posted",
    "map.told",
    "take.waiting",
    "take.won",
    "take.pointed",
    "take.looked",
    "nic.unmapped",
    "take.forgot",
    "give.quiesced",
    "give.stopped",
    "give.written",
    "give.passed",
    "give.said",
];

/// If one owner dies, frames on their way to either owner's queue may be lost: docs/design/relay.md. The relay
/// settles, and nothing comes twice or out of order.
#[test]
fn givers_and_takers_of_handovers_to_a_queue_to_spare() {
    need_storm!();
    let mut storm = Storm::with_card("virtio-net", RATE, false, &[]);
    let mut given = 0;
    for round in 0..44 {
        let from = storm.node();
        let to = if from == "blue" { "red" } else { "blue" };
        let place = STEERING[round % STEERING.len()];
        let dies = if place.starts_with("give.") { &from } else { to };
        storm.plan_death(place, 1);
        let _ = storm.upgrade(dies, false);
        storm.settle();
        let _ = storm.give(to, Some("mbb"));
        storm.settle();
        storm.flows();
        given += u32::from(storm.node() == to);
        storm.forget_plans();
    }
    assert!(given > 10, "{given} went\n{}", storm.rig.log());
    assert!(storm.kills() >= 30, "{}", storm.kills());
    storm.ends_with_losses();
}

/// Action during which the daemon dies.
#[derive(Debug, Clone, Copy)]
enum Deed {
    Upgrade,
    Takeover,
    Keep,
    Fence,
}

#[test]
fn the_daemon_at_every_step_of_what_it_does() {
    need_storm!();
    let is_of_a_fence = |place: &&str| place.starts_with("daemon.fenc") || *place == "daemon.renewed";
    let places = DAEMON.iter().copied().filter(|place| !is_of_a_fence(place)).collect();
    let storm = the_daemon_dies(places, &[Deed::Upgrade, Deed::Takeover, Deed::Keep]);
    storm.nothing_is_lost();
}

/// The daemon dies during a fence, or between the fence and its report of the NIC's place to the keeper and the
/// registry. If the next one comes later than the card's partner pauses, the worker that takes counts what that has cost.
#[test]
fn the_daemon_at_every_step_of_a_fence() {
    need_storm!();
    let is_of_it = |place: &&str| place.starts_with("daemon.fenc") || PASSES.contains(place);
    let storm = the_daemon_dies(DAEMON.iter().copied().filter(is_of_it).collect(), &[Deed::Fence]);
    storm.only_counted_ones_are_lost("its receive unit was off");
}

/// Then only the keeper knows the owner of the NIC. The design promises no loss for a single fault only; here a
/// worker drives again without intervention.
#[test]
fn the_daemon_at_every_step_of_a_fence_and_all_workers_with_it() {
    need_storm!();
    let mut storm = Storm::new(RARELY, false, &[]);
    for place in PASSES.repeat(3) {
        storm.kill_daemon();
        storm.start_daemon(Some(format!("{place}:1")));
        if !storm.settle_or_die() {
            do_it(&mut storm, Deed::Fence);
        }
        storm.quiet_or_dead();
        storm.kill_daemon();
        storm.kill_all_workers();
        storm.start_daemon(None);
        storm.settle();
    }
    assert!(storm.kills() >= 50, "{}", storm.kills());
    storm.ends_with_losses();
}

fn the_daemon_dies(places: BTreeSet<&str>, deeds: &[Deed]) -> Storm {
    let mut storm = Storm::new(SLOWLY, false, &[]);
    let mut missed = places.clone();
    for nth in 1..=2 {
        for place in &places {
            for deed in deeds.iter().copied() {
                storm.kill_daemon();
                storm.start_daemon(Some(format!("{place}:{nth}")));
                if !storm.settle_or_die() {
                    do_it(&mut storm, deed);
                }
                if storm.quiet_or_dead() {
                    missed.remove(place);
                }
                storm.kill_daemon();
                storm.start_daemon(None);
                storm.settle();
            }
        }
    }
    assert!(missed.is_empty(), "never there: {missed:?}");
    let (least, kills) = (places.len() * deeds.len(), storm.kills());
    assert!(kills as usize >= least, "{kills}");
    storm
}

fn do_it(storm: &mut Storm, deed: Deed) {
    let Some((driver, _)) = storm.pair() else { return };
    let node = driver["node"].as_str().expect("a node").to_owned();
    // The daemon may die during the request.
    let _ = match deed {
        Deed::Upgrade => storm.upgrade(&node, false),
        Deed::Takeover => {
            storm.kill(&driver);
            return;
        }
        Deed::Keep => storm.give(if node == "red" { "blue" } else { "red" }, None),
        Deed::Fence => storm.give(if node == "green" { "red" } else { "green" }, None),
    };
}

#[test]
fn the_daemon_together_with_workers() {
    need_storm!();
    let mut storm = Storm::new(SLOWLY, true, &[]);
    for round in 0..24 {
        let (driver, standby) = storm.settle();
        storm.kill_daemon();
        if round % 2 == 0 {
            storm.kill(&driver);
        }
        if round % 4 == 1 {
            storm.kill(&standby);
        }
        storm.start_daemon(None);
    }
    let (kills, _) = storm.nothing_is_lost();
    assert!(kills >= 42, "{kills}");
}

/// Frames a second that take five seconds to fill a ring.
const RARELY: u32 = 200;

/// The keeper has the card then, and the fresh driver finds in the ledger how far the dead one got.
#[test]
fn the_daemon_together_with_driver_and_standby() {
    need_storm!();
    let mut storm = Storm::new(RARELY, false, &[]);
    for round in 0..20 {
        let (driver, standby) = storm.settle();
        if round % 2 == 0 {
            storm.kill_daemon();
        }
        storm.kill(&driver);
        storm.kill(&standby);
        if round % 2 == 1 {
            storm.kill_daemon();
        }
        storm.start_daemon(None);
    }
    let (kills, _) = storm.nothing_is_lost();
    assert!(kills >= 60, "{kills}");
}

/// Places where a taker with memory of its own dies before any record says that it drives, together with the daemon
/// and all earlier owners of the card.
const UNKNOWN: &[&str] = &["take.won", "take.pointed", "take.read", "take.looked", "nic.unmapped", "take.forgot"];

fn a_taker_dies_with_the_daemon(card: &str, to: &str, method: &str) {
    let mut storm = Storm::with_card(card, RARELY, false, &[]);
    for place in UNKNOWN {
        let from = storm.node();
        let to = if from == to { "red" } else { to };
        storm.plan_death(place, 1);
        storm.upgrade(to, false).expect("a node without a NIC");
        storm.settle();
        storm.kill_daemon();
        // The daemon's last message: a stranger is told to take after the giver has let go, any other taker before.
        let last = if [from.as_str(), to].contains(&"green") { "take" } else { "release" };
        storm.start_daemon(Some(format!("daemon.{last}:1")));
        assert!(!storm.settle_or_die(), "{}", storm.rig.log());
        let taker = storm.workers().iter().find(|worker| worker["node"] == to).map(pid).expect("a worker");
        let _ = storm.give(to, Some(method));
        assert!(storm.quiet_or_dead(), "it dies when it has told the taker to take\n{}", storm.rig.log());
        until(&storm.rig, place, || !lives(taker));
        storm.kill_all_workers();
        storm.start_daemon(None);
        storm.settle();
        storm.flows();
        storm.forget_plans();
    }
    println!("opened anew {} times", storm.rig.log().matches("is opened anew").count());
    storm.ends_with_losses();
}

#[test]
fn a_taker_that_dies_with_the_daemon_before_it_is_known_to_drive_leaves_a_nic_that_somebody_drives() {
    need_storm!();
    a_taker_dies_with_the_daemon("82574l", "green", "repoint");
    a_taker_dies_with_the_daemon("82574l", "blue", "repoint");
    a_taker_dies_with_the_daemon("virtio-net", "blue", "repoint");
    a_taker_dies_with_the_daemon("virtio-net", "blue", "mbb");
}

/// A taker has won the lease and hangs before it has pointed the card at its memory. By the deadline it counts as
/// the driver; then it is fenced.
#[test]
fn a_card_whose_driver_never_pointed_it_at_its_memory_is_opened_anew() {
    need_storm!();
    let mut storm = Storm::new(RARELY, false, &[("hang_after_ms", 1000), ("deadline_ms", 300)]);
    storm.plan("TASUKI_STOP=take.won:1");
    storm.upgrade("green", false).expect("a node without a NIC");
    storm.settle();
    let _ = storm.give("green", None);
    storm.settle();
    storm.flows();
    storm.rig.await_event("eth0 is opened anew, and frames under way in it are lost");
    storm.ends_with_losses();
}

/// A taker of a node that is not trusted has the lease, and dies before the daemon has heard that it drives. It may have
/// reset the card, or pointed it at its memory: no worker of the old node goes on with that.
fn a_stranger_dies_before_it_is_known_to_drive(card: &str, method: Option<&str>) {
    let mut storm = Storm::with_card(card, RARELY, false, &[]);
    for (place, nth) in ["take.won", "take.read", "take.looked", "take.forgot"].into_iter().zip(1..) {
        storm.plan_death(place, 1);
        storm.upgrade("green", false).expect("a node without a NIC");
        storm.settle();
        let said = storm.give("green", method);
        assert!(said.is_err(), "{place}: {said:?}\n{}", storm.rig.log());
        storm.settle();
        storm.flows();
        assert_eq!(storm.node(), "red", "{place}\n{}", storm.rig.log());
        assert_eq!(storm.rig.log().matches("is opened anew").count(), nth, "{place}\n{}", storm.rig.log());
        storm.forget_plans();
    }
    storm.ends_with_losses();
}

#[test]
fn a_card_that_a_stranger_took_and_is_not_known_to_drive_is_opened_anew() {
    need_storm!();
    a_stranger_dies_before_it_is_known_to_drive("virtio-net", None);
    a_stranger_dies_before_it_is_known_to_drive("82574l", Some("cold"));
    a_stranger_dies_before_it_is_known_to_drive("82574l", None);
}

/// The cold method loses frames. It must lose nothing else.
#[test]
fn a_cold_handover_settles_whoever_is_killed() {
    need_storm!();
    let mut storm = Storm::new(SLOWLY, false, &[]);
    for place in ["map.done", "take.waiting", "take.won", "take.read", "give.stopped", "give.passed", "burst.sent"] {
        let from = storm.node();
        let to = if from == "red" { "blue" } else { "red" };
        storm.plan_death(place, 1);
        let _ = storm.upgrade(if GIVER.contains(&place) { &from } else { to }, false);
        storm.settle();
        let _ = storm.give(to, Some("cold"));
        storm.settle();
        storm.flows();
        storm.forget_plans();
    }
    storm.ends_with_losses();
}
