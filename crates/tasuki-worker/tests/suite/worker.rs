//! A worker as the daemon sees it: real processes, real messages and packets, and our model of a card with a source
//! on its wire.

use rustix::process::Signal;
use tasuki_relay::message::{ToWorker, Work, heartbeat};
use tasuki_relay::method::Method;
use tasuki_relay::wire::{Order, Report, Standing, Use};
use tasuki_testing::{Program, until};

use crate::daemon::{Nic, Node, Talk, Worker, adopt, nothing_is_lost, scene, taken};
use crate::programs::{Model, folder, need_model, numbered_in};

/// Returns the CPUs on which a worker may run.
fn cpus(worker: &Worker) -> Vec<u32> {
    let set = rustix::thread::sched_getaffinity(Some(worker.process.id())).expect("a child of ours");
    (0..1024).filter(|&cpu| set.is_set(cpu as usize)).collect()
}

fn nice(worker: &Worker) -> i32 {
    rustix::process::getpriority_process(Some(worker.process.id())).expect("a child of ours")
}

#[test]
fn a_worker_takes_a_card_from_a_bundle_and_echoes() {
    need_model!();
    let (_folder, model, nic, mut node) = scene(Work::Echo, 2000, 20_000);
    let mut worker = node.ready(&nic, &[]);
    println!("unconfined: {:?}", worker.unconfined);
    assert_eq!(taken(worker.grant(&nic)), nic.tenure().epoch);
    assert_eq!((nic.tenure().holder, nic.relays()), (Some(worker.party), 1));
    worker.until_sent(2000);
    drop((worker, nic));
    nothing_is_lost(&model.report(), 2000);
}

#[test]
fn a_card_changes_hands_under_traffic() {
    need_model!();
    let (_folder, model, nic, mut node) = scene(Work::Echo, 20_000, 20_000);
    let (mut red, mut blue) = (node.ready(&nic, &[]), node.ready(&nic, &[]));
    let granted = red.grant(&nic);
    assert!(matches!(granted, Report::Taken { .. }), "{granted:?}: {:?}", red.told);
    let mut pauses = Vec::new();
    for _ in 0..50 {
        let epoch = nic.tenure().epoch;
        let (released, took) = red.pass_to(&mut blue, &nic);
        assert_eq!(
            (released, took),
            (Report::Released { epoch }, Report::Taken { epoch: epoch + 1 }),
            "{:?}",
            blue.told
        );
        pauses.push(nic.pause());
        std::mem::swap(&mut red, &mut blue);
    }
    pauses.sort_unstable();
    println!("pauses: {:?} in the middle, {:?} at most", pauses[25], pauses[49]);
    red.until_sent(20000);
    drop((red, blue, nic));
    nothing_is_lost(&model.report(), 20000);
}

#[test]
fn only_who_drives_or_is_ready_to_runs_on_the_nodes_cpu() {
    need_model!();
    let ours = rustix::thread::sched_getaffinity(None).expect("some CPUs");
    let ours: Vec<u32> = (0..1024).filter(|&cpu| ours.is_set(cpu as usize)).collect();
    let [home, aside, ..] = ours[..] else { return println!("skipped: there is one CPU") };
    let (_folder, model, nic, mut node) = scene(Work::Echo, 2000, 20_000);
    (node.cpu, node.aside) = (Some(home), vec![aside]);
    let mut red = node.worker(&[]);
    assert_eq!(cpus(&red), [aside], "it has nothing yet");
    // As Linux does before 6.2 when the CPUs of its control group change.
    let goes_back = |worker: &Worker, from: u32, to: u32| {
        let mut set = rustix::thread::CpuSet::new();
        set.set(from as usize);
        rustix::thread::sched_setaffinity(Some(worker.process.id()), &set).expect("a child of ours");
        until("it is back", || cpus(worker) == [to]);
    };
    red.give(&nic);
    red.prepare(&nic, Use::Upgrade);
    assert_eq!(red.report(&nic), Report::Ready, "{:?}", red.told);
    assert_eq!(cpus(&red), [home], "it is ready");
    taken(red.grant(&nic));
    let mut blue = node.ready(&nic, &[]);
    let epoch = nic.tenure().epoch;
    assert_eq!(red.pass_to(&mut blue, &nic), (Report::Released { epoch }, Report::Taken { epoch: epoch + 1 }));
    until("the giver is out of the way", || cpus(&red) == [aside]);
    assert_eq!(cpus(&blue), [home]);
    goes_back(&blue, aside, home);
    // The first worker has the lease back, as after a taker that failed.
    let epoch = nic.tenure().epoch;
    assert_eq!(blue.pass_to(&mut red, &nic), (Report::Released { epoch }, Report::Taken { epoch: epoch + 1 }));
    assert_eq!(cpus(&red), [home]);
    goes_back(&red, aside, home);
    red.until_sent(2000);
    drop((red, blue, nic));
    nothing_is_lost(&model.report(), 2000);
}

