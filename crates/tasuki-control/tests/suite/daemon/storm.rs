//! The real daemon, the real worker and the model of a card, under traffic that the model numbers and checks until a
//! test tells it to finish; and plans for their deaths.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, Stdio};
use std::sync::{Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use hyper::Method;
use rustix::process::{Pid, Signal, kill_process, setpriority_process};
use serde_json::{Value, json};
use tasuki_control::api::client;
use tasuki_testing::{Program, process};

use super::rig::{NODES, Rig, lives, pid, signal, until};

/// Longest time until a worker drives and another stands by, whatever was killed. On a quiet machine it takes a
/// tenth of a second.
const SETTLED_WITHIN: Duration = Duration::from_secs(30);

/// Nice value of a model.
const URGENT: i32 = -10;

/// Held by a test that counts frames.
static COUNTS: RwLock<()> = RwLock::new(());

/// Lets no other frame-counting test run: a model or a virtual machine keeps a processor busy.
pub fn alone() -> RwLockWriteGuard<'static, ()> {
    COUNTS.write().unwrap_or_else(PoisonError::into_inner)
}

/// Lets frame-counting tests run that wait most of the time: workers and programs sleep between two frames.
pub fn beside_others() -> RwLockReadGuard<'static, ()> {
    COUNTS.read().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the options that bring the model's link up quickly, unless `words` say when. A virtio device's link needs
/// none.
fn link(words: &[&str]) -> &'static [&'static str] {
    if words.contains(&"virtio-net") || words.contains(&"--link-up") { &[] } else { &["--link-up", "10"] }
}

/// Returns a program that was built beside the daemon.
pub fn beside(program: &str) -> Option<PathBuf> {
    tasuki_testing::beside(env!("CARGO_BIN_EXE_tasukid"), program)
}

/// Returns the reason why a storm is impossible here, if there is one.
pub fn missing() -> Option<&'static str> {
    if beside("tasuki-worker").is_none() || beside("tasuki-sim").is_none() {
        return Some("needs tasuki-worker and tasuki-sim beside tasukid: cargo build --workspace --all-features");
    }
    (!cfg!(feature = "crash-points")).then_some("needs the feature crash-points")
}

macro_rules! need_storm {
    () => {
        if let Some(reason) = $crate::daemon::storm::missing() {
            return println!("skipped: {reason}");
        }
    };
}
pub(crate) use need_storm;

/// A model process. Dropping it ends the process.
pub struct Model {
    program: Program,
    out: BufReader<ChildStdout>,
}

impl Model {
    /// Starts a model with this wire that serves at `socket`.
    pub fn start(socket: &Path, wire: &[&str]) -> Self {
        let mut command = Command::new(beside("tasuki-sim").expect("looked for before"));
        command.args(["sim", "nic"]).args(wire).args(link(wire));
        command.arg("--socket").arg(socket).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut program = Program::start(&mut command);
        // Other work of the machine does not delay silicon.
        let _ = setpriority_process(Some(program.id()), URGENT);
        let out = BufReader::new(program.0.stdout.take().expect("it was asked for"));
        let mut model = Model { program, out };
        assert!(model.line().contains(" at /"), "it serves");
        model
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.out.read_line(&mut line).expect("a pipe");
        line
    }

    pub fn pid(&self) -> u32 {
        self.program.0.id()
    }

    pub fn signal(&self, signal: Signal) {
        self.program.signal(signal);
    }

    /// Stops its source and waits until all frames are back. If they are not, the error is the model's output.
    pub fn all_come_back(&mut self) -> Result<(), String> {
        self.signal(Signal::USR1);
        // If the line never comes, the watch ends the model, and its end ends the wait.
        let watch = Watch::over(self.pid());
        let said = self.line();
        watch.end();
        if said.trim() == "all came back" { Ok(()) } else { Err(said + &self.rest()) }
    }

    /// Waits for the end of the model, which must be near; returns its output.
    pub fn ends(&mut self) -> String {
        let watch = Watch::over(self.pid());
        let said = self.rest();
        watch.end();
        said
    }

    fn rest(&mut self) -> String {
        let mut said = String::new();
        self.out.read_to_string(&mut said).expect("text");
        said
    }

