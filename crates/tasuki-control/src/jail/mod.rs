//! Confinement, stage one: it bounds a worker's process from its program's first instruction on, for any program. The
//! daemon starts itself as `tasukid jail`. That process gives up all rights that a worker does not need, and reports
//! this on its standard output. It waits on its standard input for its program, and becomes that. The daemon checks for
//! itself ([`verify`]), and gives nothing before.
//!
//! Most of a start's work is done by then: entering a control group of version 1 takes the kernel up to 12 ms. So one
//! such process waits for each node (a *cell*).
//!
//! Stage two is the runtime's (`tasuki-worker/src/confine.rs`). docs/design/worker.md lists the restrictions of each
//! stage.

mod filter;

use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};
use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, PathBeneath, Ruleset, RulesetAttr, RulesetCreatedAttr,
    RulesetStatus, Scope,
};
use rustix::event::{PollFd, PollFlags};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Gid, Resource, Rlimit, Uid};
use rustix::thread::{CapabilitySet, CapabilitySets, LinkNameSpaceType};
use serde::{Deserialize, Serialize};

use crate::channel::{self, Nothing};
use crate::spawn;

/// The argument that has tasukid become a jail.
pub const WORD: &str = "jail";

/// The landlock interface (ABI) with all restrictions that are wanted (Linux 6.12).
const LANDLOCK: ABI = ABI::V6;
/// Folders of a program's libraries; it may read the files there, and run them.
const LIBRARIES: &[&str] = &["/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/local/lib"];
/// Files and folders that a program and its libraries read when they begin.
const READ: &[&str] = &["/etc/ld.so.cache", "/etc/ld.so.preload", "/proc/self", "/sys/devices/system/cpu"];
const READ_AND_WRITE: &[&str] = &["/dev/null", "/dev/zero", "/dev/urandom"];
/// RLIMIT_NICE that permits every nice value: 20 - nice.
const ANY_NICE: u64 = 40;

/// The privileges that a process is to give up, and those that it keeps.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Terms {
    /// The program the process is to become at once, and its arguments; if `None`, it is told.
    pub program: Option<(PathBuf, Vec<String>)>,
    /// The user it is to become; if `None`, it stays the daemon's user.
    pub uid: Option<u32>,
    /// The network namespace to enter.
    pub network: Option<PathBuf>,
    /// The control groups to enter, beside the one in which it is started: files that take a 0.
    pub doors: Vec<PathBuf>,
    /// Whether it may go before other processes on its CPU.
    pub urgent: bool,
    /// Files and folders that it may read.
    pub reads: Vec<PathBuf>,
    /// Devices that it may use, of which some lock its memory.
    pub devices: Vec<PathBuf>,
    /// Whether it ends if it cannot give something up.
    pub strict: bool,
    /// Sentences about parts of the confinement that the daemon knows to be missing.
    pub lacks: Vec<String>,
}

/// The program that the process is to become; its file comes beside the message.
#[derive(Debug, Serialize, Deserialize)]
struct Become {
    program: PathBuf,
}

/// Has a process that waits in its jail become a program.
///
/// # Errors
/// The file cannot be opened, or the process hears nothing.
pub fn tell(socket: BorrowedFd<'_>, program: &Path, file: BorrowedFd<'_>) -> rustix::io::Result<()> {
    let what = serde_json::to_vec(&Become { program: program.to_owned() }).expect("plain data");
    channel::send(socket, &what, &[file])
}

/// Opens a program's file, for [`tell`]: this file runs, even if its path names another by then.
///
/// # Errors
/// It is not there.
pub fn open_program(program: &Path) -> rustix::io::Result<OwnedFd> {
    open(spawn::find(program), OFlags::PATH)
}

/// Messages of the jail to the daemon, a line each: how far it is, or why it goes no further.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Says {
    /// It waits for its program; the sentences name the missing confinement.
    Waits(Vec<String>),
    /// It is confined as far as possible; the sentences name the missing confinement.
    Confined(Vec<String>),
    /// It ends.
    Failed(String),
}

