//! `tasuki vm run`: becomes QEMU, with the options that a node's machine needs.

use std::convert::Infallible;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, ValueEnum};
use hyper::Method as Verb;
use rustix::fs::Access;
use rustix::thread::CpuSet;

use super::{Reach, show, write};
use crate::api::client;
use crate::api::types::{NodeView, VmView};
use crate::{housekeeping_cpus, place};

/// A virtual machine to start.
#[derive(Debug, Args)]
pub struct Run {
    /// Name of the node whose machine it is (tasuki node add NAME --vm SOCKET).
    pub node: String,
    /// The kernel to boot. Without one, the machine boots from the disk that you give it after `--`.
    #[arg(long, value_name = "FILE")]
    pub kernel: Option<PathBuf>,
    /// The kernel's first file system.
    #[arg(long, value_name = "FILE", requires = "kernel")]
    pub initrd: Option<PathBuf>,
    /// The kernel's command line.
    #[arg(long, value_name = "WORDS", requires = "kernel", default_value = "console=ttyS0")]
    pub append: String,
    /// The machine's memory, in MiB.
    #[arg(long, value_name = "MIB", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    pub memory: u32,
    /// CPUs of the host, such as 2,4-7, that the machine stays on. It gets a virtual CPU for each. By default it gets
    /// one, which may use all.
    #[arg(long, value_name = "CPUS", value_parser = cpus)]
    pub cores: Option<Cpus>,
    /// Pairs of queues of the machine's card, 32 at most; by default one for each virtual CPU.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=QUEUES_MAX.into()))]
    pub queues: Option<u8>,
    /// Offer the guest's driver packed rings, which it may take in place of split ones.
    #[arg(long)]
    pub packed: bool,
    /// The file that takes what the machine writes to its serial line; by default this terminal has it.
    #[arg(long, value_name = "FILE")]
    pub console: Option<PathBuf>,
    /// The QEMU to run.
    #[arg(long, value_name = "PROGRAM", default_value = "qemu-system-x86_64")]
    pub qemu: PathBuf,
    /// The accelerator; by default KVM where this user may use /dev/kvm, and TCG elsewhere.
    #[arg(long, value_enum)]
    pub accel: Option<Accel>,
    /// Print the command in place of running it.
    #[arg(long)]
    pub print: bool,
    /// Options for QEMU besides.
    #[arg(last = true, value_name = "OPTIONS")]
    pub more: Vec<OsString>,
}

/// What runs the guest's instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Accel {
    /// The processor, by hardware virtualisation.
    Kvm,
    /// QEMU's own compiler: slow, and possible everywhere.
    Tcg,
}

/// CPUs of the host, in order, each once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cpus(Vec<usize>);

impl Cpus {
    fn list(&self) -> String {
        self.0.iter().map(usize::to_string).collect::<Vec<_>>().join(",")
    }
}

/// Reads a list of CPUs, as taskset(1) takes it.
fn cpus(text: &str) -> Result<Cpus, String> {
    let odd = || format!("{text:?} is no list of CPUs, such as 2,4-7, all below {}", CpuSet::MAX_CPU);
    let number = |text: &str| text.parse().ok().filter(|&cpu| cpu < CpuSet::MAX_CPU);
    let mut cpus = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = number(first).zip(number(last)).ok_or_else(odd)?;
        if last < first {
            return Err(odd());
        }
        cpus.extend(first..=last);
    }
    cpus.sort_unstable();
    cpus.dedup();
    Ok(Cpus(cpus))
}

/// Pairs of queues that a node's worker serves (`tasuki_net::endpoint::guest`).
const QUEUES_MAX: u8 = 32;

/// What the options depend on besides.
#[derive(Debug, Clone, Copy)]
struct Host {
    /// Whether this user may use hardware virtualisation.
    has_kvm: bool,
    /// QEMU's version.
    version: (u32, u32),
}

impl Host {
    fn look(qemu: &Path) -> Result<Self> {
        let said = Command::new(qemu).arg("--version").output().with_context(|| {
            format!(
                "{} does not start; install it (apt install qemu-system-x86), or name it with --qemu",
                qemu.display()
            )
        })?;
        let said = String::from_utf8_lossy(&said.stdout);
        let version = version(&said).with_context(|| {
            format!("{} does not say a version as QEMU does; name QEMU with --qemu", qemu.display())
        })?;
        let has_kvm = rustix::fs::access("/dev/kvm", Access::READ_OK | Access::WRITE_OK).is_ok();
        Ok(Host { has_kvm, version })
    }
}

