//! The bench `vni` on a machine that lacks the programs it needs.

use std::process::Command;

/// Returns the error text of `tasuki-bench vni` on a machine without any program. The command must fail.
fn said(words: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tasuki-bench"));
    let output = command.arg("vni").args(words).env("PATH", "").output().unwrap();
    assert!(!output.status.success());
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn what_is_left_out_is_said_with_what_it_needs() {
    let said = said(&["--quick", "--only", "memif"]);
    let expected = "memif is left out: it needs the program dpdk-testpmd (apt-get install dpdk)\n\
                    tasuki-bench: none of the cases that were asked for can be run here; see above\n";
    assert_eq!(said, expected);
}

#[test]
fn a_case_that_there_is_not_is_refused_with_those_that_there_are() {
    let said = said(&["--only", "pigeon"]);
    assert!(said.contains("no case begins with pigeon; the cases are copy-64, "), "{said}");
    assert!(said.contains("memory-100, idle-32"), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
}

#[test]
fn a_node_started_by_hand_says_that_a_bench_starts_it() {
    for words in [&["tap-node", "0", "0"][..], &["idle-node", "0"]] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tasuki-bench"));
        let output = command.args(words).stdin(std::process::Stdio::null()).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && said.contains("started by a bench and not by hand"), "{said}");
    }
}
