//! Control groups: a node's processes together have bounds, and one write stops all of a worker's.
//!
//! [`Groups`] are those of this machine: version 2 where it is mounted, version 1's controllers for the rest. Beneath
//! the daemon's own group lie `tasuki/ID/node-NAME`, with the node's [`Bounds`], and in it a group of each worker,
//! without bounds of its own. A daemon that a shell has started shares its group with the shell, and version 2 then
//! bounds none in it: the nodes' groups lie beneath the root of all groups instead.
//!
//! ```text
//! let groups = Groups::find("a name that stays over restarts", None);   // removes the empty groups of earlier daemons
//! let node = groups.node("red", &bounds)?;      // made, or that of a daemon before us
//! let worker = node.child("worker-7")?;
//! spawn::start(&program, worker.birthplace())?; // and the process writes 0 into each of worker.doors(); or worker.add(pid)
//! worker.freeze()?;                             // asks; comes back at once
//! while !worker.is_frozen()? { hint::spin_loop() }   // from here on none of its threads runs an instruction in user space
//! worker.kill()?;                               // also frozen processes, which run nothing more
//! worker.remove();                              // once it is dead
//! ```
//!
//! A frozen process keeps its locks, its memory and its descriptors. `freeze`, `is_frozen` and `thaw` are one system
//! call each, on descriptors that are open already. A process frozen by version 1 dies only when it is thawed;
//! [`Group::kill`] sees to that.
//!
//! The CPU controller is left alone unless a node has a bound for it. In a group of that controller a nice value
//! counts among the group's own processes only, and a driver would no longer go before the programs beside it.

#[cfg(test)]
mod tests;

use std::fs::{self, File, OpenOptions};
use std::io;
use std::io::ErrorKind::{AlreadyExists, NotFound};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::{Pid, Signal};
use rustix::thread::CpuSet;

/// Bounds on all processes of a node together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Bounds {
    /// Bytes of memory.
    pub memory: Option<u64>,
    /// Number of processes and threads.
    pub pids: Option<u32>,
    /// CPU time, in hundredths of one CPU.
    pub cpu: Option<u32>,
    /// The CPUs on which they may run.
    pub cpus: Option<CpuSet>,
}

/// Period of a bound on CPU time, in µs.
const CPU_PERIOD: u64 = 100_000;

/// The controllers of version 1 in use.
const CONTROLLERS: &[&str] = &["memory", "pids", "cpu", "cpuset", "freezer"];

/// The daemon's place in its own group, once that hands controllers on: version 2 does so only for groups that have
/// no process of their own.
const DAEMON_GROUP: &str = "tasukid";

/// The group beneath that of `--groups` in which the unit `tasuki-nodes` has its process, and the keeper is.
const HELD: &str = "held";

/// Number of attempts to make a group beside a daemon that removes it, or the one around it.
const TRIES_MAX: u32 = 1000;

/// A mounted hierarchy, and the place of the daemon's groups in it.
#[derive(Debug)]
struct Hierarchy {
    /// The group that has those of nodes: the daemon's own, unless other processes are in it.
    own: PathBuf,
    /// Where it is mounted.
    mount: PathBuf,
    /// The controllers it has; for version 2, those that it could have.
    controllers: Vec<String>,
    is_v2: bool,
}

impl Hierarchy {
    fn has(&self, controller: &str) -> bool {
        self.controllers.iter().any(|has| has == controller)
    }

    fn freezes(&self) -> bool {
        self.is_v2 || self.has("freezer")
    }

    /// Returns the controllers that it has, of those that these bounds take.
    fn asked(&self, bounds: &Bounds) -> Vec<&'static str> {
        wanted(bounds).into_iter().filter(|name| self.has(name)).collect()
    }
}

/// The hierarchies of this machine.
#[derive(Debug)]
pub struct Groups {
    hierarchies: Vec<Hierarchy>,
    id: String,
    /// The daemon's group in each, locked: no other daemon removes it, nor a node's in it that has no process just now.
    _held: Vec<File>,
}

