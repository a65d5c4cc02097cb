//! `guest`: tests that need VFIO and an IOMMU, in a machine that has both: QEMU with Debian's stock kernel.
//!
//! The kernel comes from Debian's archive and is unpacked, never installed. The guest has no disk: an archive in memory
//! holds a shell, the kernel's modules and the test program, which is linked statically. The output of the program on
//! the serial line is counted like any other test's. The other ends of the cards' wires are ports of the guest (see
//! `wire`), and so is QEMU's monitor.
//!
//! The daemon's tests have a guest with Debian's systemd (see `systemd`). The bench of relays has a guest of the same
//! kind (see `relay`). `target/guest/` holds everything fetched and built.

mod archive;
mod relay;
mod system;
mod systemd;
mod vm;
mod wire;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;

use crate::checkout::Checkout;
use crate::needs::QEMU;
use crate::stream;
use crate::tally::{Reader, Tally};
pub use relay::prepare as prepare_relay;
use system::{ENDED, KERNEL_LINE, System};
pub use vm::{prepare as prepare_vm, prepare_bench};
use wire::Wire;

/// Time limit of a guest, in seconds; a guest that takes longer hangs. A guest boots in seconds. The drivers' tests
/// take one or two minutes, the daemon's tests somewhat more.
const LIMIT_SECONDS: &str = "480";

/// The tested cards: each with its name and its arguments for QEMU's `-device`. Each is connected to a wire of that
/// name.
const CARDS: [(&str, &str); 2] =
    [("e1000e", "e1000e"), ("virtio_net", "virtio-net-pci,disable-legacy=on,iommu_platform=on,host_mtu=9000")];

/// Ethernet address of each card.
const MAC: &str = "52:54:00:12:34:57";

/// Commands that the guest runs.
const TESTS: &str = "/program --test-threads=1 --show-output";

/// A set of tests that has a guest of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// The drivers, one by one
    Drivers,
    /// The daemon, under systemd
    Daemon,
    /// Virtual machines as nodes of a daemon on this host
    Vm,
}

/// Runs the tests of one part, or of those that have all their programs in a guest.
pub fn run(checkout: &Checkout, only: Option<Part>) -> anyhow::Result<Tally> {
    let mut tally = Tally::default();
    if only.is_none_or(|only| only == Part::Drivers) {
        tally += &drivers(checkout)?;
    }
    if only.is_none_or(|only| only == Part::Daemon) {
        tally += &daemon(checkout)?;
    }
    if only == Some(Part::Vm) {
        tally += &vm::run(checkout)?;
    }
    Ok(tally)
}

/// Runs the drivers' tests, which are a stage of the suite, too.
pub fn drivers(checkout: &Checkout) -> anyhow::Result<Tally> {
    in_guest(checkout, |place, system| {
        let words = ["-p", "tasuki-net", "--test", "guest", "--no-run"];
        let program = system::build(checkout, place, "test", &words)?;
        Ok((place.join("initrd"), system::pack(system, &program, TESTS)?))
    })
}

/// Runs the daemon's tests. They take minutes, so they are not a stage of the suite.
fn daemon(checkout: &Checkout) -> anyhow::Result<Tally> {
    in_guest(checkout, |place, system| Ok((place.join("systemd.initrd"), systemd::pack(checkout, place, system)?)))
}

/// Boots a guest and counts its tests. `make` returns a file's path, and the archive to write into it.
fn in_guest(
    checkout: &Checkout,
    make: impl FnOnce(&Path, &System) -> anyhow::Result<(PathBuf, Vec<u8>)>,
) -> anyhow::Result<Tally> {
    if !QEMU.is_met() {
        return Ok(Tally::skip(1, "needs QEMU: sudo apt-get install -y qemu-system-x86"));
    }
    let place = system::place(checkout)?;
    let system = match system::fetch(&place) {
        Ok(system) => system,
        Err(error) => {
            println!("xtask: {error:#}");
            return Ok(Tally::skip(1, "needs a kernel from Debian's archive, by apt-get download"));
        }
    };
    let (archive, bytes) = make(&place, &system)?;
    let archive = system::write(archive, &bytes)?;
    let folder = tempfile::tempdir().context("cannot make a folder for sockets")?;
    let wires = CARDS.iter().map(|(name, _)| Wire::lay(folder.path(), name)).collect::<anyhow::Result<Vec<_>>>()?;
    let mut reader = Reader::default();
    let mut status = None;
    let booted = stream::run_showing(&mut machine(&system.kernel, &archive, folder.path(), &wires), |line| {
        let line = line.trim_end_matches('\r');
        status = line.strip_prefix(ENDED).map(str::to_owned).or(status.take());
        reader.line(line)
    })?;
    if status.is_none() {
        println!("xtask: the guest did not come to the end of its tests (QEMU ended with {booted})");
    }
    Ok(reader.finish(status.as_deref() == Some("0")))
}

/// Returns the kernel's command line. The shell and the tests find the settings that the kernel does not know in their
/// environment.
fn kernel_line() -> String {
    match std::env::var("TASUKI_FREEZES") {
        Ok(count) => format!("{KERNEL_LINE} TASUKI_FREEZES={count}"),
        Err(_) => KERNEL_LINE.to_owned(),
    }
}

/// Returns the command of the machine with the cards, each connected to its wire. The machine's monitor is a port of
/// the guest, too.
fn machine(kernel: &Path, archive: &Path, folder: &Path, wires: &[Wire]) -> Command {
    let mut command = Command::new("timeout");
    command.args(["--kill-after=5", LIMIT_SECONDS, QEMU.program]);
    command.args(system::machine(kernel, archive)).args(["-serial", "stdio", "-append", &kernel_line()]);
    command.args(["-device", "virtio-serial-pci"]);
    let monitor = format!("path={}", folder.join("monitor").display());
    command.args(["-chardev", &format!("socket,id=asked,server=on,wait=off,{monitor}")]);
    command.args(["-device", "virtserialport,chardev=asked,name=monitor"]);
    command.args(["-chardev", &format!("socket,id=monitor,{monitor}"), "-mon", "chardev=monitor,mode=control"]);
    for (number, (wire, (name, device))) in wires.iter().zip(CARDS).enumerate() {
        command.args(wire.arguments());
        // Behind a root port the card is a PCI Express device.
        command.args(["-device", &format!("pcie-root-port,id=port-{name},chassis={}", number + 1)]);
        command.args(["-device", &format!("{device},bus=port-{name},netdev={name},mac={MAC}")]);
    }
    // This card's wire has no other end.
    command.args(["-netdev", "hubport,id=c,hubid=2", "-device", "rtl8139,netdev=c"]);
    command
}
