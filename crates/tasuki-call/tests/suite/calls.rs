//! Calls, from the outside: every request arrives whole, an impossible request is an error, and nothing is lost on
//! the way.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use tasuki_call::{
    Armed, Ask, CallError, Client, ClientOptions, Deadline, Failure, INLINE_MAX, Reply, STATUS_DROPPED,
    STATUS_REPLY_TOO_LARGE, Server, ServerOptions, Ticket, Turn,
};
use tasuki_shm::arena::{Detach, Geometry, Slot};

use crate::common::*;
use crate::watched;

const NO_SLOTS: Geometry = Geometry { slot_len: 4096, count: 0 };

fn host() -> (Folder, Host) {
    let folder = Folder::new();
    let host = Host::start(folder.socket(), options());
    (folder, host)
}

fn connect(host: &Host, options: &ClientOptions) -> Client {
    Client::connect(&host.path, options).unwrap()
}

fn echo(client: &mut Client, bytes: &[u8]) -> Reply {
    let reply = client.call(Ask::new(ECHO, bytes), ample()).unwrap();
    assert_eq!((reply.len(), reply.to_vec().as_slice()), (bytes.len(), bytes));
    reply
}

fn defer(client: &mut Client, number: u64) -> Ticket {
    client.submit(Ask::new(DEFER, &number.to_le_bytes())).unwrap()
}

fn number_in(reply: &Reply) -> u64 {
    u64::from_le_bytes(reply.to_vec()[..8].try_into().unwrap())
}

#[test]
fn what_fits_into_an_entry_travels_inside_it() {
    watched!();
    let (_folder, host) = host();
    let mut client = connect(&host, &ClientOptions { arena: NO_SLOTS, replies: NO_SLOTS, ..small() });
    for len in 0..=INLINE_MAX {
        let reply = echo(&mut client, &pattern(len as u64, len));
        assert!(reply.inline().is_some() && reply.slot().is_none(), "{len} bytes");
        assert_eq!(reply.is_empty(), len == 0);
        assert!(reply.into_returned().is_none());
    }
}

#[test]
fn what_does_not_fit_is_copied_into_a_slot_and_comes_back_in_one() {
    watched!();
    let (_folder, host) = host();
    for detach in [Detach::Move, Detach::Guard] {
        let mut client = connect(&host, &detached(detach));
        for len in (INLINE_MAX + 1..4096).step_by(61).chain([INLINE_MAX + 1, 4095, 4096]) {
            let bytes = pattern(len as u64, len);
            let reply = echo(&mut client, &bytes);
            assert_eq!(reply.slot().map(|slot| slot.len()), Some(len));
            let mut part = vec![0; len - 1];
            assert_eq!(reply.copy_to(&mut part), len - 1);
            assert_eq!(part, bytes[..len - 1]);
            let returned = reply.into_returned().expect("the request's slot comes back with the reply");
            assert_eq!(&returned.bytes()[..len], bytes, "as it was");
        }
        assert_whole(&client);
        host.replies_come_back(&mut client);
    }
}

#[test]
fn a_slot_that_was_written_in_place_comes_back_to_be_used_again() {
    watched!();
    let (_folder, host) = host();
    for detach in [Detach::Move, Detach::Guard] {
        let mut client = connect(&host, &detached(detach));
        let mut slot = client.take_slot().unwrap();
        for round in 0..100_u64 {
            let bytes = pattern(round, 4096);
            slot.bytes_mut().copy_from_slice(&bytes);
            let reply = client.call(Ask::with_slot(ECHO, slot, 4000), ample()).unwrap();
            assert_eq!(reply.to_vec(), bytes[..4000]);
            slot = reply.into_returned().unwrap();
            assert_eq!(slot.bytes(), bytes);
        }
        assert_eq!(client.census().owner, 1);
        drop(slot);
        assert_whole(&client);
    }
}

