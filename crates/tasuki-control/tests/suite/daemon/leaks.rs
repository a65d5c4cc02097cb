//! Many relays, after which no process has more than before: descriptors, memory, slots of the arena, files.

use std::fs;

use hyper::Method;
use tasuki_testing::process;

use super::rig::{count_in, pid};
use super::storm::{Storm, need_storm};

/// Number of relays, unless `TASUKI_RELAYS` overrides it.
const RELAYS: usize = 200;

/// Resources of the daemon and its workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Has {
    daemon_fds: usize,
    driver_fds: usize,
    standby_fds: usize,
    slots_with_card: u64,
    files: usize,
    workers: usize,
}

/// Returns the private memory of a process, in bytes.
fn memory(pid: u32) -> u64 {
    process::status_bytes(pid, "RssAnon")
}

fn look(storm: &mut Storm) -> (Has, u64) {
    let (driver, standby) = storm.settle();
    let counts = storm.ask(Method::GET, "/v1/nics/eth0/counts", None).expect("counts");
    let daemon = storm.rig.daemon_pid();
    let has = Has {
        daemon_fds: process::descriptors(daemon),
        driver_fds: process::descriptors(pid(&driver)),
        standby_fds: process::descriptors(pid(&standby)),
        slots_with_card: count_in(&counts, "slots_with_card"),
        files: fs::read_dir(storm.rig.dir()).expect("a folder").count(),
        workers: storm.workers().len(),
    };
    (has, memory(daemon))
}

/// Makes a handover. A node whose only worker is being replaced asks the caller to retry.
fn give(storm: &mut Storm, to: &str) {
    for _ in 0..100 {
        match storm.give(to, Some("keep")) {
            Ok(_) => return,
            Err(said) => {
                assert!(said.contains("ask again in a moment"), "{said}\n{}", storm.rig.log());
                let log = storm.rig.log();
                let last: Vec<&str> = log.lines().rev().take(12).collect();
                println!("{said}: {last:#?}");
                storm.settle();
            }
        }
    }
    panic!("{to} has no worker\n{}", storm.rig.log());
}

/// Makes an upgrade, a handover there and back, and a takeover, in turn.
fn relay(storm: &mut Storm, number: usize) {
    match number % 4 {
        0 => drop(storm.upgrade("red", false).expect("an upgrade")),
        1 => give(storm, "blue"),
        2 => give(storm, "red"),
        _ => {
            let (driver, _) = storm.settle();
            storm.kill(&driver);
        }
    }
    storm.settle();
}

#[test]
fn nobody_has_more_after_many_relays_than_after_a_few() {
    need_storm!();
    let relays = std::env::var("TASUKI_RELAYS").ok().and_then(|text| text.parse().ok()).unwrap_or(RELAYS);
    let mut storm = Storm::new(1000, false, &[]);
    let begun = std::time::Instant::now();
    let mut first = None;
    for number in 0..relays {
        relay(&mut storm, number);
        // Until then, tables and buffers of the daemon grow to their final size; it keeps a thousand events.
        if number + 1 == relays / 4 * 2 / 4 * 4 {
            first = Some(look(&mut storm));
        }
    }
    let ((before, daemon_before), (after, daemon_after)) = (first.expect("many relays"), look(&mut storm));
    println!(
        "{relays} relays in {:?}: {before:?}, daemon {} KiB; then {after:?}, daemon {} KiB",
        begun.elapsed(),
        daemon_before / 1024,
        daemon_after / 1024
    );
    // A message under way is a descriptor more, and a frame under way a slot.
    assert!(after.slots_with_card.abs_diff(before.slots_with_card) <= 64, "{before:?} {after:?}");
    let grew = [
        (before.daemon_fds, after.daemon_fds),
        (before.driver_fds, after.driver_fds),
        (before.standby_fds, after.standby_fds),
        (before.files, after.files),
    ];
    assert!(grew.iter().all(|(before, after)| *after <= before + 2), "{before:?} {after:?}");
    assert_eq!(before.workers, after.workers);
    assert!(daemon_after < daemon_before + (1 << 20), "{daemon_before} bytes, then {daemon_after}");
    storm.nothing_is_lost();
}