/// Runs `tasukid jail TERMS`.
pub fn run(terms: &str) -> ExitCode {
    let sentence = match become_program(terms) {
        Ok(never) => match never {},
        Err(error) => format!("{error:#}"),
    };
    // If standard output is no longer the daemon's, the process has reported by the duplicate.
    say(std::io::stdout(), &Says::Failed(sentence));
    ExitCode::FAILURE
}

fn say(to: impl AsFd, what: &Says) {
    let mut line = serde_json::to_vec(what).expect("plain data");
    line.push(b'\n');
    // A daemon that is gone needs no answer.
    let _ = rustix::io::write(to, &line);
}

fn become_program(terms: &str) -> Result<std::convert::Infallible> {
    let terms: Terms = serde_json::from_str(terms).context("tasukid starts this by itself, for its workers")?;
    let says = rustix::io::fcntl_dupfd_cloexec(std::io::stdout(), 3).context("it has no standard output")?;
    let nowhere = open("/dev/null", OFlags::RDWR).context("/dev/null")?;
    let mut lacks = terms.lacks.clone();
    // Open the program while this process may look there.
    let known = terms.program.as_ref().map(|(path, args)| {
        let file = open_program(path).with_context(|| format!("{} cannot be started", path.display()))?;
        anyhow::Ok((path.clone(), args.clone(), file))
    });
    let known = known.transpose()?;
    let (files, is_apart) = confine(&terms, &mut lacks)?;
    is_enough(&terms, &lacks)?;
    let (path, args, program) = match known {
        Some(known) => known,
        None => {
            say(&says, &Says::Waits(lacks.clone()));
            let (path, program) = hear()?;
            (path, vec!["worker".to_owned()], program)
        }
    };
    let path = spawn::find(&path);
    let files = files.add_rule(PathBeneath::new(program.try_clone()?, AccessFs::Execute | AccessFs::ReadFile))?;
    note(&mut lacks, bar_files(files, is_apart), "files, abstract sockets and signals to others are not all barred");
    is_enough(&terms, &lacks)?;
    say(&says, &Says::Confined(lacks));
    rustix::stdio::dup2_stdout(&nowhere)?;
    drop(nowhere);
    let begin = |path: &Path| {
        let mut command = Command::new(path);
        // It can open no file to name the functions of a backtrace, and would end with that instead of with its panic.
        command.args(&args).env_remove("RUST_BACKTRACE").env_remove("RUST_LIB_BACKTRACE");
        command
    };
    let mut error = begin(&path).exec();
    if error.kind() == std::io::ErrorKind::PermissionDenied {
        // The program lies where its user cannot go, in a home directory for instance.
        let by_descriptor = format!("/proc/self/fd/{}", program.as_raw_fd());
        error = begin(by_descriptor.as_ref()).arg0(&path).exec();
    }
    let why = match is_elf(&program) {
        true => format!("does not start: {error}"),
        false => "is no ELF program, and a confined worker reaches no interpreter of a script; name a compiled program"
            .to_owned(),
    };
    say(&says, &Says::Failed(format!("{} {why}", path.display())));
    std::process::exit(1)
}

/// Returns whether the file begins as an ELF program does (elf(5)).
fn is_elf(program: &OwnedFd) -> bool {
    let mut first = [0; 4];
    let file = std::fs::File::open(format!("/proc/self/fd/{}", program.as_raw_fd()));
    match file.and_then(|mut file| file.read_exact(&mut first)) {
        Ok(()) => first == *b"\x7fELF",
        // What cannot be read was refused for another reason; what is shorter is none.
        Err(error) => error.kind() != std::io::ErrorKind::UnexpectedEof,
    }
}

fn is_enough(terms: &Terms, lacks: &[String]) -> Result<()> {
    anyhow::ensure!(
        lacks.is_empty() || !terms.strict,
        "its confinement is incomplete: {}; mend that, or write confine = \"best-effort\" under [daemon]",
        lacks.join("; ")
    );
    Ok(())
}

