//! The exit mark, by which the daemon learns early that this worker has ended.
//!
//! When a process is killed, its pidfd reports that late: the kernel first frees the memory of the process, which
//! takes half a millisecond. But before that the kernel walks the robust futexes of each thread, and marks those
//! that the thread holds. So the worker's one thread holds one, in its heartbeat.
//!
//! # Invariants
//!
//! - **T1** The structures registered with the kernel (the head, the one entry) are never freed or changed again. They
//!   lead to a word of shared memory that is mapped until the process ends. The kernel reads them when the thread ends.
//!   It writes only the word, and only if the word holds our thread's number.
//! - **T2** No other code in this process uses robust futexes: the list that the C library registered for its
//!   mutexes is replaced, and stays empty.
#![allow(unsafe_code, reason = "a system call for which there is no safe function (T1, T2)")]

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Release;

use tasuki_shm::region::Span;

/// The kernel's `struct robust_list_head`. Its list has one entry, which lies beside it.
#[repr(C)]
struct Head {
    first: *const Entry,
    /// Offset from an entry to its futex, in bytes.
    to_futex: libc::c_long,
    pending: *const Entry,
    entry: Entry,
}

/// `struct robust_list`: the next entry, or the head for the last.
#[repr(C)]
struct Entry {
    next: *const Head,
}

/// Length in bytes of the kernel's part of the head.
const HEAD_LEN: usize = 24;
const _: () = assert!(std::mem::offset_of!(Head, entry) == HEAD_LEN);

/// Flag of a futex on which a thread may sleep: the kernel wakes it.
const WAITERS: u32 = 0x8000_0000;

/// Has the kernel mark `word` when this thread ends, and wake the waiters on it. The thread lives as long as the
/// process.
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
