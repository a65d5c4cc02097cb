//! A program with a memif on a VNI, and what one that means harm can do there: nothing but lose its connection.

#[cfg(test)]
mod memif {
    pub mod client;
    #[allow(dead_code, reason = "another suite uses the rest of it")]
    pub mod port;
}
#[cfg(test)]
#[allow(dead_code, reason = "another suite uses the rest of it")]
mod net;

#[cfg(test)]
mod crossing {
    use std::time::{Duration, Instant};

    use rustix::fs::OFlags;
    use tasuki_net::port::Armed;

    use crate::memif::client::{Client, Shape};
    use crate::memif::port::{OTHER, PORT, SECRET, World, frame_to};
    use crate::net::readable;

    const SHAPE: Shape = Shape { log2: 6, buffer: 2048 };

    fn connected(world: &mut World, shape: Shape) -> Client {
        let path = world.path();
        Client::connect(&path, shape, SECRET, || {
            world.turn();
        })
    }

    #[test]
    fn frames_cross_both_ways_whole_and_in_order() {
        let mut world = World::new(1);
        let mut client = connected(&mut world, SHAPE);
        assert_eq!(world.node.client().as_deref(), Some("a test's client"));
        for round in 0..40_u32 {
            // Rings go round several times.
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
        assert_eq!(world.node.dropped, tasuki_net::memif::Dropped::default());
    }

    #[test]
    fn a_frame_longer_than_a_buffer_goes_in_several() {
        let mut world = World::new(1);
        let mut client = connected(&mut world, SHAPE);
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
        let mut client = connected(&mut world, Shape { log2: 3, buffer: 512 });
        for len in [8 * 512, 8 * 512 + 1, 20_000, 60] {
            assert!(world.send(OTHER, &frame_to(PORT, OTHER, 1, len)));
            world.settle();
            let came: Vec<_> = client.receive().iter().map(Vec::len).collect();
            assert_eq!(came, if len > 8 * 512 { vec![] } else { vec![len] });
        }
        assert_eq!(world.node.dropped.too_long, 2);
        let mut small = World::new(1);
        let mut client = connected(&mut small, Shape { log2: 8, buffer: 64 });
        assert!(small.send(OTHER, &frame_to(PORT, OTHER, 1, 64 * 64)));
        assert!(small.send(OTHER, &frame_to(PORT, OTHER, 2, 64 * 64 + 1)));
        small.settle();
        assert_eq!(client.receive(), [frame_to(PORT, OTHER, 1, 64 * 64)], "64 buffers make a chain at most");
        assert_eq!(small.node.dropped.too_long, 1);
    }

    #[test]
    fn a_client_that_reads_nothing_loses_frames_of_its_own_alone() {
        let mut world = World::new(2);
        let mut client = connected(&mut world, SHAPE);
        let mut sent = 0;
        let until = Instant::now() + Duration::from_secs(10);
        while world.node.dropped.no_buffer == 0 {
            sent += u32::from(world.send(OTHER, &frame_to(PORT, OTHER, sent, 100)));
            world.turn();
            assert!(Instant::now() < until, "what does not fit is dropped");
        }
        // It is not waited for; and the other way frames go on.
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
        let mut client = connected(&mut world, SHAPE);
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
        let mut client = connected(&mut world, SHAPE);
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
            let mut client = connected(&mut world, Shape { log2: 2 + u8::try_from(round % 3).unwrap(), buffer: 1024 });
            assert!(client.send(&frame_to(OTHER, PORT, round, 100)));
            assert!(world.send(OTHER, &frame_to(PORT, OTHER, round, 100)));
            world.settle();
            assert_eq!(world.at_other(OTHER), [frame_to(OTHER, PORT, round, 100)]);
            assert_eq!(client.receive(), [frame_to(PORT, OTHER, round, 100)]);
            drop(client);
            world.settle();
            assert_eq!(world.node.client(), None);
            assert!(world.send(OTHER, &frame_to(PORT, OTHER, round, 100)));
            world.settle();
        }
        let clients = world.node.clients;
        assert_eq!((clients.attached, clients.left, clients.refused), (20, 20, 0));
        assert_eq!(world.node.dropped.away, 20, "frames for a client that is not there are not kept");
        let now = Instant::now();
        world.node.tick(now);
        world.node.tick(now + Duration::from_secs(1));
        world.node.tick(now + Duration::from_secs(2));
        assert_eq!(world.node.vni().pages_left(), all, "nothing of it is held");
    }

