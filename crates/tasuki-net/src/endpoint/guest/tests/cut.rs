//! Connections that end while the guest goes on: its front end connects again as QEMU does, which does not know where a
//! packed ring stands, and the guest's driver notices nothing.

use super::migration::{exchange, right};
use super::theirs::Says;
use super::*;

/// How a connection ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// The front end is sent away.
    Breach,
    /// The front end closes it.
    Close,
    /// The node ends, with all that it remembers.
    Node,
}

/// Ends the connection of a machine, whose worker sleeps.
pub(super) fn cut(net: &mut Net, machine: &mut Machine, end: End) {
    let node = net.node.as_mut().unwrap();
    while node.arm() == Armed::Busy {
        node.turn();
    }
    match end {
        End::Breach => {
            // A request that does not exist, before the next frame is taken.
            assert!(theirs::send(&machine.socket, &theirs::message(99, 0, &[]), &[]));
            net.guest().must_hear = true;
            net.settle();
            assert!(machine.is_hung_up() && net.trouble().contains("request 99"));
        }
        End::Close => {
            rustix::net::shutdown(&machine.socket, Shutdown::Both).unwrap();
            net.guest().must_hear = true;
            net.settle();
        }
        End::Node => {
            let folder = net.folder.path().to_owned();
            drop(net.node.take());
            std::fs::remove_file(folder.join("vm.sock")).unwrap();
            *net = Net::new(2);
            rustix::net::shutdown(&machine.socket, Shutdown::Both).unwrap();
        }
    }
    assert!(net.guest().front_end.is_none());
}

fn connect_again(net: &mut Net, machine: &mut Machine) {
    connect_again_saying(net, machine, Says::Used);
}

fn connect_again_saying(net: &mut Net, machine: &mut Machine, says: Says) {
    let path = net.folder.path().join("vm.sock");
    machine.connect_again(&path, says, &mut || net.turn());
    net.settle();
    assert!(net.guest().is_running(), "{:?}", net.guest().trouble());
}

/// All that has crossed, there and back.
#[derive(Default)]
struct Crossed([Vec<Vec<u8>>; 2]);

impl Crossed {
    fn add(&mut self, net: &mut Net, machine: &mut Machine) {
        self.0[0].extend(received(&mut net.others[0]));
        self.0[1].extend(machine.receive());
    }

    fn check(&self, count: usize, what: &str) {
        let [there, back] = &self.0;
        assert!(*there == right(OTHER, US, count), "{} there, {what}", there.len());
        assert!(*back == right(US, OTHER, count), "{} back, {what}", back.len());
    }
}

#[test]
fn each_frame_crosses_once_though_the_connection_is_cut_wherever_the_rings_stand() {
    for ((features, size, pieces), end) in RINGS.into_iter().flat_map(|ring| [(ring, End::Breach), (ring, End::Close)])
    {
        // The rings wrap, and are cut in both laps.
        for before in 0..2 * usize::from(size) + 3 {
            let what = format!("{features:#x}, {pieces:?}, {end:?} after {before}");
            let (mut net, mut crossed) = (Net::new(2), Crossed::default());
            let mut machine = net.machine(features, size);
            machine.pieces = pieces;
            for number in 0..before {
                exchange(&mut net, &mut machine, number..number + 1);
                (0..3).for_each(|_| net.turn());
                crossed.add(&mut net, &mut machine);
            }
            for round in 0..2 {
                let from = before + 4 * round;
                cut(&mut net, &mut machine, end);
                // The guest sends meanwhile.
                assert!((from..from + 2).all(|number| machine.send(&frame(OTHER, US, number))));
                if round > 0 {
                    // Another worker drives by then.
                    net.node = None;
                    net.node = Some(net.worker());
                }
                connect_again_saying(&mut net, &mut machine, Says::nth(before));
                for number in from..from + 2 {
                    net.others[0].send(US, &frame(US, OTHER, number)).unwrap();
                }
                exchange(&mut net, &mut machine, from + 2..from + 4);
                net.settle();
                crossed.add(&mut net, &mut machine);
                crossed.check(from + 4, &what);
            }
        }
    }
}

