//! A parked card goes on in another process, which receives the bus, the memory and the driver state over a socket.
#![allow(clippy::tests_outside_test_module, reason = "the whole file is tests")]

#[path = "conformance/mod.rs"]
#[allow(dead_code, reason = "a suite's parts for other tests")]
mod conformance;
mod qemu;

use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use conformance::frames::{SHORTEST, assert_same, frame};
use conformance::on_sim::OnSim;
use conformance::{Bench, PATIENCE, World, until};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::MemfdFlags;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};
use tasuki_net::nic::bus::VfioUser;
use tasuki_net::nic::bus::vfio_user::{Connection, TIMEOUT};
use tasuki_net::nic::e1000e::{DriverState as E1000eDriverState, E1000e};
use tasuki_net::nic::{DriverState, Nic, NicMemory, NicOptions, Parked, Parts, PartsError};
use tasuki_net::port::{Armed, Burst, Port};
use tasuki_shm::region::{Pages, Region, RegionError};

type Card = E1000e<VfioUser>;

/// Environment variable that is set in the other process.
const ROLE: &str = "TASUKI_ANOTHER_PROCESS";

/// Header before the driver state: the limits agreed on the connection, and the number of frames the sender has
/// passed on.
type Words = [u32; 4];

/// Hands a parked card over: its connection and its memory as descriptors, its driver state as bytes.
fn give(socket: &mut UnixStream, (bus, memory, driver_state): Parked<Card>, passed: u32) {
    let Connection { socket: way, fds_max, transfer_max, io_fds } =
        bus.into_connection().expect("the connection stands");
    let Parts { rings, frames, ledger } = memory.parts().expect("descriptors are free");
    let words: Words = [fds_max, transfer_max, io_fds.into(), passed];
    let bytes = words.map(u32::to_ne_bytes).concat();
    let fds = [way.as_fd(), rings.as_fd(), frames.as_fd(), ledger.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)), "four descriptors fit");
    let sent = rustix::net::sendmsg(&*socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL);
    assert_eq!(sent, Ok(bytes.len()));
    socket.write_all(driver_state.bytes()).expect("the other process reads");
}

/// Takes a card over and resumes it; returns the number of frames that the giver has passed on.
fn take(socket: &mut UnixStream) -> (Card, tasuki_shm::arena::Arena, u32) {
    let mut bytes = [0; size_of::<Words>()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let into = &mut [IoSliceMut::new(&mut bytes)];
    let got = rustix::net::recvmsg(&*socket, into, &mut control, RecvFlags::CMSG_CLOEXEC).expect("a message");
    assert_eq!(got.bytes, size_of::<Words>());
    let mut fds = control.drain().flat_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => fds.collect::<Vec<OwnedFd>>(),
        _ => Vec::new(),
    });
    let mut fd = || fds.next().expect("four descriptors");
    let (way, rings, frames, ledger) = (fd(), fd(), fd(), fd());
    let word = |i: usize| u32::from_ne_bytes(*bytes[4 * i..].first_chunk().expect("four words"));
    let mut driver_state = vec![0; E1000eDriverState::LEN];
    socket.read_exact(&mut driver_state).expect("a driver state follows");
    let driver_state = E1000eDriverState::read(&driver_state).expect("the driver state is one of ours");
    let connection = Connection { socket: way, fds_max: word(0), transfer_max: word(1), io_fds: word(2) == 1 };
    let bus = VfioUser::from_connection(connection, TIMEOUT).expect("the device is there");
    let memory = NicMemory::adopt(Parts { rings, frames, ledger }, &driver_state)
        .expect("the memory is what the driver state says");
    let arena = memory.arena().clone();
    (Card::resume(bus, memory, &driver_state).expect("the card goes on"), arena, word(3))
}

