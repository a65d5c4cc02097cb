//! Physical floors: the least that any call through shared memory or through the kernel costs on this machine.
//!
//! No floor carries a payload. A floor is the fastest honest way we know. Where two ways compete (spinning with and
//! without the CPU's hint), the bench measures both and counts the better one.
//!
//! Spinning has three floors:
//!
//! - `ping-pong` has a line for each direction, as memory with a single writing process needs.
//! - `ping-pong-read-only` is the same, but each process maps the other's line read-only, as we do. Some CPUs give a
//!   line away more cheaply to a process that may write it (docs/decisions/0007).
//! - `ping-pong-one-line` puts both words on one line, which both processes write. It is faster and out of our
//!   reach: one line moves per message, where the others must win the answer's line back from its reader.
//!
//! A call whose server sleeps on another CPU takes one wake-up where the caller spins for the answer, as ours does, and
//! two where it sleeps as well. An idle CPU also wakes the faster the sooner it is woken. So `eventfd-one-wake` spins for
//! its answer, and rests before each call as long as `parked` does; `eventfd-other-core` sleeps twice, without a rest.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::atomic::{AtomicU32, AtomicU64};

use anyhow::{Context, Result};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, read, write};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use rustix::thread::futex;
use tasuki_shm::line::{Claims, LINE_LEN, Line};
use tasuki_shm::region::{Pages, PeerRegion, Region, Span};

use crate::call::UNTIL_PARKED;
use crate::case::{Case, Ends, Measure, Serve};
use crate::cpus::Cores;
use crate::orders::Orders;
use crate::report::{Kind, Row};
use crate::rounds::Samples;
use crate::sample::Sample;

/// The floors, in the order in which a round runs them.
pub const CASES: &[Case] = &[
    ping_pong_case("ping-pong-tight", serve_ping_pong::<TIGHT, TWO_LINES>, measure_ping_pong::<TIGHT, TWO_LINES>),
    ping_pong_case("ping-pong-hinted", serve_ping_pong::<HINTED, TWO_LINES>, measure_ping_pong::<HINTED, TWO_LINES>),
    ping_pong_case("one-line-tight", serve_ping_pong::<TIGHT, ONE_LINE>, measure_ping_pong::<TIGHT, ONE_LINE>),
    ping_pong_case("one-line-hinted", serve_ping_pong::<HINTED, ONE_LINE>, measure_ping_pong::<HINTED, ONE_LINE>),
    read_only_case("read-only-tight", serve_read_only::<TIGHT>, measure_read_only::<TIGHT>),
    read_only_case("read-only-hinted", serve_read_only::<HINTED>, measure_read_only::<HINTED>),
    futex_case("futex-same-core", Cores::Same),
    futex_case("futex-other-core", Cores::Other),
    eventfd_case("eventfd-same-core", Cores::Same),
    eventfd_case("eventfd-other-core", Cores::Other),
    Case {
        calls: RESTED_CALLS,
        prepare: eventfd_and_lines,
        serve: serve_one_wake,
        measure: measure_one_wake,
        ..eventfd_case("eventfd-one-wake", Cores::Other)
    },
];

/// Round trips of a case with a rest before each, per round of a quick run.
pub const RESTED_CALLS: u64 = 500;

/// Floor of everything that spins and keeps each direction's memory for one writer.
pub const PING_PONG: &str = "ping-pong";

/// Floor of everything that spins and maps a peer's memory read-only.
pub const PING_PONG_READ_ONLY: &str = "ping-pong-read-only";

/// Floor of everything that spins and lets both processes write the same line.
pub const PING_PONG_ONE_LINE: &str = "ping-pong-one-line";

/// These floors, each with its cases: without the CPU's hint, and with it.
const SPINNING: [(&str, &str, &str); 3] = [
    (PING_PONG, "ping-pong-tight", "ping-pong-hinted"),
    (PING_PONG_READ_ONLY, "read-only-tight", "read-only-hinted"),
    (PING_PONG_ONE_LINE, "one-line-tight", "one-line-hinted"),
];

