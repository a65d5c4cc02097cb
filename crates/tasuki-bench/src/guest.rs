//! The network card of a virtual machine: frames between a front end of vhost-user and our back end, beside DPDK's back
//! end with the same front end. The front end is DPDK's virtio-user, as fast as a guest can be; each end has one CPU.
//!
//! `g2h`: the guest sends. Our back end copies each frame into the node's pool, from which another node of the same
//! thread reads it. `h2g`: that node sends, and writes the headers of each frame as DPDK's generator does; our back end
//! copies each frame into the guest's buffers. `-packed`: by packed rings, with IN_ORDER.

mod copies;
mod cpu;
pub mod flat;
mod front;
mod idle;
pub mod load;
mod machine;
mod pktgen;
mod queues;
mod relays;
mod stock;

use std::io::{BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tasuki_net::endpoint::Bridge;
use tasuki_net::endpoint::guest::Guest;
use tasuki_net::endpoint::guest::channel::Channel;
use tasuki_net::endpoint::guest::device::{Device, FROM_GUEST, Refusal, TO_GUEST};
use tasuki_net::switch::Switch;
use tasuki_net::virtq::{Chain, DriverMemory, Queue, Ring};
use tasuki_net::vni::{PeerDescriptor, Vni};
use tasuki_shm::line::{Claims, LINE_LEN};
use tasuki_shm::region::{Pages, Region};
use tasuki_shm::vni::directory::{Directory, Lookup, NodeSet, directory_lines};
use tasuki_shm::vni::node_memory::{NodeMemory, NodeMemoryFds, POOL_PAGES, PeerNodeMemory};
use tasuki_shm::wake::BellSender;

use crate::cpus::{self, Cpus};
use crate::interrupt::Interrupt;
use crate::program::{self, Program};
use crate::relay::guest::Recipe;
use crate::report::{Kind, Row};
use crate::sample::median;
use crate::vni::HugePages;
use crate::workplace::Workplace;

/// Numbers of the guest's node and of the other.
const GUEST: u16 = 0;
const OTHER: u16 = 1;

/// Station addresses of both nodes.
const ADDRESSES: [[u8; 6]; 2] = [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]];
const OF_GUEST: &str = "02:00:00:00:00:01";
const OF_OTHER: &str = "02:00:00:00:00:02";

/// How the frames go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    GuestToHost,
    HostToGuest,
}

/// Frames between a guest and its host.
#[derive(Debug, Clone, Copy)]
struct Case {
    name: &'static str,
    way: Way,
    /// Length of a frame in bytes.
    len: usize,
    is_packed: bool,
}

const fn case(name: &'static str, way: Way, len: usize, is_packed: bool) -> Case {
    Case { name, way, len, is_packed }
}

const CASES: [Case; 18] = [
    case("g2h-64", Way::GuestToHost, 64, false),
    case("g2h-1518", Way::GuestToHost, 1514, false),
    case("h2g-64", Way::HostToGuest, 64, false),
    case("h2g-1518", Way::HostToGuest, 1514, false),
    case("g2h-64-packed", Way::GuestToHost, 64, true),
    case("g2h-1518-packed", Way::GuestToHost, 1514, true),
    case("h2g-64-packed", Way::HostToGuest, 64, true),
    case("h2g-1518-packed", Way::HostToGuest, 1514, true),
    case("g2h-128", Way::GuestToHost, 128, false),
    case("g2h-256", Way::GuestToHost, 256, false),
    case("g2h-512", Way::GuestToHost, 512, false),
    case("g2h-1024", Way::GuestToHost, 1024, false),
    case("g2h-1280", Way::GuestToHost, 1280, false),
    case("h2g-128", Way::HostToGuest, 128, false),
    case("h2g-256", Way::HostToGuest, 256, false),
    case("h2g-512", Way::HostToGuest, 512, false),
    case("h2g-1024", Way::HostToGuest, 1024, false),
    case("h2g-1280", Way::HostToGuest, 1280, false),
];

