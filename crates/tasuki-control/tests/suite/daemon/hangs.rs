//! Hanging, sleeping and lying processes: nothing is lost by any of them.

use std::os::unix::net::UnixDatagram;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;

use super::rig::{lives, pid, signal, until};
use super::storm::{Storm, need_storm, send, state};

/// Limits for noticing a hang soon. A worker that a busy machine delays for longer is fenced, and that loses nothing
/// either.
const IMPATIENT: &[(&str, u32)] = &[("hang_after_ms", 200), ("deadline_ms", 300), ("prepare_ms", 1000)];
const RATE: u32 = 1000;

/// Upgrades red to a worker of this plan. A busy machine may keep a fresh worker from its start for longer than it has:
/// then another one is tried.
fn upgraded_in_time(storm: &mut Storm, plan: &str) -> Result<Value, String> {
    tasuki_testing::found("a worker that starts in time", || {
        storm.forget_plans();
        storm.plan(plan);
        let said = storm.upgrade("red", false);
        let is_late = said.as_ref().is_err_and(|why| why.contains("has not prepared within"));
        (!is_late).then_some(said)
    })
}

#[test]
fn a_driver_that_hangs_is_fenced_wherever_it_does() {
    need_storm!();
    let mut storm = Storm::new(RATE, false, IMPATIENT);
    for place in ["burst.received", "frame.saved", "burst.turned", "burst.sent"] {
        let hangs = |storm: &Storm| storm.rig.log().matches("it hangs").count();
        let before = hangs(&storm);
        let _ = upgraded_in_time(&mut storm, &format!("TASUKI_STOP={place}:40"));
        let hung = || storm.workers().iter().map(pid).find(|pid| state(*pid) == Some('T'));
        until(&storm.rig, "it hangs, and is fenced", || hangs(&storm) > before && hung().is_none());
        storm.settle();
        storm.flows();
    }
    storm.nothing_is_lost();
}

#[test]
fn a_giver_or_a_taker_that_hangs_in_a_relay_is_fenced() {
    need_storm!();
    let mut storm = Storm::new(RATE, false, IMPATIENT);
    for place in ["map.begun", "take.waiting", "take.won", "take.booked", "take.read", "take.looked"] {
        storm.plan(&format!("TASUKI_STOP={place}:1"));
        let said = storm.upgrade("red", false);
        somebody_drives(&storm);
        assert!(said.is_err() || place == "take.looked" || place == "take.read", "{place}: {said:?}");
        storm.forget_plans();
    }
    for place in ["give.stopped", "give.written", "give.passed", "give.said"] {
        let said = upgraded_in_time(&mut storm, &format!("TASUKI_STOP={place}:1"));
        assert!(said.is_ok(), "{place}: {said:?}\n{}", storm.rig.log());
        somebody_drives(&storm);
        let _ = storm.upgrade("red", false);
        somebody_drives(&storm);
        storm.forget_plans();
    }
    storm.flows();
    let stopped: Vec<u32> = storm.ever().into_iter().filter(|pid| state(*pid) == Some('T')).collect();
    until(&storm.rig, "who hangs is ended", || stopped.iter().all(|pid| !lives(*pid)));
    storm.nothing_is_lost();
}

/// Waits until a worker drives and another stands by. A hung worker that blocks no other is ended later.
fn somebody_drives(storm: &Storm) {
    until(&storm.rig, "somebody drives", || storm.pair().is_some());
}

/// If a taker does not run for longer than the partner pauses, its handover is refused, and the retry succeeds.
#[test]
fn a_handover_whose_taker_is_late_is_done_again() {
    need_storm!();
    let storm = given_to_a_late_taker("blue");
    assert!(storm.rig.log().contains("it is given once more"), "{}", storm.rig.log());
    storm.nothing_is_lost();
}

