//! The driver's end of a split virtqueue (virtio 1.2, §2.7).
//!
//! # Rules
//!
//! - **V1** The driver remembers what it published where the device cannot write: its own index, how many chains are
//!   out, and (in [`super::chains`]) which. It reads nothing back from memory that the device can write.
//! - **V2** The driver loads once what the device writes, checks it against V1, then uses it. A successor checks again
//!   what it reads, whatever its predecessor saw there.
//! - **V3** Indices are counted in 64 bits and never wrap; the device sees the low 16.
//!
//! # Orderings
//!
//! - **AVAILABLE** our index: stored (release) after the descriptors and entries that it covers.
//! - **USED** the device's index: loaded (acquire) before the entries that it covers, and the frames that they
//!   announce.
//! - **EVENT** a full fence between publishing an index or a wish and looking at what the other side has published
//!   meanwhile, so that at least one side sees the other (§2.7.7, §2.7.13.4.1).

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU32, AtomicU64, fence};

use tasuki_shm::region::Span;

use super::driver_state::Cursor;
use crate::nic::bus::Iova;
use crate::nic::{NicError, NicMemory};

/// Alignment in bytes of the parts of a ring: a cache line.
const LINE_LEN: usize = 64;

/// In a descriptor: the chain goes on.
pub const NEXT: u16 = 1;
/// In a descriptor: the device writes.
pub const WRITE: u16 = 2;
/// In the flags of the available ring: no interrupts.
const NO_INTERRUPT: u16 = 1;
/// In the flags of the used ring: no notifications.
const NO_NOTIFY: u32 = 1;

/// Places of the parts of a ring, in the rings' region.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    descriptors: usize,
    available: usize,
    used: usize,
    /// Offset one past the last byte.
    pub end: usize,
}

impl Place {
    /// Places a ring of `size` descriptors at byte `at` (a multiple of 64).
    pub fn new(at: usize, size: u16) -> Self {
        let size = usize::from(size);
        let available = at + 16 * size;
        let used = (available + 6 + 2 * size).next_multiple_of(LINE_LEN);
        Place { descriptors: at, available, used, end: (used + 6 + 8 * size).next_multiple_of(LINE_LEN) }
    }

    /// Returns the addresses of the parts for the device: descriptors, available ring, used ring.
    pub fn addresses(&self, memory: &NicMemory) -> [Iova; 3] {
        self.addresses_from(memory.rings_at())
    }

    /// Like [`addresses`](Self::addresses), for a rings' region that begins at `rings_at`.
    pub fn addresses_from(&self, rings_at: Iova) -> [Iova; 3] {
        [self.descriptors, self.available, self.used].map(|at| rings_at + at as u64)
    }
}

/// A chain that the device has used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Used {
    /// Its first descriptor, as the device claims.
    pub head: u32,
    /// Number of bytes that the device claims to have written.
    pub len: u32,
}

/// The driver's end of a split virtqueue.
#[derive(Debug)]
pub struct SplitRing {
    /// Two words each: address; length, flags and next.
    descriptors: Span<AtomicU64>,
    /// Flags and index; entries of 16 bits; the index at which we want an interrupt.
    available: Span<AtomicU32>,
    /// Flags and index; entries of two words; the index at which the device wants a notification.
    used: Span<AtomicU32>,
    size: u16,
    /// Whether event indices are negotiated, instead of flags.
    event_index: bool,
    flags: u16,
    /// Our index: number of chains made available so far.
    available_index: u64,
    /// Our index as the device was last shown it.
    shown: u64,
    /// Our index when the device was last notified or did not want to be.
    notified: u64,
    /// Number of used chains that we have taken back.
    used_index: u64,
    /// The device's index as last checked.
    claimed: u64,
}

impl SplitRing {
    /// Opens a ring that continues at `cursor`. Changes nothing in it.
    pub fn new(memory: &NicMemory, place: Place, size: u16, event_index: bool, cursor: Cursor) -> Self {
        let fits = "the layout was checked against the region";
        let words = usize::from(size);
        SplitRing {
            descriptors: memory.rings().span(place.descriptors, 2 * words).expect(fits),
            available: memory.rings().span(place.available, 2 + words / 2).expect(fits),
            used: memory.rings().span(place.used, 2 + 2 * words).expect(fits),
            size,
            event_index,
            flags: if event_index { 0 } else { NO_INTERRUPT },
            available_index: cursor.available,
            shown: cursor.available,
            notified: cursor.available,
            used_index: cursor.used,
            claimed: cursor.used,
        }
    }

    /// Assumes that a predecessor asked for an interrupt and may sleep: the request holds until the next
    /// [`disarm`](Self::disarm).
    pub fn armed(mut self) -> Self {
        self.flags = 0;
        self
    }

    /// Returns the indices at which a successor continues.
    #[inline]
    pub fn cursor(&self) -> Cursor {
        Cursor { available: self.available_index, used: self.used_index }
    }

    /// Returns our index as the device was last shown it.
    #[inline]
    pub fn shown(&self) -> u64 {
        self.shown
    }

