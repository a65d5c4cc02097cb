//! A program with a memif on a VNI, as a client that follows the protocol's text.

pub mod client;
pub mod port;

use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use tasuki_net::port::Armed;

use crate::wait::readable;
use client::Shape;
use port::{OTHER, PORT, World, frame_to};

const SHAPE: Shape = Shape { log2: 6, buffer: 2048 };

#[test]
fn frames_cross_both_ways_whole_and_in_order() {
    let mut world = World::new(1);
    let mut client = world.connect(SHAPE);
    assert_eq!(world.node.endpoint.client().as_deref(), Some("a test's client"));
    for round in 0..40_u32 {
        // The positions go round the rings several times.
        let lens = (0..17).map(|i| 14 + (round as usize * 131 + i * 97) % 1600);
        let there: Vec<_> = (0..).zip(lens).map(|(i, len)| frame_to(OTHER, PORT, round * 17 + i, len)).collect();
        let back: Vec<_> = there.iter().map(|frame| frame_to(PORT, OTHER, round, frame.len())).collect();
        assert!(there.iter().all(|frame| client.send(frame)), "the ring has room");
        assert!(back.iter().all(|frame| world.send(OTHER, frame)));
        world.settle();
        assert!(world.at_other(OTHER) == there, "round {round}");
        assert!(client.receive() == back, "round {round}");
    }
    assert_eq!((world.node.taken, world.node.given), (40 * 17, 40 * 17));
    assert_eq!(world.node.dropped, tasuki_net::endpoint::Dropped::default());
}

#[test]
fn a_frame_longer_than_a_buffer_goes_in_several() {
    let mut world = World::new(1);
    let mut client = world.connect(SHAPE);
    for (number, len) in (0..).zip([2048, 2049, 4096, 9000, 9014, 65_549, 14, 15]) {
        let there = frame_to(OTHER, PORT, number, len);
        assert!(client.send(&there));
        let back = frame_to(PORT, OTHER, number, len);
        assert!(world.send(OTHER, &back));
        world.settle();
        assert!(world.at_other(OTHER) == [there], "{len} bytes to the other");
        assert!(client.receive() == [back], "{len} bytes to the client");
    }
}

#[test]
fn a_frame_that_no_chain_holds_is_dropped_and_counted() {
    let mut world = World::new(1);
    let mut client = world.connect(Shape { log2: 3, buffer: 512 });
    for len in [8 * 512, 8 * 512 + 1, 20_000, 60] {
        assert!(world.send(OTHER, &frame_to(PORT, OTHER, 1, len)));
        world.settle();
        let came: Vec<_> = client.receive().iter().map(Vec::len).collect();
        assert_eq!(came, if len > 8 * 512 { vec![] } else { vec![len] });
    }
    assert_eq!(world.node.dropped.too_long, 2);
    let mut small = World::new(1);
    let mut client = small.connect(Shape { log2: 8, buffer: 64 });
    assert!(small.send(OTHER, &frame_to(PORT, OTHER, 1, 64 * 64)));
    assert!(small.send(OTHER, &frame_to(PORT, OTHER, 2, 64 * 64 + 1)));
    small.settle();
    assert_eq!(client.receive(), [frame_to(PORT, OTHER, 1, 64 * 64)], "64 buffers make a chain at most");
    assert_eq!(small.node.dropped.too_long, 1);
}

#[test]
fn a_client_that_reads_nothing_loses_frames_of_its_own_alone() {
    let mut world = World::new(2);
    let mut client = world.connect(SHAPE);
    let mut sent = 0;
    let until = Instant::now() + Duration::from_secs(10);
    while world.node.dropped.no_buffer == 0 {
        sent += u32::from(world.send(OTHER, &frame_to(PORT, OTHER, sent, 100)));
        world.turn();
        assert!(Instant::now() < until, "what does not fit is dropped");
    }
    // The node does not wait for it; and frames pass in the other direction.
    assert!(client.send(&frame_to(2, PORT, 9, 100)));
    world.settle();
    assert_eq!(world.at_other(2), [frame_to(2, PORT, 9, 100)]);
    let came = client.receive();
    assert_eq!(came.len(), 64, "a ring full");
    assert!((0..).zip(&came).all(|(number, frame)| *frame == frame_to(PORT, OTHER, number, 100)));
    assert!(world.send(OTHER, &frame_to(PORT, OTHER, 1, 100)));
    world.settle();
    assert_eq!(client.receive().len(), 1, "it has room again");
}

