//! Tests with the machine's own control groups.

use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::SystemTime;

use tasuki_testing::until;

use super::*;

#[test]
fn what_is_mounted_is_found_of_both_versions() {
    let mounts = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n\
         35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n\
         32 31 0:29 /pod /sys/fs/cgroup/cpu rw,relatime shared:7 - cgroup cgroup rw,cpu,cpuacct\n\
         41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n";
    let of_us = "4:memory:/a/b\n3:cpu,cpuacct:/pod/c\n0::/system.slice/tasukid.service\n";
    let found = hierarchies(mounts, of_us);
    let owns: Vec<_> = found.iter().map(|it| (it.own.to_str().expect("text"), it.is_v2)).collect();
    let expected = [
        ("/sys/fs/cgroup/memory/a/b", false),
        ("/sys/fs/cgroup/cpu/c", false),
        ("/sys/fs/cgroup/unified/system.slice/tasukid.service", true),
    ];
    assert_eq!(owns, expected);
    assert!(found[0].has("memory") && found[1].has("cpu") && !found[0].has("cpu"));
    let aside = hierarchies(mounts, &of_us.replace(".service", ".service/tasukid"));
    assert_eq!(aside[2].own, found[2].own, "one that is aside from its beginning has the same group");
}

#[test]
fn a_daemon_begins_beside_others_that_end() {
    let folder = tempfile::tempdir().unwrap();
    let (around, is_over) = (folder.path().join("tasuki"), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            // Each daemon sweeps once. Without end, they could get hold of the folder each time.
            let sweeps = || !is_over.load(Relaxed) && fs::remove_dir(&around).is_err();
            while !is_over.load(Relaxed) {
                (0..4).for_each(|_| while sweeps() {});
                thread::sleep(Duration::from_millis(1));
            }
        });
        let again = || make(folder.path(), "id").and_then(|_| fs::remove_dir(of(folder.path(), "id")));
        let made = (0..2000).try_for_each(|_| again());
        is_over.store(true, Relaxed);
        made.unwrap();
    });
}

#[test]
fn a_group_with_other_processes_bounds_no_node_unless_it_hands_controllers_on_already() {
    let folder = tempfile::tempdir().unwrap();
    let own = folder.path().to_owned();
    let write = |file: &str, text: &str| fs::write(own.join(file), text).unwrap();
    let it = Hierarchy { own: own.clone(), mount: own.clone(), controllers: vec!["memory".to_owned()], is_v2: true };
    let groups = Groups { hierarchies: vec![it], id: "id".to_owned(), _held: Vec::new() };
    let bars = || groups.bars(&Bounds { memory: Some(1 << 30), ..Bounds::default() });
    write("cgroup.type", "domain\n");
    write("cgroup.procs", &format!("{}\n", std::process::id()));
    assert_eq!(bars(), None, "the daemon is alone, and moves");
    write("cgroup.procs", "1\n");
    assert!(bars().is_some_and(|why| why.contains("holds other processes")));
    write("cgroup.subtree_control", "cpu memory\n");
    assert_eq!(bars(), None);
}

/// row: T137
#[test]
fn a_lock_of_another_program_keeps_no_daemon_from_beginning() {
    let folder = tempfile::tempdir().unwrap();
    let group = of(folder.path(), "id");
    fs::create_dir_all(&group).unwrap();
    let other = File::open(&group).unwrap();
    other.lock().unwrap();
    make(folder.path(), "id").unwrap();
}

/// Groups of this machine of one version, which go when the test ends. `find` returns `None` where there are
/// none.
struct Ours(Groups);

impl Ours {
    fn find(test: &str, is_v2: bool) -> Option<Self> {
        let mut groups = Groups::find(&format!("test-{test}-{}", std::process::id()), None);
        groups.hierarchies.retain(|it| it.is_v2 == is_v2);
        if !groups.freezes() {
            println!("skipped: no freezer of version {} is mounted, or not for us", if is_v2 { 2 } else { 1 });
            Ours(groups);
            return None;
        }
        Some(Ours(groups))
    }
}

impl Drop for Ours {
    fn drop(&mut self) {
        for it in &self.0.hierarchies {
            remove_empty(&it.own.join("tasuki").join(&self.0.id), 3);
        }
    }
}

/// Ends with the test.
struct Busy(Child);

impl Busy {
    fn start() -> Self {
        let mut command = Command::new("sh");
        Busy(command.args(["-c", "while :; do :; done"]).stdin(Stdio::null()).spawn().expect("a shell"))
    }

