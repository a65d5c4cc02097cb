//! A port: where frames enter or leave. A NIC's queues, a node's end of a VNI, and later a guest's virtqueues.
//!
//! Frames travel in bursts of slots. Nothing is copied, allocated or logged on the way; what goes wrong with one frame is counted.

use std::os::fd::BorrowedFd;

use arrayvec::ArrayVec;
use tasuki_shm::arena::Slot;

use crate::nic::Mac;

/// Most frames in a burst.
pub const BURST_MAX: usize = 32;

/// Frames that travel together, oldest first.
pub type Burst = ArrayVec<Frame, BURST_MAX>;

/// An Ethernet frame, without its check sequence: the first `len` bytes of a slot.
#[derive(Debug)]
pub struct Frame {
    /// Where it lies.
    pub slot: Slot,
    /// Bytes of it.
    pub len: u16,
}

impl Frame {
    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.slot.bytes()[..self.len.into()]
    }
}

/// Whether a port that was armed will wake whoever drives it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a port that is `Busy` will not wake you"]
pub enum Armed {
    /// No frame is there: the port's descriptor becomes readable when one comes.
    Idle,
    /// Frames are there already.
    Busy,
}

/// Where frames enter or leave. Used by one thread at a time.
pub trait Port {
    /// Why the port does not work any more: its device is gone, or does what no such device does.
    type Fault: std::error::Error;

    /// Appends frames that have come, as many as there are and fit into `burst`; says how many. Does not wait.
    #[inline]
    fn receive(&mut self, burst: &mut Burst) -> Result<usize, Self::Fault> {
        self.receive_some(burst, BURST_MAX)
    }

    /// The same, of `most` frames at most: for whoever has something to do before the rest.
    fn receive_some(&mut self, burst: &mut Burst, most: usize) -> Result<usize, Self::Fault>;

    /// Takes frames from the front of `burst`, as many as there is room for; says how many. The rest stays, in order.
    fn transmit(&mut self, burst: &mut Burst) -> Result<usize, Self::Fault>;

    /// Says that whoever drives the port is about to sleep, and looks once more. Afterwards the port is received from as
    /// ever; whoever was woken need not say so.
    fn arm(&mut self) -> Result<Armed, Self::Fault>;

    /// The descriptor that becomes readable when a frame comes to an [armed](Self::arm) port.
    fn fd(&self) -> BorrowedFd<'_>;
}

/// A port whose driver can be replaced at any time, and killed: what it has done it has done wholly or not at all, in *turns*.
///
/// What was handled is committed by this rule: *a received frame is in hand as long as it stands in the burst that is passed to
/// [`receive`](Port::receive) or [`transmit`](Port::transmit); at the beginning of the one and at the end of the other, all others that were received
/// count as handled* (and when a port is [armed](Port::arm) that cannot receive otherwise, all of them), and that is committed together with what was
/// given to the port. What is not committed when the driver ends a successor receives again. Up to then nobody writes to the slot of a frame that was
/// received and let go, and who changes a frame [saves](Self::save) it before.
pub trait Transactional: Port {
    /// The address by which frames come to this port.
    fn station(&self) -> Mac;

    /// Ends the last turn: all that was received is handled but what is `in_hand`, which a successor receives again; and what the port was given has
    /// arrived there. Up to the next call of anything else a successor may go on, and once one has, nothing may be called any more.
    fn conclude(&mut self, in_hand: &Burst);

    /// The same without ending the turn: it does not happen, and a successor receives again what came in it. What was committed before has arrived.
    fn withdraw(&mut self);

    /// Keeps the first [`SAVED_LEN`](crate::nic::ledger::SAVED_LEN) bytes of a frame that was received and is about to be changed in place: should we
    /// die before it is handled, a successor receives what had come.
    fn save(&mut self, frame: &Frame);

    /// Whether all frames of a burst would be taken by the next [`transmit`](Port::transmit) of it, and committed by that in one. Commits nothing.
    fn takes(&mut self, burst: &Burst) -> bool;

    /// How often was committed what is handled or given; one call does that at most once. Somebody who must remember exactly what it has done keeps two
    /// copies, and writes the one of the next number's parity before the call that commits: a successor finds that of this number valid.
    fn turns(&self) -> u64;

    /// Frames that were given to the port, by all its drivers.
    fn given(&self) -> u64;
}
