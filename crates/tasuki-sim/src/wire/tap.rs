//! A wire that is a TAP device: the machine's own network is at the other end.
//!
//! # Invariants
//!
//! - **T1** [`Request`] has the layout of `struct ifreq` in `<linux/if.h>`, of which TUNSETIFF reads the name and the flags.
#![allow(unsafe_code, reason = "the ioctl that makes a descriptor a TAP device, which rustix lacks")]

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::ioctl::{Opcode, Updater, opcode};

use super::Wire;

const NAME_LEN: usize = 16;
const LONGEST: usize = 64 << 10;

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

/// Why there is no TAP device.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    /// The name is empty or has more than 15 bytes.
    #[error("{0:?} cannot be the name of an interface; it must have 1 to 15 bytes")]
    Name(String),
    /// This process may not make one.
    #[error("a TAP device needs CAP_NET_ADMIN; run as root, or in a user and network namespace of your own")]
    NotAllowed,
    /// There is such an interface, and it is no TAP that is free.
    #[error("{0} is an interface already, and no TAP that could be taken; choose another name")]
    Taken(String),
    /// The kernel has none, or refused for another reason.
    #[error("/dev/net/tun gives us no TAP device: {0}")]
    Refused(io::Error),
}

impl TapError {
    fn of(errno: Errno) -> Self {
        match errno {
            Errno::PERM | Errno::ACCESS => TapError::NotAllowed,
            errno => TapError::Refused(errno.into()),
        }
    }
}

/// A TAP device. Gone when dropped, unless it had been made to stay before.
#[derive(Debug)]
pub struct Tap {
    device: OwnedFd,
    frame: Box<[u8]>,
    lost: u64,
}

impl Tap {
    /// Makes the interface `name`, or takes it if it is there and nobody has it. Whoever wants to use it sets it up.
    pub fn open(name: &str) -> Result<Self, TapError> {
        let mut request = Request { name: [0; NAME_LEN], flags: IFF_TAP | IFF_NO_PI, rest: [0; 22] };
        if name.is_empty() || name.len() >= NAME_LEN {
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
        Ok(Tap { device, frame: vec![0; LONGEST].into_boxed_slice(), lost: 0 })
    }

    /// Frames that the kernel did not take: the interface is down.
    pub fn lost(&self) -> u64 {
        self.lost
    }
}

impl Wire for Tap {
    fn receive(&mut self, _: u64) -> Option<&[u8]> {
        let len = rustix::io::read(&self.device, &mut self.frame[..]).ok()?;
        Some(&self.frame[..len])
    }

    fn send(&mut self, frame: &[u8], _: u64) {
        self.lost += u64::from(rustix::io::write(&self.device, frame).is_err());
    }
}
