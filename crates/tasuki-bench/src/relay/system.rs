//! The whole system under traffic: tasukid, the workers that it starts, our model on the other CPU, and this
//! process, which asks for relays and kills workers.
//!
//! The figures cover the work that a user sees: the daemon starts, confines, instructs and ends processes. A pause
//! lasts from the giver's last burst to the taker's first look at the rings, by the clock that all processes share.
//! If the giver is killed, the pause starts at the kill.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use hyper::Method as Verb;
use serde_json::{Value, json};
use tasuki_control::api::types::{Counts, Method, NicView, Relayed, WorkerView};
use tasuki_shm::clock::now_ns;

use super::turns::Traffic;
use crate::cpus::{self, Cpus};
use crate::nic::card::SOCKET;
use crate::nic::trial::{Ask, Control, Trial};
use crate::orders::Orders;
use crate::program::{self, Program};
use crate::sample::Sample;
use crate::tasukid::{Tasukid, beside, kill};

/// Least quiet time before a relay. Otherwise it is as long as the last relay took, so that as much of all else
/// happens in it.
const QUIET: Duration = Duration::from_millis(5);

/// The copy of the worker that nodes run which can be lost.
const PROGRAM: &str = "worker";

/// A way for the NIC to change hands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Relay {
    /// The node gets a new worker.
    Upgrade {
        /// Whether the driver state goes through the daemon's store.
        store: bool,
    },
    /// The node gets a new worker, of a program that was staged for it.
    Staged,
    /// The worker is killed.
    Takeover,
    /// The NIC goes to the other node.
    Give(Method),
    /// The NIC goes to the other node, and neither node trusts the other: the daemon fences all workers that had the
    /// NIC on the way.
    Fence(Method),
    /// The node that has the NIC is lost: its workers are killed, and its program is gone. The NIC goes to the other node
    /// by itself.
    FailOver {
        /// Whether the two nodes trust each other.
        trust: bool,
    },
}

impl Relay {
    fn is_trusted(self) -> bool {
        !matches!(self, Relay::Fence(_) | Relay::FailOver { trust: false })
    }
}

/// Time without a driver after which a node is lost. A ring of 256 has room for a frame a ms.
pub const LOST_AFTER: Duration = Duration::from_millis(50);

/// An open connection to the daemon. A request takes one write and, as a rule, one read.
#[derive(Debug)]
struct Open(UnixStream);

impl Open {
    fn to(folder: &Path) -> Result<Self> {
        Ok(Open(UnixStream::connect(tasuki_control::place::api_socket(folder))?))
    }

    /// Sends a request. Returns the answer and its latency.
    fn ask(&mut self, address: &str, body: &Value) -> Result<(Value, Duration)> {
        let body = body.to_string();
        let head = format!("POST {address} HTTP/1.1\r\nhost: tasukid\r\ncontent-type: application/json\r\n");
        let request = format!("{head}content-length: {}\r\n\r\n{body}", body.len());
        let (mut answer, mut room) = (Vec::new(), vec![0; 16 << 10]);
        let asked = Instant::now();
        self.0.write_all(request.as_bytes())?;
        loop {
            let len = self.0.read(&mut room)?;
            ensure!(len > 0, "tasukid hung up before it had answered");
            answer.extend_from_slice(&room[..len]);
            if let Some(body) = whole(&answer)? {
                let took = asked.elapsed();
                let value: Value = serde_json::from_slice(body)?;
                ensure!(answer.starts_with(b"HTTP/1.1 200"), "tasukid refuses {address}: {value}");
                return Ok((value, took));
            }
        }
    }
}

/// Returns the body of an answer, if all of it has arrived.
pub fn whole(answer: &[u8]) -> Result<Option<&[u8]>> {
    let Some(end) = answer.windows(4).position(|four| four == b"\r\n\r\n") else { return Ok(None) };
    let (head, body) = (std::str::from_utf8(&answer[..end])?.to_ascii_lowercase(), &answer[end + 4..]);
    let len = head.lines().find_map(|line| line.strip_prefix("content-length:"));
    let len: usize = len.context("tasukid does not say how long its answer is")?.trim().parse()?;
    Ok(body.get(..len))
}

