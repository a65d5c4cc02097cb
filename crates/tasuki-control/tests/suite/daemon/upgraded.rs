//! `tasuki upgrade`: the daemon goes on as another program, and then all workers are replaced.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::process::Signal;
use serde_json::Value;
use tasuki_control::housekeeping_cpus;
use tasuki_testing::{alone_under, copy, process, script};

use super::natives::{assert_exact, flows, with_source_and_sink};
use super::real::{ENDLESS, moves, released, stop_whole, with_card};
use super::rig::{NODES, Rig, lives, pid, signal, until};
use super::storm::beside;
use super::vnis::World;

/// Makes a folder with tasukid in it, for `--with`.
fn version(rig: &Rig, name: &str) -> PathBuf {
    let folder = rig.path(name);
    fs::create_dir(&folder).expect("a folder");
    copy(env!("CARGO_BIN_EXE_tasukid"), folder.join("tasukid"));
    folder
}

#[test]
fn the_daemon_and_all_workers_are_replaced_one_after_the_other() {
    let mut rig = Rig::new();
    let (driver, standby) = rig.await_pair("red");
    rig.await_worker("blue", "idle");
    rig.await_worker("green", "idle");
    let (daemon, old) = (rig.daemon_pid(), rig.workers());
    let folder = version(&rig, "next");
    copy(rig.path("worker"), folder.join("worker"));
    let said = rig.ask(&["upgrade", "--with", folder.to_str().unwrap()]);
    println!("{said}");
    let lines: Vec<&str> = said.lines().collect();
    let as_what = format!("tasukid goes on as {}, version ", folder.join("tasukid").display());
    assert!(lines.len() == 4 && lines[0].starts_with(&as_what), "the daemon and three nodes: {said}");
    assert_eq!(fs::read_link(format!("/proc/{daemon}/exe")).unwrap(), folder.join("tasukid"), "in the same process");
    assert_eq!(rig.json(&["status"])["pid"], daemon);
    // Children of the former program are its own now.
    until(&rig, "the old workers end, and it reaps them", || {
        old.iter().all(|it| !lives(pid(it))) && process::unreaped(daemon).is_empty()
    });
    assert!(![pid(&driver), pid(&standby)].contains(&pid(&rig.await_pair("red").0)));
    assert!(rig.workers().iter().all(|it| it["binary"] == folder.join("worker").to_str().unwrap()));
    // By default each program is replaced by its own file, and nothing adds up.
    let before = process::descriptors(daemon);
    for _ in 0..3 {
        let said = rig.json(&["upgrade"]);
        assert!(said["daemon"].is_object() && said["nodes"].as_array().unwrap().iter().all(|it| it["done"] == true));
        rig.await_pair("red");
    }
    until(&rig, "descriptors do not add up", || lives(daemon) && process::descriptors(daemon) <= before);
    let (driver, _) = rig.await_pair("red");
    signal(pid(&driver), Signal::KILL);
    until(&rig, "the dead driver is reaped", || !lives(pid(&driver)) && process::unreaped(daemon).is_empty());
    let said = rig.json(&["upgrade", "--workers-only"]);
    assert_eq!((&said["daemon"], rig.daemon_pid()), (&Value::Null, daemon));
    // A full disk ends no upgrade half-way.
    let full = fs::OpenOptions::new().write(true).open("/dev/full").expect("a device");
    let before: Vec<_> = rig.workers().iter().map(pid).collect();
    let output = rig.command(&["upgrade", "--workers-only"]).stdout(full).output().expect("a program");
    let why = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        !output.status.success() && why.contains("the upgrade is done, but not all that was done is told"),
        "{why}"
    );
    until(&rig, "all are replaced", || rig.workers().iter().all(|worker| !before.contains(&pid(worker))));
    rig.stop();
}

