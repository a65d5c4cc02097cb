//! Route netlink (rtnetlink(7)): requests to the kernel, and its replies.
//!
//! A message is the 16 bytes of `struct nlmsghdr`, the fixed part of the request's type, and attributes: each has a
//! length, a type and bytes, and begins at a multiple of four. The bytes may be attributes again.
//!
//! A process with CAP_NET_ADMIN over the namespace may send to any netlink socket there. Only the kernel's messages count.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

/// Message type of a reply (`<linux/netlink.h>`).
const ERROR: u16 = 2;
/// The last message of a list.
const DONE: u16 = 3;

/// Flags: the kernel acts on the request, and reports the result.
const REQUEST: u16 = 0x0001;
const REQUEST_AND_ACK: u16 = REQUEST | 0x0004;

/// Flag of a request for a list.
const DUMP: u16 = 0x0300;

/// Bytes that the kernel puts into one packet of a list, at most.
const PACKET: usize = 32 << 10;

/// The kernel's address.
const KERNEL: SocketAddrNetlink = SocketAddrNetlink::new(0, 0);

/// Bytes of `struct nlmsghdr`.
const HEADER: usize = 16;

/// A message under construction, or the value of an attribute.
#[derive(Debug)]
pub struct Message(Vec<u8>);

impl Message {
    /// Begins a request with the fixed part of its type.
    pub fn new(kind: u16, flags: u16, fixed: &[u8]) -> Self {
        let mut bytes = vec![0; HEADER];
        bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
        bytes[6..8].copy_from_slice(&(REQUEST_AND_ACK | flags).to_ne_bytes());
        bytes.extend_from_slice(fixed);
        Message(bytes)
    }

    /// Begins a value made of attributes, behind a fixed part.
    pub fn nested(fixed: &[u8]) -> Self {
        Message(fixed.to_vec())
    }

    /// Appends an attribute.
    pub fn with(mut self, kind: u16, value: &[u8]) -> Self {
        let len = u16::try_from(4 + value.len()).expect("names and addresses are short");
        self.0.extend_from_slice(&len.to_ne_bytes());
        self.0.extend_from_slice(&kind.to_ne_bytes());
        self.0.extend_from_slice(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }

    /// Returns the bytes of the value.
    pub fn into_value(self) -> Vec<u8> {
        self.0
    }

    fn finish(mut self) -> Vec<u8> {
        let len = u32::try_from(self.0.len()).expect("a few attributes");
        self.0[..4].copy_from_slice(&len.to_ne_bytes());
        self.0
    }
}

/// Cuts off the first piece, whose length the bytes begin with, as `length` reads it. Pieces begin at multiples of four.
fn piece<'b>(bytes: &mut &'b [u8], length: impl Fn(&[u8]) -> Option<usize>) -> Option<&'b [u8]> {
    let piece = bytes.get(..length(bytes)?).filter(|piece| !piece.is_empty())?;
    *bytes = bytes.get(piece.len().next_multiple_of(4)..).unwrap_or_default();
    Some(piece)
}

/// Returns the attributes in these bytes, each with its type.
pub fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    let word = |bytes: &[u8], at: usize| Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?));
    std::iter::from_fn(move || {
        let attribute = piece(&mut bytes, |bytes| word(bytes, 0).map(usize::from))?;
        Some((word(attribute, 2)?, attribute.get(4..)?))
    })
}

/// Parses a packet of a list: appends its entries, each the fixed part of its type and its attributes. Returns whether
/// the list ends with it.
fn entries(mut packet: &[u8], list: &mut Vec<Vec<u8>>) -> Result<bool, Errno> {
    let length = |bytes: &[u8]| usize::try_from(u32::from_ne_bytes(bytes.get(..4)?.try_into().ok()?)).ok();
    while let Some(message) = piece(&mut packet, length) {
        match message.get(4..6).map(|kind| u16::from_ne_bytes([kind[0], kind[1]])) {
            Some(DONE) => return Ok(true),
            Some(ERROR) | None => return answer(message).and(Err(Errno::BADMSG)),
            Some(_) => list.push(message.get(HEADER..).unwrap_or_default().to_vec()),
        }
    }
    Ok(false)
}

/// The highest error number of Linux (`MAX_ERRNO`).
const ERRNO_MAX: i32 = 4095;

/// Parses the kernel's reply; returns its error, or `BADMSG` if it is no reply.
fn answer(bytes: &[u8]) -> Result<(), Errno> {
    let kind = bytes.get(4..6).map(|kind| u16::from_ne_bytes([kind[0], kind[1]]));
    let code = bytes.get(HEADER..HEADER + 4).and_then(|code| code.try_into().ok()).map(i32::from_ne_bytes);
    match (kind, code) {
        (Some(ERROR), Some(0)) => Ok(()),
        (Some(ERROR), Some(code)) if (-ERRNO_MAX..0).contains(&code) => Err(Errno::from_raw_os_error(-code)),
        _ => Err(Errno::BADMSG),
    }
}

/// A netlink socket for the network namespace in which it was opened.
#[derive(Debug)]
pub struct Netlink(OwnedFd);

