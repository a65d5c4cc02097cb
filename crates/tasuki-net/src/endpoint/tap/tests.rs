//! Kills a worker at every place in its code while a namespace sends. The frames it had read must still reach the other
//! node.

use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::*;
use std::time::{Duration, Instant};

use tasuki_testing::PATIENCE;

use crate::endpoint::rate::{Limit, Rate, Rates};
use crate::endpoint::{Bridge, Dropped};
use crate::port::Armed;
use crate::vni::Vni;
use crate::vni::fixture::{Nodes, mac, received};
use crate::vni::mortal::lives_for;

const US: u16 = 0;
const OTHER: u16 = 1;

/// A node whose namespace end of the TAP is a socket that keeps message boundaries; reads and writes work as on a TAP.
struct Net {
    nodes: Nodes,
    other: Vni,
    tap: OwnedFd,
    namespace: OwnedFd,
}

impl Net {
    fn new() -> Self {
        let nodes = Nodes::new(2);
        let other = nodes.end(OTHER);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (tap, namespace) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        Net { nodes, other, tap, namespace }
    }

    /// Starts another worker, which continues.
    fn worker(&self) -> Bridge<Tap> {
        let tap = Tap::new(self.tap.try_clone().unwrap());
        Bridge::new(Box::new(tap), self.nodes.end(US), self.nodes.switch(US))
    }

    /// Has the namespace send frames with these numbers.
    fn send(&self, numbers: std::ops::Range<u16>) {
        for number in numbers {
            let message = [&[0; HEADER_LEN][..], &frame(number)].concat();
            rustix::io::write(&self.namespace, &message).unwrap();
        }
    }

    /// Returns the numbers of the frames that reached the other node; asserts that each is whole.
    fn came(&mut self) -> Vec<u16> {
        let number = |bytes: Vec<u8>| {
            let number = u16::from_be_bytes([bytes[18], bytes[19]]);
            assert!(bytes == frame(number), "frame {number} is not what it was");
            number
        };
        received(&mut self.other).into_iter().map(number).collect()
    }
}

/// An IPv4 frame with a number; its length follows from the number.
fn frame(number: u16) -> Vec<u8> {
    let len = 20 + [40, 700, 1480, 4000][usize::from(number % 4)];
    let ip = [&[0x45, 0][..], &u16::try_from(len).unwrap().to_be_bytes(), &number.to_be_bytes()].concat();
    let mut frame = [&mac(OTHER)[..], &mac(US), &[8, 0], &ip].concat();
    frame.extend((frame.len()..14 + len).map(|at| (at * 7 + usize::from(number)).to_le_bytes()[0]));
    frame
}

#[test]
fn no_frame_is_lost_wherever_a_worker_is_killed() {
    const BEFORE: u16 = 3;
    const ALL: u16 = 9;
    let mut twice = 0;
    for places in 0.. {
        let mut net = Net::new();
        let mut worker = net.worker();
        net.send(0..BEFORE);
        worker.turn();
        let mut came = net.came();
        net.send(BEFORE..ALL);
        let was_killed = lives_for(places, || _ = worker.turn());
        drop(worker);
        // At even places, read the published frames before the next worker starts, which frees their pages; at odd
        // places, do not.
        if places % 2 == 0 {
            came.extend(net.came());
        }
        let mut worker = net.worker();
        while worker.turn() > 0 {}
        came.extend(net.came());
        drop(worker);
        // A third worker must not send what the second has sent for the first.
        net.worker().turn();
        assert!(net.came().is_empty(), "killed at place {places}");
        let len = came.len();
        came.sort_unstable();
        came.dedup();
        assert_eq!(came, (0..ALL).collect::<Vec<_>>(), "killed at place {places}");
        twice += usize::from(came.len() < len);
        if !was_killed {
            assert!(places > 2 * u32::from(ALL - BEFORE), "a frame is read, and staged");
            break;
        }
    }
    assert!(twice <= 1, "between what is published and that this is noted is one place, and not {twice}");
}

/// Returns an IPv4 or IPv6 frame for a node, of this length, which states another one.
fn of_false_length(to: u16, kind: [u8; 2], len: usize, stated: u16) -> Vec<u8> {
    let at = if kind == [8, 0] { 16 } else { 18 };
    let mut frame = [&mac(to)[..], &mac(US), &kind].concat();
    frame.resize(len, 0);
    frame[at..at + 2].copy_from_slice(&stated.to_be_bytes());
    frame
}

