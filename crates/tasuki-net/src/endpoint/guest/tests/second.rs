//! Attacks on the service of two machines at a time, and on what a successor is told of them.

use std::os::fd::AsFd;

use rustix::net::SendFlags;
use theirs::{connect, eventfd, message, send, state};

use super::migration::{LOG_LEN, destination, exchange, right};
use super::*;

const RECEIVE_USED: u64 = 0x4000 + 2;

/// Returns whether the worker is woken at once, and thus never sleeps.
fn is_awake(net: &mut Net) -> bool {
    net.settle();
    let node = net.node.as_mut().unwrap();
    let _ = node.arm();
    is_readable(node.source().unwrap())
}

/// Begins a message that changes the machine's interrupt.
fn unmask(machine: &Machine) -> OwnedFd {
    let call = eventfd();
    // It wants an answer.
    assert!(send(&machine.socket, &message(13, 8, &0_u64.to_ne_bytes()), &[call.as_fd()]));
    call
}

#[test]
fn an_eventfd_of_a_second_machine_wakes_nobody() {
    let mut net = Net::new(2);
    let first = net.machine(ALL, 64);
    let second = destination(&mut net, ALL, 64);
    rustix::io::write(&second.kicks[1], &1_u64.to_ne_bytes()).unwrap();
    assert!(send(&second.socket, &message(12, 0, &1_u64.to_ne_bytes()), &[second.kicks[1].as_fd()]));
    net.settle();
    assert!(!is_awake(&mut net));
    unmask(&first);
    assert!(!is_awake(&mut net), "the worker never sleeps again");
}

#[test]
fn a_second_machine_that_has_left_wakes_nobody() {
    let mut net = Net::new(2);
    let first = net.machine(ALL, 64);
    // As the daemon has it.
    let _held = net.parts();
    let second = destination(&mut net, ALL, 64);
    let bases = first.stop(&mut || net.turn());
    second.begin(bases, &mut || net.turn());
    net.settle();
    assert!(net.guest().is_running());
    drop(first);
    assert!(!is_awake(&mut net), "the worker never sleeps again");
}

/// Such a byte (MSG_OOB) stays in the socket of a reader that does not ask for it.
#[test]
fn bytes_out_of_band_are_bytes_of_a_message_and_wake_nobody_for_long() {
    let mut net = Net::new(2);
    let first = net.machine(ALL, 64);
    let second = destination(&mut net, ALL, 64);
    let bytes = message(1, 0, &[]);
    for machine in [&first, &second] {
        for at in [0, 5, bytes.len() - 1] {
            for part in [0..at, at..at + 1, at + 1..bytes.len()].map(|range| &bytes[range]) {
                let flags = if part.len() == 1 { SendFlags::OOB } else { SendFlags::empty() };
                assert_eq!(rustix::net::send(&machine.socket, part, flags), Ok(part.len()));
                assert!(!is_awake(&mut net), "the worker never sleeps again");
            }
            assert!(theirs::answer(&machine.socket).is_some(), "byte {at}");
        }
    }
    assert_eq!(net.guest().trouble(), None);
}

#[test]
fn nobody_writes_to_a_machine_that_was_sent_away() {
    let mut net = Net::new(2);
    let mut machine = net.machine(ALL, 64);
    exchange(&mut net, &mut machine, 0..5);
    net.settle();
    let parts = net.parts();
    machine.write(0xa000 + 2, &2000_u16.to_le_bytes());
    net.settle();
    assert!(machine.is_hung_up());
    let shown = machine.half(RECEIVE_USED);
    assert!(shown >= 5);
    net.replace(parts);
    net.settle();
    assert_eq!(machine.half(RECEIVE_USED), shown, "used index: the front end may have connected again");
}

#[test]
fn a_machine_whose_description_is_stale_takes_no_number_of_a_state_back() {
    let mut net = Net::new(2);
    let machine = net.machine(ALL, 64);
    let stale = net.parts();
    let calls: Vec<_> = (0..9).map(|_| unmask(&machine)).collect();
    net.settle();
    let before = net.guest().marks()[0] >> 32;
    net.replace(stale);
    net.await_news();
    net.settle();
    assert!(machine.is_hung_up() || net.guest().front_end.is_none());
    let after = net.guest().marks()[0] >> 32;
    assert!(after > before, "{after} after {before}");
    drop(calls);
}

