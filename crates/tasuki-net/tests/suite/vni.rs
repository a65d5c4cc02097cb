//! The nodes of a VNI, in one process: their guarantees to each other, and the cost of a slow, dead or hostile node.

use std::time::{Duration, Instant};

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use proptest::prelude::*;
use rustix::process::{Resource, Rlimit};
use tasuki_net::port::Armed;
use tasuki_net::switch::Switch;
use tasuki_net::vni::offload::{HEADER_LEN, NEEDS_CSUM, Offload};
use tasuki_net::vni::{IDLE, Incoming, NoRoom, PATIENCE, PIECE_MAX, SendError};
use tasuki_shm::line::{Claims, Line};
use tasuki_shm::vni::directory::{Directory, Lookup, directory_lines};
use tasuki_shm::vni::node_memory::{NodeMemory, PeerNodeMemory, has_noted};
use zerocopy::IntoBytes;

use crate::net::{Net, frame, received};
use crate::wait::readable;
use tasuki_testing::alone;

#[test]
fn a_frame_arrives_whole_and_knows_whence() {
    let mut net = Net::of(3);
    net.node(0).send(1, b"frame from none to one").unwrap();
    net.node(2).send(1, b"frame from two to one").unwrap();
    [0, 2].into_iter().for_each(|node| net.node(node).flush());
    let mut came = received(net.node(1));
    came.sort();
    assert_eq!(came, [(0, b"frame from none to one".to_vec()), (2, b"frame from two to one".to_vec())]);
    assert!(received(net.node(0)).is_empty() && received(net.node(2)).is_empty());
}

#[test]
fn frames_of_all_lengths_arrive_in_order() {
    let mut net = Net::of(2);
    let lengths = (14..3000).chain((3000..PIECE_MAX).step_by(977)).chain([PIECE_MAX - HEADER_LEN, PIECE_MAX]);
    for (number, len) in (0_u32..).zip(lengths) {
        let sent = frame(number, len);
        net.node(0).send(1, &sent).unwrap();
        net.node(0).flush();
        assert_eq!(received(net.node(1)), [(0, sent)]);
    }
}

#[test]
fn what_is_no_frame_is_refused_with_its_length() {
    let mut net = Net::of(2);
    assert_eq!(net.node(0).send(1, &[0; 13]), Err(SendError::Length { len: 13 }));
    assert_eq!(net.node(0).send(1, &vec![0; PIECE_MAX + 1]), Err(SendError::Length { len: PIECE_MAX + 1 }));
    assert_eq!(net.node(0).send(5, &[0; 60]), Err(SendError::NoSuchNode(5)));
    assert_eq!(net.node(0).send(u16::MAX, &[0; 60]), Err(SendError::NoSuchNode(u16::MAX)));
}

#[test]
fn an_offload_header_travels_with_its_frame() {
    let mut net = Net::of(2);
    let offload = Offload { flags: NEEDS_CSUM, csum_start: 34.into(), csum_offset: 16.into(), ..Offload::default() };
    let room = net.node(0).draft(1, HEADER_LEN + 60).unwrap();
    room[..HEADER_LEN].copy_from_slice(offload.as_bytes());
    room[HEADER_LEN..].copy_from_slice(&frame(1, 60));
    net.node(0).post(1, HEADER_LEN + 60, true);
    net.node(0).send(1, &frame(2, 60)).unwrap();
    net.node(0).flush();
    let mut came = Vec::new();
    while came.len() < 2 {
        net.node(1).receive(|incoming| {
            let mut copy = [0; 60];
            assert_eq!(incoming.copy_to(&mut copy), Ok(60));
            came.push((incoming.offload().unwrap(), incoming.len(), copy));
        });
    }
    for (at, (offload, number)) in [(offload, 1), (Offload::default(), 2)].into_iter().enumerate() {
        assert_eq!((came[at].0, came[at].1, &came[at].2[..]), (offload, 60, &frame(number, 60)[..]));
    }
}

#[test]
fn what_is_counted_can_be_read_by_strangers() {
    let mut net = Net::of(2);
    let sent = (0..300).filter(|&number| net.node(0).send(1, &frame(number, 60)).is_ok()).count();
    assert_eq!(sent, 256);
    net.node(0).flush();
    let (node_memory, _) = PeerNodeMemory::map(&net.node_memory(0)).unwrap();
    let line = node_memory.line_of(1);
    // Frames received, sent, and refused because the ring was full.
    assert_eq!([1, 2, 3].map(|word| line.load(0, word)), [0, 256, 44]);
}

