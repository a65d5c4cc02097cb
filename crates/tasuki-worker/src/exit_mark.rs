//! How the daemon learns early that this worker is no more.
//!
//! A process that is killed takes itself apart before its pidfd tells of it: its memory first, which takes half a millisecond. But the kernel looks at
//! a thread's robust futexes before that, and marks those that it holds. So the worker's one thread holds one, in its heartbeat.
//!
//! # Invariants
//!
//! - **T1** What is registered with the kernel (the head, the one entry) is never freed and never changed again, and leads to a word of shared memory that is
//!   mapped until the process ends. The kernel reads it when the thread ends, and writes only the word, and only if our thread's number stands there.
//! - **T2** Nobody else in this process uses robust futexes: the list that the C library registered for its mutexes is replaced, and stays empty.
#![allow(unsafe_code, reason = "a system call for which there is no safe function (T1, T2)")]

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Release;

use tasuki_shm::region::Span;

/// As the kernel has it: `struct robust_list_head`, whose list has one entry, which is beside it.
#[repr(C)]
struct Head {
    first: *const Entry,
    /// From an entry to its futex, in bytes.
    to_futex: libc::c_long,
    pending: *const Entry,
    entry: Entry,
}

/// `struct robust_list`: the next entry, or the head for the last.
#[repr(C)]
struct Entry {
    next: *const Head,
}

/// Bytes of what the kernel knows as the head.
const HEAD_LEN: usize = 24;
const _: () = assert!(std::mem::offset_of!(Head, entry) == HEAD_LEN);

/// Somebody may sleep on it: the kernel wakes them.
const WAITERS: u32 = 0x8000_0000;

/// Has the kernel mark `word` when this thread ends, and wake whoever waits for that. The thread lives as long as the process.
pub fn mark(word: Span<AtomicU32>) -> std::io::Result<()> {
    let word: &'static Span<AtomicU32> = Box::leak(Box::new(word));
    let head = Box::leak(Box::new(Head {
        first: std::ptr::null(),
        to_futex: 0,
        pending: std::ptr::null(),
        entry: Entry { next: std::ptr::null() },
    }));
    let entry: *const Entry = &raw const head.entry;
    let futex = word[0].as_ptr().addr();
    head.to_futex =
        libc::c_long::try_from(futex.wrapping_sub(entry.addr()).cast_signed()).map_err(std::io::Error::other)?;
    head.first = entry;
    head.entry.next = &raw const *head;
    let number = u32::try_from(rustix::thread::gettid().as_raw_nonzero().get()).map_err(std::io::Error::other)?;
    word[0].store(number | WAITERS, Release);
    // SAFETY: T1, T2: the call stores the address of `head`, which stays.
    let done = unsafe { libc::syscall(libc::SYS_set_robust_list, &raw const *head, HEAD_LEN) };
    if done == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}
