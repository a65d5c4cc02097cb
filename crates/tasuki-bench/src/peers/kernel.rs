//! Calls through the kernel's own channels: a SEQPACKET socket pair, and a pair of pipes. 48 bytes each way. Both roles
//! block; those of `…-one-wake` look for the answer until it is there, after a rest, as our own client does.

use std::os::fd::OwnedFd;

use anyhow::{Context, Result, ensure};
use rustix::fs::OFlags;
use rustix::io::{Errno, read, write};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::pipe::{PipeFlags, pipe_with};

use super::MESSAGE_LEN;
use crate::call::UNTIL_PARKED;
use crate::case::{Case, Ends};
use crate::cpus::Cores;
use crate::floors::{RESTED_CALLS, sleeping_calls};
use crate::orders::Orders;
use crate::sample::Sample;

/// The cases, in the order in which a round runs them.
pub const CASES: &[Case] = &[
    case("seqpacket-same-core", Cores::Same, socket_pair),
    case("seqpacket-other-core", Cores::Other, socket_pair),
    case("pipe-same-core", Cores::Same, pipes),
    case("pipe-other-core", Cores::Other, pipes),
    one_wake("seqpacket-one-wake", socket_pair),
    one_wake("pipe-one-wake", pipes),
];

/// (case, its floor)
pub const FLOORS: [(&str, &str); 6] = [
    ("seqpacket-same-core", "futex-same-core"),
    ("seqpacket-other-core", "futex-other-core"),
    ("pipe-same-core", "futex-same-core"),
    ("pipe-other-core", "futex-other-core"),
    ("seqpacket-one-wake", "eventfd-one-wake"),
    ("pipe-one-wake", "eventfd-one-wake"),
];

const fn case(name: &'static str, cores: Cores, prepare: fn() -> Result<Ends>) -> Case {
    Case { name, cores, calls: sleeping_calls(cores), full: 2, prepare, serve, measure }
}

const fn one_wake(name: &'static str, prepare: fn() -> Result<Ends>) -> Case {
    Case { calls: RESTED_CALLS, measure: measure_one_wake, ..case(name, Cores::Other, prepare) }
}

/// Makes the descriptors that each role reads from and writes to: here the same socket.
fn socket_pair() -> Result<Ends> {
    let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let (server, client) = pair.context("the kernel gave no socket pair")?;
    let twice = |fd: OwnedFd| -> Result<Vec<OwnedFd>> {
        let copy = fd.try_clone().context("no descriptor is left for a socket")?;
        Ok(vec![fd, copy])
    };
    Ok(Ends { server: twice(server)?, client: twice(client)? })
}

fn pipes() -> Result<Ends> {
    let (request_out, request_in) = pipe_with(PipeFlags::CLOEXEC).context("the kernel gave no pipe")?;
    let (answer_out, answer_in) = pipe_with(PipeFlags::CLOEXEC).context("the kernel gave no pipe")?;
    Ok(Ends { server: vec![request_out, answer_in], client: vec![answer_out, request_in] })
}

fn serve(mut orders: Orders) -> Result<()> {
    let (input, output) = (orders.next_fd()?, orders.next_fd()?);
    for number in 1..=orders.total() {
        receive(&input, number)?;
        send(&output, number)?;
    }
    Ok(())
}

fn measure(mut orders: Orders) -> Result<Sample> {
    let (input, output) = (orders.next_fd()?, orders.next_fd()?);
    Sample::of_calls(&orders, |number| {
        send(&output, number)?;
        receive(&input, number)
    })
}

fn measure_one_wake(mut orders: Orders) -> Result<Sample> {
    let (input, output) = (orders.next_fd()?, orders.next_fd()?);
    // The flag is this end's alone.
    rustix::fs::fcntl_setfl(&input, OFlags::NONBLOCK).context("the kernel lets no reader look without waiting")?;
    Sample::of_rested_calls(&orders, UNTIL_PARKED, |number| {
        send(&output, number)?;
        receive(&input, number)
    })
}

fn send(output: &OwnedFd, number: u64) -> Result<()> {
    let mut message = [0; MESSAGE_LEN];
    message[..8].copy_from_slice(&number.to_ne_bytes());
    // One write sends it all: pipes take so few bytes whole, and packets are always whole.
    write(output, &message).context("a message could not be sent")?;
    Ok(())
}

fn receive(input: &OwnedFd, number: u64) -> Result<()> {
    let mut message = [0; MESSAGE_LEN];
    let len = loop {
        match read(input, &mut message) {
            Err(Errno::AGAIN) => std::hint::spin_loop(),
            other => break other.context("a message could not be received")?,
        }
    };
    ensure!(len == MESSAGE_LEN && message[..8] == number.to_ne_bytes(), "message {number} did not arrive as sent");
    Ok(())
}
