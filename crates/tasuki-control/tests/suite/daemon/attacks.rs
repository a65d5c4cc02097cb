//! Hostile messages and writes of a worker against the real daemon. The worker loses its life, and no other process
//! loses anything.
//!
//! Attacks of docs/design/threat-model.md.

use std::fs;

use serde_json::Value;

use super::real;
use super::rig::{NODES, Rig, group, lives, pid, until};

/// Starts nodes whose workers execute the attacks that a test writes for them.
fn rig() -> Rig {
    let rig = Rig::with(NODES, "attacks");
    rig.await_pair("red");
    rig
}

/// Makes one worker of a node execute `lines`: its driver, a spare, or any.
fn attack(rig: &Rig, node: &str, by: &str, lines: &str) {
    let aside = rig.path("attack.new");
    fs::write(&aside, format!("{by}\n{lines}\n")).expect("a file");
    fs::rename(aside, rig.path(&format!("attack.{node}"))).expect("a name");
}

fn party(worker: &Value) -> u64 {
    worker["worker"].as_u64().or_else(|| worker["party"].as_u64()).expect("a number")
}

fn of(rig: &Rig, node: &str) -> Vec<u32> {
    rig.workers().iter().filter(|worker| worker["node"] == node).map(pid).collect()
}

/// Makes green, which has no NIC, say `lines` of red's. The daemon ends green's worker, and red goes on unharmed.
fn green_says(lines: &str, event: &str) {
    let rig = rig();
    let green = rig.await_worker("green", "idle");
    let (driver, standby) = rig.await_pair("red");
    attack(&rig, "green", "any", lines);
    rig.await_event(event);
    until(&rig, "the liar is gone", || !lives(pid(&green)));
    let (drives, stands_by) = rig.await_pair("red");
    assert_eq!((pid(&drives), pid(&stands_by)), (pid(&driver), pid(&standby)), "{lines}\n{}", rig.log());
    // Its node is unharmed.
    let next = rig.await_worker("green", "idle");
    assert_ne!(pid(&next), pid(&green));
}

/// rows: in the table
#[test]
fn any_report_of_a_nic_that_a_worker_was_not_given_costs_that_worker_its_life() {
    for (_, said) in [
        ("T41", "ready"),
        ("T41", "unfit"),
        ("T41", "released"),
        ("T41", "kept"),
        ("T41", "taken"),
        ("T41", "lost"),
        ("T41", "failed"),
        ("T41", "replaced"),
    ] {
        green_says(&format!("{said} 0 1"), "speaks of NIC 0, which it was not given");
    }
}

/// row: T43
#[test]
fn no_worker_says_that_another_is_fenced() {
    let rig = rig();
    let (driver, standby) = rig.await_pair("red");
    let liar = rig.await_worker("green", "idle");
    attack(&rig, "green", "any", &format!("fenced 0 {}", party(&driver)));
    rig.await_event("breaks the protocol");
    until(&rig, "the liar is gone", || !lives(pid(&liar)));
    let (drives, stands_by) = rig.await_pair("red");
    assert_eq!((pid(&drives), pid(&stands_by)), (pid(&driver), pid(&standby)), "{}", rig.log());
}

/// A worker writes the number of another node's worker into its own lease word, and reports that it has let go. It
/// does so as often as its node gets new workers.
///
/// row: T44
#[test]
fn a_lease_word_that_names_another_nodes_worker_harms_nobody_there() {
    let rig = rig();
    let victim = rig.await_worker("green", "idle");
    for _ in 0..3 {
        let (driver, standby) = rig.await_pair("red");
        let epoch = rig.nic()["epoch"].as_u64().expect("an epoch");
        let lines = format!("word 0 {} {epoch}\nreleased 0 {epoch}", party(&victim));
        attack(&rig, "red", "driver", &lines);
        // The daemon ends all workers that can have written the word.
        until(&rig, "the writers are gone", || !lives(pid(&driver)) && !lives(pid(&standby)));
    }
    rig.await_pair("red");
    assert_eq!(rig.nic()["is"], "driven");
    assert_eq!(pid(&rig.await_worker("green", "idle")), pid(&victim), "{}", rig.log());
}

