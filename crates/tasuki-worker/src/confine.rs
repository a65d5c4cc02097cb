//! What a worker gives up before it hears a first order: everything that it does not need to drive NICs whose descriptors it is given.
//!
//! Not `PR_SET_PDEATHSIG`: a worker outlives its daemon.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, LandlockStatus, Ruleset, RulesetAttr, RulesetStatus,
    Scope,
};
use rustix::process::{DumpableBehavior, Gid, Resource, Rlimit, Uid};
use rustix::thread::{CapabilitySet, CapabilitySets};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};

/// Names who a worker is to be once it has given up being root: `UID:GID`. The daemon sets it; without, nobody.
pub const IDENTITY: &str = "TASUKI_WORKER_ID";

const NOBODY: (u32, u32) = (65534, 65534);

/// System calls that a worker makes, by what it and its libraries are written to do; every test of a worker runs under this list. Whatever is
/// called besides kills it.
const CALLS: &[i64] = &[
    // The daemon's socket, and that of a device's server.
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_recvmsg,
    libc::SYS_recvfrom,
    libc::SYS_accept4,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
    // Eventfds, TAPs, and the registers of a device behind VFIO.
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_preadv2,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_eventfd2,
    libc::SYS_poll,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_ppoll,
    libc::SYS_sched_yield,
    libc::SYS_getcpu,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    // Descriptors.
    libc::SYS_close,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_dup,
    // What a client of memif hands over: whether it is what it has to be.
    libc::SYS_fstatfs,
    libc::SYS_readlinkat,
    // Shared memory, and ours.
    libc::SYS_memfd_create,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_lseek,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_madvise,
    libc::SYS_brk,
    // Of the language's runtime.
    libc::SYS_getrandom,
    libc::SYS_futex,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_restart_syscall,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_capget,
];

/// What opens files and reads them takes; which, stage one says.
const FILES: &[i64] = &[libc::SYS_faccessat, libc::SYS_faccessat2, libc::SYS_getdents64, libc::SYS_readv];

/// What a thread takes, beside `clone`. Of `clone3`, whose flags no filter sees, stage one's says that it is not there, and libraries take the other.
const THREADS: &[i64] = &[
    libc::SYS_clone3,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_prctl,
    libc::SYS_sched_getaffinity,
    libc::SYS_rt_sigpending,
];

/// Flags of `clone`: a thread has the first, and none of a namespace (CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET, NEWTIME).
const THREAD: u64 = 0x1_0000;
const NAMESPACES: u64 = 0x7e02_0080;

/// What a worker keeps of what it could have.
#[derive(Debug, Clone, Copy, Default)]
pub struct Keeps {
    /// It may go before others on its CPU: it keeps CAP_SYS_NICE, if it has it, of which the filter of system calls leaves its own nice value and its own CPU.
    pub urgent: bool,
    /// It goes on opening files, to read them: those that stage one leaves it.
    pub files: bool,
    /// It may start threads.
    pub threads: bool,
}

/// Requests of `ioctl`: whether a socket waits, and those of VFIO, which all have one message.
const FIONBIO: u64 = 0x5421;
const VFIO_TYPE: u64 = (b';' as u64) << 8;

/// Of `openat`: whoever only reads has none of these.
const NOT_TO_READ: u64 = (libc::O_ACCMODE | libc::O_CREAT | libc::O_TRUNC).unsigned_abs() as u64;

/// Of a mapping.
const PROT_EXEC: u64 = libc::PROT_EXEC.unsigned_abs() as u64;

/// Commands of `fcntl`: descriptors, seals, and the lock by which those that share a card's connection take turns. None of them names another process, as F_SETOWN does
/// (signals to it) or F_NOTIFY and F_SETLEASE (signals because of it). F_SETFL is apart.
const FCNTL: &[i32] = &[
    libc::F_DUPFD_CLOEXEC,
    libc::F_GETFD,
    libc::F_SETFD,
    libc::F_GETFL,
    libc::F_SETLK,
    libc::F_SETLKW,
    libc::F_ADD_SEALS,
    libc::F_GET_SEALS,
];

/// What became of it: sentences about what could not be confined, for the daemon.
#[derive(Debug, Default)]
pub struct Unconfined(pub Vec<String>);

impl Unconfined {
    fn note<E: std::fmt::Display>(&mut self, outcome: Result<(), E>, what: &str) {
        if let Err(error) = outcome {
            self.0.push(format!("{what}: {error}"));
        }
    }
}

/// Who to be. Nonsense is no reason to stay root.
fn identity(said: Option<&str>) -> (u32, u32) {
    let ids = said.and_then(|said| {
        let (user, group) = said.split_once(':')?;
        Some((user.parse().ok()?, group.parse().ok()?))
    });
    // Root, and the number that means "leave it", are nobody to become.
    ids.filter(|&(user, group)| ![0, u32::MAX].contains(&user) && ![0, u32::MAX].contains(&group)).unwrap_or(NOBODY)
}

