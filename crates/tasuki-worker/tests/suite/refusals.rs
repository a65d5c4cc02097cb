//! Refusals of a worker and their sentences: incomplete device bundles, damaged driver states, cards that are gone.

use std::os::fd::{AsRawFd, OwnedFd};
use std::process::{Command, Stdio};

use rustix::fs::MemfdFlags;
use tasuki_relay::driver_state::{DriverState, HEAD};
use tasuki_relay::message::{Begin, Endpoint, PROTOCOL_VERSION, ToDaemon, ToWorker, Work, heartbeat};
use tasuki_relay::wire::{Order, Reason, Report, Standing, Use};
use tasuki_relay::{After, Tenure};
use tasuki_testing::until;

use crate::daemon::{Nic, Talk, Worker, nothing_is_lost, scene, taken, unfit};
use crate::programs::need_model;

fn memfd(bytes: &[u8]) -> OwnedFd {
    let memory = rustix::fs::memfd_create("driver_state", MemfdFlags::CLOEXEC).expect("memory");
    assert_eq!(rustix::io::pwrite(&memory, bytes, 0), Ok(bytes.len()));
    memory
}

fn copy(nic: &Nic, bundle: impl FnOnce(&mut tasuki_relay::message::DeviceBundle, &mut Vec<OwnedFd>)) -> Nic {
    let mut changed = nic.bundle.clone();
    let mut fds = nic.copies();
    let lease_page = fds.remove(0);
    bundle(&mut changed, &mut fds);
    Nic::of(0, changed, fds, tasuki_shm::region::Region::adopt(lease_page).expect("the lease page"))
}

#[test]
fn a_bundle_that_is_not_whole_is_refused_before_anything_is_touched() {
    need_model!();
    let (_folder, model, nic, mut node) = scene(Work::Echo, 500, 5000);
    type Change = fn(&mut tasuki_relay::message::DeviceBundle, &mut Vec<OwnedFd>);
    let changes: [(Change, &str); 10] = [
        (|_, fds| fds.truncate(fds.len() - 1), "did not get descriptor"),
        (|_, fds| fds.clear(), "did not get descriptor 6"),
        (|_, fds| drop(fds.remove(0)), "descriptor 6 of the device is of the wrong kind or size"),
        (|_, fds| fds.swap(0, 1), "descriptor 6 of the device is of the wrong kind or size"),
        (|_, fds| fds.swap(1, 2), "descriptor 2 of the device is of the wrong kind or size"),
        (|_, fds| fds.push(fds[0].try_clone().unwrap()), "descriptor"),
        (|_, fds| *fds.last_mut().unwrap() = memfd(&[0; 4096]), "descriptor 5 of the device"),
        (|bundle, _| bundle.text = bundle.text.replace("e1000e", "ne2000"), "descriptor 2 of the device"),
        (|bundle, _| bundle.text = "{".to_owned(), "descriptor 2 of the device"),
        (|bundle, _| bundle.version = 77, "does not read driver states of kind 0x808610d3 version 77"),
    ];
    for (index, (change, why)) in changes.into_iter().enumerate() {
        let broken = copy(&nic, change);
        let mut worker = node.worker(&[]);
        worker.give(&broken);
        worker.prepare(&broken, Use::Upgrade);
        let reason = unfit(worker.report(&broken)).to_string();
        assert!(reason.contains(why), "change {index}: {why:?} is not in {reason}: {:?}", worker.told);
        assert_eq!(worker.told.len(), 1, "one sentence: {:?}", worker.told);
        assert!(worker.told[0].contains("; "), "what to do is said: {:?}", worker.told);
    }
    // The card can still be driven.
    let mut worker = node.ready(&nic, &[]);
    taken(worker.grant(&nic));
    worker.until_sent(500);
    drop((worker, nic));
    nothing_is_lost(&model.report(), 500);
}

