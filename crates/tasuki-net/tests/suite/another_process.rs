//! A parked card goes on in another process, which receives the bus, the memory and the driver state over a socket.

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::fs::MemfdFlags;
use tasuki_net::nic::bus::VfioUser;
use tasuki_net::nic::bus::vfio_user::{Connection, TIMEOUT};
use tasuki_net::nic::e1000e::{DriverState as E1000eDriverState, E1000e};
use tasuki_net::nic::{DriverState, Nic, NicMemory, NicOptions, Parked, Parts, PartsError};
use tasuki_net::port::{Armed, Burst, Port};
use tasuki_shm::region::{Pages, Region, RegionError};

use crate::conformance::frames::assert_same;
use crate::conformance::on_sim::OnSim;
use crate::conformance::traffic::{Traffic, numbered};
use crate::conformance::{Bench, World};
use crate::process::{self, Other};
use crate::wait::{any_readable, readable};
use tasuki_testing::{PATIENCE, polled};

type Card = E1000e<VfioUser>;

/// Header before the driver state: the limits agreed on the connection, and the number of frames the sender has
/// passed on.
type Words = [u32; 4];

/// Hands a parked card over: its connection and its memory as descriptors, its driver state as bytes.
fn give(socket: &UnixStream, (bus, memory, driver_state): Parked<Card>, passed: u32) {
    let Connection { socket: way, fds_max, transfer_max, io_fds } =
        bus.into_connection().expect("the connection stands");
    let Parts { rings, frames, ledger } = memory.parts().expect("descriptors are free");
    let words: Words = [fds_max, transfer_max, io_fds.into(), passed];
    let bytes = words.map(u32::to_ne_bytes).concat();
    let fds = [way.as_fd(), rings.as_fd(), frames.as_fd(), ledger.as_fd()];
    process::say(socket, &[&bytes, driver_state.bytes()].concat(), &fds);
}

/// Takes a card over and resumes it; returns the number of frames that the giver has passed on.
fn take(socket: &UnixStream) -> (Card, tasuki_shm::arena::Arena, u32) {
    let (bytes, fds) = process::hear(socket).expect("a card");
    let [way, rings, frames, ledger] = fds.try_into().expect("four descriptors");
    let (words, driver_state) = bytes.split_at(size_of::<Words>());
    let word = |i: usize| u32::from_ne_bytes(*words[4 * i..].first_chunk().expect("four words"));
    let driver_state = E1000eDriverState::read(driver_state).expect("the driver state is one of ours");
    let connection = Connection { socket: way, fds_max: word(0), transfer_max: word(1), io_fds: word(2) == 1 };
    let bus = VfioUser::from_connection(connection, TIMEOUT).expect("the device is there");
    let memory = NicMemory::adopt(Parts { rings, frames, ledger }, &driver_state)
        .expect("the memory is what the driver state says");
    let arena = memory.arena().clone();
    (Card::resume(bus, memory, &driver_state).expect("the card goes on"), arena, word(3))
}

/// Plays the other process: sends back all frames until it is asked for the card.
fn other_process() {
    let mut socket = process::socket();
    let (mut nic, _, mut passed) = take(&socket);
    let mut burst = Burst::new();
    loop {
        let came = if burst.is_empty() { nic.receive(&mut burst).expect("the card works") } else { 0 };
        passed += u32::try_from(came).expect("a burst");
        let went = nic.transmit(&mut burst).expect("the card works");
        if came + went > 0 || !burst.is_empty() {
            continue;
        }
        if readable(&socket, Duration::ZERO) {
            // One byte asks for the card; the end of the socket ends this process.
            socket.read_exact(&mut [0]).expect("the first process lives");
            break;
        }
        if nic.arm().expect("the card works") == Armed::Idle {
            any_readable(&[nic.fd(), socket.as_fd()], PATIENCE);
        }
    }
    give(&socket, nic.park().expect("the card stops"), passed);
}

#[test]
fn a_card_goes_to_another_process_and_back_under_traffic_without_a_loss() {
    if process::role().is_some() {
        return other_process();
    }
    let Some(mut bench) = Bench::<OnSim>::start(&NicOptions { ring: 64, ..NicOptions::default() }) else { return };
    let mut traffic = Traffic::start(&bench);
    for _ in 0..3 {
        let mut passed = 0;
        (0..20).for_each(|_| passed = traffic.check(bench.receive()));
        let test = "another_process::a_card_goes_to_another_process_and_back_under_traffic_without_a_loss";
        let Other { process: mut other, mut socket } = Other::start(test, "driver", None);
        let parked = bench.take().park().expect("the card stops");
        give(&socket, parked, passed);
        // Frames that the other process received come back by the wire, and follow those that we received.
        while traffic.check(bench.world.take(PATIENCE).into_iter().collect()) < passed + 500 {}
        socket.write_all(&[0]).expect("the other process reads");
        let taker = std::thread::spawn(move || take(&socket));
        // The other process gives no less than it took, so the wire must be emptied meanwhile.
        polled("the card", || {
            traffic.check(bench.world.take(Duration::from_millis(1)).into_iter().collect());
            taker.is_finished().then_some(())
        });
        let (nic, arena, passed) = taker.join().expect("the card comes back");
        bench.put(nic, arena);
        while traffic.check(Vec::new()) < passed {
            traffic.check(bench.world.take(PATIENCE).into_iter().collect());
        }
        assert!(other.0.wait().expect("our own child").success(), "the other process is content");
        let census = bench.arena().census();
        assert!(census.peer <= 2 * 64 && census.owner == 0, "{census:?}");
    }
    traffic.end(&mut bench);
    assert_eq!(bench.world.take(Duration::ZERO), None, "and none twice");
}

