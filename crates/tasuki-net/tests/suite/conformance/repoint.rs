//! Cases for drivers whose card can be pointed at another owner's rings.

use tasuki_net::nic::bus::Iova;
use tasuki_net::nic::{How, InPlace, MemoryLayout, Nic, NicMemory, NicOptions, Repoint};
use tasuki_net::port::{Armed, Port};
use tasuki_shm::arena::{Arena, Geometry};

use super::Bench;
use super::frames::{SHORTEST, assert_same, frame, ipv4};
use super::in_place::Twinned;
use super::traffic::{Traffic, numbered};
use crate::wait::readable;
use tasuki_testing::{PATIENCE, polled};

/// Number of turns of two owners.
const TURNS: u32 = 12;

/// A world in which a card can have the memory of two owners.
pub trait Repointed: Twinned<Nic: Repoint> {
    /// How its traffic gets to the next owner's rings.
    const HOW: How = How::Point;
    /// Whether its wire keeps frames in order, whichever owner sends in the other direction.
    const IN_ORDER: bool = true;

    /// Makes a fresh card, which can be made to see each of these memories.
    fn with_two(first: &NicMemory, second: &NicMemory) -> Option<Self>;
}

/// An owner that is ready for its turn, with its memory.
pub struct Owner<W: Repointed> {
    ready: <W::Nic as Repoint>::Ready,
    arena: Arena,
    layout: MemoryLayout,
    options: NicOptions,
}

fn options(queues: u8) -> NicOptions {
    NicOptions { ring: 64, queues, ..NicOptions::default() }
}

impl<W: Repointed> Bench<W> {
    /// Prepares an owner while the card is driven from memory at `from`.
    fn next_owner(bus: W::Bus, memory: NicMemory, options: NicOptions, from: Iova) -> Owner<W> {
        let (arena, layout) = (memory.arena().clone(), memory.layout());
        let ready = W::Nic::prepare_rings(bus, memory, &options, W::HOW, from).expect("the card's shape, and memory");
        Owner { ready, arena, layout, options }
    }

    /// Quiesces and stops the card; returns the frames received meanwhile.
    pub fn quiesce_and_stop(&mut self) -> Vec<Vec<u8>> {
        let mut came = Vec::new();
        self.nic().quiesce(W::HOW, |_| ());
        polled("the card stops", || {
            let frames = self.poll();
            let none = frames.is_empty();
            came.extend(frames);
            (none && self.nic().is_quiet() && self.nic().leave().expect("the card works")).then_some(())
        });
        came
    }

    /// Points the stopped card at the next owner's rings, and makes the other owner the next.
    fn repoint(&mut self, next: Owner<W>) -> Owner<W> {
        let giver = self.take();
        self.put(W::Nic::repoint(next.ready, giver.left()).expect("a card that has stopped"), next.arena);
        let (bus, memory) = giver.stand_down();
        self.nic().forget(&memory.layout(), |_| ()).expect("it was mapped");
        Self::next_owner(bus, memory, next.options, next.layout.rings_at)
    }
}

/// Starts a card, and prepares another owner for it.
fn start<W: Repointed>(queues: u8) -> Option<(Bench<W>, Owner<W>)> {
    let options = options(queues);
    let first = super::memory::<W>(&options);
    let count = first.arena().geometry().count;
    let at = Iova(W::MEMORY_AT.0 + (1 << 30));
    let second = NicMemory::create(Geometry { slot_len: 4096, count }, 256 << 10, at).expect("a little memory");
    let world = W::with_two(&first, &second)?;
    let (arena, from) = (first.arena().clone(), first.layout().rings_at);
    let nic = Nic::start(world.bus(), first, &options).expect("the card starts");
    let mut bench = Bench::over(world, nic, arena);
    let bus = W::twin(bench.nic().bus());
    let next = Bench::next_owner(bus, second, options, from);
    Some((bench, next))
}

pub fn owners_take_turns_under_traffic_without_a_loss<W: Repointed>() {
    let Some((mut bench, mut next)) = start::<W>(1) else { return };
    let mut traffic = Traffic::start(&bench);
    traffic.in_order = W::IN_ORDER;
    for turn in 0..TURNS {
        for _ in 0..1 + turn % 5 {
            traffic.check(bench.receive());
        }
        traffic.check(bench.quiesce_and_stop());
        next = bench.repoint(next);
        // The new owner can send.
        let out = numbered::<W>(turn);
        assert_same(&bench.bring_out(std::slice::from_ref(&out)), &[out]);
    }
    traffic.end(&mut bench);
}

pub fn all_queues_go_to_another_owner<W: Repointed>() {
    let Some((mut bench, mut next)) = start::<W>(W::QUEUES) else { return };
    for turn in 0..6 {
        // Frames of 16 flows, which are spread over the queues; sorted by flow, the last byte of the sender's
        // address.
        let mut sent: Vec<_> = (0..200).map(|number| ipv4(W::MAC, (number % 16) as u8, 200 * turn + number)).collect();
        let mut came = Vec::new();
        let mut rest = sent.iter().peekable();
        polled("the frames", || {
            while rest.next_if(|frame| bench.world.try_send(frame)).is_some() {}
            came.extend(bench.poll());
            (came.len() >= 150).then_some(())
        });
        // The other frames come to either owner.
        came.extend(bench.quiesce_and_stop());
        next = bench.repoint(next);
        polled("the other frames", || {
            while rest.next_if(|frame| bench.world.try_send(frame)).is_some() {}
            came.extend(bench.poll());
            (came.len() >= 200).then_some(())
        });
        sent.sort_by_key(|frame| frame[14 + 15]);
        came.sort_by_key(|frame| frame[14 + 15]);
        assert_same(&came, &sent);
    }
}

