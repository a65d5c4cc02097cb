//! How the card wakes a sleeping driver: its interrupt pin, and the masks on the way.
//!
//! The card asserts the pin while ISR holds a cause that IMR lets through; the bus may mask the pin once it has rung.
//! So while frames keep coming and the driver does not sleep, it rings only once, and polling costs no register access.
//! A driver that is about to sleep silences the card, unmasks the pin, and lets the causes through again.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::EventfdFlags;
use tasuki_shm::wake::ring_eventfd;

use crate::nic::bus::{self, Bus, BusError, IntX};

/// Interrupt of the card, if its bus can carry it.
#[derive(Debug)]
pub struct Bell {
    /// Becomes readable when the card rings; never, if nothing can ring it.
    rings: OwnedFd,
    /// Unmasks the pin; `None` if nothing rings.
    unmasks: Option<OwnedFd>,
}

impl Bell {
    /// Returns the card's bell, or a silent one if the bus carries no such interrupt.
    pub fn new(bus: &mut impl Bus) -> Result<Self, BusError> {
        match bus.intx() {
            Ok(IntX { rings, unmasks }) => Ok(Bell { rings, unmasks: Some(unmasks) }),
            Err(BusError::NoIntX { .. }) => Self::silent(),
            Err(other) => Err(other),
        }
    }

    fn silent() -> Result<Self, BusError> {
        let rings = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| BusError::Refused { doing: "making an eventfd", source: errno.into() })?;
        Ok(Bell { rings, unmasks: None })
    }

    /// Clears an earlier ring and lets the pin ring again; the card must be silent. Returns whether it can ring at all.
    pub fn unmask(&self) -> Result<bool, BusError> {
        let Some(unmasks) = &self.unmasks else { return Ok(false) };
        // A pin that has not rung is not masked, or is about to ring and to be seen.
        if bus::quiesce(&self.rings)? {
            ring_eventfd(unmasks);
        }
        Ok(true)
    }

    /// Returns the descriptor that becomes readable when the card rings.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.rings.as_fd()
    }
}
