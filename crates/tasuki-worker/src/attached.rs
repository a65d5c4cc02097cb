//! The interface between the worker's loop and all that has a lease: NICs, and a node's end of a VNI.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use tasuki_net::capture::Captures;
use tasuki_relay::taker;
use tasuki_relay::wire::Plan;
use tasuki_relay::worker::{Input, Side, Worker};

use crate::attachment::{Common, Given};
use crate::handler::FrameHandler;
use crate::vni::VniAttachment;

/// A NIC, or a node's end of a VNI, that this worker drives or may be ordered to drive.
pub trait Attached<D: FrameHandler> {
    /// Returns it as the daemon described it.
    fn given(&self) -> &Given;

    /// Returns our side of its relays.
    fn worker(&self) -> &Worker;

    /// Returns the time since which this worker waits for the lease, if it does.
    fn waits(&self) -> Option<Instant>;

    /// Returns the lease word if it differs from the tenure we know, and always while we wait for the lease.
    fn word(&self) -> Option<Input>;

    /// Passes an input to the relay's tables and carries out the actions they name, until no input is left.
    fn hear(&mut self, common: &mut Common, input: Input);

    /// Runs one burst. Returns the number of frames moved.
    fn turn(&mut self, common: &mut Common) -> usize;

    /// Returns whether this worker drives it or could do so at once.
    fn is_ready(&self) -> bool;

    /// Returns whether its frames shall gather now, so that the worker sleeps at once.
    fn gathers(&mut self, _: &mut Common) -> bool {
        false
    }

    /// Arms the bells. Returns whether the worker may sleep.
    fn arm(&mut self, common: &mut Common) -> bool;

    /// Returns how long the worker may sleep before there is work without a bell.
    fn rest(&mut self, common: &mut Common) -> Option<Duration>;

    /// Returns the descriptors that become readable when there is work: a bell, and the source of the programs' frames.
    fn fds<'a>(&'a self, common: &'a Common) -> [Option<BorrowedFd<'a>>; 2];

    /// Ends the sleep that [`arm`](Self::arm) prepared.
    fn wake(&mut self, common: &mut Common);

    /// Runs the checks that are not due once a burst.
    fn now_and_then(&mut self, common: &mut Common);

    /// Returns the captures, which the driver holds while there is one here.
    fn captures<'a>(&'a mut self, common: &'a mut Common) -> &'a mut Option<Box<Captures>>;

    /// Sends its counts to the daemon, if it is driven here.
    fn tell_counts(&mut self, common: &mut Common);

    /// Stops driving it, and leaves it to a successor.
    fn park(&mut self, common: &mut Common);

    /// Returns the descriptor that hangs up when the card's server ends.
    fn line(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Returns whether an order to take is microseconds away.
    fn is_called(&self) -> bool {
        false
    }

    /// Returns whether the lease was passed to a node that has us fenced: the fence is microseconds away.
    fn awaits_fence(&self) -> bool {
        false
    }

    /// Returns whether it is about to move to memory of our own. Only the daemon that ordered this knows of it.
    fn is_apart(&self) -> bool {
        false
    }

    /// Sets the plan for the next order to release.
    fn plan(&mut self, _: Plan) {}

    /// Sets the driver state from which the next order to take goes on.
    fn stored(&mut self, _: Option<OwnedFd>) {}

    /// Returns the end of a VNI, if it is one.
    fn vni(&mut self) -> Option<&mut VniAttachment<D>> {
        None
    }

    /// Returns the number by which the daemon names it.
    fn number(&self) -> u32 {
        self.given().number
    }

    /// Returns whether this worker drives it.
    fn drives(&self) -> bool {
        self.worker().drives()
    }

    /// Returns whether the daemon ordered the worker to leave it.
    fn is_left(&self) -> bool {
        matches!(self.worker().side(), Side::Taker(taker::State::Left))
    }

    /// Returns whether a worker that prepares for it waits for our CPU.
    fn is_awaited(&self) -> bool {
        self.drives() && self.given().lease_page.is_awaited()
    }

    /// Returns whether a taker may poll the lease word without sleeping: only if the driver stays on another CPU than
    /// ours.
    fn may_spin(&self, cpu: Option<u32>) -> bool {
        matches!((self.given().lease_page.driver_cpu(), cpu), (Some(its), Some(ours)) if its != ours)
    }

    /// Looks at the lease word, if that may concern us, and runs one burst. Returns the number of frames moved, or
    /// nothing if this worker does not drive it.
    fn look(&mut self, common: &mut Common) -> Option<usize> {
        if (self.drives() || self.waits().is_some())
            && let Some(word) = self.word()
        {
            self.hear(common, word);
        }
        self.drives().then(|| self.turn(common))
    }
}
