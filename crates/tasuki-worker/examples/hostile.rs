//! A program that means harm, for the tests of what a node's program can do to others: nothing for you to copy from.
//!
//! `options` are attacks, with `;` between them: `first ATTACK [ARGUMENT]` before the runtime has confined the program (what holds then, tasukid has set), `then ATTACK
//! [ARGUMENT]` when it is given a NIC. What came of each is a line on standard error. `first card TRICK` goes on for as long as the process runs (`hostile/card.rs`).
//!
//! # Invariants
//!
//! - **H1** An attack is a system call on numbers, on descriptors, or on memory that it has mapped itself and that nothing of Rust's lies in; strings end with a zero, and
//!   structures live while the call runs.
#![allow(unsafe_code, reason = "a hostile program calls what no library offers (H1)")]

#[path = "hostile/card.rs"]
mod card;

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use tasuki_worker::{Fate, Program, Transactional, Turn};

/// A system call.
fn call(call: libc::c_long, [a, b, c, d]: [libc::c_long; 4]) -> libc::c_long {
    // SAFETY: what an argument points at is alive here, and as the call expects it (H1).
    unsafe { libc::syscall(call, a, b, c, d) }
}

/// What came of an attack: 0 or more if the kernel let it pass.
fn try_it(attack: &str, argument: &str) -> libc::c_long {
    let number: libc::c_long = argument.parse().unwrap_or_default();
    let fcntl = |command: libc::c_int, value| call(libc::SYS_fcntl, [0, command.into(), value, 0]);
    let no_files = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    let limits = std::ptr::from_ref(&no_files) as libc::c_long;
    let map = |protection| {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping at an address of the kernel's choice, in which nothing lies (H1).
        let page = unsafe { libc::mmap(std::ptr::null_mut(), 4096, protection, flags, -1, 0) };
        page as libc::c_long
    };
    let path = std::ffi::CString::new(argument).expect("no zero");
    let path = path.as_ptr() as libc::c_long;
    let socket = |family: libc::c_int| call(libc::SYS_socket, [family.into(), libc::SOCK_STREAM.into(), 0, 0]);
    match attack {
        "nothing" => 0,
        "card" => card::torment(argument),
        "kill" => call(libc::SYS_kill, [number, 0, 0, 0]),
        "kill-all" => call(libc::SYS_kill, [-1, 0, 0, 0]),
        "queue" => call(libc::SYS_rt_sigqueueinfo, [number, 0, path, 0]),
        "pidfd" => call(libc::SYS_pidfd_open, [number, 0, 0, 0]),
        "ptrace" => call(libc::SYS_ptrace, [libc::PTRACE_SEIZE.into(), number, 0, 0]),
        "read-memory" => call(libc::SYS_process_vm_readv, [number, 0, 0, 0]),
        "renice" => call(libc::SYS_setpriority, [libc::PRIO_PROCESS.into(), number, 19, 0]),
        "renice-user" => call(libc::SYS_setpriority, [libc::PRIO_USER.into(), 0, 19, 0]),
        "affinity" => call(libc::SYS_sched_setaffinity, [number, 8, std::ptr::from_ref(&1_u64) as libc::c_long, 0]),
        "open" => call(libc::SYS_openat, [libc::AT_FDCWD.into(), path, libc::O_RDONLY.into(), 0]),
        "create" => {
            call(libc::SYS_openat, [libc::AT_FDCWD.into(), path, (libc::O_WRONLY | libc::O_CREAT).into(), 0o600])
        }
        "unix-socket" => socket(libc::AF_UNIX),
        "tcp" => socket(libc::AF_INET),
        "netlink" => socket(libc::AF_NETLINK),
        "vsock" => socket(libc::AF_VSOCK),
        "datagrams" => call(libc::SYS_socketpair, [libc::AF_UNIX.into(), libc::SOCK_DGRAM.into(), 0, path]),
        "namespace" => call(libc::SYS_unshare, [libc::CLONE_NEWUSER.into(), 0, 0, 0]),
        "clone-namespace" => call(libc::SYS_clone, [(libc::CLONE_NEWUSER | libc::SIGCHLD).into(), 0, 0, 0]),
        "mount" => call(libc::SYS_mount, [path, path, path, 0]),
        "bpf" => call(libc::SYS_bpf, [0, path, 0, 0]),
        "io-uring" => call(libc::SYS_io_uring_setup, [1, path, 0, 0]),
        "userfaultfd" => call(libc::SYS_userfaultfd, [1, 0, 0, 0]),
        "keys" => call(libc::SYS_keyctl, [0, -3, 0, 0]),
        "perf" => call(libc::SYS_perf_event_open, [path, 0, -1, -1]),
        "shared-memory" => call(libc::SYS_shmget, [1, 4096, 0o1666, 0]),
        "root" => call(libc::SYS_setresuid, [0, 0, 0, 0]),
        "truncate-log" => call(libc::SYS_ftruncate, [2, 0, 0, 0]),
        "fill-log" => {
            for line in 0..number {
                eprintln!("filling \x1b[2J the log, line {line}");
            }
            number
        }
        "forks" => fork_bomb(),
        "memory" => memory_bomb(number),
        "prlimit" => call(libc::SYS_prlimit64, [number, libc::RLIMIT_NOFILE.into(), limits, 0]),
        "prlimit-self" => call(libc::SYS_prlimit64, [0, libc::RLIMIT_NOFILE.into(), limits, 0]),
        "setown" => fcntl(libc::F_SETOWN, number),
        "setsig" => fcntl(F_SETSIG, libc::SIGKILL.into()),
        "async" => fcntl(libc::F_SETFL, libc::O_ASYNC.into()),
        "notify" => fcntl(libc::F_NOTIFY, 1),
        "lease" => fcntl(libc::F_SETLEASE, libc::F_RDLCK.into()),
        "code-map" => map(libc::PROT_READ | libc::PROT_EXEC),
        "code" => call(
            libc::SYS_mprotect,
            [map(libc::PROT_READ | libc::PROT_WRITE), 4096, (libc::PROT_READ | libc::PROT_EXEC).into(), 0],
        ),
        other => panic!("no attack is called {other}"),
    }
}

