//! The command line. It drives nothing itself: it becomes the program that does.

use std::convert::Infallible;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, ensure};
use clap::{Parser, Subcommand};

/// Network cards that change hands while packets flow.
#[derive(Debug, Parser)]
#[command(name = "tasuki", version)]
struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// One network card: what it is (probe), or frames in and out of it (run).
    #[command(disable_help_flag = true)]
    Nic {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "probe|run …")]
        words: Vec<OsString>,
    },
    /// A model of a network card, as a vfio-user device.
    #[command(disable_help_flag = true)]
    Sim {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "nic …")]
        words: Vec<OsString>,
    },
}

/// Becomes `program`, which stands beside this one.
fn become_program(program: &str, words: Vec<OsString>) -> Result<Infallible> {
    let path =
        std::env::current_exe().context("the kernel does not say where this program is")?.with_file_name(program);
    ensure!(path.exists(), "there is no {}; build it: cargo build --package {program}", path.display());
    let error = Command::new(&path).args(words).exec();
    Err(error).with_context(|| format!("{} does not start", path.display()))
}

fn main() -> ExitCode {
    let done = match Arguments::parse().what {
        What::Nic { words } => {
            become_program("tasuki-worker", [OsString::from("nic")].into_iter().chain(words).collect())
        }
        What::Sim { words } => become_program("tasuki-sim", [OsString::from("sim")].into_iter().chain(words).collect()),
    };
    match done {
        Ok(never) => match never {},
        Err(error) => {
            eprintln!("tasuki: {error:#}");
            ExitCode::FAILURE
        }
    }
}
