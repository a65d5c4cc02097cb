//! tasukid under its systemd unit, with cards behind VFIO and an IOMMU. Runs only in the guest that `cargo xtask
//! guest` boots.
//!
//! The guest has Debian's systemd, the unit of contrib/systemd, and an 82574L (QEMU's e1000e) and a virtio-net. A
//! card's partner is this program, which sends numbered frames and counts those that come back. Workers are confined
//! strictly.
#![allow(clippy::tests_outside_test_module, reason = "an integration test")]

#[path = "guest/hostile.rs"]
mod hostile;
#[path = "guest/package.rs"]
mod package;
#[path = "../../tasuki-net/tests/guest/behind_vfio/serial.rs"]
#[allow(dead_code, reason = "the drivers' tests use the rest")]
mod serial;
#[path = "guest/traffic.rs"]
mod traffic;
#[path = "guest/unit.rs"]
mod unit;
#[path = "guest/uplink.rs"]
mod uplink;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use traffic::{Outcome, Traffic};
use unit::{Unit, ask, group, kill, lives, log, property, run};

/// Items that `serial` uses of the drivers' tests.
mod wait {
    use std::time::{Duration, Instant};

    /// Longest time for anything: the guest is emulated.
    pub const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

    /// Waits until `ask` returns a value.
    pub fn until<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        loop {
            if let Some(answer) = ask() {
                return answer;
            }
            assert!(Instant::now() < deadline, "{what}: not within {WAIT_TIMEOUT:?}\n{}", crate::log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
use wait::until;

/// Two nodes that trust each other, and one that no node trusts.
const NODES: &str = r#"
[[node]]
name = "red"
work = "echo"
trusts = ["blue"]

[[node]]
name = "blue"
work = "echo"
trusts = ["red"]

[[node]]
name = "green"
work = "echo"
"#;

/// The wires of both cards.
const WIRES: [&str; 2] = ["e1000e", "virtio_net"];

/// Frames that a killed worker may have sent already and its successor sends again: a burst for each card.
const BURST: u32 = 32;

#[track_caller]
fn assert_none_lost(what: &str, outcomes: &[Outcome], again: u32) {
    for (wire, outcome) in WIRES.iter().zip(outcomes) {
        println!("{what}, {wire}: {outcome:?}");
        assert_eq!(outcome.lost, 0, "{what} loses frames of {wire}: {outcome:?}\n{}", log());
        assert!(outcome.again <= again, "{what} has frames of {wire} come again: {outcome:?}");
    }
}

fn traffic() -> Vec<Traffic> {
    WIRES.into_iter().map(Traffic::begin).collect()
}

fn finish(traffic: Vec<Traffic>) -> Vec<Outcome> {
    traffic.into_iter().map(Traffic::finish).collect()
}

#[test]
fn the_unit_is_ready_when_tasukid_serves_and_frames_cross() {
    let begun = Instant::now();
    let unit = Unit::begin(NODES);
    assert_eq!((property("ActiveState").as_str(), property("Type").as_str()), ("active", "notify"));
    let status = ask(&["status"]);
    assert_eq!(status["pid"].as_u64(), Some(unit.pid().into()), "tasukid serves when systemd says that it is ready");
    unit.is_at_work();
    println!("both NICs are driven {:?} after systemctl start", begun.elapsed());
    let read = |pid: u32, file: &str| std::fs::read_to_string(format!("/proc/{pid}/{file}")).expect("a process");
    let scores = [unit.pid(), unit.keeper(), unit.workers("red")[0]].map(|pid| read(pid, "oom_score_adj"));
    assert_eq!(scores, ["-500\n", "-500\n", "0\n"], "the kernel spares no worker");
    until("the keeper is in no service that is restarted for it", || {
        read(unit.keeper(), "cgroup").ends_with("/tasuki-nodes.service/held\n").then_some(())
    });
    let traffic = traffic();
    traffic[0].for_a_while();
    assert_none_lost("nothing", &finish(traffic), 0);
    assert_eq!(property("NRestarts"), "0", "systemd has restarted tasukid\n{}", log());
}

/// The page for operators gives the unit's exposure score.
#[test]
fn the_score_of_the_unit_is_what_the_guide_says() {
    let analysis = run("systemd-analyze", &["security", "--no-pager", unit::UNIT]);
    let verdict = analysis.lines().find(|line| line.contains("Overall exposure level")).expect("a verdict");
    println!("{verdict}");
    let score = verdict.split_whitespace().find(|word| word.parse::<f32>().is_ok()).expect("a score");
    let guide = include_str!("../../../docs/users/run-under-systemd.md");
    assert!(
        guide.contains(&format!("gives it {score} ")),
        "docs/users/run-under-systemd.md does not say that the unit's score is {score}"
    );
}

#[test]
fn a_restart_by_systemctl_loses_no_frame_and_no_worker() {
    let unit = Unit::begin(NODES);
    unit.is_at_work();
    let (workers, keeper) = (unit.workers("red"), unit.keeper());
    let traffic = traffic();
    for _ in 0..3 {
        let before = unit.pid();
        run("systemctl", &["restart", unit::UNIT]);
        assert_ne!(unit.pid(), before);
        traffic[0].for_a_while();
    }
    assert_none_lost("systemctl restart", &finish(traffic), 0);
    assert_eq!((unit.workers("red"), unit.keeper()), (workers, keeper), "workers and keeper live on");
}

/// systemd shows what became of a file with a mistake: a reload that fails, and at boot a unit that has failed.
#[test]
fn a_configuration_with_a_mistake_fails_a_reload_and_a_first_start() {
    const FILE: &str = "/etc/tasuki.toml";
    let unit = Unit::begin(NODES);
    unit.is_at_work();
    let (daemon, good) = (unit.pid(), fs::read_to_string(FILE).expect("a file"));
    let fails = |verb: &str| {
        let done = Command::new("systemctl").args([verb, unit::UNIT]).status().expect("it is installed");
        assert!(!done.success(), "systemctl {verb} takes a file with a mistake\n{}", log());
    };
    fs::write(FILE, good.clone() + "colour = 1\n").expect("root may");
    fails("reload");
    let said = run("journalctl", &["--unit", unit::UNIT, "--no-pager", "--lines", "5"]);
    assert!(said.contains("the key `colour` means nothing here"), "{said}");
    fs::write(
        FILE,
        good.clone() + NODES.replace("red", "grey").replace("blue", "brown").replace("green", "black").as_str(),
    )
    .expect("root may");
    run("systemctl", &["reload", unit::UNIT]);
    assert_eq!(ask(&["status"])["nodes"].as_array().map(Vec::len), Some(6), "the reload returned when it was applied");
    assert_eq!(unit.pid(), daemon);
    unit::stop_all();
    fs::write(FILE, "colour = 1\n").expect("root may");
    fails("start");
    assert_eq!((property("ActiveState").as_str(), property("NRestarts").as_str()), ("failed", "0"));
    fs::write(FILE, good).expect("root may");
    run("systemctl", &["start", unit::UNIT]);
    unit.is_at_work();
}

#[test]
fn a_tasukid_that_is_killed_is_back_by_itself() {
    let unit = Unit::begin(NODES);
    unit.is_at_work();
    let workers = unit.workers("red");
    let traffic = traffic();
    let before = unit.pid();
    kill(&[before]);
    until("systemd starts another tasukid", || {
        (property("ActiveState") == "active" && unit.pid() != before).then_some(())
    });
    traffic[0].for_a_while();
    assert_none_lost("SIGKILL of tasukid", &finish(traffic), 0);
    assert_eq!(unit.workers("red"), workers, "workers live on");
}

#[test]
fn worker_stand_by_and_tasukid_killed_together_leave_the_cards_as_they_are() {
    let unit = Unit::begin(NODES);
    unit.is_at_work();
    let keeper = unit.keeper();
    for round in 0..3 {
        let (daemon, mut dead) = (unit.pid(), unit.workers("red"));
        assert_eq!(dead.len(), 2, "a worker and one that stands by");
        let held = cards_of(keeper);
        assert!(held >= 2, "the keeper has both cards");
        let opened = openings();
        let traffic = traffic();
        dead.push(daemon);
        let begun = Instant::now();
        kill(&dead);
        until("all three are dead", || dead.iter().all(|pid| !lives(*pid)).then_some(()));
        assert_eq!(cards_of(keeper), held, "the keeper has the cards when nobody else has them");
        until("systemd starts another tasukid", || {
            (property("ActiveState") == "active" && unit.pid() != daemon).then_some(())
        });
        unit.is_at_work();
        println!("round {round}: both NICs are driven again, with a stand-by, after {:?}", begun.elapsed());
        traffic[0].for_a_while();
        assert_none_lost("a triple fault", &finish(traffic), BURST);
        assert_eq!((unit.keeper(), openings()), (keeper, opened), "the cards were opened anew\n{}", log());
    }
}

/// Returns the number of card descriptors that a process has.
fn cards_of(pid: u32) -> usize {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).expect("a process").flatten();
    descriptors
        .filter(|it| fs::read_link(it.path()).is_ok_and(|to| to == Path::new("anon_inode:[vfio-device]")))
        .count()
}

/// Returns how often a card was opened.
fn openings() -> usize {
    let events = run("tasuki", &["events"]);
    events.lines().filter(|line| line.contains("is open")).count()
}

fn field(pid: u32, name: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("a process");
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_else(|| panic!("no {name}"));
    line.trim_start_matches(':').trim().to_owned()
}

#[test]
fn workers_are_confined_strictly() {
    let unit = Unit::begin(NODES);
    unit.is_at_work();
    for pid in unit.workers("red") {
        let user: u32 = field(pid, "Uid").split_whitespace().next().and_then(|uid| uid.parse().ok()).expect("a user");
        assert!((65536..=99999).contains(&user), "a worker is user {user}");
        for (name, expected) in [
            ("CapEff", "0000000000000000"),
            ("CapBnd", "0000000000000000"),
            ("NoNewPrivs", "1"),
            ("Seccomp", "2"),
            ("Groups", ""),
        ] {
            assert_eq!(field(pid, name), expected, "{name} of a worker");
        }
    }
    // Debian's kernel lacks newer features of landlock; tasukid's own filter bars the rest.
    let workers = ask(&["worker", "list"]);
    for lack in workers
        .as_array()
        .expect("workers")
        .iter()
        .flat_map(|worker| worker["unconfined"].as_array().expect("sentences"))
    {
        let is_landlock = lack.as_str().is_some_and(|lack| lack.contains("this kernel's landlock does not know"));
        assert!(is_landlock, "something does not hold: {lack}");
    }
}

/// A node whose program takes all it can get harms only itself.
#[test]
fn nodes_have_bounds_by_control_groups_of_version_2() {
    let hostile = |name: &str, options: &str, bounds: &str| {
        format!(
            "[[node]]\nname = {name:?}\nwork = {{ program = {{ path = \"/usr/bin/hostile\", options = {options:?} }} }}\nbounds = {{ {bounds} }}\n"
        )
    };
    let memory = hostile("greedy", "first memory 256", "memory_mib = 48");
    let forks = hostile("fertile", "first forks", "pids = 20");
    let bounds = "bounds = { memory_mib = 256, pids = 32, cpu = 150 }\n";
    let unit = Unit::begin(&format!("[[node]]\nname = \"red\"\nwork = \"echo\"\n{bounds}{memory}{forks}"));
    unit.is_at_work();
    let (worker, traffic) = (unit.workers("red")[0], traffic());
    let own = group(worker);
    let nodes = own.parent().and_then(Path::parent).expect("a group of nodes").to_owned();
    assert!(own.starts_with("/sys/fs/cgroup/system.slice/tasuki-nodes.service"), "a worker is in {}", own.display());
    let read = |node: &str, file: &str| {
        let file = nodes.join(format!("node-{node}")).join(file);
        fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display())).trim().to_owned()
    };
    for (node, file, expected) in [
        ("red", "memory.max", "268435456"),
        ("red", "pids.max", "32"),
        ("red", "cpu.max", "150000 100000"),
        ("greedy", "memory.max", "50331648"),
        ("fertile", "pids.max", "20"),
    ] {
        assert_eq!(read(node, file), expected, "{file} of node {node}");
    }
    let counted = |node: &str, file: &str, what: &str| {
        let text = read(node, file);
        let count =
            text.lines().find_map(|line| line.strip_prefix(what)).and_then(|count| count.trim().parse::<u64>().ok());
        count.filter(|count| *count > 0)
    };
    let killed = until("the kernel ends who takes too much memory", || counted("greedy", "memory.events", "oom_kill "));
    let refused = until("the kernel refuses one more process", || counted("fertile", "pids.events", "max "));
    println!("{killed} killed for want of memory, {refused} processes refused");
    let daemon = unit.pid();
    traffic[0].for_a_while();
    assert_none_lost("a node that takes all there is", &finish(traffic), 0);
    assert_eq!(
        (unit.workers("red")[0], daemon, property("NRestarts").as_str()),
        (worker, unit.pid(), "0"),
        "others are harmed"
    );
}