#[test]
fn a_node_that_reads_nothing_has_a_client_wait_and_then_lose_frames_to_it_alone() {
    let mut world = World::new(2);
    let mut client = world.connect(SHAPE);
    let until = Instant::now() + Duration::from_secs(10);
    let mut sent = 0;
    while world.node.dropped.no_room == 0 {
        sent += u32::from(client.send(&frame_to(OTHER, PORT, sent, 100)));
        world.turn();
        assert!(Instant::now() < until, "it is not waited for without end");
    }
    assert!(client.send(&frame_to(2, PORT, 1, 100)));
    world.settle();
    assert_eq!(world.at_other(2), [frame_to(2, PORT, 1, 100)]);
    let came = world.at_other(OTHER);
    assert_eq!(came.len(), 256, "what its ring holds");
    assert!((0..).zip(&came).all(|(number, frame)| *frame == frame_to(OTHER, PORT, number, 100)));
}

#[test]
fn a_frame_for_several_reaches_all_and_one_for_nobody_is_counted() {
    let mut world = World::new(3);
    let mut client = world.connect(SHAPE);
    let mut to_all = frame_to(OTHER, PORT, 1, 3000);
    to_all[..6].fill(0xff);
    assert!(client.send(&to_all) && client.send(&frame_to(77, PORT, 1, 60)) && client.send(&[0; 13]));
    world.settle();
    for node in 1..=3 {
        assert_eq!(world.at_other(node), [to_all.as_slice()], "node {node}");
    }
    assert_eq!((world.node.dropped.nobody, world.node.dropped.length), (1, 1));
}

#[test]
fn a_client_leaves_and_comes_back_as_often_as_it_likes() {
    let mut world = World::new(1);
    let all = world.node.vni().pages_left();
    for round in 0..20_u32 {
        let mut client = world.connect(Shape { log2: 2 + u8::try_from(round % 3).unwrap(), buffer: 1024 });
        assert!(client.send(&frame_to(OTHER, PORT, round, 100)));
        assert!(world.send(OTHER, &frame_to(PORT, OTHER, round, 100)));
        world.settle();
        assert_eq!(world.at_other(OTHER), [frame_to(OTHER, PORT, round, 100)]);
        assert_eq!(client.receive(), [frame_to(PORT, OTHER, round, 100)]);
        world.see_off(client);
        assert!(world.send(OTHER, &frame_to(PORT, OTHER, round, 100)));
        world.settle();
    }
    let clients = world.node.endpoint.clients;
    assert_eq!((clients.attached, clients.left, clients.refused), (20, 20, 0));
    assert_eq!(world.node.dropped.away, 20, "frames for a client that is not there are not kept");
    let now = Instant::now();
    world.node.tick(now);
    world.node.tick(now + Duration::from_secs(1));
    world.node.tick(now + Duration::from_secs(2));
    assert_eq!(world.node.vni().pages_left(), all, "nothing of it is held");
}

/// Returns a frame as a kernel hands it over: a TCP segment over IPv4 with `len` bytes of payload.
fn segment(len: usize) -> Vec<u8> {
    let mut frame = frame_to(PORT, OTHER, 0, 54 + len);
    frame[12..14].copy_from_slice(&[8, 0]);
    let total = u16::try_from(40 + len).unwrap().to_be_bytes();
    let ip = [&[0x45, 0][..], &total, &[0, 7, 0x40, 0, 64, 6, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2]].concat();
    frame[14..34].copy_from_slice(&ip);
    frame[34..54].copy_from_slice(&[0, 80, 0, 90, 0, 0, 1, 0, 0, 0, 0, 1, 0x50, 0x10, 1, 0, 0, 0, 0, 0]);
    frame
}