/// Whether a waiting process gives the CPU the spin-loop hint.
const HINTED: bool = true;
const TIGHT: bool = false;

/// Whether both directions share a cache line.
const ONE_LINE: bool = true;
const TWO_LINES: bool = false;

/// Round trips of a sleeping case per round of a quick run.
///
/// Waking another core costs many times a context switch, above all in a virtual machine, where the host has to give
/// the core back.
pub const fn sleeping_calls(cores: Cores) -> u64 {
    match cores {
        Cores::Same => 40_000,
        Cores::Other => 5_000,
    }
}

const fn ping_pong_case(name: &'static str, serve: Serve, measure: Measure) -> Case {
    Case { name, cores: Cores::Other, calls: 500_000, full: 2, prepare: two_lines, serve, measure }
}

const fn read_only_case(name: &'static str, serve: Serve, measure: Measure) -> Case {
    Case { prepare: connected, ..ping_pong_case(name, serve, measure) }
}

const fn futex_case(name: &'static str, cores: Cores) -> Case {
    let calls = sleeping_calls(cores);
    Case { name, cores, calls, full: 2, prepare: two_lines, serve: serve_futex, measure: measure_futex }
}

const fn eventfd_case(name: &'static str, cores: Cores) -> Case {
    let calls = sleeping_calls(cores);
    Case { name, cores, calls, full: 2, prepare: two_eventfds, serve: serve_eventfd, measure: measure_eventfd }
}

/// Returns the cache-line ping-pong cases, without the CPU's hint and with it.
pub fn ping_pongs() -> impl Iterator<Item = &'static Case> {
    CASES.iter().filter(|case| ["ping-pong-tight", "ping-pong-hinted"].contains(&case.name))
}

/// Returns the median of a floor of spinning, in ns.
pub fn spinning_p50(samples: &Samples, floor: &str) -> Result<f64> {
    Ok(fastest(samples, floor)?.0.summary().p50 as f64)
}

/// Returns the faster of the two ways to spin of a floor, and its name.
fn fastest<'s>(samples: &'s Samples, floor: &str) -> Result<(&'s Sample, &'static str)> {
    let ways = SPINNING.into_iter().find(|(name, ..)| *name == floor);
    let (_, tight, hinted) = ways.with_context(|| format!("{floor} does not spin"))?;
    let (tight, hinted) = (samples.of(tight)?, samples.of(hinted)?);
    Ok(if tight.summary().p50 <= hinted.summary().p50 {
        (tight, "without spin hint")
    } else {
        (hinted, "with spin hint")
    })
}

/// Returns the rows of all floors. Sleeping floors are compared with the futex of the same cores.
pub fn rows(samples: &Samples) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for (name, ..) in SPINNING {
        let (fastest, how) = fastest(samples, name)?;
        let mut of_floor = Row::round_trip(name, fastest);
        of_floor[0].note = Some(how.to_owned());
        rows.extend(of_floor);
    }
    for name in ["futex-same-core", "futex-other-core"] {
        rows.extend(Row::round_trip(name, samples.of(name)?));
    }
    for (name, floor) in [("eventfd-same-core", "futex-same-core"), ("eventfd-other-core", "futex-other-core")] {
        rows.extend(rows_beside(samples, name, Kind::Floor, floor)?);
    }
    rows.extend(Row::round_trip("eventfd-one-wake", samples.of("eventfd-one-wake")?));
    Ok(rows)
}

/// Returns the rows of case `name`, its median compared with that of case `other`.
pub fn rows_beside(samples: &Samples, name: &str, kind: Kind, other: &str) -> Result<Vec<Row>> {
    let mut rows = Row::round_trip(name, samples.of(name)?);
    let median = rows.remove(0).against(other, kind, samples.p50(other)?);
    rows.insert(0, median);
    Ok(rows)
}

