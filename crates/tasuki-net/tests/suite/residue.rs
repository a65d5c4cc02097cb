//! A NIC's next owner cannot read the frames that the previous one handled, by whichever method the card is handed
//! over: the test searches all memory that the next owner gets.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use tasuki_net::nic::bus::Iova;
use tasuki_net::nic::bus::vfio_user::{TIMEOUT, VfioUser};
use tasuki_net::nic::{DriverState, How, InPlace, Nic, NicMemory, NicOptions, Parts, Repoint, Scrub};
use tasuki_net::port::{Burst, Port, Transactional};
use tasuki_shm::arena::Geometry;
use tasuki_shm::region::Region;

use crate::plugged::{self, Card, with_card};
use tasuki_testing::PATIENCE;

const RATE: u64 = 200_000;
/// Enough frames that every slot has had several, and that the last lie anywhere in the ring.
const FRAMES: u64 = 7_777;

/// Bytes of each of the source's frames behind its addresses.
const SECRET: [u8; 6] = [0x88, 0xb5, b't', b's', b'k', 1];

fn memory(index: u64) -> NicMemory {
    NicMemory::create(Geometry { slot_len: 4096, count: 640 }, 256 << 10, Iova((1 + index) << 32)).unwrap()
}

/// Returns how often the secret is in frames, rings and ledger.
fn secrets(parts: Parts) -> usize {
    let Parts { rings, frames, ledger } = parts;
    let regions = [rings, frames, ledger].map(|part| Region::adopt(part).unwrap());
    let found = regions.iter().map(|region| {
        let words = region.span::<AtomicU64>(0, region.len() / 8).unwrap();
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.load(Relaxed).to_ne_bytes()).collect();
        bytes.windows(SECRET.len()).filter(|window| **window == SECRET).count()
    });
    found.sum()
}

/// The old owner's treatment of received frames.
#[derive(Clone, Copy, PartialEq)]
enum Inflight {
    /// Send the frame back.
    Deliver,
    /// Drop the frame.
    Drop,
}

/// Handles frames until `count` have come, or `done` returns true after a look that found none. Returns how many
/// came. A frame's head is saved, then changed.
fn handle(nic: &mut Card, inflight: Inflight, count: u64, mut done: impl FnMut(&mut Card) -> bool) -> u64 {
    let began = Instant::now();
    let mut frames = 0;
    while frames < count {
        assert!(began.elapsed() < PATIENCE, "only {frames} frames came");
        let mut burst = Burst::new();
        frames += nic.receive(&mut burst).unwrap() as u64;
        if burst.is_empty() && done(nic) {
            break;
        }
        burst.iter().for_each(|frame| nic.save(frame));
        while inflight == Inflight::Deliver && !burst.is_empty() {
            nic.transmit(&mut burst).unwrap();
        }
    }
    frames
}

/// Hands the memory on with its card (keep); returns how many secrets the new owner could read before it has
/// received anything.
fn keep(inflight: Inflight, scrub: bool) -> usize {
    let (found, ..) = with_card(RATE, FRAMES, |socket, wire| {
        let giver = memory(0);
        let parts = || giver.parts().unwrap();
        let (theirs, layout) = (parts(), giver.layout());
        let again = parts();
        let mut nic = plugged::start_with(socket, giver, NicOptions { scrub, ..NicOptions::default() });
        let bus = VfioUser::from_twin(nic.bus().twin().unwrap(), TIMEOUT).unwrap();
        let next = Card::prepare(bus, NicMemory::prepare(again, &layout).unwrap()).unwrap();
        wire.begin();
        let mut came = handle(&mut nic, inflight, FRAMES - 100, |_| false);
        if scrub {
            nic.wipe_free();
        }
        // Frames that come between the two wipes, and are in rings or on their way out.
        came += handle(&mut nic, inflight, FRAMES - came, |_| false);
        assert_eq!(came, FRAMES);
        let began = Instant::now();
        while scrub && !nic.wipe_rest() {
            assert!(began.elapsed() < PATIENCE, "frames leave");
        }
        let mut driver_state = <Card as Nic>::DriverState::blank();
        nic.driver_state(&mut driver_state);
        let found = secrets(theirs);
        let mut taker = Card::go_on(next, &driver_state).unwrap();
        drop(nic.stand_down());
        taker.keep_clean();
        assert_eq!(taker.receive(&mut Burst::new()).unwrap(), 0, "all had been received");
        taker.park().unwrap();
        found
    });
    found
}

#[test]
fn without_wiping_secrets_are_found() {
    assert!(keep(Inflight::Deliver, false) > 100, "the search finds what is there");
}

#[test]
fn memory_that_is_kept_has_nothing_of_frames_that_were_delivered() {
    assert_eq!(keep(Inflight::Deliver, true), 0);
}

#[test]
fn memory_that_is_kept_has_nothing_of_frames_that_were_dropped() {
    assert_eq!(keep(Inflight::Drop, true), 0);
}

/// Points the card at another owner's memory, under traffic; returns how many secrets of frames that the giver
/// handled are there.
fn repoint(inflight: Inflight) -> usize {
    let (found, ..) = with_card(RATE, FRAMES, |socket, wire| {
        let mut nic = plugged::start(socket, memory(0), true);
        let taker = memory(1);
        let theirs = taker.parts().unwrap();
        let bus = VfioUser::from_twin(nic.bus().twin().unwrap(), TIMEOUT).unwrap();
        let next = Card::prepare_rings(bus, taker, &NicOptions::default(), How::Point, Iova(1 << 32)).unwrap();
        wire.begin();
        let mut came = handle(&mut nic, inflight, FRAMES / 2, |_| false);
        nic.quiesce(How::Point, |_| ());
        loop {
            came += handle(&mut nic, inflight, u64::MAX, Card::is_quiet);
            if nic.leave().unwrap() {
                break;
            }
        }
        assert!(came < FRAMES, "there is traffic");
        let found = secrets(theirs);
        let mut taker = Card::repoint(next, nic.left()).unwrap();
        drop(nic.stand_down());
        came += handle(&mut taker, inflight, FRAMES - came, |_| false);
        assert_eq!(came, FRAMES, "each came to one of the two");
        taker.park().unwrap();
        found
    });
    found
}

#[test]
fn memory_that_a_card_is_pointed_at_has_nothing_of_frames_that_were_delivered() {
    assert_eq!(repoint(Inflight::Deliver), 0);
}

#[test]
fn memory_that_a_card_is_pointed_at_has_nothing_of_frames_that_were_dropped() {
    assert_eq!(repoint(Inflight::Drop), 0);
}
