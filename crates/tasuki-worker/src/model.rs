//! Our own model of a card, as a child process.
//!
//! Its standard input is the other end of our connection to it. So it ends when we end, even by a kill, and no file
//! name is left behind.

use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

/// Name of the model's program.
const PROGRAM: &str = "tasuki-sim";

/// A model that runs until this value is dropped.
#[derive(Debug)]
pub struct Model(Child);

impl Model {
    /// Starts the model. Returns it and the connection to it.
    pub fn start() -> Result<(Self, OwnedFd)> {
        let program = std::env::current_exe()?.with_file_name(PROGRAM);
        ensure!(program.exists(), "there is no {}; build it: cargo build --package tasuki-sim", program.display());
        let (ours, its) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .context("the kernel has no pair of sockets for the model")?;
        let mut command = Command::new(&program);
        command.args(["sim", "nic", "--stdin"]).stdin(Stdio::from(its)).stdout(Stdio::null());
        // Ctrl-C in a terminal is for us only: the card outlives its driver.
        command.process_group(0);
        let child = command.spawn().with_context(|| format!("{} does not start", program.display()))?;
        Ok((Model(child), ours))
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