/// Returns the usable hierarchies, by the lines of mountinfo and of /proc/self/cgroup.
fn hierarchies(mountinfo: &str, of_us: &str) -> Vec<Hierarchy> {
    let own = |name: Option<&str>| {
        of_us.lines().find_map(|line| {
            let mut parts = line.splitn(3, ':').skip(1);
            let (names, path) = (parts.next()?, parts.next()?);
            let is_it = name.map_or(names.is_empty(), |name| names.split(',').any(|one| one == name));
            is_it.then(|| path.to_owned())
        })
    };
    let mut found = Vec::new();
    for line in mountinfo.lines() {
        let Some((left, right)) = line.split_once(" - ") else { continue };
        let (left, right): (Vec<_>, Vec<_>) = (left.split(' ').collect(), right.split(' ').collect());
        let ([_, _, _, root, mount, ..], [kind, _, options, ..]) = (&left[..], &right[..]) else { continue };
        let (is_v2, names) = match *kind {
            "cgroup2" => (true, Vec::new()),
            "cgroup" => (false, options.split(',').map(str::to_owned).collect()),
            _ => continue,
        };
        let name = names.iter().find(|name| own(Some(name)).is_some());
        let Some(path) = own(name.map(String::as_str).filter(|_| !is_v2)) else { continue };
        // A container sees a part of the tree, or all paths from there.
        let path = Path::new(&path);
        let below = path.strip_prefix(root).or_else(|_| path.strip_prefix("/")).unwrap_or(path);
        // The daemon's starter may have put it there already, as systemd does (DelegateSubgroup=).
        let below = if is_v2 && below.ends_with(DAEMON_GROUP) { below.parent().unwrap_or(below) } else { below };
        let mount = PathBuf::from(mount);
        found.push(Hierarchy { own: mount.join(below), mount, controllers: names, is_v2 });
    }
    found
}

/// Makes the group for the daemon's nodes in this one, and locks it: no other daemon removes it while the file is open.
fn make(group: &Path, id: &str) -> io::Result<File> {
    let made = of(group, id);
    let mut tries = 1..TRIES_MAX;
    loop {
        let is_last = tries.next().is_none();
        // A daemon that ends meanwhile removes the group around it, as long as that is empty.
        match fs::create_dir_all(&made).and_then(|()| File::open(&made)) {
            // Any user who may read it can lock it as well. The daemon goes on then, and another one may sweep its groups.
            Ok(folder) if is_last || folder.try_lock_shared().is_ok() && made.exists() => return Ok(folder),
            Err(error) if is_last || error.kind() != NotFound => return Err(error),
            // Another daemon looks whether it is left over.
            Ok(_) => std::thread::sleep(Duration::from_millis(1)),
            Err(_) => {}
        }
    }
}

/// Returns the group for the daemon's nodes in this one.
fn of(group: &Path, id: &str) -> PathBuf {
    group.join("tasuki").join(id)
}

/// Returns whether a group of version 2 has a type. The root of all groups has none: it may have processes and hand
/// controllers on.
fn has_type(group: &Path) -> bool {
    group.join("cgroup.type").exists()
}

/// Returns whether other processes than the daemon are in its group, as where it was started from a shell. Such a
/// group cannot hand controllers on, and is not the daemon's to empty.
fn is_shared(own: &Path) -> bool {
    has_type(own) && processes(own).lines().any(|pid| !is_ours(pid))
}