/// A tasukid that a shell has started shares a control group with the shell, and bounds its nodes all the same.
#[test]
fn nodes_of_a_tasukid_started_by_hand_have_bounds() {
    unit::stop_all();
    let file = "[[node]]\nname = \"web\"\nwork = \"echo\"\nbounds = { memory_mib = 64, pids = 9, cpu = 50 }\ncpu = 0\n";
    fs::write("/etc/by-hand.toml", file).expect("a file");
    let session = Path::new("/sys/fs/cgroup/session-1.scope");
    fs::create_dir_all(session).expect("root may");
    // The shell stays until its input ends.
    let start = "tasukid --config /etc/by-hand.toml --dir /run/by-hand </dev/null; read end";
    let by_hand = |words: &[&str]| {
        let said = Command::new("tasuki").args(["--dir", "/run/by-hand", "--json"]).args(words).output();
        serde_json::from_slice::<serde_json::Value>(&said.expect("it is installed").stdout).ok()
    };
    let mut before = None;
    // The second one finds the first one's worker, in its group.
    for _ in 0..2 {
        let script = format!("echo $$ > {}/cgroup.procs; {start}", session.display());
        let mut shell = Command::new("sh").args(["-c", &script]).stdin(Stdio::piped()).spawn().expect("a shell");
        let worker = until("a node has a worker", || {
            let workers = by_hand(&["worker", "list"])?;
            let worker = workers.as_array()?.iter().find(|worker| worker["is"] == "idle")?;
            u32::try_from(worker["pid"].as_u64()?).ok()
        });
        assert!(fs::read_to_string(session.join("cgroup.procs")).expect("a group").lines().count() > 1, "it is shared");
        assert_eq!(before.replace(worker).unwrap_or(worker), worker);
        let node = group(worker).parent().expect("a group of the node").to_owned();
        for (bound, value) in [("memory.max", "67108864"), ("pids.max", "9"), ("cpu.max", "50000 100000")] {
            assert_eq!(fs::read_to_string(node.join(bound)).expect("a bound").trim(), value, "{bound} of {node:?}");
        }
        let status = by_hand(&["status"]).expect("an answer");
        assert_eq!(status["nodes"][0]["trouble"], serde_json::Value::Null);
        shell.wait().expect("a child");
        let daemon = u32::try_from(status["pid"].as_u64().expect("a number")).expect("a pid");
        kill(&[daemon]);
        until("it is dead", || (!lives(daemon)).then_some(()));
    }
    run("tasukid", &["--config", "/etc/by-hand.toml", "--dir", "/run/by-hand"]);
    run("tasuki", &["--dir", "/run/by-hand", "stop"]);
}

