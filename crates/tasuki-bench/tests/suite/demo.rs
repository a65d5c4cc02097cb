//! The demonstration with this machine's kernel on the wire. Needs root.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use rustix::process::Signal;
use tasuki_testing::{Program, beside};

const BENCH: &str = env!("CARGO_BIN_EXE_tasuki-bench");

#[test]
fn a_node_answers_the_kernels_ping_behind_a_card_on_a_tap() {
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: needs root");
    }
    if ["tasukid", "tasuki-worker", "tasuki-sim"].iter().any(|program| beside(BENCH, program).is_none()) {
        return println!("skipped: needs the other programs: cargo build --workspace --bins");
    }
    if Command::new("ping").arg("-V").output().is_err() {
        return println!("skipped: needs ping: apt-get install iputils-ping");
    }
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new("unshare");
    command.args(["--net", "--", BENCH, "demo-ping"]).arg(folder.path()).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut demo = Program::start(&mut command);
    let mut lines = BufReader::new(demo.0.stdout.take().unwrap()).lines().map_while(Result::ok);
    // It has pinged the node once when it says this.
    let answered = lines.any(|line| line.contains("this machine's own kernel on the wire"));
    assert!(answered, "its words are above");
    // An interrupted demo ends its daemon.
    demo.signal(Signal::INT);
    demo.end();
}
