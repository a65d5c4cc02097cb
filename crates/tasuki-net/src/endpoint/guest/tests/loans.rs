//! Pairs that another node's worker serves: it or the lender is killed at each place, also as pairs are lent and called in.

use std::cell::Cell;

use super::*;
use tasuki_shm::vni::loans::{SLOTS, State};
use tasuki_testing::{Dice, PATIENCE};

const SECOND: u16 = 2;
const PAIRS: usize = 2;

/// The node of the machine, which lends, and a node that borrows.
struct Both {
    net: Net,
    second: Option<Bridge<Guest>>,
    /// The machine that the daemon has last told the second node of, and whether it shows its address.
    told: Option<(u64, u64)>,
    shows: bool,
    /// Whether the worker whose turn it is borrows.
    is_second: Cell<bool>,
}

impl Both {
    fn new() -> Self {
        let mut both = Both { net: Net::new(3), second: None, told: None, shows: false, is_second: Cell::new(false) };
        both.replace_second();
        both
    }

    /// Starts both nodes and a machine of which the second one has pairs.
    fn lending(features: u64) -> (Self, Machine) {
        let mut both = Both::new();
        let machine = both.machine(features, PAIRS);
        both.lent();
        (both, machine)
    }

    /// Starts another worker of the second node, which hears of the machine.
    fn replace_second(&mut self) {
        self.second = None;
        let guest = self.stand_by();
        self.drive_second(guest);
    }

    /// Returns the endpoint of a worker of the second node that stands by, as that opens it.
    fn stand_by(&self) -> Guest {
        let mut guest = Guest::borrowing(self.net.listener.try_clone().unwrap()).unwrap();
        guest.share(self.net.loans.clone(), SECOND);
        if let Some(known) = &self.net.known {
            guest.go_on(copy_of(known)).unwrap();
        }
        guest
    }

    fn drive_second(&mut self, guest: Guest) {
        let switch = self.net.nodes.switch(SECOND).sharing(Some(mac(US)));
        self.second = Some(Bridge::new(Box::new(guest), self.net.nodes.exact_end(SECOND), switch));
    }

    fn replace_first(&mut self) {
        let known = copy_of(self.net.known.as_ref().expect("the daemon knows the machine"));
        self.net.replace(known);
    }

    /// Takes a turn of each worker, and of the daemon.
    fn turn(&mut self) {
        let Both { net, second, told, shows, is_second } = self;
        if let Some(node) = &mut net.node {
            is_second.set(false);
            turn_of(node, &mut net.known);
            if node.endpoint.has_news() && node.endpoint.is_settled() {
                net.known = node.endpoint.parts().unwrap();
                node.endpoint.told();
            }
        }
        let Some(node) = second else { return };
        is_second.set(true);
        let known = net.known.as_ref().map(|known| (known.number, known.version));
        if known != *told {
            match &net.known {
                Some(known) => node.endpoint.go_on(copy_of(known)).unwrap(),
                None => node.endpoint.forget(told.expect("it was there").0),
            }
            *told = known;
        }
        node.rest(Duration::ZERO);
        node.turn();
        if node.endpoint.has_news() {
            let is_shown = node.endpoint.parts().unwrap().is_some();
            if is_shown != std::mem::replace(shows, is_shown) {
                net.nodes.share(SECOND, US, is_shown);
            }
        }
    }

    fn settle(&mut self) {
        (0..60).for_each(|_| self.turn());
    }

    fn until(&mut self, what: &str, is: impl Fn(&Self) -> bool) {
        let since = Instant::now();
        while !is(self) {
            assert!(since.elapsed() < PATIENCE, "{what}: {:?}", self.state());
            self.turn();
        }
    }

    fn state(&self) -> State {
        let loans = Loans::over(self.net.loans.clone());
        (0..SLOTS).map(|slot| loans.loan(slot).state).find(|state| *state != State::Home).unwrap_or(State::Home)
    }

    fn lent(&mut self) {
        self.until("pairs are lent", |both| {
            both.state() == State::Lent && both.second.as_ref().is_some_and(|it| it.endpoint.is_running())
        });
    }

    fn machine(&mut self, features: u64, pairs: usize) -> Machine {
        let path = self.net.folder.path().join("vm.sock");
        Machine::start_with(&path, features, 64, pairs, || self.turn())
    }

    /// Sends frames of a flow for each pair, both ways: those for the guest by the node that has the pair.
    fn exchange(&mut self, machine: &mut Machine, numbers: std::ops::Range<usize>) {
        for number in numbers {
            for (pair, to) in [US, SECOND].into_iter().enumerate() {
                assert!(machine.send_by_pair(pair, &of_flow(OTHER, US, pair, number)));
                self.net.others[0].send(to, &of_flow(US, OTHER, pair, number)).unwrap();
            }
        }
        self.net.others[0].flush();
    }

