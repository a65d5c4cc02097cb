//! A daemon in a directory of its own, and the command line that talks to it.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, prlimit};
use serde_json::Value;
pub use tasuki_testing::process::lives;
use tasuki_testing::{Program, process};
use tempfile::TempDir;

use super::storm::beside;

const TASUKID: &str = env!("CARGO_BIN_EXE_tasukid");
pub const TASUKI: &str = env!("CARGO_BIN_EXE_tasuki");

/// Longest time for anything on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

/// Stand-ins are started by a shell, and write files.
pub const UNCONFINED: &str = "confine = \"off\"\n";

/// Two nodes that trust each other, one that no node trusts, and a NIC.
pub const NODES: &str = r#"
[[node]]
name = "red"
work = "echo"
trusts = ["blue"]

[[node]]
name = "blue"
work = "sink"
trusts = ["red"]

[[node]]
name = "green"
work = "sink"

[[nic]]
name = "eth0"
device = "vfio-user:/nowhere/card.sock"
node = "red"
"#;

/// A process that may open few descriptors. Gets its former limit back when it is dropped.
pub struct FewDescriptors {
    process: Option<Pid>,
    was: Rlimit,
}

impl Drop for FewDescriptors {
    fn drop(&mut self) {
        let _ = prlimit(self.process, Resource::Nofile, Rlimit { ..self.was });
    }
}

/// A daemon, its directory, and every process seen so far.
pub struct Rig {
    folder: TempDir,
    /// The program that is started as the daemon.
    pub tasukid: PathBuf,
    daemon: Option<Program>,
    seen: Mutex<BTreeSet<u32>>,
}

impl Rig {
    /// Starts a daemon with the default nodes, whose workers are honest stand-ins.
    pub fn new() -> Self {
        Self::with(NODES, "")
    }

    /// Starts a daemon with these nodes and NICs, whose workers have this fault.
    pub fn with(nodes: &str, fault: &str) -> Self {
        let mut rig = Self::without_daemon(nodes, fault);
        rig.start();
        rig
    }

    /// Makes the directory and its files, without starting a daemon.
    pub fn without_daemon(nodes: &str, fault: &str) -> Self {
        let folder = tempfile::Builder::new().prefix("tasuki-").tempdir().expect("a folder");
        let rig = Rig { folder, tasukid: TASUKID.into(), daemon: None, seen: Mutex::default() };
        fs::write(rig.path("alive"), "").expect("a file");
        let worker = rig.program("worker", fault);
        // A busy machine must not look like a hung worker.
        let limits = format!(
            "[daemon]\n{UNCONFINED}hang_after_ms = 5000\ndeadline_ms = 20000\nprepare_ms = 20000\nworker = {worker:?}\n"
        );
        fs::write(rig.path("tasuki.toml"), limits + nodes).expect("a file");
        rig
    }

    /// Returns the path of a file in the rig's directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns the runtime directory.
    pub fn dir(&self) -> PathBuf {
        self.path("run")
    }

    /// Deletes the runtime directory at once, also while tasukid makes files in it.
    pub fn delete_dir(&self) {
        let deleted = self.path("deleted");
        fs::rename(self.dir(), &deleted).expect("it is there");
        // A file may have come there meanwhile.
        until(self, "it is deleted", || fs::remove_dir_all(&deleted).is_ok());
    }

    /// Writes a program that is a stand-in with this fault.
    pub fn program(&self, name: &str, fault: &str) -> PathBuf {
        let path = self.path(name);
        let us = std::env::current_exe().expect("a path");
        let alive = self.path("alive");
        let script = format!(
            "TASUKI_STANDIN=\"$*\" TASUKI_FAULT={fault} TASUKI_ALIVE={} exec {} --exact daemon::this_program_is_also_a_worker --nocapture",
            alive.display(),
            us.display()
        );
        tasuki_testing::script(&path, &script);
        path
    }

    /// Returns a count of an end or a NIC, or of the program that handles its frames.
    pub fn count(&self, of: &str, name: &str) -> u64 {
        count_in(&self.json(&["nic", "counts", of]), name)
    }

    /// Changes the configuration for the next daemon.
    pub fn configure(&self, change: impl Fn(String) -> String) {
        let path = self.path("tasuki.toml");
        let text = fs::read_to_string(&path).expect("a file");
        fs::write(&path, change(text)).expect("a file");
    }

