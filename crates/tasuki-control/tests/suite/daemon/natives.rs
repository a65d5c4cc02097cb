//! Native nodes on a VNI. Their workers handle frames themselves, and are replaced and killed at each step. No frame
//! is lost or handled twice. Needs root.

use std::cell::Cell;
use std::process::Command;

use rustix::process::Signal;

use super::rig::{Rig, count_in, pid, signal, until};
use super::rooms::deaths;
use super::storm::beside;
use super::vnis::{SHOP, World};

/// Places where the driver of a native node's end is killed.
const DRIVER: &[&str] = &["burst.received", "burst.turned", "burst.sent", "vni.written", "vni.committed", "vni.done"];

/// Adds a native node that receives numbered frames, and one that sends them to it.
pub fn with_source_and_sink(rig: &Rig, rate: &str) {
    rig.ask(&["node", "add", "sink", "--native", "--work", "sink", "--mac", "02:00:00:00:00:88"]);
    rig.await_pair("sink");
    let words = ["node", "add", "source", "--native", "--work", "source", "--to", "02:00:00:00:00:88", "--rate", rate];
    rig.ask(&words);
    rig.await_pair("source");
    flows(rig, 500);
}

/// Waits until the sink has received `more` frames.
pub fn flows(rig: &Rig, more: u64) {
    let before = rig.count("sink@lan", "numbered");
    until(rig, "frames flow", || rig.count("sink@lan", "numbered") >= before + more);
}

/// Asserts that no number is missing or came twice, from the first to the last.
pub fn assert_exact(rig: &Rig) {
    // One answer, for the counts grow while frames come, and the last ones may still be on their way.
    let counts = || {
        let said = rig.json(&["nic", "counts", "sink@lan"]);
        ["numbered", "missing", "late", "next"].map(|name| count_in(&said, name))
    };
    let last = Cell::new(counts());
    until(rig, "no more frames come", || {
        let now = counts();
        last.replace(now) == now
    });
    let [seen, missing, late, next] = last.get();
    println!("numbered {seen}, missing {missing}, late {late}, next {next}");
    assert_eq!((missing, late, seen), (0, 0, next), "{}", rig.log());
}

/// Makes a worker that dies at a place when it passes it for the `nth` time.
pub fn dying_at(rig: &Rig, place: &str, nth: u32, program: &str) -> String {
    let path = rig.path(&format!("dies-{}-{nth}", place.replace('.', "-")));
    tasuki_testing::script(&path, &format!("TASUKI_CRASH={place}:{nth} exec {program} \"$@\""));
    path.display().to_string()
}

#[test]
fn wherever_a_native_node_is_killed_its_frames_are_handled_once() {
    if !cfg!(feature = "crash-points") {
        return println!("skipped: needs the feature crash-points");
    }
    let Some(world) = World::of_scripts() else { return };
    with_source_and_sink(&world.rig, "1000");
    let worker = beside("tasuki-worker").expect("looked for before").display().to_string();
    let mut killed = 0;
    for node in ["source", "sink"] {
        for (place, nth) in DRIVER.iter().zip([3, 10, 30].into_iter().cycle()) {
            if node == "source" && ["burst.received", "burst.turned"].contains(place)
                || node == "sink" && *place == "burst.sent"
            {
                continue;
            }
            let with = dying_at(&world.rig, place, nth, &worker);
            // The worker may die before it reports that it drives.
            let _ = world.rig.tasuki(&["worker", "upgrade", node, "--with", &with]);
            killed += 1;
            until(&world.rig, "it dies", || deaths(&world.rig) >= killed);
            until(&world.rig, "a worker that lives drives", || {
                world.rig.tasuki(&["worker", "upgrade", node, "--with", &worker]).status.success()
            });
            killed = deaths(&world.rig);
            world.rig.await_pair(node);
            flows(&world.rig, 100);
        }
    }
    println!("{} deaths", deaths(&world.rig));
    world.rig.ask(&["node", "remove", "source"]);
    assert_exact(&world.rig);
    world.end();
}

#[test]
fn a_namespace_gets_one_answer_to_each_question_from_a_native_node_that_is_replaced_and_killed() {
    if Command::new("ping").arg("-V").output().is_err() {
        return println!("skipped: needs ping: apt-get install iputils-ping");
    }
    let Some(world) = World::new() else { return };
    world.add("shop", &world.shop, SHOP, &[]);
    world.rig.ask(&["node", "add", "desk", "--native", "--work", "answer", "--address", "192.0.2.77"]);
    world.rig.await_pair("shop");
    world.rig.await_pair("desk");
    std::thread::scope(|scope| {
        let pinging = scope.spawn(|| world.ping(600, "0.01", "192.0.2.77"));
        world.rig.ask(&["worker", "upgrade", "desk"]);
        world.rig.await_pair("desk");
        world.rig.kill_driver("desk");
        world.rig.await_pair("desk");
        world.rig.ask(&["worker", "upgrade", "desk"]);
        world.rig.kill_driver("desk");
        pinging.join().expect("all are answered");
    });
    world.end();
}

