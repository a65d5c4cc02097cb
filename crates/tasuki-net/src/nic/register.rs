//! A register as a type: where it is, how wide, and what may be done to it.

use std::marker::PhantomData;
use std::time::{Duration, Instant};

use super::NicError;
use super::bus::Registers;

/// Can only be read.
#[derive(Debug)]
pub enum Ro {}
/// Can be read and written.
#[derive(Debug)]
pub enum Rw {}
/// Can only be written; reading it says nothing.
#[derive(Debug)]
pub enum Wo {}

/// What may be read.
pub trait Readable {}
impl Readable for Ro {}
impl Readable for Rw {}

/// What may be written.
pub trait Writable {}
impl Writable for Rw {}
impl Writable for Wo {}

/// The widths of registers.
pub trait Width: Copy {
    /// Reads as many bits at `offset`.
    fn load(registers: &impl Registers, offset: u32) -> Self;
    /// Writes them.
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

/// A register of `W` bits' width and access `A`.
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
    /// The register at `offset` in bytes.
    pub const fn at(offset: u32) -> Self {
        Register { offset, _is: PhantomData }
    }

    /// The same register of a table that begins `base` bytes further on.
    pub const fn after(self, base: u32) -> Self {
        Register::at(base.wrapping_add(self.offset))
    }
}

impl<W: Width, A: Readable> Register<W, A> {
    /// Its value.
    pub fn read(self, registers: &impl Registers) -> W {
        W::load(registers, self.offset)
    }
}

impl<W: Width, A: Writable> Register<W, A> {
    /// Sets it.
    pub fn write(self, registers: &impl Registers, value: W) {
        value.store(registers, self.offset);
    }
}

/// Whoever waits for a card, and gives way to others meanwhile: it may be modelled by a process that needs this CPU.
#[derive(Debug)]
pub struct Waiting(Instant);

impl Waiting {
    /// From now on.
    pub fn begin() -> Self {
        Waiting(Instant::now())
    }

    /// How long it has been.
    pub fn since(&self) -> Duration {
        self.0.elapsed()
    }

    /// Between two looks: spins first, for most cards need no longer; then sleeps. Who yielded instead might not run again before the
    /// next tick (kernels since 6.12).
    pub fn rest(&self) {
        const SPIN: Duration = Duration::from_micros(100);
        const NAP: Duration = Duration::from_micros(50);
        match self.since() {
            since if since > SPIN => std::thread::sleep(NAP),
            _ => std::hint::spin_loop(),
        }
    }
}

/// Waits until `done`, giving way to others meanwhile, and no longer than a card may take.
pub fn wait(step: &'static str, limit_ms: u32, mut done: impl FnMut() -> bool) -> Result<(), NicError> {
    let limit = Duration::from_millis(limit_ms.into());
    let waiting = Waiting::begin();
    loop {
        // Asked before the clock is looked at, so that a machine under load does not make a card look stuck.
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
