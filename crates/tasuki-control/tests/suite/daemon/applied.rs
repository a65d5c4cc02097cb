//! A configuration is applied while the daemon runs: what changes, changes, and everything else goes on; also if the
//! daemon dies in the middle.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;
use tasuki_control::config::{Node, StationAddress};
use tasuki_control::registry::{AppliedRecord, Change, Registry};

use super::natives::{assert_exact, flows};
use super::rig::{NODES, Rig, group, lives, pid, signal, until};
use super::rooms::{Exchange, Room};
use super::vnis::{DESK, SHOP, World, of_file};

/// Returns the processes that drive a NIC of each node.
fn drivers(rig: &Rig) -> BTreeMap<String, u32> {
    let workers = rig.workers();
    let driving = workers.iter().filter(|worker| worker["is"] == "drives");
    driving.map(|worker| (worker["node"].as_str().expect("a name").to_owned(), pid(worker))).collect()
}

fn names(rig: &Rig, of: &str) -> Vec<String> {
    let Value::Array(all) = rig.json(&[of, "list"]) else { panic!("a list") };
    all.iter().map(|it| it["name"].as_str().expect("a name").to_owned()).collect()
}

fn configuration(rig: &Rig) -> Value {
    rig.json(&["status"])["configuration"].clone()
}

/// A node with memory for frames, whose length counts when it is made.
const POND: &str = "[[node]]\nname = \"pond\"\nwork = \"sink\"\nvni = \"lan\"\npool_kib = 512\n";

const GREEN: &str = "[[node]]\nname = \"green\"\nwork = \"sink\"\n";

#[test]
fn what_changes_in_the_file_changes_and_the_rest_goes_on() {
    let rig = Rig::new();
    let (before, _) = rig.await_pair("red");
    let blue = rig.await_worker("blue", "idle");
    rig.configure(|text| {
        let text = text.replace(GREEN, "[[node]]\nname = \"grey\"\nwork = \"echo\"\n");
        let text = text.replace("work = \"sink\"\ntrusts", "work = \"sink\"\npoll = true\ntrusts");
        text.replace("work = \"echo\"\ntrusts", "work = \"echo\"\nstandby = false\ntrusts")
    });
    let steps = [
        "node red: standby changes, and its workers go on",
        "node green is removed",
        "node grey is added",
        "node blue: poll changes; a fresh worker takes over while packets flow",
    ];
    let said = rig.ask(&["plan"]);
    assert_eq!(said.lines().take(4).collect::<Vec<_>>(), steps, "{said}");
    let compared = "tasuki.toml was compared with the present configuration (generation 1); nothing was changed";
    assert!(said.contains(compared), "{said}");
    assert_eq!(names(&rig, "node"), ["blue", "green", "red"], "a plan changes nothing");
    let said = rig.ask(&["apply"]);
    assert_eq!(said.lines().take(4).collect::<Vec<_>>(), steps, "{said}");
    assert!(said.ends_with("configuration 2 is applied\n"), "{said}");
    assert_eq!(names(&rig, "node"), ["blue", "grey", "red"]);
    assert_eq!(drivers(&rig)["red"], pid(&before), "its driver has gone on");
    until(&rig, "its stand-by has ended", || rig.worker("red", "stands by").is_none());
    until(&rig, "blue has one fresh worker", || {
        let of_blue: Vec<_> = rig.workers().into_iter().filter(|worker| worker["node"] == "blue").collect();
        of_blue.len() == 1 && pid(&of_blue[0]) != pid(&blue)
    });
    assert!(rig.ask(&["apply"]).contains("configuration 2 is applied already: nothing changes"));
    assert_eq!(configuration(&rig)["generation"], 2);
}

#[test]
fn a_nic_goes_where_the_file_has_it_and_comes_back_from_where_it_was_given_by_hand() {
    let rig = Rig::new();
    rig.await_pair("red");
    rig.await_worker("blue", "idle");
    rig.ask(&["nic", "give", "eth0", "--to", "blue"]);
    let back = "NIC eth0 goes from node blue to node red while packets flow";
    assert_eq!(configuration(&rig)["drift"], serde_json::json!([back]));
    assert!(rig.ask(&["status"]).contains("tasuki.toml would take these steps:"));
    assert!(rig.ask(&["apply"]).contains(back));
    assert_eq!(rig.nic()["node"], "red");
    rig.configure(|text| text.replace("node = \"red\"", "node = \"green\""));
    rig.ask(&["apply"]);
    assert_eq!(rig.nic()["node"], "green", "a stranger to red");
    assert!(rig.is_as_configured());
}

/// Each worker writes what is kept for its NIC.
#[test]
fn what_was_kept_for_a_nic_that_is_gone_is_not_there_for_the_next_one_with_its_number() {
    let mut rig = Rig::with(NODES, "keeps");
    rig.await_pair("red");
    rig.await_event("144 words are kept for eth0");
    let eth0 = &NODES[NODES.find("[[nic]]").expect("a NIC")..];
    rig.configure(|text| text.replace(eth0, ""));
    rig.ask(&["apply"]);
    rig.configure(|text| text + &eth0.replace("eth0", "eth9"));
    rig.ask(&["apply"]);
    rig.await_pair("red");
    rig.await_event(" 0 words are kept for eth9");
    rig.stop();
}

#[test]
fn a_nic_is_closed_and_another_opened_and_a_node_keeps_the_one_that_stays() {
    let two = "\n[[nic]]\nname = \"eth1\"\ndevice = \"vfio-user:/nowhere/other.sock\"\nnode = \"red\"\n";
    let mut rig = Rig::with(&(NODES.to_owned() + two), "");
    until(&rig, "red drives both", || {
        rig.worker("red", "drives").is_some_and(|it| it["drives"].as_array().unwrap().len() == 2)
    });
    rig.configure(|text| text.replace(two, ""));
    let said = rig.ask(&["apply"]);
    assert!(said.contains("NIC eth1 is closed: its link goes down"), "{said}");
    assert_eq!(names(&rig, "nic"), ["eth0"]);
    rig.await_pair("red");
    rig.configure(|text| text + two);
    rig.ask(&["apply"]);
    until(&rig, "red drives both", || {
        rig.json(&["nic", "list"]).as_array().unwrap().iter().all(|nic| nic["is"] == "driven")
    });
    // The next daemon closes what its configuration has no more, with the worker that drives it.
    rig.kill_daemon();
    rig.configure(|text| text.replace(two, ""));
    rig.start();
    until(&rig, "it is closed", || names(&rig, "nic") == ["eth0"]);
    let (driver, _) = rig.await_pair("red");
    // What else has changed in its file it applies.
    rig.kill_daemon();
    rig.configure(|text| {
        let text = text.replace("node = \"red\"", "mtu = 9000\nnode = \"red\"");
        text.replace("name = \"blue\"", "name = \"blue\"\nvni = \"lan\"")
    });
    rig.start();
    until(&rig, "all is as described", || {
        rig.is_as_configured() && rig.ask(&["config", "show"]).contains("mtu = 9000")
    });
    let said = rig.ask(&["events"]);
    assert!(said.contains("tasuki.toml, is applied to its end: 4 steps"), "{said}");
    rig.await_pair("red");
    assert_ne!(pid(&rig.await_pair("red").0), pid(&driver), "its NIC was closed");
    // A node goes with its NIC.
    rig.configure(|text| text[..text.find("[[node]]").expect("a node")].to_owned() + GREEN);
    rig.ask(&["apply"]);
    assert_eq!((names(&rig, "nic"), names(&rig, "node")), (vec![], vec!["green".to_owned()]));
}