/// A relay comes to nothing while its taker waits, and the next one does not. `first` is done before the taker waits.
fn stands_down_and_takes_the_next_time(first: impl FnOnce(&Worker, &Nic)) {
    let (_folder, model, nic, mut node) = scene(Work::Echo, 2000, 8000);
    let (mut red, mut blue) = (node.ready(&nic, &[]), node.ready(&nic, &[]));
    let epoch = taken(red.grant(&nic));
    first(&blue, &nic);
    blue.order(&nic, Order::Take { epoch, after: After::Passed, wrote: epoch });
    // It wakes for this, and not because the giver has rung.
    blue.message(&ToWorker::DriverState { nic: 0 }, &[memfd(b"no driver state")]);
    until("it sleeps", || blue.heartbeat(heartbeat::ASLEEP) != 0);
    blue.order(&nic, Order::StandDown);
    assert!(matches!(blue.report(&nic), Report::Lost { .. }), "{:?}", blue.told);
    assert_eq!(red.pass_to(&mut blue, &nic), (Report::Released { epoch }, Report::Taken { epoch: epoch + 1 }));
    blue.until_sent(2000);
    drop((red, blue, nic));
    nothing_is_lost(&model.report(), 2000);
}

#[test]
fn what_was_stored_for_a_relay_that_came_to_nothing_is_not_read_in_the_next() {
    need_model!();
    stands_down_and_takes_the_next_time(|blue, nic| blue.plan(nic, Some(nic.bundle.version)));
}

/// The eventfd by which a giver wakes its taker belonged to earlier owners, too.
#[test]
fn a_taker_hears_also_if_an_earlier_owner_has_set_its_eventfds_to_blocking() {
    need_model!();
    stands_down_and_takes_the_next_time(|_, nic| {
        for fd in &nic.fds {
            let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).expect("a descriptor of ours");
            if link.to_string_lossy().contains("eventfd") {
                rustix::io::ioctl_fionbio(fd, false).expect("an eventfd");
            }
        }
    });
}

/// The giver stores its driver state, which is changed before it reaches the successor.
fn stored_and_changed(change: impl Fn(&mut Vec<u8>), why: fn(Reason) -> bool) {
    let (_folder, model, nic, mut node) = scene(Work::Echo, 4000, 8000);
    let (mut red, mut blue) = (node.ready(&nic, &[]), node.ready(&nic, &[]));
    taken(red.grant(&nic));
    let (epoch, bytes) = store(&mut red, &nic, u32::from(cfg!(feature = "next-driver-state")));
    let mut changed = bytes;
    change(&mut changed);
    blue.message(&ToWorker::DriverState { nic: 0 }, &[memfd(&changed)]);
    blue.order(&nic, Order::Take { epoch, after: After::Passed, wrote: epoch });
    match blue.report(&nic) {
        Report::Failed { reason, .. } if why(reason) => {}
        other => panic!("{other:?}: {:?}", blue.told),
    }
    assert_eq!(blue.told.len(), 1, "{:?}", blue.told);
    // Nothing was touched: the giver goes on.
    taken(red.grant(&nic));
    red.until_sent(4000);
    drop((red, blue, nic));
    nothing_is_lost(&model.report(), 4000);
}

/// Has the giver release by the store, in a version so many after the bundle's. Returns the epoch, and the bytes of the
/// driver state.
fn store(giver: &mut Worker, nic: &Nic, later: u32) -> (u32, Vec<u8>) {
    let epoch = nic.tenure().epoch;
    giver.plan(nic, Some(nic.bundle.version + later));
    giver.order(nic, Order::Release { epoch });
    let (message, fds) = giver.hear_message();
    assert!(matches!(message, ToDaemon::DriverState { nic: 0 }), "{message:?}");
    assert_eq!(giver.report(nic), Report::Released { epoch });
    let mut bytes = vec![0; 1 << 20];
    let len = rustix::io::pread(&fds[0], &mut bytes, 0).expect("memory");
    bytes.truncate(len);
    (epoch, bytes)
}

#[test]
fn a_damaged_driver_state_is_refused_and_the_giver_goes_on() {
    need_model!();
    stored_and_changed(|bytes| bytes[HEAD + 100] ^= 4, |reason| matches!(reason, Reason::DamagedDriverState { .. }));
    stored_and_changed(|bytes| bytes.truncate(HEAD + 5), |reason| matches!(reason, Reason::WrongDriverState { .. }));
    stored_and_changed(Vec::clear, |reason| matches!(reason, Reason::WrongDriverState { .. }));
}

