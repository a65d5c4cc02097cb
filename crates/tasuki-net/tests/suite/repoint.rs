//! A card is pointed at the rings of another owner, under traffic, and back.

use std::os::fd::OwnedFd;
use std::time::Instant;

use tasuki_net::nic::bus::vfio_user::{TIMEOUT, VfioUser};
use tasuki_net::nic::bus::{Bus, Iova, Registers};
use tasuki_net::nic::e1000e::Ready;
use tasuki_net::nic::{Failed, How, InPlace, Left, Nic, NicError, NicMemory, NicOptions, Repoint};
use tasuki_shm::arena::Geometry;
use tasuki_sim::journal::{Class, Entry};
use tasuki_sim::wire::{Counts, SourceOptions};

use crate::plugged::{self, Card, Wire, echo, with_card};
use tasuki_testing::PATIENCE;

const FRAMES: u64 = 40_000;
const TURNS: u32 = 20;

fn memory(index: u64) -> NicMemory {
    NicMemory::create(Geometry { slot_len: 4096, count: 1024 }, 256 << 10, Iova((1 + index) << 32)).unwrap()
}

/// Starts a card, and prepares an owner with memory of its own for it.
fn start(socket: OwnedFd) -> (Card, Ready<VfioUser>) {
    let nic = plugged::start(socket, memory(0), true);
    let bus = VfioUser::from_twin(nic.bus().twin().unwrap(), TIMEOUT).unwrap();
    (nic, Card::prepare_rings(bus, memory(1), &NicOptions::default(), How::Point, Iova(1 << 32)).unwrap())
}

/// Handles the rest of the frames and stops the card; returns how many frames came meanwhile.
fn stop(nic: &mut Card) -> u64 {
    let mut frames = 0;
    nic.quiesce(How::Point, |nic| frames += echo(nic, u64::MAX, |_| true));
    loop {
        frames += echo(nic, u64::MAX, Card::is_quiet);
        if nic.leave().unwrap() {
            return frames;
        }
    }
}

/// Returns the journal's entries that a driver must not cause when it takes over a running card.
fn offences(journal: &[Entry]) -> Vec<&Entry> {
    journal.iter().filter(|entry| Class::COLD.contains(&entry.class) || Class::ALWAYS.contains(&entry.class)).collect()
}

/// Sends back the rest of all frames, after `frames` so far, and ends.
fn finish(mut nic: Card, next: Ready<VfioUser>, wire: &Wire, frames: u64) {
    assert!(frames < FRAMES, "there was traffic at each turn");
    echo(&mut nic, FRAMES - frames, |_| false);
    wire.await_back(FRAMES);
    drop(Card::give_up(next));
    nic.park().unwrap();
}

/// Checks that no frame is lost, comes twice, out of order or changed, and that no driver broke a rule of the card's
/// data sheet.
#[track_caller]
fn assert_flawless(counts: &Counts, journal: &[Entry]) {
    assert_eq!(offences(journal), Vec::<&Entry>::new());
    assert_eq!((counts.received, counts.duplicated, counts.reordered, counts.damaged), (FRAMES, 0, 0, 0));
}

#[test]
fn owners_that_take_turns_lose_nothing_and_break_no_rule() {
    let rate = SourceOptions::line_rate(1_000_000_000, 64);
    let ((), counts, journal) = with_card(rate, FRAMES, |socket, wire| {
        let (mut nic, mut next) = start(socket);
        wire.begin();
        let mut frames = 0;
        for _ in 0..TURNS {
            frames += echo(&mut nic, 500, |_| false);
            frames += stop(&mut nic);
            let taker = Card::repoint(next, nic.left()).unwrap();
            let (mut bus, memory) = std::mem::replace(&mut nic, taker).stand_down();
            memory.unmap(&mut bus).unwrap();
            next = Card::prepare_rings(bus, memory, &NicOptions::default(), How::Point, Iova(1 << 32)).unwrap();
        }
        finish(nic, next, wire, frames);
    });
    assert_flawless(&counts, &journal);
}

#[test]
fn a_giver_takes_its_card_back_under_traffic_without_a_loss() {
    let rate = SourceOptions::line_rate(1_000_000_000, 64);
    let ((), counts, journal) = with_card(rate, FRAMES, |socket, wire| {
        let (mut nic, next) = start(socket);
        wire.begin();
        let mut frames = 0;
        for turn in 0..TURNS {
            frames += echo(&mut nic, 500, |_| false);
            if turn % 2 == 0 {
                nic.quiesce(How::Point, |_| ());
                frames += echo(&mut nic, 50, Card::is_quiet);
            } else {
                frames += stop(&mut nic);
            }
            nic.go_back().unwrap();
        }
        finish(nic, next, wire, frames);
    });
    assert_flawless(&counts, &journal);
}

