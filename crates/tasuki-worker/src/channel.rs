//! The socket to the daemon: messages and packets, in and out. The worker never waits here for a daemon. It queues
//! messages for which the socket has no room, and when the daemon is gone it waits for the next one at the listening
//! socket.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use anyhow::{Context, Result, ensure};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketFlags, SocketType,
};
use rustix::process::Uid;
use tasuki_relay::message::{self, FDS_MAX, MESSAGE_MAX, ToDaemon, ToWorker};
use tasuki_relay::wire::{Order, Plan, Report};
use tasuki_shm::peer::Credentials;

/// Maximum number of unread messages before the daemon counts as one that reads nothing any more.
const UNREAD_MAX: usize = 1024;

/// Input from the daemon.
#[derive(Debug)]
pub enum Heard {
    /// An order about a NIC.
    Order(u32, Order),
    /// The plan for the next order to release a NIC or to take it.
    Plan(u32, Plan),
    /// A message and its descriptors.
    Message(Box<ToWorker>, Vec<OwnedFd>),
    /// A message that this worker does not understand, as a sentence that says why.
    Nonsense(String),
}

/// The socket to the daemon, and the socket at which the next daemon calls.
#[derive(Debug)]
pub struct DaemonChannel {
    daemon: Option<OwnedFd>,
    /// A daemon has called that was not told of yet.
    has_called: bool,
    listening: Option<OwnedFd>,
    /// User whose daemons may call, beside root.
    trusted: Uid,
    unsent: VecDeque<(Vec<u8>, Vec<OwnedFd>)>,
    buffer: Box<[u8]>,
}

/// Sends a message with descriptors. With `DONTWAIT` among `flags`, fails if the socket has no room.
pub fn send(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[OwnedFd], flags: SendFlags) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = fds.iter().map(AsFd::as_fd).collect::<Vec<_>>();
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(Errno::TOOBIG);
    }
    loop {
        match rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags | SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            other => return other.map(drop),
        }
    }
}

impl DaemonChannel {
    /// Creates a channel to the daemon that has started us, at the other end of `socket`. The socket must keep the
    /// bounds of messages.
    pub fn new(socket: OwnedFd) -> Result<Self> {
        let kind = rustix::net::sockopt::socket_type(&socket);
        ensure!(
            kind == Ok(SocketType::SEQPACKET),
            "standard input is not the daemon's socket; tasukid starts this, and `tasuki nic run` drives a card by hand"
        );
        let buffer = vec![0; MESSAGE_MAX].into_boxed_slice();
        let trusted = rustix::process::getuid();
        let daemon = Some(socket);
        Ok(DaemonChannel { daemon, has_called: false, listening: None, trusted, unsent: VecDeque::new(), buffer })
    }

    /// Sets the socket at which the next daemon calls.
    pub fn listen(&mut self, listening: OwnedFd) -> Result<()> {
        rustix::io::ioctl_fionbio(&listening, true).context("the listening socket cannot be used")?;
        // From now on the kernel names this process to the next daemon as its peer.
        rustix::net::listen(&listening, 4).context("the listening socket cannot be used")?;
        self.listening = Some(listening);
        Ok(())
    }

