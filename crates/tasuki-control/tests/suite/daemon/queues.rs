//! A namespace whose interface has two queues: one of its node, and one of a node beside it. Needs root.

use std::cell::RefCell;
use std::net::UdpSocket;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::real::released;
use super::rig::{pid, signal, until};
use super::rooms::{BURST, Exchange, Room, Tally, deaths};
use super::storm::{beside, need_storm};
use super::vnis::{DESK, SHOP, World, of_file};

/// Number of flows that begin. Of 128 times, all go by one queue once; then more begin.
const FLOWS: usize = 8;

/// The entry of a queue's node in the file.
const QUEUE: &str = "[[node]]\nname = \"shop-1\"\nvni = \"lan\"\nwork = { queue = { of = \"shop\" } }\n";

/// Makes both namespaces, and starts the flows between them. Both queues carry some.
fn begin(world: &World, queues: u32) -> Vec<Exchange> {
    world.add("shop", &world.shop, SHOP, &["--no-shortcut", "--queues", &queues.to_string()]);
    world.add("desk", &world.desk, DESK, &["--no-shortcut"]);
    world.rig.ask(&["node", "add", "shop-1", "--queue-of", "shop"]);
    world.await_pairs();
    world.rig.await_pair("shop-1");
    spread(world, (0..FLOWS).map(|_| world.exchange()).collect())
}

/// Begins flows until the queues of both nodes carry some, both ways.
fn spread(world: &World, mut flows: Vec<Exchange>) -> Vec<Exchange> {
    while {
        let before = counts(world);
        all_go_on(world, &flows, 100);
        !all_more(before, counts(world))
    } {
        assert!(flows.len() < 8 * FLOWS, "a queue carries nothing\n{}", world.rig.log());
        flows.push(world.exchange());
    }
    flows
}

fn all_go_on(world: &World, flows: &[Exchange], count: u64) {
    flows.iter().for_each(|flow| flow.goes_on(&world.rig, count));
}

/// Numbers of frames that each queue has given and taken.
fn counts(world: &World) -> [u64; 4] {
    [("shop", "given"), ("shop", "taken"), ("shop-1", "given"), ("shop-1", "taken")]
        .map(|(node, way)| world.count(node, way))
}

fn all_more(before: [u64; 4], now: [u64; 4]) -> bool {
    before.iter().zip(now).all(|(before, now)| now > *before)
}

fn both_carry(world: &World) {
    let before = counts(world);
    until(&world.rig, "both queues carry frames, both ways", || all_more(before, counts(world)));
}

fn sum(flows: Vec<Exchange>) -> Tally {
    // Each waits for what may still come.
    let ends: Vec<_> = flows.into_iter().map(|flow| std::thread::spawn(|| flow.end())).collect();
    ends.into_iter().map(|end| end.join().expect("a tally")).fold(Tally::default(), |sum, it| Tally {
        sent: sum.sent + it.sent,
        back: sum.back + it.back,
        twice: sum.twice + it.twice,
        twice_there: sum.twice_there + it.twice_there,
    })
}

/// Ends the flows. Each datagram came back, and none came twice.
fn nothing_is_lost(world: &World, flows: Vec<Exchange>) {
    let tally = sum(flows);
    println!("{tally:?}");
    assert_eq!((tally.back, tally.twice + tally.twice_there), (tally.sent, 0), "{tally:?}\n{}", world.rig.log());
}

/// Names a program of the test's own in the configuration, to be applied. Returns what chooses whether it is the usual
/// worker, as at first, or one that ends at once.
fn switch(world: &World) -> impl Fn(bool) + use<> {
    let (program, aside) = (world.rig.path("worker"), world.rig.path("aside"));
    let stock = beside("tasuki-worker").expect("looked for before");
    world.rig.configure(|text| text.replace(&format!("{stock:?}"), &format!("{program:?}")));
    let choose = move |begins| {
        let target = if begins { &*stock } else { Path::new("/bin/false") };
        std::os::unix::fs::symlink(target, &aside).expect("a link");
        std::fs::rename(&aside, &program).expect("a name");
    };
    choose(true);
    choose
}

