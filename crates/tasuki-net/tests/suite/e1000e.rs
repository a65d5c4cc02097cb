//! The 82574's driver with a card that answers badly, and the peculiarities of this card.

use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::time::Duration;

use tasuki_net::nic::bus::{Bus, Iova, Registers};
use tasuki_net::nic::e1000e::{DriverState, E1000e};
use tasuki_net::nic::{Failed, Filter, How, Link, Nic, NicError, NicMemory, NicOptions, PciId, Repoint};
use tasuki_net::port::{Armed, BURST_MAX, Burst, Frame, Port};
use tasuki_shm::arena::Geometry;

use crate::qemu::{self, Machine, QtestBus, regions};
use crate::stub::bus::Stub;
use crate::stub::e1000e::{Card, MEMORY_AT, Play, RDH, RDT, StubBus, TDT, XOFFTXC};
use tasuki_testing::PATIENCE;

const RING: usize = 8;

fn options() -> NicOptions {
    NicOptions { ring: 8, ..NicOptions::default() }
}

fn start() -> (Play, E1000e<StubBus>) {
    let (play, memory) = Play::new(RING);
    let nic = E1000e::start(play.bus(), memory, &options()).expect("a well-behaved card");
    assert!(play.receives());
    (play, nic)
}

/// Returns the driver's result for a second word that the card wrote into the first descriptor.
fn answer_to(word: u64) -> Result<usize, NicError> {
    let (play, mut nic) = start();
    play.write_back_word(0, word);
    nic.receive(&mut Burst::new())
}

#[test]
fn descriptors_are_posted_with_slots_of_the_arena() {
    let (play, mut nic) = start();
    assert_eq!(play.card.get(RDT), 7, "all but one");
    let addresses: Vec<_> = (0..7).map(|place| play.received(place)[0].load(Relaxed)).collect();
    let arena = MEMORY_AT.0 + (64 << 10);
    assert!(addresses.iter().all(|at| at.is_multiple_of(4096) && *at >= arena), "{addresses:x?}");
    (0..7).for_each(|place| play.write_back(place, 60));
    let mut burst = Burst::new();
    assert_eq!(nic.receive(&mut burst).expect("seven good frames"), 7);
    for _ in 0..3 {
        assert_eq!(nic.receive(&mut burst).expect("nothing more"), 0);
        assert_eq!(play.card.get(RDT), 7, "what is in hand is not handled");
    }
    burst.clear();
    assert_eq!(nic.receive(&mut burst).expect("nothing more"), 0);
    assert_eq!(play.card.get(RDT), 6, "seven further, in one write");
}

#[test]
fn absurd_lengths_are_faults() {
    let done = |len: u64| len << 32 | 0b11;
    assert!(matches!(answer_to(done(2048)), Ok(0)), "too long for the MTU, but not for the buffer: dropped");
    for len in [0, 1, 13, 2049, 0xffff] {
        let error = answer_to(done(len)).expect_err("no such frame");
        assert!(matches!(error, NicError::Absurd { .. }), "{len}: {error}");
    }
    assert!(matches!(answer_to(done(14)), Ok(1)), "a header alone is a frame");
    assert!(matches!(answer_to(u64::MAX), Err(NicError::Absurd { .. })), "all ones");
}

#[test]
fn a_fault_is_said_after_the_frames_before_it_and_again() {
    let (play, mut nic) = start();
    play.write_back(0, 60);
    play.write_back(1, 9999);
    let mut burst = Burst::new();
    assert_eq!(nic.receive(&mut burst).expect("one good frame"), 1);
    for _ in 0..2 {
        assert!(matches!(nic.receive(&mut burst), Err(NicError::Absurd { .. })));
    }
    assert_eq!(burst.len(), 1);
}