impl Case {
    /// Returns whether the length is one between the shortest and the longest: for the paper's curves (S3). These have one
    /// round and no bars, and a quick run measures them only if it is asked to.
    fn is_between(&self) -> bool {
        ![64, 1514].contains(&self.len)
    }
}

/// Length in bytes of the headers of a frame: Ethernet, IPv4 and UDP.
const HEADERS: usize = 42;

/// Seconds of a measurement, after the front end has begun.
const SECONDS: u64 = 6;

/// Measures, and makes the rows. `guest` describes the stock guest, for the cases that need one.
pub fn rows(is_quick: bool, only: &[String], guest: Option<&Path>, interrupt: &Interrupt) -> Result<Vec<Row>> {
    let is_wanted = |name: &str| only.is_empty() || only.iter().any(|prefix| name.starts_with(prefix.as_str()));
    let mut rows = Vec::new();
    if CASES.into_iter().any(|case| is_wanted(case.name)) {
        let is_chosen = |case: &Case| is_wanted(case.name) && !(is_quick && only.is_empty() && case.is_between());
        rows.extend(rows_of_front_end(is_quick, is_chosen, interrupt)?);
    }
    if relays::NAMES.into_iter().any(&is_wanted) {
        ensure!(program::is_there("dpdk-testpmd"), "it needs dpdk-testpmd (apt-get install dpdk-dev)");
        rows.extend(relays::rows(is_quick, interrupt)?);
    }
    if queues::NAMES.into_iter().any(&is_wanted) {
        rows.extend(queues::rows(is_quick, interrupt)?);
    }
    if load::names().any(|name| is_wanted(&name)) {
        rows.extend(load::rows(is_quick, is_wanted, interrupt)?);
    }
    if flat::names().any(|name| is_wanted(&name)) {
        rows.extend(flat::rows(is_quick, is_wanted, interrupt)?);
    }
    if stock::names().any(|name| is_wanted(&name)) {
        match guest {
            Some(guest) => rows.extend(stock::rows(is_quick, &Recipe::read(guest)?, is_wanted, interrupt)?),
            None => {
                eprintln!("the cases with a stock guest were left out: `cargo xtask bench guest` makes it, as root")
            }
        }
    }
    let names: Vec<_> = CASES
        .map(|case| case.name)
        .into_iter()
        .chain(relays::NAMES)
        .chain(queues::NAMES)
        .map(str::to_owned)
        .chain(load::names())
        .chain(flat::names())
        .chain(stock::names())
        .collect();
    ensure!(!rows.is_empty(), "nothing was measured; the cases are {}", names.join(", "));
    Ok(rows)
}

/// Measures with DPDK's front end.
fn rows_of_front_end(is_quick: bool, is_wanted: impl Fn(&Case) -> bool, interrupt: &Interrupt) -> Result<Vec<Row>> {
    ensure!(program::is_there("dpdk-testpmd"), "it needs dpdk-testpmd (apt-get install dpdk-dev)");
    let _pages = HugePages::reserve()?;
    let cpus = Cpus::choose()?;
    let rounds = if is_quick { 1 } else { 5 };
    let mut rows = Vec::new();
    for case in CASES.into_iter().filter(is_wanted) {
        let Case { name, len, .. } = case;
        let rounds = if case.is_between() { 1 } else { rounds };
        let (mut ours, mut theirs, mut ceilings) = (Vec::new(), Vec::new(), Vec::new());
        for round in 1..=rounds {
            ours.push(by_us(BackEnd::Bridge, case, cpus, interrupt)?);
            theirs.push(by_dpdk(case, cpus, interrupt)?);
            ceilings.push(by_us(BackEnd::Indices, case, cpus, interrupt)?);
            let [ours, theirs, ceiling] =
                [&ours, &theirs, &ceilings].map(|rates| rates.last().map_or(0.0, |rate| rate / 1e6));
            eprintln!("round {round}/{rounds} · {name} · {ours:.2} Mpps, DPDK {theirs:.2}, ceiling {ceiling:.2}");
        }
        let factor = if len == 64 { 1.0 } else { 1.2 };
        let middle = |rates: &[f64]| median(rates).context("there was no round");
        let theirs = middle(&theirs)?;
        let row = Row::higher(name, "pps", "frames/s", middle(&ours)?);
        let row = row.against("dpdk-vhost", Kind::Peer, theirs).against("ceiling", Kind::Floor, middle(&ceilings)?);
        rows.push(if case.is_between() { row } else { row.bar_at_or(factor * theirs, 0.9, "ceiling")? });
    }
    Ok(rows)
}