/// A frame that says that it is longer than any can be does not end its reader's successors, one after the other.
#[test]
fn a_frame_of_a_false_length_ends_no_successor() {
    for (kind, stated) in [([0x86, 0xdd], 0xffff), ([0x86, 0xdd], 65_505), ([8, 0], 0xffff), ([8, 0], 0)] {
        for places in 0.. {
            let mut net = Net::new();
            let mut worker = net.worker();
            let bytes = of_false_length(OTHER, kind, 60, stated);
            rustix::io::write(&net.namespace, &[&[0; HEADER_LEN][..], &bytes].concat()).unwrap();
            let was_killed = lives_for(places, || _ = worker.turn());
            drop(worker);
            let mut worker = net.worker();
            net.send(0..2);
            while worker.turn() > 0 {}
            let came = received(&mut net.other);
            assert!(came.ends_with(&[frame(0), frame(1)]), "{kind:x?} {stated}, killed at place {places}");
            if !was_killed {
                break;
            }
        }
    }
}

/// A frame waits for room in vain, and the next one is read to its place.
#[test]
fn a_frame_that_was_dropped_leaves_no_length_for_the_next_one() {
    const THIRD: u16 = 2;
    for places in 0.. {
        let nodes = Nodes::new(3);
        let (other, mut third) = (nodes.end(OTHER), nodes.end(THIRD));
        let mut net = Net { nodes, other, ..Net::new() };
        let mut worker = net.worker();
        for number in 0.. {
            net.send(4 * number..4 * number + 1);
            worker.turn();
            if worker.dropped.no_room > 0 || worker.waits().is_some() {
                break;
            }
        }
        std::thread::sleep(super::super::egress::WAIT);
        let last = of_false_length(THIRD, [8, 0], 14 + 300, 300);
        rustix::io::write(&net.namespace, &[&[0; HEADER_LEN][..], &last].concat()).unwrap();
        let was_killed = lives_for(places, || _ = worker.turn());
        drop(worker);
        let mut worker = net.worker();
        while worker.turn() > 0 {}
        let came = received(&mut third);
        assert!(!came.is_empty() && came.iter().all(|frame| *frame == last), "killed at place {places}: {came:x?}");
        drop(received(&mut net.other));
        if !was_killed {
            break;
        }
    }
}

/// Sends frames to the other node, which reads none, until one waits. Returns their number.
fn send_until_one_waits(net: &mut Net, worker: &mut Bridge<Tap>) -> u16 {
    for number in 0.. {
        net.send(number..number + 1);
        worker.turn();
        if worker.waits().is_some() {
            return number + 1;
        }
    }
    unreachable!("a ring has an end")
}

/// A frame waits for room over many turns. It is noted at each instant of them.
#[test]
fn a_frame_that_waits_outlives_its_worker_at_any_time() {
    for places in 0.. {
        let mut net = Net::new();
        let mut worker = net.worker();
        let all = send_until_one_waits(&mut net, &mut worker);
        let was_killed = lives_for(places, || _ = worker.turn());
        drop(worker);
        let mut came = net.came();
        let mut worker = net.worker();
        while worker.turn() > 0 {}
        came.extend(net.came());
        came.sort_unstable();
        came.dedup();
        assert_eq!(came, (0..all).collect::<Vec<_>>(), "killed at place {places}");
        if !was_killed {
            assert!(places > 2, "a waiting frame is noted anew");
            break;
        }
    }
}

/// A successor finds noted frames for a node without room, and behind them frames for another.
#[test]
fn a_full_ring_loses_no_noted_frame_of_another_node() {
    const THIRD: u16 = 2;
    const BEHIND: usize = 10;
    let mut was_full = false;
    for places in 0.. {
        let nodes = Nodes::new(3);
        let (other, mut third) = (nodes.end(OTHER), nodes.end(THIRD));
        let mut net = Net { nodes, other, ..Net::new() };
        let mut worker = net.worker();
        let all = send_until_one_waits(&mut net, &mut worker);
        // The node makes room for the frame that waits and for the next ones, and not for those once more.
        net.other.wake();
        let read = net.other.receive(|_| ());
        worker.turn();
        net.send(all..all + u16::try_from(read - 1).unwrap());
        let last = of_false_length(THIRD, [8, 0], 14 + 300, 300);
        for _ in 0..BEHIND {
            rustix::io::write(&net.namespace, &[&[0; HEADER_LEN][..], &last].concat()).unwrap();
        }
        let was_killed = lives_for(places, || while worker.turn() > 0 {});
        drop(worker);
        let mut worker = net.worker();
        was_full |= worker.dropped.no_room > 0;
        while worker.turn() > 0 {}
        let came = received(&mut third).len();
        assert!(came >= BEHIND, "killed at place {places}: {came}");
        if !was_killed {
            break;
        }
    }
    assert!(was_full, "at some place the other node's ring was full");
}