#[test]
fn frames_with_errors_or_of_several_buffers_are_dropped_and_counted() {
    let (play, mut nic) = start();
    for (place, word) in [
        // A CRC error; three buffers of one frame; a good one.
        60 << 32 | 1 << 24 | 0b11,
        2048 << 32 | 0b01,
        2048 << 32 | 0b01,
        5 << 32 | 0b11,
        60 << 32 | 0b11,
    ]
    .into_iter()
    .enumerate()
    {
        play.write_back_word(place, word);
    }
    let mut burst = Burst::new();
    assert_eq!(nic.receive(&mut burst).expect("the card may do that"), 1);
    let count = |name| nic.statistics().into_iter().find(|(known, _)| *known == name).map(|(_, count)| count);
    let mut count = count;
    assert_eq!((count("rx_errors"), count("rx_length_errors")), (Some(2), Some(1)));
}

#[test]
fn a_descriptor_that_was_not_posted_is_not_believed() {
    let (play, mut nic) = start();
    // The eighth descriptor belongs to us. They are in order, so it would be next.
    (0..8).for_each(|place| play.write_back(place, 60));
    let mut burst = Burst::new();
    assert_eq!(nic.receive(&mut burst).expect("the frames before are whole"), 7);
    burst.clear();
    for _ in 0..3 {
        assert_eq!(nic.receive(&mut burst).expect("nothing has come since it was posted"), 0);
    }
    play.write_back(7, 60);
    assert_eq!(nic.receive(&mut burst).expect("now it has"), 1);
}

#[test]
fn a_descriptor_that_is_written_back_twice_is_believed_once() {
    let (play, mut nic) = start();
    play.write_back(0, 60);
    let mut burst = Burst::new();
    assert_eq!(nic.receive(&mut burst).expect("one good frame"), 1);
    // The descriptor is ours since, and is posted again after the next.
    for _ in 0..3 {
        play.write_back(0, 60);
        assert_eq!(nic.receive(&mut burst).expect("nothing more"), 0);
    }
    burst.clear();
    (1..7).for_each(|place| play.write_back(place, 60));
    assert_eq!(nic.receive(&mut burst).expect("six good frames"), 6);
    burst.clear();
    for _ in 0..3 {
        assert_eq!(nic.receive(&mut burst).expect("the first was posted anew"), 0);
    }
}

#[test]
fn what_was_received_stays_as_it_was_while_it_is_held() {
    let (play, mut nic) = start();
    let mut held = Vec::new();
    // If no slot came back, this would need twice as many as there are.
    for round in 0..40_usize {
        (0..2).for_each(|i| play.write_back((round * 2 + i) % RING, 60));
        let mut burst = Burst::new();
        let count = nic.receive(&mut burst).expect("good frames");
        held.extend(burst);
        if count < 2 {
            break;
        }
    }
    let mut slots: Vec<_> = held.iter().map(|frame| frame.slot.id().index).collect();
    slots.sort_unstable();
    slots.dedup();
    assert_eq!(slots.len(), held.len(), "each frame has a slot of its own");
    // Returned slots are posted again.
    drop(held);
    for _ in 0..2 {
        nic.receive(&mut Burst::new()).expect("nothing is wrong");
    }
    assert_eq!((play.card.get(RDT) as usize + 1) % RING, (slots.len()) % RING, "all but one are posted");
}

fn fill(arena: &tasuki_shm::arena::Arena, burst: &mut Burst, count: usize) {
    (0..count).for_each(|_| burst.push(Frame { slot: arena.take().expect("a slot"), len: 60 }));
}

