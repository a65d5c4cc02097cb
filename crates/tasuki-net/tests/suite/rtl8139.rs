//! The driver of the RTL8139C+ on QEMU's model: what is particular to this card. The conformance suite has the tests
//! for every card.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use tasuki_net::nic::bus::{Bus, BusError, IntX, Iova, Part, Registers};
use tasuki_net::nic::rtl8139::{Rtl8139, driver_state::DriverState};
use tasuki_net::nic::{Failed, Link, Mac, Nic, NicError, NicMemory, NicOptions};
use tasuki_net::port::{Armed, Burst, Frame, Port};
use tasuki_shm::arena::{Arena, Geometry};
use zerocopy::{FromBytes, IntoBytes};

use crate::conformance::cases::Words;
use crate::conformance::frames::receive;
use crate::qemu::{MEMORY_AT, Machine, QtestBus, regions};
use crate::wait::readable;
use tasuki_testing::PATIENCE;

type Card = Rtl8139<QtestBus>;

const MAC: [u8; 6] = [0x52, 0x54, 0, 0x12, 0x34, 0x57];
/// An address that no card here has.
const OTHER: [u8; 6] = [0x52, 0x54, 0, 0x12, 0x34, 0x99];

fn options() -> NicOptions {
    NicOptions { ring: 8, ..NicOptions::default() }
}

fn memory() -> NicMemory {
    NicMemory::create(Geometry { slot_len: 4096, count: 64 }, 4096, MEMORY_AT).expect("a little memory")
}

/// Starts a card; returns it with the arena for its frames.
fn start(options: &NicOptions) -> Option<(Machine, Card, Arena)> {
    let memory = memory();
    let arena = memory.arena().clone();
    let machine = Machine::start("rtl8139", "mac=52:54:00:12:34:57", &regions(&memory))?;
    let card = Card::start(machine.bus(), memory, options).expect("QEMU's card starts");
    Some((machine, card, arena))
}

/// Returns a frame for `to`, distinguished by `number`.
fn frame(to: [u8; 6], number: u32, len: usize) -> Vec<u8> {
    let mut frame = [&to[..], &[2, 0, 0, 0, 0, 9], &[0x88, 0xb5], &number.to_be_bytes()].concat();
    frame.extend((frame.len()..len).map(|i| u8::try_from(i % 251).expect("below 251") ^ number.to_le_bytes()[0]));
    frame
}

/// Waits until the card's own counters show `count` received frames since its reset.
fn until_come(card: &mut Card, count: u64) {
    let deadline = Instant::now() + PATIENCE;
    while statistic(card, "rx_ok") < count {
        assert!(Instant::now() < deadline, "the card's own counters say that {count} frames came");
    }
}

fn statistic(card: &mut Card, name: &str) -> u64 {
    let all = card.statistics();
    all.iter().find(|(known, _)| *known == name).unwrap_or_else(|| panic!("no {name} in {all:?}")).1
}

fn outgoing(arena: &Arena, bytes: &[u8]) -> Frame {
    let mut slot = arena.take().expect("a slot is free");
    slot.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
    Frame { slot, len: bytes.len().try_into().expect("a frame") }
}

#[test]
fn frames_pass_both_ways_round_and_round_the_rings() {
    let Some((machine, mut card, arena)) = start(&options()) else { return };
    assert_eq!(card.mac(), Mac(MAC));
    assert_eq!(card.link().expect("it is there"), Link::Up { speed: 100, full_duplex: true });
    for round in 0..10 {
        let frames: Vec<_> = (0..5).map(|i| frame(MAC, 5 * round + i, 60 + 280 * i as usize)).collect();
        frames.iter().for_each(|frame| machine.wire().send_frame(frame));
        assert_eq!(receive(&mut card, frames.len()), frames);
        let mut burst: Burst = frames.iter().map(|frame| outgoing(&arena, frame)).collect();
        assert_eq!(card.transmit(&mut burst).expect("the card works"), frames.len());
        for frame in &frames {
            assert_eq!(machine.wire().receive_frame(PATIENCE).as_ref(), Some(frame));
        }
    }
    assert_eq!(card.arm().expect("the card works"), Armed::Idle);
    for (name, count) in [("rx_packets", 50), ("rx_ok", 50), ("rx_ok_phys", 50), ("tx_packets", 50), ("tx_ok", 50)] {
        assert_eq!(statistic(&mut card, name), count, "{name}");
    }
}