/// rows: in the table
#[test]
fn a_worker_that_says_what_its_state_does_not_allow_is_ended() {
    for (_, by, said) in [
        ("T42", "driver", "ready 0"),
        ("T42", "driver", "unfit 0"),
        ("T42", "spare", "unfit 0"),
        ("T42", "spare", "taken 0 1000"),
    ] {
        let rig = rig();
        let (driver, standby) = rig.await_pair("red");
        let liar = if by == "driver" { &driver } else { &standby };
        attack(&rig, "red", by, said);
        rig.await_event("made a report about eth0 that it had no right to make");
        until(&rig, "the liar is gone", || !lives(pid(liar)));
        rig.await_pair("red");
        assert_eq!(rig.nic()["is"], "driven", "{}", rig.log());
    }
}

/// Green has two NICs and trusts no node. It gives one away. After that no process is left that ever had that NIC,
/// least of all its stand-by. The new owner's stand-by comes from its own node.
///
/// row: T51
#[test]
fn no_process_of_the_old_node_is_left_when_a_stranger_has_its_nic() {
    let nodes = NODES.replace("node = \"red\"\n", "node = \"green\"\n")
        + "[[nic]]\nname = \"eth1\"\ndevice = \"vfio-user:/nowhere/other.sock\"\nnode = \"green\"\n";
    let rig = Rig::with(&nodes, "");
    rig.await_pair("green");
    let ready = |nic: &Value| nic["is"] == "driven";
    until(&rig, "both are driven", || rig.json(&["nic", "list"]).as_array().expect("a list").iter().all(ready));
    until(&rig, "green has two workers", || of(&rig, "green").len() == 2);
    let before = of(&rig, "green");
    rig.ask(&["nic", "give", "eth0", "--to", "red"]);
    until(&rig, "those that had it are dead", || before.iter().all(|pid| !lives(*pid)));
    until(&rig, "eth1 stays with green", || {
        let nics = rig.json(&["nic", "list"]);
        let eth1 = nics.as_array().expect("a list").iter().find(|nic| nic["name"] == "eth1").expect("it").clone();
        eth1["is"] == "driven" && eth1["node"] == "green"
    });
    // Its driver dies: another worker of red takes over, and none of green's.
    let driver = rig.await_worker("red", "drives");
    super::rig::signal(pid(&driver), rustix::process::Signal::KILL);
    until(&rig, "red drives eth0 again", || {
        let nics = rig.json(&["nic", "list"]);
        let eth0 = nics.as_array().expect("a list").iter().find(|nic| nic["name"] == "eth0").expect("it").clone();
        eth0["is"] == "driven" && eth0["node"] == "red" && eth0["worker"] != driver["worker"]
    });
    // The new driver of eth1 was there before the fence, for it never had eth0.
    let events = rig.ask(&["events"]);
    let fence = events.find("is kept from eth0 for good").expect("an event");
    let takes = events[fence..].split("eth1 is driven by worker ").nth(1);
    let worker = takes.and_then(|rest| rest.split(' ').next()).unwrap_or_else(|| panic!("{events}"));
    assert!(events[..fence].contains(&format!("worker {worker} of node green has begun")), "{events}");
    assert!(
        !events[fence..].lines().any(|line| line.contains("eth0 is driven by") && line.contains("green")),
        "{events}"
    );
}

/// A worker can lend its descriptors to a process that it starts, which is not a stand-by of the daemon.
///
/// row: T51
#[test]
fn what_a_worker_has_started_is_fenced_with_it() {
    let rig = Rig::with(&NODES.replace("node = \"red\"\n", "node = \"green\"\n"), "");
    rig.await_pair("green");
    if !fs::read_to_string("/proc/mounts").is_ok_and(|mounts| mounts.contains(" cgroup2 ")) {
        return println!("skipped: without control groups of version 2 a worker's processes are not known");
    }
    let honest = rig.program("honest", "");
    let with = rig.path("starts-another");
    let script = format!("sleep 1003 & echo $! >> {}\nexec {} \"$@\"", rig.path("others").display(), honest.display());
    tasuki_testing::script(&with, &script);
    rig.ask(&["worker", "upgrade", "green", "--with", &with.to_string_lossy()]);
    // Ignore the child of the old stand-by's successor while that worker prepares.
    let is_new = |is: &str| rig.worker("green", is).is_some_and(|worker| worker["generation"] == 1);
    until(&rig, "both are of the new program", || is_new("drives") && is_new("stands by"));
    let others = || -> Vec<u32> {
        let text = fs::read_to_string(rig.path("others")).expect("a file");
        text.lines().map(|pid| pid.parse().expect("a number")).collect()
    };
    let started = others();
    assert!(started.len() >= 2 && started.iter().all(|pid| lives(*pid)), "{started:?}");
    rig.ask(&["nic", "give", "eth0", "--to", "red"]);
    until(&rig, "they are dead", || started.iter().all(|pid| !lives(*pid)));
    rig.ask(&["stop"]);
    until(&rig, "what a worker starts ends with it", || others().iter().all(|pid| !lives(*pid)));
}