/// Waits for the program. Without a daemon there is none, and the process ends.
fn hear() -> Result<(PathBuf, OwnedFd)> {
    let (socket, mut room) = (std::io::stdin(), Vec::new());
    let message = loop {
        let _ = rustix::event::poll(&mut [PollFd::new(&socket, PollFlags::IN)], None);
        match channel::receive(socket.as_fd(), &mut room) {
            Ok(message) => break message,
            Err(Nothing::Yet) => {}
            Err(Nothing::Closed) => std::process::exit(0),
            Err(nothing) => anyhow::bail!("{nothing}"),
        }
    };
    let Become { program } = serde_json::from_slice(&message.bytes).context("it is told no program")?;
    let file = message.fds.trust().into_iter().next();
    Ok((program, file.context("it is told a program without its file")?))
}

fn open(path: impl AsRef<Path>, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    rustix::fs::open(path.as_ref(), flags | OFlags::CLOEXEC, Mode::empty())
}

/// Notes a failed step.
fn note<E: std::fmt::Display>(lacks: &mut Vec<String>, outcome: Result<(), E>, what: &str) {
    if let Err(error) = outcome {
        lacks.push(format!("{what} ({error})"));
    }
}

/// Gives up everything but files, for which the program must be known. Notes each failure, and returns whether user
/// and network are the node's own. It is an error if the process would stay root.
fn confine(terms: &Terms, lacks: &mut Vec<String>) -> Result<(landlock::RulesetCreated, bool)> {
    spawn::be_spared_no_more();
    for door in &terms.doors {
        note(lacks, std::fs::write(door, "0"), "it uses memory and processes without a bound");
    }
    let entered = terms.network.as_deref().map(enter);
    let is_apart = terms.uid.is_some() && matches!(entered, Some(Ok(())));
    note(lacks, entered.unwrap_or(Ok(())), "it is in the machine's network");
    let keeps = limit(terms, lacks);
    let files = landlock(terms)?;
    if let Some(uid) = terms.uid {
        become_user(uid, keeps)?;
    }
    let kept = if keeps.is_empty() { keeps } else { keeps & rustix::thread::capabilities(None)?.permitted };
    let sets = CapabilitySets { effective: kept, permitted: kept, inheritable: kept };
    rustix::thread::set_capabilities(None, sets).context("it cannot give up its capabilities")?;
    rustix::thread::clear_ambient_capability_set().context("it cannot give up its capabilities")?;
    if !kept.is_empty() {
        let raised = rustix::thread::configure_capability_in_ambient_set(kept, true);
        note(lacks, raised, "its nice value stays 0");
    }
    rustix::thread::set_no_new_privs(true).context("the kernel does not bar it from new privileges")?;
    // Ask now: the filter may bar that call, and the program keeps the slices.
    tasuki_shm::slice::brief();
    let filter = filter::filter(std::process::id(), kept.is_empty())?;
    note(lacks, seccompiler::apply_filter(&filter), "system calls are not barred");
    Ok((files, is_apart))
}

fn enter(network: &Path) -> Result<()> {
    let network = open(network, OFlags::RDONLY)?;
    Ok(rustix::thread::move_into_link_name_space(network.as_fd(), Some(LinkNameSpaceType::Network))?)
}

/// Sets the limits. Returns the capabilities to keep where a limit cannot replace them. RLIMIT_NICE lets the process
/// set its own nice value and nothing else. A process that cannot raise that limit (containers without
/// CAP_SYS_RESOURCE) keeps CAP_SYS_NICE, which the filter restricts to calls about the process itself.
fn limit(terms: &Terms, lacks: &mut Vec<String>) -> CapabilitySet {
    let set = |resource, to| rustix::process::setrlimit(resource, Rlimit { current: Some(to), maximum: Some(to) });
    note(lacks, set(Resource::Core, 0), "a dump of its memory is possible");
    note(lacks, set(Resource::Msgqueue, 0), "it may have message queues");
    note(lacks, set(Resource::Rtprio, 0), "it may have real-time priority");
    let nice = if terms.urgent { set(Resource::Nice, ANY_NICE) } else { set(Resource::Nice, 0) };
    let ours = rustix::thread::capabilities(None).map_or(CapabilitySet::empty(), |ours| ours.permitted);
    match nice {
        _ if !terms.devices.is_empty() => ours & CapabilitySet::IPC_LOCK,
        Err(_) if terms.urgent => ours & CapabilitySet::SYS_NICE,
        _ => CapabilitySet::empty(),
    }
}

