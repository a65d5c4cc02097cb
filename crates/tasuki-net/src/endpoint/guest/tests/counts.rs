//! What the queues of a card have carried, and the longest frame that its driver takes.

use super::*;

const MTU: u64 = 1 << 3;

/// Returns a count of the node.
pub(super) fn of(net: &mut Net, name: &str) -> u64 {
    let counts = net.guest().counts();
    counts.iter().find(|(its, _)| *its == name).unwrap_or_else(|| panic!("no {name}: {counts:?}")).1
}

/// Exchanges frames, and returns the numbers of their bytes there and back.
fn exchange(net: &mut Net, machine: &mut Machine, there: usize, back: usize) -> [u64; 2] {
    let frames = |to, from, count| (0..count).map(|number| frame(to, from, number)).collect::<Vec<_>>();
    let (there, back) = (frames(OTHER, US, there), frames(US, OTHER, back));
    assert!(there.iter().all(|it| machine.send(it)));
    back.iter().for_each(|it| net.others[0].send(US, it).unwrap());
    net.others[0].flush();
    net.settle();
    assert_eq!((received(&mut net.others[0]), machine.receive()), (there.clone(), back.clone()));
    [there, back].map(|frames| frames.iter().map(|frame| frame.len() as u64).sum())
}

#[test]
fn the_counts_of_queues_go_on_when_the_worker_is_replaced() {
    for features in [PLAIN, PLAIN | PACKED] {
        let mut net = Net::new(2);
        let mut machine = net.machine(features, 64);
        let first = exchange(&mut net, &mut machine, 5, 3);
        let parts = net.parts();
        net.replace(parts);
        let second = exchange(&mut net, &mut machine, 2, 4);
        for (name, count) in [
            ("tx0_packets", 7),
            ("rx0_packets", 7),
            ("tx0_bytes", first[0] + second[0]),
            ("rx0_bytes", first[1] + second[1]),
            // One for each worker's frames, which came in one turn.
            ("rx0_interrupts", 2),
            ("rx0_suppressed", 0),
            ("rx0_drops_no_room", 0),
        ] {
            assert_eq!(of(&mut net, name), count, "{name}");
        }
        machine.want_interrupts(theirs::RECEIVE, false);
        exchange(&mut net, &mut machine, 0, 1);
        assert_eq!((of(&mut net, "rx0_interrupts"), of(&mut net, "rx0_suppressed")), (2, 1));
        // A frame that is none, and a kick that wakes the worker for it.
        assert_eq!(net.node.as_mut().unwrap().arm(), Armed::Idle);
        assert!(machine.send(&[0; 10]));
        net.node.as_mut().unwrap().wake();
        net.settle();
        assert_eq!((of(&mut net, "tx0_kicks"), of(&mut net, "tx0_drops_length")), (1, 1));
    }
}

#[test]
fn a_guest_gets_no_frame_that_is_longer_than_its_mtu_allows() {
    let mut net = Net::new(2);
    let mut machine = net.machine(PLAIN | MTU | CSUM | GUEST_CSUM | GUEST_TSO4, 64);
    assert!(theirs::send(&machine.socket, &theirs::message(20, 8, &1400_u64.to_ne_bytes()), &[]));
    net.settle();
    assert_eq!(theirs::answer(&machine.socket), Some((20, vec![0; 8])), "it is taken");
    for _ in 0..2 {
        let frames = [1418, 1419].map(|len| {
            let mut frame = frame(US, OTHER, 0);
            frame.resize(len, 7);
            frame
        });
        frames.iter().for_each(|frame| net.others[0].send(US, frame).unwrap());
        net.others[0].flush();
        // A segment is longer, and its driver cuts it.
        let (offload, segment) = segment(US, OTHER, 1000, &[7; 3000]);
        net.give(offload.as_bytes(), &segment);
        net.settle();
        assert_eq!(machine.receive(), [frames[0].clone(), segment]);
        assert_eq!(net.node.as_ref().unwrap().dropped, Dropped { too_long: 1, ..Dropped::default() });
        // The next worker knows as much.
        let parts = net.parts();
        net.replace(parts);
        net.settle();
    }
    assert_eq!(of(&mut net, "rx0_drops_length"), 2);
    assert!(theirs::send(&machine.socket, &theirs::message(20, 0, &60_u64.to_ne_bytes()), &[]));
    net.settle();
    let said = net.trouble();
    assert!(said.contains("an MTU of 60 bytes") && machine.is_hung_up(), "{said}");
}