/// The middle of the three best one-second rates: the others have the begin or the end of the traffic in them.
fn best(mut rates: Vec<f64>) -> Result<f64> {
    rates.sort_by(f64::total_cmp);
    let best = rates.split_off(rates.len().saturating_sub(3));
    ensure!(best.iter().any(|rate| *rate > 0.0), "no frame came");
    median(&best).context("just counted")
}

/// A program of DPDK that forwards for some time and prints its rates. Dropping it ends it.
struct Testpmd(Program);

impl Testpmd {
    fn start(cpu: usize, vdev: &str, mode: &str, len: usize) -> Result<Self> {
        let mut command = Command::new("dpdk-testpmd");
        let prefix = format!("tasuki{}-{cpu}", std::process::id());
        command.args(["--lcores", &format!("0@{cpu},1@{cpu}"), "--file-prefix", &prefix]);
        command.args([
            "--no-pci",
            "--in-memory",
            "-m",
            "256",
            "--single-file-segments",
            "--vdev",
            vdev,
            "--",
            "--nb-cores=1",
        ]);
        command.arg(format!("--forward-mode={mode}")).arg(format!("--txpkts={len}"));
        command.args(["--stats-period", "1", "--txd=1024", "--rxd=1024", &format!("--eth-peer=0,{OF_OTHER}")]);
        Ok(Testpmd(Program::start(command.stderr(Stdio::null()))?))
    }

    /// Reads the rates at which it receives, for `seconds`.
    fn received(&mut self, seconds: u64, interrupt: &Interrupt) -> Result<Vec<f64>> {
        let out = self.0.output()?;
        let until = Instant::now() + Duration::from_secs(seconds);
        let mut rates = Vec::new();
        for line in BufReader::new(out).lines().map_while(Result::ok) {
            interrupt.check()?;
            let rate: Option<f64> =
                line.split_once("Rx-pps:").and_then(|(_, rest)| rest.split_whitespace().next()?.parse().ok());
            rates.extend(rate);
            if Instant::now() > until {
                break;
            }
        }
        Ok(rates)
    }
}

/// Starts the front end. Without `merges`, its driver reads nothing of the header before a frame that it receives.
fn front(socket: &Path, cpu: usize, case: Case, merges: bool) -> Result<Testpmd> {
    let Case { way, len, is_packed, .. } = case;
    let merges = u8::from(merges);
    let path = socket.display();
    let layout = if is_packed { ",packed_vq=1,in_order=1" } else { "" };
    let vdev =
        format!("net_virtio_user0,path={path},queues=1,queue_size=1024,mac={OF_GUEST},mrg_rxbuf={merges}{layout}");
    Testpmd::start(cpu, &vdev, if way == Way::GuestToHost { "txonly" } else { "rxonly" }, len)
}