#[test]
fn flows_over_two_queues_lose_nothing_while_the_workers_of_both_and_the_daemon_are_replaced() {
    let Some(mut world) = World::new() else { return };
    let flows = begin(&world, 2);
    for node in ["shop-1", "shop", "desk"] {
        world.rig.ask(&["worker", "upgrade", node]);
        world.rig.await_pair(node);
        all_go_on(&world, &flows, 50);
    }
    const KILLS: u64 = 4;
    for node in ["shop-1", "shop"].into_iter().cycle().take(4) {
        world.rig.kill_driver(node);
        all_go_on(&world, &flows, 50);
    }
    let deaths = deaths(&world.rig);
    world.rig.kill_daemon();
    all_go_on(&world, &flows, 50);
    world.rig.start();
    world.await_pairs();
    world.rig.await_pair("shop-1");
    all_go_on(&world, &flows, 50);
    both_carry(&world);
    let tally = sum(flows);
    println!("{tally:?} with {deaths} deaths");
    assert_eq!(deaths, KILLS);
    assert_eq!(tally.back, tally.sent, "{tally:?}\n{}", world.rig.log());
    assert!(tally.twice + tally.twice_there <= 2 * BURST * KILLS, "{tally:?}");
    world.end();
}

#[test]
fn a_queue_comes_and_goes_while_flows_go_on_and_its_interface_stays_as_long() {
    let Some(world) = World::new() else { return };
    let flows = begin(&world, 2);
    let refused = world.rig.refused(&["node", "remove", "shop"]);
    assert!(refused.contains("serves a queue") && refused.contains("tasuki node remove shop-1"), "{refused}");
    let add = ["node", "add", "shop-2", "--queue-of", "shop"];
    let third = world.rig.refused(&add);
    assert!(third.contains("raise its queues"), "{third}");
    for odd in [["--queues", "3"], ["--work", "echo"], ["--program", "/bin/true"]] {
        let said = world.rig.tasuki(&[&add[..], &odd].concat());
        assert!(String::from_utf8_lossy(&said.stderr).contains("cannot be used with"), "{said:?}");
    }
    // A file would make the interface anew, and does not know of its queue.
    let before = std::fs::read_to_string(world.rig.path("tasuki.toml")).expect("a file");
    let tap = format!("work.tap = {{ netns = {:?}, name = \"lan\", mtu = 1400, queues = 2 }}", world.shop.path());
    world.rig.configure(|text| format!("{text}[[node]]\nname = \"shop\"\nvni = \"lan\"\n{tap}\n"));
    for verb in ["plan", "apply"] {
        let refused = world.rig.refused(&[verb]);
        assert!(refused.contains("would be made anew") && refused.contains("tasuki node remove shop-1"), "{refused}");
    }
    world.rig.configure(|_| before.clone());
    for _ in 0..3 {
        world.rig.ask(&["node", "remove", "shop-1"]);
        all_go_on(&world, &flows, 50);
        world.rig.ask(&["node", "add", "shop-1", "--queue-of", "shop"]);
        world.rig.await_pair("shop-1");
        all_go_on(&world, &flows, 50);
    }
    both_carry(&world);
    nothing_is_lost(&world, flows);
    world.rig.ask(&["node", "remove", "shop-1"]);
    // The interface goes once its workers have ended.
    let (stopped, stands_by) = world.rig.await_pair("shop");
    [&stopped, &stands_by].into_iter().for_each(|worker| signal(pid(worker), Signal::STOP));
    std::thread::scope(|scope| {
        let removal = scope.spawn(|| world.rig.ask(&["node", "remove", "shop"]));
        until(&world.rig, "its removal has begun", || world.rig.worker("shop", "leaves").is_some());
        let refused = world.rig.refused(&["node", "add", "shop-1", "--queue-of", "shop"]);
        assert!(refused.contains("node shop is being removed"), "{refused}");
        [&stopped, &stands_by].into_iter().for_each(|worker| signal(pid(worker), Signal::CONT));
        removal.join().expect("it is gone");
    });
    world.end();
}