#[test]
fn a_driver_state_of_an_unknown_version_or_another_epoch_is_refused_and_the_giver_goes_on() {
    need_model!();
    let written_as = |change: fn(&mut DriverState<'_>)| {
        move |bytes: &mut Vec<u8>| {
            let old = bytes.clone();
            let mut driver_state = DriverState::read(&old).expect("a driver state");
            change(&mut driver_state);
            driver_state.write(bytes).expect("room");
        }
    };
    stored_and_changed(written_as(|driver_state| driver_state.version += 7), |reason| {
        matches!(reason, Reason::OtherDriverState { .. })
    });
    stored_and_changed(written_as(|driver_state| driver_state.epoch += 1), |reason| {
        matches!(reason, Reason::WrongDriverState { .. })
    });
}

#[test]
fn an_upgrade_goes_by_the_store() {
    need_model!();
    let (_folder, model, nic, mut node) = scene(Work::Echo, 8000, 8000);
    let (mut red, mut blue) = (node.ready(&nic, &[]), node.ready(&nic, &[]));
    taken(red.grant(&nic));
    for _ in 0..10 {
        let epoch = nic.tenure().epoch;
        blue.plan(&nic, Some(nic.bundle.version));
        blue.order(&nic, Order::Take { epoch, after: After::Passed, wrote: epoch });
        let (_, bytes) = store(&mut red, &nic, u32::from(cfg!(feature = "next-driver-state")));
        // The bell has rung and the taker has had turns since. It still waits for the driver state, although the
        // lease word is free.
        for _ in 0..3 {
            blue.order(&nic, Order::Who);
            let said = blue.report(&nic);
            assert!(matches!(said, Report::Hello { standing: Standing::Waiting, .. }), "{said:?}: {:?}", blue.told);
        }
        assert_eq!(nic.tenure(), Tenure { holder: None, epoch });
        blue.message(&ToWorker::DriverState { nic: 0 }, &[memfd(&bytes)]);
        assert_eq!(blue.report(&nic), Report::Taken { epoch: epoch + 1 }, "{:?}", blue.told);
        std::mem::swap(&mut red, &mut blue);
    }
    red.until_sent(8000);
    drop((red, blue, nic));
    nothing_is_lost(&model.report(), 8000);
}

#[test]
fn a_card_that_is_gone_is_said_to_be_once_and_nobody_takes_it() {
    need_model!();
    for poll in [false, true] {
        let (_folder, mut model, nic, mut node) = scene(Work::Echo, 100_000_000, 8000);
        node.poll = poll;
        let (mut red, mut blue) = (node.ready(&nic, &[]), node.ready(&nic, &[]));
        taken(red.grant(&nic));
        until("some frames", || red.heartbeat(heartbeat::SENT) > 100);
        model.program.kill();
        until("a sentence", || red.hears_trouble());
        assert!(red.told[0].contains("the card is gone from its bus"), "{:?}", red.told);
        let epoch = nic.tenure().epoch;
        red.order(&nic, Order::Release { epoch });
        assert_eq!(red.report(&nic), Report::Kept { epoch, reason: Reason::CardGone });
        let mut late = node.worker(&[]);
        late.give(&nic);
        late.prepare(&nic, Use::Upgrade);
        assert_eq!(unfit(late.report(&nic)), Reason::CardGone);
        red.process.kill();
        let failed = blue.grant(&nic);
        assert!(matches!(failed, Report::Failed { reason: Reason::CardGone, .. }), "{failed:?}");
        assert_eq!((red.told.len(), blue.told.len(), late.told.len()), (1, 1, 1), "{:?}", (red.told, blue.told));
        assert!(late.process.is_running() && blue.process.is_running());
    }
}

