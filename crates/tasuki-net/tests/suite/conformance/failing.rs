//! Cases of the suite in which a step fails, and the remaining parts go on.

use std::sync::atomic::Ordering::SeqCst;

use tasuki_net::nic::bus::{Bus, Iova};
use tasuki_net::nic::{DriverState, Failed, Nic, NicError, NicMemory, NicOptions};
use tasuki_net::port::Armed;
use tasuki_net::port::Port;
use tasuki_shm::arena::Geometry;

use super::cases::{Words, small};
use super::frames::{LONGEST, SHORTEST, assert_same, frames, mixed};
use super::traffic::Traffic;
use super::{Bench, World, memory, polled};

/// Bytes to corrupt in the common part of all driver states, with the meaning of each.
const WRONG: [(usize, &str); 9] = [
    (0, "kind"),
    (4, "version"),
    (9, "where the rings are"),
    (17, "where the frames are"),
    (25, "the length of slots"),
    (28, "the number of slots"),
    (37, "the card's address"),
    (38, "no power of two of descriptors"),
    (39, "more descriptors than the memory has"),
];

/// Returns the driver state with that corruption.
fn wrong<S: DriverState>(driver_state: &S, at: usize) -> Result<S, NicError> {
    let mut bytes = driver_state.bytes().to_vec();
    bytes[at] ^= 0x11;
    S::read(&bytes)
}

/// Gives one driver a wrong driver state, then resumes the card with another driver.
fn refuse_then_replace<W: World>(bench: &mut Bench<W>, (at, what): (usize, &str)) {
    bench.replace_by(|_, bus, memory, driver_state| {
        let before = memory.arena().census();
        let (bus, memory) = match wrong(driver_state, at) {
            // The driver state is refused before it reaches a driver.
            Err(error) => {
                assert!(at < 8 && matches!(error, NicError::OtherDriverState { .. }), "{what}: {error}");
                // Nor does it work by another way: the driver checks for itself.
                refused::<W>(bus, memory, &foreign(driver_state, at), what)
            }
            Ok(wrong) => refused::<W>(bus, memory, &wrong, what),
        };
        assert_eq!(memory.arena().census(), before, "{what}");
        (bus, memory)
    });
}

/// Makes a driver state that [`wrong`] refuses to read.
fn foreign<S: DriverState>(driver_state: &S, at: usize) -> S {
    let mut bytes = driver_state.bytes().to_vec();
    bytes[at] ^= 0x11;
    S::read_from_bytes(&bytes).expect("as many bytes")
}

fn refused<W: World>(
    bus: W::Bus,
    memory: NicMemory,
    driver_state: &<W::Nic as Nic>::DriverState,
    what: &str,
) -> (W::Bus, NicMemory) {
    let Failed { error, bus, memory } = W::Nic::resume(bus, memory, driver_state).err().expect(what);
    assert!(matches!(error, NicError::OtherDriverState { .. } | NicError::BrokenDriverState { .. }), "{what}: {error}");
    (bus, memory)
}

pub fn a_wrong_driver_state_is_refused_and_the_right_one_goes_on<W: World>() {
    let Some(mut bench) = Bench::<W>::start(&small()) else { return };
    for (round, wrong) in (0..).zip(WRONG) {
        // Frames that have arrived and were not received wait for the next driver.
        let sent = frames(W::MAC, 100 * round, mixed(20));
        for frame in &sent {
            polled("room on the wire", || bench.world.try_send(frame).then_some(()));
        }
        refuse_then_replace(&mut bench, wrong);
        let mut came = Vec::new();
        while came.len() < sent.len() {
            came.extend(bench.receive());
        }
        assert_same(&came, &sent);
        assert_same(&bench.bring_out(&sent), &sent);
    }
    assert!(bench.poll().is_empty(), "nothing comes twice");
}