/// A daemon with a card. Dropping it ends the daemon and all its workers.
#[derive(Debug)]
pub struct System {
    daemon: Tasukid,
    /// The model of the card, if tasukid does not start it.
    model: Option<Program>,
}

impl System {
    /// Waits until the model of a card is served, and starts two nodes with it. Returns them and the connection to the
    /// model's process.
    pub fn with_model(orders: &mut Orders, cpus: [usize; 2], relay: Relay) -> Result<(Self, Control)> {
        // Only other cases use this connection.
        drop(orders.next_fd()?);
        let control = Control::new(orders.next_fd()?);
        let socket = orders.directory.join(SOCKET);
        program::found(|| Ok(socket.exists().then_some(())), || "the card is not served".to_owned())?;
        Ok((System::start(&orders.directory, &socket, cpus, relay)?, control))
    }

    /// Starts two nodes that send back all frames, each on its CPU; both may share one. The first node gets the
    /// card.
    pub fn start(folder: &Path, card: &Path, cpus: [usize; 2], relay: Relay) -> Result<Self> {
        let they_trust = relay.is_trusted();
        let node = |name: &str, other: &str, cpu: usize| {
            let trusts = if they_trust { format!("\"{other}\"") } else { String::new() };
            format!("[[node]]\nname = \"{name}\"\nwork = \"echo\"\ncpu = {cpu}\npoll = true\ntrusts = [{trusts}]\n\n")
        };
        let nic = format!("[[nic]]\nname = \"nic0\"\ndevice = \"vfio-user:{}\"\nnode = \"red\"\n", card.display());
        let nodes = [node("red", "blue", cpus[0]), node("blue", "red", cpus[1])].concat();
        let configuration = match relay {
            Relay::FailOver { .. } => {
                // It goes away, and comes back.
                let program = folder.join(PROGRAM);
                std::fs::copy(beside("tasuki-worker")?, &program)?;
                let daemon = format!("failover_after_ms = {}\nworker = {program:?}\n", LOST_AFTER.as_millis());
                format!("{daemon}{nodes}{nic}standby = \"blue\"\n")
            }
            _ => nodes + &nic,
        };
        let system = Self::configured(folder, &configuration)?;
        // A node's CPU is for its driver, as on a user's machine.
        cpus::keep_off(&cpus)?;
        Ok(system)
    }

    /// Starts the daemon with two nodes and a card whose cable is the new TAP `interface`.
    ///
    /// tasukid confines the models that it starts, and a confined one makes no TAP. So this one is ours.
    pub fn on_tap(folder: &Path, nodes: &str, interface: &str) -> Result<Self> {
        let socket = folder.join("card.sock");
        let program = beside("tasuki-sim")?;
        let mut command = Command::new(&program);
        command.args(["sim", "nic", "--socket"]).arg(&socket).args(["--tap", interface]);
        let model = Program::start_as("the model of the card", &mut command)?;
        program::await_listener(&socket, "the model of the card")?;
        let nic = format!("[[nic]]\nname = \"nic0\"\ndevice = \"vfio-user:{}\"\nnode = \"red\"\n", socket.display());
        let mut system = Self::configured(folder, &[nodes, &nic].concat())?;
        system.model = Some(model);
        Ok(system)
    }

    /// Starts the daemon with another configuration, whose nodes and card have the same names.
    pub fn configured(folder: &Path, configuration: &str) -> Result<Self> {
        // Each started process chooses its CPU by itself.
        cpus::unpin()?;
        let daemon = Tasukid::begin(folder, &format!("restart = \"always\"\n{configuration}"))?;
        let system = System { daemon, model: None };
        system.await_steady(None)?;
        Ok(system)
    }

    /// Returns the daemon's workers.
    pub fn workers(&self) -> Result<Vec<WorkerView>> {
        self.daemon.workers()
    }

    pub fn nic(&self) -> Result<NicView> {
        let nics: Vec<NicView> = self.daemon.get("/v1/nics")?;
        nics.into_iter().next().context("the daemon has no NIC")
    }

    /// Waits until another worker than `than` drives, and a worker stands by.
    pub fn await_steady(&self, than: Option<u32>) -> Result<NicView> {
        let ask = || {
            let nic = self.nic().ok().filter(|nic| nic.is == "driven" && nic.worker != than);
            let Some(nic) = nic else { return Ok(None) };
            Ok(self.has(&nic.node, &["stands by"])?.then_some(nic))
        };
        program::found(ask, || format!("the NIC is not driven, or nobody stands by: {}", self.describe()))
    }