    /// Kills the model, like a card that is pulled out.
    pub fn unplug(&mut self) {
        self.program.kill();
    }
}

/// All parts of a storm.
pub struct Storm {
    pub rig: Rig,
    pub model: Model,
    socket: PathBuf,
    /// Number of plans made so far.
    plans: u32,
    /// Number of processes that this test has killed itself.
    killed: u32,
    /// Longest time until all was settled again.
    pub longest: Duration,
    /// What each worker has counted as come too late in a handover.
    late: Mutex<BTreeMap<u64, u64>>,
    _one: RwLockWriteGuard<'static, ()>,
}

impl Storm {
    /// Starts a storm with `rate` frames a second, polling or sleeping workers, and other limits of the daemon.
    pub fn new(rate: u32, poll: bool, limits: &[(&str, u32)]) -> Self {
        Self::with_card("82574l", rate, poll, limits)
    }

    /// Like [`new`](Self::new), with another card.
    pub fn with_card(card: &str, rate: u32, poll: bool, limits: &[(&str, u32)]) -> Self {
        let wire = ["--card", card, "--source", &u64::MAX.to_string(), "--rate", &rate.to_string()];
        let storm = Self::on(&wire, poll, limits);
        storm.flows();
        storm
    }

    /// Starts a storm on this wire.
    pub fn on(wire: &[&str], poll: bool, limits: &[(&str, u32)]) -> Self {
        let work = if poll { "\"echo\"\npoll = true" } else { "\"echo\"" };
        let mut storm = Self::of(work, &[], wire, limits);
        storm.settle();
        storm
    }

    /// Starts a storm of nodes with this work. `work` names programs in the rig's directory as RIG; plans hold for
    /// `programs` too. Does not wait for a driver.
    pub fn of(work: &str, programs: &[(&str, &str)], wire: &[&str], limits: &[(&str, u32)]) -> Self {
        let one = alone();
        // The virtio driver has no larger ring.
        let ring = if wire.contains(&"virtio-net") { 512 } else { 1024 };
        let mut rig = Rig::without_daemon(&format!("{NODES}ring = {ring}\n"), "");
        let socket = rig.path("card.sock");
        let model = Model::start(&socket, wire);
        programs.iter().for_each(|(name, program)| as_planned(&rig, name, program));
        let work = work.replace("RIG/", &rig.path("").display().to_string());
        as_planned(&rig, "worker", "tasuki-worker");
        rig.configure(|text| {
            let text = text.replace("work = \"sink\"", "work = \"echo\"");
            let text = text.replace("work = \"echo\"", &format!("work = {work}"));
            let text = text.replace("/nowhere/card.sock", &socket.display().to_string());
            limits.iter().fold(text, |text, (name, value)| {
                let is_it = |line: &&str| line.starts_with(&format!("{name} = "));
                let old = text.lines().find(is_it).expect("a limit").to_owned();
                text.replace(&old, &format!("{name} = {value}"))
            })
        });
        rig.start();
        Storm { rig, model, socket, plans: 0, killed: 0, longest: Duration::ZERO, late: Mutex::default(), _one: one }
    }

    /// Sends a request to the daemon; returns its answer, or the error.
    pub fn ask(&self, method: Method, address: &str, body: Option<&Value>) -> Result<Value, String> {
        client::ask(&self.rig.dir(), method, address, body).map_err(|error| format!("{error:#}"))
    }

    fn get(&self, address: &str) -> Option<Value> {
        self.ask(Method::GET, address, None).ok()
    }

    /// Lists all workers.
    pub fn workers(&self) -> Vec<Value> {
        let workers = self.get("/v1/workers").and_then(|workers| workers.as_array().cloned()).unwrap_or_default();
        let late = |worker: &Value| Some((worker["worker"].as_u64()?, worker["dropped"]["too_late"].as_u64()?));
        self.late.lock().expect("no panic").extend(workers.iter().filter_map(late));
        workers
    }

    pub fn nic(&self) -> Value {
        self.get("/v1/nics").map(|nics| nics[0].clone()).unwrap_or_default()
    }

