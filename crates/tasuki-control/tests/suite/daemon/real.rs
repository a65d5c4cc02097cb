//! The real worker and the model of a card, under traffic that the model numbers and checks.

use std::path::PathBuf;
use std::sync::RwLockWriteGuard;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::rig::{NODES, Rig, pid, signal, until};
use super::storm::{self, beside};

/// Frames of a source that sends until it is told to stop.
pub const ENDLESS: &str = "18446744073709551615";

/// Time without movement after which all frames count as passed.
const QUIET: Duration = Duration::from_secs(5);

/// A model, alone on the machine.
pub struct Model(storm::Model, #[expect(dead_code, reason = "held until the end")] RwLockWriteGuard<'static, ()>);

impl Model {
    /// Kills it, and with it the card.
    pub fn kill(&self) {
        self.0.signal(Signal::KILL);
    }

    /// Stops its source.
    pub fn finish(&self) {
        self.0.signal(Signal::USR1);
    }
}

/// Prepares the real worker, and a model of an 82574L whose source sends `frames` frames; does not start the daemon.
pub fn with_model(nodes: &str, frames: &str, rate: &str) -> Option<(Rig, Model)> {
    with_card("82574l", nodes, frames, rate)
}

/// Like [`with_model`], with another card.
pub fn with_card(card: &str, nodes: &str, frames: &str, rate: &str) -> Option<(Rig, Model)> {
    if beside("tasuki-worker").is_none() || beside("tasuki-sim").is_none() {
        println!("skipped: needs tasuki-worker and tasuki-sim beside tasukid: cargo build --workspace");
        return None;
    }
    let rig = Rig::without_daemon(nodes, "");
    let socket = rig.path("card.sock");
    let one = storm::alone();
    let model = Model(storm::Model::start(&socket, &["--card", card, "--source", frames, "--rate", rate]), one);
    rig.with_stock_workers();
    rig.configure(|text| {
        // All nodes echo, so every driver sends all frames back.
        text.replace("/nowhere/card.sock", &socket.display().to_string()).replace("work = \"sink\"", "work = \"echo\"")
    });
    Some((rig, model))
}

/// Returns the number of frames that the current drivers have received.
pub fn moves(rig: &Rig) -> u64 {
    let received = |node| rig.worker(node, "drives").and_then(|worker| worker["received"].as_u64()).unwrap_or(0);
    received("red") + received("blue") + received("green")
}

/// Stops the source, waits until all its frames are back, and stops everything.
pub fn stop_whole(rig: &mut Rig, mut model: Model) {
    if let Err(said) = model.0.all_come_back() {
        panic!("{said}\n{}", rig.log());
    }
    let said = stop(rig, model);
    assert!(said.contains(", lost 0\n"), "{said}\n{}", rig.log());
}

/// Waits until the source has ended, and all frames have come back that are not lost.
pub fn until_quiet(rig: &Rig) {
    let (mut seen, mut since) = (moves(rig), Instant::now());
    while since.elapsed() < QUIET {
        std::thread::sleep(Duration::from_millis(100));
        let now = moves(rig);
        if now != seen {
            (seen, since) = (now, Instant::now());
        }
    }
}

/// Stops everything; returns the model's report of its frames.
pub fn stop(rig: &mut Rig, mut model: Model) -> String {
    rig.stop();
    // The model reports at its end, which may have come already.
    model.0.signal(Signal::TERM);
    let said = model.0.ends();
    assert!(said.contains("twice 0, out of order 0, damaged 0"), "{said}\n{}", rig.log());
    said
}

/// The last release's worker knows one layout of the driver state less than our own with all features.
#[test]
fn workers_are_replaced_by_the_version_before_and_back_and_no_frame_is_lost() {
    let Some(before) = released().map(|folder| folder.join("tasuki-worker")) else { return };
    let before = before.to_str().expect("text");
    for card in ["82574l", "virtio-net"] {
        let Some((mut rig, model)) = with_card(card, NODES, ENDLESS, "8000") else { return };
        rig.start();
        let (now, _) = rig.await_pair("red");
        let now = now["binary"].as_str().expect("its program").to_owned();
        until(&rig, "frames flow", || moves(&rig) > 0);
        for program in [before, &now, before] {
            // The state goes through the store by itself, in the layout that both know.
            let said = rig.json(&["worker", "upgrade", "red", "--with", program]);
            assert!(said["relays"][0]["done"] == true && said["relays"][0]["method"] == "keep", "{said}");
            let (driver, _) = rig.await_pair("red");
            assert_eq!(driver["binary"], program);
            // Another daemon knows as well what its workers read.
            rig.kill_daemon();
            rig.start();
            rig.await_pair("red");
        }
        stop_whole(&mut rig, model);
    }
}

/// Returns the folder with the programs of the last release.
pub fn released() -> Option<PathBuf> {
    let folder = std::env::var_os("TASUKI_RELEASED").map(PathBuf::from);
    if folder.is_none() {
        println!("skipped: needs TASUKI_RELEASED, as cargo xtask test builds it");
    }
    folder
}

/// Gives eth0 to a node by `method`; returns the time without a driver, in ms.
fn give(rig: &Rig, to: &str, method: &str) -> f64 {
    let said = rig.json(&["nic", "give", "eth0", "--to", to, "--method", method]);
    let relay = &said["relays"][0];
    assert_eq!((&relay["done"], relay["method"].as_str()), (&serde_json::Value::Bool(true), Some(method)), "{said}");
    relay["pause_ns"].as_f64().expect("a pause") / 1e6
}

/// Longest pause that loses nothing, in ms. The partner pauses for 33 ms on request; a process delayed for longer in
/// the middle of a relay loses frames.
const PAUSED: f64 = 25.0;

#[test]
fn a_nic_goes_back_and_forth_by_repoint_and_no_frame_is_lost() {
    let Some((mut rig, model, longest)) = back_and_forth("82574l", "repoint") else { return };
    model.finish();
    until_quiet(&rig);
    let said = stop(&mut rig, model);
    let is_whole = said.contains(", lost 0\n");
    assert!(is_whole || longest > PAUSED, "{said}\nafter pauses of up to {longest} ms\n{}", rig.log());
}

/// No partner pauses here; but the model, like a hypervisor, keeps incoming frames until there is a buffer.
#[test]
fn a_virtio_device_goes_back_and_forth_by_repoint_and_no_frame_is_lost() {
    let Some((mut rig, model, _)) = back_and_forth("virtio-net", "repoint") else { return };
    stop_whole(&mut rig, model);
}

#[test]
fn a_virtio_device_goes_back_and_forth_by_mbb_and_no_frame_is_lost() {
    let Some((mut rig, model, _)) = back_and_forth("virtio-net", "mbb") else { return };
    stop_whole(&mut rig, model);
}

/// Gives a NIC back and forth under traffic. Returns the longest pause, too, in ms.
fn back_and_forth(card: &str, method: &str) -> Option<(Rig, Model, f64)> {
    let (mut rig, model) = with_card(card, NODES, ENDLESS, "4000")?;
    rig.start();
    rig.await_pair("red");
    until(&rig, "frames flow", || moves(&rig) > 0);
    let mut longest: f64 = 0.0;
    for turn in 0..10 {
        // At once, not after the node has its fresh worker: the request waits for that.
        longest = longest.max(give(&rig, ["blue", "red"][turn % 2], method));
    }
    // The memory now belongs to red's last worker: a stand-by goes on from there, and a later daemon finds it.
    let (driver, _) = rig.await_pair("red");
    signal(pid(&driver), Signal::KILL);
    until(&rig, "its stand-by drives", || rig.worker("red", "drives").is_some_and(|now| now["pid"] != driver["pid"]));
    rig.await_pair("red");
    rig.kill_daemon();
    rig.start();
    rig.await_pair("red");
    longest = longest.max(give(&rig, "blue", method));
    rig.await_pair("blue");
    println!("the longest pause: {longest} ms");
    Some((rig, model, longest))
}

/// Bytes that every frame of the model's source carries behind its addresses.
const SECRET: [u8; 6] = [0x88, 0xb5, b't', b's', b'k', 1];

/// Counts the secret in the shared memory of a process, as root can read it. The error says why it cannot be read.
fn secrets(pid: u32) -> Result<usize, String> {
    use std::os::unix::fs::FileExt;
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).map_err(|error| error.to_string())?;
    let memory = std::fs::File::open(format!("/proc/{pid}/mem")).map_err(|error| error.to_string())?;
    let mut found = 0;
    for line in maps.lines().filter(|line| line.contains("/memfd:")) {
        let range = line.split_whitespace().next().unwrap_or_default();
        let (from, to) = range.split_once('-').ok_or_else(|| line.to_owned())?;
        let [from, to] = [from, to].map(|text| u64::from_str_radix(text, 16).expect("an address"));
        let mut bytes = vec![0; usize::try_from(to - from).expect("what fits into memory")];
        memory.read_exact_at(&mut bytes, from).map_err(|error| format!("{line}: {error}"))?;
        found += bytes.windows(SECRET.len()).filter(|window| **window == SECRET).count();
    }
    Ok(found)
}