#[test]
fn slots_of_sent_frames_come_back_once_and_in_order() {
    let (play, memory) = Play::new(RING);
    let arena = memory.arena().clone();
    let mut nic = E1000e::start(play.bus(), memory, &options()).expect("a well-behaved card");
    let before = arena.census();
    let mut burst = Burst::new();
    fill(&arena, &mut burst, 10);
    assert_eq!(nic.transmit(&mut burst).expect("room for seven"), 7);
    assert_eq!((burst.len(), play.card.get(TDT)), (3, 7));
    let word = play.sent(0)[1].load(Acquire);
    assert_eq!(word & 0xffff, 60);
    assert_eq!(word >> 24 & 0xff, 0b1011, "end of packet, check sequence, report");
    // Out of order: the second is done, the first is not. Nothing comes back.
    play.complete(1);
    assert_eq!(nic.transmit(&mut burst).expect("no room"), 0);
    play.complete(0);
    assert_eq!(nic.transmit(&mut burst).expect("room for two"), 2);
    (2..8).chain(0..2).for_each(|place| play.complete(place));
    assert_eq!(nic.transmit(&mut burst).expect("room"), 1);
    play.complete(1);
    nic.transmit(&mut burst).expect("nothing to send");
    assert_eq!(arena.census(), before, "all slots are free again");
}

/// The data sheet's 10.2.2.1: no access for 1 µs after CTRL.RST.
#[test]
fn a_card_is_left_alone_while_it_resets() {
    let (play, _nic) = start();
    assert!(!play.card.was_hurried());
}

/// The data sheet's 10.2.6.1: MULR (28) and the default of RRTHRESH (30:29).
#[test]
fn the_card_may_read_several_frames_at_once() {
    let (play, nic) = start();
    let requests = || play.card.get(TCTL) >> 28;
    assert_eq!(requests(), 0b011);
    let (bus, memory, driver_state) = nic.park().expect("the card stops");
    assert_eq!(requests(), 0b011, "it may not change while there are frames to send");
    let _nic = E1000e::resume(bus, memory, &driver_state).expect("another goes on");
    assert_eq!(requests(), 0b011);
}

#[test]
fn a_short_frame_goes_out_with_zeros() {
    let (play, memory) = Play::new(RING);
    let arena = memory.arena().clone();
    let mut nic = E1000e::start(play.bus(), memory, &options()).expect("a well-behaved card");
    let mut burst = Burst::new();
    let mut sent = Vec::new();
    for len in [13, 14, 59, 61] {
        let mut slot = arena.take().expect("a slot");
        slot.bytes_mut()[..80].fill(0xa5);
        sent.push((usize::from(len), slot.id().index));
        burst.push(Frame { slot, len });
    }
    assert_eq!(nic.transmit(&mut burst).expect("room"), 4);
    assert_eq!(play.card.get(TDT), 3, "13 bytes are no frame");
    let lens = [0, 1, 2].map(|place| play.sent(place)[1].load(Acquire) & 0xffff);
    assert_eq!(lens, [60, 60, 61], "the maker's driver sends none of less than 17 bytes");
    (0..3).for_each(|place| play.complete(place));
    nic.transmit(&mut burst).expect("nothing to send");
    let free: Vec<_> = std::iter::from_fn(|| arena.take()).collect();
    for (len, index) in &sent[1..] {
        let slot = free.iter().find(|slot| slot.id().index == *index).expect("it is free again");
        let end = 60.max(*len);
        assert!(slot.bytes()[..*len].iter().all(|byte| *byte == 0xa5), "{len}: the frame is whole");
        assert!(slot.bytes()[*len..end].iter().all(|byte| *byte == 0), "{len}: nothing of an older frame leaves");
        assert!(slot.bytes()[end..80].iter().all(|byte| *byte == 0xa5), "{len}: no more is written");
    }
}

#[test]
fn a_card_that_goes_is_noticed() {
    let (play, mut nic) = start();
    assert_eq!(nic.arm().expect("the card is there"), Armed::Idle);
    play.card.pull();
    assert!(matches!(nic.arm(), Err(NicError::Gone)));
    assert!(matches!(nic.link(), Err(NicError::Gone)), "a driver that polls arms no card");
    assert!(matches!(nic.set_filter(&Filter::default()), Err(NicError::Gone)));
    assert!(nic.statistics().iter().all(|(_, count)| *count == 0), "ones are not counts");
    assert!(matches!(nic.park(), Err(Failed { error: NicError::Gone, .. })));
    let (play, memory) = Play::new(RING);
    play.card.pull();
    assert!(matches!(E1000e::start(play.bus(), memory, &options()), Err(Failed { error: NicError::Gone, .. })));
}

