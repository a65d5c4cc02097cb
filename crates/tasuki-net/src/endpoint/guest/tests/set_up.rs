//! Workers that are killed while a front end sets its device up: it notices nothing, for one that is sent away amid that
//! may forget what its guest's driver wants.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use super::cut::{End, cut};
use super::migration::{exchange, right};
use super::theirs::Says;
use super::*;

/// What crossed, there and back.
type Crossed = [Vec<Vec<u8>>; 2];

/// A place at which a worker is killed: after so many turns, and so many places in the next one.
#[derive(Debug, Clone, Copy)]
struct Place {
    turns: u32,
    places: u32,
}

/// Gives a worker its turns, and kills it at a place.
struct Fate {
    at: Place,
    turn: u32,
    was_killed: bool,
    /// Whether another worker drives by now, after a kill or a turn that had no such place.
    was_replaced: bool,
}

/// A worker was killed between a message that asks, which it had taken, and the answer, or killed or replaced after a change
/// that nobody had heard of: its front end is sent away.
struct SentAway;

impl Fate {
    fn new(at: Place) -> Self {
        Fate { at, turn: 0, was_killed: false, was_replaced: false }
    }

    /// Gives the worker of a front end that the daemon knows a turn.
    fn turn(&mut self, net: &mut Net) {
        if net.known.is_none() {
            net.turn();
            // The daemon is told of a connection at once.
            if net.guest().front_end.is_some() {
                net.known = Some(net.parts());
            }
            return;
        }
        if self.turn == self.at.turns && !self.was_killed {
            self.was_killed = net.kill(self.at.places, 1);
            let parts = copy_of(net.known.as_ref().expect("the daemon knows it"));
            let look = RecvFlags::PEEK | RecvFlags::DONTWAIT;
            let is_empty = rustix::net::recv(&parts.fds[0], &mut [0; 1], look).is_err();
            net.replace(parts);
            self.was_replaced = true;
            let has_let_go = net.guest().journal.as_ref().unwrap().has_let_go();
            if self.was_killed && is_empty && has_let_go.is_some_and(|(_, is_asked)| is_asked) {
                resume_unwind(Box::new(SentAway));
            }
            // It lived, and came to no further place in this turn.
            if !self.was_killed {
                self.at = Place { turns: self.at.turns + 1, places: 0 };
            }
        } else {
            net.turn();
        }
        if self.was_replaced {
            unless_sent_away(net);
        }
        self.turn += 1;
    }
}

/// Waits until the device runs and its frames do not wait for its set-up.
fn await_running(net: &mut Net) {
    while !net.guest().is_running() || net.guest().heard || net.guest().front_end.as_ref().unwrap().is_amid_set_up() {
        net.turn();
        unless_sent_away(net);
    }
}

/// Ends a story whose worker was killed after a change that nobody had heard of yet: on a busy machine, more take so long.
fn unless_sent_away(net: &mut Net) {
    if net.guest().front_end.is_none() && net.guest().stale.is_none() {
        resume_unwind(Box::new(SentAway));
    }
}

fn cross(net: &mut Net, machine: &mut Machine, numbers: std::ops::Range<usize>, crossed: &mut Crossed) {
    exchange(net, machine, numbers);
    net.settle();
    unless_sent_away(net);
    crossed[0].extend(received(&mut net.others[0]));
    // Each pair keeps the order of its own frames.
    crossed[1].extend((0..machine.kicks.len() / 2).flat_map(|pair| machine.receive_by_pair(pair)));
    crossed[1].sort();
}

fn check([there, back]: &Crossed, count: usize, what: &str) {
    let mut all = right(US, OTHER, count);
    all.sort();
    assert!(*there == right(OTHER, US, count), "{} there, {what}", there.len());
    assert!(*back == all, "{} back, {what}", back.len());
}