#[test]
fn frames_for_a_node_that_reads_nothing_are_counted_where_strangers_and_successors_read() {
    let mut net = Net::of(3);
    let start = Instant::now();
    while net.node(0).send(1, &frame(0, 60)).is_ok() {}
    net.node(0).flush();
    assert!(net.node(0).tick(start), "somebody has not read");
    net.node(0).tick(start + PATIENCE);
    // The ring stays full, and nothing is taken back a second time.
    (0..100).for_each(|_| assert!(net.node(0).send(1, &[0; 60]).is_err()));
    assert_eq!(net.node(0).send_to_all([], 60, false, |room| room.fill(1)), Ok(0), "it is alone");
    let sent = net.node(0).send_to_all([1, 2], 60, false, |room| room.fill(1)).unwrap();
    assert_eq!(sent, 1);
    let (node_memory, _) = PeerNodeMemory::map(&net.node_memory(0)).unwrap();
    let line = node_memory.line_of(1);
    assert_eq!([1, 2, 3, 4, 5, 6, 7].map(|word| line.load(0, word)), [0, 256, 102, 0, 0, 1, 0]);
    let counts = net.node(0).counts(1).unwrap();
    net.replace(0);
    assert_eq!(net.node(0).counts(1), Some(counts), "a successor goes on from there");
}

#[test]
#[should_panic(expected = "shorter draft")]
fn no_more_is_posted_than_there_was_room_for() {
    let mut net = Net::of(2);
    net.node(0).draft(1, 60).unwrap();
    net.node(0).post(1, 60_000, false);
}

#[test]
fn one_frame_for_all_lies_in_one_place() {
    let mut net = Net::of(5);
    let left = net.node(0).pages_left();
    for number in 0..1000 {
        let sent = frame(number, 200);
        assert_eq!(net.node(0).send_to_all(1..5, 200, false, |room| room.copy_from_slice(&sent)), Ok(4));
        net.node(0).flush();
        for to in 1..5 {
            assert_eq!(received(net.node(to)), [(0, sent.clone())]);
        }
    }
    // The next tick frees the pages of frames that were read.
    net.node(0).tick(Instant::now());
    assert!(left - net.node(0).pages_left() <= 16, "{} pages are held", left - net.node(0).pages_left());
}

#[test]
fn what_is_staged_before_its_reader_is_known_arrives_whole() {
    let mut net = Net::with(3, 80);
    let mut expected = [const { Vec::new() }; 3];
    for (number, len) in (0_u32..).zip([14, 60, 1514, 9000, 4086, 4087, 65_000, 20_000, 60, 4000].repeat(30)) {
        let sent = frame(number, len);
        let to = 1 + u16::try_from(number % 2).unwrap();
        let room = net.node(0).stage().expect("a pool of which little is in use has room");
        room[..HEADER_LEN].fill(0);
        room[HEADER_LEN..HEADER_LEN + len].copy_from_slice(&sent);
        match number % 5 {
            4 => {
                assert_eq!(net.node(0).post_staged_to_all([1, 2], HEADER_LEN + len), Ok(2));
                (1..3).for_each(|to: usize| expected[to].push((0, sent.clone())));
            }
            _ => {
                net.node(0).post_staged(to, HEADER_LEN + len).unwrap();
                expected[usize::from(to)].push((0, sent));
            }
        }
        net.node(0).flush();
        // Let several frames be under way at a time.
        if number % 3 == 0 {
            for (to, expected) in expected.iter_mut().enumerate().skip(1) {
                assert_eq!(received(net.node(to)), std::mem::take(expected), "up to frame {number}");
            }
        }
    }
    assert_eq!(net.node(0).post_staged(1, HEADER_LEN), Err(SendError::Length { len: HEADER_LEN }));
}

#[test]
fn a_pool_that_was_full_and_is_read_has_room_again() {
    let mut net = Net::with(4, 64);
    for (round, to) in (0..60).zip((1..4).cycle()) {
        while net.node(0).send(to, &frame(round, 9000)).is_ok() {}
        net.node(0).flush();
        (1..4).for_each(|node| drop(received(net.node(node))));
        assert!(net.node(0).stage().is_some(), "nobody holds anything any more");
        assert_eq!(net.node(0).send(1, &frame(round, 9000)), Ok(()));
        net.node(0).flush();
        assert_eq!(received(net.node(1)).len(), 1);
    }
}

