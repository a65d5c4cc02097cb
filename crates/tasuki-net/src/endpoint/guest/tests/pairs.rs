//! Machines with several pairs of queues.

use std::collections::BTreeSet;

use super::theirs::{message, send, state};
use super::*;

const PAIRS: usize = 4;

fn machine(net: &mut Net) -> Machine {
    let path = net.folder.path().join("vm.sock");
    Machine::start_with(&path, ALL, 64, PAIRS, || net.turn())
}

/// A frame of UDP over IPv4 to the guest, or from it, of a flow with this source port.
fn udp(to: u16, from: u16, port: u16, number: u16) -> Vec<u8> {
    let ip = [
        &[0x45, 0, 0, 46][..],
        &number.to_be_bytes(),
        &[0, 0, 64, 17, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2],
        &port.to_be_bytes(),
        &[0, 80],
    ]
    .concat();
    let mut frame = [&mac(to)[..], &mac(from), &[8, 0], &ip].concat();
    frame.resize(60, number.to_le_bytes()[0]);
    frame
}

fn given_by_pair(machine: &mut Machine) -> Vec<Vec<Vec<u8>>> {
    (0..PAIRS).map(|pair| machine.receive_by_pair(pair)).collect()
}

#[test]
fn wherever_a_worker_is_killed_each_frame_of_each_pair_crosses_exactly_once() {
    const FRAMES: u16 = 3;
    for places in 0.. {
        let mut net = Net::new(2);
        let mut machine = machine(&mut net);
        let exchange = |net: &mut Net, machine: &mut Machine, numbers: std::ops::Range<u16>| {
            for number in numbers {
                for pair in 0..PAIRS {
                    let port = u16::try_from(pair).unwrap();
                    assert!(machine.send_by_pair(pair, &udp(OTHER, US, port, number)));
                    net.others[0].send(US, &udp(US, OTHER, port, number)).unwrap();
                }
            }
            net.others[0].flush();
        };
        exchange(&mut net, &mut machine, 0..FRAMES);
        net.settle();
        let (mut there, mut back) = (received(&mut net.others[0]), given_by_pair(&mut machine).concat());
        exchange(&mut net, &mut machine, FRAMES..2 * FRAMES);
        let parts = net.parts();
        let was_killed = net.kill(places, 4);
        if places % 2 == 0 {
            there.extend(received(&mut net.others[0]));
            back.extend(given_by_pair(&mut machine).concat());
        }
        net.replace(parts);
        net.settle();
        there.extend(received(&mut net.others[0]));
        back.extend(given_by_pair(&mut machine).concat());
        for (came, to, from) in [(there, OTHER, US), (back, US, OTHER)] {
            let flow = |port: u16| came.iter().filter(move |it| it[34..36] == port.to_be_bytes()).cloned();
            for port in 0..u16::try_from(PAIRS).unwrap() {
                let sent: Vec<_> = (0..2 * FRAMES).map(|number| udp(to, from, port, number)).collect();
                assert_eq!(flow(port).collect::<Vec<_>>(), sent, "killed at place {places}, flow {port}");
            }
            assert_eq!(came.len(), PAIRS * usize::from(2 * FRAMES), "killed at place {places}");
        }
        if !was_killed {
            assert!(places > 20, "there are more places: {places}");
            break;
        }
    }
}

#[test]
fn flows_stay_on_a_pair_in_order_and_go_by_those_that_are_enabled() {
    let mut net = Net::new(2);
    let mut machine = machine(&mut net);
    let give = |net: &mut Net, machine: &mut Machine| {
        for number in 0..4 {
            for port in 0..10 {
                net.others[0].send(US, &udp(US, OTHER, port, number)).unwrap();
            }
        }
        net.others[0].flush();
        net.settle();
        let by_pair = given_by_pair(machine);
        assert_eq!(by_pair.concat().len(), 40, "{:?}", net.node.as_ref().unwrap().dropped);
        for came in &by_pair {
            let mut last = [None; 10];
            for frame in came {
                let number = u16::from_be_bytes([frame[18], frame[19]]);
                let last = &mut last[usize::from(frame[35])];
                assert!(last.is_none_or(|last| last + 1 == number) && (last.is_some() || number == 0), "in order, all");
                *last = Some(number);
            }
        }
        by_pair.iter().map(|came| came.iter().map(|frame| frame[35]).collect::<BTreeSet<_>>()).collect::<Vec<_>>()
    };
    let all = give(&mut net, &mut machine);
    assert!(all.iter().all(|flows| !flows.is_empty()), "{all:?}");
    assert_eq!(give(&mut net, &mut machine), all, "flows stay where they are");
    // The guest uses two pairs from now on, as by `ethtool -L eth0 combined 2`.
    for ring in 4..8 {
        assert!(send(&machine.socket, &message(18, 0, &state(ring, 0)), &[]));
    }
    net.settle();
    let two = give(&mut net, &mut machine);
    assert!(two[..2].iter().all(|flows| !flows.is_empty()) && two[2..].iter().all(BTreeSet::is_empty), "{two:?}");
    assert!(machine.send_by_pair(3, &udp(OTHER, US, 9, 1)));
    net.settle();
    assert!(received(&mut net.others[0]).is_empty(), "a ring that is not enabled is left alone");
    for ring in 4..8 {
        assert!(send(&machine.socket, &message(18, 0, &state(ring, 1)), &[]));
    }
    net.settle();
    assert_eq!(received(&mut net.others[0]), [udp(OTHER, US, 9, 1)]);
    assert_eq!(give(&mut net, &mut machine), all);
}

#[test]
fn a_kick_of_any_pair_wakes_and_a_full_ring_of_one_delays_no_other_for_long() {
    let mut net = Net::new(2);
    let mut machine = machine(&mut net);
    net.settle();
    for pair in 0..PAIRS {
        let node = net.node.as_mut().unwrap();
        while node.arm() == Armed::Busy {
            node.turn();
        }
        assert!(machine.send_by_pair(pair, &udp(OTHER, US, 1, 1)));
        let node = net.node.as_mut().unwrap();
        let began = Instant::now();
        node.rest(Duration::from_secs(20));
        assert!(began.elapsed() < Duration::from_secs(15), "nobody is woken by pair {pair}");
        net.settle();
        assert_eq!(received(&mut net.others[0]).len(), 1);
    }
    // More than the ring of one flow's pair holds: the rest is dropped after its wait, and the others go on.
    for number in 0..100 {
        net.others[0].send(US, &udp(US, OTHER, 1, number)).unwrap();
    }
    net.others[0].send(US, &udp(US, OTHER, 2, 0)).unwrap();
    net.others[0].send(US, &udp(US, OTHER, 3, 0)).unwrap();
    net.others[0].flush();
    let began = Instant::now();
    let count = |net: &mut Net| net.node.as_ref().unwrap().given + net.node.as_ref().unwrap().dropped.no_buffer;
    while count(&mut net) < 102 {
        net.turn();
        assert!(began.elapsed() < Duration::from_secs(20), "frames wait for ever");
    }
    let by_pair = given_by_pair(&mut machine);
    assert_eq!(by_pair.iter().map(Vec::len).max(), Some(64), "a ring is full");
    assert!((65..=66).contains(&by_pair.concat().len()), "the others got theirs, if they have another pair");
}

#[test]
fn a_front_end_hears_how_many_pairs_there_may_be() {
    let mut net = Net::new(2);
    let path = net.folder.path().join("vm.sock");
    let machine = Machine::connect(&path, ALL, 64, &mut || net.turn());
    assert_eq!(machine.ask(17, &[], &mut || net.turn()), device::PAIRS_MAX as u64);
}