    /// Makes the stock worker the worker, confined as far as this test's user allows.
    pub fn with_stock_workers(&self) {
        let worker = beside("tasuki-worker").expect("looked for before");
        self.configure(|text| confined(&text).replace(&format!("{:?}", self.path("worker")), &format!("{worker:?}")));
    }

    /// Returns the command for a daemon in the foreground.
    pub fn tasukid(&self) -> Command {
        let mut command = self.tasukid_in(&self.dir());
        command.arg("--foreground");
        command
    }

    /// Returns the command for a daemon in the background.
    pub fn tasukid_in(&self, dir: &Path) -> Command {
        self.tasukid_with(&self.path("tasuki.toml"), dir)
    }

    /// Like [`tasukid_in`](Self::tasukid_in), with another configuration.
    pub fn tasukid_with(&self, configuration: &Path, dir: &Path) -> Command {
        let mut command = Command::new(&self.tasukid);
        command.arg("--config").arg(configuration).arg("--dir").arg(dir);
        // Marks all its descendants as processes of this rig.
        command.env("TASUKI_ALIVE", self.path("alive"));
        // While these files are there, each process that the daemon makes for a worker waits, and its loop does.
        let [stall, late] = ["stall", "late"].map(|name| self.path(name));
        let stalls = format!("daemon.makes-process:{},daemon.asked:{}", stall.display(), late.display());
        command.env("TASUKI_STALL", stalls);
        command.env_remove("NOTIFY_SOCKET").env_remove("RUST_LOG").stdin(Stdio::null());
        command
    }

    /// Starts the daemon, and waits until it serves.
    pub fn start(&mut self) {
        self.start_to_die(None);
        until(self, "tasukid serves", || self.tasuki(&["status"]).status.success());
    }

    /// Starts a daemon that dies at a place, as `plan` says.
    pub fn start_to_die(&mut self, plan: Option<String>) {
        let log = fs::OpenOptions::new().create(true).append(true).open(self.path("log")).expect("a file");
        drop(self.daemon.take());
        let mut command = self.tasukid();
        command.env_remove("TASUKI_CRASH").envs(plan.map(|plan| ("TASUKI_CRASH", plan)));
        self.daemon = Some(Program::start(command.stdout(Stdio::null()).stderr(log)));
    }

    /// Returns whether the daemon has died by itself.
    pub fn daemon_is_dead(&mut self) -> bool {
        self.daemon.as_mut().is_none_or(|daemon| !daemon.is_running())
    }

    pub fn daemon_pid(&self) -> u32 {
        self.daemon.as_ref().expect("a daemon").0.id()
    }

    /// Returns whether nothing is otherwise than the configuration has it, nor about to change.
    pub fn is_as_configured(&self) -> bool {
        let view = &self.json(&["status"])["configuration"];
        view["drift"].as_array().is_some_and(Vec::is_empty) && view["applying"] == false
    }

    /// Returns the daemon's open descriptors, once they stay the same: its threads have some for a moment.
    pub fn descriptors(&self) -> BTreeSet<u64> {
        self.descriptors_of(self.daemon_pid())
    }

    fn descriptors_of(&self, process: u32) -> BTreeSet<u64> {
        let path = format!("/proc/{process}/fd");
        let open = || {
            let entries = fs::read_dir(&path).expect("descriptors").flatten();
            entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect::<BTreeSet<u64>>()
        };
        let all = std::cell::RefCell::new(open());
        until(self, "its descriptors stay the same", || {
            (0..10).all(|_| {
                std::thread::sleep(Duration::from_millis(10));
                let now = open();
                all.replace(now.clone()) == now
            })
        });
        all.into_inner()
    }

    /// Leaves the daemon this many descriptors that it may still open, until the return value is dropped.
    ///
    /// It counts numbers: one that is open above the limit takes none of those below it.
    pub fn leave_descriptors(&self, count: usize) -> FewDescriptors {
        self.leave_descriptors_to(self.daemon_pid(), count)
    }

    /// Leaves a process this many.
    pub fn leave_descriptors_to(&self, process: u32, count: usize) -> FewDescriptors {
        let open = self.descriptors_of(process);
        let limit = (0..).filter(|fd| !open.contains(fd)).nth(count);
        let process = i32::try_from(process).ok().and_then(Pid::from_raw);
        let limit = Rlimit { current: limit, ..getrlimit(Resource::Nofile) };
        FewDescriptors { process, was: prlimit(process, Resource::Nofile, limit).expect("a limit") }
    }