/// Longest pause of a partner while a card's rings are rewritten (docs/users/move-a-nic.md).
const PAUSE_MAX: Duration = Duration::from_millis(33);

/// Each NIC goes there and back under traffic: by each method that its card has, and once to a node that no
/// other node trusts.
#[test]
fn nics_go_from_node_to_node_by_every_method() {
    let unit = Unit::begin(NODES);
    unit.is_at_work();
    // Traces of a stranger in a virtio device cannot be undone, so it is reset.
    for (wire, nic, to_strangers) in [(WIRES[0], "eth0", "repoint"), (WIRES[1], "eth1", "cold")] {
        for (method, to) in [("keep", "blue"), ("repoint", "blue"), (to_strangers, "green"), ("cold", "blue")] {
            let traffic = Traffic::begin(wire);
            let mut longest = Duration::ZERO;
            for to in [to, "red"] {
                // A giver to a stranger is ended for it, and its node gets another worker.
                unit.has_a_worker(to);
                let relay = ask(&["nic", "give", nic, "--to", to, "--method", method])["relays"][0].clone();
                assert_eq!((&relay["done"], &relay["method"]), (&true.into(), &method.into()), "{relay}");
                longest = longest.max(Duration::from_nanos(relay["pause_ns"].as_u64().expect("a pause")));
                traffic.for_a_while();
            }
            let outcome = traffic.finish();
            println!("{nic} to {to} and back by {method}: nobody drove it for {longest:?}; {outcome:?}");
            let may_lose = match method {
                "keep" => false,
                "repoint" => wire == "virtio_net" || longest > PAUSE_MAX,
                _ => true,
            };
            assert!(may_lose || outcome.lost == 0, "{nic} loses frames by {method} to {to}: {outcome:?}\n{}", log());
            assert_eq!(outcome.again, 0, "{nic} has frames come again by {method} to {to}: {outcome:?}");
        }
    }
    let refused = Command::new("tasuki")
        .args(["nic", "give", "eth0", "--to", "blue", "--method", "mbb"])
        .output()
        .expect("it is installed");
    let sentence = String::from_utf8_lossy(&refused.stderr);
    assert!(
        !refused.status.success() && sentence.contains("mbb"),
        "a card that cannot go by mbb is given so: {sentence}"
    );
}

