//! A driven NIC: its part of the data path, its periodic checks, and its sleep.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use tasuki_net::nic::bundle::BundleBus;
use tasuki_net::nic::{InPlace, Link, NicError, Repoint, Scrub};
use tasuki_net::port::Armed;

use super::{Attachment, Card, Common, LAST_BURST};
use crate::bundle;
use crate::handler::FrameHandler;

impl<N: InPlace + Repoint + Scrub, D: FrameHandler> Attachment<N, D>
where
    N::Bus: BundleBus,
{
    /// Runs one burst. Returns the number of frames moved.
    #[inline]
    pub fn turn(&mut self, common: &mut Common) -> usize {
        let (Card::Driven(nic), Some(arena), false) = (&mut self.card, &self.arena, self.gone) else { return 0 };
        match self.handler.turn(nic, &mut common.context(arena, self.given.number), &mut self.burst) {
            Ok(moved) => moved,
            Err(error) => {
                self.lose(common, &error);
                0
            }
        }
    }

    /// Checks what need not be checked once a burst: whether the card still exists, and whether its link has come
    /// up.
    pub fn now_and_then(&mut self, common: &mut Common) {
        if self.gone {
            return;
        }
        if self.is_hung_up() {
            return self.lose(common, &NicError::Gone);
        }
        self.forget_old(common);
        if let (Card::Driven(nic), false) = (&mut self.card, self.link_is_up) {
            self.link_is_up = nic.link() != Link::Down;
            // A second register read: what the driver has written to the card since has arrived then, and doorbells
            // are stores again.
            nic.link();
            self.given.lease_page.found_link(self.link_is_up);
        }
    }

    /// Arms the bells. Returns whether the worker may sleep.
    pub fn arm(&mut self, common: &mut Common) -> bool {
        // If a namespace goes on sending and the card takes nothing, the link is down, and the worker may sleep. Its
        // pending frames then have not come from the card.
        if self.drives() && !self.gone && !self.burst.is_empty() && !self.handler.holds_its_own() {
            // Arming a ring without slots would count the pending frames as handled.
            return false;
        }
        if self.drives() && !self.handler.can_work(common.uplink.is_some()) {
            return true;
        }
        self.remember(&common.program_state);
        let Card::Driven(nic) = &mut self.card else { return true };
        if self.gone {
            return true;
        }
        match nic.arm() {
            Ok(Armed::Idle) => true,
            Ok(Armed::Busy) => false,
            Err(error) => {
                self.lose(common, &error);
                true
            }
        }
    }

    /// Returns how long the worker may sleep before there is work without a bell.
    pub fn rest(&self, _: &mut Common) -> Option<Duration> {
        let is_stuck = self.handler.holds_its_own() && !self.burst.is_empty();
        if self.drives() && !self.gone { self.handler.rest().or(is_stuck.then_some(LAST_BURST)) } else { None }
    }

    /// Returns the descriptor that hangs up when the card's server ends, while the NIC is driven.
    pub fn line(&self) -> Option<BorrowedFd<'_>> {
        let is_used = self.drives() && !self.gone;
        self.given.fds.get(bundle::DEVICE).filter(|_| is_used).map(AsFd::as_fd)
    }

    /// Returns what becomes readable when there is work: the [bell](Self::bell), and, while the NIC is driven and no
    /// earlier frames are pending, the source of the programs' frames.
    pub fn fds(&self, _: &Common) -> [Option<BorrowedFd<'_>>; 2] {
        let takes = self.drives() && !self.gone && self.burst.is_empty();
        [self.bell(), self.handler.bell().filter(|_| takes)]
    }

    /// Returns the bell: while the NIC is driven, the card rings it; while we wait for the lease, the giver does.
    fn bell(&self) -> Option<BorrowedFd<'_>> {
        match &self.card {
            Card::Driven(nic) if self.drives() && !self.gone => Some(nic.fd()),
            _ if self.waits_since.is_some() => self.wake.as_ref().map(AsFd::as_fd),
            _ => None,
        }
    }

    /// Clears the bell that a giver rang after it passed the lease.
    pub fn quiesce(&self, _: &mut Common) {
        if let (Some(_), Some(wake)) = (self.waits_since, &self.wake) {
            let _ = rustix::io::read(wake, &mut [0; 8]);
        }
    }

    /// Marks the card as gone and reports it. No other worker can drive it either.
    #[cold]
    pub(super) fn lose(&mut self, common: &mut Common, error: &NicError) {
        if !self.gone {
            self.gone = true;
            let help = match error {
                NicError::Gone => "; when it is there again, stop all (tasuki stop) and start tasukid anew",
                _ => "",
            };
            common.channel.tell(Some(self.given.number), format!("{error}{help}"));
        }
    }
}
