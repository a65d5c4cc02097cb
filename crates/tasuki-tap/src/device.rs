//! Turns a descriptor into a TAP device.
//!
//! # Invariants
//!
//! - **T1** `Request` has the layout of `struct ifreq` in `<linux/if.h>`, of which TUNSETIFF reads the name and the
//!   flags, and TUNSETQUEUE the flags. TUNGETIFF, SIOCGIFHWADDR and SIOCGIFFLAGS write it, and no more than it.
//! - **T2** TUNSETOFFLOAD takes a number where others take an address.
//! - **T3** TUNSETSTEERINGEBPF takes an `int`, and keeps no address.
//! - **T4** TUNGETDEVNETNS and SIOCGSKNS take no argument, and return a new descriptor that has no other owner.
#![allow(unsafe_code, reason = "the ioctls that make a descriptor a TAP device, which rustix lacks")]

use std::ffi::c_void;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::ioctl::{IntegerSetter, Ioctl, IoctlOutput, Opcode, Setter, Updater, opcode};
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::interface::Interface;
use crate::namespace::Unnamed;
use crate::program::Program;
use crate::{NAME_LEN, TapError, is_name};

/// TAP mode, and no packet information before frames.
const IFF_TAP: u16 = 0x0002;
const IFF_NO_PI: u16 = 0x1000;
/// A virtio-net header of 10 bytes before each frame.
const IFF_VNET_HDR: u16 = 0x4000;
/// The interface outlives its descriptors.
const IFF_PERSIST: u16 = 0x0800;
/// Several descriptors may be open, each a queue of the interface.
const IFF_MULTI_QUEUE: u16 = 0x0100;
/// The queue gets flows, or none.
const IFF_ATTACH_QUEUE: u16 = 0x0200;
const IFF_DETACH_QUEUE: u16 = 0x0400;
/// IFF_ONE_QUEUE, which does nothing (`<linux/if_tun.h>`) but is kept: it marks a TAP that stands beside a veth end.
/// The owner of a namespace may rename the interface and move it to another namespace; only its creator sets its
/// flags.
const IFF_OF_VETH_END: u16 = 0x2000;

/// The kernel may hand over frames without checksum, and TCP segments over IPv4 and IPv6, with ECN too.
const OFFLOADS: usize = 0x01 | 0x02 | 0x04 | 0x08;
/// The same for UDP datagrams (from Linux 6.2 on).
const UDP_TOO: usize = 0x20 | 0x40;

/// The number says `int`, but the kernel takes a `struct ifreq`.
const TUNSETIFF: Opcode = opcode::write::<i32>(b'T', 202);

/// The same.
const TUNSETQUEUE: Opcode = opcode::write::<i32>(b'T', 217);

/// Fills in a `struct ifreq`; the number says `unsigned int`.
const TUNGETIFF: Opcode = opcode::read::<u32>(b'T', 210);

/// Fills in the address of a `struct ifreq` (netdevice(7)).
const SIOCGIFHWADDR: Opcode = 0x8927;

/// Fills in the flags of a `struct ifreq` (netdevice(7)).
const SIOCGIFFLAGS: Opcode = 0x8913;

/// Returns the network namespace of the interface (since Linux 5.8).
const TUNGETDEVNETNS: Opcode = opcode::none(b'T', 227);

/// Returns the network namespace of a socket (since Linux 4.10), for those that may administer it.
const SIOCGSKNS: Opcode = 0x894c;

/// Takes the descriptor of a program, or -1 (since Linux 4.16). The number says that the kernel writes it.
const TUNSETSTEERINGEBPF: Opcode = opcode::read::<i32>(b'T', 224);

/// Takes a number.
const TUNSETOFFLOAD: Opcode = opcode::write::<u32>(b'T', 208);

/// Bytes before each frame on a TAP device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Before {
    /// None: frames are complete.
    Nothing,
    /// A virtio-net header (10 bytes), which names the steps left for a frame: its checksum, and its segmentation.
    Offload,
}

#[repr(C)]
struct Request {
    name: [u8; NAME_LEN],
    flags: u16,
    rest: [u8; 22],
}

const _: () = assert!(size_of::<Request>() == 40);

/// Number of queues of a TAP device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Queues {
    /// One, and never another.
    #[default]
    One,
    /// One at first; [`another_queue`] opens more.
    Several,
}

impl Queues {
    fn flag(self) -> u16 {
        if self == Queues::Several { IFF_MULTI_QUEUE } else { 0 }
    }
}

/// Creates the interface `name`, or attaches to it if it exists and has no other user. The descriptor is
/// non-blocking. The interface is removed when the last descriptor is closed, unless it existed before as a
/// persistent one. One of several queues must not exist before: the kernel would add a queue to that of another user.
pub fn open(name: &str, before: Before, queues: Queues) -> Result<OwnedFd, TapError> {
    open_fresh(name, before, queues, 0)
}

