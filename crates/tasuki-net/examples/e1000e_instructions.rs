//! Counts the instructions per packet of the 82574 driver, under callgrind.
//!
//! ```text
//! cargo build --release -p tasuki-net --example e1000e_instructions
//! valgrind --tool=callgrind --callgrind-out-file=/dev/null --toggle-collect='e1000e_instructions::receive_and_release' \
//!     target/release/examples/e1000e_instructions receive
//! ```
//!
//! The figure is `Collected` divided by the number of packets that this program prints. The same goes for
//! `transmit`, with `--toggle-collect='e1000e_instructions::transmit_and_reclaim'`. The card is a stub in memory,
//! whose work is not counted. With `captured` as second argument, a capture of all frames runs. The program also
//! prints the time per packet, which means something only without callgrind.

#[allow(dead_code, reason = "the tests use the rest of it")]
#[path = "../tests/suite/stub/mod.rs"]
mod stub;

use std::hint::black_box;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType};
use stub::e1000e::{Play, StubBus};
use tasuki_net::capture::{Capture, Terms};
use tasuki_net::nic::e1000e::E1000e;
use tasuki_net::nic::{InPlace, Nic, NicOptions};
use tasuki_net::port::{BURST_MAX, Burst, Frame, Port};
use tasuki_shm::region::{Pages, Region};

const RING: u16 = 256;
const BURSTS: usize = 1000;

/// The counted part: receives a burst, and frees its slots.
#[inline(never)]
fn receive_and_release(nic: &mut E1000e<StubBus>, burst: &mut Burst) -> usize {
    let count = nic.receive(burst).expect("the stub behaves");
    burst.clear();
    count
}

/// The counted part: reclaims sent slots, and sends a burst.
#[inline(never)]
fn transmit_and_reclaim(nic: &mut E1000e<StubBus>, burst: &mut Burst) -> usize {
    nic.transmit(burst).expect("the stub behaves")
}

/// Starts a capture; returns the socket that its frames come from.
fn capture(nic: &mut E1000e<StubBus>) -> OwnedFd {
    let pair = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let (batches, socket) = pair.expect("a socket");
    let missed = Region::create("missed", 4096, Pages::Small).expect("a page").into_fd();
    let capture = Capture::begin(Terms { number: 1, socket, missed, interface: 0, snap: u32::MAX }).expect("a capture");
    nic.captures().get_or_insert_default().add(capture);
    batches
}

fn main() {
    let transmit = std::env::args().nth(1).is_some_and(|argument| argument == "transmit");
    let (play, memory) = Play::new(RING.into());
    let arena = memory.arena().clone();
    let options = NicOptions { ring: RING, ..NicOptions::default() };
    let mut nic = E1000e::start(play.bus(), memory, &options).expect("the stub behaves");
    let mut burst = Burst::new();
    let captured = std::env::args().nth(2).is_some_and(|argument| argument == "captured").then(|| capture(&mut nic));
    let mut room = vec![0; 1 << 17];
    let (mut packets, mut took) = (0, Duration::ZERO);
    for round in 0..BURSTS {
        let places = (round * BURST_MAX..(round + 1) * BURST_MAX).map(|i| i % usize::from(RING));
        if transmit {
            burst.extend((0..BURST_MAX).map(|_| Frame { slot: arena.take().expect("a free slot"), len: 60 }));
            let began = Instant::now();
            packets += transmit_and_reclaim(&mut nic, black_box(&mut burst));
            took += began.elapsed();
            places.for_each(|place| play.complete(place));
        } else {
            places.for_each(|place| play.write_back(place, 60));
            let began = Instant::now();
            packets += receive_and_release(&mut nic, black_box(&mut burst));
            took += began.elapsed();
        }
        if let Some(batches) = &captured {
            while rustix::net::recv(batches, &mut room[..], RecvFlags::DONTWAIT).is_ok() {}
        }
    }
    println!("{packets} packets");
    println!("{} ns for each", took.as_nanos() / u128::try_from(packets.max(1)).expect("a count"));
}
