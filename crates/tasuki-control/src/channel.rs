//! Messages with descriptors, on a unix socket that keeps their bounds: the channel between daemon and worker.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use tasuki_relay::message::{FDS_MAX, MESSAGE_MAX};

use crate::foreign::Foreign;

/// Bytes that may be under way to a peer that reads nothing, as the kernel counts them. A message about another node
/// of a VNI, with its three descriptors, is 766 of them (Linux 6.18), and a worker may be told of `NODES_MAX` such
/// nodes at once. The kernel doubles this value.
const UNREAD_MAX: usize = 1 << 20;

/// A received message.
#[derive(Debug)]
pub struct Message {
    /// A packet or a message.
    pub bytes: Vec<u8>,
    /// The descriptors that came with it.
    pub fds: Foreign,
}

/// Why nothing was received.
#[derive(Debug, thiserror::Error)]
pub enum Nothing {
    /// Nothing is there now.
    #[error("nothing is there")]
    Yet,
    /// The other end is closed.
    #[error("the other end is closed")]
    Closed,
    /// It is longer than any message of Tasuki.
    #[error(
        "a message is longer than {MESSAGE_MAX} bytes or brings more than {FDS_MAX} descriptors; its sender is not part of Tasuki"
    )]
    TooLong,
    /// This process may have no more descriptors. These are the bytes; the descriptors beside them are lost.
    #[error("descriptors came, and this process may open no more; raise LimitNOFILE= of tasukid (ulimit -Hn)")]
    Lack(Vec<u8>),
    /// The kernel's reason.
    #[error("the kernel refused to receive: {0}")]
    Kernel(io::Error),
}

/// Creates both ends of such a socket. The first has room to send much at once. Neither blocks its user unless it
/// waits in poll.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let (ours, theirs) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    make_room(&ours);
    Ok((ours, theirs))
}

/// Makes as much room as permitted: without CAP_NET_ADMIN that is net.core.wmem_max.
fn make_room(socket: &OwnedFd) {
    let forced = rustix::net::sockopt::set_socket_send_buffer_size_force(socket, UNREAD_MAX);
    let _ = forced.or_else(|_| rustix::net::sockopt::set_socket_send_buffer_size(socket, UNREAD_MAX));
}

/// Listens at a path at which a later daemon finds a worker.
pub fn listen(path: &std::path::Path) -> io::Result<OwnedFd> {
    listen_by(path, SocketType::SEQPACKET)
}

/// Like [`listen`], at a socket of this kind.
pub fn listen_by(path: &std::path::Path, kind: SocketType) -> io::Result<OwnedFd> {
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)?;
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    // The file takes its mode from the socket, less the umask. Changing the mode by path could hit another file by
    // then.
    rustix::fs::fchmod(&socket, rustix::fs::Mode::from_raw_mode(0o600))?;
    rustix::net::bind(&socket, &rustix::net::SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, 4)?;
    Ok(socket)
}

/// Connects to a path of [`listen`].
pub fn connect(path: &std::path::Path) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::connect(&socket, &rustix::net::SocketAddrUnix::new(path)?)?;
    make_room(&socket);
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

/// Receives the next message. Never waits.
pub fn receive(socket: BorrowedFd<'_>, room: &mut Vec<u8>) -> Result<Message, Nothing> {
    room.resize(MESSAGE_MAX, 0);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut beside = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let mut get =
        || rustix::io::retry_on_intr(|| rustix::net::recvmsg(socket, &mut [IoSliceMut::new(room)], &mut beside, flags));
    let got = match get() {
        // The peer ended with messages of ours unread. The kernel says that first, and has the peer's last ones all the same.
        Err(Errno::CONNRESET) => get(),
        got => got,
    };
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
    let fds = Foreign::new(fds);
    // The kernel sets the same flag for more descriptors than there is room for, and for a reader that may open no more. To
    // try whether it may proves nothing: another thread closes descriptors.
    let is_cut = got.flags.contains(ReturnFlags::CTRUNC);
    if got.flags.contains(ReturnFlags::TRUNC) || is_cut && fds.len() >= FDS_MAX {
        return Err(Nothing::TooLong);
    }
    if is_cut {
        return Err(Nothing::Lack(room[..got.bytes].to_vec()));
    }
    if got.bytes == 0 && fds.is_empty() {
        return Err(Nothing::Closed);
    }
    Ok(Message { bytes: room[..got.bytes].to_vec(), fds })
}