    /// Returns the daemon's process id.
    pub fn daemon(&self) -> u32 {
        self.daemon.id()
    }

    /// Waits until one worker of a node drives, and another stands by.
    pub fn await_pair(&self, node: &str) -> Result<()> {
        let ask = || Ok((self.has(node, &["drives"])? && self.has(node, &["stands by"])?).then_some(()));
        program::found(ask, || format!("node {node} has no pair of workers: {:?}", self.workers()))
    }

    /// Returns whether a node has a worker that is one of these.
    fn has(&self, node: &str, is: &[&str]) -> Result<bool> {
        Ok(self.workers()?.iter().any(|worker| worker.node == node && is.contains(&&worker.is[..])))
    }

    fn nic_or_end(&self, name: &str) -> Result<NicView> {
        let nics: Vec<NicView> = self.daemon.get("/v1/nics")?;
        nics.into_iter().find(|nic| nic.name == name).with_context(|| format!("the daemon has no {name}"))
    }

    /// Kills the worker that drives a NIC or an end. Returns the time just before.
    fn kill_driver_of(&self, nic: &NicView) -> Result<u64> {
        let worker = self.workers()?.into_iter().find(|worker| Some(worker.worker) == nic.worker);
        let pid = worker.with_context(|| format!("no worker drives {}", nic.name))?.pid;
        let at = now_ns();
        kill(pid);
        Ok(at)
    }

    /// Kills the worker that drives this NIC or end. Returns the time just before, in ns.
    pub fn kill(&self, name: &str) -> Result<u64> {
        self.kill_driver_of(&self.nic_or_end(name)?)
    }

    /// Kills the worker of a node that drives this NIC or end. Returns the time until the next one drives.
    pub fn kill_driver(&self, node: &str, name: &str) -> Result<Duration> {
        self.await_pair(node)?;
        let before = self.nic_or_end(name)?;
        let at = self.kill_driver_of(&before)?;
        let ask = || {
            let after = self.nic_or_end(name)?;
            Ok(after.driving_at_ns.filter(|_| after.worker != before.worker))
        };
        let driving_at = program::found(ask, || format!("no worker drives {name} any more"))?;
        Ok(Duration::from_nanos(driving_at.saturating_sub(at)))
    }

    /// Replaces the worker of a node. Returns for how long no worker drove its NIC or end.
    pub fn upgrade(&self, node: &str, name: &str) -> Result<Duration> {
        self.await_pair(node)?;
        let settled: Relayed = self.daemon.ask(Verb::POST, &format!("/v1/nodes/{node}/upgrade"), Some(&json!({})))?;
        let relay = settled.relays.iter().find(|relay| relay.nic == name && relay.done);
        let pause = relay.and_then(|relay| relay.pause_ns).with_context(|| settled.sentence.clone())?;
        Ok(Duration::from_nanos(pause))
    }

    /// Returns a counter of a NIC's driver, or of an end's.
    pub fn count(&self, nic: &str, name: &str) -> Result<u64> {
        let counts: Counts = self.daemon.ask(Verb::GET, &format!("/v1/nics/{nic}/counts"), None)?;
        let its = counts.counts.iter().find(|(its, _)| its == name);
        Ok(its.with_context(|| format!("{nic} has no counter {name}"))?.1)
    }

    /// Returns the process ids of the daemon's keeper and of others that it has started and that are no workers.
    pub fn helpers(&self) -> Result<Vec<u32>> {
        let workers: Vec<_> = self.workers()?.iter().map(|worker| worker.pid).collect();
        Ok(self.daemon.children()?.into_iter().filter(|pid| !workers.contains(pid)).collect())
    }

    /// Returns the process ids of the daemon and of the models that it has started.
    pub fn family(&self) -> Result<Vec<u32>> {
        Ok([vec![self.daemon.id()], self.models()?].concat())
    }

    /// Returns the process ids of the models: ours, or children of the daemon's threads that are not workers.
    pub fn models(&self) -> Result<Vec<u32>> {
        if let Some(model) = &self.model {
            return Ok(vec![model.id()]);
        }
        let models = self.helpers()?;
        ensure!(!models.is_empty(), "tasukid has started no model of a card");
        Ok(models)
    }