impl Groups {
    /// Finds the hierarchies of this machine that the daemon may use. `id` tells one daemon's groups from another's,
    /// and stays over its restarts. In version 2, `named` replaces the group that the daemon is in.
    pub fn find(id: &str, named: Option<&Path>) -> Self {
        let read = |path: &Path| fs::read_to_string(path).unwrap_or_default();
        let mut all = hierarchies(&read(Path::new("/proc/self/mountinfo")), &read(Path::new("/proc/self/cgroup")));
        for it in all.iter_mut().filter(|it| it.is_v2) {
            if let Some(named) = named.filter(|named| named.join("cgroup.controllers").exists()) {
                it.own = named.to_owned();
            } else if !of(&it.own, id).exists()
                && is_shared(&it.own)
                && !has_type(&it.mount)
                && make(&it.mount, id).is_ok()
            {
                it.own = it.mount.clone();
            }
            let there = read(&it.own.join("cgroup.controllers"));
            it.controllers = there.split_whitespace().map(str::to_owned).collect();
        }
        all.retain(|it| it.is_v2 || CONTROLLERS.iter().any(|name| it.has(name)));
        let mut groups = Groups { hierarchies: all, id: id.to_owned(), _held: Vec::new() };
        groups.sweep();
        let Groups { hierarchies, _held, .. } = &mut groups;
        hierarchies.retain(|it| make(&it.own, id).map(|folder| _held.push(folder)).is_ok());
        groups
    }

    /// Moves the daemon into a group of its own before it starts any process. Processes it starts would otherwise be
    /// where it was, and in the way of bounds for nodes.
    pub fn enter_daemon_group(&self) {
        // A refusal by the kernel here also bars a node's group, and is reported then.
        for it in self.hierarchies.iter().filter(|it| it.is_v2 && has_type(&it.own)) {
            let _ = enter_daemon_group(&it.own);
        }
    }

    /// Moves the keeper out of the daemon's service, where that has another group for it. needrestart(8) takes a process that
    /// runs a former file for its service's, and would start the daemon anew for the keeper each time.
    pub fn hold(&self, keeper: u32) {
        for it in self.hierarchies.iter().filter(|it| it.is_v2) {
            let procs = it.own.join(HELD).join("cgroup.procs");
            // A move costs milliseconds, also one to where the process is.
            let is_there = |text: String| text.lines().any(|line| line.parse() == Ok(keeper));
            if !fs::read_to_string(&procs).is_ok_and(is_there) {
                let _ = fs::write(procs, keeper.to_string());
            }
        }
    }

