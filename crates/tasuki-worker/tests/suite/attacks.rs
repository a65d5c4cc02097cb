//! Attacks of a program on other processes once its runtime has confined it (stage two): the kernel ends the
//! program, and its victim goes on.
//!
//! Attacks of docs/design/threat-model.md.

use std::path::Path;

use tasuki_relay::message::Work;
use tasuki_relay::wire::{Report, Use};

use crate::daemon::{Nic, Node, Worker};
use crate::programs::{Model, folder, need_model};

/// Returns a node whose program tries these attacks when it is given its NIC.
fn hostile(folder: &Path, options: String, first: u32) -> Option<Node> {
    let program = Path::new(env!("CARGO_BIN_EXE_tasuki-worker")).with_file_name("examples").join("hostile");
    if !program.exists() {
        println!("skipped: needs the examples: cargo build --package tasuki-worker --examples --all-features");
        return None;
    }
    let mut node = Node::beside(folder, Work::Program, first);
    (node.program, node.options) = (program, options);
    Some(node)
}

/// Returns the kernel's limits of the worker: descriptors, locked memory, and so on.
fn limits(worker: &Worker) -> String {
    std::fs::read_to_string(format!("/proc/{}/limits", worker.process.id())).expect("a child of ours")
}

/// Each attack with its row of the threat model.
const ATTACKS: &[(&str, &str)] = &[
    ("T11", "prlimit"),
    ("T11", "prlimit-self"),
    ("T12", "setown"),
    ("T12", "setsig"),
    ("T12", "async"),
    ("T12", "notify"),
    ("T12", "lease"),
    ("T13", "code"),
    ("T13", "code-map"),
    ("T14", "create"),
    #[cfg(target_arch = "x86_64")]
    ("T14", "create-old"),
];

/// rows: in the table
#[test]
fn a_confined_program_that_reaches_for_others_is_killed_and_they_go_on() {
    need_model!();
    let folder = folder();
    let model = Model::start(folder.path(), &[]);
    let nic = Nic::open(&model.socket, &[]);
    let mut victim = Node::new(folder.path(), Work::Echo).ready(&nic, &[]);
    let before = limits(&victim);
    let pid = victim.process.id();
    for ((_, attack), first) in ATTACKS.iter().zip((10..).step_by(10)) {
        let Some(mut node) = hostile(folder.path(), format!("then {attack} {pid}"), first) else { return };
        // To open files to read them permits nothing else.
        node.files = true;
        let mut worker = node.worker(&[]);
        worker.give(&nic);
        worker.prepare(&nic, Use::Upgrade);
        assert_eq!(worker.report_or_end(&nic), None, "it tried {attack}, and lives");
        assert_eq!(worker.process.end(), None, "{attack}: it is not the kernel that ended it");
    }
    assert_eq!(limits(&victim), before);
    assert!(victim.process.is_running());
    let Some(mut node) = hostile(folder.path(), "then nothing".to_owned(), 500) else { return };
    let mut worker = node.worker(&[]);
    worker.give(&nic);
    worker.prepare(&nic, Use::Upgrade);
    assert_eq!(worker.report(&nic), Report::Ready, "who tries nothing is ready: {:?}", worker.told);
    drop((worker, victim));
}
