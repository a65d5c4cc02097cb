//! Attacks of a node's program on other processes before any runtime of ours has confined it: only the limits of
//! tasukid are in force (stage one).
//!
//! Attacks of docs/design/threat-model.md.

use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::Signal;
use tasuki_testing::alone_under;

use super::rig::{Rig, lives, pid, signal, until};
use super::storm::beside;

/// A stock node as the victim; the tests check that it is unharmed.
const VICTIM: &str = r#"
[[node]]
name = "red"
work = "echo"
"#;

/// Returns the configuration of a node whose program executes the attacks in `options`, within `bounds`.
fn hostile(name: &str, options: &str, bounds: &str) -> String {
    let program = beside("examples/hostile").expect("looked for before");
    let work = format!("{{ program = {{ path = {program:?}, options = {options:?} }} }}");
    format!("\n[[node]]\nname = {name:?}\nwork = {work}\nbounds = {{ {bounds} }}\n")
}

macro_rules! need_hostile {
    () => {
        if beside("examples/hostile").is_none() || beside("tasuki-worker").is_none() {
            return println!("skipped: needs tasuki-worker and its examples: cargo build --package tasuki-worker --examples --bins --all-features");
        }
        if !rustix::process::geteuid().is_root() {
            return println!("skipped: only root can confine workers strictly");
        }
    };
}

/// Starts a daemon with a victim, and waits until the victim has begun.
fn with_victim() -> (Rig, u32) {
    let mut rig = Rig::without_daemon(VICTIM, "");
    rig.with_stock_workers();
    rig.start();
    let victim = pid(&rig.await_worker("red", "idle"));
    (rig, victim)
}

/// Counts the processes of a user.
fn count_of(user: u32) -> usize {
    let processes = std::fs::read_dir("/proc").expect("processes").flatten();
    processes.filter(|process| process.metadata().is_ok_and(|meta| meta.uid() == user)).count()
}

fn status(pid: u32, file: &str) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/{file}")).expect("a process")
}

/// Attacks, each with its row of the threat model; those on files are in [`FILES`].
const ATTACKS: &[(&str, &str)] = &[
    ("T111", "kill"),
    ("T111", "kill-all"),
    ("T111", "queue"),
    ("T111", "signal-thread"),
    ("T111", "queue-thread"),
    ("T111", "pidfd"),
    ("T111", "prlimit"),
    ("T111", "renice"),
    ("T111", "renice-user"),
    ("T111", "affinity"),
    ("T111", "real-time"),
    ("T111", "schedule"),
    ("T111", "io-priority"),
    ("T111", "migrate"),
    ("T112", "ptrace"),
    ("T112", "read-memory"),
    ("T112", "perf"),
    ("T112", "bpf"),
    ("T112", "steal-descriptor"),
    ("T112", "advise"),
    ("T112", "compare"),
    ("T112", "kernel-log"),
    ("T113", "watch-all"),
    ("T113", "watch-files"),
    ("T113", "shell"),
    ("T114", "unix-socket"),
    ("T114", "tcp"),
    ("T114", "netlink"),
    ("T114", "vsock"),
    ("T114", "datagrams"),
    ("T115", "root"),
    ("T115", "namespace"),
    ("T115", "clone-namespace"),
    ("T115", "join-namespace"),
    ("T115", "mount"),
    ("T115", "module"),
    ("T115", "personality"),
    ("T115", "clock"),
    ("T115", "host-name"),
    ("T115", "io-uring"),
    ("T115", "userfaultfd"),
    ("T115", "keys"),
    ("T115", "shared-memory"),
    ("T115", "messages"),
    ("T115", "semaphores"),
    ("T115", "posix-messages"),
    ("T115", "setown"),
    ("T115", "setsig"),
    ("T115", "async"),
    ("T115", "notify"),
    ("T115", "lease"),
    ("T116", "clone-parent"),
    ("T116", "huge-file"),
    ("T116", "huge-pages"),
    ("T117", "truncate-log"),
];

/// Attacks on a file of the daemon, each with its row.
const FILES: &[(&str, &str)] = &[
    ("T113", "open"),
    ("T113", "mode"),
    ("T113", "owner"),
    ("T113", "link"),
    ("T113", "remove"),
    ("T113", "by-handle"),
    ("T115", "chroot"),
    ("T115", "pivot"),
];