#[test]
fn a_card_may_count_what_it_likes() {
    let (play, mut nic) = start();
    // All ones at each reading: bytes received, errors of two kinds, both of lengths.
    [0x4088, 0x408c, 0x40ac, 0x40a4, 0x4000, 0x4004].into_iter().for_each(|offset| play.card.set(offset, u32::MAX));
    let count = |nic: &mut E1000e<StubBus>, name| {
        nic.statistics().into_iter().find(|(known, _)| *known == name).map(|(_, count)| count)
    };
    assert_eq!(count(&mut nic, "rx_bytes"), Some(u64::MAX));
    assert_eq!(count(&mut nic, "rx_bytes"), Some(u64::MAX), "more than all does not begin anew");
    let errors = count(&mut nic, "rx_errors");
    assert!(errors > count(&mut nic, "rx_length_errors").map(|count| count / 2), "{errors:?}");
    // The driver also hands on its counts.
    let (bus, memory, driver_state) = nic.park().expect("the card stops");
    let mut nic = E1000e::resume(bus, memory, &driver_state).expect("another goes on");
    assert_eq!(count(&mut nic, "rx_bytes"), Some(u64::MAX));
}

#[test]
fn a_card_that_does_not_do_what_it_must_is_stuck_or_absurd() {
    // Never done with its reset; no address; a group's address.
    let (play, memory) = Play::new(RING);
    play.card.stick(0, 1 << 26);
    assert!(matches!(
        E1000e::start(play.bus(), memory, &options()),
        Err(Failed { error: NicError::Stuck { step: "its reset", .. }, .. })
    ));
    for (low, high) in [(0, 0x8000_0000), (0x1200_5452, 0x5734), (0x1200_5453, 0x8000_5734)] {
        let (play, memory) = Play::new(RING);
        play.card.set(0x5400, low);
        play.card.set(0x5404, high);
        assert!(matches!(
            E1000e::start(play.bus(), memory, &options()),
            Err(Failed { error: NicError::Absurd { .. }, .. })
        ));
    }
}

#[test]
fn another_card_is_refused_by_name() {
    let (_, memory) = Play::new(RING);
    let bus = Stub(Card::new(PciId { vendor: 0x8086, device: 0x1533 }));
    let error = E1000e::start(bus, memory, &options()).expect_err("that is an i210");
    assert!(error.to_string().contains("8086:1533") && error.to_string().contains("82574"), "{error}");
}

/// Makes a parked card whose ring was used, and its driver state.
fn parked() -> (Play, NicMemory, DriverState) {
    let (play, mut nic) = start();
    play.write_back(0, 60);
    assert_eq!(nic.receive(&mut Burst::new()).expect("one good frame"), 1);
    // Advance the head as a card would.
    play.card.set(RDH, 1);
    let (_, memory, driver_state) = nic.park().expect("the card stops");
    assert!(!play.receives());
    (play, memory, driver_state)
}

#[test]
fn a_card_that_is_not_as_the_driver_state_says_is_refused() {
    for (what, offset, value) in [
        ("it receives", 0x100, 2),
        ("it sends", 0x400, 2),
        ("its ring is elsewhere", 0x2800, 0x5000_0000),
        ("its tail is elsewhere", RDT, 3),
        ("its transmit ring is elsewhere", 0x3800, 0x5000_0000),
    ] {
        let (play, memory, driver_state) = parked();
        play.card.set(offset, value);
        let error = E1000e::resume(play.bus(), memory, &driver_state).expect_err(what);
        assert!(matches!(error.error, NicError::BrokenDriverState { .. }), "{what}: {error}");
    }
    let (play, memory, driver_state) = parked();
    play.card.pull();
    assert!(matches!(E1000e::resume(play.bus(), memory, &driver_state), Err(Failed { error: NicError::Gone, .. })));
}