/// Gives up what the worker does not need. It may lock `memlock` bytes afterwards.
///
/// # Errors
/// What must be given up and could not: privileges.
pub fn confine(memlock: u64, keeps: Keeps) -> Result<Unconfined> {
    let mut without = Unconfined::default();
    if let Err(error) = may_lock(memlock) {
        without
            .0
            .push(format!("the worker may lock less than {memlock} bytes ({error}); raise LimitMEMLOCK= of tasukid"));
    }
    let no_dump = rustix::process::setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) });
    without.note(no_dump, "a dump of the worker's memory is possible");
    become_nobody(keeps.urgent)
        .context("the worker could not give up its privileges; start tasukid as root, or as a user without any")?;
    let has = rustix::thread::capabilities(None).context("the worker cannot ask for its capabilities")?.permitted;
    let kept = if keeps.urgent { has & CapabilitySet::SYS_NICE } else { CapabilitySet::empty() };
    give_up_but(kept)?;
    rustix::thread::set_no_new_privs(true).context("the kernel does not bar the worker from new privileges")?;
    let dumpable = rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable);
    without.note(dumpable, "other processes of the worker's user can look into it");
    without.note(no_files(keeps.files), "files, TCP ports, abstract sockets and signals are not all barred");
    let filtered = only_calls(keeps);
    if filtered.is_err() {
        give_up_but(CapabilitySet::empty())?;
    }
    without.note(filtered, "system calls are not barred");
    Ok(without)
}

fn give_up_but(kept: CapabilitySet) -> Result<()> {
    let sets = CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() };
    rustix::thread::set_capabilities(None, sets).context("the worker could not give up its capabilities")
}

/// The worker may lock this much, and no more.
fn may_lock(bytes: u64) -> rustix::io::Result<()> {
    let limit = |bytes| rustix::process::setrlimit(Resource::Memlock, Rlimit { current: bytes, maximum: bytes });
    limit(Some(bytes)).inspect_err(|_| {
        // What there is has to do.
        let _ = limit(rustix::process::getrlimit(Resource::Memlock).maximum);
    })
}

fn become_nobody(keeps: bool) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    let (user, group) = identity(std::env::var(IDENTITY).ok().as_deref());
    let (user, group) = (Uid::from_raw(user), Gid::from_raw(group));
    // Whoever ceases to be root loses all capabilities otherwise; which are kept is chosen next.
    rustix::thread::set_keep_capabilities(keeps)?;
    rustix::thread::set_thread_groups(&[])?;
    rustix::thread::set_thread_res_gid(group, group, group)?;
    rustix::thread::set_thread_res_uid(user, user, user)?;
    Ok(())
}

/// What landlock is to bar, as of this kernel interface (Linux 6.12).
const LANDLOCK: ABI = ABI::V6;

/// No file, but to read what stage one leaves if it keeps that, no TCP port, no abstract socket and no signal to anybody outside: landlock.
fn no_files(but_those_of_stage_one: bool) -> Result<()> {
    let files = AccessFs::from_all(LANDLOCK);
    let to_read = AccessFs::ReadFile | AccessFs::ReadDir;
    let ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(if but_those_of_stage_one { files & !to_read } else { files })?
        .handle_access(AccessNet::from_all(LANDLOCK))?
        .scope(Scope::from_all(LANDLOCK))?;
    let status = ruleset.create()?.restrict_self()?;
    match (status.ruleset, status.landlock) {
        (RulesetStatus::FullyEnforced, _) => Ok(()),
        (RulesetStatus::PartiallyEnforced, LandlockStatus::Available { effective_abi, .. }) => {
            anyhow::bail!(
                "this kernel's landlock does not know {}; a newer one does (Linux 6.12)",
                not_barred(effective_abi).join(", ")
            )
        }
        _ => {
            anyhow::bail!(
                "this kernel has no landlock, or it is not switched on (CONFIG_SECURITY_LANDLOCK, lsm=landlock)"
            )
        }
    }
}

/// What a kernel with this interface does not bar.
fn not_barred(kernels: ABI) -> Vec<String> {
    let files = AccessFs::from_all(LANDLOCK) & !AccessFs::from_all(kernels);
    let ports = AccessNet::from_all(LANDLOCK) & !AccessNet::from_all(kernels);
    let scopes = Scope::from_all(LANDLOCK) & !Scope::from_all(kernels);
    let files = files.iter().map(|right| format!("{right:?} of files"));
    let ports = ports.iter().map(|right| format!("{right:?}"));
    files.chain(ports).chain(scopes.iter().map(|scope| format!("{scope:?} outside"))).collect()
}