#[test]
fn a_giver_takes_its_card_back_from_a_taker_that_is_no_more() {
    let ((), counts, journal) = with_card(1_000_000, FRAMES, |socket, wire| {
        let (mut nic, next) = start(socket);
        stop(&mut nic);
        // As if killed: the taker's memory goes, and the card stays pointed at it.
        drop(Card::repoint(next, nic.left()).unwrap());
        nic.go_back().unwrap();
        wire.begin();
        echo(&mut nic, FRAMES, |_| false);
        wire.await_back(FRAMES);
        nic.park().unwrap();
    });
    assert_flawless(&counts, &journal);
}

#[test]
fn a_taker_that_is_late_is_refused_and_nothing_is_lost() {
    /// Receive descriptor head, and receive control with its bit EN.
    const RDH: u32 = 0x2810;
    const RCTL: u32 = 0x100;
    const EN: u32 = 1 << 1;
    let rate = SourceOptions::line_rate(1_000_000_000, 64);
    let ((), counts, journal) = with_card(rate, FRAMES, |socket, wire| {
        let (mut nic, mut next) = start(socket);
        let mut other = VfioUser::from_twin(nic.bus().twin().unwrap(), TIMEOUT).unwrap();
        let registers = other.registers(0).unwrap();
        wire.begin();
        let mut frames = 0;
        let mut late = 0;
        while late < 3 {
            frames += echo(&mut nic, 500, |_| false);
            frames += stop(&mut nic);
            if registers.read32(RCTL) & EN == 0 {
                // A giver that does not run at the right moment switches the card off, and then no taker is too
                // late.
                nic.go_back().unwrap();
                continue;
            }
            late += 1;
            // Position where the giver stopped; the pause may be over already, and the ring full.
            let (head, began) =
                (u32::try_from(frames % u64::from(NicOptions::default().ring)).unwrap(), Instant::now());
            wire.end_pause();
            while registers.read32(RDH) == head {
                assert!(began.elapsed() < PATIENCE, "the partner pauses for ever");
            }
            let Failed { error, bus, memory } = Card::repoint(next, nic.left()).expect_err("frames have come");
            assert!(error.to_string().contains("frames have come"), "{error}");
            nic.go_back().unwrap();
            next = Card::prepare_rings(bus, memory, &NicOptions::default(), How::Point, Iova(1 << 32)).unwrap();
        }
        finish(nic, next, wire, frames);
    });
    assert_flawless(&counts, &journal);
}

#[test]
fn what_the_card_is_not_is_refused_and_the_giver_drives_on() {
    let ((), counts, journal) = with_card(1_000_000, FRAMES, |socket, wire| {
        let (mut nic, next) = start(socket);
        wire.begin();
        let mut frames = echo(&mut nic, 1000, |_| false);
        // While its owner drives.
        let Failed { error, mut bus, mut memory } = Card::repoint(next, Left::STOPPED).expect_err("the card runs");
        assert!(matches!(error, NicError::BrokenDriverState { .. }), "{error}");
        memory.unmap(&mut bus).unwrap();
        let wrong = [
            (NicOptions { ring: 512, ..NicOptions::default() }, "ring = 512"),
            (NicOptions { queues: 2, ..NicOptions::default() }, "queues = 2"),
            (NicOptions { mtu: 3000, ..NicOptions::default() }, "mtu = 3000"),
        ];
        for (options, why) in wrong {
            frames += echo(&mut nic, 1000, |_| false);
            let failed = Card::prepare_rings(bus, memory, &options, How::Point, Iova(1 << 32)).expect_err(why);
            assert!(failed.error.to_string().contains(why), "{failed}");
            (bus, memory) = (failed.bus, failed.memory);
        }
        let next = Card::prepare_rings(bus, memory, &NicOptions::default(), How::Point, Iova(1 << 32)).unwrap();
        frames += stop(&mut nic);
        let mut taker = Card::repoint(next, nic.left()).unwrap();
        drop(nic.stand_down());
        echo(&mut taker, FRAMES - frames, |_| false);
        wire.await_back(FRAMES);
        taker.park().unwrap();
    });
    assert_flawless(&counts, &journal);
}
