//! The program that the daemon goes on as: the next version, in the same process. Whoever watches the process (systemd,
//! a terminal) sees no end, and the workers see what they see of any other daemon that takes over.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use tasuki_relay::message::PROTOCOL_VERSION;

use crate::config::not_startable;
use crate::registry::FORMAT;

/// The option by which a tasukid says its version and whether it takes the configuration, and then ends.
pub const CHECK: &str = "--check";

/// Time for that.
const WITHIN: Duration = Duration::from_secs(10);
/// Pause between two looks whether it has ended.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Returns the path of this program. Another file may lie there by now.
fn own() -> io::Result<PathBuf> {
    let path = std::env::current_exe()?;
    let gone = path.to_str().and_then(|path| path.strip_suffix(" (deleted)")).map(PathBuf::from);
    Ok(gone.unwrap_or(path))
}

/// Checks that a program, by default the file at the path of this one, is a tasukid that takes this one's
/// configuration. The program may run on these CPUs, as it may when it goes on. Returns its path and its version, or
/// else a sentence. Waits for the program, and moves this thread to these CPUs.
pub fn check(with: Option<PathBuf>, cpus: &[u32]) -> Result<(PathBuf, String), String> {
    let with = with.map_or_else(own, Ok).map_err(|error| format!("this program's own file is not known ({error})"))?;
    let why = if with.is_absolute() { not_startable(&with) } else { Some("is not a path from /; name one") };
    if let Some(why) = why {
        return Err(format!("{} {why}", with.display()));
    }
    crate::aside::stay(cpus);
    let mut command = Command::new(&with);
    command.args(words()).arg(CHECK).env_remove("NOTIFY_SOCKET");
    let output = within(&mut command).map_err(|why| format!("{} {why}", with.display()))?;
    let (said, why) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if !output.status.success() {
        let last = why.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it does not say why");
        let last = crate::log::plain(last.strip_prefix("tasukid: ").unwrap_or(last), 1000);
        return Err(format!("{} does not begin here, so tasukid stays what it is: {last}", with.display()));
    }
    let said = said.trim_end().strip_prefix("tasukid ").and_then(|rest| rest.split_once(' '));
    let Some((version, rest)) = said else {
        return Err(format!("{} is no tasukid; name one", with.display()));
    };
    if !rest.ends_with(&shared()) {
        return Err(format!(
            "{} cannot take over, since it {}, and this tasukid has {}; stop all (tasuki stop), and start that one",
            with.display(),
            crate::log::plain(rest, 1000),
            shared()
        ));
    }
    Ok((with, crate::log::plain(version, 100)))
}

/// Returns what a tasukid that takes over must have in common with the one before it, as text.
fn shared() -> String {
    format!("registry {FORMAT} and messages {PROTOCOL_VERSION}")
}

/// Returns the line that a tasukid prints with [`CHECK`] if it takes this configuration.
pub fn line(file: &Path) -> String {
    format!("tasukid {} takes the configuration {} and has {}", env!("CARGO_PKG_VERSION"), file.display(), shared())
}

/// Runs a command to its end. An error is the end of a sentence that begins with the program.
fn within(command: &mut Command) -> Result<Output, String> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|error| format!("does not start: {error}"))?;
    let until = Instant::now() + WITHIN;
    while child.try_wait().map_err(|error| format!("cannot be waited for: {error}"))?.is_none() {
        if Instant::now() > until {
            let _ = child.kill();
            let _ = child.wait();
            return Err(format!("has not said within {} s whether it takes the configuration", WITHIN.as_secs()));
        }
        std::thread::sleep(LOOK_EVERY);
    }
    // What it says fits into a pipe, or it never ends.
    child.wait_with_output().map_err(|error| format!("cannot be read: {error}"))
}

/// Returns this process's arguments without the program's name.
fn words() -> impl Iterator<Item = OsString> {
    std::env::args_os().skip(1)
}

/// Goes on as a checked program, with the same arguments. Returns only if neither it nor this very program starts.
pub fn become_it(with: &Path) -> io::Error {
    let error = Command::new(with).args(words()).exec();
    tracing::error!("{} does not start ({error}); tasukid stays what it is", with.display());
    Command::new("/proc/self/exe").args(words()).exec()
}

/// Reaps the children that the program before this one in the same process left dead.
pub fn reap() {
    while let Ok(Some(_)) = rustix::process::waitpid(None, rustix::process::WaitOptions::NOHANG) {}
}
