//! A program that means harm, for the tests of what a node's program can do to others: nothing for you to copy from.
//!
//! `options` are attacks, with `;` between them: `first ATTACK [ARGUMENT]` before the runtime has confined the program (what holds then, tasukid has set), `then ATTACK
//! [ARGUMENT]` when it is given a NIC. What came of each is a line on standard error.
//!
//! # Invariants
//!
//! - **H1** An attack is a system call on numbers, on descriptors, or on memory that it has mapped itself and that nothing of Rust's lies in; strings end with a zero, and
//!   structures live while the call runs.
#![allow(unsafe_code, reason = "a hostile program calls what no library offers (H1)")]

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use tasuki_worker::{Fate, Program, Transactional, Turn};

/// What came of an attack: 0 or more if the kernel let it pass.
fn try_it(attack: &str, argument: &str) -> libc::c_long {
    let number: libc::c_long = argument.parse().unwrap_or_default();
    let call = |call, [a, b, c, d]: [libc::c_long; 4]| {
        // SAFETY: what an argument points at is alive here, and as the call expects it (H1).
        unsafe { libc::syscall(call, a, b, c, d) }
    };
    let fcntl = |command: libc::c_int, value| call(libc::SYS_fcntl, [0, command.into(), value, 0]);
    let no_files = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    let limits = std::ptr::from_ref(&no_files) as libc::c_long;
    let map = |protection| {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping at an address of the kernel's choice, in which nothing lies (H1).
        let page = unsafe { libc::mmap(std::ptr::null_mut(), 4096, protection, flags, -1, 0) };
        page as libc::c_long
    };
    match attack {
        "nothing" => 0,
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
