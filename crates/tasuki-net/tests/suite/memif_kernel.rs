//! Traffic between a namespace, whose kernel sends segments of 64 KiB without checksums, and a memif client, behind
//! which another kernel checks every frame: the node must finish the first kernel's frames correctly.

use std::net::{SocketAddr, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use tasuki_net::endpoint::Bridge;
use tasuki_net::endpoint::tap::Tap;
use tasuki_net::switch::Switch;
use tasuki_shm::line::Claims;
use tasuki_shm::vni::directory::Lookup;
use tasuki_tap::device::Before;

use crate::memif::client::{Client, Shape};
use crate::memif::port::{OTHER, PORT, SECRET, World, mac};
use crate::place::capture::{Capture, Sum};
use crate::place::two::{connection, drive};
use crate::place::{Place, StopAtEnd};
use crate::process::is_installed;
use tasuki_testing::PATIENCE;

const NAP: Duration = Duration::from_millis(20);

/// Makes one end of the wire, with its addresses.
fn plug(place: &Place, node: u16, address: &str, before: Before) -> OwnedFd {
    let tap = place.tap_of(mac(node), &format!("192.0.2.{address}/24"), before);
    assert!(place.ip(&["addr", "add", &format!("fd00::{address}/64"), "dev", "nic0", "nodad"]));
    tap
}

/// Carries frames between a memif and a TAP, like a bridge.
fn bridge(client: &mut Client, tap: &OwnedFd, stop: &AtomicBool) {
    let mut frame = vec![0; 1 << 16];
    while !stop.load(Ordering::Relaxed) {
        let mut ends = [PollFd::new(tap, PollFlags::IN), PollFd::new(&client.bells[1], PollFlags::IN)];
        let nap = Timespec::try_from(NAP).expect("a moment");
        let _ = rustix::event::poll(&mut ends, Some(&nap));
        client.was_rung();
        for frame in client.receive() {
            // A kernel without room drops the frame, as a bridge does.
            let _ = rustix::io::write(tap, &frame);
        }
        for _ in 0..16 {
            let Ok(len) = rustix::io::read(tap, &mut frame[..]) else { break };
            client.send(&frame[..len]);
        }
    }
}

/// Sends a datagram each way; the first kernel leaves its checksum unfinished.
fn datagram(places: [&Place; 2], to: &str) {
    let to: SocketAddr = to.parse().expect("an address");
    let there = places[1].within(|| UdpSocket::bind(to)).expect("it binds");
    let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let here = places[0].within(|| UdpSocket::bind(any)).expect("it binds");
    there.set_read_timeout(Some(Duration::from_secs(1))).expect("it has a limit");
    let (until, mut room) = (Instant::now() + PATIENCE, [0; 2000]);
    loop {
        // A datagram may be lost: send again.
        here.send_to(&[7; 1001], to).expect("it is sent");
        if let Ok((len, _)) = there.recv_from(&mut room) {
            return assert_eq!(room[..len], [7; 1001]);
        }
        assert!(Instant::now() < until, "no datagram arrives");
    }
}

#[test]
fn a_kernel_takes_what_was_finished_for_another() {
    if !crate::place::is_possible() {
        return;
    }
    let places = [Place::new("a"), Place::new("b")];
    let mut world = World::new(1);
    let left = plug(&places[0], OTHER, "1", Before::Offload);
    let right = plug(&places[1], PORT, "2", Before::Nothing);
    let switch = Switch::new(OTHER, Lookup::new(Claims::of(world.lines.clone())));
    let mut tap_node = Bridge::new(Box::new(Tap::new(left)), world.net.take(OTHER.into()), switch);
    let path = world.path();
    let mut client = Client::connect(&path, Shape { log2: 10, buffer: 2048 }, SECRET, || {
        world.turn();
    });
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let guard = StopAtEnd(&stop);
        let port = scope.spawn(|| {
            drive(&mut world.node, &stop);
            (world.node.given, world.node.dropped)
        });
        let tap = scope.spawn(|| {
            drive(&mut tap_node, &stop);
            tap_node.taken
        });
        scope.spawn(|| bridge(&mut client, &right, &stop));
        let both = [&places[0], &places[1]];
        let folder = tempfile::tempdir().expect("a folder");
        let can_capture = is_installed("dumpcap") && is_installed("tshark");
        let capture = can_capture.then(|| Capture::start(&places[1], folder.path()));
        for to in ["192.0.2.2:7777", "[fd00::2]:7777"] {
            connection(both, to, 8 << 20);
            datagram(both, to);
        }
        for seen in capture.map(Capture::finish).into_iter().flatten() {
            // The other kernel's frames may have its form of zero.
            let is_ours = matches!(&*seen.from, "192.0.2.1" | "fd00::1");
            let is_right = matches!(seen.sum, Sum::Good | Sum::None) || !is_ours && seen.sum == Sum::OtherZero;
            assert!(is_right && seen.header != Sum::Bad, "{seen:?}");
        }
        drop(guard);
        let (given, dropped) = port.join().expect("it does not panic");
        let taken = tap.join().expect("it does not panic");
        println!("{taken} segments became {given} frames; {dropped:?}");
        assert_eq!(dropped.malformed, 0, "all segments of a kernel are understood");
        assert!(given > taken + 1000, "{taken} segments became {given} frames: they were not cut");
    });
}