#[test]
fn v4_a_slow_reader_holds_up_itself_alone() {
    let mut net = Net::of(3);
    let sent = frame(1, 1514);
    let refused = (0..2000).find_map(|_| net.node(0).send(1, &sent).err());
    assert_eq!(refused, Some(SendError::NoRoom(NoRoom::Ring)));
    let large = frame(1, 60_000);
    let refused = (0..2000).find_map(|_| net.node(2).send(1, &large).err());
    assert_eq!(refused, Some(SendError::NoRoom(NoRoom::Quota)));
    // One that its sender tries again is not dropped, and not counted.
    let again = net.node(0).draft(1, sent.len()).map(drop);
    assert_eq!(again, Err(SendError::NoRoom(NoRoom::Ring)));
    assert_eq!((net.node(0).counts(1).unwrap().ring_full, net.node(2).counts(1).unwrap().over_quota), (1, 1));
    for number in 0..1000 {
        let sent = frame(number, 60_000);
        net.node(2).send(0, &sent).unwrap();
        net.node(2).flush();
        assert_eq!(received(net.node(0)), [(2, sent)]);
    }
}

#[test]
fn v4_pages_that_a_slow_reader_holds_here_and_there_hold_up_nobody_else() {
    let mut net = Net::of(4);
    let (mut refused, mut for_all) = (0, 0);
    for number in 0..3000 {
        // A page each, in turn to a node that reads and one that does not: soon no two neighbouring pages are
        // free.
        for to in [1, 2] {
            let room = net.node(0).stage().unwrap_or_else(|| panic!("frame {number} finds no room"));
            room[..HEADER_LEN].fill(0);
            room[HEADER_LEN..HEADER_LEN + 100].copy_from_slice(&frame(number, 100));
            match net.node(0).post_staged(to, HEADER_LEN + 100) {
                Ok(()) => {}
                Err(error) => {
                    assert!(to == 1 && matches!(error, SendError::NoRoom(_)), "{error}");
                    refused += 1;
                }
            }
        }
        net.node(0).flush();
        assert_eq!(received(net.node(2)), [(0, frame(number, 100))]);
        if number % 10 == 0 {
            let room = net.node(0).stage().expect("a frame for several finds room too");
            room[..HEADER_LEN].fill(0);
            room[HEADER_LEN..HEADER_LEN + 3000].copy_from_slice(&frame(number, 3000));
            assert_eq!(net.node(0).post_staged_to_all([2, 3], HEADER_LEN + 3000), Ok(2));
            for_all += 1;
            net.node(0).flush();
            [2, 3].into_iter().for_each(|to| assert_eq!(received(net.node(to)), [(0, frame(number, 3000))]));
        }
    }
    assert_eq!(for_all, 300);
    let came = received(net.node(1));
    assert_eq!((came.len(), refused), (256, 3000 - 256), "a ring full, and the rest is counted");
    assert!((0..).zip(&came).all(|(number, (_, bytes))| *bytes == frame(number, 100)));
    // Once it has read, there are runs of pages again, and long frames fit.
    for number in 0..500 {
        let sent = frame(number, 60_000);
        let room = net.node(0).stage().expect("nobody holds anything any more");
        room[..HEADER_LEN].fill(0);
        room[HEADER_LEN..HEADER_LEN + 60_000].copy_from_slice(&sent);
        net.node(0).post_staged(1, HEADER_LEN + 60_000).unwrap();
        net.node(0).flush();
        assert_eq!(received(net.node(1)), [(0, sent)]);
    }
}

#[test]
fn v4_what_is_not_read_in_time_is_taken_back_and_its_reader_finds_out() {
    let mut net = Net::of(3);
    let all = net.node(0).pages_left();
    let (start, soon) = (Instant::now(), Duration::from_millis(1));
    (0..100).for_each(|number| net.node(0).send(1, &frame(number, 1514)).unwrap());
    net.node(0).flush();
    assert!(net.node(0).tick(start), "somebody has not read");
    assert!(net.node(0).tick(start + PATIENCE - soon));
    assert!(net.node(0).pages_left() < all);
    net.node(0).tick(start + PATIENCE);
    assert_eq!((net.node(0).pages_left(), net.node(0).counts(1).unwrap().taken_back), (all, 1));
    // The pages are reused for another node.
    let secret = vec![0x5a; 1514];
    (0..200).for_each(|_| net.node(0).send(2, &secret).unwrap());
    net.node(0).flush();
    net.node(1).wake();
    let mut late = 0;
    while net.node(1).receive(|incoming| late += u32::from(incoming.copy_to(&mut [0; 2000]).is_err())) > 0 {}
    assert_eq!(late, 100, "each is recognised");
    // From then on it receives as before.
    net.node(0).send(1, &frame(7, 100)).unwrap();
    net.node(0).flush();
    assert_eq!(received(net.node(1)), [(0, frame(7, 100))]);
    assert_eq!(received(net.node(2)).len(), 200);
}

