//! The front end's socket: reads a message at a time, without waiting, and answers.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use arrayvec::ArrayVec;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendFlags, recvmsg, sendmsg,
};
use zerocopy::{FromBytes, IntoBytes};

use super::device::{Device, Refusal};
use super::wire::{BODY_MAX, FDS_MAX, HEAD_LEN, Head, flags, protocol};

/// Maximum number of messages read at a time: a handshake, and some more.
const AT_ONCE: usize = 64;

/// A front end's socket, and the message that is being read.
#[derive(Debug)]
pub struct Channel {
    socket: OwnedFd,
    bytes: [u8; HEAD_LEN + BODY_MAX],
    have: usize,
    fds: ArrayVec<OwnedFd, FDS_MAX>,
    /// Answers that wait until the state is committed of which they speak.
    answers: Vec<u8>,
}

impl Channel {
    /// Talks to the front end behind `socket`, which must not block.
    pub fn new(socket: OwnedFd) -> Self {
        Channel { socket, bytes: [0; HEAD_LEN + BODY_MAX], have: 0, fds: ArrayVec::new(), answers: Vec::new() }
    }

    /// Returns the socket.
    pub fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    /// Returns the inode of the socket, which identifies the connection.
    pub fn number(&self) -> u64 {
        rustix::fs::fstat(&self.socket).map_or(0, |stat| stat.st_ino)
    }

    /// Returns whether a message has begun and not ended.
    pub fn is_within(&self) -> bool {
        self.have > 0
    }

    /// Ends the connection, for all processes that hold the socket.
    pub fn hang_up(&self) {
        super::hang_up(&self.socket);
    }

    /// Reads the front end's messages and has `device` handle them. Adds the number of messages to `count`. The answers
    /// go with [`answer`](Self::answer).
    ///
    /// # Errors
    /// Why the front end is to be sent away.
    pub fn hear(&mut self, device: &mut Device, count: &mut u64) -> Result<(), Refusal> {
        for _ in 0..AT_ONCE {
            let Some(head) = self.next()? else { return Ok(()) };
            *count += 1;
            self.have = 0;
            let Head { request, flags, len } = head;
            let fds = std::mem::take(&mut self.fds);
            let body = &self.bytes[HEAD_LEN..HEAD_LEN + len as usize];
            let done = device.hear(request, body, fds);
            let wants_ack = flags & flags::NEED_REPLY != 0 && device.has_protocol(protocol::REPLY_ACK);
            match done? {
                Some(body) => self.prepare(request, &body),
                None if wants_ack => self.prepare(request, 0_u64.as_bytes()),
                None => {}
            }
        }
        Ok(())
    }

    /// Reads until a message is whole. Returns its head, or `None` if more of it has yet to come.
    fn next(&mut self) -> Result<Option<Head>, Refusal> {
        loop {
            let head = (self.have >= HEAD_LEN)
                .then(|| Head::read_from_bytes(&self.bytes[..HEAD_LEN]).expect("a head has this length"));
            let whole = HEAD_LEN + head.map_or(0, |head| head.len as usize);
            if let Some(head) = head {
                let is_request = head.flags & flags::VERSION_MASK == flags::VERSION && head.flags & flags::REPLY == 0;
                if !is_request {
                    return Err(Refusal::Foreign);
                }
                if whole > self.bytes.len() {
                    return Err(Refusal::Length(head.request, head.len as usize));
                }
                if self.have == whole {
                    return Ok(Some(head));
                }
            }
            // A read stops where the descriptors of another message begin; it never takes bytes of the next message.
            if !self.read(whole)? {
                return Ok(None);
            }
        }
    }

    /// Reads up to `whole` bytes of the message. Returns false if there are none.
    fn read(&mut self, whole: usize) -> Result<bool, Refusal> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX + 1))];
        let mut beside = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let mut parts = [IoSliceMut::new(&mut self.bytes[self.have..whole])];
        let got = recvmsg(&self.socket, &mut parts, &mut beside, flags);
        for message in beside.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                // Those that have no room are closed, and then too few or too many belong to the message.
                descriptors.for_each(|descriptor| drop(self.fds.try_push(descriptor)));
            }
        }
        match got {
            Ok(got) if got.bytes == 0 => Err(Refusal::Left),
            Ok(got) => {
                self.have += got.bytes;
                Ok(true)
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(false),
            Err(_) => Err(Refusal::Left),
        }
    }

    fn prepare(&mut self, request: u32, body: &[u8]) {
        let len = u32::try_from(body.len()).expect("an answer is short");
        let head = Head { request, flags: flags::VERSION | flags::REPLY, len };
        self.answers.extend_from_slice(head.as_bytes());
        self.answers.extend_from_slice(body);
    }

    /// Sends the answers.
    ///
    /// # Errors
    /// The front end does not read them.
    #[inline]
    pub fn answer(&mut self) -> Result<(), Refusal> {
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
