//! Waits of all tests.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};

/// Waits up to `limit` until `fd` is readable; returns whether it is.
pub fn readable(fd: &impl AsFd, limit: Duration) -> bool {
    any_readable(&[fd.as_fd()], limit)
}

/// Waits up to `limit` until one of `fds` is readable; returns whether one is.
pub fn any_readable(fds: &[BorrowedFd<'_>], limit: Duration) -> bool {
    let deadline = Instant::now() + limit;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).expect("a limit of less than centuries");
        let mut fds: Vec<_> = fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
        match rustix::event::poll(&mut fds, Some(&left)) {
            Ok(ready) => return ready > 0,
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => panic!("poll: {errno}"),
        }
    }
}