/// Maximum number of stretches of traffic until an interrupt must have come.
const STRETCHES: usize = 10;

/// Two nodes on a CPU each: no time of the other is taken by a card's interrupts (row: T135).
#[test]
fn the_interrupts_of_a_card_follow_it_to_its_nodes_cpu() {
    let nodes = NODES
        .replace("name = \"red\"", "name = \"red\"\ncpu = 0")
        .replace("name = \"blue\"", "name = \"blue\"\ncpu = 1");
    let unit = Unit::begin(&nodes);
    unit.is_at_work();
    for (wire, nic) in [(WIRES[0], "eth0"), (WIRES[1], "eth1")] {
        for (to, method, cpu) in [("blue", "keep", 1), ("red", "cold", 0), ("blue", "repoint", 1), ("red", "keep", 0)] {
            unit.has_a_worker(to);
            ask(&["nic", "give", nic, "--to", to, "--method", method]);
            let device = ask(&["nic", "list"]);
            let device = device.as_array().expect("NICs").iter().find(|it| it["name"] == nic).expect("it is there");
            let address = device["device"].as_str().and_then(|it| it.strip_prefix("vfio:")).expect("a real card");
            until("its interrupts go to its node's CPU", || {
                let all = interrupts(address);
                let there = |number: &String| {
                    let cpus = fs::read_to_string(format!("/proc/irq/{number}/smp_affinity_list")).unwrap_or_default();
                    cpus.trim() == cpu.to_string()
                };
                (!all.is_empty() && all.iter().all(there)).then_some(())
            });
            // One that was under way may still come to the other CPU.
            let one = Traffic::begin(wire);
            one.for_a_while();
            one.finish();
            let before = counts(address);
            // A worker that does not sleep needs no interrupt: on a slow machine it may not sleep for a whole stretch.
            let mut stretches = 0;
            let (outcome, came) = loop {
                let more = Traffic::begin(wire);
                more.for_a_while();
                let outcome = more.finish();
                let came: Vec<u64> = counts(address).iter().zip(&before).map(|(now, then)| now - then).collect();
                stretches += 1;
                if came[cpu] > 0 || stretches == STRETCHES {
                    break (outcome, came);
                }
            };
            println!("{nic} at {to} by {method}: {came:?} interrupts by CPU; {outcome:?}");
            assert!(came[cpu] > 0, "no interrupt of {nic} came to CPU {cpu}: {came:?}");
            assert_eq!(came[1 - cpu], 0, "interrupts of {nic} came to the other node's CPU: {came:?}");
        }
    }
    assert!(!log().contains("do not follow"), "{}", log());
}

/// Returns the numbers of a card's interrupts.
fn interrupts(address: &str) -> Vec<String> {
    let all = fs::read_dir(format!("/sys/bus/pci/devices/{address}/msi_irqs"));
    let all = all.into_iter().flatten().flatten();
    all.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// Returns how many of a card's interrupts came to each CPU.
fn counts(address: &str) -> [u64; 2] {
    let numbers = interrupts(address);
    let text = fs::read_to_string("/proc/interrupts").expect("a file");
    let mut sum = [0, 0];
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let number = words.next().unwrap_or_default().trim_end_matches(':');
        if numbers.iter().any(|it| it == number) {
            sum.iter_mut().zip(words).for_each(|(sum, count)| *sum += count.parse::<u64>().expect("a count"));
        }
    }
    sum
}
