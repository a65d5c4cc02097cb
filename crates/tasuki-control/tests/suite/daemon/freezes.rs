//! A driving worker is frozen at any time, as a fence does it. The test measures the time until the freeze is seen,
//! and checks whether the worker holds the turn at its card's connection then.
//!
//! The suite freezes some; `cargo xtask campaign freezes` does it thousands of times, by `TASUKI_FREEZES`.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};
use serde_json::json;
use tasuki_testing::{Dice, alone};

use super::rig::{Rig, group, pid};
use super::storm::{Storm, need_storm};
use super::times::{Times, asked, record};

/// Number of freezes in the suite.
const SOME: usize = 100;
/// Frames a second.
const RATE: u32 = 4000;

/// Files of a control group that freeze it and report that it is frozen.
struct Freezer {
    freeze: File,
    events: File,
}

impl Freezer {
    fn of(process: u32) -> Option<Self> {
        let group = group(process)?;
        let freeze = OpenOptions::new().write(true).open(group.join("cgroup.freeze")).ok()?;
        Some(Freezer { freeze, events: File::open(group.join("cgroup.events")).ok()? })
    }

    fn is_frozen(&self) -> bool {
        let mut text = [0; 64];
        let len = self.events.read_at(&mut text, 0).expect("events");
        text[..len].windows(8).any(|word| word == b"frozen 1")
    }

    fn set(&self, word: &[u8]) {
        self.freeze.write_all_at(word, 0).expect("a group that can be frozen");
    }

    /// Freezes the group; returns the time until the freeze is seen.
    fn freeze(&self) -> Duration {
        let since = Instant::now();
        self.set(b"1");
        while !self.is_frozen() {
            assert!(since.elapsed() < Duration::from_secs(10), "it does not stop");
            std::hint::spin_loop();
        }
        since.elapsed()
    }
}

/// Returns whether the process holds a record lock. A worker has only one such lock: for the turn to ask the card.
fn has_the_turn(process: u32) -> bool {
    let locks = fs::read_to_string("/proc/locks").expect("locks");
    let is_its =
        |line: &str| line.contains(" POSIX ") && line.split_whitespace().any(|word| word == process.to_string());
    locks.lines().any(is_its)
}

#[test]
fn a_worker_that_is_frozen_at_any_time_stops_and_goes_on_and_nothing_is_lost() {
    need_storm!();
    let mut dice = Dice::new("freezes");
    let count = asked("TASUKI_FREEZES").unwrap_or(SOME);
    let mut seen = Vec::new();
    for (card, poll) in [("82574l", false), ("82574l", true), ("virtio-net", false)] {
        // No worker counts as hung because this machine is busy.
        let mut storm = Storm::with_card(card, RATE, poll, &[("hang_after_ms", 30_000)]);
        let (driver, _) = storm.settle();
        let driver = pid(&driver);
        let Some(freezer) = Freezer::of(driver) else {
            return println!("skipped: needs control groups of version 2, and root");
        };
        let (mut times, mut with_turn) = (Times::default(), 0_u32);
        for _ in 0..count {
            std::thread::sleep(Duration::from_micros(dice.below(2000) as u64));
            times.0.push(freezer.freeze());
            with_turn += u32::from(has_the_turn(driver));
            freezer.set(b"0");
        }
        storm.flows();
        assert_eq!(storm.pair().map(|(now, _)| pid(&now)), Some(driver), "{}", storm.rig.log());
        // The card fills its packet buffer where the machine holds up the opener for longer than that takes, before it
        // has turned flow control on.
        storm.only_counted_ones_are_lost("its packet buffer was full");
        seen.push(json!({ "card": card, "poll": poll, "frozen": times.to_json(), "with_the_turn": with_turn }));
    }
    record(&json!({ "freezes": seen }));
}

/// As in a container whose filter knows no clone3, and under a unit with `RestrictNamespaces=`.
#[test]
fn a_worker_is_in_its_group_also_where_no_process_begins_in_one() {
    if !alone(a_worker_is_in_its_group_also_where_no_process_begins_in_one) {
        return;
    }
    let ours = group(std::process::id()).map(|group| group.join(format!("test-{}", std::process::id())));
    if ours.is_none_or(|ours| fs::create_dir(&ours).and_then(|()| fs::remove_dir(ours)).is_err()) {
        return println!("skipped: needs control groups of version 2, and root");
    }
    let no_such_call = SeccompAction::Errno(Errno::NOSYS.raw_os_error().unsigned_abs());
    let arch = std::env::consts::ARCH.try_into().expect("an architecture");
    let filter = SeccompFilter::new([(libc::SYS_clone3, vec![])].into(), SeccompAction::Allow, no_such_call, arch);
    let filter: BpfProgram = filter.and_then(TryInto::try_into).expect("a filter");
    seccompiler::apply_filter_all_threads(&filter).expect("a thread of ours may");
    let rig = Rig::new();
    let (driver, _) = rig.await_pair("red");
    let its = group(pid(&driver)).expect("a group");
    assert!(its.ends_with(format!("node-red/worker-{}", driver["worker"])), "{its:?}\n{}", rig.log());
}