#[test]
fn who_drives_and_sleeps_goes_before_programs_and_gives_way_when_it_does_not_sleep() {
    need_model!();
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: only root may go before others");
    }
    let (_folder, model, nic, mut node) = scene(Work::Echo, 50, 50);
    node.nice = -20;
    let mut red = node.worker(&[]);
    red.give(&nic);
    assert_eq!(nice(&red), 0, "it has nothing yet");
    red.prepare(&nic, Use::Upgrade);
    assert_eq!(red.report(&nic), Report::Ready, "{:?}", red.told);
    assert_eq!(nice(&red), -20, "it is ready, and sleeps");
    taken(red.grant(&nic));
    let mut blue = node.ready(&nic, &[]);
    let epoch = nic.tenure().epoch;
    assert_eq!(red.pass_to(&mut blue, &nic), (Report::Released { epoch }, Report::Taken { epoch: epoch + 1 }));
    until("the giver gives way", || nice(&red) == 0);
    until("the taker sleeps between frames", || nice(&blue) == -20);
    blue.until_sent(50);
    drop((red, blue, nic));
    nothing_is_lost(&model.report(), 50);
    // A source at full rate never sleeps.
    let folder = folder();
    let model = Model::start(folder.path(), &[]);
    let nic = Nic::open(&model.socket, &[]);
    let mut node = Node::new(folder.path(), Work::Source { rate: 10_000_000, size: 60, to: None });
    node.nice = -20;
    let mut green = node.ready(&nic, &[]);
    assert_eq!(nice(&green), -20, "it is ready, and sleeps");
    taken(green.grant(&nic));
    until("the source gives way", || nice(&green) == 0);
}

#[test]
fn a_worker_that_is_killed_is_taken_over_from_and_no_frame_is_lost() {
    need_model!();
    let (_folder, model, nic, mut node) = scene(Work::Echo, 20_000, 8000);
    let mut driver = node.ready(&nic, &[]);
    taken(driver.grant(&nic));
    for round in 0..20 {
        let mut next = node.ready(&nic, &[]);
        let before = driver.heartbeat(heartbeat::SENT);
        until("some frames", || driver.heartbeat(heartbeat::SENT) > before || driver.hears_trouble());
        assert_eq!(driver.told, [""; 0], "in round {round}");
        driver.process.kill();
        taken(next.grant(&nic));
        driver = next;
    }
    driver.until_sent(20000);
    drop((driver, nic));
    nothing_is_lost(&model.report(), 20000);
}