/// Returns files of other owners for the program to try to read.
fn others(rig: &Rig, victim: u32) -> Vec<String> {
    let of_daemon = ["registry.redb", "api.sock"].map(|name| rig.dir().join(name).display().to_string());
    let of_victim = ["mem", "environ", "maps", "fd/0"].map(|name| format!("/proc/{victim}/{name}"));
    of_daemon.into_iter().chain(of_victim).chain(["/etc/passwd".to_owned()]).collect()
}

/// Its interpreter is a file like any other, row: T113
#[test]
fn a_script_is_refused_as_what_it_is() {
    need_hostile!();
    let (mut rig, victim) = with_victim();
    let script = rig.path("script");
    tasuki_testing::script(&script, "exec sleep 9");
    for _ in 0..2 {
        let said = rig.refused(&["worker", "upgrade", "red", "--with", script.to_str().expect("text")]);
        assert!(said.contains("script is no ELF program, and a confined worker reaches no interpreter"), "{said}");
    }
    assert!(lives(victim), "{}", rig.log());
    rig.stop();
}

/// rows: in the tables; creates a file, row: T113
#[test]
fn a_program_that_reaches_for_others_before_it_is_a_worker_is_refused() {
    need_hostile!();
    let (mut rig, victim) = with_victim();
    let limits = status(victim, "limits");
    let registry = rig.dir().join("registry.redb").display().to_string();
    let mut orders: Vec<String> = ATTACKS.iter().map(|(_, attack)| format!("first {attack} {victim}")).collect();
    orders.extend(FILES.iter().map(|(_, attack)| format!("first {attack} {registry}")));
    orders.extend(others(&rig, victim).iter().map(|file| format!("first open {file}")));
    orders.push(format!("first create {}", rig.path("made").display()));
    // Another daemon knows of the hostile node, and takes over the victim.
    rig.kill_daemon();
    // The node may have a higher priority; that must not enable an attack either.
    rig.configure(|text| text + &hostile("green", &orders.join("; "), "pids = 20") + "nice = -5\n");
    rig.start();
    let tried = orders.len();
    until(&rig, "all is tried", || rig.log().matches("attack ").count() >= tried);
    let log = rig.log();
    for attack in ATTACKS.iter().chain(FILES).map(|(_, attack)| *attack).chain(["create"]) {
        let tried = format!("attack {attack}: ");
        let said: Vec<&str> = log.lines().filter_map(|line| line.split_once(&tried)).map(|(_, said)| said).collect();
        assert!(!said.is_empty() && said.iter().all(|said| said.starts_with("refused")), "{attack}: {said:?}\n{log}");
        // An attack whose target does not exist would prove nothing.
        assert!(!said.iter().any(|said| said.contains("No such file")), "{attack}: {said:?}");
    }
    let (green, red) = (pid(&rig.await_worker("green", "idle")), pid(&rig.await_worker("red", "idle")));
    assert!(red == victim && lives(victim), "the victim goes on");
    assert_eq!(status(victim, "limits"), limits);
    // Each node has users, groups and capabilities of its own, or none.
    let of = |pid: u32, field: &str| {
        status(pid, "status")
            .lines()
            .find_map(|line| line.strip_prefix(field))
            .map(|value| value.trim().to_owned())
            .expect("a field")
    };
    assert_ne!(of(green, "Uid:"), of(red, "Uid:"));
    assert_eq!((of(green, "Groups:").as_str(), of(green, "CapBnd:").as_str()), ("", "0000000000000000"));
    let network = |pid: u32| std::fs::read_link(format!("/proc/{pid}/ns/net")).expect("a process");
    assert!(network(green) != network(red) && network(red) != network(std::process::id()));
    assert!(rig.ask(&["stop"]).contains("ended"));
}

/// Forks without end, row: T116, and uses memory without end, row: T116
#[test]
fn a_program_that_takes_all_there_is_harms_its_own_node() {
    need_hostile!();
    let (mut rig, victim) = with_victim();
    rig.kill_daemon();
    let bombs = hostile("green", "first forks", "pids = 20") + &hostile("blue", "first memory 512", "memory_mib = 64");
    rig.configure(|text| text + &bombs);
    rig.start();
    until(&rig, "it has no more children", || rig.log().contains("attack forks: refused"));
    until(&rig, "it has no more memory", || {
        let events = rig.ask(&["events"]);
        let why =
            "of node blue was killed by signal 9: the kernel found no memory for it, of which node blue may use 64 MiB";
        events.lines().any(|line| line.contains(why))
    });
    assert!(!rig.log().contains("attack memory: done"), "{}", rig.log());
    assert_eq!(pid(&rig.await_worker("red", "idle")), victim, "the victim goes on");
    // Its children run as the node's own user, and end with it.
    let user =
        std::fs::metadata(format!("/proc/{}", pid(&rig.await_worker("green", "idle")))).expect("a process").uid();
    assert!(count_of(user) > 1);
    assert!(rig.ask(&["stop"]).contains("ended"));
    until(&rig, "its children are gone", || count_of(user) == 0);
}

