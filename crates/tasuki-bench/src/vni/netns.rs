//! Two network namespaces: `iperf3` between them, over a VNI and over veth.

use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use serde_json::Value;
use tasuki_net::port::Armed;
use tasuki_net::switch::Switch;
use tasuki_net::tap::TapNode;
use tasuki_net::vni::{Introduction, Vni};
use tasuki_shm::line::{LINE_LEN, Line};
use tasuki_shm::region::{Pages, PeerRegion, Region, Span};
use tasuki_shm::vni::directory::{Directory, Lookup, NodeSet, directory_lines};
use tasuki_shm::vni::estate::{EstateFds, POOL_PAGES};
use tasuki_shm::wake::Clapper;
use tasuki_tap::Tap;
use tasuki_tap::device::Before;
use tasuki_tap::namespace::Namespace;

use crate::cpus;
use crate::orders::Orders;

/// Looks in vain before a node sleeps.
const IDLE_LOOKS: u32 = 8;

/// Between two times at which a node does what is due now and then.
const TICK: Duration = Duration::from_millis(250);

/// What `iperf3` is to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Traffic {
    /// One connection.
    Tcp,
    /// Datagrams of 1,400 bytes, as fast as they go.
    Udp,
}

/// What `iperf3` said it received, in bits a second, a value for each round.
#[derive(Debug, Default)]
pub struct Rates {
    /// Over a VNI,
    pub vni: Vec<f64>,
    /// and over veth.
    pub veth: Vec<f64>,
}

/// Has `iperf3` send for so many seconds, over a VNI and over veth in turn. `None`, with a word about it, where that cannot be.
pub fn compare(traffic: Traffic, seconds: u32, rounds: u32) -> Result<Option<Rates>> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("tcp-netns and udp-netns were left out: they make network namespaces, which needs root");
        return Ok(None);
    }
    if Command::new("iperf3").arg("--version").output().is_err() {
        eprintln!("tcp-netns and udp-netns were left out: there is no iperf3 (apt-get install iperf3)");
        return Ok(None);
    }
    let mut rates = Rates::default();
    for round in 1..=rounds {
        rates.vni.push(Namespaces::over_vni()?.measure(traffic, seconds)?);
        rates.veth.push(Namespaces::over_veth()?.measure(traffic, seconds)?);
        let giga = |rates: &[f64]| rates.last().map_or(0.0, |rate| rate / 1e9);
        eprintln!(
            "round {round}/{rounds} · {} · {:.1} Gb/s, veth {:.1}",
            traffic.case(),
            giga(&rates.vni),
            giga(&rates.veth)
        );
    }
    Ok(Some(rates))
}

impl Traffic {
    /// What its case is called.
    pub fn case(self) -> &'static str {
        match self {
            Traffic::Tcp => "tcp-netns",
            Traffic::Udp => "udp-netns",
        }
    }
}

/// Two namespaces that reach each other, and what they need for it.
struct Namespaces {
    names: [String; 2],
    nodes: Vec<Child>,
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for node in &mut self.nodes {
            let _ = node.kill();
            let _ = node.wait();
        }
        for name in &self.names {
            let _ = Command::new("ip").args(["netns", "del", name]).stderr(Stdio::null()).status();
        }
    }
}

fn ip(words: &str) -> Result<()> {
    let done = Command::new("ip").args(words.split_whitespace()).output().context("ip (iproute2) cannot be started")?;
    ensure!(done.status.success(), "ip {words}: {}", String::from_utf8_lossy(&done.stderr).trim());
    Ok(())
}

impl Namespaces {
    fn new() -> Result<Self> {
        let names = ["a", "b"].map(|end| format!("tasuki-bench-{}-{end}", std::process::id()));
        for name in &names {
            ip(&format!("netns add {name}"))?;
        }
        Ok(Namespaces { names, nodes: Vec::new() })
    }

    fn over_veth() -> Result<Self> {
        let this = Self::new()?;
        let [a, b] = &this.names;
        ip(&format!("link add bench0 netns {a} type veth peer name bench0 netns {b}"))?;
        for (name, host) in this.names.iter().zip(1..) {
            ip(&format!("-n {name} addr add 192.0.2.{host}/24 dev bench0"))?;
            ip(&format!("-n {name} link set bench0 up"))?;
        }
        Ok(this)
    }

