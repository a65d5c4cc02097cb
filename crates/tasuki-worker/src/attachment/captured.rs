//! Whoever looks on at a NIC: with the driver while there is one, here otherwise, so that a successor has them as soon as it drives.

use tasuki_net::capture::{Capture, Captures};
use tasuki_net::nic::bundle::BundleBus;
use tasuki_net::nic::{InPlace, Repoint, Scrub};

use super::{Attachment, Card};
use crate::handler::FrameHandler;

/// One more, among those that there are.
pub fn add(captures: &mut Option<Box<Captures>>, capture: Capture) {
    captures.get_or_insert_default().add(capture);
}

/// One is over.
pub fn end(captures: &mut Option<Box<Captures>>, number: u32) {
    if captures.as_mut().is_some_and(|captures| !captures.remove(number)) {
        *captures = None;
    }
}

impl<N: InPlace + Repoint + Scrub, D: FrameHandler> Attachment<N, D>
where
    N::Bus: BundleBus,
{
    fn captures(&mut self) -> &mut Option<Box<Captures>> {
        match &mut self.card {
            Card::Driven(nic) => nic.captures(),
            _ => &mut self.captures,
        }
    }

    /// Somebody looks on.
    pub fn capture(&mut self, capture: Capture) {
        add(self.captures(), capture);
    }

    /// Somebody looks on no more.
    pub fn end_capture(&mut self, number: u32) {
        end(self.captures(), number);
    }

    /// Nobody does.
    pub fn end_captures(&mut self) {
        *self.captures() = None;
    }

    /// It is about to be driven no more.
    pub(super) fn keep_captures(&mut self) {
        self.captures = self.captures().take();
    }

    /// It is driven from now on.
    pub(super) fn drive(&mut self, mut nic: N) {
        *nic.captures() = self.captures.take();
        self.card = Card::Driven(nic);
    }
}