    /// Returns which of these bounds, or of the freezer, this machine cannot provide, as ends of the sentence "this
    /// machine has no …".
    pub fn lacks(&self, bounds: &Bounds) -> Vec<&'static str> {
        let has = |controller: &str| self.hierarchies.iter().any(|it| it.has(controller));
        let mut lacks = Vec::new();
        let wanted = [
            (bounds.memory.is_some() && !has("memory"), "control group for memory"),
            (bounds.pids.is_some() && !has("pids"), "control group for numbers of processes"),
            (bounds.cpu.is_some() && !has("cpu"), "control group for CPU time"),
            (bounds.cpus.is_some() && !has("cpuset"), "control group for CPUs"),
            (!self.freezes(), "freezer"),
        ];
        lacks.extend(wanted.into_iter().filter_map(|(is_missing, what)| is_missing.then_some(what)));
        lacks
    }

    /// Returns why nodes cannot have these bounds though the machine has what they take, if the daemon's group cannot hand
    /// it on.
    pub fn bars(&self, bounds: &Bounds) -> Option<String> {
        let mut all = self.hierarchies.iter().filter(|it| it.is_v2);
        let it = all.find(|it| is_shared(&it.own) && !hands_on(&it.own, &it.asked(bounds)))?;
        Some(holds_others(&it.own))
    }

    fn freezes(&self) -> bool {
        self.hierarchies.iter().any(Hierarchy::freezes)
    }

    /// Returns the group of a node, with these bounds: made, or as an earlier daemon has left it.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn node(&self, name: &str, bounds: &Bounds) -> io::Result<Group> {
        let mut group = Group { places: Vec::new(), freezer: None, oom_kills_before: 0 };
        let any_v2 = self.hierarchies.iter().any(|it| it.is_v2);
        for it in &self.hierarchies {
            let parent = of(&it.own, &self.id);
            let path = parent.join(format!("node-{name}"));
            // The node may have had bounds there before.
            if !is_of_use(it, bounds, any_v2) && !path.is_dir() {
                continue;
            }
            fs::create_dir_all(&path)?;
            if it.is_v2 {
                enable(&it.own, &parent, &it.asked(bounds))?;
            }
            if !it.is_v2 && it.has("cpuset") {
                inherit_cpuset(&it.own, &path)?;
            }
            bound(&path, it, bounds)?;
            group.places.push(Place { path, is_v2: it.is_v2, freezes: it.freezes(), is_its: true });
        }
        group.open_freezer()?;
        Ok(group)
    }

    /// Returns the group `child` in that of a node. If `group`, which the node had so far, is gone, for somebody has removed
    /// it, or has no CPU left, for its CPUs were taken off line, it is made anew with its bounds.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn child(&self, group: &mut Option<Group>, name: &str, bounds: &Bounds, child: &str) -> io::Result<Group> {
        match group.as_ref().filter(|group| group.has_a_cpu()).map(|group| group.child(child)) {
            Some(Err(error)) if error.kind() == NotFound => {}
            Some(made) => return made,
            None => {}
        }
        group.insert(self.node(name, bounds)?).child(child)
    }

    /// Returns the group `child` that an earlier daemon made, in that of any node, if it is there.
    pub fn child_of_before(&self, child: &str) -> Option<Group> {
        let nodes = |it: &Hierarchy| fs::read_dir(of(&it.own, &self.id)).into_iter().flatten().flatten();
        let freezes = self.hierarchies.iter().filter(|it| it.freezes());
        let places = freezes.flat_map(|it| nodes(it).map(|node| (node.path().join(child), it.is_v2)));
        let places = places.filter(|(path, _)| path.is_dir());
        let places = places.map(|(path, is_v2)| Place { path, is_v2, freezes: true, is_its: true });
        let mut group = Group { places: places.collect(), freezer: None, oom_kills_before: 0 };
        group.open_freezer().ok()?;
        group.freezer.is_some().then_some(group)
    }

    /// Removes the group of a node, as far as it has no process.
    pub fn remove_node(&self, name: &str) {
        let its = self.hierarchies.iter().map(|it| of(&it.own, &self.id).join(format!("node-{name}")));
        its.for_each(|path| remove_empty(&path, 3));
    }

    /// Removes groups without processes: this daemon's, and those of others that have ended.
    pub fn sweep(&self) {
        for it in &self.hierarchies {
            for entry in fs::read_dir(it.own.join("tasuki")).into_iter().flatten().flatten() {
                let Ok(folder) = File::open(entry.path()) else { continue };
                if *entry.file_name() == *self.id || folder.try_lock().is_ok() {
                    remove_empty(&entry.path(), 3);
                }
            }
            let _ = fs::remove_dir(it.own.join("tasuki"));
        }
    }
}

/// Removes this group and the groups beneath it, as far as they have no process.
fn remove_empty(group: &Path, depth: u32) {
    for entry in fs::read_dir(group).into_iter().flatten().flatten() {
        if depth > 0 && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_empty(&entry.path(), depth - 1);
        }
    }
    let _ = fs::remove_dir(group);
}

/// Returns the controllers that these bounds take.
fn wanted(bounds: &Bounds) -> Vec<&'static str> {
    let all = [
        ("memory", bounds.memory.is_some()),
        ("pids", bounds.pids.is_some()),
        ("cpu", bounds.cpu.is_some()),
        ("cpuset", bounds.cpus.is_some()),
    ];
    all.into_iter().filter_map(|(name, is_wanted)| is_wanted.then_some(name)).collect()
}

fn is_of_use(it: &Hierarchy, bounds: &Bounds, any_v2: bool) -> bool {
    it.is_v2 || it.has("freezer") && !any_v2 || wanted(bounds).iter().any(|name| it.has(name))
}