#[test]
fn slots_of_two_mebibytes_travel_whole() {
    watched!();
    let (_folder, host) = host();
    let pool = Geometry { slot_len: 2 << 20, count: 4 };
    for detach in [Detach::Move, Detach::Guard] {
        let mut client = connect(&host, &ClientOptions { arena: pool, replies: pool, detach, ..small() });
        for round in 0..8 {
            let mut slot = client.take_slot().unwrap();
            let bytes = pattern(round, slot.len());
            slot.bytes_mut().copy_from_slice(&bytes);
            let len = slot.len();
            let reply = client.call(Ask::with_slot(ECHO, slot, len), ample()).unwrap();
            assert!(reply.to_vec() == bytes, "round {round}");
        }
        assert_whole(&client);
        host.replies_come_back(&mut client);
    }
    let free = std::fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages").unwrap_or_default();
    println!("free huge pages of this machine: {}", free.trim());
}

#[test]
fn an_answer_may_be_written_in_place() {
    watched!();
    let (_folder, host) = host();
    let mut client = connect(&host, &small());
    for first in 0..40 {
        let reply = client.call(Ask::new(FILL, &[first]), ample()).unwrap();
        assert_eq!(reply.to_vec(), vec![first; 4096]);
        let words = reply.slot().unwrap().words();
        assert_eq!(words.len(), 512);
        assert!(words.into_iter().all(|word| word == u64::from_ne_bytes([first; 8])));
    }
    host.replies_come_back(&mut client);
}

#[test]
fn reply_slots_that_the_client_keeps_are_missing_until_it_drops_them() {
    watched!();
    let (_folder, host) = host();
    let replies = Geometry { slot_len: 4096, count: 4 };
    let mut client = connect(&host, &ClientOptions { replies, ..small() });
    let kept: Vec<_> = (0..4).map(|first| client.call(Ask::new(FILL, &[first]), ample()).unwrap()).collect();
    assert_eq!(host.with(|server| server.reply_census().peer), 4);
    let CallError::Refused(refused) = why(client.call(Ask::new(LONG, &100_u64.to_le_bytes()), ample())) else {
        panic!("there is no slot for the answer")
    };
    assert_eq!(refused.status, STATUS_REPLY_TOO_LARGE);
    println!("{refused}");
    for (first, reply) in (0..4).zip(&kept) {
        assert_eq!(reply.to_vec(), vec![first; 4096], "nobody else got it");
    }
    drop(kept);
    assert_eq!(client.call(Ask::new(LONG, &100_u64.to_le_bytes()), ample()).unwrap().len(), 100);
    host.replies_come_back(&mut client);
}

#[test]
fn an_answer_that_fits_nowhere_is_an_error() {
    watched!();
    let (_folder, host) = host();
    let mut client = connect(&host, &small());
    for len in [4097_u64, 1 << 20] {
        let failure = client.call(Ask::new(LONG, &len.to_le_bytes()), ample()).unwrap_err();
        assert!(matches!(failure.why, CallError::Refused(refused) if refused.status == STATUS_REPLY_TOO_LARGE));
    }
    assert_eq!(client.call(Ask::new(LONG, &4096_u64.to_le_bytes()), ample()).unwrap().len(), 4096);
    host.replies_come_back(&mut client);
}

#[test]
fn too_large_a_request_is_an_error_that_states_both_sizes() {
    watched!();
    let (_folder, host) = host();
    let mut client = connect(&host, &small());
    let failure = client.call(Ask::new(ECHO, &[0; 5000]), ample()).unwrap_err();
    let text = failure.to_string();
    assert!(matches!(failure.why, CallError::TooLarge { len: 5000, max: 4096 }));
    assert!(text.contains("5000") && text.contains("4096"), "{text}");
    let slot = client.take_slot().unwrap();
    let failure = client.call(Ask::with_slot(ECHO, slot, 4097), ample()).unwrap_err();
    assert!(matches!(failure.why, CallError::TooLarge { len: 4097, max: 4096 }) && failure.slot.is_some());
    drop(failure);
    let mut slotless = connect(&host, &ClientOptions { arena: NO_SLOTS, ..small() });
    let failure = slotless.call(Ask::new(ECHO, &[0; INLINE_MAX + 1]), ample()).unwrap_err();
    assert!(matches!(failure.why, CallError::TooLarge { len: 49, max: 48 }));
    assert_whole(&client);
    echo(&mut client, b"it still works");
}