    /// Returns the lines of the daemon's log with these words.
    pub fn log(&self, words: &str) -> String {
        let log = std::fs::read_to_string(self.daemon.folder().join("tasukid.log")).unwrap_or_default();
        log.lines().filter(|line| line.contains(words)).collect::<Vec<_>>().join("\n")
    }

    /// Returns all that the daemon reports, to diagnose a failure.
    pub fn describe(&self) -> String {
        let log = std::fs::read_to_string(self.daemon.folder().join("tasukid.log")).unwrap_or_default();
        let counts: Result<Value> = self.daemon.ask(Verb::GET, "/v1/nics/nic0/counts", None);
        let counts = counts.map_or_else(|error| format!("{error:#}"), |counts| counts.to_string());
        format!("{:?}, {:?}, {counts}\n{log}", self.nic().ok(), self.workers().ok())
    }

    /// Waits until a node has a worker that could take a NIC.
    fn await_worker(&self, node: &str) -> Result<()> {
        let ask = || Ok(self.has(node, &["stands by", "idle"])?.then_some(()));
        program::found(ask, || format!("node {node} gets no worker"))
    }

    /// Prepares the relay. The time of the relay does not include this.
    pub fn get_ready(&self, relay: Relay) -> Result<()> {
        let node = self.nic()?.node;
        match relay {
            Relay::Staged => {
                let address = format!("/v1/nodes/{node}/stage");
                let _: Relayed = self.daemon.ask(Verb::POST, &address, Some(&json!({})))?;
            }
            Relay::Give(_) | Relay::Fence(_) => self.await_worker(other(&node))?,
            Relay::FailOver { .. } => {
                self.await_worker("red")?;
                if node == "blue" {
                    let _: Relayed =
                        self.daemon.ask(Verb::POST, "/v1/nics/nic0/give", Some(&json!({ "to": "red" })))?;
                }
                self.await_pair("red")?;
                self.await_worker("blue")?;
            }
            Relay::Upgrade { .. } | Relay::Takeover => {}
        }
        Ok(())
    }

    /// Makes the NIC change hands.
    pub fn relay(&self, relay: Relay) -> Result<Turn> {
        let before = self.nic()?;
        let (address, body) = match relay {
            Relay::Takeover => return self.takeover(&before),
            Relay::FailOver { .. } => return self.fail_over(&before),
            Relay::Staged | Relay::Upgrade { store: false } => {
                (format!("/v1/nodes/{}/upgrade", before.node), json!({}))
            }
            Relay::Upgrade { store: true } => (format!("/v1/nodes/{}/upgrade", before.node), json!({"state": "store"})),
            Relay::Give(method) | Relay::Fence(method) => {
                ("/v1/nics/nic0/give".to_owned(), json!({"to": other(&before.node), "method": method}))
            }
        };
        let mut open = Open::to(self.daemon.folder())?;
        let (settled, asked) = open.ask(&address, &body)?;
        let settled: Relayed = serde_json::from_value(settled)?;
        ensure!(settled.relays.iter().all(|relay| relay.done), "{}", settled.sentence);
        let pause = settled.relays.first().and_then(|relay| relay.pause_ns);
        let until = self.await_steady(before.worker)?.driving_at_ns.context("nobody drives the NIC")?;
        let pause = pause.context("the relay has no pause")?;
        Ok(Turn { pause, until, until_known: 0, asked: Some(asked), met: None })
    }

    /// Loses the node that has the NIC. The pause of the turn is the time from when the daemon's rule is met until the other
    /// node drives.
    fn fail_over(&self, before: &NicView) -> Result<Turn> {
        let (program, aside) = (self.daemon.folder().join(PROGRAM), self.daemon.folder().join("away"));
        std::fs::rename(&program, &aside)?;
        let its = self.workers()?.into_iter().filter(|worker| worker.node == before.node);
        let (drivers, others): (Vec<_>, Vec<_>) = its.partition(|worker| Some(worker.worker) == before.worker);
        others.iter().chain(&drivers).for_each(|worker| kill(worker.pid));
        // No request disturbs the daemon meanwhile.
        std::thread::sleep(LOST_AFTER * 2);
        let ask = || Ok(self.nic()?.failed_over.and_then(|it| Some((it.took_ns?, it.met_ns))));
        let (took, met) = program::found(ask, || format!("the NIC does not fail over: {}", self.describe()))?;
        std::fs::rename(&aside, &program)?;
        Ok(Turn { pause: took, until: met + took, until_known: 0, asked: None, met: Some(met) })
    }

