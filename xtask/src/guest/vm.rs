//! The guest of the daemon's tests of virtual machines: Debian's kernel with its own driver of virtio-net, and a shell.

use std::fs;
use std::path::PathBuf;

use anyhow::Context;

use super::system;
use crate::checkout::Checkout;
use crate::needs::QEMU;
use crate::stream;
use crate::tally::{Reader, Tally};

/// Kernel modules of the network card, in this order.
const MODULES: [&str; 3] = ["failover", "net_failover", "virtio_net"];

/// Commands that the guest runs: it takes the card, which the first process keeps from drivers, and then serves an echo
/// and a shell. The tests wait for its last line.
const COMMANDS: &str = "
for module in /net/*.ko; do insmod $module; done
for device in /sys/bus/pci/devices/*; do
    echo > $device/driver_override
    basename $device > /sys/bus/pci/drivers_probe
done
ip link set lo up
ip address add 192.0.2.9/24 dev eth0
ip link set eth0 up
nc -ll -p 7 -e cat &
nc -ll -p 10 -e sh &
echo 'guest: ready'
wait
";

/// Runs the daemon's tests of virtual machines. They are part of the suite, too.
pub fn run(checkout: &Checkout) -> anyhow::Result<Tally> {
    let files = prepare(checkout)?;
    let mut command = checkout.cargo("test");
    command.env("TASUKI_VM", std::env::join_paths(files)?);
    command.args(["-p", "tasuki-control", "--all-features", "--test", "suite", "--", "--show-output", "daemon::vms::"]);
    let mut reader = Reader::default();
    let status = stream::run_showing(&mut command, |line| reader.line(line))?;
    Ok(reader.finish(status.success()))
}

/// Makes the guest. Returns the files of its kernel and its archive.
pub fn prepare(checkout: &Checkout) -> anyhow::Result<[PathBuf; 2]> {
    anyhow::ensure!(QEMU.is_met(), "needs QEMU: sudo apt-get install -y {}", QEMU.package);
    let place = system::place(checkout)?;
    let system = system::fetch(&place).context("needs a kernel from Debian's archive, by apt-get download")?;
    let mut archive = system::begin(&system, COMMANDS)?;
    archive.add("net", 0o040_755, &[]);
    for (number, module) in MODULES.iter().enumerate() {
        let file = system.module(module)?.with_context(|| format!("the kernel has no module {module}"))?;
        archive.add(&format!("net/{number}-{module}.ko"), 0o100_644, &system::read(&file)?);
    }
    let file = place.join("vm.initrd");
    fs::write(&file, archive.finish()).with_context(|| format!("cannot write {}", file.display()))?;
    Ok([system.kernel, file])
}
