//! Death: the surviving end gets an answer and its slots, and continues.

use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use tasuki_call::{Ask, CallError, Client, ClientOptions, Deadline, Ticket};
use tasuki_shm::arena::Detach;
use tasuki_testing::alone;
use tasuki_testing::process::descriptors;

use crate::common::*;
use crate::watched;

/// Far more than the test should take, even on a machine that does ten other things.
const AT_ONCE: Duration = Duration::from_secs(20);

/// A client that never stops calling, and keeps every slot and reply that it gets.
pub fn caller(told: &Told) {
    let options = ClientOptions { spin: Some(Duration::from_micros(5)), ..small() };
    let mut client = Client::connect(&told.socket, &options).unwrap();
    let (mut slots, mut replies) = (Vec::new(), Vec::new());
    match told.var("TASUKI_STYLE").unwrap().as_str() {
        "in flight" => {
            let tickets: Vec<_> = (0..10).map(|n| client.submit(ask(DEFER, &pattern(n % 2, 100))).unwrap()).collect();
            told.mark(SERVING);
            client.wait(tickets.into_iter().next().unwrap(), Deadline::NEVER).unwrap();
        }
        "holding replies" => {
            replies.extend((0..10).map(|_| client.call(ask(FILL, b"x"), Deadline::NEVER).unwrap()));
            told.mark(SERVING);
        }
        "holding slots" => {
            slots.extend((0..10).map(|_| client.take_slot().unwrap()));
            told.mark(SERVING);
        }
        "half way" => {
            for n in 0.. {
                let large = pattern(n, if n % 2 == 0 { 3000 } else { 10 });
                let tickets: Vec<_> = (0..10).map(|_| client.submit(ask(ECHO, &large)).unwrap()).collect();
                told.mark(SERVING);
                tickets.into_iter().for_each(|ticket| drop(client.wait(ticket, Deadline::NEVER).unwrap()));
            }
        }
        other => panic!("no such style: {other}"),
    }
    loop {
        std::thread::park();
    }
}

fn ask(method: u16, bytes: &[u8]) -> Ask<'_> {
    Ask::new(method, bytes)
}

/// Takes every call's failure, which must say that the server is gone.
fn all_gone(client: &mut Client, tickets: Vec<Ticket>, slots: &[bool]) {
    for (ticket, slot) in tickets.into_iter().zip(slots) {
        let failure = client.wait(ticket, ample()).unwrap_err();
        assert!(matches!(failure.why, CallError::ServerGone { generation: 1, .. }), "{failure}");
        assert_eq!(failure.slot.is_some(), *slot, "the slot came back with the bad news");
    }
    assert_eq!(client.in_flight(), 0);
    assert_whole(client);
}

#[derive(Debug, Clone, Copy)]
enum Waits {
    Parked,
    Spinning,
    Polling,
    Armed,
}

/// Kills the server while a client waits for many calls in one of several ways. Returns how long the client took
/// to notice.
fn kill_while(waits: Waits, detach: Detach) -> Duration {
    let stage = Stage::new(0);
    let mut server = stage.server();
    let spin = match waits {
        Waits::Spinning => Duration::from_secs(40),
        _ => Duration::ZERO,
    };
    let mut client = stage.client(&ClientOptions { spin: Some(spin), ..detached(detach) });
    let mut tickets = Vec::new();
    let mut slots = Vec::new();
    for n in 0..20 {
        let bytes = pattern(n, if n % 2 == 0 { 30 } else { 2000 });
        let bytes = [&n.to_le_bytes()[..], &bytes].concat();
        tickets.push(client.submit(ask(DEFER, &bytes)).unwrap());
        slots.push(n % 2 == 1);
    }
    stage.board.wait(DEFERRED, 20);
    let pid = server.pid();
    let killer = std::thread::spawn(move || {
        // Gives the client time to start waiting. The test does not depend on it.
        std::thread::sleep(Duration::from_millis(5));
        let at = Instant::now();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        at
    });
    let last = tickets.pop().unwrap();
    let why = match waits {
        Waits::Parked | Waits::Spinning => client.wait(last, Deadline::NEVER).unwrap_err(),
        Waits::Polling => loop {
            if let Some(failure) = client.poll(&last).err() {
                break failure;
            }
        },
        Waits::Armed => loop {
            assert_eq!(client.arm().unwrap(), tasuki_call::Armed::Idle);
            rustix::event::poll(&mut [PollFd::new(&client.fd().unwrap(), PollFlags::IN)], None).unwrap();
            client.woken();
            if let Some(failure) = client.poll(&last).err() {
                break failure;
            }
        },
    };
    let learnt = Instant::now();
    assert!(matches!(why.why, CallError::ServerGone { generation: 1, .. }), "{}", why.why);
    assert!(why.slot.is_some());
    drop(why);
    all_gone(&mut client, tickets, &slots[..19]);
    assert_eq!(client.generation(), None);
    assert!(client.fd().is_none());
    server.was_killed();
    learnt - killer.join().unwrap()
}