/// The kernel moves the last queue into the place of one that goes, and all flows go by the first one meanwhile.
#[test]
fn of_three_queues_the_middle_one_comes_and_goes_and_a_daemon_dies_meanwhile() {
    need_storm!();
    let Some(mut world) = World::new() else { return };
    let add = |world: &World, name| {
        world.rig.ask(&["node", "add", name, "--queue-of", "shop"]);
        world.rig.await_pair(name);
    };
    world.add("shop", &world.shop, SHOP, &["--no-shortcut", "--queues", "3"]);
    world.add("desk", &world.desk, DESK, &["--no-shortcut"]);
    world.await_pairs();
    add(&world, "shop-2");
    add(&world, "shop-1");
    world.rig.kill_daemon();
    world.rig.start_to_die(Some("daemon.hidden:2".to_owned()));
    until(&world.rig, "tasukid serves", || world.rig.tasuki(&["status"]).status.success());
    ["shop", "shop-1", "shop-2", "desk"].into_iter().for_each(|node| _ = world.rig.await_pair(node));
    // As many as a ring has room for, when all go by the first queue.
    let flows: Vec<_> = (0..12).map(|_| world.exchange()).collect();
    all_go_on(&world, &flows, 50);
    world.rig.ask(&["node", "remove", "shop-2"]);
    all_go_on(&world, &flows, 50);
    both_carry(&world);
    // The other nodes give the queue nothing more, and it is not yet empty.
    assert!(!world.rig.tasuki(&["node", "remove", "shop-1"]).status.success());
    world.rig.daemon_ends();
    all_go_on(&world, &flows, 50);
    world.rig.start();
    world.await_pairs();
    world.rig.await_pair("shop-1");
    all_go_on(&world, &flows, 50);
    both_carry(&world);
    nothing_is_lost(&world, flows);
    world.end();
}

/// A queue that nobody drives would swallow its flows, if the kernel and the other nodes still gave it some.
#[test]
fn flows_of_a_queue_that_gets_no_worker_go_by_the_others_until_it_has_one() {
    let Some(mut world) = World::of_scripts() else { return };
    let workers_begin = switch(&world);
    world.rig.ask(&["apply"]);
    let flows = begin(&world, 2);
    world.rig.ask(&["node", "remove", "shop-1"]);
    workers_begin(false);
    world.rig.ask(&["node", "add", "shop-1", "--queue-of", "shop"]);
    world.rig.await_event("node shop-1: no worker drives its queue");
    all_go_on(&world, &flows, 50);
    // The next daemon finds it as it is.
    world.rig.kill_daemon();
    world.rig.start();
    world.await_pairs();
    all_go_on(&world, &flows, 50);
    workers_begin(true);
    world.rig.ask(&["worker", "upgrade", "shop-1"]);
    world.rig.await_event("node shop-1: its flows go by it again");
    all_go_on(&world, &flows, 50);
    both_carry(&world);
    nothing_is_lost(&world, flows);
    world.end();
}