#[test]
fn a_ring_to_a_node_that_is_gone_costs_a_successor_nothing() {
    let (start, step) = (Instant::now(), Duration::from_millis(100));
    // Killed while its ring is in use, and after it has declared the ring unused.
    for ticks in 0..3 {
        let mut net = Net::of(3);
        let before = net.memory(0);
        net.node(0).send(1, &frame(1, 100)).unwrap();
        net.node(0).flush();
        assert_eq!(received(net.node(1)).len(), 1);
        (0..ticks).for_each(|i| assert!(net.node(0).tick(start + (step + IDLE) * i)));
        assert!(net.memory(0) > before);
        net.replace_alone(0);
        net.node(0).tick(start);
        assert_eq!(net.memory(0), before, "after {ticks} ticks");
    }
}

#[test]
fn a_ring_on_which_nothing_goes_costs_nothing() {
    let mut net = Net::of(3);
    let (start, step) = (Instant::now(), Duration::from_millis(100));
    let before = net.memory(0);
    net.node(0).send(1, &frame(1, 100)).unwrap();
    net.node(0).flush();
    assert_eq!(received(net.node(1)).len(), 1);
    assert!(net.memory(0) > before);
    assert!(net.node(0).tick(start));
    assert!(net.node(0).tick(start + step));
    assert!(net.node(0).tick(start + step + IDLE), "what is not looked at any more is given back the next time");
    assert!(!net.node(0).tick(start + 2 * step + IDLE));
    assert_eq!(net.memory(0), before);
    // The ring can be used again; its counters go on.
    for number in 0..1000 {
        net.node(0).send(1, &frame(number, 100)).unwrap();
        net.node(0).flush();
        assert_eq!(received(net.node(1)), [(0, frame(number, 100))]);
    }
}

#[test]
fn a_ring_is_not_given_back_while_its_reader_has_not_read() {
    let mut net = Net::of(2);
    let start = Instant::now();
    net.node(0).send(1, &frame(1, 100)).unwrap();
    net.node(0).flush();
    (0..10).for_each(|i| assert!(net.node(0).tick(start + IDLE * i)));
    net.node(0).send(1, &frame(2, 100)).unwrap();
    net.node(0).flush();
    let mut came = Vec::new();
    while net.node(1).receive(|incoming| came.push(incoming.copy_to(&mut [0; 200]))) > 0 || came.is_empty() {}
    assert_eq!(came.len(), 2, "the first was taken back, and the second is there");
    assert!(came[0].is_err() && came[1].is_ok());
}

#[test]
fn no_frame_is_slept_through() {
    let mut net = Net::of(2);
    let (mut source, mut sink) = (net.take(0), net.take(1));
    let (go, gone) = std::sync::mpsc::channel::<u32>();
    let sender = std::thread::spawn(move || {
        for number in gone {
            source.send(1, &frame(number, 100)).unwrap();
            source.flush();
        }
    });
    for number in 0..2000 {
        go.send(number).unwrap();
        let came = loop {
            let came = received(&mut sink);
            if !came.is_empty() {
                break came;
            }
            if sink.arm() == Armed::Idle {
                assert!(readable(&sink.fd(), Duration::from_secs(20)), "frame {number} was slept through");
                sink.wake();
            }
        };
        assert_eq!(came, [(0, frame(number, 100))]);
    }
    drop(go);
    sender.join().unwrap();
}

