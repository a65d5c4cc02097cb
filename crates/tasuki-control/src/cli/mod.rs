//! The subcommands that talk to the daemon.

pub mod capture;
pub mod config;
pub mod doctor;
mod node;
mod show;
pub mod top;
pub mod up;
pub mod upgrade;
pub mod vm;

use std::cell::RefCell;
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::{ArgGroup, Args, Subcommand};
use hyper::Method as Verb;
use serde_json::{Value, json};

use crate::api::client;
use crate::api::types::{self, DriverStateBy, Event, Inflight, Method, NodeView, Plan, VniView};
use crate::config::FILE_MAX;
use crate::log::plain;
use crate::place;
pub use node::{Add, NativeWork, Nodes};

/// How to reach the daemon, and how to show its answers.
#[derive(Debug, Clone, Args)]
pub struct Reach {
    /// The daemon's runtime directory [default: TASUKI_DIR, or /run/tasuki; not as root $XDG_RUNTIME_DIR/tasuki].
    #[arg(long, value_name = "DIR", global = true)]
    pub dir: Option<PathBuf>,
    /// Print JSON, for scripts.
    #[arg(long, global = true)]
    pub json: bool,
}

/// Subcommands about workers.
#[derive(Debug, Subcommand)]
pub enum Workers {
    /// List all workers, with their NICs and counters.
    List,
    /// Replace a node's worker by a fresh one while packets flow.
    Upgrade(Upgrade),
    /// Start ahead of an upgrade the program that it will want: the upgrade then takes a worker that is ready.
    Stage(Stage),
    /// End the worker that is staged for a node.
    Unstage {
        /// Name of the node.
        node: String,
    },
}

/// Subcommands about VNIs.
#[derive(Debug, Subcommand)]
pub enum Vnis {
    /// List all VNIs: how many nodes each has, and how much memory they take.
    List,
    /// List the nodes on a VNI, with their station addresses.
    Table {
        /// Name of the VNI; may be left out if there is one alone.
        vni: Option<String>,
    },
    /// Show the frames that its nodes sent each other, and those that they could not send.
    Stats {
        /// Name of the VNI; may be left out if there is one alone.
        vni: Option<String>,
    },
}

/// An upgrade.
#[derive(Debug, Args)]
pub struct Upgrade {
    /// Name of the node.
    pub node: String,
    /// Another program than the one that its workers are now.
    #[arg(long, value_name = "BINARY", value_parser = text_path)]
    pub with: Option<PathBuf>,
    /// How the successor gets the driver state: it reads it in place, or from the daemon's store.
    #[arg(long, value_enum)]
    pub state: Option<DriverStateBy>,
}

/// A program to start ahead of an upgrade.
#[derive(Debug, Args)]
pub struct Stage {
    /// Name of the node.
    pub node: String,
    /// The program that the upgrade will want; by default the one that its workers are now, as its file is now.
    #[arg(long, value_name = "BINARY", value_parser = text_path)]
    pub with: Option<PathBuf>,
}

/// A handover.
#[derive(Debug, Args)]
pub struct Give {
    /// Name of the NIC.
    pub nic: String,
    /// The node that is to have it.
    #[arg(long, value_name = "NODE")]
    pub to: String,
    /// The method; by default the best that card and trust allow.
    #[arg(long, value_enum)]
    pub method: Option<Method>,
    /// The fate of frames that the old owner has not handled.
    #[arg(long, value_enum)]
    pub inflight: Option<Inflight>,
    /// How the new owner gets the driver state: it reads it in place, or from the daemon's store.
    #[arg(long, value_enum)]
    pub state: Option<DriverStateBy>,
}

/// The stand-by node of a NIC.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("standby").required(true).args(["node", "none"])))]
pub struct Standby {
    /// Name of the NIC.
    pub nic: String,
    /// The node that is to get it if the node that has it is lost, or removed.
    #[arg(long)]
    pub node: Option<String>,
    /// Name none: the NIC stays with its node.
    #[arg(long)]
    pub none: bool,
}

/// A configuration.
#[derive(Debug, Args)]
pub struct Configuration {
    /// The file that it is in; by default the one that tasukid began with.
    #[arg(value_parser = text_path)]
    pub file: Option<PathBuf>,
    /// Refuse, unless this is still the generation of the present configuration (tasuki plan says it).
    #[arg(long, value_name = "NUMBER")]
    pub generation: Option<u64>,
}

