//! Replacement: the next server continues where the last one stopped, and each call runs at most once.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

use tasuki_call::{
    Ask, CallError, Client, ClientOptions, ConnectError, Deadline, Failure, Refusal, Reply, Server, ServerOptions,
    State, SucceedError, Successor, Turn,
};
use tasuki_shm::arena::Detach;
use tasuki_testing::{found, process};

use crate::bad_input::with_descriptors;
use crate::common::*;
use crate::{forger, watched};

const WORDS: usize = 1 << 20;

/// Returns a request that begins with the number of its word in the ledger.
fn numbered(number: u64, len: usize) -> Vec<u8> {
    pattern(number, len.max(8))
}

/// Number of outcomes of each kind that the clients of a test got.
#[derive(Debug, Default)]
struct Heard {
    replies: u64,
    retries: u64,
    gone: u64,
}

/// Checks one outcome against the ledger: no call ran twice unless it may, and no call was answered that did not
/// run.
fn audit(stage: &Stage, number: u64, again: bool, outcome: &Result<Reply, Failure>, heard: &mut Heard) {
    let runs = stage.runs(number);
    match outcome {
        Ok(reply) => {
            assert_eq!(u64::from_le_bytes(reply.to_vec()[..8].try_into().unwrap()), number);
            assert!(runs == 1 || (again && runs > 1), "call {number} was answered and ran {runs} times");
            heard.replies += 1;
        }
        Err(failure) => {
            assert!(runs <= 1 || again, "call {number} ran {runs} times: {failure}");
            match failure.why {
                CallError::Retry { .. } => {
                    assert!(!again, "an idempotent call is retried by the library");
                    assert_eq!(runs, 1, "what had not begun is not lost");
                    heard.retries += 1;
                }
                CallError::ServerGone { .. } => heard.gone += 1,
                _ => panic!("call {number}: {failure}"),
            }
        }
    }
}

/// Makes calls until told to stop. Every call must get a reply.
fn load(
    stage_path: &std::path::Path,
    options: &ClientOptions,
    next: &AtomicU64,
    stop: &AtomicBool,
) -> (Vec<(u64, u64)>, Option<u32>) {
    let mut client = Client::connect(stage_path, options).unwrap();
    let mut dice = Dice::of(next.fetch_add(1, SeqCst));
    let mut done = Vec::new();
    while !stop.load(SeqCst) {
        let batch: Vec<_> = (0..=dice.below(8))
            .map(|_| {
                let number = next.fetch_add(1, SeqCst);
                let len = if dice.once_in(3) { 1000 } else { 20 };
                let ask = numbered(number, len);
                (number, len, client.submit(Ask::new(COUNT, &ask)).unwrap())
            })
            .collect();
        for (number, len, ticket) in batch {
            let reply = client.wait(ticket, ample()).unwrap_or_else(|failure| panic!("call {number}: {failure}"));
            assert_eq!(reply.to_vec(), numbered(number, len));
            done.push((number, u64::from(client.generation().unwrap())));
        }
    }
    // The server that answered before has ended by now.
    let _ = client.call(Ask::new(ECHO, b"x"), ample()).unwrap();
    assert_whole(&client);
    (done, client.generation())
}

#[test]
fn clients_notice_nothing_of_twenty_replacements_but_the_generation() {
    watched!();
    let stage = Stage::new(WORDS);
    let mut server = stage.server();
    let (next, stop) = (AtomicU64::new(1), AtomicBool::new(false));
    let path = stage.socket();
    let done = std::thread::scope(|scope| {
        let parked = ClientOptions { spin: Some(Duration::ZERO), ..detached(Detach::Guard) };
        let spinning = ClientOptions { spin: Some(Duration::from_micros(300)), ..small() };
        let loads = [parked, spinning].map(|options| {
            let (path, next, stop) = (&path, &next, &stop);
            scope.spawn(move || load(path, &options, next, stop))
        });
        for round in 0..20 {
            let before = next.load(SeqCst);
            let taker = stage.spawn_until("taker", SERVING, &[]);
            server.succeeded();
            server = taker;
            until("the new one has served", || next.load(SeqCst) > before + 50);
            assert_eq!(stage.state.as_ref().unwrap().tenure().epoch, round + 2);
        }
        stop.store(true, SeqCst);
        loads.map(|load| load.join().unwrap())
    });
    for (of_client, last) in &done {
        for (number, _) in of_client {
            assert_eq!(stage.runs(*number), 1, "call {number} ran once");
        }
        assert!(of_client.is_sorted_by_key(|(_, generation)| *generation), "generations only grow");
        assert_eq!(*last, Some(21));
        println!("{} calls over 20 replacements, each run once", of_client.len());
    }
}