#[test]
fn without_a_free_slot_a_large_request_is_an_error() {
    watched!();
    let (_folder, host) = host();
    let mut client = connect(&host, &small());
    let slots: Vec<Slot> = (0..16).map(|_| client.take_slot().unwrap()).collect();
    assert!(matches!(client.take_slot(), Err(CallError::NoSlot { count: 16 })));
    assert!(matches!(why(client.call(Ask::new(ECHO, &[1; 100]), ample())), CallError::NoSlot { count: 16 }));
    echo(&mut client, b"small ones still travel");
    drop(slots);
    echo(&mut client, &[1; 100]);
}

#[test]
fn a_slot_of_another_client_is_refused_and_given_back() {
    watched!();
    let (_folder, host) = host();
    let (mut one, two) = (connect(&host, &small()), connect(&host, &small()));
    let failure = one.submit(Ask::with_slot(ECHO, two.take_slot().unwrap(), 1)).unwrap_err();
    assert!(matches!(failure.why, CallError::ForeignSlot) && failure.slot.is_some());
    drop(failure);
    assert_whole(&two);
    echo(&mut one, b"it still works");
}

#[test]
fn one_call_more_than_the_ring_holds_is_an_error_and_changes_nothing() {
    watched!();
    let (_folder, host) = host();
    for ring in [2, 8, 64] {
        let mut client = connect(&host, &ClientOptions { ring, ..small() });
        for round in 0..3 {
            let tickets: Vec<_> = (0..u64::from(ring)).map(|number| defer(&mut client, number)).collect();
            let slot = client.take_slot().unwrap();
            let failure = client.submit(Ask::with_slot(ECHO, slot, 9)).unwrap_err();
            assert!(matches!(failure.why, CallError::Full { capacity } if capacity == ring), "{}", failure.why);
            assert!(failure.slot.is_some(), "the slot was not used up");
            assert!(failure.to_string().contains(&ring.to_string()), "{failure}");
            drop(failure);
            let count = u64::from(ring);
            until("all are deferred", || host.board.get(DEFERRED) == count);
            host.board.set(DEFERRED, 0);
            host.board.add(RELEASE, 1);
            for (number, ticket) in (0..).zip(tickets) {
                assert_eq!(number_in(&client.wait(ticket, ample()).unwrap()), number, "round {round}");
            }
        }
        assert_eq!(client.in_flight(), 0);
        assert_whole(&client);
        echo(&mut client, &[1; 1000]);
    }
}

#[test]
fn results_that_nobody_fetches_do_not_wedge_the_server() {
    watched!();
    let (_folder, host) = host();
    let mut lazy = connect(&host, &ClientOptions { ring: 8, ..small() });
    let tickets: Vec<_> = (0..8_u8).map(|i| lazy.submit(Ask::new(ECHO, &[i])).unwrap()).collect();
    let mut other = connect(&host, &small());
    for i in 0..100 {
        echo(&mut other, &pattern(i, 100));
    }
    for (i, ticket) in (0..8_u8).zip(tickets) {
        assert_eq!(lazy.wait(ticket, ample()).unwrap().to_vec(), [i]);
    }
}

#[test]
fn a_wrong_method_is_an_error_from_the_servers_list() {
    watched!();
    let (_folder, host) = host();
    let mut client = connect(&host, &small());
    for bytes in [&b"x"[..], &[0; 200]] {
        let failure = client.call(Ask::new(77_u16, bytes), ample()).unwrap_err();
        let CallError::Refused(refused) = &failure.why else { panic!("{failure}") };
        assert_eq!(refused.status, u16::from(Trouble::NoSuchMethod));
        assert_eq!(refused.note.bytes(), b"there is no method 77");
        assert!(failure.to_string().contains("404: there is no method 77"), "{failure}");
        assert_eq!(failure.slot.is_some(), bytes.len() > INLINE_MAX, "the slot is back");
    }
    assert_whole(&client);
}