/// Opens a TAP that stands beside a veth end, as [`open`] does; [`identity`] distinguishes it from all others.
pub fn open_beside_veth_end(name: &str, queues: Queues) -> Result<OwnedFd, TapError> {
    open_fresh(name, Before::Offload, queues, IFF_OF_VETH_END)
}

fn open_fresh(name: &str, before: Before, queues: Queues, mark: u16) -> Result<OwnedFd, TapError> {
    if queues == Queues::Several && is_name(name) && Interface::if_there(name)?.is_some() {
        return Err(TapError::Taken(name.to_owned()));
    }
    open_with(name, before, queues.flag() | mark)
}

/// Opens another queue of a TAP device with offload headers. The kernel spreads the flows of its interface over all
/// queues that are open. The queue goes when its last descriptor is closed.
pub fn another_queue(device: BorrowedFd<'_>) -> Result<OwnedFd, TapError> {
    let (name, flags) = name_and_flags(device).map_err(TapError::of)?;
    if flags & IFF_MULTI_QUEUE == 0 {
        return Err(TapError::OneQueue(name));
    }
    let place = Unnamed::of(namespace_of(device).map_err(TapError::of)?);
    place.within(|| open_with(&name, Before::Offload, IFF_MULTI_QUEUE | flags & IFF_OF_VETH_END))
}

/// Has the kernel give flows to one of several queues, or give them to the others alone: then the frames that are in it
/// are lost. Fails if that is so already, or the interface is gone.
pub fn give_flows(queue: BorrowedFd<'_>, gets_some: bool) -> Result<(), Errno> {
    let flags = if gets_some { IFF_ATTACH_QUEUE } else { IFF_DETACH_QUEUE };
    let mut request = Request { name: [0; NAME_LEN], flags, rest: [0; 22] };
    // SAFETY: the request takes this structure (T1).
    let updater = unsafe { Updater::<{ TUNSETQUEUE }, Request>::new(&mut request) };
    // SAFETY: the kernel refuses other kinds of descriptors; the request outlives the call (T1).
    unsafe { rustix::ioctl::ioctl(queue, updater) }
}

/// Returns whether the kernel gives a queue no flows ([`give_flows`]).
pub fn is_detached(queue: BorrowedFd<'_>) -> bool {
    name_and_flags(queue).is_ok_and(|(_, flags)| flags & IFF_DETACH_QUEUE != 0)
}

/// Has the kernel give all flows of an interface to one of its queues, or spread them over all. Queue 0 is the one that was
/// opened first, and 1 another one that has flows, if there is one. `queue` is any of them.
pub fn give_one_queue_all(queue: BorrowedFd<'_>, which: Option<u8>) -> Result<(), Errno> {
    let program = which.map(Program::one_queue).transpose()?;
    let number = program.as_ref().map_or(-1, |program| program.as_fd().as_raw_fd());
    // SAFETY: the request takes this number (T3).
    let setter = unsafe { Setter::<{ TUNSETSTEERINGEBPF }, i32>::new(number) };
    // SAFETY: the kernel refuses other kinds of descriptors, and holds the program by itself (T3).
    unsafe { rustix::ioctl::ioctl(queue, setter) }
}

/// Opens `name` as a TAP device with `flags` besides those that each has.
fn open_with(name: &str, before: Before, flags: u16) -> Result<OwnedFd, TapError> {
    let header = if before == Before::Offload { IFF_VNET_HDR } else { 0 };
    let mut request = Request { name: [0; NAME_LEN], flags: IFF_TAP | IFF_NO_PI | header | flags, rest: [0; 22] };
    if !is_name(name) {
        return Err(TapError::Name(name.to_owned()));
    }
    request.name[..name.len()].copy_from_slice(name.as_bytes());
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let device = rustix::fs::open("/dev/net/tun", flags, Mode::empty()).map_err(TapError::of)?;
    // SAFETY: the request takes this structure (T1).
    let updater = unsafe { Updater::<{ TUNSETIFF }, Request>::new(&mut request) };
    // SAFETY: the descriptor is that of /dev/net/tun, just opened; the request outlives the call (T1).
    unsafe { rustix::ioctl::ioctl(device.as_fd(), updater) }.map_err(|errno| match errno {
        Errno::INVAL | Errno::BUSY => TapError::Taken(name.to_owned()),
        Errno::TOOBIG => TapError::Full(name.to_owned()),
        other => TapError::of(other),
    })?;
    if before == Before::Offload {
        take_unfinished(&device).map_err(|errno| TapError::Refused(errno.into()))?;
    }
    Ok(device)
}

/// Makes the kernel hand over unfinished frames, so that the checksum and the segments are made where that is
/// cheapest.
fn take_unfinished(device: &OwnedFd) -> Result<(), Errno> {
    let set = |what| {
        // SAFETY: the request takes a number (T2), and reads and writes no memory.
        let setter = unsafe { IntegerSetter::<{ TUNSETOFFLOAD }>::new_usize(what) };
        // SAFETY: the descriptor is that of a TAP device, just opened (T2).
        unsafe { rustix::ioctl::ioctl(device.as_fd(), setter) }
    };
    set(OFFLOADS | UDP_TOO).or_else(|_| set(OFFLOADS))
}