/// The answer never comes, the interrupt is never used, the pages are never noted.
#[test]
fn a_front_end_whose_message_died_with_its_worker_connects_again() {
    type Deed = fn(&Machine) -> OwnedFd;
    let deeds: [Deed; 3] = [
        unmask,
        |machine| {
            assert!(send(&machine.socket, &message(11, 0, &state(0, 0)), &[]));
            eventfd()
        },
        |machine| {
            let log = theirs::memory(LOG_LEN);
            let body = [LOG_LEN.to_ne_bytes(), 0_u64.to_ne_bytes()].concat();
            assert!(send(&machine.socket, &message(6, 0, &body), &[log.as_fd()]));
            log
        },
    ];
    for (which, deed) in deeds.into_iter().enumerate() {
        for places in 0.. {
            let mut net = Net::new(2);
            let machine = net.machine(ALL, 64);
            let parts = net.parts();
            deed(&machine);
            let was_killed = net.kill(places, 3);
            net.replace(parts);
            net.settle();
            net.await_news();
            net.settle();
            let was_answered = theirs::answer(&machine.socket).is_some();
            assert!(was_answered || machine.is_hung_up(), "message {which} at place {places} is lost");
            if !was_killed {
                assert!(places > 4, "it passes more places than that");
                break;
            }
        }
    }
}

#[test]
fn a_second_machine_that_reads_no_answers_is_sent_away() {
    let mut net = Net::new(2);
    let _first = net.machine(ALL, 64);
    let second = destination(&mut net, ALL, 64);
    let asks: Vec<u8> = (0..64).flat_map(|_| message(1, 0, &[])).collect();
    for _ in 0..5000 {
        // A turn for each; at last neither end has room.
        send(&second.socket, &asks, &[]);
        net.turn();
    }
    net.settle();
    let mut count = 0_u64;
    while theirs::answer(&second.socket).is_some() {
        count += 1;
    }
    assert!(second.is_hung_up(), "{count} answers came, and others were lost");
}

#[test]
fn a_machine_is_announced_in_no_other_nodes_address_and_others_hear_of_no_flood() {
    let mut net = Net::new(3);
    let machine = net.machine(ALL, 64);
    for address in [mac(OTHER), [0xff; 6], [1, 2, 3, 4, 5, 6]] {
        let body = [&address[..], &[0; 2]].concat();
        assert!(send(&machine.socket, &message(19, 0, &body), &[]));
        net.settle();
    }
    let heard = |net: &mut Net| net.others.iter_mut().map(|other| received(other).len()).collect::<Vec<_>>();
    assert_eq!((heard(&mut net), net.node.as_ref().unwrap().dropped.not_own), (vec![0; 2], 3));
    let body = [&mac(US)[..], &[0; 2]].concat();
    for _ in 0..100 {
        assert!(send(&machine.socket, &message(19, 0, &body), &[]));
    }
    (0..3).for_each(|_| net.settle());
    assert_eq!(heard(&mut net), [1; 2], "one for all messages in a row");
}

#[test]
fn a_log_that_is_given_again_and_again_takes_no_more_room() {
    let mut net = Net::new(2);
    let machine = net.machine(ALL, 64);
    // More often than a process has guards on mappings.
    for _ in 0..100 {
        drop(machine.log(LOG_LEN, &mut || net.turn()));
    }
    net.settle();
    assert!(net.guest().is_running());
}

/// The predecessor's last report comes when a front end has connected that waited.
#[test]
fn a_machine_of_which_is_heard_too_late_connects_again() {
    let mut net = Net::new(2);
    let machine = net.machine(ALL, 64);
    let parts = net.parts();
    // As the daemon has it.
    let _held = parts.fds[0].try_clone().unwrap();
    net.node = None;
    let waits = connect(&net.folder.path().join("vm.sock"));
    net.node = Some(net.worker());
    net.settle();
    net.guest().go_on(parts).unwrap();
    net.settle();
    assert!(machine.is_hung_up() || net.guest().is_running(), "nobody serves it, and it does not know");
    drop(waits);
}

