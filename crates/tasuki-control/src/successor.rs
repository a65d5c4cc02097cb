//! The program that the daemon goes on as: the next version, in the same process. systemd, or a terminal, sees no end of
//! the process, and the workers see what they see of any other daemon that takes over.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::MemfdFlags;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};
use tasuki_relay::message::PROTOCOL_VERSION;

use crate::channel;
use crate::registry::FORMAT;
use crate::spawn::not_startable;

/// The option by which a tasukid says its version and whether it takes the configuration, and then ends.
pub const CHECK: &str = "--check";

/// Time for that.
const CHECK_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause between two looks whether it has ended.
const POLL_EVERY: Duration = Duration::from_millis(10);
/// Pause between two looks for children that have ended.
const REAP_EVERY: Duration = Duration::from_secs(1);

/// Returns the path of this program. Another file may lie there by now.
fn own() -> io::Result<PathBuf> {
    let path = std::env::current_exe()?;
    let gone = path.to_str().and_then(|path| path.strip_suffix(" (deleted)")).map(PathBuf::from);
    Ok(gone.unwrap_or(path))
}

/// Checks that a program, by default the file at the path of this one, is a tasukid that takes this one's
/// configuration. The program may run on these CPUs, as it may when it goes on. Returns its path, its version, and what else it
/// says of itself ([`MANY_FDS`], [`LIMITS`], [`LOANS`], [`SIGNALS`], [`KEPT`]), or else a sentence. Waits for the program, and moves this thread to these CPUs.
pub fn check(with: Option<PathBuf>, cpus: &[u32]) -> Result<(PathBuf, String, String), String> {
    let with = with.map_or_else(own, Ok).map_err(|error| format!("this program's own file is not known ({error})"))?;
    if let Some(why) = not_startable(&with) {
        return Err(format!("{} {why}", with.display()));
    }
    crate::housekeeping_cpus::pin_this_thread(cpus);
    let mut command = Command::new(&with);
    command.args(words()).arg(CHECK).env_remove("NOTIFY_SOCKET");
    let (status, said, why) = within(&mut command).map_err(|why| format!("{} {why}", with.display()))?;
    if !status.success() {
        if why.contains(CHECK) {
            return Err(format!(
                "{} is from before tasuki upgrade, and cannot take over by it; stop tasukid (SIGTERM), and start that one",
                with.display()
            ));
        }
        // Another program may not know the option, and explain itself below that.
        let error = why.lines().find_map(|line| line.strip_prefix("error: "));
        let last = error.or_else(|| why.lines().rfind(|line| !line.trim().is_empty()));
        let last = last.map(|last| crate::log::plain(last.strip_prefix("tasukid: ").unwrap_or(last), 1000));
        let last = last.unwrap_or_else(|| format!("it does not say why ({status})"));
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
    Ok((with, crate::log::plain(version, 100), rest.to_owned()))
}

/// Returns what a tasukid that takes over must have in common with the one before it, as text.
fn shared() -> String {
    format!("registry {FORMAT} and messages {PROTOCOL_VERSION}")
}

/// Words of a tasukid that takes, as its keeper does, a virtual machine with more descriptors than
/// [`NARROW_FDS_MAX`](tasuki_relay::message::NARROW_FDS_MAX).
pub const MANY_FDS: &str = ", keeps machines of more than 8 pairs of queues,";

/// Words of a tasukid that takes limits of an interface with several queues.
pub const LIMITS: &str = " keeps limits over several queues,";

/// Words of a tasukid that takes a virtual machine which several nodes serve.
pub const LOANS: &str = " shares machines among nodes,";

/// Words of a tasukid that takes the signals that the one before it holds back ([`hold_signals`](crate::spawn::hold_signals)).
pub const SIGNALS: &str = " takes signals that were held back,";

/// Words of a tasukid that takes what the keeper of the one before it has, if that dies meanwhile ([`hand_on`]).
pub const KEPT: &str = " needs no keeper for that,";

/// Returns the line that a tasukid prints with [`CHECK`] if it takes this configuration.
pub fn line(file: &Path) -> String {
    let version = env!("CARGO_PKG_VERSION");
    format!(
        "tasukid {version} takes the configuration {}{MANY_FDS}{LIMITS}{LOANS}{SIGNALS}{KEPT} and has {}",
        file.display(),
        shared()
    )
}

/// Bytes of what it says that are read.
const SAID_MAX: usize = 64 << 10;

/// Runs a command to its end. Returns how it ended, and what it said to either output. An error is the end of a
/// sentence that begins with the program.
fn within(command: &mut Command) -> Result<(ExitStatus, String, String), String> {
    // Memory, and no pipes: a process that it leaves behind could keep those open.
    let memory = || rustix::fs::memfd_create("tasuki-check", MemfdFlags::CLOEXEC).map(File::from);
    let (said, why) =
        memory().and_then(|said| Ok((said, memory()?))).map_err(|errno| format!("cannot be heard: {errno}"))?;
    let end = |file: &File| file.try_clone().map(Stdio::from).map_err(|error| format!("cannot be heard: {error}"));
    command.stdin(Stdio::null()).stdout(end(&said)?).stderr(end(&why)?).process_group(0);
    let mut child = command.spawn().map_err(|error| format!("does not start: {error}"))?;
    let until = Instant::now() + CHECK_TIMEOUT;
    let status = loop {
        match child.try_wait().map_err(|error| format!("cannot be waited for: {error}"))? {
            Some(status) => break Some(status),
            None if Instant::now() > until => break None,
            None => std::thread::sleep(POLL_EVERY),
        }
    };
    if let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        let _ = rustix::process::kill_process_group(group, Signal::KILL);
    }
    let Some(status) = status else {
        let _ = child.wait();
        return Err(format!("has not said within {} s whether it takes the configuration", CHECK_TIMEOUT.as_secs()));
    };
    let text = |file: &File| {
        let mut bytes = vec![0; SAID_MAX];
        let len = file.read_at(&mut bytes, 0).unwrap_or(0);
        String::from_utf8_lossy(&bytes[..len]).into_owned()
    };
    Ok((status, text(&said), text(&why)))
}

