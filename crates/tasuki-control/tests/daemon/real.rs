//! The real worker and the model of a card, under traffic that the model numbers and checks.

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::rig::{NODES, Rig, pid, signal, until};
use super::storm::beside;

const FRAMES: &str = "20000";

/// How long nothing may have moved until all is said to have passed.
const QUIET: Duration = Duration::from_secs(5);

/// A model of ours, ended with this.
struct Model(Child);

impl Drop for Model {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn no_frame_is_lost_whoever_drives_and_whoever_dies() {
    let (Some(worker), Some(sim)) = (beside("tasuki-worker"), beside("tasuki-sim")) else {
        println!("skipped: needs tasuki-worker and tasuki-sim beside tasukid: cargo build --workspace");
        return;
    };
    let mut rig = Rig::without_daemon(NODES, "");
    let socket = rig.path("card.sock");
    let mut command = Command::new(sim);
    command.args(["sim", "nic", "--link-up", "10", "--source", FRAMES, "--rate", "4000", "--socket"]).arg(&socket);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut model = Model(command.spawn().expect("a model"));
    until(&rig, "the model serves", || socket.exists());
    let stand_in = rig.path("worker");
    rig.configure(|text| {
        let text = text.replace(&format!("{stand_in:?}"), &format!("{worker:?}"));
        // Both echo, so that whoever drives sends every frame back.
        text.replace("/nowhere/card.sock", &socket.display().to_string()).replace("work = \"sink\"", "work = \"echo\"")
    });
    rig.start();
    rig.await_pair("red");
    let moves = |rig: &Rig| {
        let received = |node| rig.worker(node, "drives").and_then(|worker| worker["received"].as_u64()).unwrap_or(0);
        received("red") + received("blue")
    };
    until(&rig, "frames flow", || moves(&rig) > 0);
    rig.ask(&["worker", "upgrade", "red"]);
    rig.await_pair("red");
    rig.ask(&["worker", "upgrade", "red", "--state", "store"]);
    let (driver, _) = rig.await_pair("red");
    signal(pid(&driver), Signal::KILL);
    until(&rig, "its stand-by drives", || rig.worker("red", "drives").is_some_and(|now| now["pid"] != driver["pid"]));
    rig.kill_daemon();
    rig.start();
    rig.await_pair("red");
    rig.ask(&["nic", "give", "eth0", "--to", "blue"]);
    rig.await_pair("blue");
    // Until the source has sent all, and all has come back.
    let (mut seen, mut since) = (moves(&rig), Instant::now());
    while since.elapsed() < QUIET {
        std::thread::sleep(Duration::from_millis(100));
        let now = moves(&rig);
        if now != seen {
            (seen, since) = (now, Instant::now());
        }
    }
    rig.ask(&["stop"]);
    rig.daemon_ends();
    // It reports at its end, which may be there already.
    signal(model.0.id(), Signal::TERM);
    let mut said = String::new();
    model.0.stdout.take().expect("a pipe").read_to_string(&mut said).expect("text");
    assert!(said.contains(&format!("sent {FRAMES}, came back {FRAMES}, lost 0")), "{said}\n{}", rig.log());
    assert!(said.contains("twice 0, out of order 0, damaged 0"), "{said}\n{}", rig.log());
}
