//! `guest`: tests that need VFIO and an IOMMU, in a machine that has both: QEMU, with the stock kernel of Debian.
//!
//! The kernel comes from Debian's archive and is unpacked, never installed. The guest has no disk: an archive in memory holds a
//! shell, the kernel's modules and the test program, which is linked statically. What the program prints on the serial line is counted
//! like any other test's output. The other ends of its cards' wires are ports of the guest (see `wire`), and so is QEMU's monitor.
//!
//! `target/guest/` holds what was fetched and built.

mod wire;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail, ensure};
use serde_json::Value;

use crate::checkout::{Checkout, host, output};
use crate::needs::QEMU;
use crate::stream;
use crate::tally::{Reader, Tally};
use wire::Wire;

/// The guest boots in seconds, and its tests take one minute or two. Whoever needs more hangs.
const LIMIT_SECONDS: &str = "290";

/// The cards that are tested, each with its name and what QEMU's `-device` is told of it. Each is at a wire of that name.
const CARDS: [(&str, &str); 2] =
    [("e1000e", "e1000e"), ("virtio_net", "virtio-net-pci,disable-legacy=on,iommu_platform=on,host_mtu=9000")];

/// The address that each of them has.
const MAC: &str = "52:54:00:12:34:57";

/// Runs before the tests, as the first process of the guest.
const INIT: &str = include_str!("guest-init.sh");

/// The kernel's modules that the guest loads, in this order.
const MODULES: [&str; 15] = [
    "irqbypass",
    "vfio_virqfd",
    "vfio",
    "vfio_iommu_type1",
    "vfio-pci-core",
    "vfio-pci",
    "pps_core",
    "ptp",
    "e1000e",
    "virtio_ring",
    "virtio",
    "virtio_pci_modern_dev",
    "virtio_pci_legacy_dev",
    "virtio_pci",
    "virtio_console",
];

/// What the guest prints in the end, before the status of the test program.
const ENDED: &str = "guest: the tests ended with ";

/// As a stage of the suite, and as a verb.
pub fn run(checkout: &Checkout) -> anyhow::Result<Tally> {
    if !QEMU.is_met() {
        return Ok(Tally::skip(1, "needs QEMU: sudo apt-get install -y qemu-system-x86"));
    }
    let place = checkout.target.join("guest");
    fs::create_dir_all(&place).with_context(|| format!("cannot make {}", place.display()))?;
    let system = match fetch(&place) {
        Ok(system) => system,
        Err(error) => {
            println!("xtask: {error:#}");
            return Ok(Tally::skip(1, "needs a kernel from Debian's archive, by apt-get download"));
        }
    };
    let program = build(checkout, &place)?;
    let archive = place.join("initrd");
    fs::write(&archive, pack(&system, &program)?).with_context(|| format!("cannot write {}", archive.display()))?;
    let folder = tempfile::tempdir().context("cannot make a folder for sockets")?;
    let wires = CARDS.iter().map(|(name, _)| Wire::lay(folder.path(), name)).collect::<anyhow::Result<Vec<_>>>()?;
    let mut reader = Reader::default();
    let mut status = None;
    let booted = stream::run(&mut machine(&system.kernel, &archive, folder.path(), &wires), |line| {
        let line = line.trim_end_matches('\r');
        reader.line(line);
        status = line.strip_prefix(ENDED).map(str::to_owned).or(status.take());
    })?;
    if status.is_none() {
        println!("xtask: the guest did not come to the end of its tests (QEMU ended with {booted})");
    }
    Ok(reader.finish(status.as_deref() == Some("0")))
}