#[test]
fn what_a_liar_leaves_on_the_page_harms_nobody() {
    let mut net = Net::new();
    let page = net.nodes.end(US).notes();
    for word in [0, 1, u64::from(u32::MAX), u64::MAX, 1 << 32 | 30, 5 << 32 | u64::from(u32::MAX)] {
        for line in &*page {
            (0..8).for_each(|at| line.word(at).store(word, std::sync::atomic::Ordering::Relaxed));
        }
        let mut worker = net.worker();
        net.send(0..4);
        while worker.turn() > 0 {}
        // The lying notes can at most bring back frames of their own node, or parts of them.
        let came = received(&mut net.other);
        let expected: Vec<_> = (0..4).map(frame).collect();
        assert!(came.ends_with(&expected), "{word:#x}");
        assert!(came.iter().all(|bytes| (0..4).any(|number| frame(number).starts_with(bytes))), "{word:#x}");
    }
}

#[test]
fn a_flood_wakes_no_worker_and_the_first_frame_after_it_does() {
    let mut net = Net::new();
    let mut worker = net.worker();
    // Long enough for a test that runs beside others.
    worker.set_latency(Duration::from_millis(20));
    let mut sent = 0;
    let began = Instant::now();
    loop {
        net.send(sent..sent + 8);
        sent += 8;
        while worker.turn() > 0 {}
        assert_eq!(net.came().len(), 8);
        assert_eq!(worker.arm(), Armed::Idle);
        if worker.source().is_none() {
            break;
        }
        worker.wake();
        assert!(began.elapsed() < PATIENCE, "frames gather once they come fast enough");
    }
    assert!(worker.waits().is_some(), "and not for ever");
    assert!(worker.bell().is_some(), "frames for the namespace do not wait");
    // A nap that brings nothing is the last one.
    worker.rest(Duration::from_secs(60));
    assert_eq!((worker.turn(), worker.arm()), (0, Armed::Idle));
    assert!(worker.source().is_some() && worker.waits().is_none());
}

fn a_hundred_a_second() -> Option<Rate> {
    Rate::alone(Limit { bits: 0, frames: 100, burst: Duration::from_millis(10) })
}

#[test]
fn frames_beyond_what_a_node_may_send_wait_and_its_worker_sleeps() {
    let mut net = Net::new();
    let mut worker = net.worker();
    worker.set_rates(Rates { sends: a_hundred_a_second(), receives: None });
    net.send(0..12);
    let began = Instant::now();
    let mut came = Vec::new();
    while came.len() < 12 {
        worker.turn();
        came.extend(net.came());
        if came.len() < 12 {
            assert_eq!(worker.arm(), Armed::Idle, "nothing may go");
            assert!(worker.source().is_none(), "what the namespace sends wakes nobody");
            worker.rest(Duration::from_secs(60));
        }
        assert!(began.elapsed() < PATIENCE, "they go in time: {came:?}");
    }
    assert_eq!(came, (0..12).collect::<Vec<_>>());
    // Two go at once, and one in 10 ms after that.
    assert!(began.elapsed() >= Duration::from_millis(90), "{:?}", began.elapsed());
    assert_eq!(worker.dropped.sum(), 0);
}

#[test]
fn frames_beyond_what_a_node_may_receive_are_dropped_and_counted() {
    let mut net = Net::new();
    let mut worker = net.worker();
    worker.set_rates(Rates { sends: None, receives: a_hundred_a_second() });
    for number in 0..40 {
        net.other.send(US, &[&mac(US)[..], &mac(OTHER), &frame(number)[12..]].concat()).unwrap();
        net.other.flush();
        worker.rest(Duration::ZERO);
        worker.turn();
    }
    let Dropped { over_rate, .. } = worker.dropped;
    assert_eq!((worker.given + over_rate, worker.dropped.sum()), (40, over_rate));
    assert!(worker.given >= 2 && over_rate > 0, "{} of 40 were given", worker.given);
}