/// row: T117
#[test]
fn a_program_that_writes_without_end_is_cut_short_and_counted() {
    need_hostile!();
    let (mut rig, victim) = with_victim();
    rig.kill_daemon();
    rig.configure(|text| text + &hostile("green", "first fill-log 200000", "pids = 20"));
    rig.start();
    // A worker that has begun has written everything; the daemon counts the lines it left out when the worker ends.
    rig.await_worker("green", "idle");
    assert_eq!(pid(&rig.await_worker("red", "idle")), victim, "the victim goes on");
    assert!(rig.ask(&["stop"]).contains("ended"));
    rig.daemon_ends();
    let log = rig.log();
    let lines = log.matches("filling").count();
    assert!(lines < 2000, "{lines} lines");
    assert!(log.contains("lines are left out: it writes more than tasukid logs"), "{log}");
    assert!(!log.contains('\x1b'), "a terminal would obey that");
}

/// (row of the threat model, node, output to standard error and its amount)
const WRITES: &[(&str, &str, &str)] = &[
    ("T117", "green", "log-long 4000000"),
    ("T117", "blue", "log-bytes 400000"),
    ("T117", "pink", "log-forged 5000"),
    ("T117", "grey", "log-empty 50000"),
];

/// rows: in the table
#[test]
fn what_a_program_writes_is_its_own_and_no_terminal_obeys_it() {
    need_hostile!();
    let (mut rig, victim) = with_victim();
    rig.kill_daemon();
    let before = rig.log().len();
    let nodes: String =
        WRITES.iter().map(|(_, node, order)| hostile(node, &format!("first {order}"), "pids = 20")).collect();
    rig.configure(|text| text + &nodes);
    rig.start();
    for (_, node, _) in WRITES {
        rig.await_worker(node, "idle");
    }
    assert_eq!(pid(&rig.await_worker("red", "idle")), victim, "the victim goes on");
    assert!(rig.ask(&["stop"]).contains("ended"));
    rig.daemon_ends();
    let log = rig.log();
    assert!(log.len() - before < 1 << 20, "{} bytes", log.len() - before);
    let obeyed = |c: char| c.is_control() && c != '\n' || c == '\u{2028}';
    assert!(!log.contains(obeyed), "{:?}", log.lines().find(|line| line.contains(obeyed)));
    // The log attributes forged daemon lines to the program that wrote them.
    let forged = log.lines().filter(|line| line.contains("killed by signal 9"));
    let mut count = 0;
    assert!(forged.inspect(|_| count += 1).all(|line| line.contains("pink")), "{log}");
    assert!(count > 0, "{log}");
}

/// Begun before the runtime has confined the program, row: T115
#[test]
fn a_thread_of_a_program_is_confined_as_the_program_is() {
    need_hostile!();
    let mut rig = Rig::without_daemon(&hostile("red", "first linger", "pids = 8"), "");
    rig.with_stock_workers();
    rig.start();
    let worker = pid(&rig.await_worker("red", "idle"));
    let filters = |task: &Path| {
        let status = std::fs::read_to_string(task.join("status")).expect("a thread");
        let number = status.lines().find_map(|line| line.strip_prefix("Seccomp_filters:")).expect("a number");
        number.trim().parse::<u32>().expect("a number")
    };
    let ours = filters(Path::new("/proc/self"));
    let tasks = std::fs::read_dir(format!("/proc/{worker}/task")).expect("a process").flatten();
    let tasks: Vec<u32> = tasks.map(|task| filters(&task.path()) - ours).collect();
    assert_eq!(tasks, [2, 2], "that of the jail, and that of the runtime");
    rig.stop();
}