    /// Prepares a ring that the device does not know to begin with the entry at index `base` (a multiple of 2¹⁶). Puts
    /// the used chains in `come`, with the bytes written, into the used ring before it.
    pub fn begin_at(&mut self, base: u64, come: impl ExactSizeIterator<Item = Used>) {
        self.used.iter().for_each(|word| word.store(0, Relaxed));
        let first = base - come.len() as u64;
        for (index, Used { head, len }) in (first..).zip(come) {
            let entry = self.used_entry(index);
            self.used[entry].store(head, Relaxed);
            self.used[entry + 1].store(len, Relaxed);
        }
        (self.available_index, self.shown, self.notified) = (base, base, base);
        (self.used_index, self.claimed) = (first, first);
        self.tell();
    }

    /// Writes descriptor `index`.
    #[inline]
    pub fn describe(&self, index: u16, at: Iova, len: u32, flags: u16, next: u16) {
        let i = 2 * usize::from(index);
        let word = u64::from(len) | u64::from(flags) << 32 | u64::from(next) << 48;
        if let Some([address, rest]) = self.descriptors.get(i..i + 2) {
            address.store(at.0, Relaxed);
            rest.store(word, Relaxed);
        }
    }

    /// Puts the chain that begins at descriptor `head` into the available ring. The device sees it after
    /// [`publish`](Self::publish). There are never more chains than descriptors, so there is room.
    #[inline]
    pub fn push(&mut self, head: u16) {
        let entry = low(self.available_index) & (self.size - 1);
        let (word, shift) = (&self.available[1 + usize::from(entry / 2)], 16 * (entry & 1));
        // Only we write here, so this need not be atomic.
        let other = word.load(Relaxed) & !(0xffff << shift);
        word.store(other | u32::from(head) << shift, Relaxed);
        self.available_index += 1;
    }

    /// Shows the device the pushed chains.
    #[inline]
    pub fn publish(&mut self) {
        self.shown = self.available_index;
        self.tell();
    }

    /// For a ring with one chain at a time: if the device has not used the last chain yet, counts it as out.
    pub fn unless_used(&mut self) {
        let [_, used] = halves(self.used[0].load(Acquire));
        if self.available_index > 0 && used == low(self.available_index - 1) {
            (self.used_index, self.claimed) = (self.available_index - 1, self.available_index - 1);
        }
    }

    /// Stores the flags and the index that the device is shown.
    #[inline]
    fn tell(&self) {
        // AVAILABLE.
        self.available[0].store(u32::from(self.flags) | u32::from(low(self.shown)) << 16, Release);
    }

    /// Returns whether the device wants a notification for what was published since the last one.
    pub fn wants_notification(&mut self) -> bool {
        let (new, old) = (self.shown, self.notified);
        if new == old {
            return false;
        }
        self.notified = new;
        // EVENT.
        fence(SeqCst);
        if !self.event_index {
            return self.used[0].load(Relaxed) & NO_NOTIFY == 0;
        }
        let [event, _] = halves(self.used[1 + 2 * usize::from(self.size)].load(Relaxed));
        low(new).wrapping_sub(event).wrapping_sub(1) < low(new).wrapping_sub(low(old))
    }

    /// Returns the place of the entry for `index` in the used ring.
    #[inline]
    fn used_entry(&self, index: u64) -> usize {
        1 + 2 * usize::from(low(index) & (self.size - 1))
    }

    /// Returns the oldest chain that the device has used and we have not [taken](Self::take).
    #[inline]
    pub fn peek(&mut self) -> Result<Option<Used>, NicError> {
        if self.claimed == self.used_index {
            // USED.
            let [_, claimed] = halves(self.used[0].load(Acquire));
            let more = u64::from(claimed.wrapping_sub(low(self.used_index)));
            if more > self.shown - self.used_index {
                return Err(NicError::Absurd { what: "more buffers used than it had", value: claimed.into() });
            }
            self.claimed += more;
            if more == 0 {
                return Ok(None);
            }
        }
        let entry = self.used_entry(self.used_index);
        Ok(self
            .used
            .get(entry..entry + 2)
            .map(|words| Used { head: words[0].load(Relaxed), len: words[1].load(Relaxed) }))
    }

    /// Takes back the chain that `peek` returned.
    #[inline]
    pub fn take(&mut self) {
        self.used_index += 1;
    }

    /// Asks for an interrupt when the next chain is used, and looks once more. Returns whether there is one already.
    pub fn arm(&mut self) -> Result<bool, NicError> {
        if self.event_index {
            // Ask for it at the index of the next used chain. The other half of the word is not read.
            self.available[1 + usize::from(self.size) / 2].store(low(self.used_index).into(), Relaxed);
        } else {
            self.flags = 0;
            self.tell();
        }
        // EVENT.
        fence(SeqCst);
        Ok(self.peek()?.is_some())
    }

    /// Asks for no interrupts for now. With event indices none come until the next [`arm`](Self::arm), except one in
    /// 65,536.
    #[inline]
    pub fn disarm(&mut self) {
        if !self.event_index && self.flags != NO_INTERRUPT {
            self.flags = NO_INTERRUPT;
            self.tell();
        }
    }
}

/// Returns the index as the device counts.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "V3")]
pub fn low(index: u64) -> u16 {
    index as u16
}

/// Returns the low and the high half of a word.
#[expect(clippy::cast_possible_truncation, reason = "halves")]
fn halves(word: u32) -> [u16; 2] {
    [word as u16, (word >> 16) as u16]
}