#[test]
fn a_worker_gives_up_what_it_does_not_need() {
    need_model!();
    let folder = folder();
    let mut node = Node::new(folder.path(), Work::Echo);
    let worker = node.worker(&[]);
    let process = &worker.process;
    assert_eq!((process.status("NoNewPrivs"), process.status("Seccomp")), ("1".to_owned(), "2".to_owned()));
    let has = |process: &Program, sets: &str| u64::from_str_radix(&process.status(sets), 16);
    for sets in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
        assert_eq!(has(process, sets), Ok(0), "{sets}");
    }
    node.nice = -1;
    let urgent = node.worker(&[]);
    for sets in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
        let nice =
            if sets == "CapInh" || sets == "CapAmb" { 0 } else { rustix::thread::CapabilitySet::SYS_NICE.bits() };
        let may = if rustix::process::geteuid().is_root() { nice } else { 0 };
        assert_eq!(has(&urgent.process, sets), Ok(may), "{sets}");
    }
    drop(urgent);
    node.nice = 0;
    if rustix::process::getuid().is_root() {
        assert_eq!(process.status("Uid"), "65534 65534 65534 65534");
        assert_eq!(
            (process.status("Gid"), process.status("Groups")),
            ("65534 65534 65534 65534".to_owned(), String::new())
        );
        let worker = node.worker(&[("TASUKI_WORKER_ID", "12345:12346".to_owned())]);
        assert_eq!(worker.process.status("Uid"), "12345 12345 12345 12345");
        assert_eq!(worker.process.status("Gid"), "12346 12346 12346 12346");
    } else {
        println!("skipped in part: only who is root gives up being it");
    }
}

#[test]
fn a_worker_outlives_its_daemon_and_the_next_one_finds_it() {
    need_model!();
    for poll in [false, true] {
        let (_folder, model, nic, mut node) = scene(Work::Echo, 20_000, 8000);
        node.poll = poll;
        let (mut red, mut blue) = (node.ready(&nic, &[]), node.ready(&nic, &[]));
        let epoch = taken(red.grant(&nic));
        for worker in [&mut red, &mut blue] {
            // The daemon dies: its sockets close, and the next daemon has the state that its keeper has.
            worker.talk = Talk::pair().0;
            worker.talk = Talk::call(&worker.path);
        }
        let before = red.heartbeat(heartbeat::SENT);
        until("frames without a daemon", || red.heartbeat(heartbeat::SENT) > before);
        adopt(&mut red, &nic);
        adopt(&mut blue, &nic);
        for (worker, standing, epoch) in [(&mut red, Standing::Holding, epoch), (&mut blue, Standing::Ready, 0)] {
            worker.order(&nic, Order::Who);
            assert_eq!(worker.report(&nic), Report::Hello { standing, epoch });
        }
        let (released, took) = red.pass_to(&mut blue, &nic);
        assert_eq!((released, took), (Report::Released { epoch }, Report::Taken { epoch: epoch + 1 }));
        blue.until_sent(20000);
        drop((red, blue, nic));
        nothing_is_lost(&model.report(), 20000);
    }
}

#[test]
fn a_sink_knows_what_it_has_received_though_its_workers_are_killed() {
    need_model!();
    let (_folder, model, nic, mut node) = scene(Work::Sink, 12_000, 8000);
    let mut driver = node.ready(&nic, &[]);
    taken(driver.grant(&nic));
    for _ in 0..15 {
        let mut next = node.ready(&nic, &[]);
        driver.process.kill();
        taken(next.grant(&nic));
        driver = next;
    }
    let seen = || node.booked(0);
    until("all frames", || seen() >= 12000);
    assert_eq!((seen(), driver.heartbeat(heartbeat::MISSING), driver.heartbeat(heartbeat::LATE)), (12000, 0, 0));
    drop((driver, nic));
    model.report();
}

#[test]
fn a_source_sends_each_number_once_though_its_workers_are_killed() {
    need_model!();
    let folder = folder();
    let capture = folder.path().join("wire.pcap");
    let mut model = Model::start(folder.path(), &["--pcap", capture.to_str().expect("a path")]);
    let nic = Nic::open(&model.socket, &[]);
    let mut node = Node::new(folder.path(), Work::Source { rate: 8000, size: 60, to: None });
    let mut driver = node.ready(&nic, &[]);
    taken(driver.grant(&nic));
    for _ in 0..15 {
        let mut next = node.ready(&nic, &[]);
        let before = driver.heartbeat(heartbeat::SENT);
        until("some frames", || driver.heartbeat(heartbeat::SENT) > before);
        driver.process.kill();
        taken(next.grant(&nic));
        driver = next;
    }
    // Frames given to the card are sent before it is parked.
    driver.message(&ToWorker::End, &[]);
    assert_eq!(driver.process.end(), Some(0), "{:?}", driver.told);
    drop((driver, nic));
    model.program.signal(Signal::TERM);
    model.report();
    let due = numbered_in(&capture);
    assert!(due > 100, "only {due} frames were sent");
}

