//! `tasuki` executes the program that a command needs, and names a missing one.

use std::path::Path;
use std::process::{Command, Output, Stdio};

const TASUKI: &str = env!("CARGO_BIN_EXE_tasuki");

fn run(program: &Path, words: &[&str]) -> Output {
    Command::new(program).args(words).stdin(Stdio::null()).output().expect("a program that was built")
}

fn errors(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).expect("text")
}

#[test]
fn it_is_the_worker_for_a_nic_and_the_model_for_a_sim() {
    // A build of the whole workspace puts them beside it.
    for (program, words, what) in [
        ("tasuki-worker", &["nic", "probe", "eth0"][..], "\"eth0\" names no card"),
        ("tasuki-sim", &["sim", "nic", "--stdin", "--rate", "5"][..], "--source <COUNT>"),
    ] {
        if !Path::new(TASUKI).with_file_name(program).exists() {
            println!("skipped: needs {program} beside tasuki: cargo build --package {program}");
            return;
        }
        let output = run(Path::new(TASUKI), words);
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        let errors = errors(&output);
        assert!(errors.contains(what), "{errors}");
        assert!(!errors.contains(program), "it has one name for the user: {errors}");
    }
}

#[test]
fn a_program_that_is_missing_is_named() {
    let folder = tempfile::tempdir_in(Path::new(TASUKI).with_file_name("")).expect("a folder");
    let alone = folder.path().join("tasuki");
    // Not a copy: the kernel does not execute a file that a child of another test may have open for writing.
    std::fs::hard_link(TASUKI, &alone).expect("a link");
    let outputs = [run(&alone, &["nic", "probe", "sim"]), run(&alone, &["sim", "nic"])];
    for (output, program) in outputs.iter().zip(["tasuki-worker", "tasuki-sim"]) {
        let errors = errors(output);
        assert_eq!((output.status.code(), errors.lines().count()), (Some(1), 1), "{errors}");
        assert!(errors.contains(&format!("build it: cargo build --package {program}")), "{errors}");
    }
}

#[test]
fn nothing_at_all_is_a_matter_of_usage() {
    for words in [&[][..], &["fly"]] {
        let output = run(Path::new(TASUKI), words);
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert!(errors(&output).contains("Usage: tasuki"), "{output:?}");
    }
}
