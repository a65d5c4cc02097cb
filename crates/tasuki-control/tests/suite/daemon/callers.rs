//! Callers of the daemon: users with and without a role, and clients that say nothing, send too slowly, or send too
//! much at once. Needs root, to become other users.
//!
//! Attacks of docs/design/threat-model.md.

use std::fs::{self, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, Output};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::rig::{NODES, Rig, TASUKI, until};

/// A user id that no user of the machine has.
const STRANGER: u32 = 61_234;

/// Starts a daemon with these roles whose socket a stranger can reach. Returns `None` where the test cannot become
/// another user.
fn rig(roles: &str) -> Option<Rig> {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: needs root, to become another user");
        return None;
    }
    let mut rig = Rig::without_daemon(NODES, "");
    rig.configure(|text| format!("{text}\n[api]\n{roles}\n"));
    fs::set_permissions(rig.path(""), Permissions::from_mode(0o711)).expect("a mode");
    tasuki_testing::copy(TASUKI, rig.path("tasuki"));
    rig.start();
    rig.await_pair("red");
    Some(rig)
}

/// Restarts the daemon with other roles.
fn change_roles(rig: &mut Rig, roles: &str) {
    rig.kill_daemon();
    rig.configure(|text| format!("{}[api]\n{roles}\n", text.split("[api]").next().unwrap_or_default()));
    rig.start();
    rig.await_pair("red");
}

/// Runs the command line as a stranger with this group.
fn stranger(rig: &Rig, group: u32, words: &[&str]) -> Output {
    let mut command = Command::new(rig.path("tasuki"));
    command.uid(STRANGER).gid(group).arg("--dir").arg(rig.dir()).args(words).output().expect("a program")
}

fn may(rig: &Rig, words: &[&str]) {
    let output = stranger(rig, STRANGER, words);
    assert!(output.status.success(), "{words:?}: {output:?}\n{}", rig.log());
}

fn may_not(rig: &Rig, words: &[&str], part: &str) {
    let output = stranger(rig, STRANGER, words);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains(part), "{words:?}: {said}\n{}", rig.log());
    assert_eq!(said.lines().count(), 1, "{said}");
}

/// Asks without a role, row: T61, and for more than its role, row: T62
#[test]
fn what_a_user_may_ask_is_what_its_role_says() {
    let Some(mut rig) = rig("") else { return };
    let with = rig.program("other", "");
    let with = with.to_str().expect("a path").to_owned();
    may_not(&rig, &["status"], "you may not talk to the tasukid");
    change_roles(&mut rig, "operate = [\"user:61235\"]");
    may_not(&rig, &["status"], "user 61234 may not do that: it takes the role \"read\", and this user has none");
    rig.await_event("user 61234 (tasuki, process ");
    rig.await_event("asked GET /v1/status: refused");
    change_roles(&mut rig, "read = [\"user:61234\"]");
    may(&rig, &["status"]);
    // As systemd does when the service is reloaded.
    fs::set_permissions(rig.dir(), Permissions::from_mode(0o700)).expect("a mode");
    until(&rig, "it is let in again", || stranger(&rig, STRANGER, &["status"]).status.success());
    assert_eq!(fs::metadata(rig.dir()).expect("a folder").permissions().mode() & 0o777, 0o711);
    may_not(&rig, &["worker", "upgrade", "red"], "it takes the role \"operate\", and this user has \"read\"");
    change_roles(&mut rig, "read = [\"group:61234\"]\noperate = [\"user:61234\"]");
    may(&rig, &["worker", "upgrade", "red"]);
    rig.await_event("asked POST /v1/nodes/red/upgrade: done (200)");
    for words in [
        &["worker", "upgrade", "red", "--with", &with][..],
        &["stop"],
        &["node", "remove", "green"],
        &["capture", "red", "--count", "1"],
    ] {
        may_not(&rig, words, "it takes the role \"administer\", and this user has \"operate\"");
    }
    change_roles(&mut rig, "administer = [\"group:61236\"]");
    let output = stranger(&rig, 61_236, &["worker", "upgrade", "red", "--with", &with]);
    assert!(output.status.success(), "{output:?}\n{}", rig.log());
    may_not(&rig, &["status"], "this user has none");
}

/// Sends `text` on a new connection, and returns the answer up to the daemon's hang-up.
fn say(rig: &Rig, text: &str) -> String {
    let mut stream = UnixStream::connect(rig.dir().join("api.sock")).expect("a daemon");
    stream.write_all(text.as_bytes()).expect("room");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    answer
}

/// The file is one that the daemon can read, and its caller perhaps not, row: T142
#[test]
fn no_file_is_read_for_a_caller_that_sends_a_path_alone() {
    let rig = Rig::new();
    rig.await_pair("red");
    let file = rig.path("of-root");
    fs::write(&file, "root:hush:19000\n").expect("a file");
    let body = serde_json::json!({ "path": file }).to_string();
    for ask in ["plan", "apply"] {
        let head = format!("POST /v1/{ask} HTTP/1.1\r\nhost: tasukid\r\nconnection: close\r\n");
        let len = body.len();
        let answer = say(&rig, &format!("{head}content-type: application/json\r\ncontent-length: {len}\r\n\r\n{body}"));
        assert!(answer.starts_with("HTTP/1.1 422 ") && answer.contains("tasukid reads no file for others"), "{answer}");
        assert!(!answer.contains("root:"), "{answer}");
    }
}

/// rows: in the table
#[test]
fn one_who_says_too_little_or_too_much_is_told_so_and_others_are_served() {
    let rig = Rig::new();
    std::thread::scope(|scope| {
        for (_, text, status, part) in [
            ("T63", "", "408", "the head of a request must be here within 5 s"),
            ("T63", "GET /v1/status HT", "408", "the head of a request must be here within 5 s"),
            (
                "T63",
                "POST /v1/nodes/red/upgrade HTTP/1.1\r\ncontent-length: 9\r\n\r\n{",
                "408",
                "the body of a request must be here",
            ),
            (
                "T63",
                "POST /v1/nodes/red/upgrade HTTP/1.1\r\ncontent-length: 99999999\r\n\r\n{",
                "413",
                "the body of the request is incomplete, or longer than 262144 bytes",
            ),
            // A reader may ask this, and gets no room for a configuration by it.
            (
                "T63",
                "GET /v1/apply HTTP/1.1\r\ncontent-length: 300000\r\n\r\n{",
                "413",
                "the body of the request is incomplete, or longer than 262144 bytes",
            ),
        ] {
            let rig = &rig;
            scope.spawn(move || {
                let answer = say(rig, text);
                assert!(
                    answer.starts_with(&format!("HTTP/1.1 {status} ")) && answer.contains(part),
                    "{text}: {answer}"
                );
            });
        }
        rig.await_pair("red");
    });
}

/// row: T63
#[test]
fn a_thousand_connections_of_one_user_keep_out_that_user_alone() {
    let Some(rig) = rig("read = [\"user:61234\"]") else { return };
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).expect("a limit");
    let mut all = Vec::new();
    for _ in 0..1000 {
        all.push(UnixStream::connect(rig.dir().join("api.sock")).expect("a daemon"));
    }
    let mut said = String::new();
    all.pop().expect("the last").read_to_string(&mut said).expect("an answer");
    assert!(said.starts_with("HTTP/1.1 503 ") && said.contains("user 0 has 64 connections to tasukid"), "{said}");
    may(&rig, &["status"]);
    drop(all);
    until(&rig, "there is room again", || rig.tasuki(&["status"]).status.success());
}
