//! Commands that look at the machine, and not at the daemon's nodes.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;
use std::sync::{Arc, Mutex};

use rustix::process::Signal;
use tasuki_testing::Program;

use super::rig::{Rig, pid, signal, until};

#[test]
fn a_doctor_names_the_daemon_and_leaves_no_group_behind() {
    let rig = Rig::new();
    let doctor = rig.command(&["doctor"]).stdout(Stdio::piped()).spawn().expect("a program");
    let pid = doctor.id();
    let output = doctor.wait_with_output().expect("it ends");
    let said = String::from_utf8(output.stdout).expect("text");
    println!("{said}");
    let words: Vec<&str> = said.lines().filter_map(|line| line.split_whitespace().next()).collect();
    assert!(words.iter().all(|word| ["ok", "less", "no"].contains(word)) && words.len() > 10);
    assert_eq!(output.status.success(), !words.contains(&"no"), "its status is for scripts");
    let at_work = format!("tasukid is at work in {} (process {})", rig.dir().display(), rig.daemon_pid());
    assert!(said.contains(&at_work), "{said}");
    let mounts = std::fs::read_to_string("/proc/mounts").expect("mounts");
    let groups = mounts.lines().filter(|line| line.contains(" cgroup")).filter_map(|line| line.split(' ').nth(1));
    for group in groups {
        assert!(!std::path::Path::new(group).join(format!("tasuki/doctor-{pid}")).exists(), "{group}");
    }
}

