//! Handover of a NIC to another node, whose worker has memory of its own: with real processes, under traffic, and
//! with deaths at every step.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use tasuki_relay::After;
use tasuki_relay::message::{Inflight, Work, heartbeat};
use tasuki_relay::method::Method;
use tasuki_relay::wire::{Order, Reason, Report};
use tasuki_testing::until;

use crate::daemon::{Nic, Node, Worker, nothing_is_lost, scene, taken};
use crate::programs::{Model, need_model};

const FRAMES: u64 = 20_000;
const RATE: u64 = 10_000;
/// Rate, in frames per second, of tests with deaths: on a busy machine too, the relay must be a small part of the
/// whole.
const SLOW: u64 = 2_500;

/// Returns a node beside that of a [`scene`].
fn beside(folder: &tempfile::TempDir) -> Node {
    Node::beside(folder.path(), Work::Echo, 1000)
}

/// Number of attempts at a relay that a busy machine may keep from finishing before the partner's pause is over.
const TRIALS: u32 = 20;

/// Has `giver` hand the NIC to a fresh worker of `node`, which has memory of its own.
fn repoint(node: &mut Node, giver: &mut Worker, nic: &mut Nic, inflight: Inflight) -> Worker {
    for _ in 0..TRIALS {
        let mut taker = node.worker(&[]);
        taker.give_apart(nic);
        let (bundle, fds) = taker.ready_apart(nic).expect("a worker that lives");
        giver.plan_handover(nic, Method::Repoint, inflight);
        let epoch = nic.tenure().epoch;
        let (released, took) = giver.pass_to(&mut taker, nic);
        assert_eq!(released, Report::Released { epoch }, "{:?}", giver.told);
        if matches!(took, Report::Failed { reason: Reason::FramesCame, .. }) {
            let passed = nic.seize();
            giver.order(nic, Order::Take { epoch: passed.epoch, after: After::Lost, wrote: 0 });
            assert_eq!(giver.report(nic), Report::Taken { epoch: passed.epoch + 1 }, "{:?}", giver.told);
            continue;
        }
        assert_eq!(took, Report::Taken { epoch: epoch + 1 }, "{:?}", taker.told);
        giver.order(nic, Order::Leave);
        assert_eq!(giver.process.end(), Some(0));
        (nic.bundle, nic.fds) = (bundle, fds);
        return taker;
    }
    panic!("the partner's pause was over each time before the taker was run");
}

#[test]
fn a_nic_is_pointed_at_the_memory_of_another_node_and_back_under_traffic() {
    need_model!();
    let (folder, model, mut nic, mut red) = scene(Work::Echo, FRAMES, RATE);
    let mut blue = beside(&folder);
    let mut driver = red.ready(&nic, &[]);
    taken(driver.grant(&nic));
    let mut pauses = Vec::new();
    for turn in 0..20 {
        let node = if turn % 2 == 0 { &mut blue } else { &mut red };
        let mut taker = repoint(node, &mut driver, &mut nic, Inflight::Deliver);
        pauses.push(nic.pause());
        std::mem::swap(&mut driver, &mut taker);
    }
    pauses.sort_unstable();
    println!("pauses: {:?} in the middle, {:?} at most", pauses[10], pauses[19]);
    // The card counts for all its drivers; only the last one reads the counts.
    driver.until_sent(FRAMES);
    drop((driver, nic));
    nothing_is_lost(&model.report(), FRAMES);
}

/// Crash points at which giver and taker are killed.
#[derive(Debug, Clone, Copy, Default)]
struct Deaths {
    giver: Option<&'static str>,
    taker: Option<&'static str>,
}

/// The driver in the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Driver {
    Taker,
    Giver,
    /// A worker of the giver's node.
    Standby,
}

fn orders(place: Option<&'static str>) -> Vec<(&'static str, String)> {
    place.map(|place| ("TASUKI_CRASH", format!("{place}:1"))).into_iter().collect()
}

