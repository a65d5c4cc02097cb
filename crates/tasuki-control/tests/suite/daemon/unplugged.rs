//! The card disappears in use. The daemon reports it in one clear sentence, no process spins, and the advice in the
//! sentence helps.

use std::fs;
use std::os::unix::net::UnixListener;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tasuki_testing::process;

use super::rig::{Rig, is_ours, lives, pid, until};
use super::servers::{Between, Later, nic};
use super::storm::{Storm, need_storm, send};

/// Returns the processor ticks that a process has used.
fn ticks(pid: u32) -> u64 {
    let (_, fields) = process::stat(pid).unwrap_or_default();
    [11, 12].iter().filter_map(|at| fields.get(*at)?.parse::<u64>().ok()).sum()
}

/// Asserts that, within the limit, there is a second in which none of these processes uses half of a processor. A
/// spinning process always does.
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
fn a_card_whose_server_is_gone_is_said_to_be_gone_and_comes_back_when_it_is_opened_anew() {
    need_storm!();
    let mut storm = Storm::new(1000, false, &[]);
    let (driver, standby) = storm.settle();
    storm.model.unplug();
    until(&storm.rig, "it is said", || storm.rig.ask(&["status"]).contains("the card is gone"));
    let status = storm.rig.ask(&["status"]);
    assert!(status.contains("take the NIC out of the configuration, apply that, and put it back"), "{status}");
    assert_eq!(status.matches("the card is gone").count(), 1, "{status}");
    assert_eq!(link_of(&storm), (None, "gone".to_owned()));
    nobody_spins(&storm.rig, &[pid(&driver), pid(&standby), storm.rig.daemon_pid()]);
    // New requests are refused, and no worker dies of them.
    let said = storm.rig.refused(&["worker", "upgrade", "red"]);
    assert!(said.contains("gone"), "{said}");
    assert!(lives(pid(&driver)), "{}", storm.rig.log());
    // Follow the advice in the sentence.
    let with_nic = fs::read_to_string(storm.rig.path("tasuki.toml")).expect("a file");
    storm.rig.configure(|text| text.split("[[nic]]").next().expect("a part").to_owned());
    storm.rig.ask(&["apply"]);
    storm.plug_another(1000);
    storm.rig.configure(|_| with_nic.clone());
    storm.rig.ask(&["apply"]);
    storm.settle();
    storm.flows();
    storm.nothing_is_lost();
}

/// Its worker arms no card, and so asks none whether it is there.
#[test]
fn cards_that_are_pulled_out_are_gone_also_if_their_worker_never_sleeps() {
    need_storm!();
    let mut rig =
        Rig::without_daemon("[[node]]\nname = \"red\"\nwork = \"echo\"\npoll = true\nstandby = false\n\n", "");
    rig.with_stock_workers();
    let cards = ["82574l", "virtio-net"];
    let servers = cards.map(|card| {
        let socket = rig.path(&format!("{card}.sock"));
        let device = format!("vfio-user:{}", socket.display());
        rig.configure(|text| text + &format!("[[nic]]\nname = \"of-{card}\"\ndevice = {device:?}\nnode = \"red\"\n\n"));
        Between::serve(socket, &["--card", card], Later::ReadsAsOnes)
    });
    rig.start();
    let all_are = |rig: &Rig, what: &str| cards.iter().all(|card| nic(rig, &format!("of-{card}"))["is"] == what);
    until(&rig, "both are driven", || all_are(&rig, "driven"));
    servers.iter().for_each(|server| server.turns.store(true, Relaxed));
    until(&rig, "both are gone", || all_are(&rig, "gone"));
    rig.stop();
}

/// Returns what the daemon says of the link of the one NIC, and of the NIC.
fn link_of(storm: &Storm) -> (Option<String>, String) {
    let nic = storm.nic();
    (nic["link"].as_str().map(str::to_owned), nic["is"].as_str().expect("a word").to_owned())
}

