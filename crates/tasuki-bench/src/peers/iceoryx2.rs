//! iceoryx2 between two processes that poll busily: its request-response, and the faster exchange of two topics.
//!
//! Its best fair set-up, as far as we know it. The worth of each point was measured; settings not named here made no
//! difference:
//!
//! - `ipc::Service`, the variant whose ports stay on one thread and take no locks;
//! - one client, one server, and no more buffers than a call needs, so that polling looks at one queue;
//! - no spin-loop hint while polling: `receive` is slow enough by itself, and the hint delays it;
//! - memory for the next request (and, where the pattern allows it, the next answer) is taken while waiting for this
//!   one, where it costs nothing: worth 200 ns a call.
//!
//! The clock covers only the steps that no caller can avoid: write, send, receive, read, and release.

use std::hint::black_box;

use anyhow::{Context, Result, ensure};
use iceoryx2::node::{Node, NodeBuilder};
use iceoryx2::prelude::{
    Config, FileName, LogLevel, Path, SemanticString, ServiceName, SignalHandlingMode, ZeroCopySend, ipc, set_log_level,
};
use iceoryx2::service::port_factory::PortFactory as _;
use iceoryx2::service::port_factory::{publish_subscribe, request_response};

use super::MESSAGE_LEN;
use crate::case::{Case, Ends, Measure, Serve};
use crate::cpus::Cores;
use crate::orders::Orders;
use crate::sample::Sample;

/// The cases, in the order in which a round runs them.
///
/// The client of a `-4k` case writes 4 KiB, the server reads them, and 48 bytes come back.
pub const CASES: &[Case] = &[
    case("iceoryx2", 200_000, serve_calls::<ANSWER_WORDS>, measure_calls::<ANSWER_WORDS>),
    case("iceoryx2-4k", 100_000, serve_calls::<BIG_WORDS>, measure_calls::<BIG_WORDS>),
    // Not a call: nothing ties an answer to its request. But iceoryx2 has no faster round trip.
    case("iceoryx2-topics", 200_000, serve_topics::<ANSWER_WORDS>, measure_topics::<ANSWER_WORDS>),
    case("iceoryx2-topics-4k", 100_000, serve_topics::<BIG_WORDS>, measure_topics::<BIG_WORDS>),
];

/// 64-bit words of an answer, and of a small request.
const ANSWER_WORDS: usize = MESSAGE_LEN / 8;

/// 64-bit words of a 4 KiB request.
const BIG_WORDS: usize = 4096 / 8;

type Request<const WORDS: usize> = [u64; WORDS];
type Answer = [u64; ANSWER_WORDS];
type Calls<const WORDS: usize> = request_response::PortFactory<ipc::Service, Request<WORDS>, (), Answer, ()>;
type Topic<T> = publish_subscribe::PortFactory<ipc::Service, T, ()>;

const fn case(name: &'static str, calls: u64, serve: Serve, measure: Measure) -> Case {
    Case { name, cores: Cores::Other, calls, full: 2, prepare: Ends::none, serve, measure }
}

fn serve_calls<const WORDS: usize>(orders: Orders) -> Result<()> {
    let node = node(&orders)?;
    let service = calls::<WORDS>(&node)?;
    let server = service.server_builder().create().context("iceoryx2 made no server")?;
    for _ in 1..=orders.total() {
        let request = poll(|| Ok(server.receive()?))?;
        let sum = sum(request.payload());
        request.loan_uninit()?.write_payload([sum; ANSWER_WORDS]).send()?;
    }
    // The client still reads the last answer. Its departure says that it is done.
    wait_until(|| service.dynamic_config().number_of_clients() == 0);
    Ok(())
}

fn measure_calls<const WORDS: usize>(orders: Orders) -> Result<Sample> {
    let node = node(&orders)?;
    let service = calls::<WORDS>(&node)?;
    wait_until(|| service.dynamic_config().number_of_servers() == 1);
    let client = service.client_builder().create().context("iceoryx2 made no client")?;
    let mut ahead = Some(client.loan_uninit()?);
    Sample::of_calls(&orders, |number| {
        let request = ahead.take().context("a request's memory is always taken ahead")?;
        let waiting = request.write_payload([number; WORDS]).send()?;
        ahead = Some(client.loan_uninit()?);
        let answer = poll(|| Ok(waiting.receive()?))?;
        check::<WORDS>(number, answer.payload())
    })
}