/// Sends a frame with an offload header.
fn send_unfinished(world: &mut World, header: [u8; 10], frame: &[u8]) {
    let other = world.net.node(OTHER.into());
    let room = other.stage().expect("the pool has room");
    room[..10].copy_from_slice(&header);
    room[10..10 + frame.len()].copy_from_slice(frame);
    other.post_staged(PORT, 10 + frame.len()).expect("the ring has room");
    other.flush();
    world.settle();
}

#[test]
fn a_client_gets_finished_frames_alone() {
    let mut world = World::new(1);
    let mut client = world.connect(SHAPE);
    let big = segment(60_000);
    // NEEDS_CSUM, TCP over IPv4, 1448 bytes per segment, checksum at 34 + 16.
    let header = [1, 1, 54, 0, 0xa8, 5, 34, 0, 16, 0];
    send_unfinished(&mut world, header, &big);
    let came = client.receive();
    assert_eq!(came.len(), 60_000_usize.div_ceil(1448));
    assert!(came.iter().all(|frame| frame.len() <= 54 + 1448));
    let payload: Vec<u8> = came.iter().flat_map(|frame| &frame[54..]).copied().collect();
    assert!(payload == big[54..]);
    let summed = |frame: &[u8]| {
        let ip = smoltcp::wire::Ipv4Packet::new_checked(&frame[14..]).unwrap();
        let tcp = smoltcp::wire::TcpPacket::new_checked(ip.payload()).unwrap();
        ip.verify_checksum() && tcp.verify_checksum(&ip.src_addr().into(), &ip.dst_addr().into())
    };
    assert!(came.iter().all(|frame| summed(frame)), "all checksums are right");
    // Not segmented, but without checksum: the field has that of the pseudo header.
    let mut small = segment(1000);
    let pseudo = [0xc000_u32, 0x0201, 0xc000, 0x0202, 6, 1020].iter().sum::<u32>();
    let folded = u16::try_from((pseudo & 0xffff) + (pseudo >> 16)).unwrap();
    small[50..52].copy_from_slice(&folded.to_be_bytes());
    send_unfinished(&mut world, [1, 0, 0, 0, 0, 0, 34, 0, 16, 0], &small);
    let came = client.receive();
    let ip = smoltcp::wire::Ipv4Packet::new_unchecked(&came[0][14..]);
    let tcp = smoltcp::wire::TcpPacket::new_checked(&came[0][34..]).unwrap();
    assert!(tcp.verify_checksum(&ip.src_addr().into(), &ip.dst_addr().into()));
    // An offload header that asks for nothing.
    send_unfinished(&mut world, [0; 10], &small);
    assert_eq!(client.receive(), [small.as_slice()], "as it is");
    assert_eq!(world.node.dropped.malformed, 0);
    for wrong in
        [[1, 1, 0, 0, 1, 0, 34, 0, 16, 0], [1, 3, 0, 0, 0, 4, 34, 0, 16, 0], [1, 0, 0, 0, 0, 0, 0xff, 0xff, 0, 0]]
    {
        send_unfinished(&mut world, wrong, &small);
        assert!(client.receive().is_empty());
    }
    assert_eq!(world.node.dropped.malformed, 3);
}

#[test]
fn a_node_that_rests_is_woken_by_either_side() {
    let mut world = World::new(1);
    let mut client = world.connect(SHAPE);
    let soon = Duration::from_secs(10);
    assert_eq!(client.flags(true), 0, "nothing is written into a ring before its client has used it");
    for round in 0..3 {
        while world.turn() > 0 || world.node.arm() == Armed::Busy {}
        assert!(!readable(&world.node.source().unwrap(), Duration::ZERO), "nothing is there");
        assert!(client.send(&frame_to(OTHER, PORT, round, 60)));
        assert!(readable(&world.node.source().unwrap(), soon), "the client has rung");
        assert_eq!(world.turn(), 1);
        assert_eq!(client.flags(true) & 1, 1, "a node that is awake wants no rings");
        while world.turn() > 0 || world.node.arm() == Armed::Busy {}
        assert_eq!(client.flags(true) & 1, 0);
        assert!(world.send(OTHER, &frame_to(PORT, OTHER, round, 60)));
        assert!(readable(&world.node.bell().unwrap(), soon), "the other node has rung");
        assert_eq!(world.turn(), 1);
    }
    assert_eq!(world.at_other(OTHER).len(), 3);
}

