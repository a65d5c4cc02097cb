//! The interface between an attachment and its frame handler, for a NIC or an end of a VNI. A handler is a work of
//! the stock worker or a program of the user's own.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use anyhow::Result;
use tasuki_net::port::{Burst, Transactional};
use tasuki_relay::message::Begin;
use tasuki_shm::arena::Arena;

use crate::bundle::Refused;
use crate::lease_page::{Heartbeat, ProgramState};
use crate::tap::Tap;
use crate::uplink::Uplink;

/// Context of a handler while it works on frames of a NIC.
#[derive(Debug)]
pub struct HandlerContext<'a> {
    /// Arena in which the frames lie.
    pub arena: &'a Arena,
    /// Heartbeat page of the worker.
    pub heartbeat: &'a Heartbeat,
    /// Program state of the node.
    pub program_state: &'a ProgramState,
    /// Number of the NIC.
    pub nic: u32,
    /// The node's end of a VNI, if the node is an uplink and this worker drives its end.
    pub uplink: Option<&'a mut Uplink>,
}

/// Maximum number of frames in a taker's first look. Frames that waited are answered sooner this way, and the rest
/// follows right after.
pub const FIRST_LOOK: usize = 8;

/// Handles the frames of one NIC.
///
/// State that must be exact has two copies in the program state. Before each driver call that commits, the handler
/// writes one copy, for the turn that this call ends. A successor reads the copy of the last turn.
pub trait FrameHandler: Sized + 'static {
    /// Description of the work, from the first message.
    type Told;

    /// Reads the work's description from the first message. `tap` is the node's TAP, if it has one.
    ///
    /// # Errors
    /// A sentence: this program does not do that work.
    fn told(begin: &Begin, tap: Option<&'static Tap>) -> Result<Self::Told>;

    /// Creates a handler before anything is known of a predecessor.
    fn new(told: &Self::Told) -> Self;

    /// Checks whether the handler could [go on](Self::go_on), with rings of `ring` descriptors. A predecessor may be
    /// writing to the program state.
    ///
    /// # Errors
    /// The reason why it cannot.
    fn may_go_on(program_state: &ProgramState, nic: u32, turns: Option<u64>, ring: u16) -> Result<(), Refused>;

    /// Goes on where a predecessor stopped that has committed `turns` turns. Without `turns`, goes on from the copy
    /// that was written last: another ledger counts from here on.
    ///
    /// # Errors
    /// This program does not read the program state's contents.
    fn go_on(&mut self, program_state: &ProgramState, nic: u32, turns: Option<u64>) -> Result<(), Refused>;

    /// Writes the program state that is valid once turn number `turn` is committed.
    fn remember(&mut self, program_state: &ProgramState, nic: u32, turn: u64);

    /// Writes the committed state to both copies: another ledger will count when the NIC comes back.
    fn close(&self, program_state: &ProgramState, nic: u32);

    /// Receives a burst and sends a burst. Returns the number of frames moved. Frames left in `burst` stay pending.
    fn turn<N: Transactional>(
        &mut self,
        nic: &mut N,
        context: &mut HandlerContext<'_>,
        burst: &mut Burst,
    ) -> Result<usize, N::Fault>;

    /// Runs a turn of a giver: sends no new frames.
    fn finish<N: Transactional>(
        &mut self,
        nic: &mut N,
        context: &mut HandlerContext<'_>,
        burst: &mut Burst,
    ) -> Result<usize, N::Fault>;

    /// Looks at the rings of a card for the first time after taking it over, at up to [`FIRST_LOOK`] frames; sends
    /// nothing yet.
    fn look<N: Transactional>(
        &mut self,
        nic: &mut N,
        context: &mut HandlerContext<'_>,
        burst: &mut Burst,
    ) -> Result<(), N::Fault>;

    /// Sends the pending frames and receives none. Returns the number of frames sent.
    fn send<N: Transactional>(
        &mut self,
        nic: &mut N,
        context: &mut HandlerContext<'_>,
        burst: &mut Burst,
    ) -> Result<usize, N::Fault>;

    /// Ends the last turn for a successor, which receives the frames in `burst` again.
    fn conclude<N: Transactional>(&mut self, nic: &mut N, burst: &Burst);

    /// Lets go of the slots of frames that were handled. The caller commits that at once.
    fn let_go(&mut self) {}

    /// Drops the pending frames, by order.
    fn drop_hand(&mut self, burst: &mut Burst);

    /// Returns the time until there is work without a received frame. Called before the worker sleeps.
    fn rest(&mut self) -> Option<Duration>;

    /// Returns the descriptor that becomes readable when there is something to send.
    fn bell(&self) -> Option<BorrowedFd<'static>> {
        None
    }

    /// Returns whether the handler can work now. A handler that joins a NIC and an end cannot work without the other
    /// of the two, and then does not look for frames. `has_end` says whether this worker drives an uplink's end.
    fn can_work(&self, _has_end: bool) -> bool {
        true
    }

    /// Returns whether pending frames were made here. A successor finds such frames nowhere, so a giver has to send
    /// them before it releases the NIC.
    fn holds_its_own(&self) -> bool {
        false
    }

    /// Returns the handler's own counts, by name.
    fn counts(&self) -> Vec<(String, u64)>;
}