fn serve_topics<const WORDS: usize>(orders: Orders) -> Result<()> {
    let node = node(&orders)?;
    let (requests, answers) = topics::<WORDS>(&node)?;
    let incoming = requests.subscriber_builder().create().context("iceoryx2 made no subscriber")?;
    let outgoing = answers.publisher_builder().create().context("iceoryx2 made no publisher")?;
    wait_until(|| answers.dynamic_config().number_of_subscribers() == 1);
    for _ in 1..=orders.total() {
        let answer = outgoing.loan_uninit()?;
        let request = poll(|| Ok(incoming.receive()?))?;
        let sum = sum(request.payload());
        answer.write_payload([sum; ANSWER_WORDS]).send()?;
    }
    wait_until(|| answers.dynamic_config().number_of_subscribers() == 0);
    Ok(())
}

fn measure_topics<const WORDS: usize>(orders: Orders) -> Result<Sample> {
    let node = node(&orders)?;
    let (requests, answers) = topics::<WORDS>(&node)?;
    let incoming = answers.subscriber_builder().create().context("iceoryx2 made no subscriber")?;
    let outgoing = requests.publisher_builder().create().context("iceoryx2 made no publisher")?;
    wait_until(|| requests.dynamic_config().number_of_subscribers() == 1);
    let mut ahead = Some(outgoing.loan_uninit()?);
    Sample::of_calls(&orders, |number| {
        let request = ahead.take().context("a request's memory is always taken ahead")?;
        request.write_payload([number; WORDS]).send()?;
        ahead = Some(outgoing.loan_uninit()?);
        let answer = poll(|| Ok(incoming.receive()?))?;
        check::<WORDS>(number, answer.payload())
    })
}

/// Polls `receive` until it returns a message.
fn poll<T>(mut receive: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    loop {
        if let Some(received) = receive()? {
            return Ok(received);
        }
    }
}

/// Waits for the other role to come or go, off the clock.
fn wait_until(mut done: impl FnMut() -> bool) {
    while !done() {
        std::thread::yield_now();
    }
}

/// Reads every word, as a server that uses its request would.
fn sum<const WORDS: usize>(request: &Request<WORDS>) -> u64 {
    black_box(request).iter().fold(0, |sum, word| sum.wrapping_add(*word))
}

fn check<const WORDS: usize>(number: u64, answer: &Answer) -> Result<()> {
    ensure!(answer[0] == number.wrapping_mul(WORDS as u64), "answer {number} is not that of its request");
    Ok(())
}

/// Makes a node that leaves files only in the pair's own directory or under its own prefix.
fn node(orders: &Orders) -> Result<Node<ipc::Service>> {
    set_log_level(LogLevel::Error);
    let root = orders.directory.to_str().context("the directory for temporary files has a name that is not UTF-8")?;
    let mut config = Config::default();
    config.global.set_root_path(&Path::new(root.as_bytes()).context("iceoryx2 refused the directory")?);
    config.global.prefix = FileName::new(orders.shm_prefix.as_bytes()).context("iceoryx2 refused the prefix")?;
    // The bench kills its roles, so iceoryx2 need not catch signals.
    let builder = NodeBuilder::new().config(&config).signal_handling_mode(SignalHandlingMode::Disabled);
    builder.create().context("iceoryx2 made no node")
}

/// Opens the service in either role; the first role creates it.
fn calls<const WORDS: usize>(node: &Node<ipc::Service>) -> Result<Calls<WORDS>> {
    node.service_builder(&name("calls")?)
        .request_response::<Request<WORDS>, Answer>()
        .max_clients(1)
        .max_servers(1)
        .max_nodes(2)
        .max_active_requests_per_client(2)
        .max_loaned_requests(2)
        .max_response_buffer_size(1)
        .max_borrowed_responses_per_pending_response(1)
        .open_or_create()
        .context("iceoryx2 neither opened nor created the service")
}

/// Returns (requests, answers).
fn topics<const WORDS: usize>(node: &Node<ipc::Service>) -> Result<(Topic<Request<WORDS>>, Topic<Answer>)> {
    Ok((topic(node, "requests")?, topic(node, "answers")?))
}

fn topic<T>(node: &Node<ipc::Service>, topic: &str) -> Result<Topic<T>>
where
    T: std::fmt::Debug + ZeroCopySend,
{
    node.service_builder(&name(topic)?)
        .publish_subscribe::<T>()
        .max_publishers(1)
        .max_subscribers(1)
        .max_nodes(2)
        .history_size(0)
        .subscriber_max_buffer_size(1)
        .open_or_create()
        .context("iceoryx2 neither opened nor created the topic")
}

fn name(name: &str) -> Result<ServiceName> {
    ServiceName::new(name).context("iceoryx2 refused the service's name")
}