pub fn a_refused_driver_state_changes_no_memory<W: World>() {
    let Some(mut bench) = Bench::<W>::start(&small()) else { return };
    bench.replace_by(|world, mut bus, mut memory, driver_state| {
        let words = Words::of(&memory);
        let all = || words.all().map(|word| word.load(SeqCst)).collect::<Vec<_>>();
        // A device that cannot be stopped may be about to write how far it has looked.
        world.let_rest(&mut bus);
        let before = all();
        let census = memory.arena().census();
        for (at, what) in WRONG {
            (bus, memory) = refused::<W>(bus, memory, &foreign(driver_state, at), what);
        }
        // The right driver state, with other memory: elsewhere, and of another shape.
        let layout = memory.layout();
        let Iova(at) = layout.rings_at;
        let few = Geometry { count: layout.slots.count / 2, ..layout.slots };
        for (what, slots, rings_len, at) in [
            ("rings elsewhere", layout.slots, layout.rings_len, at + (1 << 30)),
            ("fewer slots", few, layout.rings_len, at),
            ("shorter rings", layout.slots, 4096, at),
            ("none of its slots lent", layout.slots, layout.rings_len, at),
        ] {
            let other = NicMemory::create(slots, rings_len, Iova(at)).expect("a little memory");
            let (back, other) = refused::<W>(bus, other, driver_state, what);
            assert_eq!(other.arena().census().free, slots.count, "{what}");
            bus = back;
        }
        assert!(all() == before && memory.arena().census() == census, "the memory has changed");
        (bus, memory)
    });
    let sent = frames(W::MAC, 0, mixed(100));
    assert_same(&bench.bring_in(&sent), &sent);
}

/// For cards that cannot be stopped: they write on while one driver after the other refuses. A card that is quiet writes
/// nothing then, and the case above is enough.
pub fn wrong_driver_states_under_traffic_lose_nothing<W: World>() {
    let Some(mut bench) = Bench::<W>::start(&small()) else { return };
    let mut traffic = Traffic::start(&bench);
    for wrong in WRONG.into_iter().cycle().take(3 * WRONG.len()) {
        traffic.check(bench.receive());
        refuse_then_replace(&mut bench, wrong);
    }
    traffic.end(&mut bench);
}

pub fn after_a_start_that_failed_a_good_one_works<W: World>() {
    // The fewest slots that suffice for the smallest rings.
    let slots = Geometry { slot_len: 4096, count: 24 };
    let memory = NicMemory::create(slots, 256 << 10, W::MEMORY_AT).expect("a little memory");
    let Some(world) = W::new(&memory) else { return };
    let good = NicOptions { ring: 8, ..NicOptions::default() };
    let (mut bus, mut memory) = (world.bus(), memory);
    for (options, too_little) in [
        (NicOptions { ring: 48, ..good.clone() }, false),
        (NicOptions { queues: 0, ..good.clone() }, false),
        (NicOptions { mtu: 20, ..good.clone() }, false),
        (NicOptions { mtu: W::MTU_MAX + 1, ..good.clone() }, false),
        (NicOptions { ring: 64, ..good.clone() }, true),
    ] {
        let Failed { error, bus: way, memory: back } = W::Nic::start(bus, memory, &options).err().expect("no good");
        assert!(matches!(error, NicError::Memory { .. }) == too_little, "{options:?}: {error}");
        assert!(matches!(error, NicError::Options { .. }) != too_little, "{options:?}: {error}");
        assert_eq!(back.arena().census().free, slots.count, "{options:?}");
        (bus, memory) = (way, back);
    }
    let arena = memory.arena().clone();
    let nic = W::Nic::start(bus, memory, &good).expect("good options, and memory that suffices");
    let mut bench = Bench::over(world, nic, arena);
    let sent = frames(W::MAC, 0, [SHORTEST, 700, LONGEST]);
    assert_same(&bench.bring_in(&sent), &sent);
    assert_same(&bench.bring_out(&sent), &sent);
}

/// Whatever a driver leaves behind, another can start afresh with the same bus and the same memory.
pub fn a_parked_card_can_be_started_anew<W: World>() {
    let options = small();
    let Some(mut bench) = Bench::<W>::start(&options) else { return };
    for round in 0..3 {
        bench.start_anew(&options);
        let sent = frames(W::MAC, 100 * round, mixed(100));
        assert_same(&bench.bring_in(&sent), &sent);
        assert_same(&bench.bring_out(&sent), &sent);
        let census = bench.arena().census();
        // Slots of earlier rings are free again: at most two full rings are lent, and we hold nothing.
        assert!(census.peer <= 2 * 64 && census.owner == 0, "{census:?}");
    }
}

pub fn interrupts_do_not_block<W: World>() {
    let memory = memory::<W>(&NicOptions::default());
    let Some(world) = W::new(&memory) else { return };
    let mut bus = world.bus();
    for vector in bus.interrupts(2).expect("every card of these has two") {
        let read = rustix::io::read(&vector, &mut [0; 8]);
        assert_eq!(read, Err(rustix::io::Errno::AGAIN), "who reads one that has not rung does not wait");
    }
    // Some cards can be opened once only.
    drop((bus, world));
    // So a driver that arms twice does not hang.
    let Some(mut bench) = Bench::<W>::start(&small()) else { return };
    for _ in 0..2 {
        assert_eq!(bench.nic().arm().expect("the card works"), Armed::Idle);
    }
}