    /// Returns the process of the keeper.
    pub fn keeper(&self) -> Option<u32> {
        let words = format!("tasukid\0keep\0{}\0", self.dir().display());
        process::running().find(|(_, its)| *its == words).map(|(pid, _)| pid)
    }

    /// Kills the daemon at once.
    pub fn kill_daemon(&mut self) {
        self.daemon.take().expect("a daemon").kill();
    }

    /// Stops everything, and waits for the daemon's end.
    pub fn stop(&mut self) {
        self.ask(&["stop"]);
        self.daemon_ends();
    }

    /// Waits for the daemon's end.
    pub fn daemon_ends(&mut self) {
        let daemon = std::cell::RefCell::new(self.daemon.take().expect("a daemon"));
        until(self, "tasukid ends", || !daemon.borrow_mut().is_running());
    }

    /// Returns the daemon's log, with all lines that the daemon has told the thread which writes them.
    pub fn log(&self) -> String {
        let writes = |pid: u32| {
            let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
            let threads = threads.filter_map(|it| process::stat(format!("{pid}/task/{}", it.file_name().display())));
            { threads }.any(|(name, fields)| name == "log lines" && ["R", "D"].contains(&fields[0].as_str()))
        };
        let daemon = self.daemon.as_ref().map(|daemon| daemon.0.id());
        (0..1000).take_while(|_| daemon.is_some_and(writes)).for_each(|_| std::thread::sleep(Duration::from_millis(1)));
        fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    /// Returns the command line.
    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(TASUKI);
        command.arg("--dir").arg(self.dir()).args(words).stdin(Stdio::null());
        command
    }

    /// Runs the command line.
    pub fn tasuki(&self, words: &[&str]) -> Output {
        self.command(words).output().expect("a program")
    }

    /// Runs the command line, which must succeed; returns its output.
    pub fn ask(&self, words: &[&str]) -> String {
        let output = self.tasuki(words);
        assert!(output.status.success(), "{words:?}: {}\n{}", text(&output.stderr), self.log());
        text(&output.stdout)
    }

    /// Runs the command line, which must be refused; returns the sentence.
    pub fn refused(&self, words: &[&str]) -> String {
        let output = self.tasuki(words);
        assert_eq!(output.status.code(), Some(1), "{words:?}: {}\n{}", text(&output.stdout), self.log());
        let said = text(&output.stderr);
        assert_eq!(said.lines().count(), 1, "one sentence: {said}");
        said
    }

    /// Runs the command line, which must succeed; returns its output as JSON.
    pub fn json(&self, words: &[&str]) -> Value {
        let mut words = words.to_vec();
        words.push("--json");
        serde_json::from_str(&self.ask(&words)).expect("JSON")
    }

    /// Lists all workers.
    pub fn workers(&self) -> Vec<Value> {
        let Value::Array(workers) = self.json(&["worker", "list"]) else { panic!("a list") };
        self.seen.lock().expect("a set").extend(workers.iter().map(pid));
        workers
    }

    /// Returns the worker of a node in this state.
    pub fn worker(&self, node: &str, is: &str) -> Option<Value> {
        self.workers().into_iter().find(|worker| worker["node"] == node && worker["is"] == is)
    }

    /// Waits for a worker of a node in this state.
    pub fn await_worker(&self, node: &str, is: &str) -> Value {
        // Keep the observed worker: its state may differ at the next look.
        let found = std::cell::RefCell::new(None);
        until(self, &format!("a worker of {node} {is}"), || {
            *found.borrow_mut() = self.worker(node, is);
            found.borrow().is_some()
        });
        found.into_inner().expect("it was just seen")
    }

    /// Kills a worker, and waits until it is dead.
    pub fn kill(&self, worker: &Value) {
        signal(pid(worker), Signal::KILL);
        until(self, "it is dead", || !lives(pid(worker)));
    }

    /// Kills the driver of a node, and waits until another drives.
    pub fn kill_driver(&self, node: &str) {
        let (dead, _) = self.await_pair(node);
        signal(pid(&dead), Signal::KILL);
        until(self, "another drives", || self.worker(node, "drives").is_some_and(|now| now["pid"] != dead["pid"]));
    }

