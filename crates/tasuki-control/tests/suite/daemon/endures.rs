//! Exhausted resources: disk space, descriptors. The daemon goes on, and reports the problem. Tests that fill a disk
//! need root.

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::symlink;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use hyper::Method;
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, prlimit};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::real::{ENDLESS, moves, stop_whole, with_model};
use super::rig::{NODES, Rig, lives, pid, signal, until};
use super::storm::{self, Storm, need_storm};

/// A small separate disk for filling. It is unmounted however the test ends.
struct Disk(TempDir);

impl Disk {
    /// Mounts the disk. Where mounting is not allowed, prints so and returns `None`.
    fn new() -> Option<Self> {
        let disk = Disk(tempfile::Builder::new().prefix("tasuki-disk-").tempdir().expect("a folder"));
        let mounted = disk.mount(&["-t", "tmpfs", "-o", "size=8m,mode=0700", "tmpfs"]);
        if !mounted.status.success() {
            println!("skipped: needs root, to mount a small disk");
            return None;
        }
        Some(disk)
    }

    fn mount(&self, words: &[&str]) -> Output {
        Command::new("mount").args(words).arg(self.0.path()).output().expect("mount")
    }

    fn filler(&self) -> PathBuf {
        self.0.path().join("filler")
    }

    /// Fills the disk completely.
    fn fill(&self) {
        let mut filler = fs::File::options().append(true).create(true).open(self.filler()).expect("a file");
        while filler.write_all(&[0; 4096]).is_ok() {}
    }

    /// Makes a rig whose daemon's directory is on this disk.
    fn rig(&self, fault: &str) -> Rig {
        let rig = Rig::without_daemon(NODES, fault);
        symlink(self.0.path(), rig.dir()).expect("a link");
        rig
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(self.0.path()).output();
    }
}

/// Kills a driver, and checks that its node gets its workers again.
fn kill_the_driver(rig: &Rig) {
    let (driver, _) = rig.await_pair("red");
    signal(pid(&driver), Signal::KILL);
    until(rig, "it is gone", || rig.workers().iter().all(|worker| worker["pid"] != driver["pid"]));
    rig.await_pair("red");
}

/// Returns whether `tasuki status` shows the fault of the daemon.
fn is_broken(rig: &Rig) -> bool {
    rig.ask(&["status"]).contains("registry.redb cannot be written (No space left on device")
}

#[test]
fn a_socket_of_the_api_that_somebody_deletes_is_there_again() {
    let rig = Rig::new();
    fs::remove_file(rig.dir().join("api.sock")).expect("it is there");
    until(&rig, "it is there", || rig.tasuki(&["status"]).status.success());
}

#[test]
fn a_directory_that_somebody_deletes_has_one_daemon_all_the_same() {
    let mut rig = Rig::new();
    let daemon = rig.daemon_pid();
    rig.delete_dir();
    until(&rig, "it is there", || rig.tasuki(&["status"]).status.success());
    let other = rig.tasukid().output().expect("it runs");
    assert!(String::from_utf8_lossy(&other.stderr).contains("a tasukid is at work in"), "{other:?}");
    // Another one is faster.
    signal(daemon, Signal::STOP);
    rig.delete_dir();
    let log = fs::File::create(rig.path("other")).expect("a file");
    let mut other = tasuki_testing::Program::start(rig.tasukid().stdout(Stdio::null()).stderr(log));
    until(&rig, "the other one serves", || rig.tasuki(&["status"]).status.success());
    signal(daemon, Signal::CONT);
    until(&rig, "the first one has looked", || rig.log().contains("is another tasukid's by now"));
    assert_eq!(rig.json(&["status"])["pid"], other.0.id());
    rig.ask(&["stop"]);
    other.0.wait().expect("a child");
    // The former one has it again.
    until(&rig, "it is there", || rig.tasuki(&["status"]).status.success());
    assert_eq!(rig.json(&["status"])["pid"], daemon);
    rig.stop();
}