/// What is for all, as the question for its address, would go to the node that nobody drives; and so would some flows.
#[test]
fn an_interface_whose_own_node_gets_no_worker_is_found_and_reached_by_its_other_queue() {
    let Some(mut world) = World::of_scripts() else { return };
    let workers_begin = switch(&world);
    world.rig.ask(&["apply"]);
    let flows = begin(&world, 2);
    nothing_is_lost(&world, flows);
    let (driver, stands_by) = world.rig.await_pair("shop");
    workers_begin(false);
    [&stands_by, &driver].into_iter().for_each(|worker| world.rig.kill(worker));
    world.rig.await_event("node shop: no worker drives its queue");
    let forgets = |room: &Room| {
        room.within(|| Command::new("ip").args(["neigh", "flush", "dev", "lan"]).status().expect("ip"));
    };
    [&world.shop, &world.desk].into_iter().for_each(forgets);
    let flows: Vec<_> = (0..FLOWS).map(|_| world.exchange()).collect();
    all_go_on(&world, &flows, 50);
    // The next daemon finds it as it is.
    world.rig.kill_daemon();
    world.rig.start();
    ["shop-1", "desk"].into_iter().for_each(|node| _ = world.rig.await_pair(node));
    all_go_on(&world, &flows, 50);
    workers_begin(true);
    world.rig.ask(&["worker", "upgrade", "shop"]);
    world.rig.await_event("node shop: its flows go by it again");
    all_go_on(&world, &flows, 50);
    let flows = spread(&world, flows);
    nothing_is_lost(&world, flows);
    world.end();
}

/// Its next worker has to pass on what waits in the queue, before that goes.
#[test]
fn what_is_in_a_queue_that_goes_is_passed_on_though_its_worker_is_dead_or_hangs() {
    const FRAMES: u64 = 128;
    let Some(world) = World::of_scripts() else { return };
    let stock = beside("tasuki-worker").expect("looked for before");
    // Workers begin once this file is gone.
    let closed = world.rig.path("closed");
    let gate = format!("while [ -e {} ]; do sleep 0.01; done\nexec {} \"$@\"", closed.display(), stock.display());
    let program = world.rig.path("gate");
    tasuki_testing::script(&program, &gate);
    world.rig.configure(|text| text.replace(&format!("{stock:?}"), &format!("{program:?}")));
    world.describe(", shortcut = false, queues = 2");
    for (generation, hangs) in [(3, false), (5, true)] {
        world.rig.configure(|text| text + QUEUE);
        world.rig.ask(&["apply"]);
        world.await_pairs();
        let (driver, stands_by) = world.rig.await_pair("shop-1");
        let programs: Vec<_> =
            world.shop.within(|| (0..32).map(|_| UdpSocket::bind((SHOP, 0)).expect("a port")).collect());
        let desk = world.desk.within(|| UdpSocket::bind((DESK, 7)).expect("a port"));
        desk.set_nonblocking(true).expect("a socket");
        let taken = world.count("shop-1", "taken");
        until(&world.rig, "the queue carries frames", || {
            programs.iter().for_each(|program| drop(program.send_to(b"anybody?", (DESK, 9))));
            world.count("shop-1", "taken") > taken
        });
        if hangs {
            signal(pid(&driver), Signal::STOP);
        } else {
            std::fs::write(&closed, "").expect("a file");
            [&stands_by, &driver].into_iter().for_each(|worker| world.rig.kill(worker));
        }
        // Those of half of the programs wait in the queue.
        for (number, program) in (0..FRAMES).zip(programs.iter().cycle()) {
            program.send_to(&number.to_le_bytes(), (DESK, 7)).expect("room");
        }
        world.rig.configure(|text| text.replace(QUEUE, ""));
        std::thread::scope(|scope| {
            let removal = scope.spawn(|| world.rig.ask(&["apply"]));
            world.rig.await_event(&format!("configuration {generation}, "));
            let _ = std::fs::remove_file(&closed);
            removal.join().expect("it is gone");
        });
        let came = RefCell::new(Vec::new());
        until(&world.rig, "all come", || {
            let mut bytes = [0; 8];
            while desk.recv(&mut bytes).is_ok() {
                came.borrow_mut().push(u64::from_le_bytes(bytes));
            }
            came.borrow().len() as u64 >= FRAMES
        });
    }
    world.end();
}