#[test]
fn frames_left_in_the_rings_are_a_successors() {
    let (play, memory) = Play::new(RING);
    let arena = memory.arena().clone();
    let mut nic = E1000e::start(play.bus(), memory, &options()).expect("a well-behaved card");
    // Three frames came, and five are to be sent, of which the card has sent two when it is parked.
    (0..3).for_each(|place| play.write_back(place, 60));
    let mut burst = Burst::new();
    fill(&arena, &mut burst, 5);
    assert_eq!(nic.transmit(&mut burst).expect("room"), 5);
    (0..2).for_each(|place| play.complete(place));
    let (bus, memory, driver_state) = nic.park().expect("the card stops");
    assert_eq!((driver_state.sent, driver_state.filled), (2, 5));
    let mut nic = E1000e::resume(bus, memory, &driver_state).expect("another goes on");
    assert_eq!(nic.receive(&mut burst).expect("three good frames"), 3);
    let mut burst = Burst::new();
    fill(&arena, &mut burst, 7);
    assert_eq!(nic.transmit(&mut burst).expect("room for four"), 4, "three are still there");
}

// Of the 82574L, by the names of its data sheet (sections 10.2.2.7 to 10.2.2.10 and 10.2.6).
const STATUS: u32 = 0x8;
const CTRL: u32 = 0x0;
const FCRTL: u32 = 0x2160;
const XONE: u32 = 1 << 31;
const TCTL: u32 = 0x400;
const SWXOFF: u32 = 1 << 22;

#[test]
fn a_card_whose_link_went_while_it_was_parked_lets_its_partner_go_on_by_itself_again() {
    let (play, memory, driver_state) = parked();
    assert_eq!(play.card.get(FCRTL) & XONE, 0, "a parked card keeps its partner waiting");
    play.card.set(STATUS, 0x81);
    let mut nic = E1000e::resume(play.bus(), memory, &driver_state).expect("the link is no matter");
    assert_eq!(nic.receive(&mut Burst::new()).expect("nothing"), 0);
    assert_ne!(play.card.get(FCRTL) & XONE, 0);
    assert_eq!(play.card.get(TCTL) & SWXOFF, 0, "nobody is there to be told");
}

#[test]
fn a_partner_waits_while_what_came_before_finds_no_place() {
    let (play, memory, driver_state) = parked();
    let arena = memory.arena().clone();
    let mut nic = E1000e::resume(play.bus(), memory, &driver_state).expect("another goes on");
    let waits = || play.card.get(FCRTL) & XONE == 0;
    // A full burst takes nothing in.
    play.write_back(1, 60);
    let mut full = Burst::new();
    fill(&arena, &mut full, BURST_MAX);
    assert_eq!(nic.receive(&mut full).expect("no room"), 0);
    assert!(waits(), "a frame is there");
    // A ring without slots does not either: the other frames are in the card's buffer.
    let hoard: Vec<_> = std::iter::from_fn(|| arena.take()).collect();
    let mut burst = Burst::new();
    (2..8).for_each(|place| play.write_back(place, 60));
    while nic.receive(&mut burst).expect("good frames") > 0 {}
    assert!(waits(), "the ring is empty, and the buffer need not be");
    assert_eq!(nic.arm().expect("it answers"), Armed::Idle);
    assert!(waits());
    drop((hoard, burst, full));
    for _ in 0..2 {
        assert_eq!(nic.receive(&mut Burst::new()).expect("nothing more"), 0);
    }
    assert!(!waits());
}

#[test]
fn a_giver_asks_sixteen_times_until_it_believes_that_its_partner_is_not_told() {
    let (play, mut nic) = start();
    nic.quiesce(How::Point, |_| ());
    // Longer than a PAUSE frame may take within three polls: the server of a modelled card may have been asleep.
    play.card.slow_down(XOFFTXC, Duration::from_micros(100));
    while !nic.is_quiet() {}
    assert_eq!(play.card.slow_reads(), 16);
}

