//! Processes by pidfd: ours, and those of a daemon before us. A process is named by its number and the time of its start, which together
//! are never given twice.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions};
use serde::{Deserialize, Serialize};

use crate::cgroup::Group;
use crate::spawn::{self, Program};

/// Which process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Name {
    /// Its number.
    pub pid: u32,
    /// When it started, in ticks since the machine did.
    pub start: u64,
}

/// A process, dead or alive.
#[derive(Debug)]
pub struct Process {
    name: Name,
    pidfd: OwnedFd,
    /// Ours to reap; those of a daemon before us are init's.
    is_ours: bool,
}

impl Process {
    /// Starts a program.
    pub fn spawn(command: &mut Command) -> io::Result<Self> {
        // What is typed into our terminal is for us: workers and cards outlive the daemon.
        command.process_group(0).env_remove("NOTIFY_SOCKET").env_remove("WATCHDOG_USEC").env_remove("WATCHDOG_PID");
        let mut child = command.spawn()?;
        Self::of_child(child.id()).inspect_err(|_| {
            let _ = child.kill();
            let _ = child.wait();
        })
    }

    /// Starts a program in this group, if it can be; says whether it is there. It is nowhere else, and not there in a part of its time only.
    pub fn start(program: &Program, group: Option<&Group>) -> io::Result<(Self, bool)> {
        let started = group.and_then(Group::birthplace).map(|place| spawn::start(program, Some(place)));
        let (pid, is_there) = match started {
            Some(Ok(pid)) => (pid, true),
            // A program that does not start does not start out of a group either, and then it is known to be that.
            _ => (spawn::start(program, None)?, false),
        };
        let process = Self::of_child(pid).inspect_err(|_| {
            if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
                let _ = rustix::process::kill_process(pid, Signal::KILL);
                let _ = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty());
            }
        })?;
        Ok((process, is_there))
    }

    /// It may be dead by now, and is ours to reap all the same.
    fn of_child(pid: u32) -> io::Result<Self> {
        let (name, pidfd) = Self::open(pid, true)?;
        Ok(Process { name, pidfd, is_ours: true })
    }

    /// One that somebody else started; nothing if it is no more.
    pub fn find(name: Name) -> Option<Self> {
        let (found, pidfd) = Self::open(name.pid, false).ok()?;
        (found == name).then_some(Process { name, pidfd, is_ours: false })
    }

    /// The process that the kernel says is at the other end of a socket.
    pub fn by_pid(pid: Pid) -> Option<Self> {
        let (name, pidfd) = Self::open(pid.as_raw_nonzero().get().unsigned_abs(), false).ok()?;
        Some(Process { name, pidfd, is_ours: false })
    }

    fn open(pid: u32, or_dead: bool) -> io::Result<(Name, OwnedFd)> {
        let number = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::NotFound)?;
        let pidfd = rustix::process::pidfd_open(number, PidfdFlags::empty())?;
        // Read after the pidfd is open: if the start is the one that we look for, so is whom the pidfd means.
        Ok((Name { pid, start: start_of(pid, or_dead)? }, pidfd))
    }

    /// Which it is.
    pub fn name(&self) -> Name {
        self.name
    }

    /// Whose it is, while it lives.
    pub fn uid(&self) -> Option<u32> {
        std::fs::metadata(format!("/proc/{}", self.name.pid)).ok().map(|meta| meta.uid())
    }

    /// Whose the files are that it makes, while it lives.
    pub fn fs_uid(&self) -> Option<u32> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.name.pid)).ok()?;
        status.lines().find_map(|line| line.strip_prefix("Uid:"))?.split_whitespace().nth(3)?.parse().ok()
    }

    /// Readable once it is dead.
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Ends it, whatever it does.
    pub fn kill(&self) {
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, Signal::KILL);
    }

    /// Has it run on these CPUs from now on, if it is there.
    pub fn send_to(&self, cpus: &[u32]) {
        let mut pidfd = [PollFd::new(&self.pidfd, PollFlags::IN)];
        let is_dead = rustix::event::poll(&mut pidfd, Some(&Timespec::default())) != Ok(0);
        // Its number is nobody else's until we, or init, have heard that it is dead.
        if let (false, Some(pid)) = (is_dead, i32::try_from(self.name.pid).ok().and_then(Pid::from_raw)) {
            crate::aside::send(pid, cpus);
        }
    }

    /// Asks it to end.
    pub fn ask_to_end(&self) {
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, Signal::TERM);
    }

    /// Waits for its end, if it is ours, and says how it ended, as the end of the sentence "it …". To be asked once.
    pub fn ended(&mut self) -> String {
        let wait = || rustix::process::waitid(WaitId::PidFd(self.pidfd.as_fd()), WaitIdOptions::EXITED);
        let status = self.is_ours.then(|| rustix::io::retry_on_intr(wait).ok().flatten()).flatten();
        match status.map(|status| (status.exit_status(), status.terminating_signal())) {
            Some((Some(code), _)) if code != 0 => format!("ended with code {code}"),
            Some((_, Some(signal))) => format!("was killed by signal {signal}"),
            _ => "ended".to_owned(),
        }
    }
}

/// When a process started, in ticks since the machine did.
fn start_of(pid: u32, or_dead: bool) -> io::Result<u64> {
    let line = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let strange = || io::Error::other(format!("/proc/{pid}/stat has another form than we know"));
    // The name of a program can hold anything, but what follows its last parenthesis cannot.
    let (_, fields) = line.rsplit_once(')').ok_or_else(strange)?;
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
        assert!(Process::find(name).is_some());
        assert!(Process::find(Name { start: name.start + 1, ..name }).is_none(), "a number that was given again");
        process.kill();
        let mut fds = [PollFd::from_borrowed_fd(process.pidfd(), PollFlags::IN)];
        let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
        assert_eq!(poll(&mut fds, Some(&limit)).unwrap(), 1);
        assert_eq!(process.ended(), "was killed by signal 9");
        assert!(Process::find(name).is_none());
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
