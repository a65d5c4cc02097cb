//! Two namespaces on a VNI, driven by threads.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tasuki_net::endpoint::Bridge;
use tasuki_net::endpoint::tap::Tap;
use tasuki_net::port::Armed;
use tasuki_net::switch::Switch;
use tasuki_shm::line::{Claims, LINE_LEN};
use tasuki_shm::region::{Pages, Region};
use tasuki_shm::vni::directory::{Directory, Lookup, NodeSet, directory_lines};
use tasuki_tap::device::Before;

use super::{Place, StopAtEnd};
use crate::net::Net;

/// Drives a node until `stop` is set; returns the node.
pub fn drive(mut node: Bridge<Tap>, stop: &AtomicBool) -> Bridge<Tap> {
    while !stop.load(Ordering::Relaxed) {
        if node.turn() == 0 && node.arm() == Armed::Idle {
            node.rest(Duration::from_millis(50));
        }
        node.tick(Instant::now());
    }
    node
}

/// Runs `what` with two connected namespaces, 192.0.2.1 and 192.0.2.2; returns their nodes.
pub fn with_two(pool_pages: u32, what: impl FnOnce([&Place; 2])) -> Option<[Bridge<Tap>; 2]> {
    if !super::is_possible() {
        return None;
    }
    let places = ["a", "b"].map(Place::new);
    let count = directory_lines(4);
    let lines = Region::create("directory", count * LINE_LEN, Pages::Small).unwrap().span(0, count).unwrap();
    let mut directory = Directory::new(lines.clone());
    let mut nodes = NodeSet::default();
    let mut net = Net::with(2, pool_pages);
    let mut ends = Vec::new();
    for (number, place) in (0_u8..).zip(&places) {
        let mac = [2, 0, 0, 0, 0x7a, number];
        let tap = place.tap_of(mac, &format!("192.0.2.{}/24", number + 1), Before::Offload);
        directory.add(mac, number.into()).expect("there is room");
        nodes.insert(number.into());
        let switch = Switch::new(number.into(), Lookup::new(Claims::of(lines.clone())));
        ends.push(Bridge::new(Box::new(Tap::new(tap)), net.take(number.into()), switch));
    }
    directory.set_nodes(&nodes);
    let stop = AtomicBool::new(false);
    let done = std::thread::scope(|scope| {
        let driven: Vec<_> = ends.into_iter().map(|node| scope.spawn(|| drive(node, &stop))).collect();
        let guard = StopAtEnd(&stop);
        what([&places[0], &places[1]]);
        drop(guard);
        driven.into_iter().map(|node| node.join().expect("a node does not panic")).collect::<Vec<_>>()
    });
    done.try_into().ok()
}