/// Plays the other process: sends back all frames until it is asked for the card.
fn other_process() {
    let mut socket = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned().expect("a descriptor is free"));
    let (mut nic, _, mut passed) = take(&mut socket);
    let mut burst = Burst::new();
    loop {
        let came = if burst.is_empty() { nic.receive(&mut burst).expect("the card works") } else { 0 };
        passed += u32::try_from(came).expect("a burst");
        let went = nic.transmit(&mut burst).expect("the card works");
        if came + went > 0 || !burst.is_empty() {
            continue;
        }
        if ready([socket.as_fd()], 0) {
            // One byte asks for the card; the end of the socket ends this process.
            socket.read_exact(&mut [0]).expect("the first process lives");
            break;
        }
        if nic.arm().expect("the card works") == Armed::Idle {
            ready([nic.fd(), socket.as_fd()], PATIENCE.as_secs());
        }
    }
    give(&mut socket, nic.park().expect("the card stops"), passed);
}

/// Returns whether any of `fds` becomes readable within `seconds`.
fn ready<const N: usize>(fds: [BorrowedFd<'_>; N], seconds: u64) -> bool {
    let mut fds = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
    let limit = Timespec { tv_sec: seconds.try_into().expect("seconds"), tv_nsec: 0 };
    rustix::event::poll(&mut fds, Some(&limit)).is_ok_and(|ready| ready > 0)
}

/// Process that the test ends.
struct Other(Child);

impl Drop for Other {
    fn drop(&mut self) {
        // The process has ended already, unless the test failed.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts the other process; returns it with the socket to it.
fn start_other(test: &str) -> (Other, UnixStream) {
    let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
    ours.set_read_timeout(Some(PATIENCE)).expect("a timeout above zero");
    let mut command = Command::new(std::env::current_exe().expect("this test"));
    command.args(["--exact", test, "--nocapture"]).env(ROLE, "1");
    command.stdin(Stdio::from(OwnedFd::from(theirs))).stdout(Stdio::null());
    (Other(command.spawn().expect("this test can be started again")), ours)
}

fn numbered(number: u32) -> Vec<u8> {
    frame(<OnSim>::MAC, number, SHORTEST + number as usize % 1000)
}

#[test]
fn a_card_goes_to_another_process_and_back_under_traffic_without_a_loss() {
    if std::env::var_os(ROLE).is_some() {
        return other_process();
    }
    let Some(mut bench) = Bench::<OnSim>::start(&NicOptions { ring: 64, ..NicOptions::default() }) else { return };
    let send = bench.world.sender();
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let sender = std::thread::spawn(move || {
        (0..).take_while(|_| !stopped.load(Relaxed)).map(|number| send(&numbered(number))).count()
    });
    let mut next = 0;
    let mut check = |frames: Vec<Vec<u8>>| {
        for frame in frames {
            assert_same(&[frame], &[numbered(next)]);
            next += 1;
        }
        next
    };
    for _ in 0..3 {
        let mut passed = 0;
        (0..20).for_each(|_| passed = check(bench.receive()));
        let (mut other, mut socket) =
            start_other("a_card_goes_to_another_process_and_back_under_traffic_without_a_loss");
        let parked = bench.take().park().expect("the card stops");
        give(&mut socket, parked, passed);
        // Frames that the other process received come back by the wire, and follow those that we received.
        while check(bench.world.take(PATIENCE).into_iter().collect()) < passed + 500 {}
        socket.write_all(&[0]).expect("the other process reads");
        let taker = std::thread::spawn(move || take(&mut socket));
        // The other process gives no less than it took, so the wire must be emptied meanwhile.
        until("the card", || {
            check(bench.world.take(Duration::from_millis(1)).into_iter().collect());
            taker.is_finished().then_some(())
        });
        let (nic, arena, passed) = taker.join().expect("the card comes back");
        bench.put(nic, arena);
        while check(Vec::new()) < passed {
            check(bench.world.take(PATIENCE).into_iter().collect());
        }
        assert!(other.0.wait().expect("our own child").success(), "the other process is content");
        let census = bench.arena().census();
        assert!(census.peer <= 2 * 64 && census.owner == 0, "{census:?}");
    }
    stop.store(true, Relaxed);
    while !sender.is_finished() {
        check(bench.poll());
    }
    let sent = u32::try_from(sender.join().expect("the sender sends")).expect("some thousands");
    let all = check(bench.bring_in(&[numbered(sent)]));
    assert_eq!(all, sent + 1, "each frame came, once");
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
    let sent: Vec<_> = (0..100).map(numbered).collect();
    assert_same(&bench.bring_in(&sent), &sent);
}