#[test]
fn whoever_takes_over_goes_on_with_both_directions() {
    let mut net = Net::of(3);
    let (mut next, mut expected) = ([0_u32; 2], [0_u32; 2]);
    for round in 0..40_u32 {
        // At the replacement of their sender or reader, some frames are read, some are not.
        for _ in 0..(round * 7 % 60) {
            net.node(0).send(1, &frame(next[0], 700)).unwrap();
            next[0] += 1;
        }
        let both = net.node(0).send_to_all([1, 2], 300, false, |room| room.copy_from_slice(&frame(next[0], 300)));
        assert_eq!(both, Ok(2));
        next[0] += 1;
        for _ in 0..(round * 3 % 50) {
            net.node(1).send(0, &frame(next[1], 900)).unwrap();
            next[1] += 1;
        }
        [0, 1].into_iter().for_each(|node| net.node(node).flush());
        let replaced = if round.is_multiple_of(2) { 0 } else { 1 };
        net.replace(replaced);
        for (reader, sender) in [(1, 0), (0, 1)] {
            let mut left = if round % 3 == 2 { usize::MAX } else { 10 };
            while left > 0 {
                let came = received(net.node(reader));
                if came.is_empty() {
                    break;
                }
                for (from, bytes) in came {
                    let number = expected[sender];
                    assert_eq!(usize::from(from), sender);
                    assert_eq!(bytes, frame(number, bytes.len()), "frame {number} in round {round}");
                    expected[sender] += 1;
                    left = left.saturating_sub(1);
                }
            }
        }
        received(net.node(2));
    }
    while received(net.node(1)).into_iter().map(|_| expected[0] += 1).count() > 0 {}
    assert_eq!((expected, next), (next, expected), "every frame came once");
    (0..2).for_each(|_| assert!(net.node(0).tick(Instant::now())));
    let held = net.all_pages() - net.node(0).pages_left();
    assert!(held <= 16, "{held} pages are held, and one run is being filled for all");
}

/// Ends an honest neighbour of the others; returns its memory, for the test to scribble in.
fn turned(net: &mut Net, number: usize) -> NodeMemory {
    drop(net.take(number));
    NodeMemory::adopt(net.node_memory(number)).unwrap().0
}

#[test]
fn a_node_that_breaks_a_rule_after_a_good_frame_costs_itself_its_ring() {
    for wrong in [1_u64 << 32 | 77, 60 << 32 | 1] {
        let mut net = Net::of(3);
        net.node(1).send(0, &frame(1, 60)).unwrap();
        net.node(1).flush();
        assert_eq!(received(net.node(0)).len(), 1, "and its ring is looked at each time from now on");
        let liar = turned(&mut net, 1);
        // A stamp out of turn; a piece that is in no pool.
        liar.ring_to(0)[0].word(3).store(u64::MAX, Relaxed);
        liar.ring_to(0)[0].word(2).store(wrong, Relaxed);
        assert!(received(net.node(0)).is_empty());
        assert!(net.node(0).breach(1).is_some());
        net.node(2).send(0, &frame(2, 60)).unwrap();
        net.node(2).flush();
        assert_eq!(received(net.node(0)), [(2, frame(2, 60))]);
    }
}

#[test]
fn a_reader_that_lies_about_how_far_it_is_costs_no_page() {
    let mut net = Net::of(3);
    let liar = turned(&mut net, 1);
    liar.line_of(0)[0].word(0).store(4000, Relaxed);
    let mut refused = 0;
    for number in 0..1000 {
        assert!(net.node(0).stage().is_some(), "frame {number}");
        refused += u32::from(net.node(0).post_staged(1, 5000).is_err());
    }
    assert!(refused > 700);
    assert!(matches!(net.node(0).send(1, &frame(1, 60)), Err(SendError::Broken(_))));
    net.node(0).tick(Instant::now());
    let held = net.all_pages() - net.node(0).pages_left();
    assert!(held <= 64, "{held} pages are held, and one run is staged");
    net.node(0).send(2, &frame(1, 60)).unwrap();
    net.node(0).flush();
    assert_eq!(received(net.node(2)).len(), 1);
}

#[test]
fn whatever_stands_in_the_pipe_of_a_bell_a_name_is_read() {
    for noise in [&[0][..], &[0x80], &[0xff, 3], &[5, 5, 5]] {
        let mut net = Net::of(3);
        net.ring(0, noise);
        net.node(2).send(0, &frame(1, 60)).unwrap();
        net.node(2).flush();
        assert_eq!(received(net.node(0)), [(2, frame(1, 60))], "after {noise:?}");
    }
}

#[test]
fn frames_for_all_do_not_use_up_the_quota_of_who_reads_them() {
    let mut net = Net::with(2, 80);
    for number in 0..2000 {
        let sent = net.node(0).send_to_all([1], 1500, false, |room| room.copy_from_slice(&frame(number, 1500)));
        assert_eq!(sent, Ok(1), "frame {number}");
        net.node(0).flush();
        assert_eq!(received(net.node(1)).len(), 1);
    }
}

#[test]
fn a_reader_that_slept_while_a_ring_was_given_back_does_not_bring_it_back() {
    let mut net = Net::of(2);
    let (start, step) = (Instant::now(), Duration::from_millis(100));
    let before = net.memory(0);
    net.node(0).send(1, &frame(1, 100)).unwrap();
    net.node(0).flush();
    assert_eq!(received(net.node(1)).len(), 1);
    assert_eq!(net.node(1).arm(), Armed::Idle);
    for i in 0..4 {
        net.node(0).tick(start + IDLE * i + step);
    }
    assert_eq!(net.memory(0), before);
    assert!(received(net.node(1)).is_empty());
    assert_eq!(net.node(1).arm(), Armed::Idle);
    assert_eq!(net.memory(0), before);
}