/// Measures DPDK's back end.
fn by_dpdk(case: Case, cpus: Cpus, interrupt: &Interrupt) -> Result<f64> {
    let Case { way, len, .. } = case;
    let folder = Workplace::new()?;
    let socket = folder.directory().join("vhost.sock");
    let mode = if way == Way::GuestToHost { "rxonly" } else { "txonly" };
    let mut back = Testpmd::start(cpus.server, &format!("net_vhost0,iface={}", socket.display()), mode, len)?;
    program::await_listener(&socket, "DPDK's back end")?;
    let mut front = front(&socket, cpus.client, case, true)?;
    let receiver = if way == Way::GuestToHost { &mut back } else { &mut front };
    best(receiver.received(SECONDS + 2, interrupt)?)
}

/// A back end of ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BackEnd {
    /// The one of the nodes.
    Bridge,
    /// One that moves the indices of the rings and touches no frame.
    Indices,
}

/// Measures a back end of ours.
fn by_us(end: BackEnd, case: Case, cpus: Cpus, interrupt: &Interrupt) -> Result<f64> {
    let Case { way, len, .. } = case;
    let folder = Workplace::new()?;
    let socket = folder.directory().join("vm.sock");
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let listener = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::bind(&listener, &SocketAddrUnix::new(&socket)?)?;
    rustix::net::listen(&listener, 1)?;
    let (count, is_over) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let back = scope.spawn(|| {
            cpus::pin(cpus.server)?;
            match end {
                BackEnd::Bridge => serve(listener, way, len, (&count, &is_over)),
                BackEnd::Indices => move_indices(&listener, way, len, (&count, &is_over)),
            }
        });
        let rates = (|| {
            let mut front = front(&socket, cpus.client, case, end == BackEnd::Bridge)?;
            if way == Way::HostToGuest {
                return front.received(SECONDS + 2, interrupt);
            }
            let mut rates = Vec::new();
            let (mut before, mut since) = (0, Instant::now());
            for _ in 0..SECONDS + 2 {
                std::thread::sleep(Duration::from_secs(1));
                interrupt.check()?;
                let now = count.load(Ordering::Relaxed);
                rates.push((now - before) as f64 / since.elapsed().as_secs_f64());
                (before, since) = (now, Instant::now());
            }
            Ok(rates)
        })();
        is_over.store(true, Ordering::Relaxed);
        back.join().map_err(|_| anyhow::anyhow!("the back end panicked"))??;
        best(rates?)
    })
}

/// Number of chains that the ceiling moves at a time: a quarter of the ring. With a burst of 32 both ends met in the same
/// lines, and the bridge was faster than that.
const MOVED: u16 = 256;

/// Takes each chain of the guest's ring and completes it, until it is over.
fn move_indices(listener: &OwnedFd, way: Way, len: usize, (count, is_over): (&AtomicU64, &AtomicBool)) -> Result<()> {
    let patience = Timespec::try_from(program::PATIENCE)?;
    let came = rustix::event::poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&patience))?;
    ensure!(came > 0, "DPDK's front end does not connect");
    let socket = rustix::net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
    let (mut channel, mut device, mut chain) = (Channel::new(socket), Device::new(0, None), Chain::default());
    let (at, written) = match way {
        Way::GuestToHost => (FROM_GUEST, 0),
        Way::HostToGuest => (TO_GUEST, u32::try_from(12 + len)?),
    };
    let mut looks = 0_u32;
    while !is_over.load(Ordering::Relaxed) {
        looks = looks.wrapping_add(1);
        let Device { memory, queues, .. } = &mut device;
        let Some(queue) = queues[at].as_mut().filter(|_| !looks.is_multiple_of(1 << 14)) else {
            if let Err(refusal) = channel.hear(&mut device, false).and_then(|_| channel.answer()) {
                ensure!(refusal == Refusal::Left, "the front end was sent away: {refusal}");
                return Ok(());
            }
            continue;
        };
        let moved = match queue {
            Queue::Split(ring) => move_chains(ring, memory, &mut chain, written)?,
            Queue::Packed(ring) => move_chains(ring, memory, &mut chain, written)?,
        };
        if moved {
            queue.show();
            count.fetch_add(MOVED.into(), Ordering::Relaxed);
        }
    }
    Ok(())
}

