//! Two network namespaces, with `iperf3` between them over a VNI and over veth.

use std::os::fd::{AsFd, OwnedFd};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use tasuki_net::endpoint::{Bridge, Endpoint as _, tap};
use tasuki_net::port::Armed;
use tasuki_net::switch::Switch;
use tasuki_shm::line::{LINE_LEN, Line};
use tasuki_shm::region::{Pages, PeerRegion, Region};
use tasuki_shm::vni::directory::{Directory, Lookup, NodeSet, directory_lines};
use tasuki_tap::device::Before;
use tasuki_tap::namespace::Namespace;
use tasuki_tap::shortcut::Shortcut;
use tasuki_tap::{Settings, Tap};

use super::floor;
use super::nodes::{Kept, join};
use super::receives::{self, Received};
use crate::cpus::{self, Cpus};
use crate::interrupt::Interrupt;
use crate::iperf::{Said, Sending, Server};
use crate::orders::Fds;
use crate::program::{self, Program, ip};

/// Number of fruitless looks before a node sleeps.
pub const IDLE_LOOKS: u32 = 8;

/// Interval between two ticks of a node, for its periodic work.
pub const TICK: Duration = Duration::from_millis(250);

/// Traffic that `iperf3` sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Traffic {
    /// One connection.
    Tcp,
    /// Datagrams of 1,400 bytes, at full speed.
    Udp,
}

/// Rates that `iperf3` received, in bits a second, one value for each round.
#[derive(Debug, Default)]
pub struct Rates {
    /// Over a VNI, as `tasukid` connects namespaces.
    pub vni: Vec<f64>,
    /// Over a VNI, by the nodes' workers, through pools and TAPs.
    pub by_workers: Vec<f64>,
    /// By two processes that do what workers must, and nothing else.
    pub floor: Vec<f64>,
    /// Over veth.
    pub veth: Vec<f64>,
}

/// How two namespaces are connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Shortcut,
    Workers,
    Floor,
}

/// Runs `iperf3` for `seconds`, over a VNI, over the floor of its workers and over veth in turn. Where that is
/// impossible, prints the reason and returns `None`.
pub fn compare(traffic: Traffic, seconds: u32, rounds: u32, interrupt: &Interrupt) -> Result<Option<Rates>> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("{} was left out: it makes network namespaces, which only root may (sudo)", traffic.case());
        return Ok(None);
    }
    if !program::is_there("iperf3") {
        eprintln!("{} was left out: it needs the program iperf3 (apt-get install iperf3)", traffic.case());
        return Ok(None);
    }
    let cpus = Cpus::choose()?;
    let cpus = [cpus.client, cpus.server];
    let mut rates = Rates::default();
    for round in 1..=rounds {
        // Ours and its floor are neighbours, in an order that changes: the machine's speed changes, too.
        let by_processes = [(Way::Floor, &mut rates.floor), (Way::Workers, &mut rates.by_workers)];
        let (first, second) = by_processes.into();
        for (way, rates) in if round % 2 == 0 { [second, first] } else { [first, second] } {
            rates.push(Namespaces::over_vni(cpus, way)?.measure(traffic, seconds, cpus, interrupt)?);
        }
        rates.vni.push(Namespaces::over_vni(cpus, Way::Shortcut)?.measure(traffic, seconds, cpus, interrupt)?);
        rates.veth.push(Namespaces::over_veth(1500)?.measure(traffic, seconds, cpus, interrupt)?);
        let giga = |rates: &[f64]| rates.last().map_or(0.0, |rate| rate / 1e9);
        eprintln!(
            "round {round}/{rounds} · {} · {:.1} Gb/s, by workers {:.2}, their floor {:.2}, veth {:.1}",
            traffic.case(),
            giga(&rates.vni),
            giga(&rates.by_workers),
            giga(&rates.floor),
            giga(&rates.veth)
        );
    }
    Ok(Some(rates))
}