/// How often descriptors are counted while tasukid may have some for a moment.
const COUNTS_MAX: usize = 10;

/// All flows would go by the first queue for good, if they still did when the new one is gone.
#[test]
fn flows_go_by_all_queues_after_one_more_could_not_be_added() {
    let Some(world) = World::new() else { return };
    let flows = begin(&world, 3);
    let mut refused = 0;
    for _ in 0..COUNTS_MAX {
        // It has too few descriptors for each step of the work, one after the other.
        for more in 2.. {
            let few = world.rig.leave_descriptors(more);
            let said = world.rig.tasuki(&["node", "add", "shop-2", "--queue-of", "shop"]);
            drop(few);
            if said.status.success() {
                break;
            }
            refused += 1;
            both_carry(&world);
        }
        if refused > 0 {
            break;
        }
        // It was about to close some, of processes that it made meanwhile.
        world.rig.ask(&["node", "remove", "shop-2"]);
    }
    assert!(refused > 0, "it had enough");
    world.rig.await_pair("shop-2");
    // Of eight flows over three queues, a queue has none once in 13 times.
    let flows = spread(&world, flows);
    nothing_is_lost(&world, flows);
    world.end();
}

/// Datagrams of many flows from a room to another, more than may go, until it is dropped.
pub struct Flood {
    came: Arc<AtomicU64>,
    over: Arc<AtomicBool>,
}

impl Flood {
    pub fn begin([(room, address), (other, to)]: [(&Room, &str); 2]) -> Self {
        let to = other.within(|| UdpSocket::bind((to, 0)).expect("a port"));
        let socket = || {
            let socket = UdpSocket::bind((address, 0)).expect("a port");
            socket.connect(to.local_addr().expect("an address")).expect("a way");
            socket
        };
        let from = room.within(|| (0..32).map(|_| socket()).collect::<Vec<_>>());
        from.iter().chain([&to]).for_each(|socket| socket.set_nonblocking(true).expect("a socket"));
        let flood = Flood { came: Arc::default(), over: Arc::default() };
        let (came, over) = (flood.came.clone(), flood.over.clone());
        std::thread::spawn(move || {
            while !over.load(Relaxed) {
                from.iter().for_each(|socket| _ = socket.send(b"more than may go"));
                while to.recv(&mut [0; 64]).is_ok() {
                    came.fetch_add(1, Relaxed);
                }
                // At the rate of a program, not at full speed.
                std::thread::sleep(Duration::from_millis(2));
            }
        });
        flood
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.over.store(true, Relaxed);
    }
}

