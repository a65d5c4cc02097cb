//! A port: where frames enter or leave. A NIC's queues, and later a VNI, a guest's virtqueues, a TAP.
//!
//! Frames travel in bursts of slots. Nothing is copied, allocated or logged on the way; what goes wrong with one frame is counted.

use std::os::fd::BorrowedFd;

use arrayvec::ArrayVec;
use tasuki_shm::arena::Slot;

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
    fn receive(&mut self, burst: &mut Burst) -> Result<usize, Self::Fault>;

    /// Takes frames from the front of `burst`, as many as there is room for; says how many. The rest stays, in order.
    fn transmit(&mut self, burst: &mut Burst) -> Result<usize, Self::Fault>;

    /// Says that whoever drives the port is about to sleep, and looks once more. Afterwards the port is received from as
    /// ever; whoever was woken need not say so.
    fn arm(&mut self) -> Result<Armed, Self::Fault>;

    /// The descriptor that becomes readable when a frame comes to an [armed](Self::arm) port.
    fn fd(&self) -> BorrowedFd<'_>;
}