/// A rule for one argument.
fn only_if(argument: u8, mask: Option<u64>, value: u64) -> Result<SeccompRule> {
    Ok(SeccompRule::new(vec![condition(argument, mask, value)?])?)
}

fn condition(argument: u8, mask: Option<u64>, value: u64) -> Result<SeccompCondition> {
    let op = mask.map_or(SeccompCmpOp::Eq, SeccompCmpOp::MaskedEq);
    Ok(SeccompCondition::new(argument, SeccompCmpArgLen::Dword, op, value)?)
}

/// What a worker may lock is asked for a device behind VFIO. Of another process of its user the same call would take the limits away.
fn only_to_look_at_itself() -> Result<SeccompRule> {
    let sets_nothing = SeccompCondition::new(2, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, 0)?;
    Ok(SeccompRule::new(vec![condition(0, None, 0)?, sets_nothing])?)
}

/// [`FCNTL`], and F_SETFL but for O_ASYNC: no file sends signals.
fn commands() -> Result<Vec<SeccompRule>> {
    let command = |command: i32| u64::from(command.unsigned_abs());
    let mut rules = FCNTL.iter().map(|&it| only_if(1, None, command(it))).collect::<Result<Vec<_>>>()?;
    let is_quiet = condition(2, Some(command(libc::O_ASYNC)), 0)?;
    rules.push(SeccompRule::new(vec![condition(1, None, command(libc::F_SETFL))?, is_quiet])?);
    Ok(rules)
}

/// Only the system calls that a worker makes: seccomp.
fn only_calls(keeps: Keeps) -> Result<()> {
    let files = FILES.iter().filter(|_| keeps.files);
    let threads = THREADS.iter().filter(|_| keeps.threads);
    let calls = CALLS.iter().chain(files).chain(threads);
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = calls.map(|&call| (call, Vec::new())).collect();
    if keeps.files {
        rules.insert(libc::SYS_openat, vec![only_if(2, Some(NOT_TO_READ), 0)?]);
    }
    if keeps.threads {
        let is_thread = vec![condition(0, Some(THREAD), THREAD)?, condition(0, Some(NAMESPACES), 0)?];
        rules.insert(libc::SYS_clone, vec![SeccompRule::new(is_thread)?]);
    }
    rules.insert(libc::SYS_ioctl, vec![only_if(1, None, FIONBIO)?, only_if(1, Some(0xff00), VFIO_TYPE)?]);
    let ourselves = std::process::id().into();
    rules.insert(libc::SYS_prlimit64, vec![only_to_look_at_itself()?]);
    rules.insert(libc::SYS_fcntl, commands()?);
    // Nothing that it has written, or was given, becomes code.
    let no_code = || only_if(2, Some(PROT_EXEC), 0);
    rules.insert(libc::SYS_mmap, vec![no_code()?]);
    rules.insert(libc::SYS_mprotect, vec![no_code()?]);
    // Its own CPU, and nobody else's.
    rules.insert(libc::SYS_sched_setaffinity, vec![only_if(0, None, 0)?]);
    // Its own nice value, and nobody else's.
    let its_own = vec![condition(0, None, libc::PRIO_PROCESS.into())?, condition(1, None, 0)?];
    rules.insert(libc::SYS_setpriority, vec![SeccompRule::new(its_own)?]);
    // For whoever aborts, and for a test that kills.
    rules.insert(libc::SYS_kill, vec![only_if(0, None, ourselves)?]);
    rules.insert(libc::SYS_tgkill, vec![only_if(0, None, ourselves)?]);
    let filter = SeccompFilter::new(
        rules,
        SeccompAction::KillProcess,
        SeccompAction::Allow,
        std::env::consts::ARCH.try_into()?,
    )?;
    let program: BpfProgram = filter.try_into()?;
    Ok(seccompiler::apply_filter(&program)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_becomes_root_by_a_name() {
        assert_eq!(identity(Some("1000:1001")), (1000, 1001));
        for nonsense in
            [None, Some(""), Some("0:0"), Some("1000:0"), Some("root:root"), Some("4294967295:1"), Some("7")]
        {
            assert_eq!(identity(nonsense), NOBODY, "{nonsense:?}");
        }
    }

    #[test]
    fn what_an_older_landlock_does_not_bar_is_named() {
        assert_eq!(not_barred(LANDLOCK), [""; 0]);
        let said = not_barred(ABI::V3).join(", ");
        for part in ["BindTcp", "ConnectTcp", "IoctlDev of files", "AbstractUnixSocket outside", "Signal outside"] {
            assert!(said.contains(part), "{part} is not in {said}");
        }
        assert!(!said.contains("Execute"), "{said}");
        assert!(not_barred(ABI::V1).join(", ").contains("Truncate"));
    }
}