    /// Exchanges frames, and takes those that came.
    fn cross(&mut self, machine: &mut Machine, numbers: std::ops::Range<usize>, came: &mut [Vec<Vec<u8>>; 2]) {
        self.exchange(machine, numbers);
        self.settle();
        self.crossed(machine, came);
    }

    fn crossed_there(&mut self, came: &mut [Vec<Vec<u8>>; 2]) {
        came[0].extend(received(&mut self.net.others[0]));
    }

    /// Returns the frames of each flow that the other node has got, and the guest.
    fn crossed(&mut self, machine: &mut Machine, came: &mut [Vec<Vec<u8>>; 2]) {
        self.crossed_there(came);
        (0..PAIRS).for_each(|pair| came[1].extend(machine.receive_by_pair(pair)));
    }
}

/// A frame of the flow of a pair.
fn of_flow(to: u16, from: u16, pair: usize, number: usize) -> Vec<u8> {
    let mut frame = frame(to, from, number);
    frame.push(u8::try_from(pair).unwrap());
    frame
}

fn check(came: &[Vec<Vec<u8>>; 2], count: usize, what: &str) {
    for (came, (to, from)) in came.iter().zip([(OTHER, US), (US, OTHER)]) {
        for pair in 0..PAIRS {
            let right: Vec<_> = (0..count).map(|number| of_flow(to, from, pair, number)).collect();
            let its: Vec<_> =
                came.iter().filter(|frame| usize::from(*frame.last().unwrap()) == pair).cloned().collect();
            assert!(its == right, "{} of {count} to {to} by pair {pair}, {what}", its.len());
        }
        assert_eq!(came.len(), PAIRS * count, "to {to}, {what}");
    }
}

#[test]
fn pairs_are_lent_called_in_and_lent_again() {
    for features in [ALL, ALL | PACKED] {
        let mut both = Both::new();
        let mut machine = both.machine(features, 4);
        let pairs = |guest: &Guest| guest.front_end.as_ref().map(|it| (it.device.first, it.device.pairs));
        // On a busy machine, one is lent before the front end has started the last.
        both.until("two pairs are lent", |both| {
            let second = &both.second.as_ref().unwrap().endpoint;
            second.is_running() && pairs(second) == Some((2, 2))
        });
        assert_eq!(pairs(both.net.guest()), Some((0, 2)));
        let counts = both.net.guest().counts();
        assert!(counts.contains(&("queue_pairs", 4)), "{counts:?}");
        for pair in 0..4 {
            assert!(machine.send_by_pair(pair, &frame(OTHER, US, pair)));
        }
        both.settle();
        assert_eq!(received(&mut both.net.others[0]).len(), 4);
        // The front end asks where a ring of the borrower's stands.
        let base = machine.ask(11, &theirs::state(5, 0), &mut || both.turn()) >> 32;
        assert_eq!(base & 0x7fff, 1);
        // Of three pairs that run, it gets one.
        both.until("the rest is lent", |both| {
            let second = &both.second.as_ref().unwrap().endpoint;
            second.is_running() && second.front_end.as_ref().is_some_and(|it| it.device.first == 1)
        });
        assert!(machine.send_by_pair(1, &frame(OTHER, US, 1)));
        both.settle();
        assert_eq!(received(&mut both.net.others[0]).len(), 1);
    }
}

/// The event amid which a worker is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Amid {
    /// Frames cross.
    Frames,
    /// Pairs are lent.
    Loan,
    /// The front end says where an interrupt of the borrower's goes.
    Change,
    /// The front end asks where a ring of the borrower's stands, and starts it again.
    Stop,
}