/// Takes and completes chains, if there are enough. Returns whether there were.
fn move_chains(ring: &mut impl Ring, memory: &DriverMemory, chain: &mut Chain, written: u32) -> Result<bool> {
    if !ring.look()? || ring.address_ahead(MOVED - 1).is_none() {
        return Ok(false);
    }
    for _ in 0..MOVED {
        ensure!(ring.take(memory, chain)?, "the front end takes chains back");
        // The descriptor comes from the other CPU meanwhile, as for the bridge.
        std::hint::black_box(ring.address_ahead(8));
        ring.complete(chain.head, written);
    }
    Ok(true)
}

/// Plays the back end and the other node, until it is over.
fn serve(listener: OwnedFd, way: Way, len: usize, (count, is_over): (&AtomicU64, &AtomicBool)) -> Result<()> {
    let memories = [GUEST, OTHER].map(|number| NodeMemoryFds::create(&format!("bench-{number}"), POOL_PAGES));
    let [ours, theirs] = memories;
    let (ours, theirs) = (ours?, theirs?);
    let bells = (tasuki_shm::wake::bell_pipe()?, tasuki_shm::wake::bell_pipe()?);
    let peer = |number, memory: &NodeMemoryFds, bell: &OwnedFd| -> Result<PeerDescriptor> {
        let (node_memory, bell) = (PeerNodeMemory::map(&memory.to_read()?)?, BellSender::from_peer(bell.try_clone()?));
        Ok(PeerDescriptor { number, node_memory, bell, own: Default::default() })
    };
    let (to_guest, to_other) = (peer(GUEST, &ours, &bells.0.1)?, peer(OTHER, &theirs, &bells.1.1)?);
    let mut vni = Vni::exact(GUEST, NodeMemory::adopt(ours)?, bells.0.0);
    let mut other = Vni::new(OTHER, NodeMemory::adopt(theirs)?, bells.1.0);
    vni.add(to_other)?;
    other.add(to_guest)?;
    vni.settle();
    other.settle();
    let lines = directory_lines(64);
    let memory = Region::create("bench-directory", lines * LINE_LEN, Pages::Small)?;
    let mut directory = Directory::new(memory.span(0, lines)?);
    let all = [GUEST, OTHER].into_iter().fold(NodeSet::default(), |mut all, node| {
        all.insert(node);
        all
    });
    directory.set_nodes(&all);
    (GUEST..).zip(ADDRESSES).try_for_each(|(node, address)| directory.add(address, node))?;
    let switch = Switch::new(GUEST, Lookup::new(Claims::of(memory.span(0, lines)?)));
    let mut bridge = Bridge::new(Box::new(Guest::new(listener)?), vni, switch);
    let frame = [&ADDRESSES[0][..], &ADDRESSES[1], &[8, 0], &[0x45; HEADERS - 14]].concat();
    let mut looks = 0_u32;
    while !is_over.load(Ordering::Relaxed) {
        if way == Way::HostToGuest && bridge.endpoint.is_running() {
            for _ in 0..32 {
                let Ok(room) = other.draft(GUEST, len) else { break };
                room[..frame.len()].copy_from_slice(&frame);
                other.post(GUEST, len, false);
            }
            other.flush();
        }
        bridge.turn();
        if way == Way::GuestToHost {
            let mut bytes = 0;
            other.receive(|incoming| bytes += incoming.len());
            std::hint::black_box(bytes);
            count.store(bridge.taken, Ordering::Relaxed);
        }
        looks = looks.wrapping_add(1);
        if !bridge.endpoint.is_running() {
            bridge.rest(Duration::from_millis(1));
        } else if looks.is_multiple_of(1 << 14) {
            bridge.tick(Instant::now());
            other.tick(Instant::now());
            other.wake();
        }
    }
    Ok(())
}