/// A user's own program receives every frame that the sink receives. Whenever the source stands still, both have
/// counted the same number.
#[test]
fn what_a_program_of_ones_own_counts_on_a_vni_is_exact_wherever_it_is_killed() {
    if !cfg!(feature = "crash-points") || beside("examples/reflector").is_none() {
        return println!("skipped: needs the feature crash-points, and the examples of tasuki-worker");
    }
    let Some(world) = World::of_scripts() else { return };
    let rig = &world.rig;
    let program = beside("examples/reflector").expect("just seen").display().to_string();
    rig.ask(&["node", "add", "sink", "--native", "--work", "sink"]);
    rig.ask(&["node", "add", "mine", "--native", "--program", &program, "--options", "copy"]);
    rig.await_pair("sink");
    rig.await_pair("mine");
    // Senders do not wait for receivers of broadcast frames. So send fewer than the rings hold while a worker is
    // replaced.
    rig.ask(&["node", "add", "source", "--native", "--work", "source", "--rate", "100"]);
    rig.await_pair("source");
    flows(rig, 100);
    let mut killed = 0;
    for (place, nth) in DRIVER.iter().chain(&["state.written"]).zip([2, 5, 9].into_iter().cycle()) {
        let with = dying_at(rig, place, nth, &program);
        let _ = rig.tasuki(&["worker", "upgrade", "mine", "--with", &with]);
        killed += 1;
        until(rig, "it dies", || deaths(rig) >= killed);
        until(rig, "a worker that lives drives", || {
            rig.tasuki(&["worker", "upgrade", "mine", "--with", &program]).status.success()
        });
        killed = deaths(rig);
        rig.await_pair("mine");
        flows(rig, 20);
    }
    let both = || (rig.count("mine@lan", "frames"), rig.count("sink@lan", "numbered"));
    // The source may be stopped after only one of them has received a frame.
    until(rig, "both have counted the same", || {
        let source = pid(&rig.await_pair("source").0);
        signal(source, Signal::STOP);
        let counted = Cell::new(both());
        until(rig, "all has come", || counted.replace(both()) == counted.get());
        signal(source, Signal::CONT);
        println!("{:?} with {} deaths", counted.get(), deaths(rig));
        counted.get().0 == counted.get().1
    });
    assert_eq!((rig.count("sink@lan", "missing"), rig.count("sink@lan", "late")), (0, 0), "{}", rig.log());
    world.end();
}

#[test]
fn a_native_node_that_cannot_be_is_refused_with_a_sentence() {
    let Some(world) = World::new() else { return };
    for (words, part) in [
        (&["new", "--native", "--work", "answer"][..], "is not an address to answer for; name one of IPv4"),
        (&["new", "--native", "--work", "source", "--size", "10"], "a frame has 60 to 1514 bytes"),
        (&["new", "--native", "--program", "/no/such/program", "--vni", "Lan"], "vni \"Lan\": a name is"),
    ] {
        let said = world.rig.refused(&[&["node", "add"], words].concat());
        assert!(said.contains(part), "{words:?}: {said}");
    }
    for words in [&["new", "--native"][..], &["new", "--work", "echo"], &["new", "--native", "--netns", "a"]] {
        let said = world.rig.tasuki(&[&["node", "add"], words].concat());
        assert_eq!(said.status.code(), Some(2), "{words:?}");
    }
    world.end();
}

#[test]
fn many_nodes_that_another_daemon_takes_over_all_go_by_its_directory() {
    let Some(mut world) = World::new() else { return };
    // Told of each other, both workers of all nodes hear more than tasukid tells in one turn of its loop.
    let names: Vec<String> = (0..20).map(|number| format!("n{number}")).collect();
    names.iter().for_each(|name| drop(world.rig.ask(&["node", "add", name, "--native", "--work", "echo"])));
    names.iter().for_each(|name| drop(world.rig.await_pair(name)));
    world.rig.kill_daemon();
    world.rig.start();
    // Only the directory of the new daemon has this node's address, and answers go there.
    world.rig.ask(&["node", "add", "source", "--native", "--work", "source", "--rate", "1000"]);
    world.rig.await_pair("source");
    until(&world.rig, "each node answers one that is new", || {
        let talks = world.rig.json(&["vni", "stats", "lan"]);
        let answers = |talk: &&serde_json::Value| talk["node"] == "source" && talk["received"].as_u64() > Some(0);
        talks.as_array().map(|talks| talks.iter().filter(answers).count()) == Some(names.len())
    });
    // Each stand-by has heard of it as well.
    names.iter().for_each(|name| world.rig.kill_driver(name));
    let received = |name: &str| {
        let talks = world.rig.json(&["vni", "stats", "lan"]);
        let its =
            talks.as_array().and_then(|talks| talks.iter().find(|it| it["node"] == "source" && it["other"] == name));
        its.and_then(|talk| talk["received"].as_u64()).unwrap_or(0)
    };
    for name in &names {
        world.rig.await_pair(name);
        let before = received(name);
        until(&world.rig, "it answers on", || received(name) > before);
    }
    world.end();
}