/// Has the groups from `own` down to `parent` hand these controllers on. The daemon goes into its own group if that is needed.
fn enable(own: &Path, parent: &Path, controllers: &[&str]) -> io::Result<()> {
    if controllers.is_empty() {
        return Ok(());
    }
    let text: Vec<String> = controllers.iter().map(|name| format!("+{name}")).collect();
    let hand_on = |group: &Path| fs::write(group.join("cgroup.subtree_control"), text.join(" "));
    if hand_on(own).is_err() {
        enter_daemon_group(own)?;
        hand_on(own).map_err(|error| match is_shared(own) {
            true => io::Error::other(holds_others(own)),
            false => error,
        })?;
    }
    let between = parent.strip_prefix(own).unwrap_or(Path::new("")).components();
    let mut group = own.to_owned();
    for part in between {
        group.push(part);
        hand_on(&group)?;
    }
    Ok(())
}

/// Returns whether a group hands these controllers on already.
fn hands_on(group: &Path, controllers: &[&str]) -> bool {
    let text = fs::read_to_string(group.join("cgroup.subtree_control")).unwrap_or_default();
    controllers.iter().all(|name| text.split_whitespace().any(|has| has == *name))
}

fn holds_others(own: &Path) -> String {
    format!(
        "{} holds other processes, so it bounds no nodes: start tasukid in a group of its own, or name one with --groups",
        own.display()
    )
}

/// Version 1 takes no process into a group without CPUs and memory. Gives each group below `own` those of its parent: `group`
/// only if it has none. The others get them anew, for the kernel takes a CPU that goes off line from all groups, and gives it
/// back to none.
fn inherit_cpuset(own: &Path, group: &Path) -> io::Result<()> {
    let mut around = own.to_owned();
    for part in group.strip_prefix(own).unwrap_or(Path::new("")) {
        let inner = around.join(part);
        for file in ["cpuset.cpus", "cpuset.mems"] {
            let (has, its) = (fs::read_to_string(inner.join(file))?, fs::read_to_string(around.join(file))?);
            if has.trim().is_empty() || inner != group && has != its {
                fs::write(inner.join(file), its)?;
            }
        }
        around = inner;
    }
    Ok(())
}

/// Moves this process, those it starts from then on, and the parent that waits until it serves, from `own` into a group
/// in it.
fn enter_daemon_group(own: &Path) -> io::Result<()> {
    let group = own.join(DAEMON_GROUP);
    fs::create_dir_all(&group)?;
    for pid in processes(own).lines().filter(|pid| is_ours(pid)) {
        // It may have ended.
        let _ = fs::write(group.join("cgroup.procs"), pid);
    }
    fs::write(group.join("cgroup.procs"), "0")
}

fn processes(group: &Path) -> String {
    fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default()
}

/// Returns whether a process runs this program.
fn is_ours(pid: &str) -> bool {
    let program = |pid: &str| fs::read_link(format!("/proc/{pid}/exe")).ok();
    program(pid).is_some_and(|its| Some(its) == program("self"))
}