#[test]
fn a_registry_whose_disk_is_full_is_written_when_there_is_room() {
    let Some(disk) = Disk::new() else { return };
    let mut rig = disk.rig("");
    rig.start();
    let (driver, _) = rig.await_pair("red");
    until(&rig, "the disk is full", || {
        disk.fill();
        rig.ask(&["worker", "upgrade", "blue"]);
        is_broken(&rig)
    });
    rig.await_event("registry.redb cannot be written (No space left on device");
    // Meanwhile everything works as usual, fences too.
    kill_the_driver(&rig);
    let (driver, standby) = {
        assert!(!lives(pid(&driver)));
        rig.await_pair("red")
    };
    assert!(is_broken(&rig), "there is no room yet");
    let said = rig.refused(&["upgrade"]);
    assert!(said.contains("tasukid stays what it is: ") && said.contains("make room there"), "{said}");
    fs::remove_file(disk.filler()).expect("room");
    rig.await_event("the registry is written again");
    assert!(!is_broken(&rig));
    let before = rig.ask(&["events"]);
    // The next daemon knows all of it.
    rig.kill_daemon();
    rig.start();
    let (drives, stands_by) = rig.await_pair("red");
    assert_eq!((&drives["pid"], &stands_by["pid"]), (&driver["pid"], &standby["pid"]), "{}", rig.log());
    let after = rig.ask(&["events"]);
    assert!(after.starts_with(&before[..before.rfind("the registry is written").expect("it")]), "{before}\n{after}");
    // One that begins after one that was ended all the same leaves nobody at work of whom it knows nothing.
    until(&rig, "the disk is full again", || {
        disk.fill();
        rig.ask(&["worker", "upgrade", "red"]);
        is_broken(&rig)
    });
    rig.ask(&["worker", "upgrade", "red"]);
    let (driver, standby) = rig.await_pair("red");
    rig.kill_daemon();
    fs::remove_file(disk.filler()).expect("room");
    signal(pid(&driver), Signal::STOP);
    rig.start();
    let (drives, stands_by) = rig.await_pair("red");
    rig.await_event(&format!("and hung: process {} was killed", pid(&driver)));
    for former in [&driver, &standby] {
        assert!(![&drives, &stands_by].iter().any(|now| now["pid"] == former["pid"]), "it is unknown");
        until(&rig, "it has ended", || !lives(pid(former)));
    }
}

#[test]
fn a_daemon_in_the_background_outlives_the_disk_of_its_log() {
    let Some(disk) = Disk::new() else { return };
    let rig = disk.rig("");
    let started = rig.tasukid_in(&rig.dir()).output().expect("a program");
    assert!(started.status.success(), "{}", String::from_utf8_lossy(&started.stderr));
    let process = rig.json(&["status"])["pid"].clone();
    rig.await_pair("red");
    let log = disk.0.path().join("tasukid.log");
    until(&rig, "neither log nor registry has room", || {
        disk.fill();
        let len = fs::metadata(&log).expect("a log").len();
        rig.ask(&["worker", "upgrade", "blue"]);
        is_broken(&rig) && fs::metadata(&log).expect("a log").len() == len
    });
    kill_the_driver(&rig);
    fs::remove_file(disk.filler()).expect("room");
    rig.await_event("the registry is written again");
    until(&rig, "the log says what it lacks", || {
        rig.ask(&["worker", "upgrade", "blue"]);
        fs::read_to_string(&log).is_ok_and(|log| log.contains("lines before this one could not be written here"))
    });
    assert_eq!(rig.json(&["status"])["pid"], process, "it was the same all the time");
    rig.ask(&["stop"]);
}

/// As logrotate does it.
#[test]
fn a_log_that_has_another_name_is_followed_by_a_fresh_one_on_sigusr1() {
    let rig = Rig::without_daemon(NODES, "");
    let started = rig.tasukid_in(&rig.dir()).output().expect("a program");
    assert!(started.status.success(), "{}", String::from_utf8_lossy(&started.stderr));
    let daemon = pid(&rig.json(&["status"]));
    let (log, former) = (rig.dir().join("tasukid.log"), rig.dir().join("tasukid.log.1"));
    let has = |path: &Path, part: &str| fs::read_to_string(path).is_ok_and(|text| text.contains(part));
    rig.await_pair("red");
    fs::rename(&log, &former).expect("a name");
    rig.ask(&["worker", "upgrade", "blue"]);
    until(&rig, "the former file has it", || has(&former, "was upgraded") || has(&former, "upgrade"));
    assert!(!log.exists());
    signal(daemon, Signal::USR1);
    until(&rig, "there is a fresh one", || has(&log, "tasukid.log is opened anew (SIGUSR1)"));
    // The program that it goes on as begins with the fresh one, and its file may be gone by the next time.
    rig.ask(&["upgrade"]);
    fs::remove_file(&log).expect("a file");
    signal(daemon, Signal::USR1);
    until(&rig, "there is another", || has(&log, "tasukid.log is opened anew (SIGUSR1)"));
    // Where none can be, the former file goes on, and the daemon as well.
    fs::rename(&log, &former).expect("a name");
    fs::create_dir(&log).expect("a folder");
    signal(daemon, Signal::USR1);
    until(&rig, "it says so", || has(&former, "cannot be opened anew (Is a directory"));
    rig.ask(&["stop"]);
}