#[test]
fn a_cable_that_is_pulled_out_is_told_of_and_frames_flow_when_it_is_plugged_in_again() {
    need_storm!();
    for card in ["82574l", "virtio-net"] {
        let mut storm = Storm::with_card(card, 1000, false, &[]);
        let (driver, standby) = storm.settle();
        until(&storm.rig, "the link is up", || link_of(&storm).0.as_deref() == Some("up"));
        storm.model.signal(Signal::USR2);
        until(&storm.rig, "the link is down", || link_of(&storm) == (Some("down".to_owned()), "driven".to_owned()));
        assert!(storm.rig.ask(&["nic", "list"]).contains("driven, link down"), "{}", storm.rig.ask(&["nic", "list"]));
        storm.rig.await_event("the link of eth0 is down; look at its cable");
        nobody_spins(&storm.rig, &[pid(&driver), pid(&standby), storm.rig.daemon_pid()]);
        // A successor is not led to believe that the link is up.
        storm.kill(&driver);
        until(&storm.rig, "the next one says so, too", || {
            storm.nic()["worker"] == standby["worker"] && link_of(&storm).0.as_deref() == Some("down")
        });
        storm.model.signal(Signal::USR2);
        storm.rig.await_event("the link of eth0 is up again, after");
        storm.flows();
        // A source that hears nothing from a card without a link goes on sending.
        storm.ends_with_losses();
    }
}

#[test]
fn the_pause_of_a_card_that_starts_anew_lasts_until_its_link_is_up() {
    need_storm!();
    let wire = ["--source", &u64::MAX.to_string(), "--rate", "1000", "--link-up", "1500"];
    let storm = Storm::on(&wire, false, &[]);
    until(&storm.rig, "the link is up", || link_of(&storm).0.as_deref() == Some("up"));
    storm.give("blue", Some("cold")).expect("it is done");
    storm.rig.await_event("of node blue, after ");
    let said = storm.rig.ask(&["events"]);
    let links: Vec<bool> =
        said.lines().filter(|it| it.contains("is driven by")).map(|it| it.contains("not up yet")).collect();
    assert_eq!(links, [false, true], "{said}");
    until(&storm.rig, "the link is up again", || link_of(&storm).0.as_deref() == Some("up"));
    let pause = storm.nic()["pause_ns"].as_u64().expect("a time");
    assert!(pause >= 1_500_000_000, "{pause}: the model's link takes at least as long");
    storm.flows();
    storm.ends_with_losses();
}

/// Returns the process that the daemon has started with this word.
fn started(rig: &Rig, word: &str) -> Option<u32> {
    let is_it =
        |(pid, words): &(u32, String)| words.split('\0').nth(1) == Some(word) && is_ours(*pid, rig.path("").as_path());
    process::running().find(is_it).map(|(pid, _)| pid)
}

/// Their card's server may do anything to them: they can do no more harm than a program of stage one, row: T33
#[test]
fn a_model_and_what_opens_a_card_are_confined() {
    need_storm!();
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: only root can confine a model as another user");
    }
    let mut rig = Rig::without_daemon("", "");
    let deaf = UnixListener::bind(rig.path("deaf.sock")).expect("a place");
    let nic = |name: &str, device: &str, more: &str| {
        format!("[[nic]]\nname = {name:?}\ndevice = {device:?}\nnode = \"red\"\n{more}\n")
    };
    let device = format!("vfio-user:{}", rig.path("deaf.sock").display());
    let nics = nic("eth0", "sim", "") + &nic("eth1", &device, "") + &nic("eth2", "sim", "wire = [\"--tap\", \"far0\"]");
    rig.with_stock_workers();
    rig.configure(|text| format!("{text}[[node]]\nname = \"red\"\nwork = \"echo\"\n\n{nics}"));
    rig.start();
    deaf.set_nonblocking(true).expect("a socket");
    let met = std::cell::RefCell::new(Vec::new());
    until(&rig, "a model serves, and somebody meets who says nothing", || {
        // Two openers may try; the accepted one goes on waiting.
        met.borrow_mut().extend(deaf.accept().ok());
        started(&rig, "sim").is_some() && started(&rig, "open").is_some() && !met.borrow().is_empty()
    });
    let field = |pid: u32, name: &str| {
        let words = process::status(pid, name).unwrap_or_default();
        words.split(' ').next().unwrap_or_default().to_owned()
    };
    let network = |pid: u32| fs::read_link(format!("/proc/{pid}/ns/net")).expect("a process");
    let both = ["sim", "open"].map(|word| started(&rig, word).expect("just seen"));
    for pid in both {
        let said = ["CapPrm", "CapBnd", "NoNewPrivs", "Seccomp", "Groups"].map(|name| field(pid, name));
        assert_eq!(said, ["0000000000000000", "0000000000000000", "1", "2", ""].map(str::to_owned));
        assert_ne!(network(pid), network(std::process::id()));
    }
    let users = both.map(|pid| field(pid, "Uid"));
    assert!(users[0] != users[1] && !users.contains(&"0".to_owned()), "{users:?}");
    let nics = rig.json(&["nic", "list"]);
    assert!(nics.to_string().contains("its model is confined, and --tap is out of its reach"), "{nics}");
    rig.stop();
}