#[test]
fn who_connects_or_approaches_during_a_replacement_is_served_by_one_of_the_two() {
    watched!();
    let stage = Stage::new(WORDS);
    let mut server = stage.server();
    let stop = AtomicBool::new(false);
    let path = stage.socket();
    let connected = std::thread::scope(|scope| {
        let (path, stop) = (&path, &stop);
        let connecting = [0, 1].map(|_| {
            scope.spawn(move || {
                let mut connected = 0;
                while !stop.load(SeqCst) {
                    let mut client = Client::connect(path, &small()).unwrap_or_else(|error| panic!("{error}"));
                    let _ = client.call(Ask::new(ECHO, b"x"), ample()).unwrap();
                    connected += 1;
                }
                connected
            })
        });
        for _ in 0..30 {
            let taker = stage.spawn_until("taker", SERVING, &[]);
            server.succeeded();
            server = taker;
        }
        stop.store(true, SeqCst);
        connecting.map(|thread| thread.join().unwrap()).iter().sum::<u64>()
    });
    println!("{connected} clients connected during 30 replacements");
}

#[test]
fn the_next_successor_may_come_while_the_last_server_is_leaving() {
    watched!();
    let stage = Stage::new(WORDS);
    let mut servers = vec![stage.server()];
    let mut client = stage.client(&small());
    for round in 0..30 {
        servers.push(stage.spawn_until("taker", SERVING, &[]));
        if round % 10 == 0 {
            let reply = client.call(Ask::new(COUNT, &numbered(round, 100)), ample()).unwrap();
            assert_eq!((reply.len(), stage.runs(round)), (100, 1));
        }
    }
    assert_eq!(stage.state.as_ref().unwrap().tenure().epoch, 31);
    let last = servers.pop();
    servers.iter_mut().for_each(Child::succeeded);
    let _ = client.call(Ask::new(ECHO, b"x"), ample()).unwrap();
    assert_eq!(client.generation(), Some(31));
    drop(last);
}