#[test]
fn every_waiting_client_learns_of_the_servers_death_at_once() {
    watched!();
    for detach in [Detach::Move, Detach::Guard] {
        for waits in [Waits::Parked, Waits::Spinning, Waits::Polling, Waits::Armed] {
            let took = kill_while(waits, detach);
            println!("{waits:?}, {detach:?}: ServerGone after {took:?}");
            assert!(took < AT_ONCE, "{took:?}");
        }
    }
}

#[test]
fn a_deadline_is_not_what_tells_of_the_death() {
    watched!();
    let stage = Stage::new(0);
    let mut server = stage.server();
    let mut client = stage.client(&small());
    let bytes = 1_u64.to_le_bytes();
    let outcome = client.call(ask(DIE, &bytes), Deadline::within(Duration::from_secs(40)));
    assert!(matches!(why(outcome), CallError::ServerGone { generation: 1, .. }));
    assert_eq!(stage.runs(1), 1, "it ran");
    server.was_killed();
}

#[test]
fn a_client_that_was_not_waiting_learns_of_the_death_with_its_next_call() {
    watched!();
    for detach in [Detach::Move, Detach::Guard] {
        let stage = Stage::new(0);
        let mut server = stage.server();
        let mut client = stage.client(&detached(detach));
        let in_flight = client.submit(ask(DEFER, &pattern(0, 100)[..])).err();
        assert!(in_flight.is_none());
        server.kill();
        for len in [10, 1000] {
            let failure = client.call(ask(ECHO, &pattern(1, len)), ample()).unwrap_err();
            assert!(matches!(failure.why, CallError::ServerGone { generation: 1, .. }), "{failure}");
            let text = failure.to_string();
            assert!(text.contains("generation 1") && text.contains("reconnect"), "{text}");
        }
        let slot = client.take_slot().unwrap();
        let failure = client.submit(Ask::with_slot(ECHO, slot, 10)).unwrap_err();
        assert!(failure.slot.is_some(), "the slot was not used up");
    }
}

#[test]
fn answers_that_were_given_before_the_death_count() {
    watched!();
    let stage = Stage::new(0);
    let mut server = stage.server();
    let mut client = stage.client(&small());
    let tickets: Vec<_> = (0..10)
        .map(|n| client.submit(ask(COUNT, &pattern(n, if n % 2 == 0 { 8 } else { 108 })[..])).unwrap())
        .collect();
    until("all have run", || (0..10).all(|n| stage.runs(n) == 1));
    let fence = client.submit(ask(HOLD, &10_u64.to_le_bytes())).unwrap();
    stage.board.wait(HELD, 1);
    server.kill();
    for (n, ticket) in (0..).zip(tickets) {
        let reply = client.wait(ticket, ample()).unwrap();
        assert_eq!(reply.to_vec(), pattern(n, if n % 2 == 0 { 8 } else { 108 }), "a reply outlives its server");
    }
    assert!(matches!(why(client.wait(fence, ample())), CallError::ServerGone { .. }));
    assert_whole(&client);
}

#[test]
fn a_client_reconnects_to_whoever_is_there_next() {
    watched!();
    for detach in [Detach::Move, Detach::Guard] {
        let stage = Stage::new(0);
        let mut server = stage.server();
        let mut client = stage.client(&detached(detach));
        let mut services = vec![client.service()];
        for round in 0..5 {
            let kept = client.call(ask(ECHO, &[3; 500]), ample()).unwrap();
            let mut slot = client.take_slot().unwrap();
            let tickets = (0..10).map(|n| client.submit(ask(DEFER, &pattern(n, 200)[..8])).unwrap()).collect();
            server.kill();
            all_gone_but(&mut client, tickets, 2);
            assert!(client.reconnect().is_err(), "nobody is there");
            server = stage.server();
            client.reconnect().unwrap();
            client.reconnect().unwrap();
            assert!(!services.contains(&client.service()), "without state it is another service");
            services.push(client.service());
            slot.bytes_mut().fill(round);
            let reply = client.call(Ask::with_slot(ECHO, slot, 4096), ample()).unwrap();
            assert_eq!(reply.to_vec(), [round; 4096]);
            assert_eq!(kept.to_vec(), [3; 500], "a slot of the dead is still readable");
        }
        drop(server);
        assert_whole(&client);
    }
}

fn all_gone_but(client: &mut Client, tickets: Vec<Ticket>, held: u32) {
    for ticket in tickets {
        assert!(matches!(why(client.wait(ticket, ample())), CallError::ServerGone { .. }));
    }
    assert_eq!(
        (client.census().owner, client.census().peer),
        (held, 0),
        "a slot in hand, and one with a reply in hand"
    );
}

