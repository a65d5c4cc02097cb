//! `tasuki doctor`: looks at the machine, and says what Tasuki can do here, and what to do about the rest.

use std::fmt::Write as _;
use std::fs;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use landlock::{ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, Ruleset, RulesetAttr, Scope};
use rustix::fs::Access as May;
use rustix::process::Resource;
use rustix::thread::{CapabilitySet, CpuSet};
use serde_json::json;

use super::Reach;
use crate::cgroup::{Bounds, Groups};
use crate::config::Uids;
use crate::place;

/// The cards that Tasuki has drivers for (docs/your-nic-with-vfio.md).
const CARDS: [(&str, &str); 5] = [
    ("8086:10d3", "Intel 82574L"),
    ("8086:10f6", "Intel 82574L"),
    ("10ec:8139", "Realtek RTL8139C+"),
    ("1af4:1041", "virtio-net"),
    ("1af4:1000", "virtio-net"),
];
/// Interfaces of landlock, the newest first, and the kernel of each.
const LANDLOCKS: [(ABI, &str); 6] =
    [(ABI::V6, "6.12"), (ABI::V5, "6.10"), (ABI::V4, "6.7"), (ABI::V3, "6.2"), (ABI::V2, "5.19"), (ABI::V1, "5.13")];
/// Number of descriptors below which a daemon of some dozens of nodes may run out.
const DESCRIPTORS: u64 = 4096;

/// How well something is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Is {
    Good,
    /// Something cannot be had, and the rest works.
    Less,
    /// tasukid does not begin, or starts no worker, unless it is told to do without.
    Bad,
}

