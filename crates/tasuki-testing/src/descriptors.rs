//! Messages with descriptors over UNIX sockets.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

/// Most descriptors beside one message.
const FDS_MAX: usize = 160;

/// Sends bytes with descriptors. Returns the number of bytes that were sent.
pub fn send(socket: impl AsFd, bytes: &[u8], fds: &[impl AsFd]) -> io::Result<usize> {
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut beside = SendAncillaryBuffer::new(&mut space);
    assert!(fds.is_empty() || beside.push(SendAncillaryMessage::ScmRights(&fds)), "more than {FDS_MAX} descriptors");
    Ok(rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut beside, SendFlags::NOSIGNAL)?)
}

/// Receives bytes and the descriptors beside them. Returns 0 bytes at the end of the stream.
pub fn receive(socket: impl AsFd, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut beside = RecvAncillaryBuffer::new(&mut space);
    let got = rustix::net::recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut beside, RecvFlags::CMSG_CLOEXEC)?;
    let fds = beside.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(rights) => Some(rights),
        _ => None,
    });
    Ok((got.bytes, fds.flatten().collect()))
}

fn seqpacket() -> OwnedFd {
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).expect("a socket")
}

/// Returns a socket that keeps the bounds of messages, and its other end.
pub fn pair() -> (OwnedFd, OwnedFd) {
    rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).expect("sockets")
}

fn bind(path: &Path) -> OwnedFd {
    let socket = seqpacket();
    rustix::net::bind(&socket, &SocketAddrUnix::new(path).expect("a short path")).expect("a free path");
    socket
}

/// Leaves the file of a socket of that kind at `path`, as a server does that dies: no process listens there.
pub fn leave(path: &Path) {
    // It has never listened. One that did listens on while a child of another test has a copy of it: until that child
    // executes its program.
    drop(bind(path));
}

/// Returns a socket of that kind that listens at `path`.
pub fn listen(path: &Path) -> OwnedFd {
    let socket = bind(path);
    rustix::net::listen(&socket, 64).expect("a socket that listens");
    socket
}

/// Returns a socket of that kind that is connected with the one that listens at `path`.
pub fn connect(path: &Path) -> OwnedFd {
    let socket = seqpacket();
    rustix::net::connect(&socket, &SocketAddrUnix::new(path).expect("a short path")).expect("a socket that listens");
    socket
}
