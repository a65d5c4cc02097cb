//! The wide filter of system calls: those that a stock worker, or a user's own program with threads and children,
//! makes until its runtime confines it further. A call that is not in the list fails with ENOSYS, and libraries do
//! without.
//!
//! The process makes no socket and connects none: it speaks by those it was given. Namespaces, mounts, keys, BPF
//! programs, io_uring, userfaultfd, trace, and signals to other processes are barred.

use std::collections::BTreeMap;

use anyhow::Result;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};

/// For setpriority(2): the number of a process follows. C libraries give it types of their own.
const PRIO_PROCESS: u64 = 0;

/// Calls permitted with any arguments.
const CALLS: &[i64] = &[
    // Descriptors, and files as far as landlock permits.
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_lseek,
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_pipe2,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_fstatfs,
    libc::SYS_statfs,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_readlinkat,
    libc::SYS_getdents64,
    libc::SYS_getcwd,
    libc::SYS_chdir,
    libc::SYS_umask,
    libc::SYS_mkdirat,
    libc::SYS_unlinkat,
    libc::SYS_renameat2,
    libc::SYS_flock,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_copy_file_range,
    libc::SYS_sendfile,
    libc::SYS_eventfd2,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    libc::SYS_timerfd_gettime,
    libc::SYS_signalfd4,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_ppoll,
    libc::SYS_pselect6,
    // Sockets that it was given, or a pair.
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_sendmmsg,
    libc::SYS_recvmsg,
    libc::SYS_recvfrom,
    libc::SYS_recvmmsg,
    libc::SYS_accept4,
    libc::SYS_listen,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_shutdown,
    // Memory.
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_mprotect,
    libc::SYS_madvise,
    libc::SYS_msync,
    libc::SYS_mincore,
    libc::SYS_mlock,
    libc::SYS_mlock2,
    libc::SYS_munlock,
    libc::SYS_brk,
    // Itself: threads, children, time.
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_wait4,
    libc::SYS_waitid,
    libc::SYS_set_tid_address,
    libc::SYS_set_robust_list,
    libc::SYS_get_robust_list,
    libc::SYS_rseq,
    libc::SYS_membarrier,
    libc::SYS_futex,
    libc::SYS_futex_waitv,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigpending,
    libc::SYS_rt_sigsuspend,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_sigaltstack,
    libc::SYS_restart_syscall,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_gettid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_getresuid,
    libc::SYS_getresgid,
    libc::SYS_getgroups,
    libc::SYS_getpgid,
    libc::SYS_getsid,
    libc::SYS_getpriority,
    libc::SYS_getrusage,
    libc::SYS_times,
    libc::SYS_sysinfo,
    libc::SYS_uname,
    libc::SYS_getrandom,
    libc::SYS_getcpu,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_getattr,
    libc::SYS_sched_getscheduler,
    libc::SYS_sched_getparam,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_gettimeofday,
    // Calls by which its runtime gives up the rest.
    libc::SYS_capget,
    libc::SYS_capset,
    libc::SYS_seccomp,
    libc::SYS_landlock_create_ruleset,
    libc::SYS_landlock_add_rule,
    libc::SYS_landlock_restrict_self,
];

/// Calls that only this architecture has.
#[cfg(target_arch = "x86_64")]
const OLD_CALLS: &[i64] = &[
    libc::SYS_arch_prctl,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_access,
    libc::SYS_readlink,
    libc::SYS_dup2,
    libc::SYS_pipe,
    libc::SYS_poll,
    libc::SYS_select,
    libc::SYS_epoll_wait,
    libc::SYS_getpgrp,
    libc::SYS_time,
    libc::SYS_vfork,
    libc::SYS_fork,
];
#[cfg(not(target_arch = "x86_64"))]
const OLD_CALLS: &[i64] = &[];

/// Calls about the process itself alone: the first argument is 0, or its own pid.
const ABOUT_ITSELF: &[i64] = &[libc::SYS_prlimit64, libc::SYS_sched_setaffinity];
/// Signals to the process itself alone.
const SIGNALS: &[i64] = &[libc::SYS_kill, libc::SYS_tgkill];

/// Commands of `fcntl`, none of which names another process or has a file send signals; F_SETFL is apart.
const FCNTL: &[i32] = &[
    libc::F_DUPFD,
    libc::F_DUPFD_CLOEXEC,
    libc::F_GETFD,
    libc::F_SETFD,
    libc::F_GETFL,
    libc::F_GETLK,
    libc::F_SETLK,
    libc::F_SETLKW,
    libc::F_OFD_GETLK,
    libc::F_OFD_SETLK,
    libc::F_OFD_SETLKW,
    libc::F_ADD_SEALS,
    libc::F_GET_SEALS,
    libc::F_SETPIPE_SZ,
    libc::F_GETPIPE_SZ,
];

/// Requests of `ioctl`: FIONBIO, FIONREAD, TCGETS, which a terminal is asked first, FIONCLEX and FIOCLEX; and those
/// of VFIO, which share one type.
const IOCTL: &[u64] = &[0x5421, 0x541b, 0x5401, 0x5450, 0x5451];
const VFIO_TYPE: u64 = (b';' as u64) << 8;

