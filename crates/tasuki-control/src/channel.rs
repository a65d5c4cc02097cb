//! Messages with descriptors, on a unix socket that keeps their bounds: how daemon and worker talk.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use tasuki_relay::letter::{FDS_MAX, LETTER_MAX};

/// What came in.
#[derive(Debug)]
pub struct Message {
    /// A packet or a letter.
    pub bytes: Vec<u8>,
    /// What came beside it.
    pub fds: Vec<OwnedFd>,
}

/// Why nothing came in.
#[derive(Debug, thiserror::Error)]
pub enum Nothing {
    /// Nothing is there now.
    #[error("nothing is there")]
    Yet,
    /// The other end is closed.
    #[error("the other end is closed")]
    Closed,
    /// More than any message of ours has.
    #[error("a message is longer than {LETTER_MAX} bytes or brings more than {FDS_MAX} descriptors; whoever sent it is no part of Tasuki")]
    TooLong,
    /// The kernel's reason.
    #[error("the kernel refused to receive: {0}")]
    Kernel(io::Error),
}

/// Both ends of such a socket. Neither blocks its user unless it waits in poll.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

/// A place where a daemon that comes later finds a worker.
pub fn listen(path: &std::path::Path) -> io::Result<OwnedFd> {
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )?;
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    rustix::net::bind(&socket, &rustix::net::SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, 4)?;
    Ok(socket)
}

/// Connects to such a place.
pub fn connect(path: &std::path::Path) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::connect(&socket, &rustix::net::SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// Sends one message, or nothing of it. Never waits.
pub fn send(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut beside = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !beside.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::TOOBIG);
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    rustix::io::retry_on_intr(|| rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut beside, flags)).map(|_| ())
}

/// The next message. Never waits.
pub fn receive(socket: BorrowedFd<'_>, room: &mut Vec<u8>) -> Result<Message, Nothing> {
    room.resize(LETTER_MAX, 0);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut beside = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let got = rustix::io::retry_on_intr(|| {
        rustix::net::recvmsg(socket, &mut [IoSliceMut::new(room)], &mut beside, flags)
    });
    let got = match got {
        Err(Errno::WOULDBLOCK) => return Err(Nothing::Yet),
        Err(Errno::CONNRESET) => return Err(Nothing::Closed),
        Err(errno) => return Err(Nothing::Kernel(errno.into())),
        Ok(got) => got,
    };
    let mut fds = Vec::new();
    for message in beside.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    if got.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(Nothing::TooLong);
    }
    if got.bytes == 0 && fds.is_empty() {
        return Err(Nothing::Closed);
    }
    Ok(Message { bytes: room[..got.bytes].to_vec(), fds })
}

/// Descriptors as they are lent to [`send`].
pub fn lend(fds: &[OwnedFd]) -> Vec<BorrowedFd<'_>> {
    fds.iter().map(AsFd::as_fd).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_arrives_whole_with_its_descriptors_and_the_end_is_noticed() {
        let (ours, theirs) = pair().unwrap();
        let mut room = Vec::new();
        assert!(matches!(receive(ours.as_fd(), &mut room), Err(Nothing::Yet)));
        send(theirs.as_fd(), b"{one}", &[theirs.as_fd(), ours.as_fd()]).unwrap();
        send(theirs.as_fd(), b"two", &[]).unwrap();
        let one = receive(ours.as_fd(), &mut room).unwrap();
        assert_eq!((&one.bytes[..], one.fds.len()), (&b"{one}"[..], 2));
        assert_eq!(receive(ours.as_fd(), &mut room).unwrap().bytes, b"two");
        drop((theirs, one));
        assert!(matches!(receive(ours.as_fd(), &mut room), Err(Nothing::Closed)));
    }
}
