//! Runs a command, shows its output line by line, and passes each line to a reader.

use std::cell::RefCell;
use std::fs;
use std::io::{self, BufRead, BufReader, IsTerminal, PipeReader};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use anyhow::Context;

use crate::checkout::command_line;

/// Interval at which we check whether a silent command still runs.
const POLL: Duration = Duration::from_millis(100);

/// Number of silent polls after the command's end until we stop waiting for output: 3 s. Only a process that outlived
/// the command can hold the pipe open for so long.
const SILENT_POLLS: u32 = 30;

thread_local! {
    static PREFIX: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Puts these words before each line that a command of this thread prints from now on, beside those of another.
pub fn prefix_lines(prefix: impl Into<String>) {
    PREFIX.set(prefix.into());
}

/// Gives the commands that this thread starts from now on only the CPU time that no other process wants (SCHED_IDLE).
pub fn only_in_idle_time() {
    // The thread's own number, after "PID/task/".
    let thread = fs::read_link("/proc/thread-self").ok();
    let number = thread.as_deref().and_then(Path::file_name);
    let mut chrt = Command::new("chrt");
    chrt.args(["--idle", "--pid", "0"]).args(number);
    if !chrt.status().is_ok_and(|status| status.success()) {
        println!("xtask: what runs beside the tests takes as much CPU time as they do: chrt (util-linux) failed");
    }
}

/// Runs `command` without input, repeats its output line by line, and passes each line to `read`, without colours.
/// Standard output and standard error come through one pipe, in order.
pub fn run(command: &mut Command, mut read: impl FnMut(&str)) -> anyhow::Result<ExitStatus> {
    run_showing(command, |line| {
        read(line);
        true
    })
}

/// As [`run`], for output that needs no reader. Returns whether the command succeeded.
pub fn succeeds(command: &mut Command) -> anyhow::Result<bool> {
    Ok(run(command, |_| {})?.success())
}

/// As [`run`], but repeats only the lines for which `wanted` returns true.
pub fn run_showing(command: &mut Command, mut wanted: impl FnMut(&str) -> bool) -> anyhow::Result<ExitStatus> {
    let prefix = PREFIX.with_borrow(String::clone);
    println!("{prefix}$ {}", command_line(command));
    let (reader, writer) = io::pipe().context("cannot make a pipe")?;
    if io::stdout().is_terminal() {
        command.env("CARGO_TERM_COLOR", "always");
    }
    command.stdin(Stdio::null()).stdout(writer.try_clone().context("cannot copy a pipe")?).stderr(writer);
    let mut child = command.spawn().with_context(|| format!("cannot start `{}`", command_line(command)))?;
    // The command object holds our copies of the pipe's write end. Until they are closed, reading never ends.
    command.stdout(Stdio::null()).stderr(Stdio::null());

    let lines = lines_of(reader);
    let mut silent = 0;
    loop {
        match lines.recv_timeout(POLL) {
            Ok(line) => {
                silent = 0;
                if wanted(&without_colours(&line)) {
                    println!("{prefix}{line}");
                }
            }
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) if child.try_wait()?.is_none() => {}
            Err(RecvTimeoutError::Timeout) if silent < SILENT_POLLS => silent += 1,
            Err(RecvTimeoutError::Timeout) => {
                println!("xtask: a process outlived its command and holds the output open; not waiting for it");
                break;
            }
        }
    }
    child.wait().with_context(|| format!("cannot wait for `{}`", command_line(command)))
}

/// Reads the lines of a pipe in a separate thread, so that the caller can wait for them with a timeout.
fn lines_of(pipe: PipeReader) -> Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let mut pipe = BufReader::new(pipe);
        let mut line = Vec::new();
        while pipe.read_until(b'\n', &mut line).is_ok_and(|length| length > 0) {
            let text = String::from_utf8_lossy(&line).trim_end_matches(['\n', '\r']).to_owned();
            if sender.send(text).is_err() {
                return;
            }
            line.clear();
        }
    });
    receiver
}

/// Removes the escape sequences that colour a terminal: ESC `[` parameters letter.
fn without_colours(line: &str) -> String {
    let mut plain = String::with_capacity(line.len());
    let mut rest = line;
    while let Some((before, sequence)) = rest.split_once("\x1b[") {
        plain.push_str(before);
        rest = sequence.trim_start_matches(|c: char| !c.is_ascii_alphabetic());
        rest = rest.get(1..).unwrap_or_default();
    }
    plain.push_str(rest);
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_do_not_hide_words() {
        assert_eq!(without_colours("\x1b[1m\x1b[91merror\x1b[0m: test failed"), "error: test failed");
        assert_eq!(without_colours("plain"), "plain");
        assert_eq!(without_colours("cut off \x1b[1"), "cut off ");
    }

    #[test]
    fn both_outputs_are_read_in_the_order_they_were_written() {
        let mut lines = Vec::new();
        let mut shell = Command::new("sh");
        shell.args(["-c", "echo one; echo two >&2; echo three; exit 3"]);

        let status = run(&mut shell, |line| lines.push(line.to_owned())).unwrap();

        assert_eq!(lines, ["one", "two", "three"]);
        assert_eq!(status.code(), Some(3));
    }

    #[test]
    fn what_runs_in_idle_time_says_so_and_nothing_else_does() {
        // Field 41 of a process's line: its scheduling policy.
        let policy = || {
            let mut said = String::new();
            run(Command::new("cut").args(["-d ", "-f41", "/proc/self/stat"]), |line| said = line.to_owned()).unwrap();
            said
        };
        let beside = thread::spawn(move || {
            only_in_idle_time();
            policy()
        });
        assert_eq!(beside.join().unwrap(), "5", "SCHED_IDLE");
        assert_eq!(policy(), "0", "SCHED_OTHER");
    }

    #[test]
    fn a_process_left_behind_does_not_hold_us_up() {
        let mut shell = Command::new("sh");
        shell.args(["-c", "sleep 600 & echo $!"]);
        let mut left_behind = None;

        let status = run(&mut shell, |line| left_behind = Some(line.to_owned())).unwrap();

        assert!(status.success());
        Command::new("kill").arg(left_behind.unwrap()).status().unwrap();
    }
}
