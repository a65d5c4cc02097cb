//! A guest that migrates: the log of written pages, and the second machine.

use super::*;

/// Bytes of a log with a bit for each page of the guest.
pub(super) const LOG_LEN: u64 = (theirs::GUEST + theirs::LEN) / 4096 / 8;

/// Bytes of the machine's memory.
const WHOLE: usize = 16 << 20;

pub(super) fn exchange(net: &mut Net, machine: &mut Machine, numbers: std::ops::Range<usize>) {
    for number in numbers {
        assert!(machine.send(&frame(OTHER, US, number)));
        net.others[0].send(US, &frame(US, OTHER, number)).unwrap();
    }
    net.others[0].flush();
}

pub(super) fn right(to: u16, from: u16, count: usize) -> Vec<Vec<u8>> {
    (0..count).map(|number| frame(to, from, number)).collect()
}

fn all_pages() -> std::ops::Range<u64> {
    0..theirs::LEN / 4096
}

fn await_end(net: &mut Net, machine: &Machine) -> String {
    net.settle();
    assert!(machine.is_hung_up());
    net.trouble()
}

/// Connects the machine to which another is to migrate.
pub(super) fn destination(net: &mut Net, features: u64, size: u16) -> Machine {
    let path = net.folder.path().join("vm.sock");
    Machine::connect(&path, features, size, &mut || net.turn())
}

#[test]
fn wherever_a_worker_is_killed_a_migration_copies_all_and_each_frame_crosses_once() {
    const BEFORE: usize = 3;
    const DURING: usize = 9;
    const COUNT: usize = 12;
    for (features, size, pieces) in RINGS {
        for places in 0.. {
            let mut net = Net::new(2);
            let mut source = net.machine(features, size);
            source.pieces = pieces;
            exchange(&mut net, &mut source, 0..BEFORE);
            net.settle();
            let (mut there, mut back) = (received(&mut net.others[0]), source.receive());
            // The migration begins: pages are noted from now on, and all are copied once.
            let log = source.log(LOG_LEN, &mut || net.turn());
            let mut copy = source.read(0, WHOLE);
            exchange(&mut net, &mut source, BEFORE..DURING);
            let parts = net.parts();
            let was_killed = net.kill(places, 3);
            net.replace(parts);
            net.settle();
            // The source stops, and the rest of its memory is copied.
            let mut other = destination(&mut net, features, size);
            let bases = source.stop(&mut || net.turn());
            other.copy(&source, all_pages());
            for page in source.pages(&log) {
                let at = usize::try_from(4096 * page).unwrap();
                copy[at..at + 4096].copy_from_slice(&source.read(4096 * page, 4096));
            }
            assert!(copy == source.read(0, WHOLE), "killed at place {places}: a written page is not noted");
            other.begin(bases, &mut || net.turn());
            net.settle();
            exchange(&mut net, &mut other, DURING..COUNT);
            net.settle();
            there.extend(received(&mut net.others[0]));
            back.extend(other.receive());
            assert!(there == right(OTHER, US, COUNT), "{} there, killed at place {places}", there.len());
            assert!(back == right(US, OTHER, COUNT), "{} back, killed at place {places}", back.len());
            assert_eq!(net.node.as_ref().unwrap().dropped, Dropped::default(), "killed at place {places}");
            if !was_killed {
                assert!(places > 6, "it passes more places than that");
                break;
            }
        }
    }
}

#[test]
fn a_second_machine_that_starts_while_the_first_runs_is_sent_away_and_a_third_at_once() {
    let mut net = Net::new(2);
    let mut first = net.machine(ALL, 64);
    let second = destination(&mut net, ALL, 64);
    let third = theirs::connect(&net.folder.path().join("vm.sock"));
    net.settle();
    assert_eq!(rustix::io::read(&third, &mut [0; 1]), Ok(0));
    assert!(net.trouble().contains("a third front end connected"));
    second.begin([0; 2], &mut || net.turn());
    assert!(await_end(&mut net, &second).contains("the node's machine still runs"));
    exchange(&mut net, &mut first, 0..3);
    net.settle();
    assert_eq!((received(&mut net.others[0]), first.receive()), (right(OTHER, US, 3), right(US, OTHER, 3)));
    let Clients { attached, refused, .. } = net.guest().clients;
    assert_eq!((attached, refused), (1, 2));
}

#[test]
fn a_migration_that_fails_goes_on_where_it_began() {
    for features in [ALL, ALL | PACKED] {
        let mut net = Net::new(2);
        let mut source = net.machine(features, 64);
        exchange(&mut net, &mut source, 0..5);
        net.settle();
        let (mut there, mut back) = (received(&mut net.others[0]), source.receive());
        let other = destination(&mut net, features, 64);
        let bases = source.stop(&mut || net.turn());
        // The other machine never runs: it ends, before or after the first one goes on.
        drop(other);
        source.begin(bases, &mut || net.turn());
        exchange(&mut net, &mut source, 5..9);
        net.settle();
        there.extend(received(&mut net.others[0]));
        back.extend(source.receive());
        assert_eq!((there, back), (right(OTHER, US, 9), right(US, OTHER, 9)));
    }
}