/// Returns the name of a TAP device's interface, and whether the device was made to stand beside a veth end.
pub fn identity(device: BorrowedFd<'_>) -> Result<(String, bool), Errno> {
    let (name, flags) = name_and_flags(device)?;
    Ok((name, flags & IFF_OF_VETH_END != 0))
}

/// Removes a TAP device's interface, so that its name is free although other processes have the device, too. One that
/// is persistent, which somebody else made, stays.
pub fn remove(device: BorrowedFd<'_>) -> Result<(), TapError> {
    let (name, flags) = name_and_flags(device).map_err(TapError::of)?;
    if flags & IFF_PERSIST != 0 {
        return Ok(());
    }
    let place = Unnamed::of(namespace_of(device).map_err(TapError::of)?);
    place.within(|| Interface::if_there(&name)?.map_or(Ok(()), |interface| interface.delete()))
}

/// Returns whether a TAP device's interface does not exist any more.
pub fn is_gone(device: BorrowedFd<'_>) -> bool {
    name_and_flags(device) == Err(Errno::BADFD)
}

/// Returns the station address of a TAP device's interface.
pub fn mac(device: BorrowedFd<'_>) -> Result<[u8; 6], Errno> {
    // Behind the family of the address.
    mac_by(device, [0; NAME_LEN])
}

/// Returns the station address of an interface of the calling thread's namespace.
pub fn mac_of(name: &str) -> Result<[u8; 6], Errno> {
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    mac_by(socket.as_fd(), field(name)?)
}

/// Returns the flags (`IFF_*`, the lower 16) of an interface of the socket's namespace.
pub(crate) fn flags_of(socket: BorrowedFd<'_>, name: &str) -> Result<u16, Errno> {
    Ok(ask::<SIOCGIFFLAGS>(socket, field(name)?)?.flags)
}

/// Returns a name as a request has it.
fn field(name: &str) -> Result<[u8; NAME_LEN], Errno> {
    let mut field = [0; NAME_LEN];
    // One byte less: the name ends with a zero.
    field[..NAME_LEN - 1].get_mut(..name.len()).ok_or(Errno::INVAL)?.copy_from_slice(name.as_bytes());
    Ok(field)
}

fn mac_by(fd: BorrowedFd<'_>, name: [u8; NAME_LEN]) -> Result<[u8; 6], Errno> {
    Ok(*ask::<SIOCGIFHWADDR>(fd, name)?.rest.first_chunk().expect("there is room for six bytes"))
}

/// Has the kernel fill in a request of this kind.
fn ask<const WHAT: Opcode>(device: BorrowedFd<'_>, name: [u8; NAME_LEN]) -> Result<Request, Errno> {
    let mut request = Request { name, flags: 0, rest: [0; 22] };
    // SAFETY: these kinds of requests fill in this structure (T1).
    let updater = unsafe { Updater::<WHAT, Request>::new(&mut request) };
    // SAFETY: the kernel refuses other kinds of descriptors; the request outlives the call (T1).
    unsafe { rustix::ioctl::ioctl(device, updater) }?;
    Ok(request)
}

fn name_and_flags(device: BorrowedFd<'_>) -> Result<(String, u16), Errno> {
    let request = ask::<TUNGETIFF>(device, [0; NAME_LEN])?;
    let len = request.name.iter().position(|byte| *byte == 0).unwrap_or(NAME_LEN);
    Ok((String::from_utf8_lossy(&request.name[..len]).into_owned(), request.flags))
}

/// Returns the network namespace of a TAP device's interface. The caller may be in any namespace.
pub fn namespace_of(device: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    namespace_by(device, TUNGETDEVNETNS)
}

/// Returns the network namespace of a socket.
pub(crate) fn namespace_of_socket(socket: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    namespace_by(socket, SIOCGSKNS)
}

fn namespace_by(fd: BorrowedFd<'_>, opcode: Opcode) -> Result<OwnedFd, Errno> {
    struct Ask(Opcode);
    // SAFETY: the request takes no argument, and returns a descriptor (T4).
    unsafe impl Ioctl for Ask {
        type Output = OwnedFd;
        const IS_MUTATING: bool = false;

        fn opcode(&self) -> Opcode {
            self.0
        }

        fn as_ptr(&mut self) -> *mut c_void {
            std::ptr::null_mut()
        }

        unsafe fn output_from_ptr(output: IoctlOutput, _: *mut c_void) -> Result<OwnedFd, Errno> {
            // SAFETY: the kernel has just made it, for us alone (T4).
            Ok(unsafe { OwnedFd::from_raw_fd(output) })
        }
    }
    // SAFETY: the kernel refuses other kinds of descriptors (T4).
    unsafe { rustix::ioctl::ioctl(fd, Ask(opcode)) }
}