/// Returns this process's arguments without the program's name.
fn words() -> impl Iterator<Item = OsString> {
    std::env::args_os().skip(1)
}

/// In the environment of a program that is to go on: the process, whose standard input is the file of the program before.
const FORMER: &str = "TASUKI_FORMER";
/// The same, if standard input is a socket: that file comes first, and behind it all that the keeper has.
const HANDED_ON: &str = "TASUKI_HANDED_ON";
/// In the environment of a program that goes on again: the process, and why the other program did not.
const WHY: &str = "TASUKI_NOT_REPLACED";

/// Returns both ends of a socket by which a program that says [`KEPT`] gets this one's file, and what the keeper has: into the
/// first. Returns none if the kernel has none left.
pub fn hand_on() -> Option<(OwnedFd, OwnedFd)> {
    let (ours, theirs) = channel::pair().ok()?;
    let own = File::open("/proc/self/exe").ok()?;
    channel::send(ours.as_fd(), FORMER.as_bytes(), &[own.as_fd()]).ok()?;
    Some((ours, theirs))
}

/// Goes on as a checked program, with the same arguments and with what is `handed_on`, if anything. Returns only if neither it
/// nor this very program starts.
pub fn become_it(with: &Path, handed_on: Option<OwnedFd>) -> io::Error {
    let mut command = Command::new(with);
    command.args(words()).env_remove(WHY).env_remove(FORMER).env_remove(HANDED_ON);
    // Its file may be gone from its path, or be another one.
    if let Some(socket) = handed_on {
        command.stdin(socket).env(HANDED_ON, std::process::id().to_string());
    } else if let Ok(own) = File::open("/proc/self/exe") {
        command.stdin(own).env(FORMER, std::process::id().to_string());
    }
    crate::log::finish();
    let error = command.exec();
    again("/proc/self/exe", &format!("{} does not start ({error})", with.display()))
}

fn again(program: &str, why: &str) -> io::Error {
    tracing::error!("{why}; tasukid goes on as it was");
    crate::log::finish();
    let name = std::env::args_os().next().unwrap_or_default();
    let why = format!("{} {why}", std::process::id());
    Command::new(program).arg0(name).args(words()).env_remove(FORMER).env_remove(HANDED_ON).env(WHY, why).exec()
}

/// The program that this one goes on for, until this one serves.
#[derive(Debug)]
pub struct Former {
    /// Its file, unless that is standard input.
    program: Option<OwnedFd>,
    /// What it handed on: the keeper may have died since.
    handed_on: Option<OwnedFd>,
}

impl Former {
    /// Returns the program before this one in this process, if it can go on.
    pub fn find() -> Option<Self> {
        let is_of = |name| std::env::var(name).is_ok_and(|of| of.parse() == Ok(std::process::id()));
        if !is_of(HANDED_ON) {
            return is_of(FORMER).then_some(Former { program: None, handed_on: None });
        }
        let socket = io::stdin().as_fd().try_clone_to_owned();
        // No process that this one starts gets it.
        forget_input();
        let socket = socket.ok()?;
        let first = channel::receive(socket.as_fd(), &mut Vec::new()).ok()?;
        Some(Former { program: Some(first.fds.trust().pop()?), handed_on: Some(socket) })
    }

