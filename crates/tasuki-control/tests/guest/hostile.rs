//! Malicious owners that drive their cards behind VFIO, and must give them to a node that does not trust them.

use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use crate::traffic::Traffic;
use crate::unit::{Unit, ask, lives, log, run};
use crate::wait::until;
use crate::{WIRES, field};

/// Returns two owners whose programs torment their cards for as long as they run
/// (crates/tasuki-worker/examples/hostile/card.rs), and one node that trusts neither.
fn nodes() -> String {
    let hostile = |name: &str, orders: &str| {
        let program = format!("program = {{ path = \"/usr/bin/hostile\", options = {orders:?} }}");
        format!("[[node]]\nname = {name:?}\nwork = {{ {program} }}\n")
    };
    hostile("red", "first card second-queue; first card control-queue")
        + &hostile("blue", "first card packet-buffer")
        + "[[node]]\nname = \"green\"\nwork = \"echo\"\n"
}

/// Counts the IOMMU's refusals of a card's memory accesses, as far as the kernel logs them: ten times in five
/// seconds. (QEMU's virtio-net is refused address 0 now and then, whichever process drives it.)
fn faults(wire: &str) -> usize {
    let device = if wire == WIRES[0] { "[01:00.0]" } else { "[02:00.0]" };
    let said = run("journalctl", &["--dmesg", "--no-pager", "--output", "cat"]);
    let is = |line: &&str| line.contains("DMAR:") && line.contains(device) && line.contains("fault addr 0x");
    said.lines().filter(is).filter(|line| !line.contains("fault addr 0x0 ")).count()
}

/// Gives a NIC by that method, or the best one; returns the outcome. Checks that no process of its old node that had
/// it runs any more.
fn give(unit: &Unit, nic: &str, from: &str, to: &str, method: Option<&str>) -> Value {
    unit.has_a_worker(to);
    let had: Vec<u32> = given(from, nic);
    assert!(!had.is_empty(), "{from} has {nic}");
    let how: Vec<&str> = method.into_iter().flat_map(|method| ["--method", method]).collect();
    let relay = ask(&[&["nic", "give", nic, "--to", to][..], &how].concat())["relays"][0].clone();
    println!("{}", relay["sentence"]);
    assert_eq!((&relay["done"], &relay["node"]), (&true.into(), &to.into()), "{relay}\n{}", log());
    until("the old owner's processes are gone", || had.iter().all(|pid| !lives(*pid)).then_some(()));
    relay
}

/// Returns the processes of a node that drive a NIC, or stand by for it.
fn given(node: &str, nic: &str) -> Vec<u32> {
    let workers = ask(&["worker", "list"]);
    let has = |worker: &&Value| {
        let drives = worker["drives"].as_array().is_some_and(|drives| drives.contains(&nic.into()));
        worker["node"] == node && (drives || worker["is"] == "stands by")
    };
    let of_node = workers.as_array().expect("workers").iter().filter(has);
    of_node.map(|worker| u32::try_from(worker["pid"].as_u64().expect("a number")).expect("a pid")).collect()
}

/// Checks a card under traffic: no frame is lost, no foreign frame comes, and the card accesses no forbidden memory.
fn is_sound(what: &str, wire: &'static str) {
    let (traffic, before) = (Traffic::begin(wire), faults(wire));
    (0..4).for_each(|_| traffic.for_a_while());
    let outcome = traffic.finish();
    println!("{what}: {outcome:?}");
    assert_eq!((outcome.lost, outcome.again, outcome.foreign), (0, 0, 0), "{what}: {outcome:?}\n{}", log());
    assert_eq!(faults(wire), before, "{what}: the card reaches for what its last owner has set up\n{}", log());
}

fn is_driven(nic: &str, by: &str) {
    until("it is driven", || {
        let nics = ask(&["nic", "list"]);
        let mut nics = nics.as_array().expect("NICs").iter();
        nics.any(|it| it["name"] == nic && it["is"] == "driven" && it["node"] == by).then_some(())
    });
}

/// The tricks of a last owner are undone, or make the next owner refuse the method. Either way the next owner gets
/// the card, and its memory is not read or written on behalf of another.
#[test]
fn a_hostile_last_owner_leaves_nothing_in_a_card_that_harms_the_next() {
    let unit = Unit::begin(&nodes());
    unit.is_at_work();
    let [e1000e, virtio] = WIRES;
    // Its second queue requests the memory of a possible next owner. The IOMMU refuses that, and the refusals show
    // that the trick works.
    until("the trick works", || (faults(e1000e) > 0).then_some(()));
    println!("{} faults of the IOMMU under the hostile owner", faults(e1000e));
    let relay = give(&unit, "eth0", "red", "green", None);
    assert_eq!(relay["method"], "repoint", "what it has left is undone: {relay}");
    is_sound("a second queue, repoint", e1000e);
    give(&unit, "eth0", "green", "red", None);
    is_driven("eth0", "red");
    std::thread::sleep(Duration::from_millis(500));
    let relay = give(&unit, "eth0", "red", "green", Some("cold"));
    assert_eq!(relay["method"], "cold");
    is_sound("a second queue, cold", e1000e);

    give(&unit, "eth0", "green", "blue", None);
    is_driven("eth0", "blue");
    std::thread::sleep(Duration::from_millis(500));
    // A request for one method alone fails with the reason, and its node still has the NIC.
    let only = Command::new("tasuki").args(["nic", "give", "eth0", "--to", "green", "--method", "repoint"]).output();
    let sentence = String::from_utf8_lossy(&only.expect("it is installed").stderr).into_owned();
    println!("{sentence}");
    assert!(sentence.contains("only a reset undoes (0x2); hand it over cold"), "{sentence}\n{}", log());
    is_driven("eth0", "blue");
    std::thread::sleep(Duration::from_millis(500));
    let relay = give(&unit, "eth0", "blue", "green", None);
    let because = relay["because"].as_str().expect("a sentence");
    assert!(
        relay["method"] == "cold" && because.contains("repoint was refused (") && because.contains("0x2"),
        "{relay}"
    );
    is_sound("a packet buffer without room", e1000e);

    let relay = give(&unit, "eth1", "red", "green", None);
    assert_eq!(relay["method"], "cold", "a virtio device's other queues nobody can see: {relay}");
    is_sound("a queue for commands elsewhere", virtio);
    for pid in unit.workers("green") {
        assert_eq!(field(pid, "Seccomp"), "2", "the new owner is confined");
    }
}