/// One line: its subject, how well that is, and a sentence.
type Finding = (&'static str, Is, String);

/// Prints the findings. The error says that there are bad ones.
pub fn run(reach: &Reach) -> Result<()> {
    let folder = reach.dir.clone().unwrap_or_else(place::asked);
    let root = Path::new("/");
    let mut all = vec![user(), programs(), kernel(), landlock(), groups()];
    all.extend([descriptors(), taps(root, has()), cpus(root), huge_pages(root), qemu()]);
    all.extend([iommu(root), interrupts(root)]);
    all.extend(cards(root));
    all.push(daemon(&folder));
    let word = |is: &Is| match is {
        Is::Good => "ok",
        Is::Less => "less",
        Is::Bad => "no",
    };
    let mut said = String::new();
    if reach.json {
        let lines =
            all.iter().map(|(about, is, sentence)| json!({ "about": about, "is": word(is), "sentence": sentence }));
        said = serde_json::to_string_pretty(&lines.collect::<Vec<_>>())? + "\n";
    } else {
        for (about, is, sentence) in &all {
            let _ = writeln!(said, "{:<5} {about:<12} {sentence}", word(is));
        }
    }
    super::write(&said)?;
    let bad = all.iter().filter(|(_, is, _)| *is == Is::Bad).count();
    ensure!(bad == 0, "{bad} of these keep tasukid from its work; each line says what to do");
    Ok(())
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

/// Returns the capabilities of this process.
fn has() -> CapabilitySet {
    rustix::thread::capabilities(None).map_or(CapabilitySet::empty(), |ours| ours.effective)
}

fn user() -> Finding {
    let of_process = |file: &str| read(&Path::new("/proc/self").join(file));
    match (rustix::process::geteuid().is_root(), fs::read("/proc/1/stat").is_ok()) {
        (true, _) => {
            let maps = [of_process("uid_map"), of_process("gid_map")];
            root_user(has(), maps.each_ref().map(String::as_str), of_process("setgroups") != "deny")
        }
        (false, false) => (
            "user",
            Is::Bad,
            "not root, and /proc hides processes (hidepid): a tasukid that starts anew does not know its workers again, and does not begin; mount /proc without that option, or have tasukid's user in the group of its option gid=".to_owned(),
        ),
        (false, true) => (
            "user",
            Is::Less,
            "not root: tasukid begins with confine = \"best-effort\" under [daemon], and makes no TAPs and namespaces; start it as root for these".to_owned(),
        ),
    }
}

/// Says whether root with these capabilities, users and groups can start a worker as a user of its own. `maps` are the
/// lines of uid_map and gid_map (user_namespaces(7)); a kernel without user namespaces has none.
fn root_user(has: CapabilitySet, maps: [&str; 2], may_set_groups: bool) -> Finding {
    let needs = CapabilitySet::SETUID | CapabilitySet::SETGID | CapabilitySet::SETPCAP | CapabilitySet::SYS_ADMIN;
    let lacks: Vec<String> = (needs - has).iter_names().map(|(name, _)| format!("CAP_{name}")).collect();
    if !lacks.is_empty() {
        let sentence = format!(
            "root without {}: workers cannot be confined, and do not start; give tasukid what it lacks",
            lacks.join(", ")
        );
        return ("user", Is::Bad, sentence);
    }
    let maps = maps.map(|text| text.lines().filter_map(mapped).collect::<Vec<_>>());
    let in_all =
        |is_it: &dyn Fn(&RangeInclusive<u64>) -> bool| maps.iter().all(|map| map.is_empty() || map.iter().any(is_it));
    let is_there = |id: u32| in_all(&|range| range.contains(&id.into()));
    let has_others = in_all(&|range| *range.end() > 0);
    let users = Uids::default();
    match (users.from(0).all(is_there), has_others && may_set_groups) {
        (true, true) => ("user", Is::Good, "root: workers can be confined as they are to be".to_owned()),
        (false, true) => (
            "user",
            Is::Less,
            format!(
                "root of a user namespace without some of the users {}: a worker does not start as one of these; name others with uids = \"FIRST-LAST\" under [daemon]",
                String::from(users)
            ),
        ),
        (_, false) => (
            "user",
            Is::Bad,
            "root of a user namespace without other users: no worker starts; start tasukid outside, or map users and groups there (newuidmap)".to_owned(),
        ),
    }
}

/// Returns the IDs that a line of uid_map maps.
fn mapped(line: &str) -> Option<RangeInclusive<u64>> {
    let mut words = line.split_whitespace().map(str::parse::<u64>);
    let (first, _, count) = (words.next()?.ok()?, words.next()?, words.next()?.ok()?);
    Some(first..=first + count.checked_sub(1)?)
}

fn programs() -> Finding {
    let folder = std::env::current_exe().ok().and_then(|ours| Some(ours.parent()?.to_owned())).unwrap_or_default();
    let missing: Vec<&str> =
        ["tasukid", "tasuki-worker", "tasuki-sim"].into_iter().filter(|name| !folder.join(name).is_file()).collect();
    match missing.is_empty() {
        true => ("programs", Is::Good, format!("tasukid, tasuki-worker and tasuki-sim are in {}", folder.display())),
        false => (
            "programs",
            Is::Bad,
            format!(
                "{} not beside this program, in {}: build or install all of one version",
                are(&missing),
                folder.display()
            ),
        ),
    }
}

fn are(names: &[&str]) -> String {
    let verb = if names.len() == 1 { "is" } else { "are" };
    format!("{} {verb}", names.join(" and "))
}

fn kernel() -> Finding {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let mut numbers = release.split(['.', '-']).map(|part| part.parse::<u32>().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    match version {
        (0..5, _) | (5, 0..13) => (
            "kernel",
            Is::Bad,
            format!("Linux {release} is older than 5.13, and lacks what confines workers: install a newer one"),
        ),
        (5, _) => ("kernel", Is::Less, format!("Linux {release}: NICs by repoint behind VFIO need 6.0")),
        _ => ("kernel", Is::Good, format!("Linux {release}")),
    }
}

/// What a landlock interface bars.
type Bars = (BitFlags<AccessFs>, BitFlags<AccessNet>, BitFlags<Scope>);

fn landlock() -> Finding {
    landlock_of(|(files, ports, scopes)| {
        // As a worker asks for them, but for those of a kind that the interface does not know.
        let rules = Ruleset::default().set_compatibility(CompatLevel::HardRequirement).handle_access(files);
        let rules = rules.and_then(|rules| if ports.is_empty() { Ok(rules) } else { rules.handle_access(ports) });
        let rules = rules.and_then(|rules| if scopes.is_empty() { Ok(rules) } else { rules.scope(scopes) });
        rules.and_then(Ruleset::create).is_ok()
    })
}

/// Names the newest interface all of whose rights `has`.
fn landlock_of(has: impl Fn(Bars) -> bool) -> Finding {
    let bars = |abi: ABI| (AccessFs::from_all(abi), AccessNet::from_all(abi), Scope::from_all(abi));
    match LANDLOCKS.into_iter().enumerate().find(|(_, (abi, _))| has(bars(*abi))) {
        Some((0, _)) => ("landlock", Is::Good, "as of Linux 6.12, with all that bars files and sockets".to_owned()),
        Some((_, (_, kernel))) => (
            "landlock",
            Is::Less,
            format!("as of Linux {kernel}: the filter of system calls bars the rest, for root; a newer kernel has 6.12's"),
        ),
        None => (
            "landlock",
            Is::Bad,
            "none: boot with lsm=landlock,… on the kernel's command line, or write confine = \"best-effort\" under [daemon]".to_owned(),
        ),
    }
}

fn groups() -> Finding {
    // The group of this look goes again.
    let id = format!("doctor-{}", std::process::id());
    let groups = Groups::find(&id, None);
    let bounds = Bounds { memory: Some(1 << 30), pids: Some(512), cpu: Some(100), cpus: Some(CpuSet::new()) };
    let (lacks, bars) = (groups.lacks(&bounds), groups.bars(&bounds));
    groups.sweep();
    match (lacks.is_empty(), bars) {
        (true, None) => ("groups", Is::Good, "control groups bound memory, processes and CPUs, and freeze".to_owned()),
        // It may not be so for a tasukid that is started otherwise than this program was.
        (true, Some(bars)) => ("groups", Is::Less, bars),
        (false, _) => {
            let is = if rustix::process::geteuid().is_root() { Is::Bad } else { Is::Less };
            (
                "groups",
                is,
                format!(
                    "no {}: mount control groups (version 2) with these, or write confine = \"best-effort\" under [daemon]",
                    lacks.join(", no ")
                ),
            )
        }
    }
}

fn descriptors() -> Finding {
    let limit = rustix::process::getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
    match limit >= DESCRIPTORS {
        true => ("descriptors", Is::Good, format!("{limit} at most for a process")),
        false => (
            "descriptors",
            Is::Less,
            format!("{limit} at most for a process; many nodes need more: LimitNOFILE=65536 (systemd), or ulimit -Hn"),
        ),
    }
}

fn taps(root: &Path, has: CapabilitySet) -> Finding {
    let path = root.join("dev/net/tun");
    let may = rustix::fs::access(&path, May::READ_OK | May::WRITE_OK).is_ok();
    let sentence = match (path.exists(), may, has.contains(CapabilitySet::NET_ADMIN)) {
        (true, true, true) => return ("TAPs", Is::Good, format!("{} is there", path.display())),
        (true, true, false) => {
            "this user makes none without CAP_NET_ADMIN: give tasukid that, and ask as the user that runs it".to_owned()
        }
        (true, false, _) => format!("this user may not open {}: ask as the user that runs tasukid", path.display()),
        (false, ..) => format!("there is no {}: modprobe tun", path.display()),
    };
    ("TAPs", Is::Less, sentence)
}

/// Returns the numbers in a list as the kernel writes it: 0,2-3.
fn listed(text: &str) -> Vec<u32> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.trim().parse::<u32>().ok()?..=last.trim().parse().ok()?)
    };
    text.split(',').filter_map(range).flatten().collect()
}