/// Sets the bounds, and takes away those that the group had before and is not to have any more.
fn bound(group: &Path, it: &Hierarchy, bounds: &Bounds) -> io::Result<()> {
    let set = |controller: &str, file: &str, text: Option<String>, unbounded: &str| {
        let file = group.join(file);
        match text {
            _ if !it.has(controller) => Ok(()),
            Some(text) => fs::write(file, text),
            None if file.exists() => fs::write(file, unbounded),
            None => Ok(()),
        }
    };
    let text = |number: u64| number.to_string();
    let (memory, no_memory) = if it.is_v2 { ("memory.max", "max") } else { ("memory.limit_in_bytes", "-1") };
    set("memory", memory, bounds.memory.map(text), no_memory)?;
    set("pids", "pids.max", bounds.pids.map(|pids| text(pids.into())), "max")?;
    let numbers = bounds.cpus.map(|cpus| {
        let numbers = (0..CpuSet::MAX_CPU).filter(|&cpu| cpus.is_set(cpu)).map(|cpu| cpu.to_string());
        numbers.collect::<Vec<_>>().join(",")
    });
    // In version 2, a group without a list has all that its parent has.
    let parents = group.parent().filter(|_| !it.is_v2);
    let all = parents.and_then(|parent| fs::read_to_string(parent.join("cpuset.cpus")).ok());
    set("cpuset", "cpuset.cpus", numbers, all.as_deref().unwrap_or("\n"))?;
    let quota = bounds.cpu.map(|hundredths| u64::from(hundredths) * CPU_PERIOD / 100);
    match it.is_v2 {
        true => set("cpu", "cpu.max", quota.map(|quota| format!("{quota} {CPU_PERIOD}")), "max"),
        false => set("cpu", "cpu.cfs_quota_us", quota.map(text), "-1"),
    }
}

/// A group in one hierarchy.
#[derive(Debug)]
struct Place {
    path: PathBuf,
    is_v2: bool,
    freezes: bool,
    /// Whether it is the group's own, and not its parent's.
    is_its: bool,
}

/// The group of a node's processes, or of one worker's.
#[derive(Debug)]
pub struct Group {
    places: Vec<Place>,
    freezer: Option<Freezer>,
    /// What [`oom_kills`](Self::oom_kills) was when it was made.
    oom_kills_before: u64,
}

/// The files that stop a group, and show that it has stopped.
#[derive(Debug)]
struct Freezer {
    path: PathBuf,
    is_v2: bool,
    /// The group itself.
    folder: File,
    /// `freezer.state`, or `cgroup.freeze`.
    state: File,
    /// The same file, or `cgroup.events`.
    seen: File,
}

impl Group {
    fn open_freezer(&mut self) -> io::Result<()> {
        // Prefer version 2: the frozen processes can be killed.
        let best = self.places.iter().filter(|place| place.freezes).max_by_key(|place| place.is_v2);
        let Some(Place { path, is_v2, .. }) = best else { return Ok(()) };
        let (state, seen) =
            if *is_v2 { ("cgroup.freeze", "cgroup.events") } else { ("freezer.state", "freezer.state") };
        let state = OpenOptions::new().write(true).open(path.join(state))?;
        let (folder, seen) = (File::open(path)?, File::open(path.join(seen))?);
        self.freezer = Some(Freezer { path: path.clone(), is_v2: *is_v2, folder, state, seen });
        Ok(())
    }

    /// Returns a group in this one, bounded as this one is.
    ///
    /// # Errors
    /// The kernel refuses, or this group is gone (`NotFound`).
    pub fn child(&self, name: &str) -> io::Result<Group> {
        let places = self.places.iter().map(|place| {
            // A hierarchy that bounds alone needs no group of its own.
            let path = if place.freezes { place.path.join(name) } else { place.path.clone() };
            let made = if place.freezes { fs::create_dir(&path) } else { fs::metadata(&path).map(drop) };
            made.or_else(|error| if error.kind() == AlreadyExists { Ok(()) } else { Err(error) })?;
            Ok(Place { path, is_its: place.freezes, ..*place })
        });
        let mut group = Group { places: places.collect::<io::Result<_>>()?, freezer: None, oom_kills_before: 0 };
        group.open_freezer()?;
        group.oom_kills_before = group.oom_kills();
        Ok(group)
    }

    /// Returns whether version 1 would take a process into it.
    fn has_a_cpu(&self) -> bool {
        let cpus = self
            .places
            .iter()
            .filter(|place| !place.is_v2)
            .map(|place| fs::read_to_string(place.path.join("cpuset.cpus")));
        { cpus }.all(|cpus| cpus.map_or(true, |cpus| !cpus.trim().is_empty()))
    }

