//! A program that means harm, for the tests of the harm that a node's program can do to others. Do not copy from it.
//!
//! `options` are attacks, separated by `;`. `first ATTACK [ARGUMENT]` runs before the runtime has confined the
//! program, when only tasukid's confinement holds. `then ATTACK [ARGUMENT]` runs when the program is given a NIC.
//! Each attack prints its outcome as a line on standard error. `first card TRICK` goes on for as long as the process
//! runs (`hostile/card.rs`).
//!
//! # Invariants
//!
//! - **H1** An attack is a system call on numbers, on descriptors, or on memory that it has mapped itself and that
//!   holds no value of Rust's; strings end with a zero, and structures live while the call runs.
#![allow(unsafe_code, reason = "a hostile program calls what no library offers (H1)")]

#[path = "hostile/card.rs"]
mod card;

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use tasuki_worker::{Fate, Program, Transactional, Turn};

/// Makes a system call.
fn call(call: libc::c_long, [a, b, c, d]: [libc::c_long; 4]) -> libc::c_long {
    // SAFETY: the memory behind an argument is alive here, and as the call expects it (H1).
    unsafe { libc::syscall(call, a, b, c, d) }
}

/// Tries an attack. Returns 0 or more if the kernel let it pass.
fn try_it(attack: &str, argument: &str) -> libc::c_long {
    let number: libc::c_long = argument.parse().unwrap_or_default();
    let fcntl = |command: libc::c_int, value| call(libc::SYS_fcntl, [0, command.into(), value, 0]);
    let no_files = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    let limits = std::ptr::from_ref(&no_files) as libc::c_long;
    let map = |protection, flags: libc::c_int| {
        let flags = flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping at an address of the kernel's choice, in which nothing lies (H1).
        let page = unsafe { libc::mmap(std::ptr::null_mut(), 2 << 20, protection, flags, -1, 0) };
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
        "other-cpu" => {
            call(libc::SYS_sched_setaffinity, [0, 8, std::ptr::from_ref(&(1_u64 << number)) as libc::c_long, 0])
        }
        "open" => call(libc::SYS_openat, [libc::AT_FDCWD.into(), path, libc::O_RDONLY.into(), 0]),
        #[cfg(target_arch = "x86_64")]
        "open-old" => call(libc::SYS_open, [path, libc::O_RDONLY.into(), 0, 0]),
        #[cfg(target_arch = "x86_64")]
        "create-old" => call(libc::SYS_open, [path, (libc::O_WRONLY | libc::O_CREAT).into(), 0o600, 0]),
        #[cfg(target_arch = "x86_64")]
        "look-old" => {
            let mut room = [0_u64; 32];
            let room = std::ptr::from_mut(&mut room) as libc::c_long;
            let tries = [
                call(libc::SYS_stat, [path, room, 0, 0]),
                call(libc::SYS_lstat, [path, room, 0, 0]),
                call(libc::SYS_access, [path, libc::R_OK.into(), 0, 0]),
            ];
            // It is no link: the kernel says so, and does not kill.
            call(libc::SYS_readlink, [path, room, 256, 0]);
            tries.into_iter().min().unwrap_or(-1)
        }
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
        "clone-parent" => call(libc::SYS_clone, [(libc::CLONE_PARENT | libc::SIGCHLD).into(), 0, 0, 0]),
        "huge-file" => call(libc::SYS_memfd_create, [c"huge".as_ptr() as libc::c_long, libc::MFD_HUGETLB.into(), 0, 0]),
        "huge-pages" => map(libc::PROT_READ, libc::MAP_HUGETLB | libc::MAP_NORESERVE),
        "mount" => call(libc::SYS_mount, [path, path, path, 0]),
        "bpf" => call(libc::SYS_bpf, [0, path, 0, 0]),
        "io-uring" => call(libc::SYS_io_uring_setup, [1, path, 0, 0]),
        "userfaultfd" => call(libc::SYS_userfaultfd, [1, 0, 0, 0]),
        "keys" => call(libc::SYS_keyctl, [0, -3, 0, 0]),
        "perf" => call(libc::SYS_perf_event_open, [path, 0, -1, -1]),
        "shared-memory" => call(libc::SYS_shmget, [1, 4096, 0o1666, 0]),
        "root" => call(libc::SYS_setresuid, [0, 0, 0, 0]),
        "truncate-log" => call(libc::SYS_ftruncate, [2, 0, 0, 0]),
        "signal-thread" => call(libc::SYS_tgkill, [number, number, 0, 0]),
        "queue-thread" => call(libc::SYS_rt_tgsigqueueinfo, [number, number, 0, path]),
        "steal-descriptor" => call(libc::SYS_pidfd_getfd, [3, 0, 0, 0]),
        "advise" => call(libc::SYS_process_madvise, [3, path, 1, libc::MADV_COLD.into()]),
        "compare" => call(libc::SYS_kcmp, [number, number, 0, 0]),
        "migrate" => call(libc::SYS_migrate_pages, [number, 64, path, path]),
        "real-time" => real_time(),
        "schedule" => call(
            libc::SYS_sched_setscheduler,
            [0, libc::SCHED_RR.into(), std::ptr::from_ref(&1_i32) as libc::c_long, 0],
        ),
        "io-priority" => call(libc::SYS_ioprio_set, [1, number, 0, 0]),
        "join-namespace" => call(libc::SYS_setns, [0, 0, 0, 0]),
        "chroot" => call(libc::SYS_chroot, [path, 0, 0, 0]),
        "pivot" => call(libc::SYS_pivot_root, [path, path, 0, 0]),
        "module" => call(libc::SYS_finit_module, [0, path, 0, 0]),
        "kernel-log" => call(libc::SYS_syslog, [3, path, 1, 0]),
        "watch-all" => call(libc::SYS_fanotify_init, [0, 0, 0, 0]),
        "watch-files" => call(libc::SYS_inotify_init1, [0, 0, 0, 0]),
        "by-handle" => call(libc::SYS_open_by_handle_at, [libc::AT_FDCWD.into(), path, 0, 0]),
        "personality" => call(libc::SYS_personality, [0x0040_0000, 0, 0, 0]),
        "clock" => call(libc::SYS_clock_settime, [0, path, 0, 0]),
        "host-name" => call(libc::SYS_sethostname, [path, 1, 0, 0]),
        "messages" => call(libc::SYS_msgget, [1, 0o1666, 0, 0]),
        "semaphores" => call(libc::SYS_semget, [1, 1, 0o1666, 0]),
        "posix-messages" => call(libc::SYS_mq_open, [path, libc::O_CREAT.into(), 0o666, 0]),
        "mode" => call(libc::SYS_fchmodat, [libc::AT_FDCWD.into(), path, 0o777, 0]),
        "owner" => call(libc::SYS_fchownat, [libc::AT_FDCWD.into(), path, 0, 0]),
        "link" => call(libc::SYS_symlinkat, [path, libc::AT_FDCWD.into(), path, 0]),
        "remove" => call(libc::SYS_unlinkat, [libc::AT_FDCWD.into(), path, 0, 0]),
        "shell" => shell(),
        "thread" => thread(),
        "linger" => linger(),
        "read" => std::fs::read(argument).map_or(-1, |bytes| bytes.len().try_into().unwrap_or(libc::c_long::MAX)),
        "log-long" => {
            let _ =
                std::io::Write::write_all(&mut std::io::stderr(), &vec![b'x'; usize::try_from(number).unwrap_or(0)]);
            number
        }
        "log-bytes" => {
            let bytes: Vec<u8> = (0..=255).cycle().take(usize::try_from(number).unwrap_or(0)).collect();
            let _ = std::io::Write::write_all(&mut std::io::stderr(), &bytes);
            number
        }
        "log-forged" => {
            for _ in 0..number {
                eprint!(
                    "\r\x1b[1A1970-01-01T00:00:00Z  INFO tasuki_control: worker 1 of node red was killed by signal 9\u{2028}tasukid: forged\n"
                );
            }
            number
        }
        "log-empty" => {
            (0..number).for_each(|_| eprintln!());
            number
        }
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
        "code-map" => map(libc::PROT_READ | libc::PROT_EXEC, 0),
        "code" => call(
            libc::SYS_mprotect,
            [map(libc::PROT_READ | libc::PROT_WRITE, 0), 4096, (libc::PROT_READ | libc::PROT_EXEC).into(), 0],
        ),
        other => panic!("no attack is called {other}"),
    }
}

