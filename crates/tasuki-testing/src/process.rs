//! Facts about any process, from `/proc`. A process is its number, or `self`.

use std::fmt::Display;
use std::fs;

use rustix::process::Signal;

/// `PF_EXITING` of `include/linux/sched.h`: the process takes no signals any more, and runs nothing of its program.
const EXITING: u32 = 0x4;

/// Returns a field of the file `status`: its words, with one space between them. Returns `None` if the process or
/// the field does not exist.
pub fn status(process: impl Display, field: &str) -> Option<String> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let words = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    Some(words.split_whitespace().collect::<Vec<_>>().join(" "))
}

/// Returns a field of the file `status` that is a size, in bytes. Panics if there is none.
pub fn status_bytes(process: impl Display, field: &str) -> u64 {
    let size = status(process, field).expect("a process with this field");
    size.strip_suffix(" kB").and_then(|kib| kib.parse::<u64>().ok()).expect("a size in KiB") * 1024
}

/// Returns the name of a process, and the fields that follow it in the file `stat`: its state, its parent, and more.
pub fn stat(process: impl Display) -> Option<(String, Vec<String>)> {
    let text = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    let (name, fields) = text.rsplit_once(')')?;
    Some((name.split_once('(')?.1.to_owned(), fields.split_whitespace().map(str::to_owned).collect()))
}

/// Returns whether a process exists and is not a zombie.
pub fn lives(process: impl Display) -> bool {
    stat(process).is_some_and(|(_, fields)| fields[0] != "Z" && fields[0] != "X")
}

/// Returns whether a process has been killed, by SIGKILL, though it may live until the kernel has unmapped its memory.
/// A process that does not exist was not.
pub fn is_killed(process: impl Display) -> bool {
    let kill = 1_u64 << (Signal::KILL.as_raw() - 1);
    let is_set =
        |field| status(&process, field).is_some_and(|mask| u64::from_str_radix(&mask, 16).unwrap_or(0) & kill != 0);
    // The signal waits for the process until that takes it, and from then on the process exits: look in this order.
    is_set("ShdPnd")
        || is_set("SigPnd")
        || stat(&process).is_some_and(|(_, fields)| {
            fields.get(6).and_then(|flags| flags.parse::<u32>().ok()).is_some_and(|flags| flags & EXITING != 0)
        })
}

/// Lists all processes that run a program, with the words of their command lines, each with a zero byte behind it.
pub fn running() -> impl Iterator<Item = (u32, String)> {
    let all = fs::read_dir("/proc").expect("processes").flatten();
    all.filter_map(|process| {
        let pid = process.file_name().to_str()?.parse().ok()?;
        let words = fs::read(process.path().join("cmdline")).ok().filter(|words| !words.is_empty())?;
        Some((pid, String::from_utf8_lossy(&words).into_owned()))
    })
}

/// Returns how many descriptors a process has; 0 if there is no such process.
pub fn descriptors(process: impl Display) -> usize {
    fs::read_dir(format!("/proc/{process}/fd")).map_or(0, Iterator::count)
}

/// Returns how many eventfds a process has. Panics if there is no such process.
pub fn eventfds(process: impl Display) -> usize {
    let open = fs::read_dir(format!("/proc/{process}/fd")).expect("a process").flatten();
    let targets = open.filter_map(|entry| fs::read_link(entry.path()).ok());
    targets.filter(|target| target.as_os_str() == "anon_inode:[eventfd]").count()
}

/// Returns the dead children of a process that it has not reaped.
pub fn unreaped(parent: u32) -> Vec<String> {
    let processes = fs::read_dir("/proc").expect("a folder").flatten();
    let names = processes.filter_map(|entry| entry.file_name().into_string().ok());
    let is_its =
        |name: &String| stat(name).is_some_and(|(_, fields)| fields[0] == "Z" && fields[1] == parent.to_string());
    names.filter(is_its).collect()
}
