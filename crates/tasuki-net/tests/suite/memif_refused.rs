//! Broken and malicious memif clients: each is sent away with a reason, and others notice nothing.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, SealFlags};
use tasuki_net::endpoint::memif::client::HANDSHAKE;
use tasuki_net::endpoint::memif::control::Terms;
use tasuki_net::port::Armed;

use crate::memif::client::{
    ADD_REGION, ADD_RING, CONNECT, CONNECTED, Channel, Client, HELLO, Shape, add_region, add_ring, eventfd, init,
    memory, message,
};
use crate::memif::port::{OTHER, PORT, SECRET, World, frame_to};
use crate::wait::readable;
use tasuki_testing::polled;

const SHAPE: Shape = Shape { log2: 4, buffer: 2048 };
const GOOD: (u16, u32, u8) = (0x0200, 7, 0);

fn world() -> World {
    World::with(1, 512, Terms::new(7, SECRET, "a test").unwrap())
}

type Step<'a> = (Vec<u8>, Vec<BorrowedFd<'a>>);

/// Sends these messages in turn after HELLO; returns the reason for which the server sends the client away.
fn told(world: &mut World, steps: &[Step<'_>]) -> String {
    let channel = Channel::connect(&world.path());
    world.turn();
    assert_eq!(channel.hear().expect("a greeting").0, HELLO);
    for (message, with) in steps {
        channel.send(message, with);
        world.turn();
    }
    let reason = channel.reason().unwrap_or_else(|| panic!("it was not sent away: {:?}", world.node.endpoint.clients));
    world.turn();
    assert_eq!(world.node.endpoint.clients.why.map(|why| why.to_string()).as_deref(), Some(reason.as_str()), "whole");
    // The next client finds the server as it was.
    let next = Channel::connect(&world.path());
    world.turn();
    assert_eq!(next.hear().expect("a greeting").0, HELLO);
    drop(next);
    world.turn();
    reason
}

fn known<'a>(steps: &[Step<'a>]) -> Vec<Step<'a>> {
    let mut all = vec![(init(GOOD.0, GOOD.1, GOOD.2, SECRET), vec![])];
    all.extend(steps.iter().cloned());
    all
}

#[test]
fn who_does_not_introduce_itself_rightly_is_told_what_to_change() {
    let mut world = world();
    let mut told = |bytes: Vec<u8>| told(&mut world, &[(bytes, vec![])]);
    assert!(told(init(0x0200, 7, 0, "no secret")).contains("secret=..."));
    assert!(told(init(0x0200, 7, 0, "")).contains("the secret is wrong"));
    assert!(told(init(0x0200, 8, 0, SECRET)).contains("connect with id=7"));
    assert!(told(init(0x0100, 7, 0, SECRET)).contains("memif 1.0 is not spoken here, but 2.0"));
    assert!(told(init(0x0200, 7, 1, SECRET)).contains("mode 1 is not served, but Ethernet"));
    assert!(told(message(CONNECT, &[])).contains("message 6 is not in its turn"));
    assert!(told(message(999, &[])).contains("message 999"));
    assert!(told(vec![3; 127]).contains("128 bytes, and this one 127"));
    assert!(told(vec![3; 200]).contains("128 bytes"));
}