    /// Returns a socket in which all waits that the keeper of the program before has, once.
    pub fn handed_on(&mut self) -> Option<OwnedFd> {
        self.handed_on.take()
    }

    /// Goes on as that program again. Returns only if it does not start.
    pub fn again(self, why: &str) -> io::Error {
        let version = env!("CARGO_PKG_VERSION");
        let at = self.program.as_ref().map_or(0, AsRawFd::as_raw_fd);
        again(&format!("/proc/self/fd/{at}"), &format!("version {version} of tasukid has not begun ({why})"))
    }

    /// Lets go of it: this program serves.
    pub fn forget(self) {
        forget_input();
    }
}

fn forget_input() {
    // If that fails, a file stays open.
    let _ = File::open("/dev/null").map(|null| rustix::stdio::dup2_stdin(&null));
}

/// Returns why this program goes on again, if it was to be replaced and the other did not begin.
pub fn not_replaced() -> Option<String> {
    let text = std::env::var(WHY).ok()?;
    // A child of a tasukid has inherited it.
    let why = text.strip_prefix(&format!("{} ", std::process::id()))?.to_owned();
    forget_input();
    // It has the name of the file that it was started by.
    let _ = rustix::thread::set_name(c"tasukid");
    Some(why)
}

/// Reaps the children that the program before this one in the same process had, when they have ended. To be called before
/// this one has any. Those that the daemon takes over it reaps itself, at once.
pub fn reap() {
    let parent = std::process::id().to_string();
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let is_ours = |pid: &i32| {
        let line = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        line.rsplit_once(')').and_then(|(_, fields)| fields.split_whitespace().nth(1)) == Some(parent.as_str())
    };
    let mut children: Vec<(Pid, bool)> =
        numbers.filter(is_ours).filter_map(|pid| Some((Pid::from_raw(pid)?, false))).collect();
    if children.is_empty() {
        return;
    }
    // Without a thread they stay, and take no more than a number each.
    let _ = std::thread::Builder::new().name("reaper".to_owned()).spawn(move || {
        crate::spawn::hold_signals();
        while !children.is_empty() {
            children.retain_mut(|(pid, was_dead)| {
                let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
                match rustix::process::waitid(WaitId::Pid(*pid), look) {
                    Ok(Some(_)) if *was_dead => {
                        let _ = rustix::process::waitpid(Some(*pid), rustix::process::WaitOptions::NOHANG);
                        false
                    }
                    Ok(Some(_)) => {
                        *was_dead = true;
                        true
                    }
                    Ok(None) => true,
                    Err(_) => false,
                }
            });
            std::thread::sleep(REAP_EVERY);
        }
    });
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::unix::fs::PermissionsExt;
    use std::process::Command;

    /// The number in the lock file of a tasukid that was killed may be that of any user's program by now.
    ///
    /// row: T134
    #[test]
    fn the_package_runs_no_program_but_that_of_a_tasukid_that_lives() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        let place = folder.path().display().to_string();
        let script = include_str!("../../../contrib/debian/preinst").replace("/run/tasuki/", &format!("{place}/"));
        fs::write(path("registry.redb"), "").expect("a file");
        fs::write(path("tasukid"), "#!/bin/sh\necho it has registry 0 and messages 0\n").expect("a file");
        fs::set_permissions(path("tasukid"), fs::Permissions::from_mode(0o755)).expect("a file of ours");
        // Another program of that name, which says nothing of a registry.
        fs::create_dir(path("other")).expect("a folder");
        tasuki_testing::copy("/bin/sleep", path("other/tasukid"));
        let mut other = Command::new(path("other/tasukid")).arg("600").spawn().expect("a program");
        fs::write(path("tasukid.lock"), format!("{}\n", other.id())).expect("a file");
        let lets_it_in = || {
            let searched = format!("{place}:{}", std::env::var("PATH").expect("a path"));
            let mut shell = Command::new("sh");
            shell.args(["-c", &script, "preinst", "upgrade"]).env("PATH", searched);
            shell.output().expect("a shell").status.success()
        };
        let of_killed = lets_it_in();
        let lock = File::open(path("tasukid.lock")).expect("it is there");
        lock.lock().expect("nobody has it");
        let of_living = lets_it_in();
        other.kill().and_then(|()| other.wait()).expect("a child");
        assert!(!of_killed, "the installed program was asked");
        assert!(of_living, "the program of the process that has the lock was asked");
    }

    #[test]
    fn the_package_says_of_this_tasukid_what_it_has() {
        let script = include_str!("../../../contrib/debian/preinst");
        let line = format!("\nhas=\"{}\"\n", super::shared());
        assert!(script.contains(&line), "contrib/debian/preinst needs the line{line}");
    }
}