/// Becomes this user alone, in no group but its own. The process keeps of its capabilities those in `keeps`, and no
/// program gives it any.
fn become_user(uid: u32, keeps: CapabilitySet) -> Result<()> {
    // Set the inheritable capabilities while the bounding set still has them.
    let ours = rustix::thread::capabilities(None)?;
    rustix::thread::set_capabilities(None, CapabilitySets { inheritable: keeps, ..ours })
        .context("it cannot give up its capabilities")?;
    for capability in CapabilitySet::all().iter() {
        let known = rustix::thread::capability_is_in_bounding_set(capability);
        if known == Ok(true) {
            rustix::thread::remove_capability_from_bounding_set(capability)
                .context("it cannot give up its capabilities for good")?;
        }
    }
    let (user, group) = (Uid::from_raw(uid), Gid::from_raw(uid));
    let what = || format!("it cannot become user {uid}; name others with uids = \"FIRST-LAST\" under [daemon]");
    rustix::thread::set_keep_capabilities(!keeps.is_empty())?;
    rustix::thread::set_thread_groups(&[]).with_context(what)?;
    rustix::thread::set_thread_res_gid(group, group, group).with_context(what)?;
    rustix::thread::set_thread_res_uid(user, user, user).with_context(what)
}

/// Returns the rules for a program's libraries, its node's files, and little else: made while this process may look
/// there.
fn landlock(terms: &Terms) -> Result<landlock::RulesetCreated> {
    let run = AccessFs::Execute | AccessFs::ReadFile | AccessFs::ReadDir;
    let read = AccessFs::ReadFile | AccessFs::ReadDir;
    let write = AccessFs::ReadFile | AccessFs::WriteFile;
    let ours = |paths: &'static [&str]| paths.iter().map(Path::new);
    let list = ours(LIBRARIES).map(|path| (path, run)).chain(ours(READ).map(|path| (path, read)));
    let list = list.chain(ours(READ_AND_WRITE).map(|path| (path, write)));
    let list = list.chain(terms.reads.iter().map(|path| (path.as_path(), read)));
    let list =
        list.chain(terms.devices.iter().map(|path| (path.as_path(), write | AccessFs::ReadDir | AccessFs::IoctlDev)));
    let mut rules = Vec::new();
    for (path, rights) in list {
        let Ok(fd) = open(path, OFlags::PATH) else { continue };
        rules.push(PathBeneath::new(fd, if path.is_dir() { rights } else { rights & !AccessFs::ReadDir }));
    }
    let mut ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(LANDLOCK))?
        .handle_access(AccessNet::from_all(LANDLOCK))?
        .scope(Scope::from_all(LANDLOCK))?
        .create()?;
    for rule in rules {
        ruleset = ruleset.add_rule(rule)?;
    }
    Ok(ruleset)
}

/// Bars files, as every landlock does. The filter of system calls bars the rest that a landlock before Linux 6.12's
/// does not know: truncation, devices' requests, TCP, abstract sockets, signals. Besides, a process that `is_apart`,
/// with a user and a network of its own, has nothing there to reach for.
fn bar_files(ruleset: landlock::RulesetCreated, is_apart: bool) -> Result<()> {
    let status = ruleset.restrict_self()?;
    match status.ruleset {
        RulesetStatus::FullyEnforced => Ok(()),
        RulesetStatus::PartiallyEnforced if is_apart => Ok(()),
        RulesetStatus::PartiallyEnforced => anyhow::bail!("this kernel's landlock is older than Linux 6.12's"),
        RulesetStatus::NotEnforced => anyhow::bail!("this kernel has no landlock, or it is not switched on"),
    }
}

/// Returns a sentence for each of these terms that, by the kernel's account of the process, does not hold.
pub fn verify(pid: u32, terms: &Terms) -> Vec<String> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let network = |of: &str| std::fs::read_link(format!("/proc/{of}/ns/net")).ok();
    let is_apart = terms.network.is_none() || network(&pid.to_string()) != network("self");
    found_wanting(&status, terms, is_apart)
}