    /// Returns how many processes of the node, whose group this group is in, the kernel has killed for want of memory.
    fn oom_kills(&self) -> u64 {
        let of = |place: &Place| match place.is_v2 {
            true => fs::read_to_string(place.path.parent()?.join("memory.events")).ok(),
            false => fs::read_to_string(place.path.join("memory.oom_control")).ok(),
        };
        let texts = self.places.iter().filter_map(of).collect::<String>();
        texts.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok()).unwrap_or(0)
    }

    /// Returns whether the kernel has killed one more process of the node for want of memory than `known`, or since this
    /// group was made. Each is counted once.
    pub fn has_new_oom_kill(&self, known: &mut u64) -> bool {
        let before = self.oom_kills_before.max(*known);
        let is_new = self.oom_kills() > before;
        *known = before + u64::from(is_new);
        is_new
    }

    /// Returns the group in which a process can be started so that it is a member from its beginning. It enters the
    /// others by [`Self::doors`].
    pub fn birthplace(&self) -> Option<BorrowedFd<'_>> {
        self.freezer.as_ref().filter(|it| it.is_v2).map(|it| it.folder.as_fd())
    }

    /// Returns the files into which a process writes 0 to enter this group in all other hierarchies.
    pub fn doors(&self) -> Vec<PathBuf> {
        self.places.iter().filter(|place| !place.is_v2).map(|place| place.path.join("cgroup.procs")).collect()
    }

    /// Moves a process into this group, with those it starts from then on. It takes some 10 ms.
    ///
    /// # Errors
    /// The kernel refuses: the process may be dead.
    pub fn add(&self, pid: u32) -> io::Result<()> {
        self.places.iter().try_for_each(|place| fs::write(place.path.join("cgroup.procs"), pid.to_string()))
    }

    fn freezer(&self) -> io::Result<&Freezer> {
        self.freezer.as_ref().ok_or_else(|| io::Error::other("no freezer is mounted (cgroup2, or cgroup's freezer)"))
    }

    /// Asks the kernel to stop the whole group. It has stopped once [`Self::is_frozen`] says so.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn freeze(&self) -> io::Result<()> {
        let it = self.freezer()?;
        it.state.write_all_at(if it.is_v2 { b"1" } else { b"FROZEN" }, 0)
    }

    /// Returns whether no process of the group runs until it is thawed.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn is_frozen(&self) -> io::Result<bool> {
        let it = self.freezer()?;
        let mut text = [0; 64];
        let len = it.seen.read_at(&mut text, 0)?;
        let text = &text[..len];
        let frozen: &[u8] = if it.is_v2 { b"frozen 1" } else { b"FROZEN" };
        Ok(text.split(|byte| *byte == b'\n').any(|line| line == frozen))
    }

    /// Lets the group run again.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn thaw(&self) -> io::Result<()> {
        let it = self.freezer()?;
        it.state.write_all_at(if it.is_v2 { b"0" } else { b"THAWED" }, 0)
    }

    /// Kills the whole group, frozen or not; a frozen process runs nothing more in user space. Returns before all of
    /// them are dead.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn kill(&self) -> io::Result<()> {
        let it = self.freezer()?;
        if it.is_v2 && fs::write(it.path.join("cgroup.kill"), "1").is_ok() {
            return Ok(());
        }
        // A stopped process starts no others. Each has its signal before any goes on, and takes that first.
        self.freeze()?;
        for pid in self.processes()? {
            if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
                let _ = rustix::process::kill_process(pid, Signal::KILL);
            }
        }
        self.thaw()
    }

    /// Returns the processes of the group.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn processes(&self) -> io::Result<Vec<u32>> {
        let text = fs::read_to_string(self.freezer()?.path.join("cgroup.procs"))?;
        Ok(text.lines().filter_map(|line| line.parse().ok()).collect())
    }

    /// Removes the group, and the groups in it, as far as they have no process any more.
    pub fn remove(&self) {
        for place in self.places.iter().filter(|place| place.is_its) {
            remove_empty(&place.path, 2);
        }
    }
}