    fn takeover(&self, before: &NicView) -> Result<Turn> {
        let at = self.kill_driver_of(before)?;
        let after = self.await_steady(before.worker)?;
        let (until, since) = (after.driving_at_ns, after.pause_ns);
        let until = until.context("nobody drives the NIC")?;
        let pause = until.saturating_sub(at);
        let until_known = pause.saturating_sub(since.context("the takeover has no pause")?);
        Ok(Turn { pause, until, until_known, asked: None, met: None })
    }
}

/// Times of one relay.
#[derive(Debug, Clone, Copy)]
pub struct Turn {
    /// Time without a driver, in ns.
    pub pause: u64,
    /// End of `pause`, by [`now_ns`].
    pub until: u64,
    /// Part of `pause` until the daemon knew, in ns.
    pub until_known: u64,
    /// Time from the request, on an open connection, to the answer.
    pub asked: Option<Duration>,
    /// When a fail-over was due, by [`now_ns`].
    pub met: Option<u64>,
}

fn other(node: &str) -> &'static str {
    if node == "red" { "blue" } else { "red" }
}

/// Makes the NIC change hands `orders.calls` times under traffic, between workers on one CPU; times each relay.
pub fn relays(orders: Orders, relay: Relay, traffic: Traffic) -> Result<Sample> {
    let cpu = orders.cpu;
    relays_on(orders, [cpu, cpu], relay, traffic)
}

/// Like [`relays`], between nodes that have a CPU each.
pub fn relays_apart(orders: Orders, relay: Relay, traffic: Traffic) -> Result<Sample> {
    cpus::unpin()?;
    let third = Cpus::choose()?.third()?.context("there is no third CPU")?;
    let cpus = [orders.cpu, third];
    relays_on(orders, cpus, relay, traffic)
}

fn relays_on(mut orders: Orders, cpus: [usize; 2], relay: Relay, traffic: Traffic) -> Result<Sample> {
    let (system, control) = System::with_model(&mut orders, cpus, relay)?;
    let size = control.size()?;
    // This process keeps off the card's CPU: it sleeps while a relay is measured.
    let rate = Some(traffic.rate(size));
    control.say(&Ask::Begin(Trial { count: u64::MAX, size, rate, pauses: true }))?;
    let mut sample = Sample::new();
    let window = |during| -> Result<(f64, f64, u64, f64)> {
        let (gap, trip, ago, stalled) = control.window(during)?;
        Ok((gap as f64, trip as f64, now_ns() - ago, stalled as f64))
    };
    let mut like = QUIET;
    for _ in 0..orders.calls {
        system.get_ready(relay)?;
        window(0..0)?;
        std::thread::sleep(like);
        let (gap, trip, ..) = window(0..0)?;
        sample.note("gap_quiet", gap);
        sample.note("trip_quiet", trip);
        let asked = Instant::now();
        let turn = system.relay(relay)?;
        like = asked.elapsed().max(QUIET);
        // A takeover has no request: it is over when a worker stands by again.
        sample.note("replaced", turn.asked.unwrap_or(asked.elapsed()).as_nanos() as f64);
        sample.record(Duration::from_nanos(turn.pause));
        sample.note("due", turn.pause as f64);
        sample.note("until_known", turn.until_known as f64);
        let (gap, trip, end, stalled) = window(turn.until - turn.pause..turn.until)?;
        if let Some(met) = turn.met {
            sample.note("first", end as f64 - met as f64);
        }
        sample.note("gap", gap);
        sample.note("trip", trip);
        sample.note("stalled", stalled);
    }
    let outcome = control.end()?;
    sample.note("relays", orders.calls as f64);
    sample.note("lost", (outcome.sent - outcome.back) as f64);
    sample.note("sent", outcome.sent as f64);
    sample.note("wrong", outcome.wrong as f64);
    sample.note("pauses", outcome.pauses as f64);
    Ok(sample)
}
