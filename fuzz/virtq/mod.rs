//! Judges of the device's end of a virtqueue.

pub mod memory;
pub mod packed;
pub mod split;

use memory::{Memory, Places};
use tasuki_net::virtq::Head;

/// A chain: what completes it, and the pieces to read and to write.
pub type Taken = (Head, Places, Places);

/// The driver broke a rule.
#[derive(Debug, PartialEq, Eq)]
pub struct Broken;

/// Another device's end of the same ring, in a copy of the same memory.
pub trait Judge {
    type State: Clone;

    /// Looks whether there is a chain that was not taken.
    fn look(&mut self, memory: &Memory) -> Result<bool, Broken>;

    /// Takes the next chain.
    fn take(&mut self, memory: &Memory) -> Result<Option<Taken>, Broken>;

    fn put_back(&mut self, head: Head);

    /// Completes the oldest chain taken.
    fn complete(&mut self, memory: &Memory, head: Head, len: u32);

    /// Shows the completed chains. Returns whether the driver wants an interrupt, or nothing if both answers are right.
    fn show(&mut self, memory: &Memory) -> Option<bool>;

    fn want_kicks(&mut self, memory: &Memory, yes: bool);

    /// Returns the position of the next chain, and that of the next completion.
    fn positions(&self) -> (u16, u16);

    fn state(&self) -> Self::State;

    /// Forgets what was taken and completed since; nothing was shown.
    fn rewind(&mut self, memory: &Memory, to: Self::State);
}
