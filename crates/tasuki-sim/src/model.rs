//! What the model of a card is to whoever serves it, and what it reaches.

use std::fmt::Debug;

use crate::journal::Journal;
use crate::wire::Wire;

/// The card was sent to memory that it cannot reach.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unmapped {
    /// Where.
    pub at: u64,
}

/// An interrupt that leaves the card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interrupt {
    /// The message of an MSI-X vector.
    MsiX(u16),
    /// The message of MSI.
    Msi,
    /// The level of the interrupt line.
    IntX(bool),
}

/// What the card reaches by its bus.
pub trait Host {
    /// Reads memory. Nothing of `into` means anything if it fails.
    fn read(&mut self, at: u64, into: &mut [u8]) -> Result<(), Unmapped>;

    /// Writes memory. What an earlier call wrote is seen before this.
    fn write(&mut self, at: u64, bytes: &[u8]) -> Result<(), Unmapped>;

    /// Reads 16 bits at once, at a multiple of two. What is read later is not older.
    fn read16(&mut self, at: u64) -> Result<u16, Unmapped>;

    /// Writes 16 bits at once, at a multiple of two. What an earlier call wrote is seen before this.
    fn write16(&mut self, at: u64, value: u16) -> Result<(), Unmapped>;

    /// Raises an interrupt.
    fn interrupt(&mut self, interrupt: Interrupt);
}

/// A card: a state machine that is given register accesses, frames and the time. Times are nanoseconds since it was made.
pub trait Model {
    /// What is behind one of its BARs.
    type Bar: Debug + Copy + Send;

    /// MSI-X interrupts that it has.
    const VECTORS: u16;

    /// What is behind BAR `index` for a driver, and how many bytes.
    fn bar(index: u8) -> Option<(Self::Bar, u32)>;

    /// Registers behind BAR 0 that a driver writes for every burst and whose values change each time, and what they hold.
    fn tails(&self) -> impl Iterator<Item = (u32, u32)>;

    /// Reads `width` (1, 2 or 4) bytes of the configuration space.
    fn read_config(&mut self, offset: u32, width: u8, now: u64) -> u32;

    /// Writes `width` (1, 2 or 4) bytes of the configuration space.
    fn write_config(&mut self, offset: u32, width: u8, value: u32, now: u64);

    /// Reads `width` (1, 2 or 4) bytes behind a BAR.
    fn read(&mut self, bar: Self::Bar, offset: u32, width: u8, now: u64) -> u32;

    /// Writes `width` (1, 2 or 4) bytes behind a BAR.
    fn write(&mut self, bar: Self::Bar, offset: u32, width: u8, value: u32, now: u64);

    /// Does what is to be done now, a bounded amount of it; says whether there was anything.
    fn step(&mut self, host: &mut impl Host, wire: &mut impl Wire, now: u64) -> bool;

    /// It will not be stepped for a while: asks to be told of work, if its driver tells of that only on request, and looks once more.
    /// Says whether there is work already.
    fn doze(&mut self, host: &mut impl Host) -> bool;

    /// As when power comes on, or the bus is reset.
    fn reset(&mut self, now: u64);

    /// Whether frames can pass and the driver takes them.
    fn receives(&self) -> bool;

    /// What a driver did that it must not do.
    fn journal(&self) -> &Journal;

    /// Frames that the wire brought for a driver and the card did not keep: why not, and how many.
    fn dropped(&self) -> Vec<(&'static str, u64)>;
}
