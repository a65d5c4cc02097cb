//! Several processes send requests on one connection to a card's server, and are killed while they do: the others go
//! on.

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use tasuki_net::nic::bus::vfio_user::{BarTwin, Connection, TIMEOUT, Twin, VfioUser};
use tasuki_net::nic::bus::{Bus, Iova, Part, Registers};
use tasuki_shm::region::{Pages, Region};
use tasuki_sim::e1000e::{Device, Options};
use tasuki_sim::served::Served;
use tasuki_sim::vfio_user::Server;
use tasuki_sim::wire::Nowhere;

use crate::process::{self, Other};

/// Number of kills, if not the default of 200.
const KILLS: &str = "TASUKI_KILLS";

const TEST: &str = "shared_connection::whoever_is_killed_while_it_asks_leaves_the_connection_whole";

/// Registers of the multicast table, which keep their values: each process has one. The card's receive address is
/// the same for all.
const MTA: u32 = 0x5200;
const RAL: u32 = 0x5400;
const BAR_LEN: u64 = 128 << 10;
/// Where the processes to kill map memory, and unmap it again.
const MAPPED_AT: Iova = Iova(1 << 40);

/// Sends a request of each kind, and checks the replies.
fn ask(bus: &mut VfioUser, registers: &impl Registers, own: u32, round: u32, expected: (u32, u32)) {
    let at = MTA + 4 * own;
    registers.write32(at, round);
    assert_eq!(registers.read32(at), round, "what was written is there");
    assert_eq!(registers.read32(RAL), expected.0, "the card's address");
    let around = registers.read_around([at, RAL, at], 1, &[(at, !round)]);
    assert_eq!(around, [round, expected.0, !round], "the same, written and asked in one go");
    assert_eq!(bus.read_config(0).expect("the server answers"), expected.1, "who it is");
}

/// Runs as one of the processes to kill: sends requests without end.
fn asker(own: u32) {
    let mut socket = process::socket();
    let (bytes, fds) = process::hear(&socket).expect("a connection");
    let [connection, lock] = fds.try_into().expect("two descriptors");
    let connection = Connection { socket: connection, fds_max: 16, transfer_max: 1 << 20, io_fds: true };
    let bars = vec![BarTwin { index: 0, len: BAR_LEN, doorbells: None, places: Vec::new() }];
    let twin = Twin { connection, lock, config_len: 4096, can_reset: true, bars, vectors: Vec::new() };
    let mut bus = VfioUser::from_twin(twin, TIMEOUT).expect("a socket and a lock");
    let registers = bus.registers(0).expect("the BAR is known");
    let memory = Region::create("asker", 4096, Pages::Small).expect("a page");
    let word = |i: usize| u32::from_ne_bytes(*bytes[4 * i..].first_chunk().expect("two words"));
    let expected = (word(0), word(1));
    socket.write_all(&[0]).expect("the first process lives");
    for round in own.. {
        ask(&mut bus, &registers, own, round, expected);
        let at = Iova(MAPPED_AT.0 + u64::from(own) * 4096);
        let [first, again] = bus.map_each([Part::all(&memory, at); 2]).expect("the server answers");
        first.expect("nothing is there");
        again.expect_err("it is there already");
        bus.unmap_dma(Iova(MAPPED_AT.0 + u64::from(own) * 4096), 4096).expect("it is there");
    }
}

fn start(own: u32, bus: &VfioUser, expected: (u32, u32)) -> Other {
    let asker = Other::start(TEST, &own.to_string(), None);
    let twin = bus.twin().expect("descriptors are free");
    let bytes = [expected.0, expected.1].map(u32::to_ne_bytes).concat();
    process::say(&asker.socket, &bytes, &[twin.connection.socket.as_fd(), twin.lock.as_fd()]);
    asker
}

/// Runs two processes that send requests, kills them in turn, and sends requests itself all the time. Returns the
/// number of replies whose process was dead.
fn kill_askers(socket: OwnedFd, kills: u32) -> u64 {
    let mut bus = VfioUser::meet(socket, TIMEOUT).expect("a server");
    let registers = bus.registers(0).expect("BAR 0");
    // Wait until the card has its address.
    let deadline = Instant::now() + Duration::from_secs(60);
    while registers.read32(RAL + 4) >> 31 == 0 {
        assert!(Instant::now() < deadline, "the card reads its address");
    }
    let expected = (registers.read32(RAL), bus.read_config(0).expect("the server answers"));
    let mut askers = [1, 2].map(|own| start(own, &bus, expected));
    let mut round = 0;
    for kill in 0..kills {
        let index = kill as usize % 2;
        let own = 1 + kill % 2;
        // It reports when it is ready, and then sends requests until it is killed, after a varying while.
        askers[index].socket.read_exact(&mut [0]).expect("it gets ready");
        for _ in 0..kill * 7 % 23 {
            round += 1;
            ask(&mut bus, &registers, 0, round, expected);
        }
        let asker = &mut askers[index].process.0;
        asker.kill().expect("our own child");
        let status = asker.wait().expect("our own child");
        assert_eq!(status.signal(), Some(9), "it asked until it was killed: {status}");
        round += 1;
        ask(&mut bus, &registers, 0, round, expected);
        // It may just have mapped it.
        let _ = bus.unmap_dma(Iova(MAPPED_AT.0 + u64::from(own) * 4096), 4096);
        askers[index] = start(own, &bus, expected);
    }
    drop(askers);
    ask(&mut bus, &registers, 0, 0, expected);
    bus.strays()
}

#[test]
fn whoever_is_killed_while_it_asks_leaves_the_connection_whole() {
    if let Some(own) = process::role() {
        return asker(own.parse().expect("a number"));
    }
    let kills = std::env::var(KILLS).ok().and_then(|kills| kills.parse().ok()).unwrap_or(200);
    let (ours, theirs) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).expect("sockets");
    let over = AtomicBool::new(false);
    let strays = std::thread::scope(|scope| {
        let driver = scope.spawn(|| {
            let strays = kill_askers(theirs, kills);
            over.store(true, Relaxed);
            strays
        });
        let mut served = Served::new(Device::new(Options::default()), Nowhere::default());
        let mut server = Server::over(ours).expect("a socket");
        served.serve(&mut server, |_| !over.load(Relaxed) && !driver.is_finished()).expect("the server serves");
        driver.join().expect("the connection stayed whole")
    });
    println!("{kills} were killed; {strays} answers were found that nobody waited for any more");
}