/// Makes a region of two lines. Both roles write it.
fn two_lines() -> Result<Ends> {
    let region = Region::create("tasuki-bench floor", 2 * LINE_LEN, Pages::Small)?;
    let fd = || region.fd().try_clone_to_owned().context("no descriptor is left for a region");
    Ok(Ends { server: vec![fd()?], client: vec![fd()?] })
}

/// Maps the two lines in a role.
fn lines(orders: &mut Orders) -> Result<Span<Line>> {
    Ok(Region::adopt(orders.next_fd()?)?.span(0, 2)?)
}

/// Returns (the word that the client writes, the word that the server writes).
fn words<const SHARED_LINE: bool>(lines: &[Line]) -> (&AtomicU64, &AtomicU64) {
    (lines[0].word(0), lines[usize::from(!SHARED_LINE)].word(1))
}

fn serve_ping_pong<const HINT: bool, const SHARED_LINE: bool>(mut orders: Orders) -> Result<()> {
    let lines = lines(&mut orders)?;
    let (request, answer) = words::<SHARED_LINE>(&lines);
    for number in 1..=orders.total() {
        spin_until::<HINT>(request, number);
        answer.store(number, Release);
    }
    Ok(())
}

fn measure_ping_pong<const HINT: bool, const SHARED_LINE: bool>(mut orders: Orders) -> Result<Sample> {
    let lines = lines(&mut orders)?;
    let (request, answer) = words::<SHARED_LINE>(&lines);
    Sample::of_calls(&orders, |number| {
        request.store(number, Release);
        spin_until::<HINT>(answer, number);
        Ok(())
    })
}

/// Makes a connection over which each role hands the other the line that it writes.
fn connected() -> Result<Ends> {
    let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let (client, server) = pair.context("the kernel gave no sockets")?;
    Ok(Ends { server: vec![server], client: vec![client] })
}

/// Returns the line that this role writes, and the line that it reads.
fn own_and_peers(orders: &mut Orders) -> Result<(Span<Line>, Claims<Span<Line>>)> {
    let peer = orders.next_fd()?;
    let own = Region::create("tasuki-bench floor", LINE_LEN, Pages::Small)?;
    own.seal_writers()?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [own.fd()];
    control.push(SendAncillaryMessage::ScmRights(&fds));
    sendmsg(&peer, &[IoSlice::new(b"line")], &mut control, SendFlags::empty()).context("the other role is gone")?;

    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    recvmsg(&peer, &mut [IoSliceMut::new(&mut [0; 4])], &mut control, RecvFlags::CMSG_CLOEXEC)
        .context("the other role is gone")?;
    let theirs = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    let theirs = PeerRegion::map(theirs.context("the other role sent no memory")?.as_fd(), LINE_LEN)?;
    Ok((own.span(0, 1)?, theirs.claims(0, 1)?))
}

fn serve_read_only<const HINT: bool>(mut orders: Orders) -> Result<()> {
    let (answer, request) = own_and_peers(&mut orders)?;
    for number in 1..=orders.total() {
        spin_on::<HINT>(&request, number);
        answer[0].word(0).store(number, Release);
    }
    Ok(())
}

fn measure_read_only<const HINT: bool>(mut orders: Orders) -> Result<Sample> {
    let (request, answer) = own_and_peers(&mut orders)?;
    Sample::of_calls(&orders, |number| {
        request[0].word(0).store(number, Release);
        spin_on::<HINT>(&answer, number);
        Ok(())
    })
}

fn spin_on<const HINT: bool>(line: &Claims<Span<Line>>, number: u64) {
    while line.load(0, 0) != number {
        if HINT {
            std::hint::spin_loop();
        }
    }
}

fn spin_until<const HINT: bool>(word: &AtomicU64, number: u64) {
    while word.load(Acquire) != number {
        if HINT {
            std::hint::spin_loop();
        }
    }
}

/// Maps the futexes of the two directions, one line apart.
fn futexes(orders: &mut Orders) -> Result<[Span<AtomicU32>; 2]> {
    let region = Region::adopt(orders.next_fd()?)?;
    Ok([region.span(0, 1)?, region.span(LINE_LEN, 1)?])
}

