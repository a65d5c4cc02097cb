//! `tasuki upgrade`: replaces everything that runs, the daemon first and then the workers node by node, and stops at the
//! first trouble. A node that goes meanwhile is no trouble, and one that comes starts with the program that is the usual
//! one by then.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use clap::Args;
use hyper::{Method as Verb, StatusCode};
use serde::Serialize;
use serde_json::Value;

use super::{Reach, Steps, absolute, part, show, up, write};
use crate::api::client::{self, has_status};
use crate::api::types::{NodeView, Relayed, Replace, Replaced, Status, Upgrade, WorkerView};
use crate::place;

/// Time within which the daemon's next version must answer: it takes all workers over before.
const DAEMON_TIMEOUT: Duration = Duration::from_secs(60);
/// Time within which another one must answer, if its process has ended: a service manager may start it anew.
const ANOTHER_TIMEOUT: Duration = Duration::from_secs(3);
/// Time within which what the daemon does must settle, so that another program can go on: nodes of containers go all the
/// time.
const SETTLED_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause between two questions whether it does.
const ASK_EVERY: Duration = Duration::from_millis(20);

/// A replacement of all that runs.
#[derive(Debug, Args)]
pub struct Everything {
    /// The folder with the programs of the other version. By default each program is replaced by its own file, as that
    /// is now.
    #[arg(long, value_name = "DIR", value_parser = super::text_path)]
    pub with: Option<PathBuf>,
    /// Leave the daemon as it is, and upgrade the workers alone.
    #[arg(long)]
    pub workers_only: bool,
}

/// What was done, for scripts.
#[derive(Debug, Default, Serialize)]
struct Done {
    daemon: Option<Replaced>,
    nodes: Vec<Node>,
}

#[derive(Debug, Serialize)]
struct Node {
    node: String,
    /// Whether its workers were replaced, or there are none any more.
    done: bool,
    /// Whether it was removed meanwhile.
    gone: bool,
    sentence: String,
}

impl Done {
    /// Returns how many nodes have other workers now, and how many are gone.
    fn counts(&self) -> (usize, usize) {
        let count = |is: &dyn Fn(&Node) -> bool| self.nodes.iter().filter(|node| is(node)).count();
        (count(&|node| node.done && !node.gone), count(&|node| node.gone))
    }
}

/// Replaces everything. What was done is printed in any case.
pub fn run(reach: &Reach, everything: &Everything) -> Result<()> {
    let folder = reach.dir.clone().unwrap_or_else(place::usual);
    let with = absolute(everything.with.as_ref())?;
    if let Some(with) = with.as_ref().filter(|with| !with.is_dir()) {
        bail!("nothing was upgraded: {} is no folder; name the one that has the programs", with.display());
    }
    let mut done = Done::default();
    let steps = Steps::new(reach);
    let outcome = (|| {
        if !everything.workers_only {
            replace_daemon(&folder, with.as_deref(), &mut done, &steps)?;
        }
        upgrade_nodes(&folder, with.as_deref(), &mut done, &steps)?;
        if let Some(with) = &with {
            let is_something = done.daemon.is_some() || done.counts() != (0, 0);
            ensure!(
                is_something,
                "nothing was upgraded: {} has none of the programs that run; name their folder",
                with.display()
            );
        }
        Ok(())
    })();
    if reach.json {
        write(&(serde_json::to_string_pretty(&done)? + "\n"))?;
    }
    outcome?;
    steps.end("the upgrade is done")
}

/// Returns the program of this name in the folder: `None` in it if the program's own file will do, `None` if the
/// folder has none.
fn program(with: Option<&Path>, name: &str) -> Option<Option<PathBuf>> {
    with.map_or(Some(None), |folder| Some(folder.join(name)).filter(|path| path.is_file()).map(Some))
}

fn get<T: serde::de::DeserializeOwned>(folder: &Path, address: &str) -> Result<T> {
    show::read(client::ask(folder, Verb::GET, address, None)?)
}

fn post(folder: &Path, address: &str, body: &impl Serialize) -> Result<Value> {
    client::ask(folder, Verb::POST, address, Some(&serde_json::to_value(body)?))
}

/// Asks the daemon to go on as another program, until what it does now has settled.
fn ask_to_go_on(folder: &Path, body: &Replace) -> Result<Value> {
    let until = Instant::now() + SETTLED_TIMEOUT;
    loop {
        match post(folder, "/v1/upgrade", body) {
            Err(error) if has_status(&error, StatusCode::SERVICE_UNAVAILABLE) && Instant::now() < until => {
                std::thread::sleep(ASK_EVERY);
            }
            asked => return asked,
        }
    }
}

