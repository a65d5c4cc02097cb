//! A port: where frames enter or leave. A NIC's queues, a node's end of a VNI, and later a guest's virtqueues.
//!
//! Frames travel in bursts of slots. The path neither copies, allocates nor logs; it counts each frame that fails.

use std::os::fd::BorrowedFd;

use arrayvec::ArrayVec;
use tasuki_shm::arena::Slot;

use crate::nic::Mac;

/// Maximum number of frames in a burst.
pub const BURST_MAX: usize = 32;

/// Frames that travel together, oldest first.
pub type Burst = ArrayVec<Frame, BURST_MAX>;

/// An Ethernet frame, without its check sequence: the first `len` bytes of a slot.
#[derive(Debug)]
pub struct Frame {
    /// Slot that holds the frame from its first byte on.
    pub slot: Slot,
    /// Length of the frame in bytes.
    pub len: u16,
}

impl Frame {
    /// Returns the bytes of the frame.
    pub fn bytes(&self) -> &[u8] {
        &self.slot.bytes()[..self.len.into()]
    }
}

/// Whether an armed port will wake the thread that drives it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a port that is `Busy` will not wake you"]
pub enum Armed {
    /// No frame is there. The port's descriptor becomes readable when one arrives.
    Idle,
    /// Frames are there already.
    Busy,
}

/// A place where frames enter or leave. One thread at a time uses it.
pub trait Port {
    /// Why the port stopped working: its device is gone, or does what no such device does.
    type Fault: std::error::Error;

    /// Appends to `burst` the frames that have arrived, as many as fit. Returns their number. Does not wait.
    #[inline]
    fn receive(&mut self, burst: &mut Burst) -> Result<usize, Self::Fault> {
        self.receive_some(burst, BURST_MAX)
    }

    /// Like [`receive`](Self::receive), but takes at most `most` frames: for a caller that has other work before the
    /// rest.
    fn receive_some(&mut self, burst: &mut Burst, most: usize) -> Result<usize, Self::Fault>;

    /// Takes frames from the front of `burst`, as many as the port has room for. Returns their number. The rest stays,
    /// in order.
    fn transmit(&mut self, burst: &mut Burst) -> Result<usize, Self::Fault>;

    /// Prepares the port for the caller's sleep and looks for frames once more. Afterwards the caller receives as ever;
    /// it need not tell the port that it woke.
    fn arm(&mut self) -> Result<Armed, Self::Fault>;

    /// Returns the descriptor that becomes readable when a frame arrives at an [armed](Self::arm) port.
    fn fd(&self) -> BorrowedFd<'_>;
}

/// A port whose driver can be replaced or killed at any time. It works in *turns*: each turn happens wholly or not at
/// all.
///
/// The commit rule: *frames left in the burst stay pending. [`receive`](Port::receive) commits all other received
/// frames as handled when it starts; [`transmit`](Port::transmit), when it returns.* [Arming](Port::arm) a port that
/// cannot receive otherwise commits them all. The same commit covers the frames given to the port. If the driver ends,
/// a successor receives every uncommitted frame again. Until the commit, the slot of a received frame that the caller
/// let go stays unwritten. A caller that changes a frame must [save](Self::save) it first.
pub trait Transactional: Port {
    /// Returns the Ethernet address under which this port receives frames.
    fn station(&self) -> Mac;

    /// Ends the last turn. Commits all received frames as handled except those in `in_hand`, which a successor receives
    /// again. All frames given to the port have arrived there. Until the next call of any method, a successor may take
    /// over; once one has, the caller must not call the port again.
    fn conclude(&mut self, in_hand: &Burst);

    /// Like [`conclude`](Self::conclude), but cancels the turn: a successor receives the turn's frames again. Earlier
    /// commits have arrived.
    fn withdraw(&mut self);

    /// Keeps the first [`SAVED_LEN`](crate::nic::ledger::SAVED_LEN) bytes of a received frame that the caller is about
    /// to change in place. If the driver dies before the frame is handled, a successor receives the original.
    fn save(&mut self, frame: &Frame);

    /// Returns whether the next [`transmit`](Port::transmit) of `burst` would take all its frames and commit them at
    /// once. Commits nothing.
    fn takes(&mut self, burst: &Burst) -> bool;

    /// Returns how often handled or given frames were committed so far. One call commits them at most once.
    ///
    /// A program that must remember exactly what it did keeps two copies of its state. Before the call that commits, it
    /// writes the copy of the next number's parity. A successor uses the copy of this number's parity.
    fn turns(&self) -> u64;

    /// Returns the number of frames that all its drivers gave to the port.
    fn given(&self) -> u64;
}
