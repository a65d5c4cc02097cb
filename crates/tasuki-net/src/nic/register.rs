//! A register as a type: its offset, its width, and the accesses that it allows.

use std::marker::PhantomData;
use std::time::{Duration, Instant};

use super::NicError;
use super::bus::Registers;

/// Access of a register that can only be read.
#[derive(Debug)]
pub enum Ro {}
/// Access of a register that can be read and written.
#[derive(Debug)]
pub enum Rw {}
/// Access of a register that can only be written; the value read from it has no meaning.
#[derive(Debug)]
pub enum Wo {}

/// Accesses that allow reading.
pub trait Readable {}
impl Readable for Ro {}
impl Readable for Rw {}

/// Accesses that allow writing.
pub trait Writable {}
impl Writable for Rw {}
impl Writable for Wo {}

/// Integer types with the width of a register.
pub trait Width: Copy {
    /// Reads a value of this width at `offset`, in bytes.
    fn load(registers: &impl Registers, offset: u32) -> Self;
    /// Writes the value at `offset`, in bytes.
    fn store(self, registers: &impl Registers, offset: u32);
}

impl Width for u8 {
    fn load(registers: &impl Registers, offset: u32) -> u8 {
        registers.read8(offset)
    }
    fn store(self, registers: &impl Registers, offset: u32) {
        registers.write8(offset, self);
    }
}

impl Width for u16 {
    fn load(registers: &impl Registers, offset: u32) -> u16 {
        registers.read16(offset)
    }
    fn store(self, registers: &impl Registers, offset: u32) {
        registers.write16(offset, self);
    }
}

impl Width for u32 {
    fn load(registers: &impl Registers, offset: u32) -> u32 {
        registers.read32(offset)
    }
    fn store(self, registers: &impl Registers, offset: u32) {
        registers.write32(offset, self);
    }
}

/// A register of width `W` and access `A`.
#[derive(Debug)]
pub struct Register<W, A> {
    offset: u32,
    _is: PhantomData<(W, A)>,
}

impl<W, A> Clone for Register<W, A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<W, A> Copy for Register<W, A> {}

impl<W, A> Register<W, A> {
    /// Returns the register at `offset`, in bytes.
    pub const fn at(offset: u32) -> Self {
        Register { offset, _is: PhantomData }
    }

    /// Returns the same register of a table that begins `base` bytes further on.
    pub const fn after(self, base: u32) -> Self {
        Register::at(base.wrapping_add(self.offset))
    }
}

impl<W: Width, A: Readable> Register<W, A> {
    /// Reads the register.
    pub fn read(self, registers: &impl Registers) -> W {
        W::load(registers, self.offset)
    }
}

impl<W: Width, A: Writable> Register<W, A> {
    /// Writes `value` to the register.
    pub fn write(self, registers: &impl Registers, value: W) {
        value.store(registers, self.offset);
    }
}

/// A wait for a card. It yields to other processes meanwhile: a process that models the card may need this CPU.
#[derive(Debug)]
pub struct Waiting(Instant);

impl Waiting {
    /// Starts the wait now.
    pub fn begin() -> Self {
        Waiting(Instant::now())
    }

    /// Returns how long the wait has lasted.
    pub fn since(&self) -> Duration {
        self.0.elapsed()
    }

    /// Pauses between two polls. Spins first, for most cards need no longer; then sleeps. A process that yielded
    /// instead might not run again before the next tick (kernels since 6.12).
    pub fn rest(&self) {
        const SPIN: Duration = Duration::from_micros(100);
        const NAP: Duration = Duration::from_micros(50);
        match self.since() {
            since if since > SPIN => std::thread::sleep(NAP),
            _ => std::hint::spin_loop(),
        }
    }
}

/// Waits until `done`, yielding to other processes meanwhile.
///
/// # Errors
/// [`NicError::Stuck`] if it takes longer than `limit_ms` milliseconds.
pub fn wait(step: &'static str, limit_ms: u32, mut done: impl FnMut() -> bool) -> Result<(), NicError> {
    let limit = Duration::from_millis(limit_ms.into());
    let waiting = Waiting::begin();
    loop {
        // Read the clock before the poll, so that a machine under load does not make a card look stuck.
        let late = waiting.since() >= limit;
        if done() {
            return Ok(());
        }
        if late {
            return Err(NicError::Stuck { step, limit_ms });
        }
        waiting.rest();
    }
}