#[test]
fn the_second_of_two_that_are_applied_at_once_is_refused_and_so_is_nonsense() {
    let rig = Rig::new();
    rig.await_pair("red");
    rig.configure(|text| text.replace(GREEN, ""));
    let refused = rig.refused(&["apply", "--generation", "7"]);
    assert!(refused.contains("the configuration is generation 1 by now, and not 7"), "{refused}");
    rig.ask(&["node", "add", "mine", "--native", "--work", "sink", "--vni", "lan"]);
    rig.configure(|text| text.replace("work = \"sink\"", "work = \"drain\""));
    let path = rig.path("tasuki.toml").display().to_string();
    let refused = rig.refused(&["apply"]);
    assert!(refused.contains(&format!("{path}:")) && refused.contains("drain"), "{refused}");
    rig.configure(|text| {
        text.replace("drain", "sink") + "[[node]]\nname = \"dear\"\nwork = \"sink\"\ntrusts = [\"mine\"]\n"
    });
    let refused = rig.refused(&["plan"]);
    assert!(refused.contains("there is no node \"mine\""), "the file alone has to make sense: {refused}");
    let refused = rig.refused(&["apply", "/nowhere/at.all"]);
    assert!(refused.contains("the configuration /nowhere/at.all cannot be read"), "{refused}");
    // Of two that were added by hand, one has the station address of a node of the file.
    rig.ask(&["node", "add", "extra", "--native", "--work", "sink", "--vni", "lan", "--mac", "02:00:00:00:00:07"]);
    let twin = rig.path("twin.toml");
    let text = fs::read_to_string(rig.path("tasuki.toml")).expect("a file");
    let text = text.replace("trusts = [\"mine\"]", "vni = \"lan\"\nmac = \"02:00:00:00:00:07\"");
    fs::write(&twin, text).expect("a file");
    let refused = rig.refused(&["apply", &twin.display().to_string()]);
    assert!(
        refused
            .contains("; node extra was added by hand: remove it first (tasuki node remove extra), or change the file"),
        "{refused}"
    );
    rig.ask(&["node", "remove", "extra"]);
    assert_eq!(names(&rig, "node"), ["blue", "green", "mine", "red"]);
    assert_eq!(configuration(&rig)["by_hand"], serde_json::json!(["mine"]));
    // Another file; a node that was added by hand stays, and is the file's once that names it.
    let other = rig.path("other.toml");
    let text = fs::read_to_string(rig.path("tasuki.toml")).expect("a file");
    let text = &text[..text.find("[[node]]\nname = \"dear\"").expect("a node")];
    fs::write(&other, text.to_owned() + "[[node]]\nname = \"mine\"\nwork = \"echo\"\nvni = \"lan\"\n").expect("a file");
    let said = rig.ask(&["apply", &other.display().to_string()]);
    assert!(said.starts_with("node green is removed\n"), "{said}");
    assert_eq!(names(&rig, "node"), ["blue", "mine", "red"]);
    assert_eq!(configuration(&rig)["by_hand"], serde_json::json!([]));
}

/// Its workers end, and the card stays open: nothing has happened to it.
#[test]
fn a_nic_of_a_node_that_is_renamed_while_no_daemon_lives_is_not_opened_anew() {
    let mut rig = Rig::new();
    let (driver, _) = rig.await_pair("red");
    let its_group = group(pid(&driver)).and_then(|group| Some(group.parent()?.to_owned()));
    let its_group = its_group.filter(|group| group.ends_with("node-red"));
    rig.kill_daemon();
    rig.configure(|text| text.replace("\"red\"", "\"ruby\""));
    rig.start();
    rig.await_pair("ruby");
    let said = rig.ask(&["events"]);
    assert!(!said.contains("opened anew"), "{said}");
    // The control group of the former node goes with its workers.
    until(&rig, "its group is gone", || !its_group.as_ref().is_some_and(|group| group.exists()));
}

#[test]
fn a_node_that_is_not_trusted_any_more_loses_the_workers_that_had_the_nic() {
    let own = "\n[[nic]]\nname = \"eth1\"\ndevice = \"vfio-user:/nowhere/other.sock\"\nnode = \"blue\"\n";
    let rig = Rig::with(&(NODES.to_owned() + own), "");
    rig.await_pair("red");
    rig.await_pair("blue");
    rig.ask(&["nic", "give", "eth0", "--to", "blue"]);
    rig.ask(&["nic", "give", "eth0", "--to", "red"]);
    let had = drivers(&rig)["blue"];
    rig.configure(|text| text.replace("trusts = [\"blue\"]\n", "").replace("trusts = [\"red\"]\n", ""));
    rig.ask(&["apply"]);
    rig.await_event("has had eth0, and node red does not trust it any more");
    until(&rig, "a worker of blue drives that never had it", || drivers(&rig).get("blue").is_some_and(|it| *it != had));
    rig.await_worker("blue", "stands by");
    // As between strangers: no process of red that had the NIC is left.
    let had: Vec<_> = rig.workers().iter().filter(|worker| worker["node"] == "red").map(pid).collect();
    let said = rig.ask(&["nic", "give", "eth0", "--to", "blue"]);
    assert_eq!(rig.nic()["node"], "blue", "{said}");
    until(&rig, "they are gone", || had.iter().all(|pid| !lives(*pid)));
}

#[test]
fn of_a_nic_that_is_closed_no_worker_is_left_that_ever_had_it() {
    let nic = |name: &str, node: &str| {
        format!("\n[[nic]]\nname = \"{name}\"\ndevice = \"vfio-user:/nowhere/{name}.sock\"\nnode = \"{node}\"\n")
    };
    let rig = Rig::with(&(NODES.to_owned() + &nic("eth1", "red") + &nic("eth2", "blue")), "");
    rig.await_pair("red");
    rig.await_pair("blue");
    rig.ask(&["nic", "give", "eth1", "--to", "blue"]);
    let had = drivers(&rig)["blue"];
    rig.ask(&["nic", "give", "eth1", "--to", "red"]);
    assert_eq!(drivers(&rig)["blue"], had, "it has eth2");
    rig.configure(|text| text.replace(&nic("eth1", "red"), ""));
    rig.ask(&["apply"]);
    assert!(!lives(had), "it would hold on to a card that may be another node's next");
    rig.await_pair("red");
    rig.await_pair("blue");
    assert!(!rig.ask(&["events"]).contains("nobody drives eth2"), "another took over");
}