#[test]
fn a_request_that_the_server_lets_go_is_answered() {
    watched!();
    let (_folder, host) = host();
    let mut client = connect(&host, &small());
    for method in [DROP, DROP_DEFERRED] {
        for bytes in [&b"x"[..], &[0; 200]] {
            let failure = client.call(Ask::new(method, bytes), ample()).unwrap_err();
            assert!(matches!(failure.why, CallError::Refused(refused) if refused.status == STATUS_DROPPED));
            assert_eq!(failure.slot.is_some(), bytes.len() > INLINE_MAX);
        }
    }
    assert_whole(&client);
    host.replies_come_back(&mut client);
}

#[test]
fn a_panic_of_the_handler_that_is_caught_leaves_no_client_asleep() {
    watched!();
    let (_folder, host) = host();
    let mut client = connect(&host, &small());
    host.with(move |server| {
        for replies in [false, true] {
            let ticket = client.submit(Ask::new(ECHO, b"x")).unwrap();
            assert_eq!(client.arm().unwrap(), Armed::Idle);
            let turn = |server: &mut Server| {
                server.turn(None, |request| {
                    if replies {
                        request.reply(b"before the panic").unwrap();
                    }
                    panic!("a panic that a test catches");
                })
            };
            while catch_unwind(AssertUnwindSafe(|| turn(server))).is_ok() {}
            assert!(readable(client.fd().unwrap(), PATIENCE), "the client is woken");
            client.woken();
            match client.poll(&ticket) {
                Ok(Some(reply)) if replies => assert_eq!(reply.to_vec(), b"before the panic"),
                Err(Failure { why: CallError::Refused(refused), .. }) if !replies => {
                    assert_eq!(refused.status, STATUS_DROPPED);
                }
                other => panic!("{other:?}"),
            }
        }
    });
}

#[test]
fn a_deferred_request_is_resumed_by_no_other_server() {
    watched!();
    let folders = [Folder::new(), Folder::new()];
    let hosts = folders.each_ref().map(|folder| Host::start(folder.socket(), options()));
    // Both servers give their first client the same id.
    let [mut ours, mut other] = hosts.each_ref().map(|host| connect(host, &small()));
    let (mut ours, ticket, deferred) = hosts[0].with(move |server| {
        let ticket = ours.submit(Ask::new(ECHO, b"x")).unwrap();
        let mut deferred = None;
        while deferred.is_none() {
            server.turn(None, |request| deferred = Some(request.defer())).unwrap();
        }
        (ours, ticket, deferred.unwrap())
    });
    assert!(hosts[1].with(|server| server.resume(deferred).is_none()));
    assert!(matches!(why(ours.wait(ticket, ample())), CallError::Refused(refused) if refused.status == STATUS_DROPPED));
    for client in [&mut ours, &mut other] {
        assert_eq!(echo(client, b"all are served on").to_vec(), b"all are served on");
    }
}

#[test]
fn a_ticket_is_good_for_its_own_client_and_once() {
    watched!();
    let (_folder, host) = host();
    let [mut one, mut other] = [(); 2].map(|()| connect(&host, &small()));
    let ours = one.submit(Ask::new(ECHO, b"one")).unwrap();
    let theirs = other.submit(Ask::new(ECHO, b"other")).unwrap();
    assert!(matches!(why(other.poll(&ours)), CallError::NoSuchTicket));
    assert!(matches!(why(one.wait(theirs, Deadline::NEVER)), CallError::NoSuchTicket));
    until("the reply is here", || one.poll(&ours).unwrap().is_some_and(|reply| reply.to_vec() == b"one"));
    assert!(matches!(why(one.poll(&ours)), CallError::NoSuchTicket), "its result was fetched");
    assert!(matches!(why(one.wait(ours, Deadline::NEVER)), CallError::NoSuchTicket));
}

#[test]
fn deferred_requests_are_answered_out_of_order() {
    watched!();
    let (_folder, host) = host();
    let mut client = connect(&host, &small());
    let tickets: Vec<_> = (0..10).map(|number| defer(&mut client, number)).collect();
    until("all are deferred", || host.board.get(DEFERRED) == 10);
    echo(&mut client, b"who comes later is served meanwhile");
    for ticket in &tickets {
        assert!(client.poll(ticket).unwrap().is_none());
    }
    host.board.add(RELEASE, 1); // the last one first
    for (number, ticket) in (0..10).zip(tickets) {
        assert_eq!(number_in(&client.wait(ticket, ample()).unwrap()), number);
    }
}