    /// What a kernel hands over: a segment of TCP over IPv4 with `len` bytes of payload.
    fn segment(len: usize) -> Vec<u8> {
        let mut frame = frame_to(PORT, OTHER, 0, 54 + len);
        frame[12..14].copy_from_slice(&[8, 0]);
        let total = u16::try_from(40 + len).unwrap().to_be_bytes();
        let ip = [&[0x45, 0][..], &total, &[0, 7, 0x40, 0, 64, 6, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2]].concat();
        frame[14..34].copy_from_slice(&ip);
        frame[34..54].copy_from_slice(&[0, 80, 0, 90, 0, 0, 1, 0, 0, 0, 0, 1, 0x50, 0x10, 1, 0, 0, 0, 0, 0]);
        frame
    }

    /// Sends a frame behind an offload header.
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
        let mut client = connected(&mut world, SHAPE);
        let big = segment(60_000);
        // NEEDS_CSUM, TCP over IPv4, 1448 bytes in each, the check sum at 34 + 16.
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
        assert!(came.iter().all(|frame| summed(frame)), "all check sums are right");
        // Not cut, but its check sum is to be computed: what stands there is to be that of the pseudo header.
        let mut small = segment(1000);
        let pseudo = [0xc000_u32, 0x0201, 0xc000, 0x0202, 6, 1020].iter().sum::<u32>();
        let folded = u16::try_from((pseudo & 0xffff) + (pseudo >> 16)).unwrap();
        small[50..52].copy_from_slice(&folded.to_be_bytes());
        send_unfinished(&mut world, [1, 0, 0, 0, 0, 0, 34, 0, 16, 0], &small);
        let came = client.receive();
        let ip = smoltcp::wire::Ipv4Packet::new_unchecked(&came[0][14..]);
        let tcp = smoltcp::wire::TcpPacket::new_checked(&came[0][34..]).unwrap();
        assert!(tcp.verify_checksum(&ip.src_addr().into(), &ip.dst_addr().into()));
        // A header that says nothing of the frame.
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
        let mut client = connected(&mut world, SHAPE);
        let soon = Duration::from_secs(10);
        assert_eq!(client.flags(true), 0, "nothing is written into a ring before its client has used it");
        for round in 0..3 {
            while world.turn() > 0 || world.node.arm() == Armed::Busy {}
            assert!(!readable(&world.node.fd(), Duration::ZERO), "nothing is there");
            assert!(client.send(&frame_to(OTHER, PORT, round, 60)));
            assert!(readable(&world.node.fd(), soon), "the client has rung");
            assert_eq!(world.turn(), 1);
            assert_eq!(client.flags(true) & 1, 1, "a node that is awake wants no rings");
            while world.turn() > 0 || world.node.arm() == Armed::Busy {}
            assert_eq!(client.flags(true) & 1, 0);
            assert!(world.send(OTHER, &frame_to(PORT, OTHER, round, 60)));
            assert!(readable(&world.node.fd(), soon), "the other node has rung");
            assert_eq!(world.turn(), 1);
        }
        assert_eq!(world.at_other(OTHER).len(), 3);
    }

    #[test]
    fn a_client_is_rung_for_unless_it_says_that_it_looks_by_itself() {
        let mut world = World::new(1);
        let client = connected(&mut world, SHAPE);
        for (flags, rung) in [(0, true), (1, false), (0, true)] {
            client.set_flags(false, flags);
            assert!(world.send(OTHER, &frame_to(PORT, OTHER, 1, 60)));
            world.settle();
            assert_eq!(client.was_rung(), rung);
        }
    }

    #[test]
    fn an_eventfd_that_was_made_to_block_blocks_nobody() {
        let mut world = World::new(1);
        let mut client = connected(&mut world, SHAPE);
        rustix::io::write(&client.bells[1], &(u64::MAX - 1).to_ne_bytes()).unwrap();
        rustix::fs::fcntl_setfl(&client.bells[1], OFlags::empty()).unwrap();
        // That of the other ring would block whoever empties it.
        rustix::fs::fcntl_setfl(&client.bells[0], OFlags::empty()).unwrap();
        assert!(world.send(OTHER, &frame_to(PORT, OTHER, 1, 60)));
        world.settle();
        assert_eq!(client.receive().len(), 1, "and it has its frame");
    }
}

/// What a client does that is broken or means harm: it is told why it is sent away, and nobody else notices.
#[cfg(test)]
mod refused {
    use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
    use std::time::{Duration, Instant};

    use rustix::fs::{MemfdFlags, SealFlags};
    use tasuki_net::memif::client::HANDSHAKE;
    use tasuki_net::memif::control::Terms;