#[test]
fn wherever_lender_or_borrower_is_killed_each_frame_crosses_exactly_once() {
    const BEFORE: usize = 2;
    const COUNT: usize = 4;
    let cases = [Amid::Frames, Amid::Loan, Amid::Change, Amid::Stop];
    for (amid, features) in cases.into_iter().flat_map(|amid| [(amid, ALL), (amid, ALL | PACKED)]) {
        let (mut killed, mut unanswered) = ([0, 0], 0);
        // Their turns have many places.
        let (first, step) = match (amid, features & PACKED) {
            (Amid::Frames | Amid::Stop, _) => (0, 1),
            (_, 0) => (0, 3),
            _ => (1, 3),
        };
        for places in (first..).step_by(step) {
            let what = format!("killed at place {places} amid {amid:?}, features {features:#x}");
            let mut both = Both::new();
            if amid == Amid::Loan {
                both.second = None;
            }
            let mut machine = both.machine(features, PAIRS);
            let mut came = [Vec::new(), Vec::new()];
            if amid == Amid::Loan {
                both.settle();
                both.replace_second();
            } else {
                both.lent();
            }
            both.exchange(&mut machine, 0..BEFORE);
            if amid != Amid::Loan {
                both.settle();
            }
            both.crossed(&mut machine, &mut came);
            both.exchange(&mut machine, BEFORE..COUNT);
            match amid {
                Amid::Frames | Amid::Loan => {}
                Amid::Change => {
                    let new = theirs::eventfd();
                    let bytes = theirs::message(13, 0, &3_u64.to_ne_bytes());
                    assert!(theirs::send(&machine.socket, &bytes, &[new.as_fd()]));
                    both.net.guest().must_hear = true;
                }
                Amid::Stop => {
                    assert!(theirs::send(&machine.socket, &theirs::message(11, 0, &theirs::state(3, 0)), &[]));
                    both.net.guest().must_hear = true;
                }
            }
            let was_killed = lives_for(places, || {
                (0..6).for_each(|_| both.turn());
                if amid != Amid::Stop {
                    both.lent();
                }
                (0..6).for_each(|_| both.turn());
            });
            if places % 2 == 0 {
                both.crossed(&mut machine, &mut came);
            }
            let was_second = both.is_second.get();
            if was_killed {
                killed[usize::from(was_second)] += 1;
                if was_second {
                    both.replace_second();
                } else {
                    both.replace_first();
                }
            }
            both.settle();
            if amid == Amid::Stop {
                let mut answer = theirs::answer(&machine.socket);
                let since = Instant::now();
                while answer.is_none() && !machine.is_hung_up() && since.elapsed() < PATIENCE {
                    both.turn();
                    answer = theirs::answer(&machine.socket);
                }
                let Some((11, body)) = answer else {
                    assert!(was_killed && !was_second && machine.is_hung_up(), "no answer, {what}");
                    unanswered += 1;
                    continue;
                };
                let base = u16::from_ne_bytes([body[4], body[5]]);
                assert_eq!(base, machine.position(3), "{what}");
                machine.start_queue(3, base);
            }
            both.lent();
            both.settle();
            both.crossed(&mut machine, &mut came);
            check(&came, COUNT, &what);
            assert!(!machine.is_hung_up(), "{what}");
            // Nothing is left for others.
            both.replace_first();
            both.replace_second();
            both.lent();
            both.settle();
            both.crossed(&mut machine, &mut came);
            check(&came, COUNT, &what);
            if !was_killed {
                // A stopped pair is not lent again.
                let least = if amid == Amid::Stop { 1 } else { 3 };
                assert!(killed.iter().all(|count| *count > least), "{killed:?} amid {amid:?}");
                // Nobody knows whether an answer went if the lender dies between the message's leaving and the answer's, or
                // of a change of which the daemon has not heard within a millisecond.
                assert!(unanswered < killed[0] / 2, "{unanswered}, {killed:?}");
                break;
            }
        }
    }
}

/// It commits nothing that its own successor would take for the place of the rings.
#[test]
fn a_borrower_that_does_not_know_the_machine_yet_leaves_all_as_it_was() {
    for features in [ALL, ALL | PACKED] {
        let (mut both, mut machine) = Both::lending(features);
        let mut came = [Vec::new(), Vec::new()];
        both.exchange(&mut machine, 0..3);
        both.settle();
        let known = both.net.known.take();
        both.replace_second();
        let second = both.second.as_mut().unwrap();
        (0..10).for_each(|_| _ = second.turn());
        assert!(!second.endpoint.is_running() && both.state() == State::Lent);
        both.net.known = known;
        both.replace_second();
        both.cross(&mut machine, 3..5, &mut came);
        check(&came, 5, &format!("{features:#x}"));
    }
}

/// Moves no frame twice, and loses none, though the connection is cut while pairs are lent.
#[test]
fn a_front_end_that_is_cut_off_while_pairs_are_lent_goes_on_when_it_has_connected_again() {
    for features in [ALL, ALL | PACKED] {
        let (mut both, mut machine) = Both::lending(features);
        let mut came = [Vec::new(), Vec::new()];
        both.exchange(&mut machine, 0..3);
        both.settle();
        both.exchange(&mut machine, 3..5);
        rustix::net::shutdown(&machine.socket, Shutdown::Both).unwrap();
        both.net.guest().must_hear = true;
        // Its receiver reads on: before a pair changes hands, all is to be read that went by the one that had it.
        while both.net.guest().front_end.is_some() {
            both.turn();
            both.crossed(&mut machine, &mut came);
        }
        assert_eq!(both.state(), State::Home);
        let path = both.net.folder.path().join("vm.sock");
        machine.socket = theirs::connect(&path);
        let bases = (0..2 * PAIRS).map(|queue| match machine.is_packed() {
            true => machine.start_of_ring(),
            false => machine.completed(queue),
        });
        let bases: Vec<u16> = bases.collect();
        for (request, flags) in [(3, 0), (16, 1_u64 << 3)] {
            let body = flags.to_ne_bytes();
            let body = if request == 3 { &[][..] } else { &body };
            assert!(theirs::send(&machine.socket, &theirs::message(request, 0, body), &[]));
        }
        machine.begin(bases, &mut || {
            both.turn();
            both.crossed_there(&mut came);
        });
        both.crossed(&mut machine, &mut came);
        both.lent();
        both.cross(&mut machine, 5..8, &mut came);
        check(&came, 8, &format!("{features:#x}"));
    }
}

