//! Our own model of a card, as a process of ours.

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};

/// The program that the model is.
const PROGRAM: &str = "tasuki-sim";

/// A model that runs for as long as this lives.
#[derive(Debug)]
pub struct Model {
    child: Child,
    folder: PathBuf,
    socket: PathBuf,
}

impl Model {
    /// Starts it, and waits until it listens.
    pub fn start() -> Result<Self> {
        let program = std::env::current_exe()?.with_file_name(PROGRAM);
        ensure!(program.exists(), "there is no {}; build it: cargo build --package tasuki-sim", program.display());
        let folder = std::env::temp_dir().join(format!("tasuki-sim-{}", std::process::id()));
        std::fs::create_dir(&folder).with_context(|| format!("{} cannot be made", folder.display()))?;
        let mut command = Command::new(&program);
        let socket = folder.join("nic");
        command.args(["sim", "nic", "--socket"]).arg(&socket).stdin(Stdio::null()).stdout(Stdio::piped());
        // Ctrl-C in a terminal is for us: the card outlives its driver.
        command.process_group(0);
        let child = command.spawn().with_context(|| format!("{} does not start", program.display()));
        let mut model = match child {
            Ok(child) => Model { child, folder, socket },
            Err(error) => {
                let _ = std::fs::remove_dir(&folder);
                return Err(error);
            }
        };
        let mut line = String::new();
        let said = model.child.stdout.take().context("the model has no standard output")?;
        BufReader::new(said).read_line(&mut line)?;
        ensure!(!line.is_empty(), "{PROGRAM} ended before it listened; run it by hand to see why");
        Ok(model)
    }

    /// Where it listens.
    pub fn socket(&self) -> &Path {
        &self.socket
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}
