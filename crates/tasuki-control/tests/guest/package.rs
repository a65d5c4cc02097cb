//! Tasuki's package for Debian, which dpkg has installed before these tests began.

use std::fs;
use std::path::Path;
use std::process::Command;

use tasuki_testing::process;

use crate::unit::{self, Unit, property, run};
use crate::{NODES, assert_none_lost, finish, traffic};

/// The next version.
const NEXT: &str = "/packages/next.deb";

#[test]
fn an_upgrade_of_the_package_and_then_of_all_that_runs_loses_no_frame() {
    let unit = Unit::begin(NODES);
    unit.is_at_work();
    let (workers, keeper, before) = (unit.workers("red"), unit.keeper(), unit.pid());
    let traffic = traffic();
    let said = run("dpkg", &["--install", NEXT]);
    println!("{said}");
    assert!(said.contains("workers stay what they are until: tasuki upgrade --workers-only"), "{said}");
    let daemon = unit.pid();
    assert_ne!(daemon, before, "it is another tasukid");
    assert_eq!((unit.workers("red"), unit.keeper()), (workers.clone(), keeper), "workers and keeper live on");
    traffic[0].for_a_while();
    println!("{}", run("tasuki", &["upgrade"]));
    unit.is_at_work();
    assert_eq!((unit.pid(), property("ActiveState").as_str()), (daemon, "active"), "systemd sees no end");
    assert!(workers.iter().all(|worker| !unit.workers("red").contains(worker)), "all workers are fresh ones");
    traffic[0].for_a_while();
    assert_none_lost("an upgrade of the package", &finish(traffic), 0);
    assert_eq!(property("NRestarts"), "0");
}

#[test]
fn a_package_that_could_not_take_over_the_workers_is_not_unpacked() {
    let unit = Unit::begin(NODES);
    unit.is_at_work();
    let (workers, keeper) = (unit.workers("red"), unit.keeper());
    // The next version, had it another registry.
    let (folder, other) = ("/tmp/other", "/tmp/other.deb");
    run("dpkg-deb", &["--raw-extract", NEXT, folder]);
    let script = format!("{folder}/DEBIAN/preinst");
    let text = fs::read_to_string(&script).expect("a script");
    let changed = text.replace("has=\"registry ", "has=\"registry 9");
    assert_ne!(text, changed, "{text}");
    fs::write(&script, changed).expect("root may");
    run("dpkg-deb", &["-Znone", "--build", folder, other]);
    fs::remove_dir_all(folder).expect("root may");
    let installed = || run("dpkg-query", &["--show", "--showformat=${Version} ${Status}", "tasuki"]);
    let before = installed();
    let output = Command::new("dpkg").args(["--install", other]).output().expect("it is installed");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    println!("{said}");
    assert!(!output.status.success() && said.contains("nothing was unpacked: "), "{said}");
    unit.is_at_work();
    assert_eq!((installed(), unit.workers("red"), unit.keeper()), (before, workers, keeper), "all goes on as it was");
    // What it says helps.
    unit::stop_all();
    println!("{}", run("dpkg", &["--install", other]));
    unit.is_at_work();
}

#[test]
fn a_package_that_is_removed_leaves_nothing_behind() {
    let unit = Unit::begin(NODES);
    unit.is_at_work();
    println!("{}", run("dpkg", &["--purge", "tasuki"]));
    let left: Vec<_> = process::running().filter(|(_, line)| line.contains("tasuki")).collect();
    assert!(left.is_empty(), "it leaves {left:?}");
    for path in [
        "/usr/bin/tasukid",
        "/usr/lib/cni/tasuki-cni",
        "/usr/lib/netavark/tasuki",
        "/usr/share/doc/tasuki",
        "/etc/tasuki.toml",
        "/run/tasuki",
        "/sys/fs/cgroup/system.slice/tasuki-nodes.service",
    ] {
        assert!(!Path::new(path).exists(), "{path} is still there");
    }
    assert_eq!(property("LoadState"), "not-found");
    // On a machine that never had it, it begins by itself, without nodes.
    println!("{}", run("dpkg", &["--install", NEXT]));
    assert_eq!((property("ActiveState").as_str(), property("UnitFileState").as_str()), ("active", "enabled"));
    assert!(unit::ask(&["status"])["nodes"].as_array().expect("a list").is_empty());
}
