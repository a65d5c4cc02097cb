//! A driver that is slower than its wire: with flow control nothing is lost, without it frames are lost.

use std::time::{Duration, Instant};

use tasuki_net::nic::bus::Iova;
use tasuki_net::nic::{Nic, NicMemory, NicOptions};
use tasuki_net::port::{Burst, Port};
use tasuki_shm::arena::Geometry;
use tasuki_sim::wire::SourceOptions;

use crate::plugged::{self, with_card, with_frames};

/// Number of frames: several times what ring and packet buffer hold together.
const FRAMES: u64 = 5_000;

/// Receives from a source at line rate, and does not look at the card before the source has either sent everything
/// or been paused. Returns the number of frames received, and the driver's statistics.
fn with(flow_control: bool) -> (u64, Vec<(&'static str, u64)>) {
    let (said, ..) = with_card(SourceOptions::line_rate(1_000_000_000, 64), FRAMES, |socket, wire| {
        let memory = NicMemory::create(Geometry { slot_len: 4096, count: 1024 }, 256 << 10, Iova(1 << 32)).unwrap();
        let mut nic = plugged::start(socket, memory, flow_control);
        wire.begin();
        wire.await_end_or_pause(FRAMES);
        let mut came = 0;
        let mut last = Instant::now();
        while came < FRAMES && last.elapsed() < Duration::from_secs(if flow_control { 30 } else { 1 }) {
            let mut burst = Burst::new();
            let count = nic.receive(&mut burst).unwrap();
            if count > 0 {
                came += count as u64;
                last = Instant::now();
            }
        }
        let statistics = nic.statistics();
        nic.park().unwrap();
        (came, statistics)
    });
    said
}

fn of(statistics: &[(&'static str, u64)], name: &str) -> u64 {
    statistics.iter().find(|(its, _)| *its == name).unwrap().1
}

#[test]
fn a_partner_that_is_asked_to_pause_loses_nothing() {
    let (came, statistics) = with(true);
    assert_eq!((came, of(&statistics, "rx_missed_errors")), (FRAMES, 0));
    let (xoff, xon) = (of(&statistics, "tx_flow_control_xoff"), of(&statistics, "tx_flow_control_xon"));
    assert!(xoff > 0 && xon > 0, "it was told to pause {xoff} times, and {xon} times to go on");
}

#[test]
fn without_flow_control_the_rest_is_lost_and_counted() {
    let (came, statistics) = with(false);
    assert!(came < FRAMES, "ring and buffer hold less");
    assert_eq!(came + of(&statistics, "rx_missed_errors"), FRAMES);
    assert_eq!(of(&statistics, "tx_flow_control_xoff"), 0);
}

#[test]
fn long_frames_that_the_card_has_room_for_make_nobody_pause() {
    // All fit into the ring, so the driver's speed does not matter.
    const COUNT: u64 = 50;
    let rate = SourceOptions::line_rate(1_000_000_000, 9014);
    let (statistics, ..) = with_frames(9014, rate, COUNT, |socket, wire| {
        let memory = NicMemory::create(Geometry { slot_len: 16384, count: 1024 }, 256 << 10, Iova(1 << 32)).unwrap();
        let mut nic = plugged::start_with(socket, memory, NicOptions { mtu: 9000, ..NicOptions::default() });
        wire.begin();
        wire.await_end_or_pause(COUNT);
        let statistics = nic.statistics();
        nic.park().unwrap();
        statistics
    });
    assert_eq!((of(&statistics, "rx_packets"), of(&statistics, "tx_flow_control_xoff")), (COUNT, 0));
}
