//! Packed rings: what their journal is for, and hostile guests.

use super::migration::{exchange, right};
use super::*;

/// The places of a packed ring.
const SEND_RING: u64 = 0x8000;

/// Which flags a descriptor has in a ring's first lap.
const AVAILABLE: u16 = 1 << 7;

/// A guest uses descriptors anew that a worker has shown just before it was killed. Its successor finds the completions in
/// the journal, and leaves the descriptors alone.
#[test]
fn a_successor_writes_over_nothing_that_the_guest_has_made_available_anew() {
    const SIZE: u16 = 11;
    // With one frame more, the turn begins at the next descriptor.
    for (frames, features) in
        (0..2 * usize::from(SIZE)).zip([PLAIN | PACKED, ALL | PACKED | IN_ORDER].into_iter().cycle())
    {
        for places in 0.. {
            let mut net = Net::new(2);
            let mut machine = net.machine(features, SIZE);
            for number in 0..frames {
                exchange(&mut net, &mut machine, number..number + 1);
                net.settle();
                machine.receive();
            }
            let mut there = received(&mut net.others[0]);
            exchange(&mut net, &mut machine, frames..frames + 3);
            let parts = net.parts();
            let was_killed = net.kill(places, 1);
            let mut back = machine.receive();
            exchange(&mut net, &mut machine, frames + 3..frames + 6);
            net.replace(parts);
            net.settle();
            // Until those descriptors are next.
            for number in frames + 6..frames + 20 {
                there.extend(received(&mut net.others[0]));
                back.extend(machine.receive());
                exchange(&mut net, &mut machine, number..number + 1);
                (0..3).for_each(|_| net.turn());
            }
            there.extend(received(&mut net.others[0]));
            back.extend(machine.receive());
            assert!(there == right(OTHER, US, frames + 20), "{frames} before, killed at place {places}");
            assert!(back == right(US, OTHER, frames + 20)[frames..], "{frames} before, killed at place {places}");
            if !was_killed {
                assert!(places > 10, "it passes more places than that");
                break;
            }
        }
    }
}

/// Gives a TCP segment that is cut into so many parts of 154 bytes.
fn give_segment(net: &mut Net, parts: usize) {
    let (offload, segment) = segment(US, OTHER, 100, &vec![7; 100 * parts]);
    net.give(offload.as_bytes(), &segment);
}

#[test]
fn a_turn_completes_no_more_than_the_journal_holds() {
    for places in 0.. {
        let mut net = Net::new(2);
        let mut machine = net.machine(PLAIN | PACKED, 512);
        // One completion too many for a turn.
        (0..2).for_each(|_| give_segment(&mut net, 256));
        let parts = net.parts();
        let was_killed = net.kill(places, 1);
        net.replace(parts);
        net.settle();
        let came = machine.receive();
        assert_eq!(came.len(), 512, "killed at place {places}");
        assert!(came.iter().all(|part| part.len() == 154));
        assert_eq!(net.node.as_ref().unwrap().dropped, Dropped::default());
        if !was_killed {
            break;
        }
    }
}

#[test]
fn a_segment_of_more_parts_than_a_turn_completes_is_dropped_and_the_next_frame_goes() {
    let mut net = Net::new(2);
    let mut machine = net.machine(PLAIN | PACKED, 512);
    // A part and its header fill four such buffers.
    (0..512).for_each(|at| machine.write(16 * at + 8, &42_u32.to_le_bytes()));
    give_segment(&mut net, 128);
    net.others[0].send(US, &frame(US, OTHER, 0)).unwrap();
    net.others[0].flush();
    net.settle();
    assert_eq!(net.node.as_ref().unwrap().dropped, Dropped { too_long: 1, ..Dropped::default() });
    assert_eq!(machine.receive(), [frame(US, OTHER, 0)]);
}

#[test]
fn a_guest_that_breaks_a_rule_of_packed_rings_is_sent_away_with_a_sentence_and_the_next_is_served() {
    type Deed = fn(&mut Machine);
    let deeds: [(Deed, &str); 7] = [
        (|machine| machine.offer_packed(theirs::SEND, 0, &[(theirs::GUEST + theirs::LEN, 64, 0)]), "lies outside"),
        (|machine| machine.offer_packed(theirs::SEND, 0, &[(u64::MAX, 64, 0)]), "lies outside"),
        (
            // A chain that never ends.
            |machine| (0..64).for_each(|at| describe(machine, at, theirs::GUEST, 64, 1 | AVAILABLE)),
            "or is a loop",
        ),
        (|machine| machine.offer_packed(theirs::SEND, 0, &[(theirs::GUEST, 17, 4)]), "an indirect table"),
        (
            |machine| machine.offer_packed(theirs::SEND, 0, &[(theirs::GUEST, 16, 4), (theirs::GUEST, 16, 0)]),
            "an indirect table",
        ),
        (|machine| machine.offer_packed(theirs::SEND, 0, &[(theirs::GUEST, 16 * 257, 4)]), "more than 256 descriptors"),
        (|machine| rustix::fs::ftruncate(&machine.memory, 0).unwrap(), "memory was taken away"),
    ];
    let mut net = Net::new(2);
    for (deed, says) in deeds {
        let mut machine = net.machine(ALL | PACKED, 64);
        deed(&mut machine);
        (0..200).for_each(|_| net.turn());
        let said = net.trouble();
        assert!(said.contains(says), "{said}");
        assert!(machine.is_hung_up());
    }
    let mut machine = net.machine(ALL | PACKED, 64);
    exchange(&mut net, &mut machine, 0..1);
    net.settle();
    assert_eq!((received(&mut net.others[0]), machine.receive()), (right(OTHER, US, 1), right(US, OTHER, 1)));
}

fn describe(machine: &Machine, at: u16, address: u64, len: u32, flags: u16) {
    let bytes = [&address.to_le_bytes()[..], &len.to_le_bytes(), &[0, 0], &flags.to_le_bytes()].concat();
    machine.write(SEND_RING + 16 * u64::from(at), &bytes);
}

/// A ring may have any number of descriptors but none, and begins where there is one.
#[test]
fn a_front_end_that_begins_behind_the_end_of_a_packed_ring_is_told() {
    let mut net = Net::new(2);
    let path = net.folder.path().join("vm.sock");
    for (size, base, says) in [(7, 0x8007, "starts at descriptor 7"), (40_000, 0x8000, "a queue of 40000 descriptors")]
    {
        let machine = Machine::connect(&path, ALL | PACKED, size, &mut || net.turn());
        machine.begin([base; 2], &mut || net.turn());
        net.settle();
        let said = net.trouble();
        assert!(said.contains(says), "{said}");
    }
}

/// A hostile guest marks descriptors as available that we have and did not give back.
#[test]
fn a_guest_that_offers_what_we_have_gets_no_more_than_its_ring_a_turn() {
    let mut net = Net::new(2);
    let machine = net.machine(PLAIN | PACKED, 8);
    for lap in 0..20_u16 {
        let flags = if lap % 2 == 0 { AVAILABLE } else { 1 << 15 };
        (0..8).for_each(|at| describe(&machine, at, theirs::GUEST + 0x40_0000, 76, flags));
        net.settle();
    }
    assert!(received(&mut net.others[0]).len() <= 160 && !machine.is_hung_up());
    drop(machine);
    net.settle();
    let mut next = net.machine(PLAIN | PACKED, 8);
    exchange(&mut net, &mut next, 0..3);
    net.settle();
    assert_eq!((received(&mut net.others[0]), next.receive()), (right(OTHER, US, 3), right(US, OTHER, 3)));
}