#[test]
fn a_machine_whose_borrower_is_gone_for_good_has_to_connect_again() {
    let (mut both, machine) = Both::lending(ALL);
    both.second = None;
    assert!(theirs::send(&machine.socket, &theirs::message(11, 0, &theirs::state(3, 0)), &[]));
    both.settle();
    assert!(!machine.is_hung_up() && both.state() == State::Called, "its successor may come");
    Loans::over(both.net.loans.clone()).lose(SECOND);
    both.until("it is sent away", |_| machine.is_hung_up());
    let said = both.net.trouble();
    assert!(said.contains("the node that served some of its queues is gone"), "{said}");
    // The next node may be another one of the same number.
    both.net.known = None;
    both.told = None;
    both.replace_second();
    both.machine(ALL, PAIRS);
    both.lent();
}

#[test]
fn a_guest_that_breaks_a_rule_in_a_lent_pair_is_sent_away_with_a_sentence() {
    let (mut both, mut machine) = Both::lending(ALL);
    assert!(machine.send_by_pair(0, &frame(OTHER, US, 1)));
    // The available index of the sending ring of the second pair.
    machine.write(0xa0_0000 + 0xa000 + 2, &2000_u16.to_le_bytes());
    both.until("it is sent away", |_| machine.is_hung_up());
    let said = both.second.as_mut().unwrap().endpoint.trouble().unwrap();
    assert!(said.contains("more than a queue ahead"), "{said}");
    assert_eq!(received(&mut both.net.others[0]), [frame(OTHER, US, 1)]);
    let mut next = both.machine(ALL, PAIRS);
    both.lent();
    let mut came = [Vec::new(), Vec::new()];
    both.exchange(&mut next, 0..2);
    both.settle();
    both.crossed(&mut next, &mut came);
    check(&came, 2, "the next one");
}

#[test]
fn a_borrower_whose_node_ends_gives_all_back_and_a_lender_takes_all() {
    let (mut both, mut machine) = Both::lending(ALL);
    let mut came = [Vec::new(), Vec::new()];
    both.exchange(&mut machine, 0..2);
    both.settle();
    both.second.as_mut().unwrap().endpoint.dismiss(Dismissal::Over);
    both.second = None;
    both.until("all are back", |both| both.state() == State::Home);
    assert!(machine.send_by_pair(1, &of_flow(OTHER, US, 1, 2)));
    assert!(machine.send_by_pair(0, &of_flow(OTHER, US, 0, 2)));
    both.settle();
    both.crossed(&mut machine, &mut came);
    assert_eq!(came.iter().map(Vec::len).collect::<Vec<_>>(), [6, 4]);
    both.replace_second();
    both.lent();
    // A second worker of the lender's node has the lease, and gives it back.
    both.net.guest().release();
    assert!(both.second.as_ref().unwrap().endpoint.is_running() && !machine.is_hung_up());
}

/// The log of a migration has each page that either worker wrote, wherever one of them is killed.
#[test]
fn wherever_lender_or_borrower_is_killed_a_migration_copies_all() {
    const WHOLE: usize = 16 << 20;
    for (features, step) in [(ALL, 3), (ALL | PACKED, 3)] {
        for places in (0..).step_by(step) {
            let what = format!("killed at place {places}, features {features:#x}");
            let mut both = Both::new();
            let mut source = both.machine(features, PAIRS);
            let mut came = [Vec::new(), Vec::new()];
            both.exchange(&mut source, 0..2);
            both.settle();
            let log = source.log(migration::LOG_LEN, &mut || both.turn());
            let mut copy = source.read(0, WHOLE);
            both.lent();
            both.exchange(&mut source, 2..5);
            let was_killed = lives_for(places, || (0..4).for_each(|_| both.turn()));
            if was_killed {
                if both.is_second.get() { both.replace_second() } else { both.replace_first() }
            }
            both.settle();
            let bases = source.stop_pairs(2, &mut || both.turn());
            both.crossed(&mut source, &mut came);
            for page in source.pages(&log) {
                let at = usize::try_from(4096 * page).unwrap();
                copy[at..at + 4096].copy_from_slice(&source.read(4096 * page, 4096));
            }
            assert!(copy == source.read(0, WHOLE), "a written page is not noted, {what}");
            let right: Vec<u16> = (0..4).map(|queue| source.position(queue)).collect();
            assert_eq!(bases, right, "{what}");
            check(&came, 5, &what);
            if !was_killed {
                assert!(places > 6, "it passes more places than that");
                break;
            }
        }
    }
}

