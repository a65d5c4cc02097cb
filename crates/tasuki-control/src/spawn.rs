//! Starts a program in a control group. Its process is in the group from its first instruction on, and so is every
//! process that it starts. To move a process there later takes the kernel some 10 ms, in which it may have started
//! others.
//!
//! # Invariants
//!
//! - **C1** Between clone3(2) and execve(2) or _exit(2) the new process makes system calls alone, by wrappers that
//!   signal-safety(7) names, on data made before. Another thread may have held any lock of the C library or of the
//!   allocator when it was cloned, and that lock would never be released.
//! - **C2** All that it passes to the kernel lives until it has become the program or is dead: it has a copy of the
//!   memory of [`start`], which does not end in it.
#![allow(unsafe_code, reason = "clone3(2) with a control group, which no library offers (C1, C2)")]

use std::ffi::{CStr, CString, OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{Mode, OFlags};
use rustix::pipe::PipeFlags;

/// The first descriptor beyond standard input, output and error.
const FIRST_OTHER: i32 = 3;
/// CLONE_INTO_CGROUP, for which the library's type is too short.
const INTO_CGROUP: u64 = 0x2_0000_0000;
/// Environment variables that the program gets, if the daemon has them. The others may be the daemon's secrets.
const ITS: &[&str] = &["PATH", "LANG", "TZ", "LD_LIBRARY_PATH"];
/// Beginnings of names of others that it gets.
const ITS_BEGIN: &[&str] = &["LC_", "RUST_", "TASUKI_"];

/// Time in which a process has to become its program: more than the kernel was seen to take on a busy machine (20 s).
const START_TIMEOUT: Timespec = Timespec { tv_sec: 30, tv_nsec: 0 };
/// The error of one that does not.
const STUCK: &str = "the kernel keeps its process waiting, for a file system that does not answer or for the disk; look which file that is, and end its server (fusermount -u, umount -f)";

/// A program to start, with its arguments and descriptors.
#[derive(Debug)]
pub struct Program {
    /// Searched for on the PATH if it has a single component.
    pub path: PathBuf,
    /// Arguments after its name.
    pub args: Vec<OsString>,
    /// Its standard input, output and error.
    pub stdio: [OwnedFd; 3],
}

/// Returns the path of a program: as the PATH has it, if it has a single component.
pub fn find(program: &Path) -> PathBuf {
    let on_path = std::env::var_os("PATH").filter(|_| program.components().count() == 1);
    let found = on_path.and_then(|path| {
        std::env::split_paths(&path).map(|folder| folder.join(program)).find(|candidate| candidate.is_file())
    });
    found.unwrap_or_else(|| program.to_owned())
}

/// Folders, by their paths from /, that the unit for systemd hides from the daemon (`ProtectHome=`, `PrivateTmp=`).
const HIDDEN: &[&str] = &["home", "root", "run/user", "tmp", "var/tmp"];

/// Returns why the file at `path` cannot be started, as the end of a sentence that begins with the path.
pub fn not_startable(path: &Path) -> Option<&'static str> {
    if !path.is_absolute() {
        return Some("is not a path from /; name one");
    }
    let is_hidden = || path.strip_prefix("/").is_ok_and(|path| HIDDEN.iter().any(|folder| path.starts_with(folder)));
    let found = std::fs::metadata(path);
    match found.map(|found| (found.is_file(), found.permissions().mode() & 0o111 != 0)) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Some(match is_hidden() {
            true => {
                "is not there; build it, or name another program by its path from /: under systemd, tasukid sees none in home directories, /run/user, /tmp and /var/tmp"
            }
            false => "is not there; build it, or name another program by its path from /",
        }),
        Err(_) => Some("cannot be looked at; let tasukid's user read the folders above it"),
        Ok((false, _)) => Some("is not a file; name a program by its path from /"),
        Ok((true, false)) => Some("may not be executed; chmod +x it"),
        Ok((true, true)) => None,
    }
}

/// Starts the program in a process group of its own, and in this control group of version 2 if there is one. Returns
/// its pid. The caller reaps it.
///
/// # Errors
/// The kernel's reason: no such program, no room for a process, or not in this group. Or the kernel keeps the process waiting
/// (`TimedOut`).
pub fn start(program: &Program, group: Option<BorrowedFd<'_>>) -> io::Result<u32> {
    start_within(&START_TIMEOUT, program, group)
}

