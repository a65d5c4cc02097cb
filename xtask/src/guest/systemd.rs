//! The guest of the daemon's tests. Debian's systemd is its first process, and Debian's dpkg installs the package of
//! `cargo xtask package` before the tests begin.
//!
//! systemd, dpkg and all their dependencies come from Debian's archive and are unpacked, never installed. The shell that
//! boots copies them to a separate file system: a hardened unit has a root of its own, and a process cannot change the
//! root of the memory file system that the kernel boots with.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};

use super::system::{self, ENDED, System};
use crate::checkout::{Checkout, output};
use crate::{package, stream};

/// Commands of the guest's shell after it has loaded the kernel's modules.
const COMMANDS: &str = "mkdir -p /system
mount -t tmpfs -o mode=755 system /system
cp -a /debian/. /system/
umount /dev /sys /proc
exec switch_root /system /lib/systemd/systemd
";

/// The package that is installed when the tests begin, and its next version.
const PACKAGES: [(&str, &str); 2] = [("first.deb", "0.1.0-1"), ("next.deb", "0.1.1-1")];

/// Unit that runs the tests and ends the guest.
const CHECKS: &str = "[Unit]
Description=What tasukid must do under its unit

[Service]
Type=oneshot
TimeoutStartSec=infinity
ExecStartPre=/usr/bin/dpkg --install /packages/first.deb
ExecStart=/program --test-threads=1 --nocapture
ExecStopPost=/bin/sh -c 'echo \"ENDED$EXIT_STATUS\"; exec systemctl poweroff --force --force'
StandardOutput=tty
TTYPath=/dev/ttyS0
";

/// Files of the guest that no package contains. With a machine ID, systemd does not treat the machine as a fresh one,
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
const LINKS: [(&str, &str); 11] = [
    ("bin/sh", "busybox"),
    ("bin/sleep", "busybox"),
    ("bin/mkdir", "busybox"),
    ("bin/rm", "busybox"),
    ("bin/cut", "busybox"),
    ("bin/diff", "busybox"),
    ("bin/timeout", "busybox"),
    ("etc/systemd/system/proc-sys-fs-binfmt_misc.automount", "/dev/null"),
    ("etc/systemd/system/default.target", "/lib/systemd/system/multi-user.target"),
    ("etc/systemd/system/serial-getty@.service", "/dev/null"),
    ("etc/systemd/system/multi-user.target.wants/checks.service", "../checks.service"),
];

/// Returns the archive that the guest finds in its memory.
pub fn pack(checkout: &Checkout, place: &Path, system: &System) -> anyhow::Result<Vec<u8>> {
    let debian = fetch(place).context("needs systemd from Debian's archive, by apt-get install --download-only")?;
    let words = ["-p", "tasuki-worker", "--example", "hostile"];
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
    for folder in [
        "dev",
        "proc",
        "sys",
        "run",
        "tmp",
        "root",
        "etc/systemd/system",
        "etc/systemd/system/multi-user.target.wants",
        "packages",
    ] {
        archive.add(&format!("debian/{folder}"), 0o040_755, &[]);
    }
    archive.add("debian/usr/bin/hostile", 0o100_755, &program(&|its| its == "hostile")?);
    archive.add("debian/program", 0o100_755, &program(&|its| its.starts_with("guest-"))?);
    for (name, version) in PACKAGES {
        let package = system::read(&package::make(checkout, Some(version))?)?;
        archive.add(&format!("debian/packages/{name}"), 0o100_644, &package);
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

/// Fetches systemd, dpkg, iproute2, the shell and all their dependencies, unless a previous call did. apt-get resolves the
/// dependencies as if no package were installed. The guest's dpkg takes them for installed.
fn fetch(place: &Path) -> anyhow::Result<PathBuf> {
    let root = place.join("with-ip");
    let complete = place.join("with-ip.complete");
    if !complete.exists() {
        let packages = place.join("packages");
        for folder in [&root, &packages.join("partial")] {
            fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        }
        let mut download = Command::new("apt-get");
        download.args(["--yes", "--download-only", "--no-install-recommends", "-o", "Dir::State::status=/dev/null"]);
        download.args(["-o", &format!("Dir::Cache::archives={}", packages.display()), "-o", "Debug::NoLocking=1"]);
        // Its scripts need deb-systemd-helper, and dpkg needs ldconfig. Tests make namespaces by `ip netns`.
        download.args(["install", "systemd", "busybox-static", "dpkg", "init-system-helpers", "libc-bin", "iproute2"]);
        ensure!(stream::succeeds(&mut download)?, "apt-get did not download systemd");
        let mut status = String::new();
        for package in fs::read_dir(&packages)?.flatten().map(|entry| entry.path()) {
            if package.extension() == Some(OsStr::new("deb")) {
                let about = output(Command::new("dpkg-deb").arg("--field").arg(&package))?;
                status += &format!("Status: install ok installed\n{}\n", String::from_utf8_lossy(&about));
            }
        }
        system::unpack(&packages, &root)?;
        for folder in ["info", "updates", "triggers"] {
            fs::create_dir_all(root.join("var/lib/dpkg").join(folder))?;
        }
        fs::write(root.join("var/lib/dpkg/status"), status)?;
        fs::write(complete, "")?;
    }
    Ok(root)
}