/// The program before has handed on what the keeper had.
#[test]
fn a_keeper_that_dies_as_tasukid_becomes_another_program_costs_nothing() {
    let mut rig = Rig::new();
    let (driver, standby) = rig.await_pair("red");
    let (keeper, folder) = (rig.keeper().expect("a keeper"), rig.path("next"));
    fs::create_dir(&folder).expect("a folder");
    let kills = format!("kill -KILL {keeper}; while [ -e /proc/{keeper}/fd/0 ]; do sleep 0.01; done");
    let program = env!("CARGO_BIN_EXE_tasukid");
    let text = format!("case \"$*\" in *--check*) ;; *) {kills} ;; esac; exec {program} \"$@\"");
    script(&folder.join("tasukid"), &text);
    rig.ask(&["upgrade", "--with", folder.to_str().unwrap()]);
    rig.await_event("the keeper is dead; another is told everything anew");
    let (same, other) = rig.await_pair("red");
    assert_eq!([&same, &other].map(pid), [&driver, &standby].map(pid), "{}", rig.log());
    // The next keeper has everything.
    until(&rig, "there is another", || rig.keeper().is_some_and(|another| another != keeper));
    rig.kill_daemon();
    [&same, &other].iter().for_each(|worker| signal(pid(worker), Signal::KILL));
    rig.start();
    rig.await_pair("red");
    assert_eq!(rig.ask(&["events"]).matches("is open").count(), 1, "{}", rig.log());
}

#[test]
fn an_upgrade_of_all_stops_at_the_first_trouble_and_says_how_far_it_came() {
    let rig = Rig::new();
    rig.await_pair("red");
    rig.await_worker("blue", "idle");
    let (daemon, folder) = (rig.daemon_pid(), version(&rig, "next"));
    let unfit = rig.program("unfit", "dies-at-start");
    copy(unfit, folder.join("worker"));
    let said = rig.refused(&["upgrade", "--with", folder.to_str().unwrap()]);
    assert!(said.contains("0 of 3 nodes are upgraded, and not blue, green, red: "), "{said}");
    rig.await_pair("red");
    fs::remove_file(folder.join("worker")).expect("a file");
    let said = rig.ask(&["upgrade", "--with", folder.to_str().unwrap()]);
    assert!(said.contains("node red keeps its program: that folder has no worker"), "{said}");
    fs::remove_file(folder.join("tasukid")).expect("a file");
    for (folder, why) in [(folder, "has none of the programs that run"), (rig.path("nowhere"), "is no folder")] {
        let said = rig.refused(&["upgrade", "--with", folder.to_str().unwrap()]);
        assert!(said.contains("nothing was upgraded: ") && said.contains(why), "{said}");
    }
    assert_eq!(rig.json(&["status"])["pid"], daemon);
}

#[test]
fn an_upgrade_of_all_goes_on_when_nodes_go_meanwhile() {
    let rig = Rig::new();
    rig.ask(&["node", "add", "grey", "--native", "--work", "sink", "--vni", "lan"]);
    rig.await_pair("red");
    rig.await_worker("blue", "idle");
    rig.await_worker("green", "idle");
    let (grey, standby) = rig.await_pair("grey");
    let [folder, begun, go, worker] = ["next", "begun", "go", "worker"].map(|name| rig.path(name));
    fs::create_dir(&folder).expect("a folder");
    // The first node's next worker waits until the others are as they should be.
    let text = ": > BEGUN; while [ -e ALIVE ] && [ ! -e GO ]; do sleep 0.01; done; exec WORKER \"$@\"";
    let text = [("BEGUN", &begun), ("ALIVE", &rig.path("alive")), ("GO", &go), ("WORKER", &worker)]
        .iter()
        .fold(text.to_owned(), |text, (word, path)| text.replace(word, path.to_str().unwrap()));
    script(&folder.join("worker"), &text);
    let upgrade = rig
        .command(&["upgrade", "--workers-only", "--with", folder.to_str().unwrap()])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("a program");
    until(&rig, "the upgrade of blue has begun", || begun.exists());
    rig.ask(&["node", "remove", "green"]);
    signal(pid(&grey), Signal::STOP);
    let removes = rig.command(&["node", "remove", "grey"]).stdout(Stdio::null()).spawn().expect("a program");
    until(&rig, "its workers are told to end", || !lives(pid(&standby)));
    fs::write(&go, "").expect("a file");
    let output = upgrade.wait_with_output().expect("an end");
    let [said, why] = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(output.status.success(), "{said}{why}\n{}", rig.log());
    signal(pid(&grey), Signal::CONT);
    assert!(removes.wait_with_output().expect("an end").status.success());
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines[1..3], ["green", "grey"].map(|node| format!("node {node} is gone: it was removed meanwhile")));
    assert_eq!((lines.len(), lines[4]), (5, "2 of 4 nodes are upgraded, 2 gone"), "{said}");
}