/// A machine that has to connect again amid its migration forgets what its guest's driver takes, and reaches nobody.
#[test]
fn both_machines_stay_connected_if_none_runs_when_the_worker_is_replaced() {
    let mut net = Net::new(2);
    let first = net.machine(ALL, 64);
    let mut second = destination(&mut net, ALL, 64);
    let bases = first.stop(&mut || net.turn());
    second.copy(&first, 0..theirs::LEN / 4096);
    second.begin(bases, &mut || net.turn());
    net.settle();
    let bases = second.stop(&mut || net.turn());
    net.settle();
    let parts = net.parts();
    let mut node = net.node.take().unwrap();
    node.finish();
    drop(node.into_end());
    net.replace(parts);
    net.settle();
    assert!(!first.is_hung_up() && !second.is_hung_up());
    second.begin(bases, &mut || net.turn());
    exchange(&mut net, &mut second, 0..3);
    let mut there = Vec::new();
    // Frames wait for the end of a set-up.
    while there.len() < 3 {
        net.turn();
        there.extend(received(&mut net.others[0]));
    }
    assert_eq!(there, right(OTHER, US, 3));
}

/// The guest migrates to it all the same.
#[test]
fn wherever_a_worker_is_killed_a_second_machine_that_waits_stays_connected() {
    const BEFORE: usize = 5;
    const COUNT: usize = 9;
    for places in 0.. {
        let mut net = Net::new(2);
        let mut source = net.machine(ALL, 64);
        exchange(&mut net, &mut source, 0..BEFORE);
        net.settle();
        let mut other = destination(&mut net, ALL, 64);
        net.settle();
        let parts = net.parts();
        exchange(&mut net, &mut source, BEFORE..COUNT);
        let was_killed = net.kill(places, 3);
        net.replace(parts);
        net.settle();
        let (mut there, mut back) = (received(&mut net.others[0]), source.receive());
        assert!(!source.is_hung_up() && !other.is_hung_up(), "place {places}");
        let bases = source.stop(&mut || net.turn());
        other.copy(&source, 0..theirs::LEN / 4096);
        other.begin(bases, &mut || net.turn());
        exchange(&mut net, &mut other, COUNT..COUNT + BEFORE);
        net.settle();
        there.extend(received(&mut net.others[0]));
        back.extend(other.receive());
        assert!(there == right(OTHER, US, COUNT + BEFORE), "{} there, place {places}", there.len());
        assert!(back == right(US, OTHER, COUNT + BEFORE), "{} back, place {places}", back.len());
        if !was_killed {
            assert!(places > 4, "it passes more places than that");
            break;
        }
    }
}

/// No successor knows what it has said since the daemon heard of it.
#[test]
fn a_second_machine_of_which_more_was_heard_than_told_connects_again() {
    let mut net = Net::new(2);
    let first = net.machine(ALL, 64);
    let second = destination(&mut net, ALL, 64);
    net.settle();
    let parts = net.parts();
    unmask(&second);
    net.settle();
    assert!(theirs::answer(&second.socket).is_some());
    net.replace(parts);
    net.settle();
    assert!(second.is_hung_up() && !first.is_hung_up());
    assert!(net.guest().is_running());
}

#[test]
fn wherever_a_worker_is_killed_a_second_machine_waits_for_no_answer_of_nobody() {
    for places in 0.. {
        let mut net = Net::new(2);
        let first = net.machine(ALL, 64);
        let second = destination(&mut net, ALL, 64);
        net.settle();
        let parts = net.parts();
        assert!(send(&second.socket, &message(1, 0, &[]), &[]));
        let was_killed = net.kill(places, 3);
        net.replace(parts);
        net.settle();
        let is_answered = theirs::answer(&second.socket).is_some();
        assert!(is_answered || second.is_hung_up(), "place {places}");
        assert!(!first.is_hung_up());
        if !was_killed {
            assert!(is_answered && places > 2, "it passes more places than that");
            break;
        }
    }
}

