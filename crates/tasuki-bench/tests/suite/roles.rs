//! The hidden subcommands, tried by hand.

use std::process::{Command, Stdio};

#[test]
fn a_role_started_by_hand_says_that_a_bench_starts_it() {
    let output = Command::new(env!("CARGO_BIN_EXE_tasuki-bench"))
        .args(["role", "serve", "ping-pong-tight"])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success());
    assert!(said.contains("roles are started by a bench and not by hand"), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
}