/// Asserts that a daemon does not start, and says so in one sentence, in the foreground and in the background.
fn is_refused(rig: &Rig, parts: &[&str]) {
    for foreground in [true, false] {
        let mut command = rig.tasukid_in(&rig.dir());
        command.args(foreground.then_some("--foreground"));
        let output = command.stdout(Stdio::null()).output().expect("a program");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!((output.status.code(), said.lines().count()), (Some(1), 1), "{foreground}: {said}");
        assert!(said.starts_with("tasukid: ") && parts.iter().all(|part| said.contains(part)), "{foreground}: {said}");
    }
}

#[test]
fn a_daemon_that_is_started_on_a_full_disk_says_so_and_what_to_do() {
    let Some(disk) = Disk::new() else { return };
    let rig = disk.rig("");
    let full =
        ["(No space left on device", "its disk is full: make room there, or choose another directory with --dir"];
    disk.fill();
    is_refused(&rig, &full);
    // There is room for its process id, but not for a registry.
    let filler = fs::File::options().write(true).open(disk.filler()).expect("a file");
    filler.set_len(filler.metadata().expect("a file").len() - 4 * 4096).expect("room");
    fs::write(disk.0.path().join("tasukid.lock"), "1\n").expect("room");
    is_refused(&rig, &full);
}

#[test]
fn a_configuration_that_finds_no_room_leaves_the_file_that_was_there() {
    let Some(disk) = Disk::new() else { return };
    let rig = Rig::new();
    let file = disk.0.path().join("kept.toml");
    fs::write(&file, "# former\n").expect("a file");
    disk.fill();
    let said = rig.refused(&["config", "show", "--to", file.to_str().expect("a path")]);
    assert!(said.contains("kept.toml, which is what it was; name another file: No space left on device"), "{said}");
    assert_eq!(fs::read_to_string(&file).expect("a file"), "# former\n");
    fs::remove_file(disk.filler()).expect("room");
    rig.ask(&["config", "show", "--to", file.to_str().expect("a path")]);
    let left: Vec<_> = fs::read_dir(disk.0.path()).expect("a folder").flatten().map(|it| it.file_name()).collect();
    assert_eq!(left, ["kept.toml"]);
    for (words, why) in [("/dev/null", "it is no file"), ("/nowhere/kept.toml", "No such file")] {
        let said = rig.refused(&["config", "show", "--to", words]);
        assert!(said.contains(why), "{said}");
    }
}

#[test]
fn a_daemon_whose_directory_cannot_be_written_to_says_so() {
    let Some(disk) = Disk::new() else { return };
    let rig = disk.rig("");
    assert!(disk.mount(&["-o", "remount,ro"]).status.success());
    is_refused(&rig, &["cannot be written to (Read-only file system", "choose another directory with --dir"]);
}

