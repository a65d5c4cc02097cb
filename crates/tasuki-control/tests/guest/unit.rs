//! The unit as an operator sees it at the guest's shell: by `systemctl`, `tasuki` and the kernel's files.

use std::fs;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal};
use serde_json::Value;
use tasuki_testing::process;
pub use tasuki_testing::process::lives;

use crate::wait::until;

pub const UNIT: &str = "tasukid.service";

/// Vendor and device of the 82574L and of the virtio-net.
const CARDS: [(&str, &str); 2] = [("0x8086", "0x10d3"), ("0x1af4", "0x1041")];

/// Runs a program that must succeed; returns its output.
#[track_caller]
pub fn run(program: &str, words: &[&str]) -> String {
    let output = Command::new(program).args(words).output().unwrap_or_else(|error| panic!("{program}: {error}"));
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {}: {said}{complaint}\n{}", words.join(" "), log());
    said
}

/// Returns the last log lines of tasukid and the kernel, and tasukid's status and events.
pub fn log() -> String {
    let words = ["--unit", UNIT, "--no-pager", "--lines", "30", "--output", "short-monotonic"];
    let kernels = ["--dmesg", "--no-pager", "--lines", "5"];
    let ways: [(&str, &[&str]); 4] =
        [("journalctl", &words), ("journalctl", &kernels), ("tasuki", &["status"]), ("tasuki", &["events"])];
    let said = ways.map(|(program, words)| {
        let output = Command::new(program).args(words).output().expect("it is installed");
        let lines = String::from_utf8_lossy(&output.stdout).into_owned();
        lines
            .lines()
            .rev()
            .take(30)
            .collect::<Vec<_>>()
            .into_iter()
            .rev()
            .fold(String::new(), |all, line| all + line + "\n")
    });
    said.concat()
}

/// Returns a property of the unit.
pub fn property(name: &str) -> String {
    run("systemctl", &["show", "--value", "--property", name, UNIT]).trim().to_owned()
}

/// Runs `tasuki`; returns its output as JSON.
#[track_caller]
pub fn ask(words: &[&str]) -> Value {
    let said = run("tasuki", &[words, &["--json"]].concat());
    serde_json::from_str(&said).unwrap_or_else(|error| panic!("{error}: {said}"))
}

/// Binds a card to vfio-pci; returns its address: docs/your-nic-with-vfio.md, section 4.
fn bound((vendor, device): (&str, &str)) -> String {
    let mut folders =
        fs::read_dir("/sys/bus/pci/devices").expect("a bus").map(|folder| folder.expect("a folder").path());
    let is =
        |folder: &Path, file: &str, number| fs::read_to_string(folder.join(file)).expect("a number").trim() == number;
    let card = folders.find(|folder| is(folder, "vendor", vendor) && is(folder, "device", device));
    let card = card.unwrap_or_else(|| panic!("the guest has no {vendor}:{device}"));
    let address = card.file_name().and_then(|name| name.to_str()).expect("an address").to_owned();
    let holder = fs::read_link(card.join("driver")).ok();
    if !holder.as_ref().is_some_and(|driver| driver.ends_with("vfio-pci")) {
        fs::write(card.join("driver_override"), "vfio-pci").expect("root may");
        if holder.is_some() {
            fs::write(card.join("driver/unbind"), &address).expect("root may");
        }
        fs::write("/sys/bus/pci/drivers_probe", &address).expect("root may");
    }
    address
}

/// The unit with a configuration of its own, freshly started. Starting it ends all processes of earlier tests.
pub struct Unit;

impl Unit {
    /// Starts the unit with these nodes and one NIC a card: eth0 and eth1, both red's.
    pub fn begin(nodes: &str) -> Unit {
        Self::with(nodes, ["red"; 2])
    }

    /// Starts the unit with these nodes, and eth0 and eth1 for these owners.
    pub fn with(nodes: &str, owners: [&str; 2]) -> Unit {
        stop_all();
        let mut text = format!("[daemon]\nhang_after_ms = 5000\ndeadline_ms = 20000\nprepare_ms = 20000\n{nodes}\n");
        for (number, (card, owner)) in CARDS.into_iter().zip(owners).enumerate() {
            let address = bound(card);
            text += &format!("[[nic]]\nname = \"eth{number}\"\ndevice = \"vfio:{address}\"\nnode = {owner:?}\n");
        }
        fs::write("/etc/tasuki.toml", text).expect("a file");
        run("systemctl", &["start", UNIT]);
        Unit
    }