/// Between nodes that do not trust each other, no giver is left to have the NIC back. The late taker takes it, and
/// frames received meanwhile are lost.
#[test]
fn a_late_taker_from_a_stranger_has_the_nic_all_the_same() {
    need_storm!();
    let mut storm = given_to_a_late_taker("green");
    let told = number_before(&storm.rig.log(), " frames came after the former owner had let go").expect("it is said");
    assert!(told > 0, "{}", storm.rig.log());
    signal(storm.model.pid(), Signal::USR1);
    let sent = || storm.pair().and_then(|(driver, _)| driver["sent"].as_u64());
    until(&storm.rig, "the source has finished, and its frames are back", || {
        let before = sent();
        std::thread::sleep(FRAMES_CAME);
        before.is_some() && before == sent()
    });
    let said = storm.end();
    assert!(said.contains("twice 0, out of order 0, damaged 0"), "{said}");
    // The card itself drops frames if the machine holds the taker up once more while the receive unit is off.
    let dropped = number_before(&said, " frames: its receive unit was off").unwrap_or(0);
    let (_, lost) = said.split_once("lost ").expect("a count");
    let lost: u64 = lost.split_whitespace().next().and_then(|word| word.parse().ok()).expect("a number");
    assert_eq!(lost, told + dropped, "{said}");
}

/// Time in which a source that has not finished sends many frames.
const FRAMES_CAME: Duration = Duration::from_millis(100);

/// Returns the number that stands right before `text`.
fn number_before(all: &str, text: &str) -> Option<u64> {
    all.split_once(text)?.0.rsplit(' ').next()?.parse().ok()
}

/// Gives a NIC under traffic to a node whose worker stops for longer than the partner pauses.
fn given_to_a_late_taker(to: &str) -> Storm {
    let folder = tempfile::tempdir().expect("a folder");
    let pcap = folder.path().join("wire.pcap");
    let rate = RATE.to_string();
    let wire = ["--source", &u64::MAX.to_string(), "--rate", &rate, "--pcap", pcap.to_str().expect("a path")];
    let mut storm = Storm::on(&wire, false, &[]);
    let len = || std::fs::metadata(&pcap).map_or(0, |meta| meta.len());
    storm.settle();
    storm.plan("TASUKI_STOP=take.won:1");
    storm.upgrade(to, false).expect("a node without a NIC");
    storm.forget_plans();
    let said = std::thread::scope(|scope| {
        let given = scope.spawn(|| storm.give(to, Some("repoint")));
        let late = || storm.workers().iter().map(pid).find(|pid| state(*pid) == Some('T'));
        until(&storm.rig, "the taker is stopped", || late().is_some());
        let late = late().expect("the one that was there a moment ago");
        // The partner's pause ends here. The file may still grow by up to 8 KiB of earlier frames.
        let before = len();
        until(&storm.rig, "frames come again", || len() > before + 16_384);
        signal(late, Signal::CONT);
        given.join().expect("no panic")
    });
    assert!(said.is_ok(), "{said:?}\n{}", storm.rig.log());
    assert_eq!(storm.nic()["node"], to);
    storm.settle();
    storm.flows();
    storm
}

#[test]
fn a_standby_that_is_stopped_does_not_keep_the_nic_from_somebody_else() {
    need_storm!();
    let mut storm = Storm::new(RATE, false, IMPATIENT);
    let (driver, standby) = storm.settle();
    signal(pid(&standby), Signal::STOP);
    storm.kill(&driver);
    let drives = || storm.pair().is_some_and(|(now, _)| pid(&now) != pid(&standby));
    until(&storm.rig, "somebody else drives", drives);
    // The daemon would end it in its turn; the tests of other hung workers cover that.
    send(pid(&standby), Signal::KILL);
    storm.settle();
    storm.nothing_is_lost();
}

#[test]
fn packets_flow_while_the_daemon_is_stopped() {
    need_storm!();
    let folder = tempfile::tempdir().expect("a folder");
    let pcap = folder.path().join("wire.pcap");
    let rate = RATE.to_string();
    let wire = ["--source", &u64::MAX.to_string(), "--rate", &rate, "--pcap", pcap.to_str().expect("a path")];
    let storm = Storm::on(&wire, false, &[]);
    storm.flows();
    let daemon = storm.rig.daemon_pid();
    signal(daemon, Signal::STOP);
    until(&storm.rig, "it is stopped", || state(daemon) == Some('T'));
    let len = || std::fs::metadata(&pcap).map_or(0, |meta| meta.len());
    // 500 frames there and back, 76 bytes each.
    let before = len();
    let begun = std::time::Instant::now();
    while len() < before + 76_000 && begun.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(5));
    }
    let is_stopped = state(daemon) == Some('T');
    signal(daemon, Signal::CONT);
    assert!(len() >= before + 76_000 && is_stopped);
    storm.nothing_is_lost();
}

