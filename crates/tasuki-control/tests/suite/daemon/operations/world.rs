//! The world of some rounds: a daemon, namespaces, cards, a file to return to, and what must be there after a mend.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hyper::Method;
use rustix::process::Signal;
use serde_json::Value;
use tasuki_control::api::client;
use tasuki_tap::namespace::Namespace;
use tasuki_testing::{Dice, Program, process};

use super::bystanders::Bystanders;
use super::file::File;
use super::{DAEMON_MAX, Operation, within};
use crate::daemon::rig::{Rig, TASUKI, is_ours, pid};
use crate::daemon::storm::{Model, beside, send, state};

/// The namespaces: of TAPs (a to d), of a veth pair (w, v), and of a card's cable (u).
const ROOMS: [&str; 7] = ["a", "b", "c", "d", "w", "v", "u"];
/// Longest time for a command.
const COMMAND_MAX: &str = "75";
/// Longest time for a look at the daemon. The next one answers once all workers have answered it, or are dead: one that
/// stands still counts as dead after 5 s.
const LOOK_MAX: Duration = Duration::from_secs(20);
/// Time until all is settled after an apply, before another attempt.
const SETTLED_MAX: Duration = Duration::from_secs(15);
/// How much the daemon and the keeper may have more than at the beginning: descriptors or threads under way, and memory.
const MORE: usize = 12;
const MORE_MEMORY: u64 = 24 << 20;

/// Returns the folder of the programs.
pub fn programs() -> PathBuf {
    beside("tasuki-worker").expect("looked for before").parent().expect("a folder").to_owned()
}

/// Descriptors, threads and bytes of memory of the daemon and the keeper.
#[derive(Debug, Clone, Copy)]
struct Sizes([(usize, usize, u64); 2]);

/// All parts of a world.
pub struct World {
    pub rig: Rig,
    /// The first part of the namespaces' names.
    pub rooms: String,
    file: File,
    daemon: Mutex<Option<Program>>,
    /// The file with which the daemon began.
    current: Mutex<PathBuf>,
    cards: Mutex<[Option<Model>; 3]>,
    bystanders: Bystanders,
    history: Mutex<Vec<String>>,
    wrong: Mutex<Vec<String>>,
    since: Instant,
    at_begin: Option<Sizes>,
    /// How far the log was looked through.
    read: usize,
    /// Number by which the daemon's control groups are known.
    group: Mutex<Option<String>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn said(output: &Output) -> String {
    let all = [&output.stdout[..], &output.stderr].concat();
    String::from_utf8_lossy(&all).trim().replace('\n', " | ").chars().take(500).collect()
}

/// Removes the namespaces that earlier runs left which were killed.
fn remove_rooms_of_the_dead() {
    for room in fs::read_dir("/run/netns").into_iter().flatten().flatten() {
        let name = room.file_name().to_string_lossy().into_owned();
        let pid = name.strip_prefix("operations-").and_then(|rest| rest.split('-').next()?.parse::<u32>().ok());
        if pid.is_some_and(|pid| !process::lives(pid)) {
            let _ = Command::new("ip").args(["netns", "del", &name]).output();
        }
    }
}

impl World {
    /// Makes namespaces, cards and files. No daemon is there yet.
    pub fn new(dice: &mut Dice, few: bool, cpus: [u32; 2]) -> Self {
        remove_rooms_of_the_dead();
        let rig = Rig::without_daemon("", "");
        let folder = rig.path("").display().to_string().trim_end_matches('/').to_owned();
        let rooms = format!("operations-{}-", std::process::id());
        let bystanders = Bystanders::new(Path::new(&folder), few, dice.once_in(2));
        // A worker of a bystander that waits for a processor must not look hung.
        let text = format!("[daemon]\nhang_after_ms = 4000\n\n{}", bystanders.text(dice.once_in(2)));
        let file = File::new(dice, text, &rooms, &folder, cpus);
        fs::create_dir(rig.path("other")).expect("a folder");
        for program in ["tasukid", "tasuki-worker"] {
            std::os::unix::fs::symlink(programs().join(program), rig.path("other").join(program)).expect("a link");
        }
        let current = Mutex::new(rig.path("tasuki.toml"));
        World {
            rig,
            rooms,
            file,
            daemon: Mutex::default(),
            current,
            cards: Mutex::default(),
            bystanders,
            history: Mutex::default(),
            wrong: Mutex::default(),
            since: Instant::now(),
            at_begin: None,
            read: 0,
            group: Mutex::default(),
        }
    }

