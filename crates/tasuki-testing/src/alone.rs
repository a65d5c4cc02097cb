//! Tests in a process of their own: such a test changes its process, or cannot bear what others do in it.

use std::any::type_name;
use std::process::Command;

use rustix::process::Signal;

/// Set in a process that runs one test.
const ALONE: &str = "TASUKI_ALONE";

/// Returns true in a process that runs only `test`, the calling test. In the process of the whole suite, runs that
/// process and returns false at its end.
pub fn alone<F: Fn()>(test: F) -> bool {
    alone_under(&[], test)
}

/// Like [`alone`], with the command `under` between the two processes.
pub fn alone_under<F: Fn()>(under: &[&str], _test: F) -> bool {
    // The path of a test as libtest writes it: without the crate.
    let name = type_name::<F>().split_once("::").expect("a path").1;
    if std::env::var_os(ALONE).is_some_and(|alone| alone == name) {
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).expect("a signal");
        // libtest has written the start of this line.
        println!();
        return true;
    }
    let this = std::env::current_exe().expect("the path of this program");
    let mut command = match under {
        [] => Command::new(this),
        [first, rest @ ..] => {
            let mut command = Command::new(first);
            command.args(rest).arg(this);
            command
        }
    };
    let output = command.args(["--exact", name, "--nocapture"]).env(ALONE, name).output();
    let output = output.expect("a program that can be started");
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    for line in said.lines() {
        // The suite's summary has the reason of a skipped test, and counts no test of the other process.
        println!("{}{line}", if line.starts_with("skipped: ") { "" } else { "  | " });
    }
    assert!(output.status.success() && said.contains("test result: ok. 1 passed"), "{name}, alone: {}", output.status);
    false
}
