//! Programs that a test starts.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use rustix::process::{Pid, Signal};

use crate::process;
use crate::until::until;

/// A running program. Dropping it kills it and waits for its end.
#[derive(Debug)]
pub struct Program(pub Child);

impl Program {
    /// Starts a program.
    pub fn start(command: &mut Command) -> Self {
        Program(command.spawn().expect("a program that was built"))
    }

    /// Returns the process.
    pub fn id(&self) -> Pid {
        Pid::from_child(&self.0)
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        rustix::process::kill_process(self.id(), signal).expect("a child of ours");
    }

    /// Returns whether it has not ended yet.
    pub fn is_running(&mut self) -> bool {
        self.0.try_wait().expect("a child of ours").is_none()
    }

    /// Kills it and waits for its end.
    pub fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }

    /// Waits until it ends by itself. Returns its exit code, or nothing if a signal ended it. Panics after
    /// [`PATIENCE`](crate::PATIENCE).
    pub fn end(&mut self) -> Option<i32> {
        until("the end of a program", || !self.is_running());
        self.0.wait().expect("a child of ours").code()
    }

    /// Kills it, unless it has ended. Returns whether it was killed, now or before.
    pub fn was_killed(mut self) -> bool {
        let _ = self.0.kill();
        self.0.wait().expect("a child of ours").signal() == Some(Signal::KILL.as_raw())
    }

    /// Returns a field of its file `status`, as [`process::status`] does.
    pub fn status(&self, field: &str) -> String {
        process::status(self.id(), field).unwrap_or_default()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Returns the path of a program that cargo has built beside `program`, if it is there. A build of the whole
/// workspace puts them there; a build of one package does not.
pub fn beside(program: &str, name: &str) -> Option<PathBuf> {
    let path = Path::new(program).with_file_name(name);
    path.exists().then_some(path)
}

/// Writes a program of the shell to `path`, or another one in its place. A process may run it at once.
pub fn script(path: &Path, text: &str) {
    // A process that has the former one open reads on in that.
    let aside = path.with_added_extension("new");
    let writes = "printf '#!/bin/sh\\n%s\\n' \"$1\" >\"$0\"";
    succeeds(Command::new("sh").args(["-c", writes]).arg(&aside).arg(text));
    fs::set_permissions(&aside, Permissions::from_mode(0o755)).expect("a mode");
    fs::rename(aside, path).expect("a name");
}

/// Copies a program. A process may run the copy at once.
pub fn copy(from: impl AsRef<Path>, to: impl AsRef<Path>) {
    succeeds(Command::new("cp").args([from.as_ref(), to.as_ref()]));
}

/// Has another process write a program. The kernel executes no file that a process has open for writing, and a child of
/// another test has open what this process has, until it executes its own program.
fn succeeds(command: &mut Command) {
    let output = command.output().expect("a tool that each system has");
    assert!(output.status.success(), "{command:?}: {output:?}");
}
