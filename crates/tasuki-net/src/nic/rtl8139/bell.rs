//! How the card wakes who sleeps: its interrupt pin, and the masks on the way.
//!
//! The card asserts the pin while a cause that IMR lets through stands in ISR; the bus may mask the pin once it has rung. So while frames
//! keep coming and nobody sleeps, it rings once and no more, and polling costs no register. Whoever is about to sleep silences the
//! card, has the pin unmasked, and lets the causes through again.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::EventfdFlags;

use crate::nic::bus::{self, Bus, BusError, IntX};

/// What the card rings, if its bus can carry that.
#[derive(Debug)]
pub struct Bell {
    /// Never readable where nothing can ring it.
    rings: OwnedFd,
    /// `None`: nothing rings.
    unmasks: Option<OwnedFd>,
}

impl Bell {
    /// The card's, or one that is silent where the bus carries no such interrupt.
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

    /// Forgets that it rang and lets it ring again; the card is silent. Says whether it can ring at all.
    pub fn unmask(&self) -> Result<bool, BusError> {
        let Some(unmasks) = &self.unmasks else { return Ok(false) };
        // If it has not rung, it is not masked, or is about to ring and to be seen.
        if bus::quiesce(&self.rings)? {
            bus::ring(unmasks);
        }
        Ok(true)
    }

    /// What becomes readable.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.rings.as_fd()
    }
}
