//! The process at the other end of a Unix socket, as the kernel recorded it when that process connected or listened.
//!
//! # Invariants
//!
//! - **S1** getsockopt(2) writes at most as many bytes as it is told that there are; any bytes are `u32`s.
#![allow(unsafe_code, reason = "SO_PEERCRED with a pid of 0, for which rustix has no place (S1)")]

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// A process and its user (`struct ucred` of unix(7)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Credentials {
    /// Its pid; 0 if it is in a pid namespace that this process does not see.
    pub pid: u32,
    /// Its effective user ID.
    pub uid: u32,
    /// Its effective group ID.
    pub gid: u32,
}

impl Credentials {
    /// Returns the process that connected this socket, or that called listen(2) on the one to which it is connected.
    ///
    /// # Errors
    /// The descriptor is no socket.
    pub fn of(socket: impl AsFd) -> io::Result<Self> {
        let mut known = [0_u32; 3];
        let mut len = libc::socklen_t::try_from(size_of_val(&known)).expect("twelve bytes");
        let (socket, into) = (socket.as_fd().as_raw_fd(), known.as_mut_ptr().cast());
        // SAFETY: S1: `known` has `len` bytes, and is ours alone.
        match unsafe { libc::getsockopt(socket, libc::SOL_SOCKET, libc::SO_PEERCRED, into, &raw mut len) } {
            0 => Ok(Credentials { pid: known[0], uid: known[1], gid: known[2] }),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_peer_is_known_and_one_that_is_not_seen_has_pid_0() {
        const UNSEEN: &str = "TASUKI_UNSEEN";
        if std::env::var_os(UNSEEN).is_some() {
            assert_eq!(Credentials::of(std::io::stdin()).unwrap().pid, 0);
            return;
        }
        let (ours, theirs) = UnixStream::pair().unwrap();
        let uid = rustix::process::geteuid();
        let gid = rustix::process::getegid().as_raw();
        assert_eq!(Credentials::of(&ours).unwrap(), Credentials { pid: std::process::id(), uid: uid.as_raw(), gid });

        // In a pid namespace of its own, a process does not see this one, which made the socket.
        let mut inside = Command::new("unshare");
        inside.args(["--pid", "--fork"]).args((!uid.is_root()).then_some("--user"));
        if !inside.args(["--", "true"]).status().is_ok_and(|status| status.success()) {
            println!("unshare makes no pid namespace here");
            return;
        }
        let mut inside = Command::new("unshare");
        inside.args(["--pid", "--fork"]).args((!uid.is_root()).then_some("--user")).arg("--");
        inside.arg(std::env::current_exe().unwrap());
        inside.args(["--exact", "peer::tests::a_peer_is_known_and_one_that_is_not_seen_has_pid_0"]);
        let theirs = Stdio::from(std::os::fd::OwnedFd::from(theirs));
        let done = inside.env(UNSEEN, "").stdin(theirs).output().unwrap();
        let said = String::from_utf8_lossy(&done.stdout);
        assert!(done.status.success() && said.contains("1 passed"), "{said}");
    }
}
