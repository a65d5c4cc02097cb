//! The parts of every guest: Debian's kernel and shell, a program of ours, and a machine with an IOMMU.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail, ensure};
use serde_json::{Value, json};

use super::archive::Archive;
use crate::checkout::{Checkout, host, output};
use crate::needs::QEMU;
use crate::stream;

/// Script of the guest's first process, which runs before the program.
const INIT: &str = include_str!("../guest-init.sh");

/// Kernel modules that the guest loads, in this order.
const MODULES: [&str; 16] = [
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
    "tun",
];

/// Text that the guest prints at its end, before the status of its commands.
pub const ENDED: &str = "guest: ended with ";

/// The kernel's command line. On a busy host, timers come too late for the kernel's check of them, which ends the
/// guest; `no_timer_check` turns that check off.
pub const KERNEL_LINE: &str = "console=ttyS0 quiet intel_iommu=on iommu=pt no_timer_check panic=-1";

/// Returns the folder in which guests are made, and creates it.
pub fn place(checkout: &Checkout) -> anyhow::Result<PathBuf> {
    let place = checkout.target.join("guest");
    fs::create_dir_all(&place).with_context(|| format!("cannot make {}", place.display()))?;
    Ok(place)
}

/// Returns QEMU's arguments for a machine with an IOMMU that remaps interrupts. The machine has no card, no console and
/// no kernel command line yet.
pub fn machine(kernel: &Path, archive: &Path) -> Vec<String> {
    let words = [
        ["-machine", "q35,kernel-irqchip=split"],
        ["-accel", "tcg"],
        ["-cpu", "max"],
        ["-m", "1G"],
        ["-smp", "2"],
        ["-display", "none"],
        ["-device", "intel-iommu,intremap=on"],
        ["-kernel", &kernel.to_string_lossy()],
        ["-initrd", &archive.to_string_lossy()],
    ];
    words.as_flattened().iter().chain(&["-no-reboot", "-nodefaults"]).map(|&word| word.to_owned()).collect()
}

/// Files from Debian's packages.
pub struct System {
    pub kernel: PathBuf,
    modules: PathBuf,
    busybox: PathBuf,
}

impl System {
    /// Returns the file of a kernel module, if the kernel has one.
    pub fn module(&self, name: &str) -> anyhow::Result<Option<PathBuf>> {
        let file = format!("{name}.ko");
        let files = files_under(&self.modules)?;
        Ok(files.into_iter().find(|path| path.file_name().is_some_and(|its| its == file.as_str())))
    }
}

/// Fetches the kernel and the shell, unless a previous call did.
pub fn fetch(place: &Path) -> anyhow::Result<System> {
    let root = place.join("debian");
    if !root.join("complete").exists() {
        fs::create_dir_all(&root).with_context(|| format!("cannot make {}", root.display()))?;
        let kernel = match kernel_package()? {
            Some(kernel) => kernel,
            None => {
                // A fresh machine has no package lists yet.
                stream::succeeds(Command::new("apt-get").arg("update"))?;
                kernel_package()?.context("apt-cache knows no linux-image-amd64")?
            }
        };
        let mut download = Command::new("apt-get");
        download.args(["download", &kernel, "busybox-static"]).current_dir(&root);
        ensure!(stream::succeeds(&mut download)?, "apt-get did not download {kernel} and busybox-static");
        unpack(&root, &root)?;
        fs::write(root.join("complete"), "")?;
    }
    let kernel = files_under(&root.join("boot"))?.into_iter().find(|file| has_prefix(file, "vmlinuz-"));
    let kernel = kernel.context("the package of the kernel has no vmlinuz")?;
    Ok(System { kernel, modules: root.join("lib/modules"), busybox: root.join("bin/busybox") })
}

/// Unpacks the packages in a folder into `root`, and deletes them.
pub fn unpack(packages: &Path, root: &Path) -> anyhow::Result<()> {
    for entry in fs::read_dir(packages)? {
        let package = entry?.path();
        if package.extension().is_some_and(|end| end == "deb") {
            output(Command::new("dpkg").arg("-x").arg(&package).arg(root))?;
            fs::remove_file(package)?;
        }
    }
    Ok(())
}

