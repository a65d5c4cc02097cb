//! Confinement of a worker. Before its first order it gives up all that it does not need to drive NICs whose
//! descriptors it is given.
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

/// For setpriority(2): the number of a process follows. C libraries give it types of their own.
const PRIO_PROCESS: u64 = 0;

/// Environment variable with the user and group that a worker becomes when it gives up root: `UID:GID`. The daemon
/// sets it; the default is nobody (65534).
pub const IDENTITY: &str = "TASUKI_WORKER_ID";

const NOBODY: (u32, u32) = (65534, 65534);

/// System calls that a worker makes, by the code of the worker and its libraries. Every test of a worker runs under
/// this list. Any other call kills the worker.
const CALLS: &[i64] = &[
    // The daemon's socket, and the socket of a device's server.
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_recvmsg,
    libc::SYS_recvfrom,
    libc::SYS_accept4,
    libc::SYS_listen,
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
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
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
    // Checks of the descriptors that a memif client hands over.
    libc::SYS_fstatfs,
    libc::SYS_readlinkat,
    // Shared memory, and our own.
    libc::SYS_memfd_create,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_lseek,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_madvise,
    libc::SYS_brk,
    // The runtime of the language.
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

/// System calls to open and read files; stage one says which files.
const FILES: &[i64] = &[libc::SYS_faccessat, libc::SYS_faccessat2, libc::SYS_getdents64, libc::SYS_readv];
/// Those that only this architecture has, and that musl makes there.
#[cfg(target_arch = "x86_64")]
const OLD_FILES: &[i64] = &[libc::SYS_stat, libc::SYS_lstat, libc::SYS_access, libc::SYS_readlink];
#[cfg(not(target_arch = "x86_64"))]
const OLD_FILES: &[i64] = &[];

/// System calls that a thread needs, beside `clone`. A filter cannot see the flags of `clone3`; stage one's filter
/// answers that the call does not exist, and libraries then use `clone`.
const THREADS: &[i64] = &[
    libc::SYS_clone3,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_prctl,
    libc::SYS_sched_getaffinity,
    libc::SYS_rt_sigpending,
];

/// Flags of `clone`. A thread has the first, and no namespace flag (`CLONE_NEWNS`, `NEWCGROUP`, `NEWUTS`, `NEWIPC`,
/// `NEWUSER`, `NEWPID`, `NEWNET`, `NEWTIME`).
const THREAD: u64 = 0x1_0000;
const NAMESPACES: u64 = 0x7e02_0080;

/// Rights that a worker keeps.
#[derive(Debug, Clone, Copy, Default)]
pub struct Keeps {
    /// The worker may run before other processes on its CPU. It keeps `CAP_SYS_NICE`, if it has it. The filter of
    /// system calls limits this to the worker's own nice value and its own CPU.
    pub urgent: bool,
    /// The worker may open files to read them: the files that stage one leaves it.
    pub files: bool,
    /// The worker may start threads.
    pub threads: bool,
}

/// Requests of `ioctl`: whether a socket blocks, and the requests of VFIO, which all have one type.
const FIONBIO: u64 = 0x5421;
const VFIO_TYPE: u64 = (b';' as u64) << 8;

/// Flags of `open` and `openat` that a reader does not set.
const NOT_TO_READ: u64 = (libc::O_ACCMODE | libc::O_CREAT | libc::O_TRUNC).unsigned_abs() as u64;

/// Protection flag of a mapping.
const PROT_EXEC: u64 = libc::PROT_EXEC.unsigned_abs() as u64;

/// Commands of `fcntl`: descriptors, seals, and the lock by which the users of a card's connection take turns. None
/// of them names another process, as `F_SETOWN` does (signals to it) or `F_NOTIFY` and `F_SETLEASE` (signals because
/// of it). [`commands`] handles `F_SETFL`.
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

/// Outcome of the confinement: sentences for the daemon about steps that failed.
#[derive(Debug, Default)]
pub struct Unconfined(pub Vec<String>);

impl Unconfined {
    fn note<E: std::fmt::Display>(&mut self, outcome: Result<(), E>, what: &str) {
        if let Err(error) = outcome {
            self.0.push(format!("{what}: {error}"));
        }
    }
}

/// Parses the identity to take. Malformed text must not leave the worker root: it becomes nobody.
fn identity(said: Option<&str>) -> (u32, u32) {
    let ids = said.and_then(|said| {
        let (user, group) = said.split_once(':')?;
        Some((user.parse().ok()?, group.parse().ok()?))
    });
    // Neither root nor the number that means "leave it unchanged" is an identity to take.
    ids.filter(|&(user, group)| ![0, u32::MAX].contains(&user) && ![0, u32::MAX].contains(&group)).unwrap_or(NOBODY)
}

/// Gives up the rights that the worker does not need. It may lock `memlock` bytes afterwards.
///
/// # Errors
/// Privileges could not be given up.
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

/// Sets the limit of locked memory to `bytes`.
fn may_lock(bytes: u64) -> rustix::io::Result<()> {
    let limit = |bytes| rustix::process::setrlimit(Resource::Memlock, Rlimit { current: bytes, maximum: bytes });
    limit(Some(bytes)).inspect_err(|_| {
        // Use as much as the hard limit permits.
        let _ = limit(rustix::process::getrlimit(Resource::Memlock).maximum);
    })
}

fn become_nobody(keeps: bool) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    let (user, group) = identity(std::env::var(IDENTITY).ok().as_deref());
    let (user, group) = (Uid::from_raw(user), Gid::from_raw(group));
    // Otherwise a process that gives up root loses all capabilities. The caller chooses next which are kept.
    rustix::thread::set_keep_capabilities(keeps)?;
    rustix::thread::set_thread_groups(&[])?;
    rustix::thread::set_thread_res_gid(group, group, group)?;
    rustix::thread::set_thread_res_uid(user, user, user)?;
    Ok(())
}

