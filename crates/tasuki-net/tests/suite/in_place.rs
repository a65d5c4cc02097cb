//! A card runs on while its driver is replaced, in turns and under traffic, by a driver with its own bus and mapping
//! of the memory.

use std::os::fd::OwnedFd;
use std::time::Instant;

use tasuki_net::nic::bus::Iova;
use tasuki_net::nic::bus::vfio_user::{TIMEOUT, VfioUser};
use tasuki_net::nic::e1000e::DriverState;
use tasuki_net::nic::{DriverState as _, InPlace, Nic, NicError, NicMemory};
use tasuki_net::port::{Burst, Port};
use tasuki_shm::arena::Geometry;
use tasuki_sim::journal::Class;

use crate::plugged::{self, Card, with_card};
use tasuki_testing::PATIENCE;

const FRAMES: u64 = 200_000;
const RATE: u64 = 1_000_000;

/// Starts a card, and prepares a second driver for it.
fn start(socket: OwnedFd) -> (Card, <Card as InPlace>::Prepared) {
    let memory = NicMemory::create(Geometry { slot_len: 4096, count: 1024 }, 256 << 10, Iova(1 << 32)).unwrap();
    let again = NicMemory::prepare(memory.parts().unwrap(), &memory.layout()).unwrap();
    let nic = plugged::start(socket, memory, true);
    // A twin is possible once the card's BAR is known.
    let next = Card::prepare(VfioUser::from_twin(nic.bus().twin().unwrap(), TIMEOUT).unwrap(), again).unwrap();
    (nic, next)
}

/// Sends frames back until `turns` bursts or `left` frames have come and gone; returns the number of frames.
fn echo(nic: &mut Card, turns: u32, left: u64) -> u64 {
    let began = Instant::now();
    let (mut frames, mut moved) = (0, 0);
    while moved < turns && frames < left {
        assert!(began.elapsed() < PATIENCE, "no more frames come");
        let mut burst = Burst::new();
        frames += nic.receive(&mut burst).unwrap() as u64;
        moved += u32::from(!burst.is_empty());
        while !burst.is_empty() {
            nic.transmit(&mut burst).unwrap();
        }
    }
    frames
}

#[test]
fn drivers_that_take_turns_lose_nothing_and_touch_nothing() {
    let ((), counts, journal) = with_card(RATE, FRAMES, |socket, wire| {
        let (mut nic, mut next) = start(socket);
        let mut driver_state = DriverState::blank();
        wire.begin();
        let (mut frames, mut turns) = (0, 0);
        while frames < FRAMES {
            frames += echo(&mut nic, 50, FRAMES - frames);
            nic.driver_state(&mut driver_state);
            let successor = Card::go_on(next, &driver_state).unwrap();
            let (bus, memory) = std::mem::replace(&mut nic, successor).stand_down();
            next = Card::prepare(bus, memory).unwrap();
            turns += 1;
        }
        assert!(turns > 10, "{turns}");
        wire.await_back(FRAMES);
        nic.park().unwrap();
    });
    let cold: Vec<_> = journal.iter().filter(|entry| Class::COLD.contains(&entry.class)).collect();
    assert!(cold.is_empty(), "{cold:?}");
    assert_eq!((counts.received, counts.duplicated, counts.reordered, counts.damaged), (FRAMES, 0, 0, 0));
}

#[test]
fn a_giver_whose_taker_refuses_goes_on() {
    let ((), counts, _) = with_card(RATE, FRAMES, |socket, wire| {
        let (mut nic, mut next) = start(socket);
        wire.begin();
        let mut driver_state = DriverState::blank();
        let spoilers: [fn(&mut DriverState); 4] = [
            |driver_state| driver_state.head.version += 1,
            |driver_state| driver_state.receive[0].tail += 1,
            |driver_state| {
                let place = |at: u32| at as usize % usize::from(driver_state.head.ring);
                let [one, other] = [0, 1].map(|i| place(driver_state.receive[0].next.wrapping_add(i)));
                driver_state.posted[0][one] = driver_state.posted[0][other];
            },
            |driver_state| driver_state.head.slots += 1,
        ];
        let mut frames = 0;
        for spoil in spoilers.into_iter().cycle() {
            frames += echo(&mut nic, 20, FRAMES - frames);
            if frames >= FRAMES {
                break;
            }
            nic.driver_state(&mut driver_state);
            spoil(&mut driver_state);
            let failed = Card::go_on(next, &driver_state).expect_err("a driver state that cannot be true");
            assert!(
                matches!(failed.error, NicError::BrokenDriverState { .. } | NicError::OtherDriverState { .. }),
                "{failed}"
            );
            let census = failed.memory.arena().census();
            assert_eq!((census.owner, census.peer), (0, 0), "nothing was taken over");
            next = Card::prepare(failed.bus, failed.memory).unwrap();
        }
        wire.await_back(FRAMES);
        nic.park().unwrap();
    });
    assert_eq!((counts.received, counts.duplicated, counts.reordered, counts.damaged), (FRAMES, 0, 0, 0));
}
