//! A descriptor becomes a TAP device.
//!
//! # Invariants
//!
//! - **T1** `Request` has the layout of `struct ifreq` in `<linux/if.h>`, of which TUNSETIFF reads the name and the flags.
#![allow(unsafe_code, reason = "the ioctl that makes a descriptor a TAP device, which rustix lacks")]

use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::ioctl::{Opcode, Updater, opcode};

use crate::{NAME_LEN, TapError, is_name};

/// A TAP device, frames without a header before them.
const IFF_TAP: u16 = 0x0002;
const IFF_NO_PI: u16 = 0x1000;

/// The number says `int`, the kernel takes a `struct ifreq`.
const TUNSETIFF: Opcode = opcode::write::<i32>(b'T', 202);

#[repr(C)]
struct Request {
    name: [u8; NAME_LEN],
    flags: u16,
    rest: [u8; 22],
}

const _: () = assert!(size_of::<Request>() == 40);

/// Makes the interface `name`, or takes it if it is there and nobody has it. Nobody waits at its descriptor. The interface is gone when the
/// last descriptor is closed, unless it had been made to stay before.
pub fn open(name: &str) -> Result<OwnedFd, TapError> {
    let mut request = Request { name: [0; NAME_LEN], flags: IFF_TAP | IFF_NO_PI, rest: [0; 22] };
    if !is_name(name) {
        return Err(TapError::Name(name.to_owned()));
    }
    request.name[..name.len()].copy_from_slice(name.as_bytes());
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let device = rustix::fs::open("/dev/net/tun", flags, Mode::empty()).map_err(TapError::of)?;
    // SAFETY: the structure is the one that this request is made with (T1).
    let updater = unsafe { Updater::<{ TUNSETIFF }, Request>::new(&mut request) };
    // SAFETY: the descriptor is that of /dev/net/tun, just opened; the request outlives the call (T1).
    unsafe { rustix::ioctl::ioctl(device.as_fd(), updater) }.map_err(|errno| match errno {
        Errno::INVAL | Errno::BUSY => TapError::Taken(name.to_owned()),
        other => TapError::of(other),
    })?;
    Ok(device)
}
