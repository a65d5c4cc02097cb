//! Processes by pidfd: this daemon's, and those of an earlier daemon. A process is named by its number and the time
//! of its start, which together are never given twice.

use std::io::{self, ErrorKind::PermissionDenied};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions};
use serde::{Deserialize, Serialize};

use crate::cgroup::Group;
use crate::spawn::{self, Program};

/// How long the daemon's loop waits for the end of a process that it has killed.
pub const END_TIMEOUT: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
/// The same where no other work waits: the kernel may take its time on a busy machine.
pub const LAST_END_TIMEOUT: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };

/// The name of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Name {
    pub pid: u32,
    /// Time of its start, in ticks since the machine started.
    pub start: u64,
}

/// A process, dead or alive.
#[derive(Debug)]
pub struct Process {
    name: Name,
    pidfd: OwnedFd,
}

impl Process {
    pub fn spawn(command: &mut Command) -> io::Result<Self> {
        // Input typed into the daemon's terminal is for the daemon alone: workers and cards outlive it.
        command.process_group(0).env_remove("NOTIFY_SOCKET").env_remove("WATCHDOG_USEC").env_remove("WATCHDOG_PID");
        let mut child = command.spawn()?;
        Self::of_child(child.id()).inspect_err(|_| {
            let _ = child.kill();
            let _ = child.wait();
        })
    }