/// A program may read the files that its node's configuration names, and start threads where the configuration
/// allows them, also once its runtime has confined it. Any other file, row: T113
#[test]
fn a_program_has_the_files_and_threads_that_are_configured_and_no_other() {
    need_hostile!();
    let (mut rig, victim) = with_victim();
    rig.kill_daemon();
    std::fs::set_permissions(rig.path(""), Permissions::from_mode(0o755)).expect("a mode");
    let (list, other) = (rig.path("list"), rig.path("other"));
    for file in [&list, &other] {
        std::fs::write(file, "192.0.2.1").expect("a file");
        std::fs::set_permissions(file, Permissions::from_mode(0o644)).expect("a mode");
    }
    let program = beside("examples/hostile").expect("looked for before");
    // The calls of x86-64's musl.
    let old = if cfg!(target_arch = "x86_64") { &["open-old", "look-old"][..] } else { &[] };
    let tries = |when: &str| {
        let old: String = old.iter().map(|call| format!("; {when} {call} {}", list.display())).collect();
        format!("{when} read {}; {when} open {}; {when} thread{old}", list.display(), other.display())
    };
    let orders = format!("{}; {}", tries("first"), tries("then"));
    let more = format!("files = [{list:?}], threads = true");
    let work = format!("{{ program = {{ path = {program:?}, options = {orders:?}, {more} }} }}");
    rig.configure(|text| text + &format!("\n[[node]]\nname = \"green\"\nvni = \"lan\"\nwork = {work}\n"));
    rig.start();
    rig.await_worker("green", "drives");
    let log = rig.log();
    let done = ["read", "thread"].iter().chain(old).map(|attack| (*attack, "done"));
    for (attack, said) in done.chain([("open", "refused: Permission denied")]) {
        let count = log.matches(&format!("attack {attack}: {said}")).count();
        assert!(count >= 2 && count == log.matches(&format!("attack {attack}: ")).count(), "{attack}\n{log}");
    }
    assert!(lives(victim) && rig.ask(&["stop"]).contains("ended"));
}

/// A program asks for the CPU of another node, row: T111
#[test]
fn a_program_runs_on_no_other_nodes_cpu() {
    need_hostile!();
    let ours = rustix::thread::sched_getaffinity(None).expect("a thread");
    let cpus: Vec<usize> = (0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| ours.is_set(cpu)).collect();
    let [its, others, ..] = cpus[..] else { return println!("skipped: needs two CPUs") };
    let is_there = |file: &str, word: &str| std::fs::read_to_string(file).is_ok_and(|text| text.contains(word));
    if !is_there("/proc/mounts", "cpuset") && !is_there("/sys/fs/cgroup/cgroup.controllers", "cpuset") {
        return println!("skipped: needs a control group for CPUs (cpuset)");
    }
    let (mut rig, _) = with_victim();
    rig.configure(|text| text.replace("name = \"red\"\n", &format!("name = \"red\"\ncpu = {others}\n")));
    rig.ask(&["apply"]);
    let victim = pid(&rig.await_worker("red", "idle"));
    rig.kill_daemon();
    let tries = format!("first other-cpu {others}; first other-cpu {its}");
    rig.configure(|text| text + &hostile("green", &tries, "pids = 20") + &format!("cpu = {its}\n"));
    rig.start();
    until(&rig, "both are tried", || rig.log().matches("attack other-cpu: ").count() >= 2);
    let log = rig.log();
    assert!(log.contains("attack other-cpu: refused") && log.contains("attack other-cpu: done"), "{log}");
    let green = i32::try_from(pid(&rig.await_worker("green", "idle"))).ok().and_then(rustix::process::Pid::from_raw);
    let allowed = rustix::thread::sched_getaffinity(green).expect("a process");
    assert!(!allowed.is_set(others), "{allowed:?}");
    assert!(lives(victim) && rig.ask(&["stop"]).contains("ended"));
}

/// A user id that no user of the machine has.
const NOBODYS: u32 = 61_237;

/// A daemon of a user that is not root, in the directory of this rig.
struct Theirs(Rig);

impl Theirs {
    fn new() -> Self {
        let rig = Rig::without_daemon("", "");
        std::fs::set_permissions(rig.path(""), Permissions::from_mode(0o755)).expect("a mode");
        for name in ["tasukid", "tasuki", "tasuki-worker"] {
            tasuki_testing::copy(beside(name).expect("it was built"), rig.path(name));
        }
        std::fs::create_dir(rig.path("theirs")).expect("a folder");
        std::os::unix::fs::chown(rig.path("theirs"), Some(NOBODYS), Some(NOBODYS)).expect("root may");
        Theirs(rig)
    }

