//! The guest of the daemon's tests of virtual machines and of `bench guest`: Debian's kernel with its own driver of
//! virtio-net, and a shell. The bench's has a program of ours, too.

use std::path::{Path, PathBuf};

use anyhow::Context;

use super::system::{self, System};
use crate::checkout::Checkout;
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

/// The kernel's own maker of frames. The bench's guest loads it when it is to send some: its thread never rests.
const PKTGEN: &str = "pktgen";

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

/// The kernel's command line of the bench's guest. It takes the time from the CPU: a clock that QEMU emulates would cost
/// the host more than the card does.
const KERNEL_LINE: &str = "console=ttyS0 quiet no_timer_check panic=-1 clocksource=tsc tsc=reliable";

/// Makes the guest. Returns the files of its kernel and its archive.
pub fn prepare(checkout: &Checkout) -> anyhow::Result<[PathBuf; 2]> {
    let (place, system) = system::prepare(checkout)?;
    let archive = pack(&place, &system, "vm.initrd", None)?;
    Ok([system.kernel, archive])
}

/// Makes the guest of the bench. Returns the file that describes it to the bench, which adds the card and a console.
pub fn prepare_bench(checkout: &Checkout) -> anyhow::Result<PathBuf> {
    let (place, system) = system::prepare(checkout)?;
    let words = ["--release", "-p", "tasuki-net", "--example", "guest_datagrams"];
    let program = system::build(checkout, &place, "build", &words)?;
    let archive = pack(&place, &system, "bench.initrd", Some(&program))?;
    system::describe(place.join("bench.json"), &machine(&system.kernel, &archive), KERNEL_LINE)
}

/// Writes the archive that the guest finds in its memory; in it, `program` is `/program`.
fn pack(place: &Path, system: &System, name: &str, program: Option<&Path>) -> anyhow::Result<PathBuf> {
    let mut archive = system::begin(system, COMMANDS)?;
    archive.add("net", 0o040_755, &[]);
    let read = |module: &str| {
        system::read(&system.module(module)?.with_context(|| format!("the kernel has no module {module}"))?)
    };
    for (number, module) in MODULES.iter().enumerate() {
        archive.add(&format!("net/{number}-{module}.ko"), 0o100_644, &read(module)?);
    }
    if let Some(program) = program {
        archive.add("program", 0o100_755, &system::read(program)?);
        archive.add(&format!("{PKTGEN}.ko"), 0o100_644, &read(PKTGEN)?);
    }
    system::write(place.join(name), &archive.finish())
}

/// Returns QEMU's arguments for a machine of one CPU, whose memory a back end of vhost-user can share.
fn machine(kernel: &Path, archive: &Path) -> Vec<String> {
    let words = [
        ["-name", "guest,debug-threads=on"],
        ["-machine", "q35,memory-backend=memory"],
        ["-accel", "tcg"],
        ["-cpu", "max"],
        ["-m", "512M"],
        ["-object", "memory-backend-memfd,id=memory,size=512M,share=on"],
        ["-display", "none"],
        ["-kernel", &kernel.to_string_lossy()],
        ["-initrd", &archive.to_string_lossy()],
    ];
    words.as_flattened().iter().chain(&["-no-reboot", "-nodefaults"]).map(|&word| word.to_owned()).collect()
}