/// Landlock interface whose rights are barred (Linux 6.12).
const LANDLOCK: ABI = ABI::V6;

/// Bars with landlock: all files, except to read those of stage one if the worker keeps that; TCP ports; abstract
/// sockets; and signals to processes outside.
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

/// Returns the rights that a kernel with this landlock interface does not bar.
fn not_barred(kernels: ABI) -> Vec<String> {
    let files = AccessFs::from_all(LANDLOCK) & !AccessFs::from_all(kernels);
    let ports = AccessNet::from_all(LANDLOCK) & !AccessNet::from_all(kernels);
    let scopes = Scope::from_all(LANDLOCK) & !Scope::from_all(kernels);
    let files = files.iter().map(|right| format!("{right:?} of files"));
    let ports = ports.iter().map(|right| format!("{right:?}"));
    files.chain(ports).chain(scopes.iter().map(|scope| format!("{scope:?} outside"))).collect()
}

/// Returns a rule on one argument.
fn only_if(argument: u8, mask: Option<u64>, value: u64) -> Result<SeccompRule> {
    Ok(SeccompRule::new(vec![condition(argument, mask, value)?])?)
}

fn condition(argument: u8, mask: Option<u64>, value: u64) -> Result<SeccompCondition> {
    let op = mask.map_or(SeccompCmpOp::Eq, SeccompCmpOp::MaskedEq);
    Ok(SeccompCondition::new(argument, SeccompCmpArgLen::Dword, op, value)?)
}

/// Permits `prlimit64` for the worker itself, to read only: a device behind VFIO needs to know how much the worker
/// may lock. On another process of its user the call could lower limits.
fn only_to_look_at_itself() -> Result<SeccompRule> {
    let sets_nothing = SeccompCondition::new(2, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, 0)?;
    Ok(SeccompRule::new(vec![condition(0, None, 0)?, sets_nothing])?)
}

/// Permits [`FCNTL`], and `F_SETFL` without `O_ASYNC`: no file sends signals.
fn commands() -> Result<Vec<SeccompRule>> {
    let command = |command: i32| u64::from(command.unsigned_abs());
    let mut rules = FCNTL.iter().map(|&it| only_if(1, None, command(it))).collect::<Result<Vec<_>>>()?;
    let is_quiet = condition(2, Some(command(libc::O_ASYNC)), 0)?;
    rules.push(SeccompRule::new(vec![condition(1, None, command(libc::F_SETFL))?, is_quiet])?);
    Ok(rules)
}

/// Permits only the system calls that a worker makes, with seccomp.
fn only_calls(keeps: Keeps) -> Result<()> {
    let files = FILES.iter().chain(OLD_FILES).filter(|_| keeps.files);
    let threads = THREADS.iter().filter(|_| keeps.threads);
    let calls = CALLS.iter().chain(files).chain(threads);
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = calls.map(|&call| (call, Vec::new())).collect();
    if keeps.files {
        rules.insert(libc::SYS_openat, vec![only_if(2, Some(NOT_TO_READ), 0)?]);
        #[cfg(target_arch = "x86_64")]
        rules.insert(libc::SYS_open, vec![only_if(1, Some(NOT_TO_READ), 0)?]);
    }
    if keeps.threads {
        let is_thread = vec![condition(0, Some(THREAD), THREAD)?, condition(0, Some(NAMESPACES), 0)?];
        rules.insert(libc::SYS_clone, vec![SeccompRule::new(is_thread)?]);
    }
    rules.insert(libc::SYS_ioctl, vec![only_if(1, None, FIONBIO)?, only_if(1, Some(0xff00), VFIO_TYPE)?]);
    let ourselves = std::process::id().into();
    rules.insert(libc::SYS_prlimit64, vec![only_to_look_at_itself()?]);
    rules.insert(libc::SYS_fcntl, commands()?);
    // No memory that the worker has written or was given becomes code.
    let no_code = || only_if(2, Some(PROT_EXEC), 0);
    rules.insert(libc::SYS_mmap, vec![no_code()?]);
    rules.insert(libc::SYS_mprotect, vec![no_code()?]);
    // Its own CPU only.
    rules.insert(libc::SYS_sched_setaffinity, vec![only_if(0, None, 0)?]);
    // Its own nice value only.
    let its_own = vec![condition(0, None, PRIO_PROCESS)?, condition(1, None, 0)?];
    rules.insert(libc::SYS_setpriority, vec![SeccompRule::new(its_own)?]);
    // For an abort, and for a test that kills the worker.
    rules.insert(libc::SYS_kill, vec![only_if(0, None, ourselves)?]);
    rules.insert(libc::SYS_tgkill, vec![only_if(0, None, ourselves)?]);
    let filter = SeccompFilter::new(
        rules,
        SeccompAction::KillProcess,
        SeccompAction::Allow,
        std::env::consts::ARCH.try_into()?,
    )?;
    let program: BpfProgram = filter.try_into()?;
    // A program of the user's has run by now, and may have started threads. One with a filter of its own makes the kernel refuse.
    let for_all = seccompiler::apply_filter_all_threads(&program);
    if for_all.is_err() {
        seccompiler::apply_filter(&program)?;
    }
    Ok(for_all?)
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
