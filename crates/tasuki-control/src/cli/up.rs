//! `tasuki up`: from a configuration to nodes and NICs at work, whether a tasukid runs already or not; and `tasuki stop`,
//! which returns when nothing of it is left.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use hyper::Method as Verb;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags};
use serde_json::json;

use super::{Configuration, Reach, Steps, show, write};
use crate::api::client::{self, NotThere};
use crate::api::metrics::Metrics;
use crate::api::types::{Applied, ConfigurationView, Status, Stopped};
use crate::place;

/// Pause between two questions whether all is at work, at least.
const ASK_EVERY: Duration = Duration::from_millis(10);

/// The pause is this many times as long as the last answer took, so that a tasukid with many nodes has time for them.
const ASK_AFTER: u32 = 4;

/// Sentences about what is not at work, at most.
const LACKS_SHOWN_MAX: usize = 5;

/// Time for the first worker of a node that was added.
const FIRST_WORKER_TIMEOUT: Duration = Duration::from_secs(2);

/// Time for tasukid to end once it has answered that it does.
const END_TIMEOUT: Duration = Duration::from_secs(10);

/// A day, in seconds.
const WITHIN_MAX: u64 = 24 * 60 * 60;

/// What is to be up.
#[derive(Debug, Args)]
pub struct Up {
    /// The configuration. If a tasukid is at work, it applies this; otherwise one begins with it.
    #[arg(value_parser = super::text_path)]
    pub file: PathBuf,
    /// Seconds until all nodes and NICs must be at work. A card may take some for its link.
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(..=WITHIN_MAX))]
    pub within: u64,
}

/// Brings nodes and NICs up, and waits until they are at work.
pub fn up(reach: &Reach, up: &Up) -> Result<()> {
    let folder = reach.dir.clone().unwrap_or_else(place::usual);
    std::fs::metadata(&up.file)
        .with_context(|| format!("the configuration {} cannot be read; name another file", up.file.display()))?;
    let began = Instant::now();
    let steps = Steps::new(reach);
    let runs = || client::ask(&folder, Verb::GET, "/v1/status", None).and_then(show::read::<Status>);
    let until = began + Duration::from_secs(up.within);
    // One that does not answer, or may not be talked to, is there.
    let is_there = || match runs() {
        Ok(_) => Ok(true),
        Err(error) if error.is::<NotThere>() => Ok(false),
        Err(error) => Err(error),
    };
    let is_new = !is_there()?;
    if is_new {
        match begin(&folder, &up.file) {
            Ok(said) => steps.tell(&said),
            // If another one began meanwhile, with another file perhaps, that is the one.
            Err(error) => ensure!(is_there()?, error),
        }
    }
    let status = await_applied(runs, until)?;
    let file = std::path::absolute(&up.file).context("that file has no path")?;
    // With workers of before, it goes by the configuration that was applied last, and by what was changed by hand since.
    let is_other = Path::new(&status.configuration.path) != file || !status.configuration.drift.is_empty();
    let applies = !is_new || status.adopted > 0 || is_other;
    if applies {
        let configuration = Configuration { file: Some(up.file.clone()), generation: None };
        let applied: Applied = show::read(super::apply(&folder, &configuration)?)?;
        applied.steps.iter().chain([&applied.sentence]).for_each(|step| steps.tell(step));
    }
    let (seen, lacks) = await_work(&folder, None, until)?;
    if !lacks.is_empty() {
        let shown = lacks.iter().take(LACKS_SHOWN_MAX).cloned();
        let more = lacks.len().saturating_sub(LACKS_SHOWN_MAX);
        let more = (more > 0).then(|| format!("and {more} more (tasuki status)"));
        let lacks: Vec<String> = shown.chain(more).collect();
        bail!("not all is at work within {} s, but tasukid goes on trying: {}", up.within, lacks.join("; "));
    }
    let (nodes, nics, ms) = (seen.status.nodes.len(), seen.status.nics.len(), began.elapsed().as_millis());
    let many = |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
    let sentence = format!("{} and {} are at work after {ms} ms", many(nodes, "node"), many(nics, "NIC"));
    steps.tell(&sentence);
    if reach.json {
        write(&format!("{}\n", json!({ "nodes": nodes, "nics": nics, "ms": ms })))?;
    }
    steps.end(&sentence)
}

