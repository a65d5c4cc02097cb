//! What an attachment asks of whatever handles the frames of its NIC, or of its end of a VNI: the works of the stock worker, or a program of the user's own.

use std::cell::RefCell;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use anyhow::Result;
use tasuki_net::port::{Burst, Transactional};
use tasuki_relay::message::Begin;
use tasuki_shm::arena::Arena;

use crate::bundle::Refused;
use crate::lease_page::{Heartbeat, ProgramState};
use crate::tap::Tap;
use crate::vni::Joint;

/// What there is on a worker's handler context while it handles frames of a NIC.
#[derive(Debug, Clone, Copy)]
pub struct HandlerContext<'a> {
    /// Where frames lie.
    pub arena: &'a Arena,
    /// Of the worker.
    pub heartbeat: &'a Heartbeat,
    /// Of the node.
    pub program_state: &'a ProgramState,
    /// The NIC's number.
    pub nic: u32,
    /// The node's end of a VNI, if the node is an uplink and its end is driven here.
    pub joint: Option<&'a RefCell<Joint>>,
}

/// Frames that a taker handles at first, at most: what waited is answered the sooner, and the rest comes right after.
pub const FIRST_LOOK: usize = 8;

/// Handling the frames of one NIC.
///
/// What must be remembered exactly stands in the program state in two copies: one is written before each call of the driver that commits, for the turn
/// that this call ends. A successor reads the copy of the last turn.
pub trait FrameHandler: Sized {
    /// What the worker was told of it.
    type Told;

    /// What the first message says of it, and the node's TAP, if it has one.
    ///
    /// # Errors
    /// A sentence: it is not what this program does.
    fn told(begin: &Begin, tap: Option<&'static Tap>) -> Result<Self::Told>;

    /// Before anything is known of a predecessor.
    fn new(told: &Self::Told) -> Self;

    /// Whether it could [go on](Self::go_on), with rings of so many descriptors. A predecessor may be writing into the program state.
    ///
    /// # Errors
    /// It cannot, and why.
    fn may_go_on(program_state: &ProgramState, nic: u32, turns: Option<u64>, ring: u16) -> Result<(), Refused>;

    /// Goes on where a predecessor stopped, of whom `turns` were committed; without, from what was written last: another ledger counts from here on.
    ///
    /// # Errors
    /// What stands in the program state is not read by this program.
    fn go_on(&mut self, program_state: &ProgramState, nic: u32, turns: Option<u64>) -> Result<(), Refused>;

    /// Writes into the program state what is true once turn number `turn` is committed.
    fn remember(&mut self, program_state: &ProgramState, nic: u32, turn: u64);

    /// Writes what is committed into both copies: another ledger will count when the NIC comes back.
    fn close(&self, program_state: &ProgramState, nic: u32);

    /// One burst in and one out; says how many frames moved. What stands in `burst` afterwards is in hand.
    fn turn<N: Transactional>(
        &mut self,
        nic: &mut N,
        context: &HandlerContext<'_>,
        burst: &mut Burst,
    ) -> Result<usize, N::Fault>;

    /// The same, of who is to let go: nothing new is sent.
    fn finish<N: Transactional>(
        &mut self,
        nic: &mut N,
        context: &HandlerContext<'_>,
        burst: &mut Burst,
    ) -> Result<usize, N::Fault>;

    /// The first look at the rings of a card that was taken over, at [`FIRST_LOOK`] frames: nothing is sent yet.
    fn look<N: Transactional>(
        &mut self,
        nic: &mut N,
        context: &HandlerContext<'_>,
        burst: &mut Burst,
    ) -> Result<(), N::Fault>;

    /// Sends what is in hand, and takes nothing in; says how many frames went.
    fn send<N: Transactional>(
        &mut self,
        nic: &mut N,
        context: &HandlerContext<'_>,
        burst: &mut Burst,
    ) -> Result<usize, N::Fault>;

    /// Ends the last turn, for a successor: what is in `burst` it receives again.
    fn conclude<N: Transactional>(&mut self, nic: &mut N, burst: &Burst);

    /// What is in hand is dropped, by order.
    fn drop_hand(&mut self, burst: &mut Burst);

    /// How long until there is something to do though nothing comes.
    fn rest(&self) -> Option<Duration>;

    /// What becomes readable when there is something to send.
    fn bell(&self) -> Option<BorrowedFd<'static>> {
        None
    }

    /// Whether it does anything now: without the other of two that it joins there is nothing to be done, and nothing is looked at.
    fn can_work(&self, _: &HandlerContext<'_>) -> bool {
        true
    }

    /// Whether what is in hand was made here: a successor finds it nowhere, and whoever lets go has to send it before.
    fn holds_its_own(&self) -> bool {
        false
    }

    /// What it has counted itself, by name.
    fn counts(&self) -> Vec<(String, u64)>;
}