/// Grants the lease, which no living worker holds, in the order in which the arbiter chooses: the taker, then the
/// giver, then the stand-by. Returns the driver.
fn recover(nic: &Nic, taker: Option<&mut Worker>, giver: Option<&mut Worker>, standby: &mut Worker) -> Driver {
    let all = [(Driver::Taker, taker), (Driver::Giver, giver), (Driver::Standby, Some(standby))];
    for (who, worker) in all {
        let Some(worker) = worker else { continue };
        let passed = nic.seize();
        worker.order(nic, Order::Take { epoch: passed.epoch, after: After::Lost, wrote: 0 });
        loop {
            match worker.report_or_end(nic) {
                Some(Report::Taken { epoch }) if epoch == passed.epoch + 1 => return who,
                // A card that is not stopped cannot be pointed elsewhere.
                Some(Report::Failed { .. }) => break,
                Some(Report::Released { .. } | Report::Lost { .. }) => {}
                None => break,
                other => panic!("{who:?}: {other:?}: {:?}", worker.told),
            }
        }
    }
    panic!("nobody drives")
}

/// A partner that was asked to pause does so for 33 ms. On a busy machine a relay with deaths may take longer, and
/// frames that arrive after that are lost.
const PAUSED: Duration = Duration::from_millis(25);

/// Waits until no more frames arrive: all have arrived, or are lost.
fn until_quiet(model: &mut Model, driver: &Worker) {
    let (mut seen, mut since) = (driver.heartbeat(heartbeat::SENT), Instant::now());
    while model.program.is_running() && since.elapsed() < Duration::from_secs(3) {
        std::thread::sleep(Duration::from_millis(20));
        let now = driver.heartbeat(heartbeat::SENT);
        if now != seen {
            (seen, since) = (now, Instant::now());
        }
    }
}

/// Ends the model and returns the number of frames that did not come back to it. The others must have come back
/// once, in order, and whole.
/// Returns how many frames are lost, and how many of these the card has dropped while no driver received.
fn lost(mut model: Model) -> (u64, u64) {
    if model.program.is_running() {
        model.program.signal(Signal::TERM);
    }
    let report = model.report();
    println!("{report}");
    assert!(report.contains("twice 0, out of order 0, damaged 0, from others 0"), "{report}");
    let number = |line: &str, after: &str| line.split(after).nth(1)?.split_whitespace().next()?.parse().ok();
    let lost = number(&report, "lost ").unwrap_or_else(|| panic!("{report}"));
    let off = report.lines().find(|line| line.ends_with("frames: its receive unit was off"));
    (lost, off.and_then(|line| number(line, "the card dropped ")).unwrap_or(0))
}

/// Runs a handover with these deaths. It may lose at most `at_most` frames, unless the machine kept the processes
/// from running. Returns the driver in the end.
fn killed(deaths: Deaths, at_most: u64) -> Driver {
    let driver = (0..TRIALS).find_map(|_| kill(deaths, at_most));
    driver.expect("the partner's pause was over each time before the taker was run")
}

/// Runs it once. Returns nothing if frames arrived before the taker could point the card.
fn kill(deaths: Deaths, at_most: u64) -> Option<Driver> {
    let (folder, mut model, nic, mut red) = scene(Work::Echo, 5000, SLOW);
    let mut blue = beside(&folder);
    let mut giver = red.ready(&nic, &orders(deaths.giver));
    let mut standby = red.ready(&nic, &[]);
    taken(giver.grant(&nic));
    until("frames flow", || giver.heartbeat(heartbeat::SENT) > 300);
    let mut taker = blue.worker(&orders(deaths.taker));
    taker.give_apart(&nic);
    let own = taker.ready_apart(&nic);
    let began = Instant::now();
    let driver = if own.is_none() {
        assert_eq!(taker.process.end(), None, "{deaths:?}: killed");
        // The giver has received no order.
        Driver::Giver
    } else {
        giver.plan_handover(&nic, Method::Repoint, Inflight::Deliver);
        let epoch = nic.tenure().epoch;
        taker.order(&nic, Order::Take { epoch, after: After::Passed, wrote: epoch });
        giver.order(&nic, Order::Release { epoch });
        let released = giver.report_or_end(&nic);
        assert!(
            released == Some(Report::Released { epoch }) || deaths.giver.is_some(),
            "{released:?}: {:?}",
            giver.told
        );
        let passed = nic.tenure().holder != Some(giver.party);
        let took = if passed { taker.report_or_end(&nic) } else { None };
        match took {
            Some(Report::Taken { .. }) => Driver::Taker,
            Some(Report::Failed { reason: Reason::FramesCame, .. }) => return None,
            Some(other) => panic!("{deaths:?}: {other:?}: {:?}", taker.told),
            None => {
                let dead = |worker: &mut Worker, place: Option<_>| place.is_some() && worker.process.end().is_none();
                let (no_taker, no_giver) = (dead(&mut taker, deaths.taker), dead(&mut giver, deaths.giver));
                let living = |worker, is_dead| if is_dead { None } else { Some(worker) };
                recover(&nic, living(&mut taker, no_taker), living(&mut giver, no_giver), &mut standby)
            }
        }
    };
    let took = began.elapsed();
    let drives = match driver {
        Driver::Taker => &taker,
        Driver::Giver => &giver,
        Driver::Standby => &standby,
    };
    until_quiet(&mut model, drives);
    assert!(drives.heartbeat(heartbeat::SENT) > 100, "{deaths:?}: it drives");
    // A worker that could not take the card because frames had arrived meanwhile has said so.
    let was_late = taker.told.iter().any(|sentence| sentence.contains("frames have come"));
    drop((giver, taker, standby, nic));
    let (lost, _) = lost(model);
    println!("{deaths:?}: {driver:?} drives after {took:?}, and {lost} frames are lost");
    let came = if took > PAUSED { u64::try_from(took.as_millis()).unwrap() * SLOW / 1000 } else { 0 };
    assert!(lost <= at_most + came, "{deaths:?}: {lost} frames are lost, after {took:?}");
    (!was_late).then_some(driver)
}