    /// Waits until both NICs are driven, have a link and stand-bys.
    pub fn is_at_work(&self) {
        let is_so = || {
            let workers = ask(&["worker", "list"]);
            let (nics, workers) = (ask(&["nic", "list"]), workers.as_array().expect("workers").clone());
            let driven = nics.as_array().expect("NICs").iter().all(|nic| nic["is"] == "driven" && nic["link"] == "up");
            // Each of two may drive one of the NICs, and stand by for the other.
            let fit = |worker: &&Value| worker["is"] == "stands by" || worker["is"] == "drives";
            (driven && workers.iter().filter(fit).count() > 1).then_some(())
        };
        until("both NICs are driven, and somebody stands by", is_so);
    }

    /// Waits until a node has a worker that could take a NIC.
    pub fn has_a_worker(&self, node: &str) {
        let is_ready = || {
            let workers = ask(&["worker", "list"]);
            let mut workers = workers.as_array().expect("workers").iter();
            workers.any(|worker| worker["node"] == node && worker["is"] != "starting").then_some(())
        };
        until("a node has a worker", is_ready);
    }

    /// Returns the main process of the unit.
    pub fn pid(&self) -> u32 {
        property("MainPID").parse().expect("a number")
    }

    /// Returns the processes of a node's workers.
    pub fn workers(&self, node: &str) -> Vec<u32> {
        let workers = ask(&["worker", "list"]);
        let of_node = workers.as_array().expect("workers").iter().filter(|worker| worker["node"] == node);
        of_node.map(|worker| u32::try_from(worker["pid"].as_u64().expect("a number")).expect("a pid")).collect()
    }

    /// Returns the process that drives a NIC.
    pub fn driver(&self, nic: &str) -> u32 {
        let nics = ask(&["nic", "list"]);
        let nic = nics.as_array().expect("NICs").iter().find(|it| it["name"] == nic).expect("it is there");
        let workers = ask(&["worker", "list"]);
        let mut workers = workers.as_array().expect("workers").iter();
        let driver = workers.find(|worker| worker["worker"] == nic["worker"]).expect("it is driven");
        u32::try_from(driver["pid"].as_u64().expect("a number")).expect("a pid")
    }

    /// Returns the process of the keeper.
    pub fn keeper(&self) -> u32 {
        let keepers: Vec<u32> =
            process::running().filter(|(_, line)| line.contains("tasukid\0keep\0")).map(|(pid, _)| pid).collect();
        assert_eq!(keepers.len(), 1, "one process keeps what must outlive tasukid");
        keepers[0]
    }
}

/// Kills processes at once.
pub fn kill(pids: &[u32]) {
    let open = |pid: &u32| {
        let pid = Pid::from_raw(i32::try_from(*pid).expect("a pid")).expect("a pid");
        rustix::process::pidfd_open(pid, PidfdFlags::empty()).expect("a process")
    };
    let processes: Vec<_> = pids.iter().map(open).collect();
    for process in &processes {
        rustix::process::pidfd_send_signal(process.as_fd(), Signal::KILL).expect("root may");
    }
}

/// Runs `tasuki stop`, which ends everything; systemd does not restart it.
pub fn stop_all() {
    if property("ActiveState") == "inactive" {
        return;
    }
    run("tasuki", &["stop"]);
    until("tasuki stop ends the unit", || (property("ActiveState") == "inactive").then_some(()));
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(property("ActiveState"), "inactive", "systemd starts tasukid again though tasuki stop has ended it");
    let left: Vec<_> = process::running().filter(|(_, line)| line.contains("tasuki")).collect();
    assert!(left.is_empty(), "tasuki stop leaves {left:?}");
}

/// Returns the control group (version 2) of a process.
pub fn group(pid: u32) -> PathBuf {
    let of_it = fs::read_to_string(format!("/proc/{pid}/cgroup")).expect("a process");
    let path = of_it.trim().strip_prefix("0::/").unwrap_or_else(|| panic!("no group of version 2 alone: {of_it}"));
    Path::new("/sys/fs/cgroup").join(path)
}