impl Configuration {
    fn to_json(&self) -> Result<Value> {
        let text = self.file.as_ref().map(|file| {
            let mut text = String::new();
            let read = File::open(file).and_then(|open| open.take(FILE_MAX + 1).read_to_string(&mut text));
            let len = read.with_context(|| format!("the configuration {} cannot be read", file.display()))?;
            let most = FILE_MAX >> 20;
            ensure!(
                len as u64 <= FILE_MAX,
                "{} is longer than a configuration may be ({most} MiB); name another file",
                file.display()
            );
            Ok::<_, anyhow::Error>(text)
        });
        Ok(json!({ "path": absolute(self.file.as_ref())?, "text": text.transpose()?, "generation": self.generation }))
    }
}

/// A request to the daemon.
#[derive(Debug)]
pub enum Asked {
    /// The whole status.
    Status,
    Nodes(Nodes),
    Vnis(Vnis),
    Workers(Workers),
    NicList,
    /// A handover.
    Give(Give),
    /// Which node stands by for a NIC.
    Standby(Standby),
    /// The counters of this NIC's driver.
    Counts(String),
    /// The events after event `since`.
    Events {
        /// Number of that event.
        since: u64,
        /// Whether to go on with those that come.
        follow: bool,
    },
    /// The steps to a configuration.
    Plan(Configuration),
    /// Taking them.
    Apply(Configuration),
    /// The end of everything.
    Stop,
}

impl Asked {
    fn changes_something(&self) -> bool {
        match self {
            Asked::Status | Asked::NicList | Asked::Counts(_) | Asked::Events { .. } | Asked::Plan(_) => false,
            Asked::Nodes(Nodes::List) | Asked::Workers(Workers::List) | Asked::Vnis(_) => false,
            Asked::Nodes(_) | Asked::Workers(_) | Asked::Give(_) | Asked::Standby(_) => true,
            Asked::Apply(_) | Asked::Stop => true,
        }
    }
}

/// Interval at which a follower asks for events: the API has no answer that waits for the next one.
const FOLLOW_EVERY: Duration = Duration::from_millis(200);

/// Returns a program's path, from /.
fn absolute(program: Option<&PathBuf>) -> Result<Option<PathBuf>> {
    program.map(std::path::absolute).transpose().context("that program has no path")
}

/// Reads a path that goes into a request, which is text.
pub(crate) fn text_path(path: &str) -> Result<PathBuf, std::convert::Infallible> {
    Ok(path.into())
}

/// Encodes a name as a part of an address.
pub(crate) fn part(name: &str) -> String {
    name.bytes()
        .map(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' => char::from(byte).to_string(),
            other => format!("%{other:02X}"),
        })
        .collect()
}

/// Sends the request, and prints the answer.
pub fn run(reach: &Reach, asked: &Asked) -> Result<()> {
    // What changes something goes to no other daemon than the one that `up` would start.
    let usual = if asked.changes_something() { place::usual } else { place::asked };
    let folder = reach.dir.clone().unwrap_or_else(usual);
    let get = |address: &str| client::ask(&folder, Verb::GET, address, None);
    let post = |address: &str, body: Value| client::ask(&folder, Verb::POST, address, Some(&body));
    let value = match asked {
        Asked::Nodes(Nodes::List) => get("/v1/nodes")?,
        Asked::Nodes(Nodes::Add(add)) => {
            let added = post("/v1/nodes", add.to_json()?)?;
            let why = up::await_node(&folder, &show::read::<NodeView>(added.clone())?.name);
            why.into_iter().for_each(|why| crate::log::say(&format!("tasuki: {why}")));
            added
        }
        Asked::Nodes(Nodes::Remove { node }) => {
            client::ask(&folder, Verb::DELETE, &format!("/v1/nodes/{}", part(node)), None)?
        }
        Asked::Vnis(Vnis::List) => get("/v1/vnis")?,
        Asked::Vnis(Vnis::Table { vni }) => get(&format!("/v1/vnis/{}/table", part(&vni_or_only_one(&folder, vni)?)))?,
        Asked::Vnis(Vnis::Stats { vni }) => get(&format!("/v1/vnis/{}/stats", part(&vni_or_only_one(&folder, vni)?)))?,
        Asked::Status => get("/v1/status")?,
        Asked::Workers(Workers::List) => get("/v1/workers")?,
        Asked::Workers(Workers::Upgrade(Upgrade { node, with, state })) => {
            let body = types::Upgrade { with: absolute(with.as_ref())?, state: *state };
            post(&format!("/v1/nodes/{}/upgrade", part(node)), serde_json::to_value(body)?)?
        }
        Asked::Workers(Workers::Stage(Stage { node, with })) => {
            let body = types::Staging { with: absolute(with.as_ref())? };
            post(&format!("/v1/nodes/{}/stage", part(node)), serde_json::to_value(body)?)?
        }
        Asked::Workers(Workers::Unstage { node }) => {
            client::ask(&folder, Verb::DELETE, &format!("/v1/nodes/{}/stage", part(node)), None)?
        }
        Asked::NicList => get("/v1/nics")?,
        Asked::Give(Give { nic, to, method, inflight, state }) => {
            let body = types::Give { to: to.clone(), method: *method, inflight: *inflight, state: *state };
            post(&format!("/v1/nics/{}/give", part(nic)), serde_json::to_value(body)?)?
        }
        Asked::Standby(Standby { nic, node, .. }) => {
            post(&format!("/v1/nics/{}/standby", part(nic)), json!({ "node": node }))?
        }
        Asked::Counts(nic) => get(&format!("/v1/nics/{}/counts", part(nic)))?,
        Asked::Events { since, follow: true } => return follow(&folder, *since, reach.json),
        Asked::Events { since, .. } => get(&format!("/v1/events?since={since}"))?,
        Asked::Plan(configuration) => post("/v1/plan", configuration.to_json()?)?,
        Asked::Apply(configuration) => apply(&folder, configuration)?,
        Asked::Stop => up::stop(&folder)?,
    };
    let text = match reach.json {
        true => serde_json::to_string_pretty(&value)? + "\n",
        false => show::show(asked, value)?.lines().map(|line| plain(line, usize::MAX) + "\n").collect(),
    };
    write(&text).map(|_| ())
}