pub fn an_owner_with_other_memory_is_woken<W: Repointed>() {
    let Some((mut bench, mut next)) = start::<W>(1) else { return };
    for number in 0..6 {
        assert_eq!(bench.nic().arm().expect("the card works"), Armed::Idle);
        assert_same(&bench.quiesce_and_stop(), &[]);
        next = bench.repoint(next);
        while bench.nic().arm().expect("the card works") == Armed::Busy {}
        let sent = frame(W::MAC, number, SHORTEST);
        while !bench.world.try_send(&sent) {}
        assert!(readable(&bench.nic().fd(), PATIENCE), "nobody was woken by frame {number}");
        assert_same(&bench.receive(), &[sent]);
        while bench.nic().arm().expect("the card works") == Armed::Busy {}
    }
}

pub fn who_gives_up_is_not_missed<W: Repointed>() {
    let Some((mut bench, next)) = start::<W>(1) else { return };
    let from = next.layout.rings_at;
    assert_same(&bench.quiesce_and_stop(), &[]);
    let mut next = bench.repoint(next);
    for round in 0..3 {
        let Owner { ready, options, .. } = next;
        let (bus, memory) = W::Nic::give_up(ready);
        // Frames of 16 flows, as above.
        let mut sent: Vec<_> = (0..160).map(|number| ipv4(W::MAC, (number % 16) as u8, 160 * round + number)).collect();
        let mut came = Vec::new();
        let mut rest = sent.iter().peekable();
        polled("all frames", || {
            while rest.next_if(|frame| bench.world.try_send(frame)).is_some() {}
            came.extend(bench.poll());
            (came.len() >= 160).then_some(())
        });
        sent.sort_by_key(|frame| frame[14 + 15]);
        came.sort_by_key(|frame: &Vec<u8>| frame[14 + 15]);
        assert_same(&came, &sent);
        next = Bench::next_owner(bus, memory, options, from);
    }
    assert_same(&bench.quiesce_and_stop(), &[]);
    drop(bench.repoint(next));
    let last = frame(W::MAC, 0, SHORTEST);
    assert_same(&bench.bring_in(std::slice::from_ref(&last)), &[last]);
}

pub fn a_card_goes_back_to_its_giver<W: Repointed>() {
    let Some((mut bench, next)) = start::<W>(1) else { return };
    let sent: Vec<_> = (0..120).map(|number| frame(W::MAC, number, SHORTEST)).collect();
    assert_same(&bench.bring_in(&sent[..40]), &sent[..40]);
    assert_same(&bench.quiesce_and_stop(), &[]);
    // No taker came.
    bench.nic().go_back().expect("the card works");
    assert_same(&bench.bring_in(&sent[40..80]), &sent[40..80]);
    assert_same(&bench.bring_out(&sent[..40]), &sent[..40]);
    assert_same(&bench.quiesce_and_stop(), &[]);
    // A taker came, and is gone.
    let left = bench.nic().left();
    drop(W::Nic::repoint(next.ready, left).expect("a card that has stopped"));
    bench.nic().go_back().expect("the card works");
    assert_same(&bench.bring_in(&sent[80..]), &sent[80..]);
    assert_same(&bench.bring_out(&sent), &sent);
}

/// Nobody has heard that the taker drove. Its giver goes back, or picks the card up where only that is possible: the
/// command queue is the taker's by then.
pub fn a_card_goes_back_from_a_taker_that_had_its_givers_memory_forgotten<W: Repointed>() {
    let Some((mut bench, next)) = start::<W>(1) else { return };
    let sent: Vec<_> = (0..80).map(|number| frame(W::MAC, number, SHORTEST)).collect();
    assert_same(&bench.bring_in(&sent[..40]), &sent[..40]);
    assert_same(&bench.quiesce_and_stop(), &[]);
    let mut taker = W::Nic::repoint(next.ready, bench.nic().left()).expect("a card that has stopped");
    let slots = bench.arena().geometry();
    taker.forget(&MemoryLayout { rings_at: W::MEMORY_AT, slots, ..next.layout }, |_| ()).expect("it was mapped");
    drop(taker);
    if W::HOW == How::Steer {
        let (bus, memory) = bench.take().stand_down();
        let arena = memory.arena().clone();
        let prepared = W::Nic::prepare(bus, memory).expect("it was ready before");
        bench.put(W::Nic::pick_up(prepared).expect("the memory is mapped again"), arena);
    } else {
        bench.nic().go_back().expect("the memory is mapped again");
    }
    assert_same(&bench.bring_in(&sent[40..]), &sent[40..]);
    assert_same(&bench.bring_out(&sent), &sent);
}