#[test]
fn the_death_of_a_client_leaves_nothing_behind() {
    watched!();
    let folder = Folder::new();
    let host = Host::start(folder.socket(), options());
    let mut witness = Client::connect(&host.path, &small()).unwrap();
    let kept = witness.call(ask(FILL, b"w"), ample()).unwrap();
    let before = host.with(|server| server.reply_census());
    for style in ["in flight", "holding replies", "holding slots", "half way"] {
        for _ in 0..5 {
            let vars = [var("TASUKI_STYLE", style)];
            let role =
                Role { name: "caller", socket: &host.path, board: &host.board, mark: 0, state: None, vars: &vars };
            let mut victim = role.spawn();
            host.board.wait(MARKS, SERVING);
            assert_eq!(host.with(|server| server.clients()), 2);
            victim.kill();
            for n in 0..20 {
                let bytes = pattern(n, if n % 2 == 0 { 30 } else { 3000 });
                assert_eq!(witness.call(ask(ECHO, &bytes), ample()).unwrap().to_vec(), bytes);
            }
            until("it has departed", || host.with(|server| server.clients()) == 1);
            until("what it held is back", || {
                host.board.add(RELEASE, 1);
                let _ = witness.call(ask(ECHO, b"x"), ample()).unwrap();
                host.with(|server| server.reply_census()) == before
            });
        }
    }
    let tally = host.with(|server| server.tally());
    assert_eq!((tally.accepted, tally.departed, tally.expelled), (21, 20, 0));
    assert_eq!(kept.to_vec(), [b'w'; 4096]);
    assert_whole(&witness);
}

#[test]
fn a_server_keeps_no_descriptor_and_no_mapping_of_the_dead() {
    watched!();
    let stage = Stage::new(0);
    let server = stage.server();
    let mut witness = stage.client(&small());
    let holds = || {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", server.pid().as_raw_nonzero())).unwrap();
        (descriptors(server.pid().as_raw_nonzero()), maps.lines().filter(|line| line.contains("tasuki")).count())
    };
    // After the first answer, the server has closed the handshake's descriptors.
    let _ = witness.call(ask(ECHO, b"x"), ample()).unwrap();
    let before = holds();
    for style in ["in flight", "holding replies", "half way"] {
        let mut victim = stage.spawn_until("caller", SERVING, &[var("TASUKI_STYLE", style)]);
        victim.kill();
        until("nothing of it is left", || {
            // A deferred request keeps its client's arena mapped until the server drops it.
            stage.board.add(RELEASE, 1);
            let _ = witness.call(ask(ECHO, b"x"), ample()).unwrap();
            holds() == before
        });
    }
}

#[test]
fn a_client_that_closes_is_forgotten() {
    watched!();
    let folder = Folder::new();
    let host = Host::start(folder.socket(), options());
    for round in 0..100 {
        let mut client = Client::connect(&host.path, &small()).unwrap();
        for n in 0..round % 10 {
            let _ = client.submit(ask(DEFER, &pattern(n, 100)[..])).unwrap();
        }
    }
    until("all have departed", || host.with(|server| server.clients()) == 0);
    let tally = host.with(|server| server.tally());
    assert_eq!((tally.accepted, tally.departed, tally.expelled), (100, 100, 0));
    host.board.add(RELEASE, 1);
    let mut client = Client::connect(&host.path, &small()).unwrap();
    host.replies_come_back(&mut client);
}

#[test]
fn a_server_that_ends_is_as_good_as_dead() {
    watched!();
    let folder = Folder::new();
    let host = Host::start(folder.socket(), options());
    let path = host.path.clone();
    let mut client = Client::connect(&path, &small()).unwrap();
    let ticket = client.submit(ask(DEFER, &0_u64.to_le_bytes())).unwrap();
    drop(host);
    assert!(matches!(why(client.wait(ticket, ample())), CallError::ServerGone { generation: 1, .. }));
    assert!(!path.exists(), "it removed its socket");
}

#[test]
fn enforced_slots_come_back_from_a_dead_server() {
    // Other tests of this process hold userfaultfds of their clients. Such a process cannot be a client whose detach
    // is enforced.
    if !alone(enforced_slots_come_back_from_a_dead_server) {
        return;
    }
    watched!();
    let stage = Stage::new(0);
    let mut server = stage.server();
    let options = detached(Detach::Enforced);
    let mut client = match Client::connect(stage.socket(), &options) {
        Ok(client) => client,
        Err(error) => return println!("skipped: {error}"),
    };
    for round in 0..20 {
        assert_eq!(client.call(ask(ECHO, &[round; 3000]), ample()).unwrap().to_vec(), [round; 3000]);
        let tickets =
            (0..10).map(|n| client.submit(ask(DEFER, &pattern(n % 2, 1000)[..8])).unwrap()).collect::<Vec<_>>();
        let mut held: Vec<_> = (0..3).map(|_| client.take_slot().unwrap()).collect();
        let lent = client.submit(Ask::with_slot(DEFER, held.pop().map(zeroed).unwrap(), 4096)).unwrap();
        until("all are deferred", || stage.board.get(DEFERRED) == 11);
        stage.board.set(DEFERRED, 0);
        server.kill();
        tickets.into_iter().for_each(|ticket| drop(client.wait(ticket, ample()).unwrap_err()));
        let mut slot = client.wait(lent, ample()).unwrap_err().slot.unwrap();
        slot.bytes_mut().fill(1);
        drop((slot, held));
        assert_whole(&client);
        server = stage.server();
        client.reconnect().unwrap();
    }
}

fn zeroed(mut slot: tasuki_shm::arena::Slot) -> tasuki_shm::arena::Slot {
    slot.bytes_mut().fill(0);
    slot
}
