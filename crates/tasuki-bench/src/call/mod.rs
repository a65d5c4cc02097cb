//! Our own calls, with one case for each way of making them.

mod idle;
mod rows;
mod trusted;

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::pipe::{PipeFlags, pipe_with};
use tasuki_call::{Ask, Client, ClientOptions, Deadline, INLINE_MAX, Peers, Request, Server, ServerOptions, Ticket};
use tasuki_shm::arena::{Detach, Geometry};
use tasuki_shm::clock::now_ns;
use tasuki_shm::line::LINE_LEN;
use zerocopy::{FromBytes, IntoBytes};

use crate::case::{Case, Ends, Measure, Serve};
use crate::cpus::Cores;
use crate::floors;
use crate::orders::Orders;
use crate::sample::Sample;

pub use idle::on_cpu;
pub use rows::{paper, rows};

/// Our cases, in the order in which a round runs them.
pub const CASES: &[Case] = &[
    case("spin-inline", 500_000, echo, |orders| inline(orders, Duration::ZERO)),
    case("spin-slot", 150_000, read_in_place, |orders| slots(orders, SMALL, Detach::Move)),
    Case { cores: Cores::Same, ..case("same-core", 100_000, echo, |orders| inline(orders, Duration::ZERO)) },
    case("parked", floors::RESTED_CALLS, echo, |orders| inline(orders, UNTIL_PARKED)),
    case("async", 500_000, echo, submit_and_poll),
    case("pipelined", 1_500_000, echo, pipelined),
    case("stamped", 200_000, stamp, |orders| stamped(orders, Duration::ZERO)),
    Case { cores: Cores::Same, ..case("stamped-same-core", 50_000, stamp, |orders| stamped(orders, Duration::ZERO)) },
    case("stamped-parked", 500, stamp, |orders| stamped(orders, UNTIL_PARKED)),
    case("detach-move-4k", 50_000, read_in_place, |orders| slots(orders, SMALL, Detach::Move)),
    case("detach-move-64k", 5_000, read_in_place, |orders| slots(orders, MEDIUM, Detach::Move)),
    case("detach-move-2m", 200, read_in_place, |orders| slots(orders, LARGE, Detach::Move)),
    case("detach-guard-4k", 20_000, read_in_place, |orders| slots(orders, SMALL, Detach::Guard)),
    case("detach-guard-64k", 4_000, read_in_place, |orders| slots(orders, MEDIUM, Detach::Guard)),
    case("detach-guard-2m", 200, read_in_place, |orders| slots(orders, LARGE, Detach::Guard)),
    case("detach-enforced-4k", 10_000, read_in_place, |orders| slots(orders, SMALL, Detach::Enforced)),
    case("detach-enforced-64k", 4_000, read_in_place, |orders| slots(orders, MEDIUM, Detach::Enforced)),
    case("detach-enforced-2m", 200, read_in_place, |orders| slots(orders, LARGE, Detach::Enforced)),
    case("copy-4k", 50_000, read_copy, |orders| slots(orders, SMALL, Detach::Move)),
    case("copy-64k", 5_000, read_copy, |orders| slots(orders, MEDIUM, Detach::Move)),
    case("copy-2m", 200, read_copy, |orders| slots(orders, LARGE, Detach::Move)),
    case("idle-1000", 1, idle::serve, idle::measure),
];

/// Slots of the default size.
const SMALL: Geometry = Geometry { slot_len: 4096, count: 256 };
const MEDIUM: Geometry = Geometry { slot_len: 64 << 10, count: 16 };
/// One huge page per slot, where the machine has some.
const LARGE: Geometry = Geometry { slot_len: 2 << 20, count: 4 };

/// Number of calls in flight in the case `pipelined`.
const IN_FLIGHT: usize = 64;

/// Number of results that the case `pipelined` collects before it sends as many new requests.
const BURST: usize = 32;

/// Long enough for a server to have parked, and for its CPU to have gone idle.
pub const UNTIL_PARKED: Duration = Duration::from_millis(1);

const DEADLINE: Duration = Duration::from_secs(10);

const METHOD: u16 = 1;