    use crate::memif::client::{
        ADD_REGION, ADD_RING, CONNECT, CONNECTED, Channel, Client, HELLO, Shape, add_region, add_ring, eventfd, init,
        memory, message,
    };
    use crate::memif::port::{OTHER, PORT, SECRET, World, frame_to};

    const SHAPE: Shape = Shape { log2: 4, buffer: 2048 };
    const GOOD: (u16, u32, u8) = (0x0200, 7, 0);

    fn world() -> World {
        World::with(1, 512, Terms::new(7, SECRET, "a test").unwrap())
    }

    type Step<'a> = (Vec<u8>, Vec<BorrowedFd<'a>>);

    /// Says all this in turn after INIT; gives the reason for which it is sent away.
    fn told(world: &mut World, steps: &[Step<'_>]) -> String {
        let channel = Channel::connect(&world.path());
        world.turn();
        assert_eq!(channel.hear().expect("a greeting").0, HELLO);
        for (message, with) in steps {
            channel.send(message, with);
            world.turn();
        }
        let reason = channel.reason().unwrap_or_else(|| panic!("it was not sent away: {:?}", world.node.clients));
        world.turn();
        assert_eq!(world.node.clients.why.map(|why| why.to_string()).as_deref(), Some(reason.as_str()), "whole");
        // Whoever comes next finds everything as it was.
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
            (
                (add_region(0, 8192), vec![unsealed.as_fd()]),
                "not sealed against shrinking; seal it (DPDK: zero-copy=no",
            ),
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
        let mut first = Client::connect(&path, SHAPE, SECRET, || {
            world.turn();
        });
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
        let path = world.path();
        Client::connect(&path, SHAPE, SECRET, || {
            world.turn();
        });
        // Nor does one that is through with it count as late.
        world.node.tick(Instant::now() + HANDSHAKE);
        assert_eq!(world.node.clients.attached, 1);
    }

    /// Has a client that is connected do something; gives the reason for which it is sent away.
    fn caught(what: impl FnOnce(&mut Client)) -> String {
        let mut world = World::new(1);
        let path = world.path();
        let mut client = Client::connect(&path, SHAPE, SECRET, || {
            world.turn();
        });
        assert!(client.send(&frame_to(OTHER, PORT, 1, 3000)), "before it does it");
        world.settle();
        what(&mut client);
        let memory = client.read(0, usize::try_from(SHAPE.len()).unwrap());
        world.settle();
        assert!(world.send(OTHER, &frame_to(PORT, OTHER, 1, 3000)));
        world.settle();
        let reason = client.channel.reason().expect("it is sent away");
        assert_eq!(world.node.client(), None);
        // But for the flags of the ring that we read.
        assert!(client.read(6, memory.len() - 6) == memory[6..], "something was written for it");
        // Who comes next is served, and what was sent before has arrived.
        let mut next = Client::connect(&path, SHAPE, SECRET, || {
            world.turn();
        });
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
            // In 32 bits the sum of these is small.
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
        // The second of a frame's buffers as well: nothing is written before all were looked at.
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
        let path = world.path();
        let shape = Shape { log2: 8, buffer: 64 };
        let client = Client::connect(&path, shape, SECRET, || {
            world.turn();
        });
        for slot in 0..65 {
            client.describe(true, slot, u16::from(slot < 64), 0, 64, shape.buffer_at(true, slot));
        }
        client.set_head(true, 65);
        world.settle();
        assert!(client.channel.reason().expect("it is told").contains("longer than is served"));
    }

    #[test]
    fn descriptors_that_were_read_go_on_no_more() {
        // DPDK's client (22.11) takes NEXT back of none but the first.
        let mut world = World::new(1);
        let path = world.path();
        let mut client = Client::connect(&path, SHAPE, SECRET, || {
            world.turn();
        });
        assert!(client.send(&frame_to(OTHER, PORT, 1, 9000)));
        world.settle();
        for slot in 0..5 {
            let flags = client.read(SHAPE.ring_at(true) + 128 + 16 * slot, 2);
            assert_eq!(flags, [0, 0], "descriptor {slot}");
        }
    }

    #[test]
    fn a_client_that_dies_in_its_handshake_leaves_nothing() {
        let mut world = World::new(1);
        let path = world.path();
        for _ in 0..10 {
            drop(Client::begin(&path, SHAPE, SECRET, || {
                world.turn();
            }));
            world.turn();
        }
        assert_eq!((world.node.clients.left, world.node.clients.attached), (10, 0));
        let channel = Channel::connect(&path);
        let until = Instant::now() + Duration::from_secs(10);
        while channel.hear().is_none_or(|(kind, _)| kind == CONNECTED) {
            world.turn();
            assert!(Instant::now() < until, "it is greeted");
        }
    }
}