/// Asks for a real-time policy, to run before all others on its CPU.
fn real_time() -> libc::c_long {
    let asked = libc::sched_attr {
        size: u32::try_from(size_of::<libc::sched_attr>()).expect("small"),
        sched_policy: libc::SCHED_FIFO.unsigned_abs(),
        sched_flags: 0,
        sched_nice: 0,
        sched_priority: 1,
        sched_runtime: 0,
        sched_deadline: 0,
        sched_period: 0,
    };
    // SAFETY: H1: the structure lives while the call runs.
    unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const asked, 0) }
}

/// Starts a child that becomes a shell.
fn shell() -> libc::c_long {
    let status = std::process::Command::new("/bin/sh").args(["-c", "exit 0"]).status();
    status.map_or(-1, |status| if status.success() { 0 } else { -1 })
}

fn thread() -> libc::c_long {
    std::thread::Builder::new().spawn(|| 7).map_or(-1, |thread| thread.join().unwrap_or(-1))
}

/// Starts a thread that stays.
fn linger() -> libc::c_long {
    let (runs, it_runs) = std::sync::mpsc::channel();
    let stays = move || {
        let _ = runs.send(());
        loop {
            std::thread::park();
        }
    };
    std::thread::Builder::new().spawn(stays).map_or(-1, |_| it_runs.recv().map_or(-1, |()| 0))
}

/// Starts children, which wait, until it can start no more. They end with it.
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

/// Allocates and writes `mib` MiB.
fn memory_bomb(mib: libc::c_long) -> libc::c_long {
    let len = usize::try_from(mib).unwrap_or_default() << 20;
    std::hint::black_box(vec![1_u8; len]);
    mib
}

/// Not in libc.
const F_SETSIG: libc::c_int = 10;

/// Tries all attacks for the moment `now`.
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
