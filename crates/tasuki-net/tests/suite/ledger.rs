//! The ledger and rings that a dead driver leaves, and their use by its successor. `takeover.rs` tests whole cards
//! under traffic.

use std::os::fd::OwnedFd;

use tasuki_net::nic::e1000e::E1000e;
use tasuki_net::nic::{InPlace, Nic, NicError, NicMemory, NicOptions, Parts};
use tasuki_net::port::{Armed, Burst, Port, Transactional};

use crate::stub::e1000e::{Play, RDT, StubBus, TDT};

type Card = E1000e<StubBus>;

const RING: usize = 16;
const RCTL: u32 = 0x100;
const TCTL: u32 = 0x400;
const EN: u32 = 1 << 1;

/// A running card, and the means to prepare a successor.
struct Desk {
    play: Play,
    nic: Option<Card>,
    parts: Box<dyn Fn() -> NicMemory>,
}

/// Returns a function that maps the memory of a driver again, for its successors.
pub fn again(memory: &NicMemory) -> Box<dyn Fn() -> NicMemory> {
    let (layout, parts) = (memory.layout(), memory.parts().expect("descriptors are free"));
    Box::new(move || {
        let copy = |fd: &OwnedFd| fd.try_clone().expect("descriptors are free");
        let Parts { rings, frames, ledger } = &parts;
        let parts = Parts { rings: copy(rings), frames: copy(frames), ledger: copy(ledger) };
        NicMemory::prepare(parts, &layout).expect("the same memory")
    })
}

fn start() -> Desk {
    let (play, memory) = Play::new(RING);
    let parts = again(&memory);
    let options = NicOptions { ring: 16, ..NicOptions::default() };
    let nic = Card::start(play.bus(), memory, &options).expect("a well-behaved card");
    Desk { play, nic: Some(nic), parts }
}

impl Desk {
    fn nic(&mut self) -> &mut Card {
        self.nic.as_mut().expect("it runs")
    }

    fn prepared(&self) -> <Card as InPlace>::Prepared {
        Card::prepare(self.play.bus(), (self.parts)()).expect("it is ready")
    }

    /// Ends the driver and lets a successor take over; the registers stay as they were.
    fn takes_over(&mut self) {
        std::mem::forget(self.nic.take());
        self.nic = Some(Card::pick_up(self.prepared()).expect("the successor goes on"));
    }

    fn receive(&mut self, burst: &mut Burst) -> usize {
        self.nic().receive(burst).expect("the card works")
    }
}

#[test]
fn what_is_in_hand_comes_again_and_what_is_not_does_not() {
    let mut desk = start();
    (0..4).for_each(|place| desk.play.write_back(place, 60));
    let mut burst = Burst::new();
    assert_eq!(desk.receive(&mut burst), 4);
    // Two are handled, two are left in the burst.
    burst.drain(..2);
    assert_eq!(desk.receive(&mut burst), 0);
    let slots: Vec<_> = burst.iter().map(|frame| frame.slot.id().index).collect();
    desk.takes_over();
    let mut again = Burst::new();
    assert_eq!(desk.receive(&mut again), 2);
    assert!(again.iter().map(|frame| frame.slot.id().index).eq(slots), "the same frames");
    again.clear();
    assert_eq!(desk.receive(&mut again), 0);
    desk.takes_over();
    assert_eq!(desk.receive(&mut again), 0, "all were handled");
}

#[test]
fn a_frame_that_was_changed_in_hand_comes_as_it_came() {
    let mut desk = start();
    desk.play.write_back(0, 60);
    let mut burst = Burst::new();
    assert_eq!(desk.receive(&mut burst), 1);
    burst[0].slot.bytes_mut()[..80].fill(1);
    let [frame] = &mut burst[..] else { unreachable!() };
    desk.nic.as_mut().expect("it runs").save(frame);
    frame.slot.bytes_mut()[..60].fill(2);
    desk.takes_over();
    let mut again = Burst::new();
    assert_eq!(desk.receive(&mut again), 1);
    assert_eq!(again[0].slot.bytes()[..80], [1; 80]);
}

#[test]
fn what_was_saved_of_an_earlier_frame_stays_where_it_is() {
    let mut desk = start();
    let mut burst = Burst::new();
    // Several times round the ring: each position, and each place for saved bytes, is used several times.
    for round in 0..200_usize {
        desk.play.write_back(round % RING, 60);
        while desk.receive(&mut burst) == 0 {}
        let [frame] = &mut burst[..] else { unreachable!() };
        if round % 3 == 0 {
            frame.slot.bytes_mut().fill(1);
            desk.nic.as_mut().expect("it runs").save(frame);
        }
        frame.slot.bytes_mut().fill(7);
        if round % 3 == 0 {
            desk.takes_over();
            // A dead process has no handles; here the handle lives, and must not free the successor's slots.
            std::mem::forget(std::mem::take(&mut burst));
            assert_eq!(desk.receive(&mut burst), 1);
            assert_eq!(burst[0].slot.bytes()[..60], [1; 60], "round {round}");
        }
        burst.clear();
        assert_eq!(desk.receive(&mut burst), 0);
        assert_eq!(desk.receive(&mut burst), 0);
    }
}