#[test]
fn the_daemon_goes_on_as_no_program_that_would_not_begin() {
    let rig = Rig::new();
    let (driver, standby) = rig.await_pair("red");
    let folder = rig.path("next");
    fs::create_dir(&folder).expect("a folder");
    let since = rig.json(&["status"])["up_ms"].as_u64().expect("a time");
    for (text, why) in [
        ("exit 0", "is no tasukid; name one"),
        ("kill -SEGV $$", "so tasukid stays what it is: it does not say why (signal: 11 "),
        (
            "printf \"error: unexpected argument '--config'\\n\\ntry --help\\n\" >&2; exit 2",
            ": unexpected argument '--config'",
        ),
        ("echo tasukid: it is too new >&2; exit 3", "so tasukid stays what it is: it is too new"),
        (
            "echo 'tasukid 9.0 takes the configuration x and has registry 1 and messages 99'",
            "cannot take over, since it takes the configuration x and has registry 1 and messages 99, and this tasukid has ",
        ),
        ("sleep 1000 & exec sleep 1000", "has not said within 10 s whether it takes the configuration"),
    ] {
        script(&folder.join("tasukid"), text);
        let said = rig.refused(&["upgrade", "--with", folder.to_str().unwrap()]);
        assert!(said.contains(why), "{said}");
    }
    let good = fs::read_to_string(rig.path("tasuki.toml")).expect("a file");
    rig.configure(|text| text + "\n[[node]]\nname = \"red\"\nwork = \"sink\"\n");
    let said = rig.refused(&["upgrade"]);
    assert!(said.contains("so tasukid stays what it is: ") && said.contains("red"), "{said}");
    // What the next tasukid would do with a changed file is for tasuki plan to say.
    fs::write(rig.path("tasuki.toml"), "").expect("a file");
    let said = rig.refused(&["upgrade"]);
    assert!(said.contains("tasuki.toml has changed since tasukid read it; apply the change first"), "{said}");
    fs::remove_file(rig.path("tasuki.toml")).expect("a file");
    assert!(rig.refused(&["upgrade"]).contains("so tasukid stays what it is: the configuration"));
    let unbuilt = version(&rig, "unbuilt");
    fs::write(rig.path("tasuki.toml"), good.replace(&rig.path("worker").display().to_string(), "/nowhere/worker"))
        .expect("a file");
    let said = rig.refused(&["upgrade", "--with", unbuilt.to_str().unwrap()]);
    assert!(said.contains("so tasukid stays what it is: /nowhere/worker is not there"), "{said}");
    fs::write(rig.path("tasuki.toml"), good).expect("a file");
    let status = rig.json(&["status"]);
    assert!(status["up_ms"].as_u64().expect("a time") > since && status["pid"] == rig.daemon_pid());
    let pids = |(driver, standby): (Value, Value)| (pid(&driver), pid(&standby));
    assert_eq!(pids(rig.await_pair("red")), pids((driver, standby)));
}