#[test]
fn a_client_is_rung_for_unless_it_says_that_it_looks_by_itself() {
    let mut world = World::new(1);
    let client = world.connect(SHAPE);
    for (flags, rung) in [(0, true), (1, false), (0, true)] {
        client.set_flags(false, flags);
        assert!(world.send(OTHER, &frame_to(PORT, OTHER, 1, 60)));
        world.settle();
        assert_eq!(client.was_rung(), rung);
    }
}

#[test]
fn a_successor_goes_on_in_the_middle_of_the_rings_and_nobody_notices() {
    let mut world = World::new(1);
    let mut client = world.connect(SHAPE);
    for round in 0..40_u32 {
        // The former worker handled some; others are under way.
        let there: Vec<_> = (0..9).map(|i| frame_to(OTHER, PORT, round * 9 + i, 100 + i as usize * 611)).collect();
        let back: Vec<_> = there.iter().map(|frame| frame_to(PORT, OTHER, round, frame.len())).collect();
        assert!(there[..4].iter().all(|frame| client.send(frame)));
        assert!(back[..4].iter().all(|frame| world.send(OTHER, frame)));
        if round % 3 > 0 {
            world.turn();
        }
        assert!(there[4..].iter().all(|frame| client.send(frame)));
        assert!(back[4..].iter().all(|frame| world.send(OTHER, frame)));
        world.succeed(round % 2 == 0);
        world.settle();
        assert!(world.at_other(OTHER) == there, "round {round}");
        assert!(client.receive() == back, "round {round}");
    }
    assert!(client.channel.hear().is_none() && !client.channel.is_closed());
    assert_eq!(world.node.endpoint.client().as_deref(), Some("a test's client"));
    world.see_off(client);
}

#[test]
fn a_successor_has_its_client_ring_whatever_the_former_had_told_it() {
    let mut world = World::new(1);
    let mut client = world.connect(SHAPE);
    for round in 0..6 {
        assert!(client.send(&frame_to(OTHER, PORT, round, 60)));
        world.settle();
        if round % 2 == 0 {
            while world.node.arm() == Armed::Busy {
                world.turn();
            }
        }
        // The node asked the client to ring, or told it that it need not.
        assert_eq!(client.flags(true) & 1 == 0, round % 2 == 0);
        client.was_rung();
        world.succeed(false);
        assert!(client.was_rung(), "it may have been owed a ring");
        while world.turn() > 0 || world.node.arm() == Armed::Busy {}
        assert_eq!(client.flags(true) & 1, 0, "whoever sleeps has to be woken");
        assert!(client.send(&frame_to(OTHER, PORT, round, 60)));
        assert!(readable(&world.node.source().unwrap(), Duration::from_secs(10)), "and is");
        world.settle();
        assert_eq!(client.flags(true) & 1, 1);
        assert_eq!(world.at_other(OTHER).len(), 2);
    }
}

#[test]
fn an_eventfd_that_was_made_to_block_blocks_nobody() {
    let mut world = World::new(1);
    let mut client = world.connect(SHAPE);
    rustix::io::write(&client.bells[1], &(u64::MAX - 1).to_ne_bytes()).unwrap();
    rustix::fs::fcntl_setfl(&client.bells[1], OFlags::empty()).unwrap();
    // The bell of the other ring would block the node when it empties it.
    rustix::fs::fcntl_setfl(&client.bells[0], OFlags::empty()).unwrap();
    assert!(world.send(OTHER, &frame_to(PORT, OTHER, 1, 60)));
    world.settle();
    assert_eq!(client.receive().len(), 1, "and it has its frame");
}