#[test]
fn a_lender_and_a_borrower_sleep_while_nothing_moves_and_wake_each_other() {
    let is_readable = |node: &Bridge<Guest>| crate::endpoint::is_readable(node.source().expect("a descriptor"));
    let sleep = |both: &mut Both| {
        both.settle();
        both.net.turn();
        for node in [both.net.node.as_mut().unwrap(), both.second.as_mut().unwrap()] {
            assert_eq!(node.arm(), Armed::Idle);
            assert!(!is_readable(node) && node.waits().is_none(), "{:?}", node.waits());
        }
    };
    for features in [ALL, ALL | PACKED] {
        let (mut both, mut machine) = Both::lending(features);
        sleep(&mut both);
        // A frame of a lent pair wakes the borrower alone.
        assert!(machine.send_by_pair(1, &of_flow(OTHER, US, 1, 0)));
        let [first, second] = [&both.net.node, &both.second].map(|node| is_readable(node.as_ref().unwrap()));
        assert_eq!((first, second), (false, true));
        both.second.as_mut().unwrap().wake();
        both.second.as_mut().unwrap().turn();
        assert_eq!(received(&mut both.net.others[0]).len(), 1);
        sleep(&mut both);
        // The lender calls, which wakes the borrower; and the borrower gives back, which wakes the lender.
        assert!(theirs::send(&machine.socket, &theirs::message(11, 0, &theirs::state(3, 0)), &[]));
        both.net.turn();
        assert!(is_readable(both.second.as_ref().unwrap()) && both.state() == State::Called);
        both.net.node.as_mut().unwrap().wake();
        while both.state() == State::Called {
            both.second.as_mut().unwrap().wake();
            both.second.as_mut().unwrap().turn();
        }
        until_answered(&mut both, &machine);
        both.until("nobody has the rest", |both| both.state() == State::Home);
    }
}

/// The successor of a borrower may need the lender's CPU.
#[test]
fn a_lender_that_waits_for_a_borrower_sleeps_meanwhile() {
    let (mut both, machine) = Both::lending(ALL);
    both.settle();
    both.second = None;
    assert!(theirs::send(&machine.socket, &theirs::message(11, 0, &theirs::state(3, 0)), &[]));
    both.until("it calls", |both| both.state() == State::Called);
    let node = both.net.node.as_mut().unwrap();
    while node.arm() != Armed::Idle {
        node.turn();
    }
    assert!(!crate::endpoint::is_readable(node.source().expect("a descriptor")));
    both.replace_second();
    let since = Instant::now();
    while both.state() == State::Called {
        assert!(since.elapsed() < PATIENCE, "it is not given back");
        both.second.as_mut().unwrap().turn();
    }
    assert!(
        crate::endpoint::is_readable(both.net.node.as_ref().unwrap().source().expect("a descriptor")),
        "it is woken"
    );
    until_answered(&mut both, &machine);
}

fn until_answered(both: &mut Both, machine: &Machine) {
    let since = Instant::now();
    while theirs::answer(&machine.socket).is_none() {
        assert!(since.elapsed() < PATIENCE, "no answer");
        both.net.turn();
    }
}

/// Workers of one machine write these words: no value of them ends a worker, row: T149
#[test]
fn words_of_loans_that_lie_harm_their_machine_alone() {
    let mut dice = Dice::new("loans");
    for features in [ALL, ALL | PACKED] {
        let mut both = Both::new();
        let mut _machine = both.machine(features, PAIRS);
        both.lent();
        for _ in 0..400 {
            let (line, word) = (dice.below(both.net.loans.len()), dice.below(8));
            let [state, count, first, number] = [10, 40, 40, 3].map(|end| dice.below(end) as u64);
            let loan = state | (count << 8) | (first << 16) | (number << 32);
            let any = dice.next();
            let value = *dice.pick(&[loan, number, any, 0]);
            both.net.loans[line].word(word).store(value, std::sync::atomic::Ordering::Release);
            (0..3).for_each(|_| both.turn());
            if dice.once_in(20) {
                both.replace_second();
            }
            if dice.once_in(40) && both.net.guest().front_end.is_none() {
                // Another machine comes.
                (both.net.known, both.told) = (None, None);
                (0..both.net.loans.len()).for_each(|line| {
                    (0..8).for_each(|word| {
                        both.net.loans[line].word(word).store(0, std::sync::atomic::Ordering::Release)
                    });
                });
                both.replace_second();
                _machine = both.machine(features, PAIRS);
            }
        }
    }
}

/// A worker that has stood by for longer than frames wait for pairs lets them wait for its own.
#[test]
fn frames_wait_for_a_borrower_that_has_stood_by_for_long() {
    for features in [ALL, ALL | PACKED] {
        let (mut both, mut machine) = Both::lending(features);
        let mut stands_by = both.stand_by();
        stands_by.borrower.as_mut().unwrap().since =
            Instant::now().checked_sub(MOVE).expect("the machine runs for longer");
        both.second = None; // killed; frames come before its successor drives
        both.exchange(&mut machine, 0..3);
        both.drive_second(stands_by);
        both.settle();
        let mut came = [Vec::new(), Vec::new()];
        both.crossed(&mut machine, &mut came);
        check(&came, 3, &format!("{features:#x}"));
        assert_eq!(both.second.as_ref().unwrap().dropped, Dropped::default());
    }
}

