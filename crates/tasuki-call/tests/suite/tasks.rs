//! The `async fn` interface on tokio: many callers, dropped futures, servers that die or are replaced.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use tasuki_call::{Ask, AsyncClient, CallError, Client, ClientOptions, Failure, Reply, ServerOptions};
use tasuki_shm::arena::Detach;
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::bad_input::with_descriptors;
use crate::common::*;
use crate::watched;

const WORDS: usize = 1 << 20;

fn runtimes() -> [(&'static str, Runtime); 2] {
    [
        ("one thread", Builder::new_current_thread().enable_all().build().unwrap()),
        ("three threads", Builder::new_multi_thread().worker_threads(3).enable_all().build().unwrap()),
    ]
}

/// Makes a call that must answer unless the server hangs.
async fn call(client: &AsyncClient, ask: Ask<'_>) -> Result<Reply, Failure> {
    timeout(PATIENCE, client.call(ask)).await.expect("an answer before the watchdog")
}

async fn count(client: &AsyncClient, number: u64, len: usize) -> Result<Reply, Failure> {
    call(client, Ask::new(COUNT, &pattern(number, len))).await
}

/// Has a task make a call that the server answers late, and waits until the server has it.
async fn late(client: &AsyncClient, board: &Board, number: u64) -> JoinHandle<Result<(), Failure>> {
    board.set(DEFERRED, 0);
    let client = client.clone();
    let late = tokio::spawn(async move { call(&client, Ask::new(DEFER, &pattern(number, 8))).await.map(drop) });
    while board.get(DEFERRED) == 0 {
        tokio::time::sleep(Duration::from_micros(100)).await;
    }
    late
}

fn whole(client: &AsyncClient) {
    client.with(|client| {
        assert_eq!(client.in_flight(), 0);
        assert_whole(client);
    });
}

#[test]
fn any_number_of_tasks_call_at_the_same_time() {
    watched!();
    for (name, runtime) in runtimes() {
        let folder = Folder::new();
        let host = Host::start(folder.socket(), options());
        runtime.block_on(async {
            let options = ClientOptions { ring: 256, ..small() };
            let client = AsyncClient::connect(&host.path, &options).unwrap();
            let tasks: Vec<_> = (0..64_u64)
                .map(|task| {
                    let client = client.clone();
                    tokio::spawn(async move {
                        for round in 0..100 {
                            let bytes = pattern(task << 32 | round, if task.is_multiple_of(8) { 500 } else { 40 });
                            let reply = call(&client, Ask::new(ECHO, &bytes)).await.unwrap();
                            assert!(reply.to_vec() == bytes, "each task gets its own answer");
                        }
                    })
                })
                .collect();
            for task in tasks {
                task.await.unwrap();
            }
            whole(&client);
        });
        println!("{name}: 6,400 calls of 64 tasks");
        drop(runtime);
        until("the client has left", || host.with(|server| server.clients()) == 0);
    }
}

#[test]
fn answers_that_come_late_and_out_of_order_find_their_callers() {
    watched!();
    for (_, runtime) in runtimes() {
        let folder = Folder::new();
        let host = Host::start(folder.socket(), options());
        runtime.block_on(async {
            let client = AsyncClient::connect(&host.path, &small()).unwrap();
            for _ in 0..20 {
                host.board.set(DEFERRED, 0);
                let tasks: Vec<_> = (0..30)
                    .map(|n| {
                        let client = client.clone();
                        tokio::spawn(async move {
                            let bytes = pattern(n, 30);
                            assert_eq!(call(&client, Ask::new(DEFER, &bytes)).await.unwrap().to_vec(), bytes);
                        })
                    })
                    .collect();
                while host.board.get(DEFERRED) < 30 {
                    tokio::time::sleep(Duration::from_micros(200)).await;
                }
                host.board.add(RELEASE, 1);
                for task in tasks {
                    task.await.unwrap();
                }
            }
            whole(&client);
        });
    }
}

#[test]
fn errors_arrive_as_values() {
    watched!();
    let [(_, runtime), _] = runtimes();
    let folder = Folder::new();
    let host = Host::start(folder.socket(), options());
    runtime.block_on(async {
        let client = AsyncClient::connect(&host.path, &ClientOptions { ring: 4, ..small() }).unwrap();
        let refused = call(&client, Ask::new(99_u16, b"x")).await.unwrap_err();
        assert!(matches!(refused.why, CallError::Refused(refused) if refused.status == 404));
        let large = call(&client, Ask::new(ECHO, &[0; 5000])).await.unwrap_err();
        assert!(matches!(large.why, CallError::TooLarge { len: 5000, max: 4096 }));
        let waiting: Vec<_> = (0..4)
            .map(|n| {
                tokio::spawn({
                    let client = client.clone();
                    async move { call(&client, Ask::new(DEFER, &pattern(n, 8))).await.map(drop) }
                })
            })
            .collect();
        while host.board.get(DEFERRED) < 4 {
            tokio::time::sleep(Duration::from_micros(200)).await;
        }
        let full = call(&client, Ask::new(ECHO, b"x")).await.unwrap_err();
        assert!(matches!(full.why, CallError::Full { capacity: 4 }));
        host.board.add(RELEASE, 1);
        for task in waiting {
            task.await.unwrap().unwrap();
        }
        whole(&client);
    });
}

#[test]
fn a_future_that_is_dropped_gives_up_its_call_and_loses_no_slot() {
    watched!();
    let mut dice = Dice::new("a_future_that_is_dropped");
    for (_, runtime) in runtimes() {
        for detach in [Detach::Move, Detach::Guard] {
            let folder = Folder::new();
            let host = Host::start(folder.socket(), options());
            runtime.block_on(async {
                let client = AsyncClient::connect(&host.path, &detached(detach)).unwrap();
                for round in 0..300 {
                    let bytes = pattern(round % 7, *dice.pick(&[8, 40, 100, 4096]));
                    let method = *dice.pick(&[ECHO, DEFER, FILL, DROP]);
                    let limit = Duration::from_micros(dice.below(300) as u64);
                    let _ = timeout(limit, client.call(Ask::new(method, &bytes))).await;
                    if dice.once_in(4) {
                        // Poll it once, and never again.
                        let ask = Ask::new(method, &bytes);
                        let once = client.call(ask);
                        let polled = pin!(once).poll(&mut Context::from_waker(Waker::noop()));
                        assert!(matches!(polled, Poll::Pending | Poll::Ready(_)));
                    }
                    host.board.add(RELEASE, 1);
                }
                let start = Instant::now();
                while client.with(|client| client.in_flight()) > 0 {
                    assert!(start.elapsed() < PATIENCE);
                    host.board.add(RELEASE, 1);
                    let _ = call(&client, Ask::new(ECHO, b"x")).await;
                }
                whole(&client);
                client.with(|client| host.replies_come_back(client));
            });
        }
    }
}

#[test]
fn the_death_of_the_server_wakes_every_task() {
    watched!();
    for (name, runtime) in runtimes() {
        for detach in [Detach::Move, Detach::Guard] {
            let stage = Stage::new(0);
            let mut server = stage.server();
            runtime.block_on(async {
                let client = AsyncClient::connect(stage.socket(), &detached(detach)).unwrap();
                for _ in 0..5 {
                    let tasks: Vec<_> = (0..30)
                        .map(|n| {
                            let client = client.clone();
                            tokio::spawn(async move {
                                let outcome = call(
                                    &client,
                                    Ask::new(DEFER, &pattern(n, 8 + 30 * usize::try_from(n % 3).unwrap())),
                                )
                                .await;
                                (outcome.unwrap_err(), Instant::now())
                            })
                        })
                        .collect();
                    while stage.board.get(DEFERRED) < 30 {
                        tokio::time::sleep(Duration::from_micros(200)).await;
                    }
                    stage.board.set(DEFERRED, 0);
                    let killed = Instant::now();
                    server.strike();
                    let mut last = killed;
                    for task in tasks {
                        let (failure, at) = task.await.unwrap();
                        assert!(matches!(failure.why, CallError::ServerGone { generation: 1, .. }), "{failure}");
                        last = last.max(at);
                    }
                    println!("{name}, {detach:?}: the last of 30 tasks had ServerGone after {:?}", last - killed);
                    assert!(last - killed < Duration::from_secs(20));
                    whole(&client);
                    server.was_killed();
                    server = stage.server();
                    client.reconnect().unwrap();
                    let reply = call(&client, Ask::new(ECHO, &[7; 100])).await.unwrap();
                    assert_eq!(reply.to_vec(), [7; 100], "the new server's answers are heard");
                }
            });
        }
    }
}

#[test]
fn tasks_notice_nothing_of_planned_replacements() {
    watched!();
    for (name, runtime) in runtimes() {
        let stage = Stage::new(WORDS);
        let mut server = stage.server();
        let next = std::sync::Arc::new(AtomicU64::new(1));
        let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let client =
            runtime.block_on(async { AsyncClient::connect(stage.socket(), &detached(Detach::Guard)).unwrap() });
        let load = {
            let (client, next, stop) = (client.clone(), next.clone(), stop.clone());
            std::thread::spawn(move || {
                runtime.block_on(async {
                    let tasks: Vec<_> = (0..10)
                        .map(|task| {
                            let (client, next, stop) = (client.clone(), next.clone(), stop.clone());
                            tokio::spawn(async move {
                                while !stop.load(SeqCst) {
                                    let number = next.fetch_add(1, SeqCst);
                                    let reply = count(&client, number, if task == 0 { 1000 } else { 20 }).await;
                                    let reply = reply.unwrap_or_else(|failure| panic!("call {number}: {failure}"));
                                    assert_eq!(reply.to_vec()[..8], number.to_le_bytes());
                                }
                            })
                        })
                        .collect();
                    for task in tasks {
                        task.await.unwrap();
                    }
                    count(&client, next.fetch_add(1, SeqCst), 20).await.unwrap();
                });
                runtime
            })
        };
        for _ in 0..10 {
            let before = next.load(SeqCst);
            let taker = stage.spawn_until("taker", SERVING, &[]);
            server.succeeded();
            server = taker;
            until("calls go on", || next.load(SeqCst) > before + 100);
        }
        stop.store(true, SeqCst);
        let runtime = load.join().unwrap();
        assert_eq!(client.with(|client| client.generation()), Some(11));
        whole(&client);
        let calls = next.load(SeqCst);
        assert!((1..calls).all(|number| stage.runs(number) == 1), "each call ran once");
        println!("{name}: {calls} calls over 10 replacements");
        drop((client, runtime));
    }
}

#[test]
fn tasks_go_on_with_the_stand_by_of_a_killed_server() {
    watched!();
    for (name, runtime) in runtimes() {
        let stage = Stage::new(WORDS);
        let mut server = stage.server();
        runtime.block_on(async {
            let client = AsyncClient::connect(stage.socket(), &small()).unwrap();
            let (mut number, mut retries) = (0, 0);
            for round in 0..10 {
                let standby = stage.spawn_until("standby", APPROACHED, &[]);
                let tasks: Vec<_> = (0..20)
                    .map(|_| {
                        number += 1;
                        let (client, number) = (client.clone(), number);
                        tokio::spawn(async move {
                            let bytes = pattern(number, 8 + 30 * usize::try_from(number % 3).unwrap());
                            let ask = Ask::new(COUNT, &bytes);
                            let again = number.is_multiple_of(2);
                            (number, again, call(&client, if again { ask.idempotent() } else { ask }).await)
                        })
                    })
                    .collect();
                if round % 2 == 0 {
                    tokio::time::sleep(Duration::from_micros(300)).await;
                }
                server.strike();
                for task in tasks {
                    let (number, again, outcome) = task.await.unwrap();
                    let runs = stage.runs(number);
                    match outcome {
                        Ok(reply) => {
                            assert_eq!(reply.to_vec()[..8], number.to_le_bytes());
                            assert!(runs == 1 || again && runs > 1, "call {number} ran {runs} times");
                        }
                        Err(Failure { why: CallError::Retry { .. }, .. }) => {
                            assert!(!again && runs <= 1, "call {number} ran {runs} times");
                            retries += 1;
                        }
                        Err(failure) => panic!("call {number}: {failure}"),
                    }
                }
                server.was_killed();
                server = standby;
                let reply = call(&client, Ask::new(ECHO, &[1; 300])).await;
                assert_eq!(reply.unwrap().to_vec(), [1; 300]);
            }
            whole(&client);
            println!("{name}: {number} calls over 10 deaths, {retries} to be retried");
        });
    }
}

/// If a caller notices the replacement before the listening task does, that task must still leave the dead
/// server.
#[test]
fn results_are_heard_whoever_noticed_the_replacement() {
    watched!();
    let [(_, runtime), _] = runtimes();
    let stage = Stage::new(WORDS);
    let mut server = stage.server();
    runtime.block_on(async {
        let client = AsyncClient::connect(stage.socket(), &small()).unwrap();
        for round in 0..10 {
            let standby = stage.spawn_until("standby", APPROACHED, &[]);
            server.kill();
            // The listening task has not run since the death, because this thread has not yielded.
            let ticket = client.with(|client: &mut Client| client.submit(Ask::new(ECHO, b"sync"))).unwrap();
            let heard = client.with(|client| client.wait(ticket, ample()));
            assert_eq!(heard.unwrap().to_vec(), b"sync");
            for n in 0..20 {
                let late = late(&client, &stage.board, n).await;
                stage.board.add(RELEASE, 1);
                late.await.unwrap().unwrap();
            }
            assert_eq!(client.with(|client| client.generation()), Some(round + 2));
            server = standby;
        }
        whole(&client);
    });
}

/// Each call tells the server that this process is awake. The results of tasks that sleep must be rung for all the same.
#[test]
fn a_call_that_is_answered_at_once_leaves_no_other_task_asleep() {
    watched!();
    for (_, runtime) in runtimes() {
        let folder = Folder::new();
        // Only a sleeping server is rung.
        let host = Host::start(folder.socket(), ServerOptions { spin: Some(Duration::ZERO), ..options() });
        runtime.block_on(async {
            let client = AsyncClient::connect(&host.path, &small()).unwrap();
            for round in 0..200 {
                let late = late(&client, &host.board, round).await;
                client.with(|client| {
                    let ticket = client.submit(Ask::new(ECHO, b"at once")).unwrap();
                    assert_eq!(client.wait(ticket, ample()).unwrap().to_vec(), b"at once");
                });
                host.board.add(RELEASE, 1);
                late.await.unwrap().unwrap();
            }
            whole(&client);
        });
    }
}

#[test]
fn a_client_outlives_the_runtime_that_it_connected_in() {
    watched!();
    let folder = Folder::new();
    let host = Host::start(folder.socket(), options());
    let [_, (_, mut last)] = runtimes();
    let client = last.block_on(async { AsyncClient::connect(&host.path, &small()) }).unwrap();
    for (_, next) in runtimes() {
        // This task waits for its result when the runtime ends in which another one listens for it.
        let waiting = next.block_on(late(&client, &host.board, 1));
        drop(std::mem::replace(&mut last, next));
        host.board.add(RELEASE, 1);
        last.block_on(waiting).unwrap().unwrap();
    }
    drop(last);
    let [(_, last), _] = runtimes();
    let _ = last.block_on(count(&client, 2, 100)).unwrap();
    last.block_on(async { whole(&client) });
}

#[test]
fn a_caller_that_cannot_listen_is_told() {
    watched!();
    if !tasuki_testing::alone(a_caller_that_cannot_listen_is_told) {
        return;
    }
    let folder = Folder::new();
    let host = Host::start(folder.socket(), options());
    let without_io = Builder::new_current_thread().enable_time().build().unwrap();
    let connected =
        catch_unwind(AssertUnwindSafe(|| without_io.block_on(async { AsyncClient::connect(&host.path, &small()) })));
    assert!(connected.is_err(), "the runtime has no IO");
    let [(_, first), (_, next)] = runtimes();
    let client = first.block_on(async { AsyncClient::connect(&host.path, &small()) }).unwrap();
    drop(first);
    let failure = with_descriptors(0, || next.block_on(call(&client, Ask::new(HOLD, &pattern(1, 8)))));
    assert!(matches!(failure.unwrap_err().why, CallError::Kernel(_)));
    host.board.set(GATE, 1);
    let _ = next.block_on(count(&client, 2, 100)).unwrap();
}

#[test]
fn a_client_that_is_dropped_leaves_the_server() {
    watched!();
    let folder = Folder::new();
    let host = Host::start(folder.socket(), options());
    for (_, runtime) in runtimes() {
        runtime.block_on(async {
            let client = AsyncClient::connect(&host.path, &small()).unwrap();
            let one = client.clone();
            drop(client);
            let _ = call(&one, Ask::new(ECHO, b"x")).await.unwrap();
            drop(one);
            let start = Instant::now();
            while host.with(|server| server.clients()) > 0 {
                assert!(start.elapsed() < PATIENCE, "the listening task keeps the client alive");
                tokio::time::sleep(Duration::from_micros(200)).await;
            }
        });
    }
}