#[test]
fn memory_that_is_not_what_the_driver_state_says_is_refused() {
    let Some(mut bench) = Bench::<OnSim>::start(&NicOptions { ring: 64, ..NicOptions::default() }) else { return };
    let (bus, memory, driver_state) = bench.take().park().expect("the card stops");
    let parts = || memory.parts().expect("descriptors are free");
    let other = |len: usize| -> OwnedFd {
        let region = Region::create("test", len, Pages::Small).expect("a little memory");
        region.fd().try_clone_to_owned().expect("a descriptor is free")
    };
    let unsealed = || {
        let memory = rustix::fs::memfd_create("test", MemfdFlags::ALLOW_SEALING).expect("a memory file");
        rustix::fs::ftruncate(&memory, 1 << 20).expect("so long");
        memory
    };
    let file = || OwnedFd::from(tempfile::tempfile().expect("a file"));
    let (rings_len, frames_len) = (memory.rings().len(), memory.arena().region().len());
    let impossible = |error: &PartsError| matches!(error, PartsError::Impossible { .. });
    let region = |error: &PartsError| matches!(error, PartsError::Region(_));
    let of_driver_state = |error: &PartsError| matches!(error, PartsError::DriverState(_));
    let refused = |what: &str, parts: Parts, driver_state: &E1000eDriverState, is: &dyn Fn(&PartsError) -> bool| {
        let error = NicMemory::adopt(parts, driver_state).expect_err(what);
        assert!(is(&error), "{what}: {error}");
    };
    refused("no memory", Parts { rings: file(), ..parts() }, &driver_state, &region);
    refused("memory that may shrink", Parts { frames: unsealed(), ..parts() }, &driver_state, &|error| {
        matches!(error, PartsError::Region(RegionError::Unsealed))
    });
    refused("frames that are the rings", Parts { rings: parts().frames, ..parts() }, &driver_state, &impossible);
    refused("frames that are the ledger", Parts { ledger: parts().frames, ..parts() }, &driver_state, &impossible);
    refused("a shorter ledger", Parts { ledger: other(4096), ..parts() }, &driver_state, &impossible);
    refused("fewer frames", Parts { frames: other(frames_len - 4096), ..parts() }, &driver_state, &impossible);
    refused("more frames", Parts { frames: other(frames_len + 4096), ..parts() }, &driver_state, &impossible);
    refused("shorter rings", Parts { rings: other(rings_len - 4096), ..parts() }, &driver_state, &of_driver_state);
    refused("longer rings", Parts { rings: other(rings_len + 4096), ..parts() }, &driver_state, &of_driver_state);
    type Change = (&'static str, fn(&mut E1000eDriverState));
    let changes: [Change; 6] = [
        ("slots of no length", |driver_state| driver_state.head.slot_len = 0),
        ("slots of half a page", |driver_state| driver_state.head.slot_len = 2048),
        ("billions of slots", |driver_state| driver_state.head.slots = u32::MAX),
        ("no slots", |driver_state| driver_state.head.slots = 0),
        ("not on a page", |driver_state| driver_state.head.rings_at += 8),
        ("beyond the last address", |driver_state| driver_state.head.rings_at = u64::MAX - 4095),
    ];
    for (what, change) in changes {
        let mut wrong = driver_state.clone();
        change(&mut wrong);
        refused(what, parts(), &wrong, &impossible);
    }
    let mut twice = driver_state.clone();
    twice.posted[0][0] = twice.posted[0][1];
    refused("a slot twice", parts(), &twice, &of_driver_state);
    // Card and memory are unaffected.
    let census = memory.arena().census();
    let adopted = NicMemory::adopt(parts(), &driver_state).expect("the right parts");
    assert_eq!(adopted.arena().census().peer, census.peer);
    assert_eq!(adopted.layout(), memory.layout());
    drop(memory);
    let arena = adopted.arena().clone();
    bench.put(Card::resume(bus, adopted, &driver_state).expect("the card goes on"), arena);
    let sent: Vec<_> = (0..100).map(numbered::<OnSim>).collect();
    assert_same(&bench.bring_in(&sent), &sent);
}
