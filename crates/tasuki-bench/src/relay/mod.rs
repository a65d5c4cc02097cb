//! A NIC that changes hands while packets flow.
//!
//! One CPU runs our model of the 82574L, or of a virtio network device for `mbb` and `virtio-…`. The other runs the
//! whole system (`system`), or two workers of the bench that take turns (`worker`, `repoint`). A guest runs the
//! kernel's driver, and ours (`guest`).

pub mod guest;
mod repoint;
mod rows;
pub mod sends;
pub mod system;
mod turns;
mod worker;

pub use rows::{rows, tables};
pub use turns::take_turns;

use crate::case::Case;
use crate::cpus::{Cores, Cpus};
use crate::floors;
use crate::nic::{card, sockets};

use system::Relay;
use tasuki_control::api::types::Method;
use turns::Traffic;

/// A case of two workers of the bench that take turns, without a daemon: the cost of a driver's relay alone.
macro_rules! turns {
    ($name:literal, $size:expr, $traffic:expr) => {
        Case {
            name: $name,
            cores: Cores::Other,
            calls: 60,
            full: 2,
            prepare: sockets,
            serve: |orders| card::serve_trials(orders, $size),
            measure: |orders| worker::upgrades(orders, $traffic),
        }
    };
}

/// A case of the whole system, which starts and ends processes for every relay.
macro_rules! system {
    ($name:literal, $size:expr, $traffic:expr, $relay:expr) => {
        system!($name, $size, $traffic, $relay, serve_system)
    };
    ($name:literal, $size:expr, $traffic:expr, $relay:expr, $card:ident) => {
        Case {
            name: $name,
            cores: Cores::Other,
            calls: 2,
            full: 51,
            prepare: sockets,
            serve: |orders| card::$card(orders, $size),
            measure: |orders| system::relays(orders, $relay, $traffic),
        }
    };
}

/// A case of nodes that are lost: each of them has to be back before the next turn.
macro_rules! fail_over {
    ($name:literal, $trust:literal) => {
        Case { full: 3, ..system!($name, PAPER, Traffic::Paper, Relay::FailOver { trust: $trust }) }
    };
}

macro_rules! apart {
    ($name:literal, $size:expr) => {
        system!($name, $size, Traffic::Line, MBB, serve_virtio)
    };
}

/// The cases, in the order in which a round runs them. `calls` counts relays.
pub const CASES: &[Case] = &[
    turns!("turns-line64", 64, Traffic::Line),
    turns!("turns-line1518", 1518, Traffic::Line),
    turns!("turns-paper", PAPER, Traffic::Paper),
    Case { measure: repoint::handovers, ..turns!("turns-repoint-line64", 64, Traffic::Line) },
    system!("upgrade-inplace-line64", 64, Traffic::Line, Relay::Upgrade { store: false }),
    system!("upgrade-inplace-line1518", 1518, Traffic::Line, Relay::Upgrade { store: false }),
    system!("upgrade-inplace-paper", PAPER, Traffic::Paper, Relay::Upgrade { store: false }),
    system!("upgrade-staged-line64", 64, Traffic::Line, Relay::Staged),
    system!("upgrade-staged-paper", PAPER, Traffic::Paper, Relay::Staged),
    system!("upgrade-store-line64", 64, Traffic::Line, Relay::Upgrade { store: true }),
    system!("upgrade-store-line1518", 1518, Traffic::Line, Relay::Upgrade { store: true }),
    system!("upgrade-store-paper", PAPER, Traffic::Paper, Relay::Upgrade { store: true }),
    system!("takeover-line64", 64, Traffic::Line, Relay::Takeover),
    system!("takeover-line1518", 1518, Traffic::Line, Relay::Takeover),
    system!("takeover-paper", PAPER, Traffic::Paper, Relay::Takeover),
    system!("handover-keep-line64", 64, Traffic::Line, Relay::Give(Method::Keep)),
    system!("handover-keep-line1518", 1518, Traffic::Line, Relay::Give(Method::Keep)),
    system!("handover-keep-paper", PAPER, Traffic::Paper, Relay::Give(Method::Keep)),
    system!("handover-repoint-line64", 64, Traffic::Line, Relay::Give(Method::Repoint)),
    system!("handover-repoint-line1518", 1518, Traffic::Line, Relay::Give(Method::Repoint)),
    system!("handover-repoint-paper", PAPER, Traffic::Paper, Relay::Give(Method::Repoint)),
    system!("handover-fenced-line64", 64, Traffic::Line, Relay::Fence(Method::Repoint)),
    system!("handover-fenced-line1518", 1518, Traffic::Line, Relay::Fence(Method::Repoint)),
    system!("handover-fenced-paper", PAPER, Traffic::Paper, Relay::Fence(Method::Repoint)),
    system!("handover-mbb-line64", 64, Traffic::Line, Relay::Give(Method::Mbb), serve_virtio),
    system!("handover-mbb-line1518", 1518, Traffic::Line, Relay::Give(Method::Mbb), serve_virtio),
    system!("handover-mbb-paper", PAPER, Traffic::Paper, Relay::Give(Method::Mbb), serve_virtio),
    system!("virtio-upgrade-line64", 64, Traffic::Line, Relay::Upgrade { store: false }, serve_virtio),
    system!("virtio-takeover-line64", 64, Traffic::Line, Relay::Takeover, serve_virtio),
    system!("virtio-keep-line64", 64, Traffic::Line, Relay::Give(Method::Keep), serve_virtio),
    system!("virtio-repoint-line64", 64, Traffic::Line, Relay::Give(Method::Repoint), serve_virtio),
    fail_over!("failover-keep-paper", true),
    fail_over!("failover-fenced-paper", false),
    system!("handover-cold-line64", 64, Traffic::Line, Relay::Give(Method::Cold)),
    system!("handover-cold-line1518", 1518, Traffic::Line, Relay::Give(Method::Cold)),
    system!("handover-cold-paper", PAPER, Traffic::Paper, Relay::Give(Method::Cold)),
];

/// Cases of make before break in which each node, and the card too, has a CPU of its own.
pub const APART: &[Case] = &[
    Case {
        measure: |orders| system::relays_apart(orders, MBB, Traffic::Line),
        ..apart!("handover-mbb-apart-line64", 64)
    },
    Case {
        measure: |orders| system::relays_apart(orders, MBB, Traffic::Line),
        ..apart!("handover-mbb-apart-line1518", 1518)
    },
    Case {
        measure: |orders| system::relays_apart(orders, MBB, Traffic::Paper),
        ..apart!("handover-mbb-apart-paper", PAPER)
    },
];

const MBB: Relay = Relay::Give(Method::Mbb);

/// Returns the cases that this machine has enough CPUs for. Prints a notice about the others.
pub fn cases() -> impl Iterator<Item = &'static Case> {
    let third = Cpus::choose().and_then(Cpus::third);
    let apart = if matches!(third, Ok(Some(_))) { APART } else { &[] };
    if apart.is_empty() {
        eprintln!(
            "handover-mbb-apart was left out: it needs three CPUs that share no execution units, one for the card and one for each node"
        );
    }
    CASES.iter().chain(apart)
}

/// Bytes of a frame as the papers use it.
const PAPER: u32 = 1024;

/// Floors measured in the same rounds: the cost of waking another process.
pub fn floors() -> impl Iterator<Item = &'static Case> {
    floors::CASES
        .iter()
        .filter(|case| ["futex-same-core", "eventfd-same-core", "eventfd-other-core"].contains(&case.name))
}