/// Runs `story` with workers that are killed at every place of it, until none is.
fn wherever(mut story: impl FnMut(&mut Fate)) {
    let (mut at, mut kills, mut sent_away) = (Place { turns: 0, places: 0 }, 0, 0);
    loop {
        let mut fate = Fate::new(at);
        match catch_unwind(AssertUnwindSafe(|| story(&mut fate))) {
            Err(why) if fate.was_killed && why.is::<SentAway>() => sent_away += 1,
            // The worker came to no further place in that turn, and its successor knew no more than that of one that is killed.
            Err(why) if fate.at.turns > at.turns && why.is::<SentAway>() => {
                (at, sent_away) = (fate.at, sent_away + 1);
                continue;
            }
            done => done.unwrap_or_else(|why| resume_unwind(why)),
        }
        if !fate.was_killed {
            return assert!(kills > 30 && 20 * sent_away < kills, "{kills} kills, {sent_away} sent away");
        }
        (at, kills) = (Place { places: fate.at.places + 1, ..fate.at }, kills + 1);
    }
}

#[test]
fn wherever_a_worker_is_killed_while_a_front_end_sets_its_device_up_it_notices_nothing() {
    for (features, size, pieces) in RINGS {
        wherever(|fate| {
            let what = format!("{features:#x}, {:?}", fate.at);
            let mut net = Net::new(2);
            let path = net.folder.path().join("vm.sock");
            let mut machine = Machine::start_with(&path, features, size, 1, || fate.turn(&mut net));
            machine.pieces = pieces;
            await_running(&mut net);
            assert!(!machine.is_hung_up(), "{what}");
            let mut crossed = Crossed::default();
            cross(&mut net, &mut machine, 0..7, &mut crossed);
            // A third worker goes on with what the second one told of.
            let parts = net.parts();
            net.replace(parts);
            cross(&mut net, &mut machine, 7..12, &mut crossed);
            check(&crossed, 12, &what);
            assert!(!machine.is_hung_up(), "{what}");
        });
    }
}

/// The rings stand in the middle, and the front end of packed ones does not know where.
#[test]
fn wherever_a_worker_is_killed_while_a_front_end_connects_again_each_frame_crosses_once() {
    for (features, size, pieces) in RINGS.into_iter().step_by(2) {
        wherever(|fate| {
            let what = format!("{features:#x}, {:?}", fate.at);
            let (mut net, mut crossed) = (Net::new(2), Crossed::default());
            let mut machine = net.machine(features, size);
            machine.pieces = pieces;
            cross(&mut net, &mut machine, 0..9, &mut crossed);
            cut(&mut net, &mut machine, End::Close);
            // The guest sends meanwhile.
            assert!((9..12).all(|number| machine.send(&frame(OTHER, US, number))));
            let path = net.folder.path().join("vm.sock");
            machine.connect_again(&path, Says::Used, &mut || fate.turn(&mut net));
            await_running(&mut net);
            (9..12).for_each(|number| net.others[0].send(US, &frame(US, OTHER, number)).unwrap());
            cross(&mut net, &mut machine, 12..15, &mut crossed);
            check(&crossed, 15, &what);
            assert!(!machine.is_hung_up(), "{what}");
        });
    }
}