    /// Returns the descriptor that becomes readable when a message arrives, or when a daemon calls.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.daemon.as_ref().or(self.listening.as_ref()).map(AsFd::as_fd)
    }

    /// Returns whether another daemon has called since this was last asked.
    pub fn is_of_another(&mut self) -> bool {
        std::mem::take(&mut self.has_called)
    }

    /// Returns whether messages wait for room in the daemon's socket.
    pub fn is_behind(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// Waits for a message. The worker calls this for the first message, before it does anything else.
    pub fn wait(&mut self) -> Result<Heard> {
        loop {
            let socket = self.daemon.as_ref().context("the daemon was gone before it described this worker")?;
            let mut poll = [rustix::event::PollFd::new(socket, rustix::event::PollFlags::IN)];
            match rustix::event::poll(&mut poll, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno).context("the daemon's socket cannot be waited for"),
            }
            if let Some(heard) = self.next() {
                return Ok(heard);
            }
        }
    }

    /// Returns the next message, if there is one. Notices a daemon that is gone. Accepts a daemon that calls if it
    /// runs as root or as the user that started us.
    pub fn next(&mut self) -> Option<Heard> {
        if self.daemon.is_none() {
            self.daemon = self.let_in();
            self.has_called |= self.daemon.is_some();
        }
        let socket = self.daemon.as_ref()?;
        let mut received = receive(socket.as_fd(), &mut self.buffer);
        if received.as_ref().is_err_and(|errno| *errno == Errno::CONNRESET) {
            // The daemon ended with messages of ours unread. The kernel says that first, and has its last orders all the same.
            received = receive(socket.as_fd(), &mut self.buffer);
        }
        match received {
            Ok(Some((len, fds, whole))) => return Some(understand(&self.buffer[..len], fds, whole)),
            Err(Errno::AGAIN | Errno::INTR) => {}
            // The daemon has ended.
            Ok(None) | Err(_) => {
                self.daemon = None;
                self.unsent.clear();
            }
        }
        None
    }

    fn let_in(&mut self) -> Option<OwnedFd> {
        let listening = self.listening.as_ref()?;
        let caller = rustix::net::accept_with(listening, SocketFlags::CLOEXEC).ok()?;
        let peer = Credentials::of(&caller).ok()?;
        (peer.uid == self.trusted.as_raw() || peer.uid == 0).then_some(caller)
    }

    /// Sends a message with descriptors, or queues it.
    pub fn write(&mut self, message: &ToDaemon, fds: Vec<OwnedFd>) {
        let bytes = serde_json::to_vec(message).expect("a message of ours has a form as JSON");
        self.put(bytes, fds);
    }

    /// Sends a report about a NIC, or queues it.
    pub fn report(&mut self, nic: u32, report: Report) {
        let bytes = message::frame(nic, report.to_bytes());
        if self.unsent.is_empty()
            && let Some(socket) = &self.daemon
            && send(socket.as_fd(), &bytes, &[], SendFlags::DONTWAIT).is_ok()
        {
            return;
        }
        self.put(bytes.to_vec(), Vec::new());
    }

    /// Sends a sentence for a person.
    pub fn tell(&mut self, nic: Option<u32>, sentence: String) {
        self.write(&ToDaemon::Told { nic, sentence }, Vec::new());
    }

    fn put(&mut self, bytes: Vec<u8>, fds: Vec<OwnedFd>) {
        self.unsent.push_back((bytes, fds));
        self.flush();
    }

    /// Sends the queued messages for which the daemon's socket now has room.
    pub fn flush(&mut self) {
        let Some(socket) = &self.daemon else {
            self.unsent.clear();
            return;
        };
        while let Some((bytes, fds)) = self.unsent.front() {
            match send(socket.as_fd(), bytes, fds, SendFlags::DONTWAIT) {
                // Or too many descriptors are under way to a daemon that is slow to read.
                Err(Errno::AGAIN | Errno::TOOMANYREFS) if self.unsent.len() < UNREAD_MAX => return,
                // Reading from the socket finds any other error.
                _ => _ = self.unsent.pop_front(),
            }
        }
    }
}

/// Waits for a message that consists of one descriptor. Returns nothing at the end of the stream, or if the message
/// is something else.
pub fn receive_one(socket: BorrowedFd<'_>) -> Option<OwnedFd> {
    let mut poll = [rustix::event::PollFd::from_borrowed_fd(socket, rustix::event::PollFlags::IN)];
    rustix::io::retry_on_intr(|| rustix::event::poll(&mut poll, None)).ok()?;
    let (_, mut fds, _) = receive(socket, &mut [0; 1]).ok()??;
    fds.pop()
}

/// Receives a message: its length in bytes, its descriptors, and whether it was complete. Returns nothing at the end
/// of the stream.
fn receive(socket: BorrowedFd<'_>, into: &mut [u8]) -> Result<Option<(usize, Vec<OwnedFd>, bool)>, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let got = rustix::net::recvmsg(socket, &mut [IoSliceMut::new(into)], &mut control, flags)?;
    if got.bytes == 0 {
        return Ok(None);
    }
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    let whole = !got.flags.intersects(ReturnFlags::CTRUNC | ReturnFlags::TRUNC);
    Ok(Some((got.bytes, fds, whole)))
}

fn understand(bytes: &[u8], fds: Vec<OwnedFd>, whole: bool) -> Heard {
    if !whole {
        return Heard::Nonsense(format!(
            "a message of the daemon's is longer than {MESSAGE_MAX} bytes, or has more than {FDS_MAX} descriptors, or more than this worker may open; raise its RLIMIT_NOFILE"
        ));
    }
    if let Some((nic, packet)) = message::unframe(bytes) {
        return match (Order::parse(packet), Plan::parse(packet)) {
            (Ok(order), _) => Heard::Order(nic, order),
            (_, Ok(plan)) => Heard::Plan(nic, plan),
            (Err(malformed), _) => Heard::Nonsense(malformed.to_string()),
        };
    }
    match serde_json::from_slice(bytes) {
        Ok(message) => Heard::Message(Box::new(message), fds),
        Err(error) => Heard::Nonsense(format!(
            "a message came that this worker does not read ({error}); rebuild the older of daemon and worker"
        )),
    }
}
