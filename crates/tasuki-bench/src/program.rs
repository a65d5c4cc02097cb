//! Programs of this machine that run as part of the demo or of a bench.

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, PidfdFlags, Signal};

use crate::interrupt::Interrupt;

/// Upper bound of every wait.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Interval between two polls while waiting.
pub const LOOK: Duration = Duration::from_millis(5);

/// Interval between two questions of [`found`]: a figure may end with the answer.
const ASK_EVERY: Duration = Duration::from_millis(2);

/// Asks until there is an answer. After [`PATIENCE`] the error is what `in_vain` says.
pub fn found<T>(mut ask: impl FnMut() -> Result<Option<T>>, in_vain: impl FnOnce() -> String) -> Result<T> {
    let began = Instant::now();
    loop {
        if let Some(answer) = ask()? {
            return Ok(answer);
        }
        if began.elapsed() > PATIENCE {
            bail!(in_vain());
        }
        std::thread::sleep(ASK_EVERY);
    }
}

/// Returns whether `PATH` holds a program of that name.
pub fn is_there(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

/// A part of the bench that runs in its own process and has to clean up. Dropping it sends SIGTERM and waits for its
/// end.
pub struct Part(Child);

impl Drop for Part {
    fn drop(&mut self) {
        let pid = Pid::from_child(&self.0);
        if matches!(self.0.try_wait(), Ok(None)) {
            let _ = rustix::process::kill_process(pid, Signal::TERM);
            // If the process cannot be waited for, kill it at once.
            if let Ok(end) = rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
                let most = Timespec::try_from(PATIENCE).expect("a minute");
                let _ = rustix::event::poll(&mut [PollFd::new(&end, PollFlags::IN)], Some(&most));
            }
        }
        // Both fail only for a process that has been waited for already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Part {
    pub fn start(command: &mut Command) -> Result<Self> {
        Ok(Part(command.stdin(Stdio::null()).spawn().context("a part of the bench could not be started")?))
    }

    /// Waits until the part has finished its work.
    pub fn await_end(mut self, interrupt: &Interrupt) -> Result<()> {
        let end = rustix::process::pidfd_open(Pid::from_child(&self.0), PidfdFlags::empty())?;
        loop {
            match rustix::event::poll(
                &mut [PollFd::new(&end, PollFlags::IN), PollFd::new(interrupt, PollFlags::IN)],
                None,
            ) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno).context("the kernel refused to wait"),
            }
            interrupt.check()?;
            if let Some(status) = self.0.try_wait().context("a part of the bench cannot be waited for")? {
                ensure!(status.success(), "the part in a namespace of its own ended with {status}; it says above why");
                return Ok(());
            }
        }
    }
}

/// A running program. Dropping it kills the process if it still runs.
#[derive(Debug)]
pub struct Program {
    child: Child,
    name: String,
}

impl Drop for Program {
    fn drop(&mut self) {
        // Both fail only for a process that has been waited for already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Program {
    /// Starts the program; [`output`](Self::output) returns its standard output.
    pub fn start(command: &mut Command) -> Result<Self> {
        let name = command.get_program().display().to_string();
        Self::start_as(&name, command)
    }

    /// Like [`start`](Self::start), for a program that another one executes in its place. Error messages use `name`.
    pub fn start_as(name: &str, command: &mut Command) -> Result<Self> {
        Self::spawn(name, command.stdin(Stdio::null()).stdout(Stdio::piped()))
    }

    /// Starts a program that [`tell`](Self::tell) commands through its standard input.
    pub fn start_to_tell(command: &mut Command) -> Result<Self> {
        let name = command.get_program().display().to_string();
        Self::spawn(&name, command.stdin(Stdio::piped()).stdout(Stdio::piped()))
    }

    /// Starts this program in another role, with one end of a socket as its standard input. Returns the other end, too.
    pub fn in_role(words: &[&str], stdout: Stdio) -> Result<(Self, OwnedFd)> {
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let (ours, theirs) = pair.context("no socket pair could be made for a part of the bench")?;
        let this = std::env::current_exe().context("the bench could not find its own executable")?;
        let mut command = Command::new(this);
        Ok((Self::spawn("a part of the bench", command.args(words).stdin(theirs).stdout(stdout))?, ours))
    }

    /// Starts a program with the standard input and output that the command names. Error messages use `name`.
    pub fn spawn(name: &str, command: &mut Command) -> Result<Self> {
        let child = command.spawn().with_context(|| format!("{name} could not be started"))?;
        Ok(Program { child, name: name.to_owned() })
    }

    /// Writes a line to the program's standard input.
    pub fn tell(&mut self, line: &str) -> Result<()> {
        let stdin = self.child.stdin.as_mut().context("it was not started to be told anything")?;
        writeln!(stdin, "{line}").with_context(|| format!("{} listens no longer", self.name))
    }

    /// Closes the program's standard input and reads its output until it ends.
    pub fn rest_of_output(mut self) -> Result<String> {
        drop(self.child.stdin.take());
        let mut said = Vec::new();
        let mut output = self.output()?;
        output.read_to_end(&mut said).with_context(|| format!("{} cannot be listened to", self.name))?;
        Ok(String::from_utf8_lossy(&said).into_owned())
    }

    /// Returns the process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns a descriptor that becomes readable when the program ends.
    pub fn pidfd(&self) -> Result<OwnedFd> {
        let pidfd = rustix::process::pidfd_open(Pid::from_child(&self.child), PidfdFlags::empty());
        pidfd.with_context(|| format!("{} could not be watched", self.name))
    }

    pub fn kill(&mut self) -> Result<()> {
        self.child.kill().with_context(|| format!("{} could not be killed", self.name))
    }

    /// Returns whether the program still runs.
    pub fn is_running(&mut self) -> Result<bool> {
        Ok(self.status()?.is_none())
    }

    /// Returns how the program ended, or nothing while it still runs.
    pub fn status(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().with_context(|| format!("{} cannot be waited for", self.name))
    }

    /// Waits until the program ends.
    pub fn await_end(&mut self, interrupt: &Interrupt) -> Result<()> {
        let began = Instant::now();
        let end = self.pidfd()?;
        // Check for an interrupt every `LOOK`.
        let rest = Timespec::try_from(LOOK)?;
        while self.is_running()? {
            interrupt.check()?;
            ensure!(began.elapsed() < PATIENCE, "{} does not end", self.name);
            match rustix::event::poll(&mut [PollFd::new(&end, PollFlags::IN)], Some(&rest)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno).context("the kernel refused to wait"),
            }
        }
        Ok(())
    }