/// The first pair runs and carries frames, and its front end starts the second one and stops it again.
#[test]
fn wherever_a_worker_is_killed_while_a_front_end_starts_its_other_pair_each_frame_crosses_once() {
    for (features, size, pieces) in RINGS.into_iter().skip(1).step_by(2) {
        wherever(|fate| {
            let what = format!("{features:#x}, {:?}", fate.at);
            let (mut net, mut crossed) = (Net::new(2), Crossed::default());
            let path = net.folder.path().join("vm.sock");
            let mut machine = Machine::start_with(&path, features, size, 2, || net.turn());
            machine.pieces = pieces;
            await_running(&mut net);
            net.known = Some(net.parts());
            cross(&mut net, &mut machine, 0..5, &mut crossed);
            for round in 0..2 {
                let from = 5 + 5 * round;
                let places = [0, 1, 2, 3].map(|ring| {
                    let answer = machine.ask(11, &theirs::state(ring, 0), &mut || fate.turn(&mut net));
                    u16::try_from(answer >> 32 & 0xffff).unwrap()
                });
                assert!((from..from + 2).all(|number| machine.send(&frame(OTHER, US, number))));
                machine.begin(places, &mut || fate.turn(&mut net));
                await_running(&mut net);
                (from..from + 2).for_each(|number| net.others[0].send(US, &frame(US, OTHER, number)).unwrap());
                cross(&mut net, &mut machine, from + 2..from + 5, &mut crossed);
            }
            check(&crossed, 15, &what);
            assert!(!machine.is_hung_up(), "{what}");
        });
    }
}

/// A daemon that has heard of the connection hears nothing more: it was killed, or takes no message.
#[test]
fn a_front_end_goes_on_though_the_daemon_hears_no_more_of_it() {
    let mut net = Net::new(2);
    let path = net.folder.path().join("vm.sock");
    let mut machine = Machine::start_with(&path, ALL, 64, 2, || {
        let node = net.node.as_mut().unwrap();
        node.rest(Duration::ZERO);
        node.turn();
        if net.known.is_none() && net.guest().front_end.is_some() {
            net.known = Some(net.parts());
        }
    });
    while !net.guest().is_running() || net.guest().heard || net.guest().front_end.as_ref().unwrap().is_amid_set_up() {
        net.node.as_mut().unwrap().turn();
    }
    let mut crossed = Crossed::default();
    cross(&mut net, &mut machine, 0..7, &mut crossed);
    check(&crossed, 7, "");
    assert!(!machine.is_hung_up());
}

/// A worker may report 62 changes in a row, and a front end may wait for room in its socket, or for a CPU.
#[test]
fn a_front_end_that_pauses_amid_its_set_up_costs_no_report_for_each_message_after_that() {
    let reports = || {
        let mut net = Net::new(2);
        let path = net.folder.path().join("vm.sock");
        let (mut reports, mut has_paused) = (0, false);
        Machine::start_with(&path, ALL, 64, 3, || {
            if net.guest().is_running() && !std::mem::replace(&mut has_paused, net.guest().is_running()) {
                let until = Instant::now() + Duration::from_millis(1);
                while Instant::now() < until {
                    net.turn();
                }
            }
            let before = net.known.as_ref().map(|known| known.version);
            net.turn();
            if before.is_none() && net.guest().front_end.is_some() {
                net.known = Some(net.parts());
            }
            let now = net.known.as_ref().map(|known| known.version);
            reports += usize::from(has_paused && now != before);
        });
        reports
    };
    // Each of two pairs takes twelve messages. On a busy machine all of them may be far apart.
    assert!((0..20).any(|_| reports() < 12));
}

/// Linux has no card where a feature comes without one that it requires (`virtnet_validate_features`).
#[test]
fn each_feature_is_offered_with_those_that_it_requires() {
    let mut net = Net::new(2);
    let machine = net.machine(ALL, 64);
    let offered = machine.ask(1, &[], &mut || net.turn());
    // VIRTIO 1.2, 5.1.3.1, by the numbers of bits: one of those behind it.
    let rules: [(u8, &[u8]); 11] = [
        (7, &[1]),
        (8, &[1]),
        (9, &[7, 8]),
        (11, &[0]),
        (12, &[0]),
        (13, &[11, 12]),
        (21, &[17]),
        (22, &[17]),
        (54, &[1]),
        (55, &[1]),
        (56, &[0]),
    ];
    let has = |bit: &u8| offered & 1 << bit != 0;
    for (bit, required) in rules {
        assert!(has(&bit) && required.iter().any(has), "bit {bit} of {offered:#x}");
    }
}