    fn over_vni() -> Result<Self> {
        let mut this = Self::new()?;
        let lines = directory_lines(8);
        let memory = Region::create("bench-directory", lines * LINE_LEN, Pages::Small)?;
        let mut directory = Directory::new(memory.span::<Line>(0, lines)?);
        let mut nodes = NodeSet::default();
        let mut kept = Vec::new();
        for (number, name) in (0_u16..).zip(&this.names) {
            let mac = [2, 0, 0, 0, 0x7a, number.to_le_bytes()[0] + 1];
            let address = format!("192.0.2.{}/24", number + 1).parse().map_err(anyhow::Error::msg)?;
            let tap = Tap::create(&Namespace::named(name), "bench0", Some(address), Before::Offload)?;
            tap.interface.set_mac(mac)?;
            directory.add(mac, number)?;
            nodes.insert(number);
            let estate = EstateFds::create(name, POOL_PAGES)?;
            let (ear, bell) = tasuki_shm::wake::bell_pipe()?;
            kept.push((estate, ear, bell, tap.device));
        }
        directory.set_nodes(&nodes);
        for (us, other) in [(0, 1), (1, 0)] {
            let peer = kept[other].0.to_read()?;
            let (estate, ear, _, tap) = &kept[us];
            let [control, pool] = estate.fds().map(|fd| fd.try_clone_to_owned());
            let fds = vec![
                control?,
                pool?,
                ear.try_clone()?,
                peer.control,
                peer.pool,
                kept[other].2.try_clone()?,
                tasuki_shm::region::read_only(memory.fd())?,
                tap.try_clone()?,
            ];
            this.nodes.push(start_node(us, &fds)?);
        }
        Ok(this)
    }

    fn measure(&self, traffic: Traffic, seconds: u32) -> Result<f64> {
        let [a, b] = &self.names;
        let place = |cpu: &str, name: &str| {
            let mut command = Command::new("taskset");
            command.args(["-c", cpu, "ip", "netns", "exec", name, "iperf3"]).stderr(Stdio::null());
            command
        };
        let started = Instant::now();
        let text = loop {
            let mut server = place("1", b).args(["--server", "--one-off"]).stdout(Stdio::null()).spawn()?;
            await_listener(b)?;
            let seconds = seconds.to_string();
            let mut client = place("0", a);
            client.args(["--client", "192.0.2.2", "--json", "--time", &seconds]);
            if traffic == Traffic::Udp {
                client.args(["--udp", "--bitrate", "0", "--length", "1400"]);
            }
            let done = client.output()?;
            let _ = server.kill();
            server.wait()?;
            if done.status.success() || started.elapsed() > Duration::from_secs(10) {
                break String::from_utf8_lossy(&done.stdout).into_owned();
            }
        };
        let said: Value = serde_json::from_str(&text).context("iperf3 said no JSON")?;
        let sum = match traffic {
            Traffic::Tcp => &said["end"]["sum_received"],
            Traffic::Udp => &said["end"]["sum"],
        };
        let rate = sum["bits_per_second"].as_f64().with_context(|| format!("iperf3: {}", said["error"]))?;
        let lost = sum["lost_percent"].as_f64().unwrap_or(0.0);
        Ok(rate * (1.0 - lost / 100.0))
    }
}

/// Waits until `iperf3` listens there.
fn await_listener(name: &str) -> Result<()> {
    let started = Instant::now();
    loop {
        let words = ["netns", "exec", name, "ss", "-Htln", "sport = :5201"];
        let listening = Command::new("ip").args(words).output().context("ss (iproute2) cannot be started")?;
        if !listening.stdout.is_empty() {
            return Ok(());
        }
        ensure!(started.elapsed() < Duration::from_secs(10), "iperf3 does not listen");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn start_node(number: usize, fds: &[OwnedFd]) -> Result<Child> {
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    let child = Command::new(std::env::current_exe()?).arg("tap-node").stdin(theirs).spawn()?;
    Orders::new(number as u64, 0, number, std::path::PathBuf::new(), String::new()).send(ours.as_fd(), fds)?;
    Ok(child)
}

/// A namespace's node, as told by standard input. Ends with the bench.
pub fn tap_node() -> Result<()> {
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    let mut orders = Orders::receive(std::io::stdin().as_fd())?;
    cpus::pin(orders.cpu)?;
    // Before the programs of its namespace, as the kernel's own work for veth is.
    rustix::process::setpriority_process(None, -20)?;
    let number = u16::try_from(orders.warmup)?;
    let estate = EstateFds { control: orders.next_fd()?, pool: orders.next_fd()? };
    let mut vni = Vni::new(number, estate, orders.next_fd()?)?;
    let estate = EstateFds { control: orders.next_fd()?, pool: orders.next_fd()? };
    vni.add(Introduction { number: 1 - number, estate, bell: Clapper::from_peer(orders.next_fd()?) })?;
    vni.settle();
    let directory = PeerRegion::map_kept_whole(orders.next_fd()?.as_fd())?;
    let lines = directory.len() / LINE_LEN;
    let switch = Switch::<Span<Line>>::new(number, Lookup::new(directory.claims(0, lines)?));
    drive(&mut TapNode::new(orders.next_fd()?, vni, switch))
}

fn drive(node: &mut TapNode<Span<Line>>) -> Result<()> {
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
            ensure!(node.tap().is_some(), "the namespace is gone");
            node.rest(TICK);
        }
        in_vain = 0;
    }
}
