//! Two namespaces on a VNI, driven by threads.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tasuki_net::endpoint::tap::Tap;
use tasuki_net::endpoint::{Bridge, Endpoint};
use tasuki_net::port::Armed;
use tasuki_net::switch::Switch;
use tasuki_shm::line::{Claims, LINE_LEN};
use tasuki_shm::region::{Pages, Region};
use tasuki_shm::vni::directory::{Directory, Lookup, NodeSet, directory_lines};
use tasuki_tap::device::Before;

use super::{Place, StopAtEnd, pattern};
use crate::net::Net;
use tasuki_testing::PATIENCE;

/// Drives a node until `stop` is set.
pub fn drive<E: Endpoint + ?Sized>(node: &mut Bridge<E>, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        if node.turn() == 0 && node.arm() == Armed::Idle {
            node.rest(Duration::from_millis(50));
        }
        node.tick(Instant::now());
    }
}

/// Sends `bytes` bytes from the first namespace to the second and reads them back.
pub fn connection(places: [&Place; 2], to: &str, bytes: usize) {
    let to: SocketAddr = to.parse().expect("an address");
    let listener = places[1].within(|| TcpListener::bind(to)).expect("it binds");
    let echo = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("somebody connects");
        let mut writer = stream.try_clone().expect("a copy of the socket");
        std::io::copy(&mut stream, &mut writer).expect("the connection holds")
    });
    let mut stream = places[0].within(|| TcpStream::connect_timeout(&to, PATIENCE)).expect("it connects");
    stream.set_read_timeout(Some(PATIENCE)).expect("it has a limit");
    let mut writer = stream.try_clone().expect("a copy of the socket");
    let sender = std::thread::spawn(move || {
        let all: Vec<u8> = (0..bytes).map(pattern).collect();
        writer.write_all(&all).expect("the connection holds");
        writer.shutdown(std::net::Shutdown::Write).expect("it ends");
    });
    let mut back = Vec::with_capacity(bytes);
    stream.read_to_end(&mut back).expect("the connection holds");
    sender.join().expect("it sends");
    assert_eq!(echo.join().expect("it echoes"), bytes as u64);
    assert!(back.len() == bytes && back.iter().enumerate().all(|(at, byte)| *byte == pattern(at)));
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
    std::thread::scope(|scope| {
        let driven: Vec<_> = ends.iter_mut().map(|node| scope.spawn(|| drive(node, &stop))).collect();
        let guard = StopAtEnd(&stop);
        what([&places[0], &places[1]]);
        drop(guard);
        driven.into_iter().for_each(|node| node.join().expect("a node does not panic"));
    });
    ends.try_into().ok()
}