/// The pin rings for the first frame and is masked then: each driver must unmask it before it sleeps, the successor
/// too.
#[test]
fn each_frame_wakes_who_sleeps_for_it_whoever_drives_the_card() {
    let Some((machine, mut card, _arena)) = start(&options()) else { return };
    for round in 0..20 {
        assert_eq!(card.arm().expect("the card works"), Armed::Idle, "nothing has come");
        assert!(!readable(&card.fd(), Duration::ZERO), "and nothing rings");
        let frames = [frame(MAC, 2 * round, 60), frame(MAC, 2 * round + 1, 60)];
        frames.iter().for_each(|frame| machine.wire().send_frame(frame));
        assert!(readable(&card.fd(), PATIENCE), "frames have come");
        // In some rounds the card is parked as it wakes the driver, in others while nothing is asserted.
        if round % 3 == 0 {
            until_come(&mut card, 2 * u64::from(round) + 2);
            let (bus, memory, driver_state) = card.park().expect("the card parks");
            card = Card::resume(bus, memory, &driver_state).expect("the card goes on");
            assert_eq!(card.arm().expect("the card works"), Armed::Busy, "they are there");
        }
        assert_eq!(receive(&mut card, 2), frames);
        if round % 3 == 1 {
            let (bus, memory, driver_state) = card.park().expect("the card parks");
            card = Card::resume(bus, memory, &driver_state).expect("the card goes on");
        }
    }
}

/// A bus without the card's interrupt pin, as where the kernel cannot share the pin with another device.
struct Pinless(QtestBus);

impl Bus for Pinless {
    type Registers = <QtestBus as Bus>::Registers;

    fn read_config(&mut self, offset: u16) -> Result<u32, BusError> {
        self.0.read_config(offset)
    }
    fn write_config(&mut self, offset: u16, value: u32) -> Result<(), BusError> {
        self.0.write_config(offset, value)
    }
    fn registers(&mut self, index: u8) -> Result<Self::Registers, BusError> {
        self.0.registers(index)
    }
    fn map_part(&mut self, part: Part<'_>) -> Result<(), BusError> {
        self.0.map_part(part)
    }
    fn unmap_dma(&mut self, at: Iova, len: usize) -> Result<(), BusError> {
        self.0.unmap_dma(at, len)
    }
    fn interrupts(&mut self, count: u16) -> Result<Vec<OwnedFd>, BusError> {
        self.0.interrupts(count)
    }
    fn intx(&mut self) -> Result<IntX, BusError> {
        Err(BusError::NoIntX { why: "the kernel refuses it (Device or resource busy)".to_owned() })
    }
    fn reset(&mut self) -> Result<(), BusError> {
        self.0.reset()
    }
}

#[test]
fn a_card_whose_pin_does_not_reach_us_is_polled() {
    let memory = memory();
    let Some(machine) = Machine::start("rtl8139", "mac=52:54:00:12:34:57", &regions(&memory)) else { return };
    let mut card = Rtl8139::start(Pinless(machine.bus()), memory, &options()).expect("QEMU's card starts");
    for number in 0..3 {
        assert_eq!(card.arm().expect("the card works"), Armed::Busy, "nothing would wake us");
        let sent = frame(MAC, number, 60);
        machine.wire().send_frame(&sent);
        assert_eq!(receive(&mut card, 1), [sent]);
        let (bus, memory, driver_state) = card.park().expect("the card parks");
        card = Rtl8139::resume(bus, memory, &driver_state).expect("the card goes on");
    }
}

/// The card forgets its position in the rings when it is switched on again; wherever it was, no frame may be lost or
/// doubled.
#[test]
fn a_resumed_card_goes_on_wherever_it_stood_in_its_rings() {
    let Some((machine, mut card, arena)) = start(&options()) else { return };
    let mut number = 0;
    let mut next = || {
        number += 1;
        frame(MAC, number, 60 + number as usize)
    };
    let mut come = 0;
    for (before, waiting) in [(0, 0), (3, 0), (0, 4), (1, 7), (5, 3), (7, 2), (0, 6), (2, 5)] {
        let earlier: Vec<_> = (0..before).map(|_| next()).collect();
        earlier.iter().for_each(|frame| machine.wire().send_frame(frame));
        assert_eq!(receive(&mut card, before), earlier);
        let frames: Vec<_> = (0..waiting).map(|_| next()).collect();
        frames.iter().for_each(|frame| machine.wire().send_frame(frame));
        come += before as u64 + waiting as u64;
        until_come(&mut card, come);
        let (bus, memory, driver_state) = card.park().expect("the card parks");
        let driver_state =
            DriverState::read_from_bytes(driver_state.as_bytes()).expect("a driver state is plain bytes");
        card = Card::resume(bus, memory, &driver_state).expect("the card goes on");
        let after = next();
        machine.wire().send_frame(&after);
        come += 1;
        let expected: Vec<_> = frames.into_iter().chain([after.clone()]).collect();
        assert_eq!(receive(&mut card, expected.len()), expected, "{before} frames before, {waiting} waiting");
        let mut burst = Burst::from_iter([outgoing(&arena, &after)]);
        assert_eq!(card.transmit(&mut burst).expect("the card works"), 1);
        assert_eq!(machine.wire().receive_frame(PATIENCE), Some(after));
    }
    assert_eq!(arena.census().peer, 8 + 1, "a full receive ring, and the last frame sent");
    assert_eq!(statistic(&mut card, "rx_packets"), come);
}