/// Has children, and those wait, until there are no more; they end with it.
fn fork_bomb() -> libc::c_long {
    for _ in 0..1000 {
        // SAFETY: H1; the child makes system calls alone.
        match unsafe { libc::fork() } {
            -1 => return -1,
            0 => loop {
                // SAFETY: H1: a system call on numbers.
                unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
                // SAFETY: H1: a system call on a number.
                unsafe { libc::sleep(1) };
            },
            _ => {}
        }
    }
    1000
}

/// Writes so many MiB.
fn memory_bomb(mib: libc::c_long) -> libc::c_long {
    let len = usize::try_from(mib).unwrap_or_default() << 20;
    std::hint::black_box(vec![1_u8; len]);
    mib
}

/// Not in libc.
const F_SETSIG: libc::c_int = 10;

/// Tries all that is meant for now.
fn attack(options: &str, now: &str) {
    for order in options.split(';') {
        let words: Vec<&str> = order.split_whitespace().collect();
        let [when, attack, ref rest @ ..] = words[..] else { continue };
        if when == now {
            let came = try_it(attack, rest.first().copied().unwrap_or_default());
            let why = std::io::Error::last_os_error();
            eprintln!("attack {attack}: {}", if came >= 0 { "done".to_owned() } else { format!("refused: {why}") });
        }
    }
}

struct Hostile;

impl Program for Hostile {
    type State = [u64; 1];
    const STATE: (u32, u32) = (0x4057_113e, 1);

    fn new(options: &str) -> Result<Self, String> {
        static BEGAN: AtomicBool = AtomicBool::new(false);
        attack(options, if BEGAN.swap(true, Relaxed) { "then" } else { "first" });
        Ok(Hostile)
    }

    fn turn<N: Transactional>(&mut self, _: &mut [u64; 1], turn: &mut Turn<'_, N>) {
        turn.frames(|_| Fate::Dropped);
    }
}

fn main() -> ExitCode {
    tasuki_worker::main::<Hostile>()
}
