//! Serves the model of a network card as a vfio-user device in a process of its own.

use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, Parser, Subcommand, ValueEnum};
use tasuki_sim::journal::Class;
use tasuki_sim::model::Model;
use tasuki_sim::served::Served;
use tasuki_sim::vfio_user::Server;
use tasuki_sim::virtio_net::feature;
use tasuki_sim::wire::{Counts, Datagram, Nowhere, Recorded, Source, SourceOptions, Tap, Wire};
use tasuki_sim::{e1000e, virtio_net};

/// Models of devices that report every rule a driver breaks.
#[derive(Debug, Parser)]
#[command(name = "tasuki", bin_name = "tasuki", version)]
struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Models of devices.
    #[command(subcommand)]
    Sim(SimCommand),
}

#[derive(Debug, Subcommand)]
enum SimCommand {
    /// Serve a network card by vfio-user to one driver after the other.
    Nic(NicArguments),
}

#[derive(Debug, Args)]
struct NicArguments {
    #[command(flatten)]
    place: PlaceArguments,
    /// The other end of the card's cable.
    #[command(flatten)]
    wire: WireArguments,
    #[command(flatten)]
    card: CardArguments,
    /// Write every frame that the card sends or receives to FILE.
    #[arg(long, value_name = "FILE")]
    pcap: Option<PathBuf>,
}

