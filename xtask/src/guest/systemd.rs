//! The guest of the daemon's tests. Debian's systemd is its first process, and tasukid is installed as
//! docs/users/run-under-systemd.md describes.
//!
//! systemd and all its dependencies come from Debian's archive and are unpacked, never installed. The shell that
//! boots
//! copies them to a separate file system: a hardened unit has a root of its own, and a process cannot change the
//! root of
//! the memory file system that the kernel boots with.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};

use super::system::{self, ENDED, System};
use crate::checkout::Checkout;
use crate::stream;

/// Commands of the guest's shell after it has loaded the kernel's modules.
const COMMANDS: &str = "mkdir -p /system
mount -t tmpfs -o mode=755 system /system
cp -a /debian/. /system/
umount /dev /sys /proc
exec switch_root /system /lib/systemd/systemd
";

/// Unit that runs the tests and ends the guest.
const CHECKS: &str = "[Unit]
Description=What tasukid must do under its unit

[Service]
Type=oneshot
TimeoutStartSec=infinity
ExecStart=/program --test-threads=1 --nocapture
ExecStopPost=/bin/sh -c 'echo \"ENDED$EXIT_STATUS\"; exec systemctl poweroff --force --force'
StandardOutput=tty
TTYPath=/dev/ttyS0
";

/// Files of the guest that no package contains. With a machine ID, systemd does not treat the machine as a fresh
/// one,
/// whose units it would all enable.
const FILES: [(&str, &str); 6] = [
    ("etc/passwd", "root:x:0:0:root:/:/bin/sh\n"),
    ("etc/group", "root:x:0:\ntty:x:5:\nsystemd-journal:x:101:\n"),
    ("etc/machine-id", "0123456789abcdef0123456789abcdef\n"),
    ("etc/hostname", "guest\n"),
    // With both `.updated` files systemd finds that nothing has to be updated.
    ("etc/.updated", ""),
    ("var/.updated", ""),
];

/// Symbolic links. No login prompt runs on the serial line, which the tests use.
const LINKS: [(&str, &str); 7] = [
    ("bin/sh", "busybox"),
    ("bin/sleep", "busybox"),
    ("bin/mkdir", "busybox"),
    ("etc/systemd/system/proc-sys-fs-binfmt_misc.automount", "/dev/null"),
    ("etc/systemd/system/default.target", "/lib/systemd/system/multi-user.target"),
    ("etc/systemd/system/serial-getty@.service", "/dev/null"),
    ("etc/systemd/system/multi-user.target.wants/checks.service", "../checks.service"),
];

/// Returns the archive that the guest finds in its memory.
pub fn pack(checkout: &Checkout, place: &Path, system: &System) -> anyhow::Result<Vec<u8>> {
    let debian = fetch(place).context("needs systemd from Debian's archive, by apt-get install --download-only")?;
    let words = ["-p", "tasuki-control", "-p", "tasuki-worker", "--bins", "--example", "hostile"];
    let mut programs = system::build_all(checkout, place, "build", &words)?;
    programs.extend(system::build_all(
        checkout,
        place,
        "test",
        &["-p", "tasuki-control", "--test", "guest", "--no-run"],
    )?);
    let program = |is: &dyn Fn(&str) -> bool| {
        let found = programs.iter().find(|path| path.file_name().and_then(OsStr::to_str).is_some_and(is));
        system::read(found.context("cargo did not build the program")?)
    };
    let mut archive = system::begin(system, COMMANDS)?;
    archive.add_tree("debian", &debian)?;
    for folder in
        ["dev", "proc", "sys", "run", "tmp", "root", "etc/systemd/system", "etc/systemd/system/multi-user.target.wants"]
    {
        archive.add(&format!("debian/{folder}"), 0o040_755, &[]);
    }
    for name in ["tasukid", "tasuki", "tasuki-worker", "hostile"] {
        archive.add(&format!("debian/usr/bin/{name}"), 0o100_755, &program(&|its| its == name)?);
    }
    archive.add("debian/program", 0o100_755, &program(&|its| its.starts_with("guest-"))?);
    for unit in ["tasukid.service", "tasuki-nodes.service"] {
        let text = system::read(&checkout.root.join("contrib/systemd").join(unit))?;
        archive.add(&format!("debian/etc/systemd/system/{unit}"), 0o100_644, &text);
    }
    archive.add("debian/etc/systemd/system/checks.service", 0o100_644, CHECKS.replace("ENDED", ENDED).as_bytes());
    for (name, text) in FILES {
        archive.add(&format!("debian/{name}"), 0o100_644, text.as_bytes());
    }
    for (name, to) in LINKS {
        archive.add(&format!("debian/{name}"), 0o120_777, to.as_bytes());
    }
    Ok(archive.finish())
}

/// Fetches systemd, the shell and all their dependencies, unless a previous call did. apt-get resolves the
/// dependencies
/// as if no package were installed.
fn fetch(place: &Path) -> anyhow::Result<PathBuf> {
    let root = place.join("systemd");
    let complete = place.join("systemd.complete");
    if !complete.exists() {
        let packages = place.join("packages");
        for folder in [&root, &packages.join("partial")] {
            fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        }
        let mut download = Command::new("apt-get");
        download.args(["--yes", "--download-only", "--no-install-recommends", "-o", "Dir::State::status=/dev/null"]);
        download.args(["-o", &format!("Dir::Cache::archives={}", packages.display()), "-o", "Debug::NoLocking=1"]);
        download.args(["install", "systemd", "busybox-static"]);
        ensure!(stream::succeeds(&mut download)?, "apt-get did not download systemd");
        system::unpack(&packages, &root)?;
        fs::write(complete, "")?;
    }
    Ok(root)
}
