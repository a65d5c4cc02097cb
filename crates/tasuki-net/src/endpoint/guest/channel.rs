//! The front end's socket: reads a message at a time, without waiting, and answers.
//!
//! A message stays in the socket until the change that it makes is committed; while a front end sets its device up, until
//! the daemon has heard of it. A worker that dies before that leaves it to its successor: a front end that waits for an
//! answer would wait for ever.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use arrayvec::ArrayVec;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendFlags, recv, recvmsg,
    sendmsg,
};
use zerocopy::{FromBytes, IntoBytes};

use super::device::{Device, Refusal};
use super::peek;
use crate::vni::ledger::point;

use super::wire::{BODY_MAX, FDS_MAX, HEAD_LEN, Head, flags, protocol};

/// Length in bytes of the body that most messages have: a ring and a number. One look shows all of such a message.
const USUAL: usize = 8;

/// Number of messages that stay in the socket at most after they were handled. It has room for some 270 short ones.
pub const HELD_MAX: usize = 128;

/// A front end's socket, and the message that is being read.
#[derive(Debug)]
pub struct Channel {
    socket: OwnedFd,
    bytes: [u8; HEAD_LEN + BODY_MAX],
    /// Number of bytes of it that are here, and how many of them were taken from the socket: none of a message that its
    /// front end sent as a whole.
    seen: usize,
    taken: usize,
    /// Descriptors that came with the bytes that were taken, and with those that were looked at last.
    fds: ArrayVec<OwnedFd, FDS_MAX>,
    looked: ArrayVec<OwnedFd, FDS_MAX>,
    /// Numbers of bytes in the socket of each message that was handled.
    handled: ArrayVec<usize, HELD_MAX>,
    /// Answers that wait until the state is committed of which they speak.
    answers: Vec<u8>,
}

impl Channel {
    /// Talks to the front end behind `socket`, which must not block.
    pub fn new(socket: OwnedFd) -> Self {
        // A byte out of band would stay in the socket, and wake the thread again and again.
        let _ = rustix::net::sockopt::set_socket_oobinline(&socket, true);
        Channel {
            socket,
            bytes: [0; HEAD_LEN + BODY_MAX],
            seen: 0,
            taken: 0,
            fds: ArrayVec::new(),
            looked: ArrayVec::new(),
            handled: ArrayVec::new(),
            answers: Vec::new(),
        }
    }

    /// Returns the socket.
    pub fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    /// Returns the inode of the socket, which identifies the connection.
    pub fn number(&self) -> u64 {
        rustix::fs::fstat(&self.socket).map_or(0, |stat| stat.st_ino)
    }

    /// Returns whether a part of a message was taken from the socket, and the rest has yet to come.
    pub fn is_within(&self) -> bool {
        self.taken > 0
    }

    /// Goes on after a predecessor, which may have died amid a look. Nobody else may look at the socket from now on.
    pub fn take_over(&self) {
        // What is no socket of this kind is found when it is read.
        let _ = peek::at_start(self.socket.as_fd());
    }

    /// Returns how many messages were handled and are in the socket.
    pub fn held(&self) -> usize {
        self.handled.len()
    }

    fn handled_bytes(&self) -> usize {
        self.handled.iter().sum()
    }

    /// Returns whether the front end waits for an answer.
    pub fn is_asked(&self) -> bool {
        !self.answers.is_empty()
    }

    /// Returns whether the front end has said something, or has left, while nothing of it was handled and not answered.
    pub fn is_readable(&self) -> bool {
        crate::endpoint::is_readable(self.socket.as_fd())
    }

    /// Returns whether the socket has something that was not handled.
    pub fn has_more(&self) -> bool {
        let look = || recv(&self.socket, &mut [0; 1], RecvFlags::DONTWAIT | RecvFlags::PEEK);
        peek::behind(self.socket.as_fd(), self.handled_bytes(), look)
            .is_ok_and(|seen| seen.is_ok_and(|(_, got)| got > 0))
    }

    /// Ends the connection, for all processes that hold the socket.
    pub fn hang_up(&self) {
        super::hang_up(&self.socket);
    }

    /// Has `device` handle the front end's next message, if it is there. Returns whether it was. With
    /// [`answer`](Self::answer) it leaves the socket, and its answer goes. The message behind it comes after that, or before
    /// if this one has no answer and the channel `holds` what was handled.
    ///
    /// # Errors
    /// Why the front end is to be sent away.
    pub fn hear(&mut self, device: &mut Device, holds: bool) -> Result<bool, Refusal> {
        if !self.handled.is_empty() && (!holds || self.is_asked() || self.handled.is_full()) {
            return Ok(false);
        }
        let Some(Head { request, flags, .. }) = self.next()? else { return Ok(false) };
        let whole = std::mem::take(&mut self.seen);
        self.handled.push(whole - std::mem::take(&mut self.taken));
        let mut fds = std::mem::take(&mut self.fds);
        self.looked.drain(..).for_each(|descriptor| drop(fds.try_push(descriptor)));
        let done = device.hear(request, &self.bytes[HEAD_LEN..whole], fds);
        let wants_ack = flags & flags::NEED_REPLY != 0 && device.has_protocol(protocol::REPLY_ACK);
        match done? {
            Some(body) => self.prepare(request, &body),
            None if wants_ack => self.prepare(request, 0_u64.as_bytes()),
            None => {}
        }
        point("guest.heard");
        Ok(true)
    }