#[test]
fn a_worker_that_drives_and_polls_asks_the_kernel_for_nothing() {
    need_model!();
    let (folder, model, nic, mut node) = scene(Work::Echo, 100_000_000, 8000);
    node.poll = true;
    let mut worker = node.ready(&nic, &[]);
    taken(worker.grant(&nic));
    // By then the worker knows that its link is up.
    until("a while", || worker.heartbeat(heartbeat::LOOKS) > 200_000 && worker.heartbeat(heartbeat::SENT) > 1000);
    let calls = folder.path().join("calls");
    let id = worker.process.id().as_raw_nonzero().to_string();
    let mut strace = std::process::Command::new("strace");
    strace.args(["-qq", "-o"]).arg(&calls).args(["-p", &id]).stderr(std::process::Stdio::null());
    let Ok(child) = strace.spawn() else {
        return println!("skipped: needs strace");
    };
    let mut strace = Program(child);
    until("strace", || worker.process.status("TracerPid") != "0" || !strace.is_running());
    if !strace.is_running() {
        return println!("skipped: strace may not attach to a process here");
    }
    let (looks, sent) = (worker.heartbeat(heartbeat::LOOKS), worker.heartbeat(heartbeat::SENT));
    until("frames", || {
        worker.heartbeat(heartbeat::SENT) > sent + 4000 && worker.heartbeat(heartbeat::LOOKS) > looks + 200_000
    });
    let looked = worker.heartbeat(heartbeat::LOOKS) - looks;
    strace.signal(Signal::INT);
    strace.end();
    let calls = std::fs::read_to_string(&calls).expect("what strace wrote");
    let count = calls.lines().filter(|line| !line.starts_with("---")).count() as u64;
    println!("{count} system calls in {looked} looks");
    assert!(count <= 4 * (looked / 65_536 + 2), "{calls}");
    drop((worker, nic, model));
}

#[test]
fn a_card_is_started_anew_by_its_next_worker() {
    need_model!();
    let (_folder, model, nic, mut node) = scene(Work::Echo, 100_000_000, 2000);
    let (mut red, mut blue) = (node.ready(&nic, &[]), node.worker(&[]));
    taken(red.grant(&nic));
    blue.give(&nic);
    blue.prepare_by(&nic, Use::Handover, Method::Cold);
    assert_eq!(blue.report(&nic), Report::Ready, "{:?}", blue.told);
    let epoch = nic.tenure().epoch;
    assert_eq!(
        red.pass_to(&mut blue, &nic),
        (Report::Released { epoch }, Report::Taken { epoch: epoch + 1 }),
        "{:?}",
        blue.told
    );
    until("frames of the new owner", || blue.heartbeat(heartbeat::SENT) > 100);
    assert_eq!(blue.told, [""; 0]);
    drop((red, blue, nic, model));
}

#[test]
fn a_taker_on_another_cpu_looks_without_a_rest_and_takes() {
    need_model!();
    if std::thread::available_parallelism().map_or(1, usize::from) < 2 {
        return println!("skipped: needs two CPUs");
    }
    let (_folder, model, nic, mut node) = scene(Work::Echo, 6000, 8000);
    node.cpu = Some(0);
    let mut red = node.ready(&nic, &[]);
    node.cpu = Some(1);
    let mut blue = node.ready(&nic, &[]);
    taken(red.grant(&nic));
    for _ in 0..20 {
        let epoch = nic.tenure().epoch;
        let said = red.pass_to(&mut blue, &nic);
        assert_eq!(said, (Report::Released { epoch }, Report::Taken { epoch: epoch + 1 }), "{:?}", blue.told);
        std::mem::swap(&mut red, &mut blue);
    }
    red.until_sent(6000);
    drop((red, blue, nic));
    nothing_is_lost(&model.report(), 6000);
}