fn start_within(limit: &Timespec, program: &Program, group: Option<BorrowedFd<'_>>) -> io::Result<u32> {
    let text = |text: &OsStr| CString::new(text.as_bytes()).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput));
    let path = text(find(&program.path).as_os_str())?;
    let args = [program.path.as_os_str()].into_iter().chain(program.args.iter().map(OsString::as_os_str));
    let args = args.map(text).collect::<io::Result<Vec<_>>>()?;
    let is_its = |name: &OsStr| {
        ITS.iter().any(|its| name == *its)
            || ITS_BEGIN.iter().any(|begin| name.as_bytes().starts_with(begin.as_bytes()))
    };
    let its = std::env::vars_os().filter(|(name, _)| is_its(name));
    let environment =
        its.map(|(name, value)| text(&OsString::from_vec([name.as_bytes(), b"=", value.as_bytes()].concat())));
    let environment = environment.collect::<io::Result<Vec<_>>>()?;
    let pointers =
        |texts: &[CString]| -> Vec<_> { texts.iter().map(|text| text.as_ptr()).chain([std::ptr::null()]).collect() };
    let (argv, envp) = (pointers(&args), pointers(&environment));
    // A descriptor that is 0, 1 or 2 already would be closed when the program begins, or by the one before it.
    let stdio = program.stdio.each_ref().map(|fd| rustix::io::fcntl_dupfd_cloexec(fd, FIRST_OTHER));
    let [stdin, stdout, stderr] = stdio;
    let stdio = [stdin?, stdout?, stderr?];
    let (says, failed) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    let failed = rustix::io::fcntl_dupfd_cloexec(failed, FIRST_OTHER)?;
    let image = Image { path: &path, argv: &argv, envp: &envp, stdio: stdio.each_ref().map(AsFd::as_fd) };
    let pid = clone(group, &image, failed.as_fd())?;
    drop(failed);
    let child = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw);
    let reap = move || _ = rustix::process::waitpid(child, rustix::process::WaitOptions::empty());
    // The pipe's end is closed once the process is the program.
    let mut end = [PollFd::new(&says, PollFlags::IN)];
    if rustix::io::retry_on_intr(|| rustix::event::poll(&mut end, Some(limit))) == Ok(0) {
        // It may be dead only once it goes on. A thread has the signals of the one that starts it held.
        child.map(|child| rustix::process::kill_process(child, rustix::process::Signal::KILL));
        let _ = std::thread::Builder::new().name("reaper".to_owned()).spawn(reap);
        return Err(io::Error::new(io::ErrorKind::TimedOut, STUCK));
    }
    let mut errno = [0; 4];
    if rustix::io::retry_on_intr(|| rustix::io::read(&says, &mut errno))? == errno.len() {
        reap();
        return Err(io::Error::from_raw_os_error(i32::from_ne_bytes(errno)));
    }
    Ok(pid)
}

/// The signals that are for the daemon, as bits: SIGHUP, SIGINT, SIGUSR1 and SIGTERM.
const DAEMONS: u64 =
    1 << (libc::SIGHUP - 1) | 1 << (libc::SIGINT - 1) | 1 << (libc::SIGUSR1 - 1) | 1 << (libc::SIGTERM - 1);

/// Has this thread take none of the signals that are for the daemon. Those that no thread takes wait, also for the program that
/// this process goes on as.
pub fn hold_signals() {
    mask(libc::SIG_BLOCK);
}

/// Has this thread take them. Returns whether it did not until now.
pub fn take_signals() -> bool {
    mask(libc::SIG_UNBLOCK) & DAEMONS == DAEMONS
}

/// Changes which signals this thread does not take. Returns those of before, as bits.
fn mask(how: i32) -> u64 {
    let mut before = 0_u64;
    let (set, old) = (std::ptr::from_ref(&DAEMONS) as libc::c_long, std::ptr::from_mut(&mut before) as libc::c_long);
    call(libc::SYS_rt_sigprocmask, [how.into(), set, old, 8]);
    before
}

/// Has the kernel spare this process no more than others where memory runs out: the daemon's service manager may have it spare
/// the daemon (`OOMScoreAdjust=`), and a program that takes all memory must not outlive those that do not. Makes system
/// calls alone (C1). With CAP_SYS_RESOURCE, as root has it under the unit, the process cannot go back.
pub fn be_spared_no_more() {
    const SCORE: &CStr = c"/proc/self/oom_score_adj";
    let mut score = [0; 8];
    let Ok(file) = rustix::fs::open(SCORE, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) else { return };
    // One that is above 0 stays: a container's, for instance.
    if rustix::io::read(&file, &mut score).is_ok() && score[0] == b'-' {
        let _ = rustix::io::write(&file, b"0");
    }
}