    pub fn file(&self) -> &File {
        &self.file
    }

    pub fn folder(&self) -> String {
        self.rig.path("").display().to_string().trim_end_matches('/').to_owned()
    }

    /// Returns all that was done, with times.
    pub fn history(&self) -> String {
        lock(&self.history).join("\n")
    }

    fn note(&self, text: String) {
        lock(&self.history).push(format!("{:9.3} {text}", self.since.elapsed().as_secs_f64()));
    }

    fn bad(&self, text: String) {
        self.note(format!("WRONG: {text}"));
        lock(&self.wrong).push(text);
    }

    fn wrong(&self) -> Vec<String> {
        std::mem::take(&mut lock(&self.wrong))
    }

    /// Runs `ip` in a namespace.
    fn ip(&self, room: &str, words: &str) -> Output {
        let room = format!("{}{room}", self.rooms);
        Command::new("ip").args(["-n", &room]).args(words.split(' ')).output().expect("ip")
    }

    /// Runs the command line.
    fn ask(&self, words: &str) -> Output {
        let mut command = Command::new("timeout");
        command.args(["-s", "KILL", COMMAND_MAX, TASUKI, "--dir"]).arg(self.rig.dir()).args(words.split(' '));
        let since = Instant::now();
        let output = command.stdin(Stdio::null()).output().expect("timeout");
        let (code, took) = (output.status.code(), since.elapsed());
        self.note(format!("$ tasuki {words}: {code:?} after {took:.2?}: {}", said(&output)));
        if took > Duration::from_secs(70) {
            self.bad(format!("no end of tasuki {words}: {:?}", self.get("/v1/status")));
        }
        output
    }

    /// Returns what the API shows at an address.
    fn get(&self, address: &str) -> Option<Value> {
        let since = Instant::now();
        let answer = client::ask(&self.rig.dir(), Method::GET, address, None).ok();
        if answer.is_some() && since.elapsed() > LOOK_MAX {
            self.bad(format!("{address} took {:.2?}", since.elapsed()));
        }
        answer
    }

    fn list(&self, address: &str) -> Vec<Value> {
        self.get(address).and_then(|list| list.as_array().cloned()).unwrap_or_default()
    }

    /// Writes a file so that no reader sees a part of it.
    fn write(&self, path: &Path, text: &str) {
        let aside = path.with_extension(format!("{:?}", std::thread::current().id()));
        fs::write(&aside, text).expect("a file");
        fs::rename(aside, path).expect("a name");
    }

    fn is_alive(&self) -> bool {
        lock(&self.daemon).as_mut().is_some_and(Program::is_running)
    }