fn found_wanting(status: &str, terms: &Terms, is_apart: bool) -> Vec<String> {
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.unwrap_or("?").split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let mut wanting = Vec::new();
    let mut hold = |name: &str, is_so: &dyn Fn(&str) -> bool| {
        let value = field(name);
        if !is_so(&value) {
            wanting.push(format!("the kernel says {name}: {value}"));
        }
    };
    if let Some(uid) = terms.uid {
        let four = [uid; 4].map(|id| id.to_string()).join(" ");
        hold("Uid", &|value| value == four);
        hold("Gid", &|value| value == four);
        hold("Groups", &str::is_empty);
        hold("CapBnd", &|value| bits(value) == Some(0));
    }
    let may_have = match terms.devices.is_empty() {
        true if terms.urgent => CapabilitySet::SYS_NICE,
        true => CapabilitySet::empty(),
        false => CapabilitySet::IPC_LOCK,
    };
    for name in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
        hold(name, &|value| bits(value).is_some_and(|bits| bits & !may_have.bits() == 0));
    }
    hold("NoNewPrivs", &|value| value == "1");
    hold("Seccomp", &|value| value == "2");
    if !is_apart {
        wanting.push("it is in tasukid's network namespace".to_owned());
    }
    wanting
}

fn bits(value: &str) -> Option<u64> {
    u64::from_str_radix(value, 16).ok()
}

/// Reads the jail's last message; `None` unless all of it is there.
pub fn said(text: &[u8]) -> Option<Says> {
    let mut lines = text.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    // The last line counts: the failure to start a program comes after all else.
    serde_json::from_slice(lines.next_back()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATUS: &str = "Name:\tx\nUid:\t7\t7\t7\t7\nGid:\t7\t7\t7\t7\nGroups:\t \nNoNewPrivs:\t1\nSeccomp:\t2\nCapInh:\t0000000000000000\n\
         CapPrm:\t0000000000000000\nCapEff:\t0000000000000000\nCapBnd:\t0000000000000000\nCapAmb:\t0000000000000000\n";

    fn terms(urgent: bool) -> Terms {
        Terms {
            program: None,
            uid: Some(7),
            network: None,
            doors: Vec::new(),
            urgent,
            reads: Vec::new(),
            devices: Vec::new(),
            strict: true,
            lacks: Vec::new(),
        }
    }

    #[test]
    fn what_the_kernel_says_is_held_against_the_terms() {
        assert_eq!(found_wanting(STATUS, &terms(false), true), [""; 0]);
        let wrong = [
            ("Uid:\t7\t7\t7\t7", "Uid:\t7\t0\t7\t7"),
            ("Gid:\t7\t7\t7\t7", "Gid:\t0\t0\t0\t0"),
            ("Groups:\t ", "Groups:\t0 27"),
            ("NoNewPrivs:\t1", "NoNewPrivs:\t0"),
            ("Seccomp:\t2", "Seccomp:\t0"),
            ("CapBnd:\t0000000000000000", "CapBnd:\t0000000000000001"),
            ("CapEff:\t0000000000000000", "CapEff:\t0000000000800000"),
        ];
        for (right, changed) in wrong {
            let found = found_wanting(&STATUS.replace(right, changed), &terms(false), true);
            assert_eq!(found.len(), 1, "{changed}: {found:?}");
        }
        let nice = STATUS.replace("CapEff:\t0000000000000000", "CapEff:\t0000000000800000");
        assert_eq!(
            found_wanting(&nice, &terms(true), true),
            [""; 0],
            "CAP_SYS_NICE, for a worker that may go before others"
        );
        assert_eq!(found_wanting(STATUS, &terms(false), false).len(), 1);
        assert!(!found_wanting("", &terms(false), true).is_empty(), "no term holds for a dead process");
    }

    #[test]
    fn what_is_said_last_counts() {
        assert_eq!(said(b""), None);
        assert_eq!(said(b"{\"Confined\":[]}\n"), Some(Says::Confined(Vec::new())));
        let both = b"{\"Confined\":[]}\n{\"Failed\":\"no\"}\n";
        assert_eq!(said(both), Some(Says::Failed("no".to_owned())));
    }
}
