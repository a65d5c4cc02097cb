//! Cases for drivers that hand a running card on.

use std::os::fd::OwnedFd;

use tasuki_net::nic::{DriverState, InPlace, Nic, NicMemory, NicOptions, Parts};
use tasuki_net::port::{Armed, Burst, Port, Transactional};
use tasuki_shm::arena::Arena;

use super::frames::{SHORTEST, assert_same, frame};
use super::traffic::{Traffic, numbered};
use super::{Bench, World};
use crate::wait::readable;
use tasuki_testing::PATIENCE;

/// A world whose driver can be replaced while its card runs.
pub trait Twinned: World<Nic: InPlace> {
    /// Makes a second bus to the card, which must stay unused while the first is used.
    fn twin(bus: &Self::Bus) -> Self::Bus;
}

/// A driver that is ready for its turn, with its mapping of the memory.
pub struct Spare<W: Twinned> {
    prepared: <W::Nic as InPlace>::Prepared,
    arena: Arena,
    driver_state: Box<<W::Nic as Nic>::DriverState>,
}

impl<W: Twinned> Bench<W> {
    /// Makes a second driver, with a bus and a mapping of the memory of its own.
    pub fn spare(&mut self, memory: NicMemory) -> Spare<W> {
        let arena = memory.arena().clone();
        let prepared = W::Nic::prepare(W::twin(self.nic().bus()), memory).expect("a second driver gets ready");
        Spare { prepared, arena, driver_state: <W::Nic as Nic>::DriverState::blank() }
    }

    /// Switches to the spare driver, and makes the other one the spare.
    pub fn take_turns(&mut self, mut spare: Spare<W>) -> Spare<W> {
        let mut nic = self.take();
        nic.driver_state(&mut spare.driver_state);
        let next = W::Nic::go_on(spare.prepared, &spare.driver_state).expect("the driver state of the one before");
        let arena = self.arena().clone();
        self.put(next, spare.arena);
        let (bus, memory) = nic.stand_down();
        let prepared = W::Nic::prepare(bus, memory).expect("it was ready before");
        Spare { prepared, arena, driver_state: spare.driver_state }
    }
}

fn options() -> NicOptions {
    NicOptions { ring: 64, ..NicOptions::default() }
}

/// Starts a card, and prepares a second driver for it.
fn start<W: Twinned>() -> Option<(Bench<W>, Spare<W>)> {
    let memory = super::memory::<W>(&options());
    let again = NicMemory::prepare(memory.parts().expect("descriptors are free"), &memory.layout());
    let mut bench = Bench::start_with(memory, &options())?;
    let spare = bench.spare(again.expect("the same memory"));
    Some((bench, spare))
}

pub fn drivers_take_turns_under_traffic_without_a_loss<W: Twinned>() {
    let Some((mut bench, mut spare)) = start::<W>() else { return };
    let mut traffic = Traffic::start(&bench);
    for round in 0..100 {
        (0..1 + round % 5).for_each(|_| _ = traffic.check(bench.receive()));
        spare = bench.take_turns(spare);
        // The successor can send, whatever state the ring was left in.
        let out = numbered::<W>(round);
        assert_same(&bench.bring_out(std::slice::from_ref(&out)), &[out]);
    }
    traffic.end(&mut bench);
}

pub fn who_goes_on_is_woken<W: Twinned>() {
    let Some((mut bench, mut spare)) = start::<W>() else { return };
    for number in 0..10 {
        assert_eq!(bench.nic().arm().expect("the card works"), Armed::Idle);
        spare = bench.take_turns(spare);
        // One frame comes between two drivers, and one to a sleeping driver.
        for number in [2 * number, 2 * number + 1] {
            let sent = frame(W::MAC, number, SHORTEST);
            while !bench.world.try_send(&sent) {}
            assert!(readable(&bench.nic().fd(), PATIENCE), "nobody was woken by frame {number}");
            assert_same(&bench.receive(), &[sent]);
            while bench.nic().arm().expect("the card works") == Armed::Busy {}
        }
    }
}

pub fn a_driver_that_went_on_can_be_parked<W: Twinned>() {
    let Some((mut bench, spare)) = start::<W>() else { return };
    let sent: Vec<_> = (0..90).map(|number| frame(W::MAC, number, SHORTEST)).collect();
    assert_same(&bench.bring_in(&sent[..30]), &sent[..30]);
    // The spare may never have a turn again.
    drop(bench.take_turns(spare));
    assert_same(&bench.bring_in(&sent[30..60]), &sent[30..60]);
    bench.replace(|_, _, _| {});
    assert_same(&bench.bring_in(&sent[60..]), &sent[60..]);
    assert_same(&bench.bring_out(&sent), &sent);
}

/// Drivers die, with or without frames in hand. Each successor finds its predecessor's position in ledger and rings.
pub fn who_leaves_no_driver_state_is_followed_without_a_loss<W: Twinned>() {
    let memory = super::memory::<W>(&options());
    let (layout, Parts { rings, frames, ledger }) = (memory.layout(), memory.parts().expect("descriptors are free"));
    let again = || {
        let copy = |fd: &OwnedFd| fd.try_clone().expect("descriptors are free");
        let parts = Parts { rings: copy(&rings), frames: copy(&frames), ledger: copy(&ledger) };
        NicMemory::prepare(parts, &layout).expect("the same memory")
    };
    let Some(mut bench) = Bench::<W>::start_with(memory, &options()) else { return };
    let (mut came, mut back, mut sent) = (0, 0, 0);
    let mut check = |frames: Vec<Vec<u8>>| {
        for received in frames {
            assert_same(&[received], &[numbered::<W>(came)]);
            came += 1;
        }
        came
    };
    for round in 0..60 {
        for _ in 0..1 + round % 7 {
            super::polled("room on the wire", || bench.world.try_send(&numbered::<W>(sent)).then_some(()));
            sent += 1;
        }
        check(bench.poll());
        let mut burst: Burst = (0..round % 5).map(|i| bench.fill(&numbered::<W>(back + i))).collect();
        let given = bench.nic().transmit(&mut burst).expect("the card works");
        burst.clear();
        if round % 3 == 0 {
            // These frames come again.
            bench.nic().receive(&mut burst).expect("the card works");
        }
        bench.nic().conclude(&burst);
        let bus = W::twin(bench.nic().bus());
        let memory = again();
        let arena = memory.arena().clone();
        let mut prepared = W::Nic::prepare(bus, memory).expect("a successor gets ready");
        W::Nic::rehearse(&mut prepared);
        drop((burst, bench.take()));
        W::Nic::settle(&prepared).expect("the card works");
        bench.put(W::Nic::pick_up(prepared).expect("what the one before left"), arena);
        for _ in 0..given {
            assert_same(&[bench.world.take(PATIENCE).expect("what was sent arrives")], &[numbered::<W>(back)]);
            back += 1;
        }
    }
    super::polled("the rest", || (check(bench.poll()) == sent).then_some(()));
    assert!(bench.poll().is_empty(), "nothing comes twice");
}