#[test]
fn a_daemon_without_descriptors_says_so_and_goes_on_when_it_has_some() {
    let mut rig = Rig::without_daemon(NODES, "");
    rig.start();
    rig.await_pair("red");
    let daemon = i32::try_from(rig.daemon_pid()).ok().and_then(Pid::from_raw);
    let maximum = getrlimit(Resource::Nofile).maximum;
    let limit = |current| prlimit(daemon, Resource::Nofile, Rlimit { current, maximum }).expect("a limit");
    let open = tasuki_testing::process::descriptors(rig.daemon_pid());
    // The descriptors of a dead worker are enough for the command line, but not for a fresh worker: starting one
    // needs more.
    let was = limit(Some(open as u64 - 2));
    let (driver, _) = rig.await_pair("red");
    signal(pid(&driver), Signal::KILL);
    until(&rig, "it says so", || rig.ask(&["status"]).contains("raise LimitNOFILE="));
    limit(was.current);
    rig.await_pair("red");
    until(&rig, "nothing is wrong any more", || !rig.ask(&["status"]).contains("raise LimitNOFILE="));
    // A daemon that may open fewer than the last one had leaves all of it to one that may.
    let (driver, standby) = rig.await_pair("red");
    rig.kill_daemon();
    let daemon = rig.tasukid();
    for limit in ["10", "14", "20", "30", "40"] {
        let mut command = Command::new("sh");
        command.args(["-c", "ulimit -n $0; exec \"$@\"", limit]).arg(daemon.get_program()).args(daemon.get_args());
        let output = command.stdin(Stdio::null()).stdout(Stdio::null()).output().expect("a program");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!((output.status.code(), said.lines().count()), (Some(1), 1), "{limit}: {said}");
        assert!(said.contains("NOFILE"), "it says what to do: {limit}: {said}");
    }
    rig.start();
    let pids = |(driver, standby): (Value, Value)| (pid(&driver), pid(&standby));
    assert_eq!(pids(rig.await_pair("red")), pids((driver, standby)), "its workers go on");
}

/// It takes over all, or leaves all to the next one: without a node's end, the others would forget that node.
#[test]
fn a_daemon_with_too_few_descriptors_for_a_vni_leaves_it_whole() {
    const COUNT: usize = 5;
    let node = |number| format!("[[node]]\nname = \"n{number}\"\nwork = \"sink\"\nvni = \"lan\"\npool_kib = 512\n");
    let mut rig = Rig::without_daemon(&(0..COUNT).map(node).collect::<String>(), "");
    rig.start();
    let pairs = |rig: &Rig| (0..COUNT).map(|number| rig.await_pair(&format!("n{number}")).0["pid"].clone()).collect();
    let before: Vec<Value> = pairs(&rig);
    let are_on = |rig: &Rig| rig.json(&["vni", "table", "lan"]).as_array().map(Vec::len) == Some(COUNT);
    until(&rig, "all are on the VNI", || are_on(&rig));
    let open = rig.descriptors().len();
    rig.kill_daemon();
    let tasukid = std::mem::take(&mut rig.tasukid);
    let mut began = 0;
    for limit in (open - 36..open + 32).step_by(4) {
        rig.tasukid = rig.path("few");
        tasuki_testing::script(&rig.tasukid, &format!("ulimit -n {limit}; exec {} \"$@\"", tasukid.display()));
        rig.start_to_die(None);
        let ended = std::cell::Cell::new(false);
        let daemon = rig.daemon_pid();
        until(&rig, "it serves, or says why not", || {
            ended.set(!lives(daemon));
            ended.get() || rig.tasuki(&["status"]).status.success()
        });
        if !ended.get() {
            began += 1;
            until(&rig, "all are on the VNI", || are_on(&rig));
            rig.kill_daemon();
        }
    }
    assert!((1..17).contains(&began), "{began} of 17 began\n{}", rig.log());
    rig.tasukid = tasukid;
    rig.start();
    let log = rig.log();
    assert!(log.contains("NOFILE") && !log.contains("is not on its VNI"), "{log}");
    assert_eq!(pairs(&rig), before, "{log}");
    rig.stop();
}

/// A worker sends its driver state, or its memory, at the moment at which tasukid may open no more descriptors.
#[test]
fn a_worker_is_not_ended_where_tasukid_lacks_descriptors_for_what_it_sends_in_a_relay() {
    need_storm!();
    let mut storm = Storm::new(1000, false, &[]);
    // It has too few for each step of the relay, one after the other.
    for (stages, lacks) in [(true, "the driver state of eth0 is lost"), (false, "lacks those of the memory")] {
        for more in 1..=9 {
            if stages {
                storm.ask(Method::POST, "/v1/nodes/red/stage", Some(&json!({}))).expect("a staged worker");
            }
            let few = storm.rig.leave_descriptors(more);
            let said = if stages { storm.upgrade("red", true) } else { storm.give("blue", Some("repoint")) };
            drop(few);
            let _ = storm.ask(Method::DELETE, "/v1/nodes/red/stage", None);
            storm.settle();
            if said.is_ok() && !stages {
                break;
            }
        }
        assert!(storm.rig.log().contains(lacks), "{}", storm.rig.log());
    }
    assert!(!storm.rig.log().contains(": it is ended"), "{}", storm.rig.log());
    storm.nothing_is_lost();
}