/// Each queue's worker keeps the limits of the node, and not limits of its own.
#[test]
fn the_limits_of_a_node_hold_for_all_its_queues_together_whichever_workers_die() {
    const KILLS: usize = 4;
    let Some(mut world) = World::new() else { return };
    let before = std::fs::read_to_string(world.rig.path("tasuki.toml")).expect("a file");
    let apply = |world: &World, kpps: u32| {
        let limits = format!("limits = {{ send = {{ kpps = {kpps} }}, receive = {{ kpps = {kpps} }} }}\n");
        let shop = of_file("shop", &world.shop, SHOP, ", shortcut = false, queues = 2") + &limits;
        let desk = of_file("desk", &world.desk, DESK, ", shortcut = false");
        world.rig.configure(|_| [&before[..], &shop, QUEUE, &desk].concat());
        let said = world.rig.ask(&["apply"]);
        ["shop", "shop-1", "desk"].into_iter().for_each(|node| _ = world.rig.await_pair(node));
        said
    };
    apply(&world, 4);
    let ways = [(&world.shop, SHOP), (&world.desk, DESK)];
    let stations = ways.map(|(room, _)| {
        let said = room.ip("-o link show lan");
        said.split(' ').skip_while(|word| *word != "link/ether").nth(1).expect("an address").to_owned()
    });
    // What asks for an address finds no room in a full queue either. The next daemon has the kernel forget addresses.
    let know_each_other = || {
        for (near, far) in [(0, 1), (1, 0)] {
            let (address, mac) = (ways[far].1, &stations[far]);
            ways[near].0.ip(&format!("neigh replace {address} lladdr {mac} dev lan nud permanent"));
        }
    };
    let floods = [Flood::begin(ways), Flood::begin([ways[1], ways[0]])];
    let all_came = || floods.each_ref().map(|flood| flood.came.load(Relaxed));
    // Until each way has carried frames by both queues.
    let go_on = |world: &World| {
        let (before, came) = (counts(world), all_came());
        until(&world.rig, "both queues carry frames, both ways", || {
            know_each_other();
            all_came().iter().zip(came).all(|(now, came)| *now >= came + 500) && all_more(before, counts(world))
        });
    };
    go_on(&world);
    let said = apply(&world, 1);
    assert!(said.contains("node shop-1: limits changes; a fresh worker takes over"), "{said}");
    go_on(&world);
    let (came, began) = (all_came(), Instant::now());
    for node in ["shop", "shop-1"].into_iter().cycle().take(KILLS) {
        world.rig.kill_driver(node);
        world.rig.await_pair(node);
        go_on(&world);
    }
    for node in ["shop-1", "shop"] {
        world.rig.ask(&["worker", "upgrade", node]);
        world.rig.await_pair(node);
        go_on(&world);
    }
    world.rig.kill_daemon();
    world.rig.start();
    ["shop", "shop-1", "desk"].into_iter().for_each(|node| _ = world.rig.await_pair(node));
    go_on(&world);
    let came = all_came().into_iter().zip(came).map(|(now, came)| now - came).collect::<Vec<_>>();
    let lasted = began.elapsed();
    println!("{came:?} in {lasted:?}");
    // Frames that a killed worker had handled may come twice.
    let more = 2 * BURST * KILLS as u64;
    for (came, burst_ms) in came.into_iter().zip([10, 200]) {
        let most = u64::try_from(lasted.as_millis()).expect("a number") + burst_ms + more;
        assert!(came <= most, "{came} came in {lasted:?}, where {most} may\n{}", world.rig.log());
    }
    world.end();
}

/// It would keep limits of its own, beside those of the other queues' workers.
#[test]
fn a_worker_from_before_queues_with_limits_is_none_for_them() {
    let Some(folder) = released() else { return };
    let Some(world) = World::new() else { return };
    let old = folder.join("tasuki-worker");
    world.add("shop", &world.shop, SHOP, &["--no-shortcut", "--queues", "2", "--send-kpps", "100"]);
    world.add("desk", &world.desk, DESK, &["--no-shortcut", "--send-kpps", "100"]);
    world.await_pairs();
    let upgrade = |node| world.rig.tasuki(&["worker", "upgrade", node, "--with", old.to_str().expect("a path")]);
    let refused = upgrade("shop");
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(said.contains("is from before an interface with several queues could have limits"), "{said}");
    assert!(!refused.status.success());
    world.await_pairs();
    let daemon = world.rig.refused(&["upgrade", "--with", folder.to_str().expect("a path")]);
    assert!(daemon.contains("is from before an interface with several queues could have limits"), "{daemon}");
    // One that has them alone is as good as before.
    assert!(upgrade("desk").status.success(), "{}", world.rig.log());
    until(&world.rig, "it answers", || world.is_answered(DESK));
    world.end();
}