#[test]
fn a_node_that_is_made_anew_gets_a_nic_as_one_that_is_trusted() {
    let rig = Rig::with(&NODES.replace("trusts = [\"red\"]", "trusts = [\"red\"]\nvni = \"lan\""), "");
    rig.await_pair("red");
    rig.await_pair("blue");
    rig.configure(|text| text.replace("vni = \"lan\"\n", "").replace("node = \"red\"", "node = \"blue\""));
    let said = rig.ask(&["apply"]);
    assert!(said.contains("NIC eth0 goes from node red to node blue while packets flow"), "{said}");
    let said = rig.ask(&["events"]);
    assert!(said.contains(" of node blue in ") && said.contains(", by keep: "), "not as to a stranger: {said}");
    assert!(rig.is_as_configured());
}

#[test]
fn a_card_that_no_worker_has_keeps_no_nic_from_going_where_it_should() {
    let mut rig = Rig::new();
    rig.await_pair("red");
    rig.await_worker("blue", "idle");
    rig.ask(&["nic", "give", "eth0", "--to", "blue"]);
    rig.ask(&["nic", "give", "eth0", "--to", "red"]);
    let keeper = rig.keeper().expect("a keeper");
    rig.kill_daemon();
    signal(keeper, rustix::process::Signal::KILL);
    until(&rig, "it is dead", || !lives(keeper));
    // Without a program nothing opens the card, and no worker gets it.
    fs::rename(rig.path("worker"), rig.path("worker.away")).expect("a name");
    rig.start();
    rig.configure(|text| text.replace("trusts = [\"blue\"]\n", "").replace("trusts = [\"red\"]\n", ""));
    rig.configure(|text| text.replace("node = \"red\"", "node = \"green\""));
    rig.ask(&["apply"]);
    assert_eq!(rig.nic()["node"], "green");
}

#[test]
fn a_worker_that_is_named_no_more_gives_way_to_the_usual_one() {
    let rig = Rig::new();
    rig.await_pair("red");
    let named = format!("worker = {:?}\n", rig.path("worker"));
    rig.configure(|text| text.replace(&named, "worker = \"worker\"\n"));
    let refused = rig.refused(&["apply"]);
    assert!(refused.contains("[daemon], worker: worker must be named by its path from /"), "{refused}");
    rig.configure(|text| text.replace("worker = \"worker\"\n", "") + "[[node]]\nname = \"grey\"\nwork = \"sink\"\n");
    rig.ask(&["apply"]);
    // That may not be built: then the node's trouble names it.
    until(&rig, "grey has the usual worker, or would", || {
        let (nodes, workers) = (rig.json(&["node", "list"]), rig.workers());
        let grey = nodes.as_array().unwrap().iter().find(|it| it["name"] == "grey").cloned().expect("a node");
        let mut its = workers.iter().filter(|worker| worker["node"] == "grey");
        assert!(its.all(|it| it["binary"].as_str().unwrap().ends_with("/tasuki-worker")), "{workers:?}");
        grey["trouble"].as_str().is_some_and(|it| it.contains("/tasuki-worker"))
            || workers.iter().any(|worker| worker["node"] == "grey")
    });
}

#[test]
fn while_a_configuration_is_applied_no_node_comes_by_hand_and_its_caller_hears_of_a_stop() {
    let mut rig = Rig::new();
    rig.await_pair("red");
    let green = pid(&rig.await_worker("green", "idle"));
    signal(green, rustix::process::Signal::STOP);
    rig.configure(|text| text.replace(GREEN, "[[node]]\nname = \"grey\"\nwork = \"echo\"\nvni = \"lan\"\n"));
    let mut command = rig.command(&["apply"]);
    let caller = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("a program");
    rig.await_event("is applied: 2 steps");
    let refused = rig.refused(&["node", "add", "grey", "--native", "--work", "sink", "--vni", "lan"]);
    assert!(refused.contains("a configuration is being applied; ask again"), "{refused}");
    let refused = rig.refused(&["node", "remove", "blue"]);
    assert!(refused.contains("a configuration is being applied; ask again"), "{refused}");
    rig.stop();
    let said = caller.wait_with_output().expect("it has ended").stderr;
    let said = String::from_utf8_lossy(&said);
    assert!(!said.contains("hung up"), "{said}");
    rig.start();
    until(&rig, "the next one has taken the remaining steps", || {
        names(&rig, "node") == ["blue", "grey", "red"] && rig.is_as_configured()
    });
}

#[test]
fn an_apply_that_failed_is_over_and_what_is_changed_by_hand_after_it_stays() {
    let mut rig = Rig::with(&(NODES.to_owned() + POND), "");
    rig.await_worker("pond", "drives");
    let good = fs::read_to_string(rig.path("tasuki.toml")).expect("a file");
    let memif = "work = { memif = { socket = \"/nowhere/at/all.sock\" } }\nvni";
    rig.configure(|text| text.replace("work = \"sink\"\nvni", memif));
    let said = rig.refused(&["apply"]);
    assert!(said.contains("; node pond is there as it was; mend that"), "{said}");
    let pond = pid(&rig.await_worker("pond", "drives"));
    rig.ask(&["node", "remove", "green"]);
    for _ in 0..2 {
        rig.kill_daemon();
        rig.start();
        assert_eq!(names(&rig, "node"), ["blue", "pond", "red"]);
        assert_eq!(pid(&rig.await_worker("pond", "drives")), pond, "{}", rig.log());
        let view = configuration(&rig);
        let drift = view["drift"].as_array().expect("a list");
        assert!(view["generation"] == 2 && drift.iter().any(|step| step == "node green is added"), "{view}");
        assert!(drift.iter().any(|step| step.as_str().is_some_and(|it| it.starts_with("node pond: work"))), "{view}");
    }
    assert!(!rig.ask(&["events"]).contains("is applied to its end"));
    rig.configure(|_| good.clone());
    let said = rig.ask(&["apply"]);
    assert!(said.starts_with("node green is added\n"), "{said}");
    rig.kill_daemon();
    rig.start();
    assert_eq!(names(&rig, "node"), ["blue", "green", "pond", "red"]);
    assert!(rig.is_as_configured());
}

#[test]
fn a_hangup_applies_the_daemons_own_file() {
    let rig = Rig::new();
    rig.await_pair("red");
    rig.configure(|text| text.replace(GREEN, "") + "oops");
    signal(rig.daemon_pid(), rustix::process::Signal::HUP);
    rig.await_event("nothing was applied: ");
    rig.configure(|text| text.replace("oops", ""));
    signal(rig.daemon_pid(), rustix::process::Signal::HUP);
    until(&rig, "green is gone", || names(&rig, "node") == ["blue", "red"]);
}