#[test]
fn the_unit_for_systemd_is_one_that_systemd_takes() {
    let unit = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../contrib/systemd/tasukid.service"))
        .expect("a unit");
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("tasukid.service");
    // Name existing programs, tasuki and tasukid, in place of those at the installation path.
    fs::write(&path, unit.replace("/usr/bin/tasuki", env!("CARGO_BIN_EXE_tasuki"))).expect("a file");
    let Ok(output) = Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&path).output() else {
        return println!("skipped: needs systemd-analyze: apt-get install systemd");
    };
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && !said.contains("tasukid.service"), "{said}");
}

/// As a log in a pipe whose reader is stopped, in a terminal at Ctrl-S, or on a disk that does not answer.
///
/// row: T71
#[test]
fn a_reader_of_the_log_that_stops_holds_up_nobody() {
    let mut rig = Rig::without_daemon(NODES, "");
    let log = rig.path("pipe");
    rustix::fs::mkfifoat(rustix::fs::CWD, &log, rustix::fs::Mode::from_raw_mode(0o600)).expect("a pipe");
    let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::NONBLOCK | rustix::fs::OFlags::CLOEXEC;
    let mut reader = fs::File::from(rustix::fs::open(&log, flags, rustix::fs::Mode::empty()).expect("a pipe"));
    while reader.write(&[b'\n'; 4096]).is_ok() {}
    let tasukid = rig.tasukid.clone();
    rig.tasukid = rig.path("logs");
    tasuki_testing::script(&rig.tasukid, &format!("exec {} \"$@\" 2>{}", tasukid.display(), log.display()));
    rig.start();
    kill_the_driver(&rig);
    assert!(rig.ask(&["status"]).contains("red"));
    // Its reader goes on.
    let text = std::cell::RefCell::new((reader, Vec::new()));
    until(&rig, "the log has all of it", || {
        let (reader, read) = &mut *text.borrow_mut();
        let _ = reader.read_to_end(read);
        String::from_utf8_lossy(read).contains("was killed by signal 9")
    });
    let said = String::from_utf8_lossy(&text.borrow().1).into_owned();
    let places = ["tasukid serves at", "is driven by", "was killed by signal 9"].map(|part| said.find(part));
    assert!(places.is_sorted() && places[0].is_some(), "{said}");
    rig.stop();
}

/// row: T71
#[test]
fn a_service_manager_that_reads_nothing_holds_up_nobody() {
    let mut rig = Rig::without_daemon(NODES, "");
    let notices = rig.path("notices");
    // Its queue is full. The system has one length for all sockets.
    let _manager = UnixDatagram::bind(&notices).expect("a socket");
    let fills = UnixDatagram::unbound().expect("a socket");
    fills.connect(&notices).expect("a manager");
    fills.set_nonblocking(true).expect("a socket");
    while fills.send(b"WATCHDOG=1").is_ok() {}
    let tasukid = rig.tasukid.clone();
    let script = "export NOTIFY_SOCKET=NOTICES WATCHDOG_USEC=10000; exec TASUKID \"$@\"";
    let script = script.replace("NOTICES", notices.to_str().expect("a path"));
    rig.tasukid = rig.path("notifies");
    tasuki_testing::script(&rig.tasukid, &script.replace("TASUKID", tasukid.to_str().expect("a path")));
    rig.start();
    kill_the_driver(&rig);
    rig.stop();
}

#[test]
fn the_watchdog_of_systemd_hears_of_a_daemon_that_is_well() {
    let rig = Rig::without_daemon(NODES, "");
    let notices = rig.path("notices");
    let socket = UnixDatagram::bind(&notices).expect("a socket");
    socket.set_read_timeout(Some(Duration::from_secs(60))).expect("a limit");
    let daemon = rig.tasukid();
    let mut command = Command::new("sh");
    // WATCHDOG_PID must name this very process.
    command.args(["-c", "WATCHDOG_PID=$$ exec \"$@\"", "sh"]).arg(daemon.get_program()).args(daemon.get_args());
    command.env("NOTIFY_SOCKET", &notices).env("WATCHDOG_USEC", "100000").env("TASUKI_ALIVE", rig.path("alive"));
    let mut daemon = command.stdin(Stdio::null()).stderr(Stdio::null()).spawn().expect("a daemon");
    let (mut said, mut beats) = ([0; 256], 0);
    while beats < 5 {
        let len = socket.recv(&mut said).expect("it says that it is well");
        beats += u32::from(said[..len].starts_with(b"WATCHDOG=1"));
    }
    rig.ask(&["stop"]);
    assert!(daemon.wait().expect("its end").success());
}

