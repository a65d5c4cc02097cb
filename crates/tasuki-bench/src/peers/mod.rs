//! Peers: other programs and mechanisms that make the same call, in the best set-up we know for each.

#[cfg(feature = "peers")]
mod iceoryx2;
mod kernel;

use anyhow::Result;

use crate::case::Case;
use crate::floors;
use crate::report::{Kind, Row};
use crate::rounds::Samples;

/// Bytes of a call's message in both directions, unless stated otherwise.
const MESSAGE_LEN: usize = 48;

/// Returns all peers' cases, in the order in which a round runs them.
pub fn cases() -> impl Iterator<Item = &'static Case> {
    iceoryx2_cases().iter().chain(kernel::CASES)
}

#[cfg(feature = "peers")]
fn iceoryx2_cases() -> &'static [Case] {
    iceoryx2::CASES
}

#[cfg(not(feature = "peers"))]
fn iceoryx2_cases() -> &'static [Case] {
    &[]
}

/// Makes the rows of all peers, each compared with its floor.
pub fn rows(samples: &Samples) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for case in iceoryx2_cases() {
        let mut of_case = Row::round_trip(case.name, samples.of(case.name)?);
        let median = of_case.remove(0);
        rows.push(median.against(floors::PING_PONG, Kind::Floor, floors::spinning_p50(samples, floors::PING_PONG)?));
        rows.extend(of_case);
    }
    for (name, floor) in kernel::FLOORS {
        rows.extend(floors::rows_beside(samples, name, Kind::Floor, floor)?);
    }
    Ok(rows)
}