#[test]
fn a_call_that_passes_its_deadline_gives_its_slot_back_later() {
    watched!();
    let (_folder, host) = host();
    for detach in [Detach::Move, Detach::Guard] {
        let mut client = connect(&host, &detached(detach));
        for limit in [Duration::ZERO, Duration::from_micros(30), Duration::from_millis(5)] {
            let request = pattern(1, 500);
            let failure = client.call(Ask::new(DEFER, &request[..]), Deadline::within(limit)).unwrap_err();
            assert!(matches!(failure.why, CallError::DeadlinePassed) && failure.slot.is_none(), "{failure}");
            assert_eq!((client.census().peer, client.in_flight()), (1, 1), "the server still has it");
            until("it is deferred", || host.board.get(DEFERRED) == 1);
            host.board.set(DEFERRED, 0);
            host.board.add(RELEASE, 1);
            until("the slot is back", || {
                echo(&mut client, b"next");
                client.census().free == 16
            });
            assert_eq!(client.in_flight(), 0);
        }
        assert!(matches!(
            why(client.call(Ask::new(DEFER, &0_u64.to_le_bytes()), Deadline::at(Instant::now()))),
            CallError::DeadlinePassed
        ));
        until("it is deferred", || host.board.get(DEFERRED) == 1);
        host.board.set(DEFERRED, 0);
    }
}

#[test]
fn an_abandoned_call_gives_back_its_place_and_its_slot() {
    watched!();
    let (_folder, host) = host();
    let mut client = connect(&host, &ClientOptions { ring: 16, ..small() });
    for round in 0..50 {
        for number in 0..16 {
            let bytes = pattern(number, if number % 2 == 0 { 20 } else { 200 });
            let method = *[ECHO, COUNT, DROP, 99].get((round + usize::try_from(number).unwrap()) % 4).unwrap();
            let mut ticket = None;
            until("there is a place", || {
                ticket = client.submit(Ask::new(method, &bytes)).ok();
                ticket.is_some()
            });
            client.abandon(ticket.unwrap());
        }
    }
    until("all are back", || match client.call(Ask::new(ECHO, b"last"), ample()) {
        Ok(_) => client.in_flight() == 0,
        // The server may still have all the calls that the client abandoned.
        Err(failure) => {
            assert!(matches!(failure.why, CallError::Full { .. }), "{failure}");
            false
        }
    });
    assert_whole(&client);
    host.replies_come_back(&mut client);
}

#[test]
fn staged_requests_are_heard_after_one_flush() {
    watched!();
    let (_folder, host) = host();
    let mut client = connect(&host, &small());
    for _ in 0..50 {
        let tickets: Vec<_> = (0..64_u64).map(|i| client.stage(Ask::new(ECHO, &i.to_le_bytes())).unwrap()).collect();
        client.flush();
        for (i, ticket) in (0..).zip(tickets) {
            assert_eq!(number_in(&client.wait(ticket, ample()).unwrap()), i);
        }
    }
}

#[test]
fn many_calls_in_flight_come_back_each_with_its_own_answer() {
    watched!();
    let (_folder, host) = host();
    let pool = Geometry { slot_len: 4096, count: 256 };
    for (ring, len) in [(64, 30), (256, 30), (64, 300), (256, 300)] {
        let mut client = connect(&host, &ClientOptions { ring, arena: pool, replies: pool, ..small() });
        for _ in 0..20 {
            all_at_once(&mut client, ring, |_| len);
            host.replies_come_back(&mut client);
        }
        assert_whole(&client);
    }
}