    /// Starts a program in this group, if possible. Returns whether the process is in it, or why it did not begin there. It
    /// does not enter the group's other hierarchies, and is never in the group for a part of its time only.
    pub fn start(program: &Program, group: Option<&Group>) -> io::Result<(Self, io::Result<bool>)> {
        let started = group.and_then(Group::birthplace).map(|place| spawn::start(program, Some(place)));
        let (pid, is_there) = match started {
            Some(Ok(pid)) => (pid, Ok(true)),
            // It would wait as long outside the group.
            Some(Err(error)) if error.kind() == io::ErrorKind::TimedOut => return Err(error),
            // If this fails, too, the program is the cause, and not the group.
            Some(Err(error)) => (spawn::start(program, None)?, Err(error)),
            None => (spawn::start(program, None)?, Ok(false)),
        };
        let process = Self::of_child(pid).inspect_err(|_| {
            if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
                let _ = rustix::process::kill_process(pid, Signal::KILL);
                let _ = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty());
            }
        })?;
        Ok((process, is_there))
    }

    /// Opens a child. It may be dead by now, and this daemon reaps it all the same.
    fn of_child(pid: u32) -> io::Result<Self> {
        let (name, pidfd) = Self::open(pid, true)?;
        Ok(Process { name, pidfd })
    }

    /// Finds a process that another process started; `None` if it is gone.
    ///
    /// # Errors
    /// This process may open no more descriptors, or `/proc` hides the other (`PermissionDenied`, with a sentence). It may live.
    pub fn find(name: Name) -> io::Result<Option<Self>> {
        let found = Self::by_pid(name.pid)?;
        Ok(found.filter(|found| found.name == name))
    }

    /// Opens the process that the kernel names as the other end of a socket; `None` if it is gone, or if its pid
    /// is 0: it is in a pid namespace that we do not see.
    ///
    /// # Errors
    /// As of [`find`](Self::find).
    pub fn by_pid(pid: u32) -> io::Result<Option<Self>> {
        match Self::open(pid, false) {
            Err(error) if crate::channel::lacks(&error) || error.kind() == PermissionDenied => Err(error),
            found => Ok(found.ok().map(|(name, pidfd)| Process { name, pidfd })),
        }
    }

    fn open(pid: u32, or_dead: bool) -> io::Result<(Name, OwnedFd)> {
        let number = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::NotFound)?;
        let pidfd = rustix::process::pidfd_open(number, PidfdFlags::empty())?;
        // Read after the pidfd is open: if the start time matches, the pidfd means the same process.
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).map_err(|error| {
            // With hidepid, /proc shows this user no process of its own that others of this user may not look into. One to
            // which it may send no signal is another user's, which has the number now.
            let is_ours = || rustix::process::test_kill_process(number).is_ok();
            let is_hidden = !crate::channel::lacks(&error) && is_ours() && !ends_within(&pidfd, &Timespec::default());
            if is_hidden { io::Error::new(PermissionDenied, hidden(pid)) } else { error }
        })?;
        Ok((Name { pid, start: start_in(&stat, or_dead)? }, pidfd))
    }

    pub fn name(&self) -> Name {
        self.name
    }

    /// Returns its user, while it lives.
    pub fn uid(&self) -> Option<u32> {
        std::fs::metadata(format!("/proc/{}", self.name.pid)).ok().map(|meta| meta.uid())
    }

    /// Returns the user of the files that it makes, while it lives.
    pub fn fs_uid(&self) -> Option<u32> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.name.pid)).ok()?;
        status.lines().find_map(|line| line.strip_prefix("Uid:"))?.split_whitespace().nth(3)?.parse().ok()
    }

    /// Returns its pidfd, which is readable once it is dead.
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Returns whether it has the socket that is bound to this path.
    pub fn has_socket_at(&self, path: &Path) -> bool {
        let Ok(sockets) = std::fs::read_to_string("/proc/net/unix") else { return false };
        let path = path.to_string_lossy();
        // Num, RefCount, Protocol, Flags, Type, St, Inode, Path.
        let at_path = sockets.lines().filter(|line| line.split_whitespace().nth(7) == Some(&path));
        let names: Vec<String> =
            at_path.filter_map(|line| Some(format!("socket:[{}]", line.split_whitespace().nth(6)?))).collect();
        let its = std::fs::read_dir(format!("/proc/{}/fd", self.name.pid)).into_iter().flatten().flatten();
        let its = its.filter_map(|fd| std::fs::read_link(fd.path()).ok());
        { its }.any(|fd| names.iter().any(|name| fd.as_os_str() == &name[..]))
    }

    /// Returns whether it has ended. An event that says so can be of an earlier process with the same token: its pidfd
    /// stays in an epoll, though we closed it, while a child that has yet to execute its program has a copy.
    pub fn has_ended(&self) -> bool {
        self.ends_within(&Timespec::default())
    }

    /// Waits up to `limit` for its end, and returns whether it has come.
    pub fn ends_within(&self, limit: &Timespec) -> bool {
        ends_within(&self.pidfd, limit)
    }

    /// Ends it by SIGKILL.
    pub fn kill(&self) {
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, Signal::KILL);
    }

    /// Kills it, and returns how it ended, as [`ended`](Self::ended) does. Does not wait beyond `limit` for one that the kernel keeps
    /// waiting, for a file system that does not answer for instance: another thread reaps that.
    pub fn end(mut self, limit: &Timespec) -> String {
        self.kill();
        if self.ends_within(limit) {
            return self.ended();
        }
        let reap = move || {
            spawn::hold_signals();
            self.ended()
        };
        let _ = std::thread::Builder::new().name("reaper".to_owned()).spawn(reap);
        "was killed, and the kernel does not let it end yet".to_owned()
    }

    /// Moves it to these CPUs, if it is still there.
    pub fn send_to(&self, cpus: &[u32]) {
        let mut pidfd = [PollFd::new(&self.pidfd, PollFlags::IN)];
        let is_dead = rustix::event::poll(&mut pidfd, Some(&Timespec::default())) != Ok(0);
        // Its number belongs to no other process until this daemon, or init, has reaped it.
        if let (false, Some(pid)) = (is_dead, i32::try_from(self.name.pid).ok().and_then(Pid::from_raw)) {
            crate::housekeeping_cpus::pin(pid, cpus);
        }
    }

    /// Asks it to end, by SIGTERM.
    pub fn ask_to_end(&self) {
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, Signal::TERM);
    }

    /// Waits for its end, if it is a child of this process, and returns how it ended, as the end of the sentence "it …".
    /// Init reaps the children of an earlier daemon, but not those of one that went on as this one.
    pub fn ended(&mut self) -> String {
        let wait = || rustix::process::waitid(WaitId::PidFd(self.pidfd.as_fd()), WaitIdOptions::EXITED);
        let status = rustix::io::retry_on_intr(wait).ok().flatten();
        match status.map(|status| (status.exit_status(), status.terminating_signal())) {
            Some((Some(code), _)) if code != 0 => format!("ended with code {code}"),
            Some((_, Some(signal))) => format!("was killed by signal {signal}"),
            _ => "ended".to_owned(),
        }
    }
}