/// Clones a process that becomes the program. Returns its pid.
fn clone(group: Option<BorrowedFd<'_>>, image: &Image<'_>, failed: BorrowedFd<'_>) -> io::Result<u32> {
    // Filters of older containers know no clone3, and without a group fork does.
    let (flags, cgroup) = group.map_or((0, 0), |group| (INTO_CGROUP, u64::from(group.as_raw_fd().unsigned_abs())));
    let how = libc::clone_args {
        flags,
        pidfd: 0,
        child_tid: 0,
        parent_tid: 0,
        exit_signal: u64::from(libc::SIGCHLD.unsigned_abs()),
        stack: 0,
        stack_size: 0,
        tls: 0,
        set_tid: 0,
        set_tid_size: 0,
        cgroup,
    };
    let pid = match group {
        // SAFETY: `how` is as long as stated, and names no memory. Without CLONE_VM the new process has a copy of
        // our memory, and `begin` alone runs there, which calls nothing that could wait for another thread (C1).
        Some(_) => unsafe { libc::syscall(libc::SYS_clone3, &raw const how, size_of_val(&how)) },
        // SAFETY: as above (C1).
        None => unsafe { libc::fork() }.into(),
    };
    match pid {
        0 => image.begin(failed),
        -1 => Err(io::Error::last_os_error()),
        pid => u32::try_from(pid).map_err(io::Error::other),
    }
}

/// All that the new process needs, made before it is there.
struct Image<'a> {
    path: &'a CString,
    argv: &'a [*const libc::c_char],
    envp: &'a [*const libc::c_char],
    stdio: [BorrowedFd<'a>; 3],
}

impl Image<'_> {
    /// Becomes the program, or reports why not and ends.
    fn begin(&self, failed: BorrowedFd<'_>) -> ! {
        let [stdin, stdout, stderr] = self.stdio;
        let stdio = rustix::stdio::dup2_stdin(stdin)
            .and_then(|()| rustix::stdio::dup2_stdout(stdout))
            .and_then(|()| rustix::stdio::dup2_stderr(stderr));
        if let Err(errno) = stdio {
            end(failed, errno);
        }
        let _ = rustix::process::setpgid(None, None);
        be_spared_no_more();
        // The program does not inherit the signals that the daemon blocks or ignores.
        let (none, set) = (0_u64, libc::c_long::from(libc::SIG_SETMASK));
        call(libc::SYS_rt_sigprocmask, [set, std::ptr::from_ref(&none) as libc::c_long, 0, 8]);
        // SAFETY: no handler of ours is named, and the call takes no lock (C1).
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
        // The program gets no descriptor that a caller or a library has left open in the daemon.
        let all = [FIRST_OTHER.into(), u32::MAX.into(), libc::CLOSE_RANGE_CLOEXEC.into(), 0];
        call(libc::SYS_close_range, all);
        // SAFETY: all of them end with a zero, and live as long as this memory does (C1, C2).
        unsafe { libc::execve(self.path.as_ptr(), self.argv.as_ptr(), self.envp.as_ptr()) };
        let why = io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL);
        end(failed, rustix::io::Errno::from_raw_os_error(why))
    }
}

/// Makes a system call whose result does not matter.
fn call(number: libc::c_long, [a, b, c, d]: [libc::c_long; 4]) {
    // SAFETY: the memory an argument points at lives while the call runs, and no other memory is touched (C1, C2).
    unsafe { libc::syscall(number, a, b, c, d) };
}