fn cpus(root: &Path) -> Finding {
    let of = |name: &str| listed(&read(&root.join("sys/devices/system/cpu").join(name)));
    let (online, isolated) = (of("online"), of("isolated"));
    let aside = if isolated.is_empty() {
        "none is isolated; for a driver that polls, isolcpus= on the kernel's command line keeps the scheduler off its CPU".to_owned()
    } else {
        format!("isolated: {}", isolated.iter().map(u32::to_string).collect::<Vec<_>>().join(", "))
    };
    match online.len() {
        0 | 1 => ("CPUs", Is::Less, "one: a driver that polls (poll = true) starves everything else".to_owned()),
        count => ("CPUs", Is::Good, format!("{count}; {aside}")),
    }
}

fn huge_pages(root: &Path) -> Finding {
    let pages = read(&root.join("proc/sys/vm/nr_hugepages")).parse::<u64>().unwrap_or(0);
    let sentence = match pages {
        0 => "none set aside; Tasuki needs none, and machines and DPDK programs that want some need vm.nr_hugepages"
            .to_owned(),
        pages => format!("{pages} set aside"),
    };
    ("huge pages", Is::Good, sentence)
}

fn qemu() -> Finding {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let is_there = std::env::split_paths(&path).any(|folder| folder.join("qemu-system-x86_64").is_file());
    let kvm = rustix::fs::access("/dev/kvm", May::READ_OK | May::WRITE_OK).is_ok();
    match (is_there, kvm) {
        (true, true) => ("machines", Is::Good, "QEMU is there, and may use /dev/kvm".to_owned()),
        (true, false) => {
            ("machines", Is::Less, "QEMU is there, and emulates the CPU: this user has no /dev/kvm".to_owned())
        }
        (false, _) => (
            "machines",
            Is::Less,
            "no qemu-system-x86_64 on the PATH: tasuki vm run needs it (apt-get install qemu-system-x86)".to_owned(),
        ),
    }
}