#[test]
fn a_doctor_asked_by_root_of_a_user_namespace_does_not_say_that_workers_start_there() {
    let rig = Rig::without_daemon("", "");
    let mut command = std::process::Command::new("unshare");
    command.args(["--user", "--map-root-user", super::rig::TASUKI, "--dir"]).arg(rig.dir()).arg("doctor");
    let output = command.output().expect("unshare is there");
    let said = String::from_utf8(output.stdout).expect("text");
    if said.is_empty() {
        println!("skipped: no user namespace: {}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    assert!(!output.status.success() && said.contains("no    user         root of a user namespace"), "{said}");
}

#[test]
fn shells_and_manuals_know_all_commands() {
    let rig = Rig::without_daemon("", "");
    for shell in ["bash", "zsh", "fish"] {
        let script = rig.ask(&["completions", shell]);
        assert!(["upgrade", "apply", "doctor", "json"].iter().all(|word| script.contains(word)), "{shell}");
    }
    let folder = tempfile::tempdir().expect("a folder");
    rig.ask(&["man", &folder.path().display().to_string()]);
    let page = std::fs::read_to_string(folder.path().join("tasuki-nic-give.1")).expect("a page for each command");
    assert!(page.contains("Give a NIC to another node"), "{page}");
}

/// Types keys into `tasuki top` on a terminal of its own: each once it has drawn one of those texts after the key before
/// it, for of two keys that come at once it takes one. Returns what it drew, and whether it ended well. Calls `before_last`
/// before the last key.
fn on_a_terminal(rig: &Rig, words: &str, keys: &[(&[&str], &str)], before_last: impl FnOnce()) -> (String, bool) {
    // A key that is lost on its way keeps no suite waiting.
    let top = format!("{} --dir {} top {words}", super::rig::TASUKI, rig.dir().display());
    let top = format!("stty cols 100 rows 20; exec timeout --foreground {} {top}", tasuki_testing::PATIENCE.as_secs());
    let mut command = std::process::Command::new("script");
    command.args(["--quiet", "--return", "--command", &top, "/dev/null"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut script = Program::start(&mut command);
    let mut typed = script.0.stdin.take().expect("a pipe");
    let mut shown = script.0.stdout.take().expect("a pipe");
    let mut drawn = Vec::new();
    let (last, first) = keys.split_last().expect("a key ends it");
    let mut draws = |texts: &[&str]| {
        let (from, mut room) = (drawn.len(), [0; 4096]);
        let is_there = |drawn: &[u8]| {
            let drawn = String::from_utf8_lossy(drawn);
            texts.iter().any(|text| drawn.contains(text))
        };
        while !is_there(&drawn[from..]) {
            let len = shown.read(&mut room).expect("it is read");
            assert!(len > 0, "it has ended before {texts:?}: {}", String::from_utf8_lossy(&drawn));
            drawn.extend(&room[..len]);
        }
    };
    for (texts, key) in first {
        draws(texts);
        typed.write_all(key.as_bytes()).expect("it reads");
    }
    draws(last.0);
    before_last();
    typed.write_all(last.1.as_bytes()).expect("it reads");
    shown.read_to_end(&mut drawn).expect("it is read");
    (String::from_utf8(drawn).expect("text"), script.0.wait().expect("a child").success())
}

#[test]
fn top_shows_what_happens_on_a_terminal_and_from_a_recording() {
    let rig = Rig::new();
    let (driver, _) = rig.await_pair("red");
    let keys: [(&[&str], &str); 3] =
        [(&["eth0 is driven by worker"], " "), (&["stands still"], " "), (&["space stops"], "q")];
    let (drawn, ended) = on_a_terminal(&rig, "--every-ms 100", &keys, || ());
    let last = drawn.rsplit("\x1b[H").next().expect("a picture");
    println!("{last}");
    assert!(
        ended && drawn.starts_with("\x1b[?1049h") && drawn.contains("\x1b[?1049l"),
        "the screen is as before: {drawn:?}"
    );
    for part in [format!("red    echo  {} drives", driver["worker"]), "eth0 is driven by worker".to_owned()] {
        assert!(last.contains(&part), "{part}: {last}");
    }
    assert!(drawn.contains("stands still; space goes on, q ends"), "{drawn:?}");
    // While tasukid stands still.
    let daemon = rig.daemon_pid();
    let stops = || {
        signal(daemon, Signal::STOP);
        // It asks again meanwhile; nothing that can be waited for says so.
        std::thread::sleep(std::time::Duration::from_millis(300));
    };
    let keys: [(&[&str], &str); 2] = [(&["space stops"], "x"), (&["space stops"], "q")];
    let (drawn, ended) = on_a_terminal(&rig, "--every-ms 100", &keys, stops);
    signal(daemon, Signal::CONT);
    assert!(ended && !drawn.contains("has not answered for 20 s"), "q ends it at once: {drawn:?}");
    // Not on a terminal, and a recording of it.
    assert!(rig.refused(&["top"]).contains("with --json it writes a line for each look"));
    let mut recorder = rig.command(&["top", "--json", "--every-ms", "100"]);
    let mut recorder = Program::start(recorder.stdout(Stdio::piped()));
    let lines = BufReader::new(recorder.0.stdout.take().expect("a pipe")).lines().map_while(Result::ok);
    let looks: Vec<String> = lines.take(3).collect();
    recorder.kill();
    std::fs::write(rig.path("looks"), looks.join("\n")).expect("a file");
    let play = format!("--play {}", rig.path("looks").display());
    // At the last look it stands still without a key.
    let back = ["look 1 of 3, stands still", "look 2 of 3, stands still"];
    let keys: [(&[&str], &str); 4] =
        [(&["look 1 of 3"], "\x1b[D"), (&back, "\x1b[C"), (&["; space, left"], " "), (&["; space, left"], "q")];
    let (drawn, ended) = on_a_terminal(&rig, &play, &keys, || ());
    assert!(
        ended && drawn.contains("look 1 of 3, goes on") && drawn.contains("stands still; space, left"),
        "{drawn:?}"
    );
    std::fs::write(rig.path("looks"), "{}").expect("a file");
    let said = rig.refused(&["top", "--play", &rig.path("looks").display().to_string()]);
    assert!(said.contains("looks:1 is no look of this version's"), "{said}");
}

/// Asks as a server of Prometheus does.
fn scraped(address: &str, path: &str) -> Option<String> {
    let mut stream = TcpStream::connect(address).ok()?;
    write!(stream, "GET {path} HTTP/1.1\r\nhost: {address}\r\n\r\n").ok()?;
    let mut said = String::new();
    stream.read_to_string(&mut said).ok()?;
    Some(said)
}

/// Another process has its address by the time that the daemon starts anew, or goes on as another program.
#[test]
fn a_daemon_with_workers_begins_though_nothing_can_be_scraped() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address").to_string();
    let mut rig = Rig::new();
    let (driver, _) = rig.await_pair("red");
    rig.configure(|text| text.replace("[daemon]\n", &format!("[daemon]\nmetrics = \"{address}\"\n")));
    rig.ask(&["apply"]);
    let why = format!("metrics: {address} cannot be listened at");
    rig.kill_daemon();
    rig.start();
    let lacks = |rig: &Rig| rig.json(&["status"])["trouble"].as_str().is_some_and(|said| said.contains(&why));
    assert!(lacks(&rig));
    assert_eq!(pid(&rig.await_worker("red", "drives")), pid(&driver));
    rig.await_pair("red");
    rig.ask(&["upgrade"]);
    assert!(lacks(&rig));
    rig.await_event(&why);
    drop(taken);
    rig.await_pair("red");
    rig.ask(&["upgrade"]);
    assert!(rig.json(&["status"])["trouble"].is_null());
    assert!(scraped(&address, "/metrics").is_some_and(|said| said.contains("tasuki_info")));
    rig.stop();
}

#[test]
fn a_server_of_prometheus_reads_the_counts_and_nothing_else() {
    // No other test gets a port there.
    let address =
        std::net::TcpListener::bind("127.0.7.9:0").and_then(|it| it.local_addr()).expect("a port").to_string();
    let mut rig = Rig::without_daemon(super::rig::NODES, "");
    rig.configure(|text| text.replace("[daemon]\n", &format!("[daemon]\nmetrics = \"{address}\"\n")));
    rig.start();
    rig.await_pair("red");
    let said = scraped(&address, "/metrics").expect("an answer");
    assert!(said.starts_with("HTTP/1.1 200") && said.contains("content-type: text/plain; version=0.0.4"), "{said}");
    assert!(said.contains("\ntasuki_nic_driven{nic=\"eth0\",node=\"red\"} 1\n"), "{said}");
    assert!(said.contains("\ntasuki_node_workers{node=\"red\"} 2\n"), "{said}");
    let said = scraped(&address, "/v1/status").expect("an answer");
    assert!(said.starts_with("HTTP/1.1 404") && said.contains("GET /metrics; ask tasukid's socket"), "{said}");
    // Silent callers keep other callers of this address out for seconds. The socket answers meanwhile.
    let silent: Vec<TcpStream> = (0..40).map(|_| TcpStream::connect(&address).expect("a connection")).collect();
    assert_eq!(rig.json(&["nic", "list"])[0]["is"], "driven");
    until(&rig, "the silent ones are gone", || {
        scraped(&address, "/metrics").is_some_and(|said| said.contains("tasuki_info"))
    });
    drop(silent);
    rig.ask(&["nic", "give", "eth0", "--to", "green"]);
    until(&rig, "green drives", || {
        scraped(&address, "/metrics").is_some_and(|it| it.contains("tasuki_nic_driven{nic=\"eth0\",node=\"green\"} 1"))
    });
}

#[test]
fn what_counts_when_the_daemon_begins_is_that_of_the_configuration_in_force() {
    let address =
        std::net::TcpListener::bind("127.0.7.10:0").and_then(|it| it.local_addr()).expect("a port").to_string();
    let mut rig = Rig::new();
    let own = std::fs::read_to_string(rig.path("tasuki.toml")).expect("a file");
    let other = rig.path("other.toml").display().to_string();
    std::fs::write(&other, own.replace("[daemon]\n", &format!("[daemon]\nmetrics = \"{address}\"\n"))).expect("a file");
    let starts_anew = |rig: &mut Rig| {
        rig.kill_daemon();
        rig.start();
    };
    let is_open = |rig: &Rig| {
        let mode = std::fs::metadata(rig.dir().join("api.sock")).expect("a socket").permissions().mode();
        (mode & 0o066 != 0, scraped(&address, "/metrics").is_some())
    };
    let shows = |rig: &Rig| {
        let shown = rig.ask(&["config", "show"]);
        (shown.contains("[api]"), shown.contains("metrics = "))
    };
    rig.ask(&["apply", &other]);
    assert_eq!(is_open(&rig), (false, false), "it counts when tasukid starts anew");
    starts_anew(&mut rig);
    assert_eq!((shows(&rig), is_open(&rig)), ((false, true), (false, true)));
    // The daemon's file changes, and the other one is applied once more.
    rig.configure(|text| text + "\n[api]\nread = [\"user:65534\"]\n");
    let refused = rig.refused(&["apply"]);
    assert!(rig.ask(&["status"]).contains("tasuki.toml has changed since tasukid read it, and counts in place of "));
    let why = "[api] differs from what tasukid began with, and counts only then; write the whole configuration into ";
    assert!(refused.contains(why) && refused.contains("tasuki.toml, and start tasukid anew"), "{refused}");
    rig.ask(&["apply", &other]);
    starts_anew(&mut rig);
    assert_eq!((shows(&rig), is_open(&rig)), ((true, false), (true, false)));
    rig.ask(&["apply"]);
    starts_anew(&mut rig);
    assert_eq!((shows(&rig), is_open(&rig)), ((true, false), (true, false)));
}

#[test]
fn a_follower_of_events_hears_of_those_of_the_next_daemon() {
    let mut rig = Rig::new();
    rig.await_pair("red");
    rig.await_worker("blue", "idle");
    rig.await_worker("green", "idle");
    let mut command = rig.command(&["events", "--follow"]);
    let mut follower = Program::start(command.stdout(Stdio::piped()));
    let heard = Arc::new(Mutex::new(String::new()));
    let (lines, into) = (BufReader::new(follower.0.stdout.take().expect("a pipe")).lines(), heard.clone());
    let reader = std::thread::spawn(move || {
        lines.map_while(Result::ok).for_each(|line| into.lock().expect("a text").push_str(&(line + "\n")));
    });
    let hears = |rig: &Rig, part: &str| until(rig, part, || heard.lock().expect("a text").contains(part));
    hears(&rig, "eth0 is driven by worker");
    hears(
        &rig,
        &format!(
            "(process {}), with generation 1 of the configuration; workers of an earlier tasukid: 0",
            rig.daemon_pid()
        ),
    );
    rig.kill_daemon();
    rig.start();
    hears(&rig, "eth0 was driven by worker");
    hears(
        &rig,
        &format!(
            "(process {}), with generation 1 of the configuration; workers of an earlier tasukid: 4",
            rig.daemon_pid()
        ),
    );
    let former = rig.daemon_pid();
    signal(former, Signal::TERM);
    rig.daemon_ends();
    rig.start();
    hears(&rig, &format!("tasukid ends (process {former}), as a signal asked"));
    rig.ask(&["nic", "give", "eth0", "--to", "green"]);
    hears(&rig, "of node green, after");
    // The next one counts its events from 1 again.
    rig.stop();
    rig.start();
    hears(&rig, &format!("(process {}), with generation 1 of the configuration", rig.daemon_pid()));
    assert!(follower.is_running());
    follower.kill();
    reader.join().expect("it ends with the pipe");
}

#[test]
fn up_returns_when_all_is_at_work_and_down_when_nothing_is() {
    let rig = Rig::without_daemon(super::rig::NODES, "");
    let file = rig.path("tasuki.toml").display().to_string();
    let other = rig.path("other.toml").display().to_string();
    std::fs::copy(&file, &other).expect("a file");
    let up_with = |rig: &Rig, file: &str| {
        let mut command = rig.command(&["up", file]);
        // Marks all its descendants as processes of this rig.
        let output = command.env("TASUKI_ALIVE", rig.path("alive")).output().expect("a program");
        let (said, why) = (output.stdout, String::from_utf8_lossy(&output.stderr).into_owned());
        (output.status.success(), String::from_utf8_lossy(&said).into_owned() + &why)
    };
    let up = |rig: &Rig| up_with(rig, &file);
    let (done, said) = up(&rig);
    assert!(done && said.contains("is at work in") && said.contains("3 nodes and 1 NIC are at work after "), "{said}");
    let workers = rig.workers();
    assert!(workers.iter().any(|it| it["node"] == "red" && it["is"] == "drives"), "{workers:?}");
    // The same again changes nothing, and another file is applied.
    let (done, said) = up(&rig);
    assert!(done && said.contains("3 nodes and 1 NIC"), "{said}");
    rig.configure(|text| text + "\n[[node]]\nname = \"pink\"\nwork = \"echo\"\n");
    let (done, said) = up(&rig);
    assert!(done && said.contains("4 nodes and 1 NIC"), "{said}");
    // A tasukid that begins with workers of before goes by what was applied last, until the named file is.
    let (done, said) = up_with(&rig, &other);
    assert!(done && said.contains("3 nodes and 1 NIC"), "{said}");
    let daemon = rig.json(&["status"])["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok()).expect("a process");
    signal(daemon, Signal::TERM);
    until(&rig, "it ends", || !tasuki_testing::process::lives(daemon));
    // One that begins in the background reads it again, and would find nothing.
    let (done, said) = up_with(&rig, "/dev/stdin");
    assert!(!done && said.contains("the configuration /dev/stdin may be read once only"), "{said}");
    assert!(!rig.tasuki(&["status"]).status.success());
    let (done, said) = up(&rig);
    assert!(done && said.contains("is at work in") && said.contains("4 nodes and 1 NIC"), "{said}");
    // So is what was edited, and what was changed by hand.
    let daemon = rig.json(&["status"])["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok()).expect("a process");
    rig.ask(&["node", "remove", "pink"]);
    signal(daemon, Signal::TERM);
    until(&rig, "it ends", || !tasuki_testing::process::lives(daemon));
    rig.configure(|text| text.replace("work = \"echo\"\ntrusts", "work = \"echo\"\nnice = -2\ntrusts"));
    let (done, said) = up(&rig);
    assert!(done && said.contains("4 nodes and 1 NIC"), "{said}");
    assert!(rig.is_as_configured() && rig.ask(&["config", "show"]).contains("nice = -2"), "{said}");
    let pid = rig.json(&["status"])["pid"].as_u64().expect("a number");
    assert!(rig.ask(&["down"]).contains("workers have ended, and so does tasukid"));
    assert!(!tasuki_testing::process::lives(u32::try_from(pid).expect("a pid")), "it is gone when down returns");
    let left: Vec<_> = std::fs::read_dir(rig.dir()).expect("a folder").flatten().map(|it| it.file_name()).collect();
    assert!(left.iter().all(|name| ["tasukid.lock", "tasukid.log"].contains(&name.to_str().unwrap())), "{left:?}");
    // A mistake, and a node that never begins.
    rig.configure(|text| text.replace("\"pink\"\nwork", "\"pink\"\nwrok"));
    let (done, said) = up(&rig);
    assert!(!done && said.lines().count() == 1 && said.contains("wrok"), "{said}");
    rig.configure(|text| text.replace("wrok", "work"));
    rig.program("worker", "dies-at-start");
    let said = rig
        .command(&["up", &file, "--within", "1"])
        .env("TASUKI_ALIVE", rig.path("alive"))
        .output()
        .expect("a program");
    let why = String::from_utf8_lossy(&said.stderr);
    assert!(
        why.contains("not all is at work within 1 s, but tasukid goes on trying: ") && why.contains("pink"),
        "{why}"
    );
    rig.ask(&["stop"]);
}
