//! Machines with several pairs of queues.

use std::collections::BTreeSet;
use std::os::fd::AsRawFd;

use super::theirs::{message, send, state};
use super::*;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tasuki_testing::{PATIENCE, alone};

const PAIRS: usize = 4;

/// As many as there can be.
const MANY: usize = device::PAIRS_MAX;

fn machine(net: &mut Net) -> Machine {
    machine_with(net, ALL)
}

fn machine_with(net: &mut Net, features: u64) -> Machine {
    machine_of(net, features, PAIRS)
}

fn machine_of(net: &mut Net, features: u64, pairs: usize) -> Machine {
    let path = net.folder.path().join("vm.sock");
    Machine::start_with(&path, features, 64, pairs, || net.turn())
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
    (0..machine.kicks.len() / 2).map(|pair| machine.receive_by_pair(pair)).collect()
}

#[test]
fn wherever_a_worker_is_killed_each_frame_of_each_pair_crosses_exactly_once() {
    const FRAMES: u16 = 3;
    let few = [ALL, ALL | PACKED, ALL | PACKED | IN_ORDER].map(|features| (PAIRS, features, 1));
    // Their turns have hundreds of places.
    let many = [(MANY, ALL, 11), (MANY, ALL | PACKED, 13)];
    for (pairs, features, step) in few.into_iter().chain(many) {
        for places in (0..).step_by(step) {
            let mut net = Net::new(2);
            let mut machine = machine_of(&mut net, features, pairs);
            let exchange = |net: &mut Net, machine: &mut Machine, numbers: std::ops::Range<u16>| {
                for number in numbers {
                    for pair in 0..pairs {
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
                for port in 0..u16::try_from(pairs).unwrap() {
                    let sent: Vec<_> = (0..2 * FRAMES).map(|number| udp(to, from, port, number)).collect();
                    assert_eq!(flow(port).collect::<Vec<_>>(), sent, "killed at place {places}, flow {port}");
                }
                assert_eq!(came.len(), pairs * usize::from(2 * FRAMES), "killed at place {places}");
            }
            if !was_killed {
                assert!(places > 20, "there are more places: {places}");
                break;
            }
        }
    }
}

#[test]
fn flows_stay_on_a_pair_in_order_and_go_by_those_that_are_enabled() {
    for features in [ALL, ALL | PACKED] {
        let mut net = Net::new(2);
        let mut machine = machine_with(&mut net, features);
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
                    assert!(
                        last.is_none_or(|last| last + 1 == number) && (last.is_some() || number == 0),
                        "in order, all"
                    );
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
        // It stops its rings one after the other, as when it is paused or starts again, and a successor hears of that.
        assert!(send(&machine.socket, &message(11, 0, &state(7, 0)), &[]));
        net.settle();
        let parts = net.parts();
        net.replace(parts);
        net.settle();
        let rest = give(&mut net, &mut machine);
        assert!(rest[..3].iter().all(|flows| !flows.is_empty()), "{rest:?}");
    }
}

#[test]
fn a_kick_of_any_pair_wakes_and_a_full_ring_of_one_delays_no_other_for_long() {
    let mut net = Net::new(2);
    let mut many = machine_of(&mut net, ALL, MANY);
    net.settle();
    for pair in 0..MANY {
        let node = net.node.as_mut().unwrap();
        while node.arm() == Armed::Busy {
            node.turn();
        }
        assert!(many.send_by_pair(pair, &udp(OTHER, US, 1, 1)));
        let node = net.node.as_mut().unwrap();
        let began = Instant::now();
        node.rest(Duration::from_secs(20));
        assert!(began.elapsed() < Duration::from_secs(15), "nobody is woken by pair {pair}");
        net.settle();
        assert_eq!(received(&mut net.others[0]).len(), 1);
    }
    drop(many);
    net.settle();
    let mut machine = machine(&mut net);
    net.settle();
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

#[test]
fn a_frame_that_waits_in_vain_is_dropped_though_another_pair_goes_on() {
    const BUSY: u16 = 2;
    let mut net = Net::new(4);
    let mut machine = machine(&mut net);
    // A node that reads nothing, behind whose frame others wait.
    let mut count = 0;
    while net.node.as_ref().unwrap().source().is_some() {
        assert!(machine.send_by_pair(0, &udp(BUSY, US, 1, count)));
        count += 1;
        net.turn();
    }
    let mut number = 0;
    assert!(machine.send_by_pair(0, &udp(3, US, 1, 7)));
    let (mut behind, began) = (Vec::new(), Instant::now());
    while behind.is_empty() {
        number += u16::from(machine.send_by_pair(1, &udp(OTHER, US, 2, number)));
        net.turn();
        received(&mut net.others[0]);
        behind = received(&mut net.others[2]);
        assert!(began.elapsed() < PATIENCE, "what is behind it waits for as long as the other pair is busy");
    }
    assert_eq!(behind, [udp(3, US, 1, 7)]);
}

#[test]
fn pairs_share_what_the_guest_may_send() {
    let mut net = Net::new(2);
    let mut machine = machine(&mut net);
    let limit = Limit { bits: 0, frames: 1000, burst: Duration::from_millis(1) };
    net.node.as_mut().unwrap().set_rates(Rates { sends: Rate::alone(limit), receives: None });
    let (mut sent, began) = ([0; PAIRS], Instant::now());
    // Each pair has more to send than the guest may.
    while sent.iter().any(|count| *count < 3) {
        for pair in 0..PAIRS {
            while machine.send_by_pair(pair, &udp(OTHER, US, u16::try_from(pair).unwrap(), 0)) {}
        }
        net.turn();
        received(&mut net.others[0]).iter().for_each(|frame| sent[usize::from(frame[35])] += 1);
        assert!(began.elapsed() < PATIENCE, "a pair sends nothing: {sent:?}");
    }
}

#[test]
fn a_ring_whose_pair_does_not_run_is_left_alone_and_wakes_nobody() {
    let mut net = Net::new(2);
    let mut machine = machine(&mut net);
    // The receiving ring of pair 1 stops: pairs 1 to 3 do not run.
    assert!(send(&machine.socket, &message(18, 0, &state(2, 0)), &[]));
    net.settle();
    assert!(machine.send_by_pair(1, &udp(OTHER, US, 1, 1)) && machine.send_by_pair(2, &udp(OTHER, US, 1, 2)));
    net.settle();
    assert!(received(&mut net.others[0]).is_empty());
    let node = net.node.as_mut().unwrap();
    node.wake();
    node.turn();
    assert_eq!(node.arm(), Armed::Idle, "the worker may sleep");
    assert!(send(&machine.socket, &message(18, 0, &state(2, 1)), &[]));
    net.settle();
    assert_eq!(received(&mut net.others[0]).len(), 2);
}

#[test]
fn after_a_change_of_one_ring_the_driver_of_another_kicks() {
    for features in [ALL, ALL | PACKED] {
        let mut net = Net::new(2);
        let mut machine = machine_with(&mut net, features);
        assert!(machine.send_by_pair(0, &udp(OTHER, US, 1, 1)));
        // The worker takes the frame, in the turn of its pair, and tells the driver that it need not kick.
        (0..PAIRS).for_each(|_| _ = net.node.as_mut().unwrap().turn());
        assert_eq!(received(&mut net.others[0]).len(), 1);
        assert!(send(&machine.socket, &message(18, 0, &state(6, 0)), &[]));
        let node = net.node.as_mut().unwrap();
        node.wake();
        while node.turn() > 0 || node.arm() == Armed::Busy {}
        while rustix::io::read(&machine.kicks[1], &mut [0; 8]).is_ok() {}
        assert!(machine.send_by_pair(0, &udp(OTHER, US, 1, 2)));
        assert!(rustix::io::read(&machine.kicks[1], &mut [0; 8]).is_ok(), "nobody would be woken");
    }
}

#[test]
fn a_pair_without_buffers_holds_up_no_other_and_no_sender_for_long() {
    for features in [ALL, ALL | PACKED] {
        let mut net = Net::new(2);
        let mut machine = machine_with(&mut net, features);
        let flow_of_pair = |pair: usize| {
            (0..)
                .find(|port| flow_of(&udp(US, OTHER, *port, 0)) as usize % PAIRS == pair)
                .expect("some flow goes there")
        };
        let [short, other] = [0, 1].map(flow_of_pair);
        let give = |net: &mut Net, ports: &[u16]| {
            ports.iter().for_each(|port| net.others[0].send(US, &udp(US, OTHER, *port, 0)).unwrap());
            net.others[0].flush();
            net.node.as_mut().unwrap().wake();
        };
        let dropped = |net: &Net| net.node.as_ref().unwrap().dropped.no_buffer;
        let began = Instant::now();
        give(&mut net, &[short; 65]);
        while dropped(&net) == 0 {
            net.turn();
            assert!(began.elapsed() < PATIENCE, "a ring is never full");
        }
        net.settle();
        // From now on the other pair's frames wait for nothing: all come in one turn.
        for _ in 0..3 {
            let before = dropped(&net);
            give(&mut net, &[short, other].repeat(20));
            net.node.as_mut().unwrap().turn();
            assert_eq!((machine.receive_by_pair(1).len(), dropped(&net) - before), (20, 20));
        }
        // With buffers again, it gets frames again.
        assert_eq!(machine.receive_by_pair(0).len(), 64);
        give(&mut net, &[short; 20]);
        net.settle();
        assert_eq!(machine.receive_by_pair(0).len(), 20);
    }
}

#[test]
fn a_frame_that_waits_for_a_buffer_is_counted_once_against_the_limit() {
    let mut net = Net::new(2);
    let path = net.folder.path().join("vm.sock");
    let mut machine = Machine::start(&path, ALL, 64, || net.turn());
    // 1 Mbit/s: a burst of 30 of these frames, and one in 8 ms.
    let limit = Limit { bits: 1_000_000, frames: 0, burst: Duration::from_millis(240) };
    net.node.as_mut().unwrap().set_rates(Rates { sends: None, receives: Rate::alone(limit) });
    let give = |net: &mut Net, count: u16| {
        for number in 0..count {
            net.others[0].send(US, &[&udp(US, OTHER, 1, number)[..], &[0; 940]].concat()).unwrap();
        }
        net.others[0].flush();
    };
    // All buffers hold frames; one more waits for a millisecond, in which the worker turns hundreds of times.
    (0..64).for_each(|at| net.others[0].send(US, &frame(US, OTHER, 5 * at)).unwrap());
    net.others[0].flush();
    net.settle();
    give(&mut net, 20);
    (0..300).for_each(|_| net.turn());
    machine.receive();
    net.settle();
    let Dropped { over_rate, no_buffer, .. } = net.node.as_ref().unwrap().dropped;
    // On a busy machine some may have waited too long.
    assert_eq!((machine.receive().len() as u64 + no_buffer, over_rate), (20, 0));
}

/// A front end may start its rings in any order, and all at once.
#[test]
fn rings_that_start_out_of_order_are_all_served_without_a_kick() {
    for features in [ALL, ALL | PACKED] {
        let mut net = Net::new(2);
        let path = net.folder.path().join("vm.sock");
        let mut machine = Machine::start_in_order(&path, features, 64, (0..2 * MANY).rev(), &mut || net.turn());
        assert_eq!(net.guest().counts().iter().find(|(name, _)| *name == "queue_pairs").unwrap().1, MANY as u64);
        // The worker sleeps; what was there before it heard of the rings, it finds without a kick.
        let parts = net.parts();
        net.node = None;
        for pair in 0..MANY {
            assert!(machine.send_by_pair(pair, &udp(OTHER, US, 1, u16::try_from(pair).unwrap())));
            while rustix::io::read(&machine.kicks[2 * pair + 1], &mut [0; 8]).is_ok() {}
        }
        net.replace(parts);
        let node = net.node.as_mut().unwrap();
        assert_eq!(node.turn(), MANY, "its first turn looks at all rings");
        let mut pairs: Vec<_> = received(&mut net.others[0]).iter().map(|frame| frame[19]).collect();
        pairs.sort_unstable();
        assert!(pairs.into_iter().map(usize::from).eq(0..MANY));
        // It masks all interrupts.
        for ring in 0..2 * MANY as u64 {
            const NONE: u64 = 1 << 8;
            assert!(send(&machine.socket, &message(13, 0, &(ring | NONE).to_ne_bytes()), &[]));
            net.turn();
        }
        net.settle();
        assert_eq!(net.parts().fds.len(), 2 + 2 * MANY, "the socket, the memory, and kicks");
        assert!(machine.send_by_pair(MANY - 1, &udp(OTHER, US, 1, 7)));
        net.settle();
        assert_eq!(received(&mut net.others[0]), [udp(OTHER, US, 1, 7)]);
    }
}

#[test]
fn a_front_end_whose_descriptors_find_no_room_is_told() {
    if !alone(a_front_end_whose_descriptors_find_no_room_is_told) {
        return;
    }
    let mut net = Net::new(2);
    let path = net.folder.path().join("vm.sock");
    let machine = Machine::connect(&path, ALL, 64, &mut || net.turn());
    let kick = theirs::eventfd();
    let free = u64::try_from(theirs::eventfd().as_raw_fd()).unwrap();
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(free), ..limit }).unwrap();
    assert!(send(&machine.socket, &message(12, 0, &0_u64.to_ne_bytes()), &[kick.as_fd()]));
    net.settle();
    setrlimit(Resource::Nofile, limit).unwrap();
    let said = net.trouble();
    assert!(said.contains("this worker may open no more descriptors, and it sends some: raise LimitNOFILE="), "{said}");
    assert!(machine.is_hung_up());
}

#[test]
fn a_pair_that_sends_while_others_keep_the_worker_awake_does_not_wait_for_its_sleep() {
    const BUSY: usize = 3;
    for features in [ALL, ALL & !EVENT_IDX, ALL | PACKED] {
        let mut net = Net::new(2);
        let mut machine = machine_of(&mut net, features, MANY);
        let node = net.node.as_mut().unwrap();
        node.wake();
        while node.turn() > 0 || node.arm() == Armed::Busy {}
        for pair in (0..MANY).filter(|pair| *pair != BUSY) {
            assert!(machine.send_by_pair(pair, &udp(OTHER, US, 7, 0)));
            let mut turns = 0;
            loop {
                assert!(machine.send_by_pair(BUSY, &udp(OTHER, US, 1, 0)));
                // Without a sleep, the node hears of no kick.
                net.node.as_mut().unwrap().turn();
                turns += 1;
                if received(&mut net.others[0]).iter().any(|frame| frame[35] == 7) {
                    break;
                }
                assert!(turns < MANY, "pair {pair} waits for {turns} turns");
            }
        }
        // It sleeps once all is quiet, and the kick of any wakes it.
        let node = net.node.as_mut().unwrap();
        node.wake();
        while node.turn() > 0 || node.arm() == Armed::Busy {}
        assert!(machine.send_by_pair(MANY - 1, &udp(OTHER, US, 7, 0)));
        assert!(is_readable(node.source().unwrap()));
    }
}

#[test]
fn a_turn_looks_at_no_ring_whose_driver_kicks() {
    let mut net = Net::new(2);
    let mut machine = machine_of(&mut net, ALL, MANY);
    let node = net.node.as_mut().unwrap();
    node.wake();
    while node.turn() > 0 || node.arm() == Armed::Busy {}
    assert_eq!(node.endpoint.polling.idle, Pairs::MAX);
    // Pair 5 keeps it awake. All others stay as they are.
    assert!(machine.send_by_pair(5, &udp(OTHER, US, 1, 0)));
    node.wake();
    assert_eq!(node.endpoint.polling.idle, Pairs::MAX & !(1 << 5));
    // Also after the front end has changed something, and the worker does not sleep.
    assert!(send(&machine.socket, &message(18, 0, &state(6, 1)), &[]));
    for _ in 0..4 * MANY {
        assert!(machine.send_by_pair(5, &udp(OTHER, US, 1, 0)));
        let node = net.node.as_mut().unwrap();
        node.endpoint.must_hear = true;
        node.turn();
        received(&mut net.others[0]);
    }
    assert_eq!(net.guest().polling.idle, Pairs::MAX & !(1 << 5));
}

#[test]
fn a_kick_for_the_last_ring_alone_starts_nothing() {
    let mut net = Net::new(2);
    let path = net.folder.path().join("vm.sock");
    let machine = Machine::connect(&path, ALL, 64, &mut || net.turn());
    let last = u64::try_from(2 * MANY - 1).unwrap();
    let kick = theirs::eventfd();
    assert!(send(&machine.socket, &message(12, 0, &last.to_ne_bytes()), &[kick.as_fd()]));
    net.settle();
    assert!(!net.guest().is_running() && !machine.is_hung_up());
    rustix::io::write(&kick, &1_u64.to_ne_bytes()).unwrap();
    net.settle();
    let node = net.node.as_mut().unwrap();
    node.wake();
    node.turn();
    assert_eq!(node.arm(), Armed::Idle);
}

/// The daemon takes 8,192 bytes of a worker (`tasuki-control/src/supervisor/endpoints.rs`).
#[test]
fn no_front_end_makes_a_description_that_is_too_long() {
    let mut net = Net::new(2);
    let machine = machine_of(&mut net, ALL, MANY);
    // The socket, the memory, a kick and an interrupt for each ring.
    assert_eq!(net.parts().fds.len(), 2 + 4 * MANY);
    let log = theirs::memory(1 << 17);
    assert!(send(&machine.socket, &message(6, 0, &[(1_u64 << 17).to_ne_bytes(), [0; 8]].concat()), &[log.as_fd()]));
    let region = |number: u64| [u64::MAX - (number << 40), 4096, u64::MAX, theirs::LEN - 4096];
    let regions: Vec<_> = (1..=8).map(region).collect();
    let files = [machine.memory.as_fd(); 8];
    assert!(send(&machine.socket, &message(5, 0, &theirs::table(&regions)), &files));
    for ring in 0..2 * u32::try_from(MANY).unwrap() {
        let address = [&state(ring, 1)[..], &[0xff; 32]].concat();
        for (request, body) in [(8, state(ring, 65535).to_vec()), (10, state(ring, 65535).to_vec()), (9, address)] {
            assert!(send(&machine.socket, &message(request, 0, &body), &[]));
            net.turn();
        }
    }
    net.settle();
    let text = net.guest().front_end.as_ref().expect("it may say so").device.text(None);
    assert!(text.matches("18446744073709551615").count() > 4 * 2 * MANY, "{text}");
    assert!(text.len() <= 8192, "{} bytes", text.len());
}

/// QEMU 7.2 does that. Until it was heard once alone, four pairs were too many.
#[test]
fn a_front_end_may_tell_of_its_memory_once_for_each_pair() {
    let mut net = Net::new(2);
    let mut machine = machine_of(&mut net, ALL, PAIRS);
    let fds = net.parts().fds.len();
    let len = rustix::fs::fstat(&machine.memory).unwrap().st_size.unsigned_abs();
    let body: Vec<u8> = [0, theirs::GUEST, len, theirs::USER, 0].iter().flat_map(|word| word.to_ne_bytes()).collect();
    for pair in 0..MANY {
        assert!(send(&machine.socket, &message(37, 0, &body), &[machine.memory.as_fd()]));
        net.turn();
        assert!(machine.send_by_pair(pair % PAIRS, &udp(OTHER, US, 1, 0)));
    }
    net.settle();
    assert!(!machine.is_hung_up(), "{:?}", net.guest().trouble());
    assert_eq!((received(&mut net.others[0]).len(), net.parts().fds.len()), (MANY, fds));
    // Another file at the same place is another region.
    let other = theirs::memory(len);
    assert!(send(&machine.socket, &message(37, 0, &body), &[other.as_fd()]));
    net.settle();
    assert_eq!(net.parts().fds.len(), fds + 1);
}

/// The node memory that an earlier daemon made has room for eight pairs.
#[test]
fn memory_of_an_earlier_daemon_has_eight_pairs() {
    use tasuki_shm::line::LINE_LEN;
    use tasuki_shm::region::{PAGE_LEN, Pages, Region};
    use tasuki_shm::vni::node_memory::JOURNAL_PAGES_BEFORE;
    let len = JOURNAL_PAGES_BEFORE * PAGE_LEN;
    let memory = Region::create("journal", len, Pages::Small).unwrap();
    let mut device = Device::new(0, Some(Journal::over(memory.span(0, len / LINE_LEN).unwrap())));
    let mut hear = |request, body: &[u8]| device.hear(request, body, ArrayVec::new());
    assert_eq!(hear(16, &1_u64.to_ne_bytes()), Ok(None));
    assert_eq!(hear(17, &[]), Ok(Some(8_u64.to_ne_bytes().to_vec())));
    assert_eq!(hear(8, &state(15, 64)), Ok(None));
    let said = hear(8, &state(16, 64)).unwrap_err().to_string();
    assert!(said.contains("it speaks of ring 16, and there are 16: start it with 8 pairs"), "{said}");
}
