//! A packet socket (packet(7)) that stands for a whole interface: it sees each frame that the interface receives, and
//! sends through it.
//!
//! # Invariants
//!
//! - **P1** The system calls read and write the structures given to them, which consist of integers, and no more than
//!   their lengths.
#![allow(unsafe_code, reason = "binding a packet socket and setting its options, which rustix lacks")]

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{AddressFamily, Protocol, SocketFlags, SocketType, netdevice};

use crate::device;
use crate::interface;
use crate::namespace::{Namespace, Unnamed};
use crate::netlink::Netlink;
use crate::{TapError, is_name};

/// Bytes of received frames that the kernel keeps for the socket: a burst of GSO packets of 64 KiB.
pub const ROOM: i32 = 8 << 20;

/// Opens a raw, non-blocking packet socket for the interface `name` of a namespace. Each frame has an offload header
/// before it (`PACKET_VNET_HDR`); tags come beside it (`PACKET_AUXDATA`). The interface receives frames for all
/// addresses as long as the socket is open.
///
/// # Errors
/// There is no such interface, it has no Ethernet header before its packets, or the kernel refuses.
pub fn open(place: &Namespace, name: &str) -> Result<OwnedFd, TapError> {
    if !is_name(name) {
        return Err(TapError::Name(name.to_owned()));
    }
    place.within(|| open_here(name))
}

/// Returns the number of an interface in its namespace, if it exists.
pub fn index_of(place: &Namespace, name: &str) -> Option<u32> {
    place.within(|| find(name).map(|(_, index)| index)).ok()
}

fn find(name: &str) -> Result<(OwnedFd, u32), TapError> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    // Without a protocol it receives nothing before it is bound.
    let protocol: Option<Protocol> = None;
    let socket = rustix::net::socket_with(AddressFamily::PACKET, SocketType::RAW, flags, protocol).map_err(refused)?;
    match Netlink::open().and_then(|netlink| interface::index_of(&netlink, name)) {
        Ok(index) => Ok((socket, index)),
        Err(Errno::NODEV) => Err(TapError::NoInterface(name.to_owned())),
        Err(errno) => Err(refused(errno)),
    }
}

fn open_here(name: &str) -> Result<OwnedFd, TapError> {
    let (socket, index) = find(name)?;
    let index = i32::try_from(index).map_err(|_| TapError::NoInterface(name.to_owned()))?;
    set(&socket, libc::SOL_PACKET, libc::PACKET_VNET_HDR, &1_i32)?;
    set(&socket, libc::SOL_PACKET, libc::PACKET_AUXDATA, &1_i32)?;
    set(&socket, libc::SOL_PACKET, libc::PACKET_IGNORE_OUTGOING, &1_i32)?;
    set_room(&socket, ROOM);
    // Frames that a card has yet to send count here. With the default, fewer than four of 64 KiB wait for it.
    let _ = set(&socket, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, &ROOM);
    let address = libc::sockaddr_ll {
        sll_family: u16::try_from(libc::AF_PACKET).expect("17"),
        sll_protocol: u16::try_from(libc::ETH_P_ALL).expect("3").to_be(),
        sll_ifindex: index,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    };
    // SAFETY: the address is the structure of the length that is given (P1).
    let bound = unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), len_of(&address)) };
    if bound != 0 {
        return Err(last());
    }
    if hardware_of(&socket)? != libc::ARPHRD_ETHER {
        return Err(TapError::NotEthernet(name.to_owned()));
    }
    let all = libc::packet_mreq {
        mr_ifindex: index,
        mr_type: u16::try_from(libc::PACKET_MR_PROMISC).expect("1"),
        mr_alen: 0,
        mr_address: [0; 8],
    };
    set(&socket, libc::SOL_PACKET, libc::PACKET_ADD_MEMBERSHIP, &all)?;
    Ok(socket)
}