#[test]
fn frames_that_were_not_sent_are_sent_by_the_successor() {
    let Some((machine, mut card, arena)) = start(&options()) else { return };
    // Switch the transmitter off behind the driver's back, as if its partner held it up by PAUSE.
    let registers = machine.bus().registers(1).expect("BAR 1");
    registers.write8(0x37, 1 << 3);
    let frames: Vec<_> = (0..5).map(|i| frame(OTHER, i, 100)).collect();
    let mut burst: Burst = frames.iter().map(|frame| outgoing(&arena, frame)).collect();
    assert_eq!(card.transmit(&mut burst).expect("the card works"), 5);
    let (bus, memory, driver_state) = card.park().expect("the card parks");
    assert_eq!(driver_state.unsent, 5);
    assert_eq!(machine.wire().receive_frame(Duration::ZERO), None);
    let _card = Card::resume(bus, memory, &driver_state).expect("the card goes on");
    for frame in frames {
        assert_eq!(machine.wire().receive_frame(PATIENCE), Some(frame));
    }
}

#[test]
fn a_parked_card_touches_no_memory() {
    // A ring with room for all frames that the wire can hold.
    let Some((machine, card, arena)) = start(&NicOptions { ring: 32, ..options() }) else { return };
    let (bus, memory, driver_state) = card.park().expect("the card parks");
    let words = Words::of(&memory);
    let all = || words.all().map(|word| word.load(Relaxed)).collect::<Vec<_>>();
    let before = all();
    // More than fit into the wire's socket, so QEMU has taken some of them.
    for i in 0..1000 {
        machine.wire().send_frame(&frame(MAC, i, 60));
    }
    assert!(all() == before, "its memory has changed");
    assert_eq!(arena.census().peer, 32);
    // The frames that came meanwhile are lost, later ones are not.
    let mut card = Card::resume(bus, memory, &driver_state).expect("the card goes on");
    let last = frame(MAC, 99, 60);
    machine.wire().send_frame(&last);
    while receive(&mut card, 1).last() != Some(&last) {}
}

#[test]
fn a_card_that_is_gone_is_noticed() {
    let Some((mut machine, mut card, _arena)) = start(&options()) else { return };
    machine.end();
    assert!(matches!(card.arm(), Err(NicError::Gone)));
    assert!(matches!(card.link(), Err(NicError::Gone)));
    assert!(matches!(card.park(), Err(Failed { error: NicError::Gone, .. })));
}

#[test]
fn what_the_card_cannot_do_is_refused_by_name() {
    let memory = memory();
    let Some(machine) = Machine::start("rtl8139", "", &regions(&memory)) else { return };
    for (options, field) in [
        (NicOptions { ring: 128, ..options() }, "ring"),
        (NicOptions { ring: 7, ..options() }, "ring"),
        (NicOptions { queues: 2, ..options() }, "queues"),
        (NicOptions { mtu: 1501, ..options() }, "mtu"),
    ] {
        let error = Card::start(machine.bus(), self::memory(), &options).expect_err(field);
        assert!(matches!(error.error, NicError::Options { field: named, .. } if named == field), "{error}");
    }
    let few = NicMemory::create(Geometry { slot_len: 4096, count: 7 }, 4096, MEMORY_AT).expect("memory");
    let error = Card::start(machine.bus(), few, &options()).expect_err("eight slots for a ring of eight");
    assert!(matches!(error.error, NicError::Memory { need: 0x8000, have: 0x7000, .. }), "{error}");
    let elsewhere = NicMemory::create(Geometry { slot_len: 4096, count: 64 }, 4096, Iova(1 << 33)).expect("memory");
    assert!(matches!(Card::start(machine.bus(), elsewhere, &options()), Err(Failed { error: NicError::Bus(_), .. })));
}
