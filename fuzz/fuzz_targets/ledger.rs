//! A driver that died, or lied, and left anything in its ledger and its rings. Its successor picks the card up and
//! goes on, or refuses.
//!
//! What must hold: no panic, no endless call, and no slot with two holders: received slots, free slots and the
//! card's slots are disjoint.
#![no_main]

#[path = "../common/mod.rs"]
mod common;
#[allow(dead_code, reason = "the tests use the rest of it")]
#[path = "../../crates/tasuki-net/tests/suite/stub/mod.rs"]
mod stub;

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Relaxed, Release};

use common::Choices;
use libfuzzer_sys::fuzz_target;
use stub::e1000e::{Play, StubBus};
use tasuki_net::nic::e1000e::E1000e;
use tasuki_net::nic::{InPlace, Nic, NicMemory, NicOptions, Parts};
use tasuki_net::port::{Burst, Frame, Port};
use tasuki_shm::arena::Arena;
use tasuki_shm::region::{Region, Span};

type Card = E1000e<StubBus>;

const RING: usize = 16;

/// (offset, length) of the parts of a ledger: its head, cursors, rarely changed words, places to undo, slots in
/// descriptors.
const PARTS: [(u16, u8); 6] = [(0, 4), (8, 16), (32, 255), (288, 128), (416, 255), (1536, 64)];

fn copies(parts: &Parts) -> Parts {
    let copy = |fd: &OwnedFd| fd.try_clone().expect("descriptors are free");
    Parts { rings: copy(&parts.rings), frames: copy(&parts.frames), ledger: copy(&parts.ledger) }
}

fn words(memory: &OwnedFd) -> Span<AtomicU64> {
    let region = Region::adopt(memory.try_clone().expect("descriptors are free")).expect("memory of ours");
    region.span(0, region.len() / 8).expect("all of it")
}

/// Makes a little honest traffic: some frames in, some of them out again, and none in hand at the end.
fn work(play: &Play, nic: &mut Card, choices: &mut Choices<'_>) {
    let mut burst = Burst::new();
    for round in 0..choices.below(4) {
        for place in 0..choices.below(16) {
            play.write_back((usize::from(place) + usize::from(round)) % RING, 60);
        }
        if nic.receive(&mut burst).is_err() || nic.transmit(&mut burst).is_err() {
            return;
        }
        (0..usize::from(choices.below(16))).for_each(|place| play.complete(place));
    }
}

/// Collects the frames that a successor receives, and checks that each slot occurs once.
fn look(play: &Play, arena: &Arena, nic: &mut Card, choices: &mut Choices<'_>) {
    let mut frames: Vec<Frame> = Vec::new();
    for _ in 0..4 {
        for place in 0..RING {
            if choices.below(3) > 0 {
                play.write_back(place, choices.short() % 2048);
            }
        }
        let mut burst = Burst::new();
        match nic.receive(&mut burst) {
            Ok(_) => frames.extend(burst.drain(..)),
            Err(_) => break,
        }
    }
    let free = std::iter::from_fn(|| arena.take());
    let mut seen = BTreeSet::new();
    let mut slots: Vec<_> = free.collect();
    for frame in frames {
        assert!(usize::from(frame.len) <= frame.slot.bytes().len());
        slots.push(frame.slot);
    }
    assert!(slots.iter().all(|slot| seen.insert(slot.id().index)), "a slot with two");
}

fuzz_target!(|data: &[u8]| {
    let mut choices = Choices(data);
    let (play, memory) = Play::new(RING);
    let (layout, parts) = (memory.layout(), memory.parts().expect("descriptors are free"));
    let options = NicOptions { ring: 16, ..NicOptions::default() };
    let mut nic = Card::start(play.bus(), memory, &options).expect("a well-behaved card");
    work(&play, &mut nic, &mut choices);
    // The driver dies without warning: it touches nothing.
    drop(nic.stand_down());
    let (ledger, rings) = (words(&parts.ledger), words(&parts.rings));
    for _ in 0..choices.below(24) {
        if choices.below(5) == 0 {
            rings[usize::from(choices.byte())].store(choices.word(), Release);
            continue;
        }
        let (from, len) = PARTS[usize::from(choices.below(6))];
        let at = usize::from(from) + usize::from(choices.below(len));
        let old = ledger[at].load(Relaxed);
        let word = match choices.below(4) {
            0 => old ^ 1 << choices.below(64),
            1 => old.wrapping_add(choices.byte().into()),
            2 => ledger[usize::from(from) + usize::from(choices.below(len))].load(Relaxed),
            _ => choices.word(),
        };
        ledger[at].store(word, Release);
    }
    let again = NicMemory::prepare(copies(&parts), &layout).expect("the same memory");
    let arena = again.arena().clone();
    let Ok(prepared) = Card::prepare(play.bus(), again) else { return };
    let Ok(mut nic) = Card::pick_up(prepared) else { return };
    look(&play, &arena, &mut nic, &mut choices);
    drop(nic.stand_down());
});