#[test]
fn an_offload_headers_frame_is_not_read_in_words() {
    let mut net = Net::of(2);
    net.node(0).draft(1, 70).unwrap().fill(1);
    net.node(0).post(1, 70, true);
    net.node(0).send(1, &[2; 64]).unwrap();
    net.node(0).flush();
    net.node(1).wake();
    let mut words = Vec::new();
    while words.len() < 2 {
        net.node(1).receive(|incoming| words.push(incoming.words().map(Iterator::count)));
    }
    assert_eq!(words, [None, Some(8)]);
}

/// The formula of docs/design/vni.md.
#[test]
fn a_hundred_nodes_that_all_talk_take_40_mib_beside_their_pools() {
    if !alone(a_hundred_nodes_that_all_talk_take_40_mib_beside_their_pools) {
        return;
    }
    const NODES: u16 = 100;
    // In one process, each node has a descriptor of every other node's bell.
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let wanted = u64::from(NODES) * u64::from(NODES) * 6 / 5;
    if limit.maximum.is_some_and(|maximum| maximum < wanted) {
        println!("skipped: it takes {wanted} descriptors; raise the hard limit (ulimit -Hn)");
        return;
    }
    let more = Rlimit { current: limit.current.map(|current| current.max(wanted)), maximum: limit.maximum };
    rustix::process::setrlimit(Resource::Nofile, more).unwrap();
    let mut net = Net::of(NODES);
    let sum = |net: &Net| (0..usize::from(NODES)).map(|node| net.memory(node)).sum::<u64>();
    assert!(sum(&net) < u64::from(NODES) * (32 << 10), "nobody has talked: {} bytes", sum(&net));
    for from in 0..NODES {
        for to in (0..NODES).filter(|to| *to != from) {
            net.node(from.into()).send(to, &frame(from.into(), 60)).unwrap();
        }
        net.node(from.into()).flush();
    }
    for node in 0..NODES {
        assert_eq!(received(net.node(node.into())).len(), usize::from(NODES) - 1);
    }
    let (pages, pairs) = (3, u64::from(NODES) * (u64::from(NODES) - 1));
    assert_eq!(sum(&net), 4096 * (u64::from(NODES) * pages + pairs));
    assert!(sum(&net) <= 40 << 20);
}

#[test]
fn a_node_that_leaves_gives_back_what_it_had() {
    let mut net = Net::of(3);
    let all = net.node(0).pages_left();
    (0..100).for_each(|number| net.node(0).send(1, &frame(number, 1000)).unwrap());
    net.node(0).flush();
    net.node(0).remove(1);
    assert_eq!(net.node(0).pages_left(), all);
    assert_eq!(net.node(0).send(1, &frame(1, 60)), Err(SendError::NoSuchNode(1)));
    // A new node gets its number.
    net.renew(1);
    for number in 0..600 {
        net.node(0).send(1, &frame(number, 100)).unwrap();
        net.node(0).flush();
        assert_eq!(received(net.node(1)), [(0, frame(number, 100))]);
        net.node(1).send(0, &frame(number, 90)).unwrap();
        net.node(1).flush();
        assert_eq!(received(net.node(0)), [(1, frame(number, 90))]);
    }
}