/// Two real workers: of the last release (`TASUKI_RELEASED` is the folder with its programs), and ours as the next may be,
/// with the feature `next-driver-state`.
#[test]
fn a_worker_of_the_next_version_reads_what_this_one_stored_and_writes_what_it_reads() {
    need_model!();
    let released = std::env::var_os("TASUKI_RELEASED").map(std::path::PathBuf::from);
    let Some(this) = released.filter(|_| cfg!(feature = "next-driver-state")).map(|it| it.join("tasuki-worker")) else {
        return println!(
            "skipped: needs TASUKI_RELEASED, as cargo xtask test builds it, and the feature next-driver-state"
        );
    };
    let (_folder, model, nic, mut node) = scene(Work::Echo, 8000, 8000);
    let next = node.program.clone();
    node.program = this;
    let (mut old, mut back) = (node.ready(&nic, &[]), node.ready(&nic, &[]));
    taken(old.grant(&nic));
    node.program = next;
    let (mut new, mut newer) = (node.ready(&nic, &[]), node.ready(&nic, &[]));
    // A driver state of this version, read by the next.
    let (epoch, bytes) = store(&mut old, &nic, 0);
    assert_eq!(DriverState::read(&bytes).map(|driver_state| driver_state.version), Ok(nic.bundle.version));
    new.message(&ToWorker::DriverState { nic: 0 }, &[memfd(&bytes)]);
    new.order(&nic, Order::Take { epoch, after: After::Passed, wrote: epoch });
    taken(new.report(&nic));
    // A driver state of the next version, read by the next.
    let (epoch, bytes) = store(&mut new, &nic, 1);
    assert_eq!(DriverState::read(&bytes).map(|driver_state| driver_state.version), Ok(nic.bundle.version + 1));
    newer.message(&ToWorker::DriverState { nic: 0 }, &[memfd(&bytes)]);
    newer.order(&nic, Order::Take { epoch, after: After::Passed, wrote: epoch });
    taken(newer.report(&nic));
    // A driver state of the next version, not read by this one: the giver goes on.
    let (epoch, bytes) = store(&mut newer, &nic, 1);
    old.message(&ToWorker::DriverState { nic: 0 }, &[memfd(&bytes)]);
    old.order(&nic, Order::Take { epoch, after: After::Passed, wrote: epoch });
    let failed = old.report(&nic);
    assert!(matches!(failed, Report::Failed { reason: Reason::OtherDriverState { .. }, .. }), "{failed:?}");
    taken(newer.grant(&nic));
    // A driver state of this version, written by the next: the way back.
    let (epoch, bytes) = store(&mut newer, &nic, 0);
    back.message(&ToWorker::DriverState { nic: 0 }, &[memfd(&bytes)]);
    back.order(&nic, Order::Take { epoch, after: After::Passed, wrote: epoch });
    taken(back.report(&nic));
    back.until_sent(8000);
    drop((old, new, newer, back, nic));
    nothing_is_lost(&model.report(), 8000);
}

/// Starts a worker of a node with a TAP that is given `tap` in the TAP's place. Returns the sentence with which it
/// ends.
fn refused_tap(tap: Option<OwnedFd>) -> String {
    let (talk, its) = Talk::pair();
    let begin = Begin {
        protocol_version: PROTOCOL_VERSION,
        party: 1,
        node: "node".to_owned(),
        work: Work::Tap,
        options: String::new(),
        cpu: None,
        aside: Vec::new(),
        nice: 0,
        poll: false,
        memlock: 0,
        files: false,
        threads: false,
        endpoint: Some(Endpoint {
            kind: "tap".to_owned(),
            label: "room:nic0".to_owned(),
            text: String::new(),
            limits: Default::default(),
            latency_us: None,
        }),
    };
    let fds: Vec<OwnedFd> = [memfd(&[0; 4096]), memfd(&[0; 65536]), memfd(&[])].into_iter().chain(tap).collect();
    talk.send(&serde_json::to_vec(&ToWorker::Begin(begin)).expect("text"), &fds);
    let mut command = Command::new(env!("CARGO_BIN_EXE_tasuki-worker"));
    let output = command.arg("worker").stdin(Stdio::from(its)).output().expect("a program that was built");
    assert_eq!(output.status.code(), Some(1));
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn what_is_no_tap_is_refused_before_anything_is_done_with_it() {
    let said = refused_tap(None);
    assert!(said.contains("sent 3 descriptors") && said.contains("4 belong to it; rebuild"), "{said}");
    let said = refused_tap(Some(memfd(&[0; 64])));
    assert!(said.contains("sent something else as the node's TAP; rebuild"), "{said}");
}