fn ends_within(pidfd: &OwnedFd, limit: &Timespec) -> bool {
    let mut pidfd = [PollFd::new(pidfd, PollFlags::IN)];
    rustix::io::retry_on_intr(|| rustix::event::poll(&mut pidfd, Some(limit))) == Ok(1)
}

fn hidden(pid: u32) -> String {
    format!(
        "/proc hides process {pid} from tasukid (hidepid), so tasukid cannot know its workers again; mount /proc without that option, or have tasukid's user in the group of its option gid="
    )
}

/// Returns when a process started, in ticks since the machine started.
fn start_in(stat: &str, or_dead: bool) -> io::Result<u64> {
    let strange = || io::Error::other("/proc/PID/stat has another form than we know");
    // The name of a program can hold anything, but not the text behind its last parenthesis.
    let (_, fields) = stat.rsplit_once(')').ok_or_else(strange)?;
    let state = fields.split_whitespace().next().unwrap_or_default();
    if !or_dead && matches!(state, "Z" | "X") {
        return Err(io::ErrorKind::NotFound.into());
    }
    fields.split_whitespace().nth(19).and_then(|field| field.parse().ok()).ok_or_else(strange)
}

#[cfg(test)]
mod tests {
    use std::process::Stdio;

    use rustix::event::poll;

    use super::*;

    #[test]
    fn a_process_is_found_by_its_name_and_by_no_other() {
        let (keep, stdin) = std::io::pipe().unwrap();
        let mut process = Process::spawn(Command::new("cat").stdin(Stdio::from(keep))).unwrap();
        let name = process.name();
        let is_there = |name| Process::find(name).expect("descriptors").is_some();
        assert!(is_there(name));
        assert!(!is_there(Name { start: name.start + 1, ..name }), "a number that was given again");
        process.kill();
        let mut fds = [PollFd::from_borrowed_fd(process.pidfd(), PollFlags::IN)];
        let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
        assert_eq!(poll(&mut fds, Some(&limit)).unwrap(), 1);
        assert_eq!(process.ended(), "was killed by signal 9");
        assert!(!is_there(name));
        drop(stdin);
    }

    #[test]
    fn a_process_is_sent_to_other_cpus_while_it_is_there() {
        let (keep, stdin) = std::io::pipe().unwrap();
        let mut process = Process::spawn(Command::new("cat").stdin(Stdio::from(keep))).unwrap();
        let pid = i32::try_from(process.name().pid).ok().and_then(Pid::from_raw);
        let ours = rustix::thread::sched_getaffinity(None).unwrap();
        let last = (0..rustix::thread::CpuSet::MAX_CPU).rfind(|&cpu| ours.is_set(cpu)).unwrap();
        process.send_to(&[u32::try_from(last).unwrap()]);
        let its = rustix::thread::sched_getaffinity(pid).unwrap();
        assert!(its.is_set(last) && its.count() == 1, "{its:?}");
        process.send_to(&[]);
        assert_eq!(rustix::thread::sched_getaffinity(pid).unwrap(), its, "nowhere is nowhere to go");
        drop(stdin);
        assert_eq!(process.ended(), "ended");
        process.send_to(&[u32::try_from(last).unwrap()]);
    }
}