/// Has each worker with this fault start another process first, and write down its number.
fn starts_another(rig: &Rig, fault: &str) {
    let program = rig.program("program", fault);
    let start = format!("[ \"$1\" = worker ] && {{ sleep 1003 & echo $! >> {}; }}", rig.path("others").display());
    tasuki_testing::script(&rig.path("worker"), &format!("{start}\nexec {} \"$@\"", program.display()));
}

/// Returns the process that this worker has started, or `None` on a machine where that is not known.
fn started_by(rig: &Rig, worker: &Value) -> Option<u32> {
    let Some(its) = group(pid(worker)) else {
        println!("skipped: without control groups of version 2 a worker's processes are not known");
        return None;
    };
    let text = fs::read_to_string(rig.path("others")).expect("a file");
    let mut started = text.lines().map(|pid| pid.parse().expect("a number"));
    Some(started.find(|pid| lives(*pid) && group(*pid).as_ref() == Some(&its)).expect("it has started one"))
}

/// The old owner's driver dies in place of a release. The daemon dies when it tells the new owner to take.
///
/// row: T51
#[test]
fn what_a_driver_has_started_that_dies_by_itself_runs_nothing_when_a_stranger_takes() {
    let mut rig = Rig::without_daemon(&NODES.replace("node = \"red\"\n", "node = \"green\"\n"), "");
    starts_another(&rig, "dies-at-release");
    // Green takes the NIC first.
    rig.start_to_die(Some("daemon.take:2".to_owned()));
    until(&rig, "tasukid serves", || rig.tasuki(&["status"]).status.success());
    let (driver, _) = rig.await_pair("green");
    rig.await_worker("red", "idle");
    let Some(started) = started_by(&rig, &driver) else { return };
    let _ = rig.tasuki(&["nic", "give", "eth0", "--to", "red"]);
    rig.daemon_ends();
    assert!(!lives(pid(&driver)), "it died in place of a release");
    // A process that has its signal is dead a moment later, and there is no daemon that would send one.
    until(&rig, "it is dead", || !lives(started));
    rig.start();
    rig.stop();
}

/// The next daemon finds no worker to fence, or one whose node is gone.
///
/// row: T51
#[test]
fn what_a_worker_has_started_that_dies_without_a_daemon_ends_when_one_is_there() {
    let mut rig = Rig::without_daemon(&NODES.replace("trusts = [\"blue\"]\n", ""), "");
    starts_another(&rig, "");
    rig.start();
    let (driver, standby) = rig.await_pair("red");
    let (green, blue) = (rig.await_worker("green", "idle"), rig.await_worker("blue", "idle"));
    let all = [&driver, &standby, &blue, &green].map(|worker| started_by(&rig, worker));
    let [Some(drivers), Some(standbys), Some(blues), Some(greens)] = all else { return };
    rig.kill_daemon();
    [&driver, &standby].into_iter().for_each(|worker| rig.kill(worker));
    rig.configure(|text| text.replace("[[node]]\nname = \"blue\"\nwork = \"sink\"\ntrusts = [\"red\"]\n", ""));
    rig.start();
    until(&rig, "they are dead", || [drivers, standbys, blues].iter().all(|pid| !lives(*pid)));
    rig.await_event("had started other processes: they were ended");
    assert!(lives(greens) && lives(pid(&green)), "another goes on");
    rig.await_pair("red");
    rig.stop();
}