/// Options of `prctl`.
const PRCTL: &[i32] = &[
    libc::PR_SET_PDEATHSIG,
    libc::PR_GET_PDEATHSIG,
    libc::PR_GET_DUMPABLE,
    libc::PR_SET_DUMPABLE,
    libc::PR_SET_NAME,
    libc::PR_GET_NAME,
    libc::PR_GET_SECCOMP,
    libc::PR_SET_SECCOMP,
    libc::PR_CAPBSET_READ,
    libc::PR_SET_TIMERSLACK,
    libc::PR_GET_TIMERSLACK,
    libc::PR_SET_NO_NEW_PRIVS,
    libc::PR_GET_NO_NEW_PRIVS,
    libc::PR_CAP_AMBIENT,
    libc::PR_SET_VMA,
];

/// Flags of `clone` for namespaces of its own: CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET,
/// NEWTIME. And CLONE_PARENT: the child of a worker would be the daemon's, which waits for its workers alone.
const NAMESPACES_AND_PARENT: u64 = 0x7e02_8080;

fn one(argument: u8, mask: Option<u64>, value: u64) -> Result<SeccompCondition> {
    let op = mask.map_or(SeccompCmpOp::Eq, SeccompCmpOp::MaskedEq);
    Ok(SeccompCondition::new(argument, SeccompCmpArgLen::Dword, op, value)?)
}

fn rule(conditions: Vec<SeccompCondition>) -> Result<SeccompRule> {
    Ok(SeccompRule::new(conditions)?)
}

/// Returns rules that permit one of these values.
fn any_of(argument: u8, values: &[i32]) -> Result<Vec<SeccompRule>> {
    values.iter().map(|&value| rule(vec![one(argument, None, u64::from(value.cast_unsigned()))?])).collect()
}

/// Returns the filter of the process with this pid, which keeps it when it becomes its program. `may_schedule` lets
/// it call sched_setattr(2) for itself. A process that keeps CAP_SYS_NICE must not, as no limit would bind it, and
/// it could make itself real-time.
pub fn filter(ourselves: u32, may_schedule: bool) -> Result<BpfProgram> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
        CALLS.iter().chain(OLD_CALLS).map(|&call| (call, Vec::new())).collect();
    let us = u64::from(ourselves);
    for &call in ABOUT_ITSELF.iter().chain(may_schedule.then_some(&libc::SYS_sched_setattr)) {
        rules.insert(call, vec![rule(vec![one(0, None, 0)?])?, rule(vec![one(0, None, us)?])?]);
    }
    for &call in SIGNALS {
        rules.insert(call, vec![rule(vec![one(0, None, us)?])?]);
    }
    let its_own = vec![one(0, None, PRIO_PROCESS)?, one(1, None, 0)?];
    rules.insert(libc::SYS_setpriority, vec![rule(its_own)?]);
    let mut fcntl = any_of(1, FCNTL)?;
    let bits = |flag: i32| u64::from(flag.cast_unsigned());
    fcntl.push(rule(vec![one(1, None, bits(libc::F_SETFL))?, one(2, Some(bits(libc::O_ASYNC)), 0)?])?);
    rules.insert(libc::SYS_fcntl, fcntl);
    let mut ioctl = IOCTL.iter().map(|&it| rule(vec![one(1, None, it)?])).collect::<Result<Vec<_>>>()?;
    ioctl.push(rule(vec![one(1, Some(0xff00), VFIO_TYPE)?])?);
    rules.insert(libc::SYS_ioctl, ioctl);
    rules.insert(libc::SYS_prctl, any_of(0, PRCTL)?);
    // clone3, whose flags lie in memory, is not there: libraries take clone then.
    rules.insert(libc::SYS_clone, vec![rule(vec![one(0, Some(NAMESPACES_AND_PARENT), 0)?])?]);
    // Huge pages are the machine's, for virtual machines, and no bound on a node's memory counts them.
    rules.insert(libc::SYS_mmap, vec![rule(vec![one(3, Some(bits(libc::MAP_HUGETLB)), 0)?])?]);
    rules.insert(libc::SYS_memfd_create, vec![rule(vec![one(1, Some(libc::MFD_HUGETLB.into()), 0)?])?]);
    // Stream and seqpacket pairs alone: a datagram socket sends to any name, connected or not.
    let unix = || one(0, None, bits(libc::AF_UNIX));
    let kind = |kind: i32| one(1, Some(0xf), bits(kind));
    let pairs = vec![rule(vec![unix()?, kind(libc::SOCK_STREAM)?])?, rule(vec![unix()?, kind(libc::SOCK_SEQPACKET)?])?];
    rules.insert(libc::SYS_socketpair, pairs);
    // Landlock before Linux 6.2 lets a process empty a file that it may not write.
    rules.insert(libc::SYS_openat, vec![rule(vec![one(2, Some(bits(libc::O_TRUNC)), 0)?])?]);
    #[cfg(target_arch = "x86_64")]
    rules.insert(libc::SYS_open, vec![rule(vec![one(1, Some(bits(libc::O_TRUNC)), 0)?])?]);
    let (no_such_call, arch) = (SeccompAction::Errno(libc::ENOSYS.cast_unsigned()), std::env::consts::ARCH.try_into()?);
    Ok(SeccompFilter::new(rules, no_such_call, SeccompAction::Allow, arch)?.try_into()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_has_room_for_it() {
        let program = filter(7, true).expect("a filter");
        assert!((1..4096).contains(&program.len()), "{}", program.len());
    }
}