    /// µs of CPU time, in ticks.
    fn ticks(&self) -> u64 {
        let line = fs::read_to_string(format!("/proc/{}/stat", self.0.id())).expect("a child of ours");
        line.rsplit_once(')').expect("a name").1.split_whitespace().nth(11).expect("utime").parse().expect("ticks")
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_bound_that_is_taken_away_is_in_force_no_more() {
    let mut ours = Groups::find(&format!("test-less-{}", std::process::id()), None);
    ours.hierarchies.retain(|it| it.has("pids") || it.has("cpu") || it.is_v2);
    let ours = Ours(ours);
    let bounded = Bounds { pids: Some(7), cpu: Some(50), ..Bounds::default() };
    let group = ours.0.node("red", &bounded).expect("a group");
    let read = |group: &Group| {
        let files = ["pids.max", "cpu.max", "cpu.cfs_quota_us"];
        let all = group.places.iter().flat_map(|place| files.map(|file| place.path.join(file)));
        all.filter_map(|file| fs::read_to_string(file).ok()).collect::<Vec<_>>()
    };
    let before = read(&group);
    if before.is_empty() {
        return println!("skipped: this machine has no control group for that, or not for us");
    }
    let after = read(&ours.0.node("red", &Bounds::default()).expect("a group"));
    let is_bound = |text: &String| ["7\n", "50000 100000\n", "50000\n"].contains(&text.as_str());
    assert!(before.iter().all(is_bound) && !after.iter().any(is_bound), "{before:?} {after:?}");
    assert_eq!(before.len(), after.len());
}

/// row: T137
#[test]
fn a_group_that_somebody_has_removed_is_made_anew_with_its_bounds() {
    let mut ours = Groups::find(&format!("test-anew-{}", std::process::id()), None);
    ours.hierarchies.retain(|it| it.has("pids") || it.is_v2 || it.has("freezer"));
    let ours = Ours(ours);
    let bounds = Bounds { pids: Some(7), ..Bounds::default() };
    let mut node = None;
    ours.0.child(&mut node, "red", &bounds, "worker-1").expect("a group");
    let folders: Vec<_> = node.iter().flat_map(|node| &node.places).map(|place| place.path.clone()).collect();
    folders.iter().for_each(|folder| remove_empty(folder, 2));
    assert!(!folders.is_empty() && folders.iter().all(|folder| !folder.exists()));
    ours.0.child(&mut node, "red", &bounds, "worker-2").expect("a group");
    let kept = |folder: &PathBuf| fs::read_to_string(folder.join("pids.max")).ok();
    let kept: Vec<_> = folders.iter().filter_map(kept).collect();
    if !ours.0.hierarchies.iter().any(|it| it.has("pids")) {
        println!("skipped: this machine has no control group for numbers of processes, or not for us");
        return;
    }
    assert_eq!(kept, ["7\n"]);
}

#[test]
fn a_group_whose_cpus_were_off_line_gets_them_back() {
    let mut ours = Groups::find(&format!("test-cpus-{}", std::process::id()), None);
    ours.hierarchies.retain(|it| !it.is_v2 && (it.has("cpuset") || it.has("freezer")));
    let Some(own) = ours.hierarchies.iter().find(|it| it.has("cpuset")).map(|it| it.own.clone()) else {
        println!("skipped: this machine has no control group of version 1 for CPUs, or not for us");
        return;
    };
    let ours = Ours(ours);
    let may = rustix::thread::sched_getaffinity(None).expect("the kernel says it");
    let cpu = (0..CpuSet::MAX_CPU).find(|cpu| may.is_set(*cpu)).expect("a CPU");
    let mut cpus = CpuSet::new();
    cpus.set(cpu);
    let bounds = Bounds { cpus: Some(cpus), ..Bounds::default() };
    let mut node = None;
    ours.0.child(&mut node, "red", &bounds, "worker-1").expect("a group");
    let parent = of(&own, &ours.0.id);
    let file = parent.join("node-red/cpuset.cpus");
    assert_eq!(fs::read_to_string(&file).expect("a file").trim(), cpu.to_string());
    // So the kernel leaves them.
    [&file, &parent.join("cpuset.cpus")]
        .into_iter()
        .for_each(|file| fs::write(file, "\n").expect("no process is there"));
    ours.0.child(&mut node, "red", &bounds, "worker-2").expect("a group");
    assert_eq!(fs::read_to_string(&file).expect("a file").trim(), cpu.to_string());
}

fn is_frozen_and_killed(is_v2: bool) {
    let Some(ours) = Ours::find(if is_v2 { "freeze2" } else { "freeze1" }, is_v2) else { return };
    let node = ours.0.node("red", &Bounds::default()).expect("a group");
    let (worker, sibling) = (node.child("worker-1").expect("a group"), node.child("worker-2").expect("a group"));
    let (mut busy, mut other) = (Busy::start(), Busy::start());
    worker.add(busy.0.id()).expect("it lives");
    sibling.add(other.0.id()).expect("it lives");
    assert_eq!(worker.processes().expect("a group"), [busy.0.id()]);
    assert!(!worker.is_frozen().expect("a group"));
    worker.freeze().expect("a freezer");
    until("the freezer", || worker.is_frozen().expect("a group"));
    let (before, others) = (busy.ticks(), other.ticks());
    until("the other one to run", || other.ticks() > others + 2);
    assert_eq!(busy.ticks(), before, "it ran while it was frozen");
    worker.thaw().expect("a freezer");
    until("it to go on", || busy.ticks() > before);
    worker.freeze().expect("a freezer");
    until("the freezer", || worker.is_frozen().expect("a group"));
    let before = busy.ticks();
    worker.kill().expect("a freezer");
    until("its end", || busy.0.try_wait().expect("a child of ours").is_some());
    assert!(before > 0 && other.0.try_wait().expect("a child of ours").is_none());
    // The node's group has the workers' in it.
    node.freeze().expect("a freezer");
    until("the node's freezer", || node.is_frozen().expect("a group"));
    sibling.kill().expect("a freezer");
    node.thaw().expect("a freezer");
    until("its end", || other.0.try_wait().expect("a child of ours").is_some());
    node.remove();
    assert!(node.places.iter().all(|place| !place.path.exists()), "{node:?} is there still");
}

/// Between two workers of a node, nobody is in its group.
#[test]
fn a_node_keeps_its_group_without_processes_as_long_as_its_daemon_lives() {
    for is_v2 in [false, true] {
        let Some(mut ours) = Ours::find(if is_v2 { "kept2" } else { "kept1" }, is_v2) else { continue };
        let node = ours.0.node("red", &Bounds { pids: Some(100), ..Bounds::default() }).expect("a group");
        let are_there = || node.places.iter().all(|place| place.path.exists());
        for it in &ours.0.hierarchies {
            // Its age does not count.
            let folder = File::open(of(&it.own, &ours.0.id)).expect("a group");
            folder.set_modified(SystemTime::UNIX_EPOCH).expect("ours");
        }
        let other = Groups::find(&format!("other-{}", std::process::id()), None);
        assert!(are_there(), "another daemon that begins has removed {node:?}");
        other.sweep();
        assert!(are_there(), "another daemon that ends has removed {node:?}");
        ours.0._held.clear();
        // The sweep of a test beside this one may have the lock.
        let swept = || {
            other.sweep();
            !are_there()
        };
        until("the end of what a dead daemon has left", swept);
    }
}

#[test]
fn a_group_of_version_1_stops_goes_on_and_dies_frozen() {
    is_frozen_and_killed(false);
}

#[test]
fn a_group_of_version_2_stops_goes_on_and_dies_frozen() {
    is_frozen_and_killed(true);
}

#[test]
fn a_group_is_bounded_and_that_of_a_daemon_before_us_is_found_again() {
    for is_v2 in [false, true] {
        let Some(ours) = Ours::find(if is_v2 { "bound2" } else { "bound1" }, is_v2) else { continue };
        let bounds = Bounds { memory: Some(64 << 20), pids: Some(1), ..Bounds::default() };
        if !ours.0.lacks(&bounds).is_empty() {
            println!("skipped: {:?}, of version {}", ours.0.lacks(&bounds), if is_v2 { 2 } else { 1 });
            continue;
        }
        let node = ours.0.node("red", &bounds).expect("a group");
        let doors = node.places.iter().map(|place| place.path.join("cgroup.procs"));
        let doors: Vec<String> = doors.map(|door| format!("echo 0 > {}", door.display())).collect();
        let script = format!("{}; sleep 0 && echo more than one || echo refused", doors.join("; "));
        let said = Command::new("sh").args(["-c", &script]).output().expect("a shell");
        let said = String::from_utf8_lossy(&said.stdout).into_owned();
        assert!(!said.contains("more than one"), "{said}");
        let again = ours.0.node("red", &bounds).expect("the same group");
        assert_eq!(again.doors(), node.doors());
        node.remove();
    }
}

#[test]
fn the_keeper_is_put_beside_the_process_that_keeps_the_groups() {
    let Some(ours) = Ours::find("keeper", true) else { return };
    let named = ours.0.hierarchies[0].own.join(format!("test-nodes-{}", std::process::id()));
    fs::create_dir_all(named.join(HELD)).unwrap();
    let mut keeper = Command::new("sleep").arg("1000").stdin(Stdio::null()).spawn().unwrap();
    let groups = Groups::find("id", Some(&named));
    groups.hold(keeper.id());
    assert_eq!(processes(&named.join(HELD)).trim(), keeper.id().to_string());
    keeper.kill().unwrap();
    keeper.wait().unwrap();
    groups.sweep();
    until("its groups go", || {
        remove_empty(&named, 3);
        !named.exists()
    });
}