/// Returns the version that QEMU says it has: `QEMU emulator version 7.2.22 (…)`.
fn version(said: &str) -> Option<(u32, u32)> {
    let mut numbers = said.split("version ").nth(1)?.split(|byte: char| !byte.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// Returns a path as a value among QEMU's options: a comma would end it.
fn value(path: &Path) -> OsString {
    let parts: Vec<&[u8]> = path.as_os_str().as_bytes().split(|&byte| byte == b',').collect();
    OsString::from_vec(parts.join(&b",,"[..]))
}

fn pair(option: &str, before: &str, path: &Path, after: &str) -> [OsString; 2] {
    let mut text = OsString::from(before);
    text.push(value(path));
    text.push(after);
    [option.into(), text]
}

/// Returns QEMU's options.
fn options(run: &Run, vm: &VmView, host: Host) -> Vec<OsString> {
    let memory = run.memory;
    let virtual_cpus = run.cores.as_ref().map_or(1, |cores| cores.0.len());
    let queues = run.queues.map_or(virtual_cpus.min(QUEUES_MAX.into()), usize::from);
    let kvm = run.accel.map_or(host.has_kvm, |accel| accel == Accel::Kvm);
    let machine = [
        "-machine q35,memory-backend=memory".to_owned(),
        format!("-m {memory}M -object memory-backend-memfd,id=memory,size={memory}M,share=on"),
        format!("-smp {virtual_cpus} -display none -nodefaults"),
        // QEMU's own processor: the newest that it has.
        if kvm { "-accel kvm -cpu host" } else { "-accel tcg -cpu max" }.to_owned(),
        // Without KVM, QEMU 7.2 crashes when a vhost-user card has MSI-X: it looks for an interrupt of KVM's.
        format!(
            "-netdev vhost-user,id=net,chardev=node,queues={queues} -device virtio-net-pci,netdev=net,mac={},mq={},vectors={}{}{}",
            vm.mac,
            if queues > 1 { "on" } else { "off" },
            // One for each ring, one for the card's settings, and one for commands.
            if kvm { 2 * queues + 2 } else { 0 },
            if run.packed { ",packed=on" } else { "" },
            vm.mtu.map(|mtu| format!(",host_mtu={mtu}")).unwrap_or_default(),
        ),
    ];
    let mut words: Vec<OsString> = machine.iter().flat_map(|line| line.split(' ')).map(OsString::from).collect();
    let reconnect = if host.version >= (9, 2) { ",reconnect-ms=1000" } else { ",reconnect=1" };
    words.extend(pair("-chardev", "socket,id=node,path=", &vm.socket, reconnect));
    match &run.console {
        Some(file) => {
            words.extend(pair("-chardev", "file,id=console,path=", file, ""));
            words.extend(["-serial", "chardev:console"].map(OsString::from));
        }
        None => words.extend(["-serial", "mon:stdio"].map(OsString::from)),
    }
    if let Some(kernel) = &run.kernel {
        words.extend(["-kernel".into(), kernel.into(), "-append".into(), OsString::from(&run.append)]);
    }
    words.extend(run.initrd.iter().flat_map(|initrd| ["-initrd".into(), initrd.into()]));
    words.extend(run.more.iter().cloned());
    words
}

/// Returns the node's socket, and the address for the machine's card.
fn find(reach: &Reach, Run { node, more, print, .. }: &Run) -> Result<VmView> {
    let folder = reach.dir.clone().unwrap_or_else(place::asked);
    let nodes: Vec<NodeView> = show::read(client::ask(&folder, Verb::GET, "/v1/nodes", None)?)?;
    // A machine to which a guest migrates comes beside the one that has it.
    let is_alone = !print && !more.iter().any(|word| ["-incoming", "--incoming"].iter().any(|it| word == it));
    match nodes.into_iter().find(|view| view.name == *node) {
        Some(NodeView { vm: Some(_), client: Some(client), .. }) if is_alone && client.is != "away" => bail!(
            "node {node:?} has a machine already{}; end that first, or add a node for each machine (tasuki node add NAME --vm SOCKET)",
            client.process.map(|pid| format!(" (process {pid})")).unwrap_or_default()
        ),
        Some(NodeView { vm: Some(vm), .. }) => Ok(vm),
        Some(NodeView { work, .. }) => bail!(
            "node {node:?} is no virtual machine, but {work}; add one (tasuki node add NAME --vm SOCKET), or name it"
        ),
        None => bail!("there is no node {node:?}; add it: tasuki node add {node} --vm SOCKET"),
    }
}

/// Keeps this process on these CPUs, and all that it starts.
fn stay_on(cores: &Cpus) -> Result<()> {
    let usable = housekeeping_cpus::usable();
    let mut set = CpuSet::new();
    for &cpu in &cores.0 {
        ensure!(
            usable.iter().any(|&usable| usize::try_from(usable) == Ok(cpu)),
            "CPU {cpu} is not among those that this process may use; name others with --cores"
        );
        set.set(cpu);
    }
    Ok(rustix::thread::sched_setaffinity(None, &set)?)
}

/// Returns a word as a shell takes it.
fn quoted(word: &OsStr) -> String {
    let word = word.to_string_lossy();
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_=,./:+@%".contains(&byte);
    match !word.is_empty() && word.bytes().all(is_plain) {
        true => word.into_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

/// Becomes QEMU, or prints how to start it.
pub fn run(reach: &Reach, run: &Run) -> Result<()> {
    let vm = find(reach, run)?;
    let host = Host::look(&run.qemu)?;
    let options = options(run, &vm, host);
    if run.print {
        let on = run.cores.iter().flat_map(|cores| ["taskset".into(), "--cpu-list".into(), cores.list().into()]);
        let words = on.chain([run.qemu.clone().into()]).chain(options);
        let line = words.map(|word: OsString| quoted(&word)).collect::<Vec<_>>().join(" ");
        return write(&(line + "\n")).map(drop);
    }
    let boots = run.kernel.is_some() || !run.more.is_empty();
    ensure!(
        boots,
        "the machine has nothing to boot; name a kernel (--kernel FILE), or a disk (-- -drive file=DISK,if=virtio)"
    );
    if let Some(cores) = &run.cores {
        stay_on(cores)?;
    }
    becomes(Command::new(&run.qemu).args(options)).map(|never| match never {})
}

fn becomes(command: &mut Command) -> Result<Infallible> {
    let error = command.exec();
    Err(error).with_context(|| format!("{} does not start", command.get_program().display()))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        run: Run,
    }

    fn words(line: &str, host: Host) -> String {
        let Line { run } = Line::parse_from(["run"].into_iter().chain(line.split_whitespace()));
        let vm = VmView {
            socket: "/run/a,b/vm.sock".into(),
            mac: "02:54:00:00:00:01".to_owned(),
            mtu: None,
            pairs: None,
            queues: Vec::new(),
        };
        options(&run, &vm, host).iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ")
    }

    const DEBIAN_12: Host = Host { has_kvm: false, version: (7, 2) };

    #[test]
    fn a_machine_has_shared_memory_and_the_nodes_card() {
        let said = words("vm --memory 256 --cores 2,4-5", DEBIAN_12);
        for part in [
            "-m 256M -object memory-backend-memfd,id=memory,size=256M,share=on",
            "-machine q35,memory-backend=memory",
            "-smp 3",
            "-accel tcg",
            "-chardev socket,id=node,path=/run/a,,b/vm.sock,reconnect=1 ",
            "chardev=node,queues=3 ",
            "mac=02:54:00:00:00:01,mq=on,vectors=0",
        ] {
            assert!(format!("{said} ").contains(part), "{part} is not in {said}");
        }
        assert!(!said.contains("-append"), "no kernel was named: {said}");
        assert!(!said.contains("packed"), "as QEMU has it: {said}");
        let said = words("vm --packed", DEBIAN_12);
        assert!(said.contains("vectors=0,packed=on "), "{said}");
    }

    #[test]
    fn the_guest_gets_the_mtu_of_the_node() {
        let Line { run } = Line::parse_from(["run", "vm"]);
        let vm = VmView {
            socket: "/vm.sock".into(),
            mac: "02:54:00:00:00:01".to_owned(),
            mtu: Some(1400),
            pairs: None,
            queues: Vec::new(),
        };
        assert!(options(&run, &vm, DEBIAN_12).iter().any(|word| word.to_string_lossy().ends_with(",host_mtu=1400")));
        assert!(!words("vm", DEBIAN_12).contains("mtu"), "as QEMU has it");
    }

    #[test]
    fn options_follow_the_host_and_the_version_of_qemu() {
        let said = words("vm", Host { has_kvm: true, version: (9, 2) });
        assert!(said.contains("-accel kvm -cpu host") && said.contains("queues=1 "), "{said}");
        assert!(said.contains("mq=off,vectors=4"), "{said}");
        assert!(said.contains("reconnect-ms=1000"), "{said}");
        let said = words("vm --accel tcg", Host { has_kvm: true, version: (9, 1) });
        assert!(said.contains("-accel tcg") && said.contains("vectors=0"), "{said}");
        assert_eq!(version("QEMU emulator version 10.0.2 (Debian 1:10.0.2)\nCopyright"), Some((10, 0)));
        assert_eq!(version("Python 3"), None);
    }

    #[test]
    fn words_after_the_dashes_go_to_qemu_as_they_are() {
        let said = words("vm --kernel vmlinuz --append a=b -- -drive file=disk,if=virtio", DEBIAN_12);
        assert!(said.ends_with("-kernel vmlinuz -append a=b -drive file=disk,if=virtio"), "{said}");
        assert_eq!(quoted("it's 1".as_ref()), r"'it'\''s 1'");
    }

    #[test]
    fn a_list_of_cpus_is_read_as_taskset_reads_it() {
        assert_eq!(cpus("4-6,2,5"), Ok(Cpus(vec![2, 4, 5, 6])));
        for odd in ["", "2-", "5-4", "a", "1,,2", "99999999999999999999", "0-4096"] {
            assert!(cpus(odd).is_err(), "{odd}");
        }
    }
}
