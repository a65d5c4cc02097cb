//! Workers that are killed at every step of a relay and of a burst, under traffic: the wire sees each frame once, in
//! order, unchanged.

use std::time::Instant;

use tasuki_relay::After;
use tasuki_relay::message::{ToDaemon, Work, heartbeat};
use tasuki_relay::wire::{Order, Report, Use};
use tasuki_testing::PATIENCE;

use crate::daemon::{Nic, Node, Said, Worker, nothing_is_lost, scene, taken};
use crate::programs::need_model;

/// Number of the source's frames, and its rate in frames per second.
const FRAMES: u64 = 12_000;
const RATE: u64 = 6_000;

/// The way of a worker to the crash point at which it dies; each includes the one before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// It is ordered to prepare.
    Prepares,
    /// It is ordered to take.
    Takes,
    /// It handles bursts.
    Drives,
    /// It is ordered to release.
    Gives,
    /// It has passed the lease: the plain worker takes it.
    HasGiven,
}

const PLACES: &[(&str, Way)] = &[
    ("map.begun", Way::Prepares),
    ("map.done", Way::Prepares),
    ("take.waiting", Way::Takes),
    ("take.won", Way::Takes),
    ("take.booked", Way::Takes),
    ("take.read", Way::Takes),
    ("take.looked", Way::Takes),
    ("burst.received", Way::Drives),
    ("frame.saved", Way::Drives),
    ("burst.turned", Way::Drives),
    ("burst.sent", Way::Drives),
    ("nic.committed", Way::Drives),
    ("nic.rung", Way::Drives),
    ("nic.posted", Way::Drives),
    ("nic.collected", Way::Drives),
    ("nic.filled", Way::Drives),
    ("give.stopped", Way::Gives),
    ("give.written", Way::Gives),
    ("give.passed", Way::HasGiven),
    ("give.said", Way::HasGiven),
];

/// Returns the worker's next report about `nic`, or nothing if it dies instead.
fn next(worker: &mut Worker, nic: &Nic) -> Option<Report> {
    worker.report_or_end(nic)
}

/// Has the plain worker, which dies nowhere, drive again; the other worker is dead.
fn take_back(plain: &mut Worker, nic: &Nic) {
    // The plain worker may have been ordered to take before, and have taken.
    let holder = nic.tenure().holder;
    if holder == Some(plain.party) {
        return;
    }
    let passed = nic.seize();
    plain.order(nic, Order::Take { epoch: passed.epoch, after: After::Lost, wrote: 0 });
    let end = Instant::now() + PATIENCE;
    loop {
        match next(plain, nic) {
            Some(Report::Taken { epoch }) if epoch == passed.epoch.wrapping_add(1) => return,
            Some(Report::Taken { .. } | Report::Lost { .. } | Report::Released { .. }) => {}
            other => panic!("{other:?}: {:?}", plain.told),
        }
        assert!(Instant::now() < end, "the lease is not taken back");
    }
}

/// Sends a worker on its way until it dies when it passes `place` for the `nth` time. Returns the number of frames
/// that it sent.
fn kill(node: &mut Node, nic: &Nic, plain: &mut Worker, (place, way): (&str, Way), nth: u64) -> u64 {
    let mut victim = node.worker(&[("TASUKI_CRASH", format!("{place}:{nth}"))]);
    victim.give(nic);
    victim.prepare(nic, Use::Upgrade);
    match next(&mut victim, nic) {
        None => {
            assert_eq!((way, victim.process.end()), (Way::Prepares, None), "{place}");
            return 0;
        }
        Some(report) => assert_eq!((report, way != Way::Prepares), (Report::Ready, true), "{place}"),
    }
    let epoch = nic.tenure().epoch;
    victim.order(nic, Order::Take { epoch, after: After::Passed, wrote: epoch });
    plain.order(nic, Order::Release { epoch });
    assert_eq!(next(plain, nic), Some(Report::Released { epoch }), "{place}");
    if !matches!(way, Way::Gives | Way::HasGiven) {
        // Taken or not, it dies by itself; read its reports meanwhile.
        while next(&mut victim, nic).is_some() {}
    } else {
        assert_eq!(next(&mut victim, nic), Some(Report::Taken { epoch: epoch + 1 }), "{place}: {:?}", victim.told);
        plain.order(nic, Order::Take { epoch: epoch + 1, after: After::Passed, wrote: epoch + 1 });
        victim.order(nic, Order::Release { epoch: epoch + 1 });
        while next(&mut victim, nic).is_some() {}
        if way == Way::HasGiven {
            assert_eq!(next(plain, nic), Some(Report::Taken { epoch: epoch + 2 }), "{:?}", plain.told);
        }
    }
    assert_eq!(victim.process.end(), None, "{place}: killed");
    let sent = victim.heartbeat(heartbeat::SENT);
    take_back(plain, nic);
    sent
}

fn killed_at_every_step(poll: bool) {
    need_model!();
    if !cfg!(feature = "crash-points") {
        return println!("skipped: needs the feature crash-points");
    }
    let frames = std::env::var("TASUKI_KILL_FRAMES").ok().and_then(|text| text.parse().ok()).unwrap_or(FRAMES);
    let (_folder, model, nic, mut node) = scene(Work::Echo, frames, RATE);
    node.poll = poll;
    let mut plain = node.ready(&nic, &[]);
    taken(plain.grant(&nic));
    let (mut kills, mut sent) = (0_usize, 0);
    while sent + plain.heartbeat(heartbeat::SENT) < frames * 9 / 10 {
        let place = PLACES[kills % PLACES.len()];
        // At other bursts in each round; the crash points of a relay are passed once.
        let nth = 1 + (kills / PLACES.len()) as u64 % 7 * 3;
        let nth = if place.1 == Way::Drives { nth } else { 1 };
        sent += kill(&mut node, &nic, &mut plain, place, nth);
        kills += 1;
    }
    println!("{kills} workers were killed, {} relays", nic.relays());
    assert!(
        kills >= PLACES.len(),
        "only {kills} kills: the machine is too slow for so few frames; raise TASUKI_KILL_FRAMES"
    );
    plain.until_sent(frames);
    while let Some(said) = plain.talk.hear_within(std::time::Duration::ZERO) {
        assert!(!matches!(said, Said::Message(ToDaemon::Told { .. }, _)), "{said:?}");
    }
    drop((plain, nic));
    nothing_is_lost(&model.report(), frames);
}

#[test]
fn killed_at_every_step_while_they_sleep_when_idle() {
    killed_at_every_step(false);
}

#[test]
fn killed_at_every_step_while_they_poll() {
    killed_at_every_step(true);
}