/// A node that was removed and added again has forgotten the machine, and a machine's front end knows less than the ring.
#[test]
fn a_packed_ring_of_single_descriptors_shows_a_new_node_where_it_stands() {
    for features in [ALL | PACKED, PLAIN | PACKED] {
        for before in 0..25 {
            let (mut net, mut crossed) = (Net::new(2), Crossed::default());
            let mut machine = net.machine(features, 11);
            for number in 0..before {
                exchange(&mut net, &mut machine, number..number + 1);
                (0..3).for_each(|_| net.turn());
                crossed.add(&mut net, &mut machine);
            }
            cut(&mut net, &mut machine, End::Node);
            connect_again(&mut net, &mut machine);
            for number in before..before + 15 {
                exchange(&mut net, &mut machine, number..number + 1);
                (0..3).for_each(|_| net.turn());
                crossed.add(&mut net, &mut machine);
            }
            crossed.check(before + 15, &format!("{features:#x} after {before}"));
        }
    }
}

#[test]
fn a_machine_is_not_taken_for_another_whose_connection_was_cut() {
    let features = ALL | PACKED;
    let (mut net, mut elsewhere) = (Net::new(2), Net::new(2));
    let mut machines = [net.machine(features, 64), elsewhere.machine(features, 64)];
    exchange(&mut net, &mut machines[0], 0..5);
    net.settle();
    cut(&mut net, &mut machines[0], End::Close);
    let (mut crossed, [_, machine]) = (Crossed::default(), &mut machines);
    exchange(&mut elsewhere, machine, 0..9);
    elsewhere.settle();
    crossed.add(&mut elsewhere, machine);
    cut(&mut elsewhere, machine, End::Close);
    received(&mut net.others[0]);
    connect_again(&mut net, machine);
    exchange(&mut net, machine, 9..12);
    net.settle();
    crossed.add(&mut net, machine);
    crossed.check(12, "elsewhere first");
}

/// Connects a machine whose rings were started anew, and checks that they begin at their beginning.
fn begins_anew(net: &mut Net, machine: &mut Machine, what: &str) {
    connect_again(net, machine);
    received(&mut net.others[0]);
    let mut crossed = Crossed::default();
    exchange(net, machine, 0..9);
    net.settle();
    crossed.add(net, machine);
    crossed.check(9, what);
}

/// A guest that starts its driver anew while its front end is not connected has new rings in the same place.
#[test]
fn a_driver_that_starts_anew_while_the_connection_is_cut_begins_at_its_beginning() {
    for (features, size, pieces) in RINGS {
        let mut net = Net::new(2);
        let mut machine = net.machine(features, size);
        machine.pieces = pieces;
        exchange(&mut net, &mut machine, 0..9);
        net.settle();
        cut(&mut net, &mut machine, End::Close);
        machine.start_anew();
        begins_anew(&mut net, &mut machine, &format!("{features:#x}, {pieces:?}"));
    }
}

/// A driver starts anew, and the worker is killed after any of the messages that say so. Its successor, which has not heard
/// of any, does not take the new rings for those that were in the same place.
#[test]
fn wherever_a_worker_is_killed_while_a_driver_starts_anew_the_rings_begin_at_their_beginning() {
    for (features, size, pieces) in RINGS {
        for turns in 0..20 {
            let mut net = Net::new(2);
            let mut machine = net.machine(features, size);
            machine.pieces = pieces;
            exchange(&mut net, &mut machine, 0..9);
            net.settle();
            let stale = net.parts();
            machine.stop(&mut || net.turn());
            machine.start_anew();
            let (begin, mut left) = (machine.start_of_ring(), turns);
            machine.begin([begin; 2], &mut || {
                if left > 0 {
                    net.turn();
                    left -= 1;
                }
            });
            net.replace(stale);
            net.await_news();
            net.settle();
            assert!(machine.is_hung_up());
            begins_anew(&mut net, &mut machine, &format!("{features:#x}, {pieces:?}, killed after {turns} messages"));
        }
    }
}