    /// Looks until a message is here as a whole. Returns its head, or `None` if more of it has yet to come.
    fn next(&mut self) -> Result<Option<Head>, Refusal> {
        loop {
            let head = (self.seen >= HEAD_LEN)
                .then(|| Head::read_from_bytes(&self.bytes[..HEAD_LEN]).expect("a head has this length"));
            let whole = HEAD_LEN + head.map_or(USUAL, |head| head.len as usize);
            if let Some(head) = head {
                let is_request = head.flags & flags::VERSION_MASK == flags::VERSION && head.flags & flags::REPLY == 0;
                if !is_request {
                    return Err(Refusal::Foreign);
                }
                if whole > self.bytes.len() {
                    return Err(Refusal::Length(head.request, head.len as usize));
                }
                if self.seen == whole {
                    return Ok(Some(head));
                }
            }
            // If the look went beyond the message, the descriptors may be of the next one: this look ends at its end.
            let before = if self.seen > whole { self.taken } else { self.seen };
            self.look(whole)?;
            if self.seen > before {
                continue;
            }
            if self.seen == self.taken {
                return Ok(None);
            }
            if !self.handled.is_empty() {
                // It comes again as a whole, or in parts once those before it have left.
                self.seen = 0;
                return Ok(None);
            }
            // A part that stayed would keep the socket readable, and the thread awake.
            self.take_seen()?;
        }
    }

    /// Looks at the message's bytes up to `whole`. The look ends behind bytes with which descriptors come.
    fn look(&mut self, whole: usize) -> Result<(), Refusal> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX + 1))];
        let mut beside = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT | RecvFlags::PEEK;
        let handled = self.handled_bytes();
        let mut parts = [IoSliceMut::new(&mut self.bytes[self.taken..whole])];
        let look = || recvmsg(&self.socket, &mut parts, &mut beside, flags);
        let got = peek::behind(self.socket.as_fd(), handled, look).and_then(|got| got);
        self.looked.clear();
        for message in beside.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                // Those that have no room are closed, and then too few or too many belong to the message.
                descriptors.for_each(|descriptor| drop(self.looked.try_push(descriptor)));
            }
        }
        match got {
            Ok(got) if got.bytes == 0 => return Err(Refusal::Left),
            // Less than there is room for came, and not all.
            Ok(got) if got.flags.contains(ReturnFlags::CTRUNC) && !self.looked.is_full() => return Err(Refusal::Lack),
            Ok(got) => self.seen = self.taken + got.bytes,
            Err(Errno::AGAIN | Errno::INTR) => self.seen = self.taken,
            Err(_) => return Err(Refusal::Left),
        }
        Ok(())
    }

    /// Takes the part of a message that was seen from the socket.
    fn take_seen(&mut self) -> Result<(), Refusal> {
        self.drop_bytes(self.seen - self.taken)?;
        self.taken = self.seen;
        self.looked.drain(..).for_each(|descriptor| drop(self.fds.try_push(descriptor)));
        Ok(())
    }

    /// Takes this many bytes from the socket, which are there, with their descriptors.
    fn drop_bytes(&self, mut count: usize) -> Result<(), Refusal> {
        let mut bytes = [0; HEAD_LEN + BODY_MAX];
        while count > 0 {
            match recv(&self.socket, &mut bytes[..count], RecvFlags::DONTWAIT) {
                Ok((_, 0)) | Err(_) => return Err(Refusal::Left),
                Ok((_, got)) => count -= got,
            }
        }
        Ok(())
    }

    fn prepare(&mut self, request: u32, body: &[u8]) {
        let len = u32::try_from(body.len()).expect("an answer is short");
        let head = Head { request, flags: flags::VERSION | flags::REPLY, len };
        self.answers.extend_from_slice(head.as_bytes());
        self.answers.extend_from_slice(body);
    }

    /// Takes the messages that were handled from the socket, and sends the answer to the last one.
    ///
    /// # Errors
    /// The front end does not read its answers.
    #[inline]
    pub fn answer(&mut self) -> Result<(), Refusal> {
        if self.handled.is_empty() {
            return Ok(());
        }
        point("guest.answering");
        // Each leaves as a whole: a worker may die between two.
        for handled in std::mem::take(&mut self.handled) {
            self.drop_bytes(handled)?;
        }
        point("guest.answered");
        if self.answers.is_empty() {
            return Ok(());
        }
        let parts = [IoSlice::new(&self.answers)];
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let sent = sendmsg(self.socket.as_fd(), &parts, &mut SendAncillaryBuffer::default(), flags);
        let whole = self.answers.len();
        self.answers.clear();
        match sent {
            Ok(sent) if sent == whole => Ok(()),
            Ok(_) | Err(Errno::AGAIN) => Err(Refusal::Deaf),
            Err(_) => Err(Refusal::Left),
        }
    }
}