macro_rules! need_places {
    () => {
        need_model!();
        if !cfg!(feature = "crash-points") {
            return println!("skipped: needs the feature crash-points");
        }
    };
}

/// Number of frames for which a ring has room.
const RING: u64 = 256;

#[test]
fn a_taker_that_dies_before_it_has_pointed_the_card_costs_nothing() {
    need_places!();
    for place in ["map.begun", "map.posted", "map.told", "take.waiting", "take.won"] {
        assert_eq!(killed(Deaths { taker: Some(place), giver: None }, 0), Driver::Giver, "{place}");
    }
}

#[test]
fn a_taker_that_dies_after_it_has_pointed_the_card_costs_what_had_come_to_it() {
    need_places!();
    // After the last two, parts of the giver's memory are not mapped for the card any more, or none of it is.
    for place in ["take.pointed", "take.read", "take.looked", "nic.unmapped", "take.forgot"] {
        let driver = killed(Deaths { taker: Some(place), giver: None }, RING);
        assert_eq!(driver, Driver::Giver, "{place}: nobody has heard that the taker drives");
    }
}

#[test]
fn a_giver_that_dies_while_it_lets_go_costs_nothing() {
    need_places!();
    let quiesced = Deaths { giver: Some("give.quiesced"), taker: None };
    assert_eq!(killed(quiesced, 0), Driver::Standby, "the card was not stopped");
    for place in ["give.stopped", "give.written", "give.passed", "give.said"] {
        assert_eq!(killed(Deaths { giver: Some(place), taker: None }, 0), Driver::Taker, "{place}");
    }
}

#[test]
fn when_both_die_the_standby_of_the_givers_node_points_the_card_back() {
    need_places!();
    let giver = Some("give.said");
    assert_eq!(killed(Deaths { giver, taker: Some("take.won") }, 0), Driver::Standby, "the card was where it was");
    for place in ["take.pointed", "nic.unmapped", "take.forgot"] {
        assert_eq!(killed(Deaths { giver, taker: Some(place) }, RING), Driver::Standby, "{place}");
    }
}

#[test]
fn what_is_ordered_to_be_dropped_is_counted_and_nothing_else_is_lost() {
    need_model!();
    let (folder, mut model, mut nic, mut red) = scene(Work::Echo, FRAMES, RATE);
    let mut blue = beside(&folder);
    let mut driver = red.ready(&nic, &[]);
    taken(driver.grant(&nic));
    let (mut dropped, mut longest) = (0, Duration::ZERO);
    for turn in 0..10 {
        let node = if turn % 2 == 0 { &mut blue } else { &mut red };
        let mut taker = repoint(node, &mut driver, &mut nic, Inflight::Drop);
        dropped += driver.heartbeat(heartbeat::DROPPED);
        longest = longest.max(nic.pause());
        std::mem::swap(&mut driver, &mut taker);
    }
    until_quiet(&mut model, &driver);
    drop((driver, nic));
    let (lost, off) = lost(model);
    println!(
        "{dropped} frames were dropped, {lost} lost, {off} of them by the card; the longest pause was {longest:?}"
    );
    // A busy machine can keep a driver from its first frames, and from those after a long pause.
    assert!(
        lost == dropped + off || longest > PAUSED && lost > dropped,
        "{dropped} dropped, {off} by the card, {lost} lost"
    );
}