/// The daemon ends a worker that sends more than a successor may be told.
#[test]
fn a_second_machine_with_which_the_parts_would_be_too_long_connects_again() {
    let mut net = Net::new(2);
    let first = net.machine(ALL, 64);
    let second = destination(&mut net, ALL, 64);
    for machine in [&first, &second] {
        for ring in 4..64_u32 {
            let [index, flags] = [ring, 1].map(u32::to_ne_bytes);
            let body = [&index[..], &flags, &[0xf0; 32]].concat();
            assert!(send(&machine.socket, &message(9, 0, &body), &[]));
            net.turn();
        }
        net.settle();
    }
    let parts = net.parts();
    assert!(parts.text.len() <= 8192, "{} bytes", parts.text.len());
    net.known = None;
    net.replace(parts);
    net.settle();
    assert!(net.guest().is_running() && !first.is_hung_up() && second.is_hung_up());
}

/// A front end stops the device in the very turn in which the other starts, and the worker is killed.
#[test]
fn wherever_a_worker_is_killed_as_two_machines_change_places_each_frame_crosses_once() {
    const BEFORE: usize = 5;
    const COUNT: usize = 9;
    for early in [true, false] {
        for places in 0.. {
            let mut net = Net::new(2);
            let mut source = net.machine(ALL, 64);
            exchange(&mut net, &mut source, 0..BEFORE);
            net.settle();
            let (mut there, mut back) = (received(&mut net.others[0]), source.receive());
            let running = net.parts();
            let mut other = destination(&mut net, ALL, 64);
            let bases = source.stop(&mut || net.turn());
            let parts = early.then_some(running);
            other.copy(&source, 0..theirs::LEN / 4096);
            other.begin(bases, &mut || ());
            exchange(&mut net, &mut other, BEFORE..COUNT);
            let mut node = net.node.take().unwrap();
            let was_killed = lives_for(places, || {
                // A turn for each message of the start, and some for frames.
                for _ in 0..24 {
                    node.rest(Duration::ZERO);
                    node.turn();
                }
            });
            let news = node.endpoint.parts().unwrap().filter(|_| !was_killed);
            drop(node);
            let before = source.read(0, theirs::LEN.try_into().unwrap());
            net.node = Some(net.worker());
            if let Some(parts) = news.or(parts) {
                // The stand-by had heard of it.
                let _ = net.guest().go_on(parts);
            }
            net.settle();
            net.await_news();
            net.settle();
            assert!(before == source.read(0, theirs::LEN.try_into().unwrap()), "place {places}: the source is written");
            if was_killed {
                // The destination connects again, as QEMU does, and goes on where its used ring stands.
                there.extend(received(&mut net.others[0]));
                back.extend(other.receive());
                drop(source);
                let bases = [theirs::RECEIVE, theirs::SEND].map(|queue| other.position(queue));
                other.connect_again_at(&net.folder.path().join("vm.sock"), bases, &mut || net.turn());
                net.settle();
            }
            net.settle();
            there.extend(received(&mut net.others[0]));
            back.extend(other.receive());
            // A turn that was committed, of a machine of which nobody else had heard: its chains are taken once more.
            if was_killed {
                let mut seen = Vec::new();
                there.retain(|it| {
                    let is_new = !seen.contains(it);
                    seen.push(it.clone());
                    is_new
                });
            }
            assert!(there == right(OTHER, US, COUNT), "{} there, killed at place {places}, {early}", there.len());
            // Nobody holds frames for a guest whose machines both connect anew (guests.md, "Known holes").
            let mut rest = right(US, OTHER, COUNT).into_iter();
            let is_right = back.iter().all(|it| rest.any(|sent| sent == *it));
            assert!(is_right && (was_killed || back.len() == COUNT), "{} back, place {places}, {early}", back.len());
            if !was_killed {
                assert!(places > 4, "it passes more places than that");
                break;
            }
        }
    }
}