#[test]
fn a_worker_whose_node_goes_before_it_has_its_program_just_ends() {
    let mut rig = Rig::without_daemon("", "");
    rig.with_stock_workers();
    rig.start();
    let none = fs::read_to_string(rig.path("tasuki.toml")).expect("a file");
    for round in 0..24 {
        rig.configure(|_| if round % 2 == 0 { none.clone() + POND } else { none.clone() });
        rig.ask(&["apply"]);
    }
    let said = rig.ask(&["events"]);
    rig.stop();
    assert!(said.contains("node pond is gone"), "{said}");
    let is_false = |line: &&str| {
        line.contains("no worker for node") || line.contains("did not start") || line.contains("ended with code")
    };
    assert_eq!(said.lines().find(is_false), None, "{}", rig.log());
}

#[test]
fn a_worker_that_leaves_says_nothing_of_a_cpu_that_its_node_has_no_more() {
    let [first, second, ..] = tasuki_control::housekeeping_cpus::usable()[..] else {
        return println!("skipped: there is one CPU");
    };
    let mut rig = Rig::without_daemon("", "");
    rig.with_stock_workers();
    let base = fs::read_to_string(rig.path("tasuki.toml")).expect("a file");
    let other = POND.replace("pond", "lake");
    rig.configure(|_| format!("{base}{POND}{other}cpu = {first}\n"));
    rig.start();
    let lakes: Vec<u32> = <[Value; 2]>::from(rig.await_pair("lake")).iter().map(pid).collect();
    rig.configure(|_| format!("{base}{POND}cpu = {first}\n{other}cpu = {second}\n"));
    rig.ask(&["apply"]);
    until(&rig, "its workers have left", || !lakes.iter().any(|pid| lives(*pid)));
    let said = rig.ask(&["events"]);
    rig.stop();
    assert!(said.contains("is applied") && !said.contains("cannot be kept on CPU"), "{said}");
}

#[test]
fn a_hangup_while_another_configuration_is_applied_or_tasukid_begins_counts_later() {
    let mut rig = Rig::new();
    rig.await_pair("red");
    let all = fs::read_to_string(rig.path("tasuki.toml")).expect("a file");
    let green = pid(&rig.await_worker("green", "idle"));
    signal(green, rustix::process::Signal::STOP);
    rig.configure(|text| text.replace(GREEN, ""));
    signal(rig.daemon_pid(), rustix::process::Signal::HUP);
    rig.await_event("tasuki.toml, is applied: 1 step");
    rig.configure(|_| all.clone() + POND);
    signal(rig.daemon_pid(), rustix::process::Signal::HUP);
    rig.await_event("the configuration is applied later, as a signal asked: another configuration is being applied");
    assert_eq!(rig.json(&["status"])["configuration"]["applying"], true);
    signal(green, rustix::process::Signal::KILL);
    let are = |rig: &Rig, all: &[&str]| names(rig, "node") == all && rig.is_as_configured();
    until(&rig, "the later file is in force", || are(&rig, &["blue", "green", "pond", "red"]));
    let green = pid(&rig.await_worker("green", "idle"));
    rig.kill_daemon();
    signal(green, rustix::process::Signal::STOP);
    rig.start_to_die(None);
    until(&rig, "it begins", || rig.log().matches(" begins (process ").count() == 2);
    rig.configure(|_| all.clone());
    signal(rig.daemon_pid(), rustix::process::Signal::HUP);
    until(&rig, "it has heard", || rig.log().contains("as a signal asked: tasukid is still beginning"));
    signal(green, rustix::process::Signal::CONT);
    until(&rig, "it serves", || rig.tasuki(&["status"]).status.success());
    until(&rig, "the last file is in force", || are(&rig, &["blue", "green", "red"]));
    rig.stop();
}

#[test]
fn while_a_node_is_being_removed_no_configuration_takes_it_for_one_that_is_there() {
    let rig = Rig::new();
    rig.await_pair("red");
    let green = pid(&rig.await_worker("green", "idle"));
    signal(green, rustix::process::Signal::STOP);
    let mut command = rig.command(&["node", "remove", "green"]);
    let mut caller = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("a program");
    rig.await_worker("green", "leaves");
    caller.kill().expect("it waits");
    caller.wait().expect("it ends");
    rig.await_event("node green is still being removed, though its caller waits no more");
    let refused = rig.refused(&["apply"]);
    assert!(refused.contains("node green is being removed; ask again when it is gone"), "{refused}");
    signal(rig.daemon_pid(), rustix::process::Signal::HUP);
    rig.await_event("the configuration is applied later, as a signal asked: node green is being removed");
    signal(green, rustix::process::Signal::KILL);
    rig.await_event("tasuki.toml, is applied: 1 step");
    until(&rig, "green is there anew", || names(&rig, "node") == ["blue", "green", "red"] && rig.is_as_configured());
    assert!(rig.ask(&["events"]).contains("node green is gone"));
}

/// row: T143
#[test]
fn a_mistake_beside_a_secret_is_told_to_readers_of_events_without_it() {
    let rig = Rig::new();
    rig.await_pair("red");
    rig.configure(|text| {
        text + "\n[[node]]\nname = \"web\"\nvni = \"lan\"\n[node.work.memif]\nsocket = \"/nowhere/web.sock\"\nsecret = \"hush\" \"\n"
    });
    let of_plan = rig.refused(&["plan"]);
    signal(rig.daemon_pid(), rustix::process::Signal::HUP);
    rig.await_event("nothing was applied: ");
    until(&rig, "it is in the log", || rig.log().contains("nothing was applied: "));
    for said in [of_plan, rig.ask(&["events"]), rig.log()] {
        assert!(said.contains("this line is not valid TOML") && !said.contains("hush"), "{said}");
    }
}

#[test]
fn wherever_the_daemon_dies_the_next_one_takes_the_remaining_steps() {
    if !cfg!(feature = "crash-points") {
        return println!("skipped: needs the feature crash-points");
    }
    let places = (1..=11).map(|nth| format!("daemon.applied-step:{nth}")).chain(["daemon.applying:1".to_owned()]);
    for place in places {
        let mut rig = Rig::without_daemon(&(NODES.to_owned() + POND), "");
        rig.start();
        rig.await_pair("red");
        rig.await_worker("blue", "idle");
        rig.kill_daemon();
        rig.start_to_die(Some(place.clone()));
        until(&rig, "tasukid serves", || rig.tasuki(&["status"]).status.success());
        let text = fs::read_to_string(rig.path("tasuki.toml")).expect("a file");
        let text = text.replace(GREEN, "[[node]]\nname = \"grey\"\nwork = \"echo\"\n");
        let text = text
            .replace("node = \"red\"", "node = \"grey\"")
            .replace("standby", "")
            .replace("/nowhere/card.sock\"\nnode", "/nowhere/card.sock\"\nring = 64\nnode");
        let text = text.replace("work = \"sink\"\ntrusts", "work = \"sink\"\npoll = true\ntrusts");
        let text = text.replace("pool_kib = 512", "pool_kib = 256");
        fs::write(rig.path("other.toml"), text).expect("a file");
        let other = rig.path("other.toml").display().to_string();
        let said = rig.tasuki(&["apply", &other]);
        let has_died = !said.status.success();
        if has_died {
            rig.daemon_ends();
            rig.start();
        }
        until(&rig, &format!("{place}: all is as described"), || {
            let is = configuration(&rig);
            is["generation"] == 2
                && is["path"] == *other
                && rig.is_as_configured()
                && rig.ask(&["plan", &other]).starts_with("nothing changes")
        });
        until(&rig, &format!("{place}: the NIC is driven"), || {
            let nics = rig.json(&["nic", "list"]);
            let is_it = |nic: &Value| nic["name"] == "eth0" && nic["is"] == "driven" && nic["node"] == "grey";
            nics.as_array().expect("a list").iter().any(is_it)
        });
        assert_eq!(names(&rig, "node"), ["blue", "grey", "pond", "red"], "{place}");
        // Its rings have the other length only if it was opened anew, and so has the memory of a node.
        let events = rig.ask(&["events"]);
        let is_anew = ["eth0 is being closed", "node pond is gone"].iter().all(|event| events.contains(event));
        assert!(is_anew, "{place}: {}", rig.log());
        rig.stop();
    }
}