/// A program that passes its check, and finds the directory taken when it begins.
#[test]
fn the_daemon_goes_on_as_it_was_if_the_other_program_fails_after_its_check() {
    let rig = Rig::new();
    let (driver, standby) = rig.await_pair("red");
    let (daemon, folder) = (rig.daemon_pid(), version(&rig, "next"));
    let own = fs::read_link(format!("/proc/{daemon}/exe")).expect("a program");
    fs::rename(folder.join("tasukid"), folder.join("real")).expect("a file");
    let [real, own_name] = [folder.join("real"), own.clone()].map(|path| path.display().to_string());
    let (lock, alive) = (rig.dir().join("tasukid.lock"), rig.path("alive"));
    // Whoever has the lock lets go of it once the process is the former program again, or the test is over.
    let text = format!(
        "case \"$*\" in *--check*) exec {real} \"$@\";; esac\nexec 9>>{}; flock 9\n\
        (while [ -e {} ] && [ \"$(readlink /proc/$$/exe)\" != {own_name} ]; do sleep 0.01; done) &\n\
        exec 9>&-; exec {real} \"$@\"",
        lock.display(),
        alive.display()
    );
    script(&folder.join("tasukid"), &text);
    let said = rig.refused(&["upgrade", "--with", folder.to_str().unwrap()]);
    for part in
        ["tasukid goes on as it was, and its workers as well: version ", "has not begun (a tasukid is at work in"]
    {
        assert!(said.contains(part), "{said}");
    }
    assert_eq!(fs::read_link(format!("/proc/{daemon}/exe")).expect("a program"), own, "in the same process");
    assert_eq!(fs::read_to_string(format!("/proc/{daemon}/comm")).expect("a name"), "tasukid\n");
    assert_eq!(fs::read_link(format!("/proc/{daemon}/fd/0")).expect("a file"), Path::new("/dev/null"));
    let pids = |(driver, standby): (Value, Value)| (pid(&driver), pid(&standby));
    assert_eq!(pids(rig.await_pair("red")), pids((driver, standby)), "its workers go on");
    rig.await_event("tasukid goes on as it was: version ");
    assert!(rig.ask(&["status"]).contains("\ntasukid goes on as it was: version "));
    // The next one that begins has nothing to say.
    fs::rename(folder.join("real"), folder.join("tasukid")).expect("a file");
    rig.ask(&["upgrade", "--with", folder.to_str().unwrap()]);
    let status = rig.json(&["status"]);
    assert_eq!((&status["pid"], &status["not_replaced"]), (&Value::from(daemon), &Value::Null));
    assert_eq!(fs::read_link(format!("/proc/{daemon}/fd/0")).expect("a file"), Path::new("/dev/null"));
}