/// Makes as many calls as the ring holds, all in flight at the same time, and fetches their results last to
/// first.
fn all_at_once(client: &mut Client, ring: u32, len: impl Fn(u64) -> usize) {
    let calls = 0..u64::from(ring);
    let mut tickets: Vec<_> = calls.map(|i| (i, client.submit(Ask::new(ECHO, &pattern(i, len(i)))).unwrap())).collect();
    assert_eq!(client.in_flight(), ring as usize);
    tickets.reverse();
    for (i, ticket) in tickets {
        assert_eq!(client.wait(ticket, ample()).unwrap().to_vec(), pattern(i, len(i)));
    }
}

#[test]
fn many_clients_at_once_get_their_own_answers() {
    watched!();
    let (_folder, host) = host();
    let path = &host.path;
    std::thread::scope(|scope| {
        for thread in 0..8_u64 {
            scope.spawn(move || {
                let mut clients: Vec<_> = (0..25).map(|_| Client::connect(path, &small()).unwrap()).collect();
                for round in 0..20 {
                    let mut tickets = Vec::new();
                    for (i, client) in (0..).zip(&mut clients) {
                        let bytes = pattern(thread << 32 | round << 16 | i, if i % 5 == 0 { 1000 } else { 40 });
                        tickets.push((client.submit(Ask::new(ECHO, &bytes)).unwrap(), bytes));
                    }
                    for (client, (ticket, bytes)) in clients.iter_mut().zip(tickets) {
                        assert_eq!(client.wait(ticket, ample()).unwrap().to_vec(), bytes);
                    }
                }
                clients.iter().for_each(assert_whole);
            });
        }
    });
    until("all have left", || host.with(|server| server.clients()) == 0);
    let tally = host.with(|server| server.tally());
    assert_eq!((tally.accepted, tally.departed, tally.expelled), (200, 200, 0));
}

fn readable(fd: rustix::fd::BorrowedFd<'_>, wait: Duration) -> bool {
    let wait = rustix::event::Timespec { tv_sec: wait.as_secs().cast_signed(), tv_nsec: wait.subsec_nanos().into() };
    rustix::event::poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&wait)).unwrap() > 0
}

#[test]
fn an_armed_client_is_woken_through_its_descriptor() {
    watched!();
    let (_folder, host) = host();
    let mut client = connect(&host, &small());
    for number in 0..200 {
        let ticket = defer(&mut client, number);
        if client.arm().unwrap() == Armed::Idle {
            host.board.add(RELEASE, 1);
            // The server may see the release before the request. Then the next release answers the request.
            while !readable(client.fd().unwrap(), Duration::from_millis(3)) {
                host.board.add(RELEASE, 1);
            }
        }
        client.woken();
        assert_eq!(number_in(&client.poll(&ticket).unwrap().expect("its result is here")), number);
    }
    let reply = client.call(Ask::new(ECHO, b"and the other ways still work"), ample()).unwrap();
    assert_eq!(reply.len(), 29);
}

#[test]
fn a_server_in_another_epoll_hears_everybody() {
    watched!();
    let folder = Folder::new();
    let mut server = Server::bind(folder.socket(), options()).unwrap();
    let path = folder.socket();
    let clients = std::thread::spawn(move || {
        let mut clients: Vec<_> = (0..5).map(|_| Client::connect(&path, &small()).unwrap()).collect();
        for round in 0..500 {
            let mut tickets = Vec::new();
            for client in &mut clients {
                tickets.push(client.submit(Ask::new(ECHO, &pattern(round, 8))).unwrap());
            }
            for (client, ticket) in clients.iter_mut().zip(tickets) {
                assert_eq!(client.wait(ticket, ample()).unwrap().to_vec(), pattern(round, 8));
            }
        }
    });
    let board = Board::new();
    let mut worker = Worker::new(&board, None);
    while !clients.is_finished() || server.clients() > 0 {
        if server.arm() {
            readable(server.fd(), Duration::from_secs(1));
        }
        while let Turn::Served(_) = server.turn(Some(Duration::ZERO), |request| worker.handle(request)).unwrap() {}
    }
    clients.join().unwrap();
    assert_eq!(server.tally().served, 2500);
}

