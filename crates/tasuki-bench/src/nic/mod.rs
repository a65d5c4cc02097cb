//! A NIC and its driver: our model of the 82574L in one process, its driver in another, over vfio-user.

pub mod card;
pub mod driver;
mod instructions;
mod rows;
pub mod trial;

use anyhow::{Context, Result};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use crate::case::{Case, Ends, Measure, Serve};
use crate::cpus::Cores;
use crate::floors;

use driver::Work;

pub use rows::rows;

/// The cases, in the order in which a round runs them. `calls` counts the frames of a trial.
pub const CASES: &[Case] = &[
    case("sim-rx-64", 2_000_000, |orders| card::serve_trials(orders, 64), |orders| driver::trials(orders, Work::Sink)),
    case("sim-echo-64", 750_000, |orders| card::serve_trials(orders, 64), |orders| driver::trials(orders, Work::Echo)),
    case(
        "sim-rx-1518",
        300_000,
        |orders| card::serve_trials(orders, 1518),
        |orders| driver::trials(orders, Work::Sink),
    ),
    case(PARK, 750_000, |orders| card::serve_trials(orders, 64), driver::parks),
    case("rtt-polling", 50_000, card::serve_pings, |orders| driver::pings(orders, false)),
    case("rtt-interrupt", floors::sleeping_calls(Cores::Other), card::serve_pings, |orders| {
        driver::pings(orders, true)
    }),
];

/// Name of the case that replaces drivers under traffic.
pub const PARK: &str = "sim-park-64";

/// Floors measured in the same rounds: those of spinning, and of sleeping.
pub fn floors() -> impl Iterator<Item = &'static Case> {
    const NAMES: [&str; 3] = ["ping-pong-tight", "ping-pong-hinted", "eventfd-other-core"];
    floors::CASES.iter().filter(|case| NAMES.contains(&case.name))
}

const fn case(name: &'static str, frames: u64, serve: Serve, measure: Measure) -> Case {
    Case { name, cores: Cores::Other, calls: frames, full: 2, prepare: sockets, serve, measure }
}

/// Makes two connections: one for vfio-user, and one on which the driver commands the wire.
pub fn sockets() -> Result<Ends> {
    let pair = |kind| {
        socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).context("the kernel gave no pair of sockets")
    };
    let (card, driver) = pair(SocketType::STREAM)?;
    let (card_side, driver_side) = pair(SocketType::SEQPACKET)?;
    Ok(Ends { server: vec![card, card_side], client: vec![driver, driver_side] })
}