/// The new program waits until a worker of before drives the NIC.
#[test]
fn a_nic_that_opens_while_the_worker_of_an_upgrade_starts_goes_to_that() {
    let (nodes, eth0) = NODES.split_at(NODES.find("[[nic]]").expect("a NIC"));
    let rig = Rig::with(nodes, "");
    let before = rig.await_worker("red", "idle");
    let [next, waits, worker] = ["next", "waits", "worker"].map(|name| rig.path(name));
    mknodat(CWD, &waits, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("a pipe");
    let mut goes = fs::File::options().read(true).write(true).open(&waits).expect("a pipe");
    let text = "[ -p WAITS ] && read line < WAITS; exec WORKER \"$@\"";
    script(&next, &text.replace("WAITS", waits.to_str().unwrap()).replace("WORKER", worker.to_str().unwrap()));
    let next = next.to_str().unwrap();
    let upgrade = rig.command(&["worker", "upgrade", "red", "--with", next]).stdout(Stdio::piped()).spawn();
    until(&rig, "its worker starts", || rig.workers().iter().any(|worker| worker["binary"] == next));
    rig.configure(|text| text + eth0);
    rig.ask(&["apply"]);
    assert_eq!(rig.await_worker("red", "drives")["worker"], before["worker"]);
    fs::remove_file(&waits).expect("it is there");
    goes.write_all(b"\n").expect("a pipe");
    let said = upgrade.expect("a program").wait_with_output().expect("it ends");
    let went = format!("; eth0 went from worker {} to worker ", before["worker"]);
    assert!(String::from_utf8_lossy(&said.stdout).contains(&went), "{said:?}\n{}", rig.log());
    assert_eq!(rig.worker("red", "drives").expect("a driver")["binary"], next);
    assert_eq!(rig.await_pair_of_one_program("red").0["binary"], next);
}

#[test]
fn a_signal_that_comes_between_two_programs_is_the_next_ones() {
    let mut rig = Rig::new();
    let (driver, _) = rig.await_pair("red");
    let (daemon, folder) = (rig.daemon_pid(), version(&rig, "next"));
    let [real, go] = ["real", "go"].map(|name| rig.path(name));
    fs::rename(folder.join("tasukid"), &real).expect("a file");
    mknodat(CWD, &go, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("a pipe");
    // A shell that starts no process leaves its mask of signals as it is.
    let text = "case \"$*\" in *--check*) exec REAL \"$@\";; esac\nread _ < GO; exec REAL \"$@\"";
    let text = text.replace("GO", go.to_str().unwrap()).replace("REAL", real.to_str().unwrap());
    script(&folder.join("tasukid"), &text);
    let upgrade = |sent: &[Signal]| {
        let mut command = rig.command(&["upgrade", "--with", folder.to_str().unwrap()]);
        let mut command = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("a program");
        // It is open once the shell has opened it, too.
        let mut go = fs::OpenOptions::new().write(true).open(&go).expect("a pipe");
        sent.iter().for_each(|sent| signal(daemon, *sent));
        go.write_all(b"\n").expect("the shell reads");
        command.kill().and_then(|()| command.wait()).expect("a child");
    };
    upgrade(&[Signal::HUP, Signal::USR1]);
    until(&rig, "it serves", || rig.tasuki(&["status"]).status.success());
    rig.await_event("tasuki.toml, is applied: nothing changes");
    until(&rig, "the log is opened anew", || rig.log().contains("is opened anew (SIGUSR1)"));
    assert_eq!((rig.daemon_pid(), pid(&rig.await_pair("red").0)), (daemon, pid(&driver)));
    upgrade(&[Signal::TERM]);
    rig.daemon_ends();
    assert!(lives(pid(&driver)));
    rig.start();
    rig.stop();
}

/// The new program runs once, so that it has no stand-by.
#[test]
fn a_node_that_falls_back_on_the_program_before_says_so() {
    let rig = Rig::new();
    let (_, standby) = rig.await_pair("red");
    let [next, was_here, worker] = ["next", "was-here", "worker"].map(|name| rig.path(name));
    let text = "[ -e WAS_HERE ] && exit 1; : > WAS_HERE; exec WORKER \"$@\"";
    let text = text.replace("WAS_HERE", was_here.to_str().unwrap()).replace("WORKER", worker.to_str().unwrap());
    script(&next, &text);
    rig.ask(&["worker", "upgrade", "red", "--with", next.to_str().unwrap()]);
    let driver = rig.worker("red", "drives").expect("the new one");
    let says = || rig.ask(&["status"]).contains("of the program from before its last upgrade");
    assert!(!says() && driver["binary"] == next.to_str().unwrap());
    rig.kill(&driver);
    until(&rig, "the former program drives", || {
        rig.worker("red", "drives").is_some_and(|now| now["binary"] == worker.to_str().unwrap())
    });
    until(&rig, "it is said", says);
    assert!(lives(pid(&standby)));
    // The fresh worker dies, and the driver has the settings of before.
    rig.configure(|text| text.replacen("work = \"echo\"", "work = \"echo\"\npoll = true", 1));
    rig.refused(&["apply"]);
    assert!(!rig.is_as_configured());
    fs::remove_file(was_here).expect("a file");
    rig.ask(&["worker", "upgrade", "red", "--with", worker.to_str().unwrap()]);
    until(&rig, "all is well", || !says() && rig.is_as_configured());
}

#[test]
fn an_upgrade_says_that_the_next_daemon_has_ended() {
    let mut rig = Rig::new();
    let (driver, _) = rig.await_pair("red");
    let folder = version(&rig, "next");
    let real = rig.path("real");
    fs::rename(folder.join("tasukid"), &real).expect("a file");
    let text = format!("case \"$*\" in *--check*) exec {} \"$@\";; esac\nexit 1", real.display());
    script(&folder.join("tasukid"), &text);
    let said = rig.refused(&["upgrade", "--with", folder.to_str().unwrap()]);
    assert!(said.contains("but no tasukid is at work any more, and its log says why; the workers go on"), "{said}");
    assert!(lives(pid(&driver)));
    rig.start();
    assert_eq!(pid(&rig.await_pair("red").0), pid(&driver));
}

#[test]
fn a_daemon_whose_nodes_have_cpus_finds_them_again() {
    let Ok(ours) = rustix::thread::sched_getaffinity(None) else { panic!("this test runs somewhere") };
    let first = (0..rustix::thread::CpuSet::MAX_CPU).find(|cpu| ours.is_set(*cpu)).expect("a CPU");
    let nodes = NODES.replacen("work = \"echo\"", &format!("work = \"echo\"\ncpu = {first}"), 1);
    let rig = Rig::with(&nodes, "");
    for _ in 0..2 {
        rig.await_pair("red");
        rig.ask(&["upgrade"]);
    }
}

/// As on a machine that isolates CPUs, which no process gets without asking.
#[test]
fn a_node_has_a_cpu_on_which_tasukid_does_not_run() {
    let usable = housekeeping_cpus::usable();
    let [own, nodes, ..] = usable[..] else { return println!("skipped: needs two CPUs") };
    let (own, nodes) = (own.to_string(), nodes.to_string());
    if !alone_under(&["taskset", "-c", &own], a_node_has_a_cpu_on_which_tasukid_does_not_run) {
        return;
    }
    let Some(mut world) = World::new() else { return };
    let words = ["node", "add", "sink", "--native", "--work", "sink", "--mac", "02:00:00:00:00:88", "--cpu", &nodes];
    world.rig.ask(&words);
    let are_there = |rig: &Rig| {
        let driver = pid(&rig.await_pair("sink").0);
        until(rig, "it runs on its CPU", || process::status(driver, "Cpus_allowed_list").as_ref() == Some(&nodes));
        let threads = fs::read_dir(format!("/proc/{}/task", rig.daemon_pid())).expect("a process").flatten();
        let its = |thread: &fs::DirEntry| process::status(thread.file_name().display(), "Cpus_allowed_list");
        let on: Vec<_> = { threads }.filter_map(|thread| its(&thread)).collect();
        assert!(on.len() > 1 && on.iter().all(|on| *on == own), "{on:?}");
        driver
    };
    let driver = are_there(&world.rig);
    world.rig.kill_daemon();
    world.rig.start();
    assert_eq!(are_there(&world.rig), driver);
    world.rig.kill_driver("sink");
    are_there(&world.rig);
    world.rig.ask(&["upgrade"]);
    are_there(&world.rig);
    world.end();
}

#[test]
fn no_frame_is_lost_while_all_is_replaced() {
    let Some((mut rig, model)) = with_card("82574l", NODES, ENDLESS, "4000") else { return };
    rig.start();
    rig.await_pair("red");
    until(&rig, "frames flow", || moves(&rig) > 0);
    let folder = version(&rig, "next");
    copy(beside("tasuki-worker").expect("looked for before"), folder.join("tasuki-worker"));
    for words in [&["upgrade", "--with", folder.to_str().unwrap()][..], &["upgrade"]] {
        println!("{}", rig.ask(words));
        rig.await_pair("red");
    }
    stop_whole(&mut rig, model);
}

/// The last release runs first. So this fails if this version no longer understands its messages, its registry, its shared
/// pages, or the descriptors that its keeper holds.
#[test]
fn all_goes_to_this_version_from_the_one_before_and_back_and_no_frame_is_lost() {
    let Some(before) = released() else { return };
    for card in ["82574l", "virtio-net"] {
        let Some((mut rig, model)) = with_card(card, NODES, ENDLESS, "4000") else { return };
        let worker = beside("tasuki-worker").expect("looked for before");
        rig.configure(|text| text.replace(&format!("{worker:?}"), &format!("{:?}", before.join("tasuki-worker"))));
        rig.tasukid = before.join("tasukid");
        rig.start();
        rig.await_pair("red");
        until(&rig, "frames flow", || moves(&rig) > 0);
        with_source_and_sink(&rig, "1000");
        let now = worker.parent().expect("a folder").to_owned();
        for folder in [&now, &before, &now] {
            println!("{}", rig.ask(&["upgrade", "--with", folder.to_str().expect("text")]));
            for node in ["red", "sink", "source"] {
                let program = folder.join("tasuki-worker");
                let is_of = |it: &Value| it["binary"] == program.to_str().expect("text");
                // A stand-by of before stays until the fresh one is ready.
                until(&rig, "its workers are of this release", || {
                    let (driver, standby) = rig.await_pair(node);
                    is_of(&driver) && is_of(&standby)
                });
            }
            assert_eq!(
                fs::read_link(format!("/proc/{}/exe", rig.daemon_pid())).expect("a program"),
                folder.join("tasukid")
            );
            let (driver, _) = rig.await_pair("red");
            signal(pid(&driver), Signal::KILL);
            rig.await_pair("red");
            flows(&rig, 100);
        }
        rig.ask(&["node", "remove", "source"]);
        assert_exact(&rig);
        stop_whole(&mut rig, model);
    }
}