#[derive(Debug, Args)]
struct CardArguments {
    /// Card to model.
    #[arg(long, value_enum, default_value_t = Card::E1000e)]
    card: Card,
    /// Milliseconds from a reset until the link of an 82574L is up; 2200 by default.
    #[arg(long, value_name = "MS")]
    link_up: Option<u64>,
    /// Features that a virtio network device does not offer.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "FEATURES")]
    without: Vec<Feature>,
    /// Let a virtio network device drop frames for which it has no buffer; by default they wait at the other end of
    /// its wire.
    #[arg(long)]
    lossy: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Card {
    /// The Intel 82574L.
    #[value(name = "82574l")]
    E1000e,
    /// A virtio network device (virtio 1.2).
    VirtioNet,
}

impl Card {
    fn name(self) -> &'static str {
        match self {
            Card::E1000e => "an 82574L",
            Card::VirtioNet => "a virtio network device",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Feature {
    /// The control queue, and every feature that depends on it.
    CtrlVq,
    /// Event indices.
    EventIdx,
    /// Several queue pairs with automatic steering.
    Mq,
    /// Several queue pairs with a hash and an indirection table.
    Rss,
    /// The reset of single queues.
    RingReset,
}

impl Feature {
    fn bit(self) -> u64 {
        match self {
            Feature::CtrlVq => feature::CTRL_VQ,
            Feature::EventIdx => feature::EVENT_IDX,
            Feature::Mq => feature::MQ,
            Feature::Rss => feature::RSS,
            Feature::RingReset => feature::RING_RESET,
        }
    }
}

impl CardArguments {
    fn check(&self) -> Result<()> {
        match self.card {
            Card::E1000e => ensure!(
                self.without.is_empty() && !self.lossy,
                "--without and --lossy are for a virtio network device; add --card virtio-net"
            ),
            Card::VirtioNet => {
                ensure!(
                    self.link_up.is_none(),
                    "the link of a virtio network device is up at once; leave --link-up out"
                );
            }
        }
        Ok(())
    }

    fn e1000e(&self) -> e1000e::Device {
        let link_up_ns = self.link_up.unwrap_or(2200).saturating_mul(1_000_000);
        e1000e::Device::new(e1000e::Options { link_up_ns, ..Default::default() })
    }

    fn virtio_net(&self) -> virtio_net::Device {
        let features = self.without.iter().fold(feature::ALL, |features, without| features & !without.bit());
        virtio_net::Device::new(virtio_net::Options { features, lossy: self.lossy, ..Default::default() })
    }
}

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct PlaceArguments {
    /// Socket where drivers connect, one after the other. The path must be free.
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Serve on the socket that is standard input: a listening socket accepts drivers, a connected one has the
    /// driver at its other end. With a connected socket, the model ends when its driver leaves.
    #[arg(long)]
    stdin: bool,
}

#[derive(Debug, Args)]
struct WireArguments {
    /// Send COUNT numbered frames and check the frames that come back. The model ends when the driver leaves.
    #[arg(long, value_name = "COUNT")]
    source: Option<u64>,
    /// Frames per second of the source; the line rate of 1 Gb/s by default.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..), requires = "source", conflicts_with_all = ["dgram", "tap"])]
    rate: Option<u64>,
    /// Bytes per frame of the source, frame check sequence included.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(64..=16384))]
    #[arg(requires = "source", conflicts_with_all = ["dgram", "tap"])]
    size: u32,
    /// Plug the card into a pair of datagram sockets, our end and the peer's, one frame per datagram, as QEMU's
    /// `-netdev dgram` does.
    #[arg(long, num_args = 2, value_names = ["OURS", "THEIRS"], conflicts_with = "source")]
    dgram: Option<Vec<PathBuf>>,
    /// Plug the card into a TAP interface of this machine, and create the interface if it does not exist. Needs the
    /// right to create one.
    #[arg(long, value_name = "NAME", conflicts_with_all = ["source", "dgram"])]
    tap: Option<String>,
}

/// Checks that a socket can be created at `path`.
fn free_place(path: &Path) -> Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    ensure!(folder.is_dir(), "the folder of {} does not exist; create it, or choose another path", path.display());
    match path.symlink_metadata() {
        Ok(meta) if meta.file_type().is_socket() => {
            bail!("a socket is at {} already; stop its server, or remove the file if there is none", path.display())
        }
        Ok(_) => bail!("{} exists and is not a socket; choose another path", path.display()),
        Err(_) => Ok(()),
    }
}

/// Returns the vfio-user server for the socket that the arguments name.
fn server(place: &PlaceArguments, card: Card) -> Result<Server> {
    match &place.socket {
        Some(path) => {
            free_place(path)?;
            let server = Server::bind(path).with_context(|| format!("{} cannot be served at", path.display()))?;
            println!("{} at {}", card.name(), path.display());
            Ok(server)
        }
        None => {
            let connection = std::io::stdin().as_fd().try_clone_to_owned()?;
            let is_socket = rustix::net::sockopt::socket_type(&connection).is_ok();
            ensure!(is_socket, "--stdin: standard input is not a socket; --socket PATH makes one");
            let listens = rustix::net::sockopt::socket_acceptconn(&connection)?;
            Ok(if listens { Server::on(connection)? } else { Server::over(connection)? })
        }
    }
}

/// Time from the moment the card can receive until the wire begins to send: the driver still
/// has to apply the negotiated settings.
const SETTLED: Duration = Duration::from_millis(20);

/// Calls that control a wire while the card is served.
struct Course<W> {
    /// Called once, soon after the first driver enables reception.
    begin: fn(&mut W),
    /// Called after SIGUSR1, which asks the wire to send no more.
    finish: fn(&mut W),
    /// Returns whether every frame sent has come back. Asked once the wire sends no more.
    is_back: fn(&mut W) -> bool,
    /// Returns whether the model may end once the driver has left.
    is_done: fn(&mut W) -> bool,
}

impl<W> Course<W> {
    /// Returns calls for a wire that is not controlled: each does nothing or returns false.
    fn endless() -> Self {
        Course { begin: |_| (), finish: |_| (), is_back: |_| false, is_done: |_| false }
    }
}

/// Serves the card that the arguments name. Returns the wire.
fn serve<W: Wire>(arguments: &NicArguments, wire: W, course: &Course<W>) -> Result<W> {
    match arguments.card.card {
        Card::E1000e => serve_card(arguments, arguments.card.e1000e(), wire, course),
        Card::VirtioNet => serve_card(arguments, arguments.card.virtio_net(), wire, course),
    }
}

/// Serves until a signal stops it or, once the wire is done, until the driver has left.
fn serve_card<W: Wire, M: Model>(arguments: &NicArguments, card: M, wire: W, course: &Course<W>) -> Result<W> {
    let (stop, finish) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    signal_hook::flag::register(signal_hook::consts::SIGUSR1, Arc::clone(&finish))
        .context("the kernel took no signal handler")?;
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&stop)).context("the kernel took no signal handler")?;
    }
    // Pulls out the cable, and plugs it in again.
    let cable = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(signal_hook::consts::SIGUSR2, Arc::clone(&cable))
        .context("the kernel took no signal handler")?;
    let mut is_plugged = true;
    let mut server = server(&arguments.place, arguments.card.card)?;
    let mut served = Served::new(card, wire);
    let (mut had_driver, mut has_begun, mut said_back) = (server.has_client(), false, false);
    let mut receives_since = None;
    while !stop.load(Relaxed) {
        let mut rounds = 0_u32;
        // `serve` returns here every 10,000 rounds, for checks that are not needed in each round.
        served.serve(&mut server, |served| {
            if !has_begun && served.card().receives() {
                has_begun = receives_since.get_or_insert_with(Instant::now).elapsed() > SETTLED;
                if has_begun {
                    (course.begin)(served.wire());
                }
            }
            rounds += 1;
            rounds < 10_000 && !stop.load(Relaxed)
        })?;
        if cable.swap(false, Relaxed) {
            is_plugged = !is_plugged;
            served.card().set_partner(is_plugged);
        }
        if finish.load(Relaxed) {
            (course.finish)(served.wire());
            if !said_back && (course.is_back)(served.wire()) {
                said_back = true;
                println!("all came back");
            }
        }
        had_driver |= server.has_client();
        let left = had_driver && !server.has_client();
        if left && (!server.listens() || (course.is_done)(served.wire())) {
            break;
        }
    }
    // `Class::COLD` is left out: a driver that starts a card may reset it and bring its link up.
    for offence in served.card().journal().broken(&Class::ALWAYS) {
        println!("{offence}");
    }
    for (why, count) in served.card().dropped() {
        if count > 0 {
            println!("the card dropped {count} frames: {why}");
        }
    }
    let stalls = served.stalls();
    if stalls.count > 0 {
        let ms = |nanos: u64| nanos as f64 / 1e6;
        println!(
            "the machine held the model up {} times, {:.1} ms in all, {:.1} ms at most; card and wire stood still meanwhile",
            stalls.count,
            ms(stalls.sum),
            ms(stalls.longest)
        );
    }
    Ok(served.into_wire())
}