    /// Starts a daemon with this file; returns whether it serves.
    fn start(&self, daemon: &mut Option<Program>, file: PathBuf) -> bool {
        let log = fs::OpenOptions::new().create(true).append(true).open(self.rig.path("log")).expect("a file");
        let mut command = self.rig.tasukid_with(&file, &self.rig.dir());
        command.arg("--foreground").stdout(Stdio::null()).stderr(log);
        *lock(&self.current) = file;
        let program = daemon.insert(Program::start(&mut command));
        let since = Instant::now();
        while program.is_running() {
            if self.get("/v1/status").is_some() {
                return true;
            }
            if since.elapsed() > DAEMON_MAX {
                // Where it waits in the kernel says why.
                let stack = fs::read_to_string(format!("/proc/{}/stack", program.0.id()));
                self.bad(format!("a daemon does not serve within {DAEMON_MAX:?}: {stack:?}"));
                return false;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        self.note("the daemon has ended at its start".to_owned());
        false
    }

    /// Ends the daemon by a signal, and starts another.
    fn another_daemon(&self, by: &str, after_ms: u64, file: PathBuf) {
        let mut daemon = lock(&self.daemon);
        if let Some(program) = daemon.as_mut()
            && program.is_running()
        {
            send(program.0.id(), named(by));
            if !within(|| !program.is_running()) {
                self.bad(format!("the daemon does not end within {DAEMON_MAX:?} of {by}"));
                program.kill();
            }
        }
        std::thread::sleep(Duration::from_millis(after_ms));
        self.start(&mut daemon, file);
    }

    /// Kills the keeper, and waits until the next one has as much. No daemon ends meanwhile: where both are gone, workers are
    /// ended (docs/design/daemon.md).
    fn kill_keeper(&self) {
        let mut daemon = lock(&self.daemon);
        let Some(keeper) = self.rig.keeper().filter(|_| daemon.as_mut().is_some_and(Program::is_running)) else {
            return;
        };
        let had = process::descriptors(keeper);
        send(keeper, Signal::KILL);
        let (since, mut has, mut same_since) = (Instant::now(), 0, Instant::now());
        while since.elapsed() < DAEMON_MAX {
            let next = self.rig.keeper().filter(|next| *next != keeper).map_or(0, process::descriptors);
            if next != has {
                (has, same_since) = (next, Instant::now());
            }
            // Some of it may have gone with nodes.
            if has >= had || has > 0 && same_since.elapsed() > Duration::from_millis(500) {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        self.bad(format!("no other keeper is there within {DAEMON_MAX:?}"));
    }

    /// Makes what is missing of namespaces, the veth pair and cards.
    fn make(&self) {
        for room in ROOMS {
            let name = format!("{}{room}", self.rooms);
            if !Path::new("/run/netns").join(&name).exists() {
                let _ = Command::new("ip").args(["netns", "add", &name]).output();
                self.ip(room, "link set lo up");
            }
        }
        if !["w w0", "v w1"].iter().all(|end| self.ip(&end[..1], &format!("link show {}", &end[2..])).status.success())
        {
            self.ip("w", "link del w0");
            self.ip("v", "link del w1");
            self.ip("w", &format!("link add w0 type veth peer name w1 netns {}v", self.rooms));
        }
        self.ip("w", "link set w0 up");
        self.ip("v", "link set w1 address 02:aa:00:00:00:60 up");
        self.ip("v", "addr replace 198.51.100.60/24 dev w1");
        for number in 0..3 {
            self.plug(&mut lock(&self.cards)[number], number);
        }
    }

    /// Makes sure that there is this card.
    fn plug(&self, card: &mut Option<Model>, number: usize) {
        if card.as_ref().is_some_and(|card| process::lives(card.pid())) || !self.file.has(&format!("eth{number}")) {
            return;
        }
        let socket = self.rig.path(&format!("c{number}.sock"));
        let _ = fs::remove_file(&socket);
        let many = u64::MAX.to_string();
        *card = Some(match number {
            0 => Model::start(&socket, &["--source", &many, "--rate", "200"]),
            1 => Model::start(&socket, &["--card", "virtio-net", "--source", &many, "--rate", "200"]),
            _ => {
                let room = Namespace::named(&format!("{}u", self.rooms));
                let model = room.within(|| Ok(Model::start(&socket, &["--tap", "cable0"]))).expect("a namespace");
                self.ip("u", "link set cable0 address 02:aa:00:00:00:50");
                self.ip("u", "addr replace 198.51.100.50/24 dev cable0");
                self.ip("u", "link set cable0 up");
                model
            }
        });
    }

    /// Returns the workers of a node that drive, stand by, or all.
    fn workers(&self, node: &str, which: &str) -> Vec<u32> {
        let workers = self.list("/v1/workers");
        let is_one = |worker: &&Value| worker["node"] == node && (which == "all" || worker["is"] == which);
        workers.iter().filter(is_one).map(pid).collect()
    }

    /// Executes an operation.
    pub fn run(&self, operation: &Operation) {
        self.note(format!("{operation:?}"));
        match operation {
            Operation::Ask(words) => drop(self.ask(words)),
            Operation::Cut(after_ms, words) => {
                let words: Vec<&str> = words.split(' ').collect();
                let mut command = self.rig.command(&words);
                let command = Program::start(command.stdout(Stdio::null()).stderr(Stdio::null()));
                std::thread::sleep(Duration::from_millis(*after_ms));
                drop(command);
            }
            Operation::File(verb, file) => {
                let path = self.rig.path(&format!("{:?}.toml", std::thread::current().id()).replace(['(', ')'], "-"));
                self.write(&path, &file.text());
                self.ask(&format!("{verb} {}", path.display()));
            }
            Operation::Hangup(file) => {
                let path = lock(&self.current).clone();
                self.write(&path, &file.text());
                self.hang_up();
            }
            Operation::Half(then, file, thousandths) => {
                let path = lock(&self.current).clone();
                // An empty file, as another writer could leave it, would be one without bystanders.
                self.write(&path, &file.half(*thousandths));
                match *then {
                    "apply" => drop(self.ask("apply")),
                    "daemon" => self.another_daemon("KILL", 100, path.clone()),
                    _ => self.hang_up(),
                }
                std::thread::sleep(Duration::from_millis(100));
                self.write(&path, &file.text());
            }
            Operation::Capture(of, ms, by) => {
                let mut command = self.rig.command(&["capture", of, "-w"]);
                command.arg(self.rig.path(&format!("{:?}.pcapng", std::thread::current().id())));
                let mut capture = Program::start(command.stdout(Stdio::null()).stderr(Stdio::null()));
                std::thread::sleep(Duration::from_millis(*ms));
                send(capture.0.id(), named(by));
                if !within(|| !capture.is_running()) {
                    self.bad(format!("a capture of {of} does not end within {DAEMON_MAX:?} of {by}"));
                }
            }
            Operation::Kill(node, which) => {
                let victims = self.workers(node, which);
                self.note(format!("kills {victims:?} of {node}"));
                send_all(&victims, Signal::KILL);
            }
            Operation::Stop(node, which, ms) => {
                let victims = self.workers(node, which);
                self.note(format!("stops {victims:?} of {node}"));
                send_all(&victims, Signal::STOP);
                std::thread::sleep(Duration::from_millis(*ms));
                send_all(&victims, Signal::CONT);
            }
            Operation::Daemon(by, after_ms, file) => {
                let path = match file {
                    Some(file) => {
                        let path = self.rig.path("other.toml");
                        self.write(&path, &file.text());
                        path
                    }
                    None => self.rig.path("tasuki.toml"),
                };
                self.another_daemon(by, *after_ms, path);
            }
            Operation::Keeper => self.kill_keeper(),
            Operation::Freeze(which, ms) => {
                // No daemon ends meanwhile: the next one would take a keeper that is silent for dead.
                let daemon = lock(&self.daemon);
                let process = match *which {
                    "daemon" => daemon.as_ref().map(|program| program.0.id()),
                    "keeper" => self.rig.keeper(),
                    _ => lock(&self.cards)[0].as_ref().map(Model::pid),
                };
                let process: Vec<u32> = process.into_iter().collect();
                send_all(&process, Signal::STOP);
                std::thread::sleep(Duration::from_millis(*ms));
                send_all(&process, Signal::CONT);
            }
            Operation::Unlink(file) => drop(fs::remove_file(self.rig.path(file))),
            Operation::Card(number, after_ms) => {
                let mut cards = lock(&self.cards);
                cards[*number] = None;
                std::thread::sleep(Duration::from_millis(*after_ms));
                self.plug(&mut cards[*number], *number);
            }
            Operation::Room(room, after_ms) => {
                let _ = Command::new("ip").args(["netns", "del", &format!("{}{room}", self.rooms)]).output();
                std::thread::sleep(Duration::from_millis(*after_ms));
                self.make();
            }
            Operation::Link(room, name, "del") => drop(self.ip(room, &format!("link del {name}"))),
            Operation::Link(room, name, to) => drop(self.ip(room, &format!("link set {name} {to}"))),
            Operation::Talk(from, host, ms) => {
                let mut command = Command::new("timeout");
                let words = format!(
                    "{}.{:03} ip netns exec {}{from} ping -f -q 198.51.100.{host}",
                    ms / 1000,
                    ms % 1000,
                    self.rooms
                );
                let _ = command.args(words.split(' ')).output();
            }
            Operation::Look => {
                for address in ["/v1/status", "/v1/nics", "/v1/workers", "/v1/events", "/v1/vnis/lan/table"] {
                    self.get(address);
                }
                self.ask("vni stats lan");
            }
            Operation::Knock(socket) => {
                let path = self.rig.path(&format!("{socket}.sock"));
                match std::os::unix::net::UnixStream::connect(&path) {
                    Ok(mut stream) => drop(std::io::Write::write(&mut stream, &[1; 12])),
                    Err(_) => self.knock(&path),
                }
            }
        }
    }

    /// Says something odd at a memif socket, each message of which is a packet.
    fn knock(&self, path: &Path) {
        use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, connect, send as say, socket};
        let socket = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).expect("a socket");
        if SocketAddrUnix::new(path).is_ok_and(|address| connect(&socket, &address).is_ok()) {
            let _ = say(&socket, &[1; 12], rustix::net::SendFlags::NOSIGNAL);
        }
    }

    fn hang_up(&self) {
        let mut daemon = lock(&self.daemon);
        if let Some(program) = daemon.as_mut()
            && program.is_running()
        {
            send(program.0.id(), Signal::HUP);
        }
    }

    /// Makes the world, and waits until all is there; returns what is wrong. Where it `is_brief`, checks come after the round alone.
    pub fn begin(&mut self, is_brief: bool) -> Vec<String> {
        self.make();
        let path = self.rig.path("tasuki.toml");
        self.write(&path, &self.file.text());
        if !self.start(&mut lock(&self.daemon), path) {
            return self.wrong();
        }
        if let Some(why) = self.settle(DAEMON_MAX) {
            self.bad(format!("at the beginning: {why}"));
            return self.wrong();
        }
        self.bystanders.begin(&self.rig).into_iter().for_each(|wrong| self.bad(wrong));
        if !is_brief {
            self.check(false);
        }
        self.wrong()
    }

    /// Returns the processes of this world's daemons: number, program, state.
    fn processes(&self) -> Vec<(u32, String)> {
        let all = fs::read_dir("/proc").expect("a folder").flatten();
        let numbers = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let ours = numbers.filter(|pid| is_ours(*pid, self.rig.path("").as_path()) && process::lives(*pid));
        let line = |pid: u32| fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default().replace('\0', " ");
        ours.map(|pid| (pid, line(pid))).collect()
    }

    /// Returns why not all is as the file has it, and at rest.
    fn unsettled(&self) -> Option<String> {
        let Some(status) = self.get("/v1/status") else { return Some("no daemon answers".to_owned()) };
        let configuration = &status["configuration"];
        if configuration["applying"] != false {
            return Some("a file is being applied".to_owned());
        }
        // A NIC whose card is gone is why its node lacks a stand-by.
        for nic in status["nics"].as_array().into_iter().flatten() {
            let is_told = nic["trouble"].as_str().is_none_or(|trouble| trouble.contains("was sent away"));
            if nic["is"] != "driven" || !is_told {
                return Some(format!("nic {} is {}: {}", nic["name"], nic["is"], nic["trouble"]));
            }
        }
        let workers = self.list("/v1/workers");
        for node in status["nodes"].as_array().into_iter().flatten() {
            let its = workers.iter().filter(|worker| worker["node"] == node["name"]);
            let mut are: Vec<&str> = its.filter_map(|worker| worker["is"].as_str()).collect();
            are.sort_unstable();
            let has_nics = node["nics"].as_array().is_some_and(|nics| !nics.is_empty());
            let want: &[&str] = if has_nics { &["drives", "stands by"] } else { &["idle"] };
            if !node["trouble"].is_null() || are != want {
                return Some(format!("node {} has workers {are:?}, trouble: {}", node["name"], node["trouble"]));
            }
        }
        let has_drift = configuration["drift"].as_array().is_none_or(|drift| !drift.is_empty());
        let is_odd = !status["trouble"].is_null() || !status["not_replaced"].is_null() || has_drift;
        is_odd.then(|| format!("{}, {}, drift {}", status["trouble"], status["not_replaced"], configuration["drift"]))
    }

    /// Waits until all is settled; returns why not.
    fn settle(&self, most: Duration) -> Option<String> {
        let since = Instant::now();
        loop {
            let why = self.unsettled()?;
            // Only a command mends these.
            let is_final = [" is gone", "no interface any more"].iter().any(|part| why.contains(part));
            if since.elapsed() > most || is_final && since.elapsed() > Duration::from_secs(1) {
                return Some(why);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Restores what others took away, and has the daemon apply the file; returns whether all is settled.
    fn mend(&self) -> bool {
        self.note("mends".to_owned());
        self.processes().iter().filter(|(pid, _)| state(*pid) == Some('T')).for_each(|(pid, _)| {
            send(*pid, Signal::CONT);
        });
        self.make();
        let (path, current) = (self.rig.path("tasuki.toml"), lock(&self.current).clone());
        [&path, &current].iter().for_each(|path| self.write(path, &self.file.text()));
        if !self.is_alive() && !self.start(&mut lock(&self.daemon), path.clone()) {
            self.bad("the daemon does not begin with the file".to_owned());
            return false;
        }
        let mut why = None;
        for attempt in 0..5 {
            if !within(|| self.get("/v1/status").is_some_and(|it| it["configuration"]["applying"] == false)) {
                self.bad("a file is being applied without end".to_owned());
                return false;
            }
            let status = self.get("/v1/status").unwrap_or_default();
            for node in status["configuration"]["by_hand"].as_array().into_iter().flatten() {
                self.ask(&format!("node remove {}", node.as_str().unwrap_or_default()));
            }
            for worker in self.list("/v1/workers").iter().filter(|worker| worker["is"] == "staged") {
                self.ask(&format!("worker unstage {}", worker["node"].as_str().unwrap_or_default()));
            }
            self.make();
            if current != path {
                // It counts until tasukid has read it anew.
                self.ask("apply");
            }
            self.ask(&format!("apply {}", path.display()));
            ["a", "b", "c"].iter().for_each(|room| drop(self.ip(room, "link set lan up")));
            why = self.settle(SETTLED_MAX);
            self.note(format!("after apply {attempt}: {why:?}"));
            let Some(why) = &why else { return true };
            let stays = self.get("/v1/status").unwrap_or_default()["configuration"]["stays"].take();
            for stays in stays.as_array().into_iter().flatten().filter_map(Value::as_str) {
                // An upgrade that a death of the daemon has cut between two NICs.
                let again = stays.split_once("upgrade it again (tasuki ").and_then(|(_, rest)| rest.strip_suffix(')'));
                again.into_iter().for_each(|again| drop(self.ask(again)));
            }
            if why.contains("nic \"eth") && attempt < 3 {
                // The documented way with a NIC whose card died: it goes, and comes again.
                let without = self.rig.path("without.toml");
                self.write(&without, &self.file.without_nics().text());
                self.ask(&format!("apply {}", without.display()));
            }
        }
        self.bad(format!("not mended: {why:?}: {:?}", self.get("/v1/status").map(|it| it.to_string())));
        false
    }

    /// Mends all, and returns what is wrong then. Bystanders' workers may be others if all workers were replaced.
    pub fn mend_and_check(&mut self, were_replaced: bool) -> Vec<String> {
        if self.mend() {
            self.check(were_replaced);
        }
        self.wrong()
    }

    fn check(&mut self, were_replaced: bool) {
        let status = self.get("/v1/status").unwrap_or_default();
        let listed = status["nodes"].as_array().into_iter().flatten();
        let is_one = |name: &&str| !Bystanders::is_one(name);
        let nodes: BTreeSet<&str> = listed.filter_map(|node| node["name"].as_str()).filter(is_one).collect();
        let file = self.file.clone();
        let want: BTreeSet<&str> = file.nodes().into_iter().collect();
        if nodes != want {
            self.bad(format!("nodes {nodes:?}, and not {want:?}"));
        }
        let plan = said(&self.ask(&format!("plan {}", self.rig.path("tasuki.toml").display())));
        if !plan.starts_with("nothing changes") {
            self.bad(format!("there is still something to do: {plan}"));
        }
        self.check_processes(status["pid"].as_u64());
        self.check_remains(&want);
        self.check_pings();
        self.bystanders.look(&self.rig, were_replaced).into_iter().for_each(|wrong| self.bad(wrong));
        // Each node's next process waits, and takes descriptors once it is there.
        let many = status["nodes"].as_array().map_or(0, Vec::len);
        within(|| self.processes().iter().filter(|(_, line)| line.contains(" jail ")).count() >= many);
        let sizes = self.sizes_now();
        // One round shows no growth: the first check has the measure for later ones.
        let begin = *self.at_begin.get_or_insert(sizes);
        let is_more = |(now, then): (&(usize, usize, u64), &(usize, usize, u64))| {
            now.0 > then.0 + MORE || now.1 > then.1 + MORE || now.2 > then.2 + MORE_MEMORY
        };
        if sizes.0.iter().zip(&begin.0).any(is_more) {
            self.bad(format!("daemon and keeper have {sizes:?}, and had {begin:?}"));
        }
        self.check_log();
    }

    /// Checks that the processes are those of the workers, one daemon and one keeper. Others may be about to end.
    fn check_processes(&self, daemon: Option<u64>) {
        let since = Instant::now();
        loop {
            let listed: BTreeSet<u32> = self.list("/v1/workers").iter().map(pid).collect();
            let all = self.processes();
            let is_worker = |line: &str| line.split(' ').next().is_some_and(|word| word.ends_with("tasuki-worker"));
            let run: BTreeSet<u32> = all.iter().filter(|(_, line)| is_worker(line)).map(|(pid, _)| *pid).collect();
            let is_other = |(pid, line): &&(u32, String)| {
                !is_worker(line) && !line.contains(" jail ") && Some(u64::from(*pid)) != daemon
            };
            let others: Vec<_> = all.iter().filter(is_other).collect();
            let keeper = self.rig.keeper();
            let is_right = listed == run && others.len() == 1 && Some(others[0].0) == keeper;
            if let Some(its) = run.iter().find_map(|pid| fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()) {
                let its = its.split_once("/tasuki/").and_then(|(_, rest)| rest.split('/').next());
                *lock(&self.group) = its.map(str::to_owned);
            }
            if is_right {
                return;
            }
            if since.elapsed() > DAEMON_MAX {
                let only: Vec<_> = listed.symmetric_difference(&run).collect();
                return self.bad(format!("processes: workers only listed or only running {only:?}, others {others:?}"));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Returns the interfaces in a namespace.
    fn interfaces(&self, room: &str) -> BTreeSet<String> {
        let said = self.ip(room, "-o link").stdout;
        let said = String::from_utf8_lossy(&said).into_owned();
        let names = said.lines().filter_map(|line| line.split(": ").nth(1));
        names.map(|name| name.split('@').next().unwrap_or_default().to_owned()).filter(|name| name != "lo").collect()
    }

    /// Returns the control groups of this daemon's nodes.
    fn groups(&self) -> BTreeSet<String> {
        let Some(group) = lock(&self.group).clone() else { return BTreeSet::new() };
        let mut find = Command::new("find");
        find.args(["/sys/fs/cgroup", "-type", "d", "-path"]).arg(format!("*/tasuki/{group}/node-*"));
        let found = find.output().expect("find").stdout;
        let found = String::from_utf8_lossy(&found).into_owned();
        let node = |path: &str| Some(path.split_once("/node-")?.1.split('/').next()?.to_owned());
        found.lines().filter_map(node).filter(|node| !Bystanders::is_one(node)).collect()
    }

    /// Checks interfaces, sockets and control groups against the nodes. Those of others may be about to go, and tasukid looks
    /// now and then whether a socket was deleted, and makes it anew.
    fn check_remains(&self, want: &BTreeSet<&str>) {
        if !within(|| self.remains(want).is_empty()) {
            self.remains(want).into_iter().for_each(|odd| self.bad(odd));
        }
    }

    /// Returns what differs from these nodes.
    fn remains(&self, want: &BTreeSet<&str>) -> Vec<String> {
        let mut odd = Vec::new();
        for room in ROOMS {
            let its: &[&str] = match room {
                "a" | "b" => &["lan"],
                "c" if want.contains("c") => &["lan"],
                "w" => &["w0"],
                "v" => &["w1"],
                "u" if want.contains("up") => &["cable0"],
                _ => &[],
            };
            let have = self.interfaces(room);
            if !have.iter().eq(its) {
                odd.push(format!("interfaces of namespace {room}: {have:?}, and not {its:?}"));
            }
        }
        let is_there = |socket: &str| self.rig.path(&format!("{socket}.sock")).exists();
        let sockets = ["m1", "v1", "h", "hv"].into_iter().filter(|socket| is_there(socket) != want.contains(socket));
        odd.extend(sockets.map(|it| format!("the socket {it} is there without its node, or its node without it")));
        let groups = self.groups().into_iter().filter(|group| !want.contains(group.as_str()));
        odd.extend(groups.map(|group| format!("a control group of node {group}, which is not there")));
        odd
    }

    fn check_pings(&self) {
        let nodes = [("a", 1), ("b", 2), ("c", 3), ("ans", 77), ("w", 60), ("up", 50)];
        let mut silent = Vec::new();
        std::thread::scope(|scope| {
            let mut pings = Vec::new();
            for (from, _) in nodes[..3].iter().filter(|(node, _)| self.file.has(node)) {
                for (to, host) in nodes.iter().filter(|(node, _)| self.file.has(node)) {
                    let room = format!("{}{from}", self.rooms);
                    let words = format!("netns exec {room} ping -c 1 -W 5 -w 10 -q 198.51.100.{host}");
                    let ping = move || Command::new("ip").args(words.split(' ')).output().expect("ip");
                    pings.push((from, to, scope.spawn(ping)));
                }
            }
            let is_silent =
                |(from, to, ping): (&&'static str, &&'static str, std::thread::ScopedJoinHandle<'_, Output>)| {
                    let answered = ping.join().expect("a ping").status.success();
                    (!answered).then(|| format!("{from} to {to}"))
                };
            silent.extend(pings.into_iter().filter_map(|(from, to, ping)| is_silent((from, to, ping))));
        });
        if !silent.is_empty() {
            self.bad(format!("no ping goes from {}", silent.join(", from ")));
        }
    }

    fn sizes_now(&self) -> Sizes {
        let daemon = lock(&self.daemon).as_ref().map_or(0, |program| program.0.id());
        Sizes([daemon, self.rig.keeper().unwrap_or(0)].map(|pid| {
            let threads = process::status(pid, "Threads").and_then(|count| count.parse().ok()).unwrap_or(0);
            let memory = if process::lives(pid) { process::status_bytes(pid, "RssAnon") } else { 0 };
            (process::descriptors(pid), threads, memory)
        }))
    }

    /// Returns the sizes of daemon and keeper, in words.
    pub fn sizes(&self) -> String {
        let word = |(descriptors, threads, memory): (usize, usize, u64)| {
            format!("{descriptors} descriptors, {threads} threads, {} KiB", memory / 1024)
        };
        let [daemon, keeper] = self.sizes_now().0.map(word);
        format!("daemon {daemon}; keeper {keeper}")
    }

    fn check_log(&mut self) {
        let log = self.rig.log();
        let is_bad = |line: &&str| ["ERROR", "panicked", "unreachable"].iter().any(|word| line.contains(word));
        log[self.read..].lines().filter(is_bad).for_each(|line| self.bad(format!("in the log: {line}")));
        self.read = log.len();
    }

    /// Ends the bystanders' traffic and the daemon; returns counts, and what is wrong. Without a check of remains if
    /// something `was_wrong`.
    pub fn end(&mut self, was_wrong: bool) -> (Vec<String>, Vec<String>) {
        let (mut counted, wrong) = self.bystanders.end(&self.rig);
        wrong.into_iter().for_each(|wrong| self.bad(wrong));
        let down = self.ask("down");
        if !down.status.success() {
            self.bad(format!("down: {}", said(&down)));
        }
        within(|| !self.is_alive() && self.processes().is_empty());
        let (said, wrong) = self.bystanders.card();
        counted.push(format!("NIC: {said}"));
        wrong.into_iter().for_each(|wrong| self.bad(wrong));
        if !was_wrong {
            let processes = self.processes();
            if !processes.is_empty() {
                self.bad(format!("processes are left: {processes:?}"));
            }
            let files = fs::read_dir(self.rig.dir()).into_iter().flatten().flatten();
            let files: Vec<_> = files.map(|file| file.file_name()).filter(|file| file != "tasukid.lock").collect();
            if !files.is_empty() {
                self.bad(format!("files are left: {files:?}"));
            }
            let interfaces: Vec<_> = ["a", "b", "c", "d"].iter().flat_map(|room| self.interfaces(room)).collect();
            let groups = self.groups();
            if !interfaces.is_empty() || !groups.is_empty() {
                self.bad(format!("interfaces or control groups are left: {interfaces:?}, {groups:?}"));
            }
            for socket in ["m1", "v1", "h", "hv", "by-memif", "by-vm"] {
                if self.rig.path(&format!("{socket}.sock")).exists() {
                    self.bad(format!("the socket {socket} is left"));
                }
            }
            self.check_log();
        }
        (counted, self.wrong())
    }
}

/// Sends a signal to processes that may be dead already.
fn send_all(processes: &[u32], signal: Signal) {
    for process in processes {
        send(*process, signal);
    }
}

/// Returns a signal by its name.
fn named(name: &str) -> Signal {
    match name {
        "KILL" => Signal::KILL,
        "TERM" => Signal::TERM,
        _ => Signal::INT,
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let _ = self.rig.tasuki(&["down"]);
        }
        drop(lock(&self.daemon).take());
        for (pid, _) in self.processes() {
            send(pid, Signal::KILL);
        }
        for room in ROOMS {
            let _ = Command::new("ip").args(["netns", "del", &format!("{}{room}", self.rooms)]).output();
        }
    }
}