    /// Reads the program's standard output until it contains `what`.
    pub fn await_words(&mut self, what: &str, interrupt: &Interrupt) -> Result<()> {
        let began = Instant::now();
        let stdout = self.child.stdout.as_mut().context("its output was asked for twice")?;
        let mut said = Vec::new();
        while !String::from_utf8_lossy(&said).contains(what) {
            let left = Timespec::try_from(PATIENCE.saturating_sub(began.elapsed()))?;
            let mut polled =
                [PollFd::from_borrowed_fd(stdout.as_fd(), PollFlags::IN), PollFd::new(interrupt, PollFlags::IN)];
            match rustix::event::poll(&mut polled, Some(&left)) {
                Ok(0) => bail!("{} did not say \"{what}\" within {} s", self.name, PATIENCE.as_secs()),
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno).context("the kernel refused to wait"),
            }
            interrupt.check()?;
            if polled[0].revents().is_empty() {
                continue;
            }
            let mut chunk = [0; 4096];
            let len = stdout.read(&mut chunk).with_context(|| format!("{} cannot be listened to", self.name))?;
            ensure!(len > 0, "{} ended before it said \"{what}\"; its output says why", self.name);
            said.extend_from_slice(&chunk[..len]);
        }
        Ok(())
    }

    /// Takes the program's standard output. A second call is an error.
    pub fn output(&mut self) -> Result<ChildStdout> {
        self.child.stdout.take().context("its output was asked for twice")
    }
}

/// Waits until the program `name` listens at `path`. A connection would tell, too, but the program would serve it.
pub fn await_listener(path: &Path, name: &str) -> Result<()> {
    // Flags of a socket that accepts connections (`__SO_ACCEPTCON` in proc_net(5)).
    const ACCEPTS: &str = "00010000";
    let path = path.to_str().context("the path of the socket is no text")?;
    let listens = || {
        let sockets = std::fs::read_to_string("/proc/net/unix").context("the machine's sockets cannot be read")?;
        let mut lines = sockets.lines();
        let it = lines.any(|line| line.ends_with(path) && line.split_whitespace().nth(3) == Some(ACCEPTS));
        Ok(it.then_some(()))
    };
    found(listens, || format!("{name} does not begin"))
}

/// Runs a program to its end. A failure carries its standard error.
pub fn run_quietly(command: &mut Command) -> Result<()> {
    let done = command.stdin(Stdio::null()).output().with_context(|| format!("{command:?} cannot be started"))?;
    ensure!(done.status.success(), "{command:?}: {}", String::from_utf8_lossy(&done.stderr).trim());
    Ok(())
}

/// Runs `ip` with these words.
pub fn ip(words: &str) -> Result<()> {
    let mut ip = Command::new("ip");
    let done = ip.args(words.split_whitespace()).stdin(Stdio::null()).output();
    let done = done.context("ip (iproute2) cannot be started")?;
    ensure!(done.status.success(), "ip {words}: {}", String::from_utf8_lossy(&done.stderr).trim());
    Ok(())
}