/// As `ethtool -L` has it.
#[test]
fn a_pair_that_the_guest_uses_no_more_comes_back_and_is_lent_again_once_it_does() {
    for features in [ALL, ALL | PACKED] {
        let mut both = Both::new();
        let mut machine = both.machine(features, PAIRS);
        let mut came = [Vec::new(), Vec::new()];
        for round in 0..3 {
            both.lent();
            both.cross(&mut machine, 2 * round..2 * round + 2, &mut came);
            for is_enabled in [0, 1] {
                for ring in [2, 3] {
                    let bytes = theirs::message(18, 0, &theirs::state(ring, is_enabled));
                    assert!(theirs::send(&machine.socket, &bytes, &[]));
                }
                both.net.guest().must_hear = true;
                let pairs = 1 + is_enabled as usize;
                both.until("it is heard", |both| {
                    let guest = &both.net.node.as_ref().unwrap().endpoint;
                    guest.front_end.as_ref().unwrap().device.all_pairs() == pairs
                });
            }
        }
        check(&came, 6, &format!("{features:#x}"));
    }
}

/// The rings that nobody knows are opened nowhere, though the lender hears of its machine after they were lost.
#[test]
fn pairs_that_were_lost_before_a_lender_knew_its_machine_are_opened_nowhere() {
    let (mut both, machine) = Both::lending(ALL);
    let known = both.net.known.take().unwrap();
    both.second = None;
    both.net.node = None;
    Loans::over(both.net.loans.clone()).lose(SECOND);
    both.net.node = Some(both.net.worker());
    (0..10).for_each(|_| _ = both.net.node.as_mut().unwrap().turn());
    assert_eq!(both.state(), State::Lost);
    both.net.guest().go_on(known).unwrap();
    assert_eq!(both.net.guest().front_end.as_ref().unwrap().device.pairs, 1);
    both.until("it is sent away", |_| machine.is_hung_up());
    assert!(both.net.trouble().contains("the node that served some of its queues is gone"));
    both.until("the loan is over", |both| both.state() == State::Home);
}

#[test]
fn wherever_a_lender_is_killed_that_lost_pairs_its_successor_opens_them_nowhere() {
    for places in 0.. {
        let (mut both, machine) = Both::lending(ALL);
        let known = both.net.known.take().unwrap();
        both.second = None;
        Loans::over(both.net.loans.clone()).lose(SECOND);
        let was_killed = both.net.kill(places, 20);
        both.net.node = Some(both.net.worker());
        both.net.guest().go_on(known).unwrap();
        let opened = both.net.guest().front_end.as_ref().map(|front_end| front_end.device.pairs);
        assert!(opened.is_none_or(|pairs| pairs == 1), "{opened:?}, killed at place {places}");
        both.until("it is sent away", |_| machine.is_hung_up());
        if !was_killed {
            break;
        }
    }
}

/// Without one, the next that connects is served.
#[test]
fn lost_pairs_keep_nobody_out_if_the_lender_has_no_machine_any_more() {
    let mut both = Both::new();
    let first = both.machine(ALL, PAIRS);
    both.lent();
    (both.second, both.net.node, both.net.known) = (None, None, None);
    drop(first);
    Loans::over(both.net.loans.clone()).lose(SECOND);
    both.net.node = Some(both.net.worker());
    both.told = None;
    both.replace_second();
    let machine = both.machine(ALL, PAIRS);
    both.lent();
    assert!(!machine.is_hung_up());
}

/// The lender is replaced, and cannot describe its machine to the daemon, while the borrower's node has no worker.
#[test]
fn a_lender_that_goes_while_a_borrower_has_no_worker_leaves_the_machine_to_its_successor() {
    for features in [ALL, ALL | PACKED] {
        let (mut both, mut machine) = Both::lending(features);
        let mut came = [Vec::new(), Vec::new()];
        both.exchange(&mut machine, 0..3);
        both.settle();
        both.second = None;
        both.net.guest().dismiss(Dismissal::Moved);
        assert!(!machine.is_hung_up() && both.state() == State::Called);
        both.net.node.as_mut().unwrap().turn();
        both.net.guest().release();
        both.replace_first();
        both.replace_second();
        both.lent();
        both.cross(&mut machine, 3..5, &mut came);
        check(&came, 5, &format!("{features:#x}"));
    }
}

/// A machine's memory goes with its front end, but not before its borrower has said where the pairs stand.
#[test]
fn a_borrower_forgets_a_machine_that_is_gone_when_its_pairs_are_back() {
    let (mut both, mut machine) = Both::lending(ALL);
    let number = both.net.known.as_ref().unwrap().number;
    both.replace_second();
    let knows = |both: &Both| {
        both.second.iter().any(|it| [&it.endpoint.front_end, &it.endpoint.inherited].iter().any(|it| it.is_some()))
    };
    both.second.as_mut().unwrap().endpoint.forget(number);
    assert!(knows(&both));
    let mut came = [Vec::new(), Vec::new()];
    both.until("it serves again", |both| both.second.as_ref().unwrap().endpoint.is_running());
    both.cross(&mut machine, 0..2, &mut came);
    check(&came, 2, "its successor");
    (both.net.guest().lender.calls, both.net.guest().must_hear) = (true, true);
    both.until("the pairs are back", |both| both.state() == State::Home);
    both.turn();
    assert!(!knows(&both));
}