#[test]
fn what_a_stand_by_finds_is_finished_retried_or_carried_over() {
    watched!();
    for detach in [Detach::Move, Detach::Guard] {
        for len in [8, 2000] {
            let stage = Stage::new(WORDS);
            let mut server = stage.server();
            let _standby = stage.spawn_until("standby", APPROACHED, &[]);
            let mut client = stage.client(&detached(detach));
            let ask = |method: u16, number: u64| (Ask::new(method, numbered(number, len).leak()), number);
            let mut submit = |(ask, _): (Ask<'static>, u64)| client.submit(ask).unwrap();
            let answered = submit(ask(COUNT, 1));
            let begun_again = submit((ask(DEFER, 2).0.idempotent(), 2));
            let begun = submit(ask(DEFER, 3));
            let running = submit(ask(HOLD, 4));
            let unbegun = submit(ask(COUNT, 5));
            let unbegun_again = submit((ask(COUNT, 6).0.idempotent(), 6));
            let abandoned = submit(ask(COUNT, 7));
            client.abandon(abandoned);
            stage.board.wait(HELD, 1);
            assert_eq!([1, 2, 3, 4, 5, 6, 7].map(|n| stage.runs(n)), [1, 1, 1, 1, 0, 0, 0]);
            server.kill();
            let whole = |reply: Result<Reply, Failure>, number| {
                let reply = reply.unwrap();
                assert_eq!(reply.to_vec(), numbered(number, len));
                assert_eq!(reply.into_returned().is_some(), len > 48);
            };
            let retry = |outcome: Result<Reply, Failure>| {
                let failure = outcome.unwrap_err();
                assert!(matches!(failure.why, CallError::Retry { generation: 1 }), "{failure}");
                assert_eq!(failure.slot.is_some(), len > 48, "its slot is back");
            };
            whole(client.wait(answered, ample()), 1);
            whole(client.wait(unbegun, ample()), 5);
            whole(client.wait(unbegun_again, ample()), 6);
            retry(client.wait(begun, ample()));
            retry(client.wait(running, ample()));
            assert_eq!(client.generation(), Some(2));
            stage.board.wait(DEFERRED, 3);
            stage.board.add(RELEASE, 1);
            whole(client.wait(begun_again, ample()), 2);
            until("the abandoned one has run", || stage.runs(7) == 1);
            until("its slot is back", || client.call(Ask::new(ECHO, b"x"), ample()).is_ok() && client.in_flight() == 0);
            assert_eq!([1, 2, 3, 4, 5, 6, 7].map(|n| stage.runs(n)), [1, 2, 1, 1, 1, 1, 1]);
            assert_whole(&client);
        }
    }
}

#[test]
fn a_stand_by_takes_over_within_a_moment() {
    watched!();
    let stage = Stage::new(WORDS);
    let mut server = stage.server();
    let mut client = stage.client(&small());
    for round in 1..=10 {
        let standby = stage.spawn_until("standby", APPROACHED, &[]);
        let _ = client.call(Ask::new(ECHO, b"x"), ample()).unwrap();
        let start = Instant::now();
        server.strike();
        while client.generation() != Some(round + 1) {
            match client.call(Ask::new(ECHO, b"x"), ample()) {
                Ok(_) | Err(Failure { why: CallError::Retry { .. }, .. }) => {}
                Err(failure) => panic!("{failure}"),
            }
        }
        println!("answered by the stand-by after {:?}", start.elapsed());
        assert!(start.elapsed() < Duration::from_secs(20));
        server.was_killed();
        server = standby;
    }
}

#[test]
fn a_short_deadline_does_not_cut_a_client_off_from_the_successor() {
    watched!();
    let stage = Stage::new(WORDS);
    let mut server = stage.server();
    let mut client = stage.client(&ClientOptions { spin: Some(Duration::ZERO), ..small() });
    let mut number = 0;
    for round in 1..=20 {
        let standby = stage.spawn_until("standby", APPROACHED, &[]);
        let kept = client.submit(Ask::new(DEFER, &[0; 8]).idempotent()).unwrap();
        stage.board.set(GATE, 0);
        let held = stage.board.get(HELD);
        number += 1;
        let running = client.submit(Ask::new(HOLD, &numbered(number, 8))).unwrap();
        stage.board.wait(HELD, held + 1);
        server.strike();
        while client.generation() != Some(round + 1) {
            let deadline = Deadline::within(Duration::from_micros(300));
            match client.call(Ask::new(ECHO, b"x"), deadline) {
                Ok(_) | Err(Failure { why: CallError::DeadlinePassed, .. }) => {}
                Err(failure) => panic!("round {round}: {failure}"),
            }
        }
        assert!(matches!(why(client.wait(running, ample())), CallError::Retry { .. }));
        let deferred = stage.board.get(DEFERRED);
        until("it is deferred once more", || deferred > 0);
        while client.poll(&kept).unwrap().is_none() {
            stage.board.add(RELEASE, 1);
        }
        server.was_killed();
        server = standby;
    }
}

/// Runs a take-over in which one of the two processes is killed. In each case the client gets an answer and no
/// call runs twice.
fn broken_take_over(point: &str) -> (Stage, Client, Child, Option<Child>) {
    let stage = Stage::new(WORDS);
    let (giver_plan, taker_plan) = match point.starts_with("giver") {
        true => (vec![crash_at(point, 1)], vec![]),
        false => (vec![], vec![crash_at(point, 1)]),
    };
    let mut giver = stage.spawn_until("server", SERVING, &giver_plan);
    let mut client = stage.client(&detached(Detach::Guard));
    let mut heard = Heard::default();
    let _ = client.call(Ask::new(COUNT, &numbered(1, 1000)), ample()).unwrap();
    let (mut taker, _) = stage.spawn("taker", &taker_plan);
    let mut number = 1;
    let victim = |giver: &mut Child, taker: &mut Child| match point.starts_with("giver") {
        true => giver.ended(),
        false => taker.ended(),
    };
    let mut after = 0;
    // Make calls during the take-over, and some after it.
    while after < 20 {
        after += u64::from(victim(&mut giver, &mut taker).is_some());
        number += 1;
        let ask = numbered(number, if number.is_multiple_of(2) { 1000 } else { 8 });
        let outcome = client.call(Ask::new(COUNT, &ask), ample());
        audit(&stage, number, false, &outcome, &mut heard);
        if matches!(outcome, Err(Failure { why: CallError::ServerGone { .. }, .. })) {
            break;
        }
    }
    assert_eq!(stage.runs(1), 1);
    assert_eq!(heard.retries, 0, "a giver that passes has nothing begun");
    println!("{point}: {heard:?}");
    match point.starts_with("giver") {
        true => {
            giver.was_killed();
            (stage, client, taker, None)
        }
        false => {
            taker.was_killed();
            (stage, client, giver, Some(taker))
        }
    }
}

#[test]
fn a_giver_that_dies_after_passing_is_succeeded_all_the_same() {
    watched!();
    for point in ["giver.passed", "giver.released"] {
        let Some(_) = with_crash_points() else { return };
        let (stage, mut client, mut taker, _) = broken_take_over(point);
        assert_eq!(client.generation(), Some(2), "{point}");
        let next = stage.spawn_until("taker", SERVING, &[]);
        taker.succeeded();
        let _ = client.call(Ask::new(COUNT, &numbered(99_999, 8)), ample()).unwrap();
        assert_eq!((client.generation(), stage.runs(99_999)), (Some(3), 1));
        assert_whole(&client);
        drop(next);
    }
}

#[test]
fn a_giver_whose_taker_dies_with_the_lease_takes_it_back() {
    watched!();
    let Some(_) = with_crash_points() else { return };
    let (stage, mut client, mut giver, _) = broken_take_over("taker.taken");
    let _ = client.call(Ask::new(COUNT, &numbered(99_998, 8)), ample()).unwrap();
    assert_eq!(stage.state.as_ref().unwrap().tenure().epoch, 3, "taken by the taker, then taken back");
    let next = stage.spawn_until("taker", SERVING, &[]);
    giver.succeeded();
    let _ = client.call(Ask::new(COUNT, &numbered(99_999, 8)), ample()).unwrap();
    assert_eq!((client.generation(), stage.runs(99_999)), (Some(4), 1));
    assert_whole(&client);
    drop(next);
}

#[test]
fn a_taker_that_dies_after_it_said_that_it_serves_leaves_nobody() {
    watched!();
    let Some(_) = with_crash_points() else { return };
    let (stage, mut client, mut giver, _) = broken_take_over("taker.told");
    giver.succeeded();
    assert!(matches!(why(client.call(Ask::new(ECHO, b"x"), ample())), CallError::ServerGone { .. }));
    assert_whole(&client);
    // The state is still there for the next server.
    let server = stage.server();
    client.reconnect().unwrap();
    let _ = client.call(Ask::new(COUNT, &numbered(99_999, 8)), ample()).unwrap();
    assert_eq!(client.generation(), Some(3));
    drop(server);
}

fn with_crash_points() -> Option<()> {
    if cfg!(feature = "crash-points") {
        return Some(());
    }
    println!("skipped: needs the feature crash-points");
    None
}

/// A process may keep its `Server` after a successor took over. Clients of a dead successor must not wait
/// because of that.
#[test]
fn a_giver_that_lingers_does_not_hold_up_anybody() {
    watched!();
    let Some(_) = with_crash_points() else { return };
    let stage = Stage::new(WORDS);
    let options = ServerOptions { state: stage.state.as_ref().map(again), ..options() };
    let mut giver = Server::bind(stage.socket(), options).unwrap();
    let mut worker = Worker::new(&stage.board, giver.state());
    let path = stage.socket();
    let caller = std::thread::spawn(move || {
        let mut client = Client::connect(path, &small()).unwrap();
        loop {
            if let Err(failure) = client.call(Ask::new(ECHO, b"x"), ample()) {
                return (failure, Instant::now());
            }
        }
    });
    let (mut taker, _) = stage.spawn("taker", &[crash_at("taker.told", 1)]);
    while giver.turn(Some(Duration::from_millis(1)), |request| worker.handle(request)).unwrap() != Turn::Succeeded {}
    taker.was_killed();
    let died = Instant::now();
    let (failure, at) = caller.join().unwrap();
    assert!(matches!(failure.why, CallError::ServerGone { .. }), "{failure}");
    println!("ServerGone {:?} after the successor's death", at.saturating_duration_since(died));
    assert!(at.saturating_duration_since(died) < Duration::from_secs(20));
    assert_eq!(giver.turn(None, |request| worker.handle(request)).unwrap(), Turn::Succeeded, "nothing comes again");
}

fn refusal<T: std::fmt::Debug>(result: Result<T, SucceedError>) -> Refusal {
    match result.unwrap_err() {
        SucceedError::Connect(ConnectError::Refused(refusal)) => refusal,
        other => panic!("{other}"),
    }
}

#[test]
fn there_is_one_stand_by_at_a_time() {
    watched!();
    let stage = Stage::new(WORDS);
    let mut server = stage.server();
    let mut client = stage.client(&small());
    let first = Successor::approach(stage.socket()).unwrap();
    assert_eq!(refusal(Successor::approach(stage.socket())), Refusal::Watched);
    drop(first);
    let mut second = None;
    until("the server has noticed", || {
        second = Successor::approach(stage.socket()).ok();
        second.is_some()
    });
    let _ = client.call(Ask::new(COUNT, &numbered(1, 8)), ample()).unwrap();
    let successor = second.unwrap();
    assert_eq!(successor.state().words()[1].load(SeqCst), 1, "the state can be looked at before");
    assert_eq!(successor.state().tenure().epoch, 1);
    let host =
        Host::of(successor.take_over(options(), PATIENCE).unwrap(), Worker::new(&stage.board, stage.state.as_ref()));
    server.succeeded();
    let _ = client.call(Ask::new(COUNT, &numbered(2, 8)), ample()).unwrap();
    assert_eq!(([1, 2].map(|n| stage.runs(n)), client.generation()), ([1, 1], Some(2)));
    host.replies_come_back(&mut client);
}

#[test]
fn a_server_that_owes_an_answer_does_not_let_go() {
    watched!();
    let stage = Stage::new(WORDS);
    let mut server = stage.server();
    let mut client = stage.client(&small());
    let deferred = client.submit(Ask::new(DEFER, &numbered(1, 1000))).unwrap();
    stage.board.wait(DEFERRED, 1);
    let limit = Duration::from_millis(50);
    let error = Successor::approach(stage.socket()).unwrap().take_over(options(), limit).unwrap_err();
    assert!(matches!(&error, SucceedError::NotReleased { limit: passed, .. } if *passed == limit), "{error}");
    let text = error.to_string();
    assert!(text.contains("50ms") && text.contains("deferred"), "{text}");
    println!("{text}");
    let _ = client.call(Ask::new(COUNT, &numbered(2, 8)), ample()).unwrap();
    assert_eq!(client.generation(), Some(1), "it serves on");
    // The next successor waits long enough.
    let (taker, mark) = stage.spawn("taker", &[]);
    stage.board.wait(mark, APPROACHED);
    let during = client.submit(Ask::new(COUNT, &numbered(3, 8))).unwrap();
    stage.board.add(RELEASE, 1);
    assert_eq!(client.wait(deferred, ample()).unwrap().to_vec(), numbered(1, 1000));
    let _ = client.wait(during, ample()).unwrap();
    stage.board.wait(mark, SERVING);
    server.succeeded();
    let _ = client.call(Ask::new(COUNT, &numbered(4, 8)), ample()).unwrap();
    assert_eq!(([1, 2, 3, 4].map(|n| stage.runs(n)), client.generation()), ([1; 4], Some(2)));
    assert_whole(&client);
    drop(taker);
}

#[test]
fn what_is_asked_while_a_server_lets_go_is_served_by_the_next() {
    watched!();
    let stage = Stage::new(WORDS);
    let mut server = stage.server();
    let mut client = stage.client(&small());
    for round in 0..5 {
        stage.board.set(DEFERRED, 0);
        // A client that makes no operation does not notice that its server was replaced.
        let _ = client.call(Ask::new(ECHO, b"x"), ample()).unwrap();
        let first = round * 100;
        let owed = client.submit(Ask::new(DEFER, &numbered(first, 500))).unwrap();
        stage.board.wait(DEFERRED, 1);
        let (taker, mark) = stage.spawn("taker", &[]);
        stage.board.wait(mark, APPROACHED);
        let tickets: Vec<_> = (1..20)
            .map(|n| client.submit(Ask::new(COUNT, &numbered(first + n, if n % 3 == 0 { 500 } else { 8 }))).unwrap())
            .collect();
        stage.board.add(RELEASE, 1);
        assert_eq!(client.wait(owed, ample()).unwrap().to_vec(), numbered(first, 500));
        tickets.into_iter().for_each(|ticket| drop(client.wait(ticket, ample()).unwrap()));
        stage.board.wait(mark, SERVING);
        server.succeeded();
        server = taker;
        assert!((first..first + 20).all(|n| stage.runs(n) == 1));
    }
    assert_whole(&client);
}

#[test]
fn without_state_there_is_nothing_to_take_over() {
    watched!();
    let stage = Stage::new(0);
    let _server = stage.server();
    let refused = refusal(Successor::approach(stage.socket()));
    assert_eq!(refused, Refusal::NoInheritance);
    assert!(refused.to_string().contains("ServerOptions::state"), "{refused}");
    let mut client = stage.client(&small());
    let _ = client.call(Ask::new(ECHO, b"it serves on"), ample()).unwrap();
}

#[test]
fn calls_do_not_wander_to_another_service() {
    watched!();
    for detach in [Detach::Move, Detach::Guard] {
        let stage = Stage::new(0);
        let mut server = stage.server();
        let mut client = stage.client(&detached(detach));
        let begun = client.submit(Ask::new(HOLD, &numbered(1, 1000)).idempotent()).unwrap();
        stage.board.wait(HELD, 1);
        let unbegun = client.submit(Ask::new(COUNT, &numbered(2, 1000)).idempotent()).unwrap();
        server.kill();
        let other = stage.server();
        for ticket in [begun, unbegun] {
            let failure = client.wait(ticket, ample()).unwrap_err();
            assert!(matches!(failure.why, CallError::ServerGone { generation: 1, .. }), "{failure}");
            assert!(failure.slot.is_some());
        }
        assert_eq!([1, 2].map(|n| stage.runs(n)), [1, 0]);
        assert_whole(&client);
        client.reconnect().unwrap();
        let _ = client.call(Ask::new(COUNT, &numbered(3, 1000)), ample()).unwrap();
        drop(other);
    }
}

#[test]
fn a_server_that_is_started_again_with_its_state_resumes_its_clients() {
    watched!();
    for detach in [Detach::Move, Detach::Guard] {
        let stage = Stage::new(WORDS);
        let mut server = stage.server();
        let mut client = stage.client(&detached(detach));
        for round in 0..10 {
            let first = 10 * round;
            stage.board.set(HELD, 0);
            stage.board.set(GATE, 0);
            let begun = client.submit(Ask::new(HOLD, &numbered(first, 1000))).unwrap();
            stage.board.wait(HELD, 1);
            let unbegun = client.submit(Ask::new(COUNT, &numbered(first + 1, 1000))).unwrap();
            server.kill();
            // Start the new server before the client looks.
            server = stage.server();
            assert!(matches!(why(client.wait(begun, ample())), CallError::Retry { .. }));
            assert_eq!(client.wait(unbegun, ample()).unwrap().to_vec(), numbered(first + 1, 1000));
            assert_eq!([first, first + 1].map(|n| stage.runs(n)), [1, 1]);
            assert_eq!(u64::from(client.generation().unwrap()), round + 2);
        }
        assert_whole(&client);
    }
}

#[test]
fn a_stand_by_that_is_slow_costs_a_deadline_and_no_call() {
    watched!();
    for detach in [Detach::Move, Detach::Guard] {
        let stage = Stage::new(WORDS);
        let mut server = stage.server();
        let standby = stage.spawn_until("standby", APPROACHED, &[]);
        let mut client = stage.client(&detached(detach));
        let begun = client.submit(Ask::new(HOLD, &numbered(1, 1000)).idempotent()).unwrap();
        stage.board.wait(HELD, 1);
        let unbegun = client.submit(Ask::new(COUNT, &numbered(2, 1000))).unwrap();
        standby.stop();
        server.kill();
        for number in 3..8 {
            let start = Instant::now();
            let request = numbered(number, 1000);
            let late = why(client.call(Ask::new(COUNT, &request), Deadline::within(Duration::from_millis(20))));
            assert!(matches!(late, CallError::DeadlinePassed), "{late}");
            assert!(client.poll(&begun).unwrap().is_none());
            assert!(client.poll(&unbegun).unwrap().is_none());
            assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
        }
        standby.go_on();
        stage.board.set(GATE, 1);
        assert_eq!(client.wait(begun, ample()).unwrap().to_vec(), numbered(1, 1000));
        assert_eq!(client.wait(unbegun, ample()).unwrap().to_vec(), numbered(2, 1000));
        assert_eq!([1, 2].map(|n| stage.runs(n)), [2, 1]);
        assert!((3..8).all(|number| stage.runs(number) <= 1));
        until("the late ones are settled", || {
            let _ = client.call(Ask::new(ECHO, b"x"), ample()).unwrap();
            client.in_flight() == 0
        });
        assert_eq!(client.generation(), Some(2));
        assert_whole(&client);
    }
}

/// Waits for a server's answer while the test stops this process, and lets it continue.
pub fn interrupted(told: &Told) {
    let refused = |refusal| assert_eq!(refusal, Refusal::Watched);
    match told.var("TASUKI_STYLE").unwrap().as_str() {
        "connects" => match Client::connect(&told.socket, &small()) {
            Err(ConnectError::Refused(refusal)) => refused(refusal),
            other => panic!("{other:?}"),
        },
        "approaches" => match Successor::approach(&told.socket) {
            Err(SucceedError::Connect(ConnectError::Refused(refusal))) => refused(refusal),
            other => panic!("{other:?}"),
        },
        "has a call in flight" => {
            let mut client = Client::connect(&told.socket, &small()).unwrap();
            let bytes = numbered(1, 1000);
            let reply = client.call(Ask::new(HOLD, &bytes).idempotent(), ample()).unwrap();
            assert_eq!(reply.to_vec(), bytes);
        }
        other => panic!("no such style: {other}"),
    }
}

/// Stops a child that waits for an answer, and lets it continue. Each time, the kernel ends its wait.
fn interrupt(child: &mut Child) {
    for _ in 0..3 {
        until("it waits", || {
            assert!(child.ended().is_none(), "it waits on");
            process::stat(child.pid()).is_some_and(|(_, fields)| fields[0] == "S")
        });
        child.stop();
        child.go_on();
    }
}

#[test]
fn a_client_that_is_stopped_while_it_waits_for_the_successor_loses_no_call() {
    watched!();
    let stage = Stage::new(WORDS);
    let mut server = stage.server();
    let standby = stage.spawn_until("standby", APPROACHED, &[]);
    let (mut client, _) = stage.spawn("interrupted", &[var("TASUKI_STYLE", "has a call in flight")]);
    stage.board.wait(HELD, 1);
    standby.stop();
    server.kill();
    interrupt(&mut client);
    stage.board.set(GATE, 1);
    standby.go_on();
    client.succeeded();
    assert_eq!(stage.runs(1), 2);
}

#[test]
fn a_stop_while_a_process_waits_for_its_first_answer_costs_it_nothing() {
    watched!();
    for style in ["connects", "approaches"] {
        let stage = Stage::new(0);
        let listener = forger::listen(&stage.socket());
        let (mut child, _) = stage.spawn("interrupted", &[var("TASUKI_STYLE", style)]);
        let socket = forger::accept(listener.as_fd()).unwrap();
        // It has said all that it says before it waits.
        let _ = forger::receive(socket.as_fd()).unwrap();
        interrupt(&mut child);
        let code_of_watched = [11, 0].into_iter().chain([0; 16]);
        let refused: Vec<u8> = forger::packet(4).into_iter().chain(code_of_watched).collect();
        forger::send(&socket, &refused, &[] as &[OwnedFd]).unwrap();
        child.succeeded();
    }
}

#[test]
fn a_client_without_descriptors_goes_on_with_the_successor_when_it_has_some() {
    watched!();
    if !tasuki_testing::alone(a_client_without_descriptors_goes_on_with_the_successor_when_it_has_some) {
        return;
    }
    for spare in [0, 3] {
        let stage = Stage::new(WORDS);
        let mut server = stage.server();
        let (_standby, mark) = stage.spawn("standby", &[]);
        stage.board.wait(mark, APPROACHED);
        let mut client = stage.client(&small());
        server.stop();
        let unbegun = client.submit(Ask::new(COUNT, &numbered(1, 1000))).unwrap();
        with_descriptors(spare, || {
            server.kill();
            stage.board.wait(mark, SERVING);
            until("it has lost its server", || {
                assert!(client.poll(&unbegun).unwrap().is_none());
                client.generation().is_none()
            });
            for _ in 0..3 {
                assert!(client.poll(&unbegun).unwrap().is_none());
            }
        });
        assert_eq!(client.wait(unbegun, ample()).unwrap().to_vec(), numbered(1, 1000));
        assert_eq!((stage.runs(1), client.generation()), (1, Some(2)));
    }
}

#[test]
fn the_reason_that_keeps_a_client_from_the_successor_is_told() {
    watched!();
    if !tasuki_testing::alone(the_reason_that_keeps_a_client_from_the_successor_is_told) {
        return;
    }
    let stage = Stage::new(WORDS);
    let mut server = stage.server();
    let _standby = stage.spawn_until("standby", APPROACHED, &[]);
    let options = ClientOptions { handshake: Duration::from_millis(20), ..small() };
    let mut client = found("an answer in time", || Client::connect(stage.socket(), &options).ok());
    let failure = with_descriptors(0, || {
        server.kill();
        client.call(Ask::new(ECHO, b"x"), Deadline::NEVER).unwrap_err()
    });
    let CallError::ServerGone { generation: 1, why: Some(why) } = &failure.why else { panic!("{failure}") };
    assert!(matches!(**why, ConnectError::NoDescriptors), "{failure}");
    assert!(failure.to_string().contains("RLIMIT_NOFILE"), "{failure}");
    until("the stand-by answers", || client.reconnect().is_ok());
    let _ = client.call(Ask::new(ECHO, b"x"), ample()).unwrap();
}

#[test]
fn a_stand_by_that_never_answers_is_given_up() {
    watched!();
    let stage = Stage::new(WORDS);
    let mut server = stage.server();
    let standby = stage.spawn_until("standby", APPROACHED, &[]);
    let options = ClientOptions { handshake: Duration::from_millis(100), ..small() };
    let mut client = found("an answer in time", || Client::connect(stage.socket(), &options).ok());
    let ticket = client.submit(Ask::new(DEFER, &numbered(1, 1000))).unwrap();
    standby.stop();
    server.kill();
    while client.poll(&ticket).is_ok() {}
    let failure = client.call(Ask::new(ECHO, b"x"), Deadline::NEVER).unwrap_err();
    let CallError::ServerGone { generation: 1, why: Some(why) } = &failure.why else { panic!("{failure}") };
    assert!(why.to_string().ends_with("did not answer within 100ms; it hangs or is overloaded"), "{why}");
    assert_whole(&client);
    assert!(matches!(client.reconnect(), Err(ConnectError::Silent { .. })));
    standby.go_on();
    until("the stand-by answers", || client.reconnect().is_ok());
    let reply = client.call(Ask::new(ECHO, b"x"), ample()).unwrap();
    assert_eq!((reply.len(), client.generation()), (1, Some(2)));
}

#[test]
fn a_state_that_is_served_is_not_served_twice_at_one_path() {
    watched!();
    let stage = Stage::new(WORDS);
    let mut server = stage.server();
    let options = || ServerOptions { state: stage.state.as_ref().map(again), ..options() };
    let error = Server::bind(stage.socket(), options()).unwrap_err();
    assert!(error.to_string().contains("already listens"), "{error}");
    assert_eq!(stage.state.as_ref().unwrap().tenure().epoch, 1, "who comes too late does not touch the lease");
    // The same while a stand-by is about to take over.
    let standby = stage.spawn_until("standby", APPROACHED, &[]);
    standby.stop();
    server.kill();
    let error = Server::bind(stage.socket(), options()).unwrap_err();
    assert!(error.to_string().contains("already listens"), "{error}");
    standby.go_on();
    let mut client = stage.client(&small());
    let _ = client.call(Ask::new(ECHO, b"x"), ample()).unwrap();
    assert_eq!(client.generation(), Some(2));
}

#[test]
fn a_stand_by_takes_over_from_a_server_that_ends_in_order() {
    watched!();
    let stage = Stage::new(WORDS);
    let options = ServerOptions { state: stage.state.as_ref().map(again), ..options() };
    let server = Server::bind(stage.socket(), options).unwrap();
    let host = Host::of(server, Worker::new(&stage.board, stage.state.as_ref()));
    let mut client = stage.client(&small());
    let standby = stage.spawn_until("standby", APPROACHED, &[]);
    let _ = client.call(Ask::new(COUNT, &numbered(1, 1000)), ample()).unwrap();
    drop(host);
    let _ = client.call(Ask::new(COUNT, &numbered(2, 1000)), ample()).unwrap();
    assert_eq!((client.generation(), [1, 2].map(|n| stage.runs(n))), (Some(2), [1, 1]));
    drop(standby);
}

#[test]
fn foreign_memory_is_no_state() {
    let foreign = tasuki_shm::region::Region::create("test", 8192, tasuki_shm::region::Pages::Small).unwrap();
    let error = State::adopt(foreign.fd().try_clone_to_owned().unwrap()).unwrap_err();
    assert!(error.to_string().contains("State::create"), "{error}");
    let short = tasuki_shm::region::Region::create("test", 4096, tasuki_shm::region::Pages::Small).unwrap();
    let error = State::adopt(short.fd().try_clone_to_owned().unwrap()).unwrap_err();
    assert!(error.to_string().contains("4096") && error.to_string().contains("8192"), "{error}");
}
