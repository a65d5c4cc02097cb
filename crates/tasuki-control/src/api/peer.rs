//! The process at the other end of a socket. The kernel recorded it when it connected, so no process can pass for
//! another, not even by passing the socket on.
//!
//! # Invariants
//!
//! - **P1** getsockopt(2) writes at most as many bytes as it is told that there are, and says how many; any bytes
//!   are `u32`s.
#![allow(unsafe_code, reason = "SO_PEERGROUPS, which rustix lacks (P1)")]

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use crate::log::plain;

/// Groups that there is room for at first; most users have fewer.
const GROUPS: usize = 32;

/// A process and its user, as they were when it connected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// Its user ID.
    pub uid: u32,
    /// IDs of all its groups.
    pub groups: Vec<u32>,
    /// Its pid; 0 if it is in a pid namespace that the daemon does not see.
    pub pid: u32,
    /// Name of its program, as far as known: it can call itself anything.
    pub program: String,
}

impl Peer {
    /// Returns the process that connected this socket.
    pub fn of(socket: impl AsFd) -> io::Result<Self> {
        let tasuki_shm::peer::Credentials { pid, uid, gid } = tasuki_shm::peer::Credentials::of(&socket)?;
        let mut groups = vec![0; GROUPS];
        let mut count = words(&socket, libc::SO_PEERGROUPS, &mut groups);
        if let Err((needed, _)) = count.as_ref().map_err(|(needed, error)| (*needed, error.raw_os_error()))
            && needed > groups.len()
        {
            groups.resize(needed, 0);
            count = words(&socket, libc::SO_PEERGROUPS, &mut groups);
        }
        groups.truncate(count.map_err(|(_, error)| error)?);
        groups.push(gid);
        let program = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        let program = plain(program.trim_end(), 32);
        Ok(Peer { uid, groups, pid, program })
    }
}

/// Reads a socket option made of words. Returns how many there are, also in the error if they do not fit.
fn words(socket: &impl AsFd, option: libc::c_int, into: &mut [u32]) -> Result<usize, (usize, io::Error)> {
    let mut len = libc::socklen_t::try_from(size_of_val(into)).unwrap_or(libc::socklen_t::MAX);
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: P1: `into` has `len` bytes, and is ours alone.
    let done = unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, option, into.as_mut_ptr().cast(), &raw mut len) };
    let count = len as usize / size_of::<u32>();
    match done {
        0 => Ok(count.min(into.len())),
        _ => Err((count, io::Error::last_os_error())),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn who_connects_is_known() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let peer = Peer::of(&ours).unwrap();
        assert_eq!((peer.uid, peer.pid), (rustix::process::geteuid().as_raw(), std::process::id()));
        let mut groups: Vec<u32> = rustix::process::getgroups().unwrap().iter().map(|group| group.as_raw()).collect();
        groups.push(rustix::process::getegid().as_raw());
        assert_eq!(peer.groups, groups);
    }
}
