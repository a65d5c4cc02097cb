//! The two measured processes: how the bench starts them, waits for them and ends them.
//!
//! The bench executes itself twice and sleeps in `poll` until the measuring role has answered, so the pair has the
//! two CPUs to itself. A role dies with the bench (PR_SET_PDEATHSIG, set in [`play`]), and the bench kills both
//! roles on every way out of [`run`].

use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::Signal;

use crate::case::{self, Case};
use crate::cpus::{self, Cpus};
use crate::interrupt::Interrupt;
use crate::orders::Orders;
use crate::program::Program;
use crate::sample::Sample;
use crate::workplace::Workplace;

/// Longest time that a pair may take; many times the need of the slowest case on a slow machine.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Least number of warm-up calls. A tenth of the measured calls, but never fewer than this, warms up caches, page
/// tables and predictors.
const LEAST_WARMUP: u64 = 100;

/// Side of a pair that a process plays.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Side {
    /// Answers calls.
    Serve,
    /// Makes calls and times them.
    Measure,
}

impl Side {
    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Side::Serve => "serve",
            Side::Measure => "measure",
        }
    }
}

/// Runs `case` once, in two fresh processes: `calls` calls after a warm-up.
pub fn run(case: &Case, calls: u64, cpus: Cpus, interrupt: &Interrupt) -> Result<Sample> {
    run_once(case, calls, cpus, interrupt).with_context(|| format!("case {} failed", case.name))
}

fn run_once(case: &Case, calls: u64, cpus: Cpus, interrupt: &Interrupt) -> Result<Sample> {
    // Declared before the roles, so that it is cleared after they have ended.
    let place = Workplace::new()?;
    let ends = (case.prepare)()?;
    let (server_cpu, client_cpu) = cpus.of(case.cores);
    let orders = |cpu| {
        let warmup = (calls / 10).max(LEAST_WARMUP);
        Orders::new(warmup, calls, cpu, place.directory().to_owned(), place.shm_prefix().to_owned())
    };
    let mut server = Role::start(case, Side::Serve, &orders(server_cpu), ends.server)?;
    let mut client = Role::start(case, Side::Measure, &orders(client_cpu), ends.client)?;

    let deadline = Instant::now() + TIMEOUT;
    let answer = client.answer(&mut server, interrupt, deadline)?;
    client.end_well(deadline)?;
    server.end_well(deadline)?;
    Sample::from_line(answer.lines().last().unwrap_or_default())
}

/// Plays one side of a case in this process, which [`Role::start`] started for it.
pub fn play(side: Side, case: &str) -> Result<()> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
        .context("the role could not be tied to the life of its bench")?;
    // If the bench died before the line above, its end of the socket is closed, and the next line reports that.
    let orders = Orders::receive(std::io::stdin().as_fd())?;
    let case = case::find(case)?;
    cpus::pin(orders.cpu)?;
    match side {
        Side::Serve => (case.serve)(orders),
        Side::Measure => {
            let line = (case.measure)(orders)?.to_line()?;
            writeln!(std::io::stdout(), "{line}").context("the bench no longer listens")
        }
    }
}

/// A running role.
struct Role {
    side: Side,
    program: Program,
    /// Becomes readable when the process ends.
    pidfd: OwnedFd,
}

impl Role {
    fn start(case: &Case, side: Side, orders: &Orders, fds: Vec<OwnedFd>) -> Result<Self> {
        let stdout = match side {
            Side::Serve => Stdio::null(),
            Side::Measure => Stdio::piped(),
        };
        let (program, ours) = Program::in_role(&["role", side.name(), case.name], stdout)?;
        orders.send(ours.as_fd(), &fds)?;
        Ok(Role { side, pidfd: program.pidfd()?, program })
    }

    /// Reads the measuring role's output until the role closes it.
    fn answer(&mut self, server: &mut Role, interrupt: &Interrupt, deadline: Instant) -> Result<String> {
        let mut stdout = self.program.output()?;
        let mut answer = Vec::new();
        let mut server_runs = true;
        loop {
            let watched = [stdout.as_fd(), interrupt.as_fd(), server.pidfd.as_fd()];
            let [heard, stop, ended] = wait_for(watched, server_runs, deadline)?;
            ensure!(!stop, "interrupted");
            if heard {
                let mut chunk = [0; 16 * 1024];
                match stdout.read(&mut chunk).context("the measuring role's answer could not be read")? {
                    0 => return String::from_utf8(answer).context("the measuring role answered with no text"),
                    count => answer.extend_from_slice(&chunk[..count]),
                }
            } else if ended {
                // The server may end before the last of the answer is read, but only with success.
                server.end_well(deadline)?;
                server_runs = false;
            }
        }
    }

    /// Waits until the process has ended. An unsuccessful exit is an error.
    fn end_well(&mut self, deadline: Instant) -> Result<()> {
        wait_for([self.pidfd.as_fd()], true, deadline)?;
        let status = self.program.status()?.context("a role that has ended has no exit status")?;
        ensure!(status.success(), "the {} role ended with {status}", self.side.name());
        Ok(())
    }
}

/// Sleeps until one of `fds` is readable, and returns which ones are. The last one counts only with `with_last`.
fn wait_for<const N: usize>(fds: [BorrowedFd<'_>; N], with_last: bool, deadline: Instant) -> Result<[bool; N]> {
    let mut polled = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
    let count = if with_last { N } else { N - 1 };
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(|_| anyhow!("the time-out does not fit the kernel's clock"))?;
        match rustix::event::poll(&mut polled[..count], Some(&left)) {
            Ok(0) => bail!("no answer within {} s, so both roles were killed", TIMEOUT.as_secs()),
            Ok(_) => return Ok(polled.map(|fd| !fd.revents().is_empty())),
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno).context("the roles could not be waited for"),
        }
    }
}