fn iommu(root: &Path) -> Finding {
    let has_some = |path: &str| fs::read_dir(root.join(path)).is_ok_and(|mut all| all.next().is_some());
    match (has_some("sys/class/iommu"), root.join("dev/vfio/vfio").exists()) {
        (true, true) => ("VFIO", Is::Good, "there is an IOMMU, and /dev/vfio/vfio".to_owned()),
        (true, false) => ("VFIO", Is::Less, "there is an IOMMU, and no /dev/vfio/vfio: modprobe vfio-pci".to_owned()),
        (false, _) => (
            "VFIO",
            Is::Less,
            "no IOMMU, so no real card can be driven: switch it on (docs/your-nic-with-vfio.md); cards by vfio-user work".to_owned(),
        ),
    }
}

fn interrupts(root: &Path) -> Finding {
    let processes = fs::read_dir(root.join("proc")).into_iter().flatten().flatten();
    match processes.map(|it| read(&it.path().join("comm"))).any(|name| name == "irqbalance") {
        true => (
            "interrupts",
            Is::Less,
            "irqbalance moves those of real cards off their nodes' CPUs: start it with --banmod=vfio_pci".to_owned(),
        ),
        false => {
            ("interrupts", Is::Good, "those of a real card stay on its node's CPU: no irqbalance moves them".to_owned())
        }
    }
}

/// Returns a finding for each Ethernet card on the PCI bus.
fn cards(root: &Path) -> Vec<Finding> {
    let mut all: Vec<PathBuf> = fs::read_dir(root.join("sys/bus/pci/devices"))
        .map(|all| all.flatten().map(|entry| entry.path()).collect())
        .unwrap_or_default();
    all.sort();
    all.iter().filter(|path| read(&path.join("class")).starts_with("0x0200")).map(|path| card(path)).collect()
}