impl Netlink {
    /// Opens a socket for the caller's network namespace.
    pub fn open() -> Result<Self, Errno> {
        // NETLINK_ROUTE, the protocol for links and addresses, has number 0, which here is none.
        let socket = rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, None)?;
        // From now on the kernel refuses what others send to it, so that they cannot fill it either.
        rustix::net::connect(&socket, &KERNEL)?;
        Ok(Netlink(socket))
    }

    fn send(&self, message: Message) -> Result<(), Errno> {
        let bytes = message.finish();
        rustix::io::retry_on_intr(|| rustix::net::send(&self.0, &bytes, SendFlags::empty())).map(drop)
    }

    /// Waits for the kernel's next message, and returns its length in bytes, also if it does not fit.
    fn receive(&self, room: &mut [u8]) -> Result<usize, Errno> {
        loop {
            let (_, len, from) =
                rustix::io::retry_on_intr(|| rustix::net::recvfrom(&self.0, &mut *room, RecvFlags::TRUNC))?;
            // Another's message may have come before the socket was connected.
            if from.and_then(|from| SocketAddrNetlink::try_from(from).ok()).is_some_and(|from| from.pid() == 0) {
                return Ok(len);
            }
        }
    }

    /// Sends a request and waits for the kernel's result.
    pub fn ask(&self, message: Message) -> Result<(), Errno> {
        let mut room = [0; 1024];
        self.send(message)?;
        let len = self.receive(&mut room)?;
        // The rest of a reply that does not fit is not needed: only the error code at its start is.
        answer(room.get(..len.min(room.len())).unwrap_or_default())
    }

    /// Sends a request for one object, and returns it: the fixed part of its type, and attributes.
    pub fn get(&self, mut message: Message) -> Result<Vec<u8>, Errno> {
        message.0[6..8].copy_from_slice(&REQUEST.to_ne_bytes());
        self.send(message)?;
        let mut room = vec![0; PACKET];
        let len = self.receive(&mut room)?;
        let found = room.get(..len).ok_or(Errno::MSGSIZE)?;
        match found.get(4..6) {
            Some(kind) if kind != ERROR.to_ne_bytes() => Ok(found.get(HEADER..).unwrap_or_default().to_vec()),
            _ => answer(found).and(Err(Errno::BADMSG)),
        }
    }

    /// Sends a request for a list, and returns its entries: the fixed part of their type, and attributes.
    pub fn list(&self, mut message: Message) -> Result<Vec<Vec<u8>>, Errno> {
        let flags = (REQUEST_AND_ACK | DUMP).to_ne_bytes();
        message.0[6..8].copy_from_slice(&flags);
        self.send(message)?;
        let (mut list, mut room) = (Vec::new(), vec![0; PACKET]);
        loop {
            let len = self.receive(&mut room)?;
            if len == 0 || entries(room.get(..len).ok_or(Errno::MSGSIZE)?, &mut list)? {
                return Ok(list);
            }
        }
    }
}

impl AsFd for Netlink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_begin_at_multiples_of_four() {
        let bytes = Message::new(16, 0, &[7; 16]).with(1, &[1, 2, 3, 4, 5, 6]).finish();
        assert_eq!(bytes.len(), HEADER + 16 + 12);
        assert_eq!(bytes[..4], 44_u32.to_ne_bytes());
        assert_eq!(bytes[32..34], 10_u16.to_ne_bytes(), "the length without padding");
        assert_eq!(bytes[36..], [1, 2, 3, 4, 5, 6, 0, 0]);
    }

    #[test]
    fn a_list_is_read_as_far_as_it_is_whole() {
        let entry = Message::new(20, 0, &[9; 8]).with(2, &[192, 0, 2, 1]).with(3, b"lan").finish();
        let done = Message::new(DONE, 0, &[0; 4]).finish();
        let mut list = Vec::new();
        assert_eq!(entries(&[entry.clone(), done].concat(), &mut list), Ok(true));
        assert_eq!(entries(&entry, &mut list), Ok(false), "more comes");
        let its: Vec<_> = attributes(&list[1][8..]).collect();
        assert_eq!(its, [(2, &[192, 0, 2, 1][..]), (3, &b"lan"[..])]);
        for len in 0..entry.len() {
            let _ = entries(&entry[..len], &mut list);
            assert!(attributes(&entry[..len]).count() <= len);
        }
        assert_eq!(entries(&[0; 16], &mut list), Ok(false), "a length of nothing ends it");
    }

    #[test]
    fn an_answer_says_what_went_wrong() {
        let mut bytes = vec![0; 36];
        assert_eq!(answer(&bytes), Err(Errno::BADMSG));
        bytes[4..6].copy_from_slice(&ERROR.to_ne_bytes());
        assert_eq!(answer(&bytes), Ok(()));
        bytes[HEADER..HEADER + 4].copy_from_slice(&(-17_i32).to_ne_bytes());
        assert_eq!(answer(&bytes), Err(Errno::EXIST));
        assert_eq!(answer(&bytes[..18]), Err(Errno::BADMSG));
        for code in [5, -70_000, i32::MIN, i32::MAX] {
            bytes[HEADER..HEADER + 4].copy_from_slice(&code.to_ne_bytes());
            assert_eq!(answer(&bytes), Err(Errno::BADMSG), "no kernel's code: {code}");
        }
    }

    #[test]
    fn a_message_of_another_process_is_no_answer() {
        let asking = Netlink::open().unwrap();
        let at = SocketAddrNetlink::try_from(rustix::net::getsockname(&asking).unwrap()).unwrap();
        let forging =
            rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, None).unwrap();
        let forged = Message::new(ERROR, 0, &[0; 20]).finish();
        // One without CAP_NET_ADMIN has EPERM.
        let sent = rustix::net::sendto(&forging, &forged, SendFlags::empty(), &at);
        assert!(matches!(sent, Err(Errno::CONNREFUSED | Errno::PERM)), "{sent:?}");

        const DELETE_LINK: u16 = 17;
        let no_link = [&[0; 4][..], &i32::MAX.to_ne_bytes(), &[0; 8]].concat();
        let gone = asking.ask(Message::new(DELETE_LINK, 0, &no_link));
        assert!(matches!(gone, Err(Errno::NODEV | Errno::PERM)), "{gone:?}");
    }
}