/// The lender's worker ends, and sends the machine away, while the borrower's hangs or has died.
#[test]
fn a_borrower_that_stands_by_says_where_the_pairs_of_a_machine_stand_that_is_gone() {
    for is_killed in [true, false] {
        let (mut both, machine) = Both::lending(ALL);
        let mut stands_by = both.stand_by();
        let number = both.net.known.take().unwrap().number;
        both.net.guest().dismiss(Dismissal::Over);
        assert!(machine.is_hung_up() && both.state() == State::Called);
        stands_by.forget(number);
        assert!(stands_by.keeps_gone() && stands_by.inherited.is_some());
        if is_killed {
            both.second = None;
            both.drive_second(stands_by);
        } else {
            while both.state() == State::Called {
                both.second.as_mut().unwrap().turn();
            }
            assert!(!stands_by.keeps_gone() && stands_by.inherited.is_none(), "its memory is held");
        }
        both.net.node = Some(both.net.worker());
        let mut next = both.machine(ALL, PAIRS);
        both.lent();
        let mut came = [Vec::new(), Vec::new()];
        both.cross(&mut next, 0..2, &mut came);
        check(&came, 2, "the next one");
    }
}

/// The lender cannot describe to the daemon that a second front end has come.
#[test]
fn a_lender_without_descriptors_leaves_the_machine_to_its_successor_by_what_it_told_before() {
    let (mut both, mut machine) = Both::lending(ALL);
    let mut came = [Vec::new(), Vec::new()];
    both.exchange(&mut machine, 0..3);
    both.settle();
    both.second = None;
    let path = both.net.folder.path().join("vm.sock");
    let mut other = std::os::unix::net::UnixStream::connect(path).unwrap();
    let node = both.net.node.as_mut().unwrap();
    (node.endpoint.must_hear, node.endpoint.must_accept) = (true, true);
    node.turn();
    assert!(node.endpoint.has_news() && node.endpoint.other.is_some());
    assert!(node.endpoint.stays_as_told() && node.endpoint.other.is_none());
    assert_eq!(std::io::Read::read(&mut other, &mut [0; 1]).unwrap(), 0, "it may connect again");
    both.replace_first();
    both.replace_second();
    both.lent();
    both.cross(&mut machine, 3..5, &mut came);
    check(&came, 5, "its successor");
    assert!(!machine.is_hung_up());
    both.second = None;
    (both.net.guest().lender.calls, both.net.guest().must_hear) = (true, true);
    both.settle();
    assert!(both.net.guest().stays_as_told(), "they are not back");
}

#[test]
fn no_pair_is_lent_amid_a_message() {
    let mut both = Both::new();
    both.second = None;
    let machine = both.machine(ALL, PAIRS);
    both.settle();
    let ask = theirs::message(11, 0, &theirs::state(3, 0));
    assert!(theirs::send(&machine.socket, &ask[..7], &[]));
    both.net.guest().must_hear = true;
    both.settle();
    both.replace_second();
    both.settle();
    assert_eq!(both.state(), State::Home);
    assert!(theirs::send(&machine.socket, &ask[7..], &[]));
    both.net.guest().must_hear = true;
    until_answered(&mut both, &machine);
}

#[test]
fn a_loan_is_over_once_it_is_committed_where_its_pairs_stand() {
    let (mut both, mut machine) = Both::lending(ALL);
    let mut came = [Vec::new(), Vec::new()];
    both.cross(&mut machine, 0..3, &mut came);
    (both.net.guest().lender.calls, both.net.guest().must_hear) = (true, true);
    both.net.turn();
    while both.state() == State::Called {
        both.second.as_mut().unwrap().turn();
    }
    assert_eq!(both.state(), State::Returned);
    both.net.guest().dismiss(Dismissal::Moved);
    assert_eq!(both.state(), State::Returned, "no turn has been committed since");
    both.net.turn();
    assert_eq!(both.state(), State::Home);
}

#[test]
fn a_guest_that_breaks_a_rule_in_the_lenders_pair_is_called_in_at_once() {
    let (mut both, machine) = Both::lending(ALL);
    both.settle();
    // The available index of the sending ring of the first pair.
    machine.write(0xa000 + 2, &2000_u16.to_le_bytes());
    let node = both.net.node.as_mut().unwrap();
    // It looks at the front end in none of these turns by itself.
    (node.endpoint.turns, node.endpoint.must_hear) = (1, false);
    (0..3).for_each(|_| _ = node.turn());
    assert_eq!(both.state(), State::Called);
    both.until("it is sent away", |_| machine.is_hung_up());
    assert!(both.net.trouble().contains("more than a queue ahead"));
}

