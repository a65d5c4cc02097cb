//! How many instructions the driver of the 82574 needs for a packet: to be run under callgrind, which counts them.
//!
//! ```text
//! cargo build --release -p tasuki-net --example e1000e_instructions
//! valgrind --tool=callgrind --callgrind-out-file=/dev/null --toggle-collect='e1000e_instructions::receive_and_release' \
//!     target/release/examples/e1000e_instructions receive
//! ```
//!
//! `Collected`, by the number of packets that this program prints, is the figure. The same for `transmit`, with
//! `--toggle-collect='e1000e_instructions::transmit_and_reclaim'`. The card is a stub in memory, whose work is not counted.

#[path = "../tests/stub/mod.rs"]
mod stub;

use std::hint::black_box;

use stub::{Play, StubBus};
use tasuki_net::nic::e1000e::E1000e;
use tasuki_net::nic::{Nic, NicOptions};
use tasuki_net::port::{BURST_MAX, Burst, Frame, Port};

const RING: u16 = 256;
const BURSTS: usize = 1000;

/// What is counted: a burst is received, and its slots go back.
#[inline(never)]
fn receive_and_release(nic: &mut E1000e<StubBus>, burst: &mut Burst) -> usize {
    let count = nic.receive(burst).expect("the stub behaves");
    burst.clear();
    count
}

/// What is counted: what was sent comes back, and a burst is sent.
#[inline(never)]
fn transmit_and_reclaim(nic: &mut E1000e<StubBus>, burst: &mut Burst) -> usize {
    nic.transmit(burst).expect("the stub behaves")
}

fn main() {
    let transmit = std::env::args().nth(1).is_some_and(|argument| argument == "transmit");
    let (play, memory) = Play::new(RING.into());
    let arena = memory.arena().clone();
    let options = NicOptions { ring: RING, ..NicOptions::default() };
    let mut nic = E1000e::start(play.bus(), memory, &options).expect("the stub behaves");
    let mut burst = Burst::new();
    let mut packets = 0;
    for round in 0..BURSTS {
        let places = (round * BURST_MAX..(round + 1) * BURST_MAX).map(|i| i % usize::from(RING));
        if transmit {
            burst.extend((0..BURST_MAX).map(|_| Frame { slot: arena.take().expect("a free slot"), len: 60 }));
            packets += transmit_and_reclaim(&mut nic, black_box(&mut burst));
            places.for_each(|place| play.complete(place));
        } else {
            places.for_each(|place| play.write_back(place, 60));
            packets += receive_and_release(&mut nic, black_box(&mut burst));
        }
    }
    println!("{packets} packets");
}
