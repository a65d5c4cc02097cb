//! Ethernet between nodes through memory.

mod netns;
mod nodes;
mod pair;
mod rows;

use anyhow::Result;

use crate::case::Case;
use crate::cpus::Cores;
use crate::orders::Orders;
use crate::sample::Sample;

pub use netns::tap_node;
use pair::Way;
pub use rows::rows;

/// The cases, in the order in which a round runs them. `calls` are frames.
pub const CASES: &[Case] = &[
    case(
        "copy-64",
        5_000_000,
        |orders| pair::receive(orders, 64, Way::Copy),
        |orders| pair::send(orders, 64, Way::Copy),
    ),
    case(
        "copy-1518",
        2_000_000,
        |orders| pair::receive(orders, 1518, Way::Copy),
        |orders| pair::send(orders, 1518, Way::Copy),
    ),
    case(
        "copy-15000",
        200_000,
        |orders| pair::receive(orders, 15_000, Way::Copy),
        |orders| pair::send(orders, 15_000, Way::Copy),
    ),
    case(
        "inplace-64",
        5_000_000,
        |orders| pair::receive(orders, 64, Way::InPlace),
        |orders| pair::send(orders, 64, Way::InPlace),
    ),
    case(
        "inplace-1518",
        2_000_000,
        |orders| pair::receive(orders, 1518, Way::InPlace),
        |orders| pair::send(orders, 1518, Way::InPlace),
    ),
    case(
        "inplace-15000",
        200_000,
        |orders| pair::receive(orders, 15_000, Way::InPlace),
        |orders| pair::send(orders, 15_000, Way::InPlace),
    ),
];

const fn case(
    name: &'static str,
    frames: u64,
    serve: fn(Orders) -> Result<()>,
    measure: fn(Orders) -> Result<Sample>,
) -> Case {
    Case { name, cores: Cores::Other, calls: frames, full: 2, prepare: pair::estates, serve, measure }
}