/// As with some hundred nodes, of which the loop has work for longer than `hang_after_ms`.
#[test]
fn a_daemon_that_is_late_itself_ends_no_worker_that_answered_in_time() {
    const COUNT: usize = 90;
    let node = |number| format!("[[node]]\nname = \"n{number}\"\nvni = \"lan\"\nwork = \"sink\"\nstandby = false\n");
    let mut rig = Rig::without_daemon(&(0..COUNT).map(node).collect::<String>(), "");
    if storm::beside("tasuki-worker").is_none() {
        return println!("skipped: needs tasuki-worker beside tasukid: cargo build --workspace");
    }
    rig.with_stock_workers();
    rig.configure(|text| text.replace("hang_after_ms = 5000", "hang_after_ms = 3000"));
    rig.start();
    let drivers = || rig.workers().iter().filter(|it| it["is"] == "drives").map(pid).collect::<BTreeSet<_>>();
    for count in [COUNT / 3, COUNT / 3 * 2, COUNT] {
        until(&rig, &format!("{count} of them drive"), || drivers().len() >= count);
    }
    let before = drivers();
    // After the first time, the loop asks all of them at once. The second time, more answers wait for it than it once took.
    for _ in 0..2 {
        fs::write(rig.path("late"), "").expect("a file");
        std::thread::sleep(Duration::from_millis(4500));
        fs::remove_file(rig.path("late")).expect("a file");
        until(&rig, "tasukid answers", || rig.tasuki(&["status"]).status.success());
    }
    assert_eq!(drivers(), before);
    assert!(!rig.ask(&["events"]).contains("hangs"), "{}", rig.log());
    rig.stop();
}

/// Sends a request, and hangs up.
fn ask_and_go(rig: &Rig, path: &str) {
    let mut stream = UnixStream::connect(rig.dir().join("api.sock")).expect("a daemon");
    let head = "host: tasukid\r\ncontent-type: application/json\r\ncontent-length: 2";
    write!(stream, "POST {path} HTTP/1.1\r\n{head}\r\n\r\n{{}}").expect("there is room");
}

/// All of the daemon stands still, or its loop does.
#[test]
fn nothing_is_done_for_a_caller_that_has_given_up_before_its_turn() {
    let mut rig = Rig::new();
    rig.await_pair("red");
    rig.await_worker("blue", "idle");
    let daemon = rig.daemon_pid();
    signal(daemon, Signal::STOP);
    ask_and_go(&rig, "/v1/stop");
    signal(daemon, Signal::CONT);
    assert_eq!(rig.json(&["status"])["pid"], daemon);
    let before = rig.descriptors();
    fs::write(rig.path("late"), "").expect("a file");
    std::thread::scope(|scope| {
        let given = scope.spawn(|| rig.ask(&["nic", "give", "eth0", "--to", "blue"]));
        until(&rig, "the taker is asked", || rig.descriptors().len() > before.len());
        ask_and_go(&rig, "/v1/stop");
        until(&rig, "it is heard of no more", || rig.descriptors().len() == before.len() + 1);
        fs::remove_file(rig.path("late")).expect("a file");
        given.join().expect("it is given");
    });
    assert_eq!((&rig.json(&["status"])["pid"], rig.nic()["node"].as_str()), (&daemon.into(), Some("blue")));
    rig.stop();
}