/// Measures ten receives of 15,000 bytes, as the paper did, over a VNI and over veth in turn. Where that is impossible,
/// prints the reason and returns `None`.
pub fn compare_receives(traffic: Traffic, rounds: u32, interrupt: &Interrupt) -> Result<Option<[Received; 2]>> {
    /// Number of trials of a round.
    const TRIALS: usize = 100;
    if !rustix::process::geteuid().is_root() {
        eprintln!("{} was left out: it makes network namespaces, which only root may (sudo)", traffic.receives());
        return Ok(None);
    }
    let cpus = Cpus::choose()?;
    let cpus = [cpus.client, cpus.server];
    let mut both = [Received::default(), Received::default()];
    for _ in 0..rounds {
        for (number, received) in both.iter_mut().enumerate() {
            let namespaces = match number {
                0 => Namespaces::over_vni(cpus, Way::Shortcut)?,
                _ => Namespaces::over_veth(1500)?,
            };
            let more = receives::measure(&namespaces, traffic, TRIALS, cpus, interrupt)?;
            received.waiting.extend(more.waiting);
            received.arrived.extend(more.arrived);
            received.lost += more.lost;
        }
    }
    Ok(Some(both))
}

impl Traffic {
    /// Returns the name of the case of receives that are timed as the paper did.
    pub fn receives(self) -> &'static str {
        match self {
            Traffic::Tcp => "tcp-recv",
            Traffic::Udp => "udp-recv",
        }
    }

    /// Returns the name of the case.
    pub fn case(self) -> &'static str {
        match self {
            Traffic::Tcp => "tcp-netns",
            Traffic::Udp => "udp-netns",
        }
    }
}

/// Two connected namespaces, and the resources of their connection.
pub struct Namespaces {
    names: [String; 2],
    nodes: Vec<Program>,
    /// Kept for the life of the namespaces.
    shortcut: Option<Shortcut>,
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        self.nodes.clear();
        for name in &self.names {
            let _ = Command::new("ip").args(["netns", "del", name]).stderr(Stdio::null()).status();
        }
    }
}

impl Namespaces {
    /// Addresses of the two (for documentation, RFC 5737).
    pub const ADDRESSES: [[u8; 4]; 2] = [[192, 0, 2, 1], [192, 0, 2, 2]];

    /// Returns the names of the two.
    pub fn names(&self) -> &[String; 2] {
        &self.names
    }

    /// Makes two namespaces that nothing connects.
    pub fn new() -> Result<Self> {
        let names = ["a", "b"].map(|end| format!("tasuki-bench-{}-{end}", std::process::id()));
        for name in &names {
            ip(&format!("netns add {name}"))?;
        }
        Ok(Namespaces { names, nodes: Vec::new(), shortcut: None })
    }

    /// Makes two namespaces with a veth pair between them that takes IP packets of up to `mtu` bytes.
    pub fn over_veth(mtu: u32) -> Result<Self> {
        let this = Self::new()?;
        let [a, b] = &this.names;
        ip(&format!("link add bench0 netns {a} type veth peer name bench0 netns {b}"))?;
        for (name, host) in this.names.iter().zip(1..) {
            ip(&format!("-n {name} addr add 192.0.2.{host}/24 dev bench0"))?;
            ip(&format!("-n {name} link set bench0 mtu {mtu} up"))?;
        }
        Ok(this)
    }

    fn over_vni(cpus: [usize; 2], way: Way) -> Result<Self> {
        let mut this = Self::new()?;
        this.shortcut = (way == Way::Shortcut).then(Shortcut::new).transpose()?;
        let lines = directory_lines(8);
        let memory = Region::create("bench-directory", lines * LINE_LEN, Pages::Small)?;
        let mut directory = Directory::new(memory.span::<Line>(0, lines)?);
        let mut nodes = NodeSet::default();
        let mut kept = Vec::new();
        for (number, name) in (0_u16..).zip(&this.names) {
            let mac = [2, 0, 0, 0, 0x7a, number.to_le_bytes()[0] + 1];
            let address = format!("192.0.2.{}/24", number + 1).parse().map_err(anyhow::Error::msg)?;
            let place = Namespace::named(name);
            let device = match &mut this.shortcut {
                Some(shortcut) => shortcut.connect(&place, "bench0", &Settings::of(Some(address)), mac)?.1,
                None => {
                    let tap = Tap::create(&place, "bench0", &Settings::of(Some(address)), Before::Offload)?;
                    tasuki_tap::set_mac(&tap.device, mac)?;
                    tap.device
                }
            };
            directory.add(mac, number)?;
            nodes.insert(number);
            kept.push((Kept::new(number)?, device));
        }
        directory.set_nodes(&nodes);
        let shared = floor::Shared::new()?;
        for (number, cpu) in (0..).zip(cpus) {
            let ((us, tap), (other, _)) = (&kept[usize::from(number)], &kept[usize::from(1 - number)]);
            let mut fds = us.fds([other])?;
            let role = match way {
                Way::Floor => {
                    fds.extend(shared.fds()?);
                    "floor-node"
                }
                Way::Shortcut | Way::Workers => {
                    fds.push(tasuki_shm::region::read_only(memory.fd())?);
                    "tap-node"
                }
            };
            fds.push(tap.try_clone()?);
            this.nodes.push(start_node(role, number, cpu, &fds)?);
        }
        Ok(this)
    }