#[test]
fn a_successor_tells_the_card_what_the_dead_one_was_about_to() {
    let mut desk = start();
    let tails = [desk.play.card.get(RDT), desk.play.card.get(TDT)];
    desk.play.card.set(RDT, 3);
    desk.play.card.set(TDT, 5);
    desk.takes_over();
    assert_eq!([desk.play.card.get(RDT), desk.play.card.get(TDT)], tails);
}

#[test]
fn a_card_that_the_dead_one_had_halted_runs_again() {
    let mut desk = start();
    let card = std::rc::Rc::clone(&desk.play.card);
    // The driver parked, and the holder of its driver state is gone with it.
    let parked = desk.nic.take().expect("it runs").park().expect("it stops");
    assert_eq!((card.get(RCTL) & EN, card.get(TCTL) & EN), (0, 0));
    drop(parked);
    desk.takes_over();
    assert_eq!((card.get(RCTL) & EN, card.get(TCTL) & EN), (EN, EN));
}

/// Places and positions of the rings, in the order in which a driver points the card at its own: TDBAL, TDBAH, TDH, TDT, RDBAH, RDH,
/// RDT, RDBAL.
const POINTED: [u32; 8] = [0x3800, 0x3804, 0x3810, TDT, 0x2804, 0x2810, RDT, 0x2800];

/// Has a halted card stand in another owner's rings in the first `count` of these places.
fn stands_elsewhere(desk: &mut Desk, count: usize) -> [u32; 8] {
    drop(desk.nic.take().expect("it runs").park().expect("it stops"));
    let card = &desk.play.card;
    let ours = POINTED.map(|at| card.get(at));
    let theirs = [0x2000_0200, 0, 3, 5, 0, 7, 6, 0x2000_0000];
    POINTED.into_iter().zip(theirs).take(count).for_each(|(at, value)| card.set(at, value));
    ours
}

#[test]
fn a_card_whose_taker_died_while_it_pointed_it_is_whole_again() {
    for count in 0..=POINTED.len() {
        let mut desk = start();
        let ours = stands_elsewhere(&mut desk, count);
        desk.takes_over();
        assert_eq!(POINTED.map(|at| desk.play.card.get(at)), ours, "{count} places were the taker's");
    }
}

#[test]
fn a_card_whose_driver_died_on_the_way_back_is_whole_again() {
    for writes in 0..16 {
        let mut desk = start();
        let ours = stands_elsewhere(&mut desk, POINTED.len());
        desk.play.card.takes_writes(writes);
        let picks_up = || Card::pick_up(desk.prepared()).map(std::mem::forget).is_ok();
        if let Ok(goes_on) = std::panic::catch_unwind(std::panic::AssertUnwindSafe(picks_up)) {
            assert!(goes_on && writes > 8, "after {writes} writes");
        }
        desk.play.card.takes_writes(u32::MAX);
        desk.takes_over();
        assert_eq!(POINTED.map(|at| desk.play.card.get(at)), ours, "killed after {writes} writes");
    }
}

#[test]
fn who_sleeps_with_an_empty_ring_is_woken_all_the_same() {
    let mut desk = start();
    (0..15).for_each(|place| desk.play.write_back(place, 60));
    let mut burst = Burst::new();
    assert_eq!(desk.receive(&mut burst), 15);
    burst.clear();
    // Without another look.
    let before = desk.play.card.get(RDT);
    assert_eq!(desk.nic().arm().expect("the card works"), Armed::Idle);
    assert_ne!(desk.play.card.get(RDT), before, "the card has slots again");
}

#[test]
fn nobody_goes_on_where_nobody_drove() {
    let (play, memory) = Play::new(RING);
    let prepared = Card::prepare(play.bus(), memory).expect("it is ready");
    let error = Card::pick_up(prepared).expect_err("no driver ever ran").error;
    assert!(matches!(error, NicError::BrokenDriverState { .. }), "{error}");
}

#[test]
fn frames_given_are_counted_over_all_drivers() {
    let mut desk = start();
    for round in 1..=40_u64 {
        let place = usize::try_from(round - 1).expect("small") % RING;
        desk.play.write_back(place, 60);
        let mut burst = Burst::new();
        while desk.receive(&mut burst) == 0 {}
        desk.nic().transmit(&mut burst).expect("the card works");
        desk.play.complete(place);
        desk.takes_over();
        assert_eq!(desk.nic().given(), round);
    }
    // Receiving a burst, and handling it, counts as a turn each time that something changes, and otherwise not.
    for place in [40_usize, 41] {
        let turns = desk.nic().turns();
        desk.play.write_back(place % RING, 60);
        let mut burst = Burst::new();
        while desk.receive(&mut burst) == 0 {}
        assert_eq!(desk.nic().turns(), turns, "nothing is handled yet");
        burst.clear();
        assert_eq!(desk.receive(&mut burst), 0);
        assert_eq!(desk.nic().turns(), turns + 1, "it is handled, and a slot was posted besides");
        assert_eq!(desk.receive(&mut burst), 0);
        assert_eq!(desk.nic().turns(), turns + 1);
    }
}