/// The kernel keeps a thread of the daemon's waiting while it makes a process, for more than ten seconds.
#[test]
fn the_daemon_serves_and_takes_over_while_the_kernel_keeps_a_process_from_its_start() {
    let Some((mut rig, model)) = with_model(NODES, ENDLESS, "1000") else { return };
    rig.start();
    rig.await_pair("red");
    until(&rig, "frames flow", || moves(&rig) > 0);
    fs::write(rig.path("stall"), "").expect("a file");
    // The first one's place is taken by a process that waits already, or is being made.
    let (first, second) = rig.await_pair("red");
    rig.kill(&first);
    until(&rig, "its stand-by drives", || rig.worker("red", "drives").is_some_and(|it| it["pid"] == second["pid"]));
    let (driver, third) = rig.await_pair("red");
    rig.kill(&driver);
    until(&rig, "its stand-by drives", || rig.worker("red", "drives").is_some_and(|it| it["pid"] == third["pid"]));
    let said = rig.refused(&["worker", "upgrade", "red"]);
    assert!(
        said.contains("node red was not upgraded: the kernel has kept tasukid waiting for more than 10 s"),
        "{said}"
    );
    rig.await_event("no worker for node red yet: the kernel has kept tasukid waiting for more than 10 s");
    assert!(rig.worker("red", "stands by").is_none(), "none can have been made");
    fs::remove_file(rig.path("stall")).expect("a file");
    rig.await_pair("red");
    rig.ask(&["worker", "upgrade", "red"]);
    let (driver, _) = rig.await_pair("red");
    assert_ne!(driver["pid"], third["pid"]);
    until(&rig, "nothing is wrong", || rig.json(&["status"])["nodes"][0]["trouble"].is_null());
    stop_whole(&mut rig, model);
}

/// A freezer of control groups of version 1: a process in it does not run, and does not end of SIGKILL, as one that waits in
/// the kernel for a device that does not answer.
struct Ice(TempDir);

impl Ice {
    /// Where such groups cannot be mounted, prints so and returns `None`.
    fn new() -> Option<Self> {
        let ice = Ice(tempfile::Builder::new().prefix("tasuki-ice-").tempdir().expect("a folder"));
        let mount = ["-t", "cgroup", "-o", "freezer", "tasuki-ice"];
        let mounted = Command::new("mount").args(mount).arg(ice.0.path()).output().expect("mount");
        if !mounted.status.success() {
            println!("skipped: needs root, and control groups of version 1");
            return None;
        }
        fs::create_dir(ice.group()).expect("a group");
        Some(ice)
    }

    fn group(&self) -> PathBuf {
        self.0.path().join(format!("tasuki-ice-{}", std::process::id()))
    }

    fn freeze(&self, process: u32) {
        fs::write(self.group().join("cgroup.procs"), process.to_string()).expect("a process of ours");
        fs::write(self.group().join("freezer.state"), "FROZEN").expect("a freezer");
    }

    fn thaw(&self) {
        let _ = fs::write(self.group().join("freezer.state"), "THAWED");
    }
}

impl Drop for Ice {
    fn drop(&mut self) {
        self.thaw();
        let procs = fs::read_to_string(self.group().join("cgroup.procs")).unwrap_or_default();
        for process in procs.lines() {
            let _ = fs::write(self.0.path().join("cgroup.procs"), process);
        }
        let _ = fs::remove_dir(self.group());
        let _ = Command::new("umount").arg("--lazy").arg(self.0.path()).output();
    }
}

#[test]
fn a_driver_that_the_kernel_does_not_let_end_keeps_nobody_but_its_nic_from_the_next_daemon() {
    let mut rig = Rig::new();
    let Some(ice) = Ice::new() else { return };
    let (driver, other) = rig.await_pair("red");
    rig.kill_daemon();
    ice.freeze(pid(&driver));
    // The next daemon need not wait until the worker has not answered for long.
    let socket = |worker: &Value| rig.dir().join(format!("worker-{}.sock", worker["worker"]));
    fs::remove_file(socket(&driver)).expect("its socket");
    rig.start();

    rig.await_event("is not to be reached by this tasukid: it is ended");
    until(&rig, "others serve", || rig.worker("red", "stands by").is_some_and(|now| now["pid"] == other["pid"]));
    let blue = rig.await_worker("blue", "idle");
    rig.kill(&blue);
    until(&rig, "blue has another", || rig.worker("blue", "idle").is_some_and(|now| now["pid"] != blue["pid"]));
    assert!(lives(pid(&driver)), "{}", rig.log());
    assert!(rig.worker("red", "drives").is_none_or(|now| now["pid"] == driver["pid"]), "two drive: {}", rig.log());

    ice.thaw();
    rig.kill_driver("red");

    let (driver, _) = rig.await_pair("red");
    ice.freeze(pid(&driver));
    let said = rig.ask(&["stop"]);
    assert!(said.contains("was killed, and ends once the kernel lets it"), "{said}");
}