#[test]
fn memory_that_could_vanish_or_is_not_there_is_refused() {
    let mut world = world();
    let sealed = memory(8192, SealFlags::SHRINK);
    let unsealed = memory(8192, SealFlags::empty());
    let grown = memory(8192, SealFlags::GROW | SealFlags::SEAL);
    let read_only = memory(8192, SealFlags::SHRINK | SealFlags::WRITE);
    let file: OwnedFd = tempfile::tempfile().unwrap().into();
    let sealed = sealed.as_fd();
    let cases: [(Step<'_>, &str); 11] = [
        ((add_region(0, 8192), vec![unsealed.as_fd()]), "not sealed against shrinking; seal it (DPDK: zero-copy=no"),
        ((add_region(0, 8192), vec![grown.as_fd()]), "not sealed"),
        ((add_region(0, 8192), vec![read_only.as_fd()]), "could not be mapped to be written"),
        ((add_region(0, 8193), vec![sealed]), "region 0 has fewer bytes"),
        ((add_region(0, u64::MAX), vec![sealed]), "regions of more than 1024 MiB"),
        ((add_region(0, 0), vec![sealed]), "fewer bytes"),
        ((add_region(1, 8192), vec![sealed]), "region 1 is not the next"),
        ((add_region(0, 8192), vec![]), "came without a memory file"),
        ((add_region(0, 8192), vec![file.as_fd()]), "no memory file"),
        ((add_region(0, 8192), vec![sealed, sealed]), "more descriptors"),
        ((message(ADD_REGION + 100, &[]), vec![sealed]), "more descriptors"),
    ];
    for (step, words) in cases {
        let why = told(&mut world, &known(&[step]));
        assert!(why.contains(words), "{words:?} was expected, and it was told: {why}");
    }
    let step = (add_region(0, 8192), vec![sealed; 8]);
    assert!(told(&mut world, &known(&[step])).contains("more descriptors"), "however many they are");
    let many: Vec<_> = (0..17).map(|i| (add_region(i, 8192), vec![sealed])).collect();
    assert!(told(&mut world, &known(&many)).contains("region 16 is not the next, or one more than 16"));
    let large = memory(1 << 30, SealFlags::SHRINK);
    let both = [(add_region(0, 1 << 30), vec![large.as_fd()]), (add_region(1, 8192), vec![sealed])];
    assert!(told(&mut world, &known(&both)).contains("1024 MiB"), "what they have together counts");
}

#[test]
fn memory_on_huge_pages_is_refused() {
    let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    let Ok(huge) = rustix::fs::memfd_create("huge", flags) else {
        println!("skipped: this kernel has no huge pages");
        return;
    };
    rustix::fs::ftruncate(&huge, 2 << 20).unwrap();
    rustix::fs::fcntl_add_seals(&huge, SealFlags::SHRINK).unwrap();
    let why = told(&mut world(), &known(&[(add_region(0, 2 << 20), vec![huge.as_fd()])]));
    assert!(why.contains("lies on huge pages; have small ones (DPDK: zero-copy=no"), "{why}");
}

#[test]
fn rings_that_lie_anywhere_else_than_in_their_region_are_refused() {
    let mut world = world();
    let (memory, bell) = (memory(8192, SealFlags::SHRINK), eventfd());
    let region: Step<'_> = (add_region(0, 8192), vec![memory.as_fd()]);
    let ring_len = 128 + 16 * 16;
    let (_read, pipe) = rustix::pipe::pipe().unwrap();
    let ring = |ring: Vec<u8>| (ring, vec![bell.as_fd()]);
    let cases: [(Step<'_>, &str); 12] = [
        (ring(add_ring(true, 0, 1, 0, 4, 0)), "the transmit ring lies in region 1, which was not added"),
        (ring(add_ring(false, 0, 0xffff, 0, 4, 0)), "the receive ring lies in region 65535"),
        (ring(add_ring(true, 0, 0, 8192 - ring_len + 16, 4, 0)), "ends outside of its region"),
        (ring(add_ring(true, 0, 0, 0xffff_fff0, 4, 0)), "ends outside of its region"),
        (ring(add_ring(true, 0, 0, 0, 14, 0)), "ends outside of its region"),
        (ring(add_ring(true, 0, 0, 0, 15, 0)), "larger than 2^14; make rsize smaller"),
        (ring(add_ring(true, 0, 0, 0, 255, 0)), "larger than 2^14"),
        (ring(add_ring(true, 0, 0, 8, 4, 0)), "multiple of 16"),
        (ring(add_ring(true, 1, 0, 0, 4, 0)), "transmit ring 1: one ring each way is served (DPDK: --rxq=1"),
        (ring(add_ring(true, 0, 0, 0, 4, 8)), "private headers"),
        ((add_ring(true, 0, 0, 0, 4, 0), vec![]), "without an eventfd"),
        ((add_ring(true, 0, 0, 0, 4, 0), vec![pipe.as_fd()]), "without an eventfd"),
    ];
    for (step, words) in cases {
        let why = told(&mut world, &known(&[region.clone(), step]));
        assert!(why.contains(words), "{words:?} was expected, and it was told: {why}");
    }
    let twice = ring(add_ring(true, 0, 0, 0, 4, 0));
    assert!(told(&mut world, &known(&[region.clone(), twice.clone(), twice.clone()])).contains("came twice"));
    let alone = (message(CONNECT, &[]), vec![]);
    let why = told(&mut world, &known(&[region.clone(), twice.clone(), alone.clone()]));
    assert!(why.contains("there is no receive ring"), "{why}");
    let other = ring(add_ring(false, 0, 0, 4096, 4, 0));
    let why = told(&mut world, &known(&[region.clone(), twice, other, alone]));
    assert!(why.contains("does not begin with memif's cookie"), "{why}");
    let before = told(&mut world, &[(message(ADD_RING, &[]), vec![bell.as_fd()])]);
    assert!(before.contains("message 5 is not in its turn"), "{before}");
}

#[test]
fn a_second_client_is_told_that_there_is_one_and_the_first_goes_on() {
    let mut world = World::new(1);
    let path = world.path();
    let mut first = world.connect(SHAPE);
    for _ in 0..3 {
        let second = Channel::connect(&path);
        world.turn();
        assert!(second.reason().expect("it is told").contains("id 0 has a client already"));
    }
    assert!(first.send(&frame_to(OTHER, PORT, 1, 60)));
    world.settle();
    assert_eq!(world.at_other(OTHER).len(), 1);
}

#[test]
fn who_connects_and_says_nothing_does_not_keep_others_out() {
    let mut world = World::new(1);
    let idle = Channel::connect(&world.path());
    world.turn();
    world.node.tick(Instant::now() + HANDSHAKE);
    assert!(idle.reason().expect("it is told").contains("too long"));
    world.connect(SHAPE);
    // A client that has finished the handshake does not count as late.
    world.node.tick(Instant::now() + HANDSHAKE);
    assert_eq!(world.node.endpoint.clients.attached, 1);
}

/// Lets a connected client do something; returns the reason for which the server sends it away.
fn caught(what: impl FnOnce(&mut Client)) -> String {
    let mut world = World::new(1);
    let mut client = world.connect(SHAPE);
    assert!(client.send(&frame_to(OTHER, PORT, 1, 3000)), "before it does it");
    world.settle();
    what(&mut client);
    let memory = client.read(0, usize::try_from(SHAPE.len()).unwrap());
    world.settle();
    assert!(world.send(OTHER, &frame_to(PORT, OTHER, 1, 3000)));
    world.settle();
    let reason = client.channel.reason().expect("it is sent away");
    assert_eq!(world.node.endpoint.client(), None);
    // Except for the flags of the ring that the server reads.
    assert!(client.read(6, memory.len() - 6) == memory[6..], "something was written for it");
    // The next client is served, and frames sent before have arrived.
    let mut next = world.connect(SHAPE);
    assert!(next.send(&frame_to(OTHER, PORT, 2, 60)));
    world.settle();
    assert_eq!(world.at_other(OTHER), [frame_to(OTHER, PORT, 1, 3000), frame_to(OTHER, PORT, 2, 60)]);
    reason
}

#[test]
fn a_head_more_than_a_ring_ahead_ends_it() {
    let over = caught(|client| client.set_head(true, client.head(true).wrapping_add(17)));
    assert!(over.contains("the transmit ring's head is more than a whole ring ahead"), "{over}");
    let over = caught(|client| client.set_head(false, client.head(false).wrapping_add(1)));
    assert!(over.contains("the receive ring's head"), "{over}");
    let back = caught(|client| client.set_head(true, client.head(true).wrapping_sub(1)));
    assert!(back.contains("the transmit ring's head"), "{back}");
}

#[test]
fn a_descriptor_that_names_what_is_not_the_clients_ends_it() {
    let len = u32::try_from(SHAPE.len()).unwrap();
    let cases: [(u16, u32, u32, &str); 6] = [
        (1, 60, 0, "names region 1, which was not added"),
        (0xffff, 60, 0, "names region 65535"),
        (0, 60, len - 59, "ends outside of its region"),
        (0, 60, u32::MAX, "ends outside of its region"),
        // In 32 bits their sum would overflow to a small number.
        (0, u32::MAX, 100, "ends outside of its region"),
        (0, u32::MAX - 10, 60, "ends outside of its region"),
    ];
    for (region, size, offset, words) in cases {
        let why = caught(|client| {
            let head = client.head(true);
            client.describe(true, head.into(), 0, region, size, offset);
            client.set_head(true, head.wrapping_add(1));
        });
        assert!(why.contains(words) && why.contains("transmit"), "{words:?} was expected: {why}");
        let why = caught(|client| client.describe(false, 0, 0, region, size, offset));
        assert!(why.contains(words) && why.contains("receive"), "{words:?} was expected: {why}");
    }
    // The same for the second of a frame's buffers: the server checks all before it writes any.
    let why = caught(|client| client.describe(false, 1, 0, 3, 2048, 0));
    assert!(why.contains("names region 3"), "{why}");
}

#[test]
fn a_chain_that_does_not_end_ends_it() {
    let endless = caught(|client| {
        let head = client.head(true);
        (0..16).for_each(|i| client.describe(true, u32::from(head) + i, 1, 0, 60, 8192));
        client.set_head(true, head.wrapping_add(16));
    });
    assert!(endless.contains("a chain in the transmit ring does not end"), "{endless}");
    let open = caught(|client| {
        let head = client.head(true);
        client.describe(true, head.into(), 1, 0, 60, 8192);
        client.set_head(true, head.wrapping_add(1));
    });
    assert!(open.contains("does not end"), "{open}");
    let again = caught(|client| client.channel.send(&message(CONNECT, &[]), &[]));
    assert!(again.contains("message 6 is not in its turn"), "{again}");
}

#[test]
fn a_chain_longer_than_is_served_ends_it_in_a_ring_of_any_size() {
    let mut world = World::new(1);
    let shape = Shape { log2: 8, buffer: 64 };
    let client = world.connect(shape);
    for slot in 0..65 {
        client.describe(true, slot, u16::from(slot < 64), 0, 64, shape.buffer_at(true, slot));
    }
    client.set_head(true, 65);
    world.settle();
    assert!(client.channel.reason().expect("it is told").contains("longer than is served"));
}

#[test]
fn descriptors_that_were_read_go_on_no_more() {
    // DPDK's client (22.11) clears NEXT in none but the first.
    let mut world = World::new(1);
    let mut client = world.connect(SHAPE);
    assert!(client.send(&frame_to(OTHER, PORT, 1, 9000)));
    world.settle();
    for slot in 0..5 {
        let flags = client.read(SHAPE.ring_at(true) + 128 + 16 * slot, 2);
        assert_eq!(flags, [0, 0], "descriptor {slot}");
    }
}

#[test]
fn a_client_that_was_sent_away_wakes_nobody() {
    let mut world = World::new(1);
    let mut client = world.connect(SHAPE);
    client.channel.send(&message(CONNECT, &[]), &[]);
    world.settle();
    assert!(client.channel.reason().is_some());
    assert!(client.send(&frame_to(OTHER, PORT, 1, 60)), "it goes on as if nothing had been");
    while world.turn() > 0 || world.node.arm() == Armed::Busy {}
    assert!(!readable(&world.node.source().unwrap(), Duration::ZERO), "its bell is not ours any more");
}

/// Lets a client lie while its worker is replaced; returns the reason for which it is sent away, if it is.
fn lied(lie: impl FnOnce(&Client)) -> Option<String> {
    let mut world = World::new(2);
    let mut client = world.connect(SHAPE);
    for number in 0..3 {
        assert!(client.send(&frame_to(OTHER, PORT, number, 60)));
    }
    world.settle();
    assert_eq!(world.at_other(OTHER).len(), 3);
    lie(&client);
    world.succeed(false);
    world.settle();
    let reason = client.channel.reason();
    assert_eq!(reason.is_some(), world.node.endpoint.client().is_none());
    assert_eq!(reason.is_some(), client.channel.is_closed(), "for whoever else has it, too");
    // Other nodes notice nothing, and the next client is served.
    let other = world.net.node(OTHER.into());
    assert!(other.send(2, &frame_to(2, OTHER, 7, 60)).is_ok());
    other.flush();
    assert_eq!(world.at_other(2), [frame_to(2, OTHER, 7, 60)]);
    world.see_off(client);
    world.at_other(OTHER);
    let mut next = world.connect(SHAPE);
    assert!(next.send(&frame_to(OTHER, PORT, 9, 60)));
    world.settle();
    assert_eq!(world.at_other(OTHER), [frame_to(OTHER, PORT, 9, 60)]);
    reason
}

#[test]
fn a_client_that_lies_to_a_successor_is_sent_away_or_loses_frames_of_its_own() {
    let tail = |client: &Client, to_server: bool, by: u16| {
        let tail = client.tail(to_server).wrapping_add(by);
        client.write(SHAPE.ring_at(to_server) + 64, &tail.to_le_bytes());
    };
    let ahead = lied(|client| tail(client, true, 1)).expect("it is sent away");
    assert!(ahead.contains("the transmit ring's head is more than a whole ring ahead"), "{ahead}");
    let ahead = lied(|client| tail(client, false, 17)).expect("it is sent away");
    assert!(ahead.contains("the receive ring's head"), "{ahead}");
    let cookie = lied(|client| client.write(SHAPE.ring_at(false), &[1])).expect("it is sent away");
    assert!(cookie.contains("does not begin with memif's cookie"), "{cookie}");
    assert_eq!(lied(|client| tail(client, true, 0_u16.wrapping_sub(3))), None, "that is its own to say");
    assert_eq!(lied(|client| tail(client, false, 5)), None, "five of its buffers are not filled");
    assert!(lied(|client| client.channel.send(&message(CONNECT, &[]), &[])).is_some());
}

#[test]
fn a_client_in_its_handshake_is_told_to_connect_again_when_the_worker_is_replaced() {
    let mut world = World::new(1);
    let client = Client::begin(&world.path(), SHAPE, SECRET, || {
        world.turn();
    });
    world.succeed(true);
    let reason = client.channel.reason().expect("it is sent away");
    assert!(reason.contains("another worker serves this port from now on"), "{reason}");
}

#[test]
fn a_client_that_dies_in_its_handshake_leaves_nothing() {
    let mut world = World::new(1);
    let path = world.path();
    for number in 1..=10 {
        drop(Client::begin(&path, SHAPE, SECRET, || {
            world.turn();
        }));
        polled("the node notices", || {
            world.turn();
            (world.node.endpoint.clients.left == number).then_some(())
        });
    }
    assert_eq!((world.node.endpoint.clients.left, world.node.endpoint.clients.attached), (10, 0));
    let channel = Channel::connect(&path);
    polled("a greeting", || {
        world.turn();
        channel.hear().filter(|(kind, _)| *kind != CONNECTED)
    });
}