/// Serves as [`serve`] does, and records every frame to a file if `--pcap` names one.
fn serve_recorded<W: Wire>(
    arguments: &NicArguments,
    wire: W,
    plain: &Course<W>,
    recorded: &Course<Recorded<W>>,
) -> Result<W> {
    let Some(path) = &arguments.pcap else { return serve(arguments, wire, plain) };
    let wire = Recorded::create(wire, path).with_context(|| format!("{} cannot be written", path.display()))?;
    let wire = serve(arguments, wire, recorded)?;
    wire.into_wire().with_context(|| format!("{} cannot be written to its end", path.display()))
}

fn nic(arguments: &NicArguments) -> Result<()> {
    arguments.card.check()?;
    let WireArguments { source, rate, size, dgram, tap } = &arguments.wire;
    if let Some(count) = *source {
        let rate = rate.unwrap_or_else(|| SourceOptions::line_rate(1_000_000_000, *size));
        let options = SourceOptions {
            to: [0xff; 6],
            from: [0x02, 0, 0, 0, 0, 0x51],
            size: *size,
            rate: Some(rate),
            count,
            honours_pause: true,
        };
        let mut source = Source::new(options);
        // Frames sent before a driver receives would count as lost.
        source.pause(true);
        let source = serve_recorded(
            arguments,
            source,
            &Course {
                begin: |source| source.pause(false),
                finish: Source::finish,
                is_back: |source| source.counts().lost() == 0,
                is_done: |source| source.is_done(),
            },
            &Course {
                begin: |recorded| recorded.wire().pause(false),
                finish: |recorded| recorded.wire().finish(),
                is_back: |recorded| recorded.wire().counts().lost() == 0,
                is_done: |recorded| recorded.wire().is_done(),
            },
        )?;
        report(&source.counts());
    } else if let Some(paths) = dgram {
        let [ours, theirs] = &paths[..] else { bail!("--dgram takes two paths") };
        let wire = Datagram::bind(ours, theirs).with_context(|| format!("{} cannot be bound", ours.display()))?;
        serve_recorded(arguments, wire, &Course::endless(), &Course::endless())?;
    } else if let Some(name) = tap {
        serve_recorded(arguments, Tap::open(name)?, &Course::endless(), &Course::endless())?;
    } else {
        let wire = serve_recorded(arguments, Nowhere::default(), &Course::endless(), &Course::endless())?;
        println!("the card sent {} frames to nowhere", wire.sent);
    }
    Ok(())
}

fn report(counts: &Counts) {
    let Counts { sent, received, duplicated, reordered, foreign, damaged, longest_gap, longest_trip, slipped, pauses } =
        *counts;
    if received == 0 {
        // A driver that only receives sends nothing back, so nothing is lost here; the driver itself counts the
        // frames it missed.
        println!("sent {sent}, and none came back: the driver sent nothing on that it took in");
    } else {
        println!("sent {sent}, came back {received}, lost {}", counts.lost());
    }
    println!(
        "twice {duplicated}, out of order {reordered}, damaged {damaged}, from others {foreign}, not sent in time {slipped}"
    );
    println!("longest gap {longest_gap} ns, longest trip {longest_trip} ns, asked to pause {pauses} times");
}

fn main() -> ExitCode {
    let What::Sim(SimCommand::Nic(arguments)) = Arguments::parse().what;
    match nic(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("tasuki: {error:#}");
            ExitCode::FAILURE
        }
    }
}