/// A machine with an IOMMU that remaps interrupts, and the cards, each at its wire. The machine's monitor is a port of the guest, too.
fn machine(kernel: &Path, archive: &Path, folder: &Path, wires: &[Wire]) -> Command {
    let mut command = Command::new("timeout");
    command.args(["--kill-after=5", LIMIT_SECONDS, QEMU.program]);
    command.args(["-machine", "q35,kernel-irqchip=split", "-accel", "tcg", "-cpu", "max", "-m", "1G", "-smp", "2"]);
    command.args(["-display", "none", "-serial", "stdio", "-no-reboot", "-nodefaults"]);
    command.arg("-kernel").arg(kernel).arg("-initrd").arg(archive);
    // On a host with much to do, timers come too late for the kernel's check of them, which ends the guest.
    command.args(["-append", "console=ttyS0 quiet intel_iommu=on iommu=pt no_timer_check panic=-1"]);
    command.args(["-device", "intel-iommu,intremap=on", "-device", "virtio-serial-pci"]);
    let monitor = format!("path={}", folder.join("monitor").display());
    command.args(["-chardev", &format!("socket,id=asked,server=on,wait=off,{monitor}")]);
    command.args(["-device", "virtserialport,chardev=asked,name=monitor"]);
    command.args(["-chardev", &format!("socket,id=monitor,{monitor}"), "-mon", "chardev=monitor,mode=control"]);
    for (number, (wire, (name, device))) in wires.iter().zip(CARDS).enumerate() {
        command.args(wire.arguments());
        // Behind a port it is PCI Express.
        command.args(["-device", &format!("pcie-root-port,id=port-{name},chassis={}", number + 1)]);
        command.args(["-device", &format!("{device},bus=port-{name},netdev={name},mac={MAC}")]);
    }
    // At a wire where nobody else is.
    command.args(["-netdev", "hubport,id=c,hubid=2", "-device", "rtl8139,netdev=c"]);
    command
}

/// What comes from Debian.
struct System {
    kernel: PathBuf,
    modules: PathBuf,
    busybox: PathBuf,
}

/// Fetches kernel and shell, unless they are there.
fn fetch(place: &Path) -> anyhow::Result<System> {
    let root = place.join("debian");
    if !root.join("complete").exists() {
        fs::create_dir_all(&root).with_context(|| format!("cannot make {}", root.display()))?;
        let kernel = match kernel_package()? {
            Some(kernel) => kernel,
            None => {
                // A machine that nobody has used yet has no list of packages.
                stream::succeeds(Command::new("apt-get").arg("update"))?;
                kernel_package()?.context("apt-cache knows no linux-image-amd64")?
            }
        };
        let mut download = Command::new("apt-get");
        download.args(["download", &kernel, "busybox-static"]).current_dir(&root);
        ensure!(stream::succeeds(&mut download)?, "apt-get did not download {kernel} and busybox-static");
        for entry in fs::read_dir(&root)? {
            let package = entry?.path();
            if package.extension().is_some_and(|end| end == "deb") {
                output(Command::new("dpkg").arg("-x").arg(&package).arg(&root))?;
                fs::remove_file(package)?;
            }
        }
        fs::write(root.join("complete"), "")?;
    }
    let kernel = files_under(&root.join("boot"))?.into_iter().find(|file| has_prefix(file, "vmlinuz-"));
    let kernel = kernel.context("the package of the kernel has no vmlinuz")?;
    Ok(System { kernel, modules: root.join("lib/modules"), busybox: root.join("bin/busybox") })
}

/// The package of the kernel that Debian has now.
fn kernel_package() -> anyhow::Result<Option<String>> {
    let depends = output(Command::new("apt-cache").args(["depends", "linux-image-amd64"]))?;
    let depends = String::from_utf8_lossy(&depends);
    let kernel = depends.lines().find_map(|line| line.trim().strip_prefix("Depends: linux-image-"));
    Ok(kernel.map(|version| format!("linux-image-{version}")))
}

fn has_prefix(file: &Path, prefix: &str) -> bool {
    file.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix))
}

/// All files below `folder`.
fn files_under(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))? {
            let entry = entry?;
            match entry.file_type()? {
                kind if kind.is_dir() => folders.push(entry.path()),
                kind if kind.is_file() => files.push(entry.path()),
                _ => {}
            }
        }
    }
    Ok(files)
}