/// Returns whether this error means that the process, or the machine, may open no more descriptors.
pub fn lacks(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE))
}

/// Lends descriptors to [`send`].
pub fn lend(fds: &[OwnedFd]) -> Vec<BorrowedFd<'_>> {
    fds.iter().map(AsFd::as_fd).collect()
}

#[cfg(test)]
mod tests {
    use std::panic::{self, AssertUnwindSafe};
    use std::sync::atomic::AtomicBool;
    use std::sync::atomic::Ordering::Relaxed;
    use std::thread;

    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    use tasuki_testing::alone;

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
        // Another thread closes the descriptors that came with it.
        let limit = rustix::event::Timespec { tv_sec: 60, tv_nsec: 0 };
        let mut end = [rustix::event::PollFd::new(&ours, rustix::event::PollFlags::IN)];
        assert_eq!(rustix::event::poll(&mut end, Some(&limit)), Ok(1));
        assert!(matches!(receive(ours.as_fd(), &mut room), Err(Nothing::Closed)));
    }

    #[test]
    fn a_lack_of_descriptors_is_known_though_another_thread_closes_some() {
        if !alone(a_lack_of_descriptors_is_known_though_another_thread_closes_some) {
            return;
        }
        let (ours, theirs) = pair().unwrap();
        let (mut room, is_over) = (Vec::new(), AtomicBool::new(false));
        let maximum = getrlimit(Resource::Nofile).maximum;
        let open = std::fs::read_dir("/proc/self/fd").unwrap().count() as u64;
        setrlimit(Resource::Nofile, Rlimit { current: Some(open + 2), maximum }).unwrap();
        let lacks = |room: &mut Vec<u8>| {
            send(theirs.as_fd(), b"many", &[ours.as_fd(); 16]).unwrap();
            let got = receive(ours.as_fd(), room);
            assert!(matches!(&got, Err(Nothing::Lack(bytes)) if bytes == b"many"), "{got:?}");
        };
        thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Relaxed) {
                    drop(ours.try_clone());
                }
            });
            let tried = panic::catch_unwind(AssertUnwindSafe(|| (0..20_000).for_each(|_| lacks(&mut room))));
            is_over.store(true, Relaxed);
            tried.unwrap();
        });
    }

    #[test]
    fn a_worker_that_reads_nothing_yet_is_told_of_all_nodes_of_a_vni() {
        use tasuki_relay::message::ToWorker;
        use tasuki_shm::vni::NODES_MAX;
        let (ours, theirs) = pair().unwrap();
        if rustix::net::sockopt::socket_send_buffer_size(&ours).unwrap() < UNREAD_MAX {
            return println!("skipped: needs root, or a higher limit: sysctl net.core.wmem_max={UNREAD_MAX}");
        }
        for number in 0..NODES_MAX {
            let message = serde_json::to_vec(&ToWorker::Neighbour {
                nic: u32::MAX,
                number,
                addresses: vec![[0xfe; 16].into(); 8],
            })
            .unwrap();
            let sent = send(ours.as_fd(), &message, &[theirs.as_fd(), ours.as_fd(), theirs.as_fd()]);
            assert_eq!(sent, Ok(()), "message {number}");
        }
        let mut room = Vec::new();
        for _ in 0..NODES_MAX {
            assert_eq!(receive(theirs.as_fd(), &mut room).unwrap().fds.len(), 3);
        }
    }
}