/// Its switch knows one node for each address, and takes frames of another for forged.
#[test]
fn a_worker_from_before_queues_and_a_queue_are_not_on_one_vni() {
    let Some(folder) = released() else { return };
    let Some(world) = World::new() else { return };
    let [old, new] = [folder.join("tasuki-worker"), beside("tasuki-worker").expect("it was looked for")];
    let [old, new] = [&old, &new].map(|path| path.to_str().expect("a path"));
    let upgrade_to = |program| ["worker", "upgrade", "desk", "--with", program];
    world.add("shop", &world.shop, SHOP, &["--no-shortcut", "--queues", "2"]);
    world.add("desk", &world.desk, DESK, &["--no-shortcut"]);
    world.await_pairs();
    world.rig.ask(&upgrade_to(old));
    let add = ["node", "add", "shop-1", "--queue-of", "shop"];
    let refused = world.rig.refused(&add);
    assert!(refused.contains("of node desk is from before an interface could have several queues"), "{refused}");
    assert!(refused.contains("tasuki worker upgrade desk"), "{refused}");
    until(&world.rig, "it answers", || world.is_answered(DESK));
    world.rig.ask(&upgrade_to(new));
    until(&world.rig, "the stand-by of before has ended", || world.rig.tasuki(&add).status.success());
    world.rig.await_pair("shop-1");
    let flows = spread(&world, (0..FLOWS).map(|_| world.exchange()).collect());
    let refused = world.rig.refused(&upgrade_to(old));
    assert!(refused.contains("from before an interface could have several queues"), "{refused}");
    let tally = sum(flows);
    assert_eq!((tally.back, tally.twice + tally.twice_there), (tally.sent, 0), "{tally:?}\n{}", world.rig.log());
    world.end();
}

/// The interface is made anew, and so are the queues of it; also if the daemon dies between the two.
#[test]
fn a_file_that_changes_an_interface_changes_its_queues_with_it() {
    let Some(mut world) = World::new() else { return };
    let before = std::fs::read_to_string(world.rig.path("tasuki.toml")).expect("a file");
    let file = |world: &World, queues: u32, mtu: u32| {
        // The queue stands before its interface: the order in the file does not count.
        let its = if queues > 1 { QUEUE } else { "" };
        let more = format!(", mtu = {mtu}, shortcut = false");
        let shop = of_file("shop", &world.shop, SHOP, &format!("{more}, queues = {queues}"));
        format!("{before}{its}{shop}{}", of_file("desk", &world.desk, DESK, &more))
    };
    for (queues, mtu, dies_at) in
        [(2, 1500, 0), (2, 1400, 0), (1, 1400, 0), (3, 1400, 0), (2, 1500, 2), (2, 1400, 3), (1, 1500, 4), (3, 1400, 1)]
    {
        if dies_at > 0 {
            world.rig.kill_daemon();
            world.rig.start_to_die(Some(format!("daemon.applied-step:{dies_at}")));
            until(&world.rig, "it serves", || world.rig.tasuki(&["status"]).status.success());
            world.await_pairs();
        }
        world.rig.configure(|_| file(&world, queues, mtu));
        if dies_at == 0 {
            world.rig.ask(&["apply"]);
        } else {
            assert!(!world.rig.tasuki(&["apply"]).status.success(), "it dies");
            world.rig.start();
        }
        until(&world.rig, "all is applied", || world.rig.ask(&["plan"]).starts_with("nothing changes"));
        world.await_pairs();
        until(&world.rig, "it answers", || world.is_answered(DESK));
        let programs: Vec<_> =
            world.shop.within(|| (0..32).map(|_| UdpSocket::bind((SHOP, 0)).expect("a port")).collect());
        let nodes = if queues > 1 { &["shop", "shop-1"][..] } else { &["shop"] };
        nodes.iter().for_each(|node| drop(world.rig.await_pair(node)));
        let taken = || nodes.iter().map(|node| world.count(node, "taken")).collect::<Vec<_>>();
        let before = taken();
        until(&world.rig, "all queues carry frames", || {
            programs.iter().for_each(|program| drop(program.send_to(b"anybody?", (DESK, 7))));
            taken().iter().zip(&before).all(|(now, before)| now > before)
        });
    }
    world.end();
}