/// The way back, by the same two machines. Frames that come while neither runs wait.
#[test]
fn a_guest_goes_there_and_back_and_its_worker_is_replaced_meanwhile() {
    for features in [ALL, ALL | PACKED] {
        let mut net = Net::new(2);
        let mut here = net.machine(features, 64);
        let mut there = destination(&mut net, features, 64);
        let (mut arrived, mut came) = (Vec::new(), Vec::new());
        for round in 0..4 {
            exchange(&mut net, &mut here, 6 * round..6 * round + 5);
            net.settle();
            arrived.extend(received(&mut net.others[0]));
            came.extend(here.receive());
            let bases = here.stop(&mut || net.turn());
            there.copy(&here, all_pages());
            exchange(&mut net, &mut there, 6 * round + 5..6 * round + 6);
            net.settle();
            assert!(received(&mut net.others[0]).is_empty());
            there.begin(bases, &mut || net.turn());
            net.settle();
            assert!(!here.is_hung_up() && !there.is_hung_up());
            if round == 2 {
                let parts = net.parts();
                net.replace(parts);
                net.settle();
                drop(here);
                here = destination(&mut net, features, 64);
            }
            std::mem::swap(&mut here, &mut there);
        }
        net.settle();
        arrived.extend(received(&mut net.others[0]));
        came.extend(here.receive());
        assert_eq!((arrived, came), (right(OTHER, US, 24), right(US, OTHER, 24)));
        assert_eq!(net.node.as_ref().unwrap().dropped, Dropped::default());
    }
}

#[test]
fn a_ring_waits_for_a_log_that_has_room_for_all_memory() {
    let mut net = Net::new(2);
    let machine = net.machine(ALL, 64);
    let _short = machine.log(LOG_LEN - 8, &mut || net.turn());
    net.settle();
    assert!(!net.guest().is_running());
    let _long = machine.log(LOG_LEN, &mut || net.turn());
    net.settle();
    assert!(net.guest().is_running());
}

#[test]
fn a_log_that_is_cut_or_is_no_memory_ends_the_connection() {
    let mut net = Net::new(2);
    let mut machine = net.machine(ALL, 64);
    let log = machine.log(LOG_LEN, &mut || net.turn());
    rustix::fs::ftruncate(&log, 0).unwrap();
    exchange(&mut net, &mut machine, 0..1);
    (0..2 * ATTEND_EVERY).for_each(|_| net.turn());
    assert!(await_end(&mut net, &machine).contains("the driver's memory was taken away"));
    let machine = net.machine(ALL, 64);
    let body = [LOG_LEN.to_ne_bytes(), 0_u64.to_ne_bytes()].concat();
    let file = tempfile::tempfile().unwrap();
    assert!(theirs::send(&machine.socket, &theirs::message(6, 0, &body), &[file.as_fd()]));
    assert!(await_end(&mut net, &machine).contains("the log that it gives for written pages cannot be used"));
    for body in [[u64::MAX, 8], [LOG_LEN, 4], [LOG_LEN, 4096]] {
        let machine = net.machine(ALL, 64);
        let body = body.map(u64::to_ne_bytes).concat();
        let log = theirs::memory(LOG_LEN);
        assert!(theirs::send(&machine.socket, &theirs::message(6, 0, &body), &[log.as_fd()]));
        assert!(await_end(&mut net, &machine).contains("the log that it gives for written pages cannot be used"));
    }
}

#[test]
fn a_guest_that_cannot_announce_itself_is_announced() {
    let mut net = Net::new(2);
    let machine = net.machine(ALL, 64);
    let mut address = [0; 8];
    address[..6].copy_from_slice(&mac(US));
    assert!(theirs::send(&machine.socket, &theirs::message(19, 0, &address), &[]));
    net.settle();
    let [frame] = <[Vec<u8>; 1]>::try_from(received(&mut net.others[0])).unwrap();
    assert_eq!((&frame[..6], &frame[6..12], &frame[12..14]), (&[0xff; 6][..], &mac(US)[..], &[0x80, 0x35][..]));
    assert_eq!((&frame[14..22], frame.len()), (&[0, 1, 8, 0, 6, 4, 0, 3][..], 60));
    assert_eq!((&frame[22..28], &frame[32..38]), (&mac(US)[..], &mac(US)[..]));
}

/// The announcement goes to each node, beside the burst of the guest's frames to one of them.
#[test]
fn wherever_a_worker_is_killed_each_frame_crosses_exactly_once_behind_an_announcement() {
    const COUNT: usize = 40;
    for places in 0.. {
        let mut net = Net::new(2);
        let mut machine = net.machine(ALL, 64);
        let mut address = [0; 8];
        address[..6].copy_from_slice(&mac(US));
        assert!(theirs::send(&machine.socket, &theirs::message(19, 0, &address), &[]));
        while net.guest().front_end.as_ref().is_some_and(|front_end| front_end.device.announced.is_none()) {
            net.turn();
        }
        (0..COUNT).for_each(|number| assert!(machine.send(&frame(OTHER, US, number))));
        let parts = net.parts();
        let was_killed = net.kill(places, 4);
        let mut there = received(&mut net.others[0]);
        net.replace(parts);
        net.settle();
        there.extend(received(&mut net.others[0]));
        there.retain(|frame| frame[..2] != [0xff; 2]);
        assert!(there == right(OTHER, US, COUNT), "{} there, killed at place {places}", there.len());
        if !was_killed {
            break;
        }
    }
}