#[test]
fn a_client_can_be_moved_to_another_thread() {
    watched!();
    let (_folder, host) = host();
    let mut client = connect(&host, &small());
    for thread in 0..10 {
        let ticket = client.submit(Ask::new(ECHO, &pattern(thread, 100))).unwrap();
        client = std::thread::spawn(move || {
            assert_eq!(client.wait(ticket, ample()).unwrap().to_vec(), pattern(thread, 100));
            echo(&mut client, b"from another thread");
            client
        })
        .join()
        .unwrap();
    }
    assert_whole(&client);
}

#[test]
fn a_slot_can_be_dropped_after_its_client() {
    watched!();
    let (_folder, host) = host();
    let mut client = connect(&host, &small());
    let reply = echo(&mut client, &[5; 100]);
    let mut slot = client.take_slot().unwrap();
    drop(client);
    assert_eq!(reply.to_vec(), [5; 100], "the memory stays as long as somebody holds a slot of it");
    slot.bytes_mut().fill(1);
}

#[test]
fn a_thousand_idle_clients_cost_a_server_nothing() {
    watched!();
    let stage = Stage::new(0);
    let vars = [var("TASUKI_IDLE_MS", 1000)];
    let server = stage.spawn_until("server", SERVING, &vars);
    let before = resident(server.pid());
    let clients: Vec<_> = (0..1000).map(|_| stage.client(&ClientOptions::default())).collect();
    let each = resident(server.pid()).saturating_sub(before) / 1000;
    println!("resident memory of the server for each idle client: {each} bytes");
    assert!(each <= 64 << 10, "{each} bytes");
    let mut last = stage.client(&small());
    for _ in 0..10 {
        echo(&mut last, b"at once");
    }
    // The server finishes the work that the handshakes left once it has been quiet for a while.
    let (start, used) = (Instant::now(), cpu_time(server.pid()));
    std::thread::sleep(Duration::from_secs(1));
    let share = (cpu_time(server.pid()) - used).as_secs_f64() / start.elapsed().as_secs_f64();
    println!("an idle server with 1,001 clients used {:.3} % of a core", share * 100.0);
    assert!(share < 0.05, "{:.3} % of a core", share * 100.0);
    let mut hundredth = clients.into_iter().nth(99).unwrap();
    echo(&mut hundredth, b"the idle are still connected");
}

/// The model's record of a call in flight.
struct Call {
    ticket: Ticket,
    method: u16,
    bytes: Vec<u8>,
}

impl Call {
    /// Asserts that this call may have this outcome.
    fn settle(&self, outcome: Result<Reply, Failure>) -> Option<Slot> {
        let (slot, sent) = (self.bytes.len() > INLINE_MAX, &self.bytes);
        match outcome {
            Ok(reply) => {
                assert!(matches!(self.method, ECHO | DEFER | FILL), "method {} has no reply", self.method);
                match self.method {
                    FILL => assert_eq!(reply.to_vec(), vec![sent[0]; 4096]),
                    _ => assert_eq!(&reply.to_vec(), sent),
                }
                let returned = reply.into_returned();
                assert_eq!(returned.is_some(), slot);
                returned
            }
            Err(failure) => {
                let CallError::Refused(refused) = failure.why else { panic!("{failure}") };
                let expected: &[u16] = match self.method {
                    DROP | DROP_DEFERRED => &[STATUS_DROPPED],
                    FILL => &[507],
                    ECHO | DEFER => &[STATUS_REPLY_TOO_LARGE],
                    _ => &[404],
                };
                assert!(expected.contains(&refused.status), "method {}: {refused}", self.method);
                assert_eq!(failure.slot.is_some(), slot);
                failure.slot
            }
        }
    }
}

#[test]
fn any_mix_of_operations_keeps_every_call_and_every_slot() {
    watched!();
    let (_folder, host) = host();
    let mut dice = Dice::new("any_mix_of_operations");
    for round in 0..40 {
        let detach = *dice.pick(&[Detach::Move, Detach::Guard]);
        let ring = *dice.pick(&[2, 4, 16, 64]);
        mix(&host, &mut dice, &ClientOptions { ring, detach, ..small() }, round);
    }
}

