//! The driver of virtio network devices on QEMU's model: what is particular to this device. The conformance suite
//! has the tests for every card.

use std::time::Instant;

use tasuki_net::nic::bus::{Bus, Registers};
use tasuki_net::nic::virtio_net::{VirtioNet, driver_state::DriverState};
use tasuki_net::nic::{Link, Nic, NicError, NicMemory, NicOptions};
use tasuki_net::port::{Burst, Frame, Port};
use tasuki_shm::arena::{Arena, Geometry};
use zerocopy::{FromBytes, IntoBytes};

use crate::conformance::frames::receive;
use crate::qemu::{MEMORY_AT, Machine, QtestBus, regions};
use tasuki_testing::PATIENCE;

type Card = VirtioNet<QtestBus>;

const MAC: [u8; 6] = [0x52, 0x54, 0, 0x12, 0x34, 0x57];
/// Property that turns the reset of single queues off.
const KEPT: &str = "queue_reset=off";

fn options() -> NicOptions {
    NicOptions { ring: 16, ..NicOptions::default() }
}

/// Starts a card; returns it with the arena for its frames.
fn start(properties: &str) -> Option<(Machine, Card, Arena)> {
    let memory = NicMemory::create(Geometry { slot_len: 4096, count: 64 }, 8192, MEMORY_AT).expect("a little memory");
    let arena = memory.arena().clone();
    let comma = if properties.is_empty() { "" } else { "," };
    let properties = format!("mac=52:54:00:12:34:57,disable-legacy=on{comma}{properties}");
    let machine = Machine::start("virtio-net-pci", &properties, &regions(&memory))?;
    let card = Card::start(machine.bus(), memory, &options()).expect("QEMU's card starts");
    Some((machine, card, arena))
}

fn frame(number: u8) -> Vec<u8> {
    [&MAC[..], &[2, 0, 0, 0, 0, 9], &[0x88, 0xb5], &[number; 50]].concat()
}

/// A device marked as one that cannot be stopped goes on while parked: the successor finds its frames in the slots.
#[test]
fn a_kept_device_goes_on_while_it_is_parked_and_its_successor_finds_what_came() {
    let Some((machine, card, arena)) = start(KEPT) else { return };
    let (bus, memory, driver_state) = card.park().expect("the card parks");
    assert!(driver_state.is_kept());
    let frames: Vec<_> = (0..5).map(frame).collect();
    frames.iter().for_each(|frame| machine.wire().send_frame(frame));
    // The device's index in the used ring of the receive queue, behind 16 descriptors and the available ring.
    let used = memory.rings().span::<std::sync::atomic::AtomicU32>(320, 1).expect("a word");
    let deadline = Instant::now() + PATIENCE;
    while used[0].load(std::sync::atomic::Ordering::Acquire) >> 16 != 5 {
        assert!(Instant::now() < deadline, "the device goes on");
    }
    let driver_state = DriverState::read_from_bytes(driver_state.as_bytes()).expect("a driver state is plain bytes");
    let mut card = Card::resume(bus, memory, &driver_state).expect("the card goes on");
    assert_eq!(receive(&mut card, 5), frames);
    // The next call commits the received frames.
    assert_eq!(card.receive(&mut Burst::new()).expect("the card works"), 0);
    assert_eq!(arena.census().peer, 8);
}

#[test]
fn frames_that_had_come_are_the_successors_first_again_and_again() {
    let Some((machine, mut card, arena)) = start("") else { return };
    let frames: Vec<_> = (0..20).map(frame).collect();
    // Six frames are always in the rings, which have room for eight.
    frames[..6].iter().for_each(|frame| machine.wire().send_frame(frame));
    for (round, next) in frames[6..].iter().enumerate() {
        let (bus, memory, driver_state) = card.park().expect("the card parks");
        assert!(!driver_state.is_kept() && driver_state.come <= 6 && driver_state.come + driver_state.empty >= 7);
        let driver_state =
            DriverState::read_from_bytes(driver_state.as_bytes()).expect("a driver state is plain bytes");
        card = Card::resume(bus, memory, &driver_state).expect("the card goes on");
        machine.wire().send_frame(next);
        let mut burst = Burst::new();
        // Leave room for one frame in the burst.
        (0..burst.capacity() - 1).for_each(|_| burst.push(Frame { slot: arena.take().expect("a slot"), len: 0 }));
        let deadline = Instant::now() + PATIENCE;
        while card.receive(&mut burst).expect("the card works") == 0 {
            assert!(Instant::now() < deadline, "a frame is there");
        }
        assert_eq!(burst[burst.len() - 1].bytes(), frames[round], "the oldest");
    }
    assert_eq!(receive(&mut card, 6), frames[14..]);
    assert_eq!(card.receive(&mut Burst::new()).expect("the card works"), 0);
    assert_eq!(arena.census().peer, 8);
}

#[test]
fn a_device_that_was_reset_meanwhile_is_noticed() {
    for properties in ["", KEPT] {
        let Some((machine, card, _arena)) = start(properties) else { return };
        let (bus, memory, driver_state) = card.park().expect("the card parks");
        // The device status, in the common configuration, which QEMU has at the start of BAR 4.
        let registers = machine.bus().registers(4).expect("BAR 4");
        assert_eq!(registers.read8(0x14), 0xf);
        registers.write8(0x14, 0);
        let error = Card::resume(bus, memory, &driver_state).expect_err("nothing is as it was");
        assert!(matches!(error.error, NicError::BrokenDriverState { value: 0, .. }), "{error}");
    }
}

#[test]
fn the_link_says_its_speed_where_the_device_does() {
    let Some((_machine, mut card, _arena)) = start("speed=2500,duplex=half") else { return };
    assert_eq!(card.link().expect("it is there"), Link::Up { speed: 2500, full_duplex: false });
    let Some((_machine, mut card, _arena)) = start("") else { return };
    assert_eq!(card.link().expect("it is there"), Link::Up { speed: 0, full_duplex: true });
}

#[test]
fn a_mtu_that_the_devices_network_does_not_take_is_refused() {
    let memory =
        || NicMemory::create(Geometry { slot_len: 4096, count: 64 }, 8192, MEMORY_AT).expect("a little memory");
    let first = memory();
    let Some(machine) = Machine::start("virtio-net-pci", "disable-legacy=on,host_mtu=1400", &regions(&first)) else {
        return;
    };
    let error = Card::start(machine.bus(), memory(), &options()).expect_err("1,500 of 1,400");
    assert!(matches!(error.error, NicError::Options { field: "mtu", value: 1500, .. }), "{error}");
    Card::start(machine.bus(), first, &NicOptions { mtu: 1400, ..options() }).expect("1,400 of 1,400");
}