#[test]
fn in_half_duplex_nobody_is_asked_to_pause() {
    const FLOW: u32 = 0b11 << 27;
    let (play, mut nic) = start();
    play.card.set(CTRL, play.card.get(CTRL) | FLOW);
    play.card.set(STATUS, 0x80);
    assert_eq!(nic.link().expect("it is there"), Link::Down);
    play.card.set(STATUS, 0x82);
    assert_eq!(nic.link().expect("it is there"), Link::Up { speed: 1000, full_duplex: false });
    assert_eq!(play.card.get(CTRL) & FLOW, 0);
}

/// Starts QEMU's card.
fn on_qemu(options: &NicOptions) -> Option<(Machine, E1000e<QtestBus>)> {
    let slots = Geometry { slot_len: 4096, count: 1024 };
    let memory = NicMemory::create(slots, 64 << 10, qemu::MEMORY_AT).expect("a little memory");
    let machine = Machine::start("e1000e", "mac=52:54:00:12:34:57", &regions(&memory))?;
    let nic = E1000e::start(machine.bus(), memory, options).expect("the card starts");
    Some((machine, nic))
}

#[test]
fn two_queues_are_both_used() {
    let options = NicOptions { queues: 2, ring: 64, ..NicOptions::default() };
    let Some((machine, mut nic)) = on_qemu(&options) else { return };
    // TCP over IPv4 from different ports; RSS does not look at the checksums.
    for port in 0..32_u8 {
        let mut frame = vec![0x52, 0x54, 0x00, 0x12, 0x34, 0x57, 2, 0, 0, 0, 0, 1, 8, 0];
        frame.extend([0x45, 0, 0, 46, 0, 0, 0, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2, 0x80, port, 0, 80]);
        frame.resize(60, 0);
        machine.wire().send_frame(&frame);
    }
    let mut burst = Burst::new();
    let deadline = std::time::Instant::now() + PATIENCE;
    while burst.len() < 32 {
        nic.receive(&mut burst).expect("the card works");
        assert!(std::time::Instant::now() < deadline, "{} frames came", burst.len());
    }
    let registers = machine.bus().registers(0).expect("BAR 0");
    let heads = [registers.read32(0x2810), registers.read32(0x2910)];
    assert_eq!(heads[0] + heads[1], 32, "{heads:?}");
    assert!(heads.iter().all(|&head| head > 3), "{heads:?}");
}

#[test]
fn parking_leaves_reset_phy_and_link_alone() {
    let Some((machine, nic)) = on_qemu(&NicOptions::default()) else { return };
    let mut bus = machine.bus();
    let registers = bus.registers(0).expect("BAR 0");
    // CTRL, STATUS, the ring's base, RFCTL, the multicast table's first word, IVAR.
    let look = || [0x0, 0x8, 0x2800, 0x2804, 0x5008, 0x5200, 0xe4].map(|offset| registers.read32(offset));
    let before = look();
    let (bus, memory, driver_state) = nic.park().expect("the card stops");
    assert_eq!(look(), before);
    assert_eq!(registers.read32(0x100) & 2, 0, "receiving is off");
    assert_eq!(registers.read32(0x400) & 2, 0, "sending is off");
    let mut nic = E1000e::resume(bus, memory, &driver_state).expect("another goes on");
    assert_eq!(look(), before);
    assert!(matches!(nic.link(), Ok(Link::Up { speed: 1000, full_duplex: true })));
    assert!(machine.wire().receive_frame(Duration::ZERO).is_none());
    // A further bus does not map memory that QEMU was not told of.
    let other = NicMemory::create(Geometry { slot_len: 4096, count: 8 }, 4096, Iova(0)).expect("a little memory");
    assert!(other.map(&mut machine.bus()).is_err());
}