fn mix(host: &Host, dice: &mut Dice, options: &ClientOptions, round: u32) {
    let mut client = connect(host, options);
    let mut calls: HashMap<u64, Call> = HashMap::new();
    let mut held: Vec<Slot> = Vec::new();
    let mut next = 0;
    for _ in 0..400 {
        match dice.below(10) {
            0..=4 => {
                next += 1;
                if let Some(call) = submit(&mut client, dice, &mut held) {
                    calls.insert(next, call);
                }
            }
            5..=6 if !calls.is_empty() => {
                let key = *dice.pick(&calls.keys().copied().collect::<Vec<_>>());
                match client.poll(&calls[&key].ticket).transpose() {
                    Some(outcome) => held.extend(calls.remove(&key).unwrap().settle(outcome)),
                    None => _ = host.board.add(RELEASE, 1),
                }
            }
            7 if !calls.is_empty() => {
                let key = *dice.pick(&calls.keys().copied().collect::<Vec<_>>());
                let call = calls.remove(&key).unwrap();
                if dice.once_in(2) {
                    client.abandon(call.ticket);
                    continue;
                }
                finish(host, &mut client, call, &mut held);
            }
            8 => drop(held.pop()),
            _ => held.extend(client.take_slot().ok()),
        }
        assert!(client.census().owner as usize >= held.len());
    }
    for call in calls.into_values() {
        finish(host, &mut client, call, &mut held);
    }
    assert_eq!(client.census().free as usize + held.len() + client.census().peer as usize, 16);
    drop(held);
    until("the abandoned are back", || {
        host.board.add(RELEASE, 1);
        if let Ok(ticket) = client.submit(Ask::new(ECHO, b"x")) {
            let _ = client.wait(ticket, ample()).unwrap();
        }
        client.in_flight() == 0
    });
    assert_whole(&client);
    host.replies_come_back(&mut client);
    drop(client);
    until("it has left", || host.with(|server| server.clients()) == 0);
    println!("round {round}: {options:?}: whole");
}

fn submit(client: &mut Client, dice: &mut Dice, held: &mut Vec<Slot>) -> Option<Call> {
    let method = *dice.pick(&[ECHO, ECHO, ECHO, DEFER, DROP, DROP_DEFERRED, FILL, 99]);
    let len = *dice.pick(&[8, 20, 48, 49, 1000, 4096]);
    let mut bytes = pattern(dice.next(), len);
    bytes[..8].copy_from_slice(&(dice.below(100) as u64).to_le_bytes());
    let ticket = match held.pop() {
        Some(mut slot) if len > INLINE_MAX => {
            slot.bytes_mut()[..len].copy_from_slice(&bytes);
            client.stage(Ask::with_slot(method, slot, len))
        }
        slot => {
            held.extend(slot);
            client.submit(Ask::new(method, &bytes))
        }
    };
    match ticket {
        Ok(ticket) => Some(Call { ticket, method, bytes }),
        Err(Failure { why: CallError::Full { .. } | CallError::NoSlot { .. }, slot }) => {
            held.extend(slot);
            None
        }
        Err(failure) => panic!("{failure}"),
    }
}

fn finish(host: &Host, client: &mut Client, call: Call, held: &mut Vec<Slot>) {
    let outcome = loop {
        host.board.add(RELEASE, 1);
        match client.poll(&call.ticket).transpose() {
            Some(outcome) => break outcome,
            None => std::thread::yield_now(),
        }
    };
    held.extend(call.settle(outcome));
}

#[test]
fn the_longest_times_are_times_like_any_other() {
    watched!();
    let folder = Folder::new();
    let mut server = Server::bind(folder.socket(), ServerOptions { spin: Some(Duration::MAX), ..options() }).unwrap();
    let mut worker = Worker::new(&Board::new(), server.state());
    std::thread::scope(|scope| {
        let called = scope.spawn(|| {
            let longest = ClientOptions { spin: Some(Duration::MAX), handshake: Duration::MAX, ..small() };
            let mut client = Client::connect(folder.socket(), &longest).unwrap();
            echo(&mut client, &[7; 40]);
        });
        while server.tally().departed == 0 {
            server.turn(Some(Duration::MAX), |request| worker.handle(request)).unwrap();
        }
        called.join().unwrap();
    });
}