fn serve_futex(mut orders: Orders) -> Result<()> {
    let [request, answer] = futexes(&mut orders)?;
    let (request, answer) = (&request[0], &answer[0]);
    for number in 1..=orders.total() {
        sleep_until(request, number)?;
        wake(answer, number)?;
    }
    Ok(())
}

fn measure_futex(mut orders: Orders) -> Result<Sample> {
    let [request, answer] = futexes(&mut orders)?;
    let (request, answer) = (&request[0], &answer[0]);
    Sample::of_calls(&orders, |number| {
        wake(request, number)?;
        sleep_until(answer, number)
    })
}

/// Truncates a call's number to a futex word. It wraps, which is harmless between neighbouring calls.
#[allow(clippy::cast_possible_truncation, reason = "the wrapping is meant")]
fn futex_value(number: u64) -> u32 {
    number as u32
}

/// Stores `number` and wakes the process that sleeps on `word`.
fn wake(word: &AtomicU32, number: u64) -> Result<()> {
    word.store(futex_value(number), Release);
    futex::wake(word, futex::Flags::empty(), 1).context("the kernel woke no process")?;
    Ok(())
}

/// Sleeps until `word` holds `number`. Checks the word first, as every user of a futex must.
fn sleep_until(word: &AtomicU32, number: u64) -> Result<()> {
    loop {
        let found = word.load(Acquire);
        if found == futex_value(number) {
            return Ok(());
        }
        match futex::wait(word, futex::Flags::empty(), found, None) {
            Ok(()) | Err(Errno::AGAIN | Errno::INTR) => {}
            Err(errno) => return Err(errno).context("the kernel refused to sleep"),
        }
    }
}

/// Makes two eventfds: the client rings one, the server the other. Both roles hold both.
fn two_eventfds() -> Result<Ends> {
    let new = || eventfd(0, EventfdFlags::CLOEXEC).context("the kernel gave no eventfd");
    let server = vec![new()?, new()?];
    let client: std::io::Result<_> = server.iter().map(OwnedFd::try_clone).collect();
    Ok(Ends { server, client: client.context("no descriptor is left for an eventfd")? })
}

fn serve_eventfd(mut orders: Orders) -> Result<()> {
    let (request, answer) = (orders.next_fd()?, orders.next_fd()?);
    for _ in 1..=orders.total() {
        hear(&request)?;
        ring(&answer)?;
    }
    Ok(())
}

fn measure_eventfd(mut orders: Orders) -> Result<Sample> {
    let (request, answer) = (orders.next_fd()?, orders.next_fd()?);
    Sample::of_calls(&orders, |_| {
        ring(&request)?;
        hear(&answer)
    })
}

/// Makes an eventfd, which the client rings, and the lines of which the server writes one.
fn eventfd_and_lines() -> Result<Ends> {
    let (mut bells, lines) = (two_eventfds()?, two_lines()?);
    bells.server.splice(1.., lines.server);
    bells.client.splice(1.., lines.client);
    Ok(bells)
}

fn serve_one_wake(mut orders: Orders) -> Result<()> {
    let (request, lines) = (orders.next_fd()?, lines(&mut orders)?);
    for number in 1..=orders.total() {
        hear(&request)?;
        lines[0].word(0).store(number, Release);
    }
    Ok(())
}

fn measure_one_wake(mut orders: Orders) -> Result<Sample> {
    let (request, lines) = (orders.next_fd()?, lines(&mut orders)?);
    Sample::of_rested_calls(&orders, UNTIL_PARKED, |number| {
        ring(&request)?;
        spin_until::<HINTED>(lines[0].word(0), number);
        Ok(())
    })
}

fn ring(eventfd: impl AsFd) -> Result<()> {
    write(eventfd, &1u64.to_ne_bytes()).context("the eventfd could not be rung")?;
    Ok(())
}

fn hear(eventfd: impl AsFd) -> Result<()> {
    read(eventfd, &mut [0u8; 8]).context("the eventfd could not be read")?;
    Ok(())
}