/// The daemon dies when the taker is ready. To the next one, all workers that do not drive say that they have no NIC.
///
/// row: T54
#[test]
fn a_stranger_that_says_it_does_not_have_what_it_was_to_get_is_ended() {
    let mut rig = Rig::without_daemon(NODES, "conceals");
    rig.start_to_die(Some("daemon.planned:1".to_owned()));
    until(&rig, "tasukid serves", || rig.tasuki(&["status"]).status.success());
    let (driver, standby) = rig.await_pair("red");
    let (friend, stranger) = (rig.await_worker("blue", "idle"), rig.await_worker("green", "idle"));
    let _ = rig.tasuki(&["nic", "give", "eth0", "--to", "green"]);
    rig.daemon_ends();
    rig.start();
    until(&rig, "it is dead", || !lives(pid(&stranger)));
    let (drives, _) = rig.await_pair("red");
    assert_eq!(pid(&drives), pid(&driver));
    assert!(lives(pid(&standby)) && lives(pid(&friend)), "they may have it\n{}", rig.log());
    rig.stop();
}

/// A taker refuses a card in which only a reset undoes the last owner's traces, or from which frames come too early.
/// The NIC then goes to it by `cold`, from a state without a driver. All workers of its old node are fenced, and it
/// does not get the NIC back in between.
///
/// row: T55
#[test]
fn a_card_that_its_taker_refuses_goes_there_by_the_next_method() {
    for (fault, found) in [("finds-left", "only a reset undoes (0x2)"), ("finds-frames", "frames came before")] {
        let rig = Rig::with(NODES, fault);
        let (driver, standby) = rig.await_pair("red");
        rig.await_worker("green", "idle");
        let said = rig.json(&["nic", "give", "eth0", "--to", "green"]);
        let relay = &said["relays"][0];
        assert_eq!((&relay["done"], &relay["method"], &relay["node"]), (&true.into(), &"cold".into(), &"green".into()));
        let because = relay["because"].as_str().expect("a sentence");
        assert!(because.starts_with("repoint was refused (") && because.contains(found), "{because}");
        assert!(because.ends_with("any card can do it") && !because.contains("; hand it"), "{because}");
        assert!(!lives(pid(&driver)) && !lives(pid(&standby)), "{}", rig.log());
        let events = rig.ask(&["events"]);
        let refused = events.find("refuses eth0 by repoint (").unwrap_or_else(|| panic!("{events}"));
        assert!(
            !events[refused..].contains("of node red, after") && !events[refused..].contains("stays with"),
            "{events}"
        );
        rig.await_pair("green");
        // Its old node has another worker, which does not have the NIC.
        rig.await_worker("red", "idle");
        // A request for that very method is refused with the reason. The NIC stays with its node, whose next worker
        // drives it.
        let said = rig.refused(&["nic", "give", "eth0", "--to", "red", "--method", "repoint"]);
        assert!(said.contains(found), "{said}");
        rig.await_pair("green");
    }
}

/// Returns the seeds of the fuzzing rounds. `TASUKI_FUZZ=FROM..TO` replaces the default.
fn seeds() -> std::ops::Range<u32> {
    let said = std::env::var("TASUKI_FUZZ").ok();
    let parse = |said: String| {
        let (from, to) = said.split_once("..")?;
        Some(from.parse().ok()?..to.parse().ok()?)
    };
    said.map_or(0..24, |said| parse(said).expect("TASUKI_FUZZ=FROM..TO"))
}

/// A driver, a stand-by and a worker without a NIC send in turn the messages of a seed. The daemon lives, and no
/// process of another node is harmed. Their own node gets workers and its NIC again.
///
/// row: T42
#[test]
fn whatever_a_worker_says_and_writes_only_its_own_node_suffers() {
    let mut rig = Rig::without_daemon(NODES, "attacks");
    rig.configure(|text| text.replace("[daemon]\n", "[daemon]\nrestart = \"always\"\n"));
    rig.start();
    rig.await_worker("green", "idle");
    for seed in seeds() {
        println!("seed {seed}");
        let (node, by) = [("green", "any"), ("red", "driver"), ("red", "spare")][seed as usize % 3];
        let (driver, standby) = rig.await_pair("red");
        let green = of(&rig, "green");
        attack(&rig, node, by, &format!("fuzz {seed} 200 0"));
        until(&rig, "it has begun", || !rig.path(&format!("attack.{node}")).exists());
        let liar = || match by {
            "driver" => lives(pid(&driver)),
            "spare" => lives(pid(&standby)),
            _ => green.iter().all(|pid| lives(*pid)),
        };
        until(&rig, "the liar is gone", || !liar());
        let (drives, stands_by) = rig.await_pair("red");
        match node {
            "green" => assert_eq!((pid(&drives), pid(&stands_by)), (pid(&driver), pid(&standby)), "{}", rig.log()),
            _ => assert_eq!(of(&rig, "green"), green, "{}", rig.log()),
        }
        rig.await_worker("green", "idle");
    }
    assert_eq!(rig.nic()["is"], "driven");
    let events = rig.ask(&["events"]);
    assert!(!events.lines().any(|line| line.contains("stays with") && line.contains("nobody is left")), "{events}");
}

