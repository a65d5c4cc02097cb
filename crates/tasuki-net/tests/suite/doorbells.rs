//! Registers of a vfio-user device that are written by stores to memory: their order with messages, and whose stores
//! count.

use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use tasuki_net::nic::bus::vfio_user::{TIMEOUT, UserRegisters};
use tasuki_net::nic::bus::{Bus, Registers, VfioUser};
use tasuki_sim::e1000e::{Device, Options};
use tasuki_sim::served::Served;
use tasuki_sim::vfio_user::{Server, Turn};
use tasuki_sim::wire::Nowhere;

// Of the 82574L, by the names of its data sheet (sections 10.2.2, 10.2.5 and 10.2.6).
const CTRL: u32 = 0x0000;
const RST: u32 = 1 << 26;
const RDTR: u32 = 0x2820;
const RDT: u32 = 0x2818;
const TDT: u32 = 0x3818;

/// A card that moves, and reads messages, only when the test lets it.
struct Bench {
    served: Served<Nowhere>,
    server: Server,
}

impl Bench {
    fn new() -> (Self, OwnedFd) {
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        let served = Served::new(Device::new(Options::default()), Nowhere::default());
        (Bench { served, server: Server::over(ours).unwrap() }, theirs)
    }

    /// Executes `act`, which waits for answers, while the card reads messages.
    fn hearing<T: Send>(&mut self, act: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let acting = scope.spawn(act);
            while !acting.is_finished() {
                self.hear();
                std::thread::yield_now();
            }
            acting.join().unwrap()
        })
    }

    fn hear(&mut self) {
        while self.server.turn(&mut self.served).unwrap() == Turn::Busy {}
    }

    fn met(&mut self, socket: OwnedFd) -> (VfioUser, UserRegisters) {
        self.hearing(|| {
            let mut bus = VfioUser::meet(socket, TIMEOUT).unwrap();
            let registers = bus.registers(0).unwrap();
            (bus, registers)
        })
    }

    /// Returns the tails of the first receive ring and of the first transmit ring, without a message.
    fn tails(&mut self) -> (u32, u32) {
        self.served.step();
        let [receive, _, transmit, _] = self.served.card().tails();
        (receive, transmit)
    }
}

#[test]
fn a_doorbell_needs_no_message() {
    let (mut bench, socket) = Bench::new();
    let (_bus, registers) = bench.met(socket);
    for (value, other) in [(7, 1), (0, 2), (7, 0)] {
        registers.write32(RDT, value);
        registers.write32(TDT, other);
        assert_eq!(bench.tails(), (value, other));
    }
    assert_eq!(bench.hearing(|| (registers.read32(RDT), registers.read32(TDT))), (7, 0));
}

#[test]
fn a_doorbell_does_not_overtake_a_message() {
    let (mut bench, socket) = Bench::new();
    let (_bus, registers) = bench.met(socket);
    registers.write32(RDTR, 5);
    registers.write32(RDT, 9);
    assert_eq!(bench.tails(), (0, 0), "it follows by message, and nobody has heard that yet");
    bench.hear();
    assert_eq!(bench.tails(), (9, 0));
    registers.write32(RDT, 10);
    assert_eq!(bench.tails(), (9, 0), "whether the first message was heard is not known");
    assert_eq!(bench.hearing(|| registers.read32(RDTR)), 5);
    assert_eq!(bench.tails(), (10, 0));
    // Older values in the memory must not undo the messages' values, and storing the same value must count again.
    registers.write32(RDT, 9);
    assert_eq!(bench.tails(), (9, 0));
}

#[test]
fn a_message_does_not_overtake_a_doorbell() {
    let (mut bench, socket) = Bench::new();
    let (_bus, registers) = bench.met(socket);
    registers.write32(RDT, 3);
    assert_eq!(bench.hearing(|| registers.read32(RDT)), 3, "the card has not moved since");
}

#[test]
fn a_reset_takes_the_doorbells_back_as_well() {
    let (mut bench, socket) = Bench::new();
    let (mut bus, registers) = bench.met(socket);
    registers.write32(RDT, 8);
    bench.hearing(|| {
        registers.write32(CTRL, RST);
        while registers.read32(CTRL) & RST != 0 {}
    });
    assert_eq!(bench.tails(), (0, 0));
    registers.write32(RDT, 8);
    assert_eq!(bench.tails(), (8, 0), "the same value as before the reset");
    bench.hearing(|| {
        bus.reset().unwrap();
        // The bus enables access to the card's memory.
        bus.registers(0).unwrap();
    });
    assert_eq!(bench.tails(), (0, 0));
}

#[test]
fn who_was_replaced_rings_in_vain() {
    let (mut bench, socket) = Bench::new();
    let (bus, old) = bench.met(socket);
    let connection = bus.into_connection().unwrap();
    let (_bus, new) = bench.hearing(|| {
        let mut bus = VfioUser::from_connection(connection, TIMEOUT).unwrap();
        let new = bus.registers(0).unwrap();
        (bus, new)
    });
    old.write32(RDT, 99);
    new.write32(TDT, 4);
    assert_eq!(bench.tails(), (0, 4));
}

#[test]
fn who_is_gone_rings_in_vain() {
    let (mut bench, socket) = Bench::new();
    let copy = socket.try_clone().unwrap();
    let (bus, old) = bench.met(socket);
    old.write32(RDT, 6);
    drop(bus.into_connection().unwrap());
    drop(copy);
    while !matches!(bench.server.turn(&mut bench.served).unwrap(), Turn::Gone(_) | Turn::Over) {}
    assert_eq!(bench.tails(), (6, 0), "what it said before it went was said");
    old.write32(RDT, 99);
    assert_eq!(bench.tails(), (6, 0));
}

#[test]
fn two_handles_of_one_bus_ring_the_same_doorbells() {
    let (mut bench, socket) = Bench::new();
    let (mut bus, first) = bench.met(socket);
    let second = bench.hearing(|| bus.registers(0).unwrap());
    first.write32(RDT, 1);
    second.write32(TDT, 2);
    assert_eq!(bench.tails(), (1, 2));
}
