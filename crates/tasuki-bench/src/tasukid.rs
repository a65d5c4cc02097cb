//! A tasukid of this bench: its process, its answers, and its end.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};
use hyper::Method as Verb;
use rustix::process::{Pid, Signal};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tasuki_control::api::client;
use tasuki_control::api::types::WorkerView;

/// A daemon. Dropping it ends the daemon and all its workers.
#[derive(Debug)]
pub struct Tasukid {
    process: Child,
    folder: PathBuf,
}

impl Drop for Tasukid {
    fn drop(&mut self) {
        // A daemon that is killed before it has ended its keeper leaves that behind.
        if self.stop().is_err() {
            self.workers().into_iter().flatten().for_each(|worker| kill(worker.pid));
            let _ = self.process.kill();
            let _ = self.process.wait();
        }
    }
}

impl Tasukid {
    /// Starts a daemon with these settings, nodes and NICs. It does not wait.
    pub fn begin(folder: &Path, configuration: &str) -> Result<Self> {
        Ok(Tasukid { process: spawn(folder, configuration)?, folder: folder.to_owned() })
    }

    /// Starts the next daemon in the same directory. It does not wait.
    pub fn begin_again(&mut self, configuration: &str) -> Result<()> {
        self.process = spawn(&self.folder, configuration)?;
        Ok(())
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the daemon's process id.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    pub fn ask<T: DeserializeOwned>(&self, verb: Verb, address: &str, body: Option<&Value>) -> Result<T> {
        let answer = client::ask(&self.folder, verb, address, body)?;
        serde_json::from_value(answer).with_context(|| format!("tasukid answers {address} with something else"))
    }

    pub fn get<T: DeserializeOwned>(&self, address: &str) -> Result<T> {
        self.ask(Verb::GET, address, None)
    }

    pub fn workers(&self) -> Result<Vec<WorkerView>> {
        self.get("/v1/workers")
    }

    /// Returns the process ids of all that its threads have started.
    pub fn children(&self) -> Result<Vec<u32>> {
        let mut all = Vec::new();
        for thread in std::fs::read_dir(format!("/proc/{}/task", self.process.id()))? {
            // A thread that has ended meanwhile has no children.
            let children = std::fs::read_to_string(thread?.path().join("children")).unwrap_or_default();
            all.extend(children.split_ascii_whitespace().filter_map(|pid| pid.parse::<u32>().ok()));
        }
        Ok(all)
    }

    /// Ends the daemon and all its workers.
    pub fn stop(&mut self) -> Result<()> {
        client::ask(&self.folder, Verb::POST, "/v1/stop", None)?;
        self.process.wait()?;
        Ok(())
    }

    /// Kills the daemon alone.
    pub fn kill(&mut self) -> Result<()> {
        self.process.kill()?;
        self.process.wait()?;
        Ok(())
    }
}

/// Ends the daemon of this directory and all its workers, if there is one. A killed role leaves such a daemon.
pub fn stop(folder: &Path) {
    if tasuki_control::place::api_socket(folder).exists() {
        // A daemon that does not answer is gone already.
        let _ = client::ask(folder, Verb::POST, "/v1/stop", None);
    }
}

/// Kills a process, unless it is gone already.
pub fn kill(pid: u32) {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    // A failure means that the process is gone already.
    let _ = pid.map(|pid| rustix::process::kill_process(pid, Signal::KILL));
}

/// Starts a tasukid with these settings, nodes and NICs. It does not wait.
fn spawn(folder: &Path, configuration: &str) -> Result<Child> {
    let (config, program) = (folder.join("tasuki.toml"), beside("tasukid")?);
    // The bench measures no hang, and on a busy machine a worker may not run every 200 ms.
    let daemon = "[daemon]\nhang_after_ms = 5000\n";
    // Confine as usual, where root allows it.
    let confine = if rustix::process::geteuid().is_root() { "" } else { "confine = \"best-effort\"\n" };
    std::fs::write(&config, format!("{daemon}{confine}{configuration}"))?;
    let mut command = Command::new(&program);
    command.arg("--foreground").arg("--config").arg(&config).arg("--dir").arg(folder);
    let log = std::fs::OpenOptions::new().create(true).append(true).open(folder.join("tasukid.log"))?;
    // A signal from the bench's terminal would end the daemon alone, and its workers would go on.
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).process_group(0);
    command.spawn().with_context(|| format!("{} cannot be started; build it", program.display()))
}

/// Returns the path of a program that was built with this one.
pub fn beside(name: &str) -> Result<PathBuf> {
    let this = std::env::current_exe().context("the bench could not find its own executable")?;
    Ok(this.with_file_name(name))
}
