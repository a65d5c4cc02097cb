//! The cases of the suite. Each starts with a fresh card.

use std::time::{Duration, Instant};

use tasuki_net::nic::bus::Bus;
use tasuki_net::nic::{Filter, Mac, Nic, NicError, NicMemory, NicOptions};
use tasuki_net::port::{Armed, BURST_MAX, Burst, Port};
use tasuki_shm::arena::Geometry;
use tasuki_shm::region::{Region, Span};

use super::frames::{BROADCAST, LONGEST, SHORTEST, assert_same, frame, frames, ipv4, mixed};
use super::{Bench, PATIENCE, World, memory};
use crate::qemu::readable;

/// Small rings: they go round often.
fn small() -> NicOptions {
    NicOptions { ring: 64, ..NicOptions::default() }
}

pub fn frames_arrive_whole_and_in_order<W: World>() {
    let Some(mut bench) = Bench::<W>::start(&small()) else { return };
    let sent = frames(W::MAC, 0, SHORTEST..=LONGEST);
    assert_same(&bench.bring_in(&sent), &sent);
}

pub fn frames_leave_whole_and_in_order<W: World>() {
    let Some(mut bench) = Bench::<W>::start(&small()) else { return };
    let sent = frames(Mac([2, 0, 0, 0, 0, 9]), 0, SHORTEST..=LONGEST);
    assert_same(&bench.bring_out(&sent), &sent);
}

pub fn a_full_port_leaves_the_rest_to_the_caller<W: World>() {
    let options = NicOptions { ring: 8, ..NicOptions::default() };
    let Some(mut bench) = Bench::<W>::start(&options) else { return };
    let sent = frames(Mac([2, 0, 0, 0, 0, 9]), 0, mixed(BURST_MAX));
    let mut burst: Burst = sent.iter().map(|frame| bench.fill(frame)).collect();
    let mut taken = bench.nic().transmit(&mut burst).expect("the card works");
    assert!((1..=8).contains(&taken), "{taken} frames in a ring of 8");
    let mut arrived = Vec::new();
    let deadline = Instant::now() + PATIENCE;
    while arrived.len() < sent.len() {
        assert_eq!(burst.len(), BURST_MAX - taken, "what was not taken is still there");
        let rest: Vec<_> = burst.iter().map(|frame| frame.bytes().to_vec()).collect();
        assert_same(&rest, &sent[taken..]);
        taken += bench.nic().transmit(&mut burst).expect("the card works");
        arrived.extend(bench.world.take(Duration::from_millis(1)));
        assert!(Instant::now() < deadline, "{} frames arrived", arrived.len());
    }
    assert_same(&arrived, &sent);
}