const fn case(name: &'static str, calls: u64, serve: Serve, measure: Measure) -> Case {
    Case { name, cores: Cores::Other, calls, full: 2, prepare: ready_pipe, serve, measure }
}

/// Makes the pipe on which the server reports that it listens.
fn ready_pipe() -> Result<Ends> {
    let (client, server) = pipe_with(PipeFlags::CLOEXEC).context("the kernel gave no pipe")?;
    Ok(Ends { server: vec![server], client: vec![client] })
}

/// Serves until the (last) client has left.
fn serve(mut orders: Orders, mut handler: impl FnMut(Request<'_>)) -> Result<()> {
    let ready = orders.next_fd()?;
    let options = ServerOptions { peers: Peers::SameUser, ..ServerOptions::default() };
    let mut server = Server::bind(orders.directory.join("call"), options)?;
    std::fs::File::from(ready).write_all(&std::process::id().to_ne_bytes()).context("nobody waits for the server")?;
    while server.tally().departed == 0 || server.clients() > 0 {
        server.turn(None, &mut handler)?;
    }
    Ok(())
}

/// Waits until the server listens; returns its process id.
fn await_server(ready: OwnedFd) -> Result<u32> {
    let mut pid = [0; 4];
    std::fs::File::from(ready).read_exact(&mut pid).context("the server ended before it listened")?;
    Ok(u32::from_ne_bytes(pid))
}

fn connect(orders: &mut Orders, options: &ClientOptions) -> Result<Client> {
    await_server(orders.next_fd()?)?;
    Ok(Client::connect(orders.directory.join("call"), options)?)
}

/// Answers with the same bytes.
fn echo(orders: Orders) -> Result<()> {
    serve(orders, |request| {
        let mut bytes = [0; INLINE_MAX];
        let len = request.copy_to(&mut bytes);
        request.reply(&bytes[..len]).expect("so few bytes need no slot");
    })
}

/// Private memory of the size and the alignment of a cache line.
#[derive(Clone, Default, FromBytes, IntoBytes)]
#[repr(C, align(64))]
pub(crate) struct AlignedLine([u64; 8]);

/// Reads every byte of a private copy, as a server does for an untrusted client, and answers with their sum.
fn read_copy(orders: Orders) -> Result<()> {
    // On whole lines: a copy to an unaligned buffer costs an eighth more.
    let mut copy = vec![AlignedLine::default(); LARGE.slot_len as usize / LINE_LEN];
    serve(orders, move |request| {
        let copy = copy.as_mut_bytes();
        let len = request.copy_to(copy);
        request.reply(&sum(&copy[..len]).to_ne_bytes()).expect("so few bytes need no slot");
    })
}

/// Reads every byte where the client wrote it, as a server does for a trusted client, and answers with their sum.
fn read_in_place(orders: Orders) -> Result<()> {
    serve(orders, |request| {
        let sum = request.slot().map_or(0, trusted::sum_in_place);
        request.reply(&sum.to_ne_bytes()).expect("so few bytes need no slot");
    })
}

/// Returns the sum of the 64-bit words of `bytes`: it needs every byte, and reading them is nearly all the work.
fn sum(bytes: &[u8]) -> u64 {
    let (words, _) = bytes.as_chunks::<8>();
    words.iter().fold(0, |sum, word| sum.wrapping_add(u64::from_ne_bytes(*word)))
}

/// Answers with the time, by a clock that both processes share.
fn stamp(orders: Orders) -> Result<()> {
    serve(orders, |request| request.reply(&now_ns().to_ne_bytes()).expect("so few bytes need no slot"))
}

/// Makes a request that differs from every other.
fn message(number: u64) -> [u8; INLINE_MAX] {
    let mut bytes = [0; INLINE_MAX];
    bytes[..8].copy_from_slice(&number.to_ne_bytes());
    bytes
}

/// Times calls of 48 bytes, each after a rest of `pause`.
fn inline(mut orders: Orders, pause: Duration) -> Result<Sample> {
    let mut client = connect(&mut orders, &ClientOptions::default())?;
    let mut sample = Sample::new();
    for number in 1..=orders.total() {
        if !pause.is_zero() {
            std::thread::sleep(pause);
        }
        let request = message(number);
        let start = Instant::now();
        let reply = client.call(Ask::new(METHOD, &request), Deadline::within(DEADLINE))?;
        let took = start.elapsed();
        ensure!(reply.inline() == Some(&request[..]), "call {number} was answered with something else");
        if number > orders.warmup {
            sample.record(took);
        }
    }
    Ok(sample)
}

/// Times calls whose request fills a slot. The time includes writing it.
fn slots(mut orders: Orders, geometry: Geometry, detach: Detach) -> Result<Sample> {
    let options = ClientOptions { arena: geometry, detach, ..ClientOptions::default() };
    let mut client = connect(&mut orders, &options)?;
    let len = geometry.slot_len as usize;
    Sample::of_calls(&orders, |number| {
        let byte = number.to_ne_bytes()[0];
        let mut slot = client.take_slot()?;
        slot.bytes_mut().fill(byte);
        let reply = client.call(Ask::with_slot(METHOD, slot, len), Deadline::within(DEADLINE))?;
        let sum = u64::from_ne_bytes([byte; 8]).wrapping_mul(len as u64 / 8);
        ensure!(reply.inline() == Some(&sum.to_ne_bytes()[..]), "call {number} was not read as it was written");
        Ok(())
    })
}

/// Times calls that are submitted and polled for, one at a time.
fn submit_and_poll(mut orders: Orders) -> Result<Sample> {
    let mut client = connect(&mut orders, &ClientOptions::default())?;
    Sample::of_calls(&orders, |number| {
        let request = message(number);
        let ticket = client.submit(Ask::new(METHOD, &request))?;
        let reply = loop {
            if let Some(reply) = client.poll(&ticket)? {
                break reply;
            }
        };
        ensure!(reply.inline() == Some(&request[..]), "call {number} was answered with something else");
        Ok(())
    })
}

/// Measures the number of calls a second with [`IN_FLIGHT`] in flight.
fn pipelined(mut orders: Orders) -> Result<Sample> {
    let mut client = connect(&mut orders, &ClientOptions::default())?;
    let mut sample = Sample::new();
    many(&mut client, orders.warmup)?;
    let start = Instant::now();
    many(&mut client, orders.calls)?;
    let took = start.elapsed();
    sample.rate(orders.calls, took)?;
    Ok(sample)
}

fn many(client: &mut Client, calls: u64) -> Result<()> {
    let mut tickets: std::collections::VecDeque<(u64, Ticket)> = std::collections::VecDeque::with_capacity(IN_FLIGHT);
    let mut sent = 0;
    while sent < calls || !tickets.is_empty() {
        while sent < calls && tickets.len() < IN_FLIGHT {
            tickets.push_back((sent, client.stage(Ask::new(METHOD, &message(sent)))?));
            sent += 1;
        }
        client.flush();
        for _ in 0..BURST.min(tickets.len()) {
            let (number, ticket) = tickets.pop_front().context("just counted")?;
            let reply = loop {
                if let Some(reply) = client.poll(&ticket)? {
                    break reply;
                }
            };
            ensure!(reply.inline() == Some(&message(number)[..]), "call {number} was answered with something else");
        }
    }
    Ok(())
}

/// Times the two halves of a call by the server's stamp, each call after a rest of `pause`. Notes the median of each half.
fn stamped(mut orders: Orders, pause: Duration) -> Result<Sample> {
    let mut client = connect(&mut orders, &ClientOptions::default())?;
    let (mut requests, mut returns) = (Sample::new(), Sample::new());
    let mut sample = Sample::of_calls(&orders, |number| {
        if !pause.is_zero() {
            std::thread::sleep(pause);
        }
        let start = now_ns();
        let reply = client.call(Ask::new(METHOD, &message(number)), Deadline::within(DEADLINE))?;
        let end = now_ns();
        let stamp = reply.inline().and_then(|bytes| bytes.try_into().ok()).map(u64::from_ne_bytes);
        let served = stamp.context("the server did not stamp the call")?;
        requests.record(Duration::from_nanos(served.saturating_sub(start)));
        returns.record(Duration::from_nanos(end.saturating_sub(served)));
        Ok(())
    })?;
    sample.note("request", requests.summary().p50 as f64);
    sample.note("return", returns.summary().p50 as f64);
    Ok(sample)
}