    /// Waits until a node drives eth0 and another worker of it stands by.
    pub fn await_pair(&self, node: &str) -> (Value, Value) {
        (self.await_worker(node, "drives"), self.await_worker(node, "stands by"))
    }

    /// Waits for a [pair](Self::await_pair) that runs one program: after an upgrade the stand-by of the old one leaves
    /// only when the new driver drives.
    pub fn await_pair_of_one_program(&self, node: &str) -> (Value, Value) {
        let found = std::cell::RefCell::new(None);
        until(self, &format!("both workers of {node} run one program"), || {
            let pair = self.await_pair(node);
            let is_of_one = pair.0["generation"] == pair.1["generation"];
            found.replace(is_of_one.then_some(pair));
            is_of_one
        });
        found.into_inner().expect("it was just seen")
    }

    /// Returns the only NIC.
    pub fn nic(&self) -> Value {
        self.json(&["nic", "list"])[0].clone()
    }

    /// Waits for an event that contains `part`.
    pub fn await_event(&self, part: &str) {
        until(self, part, || self.ask(&["events"]).contains(part));
    }
}

/// Returns a configuration in which workers, which are no scripts, are confined as far as this test's user allows.
pub fn confined(text: &str) -> String {
    let as_usual = rustix::process::geteuid().is_root();
    text.replace(UNCONFINED, if as_usual { "" } else { "confine = \"best-effort\"\n" })
}

/// Returns the process of a worker.
pub fn pid(worker: &Value) -> u32 {
    worker["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok()).expect("a process")
}

pub fn signal(pid: u32, signal: Signal) {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).expect("a process");
    kill_process(pid, signal).expect("a process of ours");
}

/// Returns the control group (version 2) of a process, if there is one.
pub fn group(pid: u32) -> Option<PathBuf> {
    let group = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    let group = group.lines().find_map(|line| line.strip_prefix("0::"))?;
    let mounts = fs::read_to_string("/proc/mounts").expect("mounts");
    let mount = mounts.lines().find(|line| line.contains(" cgroup2 ")).and_then(|line| line.split(' ').nth(1))?;
    Some(PathBuf::from(format!("{mount}{group}")))
}

/// Returns a count in the daemon's answer about an end or a NIC.
pub fn count_in(said: &Value, name: &str) -> u64 {
    let counts = said["counts"].as_array().expect("a list");
    let count = counts.iter().find(|count| count[0] == name).and_then(|count| count[1].as_u64());
    count.unwrap_or_else(|| panic!("no {name} in {said}"))
}

/// Returns whether a process may run an instruction of its program: it lives, its control group is not frozen, and it
/// was not killed (the group of a killed process is frozen no longer).
pub fn runs(pid: u32) -> bool {
    let events = group(pid).and_then(|group| fs::read_to_string(group.join("cgroup.events")).ok());
    lives(pid) && !events.is_some_and(|events| events.contains("frozen 1")) && !process::is_killed(pid)
}

/// Waits until `is_so` returns true.
pub fn until(rig: &Rig, what: &str, is_so: impl Fn() -> bool) {
    let until = Instant::now() + LIMIT;
    while !is_so() {
        assert!(Instant::now() < until, "not within {LIMIT:?}: {what}\n{}", rig.log());
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Returns whether a process belongs to this rig.
pub fn is_ours(pid: u32, folder: &Path) -> bool {
    let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    let named = folder.as_os_str().as_encoded_bytes();
    environment.windows(named.len()).any(|window| window == named)
}

impl Drop for Rig {
    fn drop(&mut self) {
        if std::thread::panicking() {
            if self.daemon_is_dead() {
                // Real workers outlive their daemon: only another daemon ends them.
                self.start_to_die(None);
                let limit = Instant::now() + Duration::from_secs(10);
                while Instant::now() < limit && !self.tasuki(&["status"]).status.success() {
                    std::thread::sleep(Duration::from_millis(10));
                }
            }
            let _ = self.tasuki(&["stop"]);
        }
        drop(self.daemon.take());
        // Stand-ins end when this file is gone; stopped ones cannot check it.
        let _ = fs::remove_file(self.path("alive"));
        let seen = std::mem::take(&mut *self.seen.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
        for pid in seen.into_iter().filter(|pid| is_ours(*pid, self.folder.path())) {
            if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
    }
}
