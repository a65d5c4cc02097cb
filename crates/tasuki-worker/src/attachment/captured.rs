//! The captures of a NIC. They are with the driver while there is one, and here otherwise, so that a successor has
//! them as soon as it drives.

use tasuki_net::capture::{Capture, Captures};
use tasuki_net::nic::bundle::BundleBus;
use tasuki_net::nic::{InPlace, Repoint, Scrub};

use super::{Attachment, Card};
use crate::handler::FrameHandler;

/// Adds a capture.
pub fn add(captures: &mut Option<Box<Captures>>, capture: Capture) {
    captures.get_or_insert_default().add(capture);
}

/// Removes the capture with this number, and the set with its last capture.
pub fn end(captures: &mut Option<Box<Captures>>, number: u32) {
    if captures.as_mut().is_some_and(|captures| !captures.remove(number)) {
        *captures = None;
    }
}

impl<N: InPlace + Repoint + Scrub, D: FrameHandler> Attachment<N, D>
where
    N::Bus: BundleBus,
{
    pub(super) fn own_captures(&mut self) -> &mut Option<Box<Captures>> {
        match &mut self.card {
            Card::Driven(nic) => nic.captures(),
            _ => &mut self.captures,
        }
    }

    /// Takes the captures back from a driver that is about to be dropped.
    pub(super) fn keep_captures(&mut self) {
        self.captures = self.own_captures().take();
    }

    /// Drives the NIC from now on, and gives the driver the captures.
    pub(super) fn drive(&mut self, mut nic: N) {
        *nic.captures() = self.captures.take();
        self.card = Card::Driven(nic);
    }
}
