//! Looks at what waits in a socket, from a place on.
//!
//! # Invariants
//!
//! - **P1** `setsockopt` reads the integer that it is given, and no more than its length.
#![allow(unsafe_code, reason = "SO_PEEK_OFF, which rustix lacks")]

use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::Errno;

/// Has `look` see what waits in a stream socket behind its first `bytes` bytes (socket(7), `SO_PEEK_OFF`).
///
/// # Errors
/// The kernel refuses; the look is not taken then.
pub fn behind<T>(socket: BorrowedFd<'_>, bytes: usize, look: impl FnOnce() -> T) -> Result<T, Errno> {
    if bytes == 0 {
        return Ok(look());
    }
    set(socket, i32::try_from(bytes).map_err(|_| Errno::INVAL)?)?;
    let seen = look();
    at_start(socket)?;
    Ok(seen)
}

/// Has the next look see what comes first. The place belongs to the socket, and a worker may die amid a look.
///
/// # Errors
/// The kernel refuses.
pub fn at_start(socket: BorrowedFd<'_>) -> Result<(), Errno> {
    set(socket, -1)
}

fn set(socket: BorrowedFd<'_>, place: i32) -> Result<(), Errno> {
    let len = u32::try_from(size_of_val(&place)).expect("four bytes");
    // SAFETY: the integer outlives the call, and has this length (P1).
    let done = unsafe {
        libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEEK_OFF, (&raw const place).cast(), len)
    };
    if done == 0 { Ok(()) } else { Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)) }
}
