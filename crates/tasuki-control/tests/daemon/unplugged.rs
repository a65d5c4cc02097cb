//! The card goes in the middle of it: one clear sentence, nobody spins, and what the sentence says helps.

use std::fs;
use std::time::{Duration, Instant};

use super::rig::{Rig, lives, pid, until};
use super::storm::{Storm, need_storm, send};

/// Ticks of processor time that a process has used.
fn ticks(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let fields: Vec<&str> =
        stat.rsplit_once(')').map(|(_, rest)| rest.split_whitespace().collect()).unwrap_or_default();
    [11, 12].iter().filter_map(|at| fields.get(*at)?.parse::<u64>().ok()).sum()
}

/// Nobody of these uses half of a processor over a second, seen at some time within the limit: who spins always does.
fn nobody_spins(rig: &Rig, pids: &[u32]) {
    until(rig, "nobody spins", || {
        let (before, begun): (Vec<u64>, _) = (pids.iter().map(|pid| ticks(*pid)).collect(), Instant::now());
        while begun.elapsed() < Duration::from_secs(1) {
            std::thread::sleep(Duration::from_millis(50));
        }
        pids.iter().zip(before).all(|(pid, before)| ticks(*pid) - before < 50)
    });
}

#[test]
fn a_card_whose_server_is_gone_is_said_to_be_gone_and_comes_back_when_all_is_started_anew() {
    need_storm!();
    let mut storm = Storm::new(1000, false, &[]);
    let (driver, standby) = storm.settle();
    storm.model.unplug();
    until(&storm.rig, "it is said", || storm.rig.ask(&["status"]).contains("the card is gone"));
    let status = storm.rig.ask(&["status"]);
    assert!(status.contains("tasuki stop"), "{status}");
    assert_eq!(status.matches("the card is gone").count(), 1, "{status}");
    nobody_spins(&storm.rig, &[pid(&driver), pid(&standby), storm.rig.daemon_pid()]);
    // What is asked for now is refused, and nobody dies of it.
    let said = storm.rig.refused(&["worker", "upgrade", "red"]);
    assert!(said.contains("gone"), "{said}");
    assert!(lives(pid(&driver)), "{}", storm.rig.log());
    // What the sentence says.
    storm.rig.ask(&["stop"]);
    storm.rig.daemon_ends();
    storm.plug_another(1000);
    storm.rig.start();
    storm.settle();
    storm.flows();
    storm.nothing_is_lost();
}

#[test]
fn a_model_of_the_daemon_that_dies_is_named_and_started_with_the_next_daemon() {
    need_storm!();
    let mut rig = Rig::without_daemon(
        "[[node]]\nname = \"red\"\nwork = \"echo\"\n\n[[nic]]\nname = \"eth0\"\ndevice = \"sim\"\nnode = \"red\"\n",
        "",
    );
    rig.with_stock_workers();
    rig.start();
    rig.await_pair("red");
    let children = || {
        let of = |pid: u32| fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        let all = fs::read_dir("/proc").expect("a folder").flatten();
        let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let socket = rig.dir().display().to_string();
        let names =
            |pid: &u32| fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default().contains(&socket);
        pids.filter(names).find(|pid| of(*pid).starts_with("tasuki-sim"))
    };
    let model = children().expect("a model");
    send(model, rustix::process::Signal::KILL);
    until(&rig, "it is said", || rig.ask(&["status"]).contains("the model of eth0 was killed by signal 9"));
    let status = rig.ask(&["status"]);
    assert!(status.contains("Stop all (tasuki stop) and start tasukid anew"), "{status}");
    let mut pids: Vec<u32> = rig.workers().iter().map(pid).collect();
    pids.push(rig.daemon_pid());
    nobody_spins(&rig, &pids);
    rig.ask(&["stop"]);
    rig.daemon_ends();
    rig.start();
    rig.await_pair("red");
    rig.ask(&["stop"]);
    rig.daemon_ends();
}