/// Has the kernel keep about so many bytes of received frames for the socket; it drops what comes then. Best effort: a
/// smaller buffer loses more frames when they come in bursts; the endpoint counts them.
pub fn set_room(socket: &OwnedFd, bytes: i32) {
    let _ = set(socket, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, &bytes);
}

/// Returns whether the interface of the socket is a bridge. The caller may be in any namespace.
pub fn is_bridge(socket: &OwnedFd) -> bool {
    let kind = || {
        let index = index(socket)?;
        let its = Unnamed::of(namespace_of(socket).ok()?);
        its.within(|| Netlink::open().and_then(|netlink| interface::kind_of(&netlink, index)).map_err(refused)).ok()?
    };
    kind().as_deref() == Some("bridge")
}

/// Returns whether the interface is gone that the socket was bound to: it was deleted, or moved to another namespace. The
/// kernel unbinds the socket then, for good.
pub fn is_gone(socket: &OwnedFd) -> bool {
    bound_to(socket).is_ok_and(|address| address.sll_ifindex <= 0)
}

/// Returns the number that the interface of the socket has in its namespace; `None` once it is [gone](is_gone).
pub fn index(socket: &OwnedFd) -> Option<u32> {
    u32::try_from(bound_to(socket).ok()?.sll_ifindex).ok().filter(|index| *index > 0)
}

/// An interface's name and link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// The name that it has now. It can be found by others, too (`altname`).
    pub name: String,
    /// An administrator has brought it up.
    pub is_up: bool,
    /// It has a carrier: frames reach the other end.
    pub has_carrier: bool,
}

/// Returns how the interface of the socket is called and linked now; `None` once it is [gone](is_gone). The caller may be in
/// any namespace. Unlike a request by rtnetlink, this waits for no lock that others hold for seconds.
pub fn link(socket: &OwnedFd) -> Option<Link> {
    let name = netdevice::index_to_name(socket.as_fd(), index(socket)?).ok()?;
    let flags = i32::from(device::flags_of(socket.as_fd(), &name).ok()?);
    let [is_up, has_carrier] = [libc::IFF_UP, libc::IFF_RUNNING].map(|flag| flags & flag != 0);
    Some(Link { name, is_up, has_carrier })
}

/// Returns the namespace of the interface that the socket was bound to.
///
/// # Errors
/// The caller may not administer it, or may open no more descriptors.
pub fn namespace_of(socket: &OwnedFd) -> Result<OwnedFd, Errno> {
    device::namespace_of_socket(socket.as_fd())
}

/// Returns the hardware type of the interface that the socket is bound to (`ARPHRD_*`, netdevice(7)).
fn hardware_of(socket: &OwnedFd) -> Result<u16, TapError> {
    bound_to(socket).map(|address| address.sll_hatype)
}

fn bound_to(socket: &OwnedFd) -> Result<libc::sockaddr_ll, TapError> {
    // SAFETY: the structure consists of integers, for which zeroes are values (P1).
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    let mut len = len_of(&address);
    // SAFETY: the kernel writes no more than the length of the structure (P1).
    let named = unsafe { libc::getsockname(socket.as_raw_fd(), (&raw mut address).cast(), &raw mut len) };
    if named == 0 { Ok(address) } else { Err(last()) }
}

fn set<T: Copy>(socket: &OwnedFd, level: i32, option: i32, value: &T) -> Result<(), TapError> {
    // SAFETY: the value is the structure of the length that is given (P1).
    let done =
        unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, (&raw const *value).cast(), len_of(value)) };
    if done == 0 { Ok(()) } else { Err(last()) }
}

fn len_of<T>(value: &T) -> u32 {
    u32::try_from(size_of_val(value)).expect("few bytes")
}

fn last() -> TapError {
    TapError::NoPacketSocket(io::Error::last_os_error())
}

fn refused(errno: Errno) -> TapError {
    TapError::NoPacketSocket(errno.into())
}
