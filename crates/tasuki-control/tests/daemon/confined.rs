//! What a node's program tries against others before any runtime of ours has confined it: under what tasukid has set (stage one). docs/design/threat-model.md has a row for each.

use std::os::unix::fs::MetadataExt;

use super::rig::{Rig, lives, pid, until};
use super::storm::beside;

/// A stock node, and what becomes of it is asked.
const VICTIM: &str = r#"
[[node]]
name = "red"
work = "echo"
"#;

/// A node whose program tries `options`, with these bounds.
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

/// A daemon with a victim that has begun.
fn with_victim() -> (Rig, u32) {
    let mut rig = Rig::without_daemon(VICTIM, "");
    rig.with_stock_workers();
    rig.start();
    let victim = pid(&rig.await_worker("red", "idle"));
    (rig, victim)
}

/// Processes of a user.
fn count_of(user: u32) -> usize {
    let processes = std::fs::read_dir("/proc").expect("processes").flatten();
    processes.filter(|process| process.metadata().is_ok_and(|meta| meta.uid() == user)).count()
}

fn status(pid: u32, file: &str) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/{file}")).expect("a process")
}

#[test]
fn a_program_that_reaches_for_others_before_it_is_a_worker_is_refused() {
    need_hostile!();
    let (mut rig, victim) = with_victim();
    let limits = status(victim, "limits");
    let (registry, api) = (rig.dir().join("registry.redb"), rig.dir().join("api.sock"));
    let attacks = [
        "kill",
        "kill-all",
        "queue",
        "pidfd",
        "ptrace",
        "read-memory",
        "prlimit",
        "setown",
        "setsig",
        "async",
        "notify",
        "lease",
        "renice",
        "renice-user",
        "affinity",
        "unix-socket",
        "tcp",
        "netlink",
        "vsock",
        "datagrams",
        "namespace",
        "clone-namespace",
        "mount",
        "bpf",
        "io-uring",
        "userfaultfd",
        "keys",
        "perf",
        "shared-memory",
        "root",
        "truncate-log",
    ];
    let mut orders: Vec<String> = attacks.iter().map(|attack| format!("first {attack} {victim}")).collect();
    let files = [
        "/etc/passwd".into(),
        registry,
        api,
        format!("/proc/{victim}/mem").into(),
        format!("/proc/{victim}/environ").into(),
    ];
    orders.extend(files.iter().map(|file: &std::path::PathBuf| format!("first open {}", file.display())));
    orders.push(format!("first create {}", rig.path("made").display()));
    // The daemon that knows of the hostile node is another one, which takes over the victim.
    rig.kill_daemon();
    rig.configure(|text| text + &hostile("green", &orders.join("; "), "pids = 20"));
    rig.start();
    let tried = attacks.len() + files.len() + 1;
    until(&rig, "all is tried", || rig.log().matches("attack ").count() >= tried);
    let log = rig.log();
    for attack in attacks.iter().chain(&["open", "create"]) {
        assert!(log.contains(&format!("attack {attack}: refused")), "{attack}\n{log}");
        assert!(!log.contains(&format!("attack {attack}: done")), "{attack}\n{log}");
    }
    let (green, red) = (pid(&rig.await_worker("green", "idle")), pid(&rig.await_worker("red", "idle")));
    assert!(red == victim && lives(victim), "the victim goes on");
    assert_eq!(status(victim, "limits"), limits);
    // Of users, groups and capabilities, each node has its own or none.
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
        events.lines().any(|line| line.contains("of node blue was killed by signal 9"))
    });
    assert!(!rig.log().contains("attack memory: done"), "{}", rig.log());
    assert_eq!(pid(&rig.await_worker("red", "idle")), victim, "the victim goes on");
    // Its children are of its node's user, which is nobody else's, and end with it.
    let user =
        std::fs::metadata(format!("/proc/{}", pid(&rig.await_worker("green", "idle")))).expect("a process").uid();
    assert!(count_of(user) > 1);
    assert!(rig.ask(&["stop"]).contains("ended"));
    until(&rig, "its children are gone", || count_of(user) == 0);
}

#[test]
fn a_program_that_writes_without_end_is_cut_short_and_counted() {
    need_hostile!();
    let (mut rig, victim) = with_victim();
    rig.kill_daemon();
    rig.configure(|text| text + &hostile("green", "first fill-log 200000", "pids = 20"));
    rig.start();
    // Who has begun has written all; what was left out in the end is counted when it ends.
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