/// Builds the test program so that it needs nothing of the guest but the kernel.
fn build(checkout: &Checkout, place: &Path) -> anyhow::Result<PathBuf> {
    let mut command = checkout.cargo("test");
    command.args(["-p", "tasuki-net", "--test", "guest", "--no-run", "--message-format=json", "--target", &host()?]);
    command.env("CARGO_TARGET_DIR", place.join("build")).env_remove("CARGO_ENCODED_RUSTFLAGS");
    command.env("RUSTFLAGS", "-Ctarget-feature=+crt-static -Cstrip=symbols");
    let messages = output(&mut command).context("the guest's tests do not build")?;
    let messages = messages.split(|&byte| byte == b'\n').filter_map(|line| serde_json::from_slice::<Value>(line).ok());
    let programs = messages.filter_map(|message| Some(PathBuf::from(message["executable"].as_str()?)));
    match programs.collect::<Vec<_>>().as_slice() {
        [program] => Ok(program.clone()),
        others => bail!("the guest's tests were built into {} programs", others.len()),
    }
}

/// The archive that the guest finds in its memory.
fn pack(system: &System, program: &Path) -> anyhow::Result<Vec<u8>> {
    let read = |path: &Path| fs::read(path).with_context(|| format!("cannot read {}", path.display()));
    let mut archive = Archive::default();
    for folder in ["bin", "dev", "proc", "sys", "tmp", "modules"] {
        archive.add(folder, 0o040_755, &[]);
    }
    archive.add("init", 0o100_755, INIT.as_bytes());
    archive.add("tests", 0o100_755, &read(program)?);
    archive.add("bin/busybox", 0o100_755, &read(&system.busybox)?);
    let modules = files_under(&system.modules)?;
    for (number, name) in MODULES.iter().enumerate() {
        // A kernel that has it built in has no file of it.
        let file = modules.iter().find(|file| file.file_name().is_some_and(|its| its == format!("{name}.ko").as_str()));
        if let Some(file) = file {
            archive.add(&format!("modules/{number:02}-{name}.ko"), 0o100_644, &read(file)?);
        }
    }
    Ok(archive.finish())
}

/// A cpio archive in the format that kernels unpack, `newc` (the kernel's Documentation/driver-api/early-userspace/buffer-format.rst).
#[derive(Default)]
struct Archive {
    bytes: Vec<u8>,
    count: usize,
}

impl Archive {
    fn add(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.count += 1;
        let (inode, len, name_len) = (self.count, content.len(), name.len() + 1);
        // Magic, inode, mode, user, group, links, time, length, four numbers of devices, length of the name, checksum.
        let header = format!(
            "070701{inode:08x}{mode:08x}{:08x}{:08x}{:08x}{:08x}{len:08x}{:08x}{:08x}{:08x}{:08x}{name_len:08x}{:08x}",
            0, 0, 1, 0, 0, 0, 0, 0, 0
        );
        self.bytes.extend(header.as_bytes());
        self.bytes.extend(name.as_bytes());
        self.bytes.push(0);
        self.align();
        self.bytes.extend(content);
        self.align();
    }

    fn align(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    fn finish(mut self) -> Vec<u8> {
        self.add("TRAILER!!!", 0, &[]);
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_is_what_kernels_unpack() {
        let mut archive = Archive::default();
        archive.add("a", 0o100_644, b"hello");
        let bytes = archive.finish();
        assert_eq!(
            &bytes[..110],
            b"07070100000001000081a4000000000000000000000001000000000000000500000000000000000000000000000000000000020000\
              0000"
        );
        assert_eq!(&bytes[110..120], b"a\0hello\0\0\0", "name and content each end on a multiple of four");
        assert_eq!(&bytes[120..126], b"070701");
        assert_eq!(bytes.len() % 4, 0);
    }

    #[test]
    fn the_init_says_how_it_ended() {
        assert!(INIT.contains(ENDED));
    }
}
