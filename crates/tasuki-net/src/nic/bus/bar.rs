//! Registers of a BAR. Some parts are mapped; the others are accessed through [`Far`].

use super::mmio::{Mmio, Register};
use super::{Registers, one_by_one};

/// Access to the parts of a BAR that are not mapped. It handles only whole registers inside the BAR.
pub trait Far {
    /// Reads `into.len()` bytes, at most `BLOCK_MAX`. Returns whether the device answered.
    fn read(&self, offset: u32, into: &mut [u8]) -> bool;

    /// Reads the 32-bit words at these offsets, and does the `writes` before the `nth` read. Returns `None` if this
    /// is not faster than single accesses, or if any read got no answer.
    fn read_around<const N: usize>(&self, _offsets: [u32; N], _nth: usize, _writes: &[(u32, u32)]) -> Option<[u32; N]> {
        None
    }

    /// Writes a register. The caller does not learn whether the write arrived.
    fn write(&self, offset: u32, bytes: &[u8]);

    /// Lets later writes wait until the next read, or until [`uncork`](Self::uncork).
    fn cork(&self) {}

    /// Sends the writes that wait.
    fn uncork(&self) {}

    /// Returns whether a write may not have arrived yet.
    fn is_behind(&self) -> bool {
        true
    }

    /// Notes that every write of other drivers has arrived.
    fn settled(&self) {}
}

/// Maximum number of bytes of registers read in one go.
pub(super) const BLOCK_MAX: usize = 512;

/// A mapped part of a BAR.
#[derive(Debug)]
struct Window {
    start: u32,
    mmio: Mmio,
}

/// Registers of a BAR.
#[derive(Debug)]
pub struct Bar<F> {
    far: F,
    len: u32,
    windows: Box<[Window]>,
}

impl<F: Far> Bar<F> {
    /// Returns a BAR of `len` bytes. Calls `map` for each of the `areas` that could be mapped; areas that it
    /// declines are accessed through `far`.
    pub(super) fn new(far: F, len: u64, areas: &[(u64, u64)], mut map: impl FnMut(u64, u32) -> Option<Mmio>) -> Self {
        let windows = areas.iter().filter_map(|&(start, len)| {
            let mmio = map(start, u32::try_from(len).ok()?)?;
            Some(Window { start: u32::try_from(start).ok()?, mmio })
        });
        let windows = windows.collect();
        // Register offsets have 32 bits, so bytes beyond that are unreachable.
        Bar { far, len: u32::try_from(len).unwrap_or(u32::MAX), windows }
    }

    /// Returns whether an access of `size` bytes at `offset` is a load or a store in mapped memory.
    pub fn is_mapped(&self, offset: u32, size: u32) -> bool {
        self.window(offset, size).is_some()
    }

    #[inline]
    fn window(&self, offset: u32, size: u32) -> Option<(&Mmio, u32)> {
        self.windows.iter().find_map(|window| {
            let at = offset.checked_sub(window.start)?;
            (at.checked_add(size)? <= window.mmio.len()).then_some((&window.mmio, at))
        })
    }

    fn is_register(&self, offset: u32, size: u32) -> bool {
        offset.is_multiple_of(size) && offset.checked_add(size).is_some_and(|end| end <= self.len)
    }

    #[inline]
    fn load<T: Register>(&self, offset: u32) -> T {
        if let Some((mmio, at)) = self.window(offset, T::SIZE) {
            return mmio.load(at).unwrap_or(T::ONES);
        }
        let mut bytes = [0; 4];
        let bytes = &mut bytes[..T::SIZE as usize];
        // As on a real bus, a read without an answer returns ones.
        if self.is_register(offset, T::SIZE) && self.far.read(offset, bytes) { T::from_le(bytes) } else { T::ONES }
    }

    #[inline]
    fn store<T: Register>(&self, offset: u32, value: T) {
        match self.window(offset, T::SIZE) {
            Some((mmio, at)) => mmio.store(at, value),
            None if self.is_register(offset, T::SIZE) => self.far.write(offset, &value.to_le()[..T::SIZE as usize]),
            None => {}
        }
    }
}

impl<F: Far> Registers for Bar<F> {
    fn read_block(&self, offset: u32, into: &mut [u32]) {
        let mut bytes = [0; BLOCK_MAX];
        let len = 4 * into.len();
        let fits = u32::try_from(len).is_ok_and(|len| offset.checked_add(len).is_some_and(|end| end <= self.len));
        if fits && len <= BLOCK_MAX && self.window(offset, 4).is_none() && self.far.read(offset, &mut bytes[..len]) {
            let (words, _) = bytes.as_chunks();
            return into.iter_mut().zip(words).for_each(|(value, word)| *value = u32::from_le_bytes(*word));
        }
        // The registers are mapped, or the device answers for only one register at a time.
        (0..).zip(into).for_each(|(index, value)| *value = self.read32(offset + 4 * index));
    }

    fn read_around<const N: usize>(&self, offsets: [u32; N], nth: usize, writes: &[(u32, u32)]) -> [u32; N] {
        let is_far = |&offset: &u32| self.window(offset, 4).is_none() && self.is_register(offset, 4);
        if offsets.iter().chain(writes.iter().map(|(offset, _)| offset)).all(is_far)
            && let Some(values) = self.far.read_around(offsets, nth, writes)
        {
            return values;
        }
        // See above.
        one_by_one(self, offsets, nth, writes)
    }

    fn together<T>(&self, access: impl FnOnce() -> T) -> T {
        self.far.cork();
        let outcome = access();
        self.far.uncork();
        outcome
    }

    fn is_behind(&self) -> bool {
        !self.windows.is_empty() || self.far.is_behind()
    }

    fn settled(&self) {
        self.far.settled();
    }

    #[inline]
    fn read8(&self, offset: u32) -> u8 {
        self.load(offset)
    }

    #[inline]
    fn read16(&self, offset: u32) -> u16 {
        self.load(offset)
    }

    #[inline]
    fn read32(&self, offset: u32) -> u32 {
        self.load(offset)
    }

    #[inline]
    fn write8(&self, offset: u32, value: u8) {
        self.store(offset, value);
    }

    #[inline]
    fn write16(&self, offset: u32, value: u16) {
        self.store(offset, value);
    }

    #[inline]
    fn write32(&self, offset: u32, value: u32) {
        self.store(offset, value);
    }
}