/// The daemon leaves a node out that could not join yet, or a stand-by has missed the message about it.
#[test]
fn a_node_that_is_forgotten_and_met_again_goes_on_where_it_was() {
    // Fewer messages than a ring has places, and more.
    for count in [10, 300] {
        let mut net = Net::of(2);
        let exchange = |net: &mut Net| {
            for (from, to) in (0..count).flat_map(|_| [(0, 1), (1, 0)]) {
                net.node(from).send(u16::try_from(to).unwrap(), &frame(count, 100)).unwrap();
                net.node(from).flush();
                assert_eq!(received(net.node(to)), [(u16::try_from(from).unwrap(), frame(count, 100))]);
            }
        };
        exchange(&mut net);
        net.node(0).remove(1);
        let memory = net.node_memory(0);
        assert!(!has_noted(memory.control.as_fd(), memory.pool.as_fd(), 1), "another node may get its number");
        net.meet(0, 1);
        exchange(&mut net);
        // A successor frees what its predecessor sent to nodes that it does not know.
        net.node(0).send(1, &frame(0, 100)).unwrap();
        net.node(0).flush();
        net.replace_alone(0);
        net.meet(0, 1);
        exchange(&mut net);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]
    #[test]
    fn whatever_is_sent_arrives_once_and_in_order_or_is_refused(steps in prop::collection::vec((0_u16..4, 0_u16..4, 14_usize..9000, 0_u8..8), 1..400)) {
        let mut net = Net::with(4, 64);
        let mut sent: Vec<Vec<std::collections::VecDeque<Vec<u8>>>> = vec![vec![Default::default(); 4]; 4];
        for (number, (from, to, len, what)) in (0_u32..).zip(steps) {
            let bytes = frame(number, len);
            match what {
                0 => {
                    for (from, bytes) in received(net.node(to.into())) {
                        prop_assert_eq!(Some(bytes), sent[usize::from(from)][usize::from(to)].pop_front());
                    }
                }
                1 => net.replace(to.into()),
                2 => { net.node(from.into()).tick(Instant::now()); }
                3 => {
                    let others: Vec<_> = (0..4).filter(|it| *it != from).collect();
                    let room = net.node(from.into()).send_to_all(others.clone(), len, false, |room| room.copy_from_slice(&bytes));
                    // Count the frame if all nodes got it. Otherwise the call does not say which did, so this
                    // case ends here.
                    match room {
                        Ok(3) => others.iter().for_each(|to| sent[usize::from(from)][usize::from(*to)].push_back(bytes.clone())),
                        Ok(_) => return Ok(()),
                        Err(error) => prop_assert!(matches!(error, SendError::NoRoom(_)), "{error}"),
                    }
                }
                _ if from != to => match net.node(from.into()).send(to, &bytes) {
                    Ok(()) => sent[usize::from(from)][usize::from(to)].push_back(bytes),
                    Err(error) => prop_assert!(matches!(error, SendError::NoRoom(_)), "{error}"),
                },
                _ => {}
            }
            net.node(from.into()).flush();
        }
        for to in 0..4_u16 {
            for (from, bytes) in received(net.node(to.into())) {
                prop_assert_eq!(Some(bytes), sent[usize::from(from)][usize::from(to)].pop_front());
            }
        }
        prop_assert!(sent.iter().flatten().all(std::collections::VecDeque::is_empty));
    }
}