/// Counts red's secrets in the memory of the next driver, after all traffic has ended.
fn residue(to: &str, method: &str, looks: impl FnOnce(usize)) {
    let Some((mut rig, model)) = with_model(NODES, "3000", "4000") else { return };
    rig.start();
    let (driver, _) = rig.await_pair("red");
    until(&rig, "all frames have come", || moves(&rig) == 3000);
    match secrets(pid(&driver)) {
        Ok(found) => assert!(found > 0, "the search finds what is there"),
        Err(why) => return println!("skipped: the memory of a worker cannot be looked into ({why}); be root"),
    }
    println!("red to {to} by {method}: a pause of {} ms", give(&rig, to, method));
    let (driver, _) = rig.await_pair(to);
    looks(secrets(pid(&driver)).expect("as before"));
    stop(&mut rig, model);
}

#[test]
fn what_red_has_handled_is_not_in_the_memory_of_the_node_that_a_nic_is_pointed_at() {
    residue("blue", "repoint", |found| assert_eq!(found, 0));
    residue("green", "repoint", |found| assert_eq!(found, 0, "nor behind a fence"));
    residue("green", "cold", |found| assert_eq!(found, 0, "nor where the card starts anew"));
}

#[test]
fn what_red_has_handled_is_wiped_from_memory_that_goes_to_another_node() {
    residue("blue", "keep", |found| assert_eq!(found, 0));
}