/// Returns the named VNI, or the only one.
fn vni_or_only_one(folder: &Path, named: &Option<String>) -> Result<String> {
    if let Some(named) = named {
        return Ok(named.clone());
    }
    let there: Vec<VniView> = show::read(client::ask(folder, Verb::GET, "/v1/vnis", None)?)?;
    match &there[..] {
        [] => bail!("there is no VNI; tasuki node add NAME --vni VNI … makes one with its first node"),
        [only] => Ok(only.name.clone()),
        several => {
            let names: Vec<&str> = several.iter().map(|vni| &vni.name[..]).collect();
            bail!("name one of the VNIs {}", names.join(", "))
        }
    }
}

/// Applies a configuration. Returns the answer.
fn apply(folder: &Path, configuration: &Configuration) -> Result<Value> {
    let mut body = configuration.to_json()?;
    if configuration.generation.is_none() {
        // Of two that are applied at once, the second is refused.
        let plan: Plan = show::read(client::ask(folder, Verb::POST, "/v1/plan", Some(&body))?)?;
        body["generation"] = json!(plan.generation);
    }
    client::ask(folder, Verb::POST, "/v1/apply", Some(&body))
}

/// Prints each step of some work once it is done. If that fails, the work goes on: it must not end half-way because a
/// disk is full.
struct Steps {
    is_silent: bool,
    why_untold: RefCell<Option<anyhow::Error>>,
}

impl Steps {
    /// Prints nothing for scripts, which get one answer at the end.
    fn new(reach: &Reach) -> Self {
        Steps { is_silent: reach.json, why_untold: RefCell::default() }
    }

    fn tell(&self, sentence: &str) {
        if !self.is_silent
            && let Err(error) = write(&format!("{sentence}\n"))
        {
            self.why_untold.borrow_mut().get_or_insert(error);
        }
    }

    /// Ends the work, all of which is `done`, as this sentence says.
    fn end(self, done: &str) -> Result<()> {
        let error = self.why_untold.into_inner();
        error.map_or(Ok(()), |error| Err(error.context(format!("{done}, but not all that was done is told"))))
    }
}

/// Writes to standard output, if that has a reader.
pub fn print(bytes: &[u8]) -> Result<()> {
    write_bytes(bytes).map(drop)
}

/// Writes to standard output. Returns whether it has a reader.
fn write(text: &str) -> Result<bool> {
    write_bytes(text.as_bytes())
}

fn write_bytes(bytes: &[u8]) -> Result<bool> {
    match std::io::stdout().write_all(bytes) {
        Ok(()) => Ok(true),
        // A reader that has closed the pipe knows enough.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(error).context("tasukid's answer cannot be written"),
    }
}

/// Prints events as they come, one a line, also those of the daemons that follow. Ends when it has no reader.
fn follow(folder: &Path, mut since: u64, as_json: bool) -> Result<()> {
    let mut goes_on = false;
    loop {
        match client::ask(folder, Verb::GET, &format!("/v1/events?since={since}"), None) {
            Ok(value) => {
                goes_on = true;
                for event in show::read::<Vec<Event>>(value)? {
                    since = event.number;
                    let text = || plain(show::event(&event).trim_end(), usize::MAX);
                    let line = if as_json { serde_json::to_string(&event)? } else { text() } + "\n";
                    if !write(&line)? {
                        return Ok(());
                    }
                }
            }
            // Its daemon may come back: workers go on without one.
            Err(error) if !goes_on => return Err(error),
            Err(_) => {}
        }
        std::thread::sleep(FOLLOW_EVERY);
    }
}
