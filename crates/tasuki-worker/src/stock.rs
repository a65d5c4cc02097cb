//! The stock worker's command line. It has three uses: the process that drives a node's ports, which tasukid starts;
//! the opener, which takes a card out of its box for that process; and one NIC driven by hand, for `tasuki nic`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::{Args, Parser, Subcommand};
use tasuki_net::nic::bus::pci::{BarKind, Header};
use tasuki_net::nic::{Filter, Link, Mac, Nic, NicError};
use tasuki_shm::arena::Arena;

use crate::device::{self, Device, Job, Setup};
use crate::open::{self, How};
use crate::run::{self, Orders, Work};
use crate::{finish, node, numbered, work};

/// Time for which the probe waits for the link: negotiation takes two to three seconds.
const NEGOTIATION: Duration = Duration::from_secs(4);

/// Drives a node's ports.
#[derive(Debug, Parser)]
#[command(name = "tasuki", bin_name = "tasuki", version)]
struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Probe or drive one network card.
    #[command(subcommand)]
    Nic(NicCommand),
    /// Drive a node's NICs for the daemon, whose socket is standard input. tasukid starts it.
    #[command(hide = true)]
    Worker,
    /// Start a card for the daemon, whose socket is standard input, and end. tasukid starts it.
    #[command(hide = true)]
    Open(OpenArguments),
}

#[derive(Debug, Args)]
struct OpenArguments {
    /// Card: vfio:0000:03:00.0 (a PCI address), or vfio-user:PATH (a socket).
    device: Device,
    /// Descriptors in each ring; default: 256, or as many as the card can have.
    #[arg(long)]
    ring: Option<u16>,
    /// Maximum payload of a frame in bytes.
    #[arg(long, default_value_t = 1500)]
    mtu: u16,
    /// Address at which the card sees its memory; a multiple of the page size.
    #[arg(long, value_parser = address, default_value_t = device::MEMORY_AT.0)]
    iova: u64,
    /// Receive every frame, not only those for the card.
    #[arg(long)]
    promiscuous: bool,
    /// Receive every multicast frame.
    #[arg(long)]
    all_multicast: bool,
    /// Keep the memory clean of handled frames, for an owner that must not read them.
    #[arg(long)]
    scrub: bool,
}

/// Parses a number, in hexadecimal if it begins with 0x.
fn address(text: &str) -> Result<u64, String> {
    let number = match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    };
    number.map_err(|_| format!("{text:?} is not an address; write one as 0x100000000"))
}

#[derive(Debug, Subcommand)]
enum NicCommand {
    /// Show a card's name, driver, BARs, address and link. Resets the card.
    Probe {
        /// Card: vfio:0000:03:00.0 (a PCI address), vfio-user:PATH (a socket), or sim.
        device: Device,
    },
    /// Drive a card until the count is reached or a signal interrupts it, then print the counts.
    Run(RunArguments),
}

