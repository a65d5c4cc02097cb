//! An interface, as the kernel's programs have it: found, given addresses, and switched on, by route netlink (rtnetlink(7)).
//!
//! What is sent and read here is 16 bytes of `struct nlmsghdr`, the fixed part that the request's kind has, and attributes: a length, a kind,
//! and bytes, each from a multiple of four on.

use std::net::IpAddr;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netdevice};

use crate::{Address, TapError};

/// Kinds of messages (`<linux/netlink.h>`, `<linux/rtnetlink.h>`).
const ERROR: u16 = 2;
const NEW_LINK: u16 = 16;
const NEW_ADDRESS: u16 = 20;

/// The kernel acts on it, and says how that went.
const REQUEST_AND_ACK: u16 = 0x0001 | 0x0004;
/// Made if it is not there, and put in its place if it is.
const CREATE_OR_REPLACE: u16 = 0x0400 | 0x0100;

/// Attributes: of a link its station address; of an address the address, and the same at this end of the cable.
const IFLA_ADDRESS: u16 = 1;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;

const IFF_UP: u32 = 1;

/// IFA_F_NODAD. Of IPv4 it means nothing.
const NO_DAD: u8 = 0x02;

/// Bytes of `struct nlmsghdr`.
const HEADER: usize = 16;

/// An interface of the network namespace in which it was found, from wherever it is used.
#[derive(Debug)]
pub struct Interface {
    name: String,
    index: u32,
    /// Stays with the namespace that it was opened in.
    netlink: OwnedFd,
}

/// A message, as it grows.
struct Message(Vec<u8>);

impl Message {
    fn new(kind: u16, flags: u16, fixed: &[u8]) -> Self {
        let mut bytes = vec![0; HEADER];
        bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
        bytes[6..8].copy_from_slice(&(REQUEST_AND_ACK | flags).to_ne_bytes());
        bytes.extend_from_slice(fixed);
        Message(bytes)
    }

    fn with(mut self, kind: u16, value: &[u8]) -> Self {
        let len = u16::try_from(4 + value.len()).expect("an address is short");
        self.0.extend_from_slice(&len.to_ne_bytes());
        self.0.extend_from_slice(&kind.to_ne_bytes());
        self.0.extend_from_slice(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }

    fn finish(mut self) -> Vec<u8> {
        let len = u32::try_from(self.0.len()).expect("a few attributes");
        self.0[..4].copy_from_slice(&len.to_ne_bytes());
        self.0
    }
}

/// What the kernel answered: nothing is wrong, or this.
fn answer(bytes: &[u8]) -> Result<(), Errno> {
    let kind = bytes.get(4..6).map(|kind| u16::from_ne_bytes([kind[0], kind[1]]));
    let code = bytes.get(HEADER..HEADER + 4).and_then(|code| code.try_into().ok()).map(i32::from_ne_bytes);
    match (kind, code) {
        (Some(ERROR), Some(0)) => Ok(()),
        (Some(ERROR), Some(code)) => Err(Errno::from_raw_os_error(code.saturating_neg())),
        _ => Err(Errno::BADMSG),
    }
}

impl Interface {
    /// The interface of this name in the caller's network namespace.
    pub fn find(name: &str) -> Result<Self, TapError> {
        let failed = |errno: Errno| TapError::SetUp {
            name: name.to_owned(),
            what: "anything done to it".to_owned(),
            why: errno.into(),
        };
        // Of netlink's protocols the one about routes and links has the number that stands for none.
        let netlink = rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, None);
        let netlink = netlink.map_err(failed)?;
        let index = netdevice::name_to_index(&netlink, name).map_err(failed)?;
        Ok(Interface { name: name.to_owned(), index, netlink })
    }

    fn ask(&self, what: impl Fn() -> String, message: Message) -> Result<(), TapError> {
        let mut room = [0; 1024];
        let kernel = SocketAddrNetlink::new(0, 0);
        let done = rustix::net::sendto(&self.netlink, &message.finish(), SendFlags::empty(), &kernel)
            .and_then(|_| {
                rustix::io::retry_on_intr(|| rustix::net::recv(&self.netlink, &mut room[..], RecvFlags::empty()))
            })
            .and_then(|(_, len)| answer(room.get(..len).unwrap_or_default()));
        done.map_err(|errno| match errno {
            Errno::PERM | Errno::ACCESS => TapError::NotAllowed,
            errno => TapError::SetUp { name: self.name.clone(), what: what(), why: errno.into() },
        })
    }

    /// `struct ifinfomsg`, with the flags that become true.
    fn link(&self, flags: u32) -> Message {
        let mut fixed = vec![0; 4];
        fixed.extend_from_slice(&self.index.to_ne_bytes());
        fixed.extend_from_slice(&flags.to_ne_bytes());
        fixed.extend_from_slice(&flags.to_ne_bytes());
        Message::new(NEW_LINK, 0, &fixed)
    }

    /// Switches it on.
    pub fn up(&self) -> Result<(), TapError> {
        self.ask(|| "its link up".to_owned(), self.link(IFF_UP))
    }

    /// Gives it this station address, whatever it had.
    pub fn set_mac(&self, mac: [u8; 6]) -> Result<(), TapError> {
        let name = || format!("the station address {}", mac.map(|byte| format!("{byte:02x}")).join(":"));
        self.ask(name, self.link(0).with(IFLA_ADDRESS, &mac))
    }

    /// Gives it one more address, if it has not got it.
    pub fn add_address(&self, address: Address) -> Result<(), TapError> {
        let (family, bytes) = match address.ip {
            IpAddr::V4(ip) => (AddressFamily::INET, ip.octets().to_vec()),
            IpAddr::V6(ip) => (AddressFamily::INET6, ip.octets().to_vec()),
        };
        let family = u8::try_from(family.as_raw()).expect("a small number");
        // `struct ifaddrmsg`. Nobody is asked whether he has it already: no card is behind the interface yet.
        let mut fixed = vec![family, address.prefix, NO_DAD, 0];
        fixed.extend_from_slice(&self.index.to_ne_bytes());
        let message = Message::new(NEW_ADDRESS, CREATE_OR_REPLACE, &fixed);
        self.ask(|| format!("the address {address}"), message.with(IFA_LOCAL, &bytes).with(IFA_ADDRESS, &bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_begin_at_multiples_of_four() {
        let bytes = Message::new(NEW_LINK, 0, &[7; 16]).with(IFLA_ADDRESS, &[1, 2, 3, 4, 5, 6]).finish();
        assert_eq!(bytes.len(), HEADER + 16 + 12);
        assert_eq!(bytes[..4], 44_u32.to_ne_bytes());
        assert_eq!(bytes[32..34], 10_u16.to_ne_bytes(), "the length without what fills up");
        assert_eq!(bytes[36..], [1, 2, 3, 4, 5, 6, 0, 0]);
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
    }
}
