//! The files in `examples`, as a user runs them.

use std::fs;
use std::process::Command;

use rustix::process::Signal;

use super::rig::{Rig, pid, signal, until};
use super::rooms::{Room, is_impossible};

/// Brings up an example, with its sockets in the rig's directory, and `change` made. Returns what was said.
fn up(rig: &Rig, name: &str, change: impl Fn(String) -> String) -> String {
    let path = format!("{}/../../examples/{name}", env!("CARGO_MANIFEST_DIR"));
    let text = fs::read_to_string(path).expect("an example");
    let text = change(text.replace("/run/", &format!("{}/", rig.path("").display())));
    fs::write(rig.path(name), text).expect("a file");
    let mut command = rig.command(&["up", &rig.path(name).display().to_string()]);
    // Marks all its descendants as processes of this rig.
    let output = command.env("TASUKI_ALIVE", rig.path("alive")).output().expect("a program");
    let why = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{name}: {why}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn every_example_is_taken() {
    let examples = fs::read_dir(format!("{}/../../examples", env!("CARGO_MANIFEST_DIR"))).expect("a folder");
    let files = examples.flatten().map(|it| it.path()).filter(|path| path.extension().is_some_and(|end| end == "toml"));
    let mut count = 0;
    for file in files {
        let text = fs::read_to_string(&file).expect("a file");
        let config = tasuki_control::config::Config::parse(&file, &text);
        assert!(config.is_ok(), "{}: {config:?}", file.display());
        count += 1;
    }
    assert_eq!(count, 5, "each is in the table of examples/README.md, and most are run below");
}

#[test]
fn two_namespaces_reach_each_other() {
    if let Some(why) = is_impossible() {
        println!("skipped: {why}");
        return;
    }
    let rig = Rig::without_daemon("", "");
    let [blue, red] = [Room::new(), Room::new()];
    let named = |text: String| {
        let rooms = text.replace("netns = \"blue\"", &format!("netns = \"{}\"", blue.path()));
        rooms.replace("netns = \"red\"", &format!("netns = \"{}\"", red.path()))
    };
    let said = up(&rig, "two-namespaces.toml", named);
    assert!(said.contains("2 nodes and "), "{said}");
    match Command::new("ping").arg("-V").output() {
        Ok(_) => assert_eq!(blue.ping(3, &["-i", "0.2", "192.0.2.2"]), None, "{}", rig.log()),
        Err(why) => println!("skipped: needs ping: {why}"),
    }
    rig.ask(&["down"]);
}

#[test]
fn a_nic_fails_over() {
    if let Some(why) = is_impossible() {
        println!("skipped: {why}");
        return;
    }
    let rig = Rig::without_daemon("", "");
    let said = up(&rig, "fail-over.toml", |text| text);
    assert!(said.contains("2 nodes and 1 NIC are at work"), "{said}");
    // Red is lost: no worker of it lives for long.
    until(&rig, "blue drives", || {
        let red = rig.workers().into_iter().filter(|it| it["node"] == "red" && it["is"] != "leaves");
        for it in red {
            // It may be gone by now.
            let its = i32::try_from(pid(&it)).ok().and_then(rustix::process::Pid::from_raw).expect("a process");
            let _ = rustix::process::kill_process(its, Signal::KILL);
        }
        rig.nic()["node"] == "blue" && rig.nic()["is"] == "driven"
    });
    rig.await_event("eth0 failed over from node red to node blue");
    rig.ask(&["down"]);
}

#[test]
fn machines_and_a_dpdk_program_find_their_sockets() {
    if let Some(why) = is_impossible() {
        println!("skipped: {why}");
        return;
    }
    for (name, sockets) in [
        ("two-machines-and-a-nic.toml", ["one.sock", "two.sock"]),
        ("dpdk-beside-a-machine.toml", ["dpdk.sock", "machine.sock"]),
    ] {
        let rig = Rig::without_daemon("", "");
        let said = up(&rig, name, |text| text);
        assert!(said.contains("are at work after"), "{said}");
        for socket in sockets {
            assert!(rig.path(socket).exists(), "{name}: {socket}");
        }
        let driver = rig.workers().into_iter().find(|it| it["is"] == "drives").expect("a worker");
        signal(pid(&driver), Signal::KILL);
        until(&rig, "another one drives", || {
            rig.workers()
                .iter()
                .any(|it| it["is"] == "drives" && it["node"] == driver["node"] && it["pid"] != driver["pid"])
        });
        rig.ask(&["down"]);
    }
}