#[derive(Debug, Args)]
struct RunArguments {
    /// Card: vfio:0000:03:00.0 (a PCI address), vfio-user:PATH (a socket), or sim.
    device: Device,
    #[command(flatten)]
    work: WorkArguments,
    /// End after this many frames.
    #[arg(long)]
    count: Option<u64>,
    /// Send this many frames per second; default: as many as the card takes.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..), conflicts_with_all = ["sink", "echo"])]
    rate: Option<u64>,
    /// Length of a sent frame in bytes, without check sequence.
    #[arg(long, default_value_t = numbered::SHORTEST, value_parser = sizes(), conflicts_with_all = ["sink", "echo"])]
    size: u16,
    /// Destination of sent frames: an address such as 52:54:00:12:34:56.
    #[arg(long, default_value = "ff:ff:ff:ff:ff:ff", value_parser = mac, conflicts_with_all = ["sink", "echo"])]
    to: Mac,
    /// Write received frames to FILE.
    #[arg(long, value_name = "FILE")]
    pcap: Option<PathBuf>,
    /// Never sleep: poll the card all the time.
    #[arg(long)]
    poll: bool,
    /// Receive every frame, not only those for the card.
    #[arg(long)]
    promiscuous: bool,
    /// Descriptors in each ring; default: 256, or as many as the card can have.
    #[arg(long)]
    ring: Option<u16>,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct WorkArguments {
    /// Receive frames and count them.
    #[arg(long)]
    sink: bool,
    /// Send numbered frames.
    #[arg(long)]
    source: bool,
    /// Send every frame back to its sender.
    #[arg(long)]
    echo: bool,
}

/// Returns a parser for frame lengths in bytes, without check sequence.
fn sizes() -> clap::builder::RangedI64ValueParser<u16> {
    clap::value_parser!(u16).range(i64::from(numbered::SHORTEST)..=1514)
}

fn mac(text: &str) -> Result<Mac, String> {
    let byte = |digits: &str| {
        let is_one = (1..=2).contains(&digits.len()) && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
        is_one.then(|| u8::from_str_radix(digits, 16).ok())?
    };
    let bytes: Option<Vec<u8>> = text.split(':').map(byte).collect();
    let bytes = bytes.and_then(|bytes| <[u8; 6]>::try_from(bytes).ok());
    bytes.map(Mac).ok_or_else(|| format!("{text:?} is not an Ethernet address; write six bytes, as 52:54:00:12:34:56"))
}

struct Probe;

impl Job for Probe {
    fn with<N: Nic>(self, mut nic: N, _arena: Arena) -> Result<()> {
        println!("address   {}", nic.mac());
        let until = Instant::now() + NEGOTIATION;
        while nic.link()? == Link::Down && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(10));
        }
        match nic.link()? {
            Link::Down => println!("link      down"),
            Link::Up { speed, full_duplex } => {
                let duplex = if full_duplex { "full" } else { "half" };
                println!("link      up, {speed} Mb/s, {duplex} duplex");
            }
        }
        // The card must not go on using memory that is about to be gone.
        nic.park().map_err(NicError::from)?;
        Ok(())
    }
}

fn show(header: &Header, bars: &[u8]) {
    let driver = device::driver_of(header.id).map_or("no driver here", |(_, name)| name);
    println!("card      {} ({driver}), class {:06x}", header.id, header.class);
    for &index in bars {
        let width = if header.bars[usize::from(index)] == BarKind::Memory64 { 64 } else { 32 };
        println!("BAR {index}     memory, {width}-bit");
    }
}

struct Drive {
    orders: Orders,
    stop: Arc<AtomicBool>,
}

impl Job for Drive {
    fn with<N: Nic>(self, mut nic: N, arena: Arena) -> Result<()> {
        let done = run::run(&mut nic, arena, &self.orders, &self.stop);
        // The card must not go on using memory that is about to be gone.
        let parked = nic.park();
        done.and(parked.map(drop).map_err(|failed| failed.error.into()))
    }
}

fn drive(arguments: RunArguments) -> Result<()> {
    let RunArguments { device, work, count, rate, size, to, pcap, poll, promiscuous, ring } = arguments;
    let work = match work {
        WorkArguments { sink: true, .. } => Work::Sink,
        WorkArguments { source: true, .. } => Work::Source,
        WorkArguments { .. } => Work::Echo,
    };
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&stop)).context("the kernel took no signal handler")?;
    }
    let setup = Setup { ring, filter: Filter { promiscuous, ..Filter::default() } };
    let orders = Orders { work, count, rate, size, to, pcap, poll };
    device::open(&device, &setup, |_, _| {}, Drive { orders, stop })
}

/// Runs the program `tasuki-worker`.
pub fn run() -> ExitCode {
    let done = match Arguments::parse().what {
        What::Nic(NicCommand::Probe { device }) => device::open(&device, &Setup::default(), show, Probe),
        What::Nic(NicCommand::Run(arguments)) => drive(arguments),
        What::Worker => node::run::<work::Job>(),
        What::Open(OpenArguments { device, ring, mtu, iova, promiscuous, all_multicast, scrub }) => {
            open::open(&How { device, ring, mtu, iova, promiscuous, all_multicast, scrub })
        }
    };
    finish(done)
}