fn replace_daemon(folder: &Path, with: Option<&Path>, done: &mut Done, steps: &Steps) -> Result<()> {
    let Some(program) = program(with, "tasukid") else {
        steps.tell("tasukid stays what it is: that folder has no tasukid");
        return Ok(());
    };
    let process = up::daemon(folder);
    let asked = Instant::now();
    let replaced: Replaced = show::read(ask_to_go_on(folder, &Replace { with: program })?)?;
    // The former one may still answer for a moment.
    let is_next = |status: &Status| u128::from(status.up_ms) <= asked.elapsed().as_millis();
    let mut ended = None;
    while !get::<Status>(folder, "/v1/status").is_ok_and(|status| is_next(&status)) {
        let has_ended = |process: &OwnedFd| up::ends_within(process, Duration::ZERO);
        // A service manager may have started another, which takes a while to answer.
        let is_gone = process.as_ref().is_some_and(has_ended) && up::daemon(folder).as_ref().is_none_or(has_ended);
        if is_gone && ended.get_or_insert_with(Instant::now).elapsed() > ANOTHER_TIMEOUT {
            bail!(
                "{}, but no tasukid is at work any more, and its log says why; the workers go on: start the former tasukid again (tasuki up FILE, or systemctl start tasukid)",
                replaced.sentence
            );
        }
        if asked.elapsed() > DAEMON_TIMEOUT {
            bail!(
                "{}, but it has not answered for {} s; the workers go on meanwhile, and its log says why",
                replaced.sentence,
                DAEMON_TIMEOUT.as_secs()
            );
        }
        std::thread::sleep(ASK_EVERY);
    }
    let Status { version, not_replaced, .. } = get(folder, "/v1/status")?;
    if let Some(why) = not_replaced {
        bail!("tasukid goes on as it was, and its workers as well: {why}");
    }
    ensure!(
        version == replaced.version,
        "tasukid goes on as version {version}: that program did not start, and its log says why"
    );
    steps.tell(&replaced.sentence);
    done.daemon = Some(replaced);
    Ok(())
}

fn upgrade_nodes(folder: &Path, with: Option<&Path>, done: &mut Done, steps: &Steps) -> Result<()> {
    let nodes: Vec<NodeView> = get(folder, "/v1/nodes")?;
    let workers: Vec<WorkerView> = get(folder, "/v1/workers")?;
    for node in &nodes {
        let its: BTreeSet<&str> = workers
            .iter()
            .filter(|it| it.node == node.name && it.is != "leaves")
            .map(|it| it.binary.as_str())
            .collect();
        let name = its.first().and_then(|binary| Path::new(binary).file_name()).and_then(|name| name.to_str());
        let program = name.map(|name| (name, program(with, name)));
        let (is_done, is_gone, sentence) = match program {
            None => (false, false, format!("node {} has no worker to replace; tasuki status says why", node.name)),
            Some((name, None)) => {
                ensure!(with.is_none_or(Path::is_dir), "{}: that folder is gone", stopped(&nodes, done, &node.name));
                (false, false, format!("node {} keeps its program: that folder has no {name}", node.name))
            }
            Some((_, Some(program))) => {
                let body = Upgrade { with: program, state: None };
                let relayed = post(folder, &format!("/v1/nodes/{}/upgrade", part(&node.name)), &body)
                    .and_then(show::read::<Relayed>);
                match relayed {
                    Ok(relayed) => (true, false, relayed.sentence),
                    Err(error) if has_status(&error, StatusCode::NOT_FOUND) => {
                        (true, true, format!("node {} is gone: it was removed meanwhile", node.name))
                    }
                    Err(error) => return Err(error.context(stopped(&nodes, done, &node.name))),
                }
            }
        };
        steps.tell(&sentence);
        done.nodes.push(Node { node: node.name.clone(), done: is_done, gone: is_gone, sentence });
    }
    if let (upgraded, gone @ 1..) = done.counts() {
        steps.tell(&format!("{upgraded} of {} nodes are upgraded, {gone} gone", nodes.len()));
    }
    Ok(())
}

/// Returns what is done and what is not, at the first trouble.
fn stopped(nodes: &[NodeView], done: &Done, at: &str) -> String {
    let (upgraded, gone) = done.counts();
    let gone = if gone == 0 { String::new() } else { format!(", {gone} gone") };
    let rest: Vec<&str> = nodes.iter().map(|node| node.name.as_str()).skip_while(|name| *name != at).collect();
    format!("{upgraded} of {} nodes are upgraded{gone}, and not {}", nodes.len(), rest.join(", "))
}
