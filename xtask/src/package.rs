//! `package`: makes the Debian package of what ships, in `target/package`.
//!
//! cargo-deb does the work (`package.metadata.deb` in crates/tasuki-control/Cargo.toml). What it cannot make is made here: the
//! manual pages and completions, by the programs themselves.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};

use crate::checkout::{Checkout, output};
use crate::stream;

/// The packages whose programs ship.
const SHIPPED: [&str; 3] = ["tasuki-control", "tasuki-worker", "tasuki-sim"];

/// Version of cargo-deb that this was tried with.
const CARGO_DEB: &str = "3.8.0";

/// The C library that programs can be linked with statically.
const MUSL: &str = "x86_64-unknown-linux-musl";

/// The programs that ship.
const PROGRAMS: [&str; 6] = ["tasukid", "tasuki", "tasuki-cni", "tasuki-netavark", "tasuki-worker", "tasuki-sim"];

/// Makes the package, with the workspace's version or another one. Returns its path.
pub fn make(checkout: &Checkout, version: Option<&str>) -> anyhow::Result<PathBuf> {
    let (_, place) = build(checkout, None)?;
    let mut deb = Command::new(cargo_deb(checkout)?);
    deb.args(["--package", "tasuki-control", "--no-build", "--strip", "--quiet", "--output"])
        .arg(&place)
        .current_dir(&checkout.root);
    deb.env("CARGO_TARGET_DIR", &checkout.target);
    version.iter().for_each(|version| _ = deb.args(["--deb-version", version]));
    ensure!(stream::succeeds(&mut deb)?, "cargo-deb does not make the package");
    package_in(&place)?.with_context(|| format!("cargo-deb left no package in {}", place.display()))
}

/// Makes an archive of programs that need no library, with their pages, completions and units, for machines without
/// Debian's packages. Returns its path.
pub fn make_static(checkout: &Checkout) -> anyhow::Result<PathBuf> {
    let rustup = stream::succeeds(Command::new("rustup").args(["target", "add", MUSL]));
    ensure!(rustup.unwrap_or(false), "there is no Rust library for {MUSL}: rustup target add {MUSL}");
    let (release, place) = build(checkout, Some(MUSL))?;
    let folder = place.join("tasuki");
    fs::create_dir_all(folder.join("bin")).with_context(|| format!("cannot make {}", folder.display()))?;
    for program in PROGRAMS {
        let to = folder.join("bin").join(program);
        fs::copy(release.join(program), &to).with_context(|| format!("cannot write {}", to.display()))?;
        output(Command::new("strip").arg(&to))?;
    }
    for made in ["man", "completions"] {
        fs::rename(place.join(made), folder.join(made))?;
    }
    let parts = [
        "README.md",
        "LICENSE-APACHE",
        "LICENSE-MIT",
        "contrib/systemd",
        "contrib/debian/tasuki.toml",
        "docs",
        "examples",
    ];
    let parts = parts.map(|part| checkout.root.join(part));
    output(Command::new("cp").arg("-r").args(parts).arg(&folder))?;
    let archive = place.join("tasuki-static-x86_64.tar.gz");
    output(Command::new("tar").arg("-czf").arg(&archive).arg("-C").arg(&place).arg("tasuki"))?;
    Ok(archive)
}

/// Builds the programs that ship, for a target or this machine, and what they say of themselves. Returns the folders of
/// programs and of the package.
fn build(checkout: &Checkout, target: Option<&str>) -> anyhow::Result<(PathBuf, PathBuf)> {
    let mut build = checkout.cargo("build");
    build.args(["--release", "--bins"]);
    SHIPPED.iter().for_each(|package| _ = build.args(["--package", package]));
    target.iter().for_each(|target| _ = build.args(["--target", target]));
    ensure!(stream::succeeds(&mut build)?, "the programs that ship do not build");
    let place = checkout.target.join("package");
    let release = checkout.target.join(target.unwrap_or_default()).join("release");
    // A former version may have had files that this one has not. Packages stay: one may be the way back.
    for made in ["man", "completions", "tasuki"] {
        let _ = fs::remove_dir_all(place.join(made));
    }
    let (man, completions) = (place.join("man"), place.join("completions"));
    for folder in [&man, &completions] {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    for program in ["tasuki", "tasukid"] {
        output(Command::new(release.join(program)).arg("man").arg(&man))?;
    }
    for (shell, file) in [("bash", "tasuki"), ("zsh", "_tasuki"), ("fish", "tasuki.fish")] {
        let script = output(Command::new(release.join("tasuki")).args(["completions", shell]))?;
        fs::write(completions.join(file), script)?;
    }
    Ok((release, place))
}

/// Returns the package that was made last.
fn package_in(place: &Path) -> anyhow::Result<Option<PathBuf>> {
    let files = fs::read_dir(place)?.map(|entry| Ok(entry?.path())).collect::<anyhow::Result<Vec<_>>>()?;
    let packages = files.into_iter().filter(|file| file.extension() == Some(OsStr::new("deb")));
    Ok(packages.max_by_key(|file| file.metadata().and_then(|meta| meta.modified()).ok()))
}

/// Returns the path of cargo-deb, which is installed below `target` first if it is not there.
fn cargo_deb(checkout: &Checkout) -> anyhow::Result<PathBuf> {
    let tools = checkout.target.join("tools");
    let program = tools.join("bin/cargo-deb");
    if !program.exists() {
        let mut install = checkout.cargo("install");
        install.args(["cargo-deb", "--locked", "--version", CARGO_DEB, "--root"]).arg(&tools);
        ensure!(stream::succeeds(&mut install)?, "cargo does not install cargo-deb {CARGO_DEB}");
    }
    Ok(program)
}