/// Numbered frames flow between two nodes while all others come, change and go, and while their own CPU changes.
#[test]
fn nothing_is_lost_while_configurations_are_applied() {
    let Some(mut world) = World::new() else { return };
    let rig = &mut world.rig;
    let flow = "[[node]]\nname = \"sink\"\nwork = \"sink\"\nvni = \"lan\"\nmac = \"02:00:00:00:00:88\"\n\
                [[node]]\nname = \"source\"\nwork = { source = { rate = 2000, to = \"02:00:00:00:00:88\" } }\nvni = \"lan\"\n";
    let begin = fs::read_to_string(rig.path("tasuki.toml")).expect("a file");
    let apply = |rig: &Rig, nodes: &str| {
        fs::write(rig.path("tasuki.toml"), format!("{begin}{nodes}")).expect("a file");
        rig.ask(&["apply"])
    };
    apply(rig, flow);
    rig.await_pair("sink");
    rig.await_pair("source");
    flows(rig, 500);
    let drivers = drivers(rig);
    let others = "[[node]]\nname = \"one\"\nwork = \"echo\"\nvni = \"lan\"\n[[node]]\nname = \"two\"\nwork = \"sink\"\nvni = \"dmz\"\n";
    apply(rig, &format!("{flow}{others}"));
    flows(rig, 200);
    apply(rig, &format!("{flow}{}", others.replace("dmz", "lan").replace("echo", "sink")));
    flows(rig, 200);
    apply(rig, flow);
    flows(rig, 200);
    let after = self::drivers(rig);
    assert!(["sink", "source"].iter().all(|node| drivers[*node] == after[*node]), "nobody has touched them");
    // Their own settings change.
    let said = apply(
        rig,
        &flow.replace("vni = \"lan\"\nmac", "vni = \"lan\"\nnice = -5\nmac").replace("rate = 2000", "rate = 1500"),
    );
    assert!(said.contains("node sink: nice changes; a fresh worker"), "{said}");
    assert!(said.contains("node source: work changes; a fresh worker"), "{said}");
    flows(rig, 500);
    // The next tasukid finds another file.
    rig.kill_daemon();
    let text =
        flow.replace("vni = \"lan\"\nmac", "vni = \"lan\"\nnice = -4\nmac").replace("rate = 2000", "rate = 1000");
    fs::write(rig.path("tasuki.toml"), format!("{begin}{text}{}", others.replace("echo", "sink"))).expect("a file");
    rig.start();
    until(rig, "all is as described", || names(rig, "node").contains(&"two".to_owned()) && rig.is_as_configured());
    flows(rig, 500);
    let stopped = flow.split("[[node]]").take(2).collect::<Vec<_>>().join("[[node]]");
    apply(rig, &stopped.replace("vni = \"lan\"\nmac", "vni = \"lan\"\nnice = -5\nmac"));
    assert_exact(rig);
    world.end();
}

#[test]
fn a_daemon_whose_file_has_a_mistake_goes_by_what_was_applied_last() {
    let mut rig = Rig::new();
    let pair = |rig: &Rig| {
        let (driver, standby) = rig.await_pair("red");
        (pid(&driver), pid(&standby))
    };
    let before = pair(&rig);
    rig.kill_daemon();
    rig.configure(|text| text + "\nnonsense = 1\n");
    rig.start();
    assert_eq!(pair(&rig), before, "its workers go on");
    let says =
        |rig: &Rig| rig.ask(&["status"]).contains("tasukid goes by what was applied last (generation 1), for its");
    assert!(says(&rig) && rig.ask(&["status"]).contains("nonsense"), "{}", rig.ask(&["status"]));
    assert!(rig.refused(&["upgrade"]).contains("tasukid stays what it is"));
    rig.configure(|text| text.replace("\nnonsense = 1\n", ""));
    rig.ask(&["apply", rig.path("tasuki.toml").to_str().unwrap()]);
    assert!(!says(&rig));
    // Where nothing was applied there is nothing to go by.
    rig.stop();
    rig.configure(|text| text + "\nnonsense = 1\n");
    let output = rig.tasukid().output().expect("it runs");
    assert!(String::from_utf8_lossy(&output.stderr).contains("nonsense"), "{output:?}");
}