/// Asks until no configuration is being applied any more. Returns the last answer.
fn await_applied(status: impl Fn() -> Result<Status>, until: Instant) -> Result<Status> {
    loop {
        let asked = Instant::now();
        let status = status()?;
        let took = asked.elapsed();
        let ConfigurationView { generation, path, applying, .. } = &status.configuration;
        if !applying {
            return Ok(status);
        }
        ensure!(Instant::now() < until, "configuration {generation}, {path}, is still being applied (tasuki events)");
        std::thread::sleep(ASK_EVERY.max(took * ASK_AFTER));
    }
}

/// Asks until all is at work, or `only` this node, or it is `until`. Returns the last answer, and what it lacks, as sentences
/// without a full stop.
fn await_work(folder: &Path, only: Option<&str>, until: Instant) -> Result<(Metrics, Vec<String>)> {
    loop {
        let asked = Instant::now();
        let seen: Metrics = show::read(client::ask(folder, Verb::GET, "/v1/snapshot", None)?)?;
        let took = asked.elapsed();
        let lacks = lacks(&seen, only);
        if lacks.is_empty() || Instant::now() > until {
            return Ok((seen, lacks));
        }
        std::thread::sleep(ASK_EVERY.max(took * ASK_AFTER));
    }
}

/// Starts a tasukid in the background. Returns what it says.
fn begin(folder: &Path, file: &Path) -> Result<String> {
    let beside = std::env::current_exe().context("the kernel does not say where this program is")?;
    let beside = beside.with_file_name("tasukid");
    let program = if beside.is_file() { beside } else { PathBuf::from("tasukid") };
    let mut command = Command::new(&program);
    command.arg("--config").arg(file).arg("--dir").arg(folder).env_remove("NOTIFY_SOCKET");
    let output = command.output().with_context(|| format!("{} does not start", program.display()))?;
    let (said, why) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let why = why.trim();
    ensure!(output.status.success(), "{}", why.strip_prefix("tasukid: ").unwrap_or(why));
    Ok(said.trim().to_owned())
}

/// Returns what is not at work yet, of all or of `only` this node.
fn lacks(seen: &Metrics, only: Option<&str>) -> Vec<String> {
    let nodes = seen.status.nodes.iter().filter(|node| only.is_none_or(|only| node.name == only));
    let nodes = nodes.filter_map(|node| {
        let mut its = seen.workers.iter().filter(|worker| worker.node == node.name);
        let is_at_work = its.any(|worker| worker.is == "idle" || worker.is == "drives");
        let usual = || format!("node {} has no worker yet", node.name);
        (!is_at_work || node.trouble.is_some()).then(|| node.trouble.clone().unwrap_or_else(usual))
    });
    let nics = seen.status.nics.iter().filter(|nic| only.is_none_or(|only| nic.node == only));
    let nics = nics.filter(|nic| nic.is != "driven").map(|nic| {
        let usual = || format!("{}: {}", nic.name, nic.is);
        nic.trouble.clone().unwrap_or_else(usual)
    });
    nodes.chain(nics).collect()
}

/// Waits until a node that was added is at work. Returns a sentence if it is not.
pub(super) fn await_node(folder: &Path, name: &str) -> Option<String> {
    let (_, lacks) = await_work(folder, Some(name), Instant::now() + FIRST_WORKER_TIMEOUT).ok()?;
    Some(format!("node {name} is not at work yet, but tasukid goes on trying: {}", lacks.first()?))
}

/// Ends everything, and waits until tasukid is gone.
pub(super) fn stop(folder: &Path) -> Result<serde_json::Value> {
    let daemon = daemon(folder);
    let value = client::ask(folder, Verb::POST, "/v1/stop", Some(&json!({})))?;
    let Stopped { sentence, .. } = show::read(value.clone())?;
    if let Some(daemon) = daemon {
        let is_gone = ends_within(&daemon, END_TIMEOUT);
        ensure!(is_gone, "{sentence}, but it is still there after {} s; its log says why", END_TIMEOUT.as_secs());
    }
    Ok(value)
}

/// Returns the process that is at work in this directory.
pub(super) fn daemon(folder: &Path) -> Option<OwnedFd> {
    let pid = Pid::from_raw(i32::try_from(place::holder(folder)?).ok()?)?;
    rustix::process::pidfd_open(pid, PidfdFlags::empty()).ok()
}

/// Waits until a process has ended. Returns whether it has.
pub(super) fn ends_within(process: &OwnedFd, limit: Duration) -> bool {
    let mut ends = [PollFd::new(process, PollFlags::IN)];
    let limit = Timespec::try_from(limit).ok();
    rustix::event::poll(&mut ends, limit.as_ref()).unwrap_or(0) > 0
}