fn card(path: &Path) -> Finding {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let part = |file: &str| read(&path.join(file)).trim_start_matches("0x").to_owned();
    let id = format!("{}:{}", part("vendor"), part("device"));
    let last = |link: &str| Some(fs::read_link(path.join(link)).ok()?.file_name()?.to_string_lossy().into_owned());
    let below = |path: &Path| -> Vec<PathBuf> {
        fs::read_dir(path).map(|all| all.flatten().map(|entry| entry.path()).collect()).unwrap_or_default()
    };
    // A virtio card's interface belongs to a device below it.
    let is_virtio = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("virtio"));
    let owners = below(path).into_iter().filter(is_virtio).chain([path.to_owned()]);
    let interfaces: Vec<String> = owners
        .flat_map(|owner| below(&owner.join("net")))
        .filter_map(|interface| Some(interface.file_name()?.to_string_lossy().into_owned()))
        .collect();
    let known = CARDS.iter().find(|(of, _)| *of == id);
    let (driver, group) = (last("driver"), last("iommu_group"));
    let what = known.map_or_else(|| format!("[{id}]"), |(_, what)| format!("{what} [{id}]"));
    let bridged = || match interfaces.first() {
        Some(interface) => format!("; its interface joins a VNI all the same: tasuki node add NAME --link {interface}"),
        None => String::new(),
    };
    match (known, driver.as_deref(), group) {
        (None, ..) => ("card", Is::Less, format!("{name}, {what}: Tasuki has no driver for it{}", bridged())),
        (Some(_), _, None) => (
            "card",
            Is::Less,
            format!("{name}, {what}: it is in no IOMMU group, so no worker can drive it{}", bridged()),
        ),
        (Some(_), Some("vfio-pci"), Some(group)) => {
            ("card", Is::Good, format!("{name}, {what}: device = \"vfio:{name}\" (IOMMU group {group})"))
        }
        (Some(_), driver, Some(_)) => {
            let holds =
                driver.map_or_else(|| "no driver has it".to_owned(), |driver| format!("the kernel's {driver} has it"));
            (
                "card",
                Is::Less,
                format!("{name}, {what}: {holds}; bind it to vfio-pci (docs/your-nic-with-vfio.md){}", bridged()),
            )
        }
    }
}