    /// Returns whether this program succeeds, and what it says.
    fn run(&self, name: &str, words: &[&str]) -> (bool, String) {
        let mut command = Command::new(self.0.path(name));
        command.uid(NOBODYS).gid(NOBODYS).env_remove("NOTIFY_SOCKET").arg("--dir").arg(self.0.path("theirs"));
        let output = command.args(words).stdin(Stdio::null()).output().expect("a program");
        let said = [&output.stdout[..], &output.stderr].concat();
        (output.status.success(), String::from_utf8_lossy(&said).into_owned())
    }

    fn begin(&self, text: &str) -> (bool, String) {
        let config = self.0.path("theirs.toml");
        std::fs::write(&config, text).expect("a file");
        std::fs::set_permissions(&config, Permissions::from_mode(0o644)).expect("a mode");
        self.run("tasukid", &["--config", config.to_str().expect("text")])
    }
}

impl Drop for Theirs {
    /// Root sees them all, and ends those that are left.
    fn drop(&mut self) {
        let processes = std::fs::read_dir("/proc").expect("processes").flatten();
        let is_its = |process: &std::fs::DirEntry| {
            std::fs::read_link(process.path().join("exe")).is_ok_and(|program| program.starts_with(self.0.path("")))
        };
        let left = { processes }.filter(is_its).filter_map(|process| process.file_name().to_str()?.parse().ok());
        left.for_each(|pid| signal(pid, Signal::KILL));
    }
}

/// The error says what to write into the configuration; with that written, it says which confinement is then
/// missing.
///
/// rows: none, for it is no attack
#[test]
fn a_tasukid_that_is_not_roots_begins_only_where_it_is_told_that_less_will_do() {
    need_hostile!();
    let theirs = Theirs::new();
    let (begins, said) = theirs.begin(VICTIM);
    assert!(!begins && said.lines().count() == 1, "{said}");
    assert!(said.contains("start tasukid as root, or write confine = \"best-effort\" under [daemon]"), "{said}");
    let (begins, said) = theirs.begin(&format!("{BEST_EFFORT}{VICTIM}"));
    assert!(begins, "{said}");
    until(&theirs.0, "it says what does not hold", || {
        theirs.run("tasuki", &["status"]).1.contains("it has tasukid's own user and network")
    });
    until(&theirs.0, "its worker serves", || theirs.run("tasuki", &["worker", "list"]).1.contains("idle"));
    assert!(theirs.run("tasuki", &["stop"]).0);
}

const BEST_EFFORT: &str = "[daemon]\nconfine = \"best-effort\"\n";

/// rows: none, for it is no attack
#[test]
fn a_tasukid_from_which_its_workers_are_hidden_ends_none_of_them() {
    need_hostile!();
    let hides = "mount -t proc -o hidepid=2 proc /proc && exec \"$@\"";
    let under = ["unshare", "--mount", "sh", "-c", hides, "sh"];
    if !alone_under(&under, a_tasukid_from_which_its_workers_are_hidden_ends_none_of_them) {
        return;
    }
    let theirs = Theirs::new();
    let (begins, said) = theirs.begin(&format!("{BEST_EFFORT}{VICTIM}"));
    assert!(begins, "{said}");
    let list = |what: &str| -> serde_json::Value {
        serde_json::from_str(&theirs.run("tasuki", &["--json", what, "list"]).1).unwrap_or_default()
    };
    until(&theirs.0, "its worker serves", || list("worker")[0]["is"] == "idle");
    let worker = pid(&list("worker")[0]);
    let (is_replaced, said) = theirs.run("tasuki", &["upgrade"]);
    assert!(!is_replaced && said.contains("tasukid stays what it is: /proc hides process"), "{said}");
    let status: serde_json::Value =
        serde_json::from_str(&theirs.run("tasuki", &["--json", "status"]).1).expect("an answer");
    signal(pid(&status), Signal::KILL);
    until(&theirs.0, "it is dead", || !lives(pid(&status)));
    let (begins, said) = theirs.begin(&format!("{BEST_EFFORT}{VICTIM}"));
    assert!(!begins && said.contains("/proc hides process"), "{said}");
    assert!(lives(worker), "{said}");
}