    fn measure(&self, traffic: Traffic, seconds: u32, cpus: [usize; 2], interrupt: &Interrupt) -> Result<f64> {
        let _server = Server::start(&mut self.iperf(1, cpus[1]), interrupt)?;
        let mut command = self.iperf(0, cpus[0]);
        command.args(["--time", &seconds.to_string()]).args(traffic.words());
        traffic.received(&Sending::begin(&mut command, "192.0.2.2")?.end(interrupt)?)
    }

    /// Returns the command that runs `iperf3` in one of the namespaces, on a CPU.
    pub fn iperf(&self, end: usize, cpu: usize) -> Command {
        let mut command = Command::new("taskset");
        command.args(["-c", &cpu.to_string(), "ip", "netns", "exec", &self.names[end], "iperf3"]);
        command
    }
}

impl Traffic {
    /// Returns what `iperf3` sends it by.
    pub fn words(self) -> &'static [&'static str] {
        match self {
            Traffic::Tcp => &[],
            Traffic::Udp => &["--udp", "--bitrate", "0", "--length", "1400"],
        }
    }

    /// Returns how much was received, in bits a second.
    pub fn received(self, said: &Said) -> Result<f64> {
        match self {
            Traffic::Tcp => said.number("/end/sum_received/bits_per_second"),
            Traffic::Udp => {
                let lost = said.number("/end/sum/lost_percent")?;
                Ok(said.number("/end/sum/bits_per_second")? * (1.0 - lost / 100.0))
            }
        }
    }
}

fn start_node(role: &str, number: u16, cpu: usize, fds: &[OwnedFd]) -> Result<Program> {
    let (node, ours) = Program::in_role(&[role, &number.to_string(), &cpu.to_string()], Stdio::inherit())?;
    Fds::send(ours.as_fd(), b"node", fds)?;
    Ok(node)
}

/// Begins a process that stands for a worker on `cpu` and ends with the bench. Returns its descriptors, from standard
/// input.
pub fn begin(cpu: usize) -> Result<Fds> {
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    let (_, fds) = Fds::receive(std::io::stdin().as_fd())?;
    cpus::pin(cpu)?;
    // As workers do.
    rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1))?;
    tasuki_shm::slice::brief();
    Ok(fds)
}

/// Plays the node of a namespace, with descriptors from standard input. Ends with the bench.
pub fn tap_node(number: u16, cpu: usize) -> Result<()> {
    let mut fds = begin(cpu)?;
    let vni = join(&mut fds, number, [1 - number])?;
    let directory = PeerRegion::map_kept_whole(fds.next()?.as_fd())?;
    let lines = directory.len() / LINE_LEN;
    let switch = Switch::new(number, Lookup::new(directory.claims(0, lines)?));
    drive(&mut Bridge::new(Box::new(tap::Tap::new(fds.next()?)), vni, switch))
}

fn drive(node: &mut Bridge<tap::Tap>) -> Result<()> {
    let mut in_vain = 0;
    let mut ticked = Instant::now();
    loop {
        in_vain = if node.turn() > 0 { 0 } else { in_vain + 1 };
        if in_vain < IDLE_LOOKS {
            continue;
        }
        if ticked.elapsed() > TICK {
            ticked = Instant::now();
            node.tick(ticked);
        }
        if node.arm() == Armed::Idle {
            ensure!(node.endpoint.fd().is_some(), "the namespace is gone");
            node.rest(TICK);
        }
        in_vain = 0;
    }
}