fn daemon(folder: &Path) -> Finding {
    let is_there = std::os::unix::net::UnixStream::connect(place::api_socket(folder)).is_ok();
    let sentence = match (is_there, place::holder(folder)) {
        (true, Some(pid)) => format!("tasukid is at work in {} (process {pid})", folder.display()),
        (true, None) => format!("tasukid is at work in {}", folder.display()),
        (false, _) => format!("none is at work in {}: tasukid --config FILE starts one", folder.display()),
    };
    ("daemon", Is::Good, sentence)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cards_are_those_of_the_guide() {
        let guide = include_str!("../../../../docs/your-nic-with-vfio.md");
        assert!(CARDS.iter().all(|(id, _)| guide.contains(&format!("`[{id}]`"))), "{CARDS:?}");
        let rows = guide.lines().filter(|line| line.starts_with('|'));
        assert_eq!(
            rows.map(|row| row.matches("`[").count()).sum::<usize>(),
            CARDS.len() + 1,
            "and the head of its table"
        );
    }

    #[test]
    fn a_card_is_told_what_it_takes_to_drive_it() {
        let root = tempfile::tempdir().unwrap();
        let make = |name: &str, class: &str, id: (&str, &str), links: &[(&str, &str)], interface: Option<&str>| {
            let path = root.path().join("sys/bus/pci/devices").join(name);
            fs::create_dir_all(&path).unwrap();
            for (file, text) in [("class", class), ("vendor", id.0), ("device", id.1)] {
                fs::write(path.join(file), format!("0x{text}\n")).unwrap();
            }
            links.iter().for_each(|(link, to)| std::os::unix::fs::symlink(to, path.join(link)).unwrap());
            interface.iter().for_each(|name| fs::create_dir_all(path.join("net").join(name)).unwrap());
        };
        make("0000:00:01.0", "030000", ("8086", "1234"), &[], None);
        make(
            "0000:00:02.0",
            "020000",
            ("8086", "10d3"),
            &[("driver", "../vfio-pci"), ("iommu_group", "../groups/7")],
            None,
        );
        make(
            "0000:00:03.0",
            "020000",
            ("8086", "10d3"),
            &[("driver", "../e1000e"), ("iommu_group", "../groups/8")],
            Some("enp3s0"),
        );
        make("0000:00:04.0", "020000", ("15b3", "1017"), &[("driver", "../mlx5_core")], Some("enp4s0"));
        make("0000:00:05.0", "020000", ("1af4", "1041"), &[("driver", "../virtio-pci")], None);
        let said: Vec<_> = cards(root.path()).into_iter().map(|(_, is, sentence)| (is, sentence)).collect();
        let expected = [
            (Is::Good, "0000:00:02.0, Intel 82574L [8086:10d3]: device = \"vfio:0000:00:02.0\" (IOMMU group 7)"),
            (
                Is::Less,
                "0000:00:03.0, Intel 82574L [8086:10d3]: the kernel's e1000e has it; bind it to vfio-pci (docs/your-nic-with-vfio.md); its interface joins a VNI all the same: tasuki node add NAME --link enp3s0",
            ),
            (
                Is::Less,
                "0000:00:04.0, [15b3:1017]: Tasuki has no driver for it; its interface joins a VNI all the same: tasuki node add NAME --link enp4s0",
            ),
            (Is::Less, "0000:00:05.0, virtio-net [1af4:1041]: it is in no IOMMU group, so no worker can drive it"),
        ];
        assert_eq!(said, expected.map(|(is, sentence)| (is, sentence.to_owned())));
    }

    #[test]
    fn root_that_cannot_become_a_workers_user_is_told() {
        let all = CapabilitySet::all();
        let (whole, ours) = ("         0          0 4294967295", "0 0 1");
        let is = |maps, may_set_groups| root_user(all, maps, may_set_groups).1;
        assert_eq!([is([whole, whole], true), is(["", ""], true)], [Is::Good; 2]);
        assert_eq!(is([ours, ours], false), Is::Bad, "unshare -Ur");
        assert_eq!(is([whole, ours], true), Is::Bad);
        assert_eq!(is([whole, whole], false), Is::Bad);
        assert_eq!(is(["0 100000 65536", "0 100000 65536"], true), Is::Less, "a container");
        assert_eq!(is(["0 100000 65536\n65536 200000 34464", whole], true), Is::Good);
        assert_eq!(is(["0 100000 65536\n65536 200000 34463", whole], true), Is::Less, "without the last");
        for lacks in ["SETUID", "SETGID", "SETPCAP", "SYS_ADMIN"] {
            let has = all - CapabilitySet::from_name(lacks).unwrap();
            let (_, is, sentence) = root_user(has, [whole, whole], true);
            assert!(is == Is::Bad && sentence.contains(&format!("CAP_{lacks}:")), "{sentence}");
        }
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("dev/net")).unwrap();
        fs::write(root.path().join("dev/net/tun"), "").unwrap();
        let taps = [all, all - CapabilitySet::NET_ADMIN].map(|has| taps(root.path(), has).1);
        assert_eq!(taps, [Is::Good, Is::Less]);
    }

    #[test]
    fn a_landlock_that_bars_less_than_a_worker_asks_for_is_named() {
        let found = |kernel: ABI| {
            let has = (AccessFs::from_all(kernel), AccessNet::from_all(kernel), Scope::from_all(kernel));
            let has_all = |asks: Bars| has.0.contains(asks.0) && has.1.contains(asks.1) && has.2.contains(asks.2);
            let (_, is, sentence) = landlock_of(has_all);
            (is, sentence)
        };
        for (abi, kernel) in LANDLOCKS {
            let (is, sentence) = found(abi);
            assert_eq!(is == Is::Good, abi == ABI::V6, "{sentence}");
            assert!(sentence.starts_with(&format!("as of Linux {kernel}")), "{sentence}");
        }
        assert_eq!(found(ABI::Unsupported).0, Is::Bad);
    }

    #[test]
    fn lists_of_cpus_are_read_as_the_kernel_writes_them() {
        assert_eq!(listed("0,2-4,7\n"), [0, 2, 3, 4, 7]);
        assert!(listed("").is_empty());
    }
}