/// Reports why the process is not the program, and ends it.
fn end(failed: BorrowedFd<'_>, errno: rustix::io::Errno) -> ! {
    let _ = rustix::io::write(failed, &errno.raw_os_error().to_ne_bytes());
    // SAFETY: nothing of ours runs any more (C1).
    unsafe { libc::_exit(127) }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;
    use crate::cgroup::{Bounds, Groups};
    use crate::process::Process;

    fn program(args: &[&str], stdout: OwnedFd) -> Program {
        let null = || OwnedFd::from(std::fs::OpenOptions::new().read(true).write(true).open("/dev/null").unwrap());
        let args = args.iter().map(OsString::from).collect();
        Program { path: "sh".into(), args, stdio: [null(), stdout, null()] }
    }

    #[test]
    fn a_program_begins_with_what_it_was_given_and_nothing_else() {
        hold_signals();
        let (mut said, stdout) = std::io::pipe().unwrap();
        let script = "echo $# $0 $1; env | grep -cv -e ^PATH= -e ^LANG= -e ^TZ= -e ^LD_LIBRARY_PATH= -e ^LC_ -e ^RUST_ -e ^TASUKI_ -e ^PWD= -e ^_=; ls /proc/self/fd | wc -l; grep SigBlk /proc/self/status; [ $(cut -d' ' -f5 /proc/$$/stat) = $$ ] && echo alone; exit 7";
        let (mut process, is_there) =
            Process::start(&program(&["-c", script, "a", "b c"], stdout.into()), None).unwrap();
        let mut text = String::new();
        said.read_to_string(&mut text).unwrap();
        // ls has the folder open besides its three.
        assert_eq!(text, "1 a b c\n0\n4\nSigBlk:\t0000000000000000\nalone\n");
        assert!(!is_there.unwrap());
        assert_eq!(process.ended(), "ended with code 7");
        assert!(take_signals() && !take_signals(), "this thread did not take them, and does now");
    }

    #[test]
    fn a_program_that_the_unit_may_hide_is_said_to_be_hidden() {
        for (path, is_hidden) in [("/home/a/filter", true), ("/tmp/nothing", true), ("/homes/filter", false)] {
            let said = not_startable(Path::new(path)).expect("it is not there");
            assert!(said.starts_with("is not there; build it, or name another program"), "{said}");
            assert_eq!(
                said.contains("under systemd, tasukid sees none in home directories,"),
                is_hidden,
                "{path}: {said}"
            );
        }
    }

    #[test]
    fn a_program_is_not_spared_as_the_daemon_is() {
        let score = "/proc/self/oom_score_adj";
        let before = std::fs::read_to_string(score).unwrap();
        // Without CAP_SYS_RESOURCE (containers) it stays what it is.
        let is_spared = std::fs::write(score, "-1").is_ok();
        let (mut said, stdout) = std::io::pipe().unwrap();
        let started = Process::start(&program(&["-c", "cat /proc/self/oom_score_adj"], stdout.into()), None);
        std::fs::write(score, &before).unwrap();
        let mut text = String::new();
        said.read_to_string(&mut text).unwrap();
        assert_eq!(text, if is_spared { "0\n" } else { &before });
        assert_eq!(started.unwrap().0.ended(), "ended");
    }

    #[test]
    fn a_process_that_does_not_become_its_program_in_time_is_killed_and_said() {
        let (mut said, stdout) = std::io::pipe().unwrap();
        let program = program(&["-c", "exec sleep 600"], stdout.into());
        // No time at all: one that is its program all the same is for the next attempt.
        let error = std::iter::repeat_with(|| match start_within(&Timespec::default(), &program, None) {
            Ok(pid) => {
                let pid = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw).unwrap();
                rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
                rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty()).unwrap();
                None
            }
            Err(error) => Some(error),
        });
        assert_eq!(error.flatten().next().unwrap().kind(), io::ErrorKind::TimedOut);
        drop(program);
        // It is dead once nobody has this any more.
        assert_eq!(said.read_to_end(&mut Vec::new()).unwrap(), 0);
    }

    #[test]
    fn what_does_not_start_is_said_and_leaves_nothing() {
        let (said, stdout) = std::io::pipe().unwrap();
        let nothing = Program { path: "/proc/nothing".into(), ..program(&[], stdout.into()) };
        assert_eq!(start(&nothing, None).unwrap_err().kind(), io::ErrorKind::NotFound);
        drop(said);
    }

    #[test]
    fn a_process_is_in_its_group_before_it_can_start_others() {
        let groups = Groups::find(&format!("test-spawn-{}", std::process::id()), None);
        let node = groups.node("red", &Bounds::default());
        let group = node.as_ref().ok().and_then(|node| node.child("worker-1").ok());
        let Some(group) = group.filter(|group| group.birthplace().is_some()) else {
            println!("skipped: no control groups of version 2 are mounted, or not for us");
            return groups.sweep();
        };
        let (mut said, stdout) = std::io::pipe().unwrap();
        let script = "(cut -d/ -f2- /proc/self/cgroup | grep -c worker-1)";
        let (mut process, is_there) = Process::start(&program(&["-c", script], stdout.into()), Some(&group)).unwrap();
        let mut text = String::new();
        said.read_to_string(&mut text).unwrap();
        assert_eq!((process.ended().as_str(), text.trim(), is_there.unwrap()), ("ended", "1", true));
        group.remove();
        node.unwrap().remove();
        groups.sweep();
    }
}