/// A frame as it appears on the wire.
fn frame(number: u8) -> Vec<u8> {
    [&[0xff; 6][..], &[2, 0, 0, 0, 0, 9], &[0x88, 0xb5, number], &[7; 50]].concat()
}

/// All workers sleep, a relay is stopped at a step, one frame comes, and the relay goes on. The worker that then
/// drives must wake for that frame.
#[test]
fn an_interrupt_at_any_step_of_a_relay_wakes_whoever_drives_then() {
    need_storm!();
    let folder = tempfile::tempdir().expect("a folder");
    let [ours, its] = ["ours", "its"].map(|name| folder.path().join(name));
    let wire = UnixDatagram::bind(&ours).expect("a free name");
    wire.set_read_timeout(Some(Duration::from_secs(30))).expect("a time");
    let words = ["--dgram", its.to_str().expect("a path"), ours.to_str().expect("a path")];
    let mut storm = Storm::on(&words, false, &[]);
    let echoed = |number: u8, place: &str| {
        let mut room = [0; 2048];
        // Frames that the card itself sends to its partner are no echoes.
        while let Ok(len) = wire.recv(&mut room) {
            if len > 15 && room[14] == number && room[12..14] == [0x88, 0xb5] {
                return;
            }
        }
        panic!("frame {number} did not come back after a relay that was stopped at {place}");
    };
    until(&storm.rig, "the link is up", || wire.send_to(&frame(0), &its).is_ok());
    echoed(0, "at rest");
    let places = ["map.done", "take.waiting", "take.won", "take.booked", "take.read", "take.looked"];
    let all = places.iter().chain(&["give.stopped", "give.written", "give.passed", "give.said"]);
    for (number, place) in (1..).zip(all) {
        // The plan is for the worker that takes, and no stand-by's.
        assert!(!storm.quiet_or_dead());
        storm.plan(&format!("TASUKI_STOP={place}:1"));
        if place.starts_with("give") {
            let said = storm.upgrade("red", false);
            assert!(said.is_ok(), "{place}: {said:?}");
            storm.settle();
        }
        until(&storm.rig, "everybody sleeps", || storm.workers().iter().all(|worker| state(pid(worker)) == Some('S')));
        std::thread::scope(|scope| {
            let relay = scope.spawn(|| storm.upgrade("red", false));
            let stopped = || storm.ever().into_iter().find(|pid| state(*pid) == Some('T'));
            until(&storm.rig, place, || stopped().is_some());
            wire.send_to(&frame(number), &its).expect("a card");
            send(stopped().expect("it is stopped"), Signal::CONT);
            echoed(number, place);
            let said = relay.join().expect("an answer");
            assert!(said.is_ok(), "{place}: {said:?}\n{}", storm.rig.log());
        });
        storm.settle();
    }
    storm.ends();
}

/// An untrusted giver lets go, says so, and drives on. The daemon stops it before another worker drives, so it still
/// had the card to itself until then: no frame is answered twice. Its partner pauses for 33 ms: on a busy machine it takes
/// longer to stop a worker that never sleeps, and frames that this one takes then are its own. The next driver counts
/// them.
#[test]
fn a_giver_that_drives_on_after_it_has_let_go_does_no_harm() {
    need_storm!();
    let mut storm = Storm::new(4 * RATE, false, &[]);
    for round in 0..24 {
        let from = storm.node();
        let to = if from == "green" { "red" } else { "green" };
        storm.plan("TASUKI_GOES_ON=1");
        let said = storm.upgrade(&from, false);
        assert!(said.is_ok(), "{said:?}\n{}", storm.rig.log());
        let (liar, _) = storm.settle();
        let given = storm.give(to, None);
        assert!(given.is_ok(), "round {round}: {given:?}\n{}", storm.rig.log());
        // The giver was frozen before the lease passed, and drives nothing more.
        until(&storm.rig, "the liar is dead", || !lives(pid(&liar)));
        let (driver, _) = storm.settle();
        assert_eq!(driver["node"], to);
        storm.flows();
    }
    storm.only_counted_ones_are_lost("its receive unit was off");
}