/// Its node may have been ready for a loan, and have died before it could say that it is not any more.
#[test]
fn a_borrower_whose_node_is_shown_and_gets_no_pair_has_it_hidden() {
    let (mut both, machine) = Both::lending(ALL);
    both.net.node = None;
    drop(machine);
    Loans::over(both.net.loans.clone()).lose(SECOND);
    both.second = None;
    (both.net.known, both.told) = (None, None);
    both.replace_second();
    assert!(both.shows);
    both.settle();
    let guest = &mut both.second.as_mut().unwrap().endpoint;
    guest.borrower.as_mut().unwrap().since = Instant::now().checked_sub(MOVE).expect("the machine runs for longer");
    let says = [(); 2].map(|()| {
        guest.tick(Instant::now(), &mut Dropped::default());
        guest.has_news().then(|| guest.parts().unwrap().is_some())
    });
    assert_eq!(says, [Some(true), Some(false)]);
}

#[test]
fn offers_go_to_no_more_nodes_than_there_are_pairs_beside_the_lenders() {
    let mut both = Both::new();
    both.second = None;
    let loans = Loans::over(both.net.loans.clone());
    // One that is there again has a slot before the other.
    assert_eq!([loans.claim(9), loans.claim(SECOND)], [Some(0), Some(1)]);
    loans.lose(9);
    let _machine = both.machine(ALL, PAIRS);
    both.until("it is offered", |_| loans.loan(1).state == State::Offered);
    assert_eq!(loans.claim(9), Some(0));
    (0..64).for_each(|_| both.turn());
    assert_eq!([0, 1].map(|slot| loans.loan(slot).state), [State::Offered, State::Home]);
}

/// row: T149
#[test]
fn a_loan_of_no_pairs_is_none() {
    assert_eq!(Device::default().borrow(1, 3..3, std::iter::empty(), None), Err(Refusal::Stale));
}

/// Deaths in any order: of either worker, of its successor, before that has heard of the machine, amid changes.
#[test]
fn whichever_workers_die_one_after_the_other_each_frame_crosses_exactly_once() {
    const ROUNDS: usize = 100;
    let mut dice = Dice::new("deaths among loans");
    let (mut cut, mut killed) = (0, 0);
    for round in 0..ROUNDS {
        let features = *dice.pick(&[ALL, ALL | PACKED]);
        let (mut both, mut machine) = Both::lending(features);
        let (mut came, mut count) = ([Vec::new(), Vec::new()], 0);
        let mut deeds = Vec::new();
        for _ in 0..12 {
            let deed = dice.below(6);
            match deed {
                0 | 1 => {
                    both.exchange(&mut machine, count..count + 2);
                    count += 2;
                }
                2 => {
                    both.settle();
                    let (ring, call) = (dice.below(4) as u64, theirs::eventfd());
                    theirs::send(&machine.socket, &theirs::message(13, 0, &ring.to_ne_bytes()), &[call.as_fd()]);
                    both.net.guest().must_hear = true;
                }
                3 => {
                    both.settle();
                    for (ring, is_enabled) in [(2, 0), (3, 0), (2, 1), (3, 1)] {
                        let bytes = theirs::message(18, 0, &theirs::state(ring, is_enabled));
                        theirs::send(&machine.socket, &bytes, &[]);
                    }
                    both.net.guest().must_hear = true;
                }
                4 => {
                    both.second.as_mut().unwrap().endpoint.dismiss(Dismissal::Over);
                    both.replace_second();
                }
                _ => both.settle(),
            }
            let places = u32::try_from(dice.below(90)).unwrap();
            let was_killed = lives_for(places, || (0..8).for_each(|_| both.turn()));
            deeds.push((deed, was_killed.then(|| both.is_second.get())));
            both.crossed(&mut machine, &mut came);
            if !was_killed {
                continue;
            }
            killed += 1;
            // A worker that knows no machine drops the frames for one.
            let is_told = !(2..4).contains(&deed) || dice.below(2) == 0;
            match both.is_second.get() {
                true => both.replace_second(),
                false if is_told => both.replace_first(),
                false => {
                    // It is told late, and may have been killed by then.
                    both.net.node = None;
                    both.net.node = Some(both.net.worker());
                    let node = both.net.node.as_mut().unwrap();
                    (0..dice.below(8)).for_each(|_| _ = node.turn());
                    both.replace_first();
                }
            }
        }
        both.settle();
        if machine.is_hung_up() {
            cut += 1;
            continue;
        }
        both.lent();
        both.settle();
        both.crossed(&mut machine, &mut came);
        check(&came, count, &format!("round {round}, {features:#x}, {deeds:?}"));
    }
    // Of a change the daemon may not hear within a millisecond.
    assert!(cut < ROUNDS / 4 && killed > ROUNDS, "{cut} had to connect again, {killed} were killed");
}