    /// Returns the driver and the stand-by, of any node.
    pub fn pair(&self) -> Option<(Value, Value)> {
        let workers = self.workers();
        let driver = workers.iter().find(|worker| worker["is"] == "drives")?;
        let is_its = |worker: &&Value| worker["is"] == "stands by" && worker["node"] == driver["node"];
        let standby = workers.iter().find(is_its)?;
        let is_driven = self.nic()["is"] == "driven" && lives(pid(driver)) && lives(pid(standby));
        is_driven.then(|| (driver.clone(), standby.clone()))
    }

    /// Waits until a worker drives, another stands by, and no other is starting or leaving.
    pub fn settle(&mut self) -> (Value, Value) {
        let begun = Instant::now();
        loop {
            let is_calm = |worker: &Value| matches!(worker["is"].as_str(), Some("drives" | "stands by" | "idle"));
            let workers = self.workers();
            let is_staffed = |node: &&str| workers.iter().any(|worker| worker["node"] == **node);
            let is_calm = workers.iter().all(is_calm) && ["red", "blue", "green"].iter().all(is_staffed);
            if let Some(pair) = self.pair().filter(|_| is_calm) {
                self.longest = self.longest.max(begun.elapsed());
                return pair;
            }
            assert!(begun.elapsed() < SETTLED_WITHIN, "{}\n{:?}\n{}", self.nic(), self.workers(), self.rig.log());
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits until the driver has sent a frame back.
    pub fn flows(&self) {
        let sent = || self.pair().and_then(|(driver, _)| Some((pid(&driver), driver["sent"].as_u64()?)));
        let before = sent();
        until(&self.rig, "frames flow", || {
            sent()
                .is_some_and(|(who, now)| before.is_none_or(|(it, then)| if it == who { now > then } else { now > 0 }))
        });
    }

    /// Makes a plan for the next started worker that has none.
    pub fn plan(&mut self, plan: &str) {
        self.plans += 1;
        plan_for(&self.rig, self.plans, plan);
    }

    /// Makes the next worker die when it passes `place` for the `nth` time.
    pub fn plan_death(&mut self, place: &str, nth: u32) {
        self.plan(&format!("TASUKI_CRASH={place}:{nth}"));
    }

    /// Starts another daemon, which dies as `plan` says, and waits until it serves or is dead.
    pub fn start_daemon(&mut self, plan: Option<String>) {
        self.rig.start_to_die(plan);
        let begun = Instant::now();
        while !self.rig.daemon_is_dead() && self.get("/v1/status").is_none() {
            assert!(begun.elapsed() < SETTLED_WITHIN, "{}", self.rig.log());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits until the daemon is dead, or all is settled. Returns whether it is dead.
    pub fn settle_or_die(&mut self) -> bool {
        let begun = Instant::now();
        loop {
            if self.rig.daemon_is_dead() {
                return true;
            }
            if self.pair().is_some() {
                return false;
            }
            assert!(begun.elapsed() < SETTLED_WITHIN, "{}", self.rig.log());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Like [`settle_or_die`](Self::settle_or_die), and waits for the aftermath of the request: old workers leave,
    /// fresh ones begin.
    pub fn quiet_or_dead(&mut self) -> bool {
        let begun = Instant::now();
        let is_quiet = |worker: &Value| ["drives", "stands by", "idle"].iter().any(|is| worker["is"] == *is);
        while !self.rig.daemon_is_dead() && begun.elapsed() < SETTLED_WITHIN {
            let workers = self.workers();
            // One worker for each of the three nodes, and a stand-by; after an upgrade, one of the new program.
            let is_of_one = |(driver, standby): (Value, Value)| driver["generation"] == standby["generation"];
            if workers.len() == 4 && workers.iter().all(is_quiet) && self.pair().is_some_and(is_of_one) {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        self.settle_or_die()
    }

    /// Removes plans that no worker has taken.
    pub fn forget_plans(&self) {
        for plan in fs::read_dir(self.rig.path("plans")).expect("a folder").flatten() {
            let _ = fs::remove_file(plan.path());
        }
    }

    /// Kills a worker, and waits until it is dead.
    pub fn kill(&mut self, worker: &Value) {
        self.killed += u32::from(send(pid(worker), Signal::KILL));
        until(&self.rig, "it is dead", || !lives(pid(worker)));
    }

    /// Asks for an upgrade; returns the outcome.
    pub fn upgrade(&self, node: &str, by_store: bool) -> Result<Value, String> {
        let body = if by_store { json!({ "state": "store" }) } else { json!({}) };
        self.ask(Method::POST, &format!("/v1/nodes/{node}/upgrade"), Some(&body))
    }

    /// Asks for a handover; returns the outcome.
    pub fn give(&self, to: &str, method: Option<&str>) -> Result<Value, String> {
        self.ask(Method::POST, "/v1/nics/eth0/give", Some(&json!({ "to": to, "method": method })))
    }

    /// Returns the node that has the NIC.
    pub fn node(&self) -> String {
        self.nic()["node"].as_str().expect("a node").to_owned()
    }

    /// Kills all workers and waits until they are dead, even without a daemon.
    pub fn kill_all_workers(&mut self) {
        let living: Vec<u32> = self.ever().into_iter().filter(|pid| lives(*pid)).collect();
        self.killed += living.iter().map(|pid| u32::from(send(*pid, Signal::KILL))).sum::<u32>();
        until(&self.rig, "they are dead", || !living.iter().any(|pid| lives(*pid)));
    }

    /// Kills the daemon at once.
    pub fn kill_daemon(&mut self) {
        self.killed += 1;
        self.rig.kill_daemon();
    }

    /// Returns the number of processes killed so far, by this test or by themselves at a place.
    pub fn kills(&self) -> u32 {
        let log = self.rig.log();
        let by_own_hand = log.lines().filter(|line| line.contains("was killed by signal 9")).count();
        // Kills by the daemon are no faults of this test, and kills by this test are counted already.
        let by_daemon = log.lines().filter(|line| line.contains(": it is ended")).count();
        let by_own_hand = u32::try_from(by_own_hand.saturating_sub(by_daemon)).expect("not so many");
        by_own_hand.max(self.killed)
    }

    /// Returns every worker that was ever started.
    pub fn ever(&self) -> Vec<u32> {
        let pids = fs::read_to_string(self.rig.path("pids")).unwrap_or_default();
        pids.lines().filter_map(|line| line.parse().ok()).collect()
    }

    /// Removes the card for good, and puts another one in its place.
    pub fn plug_another(&mut self, rate: u32) {
        let _ = fs::remove_file(&self.socket);
        self.model = Model::start(&self.socket, &["--source", &u64::MAX.to_string(), "--rate", &rate.to_string()]);
    }

    /// Stops the source and waits until all frames are back; then ends everything and checks that no process is
    /// left. Returns the number of kills and the longest time to settle.
    pub fn nothing_is_lost(mut self) -> (u32, Duration) {
        self.all_come_back();
        let (kills, longest, log) = (self.kills(), self.longest, self.rig.log());
        let said = self.end();
        assert!(said.contains("lost 0") && said.contains("twice 0, out of order 0, damaged 0"), "{said}\n{log}");
        (kills, longest)
    }

    /// Stops the source, and waits until all frames are back.
    pub fn all_come_back(&mut self) {
        self.settle();
        if let Err(said) = self.model.all_come_back() {
            let counts = self.ask(Method::GET, "/v1/nics/eth0/counts", None);
            panic!("frames are missing: {said}\n{counts:?}\n{}\n{}", self.nic(), self.rig.log());
        }
    }

    /// Like [`nothing_is_lost`](Self::nothing_is_lost) where frames may be lost: none comes twice, out of order, or
    /// changed.
    pub fn ends_with_losses(mut self) {
        self.settle();
        let log = self.rig.log();
        signal(self.model.pid(), Signal::USR1);
        let said = self.end();
        assert!(said.contains("twice 0, out of order 0, damaged 0"), "{said}\n{log}");
    }

    /// Like [`nothing_is_lost`](Self::nothing_is_lost) where only frames may be lost that a worker has counted, or that the
    /// card has dropped for this reason while the machine held a worker up.
    pub fn only_counted_ones_are_lost(mut self, dropped_as: &str) {
        self.settle();
        let log = self.rig.log();
        let came = self.model.all_come_back();
        let ended = self.end();
        let said = came.err().unwrap_or(ended);
        let counted: u64 = self.late.lock().expect("no panic").values().sum();
        let dropped: u64 = numbers(&said, &format!(" frames: {dropped_as}")).sum();
        let lost = said.split_once("lost ").and_then(|(_, rest)| rest.split_whitespace().next()?.parse::<u64>().ok());
        println!("{lost:?} lost, {counted} counted, {dropped} dropped by the card");
        assert!(lost.is_some_and(|lost| lost <= counted + dropped), "{counted} counted, {said}\n{log}");
        assert!(said.contains("twice 0, out of order 0, damaged 0"), "{said}\n{log}");
    }

    /// Like [`nothing_is_lost`](Self::nothing_is_lost) for a wire that does not count.
    pub fn ends(mut self) {
        self.settle();
        self.ask(Method::POST, "/v1/stop", None).expect("an end");
        self.rig.daemon_ends();
        until(&self.rig, "nobody is left", || self.ever().into_iter().all(|pid| !lives(pid)));
    }

    /// Ends everything and waits until no process is left; returns the model's output.
    pub fn end(&mut self) -> String {
        self.ask(Method::POST, "/v1/stop", None).expect("an end");
        self.rig.daemon_ends();
        let said = self.model.ends();
        until(&self.rig, "nobody is left", || self.ever().into_iter().all(|pid| !lives(pid)));
        let (kills, longest) = (self.kills(), self.longest);
        println!("{kills} killed, {} workers in all; settled within {longest:?}; {}", self.ever().len(), said.trim());
        said
    }
}

/// Returns the numbers that stand before each `words` of a log.
fn numbers(log: &str, words: &str) -> impl Iterator<Item = u64> {
    log.lines().filter_map(move |line| line.split_once(words)?.0.rsplit(' ').next()?.parse::<u64>().ok())
}

/// Writes the plan of this number, for the next worker that has none.
pub fn plan_for(rig: &Rig, number: u32, plan: &str) {
    let aside = rig.path("next.plan");
    fs::write(&aside, format!("{plan}\n")).expect("a file");
    fs::rename(aside, rig.path("plans").join(format!("{number:06}"))).expect("a name");
}

/// Writes a program into the rig's directory that takes the next plan and executes `program`, which was built beside
/// the daemon.
pub fn as_planned(rig: &Rig, name: &str, program: &str) {
    fs::create_dir_all(rig.path("plans")).expect("a folder");
    let script = format!(
        "echo $$ >> {0}/pids\nunset TASUKI_CRASH TASUKI_STOP\nif [ \"$1\" = worker ]; then for plan in {0}/plans/*; do\n\
         if [ -e \"$plan\" ] && mv \"$plan\" {0}/plan.$$; then read -r line < {0}/plan.$$; export \"$line\"; break; fi; done; fi\nexec {1} \"$@\"",
        rig.path("").display().to_string().trim_end_matches('/'),
        beside(program).expect("looked for before").display()
    );
    tasuki_testing::script(&rig.path(name), &script);
}

/// Sends a signal to a process that may be dead already; returns whether it existed.
pub fn send(pid: u32, signal: Signal) -> bool {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).expect("a process");
    kill_process(pid, signal).is_ok()
}

/// Returns the state of a process from /proc: `S` if it sleeps, `T` if it is stopped.
pub fn state(pid: u32) -> Option<char> {
    process::stat(pid)?.1.first()?.chars().next()
}

/// Ends a process that the test waits for, unless the wait is over before.
struct Watch {
    over: std::sync::mpsc::Sender<()>,
    thread: std::thread::JoinHandle<()>,
}

impl Watch {
    fn over(process: u32) -> Self {
        let (over, is_over) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            if is_over.recv_timeout(SETTLED_WITHIN) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                send(process, Signal::TERM);
            }
        });
        Watch { over, thread }
    }

    fn end(self) {
        drop(self.over);
        let _ = self.thread.join();
    }
}