#[test]
fn a_model_of_the_daemon_that_dies_is_named_and_comes_back_with_its_nic() {
    need_storm!();
    let mut rig = Rig::without_daemon(
        "[[node]]\nname = \"red\"\nwork = \"echo\"\n\n[[nic]]\nname = \"eth0\"\ndevice = \"sim\"\nnode = \"red\"\n",
        "",
    );
    rig.with_stock_workers();
    rig.start();
    rig.await_pair("red");
    let model = started(&rig, "sim").expect("a model");
    send(model, rustix::process::Signal::KILL);
    until(&rig, "it is said", || rig.ask(&["status"]).contains("the model of eth0 was killed by signal 9"));
    let status = rig.ask(&["status"]);
    let advice = "take the NIC out of the configuration, apply that, and put it back";
    assert!(status.contains(advice) && rig.nic()["is"] == "gone", "{status}");
    assert!(rig.refused(&["up", &rig.path("tasuki.toml").display().to_string()]).contains(advice));
    let mut pids: Vec<u32> = rig.workers().iter().map(pid).collect();
    pids.push(rig.daemon_pid());
    nobody_spins(&rig, &pids);
    let with_nic = fs::read_to_string(rig.path("tasuki.toml")).expect("a file");
    rig.configure(|text| text.split("[[nic]]").next().expect("a part").to_owned());
    rig.ask(&["apply"]);
    rig.configure(|_| with_nic.clone());
    rig.ask(&["apply"]);
    rig.await_pair("red");
    rig.stop();
}

/// A child that the daemon is starting has a copy of all its descriptors, until it executes its program: an ended model's
/// pidfd, too, and the daemon's epoll reports that one on. Here the test has the copy.
#[test]
fn the_end_of_a_model_that_was_closed_is_not_taken_for_that_of_the_next_one() {
    need_storm!();
    let mut rig = Rig::without_daemon(
        "[[node]]\nname = \"red\"\nwork = \"echo\"\n\n[[nic]]\nname = \"eth0\"\ndevice = \"sim\"\nwire = [\"--link-up\", \"10\"]\nring = 128\nnode = \"red\"\n",
        "",
    );
    rig.with_stock_workers();
    rig.start();
    rig.await_pair("red");
    let model = started(&rig, "sim").expect("a model");
    let daemon = rig.daemon_pid();
    let fdinfo = |fd: &u64| fs::read_to_string(format!("/proc/{daemon}/fdinfo/{fd}")).unwrap_or_default();
    let line = format!("Pid:\t{model}\n");
    let its =
        rig.descriptors().into_iter().find(|fd| fdinfo(fd).contains(&line)).expect("it waits for the model's end");
    let open = |pid: u32| {
        let pid = rustix::process::Pid::from_raw(pid.cast_signed()).expect("a number");
        rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).expect("a process")
    };
    let flags = rustix::process::PidfdGetfdFlags::empty();
    let copy = rustix::process::pidfd_getfd(open(daemon), its.try_into().expect("a descriptor"), flags).expect("ours");
    rig.configure(|text| text.replace("ring = 128", "ring = 256"));
    rig.ask(&["apply"]);
    rig.await_pair("red");
    let status = rig.ask(&["status"]);
    assert!(!status.contains("model of eth0") && rig.nic()["is"] == "driven", "{status}");
    drop(copy);
    rig.stop();
}