#[test]
fn steps_wait_for_an_upgrade_that_a_user_has_begun() {
    let rig = Rig::new();
    rig.await_pair("red");
    for poll in ["true", "false"].iter().cycle().take(10) {
        rig.configure(|text| {
            let text = text.replace("poll = true\n", "").replace("poll = false\n", "");
            text.replace("name = \"red\"\n", &format!("name = \"red\"\npoll = {poll}\n"))
        });
        let mut upgrade = rig
            .command(&["worker", "upgrade", "red"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("a program");
        rig.ask(&["apply"]);
        // It may have come second, and was refused then.
        upgrade.wait().expect("it ends");
        assert!(rig.is_as_configured(), "{}", rig.log());
    }
}

#[test]
fn a_path_that_is_no_file_is_refused_at_once() {
    let rig = Rig::new();
    // As a pipe would, which keeps its reader waiting.
    let text = fs::read_to_string(rig.path("tasuki.toml")).expect("a file");
    fs::remove_file(rig.path("tasuki.toml")).expect("a file");
    fs::create_dir(rig.path("tasuki.toml")).expect("a folder");
    let refused = rig.refused(&["apply"]);
    assert!(refused.contains("tasuki.toml is not a file; name one"), "{refused}");
    // Nor is it read when another file is applied.
    fs::remove_dir(rig.path("tasuki.toml")).expect("a folder");
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mkfifoat(rustix::fs::CWD, rig.path("tasuki.toml"), mode).expect("a pipe");
    fs::write(rig.path("other.toml"), &text).expect("a file");
    rig.ask(&["apply", rig.path("other.toml").to_str().unwrap()]);
    // Nor to look whether it has changed since.
    rig.ask(&["status"]);
}

#[test]
fn what_was_changed_by_hand_can_be_kept_and_comes_back_where_nothing_is_left() {
    let mut rig = Rig::new();
    rig.configure(|text| format!("# a comment\n{text}"));
    rig.await_pair("red");
    rig.await_worker("blue", "idle");
    rig.ask(&["apply"]);
    let kept = rig.path("kept.toml");
    let keep = || {
        rig.ask(&["config", "show", "--to", kept.to_str().expect("a path")]);
        fs::read_to_string(&kept).expect("a file")
    };
    assert!(keep().contains("# a comment\n"), "nothing was changed by hand");
    rig.ask(&["node", "add", "mine", "--native", "--work", "sink", "--vni", "lan"]);
    rig.ask(&["nic", "give", "eth0", "--to", "blue"]);
    rig.ask(&["nic", "standby", "eth0", "--node", "red"]);
    rig.ask(&["node", "remove", "green"]);
    let text = keep();
    let (mode, said) =
        (fs::metadata(&kept).expect("a file").permissions().mode() & 0o777, rig.ask(&["config", "show"]));
    assert_eq!((mode, &said), (0o600, &text), "it may have secrets in it");
    let said = rig.ask(&["plan", kept.to_str().expect("a path")]);
    assert!(said.starts_with("nothing changes\n"), "{said}");
    // A copy that was cut off is no configuration of fewer nodes.
    fs::write(rig.path("cut.toml"), &text[..text.rfind("[[nic]]").expect("a NIC")]).expect("a file");
    let said = rig.refused(&["plan", rig.path("cut.toml").to_str().expect("a path")]);
    assert!(said.contains("cut.toml:") && said.contains("this file is cut off: "), "{said}");
    // A key of another version.
    fs::write(rig.path("newer.toml"), text.replace("[[nic]]", "[[nic]]\ncolour = 4")).expect("a file");
    let said = rig.refused(&["plan", rig.path("newer.toml").to_str().expect("a path")]);
    assert!(said.contains("newer.toml:") && said.contains("the key `colour` means nothing here"), "{said}");
    rig.stop();
    fs::rename(&kept, rig.path("tasuki.toml")).expect("a file");
    rig.start();
    rig.await_pair("blue");
    assert_eq!(names(&rig, "node"), ["blue", "mine", "red"]);
    assert_eq!((&rig.nic()["node"], &rig.nic()["standby"]), (&Value::from("blue"), &Value::from("red")));
    assert!(rig.is_as_configured() && configuration(&rig)["by_hand"].as_array().is_some_and(Vec::is_empty));
}

/// Makes a world with both namespaces on the VNI, by the file.
fn by_file() -> Option<World> {
    let world = World::new()?;
    world.describe("");
    world.rig.ask(&["apply"]);
    world.await_pairs();
    assert!(world.is_answered(DESK));
    Some(world)
}

/// Returns the trouble of node `shop`.
fn trouble(world: &World) -> String {
    let nodes = world.rig.json(&["node", "list"]);
    let all = nodes.as_array().expect("a list");
    all.iter().find(|node| node["name"] == "shop").expect("it is there")["trouble"].to_string()
}

fn is_missed(world: &World) {
    until(&world.rig, "it is missed", || trouble(world).contains("has no interface any more"));
    is_to_be_made_anew(world);
}

/// A plan sees this also before the daemon, which looks once a second, has told of it.
fn is_to_be_made_anew(world: &World) {
    let plan = world.rig.ask(&["plan"]);
    let step = "node shop: its interface (which is gone) changes, so it is removed and added again";
    assert!(plan.starts_with(step), "{plan}");
}

#[test]
fn an_interface_that_somebody_deletes_or_moves_is_missed_and_made_anew_by_an_apply() {
    let Some(mut world) = by_file() else { return };
    let moves = format!("link set lan name lan0 netns {}", world.desk.path());
    let deletes = "link delete lan";
    for (by_workers, command) in [(false, deletes), (false, &moves), (true, deletes), (true, &moves)] {
        if by_workers && command == deletes {
            world.rig.configure(|text| text.replacen("/24\" }", "/24\", shortcut = false }", 1));
            world.rig.ask(&["apply"]);
            world.await_pairs();
        }
        world.shop.ip(command);
        is_to_be_made_anew(&world);
        is_missed(&world);
        world.rig.kill_daemon();
        world.rig.start();
        is_missed(&world);
        world.rig.ask(&["apply"]);
        world.await_pairs();
        assert!(world.is_answered(DESK));
        assert_eq!(trouble(&world), "null");
        assert!(world.rig.is_as_configured());
    }
    world.end();
}

/// As after `ip netns delete` and `add` while a process holds the old namespace.
#[test]
fn an_interface_whose_namespace_has_lost_its_name_is_missed_and_made_anew_by_an_apply() {
    let Some(mut world) = World::new() else { return };
    let name = world.rig.path("shop.ns");
    let give_to = |room: &Room| {
        let _ = fs::remove_file(&name);
        std::os::unix::fs::symlink(room.path(), &name).expect("a name");
    };
    let makes_wire = |room: &Room| room.ip("link add eth0 type veth peer name lan");
    give_to(&world.shop);
    let shop = of_file("shop", &world.shop, SHOP, "").replace(&world.shop.path(), name.to_str().expect("text"));
    world.rig.configure(|text| text + &shop + &of_file("desk", &world.desk, DESK, ""));
    world.rig.ask(&["apply"]);
    let mut last = None;
    for kind in ["with a shortcut", "without", "an interface of others"] {
        match kind {
            "without" => world.rig.configure(|text| text.replacen("/24\" }", "/24\", shortcut = false }", 1)),
            "an interface of others" => {
                let room = Room::new();
                makes_wire(&room);
                world
                    .rig
                    .configure(|text| text.replacen("tap = {", "interface = {", 1).replacen(", address", " } } #", 1));
                give_to(&room);
                last = Some(room);
            }
            _ => {}
        }
        world.rig.ask(&["apply"]);
        world.await_pairs();
        let other = Room::new();
        if kind == "an interface of others" {
            makes_wire(&other);
        }
        give_to(&other);
        is_to_be_made_anew(&world);
        is_missed(&world);
        world.rig.kill_daemon();
        world.rig.start();
        is_missed(&world);
        world.rig.ask(&["apply"]);
        drop(last.replace(other));
        world.await_pairs();
        assert_eq!(trouble(&world), "null", "{kind}");
        if let Some(other) = last.as_ref().filter(|_| kind != "an interface of others") {
            Exchange::begin([(other, SHOP), (&world.desk, DESK)]).goes_on(&world.rig, 50);
        }
    }
    world.end();
}

#[test]
fn a_node_of_the_file_that_was_removed_by_hand_stays_away_under_the_next_daemon() {
    let mut rig = Rig::new();
    rig.await_pair("red");
    rig.ask(&["node", "remove", "green"]);
    for _ in 0..2 {
        rig.kill_daemon();
        rig.start();
        assert_eq!(names(&rig, "node"), ["blue", "red"]);
        assert_eq!(configuration(&rig)["drift"], serde_json::json!(["node green is added"]));
    }
    rig.ask(&["apply"]);
    rig.kill_daemon();
    rig.start();
    assert_eq!(names(&rig, "node"), ["blue", "green", "red"]);
    assert!(rig.is_as_configured());
}

#[test]
fn a_node_is_at_work_when_the_command_that_adds_it_ends() {
    let Some(world) = World::new() else { return };
    world.add("shop", &world.shop, SHOP, &[]);
    for more in [&[][..], &["--no-shortcut"]] {
        world.add("desk", &world.desk, DESK, more);
        assert!(world.is_answered(DESK), "{}", world.rig.log());
        world.rig.ask(&["node", "remove", "desk"]);
    }
    world.end();
}

#[test]
fn a_tap_that_the_user_made_is_used() {
    let Some(world) = World::new() else { return };
    world.shop.ip("tuntap add lan mode tap");
    world.add("shop", &world.shop, SHOP, &[]);
    world.add("desk", &world.desk, DESK, &[]);
    world.await_pairs();
    assert!(world.is_answered(DESK), "{}", world.rig.log());
    assert_eq!(world.crossed("shop"), None, "it has no veth end");
    world.end();
}

#[test]
fn a_node_that_cannot_be_made_anew_is_made_as_it_was_and_no_other_is_gone() {
    let Some(world) = by_file() else { return };
    let desk = pid(&world.rig.worker("desk", "drives").expect("it drives"));
    world.shop.ip("link add other type veth peer name far");
    let before = std::fs::read_to_string(world.rig.path("tasuki.toml")).expect("the file");
    world.rig.configure(|text| {
        let text = text.replacen("name = \"lan\"", "name = \"other\"", 1).replace("/24\" }", "/24\", mtu = 1400 }");
        // Nor does it matter that a node that it trusts by now was to come after it.
        text.replace("name = \"shop\"\n", "name = \"shop\"\ntrusts = [\"fresh\"]\n")
            + "\n[[node]]\nname = \"fresh\"\nwork = \"sink\"\n"
    });
    let said = world.rig.refused(&["apply"]);
    assert!(said.contains("node shop is there as it was; "), "{said}");
    assert_eq!(names(&world.rig, "node"), ["desk", "shop"]);
    world.await_pairs();
    assert!(world.is_answered(DESK));
    assert!(world.shop.ip("link show lan").contains("mtu 1500"));
    // Nor is the other one touched, unless it was its turn before.
    let is_new = world.desk.ip("link show lan").contains("mtu 1400");
    assert!(is_new || lives(desk), "{}", world.rig.log());
    world.rig.configure(|_| before.clone());
    world.rig.ask(&["apply"]);
    world.await_pairs();
    assert!(world.is_answered(DESK) && world.rig.is_as_configured());
    world.end();
}

/// Frames would reach one of two nodes with the same interface, by chance.
#[test]
fn of_nodes_that_change_places_none_gets_what_another_has_and_none_is_forgotten() {
    let Some(world) = by_file() else { return };
    let good = fs::read_to_string(world.rig.path("tasuki.toml")).expect("the file");
    let (shop, desk, nowhere) = (format!("{:?}", world.shop.path()), format!("{:?}", world.desk.path()), "\"nowhere\"");
    let place = |of_shop: &str, of_desk: &str| {
        let text = good.replace(&shop, "THE-SHOP").replace(&desk, of_desk).replace("THE-SHOP", of_shop);
        world.rig.configure(|_| text.clone());
        world.rig.refused(&["apply"])
    };
    let said = place(&desk, nowhere);
    let gone = "; node desk is gone, and cannot be made as it was (node \"desk\": ";
    assert!(said.contains(gone) && said.contains(" is node \"shop\"'s as well; "), "{said}");
    assert_eq!(names(&world.rig, "node"), ["shop"]);
    world.rig.configure(|_| good.clone());
    world.rig.ask(&["apply"]);
    world.await_pairs();
    assert!(world.is_answered(DESK) && world.rig.is_as_configured());
    let said = place(nowhere, &shop);
    assert!(said.contains("; node shop is there as it was; node desk is there as it was; the step after"), "{said}");
    world.await_pairs();
    assert!(world.is_answered(DESK));
    world.end();
}

#[test]
fn the_next_daemon_leaves_alone_an_interface_that_has_the_name_of_its_own_by_now() {
    let Some(mut world) = by_file() else { return };
    ["link set lan down", "link set lan name own", "link set own up", "link add lan type veth peer name far"]
        .iter()
        .for_each(|words| _ = world.shop.ip(words));
    let strange = world.shop.ip("link show lan");
    world.rig.kill_daemon();
    world.rig.start();
    world.await_pairs();
    assert_eq!(world.shop.ip("link show lan"), strange);
    assert!(!world.rig.ask(&["status"]).contains("gets no frames"), "{}", world.rig.log());
    world.end();
}

/// As after an upgrade to a version that takes less, after `deluser`, and with a CPU that is off line.
#[test]
fn a_daemon_ends_no_node_for_what_its_version_or_its_machine_does_not_know_any_more() {
    let mut rig = Rig::with(&NODES.replace("name = \"green\"", "name = \"green\"\nstandby = false"), "");
    for name in ["brook", "pond", "pool"] {
        rig.ask(&["node", "add", name, "--native", "--work", "sink", "--vni", "lan"]);
    }
    let pair = |rig: &Rig| {
        let (driver, standby) = rig.await_pair("red");
        let others = ["brook", "pond", "pool"].map(|name| pid(&rig.await_worker(name, "drives")));
        (pid(&driver), pid(&standby), others, pid(&rig.await_worker("green", "idle")))
    };
    let good = fs::read_to_string(rig.path("tasuki.toml")).expect("a file");
    let (user, strange) = ("user:nobody-of-this-name", "\n[api]\nread = [\"user:nobody-of-this-name\"]\n");
    for (of_other_file, change, why) in [
        // What the file has none of was applied from another one.
        (true, "\nlater = 1\n", "later of node \"green\""),
        (true, "\nnice = 5\n", "nice = 5 is not in the range"),
        (false, "\ncpu = 4000\n", "cpu = 4000, and tasukid may not run anything there"),
        (false, strange, user),
    ] {
        let before = pair(&rig);
        rig.kill_daemon();
        let text = match change {
            _ if change == strange => good.clone() + change,
            _ => good.replace("name = \"green\"", &format!("name = \"green\"{change}")),
        };
        let (mut registry, known) = Registry::open(&rig.dir()).expect("a registry");
        let mut pond = known.added.into_iter().find(|node| node.name == "pond").expect("it was added");
        pond.nice = Some(7);
        let applied = known.applied.expect("it was applied");
        let in_file = if of_other_file { "" } else { &text };
        fs::write(rig.path("tasuki.toml"), in_file).expect("a file");
        let path = if of_other_file { "/nowhere/site.toml".to_owned() } else { applied.path };
        let base = crc32c::crc32c(in_file.as_bytes());
        let record = AppliedRecord { text, path, base, is_done: true, ..applied };
        let written = registry.write(&[Change::Applied(record), Change::Added(pond)], Duration::ZERO);
        assert!(written.is_none(), "{written:?}");
        drop(registry);
        rig.start();
        assert_eq!(pair(&rig), before, "its workers go on: {}", rig.log());
        let said = rig.ask(&["status"]);
        assert!(said.contains(why), "{said}");
        assert!(said.contains("node pond: this version of tasukid refuses it"), "{said}");
        rig.await_event(why);
        let shown = rig.ask(&["config", "show"]);
        for words in [why, "#= Node pond: this version", "name = \"pond\""] {
            assert!(shown.contains(words), "{words}: {shown}");
        }
        // Other nodes come and go meanwhile.
        rig.ask(&["node", "add", "lake", "--native", "--work", "sink", "--vni", "lan"]);
        rig.ask(&["node", "remove", "lake"]);
        fs::write(rig.path("tasuki.toml"), &good).expect("a file");
        rig.ask(&["apply", rig.path("tasuki.toml").to_str().unwrap()]);
        let said = rig.ask(&["status"]);
        assert!(!said.contains(why), "{said}");
    }
    rig.ask(&["node", "remove", "pond"]);
    assert!(!rig.ask(&["status"]).contains("pond"));
}

/// As after an upgrade to a version that takes less, and with a CPU that is off line.
#[test]
fn a_node_that_goes_on_without_a_setting_is_in_no_trouble_and_one_that_contradicts_another_goes() {
    let mut rig = Rig::new();
    rig.ask(&["node", "add", "pond", "--native", "--work", "sink", "--vni", "lan"]);
    rig.await_worker("pond", "drives");
    rig.kill_daemon();
    let (mut registry, known) = Registry::open(&rig.dir()).expect("a registry");
    let pond = &known.added[0];
    let odd = |name: &str| Node { name: name.to_owned(), nice: Some(7), ..pond.clone() };
    let pen = Node { container: Some("pods/1/eth0".to_owned()), cpu: Some(4000), ..odd("pen") };
    let (ant, twin) = (Node { trusts: vec!["pond".to_owned()], ..odd("ant") }, odd("twin"));
    let twin = Node { mac: Some(StationAddress(pond.mac())), ..twin };
    let added = [pen, ant, twin].map(Change::Added);
    assert_eq!(registry.write(&added, Duration::ZERO), None);
    drop(registry);
    rig.start();
    rig.await_event(
        "node twin, which had been added by hand, is not there any more: node \"twin\": node \"pond\" of VNI lan",
    );
    let nodes: Value = serde_json::from_str(&rig.ask(&["node", "list", "--json"])).expect("JSON");
    let nodes = nodes.as_array().expect("a list");
    let of = |name: &str| nodes.iter().find(|node| node["name"] == name).expect("it is there");
    for name in ["pond", "pen", "ant"] {
        rig.await_worker(name, "drives");
        assert_eq!(of(name)["trouble"], Value::Null, "a check of it would fail, and an alert fire");
    }
    assert_eq!(of("pond")["left_out"], Value::Null);
    let said = rig.ask(&["status"]);
    let (pen, again) = (
        "node pen: this version of tasukid refuses it (nice = 7",
        "you remove it (tasuki node remove ant) and add it anew",
    );
    for words in [pen, "it goes on as it was made, until its container is started anew; cpu = 4000,", again] {
        assert!(said.contains(words), "{words}: {said}");
    }
}

#[test]
fn a_node_whose_namespace_is_not_there_leaves_no_other_node_alone() {
    let mut rig = Rig::new();
    let before = rig.await_pair("red");
    rig.kill_daemon();
    let inn = "\n[[node]]\nname = \"inn\"\nwork = { tap = { name = \"nic0\", netns = \"/nowhere/netns\" } }\n";
    rig.configure(|text| text + inn);
    rig.start();
    let now = rig.await_pair("red");
    assert_eq!((pid(&now.0), pid(&now.1)), (pid(&before.0), pid(&before.1)), "its workers go on");
    rig.await_event("node \"inn\" has no TAP /nowhere/netns:nic0 as yet");
    until(&rig, "its node is in trouble", || rig.ask(&["status"]).contains("no worker for node inn: it has no TAP"));
}

#[test]
fn a_file_that_a_daemon_begins_with_can_be_applied_by_its_name_however_long_it_is() {
    let rig = Rig::new();
    // With quotes, which are two bytes each in JSON.
    rig.configure(|text| format!("{text}\n{}", "# \"a comment\"\n".repeat(200_000)));
    let file = rig.path("tasuki.toml");
    assert!(file.metadata().expect("a file").len() > 2 << 20);
    rig.ask(&["plan", file.to_str().unwrap()]);
    rig.ask(&["apply", file.to_str().unwrap()]);
    assert_eq!(configuration(&rig)["generation"], 2);
    rig.configure(|text| text.repeat(2));
    let said = rig.refused(&["apply", file.to_str().unwrap()]);
    assert!(said.contains("is longer than a configuration may be (4 MiB); name another file"), "{said}");
}

#[test]
fn a_daemon_that_never_began_leaves_nothing_that_says_that_workers_drive_on() {
    let nic = "\n[[nic]]\nname = \"eth7\"\ndevice = \"sim\"\nnode = \"inn\"\n";
    let inn = "[[node]]\nname = \"inn\"\nwork = { tap = { name = \"nic0\", netns = \"/nowhere/netns\" } }\n";
    let rig = Rig::without_daemon(&(inn.to_owned() + nic), "");
    let fails = || {
        let output = rig.tasukid().output().expect("a daemon");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, said) = fails();
    assert!(code == Some(1) && said.contains("has no TAP /nowhere/netns:nic0"), "{said}");
    let said = rig.refused(&["status"]);
    assert!(!said.contains("may drive on"), "{said}");
    // It has made the registry by then, and not the keeper.
    let tasukid = rig.tasukid();
    let mut starved = Command::new("sh");
    starved.args(["-c", "ulimit -n 16; exec \"$@\"", "sh"]).arg(tasukid.get_program()).args(tasukid.get_args());
    let output = starved.output().expect("a daemon");
    assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(!rig.dir().join("registry.redb").exists(), "{}", String::from_utf8_lossy(&output.stderr));
    // Nor has the next one anything to go by, if its file cannot be used.
    rig.configure(|text| text.replace("[[node]]", "[[node"));
    let (code, said) = fails();
    assert_eq!(code, Some(78), "{said}");
}