/// QEMU 7.2 does not tell a back end of features that the guest's driver took while there was none.
#[test]
fn a_front_end_that_has_forgotten_its_drivers_features_is_told_of() {
    let mut net = Net::new(2);
    let mut machine = net.machine(ALL, 64);
    assert_eq!(net.guest().trouble(), None);
    cut(&mut net, &mut machine, End::Close);
    machine.features = PROTOCOL;
    connect_again(&mut net, &mut machine);
    let said = net.trouble();
    assert!(said.contains("no feature that the guest's driver takes") && said.contains("; if the guest"), "{said}");
}

/// FreeBSD's driver posts its buffers before it starts the device, and Cloud Hypervisor names their number as the place to
/// begin.
#[test]
fn buffers_that_a_driver_posts_before_the_device_starts_are_used() {
    let (mut net, mut crossed) = (Net::new(2), Crossed::default());
    let mut machine = net.machine(ALL, 64);
    machine.stop(&mut || net.turn());
    for round in 0..2 {
        machine.start_anew();
        machine.begin([64, 0], &mut || net.turn());
        exchange(&mut net, &mut machine, 9 * round..9 * (round + 1));
        net.settle();
        crossed.add(&mut net, &mut machine);
        crossed.check(9 * (round + 1), &format!("round {round}"));
        machine.stop(&mut || net.turn());
    }
}

/// A front end that stopped its rings knows where they stand, also if an earlier connection of it was cut.
#[test]
fn a_front_end_that_was_told_where_its_rings_stand_is_believed() {
    for (features, size, pieces) in RINGS {
        let (mut net, mut crossed) = (Net::new(2), Crossed::default());
        let mut machine = net.machine(features, size);
        machine.pieces = pieces;
        exchange(&mut net, &mut machine, 0..5);
        net.settle();
        cut(&mut net, &mut machine, End::Close);
        connect_again(&mut net, &mut machine);
        exchange(&mut net, &mut machine, 5..9);
        net.settle();
        let bases = machine.stop(&mut || net.turn());
        cut(&mut net, &mut machine, End::Close);
        let path = net.folder.path().join("vm.sock");
        machine.connect_again_at(&path, bases, &mut || net.turn());
        exchange(&mut net, &mut machine, 9..12);
        net.settle();
        crossed.add(&mut net, &mut machine);
        crossed.check(12, &format!("{features:#x}, {pieces:?}"));
    }
}

/// A worker is killed after a change of which no other has heard: its successor cannot go on, and the front end connects
/// again. What the worker had committed and not shown, the guest sees then. Frames for the guest that wait meanwhile are
/// dropped.
#[test]
fn wherever_a_worker_is_killed_after_a_change_nobody_knows_each_frame_crosses_once() {
    for (number, (features, size, pieces)) in RINGS.into_iter().enumerate() {
        let says = Says::nth(number);
        for places in 0.. {
            let (mut net, mut crossed) = (Net::new(2), Crossed::default());
            let mut machine = net.machine(features, size);
            machine.pieces = pieces;
            exchange(&mut net, &mut machine, 0..3);
            net.settle();
            crossed.add(&mut net, &mut machine);
            let stale = net.parts();
            let call = theirs::eventfd();
            assert!(theirs::send(&machine.socket, &theirs::message(13, 0, &0_u64.to_ne_bytes()), &[call.as_fd()]));
            net.settle();
            exchange(&mut net, &mut machine, 3..9);
            let was_killed = net.kill(places, 3);
            net.replace(stale);
            net.await_news();
            net.settle();
            assert!(machine.is_hung_up(), "place {places}");
            crossed.add(&mut net, &mut machine);
            connect_again_saying(&mut net, &mut machine, says);
            exchange(&mut net, &mut machine, 9..12);
            net.settle();
            crossed.add(&mut net, &mut machine);
            let [there, back] = &crossed.0;
            let what = format!("{features:#x}, {pieces:?}, killed at place {places}");
            assert!(*there == right(OTHER, US, 12), "{} there, {what}", there.len());
            let (all, mut rest) = (right(US, OTHER, 12), back.iter());
            let is_right = all.iter().enumerate().all(|(number, it)| {
                rest.as_slice().first().is_some_and(|first| first == it && rest.next().is_some())
                    || (3..9).contains(&number)
            });
            assert!(is_right && rest.next().is_none(), "{} back, {what}", back.len());
            if !was_killed {
                assert!(places > 6, "it passes more places than that");
                break;
            }
        }
    }
}