/// Two nodes, each with a NIC of its own, whose drivers and stand-bys misbehave at once. Their neighbour gets all
/// its frames back.
///
/// row: T42
#[test]
fn several_liars_at_once_cost_their_neighbour_no_frame() {
    let liars = ["green", "blue"];
    let nodes: String = "[[node]]\nname = \"red\"\nwork = \"echo\"\n\n[[nic]]\nname = \"eth0\"\ndevice = \"vfio-user:/nowhere/card.sock\"\nnode = \"red\"\n".to_owned()
        + &liars.map(|node| format!("[[node]]\nname = \"{node}\"\nwork = {{ program = {{ path = \"LIAR\" }} }}\n\n[[nic]]\nname = \"of-{node}\"\ndevice = \"sim\"\nnode = \"{node}\"\n")).concat();
    let Some((mut rig, model)) = real::with_model(&nodes, &u64::MAX.to_string(), "1000") else { return };
    let liar = rig.program("liar", "attacks");
    rig.configure(|text| {
        let text = text.replace("\"LIAR\"", &format!("{liar:?}")).replace("confine = \"best-effort\"\n", "");
        // The liars are scripts.
        text.replace("[daemon]\n", "[daemon]\nrestart = \"always\"\nconfine = \"off\"\n")
    });
    rig.start();
    let victims = rig.await_pair("red");
    // Stand-ins count turns, not frames.
    let received = || rig.worker("red", "drives").and_then(|worker| worker["received"].as_u64()).unwrap_or(0);
    until(&rig, "frames flow", || received() > 0);
    // Each node has two liars, and traffic all the while.
    for seed in seeds().step_by(3) {
        println!("seed {seed}");
        let pairs = liars.map(|node| rig.await_pair(node));
        for (at, node) in (0..).zip(liars) {
            let by = ["driver", "spare"][(seed / 3 + at) as usize % 2];
            attack(&rig, node, by, &format!("fuzz {} 200 {}", 2 * seed + at, 1 + at));
        }
        until(&rig, "both have begun", || liars.iter().all(|node| !rig.path(&format!("attack.{node}")).exists()));
        let is_gone = |(driver, standby): &(Value, Value)| !lives(pid(driver)) || !lives(pid(standby));
        until(&rig, "the liars are gone", || pairs.iter().all(is_gone));
        let (driver, standby) = rig.await_pair("red");
        assert_eq!((pid(&driver), pid(&standby)), (pid(&victims.0), pid(&victims.1)), "{}", rig.log());
    }
    liars.iter().for_each(|node| _ = rig.await_pair(node));
    real::stop_whole(&mut rig, model);
}

/// All stand-ins send these words with an escape sequence and a change of text direction in them.
///
/// row: T26
#[test]
fn words_of_a_worker_reach_people_without_what_a_terminal_obeys() {
    let rig = Rig::new();
    rig.await_pair("red");
    let is_obeyed = |c: char| (c.is_control() && c != '\n') || c == '\u{202e}';
    for (words, part) in
        [(&["nic", "counts", "eth0"][..], "_odd"), (&["worker", "list"], "stand-in"), (&["events"], "eth0")]
    {
        let said = rig.ask(words);
        assert!(!said.contains(is_obeyed), "{said:?}");
        let said = rig.json(words).to_string();
        assert!(said.contains(part) && !said.contains("\\u001b") && !said.contains(is_obeyed), "{said:?}");
    }
    assert!(!rig.log().contains(is_obeyed), "{:?}", rig.log());
}
