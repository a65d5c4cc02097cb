//! Paths of the checkout, cargo, and cargo's target folder.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail};
use serde_json::Value;

/// The checkout that this xtask was started from.
pub struct Checkout {
    pub root: PathBuf,
    /// Target folder of the root workspace. The loom and fuzz builds use folders inside it.
    pub target: PathBuf,
}

impl Checkout {
    pub fn find() -> anyhow::Result<Checkout> {
        // `cargo run` sets the variable. If the program is started directly, the path of its build applies.
        let manifest_dir = env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
        let root = Path::new(&manifest_dir).parent().context("xtask must lie in a folder of the checkout")?.to_owned();
        let target = metadata(&root.join("Cargo.toml"))?["target_directory"]
            .as_str()
            .context("`cargo metadata` names no target_directory; is this cargo too old?")?
            .into();
        Ok(Checkout { root, target })
    }

    /// Returns `cargo VERB`, to be run in the root of the checkout.
    pub fn cargo(&self, verb: &str) -> Command {
        let mut command = Command::new(cargo());
        command.arg(verb).current_dir(&self.root);
        command
    }
}

/// Returns the cargo that started us, so that one command uses one toolchain.
pub fn cargo() -> OsString {
    env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

/// Returns the output of `cargo metadata --no-deps` for a workspace. Needs no network.
pub fn metadata(manifest: &Path) -> anyhow::Result<Value> {
    let mut command = Command::new(cargo());
    command.args(["metadata", "--no-deps", "--format-version", "1", "--manifest-path"]).arg(manifest);
    // cargo takes a relative CARGO_TARGET_DIR as relative to its working folder.
    command.current_dir(manifest.parent().unwrap_or(manifest));
    serde_json::from_slice(&output(&mut command)?).context("`cargo metadata` did not answer with JSON")
}

/// Returns the platform that rustc builds for by default.
pub fn host() -> anyhow::Result<String> {
    let answer = output(Command::new(env::var_os("RUSTC").unwrap_or_else(|| "rustc".into())).arg("-vV"))?;
    let answer = String::from_utf8(answer).context("`rustc -vV` did not answer in UTF-8")?;
    let host = answer.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.context("`rustc -vV` names no host")?.to_owned())
}

/// Returns the standard output of a command that must succeed. Its standard error goes to the terminal.
pub fn output(command: &mut Command) -> anyhow::Result<Vec<u8>> {
    let finished = command
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot start `{}`", command_line(command)))?;
    if !finished.status.success() {
        bail!("`{}` ended with {}", command_line(command), finished.status);
    }
    Ok(finished.stdout)
}

/// Returns a command as a person would type it, with the program's name but not its folder.
pub fn command_line(command: &Command) -> String {
    let program = Path::new(command.get_program()).file_name().unwrap_or(command.get_program());
    let words = std::iter::once(program).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}
