//! The interface between the model of a card, its server, and the host that the card reaches.

use std::fmt::Debug;

use crate::journal::Journal;
use crate::wire::Wire;

/// The card accessed memory that it cannot reach.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unmapped {
    /// First address that the card cannot reach.
    pub at: u64,
}

/// An interrupt that the card raises.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interrupt {
    /// The message of the MSI-X vector with this number.
    MsiX(u16),
    /// The message of MSI.
    Msi,
    /// The new level of the interrupt line, true for asserted.
    IntX(bool),
}

/// The host as the card reaches it over its bus.
pub trait Host {
    /// Reads memory. On an error the contents of `into` are undefined.
    fn read(&mut self, at: u64, into: &mut [u8]) -> Result<(), Unmapped>;

    /// Writes memory. Readers see the writes of earlier calls before this one.
    fn write(&mut self, at: u64, bytes: &[u8]) -> Result<(), Unmapped>;

    /// Reads 16 bits at once, at a multiple of two. Later reads return data at least as new.
    fn read16(&mut self, at: u64) -> Result<u16, Unmapped>;

    /// Writes 16 bits at once, at a multiple of two. Readers see the writes of earlier calls before this one.
    fn write16(&mut self, at: u64, value: u16) -> Result<(), Unmapped>;

    fn interrupt(&mut self, interrupt: Interrupt);
}

/// A card: a state machine whose inputs are register accesses, frames and the time. Times are nanoseconds since the
/// model was made.
pub trait Model {
    /// Kind of a BAR.
    type Bar: Debug + Copy + Send;

    /// Number of MSI-X vectors.
    const VECTORS: u16;

    /// Returns the kind and length in bytes of BAR `index` as a driver sees it.
    fn bar(index: u8) -> Option<(Self::Bar, u32)>;

    /// Returns offset and present value of the registers behind BAR 0 that a driver writes for every burst, with
    /// another value each time.
    fn tails(&self) -> impl Iterator<Item = (u32, u32)>;

    /// Reads `width` (1, 2 or 4) bytes of the configuration space.
    fn read_config(&mut self, offset: u32, width: u8, now: u64) -> u32;

    /// Writes `width` (1, 2 or 4) bytes of the configuration space.
    fn write_config(&mut self, offset: u32, width: u8, value: u32, now: u64);

    /// Reads `width` (1, 2 or 4) bytes behind a BAR.
    fn read(&mut self, bar: Self::Bar, offset: u32, width: u8, now: u64) -> u32;

    /// Writes `width` (1, 2 or 4) bytes behind a BAR.
    fn write(&mut self, bar: Self::Bar, offset: u32, width: u8, value: u32, now: u64);

    /// Plugs in (the initial state) or pulls out the other end of the cable.
    fn set_partner(&mut self, there: bool);

    /// Does the work that is due now, a bounded amount of it; returns whether there was any.
    fn step(&mut self, host: &mut impl Host, wire: &mut impl Wire, now: u64) -> bool;

    /// Prepares for a pause without steps: requests notifications, if the driver sends them only on request, and
    /// looks for work once more. Returns whether there is work already.
    fn doze(&mut self, host: &mut impl Host) -> bool;

    /// Resets the card as power-on or a bus reset does.
    fn reset(&mut self, now: u64);

    /// Returns whether frames can pass and the driver accepts them.
    fn receives(&self) -> bool;

    /// Returns the record of rules that the driver broke.
    fn journal(&self) -> &Journal;

    /// Returns the frames from the wire that the card dropped: each reason, with the number of frames.
    fn dropped(&self) -> Vec<(&'static str, u64)>;
}
