//! A NIC that changes hands while packets flow: our model of the 82574L in one process, and two workers that take turns in two others.

pub mod guest;
mod repoint;
mod rows;
mod worker;

use anyhow::Result;

pub use rows::rows;
pub use worker::take_turns;

use crate::case::Case;
use crate::cpus::Cores;
use crate::floors;
use crate::nic::{card, sockets};
use crate::orders::Orders;
use crate::sample::Sample;

use worker::Traffic;

/// The cases, in the order in which a round runs them. `calls` are relays.
pub const CASES: &[Case] = &[
    case(UPGRADE, |orders| card::serve_trials(orders, 64), |orders| worker::upgrades(orders, Traffic::Line)),
    case(
        "upgrade-inplace-line1518",
        |orders| card::serve_trials(orders, 1518),
        |orders| worker::upgrades(orders, Traffic::Line),
    ),
    case(
        "upgrade-inplace-paper",
        |orders| card::serve_trials(orders, 1024),
        |orders| worker::upgrades(orders, Traffic::Paper),
    ),
    case(REPOINT, |orders| card::serve_trials(orders, 64), repoint::handovers),
];

/// The case in which the wire is busiest.
pub const UPGRADE: &str = "upgrade-inplace-line64";

/// The case in which the card is pointed at another node's memory.
pub const REPOINT: &str = "handover-repoint-line64";

/// What else is measured in the same rounds: what it costs to wake another process.
pub fn floors() -> impl Iterator<Item = &'static Case> {
    floors::CASES.iter().filter(|case| ["futex-same-core", "eventfd-same-core"].contains(&case.name))
}

const fn case(name: &'static str, serve: fn(Orders) -> Result<()>, measure: fn(Orders) -> Result<Sample>) -> Case {
    Case { name, cores: Cores::Other, calls: 60, prepare: sockets, serve, measure }
}