/// Waits for frames at node 0 and passes them to `each`.
fn take(net: &mut Net, mut each: impl FnMut(Incoming<'_>)) {
    let start = Instant::now();
    while net.node(0).receive(&mut each) == 0 {
        net.node(0).wake();
        assert!(start.elapsed() < Duration::from_secs(30), "nothing came");
    }
}

/// A malicious worker changes its posted frame between the check and the copy.
#[test]
fn w3_what_was_checked_is_what_goes_on() {
    use std::io::Read;
    use std::os::unix::fs::FileExt;

    const OWN: [u8; 6] = [2, 0, 0, 0xaa, 0xbb, 1];
    const VICTIM: [u8; 6] = [2, 0, 0, 0xaa, 0xbb, 0];
    let lines: Arc<[Line]> = (0..directory_lines(8)).map(|_| Line::default()).collect();
    let mut directory = Directory::new(Arc::clone(&lines));
    directory.add(OWN, 1).unwrap();
    directory.add(VICTIM, 0).unwrap();
    let mut switch = Switch::new(0, Lookup::new(Claims::of(lines)));
    let mut net = Net::of(2);
    let pool = std::fs::File::from(net.node_memory(1).pool);
    let (mut out, into) = std::io::pipe().unwrap();
    for with_header in [false, true] {
        let sent = [&VICTIM[..], &OWN, &[0x88, 0xb5], &[7; 86]].concat();
        let header = if with_header { HEADER_LEN } else { 0 };
        let room = net.node(1).draft(0, header + sent.len()).unwrap();
        room.fill(0);
        room[header..].copy_from_slice(&sent);
        net.node(1).post(0, header + sent.len(), with_header);
        net.node(1).flush();
        let mut count = 0;
        take(&mut net, |incoming| {
            let front = switch.admits(&incoming).expect("it is in its own name");
            let mut memory = vec![0; usize::try_from(pool.metadata().unwrap().len()).unwrap()];
            pool.read_exact_at(&mut memory, 0).unwrap();
            let places = memory.windows(6).enumerate().filter(|(_, window)| *window == OWN);
            for (at, _) in places {
                pool.write_all_at(&VICTIM, at as u64).unwrap();
                count += 1;
            }
            assert_eq!(incoming.write_with_header(into.as_fd(), front).unwrap(), 1);
            assert!(switch.admits(&incoming).is_none(), "it is changed");
        });
        let mut came = vec![0; HEADER_LEN + sent.len()];
        out.read_exact(&mut came).unwrap();
        assert!(count > 0 && came[HEADER_LEN..] == sent, "{came:02x?}");
    }
}

/// A hostile sender leaves a checksum to its receivers, in a place that was checked.
#[test]
fn w3_no_receiver_writes_a_checksum_into_what_was_checked() {
    const OWN: [u8; 6] = [2, 0, 0, 0xaa, 0xbb, 1];
    let lines: Arc<[Line]> = (0..directory_lines(8)).map(|_| Line::default()).collect();
    Directory::new(Arc::clone(&lines)).add(OWN, 1).unwrap();
    let mut switch = Switch::new(0, Lookup::new(Claims::of(lines)));
    let mut net = Net::of(2);
    let into = std::fs::File::options().write(true).open("/dev/null").unwrap();
    // Into the source address of Ethernet, and behind both addresses.
    for (csum_start, csum_offset, is_taken) in [(0, 6, false), (10, 1, false), (11, 1, true), (34, 16, true)] {
        let offload = Offload {
            flags: NEEDS_CSUM,
            csum_start: csum_start.into(),
            csum_offset: csum_offset.into(),
            ..Offload::default()
        };
        let sent = [offload.as_bytes(), &[2, 0, 0, 0xaa, 0xbb, 0], &OWN, &[0x88, 0xb5], &[7; 86]].concat();
        net.node(1).draft(0, sent.len()).unwrap().copy_from_slice(&sent);
        net.node(1).post(0, sent.len(), true);
        net.node(1).flush();
        take(&mut net, |incoming| {
            let front = switch.admits(&incoming).expect("it is in its own name");
            let written = incoming.write_with_header(into.as_fd(), front);
            assert_eq!(written.is_ok(), is_taken, "{csum_start} {csum_offset}: {written:?}");
        });
    }
}

/// A hostile worker sends past its own switch, to the address by which a link partner pauses.
#[test]
fn w4_no_receiver_takes_a_pause_of_a_lying_worker() {
    const OWN: [u8; 6] = [2, 0, 0, 0xaa, 0xbb, 1];
    const PAUSE: [u8; 6] = [1, 0x80, 0xc2, 0, 0, 1];
    let lines: Arc<[Line]> = (0..directory_lines(8)).map(|_| Line::default()).collect();
    Directory::new(Arc::clone(&lines)).add(OWN, 1).unwrap();
    let mut switch = Switch::new(0, Lookup::new(Claims::of(lines)));
    let mut net = Net::of(2);
    for (to, is_taken) in [([1, 0x80, 0xc2, 0, 0, 0x10], true), (PAUSE, false)] {
        net.node(1).send(0, &[&to[..], &OWN, &[0x88, 0x08, 0, 1, 0xff, 0xff], &[0; 42]].concat()).unwrap();
        net.node(1).flush();
        take(&mut net, |incoming| {
            let mut copy = [0; 60];
            incoming.copy_to(&mut copy).unwrap();
            assert_eq!(switch.admits_copy(&copy, &incoming), is_taken);
            assert_eq!(switch.admits(&incoming).is_some(), is_taken);
        });
    }
}

/// A hostile worker may post a frame too short to have addresses.
#[test]
fn w3_what_is_too_short_to_have_an_address_is_nobodys() {
    let lines: Arc<[Line]> = (0..directory_lines(8)).map(|_| Line::default()).collect();
    let mut directory = Directory::new(Arc::clone(&lines));
    // The address that the bytes behind the frame would give: accepting it as the sender's own would be the bug.
    directory.add([0; 6], 1).unwrap();
    let mut switch = Switch::new(0, Lookup::new(Claims::of(lines)));
    for len in 1..16 {
        let mut net = Net::of(2);
        let room = net.node(1).draft(0, 64).unwrap();
        room.fill(0);
        net.node(1).post(0, len, false);
        net.node(1).flush();
        let mut counts = (0, 0);
        take(&mut net, |incoming| match switch.admits(&incoming) {
            Some(_) => assert!(len >= 14, "{len} bytes"),
            None => incoming.refuse(&mut counts.0, &mut counts.1),
        });
        assert_eq!(counts, (u64::from(len < 14), 0), "{len} bytes");
        assert_eq!(net.node(0).counts(1).unwrap().forged, counts.0);
    }
}
