//! Ethernet between nodes through memory.

mod netns;
mod nodes;
mod pair;
mod rows;

use crate::case::Case;
use crate::cpus::Cores;

pub use netns::tap_node;
pub use rows::rows;

/// The cases, in the order in which a round runs them. `calls` are frames.
pub const CASES: &[Case] = &[
    frames::<64, COPY>("copy-64", 5_000_000),
    frames::<1518, COPY>("copy-1518", 2_000_000),
    frames::<15_000, COPY>("copy-15000", 200_000),
    frames::<64, IN_PLACE>("inplace-64", 5_000_000),
    frames::<1518, IN_PLACE>("inplace-1518", 2_000_000),
    frames::<15_000, IN_PLACE>("inplace-15000", 200_000),
];

/// How a frame crosses: from a private buffer to a private buffer; or every byte is written where it is sent from, and read where it lies.
const COPY: bool = false;
const IN_PLACE: bool = true;

/// Frames of so many bytes, as fast as they go.
const fn frames<const LEN: usize, const IN_PLACE: bool>(name: &'static str, frames: u64) -> Case {
    let (serve, measure) = (pair::receive::<LEN, IN_PLACE>, pair::send::<LEN, IN_PLACE>);
    Case { name, cores: Cores::Other, calls: frames, full: 2, prepare: pair::estates, serve, measure }
}