/// Returns the name of Debian's current kernel package.
fn kernel_package() -> anyhow::Result<Option<String>> {
    let depends = output(Command::new("apt-cache").args(["depends", "linux-image-amd64"]))?;
    let depends = String::from_utf8_lossy(&depends);
    let kernel = depends.lines().find_map(|line| line.trim().strip_prefix("Depends: linux-image-"));
    Ok(kernel.map(|version| format!("linux-image-{version}")))
}

fn has_prefix(file: &Path, prefix: &str) -> bool {
    file.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix))
}

/// Returns all files below `folder`.
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

/// Builds one program that needs nothing from the guest except the kernel. `verb` and `words` are cargo's arguments,
/// which select the program.
pub fn build(checkout: &Checkout, place: &Path, verb: &str, words: &[&str]) -> anyhow::Result<PathBuf> {
    match build_all(checkout, place, verb, words)?.as_slice() {
        [program] => Ok(program.clone()),
        others => bail!("the guest's program was built into {} programs", others.len()),
    }
}

/// As [`build`], for any number of programs.
pub fn build_all(checkout: &Checkout, place: &Path, verb: &str, words: &[&str]) -> anyhow::Result<Vec<PathBuf>> {
    let mut command = checkout.cargo(verb);
    command.args(words).args(["--message-format=json", "--target", &host()?]);
    command.env("CARGO_TARGET_DIR", place.join("build")).env_remove("CARGO_ENCODED_RUSTFLAGS");
    command.env("RUSTFLAGS", "-Ctarget-feature=+crt-static -Cstrip=symbols");
    let messages = output(&mut command).context("the guest's program does not build")?;
    let messages = messages.split(|&byte| byte == b'\n').filter_map(|line| serde_json::from_slice::<Value>(line).ok());
    Ok(messages.filter_map(|message| Some(PathBuf::from(message["executable"].as_str()?))).collect())
}

/// Returns the archive that the guest finds in its memory. The guest's shell runs `commands`, in which `/program` is
/// `program`.
pub fn pack(system: &System, program: &Path, commands: &str) -> anyhow::Result<Vec<u8>> {
    let mut archive = begin(system, commands)?;
    archive.add("program", 0o100_755, &read(program)?);
    Ok(archive.finish())
}

/// Begins such an archive, without a program.
pub fn begin(system: &System, commands: &str) -> anyhow::Result<Archive> {
    let mut archive = Archive::default();
    for folder in ["bin", "dev", "proc", "sys", "tmp", "modules"] {
        archive.add(folder, 0o040_755, &[]);
    }
    archive.add("init", 0o100_755, INIT.as_bytes());
    archive.add("commands", 0o100_644, commands.as_bytes());
    archive.add("bin/busybox", 0o100_755, &read(&system.busybox)?);
    let modules = files_under(&system.modules)?;
    for (number, name) in MODULES.iter().enumerate() {
        // A kernel with this module built in has no file of it.
        let file = modules.iter().find(|file| file.file_name().is_some_and(|its| its == format!("{name}.ko").as_str()));
        if let Some(file) = file {
            archive.add(&format!("modules/{number:02}-{name}.ko"), 0o100_644, &read(file)?);
        }
    }
    Ok(archive)
}

/// Returns the folder in which guests are made, and what all consist of.
pub fn prepare(checkout: &Checkout) -> anyhow::Result<(PathBuf, System)> {
    ensure!(QEMU.is_met(), "needs QEMU: sudo apt-get install -y {}", QEMU.package);
    let place = place(checkout)?;
    let system = fetch(&place).context("needs a kernel from Debian's archive, by apt-get download")?;
    Ok((place, system))
}

/// Writes the file that describes a machine to the bench, and returns it.
pub fn describe(file: PathBuf, words: &[String], kernel_line: &str) -> anyhow::Result<PathBuf> {
    let machine = json!({ "program": QEMU.program, "words": words, "kernel_line": kernel_line });
    write(file, machine.to_string().as_bytes())
}

/// Writes a file, and returns it.
pub fn write(file: PathBuf, bytes: &[u8]) -> anyhow::Result<PathBuf> {
    fs::write(&file, bytes).with_context(|| format!("cannot write {}", file.display()))?;
    Ok(file)
}

/// Returns the content of a file.
pub fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_init_says_how_it_ended() {
        assert!(INIT.contains(ENDED));
    }
}
